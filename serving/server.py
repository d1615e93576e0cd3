"""The address: clients of OpenAI's API ask over HTTP, and the engine answers.

    POST /v1/completions, /v1/chat/completions      answers, whole or streamed (serving/api.py)
    GET  /v1/models, /health, /metrics, /           names, whether it serves, numbers, a chat page

    asyncio: a task for each request              the engine's thread
    fields -> prompts -> choices   ── commands ─>   add, cancel
    text, piece by piece           <── outputs ──   step, step, ..

A client that goes away ends its task, and the task cancels its choices. Nothing of a request is
run: chat templates come from the folders that the server was started with.

HTTP is aiohttp's: one package has the server, streams, a limit for bodies, and cancels the task of
a client that has left. Starlette would need uvicorn beside it, and a limit of our own.

    python serve.py --checkpoint runs/chat

Not covered: TLS, for which a proxy stands in front; users with different rights.
"""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import queue
import re
import secrets
import signal
import socket
import threading
import time
import traceback
from functools import partial
from pathlib import Path

import prometheus_client as prometheus
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from base import terminal
from inference.sampling import SamplingParams, keys_of
from serve import Draw, Request
from serving.api import ApiError, ChatCompletion, Choice, Completion, Fields, Writer
from serving.engine import Engine

PAGE = (Path(__file__).parent / "page.html").read_text()
# a browser runs this script and this style, and loads nothing else
INLINE = [re.search(f"<{tag}>(.*)</{tag}>", PAGE, re.DOTALL)[1] for tag in ("script", "style")]
SCRIPT, STYLE = (base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in INLINE)
POLICY = f"script-src 'sha256-{SCRIPT}'; style-src 'sha256-{STYLE}'; connect-src 'self'"
POLICY = (
    f"default-src 'none'; {POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Metrics:
    """What Prometheus reads."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.registry = prometheus.CollectorRegistry()
        self.registry.register(self)
        own = dict(namespace="serve", registry=self.registry)
        self.requests = prometheus.Counter(
            "requests", "by status of the response", ["status"], **own
        )
        self.tokens = prometheus.Counter("generated_tokens", "of answers", **own)
        self.prompts = prometheus.Counter("prompt_tokens", "of prompts", **own)
        self.first = prometheus.Histogram("time_to_first_token_seconds", "after the request", **own)
        self.between = prometheus.Histogram("time_between_tokens_seconds", "of one answer", **own)

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


class Server:
    """An engine behind an address."""

    def __init__(self, engine: Engine, tokenizer, models: dict, keys: list, processes, args):
        """models: name -> api.Model, the base first. keys: whoever has one may ask; empty:
        everybody. processes: serving.ranks.Processes. args: of serving/command.py."""
        self.engine, self.tokenizer, self.models = engine, tokenizer, models
        self.keys, self.processes, self.args = keys, processes, args
        self.created = int(time.time())
        room = (len(engine.pool.users) - 1) * engine.pool.block_size
        # tokens of a prompt and its answer
        self.longest = min(room, engine.config.seq_length)
        self.metrics = Metrics(engine)
        # answers that have not ended, and how many there may be
        self.open = 0
        self.most = args.max_sequences + args.queue
        # functions for the engine's thread; None: it ends
        self.commands = queue.SimpleQueue()
        self.draining = asyncio.Event()

    async def run(self, bound: socket.socket) -> None:
        """Serve until SIGTERM or Ctrl-C, and then until all answers have ended."""
        self.loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.draining.set)
        for file in self.processes.files.values():
            self.loop.add_reader(file, self.processes.fail)
        thread = threading.Thread(target=self.drive, daemon=True)
        thread.start()
        app = web.Application(client_max_size=self.args.max_body, middlewares=[self.guard])
        for path, kind in (("completions", Completion), ("chat/completions", ChatCompletion)):
            app.router.add_post(f"/v1/{path}", partial(self.answer, kind))
        addresses = {"/": self.page, "/health": self.health, "/metrics": self.read_metrics}
        addresses |= dict.fromkeys(("/v1/models", "/v1/models/{name:.+}"), self.list_models)
        for path, handler in addresses.items():
            app.router.add_get(path, handler)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await runner.setup()
        host, port = bound.getsockname()[:2]
        self.is_local = ipaddress.ip_address(host).is_loopback
        host = f"[{host}]" if ":" in host else host
        await web.SockSite(runner, bound, backlog=1024).start()
        terminal.say(f"http://{host}:{port} serves {', '.join(self.models)}")
        await self.draining.wait()
        while self.open:
            await asyncio.sleep(0.02)
        await runner.cleanup()
        for file in self.processes.files.values():
            self.loop.remove_reader(file)
        self.commands.put(None)
        await asyncio.to_thread(thread.join)

    # --- the engine's thread ---

    def drive(self) -> None:
        """Run commands, and steps while there is something to do."""
        choices: dict[int, Choice] = {}
        try:
            while True:
                while not self.engine.busy or not self.commands.empty():
                    command = self.commands.get()
                    if command is None:
                        return self.engine.close()
                    command(choices)
                outputs = self.engine.step()
                self.metrics.tokens.inc(sum(output.token is not None for output in outputs))
                if outputs:
                    news = [(choices[output.number], output) for output in outputs]
                    self.loop.call_soon_threadsafe(deliver, news)
                for output in outputs:
                    if output.finish:
                        del choices[output.number]
        except Exception as e:
            self.loop.call_soon_threadsafe(self.processes.fail, e)

    def add(self, choice: Choice, choices: dict[int, Choice]) -> None:
        choice.number = self.engine.add(choice.request)
        choices[choice.number] = choice

    def cancel(self, choice: Choice, choices: dict[int, Choice]) -> None:
        self.engine.cancel(choice.number)
        choices.pop(choice.number, None)

    # --- answers ---

    async def answer(self, kind: type[Fields], request: web.Request) -> web.StreamResponse:
        """Raises ApiError."""
        if request.content_type != "application/json":
            # a page of another site could send other types without asking first
            raise ApiError(415, f"{request.content_type}: application/json would fit")
        fields = kind.read(await request.read())
        choices = self.choices_of(fields)
        if self.open + len(choices) > self.most:
            raise ApiError(429, f"{self.open} answers are written or wait: ask again later")
        self.open += len(choices)
        writer = Writer(request, fields, choices, fields.model or next(iter(self.models)))
        try:
            async with asyncio.timeout(self.args.deadline):
                await writer.begin()
                await self.follow(choices, writer)
                return await writer.end()
        except TimeoutError:
            late = ApiError(504, f"not answered within {self.args.deadline} s", None, "deadline")
            return await writer.fail(late)
        finally:
            self.open -= len(choices)
            for choice in choices:
                if choice.finish is None and choice.outputs:
                    self.commands.put(partial(self.cancel, choice))

    def choices_of(self, fields: Fields) -> list[Choice]:
        """Raises ApiError."""
        model = self.model_of(fields.model)
        count = (fields.n or 1) * len(fields.questions)
        if count > self.most:
            raise ApiError(400, f"{count} answers: at most {self.most}", "n")
        seed = secrets.randbits(31) if fields.seed is None else fields.seed
        ends = self.tokenizer.stop_ids
        if isinstance(fields, ChatCompletion):
            ends = (*ends, model.end_of_turn)
        given = (fields.temperature, fields.top_k, fields.top_p)
        pairs = zip(given, SamplingParams())
        sampling = SamplingParams(*(usual if own is None else own for own, usual in pairs))
        of_prompt = bool(fields.echo) and fields.log_probs is not None
        choices = []
        try:
            for question in fields.questions:
                prompt = fields.ids(question, self.tokenizer, model, self.longest)
                limit = fields.limit(self.args.usual_tokens, self.longest - len(prompt))
                for key in keys_of([prompt] * (fields.n or 1), seed):
                    draw = Draw(sampling, key, fields.log_probs, of_prompt)
                    request = Request(prompt, limit, draw, ends, adapter=model.adapter)
                    self.engine.check(request)
                    choices.append(Choice(len(choices), fields, request, self.tokenizer))
        except ValueError as e:
            named = re.match("temperature|top_k|top_p|max_tokens", str(e))
            code = "context_length_exceeded" if "holds" in str(e) else None
            raise ApiError(400, str(e), named[0] if named else fields.asked, code) from None
        return choices

    def model_of(self, name: str | None):
        name = next(iter(self.models)) if name is None else name
        if name not in self.models:
            text = f"model {name}: there is {', '.join(self.models)}"
            raise ApiError(404, text, "model", "model_not_found")
        return self.models[name]

    async def follow(self, choices: list[Choice], writer: Writer) -> None:
        """Write what the engine gives, until all choices have ended."""
        outputs = asyncio.Queue()
        last = dict.fromkeys(choices, time.monotonic())
        for choice in choices:
            choice.outputs = outputs
            self.commands.put(partial(self.add, choice))
            self.metrics.prompts.inc(len(choice.request.prompt))
        while any(choice.finish is None for choice in choices):
            choice, output = await outputs.get()
            now = time.monotonic()
            histogram = self.metrics.between if choice.stream.ids else self.metrics.first
            histogram.observe(now - last[choice])
            last[choice] = now
            await writer.write(choice, choice.take(output))

    # --- other addresses ---

    @web.middleware
    async def guard(self, request: web.Request, handler) -> web.StreamResponse:
        """Whoever may not come in, and whatever goes wrong, gets an error object."""
        # it stays None where the client has gone away
        response = None
        try:
            self.admit(request)
            response = await handler(request)
        except ApiError as e:
            response = e.response()
        except web.HTTPException as e:
            response = ApiError(e.status, f"{request.path}: {e.text}").response()
        except ConnectionError:
            response = ApiError(499, "the client has gone away").response()
        except Exception:
            traceback.print_exc()
            response = ApiError(500, "a fault of the server; its log has more").response()
        finally:
            self.metrics.requests.labels(response.status if response else 499).inc()
        return response

    def admit(self, request: web.Request) -> None:
        """Raises ApiError."""
        word = request.headers.get("Authorization", "").removeprefix("Bearer ")
        word = word.encode(errors="surrogateescape")
        if self.keys:
            is_known = any(hmac.compare_digest(word, key) for key in self.keys)
            if not is_known and request.path not in ("/", "/health"):
                raise ApiError(401, "no valid API key", None, "invalid_api_key")
        elif self.is_local and request.url.host not in ("localhost", "127.0.0.1", "::1"):
            # a web page whose name now leads to this machine
            raise ApiError(403, f"{request.host}: ask at the address that the server has printed")
        if self.draining.is_set():
            raise ApiError(503, "the server ends")

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def page(self, request: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return web.Response(text=PAGE, content_type="text/html", headers=headers)

    async def read_metrics(self, request: web.Request) -> web.Response:
        text = prometheus.generate_latest(self.metrics.registry)
        return web.Response(body=text, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})

    async def list_models(self, request: web.Request) -> web.Response:
        one = request.match_info.get("name")
        if one:
            self.model_of(one)
        about = {"object": "model", "created": self.created, "owned_by": "serve.py"}
        data = [{"id": name} | about for name in self.models if one in (None, name)]
        return web.json_response(data[0] if one else {"object": "list", "data": data})


def deliver(news: list) -> None:
    """In asyncio's thread: what a step gives, to the tasks of the requests."""
    for choice, output in news:
        choice.outputs.put_nowait((choice, output))
