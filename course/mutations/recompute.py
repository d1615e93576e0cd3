"""What recomputation needs: the same numbers again."""

import torch

import recompute
from base import dropout
from course.mutations import bug, replaces


@bug(
    1,
    dict(recompute="selective"),
    dict(recompute="full"),
    first="step 1: gradient of blocks.1.(attention.value|mlp.down)",
)
@replaces(dropout, "dropout_mask")
def new_masks_in_recomputation(key, *rest, original=dropout.dropout_mask):
    """Recomputation draws other dropout masks than forward did."""
    # This is the second run of a checkpoint.
    if recompute._running.results is not None and torch.is_grad_enabled():
        key = key ^ 1
    return original(key, *rest)
