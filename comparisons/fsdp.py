"""Stage 3 beside torch.distributed.fsdp.fully_shard: the same model, batches and optimizer on the same two ranks, in turn, in one run.

    python comparisons/fsdp.py [--rounds 25]

Every layer, the embedding and the head are units in both. Step: forward, backward, clipping by the global norm, AdamW. Peak bytes are those that PyTorch's
allocator handed out for tensors, by its profiler, from building the model on; what gloo allocates inside is in neither. The time line is of one of our
steps. (Llama's block, h 512, L 6, a 8, ffn 1376, s 256, V 8192, 4 sequences a rank, fp32, one thread a rank)
"""
import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import fsdp
import gpt
import ranks
import report
import sharding
import train
from report import spread, timed
from single_device import Random
from world import Groups, keep_freed_memory

SHAPE = dict(model="llama2-7b", num_layers=6, hidden_size=512, num_heads=8, ffn_hidden_size=1376, seq_length=256, vocab_size=8192)
SEQUENCES = 4                                                            # a rank


class Theirs:
    """The same steps, by torch's own parts."""

    def __init__(self):
        self.config = train.Config(**SHAPE, precision="fp32")
        with torch.device("meta"):
            model = gpt.GPT(self.config.model_config())
        sharding.init(model, 0, "cpu", torch.float32)
        for layer in (model.embedding, *model.blocks.values(), model.head, model):
            fully_shard(layer)
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=self.config.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(self, step: int, dataset) -> float:
        rank = dist.get_rank()
        batch = dataset.batch(range(rank * SEQUENCES, (rank + 1) * SEQUENCES))
        loss = self.model(batch.tokens, batch.labels).mean()             # theirs averages over ranks
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Ours:
    def __init__(self, stage: int = 3):
        config = train.Config(**SHAPE, precision="fp32", zero_stage=stage, global_batch_size=2 * SEQUENCES, warmup_steps=0, steps=10**9)
        self.trainer = train.Trainer(config, torch.device("cpu"), Groups(dp=dist.group.WORLD))

    def step(self, step: int, dataset) -> float:
        loss = self.trainer.forward_backward(step, dataset).item()
        self.trainer.update(step)
        return loss * 2                                                  # this rank's part of the mean


class Same(Random):
    """Every step has the same batch."""


def peak_bytes(kind, dataset) -> int:
    """The most that was allocated for tensors at any time, from building to the end of the second step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        x = kind()
        for step in (1, 2):
            x.step(step, dataset)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    return max(e["args"]["Total Allocated"] for e in events if e["name"] == "[memory]")


def time_line(ours: Ours, dataset) -> list:
    """(what, unit, start, end) of one step: compute, and all-gathers and reduce-scatters from their call to their end."""
    events, units = [], {unit: i for i, unit in enumerate(ours.trainer.gradients[0].units)}
    sharder, gather, scatter = ours.trainer.gradients[0], fsdp.all_gather, fsdp.reduce_scatter

    def noted(what, collective):
        def call(out, x, **options):
            start, work = time.perf_counter(), collective(out, x, **options)
            work.get_future().add_done_callback(lambda _: events.append((what, start, time.perf_counter())))
            return work
        return call
    return events


def on_rank(rank: int, rounds: int):
    keep_freed_memory()
    dataset = Random(8, SHAPE["seq_length"], SHAPE["vocab_size"])
    peaks = {"ours": peak_bytes(Ours, dataset), "theirs": peak_bytes(Theirs, dataset)}
    ours, theirs = Ours(), Theirs()
    losses = {"ours": [], "theirs": []}

    def step(name, x):
        dist.barrier()
        seconds = timed(lambda: (losses[name].append(x.step(len(losses[name]) + 1, dataset)), dist.barrier()))
        return seconds
    times = report.in_turn({"ours": lambda: step("ours", ours), "theirs": lambda: step("theirs", theirs)}, rounds)
    return times, peaks, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    times, peaks, losses = ranks.run(on_rank, 2, args.rounds)[0]
    print(spread([t["ours"] for t in times]), spread([t["theirs"] for t in times]), spread([t["ours"] / t["theirs"] for t in times]))
    print(peaks, losses["ours"][:3], losses["theirs"][:3])


if __name__ == "__main__":
    main()
