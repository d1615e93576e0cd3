"""Machines of one's own, and this one: planning/try_layouts.py, train.py --plan."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import small_run
import torch.distributed as dist

import planner
from base import json_files
from base.model_config import MoEConfig
from course import ranks
from planning import commands, measure, plan, try_layouts
from planning.inputs import MACHINES, Constants, Machine
from run import flags
from run.config import ConfigError
from run.pretraining import Config

MINE = Machine("mine", 50e12, 8e9, 1e12, 1e11, 1e10, 4, Constants(1, 1, 1, 1, 1e-3))
MODEL = MoEConfig(
    num_layers=8,
    hidden_size=256,
    num_heads=8,
    seq_length=256,
    vocab_size=257,
    num_experts=4,
    expert_every=4,
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A machine's file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("machine.json").write_text(json.dumps(dataclasses.asdict(MINE)))
    return tmp_path


def refused(argv: list[str], capsys) -> str:
    """What planner.py says in one line."""
    try:
        status = commands.main(argv)
    except SystemExit as e:
        status = e.code
    err = capsys.readouterr().err
    assert status == 2 and err.startswith("planner.py: ") and err.count("\n") == 1
    return err


# --- a machine's file -----------------------------------------------------------------------------


def test_the_file_of_the_document_is_a_machine(here):
    """docs/planning.md shows one that is written by hand."""
    text = (Path(__file__).parent.parent / "docs" / "planning.md").read_text()
    shown = text.split("```json\n")[1].split("```")[0]
    Path("shown.json").write_text(shown)
    machine = json_files.read("shown.json", Machine)
    # every field that has no default
    assert set(json.loads(shown)) | {"has_fp8"} == set(dataclasses.asdict(machine))


# --- try ------------------------------------------------------------------------------------------


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


def test_try(here, monkeypatch, capsys):
    """The two best layouts of two ranks train, and the table has a line for each."""
    fake = SimpleNamespace(Popen=ForkedTraining, DEVNULL=None)
    monkeypatch.setattr(try_layouts, "subprocess", fake)
    words = small_run.as_flags(num_layers=2, hidden_size=32, num_heads=4, global_batch_size=4)
    argv = ["2", "--ranks", "2", "--machine", "machine.json", "--steps", "4", *words]
    assert commands.main(["try", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layout", "predicted,", "s", "measured,", "s", "ratio", "order"]
    assert len(lines) == 4 and "off by" in lines[3]
    assert sorted(line.split()[-1] for line in lines[1:3]) == ["1", "2"]
    # CPUs train in float32, and nothing runs beside their messages
    config = flags.parse([*words, "--precision", "fp32"], 0)
    software = dataclasses.replace(plan.software_of(config), overlaps_tensor=False)
    best = planner.search(MINE, software, config.model_config(), 2, 4)[0]
    assert lines[1].startswith(try_layouts.name_of(best.layout))
    assert f"{best.seconds:.3f}" in lines[1]


def measure_on(rank: int) -> Machine:
    return measure.measure(dist.group.WORLD)


def test_processors_are_measured(tmp_path, monkeypatch, capsys):
    """Two ranks find what planner.py takes for a machine; `try` asks them where it has no file."""
    machine, _ = ranks.run(measure_on, 2)
    assert machine.constants.wait > 0 and machine.ranks_per_node == 2
    monkeypatch.setattr(measure, "measured", lambda ranks: machine)
    monkeypatch.chdir(tmp_path)
    assert commands.main(["measure", "--ranks", "2"]) == 0
    Path("machine.json").write_text(capsys.readouterr().out)
    assert plan.machine_of("machine.json") == machine
    Path("machine.json").unlink()
    monkeypatch.setattr(try_layouts, "run", lambda *_: [{"step_seconds": 1.0}] * 8)
    assert commands.main(["try", "2", "--ranks", "2", "--num-layers", "2"]) == 0
    assert " order\n" in capsys.readouterr().out


@pytest.mark.repetition
def test_ranks_of_torchrun_measure():
    assert measure.measured(2).ranks_per_node == 2


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--model", "tiny"], "count tiny: must be a whole number"),
        (["0"], "planner.py: count 0: must be from 1 to 1,048,576"),
        (["2", "--steps", "3"], "--steps 3: must be from 4 to 1000"),
        (["2", "--nosuch", "3"], "planner.py: unrecognized arguments: --nosuch 3; train.py --help"),
        (["2", "--machine", "none.json"], "none.json: cannot be read"),
        (["2", "--machine", "machine.json", "--tp", "2"], "--tp: is what is tried"),
        (["2", "--machine", "machine.json", "--num-heads", "3"], "hidden"),
        (["2", "--out", "runs/x"], "--out: the runs that are tried leave nothing; leave it out"),
        (["2", "--plan", "h100"], "--plan: the runs"),
        (["2", "--resume"], "--resume --out runs/default: there is no run in this folder"),
    ],
)
def test_try_refuses(here, capsys, argv, words):
    assert words in refused(["try", *argv], capsys)


def processes_that_name(text: str) -> list[str]:
    """The command lines that have this text in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.repetition)]
)
def test_an_interrupted_try_leaves_nothing(here, number):
    """A signal to the planner alone ends the launcher and its ranks, and removes their files."""
    files = here / "files"
    files.mkdir()
    words = small_run.as_flags(num_layers=2, hidden_size=32, num_heads=4, global_batch_size=4)
    argv = ["try", "2", "--ranks", "2", "--machine", here / "machine.json", "--steps", "1000"]
    planning = processes.start(["planner.py", *argv, *words], TMPDIR=str(files))
    deadline = time.monotonic() + 60
    # rank 0 trains
    while not list(files.glob("*/run/metrics.jsonl")):
        assert planning.returncode is None and time.monotonic() < deadline, planning.stderr
        time.sleep(0.05)
    # the launcher and two ranks
    assert len(processes_that_name(str(files))) == 3
    planning.kill(number)
    assert planning.wait() == 130
    # a process that was killed is there until the system has taken its memory back
    deadline = time.monotonic() + 10
    while processes_that_name(str(files)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_that_name(str(files)) == [] and os.listdir(files) == []
    assert "Traceback" not in planning.stderr


def test_the_table_says_how_far_off_the_prediction_is():
    predicted, measured = [1.0, 2.0, 3.0], [2.0, 1.0, 4.0]
    *_, last = try_layouts.table(["a", "b", "c"], predicted, measured)
    # 1/2, 2/1 and 3/4; a took 2 seconds and b 1
    assert last.startswith("off by 58% on average; the first is 100% slower")
    assert last.endswith("are left out")
    assert try_layouts.table(["a"], [1.0], [1.0])[-1].endswith("of these")


# --- train.py --plan ------------------------------------------------------------------------------


def test_train_prints_the_prediction(here):
    argv = small_run.flags(steps=2, out="run", plan="machine.json", data=__file__)
    done = processes.run(["train.py", *argv])
    assert done.returncode == 0, done.stderr
    config = flags.parse(argv, 0)
    expected = sum(plan.predict(config, 1).values())
    first = next(line for line in done.stdout.splitlines() if line.startswith("--plan"))
    assert first.startswith(f"--plan machine.json: a step of {expected:.3g} s: matmul ")
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    lines = [json.loads(line) for line in open("run/metrics.jsonl")]
    for text, line in zip(steps, lines, strict=True):
        assert f"{line['step_seconds']:.3g} s (predicted {expected:.3g})" in text
        assert line["predicted_seconds"] == expected


def test_without_the_flag_nothing_is_predicted():
    assert plan.predict(Config(), 1) == {}


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(fp8="delayed", plan="a100"), "--plan a100: a100 has no FP8"),
        (dict(precision="fp32", plan="h100"), "--plan h100: knows the FLOP/s of 16 bits, not of"),
    ],
)
def test_what_no_data_sheet_says_is_refused(flags, words):
    with pytest.raises(ConfigError) as refused:
        plan.predict(Config(dropout=0.0, **flags), 1)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("none.json", None, "--plan none.json: cannot be read"),
        ("text.json", "text", "not JSON"),
        ("zero.json", {"peak": 0.0}, "peak 0: must be from"),
        ("auto", None, "there is no machine.json"),
    ],
)
def test_plan_refuses(tmp_path, monkeypatch, name, content, words):
    """And says how to get a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan.torch.cuda, "is_available", lambda: False)
    if content:
        values = dataclasses.asdict(MINE) | content if isinstance(content, dict) else content
        (tmp_path / name).write_text(json.dumps(values) if values != content else content)
    with pytest.raises(ConfigError, match=r"docs/planning.md says how") as e:
        plan.machine_of(name)
    assert words in str(e.value)


def test_auto_finds_the_gpu_by_its_name(monkeypatch):
    monkeypatch.setattr(plan.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plan.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert plan.machine_of("auto") is MACHINES["h200"]
    monkeypatch.setattr(plan.torch.cuda, "get_device_name", lambda: "NVIDIA H100 PCIe")
    with pytest.raises(ConfigError, match="no GPU here is one of"):
        plan.machine_of("auto")
