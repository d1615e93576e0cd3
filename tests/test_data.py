import gzip
import json
import multiprocessing
import os
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
import ranks
from data import Corpus, DataError, prepare
from tokenizer import ByteTokenizer, TokenizerError, make_tokenizer

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
    documents, current = [], []
    for i in ids:
        if i == 256:
            documents.append(bytes(current).decode())
            current = []
        else:
            current.append(i)
    assert not current and sorted(documents) == sorted(TEXTS)
    index = json.loads((folder / "index.json").read_text())
    assert index["documents"] == 60 and index["tokens"] == len(ids) and index["bytes"] == len(ids) - 60


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
        return stream(prepare([path], ByteTokenizer(), cache, exchange, rank, dist.get_world_size()))
    except DataError as e:
        return str(e)


def test_ranks_share_the_work_and_the_errors(here):
    path = str(write_jsonl(here / "a.jsonl"))
    reference = stream(prepare([path], ByteTokenizer(), "c1"))
    assert ranks.run(on_rank, 3, path, str(here / "c2")) == [reference] * 3
    with open(path, "a") as f:
        f.write('{"text": 3}\n')
    errors = ranks.run(on_rank, 3, path, str(here / "c3"))
    assert errors == [f'--data {path}, line 61: Expected `str`, got `int` - at `$.text`; {{"text": "..."}} would fit'] * 3


def prepare_in_process(path, cache, queue):
    queue.put(stream(prepare([path], ByteTokenizer(), cache)))


def test_two_runs_at_once(here):
    path = str(write_jsonl(here / "a.jsonl", TEXTS * 50))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=prepare_in_process, args=(path, str(here / "cache"), queue)) for _ in range(3)]
    for p in processes:
        p.start()
    streams = [queue.get(timeout=60) for _ in processes]
    for p in processes:
        p.join()
    assert streams[0] == streams[1] == streams[2] == stream(prepare([path], ByteTokenizer(), "other"))
    assert len(list((here / "cache").iterdir())) == 2            # the corpus and its lock: no leftovers


def test_killed_half_way(here, monkeypatch):
    """Parts that were done are kept, the rest is done again, and nothing half-written is ever taken for whole."""
    path = str(write_jsonl(here / "a.jsonl", TEXTS * 200))
    script = f"import data, tokenizer; data.PART_BYTES = 2000; data.prepare([{path!r}], tokenizer.ByteTokenizer())"
    for delay in (0.0, 0.15, 0.4):
        p = subprocess.Popen([sys.executable, "-c", script], cwd=here, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
        start = time.monotonic()
        while not list(here.glob("cache/*.parts/*")) and time.monotonic() - start < 30 and p.poll() is None:
            time.sleep(0.01)
        time.sleep(delay)
        p.send_signal(signal.SIGKILL)
        p.wait()
    monkeypatch.setattr(data, "PART_BYTES", 2000)
    folder = prepare([path], ByteTokenizer())
    assert stream(folder) == stream(prepare([path], ByteTokenizer(), "other"))
    assert sorted(x.name for x in (here / "cache").iterdir()) == [folder.name, folder.name + ".lock"]


def test_cache_follows_contents_and_tokenizer(here):
    path = write_jsonl(here / "a.jsonl")
    first = prepare([str(path)], ByteTokenizer())
    inode = (first / "tokens.npy").stat().st_ino
    assert prepare([str(path)], ByteTokenizer()) == first and (first / "tokens.npy").stat().st_ino == inode
    (here / "moved").mkdir()
    path.rename(here / "moved" / "b.jsonl")
    assert prepare(["moved"], ByteTokenizer()) == first
    write_jsonl(here / "moved" / "b.jsonl", TEXTS + ["more"])
    assert prepare(["moved"], ByteTokenizer()) != first


def test_held_out_text_is_never_trained_on(here):
    folder = prepare([str(write_jsonl(here / "a.jsonl"))], ByteTokenizer())
    train, held_out = Corpus(folder, 32, 0), Corpus(folder, 32, None, "held-out")
    everything, at = stream(folder), json.loads((folder / "index.json").read_text())["held_out_from"]
    assert len(train.stream) == at and held_out.stream.tolist() == everything[at:] and len(everything) - at == len(everything) // 20
    batch = train.batch(range(3 * train.windows))
    starts = {tuple(row) for row in torch.cat((batch.tokens, batch.labels[:, -1:]), 1).tolist()}
    assert starts == {tuple(everything[i * 32:i * 32 + 33]) for i in range(train.windows)}
    assert (train.windows - 1) * 32 + 33 <= at


def test_order_depends_on_seed_and_sample_alone(here):
    folder = prepare([str(write_jsonl(here / "a.jsonl"))], ByteTokenizer())
    a, b, other = Corpus(folder, 16, 0), Corpus(folder, 16, 0), Corpus(folder, 16, 1)
    n = a.windows
    whole = a.batch(range(2 * n))
    assert torch.equal(torch.stack([b.batch([i]).tokens[0] for i in (5, 2 * n - 1, 0, n)]), whole.tokens[[5, 2 * n - 1, 0, n]])
    epochs = [[a.window(i) for i in range(e * n, (e + 1) * n)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(n)) and epochs[0] != epochs[1] != [other.window(i) for i in range(n, 2 * n)]
    assert torch.equal(whole.tokens[:, 1:], whole.labels[:, :-1]) and whole.loss_mask.all() and whole.samples.tolist() == list(range(2 * n))


def test_standard_library_is_there():
    files = data.find_files([])
    assert sum(f.stat().st_size for f in files) > 5e6 and not any("test" in f.parts or "site-packages" in f.parts for f in files)


def test_tokenizers_file(here):
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.save("bpe.json")
    tokenizer = make_tokenizer("bpe.json")
    assert tokenizer.eot == bpe.get_vocab_size() and tokenizer.vocab_size == tokenizer.eot + 1          # it has none of its own
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


@pytest.mark.parametrize("name, content, words", [
    ("missing.txt", None, ["missing.txt", "no such file"]),
    ("empty.txt", b"", ["empty.txt", "empty"]),
    ("binary.txt", b"text\0more", ["binary.txt", "not UTF-8", "0x00", "offset 4"]),
    ("latin.txt", b"caf\xe9 x", ["latin.txt", "not UTF-8", "0xe9", "offset 3"]),
    ("bad.jsonl", b'{"text": "a"}\n\n{"text": \n', ["bad.jsonl, line 3", "not JSON"]),
    ("nofield.jsonl", b'{"txt": "a"}\n', ["nofield.jsonl, line 1", "missing", '{"text": "..."} would fit']),
    ("half.jsonl", b'{"text": "a\\ud800b"}\n', ["half.jsonl, line 1", "surrogate"]),
    ("utf8.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n', ["utf8.jsonl, line 2", "not UTF-8", "0xe9"]),
    ("deep.jsonl", b"[" * 200_000, ["deep.jsonl, line 1"]), ("long.jsonl", b'{"text": ' + b"1" * 5000 + b"}", ["long.jsonl, line 1"]),
    ("list.jsonl", b'["a"]\n', ["list.jsonl, line 1", "got `array`"]),
    ("broken.txt.gz", b"not gzip", ["broken.txt.gz", "cannot be read"]),
    ("blank.jsonl", b'{"text": ""}\n', ["no text"]),
])
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
    monkeypatch.setattr(data, "PART_BYTES", 300)                 # the line is counted from the start of the file, not of the part
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
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(TokenizerError, match="could not fetch its vocabulary"):
        make_tokenizer("gpt2")
