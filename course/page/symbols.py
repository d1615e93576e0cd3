"""Write docs/symbols.html: letters, formulas and collectives on one printed page (A4).

    python -m course.page.symbols          then open docs/symbols.html in a browser, and print it

The tables of this file are the sheet. A formula is text that both a reader and Python can read: a
space multiplies, and ² is a square. So tests/test_symbols.py evaluates each formula of the sheet,
and the project's own function beside it, for one model.
"""

import html
import re
from pathlib import Path
from typing import NamedTuple

from base import terminal

OUT = Path(__file__).parent.parent.parent / "docs" / "symbols.html"


class Symbol(NamedTuple):
    letter: str
    meaning: str
    unit: str
    # where it is introduced in this project, and in which paper
    file: str
    paper: str


class Formula(NamedTuple):
    # "": that of the row above
    name: str
    case: str
    text: str
    unit: str
    paper: str
    # the project's own function; s, b, h and so on are numbers, config is the model's configuration
    call: str


class Collective(NamedTuple):
    name: str
    # the operation that its gradient goes through
    adjoint: str
    # what rank r has after it
    after: str
    # bytes that one rank sends, with a ring: n is the size of the whole tensor
    sends: str
    file: str


MEGATRON, MEGATRON_2, MEGATRON_3 = "1909.08053", "2104.04473", "2205.05198"
ZERO, ZERO_BUBBLE = "1910.02054", "2401.10241"

SYMBOLS = [
    Symbol("b", "sequences in a micro-batch", "sequences", "gpt.py", MEGATRON_2),
    Symbol("s", "tokens in a sequence", "tokens", "gpt.py", MEGATRON_3),
    Symbol("h", "hidden size", "numbers", "gpt.py", MEGATRON_3),
    Symbol("a", "attention heads", "heads", "gpt.py", MEGATRON_3),
    Symbol("d", "size of a head, mostly h / a", "numbers", "gpt.py", "1706.03762"),
    Symbol("L", "layers", "layers", "gpt.py", MEGATRON_3),
    Symbol("V", "size of the vocabulary", "tokens", "gpt.py", MEGATRON_3),
    Symbol("Ψ", "parameters of the model", "parameters", "fsdp.py", ZERO),
    Symbol("K", "optimizer state of a parameter; 12 for Adam", "bytes", "fsdp.py", ZERO),
    Symbol("E", "experts", "experts", "moe.py", "2006.16668"),
    Symbol("k", "experts for each token", "experts", "moe.py", "1701.06538"),
    Symbol("N", "ranks", "ranks", "fsdp.py", ZERO),
    Symbol("r", "the number of one rank, from 0", "", "fsdp.py", ""),
    Symbol("dp", "data-parallel ranks", "ranks", "base/world.py", MEGATRON_2),
    Symbol("t", "tensor-parallel ranks", "ranks", "tensor_parallel.py", MEGATRON),
    Symbol("cp", "context-parallel ranks", "ranks", "context_parallel.py", "2310.01889"),
    Symbol("ep", "ranks that share the experts", "ranks", "moe.py", "2006.16668"),
    Symbol("p", "pipeline-parallel ranks, or stages", "ranks", "schedules.py", MEGATRON_2),
    Symbol("v", "chunks of layers on a pipeline rank", "chunks", "schedules.py", MEGATRON_2),
    Symbol(
        "m", "micro-batches in a step, of one pipeline", "micro-batches", "schedules.py", MEGATRON_2
    ),
    Symbol("T_F", "time of a forward", "seconds", "schedules.py", ZERO_BUBBLE),
    Symbol("T_B", "time of a backward: T_I + T_W", "seconds", "docs/course.md", MEGATRON_2),
    Symbol("T_I", "time of the input gradient", "seconds", "schedules.py", ZERO_BUBBLE),
    Symbol("T_W", "time of the weight gradient", "seconds", "schedules.py", ZERO_BUBBLE),
]

LAYER = "recompute.layer_bytes(s, b, h, a, t"
BUBBLE = "schedules.bubble_formula"
PER_PARAMETER = "fsdp.bytes_per_parameter"
FORMULAS = [
    Formula(
        "parameters",
        "in matrices",
        "12 L h² + (V + s) h",
        "",
        MEGATRON_2,
        "model_config.least_parameters(config)",
    ),
    Formula(
        "FLOPs",
        "of a token",
        "72 L h² + 12 L s h + 6 V h",
        "FLOP",
        MEGATRON_3,
        "model_config.flops_per_token(config)",
    ),
    Formula(
        "activations",
        "tensor",
        "s b h (10 + 24/t + 5 a s/(h t))",
        "B",
        MEGATRON_3,
        f"{LAYER})",
    ),
    Formula(
        "of a layer",
        "+ sequence",
        "s b h (34/t + 5 a s/(h t))",
        "B",
        MEGATRON_3,
        f"{LAYER}, True)",
    ),
    Formula("", "+ selective", "34 s b h/t", "B", MEGATRON_3, f'{LAYER}, True, "selective")'),
    Formula("", "full", "2 s b h", "B", MEGATRON_3, f'{LAYER}, False, "full")'),
    Formula("bubble:", "GPipe", "(p - 1)/m", "%", MEGATRON_2, f'{BUBBLE}("gpipe", p, m)'),
    Formula("idle / ideal", "1F1B", "(p - 1)/m", "%", MEGATRON_2, f'{BUBBLE}("1f1b", p, m)'),
    Formula(
        "",
        "interleaved",
        "(p - 1)/(v m)",
        "%",
        MEGATRON_2,
        f'{BUBBLE}("interleaved", p, m, v)',
    ),
    Formula(
        "",
        "ZB-H1",
        "(p - 1) (T_F + T_I - T_W)/(m (T_F + T_I + T_W))",
        "%",
        ZERO_BUBBLE,
        f'{BUBBLE}("zb-h1", p, m, 1, Cost(T_F, T_I, T_W))',
    ),
    Formula("ZeRO", "stage 0", "(2 + 4 + K) Ψ", "B", ZERO, f"sum({PER_PARAMETER}(0, N)) * Ψ"),
    Formula(
        "of a rank",
        "stage 1",
        "(2 + 4 + K/N) Ψ",
        "B",
        ZERO,
        f"sum({PER_PARAMETER}(1, N)) * Ψ",
    ),
    Formula("", "stage 2", "(2 + (4 + K)/N) Ψ", "B", ZERO, f"sum({PER_PARAMETER}(2, N)) * Ψ"),
    Formula("", "stage 3", "(2 + 4 + K)/N Ψ", "B", ZERO, f"sum({PER_PARAMETER}(3, N)) * Ψ"),
]

COLLECTIVES = [
    Collective("all-reduce", "identity", "the sum", "2 n (N - 1)/N", "tensor_parallel.py"),
    Collective("identity", "all-reduce", "the same tensor", "0", "tensor_parallel.py"),
    Collective(
        "all-gather", "reduce-scatter", "all shards, joined", "n (N - 1)/N", "sequence_parallel.py"
    ),
    Collective(
        "reduce-scatter",
        "all-gather",
        "shard r of the sum",
        "n (N - 1)/N",
        "sequence_parallel.py",
    ),
    Collective("all-to-all", "all-to-all", "part r of each rank", "n (N - 1)/N", "moe.py"),
    Collective(
        "send to rank r + 1", "send to rank r - 1", "that of rank r - 1", "n", "context_parallel.py"
    ),
]

# GPT-3, on 8 tensor-parallel times 8 pipeline ranks; ZeRO on 64 ranks, with no other parallelism
MODEL = dict(L=96, h=12288, a=96, s=2048, V=51200)
EXAMPLE = MODEL | dict(b=1, t=8, p=8, v=2, m=64, N=64, K=12, T_F=1.0, T_I=1.0, T_W=1.0)

NOTES = [
    "A product has no sign: 12 L h² is 12 · L · h². Activations are [b, s, h]. G is 10⁹."
    " Parameters: without norms and biases; the head has the embedding's matrix.",
    "Activations have 16 bits, masks 8, with LayerNorm, GELU and dropout (arXiv 2205.05198, table"
    " 2). Selective and full are recomputation. Fused attention keeps no 5 a s/(h t).",
    "A bubble x is x / (1 + x) of the total time. The formula of ZB-H1 needs m ≥ p,"
    " T_W ≤ T_F and T_W ≤ T_I.",
    "ZeRO: 2 bytes of weight (bf16), 4 of gradient (fp32), K of optimizer state. Stage 1 shards the"
    " last, stage 2 gradients too, stage 3 all. In its paper a gradient has 2 bytes.",
    "Collectives: n is the size of the whole tensor; for all-to-all and send, that of one rank. An"
    " all-to-all needs no ring: it is N - 1 messages. After an all-reduce all ranks go on with the"
    " same sum, so its gradient is the same on every rank.",
    "Letters of others: arXiv 2205.05198 writes v for V, and m for v; arXiv 2401.10241 T_B for T_I;"
    " arXiv 1910.02054 N_d for N.",
]

STYLE = """@page { size: A4; margin: 8mm }
body { font: 8.5pt/1.2 Arial, "Liberation Sans", sans-serif; max-width: 194mm; margin: 0 auto }
h1 { font-size: 14pt; margin: 0 }
h2 { font-size: 11pt; margin: 2.5mm 0 0.5mm }
p { margin: 0.6mm 0; font-size: 7.5pt }
table { border-collapse: collapse; width: 100% }
th { text-align: left; border-bottom: 1px solid }
td { border-bottom: 1px dotted #999; padding: 0.1mm 1.5mm 0.1mm 0 }
i { font: italic 9.5pt "Times New Roman", "Liberation Serif", serif }
sub { font-size: 70%; line-height: 0 }"""


def python(formula: str) -> str:
    """12 L h² -> 12 * L * h**2"""
    return re.sub(r"(?<=[\w)²]) (?=[\w(])", " * ", formula).replace("²", "**2")


def amount(value: float, unit: str) -> str:
    """358.6 MB"""
    if unit == "%":
        return f"{100 * value:.1f}%"
    factor, prefix = next(x for x in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if value >= x[0])
    return f"{value / factor:.4g} {prefix}{unit}"


def marked(text: str, tag: str) -> str:
    """Text as HTML, with indices and signs."""
    text = html.escape(text, quote=False).replace(" - ", " − ")
    return f"<{tag}>" + re.sub(r"(?<=\b[A-Z])_(\w)", r"<sub>\1</sub>", text) + f"</{tag}>"


def table(heads: str, tags: str, rows: list[tuple]) -> str:
    """heads, tags: of each column, with a space between; a head of two words has a _."""
    lines = ["".join(f"<th>{head.replace('_', ' ')}" for head in heads.split())]
    for row in rows:
        lines.append("".join("<td>" + marked(*cell) for cell in zip(row, tags.split())))
    return "<table>\n<tr>" + "\n<tr>".join(lines) + "\n</table>"


def sheet() -> str:
    known = EXAMPLE | {"Ψ": eval(python(FORMULAS[0].text), {}, EXAMPLE)}
    formulas = []
    for name, case, text, unit, paper, call in FORMULAS:
        value = amount(eval(python(text), {}, known), unit)
        function = re.search(r"[\w.]+\.\w+", call)[0]
        formulas.append((name, case, text, value, function, paper))
    example = ", ".join(f"{letter} {value:,g}" for letter, value in EXAMPLE.items())
    parts = [
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>Symbols</title>',
        f"<style>\n{STYLE}\n</style>",
        "<h1>Symbols of large-model training</h1>",
        table("letter meaning unit file arXiv", "i span span span span", SYMBOLS),
        "<h2>Formulas</h2>",
        table("of case formula example function arXiv", "span span i span span span", formulas),
        marked(f"Example, GPT-3: {example}.", "p"),
        "<h2>Collectives of N ranks</h2>",
        table(
            "name adjoint_(its_backward) rank_r_gets bytes_that_a_rank_sends file",
            "span span span i span",
            COLLECTIVES,
        ),
        *(marked(note, "p") for note in NOTES),
    ]
    return "\n".join(parts) + "\n</html>\n"


def main(argv: list[str] | None = None) -> None:
    OUT.write_text(sheet(), encoding="utf-8")
    print(f"written: {OUT}; open it in a browser, and print it")


if __name__ == "__main__":
    terminal.command(main)
