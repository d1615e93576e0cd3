"""How good predictions of `planner.py serve` are: beside published seconds of six engines.

    python -m benchmarks.serving_plan [--toy] [--out DIR]

Rows: planning/published_serving.json, 443 published times on A100s, H100s and H200s. Four rows give
the four constants of each kind of engine; the others are held out. Then this project's engine, from
serving_speed.json: one constant from one row. Nothing is measured.

Figure: docs/figures/serving_frontier.svg
"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from base.model_config import MoEConfig
from benchmarks import report, serving_speed, style
from benchmarks.planner import table_of_errors
from planning import serving
from planning.errors import Errors, least_squares
from planning.inputs import A100, H100, MACHINES, Constants, Machine
from planning.serving import ENGINES, Engine, Serving
from run.presets import PRESETS

PUBLISHED = json.loads((Path(serving.__file__).parent / "published_serving.json").read_text())
SPEED = report.RESULTS / "serving_speed.json"
# Engine -> {constant: the row that gives it}.
FITTED = {
    name: {constant: tuple(key) for constant, key in rows.items()}
    for name, rows in PUBLISHED["fitted"].items()
}
# NeMo's table of capacity: sizes, GB of the GPUs from one sequence of 60 + 20 tokens to 256 of
# 200 + 200; and models of the least and of the largest size.
CAPACITY = [
    ("100M to 3B", 0.2, 6, "gpt3-126m", "megatron-3.6b"),
    ("5B to 20B", 10, 600, "gpt3-5b", "gpt3-20b"),
    ("100B to 300B", 200, 2000, "gpt3-175b", "gpt3-175b"),
    ("500B to 1T", 1000, 5000, "megatron-530b", "megatron-1t"),
]
LEAST, MOST = (1, 60, 20), (256, 200, 200)
# The frontier that is drawn: tokens of a prompt and of an answer.
MODELS, PROMPT, ANSWER, GPUS = ("llama2-70b", "gpt3-175b"), 200, 200, 16
OF_TP = dict(zip((1, 2, 4, 8, 16), (*style.SERIES, "#e69f00", "#332288")))


class Row(NamedTuple):
    """Published seconds of a batch. key: group, t, p, batch, tokens of a prompt, of an answer."""

    key: tuple
    name: str
    engine: str
    serving: Serving
    seconds: float
    why_off: str

    def error(self, engine: Engine | None = None) -> float:
        """predicted / published seconds - 1"""
        on = self.serving._replace(engine=engine or ENGINES[self.engine])
        return on.request(*self.key[3:]) / self.seconds - 1


def read() -> list[Row]:
    rows = []
    for group in PUBLISHED["groups"]:
        engine, why = group["engine"], group.get("why_off", "no reason known")
        machine, model = MACHINES[group["machine"]], MoEConfig(**group["model"])
        for tp, pp, *case, seconds in group["rows"]:
            on = Serving(machine, ENGINES[engine], model, tp, pp, group["weights"])
            key, name = (group["group"], tp, pp, *case), f"{group['name']}, {machine.name}"
            rows.append(Row(key, name, engine, on, seconds, why))
    return rows


def calibrate(name: str, rows: list[Row], begin: Engine) -> Engine:
    """The constants with which the rows of FITTED come out as published."""
    names = list(FITTED[name])
    fitted = [next(row for row in rows if row.key == FITTED[name][n]) for n in names]

    def engine(x: np.ndarray) -> Engine:
        return begin._replace(**dict(zip(names, map(float, np.exp(x)))))

    x = np.log([getattr(begin, n) for n in names])
    return engine(least_squares(lambda x: np.log([1 + r.error(engine(x)) for r in fitted]), x))


def held_out(rows: list[Row]) -> list[Row]:
    keys = {key for of_engine in FITTED.values() for key in of_engine.values()}
    return [row for row in rows if row.key not in keys]


def summary(rows: list[Row]) -> dict:
    size = np.abs([row.error() for row in rows])
    return Errors(size.mean(), np.quantile(size, 0.9), size.max(), len(size))._asdict()


def on_this_machine(measured: dict) -> dict:
    """Seconds between two tokens of inference/'s engine on a CPU: measured, and predicted from the
    machine's FLOP/s and bytes/s. The start of a layer's operations is that of the first row.
    measured: what serving_speed.json holds."""
    flops, nbytes = measured["machine"].values()
    links = dict(node_bandwidth=1.0, network_bandwidth=1.0, ranks_per_node=1)
    shares = Constants(matmul=1.0, memory=1.0, node=1.0, network=1.0, wait=0.0)
    machine = Machine("this machine", flops, 1.0, nbytes, **links, constants=shares)
    engine, found = Engine(1.0, 0.0, 0.0, 0.0, 0.0), {}
    for name, of_model in measured["results"].items():
        config = serving_speed.CASES[name]
        for together, numbers in of_model.items():
            asked = serving_speed.make_requests(int(together), config)
            # The mean over the tokens of all answers.
            tokens = sum(request.tokens for request in asked)
            before = sum(r.tokens * (len(r.prompt) + r.tokens / 2) for r in asked) / tokens
            one = Serving(machine, engine, MoEConfig(**asdict(config)), weights="fp32")
            seconds = numbers["engine"]["between_tokens_median"]
            if not found:
                engine = engine._replace(layer=(seconds - one.step(1, before)) / config.num_layers)
                one = one._replace(engine=engine)
            found[f"{name}, {together}"] = [seconds, one.step(int(together), before)]
    return found


def capacity(name: str, case: tuple[int, int, int]) -> tuple[float, int]:
    """(GB, A100s): the fewest that hold a model with (batch, input, output); prompts come whole."""
    batch, prompt, answer = case
    one = Serving(A100, ENGINES["eager"], MoEConfig(**PRESETS[name][0]))
    for gpus in (1, 2, 4, *range(8, 1024, 8)):
        of_all = [x for x in serving.layouts(gpus, one) if x.ranks == gpus]
        held = [sum(x.bytes(batch, prompt + answer, batch * prompt).values()) for x in of_all]
        if held and min(held) <= serving.USABLE * A100.memory:
            return gpus * min(held) / 1e9, gpus
    raise ValueError(f"{name}: takes more than 1,016 A100s")


def gpus_and_nodes(least: int, most: int) -> str:
    """1 to 16, in 1 to 2 nodes: | 1 to 16 | 1 to 2 |"""
    nodes = [-(-n // A100.ranks_per_node) for n in (least, most)]
    ends = [f"{a:,} to {b:,}" if a != b else f"{a:,}" for a, b in ((least, most), nodes)]
    return f"| {' | '.join(ends)} |"


def capacity_table() -> list[str]:
    """NeMo's GB, and the GPUs that have as much memory; ours."""
    lines = []
    for sizes, least, most, small, large in CAPACITY:
        theirs = [math.ceil(gb * 1e9 / A100.memory) for gb in (least, most)]
        (first, few), (last, many) = capacity(small, LEAST), capacity(large, MOST)
        line = f"| {sizes} | {least:,} to {most:,} {gpus_and_nodes(*theirs)} {small}"
        line += f" to {large}" if small != large else ""
        first = f"{first:,.0f}" if first >= 10 else f"{first:.2g}"
        lines.append(f"{line} | {first} to {last:,.0f} {gpus_and_nodes(few, many)}")
    return lines


def measure(toy: bool) -> dict:
    rows = read()
    others = held_out(rows)
    worst = sorted(others, key=lambda row: -abs(row.error()))[:5]
    groups = {}
    for row in others:
        groups.setdefault(row.name, []).append(row)
    drawn = {}
    for name in MODELS[:1] if toy else MODELS:
        one = Serving(H100, ENGINES["graphs"], MoEConfig(**PRESETS[name][0]))
        found = list(serving.fitting(one, GPUS, PROMPT, ANSWER, 2048))
        drawn[name] = {
            "all": [[x.latency, x.rate, x.serving.tp, x.serving.pp] for x in found],
            "frontier": [[x.latency, x.rate] for x in serving.frontier(found)],
        }
    engines = {name: calibrate(name, rows, engine) for name, engine in ENGINES.items()}
    return {
        "toy": toy,
        "constants": {n: {k: getattr(e, k) for k in FITTED[n]} for n, e in engines.items()},
        "groups": {name: summary(group) for name, group in (groups | {"all": others}).items()},
        "worst": [[*r.key, r.error(), r.why_off] for r in worst],
        "frontier": drawn,
        "capacity": capacity_table(),
        "this_machine": on_this_machine(json.loads(SPEED.read_text())),
    }


def print_results(results: dict) -> None:
    for name, constants in results["constants"].items():
        print(name, ", ".join(f"{k} {value:.3g}" for k, value in constants.items()))
    print("source and GPU, rows held out, mean error, nine of ten within, worst")
    print(*table_of_errors(results["groups"]), sep="\n")
    print("sizes, NeMo: GB, A100s, nodes; models, ours: GB, A100s, nodes")
    print(*results["capacity"], sep="\n")
    print("this machine: ms between tokens, predicted, error")
    for name, (seconds, ours) in results["this_machine"].items():
        print(f"| {name} | {1e3 * seconds:.2f} | {1e3 * ours:.2f} | {ours / seconds - 1:+.0%} |")
    for name, tp, pp, batch, prompt, answer, error, why in results["worst"]:
        print(f"{name}, {tp} x {pp}, {batch} x ({prompt} + {answer}): {error:+.1%}: {why}")


def draw(results: dict, figures: Path) -> None:
    """results: what serving_plan.json holds. A colour for each t; dashed with several stages."""
    figure, axes = style.figure(3.2, 1, len(results["frontier"]), squeeze=False)
    for axis, (name, found) in zip(axes[0], results["frontier"].items()):
        curves = {}
        for latency, rate, *layout in found["all"]:
            curves.setdefault(tuple(layout), []).append((latency, rate))
        for (tp, pp), points in sorted(curves.items()):
            named = f"tp {tp}" if pp == min(p for t, p in curves if t == tp) else "_"
            line = dict(color=OF_TP[tp], linestyle="-" if pp == 1 else "--")
            axis.plot(*zip(*points), label=named, linewidth=1, **line)
        band = dict(color="black", linewidth=6, alpha=0.15, label="frontier")
        axis.plot(*zip(*found["frontier"]), **band)
        style.ticks(axis, x=(2, 5, 10, 20, 50), y=(1, 10, 100, 1000))
        axis.set(xlabel="seconds of a request", title=f"{name} on H100s (predicted)")
        axis.legend(loc="lower right")
    axes[0][0].set_ylabel("tokens/s of each GPU")
    style.save(figure, figures / "serving_frontier.svg")


def main():
    args = report.parse(report.arguments(__doc__))
    results = measure(args.toy)
    print_results(results)
    report.finish("serving_plan", results, args, draw)


if __name__ == "__main__":
    main()
