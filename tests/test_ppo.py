"""planner.py ppo: seconds of answers, what fits, halves beside all ranks."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
from test_planner import preset

from planning import ppo
from planning.inputs import H100, Layout
from planning.serving import ENGINES, Serving

MODEL = preset("llama2-7b")
CASE = SimpleNamespace(gpus=8, batch=64, answers=512, prompt_tokens=512, answer_tokens=1024)


def test_answers_are_written_in_steps_of_serving():
    """512 answers on 8 tensor-parallel ranks: a forward of the prompts, then all at a time."""
    layout = Layout(tp=8)
    found = ppo.writing_seconds(H100, MODEL, layout, 60e9, CASE)
    prompts = dataclasses.replace(MODEL, seq_length=512)
    first = ppo.forward_seconds(H100, prompts, layout, 512)
    step = Serving(H100, ENGINES["graphs"], MODEL, tp=8).step(512, 512 + 1024 / 2)
    assert found == pytest.approx(first + 1024 * step)
    # where half of them fit at a time, weights are read twice as often
    halves = ppo.writing_seconds(H100, MODEL, layout, 256 * ppo.cache_bytes(MODEL, 1536) / 8, CASE)
    step = Serving(H100, ENGINES["graphs"], MODEL, tp=8).step(256, 512 + 1024 / 2)
    assert halves == pytest.approx(first + 2 * 1024 * step)


def test_what_does_not_fit_beside_the_weights_is_written_later():
    layout = Layout(dp=8)
    each = ppo.cache_bytes(MODEL, 1536)
    # 64 sequences for each of eight ranks
    assert [ppo.at_a_time(MODEL, layout, n * each, CASE) for n in (-1, 0.9, 64.5)] == [0, 0, 64]
    found = [ppo.writing_seconds(H100, MODEL, layout, n * each, CASE) for n in (0, 16, 64, 99)]
    assert found[0] == math.inf and found[1] > 1.5 * found[2] and found[2] == found[3]


def test_the_four_ways():
    found = ppo.steps(H100, preset("llama2-70b"), SimpleNamespace(**vars(CASE) | dict(gpus=128)))
    assert {step.ranks for step in found} == {"all", "halves"}
    for ranks, gpus in (("all", 128), ("halves", 64)):
        *_, last = [step for step in found if step.ranks == ranks]
        assert last.training.ranks == last.writing.ranks == gpus and last.writing.pp == 1
        assert min(last.answers, last.scores, last.updates) > 0
    # under stage 3 the layout of training writes nothing
    tight = dataclasses.replace(H100, memory=10 * 2**30)
    found = ppo.steps(tight, MODEL, SimpleNamespace(**vars(CASE) | dict(gpus=64)))
    assert [step.training.zero_stage for step in found] == [3, 3]
    assert all(0 < step.answers < math.inf and step.writing.tp == 8 for step in found)
