"""docs/symbols.html is what course/page/symbols.py writes, and its formulas are the project's
own."""

import re
from pathlib import Path

import pytest
import torch

import fsdp
import recompute
import schedules
from base import model_config
from course.page import symbols

ROOT = Path(__file__).parent.parent


def test_sheet_is_up_to_date(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(symbols, "OUT", tmp_path / "symbols.html")
    symbols.main()
    assert str(symbols.OUT) in capsys.readouterr().out
    same = symbols.OUT.read_bytes() == (ROOT / "docs" / "symbols.html").read_bytes()
    assert same, "docs/symbols.html is old: run `python -m course.page.symbols`, and commit"
    assert "http" not in symbols.OUT.read_text()


# no two letters have one value
MODEL = dict(L=6, h=48, a=4, s=40, V=500, b=3, t=2, p=5, v=7, m=11, N=13, K=12, Ψ=7e9)
MODEL |= dict(T_F=2.0, T_I=1.75, T_W=1.5)
# what the calls of the sheet name
NAMES = dict(model_config=model_config, recompute=recompute, schedules=schedules, fsdp=fsdp)
NAMES["Cost"] = schedules.Cost
NAMES["config"] = model_config.GPTConfig(
    num_layers=6, hidden_size=48, num_heads=4, seq_length=40, vocab_size=500
)


@pytest.mark.parametrize("formula", symbols.FORMULAS, ids=lambda x: x.text)
def test_formula_is_that_of_the_project(formula):
    """The text of the sheet, evaluated, and the function that stands beside it."""
    ours = eval(formula.call, NAMES, MODEL)
    assert eval(symbols.python(formula.text), {}, MODEL) == pytest.approx(ours, rel=1e-12)


def test_letters_are_those_of_the_course_and_of_their_files():
    meanings = {symbol.letter: symbol.meaning for symbol in symbols.SYMBOLS}
    text = (ROOT / "docs" / "course.md").read_text()
    table = re.search(r"\| symbol \|.*?\n\|-.*?\n(.*?)\n\n", text, re.DOTALL)[1]
    pairs = re.findall(r"\| ([^|]+) \| ([^|]+) (?=\|)", table)
    assert len(pairs) >= 16
    for letters, meaning in pairs:
        assert set(letters.split(", ")) <= meanings.keys()
        if "_" not in letters:
            assert meaning.split("; ") == [meanings[letter] for letter in letters.split(", ")]
    for symbol in symbols.SYMBOLS:
        # K is `state` of bytes_per_parameter
        name = "state" if symbol.letter == "K" else symbol.letter
        assert re.search(rf"\b{name}\b", (ROOT / symbol.file).read_text()), symbol


N = 4
# a list has the tensors of all ranks; after an all-reduce, and before an identity, one for all
OPERATIONS = {
    "all-reduce": lambda xs: [sum(xs)],
    "identity": lambda xs: xs * N,
    "all-gather": lambda xs: [torch.cat(xs)] * N,
    "reduce-scatter": lambda xs: list(sum(xs).chunk(N)),
    "all-to-all": lambda xs: [torch.cat(parts) for parts in zip(*(x.chunk(N) for x in xs))],
    "send to rank r + 1": lambda xs: [*xs[-1:], *xs[:-1]],
    "send to rank r - 1": lambda xs: [*xs[1:], *xs[:1]],
}


@pytest.mark.parametrize("row", symbols.COLLECTIVES, ids=lambda row: row.name)
def test_adjoint(row):
    """<A x, y> = <x, adjoint(A) y>"""
    xs = [torch.randn(8, dtype=torch.float64) for _ in range(1 if row.name == "identity" else N)]
    out = OPERATIONS[row.name](xs)
    ys = [torch.randn_like(x) for x in out]
    back = OPERATIONS[row.adjoint](ys)
    left, right = (sum(x @ y for x, y in zip(*pair)) for pair in ((out, ys), (xs, back)))
    torch.testing.assert_close(left, right)


def test_bytes_that_a_rank_sends():
    """In units of n (N - 1) / N, as fsdp.py counts a step of stages 0 and 3."""
    unit = 100 * (N - 1) / N
    known = {"n": 100, "N": N}
    sent = {row.name: eval(symbols.python(row.sends), known) for row in symbols.COLLECTIVES}
    gather, scatter = sent["all-gather"], sent["reduce-scatter"]
    assert sent["all-reduce"] == gather + scatter == fsdp.elements_sent(0, 1) * unit
    assert 3 * scatter + 6 * gather == fsdp.elements_sent(3, 3) * unit
    # N - 1 messages of n / N
    assert sent["all-to-all"] == (N - 1) * 100 / N and sent["send to rank r + 1"] == 100
