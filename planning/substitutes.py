"""What takes the place of a cluster and of values, for planning/as_rank.py.

    with cluster(rank, world):
        ..          a trainer on META, and its steps, by its own code

The meta device has no values, so nothing may read one: every token counts in the loss, and each
expert gets an even share of the tokens. Some functions would take apart what a GPU does in one
operation, or look for a backend; SUBSTITUTES has what runs in their place.
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
from base.model_config import MoEConfig
from moe import Dispatch, Routing
from run.data import Batch, Dataset

META = torch.device("meta")
aten = torch.ops.aten

# --- values ---------------------------------------------------------------------------------------


class Tokens(Dataset):
    """A data set of shapes, in which every token counts."""

    def __init__(self, model: MoEConfig, document_mask: bool = False, batch_class: type = Batch):
        self.s = model.seq_length + model.target_length
        self.target_length = model.target_length or model.seq_length
        self.document_mask = document_mask
        self.batch_class = batch_class

    def batch(self, samples) -> Batch:
        b, s, m = len(samples), self.s, self.target_length
        tokens = torch.empty((b, s), dtype=torch.int64, device=META)
        targets = torch.empty((b, m), dtype=torch.int64, device=META)
        mask = torch.empty((b, m), dtype=torch.bool, device=META)
        documents = tokens.clone() if self.document_mask else None
        return self.batch_class(tokens, targets, mask, tokens[:, 0].clone(), documents)


def even_scores(k: int, logits: Tensor, training: bool = True) -> Tensor:
    """Scores whose k largest give token n the experts n k, n k + 1, .. (modulo E). logits, result:
    [n, E]"""
    n, e = logits.shape
    first = k * torch.arange(n, device=logits.device).unsqueeze(1)
    return -((torch.arange(e, device=logits.device) - first) % e).to(logits.dtype)


class EvenRouting(Routing):
    """A router's plan on the meta device: how many rows an expert gets is a value. The plan is made
    on the CPU, from even scores; what it indexes is on the meta device."""

    def __init__(self, scores, config: MoEConfig):
        super().__init__(partial(even_scores, config.router_topk), config)

    def forward(self, logits: Tensor, real: Tensor | None = None) -> Dispatch:
        plan = super().forward(torch.zeros(logits.shape, dtype=logits.dtype), real)
        on_meta = {}
        for name, value in plan._asdict().items():
            # The host reads each number of the counts.
            if isinstance(value, Tensor) and name != "rows_per_expert":
                on_meta[name] = value.to(META)
        return plan._replace(**on_meta)

    def exchange(self, counts: Tensor) -> Tensor:
        super().exchange(counts)
        # The other ranks send what this one sends.
        ep = self.group.size()
        return counts.view(ep, -1)[self.group.rank()].repeat(ep)


# --- functions ------------------------------------------------------------------------------------


def attention_in_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask=None,
    is_causal: bool = True,
    enable_gqa=False,
    scale: float | None = None,
) -> Tensor:
    """F.scaled_dot_product_attention. On the meta device torch takes it apart, into matrices of s²
    scores. This is one operation, which keeps q, k, v, the output and a number for each row; and
    what a window, ALiBi (families.py) or T5 adds to the scores. A mask of documents is boolean,
    and the kernel for GPUs does not keep it (base/document_mask.py)."""
    bias = attn_mask if attn_mask is not None and attn_mask.is_floating_point() else None
    learned = bias is not None and bias.requires_grad
    if learned or v.shape[-1] != k.shape[-1]:
        # T5 learns it, and this kernel for GPUs has its gradient; or values have another width.
        bias = bias.expand(*q.shape[:3], k.shape[2]) if learned else bias
        attention = aten._scaled_dot_product_efficient_attention
        return attention(q, k, v, bias, True, scale=scale)[0]
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    return attention(q, k, v, 0.0, bias is None, attn_mask=bias, scale=scale)[0]


def mask_without_bits(key: Tensor, site: int, shape, start: dict[int, int], p: float) -> Tensor:
    """dropout.dropout_mask, without its hash: twenty operations, half of the time of a step."""
    return torch.empty(shape, dtype=torch.bool, device=key.device)


def one_after_the_other(ops: list[dist.P2POp]) -> list[dist.Work]:
    """dist.batch_isend_irecv, which looks for the backend of a device that is not there."""
    return [op.op(op.tensor, op.peer, op.group, op.tag) for op in ops]


def in_both_layouts(a: float8.Quantised) -> tuple[float8.Quantised, float8.Quantised]:
    """float8.in_both_layouts, as on a GPU: bytes by rows and by columns."""
    return a, dataclasses.replace(a, q=a.q.clone())


# (module, name): what the meta device runs in its place
SUBSTITUTES = {
    (F, "scaled_dot_product_attention"): attention_in_one,
    (dropout, "dropout_mask"): mask_without_bits,
    (context_parallel, "dropout_mask"): mask_without_bits,
    (context_parallel, "kernel_for"): lambda q, k: attention_kernels.make(attention_kernels.Kernel),
    (dist, "batch_isend_irecv"): one_after_the_other,
    (fp8, "in_both_layouts"): in_both_layouts,
    (moe, "Routing"): EvenRouting,
}


@contextlib.contextmanager
def cluster(rank: int, world: int):
    """A process group of `world` ranks, of which this process is one, and there is no other; and
    SUBSTITUTES in their places."""
    # Importing it takes a moment, which other runs need not spend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with contextlib.ExitStack() as stack:
        for where, substitute in SUBSTITUTES.items():
            stack.enter_context(mock.patch.object(*where, substitute))
        if world > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            stack.callback(dist.destroy_process_group)
        yield
