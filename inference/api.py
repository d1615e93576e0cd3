"""OpenAI's API as data: the fields of a request, and the objects that answer it.

    Completion       POST /v1/completions            a text, or token ids, that goes on
    ChatCompletion   POST /v1/chat/completions       messages, in the chat template of the model
    Embedding        POST /v1/embeddings             a text, or token ids, as a vector
    Choice           one of the answers to a request, while it is written
    Writer           sends the choices, as one object or as a stream of pieces

Types and ranges of fields are declared, and msgspec checks them. Any other one is refused by name,
unless it is in IGNORED, or has a value of NEUTRAL.

    python -m inference.serve --checkpoint runs/chat

Not covered: tools, images, outputs that follow a grammar, penalties.
"""

import asyncio
import base64
import contextlib
import copy
import json
import re
import secrets
import time
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch.nn.functional as F
from aiohttp import web
from msgspec import Meta, Struct, field, structs
from torch import Tensor

from base import json_files
from finetune.chat import Chat
from finetune.chat_template import ChatError
from inference.adapted import Adapters
from inference.answers import TextStream, encode, unfinished
from inference.loading import find_chat
from inference.requests import Output, Request
from inference.sampling import LogProb
from prompt_tuning import PromptError

# Fields that do not change the answer: who asks, what is kept of it, how soon it comes.
IGNORED = {"user", "safety_identifier", "metadata", "store", "request_id", "service_tier"}
IGNORED |= {"priority", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
# It is about calls of tools, which are refused.
IGNORED |= {"parallel_tool_calls"}
# Fields that would change it -> the values that do not.
NEUTRAL = {name: ([],) for name in ("tools", "functions", "stop_token_ids", "bad_words")}
NEUTRAL |= {name: (0,) for name in ("presence_penalty", "frequency_penalty", "min_p", "min_tokens")}
NEUTRAL |= {name: (1,) for name in ("repetition_penalty", "length_penalty", "typical_p")}
NEUTRAL |= {name: (False,) for name in ("ignore_eos", "use_beam_search", "return_token_ids")}
NEUTRAL |= {name: (False,) for name in ("echo", "include_stop_str_in_output")}
NEUTRAL |= {"return_tokens_as_token_ids": (False,)}
NEUTRAL |= {"skip_special_tokens": (True,), "spaces_between_special_tokens": (True,)}
NEUTRAL |= {"logit_bias": ({},), "suffix": ("",), "tool_choice": ("none", "auto")}
NEUTRAL |= {"response_format": ({"type": "text"},), "modalities": (["text"],)}
Texts = str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
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

    name: str
    adapter: str | None
    # Its chat template, or why there is none.
    chat: Chat | str
    # The tokens that end an answer in a chat.
    ends: tuple[int, ...] = ()


def find_models(base: str, checkpoint: str, tokenizer, adapters: Adapters) -> dict[str, Model]:
    """By name, the base first. Raises CheckpointError."""
    models = {}
    for adapter in (None, *adapters.names):
        name = adapter or base
        # An adapter without a name is in the base.
        opened = adapters.opened.get(adapter or "")
        try:
            chat = find_chat(checkpoint, tokenizer, [opened.path] if opened else [])
            models[name] = Model(name, adapter, chat, (*tokenizer.stop_ids, chat.end_of_turn()))
        except ChatError as e:
            models[name] = Model(name, adapter, str(e))
    return models


# --- requests -------------------------------------------------------------------------------------


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    # Bytes that hide how long a piece is; none are added here.
    include_obfuscation: bool = False


class Fields(Struct, kw_only=True):
    """What both requests have. A field that is null counts as left out."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    n: Annotated[int, Meta(ge=1)] = 1
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    # The fields that a request may have, where it may not have all; whether it asks for a vector.
    names: ClassVar[set[str]] = set()
    embeds: ClassVar = False

    @classmethod
    def read(cls, body: bytes) -> "Fields":
        """Raises ApiError."""
        try:
            fields = json_files.parse(body, dict[str, Any], "the body")
            known = cls.names or {each.encode_name for each in structs.fields(cls)}
            neutral = NEUTRAL | {"best_of": (fields.get("n") or 1,)}
            for name, value in list(fields.items()):
                if value is None or name in IGNORED or value in neutral.get(name, ()):
                    del fields[name]
                elif name not in known:
                    raise ApiError(400, f"{name}: this server does not have it; leave it out", name)
            return json_files.convert(fields, cls, "the body")
        except json_files.JSONError as e:
            # The last words of msgspec are: at `$.prompt[0]`, or: field `prompt`.
            named = re.search(r"(?:at `\$\.|field `)(\w+)[^`]*`$", str(e))
            raise ApiError(400, str(e), named and named[1]) from None

    def limit(self, usual: int | None, rest: int) -> int:
        """Tokens of an answer. usual: of --max-tokens; rest: what the context holds after the
        prompt."""
        chosen = (self.max_completion_tokens, self.max_tokens, usual, self.usual, max(1, rest))
        return next(n for n in chosen if n is not None)


class Completion(Fields):
    """A text that goes on."""

    prompt: Texts
    echo: bool = False
    log_probs: Annotated[int, Meta(ge=0, le=5)] | None = field(name="logprobs", default=None)

    # The whole answer, and a piece of it.
    objects: ClassVar = ("text_completion", "text_completion")
    asked: ClassVar = "prompt"
    # max_tokens where neither the request nor --max-tokens says.
    usual: ClassVar = 16

    def prompts(self, tokenizer, model: Model, longest: int) -> list[list[int]]:
        """One for each text that goes on. Raises PromptError."""
        texts = getattr(self, self.asked)
        several = [texts] if isinstance(texts, str) else texts
        types = {type(one) for one in several}
        if len(types) > 1:
            raise PromptError(f"{self.asked}: a list has texts, or lists of tokens, or tokens")
        if types == {str}:
            return [encode(text, tokenizer, longest) for text in several]
        return [several] if types == {int} else several

    def written(self, choice: "Choice") -> dict:
        return {"text": choice.text}

    def log(self, choice: "Choice") -> dict:
        log = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, log_p, top in choice.entries:
            names = {choice.name(token): log_p}
            for other, p in top:
                # Two tokens may have one name, as the letter a and the byte 61.
                name = choice.name(other)
                names[f"token_id:{other}" if name in names and other != token else name] = p
            # Nobody predicts the first token of a prompt.
            known = None if log_p is None else names
            values = (choice.name(token), log_p, known, choice.offset)
            for column, value in zip(log.values(), values):
                column.append(value)
            choice.offset += len(choice.places.push(token))
        return log


class Embedding(Fields):
    """A text as a vector of length 1: the mean of its tokens' states behind the last norm."""

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"

    echo: ClassVar = False
    log_probs: ClassVar = None
    objects: ClassVar = ("list",)
    asked: ClassVar = "input"
    names: ClassVar = {"model", "input", "encoding_format"}
    embeds: ClassVar = True
    prompts = Completion.prompts

    def limit(self, usual: int | None, rest: int) -> int:
        return 0

    def written(self, choice: "Choice") -> dict:
        v = F.normalize(choice.states, dim=0).float().numpy()
        coded = self.encoding_format == "base64"
        v = base64.b64encode(v.astype("<f4")).decode() if coded else v.tolist()
        return {"object": "embedding", "embedding": v}


class Part(Struct, forbid_unknown_fields=True):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True):
    """What a chat template may use of a message."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    # The openai package gives back an answer with these.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list, Meta(max_length=0)] | None = None

    def __post_init__(self):
        if self.content is None and not self.tool_calls:
            raise ValueError("a message without content")

    def plain(self) -> dict:
        """As transformers has it: text, and a call's arguments as an object."""
        fields = structs.asdict(self)
        del fields["annotations"]
        if isinstance(self.content, list):
            fields["content"] = "".join(part.text for part in self.content)
        for call in self.tool_calls or []:
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                with contextlib.suppress(ValueError, RecursionError):
                    function["arguments"] = json.loads(function["arguments"])
        return {name: value for name, value in fields.items() if value is not None}


class ChatCompletion(Fields):
    """A conversation that the model answers."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    # What the template reads beside the messages, such as enable_thinking.
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    echo: ClassVar = False
    objects: ClassVar = ("chat.completion", "chat.completion.chunk")
    asked: ClassVar = "messages"
    # An answer may fill the context.
    usual: ClassVar = None

    def __post_init__(self):
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs, true")

    def prompts(self, tokenizer, model: Model, longest: int) -> list[list[int]]:
        """Raises ChatError, or PromptError for a model without a template."""
        if isinstance(model.chat, str):
            raise PromptError(model.chat)
        template = copy.copy(model.chat.template)
        template.tokens = template.tokens | self.chat_template_kwargs
        messages = [each.plain() for each in self.messages]
        if self.continue_final_message:
            text = unfinished(template, messages)
        else:
            text = template.render(messages, ask=self.add_generation_prompt is not False).text
        ids = model.chat.tokenizer.encode(text).ids
        if not ids:
            raise PromptError(f"{template.where} makes no text of these messages")
        return [ids]

    @property
    def log_probs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def written(self, choice: "Choice") -> dict:
        # Only the first piece names the role.
        role = {} if choice.is_sent else {"role": "assistant"}
        return {"delta" if self.stream else "message": role | {"content": choice.text}}

    def log(self, choice: "Choice") -> dict:
        def item(token: int, log_p: float) -> dict:
            code = list(choice.stream.bytes.of(token)) or None
            return {"token": choice.name(token), "logprob": log_p, "bytes": code}

        content = []
        for token, log_p, top in choice.entries:
            likeliest = [item(*pair) for pair in top]
            content.append(item(token, log_p) | {"top_logprobs": likeliest})
        return {"content": content}


ADDRESSES = {"/v1/completions": Completion, "/v1/chat/completions": ChatCompletion}
ADDRESSES |= {"/v1/embeddings": Embedding}

# --- answers --------------------------------------------------------------------------------------


class Choice:
    """One answer, while it is written."""

    def __init__(self, index: int, fields: Fields, request: Request, tokenizer):
        self.index, self.fields, self.request = index, fields, request
        stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop
        self.stream = TextStream(tokenizer, request.prompt, stops)
        if stops:
            # The engine's thread has its own.
            request.stopped = TextStream(tokenizer, request.prompt, stops).stopped
        # What the client does not have yet: text, and log-probabilities.
        self.text = self.stream.prompt if fields.echo else ""
        self.entries: list[LogProb] = []
        # The tokens in `entries`, and where the next one stands in the text of prompt and answer.
        self.places = TextStream(tokenizer, [] if fields.echo else request.prompt)
        self.offset = len(self.places.prompt)
        self.finish: str | None = None
        self.states: Tensor | None = None
        self.is_sent = False
        # The server keeps the engine's number, where outputs go, and when the newest one came.
        self.number: int | None = None
        self.outputs: asyncio.Queue | None = None
        self.time = time.monotonic()

    def take(self, output: Output) -> None:
        """Add what a step gave."""
        if output.of_prompt is not None:
            first = LogProb(self.request.prompt[0], None, [])
            self.entries += [first, *output.of_prompt]
        if output.token is not None:
            if output.log_prob:
                self.entries.append(output.log_prob)
            self.text += self.stream.push(output.token)
        self.states = output.states
        if output.finish:
            self.text += self.stream.end()
            self.finish = "length" if output.finish == "length" else "stop"

    def name(self, token: int) -> str:
        """A token as a text; one that is half a character, or has no text, by its id."""
        text = self.stream.bytes.of(token).decode(errors="ignore")
        is_whole = text.encode() == self.stream.bytes.of(token)
        return text if text and is_whole else f"token_id:{token}"

    def as_object(self) -> dict:
        """The answer, or the next piece of it."""
        log = self.fields.log(self) if self.fields.log_probs is not None else None
        written = self.fields.written(self)
        self.text, self.entries, self.is_sent = "", [], True
        return {"index": self.index} | written | {"logprobs": log, "finish_reason": self.finish}


class Writer:
    """Gives a client its answer: whole at the end, or piece by piece as server-sent events."""

    def __init__(self, request: web.Request, fields: Fields, choices: list[Choice], model: str):
        self.request, self.fields, self.choices = request, fields, choices
        self.head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": fields.objects[fields.stream]}
        self.head |= {"created": int(time.time()), "model": model}
        self.with_usage = fields.stream_options.include_usage
        # A stream that has begun.
        self.response: web.StreamResponse | None = None

    async def send(self, event: dict) -> None:
        if self.response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            self.response = web.StreamResponse(headers=headers)
            await self.response.prepare(self.request)
        await self.response.write(f"data: {json.dumps(event)}\n\n".encode())

    async def write(self, choice: Choice) -> None:
        """What a choice has by now."""
        if self.fields.stream and (choice.text or choice.finish):
            usage = {"usage": None} if self.with_usage else {}
            await self.send(self.head | {"choices": [choice.as_object()]} | usage)

    async def end(self) -> web.StreamResponse:
        prompt = sum(len(choice.request.prompt) for choice in self.choices[:: self.fields.n])
        answer = sum(choice.stream.count for choice in self.choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": answer}
        usage = {"usage": counts | {"total_tokens": prompt + answer}}
        if self.fields.embeds:
            counts = {"prompt_tokens": prompt, "total_tokens": prompt}
            data = [{"index": c.index} | self.fields.written(c) for c in self.choices]
            answer = {"object": "list", "data": data, "model": self.head["model"], "usage": counts}
            return web.json_response(answer)
        if not self.fields.stream:
            objects = [choice.as_object() for choice in self.choices]
            return web.json_response(self.head | {"choices": objects} | usage)
        if self.with_usage:
            await self.send(self.head | {"choices": []} | usage)
        await self.response.write(b"data: [DONE]\n\n")
        return self.response

    async def fail(self, error: ApiError) -> web.StreamResponse:
        if self.response is None:
            raise error
        try:
            async with asyncio.timeout(1):
                await self.send(error.body)
        except TimeoutError:
            # This client does not read.
            self.request.transport.abort()
        return self.response
