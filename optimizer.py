"""AdamW with mixed-precision state, and the learning rate.

A model may compute in bf16 or fp16. What it keeps from step to step needs more bits: in bf16,
1 + 0.0001 is 1, and the update is lost. Mixed-precision training (arXiv 1710.03740) keeps for each
weight w:

    weight w        bf16 or fp16    what the model computes with
    master          fp32            what the update is added to; w is its rounded copy
    gradient g      fp32            `main_grad`, the sum over micro-batches and ranks
    moments m, v    fp32            running means of g and g²

AdamW (arXiv 1711.05101, algorithm 2) at step t, with learning rate lr and weight decay λ:

    m = β1 m + (1 - β1) g           v = β2 v + (1 - β2) g²
    w = w - lr λ w - lr (m / (1 - β1ᵗ)) / (√(v / (1 - β2ᵗ)) + ε)

    python optimizer.py        a lesson: sums, loss scale, masters, bytes of state, learning rate

gradients.py has the way to `main_grad`, the norm by which a gradient is clipped, and the loss scale
of fp16. A step whose norm is not finite is skipped. The device decides this, and how much to clip:
the host enqueues the same operations either way, and does not wait to see the norm.

Not covered: Megatron-LM also has other optimizers, other schedules of the learning rate, and
parameter groups by user rule.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("optimizer")

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradients import LossScaler, accumulation_dtype, global_norm, norm_device
from sharding import set_sharding, sharding_of

# --- the learning rate ----------------------------------------------------------------------------


def learning_rate(step: int, peak: float, minimum: float, warmup: int, total: int) -> float:
    """Linear warmup to `peak` over `warmup` steps, then half a cosine down to `minimum` at step
    `total` (GPT-3, arXiv 2005.14165, appendix B). step counts from 1."""
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return minimum + (peak - minimum) * 0.5 * (1 + math.cos(math.pi * progress))


# --- a master, split in two halves of 16 bits -----------------------------------------------------
#
#     fp32 master    s eeeeeeee mmmmmmm | mmmmmmmmmmmmmmmm
#                    bf16 weight        | low (int16)
#
# A bf16 weight is the upper half of its fp32 master, rounded. With the lower 16 bits kept beside
# it the master is exact, and the upper half is not stored twice.
#
# Floats of one sign are ordered as their bits are, read as integers. So adding half of the last
# place that stays (0x8000) rounds to the nearest, and ties away from zero. Copies to bf16 round
# ties to even: the two differ in ties only. `low` is what is missing to the rounded upper half, so
# it has a sign.


def split_master(master: Tensor, weight: Tensor, low: Tensor) -> None:
    """Write an fp32 master to weight (bf16) and low (int16, signed), all of one shape.

    high = (bits + 0x8000) >> 16            low = bits - (high << 16)
    """
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    weight.view(torch.int16).copy_(high)
    low.copy_(bits - (high << 16))


def join_master(weight: Tensor, low: Tensor) -> Tensor:
    """The fp32 master of a bf16 weight and its low bits (int16, same shape, contiguous)."""
    # In place: no second tensor of this size.
    bits = weight.view(torch.int16).int()
    bits <<= 16
    bits += low
    return bits.view(torch.float32)


@dataclass(eq=False)
class SplitMaster:
    """A master as a checkpoint sees it, while only its halves exist: it is joined when it is copied
    from, and split when it is copied to. One master at a time takes its 4 bytes a parameter."""

    weight: Tensor
    low: Tensor
    dtype = torch.float32

    def __getitem__(self, region) -> "SplitMaster":
        return SplitMaster(self.weight[region], self.low[region])

    def join(self) -> Tensor:
        return join_master(self.weight, self.low)

    def copy_(self, master: Tensor) -> None:
        split_master(master, self.weight, self.low)


# --- AdamW ----------------------------------------------------------------------------------------

# Elements whose 16-bit state is in fp32 at a time, while it is updated.
PIECE = 2**22


class AdamW:
    """AdamW over `main_grad`, with weight decay on matrices only.

    The update itself is torch's fused one, which reads and writes memory once. Added here:
      - the fp32 master of a 16-bit parameter, which starts from the 16-bit value as in Megatron-LM;
      - clipping by the global norm;
      - steps that are skipped because the norm is not finite;
      - state in 16 bits: moments in bf16, and of a bf16 weight's master only the low half.

    Bytes for one parameter, without its gradient:

        state_dtype    weight    master    moments    sum
        None           bf16 2    fp32 4    fp32 4+4    14
        bfloat16       bf16 2    low  2    bf16 2+2     8
        None           fp32 4    itself    fp32 4+4    12
        bfloat16       fp32 4    itself    bf16 2+2     8
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        clip: float = 0.0,
        scaler: LossScaler | None = None,
        stages: dist.ProcessGroup | None = None,
        state_dtype: torch.dtype | None = None,
        fused=None,
    ):
        """clip: the largest global gradient norm, 0 for none. stages: as in `global_norm`.
        state_dtype: torch.bfloat16, or None for at least float32. fused: kernels.adamw, which
        updates all parameters with 16-bit state in one pass over memory, or None. Raises ValueError
        as `check_state_dtype` does."""
        # global name: the parameter, or this rank's shard of it
        self.parameters = dict(named_parameters)
        check_state_dtype(state_dtype, {p.dtype for p in self.parameters.values()}, betas)
        self.weight_decay = weight_decay
        self.betas = betas
        self.eps = eps
        self.clip = clip
        self.scaler = scaler
        self.stages = stages
        self.state_dtype = state_dtype
        self.fused = fused
        # Counted on the device: steps taken (float32, as torch's fused update has it); steps
        # skipped; steps skipped since the last one that was taken (a run that resumes from a
        # checkpoint starts this count at 0).
        device = norm_device(self.parameters.values(), stages)
        self.updates = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.allocate()

    def allocate(self) -> None:
        # Each parameter has an entry in one of these: its whole master, or the low half of it.
        self.masters: dict[str, Tensor] = {}
        self.low: dict[str, Tensor] = {}
        # the moments m and v
        self.exp_avg: dict[str, Tensor] = {}
        self.exp_avg_sq: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            if self.state_dtype and p.dtype == torch.bfloat16:
                self.low[name] = torch.zeros_like(p, dtype=torch.int16)
            else:
                # A float32 parameter is its own master: no copy.
                self.masters[name] = p.detach().to(accumulation_dtype(p.dtype))
            dtype = self.state_dtype or accumulation_dtype(p.dtype)
            self.exp_avg[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
            self.exp_avg_sq[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Update all parameters from `main_grad`. Returns the gradient norm before clipping, a
        float64 scalar on the device; where it is not finite, which all ranks see alike, nothing is
        updated."""
        norm = global_norm(self.parameters.values(), self.stages)
        finite = norm.isfinite()
        self.updates += finite
        self.skipped += ~finite
        self.skipped_in_a_row += 1
        self.skipped_in_a_row *= ~finite
        one = factor = torch.ones_like(norm)
        if self.clip:
            # as tensors: scalar / tensor would be scalar * (1 / tensor), with one more rounding
            factor = torch.minimum(one, torch.full_like(norm, self.clip) / norm)
            # NaN would stay in the padding of sharded gradients, and so in the next norms
            factor = torch.where(finite, factor, one)
        self.update_parameters(lr, factor, finite)
        if self.scaler:
            # fp16 waits for the device here: the next forward needs the new loss scale.
            self.scaler.update(bool(finite))
        return norm

    def diverged(self, most: int, skipped_in_a_row: int) -> bool:
        """Whether at least the last `most` steps were all skipped. most = 0 turns this off.
        skipped_in_a_row: as the caller has read it from the device.

        With fp16 only once scale 1 has overflowed too. While the scale still falls, the next step
        may fit. By halves it takes 33 steps from 2^32 to 1.
        """
        no_lower_scale = self.scaler is None or self.scaler.exhausted
        return 0 < most <= skipped_in_a_row and no_lower_scale

    # --- three ways to compute the update: lists of tensors, in one pass, in pieces

    def update_parameters(self, lr: float, factor: Tensor, finite: Tensor) -> None:
        """Change every parameter that has a gradient, if `finite`. Clipping multiplies `main_grad`
        in place by `factor`."""
        gradients = {
            name: p.main_grad for name, p in self.parameters.items() if p.main_grad is not None
        }
        one_pass = {n: gradients.pop(n) for n in list(gradients) if self.fits_one_pass(n)}
        if one_pass:
            self.update_in_one_pass(lr, one_pass, factor, finite)
        if not gradients:
            return
        # torch's fused update changes nothing where this is 1
        found_inf = (~finite).float()
        if self.clip:
            rest = list(gradients.values())
            torch._foreach_mul_(rest, factor.to(rest[0].dtype))
        if self.state_dtype is None:
            for decay in sorted(set(map(self.decay_of, gradients))):
                names = [name for name in gradients if self.decay_of(name) == decay]
                self.update_lists(
                    lr,
                    decay,
                    [self.masters[name] for name in names],
                    [gradients[name] for name in names],
                    [self.exp_avg[name] for name in names],
                    [self.exp_avg_sq[name] for name in names],
                    found_inf,
                )
        else:
            for name, gradient in gradients.items():
                self.update_in_pieces(lr, name, gradient, found_inf)
        self.weights_from_masters(gradients)

    def update_lists(
        self,
        lr: float,
        decay: float,
        masters: list[Tensor],
        gradients: list[Tensor],
        exp_avg: list[Tensor],
        exp_avg_sq: list[Tensor],
        found_inf: Tensor,
    ) -> None:
        """All of one decay at once, all in float32 (or float64)."""
        if not masters:
            return
        # what torch.optim.AdamW(fused=True) calls, after it has counted the step
        torch._fused_adamw_(
            masters,
            gradients,
            exp_avg,
            exp_avg_sq,
            [],
            [self.updates] * len(masters),
            amsgrad=False,
            maximize=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            lr=lr,
            weight_decay=decay,
            found_inf=found_inf,
        )

    def decay_of(self, name: str) -> float:
        """Of matrices. A scale of IA3 is a vector, of which each expert has one."""
        is_matrix = self.parameters[name].dim() >= 2 and not name.endswith(".ia3.scale")
        return self.weight_decay if is_matrix else 0.0

    def fits_one_pass(self, name: str) -> bool:
        """Whether `fused` can update it: a 16-bit weight with its master, or 16-bit moments. For
        all in float32, torch's function is one pass already."""
        p = self.parameters[name]
        has_16_bits = p.dtype in (torch.bfloat16, torch.float16) or self.state_dtype is not None
        return (
            self.fused is not None
            and has_16_bits
            and p.dtype != torch.float64
            and p.is_contiguous()
        )

    def update_in_one_pass(
        self, lr: float, gradients: dict[str, Tensor], factor: Tensor, finite: Tensor
    ) -> None:
        """Parameters that `fused` can update: one launch for all of one kind. It multiplies
        gradients by `factor` as it reads them."""
        control = torch.stack((factor.float(), self.updates, finite.float()))
        # (dtype of the weight, has a low half, has a master beside it) -> arguments, one by one
        kinds = defaultdict(list)
        for name, gradient in gradients.items():
            p = self.parameters[name]
            low = self.low.get(name)
            master = self.masters.get(name)
            if master is not None and master.dtype == p.dtype:
                # The weight is its own master.
                master = None
            state = self.exp_avg[name], self.exp_avg_sq[name], self.decay_of(name)
            kind = p.dtype, low is not None, master is not None
            kinds[kind].append((p.detach(), low, master, gradient, *state))
        for arguments in kinds.values():
            # one list for each argument
            lists = map(list, zip(*arguments))
            self.fused(*lists, control, lr, *self.betas, self.eps)

    def update_in_pieces(self, lr: float, name: str, gradient: Tensor, found_inf: Tensor) -> None:
        """One parameter with 16-bit state, which is converted to float32 a piece at a time."""
        weights = self.parameters[name].view(-1).split(PIECE)
        gradients = gradient.view(-1).split(PIECE)
        firsts = self.exp_avg[name].view(-1).split(PIECE)
        seconds = self.exp_avg_sq[name].view(-1).split(PIECE)
        lows = [None] * len(weights)
        if name in self.low:
            lows = self.low[name].view(-1).split(PIECE)
        for weight, g, m, v, low in zip(weights, gradients, firsts, seconds, lows):
            master = weight if low is None else join_master(weight, low)
            wide_m = m.to(g.dtype)
            wide_v = v.to(g.dtype)
            decay = self.decay_of(name)
            self.update_lists(lr, decay, [master], [g], [wide_m], [wide_v], found_inf)
            m.copy_(wide_m)
            v.copy_(wide_v)
            if low is not None:
                split_master(master, weight, low)

    @torch.no_grad()
    def weights_from_masters(self, names: Iterable[str] | None = None) -> None:
        """Round the masters (of `names`, or all) to the weights that the model computes with."""
        for name in self.masters if names is None else names:
            master = self.masters.get(name)
            if master is not None and master.dtype != self.parameters[name].dtype:
                self.parameters[name].copy_(master)

    # --- what a checkpoint holds

    def tensors(self) -> dict[str, Tensor | SplitMaster]:
        """The tensors of a checkpoint under global names, each with its parameter's sharding
        record: `model.NAME`, the master, so that a checkpoint does not depend on the compute
        precision; `exp_avg.NAME`, `exp_avg_sq.NAME`. After loading, call `weights_from_masters`.
        """
        tensors = {}
        for name, p in self.parameters.items():
            split = name in self.low
            master = SplitMaster(p.detach(), self.low[name]) if split else self.masters[name]
            tensors[f"model.{name}"] = master
            tensors[f"exp_avg.{name}"] = self.exp_avg[name]
            tensors[f"exp_avg_sq.{name}"] = self.exp_avg_sq[name]
            for kind in ("model", "exp_avg", "exp_avg_sq"):
                set_sharding(tensors[f"{kind}.{name}"], sharding_of(p))
        return tensors

    def state_dict(self) -> dict:
        """The numbers that go with `tensors()`: updates taken, steps skipped, the loss scaler."""
        return {
            "updates": int(self.updates),
            "skipped": int(self.skipped),
            "scaler": self.scaler.state_dict() if self.scaler else None,
        }

    def load_state_dict(self, state: dict) -> None:
        self.updates.fill_(state["updates"])
        self.skipped.fill_(state["skipped"])
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])


def check_state_dtype(
    state_dtype: torch.dtype | None, dtypes: set[torch.dtype], betas: tuple[float, float]
) -> None:
    """dtypes: of the weights. Raises ValueError for bf16 state of fp16 weights, whose masters do
    not split, and for bf16 state with β2 above 0.99. With β2 near 1 the decay of v is rounded away:
    neighbouring bf16 numbers differ by 0.4 to 0.8%, and v (1 - β2) is less than half of that."""
    if state_dtype and betas[1] > 0.99:
        raise ValueError(
            f"optimizer_state bf16: with β2 {betas[1]} the decay of second moments can be rounded"
            " away in bf16; use β2 of at most 0.99, or optimizer_state fp32"
        )
    if state_dtype and torch.float16 in dtypes:
        raise ValueError(
            "optimizer_state bf16: the upper half of an fp32 master is a bf16 number, not an fp16"
            " one; use precision bf16, or optimizer_state fp32"
        )
