r"""Any tokenizer as the files that transformers' AutoTokenizer loads.

The built-in tokenizers have no tokenizer.json; here they get one. Its model is byte-pair encoding
(arXiv 1508.07909): a vocabulary, and a list of merges, the first one first. A token there is text,
and a byte is not always a character. So GPT-2 writes each byte as a character of its own (Radford
et al. 2019, section 2.2; `bytes_to_unicode` in its code): a printable byte as itself, the others as
the characters from 256 on:

    text           "é\n"
    bytes          c3    a9    0a
    characters     Ã     ©     Ċ

    bytes          257 ids, no merges: every byte stays a token
    gpt2           50,257 ids; the merges come from the ranks of tiktoken (`merges_of`)

tokenizer_config.json names the end token. It also names the class PreTrainedTokenizerFast, which
takes tokenizer.json as it is. Without that name AutoTokenizer takes the class of the model's
family, and Llama's would split a text in its own way.

    python -m corpus.tokenizer_json bytes > tokenizer.json

One text has other ids than here: `<|endoftext|>`, which becomes its one id there, as transformers
and chat templates expect, and plain bytes here.
"""

import itertools
import json
import sys

from base import terminal
from corpus.tokenizer import TokenizerError, make_tokenizer

END_OF_TEXT = "<|endoftext|>"
# bytes that are printable characters of Latin-1: ! to ~, ¡ to ¬, ® to ÿ
PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}


def files_of(tokenizer) -> dict[str, bytes]:
    """Name -> content, for a folder of a Hugging Face model. Raises TokenizerError."""
    files = dict(tokenizer.files)
    if "tokenizer.json" not in files:
        files["tokenizer.json"] = as_bytes(tokenizer_json(tokenizer))
        end, begin = END_OF_TEXT, None
    else:
        end, begin = tokenizer.token_of(tokenizer.eot), tokenizer.token_of(tokenizer.bos)
    if "tokenizer_config.json" not in files:
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "bos_token": begin,
            "eos_token": end,
        }
        named = {key: value for key, value in config.items() if value is not None}
        files["tokenizer_config.json"] = as_bytes(named)
    return files


def as_bytes(content: dict) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode()


def tokenizer_json(tokenizer) -> dict:
    """The content of tokenizer.json, of a built-in tokenizer. Raises TokenizerError."""
    if tokenizer.name == "bytes":
        ranks = {bytes([byte]): byte for byte in range(256)}
    else:
        ranks = tokenizer.encoding._mergeable_ranks
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    end = {
        "id": tokenizer.eot,
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {characters(token): rank for token, rank in ranks.items()},
            "merges": [[characters(a), characters(b)] for a, b in merges_of(ranks)],
        },
    }


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The two tokens that each longer token is made of, in the order of the ranks. Raises
    TokenizerError."""
    merges = []
    for token in sorted(ranks, key=ranks.get):
        if len(token) == 1:
            continue
        parts = [bytes([byte]) for byte in token]
        # what encoding does until only the last merge is left
        while len(parts) > 2:
            rank_of = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
            first = min(rank_of)
            if first >= ranks[token]:
                raise TokenizerError(f"the token {token!r} is not made of two earlier ones")
            at = rank_of.index(first)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append((parts[0], parts[1]))
    return merges


def characters(token: bytes) -> str:
    """A token's bytes, each as the character that stands for it."""
    return "".join(CHARACTERS[byte] for byte in token)


def byte_characters() -> list[str]:
    """The character of each byte."""
    others = itertools.count(256)
    return [chr(byte) if byte in PRINTABLE else chr(next(others)) for byte in range(256)]


CHARACTERS = byte_characters()


def main():
    if len(sys.argv) != 2:
        terminal.refuse("usage: python -m corpus.tokenizer_json bytes | gpt2 | FILE")
    try:
        files = files_of(make_tokenizer(sys.argv[1]))
    except TokenizerError as e:
        terminal.refuse(f"tokenizer_json.py: {e}")
    print(files["tokenizer.json"].decode())


if __name__ == "__main__":
    terminal.run(main)
