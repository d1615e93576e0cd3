"""planning/memory.py is held to what `train.py --as-rank` counts, which is held to real ranks
itself (test_as_rank.py); and to the formulas of the lessons and papers."""

import dataclasses

import numpy as np
import pytest
import torch
from parity import again

import recompute
import schedules
import train
from base.model_config import MoEConfig, least_parameters
from finetune.adapter_learning import TextPeftConfig
from models.runs import BertRun, T5Run
from planning import as_rank, memory, plan
from planning.inputs import TRAIN, Layout
from run.config import RunConfig
from run.presets import PRESETS
from sharding import num_parameters

# largest relative difference, of parameters, gradients and optimizer state; of activations
MARGIN, OF_ACTIVATIONS = 0.01, 0.03

ZB_H1 = dict(schedule="zb-h1", pp=4)
V = dict(pp=4, virtual_stages=2, num_layers=16)
SEQUENCE = dict(sequence_parallel=True)
EXPLICIT = dict(attention="explicit", dropout=0.1, model="gpt3-20b")
FULL = dict(recompute="full")
XL = dict(model="gpt2-xl")
GPT = dict(model="gpt3-5b")
LLAMA = dict(model="llama2-7b")
LONG = dict(model="llama2-13b", seq_length=32768, cp=8)
MIXTRAL = dict(model="mixtral-8x7b")
FP8 = dict(fp8="delayed")
HYBRID = dict(data_parallel_replicate_degree=4)
LATENT = LLAMA | dict(kv_rank=512, query_rank=1536, head_dim=192, rope_head_dim=64)
LATENT["value_head_dim"] = 128
LORA = dict(peft="lora", lora_rank=16)

# flags, ranks, the ranks that are asked
LAYOUTS = {
    "one rank": (dict(model="gpt2", micro_batch_size=4, global_batch_size=64), 1, [0]),
    "stage 3, full": (XL | FULL | dict(zero_stage=3, micro_batch_size=4), 8, [0]),
    "selective": (EXPLICIT | SEQUENCE | dict(tp=8, recompute="selective", zero_stage=1), 64, [0]),
    "scores": (EXPLICIT | dict(tp=4, pp=4, zero_stage=2), 64, [0, 63]),
    "gpipe": (XL | dict(num_heads=20, pp=2, schedule="gpipe", global_batch_size=64), 16, [0, 8]),
    "pipeline, full": (
        FULL | dict(model="llama2-70b", num_layers=80, tp=8, pp=16, zero_stage=1),
        512,
        [0, 300, 511],
    ),
    "interleaved, full": (LLAMA | FULL | dict(num_layers=16, pp=4, virtual_stages=4), 64, [0, 63]),
    "uneven": (GPT | dict(num_layers=12, pp=4, layer_split=[2, 4, 4, 2]), 16, [0, 4]),
    "zb-h1": (ZB_H1 | LLAMA | dict(zero_stage=1), 16, [0, 12]),
    "zb-v": (V | LLAMA | dict(schedule="zb-v", zero_stage=1), 16, [0, 12]),
    "zb-v, tied": (V | GPT | dict(schedule="zb-v", zero_stage=2), 16, [0, 4, 12]),
    "dualpipe-v": (V | LLAMA | dict(schedule="dualpipe-v", recompute="full"), 16, [0, 12]),
    "zb-h1, full": (ZB_H1 | LLAMA | FULL, 16, [0, 12]),
    "zb-h1, sequence": (ZB_H1 | SEQUENCE | GPT | dict(tp=4, zero_stage=2), 512, [0, 511]),
    "zb-h1, experts, full": (
        ZB_H1 | MIXTRAL | FULL | dict(num_layers=8, tp=2, ep=4, pp=2),
        16,
        [0, 15],
    ),
    "experts, interleaved": (
        MIXTRAL | dict(num_layers=32, tp=2, ep=8, pp=8, virtual_stages=4, zero_stage=3),
        512,
        [0, 511],
    ),
    "experts, capacity": (
        SEQUENCE | MIXTRAL | dict(tp=2, ep=4, zero_stage=3, capacity_factor=0.5),
        16,
        [0],
    ),
    "hybrid": (LLAMA | HYBRID | dict(num_layers=4, zero_stage=3), 32, [0]),
    "hybrid, experts": (MIXTRAL | HYBRID | dict(ep=4, tp=2, pp=2, zero_stage=1), 128, [0, 127]),
    "one expert on each rank": (MIXTRAL | dict(ep=8, zero_stage=2), 32, [0]),
    "two experts on each rank": (MIXTRAL | dict(ep=4, tp=2, zero_stage=1), 64, [0]),
    "small and shared experts": (
        dict(model="qwen1.5-moe-a2.7b", num_layers=4, first_dense_layers=1, router="bias")
        | dict(num_experts=64, aux_loss=0.0, tp=2, ep=4, pp=2, zero_stage=1),
        32,
        [0, 31],
    ),
    "experts in half of the layers": (
        GPT | dict(num_experts=4, expert_every=2, ep=4, pp=2),
        16,
        [0, 15],
    ),
    "ring": (SEQUENCE | LONG | dict(tp=4, pp=4, zero_stage=1), 512, [0, 511]),
    "heads": (
        dict(model="gemma-2b", num_kv_heads=4, seq_length=16384, cp=4, cp_kind="all-to-all"),
        16,
        [0],
    ),
    "ring, window": (dict(model="mistral-7b", cp=4), 8, [0]),
    "a window in one layer of four": (dict(model="mistral-7b", window_pattern="1000"), 8, [0]),
    "heads, alibi": (dict(model="bloom-7b1", tp=2, cp=4, cp_kind="all-to-all"), 8, [0]),
    "qwen3": (SEQUENCE | dict(model="qwen3-8b", tp=4, pp=2, zero_stage=1), 32, [0, 31]),
    "mistral, chunked head": (dict(model="mistral-7b", tp=4, head_chunk=1024), 8, [0]),
    "bloom": (dict(model="bloom-7b1", tp=4, pp=2), 8, [0, 4]),
    "falcon": (SEQUENCE | dict(model="falcon-180b", num_layers=4, tp=4), 8, [0]),
    "falcon, explicit": (EXPLICIT | dict(model="falcon-180b", num_layers=4, tp=4), 4, [0]),
    "nemotron": (FULL | dict(model="nemotron-3-8b", tp=2, pp=2, zero_stage=1), 8, [0, 4]),
    "nemotron, fp8": (FP8 | dict(model="nemotron-3-8b", num_layers=8, tp=4), 4, [0]),
    "zb-h1, selective": (
        EXPLICIT | dict(pp=2, schedule="zb-h1", recompute="selective"),
        16,
        [0, 8],
    ),
    "some layers, full": (
        LLAMA | FULL | dict(num_layers=16, pp=4, virtual_stages=2, recompute_layers=5),
        16,
        [0, 4, 12],
    ),
    "some layers, selective": (
        EXPLICIT | dict(pp=2, schedule="zb-h1", recompute="selective", recompute_layers=3),
        16,
        [0, 8],
    ),
    "latents": (SEQUENCE | LATENT | dict(tp=4, pp=2), 8, [0]),
    "latents, ring": (LATENT | dict(cp=4), 8, [0]),
    "latents, zb-h1": (ZB_H1 | LATENT, 4, [0]),
    "latents, exchanged": (LATENT | dict(cp=4, cp_kind="all-to-all", query_rank=0), 8, [0]),
    "fp32": (EXPLICIT | dict(precision="fp32", optimizer_state="bf16", tp=2), 8, [0]),
    "muon": (LLAMA | dict(optimizer="muon", tp=2, zero_stage=1), 8, [0]),
    "fp8": (FP8 | LLAMA, 8, [0]),
    "fp8, sequence": (FP8 | SEQUENCE | GPT | dict(tp=4), 8, [0]),
    "fp8, zb-h1, bytes of stage 3": (
        FP8 | ZB_H1 | LLAMA | dict(zero_stage=3, fp8_keep_bytes=True),
        16,
        [0, 12],
    ),
    "fp8, scores": (FP8 | EXPLICIT | dict(tp=2), 8, [0]),
    "fp8, experts": (FP8 | MIXTRAL | dict(tp=2, ep=4), 8, [0]),
    "lora": (LORA | LLAMA | FULL | dict(zero_stage=3), 8, [0]),
    "lora, sequence": (LORA | SEQUENCE | dict(model="llama2-70b", tp=8), 8, [0]),
    "lora, experts": (LORA | MIXTRAL | dict(tp=2, ep=4), 8, [0]),
    "lora, zb-h1, fp8": (LORA | FP8 | ZB_H1 | LLAMA, 16, [0, 12]),
    "state in 16 bits": (
        dict(model="llama2-70b", optimizer_state="bf16", tp=4, pp=2, sequence_parallel=True),
        8,
        [0, 4],
    ),
}


# BERT and T5 (models/), as LAYOUTS
BERT = dict(model="bert-large", num_layers=8)
T5 = dict(model="t5-v1.1-xl", num_layers=8, target_length=128)
RELU = dict(model="t5-3b", num_layers=8, target_length=128)
PLAIN = dict(dropout=0.0)
ENCODERS = {
    "bert, pipeline, sequence": (BERT | SEQUENCE | dict(tp=4, pp=4), 16, [0, 15]),
    "bert, fused, full": (BERT | PLAIN | FULL | dict(micro_batch_size=4, zero_stage=3), 8, [0]),
    "bert, heads": (BERT | PLAIN | dict(cp=4), 8, [0]),
    "bert, zb-h1": (BERT | ZB_H1, 16, [15]),
    "t5": (RELU, 1, [0]),
    "t5, gated, full": (T5 | FULL | dict(micro_batch_size=8), 1, [0]),
    "t5, selective": (T5 | dict(recompute="selective", tp=2), 2, [0]),
    "t5, sequence": (RELU | SEQUENCE | dict(tp=4, zero_stage=1), 8, [0]),
    "t5, fused, pipeline": (
        T5 | PLAIN | SEQUENCE | dict(tp=2, pp=4, zero_stage=2),
        16,
        [0, 4, 8, 15],
    ),
    "t5, a stage of both": (RELU | dict(pp=2, layer_split=[5, 3]), 4, [0, 2]),
    "t5, zb-h1": (T5 | ZB_H1, 8, [2, 7]),
    "t5, zb-h1, full": (T5 | ZB_H1 | FULL, 8, [2, 4]),
}

# what another of LAYOUTS covers in part
MORE = ["fp8", "fp8, sequence", "fp8, scores", "lora, experts", "lora, zb-h1, fp8", "qwen3"]
MORE += ["some layers, selective", "zb-h1, sequence", "zb-h1, full", "pipeline, full"]
MORE += ["zb-v, tied", "dualpipe-v"]
MORE += ["small and shared experts", "latents, ring", "latents, zb-h1", "latents, exchanged"]
MORE += ["falcon, explicit", "nemotron, fp8"]
MORE += ["zb-h1, selective", "two experts on each rank", "hybrid", "lora", "heads, alibi"]
MORE += ["ring, window", "a window in one layer of four", "bert, fused, full", "t5, gated, full"]
MORE += ["experts, interleaved", "bert, zb-h1", "bert, heads", "t5", "t5, sequence", "t5, zb-h1"]


def config_of(flags: dict) -> RunConfig:
    if "peft" in flags:
        return TextPeftConfig(**flags)
    for config_class in (train.Config, BertRun, T5Run):
        if flags["model"] in config_class.presets:
            return config_class(**flags)


@pytest.mark.parametrize(
    "name", [again(name) if name in MORE else name for name in LAYOUTS | ENCODERS]
)
def test_memory_is_what_as_rank_counts(name):
    flags, world, ranks = (LAYOUTS | ENCODERS)[name]
    flags = dict(num_layers=4, global_batch_size=1024, micro_batch_size=1) | flags
    config = config_of(flags)
    for rank in ranks:
        report = as_rank.report(config, train.Trainer, rank, world)
        counted = {
            "parameters": sum(report.parameters.values()),
            "gradients": sum(report.gradients.values()),
            "optimizer": sum(report.optimizer_state.values()),
            "activations": report.activations,
        }
        stage = report.place["pp"][0] if config.pp > 1 else 0
        layout = plan.layout_of(config, world)
        # as-rank runs on the meta device, where RMSNorm is made of single operations
        software = dataclasses.replace(plan.software_of(config), fused_rms_norm=False)
        predicted = memory.memory(config.model_config(), layout, software, stage)
        # what is there for a moment, as-rank does not count
        assert set(predicted) == {*counted, "gathered", "summed", "moment"}
        for part, size in counted.items():
            margin = OF_ACTIVATIONS if part == "activations" else MARGIN
            assert predicted[part] == pytest.approx(size, rel=margin), (rank, part)


@pytest.mark.parametrize("name", ["bert-base", "t5-base", "mt5-small"])
def test_parameters_of_encoders(name):
    config = config_of(dict(model=name)).model_config()
    with torch.device("meta"):
        assert 0.998 < least_parameters(config) / num_parameters(config.build()) < 1


# --- formulas by themselves -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, p, m, v",
    [
        ("gpipe", 4, 6, 1),
        ("1f1b", 4, 2, 1),
        ("1f1b", 4, 19, 1),
        ("interleaved", 4, 4, 3),
        ("interleaved", 4, 24, 2),
        ("zb-h1", 4, 3, 1),
        ("zb-h1", 4, 19, 1),
    ],
)
def test_in_flight_is_what_the_schedule_holds(name, p, m, v):
    """Also of more micro-batches than are looked at."""
    schedule = schedules.make(name, p, m, v)
    # of further ones memory.activations looks at no schedule but gpipe's
    looked_at = m if name == "gpipe" else min(m, 2 * p)
    states = [memory.in_flight(name, p, looked_at, v, rank) for rank in range(p)]
    assert [held[:, :v].sum(axis=1).max() for held in states] == schedules.in_flight(schedule)
    waiting = [held[:, v:].sum(axis=1).max() for held in states]
    assert waiting == schedules.deferred_weight_gradients(schedule)
    for held, actions in zip(states, schedule):
        level = np.zeros(2 * v, dtype=int)
        for action in actions:
            level[action.chunk] += schedules.IN_FLIGHT[action.op]
            level[v + action.chunk] += schedules.DEFERRED[action.op] * (name == "zb-h1")
            # no state holds more
            assert (held >= level).all(axis=1).any()


@pytest.mark.parametrize("row", recompute.ROWS)
@pytest.mark.parametrize("name", ["megatron-22b", "megatron-1t"])
def test_in_16_bits_a_layer_keeps_what_the_paper_says(name, row):
    sequence_parallel, granularity = recompute.ROWS[row]
    model = MoEConfig(**PRESETS[name][0])
    t = 1 if row == "no parallelism" else 8
    layout = Layout(tp=t, recompute=granularity, sequence_parallel=sequence_parallel)
    kept = memory.layer(model, layout, TRAIN, memory.BlockType()).kept
    s, h, a = model.seq_length, model.hidden_size, model.num_heads
    paper = recompute.layer_bytes(s, 1, h, a, t, sequence_parallel, granularity)
    assert kept == pytest.approx(paper, rel=1e-12)


def test_the_fullest_rank_is_found():
    """The last one holds the logits; the first one more micro-batches; with an uneven split any."""
    model = MoEConfig(**PRESETS["gpt3-5b"][0])
    for fields in (
        dict(layer_split=(2, 8, 12, 2)),
        dict(recompute="full"),
        dict(),
        dict(schedule="zb-h1", tp=2, sequence_parallel=True),
    ):
        layout = Layout(pp=4, global_batch_size=32, **fields)
        each = [memory.memory(model, layout, TRAIN, rank) for rank in range(4)]
        fullest = memory.memory(model, layout, TRAIN)
        assert sum(fullest.values()) == max(sum(parts.values()) for parts in each)
