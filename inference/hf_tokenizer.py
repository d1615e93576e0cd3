"""The tokenizer of a Hugging Face folder: its files go with the model, in and out.

tokenizer.json, ..      import keeps them beside the checkpoint, export writes them again
a vocabulary of 50257 or 257 without any file: the built-in tokenizer, gpt2 or bytes
"""

import os
import shutil
from pathlib import Path

from base import json_files, terminal
from base.model_config import MoEConfig
from inference.architectures import HuggingFaceError
from inference.hf_config import architecture_of, read_json
from run import checkpoint
from run.checkpoint import beside
from run.tokenizer import (
    BUILT_IN,
    CHAT_TEMPLATE,
    FileTokenizer,
    TokenizerError,
    make_tokenizer,
    model_ids,
    needs_conversion,
    save_files,
    special_ids,
)
from run.tokenizer_json import as_bytes, files_of


def name_of(hf_dir: Path, config: MoEConfig) -> str:
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
            terminal.say(f"huggingface.py: {notice}", error=True)
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


def export(path: Path, folder: Path, config: MoEConfig) -> dict:
    """Write the files of a checkpoint's tokenizer. Returns the fields of config.json that repeat
    its begin and end ids. Raises CheckpointError or TokenizerError."""
    name = checkpoint.tokenizer_of(path)
    if name not in BUILT_IN and not Path(name).is_file():
        return {}
    try:
        tokenizer = make_tokenizer(name)
        # a model of another size was not trained with the built-in tokenizer that it names
        if name in BUILT_IN and tokenizer.vocab_size > config.vocab_size:
            return {}
        save_files(files_of(tokenizer), folder)
    except TokenizerError as e:
        if name not in BUILT_IN:
            raise
        # tiktoken fetches its vocabulary
        terminal.say(f"huggingface.py: without a tokenizer: {e}", error=True)
        return {}
    template = beside(path, CHAT_TEMPLATE)
    if name in BUILT_IN and template:
        shutil.copyfile(template, folder / CHAT_TEMPLATE)
    ids = special_ids(tokenizer)
    largest = max([tokenizer.eot, *tokenizer.stop_ids, ids["bos_token_id"]])
    return ids if largest < config.vocab_size else {}
