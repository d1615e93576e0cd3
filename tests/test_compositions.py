"""Every layout gives the loss, the gradients and the parameters of one device."""

import shutil
import sys
from functools import partial

import pytest
import random_layouts
import torch
import torch.distributed as dist
from parity import LLAMA, SMALL, differs, put_together, same, train, train_each

import dropout
import fsdp
import moe
import optimizer
import pipeline_parallel
import routers
import sequence_parallel
import sharding
import tensor_parallel
import train as trainer
from sharding import Shard, shard_of, sharding_of


def again(*values, **options):
    """A case that covers no more than another one does: `make test-all` runs it."""
    return pytest.param(*values, marks=pytest.mark.repetition, **options)


@pytest.mark.parametrize(
    "world, micro, base",
    [
        (1, 1, SMALL),
        (1, 4, LLAMA),
        (2, None, LLAMA),
        (2, 1, SMALL),
        (4, 1, LLAMA),
        again(1, 1, LLAMA),
        again(1, 4, SMALL),
        again(2, None, SMALL),
        again(2, 1, LLAMA),
        again(2, 2, SMALL),
        again(2, 2, LLAMA),
        again(4, None, SMALL),
        again(4, None, LLAMA),
        again(4, 1, SMALL),
    ],
)
def test_data_parallel(world, micro, base):
    same(train(world, base=base, micro_batch_size=micro), train(base=base))


SHARDED = [
    dict(),
    dict(micro_batch_size=1),
    dict(micro_batch_size=1, recompute="full"),
    dict(micro_batch_size=2, recompute="selective"),
]


@pytest.mark.parametrize(
    "world, base",
    [(2, SMALL), (3, SMALL), (4, LLAMA), again(2, LLAMA)],
    ids=["2 gpt", "3 gpt", "4 llama", "2 llama"],
)
def test_zero_stages(world, base):
    """Stages 1 to 3; 3 and 4 divide hardly a size in the model. Accumulation, and recomputation,
    which gathers again what it needs again."""
    of_world = SHARDED if world == 2 else SHARDED[1:2]
    variants = [dict(flags, zero_stage=stage) for stage in (1, 2, 3) for flags in of_world]
    sizes = dict(vocab_size=61, global_batch_size=12)
    for result in train_each(world, variants, base=base, **sizes):
        same(result, train(base=base, **sizes))


OVER = [
    (4, dict(tp=2, micro_batch_size=1)),
    (4, dict(tp=2, sequence_parallel=True, recompute="selective")),
    (4, dict(tp=2, sequence_parallel=True, recompute="full")),
    (4, dict(pp=2, num_layers=4, virtual_stages=2)),
    (4, dict(pp=2, schedule="zb-h1")),
    (4, dict(pp=2, schedule="gpipe", recompute="full")),
    (4, dict(pp=2, virtual_stages=2, layer_split=[0, 0, 1, 1])),
    (8, dict(pp=2, tp=2, sequence_parallel=True, recompute="selective")),
    (6, dict(pp=2, layer_split=[2, 0], global_batch_size=12)),
]


@pytest.mark.parametrize(
    "base, world, flags, stages",
    [
        (SMALL, *OVER[0], (2,)),
        (LLAMA, *OVER[1], (1, 3)),
        *[(SMALL, *over, (3,)) for over in OVER[2:]],
        again(SMALL, *OVER[0], (1, 3)),
        again(LLAMA, *OVER[1], (2,)),
        *[again(SMALL, *over, (1, 2)) for over in OVER[2:]],
    ],
    ids=str,
)
def test_zero_stages_over_other_techniques(base, world, flags, stages):
    model = {k: v for k, v in flags.items() if k in ("num_layers", "global_batch_size")}
    for result in train_each(
        world, [dict(zero_stage=stage) for stage in stages], base=base | flags
    ):
        same(result, train(base=base | model))


def test_zero_stages_float32():
    """Also with gradients that are sums of 16-bit numbers on their way: as near as 8 bits of
    mantissa are."""
    one = train(precision="fp32", steps=1)
    variants = [dict(zero_stage=stage, micro_batch_size=2) for stage in (0, 1, 2, 3)]
    for result in train_each(2, variants, precision="fp32", steps=1):
        same(result, one, 1e-5)
    for result in train_each(2, variants, precision="fp32", steps=1, reduce_dtype="bf16"):
        differs(result, one, 1e-4)
        same(result, one, 2e-2)


# A vocabulary that no t divides, heads that 4 divides, grouped-query attention. For GPT the
# embeddings are tied.
TENSOR = {
    "gpt": SMALL | dict(vocab_size=257),
    "llama": LLAMA | dict(vocab_size=257, num_heads=8, num_kv_heads=4),
}


WITH_RECOMPUTATION = [
    dict(sequence_parallel=sequence, recompute=recompute)
    for sequence in (False, True)
    for recompute in ("none", "selective", "full")
]


@pytest.mark.parametrize(
    "base, tp, dp, variants",
    [
        ("gpt", 2, 1, WITH_RECOMPUTATION),
        # without anything else, and with all of it
        ("gpt", 4, 1, WITH_RECOMPUTATION[::5]),
        ("llama", 2, 2, WITH_RECOMPUTATION[::5]),
        again("gpt", 2, 2, WITH_RECOMPUTATION),
        again("gpt", 4, 1, WITH_RECOMPUTATION[1:5]),
        again("llama", 2, 2, WITH_RECOMPUTATION[1:5]),
    ],
    ids=str,
)
def test_tensor_parallel(base, tp, dp, variants):
    """With and without sequence parallelism, times every way to recompute."""
    for result in train_each(tp * dp, variants, base=TENSOR[base], tp=tp, micro_batch_size=4 // dp):
        same(result, train(base=TENSOR[base]))


@pytest.mark.parametrize(
    "flags",
    [
        dict(recompute="full", recompute_layers=1),
        dict(recompute="selective"),
        dict(dropout=0.0, recompute="selective"),
        dict(dropout=0.0, recompute="full"),
    ],
    ids=str,
)
def test_recompute(flags):
    """Partly, on one device, and with fused attention (no dropout)."""
    reference = {k: v for k, v in flags.items() if k == "dropout"}
    same(train(micro_batch_size=4, **flags), train(**reference))
    same(
        train(2, tp=2, sequence_parallel=True, base=TENSOR["llama"], **flags),
        train(base=TENSOR["llama"], **reference),
    )


@pytest.mark.parametrize(
    "flags",
    [dict(tp=2), dict(tp=2, sequence_parallel=True, recompute="full")],
    ids=["tensor", "sequence"],
)
def test_tensor_parallel_float32(flags):
    same(train(2, precision="fp32", steps=1, **flags), train(precision="fp32", steps=1), 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "world, flags",
    [
        (1, dict()),
        (1, dict(recompute="full")),
        (2, dict(tp=2)),
        (2, dict(tp=2, sequence_parallel=True, recompute="selective")),
        (2, dict(zero_stage=1)),
        (2, dict(zero_stage=2, micro_batch_size=1)),
        (2, dict(zero_stage=3, recompute="full")),
    ],
    ids=str,
)
def test_on_a_gpu(world, flags):
    """The CPU's loss and gradients; ranks share the GPU."""
    same(train(world, device="cuda", **flags), train())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "world, flags",
    [
        (1, dict()),
        (1, dict(recompute="full")),
        (2, dict(ep=2)),
        (2, dict(tp=2, sequence_parallel=True)),
    ],
    ids=str,
)
def test_experts_on_a_gpu(world, flags):
    for base in EXPERTS.values():
        same(train(world, base=base, device="cuda", **flags), train(base=base))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_experts_on_a_gpu_in_bfloat16():
    """The library's grouped matrix multiplication. All experts are chosen, for in 16 bits others
    would be."""
    base = LLAMA | dict(num_experts=2, router="topk", router_topk=2, precision="bf16", dropout=0.0)
    one = train(base=base, steps=1)
    gpu = train(base=base, steps=1, device="cuda")
    for name, gradient in one.gradients.items():
        assert (gpu.gradients[name] - gradient).abs().max() < 0.05 * gradient.abs().max(), name


needs_compiler = pytest.mark.skipif(
    not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU"
)


def without_cpp():
    """torch.compile traces and differentiates, but generates no C++ from the graphs: compiling that
    takes a minute."""
    torch.compile = partial(torch.compile, backend="aot_eager")


@needs_compiler
@pytest.mark.parametrize(
    "world, flags, mutate",
    [
        # (test_gpt.py generates C++ for dropout)
        (1, dict(recompute="full"), without_cpp),
        again(2, dict(tp=2, sequence_parallel=True, recompute="full"), without_cpp),
        again(1, dict(), None),
        again(1, dict(dropout=0.0), None),
        again(2, dict(tp=2, sequence_parallel=True, recompute="full"), None),
    ],
)
def test_compiled(world, flags, mutate):
    one = dict(num_layers=1, steps=1, dropout=flags.get("dropout", 0.1))
    same(train(world, **one | flags, compile=True, mutate=mutate), train(**one))


def test_float32():
    same(
        train(2, micro_batch_size=2, precision="fp32", steps=1),
        train(precision="fp32", steps=1),
        1e-5,
    )


def test_what_replicas_disagree_on_is_infinite():
    """Also where a third rank agrees with the first; and what no rank has."""
    a, b = torch.ones(2, 3), torch.zeros(2, 3)
    ranks = [[("w", (5, 3), [0, 0], a)], [("w", (5, 3), [0, 0], b)], [("w", (5, 3), [0, 0], a)]]
    assert put_together(ranks)["w"].isinf().all()
    ranks[1] = [("w", (5, 3), [2, 0], b)]
    expected = torch.cat((a, b, torch.full((1, 3), torch.inf)))
    assert torch.equal(put_together(ranks)["w"], expected)


# Each of these removes one thing that parity needs. If a test below fails, the gate has gone blind
# to it.


def no_sum():
    def nothing(self, everything=False):
        pass

    fsdp.DataParallel.reduce_gradients = fsdp.DataParallel.reduce_in_order = nothing


def no_accumulation():
    """Only the last micro-batch's gradient remains."""
    original = fsdp.DataParallel.accumulate

    def accumulate(self, p):
        p.main_grad.zero_()
        original(self, p)

    fsdp.DataParallel.accumulate = accumulate


def early_reduction():
    """Buckets leave after the first micro-batch."""
    original = fsdp.DataParallel.zero

    def zero(self):
        original(self)
        self.is_last_backward = True

    fsdp.DataParallel.zero = zero


def local_mean():
    """An average of averages: each rank divides by its own tokens."""

    def forward_backward(self, step, dataset, original=trainer.Trainer.forward_backward):
        samples = self.samples(step)
        share = len(samples) // self.dp
        mine = dataset.counted_tokens(samples[self.dp_rank * share : (self.dp_rank + 1) * share])
        dataset.counted_tokens = lambda s: mine * self.dp
        loss = original(self, step, dataset)
        del dataset.counted_tokens
        return loss

    trainer.Trainer.forward_backward = forward_backward


def local_dropout():
    """Masks by the row in this rank's batch, not by the global sample."""
    trainer.dropout_key = lambda seed, step, samples: dropout.dropout_key(
        seed, step, torch.arange(len(samples))
    )


def wrong_samples():
    """Every rank trains on the first share."""
    trainer.Trainer.dp_rank = property(lambda self: 0, lambda self, value: None)


def weights_by_rank():
    original = sharding.generator
    sharding.generator = lambda seed, name: original(seed + dist.get_rank(), name)


def local_clip():
    """Each rank clips by the norm of its own gradient before the sum."""
    original = fsdp.DataParallel.reduce_gradients

    def reduce_gradients(self):
        norm = optimizer.global_norm(self.parameters).item()
        for p in self.parameters:
            p.main_grad.mul_(min(1.0, 0.5 / norm))
        original(self)

    fsdp.DataParallel.reduce_gradients = reduce_gradients
    fsdp.DataParallel.last_backward = lambda self: None


@pytest.mark.parametrize(
    "mutate",
    [
        no_sum,
        no_accumulation,
        early_reduction,
        local_mean,
        local_dropout,
        wrong_samples,
        weights_by_rank,
        local_clip,
    ],
)
def test_gate_sees(mutate):
    differs(train(2, micro_batch_size=2, mutate=mutate), train())


class Lost:
    """A collective that never was."""

    def wait(self):
        pass


def no_reduce_scatter():
    """Each rank keeps its part of its own gradient."""
    fsdp.reduce_scatter = lambda mine, x, **options: Lost()


def wrong_part():
    """Each rank gets another's part of the sum."""

    def reduce_scatter(mine, x, original=fsdp.reduce_scatter, **options):
        return original(mine, x.view(2, -1).flip(0).reshape(-1), **options)

    fsdp.reduce_scatter = reduce_scatter


def no_gather_after_the_step():
    """Each rank has updated its own part alone."""
    fsdp.DataParallel.gather_parameters = lambda self: None


def old_parameters():
    """What was gathered once is never let go."""
    fsdp.FullySharded.free = lambda self, unit: None


def own_part_alone():
    """Stage 3 finds zeros for what the other rank has."""

    def all_gather(whole, mine, group, async_op):
        whole.view(2, -1)[1 - group.rank()] = 0
        whole.view(2, -1)[group.rank()] = mine
        return Lost()

    fsdp.all_gather = all_gather


def last_micro_batch_alone():
    """Stages 2 and 3 forget the sum of the micro-batches before."""
    original = fsdp.DataParallel.finish_reductions

    def finish_reductions(self):
        for unit in self.reductions:
            unit.summed_grads = None
        original(self)

    fsdp.DataParallel.finish_reductions = finish_reductions


def norm_of_one_shard():
    optimizer.dist.all_reduce = lambda x, group=None, original=dist.all_reduce: (
        None if x.dim() == 0 else original(x, group=group)
    )


@pytest.mark.parametrize(
    "stages, mutate",
    [
        ((1, 2, 3), no_reduce_scatter),
        ((1, 2, 3), wrong_part),
        ((1, 2), no_gather_after_the_step),
        ((3,), old_parameters),
        ((3,), own_part_alone),
        ((2, 3), last_micro_batch_alone),
        ((1, 2, 3), norm_of_one_shard),
    ],
)
def test_gate_sees_sharding(stages, mutate):
    for stage in stages:
        differs(train(2, micro_batch_size=2, zero_stage=stage, mutate=mutate), train())


def same_mask_every_step():
    trainer.dropout_key = lambda seed, step, samples: dropout.dropout_key(seed, 1, samples)


def test_gate_sees_the_step_in_the_mask():
    differs(train(2, mutate=same_mask_every_step), train())


# What tensor and sequence parallelism need.


def no_f():
    """The input gradient of column-parallel layers is each rank's part."""
    tensor_parallel.ColumnParallelLinear.start_input_grad = staticmethod(
        tensor_parallel.start_nothing
    )


def no_g():
    """The output of row-parallel layers, and of the embedding, is each rank's part."""
    tensor_parallel.reduce_from_ranks = lambda x, group: x


def clones():
    """Every rank starts from rank 0's weights."""

    class First:
        def __init__(self, group):
            self.size = group.size

        def rank(self):
            return 0

    def shard_of_rank_0(whole, record, original=shard_of):
        return original(
            whole,
            sharding.Sharding(
                record.shape, tuple(Shard(c.dim, First(c.group)) for c in record.placements)
            ),
        )

    sharding.shard_of = shard_of_rank_0


def without_all_reduce(op):
    """Cross entropy without one of its two reductions."""
    forward = tensor_parallel._VocabParallelCrossEntropy.forward
    all_reduce = dist.all_reduce

    def silent(ctx, *args):
        dist.all_reduce = lambda x, o=dist.ReduceOp.SUM, **options: (
            None if o == op else all_reduce(x, o, **options)
        )
        result = forward(ctx, *args)
        dist.all_reduce = all_reduce
        return result

    tensor_parallel._VocabParallelCrossEntropy.forward = staticmethod(silent)


def no_vocabulary_maximum():
    without_all_reduce(dist.ReduceOp.MAX)


def no_vocabulary_sums():
    without_all_reduce(dist.ReduceOp.SUM)


def dropout_without(dims):
    """Masks of tensors with so many dimensions begin at coordinate 0 on every rank."""
    original = dropout.Dropout.forward

    def forward(self, x, key):
        shard_index = self.shard_index
        if x.dim() == dims:
            self.shard_index = {}
        y = original(self, x, key)
        self.shard_index = shard_index
        return y

    dropout.Dropout.forward = forward


def dropout_without_heads():
    dropout_without(4)


def dropout_without_sequence():
    dropout_without(3)


@pytest.mark.parametrize(
    "mutate", [no_f, no_g, clones, no_vocabulary_maximum, no_vocabulary_sums, dropout_without_heads]
)
def test_gate_sees_tensor(mutate):
    differs(train(2, tp=2, mutate=mutate), train())


def mine(x, group):
    return x.chunk(group.size(), 1)[group.rank()].contiguous()


def no_sum_in_g():
    """The input gradient of column-parallel layers is a slice of each rank's part."""
    sequence_parallel.ColumnParallelLinear.start_input_grad = staticmethod(
        lambda x, group: lambda: mine(x, group)
    )


def no_gather_in_g():
    """Every rank takes its own slice for the others' too."""
    sequence_parallel.ColumnParallelLinear.start_input = staticmethod(
        lambda x, group: lambda: x.repeat(1, group.size(), 1)
    )


def old_input():
    """Backward's second gather gives something else than forward's."""
    seen = {}

    def start_input(x, group, original=sequence_parallel.start_gather):
        finish = original(x, group)
        again = seen.pop(x.data_ptr(), False)
        if not again:
            seen[x.data_ptr()] = True
        return (lambda: 2 * finish()) if again else finish

    sequence_parallel.ColumnParallelLinear.start_input = staticmethod(start_input)


def no_sum_in_g_bar():
    sequence_parallel.scatter_sequence = mine


def no_gather_in_g_bar():
    """The gradient of a row-parallel layer's output is zero outside of this rank's slice."""

    def back(grad, group):
        parts = [torch.zeros_like(grad) for _ in range(group.size())]
        parts[group.rank()] = grad
        return lambda: torch.cat(parts, 1)

    sequence_parallel.scatter_sequence = lambda x, group: sequence_parallel._Pair.apply(
        x, group, sequence_parallel.start_scatter, back
    )


def no_norm_gradients():
    sequence_parallel._CopyWeights.backward = staticmethod(lambda ctx, *grads: (None, *grads))


def positions_from_0():
    original = sequence_parallel.ShardedPositions.__init__
    sequence_parallel.ShardedPositions.__init__ = lambda self, positions, n, t: original(
        self, positions, 0, t
    )


@pytest.mark.parametrize(
    "mutate",
    [
        no_sum_in_g,
        no_gather_in_g,
        old_input,
        no_sum_in_g_bar,
        no_gather_in_g_bar,
        no_norm_gradients,
        positions_from_0,
        dropout_without_sequence,
        dropout_without_heads,
    ],
)
def test_gate_sees_sequence(mutate):
    differs(train(2, tp=2, sequence_parallel=True, mutate=mutate), train())


def masks_of_the_moment():
    """A mask from a generator, which recomputation draws anew."""
    dropout.dropout_mask = lambda key, site, shape, start, p: torch.rand(shape) < p


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gate_sees_other_masks_in_recomputation(recompute):
    torch.manual_seed(0)
    differs(
        train(recompute=recompute, mutate=masks_of_the_moment), train(mutate=masks_of_the_moment)
    )


def every_rank_counts():
    """Tensor-parallel ranks all add their loss."""
    original = trainer.Trainer.forward_backward

    def forward_backward(self, *args):
        group = self.groups.tp
        self.groups.tp = None
        loss = original(self, *args)
        self.groups.tp = group
        return loss

    trainer.Trainer.forward_backward = forward_backward


def test_gate_sees_every_rank_counting():
    differs(train(2, tp=2, mutate=every_rank_counts), train())


# --- pipelines ------------------------------------------------------------------------------------

PIPELINE = {
    "gpt": SMALL | dict(num_layers=6, vocab_size=257),
    "llama": LLAMA | dict(num_layers=6, vocab_size=257),
}
TWO = [
    dict(schedule="gpipe"),
    dict(schedule="1f1b"),
    dict(schedule="zb-h1"),
    dict(virtual_stages=3),
    dict(layer_split=[2, 4], micro_batch_size=2),
    dict(layer_split=[6, 0], schedule="zb-h1"),
    dict(layer_split=[2, 0, 3, 1], virtual_stages=2),
]
FOUR = [
    dict(schedule="gpipe"),
    dict(schedule="1f1b"),
    dict(schedule="zb-h1"),
    dict(virtual_stages=3),
    dict(layer_split=[2, 4, 4, 2], schedule="zb-h1"),
    dict(layer_split=[1, 2, 2, 2, 2, 2, 1, 0], virtual_stages=2),
]
# tp 2 x pp 2 x dp 2
EIGHT = [dict(schedule="1f1b"), dict(schedule="zb-h1"), dict(virtual_stages=2)]


SHARDED_TOO = dict(pp=2, tp=2, num_layers=4, sequence_parallel=True, recompute="selective")


@pytest.mark.parametrize(
    "base, world, variants, flags",
    [
        ("gpt", 2, TWO, dict(pp=2)),
        ("gpt", 2, [dict(virtual_stages=2)], dict(pp=2, num_layers=4)),
        ("llama", 2, TWO[3:4], dict(pp=2)),
        # three chunks a rank
        ("gpt", 4, FOUR[3:5], dict(pp=4, num_layers=12)),
        ("gpt", 8, EIGHT[1:2], SHARDED_TOO),
        again("llama", 2, TWO[1:3], dict(pp=2)),
        again("llama", 2, [dict(virtual_stages=2)], dict(pp=2, num_layers=4)),
        again("gpt", 4, FOUR[:3] + FOUR[5:], dict(pp=4, num_layers=12)),
        again("gpt", 8, EIGHT, SHARDED_TOO),
    ],
    ids=str,
)
def test_pipeline(base, world, variants, flags):
    """Every schedule, even and uneven splits, tied embeddings (GPT)."""
    model = {k: v for k, v in flags.items() if k == "num_layers"}
    for result in train_each(world, variants, base=PIPELINE[base], **flags):
        same(result, train(base=PIPELINE[base] | model))


def wrong_loss_scale():
    """As if each micro-batch were divided by its own number of micro-batches once more."""

    original = pipeline_parallel.Pipeline.run

    def run(self, schedule, forward, b, s, loss_grad, *args):
        return original(self, schedule, forward, b, s, loss_grad / 8, *args)

    pipeline_parallel.Pipeline.run = run


def wrong_micro_batch():
    """The last stage takes the targets of the next micro-batch."""

    original = pipeline_parallel.Pipeline.run

    def run(self, schedule, forward, *args):
        def shifted(chunk, k, x):
            if self.stages[chunk].head is not None:
                k = (k + 1) % 8
            return forward(chunk, k, x)

        return original(self, schedule, shifted, *args)

    pipeline_parallel.Pipeline.run = run


def norm_of_one_stage():
    original = optimizer.global_norm
    optimizer.global_norm = lambda parameters, stages=None: original(parameters)


def norm_counts_both_copies():
    sharding.Sharding.__getattribute__ = lambda self, name: (
        None
        if name == "copy_of" and sys._getframe(1).f_code.co_name == "global_norm"
        else object.__getattribute__(self, name)
    )


def forgotten_weights():
    """The weight gradients that ZB-H1 defers to the end of the step are never computed."""
    original = pipeline_parallel.lower
    pipeline_parallel.lower = lambda *args: [
        [x for x in program if x[0] != "W" or x.micro_batch < 7] for program in original(*args)
    ]


@pytest.mark.parametrize(
    "mutate",
    [
        wrong_loss_scale,
        wrong_micro_batch,
        norm_of_one_stage,
        norm_counts_both_copies,
        forgotten_weights,
    ],
)
def test_gate_sees_pipeline(mutate):
    differs(train(2, pp=2, schedule="zb-h1", mutate=mutate), train())


def no_tied_sum():
    pipeline_parallel.Pipeline.sum_tied = lambda self: None


def half_a_tied_sum():
    """Both copies agree, on the first stage's part."""

    def sum_tied(self):
        for p in self.parameters():
            if sharding_of(p).copy_of or (
                self.rank == 0 and p is self.stages[0].embedding.tokens.weight
            ):
                dist.broadcast(p.main_grad, 0)

    pipeline_parallel.Pipeline.sum_tied = sum_tied


@pytest.mark.parametrize("mutate", [no_tied_sum, half_a_tied_sum])
def test_gate_sees_tied_embeddings(mutate):
    differs(train(2, pp=2, mutate=mutate), train())


# --- experts --------------------------------------------------------------------------------------

# Routing depends on the micro-batch, so one device has the same ones. Four experts in every layer,
# or in every other of four with tokens dropped.
EXPERTS = {
    "sinkhorn": SMALL | dict(num_experts=4, micro_batch_size=2),
    "topk": (
        LLAMA
        | dict(
            num_experts=4,
            micro_batch_size=2,
            router="topk",
            router_topk=2,
            aux_loss=0.1,
            z_loss=0.1,
            num_layers=4,
            expert_every=2,
            capacity_factor=1.2,
        )
    ),
}


@pytest.mark.parametrize(
    "base, world, variants",
    [
        ("sinkhorn", 1, [dict(recompute="full"), dict(recompute="selective")]),
        ("sinkhorn", 2, [dict(), dict(ep=2), dict(tp=2), dict(pp=2)]),
        ("topk", 2, [dict(ep=2), dict(tp=2, sequence_parallel=True)]),
        (
            "sinkhorn",
            4,
            [
                dict(ep=4),
                dict(ep=2, recompute="full"),
                dict(tp=2, sequence_parallel=True, ep=2),
                dict(pp=2, ep=2, schedule="zb-h1"),
                dict(ep=2, zero_stage=2),
                dict(ep=4, zero_stage=3, recompute="full"),
            ],
        ),
        (
            "sinkhorn",
            8,
            [dict(pp=2, tp=2, sequence_parallel=True, ep=2, zero_stage=3, recompute="full")],
        ),
        again("sinkhorn", 2, [dict(tp=2, sequence_parallel=True)]),
        again("topk", 2, [dict(), dict(tp=2), dict(pp=2)]),
        again(
            "sinkhorn",
            4,
            [
                dict(ep=2),
                dict(tp=2, ep=2),
                dict(tp=2, sequence_parallel=True, ep=2, recompute="full"),
                dict(pp=2, ep=2),
                dict(pp=2, ep=2, schedule="gpipe", recompute="full"),
                dict(ep=2, zero_stage=1),
                dict(ep=2, zero_stage=3),
                dict(ep=4, zero_stage=1),
            ],
        ),
        again(
            "topk",
            4,
            [
                dict(ep=4),
                dict(ep=2),
                dict(ep=2, recompute="full"),
                dict(tp=2, ep=2),
                dict(tp=2, sequence_parallel=True, ep=2),
                dict(tp=2, sequence_parallel=True, ep=2, recompute="full"),
                dict(pp=2, ep=2),
                dict(pp=2, ep=2, schedule="zb-h1"),
                dict(pp=2, ep=2, schedule="gpipe", recompute="full"),
            ],
        ),
    ],
    ids=str,
)
def test_experts(base, world, variants):
    for result in train_each(world, variants, base=EXPERTS[base]):
        same(result, train(base=EXPERTS[base]))


def test_experts_interleaved():
    base = EXPERTS["topk"]
    same(train(4, base=base, pp=2, virtual_stages=2, ep=2), train(base=base))


def test_experts_float32():
    base = EXPERTS["topk"] | dict(precision="fp32")
    for result in train_each(
        4,
        [dict(ep=2), dict(ep=4, zero_stage=3), dict(tp=2, sequence_parallel=True, ep=2)],
        base=base,
        steps=1,
    ):
        same(result, train(base=base, steps=1), 1e-5)


@needs_compiler
@pytest.mark.parametrize("mutate", [again(without_cpp), again(None)])
def test_experts_compiled(mutate):
    """And stage 3."""
    base = EXPERTS["sinkhorn"] | dict(num_layers=1)
    same(
        train(2, base=base, steps=1, ep=2, zero_stage=3, compile=True, mutate=mutate),
        train(base=base, steps=1),
    )


def small_loss_scale():
    trainer.LossScaler = lambda: optimizer.LossScaler(2.0**12)


def test_experts_float16():
    """The loss scale is in the router's losses too. (All experts chosen: in 16 bits others would
    be.)"""
    base = EXPERTS["topk"] | dict(num_experts=2, z_loss=3.0, capacity_factor=0.0, dropout=0.0)
    one = train(base=base, steps=1)
    half = train(base=base, steps=1, precision="fp16", mutate=small_loss_scale)
    for name in (name for name in one.gradients if "router" in name):
        expected = one.gradients[name]
        assert (half.gradients[name] - expected).abs().max() < 0.03 * expected.abs().max()


def experts_divided_by_ep():
    """As if the gradient of an expert were a mean over the ranks whose tokens it has seen."""
    original = fsdp.DataParallel.accumulate

    def accumulate(self, p):
        if len(sharding_of(p).shape) == 3 and p.grad is not None:
            p.grad /= 2
        original(self, p)

    fsdp.DataParallel.accumulate = accumulate


def experts_summed_over_all():
    """Experts reduced like everything else, with other ranks' other experts."""
    fsdp.is_sharded_over = lambda p, group: False


def no_second_exchange():
    """Rows stay with the experts' rank, as many as would have come home."""
    forward = moe._AllToAll.forward
    calls = []

    def skip(ctx, rows, sent, received, group):
        calls.append(1)
        if len(calls) % 2:
            return forward(ctx, rows, sent, received, group)
        ctx.arguments = received, sent, group
        if not len(rows):
            return rows.new_zeros(sum(received), rows.shape[1])
        return rows.repeat(3, 1)[: sum(received)]

    moe._AllToAll.forward = staticmethod(skip)


def no_way_back_for_gradients():
    """Tokens travel, their gradients do not."""
    moe._AllToAll.backward = staticmethod(
        lambda ctx, grad: (grad.new_zeros(sum(ctx.arguments[1]), grad.shape[1]), None, None, None)
    )


def probabilities_of_others():
    """Each token's experts are weighted by another token's router probabilities."""
    moe.combine = lambda rows, probabilities, *rest, original=moe.combine: original(
        rows, probabilities.flip(0), *rest
    )


@pytest.mark.parametrize(
    "mutate",
    [
        experts_divided_by_ep,
        experts_summed_over_all,
        no_second_exchange,
        no_way_back_for_gradients,
        probabilities_of_others,
    ],
)
def test_gate_sees_experts(mutate):
    base = EXPERTS["sinkhorn"]
    differs(train(4, base=base, ep=2, mutate=mutate), train(base=base))


def routed_by_slice():
    """Each tensor-parallel rank balances its own slice of the sequence."""
    forward = moe.Routing.forward

    def by_slice(self, logits):
        scores = self.scores
        # s = 16
        b = len(logits) // 16

        def of_halves(logits, training):
            halves = logits.view(b, 16, -1).chunk(2, 1)
            parts = [scores(half.flatten(0, 1), training).view(b, 8, -1) for half in halves]
            return torch.cat(parts, 1).flatten(0, 1)

        self.scores = of_halves
        plan = forward(self, logits)
        self.scores = scores
        return plan

    moe.Routing.forward = by_slice


def router_losses_of_every_rank():
    """The router's losses, of all tokens, on each tensor-parallel rank."""
    losses = routers.Router.losses
    routers.Router.losses = lambda self, logits, share: 2 * losses(self, logits, share)


def no_f_around_experts():
    tensor_parallel.copy_to_ranks = lambda x, group: x


def no_gradient_of_the_router_across():
    """The slices of the router's logits are gathered, their gradients are each rank's own."""

    def gather(x, group, original=sequence_parallel.gather_sequence):
        # E
        if x.shape[-1] != 4:
            return original(x, group)
        parts = list(original(x.detach(), group).chunk(2, 1))
        parts[group.rank()] = x
        return torch.cat(parts, 1)

    sequence_parallel.gather_sequence = gather


@pytest.mark.parametrize(
    "mutate, flags",
    [
        (routed_by_slice, dict(sequence_parallel=True)),
        (no_gradient_of_the_router_across, dict(sequence_parallel=True)),
        (no_f_around_experts, dict()),
    ],
)
def test_gate_sees_experts_under_tensor_parallelism(mutate, flags):
    base = EXPERTS["sinkhorn"]
    differs(train(2, base=base, tp=2, mutate=mutate, **flags), train(base=base))


def test_gate_sees_the_routers_losses():
    """That they are there, and once."""
    base = EXPERTS["topk"]
    one = train(base=base)
    differs(
        train(2, base=base, tp=2, sequence_parallel=True, mutate=router_losses_of_every_rank), one
    )
    differs(train(base=base, aux_loss=0.0), one)
    differs(train(base=base, z_loss=0.0), one)


def test_router_losses_are_means_over_the_global_batch():
    """Where nothing depends on the micro-batch (all experts are chosen), the z-loss does not
    either."""
    base = LLAMA | dict(num_experts=2, router="topk", router_topk=2, z_loss=1.0)
    same(train(base=base, micro_batch_size=2), train(base=base))
    differs(train(base=base, z_loss=0.0), train(base=base))


def test_random_layouts():
    """A few of `python tests/random_layouts.py`."""
    for seed in (83,):
        random_layouts.check(random_layouts.draw(seed))
