"""What FP8 training needs: one maximum for a whole tensor, new bytes after an update."""

from dataclasses import replace

import torch

import fp8
import recompute
from base.float8 import E4M3, Quantised, block_maxima, quantise
from course.mutations import bug
from fp8 import INPUT, Recipe, Scaling
from sequence_parallel import start_nothing

# scales that are powers of two only move exponents: with these, less would be wrong
CURRENT = dict(fp8="current", fp8_skip=0, fp8_scales="any", micro_batch_size=4)
DELAYED = CURRENT | dict(fp8="delayed")


@bug(2, dict(tp=2, **CURRENT), first="step 1: output of blocks.0")
def fp8_maximum_of_a_part():
    """The maximum of a tensor that tensor-parallel ranks hold parts of is each rank's own."""

    def scales(self, tensors, places, operand, group, block, original=Scaling.scales):
        return original(self, tensors, places, operand, None, block)

    Scaling.scales = scales


@bug(2, dict(tp=2, sequence_parallel=True, **CURRENT), first="step 1: output of blocks.0")
def fp8_maximum_of_the_slice():
    """A gathered input has the scale of this rank's slice of the sequence."""
    original = fp8.Layer.input_bytes

    def input_bytes(self, x, *wanted):
        if self.start_input is start_nothing:
            return original(self, x, *wanted)
        mine = x.detach().chunk(self.group.size(), 1)[self.group.rank()]
        (scale,) = self.scaling.scales([mine], self.places[:1], INPUT, None, None)
        q = quantise(x.detach().flatten(0, -2), scale, E4M3, None, False)
        return q, q

    fp8.Layer.input_bytes = input_bytes


@bug(1, CURRENT, first="step 2: output of blocks.0")
def stale_weight_bytes():
    """Products read the bytes that a weight had in the first step."""

    def end_step(self, group=None, taken=None, original=Scaling.end_step):
        kept = dict(self.weights)
        original(self, group, taken)
        self.weights.update(kept)

    Scaling.end_step = end_step


@bug(1, CURRENT, first="step 1: output of blocks.0")
def fp8_scale_of_the_other_operand():
    """A product is divided by the scale of one operand twice, by the other's never."""

    def product(self, other, original=Quantised.__matmul__):
        return original(self, replace(other, inverse=self.inverse))

    Quantised.__matmul__ = product


@bug(1, CURRENT, first="step 1: gradient of blocks.1.mlp.down.weight")
def fp8_gradients_in_e4m3():
    """Gradients have the format of weights, with fewer powers of two."""
    Recipe.format = lambda self, operand: E4M3


@bug(2, DELAYED, first="step 2: output of blocks.0")
def fp8_history_of_one_rank():
    """The maxima of the last steps are those of each data-parallel rank's own samples."""

    def end_step(self, group=None, taken=None, original=Scaling.end_step):
        original(self, None, taken)

    Scaling.end_step = end_step


@bug(2, dict(recompute="full", **DELAYED), first="step 2: gradient of blocks.1.mlp.down.weight")
def new_maxima_in_recomputation():
    """Recomputation finds this step's maxima in the history: other bytes than forward's."""

    def scales(self, tensors, places, operand, group, block, original=Scaling.scales):
        before = self.history
        again = recompute._results is not None and self.recording
        if operand == INPUT and again and len(before):
            latest = torch.zeros_like(self.amax)
            latest[*places[0], INPUT] = block_maxima(tensors[0], None)
            self.history = torch.cat((latest.unsqueeze(0), before))
        found = original(self, tensors, places, operand, group, block)
        self.history = before
        return found

    Scaling.scales = scales
