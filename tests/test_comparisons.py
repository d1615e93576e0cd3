"""comparisons/: each runs through at toy size, so that a rename that breaks one fails here. None of
them overwrites measured results."""

import argparse
import contextlib
import functools
import importlib
import io
import itertools
import json
import math
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import matplotlib.pyplot
import processes
import pytest
import report
import small_run
import torch
import torch._functorch.config

import recompute
from comparisons import gpu, kernels, nccl, redraw, sums_task, training_step
from figures import pictures
from proof import mutations, verify

ROOT = Path(__file__).parent.parent
COMPARISONS = ROOT / "comparisons"
# (script, arguments beside --toy, files that it writes)
SCRIPTS = [
    ("activation_memory", [], ["activation_memory.json", "activation_memory.svg"]),
    ("context", [], ["context.json", "context.svg", "context_time_line.svg"]),
    ("fine_tuning", [], ["fine_tuning.json", "fine_tuning.svg"]),
    ("packing", [], ["packing.json", "packing.svg"]),
    ("fp8", ["numbers"], ["fp8.json", "fp8.svg"]),
    ("fp8_training", [], ["fp8_training.json", "fp8_training.svg"]),
    ("fsdp", [], ["fsdp.json", "fsdp_time_line.svg"]),
    ("generation", [], ["generation.json", "generation.svg"]),
    ("layouts", ["--ranks", "2"], ["layouts.json", "layouts.svg", "same_loss.svg"]),
    ("moe", ["training"], ["moe_training.json", "moe_load.svg", "moe_loss.svg"]),
    ("moe", ["speed"], ["moe_speed.json"]),
    ("optimizer_state", [], ["optimizer_state.json"]),
    ("pipeline", [], ["pipeline.json", "pipeline_schedules.svg", "pipeline_bubble.svg"]),
    ("planner", [], ["planner.json", "planner.svg"]),
    ("preference", [], ["preference.json", "preference.svg", "preference_training.svg"]),
    ("prompt_memory", [], ["prompt_memory.json"]),
    ("prompt_tuning", [], ["prompt_tuning.json", "prompt_tuning.svg"]),
    ("quantization", [], ["quantization.json", "quantization.svg"]),
    ("recompute_overhead", [], ["recompute_overhead.json", "recompute_overhead.svg"]),
    ("reproduction", [], ["reproduction.json", "reproduction.svg", "reproduction_scaling.svg"]),
    ("rollout", [], ["rollout.json", "rollout.svg"]),
    ("serving_speed", [], ["serving_speed.json", "serving_speed.svg"]),
    ("serving_plan", [], ["serving_plan.json", "serving_frontier.svg"]),
    ("silent_bugs", [], ["silent_bugs.json", "silent_bugs.svg"]),
    ("single_device", [], ["single_device.json"]),
    ("two_ranks", ["data"], ["data_parallel.json"]),
    ("two_ranks", ["tensor"], ["tensor_parallel.json"]),
    ("zero_memory", [], ["zero_memory.json", "zero_memory.svg"]),
]
FP8 = "fp8_speed", "training_step"
# what comparisons/gpu.py runs: (command, files that it writes, words that it prints)
GPU = [
    ("check", ["gpu_check.txt"], ["cross_entropy", "test_sanitizer[memcheck]"]),
    ("kernels", ["gpu_kernels.txt", "kernels.json", "kernels.svg"], ["adamw forward"]),
    ("gpt2", ["gpu_gpt2.txt", "training_step.json", "training_step.svg"], ["| gpt2-124m | kern"]),
    (
        "llama",
        ["gpu_llama.txt", "training_step.json", "training_step.svg"],
        ["test_on_a_gpu[2-", "| llama2-7b-16-layers | kernels auto |"],
    ),
    (
        "fp8",
        ["gpu_fp8.txt", *(f"{name}.{kind}" for name in FP8 for kind in ("json", "svg"))],
        ["h 128, block:", "| llama2-7b-16-layers | kernels auto, fp8 current |"],
    ),
    (
        "nccl",
        ["gpu_nccl.txt"],
        ["--schedule zb-h1", "--method ppo", "all that ran are equal"],
    ),
]
FLAGS = argparse.Namespace(toy=False, out=Path("runs"), figures=Path("runs"))
# these start training runs as commands
LAUNCHERS = ("layouts", "prompt_memory")
# these need transformers, which is not installed everywhere
TRANSFORMERS = ("generation", "serving_speed", "single_device")


def main_of(script: str, argv: list[str], monkeypatch):
    """Run a comparison in this process, as a module `comparisons.SCRIPT`, so that its ranks can
    import it too. Returns what its main returns."""
    monkeypatch.setattr("sys.argv", [str(COMPARISONS / f"{script}.py"), *map(str, argv)])
    # on leaving, puts back what comparisons/kernels.py changes
    config = torch._functorch.config
    with config.patch(donated_buffer=config.donated_buffer):
        return importlib.import_module(f"comparisons.{script}").main()


def tracked() -> dict[Path, int]:
    """{measured result or figure: when it was written}"""
    paths = [*COMPARISONS.iterdir(), *(ROOT / "figures").iterdir()]
    return {path: path.stat().st_mtime_ns for path in paths if path.suffix in (".json", ".svg")}


class ForkedTraining:
    """What subprocess.Popen is for try_layouts.py: ranks that have imported the project."""

    def __init__(self, command: list[str], **options):
        world = 1
        argv = command[1:]
        if "--nproc-per-node" in command:
            after_launcher = command.index("--nproc-per-node") + 2
            world = int(command[after_launcher - 1])
            argv = command[after_launcher:]
        self.ranks = processes.start_ranks(world, argv) if world > 1 else [processes.start(argv)]

    def poll(self) -> int | None:
        codes = [rank.returncode for rank in self.ranks]
        return None if None in codes else max(codes)

    def terminate(self) -> None:
        for rank in self.ranks:
            rank.process.kill()

    def wait(self) -> None:
        for rank in self.ranks:
            rank.process.join()


def start_without_imports(script: str, monkeypatch) -> None:
    """Train in processes that have imported the project. (On a GPU a fork cannot.)"""
    if torch.cuda.is_available() or script not in LAUNCHERS:
        return
    training = f"comparisons.{script}"
    if script == "layouts":
        training = "planning.try_layouts"
        fake = SimpleNamespace(Popen=ForkedTraining, DEVNULL=None)
    else:
        fake = SimpleNamespace(run=lambda command, **_: processes.run(command[1:]), DEVNULL=None)
    monkeypatch.setattr(importlib.import_module(training), "subprocess", fake)


def write_no_figures(monkeypatch) -> None:
    """Figures are made, and their files are empty: the same code draws all of them from the
    results in test_figures_are_drawn_from_the_results."""

    def touch(figure, path: Path) -> None:
        matplotlib.pyplot.close(figure)
        path.touch()

    monkeypatch.setattr(importlib.import_module("style"), "save", touch)


@pytest.mark.parametrize(
    "script, argv, files", SCRIPTS, ids=lambda x: x if isinstance(x, str) else "-".join(x)
)
def test_toy(script, argv, files, tmp_path, monkeypatch, capfd):
    if script in TRANSFORMERS:
        pytest.importorskip("transformers")
    before = tracked()
    out = tmp_path / "out"
    threads = torch.get_num_threads()
    start_without_imports(script, monkeypatch)
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


def in_this_process(argv: list[str], log) -> tuple[int, str]:
    """comparisons/nccl.py starts ranks, which a forked process cannot."""

    def launch(world: int, words: list[str]) -> None:
        done = processes.run(words, world)
        assert done.returncode == 0, done.stderr

    with (
        mock.patch("sys.argv", argv),
        mock.patch.object(nccl, "launch", launch),
        contextlib.redirect_stdout(log),
    ):
        return nccl.main(), ""


def forked(call, argv: list[str], seconds: float, log) -> tuple[int, str]:
    """As `call` of comparisons/gpu.py, but in a process that has imported the project."""
    if argv == ["kernels.py"]:
        # It registers its operations, which a process can do once.
        return call(argv, seconds, log)
    if argv[0] == "comparisons/nccl.py":
        return in_this_process(argv, log)
    if argv[:2] == ["-m", "pytest"]:
        argv = [Path(pytest.__file__).parent / "__main__.py", *argv[2:]]
    done = processes.run(argv)
    log.write(done.stdout + done.stderr)
    return done.returncode, done.stdout[-80:].strip()


@pytest.mark.parametrize("name, files, words", GPU, ids=[name for name, *_ in GPU])
def test_gpu_commands(name, files, words, tmp_path, monkeypatch, capfd):
    """`make gpu ARGS=--toy`, without a GPU even where there is one: its tests skip, and comparisons
    compute on the CPU."""
    before = tracked()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gpu, "call", functools.partial(forked, gpu.call))
    out = tmp_path / "out"
    status = main_of("gpu", [name, "--toy", "--out", out], monkeypatch)
    log = (out / f"gpu_{name}.txt").read_text()
    assert not status, log
    assert sorted(files) == sorted(path.name for path in out.iterdir())
    assert tracked() == before
    for word in words:
        assert word in log
    assert f"written: {out / files[0]}" in capfd.readouterr().out


def test_gpu_command_is_stopped_in_time():
    """With the processes that it started. What it printed is kept."""
    code = """
import subprocess, sys
print("begun")
subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])
"""
    log = io.StringIO()
    start = time.monotonic()
    assert gpu.call(["-c", code], 1, log) == (-signal.SIGKILL, "begun")
    assert time.monotonic() - start < 30
    assert log.getvalue() == "begun\n"
    assert gpu.call(["-c", "raise SystemExit(3)"], 60, log) == (3, "")


def test_gpu_command_says_why_there_is_none(monkeypatch, capsys):
    """In torch's words."""

    def no_driver():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040)")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    for script in "gpu", "training_step":
        with pytest.raises(SystemExit) as e:
            main_of(script, ["--out", "runs/none"], monkeypatch)
        assert "too old (found version 11040)" in capsys.readouterr().err + str(e.value)


@pytest.mark.parametrize("gpus, lines", [(1, ["nothing to check"]), (2, ["equal", "needs 4 GPUs"])])
def test_layouts_that_the_gpus_suffice_for(gpus, lines, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name in ("check_layout", "check_reinforcement", "check_run"):
        monkeypatch.setattr(nccl, name, lambda *arguments: "")
    assert main_of("nccl", ["--out", tmp_path], monkeypatch) == 0
    printed = capsys.readouterr().out
    assert f"GPUs of this machine: {gpus}\n" in printed and all(line in printed for line in lines)


def test_what_differs_or_fails_by_nccl_is_a_line(tmp_path, monkeypatch, capsys):
    bug = mutations.bugs()["no-tied-sum"]
    compare = functools.partial(verify.compare, mutate=bug.apply)
    monkeypatch.setattr(verify, "compare", lambda *a, backend: compare(*a, backend="gloo"))
    monkeypatch.setattr(nccl, "TOY", (3,))
    monkeypatch.setattr(nccl, "check_reinforcement", lambda backend: nccl.worst_of({"loss": 1e-9}))

    def fails(device):
        raise RuntimeError("of rank 1:\nNCCL error")

    monkeypatch.setattr(nccl, "check_run", fails)
    assert main_of("nccl", ["--toy", "--out", tmp_path], monkeypatch) == 1
    printed = capsys.readouterr().out
    assert "DIFFERS, first in step 1: gradient" in printed
    assert "DIFFERS, loss by 1.0e-09" in printed and "FAILED: NCCL error" in printed


def test_losses_of_a_run_by_nccl(tmp_path):
    for name, last in ("one", 2.0), ("two", 2.0 + 1e-9):
        (tmp_path / name).mkdir()
        lines = [dict(step=n, loss=x, grad_norm=1.0) for n, x in ((1, 3.0), (2, last))]
        small_run.write_lines(tmp_path / name / "metrics.jsonl", lines)
    one = tmp_path / "one"
    assert nccl.compare_losses(one, one) == ""
    assert nccl.compare_losses(tmp_path / "two", one) == "loss by 5.0e-10"


def test_a_resumed_run_by_nccl_that_differs(tmp_path, monkeypatch):
    (tmp_path / "newest").mkdir()
    found = ["", "loss by 1.0e-09"]
    monkeypatch.setattr(nccl, "launch", lambda world, words: None)
    monkeypatch.setattr(nccl, "compare_losses", lambda *folders: found.pop(0))
    monkeypatch.setattr(nccl.checkpoint, "find", lambda out: tmp_path / "newest")
    assert nccl.check_run("cpu") == "after --resume: loss by 1.0e-09"
    assert not (tmp_path / "newest").exists()


@pytest.mark.repetition
@pytest.mark.parametrize("world, flags", nccl.LAYOUTS)
def test_every_layout_by_the_rules_of_nccl(world, flags):
    assert nccl.check_layout(world, flags, "nccl-rules") == ""


@pytest.mark.parametrize("name", ["gpt2", "llama", "fp8"])
def test_cases_on_a_gpu_fit_into_80_gb(name):
    """With 4 to spare, by the planner's formulas."""
    ((words, _),) = [part for part in gpu.parts(name, FLAGS) if "--models" in part[0]]
    model, cases = words[words.index("--models") + 1], words[words.index("--cases") + 1 :]
    assert len(cases) >= 4
    for case in cases:
        fields = training_step.cases(model)[case]
        assert training_step.predicted_bytes(model, fields) < 76e9, case
    # the whole model does not
    assert training_step.predicted_bytes("llama2-7b", {}) > 80e9


def test_published_rates_of_half_the_layers():
    """As many FLOP/s: more tokens/s, and fewer than twice as many, for the head is whole."""
    (rate, _), *_ = training_step.published("llama2-7b")
    (more, name), *_ = training_step.published(gpu.LLAMA)
    assert rate == 16_913 and 1.9 * rate < more < 2 * rate and "16 layers" in name


def test_none_is_forgotten():
    scripts = {script for script, _, _ in SCRIPTS} | {"gpu", "kernels", "nccl"}
    scripts |= {"training_step", "redraw"}
    commands = [path for path in COMPARISONS.glob("*.py") if "\ndef main(" in path.read_text()]
    assert {path.stem for path in commands} == scripts


def texts(svg: str) -> list[str]:
    """The texts of a figure, which stand as comments beside their outlines."""
    return re.findall(r"<!-- (.*?) -->", svg)


def without_ids(svg: str) -> str:
    """matplotlib hashes coordinates into ids, with the last digit that a processor rounds."""
    return re.sub(r"\b[mp][0-9a-f]{10}\b", "", svg)


def test_figures_are_drawn_from_the_results(tmp_path):
    """What redraw.py and pictures.py draw is what is tracked: byte for byte, but for ids, where
    this matplotlib drew it, else with the same texts. No text is smaller than 8 points at the size
    at which it is shown: 16 pixels of a slide that is 1,280 wide."""
    for name in redraw.measured():
        redraw.redraw(name, tmp_path)
    pictures.main(tmp_path)
    tracked_figures = ROOT / "figures"
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in tracked_figures.glob("*.svg"))
    for name in drawn:
        new = (tmp_path / name).read_text()
        old = (tracked_figures / name).read_text()
        same_version = f"Matplotlib v{matplotlib.__version__}," in old
        again = "python comparisons/redraw.py, or python -m figures.pictures, draws it again"
        assert texts(new) == texts(old), f"{name}: {again}"
        same = without_ids(new) == without_ids(old)
        assert same or not same_version, f"{name}: {again}"
        assert len(new) < 300_000
        assert float(re.search(r'<svg [^>]*width="([\d.]+)pt"', new)[1]) <= 8.5 * 72
        # outlines are scaled from a font of 100 points
        sizes = [100 * float(scale) for scale in re.findall(r"scale\(([\d.]+) -", new)]
        assert len(sizes) >= len(texts(new)) and min(sizes) >= 8


def test_each_technique_names_its_picture():
    sources = "".join(path.read_text() for path in ROOT.glob("*.py"))
    for name in pictures.PICTURES:
        assert sources.count(f"    picture: figures/ranks_{name}.svg\n") == 1, name


def test_picture_of_recomputation_has_the_bytes_of_recompute():
    """For GPT-3 175B; and the boxes of a layer add up to them, in units of s b h."""
    sizes = dict(s=2048, b=1, h=12288, a=96)
    data = pictures.DATA["recompute"]
    of_scores = 5 * sizes["a"] * sizes["s"] / sizes["h"]
    units = [float(text) if text.isdigit() else of_scores for _, text, _ in data["kept"]]
    for name, text, freed, _ in data["rows"]:
        exact = recompute.layer_bytes(**sizes, recompute=name)
        kept = sum(x for i, x in enumerate(units) if i not in freed)
        assert kept * 2048 * 12288 == exact
        assert f" {exact / 1e9:.2f} GB" in text


@pytest.mark.repetition
def test_two_checkouts(tmp_path, monkeypatch, capfd):
    argv = ["--toy", "--other", ROOT, "--out", tmp_path]
    main_of("single_device", argv, monkeypatch)
    assert "written" in capfd.readouterr().out
    found = json.loads((tmp_path / "two_checkouts.json").read_text())["results"]["toy fp32"]
    assert found["other over this"]["median"] > 0


@pytest.mark.parametrize(
    "command, words",
    [
        ("optimizer_state --toy --out comparisons", "--toy does not overwrite measured results"),
        ("optimizer_state --steps 0", "--steps 0: must be at least 1"),
        ("optimizer_state --out Makefile", "--out Makefile: File exists; name a folder"),
        ("single_device --out runs --other tests", "has no train.py"),
        ("context --out runs works", "works: not known; there are work, bytes"),
        # before the first model is measured
        ("quantization --out runs --models tests", "has no index.json"),
        ("quantization --out runs --models tests --sequences 1", "--sequences 1: a"),
        ("fp8 numbers --out runs --steps 1", "--steps 1: must be at least 2"),
        ("moe training --out runs --steps 200", "300 would do"),
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
    """Only the Makefile's commands write into comparisons/ and figures/, and each of their scripts
    runs above."""
    lines = re.findall(
        r"\t\.venv/bin/python comparisons/(\w+)\.py(.*)", (ROOT / "Makefile").read_text()
    )
    assert len(lines) >= 10
    assert all("$(RESULTS)" in rest for _, rest in lines)
    known = {script for script, _, _ in SCRIPTS} | {"gpu"}
    assert {script for script, _ in lines} <= known


# --- best of n ------------------------------------------------------------------------------------


def test_best_of_n_beside_all_pairs_of_samples():
    """Three answers, of which two have one score, and texts that are no answer, the worst."""
    p, scores = [0.2, 0.3, 0.4], [1.0, -2.0, 1.0]
    expected = [0.0] * 4
    for first, second in itertools.product(range(4), repeat=2):
        # the other text comes last
        of_first, of_second = ([*scores, -math.inf][i] for i in (first, second))
        best = second if of_second > of_first else first
        expected[best] += [*p, 0.1][first] * [*p, 0.1][second]
    log_p = torch.tensor([p], dtype=torch.float64).log()
    found = sums_task.best_log_p(log_p, torch.tensor([scores], dtype=torch.float64), 2).exp()
    torch.testing.assert_close(found[0], torch.tensor(expected[:3], dtype=torch.float64))
    torch.testing.assert_close(sums_task.with_other(found.log())[0, 3].item(), expected[3])


# --- results that grow ----------------------------------------------------------------------------


def row(share: float) -> dict:
    seconds = {kind: {"median": 1.0} for kind in ("fused", "compiled", "PyTorch", "copy")}
    return {
        "bytes": 2,
        "seconds": seconds,
        "share of an equal copy": {"fused": {"median": share}},
        "over compiled": {"median": 1.0},
        "errors": {},
    }


@pytest.fixture
def measured(monkeypatch):
    """comparisons/kernels.py that measures nothing; {operation: share, or an error}"""
    values = {}

    def measure(name, *_):
        if isinstance(values[name], Exception):
            raise values[name]
        return {"forward": row(values[name])}

    monkeypatch.setattr("comparisons.kernels.measure", measure)
    monkeypatch.setattr("comparisons.kernels.copy_bandwidth", lambda *_: 4.0)
    return values


def results(path: Path) -> dict:
    return json.loads(path.read_text())["results"]


def test_cases_of_kernels_are_merged(measured, tmp_path, monkeypatch, capsys):
    """Cases stay until they are measured again. One that fails costs a line."""
    measured |= {"swiglu": 0.5, "rotary": torch.cuda.OutOfMemoryError("1 GiB\nmore"), "adamw": 0.7}
    argv = ["--toy", "--out", tmp_path, "--cases"]
    main_of("kernels", [*argv, "swiglu", "rotary"], monkeypatch)
    assert "rotary: out of memory\n" in capsys.readouterr().out
    measured["swiglu"] = 0.6
    main_of("kernels", [*argv, "swiglu", "adamw"], monkeypatch)
    printed = capsys.readouterr().out
    assert printed.index("adamw forward") < printed.index("swiglu forward")
    cases = results(tmp_path / "kernels.json")["toy"]
    assert set(cases) == {"swiglu", "rotary", "adamw"}
    assert cases["rotary"]["error"] == "out of memory"
    assert cases["swiglu"]["forward"]["share of an equal copy"]["fused"]["median"] == 0.6
    assert cases["adamw"]["forward"]["share"] == 0.5
    assert not cases["adamw"]["forward"]["small"]


def test_no_time_is_left(measured, tmp_path, monkeypatch, capsys):
    measured["adamw"] = 0.5
    main_of("kernels", ["--toy", "--out", tmp_path, "--cases", "adamw"], monkeypatch)
    argv = ["--cases", "adamw", "swiglu", "--minutes", "0"]
    main_of("kernels", ["--toy", "--out", tmp_path, *argv], monkeypatch)
    assert "no time left for toy swiglu, toy adamw" in capsys.readouterr().out
    assert set(results(tmp_path / "kernels.json")["toy"]) == {"adamw"}


def test_a_fault_ends_the_process(measured, tmp_path, monkeypatch):
    """The case at fault has a line; the same command again measures those after it first."""
    measured |= {"swiglu": RuntimeError("illegal address"), "adamw": 0.5}
    monkeypatch.setattr("comparisons.kernels.faulty", lambda device: True)
    argv = ["--toy", "--out", tmp_path, "--cases", "swiglu", "adamw"]
    with pytest.raises(SystemExit, match="the same command again"):
        main_of("kernels", argv, monkeypatch)
    cases = results(tmp_path / "kernels.json")["toy"]
    assert cases["swiglu"]["error"].endswith("illegal address")
    assert (
        report.missing_first([("toy", "swiglu"), ("toy", "adamw")], {"toy": cases})[0][1] == "adamw"
    )


def test_outputs_of_all_calls_are_alive():
    """No call writes where the one before it wrote, and none where it wrote itself."""
    timer = kernels.Timer([lambda: torch.ones(4096)] * 3, "cpu")
    first = [output.data_ptr() for output in timer.outputs]
    timer.call_each()
    second = [output.data_ptr() for output in timer.outputs]
    assert len(set(first)) == len(set(second)) == 3
    assert all(a != b for a, b in zip(first, second))


def test_cases_of_training_steps_are_merged(tmp_path, monkeypatch, capsys):
    step = dict(tokens_per_second=[8.0, 9.0], losses=[2.0], peak_memory_bytes=1, flops_per_token=1)
    given = [{"error": "out of memory"}, step, None]
    module = "comparisons.training_step"
    monkeypatch.setattr(f"{module}.in_process", lambda *_: given.pop(0))
    monkeypatch.setattr(f"{module}.peak", lambda toy: (17.0, "nothing"))
    argv = ["--toy", "--out", tmp_path, "--models", "gpt2-124m", "--cases"]
    for case in ("kernels auto", "kernels off", "kernels off, compile"):
        assert main_of("training_step", [*argv, case], monkeypatch) == 0
    assert "| kernels off, compile | no time left" in capsys.readouterr().out
    cases = results(tmp_path / "training_step.json")["gpt2-124m"]
    assert cases["kernels auto"]["error"] == "out of memory"
    assert cases["kernels off"]["mfu"] == 0.5
    assert len(cases) == 2


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
