"""The planner, and as-rank, know every flag of a training run: each changes a prediction, or stands
on the list of those that cannot, with the reason (plan.UNPREDICTED)."""

import dataclasses
from unittest import mock

import pytest

import planner
import schedules
import train
from finetune.adapter_learning import TextPeftConfig
from planning import as_rank, memory, plan
from planning.inputs import H100

SHAPE = dict(
    model="gpt2", num_layers=4, hidden_size=256, num_heads=8, seq_length=128, vocab_size=512
)
EXPERTS = dict(num_experts=4, router="topk")
PIPELINE = dict(pp=2, micro_batch_size=1)
EXPLICIT = dict(attention="explicit", dropout=0.1)
FP8 = dict(fp8="delayed")
LATENT = dict(kv_rank=64, rope_head_dim=16)
LATENT |= dict(positions="rotary", attention_bias="none", dropout=0.0)
# flag -> (what it stands beside, another value)
CASES = {
    "model": ({}, "tiny"),
    "num_layers": ({}, 8),
    "hidden_size": ({}, 512),
    "num_heads": ({}, 4),
    "num_kv_heads": ({}, 2),
    "ffn_hidden_size": ({}, 512),
    "seq_length": ({}, 64),
    "vocab_size": ({}, 1024),
    "mtp_layers": ({}, 2),
    "head_dim": ({}, 64),
    "kv_rank": (LATENT, 32),
    "query_rank": (LATENT, 48),
    "rope_head_dim": (LATENT, 8),
    "value_head_dim": (LATENT, 16),
    "norm": (dict(kernels="off"), "rmsnorm"),
    "activation": ({}, "swiglu"),
    "positions": (dict(dropout=0.0), "alibi"),
    "sliding_window": (dict(dropout=0.0), 16),
    "window_pattern": (dict(dropout=0.0, sliding_window=16), "10"),
    "tied": ({}, False),
    "rotary_share": (dict(positions="rotary", dropout=0.0), 0.5),
    "dropout": (dict(attention="explicit"), 0.0),
    "num_experts": ({}, 4),
    "expert_every": (EXPERTS, 2),
    "router_topk": (EXPERTS, 2),
    "first_dense_layers": (EXPERTS, 1),
    "expert_ffn_size": (EXPERTS, 64),
    "shared_ffn_size": (EXPERTS, 64),
    "capacity_factor": (EXPERTS, 0.5),
    "tp": ({}, 2),
    "sequence_parallel": (dict(tp=2), True),
    "tp_comm_overlap": (dict(tp=2, sequence_parallel=True), True),
    "pp": ({}, 2),
    "cp": (dict(dropout=0.0), 2),
    "cp_kind": (dict(cp=2, dropout=0.0), "all-to-all"),
    "virtual_stages": (PIPELINE, 2),
    "schedule": (PIPELINE, "zb-h1"),
    "layer_split": (PIPELINE, [3, 1]),
    "zero_stage": ({}, 1),
    "data_parallel_replicate_degree": (dict(zero_stage=1), 2),
    "ep": (EXPERTS, 2),
    "ep_comm_overlap": (EXPERTS | PIPELINE | dict(virtual_stages=2, ep=2), True),
    "reduce_dtype": (dict(zero_stage=1), "bf16"),
    "recompute": (EXPLICIT, "full"),
    "recompute_layers": (EXPLICIT | dict(recompute="selective"), 1),
    "head_chunk": ({}, 16),
    "attention": (dict(dropout=0.0), "explicit"),
    "kernels": (dict(norm="rmsnorm"), "off"),
    "global_batch_size": ({}, 32),
    "micro_batch_size": ({}, 1),
    "precision": ({}, "fp32"),
    "fp8": ({}, "current"),
    "fp8_skip": (FP8, 0),
    "fp8_keep_bytes": (FP8 | dict(zero_stage=3), True),
    "optimizer_state": ({}, "bf16"),
    "optimizer": ({}, "muon"),
    "lora_rank": (dict(peft="lora"), 16),
}
# as-rank counts what runs on the meta device, where no kernel does
NOT_COUNTED = {"kernels"}
# those that it once refused or that change what is kept; the others run with --all
COUNTED = (
    "fp8 fp8_skip fp8_keep_bytes lora_rank recompute_layers head_chunk optimizer_state".split()
)
RANKS = 4
NAMES = [field.name for field in dataclasses.fields(TextPeftConfig)]
LISTED = {name: why for why, names in plan.UNPREDICTED.items() for name in names.split()}


def config_of(flags: dict) -> train.Config:
    if "peft" in flags or "lora_rank" in flags:
        return TextPeftConfig(**SHAPE | flags)
    return train.Config(**SHAPE | flags)


def predicted(flags: dict) -> tuple[dict, dict]:
    """(seconds by part, bytes by part)"""
    config = config_of(flags)
    model, layout = config.model_config(), plan.layout_of(config, RANKS)
    software = plan.software_of(config)
    seconds = planner.step_time(H100, software, model, layout)
    return seconds, memory.memory(model, layout, software)


def unknown(names: list[str]) -> list[str]:
    """Those flags of CASES that change no prediction."""
    found = []
    for name in names:
        base, value = CASES[name]
        if predicted(base) == predicted(base | {name: value}):
            found.append(name)
    return found


def test_each_flag_changes_a_prediction_or_says_why_not():
    assert sorted([*CASES, *LISTED]) == sorted(NAMES)
    assert unknown(list(CASES)) == []


@pytest.mark.parametrize("name", ["recompute_layers", "head_chunk", "virtual_stages", "cp_kind"])
def test_a_flag_that_the_layout_drops_is_seen(name):
    whole = plan.layout_of
    default = getattr(planner.Layout(), name)

    def without(config, ranks):
        return dataclasses.replace(whole(config, ranks), **{name: default})

    with mock.patch.object(plan, "layout_of", without):
        assert unknown(list(CASES)) == [name]


@pytest.mark.parametrize(
    "field, flags",
    [
        ("optimizer_state", ["optimizer_state"]),
        ("reduced", ["reduce_dtype"]),
        ("fp8", ["fp8", "fp8_skip", "fp8_keep_bytes"]),
        ("lora_rank", ["lora_rank"]),
    ],
)
def test_a_flag_that_the_software_drops_is_seen(field, flags):
    whole = plan.software_of
    default = getattr(plan.TRAIN, field)

    def without(config):
        return dataclasses.replace(whole(config), **{field: default})

    with mock.patch.object(plan, "software_of", without):
        assert unknown(list(CASES)) == flags


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in COUNTED else pytest.mark.repetition)
        for name in CASES
        if name not in NOT_COUNTED
    ],
)
def test_as_rank_knows_each_flag(name):
    base, value = CASES[name]
    answers = []
    for flags in (base, base | {name: value}):
        # each rank has its own part: the last one, which has the head
        report = as_rank.report(config_of(flags), train.Trainer, RANKS - 1, RANKS)
        answers.append(dataclasses.replace(report, place={}))
    assert answers[0] != answers[1]


@pytest.mark.parametrize("registered", [False, True])
def test_no_schedule_is_taken_for_another_one(registered, monkeypatch):
    """Nor one that has a list and no formula."""
    if registered:
        monkeypatch.setitem(schedules.NAMES, "dualpipe", schedules.one_f_one_b)
    layout = planner.Layout(pp=2, schedule="dualpipe", global_batch_size=8)
    with pytest.raises(schedules.ScheduleError, match="dualpipe: there is no formula"):
        planner.step_time(H100, plan.TRAIN, config_of({}).model_config(), layout)
