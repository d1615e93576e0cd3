"""Ranks killed (SIGKILL) at random moments under torchrun's restarts: every run ends with the
weights and the loss curve of an undisturbed one, bit for bit.

    python tests/killed_ranks.py [--runs 20] [--kills 2] [--rl]

--rl: of reinforcement learning, whose steps write answers, and whose checkpoints have a critic too.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import small_run

ROOT = Path(__file__).parent.parent

# A save after each step, dropout, and state whose every part a restart must bring back.
FLAGS = small_run.as_flags(
    save_every=1,
    dropout=0.1,
    steps=16,
    zero_stage=3,
    optimizer_state="bf16",
    precision="bf16",
    micro_batch_size=1,
)

# Also of the rollout under another layout. Rewards are those of REWARD.
RL_FLAGS = small_run.as_flags(
    method="ppo",
    answer_tokens=6,
    global_batch_size=8,
    steps=12,
    save_every=1,
    eval_every=4,
    zero_stage=3,
    rollout_tp=2,
    lr=1e-2,
    warmup_steps=0,
    device="cpu",
)
REWARD = "def evenness(prompt, answer, record):\n    return sum(map(ord, answer)) % 7\n"


def has_checkpoint(line: str) -> bool:
    """Whether it is of a step before which a checkpoint is whole: the save after step 2 has waited
    for that after step 1."""
    found = re.match(r"step +(\d+)", line)
    return found is not None and int(found[1]) >= 3


class Forked:
    """What `run` asks of subprocess.Popen: tests/forked_torchrun.py, which waits for no import."""

    def __init__(self, words: list[str], **options):
        import processes

        self.command = processes.start_launcher(words)
        self.pid, self.wait = self.command.process.pid, self.command.wait

    def poll(self) -> int | None:
        return self.command.returncode

    @property
    def stdout(self) -> Iterator[str]:
        read = 0
        while True:
            is_over = self.poll() is not None
            whole = self.command.stdout.rpartition("\n")[0].splitlines()
            yield from (f"{line}\n" for line in whole[read:])
            read = len(whole)
            if is_over:
                return
            time.sleep(0.01)


def run(command: list[str], seed: int, most: int, popen=subprocess.Popen) -> tuple[int, str]:
    """Run a launcher's command, `.. --nproc-per-node 2 .. train.py ..`, with restarts, and kill a
    random rank at up to `most` random moments. popen: or Forked, for a command that begins with
    --nproc-per-node. Returns (kills, output)."""
    g = random.Random(seed)
    first_flag = command.index("--nproc-per-node")
    process = popen(
        [*command[:first_flag], "--max-restarts", str(most + 1), *command[first_flag:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    kills = 0
    output = []
    # set at a step after the start, and after each restart
    training = threading.Event()

    def kill():
        nonlocal kills
        for _ in range(most):
            training.wait()
            training.clear()
            time.sleep(g.uniform(0, 0.8))
            ranks = subprocess.run(
                ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
            ).stdout.split()
            if process.poll() is None and ranks:
                os.kill(int(g.choice(ranks)), signal.SIGKILL)
                kills += 1

    threading.Thread(target=kill, daemon=True).start()
    for line in process.stdout:
        output.append(line)
        if has_checkpoint(line) and len(output) > 1 and not has_checkpoint(output[-2]):
            training.set()
    if process.wait() != 0:
        raise RuntimeError(f"exit status {process.returncode}\n{''.join(output)}")
    return kills, "".join(output)


def state(folder: Path) -> tuple[list, dict]:
    """(numbers of each step, and samples; every tensor of the last checkpoint)"""
    samples = folder / "samples.jsonl"
    text = [samples.read_text()] if samples.exists() else []
    return small_run.numbers_of(folder) + text, small_run.tensors_of(folder)


def text_flags(folder: Path) -> list[str]:
    """A run that learns from a text."""
    text = folder / "text.txt"
    text.write_text(Path(argparse.__file__).read_text())
    return [*small_run.flags(num_layers=2, global_batch_size=4, data=text), *FLAGS]


def rl_flags(folder: Path, sft) -> list[str]:
    """A run of finetune/reinforcement.py. sft(flags): trains its base."""
    talk = [{"prompt": f"{n}+", "completion": "ab"[n % 2] * 3} for n in range(40)]
    for name, records in {"talk": talk, "prompts": [{"prompt": x["prompt"]} for x in talk]}.items():
        small_run.write_lines(folder / f"{name}.jsonl", records)
    (folder / "reward.py").write_text(REWARD)
    options = dict(seq_length=48, steps=2, data=folder / "talk.jsonl", out=folder / "base")
    sft(small_run.flags(**options))
    names = dict(load=folder / "base", data=folder / "prompts.jsonl")
    return [*small_run.as_flags(**names, reward=f"{folder}/reward.py:evenness"), *RL_FLAGS]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=2, help="at most, in each")
    parser.add_argument("--rl", action="store_true", help="runs of reinforcement.py --method ppo")
    args = parser.parse_args()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [*launcher, str(ROOT / "train.py")]
        if args.rl:
            sft = [*launcher, "-m", "finetune.sft"]
            flags = rl_flags(folder, lambda flags: run([*sft, *flags], 0, 0))
            command = [*launcher, "-m", "finetune.reinforcement"]
        else:
            flags = text_flags(folder)
        run([*command, *flags, "--out", f"{folder}/undisturbed"], 0, 0)
        curve, tensors = state(folder / "undisturbed")
        for seed in range(args.runs):
            out = folder / str(seed)
            kills, _ = run([*command, *flags, "--out", str(out)], seed, args.kills)
            killed_curve, killed_tensors = state(out)
            assert killed_curve == curve and small_run.equal(killed_tensors, tensors), seed
            print(f"run {seed}: {kills} kills, the same, bit for bit", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
