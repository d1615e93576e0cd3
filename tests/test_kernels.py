"""Each fused operation against float64 and against PyTorch's own operations.

The kernels run on a GPU, or their CUDA source in an emulator on the CPU (cuda_on_cpu.py).
"""

import inspect
import math
import os
import random
import re
import shutil
import subprocess
import sys

import cuda_on_cpu
import pytest
import torch
import torch.nn.functional as F
from parity import LLAMA, SMALL, again, differs, same, train
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import gpt
import kernels
import moe
import optimizer
import tensor_parallel
from base import cuda_kernels, extensions
from base import fp8_cast as fp8_cast
from base.cross_entropy import cross_entropy
from base.dropout import dropout_key, dropout_mask
from base.model_config import GPTConfig, MoEConfig
from base.rotary import Rotary, rotary_frequencies, rotary_table, rotate
from course import kernels as lesson

GPU = pytest.param("gpu", marks=pytest.mark.gpu)
by_emulator = pytest.mark.skipif(
    not (cuda_on_cpu.include_folder() and shutil.which("g++")), reason="no CUDA headers or no g++"
)
PLACES = [pytest.param("emulated", marks=by_emulator), GPU]
NUMBERS = [torch.float32, torch.bfloat16, torch.float16]


def emulated(dtype: torch.dtype):
    """(the library of a dtype for the emulator, ""), like cuda_kernels.load."""
    return cuda_on_cpu.load(cuda_kernels.sources(), cuda_kernels.ELEMENTS[dtype]), ""


real_call = cuda_kernels.call
# The names of all launches.
launched = []
# Tensors that a launch may touch beside its arguments.
more_memory = []


def extent(t) -> tuple[int, int]:
    """The addresses [begin, end) of a tensor's elements."""
    elements = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride())) + 1
    return t.data_ptr(), t.data_ptr() + elements * t.element_size()


def call_within_bounds(name, device, dtype, *args):
    """call, in the emulator, which then knows the tensors of this launch."""
    library, _ = cuda_kernels.load(dtype)
    extensions.call(library, "forget_memory")
    # adamw's tensors are addresses in a table: only who calls it knows them
    known = more_memory or name != "adamw"
    for t in (*args, *more_memory) if known else ():
        if isinstance(t, torch.Tensor) and t.numel():
            extensions.call(library, "add_memory", *extent(t))
    return call_noted(name, device, dtype, *args)


def call_noted(name, *args):
    launched.append(name)
    return real_call(name, *args)


def emulate(set_attribute, order: int = 2, multiprocessors: int = 2) -> None:
    """Make the operations run the CUDA source on the CPU, from now on."""

    def load(dtype):
        library, _ = emulated(dtype)
        extensions.call(library, "set_order", order, multiprocessors)
        return library, ""

    set_attribute(cuda_kernels, "load", load)
    set_attribute(cuda_kernels, "DEVICES", {"cpu", "meta"})
    # another number of multiprocessors gives other answers
    set_attribute(cuda_kernels, "answer", real_call)
    set_attribute(cuda_kernels, "call", call_within_bounds)


@pytest.fixture
def place(request, monkeypatch):
    """The device of the arguments, after one of the two implementations has been selected."""
    if request.param == "emulated":
        r = random.Random(request.node.name)
        emulate(monkeypatch.setattr, r.randrange(3), r.choice([1, 2, 5]))
        return "cpu"
    assert not kernels.why_not(), kernels.why_not()
    monkeypatch.setattr(cuda_kernels, "call", call_noted)
    return "cuda"


# --- random arguments: r is a random.Random, new(*shape) a random tensor --------------------------
# Most sizes are whole vectors, for kernels; the last of each list go to PyTorch.


def norm_arguments(r, new):
    # 16392 does not fit in registers.
    h = r.choice([8, 96, 264, 264, 1000, 1032, 2056, 4104, 8192, 1, 33, 16392])
    rows = [r.choice([1, 2, 5]), r.choice([0, 1, 7, 40])] if h < 2000 else [r.choice([1, 3])]
    return [new(*rows, h) + r.choice([0, 10]), new(h), new(h)]


def add_norm_arguments(r, new):
    x, weight, bias = norm_arguments(r, new)
    x = x[None] if x.dim() == 2 else x
    bias = bias if r.random() < 0.7 else None
    return [x, new(*x.shape), weight, bias, 1e-5, new(len(weight)) if r.random() < 0.7 else None]


def rotary_arguments(r, new):
    b = r.choice([1, 3])
    a = r.choice([1, 4, 9])
    kv = r.choice([1, 2])
    s = r.choice([1, 5, 16])
    d = r.choice([16, 32, 64, 128, 512, 2048, 6, 4096])
    config = GPTConfig(num_layers=1, hidden_size=a * d, num_heads=a, seq_length=s, llama=True)
    table = rotary_table(rotary_frequencies(config, new(1).device), s, new(1))
    if r.random() < 0.5:
        return [new(b, s, a, d).transpose(1, 2), new(b, s, kv, d).transpose(1, 2), *table]
    # Slices of one tensor, as one matrix multiplication for q, k and v gives them.
    joined = strange(new(b, s, a + 2 * kv, d), r)
    return [joined[:, :, :a].transpose(1, 2), joined[:, :, a : a + kv].transpose(1, 2), *table]


def swiglu_arguments(r, new):
    shape = r.choice([(3, 5, 16), (0, 4), (8,), (2, 3, 4, 7), (1032,), (1025,), ()])
    return [new(*shape) * r.choice([1, 30]), new(*shape)]


def gelu_arguments(r, new):
    rows = [r.choice([1, 3]), r.choice([0, 1, 4, 67])]
    h = r.choice([8, 48, 264, 1032, 7])
    return [new(*rows, h) * r.choice([1, 5]), new(h) if r.random() < 0.7 else None]


def dropout_arguments(r, new):
    b = r.choice([1, 3])
    s = r.choice([0, 1, 6, 41])
    h = r.choice([8, 48, 264, 1032, 7])
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
    s = r.choice([8, 16, 104, 264, 520, 776, 5, 513])
    matrices = r.choice([0, 1, 3]) if s < 500 else 1
    return [new(matrices, s, s) * r.choice([3, 100]), r.choice([1.0, 0.125])]


def attention_arguments(r, new):
    s = r.choice([8, 16, 104, 264, 520, 776, 5, 513])
    b, a = (r.choice([0, 1, 3]), r.choice([1, 2, 5])) if s < 200 else (r.choice([1, 2]), 1)
    key = dropout_key(1, r.randrange(99), torch.arange(b) + 7).to(new(1).device)
    scale = r.choice([1.0, 0.125])
    start = r.choice([0, 3, 2**20])
    return [new(b, a, s, s) * 3, key, scale, r.randrange(4), start, r.choice([0.1, 0.5, 0.9])]


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
    h = r.choice([8, 32, 264, 1032, 9])
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
    return [new(n, h), plan.order, plan.row_of]


def unpermute_arguments(r, new):
    n, k, h, plan = routed(r, new)
    probabilities = torch.rand(n, k, device=new(1).device)
    if r.random() < 0.5:
        # they lie in memory as [k, n]
        probabilities = probabilities.t().contiguous().t()
    rows = new(len(plan.order), h)
    if new(1).dtype == torch.float64:
        probabilities = probabilities.double()
    return [rows, probabilities, plan.row_of, plan.order]


# --- PyTorch's own --------------------------------------------------------------------------------


def dropout_add(x, bias, residual, key, site, start, p):
    x = x if bias is None else x + bias
    if key is None:
        return residual + x
    dropped = dropout_mask(key, site, x.shape, {1: start}, p)
    return residual + x.masked_fill(dropped, 0.0) * (1 / (1 - p))


def softmax(scores, scale):
    return (scores * scale + torch.full_like(scores, -math.inf).triu(1)).softmax(-1)


def softmax_then_dropout(scores, key, scale, site, start, p):
    dropped = dropout_mask(key, site, scores.shape, {1: start}, p)
    return softmax(scores, scale).masked_fill(dropped, 0.0) * (1 / (1 - p))


def norm(x, weight, bias, eps):
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def norm_beside(x, *rest):
    return x, norm(x, *rest)


def add_then_norm(x, residual, weight, bias, eps, x_bias):
    return norm_beside(residual + (x if x_bias is None else x + x_bias), weight, bias, eps)


# {name: (arguments, fused, PyTorch's own)}. The loss overwrites its logits, so it gets copies.
CASES = {
    "rms_norm": (
        lambda r, new: [*norm_arguments(r, new)[:2], 1e-5],
        kernels.rms_norm,
        lambda x, w, eps: F.rms_norm(x, w.shape, w, eps),
    ),
    "add_norm": (add_norm_arguments, kernels.add_norm, add_then_norm),
    # with the gradient that reaches x beside the norm
    "layer_norm": (
        lambda r, new: [*norm_arguments(r, new), 1e-5],
        lambda x, *rest: kernels.add_norm(x, None, *rest),
        norm_beside,
    ),
    "rotary": (
        rotary_arguments,
        kernels.rotary,
        lambda q, k, *table: (rotate(q, table), rotate(k, table)),
    ),
    "swiglu": (swiglu_arguments, kernels.swiglu, lambda gate, up: F.silu(gate) * up),
    "bias_gelu": (
        gelu_arguments,
        kernels.bias_gelu,
        lambda x, b: F.gelu(x if b is None else x + b, approximate="tanh"),
    ),
    "bias_dropout_add": (dropout_arguments, kernels.bias_dropout_add, dropout_add),
    "causal_softmax": (softmax_arguments, kernels.causal_softmax, softmax),
    "softmax_dropout": (attention_arguments, kernels.softmax_dropout, softmax_then_dropout),
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
    outputs = lesson.as_tuple(function(*args))
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


@pytest.mark.parametrize("trials", [range(2), again(range(2, 12))], ids=str)
@pytest.mark.parametrize(
    "dtype",
    [*NUMBERS[:2], again(torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_error_against_float64(place, name, dtype, trials):
    """At most twice the error of PyTorch's own operations, or of rounding the exact result once.
    Forward and backward. In half of the trials, at least, the kernel runs; in the others PyTorch's
    own operations do."""
    own = CASES[name][2]
    for trial in trials:
        args, results = fused_results(name, dtype, place, trial)
        results = [results, run(own, args, dtype, dtype), run(own, args, torch.float64, dtype)]
        for ours, theirs, exact in zip(*([*outputs, *gradients] for outputs, gradients in results)):
            if exact is None:
                assert ours is None
                continue
            assert ours.shape == exact.shape and ours.dtype == theirs.dtype
            if not launched:
                assert torch.equal(ours, theirs)
                continue
            limit = error_limit(name, theirs, exact)
            sizes = [getattr(a, "shape", a) for a in args]
            errors = error(ours, exact), error(theirs, exact)
            assert error(ours, exact) <= limit, (trial, sizes, errors)


def fused_results(name, dtype, place, trial):
    """(arguments, results of the fused operation). In every second trial the arguments are drawn
    until the kernel runs."""
    make, fused, _ = CASES[name]
    r = random.Random(f"{name} {dtype} {trial}")
    torch.manual_seed(trial)
    while True:
        args = make(r, lambda *shape: torch.randn(shape, device=place).to(dtype))
        if name not in ("rotary", "permute", "unpermute"):
            args = [strange(a, r) if is_float(a) else a for a in args]
        launched.clear()
        results = run(fused, args, dtype, dtype)
        if launched or trial % 2:
            return args, results


def error_limit(name, theirs, exact) -> float:
    """How far a result may be from the exact one, if PyTorch's own result is `theirs`."""
    epsilon = torch.finfo(theirs.dtype).eps
    rounding = error(exact.to(theirs.dtype), exact)
    # 2^-23, the precision of a float: PyTorch's own result may happen to be exact.
    limit = 2 * max(error(theirs, exact), rounding) + 2**-23
    # Computed in float and rounded once; but the backwards of softmax and of the norm of a sum
    # begin with rounded results.
    if theirs.dtype != torch.float32 and name not in ("causal_softmax", "add_norm"):
        limit = min(limit, 1.05 * rounding + epsilon / 64)
    # Rows of one element: x - mean = 0, so only rounding errors are left.
    if "norm" in name and exact.shape[-1:] == (1,):
        limit += 10 * epsilon / math.sqrt(1e-5)
    return limit


# of a norm's backward: vectors of a row, and of one thread; whole warps and not; 1, 2 or 16 rows a
# block
ROWS = [
    *[(1, False), (32, True), (96, True), (100, False), (1024, True), (1025, False)],
    *[(1536, True), (1537, False)],
    *[again(n, True) for n in (200, 256, 640, 1023, 2048)],
]


@pytest.mark.parametrize("vectors, with_x_bias", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, again(torch.float32)], ids=str)
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_norms_of_every_length(place, dtype, vectors, with_x_bias, monkeypatch):
    """More rows than blocks have at a time, so that each reads its next rows ahead; with a bias of
    x and without, of LayerNorms and RMSNorms. Rows of more than 1024 vectors add it before."""
    if place == "cpu":
        emulate(monkeypatch.setattr, multiprocessors=1)
    torch.manual_seed(vectors)
    h = vectors * cuda_kernels.VECTOR // dtype.itemsize
    rows = 37 if vectors <= 100 else 5
    x, residual = (1 + torch.randn(2, 1, rows, h, device=place)).to(dtype)
    weight, bias, x_bias = torch.randn(3, h, device=place).to(dtype)
    for args in (
        [x, residual, weight, bias, 1e-5, x_bias if with_x_bias else None],
        [x, residual, weight, None, 1e-5, x_bias if with_x_bias else None],
    ):
        launched.clear()
        ours = run(kernels.add_norm, args, dtype, dtype)
        apart = with_x_bias and (args[3] is None or vectors > 1024)
        kernel_of_x_bias = ["bias_dropout_add"] * apart
        assert launched == [*kernel_of_x_bias, "add_norm", "add_norm_backward"]
        theirs, exact = (run(add_then_norm, args, d, dtype) for d in (dtype, torch.float64))
        for a, b, c in zip(*([*y, *grads] for y, grads in (ours, theirs, exact))):
            if c is not None:
                assert error(a, c) <= error_limit("add_norm", b, c)


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


def update(states, decays, factor: float, step: int, eps: float = 1e-8, goes: float = 1.0) -> None:
    """kernels.adamw of several parameters, each [weight, low, master, gradient, exp_avg,
    exp_avg_sq], with a learning rate of 1e-2."""
    control = torch.tensor([factor, step, goes], device=states[0][0].device)
    more_memory[:] = [t for state in states for t in state if t is not None]
    kernels.adamw(*map(list, zip(*states)), decays, control, 1e-2, 0.9, 0.95, eps)
    more_memory.clear()


def exact_update(state, decay: float, factor: float, step: int, eps: float) -> tuple:
    """(master, exp_avg, exp_avg_sq) after one update, in float64."""
    weight, low, master, gradient, m, v = state
    start = adamw_master(weight, low, master).double()
    g = gradient.double() * factor
    exact_m = m.double() + 0.1 * (g - m.double())
    exact_v = 0.95 * v.double() + 0.05 * g.square()
    root = (exact_v / (1 - 0.95**step)).sqrt() + eps
    return start * (1 - 1e-2 * decay) - 1e-2 / (1 - 0.9**step) * exact_m / root, exact_m, exact_v


@pytest.mark.parametrize("factor, step, eps", [(1.0, 1, 1e-8), (0.25, 1000, 1e-2)])
@pytest.mark.parametrize(
    "kind",
    ["split", "itself", "beside bf16", again("beside fp16")],
)
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_adamw(place, kind, factor, step, eps):
    """The update of many parameters in one launch against float64. Odd sizes, nothing at all, and
    shards that begin between vectors. ε is outside of the root."""
    shapes = ((1,), (7,), (8,), (3, 333), (0,), (4099,), (64, 64), (2049,))
    states = [adamw_state(kind, shape, place) for shape in shapes]
    states += [[shifted(a) for a in adamw_state(kind, (n,), place)] for n in (9, 5000)]
    decays = [0.1 * (i % 3) for i in range(len(states))]
    expected = [exact_update(state, d, factor, step, eps) for state, d in zip(states, decays)]
    before = [[clone(a) for a in state] for state in states]
    update(states, decays, factor, step, eps, goes=0.0)
    for state, old in zip(states, before):
        assert all(a is None or torch.equal(a, b) for a, b in zip(state, old))
    launched.clear()
    update(states, decays, factor, step, eps)
    assert launched == ["adamw"]
    for (weight, low, master, _, m, v), (exact, exact_m, exact_v) in zip(states, expected):
        end = adamw_master(weight, low, master)
        torch.testing.assert_close(end.double(), exact, rtol=1e-6, atol=1e-7)
        if master is not None:
            assert torch.equal(weight, master.to(weight.dtype))
        for moment, exact_moment in ((m, exact_m), (v, exact_v)):
            # 16-bit state: one rounding.
            rtol = 0.51 * torch.finfo(moment.dtype).eps + 1e-6
            torch.testing.assert_close(moment.double(), exact_moment, rtol=rtol, atol=1e-7)


@by_emulator
def test_any_order_of_threads(monkeypatch):
    """Blocks and threads in any order, on any number of multiprocessors, give the same bits. Only
    sums over rows may differ, because another number of multiprocessors adds other parts."""
    x, dy = torch.randn(2, 9, 520)
    w, b = torch.randn(2, 520)
    logits = torch.randn(5, 5003)
    targets = torch.randint(5003, (5,))
    scores = torch.randn(2, 104, 104)
    keys = dropout_key(1, 1, torch.arange(1))

    def everything():
        _, y, mean, rstd, _ = kernels.norm_forward(x, None, None, w, b, 1e-5, 0)
        return [
            y,
            mean,
            rstd,
            *kernels.norm_backward(dy, None, x, w, mean, rstd, 2),
            *kernels.bias_gelu_backward(dy, x, b, 1),
            *kernels.cross_entropy_statistics(logits, targets, 5003),
            kernels.causal_softmax(scores, 0.5),
            kernels.softmax_dropout(scores[None], keys, 0.5, 1, 0, 0.5),
        ]

    results = {}
    for multiprocessors in (1, 3):
        for order in (0, 1, 2):
            emulate(monkeypatch.setattr, order, multiprocessors)
            result = everything()
            results[multiprocessors, order] = result
            assert all(map(torch.equal, result, results[multiprocessors, 0]))
    # dweight and dbias of LayerNorm, dbias of GELU
    sums_over_rows = (4, 6)
    for i, (x, y) in enumerate(zip(results[1, 0], results[3, 0])):
        assert torch.equal(x, y) or (i in sums_over_rows and error(x, y.double()) < 1e-6)


def broken(files: tuple[str, ...], text: str, replacement: str):
    """The emulator's library of some files, with one text in them replaced."""
    sources = {file: cuda_kernels.sources()[file] for file in files}
    assert sum(source.count(text) for source in sources.values()) == 1
    return cuda_on_cpu.load({f: source.replace(text, replacement) for f, source in sources.items()})


NORMS = "common.cuh", "rows.cuh", "norms.cu"


@by_emulator
@pytest.mark.parametrize(
    "text",
    [
        "of_warp[first + threadIdx.x / 32][n] = x[n];\n    __syncthreads();",
        again("// Only now may the next reduction overwrite of_warp.\n    __syncthreads();"),
    ],
    ids=["before reading", "before the next writing"],
)
def test_a_missing_barrier_is_seen(monkeypatch, text):
    """Without a barrier where warps exchange sums, some order of threads gives a wrong result."""
    x = torch.randn(40, 2048)
    w = torch.rand(2048)
    exact = x.clone().requires_grad_()
    F.layer_norm(exact, (2048,), w, w).backward(x)
    mean = x.mean(-1)
    rstd = (x.var(-1, correction=0) + 1e-5).rsqrt()
    emulate(monkeypatch.setattr)
    library = broken(NORMS, text, text.replace("__syncthreads();", ""))
    monkeypatch.setattr(cuda_kernels, "load", lambda dtype: (library, ""))
    errors = []
    for order in (0, 1, 2):
        extensions.call(library, "set_order", order, 2)
        # It reaches the barrier once for each row.
        dx = kernels.norm_backward(x, None, x, w, mean, rstd, 2)[0]
        errors.append((dx - exact.grad).abs().max().item())
    # NaN is an error too, and compares false.
    assert not all(e < 1e-3 for e in errors), errors


@by_emulator
def test_a_wrong_bound_is_seen(monkeypatch):
    """A kernel that writes a vector behind its output fails, and says so."""
    end = "write(y + i * W, out);\n}\n"
    files = "common.cuh", "rows.cuh", "swiglu.cu"
    library = broken(files, end, end.replace("W, out", "W + W, out"))
    emulate(monkeypatch.setattr)
    monkeypatch.setattr(cuda_kernels, "load", lambda dtype: (library, ""))
    with pytest.raises(RuntimeError, match="swiglu: a vector outside the tensors of the launch"):
        kernels.swiglu(torch.randn(64), torch.randn(64))


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_first_try_of_swiglu(place):
    """The naive kernel of the lecture gives the same bits."""
    for dtype in NUMBERS[:2]:
        gate, up = torch.randn(2, 1032, device=place, dtype=dtype)
        y = torch.empty_like(gate)
        cuda_kernels.launch("swiglu_naive", gate, gate, up, y, None, 1, y.numel(), 0)
        assert torch.equal(y, kernels.swiglu(gate, up))


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_mask_of_attention(place):
    """Bit for bit that of base/dropout.py, of heads 6 to 9 in three samples, forward and
    backward."""
    key = dropout_key(1, 1, torch.arange(3)).to(place)
    scores = torch.zeros(3, 4, 40, 40, device=place, requires_grad=True)
    launched.clear()
    y = kernels.softmax_dropout(scores, key, 1.0, 1, 6, 0.3)
    kept = (~dropout_mask(key, 1, scores.shape, {1: 6}, 0.3)).tril()
    assert torch.equal(y != 0, kept)
    # The score of a kept probability gains, that of a dropped one loses.
    y.sum().backward()
    both = kept.any(-1) & (~kept).tril().any(-1)
    assert torch.equal((scores.grad > 0)[both], kept[both]) and both.sum() > 300
    assert launched == ["softmax_dropout", "softmax_dropout_backward"]


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_frozen_norm(place, monkeypatch):
    """A norm whose weights are frozen computes no gradients of them; one that is half frozen, the
    other half; one that nobody uses, that of the bias which it has added."""
    x = torch.randn(4, 64, device=place, requires_grad=True)
    w = torch.randn(64, device=place)
    sums = []
    backward = kernels.norm_backward

    def noted(*args):
        sums.append(args[-1])
        return backward(*args)

    monkeypatch.setattr(kernels, "norm_backward", noted)
    kernels.layer_norm(x, w, w).sum().backward()
    assert sums == [0]
    expected = torch.autograd.grad(F.layer_norm(x, (64,), w, w).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
    b = torch.zeros(64, device=place, requires_grad=True)
    kernels.layer_norm(x, w, b).sum().backward()
    assert torch.equal(b.grad, torch.full_like(b, 4))
    kernels.add_norm(x[None], x[None], w, w, 1e-5, b)[0].sum().backward()
    assert torch.equal(b.grad, torch.full_like(b, 8)) and len(sums) == 2


# --- PyTorch's own checks -------------------------------------------------------------------------


def arguments(name: str, dtype: torch.dtype, place: str, trial: int = 0):
    make = CASES[name][0]
    r = random.Random(f"{name} {trial}")
    return make(r, lambda *shape: torch.randn(shape, device=place).to(dtype))


class FirstCalls(TorchDispatchMode):
    """{operation: copies of its arguments} of the operations that are called, the backward ones
    too."""

    def __init__(self):
        super().__init__()
        self.arguments = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "kernels" and op not in self.arguments:
            self.arguments[op] = tree_map_only(torch.Tensor, torch.clone, args)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_registrations(place, monkeypatch):
    """torch.library.opcheck: schemas name what is changed in place, meta tensors have the right
    shapes and strides, torch.compile agrees."""
    with FirstCalls() as calls:
        everything(place, [torch.bfloat16])
    names = {op.name() for op in calls.arguments}
    assert names == {name.removesuffix(".default") for name in cuda_kernels.LIBRARY._op_defs}
    # opcheck copies the arguments; the addresses of adamw's are not those that it was told
    monkeypatch.setattr(cuda_kernels, "call", real_call)
    if place == "cpu":
        extensions.call(cuda_kernels.load(torch.bfloat16)[0], "forget_memory")
    for op, args in calls.arguments.items():
        torch.library.opcheck(op, args)


@by_emulator
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", again("inductor")],
)
def test_compiled(backend, monkeypatch):
    """A function of several operations, forward and backward, in one graph. Without and with
    generated C++ for what is not an operation of kernels.py."""
    emulate(monkeypatch.setattr)

    key = dropout_key(1, 1, torch.arange(2))

    def function(x, w, b, gate, logits, targets):
        x, y = kernels.add_norm(
            kernels.add_norm(x, gate, w, None, 1e-5)[0], x, w, b, 1e-5, gate[0, 0], True
        )
        y = kernels.swiglu(kernels.swiglu(y, gate, notes=True), gate)
        y = kernels.bias_dropout_add(kernels.bias_gelu(y, b), b, x, key, 2, 0, 0.3)
        q, k = kernels.rotary(y[:, None], y[:, None], w[:12].repeat(8, 2), b[:12].repeat(8, 2))
        scores = q @ k.transpose(2, 3)
        p = kernels.causal_softmax(scores[:, 0], 0.5)
        p = p * kernels.softmax_dropout(scores, key, 0.5, 1, 0, 0.3)[:, 0]
        return p.sum() + kernels.cross_entropy(logits * 1.0, targets).sum() + q.square().sum()

    torch.manual_seed(0)
    x, gate, logits = torch.randn(3, 2, 8, 24)
    w, b = torch.randn(2, 24)
    args = [x, w, b, gate, logits, torch.randint(24, (2, 8))]
    results = []
    for f in (function, torch.compile(function, fullgraph=True, backend=backend)):
        copies = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
        y = f(*copies)
        y.backward()
        results.append([y.detach(), *(a.grad for a in copies[:-1])])
    for eager, compiled in zip(*results):
        torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-5)


# --- bad input ------------------------------------------------------------------------------------

X = torch.randn(2, 5, 24, device="meta")
W = torch.randn(24, device="meta")
I32 = torch.zeros(2, dtype=torch.int32, device="meta")
I64 = torch.zeros(2, 5, dtype=torch.int64, device="meta")
M = W.bfloat16()
T = X[0].t()


def dropped(x, key):
    kernels.bias_dropout_add(x, W, x, key, 1, 0, 0.1)


def adamw_of(weight, *others):
    lists = [[t] for t in (weight, None, None, *others, 0.1)]
    kernels.adamw(*lists, W[:3], 1e-3, 0.9, 0.95, 1e-8)


# what is said: the call
BAD_INPUT = {
    "add_norm: weight has shape [23], expected [24]": lambda: kernels.rms_norm(X, W[:23]),
    "add_norm: weight is torch.bfloat16, expected torch.float32": lambda: kernels.rms_norm(X, M),
    "add_norm: weight is on cpu, expected meta": lambda: kernels.rms_norm(X, torch.ones(24)),
    "rotary: cosine has shape [4, 24], expected [5, 24]": lambda: kernels.rotary(
        X[None], X[None], W.expand(4, 24), W.expand(5, 24)
    ),
    "bias_dropout_add: key is torch.int64, expected torch.int32": lambda: dropped(X, I32.long()),
    "bias_dropout_add: x has shape [5, 24], expected [5, 24, 'h']": lambda: dropped(X[0], I32),
    "causal_softmax: scores has shape [2, 5, 24], expected [2, 24, 24]": lambda: (
        kernels.causal_softmax(X, 1.0)
    ),
    "softmax_dropout: key has shape [2], expected [3]": lambda: kernels.softmax_dropout(
        X.new_empty(3, 2, 8, 8), I32, 1.0, 1, 0, 0.1
    ),
    "targets has shape [1, 5], expected [2, 5]": lambda: kernels.cross_entropy(X, I64[:1]),
    "unpermute: probabilities has shape [5, 3], expected [5, 2]": lambda: kernels.unpermute(
        X[0], X[0, :, :3], I64, I64[0]
    ),
    "in place is not contiguous": lambda: kernels.cross_entropy_gradient(
        torch.ones(2, 3).t(), torch.zeros(3, dtype=torch.int64), *[torch.ones(3)] * 3, 2
    ),
    "adamw: weight is not contiguous": lambda: adamw_of(T, T, T.bfloat16(), T.bfloat16()),
    "adamw: exp_avg is torch.float32, expected torch.bfloat16": lambda: adamw_of(W, W, W, M),
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input(words):
    with pytest.raises(ValueError, match=re.escape(words)):
        BAD_INPUT[words]()


def test_without_kernels():
    """Tensors of a CPU: PyTorch computes; what has no other way says why it cannot."""
    x = torch.randn(4, 64)
    assert torch.equal(kernels.swiglu(x, x), F.silu(x) * x)
    with pytest.raises(RuntimeError, match="swiglu: the kernels do not run here: no CUDA device"):
        torch.ops.kernels.swiglu(x, x, 0)


# --- building -------------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@pytest.mark.parametrize(
    "card, element",
    [
        (90, "__nv_bfloat16"),
        *[again(90, "float"), again(90, "__half")],
        *[again(80, "__nv_bfloat16"), again(80, "float"), again(100, "__nv_bfloat16")],
    ],
)
@pytest.mark.parametrize("file", sorted(path.name for path in cuda_kernels.CSRC.glob("*.cu")))
def test_compiles_for_every_card(tmp_path, file, card, element):
    """For sm_80, sm_90 and sm_100, with the options of torch's build, without warnings. Kernels
    that move vectors move 16 bytes at a time. None spills registers to memory, or keeps there what
    it indexes: local memory is as slow as the tensors' own."""
    from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

    flags = [*COMMON_NVCC_FLAGS, "-std=c++20", "-O3", "-Werror", "all-warnings", "-Xptxas", "-v"]
    flags += [f"-arch=sm_{card}", f"-DELEMENT={element}"]
    command = ["nvcc", "-cubin", cuda_kernels.CSRC / file, "-o", "kernels.cubin", "--keep", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    messages = done.stderr
    assert done.returncode == 0 and "warning" not in messages, messages
    ptx = next(tmp_path.glob("*.ptx")).read_text()
    frames = re.findall(r"Function properties for (\S+)\n +(\d+) bytes stack frame, (.*)", messages)
    assert len(frames) >= messages.count("Compiling entry function") > 0
    nothing = "0 bytes spill stores, 0 bytes spill loads"
    assert not [frame for frame in frames if frame[1:] != ("0", nothing)]
    of_16_bytes = r"(ld|st)(\.global)?(\.nc)?(\.\w+)*\.v4\.[ubf]32|\.v2\.[ubf]64|\.b128"
    for kernel in re.split(r"\.visible \.entry ", ptx)[1:]:
        name = kernel.split("(")[0]
        if "swiglu_by_element" not in name:
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


def fails_to_build(*args):
    raise RuntimeError("nvcc was here\nnvcc fatal error: no such thing\nstopped")


def test_without_a_compiler(monkeypatch, tmp_path):
    """A device that is too old, or no nvcc: the reason in one line, and the model is unchanged. On
    a CPU it has another fused attention."""
    load = cuda_kernels.load.__wrapped__
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert load(torch.bfloat16) == (None, "NVIDIA T4 has compute capability 7.5, and they need 8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(extensions, "compile_sources", fails_to_build)
    assert load(torch.bfloat16) == (None, "the build failed: nvcc fatal error: no such thing")
    assert load(torch.float64) == (None, "there are none for torch.float64")
    model = on_meta()
    monkeypatch.setattr(cuda_kernels, "load", lambda dtype: (None, "no nvcc"))
    assert kernels.apply(model, torch.device("cuda"), torch.bfloat16) == "no nvcc"
    assert not swapped(model)
    assert kernels.apply(model, torch.device("cpu"), torch.bfloat16) == "no CUDA device"
    assert swapped(model) == ["FusedAttention"]


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@pytest.mark.repetition
def test_builds_the_library(monkeypatch, tmp_path):
    """As on a GPU: nvcc, its flags, and a library whose functions can be called."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    library, reason = cuda_kernels.load.__wrapped__(torch.bfloat16)
    assert not reason and extensions.call(library, "adamw_elements") == 2048


def swapped(model) -> list[str]:
    """The classes of the modules that were handed something."""
    names = {name for _, name, _ in kernels.FUSED}
    return sorted({type(m).__name__ for m in model.modules() if names & vars(m).keys()})


@pytest.mark.parametrize(
    "fields, names",
    [
        ({}, "GELU LayerNorm Rotary"),
        (
            dict(num_layers=2, llama=True, attention="explicit", num_experts=2),
            "ExplicitAttention MoE RMSNorm Rotary SwiGLU",
        ),
        # no operation adds 1 to a weight, or multiplies with GELU
        (dict(llama=True, norm="rmsnorm1p", activation="geglu", qk_norm=True), "Rotary"),
        (dict(llama=True, norm="layernorm1p", activation="squared-relu"), "Rotary"),
    ],
    ids=str,
)
def test_what_is_handed_in(fields, names):
    """To which classes; every function stands where the class has one of the same name. Norms of
    heads are among them, those that the operations do not compute are not."""
    model = on_meta(**fields)
    kernels.swap(model)
    assert set(swapped(model)) == {"Block", "BiasDropoutAdd", "Head", *names.split()}
    assert all(hasattr(own, name) for own, name, _ in kernels.FUSED)
    model = on_meta(llama=True, qk_norm=True)
    kernels.swap(model)
    assert swapped(model.blocks["0"].attention.head_norms) == ["RMSNorm"]
    layer_norm = torch.nn.LayerNorm
    others = [layer_norm(8, bias=False), layer_norm((4, 8)), torch.nn.RMSNorm(8)]
    others = torch.nn.ModuleList([*others, layer_norm(8, elementwise_affine=False)])
    kernels.swap(others)
    assert not swapped(others)


class OtherProbabilities(gpt.CausalProbabilities):
    """In the place of the plain ones, as families.py puts some in."""


@by_emulator
def test_rotary_of_a_part_of_each_head(monkeypatch):
    """The operation rotates whole heads: a Nemotron's are left to PyTorch."""
    emulate(monkeypatch.setattr)
    q, k = torch.randn(2, 1, 2, 16, 8)
    for share, names in ((1.0, ["rotary"]), (0.5, [])):
        config = GPTConfig(1, 16, 2, llama=True, rotary_share=share)
        table = rotary_table(rotary_frequencies(config, q.device), 16, q)
        module = torch.nn.ModuleList([Rotary()])
        expected = module[0](q, k, table)
        kernels.swap(module)
        launched.clear()
        torch.testing.assert_close(module[0](q, k, table), expected)
        assert launched == names


@by_emulator
@pytest.mark.parametrize("what", ["none", "documents", "probabilities", "coordinates"])
def test_attention_that_the_operation_does_not_know(monkeypatch, what):
    """Another mask, or heads that are no range: as without kernels."""
    emulate(monkeypatch.setattr)
    core = gpt.ExplicitAttention(0.1, site=1)
    context = gpt.Context(dropout_key(1, 1, torch.arange(1)))
    if what == "documents":
        context = context._replace(documents=torch.zeros(1, 16, dtype=torch.int64))
    if what == "probabilities":
        core.probabilities = OtherProbabilities()
    if what == "coordinates":
        core.dropout.coordinates = lambda size, n: torch.arange(size).flip(0)
    qkv = torch.randn(3, 1, 2, 16, 8)
    expected = core(*qkv, context)
    kernels.swap(core)
    launched.clear()
    y = core(*qkv, context)
    if what == "none":
        torch.testing.assert_close(y, expected)
        assert launched == ["softmax_dropout"]
    else:
        assert torch.equal(y, expected) and not launched


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
    state = adamw_state("split", (8,), "cpu")
    versions = [t._version for t in state[:2]]
    update([state], [0.1], 1.0, 1)
    assert all(t._version > v for t, v in zip(state, versions))
    for name in ("swiglu", "rms_norm", "bias_gelu"):
        args = leaves(arguments(name, torch.float32, "cpu", 2), torch.float32)
        y = CASES[name][1](*args)
        (first,) = torch.autograd.grad(y.square().sum(), args[0], create_graph=True)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(first.sum(), args[0])


# --- in a model -----------------------------------------------------------------------------------


def swapped_and_emulated() -> None:
    """The kernels' CUDA source instead of PyTorch's own operations, on the CPU."""
    kernels.apply = lambda model, device, dtype: kernels.swap(model)
    emulate(setattr)


def swapped_without_sums() -> None:
    """A mutation: the statistics of the vocabulary-parallel loss are not all-reduced."""
    swapped_and_emulated()
    tensor_parallel.reduce_statistics = lambda *statistics: statistics[:3]


def swapped_without_residual() -> None:
    """A mutation: the gradient that goes round a norm is lost."""
    swapped_and_emulated()
    add_norm = kernels.add_norm
    kernels.add_norm = lambda x, *rest, **options: (x.detach(), add_norm(x, *rest, **options)[1])


def swapped_with_first_heads() -> None:
    """A mutation: every rank drops probabilities as if its heads were the first ones."""
    swapped_and_emulated()
    dropout = kernels.softmax_dropout
    kernels.softmax_dropout = lambda *args: dropout(*args[:4], 0, args[5])


EXPERTS = LLAMA | dict(
    num_experts=4, router="topk", router_topk=2, capacity_factor=1.0, micro_batch_size=2
)
LAYOUTS = [
    (SMALL, 1, dict()),
    # the second norm of a block adds the residual, and the bias
    (SMALL | dict(dropout=0.0), 2, dict(tp=2, sequence_parallel=True)),
    (LLAMA | dict(dropout=0.0), 1, dict(attention="explicit", micro_batch_size=1)),
    (LLAMA | dict(dropout=0.0), 2, dict(tp=2)),
    (SMALL, 2, dict(tp=2, sequence_parallel=True, recompute="selective")),
    (SMALL, 2, dict(zero_stage=3, recompute="full")),
    (EXPERTS, 2, dict(zero_stage=3)),
    (EXPERTS, 2, dict(tp=2, sequence_parallel=True, recompute="selective")),
    (SMALL, 2, dict(pp=2, schedule="zb-h1")),
    (EXPERTS, 2, dict(ep=2)),
    (EXPERTS, 2, dict(tp=2, recompute="full")),
    (LLAMA | dict(model="qwen3-0.6b", head_dim=8), 2, dict(tp=2)),
    (LLAMA | dict(model="gemma-2b", head_dim=16), 2, dict(tp=2, sequence_parallel=True)),
    (SMALL | dict(model="bloom-560m"), 2, dict(tp=2)),
    (SMALL | dict(model="falcon-180b", num_kv_heads=2), 2, dict(tp=2, sequence_parallel=True)),
    (SMALL | dict(model="nemotron-3-8b"), 2, dict(tp=2)),
    (SMALL | dict(command="bert.py", model="tiny"), 2, dict(tp=2, sequence_parallel=True)),
    (SMALL | dict(command="t5.py", model="t5-small", head_dim=8, target_length=6), 2, dict(tp=2)),
]
FP32 = dict(steps=1, precision="fp32", global_batch_size=4)


@pytest.mark.parametrize(
    "base, world, flags",
    [layout if i in (1, 2, 9) else again(*layout) for i, layout in enumerate(LAYOUTS)],
    ids=str,
)
@pytest.mark.parametrize("place", PLACES)
def test_same_training(place, base, world, flags):
    """The parity test, with the kernels in the model, in float32, against one device without them.
    On a GPU all ranks are on one. (The GPU tests of test_compositions are in float64, which the
    kernels do not compute.)"""
    if place == "gpu":
        if "pp" in flags:
            pytest.skip("ranks that share a GPU talk by gloo, which cannot send a GPU's tensors")
        assert not kernels.why_not(torch.float32), kernels.why_not(torch.float32)
        how = dict(device="cuda")
    else:
        # Here, so that the ranks do not all build it at once.
        emulated(torch.float32)
        how = dict(mutate=swapped_and_emulated)
    one_device = base | {"recompute": "none"} if base is EXPERTS else base
    ours = train(world, base=base, **how, **FP32 | flags)
    same(ours, train(base=one_device, **FP32), 1e-5)


@by_emulator
@pytest.mark.parametrize(
    "mutate, world",
    [(swapped_without_sums, 2), (swapped_without_residual, 1), (swapped_with_first_heads, 2)],
)
def test_mutations_are_seen(mutate, world):
    emulated(torch.float32)
    differs(train(world, base=SMALL, mutate=mutate, tp=world, **FP32), train(base=SMALL, **FP32))


@by_emulator
@pytest.mark.parametrize(
    "precision, state", [("bf16", "bf16"), again("bf16", "fp32"), again("fp32", "bf16")]
)
def test_optimizer_in_one_pass(precision, state):
    """AdamW with the operation and without it: the same parameters, up to the rounding of 16-bit
    moments. The operation scales the clipped gradient itself."""
    flags = dict(precision=precision, optimizer_state=state, steps=2)
    emulated(torch.bfloat16 if precision == "bf16" else torch.float32)
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
    emulate(setattr)
    make = optimizer.AdamW
    optimizer.AdamW = lambda *args, **options: make(*args, **options | {"fused": kernels.adamw})


def everything(place, dtypes=NUMBERS) -> None:
    """Every operation, forward and backward, at odd sizes."""
    torch.manual_seed(0)
    for dtype in dtypes:
        for name in CASES:
            for trial in range(2):
                fused_results(name, dtype, place, trial)
        x, (amax, inverse) = torch.randn(80, 144).to(place, dtype), torch.zeros(2, 1, device=place)
        fp8_cast.fp8_maximum(x, amax, None)
        fp8_cast.fp8_cast(x, amax, inverse, None, 80, 80, 0, 1)
    for kind in ("split", "beside bf16"):
        update([adamw_state(kind, (4099,), place)], [0.1], 0.5, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="no compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_sanitizer(tool):
    """Every operation, at odd sizes, under NVIDIA's checkers."""
    # Built here, outside the checker.
    assert not any(kernels.why_not(dtype) for dtype in NUMBERS)
    script = f"import sys; sys.path[:0] = {sys.path!r}; import test_kernels as t;"
    script += (
        " t.cuda_kernels.call = t.call_noted; t.everything('cuda'); t.torch.cuda.synchronize()"
    )
    checker = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    done = subprocess.run(
        [*checker, sys.executable, "-c", script],
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
