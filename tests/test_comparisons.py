"""benchmarks/: each runs through at toy size, so that a rename that breaks one fails here. None of
them overwrites measured results."""

import argparse
import importlib
import json
import re
import tempfile
from pathlib import Path

import matplotlib.pyplot
import processes
import pytest
import torch
import torch._functorch.config

import recompute
from benchmarks import kernels, layouts, redraw, report, reproduction
from run.metrics import read_metrics

ROOT = Path(__file__).parent.parent
COMPARISONS = ROOT / "benchmarks"
FIGURES = ROOT / "docs" / "figures"
# Kept as files: what each rank holds under each technique. All others are drawn from results.
PICTURES = sorted(FIGURES.glob("ranks_*.svg"))
LOSSES = [f"loss_{name}.json" for name in ("experts", "fp8", "muon", "state")]
LOSSES += ["fp8_training.svg", "moe_load.svg", "muon.svg"]
# (script, arguments beside --toy, files that it writes)
SCRIPTS = [
    ("activation_memory", [], ["activation_memory.json", "activation_memory.svg"]),
    ("context", [], ["context.json", "context.svg"]),
    ("fine_tuning", [], ["fine_tuning.json", "fine_tuning.svg"]),
    ("packing", [], ["packing.json", "packing.svg"]),
    ("fp8", [], ["fp8.json", "fp8.svg"]),
    ("fsdp", [], ["fsdp.json", "fsdp_time_line.svg"]),
    ("generation", [], ["generation.json", "generation.svg"]),
    ("languages", ["--folders", str(Path(torch.__file__).parent)], ["languages", "languages.json"]),
    ("layouts", ["--ranks", "2"], ["layouts.json", "layouts.svg", "same_loss.svg"]),
    ("loss_of_variants", [], LOSSES),
    ("moe", [], ["moe_speed.json"]),
    ("pictures", ["--pictures", "4"], ["pictures", "pictures.json", "pictures.svg"]),
    ("pipeline", [], ["pipeline.json", "pipeline_schedules.svg", "pipeline_bubble.svg"]),
    ("planner", [], ["planner.json", "planner.svg"]),
    ("fine_tuning", ["--prompts"], ["prompt_tuning.json", "prompt_tuning.svg"]),
    ("quantization", [], ["quantization.json"]),
    ("recompute_overhead", [], ["recompute_overhead.json"]),
    ("reproduction", [], ["reproduction.json", "reproduction.svg", "reproduction_scaling.svg"]),
    ("rollout", [], ["rollout.json", "rollout.svg"]),
    ("serving_speed", [], ["serving_speed.json", "serving_speed.svg"]),
    ("serving_plan", [], ["serving_plan.json", "serving_frontier.svg"]),
    ("silent_bugs", [], ["silent_bugs.json", "silent_bugs.svg"]),
    ("stale_rollouts", [], ["stale_rollouts.json"]),
    ("training_step", [], ["training_step.json"]),
    ("zero_memory", [], ["zero_memory.json", "zero_memory.svg"]),
]
# these need transformers, which is not installed everywhere
TRANSFORMERS = ("generation", "serving_speed", "training_step")


def main_of(script: str, argv: list[str], monkeypatch):
    """Run a comparison in this process, as a module `benchmarks.SCRIPT`, so that its ranks can
    import it too. Returns what its main returns."""
    monkeypatch.setattr("sys.argv", [str(COMPARISONS / f"{script}.py"), *map(str, argv)])
    # on leaving, puts back what benchmarks/kernels.py changes
    config = torch._functorch.config
    with config.patch(donated_buffer=config.donated_buffer):
        return importlib.import_module(f"benchmarks.{script}").main()


def tracked() -> dict[Path, int]:
    """{measured result or figure: when it was written}"""
    paths = [*COMPARISONS.iterdir(), *FIGURES.iterdir()]
    return {path: path.stat().st_mtime_ns for path in paths if path.suffix in (".json", ".svg")}


def run_forked(world: int, script: list[str], flags: list[str], steps: int) -> list[dict]:
    """As try_layouts.run, by ranks that have imported the project. (On a GPU a fork cannot.)"""
    with tempfile.TemporaryDirectory() as folder:
        ends = ["--steps", str(steps), "--out", f"{folder}/run"]
        done = processes.run([*script, *flags, *ends], world)
        assert done.returncode == 0, done.stderr
        return read_metrics(Path(folder) / "run" / "metrics.jsonl")[0]


def count_short_steps(monkeypatch) -> None:
    """Steps that reproduction.py counts on the meta device: of few layers and micro-batches."""
    counted = reproduction.counted

    def of_few_layers(words: str):
        if "--pp 8" in words:
            return counted(f"{words} --num-layers 24 --global-batch-size 8")
        return counted(f"{words} --num-layers 2")

    monkeypatch.setattr(reproduction, "counted", of_few_layers)


def write_no_figures(monkeypatch) -> None:
    """Figures are made, and their files are empty: the same code draws all of them from the
    results in test_figures_are_drawn_from_the_results."""

    def touch(figure, path: Path) -> None:
        matplotlib.pyplot.close(figure)
        path.touch()

    monkeypatch.setattr(importlib.import_module("benchmarks.style"), "save", touch)


@pytest.mark.parametrize(
    "script, argv, files", SCRIPTS, ids=lambda x: x if isinstance(x, str) else "-".join(x)
)
def test_toy(script, argv, files, tmp_path, monkeypatch, capfd):
    if script in TRANSFORMERS:
        pytest.importorskip("transformers")
    before = tracked()
    out = tmp_path / "out"
    threads = torch.get_num_threads()
    if not torch.cuda.is_available():
        monkeypatch.setattr(layouts, "run", run_forked)
    count_short_steps(monkeypatch)
    write_no_figures(monkeypatch)
    try:
        status = main_of(script, [*argv, "--toy", "--out", out], monkeypatch)
    finally:
        torch.set_num_threads(threads)
    printed = capfd.readouterr()
    assert not status, printed
    assert sorted(files) == sorted(path.name for path in out.iterdir())
    assert tracked() == before
    assert f"written: {out}" in printed.out


def test_none_is_forgotten():
    scripts = {script for script, _, _ in SCRIPTS} | {"gpu", "redraw"}
    commands = [path for path in COMPARISONS.glob("*.py") if "\ndef main(" in path.read_text()]
    assert {path.stem for path in commands} == scripts


def texts(svg: str) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)<", svg)


def without_ids(svg: str) -> str:
    """matplotlib hashes coordinates into ids, with the last digit that a processor rounds."""
    return re.sub(r"\b[mp][0-9a-f]{10}\b", "", svg)


def test_figures_are_drawn_from_the_results(tmp_path):
    """What redraw.py draws is what is tracked: byte for byte, but for ids, where this matplotlib
    drew it, else with the same texts."""
    for name in redraw.measured():
        redraw.redraw(name, tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in FIGURES.glob("*.svg") if path not in PICTURES)
    for name in drawn:
        new = (tmp_path / name).read_text()
        old = (FIGURES / name).read_text()
        same_version = f"Matplotlib v{matplotlib.__version__}," in old
        again = "python -m benchmarks.redraw draws it again"
        assert texts(new) == texts(old), f"{name}: {again}"
        same = without_ids(new) == without_ids(old)
        assert same or not same_version, f"{name}: {again}"


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.svg")), ids=lambda path: path.stem)
def test_text_of_figures_can_be_read(path):
    """No text is smaller than 8 points at the size at which the figure is shown: 16 pixels of a
    slide that is 1,280 wide."""
    svg = path.read_text()
    assert len(svg) < 300_000
    assert float(re.search(r'<svg [^>]*width="([\d.]+)pt"', svg)[1]) <= 8.5 * 72
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
    assert len(sizes) == len(texts(svg)) and min(sizes) >= 8


def test_each_technique_names_its_picture():
    sources = "".join(
        path.read_text() for path in [*ROOT.glob("*.py"), *ROOT.glob("finetune/*.py")]
    )
    assert len(PICTURES) == 8
    for path in PICTURES:
        assert sources.count(f"    picture: docs/figures/{path.name}\n") == 1, path.name


def test_picture_of_recomputation_has_the_bytes_of_recompute():
    """Those of GPT-3 175B."""
    found = texts((FIGURES / "ranks_recompute.svg").read_text())
    for name in recompute.GRANULARITIES:
        nbytes = recompute.layer_bytes(s=2048, b=1, h=12288, a=96, recompute=name)
        assert f" {nbytes / 1e9:.2f} GB" in found[found.index(name) + 1]


@pytest.mark.repetition
def test_two_checkouts(tmp_path, monkeypatch, capfd):
    argv = ["--toy", "--other", ROOT, "--out", tmp_path]
    main_of("training_step", argv, monkeypatch)
    assert "written" in capfd.readouterr().out
    found = json.loads((tmp_path / "two_checkouts.json").read_text())["results"]["toy fp32"]
    assert found["other over this"]["median"] > 0


@pytest.mark.parametrize(
    "command, words",
    [
        (
            "zero_memory --toy --out benchmarks/results",
            "--toy does not overwrite measured results",
        ),
        ("zero_memory --ranks 0", "--ranks 0: must be at least 1"),
        ("zero_memory --out Makefile", "--out Makefile: File exists; name a folder"),
        ("training_step --out runs --other tests", "has no train.py"),
        ("context --out runs works", "works: not known; there are work, bytes"),
        # before the first model is measured
        ("quantization --out runs --models tests", "has no index.json"),
        ("quantization --out runs --models tests --sequences 1", "--sequences 1: a"),
        ("fp8 --out runs --steps 1", "--steps 1: must be at least 2"),
        ("loss_of_variants experts --out runs --steps 200", "300 would do"),
        ("layouts --out runs --steps 3", "name more"),
    ],
)
def test_refusals(command, words, monkeypatch, capsys):
    before = tracked()
    monkeypatch.chdir(ROOT)
    script, *argv = command.split()
    with pytest.raises(SystemExit) as e:
        main_of(script, argv, monkeypatch)
    err = capsys.readouterr().err
    assert e.value.code == 2
    assert words in err and err.count("\n") == 1
    assert tracked() == before


def test_make_figures_writes_what_is_tracked():
    """Only the Makefile's commands write into benchmarks/ and docs/figures/, and each of their
    scripts runs above."""
    lines = re.findall(
        r"\t\$\(VENV\)/bin/python -m benchmarks\.(\w+)(.*)", (ROOT / "Makefile").read_text()
    )
    assert len(lines) >= 10
    assert all("$(RESULTS)" in rest for _, rest in lines)
    known = {script for script, _, _ in SCRIPTS} | {"gpu"}
    assert {script for script, _ in lines} <= known


# --- timing, and results that grow ----------------------------------------------------------------


def test_outputs_of_all_calls_are_alive():
    """No call writes where the one before it wrote, and none where it wrote itself."""
    timer = kernels.Timer([lambda: torch.ones(4096)] * 3, "cpu")
    first = [output.data_ptr() for output in timer.outputs]
    timer.call_each()
    second = [output.data_ptr() for output in timer.outputs]
    assert len(set(first)) == len(set(second)) == 3
    assert all(a != b for a, b in zip(first, second))


def test_results_of_another_device_are_not_mixed(tmp_path, monkeypatch, capsys):
    parser = argparse.ArgumentParser("kernels.py")
    args = argparse.Namespace(out=tmp_path, toy=False)
    assert report.earlier("kernels", parser, args) == {}
    path = report.write("kernels", {"toy": False, "results": {"a": {}}}, args)
    assert report.earlier("kernels", parser, args) == {"a": {}}
    saved = json.loads(path.read_text())
    saved["environment"]["device"] = "NVIDIA H200"
    for text in (json.dumps(saved), "{", "[]"):
        path.write_text(text)
        with pytest.raises(SystemExit) as e:
            report.earlier("kernels", parser, args)
        err = capsys.readouterr().err
        assert e.value.code == 2 and err.count("\n") == 1 and "--out" in err
    assert report.earlier("kernels", parser, argparse.Namespace(out=tmp_path, toy=True)) == {}
