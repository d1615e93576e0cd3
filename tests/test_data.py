"""Text to batches: the stream does not depend on files, parts, processes or ranks; a damaged cache
is never trained on; a file that cannot be used is one line."""

import builtins
import gzip
import json
import math
import multiprocessing
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from base import terminal
from course import ranks
from run import data, documents, token_cache
from run.data import Corpus, DataError, prepare
from run.tokenizer import ByteTokenizer, TokenizerError, make_tokenizer
from run.world import World

TEXTS = [f"document {i}: " + "the quick brown fox, " * (i % 7 + 1) + "é" for i in range(60)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_jsonl(path, texts=TEXTS):
    with open(path, "w") as f:
        for text in texts:
            f.write(json.dumps({"text": text, "other": 1}) + "\n")
    return path


def stream(folder):
    """The token ids of a prepared corpus."""
    return np.load(folder / "tokens.npy").tolist()


def raiser(error):
    """A function that raises `error`, whatever its arguments."""

    def raise_it(*args, **options):
        raise error

    return raise_it


def test_documents_are_separated_and_complete(here):
    folder = prepare([str(write_jsonl(here / "a.jsonl"))], ByteTokenizer())
    ids = stream(folder)
    # no text has a zero byte
    *texts, rest = bytes(0 if i == 256 else i for i in ids).decode().split("\0")
    assert sorted(texts) == sorted(TEXTS) and not rest
    index = json.loads((folder / "index.json").read_text())
    assert index["documents"] == 60
    assert index["tokens"] == len(ids)
    assert index["bytes"] == len(ids) - 60


def test_every_form_of_the_same_text_gives_the_same_stream(here):
    """Plain, zipped, in one file or a folder of many, in any order."""
    reference = stream(prepare([str(write_jsonl(here / "a.jsonl"))], ByteTokenizer(), "c1"))
    with gzip.open(here / "b.jsonl.gz", "wt") as f:
        f.write((here / "a.jsonl").read_text())
    (here / "folder" / "deep").mkdir(parents=True)
    for i, text in enumerate(TEXTS):
        parent = here / "folder" / ("deep" if i % 2 else ".")
        if i % 3:
            (parent / f"{60 - i}.txt").write_text(text)
        else:
            with gzip.open(parent / f"{60 - i}.txt.gz", "wt") as f:
                f.write(text)
    (here / "folder" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (here / "folder" / "empty.txt").touch()
    assert stream(prepare(["b.jsonl.gz"], ByteTokenizer(), "c2")) == reference
    assert stream(prepare(["folder"], ByteTokenizer(), "c3")) == reference


def test_parts_and_processes_change_nothing(here, monkeypatch):
    path = str(write_jsonl(here / "a.jsonl"))
    reference = stream(prepare([path], ByteTokenizer(), "c1"))
    monkeypatch.setattr(data, "PART_BYTES", 700)
    assert len(documents.split_parts([Path(path)], data.PART_BYTES)) > 5
    assert stream(prepare([path], ByteTokenizer(), "c2")) == reference
    assert stream(prepare([path], ByteTokenizer(), "c3", workers=2)) == reference


def on_rank(rank, path, cache):
    data.PART_BYTES = 700

    n = dist.get_world_size()
    try:
        return stream(prepare([path], ByteTokenizer(), cache, World(rank, n, rank, n, restarts=0)))
    except DataError as e:
        return str(e)


def test_ranks_share_the_work_and_the_errors(here):
    path = str(write_jsonl(here / "a.jsonl"))
    reference = stream(prepare([path], ByteTokenizer(), "c1"))
    assert ranks.run(on_rank, 3, path, str(here / "c2")) == [reference] * 3
    with open(path, "a") as f:
        f.write('{"text": 3}\n')
    errors = ranks.run(on_rank, 3, path, str(here / "c3"))
    assert f"--data {path}, line 61: Expected `str`, got `int`" in errors[0]
    assert errors == [errors[0]] * 3


def prepare_in_process(path, cache, queue):
    queue.put(stream(prepare([path], ByteTokenizer(), cache)))


def test_two_runs_at_once(here):
    path = str(write_jsonl(here / "a.jsonl", TEXTS * 50))
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    processes = [
        context.Process(target=prepare_in_process, args=(path, str(here / "cache"), queue))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    streams = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert streams == [stream(prepare([path], ByteTokenizer(), "other"))] * 3
    # The corpus and its lock: no leftovers.
    assert len(list((here / "cache").iterdir())) == 2


def test_cache_follows_contents_and_tokenizer(here):
    path = write_jsonl(here / "a.jsonl")
    first = prepare([str(path)], ByteTokenizer())
    inode = (first / "tokens.npy").stat().st_ino
    assert prepare([str(path)], ByteTokenizer()) == first
    assert (first / "tokens.npy").stat().st_ino == inode
    (here / "moved").mkdir()
    path.rename(here / "moved" / "b.jsonl")
    assert prepare(["moved"], ByteTokenizer()) == first
    write_jsonl(here / "moved" / "b.jsonl", [*TEXTS, "more"])
    assert prepare(["moved"], ByteTokenizer()) != first


def test_held_out_text_is_never_trained_on(here):
    folder = prepare([str(write_jsonl(here / "a.jsonl"))], ByteTokenizer())
    train = Corpus(folder, 32, 0)
    held_out = Corpus(folder, 32, None, "held-out")
    everything = stream(folder)
    boundary = json.loads((folder / "index.json").read_text())["held_out_from"]
    assert len(train.stream) == boundary
    assert held_out.stream.tolist() == everything[boundary:]
    assert len(everything) - boundary == len(everything) // 20
    n = train.num_sequences
    batch = train.batch(range(3 * n))
    ids = torch.cat((batch.tokens, batch.targets[:, -1:]), 1)
    trained = {tuple(row) for row in ids.tolist()}
    assert trained == {tuple(everything[i * 32 : i * 32 + 33]) for i in range(n)}
    assert (n - 1) * 32 + 33 <= boundary


def test_order_depends_on_seed_and_sample_alone(here):
    folder = prepare([str(write_jsonl(here / "a.jsonl"))], ByteTokenizer())
    a = Corpus(folder, 16, 0)
    b = Corpus(folder, 16, 0)
    other = Corpus(folder, 16, 1)
    n = a.num_sequences
    whole = a.batch(range(2 * n))
    # Epochs in another order.
    samples = [5, 2 * n - 1, 0, n]
    alone = torch.stack([b.batch([sample]).tokens[0] for sample in samples])
    assert torch.equal(alone, whole.tokens[samples])
    first = [a.sequence_of(sample) for sample in range(n)]
    second = [a.sequence_of(sample) for sample in range(n, 2 * n)]
    assert sorted(first) == sorted(second) == list(range(n))
    assert first != second
    assert second != [other.sequence_of(sample) for sample in range(n, 2 * n)]
    assert torch.equal(whole.tokens[:, 1:], whole.targets[:, :-1])
    assert whole.loss_mask.all()
    assert whole.samples.tolist() == list(range(2 * n))


def test_standard_library_is_there():
    files = data.find_files([])
    assert sum(file.stat().st_size for file in files) > 5e6
    for file in files:
        assert "test" not in file.parts
        assert "site-packages" not in file.parts


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("empty.txt", b"", ["empty.txt", "empty"]),
        ("binary.txt", b"text\0more", ["binary.txt", "not UTF-8", "0x00", "offset 4"]),
        ("latin.txt", b"caf\xe9 x", ["latin.txt", "not UTF-8", "0xe9", "offset 3"]),
        ("bad.jsonl", b'{"text": "a"}\n\n{"text": \n', ["bad.jsonl, line 3", "not JSON"]),
        ("nofield.jsonl", b'{"txt": "a"}\n', ["nofield.jsonl, line 1", "would fit"]),
        ("half.jsonl", b'{"text": "a\\ud800b"}\n', ["half.jsonl, line 1", "surrogate"]),
        ("broken.txt.gz", b"not gzip", ["broken.txt.gz", "cannot be read"]),
        ("blank.jsonl", b'{"text": ""}\n', ["no text"]),
    ],
)
def test_bad_files(here, name, content, words):
    (here / name).write_bytes(content)
    with pytest.raises(DataError) as e:
        prepare([name], ByteTokenizer())
    assert all(word in str(e.value) for word in words), str(e.value)
    assert not list(here.glob("cache/*/index.json"))


def test_files_that_are_not_utf8(here, capfd):
    """Named, with what helps; or left out."""
    (here / "texts").mkdir()
    for name in "abcde":
        (here / f"texts/{name}.txt").write_bytes(b"caf\xe9 " * 9)
    (here / "texts/good.txt").write_text("a text of letters " * 9)
    for name in "wxyz":
        (here / f"texts/{name}.png").write_bytes(b"\0")
    with pytest.raises(DataError) as e:
        prepare(["texts"], ByteTokenizer())
    assert "texts/a.txt: not UTF-8 text" in str(e.value), str(e.value)
    assert "; iconv" in str(e.value) and "--skip-bad-examples leaves it out" in str(e.value)
    left_out = "4 of 10 files are empty or not text, and left out: w.png, x.png, y.png, .."
    assert left_out in capfd.readouterr().err
    folder = prepare(["texts"], ByteTokenizer(), skip_bad=True)
    assert "5 files are not UTF-8, and left out: a.txt, b.txt, c.txt, .." in capfd.readouterr().err
    (here / "texts2").mkdir()
    (here / "texts2/good.txt").write_text("a text of letters " * 9)
    # the same corpus as without them
    assert prepare(["texts2"], ByteTokenizer()) == folder
    with pytest.raises(DataError, match="none of 1 files is UTF-8 text: a"):
        prepare(["texts/a.txt"], ByteTokenizer(), skip_bad=True)


def test_bad_folders_lines_and_lengths(here, monkeypatch):
    (here / "nothing").mkdir()
    with pytest.raises(DataError, match="no text in this folder"):
        prepare(["nothing"], ByteTokenizer())
    # The line is counted from the start of the file, not of the part.
    monkeypatch.setattr(data, "PART_BYTES", 300)
    write_jsonl(here / "long.jsonl", TEXTS[:20])
    with open(here / "long.jsonl", "a") as f:
        f.write("{\n")
    with pytest.raises(DataError, match=r"long\.jsonl, line 21: not JSON"):
        prepare(["long.jsonl"], ByteTokenizer())
    (here / "short.txt").write_text("a few words")
    with pytest.raises(DataError, match=r"too short.*--seq-length of at most 1"):
        Corpus(prepare(["short.txt"], ByteTokenizer()), 64, 0, "held-out")


def test_gpt2_tokenizer_without_network(monkeypatch, tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setattr(tiktoken, "get_encoding", raiser(OSError("no network")))
    with pytest.raises(TokenizerError, match="could not fetch its vocabulary"):
        make_tokenizer("gpt2")


# --------------------------------------------------------------------------------------------------
# The cache is what was written, or is not trained on


def mutate_bytes(g, content: bytes) -> bytes:
    """A flipped bit, a shorter or longer file, a piece twice, or nothing at all."""
    at = g.randrange(len(content))
    kind = g.randrange(6)
    flipped = content[:at] + bytes([content[at] ^ 1 << g.randrange(8)]) + content[at + 1 :]
    longer = content + bytes(g.randrange(1, 9))
    repeated = content[:at] + content[at // 2 :]
    return (flipped, flipped, content[:at], longer, repeated, b"")[kind]


@pytest.mark.parametrize("name", ["index.json", "tokens.npy"])
def test_changed_bytes_of_a_cached_corpus(here, capsys, name):
    """50 changes: each is noticed, named in one line, and repaired. (bad_files.py changes values
    too.)"""
    path = str(write_jsonl(here / "a.jsonl", TEXTS[:12]))
    g = random.Random(0)
    folder = prepare([path], ByteTokenizer())
    original = (folder / name).read_bytes()
    reference = stream(folder)
    rebuilt = 0
    for _ in range(50):
        mutant = mutate_bytes(g, original)
        (folder / name).write_bytes(mutant)
        fault = token_cache.check(folder)
        if fault is None and name == "index.json":
            # the same JSON in other bytes, perhaps with a key that nobody reads
            assert json.loads(mutant).items() >= json.loads(original).items(), mutant
            continue
        rebuilt += 1
        assert str(folder) in fault and "\n" not in fault
        capsys.readouterr()
        assert prepare([path], ByteTokenizer()) == folder
        message = capsys.readouterr().err.split("\r")[0]
        assert message.count("\n") == 1 and fault in message
        assert stream(folder) == reference
    assert rebuilt > 45


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "tokens.npy").unlink(),
        lambda folder: ((folder / "index.json").unlink(), (folder / "index.json").mkdir()),
        lambda folder: (shutil.rmtree(folder), folder.write_text("a file")),
    ],
)
def test_a_damaged_cache_is_refused_or_rebuilt(here, damage):
    path = str(write_jsonl(here / "a.jsonl"))
    folder = prepare([path], ByteTokenizer())
    reference = stream(folder)
    damage(folder)
    with pytest.raises(DataError, match="the cached corpus is damaged"):
        Corpus(folder, 16, 0)
    assert prepare([path], ByteTokenizer()) == folder and stream(folder) == reference


def test_another_corpus_under_this_name(here):
    first = prepare([str(write_jsonl(here / "a.jsonl"))], ByteTokenizer())
    second = prepare([str(write_jsonl(here / "b.jsonl", TEXTS[:30]))], ByteTokenizer())
    reference = stream(first)
    shutil.rmtree(first)
    shutil.copytree(second, first)
    assert stream(prepare([str(here / "a.jsonl")], ByteTokenizer())) == reference


def check_on_rank(rank, path, cache):
    token_cache.BLOCK_BYTES = 512
    return on_rank(rank, path, cache)


def test_ranks_share_the_check(here, monkeypatch):
    """A byte that one rank of three looks at: all build again."""
    monkeypatch.setattr(data, "PART_BYTES", 700)
    monkeypatch.setattr(token_cache, "BLOCK_BYTES", 512)
    path = str(write_jsonl(here / "a.jsonl"))
    folder = prepare([path], ByteTokenizer(), here / "cache")
    reference = stream(folder)
    content = bytearray((folder / "tokens.npy").read_bytes())
    index, _ = token_cache.read(folder)
    assert len(index.blocks) == math.ceil(len(content) / 512) > 9
    # Block 4 is rank 1's.
    content[512 * 4 + 100] ^= 1
    (folder / "tokens.npy").write_bytes(content)
    assert [token_cache.check(folder, rank, 3) is None for rank in range(3)] == [True, False, True]
    assert ranks.run(check_on_rank, 3, path, str(here / "cache")) == [reference] * 3


def test_damaged_parts_of_a_killed_run_are_done_again(here, monkeypatch):
    path = str(write_jsonl(here / "a.jsonl"))
    monkeypatch.setattr(data, "PART_BYTES", 700)
    reference = stream(prepare([path], ByteTokenizer(), "c1"))
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(data, "merge_parts", raiser(KeyboardInterrupt))
        prepare([path], ByteTokenizer(), "c2")
    g = random.Random(0)
    for file in sorted(here.glob("c2/*.parts/*"))[::2]:
        file.write_bytes(mutate_bytes(g, file.read_bytes()))
    done = []
    tokenize_part = data.tokenize_part

    def counting(*job):
        done.append(job)
        return tokenize_part(*job)

    monkeypatch.setattr(data, "tokenize_part", counting)
    assert stream(prepare([path], ByteTokenizer(), "c2")) == reference
    parts = documents.split_parts([Path(path)], data.PART_BYTES)
    left = list(here.glob("c2/*.parts/*"))
    assert 0 < len(done) < len(parts) or not left


# --------------------------------------------------------------------------------------------------
# Names, files and folders that cannot be used


@pytest.mark.parametrize(
    "name, cache, words",
    [
        ("", "c", "--data ''"),
        ("x" * 300, "c", "File name too long"),
        ("pipe", "c", "--data pipe: neither a file nor a folder"),
        ("a.jsonl", "a.jsonl", "--cache a.jsonl: .*exists"),
        ("a.jsonl", "a.jsonl/cache", "--cache a.jsonl/cache: .*Not a directory"),
        # in the words of Python 3.11, and of 3.13
        ("a.jsonl", "a\0b", "null (byte|character)"),
    ],
)
def test_unusable_names(here, name, cache, words):
    os.mkfifo("pipe")
    write_jsonl(here / "a.jsonl")
    with pytest.raises(DataError, match=words):
        prepare([name], ByteTokenizer(), cache)


def deny(monkeypatch, module, name, target):
    """Make `module.name(target)` fail as it does without permission, for root too."""
    call = getattr(module, name)

    def denying(path=".", *args, **options):
        if str(path).endswith(target):
            raise PermissionError(13, "Permission denied", str(path))
        return call(path, *args, **options)

    monkeypatch.setattr(module, name, denying, raising=False)


@pytest.mark.parametrize("what, target", [("scandir", "deep"), ("open", "a.txt")])
def test_without_permission(here, monkeypatch, what, target):
    (here / "texts" / "deep").mkdir(parents=True)
    (here / "texts" / "a.txt").write_text("some text")
    (here / "texts" / "deep" / "b.txt").write_text("some text")
    module = os if what == "scandir" else builtins
    deny(monkeypatch, module, what, target)
    with pytest.raises(DataError) as e:
        prepare(["texts"], ByteTokenizer())
    words = "cannot be read (Permission denied); mend this, or leave it out"
    assert str(e.value) == f"--data texts/{target}: {words}"


def test_a_cache_without_room_or_permission(here, monkeypatch):
    path = str(write_jsonl(here / "a.jsonl"))
    built = prepare([path], ByteTokenizer(), "built")
    expected = "--cache full: cannot be used (No space left on device); make room or name another"
    for module, call in ((Path, "mkdir"), (np, "save")):
        with monkeypatch.context() as m, pytest.raises(DataError) as e:
            m.setattr(module, call, raiser(OSError(28, "No space left on device")))
            prepare([path], ByteTokenizer(), "full")
        assert str(e.value).startswith(expected)
    # A corpus that is there needs no permission to write.
    with monkeypatch.context() as m:
        m.setattr(Path, "mkdir", raiser(PermissionError(13, "Permission denied")))
        assert prepare([path], ByteTokenizer(), "built") == built


def test_data_py_refuses_in_one_line(here, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run/data.py", "--data", "missing"])
    with pytest.raises(SystemExit, match="2"):
        terminal.run(data.main)
    assert capsys.readouterr().err == "data.py: --data missing: no such file or folder\n"


def test_huge_sample_numbers(here):
    """2^31 steps of 2^20 samples: an epoch is found without the ones before."""
    folder = prepare([str(write_jsonl(here / "a.jsonl"))], ByteTokenizer())
    corpus = Corpus(folder, 16, 2**31 - 1)
    n = corpus.num_sequences
    last = 2**51
    start = last // n * n
    epoch = [corpus.sequence_of(sample) for sample in range(start, start + n)]
    assert sorted(epoch) == list(range(n))
    fresh = Corpus(folder, 16, 2**31 - 1)
    assert corpus.sequence_of(last - 1) == fresh.sequence_of(last - 1)
    assert corpus.batch([last - 1, np.int64(last)]).samples.tolist() == [last - 1, last]


def test_a_cache_that_one_machine_has():
    with pytest.raises(DataError) as refused, token_cache.cache_errors("c"):
        os.stat("no such folder/c")
    assert "name one that every rank sees" in str(refused.value)
    assert "make room" not in str(refused.value)


@pytest.mark.parametrize(
    "name, count",
    [
        *[(name, 2) for name in ("a.jsonl", "a.JSONL", "a.ndjson", "a.json", "b.c.json")],
        # a name that says nothing
        *[(name, 1) for name in ("a.txt", "a", "a.md")],
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_lines_whatever_their_file_is_called(tmp_path, name, count, compressed):
    text = b'{"text": "one"}\n{"text": "two", "id": 3}\n'
    path = tmp_path / (name + ".gz" * compressed)
    path.write_bytes(gzip.compress(text) if compressed else text)
    found = list(documents.read_documents(path, 0, None))
    assert found == (["one", "two"] if count == 2 else [text.decode()])


@pytest.mark.parametrize("text", ['{\n  "text": "one"\n}\n', '["one"]\n', "{}", '{"text": 3}'])
def test_json_that_is_no_lines(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert list(documents.read_documents(path, 0, None)) == [text]


def test_the_cache_knows_how_a_file_was_read(tmp_path):
    line = '{"text": "one"}\n'
    hashes = set()
    for name in ("a.jsonl", "a.ndjson", "a.json", "a.txt", "a"):
        path = tmp_path / name
        path.write_text(line)
        hashes.add((documents.has_lines(path), documents.file_hash(path)))
    assert len(hashes) == 2
