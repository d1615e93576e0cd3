"""Tokens per second of decoding: with and without the key-value cache, and beside `generate` of
Hugging Face transformers with the same weights, in turn, in one run.

    python -m benchmarks.generation [--threads 1] [--rounds 7] [--cases small gpt2-124m] [--toy]
    python -m benchmarks.gpu decode          GPT-2 124M, with CUDA graphs and without

Greedy, float32 on CPUs, bf16 on a GPU. Decoding is the time of a prompt of 32 tokens and 48 new
ones, less that of the same prompt and 1 new one. transformers runs as it comes (sdpa attention, its
dynamic cache). A ratio is the median over rounds of their seconds / ours. Both read all weights in
each step, so a large model comes near the speed of the memory, measured as a matrix times a vector.

Figure: docs/figures/generation.svg
"""

import copy
import dataclasses
import functools
import itertools
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest import mock

import torch

import families
import generate
import sharding
from base import cpu
from base.model_config import GPTConfig
from benchmarks import report, style
from benchmarks.report import median, spread, timed
from benchmarks.steps import write_model
from inference import cuda_graphs, huggingface, weight_layouts
from planning.inputs import H100
from planning.serving import ENGINES, Serving

SMALL = GPTConfig(num_layers=4, hidden_size=256, num_heads=8, seq_length=1024, vocab_size=257)
TINY = GPTConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=128, vocab_size=257)
CASES = {
    "small": SMALL,
    "small llama": dataclasses.replace(SMALL, ffn_hidden_size=688, llama=True),
    "gpt2-124m": GPTConfig(12, 768, 12, seq_length=1024, vocab_size=50257),
}
TOY = {"toy": TINY, "toy llama": dataclasses.replace(TINY, ffn_hidden_size=176, llama=True)}
# Tokens.
PROMPT = 32
NEW = 48
# On a GPU, texts at a time.
BATCHES = 1, 16, 64


def precision_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def build(config: GPTConfig, device: str):
    """(our model, transformers' model), with the same weights."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with torch.device("meta"):
        model = families.build(config)
    dtype = precision_of(device)
    sharding.init(model, 0, "cpu", dtype)
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder) / "ckpt"
        exported = Path(folder) / "hf"
        write_model(ours, model)
        huggingface.export_folder(ours, exported)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            exported, attn_implementation="sdpa", dtype=dtype
        )
        theirs = theirs.to(device).eval()
        # Until now they are mapped from the file.
        for p in theirs.parameters():
            p.data = p.data.clone()
    return model.to(device).eval().requires_grad_(False), theirs


def laid_out(model, texts: int):
    """A copy that is laid out for decoding `texts` texts at a time."""
    model = copy.deepcopy(model)
    weight_layouts.apply(model, texts)
    return model


def against_transformers(model, theirs, batch: int, rounds: int) -> dict:
    """Decoding of `batch` prompts by both, in turn."""
    g = torch.Generator().manual_seed(batch)
    prompts = torch.randint(256, (batch, PROMPT), generator=g).to(next(model.parameters()).device)
    greedy = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
    greedy |= dict(attention_mask=torch.ones_like(prompts))

    def theirs_generate(n: int) -> list[list[int]]:
        ids = theirs.generate(prompts, max_new_tokens=n, min_new_tokens=n, **greedy)
        return ids[:, PROMPT:].tolist()

    def decode(function):
        return timed(lambda: function(NEW)) - timed(lambda: function(1))

    # As the commands do: it keeps CUDA graphs.
    options = dict(temperature=0, runner=generate.ModelRunner(model))
    ours_generate = partial(generate.generate, model, prompts.tolist(), **options)
    equal = ours_generate(NEW) == theirs_generate(NEW)
    kinds = {"ours": partial(decode, ours_generate), "theirs": partial(decode, theirs_generate)}
    times = report.in_turn(kinds, rounds)
    tokens = batch * (NEW - 1)
    return {
        "tokens_per_second": tokens / median([t["ours"] for t in times]),
        "transformers_tokens_per_second": tokens / median([t["theirs"] for t in times]),
        "ratio": report.ratio(times, "theirs", "ours"),
        "same_tokens": equal,
    }


def seconds_per_token(model, length: int, new: int, cached: bool) -> float:
    """Seconds of decoding, over `new` tokens of one text after a prompt of `length` tokens."""
    prompt = [[1 + i % 200 for i in range(length)]]

    def run(n):
        return timed(lambda: generate.generate(model, prompt, n, temperature=0, cached=cached))

    return (run(new + 1) - run(1)) / new


def by_length(model, lengths: list[int], rounds: int) -> dict:
    """Tokens/s of one text at a length, with the cache and without."""
    results = {}
    for length in lengths:
        kinds = {
            "with": partial(seconds_per_token, model, length, 16, True),
            "without": partial(seconds_per_token, model, length, 2, False),
        }
        times = report.in_turn(kinds, rounds)
        results[length] = {kind: spread([1 / t[kind] for t in times]) for kind in kinds}
    return results


def memory_speed(config: GPTConfig, device: str) -> float:
    """Bytes/s at which matrices are multiplied by a vector, the limit of a step at batch 1: as many
    matrices as make up 256 MiB, one after the other; of a toy 1 MiB."""
    rows = max(config.vocab_size, config.ffn_hidden_size)
    new = partial(torch.randn, device=device, dtype=precision_of(device))
    total = 2**20 if config in TOY.values() else 256 * 2**20
    count = max(1, total // (4 * rows * config.hidden_size))
    matrices = [new(rows, config.hidden_size) for _ in range(count)]
    multiply = partial(torch.nn.functional.linear, new(1, config.hidden_size))
    seconds = [timed(lambda: [multiply(matrix) for matrix in matrices]) for _ in range(7)]
    return sum(matrix.nbytes for matrix in matrices) / median(seconds)


def measure(name: str, config: GPTConfig, args) -> dict:
    """All measurements of one model, printed as they come."""
    model, theirs = build(config, args.device)
    weights = sum(p.nbytes for p in (*model.blocks.parameters(), *model.head.parameters()))
    speed = memory_speed(config, args.device)
    print(
        f"{name}: {weights / 1e6:.0f} MB of weights a step; memory {speed / 1e9:.1f} GB/s, so"
        f" at most {speed / weights:,.0f} steps/s; tokens/s with and without the cache:",
        flush=True,
    )
    lengths = by_length(laid_out(model, 1), args.lengths, args.rounds)
    table = report.Table()
    for length, speeds in lengths.items():
        table.row({"model": name, "length": length} | speeds)
    batches = {}
    table = report.Table()
    for batch in args.batches:
        ours = laid_out(model, batch)
        batches[batch] = against_transformers(ours, theirs, batch, args.rounds)
        table.row({"model": name, "batch": batch} | batches[batch])
        linears = [m for m in ours.modules() if isinstance(m, weight_layouts.DecodeLinear)]
        layouts = {str(list(m.matrix.shape)): m.layout.__name__ for m in linears}
        batches[batch]["layouts"] = layouts
    return {
        "by_batch": batches,
        "by_length": lengths,
        "bytes_of_weights": weights,
        "memory_bytes_per_second": speed,
    }


# --- on a GPU, of gpu.py --------------------------------------------------------------------------


def our_steps(model, batch: int, new: int) -> dict:
    """Greedy decoding, after a text in which CUDA graphs are captured: tokens/s by the median of
    the steps, and the slowest ones."""
    prompts = torch.randint(model.config.vocab_size, (batch, PROMPT)).tolist()
    options = dict(temperature=0, runner=generate.ModelRunner(model))
    generate.generate(model, prompts, new, **options)
    ticks = [time.perf_counter()]
    for _ in generate.stream(model, prompts, new, **options):
        ticks.append(time.perf_counter())
    each = [b - a for a, b in itertools.pairwise(ticks[1:])]
    return {
        "tokens/s": batch / median(each),
        "ms a step": 1e3 * median(each),
        "ms to the first token": 1e3 * (ticks[1] - ticks[0]),
        "ms, the slowest steps": [1e3 * t for t in sorted(each)[-5:]],
    }


def cases_of(stage: str, args) -> dict:
    """{name: a function that measures it}"""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = TINY if args.toy else CASES["gpt2-124m"]
    new, rounds = (4, 1) if args.toy else (256, 3)
    pair = functools.cache(lambda: build(config, device))

    def ours(batch: int, graphs: bool = True) -> dict:
        can_capture = cuda_graphs.can_capture if graphs else lambda *_: False
        with mock.patch.object(cuda_graphs, "can_capture", can_capture):
            return our_steps(laid_out(pair()[0], batch), batch, new)

    def both(batch: int) -> dict:
        row = against_transformers(laid_out(pair()[0], batch), pair()[1], batch, rounds)
        theirs = row["transformers_tokens_per_second"]
        return {"tokens/s of transformers": theirs, "times ours": row["ratio"]} | row

    batches = BATCHES[:1] if args.toy else BATCHES
    found = {f"batch {n}": partial(ours, n) for n in batches}
    found |= {f"transformers, batch {n}": partial(both, n) for n in batches}
    return found | {"batch 16, no graphs": partial(ours, 16, graphs=False)}


def predicted(stage: str, args) -> dict[str, str]:
    """Steps on an H100 in the middle of an answer, predicted by planning/serving.py."""
    found = {}
    for graphs, engine in (("", "graphs"), (", no graphs", "eager")):
        on = Serving(H100, ENGINES[engine], CASES["gpt2-124m"])
        for batch in BATCHES:
            seconds = on.step(batch, PROMPT + 128)
            found[f"batch {batch}{graphs}"] = f"{batch / seconds:,.0f} tokens/s"
    return found


# --- the figure -----------------------------------------------------------------------------------


def draw(results: dict, figures: Path) -> None:
    """results: what generation.json holds."""
    figure, (left, right) = style.figure(3.4, 1, 2)
    for (name, of_model), colour in zip(results["results"].items(), style.SERIES):
        lengths = of_model["by_length"]
        for kind, line in (("with", "o-"), ("without", "o--")):
            medians = [speeds[kind]["median"] for speeds in lengths.values()]
            left.plot([int(n) for n in lengths], medians, line, color=colour, label=name)
        batches = of_model["by_batch"]
        ratios = [result["ratio"] for result in batches.values()]
        style.band(right, [int(batch) for batch in batches], ratios, colour, name)
    left.set_title("tokens/s of one text (dashed: without the cache)")
    left.set_xlabel("tokens in the context")
    style.ticks(left, x=[int(n) for n in of_model["by_length"]], y=[1, 3, 10, 30, 100, 300])
    right.axhline(1, color="black", linewidth=0.8)
    right.set(title="tokens/s over transformers' (band: least to most)", xlabel="texts at a time")
    style.ticks(right, x=[int(n) for n in of_model["by_batch"]])
    right.set_ylim(0, None)
    for axes in (left, right):
        style.label_ends(axes)
    style.save(figure, figures / "generation.svg")


def main():
    sizes = dict(batches=[1, 2, 4, 8, 16, 32, 64], lengths=[32, 128, 512, 960])
    parser = report.arguments(__doc__, threads=1, rounds=7, **sizes)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    report.device(parser)
    args = report.parse(parser, rounds=1, batches=[1, 16], lengths=[8, 40], cases=TOY)
    torch.set_num_threads(args.threads)
    if args.device == "cpu":
        # For both.
        cpu.keep_freed_memory()
    results = {name: measure(name, (CASES | TOY)[name], args) for name in args.cases}
    report.finish("generation", {"results": results}, args, draw)


if __name__ == "__main__":
    main()
