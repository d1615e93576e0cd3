"""Text to token ids and back: bytes, GPT-2's byte-pair encoding, or a file of the `tokenizers`
library.

Each tokenizer has

    encode(text) -> ids, decode(ids) -> text
    name, vocab_size
    eot, stop_ids        the id that ends a document; all ids at which generation stops
    bos                  the id that begins every text; None for most models
    fingerprint          of its content: part of the cached corpus's key, and kept in checkpoints
    files                {name: content} of what is saved with a model, its chat template too

Bytes need nothing and can encode every text. The price is longer sequences than with the 50,257
words and parts of words of GPT-2 (Radford et al. 2019, section 2.2).

    python -m corpus.tokenizer "some text" [bytes | gpt2 | FILE]       its ids, and the text again

A tokenizer.json does not say which ids begin and end a text. Hugging Face writes that into files
beside it: token names (eos_token, bos_token) into tokenizer_config.json, ids (eos_token_id, one or
a list, and bos_token_id) into generation_config.json and config.json. Whether the begin token
stands before a text is in tokenizer.json itself, in its post-processor. add_bos_token says it too;
where it says something else, transformers 5 and this file ignore it.

Not covered: training a tokenizer. The tokenizers library does it.
"""

import contextlib
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from base import json_files, terminal

# The end-of-text tokens of published models, for a tokenizer file that stands alone.
EOT_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>")
# What stands beside a tokenizer.json and is about it.
COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
# How a conversation becomes text (tuning/chat_template.py); older models have it in
# tokenizer_config.json, and models of images in a JSON file.
CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATE_JSON = "chat_template.json"
# A folder of further templates: NAME.jinja.
MORE_TEMPLATES = "additional_chat_templates"
# The files of a tokenizer that a checkpoint takes along, with those in MORE_TEMPLATES.
TOKENIZER_FILES = ("tokenizer.json", *COMPANION_FILES, CHAT_TEMPLATE, CHAT_TEMPLATE_JSON)
# A tokenizer in other forms, which are not read here.
OTHER_FORMS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# Common and rare characters: encoded once, to see that the tokenizer can encode every text.
PROBE = "a é \u4e2d \U0001f600\u0378"


class TokenizerError(ValueError):
    """The tokenizer cannot be used; the message says why, and what to do."""


class ByteTokenizer:
    """The 256 bytes of UTF-8, and an end-of-text token."""

    name = "bytes"
    fingerprint = "bytes"
    vocab_size = 257
    eot = 256
    stop_ids = (256,)
    bos = None
    files: ClassVar[dict[str, bytes]] = {}

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class Companions:
    """What the files beside a tokenizer.json say about the begin and the end of a text."""

    def __init__(self, folder: Path, vocabulary: dict[str, int], names: tuple[str, ...]):
        """names: the files to read, where they exist. Raises JSONError or OSError."""
        self.folder = folder
        self.vocabulary = vocabulary
        # Name -> content.
        self.files = {}
        fields = {name: {} for name in COMPANION_FILES}
        for name in names:
            path = folder / name
            if path.is_file():
                self.files[name] = json_files.read_bytes(path)
                fields[name] = json_files.parse(self.files[name], dict, str(path))
        if names:
            self.read_templates()
        # tokenizer_config.json counts before special_tokens_map.json.
        self.with_names = fields["special_tokens_map.json"] | fields["tokenizer_config.json"]
        self.with_ids = fields["generation_config.json"]
        if names:
            self.add_ids(model_ids(folder))

    def read_templates(self) -> None:
        """Raises OSError."""
        names = [CHAT_TEMPLATE, CHAT_TEMPLATE_JSON, *more_templates(self.folder)]
        for name in names:
            if (self.folder / name).is_file():
                self.files[name] = json_files.read_bytes(self.folder / name)

    def add_ids(self, ids: dict) -> None:
        """ids: of config.json. A checkpoint has no such file, so those that generation_config.json
        lacks are written there."""
        added = {key: value for key, value in ids.items() if self.with_ids.get(key) is None}
        if added:
            self.with_ids = self.with_ids | added
            self.files["generation_config.json"] = json.dumps(self.with_ids, indent=1).encode()

    def ids(self, field: str) -> list[int]:
        """The ids in a field that holds one or several. Those beyond the vocabulary are left out.
        Raises JSONError."""
        where = f"{self.folder}/generation_config.json: {field}"
        value = json_files.convert(self.with_ids.get(field), int | list[int] | None, where)
        if value is None:
            return []
        values = [value] if isinstance(value, int) else value
        known = set(self.vocabulary.values())
        return [i for i in values if i in known]

    def token(self, field: str) -> str | None:
        """The text of the token that a field names. Raises JSONError."""
        where = f"{self.folder}/tokenizer_config.json: {field}"
        value = self.with_names.get(field)
        if isinstance(value, dict):
            value = value.get("content")
        return json_files.convert(value, str | None, where)

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
        if isinstance(value, list):
            named = json_files.convert(value, list[dict[str, str]], where)
            value = {each.get("name"): each.get("template") for each in named}.get("default")
        if value is None and CHAT_TEMPLATE_JSON in self.files:
            where = f"{self.folder}/{CHAT_TEMPLATE_JSON}"
            value = json_files.parse(self.files[CHAT_TEMPLATE_JSON], dict, where)
            value = value.get("chat_template")
        return json_files.convert(value, str | None, where)


class FileTokenizer:
    """A `tokenizer.json`, with what the files beside it say about begin and end of a text.

    Without such files the end of text is the first of EOT_NAMES that the vocabulary has, or else a
    new id behind the vocabulary's.
    """

    def __init__(self, path: str):
        """Raises TokenizerError."""
        self.name = path
        with without_reports():
            content, declared = self.load()
            # What a file says about truncation and padding is for classifiers.
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            self.vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
            self.check(declared)
            self.vocab_size = max(self.vocabulary.values()) + 1
            try:
                self.companions = self.read_companions()
                self.set_begin_and_end(self.companions)
            except (OSError, ValueError) as e:
                raise TokenizerError(str(e)) from None
        self.files = {"tokenizer.json": content} | self.companions.files
        # What every document begins and ends with is part of the content.
        identity = content + f"{self.bos} {self.eot}".encode()
        self.fingerprint = hashlib.sha256(identity).hexdigest()

    def load(self) -> tuple[bytes, dict]:
        """Set `tokenizer`. Returns the file's bytes, and the same parsed. Raises TokenizerError."""
        path = self.name
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise TokenizerError(
                f"--tokenizer {path}: needs the package tokenizers (pip install tokenizers)"
            ) from None
        try:
            content = json_files.read_bytes(path)
            declared = json_files.parse(content, dict, path)
            with library_errors():
                self.tokenizer = Tokenizer.from_str(content.decode())
        except (OSError, ValueError) as e:
            why = getattr(e, "strerror", None) or str(e).removeprefix(f"{path}: ")
            why = needs_conversion(path) or why
            raise TokenizerError(
                f"--tokenizer {path}: not bytes, gpt2, or a JSON file of the tokenizers library"
                f" ({why})"
            ) from None
        return content, declared

    def check(self, declared: dict) -> None:
        """declared: the file's content. Raises TokenizerError for a tokenizer that cannot encode
        every text, or not always alike."""

        def refuse(why: str):
            raise TokenizerError(f"--tokenizer {self.name}: {why}")

        if not self.vocabulary:
            refuse("its vocabulary is empty")
        for added in declared.get("added_tokens") or []:
            token = added["content"]
            number = added["id"]
            actual = self.vocabulary.get(token, number)
            if actual != number:
                refuse(
                    f"its added token {token!r} has id {number}, and the library gives it {actual}:"
                    " an id is missing, or two tokens share one"
                )
        count = len(self.vocabulary)
        largest = max(self.vocabulary.values())
        if 2 * count <= largest:
            refuse(
                f"its ids go up to {largest}, and it has {count} tokens: more than half of the ids"
                " would be unused; number them from 0"
            )
        if getattr(self.tokenizer.model, "dropout", None):
            refuse(
                'its model has dropout, so that no text has the same ids twice; "dropout": null'
                " would fit"
            )
        try:
            self.encode(PROBE)
        except TokenizerError as e:
            refuse(f"{e}; an unk_token that its vocabulary has would fit")

    def read_companions(self) -> Companions:
        path = Path(self.name)
        # Files beside any other name are not about this tokenizer.
        names = COMPANION_FILES if path.name == "tokenizer.json" else ()
        return Companions(path.parent, self.vocabulary, names)

    def set_begin_and_end(self, companions: Companions) -> None:
        """Set bos, eot and stop_ids. Raises JSONError."""
        stop_ids = companions.named("eos_token") + companions.ids("eos_token_id")
        if not stop_ids:
            stop_ids = [self.vocabulary[name] for name in EOT_NAMES if name in self.vocabulary]
        if not stop_ids:
            stop_ids = [self.vocab_size]
            self.vocab_size += 1
        # The first ends documents. A model's list has more, at which generation stops.
        self.eot = stop_ids[0]
        self.stop_ids = tuple(dict.fromkeys(stop_ids))
        declared = companions.named("bos_token") + companions.ids("bos_token_id")
        self.declared_bos = declared[0] if declared else None
        self.bos = self.post_processor_bos()

    def post_processor_bos(self) -> int | None:
        """The id that the file's post-processor puts before a text, if it does."""
        with library_errors():
            plain = self.tokenizer.encode("a", add_special_tokens=False).ids
            processed = self.tokenizer.encode("a", add_special_tokens=True).ids
        n = len(plain)
        is_prefixed = processed[:n] != plain and processed[1 : n + 1] == plain
        return processed[0] if is_prefixed else None

    def encode(self, text: str) -> list[int]:
        """Raises UnicodeEncodeError for half of a surrogate pair; TokenizerError."""
        try:
            with library_errors():
                return self.tokenizer.encode(text, add_special_tokens=False).ids
        except ValueError as e:
            # Half of a surrogate pair raises an error of its own here.
            text.encode()
            raise TokenizerError(str(e)) from None

    def decode(self, ids) -> str:
        return self.tokenizer.decode([i for i in ids if i != self.bos and i not in self.stop_ids])

    def token_of(self, number: int | None) -> str | None:
        """The text of a token; None for one that the vocabulary does not have."""
        return None if number is None else self.tokenizer.id_to_token(number)

    def save(self, folder: Path) -> None:
        """Write `files` into a folder."""
        save_files(self.files, folder)


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding, through tiktoken."""

    name = "gpt2"
    fingerprint = "gpt2"
    bos = None
    files: ClassVar[dict[str, bytes]] = {}

    def __init__(self):
        """Raises TokenizerError."""
        try:
            import tiktoken

            self.encoding = tiktoken.get_encoding("gpt2")
        except ImportError:
            raise TokenizerError(
                "--tokenizer gpt2: needs the package tiktoken (pip install tiktoken); bytes needs"
                " nothing"
            ) from None
        except Exception as e:
            raise TokenizerError(
                "--tokenizer gpt2: tiktoken could not fetch its vocabulary; connect once, or point"
                " TIKTOKEN_CACHE_DIR at a copy, or use --tokenizer bytes or a tokenizers JSON file"
                f" ({type(e).__name__})"
            ) from None
        self.vocab_size = self.encoding.n_vocab
        self.eot = self.encoding.eot_token
        self.stop_ids = (self.eot,)

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, ids) -> str:
        return self.encoding.decode([i for i in ids if i < self.vocab_size and i != self.eot])


BUILT_IN = {"bytes": ByteTokenizer, "gpt2": GPT2Tokenizer}


def make_tokenizer(name: str):
    """`bytes`, `gpt2`, or the path of a tokenizers JSON file. Raises TokenizerError."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    return FileTokenizer(name)


def more_templates(folder: Path) -> list[str]:
    """The names of the files in MORE_TEMPLATES."""
    return sorted(
        f"{MORE_TEMPLATES}/{file.name}" for file in folder.glob(f"{MORE_TEMPLATES}/*.jinja")
    )


def needs_conversion(path: str) -> str:
    """What to do where a folder has its tokenizer only in another form than tokenizer.json; empty
    where it has none, or another file is meant."""
    folder = Path(path).parent
    found = [name for name in OTHER_FORMS if (folder / name).is_file()]
    if Path(path).name != "tokenizer.json" or Path(path).exists() or not found:
        return ""
    return (
        f"{folder} has only {' and '.join(found)}; transformers writes a tokenizer.json with"
        " AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def save_files(files: dict[str, bytes], folder: Path) -> None:
    """Write the files of a tokenizer into a folder, each completely or not at all. Files of another
    tokenizer are removed."""
    for name in {*TOKENIZER_FILES, *more_templates(folder)} - files.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        target = folder / name
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(exist_ok=True)
            building = target.with_name(f".{target.name}.saving")
            building.write_bytes(content)
            os.replace(building, target)


def prompt_ids(tokenizer, text: str) -> list[int]:
    """The ids of a text that a model is to continue. An empty text becomes the id after which a
    new text begins, if there is one."""
    ids = [int(i) for i in tokenizer.encode(text)]
    if tokenizer.bos is not None:
        return [tokenizer.bos, *ids]
    if not ids and tokenizer.eot is not None:
        return [tokenizer.eot]
    return ids


def special_ids(tokenizer) -> dict[str, int | list[int]]:
    """bos_token_id, eos_token_id and pad_token_id, as config.json has them. Where texts have no
    begin token, it is the end token, as GPT-2's."""
    begins = [getattr(tokenizer, "declared_bos", None), tokenizer.bos, tokenizer.eot]
    stop_ids = list(tokenizer.stop_ids)
    padding = {}
    if isinstance(tokenizer, FileTokenizer):
        if ids := tokenizer.companions.ids("pad_token_id"):
            padding = {"pad_token_id": ids[0]}
    return padding | {
        "bos_token_id": next(i for i in begins if i is not None),
        "eos_token_id": stop_ids if len(stop_ids) > 1 else stop_ids[0],
    }


def begin_id(tokenizer) -> int:
    """The id before a text of which every token is to be scored: the begin token that the files
    name, whether or not it stands before every text, or else the end of text. Raises
    TokenizerError."""
    named = []
    if isinstance(tokenizer, FileTokenizer):
        named = tokenizer.companions.named("bos_token")
    for token in (*named, tokenizer.bos, tokenizer.eot):
        if token is not None:
            return token
    raise TokenizerError("the model knows neither a begin nor an end token, and a text needs one")


@dataclass
class TokenizerRecord:
    """What a checkpoint remembers of the tokenizer; empty in older checkpoints."""

    fingerprint: str = ""
    # Name -> SHA-256.
    files: dict[str, str] = field(default_factory=dict)


def record(tokenizer) -> TokenizerRecord:
    hashes = {}
    for name, content in tokenizer.files.items():
        hashes[name] = hashlib.sha256(content).hexdigest()
    return TokenizerRecord(tokenizer.fingerprint, hashes)


def model_ids(folder: Path) -> dict:
    """The begin, end and padding ids in a Hugging Face folder's config.json. Raises JSONError."""
    # A run's folder has a config.json too, of another kind.
    is_run = (folder / "checkpoints").is_dir()
    if is_run or not (folder / "config.json").is_file():
        return {}
    config = json_files.read(folder / "config.json", dict)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config.get(key) is not None}


@contextlib.contextmanager
def library_errors():
    """Turns every error of the tokenizers library into a ValueError: it raises bare Exceptions,
    and BaseExceptions where its Rust code panics."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        raise ValueError(" ".join(str(e).split()) or type(e).__name__) from None


@contextlib.contextmanager
def without_reports():
    """Sends the process's standard error to /dev/null: a panic of the library writes a report
    there."""
    with contextlib.ExitStack() as stack:
        # A closed standard error needs nothing.
        with contextlib.suppress(OSError):
            copy = os.dup(2)
            stack.callback(os.close, copy)
            stack.callback(os.dup2, copy, 2)
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), 2)
        yield


def main():
    if not 2 <= len(sys.argv) <= 3:
        terminal.refuse('usage: python -m corpus.tokenizer "some text" [bytes | gpt2 | FILE]')
    text = sys.argv[1]
    name = sys.argv[2] if len(sys.argv) == 3 else "bytes"
    try:
        tokenizer = make_tokenizer(name)
        ids = [int(i) for i in tokenizer.encode(text)]
    except (TokenizerError, UnicodeEncodeError) as e:
        print(f"tokenizer.py: {e}", file=sys.stderr)
        sys.exit(2)
    print(f"{len(text.encode())} bytes, {len(ids)} tokens of {tokenizer.vocab_size}: {ids}")
    print(tokenizer.decode(ids))


if __name__ == "__main__":
    terminal.run(main)
