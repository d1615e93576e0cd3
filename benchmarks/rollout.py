"""Seconds of a step of reinforcement learning, by part: with the key-value cache and without it,
and under layouts of training and of generation.

    python -m benchmarks.rollout [--rounds 9] [--minutes 30] [--toy] [--out DIR]

A step of GRPO: 8 answers, then two updates. No token ends an answer, and weights are random: time
does not depend on them. Each rank has one thread.

    generation    the model writes the answers
    resharding    before: the weights go to the layout that writes (--rollout-tp, resharding.py)
    reference     the model at the start reads the answers: their log-probabilities
    training      forward, backward, optimizer, twice

The group `cache` has one rank, `layouts` two: generation has the layout of training, or "-> dp 2",
a whole copy of the weights on each rank. The variants of a group take turns; a ratio is of two in
the same round. Run again, the command adds rounds up to --rounds.

Figure: docs/figures/rollout.svg
"""

import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from base import cpu
from base.groups import Groups
from benchmarks import report, style, time_line
from benchmarks.steps import Steps
from course import ranks
from course.synthetic import Questions
from finetune.prompt_set import Question
from inference.rollout import write_answers

SHAPE = dict(model="gpt2", num_layers=4, hidden_size=256, num_heads=4, seq_length=576)
SHAPE |= dict(vocab_size=257, precision="fp32", device="cpu", command="reinforcement.py")
SHAPE |= dict(method="grpo", group_size=4, global_batch_size=8, micro_batch_size=1)
SHAPE |= dict(answer_tokens=512)
TOY = SHAPE | dict(num_layers=2, hidden_size=32, seq_length=32, answer_tokens=8, group_size=2)
TOY |= dict(global_batch_size=4)
# Without the cache a step takes minutes.
CACHE_ROUNDS = 2
# {way: flags}
CACHE = {"cache": {}, "no cache": {"cached": False}}
# Shorter answers, more rounds.
SHORT = {"seq_length": 192, "answer_tokens": 128}
LAYOUTS = {
    "dp 2": {},
    "tp 2": {"tp": 2},
    "tp 2 -> dp 2": {"tp": 2, "rollout_tp": 1},
    "ZeRO 3": {"zero_stage": 3},
    "ZeRO 3 -> dp 2": {"zero_stage": 3, "rollout_tp": 1},
}
# {group: (ranks, ways)}
GROUPS = {"cache": (1, CACHE), "layouts": (2, LAYOUTS)}
PARTS = "generation", "resharding", "reference", "training"


class Prompts(Questions):
    """32 tokens and more. No token ends an answer."""

    end_tokens = ()

    def __init__(self, config):
        super().__init__(config.vocab_size, config.group_size)
        self.config = config

    def question(self, sample: int):
        group = sample // self.group_size
        free = self.config.seq_length - self.config.answer_tokens
        length = free // 2 + group % (free // 2)
        generator = torch.Generator().manual_seed(group)
        ids = torch.randint(self.config.vocab_size, (length,), generator=generator)
        return Question(ids.tolist(), "", {})


class Rollout(Steps):
    """Steps of one way, whose seconds are measured."""

    def __init__(self, groups: Groups, cached: bool = True, **flags):
        super().__init__(flags, groups)
        self.dataset = Prompts(self.config)
        self.events = []
        task = self.trainer.task
        if not cached:
            task.writer.write = self.write_without_cache
        if task.writer.resharding:
            self.watch(task.writer.resharding, "copy", "resharding")
        self.watch(task.writer, "write", "generation")
        self.watch(task, "make_targets", "reference")

    def watch(self, owner, name: str, part: str) -> None:
        """Note each call of owner.NAME as a part."""
        setattr(owner, name, time_line.noted(self.events, part, getattr(owner, name)))

    def write_without_cache(self, prompts, samples, step, end_tokens):
        numbers = self.config.seed, step, self.config.answer_tokens
        options = dict(groups=self.trainer.groups, cached=False)
        return write_answers(self.trainer.model, prompts, samples, *numbers, end_tokens, **options)

    def seconds(self) -> dict[str, float]:
        """Seconds of the first step, by part and whole: all have the same random numbers."""
        barrier = dist.barrier if dist.is_initialized() else lambda: None
        whole = report.timed(lambda: (self.step(), barrier()))
        seconds = dict.fromkeys(PARTS, 0.0)
        for part, start, end in self.events:
            seconds[part] += end - start
        # The weights are moved inside of the call that writes.
        seconds["generation"] -= seconds["resharding"]
        seconds["training"] = whole - sum(seconds.values())
        lengths = {len(answer.ids) for answer in self.trainer.task.rows.answers}
        assert lengths == {self.config.answer_tokens}
        return seconds | {"step": whole}


def on_rank(rank: int, world: int, shape: dict, ways: dict) -> dict:
    """One round: {way: {part: seconds}}. Before it each way takes a step of few tokens."""
    cpu.set_up()
    results = {}
    for name, flags in ways.items():
        groups = Groups()
        if world > 1:
            groups = Groups.make("cpu", world, flags.get("tp", 1))
        Rollout(groups, **shape | flags | {"answer_tokens": 4}).seconds()
        results[name] = Rollout(groups, **shape | flags).seconds()
    return results


def measure(results: dict, args, keep) -> None:
    """results: {group: {round: {way: {part: seconds}}}}, completed; keep() writes the file."""
    for number in range(args.rounds):
        # What takes minutes comes last.
        for group, (world, ways) in reversed(GROUPS.items()):
            done = results.setdefault(group, {})
            enough = group == "cache" and number >= CACHE_ROUNDS
            if enough or str(number) in done or time.monotonic() > args.deadline:
                continue
            order = ways if number % 2 == 0 else dict(reversed(ways.items()))
            load = os.getloadavg()[0]
            shape = SHAPE | SHORT if group == "layouts" else SHAPE
            found = ranks.run(on_rank, world, world, TOY if args.toy else shape, order)[0]
            done[str(number)] = found | {"load_average": load}
            for way in ways:
                print(f"{group}, round {number}, {way}: {report.text_of(found[way])}", flush=True)
            keep()


def rounds_of(results: dict, group: str, part: str) -> list[dict]:
    """{way: seconds of a part} of each round"""
    rounds = results[group].values()
    return [{way: found[way][part] for way in GROUPS[group][1]} for found in rounds]


def seconds_of(results: dict, group: str, part: str) -> dict[str, dict]:
    """{way: spread over rounds of a part's seconds}"""
    rounds = rounds_of(results, group, part)
    return {way: report.spread([r[way] for r in rounds]) for way in rounds[0]}


def print_summary(results: dict) -> None:
    for group, (_, ways) in GROUPS.items():
        table = report.Table()
        for part in (*PARTS, "step"):
            table.row({"seconds": part, **seconds_of(results, group, part)})
        shares = {}
        for way in ways:
            rounds = [of_round[way] for of_round in results[group].values()]
            writing = [(r["generation"] + r["resharding"]) / r["step"] for r in rounds]
            shares[way] = report.format_spread(report.spread(writing), ".0%")
        table.row({"seconds": "share of generation and resharding", **shares})
    for group, part, way, over in (
        ("cache", "generation", "no cache", "cache"),
        ("cache", "step", "no cache", "cache"),
        ("layouts", "step", "tp 2 -> dp 2", "tp 2"),
        ("layouts", "step", "ZeRO 3 -> dp 2", "ZeRO 3"),
    ):
        ratio = report.ratio(rounds_of(results, group, part), way, over)
        print(f"{part}, {way} over {over}: {report.format_spread(ratio, '.2f')}")


# --- figure ---------------------------------------------------------------------------------------

COLOURS = dict(zip(PARTS, ("#0072b2", "#e69f00", "#999999", "#009e73")))


def draw(results: dict, figures: Path) -> None:
    """results: what rollout.json holds. A bar for each way; medians of the parts."""
    results = results["results"]
    figure, panels = style.figure(2.2, 1, 2)
    for axes, (group, (_, ways)) in zip(panels, GROUPS.items()):
        medians = {part: seconds_of(results, group, part) for part in PARTS}
        for y, way in enumerate(ways):
            parts = {part: found[way]["median"] for part, found in medians.items()}
            style.stack(axes, y, parts, COLOURS)
        style.rows_of(axes, list(ways))
        axes.set(xlabel="seconds of a step")
    panels[0].set(title="one rank")
    panels[1].set(title="two ranks")
    shown = panels[0].get_legend_handles_labels()
    figure.legend(*shown, ncols=len(PARTS), loc="outside lower left")
    style.save(figure, figures / "rollout.svg")


def main():
    parser = report.arguments(__doc__, rounds=9)
    minutes = "begin no round after so many minutes"
    parser.add_argument("--minutes", type=float, default=math.inf, help=minutes)
    args = report.parse(parser, rounds=1)
    args.deadline = time.monotonic() + 60 * args.minutes
    torch.set_num_threads(1)
    results = {"toy": args.toy, "results": report.earlier("rollout", parser, args)}
    measure(results["results"], args, lambda: report.write("rollout", results, args))
    print_summary(results["results"])
    report.finish("rollout", results, args, draw)


if __name__ == "__main__":
    main()
