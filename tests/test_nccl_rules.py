"""Layouts by the rules of NCCL, on CPUs; and what breaks each rule."""

import re
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import SMALL, again, difference, on_rank, train_each
from small_run import equal
from test_checkpoint import WIDE, trained
from test_generate import from_training

import fsdp
import pipeline_parallel
from base import groups
from course import ranks
from fsdp import Unit
from sequence_parallel import all_gather

# --- every kind of layout -------------------------------------------------------------------------

ONE = dict(micro_batch_size=1)
PIPELINE = ONE | dict(pp=2, num_layers=4)
# what an encoder sends to all stages of the decoder; a table that the stages sum
T5 = PIPELINE | dict(command="t5.py", model="t5-small", target_length=6)
T5 |= dict(head_dim=8, ffn_hidden_size=48)
# rollout, reference, critic, and two updates in a step
REINFORCEMENT = ONE | dict(command="reinforcement.py", method="ppo", epochs=2, answer_tokens=4)
REINFORCEMENT |= dict(seq_length=16, dropout=0.0)
OVERLAP = dict(ep=2, virtual_stages=2, ep_comm_overlap=True, global_batch_size=8)
OVERLAP |= dict(num_experts=4, num_layers=4, router="bias")
LAYOUTS = {
    2: [
        *[ONE | dict(zero_stage=stage) for stage in (1, 3)],
        dict(tp=2, sequence_parallel=True, recompute="selective"),
        dict(tp=2, vocab_size=257),
        *[PIPELINE | dict(schedule=name) for name in ("gpipe", "1f1b", "zb-h1")],
        PIPELINE | dict(virtual_stages=2),
        PIPELINE | dict(virtual_stages=2, schedule="dualpipe-v"),
        T5 | dict(schedule="zb-h1"),
        dict(cp=2),
        dict(cp=2, cp_kind="all-to-all"),
        dict(cp=2, num_experts=4, fp8="current", fp8_skip=0),
        REINFORCEMENT | dict(zero_stage=3, rollout_tp=2),
        dict(tp=2, sequence_parallel=True, tp_comm_overlap=True),
        ONE | dict(optimizer="muon", zero_stage=2),
        PIPELINE | dict(mtp_layers=1),
    ],
    4: [
        PIPELINE | dict(pp=4),
        ONE | dict(ep=2, num_experts=4, zero_stage=3),
        ONE | dict(data_parallel_replicate_degree=2, zero_stage=3),
        dict(cp=4),
        PIPELINE | OVERLAP,
        dict(tp=4, num_kv_heads=2),
    ],
}
# what the layouts above have one by one
TOGETHER = {
    2: [ONE | dict(zero_stage=stage) for stage in (0, 2)],
    4: [
        PIPELINE | dict(zero_stage=2, schedule="zb-h1"),
        T5 | dict(zero_stage=3),
        PIPELINE | dict(tp=2),
    ],
}


def under_rules(rank, size, queues, variants, steps, mutate=None):
    nccl_rules = rules()
    nccl_rules.MACHINE.queues = queues
    results = on_rank(rank, size, variants, steps, mutate)
    nccl_rules.check_waits()
    return results


def rules():
    """Its import replaces functions of torch, so only ranks that run under the rules do it."""
    import nccl_rules

    return nccl_rules


def train(size, variants, queues=8, mutate=None, timeout=20):
    arguments = size, queues, [SMALL | flags for flags in variants], 2, mutate
    return ranks.run(under_rules, size, *arguments, backend="nccl-rules", timeout=timeout)[0]


@pytest.mark.parametrize(
    "size, queues, layouts",
    [
        *[(2, 8, LAYOUTS), (4, 8, LAYOUTS), (2, 1, LAYOUTS), again(4, 1, LAYOUTS)],
        *[again(2, 8, TOGETHER), again(4, 8, TOGETHER), again(4, 1, TOGETHER)],
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_layouts(size, queues, layouts):
    """No rule is broken, and every number is that of gloo, to the last bit. Pipelines of two ranks
    have one queue, where more is held up."""
    variants = [dict(global_batch_size=4) | flags for flags in layouts[size]]
    if size == 2 or queues == 1:
        variants = [flags for flags in variants if ("pp" in flags) == (queues == 1)]
    on_gloo = train_each(size, variants, steps=2)
    for flags, result, expected in zip(variants, train(size, variants, queues), on_gloo):
        assert max(difference(result, expected).values()) == 0, flags


def each(rank, function, arguments):
    """function(rank, *of) for each `of` in arguments."""
    results = [function(rank, *of) for of in arguments]
    if dist.get_backend() == "nccl-rules":
        rules().check_waits()
    return results


def on_both(size, function, arguments):
    """What the first rank finds under the rules, and on gloo."""
    backends = "nccl-rules", "gloo"
    return [ranks.run(each, size, function, arguments, backend=name)[0] for name in backends]


def test_samples_of_a_model_in_training():
    """Tokens, under tensor, pipeline and context parallelism and ZeRO-3."""
    flags = dict(model="gpt2", num_layers=4, hidden_size=32, num_heads=4, seq_length=16)
    flags |= dict(vocab_size=61, global_batch_size=8, micro_batch_size=1, device="cpu")
    layouts = [
        dict(tp=2, sequence_parallel=True),
        dict(pp=2),
        dict(cp=2, ep=2, zero_stage=3, num_experts=4),
    ]
    found, expected = on_both(2, from_training, [([flags | layout for layout in layouts],)])
    assert found == expected


def test_a_save_and_a_resume(tmp_path):
    """Losses, weights and moments, of a checkpoint that another layout loads."""
    saved = 2, WIDE | dict(zero_stage=1, tp=1), [None], str(tmp_path), 1
    resumed = 2, WIDE | dict(tp=2, sequence_parallel=True), [tmp_path], None, 1
    found, expected = on_both(2, trained, [saved, resumed])
    for [(losses, tensors)], [(expected_losses, expected_tensors)] in zip(found, expected):
        assert losses == expected_losses
        assert equal(tensors, expected_tensors)


# --- what breaks a rule ---------------------------------------------------------------------------


def attempt(rank, function, queues):
    """What a rank that runs function(rank) is told."""
    nccl_rules = rules()
    nccl_rules.MACHINE.queues = queues
    # its connections and buffers
    dist.all_reduce(torch.zeros(1))
    try:
        function(rank)
        nccl_rules.check_waits()
    except nccl_rules.RuleError as e:
        return str(e)
    return "no rule is broken"


def by_tags(rank):
    """Messages that gloo pairs by their tags."""
    x = torch.full((2,), 1.0), torch.full((3,), 2.0)
    if rank == 0:
        works = [dist.isend(x[k], 1, tag=k) for k in (0, 1)]
    else:
        works = [dist.irecv(x[k], 0, tag=k) for k in (1, 0)]
    for work in works:
        work.wait()


def both_send_first(rank):
    """As the two ends of a pipeline would sum a tied embedding, without a message before."""
    x = torch.ones(2)
    sending = dist.isend(x, 1 - rank)
    dist.irecv(torch.empty(2), 1 - rank).wait()
    sending.wait()


def other_groups_first(rank):
    """Their hosts meet in the first collective of each group."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    works = [dist.all_reduce(torch.ones(2), group=groups[k - rank], async_op=True) for k in (0, 1)]
    for work in works:
        work.wait()


def batch_or_collective_first(rank):
    """Messages that start together are in the group's stream, as its collectives are."""
    ops = [dist.P2POp(dist.isend, torch.ones(2), 1 - rank)]
    ops.append(dist.P2POp(dist.irecv, torch.empty(2), 1 - rank))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    starts = [
        lambda: dist.batch_isend_irecv(ops)[0],
        lambda: dist.all_reduce(torch.ones(2), async_op=True),
    ]
    for work in [start() for start in (starts, starts[::-1])[rank]]:
        work.wait()


def other_order(rank):
    x, y = torch.ones(2), torch.ones(3)
    for tensor in (x, y) if rank == 0 else (y, x):
        dist.all_reduce(tensor)


def other_type(rank):
    dist.all_reduce(torch.ones(2, dtype=(torch.float32, torch.float64)[rank]))


def changed_input(rank):
    x = torch.ones(2)
    work = all_gather(torch.empty(4), x, async_op=True)
    x += 1
    work.wait()


def used_output(rank):
    """A buffer that something else uses before the wait."""
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    x.zero_()
    work.wait()


def freed_output(rank):
    """As ZeRO stage 3 frees the parameters of a layer."""
    x = torch.empty(4)
    work = all_gather(x, torch.ones(2), async_op=True)
    x.untyped_storage().resize_(0)
    work.wait()


def no_wait(rank):
    x = torch.ones(2)
    dist.all_reduce(x, async_op=True)
    assert x.isnan().all()


def hidden_behind_another(rank):
    """Rank 0 posts two receives in one stream, then what rank 1 waits for before it sends."""
    x = torch.ones(2)
    to, back = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 0:
        dist.send(x, 1, group=to)
        dist.recv(torch.empty(2), 1, group=back)
        works = [dist.irecv(torch.empty(2), 1, group=back) for _ in range(2)]
        works.append(dist.isend(x, 1, group=to))
    else:
        dist.recv(torch.empty(2), 0, group=to)
        dist.send(x, 0, group=back)
        dist.irecv(torch.empty(2), 0, group=to).wait()
        works = [dist.isend(x, 0, group=back) for _ in range(2)]
    for work in works:
        work.wait()


def another_number(rank):
    """Many parts: their description is longer than what ranks compare."""
    parts = [torch.ones(4, 32) for _ in range(10 + rank)]
    whole = [torch.empty(8, 32) for _ in parts]
    dist.group.WORLD.allgather_into_tensor_coalesced(whole, parts).wait()


def another_room(rank):
    """Rank 1 sends fewer rows than rank 0 has room for."""
    x, y = torch.ones(4), torch.empty(4)
    dist.all_to_all_single(y, x, *(([2, 2], [2, 2]) if rank == 0 else ([2, 2], [1, 3])))


@pytest.mark.parametrize(
    "function, message, queues",
    [
        (by_tags, "message 0 between rank . and rank", 8),
        (both_send_first, "a meeting: the host of rank 0 waits in its first send from 0 to 1", 8),
        (other_groups_first, "a meeting: the host of rank . waits in its first all-reduce", 8),
        (batch_or_collective_first, "does not end", 8),
        (other_order, "another order: rank .* runs all-reduce SUM .[23].", 8),
        (another_number, "another order: rank 0 .* runs all-gathers", 8),
        (another_room, "another size: rank 1 .* sends 1 rows, and rank 0 has room for 2", 8),
        (other_type, "another order: rank 0 .* float32, and rank 1 .* float64", 8),
        (changed_input, "its input or output has changed", 8),
        (used_output, "its input or output has changed", 8),
        (freed_output, "its input or output has changed", 8),
        (no_wait, "nobody waits for all-reduce SUM", 8),
        (hidden_behind_another, "no rule is broken", 8),
        (hidden_behind_another, "holds up the computation", 1),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_breaks_a_rule(function, message, queues):
    told = ranks.run(attempt, 2, function, queues, backend="nccl-rules", timeout=2)
    assert any(re.search(message, line) for line in told), told


def all_reduce_warms_up():
    """As it was once: communicators used by a collective first, and two receives ahead."""
    replaced = mock.Mock(wraps=dist)
    replaced.send = replaced.recv = lambda x, peer, group: dist.all_reduce(x, group=group)
    groups.dist = replaced
    two_ahead()


def no_first_messages():
    """Nothing has gone through a link before the step; the tied embedding's copies send first."""
    groups.dist = mock.Mock(wraps=dist)
    groups.dist.send = groups.dist.recv = lambda x, peer, group: None


def two_ahead():
    pipeline_parallel.add_transfers = partial(pipeline_parallel.add_transfers, ahead=2)


def no_wait_for_parameters():
    finish = Unit.finish_all_gather

    def finish_at_once(unit):
        unit.gathering = unit.gathering[0], mock.Mock()
        finish(unit)

    Unit.finish_all_gather = finish_at_once


def rank_1_reduces_from_the_first_layer():
    if dist.get_rank() == 1:
        fsdp.reversed = iter


@pytest.mark.parametrize(
    "mutate, p, flags, queues, message",
    [
        (all_reduce_warms_up, 2, dict(schedule="1f1b"), 8, "a meeting"),
        (no_first_messages, 4, dict(schedule="1f1b"), 8, "a meeting|nobody posts the match"),
        (two_ahead, 2, dict(schedule="gpipe"), 1, "holds up the computation|cannot start|not end"),
        (no_wait_for_parameters, 2, dict(pp=1, zero_stage=3), 8, "nobody waits for all-gather"),
        (rank_1_reduces_from_the_first_layer, 2, dict(pp=1), 8, "another order: rank . of a group"),
    ],
)
def test_what_breaks_a_step(mutate, p, flags, queues, message):
    flags = PIPELINE | dict(pp=p) | flags
    with pytest.raises(RuntimeError, match=message):
        train(p, [flags], queues, mutate, timeout=3)
