import math

import parity
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
import sharding
import train as trainer
from gradients import GradientAccumulator, LossScaler, global_norm
from proof import ranks
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


def scale_that_fits():
    trainer.LossScaler = lambda: LossScaler(2.0**12)


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
    with pytest.raises(ValueError, match="not the state of a loss scaler"):
        scaler.load_state_dict(
            {"scale": 2.0**20, "good_steps": 0, "tolerance": 1, "searching": "no"}
        )


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
