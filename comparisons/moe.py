"""What routers do to the load, what experts do to the loss, and what both cost.

    python comparisons/moe.py training [--seeds 3] [--steps 1500] [--toy] [--out DIR]     moe_load.png, moe_loss.png; half an hour on 2 cores
    python comparisons/moe.py speed [--rounds 15] [--toy] [--out DIR]

training: a small Llama (h 64, L 2, ffn 256, s 128, V 257, 32 sequences a step, fp32) on the default
corpus, dense and with experts in layer 1, each token through one: Sinkhorn with 4 and 8, and with 8
at temperature 1; the raw logits (router topk without its losses); and with the losses. All see the
same samples, so training FLOPs differ by the router's alone, 6 h E a token and layer.

speed: the expert layer (8 experts, Sinkhorn, one for each token) beside a dense MLP with the same
active FLOPs, forward and backward, one rank and one thread; on two ranks, half of the experts each
beside all of them on both, gradients summed where they have to be; and the time that a training
step of the preset tiny-moe spends in all-to-alls."""

import json
import multiprocessing
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
import torch.distributed as dist
from report import spread, timed
from single_device import Random
from torch import nn

import data
import fsdp
import gpt
import moe
import sharding
import train
from corpus.tokenizer import ByteTokenizer
from lessons import ranks
from runtime.world import Groups, keep_freed_memory

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
# steps after which loads are looked at
SETTLED = 200
TOY = dict(hidden_size=32, ffn_hidden_size=64, seq_length=32, global_batch_size=8)


def settled(steps: int) -> int:
    return SETTLED if steps > SETTLED else steps // 2


def one_training(arguments: tuple[str, int, int, dict]) -> dict:
    """A run on one thread: training losses, held-out losses, and the largest load over the mean of
    every layer and step, of the raw logits and of what was chosen."""
    kind, seed, steps, shape = arguments
    torch.set_num_threads(1)
    keep_freed_memory()
    trainer = train.Trainer(
        train.Config(**shape, **KINDS[kind], expert_every=2, seed=seed, steps=steps),
        torch.device("cpu"),
        Groups(),
    )
    folder = data.prepare([], ByteTokenizer())
    s = shape["seq_length"]
    train_set = data.Corpus(folder, s, seed)
    held_out = data.Corpus(folder, s, None, "held-out")
    raw = {}

    def watch(number, decision, original):
        def scores(logits, training):
            if training:
                raw[number] = (
                    logits.argmax(1).bincount(minlength=logits.shape[1])
                    * logits.shape[1]
                    / len(logits)
                )
            return original(logits, training)

        decision.scores = scores

    for number, layer in trainer.expert_layers.items():
        watch(number, layer.decision, layer.decision.scores)
    found = {
        "kind": kind,
        "seed": seed,
        "loss": [],
        "held_out": {},
        "raw": [],
        "chosen": [],
        "flops_per_step": (
            shape["global_batch_size"] * s * gpt.flops_per_token(trainer.model_config)
        ),
    }
    for step in range(1, steps + 1):
        found["loss"].append(trainer.forward_backward(step, train_set).item())
        trainer.update(step)
        if trainer.expert_layers:
            found["raw"].append([raw[number].tolist() for number in trainer.expert_layers])
            found["chosen"].append(trainer.routing()["expert_load"])
        if step % EVERY == 0 or step == steps:
            found["held_out"][step] = trainer.evaluate(held_out, 512 if steps > SETTLED else 8)
    return found


def smooth(values: list[float], width: int = 50) -> list[float]:
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / min(width, i + 1) for i in range(len(values))
    ]


def largest(loads: list[list[list[float]]]) -> list[float]:
    """Of each step: the largest load of any expert in any layer."""
    return [max(max(layer) for layer in step) for step in loads]


def training(seeds: int, steps: int, shape: dict, figures: Path) -> dict:
    begin = settled(steps)
    last = min(100, steps)
    jobs = [(kind, seed, steps, shape) for seed in range(seeds) for kind in KINDS]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        runs = []
        for run in pool.imap(one_training, jobs):
            runs.append(run)
            print(
                f"{run['kind']}, seed {run['seed']}: training"
                f" {sum(run['loss'][-last:]) / last:.4f}, held out {run['held_out'][steps]:.4f}"
                + (
                    f", largest load {max(largest(run['chosen'])[begin:]):.3f}"
                    if run["chosen"]
                    else ""
                ),
                flush=True,
            )
    draw(runs, steps, figures)
    rows = {}
    for kind in KINDS:
        some = [run for run in runs if run["kind"] == kind]
        rows[kind] = {
            "training": spread([sum(run["loss"][-last:]) / last for run in some]),
            "held_out": spread([run["held_out"][steps] for run in some]),
            "flops": some[0]["flops_per_step"] * steps,
        }
        dense = [run for run in runs if run["kind"] == "dense"]
        ends = [
            max(last, int(steps * d["flops_per_step"] / run["flops_per_step"]))
            for run, d in zip(some, dense)
        ]
        at_equal_flops = [sum(run["loss"][end - last : end]) / last for run, end in zip(some, ends)]
        rows[kind]["training_at_the_flops_of_dense"] = spread(at_equal_flops)
        if some[0]["chosen"]:
            after = [
                [max(layer) for step in run["chosen"][begin:] for layer in step] for run in some
            ]
            rows[kind] |= {
                "load_over_mean_after_200_steps": {
                    "largest_of_any_step_and_layer": spread([max(a) for a in after]),
                    "share_of_steps_and_layers_up_to_1.15": spread(
                        [sum(x <= 1.15 for x in a) / len(a) for a in after]
                    ),
                    "mean": spread([sum(a) / len(a) for a in after]),
                    "raw_logits_mean": spread(
                        [sum(largest(run["raw"])[begin:]) / (steps - begin) for run in some]
                    ),
                    "over_all_of_these_steps": spread(
                        [torch.tensor(run["chosen"][begin:]).mean(0).max().item() for run in some]
                    ),
                }
            }
    return {"steps": steps, "rows": rows}


def draw(runs: list[dict], steps: int, folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    color = dict(
        zip(KINDS, ("black", "tab:cyan", "tab:blue", "tab:purple", "tab:red", "tab:orange"))
    )

    def band(axes, x, series, kind, **style):
        values = torch.tensor(series)
        axes.plot(x, values.mean(0), color=color[kind], linewidth=1.2, **style)
        axes.fill_between(
            x, values.amin(0), values.amax(0), color=color[kind], alpha=0.15, linewidth=0
        )

    figure, (over_time, bars) = plt.subplots(
        1, 2, figsize=(12, 4.4), layout="constrained", width_ratios=(3, 2)
    )
    with_experts = [kind for kind in KINDS if "8" in kind]
    for kind in with_experts:
        some = [run for run in runs if run["kind"] == kind]
        band(
            over_time,
            range(1, steps + 1),
            [smooth(largest(run["chosen"]), 20) for run in some],
            kind,
            label=kind.removesuffix(", 8 experts"),
        )
        if kind == "sinkhorn, 8 experts":
            band(
                over_time,
                range(1, steps + 1),
                [smooth(largest(run["raw"]), 20) for run in some],
                kind,
                linestyle=":",
                label="sinkhorn's raw logits, before balancing",
            )
    over_time.axhline(1, color="gray", linewidth=0.6)
    over_time.set(
        xlabel="step",
        ylabel="largest load of an expert over the mean",
        title="the busiest of 8 experts (mean of 20 steps; band: seeds)",
        ylim=(0.9, None),
    )
    over_time.set_yscale("log", base=2)
    over_time.set_yticks([1, 1.15, 1.5, 2, 4, 8], ["1", "1.15", "1.5", "2", "4", "8"])
    over_time.grid(alpha=0.3)
    over_time.legend(fontsize=8)
    shown = {
        "raw top-1": ("raw top-1, 8 experts", "chosen"),
        "top-1 with\nlosses": ("top-1 with losses, 8 experts", "chosen"),
        "sinkhorn,\nbefore": ("sinkhorn, 8 experts", "raw"),
        "sinkhorn,\nafter": ("sinkhorn, 8 experts", "chosen"),
    }
    for x, (label, (kind, which)) in enumerate(shown.items()):
        run = next(run for run in runs if run["kind"] == kind)
        loads = sorted(torch.tensor(run[which][-100:])[:, -1].mean(0).tolist(), reverse=True)
        bars.bar(
            [x + (i - 3.5) / 10 for i in range(8)],
            loads,
            0.09,
            color=color[kind],
            alpha=0.5 if which == "raw" else 1,
        )
    bars.axhline(1, color="gray", linewidth=0.6)
    bars.set_xticks(range(len(shown)), shown)
    bars.set(
        ylabel="load over the mean",
        title=f"each expert, steps {max(1, steps - 99)} to {steps}, seed 0",
    )
    figure.savefig(folder / "moe_load.png", dpi=120)
    plt.close(figure)

    figure, both = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    for kind in KINDS:
        some = [run for run in runs if run["kind"] == kind]
        flops = [some[0]["flops_per_step"] * step for step in range(1, steps + 1)]
        band(both[0], flops, [smooth(run["loss"], 100) for run in some], kind, label=kind)
        band(
            both[1],
            [flops[step - 1] for step in some[0]["held_out"]],
            [list(run["held_out"].values()) for run in some],
            kind,
            label=kind,
        )
    for axes, title in zip(
        both,
        ("training (mean of 100 steps; band: seeds)", "held out: each token by its raw logits"),
    ):
        axes.set(
            xlabel="training FLOPs", ylabel="loss, nats per byte", title=title, ylim=(None, 2.0)
        )
        axes.grid(alpha=0.3)
    both[0].legend(fontsize=8)
    figure.savefig(folder / "moe_loss.png", dpi=120)
    plt.close(figure)


# --------------------------------------------------------------------------------------------------

# a Llama's MLP: ffn about 8 h / 3
SPEED = dict(h=512, ffn=1376, tokens=(8, 256), model={})
TOY_SPEED = dict(
    h=32, ffn=64, tokens=(2, 32), model=dict(hidden_size=64, ffn_hidden_size=64, seq_length=32)
)


def make(
    size: dict,
    num_experts: int,
    group: dist.ProcessGroup | None = None,
    alone: dist.ProcessGroup | None = None,
):
    """(a model of one MLP or expert layer, what sums its gradients)."""
    model = nn.Module()
    model.config = gpt.GPTConfig(
        1, size["h"], 1, ffn_hidden_size=size["ffn"], llama=True, num_experts=num_experts
    )
    with torch.device("meta"):
        block = nn.Module()
        block.mlp = moe.MoE(model.config) if num_experts else gpt.MLP(model.config)
    model.blocks = nn.ModuleDict({"0": block})
    model.draw = lambda name, shape, generator: torch.randn(shape, generator=generator) * 0.02
    if alone:
        moe.apply(model, group)
    sharding.init(model, 0, "cpu", torch.float32)
    return model, fsdp.apply(model, group, expert_group=alone) if group else None


def once(model, gradients, x, grad) -> None:
    """Forward and backward, gradients at hand and summed."""
    if gradients:
        gradients.zero()
        gradients.last_backward()
    else:
        model.zero_grad()
    model.blocks["0"].mlp(x).backward(grad)
    if gradients:
        gradients.reduce_gradients()


def one_rank(rank: int, rounds: int, size: dict) -> list[dict]:
    keep_freed_memory()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*size["tokens"], size["h"], generator=g).requires_grad_()
    grad = torch.randn(*size["tokens"], size["h"], generator=g)
    models = {"dense": make(size, 0), "experts": make(size, 8)}
    return report.in_turn(
        {kind: lambda m=m: timed(lambda: once(*m, x, grad)) for kind, m in models.items()}, rounds
    )


def two_ranks(rank: int, rounds: int, size: dict):
    keep_freed_memory()
    world = dist.group.WORLD
    g = torch.Generator().manual_seed(rank)
    alone = next(
        group
        for group in [dist.new_group([r]) for r in range(2)]
        if group != dist.GroupMember.NON_GROUP_MEMBER
    )
    x = torch.randn(*size["tokens"], size["h"], generator=g).requires_grad_()
    grad = torch.randn(*size["tokens"], size["h"], generator=g)
    models = {
        "dense, data parallel": make(size, 0, world),
        "experts, data parallel": make(size, 8, world),
        "experts, ep 2": make(size, 8, world, alone),
    }
    all_reduce = dist.all_reduce

    def step(m) -> float:
        dist.barrier()
        return timed(lambda: (once(*m, x, grad), dist.barrier()))

    def silent(m) -> float:
        dist.all_reduce = lambda *args, **options: report.Done()
        seconds = step(m)
        dist.all_reduce = all_reduce
        return seconds

    kinds = {kind: lambda m=m: step(m) for kind, m in models.items()} | {
        f"{kind}, gradients not summed": lambda m=m: silent(m) for kind, m in models.items()
    }
    return report.in_turn(kinds, rounds), training_step(rank, world, alone, rounds, size["model"])


def training_step(rank: int, world, alone, rounds: int, fields: dict) -> list[tuple[float, float]]:
    """(seconds of a step of tiny-moe under ep 2, seconds of them in all-to-alls, waiting for the
    other rank included)."""
    config = train.Config(model="tiny-moe", ep=2, device="cpu", **fields)
    trainer = train.Trainer(config, torch.device("cpu"), Groups(dp=world, ep=world, edp=alone))
    c = trainer.model_config
    dataset = Random(config.global_batch_size, c.seq_length, c.vocab_size)
    spent = [0.0]
    original = dist.all_to_all_single

    def counted(*args, **options):
        start = time.perf_counter()
        work = original(*args, **options)
        spent[0] += time.perf_counter() - start
        return work

    dist.all_to_all_single = counted

    def step() -> tuple[float, float]:
        dist.barrier()
        spent[0] = 0.0
        seconds = timed(
            lambda: (trainer.forward_backward(1, dataset), trainer.update(1), dist.barrier())
        )
        return seconds, spent[0]

    times = [step() for _ in range(rounds + 2)][2:]
    dist.all_to_all_single = original
    return times


def speed(rounds: int, size: dict) -> dict:
    tokens = size["tokens"][0] * size["tokens"][1]
    one = ranks.run(one_rank, 1, rounds, size)[0]
    two, steps = ranks.run(two_ranks, 2, rounds, size)[0]
    # what the ranks had, for the record
    torch.set_num_threads(1)
    return {
        "h": size["h"],
        "ffn": size["ffn"],
        "tokens": tokens,
        "dense_tokens_per_second": spread([tokens / t["dense"] for t in one]),
        "experts_tokens_per_second": spread([tokens / t["experts"] for t in one]),
        "experts_over_dense": spread([t["experts"] / t["dense"] for t in one]),
        "ep_2_over_data_parallel": spread(
            [t["experts, ep 2"] / t["experts, data parallel"] for t in two]
        ),
        "ep_2_over_data_parallel_without_sums": spread(
            [
                t["experts, ep 2, gradients not summed"]
                / t["experts, data parallel, gradients not summed"]
                for t in two
            ]
        ),
        "ep_2_over_dense_data_parallel": spread(
            [t["experts, ep 2"] / t["dense, data parallel"] for t in two]
        ),
        "all_to_all_share_of_a_step": spread([spent / seconds for seconds, spent in steps]),
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
            parser, f"--steps {args.steps}: loads are looked at after step {SETTLED}; 300 would do"
        )
    if args.what == "training":
        results = training(args.seeds, args.steps, SMALL | TOY if args.toy else SMALL, args.figures)
    else:
        results = speed(args.rounds, TOY_SPEED if args.toy else SPEED)
    report.save(f"moe_{args.what}", results, args)
    for name, value in (results["rows"] if args.what == "training" else results).items():
        print(f"{name}: {json.dumps(value)}")


if __name__ == "__main__":
    main()
