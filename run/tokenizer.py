"""Text to token ids and back: bytes, GPT-2's byte-pair encoding, or a file of `tokenizers`.

Each tokenizer has

    encode(text) -> ids, decode(ids) -> text
    name, vocab_size
    eot, stop_ids        the id that ends a document; all ids at which generation stops
    bos                  the id that begins every text; None for most models
    fingerprint          a hash of its content, for the corpus cache and for checkpoints
    files                {name: content} of what is saved with a model, its chat template too

Bytes need nothing and encode every text, in longer sequences than the 50,257 words and parts of
words of GPT-2 (Radford et al. 2019, section 2.2).

    python -m run.tokenizer "some text" [bytes | gpt2 | FILE]       its ids, and the text again

train_tokenizer.py trains one on a folder of text.
"""

import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from base import json_files, terminal
from base.errors import InputError, cause

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
# A tokenizer in other forms, which are not read here.
OTHER_FORMS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# The end-of-text tokens of published models, for a tokenizer file that stands alone.
EOT_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>")
# The most characters that a normalizer may make of one. Published ones make one.
MOST_GROWTH = 100
# Common and rare characters, encoded once to see that the tokenizer can encode every text.
PROBE = "a é \u4e2d \U0001f600\u0378"


class TokenizerError(InputError):
    """A tokenizer that cannot be used. The message says why, and what to do."""


class Tokenizer:
    """The defaults of a tokenizer."""

    bos = None
    # The begin token that the files name, and that or the id in them. It need not begin a text.
    named_bos = None
    declared_bos = None
    padding = None
    files: ClassVar[dict[str, bytes]] = {}

    def encode_in_thread(self, text: str):
        """`encode` while other threads run. Raises its errors."""
        return self.encode(text)


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and an end-of-text token."""

    name = "bytes"
    fingerprint = "bytes"
    vocab_size = 257
    eot = 256
    stop_ids = (256,)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, through tiktoken."""

    name = "gpt2"
    fingerprint = "gpt2"

    def __init__(self):
        """Raises TokenizerError."""
        try:
            import tiktoken

            self.encoding = tiktoken.get_encoding("gpt2")
        except Exception as e:
            why = f"tiktoken could not fetch its vocabulary ({type(e).__name__}); connect once, or"
            why += " point TIKTOKEN_CACHE_DIR at a copy"
            if isinstance(e, ImportError):
                why = "needs the package tiktoken (pip install tiktoken)"
            raise TokenizerError(f"--tokenizer gpt2: {why}; bytes needs nothing") from None
        self.vocab_size = self.encoding.n_vocab
        self.eot = self.encoding.eot_token
        self.stop_ids = (self.eot,)

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, ids) -> str:
        return self.encoding.decode([i for i in ids if i < self.vocab_size and i != self.eot])


class FileTokenizer(Tokenizer):
    """A `tokenizer.json`, with what the files beside it say about the begin and end of a text.
    Without them the end of text is the first of EOT_NAMES in the vocabulary, or else a new id."""

    def __init__(self, path: str):
        """Raises TokenizerError."""
        self.name = path
        with without_reports():
            content, declared = self.load()
            # Truncation and padding are for classifiers.
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            self.vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
            for fault in self.faults(declared):
                raise TokenizerError(f"--tokenizer {path}: {fault}")
            try:
                self.beside = TokenizerFolder(Path(path), self.vocabulary)
                changed = self.obey_config()
                self.set_begin_and_end()
            except (OSError, ValueError) as e:
                raise TokenizerError(str(e)) from None
        self.files = {"tokenizer.json": content} | self.beside.files
        # The tokens around a document, and what tokenizer_config.json changes, are part of it.
        identity = content + f"{self.bos} {self.eot}".encode()
        if changed:
            identity += json.dumps(changed, sort_keys=True).encode()
        self.fingerprint = hashlib.sha256(identity).hexdigest()

    def load(self) -> tuple[bytes, dict]:
        """Set `tokenizer`. Returns the file's bytes, and its content. Raises TokenizerError."""
        path = self.name
        try:
            from tokenizers import Tokenizer as Library

            content = json_files.read_bytes(path)
            declared = json_files.parse(content, dict, path)
            with library_errors():
                self.tokenizer = Library.from_str(content.decode())
        except (OSError, ValueError) as e:
            why = needs_conversion(path) or cause(e).removeprefix(f"{path}: ")
            rule = f"not bytes, gpt2, or a JSON file of the tokenizers library ({why})"
            raise TokenizerError(f"--tokenizer {path}: {rule}") from None
        return content, declared

    def faults(self, declared: dict) -> Iterator[str]:
        """Yield why it cannot encode every text, or not always alike. declared: the content."""
        if not self.vocabulary:
            yield "its vocabulary is empty"
        for added in declared.get("added_tokens") or []:
            actual = self.vocabulary.get(added["content"], added["id"])
            if actual != added["id"]:
                yield (
                    f"its added token {added['content']!r} has id {added['id']}, and the library"
                    f" gives it {actual}: an id is missing, or two tokens share one"
                )
        count, largest = len(self.vocabulary), max(self.vocabulary.values())
        if 2 * count <= largest:
            yield f"its ids go up to {largest}, and it has {count} tokens; number them from 0"
        if getattr(self.tokenizer.model, "dropout", None):
            yield 'its model has dropout, so no text has the same ids twice; "dropout": null fits'
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (times := growth(declared.get(part))) > MOST_GROWTH:
                yield f"its {part} makes up to {times:,} characters of one; {MOST_GROWTH} would fit"
                # The library would end the process when there is no more memory.
                return
        try:
            self.encode(PROBE)
        except TokenizerError as e:
            yield f"{e}; an unk_token that its vocabulary has would fit"

    def obey_config(self) -> dict[int, dict]:
        """Apply tokenizer_config.json. Returns the added tokens that it changes. Raises
        JSONError."""
        from run import tokenizer_config

        beside = self.beside
        changed = tokenizer_config.obey(self.tokenizer, beside.config, beside.folder)
        self.vocabulary.update(self.tokenizer.get_vocab(with_added_tokens=True))
        self.vocab_size = max(self.vocabulary.values()) + 1
        return changed

    def set_begin_and_end(self) -> None:
        """Set the ids around a text. Raises JSONError."""
        beside = self.beside
        stop_ids = beside.named("eos_token") + beside.ids("eos_token_id")
        if not stop_ids:
            stop_ids = [self.vocabulary[name] for name in EOT_NAMES if name in self.vocabulary]
        if not stop_ids:
            stop_ids = [self.vocab_size]
            self.vocab_size += 1
        # The first id ends documents. Generation stops at all of them.
        self.eot = stop_ids[0]
        self.stop_ids = tuple(dict.fromkeys(stop_ids))
        named = beside.named("bos_token")
        self.named_bos = next(iter(named), None)
        self.declared_bos = next(iter(named + beside.ids("bos_token_id")), None)
        self.padding = next(iter(beside.ids("pad_token_id")), None)
        # The id that the file's post-processor puts before a text, if any.
        with library_errors():
            plain = self.tokenizer.encode("a", add_special_tokens=False).ids
            processed = self.tokenizer.encode("a", add_special_tokens=True).ids
        n = len(plain)
        is_prefixed = processed[:n] != plain and processed[1 : n + 1] == plain
        self.bos = processed[0] if is_prefixed else None

    def encode(self, text: str, in_thread: bool = False) -> list[int]:
        """Raises UnicodeEncodeError for half of a surrogate pair; TokenizerError."""
        # The library would raise another error for half of a pair.
        text.encode()
        try:
            with library_errors():
                if in_thread:
                    return self.tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
                return self.tokenizer.encode(text, add_special_tokens=False).ids
        except ValueError as e:
            raise TokenizerError(str(e)) from None

    def encode_in_thread(self, text: str) -> list[int]:
        # The library releases Python's global lock for a batch alone.
        return self.encode(text, in_thread=True)

    def decode(self, ids) -> str:
        return self.tokenizer.decode([i for i in ids if i != self.bos and i not in self.stop_ids])

    def token_of(self, number: int | None) -> str | None:
        """The text of a token; None for one that the vocabulary does not have."""
        return None if number is None else self.tokenizer.id_to_token(number)


def growth(part) -> int:
    """The most characters that a part of a tokenizer.json, with parts in it, makes of one."""
    if isinstance(part, list):
        return math.prod(map(growth, part))
    if not isinstance(part, dict):
        return 1
    own = len(part.get("content") or "") if part.get("type") == "Replace" else 1
    return max(1, own) * math.prod(growth(value) for value in part.values())


BUILT_IN = {"bytes": ByteTokenizer, "gpt2": GPT2Tokenizer}


def make_tokenizer(name: str) -> Tokenizer:
    """`bytes`, `gpt2`, or the path of a tokenizers JSON file. Raises TokenizerError."""
    return BUILT_IN[name]() if name in BUILT_IN else FileTokenizer(name)


def prompt_ids(tokenizer, text: str) -> list[int]:
    """The ids of a text that a model is to continue. An empty text becomes the id before a new
    text, if there is one."""
    ids = [int(i) for i in tokenizer.encode(text)]
    if tokenizer.bos is not None:
        return [tokenizer.bos, *ids]
    if not ids and tokenizer.eot is not None:
        return [tokenizer.eot]
    return ids


@contextlib.contextmanager
def library_errors():
    """Turn every error of the tokenizers library into a ValueError: it raises bare Exceptions, and
    BaseExceptions where its Rust code panics."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        raise ValueError(" ".join(str(e).split()) or type(e).__name__) from None


@contextlib.contextmanager
def without_reports():
    """Send standard error to /dev/null, where a panic of the library would print a report."""
    copy = os.dup(2)
    try:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(copy, 2)
        os.close(copy)


# --- the files beside a tokenizer.json -----------------------------------------------------------
#
# A tokenizer.json does not say which ids begin and end a text. The files beside it do: names
# (eos_token, bos_token) in tokenizer_config.json, ids (eos_token_id, one or several, and
# bos_token_id) in generation_config.json and config.json. Whether the begin token stands before a
# text is in the post-processor of tokenizer.json; another add_bos_token is ignored, as in
# transformers 5.


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

    def text_of(self, token, field: str) -> str | None:
        """token: its text, or an object. Raises JSONError."""
        value = token.get("content") if isinstance(token, dict) else token
        where = f"{self.folder}/tokenizer_config.json: {field}"
        return json_files.convert(value, str | None, where)

    def named(self, field: str) -> list[int]:
        """The id of the token that a field names; empty if it names none. Raises JSONError."""
        token = self.text_of(self.with_names.get(field), field)
        return [self.vocabulary[token]] if token in self.vocabulary else []


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
    call = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    names = " and ".join(found)
    return f"{folder} has only {names}; transformers writes a tokenizer.json with {call}"


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


def main():
    if not 2 <= len(sys.argv) <= 3:
        terminal.refuse('usage: python -m run.tokenizer "some text" [bytes | gpt2 | FILE]')
    text, name = (*sys.argv[1:], "bytes")[:2]
    try:
        tokenizer = make_tokenizer(name)
        ids = [int(i) for i in tokenizer.encode(text)]
    except (TokenizerError, UnicodeEncodeError) as e:
        terminal.refuse(f"tokenizer.py: {e}")
    print(f"{len(text.encode())} bytes, {len(ids)} tokens of {tokenizer.vocab_size}: {ids}")
    print(tokenizer.decode(ids))


if __name__ == "__main__":
    terminal.run(main)
