"""The lesson of finetune/preference.py: DPO, and a value head on two ranks."""

import math

import torch
from torch import Tensor

import gpt
import sequence_parallel
import sharding
import tensor_parallel
from course import demo, form, ranks
from course.mutations import preference as bugs
from finetune import preference
from optimizer import AdamW, GradientAccumulator

WITHOUT = form.Removals()
WITHOUT["mask"] = form.Removal(
    bugs.padding_in_the_answer,
    "Padding counts as a part of the answer. Does the loss still fall?",
    "Rows have one length, and an answer ends where it ends. What stands behind it is no part of"
    " it: with it, log π(y) belongs to another answer. The loss still begins at log 2 and falls.",
)
WITHOUT["reference"] = form.Removal(
    bugs.no_reference,
    "π_ref is left out. Where does the loss begin?",
    "Now the rewards are log-probabilities. A long answer has a low one, whatever it says. So the"
    " loss begins anywhere, and pulls towards short answers instead of away from the start.",
)
WITHOUT["slice"] = form.Removal(
    bugs.value_gradient_of_every_rank,
    "The gradient of the values is summed over ranks. What is wrong then?",
    "Both ranks have the same loss, so both have the whole gradient of the values. A"
    " reduce-scatter adds the two copies, and every gradient below is twice too large.",
)

B, S, H, V, T = 4, 32, 64, 257, 2
BETA = 0.1
STEPS = 30


# A Llama: no norm has a bias. That of the last one would have a gradient of 0, because the same
# number added to all rewards changes no difference.
CONFIG = demo.tiny_config(llama=True, ffn_hidden_size=172)


# --- a value head on two ranks --------------------------------------------------------------------


def value_head(rank: int) -> dict:
    """One step of a reward model (a Llama, h 64, L 2, float64): two pairs. What its head sends."""
    group = demo.all_ranks()
    model = demo.meta_model(CONFIG)
    if group:
        tensor_parallel.apply(model, group)
        sequence_parallel.apply(model, group)
    preference.apply(model, group, sequence_parallel=bool(group))
    sharding.init(model, 0, "cpu", torch.float64)
    tokens, _ = demo.random_tokens(B, S, V)
    ends = torch.arange(S) == torch.tensor([20, 31, 9, 25]).unsqueeze(1)
    rewards = preference.sum_over_answers(model(tokens), ends)
    loss = preference.reward_loss(*preference.pairs_of(rewards)).mean()
    loss.backward()
    gradients = demo.gathered_gradients(model)
    calls = demo.layer_calls(model.head, demo.zeros(B, S // T if group else S, H))
    return {"loss": loss.item(), "gradients": gradients} | calls


def teach_value_head(lesson: form.Lesson) -> None:
    lesson.predict(
        f"A value head has a norm and v, {H} numbers each. Two sequence-parallel ranks have half of"
        f" the {S} positions each, and both need all values, float64. What does the head send in"
        f" forward, of {B} rows? What in backward?"
    )
    one = ranks.run(value_head, 1)[0]
    # The other mechanisms are removed from DPO.
    removes = lesson.mutate if lesson.without == "slice" else None
    two = ranks.run(form.on_rank, 2, removes, value_head, ())[0]
    forward = [("all-gather", B * S * 8)]
    # The norm's weight and v.
    backward = [("all-reduce", 2 * H * 8)]
    lesson.check(
        f"forward: {demo.format_calls(two['forward'])} bytes = b s 8; backward:"
        f" {demo.format_calls(two['backward'])} = 2 h 8, the gradients of norm and v. That of the"
        " values is on both ranks already: each takes its slice",
        two["forward"] == forward and two["backward"] == backward,
    )
    demo.check_step(lesson, one, two)


# --- DPO ------------------------------------------------------------------------------------------


def some_pairs() -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """(tokens [b, s + 1], mask [b, s], where each answer begins and ends). Chosen answers count up,
    rejected ones are random, and padding follows."""
    tokens, _ = demo.random_tokens(B, S + 1, V, seed=1)
    tokens[1::2, :10] = tokens[0::2, :10]
    spans = [(10, 20), (10, 28), (10, 25), (10, 16)]
    mask = torch.zeros(B, S, dtype=torch.bool)
    for row, (start, end) in enumerate(spans):
        if row % 2 == 0:
            tokens[row, start:end] = torch.arange(start, end)
        tokens[row, end:] = 0
        # A target stands one position before its token.
        mask[row, start - 1 : end - 1] = True
    return tokens, mask, spans


def log_p(model: gpt.GPT, tokens: Tensor, mask: Tensor) -> Tensor:
    """[b]: log π of each answer."""
    return -preference.sum_over_answers(model(tokens[:, :-1], tokens[:, 1:]), mask)


def dpo(rank: int) -> dict:
    """30 steps of DPO on two pairs."""
    model = demo.make_model(CONFIG)
    tokens, mask, spans = some_pairs()
    with torch.no_grad():
        reference = log_p(model, tokens, mask)
        # Each answer alone, without padding.
        alone = []
        for row, (start, end) in zip(tokens, spans):
            losses = model(row[: end - 1].unsqueeze(0), row[1:end].unsqueeze(0))
            alone.append(-losses[0, start - 1 :].sum())
    gradients = GradientAccumulator(model)
    optimizer = AdamW(model.named_parameters(), 0.0)
    losses = []
    for _ in range(STEPS):
        gradients.zero_grad()
        now = log_p(model, tokens, mask)
        pairs = *preference.pairs_of(now), *preference.pairs_of(reference)
        loss = preference.dpo_loss(*pairs, BETA).loss.mean()
        loss.backward()
        optimizer.step(3e-4)
        losses.append(loss.item())
    moved = preference.pairs_of((now - reference).detach())
    return {
        "padding": (reference - torch.stack(alone)).abs().max().item(),
        "losses": losses,
        "moved": [each.mean().item() for each in moved],
    }


def teach_dpo(lesson: form.Lesson) -> None:
    result = lesson.on_ranks(1, dpo)[0]
    lesson.predict(
        "Rows have one length, answers do not. Is log π(y) of a row that is padded the same as"
        " that of the answer alone? Which tokens must count?"
    )
    lesson.check(
        f"differs by {result['padding']:.0e}: the answer's own tokens count, with the one that"
        " ends it. (The prompt would cancel: it is the same in both rows)",
        result["padding"] < 1e-10,
    )
    first, last = result["losses"][0], result["losses"][-1]
    lesson.predict(
        f"DPO, β = {BETA}. What is the loss before the first step, for any model and any β? After"
        f" {STEPS} steps, has log π of the chosen answers grown, and that of the rejected fallen?",
        "loss before the first step",
    )
    lesson.check(
        f"{first:.6f}; log 2 = {math.log(2):.6f}, since π = π_ref and all rewards are 0",
        abs(first - math.log(2)) < 1e-12,
        [first],
    )
    chosen, rejected = result["moved"]
    lesson.check(
        f"loss {last:.3f}; log π(chosen) {chosen:+.1f}, log π(rejected) {rejected:+.1f}. Only the"
        " difference is in the loss: chosen answers may become less likely too",
        last < first / 2 and chosen > rejected,
    )


# --- the lesson -----------------------------------------------------------------------------------


def teach(lesson: form.Lesson) -> None:
    teach_dpo(lesson)
    teach_value_head(lesson)


if __name__ == "__main__":
    form.run("preference")
