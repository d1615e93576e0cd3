"""Write docs/explorer.html: pipeline schedules and the memory of a rank, in a browser.

    schedules    time lines of GPipe, 1F1B, interleaved and ZB-H1; what an action waits for; the
                 activations in flight at any moment; the bubble. Two schedules on one scale.
    memory       weights, gradients, optimizer state and activations of a rank under a layout,
                 beside GPUs of 24, 80 and 141 GB

    python explorer.py                     then open docs/explorer.html in a browser

The page is one file. It asks for nothing over the network, and its address holds all settings.

No formula is written twice. page/formulas.py calls those of the lessons, and page/translate.py
turns these functions, and all that they call, into JavaScript. `make test` fails where
docs/explorer.html is not what this file writes.

    page/formulas.py     what the page computes, in Python
    page/translate.py    Python to JavaScript; page/python.js, what the two do differently
    page/page.html, page.css, settings.js, schedules.js, memory.js    what is drawn, and how

Not covered: measured times. `python pipeline_parallel.py` measures time lines, and
comparisons/zero_memory.py bytes.
"""

if __name__ == "__main__":
    from base import start

    start.command("explorer")

import argparse
import dataclasses
import json
from pathlib import Path

import schedules
from base import terminal
from comparisons import style
from page import formulas, translate
from routers import MoEConfig
from run import refusal
from run.presets import PRESETS

ROOT = Path(__file__).parent
PAGE = ROOT / "page"
DEFAULT = ROOT / "docs" / "explorer.html"

# a configuration's defaults are set in Python; these stay for the page
CONFIG_MEMBERS = ("gated", "expert_layers", "check", "check_rotary", "check_size", "check_range")


def formulas_in_javascript() -> str:
    program = translate.Program()
    program.add(MoEConfig, CONFIG_MEMBERS)
    # classes first: their methods are then known
    for thing in (schedules.Action, schedules.Event, schedules.Cost):
        program.add(thing)
    for name in ("time_lines", "waits_for", "held", "memory"):
        program.add(getattr(formulas, name))
    program.add(refusal.multiples)
    program.add(schedules.text_on)
    for name in ("IN_FLIGHT", "DEFERRED", "COLOURS", "MEANINGS"):
        program.constant("schedules", name, getattr(schedules, name))
    return program.source()


def presets_in_javascript() -> str:
    """A row of fields for each preset, without experts and with: other fields depend on that."""
    fields = [field.name for field in dataclasses.fields(MoEConfig)]
    lines = [f"const FIELDS = {json.dumps(fields)};", "const PRESETS = {"]
    for name, (shape, _) in PRESETS.items():
        experts = shape.get("num_experts", 0)
        rows = []
        for number in (0, experts or 8):
            config = MoEConfig(**shape | {"num_experts": number})
            rows.append(json.dumps(dataclasses.astuple(config)))
        lines.append(f'  "{name}": {{ experts: {experts}, rows: [{rows[0]},')
        lines.append(f"    {rows[1]}] }},")
    return "\n".join([*lines, "};", ""])


def colours_in_javascript() -> str:
    """Of the parts of memory, as in the figures."""
    names = {"state": "optimizer state"}
    parts = {part: style.COLOURS[names.get(part, part)] for part in formulas.Memory._fields}
    return f"const PART_COLOURS = {json.dumps(parts)};\n"


def page() -> str:
    """The whole page."""
    scripts = [
        (PAGE / "python.js").read_text(),
        formulas_in_javascript(),
        presets_in_javascript(),
        colours_in_javascript(),
        *((PAGE / name).read_text() for name in ("settings.js", "schedules.js", "memory.js")),
        "start();\n",
    ]
    text = (PAGE / "page.html").read_text()
    text = text.replace("/* page.css */\n", (PAGE / "page.css").read_text())
    return text.replace("/* scripts */\n", "\n".join(scripts))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DEFAULT, metavar="FILE", help="the page")
    args = parser.parse_args(argv)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page(), encoding="utf-8")
    except OSError as e:
        terminal.refuse(f"explorer.py: --out {args.out}: {e.strerror}; name a file to write")
    print(f"written: {args.out}, {args.out.stat().st_size:,} bytes")
    print(f"open {args.out.resolve().as_uri()} in a browser")
