"""The scales of FP8 training: which maximum brings a tensor into the range of its bytes.

A matrix multiplication in FP8 (fp8.py) has two operands, and each has a scale: the largest number
of its format, over a maximum (precision/float8.py), called amax. Three recipes say which maximum:

    current    that of this tensor, now. The tensor is read once more, but where the kernel that
               made it has noted its maximum. Tensor-parallel ranks that hold parts of it agree on
               the largest of theirs, in a small all-reduce
    delayed    that of this tensor in the last 16 steps, known beforehand (Transformer Engine's
               first recipe). Larger values saturate. In the first step, `current`
    block      one for each 1 x 128 values of activations and of gradients, and each 128 x 128 of
               weights, so that a large value spoils its own block only (DeepSeek-V3, arXiv
               2412.19437, section 3.3.2). The 128 lie in the dimension that the product sums over.
               Within a block numbers are alike, so gradients too are in e4m3. No block lies on two
               ranks, so they have nothing to agree on

`Scaling` has the maxima of all tensors of a model, in one table. After a step, `end_step` takes the
largest over all ranks, in one small all-reduce: for the history, and for the log. It also drops the
bytes of weights, for the optimizer has changed the weights.

NaN and infinity: the scale is NaN, so the product is, and all that follows, up to the norm of the
gradients. So the step is skipped (optimizer.py). The log names such tensors, the first one first,
and no history keeps this step.

Zeros: where a tensor's whole history has only zeros, its maximum now counts. Ranks that hold parts
of it do not agree on that one: each takes the maximum of its part.

    python -m precision.float8        the lesson of this file and of float8.py

Not covered, and in Transformer Engine: a margin, which is room above the largest maximum; a history
with a row for each micro-batch.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("precision.float8")

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model_config import LINEARS
from precision import fp8_cast
from precision.float8 import (
    E4M3,
    E5M2,
    Format,
    Quantised,
    block_maxima,
    in_both_layouts,
    quantise,
    scale_of,
)

# --- what has a scale -----------------------------------------------------------------------------

# the operands of a matrix: x, W and ∂y
INPUT, WEIGHT, GRADIENT = range(3)
OPERANDS = ("input", "weight", "gradient")


@dataclass(frozen=True)
class Recipe:
    """scaling: current, delayed or block. power_of_two: whether scales are rounded down to
    powers of two. block: the size of blocks, 128 on GPUs. history: how many steps `delayed` looks
    back."""

    scaling: str = "current"
    power_of_two: bool = True
    block: int = 128
    history: int = 16

    def format(self, operand: int) -> Format:
        """e4m3 has finer steps, e5m2 the range that the gradients of a whole tensor need."""
        return E5M2 if operand == GRADIENT and self.scaling != "block" else E4M3


# --- scales ---------------------------------------------------------------------------------------


class Scaling:
    """The maxima of all FP8 tensors of a model, and the bytes of this rank's weights.

    amax: [L, matrices, operands] float32, the maxima that this rank has seen in this step.
    history: [n, L, matrices, operands], those of all ranks in the last n steps, newest first.
    A tensor's place in these tables is (layer, matrix) and its operand.
    """

    def __init__(self, recipe: Recipe, num_layers: int, device, keep_bytes: bool = True):
        """keep_bytes: keep the bytes of weights for a step. Else only the scales are kept, and each
        product makes the bytes again: so ZeRO stage 3, which does not keep whole weights. (Nothing
        is kept of experts then.)"""
        self.recipe = recipe
        self.keep_bytes = keep_bytes
        shape = num_layers, len(LINEARS), len(OPERANDS)
        self.amax = torch.zeros(shape, device=device)
        self.history = torch.zeros(0, *shape, device=device)
        # whether the kernels of fp8_cast.py cast what they can
        self.fused = False
        # weight -> (scale, or maximum of a kernel; (bytes for y, bytes for ∂x) or None); of experts
        # the pair alone
        self.weights: dict[nn.Parameter, tuple] = {}
        # False where no gradient is asked for: an evaluation leaves no maxima of inputs, nor does
        # the first of the two forwards of recompute.py
        self.recording = True
        # [L, matrices]: True for matrices of experts, whose scales are current ones, of rows, in
        # every recipe (precision/fp8_experts.py)
        self.by_row = torch.zeros(shape[:2], dtype=torch.bool, device=device)
        # amax of the last step over all ranks, then `saturated`: [2, L, matrices, operands]
        self.report = torch.zeros(2, *shape, device=device)

    def scales(self, tensors: list[Tensor], places, operand: int, group, block) -> list[Tensor]:
        """The scale of each tensor [M, K], or the scales of its blocks; notes the maxima.

        places: (layer, matrix) of each tensor. group: the tensor-parallel ranks that hold parts of
        these tensors, or None where each rank has them whole. block: (rows, columns), or None.
        """
        amaxes = []
        for x, place in zip(tensors, places):
            # NaN becomes infinity, which is still there after a maximum over ranks
            amax = block_maxima(x, block).nan_to_num(torch.inf, torch.inf)
            self.record(amax, place, operand)
            amaxes.append(amax)
        if block is None and len(self.history):
            # delayed, after the first step
            pairs = zip(amaxes, places)
            amaxes = [self.amax_of_history(amax, place, operand) for amax, place in pairs]
        elif block is None and group is not None:
            # current, or the first step of delayed
            together = torch.stack(amaxes)
            dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
            amaxes = list(together)
        to = self.recipe.format(operand)
        return [scale_of(amax, to, self.recipe.power_of_two) for amax in amaxes]

    def amax_of_history(self, now: Tensor, place, operand: int) -> Tensor:
        """The largest maximum of the last steps. now: the maximum of the tensor itself, taken where
        no step has one; where it is infinite, so is the result."""
        known = self.history[:, *place, operand].amax()
        known = torch.where(known > 0, known, now)
        return torch.where(now.isfinite(), known, torch.inf)

    def record(self, amax: Tensor, place, operand: int) -> None:
        """Note what a tensor's maximum is in this step. amax: one number, or that of each block or
        row; infinity for NaN."""
        if amax.numel() and (self.recording or operand != INPUT):
            seen = self.amax[*place, operand]
            torch.maximum(seen, amax.amax(), out=seen)

    def quantise(self, tensors, places, operand: int, group, block) -> list[Quantised]:
        """Matrices in bytes. Arguments as in `scales`; only the recipe `block` has a use for
        blocks."""
        recipe = self.recipe
        block = block if recipe.scaling == "block" else None
        scales = self.scales(tensors, places, operand, group, block)
        to = recipe.format(operand)
        return [quantise(x, s, to, block, recipe.power_of_two) for x, s in zip(tensors, scales)]

    def both(
        self, tensors, places, operand: int, group, wanted: tuple[bool, bool] = (True, True)
    ) -> list[tuple[Quantised | None, Quantised | None]]:
        """Inputs or gradients [tokens, n] in bytes twice: (for sums over n, for sums over tokens).

        Blocks lie in the dimension that is summed over, so the two are rounded differently. Other
        recipes use the same bytes twice. wanted: which of the two there are a use for; the other
        may be None.
        """
        size = self.recipe.block
        if self.casts_in_kernels(tensors):
            return self.cast(tensors, places, operand, group, wanted)[0]
        if self.recipe.scaling != "block":
            once = self.quantise(tensors, places, operand, group, None)
            return list(zip(once, once))
        made = []
        for block, is_wanted in zip(((1, size), (size, 1)), wanted):
            if is_wanted:
                made.append(self.quantise(tensors, places, operand, group, block))
            else:
                made.append([None] * len(tensors))
        return list(zip(*made))

    def casts_in_kernels(self, tensors: list[Tensor]) -> bool:
        has_blocks = self.recipe.scaling == "block"
        return self.fused and not has_blocks and all(map(fp8_cast.supported, tensors))

    def cast(
        self, tensors: list[Tensor], places, operand: int, group, wanted, maxima=None
    ) -> tuple[list[tuple[Quantised | None, Quantised | None]], list[Tensor]]:
        """(`both`, by kernels, which also note the maxima; `maxima`). maxima: of tensors that were
        cast before, [1] each; by default they are found."""
        history = [None] * len(tensors)
        if len(self.history):
            history = [self.history[:, *place, operand].amax(0, True) for place in places]
        if maxima is None:
            maxima = self.maxima(tensors, history, group)
        inverses = torch.zeros(len(tensors), device=self.amax.device).split(1)
        options = self.recipe.format(operand), self.recipe.power_of_two, wanted
        pairs = []
        for x, place, amax, *scales in zip(tensors, places, maxima, inverses, history):
            pairs.append(fp8_cast.cast(x, amax, *scales, *options))
            self.record(amax, place, operand)
        return pairs, maxima

    def maxima(self, tensors: list[Tensor], history: list, group) -> list[Tensor]:
        """The maximum of each tensor: noted on it; or found by a kernel, if no history has one."""
        found = [fp8_cast.noted_maximum(x) for x in tensors]
        if any(amax is None for amax in found):
            found = torch.zeros(len(tensors), device=self.amax.device).split(1)
            for x, amax, known in zip(tensors, found, history):
                fp8_cast.fp8_maximum(x, amax, known)
        if group is not None and not len(self.history):
            together = torch.cat(found)
            dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
            found = together.split(1)
        return found

    def weight(
        self, w: nn.Parameter, place, group, wanted: tuple[bool, bool] = (True, True)
    ) -> tuple[Quantised | None, Quantised | None]:
        """The bytes of a weight [out, in], (for y, for ∂x), which are made at its first use in a
        step; without `keep_bytes` at each use, by the scale of the first. wanted: as in `both`.

        On GPUs that multiply bytes the two lie in memory by rows and by columns, for y sums over
        the columns of W, and ∂x over its rows.
        """
        scale, pair = self.weights.get(w, (None, None))
        if pair is not None:
            return pair
        if self.keep_bytes:
            wanted = True, True
        if self.casts_in_kernels([w]):
            (pair,), scale = self.cast([w.detach()], [place], WEIGHT, group, wanted, scale)
        else:
            scale, pair = self.weight_by_pytorch(w.detach(), place, group, scale)
        self.weights[w] = scale, (pair if self.keep_bytes else None)
        return pair

    def weight_by_pytorch(self, w: Tensor, place, group, scale: Tensor | None):
        """(scale, pair) of `weight`; scale: of the first use, or None."""
        recipe = self.recipe
        block = (recipe.block, recipe.block) if recipe.scaling == "block" else None
        if scale is None:
            (scale,) = self.scales([w], [place], WEIGHT, group, block)
        q = quantise(w, scale, recipe.format(WEIGHT), block, recipe.power_of_two)
        # what is not kept is used once: its product copies it, if need be
        return scale, (in_both_layouts(q) if self.keep_bytes else (q, q))

    @torch.no_grad()
    def end_step(self, group: dist.ProcessGroup | None = None, taken: Tensor | None = None) -> None:
        """After the optimizer's step: weights are new and have no bytes yet, and the maxima of the
        step become those of all samples, on all ranks. group: all ranks, for one all-reduce; taken:
        whether the optimizer took the step, on the device, or None if it did."""
        self.weights.clear()
        self.report = torch.stack((self.amax, self.saturated()))
        self.amax.zero_()
        if group is not None:
            dist.all_reduce(self.report, dist.ReduceOp.MAX, group=group)
        amax = self.report[0]
        if self.recipe.scaling == "delayed":
            row = amax.nan_to_num(0.0, 0.0).unsqueeze(0)
            history = torch.cat((row, self.history))
            if taken is not None:
                # The maxima of a skipped step are not finite, or on the way there: 16 steps of
                # gradients would round to zero beside them.
                as_before = torch.cat((self.history, torch.zeros_like(row)))
                history = torch.where(taken, history, as_before)
            self.history = history[: self.recipe.history]

    def saturated(self) -> Tensor:
        """1 where this step's maximum is more than its scale, from the history, allows, else 0."""
        too_large = torch.zeros_like(self.amax)
        if len(self.history):
            for operand in range(len(OPERANDS)):
                to = self.recipe.format(operand)
                known = self.history[..., operand].amax(0)
                scaled = self.amax[..., operand] * scale_of(known, to, self.recipe.power_of_two)
                # NaN, of infinity times 0, is not too large
                too_large[..., operand] = (known > 0) & (scaled > to.largest)
        return too_large.masked_fill(self.by_row.unsqueeze(-1), 0)

    @staticmethod
    def warnings(report: Tensor) -> dict[str, list[str]]:
        """What the log says of a step: names of tensors that were not finite, and of those that had
        values beyond what their scale allows. report: `Scaling.report`, on the host.

        The first one that is not finite is where it began: first come weights, which were there
        before the step, then inputs from the first layer on, then gradients from the last.
        """
        found = {"fp8_not_finite": [], "fp8_saturated": []}
        places = [(place, operand) for operand in (WEIGHT, INPUT) for place in layer_places(report)]
        places += [(place, GRADIENT) for place in reversed(layer_places(report))]
        for (number, matrix), operand in places:
            amax, saturated = report[:, number, matrix, operand].tolist()
            name = list(LINEARS)[matrix]
            name = f"blocks.{number}.{LINEARS[name]}.{name} {OPERANDS[operand]}"
            if not amax < float("inf"):
                found["fp8_not_finite"].append(name)
            elif saturated:
                found["fp8_saturated"].append(name)
        return {key: names for key, names in found.items() if names}

    def state_dict(self) -> dict:
        return {"history": self.history.tolist()}

    def load_state_dict(self, state: dict | None) -> None:
        """Raises ValueError for the history of another model. Without one, it begins anew."""
        rows = state["history"] if state else []
        if self.recipe.scaling != "delayed" or not rows:
            return
        history = torch.tensor(rows, dtype=torch.float32, device=self.history.device)
        if history.shape[1:] != self.history.shape[1:]:
            here = list(self.history.shape[1:])
            raise ValueError(f"a row of the FP8 history is {list(history.shape[1:])}, not {here}")
        self.history = history[: self.recipe.history]


def layer_places(report: Tensor) -> list[tuple[int, int]]:
    return [(number, m) for number in range(report.shape[1]) for m in range(len(LINEARS))]
