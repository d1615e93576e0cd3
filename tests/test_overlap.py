import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import overlap
import tensor_parallel
from gpt import DeferredBiasLinear
from proof import ranks
from recompute import saved_bytes
from sequence_parallel import GatherSequence
from tensor_parallel import CopyToRanks

B = 2
S = 8
H = 32


def layers(enter, rank: int, n: int = 3):
    """(the input of this rank, n linear layers, the same layers' plain and overlapped forms)"""
    group = dist.group.WORLD
    torch.manual_seed(rank if enter is GatherSequence else 0)
    s = S // group.size() if enter is GatherSequence else S
    x = torch.randn(B, s, H, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(rank)
    shapes = ((6, True), (3, False), (5, True))
    linears = [torch.nn.Linear(H, n, bias, dtype=torch.float64) for n, bias in shapes[:n]]
    plain = tensor_parallel.ColumnParallelLinear(group)
    plain.enter = enter(group)
    holder = torch.nn.ModuleList([plain])
    overlap.apply(holder)
    return x, linears, plain, holder[0]


def same_as_plain(rank, enter, n):
    x, linears, plain, overlapped = layers(enter, rank, n)
    assert type(overlapped) is overlap.OverlappedLinear
    inputs = [x, *(p for linear in linears for p in linear.parameters())]
    results = []
    for project in (plain, overlapped):
        outputs = project(x, *linears)
        total = 0.0
        for y in outputs:
            weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
            total = total + (y * weight).sum()
        results.append([*outputs, *torch.autograd.grad(total, inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    # frozen inputs and frozen weights get nothing
    x.requires_grad_(False)
    for p in linears[0].parameters():
        p.requires_grad_(False)
    outputs = overlapped(x, *linears)
    if n > 1:
        sum(y.sum() for y in outputs).backward()
    assert x.grad is None
    assert linears[0].weight.grad is None
    assert all(linear.weight.grad is not None for linear in linears[1:])
    return True


@pytest.mark.parametrize("enter", [CopyToRanks, GatherSequence])
@pytest.mark.parametrize("n", [1, 3])
def test_it_is_f_or_g_then_linear(enter, n):
    assert all(ranks.run(same_as_plain, 2, enter, n))


def test_the_bias_that_the_next_module_adds():
    linear = DeferredBiasLinear(2, 3)
    assert overlap.weights_and_biases((linear,)) == [linear.weight, None]


class Events(TorchDispatchMode):
    """Products, and the beginnings and ends of collectives, in the order of the host."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket is torch.ops.aten.mm:
            self.names.append("product")
        return op(*args, **kwargs or {})

    def watch(self, start, name: str):
        """`start`, whose beginning and end are events."""

        def watched(x, group):
            self.names.append(f"begin {name}")
            finish = start(x, group)

            def watched_finish():
                self.names.append(f"end {name}")
                return finish()

            return watched_finish

        return watched


def order(rank, enter):
    x, linears, _, overlapped = layers(enter, rank, 1)
    (y,) = overlapped(x, *linears)
    events = Events()
    start_input, start_input_grad = overlap.STARTS[enter]
    # backward is watched, forward was not
    y.grad_fn.starts = events.watch(start_input, "x"), events.watch(start_input_grad, "dx")
    with events:
        y.backward(torch.ones_like(y))
    return events.names


@pytest.mark.parametrize("enter", [CopyToRanks, GatherSequence])
def test_communication_runs_beside_the_products(enter):
    assert ranks.run(order, 2, enter)[0] == [
        "begin x",
        "product",
        "begin dx",
        "end x",
        "product",
        "end dx",
    ]


def keeps(rank):
    x, linears, plain, overlapped = layers(GatherSequence, rank, 1)
    parameters = list(linears[0].parameters())
    kept = [saved_bytes(lambda p=p: p(x, *linears), *parameters) for p in (plain, overlapped)]
    return *kept, x.nbytes


def test_only_the_slice_of_the_input_is_kept():
    plain, overlapped, size = ranks.run(keeps, 2)[0]
    assert plain == 2 * size and overlapped == size
