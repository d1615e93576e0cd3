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

There are 19 sums. So nothing is sampled to measure: reward and KL are sums over all answers,

    reward = mean over prompts of π(sum)      KL = mean over prompts of Σ π(y) log π(y) / base(y)

where all texts that are no sum count as one more answer (`other`: how likely they are). No model
has more reward at a KL than π(y) = base(y) exp(reward(y) / β) / Z, with one β for all prompts
(arXiv 2305.18290, equation 4): the bound of the figure.

A twentieth of the prompts is held out: RL has none of them, DPO and the reward model have no pair
of them. Their reward stands beside that of the others. The results of a method and a seed are kept
as soon as they are there: the same command goes on after it was stopped. --seeds are those of
pairs, of the order of prompts and of the answers; all begin from one base.

Figures: figures/preference.svg, figures/preference_training.svg
"""

import argparse
import contextlib
import itertools
import json
import math
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import style
import torch
from torch import Tensor

import checkpoint
import preference
import sharding
from base import json_files
from base.world import Groups
from comparisons.prompt_tuning import as_argv, run_train
from inference import loading
from run import flags
from sft import Chat, message
from tuning.prompt_set import Question, open_prompts
from tuning.rollout import write_answers

# --------------------------------------------------------------------------------------------------
# the task

SUMS = 19
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
GRPO = f"--rl grpo --group-size 8 --lr 1e-3 {RL}"
PPO = f"--rl ppo --lr 1e-3 {RL}"
DPO = "--preference dpo --lr 3e-4 --warmup-steps 10 --global-batch-size 64 --weight-decay 0"
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
REWARD_MODEL = Method("--preference reward --lr 1e-3 --warmup-steps 10 --global-batch-size 64", 400)
BEST_OF = "best of n"
COUNTS = (1, 2, 4, 8, 16)
JUDGES = "verifier", "reward model"
KEYS = "reward", "kl"
# of the figures
LEARNED = ["GRPO", "PPO", *(name for name in METHODS if name.startswith("DPO"))]
ONLINE = ["GRPO", "PPO", "PPO, learned reward", "GRPO, β = 0", "GRPO, flipped"]
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
                f"{MODEL} --steps {size.base_steps} --warmup-steps 50 --lr 4e-3"
                " --global-batch-size 64 --save-every 0 --eval-every 0 --log-every 500"
            )
            run_train(flags_of_base, sft=folder / "sft.jsonl", out=self.base)
        model, index = loading.load_model(self.base)
        tokenizer = loading.find_tokenizer(self.base, index)
        self.model = model
        self.chat = loading.find_chat(self.base, tokenizer)
        argv = as_argv(
            f"--rl grpo --answer-tokens {ANSWER_TOKENS}", prompts=self.prompts, load=self.base
        )
        silent = SimpleNamespace(say=lambda text: None)
        self.learned, self.held_out = open_prompts(flags.parse(argv, 0), silent, tokenizer, None)
        self.questions = [*self.learned.questions, *self.held_out.questions]
        self.answers = Answers(self.chat, [question.text for question in self.questions])
        # of each question, the number of its right answer
        self.sums = torch.tensor([question.record["sum"] for question in self.questions])
        self.base_log_p = self.answers.log_probabilities(model)

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
        """Of the policy in a checkpoint: reward, held_out (the reward there), kl, other."""
        model, _ = loading.load_model(path)
        return self.describe(self.answers.log_probabilities(model))

    def describe(self, log_p: Tensor) -> dict:
        """log_p: [prompts, sums], of each answer."""
        p = with_other(log_p)
        base = with_other(self.base_log_p)
        kl = (p * (p / base).log()).nan_to_num(0.0).sum(1)
        right = p.gather(1, self.sums.unsqueeze(1)).squeeze(1)
        n = len(self.learned.questions)
        values = dict(reward=right[:n], held_out=right[n:], kl=kl[:n], other=p[:n, -1])
        return {name: x.mean().item() for name, x in values.items()}

    def write_pairs(self, base: Path, method: Method, seed: int, folder: Path) -> dict[str, Path]:
        """Answers of a model, judged: {flag: file of pairs}, in `folder`."""
        count = min(method.answers, self.size.answers)
        kind = "base" if base == self.base else "round"
        paths = {flag: folder / f"{flag}-{kind}-{count}.jsonl" for flag in ("pairs", "pairs_val")}
        # those of the base are written once
        if base == self.base and paths["pairs_val"].exists():
            return paths
        model, _ = loading.load_model(base)
        lines = {"pairs": [], "pairs_val": []}
        for number, question in enumerate(self.questions):
            flag = "pairs" if number < len(self.learned.questions) else "pairs_val"
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


class Answers:
    """Every prompt with every sum, as rows."""

    def __init__(self, chat: Chat, prompts: list[str]):
        examples = []
        for prompt, answer in itertools.product(prompts, map(str, range(SUMS))):
            examples.append(chat.example([message("user", prompt), message("assistant", answer)]))
        self.lengths = torch.tensor([len(example.ids) for example in examples])
        shape = len(examples), int(self.lengths.max())
        self.ids = torch.zeros(shape, dtype=torch.int64)
        self.counted = torch.zeros(shape, dtype=torch.bool)
        for row, example in enumerate(examples):
            self.ids[row, : len(example.ids)] = torch.tensor(example.ids)
            self.counted[row, : len(example.ids)] = torch.tensor(example.counted)

    @torch.no_grad()
    def log_probabilities(self, model) -> Tensor:
        """[prompts, sums] float64, of each answer with the token that ends it."""
        losses = []
        for ids, counted in zip(self.ids.split(SUMS * 20), self.counted.split(SUMS * 20)):
            y = model(ids[:, :-1], ids[:, 1:]).double()
            losses.append((y * counted[:, 1:]).sum(1))
        return -torch.cat(losses).view(-1, SUMS)

    @torch.no_grad()
    def rewards(self, model) -> Tensor:
        """[prompts, sums] float64, of a reward model."""
        values = torch.cat([model(ids) for ids in self.ids.split(SUMS * 20)])
        last = self.lengths.unsqueeze(1) - 1
        return values.gather(1, last).double().view(-1, SUMS)


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def with_other(log_p: Tensor) -> Tensor:
    """[prompts, sums] -> probabilities [prompts, sums + 1], with that of all other texts."""
    p = log_p.exp()
    return torch.cat([p, (1 - p.sum(1, keepdim=True)).clamp(min=1e-12)], dim=1)


# --------------------------------------------------------------------------------------------------
# runs


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
    points = [{"step": 0} | task.describe(task.base_log_p)]
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
    run_train(words, load=base, out=out, prompts=task.prompts, reward=reward)


CURVES = {
    "reward": "share of right answers",
    "kl": "KL, nats per answer",
    "clip_share": "share of clipped tokens",
    "answer_tokens": "tokens of an answer",
}


def curves(lines: list[dict]) -> dict:
    """Means over some steps each, of what metrics.jsonl has of CURVES."""
    n = max(1, len(lines) // 40)
    parts = [lines[i : i + n] for i in range(0, len(lines), n)]
    found = {"step": [mean(line["step"] for line in part) for part in parts]}
    for name in CURVES:
        if name in lines[0]:
            found[name] = [round(mean(line[name] for line in part), 5) for part in parts]
    return found


def best_of_n(task: Task, seed: int, folder: Path) -> dict:
    """{"verifier", "reward model": {n: reward, kl, ..}, "bound": {n: nats}, "accuracy"}"""
    path = train_reward_model(task, seed, folder)
    rewards = task.answers.rewards(load_reward_model(path, task.model.config))
    right = torch.zeros_like(rewards).scatter_(1, task.sums.unsqueeze(1), 1.0)
    results = {"verifier": {}, "reward model": {}, "bound": {}}
    for n in COUNTS:
        for name, scores in (("verifier", right), ("reward model", rewards)):
            results[name][str(n)] = task.describe(best_log_p(task.base_log_p, scores, n))
        # arXiv 2401.01879: more than the KL
        results["bound"][str(n)] = math.log(n) - (n - 1) / n
    margin = rewards.gather(1, task.sums.unsqueeze(1)) - rewards  # [prompts, sums]
    wrong = right == 0
    n = len(task.learned.questions)
    for name, part in (("accuracy", slice(n)), ("held-out accuracy", slice(n, None))):
        results[name] = (margin[part] > 0)[wrong[part]].double().mean().item()
    return results


def best_log_p(log_p: Tensor, scores: Tensor, n: int) -> Tensor:
    """log-probabilities of the best of n samples, by the scores; of equal ones, the first sample.
    All [prompts, sums]. Texts that are no sum are the worst.

    P(score <= s) = F(s)^n; answers of one score share this as they share F."""
    p = log_p.exp()
    other = 1 - p.sum(1, keepdim=True)
    # [prompts, sums, sums]: of the answer in the last dimension
    below = (scores.unsqueeze(1) < scores.unsqueeze(2)).double()
    equal = (scores.unsqueeze(1) == scores.unsqueeze(2)).double()
    worse = other + (below * p.unsqueeze(1)).sum(2)
    same = (equal * p.unsqueeze(1)).sum(2)
    return (p / same * ((worse + same) ** n - worse**n)).log()


def load_reward_model(path: Path, config):
    """config: of the model that it began as."""
    (model,) = loading.build_stages(config, Groups())
    preference.apply(model, None, False)
    loading.materialise([model], Groups(), "cpu", torch.float32)
    parameters = sharding.named_parameters(model)
    checkpoint.load(checkpoint.find(path), {f"model.{name}": p for name, p in parameters})
    return model


def bound(task: Task) -> list[list[float]]:
    """[KL, reward] of the best policies, for some β."""
    n = len(task.learned.questions)
    p = with_other(task.base_log_p).gather(1, task.sums.unsqueeze(1))[:n, 0]
    rows = []
    for i in range(41):
        # e^(1 / β)
        weight = math.exp(0.25 * i)
        q = p * weight / (p * weight + 1 - p)
        kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        rows.append([kl.mean().item(), q.mean().item()])
    return rows


# --------------------------------------------------------------------------------------------------
# all results


def measure_all(task: Task, results: dict, args: argparse.Namespace, keep) -> None:
    """results: {"task": .., method: {seed: ..}}, completed; keep() writes the file."""
    results["task"] = {"base": task.describe(task.base_log_p), "bound": bound(task)}
    deadline = time.monotonic() + 60 * args.minutes
    # every method once, before any has a second seed
    for seed, name in itertools.product(args.seeds, args.methods):
        of_method = results.setdefault(name, {})
        if str(seed) in of_method:
            continue
        if time.monotonic() > deadline:
            print(f"no time left for {name}, seed {seed}")
            continue
        begin = time.perf_counter()
        folder = task.folder / f"seed-{seed}"
        folder.mkdir(exist_ok=True)
        with contextlib.redirect_stdout(sys.stderr):
            if name == BEST_OF:
                found = best_of_n(task, seed, folder)
            else:
                found = learn(task, METHODS[name], seed, folder)
        of_method[str(seed)] = found
        seconds = time.perf_counter() - begin
        print(f"{name}, seed {seed}: {summary(name, found)}; {seconds:.0f} s", flush=True)
        keep()


def summary(name: str, found: dict) -> str:
    if name == BEST_OF:
        words = [f"{key} {found[key]:.3f}" for key in ("accuracy", "held-out accuracy")]
        for judge in JUDGES:
            best = found[judge][str(COUNTS[-1])]
            words.append(f"{judge}, n = {COUNTS[-1]}: {best['reward']:.3f} at {best['kl']:.3f}")
        return ", ".join(words)
    last = found["points"][-1]
    return ", ".join(f"{key} {last[key]:.3f}" for key in ("reward", "held_out", "kl", "other"))


def bound_at(results: dict, kl: float) -> float:
    """The most reward that is possible at a KL."""
    rows = results["task"]["bound"]
    for (kl_0, reward_0), (kl_1, reward_1) in itertools.pairwise(rows):
        if kl <= kl_1:
            return reward_0 + (reward_1 - reward_0) * (kl - kl_0) / (kl_1 - kl_0)
    return rows[-1][1]


def last_points(results: dict, name: str) -> list[dict]:
    """Of each seed."""
    return [found["points"][-1] for found in results.get(name, {}).values()]


def print_summary(results: dict) -> None:
    """Of each method: the last point of the seeds. way: from the base's reward to 1."""
    base = results["task"]["base"]["reward"]
    print(f"base: reward {base:.3f}")
    print("| method | reward | of the way | KL | bound at this KL | held out | other |")
    for name in METHODS:
        points = last_points(results, name)
        if not points:
            continue
        spreads = {key: report.spread([p[key] for p in points]) for key in points[0]}
        way = (spreads["reward"]["median"] - base) / (1 - base)
        most = bound_at(results, spreads["kl"]["median"])
        cells = [report.format_spread(spreads["reward"]), f"{way:.0%}"]
        cells += [report.format_spread(spreads["kl"], ".2f"), f"{most:.3f}"]
        cells += [report.format_spread(spreads[key], ".2f") for key in ("held_out", "other")]
        print(f"| {name} | {' | '.join(cells)} |")
    for judge, n in itertools.product(JUDGES, map(str, COUNTS)):
        rows = [found[judge][n] for found in results.get(BEST_OF, {}).values()]
        if rows:
            texts = [report.format_spread(report.spread([r[k] for r in rows])) for k in KEYS]
            print(f"best of {n} by the {judge}: reward {texts[0]}, KL {texts[1]}")


# --------------------------------------------------------------------------------------------------
# figures


def draw_bound(axes, results: dict) -> None:
    kl, reward = zip(*results["task"]["bound"])
    axes.plot(
        kl, reward, color="black", linestyle="--", linewidth=1, label="the most that is possible"
    )
    axes.set(xlabel="KL from the base, nats per answer", ylim=(0, 1.02))


def draw_paths(axes, results: dict, names: list[str], x: str = "kl", y: str = "reward") -> None:
    """A line for each seed, through the points of its run; the last has a mark."""
    for name in names:
        seeds = results.get(name, {}).values()
        for n, found in enumerate(seeds):
            points = found["points"]
            xs, ys = [p[x] for p in points], [p[y] for p in points]
            colour = style.COLOURS[name]
            axes.plot(xs, ys, color=colour, linewidth=1, label="_" if n else name)
            if x == "kl":
                axes.plot(xs[-1], ys[-1], "o", color=colour, label="_")


def draw_best_of(axes, results: dict) -> None:
    for judge, colour in zip(JUDGES, ("black", style.SERIES[2])):
        for n, found in enumerate(results.get(BEST_OF, {}).values()):
            rows = list(found[judge].values())
            line = [r["kl"] for r in rows], [r["reward"] for r in rows]
            label = "_" if n else f"best of n, by the {judge}"
            axes.plot(*line, "o-", color=colour, linewidth=1, markersize=3, label=label)


def draw(results: dict, figures: Path) -> None:
    """results: what preference.json holds."""
    results = results["results"]
    figure, (left, right) = style.figure(3.2, 1, 2, sharey=True)
    for axes in (left, right):
        draw_bound(axes, results)
    draw_paths(left, results, LEARNED)
    left.set(ylabel="reward: share of right answers", title="the verifier's rewards, or pairs")
    left.legend(loc="lower right")
    draw_best_of(right, results)
    draw_paths(right, results, ["PPO, learned reward"])
    right.set(title="a learned reward, and best of n")
    right.legend(loc="lower right")
    style.save(figure, figures / "preference.svg")
    draw_training(results, figures)


def draw_training(results: dict, figures: Path) -> None:
    figure, panels = style.figure(2.4, 1, 4)
    for axes, (field, title) in zip(panels, CURVES.items()):
        if field in ("reward", "kl"):
            draw_paths(axes, results, ONLINE, "step", field)
        else:
            for name in ONLINE:
                for found in results.get(name, {}).values():
                    # every other point, to be read more easily
                    line = found["curves"]["step"][::2], found["curves"][field][::2]
                    axes.plot(*line, color=style.COLOURS[name], linewidth=0.8)
        axes.set(title=title, xlabel="step")
        axes.set_ylim(bottom=0)
    names = [name for name in ONLINE if name in results]
    figure.legend(
        *panels[0].get_legend_handles_labels(), ncols=len(names), loc="outside lower left"
    )
    style.save(figure, figures / "preference_training.svg")


# --------------------------------------------------------------------------------------------------


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    names = [*METHODS, BEST_OF]
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep base and runs in this folder"
    )
    report.minutes(parser)
    args = report.parse(parser)
    if args.toy:
        args.seeds, args.methods = args.seeds[:1], TOY_METHODS
    results = report.earlier("preference", parser, args)

    def keep():
        report.write("preference", {"toy": args.toy, "results": results}, args)

    with tempfile.TemporaryDirectory() as folder:
        folder = args.work or Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(sys.stderr):
            task = Task(folder, TOY if args.toy else Size())
        measure_all(task, results, args, keep)
    report.save("preference", {"toy": args.toy, "results": results}, args)
    print_summary(results)
    draw(report.saved("preference", args), args.figures)


if __name__ == "__main__":
    main()
