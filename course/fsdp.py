"""The lesson of fsdp.py: two ranks train in each stage, beside the table there."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
import sharding
from course import demo, form, ranks
from course.mutations import data_parallel as bugs
from optimizer import AdamW
from sharding import FlatParameters

WITHOUT = form.Removals()
WITHOUT["reduce-scatter"] = form.Removal(
    bugs.no_reduce_scatter,
    "Each rank keeps its own gradient. Which stage is right?",
    "Stage 0: it sums by an all-reduce. In stages 1 to 3 a shard learns from the samples of one"
    " rank. All ranks still gather the same parameters after the update, so they do not differ from"
    " each other.",
)
WITHOUT["all-gather"] = form.Removal(
    bugs.no_all_gather,
    "Zeros stand in the place of the other shard.",
    "Stage 0 gathers nothing, and is right. In stages 1 and 2 half of the model is 0 after the"
    " first update, another half on each rank; in stage 3 in every forward. Memory is the same:"
    " zeros need as many bytes.",
)
WITHOUT["parameter-gather"] = form.Removal(
    bugs.no_parameter_gather,
    "Each rank updates its own shard. When does it show?",
    "After the first update that changes something: in stages 1 and 2 a rank has old values of the"
    " other's shard. Gradients are right here because the step before had a learning rate of 0."
    " Stage 3 gathers before each use.",
)
WITHOUT["free"] = form.Removal(
    bugs.stale_parameters,
    "A gathered layer stays whole. What else goes wrong?",
    "It is not gathered again, so less is sent, and after an update the model computes with old"
    " parameters. Gradients are right here because the step before had a learning rate of 0.",
)


@WITHOUT.add("last-shard", "Shards with padding are not copied. What is lost?")
def no_last_shard(original=FlatParameters.views) -> None:
    """The rows that stand before the padding: weight[3:5]. T is right, for it follows from the
    shapes; the bias has only full shards, so it is whole, and so is all of the Llama."""
    FlatParameters.views = lambda *arguments: [next(original(*arguments))]


# Ranks; micro-batches of each; sequences of all ranks and micro-batches together.
N, M, B = 2, 2, 8
S, V = 32, 512
SHAPE = dict(ffn_hidden_size=176, llama=True, seq_length=S, vocab_size=V)
# Bytes of a parameter in fp32: itself, its gradient, two moments.
BYTES = 4, 4, 8


def held_bytes(model: nn.Module, gradients: fsdp.DataParallel) -> tuple[int, int]:
    """(parameters, gradients) that this rank holds now, in bytes."""
    parameters = list(model.parameters())
    shards = [sharding.local_part(p) for p in parameters]
    flat = [unit.local_grads for unit in gradients.units]
    flat += [unit.summed_grads for unit in gradients.units]
    return storage_bytes(parameters + shards), storage_bytes(flat)


def storage_bytes(tensors: list[Tensor | None]) -> int:
    """Each storage counts once. A parameter that is freed has a storage of one number, which does
    not count."""
    storages = {}
    for x in tensors:
        if x is not None and x.untyped_storage().nbytes() >= x.nbytes:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


def elements(calls: list[tuple[str, int]]) -> int:
    """fp32 numbers in the collectives of a step, an all-reduce counted twice."""
    total = 0
    for kind, size in calls:
        # The norm of the gradient is one number.
        if size > 64:
            total += size // 4 * (2 if kind == "all-reduce" else 1)
    return total


def difference_to_first_rank(model: nn.Module) -> float:
    """The largest difference of a parameter between this rank and rank 0."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    return (mine - first).abs().max().item()


def measure(stage: int, m: int) -> dict:
    """Two steps of m micro-batches on each rank, as train.py makes them. The first has a
    learning rate of 0; the second one is measured."""
    model = demo.meta_model(demo.tiny_config(**SHAPE))
    init = partial(sharding.init, model, 0, "cpu", torch.float32)
    gradients = fsdp.apply(model, dist.group.WORLD, stage, init=init, may_skip=False)
    optimizer = AdamW(sharding.named_parameters(model))
    # [B / n / m, S] for each micro-batch of this rank
    mine = [
        x.chunk(dist.get_world_size())[dist.get_rank()].chunk(m)
        for x in demo.random_tokens(B, S, V)
    ]
    for learning_rate in (0.0, 1e-3):
        with ranks.Collectives() as sent:
            gradients.zero_grad()
            for k, (tokens, targets) in enumerate(zip(*mine)):
                if k == m - 1:
                    gradients.next_backward_is_last()
                model(tokens, targets).sum().backward(torch.tensor(1 / (B * S)))
            gradients.reduce_gradients()
            optimizer.step(learning_rate)
            gradients.renew_parameters()
            gradients.wait_for_parameters()
    moments = [*optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()]
    return {
        "held": (*held_bytes(model, gradients), storage_bytes(moments)),
        "sent": elements(sent.calls),
        "gradients": demo.gathered_gradients(model),
        "difference": 0.0 if stage == 3 else difference_to_first_rank(model),
    }


def on_rank(rank: int, m: int, stages: tuple[int, ...]) -> list[dict]:
    return [measure(stage, m) for stage in stages]


def whole_bytes(rank: int, ahead: bool) -> tuple[int, int]:
    """Stage 3, the second step: (the most bytes of whole parameters, there or on their way, while a
    block computes; the bytes of a block). ahead: gather a layer while the one before computes."""
    if not ahead:
        fsdp.FullySharded.start_gathers_of = lambda self, layer: False
    model = demo.meta_model(demo.tiny_config(**SHAPE))
    init = partial(sharding.init, model, 0, "cpu", torch.float32)
    gradients = fsdp.apply(model, dist.group.WORLD, 3, init=init, may_skip=False)
    found = []

    def note(*_) -> None:
        flat = [unit.gathering[0] for unit in gradients.units if unit.gathering]
        found.append(storage_bytes([unit.whole for unit in gradients.units] + flat))

    for block in model.blocks.values():
        # Before the hook that frees the block.
        block.register_forward_hook(note, prepend=True)
    tokens, targets = demo.random_tokens(B, S, V)
    for _ in range(2):
        found.clear()
        model(tokens, targets).sum().backward()
    # The head comes after the last block.
    return max(found[:-1]), 4 * sum(p.numel() for p in block.parameters())


@torch.no_grad()
def flat_rows(rank: int) -> Tensor:
    """[N, T]: weight [5, 2] with elements 0 to 9, bias [2] with 10 and 11. Padding is NaN."""
    parameters = [nn.Parameter(torch.arange(10.0).view(5, 2)), nn.Parameter(torch.arange(10.0, 12))]
    layout = FlatParameters(parameters, N)
    flat = torch.full((layout.N, layout.T), torch.nan)
    for p in parameters:
        for in_flat, in_whole in layout.views(flat, p, p):
            in_flat.copy_(in_whole)
    return flat


def teach_flat(lesson: form.Lesson) -> None:
    lesson.predict(
        "Stages 1 to 3 shard a layer's parameters as one tensor [N, T]. Of weight [5, 2] and bias"
        " [2], for N = 2, both sharded by rows: how large is T? How many elements are padding?",
        "T; elements of padding",
    )
    flat = lesson.on_ranks(1, flat_rows)[0]
    for rank, row in enumerate(flat):
        cells = " ".join("  -" if x.isnan() else f"{x:3.0f}" for x in row)
        lesson.say(f"rank {rank}  {cells}")
    padding = flat.isnan().sum().item()
    lesson.check(
        f"T = {flat.shape[1]} = 3 · 2 + 1; padding {padding} = 2 · 7 - 12",
        (flat.shape[1], padding) == (7, 2),
        [flat.shape[1], padding],
    )


def teach_bytes(lesson: form.Lesson, stages: list[dict], psi: int) -> None:
    lesson.predict(
        f"A Llama of Ψ = {psi:,} parameters in fp32: 4 bytes each, 4 for its gradient, 8 for two"
        f" moments. Bytes for a parameter on each of {N} ranks, in stage 0 (nothing is sharded),"
        " 1 (moments), 2 (and gradients), 3 (and parameters)?",
        "stage 0; stage 1; stage 2; stage 3",
    )
    right = True
    for stage, measured in enumerate(stages):
        formula = [psi * n for n in fsdp.bytes_per_parameter(stage, N, *BYTES)]
        right &= list(measured["held"]) == formula
        bars = [form.bar(size, psi * sum(BYTES), 48) for size in measured["held"]]
        picture = bars[0] + bars[1].replace("█", "▒") + bars[2].replace("█", "░")
        total = sum(measured["held"])
        lesson.say(f"stage {stage}  {total:>10,} = {total / psi:>4.1f} Ψ  {picture}")
    lesson.check(
        "parameters █, gradients ▒, moments ░, as in the formula: 16, 12, 10 and 8 Ψ",
        right,
        [sum(measured["held"]) / psi for measured in stages],
    )


def teach(lesson: form.Lesson) -> None:
    teach_flat(lesson)
    reference = ranks.run(on_rank, 1, 1, (0,))[0][0]["gradients"]
    results = lesson.on_ranks(N, on_rank, M, (0, 1, 2, 3))
    stages = results[0]
    psi = sum(gradient.numel() for gradient in reference.values())
    teach_bytes(lesson, stages, psi)

    lesson.predict(
        f"Stages 0 and 1 send gradients once in a step of m = {M} micro-batches, 2 and 3 after"
        " each one. Stage 3 gathers parameters for each forward and each backward. How many"
        " elements does a rank send, in Ψ (N-1)/N? An all-reduce counts twice.",
        "stage 0; stage 1; stage 2; stage 3",
    )
    sent = [measured["sent"] / psi for measured in stages]
    formulas = [fsdp.elements_sent(stage, M) for stage in range(4)]
    lesson.check(
        ", ".join(f"{n:.3f}" for n in sent) + "; by formula 2, 2, m + 1, 3 m",
        sent == formulas,
        sent,
    )

    lesson.predict(
        "In stage 3 the next block is gathered while one computes. How many whole blocks are in"
        " memory then? And if nothing were gathered ahead?",
        "blocks; blocks without",
    )
    found = [lesson.on_ranks(N, whole_bytes, ahead)[0] for ahead in (True, False)]
    blocks = [most / block for most, block in found]
    lesson.check(
        f"{blocks[0]:.0f} and {blocks[1]:.0f}: a block of {found[0][1]:,} bytes more, and the"
        " all-gather costs no time where the computation takes longer",
        blocks == [2, 1],
        blocks,
    )

    lesson.predict("Do the gradients differ from those of one rank without micro-batches?")
    worst = [demo.largest_difference(reference, measured["gradients"]) for measured in stages]
    lesson.check(
        "largest relative difference, stages 0 to 3: " + ", ".join(f"{x:.0e}" for x in worst),
        all(x < 1e-5 for x in worst),
    )

    lesson.predict("And do the ranks have the same parameters after the optimizer's step?")
    apart = max(measured["difference"] for rank in results for measured in rank)
    lesson.check(f"the largest difference between two ranks, stages 0 to 2: {apart}", apart == 0)


if __name__ == "__main__":
    form.run("fsdp")
