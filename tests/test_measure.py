"""Predictions of this machine: planning/measure.py, shared.py, try_layouts.py, train.py --plan."""

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
from test_comparisons import ForkedTraining

import planner
from base import json_files
from planning import measure, plan, shared, try_layouts
from planning.inputs import MACHINES, Layout, Machine, software_of
from planning.layouts import layouts
from routers import MoEConfig
from run import flags
from run.config import Config, ConfigError

SIZES = measure.Sizes(hidden=32, sequence=16, added=2**12, message=2**12, seconds=0.01, repeats=3)
CONSTANTS = dataclasses.replace(measure.MEASURED, wait=1e-3)
LAPTOP = Machine("laptop", 50e9, 8e9, 10e9, 1e9, 1e9, 4, CONSTANTS, processors=2, overhead=1e-3)
MODEL = MoEConfig(
    num_layers=8,
    hidden_size=256,
    num_heads=8,
    seq_length=256,
    vocab_size=257,
    num_experts=4,
    expert_every=4,
)
# predicted quickly: any machine
SEARCHED = list(layouts(MODEL, software_of(LAPTOP), 4, 8))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A file of the laptop, in the current folder."""
    monkeypatch.chdir(tmp_path)
    measure.save(LAPTOP, "machine.json")
    return tmp_path


def seconds(layout: Layout, machine: Machine = LAPTOP) -> dict[str, float]:
    return planner.step_time(machine, software_of(machine), MODEL, layout)


# --- ranks that share processors ------------------------------------------------------------------


@pytest.mark.parametrize("processors", [1, 2, 3, 4, 16])
def test_no_processor_works_for_two(processors):
    """A step takes at least all ranks' arithmetic divided by the processors, and at least what the
    slowest rank takes on processors of its own."""
    machine = dataclasses.replace(LAPTOP, processors=processors)
    assert len(SEARCHED) > 100
    for layout in SEARCHED[::7]:
        parts = seconds(layout, machine)
        rank = planner.Rank(machine, software_of(machine), MODEL, layout)
        forward, backward, _ = planner.layer(rank)
        each = forward.matmul + forward.elementwise + backward.matmul + backward.elementwise
        passes = layout.micro_batches * MODEL.num_layers * layout.tp * layout.dp
        assert sum(parts.values()) >= 0.999 * passes * each / processors
        slowest = seconds(layout, shared.one_each(machine))
        threads = max(1, machine.processors_of(4))
        assert sum(parts.values()) >= 0.999 * sum(slowest.values()) / threads
        assert min(parts.values()) >= 0


def test_a_bubble_costs_nothing_where_others_have_work():
    layout = Layout(pp=4, global_batch_size=8)
    assert seconds(layout)["bubble"] == 0
    assert seconds(layout, dataclasses.replace(LAPTOP, processors=4))["bubble"] > 0


def test_threads_divide_arithmetic_and_not_overhead():
    alone = seconds(Layout(global_batch_size=8))
    twice = seconds(Layout(global_batch_size=8), dataclasses.replace(LAPTOP, processors=4))
    assert twice["matmul"] == pytest.approx(alone["matmul"] / 2)
    assert twice["overhead"] == alone["overhead"] == pytest.approx(8 * 8 * LAPTOP.overhead)


def test_a_wait_for_each_member():
    """tp 4 has as many collectives in a micro-batch as tp 2, of twice the members, and on half of
    the data-parallel ranks: twice the micro-batches."""
    slow = dataclasses.replace(LAPTOP, node_bandwidth=1e24)
    two = seconds(Layout(tp=2, dp=2, global_batch_size=8), slow)["tensor"]
    four = seconds(Layout(tp=4, global_batch_size=8), slow)["tensor"]
    assert four / two == pytest.approx(4, rel=0.01)


def test_on_gpus_nothing_changes():
    """A machine without shared processors is predicted as before."""
    machine = dataclasses.replace(MACHINES["h100"], overhead=1.0)
    layout = Layout(pp=4, global_batch_size=8)
    assert seconds(layout, machine) == seconds(layout, MACHINES["h100"])


# --- measure --------------------------------------------------------------------------------------


def test_a_machine_is_found_again():
    """Times that a known machine would have give its constants back."""
    sizes = measure.Sizes()
    share = LAPTOP.processors_of(4)
    flops, elementwise = measure.layer_of(LAPTOP, sizes)
    times = measure.Times(
        layer=(flops + elementwise + LAPTOP.overhead) / share,
        tiny_layer=LAPTOP.overhead / share,
        add=12 * sizes.added / LAPTOP.memory_bandwidth / share,
        wait_of_two=4e-3,
        wait_of_all=8e-3,
        message=8e-3 + 1.5 * sizes.message / LAPTOP.node_bandwidth,
    )
    found = measure.machine_of(times, 4, 2, LAPTOP.memory, sizes)
    for name, value in dataclasses.asdict(LAPTOP).items():
        if name not in ("name", "constants"):
            assert getattr(found, name) == pytest.approx(value, rel=1e-6), name
    assert found.constants.wait == pytest.approx(1e-3)


def test_measure(here, monkeypatch, capsys):
    """Two ranks of this machine; the file is one that a prediction takes."""
    measured = measure.measure
    monkeypatch.setattr(measure, "measure", lambda ranks: measured(ranks, SIZES))
    assert measure.main(["--ranks", "2", "--out", "here.json"]) == 0
    machine = json_files.read("here.json", Machine)
    assert machine.processors == len(measure.os.sched_getaffinity(0))
    assert 0 < machine.peak < 1e15 and 0 < machine.overhead < 1
    assert sum(seconds(Layout(dp=2, global_batch_size=8), machine).values()) > 0
    out = capsys.readouterr().out
    for word in ("matmul", "memory", "link", "wait", "overhead", "processors"):
        assert f"\n{word} " in out


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--ranks", "0"], "--ranks 0: must be from 1 to 64"),
        (["--out", "no/such/folder.json"], "cannot be written (no/such is not a folder)"),
        (["--out", "."], "cannot be written (it is a folder)"),
    ],
)
def test_measure_refuses(here, monkeypatch, capsys, argv, words):
    # and before anything is measured
    monkeypatch.setattr(measure, "measure", lambda ranks: pytest.fail("measured"))
    with pytest.raises(SystemExit) as e:
        measure.main(argv)
    err = capsys.readouterr().err
    assert e.value.code == 2 and words in err and err.count("\n") == 1


# --- try ------------------------------------------------------------------------------------------


def test_try(here, monkeypatch, capsys):
    """The two best layouts of two ranks train, and the table has a line for each."""
    fake = SimpleNamespace(Popen=ForkedTraining, DEVNULL=None)
    monkeypatch.setattr(try_layouts, "subprocess", fake)
    words = small_run.as_flags(num_layers=2, hidden_size=32, num_heads=4, global_batch_size=4)
    argv = ["2", "--ranks", "2", "--machine", "machine.json", "--steps", "4", *words]
    assert try_layouts.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layout", "predicted,", "s", "measured,", "s", "ratio", "order"]
    assert len(lines) == 4 and "off by" in lines[3]
    best = planner.search(LAPTOP, software_of(LAPTOP), flags.parse(words, 0).model_config(), 2, 4)[
        0
    ]
    assert lines[1].startswith(try_layouts.name_of(best.layout))
    assert f"{best.seconds:.3f}" in lines[1]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--model", "tiny"], "invalid int value: 'tiny'"),
        (["0"], "planner.py: count 0: must be from 1 to 1000"),
        (["2", "--ranks", "99999999999"], "--ranks 99999999999: must be from 1 to 64"),
        (["2", "--steps", "3"], "--steps 3: must be from 4 to 1000"),
        (["2", "--nosuch", "3"], "planner.py: unrecognized arguments: --nosuch 3; train.py --help"),
        (["2", "--machine", "none.json"], "none.json: cannot be read"),
        (["2", "--machine", "machine.json", "--tp", "2"], "--tp: is what is tried"),
        (["2", "--machine", "machine.json", "--num-heads", "3"], "hidden"),
    ],
)
def test_try_refuses(here, capsys, argv, words):
    with pytest.raises(SystemExit) as e:
        try_layouts.main(argv)
    err = capsys.readouterr().err
    assert e.value.code == 2 and words in err and err.count("\n") == 1


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
    assert processes_that_name(str(files)) == [] and os.listdir(files) == []
    assert "Traceback" not in planning.stderr


def test_the_table_counts_orders():
    predicted, measured = [1.0, 2.0, 3.0], [2.0, 1.0, 4.0]
    assert try_layouts.spearman(predicted, measured) == pytest.approx(0.5)
    # a and b share a rank, in one order only
    assert try_layouts.spearman([1.0, 1.0, 3.0], measured) == pytest.approx(0.866, abs=1e-3)
    *_, last = try_layouts.table(["a", "b", "c"], predicted, measured)
    # 1/2, 2/1 and 3/4; a took 2 seconds and b 1
    assert last.startswith("off by 58% on average; the first is 100% slower")


@pytest.mark.parametrize("model", ["8 layers of 256", "4 layers of 512"])
def test_the_order_that_was_measured(model):
    """Of comparisons/planner_here.py: the recorded machine still predicts the measured order."""
    path = Path(__file__).parent.parent / "comparisons" / "planner_here.json"
    found = json_files.read(path, dict)
    recorded = found["models"][model]
    machine = json_files.convert(recorded["machine"], Machine, "machine")
    predicted, measured = [], []
    for row in recorded["rows"]:
        ranks = 1 if row["name"] == "one device" else found["ranks"]
        config = flags.parse([*recorded["flags"], *row["flags"].split()], 0)
        layout = plan.layout_of(config, ranks)
        parts = planner.step_time(machine, software_of(machine), config.model_config(), layout)
        predicted.append(sum(parts.values()))
        measured.append(row["measured"])
        assert predicted[-1] == pytest.approx(row["predicted"], rel=0.05)
    assert try_layouts.spearman(predicted, measured) > 0.85


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


def test_a_run_has_the_layout_of_its_flags():
    """What Layout.flags writes, train.py reads as this layout."""
    for layout in SEARCHED[::5]:
        config = flags.parse(layout.flags(), 0)
        assert plan.layout_of(config, 4) == layout


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
        values = dataclasses.asdict(LAPTOP) | content if isinstance(content, dict) else content
        (tmp_path / name).write_text(json.dumps(values) if values != content else content)
    with pytest.raises(ConfigError, match=r"planner\.py measure") as e:
        plan.check(Config(plan=name))
    assert words in str(e.value)


def test_auto_finds_the_gpu_by_its_name(monkeypatch):
    monkeypatch.setattr(plan.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plan.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert plan.machine_of("auto") is MACHINES["h200"]
