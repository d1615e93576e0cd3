"""A vocabulary that is padded for the matrix multiplications of a GPU: no probability, no gradient,
no token and no checkpoint sees it."""

from types import SimpleNamespace

import pytest
import torch
from parity import LLAMA, SMALL, again, check, differs, trainer_of
from parity import train as trained

import families
import generate
import gpt
import sharding
import tensor_parallel
from base import cross_entropy
from base.groups import Groups
from base.model_config import GPTConfig
from course import ranks

MULTIPLE = dict(make_vocab_size_divisible_by=16)
# tied and not; three ranks have heads too
TIED = SMALL | dict(vocab_size=257) | MULTIPLE
UNTIED = LLAMA | dict(vocab_size=257, hidden_size=48, num_heads=12, num_kv_heads=12) | MULTIPLE
UNTIED |= dict(ffn_hidden_size=48)
LAYOUTS = [
    (1, [dict(), dict(head_chunk=7)]),
    (2, [dict(tp=2), dict(pp=2), dict(zero_stage=3), dict(tp=2, head_chunk=7)]),
    (4, [dict(tp=4, sequence_parallel=True), dict(tp=2, pp=2), dict(pp=2, zero_stage=1)]),
]


@pytest.mark.parametrize(
    "base, world, layouts",
    [
        *[(TIED, *layout) for layout in LAYOUTS],
        (UNTIED, 3, [dict(tp=3)]),
        *[again(UNTIED, *layout) for layout in LAYOUTS],
    ],
)
def test_equals_one_device_without_padding(base, world, layouts):
    check(world, layouts, base)


def counted_as_tokens():
    """The loss gives the rows of padding their share of the probability."""
    original = cross_entropy.cross_entropy
    gpt.cross_entropy = lambda logits, targets, vocab_size: original(logits, targets)


def counted_by_ranks():
    """The same in the loss of a sharded vocabulary."""
    original = tensor_parallel.vocab_parallel_cross_entropy

    def wrong(logits, targets, vocab_size, group):
        return original(logits, targets, logits.shape[-1] * group.size(), group)

    tensor_parallel.vocab_parallel_cross_entropy = wrong


@pytest.mark.parametrize("world, mutate", [(1, counted_as_tokens), (2, counted_by_ranks)])
def test_the_gate_sees_padding_that_counts(world, mutate):
    plain = {k: v for k, v in TIED.items() if k not in MULTIPLE}
    differs(trained(world, base=TIED, mutate=mutate, tp=world), trained(base=plain))


def shapes(rank, tp):
    """Rows of the embedding and of the head's matrix here, and what their records say."""
    groups = Groups.make("cpu", tp, tp=tp) if tp > 1 else Groups()
    trainer = trainer_of(UNTIED, groups, tp=tp)
    parts = trainer.model.embedding.tokens.weight, trainer.model.head.output.weight
    records = [sharding.sharding_of(p) for p in parts]
    return [len(p) for p in parts], [r.shape[0] for r in records], [r.padded[0] for r in records]


@pytest.mark.parametrize("tp, rows", [(1, 272), (2, 288), (3, 288)])
def test_rows(tp, rows):
    """By hand, of 257: 17 x 16; 9 x 32; 6 x 48."""
    for found in ranks.run(shapes, tp, tp):
        assert found == ([rows // tp] * 2, [257] * 2, [rows] * 2)


@pytest.mark.parametrize("tp, rows", [(1, 50304), (8, 51200)])
def test_gpt2_on_gpus(tp, rows):
    """The vocabularies that nanoGPT (t = 1) and Megatron-LM's papers (t = 8) have."""
    with torch.device("meta"):
        model = families.build(GPTConfig(num_layers=1, hidden_size=64, num_heads=8))
    before = sharding.num_parameters(model)
    group = SimpleNamespace(size=lambda: tp)
    tensor_parallel.pad_vocabulary(model, torch.device("cpu"), group)
    assert len(model.head.output.weight) == 50257
    tensor_parallel.pad_vocabulary(model, torch.device("cuda"), group)
    assert model.head.output.weight is model.embedding.tokens.weight
    assert model.head.output.weight.shape == (rows, 64)
    assert sharding.num_parameters(model) == before


def test_tokens_and_logits():
    """Generation knows no token of padding: its logits, 0, would often be the largest."""
    config = GPTConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=32, vocab_size=61)
    models = []
    for multiple in (1, 16):
        with torch.device("meta"):
            model = families.build(config)
        tensor_parallel.pad_vocabulary(model, torch.device("cpu"), of_rank=multiple)
        sharding.init(model, 0, "cpu", torch.float64)
        models.append(model.eval())
    ids = torch.arange(20).view(2, 10)
    plain, padded = (model(ids) for model in models)
    assert padded.shape == (2, 10, 61)
    torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)
    texts = [generate.generate(model, ids.tolist(), 12, seed=1) for model in models]
    assert texts[0] == texts[1]
