"""AdamW with mixed-precision state, dynamic loss scaling, the global gradient norm, and the
learning-rate schedule.

Compute may be bf16 or fp16; what is remembered from step to step is not (mixed precision training,
arXiv 1710.03740):

    weights     bf16/fp16 for compute, and an fp32 master that the update goes to: 1 + 0.0001 is 1 in bf16
    gradients   summed over micro-batches (and ranks) in `main_grad`, fp32
    moments     fp32, or, to save memory, bf16 (and of the master only what the bf16 weight does not hold: `AdamW`)

With fp16 the loss is multiplied by a scale before backward, so that small gradients do not vanish,
and each micro-batch's gradient is divided by it on its way into `main_grad`: `main_grad` is always
in true units. Where a gradient overflows, all ranks see a non-finite norm, the step is skipped and
counted, and the scale shrinks. A run whose steps are all skipped has diverged, once there is no
lower scale to try (`AdamW.diverged`).

`GradientAccumulator` fills `main_grad` on one device; fsdp.py's sums it over ranks.

    python optimizer.py        why masters are needed, how they split, and the schedule, in numbers

Left out, and found in Megatron-LM: other optimizers, other schedules, parameter groups by user
rule."""

import math
import weakref
from collections import Counter, defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from sharding import set_sharding, sharding_of


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit parameters; float32 and float64 stay."""
    return torch.promote_types(dtype, torch.float32)


def sum_uses_apart(model: nn.Module) -> None:
    """Let autograd sum the gradients of a weight that the model uses more than once, a tied
    embedding, in at least float32. They are summed before any hook sees them, by default in the
    weight's own type: in fp16 the sum can overflow where neither part does, and a pipeline, whose
    two stages hold a copy each, sums the parts in float32."""
    uses = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    for p in (p for p, n in uses.items() if n > 1 and p.requires_grad):
        p.grad_dtype = accumulation_dtype(p.dtype)


class GradientAccumulator:
    """After each backward, adds `parameter.grad` to `parameter.main_grad`, in at least float32, and
    drops it.

    The loop calls `zero()` before the first backward of a step, `last_backward()` before the last,
    `reduce_gradients()` after it, and `gather_parameters()` after the optimizer's step. On one
    device the last three have nothing to do."""

    def __init__(self, model: nn.Module, scaler: "LossScaler | None" = None):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.scaler = scaler
        sum_uses_apart(model)
        self.zero()
        self.listen()

    def listen(self) -> None:
        # a hook's references are out of the garbage collector's sight
        this = weakref.ref(self)
        # a tied weight is called once, with its sum
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(lambda p: this() and this().accumulate(p))

    def accumulate(self, p: nn.Parameter) -> None:
        # owed: a pipeline schedule computes it later
        if p.grad is None:
            return
        unscale = 1 / self.scaler.scale if self.scaler else 1
        if p.main_grad is None:
            # float32: the tensor itself, no copy
            p.main_grad = p.grad.to(accumulation_dtype(p.dtype))
            if unscale != 1:
                p.main_grad.mul_(unscale)
        else:
            p.main_grad.add_(p.grad, alpha=unscale)
        p.grad = None

    def last_backward(self) -> None:
        pass

    def reduce_gradients(self) -> None:
        pass

    def gather_parameters(self) -> None:
        pass

    def zero(self) -> None:
        for p in self.parameters:
            p.main_grad = None


def global_norm(parameters, stages: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm of all gradients of the whole model, the same on every rank: each slice counts
    once, read off the sharding record. stages: the ranks that hold the pipeline's other layers.
    Returns a float64 scalar, non-finite if any gradient on any rank is."""
    parameters = list(parameters)
    # a stage may have nothing that learns
    on_gpu = (
        parameters[0].is_cuda
        if parameters
        else stages is not None and dist.get_backend(stages) == "nccl"
    )
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    # the groups that cut a parameter: its sum of squares
    squares = defaultdict(list)
    for p in parameters:
        if p.main_grad is not None and not sharding_of(p).copy_of:
            groups = tuple(dict.fromkeys(c.group for c in sharding_of(p).placements))
            squares[groups].append(torch.linalg.vector_norm(p.main_grad).double().square())
    total = 0.0
    for groups, parts in squares.items():
        part = torch.stack(parts).sum()
        for group in groups:
            dist.all_reduce(part, group=group)
        total = total + part
    if stages:
        total = torch.as_tensor(total, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=stages)
    return torch.as_tensor(total).sqrt()


class LossScaler:
    """Dynamic loss scaling with NeMo's constants. The `hysteresis`-th overflow and every later one
    halve the scale; `interval` steps in a row without one double it and restore the hysteresis.

    Before that, the first scale is searched for: until a step is finite, each overflow divides the
    scale by 2^8. NeMo's start of 2^32 suits batches of millions of tokens, by whose number the loss
    is divided. A batch of 2,000 tokens fits at 2^16: that is 2 skipped steps, and 17 by halves."""

    def __init__(self, scale=2.0**32, interval=1000, hysteresis=2):
        self.scale = scale
        self.interval = interval
        self.hysteresis = hysteresis
        self.good_steps = 0
        self.tolerance = hysteresis
        # searching: no step has been finite yet. exhausted: the latest one overflowed at scale 1,
        # the lowest there is
        self.searching = True
        self.exhausted = False

    def update(self, finite: bool) -> None:
        self.searching &= not finite
        self.exhausted = not finite and self.scale <= 1
        if self.searching:
            self.scale = max(self.scale / 2**8, 1.0)
        elif finite:
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.scale = self.scale * 2
                self.good_steps = 0
                self.tolerance = self.hysteresis
        else:
            self.good_steps = 0
            self.tolerance = self.tolerance - 1
            if self.tolerance <= 0:
                self.scale = max(self.scale / 2, 1.0)

    def state_dict(self) -> dict:
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "tolerance": self.tolerance,
            "searching": self.searching,
        }

    def load_state_dict(self, state: dict) -> None:
        scale, good_steps, tolerance = (state[key] for key in ("scale", "good_steps", "tolerance"))
        # checkpoints from before there was a search do not have it: they go on by halves
        searching = state.get("searching", False)
        if not (
            isinstance(good_steps, int)
            and isinstance(tolerance, int)
            and isinstance(searching, bool)
            and math.isfinite(scale)
            and scale >= 1
        ):
            raise ValueError(f"not the state of a loss scaler: {state}")
        self.scale = float(scale)
        self.good_steps = good_steps
        self.tolerance = tolerance
        self.searching = searching


def learning_rate(step: int, peak: float, minimum: float, warmup: int, total: int) -> float:
    """Linear warmup to `peak` over `warmup` steps, then half a cosine down to `minimum` at step
    `total` (GPT-3, appendix B). step counts from 1."""
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return minimum + (peak - minimum) * 0.5 * (1 + math.cos(math.pi * progress))


# A bf16 weight is the upper half of its fp32 master, rounded; 16 more bits beside it make the
# master exact again. (As integers: a float's
# order is its bits' order, so rounding half away from zero is adding half of the last place that
# stays; copies to bf16 round half to even,
# and so differ in ties.)


def join(weight: Tensor, low: Tensor) -> Tensor:
    """The fp32 master of a bf16 weight and its low bits (int16, same shape, contiguous)."""
    return ((weight.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split(master: Tensor, weight: Tensor, low: Tensor) -> None:
    """Write a master [..] fp32 to weight and low: high = (x + 0x8000) >> 16, low = x - (high <<
    16), which is signed."""
    x = master.view(torch.int32)
    high = (x + 0x8000) >> 16
    weight.view(torch.int16).copy_(high)
    low.copy_(x - (high << 16))


# elements that are in fp32 at a time while 16-bit state is updated
PIECE = 2**22


class AdamW:
    """AdamW (arXiv 1711.05101) over `main_grad`, decay on matrices only:

        m = β1 m + (1 - β1) g        v = β2 v + (1 - β2) g²
        w = w - lr λ w - lr (m / (1 - β1ᵗ)) / (√(v / (1 - β2ᵗ)) + ε)

    The update itself is torch's fused one: one pass over memory. What is added here is the fp32
    master of a 16-bit parameter (which starts from the 16-bit value, as in Megatron-LM), clipping
    by the global norm, steps that are skipped when the norm is not finite, and state in 16 bits:
    both moments in bf16, and of a bf16 weight's master only the low half. Bytes for a parameter,
    without its gradient:

        weight      master      moments
        bf16 2      fp32 4      fp32 4 + 4      14
        bf16 2      low  2      bf16 2 + 2       8      (state_dtype bf16; an fp32 weight is its own master: 4 + 2 + 2 = 8 too)
    """

    def __init__(
        self,
        named_parameters,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        clip=0.0,
        scaler: LossScaler | None = None,
        stages: dist.ProcessGroup | None = None,
        state_dtype: torch.dtype | None = None,
        fused=None,
    ):
        """clip: the largest global gradient norm, 0 for none. stages: as in `global_norm`.
        state_dtype: torch.bfloat16, or None for at least float32. fused: kernels.adamw, which
        updates a parameter with 16 bits in it in one pass, or None. Raises ValueError for bf16
        state of fp16 weights, whose masters do not split, or with a β2 so near to 1 that v (1 - β2)
        is below half of bf16's last place of v, and v can never shrink."""
        if state_dtype and betas[1] > 0.99:
            raise ValueError(
                f"optimizer_state bf16: with β2 {betas[1]} second moments in bf16 would never"
                " shrink; 0.99 and below do, as does optimizer_state fp32"
            )
        # global name: parameter, or this rank's shard of it
        self.parameters = dict(named_parameters)
        self.weight_decay = weight_decay
        self.betas = betas
        self.eps = eps
        self.clip = clip
        self.scaler = scaler
        self.stages = stages
        self.updates = 0
        self.skipped = 0
        # steps skipped since the last one that was taken; a run that goes on from a checkpoint
        # counts anew
        self.skipped_in_a_row = 0
        # in full; or the low half of it
        self.masters = {}
        self.low = {}
        self.fused = fused
        for name, p in self.parameters.items():
            if state_dtype and p.dtype == torch.float16:
                raise ValueError(
                    "optimizer_state bf16: the upper half of an fp32 master is a bf16 number, not"
                    " an fp16 one; use precision bf16, or optimizer_state fp32"
                )
            if state_dtype and p.dtype == torch.bfloat16:
                self.low[name] = torch.zeros_like(p, dtype=torch.int16)
            else:
                # itself, where that is its type
                self.masters[name] = p.detach().to(accumulation_dtype(p.dtype))
        state = {
            name: torch.zeros_like(
                p, dtype=state_dtype or accumulation_dtype(p.dtype), requires_grad=False
            )
            for name, p in self.parameters.items()
        }
        self.exp_avg = state
        self.exp_avg_sq = {name: x.clone() for name, x in state.items()}
        # all of it: no pass through fp32
        self.wide = state_dtype is None

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Update from `main_grad`. Returns the gradient norm before clipping; where it is not
        finite, on all ranks alike, nothing is updated."""
        norm = global_norm(self.parameters.values(), self.stages).item()
        finite = math.isfinite(norm)
        if finite:
            gradients = {
                name: p.main_grad for name, p in self.parameters.items() if p.main_grad is not None
            }
            scale = self.clip / norm if self.clip and norm > self.clip else 1.0
            self.updates += 1
            for name in [name for name in gradients if self.in_one_pass(name)]:
                self.update_in_one_pass(lr, name, gradients.pop(name), scale)
            if scale != 1 and gradients:
                torch._foreach_mul_(list(gradients.values()), scale)
            for decay, names in (
                (self.weight_decay, [n for n in gradients if self.parameters[n].dim() >= 2]),
                (0.0, [n for n in gradients if self.parameters[n].dim() < 2]),
            ):
                if self.wide:
                    state = self.masters, gradients, self.exp_avg, self.exp_avg_sq
                    self.update(lr, decay, *([x[name] for name in names] for x in state))
                else:
                    for name in names:
                        self.update_in_pieces(lr, decay, name, gradients[name])
            self.weights_from_masters(gradients)
        self.skipped += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.scaler:
            self.scaler.update(finite)
        return norm

    def diverged(self, most: int) -> bool:
        """Whether the last `most` steps, or more, were all skipped; never for 0. With fp16 not
        while the loss scale falls: the next step may fit, and from any scale to the lowest it takes
        33 steps at most."""
        return 0 < most <= self.skipped_in_a_row and (self.scaler is None or self.scaler.exhausted)

    def update(
        self,
        lr: float,
        decay: float,
        masters: list[Tensor],
        gradients: list[Tensor],
        exp_avg: list[Tensor],
        exp_avg_sq: list[Tensor],
    ) -> None:
        if masters:
            # the function counts this one itself
            before = torch.full((len(masters),), self.updates - 1.0, device=masters[0].device)
            adamw(
                masters,
                gradients,
                exp_avg,
                exp_avg_sq,
                [],
                list(before.unbind()),
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                eps=self.eps,
                lr=lr,
                weight_decay=decay,
            )

    def in_one_pass(self, name: str) -> bool:
        """Whether `fused` takes it: a 16-bit weight with its master, or 16-bit moments. All in
        float32 is one pass already."""
        p = self.parameters[name]
        return (
            bool(self.fused)
            and p.dtype != torch.float64
            and p.is_contiguous()
            and (p.dtype != torch.float32 or not self.wide)
        )

    def update_in_one_pass(self, lr: float, name: str, gradient: Tensor, scale: float) -> None:
        """One parameter; `scale` clips the gradient on its way."""
        p = self.parameters[name]
        master = self.masters.get(name)
        self.fused(
            p.detach(),
            self.low.get(name),
            None if master is None or master.dtype == p.dtype else master,
            gradient,
            self.exp_avg[name],
            self.exp_avg_sq[name],
            lr,
            self.weight_decay if p.dim() >= 2 else 0.0,
            *self.betas,
            self.eps,
            self.updates,
            scale,
        )

    def update_in_pieces(self, lr: float, decay: float, name: str, gradient: Tensor) -> None:
        """One parameter, whose state is wide only while it is updated."""
        flat = [
            x.view(-1).split(PIECE)
            for x in (self.parameters[name], gradient, self.exp_avg[name], self.exp_avg_sq[name])
        ]
        lows = self.low[name].view(-1).split(PIECE) if name in self.low else [None] * len(flat[0])
        for weight, g, m, v, low in zip(*flat, lows):
            master = weight if low is None else join(weight, low)
            wide_m = m.to(g.dtype)
            wide_v = v.to(g.dtype)
            self.update(lr, decay, [master], [g], [wide_m], [wide_v])
            m.copy_(wide_m)
            v.copy_(wide_v)
            if low is not None:
                split(master, weight, low)

    @torch.no_grad()
    def weights_from_masters(self, names=None) -> None:
        for name, master in self.masters.items():
            if master.dtype != self.parameters[name].dtype and (names is None or name in names):
                self.parameters[name].copy_(master)

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, under global names: `model.NAME`, `exp_avg.NAME`,
        `exp_avg_sq.NAME`, each with the parameter's sharding record. The weights are the masters,
        joined where they are split, so that a checkpoint does not depend on the compute precision.
        After filling them from a checkpoint, `restore` them."""
        found = {}
        for name, p in self.parameters.items():
            master = join(p, self.low[name]) if name in self.low else self.masters[name]
            for kind, tensor in (
                ("model", master),
                ("exp_avg", self.exp_avg[name]),
                ("exp_avg_sq", self.exp_avg_sq[name]),
            ):
                found[f"{kind}.{name}"] = set_sharding(tensor, sharding_of(p))
        return found

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """What `tensors()` gave has other values now."""
        for name, low in self.low.items():
            split(tensors[f"model.{name}"], self.parameters[name], low)
        self.weights_from_masters()

    def state_dict(self) -> dict:
        """The numbers that go with `tensors()`: updates taken, steps skipped, the loss scaler."""
        return {
            "updates": self.updates,
            "skipped": self.skipped,
            "scaler": self.scaler.state_dict() if self.scaler else None,
        }

    def load_state_dict(self, state: dict) -> None:
        self.updates = state["updates"]
        self.skipped = state["skipped"]
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])


def main():
    print("an update of 1e-3, 1000 times, to a weight of 1:")
    bf16 = torch.ones((), dtype=torch.bfloat16)
    master = torch.ones(())
    for _ in range(1000):
        bf16 += 1e-3
        master += 1e-3
    print(
        f"  in bf16 {bf16.item():.4f};  in an fp32 master {master.item():.4f}, as bf16"
        f" {master.bfloat16().item():.4f}"
    )
    weight = torch.zeros(1, dtype=torch.bfloat16)
    low = torch.zeros(1, dtype=torch.int16)
    split(master.view(1), weight, low)
    print(
        f"  the same master as a bf16 weight {weight.item()} and 16 low bits {low.item()}: together"
        f" {join(weight, low).item():.9f}, as it was {master.item():.9f}"
    )
    print("learning rate, peak 3e-4, minimum 3e-5, 10 of 100 steps warmup:")
    print(
        "  "
        + "  ".join(
            f"{step}: {learning_rate(step, 3e-4, 3e-5, 10, 100):.1e}"
            for step in (1, 5, 10, 25, 55, 75, 100)
        )
    )
    scaler = LossScaler()
    taken = 0
    # a model whose gradients overflow above 2^16
    for step in range(40):
        finite = scaler.scale <= 2**16
        taken += finite
        scaler.update(finite)
    print(
        f"loss scale: from 2^32 to 2^{math.log2(scaler.scale):.0f} in 40 steps, {40 - taken} of"
        " them skipped"
    )


if __name__ == "__main__":
    main()
