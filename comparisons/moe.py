"""Mixture of experts: what routers do to the load, what experts do to the loss, and what both cost.

    python comparisons/moe.py training [--seeds 3] [--steps 1500] [--toy] [--out DIR]
    python comparisons/moe.py speed [--rounds 15] [--toy] [--out DIR]

training (half an hour on 2 cores; figures/moe_load.svg, figures/moe_loss.svg): a small Llama on the
default corpus, dense and with experts in layer 1, one expert for each token. The routers: Sinkhorn
with 4 and 8 experts; Sinkhorn at temperature 1; the largest raw logit (router topk without its
losses); the same with its losses. All see the same samples. So their training FLOPs differ by the
router's alone, 6 h E for each token and layer. Shape: h 64, L 2, ffn 256, s 128, V 257, 32
sequences a step, fp32.

speed: an expert layer (8 experts, Sinkhorn, one for each token) beside a dense MLP with the same
active FLOPs, forward and backward, on one rank with one thread. On two ranks: half of the experts
on each (ep 2) beside all of them on both (data parallel), gradients summed over the ranks that
share them. And the share of a training step of the preset tiny-moe that its all-to-alls take.
"""

import json
import multiprocessing
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import style
import torch
import torch.distributed as dist
from report import spread, timed
from single_device import Random
from torch import Tensor, nn

import data
import fsdp
import gpt
import moe
import sharding
import train
from base.world import Groups, keep_freed_memory
from corpus.tokenizer import ByteTokenizer
from lessons import demo
from model_config import GPTConfig, flops_per_token
from proof import ranks

SMALL = dict(
    model="tiny",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    ffn_hidden_size=256,
    seq_length=128,
    global_batch_size=32,
    precision="fp32",
    device="cpu",
)
TOY = dict(hidden_size=32, ffn_hidden_size=64, seq_length=32, global_batch_size=8)
KINDS = {
    "dense": {},
    "sinkhorn, 4 experts": dict(num_experts=4),
    "sinkhorn, 8 experts": dict(num_experts=8),
    "sinkhorn at temperature 1, 8 experts": dict(num_experts=8, router_temperature=1.0),
    "raw top-1, 8 experts": dict(num_experts=8, router="topk", aux_loss=0.0, z_loss=0.0),
    "top-1 with losses, 8 experts": dict(num_experts=8, router="topk"),
}
# steps between evaluations
EVERY = 100
# loads count after this many steps
SETTLED = 200


def first_settled(steps: int) -> int:
    """The step after which loads count; of a shorter run, half of it."""
    return SETTLED if steps > SETTLED else steps // 2


# --------------------------------------------------------------------------------------------------
# training. A run is a dict; "raw" and "chosen" are loads [step][expert layer][expert], each over
# the mean of the layer: of the largest logits, and of the experts that were chosen.


def watch(number: int, routing: moe.Routing, raw: dict) -> None:
    """Keep in raw[number] each expert's load by the largest logit, of a layer's last routing in
    training."""
    original = routing.scores

    def scores(logits: Tensor, training: bool):
        if training:
            tokens, num_experts = logits.shape
            counts = logits.argmax(1).bincount(minlength=num_experts)
            raw[number] = counts * num_experts / tokens
        return original(logits, training)

    routing.scores = scores


def one_training(arguments: tuple[str, int, int, dict]) -> dict:
    """A run on one thread: training losses, held-out losses and loads."""
    kind, seed, steps, shape = arguments
    torch.set_num_threads(1)
    keep_freed_memory()
    config = train.Config(**shape, **KINDS[kind], expert_every=2, seed=seed, steps=steps)
    trainer = train.Trainer(config, torch.device("cpu"), Groups())
    s = shape["seq_length"]
    folder = data.prepare([], ByteTokenizer())
    train_set = data.Corpus(folder, s, seed)
    held_out = data.Corpus(folder, s, None, "held-out")
    # {layer: loads of this step}
    raw = {}
    for number, layer in trainer.expert_layers.items():
        watch(number, layer.routing, raw)
    tokens = shape["global_batch_size"] * s
    run = {
        "kind": kind,
        "seed": seed,
        "loss": [],
        "held_out": {},
        "raw": [],
        "chosen": [],
        "flops_per_step": tokens * flops_per_token(trainer.model_config),
    }
    for step in range(1, steps + 1):
        run["loss"].append(trainer.forward_backward(step, train_set).item())
        trainer.update(step)
        if trainer.expert_layers:
            run["raw"].append([raw[number].tolist() for number in trainer.expert_layers])
            run["chosen"].append(trainer.task.statistics()["expert_load"].tolist())
        if step % EVERY == 0 or step == steps:
            run["held_out"][step] = trainer.task.evaluate(held_out, 512 if steps > SETTLED else 8)
    return run


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def largest(loads: list[list[list[float]]]) -> list[float]:
    """Of each step: the largest load of any expert in any layer."""
    return [max(max(layer) for layer in step) for step in loads]


def print_run(run: dict, steps: int) -> None:
    text = (
        f"{run['kind']}, seed {run['seed']}: training {mean(run['loss'][-100:]):.4f},"
        f" held out {run['held_out'][steps]:.4f}"
    )
    if run["chosen"]:
        text += f", largest load {max(largest(run['chosen'])[first_settled(steps) :]):.3f}"
    print(text, flush=True)


def load_row(runs: list[dict], steps: int) -> dict:
    """The loads of one kind with experts, over the mean, of all seeds."""
    begin = first_settled(steps)
    # of each run: the largest load of each step and layer
    loads = [[max(layer) for step in run["chosen"][begin:] for layer in step] for run in runs]
    return {
        "largest_of_any_step_and_layer": spread([max(x) for x in loads]),
        "share_of_steps_and_layers_up_to_1.15": spread(
            [sum(load <= 1.15 for load in x) / len(x) for x in loads]
        ),
        "mean": spread([mean(x) for x in loads]),
        "raw_logits_mean": spread([mean(largest(run["raw"])[begin:]) for run in runs]),
        "over_all_of_these_steps": spread(
            [torch.tensor(run["chosen"][begin:]).mean(0).max().item() for run in runs]
        ),
    }


def table_row(runs: list[dict], dense: list[dict], steps: int) -> dict:
    """The results of one kind, beside the dense runs of the same seeds."""
    last = min(100, steps)
    row = {
        "training": spread([mean(run["loss"][-last:]) for run in runs]),
        "held_out": spread([run["held_out"][steps] for run in runs]),
        "flops": runs[0]["flops_per_step"] * steps,
    }
    at_equal_flops = []
    for run, dense_run in zip(runs, dense):
        # the step at which this run has used the FLOPs of the whole dense run
        end = int(steps * dense_run["flops_per_step"] / run["flops_per_step"])
        end = max(last, end)
        at_equal_flops.append(mean(run["loss"][end - last : end]))
    row["training_at_the_flops_of_dense"] = spread(at_equal_flops)
    if runs[0]["chosen"]:
        row["load_over_mean_after_200_steps"] = load_row(runs, steps)
    return row


def training(seeds: int, steps: int, shape: dict) -> dict:
    jobs = [(kind, seed, steps, shape) for seed in range(seeds) for kind in KINDS]
    runs = {kind: [] for kind in KINDS}
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        for run in pool.imap(one_training, jobs):
            runs[run["kind"]].append(run)
            print_run(run, steps)
    rows = {kind: table_row(runs[kind], runs["dense"], steps) for kind in KINDS}
    return {"steps": steps, "rows": rows}


# of the figure of loads: what: (key of its row, marker, place in its row)
LOADS = {
    "of the largest raw logits": ("raw_logits_mean", "D", -0.22),
    "of the experts chosen": ("mean", "o", 0),
    "of the experts chosen, in the worst step": ("largest_of_any_step_and_layer", "s", 0.22),
}


def draw_load(rows: dict[str, dict], path: Path) -> None:
    kinds = [kind for kind in KINDS if "8 experts" in kind]
    seeds = rows["dense"]["training"]["n"]
    figure, axes = style.figure(2.9)
    for colour, (label, (key, marker, shift)) in zip(style.SERIES, LOADS.items()):
        loads = [rows[kind]["load_over_mean_after_200_steps"][key] for kind in kinds]
        positions = [y + shift for y in range(len(kinds))]
        style.ranges(axes, positions, loads, colour, marker=marker)
        style.label(axes, label, (loads[0]["max"], positions[0]), colour)
    axes.axvline(1, color="black", linewidth=0.8)
    style.rows_of(axes, [kind.removesuffix(", 8 experts") for kind in kinds])
    ticks = [1, 1.15, 1.5, 2, 3, 4, 6, 8]
    axes.set_xscale("log")
    axes.set(xticks=ticks, xticklabels=ticks, xlim=(0.95, 9))
    axes.minorticks_off()
    axes.set(
        xlabel="largest load of an expert over the mean",
        title=f"8 experts, after step {SETTLED}; {seeds} seeds: median, least and most",
    )
    style.save(figure, path)


def draw_loss(rows: dict[str, dict], path: Path) -> None:
    """Each kind's range of seeds, less the median of dense."""
    panels = {
        "training, at equal FLOPs": "training_at_the_flops_of_dense",
        "held out": "held_out",
    }
    figure, both = style.figure(2.8, 1, 2, sharex=True, sharey=True)
    for axes, (title, key) in zip(both, panels.items()):
        base = rows["dense"][key]["median"]
        for y, kind in enumerate(KINDS):
            part = {name: rows[kind][key][name] - base for name in ("median", "min", "max")}
            colour = style.COLOURS["dense" if kind == "dense" else "experts"]
            style.ranges(axes, [y], [part], colour)
            if kind != "dense":
                text = f"{part['median']:+.3f}"
                style.label(axes, text, (part["median"], y), colour, (0, 8), ha="center")
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set(title=title, xlabel="loss less dense's median, nats per byte")
        style.rows_of(axes, list(KINDS))
    style.save(figure, path)


def draw(results: dict, figures: Path) -> None:
    """results: what moe_training.json holds."""
    draw_load(results["rows"], figures / "moe_load.svg")
    draw_loss(results["rows"], figures / "moe_loss.svg")


# --------------------------------------------------------------------------------------------------
# speed. A Llama's ffn is about 8 h / 3; tokens: (sequences, length); model: fields of tiny-moe.

SPEED = dict(h=512, ffn=1376, tokens=(8, 256), model={})
TOY_SPEED = dict(
    h=32, ffn=64, tokens=(2, 32), model=dict(hidden_size=64, ffn_hidden_size=64, seq_length=32)
)


class OneLayer(nn.Module):
    """A model of one MLP, or of one layer of experts, as fsdp.py, moe.py and sharding.py see it."""

    def __init__(self, size: dict, num_experts: int):
        super().__init__()
        fields = dict(
            num_layers=1,
            hidden_size=size["h"],
            num_heads=1,
            ffn_hidden_size=size["ffn"],
            llama=True,
        )
        self.config = GPTConfig(**fields)
        if num_experts:
            self.config = moe.MoEConfig(**fields, num_experts=num_experts)
        block = nn.Module()
        block.mlp = gpt.MLP(self.config)
        self.blocks = nn.ModuleDict({"0": block})

    def init_parameter(self, name: str, shape, generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu") * 0.02


class Timed:
    """Forward and backward of one layer on the same random activations, gradients summed. group:
    data-parallel ranks; expert_group: those that hold the same experts, where ranks hold different
    ones."""

    def __init__(
        self,
        size: dict,
        num_experts: int,
        seed: int,
        group: dist.ProcessGroup | None = None,
        expert_group: dist.ProcessGroup | None = None,
    ):
        with torch.device("meta"):
            self.model = OneLayer(size, num_experts)
        if num_experts:
            moe.apply(self.model, group if expert_group else None)
        sharding.init(self.model, 0, "cpu", torch.float32)
        self.gradients = None
        if group:
            self.gradients = fsdp.apply(self.model, group, expert_group=expert_group)
        generator = torch.Generator().manual_seed(seed)
        shape = (*size["tokens"], size["h"])
        self.x = torch.randn(shape, generator=generator).requires_grad_()
        self.grad_output = torch.randn(shape, generator=generator)

    def forward_backward(self) -> None:
        mlp = self.model.blocks["0"].mlp
        if self.gradients is None:
            self.model.zero_grad()
            mlp(self.x).backward(self.grad_output)
            return
        self.gradients.zero()
        self.gradients.last_backward()
        mlp(self.x).backward(self.grad_output)
        self.gradients.reduce_gradients()


def one_rank(rank: int, rounds: int, size: dict) -> list[dict]:
    """Seconds of each kind, round by round."""
    keep_freed_memory()
    layers = {"dense": Timed(size, 0, seed=0), "experts": Timed(size, 8, seed=0)}
    kinds = {
        kind: lambda layer=layer: timed(layer.forward_backward) for kind, layer in layers.items()
    }
    return report.in_turn(kinds, rounds)


def two_ranks(rank: int, rounds: int, size: dict) -> tuple[list[dict], list]:
    """(seconds of each kind, round by round; what `training_steps` returns)"""
    keep_freed_memory()
    world = dist.group.WORLD
    alone = demo.singleton_group()
    layers = {
        "dense, data parallel": Timed(size, 0, rank, world),
        "experts, data parallel": Timed(size, 8, rank, world),
        "experts, ep 2": Timed(size, 8, rank, world, alone),
    }

    def silent(layer: Timed) -> float:
        with report.without_all_reduce():
            return report.timed_together(layer.forward_backward)

    kinds = {}
    for kind, layer in layers.items():
        kinds[kind] = lambda layer=layer: report.timed_together(layer.forward_backward)
    for kind, layer in layers.items():
        kinds[f"{kind}, gradients not summed"] = lambda layer=layer: silent(layer)
    times = report.in_turn(kinds, rounds)
    return times, training_steps(Groups(dp=world, ep=world, edp=alone), rounds, size["model"])


def training_steps(groups: Groups, rounds: int, fields: dict) -> list[tuple[float, float]]:
    """Of each step of tiny-moe under ep 2: (its seconds; those of them in all-to-alls, waiting for
    the other rank included)."""
    config = train.Config(model="tiny-moe", ep=2, device="cpu", **fields)
    trainer = train.Trainer(config, torch.device("cpu"), groups)
    dataset = Random(
        config.global_batch_size, trainer.model_config.seq_length, trainer.model_config.vocab_size
    )
    seconds_in = []
    original = dist.all_to_all_single

    def all_to_all(*args, **options):
        start = time.perf_counter()
        work = original(*args, **options)
        seconds_in.append(time.perf_counter() - start)
        return work

    def step() -> None:
        trainer.forward_backward(1, dataset)
        trainer.update(1)

    dist.all_to_all_single = all_to_all
    times = []
    for _ in range(rounds + 2):
        seconds_in.clear()
        seconds = report.timed_together(step)
        times.append((seconds, sum(seconds_in)))
    dist.all_to_all_single = original
    # two steps warm up
    return times[2:]


def speed(rounds: int, size: dict) -> dict:
    one = ranks.run(one_rank, 1, rounds, size)[0]
    two, steps = ranks.run(two_ranks, 2, rounds, size)[0]
    tokens = size["tokens"][0] * size["tokens"][1]

    def ratio(times: list[dict], kind: str, other: str) -> dict:
        return spread([t[kind] / t[other] for t in times])

    return {
        "h": size["h"],
        "ffn": size["ffn"],
        "tokens": tokens,
        "dense_tokens_per_second": spread([tokens / t["dense"] for t in one]),
        "experts_tokens_per_second": spread([tokens / t["experts"] for t in one]),
        "experts_over_dense": ratio(one, "experts", "dense"),
        "ep_2_over_data_parallel": ratio(two, "experts, ep 2", "experts, data parallel"),
        "ep_2_over_data_parallel_without_sums": ratio(
            two,
            "experts, ep 2, gradients not summed",
            "experts, data parallel, gradients not summed",
        ),
        "ep_2_over_dense_data_parallel": ratio(two, "experts, ep 2", "dense, data parallel"),
        "all_to_all_share_of_a_step": spread([in_all / seconds for seconds, in_all in steps]),
        "step_ms": spread([seconds * 1e3 for seconds, _ in steps]),
    }


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("what", choices=("training", "speed"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=15)
    args = report.parse(parser)
    if args.toy:
        args.seeds = 1
        args.steps = 4
        args.rounds = 1
    elif args.steps <= SETTLED:
        report.refuse(
            parser, f"--steps {args.steps}: loads count after step {SETTLED}; 300 would do"
        )
    if args.what == "training":
        shape = SMALL | TOY if args.toy else SMALL
        results = training(args.seeds, args.steps, shape)
        report.save("moe_training", results, args)
        draw(report.saved("moe_training", args), args.figures)
        results = results["rows"]
    else:
        results = speed(args.rounds, TOY_SPEED if args.toy else SPEED)
        # the ranks had one thread each
        report.save("moe_speed", results, args, threads=1)
    for name, value in results.items():
        print(f"{name}: {json.dumps(value)}")


if __name__ == "__main__":
    main()
