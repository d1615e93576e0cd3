"""planning/as_rank.py: what it says of a rank is what that rank does.

Real gloo ranks train the same small model on values, and are counted by the same counters: every
collective, every byte, every FLOP must be equal, on every rank.
"""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import again
from torch.utils._pytree import tree_leaves

import fp8
import optimizer
import recompute
import train as trainer
from base.groups import Groups
from base.model_config import flops_per_token
from course import ranks
from course.parity import LLAMA, SMALL
from course.synthetic import dataset_for
from finetune.adapter_learning import TextPeftConfig
from models.runs import BertRun, T5Run
from planning import as_rank, substitutes
from planning.counters import Counters, Kept
from run import flags
from run.config import ConfigError, RunConfig
from run.task import Task

FEW = dict(precision="fp32", micro_batch_size=1, global_batch_size=4)
GPT = SMALL | FEW
LLAMA = LLAMA | FEW | dict(dropout=0.0)
SEQUENCE = GPT | dict(tp=2, sequence_parallel=True)
EXPERTS = GPT | dict(num_experts=4, expert_every=2, ep=2)
QWEN3 = LLAMA | dict(model="qwen3-0.6b", head_dim=12)
MISTRAL = LLAMA | dict(model="mistral-7b", sliding_window=5)
BLOOM = GPT | dict(model="bloom-560m", dropout=0.0)
FP8 = LLAMA | dict(fp8="delayed", fp8_skip=0, precision="bf16")
MUON = dict(optimizer="muon")
HYBRID = dict(data_parallel_replicate_degree=2)
BERT = GPT | dict(model="bert-base")
T5 = GPT | dict(model="t5-base", num_layers=4, head_dim=12, target_length=8)
# ranks: layouts
LAYOUTS = {
    1: [
        LLAMA | dict(head_chunk=8, precision="bf16", optimizer_state="bf16"),
        MISTRAL | dict(document_mask=True),
        QWEN3,
        BLOOM,
    ],
    2: [
        LLAMA | dict(zero_stage=3, recompute="full", recompute_layers=1),
        GPT | dict(pp=2, schedule="zb-h1", num_layers=4, layer_split=[3, 1]),
        GPT | dict(cp=2, cp_kind="all-to-all", recompute="selective"),
        FP8 | dict(tp=2, pp=1),
        EXPERTS | dict(zero_stage=1),
        LLAMA | dict(peft="lora", tp=2),
        T5 | dict(pp=2, layer_split=[3, 1]),
    ],
    4: [EXPERTS | HYBRID | dict(zero_stage=2)],
}
MORE = {
    1: [GPT | dict(recompute="selective")],
    2: [
        GPT | dict(tp=2),
        BERT | dict(tp=2, sequence_parallel=True),
        T5 | dict(tp=2, recompute="full"),
        QWEN3 | dict(tp=2),
        BLOOM | dict(tp=2, sequence_parallel=True),
        SEQUENCE | dict(recompute="selective"),
        GPT | dict(pp=2, virtual_stages=2, num_layers=4),
        GPT | dict(pp=2, virtual_stages=2, num_layers=4, schedule="zb-v"),
        LLAMA | dict(pp=2, virtual_stages=2, num_layers=4, schedule="dualpipe-v"),
        LLAMA | dict(cp=2, zero_stage=3),
        SEQUENCE | dict(document_mask=True, recompute="selective"),
        LLAMA | dict(document_mask=True, attention="explicit", zero_stage=3),
        LLAMA | dict(tp=2, sequence_parallel=True, recompute="full"),
        GPT | dict(zero_stage=1),
        GPT | dict(zero_stage=2),
        EXPERTS | dict(recompute="full"),
        GPT | dict(cp=2),
        LLAMA | dict(cp=2, cp_kind="all-to-all", recompute="full"),
        LLAMA | dict(cp=2, document_mask=True),
        MISTRAL | dict(cp=2),
        BLOOM | dict(cp=2, cp_kind="all-to-all"),
        FP8 | dict(cp=2),
        FP8 | dict(zero_stage=3),
        FP8 | dict(pp=2, schedule="zb-h1"),
        EXPERTS | LLAMA | dict(fp8="current", fp8_skip=0),
        LLAMA | dict(peft="lora", zero_stage=3, recompute="full"),
        LLAMA | dict(peft="lora", tp=2, sequence_parallel=True),
        EXPERTS | LLAMA | dict(router="topk", router_topk=2, capacity_factor=1.0),
    ],
    4: [
        EXPERTS | MUON | dict(tp=2, zero_stage=1),
        LLAMA | MUON | dict(pp=2, zero_stage=3),
        EXPERTS | SEQUENCE | dict(zero_stage=1),
        GPT | dict(tp=2, pp=2),
        SEQUENCE | dict(cp=2, zero_stage=1),
        SEQUENCE | dict(pp=2, schedule="gpipe", recompute="selective"),
        GPT | dict(pp=2, zero_stage=3),
        GPT | dict(tp=2, zero_stage=2, reduce_dtype="bf16"),
        GPT | HYBRID | dict(zero_stage=1, reduce_dtype="bf16"),
        LLAMA | HYBRID | dict(zero_stage=3, recompute="full"),
        LLAMA | HYBRID | dict(cp=2, zero_stage=3),
        EXPERTS | LLAMA | dict(zero_stage=3, router="topk"),
        EXPERTS | dict(cp=2, ep=4, router="topk"),
        EXPERTS | dict(cp=2, ep=4),
        EXPERTS | LLAMA | dict(cp=2, tp=2, router="topk", capacity_factor=1.0),
        LLAMA | dict(cp=2, pp=2, num_layers=4, schedule="zb-h1"),
        LLAMA | dict(cp=4),
    ],
}


class Apart:
    """Tokens and targets in tensors of their own, as they are on a GPU."""

    def __init__(self, dataset):
        self.dataset, self.s = dataset, dataset.s
        self.counted_tokens, self.positions = dataset.counted_tokens, dataset.positions

    def batch(self, samples):
        batch = self.dataset.batch(samples)
        return batch._make(x if x is None else x.contiguous().clone() for x in batch)


def config_of(layout: dict) -> RunConfig:
    for config_class in (BertRun, T5Run):
        if layout["model"] in config_class.presets:
            return config_class(**layout)
    return (TextPeftConfig if "peft" in layout else trainer.Config)(**layout)


def both(rank: int, world: int, layouts: list[dict]) -> list[tuple[dict, dict]]:
    """(what this rank does, what as_rank says) of each layout."""
    # as_rank has no kernels; with them fused attention on a CPU keeps no sums of rows
    configs = [config_of(layout | dict(kernels="off")) for layout in layouts]
    real = [measured(world, config) for config in configs]
    if dist.is_initialized():
        dist.destroy_process_group()
    said = [as_rank.report(config, trainer.Trainer, rank, world) for config in configs]
    return list(zip(real, map(dataclasses.asdict, said)))


def measured(world: int, config: trainer.Config) -> dict:
    """One real step of this rank, as fields of as_rank.Report."""
    groups = Groups()
    if world > 1:
        groups = Groups.make("cpu", world, **config.mesh)
    t = trainer.Trainer(config, torch.device("cpu"), groups, config.task())
    for layer in t.expert_layers.values():
        layer.routing.scores = partial(substitutes.even_scores, layer.routing.k)
    dataset = Apart(dataset_for(t))
    kept = Kept(p for stage in t.stages for p in stage.parameters())
    if t.schedule:
        # so that what W waits for counts
        as_rank.Actions(t.pipeline, kept)
    if config.fp8 == "delayed":
        # a step that has a history
        t.forward_backward(1, dataset)
        t.update(1)
        t.task.wait_for_parameters()
    # bytes of weights as on a GPU
    layouts = mock.patch.object(fp8, "in_both_layouts", substitutes.in_both_layouts)
    with kept, layouts, Counters() as counters:
        t.forward_backward(1, dataset)
        fp8_weights = as_rank.fp8_weights_of(t)
        t.update(1)
        t.task.wait_for_parameters()
    collectives = [as_rank.Collective(*key, n) for key, n in counters.counted(groups).items()]
    return as_rank.bytes_of(t, fp8_weights) | {
        "activations": kept.peak,
        "flops": counters.flops,
        "collectives": sorted(collectives),
    }


@pytest.mark.parametrize(
    "world, layouts", [*LAYOUTS.items(), *(again(*more) for more in MORE.items())]
)
def test_equals_real_ranks(world, layouts):
    results = ranks.run(both, world, world, layouts) if world > 1 else [both(0, 1, layouts)]
    for number, layout in enumerate(layouts):
        for rank in range(world):
            real, said = results[rank][number]
            for name, value in real.items():
                assert said[name] == value, (layout, rank, name)


@pytest.mark.parametrize(
    "layout",
    [
        GPT | dict(zero_stage=2, pp=4, schedule="zb-h1", num_layers=4),
        GPT | dict(zero_stage=3, pp=2, virtual_stages=2, num_layers=4),
        LLAMA | dict(zero_stage=3, recompute="full", tp=2),
        EXPERTS | dict(zero_stage=2, pp=2, schedule="gpipe"),
    ],
    ids=str,
)
def test_few_micro_batches_tell_of_all(layout):
    """Their counts and the schedule give what a step of all of them gives."""
    config = as_rank.as_on_a_cluster(trainer.Config(**layout | dict(global_batch_size=16)), 8)
    for rank in (0, 7):
        said = as_rank.report(config, trainer.Trainer, rank, 8)
        with substitutes.cluster(rank, 8):
            groups = Groups.make("cpu", 8, **config.mesh)
            t = trainer.Trainer(config, substitutes.META, groups, Task())
            assert said.micro_batches > 2
            step = as_rank.run_step(t, said.micro_batches)
        collectives = [as_rank.Collective(*key, n) for key, n in step.collectives.items()]
        assert said.collectives == sorted(collectives)
        assert (said.flops, said.activations) == (step.flops, step.kept.peak)


class OnTheGPU(Counters):
    """NCCL refuses tensors of the CPU. Here the meta device is the GPU. An even routing counts on
    the CPU (planning/substitutes.py)."""

    def note(self, function, args):
        super().note(function, args)
        for x in tree_leaves(args):
            if isinstance(x, torch.Tensor) and not x.is_meta and x.dtype != torch.int64:
                raise RuntimeError(f"{function} of a tensor of the CPU, {x.dtype}")


@pytest.mark.parametrize("world, layouts", LAYOUTS.items())
def test_ranks_send_tensors_of_the_gpu(world, layouts, monkeypatch):
    monkeypatch.setattr(as_rank, "Counters", OnTheGPU)
    for layout in layouts:
        as_rank.report(config_of(layout), trainer.Trainer, world - 1, world)


def test_a_tensor_of_the_cpu_is_seen(monkeypatch):
    monkeypatch.setattr(as_rank, "Counters", OnTheGPU)
    monkeypatch.setattr(optimizer, "norm_device", lambda *arguments: torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"allreduce.* of a tensor of the CPU, torch.float64"):
        as_rank.report(trainer.Config(**GPT, pp=2), trainer.Trainer, 0, 2)


def said(words: str) -> as_rank.Report:
    """What `train.py --as-rank R --of N` finds."""
    config, question = flags.parse_all(words.split(), 0, trainer.Config)
    return as_rank.report(config, trainer.Trainer, question["as_rank"], question["of"])


def test_a_trillion_parameters():
    """A rank in the middle of the 1T model of arXiv 2205.05198: its shapes are beyond any test's
    memory, its counts are the paper's."""
    report = said(
        "--as-rank 800 --of 3072 --model megatron-1t --tp 8 --pp 64 --sequence-parallel"
        " --recompute selective --global-batch-size 3072 --micro-batch-size 1"
    )
    s, h, t, m, layers = 2048, 25600, 8, 512, 2
    assert report.place == {"pp": (16, 64), "dp": (4, 6), "tp": (0, 8)}
    assert (report.layers, report.micro_batches) == ([32, 33], m)
    # equation 7 without the head, and softmax(q k) v once more
    flops = 72 * s * h**2 + 12 * s**2 * h + 4 * s**2 * h
    assert report.flops == m * layers * flops // t
    # four matrices of h² and two of 4 h², and what is whole or a bias
    weights = layers * (12 * h**2 // t + 7 * h // t + 6 * h)
    assert report.parameters == {"bfloat16": 2 * weights}
    assert report.gradients == {"float32": 4 * weights}
    assert report.optimizer_state == {"float32": 12 * weights}
    whole = 2 * s * h
    found = {(c.kind, c.group, c.bytes): c.count for c in report.collectives}
    # g twice in forward, for its inputs again in backward, and twice for gradients; then g-bar
    assert found["all-gather", "tp", whole] == 6 * m * layers
    assert found["reduce-scatter", "tp", whole] == 4 * m * layers
    for kind in ("send", "receive"):
        assert found[kind, "pp", whole // t] == 2 * m
    # 48 micro-batches are in flight there: p less the stage's number
    of_layer = recompute.layer_bytes(s, 1, h, 160, t, True, "selective")
    assert report.activations == pytest.approx(48 * layers * of_layer, rel=0.05)


def test_the_output_in_the_documentation():
    text = (Path(__file__).parent.parent / "docs" / "training.md").read_text()
    command, output = re.findall(
        r"^python train.py (--as-rank.*?)^```\n+```text\n(.*?)^```", text, re.M | re.S
    )[0]
    assert as_rank.lines(said(command.replace("\\\n", " "))) == output.splitlines()


MODELS = [GPT, LLAMA, QWEN3, MISTRAL, LLAMA | dict(mtp_layers=2)]


@pytest.mark.parametrize("flags", MODELS, ids=lambda flags: flags["model"])
def test_flops_are_those_of_the_model(flags):
    """Explicit attention computes all s² scores, also those out of a window."""
    config = trainer.Config(**flags | dict(attention="explicit"))
    tokens = config.global_batch_size * config.seq_length
    expected = flops_per_token(config.model_config()) * tokens
    assert as_rank.report(config, trainer.Trainer, 0, 1).flops == expected


TINY = "--model tiny --num-layers 2 --hidden-size 32 --num-heads 4 --ffn-hidden-size 64"


def test_the_command(tmp_path, monkeypatch, capsys):
    """It prints, writes what it is asked to write, and leaves no run."""
    monkeypatch.chdir(tmp_path)
    words = f"--as-rank 5 --of 8 --pp 2 --tp 2 {TINY} --precision fp16 --json answer.json"
    assert trainer.main(words.split()) == 0
    text = capsys.readouterr().out
    assert text.startswith("rank 5 of 8: pp 1 of 2, dp 0 of 2, tp 1 of 2\nlayers 1\n")
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["parameters"] == {"float16": answer["gradients"]["float32"] // 2}
    for collective in answer["collectives"]:
        assert f"{collective['bytes']:,}" in text
    assert [path.name for path in tmp_path.iterdir()] == ["answer.json"]


@pytest.mark.parametrize(
    "words, message",
    [
        ("--as-rank 4 --of 4", "--as-rank 4: ranks of --of 4 are numbered 0 to 3"),
        ("--as-rank 0", "--as-rank 0: of how many ranks?"),
        ("--of 4", "--of 4: belongs to --as-rank R --of N"),
        ("--as-rank 0 --of 0", "--of 0: must be from 1"),
        ("--as-rank 0 --of 6 --tp 4", "--tp 4: must divide the 6 ranks"),
        ("--as-rank 0 --of 32", "--global-batch-size 16: must be divisible by the 32"),
        ("--as-rank 0 --of 4 --load CKPT", "leave --load out"),
        (f"--as-rank 0 --of 1 {TINY} --json missing/FILE", "--json missing/FILE: cannot be"),
    ],
)
def test_refused_in_a_line(words, message, capsys):
    assert trainer.main(words.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_not_for_torchrun_nor_for_other_commands(monkeypatch, capsys):
    with pytest.raises(ConfigError, match="--as-rank: is for train"):
        flags.parse(["--as-rank", "0", "--of", "2"], 0)
    monkeypatch.setenv("RANK", "0")
    assert trainer.main(["--as-rank", "0", "--of", "2"]) == 2
    assert "not with torchrun" in capsys.readouterr().err
