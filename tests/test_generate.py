"""Generation gives the tokens of its definition (`naive`): a forward pass of the plain model for
each token. With the cache, laid out for decoding, on a GPU as CUDA graphs, and under every layout.
(The tokens of transformers: test_families.py.)"""

import io
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import shortened
import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphs_on_cpu import TapedFunction
from test_gpt import GPT_SHAPES, LLAMA_SHAPES, build

import context_parallel
import generate
import kernels
import sequence_parallel
import train
from base import terminal
from base.groups import Groups
from course import ranks
from gpt import GPT
from inference import batches, cli, cuda_graphs, kv_cache, loading, sampling, weight_layouts
from inference.engine import Engine
from inference.sampling import DIVERGED, choose, keys_of, uniform
from pipeline_parallel import stages_of
from run import checkpoint
from run.config import ConfigError
from run.tokenizer import ByteTokenizer

ROOT = Path(__file__).parent.parent
EXPERTS = LLAMA_SHAPES[1] | dict(num_experts=4, ffn_hidden_size=40, router="topk", router_topk=2)
# norms of heads; a norm that is stored less 1, and a gate with GELU
QWEN3 = LLAMA_SHAPES[1] | dict(qk_norm=True, head_dim=12)
GEMMA = LLAMA_SHAPES[2] | dict(norm="rmsnorm1p", activation="geglu", head_dim=16, tied=True)
# ALiBi, and a cache of four columns
BLOOM = GPT_SHAPES[0] | dict(positions="alibi", embedding_norm=True, sliding_window=4)
SAMPLED = dict(temperature=0.8, top_k=20, top_p=0.95, seed=3)


def loud(model: GPT) -> GPT:
    """With weights so large that the next token depends on what the newest one attends to."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p *= 6
    return model


def ragged(vocab_size, lengths=(3, 1, 7, 8, 5), seed=1):
    """Random prompts of different lengths."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=g).tolist() for n in lengths]


@torch.no_grad()
def naive(model, prompts, n, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    """The definition: for each token a forward pass of the plain model over its context."""
    s = model.config.seq_length
    half = s // 2
    generated = []
    for prompt, key in zip(prompts, keys_of(prompts, seed)):
        ids = list(prompt)
        for _ in range(n):
            begin = 0
            if len(ids) > s:
                begin = math.ceil((len(ids) - s) / half) * half
            logits = model(torch.tensor([ids[begin:]]))[:, -1]  # [1, V]
            u = uniform(torch.tensor([key], dtype=torch.int32), torch.tensor([len(ids)]))
            ids.append(int(choose(logits, u, temperature, top_k, top_p)))
        generated.append(ids[len(prompt) :])
    return generated


# --- choosing -------------------------------------------------------------------------------------


def shares(p, n=2000, **options):
    """How often each token is chosen, over evenly spaced u."""
    u = (torch.arange(n) + 0.5) / n
    tokens = choose(torch.tensor(p).log().expand(n, -1), u, **options)
    return (torch.bincount(tokens, minlength=len(p)) / n).tolist()


def test_choose_by_hand():
    p = (0.1, 0.4, 0.2, 0.3)
    assert shares(p) == pytest.approx(p, abs=1e-3)
    assert shares(p, top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-3)
    # 0.4 is not enough, 0.7 is
    assert shares(p, top_p=0.69) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-3)
    for greedy in (dict(top_p=0.4), dict(top_p=1e-300), dict(temperature=0), dict(top_k=1)):
        assert shares(p, **greedy) == [0, 1, 0, 0]
    assert shares(p, temperature=0.5) == pytest.approx([x * x / 0.3 for x in p], abs=1e-3)
    assert shares(p, top_k=9) == shares(p)
    # 1 - 2^-32 is 1 in float32
    assert choose(torch.zeros(2, 5), torch.tensor([0.0, 1 - 2**-32])).tolist() == [0, 4]
    # what has no probability is never chosen
    only_token_2 = torch.full((1, 5), -torch.inf).index_fill_(1, torch.tensor([2]), 0.0)
    for u in (0.0, 0.5, 1 - 2**-53):
        assert choose(only_token_2, torch.tensor([u])).item() == 2


def test_logits_that_are_not_finite():
    logits = torch.zeros(3, 5)
    logits[1, 2] = torch.nan
    logits[2] = -torch.inf
    for temperature in (0.0, 1.0):
        assert choose(logits, torch.full((3,), 0.5), temperature).tolist()[1:] == [DIVERGED] * 2
    model = build(torch.float64, **GPT_SHAPES[0])
    with torch.no_grad():
        model.head.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        generate.generate(model, [[1, 2], [3]], 4)


def test_random_numbers():
    keys = torch.tensor(keys_of([[i] for i in range(2000)], 0), dtype=torch.int32)
    positions = [torch.full((2000,), position) for position in range(20)]
    u = torch.stack([uniform(keys, position) for position in positions])  # [20, 2000]
    assert u.min() >= 0
    assert u.max() < 1
    # 3.6 standard deviations
    assert (u.flatten().histc(20, 0, 1) / u.numel() - 0.05).abs().max() < 0.004
    # of positions, and of prompts
    assert torch.corrcoef(u).fill_diagonal_(0).abs().max() < 0.1
    assert torch.corrcoef(u.t()[:50]).fill_diagonal_(0).abs().max() < 0.85
    assert keys_of([[1], [2]], 0) == keys_of([[2], [1]], 0)[::-1]
    # equal prompts differ, and seeds do
    assert len(set(keys_of([[1], [1], [2]], 0) + keys_of([[1]], 1))) == 4


# --- with a cache as without ----------------------------------------------------------------------


@pytest.mark.parametrize("options", [dict(temperature=0), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "shape",
    [*GPT_SHAPES, *LLAMA_SHAPES, EXPERTS],
    ids=lambda s: f"h{s['hidden_size']} s{s['seq_length']}",
)
def test_equals_the_plain_model(shape, options):
    """Token for token, prompts of several lengths, beyond the context."""
    shape = shape | dict(seq_length=min(shape["seq_length"], 13))
    model = loud(build(torch.float64, **shape))
    prompts = ragged(model.config.vocab_size)
    n = model.config.seq_length + 9
    expected = naive(model.eval(), prompts, n, **options)
    assert generate.generate(model, prompts, n, **options) == expected
    assert generate.generate(model, prompts, n, cached=False, **options) == expected
    assert generate.generate(model, prompts[::-1], n, **options) == expected[::-1]
    assert generate.generate(model, prompts[2:3], n, **options) == expected[2:3]
    # it does not say one thing all the time
    assert len({token for ids in expected for token in ids}) > 6


# --- mutations: what keeps the sequences of a batch apart is left out -----------------------------


def one_position_for_all(monkeypatch):
    """Each sequence gets the position embedding of a prefill, from 0 on."""
    monkeypatch.setattr(
        kv_cache.CachedPositions,
        "forward",
        lambda self, x, documents: x + self.weight[: x.shape[1]],
    )


def no_mask(monkeypatch):
    """Shorter sequences attend to columns that they have not filled."""
    attend = kv_cache.Cache.attend

    def attend_to_all(self, *args):
        self.masks = {}
        return attend(self, *args)

    monkeypatch.setattr(kv_cache.Cache, "attend", attend_to_all)


def one_column_for_all(monkeypatch):
    """The new keys go to the column of the longest sequence."""
    next_tokens = batches.DecodeBatch.next_tokens

    def at_the_longest(self):
        tokens = next_tokens(self)
        if self.cache.positions is not None:
            self.cache.positions = torch.full_like(self.cache.positions, self.cache.used - 1)
        return tokens

    monkeypatch.setattr(batches.DecodeBatch, "next_tokens", at_the_longest)


def last_column_for_all(monkeypatch):
    """Prefill takes the logits of the padding after shorter prompts."""
    next_tokens = batches.DecodeBatch.next_tokens

    def at_the_end(self):
        tokens = next_tokens(self)
        if self.last_column is not None:
            self.last_column = torch.full_like(self.last_column, int(self.last_column.max()))
        return tokens

    monkeypatch.setattr(batches.DecodeBatch, "next_tokens", at_the_end)


def one_random_number_for_all_positions(monkeypatch):
    monkeypatch.setattr(sampling, "uniform", lambda keys, positions: uniform(keys, positions * 0))


BREAKAGES = {
    "positions": one_position_for_all,
    "rows": one_column_for_all,
    "mask": no_mask,
    "last": last_column_for_all,
    "key": one_random_number_for_all_positions,
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_plain_model_sees(breakage, monkeypatch):
    """With the mutation the tokens change."""
    model = loud(build(torch.float64, **GPT_SHAPES[0]))
    prompts = ragged(97)
    expected = naive(model.eval(), prompts, 12, **SAMPLED)
    BREAKAGES[breakage](monkeypatch)
    assert generate.generate(model, prompts, 12, **SAMPLED) != expected


def test_ends():
    model = loud(build(torch.float64, **GPT_SHAPES[0]))
    prompts = ragged(97)
    whole = generate.generate(model, prompts, 20)
    eot = whole[2][7]
    until_eot = [ids[: ids.index(eot)] if eot in ids else ids for ids in whole]
    assert generate.generate(model, prompts, 20, eot=eot) == until_eot

    finishes = {n: "end of text" if eot in ids else "length" for n, ids in enumerate(whole)}
    # prompt 0 ends early, by `stopped`
    finishes[0] = "stop"
    until_eot[0] = until_eot[0][:3]

    def stopped(number, ids):
        return number == 0 and len(ids) == 3

    steps = generate.stream(model, prompts, 20, eot=eot, stopped=stopped)
    streamed = [new for new_tokens in steps for new in new_tokens]
    assert {new.number: new.finish for new in streamed if new.finish} == finishes
    for number, ids in enumerate(until_eot):
        tokens = [new.token for new in streamed if new.number == number and new.token is not None]
        assert tokens == ids
    assert generate.generate(model, prompts, 0) == [[]] * 5
    assert generate.generate(model, [], 5) == []


@pytest.mark.parametrize(
    "shape",
    [*GPT_SHAPES, LLAMA_SHAPES[1], EXPERTS, QWEN3, GEMMA],
    ids=lambda s: f"h{s['hidden_size']}",
)
@pytest.mark.parametrize("layout", [weight_layouts.by_rows, weight_layouts.by_columns])
def test_laid_out(shape, layout, monkeypatch):
    """Laid out for decoding, biases folded in: the same tokens."""
    monkeypatch.setattr(weight_layouts, "layouts_for", lambda matrix: [layout])
    model = loud(build(torch.float64, **shape))
    # biases and norms that do something
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                g = torch.Generator().manual_seed(len(name))
                p.add_(torch.randn(p.shape, generator=g) * 0.3)
    prompts = ragged(model.config.vocab_size)
    logits = model.eval()(torch.tensor([prompts[2]]))
    expected = generate.generate(model, prompts, 24, **SAMPLED)
    weight_layouts.apply(model, 16)
    assert (model(torch.tensor([prompts[2]])) - logits).abs().max() < 1e-12 * logits.abs().max()
    assert generate.generate(model, prompts, 24, **SAMPLED) == expected


@pytest.mark.parametrize("texts", [1, 5])
def test_layouts_multiply_alike(texts):
    """Those of float32, with a bias and without; [b, 1, in] as in a step."""
    matrix, x, bias = torch.randn(30, 16), torch.randn(texts, 1, 16), torch.randn(30)
    layouts = weight_layouts.layouts_for(matrix)
    assert len(layouts) == 2 + 2 * torch.backends.mkldnn.is_available()
    for layout in layouts:
        stored = weight_layouts.stored(matrix, layout)
        for added in (bias, None):
            found = layout(stored, x, added)
            torch.testing.assert_close(found, F.linear(x, matrix, added), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "shape", [*GPT_SHAPES, LLAMA_SHAPES[1], EXPERTS], ids=lambda s: f"h{s['hidden_size']}"
)
def test_laid_out_with_kernels(shape):
    """As on a GPU: laid out, then the modules of kernels.py, here with the operations of a CPU. The
    same tokens."""
    model = loud(build(torch.float64, **shape))
    prompts = ragged(model.config.vocab_size)
    expected = generate.generate(model, prompts, 24, **SAMPLED)
    weight_layouts.replace_linears(model)
    kernels.swap(model)
    assert "loss" in vars(model.head)
    assert generate.generate(model, prompts, 24, **SAMPLED) == expected


def test_each_matrix_has_its_fastest_layout(monkeypatch):
    """What is missing or is not clearly faster is not chosen; the rows are those that will come."""
    by_rows, fastest = weight_layouts.by_rows, weight_layouts.weights_in_onednn
    costs = {by_rows: 1.0, weight_layouts.by_columns: 0.97, fastest: 0.5}
    rows = set()

    def time_of(layout, matrix, x, bias):
        rows.add(len(x))
        missing = layout is fastest and len(matrix) == 257
        return math.inf if missing else costs[layout]

    monkeypatch.setattr(weight_layouts, "time_of", time_of)
    monkeypatch.setattr(weight_layouts, "layouts_for", lambda matrix: list(costs))
    model = build(torch.float64, **GPT_SHAPES[0] | dict(vocab_size=257)).requires_grad_(False)
    weight_layouts.apply(model, 3)
    assert rows == {3}
    assert model.head.output.layout is by_rows
    assert model.blocks["0"].mlp.down.layout is fastest
    monkeypatch.undo()

    def missing(*args):
        raise RuntimeError("not in this build")

    assert weight_layouts.time_of(missing, torch.ones(4, 4), torch.ones(1, 4), None) == math.inf


def test_a_layout_is_timed_until_the_device_is_done(monkeypatch):
    """On a GPU a call returns before its kernel has run."""
    clock = {"asked": 0.0, "done": 0.0}

    class Queue:
        """A device that needs a second for each product, and is at `done`."""

        def __init__(self, device):
            self.at = clock["asked"]

        def wait(self):
            clock["done"] = self.at

        def seconds_since(self, earlier):
            assert clock["done"] == self.at
            return self.at - earlier.at

    def layout(matrix, x, bias):
        clock["asked"] += 1.0

    monkeypatch.setattr(weight_layouts, "Moment", Queue)
    assert weight_layouts.time_of(layout, None, torch.ones(1), None) == 1.0


# --- under every layout ---------------------------------------------------------------------------

LAYOUTS = {
    # four layers, the others two
    "gpt": [dict(tp=2, pp=2), dict(cp=4)],
    "llama": [dict(tp=2), dict(cp=2, pp=2)],
    "experts": [dict(pp=2, ep=2), dict(cp=2, ep=4)],
    "bloom": [dict(tp=2, pp=2)],
}
# parts of the layouts above, and those with another family
AGAIN = {
    "gpt": [dict(pp=2), dict(tp=2), dict(cp=2, pp=2), dict(pp=4, layer_split=[1, 1, 1, 1])],
    "llama": [dict(cp=2), dict(tp=2, pp=2), dict(cp=2, tp=2)],
    "experts": [dict(ep=4), dict(tp=2, ep=2)],
    "qwen3": [dict(tp=2)],
    # more ranks than key heads
    "one key": [dict(tp=2), dict(cp=2, tp=2), dict(tp=2, pp=2)],
}
# beyond the context: prompts have up to 8 tokens
CONTEXT, NEW_TOKENS = 12, 14
LAYOUT_SHAPES = {"gpt": GPT_SHAPES[0], "llama": LLAMA_SHAPES[1], "experts": EXPERTS}
LAYOUT_SHAPES |= {"qwen3": QWEN3, "bloom": BLOOM, "one key": LLAMA_SHAPES[1] | dict(num_kv_heads=1)}


def on_layouts(rank, path, layouts, requests):
    """Tokens of each request (prompts, options) under each layout of 4 ranks; data-parallel ranks
    have prompts of their own."""
    shortened.shorten(setattr)
    results = []
    for layout in layouts:
        layout = dict(layout)
        layer_split = layout.pop("layer_split", None)
        groups = Groups.make("cpu", 4, **layout)
        model, _ = cli.load_model(path, torch.device("cpu"), torch.float64, groups, layer_split)
        # as the command does
        for stage in stages_of(model):
            weight_layouts.apply(stage)
        dp, dp_rank = (groups.dp.size(), groups.dp.rank()) if groups.dp else (1, 0)
        for prompts, options in requests:
            numbers = list(range(len(prompts)))[dp_rank::dp]
            keys = keys_of(prompts, options.get("seed", 0))
            texts = generate.generate(
                model,
                [prompts[i] for i in numbers],
                NEW_TOKENS,
                keys=[keys[i] for i in numbers],
                lockstep=groups.replicas if groups.ep else None,
                cp_group=groups.cp,
                eot=5,
                **options,
            )
            of_ranks = [None] * 4
            dist.all_gather_object(of_ranks, dict(zip(numbers, texts)))
            results.append(of_ranks)
    return results


@pytest.mark.parametrize(
    "family, layouts",
    [
        *LAYOUTS.items(),
        *[pytest.param(*more, marks=pytest.mark.repetition) for more in AGAIN.items()],
    ],
    ids=[*LAYOUTS, *(f"{family} again" for family in AGAIN)],
)
def test_layouts(family, layouts, tmp_path):
    """tp, pp, both, data parallel, experts: one device's tokens, greedy and sampled, of a
    checkpoint loaded under each. With one prompt there are ranks without any."""
    num_layers = 4 if family == "gpt" else 2
    shape = LAYOUT_SHAPES[family] | dict(num_layers=num_layers, seq_length=CONTEXT)
    model = loud(build(torch.float64, **shape))
    save(tmp_path, model)
    requests = [
        (ragged(model.config.vocab_size), SAMPLED),
        ([[3, 4]], dict(temperature=0)),
    ]
    results = iter(ranks.run(on_layouts, 4, str(tmp_path), layouts, requests)[0])
    expected = [
        generate.generate(model.eval(), prompts, NEW_TOKENS, eot=5, **options)
        for prompts, options in requests
    ]
    for layout in layouts:
        for texts, of_ranks in zip(expected, results):
            assert {i for of_rank in of_ranks for i in of_rank} == set(range(len(texts)))
            for of_rank in of_ranks:
                assert of_rank == {i: texts[i] for i in of_rank}, layout


def from_training(rank, variants):
    """The texts of each variant."""
    found = []
    for flags in variants:
        config = train.Config(**flags)
        groups = Groups.make("cpu", dist.get_world_size(), **config.mesh)
        trainer = train.Trainer(config, torch.device("cpu"), groups)
        if flags.get("sequence_parallel"):
            for stage in trainer.stages:
                sequence_parallel.shard_sequence(stage, groups.tp, sharded=False)
        before = [dict(stage.named_modules()) for stage in trainer.stages]
        with context_parallel.whole_sequences(trainer.stages):
            prompts = [[1, 2, 3], [4]]
            texts = generate.generate(trainer.model, prompts, 20, seed=1, cp_group=groups.cp)
        assert [dict(stage.named_modules()) for stage in trainer.stages] == before
        found.append(texts)
    return found


def test_from_a_model_in_training():
    """As train.py's sample is made: the same tokens on every rank, and on one device."""
    base = dict(model="gpt2", num_layers=4, hidden_size=32, num_heads=4, seq_length=16)
    base |= dict(vocab_size=61, dropout=0.1, global_batch_size=8, micro_batch_size=1)
    base |= dict(precision="fp64", seed=5, device="cpu")
    variants = [
        dict(pp=2, virtual_stages=2, tp=2),
        dict(pp=4, virtual_stages=2, schedule="dualpipe-v", layer_split=[1, 0] * 4),
        dict(pp=2, ep=2, zero_stage=3, num_experts=4),
        dict(cp=2, tp=2, sequence_parallel=True, zero_stage=3, recompute="selective"),
    ]
    on_ranks = ranks.run(from_training, 4, [base | flags for flags in variants])
    for n, flags in enumerate(variants):
        experts = {name: value for name, value in flags.items() if name == "num_experts"}
        config = train.Config(**base | experts)
        one_device = train.Trainer(config, torch.device("cpu"), Groups())
        expected = generate.generate(one_device.model, [[1, 2, 3], [4]], 20, seed=1)
        assert [texts[n] for texts in on_ranks] == [expected] * 4, flags


def captures(rank):
    """Under ZeRO stage 1 and stage 3."""
    flags = dict(model="gpt2", num_layers=1, hidden_size=8, num_heads=1, vocab_size=61)
    groups = Groups.make("cpu", 2)
    found = []
    for zero_stage in (1, 3):
        config = train.Config(**flags, seq_length=8, global_batch_size=2, zero_stage=zero_stage)
        trainer = train.Trainer(config, torch.device("cpu"), groups)
        found.append(cuda_graphs.can_capture(trainer.stages, torch.device("cuda")))
    return found


def test_a_step_that_gathers_parameters_is_not_captured():
    assert ranks.run(captures, 2) == [[True, False]] * 2


# --- bad input, and the command -------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts, options, words",
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1] * 33], {}, "prompt 0 has 33 tokens, and the model's context holds 32"),
        ([[1]], dict(temperature=-1), "temperature -1: must be 0, or at least 0.001"),
        ([[1]], dict(temperature=math.inf), "finite"),
        ([[1]], dict(top_p=0), "top_p 0: must be above 0"),
        ([[1]], dict(top_k=-1), "top_k -1"),
        ([[1]], dict(temperature=1e-50), "0, or at least 0.001"),
        ([[97]], {}, "prompt 0 has token 97, and the model knows 0 to 96"),
        ([[1, -1]], {}, "prompt 0 has token -1"),
        ([[1]], dict(keys=[]), "0 keys for 1 prompts"),
    ],
)
def test_bad_arguments(prompts, options, words):
    with pytest.raises(ValueError, match=words):
        generate.generate(build(**GPT_SHAPES[0]), prompts, 4, **options)


def save(folder, model, step=1, tokenizer="bytes"):
    tensors = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    state = {"config": {"tokenizer": tokenizer}, "model": asdict(model.config)}
    return checkpoint.save(folder / "checkpoints", step, tensors, state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save(folder, loud(build(**GPT_SHAPES[0] | dict(vocab_size=257, seq_length=64))))
    return folder


def command(saved, capsys, *argv):
    status = generate.main(["--checkpoint", str(saved), "--device", "cpu", *argv])
    return status, *capsys.readouterr()


def test_command(saved, capsys):
    """A prompt, streamed: the text of generate.generate."""
    status, out, err = command(saved, capsys, "--prompt", "def é", "--max-tokens", "20")
    model, _ = cli.load_model(saved)
    ids = generate.generate(model, [list("def é".encode())], 20, temperature=0.8, eot=256)[0]
    assert (status, out) == (0, "def é" + ByteTokenizer().decode(ids) + "\n")
    assert "the first after" in err and "tokens/s" in err


def test_prompt_file(saved, capsys, tmp_path, monkeypatch):
    """A file, a prompt, line by line: the same texts, with the same seed."""
    path = tmp_path / "prompts.jsonl"
    prompts = ["ab", "a longer one", "ab", "x"]
    records = [json.dumps({"id": i, "prompt": prompt}) for i, prompt in enumerate(prompts)]
    path.write_text("".join(record + "\n\n" for record in records))
    file_flags = ["--prompt-file", str(path), "--max-tokens", "12"]
    status, out, err = command(saved, capsys, *file_flags, "--batch-size", "3")
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [line["id"] for line in lines] == [0, 1, 2, 3]
    assert "4 prompts" in err
    # the same prompt again
    assert lines[0]["text"] != lines[2]["text"]
    assert {line["finish"] for line in lines} <= {"length", "end of text"}
    assert all(line["tokens"] <= 12 for line in lines)

    _, out, _ = command(saved, capsys, "--prompt", "ab", "--max-tokens", "12")
    assert out == "ab" + lines[0]["text"] + "\n"

    stop = lines[1]["text"][4:6]
    _, out, _ = command(saved, capsys, *file_flags, "--stop", stop)
    stopped = json.loads(out.splitlines()[1])
    assert stopped["finish"] == "stop"
    assert stopped["text"] == lines[1]["text"][: lines[1]["text"].index(stop)]
    prompt_flags = ["--prompt", "a longer one", "--max-tokens", "12", "--stop", stop]
    _, out, _ = command(saved, capsys, *prompt_flags, "--seed", "0")
    assert out == "a longer one" + stopped["text"] + "\n"

    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n\nx\n"))
    status, out, _ = command(saved, capsys, "--interactive", "--max-tokens", "12")
    assert status == 0
    assert lines[0]["text"] in out and lines[3]["text"] in out
    assert "the prompt is empty" in out


@pytest.mark.parametrize(
    "content, words",
    [
        ('{"prompt": "a"}\n\n{"prompt": 3}\n', 'line 3: not an object with a "prompt"'),
        ('{"prompt": "a"}\n{oh\n', "line 2: not JSON"),
        ('{"prompt": ""}', "line 1: the prompt is empty"),
        (json.dumps({"prompt": "x" * 65}), "line 1: the prompt has 65 tokens, and the model's"),
        ("\n", "no prompts in it"),
        ("[1]", "line 1: Expected `object`, got `array`"),
        ('{"prompt": "a", "note": "\\ud800 é"}', "half of a surrogate pair"),
        ('{"prompt": "a", "text": "b"}', "['text'] would be overwritten"),
    ],
)
def test_bad_lines(content, words, saved, capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text(content)
    status, out, err = command(saved, capsys, "--prompt-file", str(tmp_path / "p.jsonl"))
    assert status == 2
    assert words in err
    assert not out


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--temperature", "-1"], "--temperature -1.0: must be 0, or at least"),
        (["--tp", "2"], "--tp 2 --pp 1: their product must divide the 1 ranks"),
        (["--stop", ""], "--stop ''"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--prompt", "a", "--interactive"], "one of them"),
        (["--layer-split", "1", "1"], "needs --pp 2"),
        (["--temperature", "0", "--top-p", "0.5"], "--top-p 0.5: is about drawing tokens"),
        (["--batch-size", "2", "--prompt", "a"], "--batch-size 2: is for --prompt-file"),
        (["--ep", "2"], "--ep 2: must divide the 1 data-parallel ranks"),
        (["--prompt-file", "nowhere"], "nowhere: cannot be read"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere"),
        (["--checkpoint", "nowhere"], "nowhere: no such folder"),
        (["--checkpoint", ""], "--checkpoint '': names no folder"),
        (["--checkpoint", "."], "generate.py: . is not a checkpoint"),
        (["--weights", "int8", "--group-size", "32"], "--group-size 32: is of --weights int4"),
        (["--group-size", "32"], "--group-size 32: is of --weights int4"),
    ],
)
def test_bad_flags(argv, words, saved, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = command(saved, capsys, *argv)
    assert status == 2
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "pp, split, words",
    [
        (9, None, "this model has 2 layers; --pp 2 or less would do"),
        (2, [2, 2], "must be 2 numbers, one for a --pp rank, that add up to the 2"),
    ],
)
def test_layouts_that_are_not_of_the_model(saved, pp, split, words):
    """generate.py speaks of its own flags alone."""
    config, *_ = loading.open_model(saved)
    args = SimpleNamespace(tp=1, pp=pp, cp=1, ep=1, layer_split=split)
    with pytest.raises(ConfigError) as refused:
        cli.check_layout(args, config, pp)
    assert words in str(refused.value)
    assert "--num-layers" not in str(refused.value)


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.repetition)])
def test_on_two_ranks(saved, tmp_path, capsys, torchrun):
    """Two stages: rank 0 alone prints, and all ranks leave with status 0."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "ab"}\n{"prompt": "x"}\n{"prompt": "a longer one"}\n')
    flags = ["--checkpoint", saved, "--device", "cpu", "--prompt-file", path, "--max-tokens", "12"]
    argv = ["generate.py", "--pp", "2", *flags]
    if torchrun:
        words = [Path(sys.executable).parent / "torchrun", "--nproc-per-node", "2", *argv]
        two = subprocess.run(words, timeout=120, cwd=ROOT, capture_output=True, text=True)
    else:
        two = processes.run(argv, world=2)
    assert two.returncode == 0, two.stderr
    assert generate.main(list(map(str, flags))) == 0
    one = capsys.readouterr().out
    assert two.stdout == one
    assert len(one.splitlines()) == 3


def test_an_output_that_is_full_or_ascii(saved, capsys, tmp_path, monkeypatch):
    """On a full disk the answers are lost, and a message says so; where only ASCII can be shown,
    JSON stays JSON."""
    assert json.loads(cli.as_json({"text": "déjà"})) == {"text": "déjà"}
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.as_json({"text": "déjà"}) == '{"text": "d\\u00e9j\\u00e0"}'
    full = open("/dev/full", "w")
    muted = []
    # Muting it for good would mute the tests' own output.
    monkeypatch.setattr(terminal, "mute", muted.append)
    monkeypatch.setattr(sys, "stdout", full)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n')
    flags = ["--checkpoint", str(saved), "--prompt-file", str(path), "--device", "cpu"]
    status = generate.main([*flags, "--max-tokens", "2"])
    assert status == 1
    assert muted == [full]
    assert "standard output: No space left on device" in capsys.readouterr().err


# --- decoding steps that are captured -------------------------------------------------------------


@pytest.fixture
def taped(monkeypatch):
    """Captures as on a GPU, by a tape. Returns the number of rows of each capture."""
    captured = []

    class Counted(TapedFunction):
        def __init__(self, function, inputs, pool=None):
            super().__init__(function, inputs, pool)
            captured.append(len(inputs[0]))

    monkeypatch.setattr(cuda_graphs, "GraphedFunction", Counted)
    monkeypatch.setattr(cuda_graphs, "can_capture", lambda *args: True)
    return captured


@pytest.mark.parametrize("shape", [*GPT_SHAPES, *LLAMA_SHAPES], ids=str)
def test_a_captured_step_is_the_step(shape, taped, monkeypatch):
    """Token for token, of rows that end early, beyond the context; and with the graphs of an
    earlier call, from caches that have its keys."""
    model = loud(build(torch.float64, **shape))
    prompts = ragged(model.config.vocab_size)
    more = ragged(model.config.vocab_size, (2, 6, 8, 4, 4), seed=2)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs, "can_capture", lambda *args: False)
        expected = [generate.generate(model, p, 40, eot=5, **SAMPLED) for p in (prompts, more)]
    runner = generate.ModelRunner(model)
    assert generate.generate(model, prompts, 40, eot=5, runner=runner, **SAMPLED) == expected[0]
    # five rows, then two or one of them
    assert set(taped) <= {5, 2, 1}
    count = len(taped)
    assert generate.generate(model, more, 40, eot=5, runner=runner, **SAMPLED) == expected[1]
    assert generate.generate(model, prompts, 40, eot=5, runner=runner, **SAMPLED) == expected[0]
    # one for each number of rows and of columns
    assert len(taped) - count <= 2
    with pytest.raises(ValueError, match="another model"):
        generate.generate(build(torch.float64, **shape), prompts, 4, runner=runner)


def test_a_graph_of_another_cache_is_seen(taped, monkeypatch):
    """Rows that go on in new memory, while the graph writes to the old."""
    model = loud(build(torch.float64, **GPT_SHAPES[0]))
    prompts, more = (ragged(model.config.vocab_size, seed=seed) for seed in (1, 2))
    expected = generate.generate(model, more, 20, **SAMPLED)
    runner = generate.ModelRunner(model)
    generate.generate(model, prompts, 20, runner=runner, **SAMPLED)

    def moved(self, layer, *args, original=kv_cache.Cache.attend_prefill):
        self.keys.pop(layer, None)
        return original(self, layer, *args)

    monkeypatch.setattr(kv_cache.Cache, "attend_prefill", moved)
    assert generate.generate(model, more, 20, runner=runner, **SAMPLED) != expected


def test_a_context_without_end():
    """A folder may name two billion positions: no table of them is made, here nor in an engine."""
    shape = LLAMA_SHAPES[1] | dict(seq_length=2 * 10**9)
    model = loud(build(torch.float64, **shape))
    short = loud(build(torch.float64, **LLAMA_SHAPES[1] | dict(seq_length=64)))
    expected = generate.generate(short, [[1, 2, 3]], 6, temperature=0)
    assert generate.generate(model, [[1, 2, 3]], 6, temperature=0) == expected
    engine = Engine(model, max_sequences=2, num_blocks=9)
    assert engine.generate([[1, 2, 3]], 6, temperature=0) == expected
    engine.close()


def test_no_plan_for_each_length(monkeypatch):
    """cuDNN's attention is not chosen while texts are written, and is again afterwards."""
    model = build(torch.float64, **GPT_SHAPES[0])
    seen = []
    compute = generate.ModelRunner.compute

    def watched(self, *args):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return compute(self, *args)

    monkeypatch.setattr(generate.ModelRunner, "compute", watched)
    generate.generate(model, [[1, 2]], 3)
    assert seen == [False] * 3
    assert torch.backends.cuda.cudnn_sdp_enabled()


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [GPT_SHAPES[0], LLAMA_SHAPES[1]], ids=["gpt", "llama"])
def test_captured(shape):
    """Decode as a CUDA graph: the tokens of the CPU, in float64, rows that end early and contexts
    that move included."""
    model = loud(build(torch.float64, **shape))
    prompts = ragged(model.config.vocab_size)
    expected = generate.generate(model, prompts, 60, eot=5, **SAMPLED)
    assert generate.generate(model.cuda(), prompts, 60, eot=5, **SAMPLED) == expected
