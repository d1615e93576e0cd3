"""benchmarks/gpu.py: each stage at toy size; stages that fail, hang or lose their GPU; what is
written of them, and what docs/gpu.md predicts."""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import processes
import pytest
import small_run
import torch
from parity import again

from benchmarks import gpu, gpu_checks, gpu_stages, gpu_table, kernels, nccl, report, training_step
from course import kernels as lesson
from course import mutations, verify

ROOT = Path(__file__).parent.parent
DOCUMENT = gpu_table.DOCUMENT.read_text()
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["results"]
# these start processes, which a forked one cannot
IN_THIS_PROCESS = ("tests", "run", "sanitizer", "nccl")
TRANSFORMERS = ("decode", "serve")
CASES = {"gpt2": 7, "kernels": 27, "llama": 7, "fp8": 8, "medium": 4, "nccl": 4}
# of the stages that have many, cases that differ most; make test-all runs all
FEW = {
    "gpt2": ["kernels auto", "nanoGPT, compile", "kernels auto, sums apart"],
    "kernels": ["host", "toy swiglu", "toy cross_entropy", "toy rms_norm, compile"],
    "llama": ["kernels off, compile", "plain Llama"],
    "fp8": ["fp8 current", "fp8 block", "torchao tensorwise, compile", "like nanochat, compile"],
    "medium": ["gpt-1.3b, kernels auto"],
    "serve": ["engine", "profile, 8 requests", "transformers, continuous"],
    "nccl": [f"2 ranks, {nccl.LAYOUTS[nccl.TOY[0]][1]}", f"2 ranks, {nccl.OF_A_RUN}"],
}


def results(out: Path) -> dict:
    return json.loads((out / "gpu.json").read_text())["results"]


def forked_call(argv: list[str], deadline: float) -> tuple[int, list[str]]:
    """As gpu_checks.call, in a process that has imported the project."""
    if argv[:2] == ["-m", "pytest"]:
        argv = [Path(pytest.__file__).parent / "__main__.py", *argv[2:]]
    done = processes.run(argv)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def launch(world: int, words: list[str]) -> None:
    """As nccl.launch."""
    done = processes.run(words, world)
    assert done.returncode == 0, done.stderr


# --- each stage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage, cases",
    [*((stage, FEW.get(stage, [])) for stage in gpu.STAGES), *(again(stage, []) for stage in FEW)],
)
def test_toy(stage, cases, tmp_path, monkeypatch, capfd):
    """Without a GPU even where there is one: its tests skip, and all else computes on the CPU."""
    if stage in TRANSFORMERS:
        pytest.importorskip("transformers")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(ROOT)
    argv = ["benchmarks.gpu", "--stage", stage, "--toy", "--out", str(tmp_path)]
    argv += ["--cases", *cases] if cases else []
    if stage in IN_THIS_PROCESS:
        monkeypatch.setattr("sys.argv", argv)
        monkeypatch.setattr(gpu_checks, "call", forked_call)
        monkeypatch.setattr(nccl, "launch", launch)
        status, printed = gpu.main(), capfd.readouterr().out
    else:
        done = processes.run(argv)
        status, printed = done.returncode, done.stdout + done.stderr
    assert status == 0, printed
    rows = results(tmp_path)[stage]
    assert len(rows) >= (len(cases) or CASES.get(stage, 1))
    for name, row in rows.items():
        assert f"{stage}: {name}: {gpu.shown(row)}\n" in printed
    skipped = {"tests": 3, "sanitizer": 4}.get(stage)
    assert rows.get("pytest", {}).get("skipped") == skipped


def test_every_test_of_a_gpu_is_in_a_stage(monkeypatch):
    """The two stages select complementary names of all that has the marker, repetitions too."""
    monkeypatch.chdir(ROOT)
    assert gpu_checks.SELECTED == {
        "tests": ["-k", "not sanitizer"],
        "sanitizer": ["-k", "sanitizer"],
    }
    argvs = []
    monkeypatch.setattr(gpu_checks, "call", lambda argv, deadline: (argvs.append(argv), (0, []))[1])
    gpu_checks.pytest("sanitizer", argparse.Namespace(toy=False, deadline=0), 8)
    assert {"--all", "gpu"} <= set(argvs[0]) and not any("tests/" in word for word in argvs[0])
    # names alone, by one process
    words = [word for word in gpu_checks.PYTEST[2:] if word != "-vv"] + ["-n", "0"]
    done = processes.run([Path(pytest.__file__).parent / "__main__.py", *words, "--collect-only"])
    names = set(re.findall(r"^tests/\S+::.*$", done.stdout, re.MULTILINE))
    assert len(names) >= 188 and sum("sanitizer" in name for name in names) == 4


def test_beside_the_tests_all_other_stages_run(tmp_path, monkeypatch):
    """At toy size, and the compiler; each in a folder of its own. What fails in one is named."""
    called = []

    def call(argv, deadline):
        called.append(argv)
        if argv[:2] == ["-m", "pytest"]:
            return 1, ["tests/a.py::one PASSED", "tests/a.py::two FAILED", "E   AssertionError"]
        folder = Path(argv[argv.index("--out") + 1])
        row = {"error": "ValueError: no"} if "fp8" in argv else {"tokens/s": 1.0}
        (folder / "gpu.json").write_text(
            json.dumps({"results": {argv[argv.index("--stage") + 1]: {"case": row}}})
        )
        return None if "run" in argv else 0, ["said"]

    monkeypatch.setattr(gpu_checks, "call", call)
    args = argparse.Namespace(toy=False, deadline=time.monotonic() + 60, run="now")
    rows = {name: case() for name, case in gpu_checks.cases_of("tests", args).items()}
    left_out = {"environment", "build", "tests", "sanitizer", "nccl"}
    assert {f"{stage}, toy" for stage in set(gpu.STAGES) - left_out} <= set(rows)
    assert len(called) == len(rows) == 13
    assert all(("--toy" in argv) != ("warm" in argv) for argv in called if "--stage" in argv)
    assert rows["fp8, toy"]["error"] == "{'case': 'ValueError: no'}"
    assert rows["run, toy"]["error"] == gpu.WORDS[None] and rows["run, toy"]["said"] == ["said"]
    assert "error" not in rows["gpt2, toy"] and "error" not in rows["warm"]
    assert rows["pytest"]["passed"] == rows["pytest"]["failed"] == 1
    assert rows["pytest"]["which"] == ["tests/a.py::two FAILED"]


@pytest.mark.parametrize("stage", ["gpt2", "llama", "fp8", "medium"])
def test_cases_fit_into_80_gb(stage):
    """With 4 to spare, by the planner's formulas."""
    for name, (model, fields) in training_step.chosen(stage, gpu_table.ALL).items():
        if "peer" not in fields:
            assert training_step.predicted_step(model, fields)[1] < 76e9, name
    # the whole model does not
    assert training_step.predicted_step("llama2-7b", {})[1] > 80e9


def test_cases_by_name_are_more():
    """Recomputation, FP8 for each model, and the whole of Llama-2 7B."""
    names = training_step.cases_of("llama", argparse.Namespace(toy=False, cases=["x"]))
    assert {"kernels auto, full recompute", "llama2-7b, kernels auto", "fp8 block"} <= set(names)
    names = kernels.cases_of("kernels", argparse.Namespace(toy=False, cases=["x"]))
    assert "gpt-1.3b rotary" in names


def test_what_is_warmed_is_compiled():
    """One block of each case that compiles, as the case itself does."""
    cases = training_step.cases_of("warm", gpu_table.ALL)
    names = [f"{stage}, {name}" for stage, first in training_step.FIRST.items() for name in first]
    assert list(cases) == [name for name in names if "compile" in name]
    for case in cases.values():
        assert case.args[1]["compile"] and "backend" not in case.keywords
    toy = argparse.Namespace(toy=True, cases=[])
    assert training_step.cases_of("gpt2", toy)["nanoGPT"].keywords["backend"] == "eager"


def test_bytes_that_are_predicted_of_a_kernel():
    """By the table of kernels.py, and counted."""
    size = dict(b=2, s=64, h=128, ffn=256, vocab_size=512, heads=4)
    for name, (args, fused, _, with_gradient) in lesson.examples(**size).items():
        counted = lesson.one_pass(name, fused, args, with_gradient)
        for nbytes, exact in zip(lesson.expected()[name], counted, strict=True):
            assert nbytes * kernels.elements(name, **size) == pytest.approx(exact, rel=0.1), name


def test_peers_learn_what_this_project_learns():
    """The first loss is ln V, and the next ones fall: nanoGPT's GPT-2, and a plain Llama."""
    for model, case in ("gpt2-124m", "nanoGPT"), ("llama2-7b-16-layers", "plain Llama"):
        fields = training_step.of_model(model)[case] | training_step.TOY
        given = training_step.BF16 | training_step.MODELS[model] | fields
        steps = training_step.make(given, torch.device("cpu"))
        losses = [steps.step(n) for n in range(8)]
        assert losses[0] == pytest.approx(6.24, abs=0.1) and losses[-1] < losses[0] - 0.5


# --- a stage that fails ---------------------------------------------------------------------------


@pytest.fixture
def measure(tmp_path, monkeypatch, capsys):
    """measure(cases, more flags): a stage of these cases, in this process; (exit status, rows, what
    it printed)."""
    module = ModuleType("benchmarks.of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(gpu.STAGES, "stage", gpu_stages.Stage(60, "of_this_test"))

    def run(cases: dict, *flags: str) -> tuple[int, dict, str]:
        module.cases_of = lambda stage, args: cases
        argv = ["gpu.py", "--stage", "stage", "--out", str(tmp_path), "--run", "1", *flags]
        monkeypatch.setattr("sys.argv", argv)
        status = gpu.main()
        rows = results(tmp_path).get("stage", {}) if (tmp_path / "gpu.json").is_file() else {}
        return status, rows, capsys.readouterr().out

    return run


def fails() -> dict:
    raise torch.cuda.OutOfMemoryError("1 GiB\nmore")


def number() -> dict:
    return {"tokens/s": 1.5, "profile": {}}


def test_a_case_that_fails_costs_a_line(measure):
    status, rows, printed = measure({"a": fails, "b": number})
    assert status == gpu.FAILED
    assert rows["a"]["error"] == "out of memory" and rows["b"]["tokens/s"] == 1.5
    assert "stage: a: FAILED, out of memory\n" in printed and "stage: b: 1.5 tokens/s\n" in printed
    assert "Traceback" in printed


def test_cases_without_a_result_come_first(measure):
    """In a later run; and one by name replaces its result alone."""
    measure({"a": number})
    order = []

    def noted(name: str) -> dict:
        order.append(name)
        return {"x": len(order)}

    _, rows, _ = measure({name: partial(noted, name) for name in "ab"}, "--run", "2")
    assert order == ["b", "a"] and rows["a"] == {"x": 2, "s in all": 0.0, "run": "2"}
    _, rows, _ = measure(
        {name: partial(noted, name) for name in "ab"}, "--run", "3", "--cases", "b"
    )
    assert rows["a"]["run"] == "2" and rows["b"]["run"] == "3"


def test_no_time_is_left(measure):
    status, rows, printed = measure({"a": number}, "--limit", "1")
    assert status == gpu.LEFT and rows == {} and "stage: a: no time left\n" in printed


def test_the_gpu_serves_the_process_no_more(measure, monkeypatch):
    """The next process of the same run goes on with the next case."""
    monkeypatch.setattr(report, "faulty", lambda: True)
    cases = {"a": fails, "b": number}
    status, rows, _ = measure(cases)
    assert status == gpu.FAULT and set(rows) == {"a"}
    monkeypatch.setattr(report, "faulty", lambda: False)
    status, rows, printed = measure(cases)
    assert status == gpu.FAILED and rows["b"]["tokens/s"] == 1.5
    assert "stage: a" not in printed


def test_results_of_another_card_are_not_mixed(measure, tmp_path):
    measure({"a": number})
    found = json.loads((tmp_path / "gpu.json").read_text())
    found["environment"]["device"] = "NVIDIA H200"
    (tmp_path / "gpu.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit) as e:
        measure({"b": number})
    assert e.value.code == gpu.REFUSED
    assert set(results(tmp_path)["stage"]) == {"a"}


def test_a_full_disk(measure, tmp_path):
    """The screen has the numbers."""
    (tmp_path / "gpu.tmp").symlink_to("/dev/full")
    status, rows, printed = measure({"a": number})
    assert status == 0 and rows == {}
    assert "stage: a: 1.5 tokens/s\n" in printed
    assert 'cannot be written, No space left on device: {"tokens/s": 1.5' in printed


# --- the process that starts the stages -----------------------------------------------------------

# what a stage does here, without an import: it writes as `note` does, and ends
STAGE = """
import json, os, sys, time
stage, out, run = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--stage", "--out", "--run"))
path = os.path.join(out, "gpu.json")
found = json.load(open(path)) if os.path.exists(path) else {"toy": False, "results": {}}
rows = found["results"].setdefault(stage, {})
rows["case %d" % len(rows)] = {"tokens/s": 7, "run": run}
json.dump(found, open(path, "w"))
print(stage + ": case: 7 tokens/s", flush=True)
if stage == "parity":
    raise ValueError("no such module")
if stage == "llama":
    if os.fork():
        os.wait()
    time.sleep(60)
if stage == "fp8" and len(rows) < 3:
    os.kill(os.getpid(), 11)
"""
# `gpu.main` with the stages above
PARENT = """
import sys
from benchmarks import gpu, gpu_stages
from base import terminal
gpu.torch.cuda.is_available = lambda: True
gpu.STAGES["llama"] = gpu_stages.Stage({limit}, "none")
gpu.BEGIN = 0.1
gpu.COMMAND = [{script!r}]
terminal.run(gpu.main)
"""


@pytest.fixture
def command(tmp_path):
    """command(*argv): gpu.py, started."""
    (tmp_path / "stage.py").write_text(STAGE)

    def start(*argv: str, limit: float = 1.5) -> processes.Command:
        parent = tmp_path / f"parent-{limit}.py"
        parent.write_text(PARENT.format(limit=limit, script=str(tmp_path / "stage.py")))
        return processes.start([parent, "--out", str(tmp_path / "out"), *argv])

    return start


def alive(text: str) -> list[str]:
    """Processes with this text in their command."""
    done = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if text in line and line[0] != "Z"]


def test_a_stage_ends_alone(command, tmp_path):
    """One hangs and is killed at its limit, with what it has started; one dies twice of a signal
    and goes on; one raises; one is done."""
    process = command("--seconds", "60", "llama", "fp8", "parity", "run")
    assert process.wait() == 1, process.stderr
    lines = [line for line in process.stdout.splitlines() if line.startswith("[")]
    assert [line.split(", ")[0] for line in lines] == [
        "[llama] killed",
        "[fp8] done",
        "[parity] failed",
        "[run] done",
    ]
    assert "case 0: 7 tokens/s; case 1: 7 tokens/s; case 2: 7 tokens/s" in lines[1]
    assert "\n  ValueError: no such module\n[parity]" in process.stdout
    assert process.stdout.splitlines()[-1] == "not done: llama, parity"
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert found["stages"]["llama"]["ended"] == "killed, its time was over"
    assert found["stages"]["run"]["run"] == found["results"]["run"]["case 0"]["run"]
    log = (tmp_path / "out" / "gpu.txt").read_text()
    assert "Traceback" in log and "Traceback" not in process.stdout
    assert not alive(str(tmp_path / "stage.py"))


def test_no_time_is_left_for_a_stage(command):
    process = command("--seconds", "0.05", "run")
    assert process.wait() == 1
    assert "[run] no time left, 0 s, 0 s left; \n" in process.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all(command, number, tmp_path):
    process = command("llama", limit=50)
    process.wait_for("llama: case")
    process.kill(number)
    assert process.wait() == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert "[llama] interrupted" in process.stdout and "Traceback" not in process.stderr
    deadline = time.monotonic() + 10
    while alive(str(tmp_path / "stage.py")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(str(tmp_path / "stage.py"))


def test_two_runs_into_one_folder(command):
    first = command("llama", limit=50)
    first.wait_for("llama: case")
    second = command("run")
    assert second.wait() == 2
    assert "another run writes into this folder" in second.stderr
    first.kill(signal.SIGTERM)
    assert first.wait() == 143


def test_a_log_that_cannot_be_written(command, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "gpu.txt").symlink_to("/dev/full")
    process = command("run")
    assert process.wait() == 0
    assert "gpu.txt cannot be written, No space left" in process.stdout
    assert "[run] done" in process.stdout
    shutil.rmtree(out)
    (out / "gpu.txt").mkdir(parents=True)
    process = command("run")
    assert process.wait() == 2 and process.stderr.count("\n") == 1
    assert "gpu.txt" in process.stderr and "name another folder" in process.stderr


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_no_result(command, tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gpu.json").write_text(text)
    process = command("run")
    assert process.wait() == 2 and process.stderr.count("\n") == 1
    assert (tmp_path / "out" / "gpu.json").read_text() == text


def test_refusals(monkeypatch, capsys):
    """Why there is no GPU is said in torch's words."""

    def no_driver():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040)")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    for words, expected in (([], "too old (found version 11040)"), (["gpt3"], "gpt3: not known")):
        monkeypatch.setattr("sys.argv", ["gpu.py", "--out", "runs/none", *words])
        with pytest.raises(SystemExit) as e:
            gpu.main()
        assert e.value.code == 2 and expected in capsys.readouterr().err


# --- layouts by NCCL ------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus, found", [(1, {"nothing"}), (2, {"equal", "needs 4 GPUs"})])
def test_layouts_that_the_gpus_suffice_for(gpus, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name in ("check_layout", "check_reinforcement", "check_run"):
        monkeypatch.setattr(nccl, name, lambda *arguments: "")
    rows = [case()["found"] for case in nccl.cases_of("nccl", gpu_table.ALL).values()]
    assert found <= {row.split(" to check")[0] for row in rows}


def test_what_differs_or_fails_by_nccl_is_an_error(monkeypatch):
    bug = mutations.bugs()["no-tied-sum"]
    compare = partial(verify.compare, mutate=bug.apply)
    monkeypatch.setattr(verify, "compare", lambda *a, backend: compare(*a, backend="gloo"))
    monkeypatch.setattr(nccl, "TOY", (3,))
    monkeypatch.setattr(nccl, "check_reinforcement", lambda backend: nccl.worst_of({"loss": 1e-9}))

    def fails(device):
        raise RuntimeError("of rank 1:\nNCCL error")

    monkeypatch.setattr(nccl, "check_run", fails)
    args = argparse.Namespace(toy=True, cases=[])
    of_layout, of_learning, of_run = (case() for case in nccl.cases_of("nccl", args).values())
    assert of_layout["error"].startswith("DIFFERS, first in step 1: gradient")
    assert of_learning["error"] == "DIFFERS, loss by 1.0e-09" and of_run["error"] == "NCCL error"


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


# --- predicted, and measured ----------------------------------------------------------------------


def test_published_rates_of_half_the_layers():
    """As many FLOP/s: more tokens/s, and fewer than twice as many, for the head is whole."""
    (rate, _), *_ = training_step.published("llama2-7b")
    (more, name), *_ = training_step.published("llama2-7b-16-layers")
    assert rate == 16_913 and 1.9 * rate < more < 2 * rate and "16 layers" in name


MEASURED = {
    "environment": dict(device="NVIDIA H100", torch="2.11.0", python="3.12.3", date="2027-01-01"),
    "results": {
        "gpt2": {
            "kernels auto": {"tokens/s": report.spread([4e5, 5e5]), "% MFU": 40.0, "run": "1"},
            "nanoGPT": {"tokens/s": report.spread([9e5]), "% MFU": 80.0, "run": "1"},
            "kernels off": {"error": "out of memory", "run": "1"},
            "fp8 block": {"tokens/s": report.spread([3e5]), "run": "1"},
        },
        "kernels": {
            "gpt2-124m swiglu": {
                "% of a copy forward": 92.0,
                "% of a copy backward": 71.5,
                "forward": {"small": True},
                "backward": {"small": False},
                "run": "1",
            },
            "gpt2-124m swiglu, compile": {
                "x as long compiled, forward": report.spread([0.8]),
                "run": "1",
            },
        },
    },
}


def test_table_of_a_measured_file(tmp_path, monkeypatch, capsys):
    """Goals, then the predictions with what was measured; a case by name too."""
    (tmp_path / "gpu.json").write_text(json.dumps(MEASURED))
    monkeypatch.setattr("sys.argv", ["gpu.py", "table", "--out", str(tmp_path)])
    assert gpu.main() == 0
    printed = capsys.readouterr().out
    for line in (
        "device NVIDIA H100, torch 2.11.0, python 3.12.3, date 2027-01-01",
        "| 90% | 0 of 1; the worst, gpt2-124m swiglu backward: 71.5 |",
        "| 90% | 1 of 1; the worst, gpt2-124m swiglu forward: 92 |",
        "| at most 1 | 0 of 1; the worst, gpt2-124m swiglu, compile forward: 1.25 |",
        # not the peer's
        "per H100 of 8) | 450,000.0 tokens/s (kernels auto) |",
        "16,913 tokens/s) | not yet measured |",
        "| 450,000 (400,000 to 500,000) tokens/s, 40 % MFU |",
        "| FAILED, out of memory |",
        "| gpt2 | fp8 block | - |  | 300,000 (300,000 to 300,000) tokens/s |",
        "gpt2-124m: published 475,000 tokens/s",
    ):
        assert line in printed
    gpu_table.draw(MEASURED, tmp_path)
    figures = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert figures == ["gpu_kernels.svg", "gpu_steps.svg"]
    text = (tmp_path / "gpu_steps.svg").read_text()
    assert ">nanoGPT<" in text and ">kernels off<" not in text


def test_two_calls_of_the_document_are_all_stages():
    """But nccl, which needs two GPUs."""
    calls = re.findall(r"^python -m benchmarks.gpu --seconds \d+ (.*)", DOCUMENT, re.MULTILINE)
    first, second = (call.split() for call in calls)
    assert {*first, *second, "nccl"} == set(gpu.STAGES)
    # the kernels are built first, and what says most is in the first call
    assert first == list(gpu.STAGES)[: len(first)] and second[0] == "build"


def test_goals_of_the_document():
    rows = gpu_table.goals(RESULTS)
    text = (ROOT / "docs" / "results.md").read_text()
    assert all(f"| {' | '.join(row.values())} |" in text for row in rows) and len(rows) == 5


def test_predictions_of_the_document():
    """Each case of each stage has a row, the planner's numbers are today's, those measured are the
    file's, and somebody has predicted it by hand."""
    for row in gpu_table.cases(RESULTS):
        assert f"| {' | '.join(row.values())} |" in DOCUMENT, (
            "python -m benchmarks.gpu table prints the rows"
        )
        assert row["by hand"], row
    names = {(row["stage"], row["case"]) for row in gpu_table.cases(RESULTS)}
    assert set(gpu_table.by_hand()) == names
