"""`python FILE` of each root module whose own tests do not run it."""

import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def run(name, argv, monkeypatch, capsys) -> str:
    """What `python NAME.py` prints, in this process."""
    monkeypatch.setattr("sys.argv", [f"{name}.py", *map(str, argv)])
    threads = torch.get_num_threads()
    try:
        importlib.import_module(name).main()
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "name, argv, words",
    [
        ("data", ["--seq-length", "16"], "sequences of 16 tokens to train on"),
        ("runtime.json_files", [ROOT / "comparisons" / "fsdp.json"], "fsdp.json: JSON"),
        ("kernels", [], "cross_entropy"),
        ("moe", [], "largest relative difference of a gradient"),
        ("optimizer", [], "steps, "),
        ("inference.packing", [], "microseconds, one row"),
        ("lessons.ranks", [], "8 ranks: the sum of their numbers is 28"),
        ("sharding", [], "gathered equals whole: True"),
        ("corpus.tokenizer", ["some text"], "9 bytes, 9 tokens"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_lesson(name, argv, words, monkeypatch, capsys):
    assert words in run(name, argv, monkeypatch, capsys)


def test_metrics(tmp_path, monkeypatch, capsys):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            f'{{"step": {i}, "loss": {5 - i}.0, "lr": 0.1, "tokens": {i}, "grad_norm": 1.0}}\n'
            for i in (1, 2, 3)
        )
    )
    assert (
        str(tmp_path / "loss.png") in run("runtime.metrics", [tmp_path], monkeypatch, capsys)
        and (tmp_path / "loss.png").exists()
    )
