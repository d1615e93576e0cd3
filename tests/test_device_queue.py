"""A step of training asks the device for nothing.

On the meta device tensors have no values, so whatever would wait for one raises: `.item()`,
`bool(tensor)`, `.tolist()`, shapes that depend on data. A step that runs there never waits on a
GPU. Collectives do nothing there: ranks have their shapes, and no values to send.
"""

import time

import parity
import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp
import optimizer
import sequence_parallel
import train as trainer
from base.device_queue import Moment, number, to_device, to_host
from base.groups import Groups
from course import ranks

aten = torch.ops.aten
BASE = parity.SMALL | dict(precision="bf16", global_batch_size=4, micro_batch_size=2)
META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts copies between the host (cpu) and the device (meta)."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket in (aten._to_copy, aten.copy_):
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
            self.count += len({x.device for x in tensors}) > 1
        return result


class Made(TorchFunctionMode):
    """Counts tensors that Python numbers are copied into: on the device that is a pageable copy."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        made = func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
        self.count += made and result.device == META
        return result


class Done:
    def wait(self):
        pass


def no_collectives():
    def nothing(*args, **kwargs):
        return Done()

    for name in ("all_reduce", "all_gather", "isend", "irecv"):
        setattr(dist, name, nothing)
    for module in (fsdp, sequence_parallel):
        module.all_gather = module.reduce_scatter = nothing


def copies_in_steps(rank: int, world: int, variants: list[dict], mutate=None) -> list[tuple]:
    """`copies_in_a_step` of several configurations."""
    if mutate:
        mutate()
    return [copies_in_a_step(world, flags) for flags in variants]


def copies_in_a_step(world: int, flags: dict) -> tuple[int, int]:
    """(copies between host and device, tensors made of Python numbers)"""
    config = trainer.Config(**BASE | flags)
    groups = Groups()
    if world > 1:
        groups = Groups.make("cpu", world, **config.mesh)
        no_collectives()
    t = trainer.Trainer(config, META, groups)
    dataset = parity.Synthetic(t.model_config.seq_length, t.model_config.vocab_size)
    with Copies() as copies, Made() as made:
        t.forward_backward(1, dataset)
        t.update(1)
    return copies.count, made.count


# by the number of ranks; a rank has 2 micro-batches
LAYOUTS = {
    1: [
        {},
        dict(precision="fp32", recompute="full", head_chunk=16),
        dict(optimizer_state="bf16", model="llama2-7b", ffn_hidden_size=56),
    ],
    2: [
        dict(global_batch_size=8),
        dict(global_batch_size=8, zero_stage=1, precision="fp32"),
        dict(global_batch_size=8, zero_stage=3, optimizer_state="bf16"),
        dict(tp=2, sequence_parallel=True, recompute="selective"),
        dict(pp=2, schedule="zb-h1"),
    ],
}


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_never_waits(world):
    """And the only copies are the four tensors of each batch."""
    for copies in ranks.run(copies_in_steps, world, world, LAYOUTS[world]):
        assert copies == [(4 * 2, 0)] * len(LAYOUTS[world])


def reads_the_loss():
    original = trainer.Trainer.run_micro_batches

    def run_micro_batches(self, forward, m, loss_grad):
        original(self, lambda *args: (y := forward(*args), y.item())[0], m, loss_grad)

    trainer.Trainer.run_micro_batches = run_micro_batches


def skips_on_the_host():
    original = optimizer.AdamW.update_parameters

    def update_parameters(self, lr, factor, finite):
        if finite:
            original(self, lr, factor, finite)

    optimizer.AdamW.update_parameters = update_parameters


def lists_the_norm():
    original = optimizer.global_norm
    optimizer.global_norm = lambda *args: original(*args) + 0 * sum(original(*args)[None].tolist())


def selects_by_a_mask():
    original = optimizer.global_norm

    def selected(*args):
        norm = original(*args)[None]
        return norm[norm > 0].sum()

    optimizer.global_norm = selected


@pytest.mark.parametrize(
    "mutate", [reads_the_loss, skips_on_the_host, lists_the_norm, selects_by_a_mask]
)
def test_waiting_is_seen(mutate):
    with pytest.raises(Exception, match="meta"):
        ranks.run(copies_in_steps, 1, 1, [{}], mutate)


def copies_a_number():
    trainer.number = lambda value, dtype, device: torch.tensor(value, device=device)


def copies_a_tensor():
    trainer.number = lambda value, dtype, device: torch.tensor(value, dtype=dtype).to(device)


@pytest.mark.parametrize("mutate, seen", [(copies_a_number, (8, 1)), (copies_a_tensor, (9, 0))])
def test_copies_are_seen(mutate, seen):
    assert ranks.run(copies_in_steps, 1, 1, [{}], mutate) == [[seen]]


@pytest.mark.parametrize("flags", [dict(precision="fp16"), dict(num_experts=4)], ids=str)
def test_what_waits_by_its_nature(flags):
    """The loss scale of fp16; how many tokens an expert has."""
    with pytest.raises(Exception, match=r"[mM]eta"):
        ranks.run(copies_in_steps, 1, 1, [flags])


def test_on_a_cpu_nothing_is_copied():
    tensor = torch.arange(6.0)
    assert to_host(tensor) is tensor and to_device(tensor, "cpu") is tensor
    begin = Moment(torch.device("cpu"))
    time.sleep(0.01)
    end = Moment(torch.device("cpu"))
    end.wait()
    assert 0.01 <= end.seconds_since(begin) < 1
    for value in (0.1, True, 3, torch.tensor(0.1, dtype=torch.float64)):
        assert number(value, torch.float64, torch.device("cpu")).item() == value


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, dict(optimizer_state="bf16"), dict(precision="fp32")])
def test_cuda_sees_no_synchronisation(flags):
    """CUDA's own debug mode, over a whole step and the way of its numbers to the host."""
    device = torch.device("cuda")
    # 4096 tokens: some kernels differ for few and for many
    sizes = dict(device="cuda", hidden_size=256, seq_length=1024, micro_batch_size=4)
    config = trainer.Config(**BASE | sizes | dict(global_batch_size=8) | flags)
    t = trainer.Trainer(config, device, Groups())
    dataset = parity.Synthetic(t.model_config.seq_length, t.model_config.vocab_size)
    for step in (1, 2, 3):
        if step == 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            begin = Moment(device)
            loss = t.forward_backward(step, dataset)
            norm, _ = t.update(step)
            numbers = to_host(torch.stack((loss, norm, number(1.0, torch.float64, device))))
            end = Moment(device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    end.wait()
    assert numbers.is_pinned() and numbers.isfinite().all()
    assert end.seconds_since(begin) > 0
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss.item()
        finally:
            torch.cuda.set_sync_debug_mode("default")
