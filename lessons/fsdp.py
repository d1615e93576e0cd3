"""The lesson of fsdp.py: two ranks train in each stage, beside the table there.

python fsdp.py
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
import sharding
from lessons import demo, form
from optimizer import AdamW
from proof import ranks
from proof.mutations import data_parallel as bugs

WITHOUT = {
    "reduce-scatter": bugs.no_reduce_scatter,
    "all-gather": bugs.no_all_gather,
    "parameter-gather": bugs.no_parameter_gather,
    "free": bugs.stale_parameters,
}

# the answers to what break_it asks
WHY = {
    "reduce-scatter": (
        "Stage 0: it sums by an all-reduce. In stages 1 to 3 a shard learns from the samples"
        " of one rank. All ranks still gather the same parameters after the update, so they do"
        " not differ from each other."
    ),
    "parameter-gather": (
        "After the first update that changes something: in stages 1 and 2 a rank has old"
        " values of the other's shard. Gradients are right here because the step before had a"
        " learning rate of 0. Stage 3 gathers before each use."
    ),
    "all-gather": (
        "Stage 0 gathers nothing, and is right. In stages 1 and 2 half of the model is 0"
        " after the first update, another half on each rank; in stage 3 in every forward."
        " Memory is the same: zeros need as many bytes."
    ),
    "free": (
        "It is not gathered again, so less is sent, and after an update the model computes"
        " with old parameters. Gradients are right here because the step before had a learning"
        " rate of 0."
    ),
}

# ranks; micro-batches of each; sequences of all ranks and micro-batches together
N, M, B = 2, 2, 8
S, V = 32, 512
SHAPE = dict(ffn_hidden_size=176, llama=True, seq_length=S, vocab_size=V)
# bytes of a parameter in fp32: itself, its gradient, two moments
BYTES = 4, 4, 8


def held_bytes(model: nn.Module, gradients: fsdp.DataParallel) -> tuple[int, int]:
    """(parameters, gradients) that this rank holds now, in bytes."""
    parameters = list(model.parameters())
    shards = [sharding.local_part(p) for p in parameters]
    flat = [unit.local_grads for unit in gradients.units]
    flat += [unit.summed_grads for unit in gradients.units]
    return storage_bytes(parameters + shards), storage_bytes(flat)


def storage_bytes(tensors: list[Tensor | None]) -> int:
    """Each storage counts once; a freed one has 0 bytes."""
    sizes = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def elements(calls: list[tuple[str, int]]) -> int:
    """fp32 numbers in the collectives of a step, an all-reduce counted twice."""
    total = 0
    for kind, size in calls:
        # the norm of the gradient is one number
        if size > 64:
            total += size // 4 * (2 if kind == "all-reduce" else 1)
    return total


def count_whole_units(gradients: fsdp.FullySharded) -> list[int]:
    """The units that are whole, or on their way, after each call of `gather`: filled later."""
    counts = []
    gather = gradients.gather

    def gather_and_count(now: list, next_units: list) -> None:
        gather(now, next_units)
        units = gradients.units
        counts.append(sum(bool(u.gathering or u.whole.untyped_storage().size()) for u in units))

    gradients.gather = gather_and_count
    return counts


def difference_to_first_rank(model: nn.Module) -> float:
    """The largest difference of a parameter between this rank and rank 0."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    return (mine - first).abs().max().item()


def measure(stage: int, n: int, m: int) -> dict:
    """Two steps of m micro-batches on each of n ranks, as train.py makes them. The first has a
    learning rate of 0; the second one is measured."""
    model = demo.meta_model(demo.tiny_config(**SHAPE))
    init = partial(sharding.init, model, 0, "cpu", torch.float32)
    gradients = fsdp.apply(model, dist.group.WORLD, stage, init=init)
    optimizer = AdamW(sharding.named_parameters(model))
    whole_units = count_whole_units(gradients) if stage == 3 else []
    # [B / n / m, S] for each micro-batch of this rank
    mine = [x.chunk(n)[dist.get_rank()].chunk(m) for x in demo.random_tokens(B, S, V)]
    for learning_rate in (0.0, 1e-3):
        with ranks.Collectives() as sent:
            gradients.zero()
            for k, (tokens, targets) in enumerate(zip(*mine)):
                if k == m - 1:
                    gradients.last_backward()
                model(tokens, targets).sum().backward(torch.tensor(1 / (B * S)))
            gradients.reduce_gradients()
            optimizer.step(learning_rate)
            gradients.gather_parameters()
    moments = [*optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()]
    return {
        "held": (*held_bytes(model, gradients), storage_bytes(moments)),
        "sent": elements(sent.calls),
        "whole_units": (max(whole_units, default=0), len(gradients.units)),
        "gradients": demo.gathered_gradients(model),
        "difference": 0.0 if stage == 3 else difference_to_first_rank(model),
    }


def on_rank(rank: int, n: int, m: int, stages: tuple[int, ...], mutate) -> list[dict]:
    if mutate:
        mutate()
    return [measure(stage, n, m) for stage in stages]


def teach_bytes(lesson: form.Lesson, stages: list[dict], psi: int) -> None:
    lesson.predict(
        f"A Llama of Ψ = {psi:,} parameters in fp32: 4 bytes each, 4 for its gradient, 8 for two"
        f" moments. How many bytes for a parameter has each of {N} ranks, in stage 0 (nothing is"
        " sharded), 1 (moments), 2 (and gradients), 3 (and parameters)?"
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
        "parameters █, gradients ▒, moments ░, each as in the formula; in all 16, 12, 10 and 8 Ψ",
        right,
    )


def teach_units(lesson: form.Lesson, stage_3: dict) -> None:
    most, units = stage_3["whole_units"]
    lesson.predict(
        f"Stage 3 gathers a layer's parameters while the layer before it computes. The model has"
        f" {units} layers: embedding, 2 blocks, head. How many are whole at one time, at most?"
    )
    lesson.check(f"{most}: the one that computes, and the next one", most == 2)
    lesson.break_it(
        "free", "A layer that was gathered stays whole. What else goes wrong?", WHY["free"]
    )


def teach(lesson: form.Lesson) -> None:
    reference = ranks.run(on_rank, 1, 1, 1, (0,), None)[0][0]["gradients"]
    results = ranks.run(on_rank, N, N, M, (0, 1, 2, 3), lesson.mutate)
    stages = results[0]
    psi = sum(gradient.numel() for gradient in reference.values())
    teach_bytes(lesson, stages, psi)

    lesson.predict(
        f"Stages 0 and 1 send gradients once in a step of m = {M} micro-batches, 2 and 3 after"
        " each one. Stage 3 gathers parameters for each forward and each backward. How many"
        " elements does a rank send, in Ψ (N-1)/N? An all-reduce counts twice."
    )
    sent = [measured["sent"] / psi for measured in stages]
    formulas = [fsdp.elements_sent(stage, M) for stage in range(4)]
    lesson.check(
        ", ".join(f"{n:.3f}" for n in sent) + "; by formula 2, 2, m + 1, 3 m", sent == formulas
    )

    lesson.predict("Do the gradients differ from those of one rank without micro-batches?")
    worst = [demo.largest_difference(reference, measured["gradients"]) for measured in stages]
    lesson.check(
        "largest relative difference, stages 0 to 3: " + ", ".join(f"{x:.0e}" for x in worst),
        all(x < 1e-5 for x in worst),
    )
    lesson.break_it(
        "reduce-scatter",
        "Each rank keeps its own gradient. Which stage is right?",
        WHY["reduce-scatter"],
    )

    lesson.predict("And do the ranks have the same parameters after the optimizer's step?")
    apart = max(measured["difference"] for rank in results for measured in rank)
    lesson.check(f"the largest difference between two ranks, stages 0 to 2: {apart}", apart == 0)
    lesson.break_it(
        "parameter-gather",
        "Each rank updates its own shard. When does it show?",
        WHY["parameter-gather"],
    )
    lesson.break_it(
        "all-gather", "Zeros stand where the other rank's shard should be.", WHY["all-gather"]
    )
    teach_units(lesson, stages[3])
