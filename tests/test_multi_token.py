"""Multi-token prediction: by hand, under every layout, broken on purpose."""

import pytest
import torch
import torch.nn.functional as F
from parity import (
    DATA,
    LLAMA,
    SMALL,
    again,
    check,
    differs,
    needs_compiler,
    same,
    train,
    trainer_of,
)
from parity import without_cpp as no_cpp
from small_run import refusal
from test_compositions import EXPERTS

import gpt
import pipeline_parallel
import sharding
from course import ranks
from course.parity import Run
from course.synthetic import Documents
from course.training_commands import config_of
from run import multi_token
from schedules import V_SHAPED

# --- the gate -------------------------------------------------------------------------------------

GPT2, GROUPED = SMALL | dict(mtp_layers=2), LLAMA | dict(mtp_layers=2, vocab_size=257)
SINKHORN, TOPK = (EXPERTS[name] | dict(mtp_layers=1) for name in EXPERTS)
SEQUENCE, FULL = dict(tp=2, sequence_parallel=True), dict(recompute="full")
ZB = dict(pp=2, schedule="zb-h1")
STAGES = [dict(zero_stage=z, micro_batch_size=2) for z in (0, 1, 2, 3)]
FP8 = GROUPED | dict(fp8="current", fp8_skip=0, micro_batch_size=2)
TWICE = dict(pp=2, virtual_stages=2)
# Latent attention, experts with a bias, shared experts.
DEEPSEEK = LLAMA | dict(mtp_layers=1, num_kv_heads=4, kv_rank=8, rope_head_dim=4, head_dim=8)
DEEPSEEK |= dict(num_experts=4, router="bias", router_topk=2, shared_ffn_size=24)
DEEPSEEK |= dict(micro_batch_size=2)


def of_family(name: str, base: dict = LLAMA) -> dict:
    return base | dict(model=name, mtp_layers=1, head_dim=8)


@pytest.mark.parametrize(
    "base, world, layouts",
    [
        (GPT2, 2, [STAGES[3] | FULL, STAGES[1] | FULL, ZB | dict(layer_split=[2, 0])]),
        (GROUPED, 2, [SEQUENCE | FULL | dict(head_chunk=5), ZB]),
        (GPT2 | dict(document_mask=True), 2, [dict(cp=2)]),
        again(SINKHORN, 2, [dict(ep=2)]),
        again(GPT2, 2, [*STAGES, dict(tp=2), SEQUENCE | dict(recompute="selective")]),
        again(GROUPED, 4, [ZB | dict(tp=2), *(dict(pp=2) | stage for stage in STAGES)]),
        again(GPT2 | dict(num_layers=4), 2, [TWICE, TWICE | dict(layer_split=[1, 1, 2, 0])]),
        again(GPT2 | dict(optimizer="muon"), 4, [dict(pp=2, tp=2), dict(pp=2, zero_stage=3)]),
        again(GPT2, 4, [dict(cp=4), SEQUENCE | dict(cp=2), dict(pp=2, cp=2)]),
        again(GPT2, 2, [dict(cp=2, cp_kind="all-to-all", zero_stage=3)]),
        again(GPT2, 4, [dict(zero_stage=z, data_parallel_replicate_degree=2) for z in (2, 3)]),
        again(SINKHORN, 2, [dict(tp=2), dict(pp=2), dict(cp=2)]),
        again(TOPK | dict(expert_every=1), 2, [dict(ep=2), SEQUENCE, dict(cp=2)]),
        again(SINKHORN, 8, [SEQUENCE | FULL | dict(pp=2, ep=2, zero_stage=3)]),
        again(DEEPSEEK, 2, [dict(ep=2), dict(pp=2), SEQUENCE]),
        again(
            GPT2 | dict(num_layers=4),
            2,
            [dict(pp=2, virtual_stages=2, schedule=name) for name in V_SHAPED],
        ),
        again(
            GROUPED | dict(num_layers=4),
            4,
            [dict(pp=2, tp=2, virtual_stages=2, schedule="dualpipe-v")],
        ),
        again(GROUPED, 4, [dict(tp=4)]),
        again(
            SINKHORN | dict(num_layers=4, global_batch_size=16),
            4,
            [dict(pp=2, ep=2, virtual_stages=2, schedule="dualpipe-v")],
        ),
        again(FP8, 2, [dict(tp=2), dict(pp=2)]),
        again(GPT2, 2, [flags | dict(make_vocab_size_divisible_by=16) for flags in (SEQUENCE, ZB)]),
        again(of_family("gemma-2b"), 2, [SEQUENCE, dict(pp=2)]),
        again(of_family("qwen3-0.6b"), 2, [SEQUENCE, dict(pp=2)]),
        again(of_family("bloom-560m", SMALL), 2, [SEQUENCE, dict(pp=2), dict(cp=2)]),
        again(of_family("mistral-7b") | dict(sliding_window=5), 2, [SEQUENCE, dict(cp=2)]),
    ],
    ids=str,
)
def test_equals_one_device(base, world, layouts):
    check(world, layouts, base)


@needs_compiler
@pytest.mark.repetition
def test_compiled():
    one = dict(num_layers=1, steps=1, mtp_layers=1)
    same(train(1, **one, **FULL, compile=True, mutate=no_cpp), train(**one))


# --- by hand --------------------------------------------------------------------------------------


def by_hand(t, data, samples) -> list[torch.Tensor]:
    """The sum of losses of each depth: every document by itself, cut where a depth has no token."""
    model, config = t.stages[0], t.model_config
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(1 + config.mtp_layers)]
    for sample in samples:
        batch = data.batch([sample])
        plain = torch.zeros_like(batch.tokens)
        documents = (plain if batch.documents is None else batch.documents)[0]
        for at in [(documents == number).nonzero()[:, 0] for number in documents.unique()]:
            rows = (batch.tokens, batch.targets, batch.loss_mask)
            tokens, targets, counts = (x[0, at] for x in rows)
            x = model.embedding(tokens.unsqueeze(0))
            for k in range(len(sums)):
                x = x[:, : len(at) - k]
                context = gpt.Context(rotary=model.rotary_table(x.shape[1], x))
                if x.shape[1] == 0:
                    break
                if k == 0:
                    for number in range(config.num_layers):
                        x = model.blocks[str(number)](x, context)
                else:
                    module = model.blocks[str(config.num_layers + k - 1)]
                    embedded = model.embedding.tokens.weight[tokens[k:]].unsqueeze(0)
                    both = module.hidden_norm(x), module.token_norm(embedded)
                    x = gpt.Block.forward(module, module.project(torch.cat(both, -1)), context)
                logits = model.head.output(model.head.norm(x))[0]
                losses = F.cross_entropy(logits, targets[k:], reduction="none")
                sums[k] += (losses * counts[k:]).sum()
    return sums


def shifted_twice(original, batch, depths):
    batch = original(batch, depths)
    return batch._replace(targets=batch.targets.roll(-1, 1))


def into_other_documents(original, batch, depths):
    documents = batch.documents
    return original(batch._replace(documents=None), depths)._replace(documents=documents)


def round_the_end(original, batch, depths):
    """The last tokens of a row predict its first ones."""
    counts = [batch.loss_mask.roll(-k, 1) for k in range(depths + 1)]
    return original(batch, depths)._replace(loss_mask=torch.cat(counts))


def weighted_twice(original, task, y, batch):
    y = y.clone()
    y[len(batch.tokens) :] *= task.weight
    return original(task, y, batch)


@pytest.mark.parametrize(
    "owner, name, broken, documents",
    [
        (multi_token, "many_targets", None, True),
        (multi_token, "many_targets", None, False),
        (multi_token, "many_targets", shifted_twice, True),
        (multi_token, "many_targets", into_other_documents, True),
        (multi_token, "many_targets", round_the_end, False),
        (multi_token.MultiToken, "total_loss", weighted_twice, True),
    ],
)
@torch.no_grad()
def test_the_loss_by_hand(owner, name, broken, documents, monkeypatch):
    if broken:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: broken(original, *args))
    flags = dict(mtp_layers=2, dropout=0.0, document_mask=documents, mtp_loss_weight=0.25)
    t = trainer_of(LLAMA, **flags)
    data = Documents(16, 61) if documents else DATA
    samples = t.task.samples(1)
    with torch.enable_grad():
        loss = t.forward_backward(1, data).item()
    main, *further = (total / data.counted_tokens(samples) for total in by_hand(t, data, samples))
    mean = sum(further) / 2
    equal = abs(loss / (main + 0.25 * mean) - 1) < 1e-12
    equal = equal and abs(t.task.statistics()["mtp_loss"] / mean - 1) < 1e-12
    assert equal == (broken is None)


def mtp_loss(rank: int, world: int) -> float:
    run = Run(world, config_of(GPT2 | (dict(pp=2) if world > 1 else {})))
    run.trainer.forward_backward(1, run.dataset)
    return run.trainer.task.statistics()["mtp_loss"].item()


def test_the_loss_of_modules_is_that_of_all_ranks():
    (one,) = ranks.run(mtp_loss, 1, 1)
    assert ranks.run(mtp_loss, 4, 4) == pytest.approx([one] * 4, rel=1e-12)


def copies_apart():
    pipeline_parallel.Pipeline.sum_tied = lambda self: None


@pytest.mark.parametrize("base", [GROUPED, again(GPT2)])
def test_a_copy_that_is_not_summed_is_seen(base):
    broken = train(2, base=base, steps=1, pp=2, mutate=copies_apart)
    differs(broken, train(base=base, steps=1))


def test_parameters_and_evaluation():
    """Modules count as parameters; a held-out loss is that of the next token alone."""
    t, plain = trainer_of(mtp_layers=2), trainer_of()
    assert t.num_parameters == sharding.num_parameters(t.stages[0]) > plain.num_parameters
    data = Documents(16, 61)
    assert t.task.evaluate(data, 4) == plain.task.evaluate(data, 4)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--mtp-loss-weight 0.1", ["--mtp-loss-weight 0.1", "--mtp-layers"]),
        ("--mtp-layers 128", ["--mtp-layers 128", "below --seq-length"]),
        ("--mtp-layers 1 --model falcon-180b", ["--mtp-layers 1", "parallel_block"]),
        ("--mtp-layers 1 --load x", ["--load"]),
    ],
)
def test_refusals(flags, words, capsys):
    error = refusal(capsys, *flags.split())
    assert all(word in error for word in words), error
