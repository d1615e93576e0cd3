"""Mixture of experts: what an expert layer costs beside a dense MLP, and on two ranks.

    python -m benchmarks.moe [--rounds 15] [--toy] [--out DIR]

An expert layer (8 experts, Sinkhorn, one for each token) beside a dense MLP with the same active
FLOPs, forward and backward, on one rank with one thread. On two ranks: half of the experts on each
(ep 2) beside all of them on both (data parallel), gradients summed over the ranks that share them.
And the share of a training step of the preset tiny-moe that its all-to-alls take. The load and the
loss of routers are in loss_of_variants.py.
"""

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
from base.model_config import GPTConfig
from benchmarks import report, steps, time_line
from benchmarks.report import ratio, spread
from course import demo, ranks

# A Llama's ffn is about 8 h / 3; tokens: (sequences, length); model: fields of tiny-moe.
SPEED = dict(h=512, ffn=1376, tokens=(8, 256), model={})
TINY = dict(hidden_size=64, ffn_hidden_size=64, seq_length=32)
TOY = dict(h=32, ffn=64, tokens=(2, 32), model=TINY)


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


class Timed(steps.InTurn):
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

    def step(self) -> None:
        mlp = self.model.blocks["0"].mlp
        if self.gradients is None:
            self.model.zero_grad()
            mlp(self.x).backward(self.grad_output)
            return
        self.gradients.zero_grad()
        self.gradients.next_backward_is_last()
        mlp(self.x).backward(self.grad_output)
        self.gradients.reduce_gradients()


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
    """Each step of tiny-moe under ep 2: its seconds, and those of them in all-to-alls, waiting
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
    args = report.parse(report.arguments(__doc__, rounds=15), rounds=1)
    results = speed(args.rounds, TOY if args.toy else SPEED)
    report.print_results(results)
    # The ranks had one thread each.
    report.finish("moe_speed", results, args, threads=1)


if __name__ == "__main__":
    main()
