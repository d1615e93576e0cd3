"""A chat template that writes the date: a run that goes on on the next day has the same data."""

import datetime
import json
import re
from pathlib import Path

import processes
import pytest
from small_run import flags, lines_of, numbers_of, run, write_lines

import train
from finetune import sft_data
from finetune.chat import message
from inference import loading
from run import checkpoint, launch
from run.world import World

TEMPLATE = (
    "{{ strftime_now('%d %b') }}\n{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant'"
    " %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
FIRST, NEXT = "2026-11-26T23:50:00", "2026-11-27T07:30:00"


@pytest.fixture
def today(monkeypatch):
    """today(day): what the clock tells from now on."""

    def set_clock(day: str) -> None:
        class Clock(datetime.datetime):
            @classmethod
            def now(cls):
                return cls.fromisoformat(day)

        monkeypatch.setattr(datetime, "datetime", Clock)

    return set_clock


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of its own, with a template, 60 lines of each kind and a model."""
    monkeypatch.chdir(tmp_path)
    Path("dated.jinja").write_text(TEMPLATE)
    rows = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(60)]
    write_lines(Path("chats.jsonl"), rows)
    pairs = [{"prompt": f"q{n}", "chosen": "yes", "rejected": "no"} for n in range(60)]
    write_lines(Path("pairs.jsonl"), pairs)
    Path("reward.py").write_text("def f(prompt, answer, record):\n    return len(set(answer))")
    Path("base.txt").write_text("some words " * 900)
    assert run("--data", "base.txt", *flags(steps=1, seq_length=64, out="base")) == 0


@pytest.fixture
def seen(monkeypatch) -> tuple[list, list]:
    """(the questions of each step, the held-out set of each run)"""
    questions, held_out = [], []
    step, check = train.Trainer.forward_backward, launch.check_data_agree

    def forward_backward(self, number, dataset):
        samples = self.task.global_batch(number)
        if hasattr(dataset, "question"):
            found = [dataset.question(n).text for n in samples]
        else:
            rows = dataset.batch(samples).tokens.tolist()
            texts = [bytes(n for n in row if n < 256).decode() for row in rows]
            found = re.findall(r"user: (q\d+)\n", " ".join(texts))
        questions.extend(set(found))
        return step(self, number, dataset)

    def check_data_agree(train_set, held_out_set, world):
        held_out.append(held_out_set)
        return check(train_set, held_out_set, world)

    monkeypatch.setattr(train.Trainer, "forward_backward", forward_backward)
    monkeypatch.setattr(launch, "check_data_agree", check_data_agree)
    return questions, held_out


DATED = ["--chat-template", "dated.jinja"]
COMMANDS = {
    "sft": ["finetune.sft", "--data", "chats.jsonl"],
    "packed": ["finetune.sft", "--data", "chats.jsonl", "--pack"],
    "dpo": ["finetune.preference", "--method", "dpo", "--load", "base", "--data", "pairs.jsonl"],
    "reward": [
        "finetune.preference",
        "--method",
        "reward",
        "--load",
        "base",
        "--data",
        "pairs.jsonl",
    ],
    "grpo": "reinforcement.py --load base --data pairs.jsonl --reward reward.py:f --group-size 2"
    " --answer-tokens 3".split(),
}


def of(name: str, steps: int, out: str = "run") -> list[str]:
    """The words of a run."""
    size = 2 if name == "packed" else 4
    sizes = dict(seq_length=64, steps=steps, global_batch_size=size, warmup_steps=0, out=out)
    return [*COMMANDS[name], *DATED, *flags(**sizes)]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_on_two_days(here, seen, today, capsys, name):
    """No question comes twice, and the same ones are held out."""
    questions, held_out = seen
    today(FIRST)
    assert run(*of(name, 6)) == 0
    assert f"with the date {FIRST}" in capsys.readouterr().out
    half = len(questions)
    today(NEXT)
    assert run(*of(name, 12), "--resume") == 0
    assert len(questions) > half > 10 and len(questions) == len(set(questions))
    one, two = (each.index["corpus"] for each in held_out)
    assert one == two
    text = capsys.readouterr().out
    assert "corpus" not in text.split("resuming after step 6")[1].split("\n")[0]
    assert f"with the date {FIRST}" in text
    # whoever asks the model writes today's date
    if name != "reward":
        tokenizer = loading.find_tokenizer("run", checkpoint.read_index(checkpoint.find("run")))
        rendered = loading.find_chat("run", tokenizer).template.render([message("user", "q")], True)
        assert rendered.text.startswith("27 Nov")


def test_ranks_that_are_started_again(here, today, monkeypatch):
    """torchrun does it with the flags of the first day, without --resume."""
    today(FIRST)
    assert run(*of("sft", 6, "whole")) == 0
    words = [*of("sft", 6), "--save-every", "3"]
    save = checkpoint.Saver.save

    def killed(self, folder, step, *args, **kwargs):
        if step > 3:
            self.wait()
            raise RuntimeError("killed")
        return save(self, folder, step, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Saver, "save", killed)
        assert run(*words) == 1
    today(NEXT)
    original = World.from_launcher

    def restarted():
        world = original()
        world.restarts = 1
        return world

    monkeypatch.setattr(World, "from_launcher", restarted)
    assert run(*words) == 0
    assert numbers_of("run") == numbers_of("whole")


def test_ranks_have_one_clock(here):
    """That of rank 0, also where a template writes the second."""
    Path("dated.jinja").write_text(TEMPLATE.replace("%d %b", "%H:%M:%S.%f"))
    done = processes.run([*of("sft", 2)], world=2)
    assert done.returncode == 0, done.stderr


def test_a_run_of_an_older_version(here, today, capsys):
    """It has no date: the day may be given. Without it the run says what follows."""
    for out, words in (("given", ["--date", "2026-11-26"]), ("not", [])):
        today(FIRST)
        assert run(*of("sft", 3, out)) == 0
        path = Path(out) / "config.json"
        saved = json.loads(path.read_text())
        assert saved.pop("date") == FIRST
        path.write_text(json.dumps(saved))
        today(NEXT)
        capsys.readouterr()
        assert run(*of("sft", 6, out), *words, "--resume") == 0
        said = "(some samples may come again, and others are held out)"
        assert (said in capsys.readouterr().out) == (not words)


def test_dates_that_are_given(here, today, capsys):
    """The flag decides what the model reads; what would do nothing is refused."""
    today(NEXT)
    assert run(*of("sft", 2, "today")) == 0
    assert run(*of("sft", 2, "then"), "--date", FIRST) == 0
    assert run(*of("sft", 2, "same"), "--date", "2026-11-27") == 0
    losses = {out: [line["loss"] for line in lines_of(out)] for out in ("today", "then", "same")}
    assert losses["today"] == losses["same"] != losses["then"]
    for given, words in (
        (["--date", "soon"], "--date soon: is no date; 2026-11-26 or"),
        (["--date", "2026-11-26", "--chat-template", "plain"], "does not ask for the date"),
    ):
        assert run(*of("sft", 2, "other"), *given) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_another_template_when_a_run_goes_on(here, today):
    """The date of before is no hindrance."""
    today(FIRST)
    assert run(*of("sft", 2)) == 0
    assert run(*of("sft", 3), "--resume", "--chat-template", "plain") == 0


def test_a_date_that_is_not_kept_is_seen(here, seen, today, capsys, monkeypatch):
    monkeypatch.setattr(sft_data, "date_of", lambda *args: None)
    with pytest.raises(AssertionError):
        test_a_run_on_two_days(here, seen, today, capsys, "sft")
