"""An answer as text: whole and piece by piece, up to stop strings, with the names and places of its
tokens. Oracles: what the tokenizer decodes, and the bytes of a text."""

import itertools
import random

import published_tokenizers
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from inference.answers import TextStream, text_of
from inference.requests import Output, Request
from inference.sampling import LogProb
from inference.token_bytes import token_bytes
from run.tokenizer import make_tokenizer

pytest.importorskip("aiohttp", reason="pyproject.toml names it")
from inference import api

KINDS = ["bytes", *published_tokenizers.KINDS]
LETTERS = "".join(published_tokenizers.TEXT[:4] + list(published_tokenizers.TEXTS))
LETTERS += "漢字かな交じり文 \U0001f3f3\ufe0f\u200d\U0001f308 e\u0301\u0302 \u0e01\u0e33"
# with these, any byte can be the last one
BYTE_LEVEL = ["bytes", "gpt2", "llama3", "qwen", "smollm", "bloom"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    found = {"bytes": make_tokenizer("bytes")}
    for kind in published_tokenizers.KINDS:
        published_tokenizers.write(kind, folder / kind)
        found[kind] = make_tokenizer(str(folder / kind / "tokenizer.json"))
    return found


def ids_of(tokenizer, text: str) -> list[int]:
    return [int(i) for i in tokenizer.encode(text)]


def some_text(g: random.Random, most: int = 20) -> str:
    at = g.randrange(len(LETTERS))
    return LETTERS[at : at + g.randint(1, most)]


def answered(tokenizer, prompt: list[int], ids: list[int], streams: bool, **fields) -> list[dict]:
    """What the server sends of a completion with these tokens."""
    fields = api.Completion(prompt="", stream=streams, **fields)
    choice = api.Choice(0, fields, Request(prompt, 99), tokenizer)
    of_prompt = [LogProb(token, -1.0, []) for token in prompt[1:]] if fields.echo else None
    sent = []
    for n, token in enumerate(ids, 1):
        finish = "length" if n == len(ids) else None
        choice.take(Output(0, token, finish, LogProb(token, -1.0, []), of_prompt))
        of_prompt = None
        if streams or n == len(ids):
            sent.append(choice.as_object())
    return sent


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_streamed_answer_is_the_whole_one(kind, tokenizers):
    """500 texts, cut after any token: complete characters, and then no half one is lost."""
    tokenizer = tokenizers[kind]
    g = random.Random(5)
    halves = 0
    for _ in range(500):
        ids = ids_of(tokenizer, some_text(g, 40))
        at = g.randrange(len(ids))
        prompt, ids = ids[:at], ids[at : g.randint(at, len(ids)) + 1]
        (whole,) = answered(tokenizer, prompt, ids, False)
        streamed = answered(tokenizer, prompt, ids, True)
        assert "".join(piece["text"] for piece in streamed) == whole["text"]
        text = token_bytes(tokenizer).text(prompt + ids).decode(errors="replace")
        assert TextStream(tokenizer, prompt).prompt + whole["text"] == text
        halves += text.endswith("\ufffd")
    assert halves > 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_what_the_tokenizer_decodes(kind, tokenizers):
    """After its prompt, and without one. Of byte-level tokens, any sequence."""
    tokenizer = tokenizers[kind]
    g = random.Random(6)
    for _ in range(400):
        ids = ids_of(tokenizer, some_text(g))
        if kind in BYTE_LEVEL and g.random() < 0.5:
            ids = [g.randrange(tokenizer.vocab_size) for _ in range(9)]
        prompt = ids_of(tokenizer, some_text(g))
        if tokenizer.decode(prompt).endswith("\ufffd"):
            continue
        before = tokenizer.decode(prompt)
        after = tokenizer.decode(prompt + ids)[len(before) :]
        assert text_of(tokenizer, prompt, ids) == after
        assert TextStream(tokenizer, prompt).prompt == before
        for alone in ([], [tokenizer.eot]):
            assert text_of(tokenizer, alone, ids) == tokenizer.decode(ids)


# --- stop strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings(kind, tokenizers):
    """Pieces are a beginning of the text up to the stop string at each token, and together they are
    it. The rule of generation sees the stop string in the token that completes it."""
    tokenizer = tokenizers[kind]
    g = random.Random(7)
    cut_off = 0
    for _ in range(60):
        prompt, *several = (ids_of(tokenizer, some_text(g)) for _ in range(6))
        ids = [*itertools.chain(*several)]
        whole = text_of(tokenizer, prompt, ids)
        at = g.randrange(len(whole))
        stop = whole[at : at + g.randint(1, 4)]
        stream = TextStream(tokenizer, prompt, [stop, "never"])
        expected = whole[: whole.index(stop)]
        cut_off += len(expected) > 1
        without_stop = TextStream(tokenizer, prompt)
        text = so_far = ""
        for n, token in enumerate(ids, 1):
            text += stream.push(token)
            assert expected.startswith(text)
            so_far += without_stop.push(token)
            found = stop in so_far
            if stream.stopped(ids[:n]):
                assert found
                break
            assert not found
        assert text + stream.end() == expected
        # what comes after it changes nothing
        assert text_of(tokenizer, prompt, ids, [stop, "never"]) == expected
    assert cut_off > 30


@pytest.mark.parametrize("kind", published_tokenizers.KINDS)
def test_a_special_token_is_a_stop_string(kind, tokenizers):
    """It is no text, but it is found, alone and between texts."""
    tokenizer = tokenizers[kind]
    name = published_tokenizers.KINDS[kind].specials[-1]
    special = tokenizer.vocabulary[name]
    prompt, before, after = (
        ids_of(tokenizer, text) for text in ("user", " one two", " three four")
    )
    ids = [*before, special, *after]
    one, two = (text_of(tokenizer, prompt, each) for each in (before, after))
    assert text_of(tokenizer, prompt, ids) == one + two
    for stop, expected, n in (
        (name, one, len(before) + 1),
        (one[-2:] + name, one[:-2], len(before) + 1),
        (one[-3:] + name + two[0], one[:-3], len(before) + 2),
        (two, one, len(ids)),
        (one[-3:] + two, one + two, None),
    ):
        stream = TextStream(tokenizer, prompt, [stop])
        ends = [n for n in range(1, len(ids) + 1) if stream.stopped(ids[:n])]
        assert text_of(tokenizer, prompt, ids, [stop]) == expected
        assert ends[:1] == ([] if n is None else [n]), stop


@pytest.mark.parametrize("kind", ["llama2", "gemma", "gpt2"])
def test_a_stop_string_that_begins_with_a_space(kind, tokenizers):
    """The first token of an answer has its space, unless it is the first of the whole text."""
    tokenizer = tokenizers[kind]
    prompt = ids_of(tokenizer, "user")
    ids = ids_of(tokenizer, "user hello world")[len(prompt) :]
    assert prompt + ids == ids_of(tokenizer, "user hello world")
    stream = TextStream(tokenizer, prompt, [" "])
    assert stream.stopped(ids[:1]) and text_of(tokenizer, prompt, ids, [" "]) == ""
    # a prompt that has no text, with a decoder that drops the first space
    no_text, stop = [tokenizer.eot], [" hello"]
    expected = "hello world" if kind == "llama2" else ""
    assert text_of(tokenizer, no_text, ids, stop) == expected
    assert TextStream(tokenizer, no_text, stop).stopped(ids) == (expected == "")


# --- names and places -----------------------------------------------------------------------------


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_where_tokens_stand(kind, echo, tokenizers):
    """text_offset: so many characters of prompt and answer are whole before the token."""
    tokenizer = tokenizers[kind]
    g = random.Random(8)
    parts = 0
    for _ in range(300):
        prompt, ids = (ids_of(tokenizer, some_text(g)) for _ in range(2))
        (sent,) = answered(tokenizer, prompt, ids, False, log_probs=1, echo=echo)
        log = sent["logprobs"]
        streamed = answered(tokenizer, prompt, ids, True, log_probs=1, echo=echo)
        for column in log:
            assert [x for piece in streamed for x in piece["logprobs"][column]] == log[column]
        text = ("" if echo else TextStream(tokenizer, prompt).prompt) + sent["text"]
        first = 0 if echo else len(prompt)
        assert len(log["tokens"]) == len(prompt + ids) - first
        for n, (name, offset) in enumerate(zip(log["tokens"], log["text_offset"]), first):
            before = token_bytes(tokenizer).text((prompt + ids)[:n])
            assert offset == len(before.decode(errors="ignore"))
            if name.startswith("token_id:"):
                parts += 1
                assert name == f"token_id:{(prompt + ids)[n]}"
            else:
                # the first token of a text may have lost its space
                names = (name,) if n else (name, name.removeprefix(" "))
                assert text[offset:].startswith(names)
    assert parts > 20


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_has_a_name_of_its_own(kind, tokenizers):
    """Of the likeliest tokens none vanishes: `a` and `▁a` are two, and so are a and the byte 61."""
    tokenizer = tokenizers[kind]
    every = list(range(tokenizer.vocab_size))
    fields = api.Completion(prompt="", log_probs=5)
    choice = api.Choice(0, fields, Request([0], 9), tokenizer)
    choice.entries = [LogProb(every[-1], -1.0, [(token, -float(token)) for token in every])]
    (top,) = choice.as_object()["logprobs"]["top_logprobs"]
    assert len(top) == len(every)
    if kind == "llama2":
        both = [name for name in tokenizer.vocabulary if f"▁{name}" in tokenizer.vocabulary]
        assert both and {*both, *(f" {name}" for name in both)} <= top.keys()
        assert top["a"] == -tokenizer.vocabulary["<0x61>"]
        assert f"token_id:{tokenizer.vocabulary['a']}" in top
    log = api.ChatCompletion(messages=[api.Message("user", "")]).log(choice)["content"]
    assert log == []
    choice.entries = [LogProb(token, -1.0, []) for token in every]
    for token, item in zip(every, api.ChatCompletion(messages=[]).log(choice)["content"]):
        code = token_bytes(tokenizer).of(token)
        assert item["bytes"] == (list(code) or None)
        assert item["token"].startswith("token_id:") or item["token"].encode() == code


# --- tokenizers of other shapes -------------------------------------------------------------------

END = "<｜end▁of▁sentence｜>"


@pytest.mark.parametrize("kind", ["qwen", "llama2"])
def test_names_that_no_bytes_are(kind, tmp_path):
    """A special token whose name has ▁, and an added one that is text, beyond Latin."""
    library = published_tokenizers.KINDS[kind].make(["<unk>", "<s>", END])
    library.add_tokens([AddedToken("日本", normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = make_tokenizer(str(tmp_path / "tokenizer.json"))
    one, two = (ids_of(tokenizer, text) for text in ("hello", "world"))
    ids = [*one, tokenizer.vocabulary["日本"], tokenizer.vocabulary[END], *two]
    text = text_of(tokenizer, one, ids)
    assert text == tokenizer.decode(one + ids)[len("hello") :] and "日本" in text
    assert text_of(tokenizer, one, ids, [END]) == text[: text.index("日本") + 2]
    # a model may know more ids than its tokenizer
    assert text_of(tokenizer, one, [*ids, 10**6]) == text


def test_words(tmp_path):
    """Without a decoder a space stands between tokens, and an end token is none of the library's
    special ones."""
    ids = {word: i for i, word in enumerate(["?", "if", "a", "in", "b", "</s>"])}
    library = Tokenizer(WordLevel(ids, unk_token="?"))
    library.pre_tokenizer = Whitespace()
    library.save(str(tmp_path / "words.json"))
    tokenizer = make_tokenizer(str(tmp_path / "words.json"))
    assert tokenizer.stop_ids == (5,)
    assert text_of(tokenizer, [1], [2, 3, 5, 4]) == " a in b"
    assert text_of(tokenizer, [5], [2, 3, 5, 4], [" b"]) == "a in"
    assert text_of(tokenizer, [1], [2, 3, 5, 4], ["</s>"]) == " a in"


def test_ids_beyond_a_built_in_vocabulary():
    """GPT-2's 50,257 tokens are often padded to 50,304."""

    class GPT2:
        name, bos, stop_ids, vocab_size = "gpt2", None, (1,), 2

        class encoding:  # noqa: N801
            decode_single_token_bytes = [b"a", b"<|endoftext|>"].__getitem__

    for tokenizer in (GPT2(), make_tokenizer("bytes")):
        assert text_of(tokenizer, [0], [0, 300, tokenizer.stop_ids[0]]) in ("a", "\x00")
