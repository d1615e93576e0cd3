"""Keys of messages, in the files of every kind of training: each is obeyed, or refused by name. And
files that begin with a byte order mark."""

import codecs
import json

import pytest
import test_sft
from small_run import write_lines

from base import json_files
from finetune import preference_data, prompt_set, sft_data
from finetune.chat import message
from finetune.chat_template import ChatError
from inference.answers import read_prompts
from run.documents import read_documents
from run.tokenizer import ByteTokenizer

ASKED, ANSWERED = message("user", "q"), message("assistant", "a")
AGAIN, WRONG = message("user", "r"), message("assistant", "b")
# what messages have in the files and interfaces that people have, with a value that says something
KEYS = {
    "name": "Ann",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    "tool_call_id": "1",
    "tools": [{"type": "function"}],
    "function_call": {"name": "f", "arguments": "{}"},
    "reasoning_content": "Why",
    "reasoning": "Why",
    "thinking": "Why",
    "refusal": "No.",
    "audio": {"id": "1"},
    "images": ["a.png"],
    "annotations": [{"type": "url"}],
    "citations": ["x"],
    "prefix": True,
    "partial": True,
    "train": False,
    "mask": 1,
    "end_turn": False,
    "recipient": "all",
    "channel": "analysis",
    "metadata": {"a": 1},
    "weights": 0,
    "Content": "another",
}
NOTHING = (None, "", [], {})
CHAT = test_sft.chat_of(ByteTokenizer())


def of_sft(path):
    return sft_data.read_examples([path], "--data", CHAT, "answers", 99, True)


def of_pairs(path):
    return preference_data.read_pairs([path], "--data", CHAT, 99, True)


def of_prompts(path):
    def make(record: dict):
        return prompt_set.question_of(record, CHAT, 99)._replace(record={})

    def key(question):
        return question.ids

    return sft_data.read_lines([path], "--data", make, key, prompt_set.asked, True)


# kind of file -> (how it is read, a line of it, where its messages are)
KINDS = {
    "conversations": (of_sft, {"messages": [ASKED, ANSWERED]}, ("messages",)),
    "whole pairs": (
        of_pairs,
        {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG]},
        ("chosen", "rejected"),
    ),
    "pairs beside a prompt": (
        of_pairs,
        {"prompt": [ASKED, ANSWERED, AGAIN], "chosen": [ANSWERED], "rejected": [WRONG]},
        ("prompt", "chosen", "rejected"),
    ),
    "prompts": (of_prompts, {"messages": [ASKED, ANSWERED, AGAIN]}, ("messages",)),
    "prompts of messages": (of_prompts, {"prompt": [ASKED]}, ("prompt",)),
}


def read(kind: str, folder, record: dict):
    call, _, _ = KINDS[kind]
    return call(str(write_lines(folder / "data.jsonl", [record])))


def with_key(kind: str, key: str, value):
    """The line of a kind, once for each of its messages, which has a key more."""
    _, record, fields = KINDS[kind]
    for field in fields:
        for n, each in enumerate(record[field]):
            messages = [*record[field][:n], each | {key: value}, *record[field][n + 1 :]]
            yield record | {field: messages}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", KEYS)
def test_a_key_with_something_in_it_is_refused(kind, key, tmp_path):
    """By its name, also where bad examples are skipped; one that says nothing changes nothing."""
    plain = read(kind, tmp_path, KINDS[kind][1])
    for record in with_key(kind, key, KEYS[key]):
        with pytest.raises(ChatError, match=rf"line 1: .*message \d: has {key}, which is not"):
            read(kind, tmp_path, record)
    for nothing in NOTHING:
        for record in with_key(kind, key, nothing):
            assert read(kind, tmp_path, record) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_weights(kind, tmp_path):
    """In conversations: 0 is no target, 1 is one. What else has messages has no use for them."""
    plain = read(kind, tmp_path, KINDS[kind][1])
    for value in (0, 1, 0.5, -1, "0", True):
        for n, record in enumerate(with_key(kind, "weight", value)):
            if kind != "conversations":
                with pytest.raises(ChatError, match="has weight, which is not supported"):
                    read(kind, tmp_path, record)
            elif value not in (0, 1):
                with pytest.raises(ChatError, match=r"message \d: weight"):
                    read(kind, tmp_path, record)
            elif n == 1 and value == 0:
                with pytest.raises(ChatError, match="nothing to learn"):
                    read(kind, tmp_path, record)
            else:
                assert read(kind, tmp_path, record) == plain
    if kind == "conversations":
        quiet = [ASKED, ANSWERED | {"weight": 0}, AGAIN, WRONG]
        ((example,), _) = read(kind, tmp_path, {"messages": quiet})
        assert bytes(i for i, counts in zip(*example) if counts and i < 256) == b"b"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", sft_data.UNSUPPORTED)
def test_a_line_with_what_changes_the_text_is_refused(kind, key, tmp_path):
    with pytest.raises(ChatError, match=f"has {key}, which is not supported"):
        read(kind, tmp_path, KINDS[kind][1] | {key: [{"type": "function"}]})
    assert read(kind, tmp_path, KINDS[kind][1] | {key: []}) == read(kind, tmp_path, KINDS[kind][1])


def test_a_message_that_is_no_object(tmp_path):
    for kind, (_, record, fields) in KINDS.items():
        for wrong in ("text", 5, None, [], {}, {"role": "", "content": 5}):
            with pytest.raises(ChatError, match=r"must be text|is no|last message"):
                read(kind, tmp_path, record | {fields[0]: [wrong]})


# --- byte order marks -----------------------------------------------------------------------------


def test_a_byte_order_mark_is_no_part_of_json_lines(tmp_path):
    """Files of every kind, as editors save them; also several in one, and a line with nothing
    else."""
    mark = codecs.BOM_UTF8
    for kind, (call, record, _) in KINDS.items():
        line = json.dumps(record).encode() + b"\n"
        path = tmp_path / "data.jsonl"
        found = []
        for content in (line * 2, mark + line + mark + line, mark + b"\n" + line + line + mark):
            path.write_bytes(content)
            found.append(call(str(path)))
        assert found[0] == found[1] == found[2], kind


def test_other_readers_of_json_lines_leave_the_mark_out_too(tmp_path):
    path = tmp_path / "data.jsonl"
    record = {"prompt": "é"}
    path.write_bytes(codecs.BOM_UTF8 + json.dumps(record).encode())
    assert list(json_files.read_lines(path)) == [(1, record)]
    assert read_prompts(str(path), ByteTokenizer(), 99)[0][0] == record
    path.write_bytes(codecs.BOM_UTF8 + json.dumps({"text": "é"}).encode())
    assert list(read_documents(path, 0, None)) == ["é"]
    # whose lines are recognised by what they say
    other = path.rename(tmp_path / "data.json")
    assert list(read_documents(other, 0, None)) == ["é"]
