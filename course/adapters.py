"""The lesson of finetune/adapter_layers.py: LoRA beside all weights, two ranks beside one, and the
merge."""

from unittest import mock

import torch
from torch import Tensor

import gpt
import sharding
import tensor_parallel
from course import demo, form
from course.mutations import adapters as bugs
from finetune import adapter_layers
from finetune.adapter_layers import LINEARS, AdapterConfig
from optimizer import AdamW, GradientAccumulator

WITHOUT = form.Removals()
WITHOUT["f"] = form.Removal(
    bugs.no_lora_f,
    "f is left out of LoRA. What is sent, and what goes wrong?",
    "A is whole on each rank, but a rank has only some rows of B. So each rank computes only a"
    " part of A's gradient, and of the gradient that goes back to x through A. f adds the parts."
    " Without it there are two all-reduces fewer, the same loss, and wrong gradients.",
)
WITHOUT["scale"] = form.Removal(
    bugs.no_lora_scale,
    "α/r is left out. What is sent, and what goes wrong?",
    "The two ranks add B A x, where one rank adds α/r B A x. The merge has α/r too. What is sent"
    " does not change. α is a part of the adapter: A and B alone do not tell it, so a checkpoint"
    " must.",
)

B, S, H, V = 8, 32, 64, 257
CONFIG = AdapterConfig("lora", lora_rank=8, lora_alpha=16.0)
R = CONFIG.lora_rank
TOKENS, TARGETS = demo.random_tokens(B, S, V)


# --- bytes ----------------------------------------------------------------------------------------


def lora_model(dtype: torch.dtype, group=None) -> gpt.GPT:
    """A frozen GPT (h 64, L 2, a 4, V 257) with LoRA of every linear layer. B is not 0, as after
    some steps: at 0, A would have no gradient."""
    model = demo.meta_model(demo.tiny_config())
    model.requires_grad_(False)
    if group:
        tensor_parallel.apply(model, group)
    adapter_layers.apply(model, CONFIG, group)
    with mock.patch.object(adapter_layers, "OUTPUT_STD", 0.02):
        sharding.init(model, 0, "cpu", dtype)
    return model


def training_bytes(model: gpt.GPT) -> int:
    """Bytes of weights, gradients, masters and moments, after one step."""
    gradients = GradientAccumulator(model)
    optimizer = AdamW([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    model(TOKENS, TARGETS).mean().backward()
    held = [*model.parameters(), *(p.main_grad for p in gradients.parameters)]
    optimizer.step(1e-3)
    return sum(tensor.nbytes for tensor in [*held, *optimizer.tensors().values()])


def teach_bytes(lesson: form.Lesson) -> None:
    full = demo.make_model(demo.tiny_config(), dtype=torch.bfloat16)
    base = sharding.num_parameters(full)
    n = 2 * (4 * R * 2 * H + 2 * R * 5 * H)
    lesson.predict(
        f"A GPT of h = {H}, L = 2 has N = {base:,} weights. Each layer has 4 matrices [h, h]"
        f" and 2 of [4h, h]. Each gets a LoRA of rank r = {R}. In bf16 a weight needs 2 bytes. If"
        " it learns, its gradient needs 4, its float32 master 4, its two moments 8. How many bytes"
        " does training all weights need? LoRA?",
        "bytes, all weights; bytes, LoRA",
    )
    of_full, of_lora = training_bytes(full), training_bytes(lora_model(torch.bfloat16))
    lesson.check(
        f"all weights 18 N = {of_full:,}; LoRA 2 N + 18 n = {of_lora:,}: the frozen base has 2 N,"
        f" and n = L (4 · r 2h + 2 · r 5h) = {n:,} learn, {n / base:.0%} of N",
        of_full == 18 * base and of_lora == 2 * base + 18 * n,
        [of_full, of_lora],
    )


# --- two ranks ------------------------------------------------------------------------------------


def on_rank(rank: int) -> dict:
    """One step in float64, what a layer sends, and the logits of the merged model."""
    model = lora_model(torch.float64, demo.all_ranks())
    step = demo.one_step(model, TOKENS, TARGETS)
    calls = demo.layer_calls(model.blocks["0"], demo.zeros(B, S, H))
    weights = {
        name: sharding.gather(p.detach(), sharding.sharding_of(p))
        for name, p in sharding.named_parameters(model)
    }
    with torch.no_grad():
        logits = {"logits": model(TOKENS), "merged": merged_model(weights)(TOKENS)}
    return step | calls | logits


def merged_model(weights: dict[str, Tensor]) -> gpt.GPT:
    """A GPT without LoRA, of W + α/r B A where LoRA has W, A and B."""
    model = gpt.GPT(demo.tiny_config()).double()
    for name, p in model.named_parameters():
        p.copy_(weights[name])
        layer = name.removesuffix(".weight")
        if layer.split(".")[-1] in LINEARS and name.endswith(".weight"):
            update = weights[f"{layer}.lora.b"] @ weights[f"{layer}.lora.a"]
            p.add_(update, alpha=CONFIG.lora_alpha / R)
    return model


def teach_ranks(lesson: form.Lesson, two: dict, one: dict) -> None:
    lesson.predict(
        "Two tensor-parallel ranks, float64. A layer without LoRA has 2 all-reduces of b s h"
        " numbers in forward and 2 in backward. How many with LoRA? How many bytes has each?",
        "in forward; bytes of each of these; in backward",
    )
    token = B * S * 8
    forward = [("all-reduce", token * (H + R))] * 2
    lesson.check(
        f"forward {len(two['forward'])}, each b s (h + r) 8 = {token * (H + R):,}: in a"
        " row-parallel layer one all-reduce (g) sums W x and A x side by side",
        two["forward"] == forward,
        [len(two["forward"]), token * (H + R)],
    )
    backward = [("all-reduce", token * n) for n in (H, H, R, 3 * R)]
    lesson.check(
        f"backward {len(two['backward'])}: twice b s h 8 = {token * H:,}; and f, on A x, one for up"
        f" with r columns, {token * R:,}, one for query, key and value with 3 r, {token * 3 * R:,}",
        sorted(two["backward"]) == sorted(backward),
        [len(two["backward"])],
    )

    lesson.predict("Does sharding change the loss? The gradients of A and B?")
    demo.check_step(lesson, one, two)


def teach(lesson: form.Lesson) -> None:
    teach_bytes(lesson)
    one, (two, _) = lesson.one_and_many(2, on_rank)
    teach_ranks(lesson, two, one)
    lesson.predict(
        "The merge: a plain GPT gets W + α/r B A in the place of each W. How far are its logits"
        " from those of the model with LoRA?"
    )
    apart = demo.difference(two["logits"], two["merged"])
    lesson.check(
        f"{apart:.1e} of the largest logit; a merged model is as fast as its base", apart < 1e-6
    )


if __name__ == "__main__":
    form.run("adapters")
