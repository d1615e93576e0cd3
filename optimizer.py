"""AdamW with mixed-precision state, and the learning rate.

A model may compute in bf16 or fp16. What it keeps from step to step needs more bits: in bf16,
1 + 0.0001 is 1, and the update is lost. Mixed-precision training (arXiv 1710.03740) keeps for each
weight w:

    weight w        bf16 or fp16    used by forward and backward
    master          fp32            the update is added to it; w is its rounded copy
    gradient g      fp32            `main_grad`, the sum over micro-batches and ranks
    moments m, v    fp32            running means of g and g²

AdamW (arXiv 1711.05101, algorithm 2) at step t, with learning rate lr and weight decay λ:

    m = β1 m + (1 - β1) g           v = β2 v + (1 - β2) g²
    w = w - lr λ w - lr (m / (1 - β1ᵗ)) / (√(v / (1 - β2ᵗ)) + ε)

    python -m course.optimizer    a lesson: sums, loss scale, masters, bytes of state, schedules

The device decides whether a step is skipped, and how much to clip. The host enqueues the same
operations either way, and does not wait for the norm.

Not covered: optimizers beside Muon (run/muon.py), and parameter groups by user rule (both in
Megatron-LM); `fuse_accumulation` for embeddings, tied weights, experts and FP8, and from ZeRO stage
1 on.
"""

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sharding import set_sharding, sharding_of

# === gradients: sums in float32, norm, loss scale =================================================
#
# Each backward of a micro-batch leaves a gradient, by default in the weight's own type. Sums need
# more bits: in bf16, 256 + 1 is 256. So the gradients of a step's micro-batches are added up in
# float32, in `parameter.main_grad`:
#
#     main_grad = sum over micro-batches and ranks of  grad / scale
#
# scale is 1, except in fp16. There the loss is multiplied by it before backward, so that small
# gradients are not rounded to zero. Each gradient is divided by it before it is added.
#
# `GradientAccumulator` is for weights that no other rank holds; fsdp.py also sums over ranks. The
# optimizer clips `main_grad` by `global_norm`, the length of the whole model's gradient as one
# vector. When a gradient overflows, every rank sees a norm that is not finite. Then the step is
# skipped and the scale is lowered (`LossScaler`).
#
# On a GPU, linear layers with 16-bit weights add the gradient of a weight inside the matrix
# multiplication that computes it, main_grad += ∂yᵀ x (`fuse_accumulation`; in Megatron-LM it is
# called gradient_accumulation_fusion). So it is never rounded to 16 bits.

# --- gradients: summed in float32 -----------------------------------------------------------------


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit parameters; float32 and float64 for themselves."""
    return torch.promote_types(dtype, torch.float32)


def sum_uses_apart(model: nn.Module) -> None:
    """Make autograd sum a tied weight's gradients in at least float32.

    By default it adds those of both uses (embedding and head) in the weight's own type, before any
    hook sees them. In fp16 that sum can overflow although neither part does. A pipeline sums its
    two copies in float32, and so does one device with this.
    """
    for p, count in uses_of(model).items():
        if count > 1 and p.requires_grad:
            p.grad_dtype = accumulation_dtype(p.dtype)


def uses_of(model: nn.Module) -> Counter:
    """The number of names of each parameter: more than one for a tied weight."""
    return Counter(p for _, p in model.named_parameters(remove_duplicate=False))


class GradientSums:
    """The calls of the training loop around the backward passes. A subclass sums the gradients.

    `zero_grad()` comes before the first backward of a step, `next_backward_is_last()` before the
    last one, `reduce_gradients()` after it, and `renew_parameters()` after the optimizer's step.
    """

    # ZeRO's stage (fsdp.py); in 0 nothing is sharded.
    stage = 0

    def __init__(self, parameters: list[nn.Parameter], scaler: "LossScaler | None"):
        """Make autograd call `accumulate(p)` when the gradient of p is complete; once for a tied
        weight."""
        self.parameters = parameters
        self.scaler = scaler
        # The reference is weak because the garbage collector does not see a cycle through a hook,
        # and so never frees it.
        this = weakref.ref(self)
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda p: this() and this().accumulate(p))

    @property
    def unscale(self) -> float:
        """The factor of a gradient before it is added to the sum."""
        return 1 / self.scaler.scale if self.scaler else 1

    def next_backward_is_last(self) -> None:
        pass

    def reduce_gradients(self) -> None:
        pass

    def renew_parameters(self) -> None:
        pass

    def wait_for_parameters(self) -> None:
        """Called before anything but a forward reads the parameters."""


class GradientAccumulator(GradientSums):
    """Adds `parameter.grad` to `parameter.main_grad`, in at least float32, after each backward, and
    frees it. No other rank holds these weights, so there is nothing to reduce or to renew."""

    def __init__(self, model: nn.Module, scaler: "LossScaler | None" = None):
        super().__init__([p for p in model.parameters() if p.requires_grad], scaler)
        sum_uses_apart(model)
        self.zero_grad()

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.main_grad = None

    def accumulate(self, p: nn.Parameter) -> None:
        # p.grad is None if a pipeline schedule has deferred this weight gradient, or if
        # `accumulate_product` has added it.
        if p.grad is None:
            return
        unscale = self.unscale
        if p.main_grad is None:
            # For a float32 parameter this is p.grad itself, not a copy.
            p.main_grad = p.grad.to(accumulation_dtype(p.dtype))
            if unscale != 1:
                p.main_grad.mul_(unscale)
        else:
            p.main_grad.add_(p.grad, alpha=unscale)
        p.grad = None

    def accumulate_product(self, p: nn.Parameter, grad_output: Tensor, x: Tensor) -> None:
        """Add the gradient ∂yᵀ x of a weight with one use. The backward of sequence_parallel.py
        calls this, not autograd. grad_output: ∂y [n, out]; x: [n, in]"""
        is_first = p.main_grad is None
        if is_first:
            p.main_grad = torch.empty_like(p, dtype=accumulation_dtype(p.dtype))
        add_product(p.main_grad, grad_output, x, 0 if is_first else 1, self.unscale)


# --- gradients: added inside the matrix multiplication --------------------------------------------


@torch.no_grad()
def add_product(total: Tensor, grad_output: Tensor, x: Tensor, beta: int, alpha: float) -> None:
    """total = beta total + alpha ∂yᵀ x. With beta 0, `total` is not read.

    total: [out, in] float32; grad_output: ∂y [n, out] and x: [n, in], both bf16 or both fp16. It is
    one call of cuBLAS on a GPU. PyTorch has no such product for CPUs: there, for tests, ∂y and x
    are copied to the type of the sum.
    """
    factors = dict(beta=beta, alpha=alpha)
    if x.device.type == "cpu":
        total.addmm_(grad_output.t().to(total.dtype), x.to(total.dtype), **factors)
    else:
        torch.addmm(total, grad_output.t(), x, out_dtype=total.dtype, out=total, **factors)


def is_fusable(p: nn.Parameter) -> bool:
    """Whether torch has the product of `add_product` for p, and it saves time."""
    return p.is_cuda and p.dtype.itemsize == 2


def fuse_accumulation(model: nn.Module, gradients: GradientSums) -> None:
    """Make linear layers of a model or pipeline stage add up gradients inside the matrix
    multiplication, in place: those of weights where possible, and those of a shared input.

    Call it after parameters have values. torch.compile does not compile the new layers: a block
    becomes several graphs, with a product between each two. A tied weight is left out, because its
    second gradient is not a product. From ZeRO stage 1 on all weights are, because the sum is cut
    into the rows of the ranks (fsdp.py).
    """
    fusable = [p for p in gradients.parameters if is_fusable(p)]
    if not fusable:
        return
    import pipeline_parallel

    # The linear layers get the backward of sequence_parallel.py.
    pipeline_parallel.split_backward(model)
    if gradients.stage > 0:
        return
    uses = uses_of(model)
    for p in fusable:
        if uses[p] == 1:
            p.accumulator = gradients


# --- the global gradient norm ---------------------------------------------------------------------


def global_norm(
    parameters: Iterable[nn.Parameter], stages: dist.ProcessGroup | None = None
) -> Tensor:
    """The 2-norm of all gradients of the whole model, the same on every rank.

    Each element counts once: the sharding record of a parameter names the groups over which it is
    sharded, and its sum of squares is all-reduced over just these. stages: the ranks that hold the
    other pipeline stages. Returns a float64 scalar, non-finite if any gradient on any rank is.
    """
    parameters = list(parameters)
    # {groups: all gradients that are sharded over these groups}
    gradients = defaultdict(list)
    for p in parameters:
        sharding = sharding_of(p)
        # The second copy of a tied weight counts on the stage that has the first.
        if p.main_grad is None or sharding.copy_of:
            continue
        groups = tuple(dict.fromkeys(shard.group for shard in sharding.placements))
        gradients[groups].append(p.main_grad)
    total = torch.zeros((), dtype=torch.float64, device=norm_device(parameters, stages))
    for groups, local_gradients in gradients.items():
        subtotal = partial_norms(local_gradients).double().square().sum()
        for group in groups:
            dist.all_reduce(subtotal, group=group)
        total += subtotal
    if stages:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def partial_norms(tensors: list[Tensor]) -> Tensor:
    """2-norms of each tensor on a GPU, and of each row on a CPU. tensors: in at least float32 ->
    [n]"""
    if tensors[0].device.type != "cpu":
        # One launch computes the norms of many tensors.
        return torch.stack(torch._foreach_norm(tensors))
    # A CPU adds up the squares of a whole tensor in float32: the norm of a matrix of 40 million
    # numbers is wrong by 0.1%. Rows are short, and their norms take half the time.
    return torch.cat([torch.linalg.vector_norm(x, dim=-1).flatten() for x in tensors])


def norm_device(
    parameters: Iterable[nn.Parameter], stages: dist.ProcessGroup | None = None
) -> torch.device:
    """The device of `global_norm` of these parameters."""
    for p in parameters:
        return p.device
    # A pipeline stage without trainable parameters still takes part in the sum.
    if stages and dist.get_backend(stages) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# --- the loss scale -------------------------------------------------------------------------------


class LossScaler:
    """Dynamic loss scaling for fp16, with NeMo's constants.

    With hysteresis 2, the first overflow changes nothing, and each further one halves the scale.
    `interval` steps in a row without an overflow double it and restore the hysteresis.

    The first scale is found by a search: until a first step is finite, each overflow divides the
    scale by 2^8. NeMo starts at 2^32, which suits batches of millions of tokens, because the loss
    is divided by their number. A batch of 2,000 tokens needs 2^16: the search reaches it after 2
    skipped steps, halving would after 17.
    """

    def __init__(self, scale: float = 2.0**32, interval: int = 1000, hysteresis: int = 2):
        self.scale = scale
        self.interval = interval
        self.hysteresis = hysteresis
        # Finite steps since the last overflow, or since the scale was doubled.
        self.good_steps = 0
        # The scale is halved when an overflow brings this to 0.
        self.tolerance = hysteresis
        # True until a step is finite.
        self.searching = True
        # Whether the latest step overflowed at scale 1, the lowest.
        self.exhausted = False

    def update(self, finite: bool) -> None:
        """Choose the scale of the next step. finite: whether this step had no overflow."""
        self.searching &= not finite
        self.exhausted = not finite and self.scale <= 1
        if self.searching:
            self.scale = max(self.scale / 2**8, 1.0)
        elif finite:
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.scale *= 2
                self.good_steps = 0
                self.tolerance = self.hysteresis
        else:
            self.good_steps = 0
            self.tolerance -= 1
            if self.tolerance <= 0:
                self.scale = max(self.scale / 2, 1.0)

    def state_dict(self) -> dict:
        names = ("scale", "good_steps", "tolerance", "searching")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict) -> None:
        """state: as its types in run/checkpoint_index.py."""
        self.scale = float(state["scale"])
        self.good_steps, self.tolerance = state["good_steps"], state["tolerance"]
        # Without this field the scale is halved.
        self.searching = state.get("searching", False)


# === the update ===================================================================================

# --- the learning rate ----------------------------------------------------------------------------


# {schedule: the part of peak - minimum that is left after a share r of the decay}. They are
# Megatron-LM's --lr-decay-style; the decay of WSD is exponential there by default.
DECAYS = {
    "cosine": lambda r: 0.5 * (1 + math.cos(math.pi * r)),
    "linear": lambda r: 1 - r,
    "wsd": lambda r: 2 * 0.5**r - 1,
}


def learning_rate(
    step: int, peak: float, minimum: float, warmup: int, total: int, schedule="cosine", decay=0
) -> float:
    """Linear warmup to `peak` over `warmup` steps, then down to `minimum` at step `total`, by
    default along half a cosine (GPT-3, arXiv 2005.14165, appendix B). wsd stays at the peak until
    the last `decay` steps (warmup-stable-decay, arXiv 2404.06395). step counts from 1."""
    if step <= warmup:
        return peak * step / warmup
    start = max(warmup, total - decay) if schedule == "wsd" else warmup
    progress = min(1.0, max(0, step - start) / max(1, total - start))
    return minimum + (peak - minimum) * DECAYS[schedule](progress)


# --- a master, split in two halves of 16 bits -----------------------------------------------------
#
#     fp32 master    s eeeeeeee mmmmmmm | mmmmmmmmmmmmmmmm
#                    bf16 weight        | low (int16)
#
# A bf16 weight is the upper half of its fp32 master, rounded. Stored with the lower 16 bits, the
# master is exact, and the upper half is not stored twice.
#
# Floats of one sign are ordered as their bits, read as integers. So adding half of the last kept
# place (0x8000) rounds to the nearest, and ties away from zero. Copies to bf16 round ties to even:
# the two differ in ties only. `low` is the master minus the rounded upper half, so it has a sign.


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
    # Updates in place avoid a second tensor of this size.
    bits = weight.view(torch.int16).int()
    bits <<= 16
    bits += low
    return bits.view(torch.float32)


@dataclass(eq=False)
class SplitMaster:
    """A master in a checkpoint, of which only the halves exist. It is joined when it is copied
    from, and split when it is copied to. One master at a time takes its 4 bytes per parameter."""

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

# The number of elements whose 16-bit state is converted to fp32 at a time.
PIECE = 2**22


class AdamW:
    """AdamW over `main_grad`, with weight decay on matrices only.

    The update itself is torch's fused one, which reads and writes memory once. This class adds:
      - the fp32 master of a 16-bit parameter, which starts from the 16-bit value as in Megatron-LM;
      - clipping by the global norm;
      - skipped steps when the norm is not finite;
      - state in 16 bits: moments in bf16, and only the low half of a bf16 weight's master.

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
        # {global name: the parameter, or this rank's shard of it}
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
        # The device counts steps taken (float32, as in torch's fused update), steps skipped, and
        # steps skipped in a row, which starts at 0 when a checkpoint is loaded.
        device = norm_device(self.parameters.values(), stages)
        self.updates = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.allocate()

    def allocate(self) -> None:
        # Each parameter has an entry in one of these: its whole master, or its low half.
        self.masters: dict[str, Tensor] = {}
        self.low: dict[str, Tensor] = {}
        self.exp_avg: dict[str, Tensor] = {}
        self.exp_avg_sq: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            if self.state_dtype and p.dtype == torch.bfloat16:
                self.low[name] = torch.zeros_like(p, dtype=torch.int16)
            else:
                # A float32 parameter is its own master, without a copy.
                self.masters[name] = p.detach().to(torch.promote_types(p.dtype, torch.float32))
            dtype = self.state_dtype or torch.promote_types(p.dtype, torch.float32)
            self.exp_avg[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
            self.exp_avg_sq[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Update all parameters from `main_grad`. Returns the gradient norm before clipping, a
        float64 scalar on the device. If it is not finite, no rank updates anything."""
        norm = global_norm(self.parameters.values(), self.stages)
        finite = norm.isfinite()
        self.updates += finite
        self.skipped += ~finite
        self.skipped_in_a_row += 1
        self.skipped_in_a_row *= ~finite
        one = factor = torch.ones_like(norm)
        if self.clip:
            # Both are tensors: scalar / tensor would be scalar * (1 / tensor), with one more
            # rounding.
            factor = torch.minimum(one, torch.full_like(norm, self.clip) / norm)
            # NaN would stay in the padding of sharded gradients, and so in later norms.
            factor = torch.where(finite, factor, one)
        self.update_parameters(lr, factor, finite)
        if self.scaler:
            # fp16 waits for the device here: the next forward needs the new loss scale.
            self.scaler.update(bool(finite))
        return norm

    def diverged(self, most: int, skipped_in_a_row: int) -> bool:
        """Whether at least the last `most` steps were all skipped. most = 0 turns this off.
        skipped_in_a_row: the caller has read it from the device.

        With fp16, scale 1 must have overflowed too: at a lower scale the next step may be finite.
        Halving takes 33 steps from 2^32 to 1.
        """
        no_lower_scale = self.scaler is None or self.scaler.exhausted
        return 0 < most <= skipped_in_a_row and no_lower_scale

    # --- three ways to compute the update: lists of tensors, in one pass, in pieces

    def update_parameters(self, lr: float, factor: Tensor, finite: Tensor) -> None:
        """Change every parameter that has a gradient, if `finite`. Clipping multiplies `main_grad`
        in place by `factor`."""
        gradients = {name: self.parameters[name].main_grad for name in self.exp_avg}
        gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        one_pass = {n: gradients.pop(n) for n in list(gradients) if self.fits_one_pass(n)}
        if one_pass:
            self.update_in_one_pass(lr, one_pass, factor, finite)
        if not gradients:
            return
        # torch's fused update changes nothing where this is 1.
        found_inf = (~finite).float()
        if self.clip:
            rest = list(gradients.values())
            torch._foreach_mul_(rest, factor.to(rest[0].dtype))
        if self.state_dtype is None:
            for decay in sorted(set(map(self.decay_of, gradients))):
                names = [name for name in gradients if self.decay_of(name) == decay]
                tables = self.masters, gradients, self.exp_avg, self.exp_avg_sq
                lists = [[table[name] for name in names] for table in tables]
                self.update_lists(lr, decay, found_inf, *lists)
        else:
            for name, gradient in gradients.items():
                self.update_in_pieces(lr, name, gradient, found_inf)
        self.weights_from_masters(gradients)

    def update_lists(self, lr: float, decay: float, found_inf: Tensor, *lists) -> None:
        """Update all parameters with one weight decay at once, in float32 (or float64). lists:
        masters, gradients, first moments, second moments."""
        # torch.optim.AdamW(fused=True) calls this function after it has counted the step.
        torch._fused_adamw_(
            *lists,
            [],
            [self.updates] * len(lists[0]),
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
        """The weight decay, for matrices only. A scale of IA3 is a vector for each expert."""
        is_matrix = self.parameters[name].dim() >= 2 and not name.endswith(".ia3.scale")
        return self.weight_decay if is_matrix else 0.0

    def fits_one_pass(self, name: str) -> bool:
        """Whether `fused` updates it: a 16-bit weight with its master, or 16-bit moments. If all is
        in float32, torch's function is one pass already."""
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
        """Update by `fused`, one launch for all parameters of one type. It multiplies gradients by
        `factor` as it reads them."""
        control = torch.stack((factor.float(), self.updates, finite.float()))
        # {(type of the weight, has a low half, has a separate master): arguments of each parameter}
        by_type = defaultdict(list)
        for name, gradient in gradients.items():
            p = self.parameters[name]
            low = self.low.get(name)
            master = self.masters.get(name)
            if master is not None and master.dtype == p.dtype:
                # The weight is its own master.
                master = None
            state = self.exp_avg[name], self.exp_avg_sq[name], self.decay_of(name)
            types = p.dtype, low is not None, master is not None
            by_type[types].append((p.detach(), low, master, gradient, *state))
        for arguments in by_type.values():
            lists = map(list, zip(*arguments))
            self.fused(*lists, control, lr, *self.betas, self.eps)

    def update_in_pieces(self, lr: float, name: str, gradient: Tensor, found_inf: Tensor) -> None:
        """Update a parameter with 16-bit state, which is converted to float32 a piece at a time."""
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
            self.update_lists(lr, decay, found_inf, [master], [g], [wide_m], [wide_v])
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

    # --- checkpoints

    @property
    def moments(self) -> dict[str, dict[str, Tensor]]:
        """{prefix in a checkpoint: {name: what this rank holds}}"""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def tensors(self) -> dict[str, Tensor | SplitMaster]:
        """The tensors of a checkpoint under global names, each with its parameter's sharding
        record: `model.NAME`, the master, so that a checkpoint does not depend on the compute
        precision; `exp_avg.NAME`, `exp_avg_sq.NAME`. After loading, call `weights_from_masters`.
        """
        tensors = {}
        for name, p in self.parameters.items():
            split = name in self.low
            master = SplitMaster(p.detach(), self.low[name]) if split else self.masters[name]
            for prefix, of_names in ({"model": {name: master}} | self.moments).items():
                if name in of_names:
                    tensors[f"{prefix}.{name}"] = set_sharding(of_names[name], sharding_of(p))
        return tensors

    def state_dict(self) -> dict:
        """The numbers saved with `tensors()`: updates taken, steps skipped, the loss scaler."""
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
    """Raises ValueError for bf16 state of fp16 weights, whose masters do not split, and for bf16
    state with β2 above 0.99, where the decay of v is rounded away: at β2 0.999 v shrinks by 0.1% a
    step, less than half of the 0.4 to 0.8% between neighbouring bf16 numbers, so it never shrinks.
    From about 0.997 on, a part of it is lost. dtypes: of the weights."""
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
