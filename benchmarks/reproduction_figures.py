"""The figures of reproduction.py: six claims, predicted beside published."""

from pathlib import Path

from base.model_config import flops_per_token
from benchmarks import reproduction_announced as announced
from benchmarks import reproduction_papers as papers
from benchmarks import reproduction_predictions as predictions
from benchmarks import style
from benchmarks.reproduction_predictions import Search, tokens_per_second
from planning.inputs import A100, H100, H200, SOFTWARE
from planning.rows import PUBLISHED, read

# GPUs: FSDP has a sequence for each of 256
FSDP_GPUS = (8, 16, 32, 64, 128, 256)
H100_GPUS = (512, 1024, 2048, 3072, 5376, 10_752)
# of a curve
POINTS = 100
# the largest has larger ones with it
MICRO_BATCHES = {
    1: "#0072b2",
    2: "#e69f00",
    3: "#009e73",
    4: "#cc79a7",
    6: "#56b4e9",
    8: "#d55e00",
}
PUBLISHED_MARKS = dict(linestyle="none", marker="o", markersize=5, color="black")
GENERATIONS = ("A100, bf16", "H100, FP8", "H200, FP8")

# --- numbers --------------------------------------------------------------------------------------


def numbers(search: Search) -> dict:
    """What reproduction.json holds under "figures"."""
    return {
        "fsdp": fsdp(search),
        "table 5": papers.step_times("table5"),
        "days": days(search),
        "layouts": layouts(search),
        "scaling": scaling(search),
        "llama": llama(search),
    }


def fsdp(search: Search) -> list:
    """[GPUs, predicted, published or None]"""
    found = []
    for n, (alone, both) in predictions.fsdp_speeds(search, FSDP_GPUS).items():
        found.append([n, both.seconds / alone.seconds, predictions.FSDP.get(n)])
    return found


def days(search: Search) -> list:
    """[model, GPUs, predicted, published]"""
    found = []
    for name, published in predictions.DAYS.items():
        model = papers.preset(f"gpt3-{name.lower()}")
        for n, number in zip(predictions.GPUS, published):
            plan = search.best(A100, predictions.TRAIN, model, n, predictions.DAYS_BATCH)
            found.append([name, n, predictions.days(plan, model), number])
    return found


def layouts(search: Search) -> dict:
    """Tokens/s of the cluster under some of all layouts of the 175B, by micro-batch size."""
    plans = announced.gpt_3_layouts(search)
    model, n = announced.GPT_3, 1024
    common = predictions.of_layout(A100, predictions.TRAIN, model, announced.COMMON)
    curves = {}
    for plan in plans:
        size = max(size for size in MICRO_BATCHES if size <= plan.layout.micro_batch_size)
        curves.setdefault(size, []).append(n * tokens_per_second(plan, model))
    rate = n * tokens_per_second(common, model)
    # the common layout has micro-batches of one
    faster = sum(other > rate for other in curves[1]) / len(curves[1])
    return {
        "count": len(plans),
        "curves": {size: every(curve, POINTS) for size, curve in sorted(curves.items())},
        "best": n * tokens_per_second(plans[0], model),
        "common": [100 * faster, rate],
    }


def every(values: list, most: int) -> list:
    """At most about so many of them, evenly spaced, with the first and the last."""
    step = max(1, len(values) // most)
    return [*values[:-1:step], values[-1]]


def scaling(search: Search) -> dict:
    """PFLOP/s of a cluster: [GPUs, predicted, published or None]"""
    a100 = []
    for row in read(PUBLISHED):
        if row.group == "table1":
            n = row.layout.ranks
            published, predicted = papers.step_times("table1")[row.name]
            pflops = n * papers.TABLE_1[row.name][1] / 1000
            a100.append([n, pflops * published / predicted, pflops])
    model, layout = announced.ONE_T, announced.ONE_T_LAYOUT
    plan = predictions.of_layout(A100, SOFTWARE["megatron-2021"], model, layout)
    rate = tokens_per_second(plan, model) * announced.with_recomputation(model)
    a100.append([layout.ranks, layout.ranks * rate / 1e15, 502])
    h100 = []
    for plan in announced.scaled(search, H100_GPUS):
        rate = tokens_per_second(plan, announced.MLPERF) * flops_per_token(announced.MLPERF)
        h100.append([plan.layout.ranks, plan.layout.ranks * rate / 1e15, None])
    return {"A100": a100, "H100": h100}


def llama(search: Search) -> list:
    """[model, generation, GPU hours for a billion tokens: predicted, published or None]"""
    a100 = [(name, n, published) for name, n, published in predictions.LLAMA_A100]
    rates = predictions.H100_FP8
    h100 = [
        ("7b", 8, rates["llama2-7b"][0]),
        ("13b", 16, rates["llama2-13b"][0]),
        ("70b", 32, None),
    ]
    found = []
    for machine, generation, cases in zip(
        (A100, H100, H200), GENERATIONS, (a100, h100, predictions.LLAMA_H200)
    ):
        for name, n, published in cases:
            plan = predictions.llama_plan(search, machine, name, n)
            rate = tokens_per_second(plan, predictions.LLAMA_MODELS[name])
            hours = [1e9 / x / 3600 if x else None for x in (rate, published)]
            found.append([name.upper(), generation, *hours])
    return found


# --- panels ---------------------------------------------------------------------------------------


def draw_fsdp(axes, rows: list) -> None:
    gpus, predicted, published = zip(*rows)
    axes.axhline(1, color="#888888", linewidth=1)
    axes.plot(gpus, predicted, "s-", color=style.SERIES[0], label="predicted")
    axes.plot(gpus, published, label="published", **PUBLISHED_MARKS)
    style.ticks(axes, x=gpus)
    axes.set(xlabel="H100s", ylabel="speed of FSDP / of the other", ylim=(0, 1.8))
    axes.set_title("GPT-20B, bf16: FSDP over\ntensor + pipeline parallelism")
    axes.legend(loc="lower right")


def draw_table_5(axes, rows: dict) -> None:
    names = [name.removesuffix(" full") for name in rows if name.endswith("full")]
    kinds = {"full": "full recomputation", "sel+sp": "sequence + selective"}
    full = [rows[f"{name} full"][0] for name in names]
    for colour, shift, (kind, label) in zip(style.SERIES, (-0.15, 0.15), kinds.items()):
        published, predicted = zip(*(rows[f"{name} {kind}"] for name in names))
        x = [i + shift for i in range(len(names))]
        # which is which, in grey too
        bar = dict(color=colour, edgecolor="white", hatch="" if shift < 0 else "///")
        axes.bar(x, over(predicted, full), width=0.28, label=label, **bar)
        marks = "_" if shift < 0 else "published"
        axes.plot(x, over(published, full), label=marks, **PUBLISHED_MARKS)
    labels = []
    for name in names:
        (slow, predicted_slow), (fast, predicted_fast) = (rows[f"{name} {kind}"] for kind in kinds)
        faster = f"{100 * (slow / fast - 1):.0f}/{predicted_slow / predicted_fast - 1:.0%}"
        labels.append(f"{name}\n{faster}")
    axes.set_xticks(range(len(names)), labels)
    axes.set(ylim=(0, 1.5), ylabel="time / published time of full")
    axes.set_xlabel("faster by: published/predicted")
    axes.xaxis.label.set_size(style.SMALL)
    axes.grid(visible=False, axis="x")
    axes.set_title("Sequence parallelism with\nselective recomputation")
    axes.legend(loc="upper left")


def over(values, others) -> list[float]:
    return [x / y for x, y in zip(values, others)]


def draw_days(axes, rows: list) -> None:
    names = list(dict.fromkeys(name for name, *_ in rows))
    colours = [*style.SERIES, "#cc79a7", "#e69f00"]
    for name, colour in zip(names, colours):
        _, gpus, predicted, published = zip(*(row for row in rows if row[0] == name))
        axes.plot(gpus[::-1], predicted[::-1], color=colour, label=name)
        axes.plot(gpus, published, label="_", **PUBLISHED_MARKS | dict(color=colour))
    style.ticks(axes, x=predictions.GPUS[::-1], y=(0.1, 1, 10, 100))
    axes.set(xlim=(140, 1300), xlabel="A100s", ylabel="days")
    axes.set_title("300 billion tokens. Points:\npublished; lines: predicted")
    style.label_ends(axes)


def draw_layouts(axes, found: dict) -> None:
    for (size, curve), colour in zip(found["curves"].items(), MICRO_BATCHES.values()):
        x = [100 * i / max(1, len(curve) - 1) for i in range(len(curve))]
        name = f"{size} and more" if int(size) == max(MICRO_BATCHES) else size
        axes.plot(x, [y / 1000 for y in curve], color=colour, label=name)
    best, (share, common) = found["best"], found["common"]
    axes.plot([0], [best / 1000], "*", color="black", markersize=9, label="_")
    style.label(axes, "best", (0, best / 1000), offset=(7, 3))
    axes.plot([share], [common / 1000], "D", color="black", markersize=5, label="_")
    text = f"common:\nbest / {best / common:.2f}"
    style.label(axes, text, (1, 0.4 * best / 1000), offset=(0, 0))
    axes.axhline(best / 6.85e3, color="black", linestyle="--", linewidth=1)
    style.label(axes, "announced: best / 6.85", (2, best / 6.85e3), offset=(0, -8))
    axes.set(xlabel="% of the layouts of this micro-batch size", ylim=(0, 1.45 * best / 1000))
    axes.set_ylabel("thousand tokens/s")
    axes.set_title(f"175B on 1,024 A100s: the {found['count']:,}\nlayouts searched, fastest first")
    axes.legend(loc="upper right", title="micro-batch size", title_fontsize=style.SMALL, ncols=2)


def draw_scaling(axes, found: dict) -> None:
    for colour, (name, rows) in zip(style.SERIES, found.items()):
        gpus, predicted, published = zip(*rows)
        axes.plot(gpus, predicted, "s-", color=colour, markersize=3, label=f"{name}, predicted")
        if any(published):
            axes.plot(gpus, published, label="A100, published", **PUBLISHED_MARKS)
    n, last, _ = found["H100"][-1]
    style.label(axes, f"{last:,.0f}", (n, last), offset=(-4, 8), ha="right")
    n, _, published = found["A100"][-1]
    style.label(axes, "1T: 502", (n, published), offset=(6, -6))
    style.ticks(
        axes,
        x={32: "32", 256: "256", 1024: "1,024", 10752: "10,752"},
        y={10: "10", 100: "100", 1000: "1,000"},
    )
    axes.set(xlabel="GPUs", ylabel="PFLOP/s", xlim=(25, 25000), ylim=(2, 30000))
    axes.set_title("Weak scaling: 1.7B to 1T on A100s,\n175B in FP8 on H100s")
    axes.legend(loc="upper left")


def draw_llama(axes, rows: list) -> None:

    def hours_of(model: str) -> str:
        return "/".join(f"{predicted:.0f}" for name, _, predicted, _ in rows if name == model)

    models = list(dict.fromkeys(model for model, *_ in rows))
    # hours on A100s: predicted, published
    of_a100 = {model: hours for model, generation, *hours in rows if generation == GENERATIONS[0]}
    for i, (generation, colour) in enumerate(zip(GENERATIONS, style.SERIES)):
        these = {model: hours for model, kind, *hours in rows if kind == generation}
        for x, model in enumerate(models):
            predicted, published = these[model]
            place = x + 0.27 * (i - 1)
            height = predicted / of_a100[model][0]
            label = generation if x == 0 else "_"
            axes.bar(place, height, width=0.25, color=colour, label=label)
            if published:
                marks = "published" if (x, i) == (0, 0) else "_"
                axes.plot([place], [published / of_a100[model][0]], label=marks, **PUBLISHED_MARKS)
    axes.set_xticks(range(len(models)), [f"{model}\n{hours_of(model)}" for model in models])
    axes.set_xlabel("predicted GPU hours for 1 billion tokens")
    axes.xaxis.label.set_size(style.SMALL)
    axes.set(ylim=(0, 1.7), ylabel="time / that predicted for A100")
    axes.set_title("Time of Llama 2, by GPU")
    axes.grid(visible=False, axis="x")
    axes.legend(loc="upper right", ncols=2)


PANELS = {
    "reproduction": {"fsdp": draw_fsdp, "table 5": draw_table_5, "days": draw_days},
    "reproduction_scaling": {
        "layouts": draw_layouts,
        "scaling": draw_scaling,
        "llama": draw_llama,
    },
}


def draw(found: dict, figures: Path) -> None:
    """found: what `numbers` has given."""
    for name, panels in PANELS.items():
        figure, three_axes = style.figure(3.4, 1, 3)
        for axes, (part, draw_panel) in zip(three_axes, panels.items()):
            draw_panel(axes, found[part])
        style.save(figure, figures / f"{name}.svg")
