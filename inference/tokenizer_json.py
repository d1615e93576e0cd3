r"""Any tokenizer as the files that transformers' AutoTokenizer loads.

The built-in tokenizers get a tokenizer.json here: byte-pair encoding (arXiv 1508.07909), a
vocabulary and an ordered list of merges. Its tokens are text, and a byte is not always a character.
So GPT-2 writes each byte as a character of its own (Radford et al. 2019, section 2.2): a printable
byte as itself, the others as the characters from 256 on:

    text           "é\n"
    bytes          c3    a9    0a
    characters     Ã     ©     Ċ

    bytes          257 ids, no merges: every byte stays a token
    gpt2           50,257 ids; the merges come from the ranks of tiktoken (`merges_of`)

tokenizer_config.json names the end token, and the class PreTrainedTokenizerFast, which takes
tokenizer.json as it is: AutoTokenizer's choice for a Llama would split a text in its own way.

    python -m inference.tokenizer_json bytes > tokenizer.json

One text has other ids than here: `<|endoftext|>` becomes its one id there, as chat templates
expect, and plain bytes here.
"""

import itertools
import json
import sys

from base import json_files, terminal
from inference.token_bytes import CHARACTERS
from run.tokenizer import TokenizerError, make_tokenizer

END_OF_TEXT = "<|endoftext|>"


def files_of(tokenizer) -> dict[str, bytes]:
    """Name -> content, for a folder of a Hugging Face model. Raises TokenizerError."""
    files = dict(tokenizer.files)
    end, begin = END_OF_TEXT, None
    if "tokenizer.json" in files:
        end, begin = tokenizer.token_of(tokenizer.eot), tokenizer.token_of(tokenizer.bos)
    else:
        files["tokenizer.json"] = tokenizer_json(tokenizer).encode()
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


def add_special_tokens(
    files: dict[str, bytes], names: dict[int, str], fields: dict[str, int], vocab_size: int
) -> dict[str, bytes]:
    """The files of a tokenizer, with the tokens that a model has behind the tokenizer's own.

    names: id -> token. fields: of tokenizer_config.json -> id; cls_token or else bos_token begins a
    text, and sep_token or else eos_token ends it. vocab_size: of the model. Raises
    TokenizerError."""
    # A model without room for them was not trained with them.
    if not fields or max(names, default=0) >= vocab_size:
        return files
    from tokenizers import Tokenizer, processors

    library = Tokenizer.from_str(files["tokenizer.json"].decode())
    new = [i for i in sorted(names) if library.id_to_token(i) is None]
    if not new and library.post_processor:
        return files
    library.add_special_tokens([names[i] for i in new])
    if [library.token_to_id(names[i]) for i in new] != new:
        raise TokenizerError("its ids have gaps, so special tokens cannot have those of the model")
    tokens = {field: library.id_to_token(i) for field, i in fields.items()}
    first = tokens.get("cls_token", tokens.get("bos_token"))
    last = tokens.get("sep_token", tokens.get("eos_token"))
    single = [first, "$A", last] if first else ["$A", last]
    around = [(token, library.token_to_id(token)) for token in (first, last) if token]
    library.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1", f"{last}:1"], special_tokens=around
    )
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    config = json_files.parse(files["tokenizer_config.json"], dict) | tokens
    config["model_input_names"] = inputs if "cls_token" in tokens else inputs[::2]
    # It would have to name the new ones too.
    config.pop("added_tokens_decoder", None)
    content = library.to_str(pretty=True).encode()
    return files | {"tokenizer.json": content, "tokenizer_config.json": as_bytes(config)}


def as_bytes(content: dict) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode()


def tokenizer_json(tokenizer) -> str:
    """The content of tokenizer.json, of a built-in tokenizer. Raises TokenizerError."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    ranks = {bytes([byte]): byte for byte in range(256)}
    if tokenizer.name != "bytes":
        ranks = tokenizer.encoding._mergeable_ranks
    vocabulary = {characters(token): rank for token, rank in ranks.items()}
    merges = [(characters(a), characters(b)) for a, b in merges_of(ranks)]
    library = Tokenizer(models.BPE(vocabulary, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    # Its id is the next one: the end of text.
    library.add_special_tokens([END_OF_TEXT])
    return library.to_str(pretty=True)


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The two tokens that each longer token is made of, in the order of the ranks. Raises
    TokenizerError."""
    merges = []
    for token in sorted(ranks, key=ranks.get):
        if len(token) == 1:
            continue
        parts = [bytes([byte]) for byte in token]
        # What encoding does until only the last merge is left.
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


def main():
    if len(sys.argv) != 2:
        terminal.refuse("usage: python -m inference.tokenizer_json bytes | gpt2 | FILE")
    files = files_of(make_tokenizer(sys.argv[1]))
    print(files["tokenizer.json"].decode())


if __name__ == "__main__":
    terminal.run(main)
