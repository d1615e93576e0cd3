"""The lesson of planner.py: the constants, one layout taken apart, and the errors."""

import dataclasses

import planner
import schedules
from course import form
from planning import errors, layer_time
from planning import rows as published
from planning.inputs import A100, Machine
from planning.rows import Row
from schedules import Cost

WITHOUT = form.Removals()


@WITHOUT.replace("adapters", Machine, "link", "A node's 8 GPUs have 8 adapters. Use one?")
def one_adapter(self, size, stride):
    """A ring of ranks enters and leaves a node once, so its members there share their adapters.
    Without this the fit gives one adapter more than its data sheet promises, and groups with one
    member on each node are then predicted too fast."""
    in_node = size * stride <= self.ranks_per_node
    return self.node_link if in_node else self.network_bandwidth * self.constants.network


@WITHOUT.replace("own-adapter", Machine, "link", "Are 4 shared adapters 4 times as fast as 1?")
def no_own_adapter(self, size, stride):
    """A ring with several ranks on a node goes from adapter to adapter, and reaches half of what
    they promise; a rank that is alone on its node reaches as much of its adapter as of a link in
    the node. One share for both is too slow for the one and too fast for the other."""
    in_node = size * stride <= self.ranks_per_node
    members = min(size, max(1, self.ranks_per_node // stride))
    return self.node_link if in_node else members * self.network_bandwidth * self.constants.network


@WITHOUT.replace("wait", planner, "step_time", "And a lower bandwidth instead?")
def at_once(machine, *rest, original=planner.step_time):
    """Tensor parallelism makes thousands of collectives in a step. About half of the time of each
    is waiting, which no bandwidth describes; the fit then gives matrix multiplications more than
    the peak."""
    constants = dataclasses.replace(machine.constants, wait=0.0, zero3=0.0)
    return original(dataclasses.replace(machine, constants=constants), *rest)


@WITHOUT.replace(
    "collectives", planner.Rank, "collective", "Can one matmul constant make up for it?"
)
def no_time(*args, **options):
    """One constant of matrix multiplications cannot stand for them: they take most of the time
    under tensor parallelism over nodes, and none on one GPU. The fit stays in between, and each row
    is wrong."""
    return 0.0


@WITHOUT.replace("slow-stage", planner, "step_time", "Is the head 1/8 as slow on 8 stages?")
def spread(machine, software, model, layout, original=planner.step_time):
    """All stages wait for the slowest. Spread over p stages the head looks p times as cheap, which
    the simulation does not confirm."""
    seconds = original(machine, software, model, layout)
    return seconds | {"head": seconds["head"] / layout.pp}


@WITHOUT.replace("elementwise", planner.Rank, "read_write", "Are FLOPs alone enough?")
def no_bytes(rank, nbytes):
    """Norms, dropout, softmax and GELU have few FLOPs and many bytes. They are a larger share of a
    small model than of a large one, so no share of the peak fits both."""
    return 0.0


@WITHOUT.replace("overlap", layer_time, "tensor_waits", "No all-reduce beside a weight gradient?")
def waiting(rank, all_reduce, weight_gradient, original=layer_time.tensor_waits):
    """Megatron-LM's backward computes a weight gradient beside each all-reduce. Without this all
    collectives are too slow, so fitted constants make the exposed ones too fast."""
    return original(rank, all_reduce, weight_gradient=0.0)


MEANING = {
    "matmul": "of the peak: large matrix multiplications",
    "memory": "of the memory's bandwidth: element-wise operations",
    "node": "of the links in a node, and of a rank's own adapter: collectives",
    "network": "of the adapters that ranks of a node share: collectives",
    "wait": "each pass of a collective waits so long: for slow ranks, for kernels",
    "zero3": "the same of a single parameter: ZeRO-3 of DeepSpeed in 2021",
}
# Two rows of arXiv 2205.05198, table 5.
TWO = ("175B full", "175B sel+sp")


def teach_constants(lesson: form.Lesson, fitted: Machine) -> None:
    lesson.predict(
        "What share of a data sheet's FLOP/s and bytes/s does training reach? Six constants say:"
    )
    close = True
    for name, meaning in MEANING.items():
        value = getattr(A100.constants, name)
        lesson.say(f"{name:<9}{shown(name, value):>7}  {meaning}")
        close &= abs(getattr(fitted.constants, name) / value - 1) < 0.01
    lesson.check("least squares over six published step times gives the same, to 1%", close)


def shown(name: str, constant: float) -> str:
    return f"{1e6 * constant:.0f} µs" if name in ("wait", "zero3") else f"{constant:.0%}"


def teach_parts(lesson: form.Lesson, machine: Machine, pair: list[Row]) -> None:
    """One model with full, and with selective recomputation and sequence parallelism."""
    lesson.predict(
        "175B on 64 A100s (tp 8, pp 8, 64 sequences): published 18.13 s with full recomputation,"
        " 13.75 s with selective and sequence parallelism. Where are the 4.4 s?"
    )
    full, selective = [
        planner.step_time(machine, row.software, row.model, row.layout) for row in pair
    ]
    largest = max(full.values())
    lesson.say(f"{'seconds':<14}full{'selective + sequence':>44}")
    for part, seconds in full.items():
        if seconds:
            less = selective[part]
            bars = [form.bar(x, largest, 25) for x in (seconds, less)]
            lesson.say(f"{part:<12}{seconds:>6.2f} {bars[0]:<26}{less:>6.2f} {bars[1]}".rstrip())
    found = [errors.error(machine, row) for row in pair]
    lesson.check(
        f"in all {sum(full.values()):.2f} s and {sum(selective.values()):.2f} s:"
        f" {found[0]:+.1%} and {found[1]:+.1%}, at most 5%",
        max(map(abs, found)) <= 0.05,
    )


def simulated(machine: Machine, row: Row) -> float:
    """Seconds of the pipeline of a row, one chunk on each rank, by schedules.simulate; sends take
    no time. The last stage has the head too: a third of it in forward."""
    layout, model = row.layout, row.model
    rank = planner.Rank(machine, row.software, model, layout)
    forward, backward, _ = planner.layer(rank)
    head = planner.head(rank)
    layers = model.num_layers / layout.pp
    f = [layers * sum(forward)] * layout.pp
    b = [layers * sum(backward)] * layout.pp
    f[-1] += head / 3
    b[-1] += 2 * head / 3
    schedule = schedules.make("1f1b", layout.pp, layout.micro_batches)
    events = schedules.simulate(schedule, Cost(f, b, [0.0] * layout.pp))
    return max(event.end for event in events)


def teach_pipeline(lesson: form.Lesson, machine: Machine, row: Row) -> None:
    row = dataclasses.replace(row, layout=dataclasses.replace(row.layout, virtual_stages=1))
    m, p = row.layout.micro_batches, row.layout.pp
    lesson.predict(
        f"{p} stages have one chunk of 12 layers, the last one also the head. Formula: m times the"
        " slowest stage, and (p - 1) (f + b) to fill and drain. Does the simulated schedule agree?"
    )
    seconds = planner.step_time(machine, row.software, row.model, row.layout)
    formula = sum(seconds[part] for part in (*planner.Pass._fields, "head", "bubble"))
    measured = simulated(machine, row)
    lesson.check(
        f"m {m}, p {p}: {formula:.3f} s by the formula, {measured:.3f} s simulated",
        abs(formula / measured - 1) < 1e-6,
    )


def teach_errors(lesson: form.Lesson, machine: Machine, rows: list[Row]) -> None:
    _, held_out = errors.split(rows)
    lesson.predict(
        f"{len(held_out)} more published times were not fitted. Their mean error (and the worst)?",
        "mean error",
    )
    groups = errors.by_group(machine, held_out)
    cells = []
    for group, found in groups.items():
        cells.append(f"{group:<13}{found.mean:>5.1%} ({found.worst:.1%})".ljust(30))
    for start in range(0, len(cells), 3):
        lesson.say("".join(cells[start : start + 3]).rstrip())
    everything = errors.summary(machine, held_out)
    limits = {"mean": 0.04, "nine of ten": 0.08, "table5": 0.02, "table2-zero3": 0.04}
    values = everything.mean, everything.ninth_decile, groups["table5"].mean
    found = dict(zip(limits, (*values, groups["table2-zero3"].mean)))
    text = ", ".join(f"{name} {x:.1%} <= {limits[name]:.0%}" for name, x in found.items())
    right = all(x <= limits[name] for name, x in found.items())
    lesson.check(text, right, [everything.mean])
    row = max(held_out, key=lambda row: abs(errors.error(machine, row)))
    reason = row.why_off.split(";")[0]
    because = f": {reason}" if reason and not lesson.without else ""
    lesson.say(f"the worst: {row.group} {row.name} {errors.error(machine, row):+.1%}{because}")


def teach(lesson: form.Lesson) -> None:
    rows = published.read(published.PUBLISHED)
    fitted, _ = errors.split(rows)
    pair = [row for row in rows if row.name in TWO]
    teach_constants(lesson, errors.calibrate(A100, fitted))
    # The constants are fitted again without the removed part, which comes back at the end.
    with lesson.removed():
        machine = A100
        if lesson.mutate:
            machine = errors.calibrate(A100, fitted)
            values = [(name, getattr(machine.constants, name)) for name in MEANING]
            text = ", ".join(f"{name} {shown(name, value)}" for name, value in values)
            lesson.say(f"without it: {text}")
        teach_parts(lesson, machine, pair)
        teach_pipeline(lesson, machine, pair[0])
        teach_errors(lesson, machine, rows)


if __name__ == "__main__":
    form.run("planner")
