"""planning/memory.py and planning/collectives.py: held to what train.py allocates and sends."""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsdp
import gpt
import recompute
import routers
import schedules
import train as trainer
from lessons import parity, ranks
from planning import memory, shapes
from planning.collectives import collectives
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
    paper_activations=False,
)
# a vocabulary that nothing divides
GPT = parity.SMALL | dict(num_layers=4, precision="fp32", micro_batch_size=1, global_batch_size=4)
LLAMA = GPT | dict(model="llama2-7b", num_kv_heads=2, ffn_hidden_size=56, dropout=0.0)
EXPERTS = GPT | dict(num_experts=4, expert_every=2, router="topk")
SEQUENCE = dict(tp=2, sequence_parallel=True, global_batch_size=2)

# ranks -> name -> flags; ranks that no flag names are data parallel
LAYOUTS = {
    1: {
        "one device": GPT,
        "chunked head": GPT | dict(head_chunk=5, micro_batch_size=2),
        "llama": LLAMA,
    },
    2: {
        "stage 0": GPT,
        "stage 1": GPT | dict(zero_stage=1),
        "stage 2": GPT | dict(zero_stage=2),
        "stage 3": GPT | dict(zero_stage=3),
        "llama, stage 3": LLAMA | dict(zero_stage=3, micro_batch_size=2),
        "tensor": GPT | dict(tp=2, global_batch_size=2),
        "sequence": GPT | SEQUENCE | dict(micro_batch_size=2),
        "llama, sequence": LLAMA | SEQUENCE,
        "llama, explicit": LLAMA | SEQUENCE | dict(attention="explicit", recompute="selective"),
        "sequence, chunked head": GPT | SEQUENCE | dict(head_chunk=5),
        "tensor, full": GPT | dict(tp=2, recompute="full", global_batch_size=2),
        "sequence, full": GPT | SEQUENCE | dict(recompute="full"),
        "selective": GPT | dict(tp=2, recompute="selective", global_batch_size=2),
        "selective, scores": GPT | dict(recompute="selective", seq_length=64, micro_batch_size=2),
        "1f1b": GPT | dict(pp=2),
        "gpipe": GPT | dict(pp=2, schedule="gpipe"),
        "pipeline, full": LLAMA | dict(pp=2, recompute="full"),
        "interleaved": LLAMA | dict(pp=2, virtual_stages=2),
        "interleaved, uneven": GPT | dict(pp=2, virtual_stages=2, layer_split=[2, 1, 0, 1]),
        "zb-h1": GPT | SEQUENCE | dict(tp=1, sequence_parallel=False, pp=2, schedule="zb-h1"),
        "experts": EXPERTS | dict(ep=2),
        "experts, sequence": EXPERTS | SEQUENCE | dict(router="sinkhorn", router_topk=2),
        "experts, capacity": EXPERTS | dict(ep=2, zero_stage=1, capacity_factor=0.5),
    },
    4: {
        "tensor, stage 3, full": GPT | dict(tp=2, recompute="full", zero_stage=3),
        "uneven": GPT | dict(pp=4, num_layers=5, layer_split=[1, 2, 2, 0], global_batch_size=6),
        "zb-h1 of four": GPT | dict(pp=4, schedule="zb-h1", global_batch_size=6),
        "interleaved, tensor": GPT | dict(pp=2, virtual_stages=2, tp=2),
        "zb-h1, stage 2": GPT | dict(pp=2, schedule="zb-h1", zero_stage=2, global_batch_size=8),
        "experts, one each": EXPERTS | dict(ep=4, zero_stage=1),
        "experts, tensor": EXPERTS | SEQUENCE | dict(ep=2, zero_stage=2, global_batch_size=4),
        "experts, full": EXPERTS | dict(ep=2, pp=2, recompute="full", zero_stage=3),
    },
}
NAMES = [(world, name) for world, layouts in LAYOUTS.items() for name in layouts]


def inputs(world: int, name: str) -> tuple[MoEConfig, Layout]:
    flags = LAYOUTS[world][name]
    fields = {field: flags[field] for field in Layout.__dataclass_fields__ if field in flags}
    if "layer_split" in fields:
        fields["layer_split"] = tuple(fields["layer_split"])
    layout = Layout(**fields, dp=world // flags.get("tp", 1) // flags.get("pp", 1))
    return trainer.Config(**flags).model_config(), layout


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


def watch(trainer, kept: Kept, gathered: list):
    """Patches: what is kept beside autograd is counted; `gathered` gets the bytes of whole units
    and of those that arrive, in stage 3."""
    table = gpt.rotary_table
    start, finish = fsdp.Unit.start_all_gather, fsdp.Unit.finish_all_gather
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
        mock.patch.multiple(
            fsdp.Unit, start_all_gather=start_all_gather, finish_all_gather=finish_all_gather
        ),
    )


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
    dataset = parity.Synthetic(t.model_config.seq_length, t.model_config.vocab_size)
    parameters = [p for stage in t.stages for p in stage.parameters()]
    held = storages([x for p in parameters for x in (p, local_part(p))])
    bytes_held = sum(held.values())
    kept = Kept(held)
    gathered = [0]
    patches = watch(t, kept, gathered)
    with Calls(groups) as calls, patches[0], patches[1], patches[2]:
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
    model, layout = inputs(world, name)
    for rank, counted, _ in measured[world, name]:
        predicted = Counter()
        for kind, group, size, count in collectives(model, layout, CPU, rank):
            is_dp = group == "ep" and layout.ep == layout.ranks
            predicted[kind, "dp" if is_dp else group, size] += count
        assert predicted == counted, f"rank {rank}"


@pytest.mark.parametrize("world, name", NAMES)
def test_memory_is_what_ranks_allocate(measured, world, name):
    """Weights, gradients and state to the byte. Activations: within what token ids that share one
    storage, and factors of 8 bytes, make of so small a model."""
    model, layout = inputs(world, name)
    for rank, _, parts in measured[world, name]:
        predicted = memory.memory(model, layout, CPU, rank)
        for part in ("parameters", "gradients", "optimizer", "gathered"):
            assert predicted[part] == parts[part], f"rank {rank}: {part}"
        kept = sum(predicted[part] for part in ("layers", "embedding", "head", "deferred"))
        assert kept == pytest.approx(parts["activations"], rel=1.5e-3), f"rank {rank}"
