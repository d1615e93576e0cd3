import gzip
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import data
from corpus import token_cache
from corpus.tokenizer import ByteTokenizer, TokenizerError, make_tokenizer
from data import Corpus, DataError, prepare
from lessons import ranks

ROOT = Path(__file__).parent.parent
TEXTS = [f"document {i}: " + "the quick brown fox, " * (i % 7 + 1) + "é" for i in range(60)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_jsonl(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": t, "other": 1}) + "\n" for t in texts))
    return path


def stream(folder):
    return np.load(folder / "tokens.npy").tolist()


def test_documents_are_separated_and_complete(here):
    folder = prepare([str(write_jsonl(here / "a.jsonl"))], ByteTokenizer())
    ids = stream(folder)
    documents = []
    current = []
    for i in ids:
        if i == 256:
            documents.append(bytes(current).decode())
            current = []
        else:
            current.append(i)
    assert not current and sorted(documents) == sorted(TEXTS)
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
        name = here / "folder" / ("deep" if i % 2 else ".") / f"{60 - i}.txt"
        if i % 3:
            name.write_text(text)
        else:
            with gzip.open(f"{name}.gz", "wt") as f:
                f.write(text)
    (here / "folder" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (here / "folder" / "empty.txt").touch()
    assert stream(prepare(["b.jsonl.gz"], ByteTokenizer(), "c2")) == reference
    assert stream(prepare(["folder"], ByteTokenizer(), "c3")) == reference


def test_parts_and_processes_change_nothing(here, monkeypatch):
    path = str(write_jsonl(here / "a.jsonl"))
    reference = stream(prepare([path], ByteTokenizer(), "c1"))
    monkeypatch.setattr(data, "PART_BYTES", 700)
    assert len(data.split_parts([Path(path)])) > 5
    assert stream(prepare([path], ByteTokenizer(), "c2")) == reference
    assert stream(prepare([path], ByteTokenizer(), "c3", workers=2)) == reference


def on_rank(rank, path, cache):
    data.PART_BYTES = 700

    def exchange(x):
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, x)
        return gathered

    try:
        return stream(
            prepare([path], ByteTokenizer(), cache, exchange, rank, dist.get_world_size())
        )
    except DataError as e:
        return str(e)


def test_ranks_share_the_work_and_the_errors(here):
    path = str(write_jsonl(here / "a.jsonl"))
    reference = stream(prepare([path], ByteTokenizer(), "c1"))
    assert ranks.run(on_rank, 3, path, str(here / "c2")) == [reference] * 3
    with open(path, "a") as f:
        f.write('{"text": 3}\n')
    errors = ranks.run(on_rank, 3, path, str(here / "c3"))
    assert (
        errors
        == [
            f'--data {path}, line 61: Expected `str`, got `int` - at `$.text`; {{"text": "..."}}'
            " would fit"
        ]
        * 3
    )


def prepare_in_process(path, cache, queue):
    queue.put(stream(prepare([path], ByteTokenizer(), cache)))


def test_two_runs_at_once(here):
    path = str(write_jsonl(here / "a.jsonl", TEXTS * 50))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=prepare_in_process, args=(path, str(here / "cache"), queue))
        for _ in range(3)
    ]
    for p in processes:
        p.start()
    streams = [queue.get(timeout=60) for _ in processes]
    for p in processes:
        p.join()
    assert (
        streams[0] == streams[1] == streams[2] == stream(prepare([path], ByteTokenizer(), "other"))
    )
    # the corpus and its lock: no leftovers
    assert len(list((here / "cache").iterdir())) == 2


def test_killed_half_way(here, monkeypatch):
    """Parts that were done are kept, the rest is done again, and nothing half-written is ever taken
    for whole."""
    path = str(write_jsonl(here / "a.jsonl", TEXTS * 200))
    script = (
        f"import data, tokenizer; data.PART_BYTES = 2000; data.prepare([{path!r}],"
        " tokenizer.ByteTokenizer())"
    )
    for delay in (0.0, 0.15, 0.4):
        p = subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=here,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )
        start = time.monotonic()
        while (
            not list(here.glob("cache/*.parts/*"))
            and time.monotonic() - start < 30
            and p.poll() is None
        ):
            time.sleep(0.01)
        time.sleep(delay)
        p.send_signal(signal.SIGKILL)
        p.wait()
    monkeypatch.setattr(data, "PART_BYTES", 2000)
    folder = prepare([path], ByteTokenizer())
    assert stream(folder) == stream(prepare([path], ByteTokenizer(), "other"))
    assert sorted(x.name for x in (here / "cache").iterdir()) == [
        folder.name,
        folder.name + ".lock",
    ]


def test_cache_follows_contents_and_tokenizer(here):
    path = write_jsonl(here / "a.jsonl")
    first = prepare([str(path)], ByteTokenizer())
    inode = (first / "tokens.npy").stat().st_ino
    assert prepare([str(path)], ByteTokenizer()) == first
    assert (first / "tokens.npy").stat().st_ino == inode
    (here / "moved").mkdir()
    path.rename(here / "moved" / "b.jsonl")
    assert prepare(["moved"], ByteTokenizer()) == first
    write_jsonl(here / "moved" / "b.jsonl", TEXTS + ["more"])
    assert prepare(["moved"], ByteTokenizer()) != first


def test_held_out_text_is_never_trained_on(here):
    folder = prepare([str(write_jsonl(here / "a.jsonl"))], ByteTokenizer())
    train = Corpus(folder, 32, 0)
    held_out = Corpus(folder, 32, None, "held-out")
    everything = stream(folder)
    at = json.loads((folder / "index.json").read_text())["held_out_from"]
    assert len(train.stream) == at
    assert held_out.stream.tolist() == everything[at:]
    assert len(everything) - at == len(everything) // 20
    batch = train.batch(range(3 * train.num_sequences))
    starts = {tuple(row) for row in torch.cat((batch.tokens, batch.targets[:, -1:]), 1).tolist()}
    assert starts == {tuple(everything[i * 32 : i * 32 + 33]) for i in range(train.num_sequences)}
    assert (train.num_sequences - 1) * 32 + 33 <= at


def test_order_depends_on_seed_and_sample_alone(here):
    folder = prepare([str(write_jsonl(here / "a.jsonl"))], ByteTokenizer())
    a = Corpus(folder, 16, 0)
    b = Corpus(folder, 16, 0)
    other = Corpus(folder, 16, 1)
    n = a.num_sequences
    whole = a.batch(range(2 * n))
    assert torch.equal(
        torch.stack([b.batch([i]).tokens[0] for i in (5, 2 * n - 1, 0, n)]),
        whole.tokens[[5, 2 * n - 1, 0, n]],
    )
    epochs = [[a.window(i) for i in range(e * n, (e + 1) * n)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(n))
    assert epochs[0] != epochs[1] != [other.window(i) for i in range(n, 2 * n)]
    assert torch.equal(whole.tokens[:, 1:], whole.targets[:, :-1])
    assert whole.loss_mask.all()
    assert whole.samples.tolist() == list(range(2 * n))


def test_standard_library_is_there():
    files = data.find_files([])
    assert sum(f.stat().st_size for f in files) > 5e6
    assert not any("test" in f.parts or "site-packages" in f.parts for f in files)


def test_tokenizers_file(here):
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.save("bpe.json")
    tokenizer = make_tokenizer("bpe.json")
    # it has none of its own
    assert tokenizer.eot == bpe.get_vocab_size() and tokenizer.vocab_size == tokenizer.eot + 1
    assert tokenizer.decode(tokenizer.encode(TEXTS[3])) == TEXTS[3]
    folder = prepare([str(write_jsonl(here / "a.jsonl"))], tokenizer)
    ids = stream(folder)
    assert ids.count(tokenizer.eot) == 60 and len(ids) < 0.6 * sum(len(t) for t in TEXTS)
    bpe.add_special_tokens(["<|endoftext|>"])
    bpe.save("bpe2.json")
    other = make_tokenizer("bpe2.json")
    assert other.eot == other.vocab_size - 1 == bpe.token_to_id("<|endoftext|>")
    assert prepare([str(here / "a.jsonl")], other) != folder


def test_byte_tokenizer_round_trip():
    t = ByteTokenizer()
    assert t.decode(t.encode("naïve ∑ \n").tolist() + [256]) == "naïve ∑ \n"


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("missing.txt", None, ["missing.txt", "no such file"]),
        ("empty.txt", b"", ["empty.txt", "empty"]),
        ("binary.txt", b"text\0more", ["binary.txt", "not UTF-8", "0x00", "offset 4"]),
        ("latin.txt", b"caf\xe9 x", ["latin.txt", "not UTF-8", "0xe9", "offset 3"]),
        ("bad.jsonl", b'{"text": "a"}\n\n{"text": \n', ["bad.jsonl, line 3", "not JSON"]),
        (
            "nofield.jsonl",
            b'{"txt": "a"}\n',
            ["nofield.jsonl, line 1", "missing", '{"text": "..."} would fit'],
        ),
        ("half.jsonl", b'{"text": "a\\ud800b"}\n', ["half.jsonl, line 1", "surrogate"]),
        (
            "utf8.jsonl",
            b'{"text": "a"}\n{"text": "caf\xe9"}\n',
            ["utf8.jsonl, line 2", "not UTF-8", "0xe9"],
        ),
        ("deep.jsonl", b"[" * 200_000, ["deep.jsonl, line 1"]),
        ("long.jsonl", b'{"text": ' + b"1" * 5000 + b"}", ["long.jsonl, line 1"]),
        ("list.jsonl", b'["a"]\n', ["list.jsonl, line 1", "got `array`"]),
        ("broken.txt.gz", b"not gzip", ["broken.txt.gz", "cannot be read"]),
        ("blank.jsonl", b'{"text": ""}\n', ["no text"]),
    ],
)
def test_bad_files(here, name, content, words):
    if content is not None:
        (here / name).write_bytes(content)
    with pytest.raises(DataError) as e:
        prepare([name], ByteTokenizer())
    assert all(word in str(e.value) for word in words), str(e.value)
    assert not [p for p in here.glob("cache/*") if (p / "index.json").exists()]


def test_bad_folders_lines_and_lengths(here, monkeypatch):
    (here / "nothing").mkdir()
    with pytest.raises(DataError, match="no text in this folder"):
        prepare(["nothing"], ByteTokenizer())
    # the line is counted from the start of the file, not of the part
    monkeypatch.setattr(data, "PART_BYTES", 300)
    write_jsonl(here / "long.jsonl", TEXTS[:20])
    with open(here / "long.jsonl", "a") as f:
        f.write("{\n")
    with pytest.raises(DataError, match="long.jsonl, line 21: not JSON"):
        prepare(["long.jsonl"], ByteTokenizer())
    (here / "short.txt").write_text("a few words")
    with pytest.raises(DataError, match="too short.*--seq-length of at most 1"):
        Corpus(prepare(["short.txt"], ByteTokenizer()), 64, 0, "held-out")


@pytest.mark.parametrize("content", ["{}", "not json", None])
def test_bad_tokenizer_files(here, content):
    if content is not None:
        Path("t.json").write_text(content)
    with pytest.raises(TokenizerError, match="--tokenizer t.json: not bytes, gpt2, or a JSON file"):
        make_tokenizer("t.json")


def test_gpt2_tokenizer_without_network(monkeypatch, tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setattr(
        tiktoken, "get_encoding", lambda name: (_ for _ in ()).throw(OSError("no network"))
    )
    with pytest.raises(TokenizerError, match="could not fetch its vocabulary"):
        make_tokenizer("gpt2")


# The cache is what was written, or is not trained on


def npy(array, **options):
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def mutate_bytes(g, content: bytes) -> bytes:
    """A flipped bit, another byte, a shorter or longer file, a piece twice, or nothing at all."""
    at = g.randrange(len(content))
    kind = g.randrange(6)
    flipped = content[:at] + bytes([content[at] ^ 1 << g.randrange(8)]) + content[at + 1 :]
    return (
        flipped,
        flipped,
        content[:at],
        content + bytes(g.randrange(1, 9)),
        content[:at] + content[at // 2 :],
        b"",
    )[kind]


def mutate_index(g, content: bytes) -> bytes:
    """A field of another type or value, a field less, another document, or other bytes."""
    index = json.loads(content)
    kind = g.randrange(4)
    field = g.choice(sorted(index))
    values = [
        None,
        True,
        -1,
        0,
        1,
        2**63,
        10**40,
        1.5,
        "",
        "x",
        [],
        {},
        [None],
        index["tokens"] - 1,
        index["blocks"] * 2,
    ]
    if kind == 0:
        return mutate_bytes(g, content)
    if kind == 1:
        return g.choice(
            [
                b"null",
                b"[]",
                b"3",
                b"{}",
                b'"text"',
                b"[" * 10_000,
                b"NaN",
                b"\xff",
                b'{"key": "\\ud800"}',
            ]
        )
    if kind == 2:
        del index[field]
        return json.dumps(index).encode()
    return json.dumps(index | {field: g.choice([v for v in values if v != index[field]])}).encode()


def mutate_tokens(g, content: bytes) -> bytes:
    """Nearly the same ids, or in another type or shape; objects, as numpy pickles them; other
    bytes."""
    ids = np.load(io.BytesIO(content))
    archive = io.BytesIO()
    np.savez(archive, tokens=ids)
    return g.choice(
        [
            lambda: mutate_bytes(g, content),
            lambda: npy(ids.astype(g.choice(["<u4", "<i8", "<f4", ">u2", "<i2"]))),
            lambda: npy(ids[None]),
            lambda: npy(ids[:0]),
            lambda: npy(ids[0]),
            lambda: npy(ids.astype(object), allow_pickle=True),
            archive.getvalue,
            lambda: npy(np.append(ids, ids[:1])),
            lambda: npy(np.where(ids == ids[9], 999, ids)),
        ]
    )()


def test_200_mutations_of_a_cached_corpus(here, capsys):
    path = str(write_jsonl(here / "a.jsonl", TEXTS[:12]))
    g = random.Random(0)
    folder = prepare([path], ByteTokenizer())
    shutil.copytree(folder, here / "whole")
    files = {name: (here / "whole" / name).read_bytes() for name in ("index.json", "tokens.npy")}
    reference, ids = token_cache.read(folder)
    rebuilt = 0
    # a copy: `ids` is the file
    reference_ids = ids.tolist()
    for _ in range(200):
        name = g.choice(sorted(files))
        changed = (mutate_index if name == "index.json" else mutate_tokens)(g, files[name])
        (folder / name).write_bytes(changed)
        fault = token_cache.check(folder)
        assert fault is None or ("\n" not in fault and str(folder) in fault)
        assert (
            fault
            or changed == files[name]
            or (name == "index.json" and json.loads(changed) == json.loads(files[name]))
        ), changed
        capsys.readouterr()
        assert prepare([path], ByteTokenizer()) == folder
        said = capsys.readouterr().err
        assert said.split("\r")[0].count("\n") == bool(fault) and (fault or "") in said
        index, ids = token_cache.read(folder)
        assert index == reference and ids.tolist() == reference_ids and ids.dtype == np.uint16
        rebuilt += fault is not None
    assert rebuilt > 180


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "tokens.npy").unlink(),
        lambda folder: (folder / "index.json").unlink(),
        lambda folder: ((folder / "index.json").unlink(), (folder / "index.json").mkdir()),
        lambda folder: (shutil.rmtree(folder), folder.write_text("a file")),
        lambda folder: (folder / "index.json").write_text(
            json.dumps(json.loads((folder / "index.json").read_text()) | {"held_out_from": 0})
        ),
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
    first, second = (
        prepare([str(write_jsonl(here / f"{name}.jsonl", texts))], ByteTokenizer())
        for name, texts in (("a", TEXTS), ("b", TEXTS[:30]))
    )
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
    assert len(token_cache.read(folder)[0].blocks) == -(-len(content) // 512) > 9
    content[512 * 4 + 100] ^= 1
    (folder / "tokens.npy").write_bytes(content)
    assert [token_cache.check(folder, rank, 3) is None for rank in range(3)] == [True, False, True]
    assert ranks.run(check_on_rank, 3, path, str(here / "cache")) == [reference] * 3


def test_damaged_parts_of_a_killed_run_are_done_again(here, monkeypatch):
    path = str(write_jsonl(here / "a.jsonl"))
    monkeypatch.setattr(data, "PART_BYTES", 700)
    reference = stream(prepare([path], ByteTokenizer(), "c1"))
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(
            data, "merge_parts", lambda *args, **more: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        prepare([path], ByteTokenizer(), "c2")
    g = random.Random(0)
    for file in sorted(here.glob("c2/*.parts/*"))[::2]:
        file.write_bytes(mutate_bytes(g, file.read_bytes()))
    done = []
    work = data.tokenise_part
    monkeypatch.setattr(data, "tokenise_part", lambda *job: done.append(job[-1]) or work(*job))
    assert stream(prepare([path], ByteTokenizer(), "c2")) == reference
    assert (
        0 < len(done) < len(data.split_parts([Path(path)]))
        or len(list(here.glob("c2/*.parts/*"))) == 0
    )


# Names, files and folders that cannot be used


@pytest.mark.parametrize(
    "name, words",
    [
        ("", ["--data ''", "empty name"]),
        ("x" * 300, ["x" * 300, "File name too long"]),
        ("a\0b", ["'a\\x00b'", "zero byte"]),
        ("caf\udce9", ["'caf\\udce9'", "not UTF-8"]),
        ("pipe", ["--data pipe", "neither a file nor a folder"]),
        ("two\nlines", ["'two\\nlines'", "no such file"]),
        ("folder/x" * 40, ["no such file"]),
    ],
)
def test_unusable_names(here, name, words):
    os.mkfifo("pipe")
    (here / "some.txt").write_text("text")
    with pytest.raises(DataError) as e:
        prepare([name], ByteTokenizer())
    assert all(word in str(e.value) for word in words) and "\n" not in str(e.value), str(e.value)


def refuse(monkeypatch, module, name, target, error=PermissionError(13, "Permission denied")):
    """`module.name(target)` fails as the system lets it fail, for anyone but root."""
    call = getattr(module, name)

    def refusing(path=".", *args, **more):
        if str(path).endswith(target):
            raise type(error)(*error.args, str(path))
        return call(path, *args, **more)

    monkeypatch.setattr(module, name, refusing, raising=False)


@pytest.mark.parametrize(
    "what, target", [("scandir", "texts"), ("scandir", "deep"), ("open", "a.txt")]
)
def test_without_permission(here, monkeypatch, what, target):
    (here / "texts" / "deep").mkdir(parents=True)
    (here / "texts" / "a.txt").write_text("some text")
    (here / "texts" / "deep" / "b.txt").write_text("some text")
    import builtins

    refuse(monkeypatch, os if what == "scandir" else builtins, what, target)
    with pytest.raises(DataError) as e:
        prepare(["texts"], ByteTokenizer())
    path = {"texts": "texts", "deep": "texts/deep", "a.txt": "texts/a.txt"}[target]
    assert (
        str(e.value)
        == f"--data {path}: cannot be read (Permission denied); mend this, or leave it out"
    )


@pytest.mark.parametrize("last_call", ["find_files", "file_hash", "split_parts"])
def test_a_file_that_vanishes(here, monkeypatch, last_call):
    path = write_jsonl(here / "a.jsonl")
    call = getattr(data, last_call)

    def and_then(*args):
        result = call(*args)
        path.unlink(missing_ok=True)
        return result

    monkeypatch.setattr(data, last_call, and_then)
    with pytest.raises(DataError) as e:
        prepare(["a.jsonl"], ByteTokenizer())
    assert (
        str(e.value)
        == "--data a.jsonl: cannot be read (No such file or directory); mend this, or leave it out"
    )


@pytest.mark.parametrize(
    "cache, words",
    [
        ("", ["--cache ''", "empty name"]),
        ("a.jsonl", ["--cache a.jsonl", "exists"]),
        ("a.jsonl/cache", ["--cache a.jsonl/cache", "Not a directory"]),
        ("x" * 300, ["File name too long"]),
        ("a\0b", ["zero byte"]),
        ("caf\udce9", ["not UTF-8"]),
    ],
)
def test_unusable_caches(here, cache, words):
    path = str(write_jsonl(here / "a.jsonl"))
    with pytest.raises(DataError) as e:
        prepare([path], ByteTokenizer(), cache)
    assert all(word in str(e.value) for word in words) and "\n" not in str(e.value), str(e.value)


def test_a_cache_without_room_or_permission(here, monkeypatch):
    path = str(write_jsonl(here / "a.jsonl"))
    whole = prepare([path], ByteTokenizer(), "whole")
    for target, call in (("mkdir", Path), ("save", np)):
        with monkeypatch.context() as m, pytest.raises(DataError) as e:
            m.setattr(
                call,
                target,
                lambda *args, **more: (_ for _ in ()).throw(OSError(28, "No space left on device")),
            )
            prepare([path], ByteTokenizer(), "full")
        assert (
            str(e.value) == "--cache full: cannot be used (No space left on device); "
            "make room or name another folder"
        )
    # what is there already needs no permission to write
    with monkeypatch.context() as m:
        m.setattr(
            Path,
            "mkdir",
            lambda *args, **more: (_ for _ in ()).throw(PermissionError(13, "Permission denied")),
        )
        assert prepare([path], ByteTokenizer(), "whole") == whole


def test_data_py_refuses_in_one_line(here, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["data.py", "--data", "missing"])
    with pytest.raises(SystemExit) as e:
        data.main()
    assert e.value.code == 2
    assert capsys.readouterr().err == "data.py: --data missing: no such file or folder\n"


def test_huge_sample_numbers(here):
    """2^31 steps of 2^20 samples: an epoch is found without the ones before."""
    folder = prepare([str(write_jsonl(here / "a.jsonl"))], ByteTokenizer())
    corpus = Corpus(folder, 16, 2**31 - 1)
    n = corpus.num_sequences
    last = 2**51
    epoch = [corpus.window(i) for i in range(last // n * n, (last // n + 1) * n)]
    assert sorted(epoch) == list(range(n))
    assert corpus.window(last - 1) == Corpus(folder, 16, 2**31 - 1).window(last - 1)
    assert corpus.batch([last - 1, np.int64(last)]).samples.tolist() == [last - 1, last]
