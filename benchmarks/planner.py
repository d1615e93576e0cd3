"""How good predictions of planner.py are: beside published step times.

    python -m benchmarks.planner [--toy] [--out DIR]

Rows: planning/published_times.json, 78 published times of training steps on A100s. The constants
are fitted to six of them (errors.FITTED); the others are held out. Also: the same without one
ingredient of the model, constants fitted again; the same with other choices of six rows, drawn at
random; and the fastest layouts of Llama-2 on H200s. NeMo's published days and tokens per second
are in reproduction.py.

Nothing is measured; it takes seconds.

Figure: docs/figures/planner.svg
"""

import dataclasses
from pathlib import Path

import numpy as np

import planner
from base.model_config import MoEConfig
from benchmarks import report, style
from course import planner as lesson
from planning import errors
from planning import rows as published
from planning.inputs import A100, H200, TRAIN
from planning.rows import Row
from run.presets import PRESETS

# Llama-2 in bf16, s 4096: (model, H200s), and sequences in a step.
LLAMA = [(f"llama2-{size}", n) for size in ("7b", "13b", "70b") for n in (8, 16, 32, 64)]
LLAMA_BATCH = 128
# Seconds.
TICKS = (1, 10, 100)

# --- what is compared -----------------------------------------------------------------------------


def row_of_results(row: Row) -> dict:
    parts = planner.step_time(A100, row.software, row.model, row.layout)
    names = "tp pp dp virtual_stages schedule micro_batch_size global_batch_size recompute"
    names += " sequence_parallel zero_stage"
    return {
        "group": row.group,
        "name": row.name,
        "fitted": (row.group, row.name) in errors.FITTED,
        "published": row.seconds,
        "predicted": sum(parts.values()),
        "parts": parts,
        "layout": {name: getattr(row.layout, name) for name in names.split()},
    }


def llama(cases) -> list[dict]:
    """The fastest layout of each (model, H200s), and of H200s with half of the memory."""
    found = []
    half = dataclasses.replace(H200, memory=H200.memory / 2)
    for name, n in cases:
        model = MoEConfig(**PRESETS[name][0])
        row = {"model": name, "gpus": n}
        for title, machine in (("best", H200), ("half", half)):
            try:
                best = planner.search(machine, TRAIN, model, n, LLAMA_BATCH)[0]
            except planner.PlanError as e:
                row[title] = {"refused": str(e)}
                continue
            # Every row has the same batch.
            layout = dataclasses.replace(best.layout, global_batch_size=1)
            words = " ".join(layout.flags()).replace(" --global-batch-size 1", "")
            tokens = LLAMA_BATCH * model.seq_length
            row[title] = {
                "tokens_per_second_per_gpu": tokens / best.seconds / n,
                "gib": sum(best.bytes.values()) / 2**30,
                "flags": words,
            }
        found.append(row)
    return found


def fitted_again(rows: list[Row]) -> errors.Errors:
    """Errors of the rows held out, with constants fitted to the other six."""
    fitted, held_out = errors.split(rows)
    return errors.summary(errors.calibrate(A100, fitted), held_out)


def ablations(rows: list[Row]) -> dict[str, errors.Errors]:
    """{ingredient of the model that is left out: errors}; "" with nothing left out."""
    found = {"": fitted_again(rows)}
    for name, removal in lesson.WITHOUT.items():
        with removal.mutate():
            found[name] = fitted_again(rows)
    return found


def random_choices(rows: list[Row], times: int = 30) -> list[errors.Errors]:
    """Errors of the rows held out when the six fitted rows are drawn at random: five of any group,
    and one of ZeRO-3."""
    generator = np.random.default_rng(0)
    zero_3 = [row for row in rows if row.group == "table2-zero3"]
    others = [row for row in rows if row not in zero_3]
    found = []
    for _ in range(times):
        chosen = [others[i] for i in generator.choice(len(others), 5, replace=False)]
        chosen.append(zero_3[generator.integers(len(zero_3))])
        machine = errors.calibrate(A100, chosen)
        found.append(errors.summary(machine, [row for row in rows if row not in chosen]))
    return found


def worst_rows(rows: list[Row]) -> list[dict]:
    """The five that are farthest off."""
    off = [(errors.error(A100, row), row) for row in rows]
    off.sort(key=lambda pair: -abs(pair[0]))
    return [
        dict(group=row.group, name=row.name, error=error, reason=row.why_off or "no reason known")
        for error, row in off[:5]
    ]


def measure(toy: bool) -> dict:
    rows = published.read(published.PUBLISHED)
    _, held_out = errors.split(rows)
    everything = errors.summary(A100, held_out)
    choices = random_choices(rows, 3 if toy else 30)
    groups = errors.by_group(A100, held_out)
    without = ablations(rows)
    return {
        "toy": toy,
        "held_out": everything._asdict(),
        "groups": {group: found._asdict() for group, found in groups.items()},
        "worst": worst_rows(held_out),
        "without": {name: found._asdict() for name, found in without.items()},
        "random_choices": {
            "mean": report.spread([found.mean for found in choices]),
            "worst": report.spread([found.worst for found in choices]),
        },
        "llama": llama(LLAMA[:1] if toy else LLAMA),
        "rows": [row_of_results(row) for row in rows],
    }


# --- tables, as docs/planning.md has them ---------------------------------------------------------


def table_of_errors(named: dict) -> list[str]:
    """A row for each name: what `errors.Errors` holds."""
    lines = []
    for name, found in named.items():
        numbers = [f"{found[key]:.1%}" for key in ("mean", "ninth_decile", "worst")]
        lines.append(f"| {name} | {found['rows']} | {' | '.join(numbers)} |")
    return lines


def table_of_llama(rows: list[dict]) -> list[str]:
    """A row for each model and number of GPUs, and one more where half of the memory changes it."""
    lines = []
    for row in rows:
        found = {"": row["best"]}
        if row["half"] != row["best"]:
            found[", half of the memory"] = row["half"]
        for name, plan in found.items():
            cells = f"| | | {plan.get('refused')} |"
            if "refused" not in plan:
                speed = plan["tokens_per_second_per_gpu"]
                cells = f"| {speed:,.0f} | {plan['gib']:.0f} | `{plan['flags']}` |"
            lines.append(f"| {row['model']} | {row['gpus']}{name} {cells}")
    return lines


def tables(results: dict) -> dict[str, list[str]]:
    groups = results["groups"] | {"all": results["held_out"]}
    without = {name or "(nothing)": found for name, found in results["without"].items()}
    return {
        "group, rows held out, mean error, nine of ten within, worst": table_of_errors(groups),
        "left out, and the same": table_of_errors(without),
        "model, H200s, tokens/s of each, GiB, layout": table_of_llama(results["llama"]),
    }


def print_results(results: dict) -> None:
    for head, lines in tables(results).items():
        print("\n".join([head, *lines]))
    for row in results["worst"]:
        print(f"{row['group']} {row['name']} {row['error']:+.1%}: {row['reason']}")
    for name, found in results["random_choices"].items():
        error = report.format_spread(found, ".1%")
        print(f"{found['n']} random choices of six rows, {name} error of the others: {error}")


# --- the figure -----------------------------------------------------------------------------------


def draw_all(axes, rows: list[dict]) -> None:
    """Predicted against published. Hollow: fitted."""
    published_seconds = [row["published"] for row in rows]
    ends = [min(published_seconds) / 1.3, 1.3 * max(published_seconds)]
    axes.plot(ends, ends, color="#888888", linewidth=1)
    held_out = dict(markersize=4, color=style.SERIES[0], alpha=0.6)
    hollow = dict(markersize=5, color=style.SERIES[1], alpha=1, markerfacecolor="none")
    for fitted, name, marks in ((False, "held out", held_out), (True, "fitted", hollow)):
        these = [row for row in rows if row["fitted"] == fitted]
        points = [[row[key] for row in these] for key in ("published", "predicted")]
        axes.plot(*points, "o", label=f"{name}, {len(these)}", **marks)
    style.ticks(axes, x=TICKS, y=TICKS, minor=True)
    axes.set(xlabel="published seconds", ylabel="predicted seconds", aspect="equal")
    axes.set(xlim=ends, ylim=ends, title=f"{len(rows)} published steps")
    axes.legend(loc="upper left")


def draw_sweep(axes, rows: list[dict]) -> None:
    """A line for each global batch. Points are published, lines predicted."""
    name_of = lambda row: "{tp} x {pp}".format(**row["layout"])  # noqa: E731
    names = list(dict.fromkeys(map(name_of, rows)))
    batches = sorted({row["layout"]["global_batch_size"] for row in rows})
    for colour, batch in zip(style.SERIES, batches):
        these = [row for row in rows if row["layout"]["global_batch_size"] == batch]
        x = [names.index(name_of(row)) for row in these]
        line, dots = dict(label=f"batch {batch}"), dict(linestyle="none", marker="o", label="_")
        for key, marks in (("predicted", line), ("published", dots)):
            axes.plot(x, [row[key] / batch for row in these], color=colour, **marks)
    axes.set_xticks(range(len(names)), names)
    axes.set(ylim=(0, None), ylabel="seconds of a step / batch", xlabel="tensor x pipeline")
    axes.set_title("162B on 64 A100s\nline: predicted; dot: published")
    axes.legend(loc="lower left")


def draw(results: dict, figures: Path) -> None:
    """results: what planner.json holds."""
    figure, (left, right) = style.figure(3.4, 1, 2)
    draw_all(left, results["rows"])
    draw_sweep(right, [row for row in results["rows"] if row["group"] == "fig13"])
    style.save(figure, figures / "planner.svg")


def main():
    args = report.parse(report.arguments(__doc__))
    fitted, _ = errors.split(published.read(published.PUBLISHED))
    for name, value in vars(errors.calibrate(A100, fitted).constants).items():
        print(f"{name:<9}{value:.3g}")
    results = measure(args.toy)
    print_results(results)
    report.finish("planner", results, args, draw)


if __name__ == "__main__":
    main()
