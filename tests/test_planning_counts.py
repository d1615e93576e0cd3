"""planning/memory.py and planning/collectives.py: held to what train.py allocates and sends."""

import contextlib
import dataclasses
from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch

import data
import fsdp
import recompute
import schedules
import train as trainer
from base.collectives import Collectives
from base.world import Groups
from planning import as_rank, memory, shapes
from planning.collectives import collectives, zero_bubble_reductions
from planning.counters import Kept
from planning.inputs import SOFTWARE, Layout, Software
from proof import parity, ranks, synthetic
from routers import MoEConfig
from run.presets import PRESETS

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
QWEN3 = LLAMA | dict(model="qwen3-0.6b", head_dim=12)
QWEN2 = LLAMA | dict(model="qwen2.5-7b")
GEMMA = LLAMA | dict(model="gemma-2b", head_dim=12)
MISTRAL = LLAMA | dict(model="mistral-7b", sliding_window=5)
TIED_LLAMA = LLAMA | dict(model="smollm2-135m")
BLOOM = GPT | dict(model="bloom-560m", dropout=0.0)
# layers 1 and 3
EXPERTS = GPT | dict(num_experts=4, expert_every=2, router="topk")
TENSOR = dict(tp=2, global_batch_size=2)
SEQUENCE = TENSOR | dict(sequence_parallel=True)
PIPELINE = dict(pp=2, num_layers=4)
FOUR_STAGES = dict(pp=4, global_batch_size=6)
ZB_H1 = dict(schedule="zb-h1")
RING = dict(cp=2, cp_kind="ring")
HEADS = dict(cp=2, cp_kind="all-to-all")
EXPLICIT = dict(attention="explicit", recompute="selective")

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
        "qwen3": QWEN3,
        "mistral, full": MISTRAL | dict(recompute="full", micro_batch_size=2),
        "gemma in 16 bits": GEMMA | dict(precision="bf16", micro_batch_size=2),
        "bloom, selective": BLOOM | EXPLICIT,
        "gemma with experts": GEMMA | dict(num_experts=4, router="topk", dropout=0.1),
    },
    2: {
        "stage 0": GPT,
        "stage 1": GPT | dict(zero_stage=1),
        "stage 2": GPT | dict(zero_stage=2),
        "stage 3": GPT | dict(zero_stage=3),
        "llama, stage 3": LLAMA | dict(zero_stage=3, micro_batch_size=2),
        "sequence": GPT | SEQUENCE | dict(micro_batch_size=2),
        "llama, sequence": LLAMA | SEQUENCE,
        "llama, explicit": LLAMA | SEQUENCE | EXPLICIT,
        "sequence, chunked head": GPT | SEQUENCE | dict(head_chunk=5),
        "tensor, full": GPT | TENSOR | dict(recompute="full"),
        "sequence, full": GPT | SEQUENCE | dict(recompute="full"),
        "selective": GPT | TENSOR | dict(recompute="selective"),
        "selective, scores": GPT | dict(recompute="selective", seq_length=64, micro_batch_size=2),
        "gpipe": GPT | PIPELINE | dict(schedule="gpipe"),
        "pipeline, full": LLAMA | PIPELINE | dict(recompute="full"),
        "interleaved": LLAMA | PIPELINE | dict(virtual_stages=2),
        "interleaved, uneven": GPT | PIPELINE | dict(virtual_stages=2, layer_split=[2, 1, 0, 1]),
        "zb-h1": LLAMA | PIPELINE | ZB_H1,
        "zb-h1, full": GPT | PIPELINE | ZB_H1 | dict(recompute="full"),
        "experts, top 2": EXPERTS | dict(router_topk=2),
        "experts, sequence": EXPERTS | SEQUENCE | dict(router="sinkhorn", router_topk=2),
        "experts, capacity": EXPERTS | dict(ep=2, zero_stage=1, capacity_factor=0.5),
        "ring": GPT | RING,
        "llama, ring": LLAMA | RING | dict(zero_stage=3, micro_batch_size=2),
        "llama, ring, full": LLAMA | RING | dict(recompute="full"),
        "heads": GPT | HEADS,
        "heads, selective": GPT | HEADS | dict(recompute="selective"),
        "llama, heads": LLAMA | HEADS | dict(zero_stage=2),
        "llama, heads, selective": LLAMA | HEADS | EXPLICIT,
        "qwen3, tensor": QWEN3 | TENSOR | dict(precision="bf16"),
        "qwen3, zb-h1": QWEN3 | PIPELINE | ZB_H1 | EXPLICIT,
        "qwen3, heads": QWEN3 | HEADS | dict(zero_stage=3),
        "gemma, ring": GEMMA | RING | dict(zero_stage=2),
        "gemma, tensor": GEMMA | TENSOR | dict(recompute="full"),
        "qwen2, sequence": QWEN2 | SEQUENCE,
        "tied llama, interleaved": TIED_LLAMA | PIPELINE | dict(virtual_stages=2),
        "bloom, stage 3": BLOOM | dict(zero_stage=3, vocab_size=1001),
        "bloom, stage 2": BLOOM | dict(zero_stage=2, head_chunk=5),
    },
    4: {
        "uneven": GPT | FOUR_STAGES | dict(num_layers=5, layer_split=[1, 2, 2, 0]),
        "zb-h1 of four": GPT | FOUR_STAGES | ZB_H1 | dict(num_layers=4, recompute="selective"),
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
        "ring of four": LLAMA | RING | dict(cp=4, num_kv_heads=1),
        "ring, sequence": GPT | RING | SEQUENCE | dict(zero_stage=1),
        "ring, pipeline": LLAMA | RING | PIPELINE | dict(virtual_stages=2, recompute="full"),
        "ring, zb-h1": LLAMA | RING | PIPELINE | ZB_H1 | dict(zero_stage=2),
        "ring, samples": GPT | RING | dict(zero_stage=1),
        "heads, sequence": LLAMA | HEADS | SEQUENCE | dict(num_kv_heads=4),
        "heads, zb-h1": LLAMA | HEADS | PIPELINE | ZB_H1,
        "ring, experts": EXPERTS | RING | dict(ep=4, router_topk=2),
        "qwen3, sequence": QWEN3 | SEQUENCE | PIPELINE | dict(virtual_stages=2),
        "bloom, tensor": BLOOM | TENSOR | PIPELINE,
        "bloom, pipeline, stage 3": BLOOM | PIPELINE | dict(zero_stage=3),
    },
}


ACTIVATIONS = "layers", "embedding", "head", "deferred"


def inputs(world: int, flags: dict) -> tuple[MoEConfig, Layout, Software]:
    fields = {field: flags[field] for field in Layout.__dataclass_fields__ if field in flags}
    if "layer_split" in fields:
        fields["layer_split"] = tuple(fields["layer_split"])
    others = flags.get("tp", 1) * flags.get("pp", 1) * flags.get("cp", 1)
    layout = Layout(**fields, dp=world // others)
    software = HALF if flags["precision"] == "bf16" else CPU
    return trainer.Config(**flags).model_config(), layout, software


# --- measured on ranks ----------------------------------------------------------------------------


class Samples(synthetic.Synthetic):
    """Token ids and targets have memory of their own, as what is copied to a GPU."""

    def batch(self, samples):
        batch = super().batch(samples)
        return data.Batch(*(x.clone() for x in batch[:4]))


class Units:
    """Follows what fsdp.py holds beside the rows of a rank. `gathered`: the most bytes of whole
    units and of those that arrive, in stage 3; `summed`: of gradients before their sum, in stages 2
    and 3."""

    def __init__(self, units: list[fsdp.Unit]):
        self.units = units
        self.gathered = self.summed = 0

    def note_gathered(self) -> None:
        whole = [u.whole.untyped_storage().size() for u in self.units if u.whole is not None]
        arriving = [u.gathering[0].nbytes for u in self.units if u.gathering]
        self.gathered = max(self.gathered, sum(whole + arriving))

    def note_summed(self) -> None:
        filled = [u.local_grads for u in self.units if u.local_grads is not None]
        leaving = sum(u.N * u.T * filled[0].itemsize for u in self.units if u.reducing)
        self.summed = max(self.summed, sum(g.nbytes for g in filled) + leaving)

    def __enter__(self):
        start, finish = fsdp.Unit.start_all_gather, fsdp.Unit.finish_all_gather

        def start_all_gather(unit, *args):
            start(unit, *args)
            self.note_gathered()

        def finish_all_gather(unit):
            self.note_gathered()
            finish(unit)

        def new_grads(gradients, unit):
            unit.local_grads = new(gradients, unit)
            if gradients.shards_gradients:
                self.note_summed()
            return unit.local_grads

        new = fsdp.DataParallel.new_grads
        self.stack = contextlib.ExitStack()
        methods = dict(start_all_gather=start_all_gather, finish_all_gather=finish_all_gather)
        self.stack.enter_context(mock.patch.multiple(fsdp.Unit, **methods))
        self.stack.enter_context(mock.patch.object(fsdp.DataParallel, "new_grads", new_grads))
        return self

    def __exit__(self, *error):
        self.stack.close()


def measure(rank: int, world: int, variants: list[dict]) -> list[tuple]:
    return [measure_one(world, flags) for flags in variants]


def measure_one(world: int, flags: dict) -> tuple[int, Counter, dict[str, int]]:
    """One step: (pipeline rank, collectives, bytes by part)."""
    config = trainer.Config(**flags)
    groups = Groups()
    if world > 1:
        sizes = {name: getattr(config, name) for name in ("tp", "pp", "ep", "cp")}
        groups = Groups.make("cpu", world, **sizes)
    t = trainer.Trainer(config, torch.device("cpu"), groups)
    for layer in t.expert_layers.values():
        layer.routing.scores = partial(as_rank.even_scores, layer.routing.k)
    dataset = Samples(t.model_config.seq_length, t.model_config.vocab_size)
    held = bytes_of(t, "parameters")
    kept = Kept(p for stage in t.stages for p in stage.parameters())
    if t.schedule:
        # so that what W of zb-h1 waits for counts
        as_rank.Actions(t.model, kept)
    units = [unit for gradients in t.gradients for unit in getattr(gradients, "units", ())]
    with Collectives() as noted:
        with kept, Units(units) as watched:
            t.forward_backward(1, dataset)
        t.update(1)
    parts = {
        "parameters": held,
        "gradients": bytes_of(t, "gradients"),
        "optimizer": bytes_of(t, "optimizer_state"),
        "activations": kept.peak,
        "gathered": watched.gathered,
        "gradient buffers": watched.summed,
    }
    return groups.pp.rank() if groups.pp else 0, noted.counted(groups), parts


def bytes_of(t: trainer.Trainer, part: str) -> int:
    return sum(as_rank.bytes_of(t)[part].values())


# --- formulas against measurements ----------------------------------------------------------------


def check_collectives(model, layout, software, rank: int, counted: Counter) -> None:
    predicted = Counter()
    for kind, group, size, count in collectives(model, layout, software, rank):
        # those of all ranks are one group, which has the first name
        names = [n for n in ("dp", "cp", "replicas", "ep") if getattr(layout, n) == layout.ranks]
        predicted[kind, names[0] if group in names else group, size] += count
    assert predicted == counted, f"rank {rank}"


def check_memory(model, layout, software, rank: int, parts: dict[str, int]) -> None:
    """To the byte."""
    predicted = memory.memory(model, layout, software, rank)
    predicted["activations"] = sum(predicted[part] for part in ACTIVATIONS)
    assert {part: predicted[part] for part in parts} == parts, f"rank {rank}"


def repeated(*values):
    return pytest.param(*values, marks=pytest.mark.repetition)


# layouts whose parts are those of others: `make test-all` runs them
REPEATED = (
    "stage 1, sequence, llama explicit, sequence full, selective, pipeline full, zb-h1 full, heads,"
    " llama heads, llama ring full, qwen3 heads, gemma tensor, bloom stage 2, interleaved tensor,"
    " experts one of two, experts tensor, ring sequence, ring samples, heads zb-h1, bloom tensor"
).split(", ")


@pytest.mark.parametrize(
    "world, again", [(1, False), (2, False), (4, False), *(repeated(n, True) for n in (2, 4))]
)
def test_formulas_are_what_gloo_ranks_send_and_hold(world, again):
    """Every layout on so many ranks, one after the other in the same processes."""
    layouts = {}
    for name, flags in LAYOUTS[world].items():
        if (name.replace(",", "") in REPEATED) == again:
            layouts[name] = flags
    of_ranks = ranks.run(measure, world, world, list(layouts.values()), timeout=120)
    for i, (name, flags) in enumerate(layouts.items()):
        for of_rank in of_ranks:
            rank, counted, parts = of_rank[i]
            try:
                check_collectives(*inputs(world, flags), rank, counted)
                check_memory(*inputs(world, flags), rank, parts)
            except AssertionError as e:
                raise AssertionError(f"{name}: {e}") from e


@pytest.mark.parametrize("rank", [0, 300, 511])
@pytest.mark.parametrize(
    "flags",
    [
        dict(
            model="gpt3-5b",
            num_layers=8,
            tp=4,
            sequence_parallel=True,
            pp=4,
            schedule="zb-h1",
            zero_stage=2,
        ),
        dict(model="llama2-70b", tp=8, pp=16, recompute="full", zero_stage=1),
        dict(model="mixtral-8x7b", tp=2, ep=8, pp=8, virtual_stages=4, zero_stage=3),
        dict(
            model="llama2-13b",
            num_layers=8,
            seq_length=32768,
            tp=4,
            sequence_parallel=True,
            pp=4,
            cp=8,
            zero_stage=1,
        ),
    ],
    ids=lambda flags: flags["model"],
)
def test_large_runs_are_what_as_rank_says(flags, rank):
    flags = dict(global_batch_size=1024, micro_batch_size=1, precision="bf16") | flags
    report = as_rank.report(trainer.Config(**flags), trainer.Trainer, rank, 512)
    pipeline_rank = report.place["pp"][0]
    counted = Counter({(c.kind, c.group, c.bytes): c.count for c in report.collectives})
    parts = {
        "parameters": sum(report.parameters.values()),
        "gradients": sum(report.gradients.values()),
        "optimizer": sum(report.optimizer_state.values()),
        "activations": report.activations,
    }
    check_collectives(*inputs(512, flags), pipeline_rank, counted)
    check_memory(*inputs(512, flags), pipeline_rank, parts)


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


def test_models_on_disk_have_their_published_parameters():
    for name, (fields, published) in PRESETS.items():
        # sizes in papers are rounded
        if isinstance(published, int) and published:
            parts = shapes.of_rank(MoEConfig(**fields), Layout(), 0).parts
            assert sum(part.size * count for part, count in parts) == published, name


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
