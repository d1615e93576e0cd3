import dataclasses
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import struct
import threading
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import LLAMA, SMALL
from safetensors import safe_open
from safetensors.torch import save_file
from small_run import equal
from torch import nn

import generate
import gpt
import sharding
import train
from base import terminal
from base.groups import Groups
from base.model_config import MoEConfig
from course import ranks
from course.synthetic import dataset_for
from course.training_commands import config_of
from finetune.frozen_base import identifying_fields
from optimizer import AdamW, SplitMaster
from planning.counters import LiveTensors
from run import checkpoint, checkpoint_slices
from run.checkpoint import CheckpointError

STATE = {"tokens": 7, "config": {"a": 1}, "model": {}}


def tensors(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "model.a": torch.randn(5, 3, generator=g),
        "model.b": torch.randn(4, generator=g, dtype=torch.float64),
        "exp_avg.a": torch.randn(5, 3, generator=g).bfloat16(),
    }


def empty():
    return {n: torch.zeros_like(t) for n, t in tensors().items()}


def holds(path, seed=0):
    """Whether a checkpoint loads as tensors(seed), bit for bit."""
    loaded = empty()
    checkpoint.load(path, loaded)
    return equal(loaded, tensors(seed))


def test_round_trip(tmp_path):
    path = checkpoint.save(tmp_path, 12, tensors(), STATE)
    assert path == tmp_path / "step-000012"
    loaded = empty()
    index = checkpoint.load(path, loaded)
    assert equal(loaded, tensors()) and index["step"] == 12 and index["tokens"] == 7
    # not all tensors need to be loaded: generate.py does not load the moments
    part = {"model.a": torch.zeros(5, 3)}
    checkpoint.load(path, part)
    assert torch.equal(part["model.a"], tensors()["model.a"])


def save_and_load(rank, folder):
    path = checkpoint.save(Path(folder), 1, tensors(), STATE)
    return holds(path)


def test_keep(tmp_path):
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, tensors(step), STATE, keep=2)
    assert list(checkpoint.steps(tmp_path)) == [4, 5] and len(list(tmp_path.iterdir())) == 2
    # the same step once more
    checkpoint.save(tmp_path, 5, tensors(9), STATE, keep=0)
    assert holds(tmp_path / "step-000005", 9) and list(checkpoint.steps(tmp_path)) == [4, 5]


def test_a_damaged_later_checkpoint_does_not_push_out_a_whole_one(tmp_path):
    """After going back from 20 to 10: what is saved then stays, whatever lies ahead."""
    for step in (10, 20):
        checkpoint.save(tmp_path, step, tensors(step), STATE)
    for step in (15, 18):
        checkpoint.save(tmp_path, step, tensors(step), STATE, keep=1)
        assert list(checkpoint.steps(tmp_path)) == [step, 20]
        checkpoint.verify(tmp_path / checkpoint.folder_name(step))


def test_steps_ignores_what_is_not_finished(tmp_path):
    checkpoint.save(tmp_path, 3, tensors(), STATE)
    (tmp_path / ".step-000004.saving").mkdir()
    (tmp_path / "step-000005.txt").touch()
    assert list(checkpoint.steps(tmp_path)) == [3]
    # the next save removes what is left
    checkpoint.save(tmp_path, 6, tensors(), STATE)
    assert not (tmp_path / ".step-000004.saving").exists()


def save_killed(rank, folder, call):
    """SIGKILL at the n-th system-level step of a save."""
    checkpoint.save(Path(folder), 1, tensors(1), STATE)
    count = 0

    def killing(original):
        def wrapped(*args, **kwargs):
            nonlocal count
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return original(*args, **kwargs)

        return wrapped

    calls = ((os, "rename"), (os, "fsync"), (checkpoint_slices.dcp, "save"), (shutil, "rmtree"))
    for module, name in (*calls, (json, "dumps")):
        setattr(module, name, killing(getattr(module, name)))
    checkpoint.save(Path(folder), 2, tensors(2), STATE, keep=1)
    return count


def test_killed_at_every_step_of_a_save(tmp_path):
    for call in range(100):
        folder = tmp_path / str(call)
        try:
            (total,) = ranks.run(save_killed, 1, str(folder), call)
            assert call >= total > 5
            break
        except RuntimeError as e:
            assert "exit code -9" in str(e)
        found = checkpoint.steps(folder)
        assert found, call
        newest, path = list(found.items())[-1]
        assert holds(path, newest)
    assert list(checkpoint.steps(folder)) == [2]


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot save.*File exists"):
        checkpoint.save(tmp_path / "file", 1, tensors(), STATE)


def sign(path):
    """Make the checksums of the files fit what is there, as somebody who wants to deceive would."""
    index = json.loads((path / "index.json").read_text())
    for f in path.glob("*.safetensors"):
        checksum = hashlib.sha256(f.read_bytes()).hexdigest()
        index["files"][f.name] = {"bytes": f.stat().st_size, "sha256": checksum}
    write_index(path, json.dumps(index, indent=1))


def write_index(path, text):
    """An index.json, and the checksum of the index that fits it."""
    (path / "index.json").write_text(text)
    checksum = hashlib.sha256((path / "index.json").read_bytes()).hexdigest()
    (path / "index.json.sha256").write_text(f"{checksum}  index.json\n")


def write_header(path, file):
    """A header longer than the file, of the same length in all, with fitting checksums."""
    with open(file, "r+b") as f:
        f.write(struct.pack("<Q", 2**40))
    sign(path)


def cut_short(path):
    file = next(path.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)


def index_that_is_a_folder(path):
    (path / "index.json").unlink()
    (path / "index.json").mkdir()


def more(path):
    return shutil.copy(next(path.glob("*.safetensors")), path / "more.safetensors")


def half(path):
    return (path / "index.json").read_text()[:-40]


@pytest.mark.parametrize(
    "damage, words, passed_over",
    [
        (cut_short, "safetensors is .* bytes long.*damaged", True),
        (lambda path: next(path.glob("*.safetensors")).unlink(), "is missing.*damaged", True),
        (lambda path: (path / "index.json").unlink(), "is not a checkpoint.*no index.json", True),
        (lambda path: (path / "index.json.sha256").unlink(), "no index.json.sha256", True),
        (more, "more.safetensors is not in the checkpoint's index", True),
        (lambda path: (path / "index.json").write_text(half(path)), "do not fit", True),
        (index_that_is_a_folder, "index.json cannot be read", True),
        (lambda path: write_index(path, half(path)), "index.json: not JSON", True),
        (lambda path: write_index(path, '{"weight_map": {}}'), "not the index of", False),
        (lambda path: write_header(path, next(path.glob("*.s*s"))), "cannot be loaded", False),
    ],
)
def test_damage_is_named(tmp_path, damage, words, passed_over):
    """passed_over: a run goes back to the checkpoint before."""
    path = checkpoint.save(tmp_path, 1, tensors(), STATE)
    damage(path)
    with pytest.raises(CheckpointError, match=words) as e:
        checkpoint.load(path, empty())
    assert str(tmp_path) in str(e.value)
    assert isinstance(e.value, checkpoint.Damaged) == passed_over


def test_a_flipped_bit_in_each_file_is_found_and_named(tmp_path):
    """At 40 places of each file of a checkpoint that two ranks wrote, the index and its checksum
    included."""
    assert ranks.run(save_and_load, 2, str(tmp_path)) == [True, True]
    path = tmp_path / "step-000001"
    g = random.Random(0)
    checkpoint.verify(path)
    files = sorted(path.iterdir())
    assert len(files) == 4
    for file in files:
        whole = file.read_bytes()
        for at in [0, len(whole) - 1, *(g.randrange(len(whole)) for _ in range(40))]:
            flipped = bytes([whole[at] ^ 1 << g.randrange(8)])
            file.write_bytes(whole[:at] + flipped + whole[at + 1 :])
            with pytest.raises(checkpoint.Damaged, match=file.name):
                checkpoint.load(path, empty())
        file.write_bytes(whole)
    checkpoint.verify(path)


def change_index(path, change):
    """Change the parsed index in place, and write the checksum that fits."""
    index = json.loads((path / "index.json").read_text())
    change(index)
    write_index(path, json.dumps(index))


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory):
    """The checkpoint of a model of two layers, as a run leaves it."""
    with torch.device("meta"):
        model = gpt.GPT(MoEConfig(2, 16, 2, seq_length=8, vocab_size=32))
    sharding.init(model, 0, "cpu", torch.float32)
    state = {
        "tokens": 96,
        "corpus": "c",
        "optimizer": {"updates": 3, "skipped": 0, "scaler": None},
        "config": {"tokenizer": "bytes"},
        "model": dataclasses.asdict(model.config),
    }
    weights = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    return checkpoint.save(tmp_path_factory.mktemp("whole"), 3, weights, state)


NORM = "tensors.model.head.norm.weight"


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("model.num_layers", 2.0, "num_layers 2.0: must be an integer"),
        ("model.norm_eps", "x", "norm_eps 'x': must be a number"),
        ("model.norm_eps", float("nan"), "index.json: not JSON .*NaN"),
        ("model.rotary_base", 0.5, "rotary_base 0.5: must be from 1"),
        ("model.llama", "no", "llama 'no': must be true or false"),
        ("model.colour", 1, "does not describe a model .*'colour'"),
        ("model", {"num_layers": 2}, "missing 2 required"),
        ("model.num_layers", 60000, "num_layers 60000: there are tensors of 2 layers"),
        ("model.vocab_size", 2**31 - 1, "vocab_size 2147483647.* parameters or more, and its"),
        ("step", 10**30, r"Expected `int` <= .* - at `\$.step`"),
        ("optimizer.scaler", dict(scale=0.5, good_steps=0, tolerance=1), "Expected `float` >= 1"),
        (
            "optimizer.scaler",
            dict(scale=2, good_steps=0, tolerance=1, searching="no"),
            "Expected `bool`, got `str`",
        ),
        (NORM, ["int32", [16]], "model.head.norm.weight is int32; a checkpoint has float64, "),
        (NORM, ["float32", [2**40]], "its tensors would have .* bytes, and its files have"),
    ],
)
def test_an_index_is_typed_and_held_to_its_files(whole_model, tmp_path, field, value, words):
    """Before anything is built: each of these would take minutes or gigabytes, or a traceback,
    later."""
    path = shutil.copytree(whole_model, tmp_path / "c")

    def change(index):
        *outer, last = field.split(".", 1) if field.startswith("tensors.") else field.split(".")
        for name in outer:
            index = index[name]
        index[last] = value

    change_index(path, change)
    with pytest.raises(CheckpointError, match=words) as e:
        checkpoint.read_model(path)
    assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_more_than_memory_is_refused_before_it_is_taken(whole_model, monkeypatch, capsys):
    """On a machine with 4 KiB; generating says so, in one line."""
    checkpoint.check_room("x", 4096, "cpu")
    monkeypatch.setattr("run.world.memory", lambda device, ranks: 4096)
    status = generate.main(["--checkpoint", str(whole_model), "--prompt", "a", "--device", "cpu"])
    err = capsys.readouterr().err
    assert status == 2 and "bytes, and cpu has 4,096 in all" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.view(torch.int32), r"I32 \[5, 3\] from \[0, 0\] on there, and float32"),
        (lambda t: t.repeat(2, 1), r"model.a is F32 \[10, 3\]"),
    ],
)
def test_a_file_that_holds_other_tensors_than_the_index_says(tmp_path, capfd, change, words):
    """int32 would load as other numbers without a word. One line, and nothing printed before it."""
    path = checkpoint.save(tmp_path, 1, tensors(), STATE)
    file = next(path.glob("*.safetensors"))
    with safe_open(file, "pt") as f:
        found = {n: f.get_tensor(n) for n in f.keys()}
        metadata = f.metadata()
    save_file(found | {"model.a": change(found["model.a"])}, file, metadata)
    sign(path)
    with pytest.raises(CheckpointError, match=words) as e:
        checkpoint.load(path, empty())
    assert "\n" not in str(e.value) and capfd.readouterr() == ("", "")


def test_another_model(tmp_path):
    path = checkpoint.save(tmp_path, 1, tensors(), STATE)
    words = r"another model: model.a is \(5, 3\) there and \(6, 3\) here; model.c is missing there"
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(path, {"model.a": torch.zeros(6, 3), "model.c": torch.zeros(1)})


class Malice:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    """Pickles planted wherever a loader might look are not opened."""
    monkeypatch.chdir(tmp_path)
    path = checkpoint.save(tmp_path / "c", 1, tensors(), STATE)
    for name in (".metadata", "metadata.pt", "state.pkl", "__0_0.distcp", "pytorch_model.bin"):
        (path / name).write_bytes(pickle.dumps(Malice()))
    assert holds(path)
    file = next(path.glob("*.safetensors"))
    payload = pickle.dumps(Malice())
    file.write_bytes(payload + b"\0" * (file.stat().st_size - len(payload)))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path, empty())
    sign(path)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        checkpoint.load(path, empty())
    assert not (tmp_path / "executed").exists()


def test_command(tmp_path, capsys):
    path = checkpoint.save(tmp_path, 1, tensors(), STATE)
    for command, words in (("show", '"sha256"'), ("verify", "whole; 1 file,")):
        # a checkpoint; a folder of them
        for given in (path, tmp_path):
            checkpoint.main([command, str(given)])
            assert words in capsys.readouterr().out
    next(path.glob("*.safetensors")).unlink()
    for argv, words in (
        (["verify", str(path)], "is missing"),
        (["show", str(tmp_path / "none")], "no such folder"),
        (["repair", str(path)], "usage"),
    ):
        with pytest.raises(SystemExit, match="2"):
            terminal.run(partial(checkpoint.main, argv))
        assert words in capsys.readouterr().err


def save_in_the_background(rank, folder):
    saver = checkpoint.Saver(dist.new_group(backend="gloo"))
    part = tensors()
    gate = threading.Event()
    writer = checkpoint_slices.dcp.HuggingFaceStorageWriter
    original = writer.write_data

    # the disk is slow
    def waiting(*args):
        assert gate.wait(20)
        return original(*args)

    writer.write_data = waiting
    saver.save(Path(folder), 1, part, STATE)
    # training goes on, collectives too
    for t in part.values():
        t.zero_()
    total = torch.ones(())
    for _ in range(10):
        dist.all_reduce(total)
    early = not list(checkpoint.steps(Path(folder)))
    gate.set()
    saver.wait()
    return early, total.item(), holds(Path(folder) / "step-000001")


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    assert ranks.run(save_in_the_background, 2, str(tmp_path)) == [(True, 1024.0, True)] * 2


def background_failure(rank, folder, function, of_rank):
    saver = checkpoint.Saver(dist.new_group(backend="gloo"))
    # one rank's disk is full
    if rank == of_rank:

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        setattr(checkpoint, function, full)
    saver.save(Path(folder), 1, tensors(), STATE)
    try:
        saver.wait()
    except CheckpointError as e:
        return str(e), saver.failed


@pytest.mark.parametrize("function, of_rank", [("prepare", 0), ("flush_and_hash", 1)])
def test_a_failure_in_the_background_is_everybodys(tmp_path, function, of_rank):
    """Before the copies are made, when training still waits for them, and after."""
    for message, failed in ranks.run(background_failure, 2, str(tmp_path), function, of_rank):
        assert "cannot save" in message and "No space left" in message and not failed
    assert not checkpoint.steps(tmp_path)


# --- bytes of a save and of a load ----------------------------------------------------------------


def peak_of_save(folder, tensors, held, group=None):
    """Bytes of the tensors that a save adds to `held`, at its peak."""
    live = LiveTensors()
    for tensor in held:
        live.add(tensor.untyped_storage())
    before = live.bytes
    original = checkpoint.save

    # the mode is one thread's
    def save(*args):
        with live:
            return original(*args)

    with mock.patch.object(checkpoint, "save", save), live:
        saver = checkpoint.Saver(group)
        saver.save(Path(folder), 1, tensors, STATE)
        saver.wait()
    return live.peak - before


def split_state(value=1.0):
    """AdamW with bf16 state over ten weights of 2,500 and one of 25,000, and all that it holds."""
    sizes = [25_000] + [2500] * 10
    weights = [nn.Parameter(torch.full((n,), value).bfloat16()) for n in sizes]
    o = AdamW([(str(i), p) for i, p in enumerate(weights)], state_dtype=torch.bfloat16)
    kept = (o.parameters, o.low, o.exp_avg, o.exp_avg_sq)
    return o, [tensor for tensors in kept for tensor in tensors.values()]


def test_a_save_joins_one_master_at_a_time(tmp_path):
    """The copies are as large as the state, 8 bytes a parameter, and no more than one master is
    joined beside them. A load takes temporary tensors of one master."""
    optimizer, held = split_state()
    state = 8 * 50_000
    largest = 4 * 25_000
    master = optimizer.tensors()["model.0"]
    with LiveTensors() as live:
        master.join()
    # beside its halves
    assert live.peak == 4 * 25_000 + largest
    assert state <= peak_of_save(tmp_path, optimizer.tensors(), held) <= state + largest
    other, held = split_state(0.0)
    with LiveTensors() as live:
        checkpoint.load(tmp_path / "step-000001", other.tensors())
    assert live.peak <= sum(tensor.nbytes for tensor in held) + 5 * largest


def save_of_replicas(rank, folder):
    copies = {f"model.{i}": torch.ones(100_000) for i in range(10)}
    return peak_of_save(folder, copies, copies.values(), dist.new_group(backend="gloo"))


def test_replicas_copy_the_state_once(tmp_path):
    """Together, half of it each. The rest is the text of the plan."""
    state = 4 * 100_000 * 10
    for peak in ranks.run(save_of_replicas, 2, str(tmp_path)):
        assert state / 2 <= peak <= 1.02 * state / 2


def test_copies_of_what_is_on_a_gpu_are_pinned(monkeypatch):
    class OnGPU(torch.Tensor):
        is_cuda = True

    pinned = []
    original = torch.empty

    def empty(*args, pin_memory, **kwargs):
        pinned.append(pin_memory)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    for tensor in (torch.ones(3), torch.ones(3).as_subclass(OnGPU)):
        assert checkpoint_slices.host_copy(tensor).tolist() == [1, 1, 1]
    assert pinned == [False, True]


@pytest.mark.gpu
def test_pinned_memory_is_used_again():
    addresses = set()
    for value in (1.0, 2.0):
        copy = checkpoint_slices.host_copy(torch.full((100_000,), value, device="cuda"))
        assert copy.is_pinned() and copy[-1] == value
        addresses.add(copy.data_ptr())
        del copy
    assert len(addresses) == 1


def split_rows(rank, source, target):
    """Load a [5, 3] master as halves, 3 rows on each of 2 ranks, and save it."""
    rows = sharding.Sharding((5, 3), (sharding.Shard(0, dist.group.WORLD),))
    low = torch.zeros(3, 3, dtype=torch.int16)
    master = SplitMaster(torch.zeros(3, 3, dtype=torch.bfloat16), low)
    tensors = {"model.a": sharding.set_sharding(master, rows)}
    checkpoint.load(Path(source), tensors)
    checkpoint.save(Path(target), 2, tensors, STATE)
    return low.count_nonzero().item()


def test_halves_are_saved_and_loaded_as_one_master(tmp_path):
    """Whole, in rows of two ranks, whole again: bit for bit, and as an fp32 tensor in the files."""
    path = checkpoint.save(tmp_path, 1, tensors(), STATE)
    assert ranks.run(split_rows, 2, str(path), str(tmp_path)) == [9, 6]
    loaded = {"model.a": torch.zeros(5, 3)}
    index = checkpoint.load(tmp_path / "step-000002", loaded)
    assert torch.equal(loaded["model.a"], tensors()["model.a"])
    assert index["tensors"] == {"model.a": ["float32", [5, 3]]}


def test_tensors_that_are_read_when_their_file_is_written(tmp_path, monkeypatch):
    """What inference/huggingface.py does: a file at a time is in memory."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 1000)
    values = {f"model.{i}": torch.full((100,), float(i)) for i in range(10)}
    order = []

    def read(name):
        order.append((name, len(list(tmp_path.glob(".*/*.safetensors")))))
        return values[name]

    names = {n: t.to("meta") for n, t in values.items()}
    path = checkpoint.write(tmp_path / "c", 0, names, STATE, read)
    assert order == [(f"model.{i}", 1 + i // 2) for i in range(10)]
    loaded = {n: torch.zeros(100) for n in values}
    checkpoint.load(path, loaded)
    assert equal(loaded, values)
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint.write(path, 0, values, STATE)


# --- layouts --------------------------------------------------------------------------------------


def trained(rank, world, flags, load_from, save_to, steps):
    """For each folder in `load_from` (None: from the start): the losses of the next steps under a
    layout, and all tensors after them, whole."""
    config = config_of(flags)
    groups = Groups.make("cpu", world, **config.mesh) if world > 1 else Groups()
    found = []
    for folder in load_from:
        t = train.Trainer(config, torch.device("cpu"), groups, config.task())
        start = t.checkpoints.load(checkpoint.find(folder))["step"] if folder else 0
        losses = []
        for step in range(start + 1, start + steps + 1):
            loss = t.forward_backward(step, dataset_for(t))
            if world > 1:
                dist.all_reduce(loss)
            losses.append(loss.item())
            t.update(step)
        t.task.wait_for_parameters()
        if save_to:
            t.checkpoints.save(Path(save_to), steps, 0, "corpus")
            t.checkpoints.saver.wait()
        tensors = t.optimizer.tensors().items()
        whole = {n: sharding.gather(x, sharding.sharding_of(x)).clone() for n, x in tensors}
        found.append((losses, whole))
    return found


WIDE = LLAMA | dict(num_heads=8, num_kv_heads=4, precision="bf16", micro_batch_size=2)
PADDED = dict(make_vocab_size_divisible_by=32)
LAYOUTS = [(1, {}), (1, PADDED), (2, PADDED | dict(tp=2)), (4, dict(tp=4, sequence_parallel=True))]


@pytest.mark.parametrize("padding", [{}, PADDED], ids=["as the ranks need", "to 64 rows"])
def test_saved_under_one_layout_loads_under_any(tmp_path, padding):
    """Weights, masters and moments, bit for bit, of a vocabulary that the ranks do not divide."""
    folder = str(tmp_path)
    ((_, saved),) = ranks.run(trained, 4, 4, WIDE | padding | dict(tp=2), [None], folder, 2)[0]
    assert saved["model.embedding.tokens.weight"].shape == (61, 32)
    payload = sum(f.stat().st_size for f in tmp_path.glob("*/*.safetensors"))
    exact = sum(t.numel() * t.element_size() for t in saved.values())
    # headers; no padding, and nothing twice
    assert exact < payload < exact + 160_000
    for world, flags in LAYOUTS:
        ((_, loaded),) = ranks.run(trained, world, world, WIDE | flags, [folder], None, 0)[0]
        assert equal(saved, loaded), (world, flags)


def test_fields_that_a_checkpoint_must_agree_with():
    """By hand: a prompt file's fingerprint is a hash of exactly these, so a change of this list
    would make every prompt file another model's. Options of other families are part of it where a
    model has them."""
    sizes = dict(num_layers=2, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.1)
    config = MoEConfig(**sizes)
    fixed = dict(num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=2, ffn_hidden_size=64)
    fixed |= dict(seq_length=1024, vocab_size=32, llama=False, norm_eps=1e-5, rotary_base=10000.0)
    fixed |= dict(num_experts=0, expert_every=1, router="sinkhorn", router_topk=1)
    assert identifying_fields(config) == fixed
    llama = MoEConfig(**sizes, llama=True)
    # rotary positions have no table
    del fixed["seq_length"]
    assert identifying_fields(llama) == fixed | {"llama": True}
    options = dict(sliding_window=8, head_dim=16, qk_norm=True, attention_bias="qkv")
    of_family = identifying_fields(dataclasses.replace(llama, **options))
    assert of_family == fixed | {"llama": True} | options
    # what loads must agree in all of them
    names = {field.name for field in dataclasses.fields(MoEConfig)}
    free = {"dropout", "attention", "router_temperature", "capacity_factor", "aux_loss", "z_loss"}
    free |= {"init_std", "mtp_layers", "bias_rate"}
    assert checkpoint.fixed_fields(config).keys() == names - free
    weights_only = checkpoint.fixed_fields(llama, weights_only=True)
    free |= {"seq_length", "router", "router_topk"}
    # YaRN and Llama 3 lengthen what was trained.
    free |= {name for name in names if name.startswith("rotary_")}
    free -= {"rotary_base", "rotary_share", "rotary_mscale"}
    assert weights_only.keys() == names - free


def test_an_index_that_is_older_than_a_field(tmp_path):
    state = {"config": {}, "model": {"num_layers": 1, "hidden_size": 8, "num_heads": 1}}
    path = checkpoint.write(tmp_path / "step-000001", 1, {"model.a": torch.ones(2)}, state)
    checkpoint.load(path, {"model.a": torch.zeros(2)}, {"num_layers": 1, "later": 2})
    # a field of which the index does not know is what it was by default
    checkpoint.load(path, {"model.a": torch.zeros(2)}, {"sliding_window": 0, "norm": "layernorm"})
    with pytest.raises(CheckpointError, match="sliding_window is 0 there and 8 here"):
        checkpoint.load(path, {"model.a": torch.zeros(2)}, {"sliding_window": 8})
    with pytest.raises(CheckpointError, match="num_layers is 1 there and 2 here"):
        checkpoint.load(path, {"model.a": torch.zeros(2)}, {"num_layers": 2, "later": 2})


def test_a_missing_slice_is_found(tmp_path):
    """One rank's slice is gone, and the index knows nothing of it."""
    ranks.run(trained, 2, 2, WIDE | dict(tp=2), [None], str(tmp_path), 1)
    path = tmp_path / "step-000001"
    name = "model.blocks.0.mlp.up.weight"
    file = sorted(path.glob("*.safetensors"))[1]
    with safe_open(file, "pt") as f:
        kept = {n: f.get_tensor(n) for n in f.keys() if n != name}
        metadata = f.metadata()
    save_file(kept, file, metadata)
    index = json.loads((path / "index.json").read_text())
    sign(path)
    with pytest.raises(CheckpointError, match=f"lack {name}, or a part of it"):
        checkpoint.load(path, {name: torch.zeros(index["tensors"][name][1])})


# --- every layout to every other ------------------------------------------------------------------

DEEP = SMALL | dict(num_layers=4, global_batch_size=12, micro_batch_size=1)
SHARDED = dict(tp=2, sequence_parallel=True)
MATRIX = {
    "one": (1, {}),
    "dp 3, stage 3": (3, dict(zero_stage=3)),
    "dp 4, stage 1": (4, dict(zero_stage=1, recompute="selective")),
    "tp 2": (2, SHARDED),
    "tp 2, dp 2, stage 2": (4, dict(tp=2, zero_stage=2)),
    "pp 2, v 2": (2, dict(pp=2, virtual_stages=2)),
    "pp 2, V": (2, dict(pp=2, virtual_stages=2, schedule="zb-v")),
    "pp 2, dp 2, stage 3": (4, dict(pp=2, schedule="zb-h1", zero_stage=3, layer_split=[3, 1])),
    "dp 4, stage 3, 2 groups": (
        4,
        dict(zero_stage=3, data_parallel_replicate_degree=2, micro_batch_size=1),
    ),
    "tp 2, pp 2, dp 2, stage 3": (8, SHARDED | dict(pp=2, zero_stage=3, recompute="full")),
}
EXPERTS = {
    "one": (1, {}),
    "ep 2": (2, dict(ep=2)),
    "dp 2": (2, {}),
    "ep 4, stage 3": (4, dict(ep=4, zero_stage=3)),
    "dp 4, ep 2, stage 2": (4, dict(ep=2, zero_stage=2)),
    "dp 4, ep 2, stage 2, 2 groups": (
        4,
        dict(ep=2, zero_stage=2, data_parallel_replicate_degree=2),
    ),
    "tp 2, ep 2": (4, SHARDED | dict(ep=2)),
    "pp 2, ep 2": (4, dict(pp=2, ep=2)),
}

FEW = {name: MATRIX[name] for name in ("dp 4, stage 3, 2 groups", "pp 2, v 2")}
FEW_EXPERTS = {name: EXPERTS[name] for name in ("one", "ep 2")}
# all take 4 minutes
EVERY_PAIR = [
    pytest.param(matrix, model, *precision, marks=pytest.mark.repetition)
    for matrix, model in ((MATRIX, {}), (EXPERTS, dict(num_experts=4)))
    for precision in (("fp64", 1e-10), ("fp32", 1e-6))
]


@pytest.mark.parametrize(
    "matrix, model, precision, tolerance",
    [
        (FEW, dict(micro_batch_size=2), "fp64", 1e-10),
        (FEW_EXPERTS, dict(num_layers=2, num_experts=4, micro_batch_size=2), "fp64", 1e-10),
        *EVERY_PAIR,
    ],
)
def test_pairs_of_layouts(tmp_path, matrix, model, precision, tolerance):
    """Saved after two steps under each of these layouts, loaded under each:
    the next three losses equal those of one device that never stopped."""
    model = DEEP | dict(precision=precision) | model
    whole, _ = ranks.run(trained, 1, 1, model, [None], None, 5)[0][0]
    folders = [str(tmp_path / name) for name in matrix]
    for folder, (world, flags) in zip(folders, matrix.values()):
        ranks.run(trained, world, world, model | flags, [None], folder, 2)
    for name, (world, flags) in matrix.items():
        resumed = ranks.run(trained, world, world, model | flags, folders, None, 3)[0]
        for source, (losses, _) in zip(matrix, resumed, strict=True):
            assert losses == pytest.approx(whole[2:], rel=tolerance), (source, name)
