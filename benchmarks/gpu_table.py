"""What was predicted of a GPU, beside what gpu.json has: tables in Markdown, and figures.

    python -m benchmarks.gpu table --out benchmarks/results
    python -m benchmarks.redraw gpu

The first table is for docs/results.md: goals, and how far they are reached. The second one is that
of docs/gpu.md, a row for each case of each stage: what planner.py predicts, computed again, and
what was predicted by hand, read from that document. A new case has a row with blanks. Then come the
published figures.
"""

import argparse
import importlib
import math
from pathlib import Path

from benchmarks import report, style, training_step
from benchmarks.gpu_stages import STAGES, read, shown
from benchmarks.report import ROOT

DOCUMENT = ROOT / "docs" / "gpu.md"
ALL = argparse.Namespace(toy=False, cases=[], deadline=math.inf)
FIGURES = {"gpu_steps": ("gpt2", "llama", "fp8", "medium", "decode", "serve")}
FIGURES |= {"gpu_kernels": ("kernels",)}
SHARE = "% of a copy forward"
COLUMNS = "stage", "case", "planner", "by hand", "measured"

# --- goals ----------------------------------------------------------------------------------------


def kernel_shares(results: dict, small: bool) -> list[tuple[float, str]]:
    """(% of a copy, operation) of those whose copy takes at most 12 µs, or of the others."""
    return sorted(
        (row[f"% of a copy {direction}"], f"{name} {direction}")
        for name, row in results.get("kernels", {}).items()
        for direction in ("forward", "backward")
        if f"% of a copy {direction}" in row and row[direction]["small"] == small
    )


def over_compiled(results: dict) -> list[tuple[float, str]]:
    """(fused time over the compiled one, operation)"""
    found = [
        (1 / value["median"], f"{name} {key.split()[-1]}")
        for name, row in results.get("kernels", {}).items()
        for key, value in row.items()
        if key.startswith("x as long compiled")
    ]
    return sorted(found, reverse=True)


def reached(values: list[tuple[float, str]], holds) -> str:
    """How many of the values hold, and the first one, which is the worst."""
    if not values:
        return "not yet measured"
    worst, name = values[0]
    return f"{sum(holds(x) for x, _ in values)} of {len(values)}; the worst, {name}: {worst:.3g}"


def best(results: dict, stage: str, key: str) -> str:
    """The best of this project's cases of a stage."""
    found = []
    for name, row in results.get(stage, {}).items():
        if key in row and name.startswith(("kernels", "fp8")):
            value = row[key]
            found.append((value["median"] if isinstance(value, dict) else value, name))
    return f"{max(found)[0]:,.1f} {key} ({max(found)[1]})" if found else "not yet measured"


def goals(results: dict) -> list[dict]:
    large, small = (kernel_shares(results, small) for small in (False, True))
    copied = "each memory-bound operation, share of the copy bandwidth"
    few = "each small one, share of a copy of as many bytes"
    fused = "each operation, time over `torch.compile` of PyTorch's own"
    llm_c = "475,000 tokens/s (llm.c, per H100 of 8)"
    llama = "16 of 32 layers of Llama-2 7B, s 4096, bf16"
    published = "50% MFU (NeMo, all layers in FP8: 16,913 tokens/s)"
    rows = [
        (copied, "90%", reached(large, lambda share: share >= 90)),
        (few, "90%", reached(small, lambda share: share >= 90)),
        (fused, "at most 1", reached(over_compiled(results), lambda ratio: ratio <= 1)),
        ("GPT-2 124M, s 1024, bf16", llm_c, best(results, "gpt2", "tokens/s")),
        (llama, published, best(results, "llama", "% MFU")),
    ]
    return [dict(zip(("on one GPU", "goal", "measured"), row)) for row in rows]


# --- every case -----------------------------------------------------------------------------------


def by_hand() -> dict[tuple[str, str], str]:
    """{(stage, case): what docs/gpu.md says}"""
    found = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(COLUMNS) and cells[0] in STAGES:
            found[cells[0], cells[1]] = cells[3]
    return found


def cases(results: dict) -> list[dict]:
    """A row for each case, also for those that were measured by name."""
    hand, rows = by_hand(), []
    for stage in STAGES:
        module = importlib.import_module(f"benchmarks.{STAGES[stage].module}")
        of_stage = results.get(stage, {})
        planned = module.predicted(stage, ALL) if hasattr(module, "predicted") else {}
        for case in dict.fromkeys([*module.cases_of(stage, ALL), *of_stage]):
            row = of_stage.get(case)
            measured = shown(row).replace(" | ", ", ") if row else ""
            cells = stage, case, planned.get(case, "-"), hand.get((stage, case), ""), measured
            rows.append(dict(zip(COLUMNS, cells)))
    return rows


def first_number(row: dict) -> dict | None:
    """What is drawn of a case: its first number, as a spread."""
    for value in row.values():
        if isinstance(value, int | float):
            return report.spread([value])
        if isinstance(value, dict):
            return value if "median" in value else None
    return None


def draw(found: dict, figures: Path) -> None:
    """A bar for each case, of the first of its numbers. found: what gpu.json holds."""
    for figure_name, stages in FIGURES.items():
        bars = {}
        for stage in stages:
            for name, row in found["results"].get(stage, {}).items():
                # A panel has one unit: of kernels it is the share of a copy.
                has_unit = stage != "kernels" or SHARE in row
                spread = first_number(row) if has_unit and "error" not in row else None
                if spread:
                    bars.setdefault(stage, {})[name] = spread
        if bars:
            draw_stages(bars, found, figures / f"{figure_name}.svg")


def draw_stages(bars: dict, found: dict, path: Path) -> None:
    """bars: {stage: {case: spread}}"""
    heights = [len(of_stage) + 2 for of_stage in bars.values()]
    ratios = dict(height_ratios=heights, squeeze=False)
    figure, panels = style.figure(0.3 * sum(heights), len(bars), **ratios)
    for axes, (stage, of_stage) in zip(panels[:, 0], bars.items()):
        for y, (name, spread) in enumerate(of_stage.items()):
            text = shown(found["results"][stage][name]).replace(" | ", "   ")
            style.bar(axes, y, spread, text, height=0.75, color=style.SERIES[0])
        style.rows_of(axes, list(of_stage))
        axes.margins(x=1.2)
        axes.set(title=stage, xlim=(0, None))
    figure.suptitle(found["environment"]["device"])
    style.save(figure, path)


def show(args: argparse.Namespace) -> None:
    found = read(args)
    of = found.get("environment", {})
    print(", ".join(f"{key} {of[key]}" for key in ("device", "torch", "python", "date") if of))
    report.Table(goals(found["results"]))
    print()
    report.Table(cases(found["results"]))
    print()
    for model in training_step.MODELS:
        for rate, name in training_step.published(model):
            print(f"{model}: published {rate:,} tokens/s: {name}")
