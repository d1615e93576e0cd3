"""What packed sequences need: the mask, and positions that restart."""

import torch

import gpt
import sequence_parallel
from base import document_mask
from course.mutations import bug, replaces

PACKED = dict(document_mask=True)


@bug(1, PACKED, first="step 1: output of blocks.0")
def no_document_mask():
    """Attention sees the documents before its own in the row."""
    document_mask.visible = lambda documents: torch.ones_like(
        documents.unsqueeze(2) == documents.unsqueeze(1)
    ).tril()[:, None]


@bug(1, PACKED, first="step 1: output of embedding")
def positions_go_on():
    """Positions do not restart in each document of a row."""
    gpt.positions_of = lambda documents: torch.arange(documents.shape[1]).expand_as(documents)


@bug(2, PACKED | dict(tp=2, sequence_parallel=True), first="step 1: output of embedding")
@replaces(sequence_parallel.ShardedPositions, "forward")
def positions_of_the_slice(self, x, documents, original=sequence_parallel.ShardedPositions.forward):
    """A document that lies in two slices of the sequence begins again at 0 in the second."""
    slices = documents.chunk(self.t, dim=1)
    return original(self, x, slices[self.n].repeat(1, self.t))
