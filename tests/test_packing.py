"""Packed sequences: which examples share a row, and that none of them sees another."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import LLAMA, SMALL, again, check, same, train, train_each, without_cpp
from torch.nn.attention import flex_attention as flex

import gpt
import kernels
from base import document_mask
from base.groups import Groups
from base.model_config import GPTConfig
from course import packing as lesson
from course import ranks, synthetic
from finetune.packing import Example, Packed, first_fit
from run import data
from run.data import Batch
from run.pretraining import Config
from run.tokenizer import ByteTokenizer
from train import Trainer

# --- which examples share a row -------------------------------------------------------------------


def test_by_hand():
    """The picture of finetune/packing.py: its rows, and everything in their batch."""
    lengths = [5, 3, 2, 4, 1]
    assert first_fit(lengths, 8) == [[0, 1], [2, 3, 4]]
    examples = []
    for n, length in enumerate(lengths):
        ids = [10 * n + i for i in range(length + 1)]
        # the first id is nobody's target, whatever is said of it
        examples.append(Example(ids, [True] + [i % 2 == 1 for i in range(1, length + 1)]))
    packed = Packed(examples, 8, seed=None)
    batch = packed.batch([0, 1])
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 4, 10, 11, 12], [20, 21, 30, 31, 32, 33, 40, 0]]
    assert batch.targets.tolist() == [[1, 0, 3, 0, 5, 11, 0, 13], [21, 0, 31, 0, 33, 0, 41, 0]]
    assert torch.equal(batch.loss_mask, batch.targets > 0)
    assert batch.documents.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 2, 3]]
    positions = document_mask.positions_of(batch.documents)
    assert positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 0, 0]]
    assert packed.counted_tokens([0, 1]) == 9 == int(batch.loss_mask.sum())
    assert packed.counted_tokens([1, 3]) == 8
    assert packed.num_sequences == 2 and packed.fill() == 15 / 16
    assert batch.to("cpu").documents is batch.documents
    assert batch._replace(documents=None).to("cpu").documents is None


def test_the_mask_by_hand():
    documents = torch.tensor([[0, 0, 1, 2, 2]])
    rows = ["10000", "11000", "00100", "00010", "00011"]
    expected = [[bit == "1" for bit in row] for row in rows]
    assert document_mask.visible(documents).tolist() == [[expected]]
    # the end-of-text token, 9, belongs to the document that it ends
    tokens = torch.tensor([[1, 9, 9, 2, 3], [1, 2, 3, 4, 9]])
    assert document_mask.documents_of(tokens, 9).tolist() == [[0, 0, 1, 2, 2], [0, 0, 0, 0, 0]]


def first_fit_slowly(lengths: list[int], capacity: int) -> list[list[int]]:
    rows, free = [], []
    for number, length in enumerate(lengths):
        fitting = [row for row, room in enumerate(free) if length <= room]
        if not fitting:
            fitting = [len(rows)]
            rows.append([])
            free.append(capacity)
        row = fitting[0]
        rows[row].append(number)
        free[row] -= length
    return rows


@pytest.mark.parametrize("n, longest", [(1, 16), (1, 1), (50, 16), (300, 16), (300, 7), (64, 1)])
def test_the_tree_gives_the_rows_of_a_search(n, longest):
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, longest + 1, n).tolist()
        assert first_fit(lengths, 16) == first_fit_slowly(lengths, 16)


def test_what_cannot_be_packed():
    with pytest.raises(ValueError, match="length 9 of number 1: must be from 1 to 8"):
        first_fit([8, 9], 8)
    with pytest.raises(ValueError, match="length 0 of number 0"):
        Packed([Example([1], [True])], 8, 0)
    with pytest.raises(ValueError, match="no examples"):
        Packed([], 8, 0)


def test_fill_of_skewed_lengths():
    """Log-normal lengths. (For 100,000: in seconds, which a search of all rows would not take.)"""
    for seed in range(2):
        packed = Packed(lesson.skewed_examples(1000, 256, seed), 256, seed)
        assert packed.fill(0) >= 0.98 and packed.fill(1) >= 0.98
        # with a row for each example
        padded = np.mean(packed.lengths) / 256
        assert packed.fill(0) >= 2 * padded
    lengths = [length for length in np.random.default_rng(0).integers(1, 400, 100_000).tolist()]
    begin = time.process_time()
    first_fit(lengths, 2048)
    assert time.process_time() - begin < 5


def test_samples_depend_on_seed_and_epoch():
    """Each epoch has every example once, in other rows; any order of samples gives the same."""
    examples = [Example([n] * (2 + n % 5), [True] * (2 + n % 5)) for n in range(40)]
    packed, other = Packed(examples, 8, seed=3), Packed(examples, 8, seed=4)
    last = 3 * packed.num_sequences
    rows = [packed.row(n) for n in range(last)]
    assert len({tuple(sorted(map(tuple, packed.rows_of(epoch)))) for epoch in range(3)}) == 3
    for epoch in range(3):
        assert sorted(i for row in packed.rows_of(epoch) for i in row) == list(range(40))
    fresh = Packed(examples, 8, seed=3)
    # as a run that goes on, or a rank that has other samples
    assert [fresh.row(n) for n in reversed(range(last))] == rows[::-1]
    assert [other.row(n) for n in range(last)] != rows
    assert packed.index == other.index
    numbers = torch.randperm(last).tolist()
    assert packed.counted_tokens(numbers) == int(packed.batch(numbers).loss_mask.sum())


# --- other attentions -----------------------------------------------------------------------------

TINY = dict(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=61)
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4, [0] * 9 + [1] * 1 + [2] * 6])


@pytest.mark.parametrize("fields", [{}, dict(llama=True, num_kv_heads=2)], ids=["gpt", "llama"])
def test_with_kernels(fields):
    """Their attention and rotary operations know of no documents: gpt.py's run instead."""
    model = gpt.GPT(GPTConfig(**TINY, **fields, attention="explicit"))
    tokens = torch.randint(61, (2, 16))
    context = gpt.Context(documents=DOCUMENTS)
    before = model(tokens, context=context)
    kernels.swap(model)
    after = model(tokens, context=context)
    assert (before - after).abs().max() < 1e-5


@torch.no_grad()
def test_the_mask_of_the_kernel_for_gpus(monkeypatch):
    """The same code without its compiler, on a CPU, where it has no backward."""
    uncompiled = flex.flex_attention, flex.create_block_mask
    monkeypatch.setattr(document_mask, "compiled", lambda: uncompiled)
    q, k, v = (torch.randn(2, heads, 16, 8) for heads in (4, 2, 2))
    expected = document_mask.fused_attention(q, k, v, DOCUMENTS, None)
    monkeypatch.setattr(document_mask, "has_flex", lambda x: True)
    blocks = document_mask.block_mask(DOCUMENTS, q)
    found = document_mask.fused_attention(q, k, v, DOCUMENTS, blocks)
    assert (found - expected).abs().max() < 1e-5


@torch.no_grad()
def test_the_mask_is_made_once_for_all_layers(monkeypatch):
    """On a GPU; on a CPU, without documents and by explicit attention none is made."""
    made = []

    def create_block_mask(*args, **kwargs):
        made.append(args)
        return flex.create_block_mask(*args, **kwargs)

    monkeypatch.setattr(document_mask, "compiled", lambda: (flex.flex_attention, create_block_mask))
    fields = TINY | dict(dropout=0.0, num_layers=3, hidden_size=32, num_heads=2)
    tokens = torch.randint(61, (2, 16))
    masked = gpt.Context(documents=DOCUMENTS)
    model = gpt.GPT(GPTConfig(**fields, attention="fused"))
    expected = model(tokens, context=masked)
    assert not made
    monkeypatch.setattr(document_mask, "has_flex", lambda x: True)
    found = model(tokens, context=masked)
    assert len(made) == 1 and (found - expected).abs().max() < 1e-5
    model(tokens)
    gpt.GPT(GPTConfig(**fields, attention="explicit"))(tokens, context=masked)
    assert len(made) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flex_attention_on_a_gpu(dtype, tolerance, kv_heads):
    """Output and gradients beside PyTorch's attention with the mask, in float64 on the CPU."""
    documents = synthetic.Documents(300, 61).batch(range(2)).documents
    q, k, v = (torch.randn(2, heads, 300, 32) for heads in (4, kv_heads, kv_heads))
    results = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        inputs = [x.to(device, kind).requires_grad_() for x in (q, k, v)]
        numbers = documents.to(device)
        blocks = document_mask.block_mask(numbers, inputs[0])
        y = document_mask.fused_attention(*inputs, numbers, blocks)
        y.square().sum().backward()
        results.append([x.detach().cpu().double() for x in (y, *(i.grad for i in inputs))])
    for exact, measured in zip(*results):
        assert (measured - exact).abs().max() < tolerance * exact.abs().max()


# --- text in documents ----------------------------------------------------------------------------


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    """Two prepared corpora of short documents."""
    monkeypatch.chdir(tmp_path)
    for letter in "ab":
        for n in range(20):
            Path(letter).mkdir(exist_ok=True)
            Path(letter, f"{n}.txt").write_text(letter * (3 + 5 * n % 11))
    return data.prepare_corpora(["0.5:a", "0.5:b"], ByteTokenizer())


@pytest.mark.parametrize("count", [1, 2])
def test_documents_of_a_corpus(corpora, count):
    """One corpus, and a blend: numbers count the end-of-text tokens before."""
    plain = data.open_corpora(corpora[:count], 16, 0).batch(range(6))
    masked = data.open_corpora(corpora[:count], 16, 0, document_mask=True).batch(range(6))
    assert plain.documents is None
    assert torch.equal(plain.tokens, masked.tokens) and torch.equal(plain.targets, masked.targets)
    eot = ByteTokenizer().eot
    for tokens, documents in zip(masked.tokens.tolist(), masked.documents.tolist()):
        assert documents == [tokens[:i].count(eot) for i in range(16)]
    assert masked.documents.max() > 1 and masked.loss_mask.all()


def evaluated(rank, world, flags):
    """The loss on held-out samples; and what it is without documents."""
    config = Config(**SMALL | dict(num_layers=4, document_mask=True, dropout=0.0) | flags)
    groups = Groups.make("cpu", world, **config.mesh) if world > 1 else Groups()
    t = Trainer(config, torch.device("cpu"), groups)
    kinds = (synthetic.Documents, synthetic.Synthetic)
    return [t.task.evaluate(kind(16, 61), 7) for kind in kinds]


def test_evaluation():
    ((loss, other),) = ranks.run(evaluated, 1, 1, {})
    assert abs(loss - other) > 1e-6
    # stages of a pipeline expect a part of the sequence from each other
    both = dict(cp=2, pp=2, micro_batch_size=2)
    for world, flags in ((2, dict(pp=2, virtual_stages=2)), (2, SHARDED), (4, both)):
        for of_rank in ranks.run(evaluated, world, world, flags):
            assert abs(of_rank[0] - loss) < 1e-12 and abs(of_rank[1] - other) < 1e-12


# --- packed = one by one, under every layout ------------------------------------------------------


def one_by_one():
    """Each document becomes a row of its own, and padding follows it: nothing is masked but by
    causality."""
    synthetic.Documents.batch = rows_of_documents


def rows_of_documents(self, samples, original=synthetic.Documents.batch) -> Batch:
    packed = original(self, samples)
    rows = []
    for row, numbers in enumerate(packed.documents):
        for number in numbers.unique():
            at = numbers == number
            padding = self.s - int(at.sum())
            of_row = (packed.tokens[row][at], packed.targets[row][at], packed.loss_mask[row][at])
            rows.append([torch.nn.functional.pad(x, (0, padding)) for x in of_row])
    return Batch(*map(torch.stack, zip(*rows)), torch.arange(len(rows)))


# without dropout, whose masks depend on the place in a row
GPT = SMALL | dict(document_mask=True, dropout=0.0, attention="explicit")
LLAMA_2 = LLAMA | dict(document_mask=True, dropout=0.0)
# no capacity and no balancing losses: they depend on what else is in the micro-batch, and there
# padding counts
EXPERTS = LLAMA_2 | dict(num_experts=4, router="topk", router_topk=2, aux_loss=0.0, z_loss=0.0)
BASES = {
    "gpt": GPT,
    "llama": LLAMA_2 | dict(attention="explicit"),
    "gpt fused": GPT | dict(attention="fused"),
    "llama fused": LLAMA_2 | dict(attention="fused"),
    "experts": EXPERTS,
    "deep": GPT | dict(num_layers=4),
}
SHARDED = dict(tp=2, sequence_parallel=True)


@pytest.mark.parametrize(
    "name, world, variants",
    [
        ("gpt", 1, [dict(), dict(micro_batch_size=2, recompute="selective"), dict(head_chunk=9)]),
        ("llama fused", 1, [dict(), dict(micro_batch_size=2, recompute="full")]),
        ("gpt", 2, [dict(tp=2), SHARDED | dict(recompute="selective"), dict(zero_stage=3)]),
        ("llama", 2, [SHARDED | dict(recompute="full"), dict(zero_stage=1, micro_batch_size=2)]),
        ("gpt fused", 2, [SHARDED, dict(pp=2, schedule="zb-h1")]),
        ("experts", 2, [dict(ep=2), SHARDED]),
        ("deep", 2, [dict(pp=2, virtual_stages=2, recompute="selective")]),
        again("llama", 4, [dict(pp=2, recompute="full") | SHARDED]),
        again("experts", 4, [dict(ep=2, pp=2), dict(ep=2, zero_stage=3) | SHARDED]),
    ],
    ids=str,
)
def test_packed_is_one_by_one(name, world, variants):
    """Loss, every gradient, and every parameter after three steps."""
    base = BASES[name]
    alone = train(base=base, mutate=one_by_one)
    for result in train_each(world, variants, base=base):
        same(result, alone)


def test_with_dropout():
    """Masks depend on the place in a row: so not one by one, but equal under every layout."""
    layouts = [SHARDED | dict(recompute="selective"), dict(pp=2), dict(zero_stage=3)]
    check(2, layouts, SMALL | dict(document_mask=True))


@pytest.mark.repetition
def test_compiled():
    base = BASES["llama fused"] | dict(num_layers=1)
    same(train(base=base, steps=1, compile=True, mutate=without_cpp), train(base=base, steps=1))
