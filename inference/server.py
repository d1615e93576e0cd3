"""The address: clients of OpenAI's API ask over HTTP, and the engine answers.

    POST /v1/completions, /v1/chat/completions      answers, whole or streamed (inference/api.py)
    POST /v1/embeddings                             texts as vectors
    GET  /v1/models, /health, /metrics, /           names, whether it serves, numbers, a chat page

    asyncio: a task for each request              the engine's thread
    fields -> prompts -> choices   ── choices ──>   add, cancel
    text, piece by piece           <── outputs ──   step, step, ..

A client that goes away ends its task, and the task cancels its choices. Nothing of a request is
run: chat templates come from the folders that the server was started with.

HTTP is aiohttp's: one package has the server, streams, a limit for bodies, and cancels the task of
a client that has left. Starlette would need uvicorn beside it, and a limit of our own.

    python -m inference.serve --checkpoint runs/chat

Not covered: TLS, for which a proxy stands in front; users with different rights.
"""

import asyncio
import hmac
import ipaddress
import logging
import os
import queue
import re
import secrets
import signal
import socket
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

from aiohttp import web
from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.aiohttp import make_aiohttp_handler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from base import terminal
from inference.api import ADDRESSES, ApiError, ChatCompletion, Choice, Fields, Model, Writer
from inference.engine import Engine, fail
from inference.requests import DrawOptions, Output, Request
from inference.sampling import SamplingParams, keys_of

PAGE = {"/": "page.html", "/page.js": "page.js", "/page.css": "page.css"}
# A browser runs the page's script and style, and loads nothing else.
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
POLICY += " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# Seconds until a connection that says nothing is closed.
IDLE = 75
# Nobody needs a key for these.
OPEN = {"/health", *PAGE}

REQUESTS = Counter("serve_requests", "by status of the response", ["status"])
TOKENS = Counter("serve_generated_tokens", "of answers")
PROMPTS = Counter("serve_prompt_tokens", "of prompts")
FIRST = Histogram("serve_time_to_first_token_seconds", "after the request")
BETWEEN = Histogram("serve_time_between_tokens_seconds", "of one answer")


class Server:
    """An engine behind an address."""

    def __init__(self, engine: Engine, tokenizer, models: dict[str, Model], keys: list, args):
        """models: by name, the base first. keys: of the clients that may ask; empty: all may. args:
        of inference/serve.py."""
        self.engine, self.tokenizer, self.models = engine, tokenizer, models
        self.keys, self.args = keys, args
        self.about = {"object": "model", "created": int(time.time()), "owned_by": "serve.py"}
        # Answers that have not ended, and how many there may be.
        self.open = 0
        self.most = args.max_sequences + args.queue
        # Choices to add; one that comes again is cancelled. None: the engine's thread ends.
        self.to_engine: queue.SimpleQueue[Choice | None] = queue.SimpleQueue()
        self.draining = asyncio.Event()
        self.chats = ThreadPoolExecutor(max_workers=1)
        REGISTRY.register(self)

    async def run(self, bound: socket.socket) -> None:
        """Serve until SIGTERM or Ctrl-C, and then until all answers have ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.draining.set)
        app = web.Application(client_max_size=self.args.max_body, middlewares=[self.guard])
        get, post = app.router.add_get, app.router.add_post
        for path, schema in ADDRESSES.items():
            post(path, partial(self.answer, schema))
        get("/v1/models", self.list_models)
        get("/v1/models/{name:.+}", self.list_models)
        get("/metrics", make_aiohttp_handler())
        get("/health", self.health)
        for path in PAGE:
            get(path, self.page)
        # Bytes that are no HTTP get status 400, and no traceback in the log.
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
        options = dict(access_log=None, shutdown_timeout=1, keepalive_timeout=IDLE)
        runner = web.AppRunner(app, handler_cancellation=True, **options)
        await runner.setup()
        site = web.SockSite(runner, bound, backlog=1024)
        await site.start()
        self.is_local = ipaddress.ip_address(bound.getsockname()[0]).is_loopback
        if not self.keys and not self.is_local:
            warning = f"serve.py: --host {self.args.host} without --api-key-file: anybody may ask"
            terminal.say(warning, error=True)
        steps = loop.run_in_executor(None, self.drive, loop)
        terminal.say(f"{site.name} serves {', '.join(self.models)} (process {os.getpid()})")
        await self.draining.wait()
        # A client that does not read is not waited for.
        patience = 5.0
        while self.open and patience > 0:
            await asyncio.sleep(0.02)
            patience -= 0 if self.engine.busy else 0.02
        await runner.cleanup()
        self.to_engine.put(None)
        await steps

    def drive(self, loop: asyncio.AbstractEventLoop) -> None:
        """The engine's thread: add and cancel choices, and run steps while there are any."""
        choices: dict[int, Choice] = {}
        try:
            while True:
                while not self.engine.busy or not self.to_engine.empty():
                    choice = self.to_engine.get()
                    if choice is None:
                        return self.engine.close()
                    if choice.number is None:
                        choice.number = self.engine.add(choice.request)
                        choices[choice.number] = choice
                    else:
                        self.engine.cancel(choice.number)
                        choices.pop(choice.number, None)
                news = [(choices[output.number], output) for output in self.engine.step()]
                loop.call_soon_threadsafe(deliver, news)
                for choice, output in news:
                    if output.finish:
                        del choices[choice.number]
        except Exception as e:
            fail(e)

    # --- answers ---

    async def answer(self, schema: type[Fields], request: web.Request) -> web.StreamResponse:
        """Raises ApiError."""
        if request.content_type != "application/json":
            # A page of another site could send other types without asking first.
            raise ApiError(415, "the header Content-Type must be application/json")
        async with asyncio.timeout(self.args.deadline):
            fields = schema.read(await request.read())
        model = self.model_of(fields.model)
        # To encode a long text takes seconds, and a template may take longer: completions do not
        # wait for chats.
        pool = self.chats if schema is ChatCompletion else None
        loop = asyncio.get_running_loop()
        late = ApiError(504, f"not answered within {self.args.deadline} s", None, "deadline")
        try:
            async with asyncio.timeout(self.args.deadline):
                choices = await loop.run_in_executor(pool, self.choices_of, fields, model)
        except TimeoutError:
            raise late from None
        if self.open + len(choices) > self.most:
            raise ApiError(429, f"{self.open} answers are written or wait: ask again later")
        self.open += len(choices)
        outputs = asyncio.Queue()
        for choice in choices:
            choice.outputs = outputs
            self.to_engine.put(choice)
            PROMPTS.inc(len(choice.request.prompt))
        writer = Writer(request, fields, choices, model.name)
        try:
            async with asyncio.timeout(self.args.deadline):
                while any(choice.finish is None for choice in choices):
                    choice, output = await outputs.get()
                    now = time.monotonic()
                    (BETWEEN if choice.stream.count else FIRST).observe(now - choice.time)
                    choice.time = now
                    choice.take(output)
                    await writer.write(choice)
                return await writer.end()
        except TimeoutError:
            return await writer.fail(late)
        finally:
            self.open -= len(choices)
            for choice in choices:
                if choice.finish is None:
                    self.to_engine.put(choice)

    def choices_of(self, fields: Fields, model: Model) -> list[Choice]:
        """Raises ApiError."""
        seed = secrets.randbits(31) if fields.seed is None else fields.seed
        sampling = SamplingParams(fields.temperature, fields.top_k, fields.top_p)
        of_prompt = fields.echo and fields.log_probs is not None
        ends = model.ends if isinstance(fields, ChatCompletion) else self.tokenizer.stop_ids
        longest = self.engine.longest
        choices = []
        try:
            prompts = fields.prompts(self.tokenizer, model, longest)
            if fields.n * len(prompts) > self.most:
                what = "texts" if fields.embeds else "answers"
                text = f"{fields.n * len(prompts)} {what}: at most {self.most}"
                raise ApiError(400, text, "n" if len(prompts) <= self.most else fields.asked)
            # Equal prompts get different answers.
            keys = iter(keys_of([prompt for prompt in prompts for _ in range(fields.n)], seed))
            for prompt in prompts:
                limit = fields.limit(self.args.max_tokens, longest - len(prompt))
                for key in islice(keys, fields.n):
                    draw = DrawOptions(sampling, key, fields.log_probs, of_prompt, fields.embeds)
                    request = Request(prompt, limit, draw, ends, adapter=model.adapter)
                    self.engine.check(request)
                    choices.append(Choice(len(choices), fields, request, self.tokenizer))
        except ValueError as e:
            named = re.match("temperature|top_k|top_p|max_tokens", str(e))
            code = "context_length_exceeded" if "holds" in str(e) else None
            raise ApiError(400, str(e), named[0] if named else fields.asked, code) from None
        return choices

    def model_of(self, name: str | None) -> Model:
        """The base where there is no name. Raises ApiError."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            text = f"model {name}: unknown; this server has {', '.join(self.models)}"
            raise ApiError(404, text, "model", "model_not_found")
        return self.models[name]

    # --- other addresses ---

    @web.middleware
    async def guard(self, request: web.Request, handler) -> web.StreamResponse:
        """Whoever may not come in, and whatever goes wrong, gets an error object."""
        # It stays None where the client has gone away.
        response = None
        try:
            self.admit(request)
            response = await handler(request)
        except ApiError as e:
            response = e.response()
        except web.HTTPException as e:
            response = ApiError(e.status, f"{request.path}: {e.text}").response()
        except web.RequestPayloadError as e:
            response = ApiError(400, f"the body cannot be read ({e})").response()
        except TimeoutError:
            response = ApiError(408, "the body did not come in time").response()
        except ConnectionError:
            response = ApiError(499, "the client has gone away").response()
        except Exception:
            traceback.print_exc()
            response = ApiError(500, "a fault of the server; its log has more").response()
        finally:
            REQUESTS.labels(response.status if response else 499).inc()
        return response

    def admit(self, request: web.Request) -> None:
        """Raises ApiError."""
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self.keys:
            is_known = any(hmac.compare_digest(given, b"Bearer " + key) for key in self.keys)
            if not is_known and request.path not in OPEN:
                raise ApiError(401, "no valid API key", None, "invalid_api_key")
        elif self.is_local and not self.is_own(request):
            # A web page whose name now leads to this machine.
            raise ApiError(403, f"{request.host}: ask at the address that the server has printed")
        if self.draining.is_set():
            raise ApiError(503, "the server ends")

    def is_own(self, request: web.Request) -> bool:
        """Whether the header Host names this machine."""
        try:
            return request.url.host in ("localhost", "127.0.0.1", "::1", self.args.host)
        except ValueError:
            return False

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def page(self, request: web.Request) -> web.FileResponse:
        path = Path(__file__).with_name(PAGE[request.path])
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
        return web.FileResponse(path, headers=headers)

    async def list_models(self, request: web.Request) -> web.Response:
        one = request.match_info.get("name")
        self.model_of(one)
        data = [{"id": name} | self.about for name in self.models if one in (None, name)]
        return web.json_response(data[0] if one else {"object": "list", "data": data})

    def collect(self):
        """What the engine counts."""
        scheduler, pool = self.engine.scheduler, self.engine.pool
        total = len(pool.users) - 1
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield gauge("serve_waiting", "answers that wait for room", len(scheduler.waiting))
        yield gauge("serve_running", "answers that are written", len(scheduler.running))
        yield gauge("serve_blocks_used", "of the cache", total - len(pool.free))
        yield gauge("serve_blocks", "of the cache", total)
        yield counter("serve_prefix_cache_tokens", "prompt tokens found there", scheduler.found)
        yield counter("serve_preemptions", "answers that lost their blocks", scheduler.preemptions)


def deliver(news: list[tuple[Choice, Output]]) -> None:
    """In asyncio's thread: what a step gives, to the tasks of the requests."""
    for choice, output in news:
        TOKENS.inc(output.token is not None)
        choice.outputs.put_nowait((choice, output))
