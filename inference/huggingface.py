"""The same weights as Hugging Face folders, in and out.

A model of `transformers` is a folder with config.json, safetensors files and a tokenizer. Its
tensors hold the same numbers as ours under other names, some transposed or side by side in one
matrix (the tables are in inference/architectures.py). Import reads a view of their tensor, export
fills the same view, so nothing is computed and, in float32, nothing is rounded:

    blocks.0.attention.key.weight [h, h]  =  c_attn.weight [h, 3h], columns h .. 2h, transposed

    python -m inference.huggingface import HF_DIR CKPT            then generate.py --checkpoint CKPT
    python -m inference.huggingface export CKPT HF_DIR --dtype bf16    CKPT may be a run
    python -m inference.huggingface export CKPT HF_DIR --adapter RUN   with RUN's LoRA or IA3 merged

One file's tensors are in memory at a time, never a whole model. A folder appears under its name
when it is whole. Only safetensors files are read: pytorch_model.bin is a pickle, and loading a
pickle executes what it says. A model that is not computed exactly here is refused.

Not covered: other architectures, other scalings of rotary positions than Llama 3's and YaRN, and
conversion by many ranks on GPUs, all of which Megatron Bridge has. One process is enough here,
because a checkpoint loads under any layout.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple, TypedDict

import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from base import json_files, terminal
from base.errors import InputError
from base.model_config import MoEConfig
from inference.architectures import (
    Architecture,
    HuggingFaceError,
    Location,
    TheirTensor,
    empty_model,
    their_tensors,
    unstack,
)
from inference.hf_config import (
    architecture_of,
    find_architecture,
    read_any_model,
    read_fields,
    read_json,
    refused,
    to_hf_config,
)
from inference.merged import MergedModel
from inference.tokenizer_json import add_special_tokens, as_bytes, files_of
from run import checkpoint
from run.checkpoint import beside
from run.checkpoint_index import check_command, check_sizes, read_header
from run.tokenizer import (
    BUILT_IN,
    CHAT_TEMPLATE,
    FileTokenizer,
    TokenizerError,
    make_tokenizer,
    model_ids,
    needs_conversion,
    record,
    save_files,
)
from sharding import num_parameters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The dtypes that are imported, as safetensors names them.
STORED = ("F32", "BF16", "F16")


# --- reading a folder -----------------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file. name: in that file; dtype: as safetensors names it."""

    name: str
    file: Path
    shape: list[int]
    dtype: str

    def read(self) -> Tensor:
        """Mapped into memory: pages that are not touched are not read."""
        with safe_open(self.file, "pt") as f:
            return f.get_tensor(self.name)


class FileIndex(TypedDict):
    """model.safetensors.index.json: which file in the same folder holds each tensor."""

    weight_map: dict[str, Annotated[str, Meta(max_length=255, pattern="^[^/]+$")]]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model. Raises HuggingFaceError."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        names = read_json(index, FileIndex)["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    if any(folder.glob("pytorch_model*.bin")):
        raise HuggingFaceError(
            f"{folder} has only a pytorch_model.bin, a pickle, which is never opened here; if you"
            " trust it, load it with transformers and save_pretrained(folder,"
            " safe_serialization=True)"
        )
    raise HuggingFaceError(f"{folder} has neither model.safetensors nor {index.name}")


def stored_tensors(folder: Path, architecture: Architecture) -> dict[str, StoredTensor]:
    """The tensors in a folder, by their names without prefix; values are not read. Raises
    HuggingFaceError."""
    stored = {}
    for file in weight_files(folder):
        if not file.is_file():
            raise HuggingFaceError(f"{file} is missing, and model.safetensors.index.json names it")
        with refused(checkpoint.CheckpointError):
            header = read_header(file)
        for name, (dtype, shape, _) in header.items():
            short = name.removeprefix(architecture.prefix)
            for end, now in architecture.renamed.items():
                if short.endswith(end):
                    short = short.removesuffix(end) + now
            stored[short] = StoredTensor(name, file, shape, dtype)
    return stored


class Source(NamedTuple):
    """Where one of our parameters comes from."""

    # One, or those that are stacked.
    tensors: list[StoredTensor]
    location: Location

    def read(self) -> Tensor:
        """Our parameter, whole, in float32."""
        if not self.location.is_stack:
            return self.location.read(self.tensors[0].read()).contiguous().float()
        stack = torch.empty(len(self.tensors), *self.tensors[0].shape)  # [n, ..]
        for part, stored in zip(stack, self.tensors):
            part.copy_(stored.read())
        return stack


def match(folder: Path, config: MoEConfig, architecture: Architecture) -> dict[str, Source]:
    """Our name -> its source in a Hugging Face folder. Raises HuggingFaceError, naming what is
    missing, left over or different."""
    stored = stored_tensors(folder, architecture)
    for short in architecture.unread(stored):
        del stored[short]
    other = f"{folder} holds another model than its config.json: "
    with refused(ValueError, where=other):
        check_sizes(config, {f".{short}": tensor.shape for short, tensor in stored.items()})
    theirs = their_tensors(config, architecture)
    drop_copies(folder, stored, architecture.copies, but=theirs)
    sources = {}
    differing = []
    for stacked, (shape, parts) in theirs.items():
        tensors = []
        for name, part in unstack(stacked, torch.empty(shape, device="meta")).items():
            tensor = stored.pop(name.removeprefix(architecture.prefix), None)
            if tensor is None:
                differing.append(f"{name} is missing")
            elif tensor.shape != list(part.shape) or tensor.dtype not in STORED:
                differing.append(
                    f"{name} is {tensor.dtype} {tensor.shape} there, and {' or '.join(STORED)}"
                    f" {list(part.shape)} here"
                )
            tensors.append(tensor)
        sources |= {ours: Source(tensors, location) for ours, location in parts.items()}
    differing += [f"{tensor.name} has no place here" for tensor in stored.values()]
    if any("experts.gate_up_proj" in name for name in stored):
        raise HuggingFaceError(
            f"{folder}: its experts are fused (gate_up_proj); transformers writes them one by one"
            " with save_pretrained(folder, save_original_format=True)"
        )
    if differing:
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise HuggingFaceError(f"{other}{'; '.join(differing[:3])}{more}")
    return sources


def drop_copies(folder: Path, stored: dict[str, StoredTensor], copies: dict, but) -> None:
    """Remove tensors that are stored beside the one that they are a copy of. copies: as of
    Architecture; but: tensors of their own in this model. Raises HuggingFaceError where a copy
    differs: transformers would use both."""
    for name in [name for name in copies if name in stored and name not in but]:
        copy = stored.pop(name)
        original = stored.setdefault(copies[name], copy)
        a, b = copy.read(), original.read()
        if a.dtype != b.dtype or not torch.equal(a, b):
            raise HuggingFaceError(
                f"{folder}: {copy.name} differs from {original.name}; one tensor is both in this"
                " model (tie_word_embeddings)"
            )


def is_folder(path: "Path | str") -> bool:
    """Whether this is a Hugging Face folder, and not a checkpoint or a run of this project, which
    have a config.json too."""
    path = Path(path)
    try:
        return (
            (path / "config.json").is_file()
            and not (path / "index.json").is_file()
            and not (path / "checkpoints").is_dir()
        )
    # A name that is too long, a folder without permission.
    except OSError:
        return False


def open_folder(
    hf_dir: Path, shape_class: type[MoEConfig] | None = MoEConfig
) -> tuple[MoEConfig, Callable[[str], Tensor], str]:
    """(the model's configuration; read(our name) -> that parameter, whole, in float32; the name of
    its tokenizer). shape_class: of the configuration; None: any. Raises HuggingFaceError."""
    hf_dir = Path(hf_dir)
    try:
        if not (hf_dir / "config.json").is_file():
            raise HuggingFaceError(
                f"{hf_dir} is not a folder with a config.json, as save_pretrained writes it"
            )
    except OSError as e:
        raise HuggingFaceError(f"{hf_dir} cannot be opened ({e.strerror})") from None
    hf_config = read_json(hf_dir / "config.json")
    with refused(HuggingFaceError, where=f"{hf_dir}/config.json: "):
        architecture = find_architecture(hf_config)
        config = read_fields(hf_config, architecture)
    with refused(checkpoint.CheckpointError):
        check_command(hf_dir, dataclasses.asdict(config), shape_class or config)
    sources = match(hf_dir, config, architecture)
    read = architecture.reader(hf_dir, config, lambda name: sources[name].read())
    return config, read, tokenizer_name(hf_dir, config)


# --- import ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """A folder to write into, which takes the target's name when the body succeeds, and is removed
    otherwise. Raises HuggingFaceError."""
    target = Path(target).resolve()
    # Not with_name: / has no name.
    folder = target.parent / f".{target.name}.writing"
    errors = OSError, SafetensorError, checkpoint.CheckpointError, TokenizerError
    with (
        terminal.removed_at_the_end(folder),
        refused(*errors, where=f"{target} cannot be written: "),
    ):
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise HuggingFaceError(f"{target} exists, and is not an empty folder")
        # Left by a process that was killed.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder
        os.rename(folder, target)


def untrained(run: dict, model: dict) -> dict:
    """The state of a checkpoint that no run has written. run: its config; model: the fields of its
    MoEConfig."""
    return {"config": run, "model": model, "tokens": 0, "corpus": None, "optimizer": None}


def write_checkpoint(folder: Path, config: MoEConfig, state: dict, read: Callable) -> None:
    """A model without optimizer moments. read(name): a whole parameter, when its file is written.
    Raises CheckpointError."""
    # On the meta device: names and shapes.
    parameters = {f"model.{n}": p.detach() for n, p in empty_model(config).named_parameters()}
    checkpoint.write(folder, 0, parameters, state, lambda name: read(name.removeprefix("model.")))


def import_folder(hf_dir: Path, path: Path) -> MoEConfig:
    """Write the model in a Hugging Face folder as a checkpoint at `path`: float32, step 0, no
    optimizer moments. Raises HuggingFaceError."""
    config, read, name = open_folder(hf_dir, None)
    if modules := read_json(Path(hf_dir) / "config.json").get("num_nextn_predict_layers"):
        notice = "multi-token prediction is not imported; the model's logits do not depend on it"
        say_aside(f"num_nextn_predict_layers {modules}: {notice}")
    tokenizer = open_tokenizer(name, Path(hf_dir), config)
    if Path(name).name == "tokenizer.json":
        name = str(Path(path).resolve() / "tokenizer.json")
    # The shape of the model stands in `model`.
    architecture = architecture_of(config)
    run = {"model": architecture.preset, "tokenizer": name}
    state = untrained(run, dataclasses.asdict(config)) | architecture.read_beside(Path(hf_dir))
    if tokenizer:
        state["tokenizer"] = dataclasses.asdict(record(tokenizer))
    with building(path) as folder:
        write_checkpoint(folder, config, state, read)
        if tokenizer:
            save_files(tokenizer.files, folder)
    return config


# --- export ---------------------------------------------------------------------------------------


def export_folder(
    path: Path,
    hf_dir: Path,
    dtype: str = "fp32",
    max_shard_bytes: int = 5 * 10**9,
    merged: MergedModel | None = None,
) -> MoEConfig:
    """Write the model of a checkpoint, or of a run's newest one, as a folder for from_pretrained.

    max_shard_bytes: of a safetensors file, about. merged: the same model with an adapter in
    it. Raises HuggingFaceError or CheckpointError."""
    if not Path(path).is_dir():
        raise HuggingFaceError(f"{path} is not a folder")
    path = checkpoint.find(path)
    config, saved = read_any_model(path)
    hf_config = to_hf_config(config) | {"dtype": str(DTYPES[dtype]).removeprefix("torch.")}
    theirs = their_tensors(config, architecture_of(config))
    sizes = {
        name: torch.Size(tensor.shape).numel() * DTYPES[dtype].itemsize
        for name, tensor in theirs.items()
    }
    groups = group_by_size(sizes, max_shard_bytes)
    weight_map = {}

    def fill(views: dict[str, Tensor]) -> None:
        if not merged:
            return checkpoint.read(path, {f"model.{name}": view for name, view in views.items()})
        for name, view in views.items():
            view.copy_(merged.read(name))

    with building(hf_dir) as folder:
        checkpoint.verify(path)
        for number, group in enumerate(groups, 1):
            file = "model.safetensors"
            if len(groups) > 1:
                file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            tensors = {name: theirs[name] for name in group}
            weight_map |= dict.fromkeys(
                write_file(folder / file, tensors, DTYPES[dtype], fill), file
            )
        if len(groups) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        architecture = architecture_of(config)
        hf_config = architecture.nested(hf_config | export_tokenizer(path, folder, config))
        hf_config = architecture.write_beside(folder, hf_config, saved)
        if merged and merged.chat_template:
            shutil.copyfile(merged.chat_template, folder / CHAT_TEMPLATE)
        (folder / "config.json").write_text(json.dumps(hf_config, indent=1))
    return config


def group_by_size(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, in groups of at most `limit` bytes. A larger tensor has a group of its own;
    the experts of a layer, stacked, count as one tensor."""
    groups = []
    room = 0
    for name, size in sizes.items():
        if size > room or not groups:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


def write_file(
    file: Path, theirs: dict[str, TheirTensor], dtype: torch.dtype, fill: Callable
) -> list[str]:
    """Write one safetensors file: some of their tensors, filled through the views that import
    takes. fill({our name: view}): reads the model. Returns the names in the file. Raises
    HuggingFaceError."""
    # Rows that ours lack are 0 there.
    stacked = {name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in theirs.items()}
    views = {}
    # (our tensor, where it lies, theirs) of those that are no view of theirs.
    copies = []
    for name, tensor in theirs.items():
        for ours, location in tensor.parts.items():
            if location.is_view:
                views[ours] = location.view(stacked[name])
            else:
                views[ours] = location.read(stacked[name])
                copies.append((views[ours], location, stacked[name]))
    fill(views)
    for copy, location, whole in copies:
        location.write(whole, copy)
    tensors = {}
    for name, tensor in stacked.items():
        tensors |= unstack(name, tensor)
    for name, tensor in tensors.items():
        if dtype == torch.float16 and tensor.isinf().any():
            raise HuggingFaceError(
                f"{name} has values beyond 65504, the largest in fp16; --dtype bf16 has them"
            )
    save_file(tensors, file, {"format": "pt"})
    # Safetensors makes files that only their owner can read; these are to be given away.
    os.chmod(file, 0o644)
    return list(tensors)


# --- the tokenizer --------------------------------------------------------------------------------

# tokenizer.json and the files beside it go with the model, in and out. A vocabulary of 50257 or 257
# without any file has the built-in tokenizer, gpt2 or bytes.


def tokenizer_name(hf_dir: Path, config: MoEConfig) -> str:
    """The tokenizer.json of a folder; where it has no tokenizer at all, the built-in one of its
    vocabulary's size. A file that is missing is reported where a tokenizer is needed."""
    file = str(hf_dir.resolve() / "tokenizer.json")
    built_in = {50257: "gpt2", 257: "bytes"}.get(config.vocab_size)
    if os.path.isfile(file) or needs_conversion(file) or not built_in:
        return file
    return built_in


def open_tokenizer(name: str, hf_dir: Path, config: MoEConfig) -> FileTokenizer | None:
    """The tokenizer.json of a folder, where it has one; else a line says what is lost. Raises
    HuggingFaceError."""
    if why := needs_conversion(name):
        raise HuggingFaceError(why)
    if name in BUILT_IN or not Path(name).is_file():
        if ids := model_ids(hf_dir):
            named = ", ".join(f"{name} {value}" for name, value in ids.items())
            notice = f"{hf_dir} has no tokenizer, so an export will not have its {named}"
            say_aside(notice)
        return None
    try:
        tokenizer = FileTokenizer(name)
    except TokenizerError as e:
        raise HuggingFaceError(str(e).removeprefix("--tokenizer ")) from None
    largest = max(tokenizer.vocabulary.values())
    if largest >= config.vocab_size:
        raise HuggingFaceError(
            f"{name}: its ids go up to {largest}, and the model of config.json has "
            f"vocab_size {config.vocab_size}: they do not belong together"
        )
    keep_its_class(tokenizer, hf_dir, config)
    return tokenizer


def keep_its_class(tokenizer: FileTokenizer, hf_dir: Path, config: MoEConfig) -> None:
    """Name the class that takes tokenizer.json as it is, where the model is exported under another
    name: a Mistral without a window becomes a Llama. AutoTokenizer takes a Mistral's file as it is,
    but for a Llama the class that is named beside it, which splits some texts in its own way."""
    files, beside_it = tokenizer.files, "tokenizer_config.json"
    model_type = read_json(hf_dir / "config.json").get("model_type")
    if beside_it in files and model_type != architecture_of(config).model_type:
        content = json_files.parse(files[beside_it], dict)
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
        tokenizer.files = files | {beside_it: as_bytes(content)}


def export_tokenizer(path: Path, folder: Path, config: MoEConfig) -> dict:
    """Write the files of a checkpoint's tokenizer. Returns the fields of config.json that repeat
    its begin and end ids. Raises CheckpointError or TokenizerError."""
    name, architecture = checkpoint.tokenizer_of(path), architecture_of(config)
    if name not in BUILT_IN and not Path(name).is_file():
        return {}
    try:
        tokenizer = make_tokenizer(name)
        # A model of another size was not trained with the built-in tokenizer that it names.
        if name in BUILT_IN and tokenizer.vocab_size > config.vocab_size:
            return {}
        special = architecture.special_tokens(tokenizer)
        save_files(add_special_tokens(files_of(tokenizer), *special, config.vocab_size), folder)
    except TokenizerError as e:
        if name not in BUILT_IN:
            raise
        # Tiktoken fetches its vocabulary.
        say_aside(f"without a tokenizer: {e}")
        return {}
    template = beside(path, CHAT_TEMPLATE)
    if name in BUILT_IN and template:
        shutil.copyfile(template, folder / CHAT_TEMPLATE)
    ids = architecture.special_ids(tokenizer)
    return {name: n for name, n in ids.items() if torch.tensor(n).max() < config.vocab_size}


def say_aside(notice: str) -> None:
    terminal.say(f"huggingface.py: {notice}", error=True)


def report(name: str, convert: Callable[[], str]) -> int:
    """Run a command that converts folders, and print what it returns. Exit status: 0, or 2 with one
    message. name: of the file, for messages."""
    try:
        print(convert())
    except (InputError, FloatingPointError, OSError) as e:
        message = str(e)
        if isinstance(e, OSError):
            message = f"{terminal.one_line(e.filename or os.curdir)[:80]}: {e.strerror}"
        terminal.say(terminal.one_line(f"{name}: {message}"), error=True)
        return 2
    return 0


# --- the command line -----------------------------------------------------------------------------


def size(text: str) -> int:
    """Bytes, from a number with or without a unit: 5GB, 500MB, 5000000000."""
    parts = re.fullmatch(r"([1-9]\d*)([KMGT]?)B?", text.upper())
    if not parts:
        raise argparse.ArgumentTypeError(f"{text} is not a size like 5GB or 5000000000")
    number, unit = parts.groups()
    return int(number) * 1000 ** ["", "K", "M", "G", "T"].index(unit)


def make_parser() -> argparse.ArgumentParser:
    about = "The same weights as Hugging Face folders, in and out."
    parser = argparse.ArgumentParser(prog="python -m inference.huggingface", description=about)
    flag = parser.add_argument
    flag("command", choices=("import", "export"))
    flag("source", help="to import: a Hugging Face folder; to export: a checkpoint or a run")
    flag("target", help="a new folder")
    flag("--dtype", choices=tuple(DTYPES), help="of an exported model (default: fp32)")
    flag("--max-shard-size", type=size, help="of exported files, like 5GB, the default")
    flag("--adapter", help="a run with --peft, whose LoRA or IA3 is merged into the export")
    return parser


def convert(args: argparse.Namespace) -> str:
    """Returns what was written. Raises HuggingFaceError, CheckpointError or OSError."""
    if args.command == "import":
        if args.adapter:
            raise HuggingFaceError(
                "--adapter: is for export; inference.adapters import has its own"
            )
        if args.dtype or args.max_shard_size:
            name = "--dtype" if args.dtype else "--max-shard-size"
            raise HuggingFaceError(f"{name}: is for export; an imported model is fp32")
        config = import_folder(args.source, args.target)
    else:
        merged = MergedModel(args.source, args.adapter) if args.adapter else None
        sizes = args.dtype or "fp32", args.max_shard_size or size("5GB")
        config = export_folder(args.source, args.target, *sizes, merged)
    count = num_parameters(empty_model(config))
    return f"{args.target}: {architecture_of(config).name}, {count:,} parameters"


def main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    return report("huggingface.py", lambda: convert(args))


if __name__ == "__main__":
    terminal.command(main)
