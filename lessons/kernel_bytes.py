"""The demonstration of kernels.py: bytes moved and errors, beside PyTorch's own operations.

    python kernels.py

It says whether the kernels run here. Then, for every operation, it counts the bytes that one pass
over its arguments and outputs moves, and those that PyTorch's own operations move, forward and
backward. Where the kernels run, it prints errors too: the largest of an output or a gradient,
against float64.

    examples(..)       the operations with arguments of a model's sizes
    measure(..)        one call, forward and backward: its bytes and its results
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import gpt
import kernels
import moe
import optimizer
from cross_entropy import cross_entropy
from dropout import dropout_key
from model_config import GPTConfig
from routers import MoEConfig


class Traffic(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes that PyTorch's operations have to move.

    Every tensor that an operation reads or writes counts once, every tensor that it changes in
    place twice. Views and empty tensors move nothing.
    """

    ALLOCATIONS = (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
    )

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        schema = function._schema
        is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if is_view or function in self.ALLOCATIONS:
            return outputs
        # By storage: an output that is an argument counts once here.
        moved = {t.untyped_storage()._cdata: t.nbytes for t in tensors((args, kwargs, outputs))}
        changed = [
            t.nbytes
            for argument, value in zip(schema.arguments, args)
            if argument.alias_info and argument.alias_info.is_write
            for t in tensors(value)
        ]
        self.bytes += sum(moved.values()) + sum(changed)
        return outputs


def tensors(tree) -> list[Tensor]:
    """All tensors in a tree of lists, tuples and dictionaries."""
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def norm_examples(new, b: int, s: int, h: int) -> dict:
    """new(*shape) makes a random tensor."""
    return {
        "rms_norm": (
            (new(b, s, h), new(h)),
            kernels.rms_norm,
            lambda x, w: F.rms_norm(x, (h,), w, 1e-5),
            (0, 1),
        ),
        "layer_norm": (
            (new(b, s, h), new(h), new(h)),
            kernels.layer_norm,
            lambda x, w, bias: F.layer_norm(x, (h,), w, bias, 1e-5),
            (0, 1, 2),
        ),
        "add_norm": (
            (new(b, s, h), new(b, s, h), new(h)),
            lambda x, residual, w: kernels.add_norm(x, residual, w, None, 1e-5),
            add_then_norm,
            (0, 1, 2),
        ),
    }


def add_then_norm(x, residual, w):
    z = x + residual
    return z, F.rms_norm(z, w.shape, w, 1e-5)


def module_examples(new, b: int, s: int, h: int, ffn: int, heads: int) -> dict:
    """The examples of what stands in a block beside norms."""
    d = h // heads
    config = GPTConfig(num_layers=1, hidden_size=h, num_heads=heads, seq_length=s, llama=True)
    table = gpt.rotary_table(config, s, new(1))
    key = dropout_key(0, 1, torch.arange(b, device=new(1).device))
    mask = torch.full_like(new(s, s), -math.inf).triu(1)
    return {
        "rotary": (
            (new(b, s, heads, d).transpose(1, 2), new(b, s, heads, d).transpose(1, 2), *table),
            kernels.rotary,
            lambda q, k, *t: (gpt.rotate(q, t), gpt.rotate(k, t)),
            (0, 1),
        ),
        "swiglu": ((new(b, s, ffn), new(b, s, ffn)), kernels.swiglu, gpt.SwiGLU(), (0, 1)),
        "bias_gelu": (
            (new(b, s, ffn), new(ffn)),
            kernels.bias_gelu,
            lambda x, bias: F.gelu(x + bias, approximate="tanh"),
            (0, 1),
        ),
        "bias_dropout_add": (
            (new(b, s, h), new(h), new(b, s, h), key),
            lambda x, bias, r, k: kernels.bias_dropout_add(x, bias, r, k, 2, 0, 0.1),
            gpt.BiasDropoutAdd(0.1, 2),
            (0, 1, 2),
        ),
        "causal_softmax": (
            (new(b * heads, s, s),),
            lambda scores: kernels.causal_softmax(scores, d**-0.5),
            lambda scores: (scores * d**-0.5 + mask).softmax(-1),
            (0,),
        ),
    }


def loss_examples(new, n: int, vocab_size: int) -> dict:
    logits = new(n, vocab_size)
    targets = torch.randint(vocab_size, (n,), device=logits.device)
    return {"cross_entropy": ((logits, targets), kernels.cross_entropy, cross_entropy, (0,))}


def expert_examples(new, n: int, h: int) -> dict:
    """The permutation of n tokens to 2 of 8 experts each."""
    device = new(1).device
    routing = moe.Routing(
        lambda logits, training: logits,
        MoEConfig(
            num_layers=1, hidden_size=8, num_heads=1, num_experts=8, router="topk", router_topk=2
        ),
    )
    plan = routing(torch.rand(n, 8, device=device))
    probabilities = torch.rand(n, 2, device=device)
    rows = new(len(plan.order), h)
    there = new(n, h), plan.order, plan.position
    back = rows, probabilities, plan.position, plan.order
    return {
        "permute": (there, kernels.permute, moe.permute, (0,)),
        "unpermute": (back, kernels.unpermute, moe.unpermute, (0, 1)),
    }


ADAMW = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)


def fused_adamw(weight, *others):
    """By the kernel; on a CPU, like all operations there, by PyTorch's."""
    if not kernels.supported(weight):
        return plain_adamw(weight, *others)
    low, gradient, exp_avg, exp_avg_sq, control = others
    lists = [[t] for t in (weight, low, None, gradient, exp_avg, exp_avg_sq, 0.1)]
    kernels.adamw(*lists, control, **ADAMW)


def plain_adamw(weight, low, gradient, exp_avg, exp_avg_sq, control):
    """The same by PyTorch's operations."""
    lr, beta1, beta2, eps = ADAMW.values()
    factor, step, _ = control.tolist()
    x = optimizer.join_master(weight, low)
    g = gradient * factor
    m = exp_avg.float().lerp_(g, 1 - beta1)
    v = exp_avg_sq.float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = v.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
    x.mul_(1 - lr * 0.1).addcdiv_(m, root, value=-lr / (1 - beta1**step))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    optimizer.split_master(x, weight, low)


def optimizer_examples(new, size: int) -> dict:
    """AdamW of one parameter, with 16-bit moments and a split master."""
    weight = new(size).bfloat16()
    low = torch.zeros_like(weight, dtype=torch.int16)
    state = torch.zeros_like(weight), torch.zeros_like(weight)
    control = torch.tensor([1.0, 10.0, 1.0], device=weight.device)
    args = weight, low, weight.float(), *state, control
    return {"adamw": (args, fused_adamw, plain_adamw, ())}


def examples(
    b: int,
    s: int,
    h: int,
    ffn: int,
    vocab_size: int,
    heads: int = 8,
    device="cpu",
    dtype=torch.bfloat16,
) -> dict:
    """{name: (arguments, fused, PyTorch's own, which arguments have gradients)} of every operation,
    at the sizes of a model. Without gradients there is no backward."""

    def new(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    return {
        **norm_examples(new, b, s, h),
        **module_examples(new, b, s, h, ffn, heads),
        **loss_examples(new, b * s, vocab_size),
        **expert_examples(new, b * s, h),
        **optimizer_examples(new, ffn * h),
    }


def as_tuple(outputs) -> tuple:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def measure(function, args: tuple, with_gradient: tuple, dtype: torch.dtype | None = None):
    """One call of a function, forward and backward.

    Floating-point arguments are cast to `dtype`, if it is given. Returns ([bytes moved forward,
    bytes moved backward], [*outputs, *gradients]); without gradients ([bytes moved forward], []).
    """
    inputs = list(args)
    for i, a in enumerate(args):
        if isinstance(a, Tensor):
            cast = dtype if dtype is not None and a.is_floating_point() else a.dtype
            inputs[i] = a.detach().to(cast).clone().requires_grad_(i in with_gradient)
        if i in with_gradient:
            # Not a leaf: an operation may overwrite it.
            inputs[i] = inputs[i] * 1
    with Traffic() as forward:
        outputs = function(*inputs)
    if not with_gradient:
        return [forward.bytes], []
    outputs = as_tuple(outputs)
    grad_outputs = [
        torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(o)
        for o in outputs
    ]
    with Traffic() as backward:
        gradients = torch.autograd.grad(outputs, [inputs[i] for i in with_gradient], grad_outputs)
    return [forward.bytes, backward.bytes], [*outputs, *gradients]


def largest_error(results: list[Tensor], exact: list[Tensor]) -> float:
    """The largest |x - y| / |y|, in the 2-norm, of outputs and gradients against float64."""
    pairs = zip(results, exact)
    return max(((x.double() - y).norm() / y.norm()).item() for x, y in pairs)


def on_meta(args: tuple) -> tuple:
    """The arguments without data: an operation then counts its bytes and computes nothing."""
    return tuple(a.to("meta") if isinstance(a, Tensor) else a for a in args)


def errors(args: tuple, fused, own, with_gradient: tuple) -> list[float]:
    """[of the kernel, of PyTorch's own operations]"""
    exact = measure(own, args, with_gradient, torch.float64)[1]
    return [largest_error(measure(f, args, with_gradient)[1], exact) for f in (fused, own)]


def microseconds(function) -> float:
    """Of one call on a GPU, from 100 in a row."""
    function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(100):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 10


def time_swiglu() -> None:
    """The two kernels of csrc/swiglu.cu, and a copy of as many bytes, on a GPU."""
    gate, up, y = torch.randn(3, 2**26, device="cuda", dtype=torch.bfloat16)
    target, source = torch.empty(2, 3 * 2**25, device="cuda", dtype=torch.bfloat16)

    def run(name):
        kernels.launch(name, gate, gate, up, y, y.numel())

    print("swiglu, forward, 2^26 elements, microseconds:")
    print(f"    a thread is an element   {microseconds(lambda: run('swiglu_naive')):8.1f}")
    print(f"    a thread is a vector     {microseconds(lambda: run('swiglu')):8.1f}")
    print(f"    a copy of as many bytes  {microseconds(lambda: target.copy_(source)):8.1f}")


def main():
    reason = kernels.why_not()
    device = "cpu" if reason else "cuda"
    if reason:
        print(f"the kernels do not run here ({reason}): their bytes are counted, without errors")
    else:
        print(f"compiled for {torch.cuda.get_device_name()}")
        time_swiglu()
    print(
        "\nBytes per element of the first argument, bf16, forward + backward:\n"
        "  one pass   every argument and output of the operation once\n"
        f"  PyTorch    summed over PyTorch's own operations on this device ({device})\n"
        "Error: the largest of an output or a gradient, against float64.\n\n"
        f"{'':>18}{'one pass':>14}{'PyTorch':>16}{'ratio':>7}"
        f"{'error: kernel':>18}{'PyTorch':>9}"
    )
    torch.manual_seed(0)
    sizes = dict(b=2, s=256, h=512, ffn=1408, vocab_size=4096)
    for name, (args, fused, own, with_gradient) in examples(**sizes, device=device).items():
        one_pass = measure(fused, on_meta(args), with_gradient)[0]
        several = measure(own, args, with_gradient)[0]
        found = "", ""
        if with_gradient and not reason:
            found = [f"{e:.1e}" for e in errors(args, fused, own, with_gradient)]
        counts = [
            " + ".join(f"{moved / args[0].numel():.1f}" for moved in passes)
            for passes in (one_pass, several)
        ]
        ratio = sum(several) / sum(one_pass)
        print(f"{name:>18}{counts[0]:>14}{counts[1]:>16}{ratio:>7.1f}{found[0]:>18}{found[1]:>9}")


if __name__ == "__main__":
    main()
