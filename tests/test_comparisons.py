"""comparisons/: each runs through at toy size, so that a rename that breaks one fails here. None of
them overwrites measured results."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._functorch.config

ROOT = Path(__file__).parent.parent
COMPARISONS = ROOT / "comparisons"
# (script, arguments beside --toy, files that it writes)
SCRIPTS = [
    ("activation_memory", [], ["activation_memory.json", "activation_memory.png"]),
    ("data_parallel", [], ["data_parallel.json"]),
    ("fsdp", [], ["fsdp.json", "fsdp_time_line.png"]),
    ("generation", [], ["generation.json", "generation.png"]),
    ("kernels", [], ["kernels.json", "kernels.png"]),
    ("layouts", ["--ranks", "2"], ["layouts.json", "layouts.png"]),
    ("moe", ["training"], ["moe_training.json", "moe_load.png", "moe_loss.png"]),
    ("moe", ["speed"], ["moe_speed.json"]),
    ("optimizer_state", [], ["optimizer_state.json"]),
    ("pipeline", [], ["pipeline.json", "pipeline_schedules.png", "pipeline_bubble.png"]),
    ("prompt_memory", [], ["prompt_memory.json"]),
    ("prompt_tuning", [], ["prompt_tuning.json", "prompt_tuning.png"]),
    ("recompute_overhead", [], ["recompute_overhead.json", "recompute_overhead.png"]),
    ("single_device", [], ["single_device.json"]),
    ("tensor_parallel", [], ["tensor_parallel.json"]),
    ("training_step", [], ["training_step.json", "training_step.png"]),
    ("zero_memory", [], ["zero_memory.json", "zero_memory.png"]),
]
# these need transformers, which is not installed everywhere
TRANSFORMERS = ("generation", "single_device")


def main_of(script: str, argv: list[str], monkeypatch):
    """Run a comparison in this process, as a module `comparisons.SCRIPT`, so that its ranks can
    import it too. Returns what its main returns."""
    monkeypatch.syspath_prepend(str(COMPARISONS))
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr("sys.argv", [str(COMPARISONS / f"{script}.py"), *map(str, argv)])
    # on leaving, puts back what comparisons/kernels.py changes
    config = torch._functorch.config
    with config.patch(donated_buffer=config.donated_buffer):
        return importlib.import_module(f"comparisons.{script}").main()


def tracked() -> dict[Path, int]:
    """{measured result or figure: when it was written}"""
    paths = [*COMPARISONS.iterdir(), *(ROOT / "figures").iterdir()]
    return {path: path.stat().st_mtime_ns for path in paths if path.suffix in (".json", ".png")}


@pytest.mark.parametrize(
    "script, argv, files", SCRIPTS, ids=lambda x: x if isinstance(x, str) else "-".join(x)
)
def test_toy(script, argv, files, tmp_path, monkeypatch, capfd):
    if script in TRANSFORMERS:
        pytest.importorskip("transformers")
    before = tracked()
    out = tmp_path / "out"
    threads = torch.get_num_threads()
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
    scripts = {script for script, _, _ in SCRIPTS}
    assert {path.stem for path in COMPARISONS.glob("*.py")} == scripts | {"report"}


def test_as_a_command(tmp_path):
    """The script finds the modules beside it and above it, from any folder."""
    done = subprocess.run(
        [sys.executable, COMPARISONS / "single_device.py", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "--toy" in done.stdout


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--toy", "--out", "comparisons"], "--toy does not overwrite measured results"),
        (["--toy", "--figures", "figures"], "--toy does not overwrite"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--out", "Makefile"], "--out Makefile: File exists; name a folder"),
    ],
    ids=str,
)
def test_refusals(argv, words, monkeypatch, capsys):
    before = tracked()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["optimizer_state.py", *argv])
    with pytest.raises(SystemExit) as e:
        main_of("optimizer_state", argv, monkeypatch)
    err = capsys.readouterr().err
    assert e.value.code == 2
    assert words in err and err.count("\n") == 1
    assert tracked() == before


def test_make_figures_writes_what_is_tracked():
    """Only the Makefile's commands write into comparisons/ and figures/, and each of their scripts
    runs above."""
    lines = re.findall(
        r"\t\.venv/bin/python comparisons/(\w+)\.py(.*)", (ROOT / "Makefile").read_text()
    )
    assert len(lines) >= 10
    assert all("$(RESULTS)" in rest for _, rest in lines)
    known = {script for script, _, _ in SCRIPTS}
    assert {script for script, _ in lines} <= known
