"""Learning from rewards as runs of train.py: what they leave, how they go on, what is refused."""

import shutil
from pathlib import Path

import killed_ranks
import numpy as np
import processes
import pytest
import small_run
from small_run import equal, lines_of, numbers_of, refusal, run, tensors_of, write_lines

import generate
from finetune import prompt_set
from finetune.chat import message
from finetune.reinforcement import ReinforcementTask
from finetune.rl_files import plot
from inference import cli, loading
from run import checkpoint

ROOT = Path(__file__).parent.parent

# --- runs -----------------------------------------------------------------------------------------

BATCH = small_run.as_flags(global_batch_size=8, warmup_steps=0, device="cpu", eval_every=0)
SHAPE = [*small_run.flags(seq_length=48), *BATCH]
REWARDS = """
from __future__ import annotations
import os
from dataclasses import dataclass

@dataclass
class Share:
    of: int = 128

def ascii(prompt, answer, record):
    assert prompt == record["prompt"] and record["want"] == "ascii"
    return sum(ord(c) < Share().of for c in answer) / max(1, len(answer))

def raises(prompt, answer, record):
    if len(answer) > 3:
        raise KeyError("no such thing")
    return 1

def leaves(prompt, answer, record):
    os._exit(0)

def no_number(prompt, answer, record):
    return float("nan")

def text(prompt, answer, record):
    return "good"

async def later(prompt, answer, record):
    return 1.0

def fails(prompt, answer, record):
    import pytest
    pytest.fail("two\\nlines")

def no_answer(prompt, answer, record):
    print("an answer:", answer)

def two_arguments(prompt, answer):
    return 1

STEPS = []

def raises_at_once(prompt, answer, record):
    STEPS.append(prompt)
    assert len(STEPS) == 1
    return 1

def raises_later(prompt, answer, record):
    STEPS.append(prompt)
    # on one of two ranks, each of which rates four answers in a step, after the try
    if len(STEPS) > 9 and os.environ.get("RANK") == "1":
        raise ValueError("of rank 1")
    return len(STEPS) % 3
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """(folder, flags without --method and --reward): a base, prompts, rewards."""
    folder = tmp_path_factory.mktemp("reinforcement")
    talk = [{"prompt": f"{n % 7}+", "completion": "ab"[n % 2] * 3} for n in range(40)]
    sft = ["finetune.sft", *SHAPE, "--data", write_lines(folder / "sft.jsonl", talk)]
    assert run(*sft, "--out", folder / "base", "--steps", 4, "--lr", 3e-3) == 0
    records = [{"prompt": f"{n}+", "want": "ascii"} for n in range(60)]
    prompts = write_lines(folder / "prompts.jsonl", records)
    (folder / "rewards.py").write_text(REWARDS)
    flags = ["finetune.reinforcement", "--load", folder / "base", "--data", prompts, *BATCH]
    flags += ["--lr", 3e-2]
    return folder, [*flags, "--answer-tokens", 6]


def rewarded(toy, function: str, method: str = "grpo") -> list:
    """The words of a run whose answers a function of REWARDS rates."""
    folder, flags = toy
    return [*flags, "--method", method, "--reward", f"{folder}/rewards.py:{function}"]


@pytest.fixture(scope="module")
def reward_model(toy):
    """The folder of a reward model, which likes x."""
    folder, _ = toy
    pairs = [{"prompt": f"{n}+", "chosen": "x" * (n % 3 + 1), "rejected": "y"} for n in range(40)]
    data = write_lines(folder / "pairs.jsonl", pairs)
    words = ["finetune.preference", "--load", folder / "base", "--data", data, *BATCH]
    words += ["--method", "reward", "--lr", 3e-3]
    assert run(*words, "--out", folder / "reward", "--steps", 6) == 0
    return folder / "reward"


@pytest.fixture(scope="module")
def grpo_run(toy):
    folder, _ = toy
    words = rewarded(toy, "ascii")
    words += small_run.as_flags(global_batch_size=16, steps=16, eval_every=4, save_every=12, keep=0)
    assert run(*words, "--out", folder / "grpo") == 0
    return folder / "grpo", words


def test_groups_of_another_size(toy, tmp_path, monkeypatch):
    """A run that goes on with them asks the next questions."""
    asked = []
    original = prompt_set.Prompts.question

    def question(self, sample):
        asked.append(sample // self.group_size + self.offset)
        return original(self, sample)

    monkeypatch.setattr(prompt_set.Prompts, "question", question)
    words = [*rewarded(toy, "ascii"), "--out", tmp_path / "run"]
    words += ["--warmup-steps", 0, "--eval-every", 0]
    for n, (size, batch) in enumerate([(2, 16), (4, 8), (3, 12)], 1):
        more = dict(group_size=size, global_batch_size=batch, steps=2 * n)
        assert run(*words, *small_run.as_flags(**more), *["--resume"] * (n > 1)) == 0
    # 2 x 8, 2 x 2 and 2 x 4 questions, and those of rewards, samples and evaluations among them
    assert list(dict.fromkeys(asked)) == list(range(28))


def test_a_run_learns(grpo_run, tmp_path):
    out, _ = grpo_run
    lines = lines_of(out)
    assert lines[0].keys() - small_run.TIMES == {
        *("step", "loss", "grad_norm", "lr", "tokens", "reward", "kl", "answer_tokens"),
        *("ended_share", "rollout_difference", "clip_share", "policy_change"),
    }
    first, last = (sum(line["reward"] for line in some) / 4 for some in (lines[:4], lines[-4:]))
    assert last > first + 0.2
    assert abs(lines[0]["kl"]) < 1e-4 and lines[-1]["kl"] > 1
    assert [line["step"] for line in lines if "eval_reward" in line] == [4, 8, 12, 16]
    tokens = sum(line["answer_tokens"] * 16 for line in lines)
    assert lines[-1]["tokens"] == pytest.approx(tokens, abs=0.1)
    samples = small_run.read_lines(out / "samples.jsonl")
    # three prompts are held out
    assert [line["step"] for line in samples] == [n for n in (4, 8, 12, 16) for _ in range(3)]
    assert samples[-1].keys() == {"step", "prompt", "answer", "reward"}
    rewards = [line["reward"] for line in samples[-3:]]
    assert lines[-1]["eval_reward"] == pytest.approx(sum(rewards) / 3)
    assert (out / "rl.png").exists() and not (out / "loss.png").exists()
    assert not (out / "sample.txt").exists()
    plot(lines, tmp_path / "rl.png")
    assert (tmp_path / "rl.png").read_bytes().startswith(b"\x89PNG")


def answers(path, prompts: list[str]) -> list[str]:
    """What a model writes after each prompt."""
    model, index = loading.load_model(path)
    tokenizer = loading.find_tokenizer(path, index)
    chat = loading.find_chat(path, tokenizer)
    asked = [chat.prompt([message("user", prompt)]) for prompt in prompts]
    return [tokenizer.decode(ids) for ids in generate.generate(model, asked, 6, seed=0)]


def test_dpo_on_judged_answers_raises_the_score(toy, tmp_path):
    """A model is fine-tuned on answers of three a or three b. A verifier likes a: the best and the
    worst of eight answers to a prompt are a pair, and new answers have a higher score."""
    folder, _ = toy
    base, tuned = tmp_path / "base", tmp_path / "dpo"
    sft = ["finetune.sft", *SHAPE, "--data", folder / "sft.jsonl", "--lr", 3e-2]
    assert run(*sft, "--out", base, "--steps", 24) == 0

    def score(answer: str) -> float:
        return answer.count("a") / max(1, len(answer))

    prompts = [f"{n}+" for n in range(16)]
    before = answers(base, [prompt for prompt in prompts for _ in range(8)])
    pairs = []
    for n, prompt in enumerate(prompts):
        ranked = sorted(before[8 * n : 8 * n + 8], key=score)
        pairs.append({"prompt": prompt, "chosen": ranked[-1], "rejected": ranked[0]})
    words = ["finetune.preference", "--load", base, *BATCH, "--method", "dpo", "--lr", 3e-3]
    words += ["--data", write_lines(tmp_path / "pairs.jsonl", pairs), "--steps", 12]
    assert run(*words, "--out", tuned) == 0
    after = answers(tuned, [f"{n}+" for n in range(16, 96)])
    first, last = (sum(map(score, some)) / len(some) for some in (before, after))
    assert 0.1 < first < 0.7 and last > first + 0.2


def without_last_step(out, copy, *files: str):
    """A run as it was when its last save had not begun: the checkpoint before is there, and maybe
    lines of later steps."""
    shutil.copytree(out, copy)
    newest = checkpoint.find(copy)
    shutil.rmtree(newest)
    for name in ("rl.png", *files):
        (copy / name).unlink()
    return copy


def test_a_run_goes_on(grpo_run, tmp_path, capsys):
    """With the same answers, numbers and weights, bit for bit, and no line twice."""
    out, words = grpo_run
    parts = without_last_step(out, tmp_path / "parts")
    assert run(*words, "--out", parts, "--resume") == 0
    assert "resuming after step 12" in capsys.readouterr().out
    assert numbers_of(parts) == numbers_of(out)
    assert (parts / "samples.jsonl").read_text() == (out / "samples.jsonl").read_text()
    assert equal(tensors_of(parts), tensors_of(out))
    # and where only the picture is missing; all flags are in config.json
    (parts / "rl.png").unlink()
    assert run("finetune.reinforcement", "--out", parts, "--resume") == 0
    assert (parts / "rl.png").exists() and numbers_of(parts) == numbers_of(out)


def test_a_run_with_old_answers_goes_on(toy, tmp_path, monkeypatch):
    """Bit for bit: a checkpoint has the answers of the steps to come. Without them it would not."""
    words = [*rewarded(toy, "ascii"), *small_run.as_flags(steps=4, save_every=2, rollout_lag=2)]
    out = tmp_path / "run"
    assert run(*words, "--out", out) == 0
    parts = without_last_step(out, tmp_path / "parts")
    assert run(*words, "--out", parts, "--resume") == 0
    assert equal(tensors_of(parts), tensors_of(out))
    monkeypatch.setattr(ReinforcementTask, "answers_of", forgetful(ReinforcementTask.answers_of))
    parts = without_last_step(out, tmp_path / "others")
    assert run(*words, "--out", parts, "--resume") == 0
    assert not equal(tensors_of(parts), tensors_of(out))


def forgetful(original):
    def answers_of(self, step, dataset):
        self.written_ahead.clear()
        return original(self, step, dataset)

    return answers_of


def test_old_answers_are_refused(toy, capsys, tmp_path):
    words = [*rewarded(toy, "ascii"), "--out", tmp_path / "run"]
    error = refusal(capsys, *words, "--importance-cap", 3)
    assert "--importance-cap 3.0: needs --rollout-lag" in error
    error = refusal(capsys, *words, "--rollout-lag", 2000)
    assert "--rollout-lag 2000: must be at most 1000" in error


def test_half_a_line_of_samples(grpo_run, tmp_path):
    """A file that cannot be read begins anew; what a run learns is not in it."""
    out, words = grpo_run
    parts = without_last_step(out, tmp_path / "parts")
    whole = (parts / "samples.jsonl").read_text()
    (parts / "samples.jsonl").write_text(whole[:-20])
    assert run(*words, "--out", parts, "--resume") == 0
    assert [line["step"] for line in small_run.read_lines(parts / "samples.jsonl")] == [16] * 3
    assert numbers_of(parts) == numbers_of(out)


def test_what_a_run_has_learned_is_a_model(grpo_run, tmp_path, capsys):
    """For generate.py, and for the next run."""
    out, words = grpo_run
    model, _ = cli.load_model(str(out))
    assert equal(dict(model.named_parameters()), tensors_of(out, "model."))
    assert len(generate.generate(model, [[1, 2]], 5)[0]) == 5
    assert run(*words, "--load", out, "--out", tmp_path / "more", "--steps", 1) == 0
    assert f"starting from the weights of {out}" in capsys.readouterr().out
    first = numbers_of(tmp_path / "more")[0]
    # its reference is what it begins as
    assert first["reward"] > 0.8 and abs(first["kl"]) < 1e-4


def test_another_base_is_refused(grpo_run, toy, tmp_path, capsys):
    out, words = grpo_run
    folder, _ = toy
    words, parts = [*words], without_last_step(out, tmp_path / "parts")
    sft = ["finetune.sft", *SHAPE, "--data", folder / "sft.jsonl", "--steps", 1, "--seed", 3]
    assert run(*sft, "--out", tmp_path / "base") == 0
    words += ["--out", parts, "--resume", "--load"]
    capsys.readouterr()
    assert "is not the model that the run in" in refusal(capsys, *words, tmp_path / "base")
    assert "gone: no such folder" in refusal(capsys, *words, tmp_path / "gone")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits(toy, tmp_path, precision):
    """Generation rounds in other places than training. What it wrote is rated by a training
    forward, which the reference says bit for bit."""
    words = [*rewarded(toy, "ascii", "ppo"), "--steps", 3]
    assert run(*words, "--precision", precision, "--out", tmp_path / "out") == 0
    first, _, last = numbers_of(tmp_path / "out")
    # in bf16 few bits are left to differ
    assert first["kl"] == 0 and 0 <= first["rollout_difference"] < 0.1
    # fp16 may skip the first two updates, while it looks for its loss scale
    assert last["kl"] != 0


@pytest.fixture(scope="module")
def ppo_run(toy, reward_model):
    """In float64, rated by the reward model."""
    folder, flags = toy
    words = [*flags, "--method", "ppo", "--reward", reward_model, "--critic-lr", 3e-3]
    words += ["--precision", "fp64", "--steps", 4, "--eval-every", 2, "--save-every", 2]
    assert run(*words, "--keep", 0, "--out", folder / "ppo") == 0
    return folder / "ppo", words


def test_ppo_leaves_its_critic(ppo_run, reward_model):
    out, _ = ppo_run
    lines = numbers_of(out)
    assert lines[0]["value_loss"] > 0 and all(np.isfinite(line["kl"]) for line in lines)
    tensors = tensors_of(out)
    critic = {name for name in tensors if name.startswith("critic.")}
    whole = tensors_of(reward_model)
    assert critic == {f"critic.{name}" for name in whole}
    # it begins as the reward model, and learns
    value = "model.head.value.weight"
    apart = (tensors[f"critic.{value}"] - whole[value]).abs().max()
    assert 0 < apart < 0.05
    index = checkpoint.read_index(checkpoint.find(out))
    # 4 steps of 2 epochs
    assert index["optimizer"]["updates"] == index["critic.optimizer"]["updates"] == 8


def same_numbers(a, b) -> None:
    for one, two in zip(numbers_of(a), numbers_of(b), strict=True):
        assert one == pytest.approx(two, rel=1e-10, abs=1e-12)
    for one, two in zip(
        *(small_run.read_lines(out / "samples.jsonl") for out in (a, b)), strict=True
    ):
        assert one["reward"] == pytest.approx(two["reward"], rel=1e-10)
        assert one | two == one | {"reward": two["reward"]}
    tensors, others = tensors_of(a), tensors_of(b)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        # moments: over their largest element
        scale = others[name].abs().max().clamp(min=0.1 if "exp_avg" not in name else 1e-12)
        assert (tensor - others[name]).abs().max() <= 1e-10 * scale, name


def on_two_ranks(*words):
    done = processes.run([*map(str, words)], world=2)
    assert done.returncode == 0, done.stderr
    return done


def test_two_ranks_have_the_numbers_of_one(ppo_run, tmp_path):
    out, words = ppo_run
    on_two_ranks(*words, "--out", tmp_path / "two", "--tp", 2, "--sequence-parallel")
    same_numbers(tmp_path / "two", out)


def test_another_layout_goes_on(ppo_run, tmp_path):
    """One device has taken two steps, two ranks take the others."""
    out, words = ppo_run
    parts = without_last_step(out, tmp_path / "parts")
    done = on_two_ranks(*words, "--out", parts, "--resume", "--zero-stage", 2)
    assert "resuming after step 2" in done.stdout
    same_numbers(parts, out)


def test_adapters_learn_and_go_on(toy, tmp_path):
    """With the critic and its moments."""
    folder, _ = toy
    words = [*rewarded(toy, "ascii", "ppo"), "--peft", "lora"]
    words += ["--save-every", 2, "--keep", 0, "--out", tmp_path / "lora"]
    assert run(*words, "--steps", 4) == 0
    assert abs(numbers_of(tmp_path / "lora")[0]["kl"]) < 1e-4
    parts = without_last_step(tmp_path / "lora", tmp_path / "parts")
    assert run(*words, "--steps", 4, "--out", parts, "--resume") == 0
    assert numbers_of(parts) == numbers_of(tmp_path / "lora")
    assert equal(tensors_of(parts), tensors_of(tmp_path / "lora"))
    names = tensors_of(parts)
    assert all("lora" in name or name.startswith("critic.") for name in names)
    # the base with it writes text; the critic in the same checkpoint does not matter
    words = ["--adapter", parts, "--prompt", "a", "--max-tokens", 3]
    assert generate.main(["--checkpoint", str(folder / "base"), *map(str, words)]) == 0


@pytest.mark.repetition
def test_killed_ranks_are_started_again(tmp_path):
    """Policy, critic, moments and samples of an undisturbed run, bit for bit. (`python
    tests/killed_ranks.py --rl` does this many times, in new interpreters.)"""
    flags = killed_ranks.rl_flags(tmp_path, lambda flags: run("finetune.sft", *flags))
    on_two_ranks("finetune.reinforcement", *flags, "--out", tmp_path / "whole")
    command = ["--nproc-per-node", "2", "-m", "finetune.reinforcement", *flags]
    command += ["--out", str(tmp_path / "killed")]
    kills, output = killed_ranks.run(command, 0, 1, killed_ranks.Forked)
    assert kills == 1 and output.count("resuming after step") == 1, output
    curve, tensors = killed_ranks.state(tmp_path / "whole")
    killed_curve, killed_tensors = killed_ranks.state(tmp_path / "killed")
    assert killed_curve == curve and equal(killed_tensors, tensors)
    assert any("exp_avg_sq.head.value" in name for name in tensors)


# --- what cannot run ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reward, words",
    [
        ("missing.py:f", "there is no file missing.py"),
        ("rewards.py:nothing", "has no function 'nothing'; there are "),
        ("broken.py:f", "broken.py fails: SyntaxError"),
        ("nowhere", "nowhere: no such folder"),
        ("base", "holds no reward model; finetune.preference --method reward trains one"),
        ("rewards.py:raises", "the function fails for the prompt"),
        ("rewards.py:fails", "Failed: two\\nlines"),
        ("rewards.py:leaves", "RuntimeError: calls os._exit(0)"),
        ("rewards.py:no_number", "gave nan for the prompt"),
        ("rewards.py:text", "gave 'good' for the prompt"),
        ("rewards.py:later", "is async; a plain function is needed"),
        ("rewards.py:two_arguments", "which it does not take: too many positional"),
        ("rewards.py", "a function is named FILE.py:FUNCTION"),
    ],
)
def test_rewards_that_cannot_be_used(toy, reward, words, tmp_path, monkeypatch, capsys):
    folder, flags = toy
    monkeypatch.chdir(folder)
    (folder / "broken.py").write_text("def f(:\n")
    words_of_run = ["--method", "grpo", "--reward", reward, "--out", tmp_path / "out"]
    error = refusal(capsys, *flags, *words_of_run)
    assert words in error and "--reward" in error, error


def test_a_function_that_gives_nothing(toy, tmp_path, capsys):
    """It is found before a model is loaded, and --out stays free."""
    words = ["--out", tmp_path / "out", "--steps", 1]
    assert run(*rewarded(toy, "no_answer"), *words) == 2
    printed, message = capsys.readouterr().err.splitlines()
    assert printed == "an answer: an answer"
    assert "gave None for the prompt" in message and "a finite number is needed" in message
    assert run(*rewarded(toy, "ascii"), *words) == 0


def test_a_function_that_fails_on_one_rank(toy, tmp_path):
    """All ranks end, with one message, and the run can go on."""
    words = rewarded(toy, "raises_later")
    words += ["--out", tmp_path / "out", "--steps", 5, "--save-every", 1]
    done = processes.run([*map(str, words)], world=2, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "--reward: the function fails for the prompt" in done.stderr
    assert "ValueError: of rank 1" in done.stderr
    assert [line["step"] for line in numbers_of(tmp_path / "out")] == [1, 2]
    assert checkpoint.find(tmp_path / "out").name == "step-000002"


def test_a_run_that_ends_before_its_first_step_leaves_its_folder_free(toy, tmp_path, capsys):
    words = ["--out", tmp_path / "out", "--steps", 1]
    assert run(*rewarded(toy, "raises_at_once"), *words) == 1
    assert (tmp_path / "out/config.json").exists()
    assert run(*rewarded(toy, "ascii"), *words) == 0
    assert run(*rewarded(toy, "ascii"), *words) == 2
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "record, words",
    [
        ({"text": "a"}, "line 3: is no prompt; a line has"),
        ({"prompt": 3}, "line 3: is no prompt"),
        ({"messages": []}, "line 3: is no prompt"),
        ({"prompt": "a" * 40}, "line 3: has "),
        ([], "line 3"),
    ],
)
def test_prompts_that_cannot_be_used(toy, record, words, tmp_path, capsys):
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}, record])
    flags = ["--data", path, "--out", tmp_path / "out"]
    error = refusal(capsys, *rewarded(toy, "text"), *flags)
    assert words in error and str(path) in error, error


def test_prompts_that_are_skipped(toy, tmp_path, capsys):
    """Those that are too long, and no others. One that is left is too few."""
    good = [{"prompt": "a", "want": "ascii"}, {"prompt": "b", "want": "ascii"}]
    words = [*rewarded(toy, "ascii"), "--steps", 1]
    long = {"prompt": "a" * 40, "want": "ascii"}
    some = write_lines(tmp_path / "some.jsonl", [*good, long])
    skip = "--skip-bad-examples"
    assert run(*words, "--data", some, skip, "--out", tmp_path / "a") == 0
    assert "2 prompts; 1 skipped (1 too long); 1 of them held out" in capsys.readouterr().out
    for lines, error_words in (
        ([good[0], long], "one is held out; more would do (1 prompts; 1 skipped"),
        ([*good, {"text": 1}], "line 3: is no prompt"),
    ):
        path = write_lines(tmp_path / "few.jsonl", lines)
        assert error_words in refusal(capsys, *words, "--data", path, skip, "--out", tmp_path / "b")
