"""Speculative decoding: the tokens of greedy decoding, drafts of the modules without a cache."""

from functools import cache

import pytest
import torch
from parity import LLAMA, SMALL, again, step, trainer_of
from small_run import run as train

import generate
import gpt
from course import ranks
from course.parity import Run
from course.synthetic import Synthetic
from course.training_commands import config_of
from generate import ModelRunner
from inference import speculative
from inference.kv_cache import Cache
from inference.speculative import Speculation

PROMPTS = [[5], [3, 1, 2, 4, 1]]
MODEL = dict(dropout=0.0, lr=1e-2, seq_length=32, vocab_size=31)
# Learned for a while: some drafts are right, and some are not.
TEXT = torch.tensor([1, 2, 3, 1, 2, 4, 1, 5, 2, 6, 1, 2, 7] * 4)


class Repeated(Synthetic):
    def draw(self, generator):
        return TEXT[int(torch.randint(13, (1,), generator=generator)) :][: self.s + 1]


def learn(t, steps: int = 30):
    for number in range(1, steps + 1):
        step(t, number, Repeated(32, 31))
    return t.model


@cache
def taught(base: str = "gpt2", **flags):
    models = {"gpt2": SMALL, "llama": LLAMA}
    return learn(trainer_of(models[base] | MODEL, **dict(mtp_layers=2) | flags))


def texts_of(model, count: int = 20, **options) -> list[list[list[int]]]:
    """Of each prompt the tokens of each forward pass."""
    found = []
    for prompt in PROMPTS:
        passes = speculative.stream(ModelRunner(model), [prompt], count, temperature=0, **options)
        found.append([[output.token for output in outputs] for outputs in passes])
    return found


def greedy(model, count: int = 20, **options) -> list[list[int]]:
    return [generate.generate(model, [p], count, temperature=0, **options)[0] for p in PROMPTS]


def joined(texts) -> list[list[int]]:
    return [[token for tokens in passes for token in tokens] for passes in texts]


def rejected_stay(monkeypatch):
    """The next pass begins behind the columns of rejected drafts."""
    take_step, place = Speculation.step, Speculation.place

    def step(self):
        n = len(self.drafts)
        said = take_step(self)
        self.left = getattr(self, "left", 0) + n + 1 - len(said)
        return said

    monkeypatch.setattr(Speculation, "step", step)

    def shifted(self, first, n):
        return place(self, min(32 - n, first + getattr(self, "left", 0)) if first else 0, n)

    monkeypatch.setattr(Speculation, "place", shifted)


def drafts_are_seen(monkeypatch):
    monkeypatch.setattr(Cache, "update_masks", lambda self, *_: setattr(self, "masks", {}))


@pytest.mark.parametrize("mutate", [rejected_stay, drafts_are_seen])
def test_a_rejected_draft_in_the_cache_is_seen(mutate, monkeypatch):
    model = taught()
    expected = greedy(model)
    assert joined(texts_of(model)) == expected
    mutate(monkeypatch)
    assert joined(texts_of(model)) != expected


LATENT = dict(kv_rank=8, query_rank=12, rope_head_dim=4, head_dim=8, num_kv_heads=4)


@pytest.mark.parametrize(
    "base, flags",
    [
        ("gpt2", dict(mtp_layers=1)),
        again("llama", dict(mtp_layers=3)),
        again("gpt2", dict(positions="alibi")),
        again("llama", dict(num_kv_heads=1, num_experts=4)),
        again("llama", LATENT),
    ],
)
def test_the_text_is_that_of_greedy_decoding(base, flags):
    """Also where it ends at a token, in the middle of a pass."""
    model = taught(base, **flags)
    texts = texts_of(model)
    assert joined(texts) == greedy(model)
    assert max(len(tokens) for passes in texts for tokens in passes) > 1
    for eot in {token for text in joined(texts) for token in text}:
        ended = [[t for t in text if t is not None] for text in joined(texts_of(model, eot=eot))]
        assert ended == greedy(model, eot=eot)


def test_an_option_that_is_not_possible():
    with pytest.raises(ValueError, match="max_tokens -1"):
        texts_of(taught(), -1)


def drafts_of(model, monkeypatch, fewer: int) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """Of each `draft`: the text before it, its drafts, and their logits [3, V]. fewer: positions
    that modules do not read again."""
    noted, logits = [], []
    draft, likeliest = Speculation.draft, Speculation.likeliest

    def keep(self, x):
        logits.append(self.stage.head(x[-1:].unsqueeze(1))[0, 0])
        return likeliest(self, x)

    def note(self):
        logits.clear()
        draft(self)
        self.states = self.states[fewer:]
        noted.append((list(self.ids), list(self.drafts), torch.stack(logits)))

    with monkeypatch.context() as patch:
        patch.setattr(Speculation, "likeliest", keep)
        patch.setattr(Speculation, "draft", note)
        texts_of(model)
    return noted


@torch.no_grad()
def without_cache(model, ids: list[int], drafts: list[int]) -> torch.Tensor:
    """The logits [drafts, V] of each module after `ids`; deeper ones read drafts too."""
    L, n, ids = model.config.num_layers, len(ids) - 1, ids + drafts
    context = gpt.Context()
    x = model.embedding(torch.tensor([ids[:n]]))
    for number in range(L):
        x = model.blocks[str(number)](x, context)
    logits = []
    for k in range(1, len(drafts) + 1):
        module = model.blocks[str(L + k - 1)]
        x = module.next_depth(x, module.tokens(torch.tensor([ids[k : k + n]])), context)
        logits.append(model.head(x)[0, -1])
    return torch.stack(logits)


def test_drafts_are_those_of_the_modules_without_a_cache(monkeypatch):
    """Not so where modules leave a position out of those that they have read drafts at."""
    model = taught(mtp_layers=3)

    def worst(fewer: int) -> float:
        noted = [found for found in drafts_of(model, monkeypatch, fewer) if found[1]]
        assert len(noted) > 10
        return max(
            (logits[: len(drafts)] - without_cache(model, ids, drafts)).abs().max().item()
            for ids, drafts, logits in noted
        )

    assert worst(0) < 1e-4
    assert worst(1) > 1e-2


def on_ranks(rank: int, world: int, flags: dict):
    t = Run(world, config_of(flags)).trainer
    return texts_of(learn(t, 8))


@pytest.mark.parametrize("world, layout", [(2, dict(tp=2)), again(2, dict(ep=2, num_experts=4))])
def test_tensor_parallel(world, layout):
    base = LLAMA | MODEL | dict(mtp_layers=2) | layout
    alone = base | {name: 1 for name in ("tp", "ep") if name in layout}
    (expected,) = ranks.run(on_ranks, 1, 1, alone | dict(micro_batch_size=4))
    for texts in ranks.run(on_ranks, world, world, base | dict(micro_batch_size=4)):
        assert texts == expected


@pytest.mark.repetition
def test_the_command(tmp_path, monkeypatch, capsys):
    """What it prints is what it prints without --speculative; and how fast."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("abcabc " * 900)
    shape = "--num-layers 1 --hidden-size 32 --num-heads 2 --seq-length 32 --lr 0.02"
    assert (
        train(
            "--data", "text.txt", "--out", "run", "--steps", 12, "--mtp-layers", 2, *shape.split()
        )
        == 0
    )
    words = "--checkpoint run --temperature 0 --max-tokens 12 --prompt ab".split()
    capsys.readouterr()
    assert generate.main(words) == 0
    text = capsys.readouterr().out
    assert generate.main([*words, "--speculative"]) == 0
    said = capsys.readouterr()
    assert said.out == text
    assert "tokens for each forward pass" in said.err
    for wrong, word in (
        (["--temperature", "1"], "--temperature 1"),
        (["--max-tokens", "31"], "room for 30 more"),
        (["--prompt-file", "text.txt"], "one of them"),
    ):
        assert generate.main([*words, "--speculative", *wrong]) == 2
        said = capsys.readouterr()
        assert word in said.err and not said.out
