"""AdamW with mixed-precision state, dynamic loss scaling, the global gradient norm, and the learning-rate schedule.

Compute may be bf16 or fp16; what is remembered from step to step is not (mixed precision training, arXiv 1710.03740):

    weights     bf16/fp16 for compute, and an fp32 master that the update goes to: 1 + 0.0001 is 1 in bf16
    gradients   summed over micro-batches (and ranks) in `main_grad`, fp32
    moments     fp32

With fp16 the loss is multiplied by a scale before backward, so that small gradients do not vanish, and each micro-batch's
gradient is divided by it on its way into `main_grad`: `main_grad` is always in true units. Where a gradient overflows, all
ranks see a non-finite norm, the step is skipped and counted, and the scale shrinks.

`GradientAccumulator` fills `main_grad` on one device; fsdp.py keeps it in buckets that are summed over ranks.

    python optimizer.py        why masters are needed, and the schedule, in numbers

Left out, and found in Megatron-LM: other optimizers, other schedules, parameter groups by user rule.
"""
import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sharding


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit parameters; float32 and float64 stay."""
    return torch.promote_types(dtype, torch.float32)


class GradientAccumulator:
    """After each backward, adds `parameter.grad` to `parameter.main_grad`, in at least float32, and drops it.

    The loop calls `zero()` before the first backward of a step, `last_backward()` before the last, `reduce_gradients()` after it, and
    `gather_parameters()` after the optimizer's step. On one device the last three have nothing to do.
    """

    def __init__(self, model: nn.Module, scaler: "LossScaler | None" = None):
        self.parameters, self.scaler = list(model.parameters()), scaler
        self.zero()
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self.accumulate)        # a tied weight is called once, with its sum

    def accumulate(self, p: nn.Parameter) -> None:
        if p.grad is None:                                               # owed: a pipeline schedule computes it later
            return
        unscale = 1 / self.scaler.scale if self.scaler else 1
        if p.main_grad is None:
            p.main_grad = p.grad.to(accumulation_dtype(p.dtype))         # float32: the tensor itself, no copy
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
    """The 2-norm of all gradients of the whole model, the same on every rank: each slice counts once, read off the sharding
    record. stages: the ranks that hold the pipeline's other layers. Returns a float64 scalar, non-finite if any gradient on any rank is."""
    parameters = list(parameters)
    device = parameters[0].device
    squares = defaultdict(list)                                          # the groups that cut a parameter: its sum of squares
    for p in parameters:
        if p.main_grad is not None and not sharding.of(p).copy_of:
            groups = tuple(dict.fromkeys(c.group for c in sharding.of(p).cuts))
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
    """Dynamic loss scaling with NeMo's constants. The `hysteresis`-th overflow and every later one halve the scale; `interval`
    steps in a row without one double it and restore the hysteresis."""

    def __init__(self, scale=2.0**32, interval=1000, hysteresis=2):
        self.scale, self.interval, self.hysteresis = scale, interval, hysteresis
        self.good_steps, self.tolerance = 0, hysteresis

    def update(self, finite: bool) -> None:
        if finite:
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.scale, self.good_steps, self.tolerance = self.scale * 2, 0, self.hysteresis
        else:
            self.good_steps, self.tolerance = 0, self.tolerance - 1
            if self.tolerance <= 0:
                self.scale = max(self.scale / 2, 1.0)

    def state_dict(self) -> dict:
        return {"scale": self.scale, "good_steps": self.good_steps, "tolerance": self.tolerance}

    def load_state_dict(self, state: dict) -> None:
        self.__dict__.update(state)


def learning_rate(step: int, peak: float, minimum: float, warmup: int, total: int) -> float:
    """Linear warmup to `peak` over `warmup` steps, then half a cosine down to `minimum` at step `total` (GPT-3, appendix B).
    step counts from 1."""
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return minimum + (peak - minimum) * 0.5 * (1 + math.cos(math.pi * progress))


class AdamW:
    """AdamW (arXiv 1711.05101) over `main_grad`, decay on matrices only:

        m = β1 m + (1 - β1) g        v = β2 v + (1 - β2) g²
        w = w - lr λ w - lr (m / (1 - β1ᵗ)) / (√(v / (1 - β2ᵗ)) + ε)

    The update itself is `torch.optim.AdamW(fused=True)`: one pass over memory. What is added here is the fp32 master of a 16-bit
    parameter (which starts from the 16-bit value, as in Megatron-LM), clipping by the global norm, and steps that are skipped when
    the norm is not finite.
    """

    def __init__(self, named_parameters, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip=0.0, scaler: LossScaler | None = None,
                 stages: dist.ProcessGroup | None = None):
        """clip: the largest global gradient norm, 0 for none. stages: as in `global_norm`."""
        self.parameters = dict(named_parameters)                         # global name: parameter
        self.clip, self.scaler, self.stages, self.updates, self.skipped = clip, scaler, stages, 0, 0
        self.masters = {name: p if p.dtype == accumulation_dtype(p.dtype) else p.detach().to(accumulation_dtype(p.dtype))
                        for name, p in self.parameters.items()}
        decay = [m for m in self.masters.values() if m.dim() >= 2]
        other = [m for m in self.masters.values() if m.dim() < 2]
        groups = [{"params": ps, "weight_decay": wd} for ps, wd in ((decay, weight_decay), (other, 0.0)) if ps]
        self.adamw = torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)
        for m in self.masters.values():                                  # from the start, so that a checkpoint has a place to load to
            self.adamw.state[m] = {"step": torch.zeros((), device=m.device), "exp_avg": torch.zeros_like(m),
                                   "exp_avg_sq": torch.zeros_like(m)}

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Update from `main_grad`. Returns the gradient norm before clipping; where it is not finite, on all ranks alike, nothing is updated."""
        norm = global_norm(self.parameters.values(), self.stages).item()
        finite = math.isfinite(norm)
        if finite:
            gradients = {name: p.main_grad for name, p in self.parameters.items() if p.main_grad is not None}
            if self.clip and norm > self.clip:
                torch._foreach_mul_(list(gradients.values()), self.clip / norm)
            for name, gradient in gradients.items():
                self.masters[name].grad = gradient
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            self.adamw.zero_grad(set_to_none=True)
            self.weights_from_masters()
        self.updates += finite
        self.skipped += not finite
        if self.scaler:
            self.scaler.update(finite)
        return norm

    @torch.no_grad()
    def weights_from_masters(self) -> None:
        for name, p in self.parameters.items():
            if self.masters[name] is not p:
                p.copy_(self.masters[name])

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, under global names: `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`, each
        with the parameter's sharding record. The weights are the
        masters, so that a checkpoint does not depend on the compute precision; after loading, `weights_from_masters()`."""
        found = {}
        for name, master in self.masters.items():
            state = self.adamw.state[master]
            for kind, tensor in (("model", master.detach()), ("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"])):
                found[f"{kind}.{name}"] = sharding.label(tensor, sharding.of(self.parameters[name]))
        return found

    def state_dict(self) -> dict:
        """The numbers that go with `tensors()`: updates taken, steps skipped, the loss scaler."""
        return {"updates": self.updates, "skipped": self.skipped, "scaler": self.scaler.state_dict() if self.scaler else None}

    def load_state_dict(self, state: dict) -> None:
        self.updates, self.skipped = state["updates"], state["skipped"]
        for m in self.masters.values():
            self.adamw.state[m]["step"].fill_(self.updates)
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])


def main():
    print("an update of 1e-3, 1000 times, to a weight of 1:")
    bf16, master = torch.ones((), dtype=torch.bfloat16), torch.ones(())
    for _ in range(1000):
        bf16 += 1e-3
        master += 1e-3
    print(f"  in bf16 {bf16.item():.4f};  in an fp32 master {master.item():.4f}, as bf16 {master.bfloat16().item():.4f}")
    print("learning rate, peak 3e-4, minimum 3e-5, 10 of 100 steps warmup:")
    print("  " + "  ".join(f"{step}: {learning_rate(step, 3e-4, 3e-5, 10, 100):.1e}" for step in (1, 5, 10, 25, 55, 75, 100)))
    scaler = LossScaler()
    taken = 0
    for step in range(40):                                               # a model whose gradients overflow above 2^16
        finite = scaler.scale <= 2**16
        taken += finite
        scaler.update(finite)
    print(f"loss scale: from 2^32 to 2^{math.log2(scaler.scale):.0f} in 40 steps, {40 - taken} of them skipped")


if __name__ == "__main__":
    main()
