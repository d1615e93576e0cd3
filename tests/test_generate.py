import io
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_gpt import GPT_SHAPES, LLAMA_SHAPES, build

import checkpoint
import generate
import sequence_parallel
import train
from corpus.tokenizer import ByteTokenizer
from gpt import GPT
from inference import cli, kv_cache, packing, sampling
from inference.sampling import DIVERGED, choose, keys_of, uniform
from lessons import ranks
from runtime.world import Groups

ROOT = Path(__file__).parent.parent
EXPERTS = LLAMA_SHAPES[1] | dict(num_experts=4, ffn_hidden_size=40, router="topk", router_topk=2)
SAMPLED = dict(temperature=0.8, top_k=20, top_p=0.95, seed=3)


def loud(model: GPT) -> GPT:
    """With weights so large that what a token attends to decides what comes next."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p *= 6
    return model


def ragged(vocab_size, lengths=(3, 1, 7, 8, 5), seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=g).tolist() for n in lengths]


@torch.no_grad()
def naive(model, prompts, n, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    """The definition: for each token a forward pass of the plain model over its context."""
    s = model.config.seq_length
    out = []
    for prompt, key in zip(prompts, keys_of(prompts, seed)):
        ids = list(prompt)
        for _ in range(n):
            begin = 0 if len(ids) <= s else math.ceil((len(ids) - s) / (s // 2)) * (s // 2)
            u = uniform(torch.tensor([key], dtype=torch.int32), torch.tensor([len(ids)]))
            ids.append(
                int(choose(model(torch.tensor([ids[begin:]]))[:, -1], u, temperature, top_k, top_p))
            )
        out.append(ids[len(prompt) :])
    return out


# --- choosing -------------------------------------------------------------------------------------


def shares(p, n=2000, **options):
    """How often each token is chosen, over evenly spaced u."""
    u = (torch.arange(n) + 0.5) / n
    return (
        torch.bincount(choose(torch.tensor(p).log().expand(n, -1), u, **options), minlength=len(p))
        / n
    ).tolist()


def test_choose_by_hand():
    p = (0.1, 0.4, 0.2, 0.3)
    assert shares(p) == pytest.approx(p, abs=1e-3)
    assert shares(p, top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-3)
    # 0.4 is not enough, 0.7 is
    assert shares(p, top_p=0.69) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-3)
    assert (
        shares(p, top_p=0.4)
        == shares(p, top_p=1e-9)
        == shares(p, top_p=1e-300)
        == shares(p, temperature=0)
        == shares(p, top_k=1)
        == [0, 1, 0, 0]
    )
    assert shares(p, temperature=0.5) == pytest.approx([x * x / 0.3 for x in p], abs=1e-3)
    assert shares(p, top_k=9) == shares(p)
    # 1 - 2^-32 is 1 in float32
    assert choose(torch.zeros(2, 5), torch.tensor([0.0, 1 - 2**-32])).tolist() == [0, 4]
    one = torch.full((1, 5), -torch.inf).index_fill_(1, torch.tensor([2]), 0.0)
    # what has no probability is never chosen
    assert all(choose(one, torch.tensor([u])).item() == 2 for u in (0.0, 0.5, 1 - 2**-53))


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
    u = torch.stack(
        [uniform(keys, torch.full((2000,), position)) for position in range(20)]
    )  # [20, 2000]
    assert u.min() >= 0 and u.max() < 1
    # 3.6 standard deviations
    assert (u.flatten().histc(20, 0, 1) / u.numel() - 0.05).abs().max() < 0.004
    assert (
        torch.corrcoef(u).fill_diagonal_(0).abs().max() < 0.1
        and torch.corrcoef(u.t()[:50]).fill_diagonal_(0).abs().max() < 0.85
    )
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


@pytest.mark.parametrize("breakage", ["positions", "rows", "mask", "last", "key"])
def test_the_plain_model_sees(breakage, monkeypatch):
    """What keeps rows apart is left out, and the tokens change."""
    model = loud(build(torch.float64, **GPT_SHAPES[0]))
    prompts = ragged(97)
    expected = naive(model.eval(), prompts, 12, **SAMPLED)
    # rows that are as far as the longest
    if breakage == "positions":
        monkeypatch.setattr(
            kv_cache.PositionsOfRows, "forward", lambda self, x: x + self.weight[: x.shape[1]]
        )
    elif breakage == "mask":
        original = kv_cache.Cache.attend
        monkeypatch.setattr(
            kv_cache.Cache,
            "attend",
            lambda self, *args: (setattr(self, "mask", None), original(self, *args))[1],
        )
    # the new key goes to one column for all
    elif breakage == "rows":
        arrange = generate.Batch.arrange

        def at_the_longest(self):
            tokens = arrange(self)
            if self.cache.positions is not None:
                self.cache.positions = torch.full_like(self.cache.positions, self.cache.used - 1)
            return tokens

        monkeypatch.setattr(generate.Batch, "arrange", at_the_longest)
    elif breakage == "last":
        arrange = generate.Batch.arrange

        def the_end_of_all(self):
            tokens = arrange(self)
            self.last = (
                None if self.last is None else torch.full_like(self.last, int(self.last.max()))
            )
            return tokens

        monkeypatch.setattr(generate.Batch, "arrange", the_end_of_all)
    else:
        monkeypatch.setattr(
            generate, "uniform", lambda keys, positions: uniform(keys, positions * 0)
        )
    assert generate.generate(model, prompts, 12, **SAMPLED) != expected


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_equals_transformers(family):
    """Greedy, float64, 64 tokens after five prompts of different length (theirs are padded at the
    left)."""
    transformers = pytest.importorskip("transformers")
    if family == "gpt2":
        other = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=97,
                n_positions=96,
                n_embd=48,
                n_layer=2,
                n_head=4,
                bos_token_id=0,
                eos_token_id=None,
            )
        )
    else:
        other = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=97,
                max_position_embeddings=96,
                hidden_size=48,
                intermediate_size=80,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                bos_token_id=0,
                eos_token_id=None,
            )
        )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        other.save_pretrained(folder)
        model = loud(cli.load_model(folder, dtype=torch.float64)[0])
        prompts = ragged(97, (9, 2, 17, 12, 1))
        # the same loudness there: their folder, with our numbers
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(6 if p.dim() > 1 else 1)
    other = other.double().eval()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    expected = other.generate(
        ids,
        attention_mask=seen,
        max_new_tokens=64,
        min_new_tokens=64,
        do_sample=False,
        pad_token_id=0,
    )[:, width:].tolist()
    assert generate.generate(model, prompts, 64, temperature=0) == expected
    assert len({token for row in expected for token in row}) > 8


def test_ends():
    model = loud(build(torch.float64, **GPT_SHAPES[0]))
    prompts = ragged(97)
    options = dict(temperature=1.0)
    whole = generate.generate(model, prompts, 20, **options)
    eot = whole[2][7]
    cut = generate.generate(model, prompts, 20, eot=eot, **options)
    assert cut == [ids[: ids.index(eot)] if eot in ids else ids for ids in whole]
    pieces = [
        piece
        for some in generate.stream(
            model,
            prompts,
            20,
            eot=eot,
            stopped=lambda number, ids: number == 0 and len(ids) == 3,
            **options,
        )
        for piece in some
    ]
    finishes = {piece.number: piece.finish for piece in pieces if piece.finish}
    assert finishes == {
        n: "stop" if n == 0 else "end of text" if eot in ids else "length"
        for n, ids in enumerate(whole)
    }
    # streamed one by one, and only the first finishes early
    for number, ids in enumerate(cut):
        assert [
            piece.token for piece in pieces if piece.number == number and piece.token is not None
        ] == (ids[:3] if number == 0 else ids)
    assert (
        generate.generate(model, prompts, 0) == [[]] * 5 and generate.generate(model, [], 5) == []
    )


@pytest.mark.parametrize(
    "shape", [*GPT_SHAPES, LLAMA_SHAPES[1], EXPERTS], ids=lambda s: f"h{s['hidden_size']}"
)
@pytest.mark.parametrize("texts", [1, 16])
def test_packed(shape, texts):
    """Laid out for decoding, biases folded in: the same tokens."""
    model = loud(build(torch.float64, **shape))
    with torch.no_grad():
        # biases and norms that do something
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(
                    torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
                )
    prompts = ragged(model.config.vocab_size)
    logits = model.eval()(torch.tensor([prompts[2]]))
    expected = generate.generate(model, prompts, 24, **SAMPLED)
    packing.pack(model, texts)
    assert (model(torch.tensor([prompts[2]])) - logits).abs().max() < 1e-12 * logits.abs().max()
    assert generate.generate(model, prompts, 24, **SAMPLED) == expected


def test_training_goes_on_afterwards():
    model = build(torch.float32, **GPT_SHAPES[0] | dict(dropout=0.1)).train()
    before = dict(model.named_modules())
    generate.generate(model, [[1, 2]], 4)
    assert model.training and dict(model.named_modules()) == before
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).sum().backward()


# --- under every layout ---------------------------------------------------------------------------

LAYOUTS = [dict(tp=2), dict(pp=2), dict(tp=2, pp=2), dict(pp=4, layer_split=[1, 1, 1, 1])]


EXPERT_LAYOUTS = [dict(tp=2, ep=2), dict(ep=4), dict(pp=2, ep=2)]


def on_layouts(rank, path, layouts, requests):
    """Tokens of each request (prompts, options) under each layout of 4 ranks; data-parallel ranks
    have prompts of their own."""
    results = []
    for layout in layouts:
        layout = dict(layout)
        split = layout.pop("layer_split", None)
        groups = Groups.make("cpu", 4, **layout)
        model, _ = cli.load_model(path, dtype=torch.float64, groups=groups, layer_split=split)
        # as the command does
        for chunk in getattr(model, "chunks", [model]):
            packing.pack(chunk)
        dp, mine = (groups.dp.size(), groups.dp.rank()) if groups.dp else (1, 0)
        for prompts, options in requests:
            numbers = list(range(len(prompts)))[mine::dp]
            keys = keys_of(prompts, options.get("seed", 0))
            found = generate.generate(
                model,
                [prompts[i] for i in numbers],
                36,
                keys=[keys[i] for i in numbers],
                together=groups.dp if groups.ep else None,
                eot=5,
                **options,
            )
            results.append([None] * 4)
            dist.all_gather_object(results[-1], dict(zip(numbers, found)))
    return results


@pytest.mark.parametrize(
    "shape", [GPT_SHAPES[0], LLAMA_SHAPES[1], EXPERTS], ids=["gpt", "llama", "experts"]
)
def test_layouts(shape, tmp_path):
    """tp, pp, both, data parallel, experts: one device's tokens, greedy and sampled, of a
    checkpoint loaded under each. With one prompt there are ranks without any."""
    model = loud(build(torch.float64, **shape | dict(num_layers=4)))
    save(tmp_path, model)
    requests = [
        (ragged(model.config.vocab_size), dict(temperature=0)),
        (ragged(model.config.vocab_size), SAMPLED),
        ([[3, 4]], SAMPLED),
    ]
    layouts = (
        EXPERT_LAYOUTS
        if "num_experts" in shape
        else [dict(tp=2), dict(tp=2, pp=2)]
        if "llama" in shape
        else LAYOUTS
    )
    found = iter(ranks.run(on_layouts, 4, str(tmp_path), layouts, requests)[0])
    expected = [
        generate.generate(model.eval(), prompts, 36, eot=5, **options)
        for prompts, options in requests
    ]
    for layout in layouts:
        for whole, everywhere in zip(expected, found):
            assert all(one[i] == whole[i] for one in everywhere for i in one), layout
            assert {i for one in everywhere for i in one} == set(range(len(whole)))


def from_training(rank, flags):
    groups = Groups.make("cpu", 4, flags.get("tp", 1), flags.get("pp", 1), ep=flags.get("ep", 1))
    trainer = train.Trainer(train.Config(**flags), torch.device("cpu"), groups)
    if flags.get("sequence_parallel"):
        for chunk in trainer.chunks:
            sequence_parallel.cut_sequence(chunk, groups.tp, False)
    return generate.generate(trainer.model, [[1, 2, 3], [4]], 30, seed=1)


@pytest.mark.parametrize(
    "flags",
    [
        dict(tp=2, sequence_parallel=True, zero_stage=3, recompute="selective"),
        dict(pp=2, virtual_stages=2, tp=2),
        dict(pp=2, ep=2, zero_stage=3, num_experts=4),
    ],
    ids=str,
)
def test_from_a_model_in_training(flags):
    """As train.py's sample is made: the same tokens on every rank, and on one device."""
    base = dict(
        model="gpt2",
        num_layers=4,
        hidden_size=32,
        num_heads=4,
        seq_length=16,
        vocab_size=61,
        dropout=0.1,
        global_batch_size=8,
        micro_batch_size=1,
        precision="fp64",
        seed=5,
        device="cpu",
    )
    found = ranks.run(from_training, 4, base | flags)
    one = train.Trainer(
        train.Config(**base | {k: v for k, v in flags.items() if k == "num_experts"}),
        torch.device("cpu"),
        Groups(),
    )
    assert found == [generate.generate(one.model, [[1, 2, 3], [4]], 30, seed=1)] * 4


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


def save(folder, model):
    return checkpoint.save(
        folder / "checkpoints",
        1,
        {f"model.{n}": p.detach() for n, p in model.named_parameters()},
        {"config": {"tokenizer": "bytes"}, "model": asdict(model.config)},
    )


def test_half_a_character_in_a_line(saved, capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "note": "\\ud800 é"}')
    status, out, err = command(
        saved, capsys, "--prompt-file", str(tmp_path / "p.jsonl"), "--max-tokens", "2"
    )
    assert (
        status == 2
        and "p.jsonl, line 1: not JSON" in err
        and "half of a surrogate pair" in err
        and not out
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save(folder, loud(build(**GPT_SHAPES[0] | dict(vocab_size=257, seq_length=64))))
    return folder


def command(saved, capsys, *argv, name="--checkpoint"):
    status = cli.main([name, str(saved), "--device", "cpu", *argv])
    return status, *capsys.readouterr()


def test_command(saved, capsys):
    """A prompt streamed, a file, line by line: the same texts, with the same seed."""
    status, out, err = command(saved, capsys, "--prompt", "def é", "--max-tokens", "20")
    model, _ = cli.load_model(saved)
    ids = generate.generate(model, [list("def é".encode())], 20, temperature=0.8, eot=256)[0]
    text = ByteTokenizer().decode(ids)
    assert status == 0 and out == "def é" + text + "\n"
    assert "the first after" in err and "tokens/s" in err


def test_prompt_file(saved, capsys, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"id": i, "prompt": p}) + "\n\n"
            for i, p in enumerate(["ab", "a longer one", "ab", "x"])
        )
    )
    status, out, err = command(
        saved, capsys, "--prompt-file", str(prompts), "--max-tokens", "12", "--batch-size", "3"
    )
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [line["id"] for line in lines] == [0, 1, 2, 3] and "4 prompts" in err
    # the same prompt again
    assert lines[0]["text"] != lines[2]["text"]
    assert {line["finish"] for line in lines} <= {"length", "end of text"} and all(
        line["tokens"] <= 12 for line in lines
    )
    first = command(saved, capsys, "--prompt", "ab", "--max-tokens", "12")[1]
    assert first == "ab" + lines[0]["text"] + "\n"
    stop = lines[1]["text"][4:6]
    status, out, err = command(
        saved, capsys, "--prompt-file", str(prompts), "--max-tokens", "12", "--stop", stop
    )
    line = json.loads(out.splitlines()[1])
    assert (
        line["finish"] == "stop"
        and line["text"] == lines[1]["text"][: lines[1]["text"].index(stop)]
    )
    status, out, err = command(
        saved,
        capsys,
        "--prompt",
        "a longer one",
        "--max-tokens",
        "12",
        "--stop",
        stop,
        "--seed",
        "0",
    )
    assert out == "a longer one" + line["text"] + "\n"

    def from_lines(shown, lines=iter(["ab", "", "x"])):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", from_lines)
    monkeypatch.setattr("sys.stdin", type("", (), {"isatty": lambda self: False})())
    status, out, err = command(saved, capsys, "--interactive", "--max-tokens", "12")
    assert (
        status == 0
        and lines[0]["text"] in out
        and "the prompt is empty" in out
        and lines[3]["text"] in out
    )


@pytest.mark.parametrize(
    "content, words",
    [
        ('{"prompt": "a"}\n\n{"prompt": 3}\n', 'line 3: not an object with a "prompt"'),
        ('{"prompt": "a"}\n{oh\n', "line 2: not JSON"),
        ('{"prompt": ""}', "line 1: the prompt is empty"),
        (
            json.dumps({"prompt": "x" * 65}),
            "line 1: the prompt has 65 tokens, and the model's context holds 64",
        ),
        ("\n", "no prompts in it"),
        ("[1]", "line 1: Expected `object`, got `array`"),
        ('{"prompt": "\\ud800"}', "line 1: not JSON"),
        ('{"prompt": "a", "text": "b"}', "['text'] would be overwritten"),
    ],
)
def test_bad_lines(content, words, saved, capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text(content)
    status, out, err = command(saved, capsys, "--prompt-file", str(tmp_path / "p.jsonl"))
    assert status == 2 and words in err and not out


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--top-p", "0"], "--top-p 0.0: must be above 0"),
        (["--temperature", "-1"], "--temperature -1.0: must be 0, or at least"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x" * 65], "has 65 tokens"),
        (["--tp", "2"], "--tp 2 --pp 1: their product must divide the 1 ranks"),
        (["--stop", ""], "--stop ''"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--prompt", "a", "--interactive"], "one of them"),
        (["--layer-split", "1", "1"], "needs --pp 2"),
        (["--ep", "2"], "--ep 2: must divide the 1 data-parallel ranks"),
        (["--prompt-file", "nowhere"], "nowhere: cannot be read"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere"),
    ],
)
def test_bad_flags(argv, words, saved, capsys):
    status, out, err = command(saved, capsys, *argv)
    assert status == 2 and words in err and "Traceback" not in err


@pytest.mark.parametrize(
    "folder, words", [("nowhere", "nowhere: no such folder"), (".", "is not a checkpoint")]
)
def test_no_checkpoint(folder, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, err = command(folder, capsys)
    assert status == 2 and words in err


def test_under_torchrun(saved, tmp_path):
    """Two stages: rank 0 alone speaks, and all leave with status 0."""
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "ab"}\n{"prompt": "x"}\n{"prompt": "a longer one"}\n'
    )
    flags = [
        "--checkpoint",
        str(saved),
        "--device",
        "cpu",
        "--prompt-file",
        str(tmp_path / "p.jsonl"),
        "--max-tokens",
        "12",
    ]
    two = subprocess.run(
        [
            Path(sys.executable).parent / "torchrun",
            "--nproc-per-node",
            "2",
            "generate.py",
            "--pp",
            "2",
            *flags,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    one = subprocess.run(
        [sys.executable, "generate.py", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert two.returncode == one.returncode == 0, two.stderr
    assert two.stdout == one.stdout and len(one.stdout.splitlines()) == 3


def test_lessons(capsys):
    generate.lesson()
    sampling.main()
    out = capsys.readouterr().out
    assert out.count(": equal") == 2 and "0.000  1.000  0.000  0.000" in out


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [GPT_SHAPES[0], LLAMA_SHAPES[1]], ids=["gpt", "llama"])
def test_captured(shape):
    """Decode as a CUDA graph: the tokens of the CPU, in float64, rows that end early and contexts
    that move included."""
    model = loud(build(torch.float64, **shape))
    prompts = ragged(model.config.vocab_size)
    expected = generate.generate(model, prompts, 60, eot=5, **SAMPLED)
    assert generate.generate(model.cuda(), prompts, 60, eot=5, **SAMPLED) == expected


def test_an_output_that_is_full_or_ascii(saved, capsys, tmp_path, monkeypatch):
    """On a full disk the answers are lost, and that is said; where only ASCII can be shown, JSON
    stays JSON."""
    from runtime import terminal

    assert json.loads(cli.as_json({"text": "déjà"})) == {"text": "déjà"}
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.as_json({"text": "déjà"}) == '{"text": "d\\u00e9j\\u00e0"}'
    full = open("/dev/full", "w")
    muted = []
    # Muting it for good would mute the tests' own output.
    monkeypatch.setattr(terminal, "mute", muted.append)
    monkeypatch.setattr(sys, "stdout", full)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    status = cli.main(
        [
            "--checkpoint",
            str(saved),
            "--prompt-file",
            str(tmp_path / "p.jsonl"),
            "--max-tokens",
            "2",
            "--device",
            "cpu",
        ]
    )
    assert (
        status == 1
        and muted == [full]
        and "standard output: No space left on device" in capsys.readouterr().err
    )
