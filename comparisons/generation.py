"""Tokens per second of decoding: with and without the key-value cache, and beside Hugging Face
transformers' `generate` with the same weights, in turn, in one run.

    python comparisons/generation.py [--threads 1] [--rounds 7] [--cases small gpt2-124m] [--toy]
    [--out DIR]

Greedy, float32 on CPUs. Decoding is measured as the time of a prompt of 32 tokens and 48 new ones,
less that of the same prompt and 1 new one: prefill is left out, on both sides. transformers runs as
it comes (sdpa, its dynamic cache, stopping criteria off), from the folder that huggingface.py
exports. Ratios are medians over rounds of (their seconds / our seconds); tokens are compared too.
Both read all weights for each step, so the larger the model, the nearer both come to the speed of
the memory, measured here as a matrix times a vector of the size of the largest matrix."""

import copy
import dataclasses
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
from report import in_turn, median, spread, timed

import checkpoint
import generate
import gpt
import huggingface
import sharding
from inference import packing
from model_config import GPTConfig
from runtime.world import keep_freed_memory

CASES = {
    "small": GPTConfig(num_layers=4, hidden_size=256, num_heads=8, seq_length=1024, vocab_size=257),
    "small llama": GPTConfig(
        num_layers=4,
        hidden_size=256,
        num_heads=8,
        ffn_hidden_size=688,
        seq_length=1024,
        vocab_size=257,
        llama=True,
    ),
    "gpt2-124m": GPTConfig(
        num_layers=12, hidden_size=768, num_heads=12, seq_length=1024, vocab_size=50257
    ),
}
TOY = {
    "toy": GPTConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=128, vocab_size=257),
    "toy llama": GPTConfig(
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        ffn_hidden_size=176,
        seq_length=128,
        vocab_size=257,
        llama=True,
    ),
}
PROMPT = 32
NEW = 48


def build(config: GPTConfig, device: str):
    """(ours packed for few texts, for many, transformers') with the same weights."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with torch.device("meta"):
        model = gpt.GPT(config)
    sharding.init(model, 0, "cpu", torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.write(
            Path(folder) / "ckpt",
            0,
            {f"model.{n}": p.detach() for n, p in model.named_parameters()},
            {"config": {}, "model": dataclasses.asdict(config)},
        )
        huggingface.export_folder(Path(folder) / "ckpt", Path(folder) / "hf")
        other = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder) / "hf", attn_implementation="sdpa", dtype=torch.float32
        )
        other = other.to(device).eval()
        # mapped from the file so far
        for p in other.parameters():
            p.data = p.data.clone()
    # for a few texts, and for many
    models = [model.to(device).eval().requires_grad_(False)]
    models.append(copy.deepcopy(model))
    for model, texts in zip(models, (1, 64)):
        packing.pack(model, texts)
    return *models, other


def theirs(other, prompts: torch.Tensor, n: int) -> list[list[int]]:
    return other.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=n,
        min_new_tokens=n,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )[:, PROMPT:].tolist()


def against_transformers(model, other, batch: int, rounds: int) -> dict:
    g = torch.Generator().manual_seed(batch)
    prompts = torch.randint(256, (batch, PROMPT), generator=g).to(next(model.parameters()).device)
    lists = prompts.tolist()
    equal = []

    def decode(function):
        return timed(lambda: function(NEW)) - timed(lambda: function(1))

    equal = generate.generate(model, lists, NEW, temperature=0) == theirs(other, prompts, NEW)
    times = in_turn(
        {
            "ours": lambda: decode(lambda n: generate.generate(model, lists, n, temperature=0)),
            "theirs": lambda: decode(lambda n: theirs(other, prompts, n)),
        },
        rounds,
    )
    tokens = batch * (NEW - 1)
    return {
        "tokens_per_second": tokens / median([t["ours"] for t in times]),
        "transformers_tokens_per_second": tokens / median([t["theirs"] for t in times]),
        "ratio": spread([t["theirs"] / t["ours"] for t in times]),
        "same_tokens": equal,
    }


def by_length(model, lengths: list[int], rounds: int) -> dict:
    """Tokens/s of one text at a length, with the cache and without."""
    results = {}
    for length in lengths:
        prompt = [[1 + i % 200 for i in range(length)]]

        def step(cached, new):
            return timed(
                lambda: generate.generate(model, prompt, new + 1, temperature=0, cached=cached)
            ) - timed(lambda: generate.generate(model, prompt, 1, temperature=0, cached=cached))

        times = in_turn(
            {"with": lambda: step(True, 16) / 16, "without": lambda: step(False, 2) / 2}, rounds
        )
        results[length] = {
            kind: spread([1 / t[kind] for t in times]) for kind in ("with", "without")
        }
    return results


def memory_speed(config: GPTConfig, device: str) -> float:
    """Bytes/s at which a matrix is multiplied by a vector: the speed that a step at batch 1 can
    have. (As many matrices as make up 256 MB, one after the other.)"""
    rows = max(config.vocab_size, config.ffn_hidden_size)
    matrices = [
        torch.randn(rows, config.hidden_size, device=device)
        for _ in range(max(1, 256 * 2**20 // (4 * rows * config.hidden_size)))
    ]
    x = torch.randn(1, config.hidden_size, device=device)

    def run():
        for m in matrices:
            torch.nn.functional.linear(x, m)

    return sum(m.nbytes for m in matrices) / median([timed(run) for _ in range(7)])


def draw(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for name, colour in zip(results, ("tab:blue", "tab:green", "tab:orange")):
        lengths = results[name]["by_length"]
        for kind, style in (("with", "-"), ("without", "--")):
            axes[0].plot(
                list(lengths),
                [x[kind]["median"] for x in lengths.values()],
                "o" + style,
                color=colour,
                label=f"{name}, {kind} cache",
                markersize=3,
            )
        batches = results[name]["by_batch"]
        axes[1].plot(
            list(batches),
            [x["ratio"]["median"] for x in batches.values()],
            "o-",
            color=colour,
            label=name,
        )
        axes[1].fill_between(
            list(batches),
            [x["ratio"]["min"] for x in batches.values()],
            [x["ratio"]["max"] for x in batches.values()],
            color=colour,
            alpha=0.15,
        )
    axes[0].set(
        xlabel="tokens in the context", ylabel="tokens per second", xscale="log", yscale="log"
    )
    axes[1].set(
        xlabel="batch",
        ylabel="tokens/s over transformers'",
        xscale="log",
        xticks=list(batches),
        xticklabels=list(batches),
        ylim=(0, None),
    )
    axes[1].axhline(1, color="gray", linewidth=0.8)
    for ax in axes:
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512, 960])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = report.parse(parser)
    cases = TOY if args.toy else {name: CASES[name] for name in args.cases}
    if args.toy:
        args.rounds = 1
        args.batches = [1, 16]
        args.lengths = [8, 40]
    torch.set_num_threads(args.threads)
    if args.device == "cpu":
        # for both
        keep_freed_memory()
    results = {}
    for name, config in cases.items():
        model, for_many, other = build(config, args.device)
        weights = sum(
            p.nbytes for n, p in (*model.blocks.named_buffers(), *model.head.named_buffers())
        )
        speed = memory_speed(config, args.device)
        results[name] = {
            "by_batch": {},
            "by_length": by_length(model, args.lengths, args.rounds),
            "bytes_of_weights": weights,
            "memory_bytes_per_second": speed,
        }
        print(
            f"{name}: {weights / 1e6:.0f} MB of weights a step; memory {speed / 1e9:.1f} GB/s, so"
            f" at most {speed / weights:,.0f} steps/s",
            flush=True,
        )
        for length, found in results[name]["by_length"].items():
            print(
                f"  length {length:>5}: {found['with']['median']:>9,.1f} tokens/s with the cache,"
                f" {found['without']['median']:>9,.1f} without",
                flush=True,
            )
        for batch in args.batches:
            r = results[name]["by_batch"][batch] = against_transformers(
                model if batch <= 8 else for_many, other, batch, args.rounds
            )
            print(
                f"  batch {batch:>3}: {r['tokens_per_second']:>9,.1f} tokens/s, transformers"
                f" {r['transformers_tokens_per_second']:>9,.1f}, ratio {r['ratio']['median']:.2f}"
                f" ({r['ratio']['min']:.2f} to {r['ratio']['max']:.2f}), same tokens:"
                f" {r['same_tokens']}",
                flush=True,
            )
    report.save("generation", {"results": results}, args)
    draw(results, args.figures / "generation.png")


if __name__ == "__main__":
    main()
