"""What preference.py has found: a table, and its figures.

Figures: figures/preference.svg, figures/preference_training.svg
"""

import itertools
from pathlib import Path

import numpy
import report
import style
from all_answers import COUNTS, JUDGES
from report import format_spread

BEST_OF = "best of n"
# in the order of the table
METHODS = ["GRPO", "PPO", "DPO, 5 rounds", "DPO, β = 0.1", "DPO, β = 1"]
METHODS += ["PPO, learned reward", "GRPO, β = 0", "GRPO, flipped"]
LEARNED = METHODS[:5]
ONLINE = ["GRPO", "PPO", *METHODS[5:]]
CURVES = {
    "reward": "share of right answers",
    "kl": "KL, nats per answer",
    "clip_share": "share of clipped tokens",
    "answer_tokens": "tokens of an answer",
}


def bound_at(results: dict, kl: float) -> float:
    """The most reward that is possible at a KL."""
    kls, rewards = zip(*results["task"]["bound"])
    return float(numpy.interp(kl, kls, rewards))


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
        cells["bound at this KL"] = f"{bound_at(results, of['kl']['median']):.3f}"
        cells |= {key: format_spread(of[key], ".2f") for key in ("held_out", "other")}
        table.row(cells)
    for judge, n in itertools.product(JUDGES, map(str, COUNTS)):
        rows = [found[judge][n] for found in results.get(BEST_OF, {}).values()]
        if rows:
            texts = [format_spread(report.spread([r[k] for r in rows])) for k in ("reward", "kl")]
            print(f"best of {n} by the {judge}: reward {texts[0]}, KL {texts[1]}")


# --- figures --------------------------------------------------------------------------------------


def draw_bound(axes, results: dict) -> None:
    kl, reward = zip(*results["task"]["bound"])
    line = dict(color="black", linestyle="--", linewidth=1)
    axes.plot(kl, reward, label="the most that is possible", **line)
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
    shown = panels[0].get_legend_handles_labels()
    figure.legend(*shown, ncols=len(shown[0]), loc="outside lower left")
    style.save(figure, figures / "preference_training.svg")
