r"""The commands of adapters.py: train an adapter, merge it into its base, unmerge; folders of peft.

    python adapters.py train --load BASE --data FILE --peft lora --out ADAPTER
    python adapters.py merge BASE ADAPTER OUT           W + α/r B A, in the base's own shape
    python adapters.py unmerge MERGED ADAPTER OUT       the base, bit for bit, or nothing
    python adapters.py export ADAPTER HF_DIR --base BASE
    python adapters.py import HF_DIR OUT --base BASE    folders of the library peft: LoRA and IA3

merge holds one parameter of the base in memory at a time, and rounds W' = W + α/r B A to float32.
Where W' is larger than W, the last bits of W are lost, and W' - α/r B A is only near W. So merge
stores the SHA-256 of each weight that it changes. unmerge compares, and writes a base that is equal
bit for bit, or nothing.

For a base with 16-bit numbers unmerge succeeds. The error of float32 is 2^-16 of the distance
between two neighbours in bf16, so the nearest bf16 number is W. Only a number that is tiny beside
its change is lost, about one in a million, and merge stores those too. For a base in float32, about
one number in ten would be lost, and unmerge is refused.

Not covered: several adapters merged into one, with weights.
"""

import argparse
import hashlib
import os
import shutil
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

import torch
from msgspec import Meta
from torch import Tensor

import checkpoint
import huggingface
from base import json_files, terminal
from checkpoint import CheckpointError
from checkpoints.tokenizer_files import tokenizer_record, verify_tokenizer
from exchange.architectures import empty_model
from huggingface import HuggingFaceError
from tuning import adapter_training, peft_folder
from tuning.adapter_config import AdapterConfig
from tuning.adapter_files import (
    Fingerprint,
    MergedModel,
    as_json,
    check_mergeable,
    digest_of,
    merge,
    open_adapter,
)
from tuning.frozen_base import read_base

SHA256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
# merge writes down the numbers of a weight that would not come out, if at most one in so many is
RARE = 1000
# what a weight of the base may have been stored in, the narrowest first
STORED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class WeightRecord(TypedDict):
    """A weight of the base. dtype: the narrowest that has its numbers; sha256: of it in float32;
    lost: (position, bits of the float32) of numbers that would not come out."""

    dtype: str
    sha256: SHA256
    lost: list[tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=-(2**31), lt=2**31)]]]


class MergeRecord(TypedDict):
    """What the index of a merged model says about its making."""

    # the fingerprint of the base, and where it was
    base: Fingerprint
    base_path: str
    # of the adapter's values
    adapter: SHA256
    config: dict
    # of each weight that was changed
    weights: dict[str, WeightRecord]
    # of the base, where that was merged itself
    before: NotRequired["MergeRecord | None"]


# --- merge ----------------------------------------------------------------------------------------


def merge_adapter(base: str, path: str, out: str) -> str:
    """Write the merged model as a checkpoint at `out`. Returns a summary. Raises CheckpointError or
    HuggingFaceError."""
    if huggingface.is_folder(base):
        raise CheckpointError(
            f"{base} is a Hugging Face folder; python huggingface.py import {base} CKPT makes a"
            " checkpoint of it, which can be a base"
        )
    model = MergedModel(base, path)
    checkpoint.verify(model.base)
    record = {
        "base": model.adapter.base,
        "base_path": str(base),
        "adapter": digest_of(model.values),
        "config": as_json(model.adapter.config),
        # filled while the weights are written; the index is written after them
        "weights": {},
        "before": model.index.get("merged"),
    }

    def read(name: str) -> Tensor:
        weight, merged = model.read_both(name)
        if merged is not weight:
            dtype = narrowest(weight)
            again = taken_out(name, merged, model.values, model.adapter.config, dtype)
            lost = differences(weight, again)
            record["weights"][name] = {"dtype": dtype, "sha256": sha256(weight), "lost": lost}
        return merged

    write_model(out, [model.base, model.adapter.path], record, read)
    return f"{model.adapter.config.peft} in {len(record['weights'])} tensors of {model.base}"


def narrowest(weight: Tensor) -> str:
    """The name of the first dtype of STORED that has all numbers of a float32 tensor."""
    for name, dtype in STORED.items():
        # NaN is no number
        if torch.equal(weight.to(dtype).float(), weight):
            return name
    return "float32"


def taken_out(name: str, merged: Tensor, values, config: AdapterConfig, dtype: str) -> Tensor:
    """A weight of the base, float32, from the merged one, up to rounding."""
    weight = merge(name, merged, values, config, inverse=True)
    return weight.to(STORED.get(dtype, torch.float32)).float()


def differences(weight: Tensor, again: Tensor) -> list[tuple[int, int]]:
    """(position, bits) of the numbers that are others in `again`; none where they are not rare."""
    bits = weight.contiguous().view(torch.int32).flatten()
    positions = (bits != again.contiguous().view(torch.int32).flatten()).nonzero().flatten()
    if len(positions) * RARE > len(bits):
        return []
    return list(zip(positions.tolist(), bits[positions].tolist()))


def put_back(weight: Tensor, lost: list[tuple[int, int]]) -> Tensor:
    """With the numbers that merge wrote down."""
    bits = weight.contiguous().view(torch.int32)
    for position, value in lost:
        # a record that lies is found by the SHA-256
        if position < bits.numel():
            bits.view(-1)[position] = value
    return bits.view(torch.float32)


def sha256(weight: Tensor) -> str:
    return hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()


def write_model(out: str, sources: list[Path], merged: dict | None, read) -> None:
    """Write a model as a new checkpoint, without optimizer moments. sources: a checkpoint of its
    shape, and one whose tokenizer files come before its own. merged: of the index. read(our name)
    -> the whole parameter. Raises HuggingFaceError or CheckpointError."""
    files = {}
    hashes = {}
    for source in sources:
        index = checkpoint.read_index(source)
        files |= verify_tokenizer(source, index)
        hashes |= tokenizer_record(source, index).files
    index = checkpoint.read_index(sources[0])
    run = dict(index["config"])
    if "tokenizer.json" in files:
        run["tokenizer"] = str(Path(out).resolve() / "tokenizer.json")
    state = {
        "config": run,
        "model": index["model"],
        "tokens": 0,
        "corpus": None,
        "optimizer": None,
        "tokenizer": index.get("tokenizer", {}) | {"files": hashes},
    }
    if merged:
        state["merged"] = merged
    # on the meta device: `checkpoint.write` reads each one when its file is written
    model = empty_model(checkpoint.read_model(sources[0])[0])
    parameters = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    with huggingface.building(out) as folder:
        checkpoint.write(
            folder, 0, parameters, state, lambda name: read(name.removeprefix("model."))
        )
        for name, file in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / name)


# --- unmerge --------------------------------------------------------------------------------------


def unmerge_adapter(path: str, adapter_path: str, out: str) -> str:
    """Write the base of a merged model as a checkpoint at `out`, if its weights come out bit for
    bit. Returns a summary. Raises CheckpointError or HuggingFaceError."""
    path = checkpoint.find(path)
    _, index = checkpoint.read_model(path)
    record = read_record(path, index)
    adapter = open_adapter(adapter_path)
    check_mergeable(adapter)
    values = adapter.values()
    if digest_of(values) != record["adapter"]:
        raise CheckpointError(
            f"{adapter.path} is not the adapter that was merged into {path}: SHA-256"
            f" {digest_of(values)[:16]}.. and {record['adapter'][:16]}.."
        )
    checkpoint.verify(path)

    def read(name: str) -> Tensor:
        weight = read_base(path, [name])[name]
        if name not in record["weights"]:
            return weight
        of_weight = record["weights"][name]
        weight = taken_out(name, weight, values, adapter.config, of_weight["dtype"])
        return put_back(weight, of_weight["lost"])

    weights = record["weights"]
    differing = [name for name in weights if sha256(read(name)) != weights[name]["sha256"]]
    if differing:
        raise CheckpointError(
            f"{path}: {len(differing)} of {len(weights)} merged tensors do not come out"
            f" bit for bit, first {differing[0]}: float32 rounded them when they were merged. Keep"
            f" the base: {record['base_path']}"
        )
    write_model(out, [path], record.get("before"), read)
    return f"the model {record['base']}, bit for bit"


def read_record(path: Path, index: dict) -> MergeRecord:
    """Raises CheckpointError for a model that was not merged."""
    if "merged" not in index:
        raise CheckpointError(f"{path} is not a merged model: python adapters.py merge makes one")
    where = f"{path}/index.json: merged"
    try:
        record = json_files.convert(index["merged"], MergeRecord, where)
    except json_files.JSONError as e:
        raise CheckpointError(str(e)) from None
    missing = [name for name in record["weights"] if f"model.{name}" not in index["tensors"]]
    if missing:
        raise CheckpointError(f"{where}: there is no {missing[0]}")
    return record


# --- the command line -----------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adapters.py",
        description=(
            "Merge an adapter into the weights of its base, or unmerge it; export it as a folder of"
            " Hugging Face's library peft, or import one. Without arguments: a lesson."
        ),
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="an adapter that learns from text; train --help lists flags")
    model = "a checkpoint, or the folder of a run"

    add = commands.add_parser(
        "merge", help="a model with the adapter in its weights (LoRA: W + α/r B A)"
    )
    add.add_argument("base", metavar="BASE", help=f"the model of --load: {model}")
    add.add_argument("adapter", metavar="ADAPTER", help=f"what a run with --peft wrote: {model}")
    add.add_argument("out", metavar="OUT", help="a new folder")

    add = commands.add_parser(
        "unmerge", help="the base of a merged model, if it comes out bit for bit"
    )
    add.add_argument("merged", metavar="MERGED", help="what merge wrote")
    add.add_argument("adapter", metavar="ADAPTER", help="the adapter that was merged")
    add.add_argument("out", metavar="OUT", help="a new folder")

    base = f"the model that the adapter is for: {model}, or a Hugging Face folder"
    add = commands.add_parser("import", help="an adapter from a folder of the library peft")
    add.add_argument("hf_dir", metavar="HF_DIR", help="adapter_config.json and a safetensors file")
    add.add_argument("out", metavar="OUT", help="a new folder")
    add.add_argument("--base", required=True, help=base)

    add = commands.add_parser("export", help="a folder for PeftModel.from_pretrained")
    add.add_argument("adapter", metavar="ADAPTER", help=f"what a run with --peft wrote: {model}")
    add.add_argument("hf_dir", metavar="HF_DIR", help="a new folder")
    add.add_argument("--base", required=True, help=base)
    return parser


def run(args: argparse.Namespace) -> str:
    """What was written, in a line."""
    if args.command == "merge":
        return f"{args.out}: {merge_adapter(args.base, args.adapter, args.out)}"
    if args.command == "unmerge":
        return f"{args.out}: {unmerge_adapter(args.merged, args.adapter, args.out)}"
    if args.command == "import":
        return f"{args.out}: {peft_folder.import_adapter(args.hf_dir, args.base, args.out)}"
    return f"{args.hf_dir}: {peft_folder.export_adapter(args.adapter, args.base, args.hf_dir)}"


def main(argv: list[str]) -> int:
    """Exit status: 0, or 2 with one message."""
    terminal.prepare()
    if argv[:1] == ["train"]:
        return adapter_training.main(argv[1:])
    args = make_parser().parse_args(argv)
    try:
        print(run(args))
    except (HuggingFaceError, CheckpointError, OSError) as e:
        message = str(e)
        if isinstance(e, OSError):
            message = f"{terminal.one_line(e.filename or os.curdir)[:80]}: {e.strerror}"
        terminal.say(terminal.one_line(f"adapters.py: {message}"), error=True)
        return 2
    return 0
