"""A run that goes on with batches of another size, or with another blend, takes what comes next:
nothing twice, nothing never."""

from pathlib import Path

import pytest
import small_run

import train
from run import checkpoint, data
from run.task import Task

ROOT = Path(__file__).parent.parent


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of its own, with three corpora and some conversations."""
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        text = " ".join(f"{name}{n}" for n in range(4000))
        Path(f"{name}.txt").write_text(text)
    turns = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]}
        for n in range(60)
    ]
    small_run.write_lines(Path("chat.jsonl"), turns)
    pairs = [{"prompt": f"q{n}", "chosen": "yes", "rejected": "no"} for n in range(60)]
    small_run.write_lines(Path("pairs.jsonl"), pairs)


@pytest.fixture
def taken(monkeypatch) -> list[int]:
    """The sample numbers of all steps, in order."""
    numbers = []
    original = train.Trainer.forward_backward

    def forward_backward(self, step, dataset):
        numbers.extend(self.task.global_batch(step))
        return original(self, step, dataset)

    monkeypatch.setattr(train.Trainer, "forward_backward", forward_backward)
    return numbers


COMMANDS = {
    "text": ["--data", "a.txt"],
    "sft": ["finetune.sft", "--data", "chat.jsonl"],
    "pairs": "finetune.preference --method reward --data pairs.jsonl --load base".split(),
}


@pytest.mark.parametrize("sizes", [(4, 2, 8), (2, 4, 2)], ids=str)
@pytest.mark.parametrize("name", COMMANDS)
def test_batches_of_another_size(here, taken, name, sizes):
    """Twice: the second resumption knows of three sizes."""
    if "base" in COMMANDS[name]:
        small_run.run("--data", "a.txt", *small_run.flags(steps=1, out="base"))
        taken.clear()
    for n, size in enumerate(sizes, 1):
        steps = dict(steps=3 * n, global_batch_size=size, warmup_steps=0, out="run")
        flags = small_run.flags(**steps) + ["--resume"] * (n > 1)
        assert small_run.run(*COMMANDS[name], *flags) == 0
    assert taken == list(range(3 * sum(sizes)))


BLENDS = [
    (["0.5:a.txt", "0.5:b.txt"], 8),
    (["0.9:a.txt", "0.1:b.txt"], 8),
    (["0.2:b.txt", "0.2:c.txt", "0.6:a.txt"], 4),
    (["a.txt"], 6),
    (["0.5:c.txt", "0.5:a.txt"], 8),
]


def test_blends_that_change(here, monkeypatch):
    """Each corpus goes on after what it has given, whatever the weights, alone or not."""
    given = {}

    def batch(self, samples, original=data.Corpus.batch):
        for sample in samples:
            given.setdefault(self.index["corpus"], []).append(int(sample) + self.offset)
        return original(self, samples)

    monkeypatch.setattr(data.Corpus, "batch", batch)
    steps = 0
    for n, (blend, size) in enumerate(BLENDS):
        steps += 3
        flags = small_run.flags(steps=steps, global_batch_size=size, warmup_steps=0, out="run")
        # the evaluation at the end reads held-out text, which is another corpus object
        monkeypatch.setattr(Task, "evaluate", lambda *args: 0.0)
        assert small_run.run("--data", *blend, *flags, *["--resume"] * (n > 0)) == 0
    counts = sorted(map(len, given.values()))
    for numbers in given.values():
        # the sample at the end of training reads the first held-out tokens: sample 0 again
        assert list(dict.fromkeys(numbers)) == list(range(len(set(numbers)))), numbers
    assert sum(len(set(numbers)) for numbers in given.values()) == 3 * sum(s for _, s in BLENDS)
    assert len(counts) == 3


def test_a_checkpoint_without_these_fields(here, taken, monkeypatch):
    """A checkpoint of an older version: all its batches had one size."""

    def save(self, folder, step, tensors, state, original=checkpoint.Saver.save):
        assert state.pop("samples") == 12 and state.pop("taken")["start"] == 0
        original(self, folder, step, tensors, state=state)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Saver, "save", save)
        small_run.run("--data", "a.txt", *small_run.flags(steps=3, global_batch_size=4, out="run"))
    flags = small_run.flags(steps=5, global_batch_size=2, out="run", warmup_steps=0)
    small_run.run("--data", "a.txt", *flags, "--resume")
    assert taken == list(range(16))
