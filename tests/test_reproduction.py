"""docs/reproduction.md: every published number has a row, every row that is off says why, and the
page is what the results hold."""

import json

import pytest

from benchmarks import report, reproduction

RESULTS = json.loads((report.RESULTS / "reproduction.json").read_text())
CLAIMS = [claim for section in RESULTS["sections"] for claim in section["claims"]]
# The trainer's own step on the meta device takes seconds for each of its layouts.
SLOW = ("megatron_formulas", "collectives", "first_stage", "table_5")


def test_every_number_has_a_row():
    of_file = [
        (section["title"], part, row[0])
        for section in reproduction.CLAIMS["sections"]
        for part, found in section["parts"].items()
        for row in found["claims"]
    ]
    of_page = [
        (section["title"], claim["part"], claim["claim"])
        for section in RESULTS["sections"]
        for claim in section["claims"]
    ]
    assert of_file == of_page and len(set(of_page)) == len(of_page) == 166
    assert {part for _, part, _ in of_page} == {*reproduction.COUNTED, *reproduction.SEARCHED}


def test_what_is_off_says_why():
    for claim in CLAIMS:
        assert claim["ratio"] == pytest.approx(claim["ours"] / claim["published"])
        if abs(claim["ratio"] - 1) > 0.1:
            # one sentence
            assert claim["why"].endswith(".") and ". " not in claim["why"], claim
            assert f"{claim['claim']} ({claim['ratio']:.2f})" in reproduction.PAGE.read_text()
    # what is counted is exact, but for what the papers round or leave out
    exact = [c for c in CLAIMS if c["how"] == "counted" and "% of the activ" not in c["claim"]]
    assert len(exact) > 40
    assert all(abs(claim["ratio"] - 1) < 0.06 for claim in exact)


def test_the_page_is_that_of_the_results():
    text = reproduction.PAGE.read_text()
    assert reproduction.page(text, RESULTS) == text
    assert not RESULTS["toy"]


def test_ratios_of_today():
    """Of every claim that needs neither a long search nor the trainer's step."""
    parts = {name: f() for name, f in reproduction.COUNTED.items() if name not in SLOW}
    parts["fsdp_ratios"] = [reproduction.fsdp_speed(reproduction.Search(toy=False), 8)]
    for part, found in parts.items():
        saved = [claim["ours"] for claim in CLAIMS if claim["part"] == part]
        assert [ours.value for ours in found] == pytest.approx(saved[: len(found)], rel=1e-6), part


def test_a_ratio_by_hand():
    """GPT-3: 8 x 300e9 x 175e9 FLOPs at 1,024 x 140e12 a second are 33.9 days, published as 34."""
    claim, _ = reproduction.claims_of("days_of_2021", reproduction.days_of_2021())
    assert claim["ours"] == pytest.approx(4.2e23 / 1.4336e17 / 86400)
    assert claim["ratio"] == pytest.approx(0.9973, abs=1e-4)
    line = reproduction.row_of(claim)
    assert line.endswith("| 34 | 33.91 | counted, 1,024 GPUs of 140 TFLOP/s | 1.00 |")
