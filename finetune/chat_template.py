r"""Chat templates: a list of messages becomes one text, and the text becomes tokens.

    [{"role": "user", "content": "2 + 3?"},       <|im_start|>user\n2 + 3?<|im_end|>\n
     {"role": "assistant", "content": "5"}]       <|im_start|>assistant\n5<|im_end|>\n

A language model reads one text, not a list. Each chat model was trained on one form of that text,
and answers best in the same form. So its tokenizer has the form as a chat template, written in the
template language jinja: chat_template.jinja, or `chat_template` in tokenizer_config.json.

A template is a program, and it may come from somebody else: it runs in jinja's sandbox, where it
reaches no file and no module; its time and its memory are not limited. The options, and what it may
call, are those of `transformers`. Then the text is tokenized. The text of a special token,
<|im_end|>, becomes one id.

To ask, a template is rendered with add_generation_prompt, and without the answer: the text ends
where the assistant begins to write. A template may mark the text that the assistant writes:

    {% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

    python -m finetune.chat_template                  a conversation in the plain template

Not covered: tools and documents, contents that are not text.
"""

import datetime
import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from base import json_files, terminal
from base.errors import InputError
from run.tokenizer import (
    CHAT_TEMPLATE,
    CHAT_TEMPLATE_JSON,
    FileTokenizer,
    TokenizerFolder,
    library_errors,
)

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
# The special tokens that every tokenizer may have.
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
TOKEN_NAMES += ("mask_token",)
# The end of text of a tokenizer that has no text for it.
END_OF_TEXT = "<|endoftext|>"
# OPEN and CLOSE stand around what {% generation %} gives, until the text is complete. MARK is a
# content that is in no conversation. Unicode has no such characters.
OPEN, CLOSE, MARK = "\ufdd0", "\ufdd1", "\ufdd2"
# Characters of an error that a template raises.
LONGEST_ERROR = 1000
# for the count of what is skipped
NO_SPAN = "no answer found"


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


def raise_exception(message: str):
    raise TemplateError(message)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """jinja's own filter would escape HTML."""
    options = dict(ensure_ascii=ensure_ascii, indent=indent, separators=separators)
    return json.dumps(value, sort_keys=sort_keys, **options)


class Rendered(NamedTuple):
    text: str
    # (first character, end) of each {% generation %} block; None: the template has no such blocks
    answers: list[tuple[int, int]] | None


class ChatTemplate:
    """A template that can be rendered."""

    def __init__(self, text: str, where: str, tokens: dict[str, str]):
        """where: for messages. tokens: the special tokens that it may name. Raises ChatError."""
        self.text, self.where, self.tokens = text, where, tokens
        # templates of images iterate over a content, and take the letters of a text for its parts
        self.in_parts = False
        # what strftime_now tells, in ISO format; None: now
        self.date: str | None = None
        self.asks_for_date = "strftime_now" in text
        self.program, self.marks_answers = self.compile()
        self.in_parts = not self.writes_contents() and self.writes_contents(in_parts=True)

    def compile(self) -> tuple[Template, bool]:
        """(the template, whether it has {% generation %} blocks). Raises ChatError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = to_json
        functions = dict(raise_exception=raise_exception, strftime_now=self.strftime_now)
        environment.globals |= functions
        try:
            calls = environment.parse(self.text).find_all(nodes.CallBlock)
            marks = any(isinstance(block.call.node, nodes.ExtensionAttribute) for block in calls)
            return environment.from_string(self.text), marks
        except Exception as e:
            # jinja computes constants here, which may raise what Python raises
            raise self.refused(e) from None

    def strftime_now(self, form: str) -> str:
        now = datetime.datetime.now()
        return (datetime.datetime.fromisoformat(self.date) if self.date else now).strftime(form)

    def refused(self, e: Exception, note: str = "") -> ChatError:
        where, text = self.where, str(e)
        if isinstance(e, TemplateSyntaxError):
            where, text = f"{where}, line {e.lineno}", e.message
        elif not isinstance(e, TemplateError):
            text = f"{type(e).__name__}: {e}".removesuffix(": ")
        return ChatError(f"{where}: {text[:LONGEST_ERROR]}{note}", "refused by the template")

    def writes_contents(self, in_parts: bool = False) -> bool:
        self.in_parts = in_parts
        try:
            return MARK in self.render([{"role": "user", "content": MARK}], ask=True).text
        except ChatError:
            return False

    def render(self, messages: list[dict], ask: bool = False) -> Rendered:
        """ask: the messages end with a question, and the text with the beginning of the assistant's
        next turn. Raises ChatError."""
        # as transformers does: templates ask whether a key is there
        messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
        for each in messages:
            # it is for the loss
            each.pop("weight", None)
            if self.in_parts and "content" in each:
                each["content"] = [{"type": "text", "text": each["content"]}]
        try:
            said = json.dumps([messages, self.tokens], ensure_ascii=False)
            if OPEN in said or CLOSE in said:
                raise ChatError("a message has U+FDD0 or U+FDD1 in it, which are no characters")
        except RecursionError:
            raise ChatError("a message is nested too deeply") from None
        fields = dict(messages=messages, tools=None, documents=None, add_generation_prompt=ask)
        try:
            marked = self.program.render(**fields, **self.tokens)
        except Exception as e:
            # a template can raise whatever Python raises; a text for asking has no answer yet
            note = " (add_generation_prompt is true: there is no answer yet)" if ask else ""
            raise self.refused(e, note) from None
        try:
            text, answers = without_marks(marked)
        except ValueError:
            rule = "has a {% generation %} block inside another one, or cuts the text of a block"
            raise ChatError(f"{self.where}: {rule}") from None
        return Rendered(text, answers if self.marks_answers else None)

    def around(self, messages: list[dict], n: int, ask: bool = False) -> tuple[str, str]:
        """The text before and behind the content of message n. Raises ChatError."""
        marked = [*messages[:n], messages[n] | {"content": MARK}, *messages[n + 1 :]]
        pieces = self.render(marked, ask).text.split(MARK)
        if len(pieces) != 2:
            times = f"{len(pieces) - 1} times, so nothing shows where it is"
            raise ChatError(f"{self.where} writes the content of message {n + 1} {times}", NO_SPAN)
        return pieces[0], pieces[1]


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
    """A tokenizer of run/tokenizer.py, for texts with special tokens in them."""

    def __init__(self, tokenizer):
        """Raises ChatError for a tokenizer without an end of text."""
        self.tokenizer = tokenizer
        if tokenizer.eot is None:
            raise ChatError("the model has no end-of-text token, with which an answer would end")
        self.special_ids = {tokenizer.eot, *tokenizer.stop_ids}
        self.library = None
        self.end = END_OF_TEXT
        added = {}
        if isinstance(tokenizer, FileTokenizer):
            # Some post-processors move a token's first character past its space.
            self.library = type(tokenizer.tokenizer).from_str(tokenizer.tokenizer.to_str())
            self.library.post_processor = None
            self.end = self.library.id_to_token(tokenizer.eot) or END_OF_TEXT
            added = self.library.get_added_tokens_decoder()
        self.special_ids |= set(added)
        self.splits_end = self.end not in {token.content for token in added.values()}

    def token_names(self) -> dict[str, str]:
        """What a template may name. Raises JSONError."""
        named = template_names(self.tokenizer.beside) if self.library else {}
        return {"eos_token": self.end} | named

    def plain_template(self) -> str:
        """PLAIN with this tokenizer's tokens in it."""
        begin = ""
        if self.tokenizer.bos is not None:
            begin = self.library.id_to_token(self.tokenizer.bos)
        return PLAIN.replace("BEGIN", json.dumps(begin)).replace("END", json.dumps(self.end))

    def encode(self, text: str) -> Tokens:
        """Raises ChatError."""
        pieces = text.split(self.end) if self.splits_end else [text]
        found, at = Tokens([], [], []), 0
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
        starts = [character[end - length] for end, length in zip(ends, lengths)]
        return Tokens(ids, starts, [character[end - 1] + 1 for end in ends])


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
    """The text of the template that the tokenizer's files have. Raises ChatError."""
    try:
        if CHAT_TEMPLATE in tokenizer.files:
            return tokenizer.files[CHAT_TEMPLATE].decode()
        return template_beside(tokenizer.beside) if hasattr(tokenizer, "beside") else None
    except ValueError as e:
        raise ChatError(f"the tokenizer's chat template: {e}") from None


def template_beside(beside: TokenizerFolder) -> str | None:
    """The text of the template in other files than CHAT_TEMPLATE; of several, the one called
    default. Raises JSONError, or UnicodeDecodeError."""
    where = f"{beside.folder}/tokenizer_config.json: chat_template"
    value = beside.with_names.get("chat_template")
    # name -> text
    named = {Path(name).stem: beside.files[name].decode() for name in beside.files if "/" in name}
    if isinstance(value, list):
        listed = json_files.convert(value, list[dict[str, str]], where)
        named = {each.get("name", ""): each.get("template") for each in listed} | named
        value = None
    value = named.get("default", value)
    if value is None and CHAT_TEMPLATE_JSON in beside.files:
        where = f"{beside.folder}/{CHAT_TEMPLATE_JSON}"
        value = json_files.parse(beside.files[CHAT_TEMPLATE_JSON], dict, where)
        value = value.get("chat_template")
    if value is None and named:
        there = f"the chat templates {' and '.join(sorted(named))}, none of them called default"
        rule = "choose one with --chat-template FILE"
        raise json_files.JSONError(f"{beside.folder} has {there}; {rule}")
    return json_files.convert(value, str | None, where)


def template_names(beside: TokenizerFolder) -> dict[str, str]:
    """Name -> text of the special tokens that a chat template may use, as in transformers.
    Raises JSONError."""
    fields = beside.with_names
    named = {k: v for k, v in fields.items() if k.endswith("_token") and k not in TOKEN_NAMES}
    own = {k: v for k, v in named.items() if isinstance(v, str | dict)}
    # A dictionary of names, or a list of tokens without any.
    extra = fields.get("extra_special_tokens")
    own |= extra if isinstance(extra, dict) else {}
    if not own:
        where = f"{beside.folder}/tokenizer_config.json: model_specific_special_tokens"
        own = fields.get("model_specific_special_tokens") or {}
        own = json_files.convert(own, dict[str, Any], where)
    own = {name: fields.get(name) for name in TOKEN_NAMES} | own
    texts = {name: beside.text_of(token, name) for name, token in own.items()}
    return {name: text for name, text in texts.items() if text is not None}


def read_text(path: Path, where: str) -> str:
    try:
        return json_files.read_bytes(path).decode()
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or "it is not UTF-8 text"
        raise ChatError(f"{where}: {path} cannot be read ({why})") from None


def main() -> None:
    from run.tokenizer import ByteTokenizer

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
