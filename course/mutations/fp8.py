"""What FP8 training needs: one maximum for a whole tensor, new bytes after an update."""

from dataclasses import replace

import torch

import fp8
import recompute
from base.float8 import E4M3, Quantised, block_maxima, quantise
from course.mutations import bug, replaces
from fp8 import INPUT, Recipe, Scaling
from sequence_parallel import start_nothing

# Powers of two only move exponents: with these scales, less would be wrong.
CURRENT = dict(fp8="current", fp8_skip=0, fp8_scales="any", micro_batch_size=4)
DELAYED = CURRENT | dict(fp8="delayed")


@bug(2, dict(tp=2, **CURRENT), first="step 1: output of blocks.0")
@replaces(Scaling, "scales")
def fp8_maximum_of_a_part(self, tensors, places, operand, group, block, original=Scaling.scales):
    """The maximum of a tensor that tensor-parallel ranks hold parts of is each rank's own."""
    return original(self, tensors, places, operand, None, block)


@bug(2, dict(tp=2, sequence_parallel=True, **CURRENT), first="step 1: output of blocks.0")
@replaces(fp8.Layer, "input_bytes")
def fp8_maximum_of_the_slice(self, x, *wanted, original=fp8.Layer.input_bytes):
    """A gathered input has the scale of this rank's slice of the sequence."""
    if self.start_input is start_nothing:
        return original(self, x, *wanted)
    mine = x.detach().chunk(self.group.size(), 1)[self.group.rank()]
    (scale,) = self.scaling.scales([mine], self.places[:1], INPUT, None, None)
    q = quantise(x.detach().flatten(0, -2), scale, E4M3, None, False)
    return q, q


@bug(1, CURRENT, first="step 2: output of blocks.0")
@replaces(Scaling, "end_step")
def stale_weight_bytes(self, group=None, taken=None, original=Scaling.end_step):
    """Products read the bytes that a weight had in the first step."""
    kept = dict(self.weights)
    original(self, group, taken)
    self.weights.update(kept)


@bug(1, CURRENT, first="step 1: output of blocks.0")
@replaces(Quantised, "__matmul__")
def fp8_scale_of_the_other_operand(self, other, original=Quantised.__matmul__):
    """A product is divided by the scale of one operand twice, by the other's never."""
    return original(self, replace(other, inverse=self.inverse))


@bug(1, CURRENT, first="step 1: gradient of blocks.1.mlp.down.weight")
def fp8_gradients_in_e4m3():
    """Gradients have the format of weights, with fewer powers of two."""
    Recipe.format = lambda self, operand: E4M3


@bug(2, DELAYED, first="step 2: output of blocks.0")
@replaces(Scaling, "end_step")
def fp8_history_of_one_rank(self, group=None, taken=None, original=Scaling.end_step):
    """The maxima of the last steps are those of each data-parallel rank's own samples."""
    original(self, None, taken)


@bug(2, dict(recompute="full", **DELAYED), first="step 2: gradient of blocks.1.mlp.down.weight")
@replaces(Scaling, "scales")
def new_maxima_in_recomputation(
    self, tensors, places, operand, group, block, original=Scaling.scales
):
    """Recomputation finds this step's maxima in the history: other bytes than forward's."""
    before = self.history
    again = recompute._running.results is not None and self.recording
    if operand == INPUT and again and len(before):
        latest = torch.zeros_like(self.amax)
        latest[*places[0], INPUT] = block_maxima(tensors[0], None)
        self.history = torch.cat((latest.unsqueeze(0), before))
    found = original(self, tensors, places, operand, group, block)
    self.history = before
    return found
