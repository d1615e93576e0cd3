"""docs/reproduction.md: every published number has a row, every row that is off says why, and the
page is what the results hold."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
comparison = importlib.import_module("benchmarks.reproduction")
papers = importlib.import_module("benchmarks.reproduction_papers")
predictions = importlib.import_module("benchmarks.reproduction_predictions")
announced = importlib.import_module("benchmarks.reproduction_announced")
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "reproduction.json").read_text())
SECTIONS = {section["title"]: section for section in RESULTS["sections"]}
CLAIMS = [claim for section in RESULTS["sections"] for claim in section["claims"]]
# how many numbers each source gives
NUMBERS = {
    # six models: parameters, TFLOP/s, % of the peak
    "Megatron-LM, table 1": 6 * 3,
    # three formulas; four bubbles, two micro-batches in flight; collectives 2, 2, v; days, short
    "Megatron-LM, formulas": 3 + 4 + 2 + 3 + 2,
    # six rows of table 2; interleaving; first stage 2 x 2; outside; state of two models
    "Activations": 6 + 1 + 4 + 1 + 2,
    # five layers, forward and backward; three overheads
    "Time of a layer": 5 * 2 + 3,
    # four models, two kinds; MFU and HFU of two; two formulas
    "Time of a step": 4 * 2 + 2 * 2 + 2,
    # four stages: GB, elements of one micro-batch, elements of several
    "ZeRO": 4 * 3,
    "Zero bubble": 2 + 1,
    # iterations, assignments, four gates
    "Sinkhorn routing": 6,
    "Prompt tuning": 1,
    # peaks, ceilings; TFLOP/s of NeMo; torchtitan; llm.c; Megatron-core
    "Other projects on GPUs": 3 + 2 + 1 + 4 + 1 + 2,
    # five models on three numbers of GPUs; the rule of thumb, twice from .. to
    "Days for 300 billion tokens": 5 * 3 + 4,
    # Llama-2 on two kinds; H100 in FP8; FLOPs of a token
    "Tokens per second": 2 * 3 + 4 + 1,
    "FSDP over tensor and pipeline parallelism": 5,
    "Memory of inference": 4 * 2,
    # 175B: days, two less; techniques 1 + 2 + 2; layouts; H100s 2; 1T 2 and interleaving; Llama-2
    # 3 + 3; state; RLHF
    "What was announced": 3 + 5 + 1 + 2 + 3 + 6 + 1 + 1,
}


def test_every_number_has_a_row():
    assert {title: len(section["claims"]) for title, section in SECTIONS.items()} == NUMBERS
    assert len(
        {(title, c["claim"]) for title in SECTIONS for c in SECTIONS[title]["claims"]}
    ) == len(CLAIMS)


def test_what_is_off_says_why():
    for claim in CLAIMS:
        if claim["ratio"] is None:
            assert claim["how"] == "not reachable" and claim["why"], claim
            continue
        assert claim["ratio"] == pytest.approx(claim["ours"] / claim["published"])
        if abs(claim["ratio"] - 1) > 0.1:
            # one sentence
            assert claim["why"].endswith(".") and ". " not in claim["why"], claim
            assert f"{claim['claim']} ({claim['ratio']:.2f})" in comparison.PAGE.read_text()
    # what is counted is exact, but for what the papers round or leave out
    exact = [c for c in CLAIMS if c["how"] == "counted" and "% of the activ" not in c["claim"]]
    assert len(exact) > 40
    assert all(abs(claim["ratio"] - 1) < 0.06 for claim in exact)


def test_the_page_is_that_of_the_results():
    text = comparison.PAGE.read_text()
    assert comparison.page(text, RESULTS) == text
    assert not RESULTS["toy"]


def test_ratios_of_today():
    """Of every claim that needs neither a long search nor the trainer's step."""
    search = predictions.Search(toy=False)
    cases = {
        "Megatron-LM, table 1": papers.table_1(),
        "Time of a layer": papers.layer_times(),
        "ZeRO": papers.zero(),
        "Zero bubble": papers.zero_bubble(),
        "Sinkhorn routing": papers.sinkhorn(),
        "Tokens per second": predictions.h100_speeds(),
        "Other projects on GPUs": [*announced.peaks(), *announced.megatron_core()],
        "What was announced": [*announced.days_before(), *announced.measured_here()],
        "Days for 300 billion tokens": predictions.rule_of_thumb(),
        "FSDP over tensor and pipeline parallelism": predictions.fsdp_ratios(search)[:1],
    }
    for title, claims in cases.items():
        saved = {claim["claim"]: claim["ratio"] for claim in SECTIONS[title]["claims"]}
        for claim in claims:
            ratio = saved[claim.claim]
            assert claim.ratio == (ratio and pytest.approx(ratio, rel=1e-6)), claim


def test_a_ratio_by_hand():
    """GPT-3: 8 x 300e9 x 175e9 FLOPs at 1,024 x 140e12 a second are 33.9 days, published as 34."""
    claim = papers.days_of_gpt_3()[0]
    assert claim.ours == pytest.approx(4.2e23 / 1.4336e17 / 86400)
    assert claim.ratio == pytest.approx(0.9973, abs=1e-4)
    line = comparison.row_of(claim._asdict() | {"ratio": claim.ratio})
    assert line.endswith("| 34 | 33.91 | counted, 1,024 GPUs of 140 TFLOP/s | 1.00 |")
