"""Document mask: several documents in one sequence, and each token attends only to its own.

Packing (finetune/packing.py) puts several documents into one sequence. With plain causal attention
a token would read the documents before its own. A batch therefore has the number of each token's
document. The positions and the mask follow from these numbers:

    documents   0 0 0 1 1 2 2 2         [b, s], not decreasing along a sequence
    positions   0 1 2 0 1 0 1 2         they restart in each document

    mask        1 . . . . . . .         block-diagonal, and causal in each block:
                1 1 . . . . . .         token i attends to token j  where  j <= i  and
                1 1 1 . . . . .         documents[j] = documents[i]
                . . . 1 . . . .
                . . . 1 1 . . .         So each document has the same activations as alone in a
                . . . . . 1 . .         row (Krell et al. 2021, arXiv 2107.02027, section 3.2).
                . . . . . 1 1 .
                . . . . . 1 1 1

    python -m course.packing      a lesson

The numbers need no communication: every pipeline stage reads the batch, and attention on a
tensor-parallel rank has all tokens of a sequence. Sequence-parallel ranks embed a shard of the
sequence, so they take a slice of the whole sequence's positions.

Not covered: skipping masked work on CPUs and in explicit attention, which compute the scores that
the mask then removes (the kernel for CUDA skips blocks); Megatron-LM's list of the places where
documents begin (cu_seqlens).
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex


def documents_of(tokens: Tensor, eot: int) -> Tensor:
    """The number of each token's document, where an end-of-text token ends one. [b, s] -> [b, s]"""
    ends = (tokens == eot).long()
    # A token counts the ends before it, not its own.
    return ends.cumsum(1) - ends


def positions_of(documents: Tensor) -> Tensor:
    """The position of each token in its document. documents: [b, s] -> [b, s] int64"""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
    # The start of the current document.
    return index - (index * begins).cummax(1).values


def visible(documents: Tensor) -> Tensor:
    """The mask of the tokens (last dimension) that each token sees. documents: [b, s] -> [b, 1, s,
    s] bool, the same for all heads."""
    same = documents.unsqueeze(2) == documents.unsqueeze(1)  # [b, s, s]
    return same.tril().unsqueeze(1)


def masked_probabilities(q: Tensor, k: Tensor, documents: Tensor) -> Tensor:
    """softmax(q kᵀ / √d + mask). q, k: [b, a, s, d]; documents: [b, s] -> [b, a, s, s]"""
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    # A token sees itself, so no row is all -∞.
    return scores.masked_fill(~visible(documents), -torch.inf).softmax(-1)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, blocks) -> Tensor:
    """softmax(q kᵀ / √d + mask) v; the s x s matrix of probabilities is never written.

    q: [b, a, s, d]; k, v: [b, a_kv, s, d]; documents: [b, s]; blocks: their `block_mask`
    -> [b, a, s, d]"""
    grouped = q.shape[1] != k.shape[1]
    if blocks is not None:
        attention, _ = compiled()
        return attention(q, k, v, block_mask=blocks, enable_gqa=grouped)
    mask = visible(documents)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def has_flex(x: Tensor) -> bool:
    """Whether FlexAttention runs: it has kernels for CUDA, for at most 32 bits."""
    return x.is_cuda and x.dtype != torch.float64


def block_mask(documents: Tensor | None, x: Tensor) -> flex.BlockMask | None:
    """The block mask of FlexAttention (arXiv 2412.05496), for all layers: a kernel compiled for it
    skips the blocks of 128 x 128 tokens that are all hidden. Nothing here waits for the GPU, as a
    list of the places where documents begin would.

    documents: [b, s]; x: activations of these layers. None without documents, or if FlexAttention
    does not run."""
    if documents is None or not has_flex(x):
        return None

    def sees(row, head, i, j):
        return (j <= i) & (documents[row, j] == documents[row, i])

    b, s = documents.shape
    _, create_block_mask = compiled()
    return create_block_mask(sees, b, None, s, s, device=documents.device)


@cache
def compiled() -> tuple:
    """(attention, function that makes its block mask), compiled when they first run. Without a
    compiler they would write the s x s matrix."""
    return torch.compile(flex.flex_attention), torch.compile(flex.create_block_mask)
