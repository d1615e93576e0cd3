"""What stands in the place of a cluster and of values, for planning/as_rank.py.

    with fake_world(rank, world), stand_ins():
        ..          a step on META, by the trainer's own code

The meta device has no values, so nothing may read one: every token counts in the loss, and each
expert gets an even share of the tokens. Some functions would take apart what a GPU does in one
operation, or look for a backend; STAND_INS has what runs in their place.
"""

import contextlib
import dataclasses
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import context_parallel
import fp8
import moe
from base import attention_kernels, dropout, float8
from moe import DispatchPlan, Routing
from run.data import Batch, Dataset

META = torch.device("meta")
aten = torch.ops.aten

# --- values ---------------------------------------------------------------------------------------


class Tokens(Dataset):
    """A data set of shapes, in which every token counts."""

    def __init__(self, s: int, document_mask: bool = False):
        self.s = s
        self.document_mask = document_mask

    def batch(self, samples) -> Batch:
        shape = len(samples), self.s
        tokens = torch.empty(shape, dtype=torch.int64, device=META)
        mask = torch.empty(shape, dtype=torch.bool, device=META)
        documents = tokens.clone() if self.document_mask else None
        return Batch(tokens, tokens.clone(), mask, tokens[:, 0].clone(), documents)


def even_scores(k: int, logits: Tensor, training: bool = True) -> Tensor:
    """Scores whose k largest give token n the experts n k, n k + 1, .. (modulo E). logits, result:
    [n, E]"""
    n, e = logits.shape
    first = k * torch.arange(n, device=logits.device).unsqueeze(1)
    return -((torch.arange(e, device=logits.device) - first) % e).to(logits.dtype)


class EvenRouting(Routing):
    """Takes the place of a router's Routing on the meta device: how many rows an expert gets is a
    value. The plan is made on the CPU, from even scores; what it indexes is on the meta device."""

    def forward(self, logits: Tensor, real: Tensor | None = None) -> DispatchPlan:
        self.scores = partial(even_scores, self.k)
        plan = super().forward(torch.zeros(logits.shape, dtype=logits.dtype), real)
        on_meta = {}
        for name, value in plan._asdict().items():
            # of the counts the host reads each number
            if isinstance(value, Tensor) and name != "counts":
                on_meta[name] = value.to(META)
        return plan._replace(**on_meta)

    def exchange(self, counts: Tensor) -> Tensor:
        super().exchange(counts)
        # the other ranks send what this one sends
        ep = self.group.size()
        return counts.view(ep, -1)[self.group.rank()].repeat(ep)


def with_even_routing(task):
    """The task, on a model whose routers need no values."""
    before = task.before_techniques

    def before_techniques(stage) -> None:
        before(stage)
        for layer in moe.ExpertLayers(stage).values():
            layer.routing.__class__ = EvenRouting

    task.before_techniques = before_techniques
    return task


# --- functions ------------------------------------------------------------------------------------


def attention_in_one(
    q: Tensor, k: Tensor, v: Tensor, attn_mask=None, is_causal: bool = True, enable_gqa=False
) -> Tensor:
    """F.scaled_dot_product_attention. On the meta device torch takes it apart, into matrices of s²
    scores. This is one operation, which keeps q, k, v, the output and a number for each row; and
    what a window or ALiBi adds to the scores (families.py). A mask of documents is boolean,
    and the kernel for GPUs does not keep it (base/document_mask.py)."""
    bias = attn_mask if attn_mask is not None and attn_mask.is_floating_point() else None
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    return attention(q, k, v, 0.0, bias is None, attn_mask=bias)[0]


def mask_without_bits(key: Tensor, site: int, shape, start: dict[int, int], p: float) -> Tensor:
    """dropout.dropout_mask, without its hash: twenty operations, half of the time of a step."""
    return torch.empty(shape, dtype=torch.bool, device=key.device)


def one_after_the_other(ops: list[dist.P2POp]) -> list[dist.Work]:
    """dist.batch_isend_irecv, which looks for the backend of a device that is not there."""
    return [op.op(op.tensor, op.peer, op.group, op.tag) for op in ops]


def in_both_layouts(a: float8.Quantised) -> tuple[float8.Quantised, float8.Quantised]:
    """float8.in_both_layouts, as on a GPU: bytes by rows and by columns."""
    return a, dataclasses.replace(a, q=a.q.clone())


# (module, name of a function): what the meta device runs in its place
STAND_INS = {
    (F, "scaled_dot_product_attention"): attention_in_one,
    (dropout, "dropout_mask"): mask_without_bits,
    (context_parallel, "dropout_mask"): mask_without_bits,
    (context_parallel, "kernel_for"): lambda q, k: attention_kernels.make(attention_kernels.Kernel),
    (dist, "batch_isend_irecv"): one_after_the_other,
    (fp8, "in_both_layouts"): in_both_layouts,
}


@contextlib.contextmanager
def stand_ins():
    with contextlib.ExitStack() as stack:
        for where, function in STAND_INS.items():
            stack.enter_context(mock.patch.object(*where, function))
        yield


# --- a cluster ------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_world(rank: int, world: int):
    """A process group of `world` ranks, of which this process is one, and there is no other."""
    # importing it takes a moment, which other runs need not spend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if world == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
