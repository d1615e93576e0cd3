"""Write docs/explorer.html: pipeline schedules and the memory of a rank, in a browser.

    schedules    time lines of GPipe, 1F1B, interleaved and ZB-H1; what an action waits for; the
                 activations in flight, played over time; the bubble. Two on one scale.
    memory       weights, gradients, optimizer state and activations of a rank under a layout,
                 beside GPUs of 24, 80 and 141 GB

    python -m course.page.explorer                     then open docs/explorer.html in a browser

The page is one file. It asks for nothing over the network, and its address holds all settings.

Its formulas stand twice, for a browser runs no Python: in the lessons, and by hand in formulas.js.
tests/test_explorer.py holds the two together: in random settings they give the same times, bytes
and refusals. A formula that changes is changed in both.

Not covered: the seconds of a step, which planner.py predicts; measured times
(`python -m course.pipeline_parallel`) and bytes (benchmarks/zero_memory.py).
"""

import argparse
import json
from pathlib import Path

from base import terminal
from base.model_config import MoEConfig, block_matrices, latent_matrices, mlp_matrices
from benchmarks import style
from planning import drawing
from run.presets import PRESETS

ROOT = Path(__file__).parent.parent.parent
DEFAULT = ROOT / "docs" / "explorer.html"
# examples: settings, as in the page's address, and what they show; models: what to look at, by the
# beginning of a preset's name, a longer one before a shorter one
TEXTS = json.loads((ROOT / "course" / "page" / "examples.json").read_text())
# Fields of a configuration that the page reads.
FIELDS = (
    "num_layers hidden_size num_heads num_kv_heads head_dim ffn_hidden_size seq_length vocab_size"
    " attention norm positions tied sliding_window expert_every router router_topk"
    " first_dense_layers"
).split()
SCRIPTS = "formulas settings schedules time memory".split()
PARTS = ("weights", "gradients", "optimizer state", "activations")


def model(name: str, shape: dict) -> dict:
    """What the page knows of a preset."""
    experts = shape.get("num_experts", 0)
    # With experts, because without them their fields are reset.
    config = MoEConfig(**shape | {"num_experts": experts or 8})
    attention = block_matrices(config, 0) // config.num_layers
    matrices = {"attention_matrices": attention, "latent_matrices": latent_matrices(config)}
    sizes = {"mlp": config.ffn_hidden_size, "expert": config.expert_size}
    for part, size in (sizes | {"shared": config.shared_ffn_size}).items():
        matrices[f"{part}_matrices"] = size * mlp_matrices(config, 1)
    fields = {field: getattr(config, field) for field in FIELDS}
    why = next(text for start, text in TEXTS["models"].items() if name.startswith(start))
    return fields | matrices | {"num_experts": experts, "why": why}


def constants() -> str:
    """What the page takes from Python as it is."""
    values = {
        "PRESETS": {name: model(name, shape) for name, (shape, _) in PRESETS.items()},
        "EXAMPLES": TEXTS["examples"],
        "PART_COLOURS": {part: style.COLOURS[part] for part in PARTS},
        "COLOURS": drawing.COLOURS,
        "MEANINGS": drawing.MEANINGS,
    }
    return "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())


def page() -> str:
    """The whole page."""
    names = ("page.html", "page.css", *(f"{name}.js" for name in SCRIPTS))
    text, css, *scripts = [(ROOT / "course" / "page" / name).read_text() for name in names]
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


if __name__ == "__main__":
    terminal.command(main)
