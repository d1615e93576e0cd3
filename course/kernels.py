"""The lesson of kernels.py: bytes moved in one pass, and by PyTorch's own operations.

    python -m course.kernels

It says whether the kernels run here. Where they do, it measures a time too; their errors are in
tests/test_kernels.py.

    examples(..)       the operations with arguments of a model's sizes
    measure(..)        one call, forward and backward: its bytes
"""

import math
import re

import torch
import torch.nn.functional as F
from torch import Tensor

import gpt
import kernels
import moe
import optimizer
from base import cuda_kernels
from base.cross_entropy import cross_entropy
from base.dropout import Dropout, dropout_key
from base.model_config import GPTConfig, MoEConfig
from base.rotary import rotary_frequencies, rotary_table, rotate
from course import demo, form


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
    frequencies = rotary_frequencies(config, new(1).device)
    table = rotary_table(frequencies, s, new(1))
    key = dropout_key(0, 1, torch.arange(b, device=new(1).device))
    mask = torch.full_like(new(s, s), -math.inf).triu(1)
    dropout = Dropout(0.1, site=1)
    return {
        "rotary": (
            (new(b, s, heads, d).transpose(1, 2), new(b, s, heads, d).transpose(1, 2), *table),
            kernels.rotary,
            lambda q, k, *t: (rotate(q, t), rotate(k, t)),
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
        "softmax_dropout": (
            (new(b, heads, s, s), key),
            lambda scores, k: kernels.softmax_dropout(scores, k, d**-0.5, 1, 0, 0.1),
            lambda scores, k: dropout((scores * d**-0.5 + mask).softmax(-1), k),
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
    config = demo.tiny_config(MoEConfig, num_experts=8, router="topk", router_topk=2)
    routing = moe.Routing(lambda logits, training: logits, config)
    plan = routing(torch.rand(n, 8, device=device))
    probabilities = torch.rand(n, 2, device=device)
    rows = new(len(plan.order), h)
    there = new(n, h), plan.order, plan.row_of
    back = rows, probabilities, plan.row_of, plan.order
    return {
        "permute": (there, kernels.permute, moe.permute, (0,)),
        "unpermute": (back, kernels.unpermute, moe.unpermute, (0, 1)),
    }


ADAMW = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)


def fused_adamw(weight, *others):
    """One update by the kernel; on a CPU by PyTorch's operations, as everywhere there."""
    if not kernels.supported(weight):
        return plain_adamw(weight, *others)
    low, gradient, exp_avg, exp_avg_sq, control = others
    lists = [[t] for t in (weight, low, None, gradient, exp_avg, exp_avg_sq, 0.1)]
    kernels.adamw(*lists, control, *ADAMW.values())


def plain_adamw(weight, low, gradient, exp_avg, exp_avg_sq, control):
    """The same by PyTorch's operations."""
    lr, beta1, beta2, eps = ADAMW.values()
    # They stay on the device: a CUDA graph can capture this.
    factor, step, _ = control.unbind()
    x = optimizer.join_master(weight, low)
    g = gradient * factor
    m = exp_avg.float().lerp_(g, 1 - beta1)
    v = exp_avg_sq.float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = v.sqrt().div_((1 - beta2**step).sqrt()).add_(eps)
    x.mul_(1 - lr * 0.1).sub_(m / root * (lr / (1 - beta1**step)))
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


def measure(function, args: tuple, with_gradient: tuple) -> list[int]:
    """The bytes that one call moves, [forward, backward]; without gradients [forward]."""
    inputs = list(args)
    for i in with_gradient:
        # It is no leaf, so an operation may overwrite it.
        inputs[i] = args[i].detach().clone().requires_grad_() * 1
    with Traffic() as forward:
        outputs = function(*inputs)
    if not with_gradient:
        return [forward.bytes]
    outputs = as_tuple(outputs)
    grad_outputs = [torch.randn_like(o) for o in outputs]
    with Traffic() as backward:
        torch.autograd.grad(outputs, [inputs[i] for i in with_gradient], grad_outputs)
    return [forward.bytes, backward.bytes]


def one_pass(name: str, fused, args: tuple, with_gradient: tuple) -> list[int]:
    """[forward, backward]: the bytes of every input and output of the operation, once."""
    # Arguments without data: the operation counts its bytes and computes nothing.
    on_meta = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in args)
    moved = measure(fused, on_meta, with_gradient)
    if name in ("causal_softmax", "softmax_dropout"):
        # The upper triangles of the scores and of their gradient are not read.
        half = args[0].nbytes // 2
        return [moved[0] - half, moved[1] - 2 * half]
    return moved


def microseconds(function) -> float:
    """The time of one call on a GPU, from 100 in a row."""
    function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(100):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 10


# --- the lesson -----------------------------------------------------------------------------------

WITHOUT = form.Removals()


@WITHOUT.add("fusion", "swiglu is silu, then a product. Which tensor is new?")
def no_fusion(cases: dict) -> None:
    """silu(gate): one operation writes it, the next one reads it, 5 tensors in place of 3. Backward
    has its gradient as well, 9 in place of 5. The row of swiglu is then PyTorch's own, ratio 1."""
    args, _, own, with_gradient = cases["swiglu"]
    cases["swiglu"] = args, own, own, with_gradient


SIZES = dict(b=2, s=256, h=512, ffn=1408, vocab_size=4096)


def expected() -> dict[str, list[int]]:
    """The table at the top of kernels.py: {operation: bytes per element [forward, backward]}."""
    rows = re.findall(r"^    (\w+) +(\d+)(?: \+ (\d+))?  ", kernels.__doc__, re.MULTILINE)
    return {name: [int(n) for n in numbers if n] for name, *numbers in rows}


def per_element(name: str, case: tuple) -> list[list[float]]:
    """[forward, backward] bytes of an element, in one pass and by PyTorch's own operations."""
    args, fused, own, with_gradient = case
    both = one_pass(name, fused, args, with_gradient), measure(own, args, with_gradient)
    return [[n / args[0].numel() for n in moved] for moved in both]


def written(counts: list[float]) -> str:
    return " + ".join(f"{n:.1f}" for n in counts)


def time_swiglu(lesson: form.Lesson) -> None:
    """The two kernels of base/csrc/swiglu.cu, and a copy of as many bytes, on a GPU."""
    gate, up, y = torch.randn(3, 2**26, device="cuda", dtype=torch.bfloat16)
    target, source = torch.empty(2, 3 * 2**25, device="cuda", dtype=torch.bfloat16)

    def run(name):
        cuda_kernels.launch(name, gate, gate, up, y, None, 1, y.numel(), 0)

    times = {
        "a thread is an element": microseconds(lambda: run("swiglu_naive")),
        "a thread is a vector": microseconds(lambda: run("swiglu")),
        "a copy of as many bytes": microseconds(lambda: target.copy_(source)),
    }
    lesson.say("swiglu, forward, 2^26 elements, microseconds:")
    lesson.bars({name: round(time, 1) for name, time in times.items()})


def teach_table(lesson: form.Lesson, cases: dict) -> None:
    lesson.predict(
        "PyTorch makes most of the thirteen operations of kernels.py out of several, and each reads"
        " and writes memory. For how many does it move at least ten times the bytes of one pass?",
        "operations",
    )
    lesson.say(f"{'bytes per element':<18}{'one pass':>12}{'PyTorch':>16}{'ratio':>7}")
    ratios = []
    differ = []
    for name, case in cases.items():
        passes, several = per_element(name, case)
        ratio = sum(several) / sum(passes)
        ratios.append(ratio)
        if [round(n) for n in passes] != expected()[name]:
            differ.append(name)
        bar = form.bar(ratio, 24, 32)
        lesson.say(f"{name:<18}{written(passes):>12}{written(several):>16}{ratio:>7.1f}  {bar}")
    lesson.check(
        "one pass is as in the table of kernels.py"
        + (f", except {', '.join(differ)}" if differ else ""),
        not differ,
    )
    lesson.check(
        f"ten times for {sum(ratio > 9.95 for ratio in ratios)} of {len(ratios)}; never fewer:"
        f" ratios from {min(ratios):.2f}",
        min(ratios) > 0.99,
        [sum(ratio > 9.95 for ratio in ratios)],
    )


def teach(lesson: form.Lesson) -> None:
    reason = kernels.why_not()
    if reason:
        lesson.say(f"The kernels do not run here ({reason}): bytes are counted, not times.")
    else:
        lesson.say(f"compiled for {torch.cuda.get_device_name()}")
        time_swiglu(lesson)
    torch.manual_seed(0)
    cases = examples(**SIZES, device="cpu" if reason else "cuda")
    if lesson.mutate:
        lesson.mutate(cases)

    lesson.predict(
        "A bf16 number has 2 bytes. swiglu: y = silu(gate) up. How many bytes for each element has"
        " one pass, forward? PyTorch makes two operations of it, silu and a product. Backward is"
        " three. How many bytes have these?",
        "one pass, forward; PyTorch, forward; PyTorch, backward",
    )
    passes, several = per_element("swiglu", cases["swiglu"])
    lesson.check(
        f"one pass {written(passes)}; 3 tensors of 2 bytes + 5 of 2",
        [round(n) for n in passes] == [6, 10],
        [passes[0]],
    )
    lesson.check(
        f"PyTorch {written(several)}; (2 + 3) · 2 + 3 · 3 · 2",
        [round(n) for n in several] == [10, 18],
        several,
    )
    teach_table(lesson, cases)


if __name__ == "__main__":
    form.run("kernels")
