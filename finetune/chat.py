r"""The tokens of a conversation, and which of them are targets: the assistant's (sft.py).

Where is the answer in the text? A template may mark it with `{% generation %}` blocks. If it has
none, three texts are rendered:

    as it is     user \n in ? <|im_end|> \n assistant \n in <|im_end|> \n user \n ..
    for asking   user \n in ? <|im_end|> \n assistant \n
    marked       user \n in ? <|im_end|> \n assistant \n ## <|im_end|> \n user \n ..

The text for asking ends where the model begins to write. The marked text has ## instead of the
answer. What follows the mark also follows the answer, and it begins with the end of the turn. So no
text is searched for: the answer "in" is found although the question has the same word. A token
counts if at least one of its characters belongs to the answer.
"""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from finetune.chat_template import NO_SPAN, ChatError, ChatTemplate, ChatTokenizer, Tokens, add
from finetune.packing import Example


class Answer(NamedTuple):
    """Characters of the rendered text that the assistant writes."""

    # the turn begins at or behind this character, and before the answer
    opening: int
    start: int
    # where its content ends
    end: int
    # what closes the turn ends here
    limit: int
    # of `text_behind`
    other: str


# --- messages to tokens and targets ---------------------------------------------------------------


class Chat:
    """A chat template with its tokenizer."""

    def __init__(self, template: ChatTemplate, tokenizer: ChatTokenizer):
        self.template = template
        self.tokenizer = tokenizer

    def example(self, messages: list[dict], loss_on: str = "answers") -> Example:
        """The tokens of a conversation, and which are targets. A message with "weight" 0 is none.
        loss_on: "answers" or "all". Raises ChatError."""
        text, blocks = self.template.render(messages)
        tokens = self.tokenizer.encode(text)
        said = [n for n, each in enumerate(messages) if each["role"] == "assistant"]
        learned = [n for n in said if messages[n].get("weight") != 0]
        if loss_on == "all":
            if any(each.get("weight") == 0 for each in messages):
                # such a line ends the run: no reason, so it is not skipped
                raise ChatError("has weight 0, but --loss-on all counts every token", reason="")
            spans = [(0, len(tokens.ids))]
        elif blocks is None:
            spans = [self.span_of_answer(tokens, messages, n, text) for n in learned]
        else:
            if learned != said:
                blocks = self.blocks_of(messages, learned, said, text, blocks)
            spans = [self.span_of_block(tokens, block, text) for block in blocks]
        counted = [False] * len(tokens.ids)
        for first, end in spans:
            counted[first:end] = [True] * (end - first)
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

    def learns_what_is_asked(self) -> bool:
        """Whether the text for asking is how a text with the answer begins. Raises ChatError."""
        messages = [message("user", "a"), message("assistant", "b")]
        asked = self.template.render(messages[:1], ask=True).text
        return self.template.render(messages).text.startswith(asked)

    def end_of_turn(self) -> int:
        """The token with which an answer ends; the end of text where the template shows none.
        Raises ChatError."""
        messages = [message("user", "a"), message("assistant", "b")]
        text = self.template.render(messages).text
        tokens = self.tokenizer.encode(text)
        try:
            end = self.end_of_answer(tokens, self.find_answer(messages, 1, text), text)
        except ChatError as e:
            if e.reason != NO_SPAN:
                raise
            end = None
        return self.tokenizer.tokenizer.eot if end is None else tokens.ids[end - 1]

    # -- answers, where the template does not mark them --------------------------------------------

    def find_answer(self, messages: list[dict], n: int, text: str) -> Answer:
        """Message n in the rendered text. Raises ChatError."""
        before, after = self.template.around(messages, n)
        question = self.template.render(messages[:n], ask=True).text
        content = messages[n]["content"].strip()
        start, end = len(question), len(text) - len(after)
        opening = start
        if not text.startswith(question) or not text[start:end].endswith(content):
            # Some templates ask with <think> and write the answer without it. Then the answer
            # begins where the two texts begin to differ. Others move a thought, or leave it out.
            opening = self.opening(messages, n, question)
            if not text.startswith(question):
                start = min(common_length(question, other) for other in (text, before))
        if not text.endswith(after) or not opening <= start <= end:
            raise ChatError(
                f"message {n + 1}: the answer cannot be found in the text, because what"
                f" {self.template.where} writes around an answer depends on the answer; mark"
                " answers in the template with {% generation %} and {% endgeneration %}, or give"
                " --loss-on all",
                NO_SPAN,
            )
        other = self.text_behind(messages, n)
        other = after if other is None else other
        return Answer(opening, start, end, end + common_length(after, other), other)

    def opening(self, messages: list[dict], n: int, question: str) -> int:
        """Where the message before n ends in the text for asking. Raises ChatError."""
        if n == 0:
            return 0
        _, asked = self.template.around(messages[:n], n - 1, ask=True)
        return len(question) - len(asked)

    def text_behind(self, messages: list[dict], n: int) -> str | None:
        """What stands behind message n in another conversation: one that goes on if this one ends
        with n, and else one that ends with n. What both texts begin with closes the turn. None: the
        template refuses the other one."""
        others = messages[: n + 1] if messages[n + 1 :] else [*messages, message("user", "a")]
        try:
            return self.template.around(others, n)[1]
        except ChatError:
            return None

    def span_of_answer(
        self, tokens: Tokens, messages: list[dict], n: int, text: str
    ) -> tuple[int, int]:
        """(first, end) of the tokens that the assistant writes in message n, with the one that ends
        its turn. Raises ChatError."""
        answer = self.find_answer(messages, n, text)
        letters = iter(text[answer.opening : answer.end])
        # `in` reads on until it finds the letter: all of them must be there, in this order
        if not all(letter in letters for letter in "".join(messages[n]["content"].split())):
            raise ChatError(
                f"message {n + 1}: {self.template.where} leaves out or changes a part of the"
                " answer, so it would not be learned; use a template of your own, or give the"
                ' message "weight": 0',
                "answer changed",
            )
        end = self.end_of_answer(tokens, answer, text)
        if end is None:
            raise self.without_end()
        return first_token(tokens, answer.start), end

    def end_of_answer(self, tokens: Tokens, answer: Answer, text: str) -> int | None:
        """One behind the token that ends the turn; None where it has none."""
        stop_ids = self.tokenizer.tokenizer.stop_ids
        first = first_token(tokens, answer.end)
        behind = first_token(tokens, answer.limit)
        closing = [n for n in range(first, behind) if self.is_special(tokens, n)]
        if closing:
            # generation ends at the first of stop_ids
            return 1 + next((n for n in closing if tokens.ids[n] in stop_ids), closing[-1])
        if self.is_special(tokens, first) and (answer.other or tokens.ids[first] in stop_ids):
            # the last turn ends with another token than the others
            return first + 1
        begins = self.tokenizer.encode(answer.other).ids[:1]
        if answer.end == len(text) and begins and begins[0] in stop_ids:
            # nothing closes the last turn; this token would begin the next one
            add(tokens, Tokens(begins, [0], [0]), len(text))
            return len(tokens.ids)
        return None

    # -- blocks that the template marks ------------------------------------------------------------

    def blocks_of(
        self, messages: list[dict], learned: list[int], said: list[int], text: str, blocks: list
    ) -> list[tuple[int, int]]:
        """Those of the messages `learned`, of all that are `said`. Raises ChatError."""
        starts = [self.find_answer(messages, n, text).start for n in said]
        # A block belongs to the last answer that begins before the block ends.
        return [block for block in blocks if said[bisect_right(starts, block[1]) - 1] in learned]

    def span_of_block(self, tokens: Tokens, block: tuple[int, int], text: str) -> tuple[int, int]:
        """(first, end) of the tokens of a block. A special token that follows the block counts too,
        if the block does not end with one. Raises ChatError."""
        first = first_token(tokens, block[0])
        behind = bisect_left(tokens.starts, block[1])
        last = behind - 1
        # a block may end with white space after the special token
        while last >= first and not text[tokens.starts[last] : block[1]].strip():
            last -= 1
        if last >= first and self.is_special(tokens, last):
            # a token that goes on behind the block comes after the end
            return first, max(last + 1, bisect_right(tokens.ends, block[1]))
        if not self.is_special(tokens, behind):
            raise self.without_end()
        return first, behind + 1

    def without_end(self) -> ChatError:
        rule = "with no special token, as {{ eos_token }} would be, so it could not learn to stop"
        return ChatError(f"{self.template.where} ends an answer {rule}", NO_SPAN)

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
