import json
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import train
from corpus import blend
from corpus.blend import Blend, Interleave, parse_weights
from corpus.tokenizer import ByteTokenizer
from data import Corpus, DataError
from runtime.world import World

TEXTS = {
    letter: [f"{letter}{i} " * (5 + i % 7) for i in range(n)]
    for letter, n in (("a", 40), ("b", 90), ("c", 25))
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for letter, texts in TEXTS.items():
        Path(f"{letter}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return tmp_path


def make(names, seed=0, split="train"):
    return blend.open_parts(blend.prepare(names, ByteTokenizer()), 16, seed, split)


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
    taken = [0] * len(weights)
    by_due = []
    for n in range(1000):
        k, m = locate(n)
        assert m == taken[k]
        taken[k] += 1
        by_due.append(((m + Fraction(1, 2)) / weights[k], k))
        assert all(abs(w / sum(weights) * (n + 1) - t) < 1 for w, t in zip(weights, taken))
    assert by_due == sorted(by_due)


def test_interleave_by_hand():
    locate = Interleave([Fraction(7, 10), Fraction(3, 10)])
    assert "".join("AB"[locate(n)[0]] for n in range(20)) == "ABAAABAABA" * 2
    far = 10 * 2**48
    assert [locate(far + n) for n in range(10)] == [
        (k, m + (7, 3)[k] * 2**48) for k, m in map(locate, range(10))
    ]


def test_parse_weights(here):
    assert parse_weights(["a", "b"]) == [(None, ["a", "b"])] and parse_weights([]) == [(None, [])]
    assert parse_weights(["0.7:a", "3:b:c"]) == [(Fraction(7, 10), ["a"]), (Fraction(3), ["b:c"])]
    assert parse_weights(["C:a"]) == [(None, ["C:a"])]
    Path("0.7:a").mkdir()
    # what exists is what is meant
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
        (["1e999:a.jsonl"], "finite"),
        (["1e-999:a.jsonl"], "above 0"),
        (["1:"], "names no path behind its weight"),
        (["1:a.jsonl", "1:nowhere"], "--data nowhere: no such file or folder"),
        (["1:a.jsonl", "2:a\0b"], "zero byte"),
        (["1:\udce9"], "not UTF-8"),
        (["1:" + "x" * 300], "File name too long"),
    ],
)
def test_bad_weights(here, names, words):
    with pytest.raises(DataError) as e:
        make(names)
    assert words in str(e.value) and str(e.value).startswith("--data ") and "\n" not in str(e.value)


def rows(batch):
    return [tuple(row) for row in torch.cat((batch.tokens, batch.targets[:, -1:]), 1).tolist()]


def test_a_blend_is_its_corpora_interleaved(here):
    """Counts follow the weights; each corpus gives its own samples, every epoch a permutation."""
    names = ["a.jsonl", "b.jsonl", "c.jsonl"]
    weights = [Fraction(1, 2), Fraction(2, 5), Fraction(1, 10)]
    mixed = make([f"{float(w)}:{n}" for w, n in zip(weights, names)])
    parts = [make([n]) for n in names]
    n = 10 * max(p.num_sequences for p in parts)
    samples = rows(mixed.batch(range(n)))
    of = [Interleave(weights)(i)[0] for i in range(n)]
    assert [of.count(k) for k in range(3)] == [n // 2, n // 10 * 4, n // 10]
    for k, part in enumerate(parts):
        given = [row for row, j in zip(samples, of) if j == k]
        assert given == rows(part.batch(range(len(given))))
        everything = sorted(
            rows(
                Corpus(blend.prepare([names[k]], ByteTokenizer())[0].folder, 16, None).batch(
                    range(part.num_sequences)
                )
            )
        )
        for epoch in range(len(given) // part.num_sequences):
            assert (
                sorted(given[epoch * part.num_sequences : (epoch + 1) * part.num_sequences])
                == everything
            )
    assert mixed.num_sequences == sum(p.num_sequences for p in parts)
    assert mixed.counted_tokens(range(7)) == 7 * 16


def test_any_split_and_any_start_gives_the_same_samples(here):
    names = ["0.6:a.jsonl", "0.4:b.jsonl"]
    whole = make(names).batch(range(200))
    split = [make(names).batch(range(start + rank, 200, 4)) for rank in range(4) for start in (0,)]
    for rank, batch in enumerate(split):
        assert torch.equal(batch.tokens, whole.tokens[rank::4])
        assert torch.equal(batch.samples, whole.samples[rank::4])
    resumed = make(names).batch(range(150, 200))
    assert torch.equal(resumed.tokens, whole.tokens[150:])
    assert torch.equal(resumed.targets, whole.targets[150:])
    assert resumed.loss_mask.all()
    assert not torch.equal(make(names, seed=1).batch(range(200)).tokens, whole.tokens)
    last = 2**51
    assert rows(make(names).batch([last - 1, last])) == [
        row for n in (last - 1, last) for row in rows(make(names).batch([n]))
    ]


def test_one_weighted_corpus_is_that_corpus(here):
    assert isinstance(make(["3:a.jsonl"]), Corpus)
    assert rows(make(["3:a.jsonl"]).batch(range(9))) == rows(make(["a.jsonl"]).batch(range(9)))


def test_index_of_a_blend(here):
    a = make(["a.jsonl"])
    b = make(["b.jsonl"])
    mixed = make(["1:a.jsonl", "3:b.jsonl"])
    assert mixed.index["tokens"] == a.index["tokens"] + b.index["tokens"]
    assert mixed.index["bytes"] / mixed.index["tokens"] == pytest.approx(
        0.25 * a.index["bytes"] / a.index["tokens"] + 0.75 * b.index["bytes"] / b.index["tokens"],
        rel=1e-3,
    )
    fingerprints = {
        make(names).index["corpus"]
        for names in (
            ["1:a.jsonl", "3:b.jsonl"],
            ["0.25:a.jsonl", "0.75:b.jsonl"],
            ["3:a.jsonl", "1:b.jsonl"],
            ["1:a.jsonl", "3:c.jsonl"],
        )
    }
    # only the ratio of the weights counts
    assert len(fingerprints) == 3


def open_data(*flags):
    config = train.parse([*flags, "--seq-length", "16", "--device", "cpu"], 0)
    return train.open_data(config, World.from_launcher(), ByteTokenizer())


def test_held_out_text_is_blended_and_never_trained_on(here):
    train_set, held_out = open_data("--data", "0.6:a.jsonl", "0.4:b.jsonl")
    assert isinstance(train_set, Blend) and isinstance(held_out, Blend)
    trained, evaluated = (rows(s.batch(range(3 * s.num_sequences))) for s in (train_set, held_out))
    assert not set(trained) & set(evaluated)
    for k, name in enumerate(("a.jsonl", "b.jsonl")):
        assert held_out.corpora[k].stream.tolist() == open_data("--data", name)[1].stream.tolist()


def test_val_data_holds_nothing_out(here):
    """The last twentieth of --data is trained on as well, and all of --val-data is evaluated on."""
    train_set, held_out = open_data(
        "--data", "a.jsonl", "--val-data", "c.jsonl", "--cache", "elsewhere"
    )
    assert len(train_set.stream) == train_set.index["tokens"]
    assert len(held_out.stream) == held_out.index["tokens"]
    assert held_out.seed is None
    assert held_out.index["documents"] == 25
    assert train_set.index["documents"] == 40
    assert (
        len(open_data("--data", "a.jsonl")[0].stream)
        == train_set.index["held_out_from"]
        < len(train_set.stream)
    )
    assert isinstance(
        open_data("--data", "a.jsonl", "--val-data", "1:b.jsonl", "1:c.jsonl")[1], Blend
    )
    assert len(list(Path("elsewhere").glob("*/index.json"))) == 2


def test_too_short_names_the_corpus(here):
    Path("short.txt").write_text("a few words")
    with pytest.raises(DataError, match="--data short.txt: too short"):
        open_data("--data", "1:a.jsonl", "1:short.txt")
    with pytest.raises(DataError, match="--val-data: too short: the text has 12 tokens"):
        open_data("--data", "a.jsonl", "--val-data", "short.txt")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--data", ""], "--data ''"),
        (["--data", "x" * 300], "File name too long"),
        (["--val-data", "nowhere"], "--val-data nowhere: no such file or folder"),
        (["--cache", "a.jsonl"], "--cache a.jsonl"),
        (["--data", "0.5:a.jsonl", "a.jsonl"], "--data a.jsonl: has no weight"),
    ],
)
def test_train_refuses_in_one_line(here, capsys, flags, words):
    data_flag = ["--data", "a.jsonl"] if flags[0] != "--data" else []
    assert train.main([*data_flag, *flags, "--seq-length", "16", "--device", "cpu"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert words in said[-1]
    assert said[-1].startswith("train.py: ")
    assert all(line.startswith("data: ") for line in said[:-1] if line)


def test_training_on_a_blend_resumes_exactly(here):
    flags = [
        "--data",
        "0.6:a.jsonl",
        "0.4:b.jsonl",
        "--val-data",
        "c.jsonl",
        "--seq-length",
        "16",
        "--hidden-size",
        "16",
        "--num-heads",
        "2",
        "--num-layers",
        "1",
        "--global-batch-size",
        "8",
        "--warmup-steps",
        "2",
        "--device",
        "cpu",
    ]
    assert (
        train.main([*flags, "--out", "whole", "--steps", "6", "--save-every", "3", "--keep", "0"])
        == 0
    )
    (here / "again" / "checkpoints").mkdir(parents=True)
    (here / "whole" / "checkpoints" / "step-000003").rename(
        here / "again" / "checkpoints" / "step-000003"
    )
    (here / "again" / "metrics.jsonl").write_text(
        "".join((here / "whole" / "metrics.jsonl").read_text().splitlines(True)[:3])
    )
    assert train.main([*flags, "--out", "again", "--steps", "6", "--resume"]) == 0
    losses = [
        [
            json.loads(line)["loss"]
            for line in (here / run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in ("whole", "again")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_lesson(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["blend.py"])
    blend.main()
    assert capsys.readouterr().out.splitlines()[:2] == [
        "samples 0, ...: A B A A A B A A B A A B A A A B A A B A",
        "    of a thousand: 700 of A, 300 of B",
    ]
