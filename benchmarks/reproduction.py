"""Every published number that this project was held to, beside ours: docs/reproduction.md.

    python -m benchmarks.reproduction [--toy] [--out DIR] [--figures DIR]

A claim is one number of a paper, of NeMo's tables or of an announcement. Ours is

    counted          by a function, a schedule, or the trainer's step on the meta device
    measured         on CPU ranks: read from the JSON of another comparison
    predicted        by planner.py, for GPUs that are not here
    fitted           predicted too, but a constant of the planner was fitted to this very number
    data sheet       an input of the planner
    not reachable    nothing here can say it

A ratio, ours over published, that is off by more than 10% has a sentence that says why. Nothing is
timed here; it takes a minute. With --out benchmarks/results the tables in docs/reproduction.md are
written again. The claims are in reproduction_papers.py, reproduction_predictions.py and
reproduction_announced.py.

Figures: docs/figures/reproduction.svg, docs/figures/reproduction_scaling.svg
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks import report, reproduction_figures
from benchmarks import reproduction_announced as announced
from benchmarks import reproduction_papers as papers
from benchmarks import reproduction_predictions as predictions
from benchmarks.reproduction_predictions import Search

PAGE = report.ROOT / "docs" / "reproduction.md"
BEGIN, END = "<!-- written by benchmarks/reproduction.py -->", "<!-- end -->"
# a ratio that is farther from 1 has a reason
OFF = 0.1
PREDICT = "python planner.py predict planning/published_times.json"
AS_RANK = f"python train.py {papers.OF_64}"
PLAN = "python planner.py plan --model {} --gpus {} --gpu {} --batch {}"


class Section(NamedTuple):
    """One table. commands: {how: the command that gives such numbers, or an example of it}."""

    title: str
    source: str
    commands: dict[str, str]
    claims: Callable[[Search], list[papers.Claim]]


ALL_LAYOUTS = PLAN.format("gpt3-175b", 1024, "a100", 1536)
SECTIONS = [
    Section(
        "Megatron-LM, table 1",
        "arXiv 2104.04473; two of its six rows were fitted",
        {"counted": "python -m run.presets", "predicted": PREDICT},
        lambda search: papers.table_1(),
    ),
    Section(
        "Megatron-LM, formulas",
        "arXiv 2104.04473; published is the value of the formula",
        {"counted": AS_RANK},
        lambda search: papers.megatron_formulas(),
    ),
    Section(
        "Activations",
        "arXiv 2205.05198, tables 2 and 3",
        {
            "measured": "python -m benchmarks.activation_memory",
            "counted": f"python train.py --as-rank 0 {papers.FIRST_STAGE['22B'][-1]}"
            f"{papers.BATCHES['22B']}",
        },
        lambda search: papers.activation_formulas(),
    ),
    Section(
        "Time of a layer",
        "arXiv 2205.05198, table 4",
        {"predicted": "python -m benchmarks.reproduction"},
        lambda search: papers.layer_times(),
    ),
    Section(
        "Time of a step",
        "arXiv 2205.05198, table 5",
        {"predicted": PREDICT, "counted": "python -m benchmarks.reproduction"},
        lambda search: papers.table_5(),
    ),
    Section(
        "ZeRO",
        "arXiv 1910.02054",
        {"counted": "python -m course.fsdp", "measured": "python -m benchmarks.zero_memory"},
        lambda search: papers.zero(),
    ),
    Section(
        "Zero bubble",
        "arXiv 2401.10241",
        {"counted": "python -m benchmarks.reproduction"},
        lambda search: papers.zero_bubble(),
    ),
    Section(
        "Sinkhorn routing",
        "arXiv 2202.01169, an example of four tokens and two experts",
        {"counted": "python -m benchmarks.reproduction"},
        lambda search: papers.sinkhorn(),
    ),
    Section(
        "Prompt tuning",
        "NeMo; arXiv 2104.08691",
        {"measured": "python -m benchmarks.prompt_memory"},
        lambda search: papers.prompts(),
    ),
    Section(
        "Other projects on GPUs",
        "torchtitan, llm.c, Megatron-core, NeMo, data sheets",
        {"predicted": PLAN.format("gpt2 --dropout 0", 8, "h100", announced.GPT_2_BATCH)},
        lambda search: [*announced.peaks(), *announced.other_projects(search)],
    ),
    Section(
        "Days for 300 billion tokens",
        f"NeMo, bf16 on A100s; steps of {predictions.DAYS_BATCH:,} sequences are our choice",
        {
            "predicted": PLAN.format("gpt3-5b", 160, "a100", predictions.DAYS_BATCH),
            "counted": "python -m benchmarks.reproduction",
        },
        lambda search: [*predictions.nemo_days(search), *predictions.rule_of_thumb()],
    ),
    Section(
        "Tokens per second",
        f"NeMo; Llama-2 in steps of {predictions.LLAMA_BATCH} sequences of 4,096 tokens",
        {
            "predicted, bf16": PLAN.format("llama2-7b", 8, "a100", predictions.LLAMA_BATCH),
            "FP8": PLAN.format(
                "llama2-7b --fp8 delayed --fp8-skip 0", 8, "h200", predictions.LLAMA_BATCH
            ),
        },
        lambda search: [*predictions.llama_speeds(search), *predictions.h100_speeds()],
    ),
    Section(
        "FSDP over tensor and pipeline parallelism",
        "NeMo, bf16, steps of 256 sequences of 2,048 tokens; the fastest layout of each kind",
        {"predicted": PLAN.format("gpt3-20b --dropout 0", 8, "h100", predictions.FSDP_BATCH)},
        predictions.fsdp_ratios,
    ),
    Section(
        "Memory of inference",
        "NeMo, FP16, batches of 1 to 256, 60 + 20 to 200 + 200 tokens",
        {"predicted": "python planner.py serve --model gpt3-175b --gpus 8 --input 60 --output 20"},
        lambda search: predictions.inference_memory(),
    ),
    Section(
        "What was announced",
        "NVIDIA's announcements; for 1T arXiv 2104.04473",
        {"predicted": ALL_LAYOUTS, "measured": "python -m benchmarks.optimizer_state"},
        lambda search: [
            *announced.gpt_3(search),
            *announced.many_gpus(search),
            *announced.llama_2(search),
            *announced.measured_here(),
        ],
    ),
]


def measure(toy: bool) -> dict:
    search = Search(toy)
    sections = []
    for section in SECTIONS:
        claims = [claim._asdict() | {"ratio": claim.ratio} for claim in section.claims(search)]
        sections.append(section._asdict() | {"claims": claims})
        print(f"{section.title}: {len(claims)} claims", flush=True)
    return {"toy": toy, "sections": sections, "figures": reproduction_figures.numbers(search)}


# --- the page -------------------------------------------------------------------------------------


def is_off(claim: dict) -> bool:
    return claim["ratio"] is not None and abs(claim["ratio"] - 1) > OFF


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"


def row_of(claim: dict) -> str:
    ratio = "" if claim["ratio"] is None else f"{claim['ratio']:.2f}"
    how = ", ".join(words for words in (claim["how"], claim["note"]) if words)
    cells = claim["claim"], number(claim["published"]), number(claim["ours"]), how
    return f"| {' | '.join(cells)} | {f'**{ratio}**' if is_off(claim) else ratio} |"


def reasons(claims: list[dict]) -> list[str]:
    """A line for each reason, with the claims that it is about."""
    found: dict[str, list[str]] = {}
    for claim in claims:
        if is_off(claim) or claim["ratio"] is None:
            ratio = "" if claim["ratio"] is None else f" ({claim['ratio']:.2f})"
            found.setdefault(claim["why"], []).append(f"{claim['claim']}{ratio}")
    return [f"- *{'; '.join(names)}*: {why}" for why, names in found.items()]


def table_of(section: dict) -> list[str]:
    commands = "; ".join(f"{how}: `{command}`" for how, command in section["commands"].items())
    lines = [f"## {section['title']}", "", f"Source: {section['source']}."]
    lines += ["", f"Commands: {commands}."] if commands else []
    lines += ["", "| claim | published | ours | how | ratio |", "|---|---|---|---|---|"]
    lines += [row_of(claim) for claim in section["claims"]]
    because = reasons(section["claims"])
    return lines + (["", *because] if because else [])


def summary(sections: list[dict]) -> list[str]:
    """How many claims of each section are within 10%, are off, cannot be reached."""
    lines = ["| source | claims | within 10% | off | not reachable |", "|---|---|---|---|---|"]
    total = [0] * 4
    for section in sections:
        claims = section["claims"]
        off = sum(map(is_off, claims))
        none = sum(claim["ratio"] is None for claim in claims)
        counts = len(claims), len(claims) - off - none, off, none
        total = [x + y for x, y in zip(total, counts)]
        anchor = section["title"].lower().replace(",", "").replace(" ", "-")
        lines.append(f"| [{section['title']}](#{anchor}) | {' | '.join(map(str, counts))} |")
    return [*lines, f"| all | {' | '.join(map(str, total))} |"]


def page(text: str, results: dict) -> str:
    """The page with the tables of these results. text: the page as it is."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [summary(results["sections"]), *map(table_of, results["sections"])]
    tables = "\n\n".join("\n".join(lines) for lines in parts)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def draw(results: dict, figures: Path) -> None:
    """results: what reproduction.json holds."""
    reproduction_figures.draw(results["figures"], figures)


def main():
    args = report.parse(report.arguments(__doc__))
    results = measure(args.toy)
    print("\n".join(summary(results["sections"])))
    for section in results["sections"]:
        print("\n".join(reasons(section["claims"])))
    report.finish("reproduction", results, args, draw)
    if args.out.resolve() == report.RESULTS:
        PAGE.write_text(page(PAGE.read_text(), results))
        print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
