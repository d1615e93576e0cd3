"""The fields of tokenizer_config.json that change the ids of a text.

The tokenizers library reads tokenizer.json alone. transformers then applies these fields:

    added_tokens_decoder        {id: token}: tokens that are one id wherever they stand in a text,
                                and whether the spaces beside them belong to them
    eos_token, unk_token, ..    a token that becomes one of these
    extra_special_tokens        more of them; additional_special_tokens in older files
    add_prefix_space            whether "hello" has the ids of " hello"
    split_special_tokens        whether the text of such a token is split as any other text

`obey` does the same to the library's object, or refuses a field that it cannot apply in the same
way. In nearly all published folders tokenizer.json says the same, and nothing changes.
(AutoTokenizer would build some tokenizers anew from their vocabulary: Llama 2's then splits a text
in another way than its tokenizer.json.)"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from base import json_files
from base.json_files import JSONError

# With one of these transformers splits a text in another way than tokenizer.json says, or reads
# another file.
REFUSED = ("split_special_tokens", "fix_mistral_regex", "fast_tokenizer_files")
SAVE = (
    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers writes it there"
)
# Some classes of transformers obey them, and others do not.
FLAGS = ("single_word", "lstrip", "rstrip")
Number = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]


@dataclass
class Added:
    """A token in tokenizer_config.json. None: the library decides, by whether it is special."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False


def obey(library, config: dict, folder: Path) -> dict[int, dict]:
    """Apply the fields to a tokenizer of the library. Returns the added tokens that are new or
    changed. Raises JSONError."""
    where = f"{folder}/tokenizer_config.json"
    for field in REFUSED:
        if config.get(field):
            raise JSONError(f"{where}: {field} is not supported; remove it")
    prefix = config.get("add_prefix_space")
    prefix = json_files.convert(prefix, bool | None, f"{where}: add_prefix_space")
    if prefix is not None and prefix != adds_space(library):
        rule = f"is {str(prefix).lower()}, and tokenizer.json does the opposite; make them equal"
        raise JSONError(f"{where}: add_prefix_space {rule}")
    before = added_tokens(library)
    specials = list(special_tokens(config, where))
    named = {token.content for field, token in specials if is_name(field)}
    if "added_tokens_decoder" in config:
        add_numbered(library, config["added_tokens_decoder"], named, where)
    known = {token["content"] for token in added_tokens(library).values()}
    check_older_file(config, known, folder / "added_tokens.json")
    for field, token in specials:
        # Older files have an empty name for none.
        if not token.content or token.content in known:
            continue
        if library.token_to_id(token.content) is None:
            rule = f"has {token.content!r}, not in tokenizer.json; {SAVE}"
            raise JSONError(f"{where}: {field} {rule}")
        library.add_tokens([as_added(token)])
        known.add(token.content)
    after = added_tokens(library)
    return {number: token for number, token in after.items() if token != before.get(number)}


def add_numbered(library, decoder, named: set[str], where: str) -> None:
    """Add the tokens of added_tokens_decoder, by their ids. named: those named by other fields."""
    where = f"{where}: added_tokens_decoder"
    numbered = json_files.convert(decoder or {}, dict[Number, Added], where)
    present = {token["content"]: token for token in added_tokens(library).values()}
    tokens = {int(number): numbered[number] for number in sorted(numbered, key=int)}
    for token in tokens.values():
        token.special |= token.content in named
        there = present.get(token.content, {})
        flags = {flag for flag in FLAGS if getattr(token, flag) != there.get(flag, False)}
        # The library makes a token special, and no special token an ordinary one.
        if there.get("special") and not token.special:
            flags.add("special")
        if flags:
            rule = f"has another {' and '.join(sorted(flags))} than in tokenizer.json"
            raise JSONError(f"{where}: {token.content!r} {rule}; make them equal")
    for content in present.keys() - {token.content for token in tokens.values()}:
        rule = f"lacks {content!r} of tokenizer.json; add it, or remove the field"
        raise JSONError(f"{where}: {rule}")
    library.add_tokens([as_added(token) for token in tokens.values()])
    for number, token in tokens.items():
        actual = library.token_to_id(token.content)
        if actual != number:
            rule = f"has id {number}, and would get {actual}; make them equal"
            raise JSONError(f"{where}: {token.content!r} {rule}")


def special_tokens(config: dict, where: str) -> Iterator[tuple[str, Added]]:
    """Yield (field, token) for all fields with special tokens."""
    extra = "extra_special_tokens"
    if not config.get(extra):
        extra = "additional_special_tokens"
    for field, value in config.items():
        values = []
        if is_name(field) and isinstance(value, str | dict):
            values = [value]
        elif field in (extra, "model_specific_special_tokens") and value:
            values = list(value.values()) if isinstance(value, dict) else value
        for token in json_files.convert(values, list[str | Added], f"{where}: {field}"):
            if isinstance(token, str):
                token = Added(token, special=True)
            token.special |= is_name(field) or isinstance(value, dict)
            yield field, token


def is_name(field: str) -> bool:
    """Whether a field names a token: eos_token, or a model's own, as image_token."""
    return field.endswith("_token")


def as_added(token: Added):
    from tokenizers import AddedToken

    fields = {name: value for name, value in asdict(token).items() if value is not None}
    return AddedToken(**fields)


def added_tokens(library) -> dict[int, dict]:
    """Id -> fields of a token."""
    tokens = library.get_added_tokens_decoder()
    return {number: token.__getstate__() for number, token in tokens.items()}


def adds_space(library) -> bool:
    """Whether tokenizer.json puts a space before a text."""
    text = "a"
    if library.normalizer:
        text = library.normalizer.normalize_str(text)
    if library.pre_tokenizer:
        text = "".join(piece for piece, _ in library.pre_tokenizer.pre_tokenize_str(text))
    # As a byte-level vocabulary and SentencePiece write it.
    return text.startswith((" ", "Ġ", "▁"))


def check_older_file(config: dict, known: set[str], path: Path) -> None:
    """Check added_tokens.json, which counts without added_tokens_decoder. Raises JSONError."""
    if "added_tokens_decoder" in config or not path.is_file():
        return
    for token in json_files.read(path, dict[str, int]):
        if token not in known:
            raise JSONError(f"{path}: has {token!r}, which tokenizer.json does not add; {SAVE}")
