"""Learning from preferences, on a task with right answers: the reward that each method reaches, and
how far from the base its model goes for it.

    python -m benchmarks.preference [--seeds 0 1 2] [--methods NAME ..] [--toy] [--out DIR]

The task: "a+b=", with a and b from 0 to 9. The base is a model of 2 layers that has learned from
noisy answers, of which about a third is right. So it knows the right answers, and writes others as
well. Its answers, sampled and judged by a verifier, are the pairs of DPO and of the reward model.

    GRPO, PPO           the reward of an answer is the verifier's: 1 if it is the sum, else 0
    .., learned reward  it is that of the reward model
    .., flipped         -1 if it is the sum: the sign of the advantage is wrong
    DPO                 from the pairs alone
    best of n           the base writes n answers, and the best is taken; nothing is trained

There are 19 sums. So nothing is sampled to measure: reward and KL are sums over all answers
(sums_task.py). No model has more reward at a KL than π(y) = base(y) exp(reward(y) / β) / Z, with
one β for all prompts (arXiv 2305.18290, equation 4): the bound of the figure.

A twentieth of the prompts is held out: RL has none of them, DPO and the reward model have no pair
of them. Their reward stands beside that of the others. The results of a method and a seed are kept
as soon as they are there: the same command goes on after it was stopped. --seeds are those of
pairs, of the order of prompts and of the answers; all begin from one base.

Figures: docs/figures/preference.svg, docs/figures/preference_training.svg
"""

import contextlib
import itertools
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

import numpy
import torch

import sharding
from base import json_files
from base.groups import Groups
from benchmarks import report, style
from benchmarks.report import format_spread
from benchmarks.steps import run_train
from benchmarks.sums_task import (
    ANSWER_TOKENS,
    COUNTS,
    JUDGES,
    TOY,
    Size,
    Task,
    best_of_n,
    bound,
    describe,
)
from finetune import preference
from inference import loading
from run import checkpoint

# --- methods --------------------------------------------------------------------------------------


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
BEST_OF = "best of n"
# the others are the same code
TOY_METHODS = ["PPO, learned reward", "DPO, 5 rounds", BEST_OF]
# of the figures
LEARNED = list(METHODS)[:5]
ONLINE = [name for name in METHODS if "DPO" not in name]
CURVES = {
    "reward": "share of right answers",
    "kl": "KL, nats per answer",
    "clip_share": "share of clipped tokens",
    "answer_tokens": "tokens of an answer",
}

# --- runs -----------------------------------------------------------------------------------------


def train_reward_model(task: Task, seed: int, folder: Path) -> Path:
    """The run of a reward model, in `folder`."""
    out = folder / "reward"
    if not (out / "loss.png").exists():
        shutil.rmtree(out, ignore_errors=True)
        common = f"{REWARD_MODEL.flags} --seed {seed} {schedule(task.size, REWARD_MODEL)}"
        pairs = task.write_pairs(task.base, REWARD_MODEL.answers, seed, folder)
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
        run_train(
            words, load=base, out=out, **task.write_pairs(base, method.answers, seed, out.parent)
        )
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
    path = train_reward_model(task, seed, folder)
    (model,) = loading.build_stages(task.model.config, Groups())
    preference.apply(model, None, False)
    loading.materialise([model], Groups(), "cpu", torch.float32)
    parameters = sharding.named_parameters(model)
    checkpoint.load(checkpoint.find(path), {f"model.{name}": p for name, p in parameters})
    return best_of_n(task.answers.rewards(model), *task.known)


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


def print_summary(results: dict) -> None:
    """Of each method: the last point of the seeds. way: from the base's reward to 1."""
    base = results["task"]["base"]["reward"]
    print(f"base: reward {base:.3f}")
    table = report.Table()
    for name in METHODS:
        points = [found["points"][-1] for found in results.get(name, {}).values()]
        if not points:
            continue
        of = {key: report.spread([p[key] for p in points]) for key in points[0]}
        way = (of["reward"]["median"] - base) / (1 - base)
        cells = {"method": name, "reward": format_spread(of["reward"]), "of the way": f"{way:.0%}"}
        cells["KL"] = format_spread(of["kl"], ".2f")
        # the most reward that is possible
        bound = numpy.interp(of["kl"]["median"], *zip(*results["task"]["bound"]))
        cells["bound at this KL"] = f"{bound:.3f}"
        cells |= {key: format_spread(of[key], ".2f") for key in ("held_out", "other")}
        table.row(cells)
    for judge, n in itertools.product(JUDGES, map(str, COUNTS)):
        rows = [found[judge][n] for found in results.get(BEST_OF, {}).values()]
        if rows:
            texts = [format_spread(report.spread([r[k] for r in rows])) for k in ("reward", "kl")]
            print(f"best of {n} by the {judge}: reward {texts[0]}, KL {texts[1]}")


# --- figures --------------------------------------------------------------------------------------

# of a method's last point
MARKS = dict(zip(METHODS, "osD^vPX*"))


def draw_paths(axes, results: dict, names: list[str], x: str = "kl", y: str = "reward") -> None:
    """A line for each seed, through the points of its run; the last has a mark."""
    for name in names:
        seeds = results.get(name, {}).values()
        for n, found in enumerate(seeds):
            points = found["points"]
            xs, ys = [p[x] for p in points], [p[y] for p in points]
            colour = style.COLOURS[name]
            mark = dict(marker=MARKS[name], markevery=[-1], markersize=6) if x == "kl" else {}
            axes.plot(xs, ys, color=colour, linewidth=1, label="_" if n else name, **mark)


def draw_best_of(axes, results: dict) -> None:
    for judge, colour in zip(JUDGES, ("black", "#56b4e9")):
        for n, found in enumerate(results.get(BEST_OF, {}).values()):
            rows = list(found[judge].values())
            line = [r["kl"] for r in rows], [r["reward"] for r in rows]
            label = "_" if n else f"best of n, by the {judge}"
            axes.plot(*line, "o-", color=colour, linewidth=1, markersize=3, label=label)


def draw(results: dict, figures: Path) -> None:
    """results: what preference.json holds."""
    results = results["results"]
    figure, (left, right) = style.figure(4, 1, 2, sharey=True)
    line = dict(color="black", linestyle="--", linewidth=1, label="the most that is possible")
    for axes in (left, right):
        axes.plot(*zip(*results["task"]["bound"]), **line)
        axes.set(xlabel="KL from the base, nats per answer", ylim=(0, 1.02))
    draw_paths(left, results, LEARNED)
    left.set(ylabel="reward: share of right answers", title="The verifier's rewards, or pairs")
    draw_best_of(right, results)
    draw_paths(right, results, ["PPO, learned reward"])
    right.set(title="A learned reward, and best of n")
    # each name once
    names = {}
    for axes in (left, right):
        names |= dict(zip(*axes.get_legend_handles_labels()[::-1]))
    figure.legend(names.values(), names, ncols=3, loc="outside lower center")
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
    shown = panels[0].get_legend_handles_labels()
    figure.legend(*shown, ncols=len(shown[0]), loc="outside lower left")
    style.save(figure, figures / "preference_training.svg")


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
