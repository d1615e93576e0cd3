r"""Chat templates: a list of messages becomes one text, and the text becomes tokens.

    [{"role": "user", "content": "2 + 3?"},       <|im_start|>user\n2 + 3?<|im_end|>\n
     {"role": "assistant", "content": "5"}]       <|im_start|>assistant\n5<|im_end|>\n

A language model reads one text, not a list. Each chat model was trained on one form of that text,
and answers best in the same form. So its tokenizer has the form as a chat template, written in the
template language jinja: chat_template.jinja, or `chat_template` in tokenizer_config.json.

A template is a program, and it may come from somebody else: it runs in jinja's sandbox, with a
bound on its memory. The options are those of `transformers`. Then the text is tokenized. The text
of a special token, <|im_end|>, becomes one id.

To ask, a template is rendered with add_generation_prompt, and without the answer: the text ends
where the assistant begins to write. A template may mark the text that the assistant writes:

    {% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

    python -m tuning.chat_template                  a conversation in the plain template

Not covered: tools and documents, contents that are not text.
"""

import contextlib
import datetime
import itertools
import json
import re
import resource
from pathlib import Path
from typing import NamedTuple

import jinja2.utils
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from base import json_files, terminal
from base.errors import InputError
from corpus.tokenizer import CHAT_TEMPLATE, FileTokenizer, library_errors

# The template of a model that has none. BEGIN and END become the tokenizer's tokens.
PLAIN = """\
{{ BEGIN }}
{%- for message in messages %}
    {{- message.role }}:
{% if message.role == "assistant" %}
        {%- generation %}{{ message.content | trim }}{{ END }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "assistant:\\n" }}
{%- endif %}
"""
# The end of text of a tokenizer that has no text for it.
END_OF_TEXT = "<|endoftext|>"
# What a template may name.
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
# Characters of a rendered text; a context of a million tokens has 4 million.
LONGEST = 2**24
# Bytes that a template may take while it runs.
MOST_MEMORY = 2**30
# Around what {% generation %} gives, until the text is complete. Unicode has no such characters.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


class ChatError(InputError):
    """A conversation or a template that cannot be used; the message is one line."""

    def __init__(self, message: str, reason: str = "refused"):
        """reason: a few words, to count those that are skipped."""
        super().__init__(" ".join(message.split()))
        self.reason = reason


# --- a conversation to text -----------------------------------------------------------------------


class GenerationBlocks(Extension):
    """The block {% generation %}, which jinja does not have."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller) -> str:
        return OPEN + caller() + CLOSE


class Namespace(jinja2.utils.Namespace):
    """jinja's, without names that begin with _: with these a template could reach into Python."""

    def __init__(*args, **fields):
        # a template may call a field self
        for name in dict(*args[1:], **fields):
            Namespace.check(name)
        jinja2.utils.Namespace.__init__(*args, **fields)

    def __setitem__(self, name: str, value) -> None:
        Namespace.check(name)
        super().__setitem__(name, value)

    @staticmethod
    def check(name: str) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has the field {name}, which is unsafe")


def raise_exception(message: str):
    raise TemplateError(message)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class Rendered(NamedTuple):
    text: str
    # (first character, end) of each {% generation %} block; None: the template has no such blocks
    answers: list[tuple[int, int]] | None


class ChatTemplate:
    """A compiled template."""

    def __init__(self, text: str, where: str, tokens: dict[str, str]):
        """where: for messages. tokens: of TOKEN_NAMES. Raises ChatError."""
        self.text, self.where, self.tokens = text, where, tokens
        extensions = [GenerationBlocks, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions
        )
        environment.filters["tojson"] = to_json
        environment.globals |= {
            "namespace": Namespace,
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }
        try:
            with memory_bounded(MOST_MEMORY):
                self.template = environment.from_string(text)
            tree = environment.parse(text)
        except TemplateSyntaxError as e:
            raise ChatError(f"{where}, line {e.lineno}: {e.message}") from None
        except Exception as e:
            # jinja computes constants, and Python compiles what jinja writes
            raise ChatError(f"{where}: {why(e)}") from None
        methods = (call.node for call in tree.find_all(nodes.Call))
        self.marks_answers = any(
            isinstance(m, nodes.ExtensionAttribute) and m.name == "mark" for m in methods
        )

    def render(self, messages: list[dict], ask: bool = False) -> Rendered:
        """ask: the messages end with a question, and the text with the beginning of the assistant's
        next turn. Raises ChatError."""
        # as transformers does: templates ask whether a key is there
        messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
        if any(mark in json.dumps(messages, ensure_ascii=False) for mark in (OPEN, CLOSE)):
            raise ChatError("a message has U+FDD0 or U+FDD1 in it, which are no characters")
        try:
            with memory_bounded(MOST_MEMORY):
                marked = self.template.render(
                    messages=messages,
                    tools=None,
                    documents=None,
                    add_generation_prompt=ask,
                    **self.tokens,
                )
            if len(marked) > LONGEST:
                raise TemplateError(f"made {len(marked):,} characters; {LONGEST:,} are the most")
        except Exception as e:
            # a template can raise whatever Python raises
            reason = why(e)
            if ask:
                reason = f"{reason} (add_generation_prompt is true: there is no answer yet)"
            raise ChatError(f"{self.where}: {reason}", "refused by the template") from None
        try:
            text, answers = without_marks(marked)
        except ValueError:
            raise ChatError(
                f"{self.where}: has a {{% generation %}} block inside another one, or cuts the text"
                " of a block"
            ) from None
        return Rendered(text, answers if self.marks_answers else None)


@contextlib.contextmanager
def memory_bounded(more: int):
    """Meanwhile, whoever asks for memory beyond `more` bytes gets a MemoryError: a template can
    make 10 GB of one character."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        # another system than Linux
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = pages * resource.getpagesize() + more
    if soft != resource.RLIM_INFINITY:
        bound = min(bound, soft)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def why(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"takes more than {MOST_MEMORY // 2**20:,} MiB"
    return str(error if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}")


def without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text between the marks, and where they were. Raises ValueError for a mark that has no
    partner behind or before it."""
    # text, OPEN, answer, CLOSE, text, ..
    pieces = re.split(f"([{OPEN}{CLOSE}])", marked)
    marks = pieces[1::2]
    if marks != [OPEN, CLOSE] * (len(marks) // 2):
        raise ValueError("marks that are no pairs")
    ends = list(itertools.accumulate(len(piece) for piece in pieces[::2]))
    return "".join(pieces[::2]), list(zip(ends[:-1:2], ends[1::2]))


# --- text to tokens -------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """n tokens of a text. starts, ends: the characters of each; neither ever falls."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


class ChatTokenizer:
    """A tokenizer of corpus/tokenizer.py, for texts with special tokens in them."""

    def __init__(self, tokenizer):
        """Raises ChatError for a tokenizer without an end of text."""
        self.tokenizer = tokenizer
        if tokenizer.eot is None:
            raise ChatError("the model has no end-of-text token, with which an answer would end")
        self.special_ids = {tokenizer.eot, *tokenizer.stop_ids}
        self.library = None
        self.end = END_OF_TEXT
        if isinstance(tokenizer, FileTokenizer):
            # Some post-processors move a token's first character past its space.
            self.library = type(tokenizer.tokenizer).from_str(tokenizer.tokenizer.to_str())
            self.library.post_processor = None
            self.end = self.library.id_to_token(tokenizer.eot) or END_OF_TEXT
            added = self.library.get_added_tokens_decoder()
            self.special_ids |= set(added)
            self.splits_end = self.end not in {token.content for token in added.values()}
        else:
            self.splits_end = True

    def token_names(self) -> dict[str, str]:
        """What a template may name, of TOKEN_NAMES. Raises ChatError."""
        names = {"eos_token": self.end}
        if self.library:
            try:
                for name in TOKEN_NAMES:
                    text = self.tokenizer.companions.token(name)
                    names |= {} if text is None else {name: text}
            except json_files.JSONError as e:
                raise ChatError(str(e)) from None
        return names

    def plain_template(self) -> str:
        """PLAIN with this tokenizer's tokens in it."""
        begin = ""
        if self.tokenizer.bos is not None:
            begin = self.library.id_to_token(self.tokenizer.bos)
        return PLAIN.replace("BEGIN", json.dumps(begin)).replace("END", json.dumps(self.end))

    def encode(self, text: str) -> Tokens:
        """Raises ChatError."""
        pieces = text.split(self.end) if self.splits_end else [text]
        found = Tokens([], [], [])
        at = 0
        for number, piece in enumerate(pieces):
            if number:
                add(found, Tokens([self.tokenizer.eot], [0], [len(self.end)]), at)
                at += len(self.end)
            add(found, self.encode_piece(piece), at)
            at += len(piece)
        return found

    def encode_piece(self, text: str) -> Tokens:
        if self.library:
            try:
                with library_errors():
                    encoding = self.library.encode(text, add_special_tokens=False)
            except ValueError as e:
                raise ChatError(f"cannot be tokenized ({e})") from None
            starts, ends = zip(*encoding.offsets) if encoding.ids else ((), ())
            return Tokens(encoding.ids, starts, ends)
        return self.encode_bytes(text)

    def encode_bytes(self, text: str) -> Tokens:
        """With a built-in tokenizer, whose tokens are bytes of the text. A token may end inside a
        character."""
        ids = [int(i) for i in self.tokenizer.encode(text)]
        lengths = [1] * len(ids)
        if self.tokenizer.name == "gpt2":
            lengths = [len(self.tokenizer.encoding.decode_single_token_bytes(i)) for i in ids]
        ends = list(itertools.accumulate(lengths))
        # byte -> its character
        character = [n for n, letter in enumerate(text) for _ in letter.encode()]
        return Tokens(
            ids,
            [character[end - length] for end, length in zip(ends, lengths)],
            [character[end - 1] + 1 for end in ends],
        )


def add(tokens: Tokens, more: Tokens, at: int) -> None:
    """more: of text that begins at character `at`."""
    tokens.ids.extend(more.ids)
    tokens.starts.extend(at + start for start in more.starts)
    tokens.ends.extend(at + end for end in more.ends)


# --- which template -------------------------------------------------------------------------------


def open_template(choice: str, tokenizer: ChatTokenizer, copy: Path | None = None) -> ChatTemplate:
    """choice: of --chat-template. copy: of a run or a model whose tokenizer has no files, where it
    keeps its template. Raises ChatError."""
    text = None
    if choice not in ("auto", "plain"):
        where = f"--chat-template {choice}"
        text = read_text(Path(choice), where)
    elif choice == "auto":
        where = "the tokenizer's chat template"
        text = of_tokenizer(tokenizer.tokenizer)
        if text is None and copy:
            where = f"the chat template {copy}"
            text = read_text(copy, "the chat template")
    if text is None:
        where, text = "the plain chat template", tokenizer.plain_template()
    return ChatTemplate(text, where, tokenizer.token_names())


def of_tokenizer(tokenizer) -> str | None:
    """Raises ChatError."""
    try:
        if CHAT_TEMPLATE in tokenizer.files:
            return tokenizer.files[CHAT_TEMPLATE].decode()
        return tokenizer.companions.chat_template() if hasattr(tokenizer, "companions") else None
    except ValueError as e:
        raise ChatError(f"the tokenizer's chat template: {e}") from None


def read_text(path: Path, where: str) -> str:
    try:
        return json_files.read_bytes(path).decode()
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or "it is not UTF-8 text"
        raise ChatError(f"{where}: {path} cannot be read ({why})") from None


def main() -> None:
    from corpus.tokenizer import ByteTokenizer

    tokenizer = ChatTokenizer(ByteTokenizer())
    template = open_template("plain", tokenizer)
    messages = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    text, answers = template.render(messages)
    print(text)
    print(f"{len(tokenizer.encode(text).ids)} tokens; the assistant's:")
    for start, end in answers:
        print(text[start:end])


if __name__ == "__main__":
    terminal.run(main)
