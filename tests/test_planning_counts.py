"""planning/memory.py and planning/collectives.py: held to what train.py allocates and sends."""

import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import gpt
import recompute
import train as trainer
from lessons import parity, ranks
from planning import shapes
from planning.collectives import collectives
from planning.inputs import Layout, Software
from runtime.world import Groups
from sharding import local_part

SOFTWARE = Software("train.py in fp32", weight=4, gradient=4, optimizer_state=8)
GPT = dict(
    model="gpt2",
    num_layers=4,
    hidden_size=32,
    num_heads=4,
    seq_length=16,
    # divisible by nothing
    vocab_size=61,
    dropout=0.1,
    global_batch_size=8,
    micro_batch_size=1,
    precision="fp32",
    device="cpu",
)
LLAMA = GPT | dict(model="llama2-7b", num_kv_heads=2, ffn_hidden_size=56, dropout=0.0)
EXPERTS = GPT | dict(num_experts=4, expert_every=2, aux_loss=0.01, router="topk", z_loss=0.001)

# name -> flags; four ranks, of which those that are left are data parallel
LAYOUTS = {
    "one device": GPT | dict(alone=True),
    "one device, chunked head": GPT | dict(alone=True, head_chunk=5),
    "one device, llama": LLAMA | dict(alone=True),
    "stage 0": GPT,
    "stage 1": GPT | dict(zero_stage=1),
    "stage 2": GPT | dict(zero_stage=2),
    "stage 3": GPT | dict(zero_stage=3),
    "stage 3, llama": LLAMA | dict(zero_stage=3, micro_batch_size=2),
    "tensor": GPT | dict(tp=2),
    "tensor 4, llama sequence": LLAMA | dict(tp=2, sequence_parallel=True, zero_stage=1),
    "tensor, sequence": GPT | dict(tp=4, sequence_parallel=True, micro_batch_size=2),
    "tensor, chunked": GPT | dict(tp=4, sequence_parallel=True, head_chunk=5),
    "tensor, full": GPT | dict(tp=2, recompute="full", zero_stage=3),
    "tensor, sequence, full": GPT | dict(tp=4, sequence_parallel=True, recompute="full"),
    "tensor, selective": GPT | dict(tp=2, recompute="selective", zero_stage=2),
    "1f1b": GPT | dict(pp=4),
    "gpipe": GPT | dict(pp=4, schedule="gpipe"),
    "1f1b, uneven": GPT | dict(pp=4, num_layers=5, layer_split=[1, 2, 2, 0]),
    "interleaved, tensor": GPT | dict(pp=2, virtual_stages=2, tp=2),
    "interleaved, llama": LLAMA | dict(pp=2, virtual_stages=2, zero_stage=3),
    "zb-h1, tensor": GPT | dict(pp=2, schedule="zb-h1", tp=2, sequence_parallel=True),
    "zb-h1": GPT | dict(pp=4, schedule="zb-h1"),
    "zb-h1, stage 2": GPT | dict(pp=2, schedule="zb-h1", zero_stage=2),
    "pipeline, full, stage 1": GPT | dict(pp=2, recompute="full", zero_stage=1),
    "experts": EXPERTS | dict(ep=2),
    "experts, one each": EXPERTS | dict(ep=4, zero_stage=1),
    "experts, tensor": EXPERTS | dict(ep=2, tp=2, zero_stage=2, sequence_parallel=True),
    "experts, full": EXPERTS | dict(ep=2, pp=2, recompute="full", zero_stage=3),
    "experts, whole": EXPERTS | dict(tp=2, router="sinkhorn", aux_loss=0.0, router_topk=2),
}


def layout_of(flags: dict, world: int = 4) -> Layout:
    fields = {name: flags[name] for name in Layout.__dataclass_fields__ if name in flags}
    if "layer_split" in fields:
        fields["layer_split"] = tuple(fields["layer_split"])
    world = 1 if flags.get("alone") else world
    dp = world // flags.get("tp", 1) // flags.get("pp", 1)
    return Layout(**fields, dp=dp)


# --- on the ranks ---------------------------------------------------------------------------------


class Calls(ranks.Collectives):
    """Collectives with the group of each."""

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
    """Counts the bytes of saved tensors: each storage once, and until nothing holds it."""

    def __init__(self, left_out: set[int]):
        self.left_out = left_out
        self.holders = Counter()
        self.now = 0
        self.peak = 0

    def pack(self, tensor):
        return Holder(self, tensor.detach())

    def enter(self, storage) -> None:
        key = storage._cdata
        if key not in self.left_out:
            self.holders[key] += 1
            if self.holders[key] == 1:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)

    def leave(self, storage) -> None:
        key = storage._cdata
        if key not in self.left_out:
            self.holders[key] -= 1
            if not self.holders[key]:
                self.now -= storage.nbytes()


class Holder:
    def __init__(self, kept, tensor):
        self.kept = kept
        self.tensor = tensor
        kept.enter(tensor.untyped_storage())

    def __del__(self):
        self.kept.leave(self.tensor.untyped_storage())


class Table(tuple):
    """The rotary table, which full recomputation keeps beside the saved tensors."""


def storages(tensors) -> dict[int, int]:
    found = (t.untyped_storage() for t in tensors if t is not None)
    return {storage._cdata: storage.nbytes() for storage in found}


def measure(rank: int, variants: list[dict]) -> list[tuple]:
    return [measure_one(dict(flags)) for flags in variants]


def measure_one(flags: dict):
    groups = Groups()
    if not flags.pop("alone", False):
        groups = Groups.make(
            "cpu", 4, flags.get("tp", 1), flags.get("pp", 1), ep=flags.get("ep", 1)
        )
    config = trainer.Config(**flags)
    t = trainer.Trainer(config, torch.device("cpu"), groups)
    for layer in t.expert_layers.values():
        layer.routing.scores = even_scores
    dataset = parity.Synthetic(t.model_config.seq_length, t.model_config.vocab_size)
    parameters = [p for stage in t.stages for p in stage.parameters()]
    held = storages([q for p in parameters for q in (p, local_part(p))])
    kept = Kept(set(held))
    calls = Calls(groups)
    original = gpt.rotary_table

    def rotary_table(*args, **kwargs):
        table = Table(original(*args, **kwargs))
        table.holders = [kept.pack(t) for t in table]
        return table

    gpt.rotary_table = rotary_table
    with calls:
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda holder: holder.tensor):
            t.forward_backward(1, dataset)
        gradients = storages([local_part(p).main_grad for p in parameters])
        t.update(1)
    gpt.rotary_table = original
    o = t.optimizer
    state = storages(
        [*o.masters.values(), *o.low.values(), *o.exp_avg.values(), *o.exp_avg_sq.values()]
    )
    state = {key: size for key, size in state.items() if key not in held}
    memory = dict(
        parameters=sum(storages([q for p in parameters for q in (p, local_part(p))]).values()),
        gradients=sum(gradients.values()),
        optimizer=sum(state.values()),
        activations=kept.peak,
    )
    pipeline_rank = groups.pp.rank() if groups.pp else 0
    return pipeline_rank, calls.counted, memory


def even_scores(logits, training):
    """Every expert gets as many tokens."""
    n, e = logits.shape
    choice = (torch.arange(n).unsqueeze(1) + torch.arange(e)) % e
    return choice.to(logits.dtype)


@pytest.fixture(scope="module")
def measured() -> dict:
    """name -> [(pipeline rank, collectives, bytes) of each rank]"""
    of_ranks = ranks.run(measure, 4, list(LAYOUTS.values()), timeout=120)
    return {name: [of_rank[i] for of_rank in of_ranks] for i, name in enumerate(LAYOUTS)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_collectives_are_those_of_gloo_ranks(measured, name):
    flags = {k: v for k, v in LAYOUTS[name].items() if k != "alone"}
    model = trainer.Config(**flags).model_config()
    layout = layout_of(LAYOUTS[name])
    for rank, counted, _ in measured[name]:
        predicted = Counter()
        for c in collectives(model, layout, SOFTWARE, rank):
            is_dp = c.group == "ep" and layout.ep == layout.ranks
            group = "dp" if is_dp else c.group
            predicted[c.kind, group, c.bytes] += c.count
        assert predicted == counted, f"rank {rank}"
