"""A gradient on its way from backward to the update: unscaled, summed, measured.

Each backward of a micro-batch leaves a gradient, by default in the weight's own type. Sums need
more bits: in bf16, 256 + 1 is 256. So the gradients of a step's micro-batches are added up in
float32, in `parameter.main_grad` (mixed-precision training, arXiv 1710.03740):

    main_grad = sum over micro-batches and ranks of  grad / scale

    python optimizer.py        the lesson of this file and of optimizer.py

scale is 1, except in fp16. There the loss is multiplied by it before backward, so that small
gradients are not rounded to zero. Each gradient is divided by it on its way into `main_grad`, so
`main_grad` is always in true units.

`GradientAccumulator` is for weights that no other rank holds; fsdp.py has the one that also sums
over ranks. The optimizer reads `main_grad`, and clips it by its `global_norm`: the length of the
whole model's gradient, as one vector. When a gradient overflows, every rank sees a norm that is not
finite. Then the step is skipped and the scale is lowered (`LossScaler`).

On a GPU, linear layers with 16-bit weights add the gradient of a weight inside the matrix
multiplication that computes it, main_grad += ∂yᵀ x (`fuse_accumulation`; in Megatron-LM it is
called gradient_accumulation_fusion). So it is never written and read in 16 bits, nor rounded to
them.

Not covered: this fusion for embeddings, tied weights, experts and FP8, and from ZeRO stage 1 on.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("optimizer")

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sharding import sharding_of

# --- gradients: summed in float32 -----------------------------------------------------------------


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit parameters; float32 and float64 stay."""
    return torch.promote_types(dtype, torch.float32)


def sum_uses_apart(model: nn.Module) -> None:
    """Make autograd sum a tied weight's gradients in at least float32.

    A tied weight has two names in the model: an embedding that is the head's matrix too. Autograd
    adds the gradients of both uses before any hook sees them, by default in the weight's own type.
    In fp16 that sum can overflow although neither part does. A pipeline has a copy of the weight on
    two stages, and sums the two parts in float32. With this, one device gets the same gradient.
    """
    for p, count in uses_of(model).items():
        if count > 1 and p.requires_grad:
            p.grad_dtype = accumulation_dtype(p.dtype)


def uses_of(model: nn.Module) -> Counter:
    """How many names each parameter has: more than one for a tied weight."""
    return Counter(p for _, p in model.named_parameters(remove_duplicate=False))


class GradientAccumulator:
    """Adds `parameter.grad` to `parameter.main_grad`, in at least float32, after each backward.

    `parameter.grad` is freed at once. The loop calls `zero_grad()` before the first backward of a
    step, `next_backward_is_last()` before the last one, `reduce_gradients()` after it, and
    `renew_parameters()` after the optimizer's step. Here the last three have nothing to do.
    """

    # of ZeRO (fsdp.py): nothing is sharded
    stage = 0

    def __init__(self, model: nn.Module, scaler: "LossScaler | None" = None):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.scaler = scaler
        sum_uses_apart(model)
        self.zero_grad()
        self.listen()

    def listen(self) -> None:
        """Have autograd call `accumulate` when a gradient is complete; for a tied weight, once."""
        # A weak reference: the garbage collector cannot see, and so never frees, a cycle that goes
        # through a hook.
        this = weakref.ref(self)
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(lambda p: this() and this().accumulate(p))

    @property
    def unscale(self) -> float:
        """What a gradient is multiplied by on its way into the sum."""
        return 1 / self.scaler.scale if self.scaler else 1

    def accumulate(self, p: nn.Parameter) -> None:
        # None: a pipeline schedule has deferred this weight gradient, or `accumulate_product` has
        # added it.
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
        """Add the gradient ∂yᵀ x of a weight that a backward uses once. Backward calls this
        (overlap.py), not autograd. grad_output: ∂y [n, out]; x: [n, in]"""
        is_first = p.main_grad is None
        if is_first:
            p.main_grad = torch.empty_like(p, dtype=accumulation_dtype(p.dtype))
        add_product(p.main_grad, grad_output, x, 0 if is_first else 1, self.unscale)

    def next_backward_is_last(self) -> None:
        pass

    def reduce_gradients(self) -> None:
        pass

    def renew_parameters(self) -> None:
        pass

    def wait_for_parameters(self) -> None:
        """Before anything but a forward reads the parameters."""

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.main_grad = None


# --- gradients: added inside the matrix multiplication --------------------------------------------


@torch.no_grad()
def add_product(total: Tensor, grad_output: Tensor, x: Tensor, beta: int, alpha: float) -> None:
    """total = beta total + alpha ∂yᵀ x. With beta 0, what was in `total` is not read.

    total: [out, in] float32; grad_output: ∂y [n, out] and x: [n, in], both bf16 or both fp16. One
    call of cuBLAS on a GPU. PyTorch has no such product for CPUs: there ∂y and x are copied to the
    type of the sum, for tests.
    """
    factors = dict(beta=beta, alpha=alpha)
    if x.device.type == "cpu":
        total.addmm_(grad_output.t().to(total.dtype), x.to(total.dtype), **factors)
    else:
        torch.addmm(total, grad_output.t(), x, out_dtype=total.dtype, out=total, **factors)


def is_fusable(p: nn.Parameter) -> bool:
    """Whether torch has the product of `add_product`, and it is worth it."""
    return p.is_cuda and p.dtype.itemsize == 2


def fuse_accumulation(model: nn.Module, gradients: GradientAccumulator) -> None:
    """Let linear layers of a model, or of a stage, add the gradients of their weights inside the
    matrix multiplication, where that is possible, and those of an input that they share; in place.

    After what gives parameters their values. torch.compile calls the new layers as they are: a
    block becomes several graphs, with a product between each two. A tied weight has a second
    gradient, which is no product. From ZeRO stage 1 on, the sum is cut into the rows of the ranks
    (zero/units.py): a product has no place there.
    """
    fusable = [p for p in gradients.parameters if is_fusable(p)]
    if not fusable:
        return
    from pipelines import zero_bubble

    # linear layers whose backward is that of overlap.py
    zero_bubble.apply(model)
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
    sliced, and its sum of squares is all-reduced over just these. stages: the ranks that hold the
    other pipeline stages. Returns a float64 scalar, non-finite if any gradient on any rank is.
    """
    parameters = list(parameters)
    # from groups to all gradients that are sliced over these groups
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
    """2-norms whose squares add up to those of the tensors: of each tensor on a GPU, of each row on
    a CPU. tensors: in at least float32 -> [n]"""
    if tensors[0].device.type != "cpu":
        # one launch for many tensors
        return torch.stack(torch._foreach_norm(tensors))
    # A CPU adds up the squares of a whole tensor in float32: of a matrix of 40 million numbers the
    # norm is wrong by 0.1%. Rows are short, and their norms take half the time.
    return torch.cat([torch.linalg.vector_norm(x, dim=-1).flatten() for x in tensors])


def norm_device(
    parameters: Iterable[nn.Parameter], stages: dist.ProcessGroup | None = None
) -> torch.device:
    """Where `global_norm` of these parameters is."""
    for p in parameters:
        return p.device
    # A stage may have nothing to train, and still takes part in the sum.
    if stages and dist.get_backend(stages) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# --- the loss scale -------------------------------------------------------------------------------


class LossScaler:
    """Dynamic loss scaling for fp16, with NeMo's constants.

    With hysteresis 2, the first overflow changes nothing, and each further one halves the scale.
    `interval` steps in a row without an overflow double it and restore the hysteresis.

    The first scale is searched for: until a first step is finite, each overflow divides the scale
    by 2^8. NeMo starts at 2^32, which suits batches of millions of tokens, because the loss is
    divided by their number. A batch of 2,000 tokens fits at 2^16: the search skips 2 steps to get
    there, halving would skip 17.
    """

    def __init__(self, scale: float = 2.0**32, interval: int = 1000, hysteresis: int = 2):
        self.scale = scale
        self.interval = interval
        self.hysteresis = hysteresis
        # finite steps since the last overflow, or since the scale was doubled
        self.good_steps = 0
        # the scale is halved when an overflow brings this to 0
        self.tolerance = hysteresis
        # no step has been finite yet
        self.searching = True
        # the latest step overflowed at scale 1, the lowest there is
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
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "tolerance": self.tolerance,
            "searching": self.searching,
        }

    def load_state_dict(self, state: dict) -> None:
        """Raises ValueError where the values have other types, or the scale is below 1."""
        scale = state["scale"]
        good_steps = state["good_steps"]
        tolerance = state["tolerance"]
        # Checkpoints older than the search lack this field; they go on by halves.
        searching = state.get("searching", False)
        if not (
            isinstance(scale, (int, float))
            and isinstance(good_steps, int)
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
