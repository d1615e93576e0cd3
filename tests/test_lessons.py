"""`python FILE` of each module whose own tests do not run it."""

import importlib
import json
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
        ("cross_entropy", [], "in place: loss"),
        ("data", ["--seq-length", "16"], "sequences of 16 tokens to train on"),
        ("runtime.json_files", [ROOT / "comparisons" / "fsdp.json"], "fsdp.json: JSON"),
        ("chunked_head", [], "64 tokens"),
        ("dropout", [], "joined, equal it: True"),
        ("moe", [], "largest relative difference of a gradient"),
        ("flat_parameters", [], "copied back, equals itself: True"),
        ("gradients", [], "of them skipped"),
        ("optimizer", [], "joined 2.0000"),
        ("inference.packing", [], "microseconds to multiply"),
        ("lessons.ranks", [], "8 ranks: the sum of their numbers is 28"),
        ("routers", [], "plan at temperature 0.02"),
        ("sharding", [], "gathered equals whole: True"),
        ("transfers", [], "stuck: None"),
        ("corpus.tokenizer", ["some text"], "9 bytes, 9 tokens"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_lesson(name, argv, words, monkeypatch, capsys):
    assert words in run(name, argv, monkeypatch, capsys)


def test_metrics(tmp_path, monkeypatch, capsys):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in (1, 2, 3):
            row = {"step": step, "loss": 5.0 - step, "lr": 0.1, "tokens": step, "grad_norm": 1.0}
            file.write(json.dumps(row) + "\n")
    figure = tmp_path / "loss.png"
    assert str(figure) in run("runtime.metrics", [tmp_path], monkeypatch, capsys)
    assert figure.exists()
