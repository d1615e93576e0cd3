r"""Supervised fine-tuning (SFT): a model learns to answer, from conversations (arXiv 2203.02155).

A pretrained model continues any text. SFT trains it further, on conversations between a user and
an assistant. The training loop is train.py's own; the data differ in two ways:

- A chat template turns the list of messages into one text. It puts special tokens around each
  message. They tell the model who speaks, and where a turn (one message) ends.
- A loss mask selects the targets: the loss is taken on the assistant's tokens only. The model
  reads the questions, and learns to write the answers.

    <|im_start|> user \n 2 + 3 ? <|im_end|> \n <|im_start|> assistant \n 5 <|im_end|> \n
         .        .   . . . . .      .      .       .           .     .  ^     ^      .

^ is in the loss. The token that ends the turn (<|im_end|>, </s>, <|eot_id|>) is a target too:
without it the model learns what to say, but not when to stop. Generation ends at this token.

    python sft.py                                             a lesson: answers, and where they end
    python sft.py --load CKPT --data chats.jsonl --lr 2e-5 --out runs/chat
    python generate.py --checkpoint runs/chat --chat "2 + 3?"

Where is the answer in the text? A template may mark it with `{% generation %}` blocks. If it has
none, it is rendered twice: up to the question, as for generation, and with the answer. The first
text must be the beginning of the second; the rest is the answer. A token counts if at least one of
its characters belongs to the answer.

The loss of a batch is the sum over its targets, divided by their number, as in all of this project.
A mean for each conversation, and then a mean of these, would give the tokens of short answers more
weight than those of long ones.

Without --pack each conversation is padded to the longest one. With --pack several share a row, and
none attends to another (tuning/packing.py).

Not covered: weights for messages; tools and images.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("sft", command="tuning.sft_command")

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from tuning.chat_template import ChatError, ChatTemplate, ChatTokenizer, Tokens
from tuning.packing import Example

# for the count of what is skipped
NO_SPAN = "no answer found"


class Answer(NamedTuple):
    """Characters of the rendered text that the assistant writes."""

    start: int
    # where its content ends
    end: int
    # the turn ends at or before this character
    limit: int


# --- messages to tokens and targets ---------------------------------------------------------------


class Chat:
    """A chat template with its tokenizer."""

    def __init__(self, template: ChatTemplate, tokenizer: ChatTokenizer):
        self.template = template
        self.tokenizer = tokenizer

    def example(self, messages: list[dict], loss_on: str = "answers") -> Example:
        """The tokens of a conversation, and which are targets. loss_on: "answers" or "all". Raises
        ChatError."""
        rendered = self.template.render(messages)
        tokens = self.tokenizer.encode(rendered.text)
        if loss_on == "all":
            counted = [True] * len(tokens.ids)
        else:
            answers = rendered.answers
            if answers is None:
                answers = self.find_answers(messages, rendered.text)
            counted = self.count_answers(tokens, answers, rendered.text)
        # nobody predicts the first token
        if not any(counted[1:]):
            raise ChatError("has nothing to learn: no message of the assistant", "nothing to learn")
        return Example(tokens.ids, counted)

    def prompt(self, messages: list[dict]) -> list[int]:
        """The tokens after which the model answers. Raises ChatError."""
        ids = self.tokenizer.encode(self.template.render(messages, ask=True).text).ids
        if not ids:
            raise ChatError(f"{self.template.where} makes no text of a question")
        return ids

    def end_of_turn(self) -> int:
        """The token with which an answer ends. Raises ChatError."""
        example = self.example([message("user", "a"), message("assistant", "b")])
        return [i for i, counts in zip(*example) if counts and i in self.tokenizer.special_ids][-1]

    # -- answers, where the template does not mark them --------------------------------------------

    def find_answers(self, messages: list[dict], text: str) -> list[Answer]:
        """Each assistant message in the rendered text. Raises ChatError."""
        answers = []
        for n, each in enumerate(messages):
            if each["role"] == "assistant":
                question = self.template.render(messages[:n], ask=True).text
                answered = self.template.render(messages[: n + 1]).text
                # what follows a message may depend on whether it is the last
                limit = common_length(text, answered)
                content = each["content"].strip()
                start = len(question)
                at = text.find(content, start, limit)
                if not text.startswith(question) or at < 0:
                    raise ChatError(
                        f"message {n + 1}: the answer cannot be found in the text, because"
                        f" {self.template.where} changes the answer, or the text before it once an"
                        " answer follows; mark answers in the template with {% generation %} and"
                        " {% endgeneration %}, or give --loss-on all",
                        NO_SPAN,
                    )
                answers.append(Answer(start, at + len(content), limit))
        return answers

    # -- from characters to tokens -----------------------------------------------------------------

    def count_answers(self, tokens: Tokens, answers: list, text: str) -> list[bool]:
        """answers: Answer, or (start, end) of a {% generation %} block. Raises ChatError."""
        counted = [False] * len(tokens.ids)
        for answer in answers:
            if isinstance(answer, Answer):
                end = self.end_of_answer(tokens, answer)
            else:
                end = self.end_of_block(tokens, answer, text)
            if end is None:
                raise ChatError(
                    f"{self.template.where} ends an answer with no special token of the tokenizer,"
                    " so the model could not learn to stop; {{ eos_token }} after it would be one",
                    NO_SPAN,
                )
            for n in range(first_token(tokens, answer[0]), end):
                counted[n] = True
        return counted

    def end_of_answer(self, tokens: Tokens, answer: Answer) -> int | None:
        """One behind the first special token after the content; None where the turn has none."""
        for n in range(bisect_left(tokens.starts, answer.end), len(tokens.ids)):
            if tokens.ends[n] > answer.limit:
                return None
            if tokens.ids[n] in self.tokenizer.special_ids:
                return n + 1
        return None

    def end_of_block(self, tokens: Tokens, block: tuple[int, int], text: str) -> int | None:
        """One behind the last token of a block. A special token that follows the block counts too,
        if the block does not end with one; None where neither does."""
        end = bisect_left(tokens.starts, block[1])
        last = end - 1
        # a block may end with white space after the special token
        while last >= 0 and not text[tokens.starts[last] : tokens.ends[last]].strip():
            last -= 1
        if last >= 0 and tokens.starts[last] >= block[0] and self.is_special(tokens, last):
            return end
        return end + 1 if self.is_special(tokens, end) else None

    def is_special(self, tokens: Tokens, n: int) -> bool:
        return n < len(tokens.ids) and tokens.ids[n] in self.tokenizer.special_ids


def common_length(a: str, b: str) -> int:
    """How many characters the beginnings of two texts share."""
    if a.startswith(b):
        return len(b)
    same = (x == y for x, y in zip(a, b))
    return next((n for n, equal in enumerate(same) if not equal), min(len(a), len(b)))


def first_token(tokens: Tokens, start: int) -> int:
    """The number of the token that has the character `start` in it."""
    return bisect_right(tokens.ends, start)


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}
