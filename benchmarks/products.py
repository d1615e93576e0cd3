"""The products of a training step alone, on a GPU: matrices in bf16 and FP8, attention.

    python -m benchmarks.gpu matrices attention

matrices: TFLOP/s of the products of a layer at the sizes of two models,

    q, k, v apart      three products of one input
    q, k, v joined     one, with the three matrices below each other
    up                 of the MLP: h -> ffn
    ∂W, then added     the gradient of a matrix in bf16, which another kernel adds to a float32 sum
    ∂W added inside    by the product itself (optimizer.py)

Then the three products of a layer h -> h in FP8, by the time of those in bf16. With casts: maxima,
scales and bytes of inputs, weights and gradients are in the time, cast as in a run
(base/fp8_cast.py), and beside it by PyTorch's operations. Without: bytes are there.

attention: forward and backward of scaled_dot_product_attention by each of PyTorch's kernels, and
the first call, in which cuDNN makes a plan for a shape. Then eight new shapes with a mask, one call
each: serving has a new shape in nearly every step.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import optimizer
from base import float8
from base.cuda_kernels import why_not
from base.float8 import Quantised
from benchmarks import report
from benchmarks.fp8 import RECIPES, operands, products
from benchmarks.report import median, ratio, spread, timed
from fp8 import Scaling
from planning.inputs import H100

ROUNDS = 5
# (tokens, h, ffn) of a micro-batch
MATRICES = {
    "gpt2-124m": (32768, 768, 3072),
    "llama2-7b": (4096, 4096, 11008),
    "llama2-7b, micro-batch 2": (8192, 4096, 11008),
}
# Tokens, h of a layer h -> h: those of Llama-2 7B first.
LAYERS = [(4096, 4096), *((n, 2**power) for n in (4096, 16384) for power in range(9, 15))]
LAYERS = list(dict.fromkeys(LAYERS))
# (b, a, s, d)
ATTENTION = {"gpt2-124m": (32, 12, 1024, 64), "llama2-7b": (1, 32, 4096, 128)}
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def device_of_run() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def seconds_of(call) -> float:
    """Seconds of one call: the mean of as many as take 20 ms or more."""
    once = timed(call)
    repeats = max(1, math.ceil(0.02 / once))
    return timed(lambda: [call() for _ in range(repeats)]) / repeats


def in_turn(calls: dict, toy: bool) -> list[dict]:
    """Seconds of each call, in each round."""
    kinds = {name: partial(timed if toy else seconds_of, call) for name, call in calls.items()}
    return report.in_turn(kinds, 1 if toy else ROUNDS)


# --- matrices -------------------------------------------------------------------------------------


def tflops(n: int, h: int, ffn: int, toy: bool) -> dict:
    """{product: TFLOP/s}. n: tokens."""
    new = partial(torch.randn, device=device_of_run(), dtype=torch.bfloat16)
    x, dy = new(n, h), new(n, ffn)
    w, joined, up = new(h, h), new(3 * h, h), new(ffn, h)
    total = torch.zeros(ffn, h, device=x.device)
    calls = {
        "q, k, v joined": lambda: F.linear(x, joined),
        "q, k, v apart": lambda: [F.linear(x, w) for _ in range(3)],
        "up": lambda: F.linear(x, up),
        "∂W added inside": lambda: optimizer.add_product(total, dy, x, 1, 1.0),
        "∂W, then added": lambda: total.add_(dy.t() @ x),
    }
    times = in_turn(calls, toy)
    flops = {name: (6 * h if "q, k, v" in name else 2 * ffn) * n * h for name in calls}
    return {
        f"TFLOP/s {name}": flops[name] / median([t[name] for t in times]) / 1e12 for name in calls
    }


def prepared(a: Quantised, b: Quantised):
    """A call of the product alone. Where no GPU multiplies bytes, that of decoded bytes."""
    if not float8.runs_in_fp8(a, b):
        return lambda: a @ b
    arguments = float8.library_operands(a, b)
    options = dict(output_dtype=a.dtype, use_fast_accum=float8.accumulates_fast(a, b))
    return lambda: F.scaled_mm(*arguments, **options)


def calls_of_layer(tokens: int, h: int) -> tuple[dict, dict]:
    """({name: a call of a layer's three products}, {name: why there is none})."""
    device = device_of_run()
    x, dy = torch.randn(2, tokens, h, device=device).bfloat16()
    w = torch.randn(h, h, device=device).bfloat16()
    found, refused = {"bf16": lambda: products(x, w, dy)}, {}
    place = 0, 0
    for name in ("current", "delayed", "block"):
        scaling = Scaling(RECIPES[name], 1, device)
        scaling.recording = True
        pairs = operands(scaling, place, x, w, dy)
        scaling.end_step()
        fast = all(float8.runs_in_fp8(a, b) for a, b in pairs.values())
        if device == "cuda" and not fast:
            refused[name] = "no such product on this GPU, or in this build of PyTorch"
            continue

        def whole(fused: bool, scaling=scaling):
            scaling.fused = fused
            scaling.weights.clear()
            for a, b in operands(scaling, place, x, w, dy).values():
                a @ b

        alone = [prepared(a, b) for a, b in pairs.values()]
        has_kernels = not why_not(x.dtype)
        found[name] = partial(whole, has_kernels)
        if has_kernels and name != "block":
            found[f"{name}, casts by PyTorch"] = partial(whole, False)
        found[f"{name}, products alone"] = lambda alone=alone: [call() for call in alone]
    return found, refused


def over_bf16(tokens: int, h: int, toy: bool) -> dict:
    """{name: spread of its time over that of bf16, or why there is none}, and seconds of bf16"""
    calls, refused = calls_of_layer(tokens, h)
    times = in_turn(calls, toy)
    row = {f"x bf16, {name}": ratio(times, name, "bf16") for name in calls if name != "bf16"}
    return row | refused | {"s in bf16": spread([t["bf16"] for t in times])}


# --- attention ------------------------------------------------------------------------------------


def attention(b: int, a: int, s: int, d: int, backend: SDPBackend, toy: bool) -> dict:
    """TFLOP/s of half of the scores, and seconds of first calls."""
    new = partial(torch.randn, device=device_of_run(), dtype=torch.bfloat16)
    q, k, v = (new(b, s, a, d).transpose(1, 2).requires_grad_() for _ in range(3))
    forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    with sdpa_kernel([backend]):
        first = timed(forward)
        y = forward()
        backward = partial(torch.autograd.grad, y, (q, k, v), torch.ones_like(y), retain_graph=True)
        first_back = timed(backward)
        times = in_turn({"forward": forward, "backward": backward}, toy)
    seconds = {name: median([t[name] for t in times]) for name in ("forward", "backward")}
    flops = 2 * b * a * s * s * d
    return {
        "TFLOP/s forward": flops / seconds["forward"] / 1e12,
        "TFLOP/s backward": 2.5 * flops / seconds["backward"] / 1e12,
        "s of the first calls": first + first_back,
        "µs": {name: 1e6 * value for name, value in seconds.items()},
    }


def new_shapes(backends: list[SDPBackend]) -> dict:
    """Milliseconds of one call for each of eight shapes."""
    times = []
    for s in range(48, 176, 16):
        new = partial(torch.randn, device=device_of_run(), dtype=torch.bfloat16)
        q, k, v = new(12, 8, 1, 64), new(12, 8, s, 64), new(12, 8, s, 64)
        mask = torch.zeros(1, 8, 1, s, device=q.device, dtype=q.dtype)
        attend = partial(F.scaled_dot_product_attention, q, k, v, mask)
        with sdpa_kernel(backends):
            times.append(1e3 * timed(attend))
    return {"ms": median(times), "of each": times}


# --- of gpu.py ------------------------------------------------------------------------------------


def cases_of(stage: str, args) -> dict:
    """{name: a function that measures it}"""
    toy = args.toy
    if stage == "matrices":
        sizes, layers = MATRICES, {f"{n:,} tokens, h {h}": (n, h) for n, h in LAYERS}
        if toy:
            sizes, layers = {"toy": (64, 64, 128)}, {"toy": (128, 128)}
        found = {name: partial(tflops, *size, toy) for name, size in sizes.items()}
        return found | {f"FP8, {name}": partial(over_bf16, *x, toy) for name, x in layers.items()}
    kinds = {name: BACKENDS[name] for name in ("cuDNN", "FlashAttention", "efficient")}
    if toy and not torch.cuda.is_available():
        kinds = {"math": SDPBackend.MATH}
    found = {
        f"{name} {kind}": partial(attention, *shape, backend, toy)
        for name, shape in ({"toy": (1, 2, 64, 64)} if toy else ATTENTION).items()
        for kind, backend in kinds.items()
    }
    every = list(BACKENDS.values())
    found["new shapes"] = partial(new_shapes, every)
    found["new shapes, without cuDNN"] = partial(new_shapes, every[1:])
    return found


def predicted(stage: str, args) -> dict[str, str]:
    """By the shares of an H100's peak that planner.py has."""
    shares = H100.constants
    rate = f"{H100.peak * shares.matmul / 1e12:.0f} TFLOP/s"
    alone = f"{shares.matmul / (2 * shares.fp8):.2f} products alone"
    names = [name for name in cases_of(stage, args) if "new shapes" not in name]
    return {name: alone if name.startswith("FP8") else rate for name in names}
