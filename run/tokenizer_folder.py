"""The files beside a tokenizer.json: what begins and ends a text, and how a chat becomes one.

A tokenizer.json does not say which ids begin and end a text. The files beside it do: names
(eos_token, bos_token) in tokenizer_config.json, ids (eos_token_id, one or a list, and bos_token_id)
in generation_config.json and config.json. Whether the begin token stands before a text is in the
post-processor of tokenizer.json; transformers 5 and this file ignore another add_bos_token.

A run and a checkpoint keep these files with the tokenizer.json.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base import json_files

# The JSON files beside a tokenizer.json that are about it.
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
# How a conversation becomes text (finetune/chat_template.py). Older models have it in
# tokenizer_config.json, models of images in a JSON file.
CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATE_JSON = "chat_template.json"
# A folder of further templates: NAME.jinja.
MORE_TEMPLATES = "additional_chat_templates"
# The files of a tokenizer that a checkpoint keeps, with those in MORE_TEMPLATES.
TOKENIZER_FILES = ("tokenizer.json", *CONFIG_FILES, CHAT_TEMPLATE, CHAT_TEMPLATE_JSON)
# The special tokens that every tokenizer may have.
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
TOKEN_NAMES += ("mask_token",)
# A tokenizer in other forms, which are not read here.
OTHER_FORMS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


class TokenizerFolder:
    """What the files beside a tokenizer.json say."""

    def __init__(self, tokenizer: Path, vocabulary: dict[str, int]):
        """A tokenizer of another name than tokenizer.json has no such files. Raises JSONError or
        OSError."""
        self.folder = tokenizer.parent
        self.vocabulary = vocabulary
        # Name -> content.
        self.files = {}
        known = (*TOKENIZER_FILES[1:], *more_templates(self.folder))
        for name in known if tokenizer.name == "tokenizer.json" else ():
            if (self.folder / name).is_file():
                self.files[name] = json_files.read_bytes(self.folder / name)
        fields = {}
        for name in CONFIG_FILES:
            content = self.files.get(name, b"{}")
            fields[name] = json_files.parse(content, dict, f"{self.folder}/{name}")
        # As in transformers: without added_tokens_decoder special_tokens_map.json counts first.
        self.config, names = fields["tokenizer_config.json"], fields["special_tokens_map.json"]
        if "added_tokens_decoder" not in self.config:
            self.config = self.config | names
        self.with_names = names | self.config
        self.with_ids = fields["generation_config.json"]
        if tokenizer.name == "tokenizer.json":
            self.add_ids(model_ids(self.folder))

    def add_ids(self, ids: dict) -> None:
        """Add the ids of config.json that generation_config.json lacks, because a checkpoint has no
        config.json."""
        added = {key: value for key, value in ids.items() if self.with_ids.get(key) is None}
        if added:
            self.with_ids = self.with_ids | added
            self.files["generation_config.json"] = json.dumps(self.with_ids, indent=1).encode()

    def ids(self, field: str) -> list[int]:
        """The one or several ids in a field, without those beyond the vocabulary. Raises
        JSONError."""
        where = f"{self.folder}/generation_config.json: {field}"
        value = json_files.convert(self.with_ids.get(field), int | list[int] | None, where)
        values = [value] if isinstance(value, int) else value or []
        known = set(self.vocabulary.values())
        return [i for i in values if i in known]

    def token(self, field: str) -> str | None:
        """The text of the token that a field names. Raises JSONError."""
        return self.text_of(self.with_names.get(field), field)

    def text_of(self, token, field: str) -> str | None:
        """token: its text, or an object. Raises JSONError."""
        value = token.get("content") if isinstance(token, dict) else token
        where = f"{self.folder}/tokenizer_config.json: {field}"
        return json_files.convert(value, str | None, where)

    def template_names(self) -> dict[str, str]:
        """Name -> text of the special tokens that a chat template may use, as in transformers.
        Raises JSONError."""
        fields = self.with_names
        named = {k: v for k, v in fields.items() if k.endswith("_token") and k not in TOKEN_NAMES}
        own = {k: v for k, v in named.items() if isinstance(v, str | dict)}
        # A dictionary of names, or a list of tokens without any.
        extra = fields.get("extra_special_tokens")
        own |= extra if isinstance(extra, dict) else {}
        if not own:
            where = f"{self.folder}/tokenizer_config.json: model_specific_special_tokens"
            own = fields.get("model_specific_special_tokens") or {}
            own = json_files.convert(own, dict[str, Any], where)
        own = {name: fields.get(name) for name in TOKEN_NAMES} | own
        texts = {name: self.text_of(token, name) for name, token in own.items()}
        return {name: text for name, text in texts.items() if text is not None}

    def named(self, field: str) -> list[int]:
        """The id of the token that a field names; empty if it names none. Raises JSONError."""
        token = self.token(field)
        return [self.vocabulary[token]] if token in self.vocabulary else []

    def chat_template(self) -> str | None:
        """The text of the chat template; of several, the one called default. Raises JSONError, or
        UnicodeDecodeError."""
        if CHAT_TEMPLATE in self.files:
            return self.files[CHAT_TEMPLATE].decode()
        where = f"{self.folder}/tokenizer_config.json: chat_template"
        value = self.with_names.get("chat_template")
        # name -> text
        named = {Path(name).stem: self.files[name].decode() for name in self.files if "/" in name}
        if isinstance(value, list):
            listed = json_files.convert(value, list[dict[str, str]], where)
            named = {each.get("name", ""): each.get("template") for each in listed} | named
            value = None
        value = named.get("default", value)
        if value is None and CHAT_TEMPLATE_JSON in self.files:
            where = f"{self.folder}/{CHAT_TEMPLATE_JSON}"
            value = json_files.parse(self.files[CHAT_TEMPLATE_JSON], dict, where)
            value = value.get("chat_template")
        if value is None and named:
            raise json_files.JSONError(
                f"{self.folder} has the chat templates {' and '.join(sorted(named))}, none of them"
                " called default; choose one with --chat-template FILE"
            )
        return json_files.convert(value, str | None, where)


def more_templates(folder: Path) -> list[str]:
    """The names of the files in MORE_TEMPLATES."""
    return sorted(
        f"{MORE_TEMPLATES}/{file.name}" for file in folder.glob(f"{MORE_TEMPLATES}/*.jinja")
    )


def needs_conversion(path: str) -> str:
    """What to do where a folder has its tokenizer in another form than tokenizer.json; "" where it
    has none, or another file is meant."""
    folder = Path(path).parent
    found = [name for name in OTHER_FORMS if (folder / name).is_file()]
    if Path(path).name != "tokenizer.json" or Path(path).exists() or not found:
        return ""
    return (
        f"{folder} has only {' and '.join(found)}; transformers writes a tokenizer.json with"
        " AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def save_files(files: dict[str, bytes], folder: Path) -> None:
    """Write the files of a tokenizer into a folder, each completely or not at all, and remove those
    of another tokenizer."""
    for name in {*TOKENIZER_FILES, *more_templates(folder)} - files.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        building = target.with_name(f".{target.name}.saving")
        building.write_bytes(content)
        os.replace(building, target)


@dataclass
class TokenizerRecord:
    """What a checkpoint records of the tokenizer; empty in older checkpoints."""

    fingerprint: str = ""
    # Name -> SHA-256.
    files: dict[str, str] = field(default_factory=dict)


def record(tokenizer) -> TokenizerRecord:
    files = tokenizer.files.items()
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files}
    return TokenizerRecord(tokenizer.fingerprint, hashes)


def model_ids(folder: Path) -> dict:
    """The begin, end and padding ids in a Hugging Face folder's config.json. Raises JSONError."""
    # The config.json of a run is another one.
    is_run = (folder / "checkpoints").is_dir()
    if is_run or not (folder / "config.json").is_file():
        return {}
    config = json_files.read(folder / "config.json", dict)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config.get(key) is not None}
