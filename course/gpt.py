"""The lesson of gpt.py: what can be known of a model before it is trained."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt
from course import demo, form

L, H, S, V = 2, 64, 32, 257
# The position of the token that is changed.
CHANGED = 10


class UnmaskedAttention(nn.Module):
    """gpt.FusedAttention in which every token sees every token."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: gpt.Context) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


WITHOUT = form.Removals()


@WITHOUT.add("mask", "The loss is still ln V. What would training learn?")
def no_mask(model: gpt.GPT) -> None:
    """To copy: the target of a position is the next token, and attention now sees it. The loss
    falls to almost 0, and the model cannot generate. Before training nothing is copied yet, so the
    loss is ln V."""
    for block in model.blocks.values():
        block.attention.core = UnmaskedAttention()


@torch.no_grad()
@WITHOUT.add("small-weights", "Weights are 10 times as large. Is the loss smaller or larger?")
def no_small_weights(model: gpt.GPT) -> None:
    """Larger. Logits are then large and random: the model is sure of a token, which is nearly
    always a wrong one. Small logits make all tokens equally likely, and the loss ln V."""
    for p in model.parameters():
        if p.dim() == 2:
            p.mul_(10)


@torch.no_grad()
@WITHOUT.add("residual-scale", "The loss is still ln V. For which L would it matter?")
def no_residual_scale(model: gpt.GPT) -> None:
    """For a large L. Then 2 L sums add up to a residual stream whose variance grows with L. The
    loss before training does not show it, for the last norm divides by the size of the stream."""
    for block in model.blocks.values():
        for linear in (block.attention.output, block.mlp.down):
            linear.weight.mul_(math.sqrt(2 * L))


def count_parameters(model: gpt.GPT) -> dict[str, int]:
    """Parameters of each part of the model. The tied matrix is in the embedding."""
    parts = {"embedding": 0, "attention": 0, "MLP": 0, "norms": 0}
    for name, p in model.named_parameters():
        if "norm" in name:
            part = "norms"
        elif ".attention." in name:
            part = "attention"
        else:
            part = "MLP" if ".mlp." in name else "embedding"
        parts[part] += p.numel()
    return parts


def changed_rows(model: gpt.GPT, tokens: Tensor) -> list[int]:
    """The positions whose logits change with the token at CHANGED."""
    other = tokens.clone()
    other[:, CHANGED] = (other[:, CHANGED] + 1) % V
    return demo.positions_changed(model(tokens), model(other))


def teach_causality(lesson: form.Lesson, model: gpt.GPT, tokens: Tensor) -> None:
    lesson.predict(
        f"Positions are 0 to {S - 1}. The token at {CHANGED} is changed. At how many positions do"
        " the logits change?",
        "positions",
    )
    rows = changed_rows(model, tokens)
    lesson.check(
        f"{len(rows)}, from {rows[0]} to {rows[-1]}: a token sees itself and earlier ones,"
        f" {S} - {CHANGED} = {S - CHANGED}",
        rows == list(range(CHANGED, S)),
        [len(rows)],
    )


@torch.no_grad()
def teach(lesson: form.Lesson) -> None:
    model = gpt.GPT(demo.tiny_config())
    if lesson.mutate:
        lesson.mutate(model)
    lesson.predict(
        f"A GPT: L {L} layers, h {H}, V {V}, positions for {S} tokens. How many parameters? In a"
        " layer, attention has four matrices h x h, the MLP has h x 4h and 4h x h. Embedding and"
        " head are one matrix.",
        "parameters",
    )
    parts = count_parameters(model)
    formula = 12 * L * H * H + 13 * L * H + (V + S) * H + 2 * H
    lesson.check(
        f"{sum(parts.values()):,}; 12 L h² in matrices, 13 L h in biases and norms, (V + {S}) h in"
        f" embeddings, 2 h in the last norm: {formula:,}",
        sum(parts.values()) == formula,
        [sum(parts.values())],
    )
    lesson.bars(parts)

    lesson.predict(
        f"Before training, all {V} tokens are about equally likely. What is the loss?", "loss"
    )
    tokens, targets = demo.random_tokens(8, S, V)
    loss = model(tokens, targets).mean().item()
    lesson.check(f"{loss:.3f}; ln V = {math.log(V):.3f}", abs(loss - math.log(V)) < 0.05, [loss])

    lesson.predict(
        "Initial weights have standard deviation 0.02. Two matrices of each layer add to the"
        " residual stream: the last of attention and of the MLP. Their standard deviation is"
        f" smaller, so that 2 L sums add up to the variance of one. What is it for L = {L}?",
        "standard deviation",
    )
    block = model.blocks["0"]
    deviations = [w.std().item() for w in (block.attention.output.weight, block.mlp.down.weight)]
    expected = 0.02 / math.sqrt(2 * L)
    lesson.check(
        f"{deviations[0]:.4f} and {deviations[1]:.4f}; 0.02 / √(2 L) = {expected:.4f}",
        all(abs(deviation / expected - 1) < 0.05 for deviation in deviations),
        [expected],
    )
    teach_causality(lesson, model, tokens)


if __name__ == "__main__":
    form.run("gpt")
