"""Overlap: in which order a linear layer communicates and multiplies, and what it keeps. (Its
numbers: every layout of test_compositions.py with tensor parallelism.)"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from parity import LLAMA, SMALL, again, check, differs, same, train
from torch.utils._python_dispatch import TorchDispatchMode

import gpt
import pipeline_parallel
import sequence_parallel
import sharding
import tensor_parallel
from base.model_config import GPTConfig
from base.ring import Ring
from course import demo, ranks
from gpt import DeferredBiasLinear
from planning.counters import saved_bytes
from sequence_parallel import GatherSequence
from tensor_parallel import CopyToRanks

B = 2
S = 8
H = 32


def layers(enter):
    """(the input of this rank, a linear layer, its plain and its overlapped form)"""
    group = dist.group.WORLD
    s = S // group.size() if enter is GatherSequence else S
    x = torch.randn(B, s, H, dtype=torch.float64, requires_grad=True)
    linear = torch.nn.Linear(H, 6, dtype=torch.float64)
    plain = tensor_parallel.ColumnParallelInput(group)
    plain.enter = enter(group)
    holder = torch.nn.ModuleList([plain])
    sequence_parallel.overlap_backward(holder)
    assert type(holder[0]) is sequence_parallel.OverlappedInput
    return x, linear, plain, holder[0]


def test_the_bias_that_the_next_module_adds():
    linear = DeferredBiasLinear(2, 3)
    assert sequence_parallel.weights_and_biases((linear,)) == [linear.weight, None]


class Operations(TorchDispatchMode):
    """Counts additions and products."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.counts[op.overloadpacket._qualified_op_name.removeprefix("aten::")] += 1
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["attention", "mlp"])
def test_layers_that_share_an_input_on_one_device(name):
    """The gradients of three or two layers, bit for bit; without the additions of their ∂x."""
    torch.manual_seed(0)
    config = GPTConfig(num_layers=1, hidden_size=H, num_heads=4, seq_length=S, llama=True)
    found = []
    for joined in (False, True):
        part = getattr(gpt.GPT(config).blocks["0"], name).double()
        if joined:
            pipeline_parallel.split_backward(part)
            assert type(part.project) is sequence_parallel.JoinedProjection
        names = ("query", "key", "value") if name == "attention" else ("gate", "up")
        layers = [getattr(part, n) for n in names]
        x = torch.linspace(-1, 1, B * S * H, dtype=torch.float64).view(B, S, H).requires_grad_()
        outputs = part.project(x, *layers)
        loss = sum((y * y).sum() for y in outputs)
        with Operations() as seen:
            grads = torch.autograd.grad(loss, [x, *(layer.weight for layer in layers)])
        found.append((grads, seen.counts))
    (plain, before), (joined, after) = found
    assert all(torch.equal(a, b) for a, b in zip(plain[1:], joined[1:]))
    torch.testing.assert_close(plain[0], joined[0], rtol=1e-14, atol=1e-14)
    assert before["mm"] == after["mm"] + after["addmm_"] == 2 * len(layers)
    assert after["addmm_"] == before["add"] - after["add"] == len(layers) - 1


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
    x, linear, _, overlapped = layers(enter)
    (y,) = overlapped(x, linear)
    events = Events()
    start_input, start_input_grad = sequence_parallel.STARTS[enter]
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
    x, linear, plain, overlapped = layers(GatherSequence)
    parameters = list(linear.parameters())
    kept = [saved_bytes(lambda p=p: p(x, linear), *parameters) for p in (plain, overlapped)]
    return *kept, x.nbytes


def test_only_the_slice_of_the_input_is_kept():
    plain, overlapped, size = ranks.run(keeps, 2)[0]
    assert plain == 2 * size and overlapped == size


# --- shards around a ring, beside their products --------------------------------------------------

IN_SHARDS = dict(tp=2, sequence_parallel=True, tp_comm_overlap=True)
FOUR = IN_SHARDS | dict(tp=4)
DEEP = dict(num_layers=3)
ZERO_BUBBLE = dict(pp=2, schedule="zb-h1", micro_batch_size=1, layer_split=[2, 1])
LORA = dict(peft="lora", lora_rank=3, peft_targets=["key", "output", "down"], lora_dropout=0.1)
EXPERTS = dict(num_experts=4, router="topk", micro_batch_size=2)


@pytest.mark.parametrize(
    "world, base, layouts",
    [
        (2, SMALL, [IN_SHARDS]),
        again(4, LLAMA | dict(num_kv_heads=1), [FOUR, FOUR | dict(head_chunk=3)]),
        again(4, SMALL | DEEP, [IN_SHARDS | ZERO_BUBBLE, IN_SHARDS | dict(cp=2)]),
        again(4, SMALL, [IN_SHARDS | dict(zero_stage=3, recompute="full")]),
        again(4, SMALL | EXPERTS, [IN_SHARDS | dict(ep=2)]),
        again(2, SMALL | LORA, [IN_SHARDS]),
        again(2, LLAMA | dict(dropout=0.0, attention="fused"), [IN_SHARDS]),
    ],
)
def test_products_in_shards(world, base, layouts):
    check(world, layouts, base)


@pytest.mark.repetition
def test_products_in_shards_by_the_rules_of_nccl():
    same(train(4, backend="nccl-rules", **FOUR), train())


def the_other_way_round():
    """Shards go to the rank before, and are taken for those of the ring."""
    original = Ring.__init__

    def turned(self, *arguments, **options):
        original(self, *arguments, **options)
        self.next, self.before = self.before, self.next

    Ring.__init__ = turned


def test_a_ring_in_the_wrong_direction_is_seen():
    """Two ranks would not see it: each is before and after the other."""
    differs(train(4, steps=1, mutate=the_other_way_round, **FOUR), train(steps=1))


def messages(rank):
    config = GPTConfig(num_layers=1, hidden_size=H, num_heads=4, seq_length=S, vocab_size=61)
    model, group = demo.meta_model(config), dist.group.WORLD
    tensor_parallel.apply(model, group)
    sequence_parallel.apply(model, group)
    sequence_parallel.overlap_backward(model, in_shards=True)
    sharding.init(model, 0, "cpu", torch.float32)
    x = torch.randn(B, S // group.size(), H, requires_grad=True)
    with ranks.Collectives() as forward:
        y = model.blocks["0"](x)
    with ranks.Collectives() as backward:
        y.sum().backward()
    return Counter(forward.calls), Counter(backward.calls)


def test_messages_of_shards():
    """t - 1 shards of b s h / t go round for each of the four products in forward, and for the
    gradients of two outputs in backward. The rest of backward is as without a ring."""
    t, whole = 4, B * S * H * 4
    sent, received = ("send", whole // t), ("receive", whole // t)
    of_inputs = {("all-gather", whole): 2, ("reduce-scatter", whole): 2}
    norms = {("all-reduce", 6 * H * 4): 1}
    forward, backward = ranks.run(messages, t)[0]
    assert forward == {sent: 4 * (t - 1), received: 4 * (t - 1)}
    assert backward == {sent: 2 * (t - 1), received: 2 * (t - 1)} | of_inputs | norms
