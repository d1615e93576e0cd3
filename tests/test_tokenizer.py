"""Tokenizer files: what is refused, what begins and ends a text, and that a run remembers their
content."""

import json
from pathlib import Path

import numpy as np
import published_tokenizers as published
import pytest
import small_run
from test_generate import loud, save
from test_gpt import build

import generate
import train
from base.errors import InputError
from base.json_files import JSONError
from inference import huggingface
from run import checkpoint, data, train_tokenizer, training_run
from run.checkpoint import CheckpointError
from run.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    TokenizerError,
    TokenizerRecord,
    make_tokenizer,
    prompt_ids,
    record,
)

tokenizers = pytest.importorskip("tokenizers")

TEXT = "if a in b: return a while b for c in a if b\n" * 400
SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
LLAMA = dict(
    num_layers=1, hidden_size=32, num_heads=4, ffn_hidden_size=64, seq_length=32, llama=True
)
SMALL = small_run.flags(global_batch_size=4)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a text, where evaluations are short."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    monkeypatch.setattr(training_run, "EVAL_SEQUENCES", 2)
    return tmp_path


def run(*flags):
    """`python train.py` without a new interpreter."""
    return train.main([*SMALL, "--data", "text.txt", *flags])


def words(path, vocabulary=("?", "if", "a", "in", "b", "</s>"), **model):
    """Write a tokenizer of whole words, and return its path. model: fields to write instead."""
    ids = {word: i for i, word in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    content = json.loads(tokenizer.to_str())
    content["model"] |= model
    Path(path).write_text(json.dumps(content))
    return str(path)


def bpe(path, begins=True):
    """Byte pairs as Llama 3 has them. begins: a begin token before every text."""
    tokenizer = published.byte_level(SPECIALS, begin=SPECIALS[0] if begins else None)
    tokenizer.save(str(path))


def edit_json(path, **fields):
    """Set fields of a JSON file."""
    path = Path(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# --------------------------------------------------------------------------------------------------
# Files that break


@pytest.mark.parametrize(
    "model, reason",
    [
        (dict(vocab={}), "its vocabulary is empty"),
        (dict(unk_token="<unk>"), "unk_token that its vocabulary has"),
        (dict(vocab={"?": 0, "a": 2**31}), "its ids go up to 2147483648, and it has 2 tokens"),
        (dict(vocab={"?": 2**40}), "not bytes, gpt2, or a JSON file"),
        (dict(type="Unigram", vocab=[["a", -1.0]], unk_id=None), "unk_token that its vocabulary"),
        (dict(type="BPE", vocab={"?": 0}, merges=[], dropout=0.5), "no text has the same ids"),
    ],
)
def test_models_that_cannot_be(here, model, reason):
    with pytest.raises(TokenizerError) as e:
        make_tokenizer(words("t.json", **model))
    message = str(e.value)
    assert message.startswith("--tokenizer t.json: ")
    assert reason in message and "\n" not in message


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 10**5, b"\xff\xfe{}", b"{}"])
def test_files_that_are_none(here, content, capfd):
    Path("t.json").write_bytes(content)
    message = r"--tokenizer t\.json: not bytes, gpt2, or a JSON file of the tokenizers library"
    with pytest.raises(TokenizerError, match=message) as e:
        make_tokenizer("t.json")
    assert "\n" not in str(e.value)


def test_a_panic_of_the_library_is_one_line(here, capfd):
    edit_json(words("t.json"), normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(TokenizerError, match="Cannot parse precompiled_charsmap"):
        make_tokenizer("t.json")
    assert capfd.readouterr().err == ""


def replacing(content: str) -> dict:
    return {"type": "Replace", "pattern": {"String": "x"}, "content": content}


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    "content, count, refused", [("x" * 20, 12, True), ("x" * 101, 1, True), ("x" * 2, 6, False)]
)
def test_texts_that_grow(here, part, content, count, refused):
    """x becomes 20 of them, and each of these again: 4 10^15 characters, for which the library
    would end the process."""
    steps = [replacing(content)] * count
    key = "normalizers" if part == "normalizer" else "decoders"
    edit_json(words("t.json"), **{part: {"type": "Sequence", key: steps}})
    if refused:
        with pytest.raises(TokenizerError, match="characters of one; 100 would fit"):
            make_tokenizer("t.json")
    else:
        assert make_tokenizer("t.json").encode("a")


def test_added_tokens_out_of_place(here):
    """The library gives them the next free id, whatever the file says."""
    added = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    edit_json(words("t.json"), added_tokens=[added | dict(content="<|eot|>", special=True, id=9)])
    message = r"its added token '<\|eot\|>' has id 9, and the library gives it 6"
    with pytest.raises(TokenizerError, match=message):
        make_tokenizer("t.json")


def test_texts_are_neither_truncated_nor_padded(here):
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    edit_json(words("t.json"), truncation=truncation)
    assert make_tokenizer("t.json").encode("a a a b") == [2, 2, 2, 4]
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "?"}
    edit_json("t.json", truncation=None, padding=padding)
    assert make_tokenizer("t.json").encode("a b") == [2, 4]


@pytest.mark.parametrize(
    "name, content",
    [
        ("generation_config.json", "{"),
        ("generation_config.json", '{"eos_token_id": [1.5]}'),
        ("config.json", '{"bos_token_id": true}'),
        ("tokenizer_config.json", '{"eos_token": 3}'),
        ("special_tokens_map.json", "3"),
    ],
)
def test_files_beside_it_that_break(here, name, content):
    words("tokenizer.json")
    Path(name).write_text(content)
    with pytest.raises(TokenizerError) as e:
        make_tokenizer(str(here / "tokenizer.json"))
    assert str(here) in str(e.value) and "\n" not in str(e.value)
    # Files beside any other name are not about this tokenizer.
    words("other.json")
    assert make_tokenizer("other.json").eot == 5


# --------------------------------------------------------------------------------------------------
# Begin and end


def test_ends_without_any_configuration(here):
    vocabulary = ("?", "<|im_end|>", "a", "<|end_of_text|>", "<|eot_id|>")
    with_ends = FileTokenizer(words("t.json", vocabulary))
    assert (with_ends.eot, with_ends.bos, with_ends.vocab_size) == (3, None, 5)
    assert sorted(with_ends.stop_ids) == [1, 3, 4]
    without = FileTokenizer(words("t.json", ("?", "a")))
    assert (without.eot, without.stop_ids, without.vocab_size) == (2, (2,), 3)


CONFIG, SETTINGS, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"


@pytest.mark.parametrize(
    "beside, stops",
    [
        ({CONFIG: {"eos_token_id": 3}}, (3,)),
        ({CONFIG: {"eos_token_id": 3}, SETTINGS: {"eos_token_id": [4, 2]}}, (4, 2)),
        ({TOKENIZER: {"eos_token": "b"}, SETTINGS: {"eos_token_id": [3, 4, 99, -1]}}, (4, 3)),
        ({"special_tokens_map.json": {"eos_token": {"content": "in"}}}, (3,)),
        ({CONFIG: {"eos_token_id": None}, TOKENIZER: {"eos_token": None}}, (5,)),
    ],
)
def test_ends_that_are_configured(here, beside, stops):
    words("tokenizer.json")
    for name, content in beside.items():
        Path(name).write_text(json.dumps(content))
    tokenizer = FileTokenizer("tokenizer.json")
    assert (tokenizer.eot, tokenizer.stop_ids, tokenizer.bos) == (stops[0], stops, None)


@pytest.mark.parametrize("adds", [None, True, False])
@pytest.mark.parametrize("begins", [True, False])
def test_a_begin_token_where_the_model_has_one(here, adds, begins):
    """The file's post-processor says so. transformers 5 reads add_bos_token of no such folder."""
    bpe("tokenizer.json", begins=begins)
    names = {"bos_token": "<|begin_of_text|>", "add_bos_token": adds}
    Path("tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = FileTokenizer("tokenizer.json")
    bos = tokenizer.tokenizer.token_to_id("<|begin_of_text|>")
    assert tokenizer.bos == (bos if begins else None)
    prompt = prompt_ids(tokenizer, "if a")
    assert prompt == [bos] * begins + tokenizer.encode("if a")
    assert prompt_ids(tokenizer, "") == [bos if begins else tokenizer.eot]
    assert tokenizer.decode([*prompt, *tokenizer.stop_ids]) == "if a"
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(here)
    assert theirs("if a")["input_ids"] == prompt


def test_documents_begin_with_it(here):
    bpe("tokenizer.json")
    tokenizer = FileTokenizer("tokenizer.json")
    Path("d.jsonl").write_text('{"text": "if a"}\n{"text": "in b"}\n' * 40)
    ids = np.load(data.prepare(["d.jsonl"], tokenizer) / "tokens.npy").tolist()
    assert ids.count(tokenizer.bos) == ids.count(tokenizer.eot) == 80
    assert ids[0] == tokenizer.bos
    assert ids[-1] == tokenizer.eot


def test_several_ids_end_a_text():
    model = loud(build(vocab_size=61, **LLAMA))

    def continuation(**options):
        (ids,) = generate.generate(model, [[1, 2]], 20, temperature=0.9, **options)
        return ids

    whole = continuation()
    first = whole[9]
    second = next(i for i in whole[3:] if i not in whole[:3] and i != first)
    end = min(whole.index(first), whole.index(second))
    assert continuation(eot=(first, second)) == whole[:end]
    assert continuation(eot=first) == whole[: whole.index(first)]


# --------------------------------------------------------------------------------------------------
# What a run remembers


def swap(path):
    """Two tokens change their ids."""
    content = json.loads(Path(path).read_text())
    vocabulary = content["model"]["vocab"]
    a, b = (token for token, i in vocabulary.items() if i in (1, 2))
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    Path(path).write_text(json.dumps(content))


def test_another_content_under_the_same_path(here, capfd):
    words("t.json")
    original = Path("t.json").read_bytes()
    assert run("--out", "run", "--steps", "2", "--tokenizer", "t.json") == 0
    swap("t.json")
    capfd.readouterr()
    assert run("--out", "run", "--steps", "3", "--tokenizer", "t.json", "--resume") == 2
    lines = capfd.readouterr().err.splitlines()
    (error,) = (line for line in lines if line.startswith("train.py: "))
    assert "--tokenizer t.json: has another content than when" in error
    assert "--tokenizer run/tokenizer.json would fit" in error
    assert len(checkpoint.steps("run/checkpoints")) == 1
    assert run("--out", "run", "--steps", "3", "--tokenizer", "run/tokenizer.json", "--resume") == 0
    # The run's own copy is the default.
    assert run("--out", "run", "--steps", "4", "--resume") == 0
    words("u.json", ("?", "a", "if", "in", "b", "</s>"))
    capfd.readouterr()
    assert run("--out", "run", "--steps", "5", "--tokenizer", "u.json", "--resume") == 0
    out = capfd.readouterr().out
    assert "-> u.json" in out
    fingerprint = FileTokenizer("run/tokenizer.json").fingerprint[:16]
    assert f", tokenizer {fingerprint}" not in out
    assert ", tokenizer " in out
    assert Path("run/tokenizer.json").read_bytes() == Path("u.json").read_bytes() != original


def test_an_altered_copy_is_named(here, capfd):
    words("t.json")
    assert run("--out", "run", "--steps", "1", "--tokenizer", "t.json") == 0
    Path("t.json").unlink()
    checkpoint.main(["verify", "run"])
    assert run("--out", "two", "--steps", "1", "--load", "run") == 0
    swap("run/tokenizer.json")
    capfd.readouterr()
    with pytest.raises(CheckpointError, match=r"run/tokenizer.json is altered"):
        checkpoint.main(["verify", "run"])
    assert generate.main(["--checkpoint", "run", "--prompt", "a", "--device", "cpu"]) == 2
    assert run("--out", "three", "--steps", "1", "--load", "run") == 2
    assert run("--out", "run", "--steps", "2", "--resume") == 2
    assert huggingface.main(["export", "run", "hf"]) == 2
    lines = capfd.readouterr().err.splitlines()
    errors = [line for line in lines if "tokenizer.json is altered" in line]
    assert len(errors) == 4
    assert all("run/tokenizer.json" in error for error in errors)


def test_an_older_checkpoint_goes_on(here, capfd):
    """Without the field there is nothing to compare."""
    model = build(vocab_size=257, **LLAMA)
    save(here, model)
    assert "tokenizer" not in checkpoint.read_index(checkpoint.find(here))
    assert run("--out", "run", "--steps", "1", "--load", str(here)) == 0


def test_an_index_with_something_else_in_it(here):
    with pytest.raises(JSONError, match=r"index\.json: tokenizer: Expected"):
        checkpoint.tokenizer_record(Path("x"), {"tokenizer": {"files": 3}})
    assert checkpoint.tokenizer_record(Path("x"), {}) == TokenizerRecord()
    assert record(ByteTokenizer()).fingerprint == "bytes"


# --------------------------------------------------------------------------------------------------
# In a training run


def test_load_takes_the_tokenizer_of_the_checkpoint(here, capfd):
    words("t.json")
    assert run("--out", "base", "--steps", "1", "--tokenizer", "t.json") == 0
    for flags, expected in (([], "base/tokenizer.json"), (["--tokenizer", "t.json"], "t.json")):
        out = f"run{len(flags)}"
        assert run("--out", out, "--steps", "1", "--load", "base", *flags) == 0
        assert json.loads(Path(out, "config.json").read_text())["tokenizer"] == expected
    assert json.loads(Path("base/config.json").read_text())["vocab_size"] is None
    assert run("--out", "bytes", "--steps", "1") == 0
    assert json.loads(Path("bytes/config.json").read_text())["tokenizer"] == "bytes"


def test_a_larger_vocabulary_sets_the_model_s(here, capfd):
    tokenizer = words("t.json", ["?", *map(str, range(400)), "</s>"])
    assert run("--out", "run", "--steps", "1", "--tokenizer", tokenizer) == 0
    assert "--vocab-size 402: as many as --tokenizer t.json has" in capfd.readouterr().out
    assert checkpoint.read_index(checkpoint.find("run"))["model"]["vocab_size"] == 402
    assert run("--out", "run", "--steps", "2", "--tokenizer", tokenizer, "--resume") == 0
    assert run("--out", "b", "--steps", "1", "--tokenizer", tokenizer, "--vocab-size", "300") == 2
    assert "beyond --vocab-size 300; --vocab-size 402 would fit" in capfd.readouterr().err
    assert run("--out", "c", "--steps", "1") == 0
    assert run("--out", "d", "--steps", "1", "--load", "c", "--tokenizer", tokenizer) == 2
    assert "beyond the 257 of the model in --load c" in capfd.readouterr().err


def test_a_vocabulary_that_is_not_filled_is_said(here, capfd):
    assert run("--out", "run", "--steps", "1", "--vocab-size", "3000") == 0
    assert "--tokenizer bytes: fills 257 of the model's 3,000 ids" in capfd.readouterr().out
    assert run("--out", "b", "--steps", "1", "--vocab-size", "264") == 0
    assert "fills" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "flags, begins",
    [
        # the beginning of what was held out
        ([], None),
        (["--sample-prompt", "if a"], "if a"),
        (["--sample-prompt", ""], ""),
        (["--sample-prompt", "x" * 99], "x" * 32),
    ],
)
def test_sample_prompt(here, flags, begins):
    assert run("--out", "run", "--steps", "1", *flags) == 0
    sample = Path("run/sample.txt").read_text()
    if begins is None:
        folder = next(path for path in Path("cache").iterdir() if path.is_dir())
        held_out = data.Corpus(folder, 32, None, "held-out")
        begins = bytes(held_out.batch([0]).tokens[0, :16].tolist()).decode()
        assert begins.strip()
    assert sample.startswith(begins)


def test_a_sample_of_a_loaded_model_carries_its_name(here):
    assert run("--out", "base", "--steps", "1") == 0
    words = ["--load", "base", "--data", "text.txt", "--out", "run", "--steps", "1"]
    Path("text.txt").write_text("words of its own, " * 200)
    assert run(*words) == 0
    name, text = Path("run/sample.txt").read_text().split("\n\n", 1)
    assert name.startswith("[base, text.txt (") and name.endswith("), after step 1]")
    assert text[:16] in "words of its own, " * 3


def test_a_sample_prompt_that_is_no_text(here, capfd):
    assert run("--out", "run", "--steps", "1", "--sample-prompt", "\ud800") == 2
    assert "--sample-prompt '\\ud800': " in capfd.readouterr().err
    assert not Path("run/metrics.jsonl").exists()


def test_experts_that_cannot_be_exported(here, capfd):
    experts = ["--model", "tiny-moe", "--num-experts", "2", "--num-layers", "2"]
    assert run("--out", "run", "--steps", "1", *experts) == 0
    lines = capfd.readouterr().out.splitlines()
    (warning,) = (line for line in lines if "huggingface.py will not export these experts" in line)
    would_fit = "--router topk --router-topk 2 --expert-every 1"
    for expected in ("router sinkhorn", "expert_every 2", would_fit):
        assert expected in warning
    assert huggingface.main(["export", "run", "hf"]) == 2
    assert would_fit in capfd.readouterr().err


# --- training one ---------------------------------------------------------------------------------

# Every character of some blocks: bytes that no text of the training has.
ALL = "".join(map(chr, [*range(1, 0x800), *range(0x4E00, 0x4E80), *range(0x1F600, 0x1F650)]))


def trained(folder, *flags) -> FileTokenizer:
    train_tokenizer.main(["--data", "text.txt", "--out", str(folder), *flags])
    return make_tokenizer(str(folder / "tokenizer.json"))


def test_a_trained_tokenizer(here):
    """The same file again; any text comes back exactly; words of the text are single tokens; a run
    takes it."""
    flags = "--vocab-size", "300"
    first, second = (trained(here / name, *flags) for name in "ab")
    assert first.files == second.files and 257 < first.vocab_size <= 300 and first.eot == 0
    for text in (ALL, TEXT, "\r\n \t x  y\u200d\u0301 "):
        assert first.decode(first.encode(text)) == text
    assert len(first.encode(" return a while")) == 3
    assert run("--tokenizer", "a/tokenizer.json", "--vocab-size", "300", "--steps", "1") == 0


def test_bytes_that_the_text_lacks_are_tokens(here, monkeypatch):
    """Without the 256 bytes as an alphabet, other texts would not come back."""
    monkeypatch.setattr(tokenizers.pre_tokenizers.ByteLevel, "alphabet", lambda self: [])
    train_tokenizer.main(["--data", "text.txt", "--out", "a"])
    library = tokenizers.Tokenizer.from_file("a/tokenizer.json")
    assert library.decode(library.encode(ALL).ids) != ALL


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--vocab-size 256", "--vocab-size 256: must be at least 257"),
        ("--data nowhere", "nowhere: no such file"),
        ("--out text.txt/a", "cannot be written"),
        ("--out there", "has a tokenizer.json"),
    ],
)
def test_refusals_of_training(here, flags, words):
    Path("there").mkdir()
    Path("there/tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=words):
        train_tokenizer.main([*"--data text.txt --out new".split(), *flags.split()])
