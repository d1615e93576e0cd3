"""Each fused operation against float64 and against PyTorch's own operations.

Three implementations are tested: the plain PyTorch reference on the CPU, the CUDA source run by an
emulator (cuda_on_cpu.py), and the kernels on a GPU.
"""

import inspect
import math
import os
import random
import re
import shutil
import subprocess
import sys
import types

import cuda_on_cpu
import pytest
import torch
import torch.nn.functional as F
from parity import LLAMA, SMALL, differs, same, train

import generate
import gpt
import kernels
import moe
import optimizer
import sharding
import train as trainer
from cross_entropy import cross_entropy
from dropout import dropout_key, dropout_mask
from lessons import kernel_bytes
from model_config import GPTConfig
from routers import MoEConfig
from runtime import extensions

GPU = pytest.param(
    "gpu",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)
by_emulator = pytest.mark.skipif(
    not (cuda_on_cpu.include_folder() and shutil.which("g++")), reason="no CUDA headers or no g++"
)
PLACES = ["reference", pytest.param("emulated", marks=by_emulator), GPU]
NUMBERS = [torch.float32, torch.bfloat16, torch.float16]


def emulate(set_attribute, order: int = 2, multiprocessors: int = 2) -> None:
    """Make the operations run the CUDA source on the CPU, from now on."""
    built = cuda_on_cpu.load(kernels.sources())
    built.set_order(order, multiprocessors)
    set_attribute(kernels, "load", lambda: (built, ""))
    for name, operation in kernels.OPERATIONS.items():
        set_attribute(torch.ops.fused, name, operation.on_cuda)


@pytest.fixture
def place(request, monkeypatch):
    """The device of the arguments, after one of the three implementations has been selected."""
    if request.param == "emulated":
        r = random.Random(request.node.name)
        emulate(monkeypatch.setattr, r.randrange(3), r.choice([1, 2, 5]))
    if request.param == "gpu":
        assert kernels.load()[0], kernels.load()[1]
        return "cuda"
    return "cpu"


# --- random arguments: r is a random.Random, new(*shape) a random tensor --------------------------


def norm_arguments(r, new):
    # The last two do not fit in registers: 8193 is no multiple of a vector, 16392 is too long.
    h = r.choice([1, 8, 33, 64, 96, 264, 1000, 1001, 2056, 4104, 8191, 8193, 16392])
    if h < 4096:
        rows = [r.choice([1, 2, 5]), r.choice([0, 1, 7, 40])]
    else:
        rows = [r.choice([1, 3])]
    return [new(*rows, h) + r.choice([0, 10]), new(h), new(h)]


def rotary_arguments(r, new):
    b = r.choice([1, 3])
    a = r.choice([1, 4, 9])
    kv = r.choice([1, 2])
    s = r.choice([1, 5, 16])
    d = r.choice([2, 6, 16, 64, 128, 512, 4096])
    config = GPTConfig(num_layers=1, hidden_size=a * d, num_heads=a, seq_length=s, llama=True)
    table = gpt.rotary_table(config, s, new(1))
    if r.random() < 0.5:
        return [new(b, s, a, d).transpose(1, 2), new(b, s, kv, d).transpose(1, 2), *table]
    # Slices of one tensor, as one matrix multiplication for q, k and v gives them.
    joined = strange(new(b, s, a + 2 * kv, d), r)
    return [joined[:, :, :a].transpose(1, 2), joined[:, :, a : a + kv].transpose(1, 2), *table]


def swiglu_arguments(r, new):
    shape = r.choice([(3, 5, 16), (0, 4), (1,), (2, 3, 7), (1025,), ()])
    return [new(*shape) * r.choice([1, 30]), new(*shape)]


def gelu_arguments(r, new):
    rows = [r.choice([1, 3]), r.choice([0, 1, 4, 67])]
    h = r.choice([1, 7, 48, 1032])
    return [new(*rows, h) * r.choice([1, 5]), new(h) if r.random() < 0.7 else None]


def dropout_arguments(r, new):
    b = r.choice([1, 3])
    s = r.choice([0, 1, 6, 41])
    h = r.choice([1, 7, 48, 1032])
    key = None
    if r.random() < 0.7:
        key = dropout_key(1, r.randrange(99), torch.arange(b) + 7).to(new(1).device)
    return [
        new(b, s, h),
        new(h) if r.random() < 0.7 else None,
        new(b, s, h),
        key,
        r.randrange(4),
        r.choice([0, 11, 2**20]),
        r.choice([0.1, 0.5, 0.9]),
    ]


def softmax_arguments(r, new):
    s = r.choice([1, 5, 8, 64, 100, 264, 513, 1032])
    matrices = r.choice([0, 1, 3]) if s < 500 else 1
    return [new(matrices, s, s) * r.choice([3, 100]), r.choice([1.0, 0.125])]


def loss_arguments(r, new):
    rows = r.choice([(3, 5), (0,), (7,)])
    v = r.choice([1, 2, 7, 61, 512, 5003, 12301, 40001])
    rows = rows if v < 9000 else (2,)
    logits = new(*rows, v) * r.choice([1, 10]) - r.choice([0, 200])
    return [logits, torch.randint(v, rows, device=new(1).device)]


def routed(r, new):
    """(tokens n, choices k of a token, hidden size h, a dispatch plan, which may drop tokens)."""
    n = r.choice([1, 6, 31])
    k = r.choice([1, 2])
    e = 4
    h = r.choice([1, 9, 32, 1032])
    routing = moe.Routing(
        lambda logits, training: logits,
        MoEConfig(
            num_layers=1,
            hidden_size=8,
            num_heads=1,
            num_experts=e,
            router="topk",
            router_topk=k,
            capacity_factor=r.choice([0, 0.6]),
        ),
    )
    plan = routing(torch.rand(n, e).to(new(1).device))
    return n, k, h, plan


def permute_arguments(r, new):
    n, _, h, plan = routed(r, new)
    return [new(n, h), plan.order, plan.position]


def unpermute_arguments(r, new):
    n, k, h, plan = routed(r, new)
    probabilities = torch.rand(n, k, device=new(1).device)
    rows = new(len(plan.order), h)
    if new(1).dtype == torch.float64:
        probabilities = probabilities.double()
    return [rows, probabilities, plan.position, plan.order]


# --- PyTorch's own --------------------------------------------------------------------------------


def dropout_add(x, bias, residual, key, site, start, p):
    x = x if bias is None else x + bias
    if key is None:
        return residual + x
    dropped = dropout_mask(key, site, x.shape, {1: start}, p)
    return residual + x.masked_fill(dropped, 0.0) * (1 / (1 - p))


def softmax(scores, scale):
    return (scores * scale + torch.full_like(scores, -math.inf).triu(1)).softmax(-1)


# {name: (arguments, fused, PyTorch's own)}. The loss overwrites its logits, so it gets copies.
CASES = {
    "rms_norm": (
        lambda r, new: [*norm_arguments(r, new)[:2], 1e-5],
        kernels.rms_norm,
        lambda x, w, eps: F.rms_norm(x, w.shape, w, eps),
    ),
    "layer_norm": (
        lambda r, new: [*norm_arguments(r, new), 1e-5],
        kernels.layer_norm,
        lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
    ),
    "rotary": (
        rotary_arguments,
        kernels.rotary,
        lambda q, k, *table: (gpt.rotate(q, table), gpt.rotate(k, table)),
    ),
    "swiglu": (swiglu_arguments, kernels.swiglu, lambda gate, up: F.silu(gate) * up),
    "bias_gelu": (
        gelu_arguments,
        kernels.bias_gelu,
        lambda x, b: F.gelu(x if b is None else x + b, approximate="tanh"),
    ),
    "bias_dropout_add": (dropout_arguments, kernels.bias_dropout_add, dropout_add),
    "causal_softmax": (softmax_arguments, kernels.causal_softmax, softmax),
    "cross_entropy": (
        loss_arguments,
        lambda z, targets: kernels.cross_entropy(
            z.clone(memory_format=torch.preserve_format), targets
        ),
        lambda z, targets: cross_entropy(z.clone(), targets),
    ),
    "permute": (permute_arguments, kernels.permute, moe.permute),
    "unpermute": (unpermute_arguments, kernels.unpermute, moe.unpermute),
}


# --- running and comparing ------------------------------------------------------------------------


def is_float(a) -> bool:
    return isinstance(a, torch.Tensor) and a.is_floating_point()


def leaves(args, dtype) -> list:
    """Copies of dtype, with the same strides, of which every floating-point tensor asks for a
    gradient but rotary's tables, which have none."""
    tables = (2, 3) if len(args) == 4 and is_float(args[3]) else ()
    copies = []
    for i, a in enumerate(args):
        if is_float(a):
            # unpermute's probabilities stay float32 beside 16 bits.
            keeps_float32 = a.dtype == torch.float32 and dtype != torch.float64
            own_dtype = torch.float32 if keeps_float32 else dtype
            copy = torch.empty_strided(a.shape, a.stride(), dtype=own_dtype, device=a.device)
            a = copy.copy_(a).requires_grad_(i not in tables)
        copies.append(a)
    return copies


def run(function, args, dtype, grad_dtype):
    """(outputs, gradients) of a function of arguments in dtype. The gradients of the outputs are
    random, the same each time, and exact in grad_dtype."""
    args = leaves(args, dtype)
    outputs = kernel_bytes.as_tuple(function(*args))
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(o.shape, generator=generator).to(grad_dtype).to(o) for o in outputs]
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    gradients = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    return [o.detach() for o in outputs], list(gradients)


def error(x, exact) -> float:
    """|x - exact| / |exact| in the 2-norm; the largest |x| where the exact result is 0."""
    if exact.numel() and exact.norm() > 0:
        return ((x.double() - exact).norm() / exact.norm().clamp(min=1e-300)).item()
    return x.double().abs().max().item() if x.numel() else 0.0


def strange(x, r):
    """The same values, perhaps with strides or an offset that do not allow vectors."""
    kind = r.choice(["plain", "offset", "transposed", "step"])
    if kind == "plain" or x.dim() == 0:
        return x
    if kind == "offset":
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    if kind == "step":
        return torch.stack((x, x), -1).flatten(-2)[..., ::2]
    return x.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize(
    "trials", [range(4), pytest.param(range(4, 12), marks=pytest.mark.repetition)], ids=str
)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_error_against_float64(place, name, dtype, trials):
    """At most twice the error of PyTorch's own operations, or of rounding the exact result once.
    Forward and backward."""
    make, fused, own = CASES[name]
    for trial in trials:
        r = random.Random(f"{name} {dtype} {trial}")
        torch.manual_seed(trial)
        args = make(r, lambda *shape: torch.randn(shape, device=place).to(dtype))
        if name not in ("rotary", "permute", "unpermute"):
            for i, a in enumerate(args):
                if is_float(a):
                    args[i] = strange(a, r)
        results = [
            run(fused, args, dtype, dtype),
            run(own, args, dtype, dtype),
            run(own, args, torch.float64, dtype),
        ]
        for ours, theirs, exact in zip(*([*outputs, *gradients] for outputs, gradients in results)):
            if exact is None:
                assert ours is None
                continue
            assert ours.shape == exact.shape and ours.dtype == theirs.dtype
            limit = error_limit(name, theirs, exact)
            sizes = [getattr(a, "shape", a) for a in args]
            errors = error(ours, exact), error(theirs, exact)
            assert error(ours, exact) <= limit, (trial, sizes, errors)


def error_limit(name, theirs, exact) -> float:
    """How far a result may be from the exact one, if PyTorch's own result is `theirs`."""
    epsilon = torch.finfo(theirs.dtype).eps
    rounding = error(exact.to(theirs.dtype), exact)
    # 2^-23, the precision of a float: PyTorch's own result may happen to be exact.
    limit = 2 * max(error(theirs, exact), rounding) + 2**-23
    # Computed in float and rounded once; but softmax's backward begins with rounded results.
    if theirs.dtype != torch.float32 and name != "causal_softmax":
        limit = min(limit, 1.05 * rounding + epsilon / 64)
    # Rows of one element: x - mean = 0, so only rounding errors are left.
    if name in ("rms_norm", "layer_norm") and exact.shape[-1:] == (1,):
        limit += 10 * epsilon / math.sqrt(1e-5)
    return limit


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_masks_are_those_of_the_model(place):
    """The dropout mask equals dropout_mask's bit for bit, for any slice of the sequence."""
    for dtype in NUMBERS:
        x = torch.ones(3, 37, 264, device=place, dtype=dtype)
        key = dropout_key(5, 2, torch.arange(3)).to(place)
        for site, start, p in ((2, 0, 0.1), (3, 37, 0.5), (0, 2**30, 0.999)):
            y = kernels.bias_dropout_add(x, None, torch.zeros_like(x), key, site, start, p)
            assert torch.equal(y == 0, dropout_mask(key, site, x.shape, {1: start}, p))


def adamw_state(kind: str, shape, place):
    """[weight, low, master, gradient, exp_avg, exp_avg_sq] with a master that is split into weight
    and low, the weight itself, or beside a 16-bit weight."""
    g = torch.Generator().manual_seed(3)
    master = torch.randn(shape, generator=g).to(place)
    gradient = torch.randn(shape, generator=g).to(place)
    m = (torch.randn(shape, generator=g) * 0.1).to(place)
    v = torch.rand(shape, generator=g).to(place)
    if kind == "split":
        weight = torch.empty_like(master, dtype=torch.bfloat16)
        low = torch.empty_like(master, dtype=torch.int16)
        optimizer.split_master(master, weight, low)
        return [weight, low, None, gradient, m.bfloat16(), v.bfloat16()]
    if kind == "itself":
        return [master, None, None, gradient, m.bfloat16(), v.bfloat16()]
    dtype = {"beside bf16": torch.bfloat16, "beside fp16": torch.float16}[kind]
    return [master.to(dtype), None, master, gradient, m, v]


def clone(a):
    return None if a is None else a.clone()


def shifted(a):
    """The same values, which begin 3 elements behind an aligned address."""
    return None if a is None else torch.cat((a[:3], a))[3:]


def adamw_master(weight, low, master):
    """The master weight in float32, wherever it is."""
    if low is not None:
        return optimizer.join_master(weight, low)
    return weight if master is None else master


def check_adamw(args, decay: float, scale: float, step: int) -> None:
    """One update in place, against the same in float64."""
    weight, low, master, gradient, m, v = args
    start = adamw_master(weight, low, master).double()
    g = gradient.double() * scale
    exact_m = m.double() + 0.1 * (g - m.double())
    exact_v = 0.95 * v.double() + 0.05 * g.square()
    root = (exact_v / (1 - 0.95**step)).sqrt() + 1e-8
    exact = start * (1 - 1e-2 * decay) - 1e-2 / (1 - 0.9**step) * exact_m / root
    kernels.adamw(*args, 1e-2, decay, 0.9, 0.95, 1e-8, step, scale)
    end = adamw_master(weight, low, master)
    torch.testing.assert_close(end.double(), exact, rtol=1e-6, atol=1e-7)
    if master is not None:
        assert torch.equal(weight, master.to(weight.dtype))
    for moment, exact_moment in ((m, exact_m), (v, exact_v)):
        # 16-bit state: one rounding.
        rtol = 0.51 * torch.finfo(moment.dtype).eps + 1e-6
        torch.testing.assert_close(moment.double(), exact_moment, rtol=rtol, atol=1e-7)


def check_adamw_epsilon(args) -> None:
    """Without gradient and second moment only ε is in the denominator, and outside the root."""
    weight, low, master = map(clone, args[:3])
    gradient, m, v = map(torch.zeros_like, args[3:])
    m.fill_(1e-3)
    start = adamw_master(weight, low, master).double()
    kernels.adamw(weight, low, master, gradient, m, v, 1e-2, 0.0, 0.9, 0.95, 1e-2, 1000, 1.0)
    moved = adamw_master(weight, low, master).double() - start
    torch.testing.assert_close(moved, -m.double(), rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("kind", ["split", "itself", "beside bf16", "beside fp16"])
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_adamw(place, kind):
    """The update against float64. Odd sizes, and a shard that begins between vectors."""
    for shape in ((1,), (7,), (8,), (3, 333), (0,), (4099,)):
        for decay, scale, step in ((0.1, 1.0, 1), (0.0, 0.25, 1000)):
            args = adamw_state(kind, shape, place)
            if len(shape) == 1 and shape[0] > 8:
                args = [shifted(a) for a in args]
            check_adamw(args, decay, scale, step)
            if decay == 0 and scale < 1:
                check_adamw_epsilon(args)


@by_emulator
def test_any_order_of_threads(monkeypatch):
    """Blocks and threads in any order, on any number of multiprocessors, give the same bits. Only
    sums over rows may differ, because another number of multiprocessors adds other parts."""
    x = torch.randn(9, 520)
    dy = torch.randn(9, 520)
    w = torch.randn(520)
    b = torch.randn(520)
    logits = torch.randn(5, 5003)
    targets = torch.randint(5003, (5,))
    scores = torch.randn(2, 100, 100)

    def everything():
        y, mean, rstd = torch.ops.fused.layer_norm(x, w, b, 1e-5)
        return [
            y,
            mean,
            rstd,
            *torch.ops.fused.layer_norm_backward(dy, x, w, mean, rstd),
            *torch.ops.fused.bias_gelu_backward(dy, x, b),
            *torch.ops.fused.cross_entropy_statistics(logits, targets, 5003),
            torch.ops.fused.causal_softmax(scores, 0.5),
        ]

    results = {}
    for multiprocessors in (1, 3):
        for order in (0, 1, 2):
            emulate(monkeypatch.setattr, order, multiprocessors)
            result = everything()
            results[multiprocessors, order] = result
            assert all(map(torch.equal, result, results[multiprocessors, 0]))
    # dweight and dbias of LayerNorm, dbias of GELU
    sums_over_rows = (4, 5, 7)
    for i, (x, y) in enumerate(zip(results[1, 0], results[3, 0])):
        assert torch.equal(x, y) or (i in sums_over_rows and error(x, y.double()) < 1e-6)


@by_emulator
@pytest.mark.parametrize(
    "marker, offset",
    [
        ("of_warp[first + threadIdx.x / 32][n] = x[n];", 1),
        ("// Only now may the next reduction overwrite of_warp.", 1),
    ],
    ids=["before reading", "before the next writing"],
)
def test_a_missing_barrier_is_seen(monkeypatch, marker, offset):
    """Without a barrier where warps exchange sums, some order of threads gives a wrong result."""
    sources = {file: kernels.sources()[file] for file in ("common.cuh", "norms.cu")}
    # float alone: the other types take as long to compile again
    text = re.sub(r"launch\(__(nv_bfloat16|half)\(\)\);", "return;", sources["common.cuh"])
    lines = text.split("\n")
    at = next(i for i, line in enumerate(lines) if marker in line) + offset
    assert lines.pop(at).strip().startswith("__syncthreads();")
    broken = cuda_on_cpu.load(sources | {"common.cuh": "\n".join(lines)})
    monkeypatch.setattr(kernels, "load", lambda: (broken, ""))
    x = torch.randn(40, 2048)
    w = torch.rand(2048)
    _, mean, rstd = kernels.OPERATIONS["layer_norm"].reference(x, w, w, 1e-5)
    # It reaches the barrier once for each row.
    backward = kernels.OPERATIONS["layer_norm_backward"]
    expected = backward.reference(x, x, w, mean, rstd)[0]
    errors = []
    for order in (0, 1, 2):
        broken.set_order(order, 2)
        errors.append((backward.on_cuda(x, x, w, mean, rstd)[0] - expected).abs().max().item())
    # NaN is an error too, and compares false.
    assert not all(e < 1e-3 for e in errors), errors


# --- PyTorch's own checks -------------------------------------------------------------------------


def arguments(name: str, dtype: torch.dtype, place: str, trial: int = 0):
    make = CASES[name][0]
    r = random.Random(f"{name} {trial}")
    return make(r, lambda *shape: torch.randn(shape, device=place).to(dtype))


@pytest.mark.parametrize("name", CASES)
def test_gradients_by_differences(name):
    """torch.autograd.gradcheck of the references."""
    fused = CASES[name][1]
    checked = 0
    for trial in range(40):
        torch.manual_seed(trial)
        args = leaves(arguments(name, torch.float64, "cpu", trial), torch.float64)
        is_small = max(a.numel() for a in args if isinstance(a, torch.Tensor)) < 400
        # The norm of one element has a gradient of 0.
        is_constant = name in ("rms_norm", "layer_norm") and args[0].shape[-1] == 1
        if is_small and not is_constant:
            # gradcheck runs backward many times, and that of cross entropy overwrites what forward
            # saved: every time it gets a copy.
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, torch.clone):
                assert torch.autograd.gradcheck(fused, args)
            checked += 1
        if checked == 4:
            break
    assert checked >= 3


def examples(dtype: torch.dtype, place: str) -> dict[str, tuple]:
    """{operation: arguments} of every registered operation, the backward ones too."""

    def new(*shape):
        return torch.randn(shape, device=place).to(dtype)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = new(2, 5, 24)
    w = new(24)
    key = dropout_key(1, 1, torch.arange(2)).to(place)
    targets = torch.tensor([[3, 0, 23, 7, 1], [2, 2, kernels.ELSEWHERE, 5, 9]], device=place)
    per_row = new(2, 5).to(wide)
    order = torch.tensor([3, 1, 4, 0], device=place)
    position = torch.tensor([[3, 1, 4], [0, 2, 4]], device=place)
    probabilities = new(3, 2).to(wide)
    q, k = new(2, 5, 3, 8).transpose(1, 2), new(2, 5, 1, 8).transpose(1, 2)
    by_name = {
        "rms_norm": (x, w, 1e-5),
        "rms_norm_backward": (x, x, w, per_row),
        "layer_norm": (x, w, w, 1e-5),
        "layer_norm_backward": (x, x, w, per_row, per_row),
        "rotary": (q, k, new(5, 8), new(5, 8), 1.0),
        "swiglu": (x, x),
        "swiglu_backward": (x, x, x),
        "bias_gelu": (x, w),
        "bias_gelu_backward": (x, x, None),
        "bias_dropout_add": (x, w, x, key, 2, 0, 0.3),
        "bias_dropout_add_backward": (x, key, 2, 0, 0.3, True),
        "causal_softmax": (new(2, 6, 6), 0.5),
        "causal_softmax_backward": (new(2, 6, 6), new(2, 6, 6), 0.5),
        "cross_entropy_statistics": (x, targets, 24),
        "cross_entropy_gradient": (x.clone(), targets, per_row, per_row.exp(), per_row, 24),
        "permute": (new(3, 8), order),
        "unpermute": (new(4, 8), position, probabilities),
        "unpermute_backward": (new(3, 8), new(4, 8), order, probabilities),
        "adamw": (*adamw_state("split", (5, 7), place), 1e-2, 0.1, 0.9, 0.95, 1e-8, 3, 0.5),
    }
    assert by_name.keys() == kernels.OPERATIONS.keys()
    return by_name


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=GPU.marks)])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.repetition)]
)
def test_registrations(place, dtype):
    """torch.library.opcheck: schemas name what is changed in place, meta tensors have the right
    shapes and strides, torch.compile agrees."""
    for name, args in examples(dtype, place).items():
        torch.library.opcheck(getattr(torch.ops.fused, name).default, args)


def test_meta_tensors():
    for name, args in examples(torch.bfloat16, "meta").items():
        outputs = kernel_bytes.as_tuple(getattr(torch.ops.fused, name)(*args))
        assert all(o is None or o.is_meta for o in outputs)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.repetition)],
)
def test_compiled(backend):
    """A function of several operations, forward and backward, in one graph. Without and with
    generated C++ for what is not an operation of kernels.py."""

    def function(x, w, b, gate, logits, targets):
        y = kernels.swiglu(kernels.layer_norm(kernels.rms_norm(x, w), w, b), gate)
        key = dropout_key(1, 1, targets[:, 0])
        y = kernels.bias_dropout_add(kernels.bias_gelu(y, b), b, x, key, 2, 0, 0.3)
        q, k = kernels.rotary(y[:, None], y[:, None], w[:12].repeat(5, 2), b[:12].repeat(5, 2))
        p = kernels.causal_softmax((q @ k.transpose(2, 3))[:, 0], 0.5)
        return p.sum() + kernels.cross_entropy(logits * 1.0, targets).sum() + q.square().sum()

    torch.manual_seed(0)
    args = [
        torch.randn(2, 5, 24),
        torch.randn(24),
        torch.randn(24),
        torch.randn(2, 5, 24),
        torch.randn(2, 5, 24),
        torch.randint(24, (2, 5)),
    ]
    results = []
    for f in (function, torch.compile(function, fullgraph=True, backend=backend)):
        copies = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
        y = f(*copies)
        y.backward()
        results.append([y.detach(), *(a.grad for a in copies[:-1])])
    for eager, compiled in zip(*results):
        torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-5)


# --- bad input ------------------------------------------------------------------------------------

X = torch.randn(2, 5, 24)
XT = X[0].t()
W = torch.randn(24)
ADAMW_OPTIONS = 1, 0, 0, 0, 0, 1, 1
I32 = torch.zeros(2, dtype=torch.int32)
I64 = torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda: kernels.rms_norm(X.int(), W),
            "rms_norm: x is torch.int32, expected torch.float32 or",
        ),
        (
            lambda: kernels.rms_norm(X, W[:23]),
            r"rms_norm: weight has shape \[23\], expected \[24\]",
        ),
        (
            lambda: kernels.rms_norm(X, W.bfloat16()),
            "rms_norm: weight is torch.bfloat16, expected torch.float32",
        ),
        (lambda: kernels.rms_norm(X, W.to("meta")), "rms_norm: weight is on meta, expected cpu"),
        (
            lambda: kernels.rms_norm(X.sum(), W),
            r"rms_norm: x has shape \[\], expected at least 1 dimensions",
        ),
        (
            lambda: kernels.layer_norm(X, W, W.double()),
            "layer_norm: bias is torch.float64, expected torch.float32",
        ),
        (
            lambda: kernels.rotary(X, X, W, W),
            r"rotary: q has shape \[2, 5, 24\], expected at least 4 dimensions",
        ),
        (
            lambda: kernels.rotary(X[None], X[None], W.expand(4, 24), W.expand(5, 24)),
            r"rotary: cosine has shape \[4, 24\], expected \[5, 24\]",
        ),
        (
            lambda: kernels.rotary(
                X[None, ..., :3], X[None, ..., :3], W.expand(5, 24)[:, :3], W.expand(5, 24)[:, :3]
            ),
            "expected an even last dimension",
        ),
        (
            lambda: kernels.swiglu(X, X[:, :4]),
            r"swiglu: up has shape \[2, 4, 24\], expected \[2, 5, 24\]",
        ),
        (lambda: kernels.bias_gelu(X, W[:3]), r"bias_gelu: bias has shape \[3\], expected \[24\]"),
        (
            lambda: kernels.bias_dropout_add(X, W, X, I32.long(), 1, 0, 0.1),
            "bias_dropout_add: key is torch.int64, expected torch.int32",
        ),
        (
            lambda: kernels.bias_dropout_add(X, W, X, I32[:1], 1, 0, 0.1),
            r"bias_dropout_add: key has shape \[1\], expected \[2\]",
        ),
        (
            lambda: kernels.bias_dropout_add(X[0], W, X[0], I32, 1, 0, 0.1),
            r"bias_dropout_add: x has shape \[5, 24\], expected \[b, s, h\]",
        ),
        (
            lambda: kernels.bias_dropout_add(X, W, X, I32, 1, 0, 1.0),
            "bias_dropout_add: p is 1.0, expected at least 0 and below 1",
        ),
        (
            lambda: kernels.causal_softmax(X, 1.0),
            r"causal_softmax: scores has shape \[2, 5, 24\], expected \[.., s, s\]",
        ),
        (
            lambda: kernels.cross_entropy(X, I64[:1]),
            r"cross_entropy_statistics: targets has shape \[1, 5\], expected \[2, 5\]",
        ),
        (
            lambda: kernels.cross_entropy(X, I64.int()),
            "cross_entropy_statistics: targets is torch.int32, expected torch.int64",
        ),
        (lambda: kernels.cross_entropy(X, I64 + 24), "index"),
        (lambda: kernels.cross_entropy(X, I64 - 100), "index"),
        (
            lambda: kernels.permute(X[0], I64[0].int(), I64),
            "permute: order is torch.int32, expected torch.int64",
        ),
        (
            lambda: kernels.unpermute(X[0], torch.zeros(5, 3), I64, I64[0]),
            r"unpermute: probabilities has shape \[5, 3\], expected \[5, 2\]",
        ),
        (
            lambda: kernels.adamw(XT, None, None, XT, XT.bfloat16(), XT.bfloat16(), *ADAMW_OPTIONS),
            "adamw: weight has strides",
        ),
        (
            lambda: kernels.adamw(W, None, None, W, W, W, *ADAMW_OPTIONS),
            "adamw: exp_avg is torch.float32, expected torch.bfloat16",
        ),
    ],
)
def test_bad_input(call, words):
    with pytest.raises((ValueError, RuntimeError, IndexError), match=words):
        call()


# --- building -------------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@pytest.mark.parametrize("card", [90, pytest.param(80, marks=pytest.mark.repetition)])
@pytest.mark.parametrize("file", sorted(path.name for path in kernels.CSRC.glob("*.cu")))
def test_compiles_for_every_card(tmp_path, file, card):
    """For sm_80 and sm_90, with the options of torch's build, without warnings. Kernels that move
    vectors move 16 bytes at a time. No kernel that runs often spills registers to memory."""
    from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

    flags = [
        *COMMON_NVCC_FLAGS,
        "-std=c++20",
        "-O3",
        "-Werror",
        "all-warnings",
        "-Xptxas",
        "-v",
        f"-arch=sm_{card}",
    ]
    done = subprocess.run(
        ["nvcc", "-cubin", kernels.CSRC / file, "-o", "kernels.cubin", "--keep", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    spills = re.findall(r"Function properties for (\S+)\n.*? (\d+) bytes spill stores", done.stderr)
    spilled = {name for name, bytes_ in spills if int(bytes_) > 16}
    assert "Compiling entry function" in done.stderr
    # Only LayerNorm's rows of more than 1024 vectors.
    assert all("norm_backward" in name and "Li4ELi512E" in name for name in spilled), spilled
    ptx = next(tmp_path.glob("*.ptx")).read_text()
    of_16_bytes = r"(ld|st)\.global(\.nc)?(\.\w+)*\.v4\.[ubf]32|\.v2\.[ubf]64|\.b128"
    for kernel in re.split(r"\.visible \.entry ", ptx)[1:]:
        name = kernel.split("(")[0]
        if "sum_parts" not in name and not re.search(r"Li1E|eachILi1E", name):
            assert re.search(of_16_bytes, kernel), name


def test_once(tmp_path):
    """Of eight processes at once one builds; if one is killed while it builds, another builds."""
    script = f"""
import fcntl, os, time
from pathlib import Path
{inspect.getsource(extensions.once)}
folder = Path({str(tmp_path)!r})
def make():
    with open(folder / "built", "a") as f:
        f.write("x")
    if os.environ.get("SLOW"):
        (folder / "started").touch()
        time.sleep(60)
    time.sleep(0.5)
    (folder / "kernels.so").write_text("whole")
once(folder, "kernels.so", make)
assert (folder / "kernels.so").read_text() == "whole"
"""
    slow = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"SLOW": "1"})
    while not (tmp_path / "started").exists():
        assert slow.poll() is None
    others = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(8)]
    slow.kill()
    assert [p.wait(120) for p in others] == [0] * 8 and slow.wait() < 0
    assert (tmp_path / "built").read_text() == "xx"


def on_meta(**fields) -> gpt.GPT:
    """A small model without weights."""
    small = dict(num_layers=1, hidden_size=8, num_heads=1, seq_length=8, vocab_size=8)
    with torch.device("meta"):
        return moe.build(MoEConfig(**small | fields))


def fused_classes(model: torch.nn.Module) -> set:
    return {type(m) for m in model.modules() if type(m).__module__ == "kernels"}


def fails_to_build(*args, **options):
    raise RuntimeError(
        "Error building extension 'x': [1/2]\nnvcc fatal error: no such thing\nninja: stopped"
    )


def test_without_a_compiler(monkeypatch, tmp_path):
    """A device that is too old, or no nvcc: the reason in one line, and the model is unchanged."""
    load = kernels.load.__wrapped__
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert load() == (None, "NVIDIA T4 has compute capability 7.5, and they need 8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    import torch.utils.cpp_extension as cpp_extension

    monkeypatch.setattr(cpp_extension, "load", fails_to_build)
    assert load() == (None, "the build failed: nvcc fatal error: no such thing")
    model = on_meta()
    before = [type(m) for m in model.modules()]
    assert kernels.apply(model, torch.device("cpu")) == "no CUDA device"
    assert [type(m) for m in model.modules()] == before
    monkeypatch.setattr(kernels, "load", lambda: (None, "no nvcc"))
    assert kernels.apply(model, torch.device("cuda")) == "no nvcc"
    assert [type(m) for m in model.modules()] == before


def test_fused_classes_override():
    """What a fused class defines replaces something of the module's class, under the same name."""
    for module_class, fused_class in kernels.FUSED.items():
        defined = [name for name in vars(fused_class) if not name.startswith("__")]
        assert defined and all(hasattr(module_class, name) for name in defined), fused_class


def test_swapped_classes():
    """The classes of a model's modules; norms that the operations do not compute stay."""
    model = on_meta()
    kernels.swap(model)
    # A second time changes nothing more.
    kernels.swap(model)
    assert fused_classes(model) == {
        kernels.LayerNorm,
        kernels.Rotary,
        kernels.GELU,
        kernels.BiasDropoutAdd,
        kernels.Head,
    }
    model = on_meta(num_layers=2, llama=True, attention="explicit", num_experts=2)
    kernels.swap(model)
    assert fused_classes(model) == {
        kernels.RMSNorm,
        kernels.Rotary,
        kernels.SwiGLU,
        kernels.BiasDropoutAdd,
        kernels.CausalProbabilities,
        kernels.Head,
        kernels.MoE,
    }
    others = torch.nn.ModuleList(
        [
            torch.nn.LayerNorm(8, bias=False),
            torch.nn.LayerNorm((4, 8)),
            torch.nn.RMSNorm(8),
            torch.nn.LayerNorm(8, elementwise_affine=False),
        ]
    )
    kernels.swap(others)
    assert not fused_classes(others)


@by_emulator
def test_backward_runs_once(monkeypatch):
    """A loss whose logits have become their gradient raises the second time. No operation has a
    second derivative."""
    emulate(monkeypatch.setattr)
    logits = torch.randn(3, 40, requires_grad=True)
    loss = kernels.cross_entropy(logits * 1, torch.arange(3)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    weight, low, *rest = adamw_state("split", (8,), "cpu")
    versions = [t._version for t in (weight, low)]
    kernels.adamw(weight, low, *rest, 1e-2, 0.1, 0.9, 0.95, 1e-8, 1, 1.0)
    assert all(t._version > v for t, v in zip((weight, low), versions))
    for name in ("swiglu", "rms_norm", "bias_gelu"):
        args = leaves(arguments(name, torch.float32, "cpu", 2), torch.float32)
        y = CASES[name][1](*args)
        (first,) = torch.autograd.grad(y.square().sum(), args[0], create_graph=True)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(first.sum(), args[0])


def test_a_swapped_model_generates():
    """The same text as before the swap, with the cache, whose rows have positions of their own."""
    texts = []
    for change in (lambda model: None, kernels.swap):
        model = on_meta(
            num_layers=2, hidden_size=16, num_heads=2, seq_length=32, vocab_size=40, llama=True
        )
        sharding.init(model, 0, "cpu", torch.float64)
        change(model)
        texts.append(generate.generate(model, [[1, 2, 3], [4, 5, 6, 7, 8]], 12, temperature=0))
    assert texts[0] == texts[1]


# --- in a model -----------------------------------------------------------------------------------


def swapped() -> None:
    """The operations instead of PyTorch's own, on the CPU."""
    kernels.apply = lambda model, device: kernels.swap(model) or ""


def swapped_and_emulated() -> None:
    swapped()
    emulate(setattr)


def swapped_without_sums() -> None:
    """A mutation: the statistics of the vocabulary-parallel loss are not all-reduced."""
    swapped()
    kernels.dist = types.SimpleNamespace(
        all_reduce=lambda *args, **options: None, ReduceOp=torch.distributed.ReduceOp
    )


EXPERTS = LLAMA | dict(
    num_experts=4, router="topk", router_topk=2, capacity_factor=1.0, micro_batch_size=2
)
LAYOUTS = [
    (SMALL, 1, dict()),
    (LLAMA, 1, dict(attention="explicit", micro_batch_size=1)),
    (LLAMA | dict(dropout=0.0), 2, dict(tp=2)),
    (SMALL, 2, dict(tp=2, sequence_parallel=True, recompute="selective")),
    (SMALL, 2, dict(zero_stage=3, recompute="full")),
    (SMALL, 2, dict(pp=2, schedule="zb-h1")),
    (EXPERTS, 2, dict(ep=2)),
    (EXPERTS, 2, dict(tp=2, recompute="full")),
]


@pytest.mark.parametrize("base, world, flags", LAYOUTS, ids=str)
def test_same_training(base, world, flags):
    """The parity test, with the references of the operations in the model."""
    one_device = base | {"recompute": "none"} if base is EXPERTS else base
    same(train(world, base=base, mutate=swapped, **flags), train(base=one_device))


@by_emulator
@pytest.mark.parametrize("base, world, flags", [LAYOUTS[i] for i in (0, 1, 3, 6)], ids=str)
def test_same_training_by_cuda_source(base, world, flags):
    # Here, so that the ranks do not all build it at once.
    cuda_on_cpu.load(kernels.sources())
    same(
        train(world, base=base, mutate=swapped_and_emulated, steps=1, precision="fp32", **flags),
        train(base=base, steps=1, precision="fp32"),
        1e-5,
    )


def test_sums_of_statistics_are_needed():
    differs(train(2, base=SMALL, mutate=swapped_without_sums, tp=2), train(base=SMALL))


@pytest.mark.parametrize("precision, state", [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "bf16")])
def test_optimizer_in_one_pass(precision, state):
    """AdamW with the operation and without it: the same parameters, up to the rounding of 16-bit
    moments. The operation scales the clipped gradient itself."""
    flags = dict(precision=precision, optimizer_state=state, steps=2)
    ours = train(2, mutate=swapped_optimizer, zero_stage=1, **flags)
    theirs = train(2, zero_stage=1, **flags)
    same(ours, theirs, 1e-6)
    limit = 5e-3 if state == "bf16" else 1e-6
    for name, p in theirs.parameters.items():
        # The exact gradient of a key bias is 0.
        if not name.endswith("key.bias"):
            assert error(ours.parameters[name], p.double()) < limit, name


def swapped_optimizer() -> None:
    """The fused update; all other operations stay PyTorch's own."""
    make = trainer.AdamW
    trainer.AdamW = lambda *args, **options: make(*args, **options | {"fused": kernels.adamw})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "world, flags",
    [
        (1, dict()),
        (1, dict(attention="explicit", recompute="full")),
        (2, dict(tp=2, sequence_parallel=True, recompute="selective")),
        (2, dict(zero_stage=3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("base", [SMALL, LLAMA, EXPERTS], ids=["gpt", "llama", "experts"])
def test_same_training_on_a_gpu(base, world, flags):
    """float32 through the kernels, all ranks on one GPU, against the CPU. (The GPU tests of
    test_compositions are in float64, so the references run there.)"""
    assert kernels.load()[0], kernels.load()[1]
    same(
        train(world, base=base, device="cuda", steps=1, precision="fp32", **flags),
        train(base=base, steps=1, precision="fp32"),
        1e-5,
    )


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or not shutil.which("compute-sanitizer"),
    reason="no CUDA device, or no compute-sanitizer",
)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_sanitizer(tool):
    """Every operation, at odd sizes, under NVIDIA's checkers."""
    script = f"""
import sys
import types
sys.path[:0] = {sys.path!r}
import torch
import kernels
from test_kernels import CASES, NUMBERS, adamw_state, arguments, run
torch.manual_seed(0)
for dtype in NUMBERS:
    for name in CASES:
        for trial in range(2):
            args = arguments(name, dtype, "cuda", trial)
            run(CASES[name][1], args, dtype, dtype)
for kind in ("split", "itself", "beside bf16", "beside fp16"):
    state = adamw_state(kind, (4099,), "cuda")
    kernels.adamw(*state, 1e-2, 0.1, 0.9, 0.95, 1e-8, 3, 0.5)
torch.cuda.synchronize()
"""
    # Builds the kernels, outside the checker.
    kernels.load()
    done = subprocess.run(
        [
            "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            sys.executable,
            "-c",
            script,
        ],
        capture_output=True,
        text=True,
        timeout=900,
        # otherwise an access beyond a tensor's end stays inside PyTorch's own large block
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_not_a_number(place):
    """NaN and infinities give what PyTorch's own operations give, so that a broken loss is seen.
    (Not causal softmax: PyTorch's own adds -inf to what is above the diagonal, NaN included.)"""
    z = torch.randn(4, 4096, device=place)
    targets = torch.arange(4, device=place)
    w = torch.ones(4096, device=place)
    z[0, 8:12] = math.nan
    z[1, 5] = math.inf
    z[2, 7] = -math.inf
    for name, args in {
        "cross_entropy": (z, targets),
        "rms_norm": (z, w, 1e-5),
        "layer_norm": (z, w, w, 1e-5),
        "bias_gelu": (z, w),
        "swiglu": (z, z),
    }.items():
        _, fused, own = CASES[name]
        torch.testing.assert_close(fused(*args), own(*args), equal_nan=True)
