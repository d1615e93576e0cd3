"""The lesson of moe.py: experts on one rank, and on two with half of the experts each."""

import torch
import torch.distributed as dist

import fsdp
import gpt
import moe
import schedules
import sharding
from base.model_config import MoEConfig
from course import demo, form, ranks
from course.mutations import moe as bugs
from schedules import Cost

WITHOUT = form.Removals()
WITHOUT["combine-exchange"] = form.Removal(
    bugs.no_combine_exchange,
    "Tokens go to experts and their results do not come back. Why does no rank hang?",
    "Every rank leaves out the same call, so no rank waits for another. Rows of the right shape"
    " stand where results should come back, but they are of other tokens: loss and gradients are"
    " wrong.",
)
WITHOUT["gradients-back"] = form.Removal(
    bugs.no_expert_gradients_back,
    "The loss is right. Which parameters learn nothing?",
    "The experts: the results of experts travel through the exchange, so no gradient reaches their"
    " matrices. The router learns, for probabilities are multiplied in after the rows are back.",
)
WITHOUT["own-probabilities"] = form.Removal(
    bugs.probabilities_of_other_tokens,
    "All rows travel as they should. What is wrong?",
    "A token's result is multiplied by the probability of another token. Rows are sent as before,"
    " so all counts and bytes hold; loss and gradients do not.",
)
WITHOUT["expert-group"] = form.Removal(
    bugs.experts_summed_over_all,
    "The loss is right. Whose gradients are summed here?",
    "Rank 0 has experts 0 and 1, rank 1 has 2 and 3. Here the gradients of experts 0 and 2 are"
    " added, and of 1 and 3, as if they were copies of one. The loss is computed before.",
)


@WITHOUT.replace("shared", moe.SharedExperts, "forward", "No shared expert. Who computes nothing?")
def no_shared(self, x: torch.Tensor, context=gpt.PLAIN) -> torch.Tensor:
    """A token that its expert has no room for: the residual alone goes on. What all tokens need,
    each expert then has to learn for itself."""
    return torch.zeros_like(x)


# Two micro-batches of B sequences; E experts in each of L layers.
B, S, H, V = 4, 32, 64, 257
L, E = 2, 4
TOKENS = B * S
FFN = 4 * H


def on_rank(rank: int) -> dict:
    """One step in float64. Two ranks have one micro-batch each, and half of the experts."""
    model = demo.meta_model(demo.tiny_config(MoEConfig, num_experts=E))
    moe.apply(model, demo.all_ranks())
    sharding.init(model, 0, "cpu", torch.float64)
    # No other rank holds the same experts.
    alone = demo.singleton_group()
    gradients = fsdp.apply(model, dist.group.WORLD, expert_group=alone)
    tokens, targets = (x.chunk(2) for x in demo.random_tokens(2 * B, S, V))
    # The next backward is the step's last.
    gradients.next_backward_is_last()
    mine = range(rank, 2, dist.get_world_size())
    with ranks.Collectives() as forward:
        losses = [model(tokens[k], targets[k]).sum() for k in mine]
    loss_grad = torch.tensor(1 / (2 * TOKENS), dtype=torch.float64)
    with ranks.Collectives() as backward:
        torch.autograd.backward(losses, [loss_grad] * len(losses))
        gradients.reduce_gradients()
    return {
        "loss": sum(loss.item() for loss in losses) / (2 * TOKENS),
        "gradients": demo.gathered_gradients(model),
        "forward": all_to_alls(forward),
        "backward": all_to_alls(backward),
    }


def all_to_alls(counted: ranks.Collectives) -> list[int]:
    """Bytes of each."""
    return [size for name, size in counted.calls if name == "all-to-all"]


def teach_exchanges(lesson: form.Lesson, forward: list[int], backward: list[int]) -> None:
    """The all-to-alls of a step. forward, backward: the bytes of each, in order."""
    lesson.predict(
        f"A micro-batch is {TOKENS} tokens of {H} numbers of 8 bytes. How many all-to-alls has a"
        " layer in forward, and in backward? What do they carry?",
        "in forward; in backward",
    )
    for name, sizes in (("forward", forward), ("backward", backward)):
        words = ", ".join(f"{size:,}" for size in sizes)
        lesson.say(f"bytes, {L} layers, {name}: {words or 'none'}")
    rows = [size for size in forward if size != E * 8]
    lesson.check(
        f"forward 3: E 8 bytes of counts, rows there, rows back; backward 2, in reverse. Each"
        f" number is the larger of what a rank sends, {TOKENS * H * 8:,} bytes of rows with those"
        " for itself, and what it receives",
        len(forward) == 3 * L and backward == rows[::-1] and min(rows) >= TOKENS * H * 8,
        [len(forward) / L, len(backward) / L],
    )


def teach_overlap(lesson: form.Lesson) -> None:
    """A pipeline in which a forward and a backward run in turns (base/turns.py)."""
    p, m, v = 4, 16, 2
    lesson.predict(
        f"A pipeline, p {p}, v {v}, m {m}: F, I and W compute for 1 each, and the all-to-alls of F"
        " and of I take 1 too. How much faster is a step in which they travel beside another"
        " micro-batch's computation? At most 5 / 3.",
        "faster by the factor",
    )
    cost = Cost(2 / v, 2 / v, 1 / v, exchange=1 / v)
    plain, overlap = (schedules.make("interleaved", p, m, v, overlap) for overlap in (False, True))
    joined = [schedules.join_pairs(actions) for actions in overlap]
    ends = [max(e.end for e in schedules.simulate(lists, cost)) for lists in (plain, joined)]
    lesson.check(
        f"{ends[0]:g} / {ends[1]:g} = {ends[0] / ends[1]:.2f}: warmup has nothing to join",
        1.4 < ends[0] / ends[1] < 5 / 3,
        [ends[0] / ends[1]],
    )


def teach_shared(lesson: form.Lesson, dense_flops: int) -> None:
    lesson.predict(
        f"A shared expert of {FFN // 2} beside them: all tokens go through. FLOPs of both, in those"
        " of the MLP? Which part of y has a token that its expert drops?",
        "times the FLOPs",
    )
    config = demo.tiny_config(MoEConfig, num_experts=E, shared_ffn_size=FFN // 2)
    layer, x = moe.MoE(config), torch.ones(B, S, H)
    with lesson.removed():
        both = demo.flops(lambda: layer(x)) - 2 * TOKENS * H * E
        alone = layer.shared(x)
    # All experts drop all rows.
    layer.experts = lambda rows, counts: torch.zeros_like(rows)
    with lesson.removed():
        same = layer(x).equal(alone) and bool(alone.any())
    lesson.check(
        f"{both / dense_flops:g}; without its expert, y is the shared one's: {same}",
        both == 1.5 * dense_flops and same,
        [both / dense_flops],
    )


def teach(lesson: form.Lesson) -> None:
    dense = gpt.MLP(demo.tiny_config())
    experts = moe.MoE(demo.tiny_config(MoEConfig, num_experts=E))
    torch.nn.init.zeros_(experts.router.weight)
    lesson.predict(
        f"An MLP ({H} -> {FFN} -> {H}) becomes {E} experts; each token goes through k = 1. How do"
        " the numbers in matrices grow, and the FLOPs of a micro-batch?",
        "numbers grow by the factor; FLOPs grow by the factor",
    )
    weights = sum(p.numel() for name, p in experts.named_parameters() if "router" not in name)
    dense_weights = sum(p.numel() for p in dense.parameters() if p.dim() == 2)
    router = 2 * TOKENS * H * E
    micro_batch = torch.zeros(B, S, H)
    dense_flops = demo.flops(lambda: dense(micro_batch))
    flops = demo.flops(lambda: experts(micro_batch)) - router
    lesson.check(
        f"numbers {dense_weights:,} -> {weights:,}, times E; FLOPs {dense_flops:,} -> {flops:,},"
        f" and 2 b s h E = {router:,} for the router",
        weights == E * dense_weights and flops == dense_flops,
        [weights / dense_weights, flops / dense_flops],
    )
    teach_shared(lesson, dense_flops)

    one, two = lesson.one_and_many(2, on_rank)
    lesson.predict(
        "Two micro-batches on one rank, or one on each of two ranks: do loss and gradients differ?"
    )
    demo.check_step(lesson, one, two[0] | {"loss": sum(result["loss"] for result in two)})
    teach_exchanges(lesson, two[0]["forward"], two[0]["backward"])
    teach_overlap(lesson)


if __name__ == "__main__":
    form.run("moe")
