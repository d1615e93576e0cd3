"""A batch that grows: the numbers of samples, every layout against one device, and a run that goes
on in the middle of it."""

from pathlib import Path

import parity
import processes
import pytest
import small_run
import torch
from parity import SMALL, again, check, differs, same, train
from small_run import numbers_of, run, tensors_of

import sharding
import train as trainer
from course.training_commands import config_of
from planning import as_rank
from run.config import ConfigError, RunConfig
from run.rules import validate
from run.task import Task, batch_after

# three steps: 4, 6 and 8 sequences
RAMP = dict(rampup_batch_size=[4, 2, 8], num_layers=4)
SIZES = [4, 6, 8]
PP = dict(pp=2, micro_batch_size=1)
INTERLEAVED = dict(pp=2, virtual_stages=2, micro_batch_size=1)
FP8 = dict(fp8="delayed", fp8_skip=0, dropout=0.0)


def sizes_of(sizes: range, rampup: int, steps: int, taken: int = 0) -> list[int]:
    return [len(batch_after(n, taken, sizes, rampup)) for n in range(steps)]


def by_megatron(start: int, increment: int, last: int, rampup: int, steps: int) -> list[int]:
    """One step after the other, by the number of samples that are taken."""
    found, taken = [], 0
    for _ in range(steps):
        grown = taken * ((last - start) // increment) // rampup
        found.append(last if taken > rampup else start + grown * increment)
        taken += found[-1]
    return found


@pytest.mark.parametrize("ramp", [(4, 2, 8, 8), (32, 32, 128, 700), (1, 1, 9, 1), (2, 3, 11, 50)])
def test_sizes_of_steps(ramp):
    start, increment, last, rampup = ramp
    sizes = range(start, last + 1, increment)
    expected = by_megatron(*ramp, 60)
    assert sizes_of(sizes, rampup, 60) == expected and expected[-1] == last
    # each step takes what comes next, and a run that goes on takes the same
    taken = [0]
    for n in range(60):
        step = batch_after(n, 0, sizes, rampup)
        assert step.start == taken[-1]
        taken.append(step.stop)
    for done in (1, 2, 5, 40):
        rest = [batch_after(n, taken[done], sizes, rampup) for n in range(10)]
        assert rest == [batch_after(done + n, 0, sizes, rampup) for n in range(10)]


def test_by_hand():
    assert sizes_of(range(4, 9, 2), 8, 4) == [4, 6, 8, 8]
    assert sizes_of(range(2, 7, 2), 12, 7) == [2, 2, 2, 4, 4, 6, 6]
    assert sizes_of(range(8, 9, 8), 0, 3) == [8, 8, 8]


# --- the gate -------------------------------------------------------------------------------------

LAYOUTS = [
    (2, [INTERLEAVED, dict(zero_stage=2)]),
    again(2, [PP, dict(tp=2, sequence_parallel=True), dict(zero_stage=3), dict(cp=2, dropout=0.0)]),
    again(2, [PP | dict(schedule="zb-h1"), INTERLEAVED | dict(schedule="zb-v")]),
    again(4, [dict(tp=2, zero_stage=2), PP | dict(zero_stage=1), PP | dict(tp=2), PP | dict(cp=2)]),
    again(4, [PP | dict(num_experts=4, ep=2), PP | dict(num_experts=4, zero_stage=2)]),
    again(2, [dict(cp=2, cp_kind="all-to-all", dropout=0.0)]),
    again(2, [PP | FP8 | dict(fp8="current"), FP8 | dict(micro_batch_size=1, zero_stage=2)]),
    again(2, [dict(optimizer="muon"), PP | dict(recompute="full", head_chunk=4)]),
]


@pytest.mark.parametrize("world, layouts", LAYOUTS)
def test_every_layout_is_one_device(world, layouts):
    check(world, layouts, SMALL | RAMP)


@pytest.mark.repetition
def test_schedules_that_need_many_micro_batches():
    check(2, [INTERLEAVED | dict(schedule="dualpipe-v")], SMALL | RAMP)


def schedule_of_the_start():
    lists = RunConfig.pipeline_lists
    RunConfig.pipeline_lists = lambda config, m: lists(config, config.batch_sizes.start)


@pytest.mark.repetition
def test_a_schedule_for_each_size_is_needed():
    broken = train(2, mutate=schedule_of_the_start, **RAMP | PP)
    differs(broken, train(**RAMP))


def batches_of_one_size():
    Task.global_batch = lambda task, step: range((step - 1) * 8, step * 8)


@pytest.mark.repetition
def test_the_sizes_matter():
    one_size = train(mutate=batches_of_one_size, **RAMP)
    differs(one_size, train(**RAMP))
    same(one_size, train(num_layers=4, micro_batch_size=2))


def test_equals_runs_of_each_size_joined():
    grown, joined = (parity.trainer_of(micro_batch_size=2, **ramp) for ramp in (RAMP, RAMP))
    joined.config.rampup_batch_size = None
    taken = 0
    for n, size in enumerate(SIZES):
        joined.config.global_batch_size = size
        joined.task.go_on(n, taken)
        taken += size
        norms = [parity.step(each, n + 1) for each in (grown, joined)]
        assert norms[0].equal(norms[1])
    parameters = [sharding.named_parameters(*each.stages) for each in (grown, joined)]
    for (name, a), (_, b) in zip(*parameters, strict=True):
        assert a.equal(b), name


# --- the command ----------------------------------------------------------------------------------

FLAGS = small_run.flags(num_layers=2, global_batch_size=8, warmup_steps=0, precision="fp64")
FLAGS += small_run.as_flags(lr=0.003, min_lr=0.003)
FLAGS += "--data a.txt --rampup-batch-size 2 2 12".split()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(" ".join(f"a{n}" for n in range(4000)))


def ends_as(out: str, other: str) -> None:
    assert [line["tokens"] // 32 for line in numbers_of(out)] == [2, 4, 8, 14, 22, 30, 38]
    (losses, losses_of_other) = ([x["loss"] for x in numbers_of(run)] for run in (out, other))
    assert losses == pytest.approx(losses_of_other, rel=1e-12)
    weights = tensors_of(other)
    for name, tensor in tensors_of(out).items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-10, atol=1e-12)


def test_a_run_goes_on_in_the_middle(here):
    """With other micro-batches."""
    assert run(*FLAGS, "--steps", 7, "--out", "whole") == 0
    assert run(*FLAGS, "--steps", 3, "--out", "parts") == 0
    assert run("--resume", "--steps", 7, "--out", "parts", "--micro-batch-size", 1) == 0
    ends_as("parts", "whole")


@pytest.mark.repetition
def test_a_run_goes_on_under_another_layout(here):
    assert run(*FLAGS, "--steps", 7, "--out", "whole") == 0
    assert run(*FLAGS, "--steps", 3, "--out", "parts") == 0
    words = "train.py --resume --steps 7 --out parts --pp 2 --zero-stage 1".split()
    done = processes.run(words, world=4)
    assert done.returncode == 0, done.stderr
    ends_as("parts", "whole")


# --- what is refused ------------------------------------------------------------------------------

OVERLAP = INTERLEAVED | dict(num_experts=4, ep=2, ep_comm_overlap=True, router="topk")


@pytest.mark.parametrize(
    "world, flags, words",
    [
        (1, dict(rampup_batch_size=[4, 2]), "4 2: must be three numbers of 1 or more: START"),
        (1, dict(rampup_batch_size=[4, 0, 8]), "4 0 8: must be three numbers of 1 or more"),
        (1, dict(rampup_batch_size=[8, 2, 8]), "START must be below --global-batch-size 8"),
        (
            1,
            dict(rampup_batch_size=[2, 4, 8]),
            r"INCREMENT must divide 6, .*; \[2, 3, 6\] would fit",
        ),
        (4, RAMP, "divisible by 4, micro-batches of all ranks; for 2, 4 would fit"),
        (2, RAMP | dict(micro_batch_size=2), "divisible by 4, .*; for 2, 4 would fit"),
        (
            4,
            INTERLEAVED | dict(rampup_batch_size=[6, 1, 8]),
            "divisible by 4, micro-batches of all ranks; for 6, 4 or 8 would fit",
        ),
        (
            2,
            INTERLEAVED | dict(schedule="dualpipe-v", rampup_batch_size=[2, 2, 8]),
            "2 2 8: START must make 2 x --pp 2 micro-batches for each pipeline; 4 would fit",
        ),
        (4, OVERLAP | dict(rampup_batch_size=[4, 4, 8]), "START must make 2 x --pp 2 .*; 8 would"),
    ],
)
def test_what_does_not_fit_is_refused(world, flags, words):
    with pytest.raises(ConfigError, match=f"^--rampup-batch-size .*{words}"):
        validate(config_of(SMALL | dict(num_layers=4) | flags), world)


@pytest.mark.repetition
def test_a_prediction_is_of_the_last_size():
    ramp, whole = (
        as_rank.report(config_of(SMALL | PP | ramp), trainer.Trainer, 1, 4)
        for ramp in (RAMP, dict(num_layers=4))
    )
    assert ramp == whole and ramp.micro_batches == 4
