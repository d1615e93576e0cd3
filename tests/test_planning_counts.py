"""planning/memory.py and planning/collectives.py: held to what train.py allocates and sends."""

import contextlib
import dataclasses
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import data
import fsdp
import gpt
import recompute
import routers
import schedules
import train as trainer
from lessons import parity, ranks
from planning import memory
from planning.collectives import collectives, zero_bubble_reductions
from planning.inputs import SOFTWARE, Layout, Software
from routers import MoEConfig
from runtime.presets import PRESETS
from runtime.world import Groups
from sharding import local_part

# train.py on CPUs: a float32 weight is its own master
CPU = Software(
    "train.py in fp32",
    weight=4,
    gradient=4,
    optimizer_state=8,
    fused_attention=True,
    fused_rms_norm=False,
)
HALF = dataclasses.replace(CPU, name="in bf16", weight=2, optimizer_state=12)
# a vocabulary that nothing divides
GPT = parity.SMALL | dict(precision="fp32", micro_batch_size=1, global_batch_size=4)
LLAMA = GPT | dict(model="llama2-7b", num_kv_heads=2, ffn_hidden_size=56, dropout=0.0)
# layers 1 and 3
EXPERTS = GPT | dict(num_experts=4, expert_every=2, router="topk")
TENSOR = dict(tp=2, global_batch_size=2)
SEQUENCE = TENSOR | dict(sequence_parallel=True)
PIPELINE = dict(pp=2, num_layers=4)
FOUR_STAGES = dict(pp=4, global_batch_size=6)
ZB_H1 = dict(schedule="zb-h1")

# ranks -> name -> flags; ranks that no flag names are data parallel
LAYOUTS = {
    1: {
        "one device": GPT,
        "chunked head": GPT | dict(head_chunk=5, micro_batch_size=2),
        "llama": LLAMA,
        # not a GPT: on a GPU, but not on a CPU, a LayerNorm's statistics are float32
        "16 bits": LLAMA | dict(precision="bf16", recompute="full", micro_batch_size=2),
        "experts in 16 bits": EXPERTS | LLAMA | dict(num_layers=4, precision="bf16"),
        "selective, scores of one": GPT | dict(recompute="selective", seq_length=64),
        "experts before the last layer": EXPERTS | dict(num_layers=3, recompute="full"),
    },
    2: {
        "stage 0": GPT,
        "stage 1": GPT | dict(zero_stage=1),
        "stage 2": GPT | dict(zero_stage=2),
        "stage 3": GPT | dict(zero_stage=3),
        "llama, stage 3": LLAMA | dict(zero_stage=3, micro_batch_size=2),
        "sequence": GPT | SEQUENCE | dict(micro_batch_size=2),
        "llama, sequence": LLAMA | SEQUENCE,
        "llama, explicit": LLAMA | SEQUENCE | dict(attention="explicit", recompute="selective"),
        "sequence, chunked head": GPT | SEQUENCE | dict(head_chunk=5),
        "tensor, full": GPT | TENSOR | dict(recompute="full"),
        "sequence, full": GPT | SEQUENCE | dict(recompute="full"),
        "selective": GPT | TENSOR | dict(recompute="selective"),
        "selective, scores": GPT | dict(recompute="selective", seq_length=64, micro_batch_size=2),
        "gpipe": GPT | PIPELINE | dict(schedule="gpipe"),
        "pipeline, full": LLAMA | PIPELINE | dict(recompute="full"),
        "interleaved": LLAMA | PIPELINE | dict(virtual_stages=2),
        "interleaved, uneven": GPT | PIPELINE | dict(virtual_stages=2, layer_split=[2, 1, 0, 1]),
        "zb-h1": GPT | PIPELINE | ZB_H1,
        "experts, top 2": EXPERTS | dict(router_topk=2),
        "experts, sequence": EXPERTS | SEQUENCE | dict(router="sinkhorn", router_topk=2),
        "experts, capacity": EXPERTS | dict(ep=2, zero_stage=1, capacity_factor=0.5),
    },
    4: {
        "uneven": GPT | FOUR_STAGES | dict(num_layers=5, layer_split=[1, 2, 2, 0]),
        "zb-h1 of four": GPT | FOUR_STAGES | ZB_H1 | dict(num_layers=4),
        "interleaved, tensor": GPT | PIPELINE | SEQUENCE | dict(virtual_stages=2),
        "zb-h1, stage 2": GPT | PIPELINE | ZB_H1 | dict(zero_stage=2, global_batch_size=8),
        "experts, one of two": EXPERTS | dict(num_experts=2, ep=2, zero_stage=1),
        "experts, one each": EXPERTS | dict(ep=4, zero_stage=1),
        "experts, tensor": EXPERTS
        | SEQUENCE
        | dict(ep=2, zero_stage=2, router_topk=2, num_layers=4),
        "experts, full": EXPERTS
        | PIPELINE
        | dict(ep=2, recompute="full", zero_stage=3, num_layers=6),
    },
}
NAMES = [(world, name) for world, layouts in LAYOUTS.items() for name in layouts]


EXACT = "parameters", "gradients", "optimizer", "gathered", "gradient buffers"


def inputs(world: int, name: str) -> tuple[MoEConfig, Layout, Software]:
    flags = LAYOUTS[world][name]
    fields = {field: flags[field] for field in Layout.__dataclass_fields__ if field in flags}
    if "layer_split" in fields:
        fields["layer_split"] = tuple(fields["layer_split"])
    layout = Layout(**fields, dp=world // flags.get("tp", 1) // flags.get("pp", 1))
    software = HALF if flags["precision"] == "bf16" else CPU
    return trainer.Config(**flags).model_config(), layout, software


# --- measured on ranks ----------------------------------------------------------------------------


class Calls(ranks.Collectives):
    """Collectives with the group of each: `counted` is (kind, group, bytes) -> count."""

    def __init__(self, groups: Groups):
        super().__init__()
        self.names = {}
        for name in ("dp", "ep", "edp", "tp", "pp"):
            group = getattr(groups, name)
            if group:
                # where ep is dp and all ranks, the two are one group
                self.names.setdefault(group.group_name, name)
        self.counted = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = len(self.calls)
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if len(self.calls) > before:
            name, size = self.calls[-1]
            name = {"recv_": "receive"}.get(name, name)
            self.counted[name, self.group_in(args), size] += 1
        return result

    def group_in(self, args) -> str:
        for a in args:
            if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()):
                return self.names[dist.ProcessGroup.unbox(a).group_name]


class Kept:
    """Counts the bytes of tensors that are held: each storage once, those of parameters not."""

    def __init__(self, parameters: dict[int, int]):
        self.parameters = parameters
        self.holders = Counter()
        self.now = 0
        self.peak = 0

    def hold(self, tensor) -> "Holder":
        return Holder(self, tensor.detach())

    def add(self, storage, holders: int) -> None:
        key = storage._cdata
        if key in self.parameters:
            return
        before = self.holders[key]
        self.holders[key] += holders
        if not before or not self.holders[key]:
            self.now += holders * storage.nbytes()
            self.peak = max(self.peak, self.now)


class Holder:
    """Of one tensor: counted as long as this lives."""

    def __init__(self, kept: Kept, tensor):
        self.kept = kept
        self.tensor = tensor
        kept.add(tensor.untyped_storage(), 1)

    def __del__(self):
        self.kept.add(self.tensor.untyped_storage(), -1)


class Held(tuple):
    """Tensors that something keeps beside autograd: of full recomputation the rotary table, and
    what zb-h1 defers."""


class HeldPlan(routers.DispatchPlan):
    """A router's plan, which full recomputation keeps."""


def hold_all(kept: Kept, result):
    result.holders = [kept.hold(x) for x in result if isinstance(x, torch.Tensor)]
    return result


class Deferred(list):
    """Stands on a weight in the place of the pipeline's list."""

    def __init__(self, kept: Kept, entries: list):
        self.kept = kept
        self.entries = entries

    def append(self, entry: tuple) -> None:
        entry = Held(entry)
        entry.holders = [self.kept.hold(x) for x in entry[1:]]
        self.entries.append(entry)


def watch(trainer, kept: Kept, gathered: list, summed: list):
    """Patches: what is kept beside autograd is counted. `gathered` gets the bytes of whole units
    and of those that arrive, in stage 3; `summed` those of gradients before their sum, in stages 2
    and 3."""
    table = gpt.rotary_table
    start, finish = fsdp.Unit.start_all_gather, fsdp.Unit.finish_all_gather
    new_of_unit = fsdp.DataParallel.new_grads
    units = [unit for g in trainer.gradients for unit in getattr(g, "units", ())]

    def note_gathered():
        whole = sum(u.whole.untyped_storage().size() for u in units if u.whole is not None)
        gathered.append(whole + sum(u.gathering[0].nbytes for u in units if u.gathering))

    def start_all_gather(unit, *args):
        start(unit, *args)
        note_gathered()

    def finish_all_gather(unit):
        note_gathered()
        finish(unit)

    def new_grads(self, unit):
        new = new_of_unit(self, unit)
        if self.shards_gradients:
            filled = [u.local_grads.nbytes for u in units if u.local_grads is not None]
            leaving = [u.N * u.T * new.itemsize for u in self.reductions]
            summed.append(new.nbytes + sum(filled + leaving))
        return new

    if trainer.groups.pp:
        defer = trainer.model.defer
        trainer.model.defer = lambda chunk, entries: defer(
            chunk, None if entries is None else Deferred(kept, entries)
        )
    return (
        mock.patch.object(
            gpt, "rotary_table", lambda *a, **k: hold_all(kept, Held(table(*a, **k)))
        ),
        mock.patch.object(routers, "DispatchPlan", lambda *a: hold_all(kept, HeldPlan(*a))),
        mock.patch.object(fsdp.DataParallel, "new_grads", new_grads),
        mock.patch.multiple(
            fsdp.Unit, start_all_gather=start_all_gather, finish_all_gather=finish_all_gather
        ),
    )


class Samples(parity.Synthetic):
    """Token ids and targets have memory of their own, as what is copied to a GPU."""

    def batch(self, samples):
        batch = super().batch(samples)
        return data.Batch(*(x.clone() for x in batch))


def even_scores(k: int, logits, training: bool):
    """Every expert gets as many tokens."""
    n, e = logits.shape
    first = k * torch.arange(n).unsqueeze(1)
    return -((torch.arange(e) - first) % e).to(logits.dtype)


def storages(tensors) -> dict[int, int]:
    found = (t.untyped_storage() for t in tensors)
    return {storage._cdata: storage.nbytes() for storage in found}


def measure(rank: int, world: int, variants: list[dict]) -> list[tuple]:
    return [measure_one(world, flags) for flags in variants]


def measure_one(world: int, flags: dict) -> tuple[int, Counter, dict[str, int]]:
    """One step: (pipeline rank, collectives, bytes by part)."""
    config = trainer.Config(**flags)
    groups = Groups()
    if world > 1:
        groups = Groups.make("cpu", world, config.tp, config.pp, ep=config.ep)
    t = trainer.Trainer(config, torch.device("cpu"), groups)
    for layer in t.expert_layers.values():
        layer.routing.scores = lambda *args: even_scores(config.router_topk or 1, *args)
    dataset = Samples(t.model_config.seq_length, t.model_config.vocab_size)
    parameters = [p for stage in t.stages for p in stage.parameters()]
    held = storages([x for p in parameters for x in (p, local_part(p))])
    bytes_held = sum(held.values())
    kept = Kept(held)
    gathered, summed = [0], [0]
    with contextlib.ExitStack() as stack:
        calls = stack.enter_context(Calls(groups))
        for patch in watch(t, kept, gathered, summed):
            stack.enter_context(patch)
        with torch.autograd.graph.saved_tensors_hooks(kept.hold, lambda holder: holder.tensor):
            t.forward_backward(1, dataset)
        gradients = storages([local_part(p).main_grad for p in parameters])
        # stage 1 and 2 gather updated parameters here; that is no peak
        in_step = max(gathered)
        t.update(1)
    o = t.optimizer
    of_optimizer = (o.masters, o.low, o.exp_avg, o.exp_avg_sq)
    state = storages([x for tensors in of_optimizer for x in tensors.values()])
    parts = dict(
        parameters=bytes_held,
        gradients=sum(gradients.values()),
        optimizer=sum(size for key, size in state.items() if key not in held),
        activations=kept.peak,
        gathered=in_step,
    )
    parts["gradient buffers"] = max(summed)
    return groups.pp.rank() if groups.pp else 0, calls.counted, parts


@pytest.fixture(scope="module")
def measured() -> dict:
    """(ranks, name) -> what `measure_one` gave on each rank."""
    found = {}
    for world, layouts in LAYOUTS.items():
        of_ranks = ranks.run(measure, world, world, list(layouts.values()), timeout=120)
        for i, name in enumerate(layouts):
            found[world, name] = [of_rank[i] for of_rank in of_ranks]
    return found


# --- formulas against measurements ----------------------------------------------------------------


@pytest.mark.parametrize("world, name", NAMES)
def test_collectives_are_those_of_gloo_ranks(measured, world, name):
    model, layout, software = inputs(world, name)
    for rank, counted, _ in measured[world, name]:
        predicted = Counter()
        for kind, group, size, count in collectives(model, layout, software, rank):
            is_dp = group == "ep" and layout.ep == layout.ranks
            predicted[kind, "dp" if is_dp else group, size] += count
        assert predicted == counted, f"rank {rank}"


@pytest.mark.parametrize("world, name", NAMES)
def test_memory_is_what_ranks_allocate(measured, world, name):
    """To the byte."""
    model, layout, software = inputs(world, name)
    for rank, _, parts in measured[world, name]:
        predicted = memory.memory(model, layout, software, rank)
        for part in EXACT:
            assert predicted[part] == parts[part], f"rank {rank}: {part}"
        kept = sum(predicted[part] for part in ("layers", "embedding", "head", "deferred"))
        assert kept == parts["activations"], f"rank {rank}"


# --- formulas by themselves -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, p, m, v",
    [
        ("gpipe", 4, 6, 1),
        ("1f1b", 4, 2, 1),
        ("1f1b", 4, 9, 1),
        ("interleaved", 4, 4, 3),
        ("interleaved", 4, 12, 2),
        ("zb-h1", 4, 9, 1),
    ],
)
def test_in_flight_is_what_the_schedule_holds(name, p, m, v):
    layout = Layout(pp=p, virtual_stages=v, schedule=name, global_batch_size=m)
    schedule = schedules.make(name, p, m, v)
    predicted = [memory.in_flight(layout, rank)[0] for rank in range(p)]
    assert [state.pairs for state in predicted] == schedules.in_flight(schedule)
    # of the first stage on the first rank, of the last stage on the last one
    of_first, of_last = (
        [[a for a in schedule[rank] if a.chunk == chunk]] for rank, chunk in ((0, 0), (-1, v - 1))
    )
    assert [predicted[0].embeddings] == schedules.in_flight(of_first)
    assert [predicted[-1].heads] == schedules.in_flight(of_last)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 9])
def test_units_are_reduced_when_the_weight_gradients_of_zb_h1_have_come(m):
    for rank, actions in enumerate(schedules.zero_bubble_h1(4, m)):
        arrived = set()
        reductions = 0
        for action in actions:
            if action.op in "IW":
                arrived.add(action.op)
            if arrived == {"I", "W"}:
                reductions += 1
                arrived.clear()
        assert zero_bubble_reductions(m, rank) == reductions + bool(arrived)


@pytest.mark.parametrize("row", recompute.ROWS)
@pytest.mark.parametrize("name", ["megatron-22b", "megatron-1t"])
def test_in_16_bits_a_layer_keeps_what_the_paper_says(name, row):
    """Norms keep statistics too, 16 bytes for a token."""
    sequence_parallel, granularity = recompute.ROWS[row]
    model = MoEConfig(**PRESETS[name][0])
    t = 1 if row == "no parallelism" else 8
    layout = Layout(tp=t, recompute=granularity, sequence_parallel=sequence_parallel)
    kept = memory.layer(model, layout, SOFTWARE["train.py"]).kept
    s, h, a = model.seq_length, model.hidden_size, model.num_heads
    paper = recompute.layer_bytes(s, 1, h, a, t, sequence_parallel, granularity)
    assert kept == pytest.approx(paper, rel=5e-4)


def test_the_fullest_rank_is_found():
    """The last one holds the logits; the first one more micro-batches; with an uneven split any."""
    model = MoEConfig(**PRESETS["gpt3-5b"][0])
    for fields in (
        dict(layer_split=(2, 8, 12, 2)),
        dict(recompute="full"),
        dict(),
        dict(schedule="zb-h1", tp=2, sequence_parallel=True),
    ):
        layout = Layout(pp=4, global_batch_size=32, **fields)
        each = [memory.memory(model, layout, CPU, rank) for rank in range(4)]
        fullest = memory.memory(model, layout, CPU)
        assert sum(fullest.values()) == max(sum(parts.values()) for parts in each)
