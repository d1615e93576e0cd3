"""Write docs/explorer.html: pipeline schedules and the memory of a rank, in a browser.

    schedules    time lines of GPipe, 1F1B, interleaved and ZB-H1; what an action waits for; the
                 activations in flight at any moment; the bubble. Two schedules on one scale.
    memory       weights, gradients, optimizer state and activations of a rank under a layout,
                 beside GPUs of 24, 80 and 141 GB

    python -m page.explorer                     then open docs/explorer.html in a browser

The page is one file. It asks for nothing over the network, and its address holds all settings.

Its formulas stand twice, for a browser runs no Python: in the lessons, and in page/formulas.js, by
hand. tests/test_explorer.py holds the two together: in 500 random settings of each view they give
the same times, bytes and refusals. Who changes a formula changes it in both.

Not covered: measured times. `python pipeline_parallel.py` measures time lines, and
comparisons/zero_memory.py bytes.
"""

if __name__ == "__main__":
    from base import start

    start.command("page.explorer")

import argparse
import json
from pathlib import Path

from base import terminal
from comparisons import style
from model_config import MoEConfig, block_matrices, mlp_matrices
from pipelines import drawing
from run.presets import PRESETS

ROOT = Path(__file__).parent.parent
DEFAULT = ROOT / "docs" / "explorer.html"
# fields of a configuration that the page reads
FIELDS = (
    "num_layers hidden_size num_heads num_kv_heads ffn_hidden_size seq_length vocab_size attention"
    " norm positions tied sliding_window expert_every router_topk"
).split()
PARTS = ("weights", "gradients", "optimizer state", "activations")


def model(shape: dict) -> dict:
    """What the page knows of a preset."""
    experts = shape.get("num_experts", 0)
    # with experts, for without them their fields are reset
    config = MoEConfig(**shape | {"num_experts": experts or 8})
    attention = block_matrices(config, 0) // config.num_layers
    matrices = {"attention_matrices": attention, "mlp_matrices": mlp_matrices(config)}
    return {name: getattr(config, name) for name in FIELDS} | matrices | {"num_experts": experts}


def constants() -> str:
    """What the page takes from Python as it is."""
    values = {
        "PRESETS": {name: model(shape) for name, (shape, _) in PRESETS.items()},
        "PART_COLOURS": {part: style.COLOURS[part] for part in PARTS},
        "COLOURS": drawing.COLOURS,
        "MEANINGS": drawing.MEANINGS,
    }
    return "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())


def page() -> str:
    """The whole page."""
    names = ("page.html", "page.css", "formulas.js", "settings.js", "schedules.js", "memory.js")
    text, css, *scripts = [(ROOT / "page" / name).read_text() for name in names]
    text = text.replace("/* page.css */\n", css)
    return text.replace("/* scripts */\n", "\n".join([constants(), *scripts]))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DEFAULT, metavar="FILE", help="the page")
    out = parser.parse_args(argv).out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(), encoding="utf-8")
    except OSError as e:
        terminal.refuse(f"explorer.py: --out {out}: {e.strerror}; name a file to write")
    print(f"written: {out}, {out.stat().st_size:,} bytes")
    print(f"open {out.resolve().as_uri()} in a browser")
