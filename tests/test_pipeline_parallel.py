import weakref

import pytest
import torch
from parity import LLAMA, SMALL, Synthetic, again, check, differs, train
from small_run import equal
from test_checkpoint import LAYOUTS as CHECKPOINT_LAYOUTS
from test_checkpoint import WIDE, trained

import gpt
import pipeline_parallel
import schedules
import sharding
from base.groups import Groups
from base.model_config import GPTConfig
from course import ranks
from course.demo import meta_model
from course.training_commands import config_of
from pipeline_parallel import layers_of_stages
from planning import as_rank
from run.pretraining import Config
from schedules import Placement
from sharding import sharding_of
from train import Trainer

CONFIG = GPTConfig(num_layers=8, hidden_size=32, num_heads=4, seq_length=16, vocab_size=61)


def test_layer_split_by_hand():
    assert layers_of_stages(8, Placement(2)) == [range(0, 4), range(4, 8)]
    uneven = [range(0, 1), range(1, 3), range(3, 5), range(5, 5)]
    assert layers_of_stages(5, Placement(2, 2), [1, 2, 2, 0]) == uneven


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            (8, Placement(3)),
            "num_layers 8: must be divisible by pp 3 times virtual_stages 1, unless layer_split is "
            "given; 6 or 9 would fit",
        ),
        ((8, Placement(16)), "16 would fit"),
        ((8, Placement(2), [4, 5]), "add up to num_layers 8; these are 2 that add up to 9"),
        ((8, Placement(2), [8]), "must be 2 numbers"),
        ((8, Placement(2), [9, -1]), "none below 0"),
        ((8, Placement(3), [4, 0, 4]), "leaves pipeline rank 1 (stages [1]) without a layer"),
    ],
)
def test_splits_that_cannot_be(arguments, words):
    with pytest.raises(ValueError) as e:
        layers_of_stages(*arguments)
    assert words in str(e.value)


def test_stages_have_the_parameters_of_the_model_under_its_names():
    with torch.device("meta"):
        whole = {n: p.shape for n, p in gpt.GPT(CONFIG).named_parameters()}
    # two ranks of two stages each
    stages = []
    names = []
    for rank in range(2):
        of_rank = pipeline_parallel.apply(meta_model(CONFIG), rank, Placement(2, 2))
        names += [n for n, _ in sharding.named_parameters(*of_rank)]
        stages += of_rank
    # the tied matrix on both ranks
    assert set(names) == set(whole) and len(names) == len(whole) + 1
    blocks = [sorted(stage.blocks) for stage in stages]
    assert blocks == [["0", "1"], ["4", "5"], ["2", "3"], ["6", "7"]]
    first = stages[0]
    last = stages[-1]
    for stage in (first, last):
        sharding.init(stage, 0, "cpu", torch.float32)
    # their initial values are equal
    assert torch.equal(first.embedding.tokens.weight, last.head.output.weight)
    assert sharding_of(last.head.output.weight).copy_of == "embedding.tokens.weight"


class Kept:
    def __init__(self, tensor):
        self.tensor = tensor


def activation_bytes(rank, flags):
    """For each chunk, what one micro-batch keeps; and the most that was kept at once in a step."""
    fields = dict(num_layers=8, hidden_size=64, precision="fp32", micro_batch_size=1, pp=2)
    config = Config(**SMALL | fields | flags)
    t = Trainer(config, torch.device("cpu"), Groups.make("cpu", 2, 1, 2))
    refs = []
    one = {}
    most = 0
    parameters = {p.untyped_storage().data_ptr() for p in t.model.parameters()}

    def alive():
        nonlocal refs
        refs = [ref for ref in refs if ref() is not None]
        storages = [ref().tensor.untyped_storage() for ref in refs]
        storages = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(size for address, size in storages.items() if address not in parameters)

    def pack(tensor):
        holder = Kept(tensor.detach())
        refs.append(weakref.ref(holder))
        return holder

    def run(schedule, forward, *args, original=t.pipeline.run):
        def watched(chunk, k, x):
            nonlocal most
            before = alive()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
                y = forward(chunk, k, x)
            most = max(most, alive())
            one.setdefault(chunk, alive() - before)
            return y

        original(schedule, watched, *args)

    t.pipeline.run = run
    t.forward_backward(1, Synthetic(16, 61))
    # nothing outlives the step
    assert alive() == 0
    counts = [0] * len(t.stages)
    expected = 0
    for a in t.schedule[rank]:
        counts[a.chunk] += {"F": 1, "B": -1, "I": -1, "W": 0}[a.op]
        expected = max(expected, sum(c * one[chunk] for chunk, c in enumerate(counts) if c))
    return most, expected, schedules.in_flight(t.schedule)[rank]


@pytest.mark.parametrize(
    "flags, in_flight",
    [
        (dict(schedule="gpipe"), [8, 8]),
        (dict(schedule="1f1b"), [2, 1]),
        (dict(schedule="zb-h1"), [2, 1]),
        (dict(virtual_stages=2), [5, 3]),
        (dict(virtual_stages=4), [9, 7]),
    ],
    ids=str,
)
def test_activations_in_flight(flags, in_flight):
    """Peak bytes of activations on each rank are the schedule's count times a micro-batch's."""
    for (most, expected, count), promised in zip(ranks.run(activation_bytes, 2, flags), in_flight):
        assert count == promised and abs(most / expected - 1) < 0.05, (most, expected)


def what_is_sent(rank, p, flags):
    """The most tensors alive at once that were handed to a send, how many were sent, how many
    outlive the step, and how often I deferred weight gradients."""
    fields = dict(num_layers=8, micro_batch_size=1, global_batch_size=16, pp=p)
    config = Config(**LLAMA | fields | flags)
    t = Trainer(config, torch.device("cpu"), Groups.make("cpu", p, 1, p))
    refs = []
    most = 0
    deferred = 0
    send = t.pipeline.channels.send
    defer = t.pipeline.defer

    def watched(x, *args):
        nonlocal most
        refs.append(weakref.ref(x))
        most = max(most, sum(ref() is not None for ref in refs))
        return send(x, *args)

    def counted(chunk, gradients):
        nonlocal deferred
        deferred += gradients is not None
        defer(chunk, gradients)

    t.pipeline.channels.send = watched
    t.pipeline.defer = counted
    t.forward_backward(1, Synthetic(16, 61))
    return most, len(refs), sum(ref() is not None for ref in refs), deferred


@pytest.mark.parametrize(
    "p, flags",
    [(4, dict(schedule="1f1b")), (2, dict(virtual_stages=2)), (2, dict(schedule="zb-h1"))],
    ids=str,
)
def test_what_was_sent_is_let_go(p, flags):
    """16 micro-batches, but never more than a few outputs and gradients at once; none after the
    step."""
    for rank, (most, sent, left, deferred) in enumerate(ranks.run(what_is_sent, p, p, flags)):
        assert sent >= 16 and most <= 2 * p + 2 and left == 0, (rank, most, sent, left)
        assert deferred == (16 if flags.get("schedule") == "zb-h1" else 0)


# --- messages that tensor-parallel ranks share ----------------------------------------------------


def test_each_rank_sends_its_part():
    """In a middle stage an activation and a gradient leave and arrive for each micro-batch. Each
    has b s h / t numbers. The ranks gather what arrives, without sequence parallelism."""
    flags = dict(num_layers=3, pp=3, tp=2, micro_batch_size=2, precision="fp32", dropout=0.0)
    m, part, t = 4, 2 * 16 * 32 * 4 // 2, 2
    counts = []
    for sequence in (False, True):
        config = config_of(SMALL | flags | dict(sequence_parallel=sequence))
        report = as_rank.report(config, Trainer, 2, 6)
        counts.append({(c.kind, c.group, c.bytes): c.count for c in report.collectives})
    for found in counts:
        assert found["send", "pp", part] == found["receive", "pp", part] == 2 * m
    # beside attention and MLP: g in forward and for the weight gradients, and g-bar's adjoint
    of_layer = 6 * m
    assert counts[0]["all-gather", "tp", t * part] == 2 * m
    assert counts[1]["all-gather", "tp", t * part] == of_layer


def whole_messages():
    pipeline_parallel.message_shape = lambda shape, group: shape


def part_of_the_next_rank():
    original = pipeline_parallel.scatter

    def scatter(x, group):
        return original(x.roll(x.numel() // group.size()) if group else x, group)

    pipeline_parallel.scatter = scatter


SHARED = dict(world=4, steps=1, tp=2, pp=2, micro_batch_size=2)


def test_a_wrong_part_is_seen():
    differs(train(**SHARED, mutate=part_of_the_next_rank), train(steps=1))


@pytest.mark.repetition
def test_parts_change_no_bit():
    layout = SHARED | dict(schedule="zb-h1", num_layers=3, layer_split=[2, 1])
    parts, whole = train(**layout), train(**layout, mutate=whole_messages)
    assert parts.losses == whole.losses
    assert all(torch.equal(x, whole.parameters[name]) for name, x in parts.parameters.items())


def weights_wait(rank):
    """I leaves the weight gradients to W; together they are B."""
    with torch.device("meta"):
        model = gpt.GPT(CONFIG)
    sharding.init(model, 0, "cpu", torch.float64)
    pipeline_parallel.split_backward(model)
    tokens = torch.arange(32).view(2, 16) % 61
    model(tokens, tokens).sum().backward()
    together = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    deferred = []
    for p in model.parameters():
        p.deferred = deferred
    model(tokens, tokens).sum().backward()
    waiting = {n for n, p in model.named_parameters() if p.grad is None}
    for weight, grad_output, x in deferred:
        weight.deferred = None
        weight.backward(grad_output.t() @ x)
    assert all(
        torch.allclose(p.grad, together[n], rtol=1e-12, atol=1e-14)
        for n, p in model.named_parameters()
    )
    return waiting, len(deferred)


def test_weight_gradients_wait():
    waiting, deferred = ranks.run(weights_wait, 1)[0]
    # the tied matrix has the embedding's gradient already
    assert deferred == 8 * 6 + 1 and len(waiting) == 8 * 6
    matrices = ("query", "key", "value", "output", "up", "down")
    assert all(n.endswith(tuple(f"{matrix}.weight" for matrix in matrices)) for n in waiting)


def test_checkpoints_load_under_any_layout(tmp_path):
    """From a pipeline to one device, to tensor parallelism, to another pipeline; the tied matrix is
    saved once."""
    base, folder = WIDE | dict(model="gpt2", num_layers=4), str(tmp_path)
    saved = merged(ranks.run(trained, 2, 2, base | dict(pp=2), [None], folder, 2))
    for world, layout in (*CHECKPOINT_LAYOUTS[:2], (2, dict(pp=2, virtual_stages=2)), (2, ZB_V)):
        loaded = merged(ranks.run(trained, world, world, base | layout, [folder], None, 0))
        assert equal(saved, loaded), (world, layout)
    payload = sum(f.stat().st_size for f in tmp_path.glob("*/*.safetensors"))
    assert payload < sum(t.numel() * t.element_size() for t in saved.values()) + 160_000


# --- a V ------------------------------------------------------------------------------------------

ZB_V = dict(schedule="zb-v", pp=2, virtual_stages=2)
DUALPIPE_V = dict(schedule="dualpipe-v", pp=2, virtual_stages=2, micro_batch_size=1)
SEQUENCE = dict(tp=2, sequence_parallel=True)
UNEVEN = dict(layer_split=[0, 1, 3, 0])
# The first is tied.
OF_V = {
    "gpt": SMALL | dict(num_layers=4),
    "llama": LLAMA | dict(num_layers=4),
    "mtp": LLAMA | dict(num_layers=4, mtp_layers=1),
    "tied mtp": SMALL | dict(num_layers=4, mtp_layers=1),
    "experts": LLAMA | dict(num_layers=4, num_experts=4, router="topk", global_batch_size=16),
}
V_OF_4 = [
    SEQUENCE,
    dict(zero_stage=1),
    dict(zero_stage=2) | UNEVEN,
    dict(cp=2),
    dict(cp=2, cp_kind="all-to-all"),
]


@pytest.mark.parametrize(
    "model, world, layouts",
    [
        ("gpt", 2, [ZB_V | UNEVEN, DUALPIPE_V | dict(recompute="full")]),
        ("gpt", 4, [ZB_V | dict(zero_stage=3)]),
        again("llama", 2, [ZB_V | dict(recompute="selective", head_chunk=4), DUALPIPE_V | UNEVEN]),
        again("gpt", 4, [v | more for v in (ZB_V, DUALPIPE_V) for more in V_OF_4]),
        again("llama", 4, [DUALPIPE_V | dict(zero_stage=3), ZB_V | dict(tp=2), ZB_V | dict(cp=2)]),
        again("experts", 4, [ZB_V | dict(ep=2), DUALPIPE_V | dict(ep=2, zero_stage=3)]),
        again("experts", 4, [DUALPIPE_V | dict(ep=2, ep_comm_overlap=True)]),
        again("mtp", 2, [ZB_V, DUALPIPE_V | UNEVEN]),
        again("tied mtp", 4, [ZB_V | dict(zero_stage=3), DUALPIPE_V | SEQUENCE]),
        again("gpt", 8, [v | SEQUENCE | dict(zero_stage=3) for v in (ZB_V, DUALPIPE_V)]),
        again("gpt", 4, [v | dict(pp=4, layer_split=[0, 1] * 4) for v in (ZB_V, DUALPIPE_V)]),
    ],
    ids=str,
)
def test_a_v(model, world, layouts):
    check(world, layouts, OF_V[model] | dict(micro_batch_size=1))


def one_copy_learns():
    pipeline_parallel.share_tied = lambda stages: None


def one_copy_has_a_gradient():
    pipeline_parallel.Pipeline.sum_tied = lambda self: None


@pytest.mark.repetition
@pytest.mark.parametrize("mutate", [one_copy_learns, one_copy_has_a_gradient])
def test_ties_of_a_v_are_seen(mutate):
    base = OF_V["gpt"]
    differs(train(2, base=base, mutate=mutate, **ZB_V), train(base=base))


def merged(of_ranks: list[list]) -> dict:
    """The tensors of all ranks, in one dictionary."""
    return {n: x for ((_, tensors),) in of_ranks for n, x in tensors.items()}


def evaluation(rank, world, flags):
    config = Config(**SMALL | dict(num_layers=4, dropout=0.0) | flags)
    groups = Groups()
    if world > 1:
        groups = Groups.make("cpu", world, config.tp, config.pp)
    t = Trainer(config, torch.device("cpu"), groups)
    # 7 sequences: some ranks have less to do than others
    return t.task.evaluate(Synthetic(16, 61), 7)


@pytest.mark.parametrize("model", [{}, dict(num_experts=4)], ids=["dense", "experts"])
def test_evaluation(model):
    """Also where ranks exchange parameters or tokens while they evaluate."""
    (loss,) = ranks.run(evaluation, 1, 1, model)
    across = dict(ep=2) if model else dict(zero_stage=3)
    for world, flags in (
        (2, dict(pp=2)),
        (2, ZB_V),
        (4, dict(pp=2, virtual_stages=2, micro_batch_size=2) | across),
        (4, dict(pp=2, tp=2, sequence_parallel=True, schedule="zb-h1")),
    ):
        flags |= model
        assert all(abs(same - loss) < 1e-12 for same in ranks.run(evaluation, world, world, flags))
