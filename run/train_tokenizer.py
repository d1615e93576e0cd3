"""A tokenizer trained from text: byte-level byte-pair encoding, by the library tokenizers.

A text is cut into words, and these into bytes. The two neighbours that stand together most often
become one token, again and again, until there are N tokens (arXiv 1508.07909; on bytes as in GPT-2,
Radford et al. 2019, section 2.2). All 256 bytes are tokens, so every text has ids and comes back
exactly, but for <|endoftext|>, which ends documents. The same texts give the same file.

    python -m run.train_tokenizer --data texts/ --vocab-size 8192 --out own
    python train.py --data texts/ --tokenizer own/tokenizer.json --out runs/own

Not covered: other models of a text (unigram, WordPiece), a sample of large data.
"""

import argparse
from pathlib import Path

import tokenizers

from base import terminal
from base.errors import cause
from run.documents import DataError, find_files, read_documents
from run.tokenizer import EOT_NAMES


def main(argv: list[str]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--data", nargs="+", required=True, metavar="PATH", help="as of train.py")
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="default 8192")
    parser.add_argument("--out", required=True, metavar="DIR", help="gets tokenizer.json")
    args = parser.parse_args(argv)
    file = Path(args.out) / "tokenizer.json"
    if not 257 <= args.vocab_size < 2**31:
        rule = f"must be at least 257, the bytes and {EOT_NAMES[0]}, and below 2^31"
        raise DataError(f"--vocab-size {args.vocab_size}: {rule}")
    if file.exists():
        raise DataError(
            f"--out {args.out}: has a tokenizer.json; remove it, or name another folder"
        )
    texts = (text for path in find_files(args.data) for text in read_documents(path, 0, None))
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        initial_alphabet=byte_level.alphabet(),
        special_tokens=[EOT_NAMES[0]],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    except OSError as e:
        raise DataError(f"--out {args.out}: cannot be written ({cause(e)})") from None
    terminal.say(f"{file}: {tokenizer.get_vocab_size():,} tokens")


if __name__ == "__main__":
    terminal.command(main)
