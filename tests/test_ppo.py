"""planner.py ppo: seconds of answers by hand, what fits, halves beside all ranks."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
from test_planner import preset, run

from model_config import least_parameters
from planning import ppo
from planning.inputs import H100, Layout

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
    numbers = least_parameters(MODEL) - MODEL.vocab_size * MODEL.hidden_size
    flops = 2 * b * numbers / (H100.peak * H100.constants.matmul)
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
    each = ppo.cache_bytes(MODEL, 1536)
    # 64 sequences for each of eight ranks
    assert [ppo.at_a_time(MODEL, layout, n * each, CASE) for n in (-1, 0.9, 64.5)] == [0, 0, 64]
    found = [ppo.writing_seconds(H100, MODEL, layout, n * each, CASE) for n in (0, 16, 64, 99)]
    assert found[0] == math.inf and found[1] > 1.5 * found[2] and found[2] == found[3]


def test_experts_that_a_token_does_not_meet_are_read_and_not_multiplied():
    model = preset("mixtral-8x7b")
    b = 2**14
    cache = ppo.cache_bytes(model, b) / BANDWIDTH
    seconds = ppo.token_seconds(AT_ONCE, model, Layout(), b, 1) - cache
    flops = seconds * H100.peak * H100.constants.matmul / b
    # 12.9 of 46.7 billion parameters, less the embedding
    assert flops / 2 == pytest.approx(12.75e9, rel=0.01)


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


@pytest.mark.parametrize(
    "words, message",
    [
        ("--gpus 7", "--gpus 7: two halves of whole nodes are needed; 6 or 8 would fit"),
        ("--gpus 24", "--gpus 24: two halves of whole nodes are needed; 16 or 32 would fit"),
        ("--gpus 8 --answers 100", "--answers 100: must be a multiple of --batch 64; 64 or 128"),
        ("--gpus 8 --model gpt2-xl", "has 1024 learned positions; fewer would fit"),
        ("--gpus 64 --memory 3", "GPUs"),
        ("--gpus 8 --model llama2-70b", "of which half of h100 has 38 for tensors"),
        ("--gpus 8 --model llama3", "--model llama3: no such preset"),
    ],
)
def test_refusals(words, message, capsys):
    model = "" if "--model" in words else "--model llama2-7b"
    status, out, err = run(f"ppo {model} --gpu h100 {words}", capsys)
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1
