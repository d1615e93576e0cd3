"""One training step on one GPU in bf16: tokens/s, MFU and peak memory with kernels, torch.compile
and recomputation, beside published figures.

    python comparisons/training_step.py [--models gpt2-124m gpt-1.3b llama2-7b] [--steps 10]
    python comparisons/training_step.py --toy                       the same at toy size, on any device: one case of each model without torch.compile

train.Trainer on random tokens, no dropout, the optimizer's step included; each case in a process of
its own, so that peaks are clean and a case that does not fit is one line. Selective recomputation
is of explicit attention, all else is with fused attention; the small model needs no recomputation.
After 3 steps to warm up (torch.compile), the median, least and most of --steps steps. MFU is model
FLOPs (flops_per_token) over the device's dense bf16 peak; where that is not known, over a large
matrix multiplication measured here, and then says so. Losses of a model's first steps should be
alike in all cases, to what bf16 gives.

    case          shape                                            micro-batch x how many    state
    gpt2-124m     L 12  h 768   a 12  s 1024  V 50304  GPT         32 x 8                    fp32 masters and moments
    gpt-1.3b      L 24  h 2048  a 16  s 2048  V 50304  GPT         4 x 8                     fp32 masters and moments
    llama2-7b     L 32  h 4096  a 32  s 4096  V 32000  Llama       1 x 8                     --optimizer-state bf16: 8 bytes a parameter

The vocabulary of 50257 is padded to 50304, so that rows of the logits are whole vectors. Figure:
figures/training_step.png."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
from report import spread, timed
from single_device import Random

import kernels
import train
from runtime.metrics import peak_memory
from runtime.sizes import flops_per_token
from runtime.world import Groups, keep_freed_memory

BF16 = dict(precision="bf16", dropout=0.0, warmup_steps=0)
GPT13 = dict(
    model="gpt2", num_layers=24, hidden_size=2048, num_heads=16, seq_length=2048, vocab_size=50304
)
CASES = {
    "gpt2-124m": dict(model="gpt2", vocab_size=50304, micro_batch_size=32, global_batch_size=256),
    "gpt-1.3b": GPT13 | dict(micro_batch_size=4, global_batch_size=32),
    "llama2-7b": dict(
        model="llama2-7b", optimizer_state="bf16", micro_batch_size=1, global_batch_size=8
    ),
}
TOY = dict(
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    seq_length=64,
    vocab_size=512,
    micro_batch_size=2,
    global_batch_size=4,
)
TOY_LLAMA = dict(ffn_hidden_size=176)
RECOMPUTE = {
    "none": {},
    "selective": dict(recompute="selective", attention="explicit"),
    "full": dict(recompute="full"),
}
# dense bf16 FLOP/s, by what the device's name contains
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
# beside which model, tokens/s of one GPU, what differs
PUBLISHED = [
    ("gpt2-124m", 475_000, "llm.c, GPT-2 124M, bf16, H100, one of 8"),
    ("llama2-7b", 16_913, "NeMo, Llama-2 7B, FP8 (here bf16), H200"),
    ("llama2-7b", 16_934, "NeMo, Llama-2 7B, FP8 (here bf16), H100, one of 8"),
]
WARMUP = 3


def cases(model: str) -> dict[str, dict]:
    """{name: fields of train.Config}: kernels x torch.compile x recomputation, where it makes
    sense."""
    recompute = ["none"] if model == "gpt2-124m" else list(RECOMPUTE)
    return {
        f"kernels {kernels}{', compile' if compiled else ''}{f', {r} recompute' if r != 'none' else ''}": dict(
            kernels=kernels, compile=compiled, **RECOMPUTE[r]
        )
        for r, kernels, compiled in itertools.product(recompute, ("off", "auto"), (False, True))
    }


def run_case(fields: dict, steps: int) -> dict:
    """Train in this process. {tokens_per_second: of each step, loss, peak_memory_bytes,
    flops_per_token}"""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        keep_freed_memory()
    config = train.Config(**fields)
    c = config.model_config()
    b = config.global_batch_size
    dataset = Random(b, c.seq_length, c.vocab_size)
    losses = []
    rates = []
    trainer = train.Trainer(config, device, Groups())

    def step(number):
        losses.append(trainer.forward_backward(number, dataset).item())
        trainer.update(number)

    for number in range(1, WARMUP + steps + 1):
        rates.append(b * c.seq_length / timed(lambda: step(number)))
    return {
        "tokens_per_second": rates[WARMUP:],
        "losses": losses[:WARMUP],
        "peak_memory_bytes": peak_memory(device),
        "flops_per_token": flops_per_token(c),
    }


def in_process(fields: dict, steps: int) -> dict:
    """The same in a process of its own; {"error": in a few words} where it failed."""
    done = subprocess.run(
        [sys.executable, __file__, "--steps", str(steps), "--case", json.dumps(fields)],
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    words = [line for line in done.stderr.splitlines() if line.strip()]
    if "out of memory" in done.stderr.lower():
        return {"error": "out of memory"}
    return {"error": words[-1] if words else f"exit status {done.returncode}"}


def peak() -> tuple[float, str]:
    """(FLOP/s that are 100%, where from)"""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    known = next((flops for word, flops in PEAKS.items() if word in name), None)
    if known:
        return known, f"{name}'s dense bf16 peak, {known / 1e12:.0f} TFLOP/s"
    measured = report.matmul_flops(torch.bfloat16, "cuda" if torch.cuda.is_available() else "cpu")
    return measured, f"a bf16 matrix multiplication measured here, {measured / 1e12:.2f} TFLOP/s"


def draw(results: dict, of: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = [len(rows) + 1.5 for rows in results.values()]
    figure, panels = plt.subplots(
        len(results),
        1,
        figsize=(11, 0.8 + 0.3 * sum(heights)),
        layout="constrained",
        height_ratios=heights,
        squeeze=False,
    )
    for axes, (model, rows) in zip(panels[:, 0], results.items()):
        for y, row in enumerate(rows.values()):
            if "error" in row:
                axes.annotate(
                    row["error"][:60],
                    (0, y),
                    (5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                    color="#a03030",
                )
                continue
            rate = row["tokens_per_second"]
            colour = {
                ("off", False): "#b9c9dc",
                ("off", True): "#7f9fc4",
                ("auto", False): "#f6d08d",
                ("auto", True): "#e8a33d",
            }[row["kernels"], row["compile"]]
            axes.barh(
                y,
                rate["median"],
                height=0.75,
                color=colour,
                xerr=[[rate["median"] - rate["min"]], [rate["max"] - rate["median"]]],
                error_kw=dict(ecolor="#333333", elinewidth=1, capsize=2),
            )
            axes.annotate(
                f"{rate['median']:,.0f}   MFU {row['mfu']:.1%}  "
                f" {row['peak_memory_bytes'] / 2**30:.1f} GiB",
                (rate["max"], y),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        for style, (_, rate, name) in zip(("--", ":"), (x for x in PUBLISHED if x[0] == model)):
            axes.axvline(
                rate, color="black", linewidth=1, linestyle=style, label=f"{rate:,}: {name}"
            )
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right", fontsize=8)
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.set_title(model, loc="left", fontsize=10)
        axes.margins(x=0.3, y=0.02)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[-1, 0].set_xlabel("tokens/s of one device")
    figure.suptitle(f"A training step; MFU of {of}", fontsize=10)
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = report.arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--case", type=json.loads, help="(one case, in a process of its own)")
    args = report.parse(parser)
    if args.case:
        print(json.dumps(run_case(args.case, args.steps)))
        return 0
    if not torch.cuda.is_available() and not args.toy:
        sys.exit(
            "training_step.py: there is no GPU here; --toy runs the same at toy size on any device"
        )
    flops, of = peak()
    steps = 2 if args.toy else args.steps
    results = {model: {} for model in args.models}
    if why_not := kernels.load()[1]:
        print(f"(fused kernels do not run here, {why_not}: 'kernels auto' is PyTorch's own)")
    print(f"MFU: of {of}\n\n| model | | tokens/s | MFU | peak memory, GiB |\n|---|---|---|---|---|")
    for model in args.models:
        todo = cases(model)
        if args.toy:
            todo = dict(list(todo.items())[:1])
        for name, fields in todo.items():
            toy = TOY | (TOY_LLAMA if "llama" in model else {}) if args.toy else {}
            run = run_case if args.toy and model != args.models[0] else in_process
            row = run(BF16 | CASES[model] | fields | toy, steps)
            results[model][name] = row
            if "error" not in row:
                rate = spread(row["tokens_per_second"])
                row |= {
                    "tokens_per_second": rate,
                    "mfu": rate["median"] * row["flops_per_token"] / flops,
                    "kernels": fields["kernels"],
                    "compile": fields["compile"],
                }
                told = (
                    f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f}) |"
                    f" {row['mfu']:.1%} | {row['peak_memory_bytes'] / 2**30:.1f} |"
                )
            else:
                told = f"{row['error']} | | |"
            print(f"| {model} | {name} | {told}", flush=True)
        for _, rate, name in (x for x in PUBLISHED if x[0] == model and not args.toy):
            print(f"| {name} | published | {rate:,} | | |")
    for model, rows in results.items():
        ran = [row["losses"] for row in rows.values() if "error" not in row]
        if ran:
            print(
                f"{model}: losses of the first {WARMUP} steps differ by at most"
                f" {max(abs(a / b - 1) for losses in ran for a, b in zip(losses, ran[0])):.1e}"
                f" between {len(ran)} cases"
            )
    report.save(
        "training_step",
        {
            "steps": steps,
            "peak_flops": flops,
            "peak": of,
            "published": PUBLISHED,
            "results": results,
        },
        args,
    )
    draw(results, of, args.figures / "training_step.png")
    return int(
        any(
            row.get("error", "out of memory") != "out of memory"
            for rows in results.values()
            for row in rows.values()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
