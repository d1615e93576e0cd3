"""A file that only one machine has: all ranks end within seconds, and one line names rank and file.

Each rank is started in a folder of its own, as on two machines; one of them lacks a file.
"""

import json
import random
import shutil
import threading
import time

import processes
import pytest
import small_run
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import train
from finetune.sft import SFTConfig
from run.config import name_of
from run.world import Refusals

RUN = "--global-batch-size 4 --steps 1 --eval-every 0 --device cpu --lr 0.001"
GENERATE = "generate.py --device cpu --checkpoint base --max-tokens 2"
# the file that is missing -> the command that reads it
COMMANDS = {
    "chats.jsonl": f"finetune.sft {RUN} --load base --data chats.jsonl",
    "template.jinja": f"finetune.sft {RUN} --load base --data chats.jsonl"
    " --chat-template template.jinja",
    "base": f"finetune.sft {RUN} --load base --data chats.jsonl",
    "pairs.jsonl": f"finetune.preference {RUN} --load base --data pairs.jsonl",
    "prompts.jsonl": f"finetune.reinforcement {RUN} --load base --data prompts.jsonl"
    " --reward r.py:f --answer-tokens 4 --group-size 2",
    "r.py": f"finetune.reinforcement {RUN} --load base --data prompts.jsonl"
    " --reward r.py:f --answer-tokens 4 --group-size 2",
    "prompts.json": f"finetune.prompt_tuning {RUN} --load base --config prompts.json",
    "lines.jsonl": f"finetune.prompt_tuning {RUN} --load base --config prompts.json",
    "base ": f"{GENERATE} --prompt a",
    "base  ": "inference.evaluate --device cpu --checkpoint base --perplexity text.txt",
    "text.txt": "inference.evaluate --device cpu --checkpoint base --perplexity text.txt",
    "adapter": f"{GENERATE} --prompt a --adapter adapter",
}
DRAWN = random.Random(0).sample([(file, rank) for file in COMMANDS for rank in (0, 1)], 2)
ALL = [
    pytest.param(file, rank, marks=[] if (file, rank) in DRAWN else pytest.mark.repetition)
    for file in COMMANDS
    for rank in (0, 1)
]
TEMPLATE = small_run.template("t", (2,), "<|VIRTUAL_PROMPT_0|>{text}{label}")


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A folder with every file."""
    folder = tmp_path_factory.mktemp("machine")
    lines = {
        "chats.jsonl": [{"prompt": f"{n}", "completion": "a"} for n in range(20)],
        "pairs.jsonl": [{"prompt": f"{n}", "chosen": "a", "rejected": "b"} for n in range(20)],
        "prompts.jsonl": [{"prompt": f"{n}"} for n in range(20)],
        "lines.jsonl": [{"taskname": "t", "text": f"{n}", "label": "a"} for n in range(8)],
    }
    for name, records in lines.items():
        small_run.write_lines(folder / name, records)
    (folder / "template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    (folder / "r.py").write_text("def f(prompt, answer, record):\n    return len(answer)\n")
    (folder / "text.txt").write_text("a text")
    config = {
        "task_templates": [TEMPLATE],
        "new_tasks": ["t"],
        "data": {"train_ds": ["lines.jsonl"], "validation_ds": ["lines.jsonl"]},
    }
    (folder / "prompts.json").write_text(json.dumps(config))
    sft = ["--data", str(folder / "chats.jsonl"), "--steps", "1"]
    assert train.main([*small_run.flags(), *sft, "--out", str(folder / "base")], SFTConfig) == 0
    words = "--global-batch-size 2 --eval-every 0 --device cpu --peft lora --lr 0.001".split()
    words += ["--load", str(folder / "base"), "--out", str(folder / "adapter")]
    assert train.main([*words, *sft], SFTConfig) == 0
    return folder


def start_on(folders: list, command: str, monkeypatch) -> list[processes.Command]:
    """The ranks of a command, each in a folder of its own."""
    port = processes.free_port()
    started = []
    for rank, folder in enumerate(folders):
        monkeypatch.chdir(folder)
        environment = processes.of_rank(rank, len(folders), port)
        started.append(processes.start(command.split(), **environment))
    return started


@pytest.mark.parametrize("file, rank", ALL)
def test_a_file_that_one_machine_lacks(file, rank, machine, tmp_path, monkeypatch):
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        shutil.copytree(machine, folder)
    file, command = file.strip(), COMMANDS[file]
    (folders[rank] / file).rename(tmp_path / "elsewhere")
    if RUN in command:
        command += f" --out {tmp_path}/out"
    begin = time.monotonic()
    ranks = start_on(folders, command, monkeypatch)
    assert [process.wait(60) for process in ranks] == [2, 2]
    assert time.monotonic() - begin < 30
    error = "".join(process.stderr for process in ranks)
    name = name_of(command)
    assert error.count("\n") == 1 and error.startswith(f"{name}: rank {rank}: "), error
    assert file in error, error


def test_ranks_that_lack_the_same_file_say_so_once(machine, tmp_path, monkeypatch):
    shutil.copytree(machine, tmp_path / "0")
    (tmp_path / "0/chats.jsonl").unlink()
    command = f"{COMMANDS['chats.jsonl']} --out {tmp_path}/out"
    ranks = start_on([tmp_path / "0"] * 2, command, monkeypatch)
    assert [process.wait(60) for process in ranks] == [2, 2]
    error = "".join(process.stderr for process in ranks)
    assert error.startswith("sft.py: --data chats.jsonl: ") and error.count("\n") == 1, error


def test_torchrun_repeats_the_line(tmp_path):
    """Its own report comes after the line of a refusal, and ends with it."""
    port = processes.free_port()
    ranks = []
    for rank in range(2):
        environment = processes.of_rank(rank, 2, port)
        environment["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / f"{rank}.json")
        ranks.append(processes.start(["train.py", "--tp", 3], **environment))
    assert [process.wait(60) for process in ranks] == [2, 2]
    for rank in range(2):
        failure = ProcessFailure(rank, pid=1, exitcode=2, error_file=str(tmp_path / f"{rank}.json"))
        said = "train.py: --tp 3: must divide the 2 ranks; [1, 2] would fit"
        assert failure.message["message"] == said


def test_no_rank_ends_before_the_line_is_said(monkeypatch):
    """torchrun kills all ranks when the first one ends."""
    store = dist.HashStore()
    ended = threading.Event()

    def end(status: int):
        ended.set()
        raise SystemExit(status)

    monkeypatch.setattr("os._exit", end)
    other = Refusals(store, 1, 4)
    thread = threading.Thread(target=other.end, args=("rank 2: no such file",), daemon=True)
    thread.start()
    assert not ended.wait(0.3)
    store.set("said", "")
    assert ended.wait(10)
    thread.join()
