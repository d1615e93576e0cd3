"""base/compiling.py: what compiled code calls as it is, in a process that began without the
compiler; and every function with a gradient of its own, compiled beside uncompiled."""

import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import context_parallel
import fp8
import moe
import recompute
import sequence_parallel
import tensor_parallel
from base import cpu
from base.causal_blocks import causal_attention
from base.cross_entropy import cross_entropy
from base.grouped_linear import grouped_linear
from base.model_config import GPTConfig
from base.ring import multiply_and_scatter
from context_parallel import RingAttention
from course import ranks
from finetune import preference
from gpt import PLAIN

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys
from functools import partial
import torch
from base import compiling

traced = []

@compiling.left_out
def outside(x):
    traced.append(torch.compiler.is_compiling())
    return x + 1

@compiling.left_out
def forgotten(x):
    traced.append(torch.compiler.is_compiling())
    return x + 1

class Block(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        y = self.function(x)
        return 2 * y if torch.compiler.is_compiling() else y

assert "torch._dynamo" not in sys.modules
# no C++: this is about who is traced
torch.compile = partial(torch.compile, backend="eager")
compiling._LEFT_OUT.remove(forgotten)
blocks = [Block(outside), Block(forgotten)]
for block in blocks:
    assert block(torch.zeros(1)) == 1
compiling.apply(blocks)
for block in blocks:
    assert block(torch.zeros(1)) == 2, "the block is not compiled"
assert traced == [False, False, False, True], traced
"""


def test_what_is_left_out_is_not_traced():
    """And what is not left out, is."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- every function with a gradient of its own ----------------------------------------------------


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def without_messages() -> dict:
    """{(file, function): (what uses it, leaves)}"""
    x, w = leaf(2, 8, 16), leaf(16, 16)
    q, k = leaf(2, 4, 8, 16), leaf(2, 2, 8, 16)
    rows, experts = leaf(6, 16), leaf(2, 8, 16)
    targets = torch.randint(16, (2, 8))
    counts = torch.tensor([2, 4])
    order, position = torch.randperm(6), torch.empty(1, 6, dtype=torch.int64)
    position[0, order] = torch.arange(6)
    permutation = moe.permute_rows, moe.unpermute_rows, order, position
    scaling = fp8.make(("current", True, 16), GPTConfig(2, 16, 2), "cpu", True)
    of_linear = fp8.Layer(scaling, ((0, 0),))
    of_experts = fp8.ExpertLayer(scaling, ((0, 4),), None, None)
    weight = torch.nn.Parameter(w.detach().clone())
    return {
        ("base.causal_blocks", "_CausalAttention"): (causal_attention, (q, k, leaf(*k.shape))),
        ("base.cpu", "_GELU"): (cpu.gelu, (x,)),
        ("base.cross_entropy", "_CrossEntropy"): (lambda z: cross_entropy(z * 1, targets), (x,)),
        ("base.grouped_linear", "_GroupedLinear"): (
            lambda x, w: grouped_linear(x, counts, w)[0],
            (rows, experts),
        ),
        ("recompute", "_ChunkedLoss"): (
            lambda x, w: recompute.chunked_loss(x, w, targets, 3, 16),
            (x, w),
        ),
        ("fp8", "_Linear"): (lambda x: fp8.linear(of_linear, x, weight, None)[0], (x,)),
        ("moe", "_AddLoss"): (lambda x, y: moe._AddLoss.apply(x, y.sum()), (x, w)),
        ("moe", "_Permute"): (lambda x: moe._Permute.apply(x, *permutation), (rows,)),
        ("sequence_parallel", "_Linear"): (
            lambda x, w: sequence_parallel.linear(x, w, w, None, None)[1],
            (x, w),
        ),
        ("fp8", "_GroupedLinear"): (
            lambda x, w: fp8._GroupedLinear.apply(x, counts, of_experts, w)[0],
            (rows, experts),
        ),
        ("recompute", "_Checkpoint"): (lambda x: recompute.checkpoint(torch.sin, x), (x,)),
    }


def with_messages(group) -> dict:
    x, w, rows = leaf(2, 8, 16), leaf(16, 16), leaf(6, 16)
    q, k = leaf(2, 4, 8, 16), leaf(2, 2, 8, 16)
    targets = torch.randint(16, (2, 8))
    ring = RingAttention(group)
    return {
        ("context_parallel", "_RingAttention"): (
            lambda q, k, v: ring(q, k, v, PLAIN),
            (q, k, leaf(*k.shape)),
        ),
        ("context_parallel", "_AllToAll"): (
            lambda x: context_parallel._AllToAll.apply(x, group, 1, 2),
            (q,),
        ),
        ("moe", "_AllToAll"): (
            lambda x: moe._AllToAll.apply(x, [3, 3], [3, 3], group, None),
            (rows,),
        ),
        ("finetune.preference", "_GatherValues"): (
            lambda x: preference.gather_values(x[..., 0], group),
            (x,),
        ),
        ("sequence_parallel", "_CopyWeights"): (
            lambda x, w: x @ sequence_parallel.copy_weights([w], group)[0],
            (x, w),
        ),
        ("sequence_parallel", "_Pair"): (
            lambda x: sequence_parallel.gather_sequence(x, group),
            (x,),
        ),
        ("base.ring", "_MultiplyAndScatter"): (
            lambda x, w: multiply_and_scatter(x, w, group, sequence_parallel.weight_gradient),
            (x, w),
        ),
        ("tensor_parallel", "_GatherHeads"): (
            lambda x: tensor_parallel.GatherHeads(2, group)([x, x, x * 2])[1],
            (x,),
        ),
        ("tensor_parallel", "_Copy"): (lambda x: tensor_parallel.copy_to_ranks(x, group), (x,)),
        ("tensor_parallel", "_Reduce"): (
            lambda x: tensor_parallel.reduce_from_ranks(x * 1, group),
            (x,),
        ),
        ("tensor_parallel", "_VocabParallelCrossEntropy"): (
            lambda z: tensor_parallel.vocab_parallel_cross_entropy(z * 1, targets, 32, group),
            (x,),
        ),
    }


# of CUDA: test_compiled of test_kernels.py, by the emulator
BY_THE_EMULATOR = {("kernels", "_Norm"), ("kernels", "_CrossEntropy")}


def results(function, leaves) -> list[Tensor]:
    """What a function of leaves gives, and their gradients. The result is used further: what is in
    front of compiled code is also behind it."""
    y = function(*leaves).double().sin()
    return [y, *torch.autograd.grad((y * torch.linspace(1, 2, y.shape[-1])).sum(), leaves)]


def compiled_beside_plain(rank) -> tuple[set, dict]:
    """(our functions with gradients of their own, largest differences by case). What sends no
    message is compiled by rank 0 alone."""
    torch.manual_seed(0)
    found = {}
    cases = with_messages(dist.group.WORLD)
    if rank == 0:
        cases |= without_messages()
    for name, (function, leaves) in cases.items():
        torch._dynamo.reset()
        plain = results(function, leaves)
        compiled = results(torch.compile(function, backend="aot_eager"), leaves)
        assert all(grad.any() for grad in plain[1:]), name
        found[name] = max((a - b).abs().max().item() for a, b in zip(plain, compiled))
    ours = {
        (c.__module__, c.__name__)
        for c in torch.autograd.Function.__subclasses__()
        if (ROOT / f"{c.__module__.replace('.', '/')}.py").exists()
    }
    return ours, found


def test_compiled_functions_have_their_gradients():
    """Before torch 2.13 one whose forward returned what an operation in place gives had none, in
    silence."""
    (ours, found), _ = ranks.run(compiled_beside_plain, 2)
    assert ours - BY_THE_EMULATOR == found.keys()
    assert max(found.values()) < 1e-12, found
