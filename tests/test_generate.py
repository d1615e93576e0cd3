import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkpoint
import generate
from tokenizer import ByteTokenizer
from test_gpt import GPT_SHAPES, LLAMA_SHAPES, build

ROOT = Path(__file__).parent.parent


def logits(*p):
    return torch.tensor(p).log()


def draws(n=2000, **options):
    g = torch.Generator().manual_seed(0)
    options = dict(temperature=1.0, top_k=0, top_p=1.0) | options
    return torch.bincount(torch.tensor([generate.choose(logits(0.1, 0.4, 0.2, 0.3), generator=g, **options) for _ in range(n)]), minlength=4) / n


def test_choose_by_hand():
    assert draws().tolist() == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.04)
    assert draws(top_k=2).tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.04)
    assert draws(top_p=0.69).tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.04)          # 0.4 is not enough, 0.7 is
    assert draws(top_p=0.4).tolist() == [0, 1, 0, 0]
    assert draws(top_p=1e-9).tolist() == draws(temperature=0).tolist() == draws(top_k=1).tolist() == [0, 1, 0, 0]
    assert draws(temperature=0.5).tolist() == pytest.approx([x * x / 0.3 for x in (0.1, 0.4, 0.2, 0.3)], abs=0.04)


@pytest.mark.parametrize("shape", [GPT_SHAPES[0], LLAMA_SHAPES[1]], ids=["gpt", "llama"])
def test_greedy_is_the_argmax_of_the_whole_sequence(shape):
    model = build(torch.float64, **shape)
    ids = list(generate.generate(model, [1, 2, 3], 10, temperature=0))
    assert len(ids) == 10
    whole = model(torch.tensor([[1, 2, 3] + ids]))[0].argmax(-1).tolist()
    assert whole[2:-1] == ids


def test_seed_end_of_text_and_long_contexts():
    model = build(torch.float64, **GPT_SHAPES[0])
    a, b, c = ([*generate.generate(model, [1], 50, seed=s)] for s in (0, 0, 1))                 # the context holds 32
    assert a == b != c and len(a) == 50
    assert list(generate.generate(model, [1], 50, seed=0, eot=a[7])) == a[:a.index(a[7])]
    assert list(generate.generate(model, list(range(60)), 3, temperature=0)) == list(generate.generate(model, list(range(28, 60)), 1, temperature=0)) \
        + list(generate.generate(model, list(range(60)), 3, temperature=0))[1:]


def save(folder, model):
    import dataclasses
    return checkpoint.save(folder, 1, {f"model.{n}": p.detach() for n, p in model.named_parameters()},
                           {"config": {"tokenizer": "bytes"}, "model": dataclasses.asdict(model.config)})


def test_command(tmp_path):
    """From a run's folder."""
    model = build(**GPT_SHAPES[0] | dict(vocab_size=257))
    save(tmp_path / "checkpoints", model)
    command = [sys.executable, "generate.py", "--checkpoint", str(tmp_path), "--max-tokens", "20", "--device", "cpu"]
    run = lambda *more: subprocess.run([*command, *more], cwd=ROOT, capture_output=True, timeout=60)  # noqa: E731
    a = run("--prompt", "def ")
    assert a.returncode == 0 and a.stdout.startswith(b"def ")
    model, index = generate.load_model(checkpoint.find(str(tmp_path)))
    ids = generate.generate(model, list(b"def "), 20, temperature=0.8, eot=256)
    assert a.stdout.decode() == "def " + ByteTokenizer().decode(list(ids)) + "\n"        # the same seed gives the same text


@pytest.mark.parametrize("argv, words", [
    (["--checkpoint", "nowhere"], "nowhere: no such folder"), (["--checkpoint", "."], "is not a checkpoint"),
    (["--checkpoint", ".", "--top-p", "0"], "--top-p above 0"), (["--checkpoint", ".", "--temperature", "-1"], "at least 0"),
    ([], "--checkpoint")])
def test_bad_input(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["generate.py", *argv])
    with pytest.raises(SystemExit) as e:
        generate.main()
    assert e.value.code == 2 and words in capsys.readouterr().err


def test_a_model_that_diverged():
    with pytest.raises(FloatingPointError, match="not finite"):
        generate.choose(torch.full((5,), torch.nan), 0.8, 0, 1.0, torch.Generator())
