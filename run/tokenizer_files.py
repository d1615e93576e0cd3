"""The tokenizer of a checkpoint's model: where its files are, and whether they have changed.

    RUN/tokenizer.json, tokenizer_config.json, ..      of a run: beside its checkpoints folder
    CKPT/tokenizer.json, ..                            of an import: in the checkpoint
    CKPT/index.json                                    their SHA-256, and the name given in training

A model that reads other ids than it was trained with generates nonsense without an error, so a file
with another content is refused.

    python -m run.checkpoint verify CKPT        compares these checksums too
"""

import hashlib
import re
from pathlib import Path

from base import json_files
from run.checkpoint_index import CheckpointError, read_index
from run.tokenizer import BUILT_IN, MORE_TEMPLATES, TOKENIZER_FILES, TokenizerRecord


def beside(path: Path, name: str) -> Path | None:
    """A file that belongs to the checkpoint at `path`: in its folder, or in that of its run."""
    path = Path(path)
    folders = [path]
    if path.parent.name == "checkpoints":
        folders.append(path.parent.parent)
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def tokenizer_of(path: Path) -> str:
    """The name, or the file, of the tokenizer that a checkpoint's model was trained with. Raises
    CheckpointError where the file has another content now."""
    index = read_index(Path(path))
    name = str(index["config"].get("tokenizer") or "bytes")
    if name in BUILT_IN:
        return name
    return str(verify_tokenizer(path, index).get("tokenizer.json", name))


def tokenizer_record(path: Path, index: dict) -> TokenizerRecord:
    """What an index says of the tokenizer. Raises CheckpointError."""
    try:
        return json_files.convert(
            index.get("tokenizer", {}), TokenizerRecord, f"{path}/index.json: tokenizer"
        )
    except json_files.JSONError as e:
        raise CheckpointError(str(e)) from None


def verify_tokenizer(path: Path, index: dict) -> dict[str, Path]:
    """Name -> path of the tokenizer's files: beside the checkpoint or, where there is no
    tokenizer.json, at the path that the model was trained with. Raises CheckpointError for a file
    whose content has changed since."""
    recorded = tokenizer_record(path, index).files
    trained_with = Path(str(index["config"].get("tokenizer")))
    files = {}
    templates = (name for name in recorded if re.fullmatch(f"{MORE_TEMPLATES}/[^/]+", name))
    for name in (*TOKENIZER_FILES, *templates):
        try:
            file = beside(path, name)
            if name == "tokenizer.json" and not file and trained_with.is_file():
                file = trained_with
            if not file:
                continue
            content = json_files.read_bytes(file)
        except OSError as e:
            raise CheckpointError(f"{path}: its {name} cannot be read ({e.strerror})") from None
        if name in recorded and hashlib.sha256(content).hexdigest() != recorded[name]:
            raise CheckpointError(
                f"{file} is altered: the model in {path} was trained with another content. "
                "Put that back, or name a tokenizer with --tokenizer"
            )
        files[name] = file
    return files
