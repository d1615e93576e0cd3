"""What a variant does to the loss: 16-bit state, FP8, experts, Muon, each beside its base.

    python -m benchmarks.loss_of_variants [state fp8 experts muon] [--seeds 3] [--steps N] [--lr LR]

A group has a base, its first variant, and runs that differ from it in one thing. A seed sets the
weights and the order of samples, the same for all variants. Compared is the held-out loss after the
last step. Rounding alone makes two runs differ, so look at the spread.

    state      the default model in bf16: --optimizer-state fp32 and bf16; 500 steps of 8 sequences
    fp8        the default model, FP8 emulated: bf16; bf16 in two micro-batches, which shows what
               rounding alone does; three recipes; gradients in e4m3 instead of e5m2
    experts    a small Llama (h 64, L 2, s 128), dense and with experts in layer 1, one for each
               token: so training FLOPs differ by the router's alone, 6 h E for each token and layer
    muon       the same Llama, dense: AdamW and Muon at the same four rates; AdamW for as long as
               Muon takes. The time of a step is over AdamW's, both in turn in one process

At the default rate of 3e-3 rounding alone moves the loss by percents; state and fp8 have 1e-3. A
run takes one thread and up to 8 minutes. Run again, the command goes on with what its files lack.

Figures: docs/figures/fp8_training.svg, docs/figures/moe_load.svg, docs/figures/muon.svg
"""

import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

import fp8
from base import cpu
from base.model_config import flops_per_token
from benchmarks import report, steps, style
from benchmarks.report import spread

# Steps of which a point of a curve is the mean.
WINDOW = 50
# Loads count after this many steps; in a shorter run, after half of it.
SETTLED = 200
MUTATION = "e4m3 everywhere"
TOY = steps.TOY | dict(seq_length=32, global_batch_size=8)


# --- what is measured beside the loss -------------------------------------------------------------


class Watch:
    """Watches one run: `after_step` is called after each step, `numbers(losses)` at the end."""

    def __init__(self, trainer):
        self.trainer = trainer

    def after_step(self) -> None:
        pass


class StateBytes(Watch):
    def numbers(self, losses: list[float]) -> dict[str, float]:
        optimizer = self.trainer.optimizer
        weights = sum(p.nbytes for p in optimizer.parameters.values())
        held = weights + steps.state_bytes(optimizer)
        return {"bytes_per_parameter": held / self.trainer.num_parameters}


class Saturation(Watch):
    """Counts steps in which a tensor had values beyond its scale, and skipped steps."""

    saturated = 0

    def after_step(self) -> None:
        scaling = self.trainer.fp8
        self.saturated += bool(scaling) and "fp8_saturated" in scaling.warnings(scaling.report)

    def numbers(self, losses: list[float]) -> dict[str, float]:
        return {"saturated": self.saturated, "skipped": int(self.trainer.optimizer.skipped)}


class Loads(Watch):
    """Loads of experts over the mean of their layer: of the experts that were chosen, and by the
    largest logit, of the last routing of each step."""

    def __init__(self, trainer):
        super().__init__(trainer)
        # [step][expert layer][expert]
        self.chosen, self.by_logit = [], []
        self.last = {}
        for number, expert_layer in trainer.expert_layers.items():
            self.watch(number, expert_layer.routing)

    def watch(self, number: int, routing) -> None:
        original = routing.scores

        def scores(logits: Tensor, training: bool):
            if training:
                tokens, num_experts = logits.shape
                counts = logits.argmax(1).bincount(minlength=num_experts)
                self.last[number] = (counts * num_experts / tokens).tolist()
            return original(logits, training)

        routing.scores = scores

    def after_step(self) -> None:
        if self.last:
            self.by_logit.append(list(self.last.values()))
            self.chosen.append(self.trainer.task.learned.statistics()["expert_load"].tolist())

    def numbers(self, losses: list[float]) -> dict[str, float]:
        c, last = self.trainer.model_config, min(100, len(losses))
        dense = flops_per_token(dataclasses.replace(c, num_experts=0))
        # The step at which this run has used the FLOPs of a whole dense run.
        end = max(last, int(len(losses) * min(1, dense / flops_per_token(c))))
        found = {"training at the FLOPs of dense": mean(losses[end - last : end])}
        if not self.chosen:
            return found
        begin = SETTLED if len(losses) > SETTLED else len(losses) // 2
        chosen, by_logit = (torch.tensor(x[begin:]) for x in (self.chosen, self.by_logit))
        largest = chosen.amax(2)  # [steps, expert layers]
        return found | {
            "largest load": largest.max().item(),
            "mean load": largest.mean().item(),
            "share of loads up to 1.15": (largest <= 1.15).double().mean().item(),
            "mean load by logits": by_logit.amax((1, 2)).mean().item(),
        }


class StepTime(Watch):
    """Times a step beside AdamW's, of the same model on random tokens."""

    def numbers(self, losses: list[float]) -> dict[str, float]:
        fields = dataclasses.asdict(self.trainer.config)
        own, adamw = steps.Steps(fields), steps.Steps(fields, optimizer="adamw")
        contenders = {"own": own.step, "adamw": adamw.step}
        timed = {name: partial(report.timed, step) for name, step in contenders.items()}
        rounds = report.in_turn(timed, min(20, len(losses)))
        return {"step over AdamW's": report.ratio(rounds, "own", "adamw")["median"]}


# --- groups of variants ---------------------------------------------------------------------------


class Group(NamedTuple):
    """fields: of train.Config, of all variants; the first variant is the base. sequences: of the
    held-out text; s: tokens of each, by default as many as the model takes."""

    steps: int
    sequences: int
    fields: dict
    watch: Callable
    variants: dict[str, dict]
    s: int | None = None


SMALL = dict(model="tiny", num_layers=2, hidden_size=64, num_heads=4, ffn_hidden_size=256)
SMALL |= dict(seq_length=128, global_batch_size=32, precision="fp32", expert_every=2)
# Muon's step takes 1.09 times as long as AdamW's.
MUON_STEPS, MUON_TIME = 300, 1.09
RATES = (3e-3, 1e-2, 3e-2, 1e-1)
TOP_1 = dict(num_experts=8, router="topk")
GROUPS = {
    "state": Group(
        500,
        256,
        dict(precision="bf16", lr=1e-3, global_batch_size=8),
        StateBytes,
        {"fp32": dict(optimizer_state="fp32"), "bf16": dict(optimizer_state="bf16")},
        s=128,
    ),
    "fp8": Group(
        1000,
        256,
        dict(precision="bf16", lr=1e-3),
        Saturation,
        {
            "bf16": {},
            "bf16, other sums": dict(micro_batch_size=8),
            "current": dict(fp8="current"),
            "delayed": dict(fp8="delayed"),
            "block": dict(fp8="block"),
            MUTATION: dict(fp8="current"),
        },
    ),
    "muon": Group(
        MUON_STEPS,
        512,
        {name: value for name, value in SMALL.items() if name != "expert_every"},
        StepTime,
        {f"adamw, {lr:g}": dict(lr=lr) for lr in RATES}
        | {"adamw, as long": dict(lr=3e-3, steps=round(MUON_TIME * MUON_STEPS))}
        | {f"muon, {lr:g}": dict(lr=lr, optimizer="muon") for lr in RATES},
    ),
    "experts": Group(
        1500,
        512,
        SMALL,
        Loads,
        {
            "dense": {},
            "sinkhorn, 4 experts": dict(num_experts=4),
            "sinkhorn, 8 experts": dict(num_experts=8),
            "sinkhorn at temperature 1, 8 experts": dict(num_experts=8, router_temperature=1.0),
            "raw top-1, 8 experts": TOP_1 | dict(aux_loss=0.0, z_loss=0.0),
            "top-1 with losses, 8 experts": TOP_1,
        },
    ),
}


def measure(job: tuple) -> tuple[str, str, dict]:
    """(variant, seed, one run), on one thread. Losses are in nats per byte."""
    name, variant, seed, fields, toy = job
    group = GROUPS[name]
    torch.set_num_threads(1)
    cpu.set_up()
    patch = contextlib.nullcontext()
    if variant == MUTATION:
        patch = mock.patch.object(fp8.Recipe, "format", lambda self, operand: fp8.E4M3)
    fields = group.fields | (TOY if toy else {}) | fields | group.variants[variant]
    with patch:
        s = None if toy else group.s
        trainer, training, held_out = steps.on_corpus(fields | dict(seed=int(seed)), s)
        watch = group.watch(trainer)
        losses = []
        for _, loss in steps.losses(trainer, training):
            losses.append(loss)
            watch.after_step()
        run = {"held out": trainer.task.evaluate(held_out, 8 if toy else group.sequences)}
    run |= {"training": mean(losses[-100:])} | watch.numbers(losses)
    curve = [mean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]
    return variant, seed, run | {"curve": curve}


def row_of(runs: dict[str, dict], base: dict[str, dict]) -> dict:
    """The spread over seeds of each number of a variant; its held-out loss over that of the base
    with the same seed; its training curve over that of the base, the mean of the seeds."""
    names = [name for name in next(iter(runs.values())) if name != "curve"]
    row = {name: spread([run[name] for run in runs.values()]) for name in names}
    pairs = [(run, base[seed]) for seed, run in runs.items() if seed in base]
    if pairs:
        row["over base"] = spread([run["held out"] / b["held out"] for run, b in pairs])
        # A variant may have more steps.
        curves = torch.tensor([list(zip(run["curve"], b["curve"])) for run, b in pairs]).mT
        row["curve over base"] = (curves[:, 0] / curves[:, 1]).mean(0).tolist()
    return row


def measure_group(name: str, parser, args) -> None:
    group = GROUPS[name]
    runs = report.earlier(f"loss_{name}", parser, args)
    fields = dict(steps=args.steps or group.steps) | ({"lr": args.lr} if args.lr else {})
    variants = [list(group.variants)[i] for i in (0, -1)] if args.toy else list(group.variants)
    jobs = [
        (name, variant, str(seed), fields, args.toy)
        for seed in range(args.seeds)
        for variant in variants
        if str(seed) not in runs.get(variant, {})
    ]
    results = {"toy": args.toy, "group": name, "steps": fields["steps"], "results": runs}
    # Threads of this process's OpenMP do not survive a fork of it.
    context = multiprocessing.get_context("forkserver")
    with contextlib.nullcontext() if args.toy else context.Pool(os.cpu_count()) as pool:
        run_all = pool.imap_unordered if pool else map
        for variant, seed, run in run_all(measure, jobs):
            runs.setdefault(variant, {})[seed] = run
            base = runs.get(next(iter(group.variants)), {})
            results["rows"] = {v: row_of(runs[v], base) for v in group.variants if v in runs}
            print(f"{name}, seed {seed}, {variant}: held out {run['held out']:.4f}", flush=True)
            report.write(f"loss_{name}", results, args, threads=1)
    for variant, row in results["rows"].items():
        print(variant)
        report.print_results({key: x for key, x in row.items() if key != "curve over base"})
    report.finish(f"loss_{name}", results, args, draw, threads=1)


# --- figures --------------------------------------------------------------------------------------


def draw(results: dict, figures: Path) -> None:
    """results: what loss_NAME.json holds."""
    drawn = {"fp8": draw_curves, "experts": draw_load, "muon": draw_rates}
    if results["group"] in drawn:
        drawn[results["group"]](results["rows"], figures)


def draw_rates(rows: dict, figures: Path) -> None:
    """Held-out loss against the learning rate, of both optimizers."""
    figure, axes = style.figure(3)
    for name, colour in zip(("adamw", "muon"), style.SERIES):
        rates = [lr for lr in RATES if f"{name}, {lr:g}" in rows]
        spreads = [rows[f"{name}, {lr:g}"]["held out"] for lr in rates]
        style.band(axes, rates, spreads, colour, {"adamw": "AdamW", "muon": "Muon"}[name])
    style.ticks(axes, x={lr: f"{lr:g}" for lr in RATES})
    axes.set(xlabel="learning rate", ylabel="held-out loss, nats per byte")
    axes.legend()
    style.save(figure, figures / "muon.svg")


def draw_curves(rows: dict, figures: Path) -> None:
    """Training loss over that of bf16, means of 50 steps and of the seeds."""
    figure, axes = style.figure(3)
    for variant, row in list(rows.items())[1:]:
        ratios = row["curve over base"]
        ends = [WINDOW * (i + 1) for i in range(len(ratios))]
        axes.plot(ends, [100 * (ratio - 1) for ratio in ratios], label=variant)
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.set(xlabel="step", ylabel="training loss over that of bf16, %")
    axes.legend()
    style.save(figure, figures / "fp8_training.svg")


def draw_load(rows: dict[str, dict], figures: Path) -> None:
    loads = {
        "by the largest raw logit": "mean load by logits",
        "by the experts chosen": "mean load",
        "by the experts chosen, in the worst step": "largest load",
    }
    variants = [variant for variant in rows if "8 experts" in variant]
    figure, axes = style.figure(3.2)
    for i, (label, key) in enumerate(loads.items()):
        positions = [y + 0.22 * (i - 1) for y in range(len(variants))]
        spreads = [rows[variant][key] for variant in variants]
        style.ranges(axes, positions, spreads, style.SERIES[i], marker="Dos"[i], label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    style.rows_of(axes, [variant.removesuffix(", 8 experts") for variant in variants])
    style.ticks(axes, x=[1, 1.15, 1.5, 2, 3, 4, 6, 8])
    seeds = rows["dense"]["training"]["n"]
    axes.set(xlim=(0.95, 9), xlabel="largest load of an expert over the mean")
    axes.set_title(
        f"Load of 8 experts after step {SETTLED}. Mark: the median of {seeds} seeds; line: from the"
        " least to the most"
    )
    figure.legend(loc="outside lower center", ncols=3)
    style.save(figure, figures / "moe_load.svg")


def main():
    parser = report.arguments(__doc__, seeds=3)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--steps", type=int, help="default: those of the group")
    parser.add_argument("--lr", type=float, help="default: that of the group")
    args = report.parse(parser, seeds=1, steps=4)
    report.check_names(parser, args.groups, GROUPS)
    if not args.toy and args.steps and args.steps <= SETTLED and "experts" in args.groups:
        rule = f"loads of experts count after step {SETTLED}; 300 would do"
        report.refuse(parser, f"--steps {args.steps}: {rule}")
    for name in args.groups or GROUPS:
        measure_group(name, parser, args)


if __name__ == "__main__":
    main()
