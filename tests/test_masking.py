"""What BERT and T5 learn from: what is hidden, what is not, and that no layout changes it; and the
two commands."""

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import small_run
import torch
from test_tokenizer import words as word_tokenizer

import train
from base.model_config import FieldError
from inference.token_bytes import CHARACTERS, token_bytes
from models import runs, special_tokens
from models.masking import HiddenSpans, HiddenWords, check_spans, lengths_of, words_of
from run import data, rules
from run.config import ConfigError
from run.tokenizer import ByteTokenizer, FileTokenizer, GPT2Tokenizer, TokenizerError

TEXT = "".join(f"The {n}th word of {n * n} words, and its naïve end.\n" for n in range(400))
BYTES = ByteTokenizer()
BERT, T5 = special_tokens.bert_tokens(BYTES), special_tokens.t5_tokens(BYTES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with text: documents of one line each."""
    path = tmp_path_factory.mktemp("text")
    small_run.write_lines(path / "text.jsonl", [{"text": line} for line in TEXT.splitlines()])
    (path / "other.txt").write_text(TEXT.upper())
    return path


def open_text(folder: Path, s: int, names=("text.jsonl",), seed=3, document_mask=False):
    names = [name if ":" not in name else name.replace(":", f":{folder}/") for name in names]
    names = [name if ":" in name else f"{folder}/{name}" for name in names]
    parts = data.prepare_corpora(names, BYTES, cache=folder / "cache")
    return data.open_corpora(parts, s, seed, "train", document_mask)


def words(folder: Path, s=64, seed=3, **options) -> HiddenWords:
    text = open_text(folder, s - 1, **options)
    return HiddenWords(text, seed, BYTES)


def spans(folder: Path, n=64, m=20, seed=3, **options) -> HiddenSpans:
    text = open_text(folder, lengths_of(n).text, **options)
    return HiddenSpans(text, seed, BYTES, n, m)


# --- BERT -----------------------------------------------------------------------------------------


def test_words_of_bytes(folder):
    """Whole words: letters and digits, as UTF-8. Spaces and signs are each alone."""
    text = words(folder)
    ids = torch.tensor([[BERT.cls, *"naïve, 12a".encode(), BERT.sep, *b"end x ..."[:7]]])
    text.s = ids.shape[1]
    chosen = torch.cat([text.choose(ids, torch.tensor([n])) for n in range(300)])
    together = [range(1, 7), [7], [8], range(9, 12), range(13, 16), [16], [17], [18], [19]]
    for word in together:
        of_word = chosen[:, list(word)]
        assert of_word.any() and (of_word.all(1) == of_word.any(1)).all(), word
    columns = {tuple(chosen[:, word[0]].tolist()) for word in together}
    assert len(columns) == len(together)
    # [CLS], [SEP]
    assert not chosen[:, [0, 12]].any()


def test_shares_of_bert(folder):
    """15% of the words; of their tokens 80% [MASK], 10% random (1 in 260 of these is the same), 10%
    kept: counts within four standard deviations. Other tokens are the text."""
    text = words(folder)
    batch, plain = text.batch(range(400)), text.text.batch(range(400)).tokens
    assert batch.targets[:, 1:].equal(plain.masked_fill(plain == BYTES.eot, BERT.sep))
    assert (batch.targets[:, 0] == BERT.cls).all()
    chosen = batch.loss_mask
    assert batch.tokens[~chosen].equal(batch.targets[~chosen])
    total = int(chosen.sum())
    masked = (batch.tokens == BERT.mask)[chosen]
    kept = (batch.tokens == batch.targets)[chosen]
    near(int(masked.sum()), total, 0.8 + 0.1 / BERT.vocab_size)
    near(int(kept.sum()), total, 0.1 + 0.1 / BERT.vocab_size)
    first = first_of_words(batch.targets)
    near(int((chosen & first).sum()), int(first.sum()), 0.15)
    random = batch.tokens[chosen & (batch.tokens != batch.targets) & (batch.tokens != BERT.mask)]
    assert len(random.unique()) > 150


def first_of_words(ids: torch.Tensor) -> torch.Tensor:
    """Where a word of bytes begins, by Python's str; none begins with a special token."""
    rows = []
    for row in ids.tolist():
        letters = [i in range(128, 256) or (i < 128 and chr(i).isalnum()) for i in row]
        goes_on = [False, *(a and b for a, b in itertools.pairwise(letters))]
        rows.append([not on and i not in BERT.names for on, i in zip(goes_on, row)])
    return torch.tensor(rows)


def near(count: int, of: int, share: float) -> None:
    assert abs(count - of * share) < 4 * (of * share * (1 - share)) ** 0.5, (count, of, share)


@pytest.mark.parametrize("make", [words, spans])
def test_masks_are_of_seed_and_sample_alone(make, folder):
    """Whatever is in the batch beside it, whichever rank asks; another epoch hides other tokens of
    the same text; another seed too."""
    text = make(folder)
    one = text.batch([5])
    assert all(same(a, b) for a, b in zip(one, text.batch([9, 5, 700]).rows()[1]))
    assert all(same(a, b) for a, b in zip(one, make(folder).batch([5])))
    assert not make(folder, seed=4).batch(range(20)).tokens.equal(text.batch(range(20)).tokens)
    # Held-out text has the order of the stream, so an epoch repeats the sequences.
    ordered = make(folder)
    ordered.text.sequence_of = data.Order(ordered.num_sequences, None)
    again = ordered.batch([5 + ordered.num_sequences])
    first = ordered.batch([5])
    assert ordered.text.batch([5]).tokens.equal(ordered.text.batch([5 + text.num_sequences]).tokens)
    assert not again.tokens.equal(first.tokens)


def same(a, b) -> bool:
    return a is b or a.equal(b)


@pytest.mark.parametrize("make", [words, spans])
def test_blends(make, folder):
    """The mask is that of the run's sample, not of the corpus's; a run goes on where it was."""
    names = ["0.5:text.jsonl", "0.5:other.txt"]
    text = make(folder, names=names)
    samples = text.batch(range(8))
    assert samples.samples.tolist() == list(range(8))
    alone = [make(folder, names=[name]) for name in ("text.jsonl", "other.txt")]
    k, m = text.text.locate(5)
    assert not text.batch([5]).tokens.equal(alone[k].batch([m]).tokens)
    resumed = make(folder, names=names)
    resumed.go_on(4, text.taken(4))
    assert resumed.batch([5]).tokens.equal(text.batch([5]).tokens)


@pytest.mark.parametrize("make", [words, spans])
def test_counted_tokens_are_known_before_a_forward(make, folder):
    text = make(folder)
    for samples in (range(7), range(7), range(7, 9)):
        assert text.counted_tokens(samples) == int(text.batch(samples).loss_mask.sum())
    assert text.positions(range(7)) == 7 * text.s == text.batch(range(7)).tokens.numel()


# --- T5 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source, text, target", [(512, 568, 114), (1024, 1137, 229), (3, 2, 3)])
def test_lengths_of_t5(source, text, target):
    """The published ones: 512 and 114 of T5, 1024 and 229 of mT5."""
    lengths = lengths_of(source)
    assert (lengths.text, lengths.source, lengths.target) == (text, source, target)


def spans_of(target: list[int], lengths) -> dict[int, list[int]]:
    """Sentinel -> positions in the target of its span."""
    found = {}
    for n, token in enumerate(target[: lengths.target - 1]):
        if token in T5.sentinels:
            last = found[token] = []
        else:
            last.append(n)
    return found


@pytest.mark.parametrize("n", [5, 16, 31, 64, 128])
def test_spans_and_source_give_the_text(n, folder):
    """The target's spans, put back for their sentinels, are the text. Any position but the first
    may be hidden, and spans are of several lengths."""
    lengths = lengths_of(n)
    text = spans(folder, n, lengths.target + 3)
    sizes, hidden = Counter(), set()
    rows = text.batch(range(100)).rows()
    for row, plain in zip(rows, text.text.batch(range(100)).tokens.tolist()):
        source, target = row.tokens[0, :n].tolist(), row.targets[0].tolist()
        assert target[lengths.target - 1 :] == [T5.eos] + [T5.pad] * 3
        assert row.loss_mask[0].tolist() == [True] * lengths.target + [False] * 3
        # What the decoder reads is the target, one later.
        assert row.tokens[0, n:].tolist() == [T5.pad, *target[:-1]]
        of_sentinel, rebuilt = spans_of(target, lengths), []
        assert list(of_sentinel) == T5.sentinels[: lengths.spans]
        assert source.pop() == T5.eos
        for token in source:
            span = [target[at] for at in of_sentinel.get(token, [])]
            hidden |= set(range(len(rebuilt), len(rebuilt) + len(span)))
            rebuilt += span or [token]
        assert rebuilt == plain and 0 not in hidden and source[-1] in of_sentinel
        sizes.update(map(len, of_sentinel.values()))
    assert sizes.total() == 100 * lengths.spans and 0 not in sizes
    assert sum(size * count for size, count in sizes.items()) == 100 * lengths.hidden
    if n >= 64:
        assert hidden == set(range(1, lengths.text)) and len(sizes) > 5


def test_document_masks(folder):
    """A span is its first token's; padding and </s> the last span's; the decoder begins each
    document anew. Documents decide nothing else."""
    n, found = 64, 0
    plain, masked = spans(folder, n, 24), spans(folder, n, 24, document_mask=True)
    documents = masked.text.batch(range(50)).documents.tolist()
    rows = zip(masked.batch(range(50)).rows(), plain.batch(range(50)).rows(), documents)
    for row, without, own in rows:
        assert row.targets.equal(without.targets)
        assert row.tokens[:, :n].equal(without.tokens[:, :n])
        source, reads = row.tokens[0].tolist()[:n], row.tokens[0].tolist()[n:]
        target, of_target = row.targets[0].tolist(), row.documents[0].tolist()[n:]
        expected, at = [], 0
        for token in source[:-1]:
            span = spans_of(target, masked.lengths).get(token, [])
            expected.append(own[at])
            # The sentinel in the target, and its span.
            assert {of_target[k - 1 + j] for k in span for j in (0, 1)} <= {own[at]}
            at += len(span) or 1
        assert row.documents[0].tolist()[:n] == [*expected, expected[-1]]
        assert set(of_target[masked.lengths.target - 2 :]) == {expected[-1]}
        for k in range(24):
            begins = k == 0 or of_target[k] != of_target[k - 1]
            found += begins and k > 0
            assert reads[k] == (T5.pad if begins else target[k - 1])
    assert found > 5
    batch = words(folder, document_mask=True).batch(range(5))
    ends = (batch.targets == BERT.sep).long()
    assert batch.documents.equal(ends.cumsum(1) - ends)


@pytest.mark.parametrize(
    "source, target, sentinels, field",
    [(2, 9, 100, "seq_length"), (512, 113, 100, "target_length"), (2048, 999, 100, "seq_length")],
)
def test_spans_that_do_not_fit_are_refused(source, target, sentinels, field):
    with pytest.raises(FieldError) as error:
        check_spans(source, target, sentinels)
    assert error.value.field == field
    check_spans(512, 114, 100)


def test_a_bert_of_one_token_is_refused():
    """[CLS] alone: nothing could be hidden."""
    with pytest.raises(FieldError, match="at least 2"):
        runs.BertConfig(num_layers=1, hidden_size=8, num_heads=1, seq_length=1)


# --- tokenizers -----------------------------------------------------------------------------------


def word_piece(path: Path, specials: list[str]) -> FileTokenizer:
    import tokenizers

    pieces = ["[UNK]", *specials, "un", "##believ", "##able", "red", ",", "▁"]
    model = tokenizers.models.WordPiece(
        {name: i for i, name in enumerate(pieces)}, unk_token="[UNK]"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return FileTokenizer(str(path))


def test_words_and_special_tokens_of_word_pieces(tmp_path):
    """Those of a published vocabulary: no id is new, and the end of text, which it lacks, becomes
    [SEP]."""
    specials = ["[SEP]", "[CLS]", "[MASK]", "[PAD]"]
    tokenizer = word_piece(tmp_path / "t.json", specials)
    tokens = special_tokens.bert_tokens(tokenizer)
    assert tokens == (1, 2, 3, 4, len(tokenizer.vocabulary)) and tokenizer.eot == tokens.vocab_size
    found = words_of(tokenizer, tokens)
    ids = tokenizer.encode("unbelievable, red")
    assert found.goes_on[ids].tolist() == [False, True, True, False, False]
    assert found.ends.nonzero().flatten().tolist() == [1, 2, 3, 4]
    without = special_tokens.bert_tokens(word_piece(tmp_path / "u.json", []))
    # Its own end of text, then three new ids.
    assert without == (7, 8, 9, 10, 11)


def test_tokens_that_are_words(tmp_path):
    """A vocabulary without spaces, as one of whole words, in which nothing goes on."""
    words = word_tokenizer(tmp_path / "t.json")
    tokens = special_tokens.bert_tokens(FileTokenizer(words))
    assert not words_of(FileTokenizer(words), tokens).goes_on.any()


def test_tokens_of_which_none_begins_a_word(tmp_path):
    tokenizer = FileTokenizer(word_tokenizer(tmp_path / "t.json"))
    tokens = special_tokens.bert_tokens(tokenizer)
    tokenizer.vocabulary = {f"##{name}": i for name, i in tokenizer.vocabulary.items()}
    tokenizer.tokenizer = SimpleNamespace(model=SimpleNamespace(continuing_subword_prefix="##"))
    with pytest.raises(TokenizerError, match="none of its tokens begins a word"):
        words_of(tokenizer, tokens)


def test_words_of_gpt2():
    """A word begins with a space or a sign, and letters go on with it, also within a character."""
    tokenizer = GPT2Tokenizer.__new__(GPT2Tokenizer)  # tiktoken would fetch its vocabulary
    pieces = [b"un", b"able", b" red", b"s", b" ", b"\xbf", b"<|endoftext|>"]
    tokenizer.vocab_size, tokenizer.eot, tokenizer.stop_ids = 7, 6, (6,)
    tokenizer.encoding = SimpleNamespace(decode_single_token_bytes=pieces.__getitem__)
    tokens = special_tokens.bert_tokens(tokenizer)
    assert tokens == (6, 7, 8, 9, 10)
    goes_on = words_of(tokenizer, tokens).goes_on
    assert goes_on.tolist() == [True, True, False, True, False, True] + [False] * 4


def published(name: str, path: Path):
    """A tokenizer of the type that a published model has."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    if name == "bytes":
        return BYTES
    if name == "byte pairs":
        merges = [("Ċ", "Ġ"), ("Ġ", "y")]
        names = [*CHARACTERS, *map("".join, merges)]
        model, decoder = models.BPE({name: i for i, name in enumerate(names)}, merges), "ByteLevel"
        splits = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    elif name == "Unigram":
        names = ["<unk>", *"▁ 中国 人 ， ▁if ▁y . na me :".split(), "\n"]
        model, decoder = models.Unigram([(name, -1.0) for name in names], unk_id=0), "Metaspace"
        splits = pre_tokenizers.Metaspace()
    else:
        names = "[UNK] 中 国 人 ， if y . na ##me :".split()
        names = {name: i for i, name in enumerate(names)}
        model, decoder = models.WordPiece(names, unk_token="[UNK]"), "WordPiece"
        splits = pre_tokenizers.BertPreTokenizer()
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = splits, getattr(decoders, decoder)()
    if name == "WordPiece":
        tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.save(str(path))
    return FileTokenizer(str(path))


WORDS = {
    "bytes": ["中", "国", "人", "，", "\n", " ", "if", " ", "y", ".", "name", ":"],
    "byte pairs": ["中", "国", "人", "，", "\n ", "if", " y", ".", "name", ":"],
    "Unigram": [" ", "中国", "人", "，", "\n", " if", " y", ".", "name", ":"],
    "WordPiece": [" 中", " 国", " 人", " ，", " if", " y", ".", " name", " :"],
}


@pytest.mark.parametrize("name", WORDS)
def test_words_of_chinese_and_of_code(name, tmp_path):
    """Chinese has no spaces, and a line of code begins with a line break."""
    tokenizer = published(name, tmp_path / "t.json")
    goes_on, ends = words_of(tokenizer, special_tokens.bert_tokens(tokenizer))
    found, last = [], None
    for token in map(int, tokenizer.encode("中国人，\n if y.name:")):
        piece = token_bytes(tokenizer).of(token)
        if last is not None and goes_on[token] and not ends[last]:
            found[-1] += piece
        else:
            found.append(piece)
        last = token
    assert [word.decode() for word in found] == WORDS[name]


def test_spelling():
    ids = [*b"ab", T5.sentinels[1], *b"c", T5.eos, T5.pad, T5.pad]
    assert special_tokens.spell(ids, T5.names, BYTES) == "ab<extra_id_1>c</s>"


# --- the commands ---------------------------------------------------------------------------------

COMMANDS = {
    "bert": (runs.BertRun, ["--tp", "2", "--sequence-parallel"], dict(num_layers=2)),
    "t5": (runs.T5Run, ["--pp", "2"], dict(num_layers=4, encoder_layers=1, target_length=12)),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_and_its_resumption_under_another_layout(name, folder, tmp_path):
    """Two ranks, then one: the losses, and the sample, are those of one uninterrupted run."""
    config_class, layout, shape = COMMANDS[name]
    common = ["--data", str(folder / "text.jsonl"), "--cache", str(folder / "cache"), "--seed", "1"]
    flags = common + small_run.flags(seq_length=48, lr=0.01, precision="fp64", **shape)
    half, whole = tmp_path / "half", tmp_path / "whole"
    argv = ["-m", f"models.{name}", *flags, *layout, "--steps", "3", "--out", str(half)]
    done = processes.run(argv, world=2)
    assert done.returncode == 0, done.stderr
    assert (
        train.main(["--resume", "--out", str(half), "--steps", "6", "--tp", "1"], config_class) == 0
    )
    assert train.main([*flags, "--steps", "6", "--out", str(whole)], config_class) == 0
    lines, expected = small_run.lines_of(half), small_run.lines_of(whole)
    for field in ("loss", "tokens"):
        values = [line[field] for line in lines]
        assert values == pytest.approx([line[field] for line in expected], rel=1e-9), field
    for field in ("eval_loss", "eval_accuracy"):
        assert lines[-1][field] == pytest.approx(expected[-1][field], rel=1e-9)
    assert lines[-1]["loss"] < lines[0]["loss"]
    sample = (half / "sample.txt").read_text()
    assert sample == (whole / "sample.txt").read_text()
    assert "[reads]" in sample and ("[MASK]" if name == "bert" else "<extra_id_0>") in sample
    assert json.loads((half / "config.json").read_text())["command"] == f"-m models.{name}"
    assert (half / "loss.png").exists()


REFUSED = {
    "bert --cp-kind ring": "--cp-kind",
    "bert --num-experts 2": "--num-experts",
    "bert --model t5-small": "--model t5-small: no such preset",
    "t5 --cp 2": "--cp",
    "t5 --virtual-stages 2": "--virtual-stages",
    "t5 --encoder-layers 6": "--encoder-layers 6: must be",
    "t5 --seq-length 256": "--target-length 32: the targets of --seq-length 256 have",
    "t5 --seq-length 2": "--seq-length 2: is no room for a text with a hidden span; 3 would fit",
    "t5 --vocab-size 300": "--tokenizer bytes: its ids go up to 357",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_makes_no_sense_is_refused_by_name(line, tmp_path, capfd):
    name, *flags = line.split()
    argv = [*flags, "--out", str(tmp_path / "run")]
    try:
        status = train.main(argv, COMMANDS[name][0])
    except SystemExit as e:
        status = e.code
    error = capfd.readouterr().err.strip().splitlines()
    assert status == 2 and REFUSED[line] in error[-1] and error[-1].startswith(f"{name}.py: "), (
        error
    )


def test_targets_are_divisible_under_sequence_parallelism():
    sizes = dict(seq_length=129, target_length=35, num_heads=6, hidden_size=48, ffn_hidden_size=96)
    config = runs.T5Run(tp=3, sequence_parallel=True, **sizes)
    with pytest.raises(ConfigError, match="--target-length 35: must be divisible by --tp 3"):
        rules.validate(config, 3)


def test_flops_of_t5():
    """By hand, for a layer of each half: forward once, backward twice, 2 FLOPs for a product."""
    fields = dict(num_layers=2, hidden_size=8, num_heads=2, ffn_hidden_size=16, activation="relu")
    shape = runs.T5Config(**fields, seq_length=10, target_length=4, vocab_size=50)
    task = runs.FillSpans()
    task.join(SimpleNamespace(model_config=shape))
    h, f, n, m = 8, 16, 10, 4
    encoder = n * (4 * h * h + 2 * h * f) + 2 * n * n * h
    own = m * (4 * h * h + 2 * h * f) + 2 * m * m * h
    cross = 2 * m * h * h + 2 * n * h * h + 2 * m * n * h
    assert task.flops_per_token(n + m) * (n + m) == pytest.approx(
        6 * (encoder + own + cross + m * h * 50)
    )
