"""The command: what a person types, what comes out, what happens when things go wrong."""

import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import killed_ranks
import processes
import pytest
import small_run
import torch
from small_run import equal, lines_of, numbers_of, tensors_of

import optimizer
import train
from run import checkpoint, data, finish, metrics, training_run
from run.flags import parse
from run.metrics import Metrics
from run.saving import RunCheckpoints
from run.task import Task
from run.tokenizer import ByteTokenizer

ROOT = Path(__file__).parent.parent
SMALL = small_run.flags(num_layers=2, global_batch_size=4, steps=12)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    g = random.Random(0)
    words = ["if", "for", "while"]
    lines = [f"{g.choice(words)} x{g.randrange(9)} in y{g.randrange(9)}:" for _ in range(2000)]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def here(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def argv(text, *more):
    return ["train.py", *SMALL, "--data", text, *more]


def in_process(text, *more):
    """`python train.py` without a new interpreter."""
    return small_run.run(*SMALL, "--data", text, *more)


def same_weights(a, b):
    return equal(tensors_of(a), tensors_of(b))


def test_two_ranks_end_to_end(here, text):
    flags = ("--eval-every", "5", "--save-every", "5", "--dropout", "0.1")
    done = processes.run(argv(text, "--out", "run", *flags), world=2, is_shortened=False)
    assert done.returncode == 0, done.stderr
    assert {".launch", "config.json", "metrics.jsonl", "loss.png", "sample.txt", "checkpoints"} == {
        p.name for p in Path("run").iterdir()
    }
    assert list(checkpoint.steps("run/checkpoints")) == [10, 12]
    metrics = lines_of("run")
    assert [x["step"] for x in metrics] == list(range(1, 13))
    assert metrics[-1]["tokens"] == 12 * 4 * 32
    names = "step loss grad_norm lr tokens step_seconds tokens_per_second tflops_per_device"
    assert {*names.split(), "peak_memory_bytes"} <= metrics[0].keys()
    assert [x["step"] for x in metrics if "eval_loss" in x] == [5, 10, 12]
    assert metrics[-1]["eval_loss"] < metrics[0]["loss"]
    assert "nats per byte" in done.stdout and done.stdout.count("step ") >= 12
    assert Path("run/loss.png").read_bytes().startswith(b"\x89PNG")
    # one rank: the same curve, through the command too
    in_one = processes.run(argv(text, "--out", "one", "--dropout", "0.1"))
    assert in_one.returncode == 0, in_one.stderr
    assert [x["loss"] for x in numbers_of("one")] == pytest.approx(
        [x["loss"] for x in metrics], rel=1e-5
    )


# --- lines that are written a step later, as on a GPU


@pytest.fixture(params=[0, 1])
def lag(request, monkeypatch):
    monkeypatch.setattr(training_run, "reading_lag", lambda trainer: request.param)
    return request.param


def test_when_lines_are_written(here, text, monkeypatch, lag):
    """F, step: enqueued; L: its line written; E: evaluated; S: saved."""
    events = []

    def note(owner, name, mark, step_of):
        original = getattr(owner, name)

        def noted(*args, **options):
            events.append(f"{mark}{step_of(*args)}")
            return original(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    note(train.Trainer, "forward_backward", "F", lambda trainer, step, dataset: step)
    note(Metrics, "add", "L", lambda metrics, line: line["step"])
    note(Task, "evaluate", "E", lambda *args: "")
    note(RunCheckpoints, "save", "S", lambda checkpoints, folder, step, *rest: step)
    flags = ("--steps", "6", "--save-every", "3", "--eval-every", "4")
    assert in_process(text, "--out", "run", *flags) == 0
    expected = "F1 L1 F2 L2 F3 L3 S3 F4 E L4 F5 L5 F6 E L6 S6"
    if lag:
        expected = "F1 F2 L1 F3 L2 L3 S3 F4 E L4 F5 F6 L5 E L6 S6"
    assert " ".join(events) == expected
    assert [x["step"] for x in lines_of("run")] == [1, 2, 3, 4, 5, 6]


# runs train.py as it is on a GPU
LATE = """
import sys
from run.task import Task
import train
from run import training_run

training_run.reading_lag = lambda trainer: 1
sys.exit(train.main(sys.argv[1:]))
"""


def test_late_lines_are_the_same(here, text):
    """On two ranks, but for times: so are the checkpoints, and what they say of the optimizer."""
    Path("late.py").write_text(LATE)
    flags = ("--save-every", "4", "--eval-every", "5", "--dropout", "0.1")
    for script, out in (("train.py", "now"), (str(here / "late.py"), "late")):
        done = processes.run([script, *argv(text, "--out", out, *flags)[1:]], world=2)
        assert done.returncode == 0, done.stderr
    assert numbers_of("late") == numbers_of("now")
    assert len(lines_of("late")) == 12 and same_weights("late", "now")
    late, now = (checkpoint.steps(f"{out}/checkpoints") for out in ("late", "now"))
    assert list(late) == list(now)
    for step, path in late.items():
        states = [checkpoint.read_index(x)["optimizer"] for x in (path, now[step])]
        assert states[0] == states[1]


def test_a_signal_ends_the_run_after_the_step_that_is_enqueued(here, text, monkeypatch, lag):
    original = train.Trainer.forward_backward

    def forward_backward(self, step, dataset):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, step, dataset)

    monkeypatch.setattr(train.Trainer, "forward_backward", forward_backward)
    assert in_process(text, "--out", "run", "--log-every", "10") == 0
    assert [x["step"] for x in lines_of("run")] == list(range(1, 4 + lag))
    assert list(checkpoint.steps("run/checkpoints")) == [3 + lag]


# --- when something breaks


def exploding(step, *args):
    return 1e30 if step == 6 else 1e-3


def test_a_run_that_diverges_ends_and_keeps_what_was_good(here, text, monkeypatch, capfd, lag):
    """Step 6 ruins the weights, which is seen from step 7 on: the checkpoint of step 4 is good,
    that of step 6 is not."""
    monkeypatch.setattr(optimizer, "learning_rate", exploding)
    flags = ("--save-every", "2", "--keep", "1", "--max-bad-steps", "3")
    assert in_process(text, "--out", "run", *flags) == 1
    assert [x["step"] for x in lines_of("run")] == list(range(1, 10))
    assert list(checkpoint.steps("run/checkpoints")) == [4, 6]
    message = capfd.readouterr().err.splitlines()[-1]
    assert message.startswith("train.py: step 9: the run has diverged")
    for words in (
        *("last 3 steps", "--max-bad-steps 3", "remove the later step-000006", "a lower --lr"),
        "the last good checkpoint is run/checkpoints/step-000004",
    ):
        assert words in message


def test_without_a_limit_no_older_checkpoint_is_removed(here, text, monkeypatch, lag):
    """Saves wait while steps are skipped; the last one, at the end of the run, removes nothing."""
    monkeypatch.setattr(optimizer, "learning_rate", exploding)
    flags = small_run.as_flags(save_every=2, keep=2, max_bad_steps=0)
    assert in_process(text, "--out", "run", *flags) == 0
    assert list(checkpoint.steps("run/checkpoints")) == [2, 4, 6, 12]


def test_the_search_for_the_first_loss_scale_is_no_divergence(here, text):
    flags = small_run.as_flags(precision="fp16", steps=8, save_every=1, keep=0, max_bad_steps=1)
    assert in_process(text, "--out", "run", *flags) == 0
    skipped = lines_of("run")[-1]["skipped_steps"]
    assert 1 <= skipped <= 4
    assert list(checkpoint.steps("run/checkpoints")) == list(range(skipped + 1, 9))


def test_signal_saves_and_stops(here, text):
    """(test_terminal.py has Ctrl-C at every moment of a run.)"""
    ranks = processes.start_ranks(2, argv(text, "--out", "run", "--steps", "100000"))
    ranks[0].wait_for("step ")
    # to one rank alone: all stop after the same step
    ranks[-1].kill(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert "checkpoint saved" in ranks[0].stdout and "--resume" in ranks[0].stdout
    (step,) = checkpoint.steps("run/checkpoints")
    assert lines_of("run")[-1]["step"] == step < 100000


@pytest.mark.parametrize(
    "more, words",
    [
        (["--model", "gpt5"], ["--model gpt5", "no such preset", "gpt2"]),
        (["--model", "mt-nlg-530b"], ["no such preset; near are", "megatron-530b"]),
        (["--micro-batch-size", "3"], ["--micro-batch-size 3", "[1, 2, 4] would fit"]),
        (["--steps", "0"], ["--steps 0", "at least 1"]),
        (["--seed", str(10**20)], ["--seed 1"]),
        (["--hidden-size", str(10**12)], ["--hidden-size 1000000000000", "below 2^31"]),
        (["--lr", "nan"], ["--lr nan"]),
        (["--seq-length", "100000"], ["too short", "--seq-length"]),
        (["--vocab-size", "100"], ["--tokenizer bytes", "--vocab-size 257 would fit"]),
        (["--tp", "2"], ["--tp 2: this is one rank alone", "torchrun --nproc-per-node 2"]),
        (["--sequence-parallel"], ["--sequence-parallel", "--tp 2"]),
        (["--recompute-layers", "1"], ["needs --recompute selective or full"]),
        (["--precision", "fp16", "--optimizer-state", "bf16"], ["--precision bf16 would fit"]),
        (["--timeout", "0"], ["--timeout 0"]),
        (["--tokenizer", "nope.json"], ["--tokenizer nope.json"]),
        # as an environment variable that is not set makes them: --load "$BASE"
        (["--load", ""], ["--load '': is empty"]),
        (["--out", ""], ["--out '': is empty"]),
        # a name of two lines is shown in one
        (["--tokenizer", "a\nb\u2028\x1b[2J"], ["a\\nb\\u2028\\x1b[2J"]),
    ],
)
def test_refusals(here, text, more, words, capfd):
    assert in_process(text, *more) == 2
    err = capfd.readouterr().err
    assert all(word in err for word in words), err
    messages = [line for line in err.splitlines() if line and not line.startswith("data: ")]
    assert len(messages) == 1 and messages[0].startswith("train.py: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda(here, text, capfd):
    """And why, in torch's words."""
    assert in_process(text, "--device", "cuda") == 2
    with pytest.raises((AssertionError, RuntimeError)) as e:
        torch.cuda.init()
    err = capfd.readouterr().err
    assert "--device cuda: no GPU can be used here" in err and str(e.value) in err


@pytest.mark.parametrize("more", [["--no-such-flag"], ["--steps", "many"], ["--zero-stage", "4"]])
def test_unknown_flags(here, text, more, capfd):
    with pytest.raises(SystemExit) as e:
        in_process(text, *more)
    assert e.value.code == 2 and more[0] in capfd.readouterr().err


def test_output_of_another_run(here, text, capfd):
    assert in_process(text, "--out", "run") == 0
    before = numbers_of("run")
    assert in_process(text, "--out", "run") == 2
    assert "--out run: holds another run" in capfd.readouterr().err and numbers_of("run") == before
    assert in_process(text, "--out", "run", "--resume", "--num-layers", "3") == 2
    err = capfd.readouterr().err
    assert "holds another model" in err
    assert "num_layers is 2 there and 3 here" in err
    assert numbers_of("run") == before
    newest = list(checkpoint.steps("run/checkpoints").values())[-1]
    os.truncate(next(newest.glob("*.safetensors")), 1000)
    assert in_process(text, "--out", "run", "--resume") == 2
    err = capfd.readouterr().err
    assert "no checkpoint in run is whole" in err and "1000 bytes long" in err


def test_a_damaged_checkpoint_is_passed_over(here, text, capfd):
    """The newest has a flipped byte, the one before it is short of a file: the run goes on from the
    third, says so, and ends as if nothing had been, bit for bit."""
    flags = ("--save-every", "3", "--keep", "0", "--dropout", "0.1", "--precision", "bf16")
    assert in_process(text, "--out", "run", *flags) == 0
    whole = tensors_of("run")
    before = numbers_of("run")
    found = checkpoint.steps("run/checkpoints")
    file = next(found[12].glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    next(found[9].glob("*.safetensors")).unlink()
    with open("run/metrics.jsonl", "a") as f:
        # and a line that a kill cut short
        f.write('{"step": 13, "los')
    capfd.readouterr()
    assert in_process(text, "--out", "run", *flags, "--resume") == 0
    out = capfd.readouterr().out
    for words in (f"{file} is damaged", "is missing", "going back to the one", "after step 6"):
        assert words in out
    assert numbers_of("run") == before
    assert equal(tensors_of("run"), whole)
    checkpoint.verify(found[9])


def test_a_restart_goes_on_with_its_own_run_alone(here, text, capfd, monkeypatch):
    """What torchrun starts again resumes what it began; somebody else's run is refused, the second
    time too."""
    assert in_process(text, "--out", "run", "--save-every", "6") == 0
    before = numbers_of("run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    # the same launcher: this process's parent
    assert in_process(text, "--out", "run", "--steps", "14") == 0
    assert numbers_of("run")[:12] == before and len(numbers_of("run")) == 14
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert in_process(text, "--out", "run", "--steps", "20") == 2
    assert "holds another run" in capfd.readouterr().err and len(numbers_of("run")) == 14


def test_start_from_weights(here, text, capfd):
    """--load takes the weights alone, of a checkpoint or a run: step 1, no moments, another
    optimizer state."""
    assert in_process(text, "--out", "a", "--steps", "6") == 0
    flags = small_run.as_flags(steps=1, load="a", optimizer_state="bf16", lr=0)
    assert in_process(text, "--out", "b", *flags) == 0
    assert "starting from the weights of a/checkpoints/step-000006" in capfd.readouterr().out
    a, b = tensors_of("a"), tensors_of("b")
    assert all(torch.equal(a[n], b[n]) for n in a if n.startswith("model."))
    assert not any(torch.equal(a[n], b[n].to(a[n].dtype)) for n in a if n.startswith("exp_avg."))
    assert b["exp_avg.head.output.weight"].dtype == torch.bfloat16
    # its shape comes with it
    assert parse(["--load", "b"], 0).model_config() == parse(SMALL, 0).model_config()
    assert in_process(text, "--out", "c", "--load", "nowhere") == 2
    assert "nowhere: no such folder" in capfd.readouterr().err


def test_killed_ranks_are_started_again(here, text):
    """torchrun --max-restarts: a killed rank leads to a restart from the newest checkpoint, and to
    the weights of an undisturbed run. (`python tests/killed_ranks.py` does this many times, in
    new interpreters.)"""
    whole = processes.run(argv(text, "--out", "whole", *killed_ranks.FLAGS), world=2)
    assert whole.returncode == 0, whole.stderr
    words = argv(text, "--out", "killed", *killed_ranks.FLAGS)
    command = ["--nproc-per-node", "2", str(ROOT / words[0]), *words[1:]]
    kills, output = killed_ranks.run(command, 0, 1, killed_ranks.Forked)
    assert kills == 1 and output.count("resuming after step") == 1, output
    assert numbers_of("killed") == numbers_of("whole") and same_weights("killed", "whole")


def test_no_room_while_training(here, text, capfd):
    """A limit on the size of files acts as a full disk."""
    import resource

    data.prepare([text], ByteTokenizer())
    assert in_process(text, "--out", "run", "--steps", "4") == 0
    capfd.readouterr()
    # Python ignores SIGXFSZ, so that a write fails
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        status = in_process(text, "--out", "run", "--resume", "--save-every", "2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = capfd.readouterr().err
    assert status == 1, err
    assert re.search("after step ([678]|1[0-2]): cannot save run/checkpoints/step-000006", err)
    assert "step-000004 is whole" in err
    assert "Traceback" not in err
    assert list(checkpoint.steps("run/checkpoints")) == [4]
    # with room again
    assert in_process(text, "--out", "run", "--resume") == 0


def test_a_failure_names_rank_and_step(here, text, monkeypatch, capfd, lag):
    original = train.Trainer.update

    def update(self, step):
        if step == 3:
            raise RuntimeError("the cable was pulled")
        return original(self, step)

    monkeypatch.setattr(train.Trainer, "update", update)
    assert in_process(text, "--out", "run") == 1
    err = capfd.readouterr().err
    assert "rank 0, step 3: RuntimeError: the cable was pulled" in err and "--resume" in err
    assert [x["step"] for x in lines_of("run")] == [1, 2]


@pytest.mark.parametrize("steps", ["1", "6"])
def test_profile(here, text, steps):
    assert in_process(text, "--out", "plain", "--steps", steps) == 0
    assert in_process(text, "--out", "run", "--steps", steps, "--profile") == 0
    assert json.loads(Path("run/trace-0.json").read_text())["traceEvents"]
    assert numbers_of("run") == numbers_of("plain")


def test_four_ranks_exit_with_status_0(here, text):
    """A length that tp does not divide. (test_terminal.py has two ranks in new interpreters.)"""
    flags = small_run.as_flags(model="gpt2", vocab_size=257, dropout=0, seq_length=33, tp=2, pp=2)
    done = processes.run(argv(text, *flags, "--out", "run", "--steps", "2"), world=4)
    assert done.returncode == 0, done.stderr
    assert len(Path("run/sample.txt").read_text()) > 4


@pytest.mark.skipif(not (ROOT / ".venv/bin/torchrun").exists(), reason="no .venv here")
def test_sbatch(here, text):
    """The Slurm script, with substitutes for Slurm's commands: it trains; SIGTERM to it makes the
    ranks save, and puts the job back into the queue."""
    for name, script in {
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "scontrol": f'if [ "$1" = show ]; then echo localhost; else echo "$@" >> {here}/log; fi',
        "scancel": f'echo "$@" >> {here}/log; pkill -TERM -f -- "--out {here}/run"',
    }.items():
        (here / name).write_text(f"#!/bin/bash\n{script}\n")
        (here / name).chmod(0o755)
    script = (ROOT / "train.sbatch").read_text()
    flags = re.search(r'^TRAIN="(.*?)"', script, re.MULTILINE | re.DOTALL)[1]
    small = f"{' '.join(SMALL)} --data {text} --steps 100000 --out {here}/run"
    (here / "job").write_text(script.replace(flags, small).replace(":29500", ":0"))
    environment = os.environ | {
        "PATH": f"{here}:{os.environ['PATH']}",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n",
    }
    p = subprocess.Popen(
        ["bash", str(here / "job")],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in p.stdout:
        if line.startswith("step "):
            break
    p.send_signal(signal.SIGTERM)
    output = p.communicate(timeout=60)[0]
    assert "checkpoint saved" in output, output
    assert (here / "log").read_text().split("\n")[:2] == ["--signal=TERM 7", "requeue 7"]
    (path,) = checkpoint.steps("run/checkpoints").values()
    checkpoint.verify(path)


def test_metrics_are_json_when_a_run_diverges(tmp_path):
    path = tmp_path / "metrics.jsonl"
    Metrics(path, 0).add({"step": 1, "loss": math.nan, "router_entropy": [1.0, math.inf]})
    line = json.loads(path.read_text(), parse_constant=lambda x: pytest.fail(x))
    assert line == {"step": 1, "loss": None, "router_entropy": [1.0, None]}


def test_a_finished_run_has_nothing_to_do(here, text, capfd):
    assert in_process(text, "--out", "run", "--steps", "3") == 0
    assert "--warmup-steps 50: longer than --steps 3" in capfd.readouterr().out
    Path("run/sample.txt").write_text("as it was")
    # the other flags are the run's
    assert train.main(["--resume", "--out", "run"]) == 0
    assert "step 3 of --steps 3 is done, and there is nothing to do" in capfd.readouterr().out
    assert Path("run/sample.txt").read_text() == "as it was"
    assert train.main(["--resume", "--out", "run", "--steps", "5", "--log-every", "2"]) == 0
    out = capfd.readouterr().out
    assert [x["step"] for x in lines_of("run")] == [1, 2, 3, 4, 5]
    printed = [line.split()[1] for line in out.splitlines() if line.startswith("step ")]
    assert printed == ["4/5", "5/5"]
    assert json.loads(Path("run/config.json").read_text())["hidden_size"] == 32
    assert train.main(["--resume", "--out", "run", "--steps", "4"]) == 2
    assert "--steps 4: the run in run is at step 5 already" in capfd.readouterr().err


def test_tensorboard_is_an_optional_package(here, text, capfd, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert in_process(text, "--out", "run", "--tensorboard") == 2
    assert "--tensorboard: needs the package tensorboard" in capfd.readouterr().err

    writer = mock.MagicMock()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    module = types.SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    assert in_process(text, "--out", "run", "--tensorboard", "--steps", "2") == 0
    writer.assert_called_once_with(Path("run/tensorboard"), purge_step=1)
    writer.return_value.add_scalar.assert_any_call("loss", lines_of("run")[1]["loss"], 2)


def test_mfu_is_against_the_dense_peak_of_a_known_gpu(monkeypatch):
    """16 bits; in FP8 twice as much. An unknown name, another card or a part of one gives none."""
    cards = {
        312: ["A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe"],
        989: ["H100 80GB HBM3", "H200"],
        756: ["H100 PCIe"],
        835: ["H100 NVL", "H200 NVL"],
        2250: ["B200", "B300 SXM6 AC"],
        2500: ["GB200", "GB300"],
        None: ["H100 80GB HBM3 MIG 1g.10gb", "GH200 480GB", "H100", "H800", "A10", "A100X"],
    }
    device = torch.device("cuda")
    for tflops, names in cards.items():
        for name in names:
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, n=name: f"NVIDIA {n}")
            assert metrics.peak_flops(device) == (tflops and tflops * 1e12), name
            for fp8, done in ((False, 100), (True, 50)):
                expected = {"mfu": done / tflops} if tflops else {}
                assert metrics.mfu(100.0, device, "bf16", fp8) == pytest.approx(expected)
    assert metrics.mfu(1.0, device, "fp32") == metrics.mfu(1.0, torch.device("cpu"), "bf16") == {}
    numbers = "loss grad_norm lr tokens_per_second tflops_per_device peak_memory_bytes".split()
    line = dict.fromkeys(numbers, 1.0) | {"step": 1, "mfu": 0.5}
    assert "MFU 50.0%" in metrics.progress(line, 1, 0.0, 1.0)


def test_the_flags_of_a_run_survive_a_full_disk(here, text, monkeypatch):
    assert in_process(text, "--out", "run", "--steps", "2") == 0
    before = Path("run/config.json").read_text()
    write = Path.write_text

    def full(path, content, **options):
        if path.name.startswith("config"):
            write(path, content[:100], **options)
            raise OSError(28, "No space left on device")
        return write(path, content, **options)

    monkeypatch.setattr(Path, "write_text", full)
    assert train.main(["--resume", "--out", "run", "--steps", "3"]) == 2
    assert Path("run/config.json").read_text() == before


def test_a_run_whose_base_is_gone_goes_on(here, text, capfd):
    assert in_process(text, "--out", "base", "--steps", "2") == 0
    flags = ["--data", text, "--device", "cpu", "--load", "base"]
    assert train.main([*flags, "--out", "run", "--steps", "2"]) == 0
    shutil.rmtree("base")
    assert train.main(["--resume", "--out", "run", "--steps", "4"]) == 0
    assert [x["step"] for x in lines_of("run")] == [1, 2, 3, 4]
    capfd.readouterr()
    assert train.main([*flags, "--out", "new"]) == 2
    assert "--load base: no such folder" in capfd.readouterr().err


@pytest.mark.parametrize(
    "name, text_", [("RANK", ""), ("RANK", "-1"), ("RANK", "1"), ("WORLD_SIZE", "2")]
)
def test_an_environment_that_names_no_rank(name, text_, monkeypatch, capfd):
    monkeypatch.setenv(name, text_)
    assert train.main(["--steps", "1"]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and error.startswith("train.py: ") and name in error


def test_no_rank_leaves_while_parameters_are_on_their_way(tmp_path, monkeypatch):
    """Under ZeRO 1 and 2 nothing else waits for what the last update has sent."""
    order = []

    def noted(name):
        return lambda self: order.append(name)

    monkeypatch.setattr(optimizer.GradientAccumulator, "renew_parameters", noted("renew"))
    monkeypatch.setattr(optimizer.GradientAccumulator, "wait_for_parameters", noted("wait"))
    monkeypatch.setattr(finish, "finish", lambda *_: order.append("finish"))
    words = small_run.flags(steps=2, out=tmp_path / "out")
    assert small_run.run(*words) == 0
    assert order == ["renew", "renew", "wait", "finish"]
    # a run that is done loads its checkpoint, and takes no step
    order.clear()
    (tmp_path / "out" / "sample.txt").touch()
    assert small_run.run(*words, "--resume") == 0
    assert order == ["renew", "wait"]
