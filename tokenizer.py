"""Text to token ids and back: bytes, GPT-2's byte-pair encoding, or any file of the `tokenizers` library.

Each tokenizer has name, vocab_size, eot (the id that ends a document), fingerprint (in the key of the cached corpus), encode(text) -> ids
and decode(ids) -> text. Bytes need nothing and know every text, at the price of more tokens than GPT-2's 50,257 words and parts of
words make (Radford et al. 2019, section 2.2). Training a tokenizer is left to the library.

    python tokenizer.py "some text" [bytes | gpt2 | FILE]       its ids, and the text again
"""
import hashlib
import sys
from pathlib import Path

import numpy as np


class TokenizerError(ValueError):
    """The tokenizer cannot be used; the message says why, and what to do."""


class ByteTokenizer:
    """The 256 bytes of UTF-8, and an end-of-text token."""
    name, vocab_size, eot, fingerprint = "bytes", 257, 256, "bytes"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library. End of text is <|endoftext|>, </s> or <eos>, or one id more."""

    def __init__(self, path: str):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise TokenizerError(f"--tokenizer {path}: needs the package tokenizers (pip install tokenizers)") from None
        try:
            content = Path(path).read_bytes()
            self.tokenizer = Tokenizer.from_str(content.decode())
        except Exception as e:                                           # the library raises bare Exception
            raise TokenizerError(f"--tokenizer {path}: not bytes, gpt2, or a JSON file of the tokenizers library ({e})") from None
        self.name, self.fingerprint = path, hashlib.sha256(content).hexdigest()
        known = (self.tokenizer.token_to_id(token) for token in ("<|endoftext|>", "</s>", "<eos>"))
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.eot = next((i for i in known if i is not None), None)
        if self.eot is None:
            self.eot, self.vocab_size = self.vocab_size, self.vocab_size + 1

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids) -> str:
        return self.tokenizer.decode([i for i in ids if i != self.eot])


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding, through tiktoken."""
    name, fingerprint = "gpt2", "gpt2"

    def __init__(self):
        try:
            import tiktoken
            self.encoding = tiktoken.get_encoding("gpt2")
        except ImportError:
            raise TokenizerError("--tokenizer gpt2: needs the package tiktoken (pip install tiktoken); bytes needs nothing") from None
        except Exception as e:
            raise TokenizerError("--tokenizer gpt2: tiktoken could not fetch its vocabulary; connect once, or point TIKTOKEN_CACHE_DIR "
                            f"at a copy, or use --tokenizer bytes or a tokenizers JSON file ({type(e).__name__})") from None
        self.vocab_size, self.eot = self.encoding.n_vocab, self.encoding.eot_token

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, ids) -> str:
        return self.encoding.decode([i for i in ids if i < self.vocab_size and i != self.eot])


def make_tokenizer(name: str):
    """`bytes`, `gpt2`, or the path of a tokenizers JSON file. Raises TokenizerError."""
    return {"bytes": ByteTokenizer, "gpt2": GPT2Tokenizer}.get(name, lambda: FileTokenizer(name))()


def main():
    if not 2 <= len(sys.argv) <= 3:
        sys.exit('usage: python tokenizer.py "some text" [bytes | gpt2 | FILE]')
    try:
        tokenizer = make_tokenizer((sys.argv[2:] or ["bytes"])[0])
    except TokenizerError as e:
        sys.exit(f"tokenizer.py: {e}")
    ids = [int(i) for i in tokenizer.encode(sys.argv[1])]
    print(f"{len(sys.argv[1].encode())} bytes, {len(ids)} tokens of {tokenizer.vocab_size}: {ids}\n{tokenizer.decode(ids)}")


if __name__ == "__main__":
    main()
