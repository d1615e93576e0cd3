"""Text to token ids and back: bytes, GPT-2's byte-pair encoding, or a file of the `tokenizers`
library.

Each tokenizer has

    name, vocab_size
    fingerprint                      of the content: in the cached corpus's key, and in checkpoints
    encode(text) -> ids, decode(ids) -> text
    eot, stop_ids                    the id that ends a document; all ids at which generation stops
    bos                              the id that begins every text, or None: most models have none
    files                            {name: content} of what travels with a model

Bytes need nothing and know every text, at the price of more tokens than GPT-2's 50,257 words and
parts of words make (Radford et al. 2019, section 2.2). Training a tokenizer is left to the library.

Which ids begin and end a text is not in a tokenizer.json. Hugging Face writes it into files beside
it: eos_token_id (one, or a list) and bos_token_id in generation_config.json and config.json;
eos_token, bos_token and add_bos_token in tokenizer_config.json. `FileTokenizer` reads them.

    python -m corpus.tokenizer "some text" [bytes | gpt2 | FILE]       its ids, and the text again
"""

import contextlib
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from runtime import json_files, terminal

# End-of-text tokens by the names that published models give them, for a file that stands alone.
ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>")
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
# All files of a tokenizer that a checkpoint takes along.
TRAVELS = ("tokenizer.json", *BESIDE)
# Encoded once to see that there is a token for what no vocabulary has.
PROBE = "a é \u4e2d \U0001f600\u0378"


class TokenizerError(ValueError):
    """The tokenizer cannot be used; the message says why, and what to do."""


class ByteTokenizer:
    """The 256 bytes of UTF-8, and an end-of-text token."""

    name = "bytes"
    vocab_size = 257
    eot = 256
    fingerprint = "bytes"
    bos = None
    stop_ids = (256,)
    files = {}

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, with what the files beside it say about begin and end of a text.

    Without such files the end of text is the first of ENDS that the vocabulary has, or one id more.
    """

    def __init__(self, path: str):
        """Raises TokenizerError."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise TokenizerError(
                f"--tokenizer {path}: needs the package tokenizers (pip install tokenizers)"
            ) from None
        self.name = path
        with without_reports():
            try:
                content = json_files.read_bytes(path)
                declared = json_files.parse(content, dict, path)
                with library_errors():
                    self.tokenizer = Tokenizer.from_str(content.decode())
            except (OSError, ValueError) as e:
                why = getattr(e, "strerror", None) or str(e).removeprefix(f"{path}: ")
                raise TokenizerError(
                    f"--tokenizer {path}: not bytes, gpt2, or a JSON file of the "
                    f"tokenizers library ({why})"
                ) from None
            # What a file says about truncation and padding is for classifiers.
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            self.vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
            self.check(declared)
            self.vocab_size = max(self.vocabulary.values()) + 1
            self.files = {"tokenizer.json": content}
            try:
                self.read_beside(Path(path))
            except (OSError, ValueError) as e:
                raise TokenizerError(str(e)) from None
        documents = content + f"{self.bos} {self.eot}".encode()
        self.fingerprint = hashlib.sha256(documents).hexdigest()

    def check(self, declared: dict) -> None:
        """declared: the file's content. Raises TokenizerError for what cannot encode every text."""

        def refuse(why: str):
            raise TokenizerError(f"--tokenizer {self.name}: {why}")

        if not self.vocabulary:
            refuse("its vocabulary is empty")
        for added in declared.get("added_tokens") or []:
            token = added["content"]
            number = added["id"]
            if self.vocabulary.get(token, number) != number:
                refuse(
                    f"its added token {token!r} has id {number}, and the library gives it "
                    f"{self.vocabulary[token]}: an id is missing, or two tokens share one"
                )
        known = len(self.vocabulary)
        largest = max(self.vocabulary.values())
        if 2 * known <= largest:
            refuse(
                f"its ids go up to {largest}, and it has {known} tokens: more than half of the "
                "ids would be unused; number them from 0"
            )
        if getattr(self.tokenizer.model, "dropout", None):
            refuse(
                'its model has dropout, so that no text has the same ids twice; "dropout": null '
                "would fit"
            )
        try:
            self.encode(PROBE)
        except TokenizerError as e:
            refuse(f"{e}; an unk_token that its vocabulary has would fit")

    def read_beside(self, path: Path) -> None:
        """Set bos, eot and stop_ids, and add to `files`. Raises JSONError or OSError."""
        folder = path.parent
        found = dict.fromkeys(BESIDE, {})
        more = {}
        # Files beside any other name are not about this tokenizer.
        if path.name == "tokenizer.json":
            for name in BESIDE:
                if (folder / name).is_file():
                    self.files[name] = json_files.read_bytes(folder / name)
                    found[name] = json_files.parse(self.files[name], dict, str(folder / name))
            more = model_ids(folder)
        names = found["special_tokens_map.json"] | found["tokenizer_config.json"]
        generation = found["generation_config.json"]
        # A checkpoint has no config.json: what that says goes into generation_config.json.
        if more := {k: v for k, v in more.items() if generation.get(k) is None}:
            generation = generation | more
            self.files["generation_config.json"] = json.dumps(generation, indent=1).encode()
        every_id = set(self.vocabulary.values())

        def ids(field: str) -> list[int]:
            kind = int | list[int] | None
            where = f"{folder}/generation_config.json: {field}"
            value = json_files.convert(generation.get(field), kind, where)
            value = [value] if isinstance(value, int) else value or []
            return [i for i in value if i in every_id]

        def named(field: str) -> list[int]:
            where = f"{folder}/tokenizer_config.json: {field}"
            value = names.get(field)
            value = value.get("content") if isinstance(value, dict) else value
            value = json_files.convert(value, str | None, where)
            return [self.vocabulary[value]] if value in self.vocabulary else []

        # The first ends documents; a model's list has more at which generation stops.
        ends = named("eos_token") + ids("eos_token_id")
        ends = ends or [self.vocabulary[token] for token in ENDS if token in self.vocabulary]
        if not ends:
            ends = [self.vocab_size]
            self.vocab_size = self.vocab_size + 1
        self.eot = ends[0]
        self.stop_ids = tuple(dict.fromkeys(ends))
        self.declared_bos = next(iter(named("bos_token") + ids("bos_token_id")), None)
        where = f"{folder}/tokenizer_config.json: add_bos_token"
        adds = json_files.convert(names.get("add_bos_token"), bool | None, where)
        self.bos = self.put_first() if adds is None else self.declared_bos if adds else None

    def put_first(self) -> int | None:
        """The id that the file's post-processor puts before a text, if it does."""
        with library_errors():
            plain = self.tokenizer.encode("a", add_special_tokens=False).ids
            whole = self.tokenizer.encode("a", add_special_tokens=True).ids
        begins = whole[: len(plain)] != plain and whole[1 : len(plain) + 1] == plain
        return whole[0] if begins else None

    def special_ids(self) -> dict[str, int | list[int]]:
        """bos_token_id and eos_token_id, as config.json has them."""
        begins = [i for i in (self.declared_bos, self.bos, self.eot) if i is not None]
        ends = list(self.stop_ids)
        return {"bos_token_id": begins[0], "eos_token_id": ends if len(ends) > 1 else ends[0]}

    def encode(self, text: str) -> list[int]:
        """Raises UnicodeEncodeError for half of a surrogate pair; TokenizerError."""
        try:
            with library_errors():
                return self.tokenizer.encode(text, add_special_tokens=False).ids
        except ValueError as e:
            # Half of a surrogate pair has an error of its own.
            text.encode()
            raise TokenizerError(str(e)) from None

    def decode(self, ids) -> str:
        return self.tokenizer.decode([i for i in ids if i != self.bos and i not in self.stop_ids])

    def save(self, folder: Path) -> None:
        """Write `files` into a folder, each whole or not at all; another tokenizer's are
        removed."""
        for name in TRAVELS:
            target = folder / name
            if name not in self.files:
                target.unlink(missing_ok=True)
            elif not target.is_file() or target.read_bytes() != self.files[name]:
                building = target.with_name(f".{name}.saving")
                building.write_bytes(self.files[name])
                os.replace(building, target)


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding, through tiktoken."""

    name = "gpt2"
    fingerprint = "gpt2"
    bos = None
    files = {}

    def __init__(self):
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
    return BUILT_IN.get(name, lambda: FileTokenizer(name))()


def prompt_ids(tokenizer, text: str) -> list[int]:
    """The ids of a text that a model is to continue; of an empty one, those that begin a new
    text."""
    ids = [int(i) for i in tokenizer.encode(text)]
    if tokenizer.bos is not None:
        return [tokenizer.bos, *ids]
    return ids or [i for i in (tokenizer.eot,) if i is not None]


@dataclass
class TokenizerRecord:
    """What a checkpoint remembers of the tokenizer; empty in one that is older."""

    fingerprint: str = ""
    # Name -> SHA-256.
    files: dict[str, str] = field(default_factory=dict)


def record(tokenizer) -> TokenizerRecord:
    hashes = {
        name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files.items()
    }
    return TokenizerRecord(tokenizer.fingerprint, hashes)


def model_ids(folder: Path) -> dict:
    """The begin and end ids in a Hugging Face folder's config.json. (That of a run has none.)
    Raises JSONError."""
    if not (folder / "config.json").is_file() or (folder / "checkpoints").is_dir():
        return {}
    config = json_files.read(folder / "config.json", dict)
    return {k: config[k] for k in ("bos_token_id", "eos_token_id") if config.get(k) is not None}


@contextlib.contextmanager
def library_errors():
    """Errors of the tokenizers library, bare Exceptions or a panic's BaseException, as
    ValueError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        raise ValueError(" ".join(str(e).split()) or type(e).__name__) from None


@contextlib.contextmanager
def without_reports():
    """A panic of the library writes a report to the process's standard error: for so long, none."""
    with contextlib.ExitStack() as stack:
        # Where standard error is closed, there is nothing to keep quiet.
        with contextlib.suppress(OSError):
            copy = os.dup(2)
            stack.callback(os.close, copy)
            stack.callback(os.dup2, copy, 2)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
        yield


def main():
    if not 2 <= len(sys.argv) <= 3:
        terminal.refuse('usage: python -m corpus.tokenizer "some text" [bytes | gpt2 | FILE]')
    try:
        tokenizer = make_tokenizer((sys.argv[2:] or ["bytes"])[0])
        ids = [int(i) for i in tokenizer.encode(sys.argv[1])]
    except (TokenizerError, UnicodeEncodeError) as e:
        print(f"tokenizer.py: {e}", file=sys.stderr)
        sys.exit(2)
    print(
        f"{len(sys.argv[1].encode())} bytes, {len(ids)} tokens of {tokenizer.vocab_size}:"
        f" {ids}\n{tokenizer.decode(ids)}"
    )


if __name__ == "__main__":
    terminal.run(main)
