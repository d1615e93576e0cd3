r"""The bytes that a token adds to a text, which need not be whole characters.

    Größe                      Gr c3 b6 c3 9f e
    byte-level (GPT-2, Qwen)   Gr | c3 | b6 c3 | 9f e            a token may end inside a character
    byte fallback (Llama 2)    ▁Gr | <0xC3> | <0xB6> | ..        a byte may be a token of its own

A library decodes a list of tokens, so the text of one token depends on the others: half a character
is "\ufffd", and the first token of a text loses the space that ▁ stands for. Here text is decoded
from the bytes of all tokens, and after a prompt the space stays.

    python generate.py --checkpoint runs/default --prompt "def "

Not covered: decoders that look at two tokens at once, as those of BERT join "do" and "n't".
"""

import functools
import itertools
import re

# Bytes that are printable characters of Latin-1: ! to ~, ¡ to ¬, ® to ÿ.
PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
others = itertools.count(256)
# The character that stands for each byte in a byte-level vocabulary (inference/tokenizer_json.py).
CHARACTERS = [chr(byte) if byte in PRINTABLE else chr(next(others)) for byte in range(256)]
BYTE_OF = {character: byte for byte, character in enumerate(CHARACTERS)}


class TokenBytes:
    """The tokens of a tokenizer as bytes."""

    def __init__(self, tokenizer):
        """tokenizer: of run/tokenizer.py."""
        self.tokenizer = tokenizer
        # The tokens that are no text: its begin and end, and other special ones.
        self.special = {tokenizer.bos, *tokenizer.stop_ids}
        self.library = getattr(tokenizer, "tokenizer", None)
        if self.library:
            added = self.library.get_added_tokens_decoder()
            self.special |= {token for token, each in added.items() if each.special}
            self.decoder = str(self.library.decoder)
            self.letter = self.library.encode("a", add_special_tokens=False).ids
        self.known: dict[tuple[int, bool], bytes] = {}

    def show(self, names: dict[int, str]) -> None:
        """From now on these special tokens are text, by these names."""
        self.special -= names.keys()
        for token, name in names.items():
            self.known[token, True] = self.known[token, False] = name.encode()

    def text(self, ids: list[int]) -> bytes:
        """The bytes of a text from its beginning."""
        texts = [token for token in ids if token not in self.special]
        return b"".join(self.of(token, n == 0) for n, token in enumerate(texts))

    def of(self, token: int, begins: bool = False) -> bytes:
        """The bytes of a token; a special one has its name. begins: no text comes before."""
        if (token, begins) not in self.known:
            self.known[token, begins] = self.find(token, begins)
        return self.known[token, begins]

    def find(self, token: int, begins: bool) -> bytes:
        if not 0 <= token < self.tokenizer.vocab_size:
            return b""
        if self.library is None:
            return self.of_built_in(token)
        name = self.library.id_to_token(token) or ""
        if token in self.special:
            return name.encode()
        if "ByteLevel(" in self.decoder:
            is_mapped = all(character in BYTE_OF for character in name)
            return bytes(BYTE_OF[c] for c in name) if is_mapped else name.encode()
        if "ByteFallback(" in self.decoder and re.fullmatch("<0x[0-9A-Fa-f]{2}>", name):
            return bytes.fromhex(name[3:5])
        before = [] if begins else self.letter
        texts = [self.library.decode(ids, False) for ids in (before, [*before, token])]
        return texts[1][len(texts[0]) :].encode()

    def of_built_in(self, token: int) -> bytes:
        if self.tokenizer.name == "gpt2":
            return self.tokenizer.encoding.decode_single_token_bytes(token)
        return bytes([token]) if token < 256 else b""


token_bytes = functools.lru_cache(8)(TokenBytes)
