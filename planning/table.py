"""The table that `planner.py plan` prints: a line for each layout, and why the second one loses.

    print("\n".join(table.lines(plans, machine, software, model, tokens)))

Not covered: as in planning/commands.py.
"""

from collections.abc import Callable

import planner
from base.model_config import MoEConfig, flops_per_token, least_parameters
from planning.inputs import Layout, Machine, Software

# seconds
DAY = 86400
# what the table calls the parts of planning/memory.py, and how wide they are
PARTS = {
    "params": (7, ("parameters", "gathered")),
    "grads": (6, ("gradients", "summed")),
    "state": (6, ("optimizer",)),
    "activ.": (7, ("activations", "moment")),
}


def speed(
    machine: Machine, software: Software, model: MoEConfig, layout: Layout, seconds: float
) -> tuple[float, float]:
    """(tokens/s, model FLOPs over those of the peak) of a step. FP8 has twice the peak; the frozen
    weights beside LoRA have no gradients, a third of the FLOPs."""
    rate = layout.global_batch_size * model.seq_length / seconds
    peak = machine.peak * (1 if software.fp8 == "off" else 2)
    flops = flops_per_token(model)
    if software.lora_rank:
        # a third of 6 N: scores have no weights
        flops -= 2 * (least_parameters(model) if not model.num_experts else flops / 6)
    return rate, flops * rate / (layout.ranks * peak)


def schedule_of(layout: Layout) -> str:
    """interleaved with 3 virtual stages: v 3"""
    if layout.pp == 1:
        return "-"
    if layout.virtual_stages > 1:
        return f"v {layout.virtual_stages}"
    return layout.pipeline_schedule


def recomputation_of(layout: Layout) -> str:
    """full, or of 12 layers alone: full 12"""
    layers = layout.recompute_layers
    return layout.recompute if layers is None else f"{layout.recompute} {layers}"


# heading, width, text of a layout
COLUMNS: list[tuple[str, int, Callable[[Layout], str]]] = [
    ("tp", 3, lambda x: str(x.tp)),
    ("pp", 4, lambda x: str(x.pp)),
    ("dp", 5, lambda x: str(x.dp)),
    ("cp", 4, lambda x: str(x.cp)),
    ("by", 6, lambda x: "-" if x.cp == 1 else {"all-to-all": "heads"}.get(x.cp_kind, x.cp_kind)),
    ("ep", 4, lambda x: str(x.ep)),
    ("sched", 6, schedule_of),
    ("b", 3, lambda x: str(x.micro_batch_size)),
    ("recompute", 10, recomputation_of),
    ("seq", 4, lambda x: "yes" if x.sequence_parallel else "no"),
    ("zero", 5, lambda x: str(x.zero_stage)),
    ("chunk", 6, lambda x: str(x.head_chunk or "-")),
]


def lines(
    plans: list[planner.Plan],
    machine: Machine,
    software: Software,
    model: MoEConfig,
    tokens: float,
) -> list[str]:
    """A heading, and a line for each plan. tokens: to train on."""
    # without experts there is no ep
    left_out = set() if model.num_experts else {"ep"}
    if all(plan.layout.cp == 1 for plan in plans):
        left_out |= {"cp", "by"}
    if not any(plan.layout.head_chunk for plan in plans):
        left_out.add("chunk")
    columns = [c for c in COLUMNS if c[0] not in left_out]
    names = [name for name, _, _ in columns] + ["s/step", "tokens/s", "MFU", "days", *PARTS]
    least = [width for _, width, _ in columns] + [8, 10, 6, 7]
    least += [width for width, _ in PARTS.values()]
    rows = [names]
    for plan in plans:
        row = [text(plan.layout) for _, _, text in columns]
        rate, mfu = speed(machine, software, model, plan.layout, plan.seconds)
        row += [f"{plan.seconds:.3f}", f"{rate:,.0f}", f"{mfu:.1%}", days(tokens / rate / DAY)]
        for _, parts in PARTS.values():
            row.append(f"{sum(plan.bytes[part] for part in parts) / 2**30:.1f}")
        rows.append(row)
    widths = [max(w, *(len(row[i]) + 1 for row in rows)) for i, w in enumerate(least)]
    return ["".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in rows]


def days(number: float) -> str:
    """Three digits below 100, whole days above."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def why_it_loses(first: planner.Plan, second: planner.Plan) -> str:
    """One sentence: how the second plan differs from the first, and in which parts of the time."""
    changes = []
    for name, _, text in COLUMNS:
        of_first, of_second = text(first.layout), text(second.layout)
        # a schedule comes and goes with a pipeline
        if of_first != of_second and "-" not in (of_first, of_second):
            changes.append(f"{name} {of_second} instead of {of_first}")
    more = second.seconds - first.seconds
    parts = {}
    for part in first.parts | second.parts:
        parts[part] = second.parts.get(part, 0.0) - first.parts.get(part, 0.0)
    largest = sorted(parts, key=lambda part: -abs(parts[part]))
    # what is below a tenth of the largest difference explains nothing
    told = [part for part in largest if abs(parts[part]) > abs(parts[largest[0]]) / 10]
    because = ", ".join(f"{part} {parts[part]:+.3f} s" for part in told)
    differs = f"The second has {', '.join(changes)}"
    if not told:
        return f"{differs}, and is as fast."
    longer = f"it takes {more:.3f} s ({more / first.seconds:.1%}) longer"
    return f"{differs}; {longer}: {because}."
