"""Several corpora with weights: the order of their samples, weights that are refused, and training
on a blend."""

import json
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import train
from run import blend, data
from run.blend import Interleave, parse_weights
from run.data import Blend, Corpus, DataError
from run.flags import parse
from run.tokenizer import ByteTokenizer
from run.world import World

# Corpus -> number of documents.
DOCUMENTS = {"a": 40, "b": 90, "c": 25}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for letter, count in DOCUMENTS.items():
        with open(f"{letter}.jsonl", "w") as f:
            for i in range(count):
                f.write(json.dumps({"text": f"{letter}{i} " * (5 + i % 7)}) + "\n")
    return tmp_path


def open_corpora(names, seed=0, split="train"):
    prepared = data.prepare_corpora(names, ByteTokenizer())
    return data.open_corpora(prepared, 16, seed, split)


@pytest.mark.parametrize(
    "weights",
    [
        ["0.7", "0.3"],
        ["1", "1", "1"],
        ["0.5", "0.2", "0.2", "0.1"],
        ["1e-9", "1"],
        ["3", "1", "4", "1", "5", "9", "2", "6"],
    ],
)
def test_interleave_follows_the_weights(weights):
    """Every corpus's samples come in order, and its count is within one of its share at every n."""
    weights = [Fraction(w) for w in weights]
    locate = Interleave(weights)
    counts = [0] * len(weights)
    due = []
    for n in range(1000):
        k, m = locate(n)
        assert m == counts[k]
        counts[k] += 1
        due.append(((m + Fraction(1, 2)) / weights[k], k))
        for weight, count in zip(weights, counts):
            assert abs(weight / sum(weights) * (n + 1) - count) < 1
    assert due == sorted(due)


def test_interleave_by_hand():
    locate = Interleave([Fraction(7, 10), Fraction(3, 10)])
    assert "".join("AB"[locate(n)[0]] for n in range(20)) == "ABAAABAABA" * 2
    # The pattern repeats every ten samples, far from the start too: 7 of A and 3 of B.
    periods = 2**48
    for n in range(10):
        k, m = locate(n)
        assert locate(10 * periods + n) == (k, (7, 3)[k] * periods + m)


def test_parse_weights(here):
    assert parse_weights(["a", "b"]) == [(None, ["a", "b"])]
    assert parse_weights([]) == [(None, [])]
    assert parse_weights(["0.7:a", "3:b:c"]) == [(Fraction(7, 10), ["a"]), (Fraction(3), ["b:c"])]
    assert parse_weights(["C:a"]) == [(None, ["C:a"])]
    # A folder with the whole name counts before a weight.
    Path("0.7:a").mkdir()
    assert parse_weights(["0.7:a"]) == [(None, ["0.7:a"])]
    assert parse_weights(["1:0.7:a"]) == [(Fraction(1), ["0.7:a"])]


@pytest.mark.parametrize(
    "names, words",
    [
        (["0.5:a.jsonl", "b.jsonl"], "b.jsonl: has no weight"),
        (["0:a.jsonl"], "above 0 and finite"),
        (["-1:a.jsonl", "1:b.jsonl"], "above 0"),
        (["nan:a.jsonl"], "above 0 and finite"),
        (["inf:a.jsonl"], "above 0 and finite"),
        (["1:"], "and a path"),
        (["1:a.jsonl", "1:nowhere"], "--data nowhere: no such file or folder"),
    ],
)
def test_bad_weights(here, names, words):
    with pytest.raises(DataError) as e:
        open_corpora(names)
    message = str(e.value)
    assert words in message and message.startswith("--data ") and "\n" not in message


def sequences(batch):
    """The batch's sequences, each s + 1 ids."""
    ids = torch.cat((batch.tokens, batch.targets[:, -1:]), 1)
    return [tuple(row) for row in ids.tolist()]


def test_a_blend_is_its_corpora_interleaved(here):
    """Counts follow the weights; each corpus gives its own samples, every epoch a permutation."""
    names = ["a.jsonl", "b.jsonl", "c.jsonl"]
    weights = [Fraction(1, 2), Fraction(2, 5), Fraction(1, 10)]
    blended = open_corpora([f"{float(w)}:{name}" for w, name in zip(weights, names)])
    corpora = [open_corpora([name]) for name in names]
    n = 10 * max(corpus.num_sequences for corpus in corpora)
    samples = sequences(blended.batch(range(n)))
    locate = Interleave(weights)
    sources = [locate(i)[0] for i in range(n)]
    assert [sources.count(k) for k in range(3)] == [n // 2, n // 10 * 4, n // 10]
    for k, corpus in enumerate(corpora):
        from_corpus = [sample for sample, source in zip(samples, sources) if source == k]
        assert from_corpus == sequences(corpus.batch(range(len(from_corpus))))
        (prepared,) = data.prepare_corpora([names[k]], ByteTokenizer())
        size = corpus.num_sequences
        in_order = Corpus(prepared.folder, 16, None).batch(range(size))
        for epoch in range(len(from_corpus) // size):
            permuted = from_corpus[epoch * size : (epoch + 1) * size]
            assert sorted(permuted) == sorted(sequences(in_order))
    assert blended.num_sequences == sum(corpus.num_sequences for corpus in corpora)
    assert blended.counted_tokens(range(7)) == 7 * 16


def test_any_split_and_any_start_gives_the_same_samples(here):
    names = ["0.6:a.jsonl", "0.4:b.jsonl"]
    whole = open_corpora(names).batch(range(200))
    for rank in range(4):
        batch = open_corpora(names).batch(range(rank, 200, 4))
        assert torch.equal(batch.tokens, whole.tokens[rank::4])
        assert torch.equal(batch.samples, whole.samples[rank::4])
    resumed = open_corpora(names).batch(range(150, 200))
    assert torch.equal(resumed.tokens, whole.tokens[150:])
    assert torch.equal(resumed.targets, whole.targets[150:])
    assert resumed.loss_mask.all()
    assert not torch.equal(open_corpora(names, seed=1).batch(range(200)).tokens, whole.tokens)
    last = 2**51
    together = sequences(open_corpora(names).batch([last - 1, last]))
    alone = [sequences(open_corpora(names).batch([n])) for n in (last - 1, last)]
    assert together == alone[0] + alone[1]


def test_one_weighted_corpus_is_that_corpus(here):
    weighted = open_corpora(["3:a.jsonl"])
    plain = open_corpora(["a.jsonl"])
    assert isinstance(weighted, Corpus)
    assert sequences(weighted.batch(range(9))) == sequences(plain.batch(range(9)))


def test_index_of_a_blend(here):
    a = open_corpora(["a.jsonl"])
    b = open_corpora(["b.jsonl"])
    blended = open_corpora(["1:a.jsonl", "3:b.jsonl"])
    assert blended.index["tokens"] == a.index["tokens"] + b.index["tokens"]
    bytes_per_token = blended.index["bytes"] / blended.index["tokens"]
    of_a = a.index["bytes"] / a.index["tokens"]
    of_b = b.index["bytes"] / b.index["tokens"]
    assert bytes_per_token == pytest.approx(0.25 * of_a + 0.75 * of_b, rel=1e-3)
    # Only the ratio of the weights counts: the first two are the same blend.
    blends = [
        ["1:a.jsonl", "3:b.jsonl"],
        ["0.25:a.jsonl", "0.75:b.jsonl"],
        ["3:a.jsonl", "1:b.jsonl"],
        ["1:a.jsonl", "3:c.jsonl"],
    ]
    assert len({open_corpora(names).index["corpus"] for names in blends}) == 3


def open_data(*flags):
    config = parse([*flags, "--seq-length", "16", "--device", "cpu"], 0)
    return config.task().open_data(config, World.from_launcher(), ByteTokenizer())


def test_held_out_text_is_blended_and_never_trained_on(here):
    train_set, held_out = open_data("--data", "0.6:a.jsonl", "0.4:b.jsonl")
    assert isinstance(train_set, Blend)
    assert isinstance(held_out, Blend)
    trained = sequences(train_set.batch(range(3 * train_set.num_sequences)))
    evaluated = sequences(held_out.batch(range(3 * held_out.num_sequences)))
    assert not set(trained) & set(evaluated)
    for corpus, name in zip(held_out.corpora, ("a.jsonl", "b.jsonl")):
        _, held_out_alone = open_data("--data", name)
        assert corpus.stream.tolist() == held_out_alone.stream.tolist()


def test_val_data_holds_nothing_out(here):
    """The last twentieth of --data is trained on as well, and all of --val-data is evaluated on."""
    words = ["--data", "a.jsonl", "--val-data", "c.jsonl", "--cache", "elsewhere"]
    train_set, held_out = open_data(*words)
    assert len(train_set.stream) == train_set.index["tokens"]
    assert len(held_out.stream) == held_out.index["tokens"]
    assert held_out.sequence_of.seed is None
    assert held_out.index["documents"] == 25
    assert train_set.index["documents"] == 40
    without_val_data, _ = open_data("--data", "a.jsonl")
    assert len(without_val_data.stream) == train_set.index["held_out_from"]
    assert len(without_val_data.stream) < len(train_set.stream)
    _, held_out = open_data("--data", "a.jsonl", "--val-data", "1:b.jsonl", "1:c.jsonl")
    assert isinstance(held_out, Blend)
    assert len(list(Path("elsewhere").glob("*/index.json"))) == 2


def test_too_short_names_the_corpus(here):
    Path("short.txt").write_text("a few words")
    with pytest.raises(DataError, match=r"--data short\.txt: too short"):
        open_data("--data", "1:a.jsonl", "1:short.txt")
    with pytest.raises(DataError, match="--val-data: too short: the text has 12 tokens"):
        open_data("--data", "a.jsonl", "--val-data", "short.txt")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--data", ""], "--data ''"),
        (["--val-data", "nowhere"], "--val-data nowhere: no such file or folder"),
        (["--cache", "a.jsonl"], "--cache a.jsonl"),
        (["--data", "0.5:a.jsonl", "a.jsonl"], "--data a.jsonl: has no weight"),
    ],
)
def test_train_refuses_in_one_line(here, capsys, flags, words):
    data_flag = ["--data", "a.jsonl"] if flags[0] != "--data" else []
    assert train.main([*data_flag, *flags, "--seq-length", "16", "--device", "cpu"]) == 2
    *messages, error = capsys.readouterr().err.splitlines()
    assert words in error
    assert error.startswith("train.py: ")
    assert all(line.startswith("data: ") for line in messages if line)


def test_lesson(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["blend.py"])
    blend.main()
    assert capsys.readouterr().out.splitlines()[:2] == [
        "samples 0, ...: A B A A A B A A B A A B A A A B A A B A",
        "    of a thousand: 700 of A, 300 of B",
    ]
