"""The lesson of finetune/sft.py: which tokens count, and what a model learns from them.

A small model learns to answer with the first letter of a word:

    user:
    cafe
    assistant:
    c<end>
"""

import torch
from torch import Tensor

import generate
import gpt
from course import demo, form
from finetune.chat import Chat, Example, message
from finetune.chat_template import ChatTokenizer, open_template
from finetune.packing import Padded
from run.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
NEW_WORDS = ("hgfe", "badc", "ccgh")
BATCH = 32
MOST_STEPS = 150
# Training ends when the mean loss of 10 steps is below this.
LEARNED = 0.05
# The most tokens of an answer to a new word.
MOST_TOKENS = 8

WITHOUT = form.Removals()


@WITHOUT.add(
    "end-of-turn",
    "The token that ends a turn is no target. What does the model say after the letter?",
)
def without_end_of_turn(example: Example) -> Example:
    """The model never learns what comes after the letter. The first letter is right and the loss
    looks as good as before, but the answer goes on until the limit of tokens."""
    pairs = zip(example.ids, example.counted)
    return Example(example.ids, [counts and i != TOKENIZER.eot for i, counts in pairs])


@WITHOUT.add("mask", "The loss is taken on all tokens. Which checks fail?")
def without_mask(example: Example) -> Example:
    """Only 2 of 23 targets belong to the answer. The others are fixed text, which is soon learned,
    and the question's four random letters, which nobody can predict. So the loss stays above 4 ln 8
    / 23 = 0.36."""
    return Example(example.ids, [True] * len(example.ids))


# --- conversations --------------------------------------------------------------------------------


def plain_chat() -> Chat:
    tokenizer = ChatTokenizer(TOKENIZER)
    return Chat(open_template("plain", tokenizer), tokenizer)


def example_of(lesson: form.Lesson, question: str, answer: str) -> Example:
    messages = [message("user", question), message("assistant", answer)]
    example = plain_chat().example(messages)
    return lesson.mutate(example) if lesson.mutate else example


def show(token: int) -> str:
    """A byte in two columns, the end of turn as <>."""
    return {TOKENIZER.eot: "<>", ord("\n"): "\\n"}.get(token) or chr(token).rjust(2)


def draw(lesson: form.Lesson, example: Example) -> None:
    lesson.say(" ".join(show(token) for token in example.ids))
    lesson.say(" ".join(" ^" if counts else " ." for counts in example.counted))


# --- a model --------------------------------------------------------------------------------------


def learn(model: gpt.GPT, examples: list[Example]) -> demo.Learned:
    """Train until the conversations are learned or MOST_STEPS are over."""
    dataset = Padded(examples, seed=0)

    def loss_of(step: int) -> Tensor:
        samples = range(step * BATCH, (step + 1) * BATCH)
        batch = dataset.batch(samples)
        losses = model(batch.tokens, batch.targets) * batch.loss_mask
        return losses.sum() / dataset.counted_tokens(samples)

    return demo.learn(model, loss_of, MOST_STEPS, LEARNED)


def ask(model: gpt.GPT) -> dict[str, tuple[str, bool]]:
    """New word -> (the answer, whether the model ended it)."""
    chat = plain_chat()
    prompts = [chat.prompt([message("user", word)]) for word in NEW_WORDS]
    answers = generate.generate(model, prompts, MOST_TOKENS, temperature=0, eot=chat.end_of_turn())
    return {
        word: (TOKENIZER.decode(ids), len(ids) < MOST_TOKENS)
        for word, ids in zip(NEW_WORDS, answers)
    }


# --- the lesson -----------------------------------------------------------------------------------


def teach_targets(lesson: form.Lesson) -> None:
    lesson.predict(
        'The user says "cafe", the assistant "c". The plain chat template writes "user:", a new'
        ' line, the question, a new line, "assistant:", a new line, the answer and an end token.'
        " With a token for each byte, how many tokens are there? How many are targets, in the"
        " loss?",
        "tokens; targets",
    )
    example = example_of(lesson, "cafe", "c")
    draw(lesson, example)
    lengths = [len("user:\n"), len("cafe\n"), len("assistant:\n"), len("c"), 1]
    total = " + ".join(map(str, lengths))
    targets = sum(example.counted)
    lesson.check(
        f"{len(example.ids)} tokens = {total}; {targets} targets, where 2 are expected: the answer,"
        " and the token <> that ends the turn",
        len(example.ids) == sum(lengths) and targets == 2,
        [len(example.ids), targets],
    )


def teach_learning(lesson: form.Lesson) -> None:
    lesson.predict(
        "The user says a word of random letters. A Llama (h 64, L 2) learns to answer with its"
        " first letter. Can the loss come near 0?"
    )
    config = demo.tiny_config(ffn_hidden_size=172, llama=True)
    model = demo.make_model(config, dtype=torch.float32)
    learned = learn(
        model, [example_of(lesson, word, word[0]) for word in demo.random_words(400, NEW_WORDS)]
    )
    lesson.check(
        f"loss {learned.loss:.4f} after {learned.steps} steps: the random letters are no targets,"
        " and the answer can be predicted",
        learned.loss < LEARNED,
    )
    lesson.predict(
        f"New words: {', '.join(NEW_WORDS)}. What does the model answer? Does it stop then?"
    )
    answers = ask(model.eval())
    lesson.check(
        ", ".join(f"{word}: {answer[:1]!r}" for word, (answer, _) in answers.items()),
        all(answer[:1] == word[0] for word, (answer, _) in answers.items()),
    )
    ended = sum(ends for _, ends in answers.values())
    texts = [repr(answer) for answer, _ in answers.values()]
    lesson.check(
        f"{ended} of {len(answers)} answers end before {MOST_TOKENS} tokens: {', '.join(texts)}",
        ended == len(answers),
    )


def teach(lesson: form.Lesson) -> None:
    teach_targets(lesson)
    teach_learning(lesson)


if __name__ == "__main__":
    form.run("sft")
