import math
from types import SimpleNamespace
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp
import optimizer as of_gradients
import sharding
from course import ranks
from course.parity import on_rank
from optimizer import GradientAccumulator, LossScaler, add_product, fuse_accumulation, global_norm
from pipeline_parallel import Pipeline
from schedules import Action
from sharding import Shard, local_part, shard_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_are_summed_in_float32(dtype):
    """100 micro-batches whose gradient is 1 + 1/128: a 16-bit sum would stall."""
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    scaler = LossScaler(scale=8.0) if dtype == torch.float16 else None
    gradients = GradientAccumulator(model, scaler)
    loss_grad = torch.tensor(scaler.scale if scaler else 1, dtype=dtype)
    for _ in range(100):
        x = torch.tensor([[1 + 1 / 128]], dtype=dtype)
        model(x).sum().backward(loss_grad)
    gradients.reduce_gradients()
    assert model.weight.main_grad.dtype == torch.float32
    assert model.weight.main_grad.item() == pytest.approx(100 + 100 / 128, rel=1e-6)


class TiedTwice(nn.Module):
    """y = (a + b) w, where w is one weight under two names, with the gradients a and b."""

    def __init__(self, dtype):
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False, dtype=dtype)
        self.second = nn.Linear(1, 1, bias=False, dtype=dtype)
        self.second.weight = self.first.weight

    def forward(self, a, b):
        return self.first(a) + self.second(b)


def one_tied_gradient(rank, stage, dtype, a, b):
    model = TiedTwice(dtype)
    if stage is None:
        gradients = GradientAccumulator(model)
    else:
        gradients = fsdp.apply(model, dist.group.WORLD, stage)
    for last in (False, True):
        if last:
            gradients.next_backward_is_last()
        first = torch.full((1, 1), a, dtype=dtype)
        second = torch.full((1, 1), b, dtype=dtype)
        model(first, second).sum().backward()
    gradients.reduce_gradients()
    return local_part(model.first.weight).main_grad.item()


@pytest.mark.parametrize("stage", [None, 0, 2], ids=str)
@pytest.mark.parametrize(
    "dtype, a, b",
    [(torch.float16, 60000.0, 50016.0), (torch.bfloat16, 256.0, 1.0)],
    ids=["overflow", "rounding"],
)
def test_a_tied_weight_sums_its_uses_in_float32(stage, dtype, a, b):
    """110016 is infinite in fp16, 257 is 256 in bf16. The sum of two micro-batches."""
    (gradient,) = ranks.run(one_tied_gradient, 1, stage, dtype, a, b)
    assert gradient == 2 * (a + b)


# --- the sum inside the matrix multiplication -----------------------------------------------------


def fuse_on_cpus():
    of_gradients.is_fusable = lambda p: True


# its tied matrix is alone in the unit of the embedding
TIED = parity.LLAMA | dict(model="llama3.2-1b")
PIPELINE = parity.SMALL | dict(pp=2, micro_batch_size=1)
FUSED = {
    "one device": (1, [parity.SMALL, parity.LLAMA, TIED], dict(micro_batch_size=2)),
    "data": (2, [parity.SMALL, parity.LLAMA, TIED], dict(micro_batch_size=1)),
    "tensor": (
        2,
        [dict(tp=2), dict(tp=2, sequence_parallel=True, recompute="full")],
        parity.LLAMA | dict(micro_batch_size=2),
    ),
    "pipeline": (2, [dict(schedule="1f1b"), dict(schedule="zb-h1")], PIPELINE),
    # or in parts
    "left alone": (
        2,
        [
            dict(zero_stage=1),
            dict(head_chunk=8),
            dict(num_experts=4, ep=2),
            dict(fp8="current", num_layers=4),
        ],
        parity.SMALL | dict(micro_batch_size=2),
    ),
}


@pytest.mark.parametrize(
    "world, variants, common",
    [
        *(pytest.param(*case, id=name) for name, case in FUSED.items()),
        parity.again(4, [dict(schedule="zb-h1")], PIPELINE, id="data and pipeline"),
    ],
)
def test_fused_sums_are_those_of_one_device(world, variants, common):
    variants = [common | variant for variant in variants]
    results = ranks.run(on_rank, world, world, variants, 3, fuse_on_cpus)[0]
    for flags, result in zip(variants, results, strict=True):
        # also its experts and its FP8 scales, which are about a micro-batch
        kept = parity.OF_LAYOUT - {"micro_batch_size"}
        one = {name: value for name, value in flags.items() if name not in kept}
        parity.same(result, parity.train(base=one | dict(device="cpu")))


def fuse_and_compile_on_cpus():
    fuse_on_cpus()
    parity.without_cpp()


@parity.needs_compiler
@pytest.mark.parametrize(
    "world, base, flags",
    [(1, parity.LLAMA, {}), parity.again(2, parity.LLAMA, dict(tp=2))],
)
def test_compiled_layers_have_them_too(world, base, flags):
    """Between their graphs; counted, because gradients that are added apart would be the same."""
    base = base | dict(num_layers=1)
    flags = base | flags | dict(compile=True, micro_batch_size=2)
    results = ranks.run(counted_products, world, world, flags)
    count, result = results[0]
    # of query, key, value, output, three of the MLP, and an untied head
    weights = 4 + 3 + 1
    assert count == weights * 3 * (8 // 2)
    parity.same(result, parity.train(base=base | dict(device="cpu")))


def counted_products(rank, world, flags):
    """(products that three steps have added to sums of gradients, their result)"""
    fuse_and_compile_on_cpus()
    counted = mock.Mock(side_effect=GradientAccumulator.accumulate_product)
    GradientAccumulator.accumulate_product = lambda *args: counted(*args)
    (result,) = on_rank(rank, world, [flags], 3, None)
    return counted.call_count, result


def error_of_a_sum(way, dtype, scaler):
    """Of the gradient of a weight over eight micro-batches, beside float64's."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(8, 32, 24, generator=g).to(dtype)
    grad_output = torch.randn(8, 32, 16, generator=g).to(dtype)
    model = nn.Sequential(nn.Linear(24, 16)).to(dtype)
    weight = model[0].weight
    if way == "data":
        accumulator = fsdp.apply(model, dist.group.WORLD, 0, scaler)
    else:
        accumulator = GradientAccumulator(model, scaler)
    fuse_accumulation(model, accumulator)
    for _ in range(2):
        # the second step does not see the sums of the first
        accumulator.zero_grad()
        for k in range(8):
            if k == 7:
                accumulator.next_backward_is_last()
            deferred = []
            weight.deferred = deferred if way == "zero bubble" else None
            model(x[k]).backward(grad_output[k])
            weight.deferred = None
            step = SimpleNamespace(deferred={(0, k): deferred})
            Pipeline.weight_gradients(None, step, Action("W", 0, k))
        accumulator.reduce_gradients()
    scale = scaler.scale if scaler else 1
    exact = (grad_output.double().transpose(1, 2) @ x.double()).sum(0) / scale
    assert weight.main_grad.dtype == torch.float32
    return ((weight.main_grad - exact).norm() / exact.norm()).item()


def errors_of_sums(rank, dtype):
    scaler = LossScaler(scale=8.0) if dtype == torch.float16 else None
    # a CPU does not fuse
    errors = {"plain": error_of_a_sum("one device", dtype, scaler)}
    fuse_on_cpus()
    for way in ("one device", "data", "zero bubble"):
        errors[way] = error_of_a_sum(way, dtype, scaler)
    return errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_sum_is_not_rounded_to_16_bits(dtype):
    """In fp16, unscaled too."""
    (errors,) = ranks.run(errors_of_sums, 1, dtype)
    assert errors.pop("plain") > 1e-4
    assert max(errors.values()) < 1e-6, errors


class Calls(TorchDispatchMode):
    """Which operations PyTorch would run, with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.append((op, args, kwargs))
        return kwargs["out"] if "out" in (kwargs or {}) else op(*args, **kwargs or {})


def test_the_product_on_a_gpu_is_one_call():
    """Of PyTorch's overload for sums of another type, which is not there for CPUs. Its schema takes
    the arguments by these names."""
    total = torch.empty(16, 24, device="meta")
    grad_output, x = (torch.empty(32, n, device="meta", dtype=torch.bfloat16) for n in (16, 24))
    for beta in (0, 1):
        with Calls() as calls:
            add_product(total, grad_output, x, beta, 0.125)
        # a transposed matrix is a view
        *_, (op, args, options) = calls.seen
        assert op == torch.ops.aten.addmm.dtype_out and len(calls.seen) == 2
        assert args[0] is total and args[1].shape == (16, 32) and args[2] is x
        assert args[3] == torch.float32
        # an argument that has its default is not passed on
        assert options.pop("out") is total and options.pop("beta", 1) == beta
        assert options == dict(alpha=0.125)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_on_a_gpu(dtype):
    """Into a sum that lies anywhere in a unit, as fsdp.py has it."""
    torch.manual_seed(0)
    grad_output, x = (torch.randn(72, n).to(dtype) for n in (40, 56))
    start = torch.randn(3 + 40 * 56)
    for beta in (0, 1):
        sums = []
        for device in ("cpu", "cuda"):
            total = start.clone().to(device)[3:].view(40, 56)
            if beta == 0:
                total.fill_(torch.nan)
            add_product(total, grad_output.to(device), x.to(device), beta, 0.125)
            sums.append(total.cpu())
        torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)


def scale_that_fits():
    of_gradients.LossScaler = lambda: LossScaler(2.0**12)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_pipelines_have_the_gradients_of_one_device_in_16_bits(precision):
    """The matrix multiplications are the same; only the rounding of float32 sums differs."""
    flags = dict(precision=precision, mutate=scale_that_fits, steps=1, micro_batch_size=1)
    one_device = parity.train(**flags)
    for world, layout in ((2, dict(pp=2)), (4, dict(pp=2, zero_stage=3))):
        worst = parity.difference(parity.train(world, **layout, **flags), one_device)
        assert worst["gradient"] < 1e-6 and worst["norm"] < 1e-6, worst


def test_loss_scaler_by_hand():
    """NeMo's constants. With hysteresis 2 the first overflow changes nothing, each further one
    halves the scale, and an interval of good steps restores the hysteresis. (The first step is
    good, because before a good one the scale is searched for.)"""
    scaler = LossScaler()
    assert (scaler.scale, scaler.interval, scaler.hysteresis) == (2**32, 1000, 2)
    scaler = LossScaler(scale=16.0, interval=3)
    scaler.update(True)
    scales = []
    for finite in (False, False, False, True, True, True, False, False):
        scaler.update(finite)
        scales.append(scaler.scale)
    assert scales == [16, 8, 4, 4, 4, 8, 8, 4]
    loaded = LossScaler()
    loaded.load_state_dict(scaler.state_dict())
    assert loaded.__dict__ | {"interval": 3} == scaler.__dict__


def test_the_first_scale_is_found_in_a_few_steps():
    """The scale falls by 2^8 at a time, down to 1, until a step is finite. After that it falls by
    halves, and hysteresis is complete."""
    scaler = LossScaler()
    scales = []
    for finite in (False, False, True, False, False):
        scaler.update(finite)
        scales.append(math.log2(scaler.scale))
    assert scales == [24, 16, 16, 16, 15]
    scaler = LossScaler()
    exhausted = []
    for _ in range(5):
        scaler.update(False)
        exhausted.append(scaler.exhausted)
    assert scaler.scale == 1 and exhausted == [False] * 4 + [True]


def test_a_loss_scaler_of_an_older_checkpoint():
    """Its state has no search in it: the scale falls by halves. A scaler that is searching goes on
    with the search when it is loaded."""
    scaler = LossScaler()
    scaler.load_state_dict({"scale": 2.0**20, "good_steps": 0, "tolerance": 1})
    scaler.update(False)
    assert scaler.scale == 2**19
    half_way = LossScaler()
    resumed = LossScaler()
    half_way.update(False)
    resumed.load_state_dict(half_way.state_dict())
    resumed.update(False)
    assert resumed.scale == 2**16


def norm_of_slices(rank):
    whole = torch.arange(1.0, 8.0, dtype=torch.float64)
    sliced = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    replicated = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    sliced.sharding = sharding.Sharding((7,), (Shard(0, dist.group.WORLD),))
    sliced.main_grad = shard_of(whole, sliced.sharding)
    replicated.main_grad = torch.full((3,), 2.0, dtype=torch.float64)
    return global_norm([sliced, replicated]).item()


def test_global_norm_of_nothing_is_zero():
    """A pipeline stage may have nothing to train, or no gradient."""
    without = nn.Parameter(torch.zeros(2))
    without.main_grad = None
    for parameters in ([], [without]):
        norm = global_norm(parameters)
        assert norm.item() == 0 and norm.dtype == torch.float64


def test_global_norm_counts_each_slice_once():
    """√(1² + ... + 7² + 3 · 2²): the replicated parameter counts once, and both ranks hold it."""
    assert ranks.run(norm_of_slices, 2) == pytest.approx([math.sqrt(152)] * 2, rel=1e-14)
