"""OpenAI's API as data: the fields of a request, and the objects that answer it.

    Completion       POST /v1/completions            a text, or token ids, that goes on
    ChatCompletion   POST /v1/chat/completions       messages, in the chat template of the model
    Choice           one of the answers to a request, while it is written

Types and ranges of fields are declared, and msgspec checks them. A field that is not here but would
change the answer is refused by name; others, such as `user`, change nothing and are ignored.

    python serve.py --checkpoint runs/chat

Not covered: tools, images, outputs that follow a grammar, penalties.
"""

import asyncio
import json
import re
import secrets
import time
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from aiohttp import web
from msgspec import Meta, Struct

from base import json_files
from inference.answers import TextStream, encode
from prompts.prompt_data import PromptError
from serve import Request
from serving.engine import LogProb, Output
from sft import Chat, message

# a field that would change the answer -> what it may be, besides null
NEUTRAL = {name: ([],) for name in ("tools", "functions", "stop_token_ids")}
NEUTRAL |= {name: (0,) for name in ("presence_penalty", "frequency_penalty", "min_p", "min_tokens")}
NEUTRAL |= {"logit_bias": ({},), "suffix": ("",), "tool_choice": ("none", "auto"), "audio": ()}
NEUTRAL |= {"response_format": ({"type": "text"},), "modalities": (["text"],), "prediction": ()}
NEUTRAL |= {"repetition_penalty": (1,), "ignore_eos": (False,), "use_beam_search": (False,)}
# as the engine names it -> as the API does
FINISH = {"end of text": "stop", "stop": "stop", "length": "length"}
Stop = Annotated[str, Meta(min_length=1, max_length=256)]


class ApiError(Exception):
    """What a client gets instead of an answer."""

    def __init__(self, status: int, text: str, param: str | None = None, code: str | None = None):
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": text, "type": kind, "param": param, "code": code}}

    def response(self) -> web.Response:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return web.json_response(self.body, status=self.status, headers=headers)


class Model(NamedTuple):
    """What a request can name as its model."""

    adapter: str | None
    # its chat template, and the token that ends an answer; without them, why
    chat: Chat | None
    end_of_turn: int | None = None
    refusal: str = ""


# --- requests -------------------------------------------------------------------------------------


class Fields(Struct, kw_only=True):
    """What requests of both kinds have. Each field may be null."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @classmethod
    def read(cls, body: bytes) -> "Fields":
        """Raises ApiError."""
        try:
            fields = json_files.parse(body, dict[str, Any], "the body")
            neutral = NEUTRAL | {"best_of": (fields.get("n") or 1,)}
            for name in neutral.keys() & fields.keys():
                if fields[name] is not None and fields[name] not in neutral[name]:
                    raise ApiError(400, f"{name}: this server does not have it; leave it out", name)
            return json_files.convert(fields, cls, "the body")
        except json_files.JSONError as e:
            # msgspec's last word is `$.prompt[0]`, or `prompt` where it is missing
            named = re.search(r"`(?:\$\.)?(\w+)[^`]*`$", str(e))
            raise ApiError(400, str(e), named and named[1]) from None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Completion(Fields):
    """A text that goes on."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None

    prefix: ClassVar = "cmpl-"
    # the whole answer, and a piece of it
    objects: ClassVar = ("text_completion", "text_completion")
    asked: ClassVar = "prompt"

    @property
    def questions(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or any(isinstance(p, int) for p in self.prompt)
        return [self.prompt] if is_one else self.prompt

    def ids(self, question: str | list[int], tokenizer, model: Model, room: int) -> list[int]:
        """The prompt of a question. Raises PromptError."""
        if isinstance(question, str):
            return encode(question, tokenizer, room)
        if not all(isinstance(token, int) for token in question):
            raise PromptError("prompt: a list has texts, or lists of tokens, or tokens")
        return question

    def limit(self, usual: int | None, rest: int) -> int:
        """Tokens of an answer. usual: where the request does not say; rest: what the context holds
        after the prompt."""
        chosen = (self.max_tokens, usual)
        return next((n for n in chosen if n is not None), 16)

    @property
    def log_probs(self) -> int | None:
        return self.logprobs

    def written(self, choice: "Choice", text: str, streams: bool) -> dict:
        return {"text": text}

    def log(self, choice: "Choice", entries: list[LogProb]) -> dict:
        log = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            top = None
            if entry.log_prob is not None:
                # where two tokens have one name, the likelier one stays
                ranked = [(entry.token, entry.log_prob), *reversed(entry.top)]
                top = {choice.name(token): log_p for token, log_p in ranked}
            values = (choice.name(entry.token), entry.log_prob, top, choice.offset)
            for column, value in zip(log.values(), values):
                column.append(value)
            choice.offset += len(choice.tokenizer.decode([entry.token]))
        return log


class Part(Struct):
    """Of a message's content."""

    type: Literal["text"]
    text: str


class Message(Struct):
    role: str
    content: str | list[Part]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatCompletion(Fields):
    """A conversation that the model answers."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    echo: ClassVar = False
    prefix: ClassVar = "chatcmpl-"
    objects: ClassVar = ("chat.completion", "chat.completion.chunk")
    asked: ClassVar = "messages"

    @property
    def questions(self) -> list[list[Message]]:
        return [self.messages]

    def ids(self, question: list[Message], tokenizer, model: Model, room: int) -> list[int]:
        """Raises ChatError, or PromptError for a model without a template."""
        if model.chat is None:
            raise PromptError(model.refusal)
        return model.chat.prompt([message(m.role, m.text) for m in question])

    def limit(self, usual: int | None, rest: int) -> int:
        chosen = (self.max_completion_tokens, self.max_tokens, usual)
        return next((n for n in chosen if n is not None), max(1, rest))

    @property
    def log_probs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def written(self, choice: "Choice", text: str, streams: bool) -> dict:
        if not streams:
            return {"message": {"role": "assistant", "content": text}}
        role = {} if choice.sent else {"role": "assistant"}
        choice.sent = True
        return {"delta": role | {"content": text}}

    def log(self, choice: "Choice", entries: list[LogProb]) -> dict:
        def item(token: int, log_p: float) -> dict:
            name, text = choice.name(token), choice.tokenizer.decode([token])
            # of half a character nobody has told the bytes
            code = list(name.encode()) if name == text else None
            return {"token": name, "logprob": log_p, "bytes": code}

        content = []
        for entry in entries:
            top = [item(*pair) for pair in entry.top]
            content.append(item(entry.token, entry.log_prob) | {"top_logprobs": top})
        return {"content": content}


# --- answers --------------------------------------------------------------------------------------


class Choice:
    """One answer, while it is written."""

    def __init__(self, index: int, fields: Fields, request: Request, tokenizer):
        self.index, self.fields, self.request, self.tokenizer = index, fields, request, tokenizer
        self.stream = TextStream(tokenizer, request.prompt, fields.stops)
        if fields.stops:
            request.stopped = partial(self.stream.detokenizer.stopped, 0)
        prompt = tokenizer.decode(request.prompt)
        self.echoed = prompt if fields.echo else ""
        # where its next token stands in prompt and answer
        self.offset = len(prompt) - len(self.echoed)
        self.entries: list[LogProb] = []
        self.finish: str | None = None
        # whether it has a token, and whether a client has a piece of it
        self.begun = self.sent = False
        # of the server: the engine's number, and where its outputs go
        self.number: int | None = None
        self.outputs: asyncio.Queue | None = None

    def take(self, output: Output) -> str:
        """Of one token. Returns text of a stream that is certain by now."""
        text = "" if self.begun else self.echoed
        self.begun = True
        if output.of_prompt is not None:
            first = LogProb(self.request.prompt[0], None, [])
            self.entries += [first, *output.of_prompt]
        if output.token is not None and self.fields.stream:
            text += self.stream.push(output.token)
        elif output.token is not None:
            # it is decoded once, at the end
            self.stream.ids.append(output.token)
        if output.log_prob:
            self.entries.append(output.log_prob)
        if output.finish:
            text += self.stream.end() if self.fields.stream else ""
            self.finish = FINISH[output.finish]
        return text

    @property
    def whole(self) -> str:
        return self.echoed + self.stream.detokenizer.text(0, self.stream.ids)

    def name(self, token: int) -> str:
        """A token as a text; one that is half a character, or has no text, by its id."""
        text = self.tokenizer.decode([token])
        return f"token_id:{token}" if not text or "\ufffd" in text else text

    def as_object(self, text: str, streams: bool = False) -> dict:
        """The answer, or a piece of it."""
        log = None
        if self.fields.log_probs is not None:
            log = self.fields.log(self, self.entries)
            self.entries = []
        written = self.fields.written(self, text, streams)
        return {"index": self.index} | written | {"logprobs": log, "finish_reason": self.finish}


def usage_of(choices: list[Choice], n: int) -> dict:
    """n: answers to one prompt."""
    prompt = sum(len(choice.request.prompt) for choice in choices[::n])
    answer = sum(len(choice.stream.ids) for choice in choices)
    counts = {"prompt_tokens": prompt, "completion_tokens": answer}
    return counts | {"total_tokens": prompt + answer}


class Writer:
    """Gives a client its answer: whole at the end, or piece by piece as server-sent events."""

    def __init__(self, request: web.Request, fields: Fields, choices: list[Choice], model: str):
        self.request, self.fields, self.choices = request, fields, choices
        self.head = {
            "id": fields.prefix + secrets.token_hex(12),
            "object": fields.objects[bool(fields.stream)],
            "created": int(time.time()),
            "model": model,
        }
        # of a stream
        self.response: web.StreamResponse | None = None

    @property
    def with_usage(self) -> bool:
        return bool((self.fields.stream_options or {}).get("include_usage"))

    async def begin(self) -> None:
        if self.fields.stream:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            self.response = web.StreamResponse(headers=headers)
            await self.response.prepare(self.request)

    async def send(self, event: dict | str) -> None:
        line = event if isinstance(event, str) else json.dumps(event)
        await self.response.write(f"data: {line}\n\n".encode())

    async def write(self, choice: Choice, text: str) -> None:
        """text: of a choice, after the text before it."""
        if self.response and (text or choice.finish):
            usage = {"usage": None} if self.with_usage else {}
            await self.send(self.head | {"choices": [choice.as_object(text, True)]} | usage)

    async def end(self) -> web.StreamResponse:
        usage = {"usage": usage_of(self.choices, self.fields.n or 1)}
        if self.response is None:
            objects = [choice.as_object(choice.whole) for choice in self.choices]
            return web.json_response(self.head | {"choices": objects} | usage)
        if self.with_usage:
            await self.send(self.head | {"choices": []} | usage)
        await self.send("[DONE]")
        return self.response

    async def fail(self, error: ApiError) -> web.StreamResponse:
        if self.response is None:
            raise error
        try:
            async with asyncio.timeout(1):
                await self.send(error.body)
        except TimeoutError:
            # this client does not read
            self.request.transport.abort()
        return self.response
