"""planner.py ppo: seconds of answers by hand, what fits, halves beside all ranks."""

import dataclasses
from types import SimpleNamespace

import pytest
from test_planner import preset, run

from model_config import least_parameters
from planning import ppo
from planning.inputs import H100, TRAIN, Layout

MODEL = preset("llama2-7b")
CASE = SimpleNamespace(gpus=8, batch=64, answers=512, prompt_tokens=512, answer_tokens=1024)
# nothing waits
AT_ONCE = dataclasses.replace(H100, constants=dataclasses.replace(H100.constants, wait=0.0))
BANDWIDTH = H100.memory_bandwidth * H100.constants.memory


def test_a_token_of_one_sequence_reads_all_weights_and_the_cache():
    # K and V of 1,000 tokens: 2 x 32 layers x 4,096 numbers of 2 bytes each
    cache = 2 * 32 * 4096 * 2 * 1000
    seconds = (2 * least_parameters(MODEL) + cache) / BANDWIDTH
    assert ppo.token_seconds(AT_ONCE, MODEL, Layout(), 1, 1000) == pytest.approx(seconds)


def test_many_sequences_wait_for_the_matrix_units():
    b = 4096
    cache = ppo.cache_bytes(MODEL, b * 10) / BANDWIDTH
    flops = 2 * b * least_parameters(MODEL) / (H100.peak * H100.constants.matmul)
    assert ppo.token_seconds(AT_ONCE, MODEL, Layout(), b, 10) == pytest.approx(flops + cache)


def test_each_group_of_a_pipeline_reads_the_weights_again():
    """With as many sequences as stages four stages take as long as one rank, which has all of the
    weights and one group; and each layer waits for two all-reduces of two passes."""
    one, four = (ppo.token_seconds(AT_ONCE, MODEL, Layout(pp=p), p, 0) for p in (1, 4))
    assert four == pytest.approx(one, rel=0.01)
    # eight ranks of tensor parallelism read an eighth
    wide = ppo.token_seconds(AT_ONCE, MODEL, Layout(tp=8), 1, 0)
    assert wide == pytest.approx(one / 8, rel=0.01)
    waits = ppo.token_seconds(H100, MODEL, Layout(tp=8), 1, 0) - wide
    assert waits == pytest.approx(32 * 2 * 2 * H100.constants.wait)


def test_what_does_not_fit_beside_the_weights_is_written_later():
    layout = Layout(dp=8)
    b = ppo.at_a_time(H100, MODEL, layout, CASE)
    held = 2 * least_parameters(MODEL) + ppo.cache_bytes(MODEL, b * 1536)
    assert held <= 0.94 * H100.memory < held + ppo.cache_bytes(MODEL, 1536)
    less = dataclasses.replace(H100, memory=H100.memory / 2)
    assert ppo.at_a_time(less, MODEL, layout, CASE) < 64 <= b
    both = [ppo.writing_seconds(machine, MODEL, layout, CASE) for machine in (H100, less)]
    assert both[0] < both[1]


def test_the_four_ways():
    found = ppo.steps(H100, preset("llama2-70b"), SimpleNamespace(**vars(CASE) | dict(gpus=128)))
    assert [step.ranks for step in found] == ["all", "all", "halves", "halves"]
    assert [step.training.ranks for step in found] == [128, 128, 64, 64]
    for in_training, resharded in (found[:2], found[2:]):
        assert in_training.writing == in_training.training and resharded.writing.pp == 1
        assert resharded.answers <= in_training.answers
        assert resharded.updates == in_training.updates > 0
    # that the answers are written twice as slowly costs what updates at the same time save
    assert found[3].seconds / found[1].seconds == pytest.approx(1, abs=0.1)
    assert TRAIN.fused_attention


@pytest.mark.parametrize(
    "words, message",
    [
        ("--gpus 7", "--gpus 7: two halves need an even number"),
        ("--gpus 8 --answers 100", "--answers 100: must be a multiple of --batch 64"),
        ("--gpus 8 --model llama2-70b", "of which half of h100 has 38 for tensors"),
        ("--gpus 8 --model llama3", "--model llama3: no such preset"),
    ],
)
def test_refusals(words, message, capsys):
    model = "" if "--model" in words else "--model llama2-7b"
    status, out, err = run(f"ppo {model} --gpu h100 {words}", capsys)
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1
