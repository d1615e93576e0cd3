"""Mixture of experts: what routers do to the load, what experts do to the loss, and what both cost.

    python -m benchmarks.moe training [--seeds 3] [--steps 1500] [--toy] [--out DIR]
    python -m benchmarks.moe speed [--rounds 15] [--toy] [--out DIR]

training (half an hour on 2 cores; docs/figures/moe_load.svg, docs/figures/moe_loss.svg): a small
Llama on the default corpus, dense and with experts in layer 1, one expert for each token. The
routers: Sinkhorn with 4 and 8 experts; Sinkhorn at temperature 1; the largest raw logit (router
topk without its losses); the same with its losses. All see the same samples. So their training
FLOPs differ by the router's alone, 6 h E for each token and layer. Shape: h 64, L 2, ffn 256, s
128, V 257, 32 sequences a step, fp32.

speed: an expert layer (8 experts, Sinkhorn, one for each token) beside a dense MLP with the same
active FLOPs, forward and backward, on one rank with one thread. On two ranks: half of the experts
on each (ep 2) beside all of them on both (data parallel), gradients summed over the ranks that
share them. And the share of a training step of the preset tiny-moe that its all-to-alls take.
"""

import multiprocessing
from pathlib import Path
from statistics import mean
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
import gpt
import moe
import sharding
from base import cpu
from base.groups import Groups
from base.model_config import GPTConfig, flops_per_token
from benchmarks import report, steps, style, time_line
from benchmarks.report import ratio, scaled, spread
from course import demo, ranks

SMALL = dict(model="tiny", num_layers=2, hidden_size=64, num_heads=4, ffn_hidden_size=256)
SMALL |= dict(seq_length=128, global_batch_size=32, precision="fp32")
TOY = SMALL | dict(hidden_size=32, ffn_hidden_size=64, seq_length=32, global_batch_size=8)
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
    kind, seed, num_steps, shape = arguments
    torch.set_num_threads(1)
    cpu.set_up()
    fields = shape | KINDS[kind] | dict(expert_every=2, seed=seed, steps=num_steps)
    trainer, training, held_out = steps.on_corpus(fields)
    # {layer: loads of this step}
    raw = {}
    for number, layer in trainer.expert_layers.items():
        watch(number, layer.routing, raw)
    tokens = shape["global_batch_size"] * shape["seq_length"]
    run = {"kind": kind, "seed": seed, "loss": [], "held_out": {}, "raw": [], "chosen": []}
    run["flops_per_step"] = tokens * flops_per_token(trainer.model_config)
    for step, loss in steps.losses(trainer, training):
        run["loss"].append(loss)
        if trainer.expert_layers:
            run["raw"].append([raw[number].tolist() for number in trainer.expert_layers])
            run["chosen"].append(trainer.task.statistics()["expert_load"].tolist())
        if step % EVERY == 0 or step == num_steps:
            sequences = 512 if num_steps > SETTLED else 8
            run["held_out"][step] = trainer.task.evaluate(held_out, sequences)
    return run


def largest(loads: list[list[list[float]]]) -> list[float]:
    """Of each step: the largest load of any expert in any layer."""
    return [max(max(layer) for layer in step) for step in loads]


def load_row(runs: list[dict], num_steps: int) -> dict:
    """The loads of one kind with experts, over the mean, of all seeds."""
    begin = first_settled(num_steps)
    chosen = [run["chosen"][begin:] for run in runs]
    # of each run: the largest load of each step and layer
    loads = [[max(layer) for step in x for layer in step] for x in chosen]
    small = [sum(load <= 1.15 for load in x) / len(x) for x in loads]
    return {
        "largest_of_any_step_and_layer": spread([max(x) for x in loads]),
        "share_of_steps_and_layers_up_to_1.15": spread(small),
        "mean": spread([mean(x) for x in loads]),
        "raw_logits_mean": spread([mean(largest(run["raw"])[begin:]) for run in runs]),
        "over_all_of_these_steps": spread([torch.tensor(x).mean(0).max().item() for x in chosen]),
    }


def table_row(runs: list[dict], dense: list[dict], num_steps: int) -> dict:
    """The results of one kind, beside the dense runs of the same seeds."""
    last = min(100, num_steps)
    row = {
        "training": spread([mean(run["loss"][-last:]) for run in runs]),
        "held_out": spread([run["held_out"][num_steps] for run in runs]),
        "flops": runs[0]["flops_per_step"] * num_steps,
    }
    at_equal_flops = []
    for run, dense_run in zip(runs, dense):
        # the step at which this run has used the FLOPs of the whole dense run
        end = int(num_steps * dense_run["flops_per_step"] / run["flops_per_step"])
        end = max(last, end)
        at_equal_flops.append(mean(run["loss"][end - last : end]))
    row["training_at_the_flops_of_dense"] = spread(at_equal_flops)
    if runs[0]["chosen"]:
        row["load_over_mean_after_200_steps"] = load_row(runs, num_steps)
    return row


def training(seeds: int, num_steps: int, shape: dict) -> dict:
    jobs = [(kind, seed, num_steps, shape) for seed in range(seeds) for kind in KINDS]
    runs = {kind: [] for kind in KINDS}
    table = report.Table()
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        for run in pool.imap(one_training, jobs):
            runs[run["kind"]].append(run)
            row = {"kind": run["kind"], "seed": run["seed"], "training": mean(run["loss"][-100:])}
            loads = largest(run["chosen"])[first_settled(num_steps) :]
            load = max(loads) if loads else None
            table.row(row | {"held out": run["held_out"][num_steps], "largest load": load})
    rows = {kind: table_row(runs[kind], runs["dense"], num_steps) for kind in KINDS}
    return {"steps": num_steps, "rows": rows}


# of the figure of loads: what: (key of its row, marker, place in its row)
LOADS = {
    "by the largest raw logit": ("raw_logits_mean", "D", -0.22),
    "by the experts chosen": ("mean", "o", 0),
    "by the experts chosen, in the worst step": ("largest_of_any_step_and_layer", "s", 0.22),
}


def draw_load(rows: dict[str, dict], path: Path) -> None:
    kinds = [kind for kind in KINDS if "8 experts" in kind]
    seeds = rows["dense"]["training"]["n"]
    figure, axes = style.figure(3.2)
    for colour, (label, (key, marker, shift)) in zip(style.SERIES, LOADS.items()):
        loads = [rows[kind]["load_over_mean_after_200_steps"][key] for kind in kinds]
        positions = [y + shift for y in range(len(kinds))]
        style.ranges(axes, positions, loads, colour, marker=marker, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    style.rows_of(axes, [kind.removesuffix(", 8 experts") for kind in kinds])
    style.ticks(axes, x=[1, 1.15, 1.5, 2, 3, 4, 6, 8])
    axes.set_xlim(0.95, 9)
    axes.set(
        xlabel="largest load of an expert over the mean",
        title=f"Load of 8 experts after step {SETTLED}. Mark: the median of {seeds} seeds; line:"
        " from the least to the most",
    )
    figure.legend(loc="outside lower center", ncols=3)
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
            part = scaled(rows[kind][key], 1, less=base)
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
TOY_MODEL = dict(hidden_size=64, ffn_hidden_size=64, seq_length=32)
TOY_SPEED = dict(h=32, ffn=64, tokens=(2, 32), model=TOY_MODEL)


class OneLayer(nn.Module):
    """A model of one MLP, or of one layer of experts, as fsdp.py, moe.py and sharding.py see it."""

    def __init__(self, size: dict, num_experts: int):
        super().__init__()
        fields = dict(num_layers=1, num_heads=1, llama=True)
        fields |= dict(hidden_size=size["h"], ffn_hidden_size=size["ffn"])
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

    def __init__(self, size: dict, num_experts: int, seed: int, group=None, expert_group=None):
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
        self.gradients.zero_grad()
        self.gradients.next_backward_is_last()
        mlp(self.x).backward(self.grad_output)
        self.gradients.reduce_gradients()

    def together(self) -> float:
        """Seconds on all ranks."""
        return report.timed_together(self.forward_backward)

    def silent(self) -> float:
        """The same, gradients not summed."""
        with report.without_all_reduce():
            return self.together()


def one_rank(rank: int, rounds: int, size: dict) -> list[dict]:
    """Seconds of each kind, round by round."""
    cpu.set_up()
    layers = {"dense": Timed(size, 0, seed=0), "experts": Timed(size, 8, seed=0)}
    return report.in_turn({kind: layer.together for kind, layer in layers.items()}, rounds)


def two_ranks(rank: int, rounds: int, size: dict) -> tuple[list[dict], list]:
    """(seconds of each kind, round by round; what `training_steps` returns)"""
    cpu.set_up()
    world = dist.group.WORLD
    alone = demo.singleton_group()
    layers = {
        "dense, data parallel": Timed(size, 0, rank, world),
        "experts, data parallel": Timed(size, 8, rank, world),
        "experts, ep 2": Timed(size, 8, rank, world, alone),
    }
    kinds = {kind: layer.together for kind, layer in layers.items()}
    for kind, layer in layers.items():
        kinds[f"{kind}, gradients not summed"] = layer.silent
    times = report.in_turn(kinds, rounds)
    return times, training_steps(Groups(dp=world, ep=world, edp=alone), rounds, size["model"])


def training_steps(groups: Groups, rounds: int, fields: dict) -> list[dict]:
    """Of each step of tiny-moe under ep 2: its seconds, and those of them in all-to-alls, waiting
    for the other rank included."""
    tiny = steps.Steps(dict(model="tiny-moe", ep=2, device="cpu"), groups, **fields)
    events = []
    noting = time_line.noted(events, "all-to-all", dist.all_to_all_single)

    def step() -> dict:
        events.clear()
        seconds = tiny.together()
        return {"step": seconds, "all-to-all": sum(end - start for _, start, end in events)}

    with mock.patch.object(dist, "all_to_all_single", noting):
        return [result["step"] for result in report.in_turn({"step": step}, rounds)]


def speed(rounds: int, size: dict) -> dict:
    one = ranks.run(one_rank, 1, rounds, size)[0]
    two, of_steps = ranks.run(two_ranks, 2, rounds, size)[0]
    tokens = size["tokens"][0] * size["tokens"][1]
    dense, data, ep = "dense, data parallel", "experts, data parallel", "experts, ep 2"
    silent = ", gradients not summed"
    return {
        "h": size["h"],
        "ffn": size["ffn"],
        "tokens": tokens,
        "dense_tokens_per_second": spread([tokens / t["dense"] for t in one]),
        "experts_tokens_per_second": spread([tokens / t["experts"] for t in one]),
        "experts_over_dense": ratio(one, "experts", "dense"),
        "ep_2_over_data_parallel": ratio(two, ep, data),
        "ep_2_over_data_parallel_without_sums": ratio(two, ep + silent, data + silent),
        "ep_2_over_dense_data_parallel": ratio(two, ep, dense),
        "all_to_all_share_of_a_step": ratio(of_steps, "all-to-all", "step"),
        "step_ms": spread([t["step"] * 1e3 for t in of_steps]),
    }


def main():
    parser = report.arguments(__doc__, seeds=3, steps=1500, rounds=15)
    parser.add_argument("what", choices=("training", "speed"))
    args = report.parse(parser, seeds=1, steps=4, rounds=1)
    if not args.toy and args.steps <= SETTLED:
        rule = f"loads count after step {SETTLED}; 300 would do"
        report.refuse(parser, f"--steps {args.steps}: {rule}")
    if args.what == "training":
        results = training(args.seeds, args.steps, TOY if args.toy else SMALL)
        for kind, row in results["rows"].items():
            print(kind)
            report.print_results(row)
        report.finish("moe_training", results, args, draw)
        return
    results = speed(args.rounds, TOY_SPEED if args.toy else SPEED)
    report.print_results(results)
    # the ranks had one thread each
    report.save("moe_speed", results, args, threads=1)


if __name__ == "__main__":
    main()
