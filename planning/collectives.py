"""Every collective of one rank in one step of train.py, counted without running it.

    a layer, forward and backward of one micro-batch, A = b s h numbers

        tensor                all-reduce A, twice in forward and twice in backward
                                                                    (arXiv 1909.08053, section 3);
                              2 d numbers for the gradients of norms of queries and keys
        tensor + sequence     in forward 2 all-gathers and 2 reduce-scatters of A, in backward 4 and
                              2; all-reduce of the norms' gradients (arXiv 2205.05198, 4.2.2)
        full recomputation    the collectives of forward once more
        experts               4 all-to-alls of k b s h numbers, and one of counts (arXiv 2006.16668)

    ring                  N - 1 sends of the keys and values of b s / N tokens in forward; in
                          backward N - 1 again, and N - 1 of their gradients (arXiv 2310.01889)
    exchanged heads       4 all-to-alls in forward, queries, keys, values, results, and 4 in
                          backward (arXiv 2309.14509)

    pipeline                  A between neighbouring stages, there and back (arXiv 2104.04473)
    data parallel             one all-reduce of each unit, or reduce-scatters and all-gathers: the
                              table of fsdp.py, with padding
    gradient norm             8 bytes over each group that shards parameters (gradients.py)

`bytes` are those of the largest tensor in a call, as in proof/ranks.py: the output of an
all-gather, the input of a reduce-scatter. The tests hold these counts to what gloo ranks send.

    python -m planning.collectives        what a rank of the 1T model sends in one step

Letters: b micro-batch, s sequence, h hidden, t tensor-parallel ranks, p pipeline ranks, v stages on
each, m micro-batches, V vocabulary, E experts, k experts of a token, N context-parallel ranks: with
them A has b s h / N numbers.

Not covered: an uneven load of experts. All-to-alls count as many rows from a rank as to it.
"""

from collections import Counter
from typing import NamedTuple

from planning import shapes
from planning.inputs import SOFTWARE, Layout, Software
from planning.shapes import Rank, Unit
from routers import MoEConfig
from run.presets import PRESETS


class Collective(NamedTuple):
    # all-reduce, all-gather, reduce-scatter, all-to-all, send or receive
    kind: str
    # tp, dp, cp, pp, ep; edp: the ranks that hold the same experts; replicas: dp times cp
    group: str
    # of the largest tensor in the call
    bytes: int
    # in one step
    count: int


# (kind, group, bytes) -> count
Calls = Counter


def collectives(
    model: MoEConfig, layout: Layout, software: Software, rank: int = 0
) -> list[Collective]:
    """What a rank sends in one step, forward_backward and update. rank: of the p pipeline ranks, of
    which the first has the embedding and the last the head; tensor- and data-parallel ranks send
    alike. The layout is one that train.py accepts."""
    held = shapes.of_rank(model, layout, rank)
    calls = Counter()
    if layout.tp > 1:
        add_tensor_parallel(calls, model, layout, software, held)
    if layout.cp > 1:
        add_context_parallel(calls, model, layout, software, held)
    if layout.ep > 1 and held.experts:
        add_expert_parallel(calls, model, layout, software, held)
    if layout.replicas > 1:
        for part, count in held.parts:
            for unit in part.units:
                add_unit(calls, unit, count, layout, software, rank)
    if layout.pp > 1:
        add_pipeline(calls, model, layout, software, rank)
        if model.tied and rank in (0, layout.pp - 1):
            add_tied(calls, software, held)
    add_norm(calls, layout, held)
    return [Collective(*call, count) for call, count in calls.items() if count]


# --- tensor and sequence parallelism --------------------------------------------------------------


class Region(NamedTuple):
    """A tensor-parallel region. f at its start and f̄ at its end; under sequence parallelism g and ḡ
    (sequence_parallel.py)."""

    layout: Layout

    def enter(self, calls: Calls, size: int, count: int, runs: int = 1, again: int = 0) -> None:
        """f: all-reduce in backward. g: all-gather in forward, reduce-scatter in backward.
        runs: of forward; again: all-gathers in backward, of a kept shard."""
        if not self.layout.sequence_parallel:
            calls["all-reduce", "tp", size] += count
            return
        calls["all-gather", "tp", size] += count * (runs + again)
        calls["reduce-scatter", "tp", size] += count

    def leave(self, calls: Calls, size: int, count: int, runs: int = 1) -> None:
        """f̄: all-reduce in forward. ḡ: reduce-scatter in forward, all-gather in backward."""
        if not self.layout.sequence_parallel:
            calls["all-reduce", "tp", size] += count * runs
            return
        calls["reduce-scatter", "tp", size] += count * runs
        calls["all-gather", "tp", size] += count


def add_tensor_parallel(
    calls: Calls, model: MoEConfig, layout: Layout, software: Software, held: Rank
) -> None:
    m = layout.micro_batches
    tokens = layout.tokens(model.seq_length)
    activation = tokens * model.hidden_size * software.weight
    # what is summed has at least 32 bits
    wide = max(4, software.weight)
    runs = 2 if layout.recompute == "full" else 1
    dense = held.dense * m
    experts = held.experts * m
    region = Region(layout)
    # attention, and a dense MLP
    region.enter(calls, activation, 2 * dense + experts, runs, again=1)
    region.leave(calls, activation, 2 * (dense + experts), runs)
    if experts:
        # the tokens, and their logits: moe.py gathers them once
        region.enter(calls, activation, experts, runs)
        region.enter(calls, tokens * model.num_experts * wide, experts, runs)
    if held.first:
        region.leave(calls, activation, m)
    if held.last:
        # the chunked head keeps the whole input
        region.enter(calls, activation, m, again=int(not layout.head_chunk))
        # the loss: the largest logit; the sum of exponentials and the target's logit
        calls["all-reduce", "tp", tokens * wide] += m
        calls["all-reduce", "tp", 2 * tokens * wide] += m
    if layout.sequence_parallel:
        for part, count in held.parts:
            if part.whole:
                # gradients of norms, positions, late biases and routers, side by side
                calls["all-reduce", "tp", part.whole * wide] += count * m
    elif model.qk_norm:
        # gradients of the norms of queries and keys, side by side
        calls["all-reduce", "tp", 2 * model.head_dim * software.weight] += dense + experts


# --- context parallelism --------------------------------------------------------------------------


def add_context_parallel(
    calls: Calls, model: MoEConfig, layout: Layout, software: Software, held: Rank
) -> None:
    m = layout.micro_batches
    layers = (held.dense + held.experts) * m
    if held.experts:
        # int64: how many choices each expert gets; recomputation reuses the plan
        calls["all-reduce", "cp", 8 * model.num_experts] += held.experts * m
    runs = 2 if layout.recompute == "full" else 1
    of_head = layout.tokens(model.seq_length) * model.head_dim * software.weight
    query = of_head * model.num_heads // layout.tp
    key = of_head * model.num_kv_heads // layout.tp
    if layout.cp_kind == "all-to-all":
        for size in (query, key, key, query):
            calls["all-to-all", "cp", size] += layers * (runs + 1)
        return
    n = layout.cp
    # keys and values side by side, in every forward and in backward; their gradients, which have
    # at least 32 bits
    wide = key * max(4, software.weight) // software.weight
    for kind in ("send", "receive"):
        calls[kind, "cp", 2 * key] += layers * (n - 1) * (runs + 1)
        calls[kind, "cp", 2 * wide] += layers * (n - 1)


# --- expert parallelism ---------------------------------------------------------------------------


def add_expert_parallel(
    calls: Calls, model: MoEConfig, layout: Layout, software: Software, held: Rank
) -> None:
    experts = held.experts * layout.micro_batches
    rows = shapes.expert_rows(model, layout)
    # there and back: in forward, in recomputation, in backward
    times = 6 if layout.recompute == "full" else 4
    calls["all-to-all", "ep", rows * model.hidden_size * software.weight] += experts * times
    # int64: how many rows each expert will get; recomputation reuses the plan
    calls["all-to-all", "ep", 8 * model.num_experts] += experts


# --- data parallelism -----------------------------------------------------------------------------


def add_unit(
    calls: Calls, unit: Unit, count: int, layout: Layout, software: Software, rank: int
) -> None:
    """`count` equal units, [N, T] each, in the step's m micro-batches (the table of fsdp.py)."""
    m, stage = layout.micro_batches, layout.zero_stage
    numbers = unit.N * unit.T
    # alone, a rank sums in the type of its gradients
    gradients = numbers * (software.reduced if unit.ranks > 1 else software.gradient)
    weights = numbers * software.weight
    if stage == 0:
        calls["all-reduce", unit.group, gradients] += count
        return
    reductions = 1
    if stage >= 2:
        reductions = m
        if unit.mixed and layout.pipeline_schedule == "zb-h1":
            reductions = zero_bubble_reductions(m, rank)
    calls["reduce-scatter", unit.group, gradients] += count * reductions
    # stage 3: for each forward and each backward; else after the update
    calls["all-gather", unit.group, weights] += count * (2 * m if stage == 3 else 1)


def zero_bubble_reductions(m: int, rank: int) -> int:
    """How often a unit is complete under zb-h1, where W comes `rank` micro-batches after I. The
    W that are left at the end, when no I comes between them, are reduced together."""
    left = min(rank, m - 1)
    return m - max(0, left - 1)


# --- the pipeline ---------------------------------------------------------------------------------


def add_pipeline(
    calls: Calls, model: MoEConfig, layout: Layout, software: Software, rank: int
) -> None:
    """Activations go to the next stage, their gradients back."""
    tokens = layout.tokens(model.seq_length)
    shards = layout.tp if layout.sequence_parallel else 1
    activation = tokens // shards * model.hidden_size * software.weight
    v = layout.virtual_stages
    # stages of this rank that have a next one, and those that have one before
    to_next = v - (rank == layout.pp - 1)
    to_previous = v - (rank == 0)
    messages = layout.micro_batches * (to_next + to_previous)
    calls["send", "pp", activation] += messages
    calls["receive", "pp", activation] += messages


def add_tied(calls: Calls, software: Software, held: Rank) -> None:
    """The first and the last rank add up the gradients of their copies of a tied matrix."""
    calls["send", "pp", held.tied * software.gradient] += 1
    calls["receive", "pp", held.tied * software.gradient] += 1


# --- the gradient norm ----------------------------------------------------------------------------


def add_norm(calls: Calls, layout: Layout, held: Rank) -> None:
    """One float64 over each group of each kind of sharding, and over the pipeline."""
    kinds = frozenset().union(*(part.groups for part, _ in held.parts))
    for groups in kinds:
        for group in groups:
            calls["all-reduce", group, 8] += 1
    if layout.pp > 1:
        calls["all-reduce", "pp", 8] += 1


# --------------------------------------------------------------------------------------------------


def main():
    model = MoEConfig(**PRESETS["megatron-1t"][0])
    layout = Layout(tp=8, pp=64, dp=6, global_batch_size=3072, sequence_parallel=True)
    print("the 1T model on 3,072 ranks, --tp 8 --pp 64 --sequence-parallel, one step")
    for rank, place in ((0, "first"), (32, "middle"), (63, "last")):
        print(f"{place} stage")
        for kind, group, size, count in collectives(model, layout, SOFTWARE["train.py"], rank):
            print(f"  {kind:<16}{group:<6}{count:>8,} x{size:>14,} bytes")


if __name__ == "__main__":
    main()
