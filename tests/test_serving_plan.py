"""planner.py serve and ppo: bytes and seconds by hand, what must grow or shrink, published times,
the frontier, what a step of PPO writes."""

import dataclasses
import importlib
import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_planner import preset, run

from base.model_config import MoEConfig, block_matrices, mlp_matrices, num_mlps
from planning import ppo, serving
from planning.inputs import A100, H100, H200, Layout
from planning.serving import ENGINES, Serving, cache_bytes, fewest_gpus, fitting, frontier

ROOT = Path(__file__).parent.parent
comparison = importlib.import_module("benchmarks.serving_plan")
ROWS = comparison.read()
GPT_3 = preset("gpt3-175b")
GRAPHS = ENGINES["graphs"]
# no kernel takes time to start, no collective waits
AT_ONCE = GRAPHS._replace(read=1.0, layer=0.0, wait=0.0, network_wait=0.0)
READ = GRAPHS.read * H100.memory_bandwidth


def on_h100(model: MoEConfig, tp: int = 1, pp: int = 1, engine=GRAPHS, **fields) -> Serving:
    return Serving(H100, engine, model, tp, pp, **fields)


# --- by hand --------------------------------------------------------------------------------------


def test_bytes_of_gpt_3():
    """96 layers of 96 heads of 128: 2 x 96 x 12,288 numbers of 2 bytes are 4.72 MB a token."""
    assert cache_bytes(GPT_3, 1) == 4_718_592
    found = on_h100(GPT_3, tp=8).bytes(batch=256, tokens=400, budget=2048)
    assert found["cache"] == 4_718_592 * 256 * 400 / 8
    # 12 h² in each layer; embedding and head are one matrix of 50,257 x h
    numbers = 96 * 12 * 12288**2 + 50257 * 12288
    assert found["weights"] == 2 * numbers / 8
    # 2,048 tokens: 3 h whole; q, k, v and 4h twice by rank. 4 bytes of each logit
    activations = 2 * 2048 * (3 * 12288 + (3 + 8) * 12288 / 8) + 4 * 256 * 50257 / 8
    assert found["activations"] == activations


def test_a_window_and_grouped_heads_keep_less():
    mistral = preset("mistral-7b")
    assert mistral.num_kv_heads == 8 and mistral.sliding_window == 4096
    one = on_h100(mistral)
    assert one.bytes(1, 2 * 4096, 1)["cache"] == one.bytes(1, 4096, 1)["cache"] == 2**29
    # bytes of both kinds are counted: int4 has a scale and a zero point for 32 numbers
    int4 = on_h100(mistral, weights="int4").bytes(1, 1, 1)["weights"]
    vocabulary = 2 * mistral.vocab_size * mistral.hidden_size
    matrices = block_matrices(mistral, mistral.num_layers)
    assert int4 == matrices * (16 + 2) / 32 + matrices * 2 / 32 + vocabulary


def test_the_fullest_stage_has_a_layer_more_and_one_end():
    model = dataclasses.replace(preset("llama2-7b"), num_layers=33)
    one, two = (on_h100(model, pp=p).bytes(1, 1, 1)["weights"] for p in (1, 2))
    end = 2 * model.vocab_size * model.hidden_size
    layer = 2 * block_matrices(model, 33) / 33
    assert one == pytest.approx(33 * layer + 2 * end)
    assert two == pytest.approx(17 * layer + end)


def test_a_decoding_step_by_hand():
    """One sequence after 1,000 tokens: it reads all weights and the cache, and multiplies once."""
    one = on_h100(GPT_3, engine=AT_ONCE)
    numbers = 96 * 12 * 12288**2 + 50257 * 12288
    reads = (2 * numbers + 1000 * 4_718_592) / H100.memory_bandwidth
    flops = 2 * numbers + 4 * 1001 * 96 * 12288
    seconds = reads + flops / (H100.peak * H100.constants.matmul)
    norms = 96 * serving.elementwise(H100, AT_ONCE.software, GPT_3, 1, 1)
    assert one.step(1, 1000) == pytest.approx(seconds + norms)
    # .. and these are 1% of it
    assert norms < 0.01 * seconds
    # two all-reduces of a layer: three doublings of the ranks
    eight = on_h100(GPT_3, tp=8)
    waits = GRAPHS._replace(wait=0.0)
    more = eight.step(1, 1000) - eight._replace(engine=waits).step(1, 1000)
    assert more == pytest.approx(96 * 2 * 3 * GRAPHS.wait)
    # 16 ranks are 3 doublings in a node, and 2 nodes
    sixteen = on_h100(GPT_3, tp=16).all_reduce(0) / GRAPHS.wait
    assert sixteen == pytest.approx(3 + GRAPHS.network_wait / GRAPHS.wait)


def test_messages_by_hand():
    """An all-reduce of 8 ranks sends and receives 7/8 of the bytes twice; a stage sends them once,
    over the network where the pipeline is not in one node."""
    eight, two_nodes = on_h100(GPT_3, tp=8), on_h100(GPT_3, tp=8, pp=2)
    assert eight.all_reduce(1e9) - eight.all_reduce(0) == pytest.approx(1.75e9 / H100.node_link)
    assert eight.send(1e9) == on_h100(GPT_3).all_reduce(1e9) == 0
    in_node = on_h100(GPT_3, tp=4, pp=2).send(1e9)
    assert in_node == pytest.approx(GRAPHS.wait + 1e9 / H100.node_link)
    assert two_nodes.send(1e9) == pytest.approx(GRAPHS.network_wait + 1e9 / H100.network_link)


def test_a_prompt_by_hand():
    one = on_h100(GPT_3, engine=AT_ONCE)
    n, rate = 4 * 512, H100.peak * H100.constants.matmul
    flops = 2 * n * 96 * 12 * 12288**2 + 4 * n * (513 / 2) * 96 * 12288
    head = 50257 * 12288
    reads = 2 * (96 * 12 * 12288**2 + head) / H100.memory_bandwidth
    norms = 96 * 4 * serving.elementwise(H100, AT_ONCE.software, GPT_3, 1, 512)
    seconds = (flops + 2 * 4 * head) / rate + reads + norms
    assert one.first_token(4, 512) == pytest.approx(seconds)
    # one answer of one token is the first token
    assert one.request(4, 512, 1) == one.first_token(4, 512)


def test_experts_are_read_that_are_met():
    """One token meets its 2 of 8 experts; 4 tokens meet 8 (1 - 0.75^4) = 5.47."""
    model = preset("mixtral-8x7b")
    experts = num_mlps(model, "router_topk")[1]
    one = on_h100(model, engine=AT_ONCE)
    # of one expert in each layer; a token more is also multiplied, which takes 1% of this
    read = 2 * experts * mlp_matrices(model) / H100.memory_bandwidth
    steps = [one.step(b, 0) for b in (1, 4)]
    assert steps[1] - steps[0] == pytest.approx(read * (8 * (1 - 0.75**4) - 2), rel=0.02)


# --- what must grow, what must not ----------------------------------------------------------------


@pytest.mark.parametrize("tp, pp", [(1, 1), (8, 1), (2, 4), (16, 2)])
def test_more_takes_longer_and_more_room(tp, pp):
    one = on_h100(GPT_3, tp, pp)
    base = dict(batch=8, prompt=256, answer=64)
    seconds = one.request(**base)
    for name in base:
        more = base | {name: 2 * base[name]}
        assert one.request(**more) > seconds, name
        held = [
            sum(one.bytes(c["batch"], c["prompt"] + c["answer"], 2048).values())
            for c in (base, more)
        ]
        assert held[1] > held[0], name
    # a faster machine, less to read
    assert one._replace(machine=H200).request(**base) < seconds
    assert one._replace(machine=A100).request(**base) > seconds
    # twice the batch is less than twice as long
    assert one.step(16, 256) < 2 * one.step(8, 256)


def test_stages_give_tokens_and_no_latency():
    """A token goes through all stages: with one sequence two stages take as long as one rank, but
    for what they send; with many, each takes half of the work."""
    one, two = on_h100(preset("llama2-7b")), on_h100(preset("llama2-7b"), pp=2)
    assert one.step(1, 100) < two.step(1, 100) < 1.01 * one.step(1, 100)
    assert one.first_token(1, 512) <= two.first_token(1, 512)
    assert two.step(2, 100) == pytest.approx(2 * two.stage(1, 1, 100) + 2 * two.head(1))
    # many prompts fill the pipeline; but each group reads the weights again
    assert 0.5 < two.first_token(64, 512) / one.first_token(64, 512) < 0.62
    assert two.step(128, 100) == pytest.approx(one.step(64, 100), rel=0.02)


def test_fewer_bytes_of_weights_are_faster_for_one_sequence():
    steps = [on_h100(preset("llama2-7b"), weights=w).step(1, 100) for w in ("bf16", "int8", "int4")]
    assert steps[0] > steps[1] > steps[2] > steps[0] / 4


# --- published times ------------------------------------------------------------------------------


def test_each_row_has_a_source_and_stands_once():
    groups = comparison.PUBLISHED["groups"]
    assert all(group["source"] for group in groups)
    assert len({row.key for row in ROWS}) == len(ROWS) == 443
    # a row that could not have run is a slip: weights and cache fit, without what TensorRT saved
    for row in ROWS:
        *_, batch, prompt, answer = row.key
        held = row.serving.bytes(batch, prompt + answer, 1)
        assert held["weights"] + held["cache"] < 1.12 * row.serving.machine.memory, row.key


@pytest.mark.parametrize("name", ENGINES)
def test_constants_are_those_of_four_rows(name):
    """From anywhere near."""
    near = {
        constant: 1.3 * getattr(ENGINES[name], constant) for constant in comparison.FITTED[name]
    }
    begin = ENGINES[name]._replace(**near | {"read": 0.6})
    if name == "graphs":
        # of which no row says anything
        begin = begin._replace(network_wait=ENGINES["eager"].network_wait)
    found = comparison.calibrate(name, ROWS, begin)
    for constant in comparison.FITTED[name]:
        assert getattr(found, constant) == pytest.approx(getattr(ENGINES[name], constant), rel=0.01)


def test_rows_that_were_held_out():
    """The gate is the error of today, and a little: a change of a formula that makes them worse
    fails."""
    held_out = comparison.held_out(ROWS)
    assert len(held_out) == len(ROWS) - 8
    found = comparison.summary(held_out)
    assert found["mean"] < 0.105 and found["ninth_decile"] < 0.22 and found["worst"] < 0.47
    for row in held_out:
        assert abs(row.error()) < 0.4 or row.key[0] in ("ft-350m", "trt-fp8-70b", "trt-fp8-falcon")
    # each part of a step matters
    for change in (dict(layer=0.0), dict(wait=0.0), dict(network_wait=0.0), dict(read=1.0)):
        without = [abs(row.error(ENGINES[row.engine]._replace(**change))) for row in held_out]
        assert sum(without) / len(without) > found["mean"] * 1.02, change


@pytest.mark.parametrize(
    "name, one, many", [("6.7b", 15.96, 41.84), ("1.3b", 5.58, 15.61), ("350m", 3.57, 8.67)]
)
def test_the_memory_that_fastertransformer_used(name, one, many):
    """GB of 1 and of 64 sequences of 512 + 32 tokens (docs/gpt_guide.md). One takes 2.3 to 2.9 GB
    more than its weights, cache and activations, perhaps CUDA and workspaces. What 63 others add is
    predicted 14% to 16% too low."""
    row = next(row for row in ROWS if row.key[0] == f"ft-{name}")
    # a prompt is taken whole
    found = [sum(row.serving.bytes(b, 544, b * 512).values()) / 1e9 for b in (1, 64)]
    assert 2.3 < one - found[0] < 2.9
    assert -0.17 < (found[1] - found[0]) / (many - one) - 1 < -0.13


# --- the search -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, gpus", [("llama2-70b", 8), ("mixtral-8x7b", 4), ("gpt3-175b", 24)])
def test_the_frontier(name, gpus):
    """It fits, whole nodes are used, and no layout is both sooner and faster."""
    model = preset(name)
    found = list(fitting(on_h100(model), gpus, 100, 50, 2048))
    best = frontier(iter(found))
    assert best and set(map(id, best)) <= set(map(id, found))
    for one in found:
        assert any(b.latency <= one.latency and b.rate >= one.rate for b in best)
    for a, b in itertools.pairwise(best):
        assert a.latency < b.latency and a.rate < b.rate
    for one in found:
        tp, pp = one.serving.tp, one.serving.pp
        assert sum(one.bytes.values()) < 0.94 * H100.memory and gpus % (tp * pp) == 0
        assert tp * pp <= 8 or tp * pp % 8 == 0
        assert one.rate == pytest.approx(one.batch * 50 / one.latency / (tp * pp))
        assert one.latency == pytest.approx(one.serving.request(one.batch, 100, 50))


def test_the_command(capsys):
    status, out, _ = run("serve --model gpt3-175b --gpu h100 --gpus 16 --latency 6s", capsys)
    assert status == 0
    last = [line for line in out.splitlines() if re.match(r" +\d+ +\d+ +\d+ ", line)][-1].split()
    tp, pp, batch, _, _, latency, *_ = map(lambda text: float(text.replace(",", "")), last)
    assert latency <= 6
    words = out.replace("\\\n", " ").split()
    given = {w: words[i + 1] for i, w in enumerate(words) if w.startswith("--")}
    assert int(given["--nproc-per-node"]) == tp * pp == int(given["--tp"]) * int(given["--pp"])
    assert int(given["--max-sequences"]) == batch
    # the cache has room for all of them
    blocks = int(given["--blocks"]) - 1
    assert blocks * 16 >= batch * 400 > (blocks - batch) * 16


def test_blocks_of_a_window(capsys):
    words = "--model mistral-7b --gpus 1 --input 9000 --output 1000 --top 1"
    out = run(f"serve {words}", capsys)[1]
    batch = int(re.search(r"--max-sequences (\d+)", out)[1])
    assert int(re.search(r"--blocks (\d+)", out)[1]) == 1 + batch * 4096 / 16


def test_a_command_that_would_be_refused_is_not_printed(capsys):
    for words in (
        "--model llama2-70b --gpus 8 --weights int4 --latency 3s",
        "--model llama2-7b --weights fp8",
    ):
        status, out, _ = run(f"serve --gpu h100 {words}", capsys)
        assert status == 0 and "--checkpoint" not in out and "serve.py has no --weights" in out
    status, out, _ = run("serve --gpu h100 --model llama2-7b --gpus 1 --weights int4", capsys)
    assert "--tp 1 --pp 1" in out and "--weights int4" in out


def test_what_is_said_to_fit_fits(capsys):
    _, _, err = run("serve --model llama2-70b --latency 10ms", capsys)
    fits = re.search(r"(\d+ms) would fit", err)[1]
    assert run(f"serve --model llama2-70b --latency {fits}", capsys)[0] == 0
    assert run(f"serve --model llama2-70b --latency {int(fits[:-2]) - 2}ms", capsys)[0] == 2


@pytest.mark.parametrize("throughput", [1000.0, 9000.0])
def test_the_fewest_gpus_reach_latency_and_throughput(throughput, monkeypatch):
    """No layout, batch and number of copies takes fewer; one copy less writes too little."""
    found = list(fitting(on_h100(preset("llama2-70b")), 64, 200, 100, 2048))
    within = [one for one in found if one.latency <= 2]
    best, *others = fewest_gpus(within, throughput)
    copies = range(1, 65)
    fewest = min(
        c * one.serving.ranks for one in within for c in copies if c * one.throughput >= throughput
    )
    assert best.gpus == fewest and best.latency <= 2
    for one in (best, *others):
        assert one.throughput >= throughput > one.throughput * (one.copies - 1) / one.copies
        assert one.throughput == pytest.approx(one.copies * one.batch * 100 / one.latency)
        assert one.gpus >= best.gpus
    # a copy too few
    monkeypatch.setattr(serving.math, "ceil", math.floor)
    assert any(one.throughput < throughput for one in fewest_gpus(within, throughput))


def test_latency_and_throughput(capsys):
    case = "serve --model llama2-70b --gpu h100 --output 100 --latency 2s"
    status, out, _ = run(f"{case} --throughput 10000", capsys)
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d+ +\d+ +[\d,]+ ", line)]
    gpus = [int(row[0]) for row in rows]
    assert status == 0 and gpus == sorted(gpus) and len(rows) > 2
    assert all(float(row[2].replace(",", "")) >= 10000 and float(row[8]) <= 2 for row in rows)
    assert f"one of its {rows[0][1]} copies" in out and f"--max-sequences {rows[0][5]} " in out
    # what is said to fit fits, and a token more does not
    _, _, err = run(f"{case} --throughput 1e6", capsys)
    most, more = re.search(r"at most (\d+) .* --gpus (\d+)$", err.strip()).groups()
    assert run(f"{case} --throughput {most}", capsys)[0] == 0
    assert run(f"{case} --throughput {int(most) + 1}", capsys)[0] == 2
    assert run(f"{case} --throughput 1e6 --gpus {more}", capsys)[0] == 0
    assert "--gpus" not in run(f"{case} --throughput 1e12", capsys)[2]


def test_more_ranks_than_key_heads():
    """Four ranks share each of two key heads: each has a quarter of its columns, and all of its
    cache."""
    model = dataclasses.replace(LLAMA, num_kv_heads=2)
    assert {one.tp for one in serving.layouts(8, on_h100(model))} == {1, 2, 4, 8}
    two, eight = (on_h100(model, tp=t) for t in (2, 8))
    # each rank has one head
    assert eight.cached(1, 100) == 4 * two.cached(1, 100) == 4 * cache_bytes(model, 100)
    waits = math.log2(4) * GRAPHS.wait + 2 * 2 * 128 * 3 / 4 / H100.node_link
    assert two.gather_heads(1) == 0 and eight.gather_heads(1) == pytest.approx(waits)
    model = dataclasses.replace(preset("gpt3-175b"), num_kv_heads=1)
    writing = ppo.best_writing(H100, model, 8, 80e9, CASE)[1]
    assert writing.tp == 8


# --- a step of reinforcement learning ------------------------------------------------------------

LLAMA = preset("llama2-7b")
CASE = SimpleNamespace(gpus=8, batch=64, answers=512, prompt_tokens=512, answer_tokens=1024)


def test_answers_are_written_in_steps_of_serving():
    """512 answers on 8 tensor-parallel ranks: a forward of the prompts, then all at a time."""
    layout = Layout(tp=8)
    found = ppo.writing_seconds(H100, LLAMA, layout, 60e9, CASE)
    prompts = dataclasses.replace(LLAMA, seq_length=512)
    first = ppo.forward_seconds(H100, prompts, layout, 512)
    step = Serving(H100, ENGINES["graphs"], LLAMA, tp=8).step(512, 512 + 1024 / 2)
    assert found == pytest.approx(first + 1024 * step)
    # where half of them fit at a time, weights are read twice as often
    halves = ppo.writing_seconds(H100, LLAMA, layout, 256 * cache_bytes(LLAMA, 1536) / 8, CASE)
    step = Serving(H100, ENGINES["graphs"], LLAMA, tp=8).step(256, 512 + 1024 / 2)
    assert halves == pytest.approx(first + 2 * 1024 * step)


def test_what_does_not_fit_beside_the_weights_is_written_later():
    layout = Layout(dp=8)
    each = cache_bytes(LLAMA, 1536)
    # 64 sequences for each of eight ranks
    room = (-1, 0.9, 16, 64, 99)
    found = [ppo.writing_seconds(H100, LLAMA, layout, n * each, CASE) for n in room]
    assert found[:2] == [math.inf] * 2 and found[2] > 1.5 * found[3] and found[3] == found[4]


def test_the_four_ways():
    found = ppo.steps(H100, preset("llama2-70b"), SimpleNamespace(**vars(CASE) | dict(gpus=128)))
    assert {step.ranks for step in found} == {"all", "halves"}
    for ranks, gpus in (("all", 128), ("halves", 64)):
        *_, last = [step for step in found if step.ranks == ranks]
        assert last.training.ranks == last.writing.ranks == gpus and last.writing.pp == 1
        assert min(last.answers, last.scores, last.updates) > 0
    # under stage 3 the layout of training writes nothing
    tight = dataclasses.replace(H100, memory=10 * 2**30)
    found = ppo.steps(tight, LLAMA, SimpleNamespace(**vars(CASE) | dict(gpus=64)))
    assert [step.training.zero_stage for step in found] == [3, 3]
    assert all(0 < step.answers < math.inf and step.writing.tp == 8 for step in found)


# --- what the documents say -----------------------------------------------------------------------


def test_tables_of_the_document():
    text = (ROOT / "docs" / "planning.md").read_text()
    results = json.loads((ROOT / "benchmarks" / "results" / "serving_plan.json").read_text())
    for name, found in results["groups"].items():
        numbers = " | ".join(f"{found[key]:.1%}" for key in ("mean", "ninth_decile", "worst"))
        assert f"| {name} | {found['rows']} | {numbers} |" in text
    assert results["capacity"] == comparison.capacity_table() and len(results["capacity"]) == 4
    assert all(line in text for line in results["capacity"])
    held_out = comparison.held_out(ROWS)
    assert results["groups"]["all"] == pytest.approx(comparison.summary(held_out), rel=1e-6)
    eager, graphs = ENGINES["eager"], ENGINES["graphs"]
    assert f"| read | {eager.read} | {graphs.read} |" in text
    for name in ("layer", "wait", "network_wait"):
        micro = [f"{1e6 * getattr(engine, name):.3g} µs" for engine in (eager, graphs)]
        assert f"| {name} | {' | '.join(micro)} |" in text
    assert f"| convert | | {graphs.convert} |" in text
    # "a node writes 2,600 tokens/s"; 128 sequences at 18.3 ms
    llama = on_h100(preset("llama2-70b"), tp=8)
    assert round(48 * 100 / llama.request(48, 200, 100), -2) == 2600
    assert f"{1e3 * llama.step(128, 250):.1f}" == "18.3" and llama.step(192, 250) > 0.02
