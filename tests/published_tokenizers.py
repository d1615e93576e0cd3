r"""Tokenizers in the shapes of published models, trained here in a moment.

    write("llama3", folder)      tokenizer.json and the files beside it, as the model's authors have
                                 them: tokenizer_config.json, generation_config.json, ..

What differs from kind to kind: bytes or characters with byte fallback, how a text is split, what
becomes of its spaces, whether a begin token stands before it, how many tokens end it, and where the
chat template is.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split
from tokenizers.trainers import BpeTrainer, UnigramTrainer

TEXT = [
    "def add(a, b):\n    return a + b\n",
    "The quick brown fox jumps over the lazy dog. It's 2 o'clock, isn't it?\n\n",
    "Größe, naïve café, 你好世界, привет мир, 1234567890\n",
    "user assistant system hello hello world\n",
] * 4
# Texts that a tokenizer may treat in a way of its own. {end} is the tokenizer's end token.
TEXTS = (
    "",
    " ",
    "a",
    "hello world",
    " hello world",
    "hello  world ",
    "   three",
    "\n",
    "\n\n\ta\r\n b",
    "def add(a, b):\n    return a + b\n",
    "It's 2024, isn't it? WE'LL see.",
    "1234567 12 3",
    "  1234",
    "Größe naïve",
    # a letter and an accent, as two characters
    "cafe\u0301",
    "你好，世界",
    "привет",
    "\U0001f600 \U0001f468\u200d\U0001f469",
    "a\u00a0b\u2003c\u200bd",
    "▁a ▁ Ġb",
    "x{end}y {end}\n",
    "\x00\x1f\u0378",
)
CHAT = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}\
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA_CHAT = """\
{{- bos_token }}{%- for m in messages %}\
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}\
{%- endfor %}{%- if add_generation_prompt %}\
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
INST_CHAT = """\
{{ bos_token }}{% for m in messages %}\
{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}\
{{ m.content + eos_token }}{% endif %}{% endfor %}"""
# GPT-4's way to split a text, which Llama 3 has; Qwen 2 takes digits one by one
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM_SPLIT = r" ?[^(\s|[.,!?…。，、।۔،])]+"


class Kind(NamedTuple):
    """How one family's tokenizer is made, and what stands beside it."""

    make: Callable[[list[str]], Tokenizer]
    # in the order of their ids: before the vocabulary of characters, behind that of bytes
    specials: list[str]
    # of tokenizer_config.json
    config: dict
    # of generation_config.json; names of tokens instead of ids
    generation: dict | None = None
    # its class in transformers, for config.json
    model_type: str = "llama"


def split_by(pattern: str, digits: str = "") -> Split:
    """digits: how many of them are one piece."""
    return Split(Regex(pattern.replace("DIGITS", digits)), behavior="isolated")


def byte_level(
    specials: list[str],
    split=(),
    begin: str | None = None,
    normalizer=None,
    words: bool = False,
    **model,
) -> Tokenizer:
    """Byte pairs. split: pre-tokenizers before the one that turns bytes into characters; words:
    whether that one splits as GPT-2's does."""
    tokenizer = Tokenizer(BPE(**model))
    if normalizer:
        tokenizer.normalizer = normalizer
    last = ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, last]) if split else last
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if begin:
        tokenizer.post_processor = processors.Sequence(
            [tokenizer.post_processor, begin_with(tokenizer, begin)]
        )
    return tokenizer


def begin_with(tokenizer: Tokenizer, token: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token}:1 $B:1",
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )


def sentence_piece(specials: list[str], begin: str, prefix: bool) -> Tokenizer:
    """Byte pairs of characters, where ▁ is a space, and bytes for characters that are unknown.
    prefix: whether a text gets a space before it, as Llama 2's does."""
    trained = Tokenizer(BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = Split("▁", behavior="merged_with_next")
    trainer = BpeTrainer(vocab_size=120, show_progress=False, limit_alphabet=60)
    trained.train_from_iterator(TEXT, trainer)
    learned = json.loads(trained.to_str())["model"]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(
        BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = spaces
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.pre_tokenizer = Split(" ", behavior="merged_with_previous")
    return completed(tokenizer, parts, specials, begin)


def completed(tokenizer: Tokenizer, parts: list, specials: list[str], begin: str) -> Tokenizer:
    """parts: of the decoder."""
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in specials])
    tokenizer.post_processor = begin_with(tokenizer, begin)
    return tokenizer


def unigram(specials: list[str], begin: str) -> Tokenizer:
    """Pieces with probabilities, bytes for the rest."""
    trained = Tokenizer(Unigram())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = UnigramTrainer(vocab_size=100, show_progress=False, unk_token="<unk>")
    trained.train_from_iterator(TEXT, trainer)
    pieces = [tuple(piece) for piece in json.loads(trained.to_str())["model"]["vocab"]]
    taken = [(name, 0.0) for name in specials]
    taken += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    taken += [piece for piece in pieces if piece[0] not in specials]
    tokenizer = Tokenizer(Unigram(taken, specials.index("<unk>"), byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return completed(tokenizer, parts, specials, begin)


def gpt2(specials):
    return byte_level(specials, words=True)


def config_of(tokenizer_class: str, bos=None, eos=None, pad=None, unk=None, **more) -> dict:
    """Fields of tokenizer_config.json."""
    tokens = dict(bos_token=bos, eos_token=eos, pad_token=pad, unk_token=unk)
    return {"tokenizer_class": tokenizer_class} | tokens | more


def ids(bos=None, eos=None, pad=None, **more) -> dict:
    """Fields of generation_config.json. A token is its name."""
    return dict(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad) | more


def added(token: str) -> dict:
    return {"__type": "AddedToken", "content": token, "normalized": False}


END = "<|endoftext|>"
TURNS = ["<|im_start|>", "<|im_end|>"]
LLAMA_3 = "<|begin_of_text|> <|end_of_text|> <|eom_id|> <|start_header_id|> <|end_header_id|>"
GEMMA = dict(bos="<bos>", eos="<eos>", pad="<pad>", unk="<unk>")
INSTRUCTIONS = [
    {"name": "default", "template": INST_CHAT},
    {"name": "tool_use", "template": "tools: " + INST_CHAT},
]
# what each is, with small vocabularies
KINDS = {
    "gpt2": Kind(
        gpt2,
        [END],
        config_of("GPT2Tokenizer", END, END, unk=END, model_max_length=1024),
        ids(END, END),
        "gpt2",
    ),
    "llama3": Kind(
        partial(
            byte_level,
            split=[split_by(SPLIT, "{1,3}")],
            begin="<|begin_of_text|>",
            ignore_merges=True,
        ),
        [*LLAMA_3.split(), "<|eot_id|>"],
        config_of(
            "PreTrainedTokenizerFast",
            "<|begin_of_text|>",
            "<|eot_id|>",
            model_input_names=["input_ids", "attention_mask"],
            clean_up_tokenization_spaces=True,
            chat_template=LLAMA_CHAT,
        ),
        ids(
            "<|begin_of_text|>",
            ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
            do_sample=True,
            temperature=0.6,
            top_p=0.9,
        ),
    ),
    "qwen": Kind(
        partial(byte_level, split=[split_by(SPLIT)], normalizer=normalizers.NFC()),
        [END, *TURNS],
        config_of(
            "Qwen2Tokenizer",
            None,
            "<|im_end|>",
            END,
            add_bos_token=False,
            additional_special_tokens=TURNS,
            errors="replace",
            chat_template=CHAT,
        ),
        ids(
            END,
            ["<|im_end|>", END],
            END,
            do_sample=True,
            temperature=0.7,
            top_p=0.8,
            top_k=20,
            repetition_penalty=1.05,
        ),
        "qwen2",
    ),
    "smollm": Kind(
        partial(byte_level, split=[Digits(individual_digits=True)], words=True),
        [END, *TURNS],
        config_of(
            "GPT2Tokenizer",
            *TURNS,
            "<|im_end|>",
            END,
            additional_special_tokens=TURNS,
            chat_template=CHAT,
        ),
        ids(*TURNS, "<|im_end|>", max_new_tokens=40),
    ),
    "llama2": Kind(
        partial(sentence_piece, begin="<s>", prefix=True),
        ["<unk>", "<s>", "</s>"],
        config_of(
            "LlamaTokenizer",
            added("<s>"),
            added("</s>"),
            None,
            added("<unk>"),
            add_bos_token=True,
            add_eos_token=False,
            legacy=False,
            chat_template=INST_CHAT,
        ),
        ids("<s>", "</s>", "<unk>", do_sample=True, temperature=0.6, top_p=0.9, max_length=4096),
    ),
    "mistral": Kind(
        partial(sentence_piece, begin="<s>", prefix=True),
        ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        config_of("LlamaTokenizer", "<s>", "</s>", None, "<unk>", chat_template=INSTRUCTIONS),
        ids("<s>", "</s>"),
        "mistral",
    ),
    "gemma": Kind(
        partial(sentence_piece, begin="<bos>", prefix=False),
        ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
        config_of(
            "GemmaTokenizer",
            **GEMMA,
            add_bos_token=True,
            additional_special_tokens=["<start_of_turn>", "<end_of_turn>"],
        ),
        ids("<bos>", ["<eos>", "<end_of_turn>"], "<pad>"),
        "gemma",
    ),
    "unigram": Kind(
        partial(unigram, begin="<bos>"),
        ["<pad>", "<eos>", "<bos>", "<unk>"],
        config_of("PreTrainedTokenizerFast", **GEMMA),
    ),
    "bloom": Kind(
        partial(byte_level, split=[split_by(BLOOM_SPLIT)]),
        ["<unk>", "<s>", "</s>", "<pad>"],
        config_of("BloomTokenizerFast", "<s>", "</s>", "<pad>", "<unk>", padding_side="left"),
        None,
        "bloom",
    ),
}
# the newest models have their templates in files of their own
TEMPLATE_FILES = {"chat_template.jinja": CHAT, "additional_chat_templates/tools.jinja": "T" + CHAT}


def ends(name: str) -> list[str]:
    """The tokens at which a kind's model stops, in the order of their ids."""
    kind = KINDS[name]
    end = kind.config["eos_token"]
    found = {end["content"] if isinstance(end, dict) else end}
    listed = (kind.generation or {}).get("eos_token_id", [])
    found |= {listed} if isinstance(listed, str) else set(listed)
    return [token for token in kind.specials if token in found]


def ids_of(value, tokenizer: Tokenizer):
    """Names of tokens as their ids; other values as they are."""
    if isinstance(value, list):
        return [ids_of(each, tokenizer) for each in value]
    number = tokenizer.token_to_id(value) if isinstance(value, str) else None
    return value if number is None else number


def write(name: str, folder: Path) -> Tokenizer:
    """The files of a kind's tokenizer, into a folder."""
    kind = KINDS[name]
    tokenizer = kind.make(kind.specials)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    decoder = {}
    for number, token in tokenizer.get_added_tokens_decoder().items():
        fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        decoder[str(number)] = {field: getattr(token, field) for field in fields}
    config = {"added_tokens_decoder": decoder} | kind.config
    write_json(folder / "tokenizer_config.json", config)
    named = {key: value for key, value in kind.config.items() if key.endswith("s_token")}
    write_json(folder / "special_tokens_map.json", named)
    if kind.generation is not None:
        settings = {key: ids_of(value, tokenizer) for key, value in kind.generation.items()}
        write_json(folder / "generation_config.json", settings)
    if name == "smollm":
        (folder / "additional_chat_templates").mkdir()
        for file, text in TEMPLATE_FILES.items():
            (folder / file).write_text(text)
    return tokenizer


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False))
