"""The same weights as Hugging Face folders: what `transformers` saved goes on training here, what
was trained here loads there.

A model is a config.json, and tensors under other names. The tables of architectures.py say where
each of our tensors lies in which of theirs: import takes a view of their tensor there, export fills
the same view. In float32 nothing is computed, so nothing is rounded.

    python huggingface.py                                     a small GPT-2 there and back: names, bits, logits
    python huggingface.py import HF_DIR CKPT                  then: python generate.py --checkpoint CKPT
    python huggingface.py export CKPT HF_DIR --dtype bf16     CKPT may be a run's folder: its newest checkpoint

In memory at a time are the tensors of one file, never a model; a folder appears under its name when
it is whole. Only safetensors are read: a pytorch_model.bin is a pickle, and loading it executes
what it says. What gpt.py does not compute is refused by name, never ignored.

Megatron Bridge adds dozens of architectures, scaled rotary positions, and conversion on GPUs, each
rank its slices; a checkpoint here loads under any layout, so one process is enough."""

from runtime import terminal

if __name__ == "__main__":
    # PyTorch takes seconds to import, and Ctrl-C may come meanwhile.
    terminal.quiet_interrupts()

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import checkpoint
import sharding
from corpus.tokenizer import BUILT_IN, FileTokenizer, TokenizerError, record
from gpt import GPTConfig, num_parameters
from runtime import json_files
from runtime.architectures import (
    HuggingFaceError,
    Place,
    architecture_of,
    empty_model,
    layout,
    split,
    to_gpt_config,
    to_hf_config,
)
from runtime.config import MODEL_FLAGS, Config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# the same, as safetensors calls them
STORED = ("F32", "BF16", "F16")


# --- import ---------------------------------------------------------------------------------------


def read_json(path: Path, kind=dict[str, Any]):
    """The content of a JSON file as `kind`. Raises HuggingFaceError."""
    try:
        return json_files.read(path, kind)
    except json_files.JSONError as e:
        raise HuggingFaceError(str(e)) from None


class ShardIndex(TypedDict):
    """model.safetensors.index.json: which file beside it holds each tensor."""

    weight_map: dict[str, Annotated[str, Meta(max_length=255, pattern="^[^/]+$")]]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model. Raises HuggingFaceError."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        return [
            folder / n for n in sorted(set(read_json(index, ShardIndex)["weight_map"].values()))
        ]
    if any(folder.glob("pytorch_model*.bin")):
        raise HuggingFaceError(
            f"{folder} has only a pytorch_model.bin, a pickle, which is never opened here; if you"
            " trust it, load it with transformers and save_pretrained(folder,"
            " safe_serialization=True)"
        )
    raise HuggingFaceError(f"{folder} has neither model.safetensors nor {index.name}")


def read_headers(folder: Path) -> dict[str, tuple[Path, list[int], str]]:
    """Each tensor's (file, shape, dtype), without its values. Raises HuggingFaceError."""
    found = {}
    for file in weight_files(folder):
        if not file.is_file():
            raise HuggingFaceError(f"{file} is missing, and model.safetensors.index.json names it")
        try:
            found |= {
                name: (file, shape, dtype)
                for name, (dtype, shape, _) in checkpoint.read_header(file).items()
            }
        except checkpoint.CheckpointError as e:
            raise HuggingFaceError(str(e)) from None
    return found


def read_tensor(file: Path, name: str) -> Tensor:
    """Mapped, not read: what is not touched takes no memory."""
    with safe_open(file, "pt") as f:
        return f.get_tensor(name)


def match(folder: Path, config: GPTConfig) -> dict[str, tuple[list[tuple[Path, str]], Place]]:
    """Our name -> ([(file, their name)], one for each expert; where in it). Raises
    HuggingFaceError, naming what is missing, left over or different."""
    architecture = architecture_of(config)
    wrong = []
    found = {}
    there = {
        name.removeprefix(architecture.prefix): (name, *rest)
        for name, rest in read_headers(folder).items()
    }
    head = there.get("lm_head.weight")
    there = {
        short: entry
        for short, entry in there.items()
        if not re.fullmatch(architecture.ignored, short)
    }
    try:
        checkpoint.check_sizes(
            config, {f".{short}": shape for short, (_, _, shape, _) in there.items()}
        )
    except ValueError as e:
        raise HuggingFaceError(f"{folder} holds another model than its config.json: {e}") from None
    for whole, (shape, places) in layout(config).items():
        sources = []
        for name, part in split(whole, torch.empty(shape, device="meta")).items():
            theirs, file, stored, dtype = there.pop(
                name.removeprefix(architecture.prefix), (name, None, None, None)
            )
            if file is None:
                wrong.append(f"{name} is missing")
            elif stored != list(part.shape) or dtype not in STORED:
                wrong.append(
                    f"{name} is {dtype} {stored} there, and {' or '.join(STORED)}"
                    f" {list(part.shape)} in gpt.py"
                )
            sources.append((file, theirs))
        found |= {ours: (sources, place) for ours, place in places.items()}
    wrong += [f"{name} is not in gpt.py" for name, *_ in there.values()]
    if any("experts.gate_up_proj" in name for name in there):
        raise HuggingFaceError(
            f"{folder}: its experts are fused (gate_up_proj); transformers writes them one by one"
            " with save_pretrained(folder, save_original_format=True)"
        )
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise HuggingFaceError(
            f"{folder} holds another model than its config.json: {'; '.join(wrong[:3])}{more}"
        )
    # transformers would use a second copy that differs
    if head and not config.llama:
        one = read_tensor(head[1], head[0])
        other = read_tensor(*found["embedding.tokens.weight"][0][0])
        if one.dtype != other.dtype or not torch.equal(one, other):
            raise HuggingFaceError(
                f"{folder}: lm_head.weight differs from transformer.wte.weight; in gpt.py a GPT-2"
                " has one tensor for both"
            )
    return found


@contextlib.contextmanager
def building(target: Path):
    """A folder that takes the target's name when all went well, and is gone otherwise. Raises
    HuggingFaceError."""
    target = Path(target).resolve()
    folder = target.with_name(f".{target.name}.writing")
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise HuggingFaceError(f"{target} exists, and is not an empty folder")
        # of one that was killed
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder
        os.rename(folder, target)
    except (OSError, SafetensorError, checkpoint.CheckpointError, TokenizerError) as e:
        raise HuggingFaceError(f"{target} cannot be written: {e}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_folder(path: "Path | str") -> bool:
    """Whether this is a Hugging Face folder, not a checkpoint or a run of this project (which has a
    config.json of its own)."""
    path = Path(path)
    try:
        return (
            (path / "config.json").is_file()
            and not (path / "index.json").is_file()
            and not (path / "checkpoints").is_dir()
        )
    # a name that is too long, a folder without permission
    except OSError:
        return False


def open_folder(hf_dir: Path):
    """(the model's configuration, read(our name) -> that parameter, whole, in float32; the name of
    its tokenizer). Raises HuggingFaceError."""
    hf_dir = Path(hf_dir)
    try:
        if not (hf_dir / "config.json").is_file():
            raise HuggingFaceError(
                f"{hf_dir} is not a folder with a config.json, as save_pretrained writes it"
            )
    except OSError as e:
        raise HuggingFaceError(f"{hf_dir} cannot be opened ({e.strerror})") from None
    hf_config = read_json(hf_dir / "config.json")
    try:
        config = to_gpt_config(hf_config)
    except HuggingFaceError as e:
        raise HuggingFaceError(f"{hf_dir}/config.json: {e}") from None
    found = match(hf_dir, config)

    def read(name: str) -> Tensor:
        sources, place = found[name]
        if "#" not in place.module:
            return place.view(read_tensor(*sources[0])).contiguous().float()
        experts = torch.empty(len(sources), *read_tensor(*sources[0]).shape)  # [E, ..]
        for expert, source in zip(experts, sources):
            expert.copy_(read_tensor(*source))
        return experts

    tokenizer = {50257: "gpt2", 257: "bytes"}.get(config.vocab_size)
    # where there is none, who needs it is told so
    if (hf_dir / "tokenizer.json").is_file() or not tokenizer:
        tokenizer = str(hf_dir.resolve() / "tokenizer.json")
    return config, read, tokenizer


def import_folder(hf_dir: Path, path: Path) -> GPTConfig:
    """Write the model in a Hugging Face folder as a checkpoint at `path`: float32, step 0, no
    moments. Raises HuggingFaceError."""
    config, read, name = open_folder(hf_dir)
    tokenizer = open_its_tokenizer(name, config)
    parameters = {f"model.{n}": p.detach() for n, p in empty_model(config).named_parameters()}
    with building(path) as folder:
        if Path(name).name == "tokenizer.json":
            name = str(Path(path).resolve() / "tokenizer.json")
        flags = {k: v for k, v in dataclasses.asdict(config).items() if k in MODEL_FLAGS}
        preset = {"gpt2": "gpt2", "llama": "llama2-7b", "mixtral": "mixtral-8x7b"}[
            architecture_of(config).model_type
        ]
        run = Config(model=preset, tokenizer=name, **flags)
        state = {
            "config": dataclasses.asdict(run),
            "model": dataclasses.asdict(config),
            "tokens": 0,
            "corpus": None,
            "optimizer": None,
        }
        state |= {"tokenizer": dataclasses.asdict(record(tokenizer))} if tokenizer else {}
        checkpoint.write(
            folder, 0, parameters, state, lambda name: read(name.removeprefix("model."))
        )
        if tokenizer:
            tokenizer.save(folder)
    return config


def open_its_tokenizer(name: str, config: GPTConfig) -> FileTokenizer | None:
    """The tokenizer.json of a folder, where it has one. Raises HuggingFaceError."""
    if name in BUILT_IN or not Path(name).is_file():
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
    return tokenizer


# --- export ---------------------------------------------------------------------------------------


def shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, in files of at most `limit` bytes; a larger tensor has one of its own, and so
    do experts that together are larger."""
    found = []
    room = 0
    for name, size in sizes.items():
        if size > room or not found:
            found.append([])
            room = limit
        found[-1].append(name)
        room -= size
    return found


def write_shard(
    path: Path,
    file: Path,
    theirs: dict[str, tuple[list[int], dict[str, Place]]],
    dtype: torch.dtype,
) -> list[str]:
    """Some of their tensors, filled from a checkpoint through the views that import takes; gone
    from memory before the next shard. Returns the names."""
    filled = {name: torch.empty(shape, dtype=dtype) for name, (shape, _) in theirs.items()}
    checkpoint.read(
        path,
        {
            f"model.{ours}": place.view(filled[name])
            for name, (_, places) in theirs.items()
            for ours, place in places.items()
        },
    )
    tensors = {name: t for whole in filled for name, t in split(whole, filled[whole]).items()}
    infinite = (
        [name for name, t in tensors.items() if t.isinf().any()] if dtype == torch.float16 else []
    )
    if infinite:
        raise HuggingFaceError(
            f"{path}: {infinite[0]} has values beyond 65504, the largest in fp16; --dtype bf16 has"
            " them"
        )
    save_file(tensors, file, {"format": "pt"})
    # safetensors makes files that only their owner can read; these are to be given away.
    os.chmod(file, 0o644)
    return list(tensors)


def export_folder(
    path: Path, hf_dir: Path, dtype: str = "fp32", max_shard_bytes: int = 5 * 10**9
) -> GPTConfig:
    """Write the model of a checkpoint, or of a run's newest one, as a folder for from_pretrained.
    Raises HuggingFaceError or CheckpointError."""
    if not Path(path).is_dir():
        raise HuggingFaceError(f"{path} is not a folder")
    path = checkpoint.find(path)
    config, _ = checkpoint.read_model(path)
    hf_config = to_hf_config(config) | {"dtype": str(DTYPES[dtype]).removeprefix("torch.")}
    theirs = layout(config)
    sizes = {
        name: torch.Size(shape).numel() * DTYPES[dtype].itemsize
        for name, (shape, _) in theirs.items()
    }
    files = shards(sizes, max_shard_bytes)
    weight_map = {}
    with building(hf_dir) as folder:
        checkpoint.verify(path)
        for k, names in enumerate(files, 1):
            file = (
                f"model-{k:05d}-of-{len(files):05d}.safetensors"
                if len(files) > 1
                else "model.safetensors"
            )
            weight_map |= dict.fromkeys(
                write_shard(
                    path, folder / file, {name: theirs[name] for name in names}, DTYPES[dtype]
                ),
                file,
            )
        if len(files) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        hf_config |= export_tokenizer(path, folder, config)
        (folder / "config.json").write_text(json.dumps(hf_config, indent=1))
    return config


def export_tokenizer(path: Path, folder: Path, config: GPTConfig) -> dict:
    """Copy the files of a checkpoint's tokenizer. Returns the fields of config.json that say the
    same as they. Raises CheckpointError or TokenizerError."""
    name = checkpoint.tokenizer_of(path)
    if name in BUILT_IN or not Path(name).is_file():
        return {}
    tokenizer = FileTokenizer(name)
    tokenizer.save(folder)
    ids = tokenizer.special_ids()
    largest = max([tokenizer.eot, *tokenizer.stop_ids, ids["bos_token_id"]])
    return ids if largest < config.vocab_size else {}


# --------------------------------------------------------------------------------------------------


def lesson():
    """A GPT-2 there and back."""
    config = GPTConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=32, vocab_size=257)
    model = empty_model(config)
    g = torch.Generator().manual_seed(0)
    sharding.init(model, 0, "cpu", torch.float32)
    # no bias stays 0
    ours = {
        f"model.{name}": p.detach().add_(torch.randn(p.shape, generator=g) * 0.02)
        for name, p in model.named_parameters()
    }
    with tempfile.TemporaryDirectory() as folder:
        here, there, back = (Path(folder) / name for name in ("here", "there", "back"))
        state = {
            "config": {"tokenizer": "bytes"},
            "model": dataclasses.asdict(config),
            "tokens": 0,
            "corpus": None,
            "optimizer": None,
        }
        checkpoint.write(here, 0, ours, state)
        export_folder(here, there)
        print(
            f"a GPT-2 of {num_parameters(model):,} parameters, exported as"
            f" {' and '.join(sorted(f.name for f in there.iterdir()))}; its first layer:\n"
        )
        rows = [
            (name, theirs, shape, place)
            for theirs, (shape, places) in layout(config).items()
            for name, place in places.items()
        ]
        for name, theirs, shape, place in rows:
            if name.startswith("blocks.0."):
                part = "transposed" * (
                    place.transposed and len(shape) == 2
                ) + f", part {place.third}" * (place.third is not None)
                print(
                    f"  {name:<34}{list(ours[f'model.{name}'].shape)!s:<11}{part.strip(', '):<20}{theirs:<36}{shape}"
                )
        import_folder(there, back)
        again = {name: torch.empty_like(t) for name, t in ours.items()}
        checkpoint.read(back, again)
        print(
            f"\nimported again: {sum(torch.equal(t, again[name]) for name, t in ours.items())} of"
            f" {len(ours)} tensors are equal to the last bit"
        )
        if importlib.util.find_spec("transformers"):
            import transformers

            transformers.utils.logging.disable_progress_bar()
            tokens = torch.randint(257, (4, 32), generator=g)
            with torch.no_grad():
                logits = model(tokens)
                expected = (
                    transformers.AutoModelForCausalLM.from_pretrained(there).eval()(tokens).logits
                )
            print(
                f"loaded by transformers {transformers.__version__}: logits up to"
                f" {expected.abs().max():.2f}, largest difference"
                f" {(logits - expected).abs().max():.1e}"
            )


def size(text: str) -> int:
    """5GB, 500MB, or bytes."""
    found = re.fullmatch(r"([1-9]\d*)([KMGT]?)B?", text.upper())
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not a size like 5GB or 5000000000")
    return int(found[1]) * 1000 ** ["", "K", "M", "G", "T"].index(found[2])


def main(argv: list[str]) -> int:
    """Exit status: 0, or 2 with one message."""
    terminal.prepare()
    if not argv:
        lesson()
        return 0
    parser = argparse.ArgumentParser(
        description=(
            "The same weights as Hugging Face folders, in and out; without arguments, a small"
            " example."
        )
    )
    parser.add_argument("command", choices=("import", "export"))
    parser.add_argument(
        "source",
        help=(
            "to import: a folder with config.json and safetensors; to export: a checkpoint, or the"
            " folder of a run"
        ),
    )
    parser.add_argument("target", help="a new folder")
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        default="fp32",
        help="of an export (default: fp32); an import is fp32",
    )
    parser.add_argument(
        "--max-shard-size",
        type=size,
        default="5GB",
        help="of an export's files, like 5GB, or in bytes (default: 5GB)",
    )
    args = parser.parse_args(argv)
    try:
        if args.command == "import":
            config = import_folder(args.source, args.target)
        else:
            config = export_folder(args.source, args.target, args.dtype, args.max_shard_size)
    except (HuggingFaceError, checkpoint.CheckpointError, OSError) as e:
        if isinstance(e, OSError):
            e = f"{terminal.one_line(e.filename)[:80]}: {e.strerror}"
        terminal.say(terminal.one_line(f"huggingface.py: {e}"), error=True)
        return 2
    print(
        f"{args.target}: {architecture_of(config).name}, {num_parameters(empty_model(config)):,}"
        " parameters"
    )
    return 0


if __name__ == "__main__":
    terminal.run(lambda: main(sys.argv[1:]))
