"""Conversations, pairs and prompts with the same question are on one side: trained on or held out.

By property, over random files; what a question is, is read off the text of an example.
"""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import small_run
import test_sft

from finetune import preference_data, prompt_set, sft_data
from finetune.chat_template import ChatError
from run.data import HELD_OUT
from run.tokenizer import ByteTokenizer

CHAT = test_sft.chat_of(ByteTokenizer())
ANSWER = "assistant:\n"


def text_of(ids: list[int]) -> str:
    return bytes(n for n in ids if n < 256).decode()


def said(role: str, content: str) -> dict:
    return {"role": role, "content": content}


# --- three kinds of files -------------------------------------------------------------------------


def conversation(rng, question: str) -> dict:
    """Of up to three turns; a space around a question is no other question."""
    messages = [
        said("user", question + rng.choice(["", " "])),
        said("assistant", str(rng.random())),
    ]
    for n in range(rng.randrange(3)):
        messages += [said("user", f"and {n}?"), said("assistant", str(rng.random()))]
    return {"messages": messages}


def pair(rng, question: str) -> dict:
    return {"prompt": question, "chosen": str(rng.random()), "rejected": "no"}


def prompt(rng, question: str) -> dict:
    return {"prompt": question, "sum": rng.random()}


def read_prompts(paths, flag):
    def make(record: dict):
        return prompt_set.question_of(record, CHAT, 999)

    def key(question) -> list:
        return [question.ids, question.record]

    found, left_out = sft_data.read_lines(paths, flag, make, key, prompt_set.asked, False)
    return found, f"{len(found)} prompts{left_out}"


# kind -> (a line, how a file is read, the question of an example)
KINDS = {
    "conversations": (
        conversation,
        lambda *args: sft_data.read_examples(*args, CHAT, "answers", 999, False),
        lambda example: text_of(example.ids).split(ANSWER)[0],
    ),
    "all tokens": (
        conversation,
        lambda *args: sft_data.read_examples(*args, CHAT, "all", 999, False),
        lambda example: text_of(example.ids).split(ANSWER)[0],
    ),
    "pairs": (
        pair,
        lambda *args: preference_data.read_pairs(*args, CHAT, 999, False),
        lambda pair: text_of(pair.chosen.ids).split(ANSWER)[0],
    ),
    "prompts": (prompt, read_prompts, lambda question: text_of(question.ids)),
}


def open_file(path, records: list[dict], read) -> tuple[list, list, str]:
    """(trained on, held out, what the run says)"""
    small_run.write_lines(path, records)
    heard = []
    world = SimpleNamespace(say=heard.append)
    config = SimpleNamespace(data=[str(path)])
    return *sft_data.open_examples(config, world, CHAT, read, "line"), heard[0]


def random_file(rng, line) -> list[dict]:
    """Questions of many sizes, some lines twice."""
    n = rng.choice([3, 30, 100])
    most = rng.choice([1, 2, 4, n])
    records = []
    while len(records) < n:
        question = f"q{rng.random()}"
        records += [line(rng, question) for _ in range(rng.randrange(most) + 1)]
    records += rng.sample(records, rng.randrange(len(records) // 2))
    # not one question alone
    return [*records, line(rng, "another")]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_no_question_is_on_both_sides(tmp_path, kind, seed):
    line, read, question = KINDS[kind]
    rng = random.Random(f"{kind} {seed}")
    records = random_file(rng, line)
    trained, held_out, heard = open_file(tmp_path / "a.jsonl", records, read)
    assert not set(map(question, trained)) & set(map(question, held_out))
    # all of them are somewhere
    assert len(trained) + len(held_out) == len(records) and trained
    sizes = Counter(map(question, trained + held_out))
    # a twentieth; a little less, where the next question has too many; or the rarest question
    room = max(1, len(records) // HELD_OUT)
    assert 0 < len(held_out) <= max(room, min(sizes.values()))
    left = room - len(held_out)
    assert all(sizes[asked] > left for asked in map(question, trained))
    assert f"{len(held_out)} of them held out;" in heard
    rng.shuffle(records)
    assert open_file(tmp_path / "b.jsonl", records, read)[:2] == (trained, held_out)


@pytest.mark.parametrize("kind", KINDS)
def test_questions_that_are_all_different(tmp_path, kind):
    """Then it is the last twentieth in the order of hashes: runs of older versions go on."""
    line, read, _ = KINDS[kind]
    rng = random.Random(1)
    records = [line(rng, f"q{n}") for n in range(100)]
    trained, held_out, _ = open_file(tmp_path / "a.jsonl", records, read)
    found, _ = read([str(tmp_path / "a.jsonl")], "--data")
    assert (trained, held_out) == (found[:-5], found[-5:])


@pytest.mark.parametrize("kind", KINDS)
def test_one_question_alone(tmp_path, kind):
    """It is trained on too, and the run says so. A single line is refused."""
    line, read, _ = KINDS[kind]
    rng = random.Random(1)
    trained, held_out, heard = open_file(tmp_path / "a", [line(rng, "q")] * 40, read)
    assert (len(trained), len(held_out)) == (38, 2)
    assert "2 of them held out, but all have one question, so it is trained on too" in heard
    with pytest.raises(ChatError, match="has one line, and one is held out"):
        open_file(tmp_path / "b", [line(rng, "q")], read)


def test_questions_by_hand():
    """A user's question, in front of the first answer that is learned."""
    greeting, system = said("assistant", "Hello"), said("system", "Be kind.")
    one, two = said("user", "1?"), said("user", "2?")
    shown, answer = said("assistant", "1") | {"weight": 0}, said("assistant", "2")
    for messages, n in (
        ([one, answer], 1),
        ([system, greeting, one, answer, two, answer], 3),
        # an example of an answer, which is not learned
        ([one, shown, two, answer], 3),
        # nobody answers
        ([system, one], 2),
        ([greeting], 1),
    ):
        assert sft_data.first_question(messages) == messages[:n]


def test_which_questions_by_hand():
    """Of 40 examples two are held out: the last question has three, the one before it two."""
    questions = [f"{n}" for n in range(33)] + ["a", "a", "c", "b", "b", "c", "c"]
    assert sft_data.held_out_questions(questions) == {"b"}
    # no question has so few: the one with the fewest
    assert sft_data.held_out_questions(["a"] * 3 + ["b"] * 5 + ["c"] * 3) == {"c"}


def test_a_border_by_number_is_seen(tmp_path, monkeypatch):
    """That of older versions."""

    def split(examples):
        n = max(1, len(examples) // HELD_OUT)
        return examples[:-n], examples[-n:], f"{n} of them held out"

    monkeypatch.setattr(sft_data, "split", split)
    for kind in KINDS:
        with pytest.raises(AssertionError):
            for seed in range(6):
                test_no_question_is_on_both_sides(tmp_path, kind, seed)
