"""Learning from preferences, on a task with right answers: the reward that each method reaches, and
how far from the base its model goes for it.

    python comparisons/preference.py [--seeds 0 1 2] [--methods NAME ..] [--toy] [--out DIR]

The task: "a+b=", with a and b from 0 to 9. The base is a model of 2 layers that has learned from
noisy answers, of which about a third is right. So it knows the right answers, and writes others as
well. Its answers, sampled and judged by a verifier, are the pairs of DPO and of the reward model.

    GRPO, PPO           the reward of an answer is the verifier's: 1 if it is the sum, else 0
    .., learned reward  it is that of the reward model
    .., flipped         -1 if it is the sum: the sign of the advantage is wrong
    DPO                 from the pairs alone
    best of n           the base writes n answers, and the best is taken; nothing is trained

There are 19 sums. So nothing is sampled to measure: reward and KL are sums over all answers
(all_answers.py). No model has more reward at a KL than π(y) = base(y) exp(reward(y) / β) / Z, with
one β for all prompts (arXiv 2305.18290, equation 4): the bound of the figure.

A twentieth of the prompts is held out: RL has none of them, DPO and the reward model have no pair
of them. Their reward stands beside that of the others. The results of a method and a seed are kept
as soon as they are there: the same command goes on after it was stopped. --seeds are those of
pairs, of the order of prompts and of the answers; all begin from one base.

Figures: figures/preference.svg, figures/preference_training.svg
"""

import contextlib
import itertools
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import report
import torch
from all_answers import COUNTS, JUDGES, SUMS, Answers, best_of_n, bound, describe
from preference_figures import BEST_OF, CURVES, draw, print_summary
from steps import as_argv, run_train, write_lines

import checkpoint
import preference
import sharding
from base import json_files
from base.world import Groups
from inference import loading
from run import flags
from tuning.prompt_set import Question, open_prompts
from tuning.reinforcement_command import ReinforcementConfig
from tuning.rollout import write_answers

# --- the task -------------------------------------------------------------------------------------

VERIFIER = '''"""1 for a right answer."""


def correct(prompt: str, answer: str, record: dict) -> float:
    return float(answer.strip() == str(record["sum"]))


def flipped(prompt: str, answer: str, record: dict) -> float:
    return -correct(prompt, answer, record)
'''
MODEL = "--num-layers 2 --hidden-size 64 --num-heads 4 --ffn-hidden-size 192 --seq-length 32"
# of an answer: two digits and the token that ends it; more is for what is no sum
ANSWER_TOKENS = 4


@dataclass(frozen=True)
class Size:
    # that the base learns from
    conversations: int = 60_000
    base_steps: int = 900
    # the most answers to each prompt, for pairs
    answers: int = 256
    # pairs of a prompt without a right answer
    least_pairs: int = 0
    # the share of a method's steps, and its most rounds
    steps: float = 1.0
    rounds: int = 9


# the share of the base's conversations that are right for sure; others have a random sum
RIGHT = 0.4
TOY = Size(conversations=200, base_steps=2, answers=4, least_pairs=2, steps=0.0, rounds=2)


@dataclass(frozen=True)
class Method:
    flags: str
    # in each round
    steps: int
    # --reward: a function of the verifier, or "model"; None: pairs
    reward: str | None = None
    # of pairs: each has answers of the policy that the round before has left, its base
    rounds: int = 1
    # to each prompt, for the pairs of a round
    answers: int = 256


RL = "--warmup-steps 10 --global-batch-size 64 --weight-decay 0"
GRPO = f"reinforcement.py --method grpo --group-size 8 --lr 1e-3 {RL}"
PPO = f"reinforcement.py --method ppo --lr 1e-3 {RL}"
DPO = f"preference.py --method dpo --lr 3e-4 {RL}"
METHODS = {
    "GRPO": Method(GRPO, 150, "correct"),
    "PPO": Method(PPO, 150, "correct"),
    "DPO, 5 rounds": Method(f"{DPO} --beta 1", 50, rounds=5, answers=64),
    "DPO, β = 0.1": Method(f"{DPO} --beta 0.1", 200),
    "DPO, β = 1": Method(f"{DPO} --beta 1", 200),
    "PPO, learned reward": Method(PPO, 150, "model"),
    "GRPO, β = 0": Method(f"{GRPO} --beta 0", 150, "correct"),
    "GRPO, flipped": Method(GRPO, 150, "flipped"),
}
REWARD = "preference.py --method reward --lr 1e-3 --warmup-steps 10 --global-batch-size 64"
REWARD_MODEL = Method(REWARD, 400)
# the others are the same code
TOY_METHODS = ["PPO, learned reward", "DPO, 5 rounds", BEST_OF]


class Task:
    """The files of the task, and what the base says of every answer."""

    def __init__(self, folder: Path, size: Size):
        self.folder = folder
        self.size = size
        self.prompts = folder / "prompts.jsonl"
        self.verifier = folder / "verifier.py"
        self.base = folder / "base"
        self.write_files()
        if not (self.base / "sample.txt").exists():
            flags_of_base = (
                f"sft.py {MODEL} --steps {size.base_steps} --warmup-steps 50 --lr 4e-3"
                " --global-batch-size 64 --save-every 0 --eval-every 0 --log-every 500"
            )
            run_train(flags_of_base, data=folder / "sft.jsonl", out=self.base)
        model, index = loading.load_model(self.base)
        tokenizer = loading.find_tokenizer(self.base, index)
        self.model = model
        self.chat = loading.find_chat(self.base, tokenizer)
        paths = dict(data=self.prompts, load=self.base)
        argv = as_argv(f"--answer-tokens {ANSWER_TOKENS}", **paths)
        config = flags.parse(argv, 0, ReinforcementConfig)
        silent = SimpleNamespace(say=lambda text: None)
        self.learned, self.held_out = open_prompts(config, silent, tokenizer, None)
        self.questions = [*self.learned.questions, *self.held_out.questions]
        self.answers = Answers(self.chat, [question.text for question in self.questions])
        # of each question, the number of its right answer
        self.sums = torch.tensor([question.record["sum"] for question in self.questions])
        self.base_log_p = self.answers.log_probabilities(model)
        # what all_answers.py compares a policy with
        self.known = self.base_log_p, self.sums, len(self.learned.questions)

    def write_files(self) -> None:
        numbers = random.Random(0)
        pairs = list(itertools.product(range(10), repeat=2))
        conversations = []
        for _ in range(self.size.conversations):
            a, b = numbers.choice(pairs)
            answer = a + b if numbers.random() < RIGHT else numbers.randrange(SUMS)
            conversations.append({"prompt": f"{a}+{b}=", "completion": str(answer)})
        write_lines(self.folder / "sft.jsonl", conversations)
        write_lines(self.prompts, [{"prompt": f"{a}+{b}=", "sum": a + b} for a, b in pairs])
        self.verifier.write_text(VERIFIER)

    def measure(self, path: Path) -> dict:
        """Of the policy in a checkpoint."""
        model, _ = loading.load_model(path)
        return describe(self.answers.log_probabilities(model), *self.known)

    def write_pairs(self, base: Path, method: Method, seed: int, folder: Path) -> dict[str, Path]:
        """Answers of a model, judged: {flag: file of pairs}, in `folder`."""
        count = min(method.answers, self.size.answers)
        kind = "base" if base == self.base else "round"
        paths = {flag: folder / f"{flag}-{kind}-{count}.jsonl" for flag in ("data", "val_data")}
        # those of the base are written once
        if base == self.base and paths["val_data"].exists():
            return paths
        model, _ = loading.load_model(base)
        lines = {"data": [], "val_data": []}
        for number, question in enumerate(self.questions):
            flag = "data" if number < len(self.learned.questions) else "val_data"
            samples = range(number * count, (number + 1) * count)
            lines[flag] += self.pairs_of(question, self.write(model, question, samples, seed))
        for flag, pairs in lines.items():
            write_lines(paths[flag], pairs)
        return paths

    def write(self, model, question: Question, samples: range, seed: int) -> list[str]:
        """Answers that a model has ended itself."""
        ends = self.learned.end_tokens
        prompts = [question.ids] * len(samples)
        options = dict(seed=seed, step=0, max_tokens=ANSWER_TOKENS, groups=Groups())
        written = write_answers(model, prompts, samples, end_tokens=ends, **options)
        return [self.learned.text(answer.ids) for answer in written if answer.ended]

    def pairs_of(self, question: Question, texts: list[str]) -> list[dict]:
        """As many as there are answers of both kinds, right and wrong."""
        right = str(question.record["sum"])
        wrong = [text for text in texts if text.strip() != right]
        rejected = wrong[: len(texts) - len(wrong)] or [str(SUMS)] * self.size.least_pairs
        pair = {"prompt": question.text, "chosen": right}
        return [pair | {"rejected": text} for text in rejected]


# --- runs -----------------------------------------------------------------------------------------


def train_reward_model(task: Task, seed: int, folder: Path) -> Path:
    """The run of a reward model, in `folder`."""
    out = folder / "reward"
    if not (out / "loss.png").exists():
        shutil.rmtree(out, ignore_errors=True)
        common = f"{REWARD_MODEL.flags} --seed {seed} {schedule(task.size, REWARD_MODEL)}"
        pairs = task.write_pairs(task.base, REWARD_MODEL, seed, folder)
        run_train(common, load=task.base, out=out, **pairs)
    return out


def schedule(size: Size, method: Method) -> str:
    """The flags of a run's length, and of its checkpoints: ten in all rounds."""
    steps = max(2, round(size.steps * method.steps))
    every = max(1, steps * method.rounds // 10)
    return f"--steps {steps} --save-every {every} --keep 0 --eval-every 0 --log-every 50"


def learn(task: Task, method: Method, seed: int, folder: Path) -> dict:
    """{"points": the policy at some steps, "curves": of the training}"""
    out = folder / "run"
    points = [{"step": 0} | describe(task.base_log_p, *task.known)]
    lines = []
    base = task.base
    for number in range(min(method.rounds, task.size.rounds)):
        # the run before is the base of this one
        out = folder / f"run-{number}"
        shutil.rmtree(out, ignore_errors=True)
        run_method(task, method, seed, base, out)
        for step, path in sorted(checkpoint.steps(out / "checkpoints").items()):
            points.append({"step": len(lines) + step} | task.measure(path))
        for _, line in json_files.read_lines(out / "metrics.jsonl"):
            lines.append(line | {"step": len(lines) + 1})
        base = out
    return {"points": points, "curves": curves(lines)}


def run_method(task: Task, method: Method, seed: int, base: Path, out: Path) -> None:
    words = f"{method.flags} --seed {seed} {schedule(task.size, method)}"
    if method.reward is None:
        run_train(words, load=base, out=out, **task.write_pairs(base, method, seed, out.parent))
        return
    reward = f"{task.verifier}:{method.reward}"
    if method.reward == "model":
        reward = train_reward_model(task, seed, out.parent)
    words += f" --answer-tokens {ANSWER_TOKENS}"
    run_train(words, load=base, out=out, data=task.prompts, reward=reward)


def curves(lines: list[dict]) -> dict:
    """Means over some steps each, of what metrics.jsonl has of CURVES."""
    n = max(1, len(lines) // 40)
    parts = [lines[i : i + n] for i in range(0, len(lines), n)]
    found = {"step": [mean(line["step"] for line in part) for part in parts]}
    for name in CURVES:
        if name in lines[0]:
            found[name] = [round(mean(line[name] for line in part), 5) for part in parts]
    return found


def judge(task: Task, seed: int, folder: Path) -> dict:
    """Best of n, by the verifier and by a reward model."""
    model = load_reward_model(train_reward_model(task, seed, folder), task.model.config)
    return best_of_n(task.answers.rewards(model), *task.known)


def load_reward_model(path: Path, config):
    """config: of the model that it began as."""
    (model,) = loading.build_stages(config, Groups())
    preference.apply(model, None, False)
    loading.materialise([model], Groups(), "cpu", torch.float32)
    parameters = sharding.named_parameters(model)
    checkpoint.load(checkpoint.find(path), {f"model.{name}": p for name, p in parameters})
    return model


# --- all results ----------------------------------------------------------------------------------


def measure_all(task: Task, results: dict, args, keep) -> None:
    """results: {"task": .., method: {seed: ..}}, completed; keep() writes the file."""
    base = describe(task.base_log_p, *task.known)
    results["task"] = {"base": base, "bound": bound(*task.known)}
    # every method once, before any has a second seed
    for seed, name in itertools.product(args.seeds, args.methods):
        of_method = results.setdefault(name, {})
        if str(seed) in of_method:
            continue
        if report.is_over(args):
            print(f"no time left for {name}, seed {seed}")
            continue
        begin = time.perf_counter()
        folder = task.folder / f"seed-{seed}"
        folder.mkdir(exist_ok=True)
        measure = judge if name == BEST_OF else partial(learn, method=METHODS[name])
        with contextlib.redirect_stdout(sys.stderr):
            found = of_method[str(seed)] = measure(task, seed=seed, folder=folder)
        seconds = time.perf_counter() - begin
        print(f"{name}, seed {seed}: {summary(name, found)}; {seconds:.0f} s", flush=True)
        keep()


def summary(name: str, found: dict) -> str:
    if name != BEST_OF:
        return report.text_of(found["points"][-1])
    most = str(COUNTS[-1])
    best = {f"{judge}, n = {most}": found[judge][most]["reward"] for judge in JUDGES}
    return report.text_of({key: found[key] for key in ("accuracy", "held-out accuracy")} | best)


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    names = [*METHODS, BEST_OF]
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="NAME")
    work = "keep base and runs in this folder"
    parser.add_argument("--work", type=Path, metavar="DIR", help=work)
    report.minutes(parser)
    args = report.parse(parser, seeds=[0], methods=TOY_METHODS)
    results = {"toy": args.toy, "results": report.earlier("preference", parser, args)}
    with tempfile.TemporaryDirectory() as folder:
        folder = args.work or Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(sys.stderr):
            task = Task(folder, TOY if args.toy else Size())
        keep = partial(report.write, "preference", results, args)
        measure_all(task, results["results"], args, keep)
    print_summary(results["results"])
    report.finish("preference", results, args, draw)


if __name__ == "__main__":
    main()
