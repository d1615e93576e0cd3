"""Every comparison gets through, at toy size, so that a rename that breaks one is seen; none of
them overwrites what was measured."""

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
# script, arguments beside --toy, what it leaves
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
TRANSFORMERS = "generation", "single_device"


def main_of(script: str, argv: list[str], monkeypatch):
    """Runs a comparison in this process, as a module `comparisons.SCRIPT`, so that its ranks can
    import it too. Returns what its main returns."""
    monkeypatch.syspath_prepend(str(COMPARISONS))
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr("sys.argv", [str(COMPARISONS / f"{script}.py"), *map(str, argv)])
    with torch._functorch.config.patch(
        donated_buffer=torch._functorch.config.donated_buffer
        # put back what kernels.py changes
    ):
        return importlib.import_module(f"comparisons.{script}").main()


def tracked() -> dict[Path, int]:
    return {
        path: path.stat().st_mtime_ns
        for folder in (COMPARISONS, ROOT / "figures")
        for path in folder.iterdir()
        if path.suffix in (".json", ".png")
    }


@pytest.mark.parametrize(
    "script, argv, files", SCRIPTS, ids=lambda x: x if isinstance(x, str) else "-".join(x)
)
def test_toy(script, argv, files, tmp_path, monkeypatch, capfd):
    if script in TRANSFORMERS:
        pytest.importorskip("transformers")
    before = tracked()
    threads = torch.get_num_threads()
    try:
        assert not main_of(script, [*argv, "--toy", "--out", tmp_path / "out"], monkeypatch), (
            capfd.readouterr()
        )
    finally:
        torch.set_num_threads(threads)
    assert (
        sorted(files) == sorted(path.name for path in (tmp_path / "out").iterdir())
        and tracked() == before
    )
    assert f"written: {tmp_path / 'out'}" in capfd.readouterr().out


def test_none_is_forgotten():
    assert {path.stem for path in COMPARISONS.glob("*.py")} == {
        script for script, _, _ in SCRIPTS
    } | {"report"}


def test_as_a_command(tmp_path):
    """As the README has it: the script finds the modules beside it and above it."""
    done = subprocess.run(
        [sys.executable, COMPARISONS / "optimizer_state.py", "--toy", "--out", tmp_path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and (tmp_path / "optimizer_state.json").exists(), done.stderr


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
    assert e.value.code == 2 and words in err and err.count("\n") == 1 and tracked() == before


def test_make_figures_writes_what_is_tracked():
    """The only commands that name comparisons/ and figures/ are those of the Makefile, and each of
    its lines is tried above."""
    lines = re.findall(
        r"\t\.venv/bin/python comparisons/(\w+)\.py(.*)", (ROOT / "Makefile").read_text()
    )
    assert len(lines) >= 10 and all("$(RESULTS)" in rest for _, rest in lines)
    known = {script for script, _, _ in SCRIPTS}
    assert {script for script, _ in lines} <= known
