"""All layouts that train.py accepts of a model, a number of ranks and a global batch.

Each technique's own check decides (tensor_parallel.check, ..), as in runtime/rules.py. Which sizes
divide the ranks and the batch is decided here.

    python -m planning.layouts      how many there are for GPT-3 175B on 1,024 ranks

Not covered: uneven --layer-split, --recompute-layers, --head-chunk; gpipe, which is as fast as 1f1b
and holds more.
"""

import itertools
from collections.abc import Iterator

import moe
import pipeline_parallel
import recompute
import sequence_parallel
import tensor_parallel
from model_config import FieldError
from planning.inputs import SOFTWARE, Layout, Software
from routers import MoEConfig


def accepts(check, *arguments) -> bool:
    try:
        check(*arguments)
    except FieldError:
        return False
    return True


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def layouts(
    model: MoEConfig,
    software: Software,
    ranks: int,
    global_batch: int,
    micro_batches: list[int] | None = None,
) -> Iterator[Layout]:
    """Smaller micro-batches first. micro_batches: only of these sizes."""
    meshes = list(meshes_of(model, ranks, global_batch))
    for b in micro_batches or divisors(global_batch):
        if model.router == "sinkhorn" and b * model.seq_length < model.num_experts:
            # no plan of so few tokens is even
            continue
        for tp, pp, dp, ep in meshes:
            if global_batch // dp % b:
                continue
            m = global_batch // dp // b
            for choice in itertools.product(
                schedules_of(model, software, pp, m),
                [False, True]
                if tp > 1 and accepts(sequence_parallel.check, model, tp)
                else [False],
                recompute_of(model),
                software.zero_stages if dp > 1 else [0],
            ):
                (schedule, v), sequence, granularity, stage = choice
                yield Layout(
                    tp, pp, dp, ep, v, schedule, b, global_batch, granularity, sequence, stage
                )


def meshes_of(
    model: MoEConfig, ranks: int, global_batch: int
) -> Iterator[tuple[int, int, int, int]]:
    """(tp, pp, dp, ep)"""
    for tp in divisors(ranks):
        if not accepts(tensor_parallel.check, model, tp, ranks):
            continue
        for pp in divisors(ranks // tp):
            dp = ranks // tp // pp
            if global_batch % dp or not accepts(pipeline_parallel.check, model.num_layers, pp):
                continue
            for ep in divisors(dp):
                if accepts(moe.check, model, ep, dp):
                    yield tp, pp, dp, ep


def schedules_of(
    model: MoEConfig, software: Software, pp: int, m: int
) -> list[tuple[str | None, int]]:
    """(schedule, virtual stages)"""
    if pp == 1:
        return [(None, 1)]
    found = [(name, 1) for name in ("1f1b", "zb-h1") if name in software.schedules]
    if m % pp == 0:
        for v in divisors(model.num_layers // pp)[1:]:
            found.append(("interleaved", v))
    return found


def recompute_of(model: MoEConfig) -> list[str]:
    """Fused attention has nothing that selective recomputation would compute again."""
    if model.attention == "fused":
        return ["none", "full"]
    return list(recompute.GRANULARITIES)


def main():
    # not above: whoever counts layouts needs no table of presets
    from runtime.presets import PRESETS

    found = list(layouts(MoEConfig(**PRESETS["gpt3-175b"][0]), SOFTWARE["train.py"], 1024, 1536))
    print(f"gpt3-175b, 1,024 ranks, 1,536 sequences: {len(found):,} layouts, for example")
    for layout in found[:: len(found) // 5]:
        print(layout)


if __name__ == "__main__":
    main()
