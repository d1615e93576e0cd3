r"""Weights in 8 and 4 bits: perplexity, bytes and tokens per second beside 32 and 16 bits.

    python train.py --steps 500 --out runs/tiny
    python train.py --steps 500 --num-layers 6 --hidden-size 512 --num-heads 8 \
                    --ffn-hidden-size 1376 --seq-length 128 --lr 0.0015 --precision bf16 \
                    --out runs/larger
    python -m benchmarks.quantization --models runs/tiny runs/larger [--threads 1] [--rounds 7]
                                       [--sequences 1024]

Perplexity is that of held-out sequences of the default corpus; its change beside bf16 comes from
the differences of each sequence's losses, so its standard error is small. Tokens/s are greedy, at
batch 1 and 16; a prefill fills three quarters of the context. int8, int4 and bf16 multiply in
bfloat16. They take turns; a ratio is to bf16 in the same round.
"""

import itertools
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from statistics import stdev

import torch

import generate
import gpt
from base import cpu
from base.errors import InputError
from base.model_config import FieldError
from benchmarks import report
from course import demo
from inference import quantization, weight_layouts
from inference.loading import find_tokenizer, load_model, open_model
from inference.quantization import Int4Matrix, Int8Matrix
from run import data
from run.pretraining import Config

# (dtype, lays a model out for so many texts)
FORMATS = {
    "fp32": (torch.float32, weight_layouts.apply),
    "bf16": (torch.bfloat16, weight_layouts.apply),
    "int8": (torch.bfloat16, partial(quantization.apply, kind="int8")),
    "int4": (torch.bfloat16, partial(quantization.apply, kind="int4")),
}
# (of the blocks' matrices, of the head), for perplexity and bytes alone
VARIANTS = {
    "int4, groups of 64": (partial(Int4Matrix.of, group=64), Int8Matrix.of),
    "int4, groups of 128": (partial(Int4Matrix.of, group=128), Int8Matrix.of),
    "int4, the head too": (Int4Matrix.of, Int4Matrix.of),
}
BATCHES = (1, 16)
# Tokens.
PROMPT = 16
NEW = 64
TOY_NEW = 4
# The most that perplexity may change beside 16 bits.
LIMITS = {"int8": 0.005, "int4": 0.03}


def toy_model(dtype: torch.dtype) -> gpt.GPT:
    config = demo.tiny_config(llama=True, ffn_hidden_size=176, seq_length=32)
    return gpt.GPT(config).to(dtype).requires_grad_(False).eval()


# --- measuring ------------------------------------------------------------------------------------


@torch.inference_mode()
def losses(model: gpt.GPT, text: data.Corpus, sequences: int) -> torch.Tensor:
    """The mean loss of each sequence, [sequences], float64."""
    found = []
    for first in range(0, sequences, 32):
        batch = text.batch(range(first, min(first + 32, sequences)))
        found.append(model(batch.tokens, batch.targets).double().mean(1))
    return torch.cat(found)


def quality(loss: torch.Tensor, of_bf16: torch.Tensor) -> dict:
    """Perplexity; its change beside bf16, and the standard error of that."""
    difference = loss - of_bf16
    return {
        "perplexity": loss.mean().exp().item(),
        "change": math.expm1(difference.mean().item()),
        "standard_error": stdev(difference.tolist()) / math.sqrt(len(loss)),
    }


def decoding(model: gpt.GPT, batch: int, new: int) -> float:
    """Tokens per second, without the prefill."""
    g = torch.Generator().manual_seed(batch)
    prompts = torch.randint(256, (batch, PROMPT), generator=g).tolist()
    run = partial(generate.generate, model, prompts, temperature=0)
    seconds = [report.timed(partial(run, n)) for n in (new, 1)]
    return batch * (new - 1) / max(seconds[0] - seconds[1], 1e-9)


def prefill(model: gpt.GPT) -> float:
    """Seconds for the first token after a prompt."""
    prompt = [i % 256 for i in range(model.config.seq_length * 3 // 4)]
    return report.timed(lambda: generate.generate(model, [prompt], 1, temperature=0))


def measure(load: Callable, text: data.Corpus, sequences: int, rounds: int, new: int) -> dict:
    """load(dtype): the trained model. {kind: {what: number or spread}}"""
    results = {}
    of_kinds = {}
    speeds = {"prefill": {}} | {f"batch {batch}": {} for batch in BATCHES}
    for kind, (dtype, lay_out) in FORMATS.items():
        for batch in BATCHES:
            model = load(dtype)
            lay_out(model, batch)
            speeds[f"batch {batch}"][kind] = partial(decoding, model, batch, new)
            if batch == 1:
                size = quantization.weight_bytes(model)
                of_kinds[kind] = losses(model, text, sequences)
                mean = of_kinds[kind].mean().exp()
                print(f"  {kind}: {size:,} bytes, perplexity {mean:.4f}", flush=True)
                speeds["prefill"][kind] = partial(prefill, model)
        results[kind] = {"bytes": size}
    for kind, (of_blocks, of_head) in VARIANTS.items():
        # With quantised matrices, by the naive way.
        model = load(torch.bfloat16)
        head = model.head.output.weight
        weight_layouts.replace_linears(model)
        quantization.quantize(model, lambda w, ranks, make=of_blocks: make(w))
        quantization.replace_matrix(model.head.output, of_head(head))
        results[kind] = {"bytes": quantization.weight_bytes(model)}
        of_kinds[kind] = losses(model, text, sequences)
    for kind, loss in of_kinds.items():
        results[kind] |= quality(loss, of_kinds["bf16"])
    for name, kinds in speeds.items():
        turns = report.in_turn(kinds, rounds)
        for kind in FORMATS:
            unit, pair = f"tokens_per_second, {name}", (kind, "bf16")
            if name == "prefill":
                unit, pair = "prefill_seconds", ("bf16", kind)
            results[kind][unit] = report.spread([turn[kind] for turn in turns])
            results[kind][f"speed, {name}"] = report.ratio(turns, *pair)
    return results


def measure_models(args) -> dict:
    results = {}
    for path in args.models or ["toy"]:
        if args.toy:
            load, tokenizer = toy_model, data.make_tokenizer("bytes")
        else:
            load = lambda dtype, path=path: load_model(path, "cpu", dtype)[0]  # noqa: E731
            tokenizer = find_tokenizer(path, load_model(path)[1])
        config = load(torch.float32).config
        parameters = sum(p.numel() for p in load(torch.float32).parameters())
        paths = [str(report.HERE)] if args.toy else Config().data
        parts = data.prepare_corpora(paths, tokenizer, workers=os.cpu_count())
        # Sequences in the order of the stream.
        text = data.open_corpora(parts, config.seq_length, None, "held-out")
        sequences = min(args.sequences, text.num_sequences)
        name = f"L {config.num_layers}, h {config.hidden_size}"
        print(f"{name}: {parameters:,} parameters, {sequences} sequences", flush=True)
        new = TOY_NEW if args.toy else min(NEW, config.seq_length - PROMPT)
        kinds = measure(load, text, sequences, args.rounds, new)
        results[name] = {"parameters": parameters, "sequences": sequences, "kinds": kinds}
        report.finish("quantization", {"models": results}, args)
    return results


# --- output ---------------------------------------------------------------------------------------


def print_summary(models: dict) -> None:
    """The rows of the tables in docs/results.md."""
    table = report.Table()
    speeds = [f"speed, {x}" for x in ("batch 1", "batch 16", "prefill")]
    for name, model in models.items():
        for kind, row in model["kinds"].items():
            change = f"{row['change']:+.2%} (±{row['standard_error']:.2%})"
            cells = {"": f"{name}, {kind}", "perplexity": f"{row['perplexity']:.4f}"}
            cells |= {"change": change, "bytes": row["bytes"]}
            table.row(cells | {speed: row.get(speed, "") for speed in speeds})


def check(parser, args) -> None:
    """Before the first of the models is measured, which takes minutes."""
    if args.sequences < 2:
        report.refuse(parser, f"--sequences {args.sequences}: a standard error needs at least 2")
    for path in args.models or []:
        try:
            config, index, _ = open_model(path)
            quantization.check(config, "int8")
            find_tokenizer(path, index)
        except (InputError, FieldError) as e:
            report.refuse(parser, f"--models {path}: {e}")
        if config.seq_length < PROMPT + 2:
            rule = f"must be at least {PROMPT + 2}, for a prompt and two new tokens"
            report.refuse(parser, f"--models {path}: seq_length {config.seq_length} {rule}")


def main():
    parser = report.arguments(__doc__, threads=1, rounds=7, sequences=1024)
    parser.add_argument("--models", nargs="+", metavar="RUN", help="trained models")
    args = report.parse(parser, models=None, rounds=1, sequences=4)
    if not args.toy and not args.models:
        report.refuse(parser, "--models: name the runs of trained models; --toy needs none")
    check(parser, args)
    torch.set_num_threads(args.threads)
    cpu.keep_freed_memory()
    models = measure_models(args)
    print_summary(models)
    for model, (kind, limit) in itertools.product(models.values(), LIMITS.items()):
        if not args.toy and model["kinds"][kind]["change"] > limit:
            sys.exit("a quantised model is worse than its limit")


if __name__ == "__main__":
    main()
