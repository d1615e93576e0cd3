"""inference/serve.py's address, asked by the clients that people have: the `openai` package, curl,
lm-eval's local-completions, a browser. Its answers are those of generate.py."""

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import processes
import pytest
import serving_load
import small_run
import test_evaluate
import torch
from parity import again

import generate
from inference import serve
from inference.loading import load_model
from run.tokenizer import make_tokenizer

ROOT = Path(__file__).parent.parent

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("prometheus_client", reason="pyproject.toml names it")

KEY = "correct horse"
PROMPTS = [f"{word} {n}" for n, word in enumerate(["The quick", "hello", "def add", "Größe"] * 8)]


# --- servers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, in which the tests of this file run."""
    pytest.importorskip("transformers")
    pytest.importorskip("openai", reason="pyproject.toml names it")
    folder = tmp_path_factory.mktemp("serving")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # long texts can be stopped half way
        patch.setattr(test_evaluate, "CONTEXT", 1024)
        test_evaluate.save_model(Path("chat"), begins=False)
        (folder / "key").write_text(f"another\n{KEY}\n")
        yield folder


class Address:
    """A server in a process of its own."""

    def __init__(self, *flags: str, world: int = 1, **environment: str):
        argv = ["inference.serve", "--port", "0", *flags]
        self.ranks = processes.start_ranks(world, argv)
        if world == 1:
            self.ranks = [processes.start(argv, **environment)]

    def wait(self) -> "Address":
        self.ranks[0].wait_for("http://")
        self.url = self.ranks[0].stdout.split()[0]
        return self

    def client(self, key: str = KEY, kind: str = "OpenAI"):
        import openai

        return getattr(openai, kind)(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def get(self, path: str) -> str:
        headers = {"Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.read().decode()

    def metric(self, name: str) -> float:
        return float(re.search(rf"^serve_{name} (.*)$", self.get("/metrics"), re.MULTILINE)[1])

    def wait_until(self, name: str, value: float) -> None:
        for _ in range(500):
            if self.metric(name) == value:
                return
            time.sleep(0.01)
        raise AssertionError(f"{name} is {self.metric(name)}, not {value}")

    def end(self) -> None:
        for rank in self.ranks:
            if rank.returncode is None:
                rank.process.kill()


@pytest.fixture(scope="module")
def servers(place):
    """One that is open to all, and one that is strict, which start together."""
    both = [
        Address("--checkpoint", "chat"),
        Address(
            *("--checkpoint", "chat", "--max-sequences", "2", "--queue", "14", "--deadline", "1"),
            *("--max-body", "3000", "--api-key-file", "key"),
        ),
    ]
    yield [server.wait() for server in both]
    for server in both:
        server.end()


@pytest.fixture(scope="module")
def server(servers):
    return servers[0]


@pytest.fixture(scope="module")
def strict(servers):
    return servers[1]


@pytest.fixture(scope="module")
def endless(server):
    """A request that is written for long: greedy decoding from here does not end."""
    for prompt in PROMPTS:
        fields = dict(prompt=prompt, max_tokens=1000, temperature=0)
        answer = server.client().completions.create(model="chat", **fields)
        if answer.choices[0].finish_reason == "length":
            return fields | {"n": 16}
    raise AssertionError("every text ends")


def written(place, capsys, records: list[dict], *flags: str) -> list[dict]:
    """What generate.py writes for the lines of a file."""
    small_run.write_lines(place / "prompts.jsonl", records)
    capsys.readouterr()
    argv = ["--checkpoint", "chat", "--prompt-file", "prompts.jsonl", "--temperature", "1", *flags]
    # a later --checkpoint wins
    assert generate.main(argv) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


FINISH = {"end of text": "stop", "stop": "stop", "length": "length"}


# --- the openai package ---------------------------------------------------------------------------


def test_completions_are_those_of_generate(place, server, capsys):
    """Plain and streamed, several of one prompt, up to a stop string."""
    ask = dict(
        model="chat", prompt="The quick", max_tokens=60, seed=5, n=3, extra_body={"top_k": 30}
    )
    flags = ["--max-tokens", "60", "--seed", "5", "--top-k", "30"]
    expected = written(place, capsys, [{"prompt": "The quick"}] * 3, *flags)
    client = server.client()
    found = client.completions.create(**ask)
    assert [choice.text for choice in found.choices] == [line["text"] for line in expected]
    assert len({line["text"] for line in expected}) == 3
    finishes = [FINISH[line["finish"]] for line in expected]
    assert [choice.finish_reason for choice in found.choices] == finishes
    assert found.usage.completion_tokens == sum(line["tokens"] for line in expected)
    texts = ["", "", ""]
    usage = []
    pieces = 0
    for piece in client.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    ):
        pieces += 1
        usage.append(piece.usage)
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == [line["text"] for line in expected] and pieces > 60
    assert usage[-1] == found.usage and not any(usage[:-1])
    stop = expected[0]["text"][10:12]
    stopped = client.completions.create(**ask, stop=["never", stop])
    lines = written(place, capsys, [{"prompt": "The quick"}] * 3, *flags, "--stop", stop)
    assert [choice.text for choice in stopped.choices] == [line["text"] for line in lines]
    assert stopped.choices[0].finish_reason == "stop"


def test_echo(server):
    """The prompt comes first, with its tokens' log-probabilities, streamed too."""
    ask = dict(model="chat", prompt="hello", max_tokens=9, seed=5, logprobs=0, n=2)
    client = server.client()
    alone = client.completions.create(**ask)
    found = client.completions.create(**ask, echo=True)
    texts, names, offsets = ["", ""], [[], []], [[], []]
    for piece in client.completions.create(**ask, echo=True, stream=True):
        for choice in piece.choices:
            texts[choice.index] += choice.text
            names[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
    for n, (without, choice) in enumerate(zip(alone.choices, found.choices)):
        assert choice.text == texts[n] == "hello" + without.text
        assert choice.logprobs.tokens == names[n]
        assert names[n][-len(without.logprobs.tokens) :] == without.logprobs.tokens
        assert offsets[n][-len(without.logprobs.tokens) :] == without.logprobs.text_offset
        assert choice.logprobs.token_logprobs[0] is None and offsets[n][0] == 0
    ids = client.completions.create(**ask | dict(prompt=[5, 7, 9]))
    assert ids.usage.prompt_tokens == 3


def test_32_at_once(place, server, capsys):
    flags = ["--max-tokens", "40", "--seed", "3"]
    expected = written(place, capsys, [{"prompt": prompt} for prompt in PROMPTS], *flags)

    async def ask_all() -> list[str]:
        client = server.client(kind="AsyncOpenAI")
        options = dict(model="chat", max_tokens=40, seed=3)
        asked = [client.completions.create(prompt=prompt, **options) for prompt in PROMPTS]
        return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    assert asyncio.run(ask_all()) == [line["text"] for line in expected]
    # a list of prompts is one request
    several = server.client().completions.create(
        model="chat", prompt=PROMPTS[:3], max_tokens=40, seed=3
    )
    assert [choice.text for choice in several.choices] == [e["text"] for e in expected[:3]]
    server.wait_until("blocks_used", 0)


def test_chat(place, server, capsys):
    """Plain, streamed, with the log-probabilities that the prompt's and answer's tokens have."""
    assert generate.main(["--checkpoint", "chat", "--chat", "hello", "--temperature", "1"]) == 0
    expected = capsys.readouterr().out.rstrip("\n")
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    ask = dict(model="chat", messages=[{"role": "user", "content": parts}], seed=0)
    ask |= dict(max_completion_tokens=300, logprobs=True, top_logprobs=2)
    client = server.client()
    found = client.chat.completions.create(**ask)
    assert found.choices[0].message.content == expected
    assert found.choices[0].message.role == "assistant"
    text, log, roles = "", [], []
    for piece in client.chat.completions.create(**ask, stream=True):
        text += piece.choices[0].delta.content
        roles.append(piece.choices[0].delta.role)
        log += piece.choices[0].logprobs.content
    assert text == expected and roles == ["assistant"] + [None] * (len(roles) - 1)
    tokens = found.choices[0].logprobs.content
    assert [t.logprob for t in log] == pytest.approx([t.logprob for t in tokens], abs=1e-5)
    assert len(tokens) == found.usage.completion_tokens
    for token in tokens:
        best, second = token.top_logprobs
        assert best.logprob >= max(second.logprob, token.logprob)


def test_log_probabilities_of_what_was_drawn(place, server):
    """Read again as a prompt, an answer has the log-probabilities with which it was drawn."""
    client = server.client()
    tokenizer = make_tokenizer(str(place / "chat" / "tokenizer.json"))
    prompt = [int(i) for i in tokenizer.encode("hello")]
    options = dict(model="chat", logprobs=2, seed=1)
    log = client.completions.create(prompt=prompt, max_tokens=20, **options).choices[0].logprobs
    ids = []
    for name in log.tokens:
        named = re.fullmatch(r"token_id:(\d+)", name)
        ids += [int(named[1])] if named else tokenizer.encode(name)
    assert len(ids) == len(log.tokens) > 5
    ask = dict(prompt=prompt + ids, max_tokens=0, echo=True)
    read = client.completions.create(**ask, **options).choices[0].logprobs
    assert read.tokens[len(prompt) :] == log.tokens
    assert read.token_logprobs[len(prompt) :] == pytest.approx(log.token_logprobs, abs=1e-4)
    assert read.top_logprobs[0] is None and read.text_offset[0] == 0
    for token, log_p, top in zip(log.tokens, log.token_logprobs, log.top_logprobs):
        assert top[token] == log_p and 2 <= len(top) <= 3


def directly(texts: list) -> list[list[float]]:
    """The mean of the states behind the last norm, of length 1."""
    model, tokenizer = load_model("chat")[0], make_tokenizer("chat/tokenizer.json")
    vectors = []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text) if isinstance(text, str) else text])
        with torch.inference_mode():
            x = model.run_blocks(model.embedding(ids), ids.shape[1])
            mean = model.head.norm(x)[0].mean(0)
        vectors.append(pytest.approx((mean / mean.norm()).tolist(), abs=1e-5))
    return vectors


def test_embeddings(place, server):
    """Of a text, several, tokens; in both formats: the package asks for base64 by itself."""
    client = server.client()
    for asked, texts in (
        ("The quick", ["The quick"]),
        (PROMPTS[:3], PROMPTS[:3]),
        ([5, 7], [[5, 7]]),
    ):
        found = client.embeddings.create(model="chat", input=asked)
        assert [one.embedding for one in found.data] == directly(texts)
        assert [one.index for one in found.data] == list(range(len(texts)))
    assert (found.object, found.model) == ("list", "chat")
    assert found.usage.prompt_tokens == found.usage.total_tokens == 2
    plain = client.embeddings.create(model="chat", input=[[5, 7], [9]], encoding_format="float")
    assert plain.data[0].embedding == found.data[0].embedding
    assert plain.usage.prompt_tokens == 3
    server.wait_until("blocks_used", 0)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_goes_away(server, endless, streams):
    """Its blocks are free again, long before its answers would have ended."""
    before = server.metric("generated_tokens_total")
    if streams:
        with server.client().completions.create(model="chat", **endless, stream=True) as pieces:
            for _ in zip(range(20), pieces):
                pass
            assert server.metric("blocks_used") > 0
    else:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(endless).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        with socket.create_connection((host, int(port))) as s:
            s.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            server.wait_until("running", 16)
    server.wait_until("blocks_used", 0)
    assert server.metric("generated_tokens_total") - before < 16 * 900


# --- what is refused ------------------------------------------------------------------------------

COMPLETIONS, CHAT, EMBEDDINGS = "completions", "chat/completions", "embeddings"
SAID = [{"role": "user", "content": "a"}]


def post(server, path: str, fields, key: str = KEY, content_type: str = "application/json"):
    """(status, the JSON of the answer, its headers)"""
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    headers = {"Content-Type": content_type, "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{server.url}/v1/{path}", body, headers)
    try:
        # a busy machine needs long for what is bounded in seconds of a processor
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.loads(response.read()), response.headers
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read()), e.headers


@pytest.mark.parametrize(
    "path, fields, param, words",
    [
        (COMPLETIONS, {}, "prompt", "missing"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "length"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "a list has"),
        (COMPLETIONS, {"prompt": [70000]}, "prompt", "the model knows 0 to"),
        (COMPLETIONS, {"prompt": "\ud800"}, None, "surrogate"),
        (COMPLETIONS, {"prompt": "a" * 2000}, "prompt", "holds 1024"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1024}, "prompt", "1024 that the model's"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens", "at least 0"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "x"}, "max_tokens", "`int"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "must be 0"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "above 0"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n", ">= 1"),
        (COMPLETIONS, {"prompt": "a", "n": 10**9}, "n", "at most"),
        (EMBEDDINGS, {}, "input", "missing"),
        (EMBEDDINGS, {"input": ""}, "input", "empty"),
        (EMBEDDINGS, {"input": "a" * 2000}, "input", "holds 1024"),
        (EMBEDDINGS, {"input": ["a"] * 1000}, "input", "1000 texts: at most"),
        (EMBEDDINGS, {"input": "a", "dimensions": 8}, "dimensions", "leave it out"),
        (EMBEDDINGS, {"input": "a", "temperature": 1}, "temperature", "leave it out"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format", "enum"),
        (CHAT, {"messages": SAID, "top_logprobs": 3}, None, "needs logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 6}, "logprobs", "<= 5"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop", ">= 1"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of", "leave it out"),
        (CHAT, {"messages": []}, "messages", "length"),
        (CHAT, {"messages": SAID, "tools": [{}]}, "tools", "leave it out"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, ""),
        (COMPLETIONS, b"{", None, "not JSON"),
        (COMPLETIONS, b'{"a":' * 50_000, None, "nested"),
        (COMPLETIONS, b'{"prompt": "a", "top_p": NaN}', None, "not JSON"),
    ],
)
def test_bad_requests(server, path, fields, param, words):
    status, content, _ = post(server, path, fields)
    error = content["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"] and error.keys() == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param


def test_other_addresses(server):
    import openai

    models = [model.id for model in server.client().models.list()]
    assert models == ["chat"] and server.client().models.retrieve("chat").id == "chat"
    with pytest.raises(openai.NotFoundError, match="model nobody") as refused:
        server.client().completions.create(model="nobody", prompt="a")
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("nobody")
    assert post(server, "edits", {})[0] == 404
    assert json.loads(server.get("/health")) == {"status": "ok"}
    text = server.get("/metrics")
    for name in ("waiting", "running", "blocks_used", "blocks", "prefix_cache_tokens_total"):
        assert re.search(rf"^serve_{name} \d", text, re.MULTILINE), name
    for name in ("time_to_first_token_seconds", "time_between_tokens_seconds"):
        assert f"serve_{name}_bucket" in text
    assert 'serve_requests_total{status="200"}' in text
    for host in ("evil.example", "localhost:abc"):
        request = urllib.request.Request(f"{server.url}/v1/models", headers={"Host": host})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request)
    # a page of another site may send this without asking
    assert post(server, COMPLETIONS, {"prompt": "a"}, content_type="text/plain")[0] == 415


def test_bytes_that_are_no_http(server):
    """Status 400, and not a word in the log (test_sigterm_lets_answers_end)."""
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
        b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"a" * 20000 + b"\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        head + b"Content-Length: 5\r\nContent-Encoding: gzip\r\n\r\nhello",
    ):
        with socket.create_connection((host, int(port)), 5) as s:
            s.sendall(data)
            assert s.recv(15)[9:12] == b"400"


def test_who_may_ask(strict):
    for key in ("", "wrong", "corr\u00e9ct"):
        status, content, _ = post(strict, COMPLETIONS, {"prompt": "a"}, key=key)
        assert (status, content["error"]["code"]) == (401, "invalid_api_key")
    for key in (KEY, "another"):
        assert post(strict, COMPLETIONS, {"prompt": "a"}, key=key)[0] == 200
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{strict.url}/metrics")
    assert urllib.request.urlopen(f"{strict.url}/health").status == 200


def test_limits(strict, endless):
    """Of a body, of those that wait, of time."""
    import openai

    status, content, _ = post(strict, COMPLETIONS, {"prompt": "a" * 4000})
    assert status == 413 and "3000" in content["error"]["message"]
    with strict.client().completions.create(model="chat", **endless, stream=True) as pieces:
        next(iter(pieces))
        status, content, headers = post(strict, COMPLETIONS, {"prompt": "a"})
        assert status == 429 and headers["Retry-After"] == "1"
    strict.wait_until("blocks_used", 0)
    status, content, _ = post(strict, COMPLETIONS, endless)
    assert status == 504 and content["error"]["code"] == "deadline"
    with pytest.raises(openai.APIError, match="not answered within 1 s"):
        for _ in strict.client().completions.create(model="chat", **endless, stream=True):
            pass
    strict.wait_until("blocks_used", 0)


# --- chat templates -------------------------------------------------------------------------------

# All messages; it calls itself without end where the first one asks for it.
TEXT = (
    "{% macro deep() %}{{ deep() }}{% endmacro %}"
    "{% if messages[0].content == 'deep' %}{{ deep() }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
)


def test_a_template_that_shows_no_end_of_a_turn_is_asked(place, capsys):
    """As DeepSeek-R1's does with a tokenizer that does not have its tokens: the end of text ends an
    answer."""
    shutil.copytree("chat", "r1")
    text = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    text += "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
    Path("r1/chat_template.jinja").write_text(text)
    argv = "--checkpoint r1 --chat hello --max-tokens 5 --temperature 0 --device cpu".split()
    assert generate.main(argv) == 0 and "5 tokens" in capsys.readouterr().err


@pytest.fixture(scope="module")
def hostile(place):
    """A server whose model's template fails on some messages."""
    shutil.copytree("chat", "hostile")
    Path("hostile/chat_template.jinja").write_text(TEXT)
    server = Address("--checkpoint", "hostile", "--deadline", "60").wait()
    yield server
    server.end()


def chat_of(text: str, count: int = 1) -> dict:
    messages = [{"role": "user", "content": text}] * count
    return {"messages": messages, "max_tokens": 5, "temperature": 0}


def test_refused_chats_leave_the_server_as_it_was(hostile):
    """A template that fails, and 32 chats of 5,000 messages, 16 at a time: too long, each of them.
    Afterwards the server gives the answers that it gave before."""
    before = post(hostile, CHAT, chat_of("hello"))
    assert before[0] == 200
    status, body, _ = post(hostile, CHAT, chat_of("deep"))
    assert status == 400 and "RecursionError" in body["error"]["message"]
    with ThreadPoolExecutor(16) as pool:
        long = chat_of("hello", 5000)
        answers = list(pool.map(lambda _: post(hostile, CHAT, long), range(32)))
    assert {status for status, _, _ in answers} == {400}
    assert all("holds" in json.dumps(body) for _, body, _ in answers)
    after = post(hostile, CHAT, chat_of("hello"))
    assert after[0] == 200 and after[1]["choices"] == before[1]["choices"]


# --- lm-eval --------------------------------------------------------------------------------------


def test_lm_eval(place, server, monkeypatch):
    """local-completions has the numbers of lm-eval's own backend for `transformers`, item by
    item."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity", reason="lm-eval's models of an address need it")
    import datasets
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache")
    test_evaluate.write_tasks(place / "my_tasks")
    tasks = list(test_evaluate.TASKS)
    manager = TaskManager(include_path="my_tasks", include_defaults=False)
    where = dict(
        base_url=f"{server.url}/v1/completions", model="chat", tokenizer=str(place / "chat")
    )
    options = where | dict(tokenizer_backend="huggingface", num_concurrent=8, max_length=1024)
    found = simple_evaluate("local-completions", options, tasks=tasks, task_manager=manager)
    backend = HFLM(pretrained=str(place / "chat"), device="cpu", dtype="float32", batch_size=1)
    theirs = simple_evaluate(backend, tasks=tasks, task_manager=manager)
    for task in tasks:
        for name, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][name] == pytest.approx(value, rel=1e-4), name
        items, own = (
            [json.loads(json.dumps(each["filtered_resps"])) for each in result["samples"][task]]
            for result in (found, theirs)
        )
        assert len(items) == len(own) > 0
        for a, b in zip(items, own):
            assert flat(a) == [
                pytest.approx(x, rel=1e-4) if isinstance(x, float) else x for x in flat(b)
            ]


def flat(value) -> list:
    if not isinstance(value, list):
        return [value]
    return [x for each in value for x in flat(each)]


# --- the page -------------------------------------------------------------------------------------


class Browser:
    """A page in Chromium, through its debugger."""

    def __init__(self, socket):
        self.socket = socket
        self.number = 0
        self.complaints = []

    async def call(self, method: str, **params) -> dict:
        self.number += 1
        await self.socket.send_json(dict(id=self.number, method=method, params=params))
        while True:
            message = await self.socket.receive_json()
            entry = message.get("params", {}).get("entry", {})
            if message.get("method") == "Runtime.exceptionThrown" or entry.get("level") == "error":
                self.complaints.append(message)
            if message.get("id") == self.number:
                return message.get("result", message)

    async def run(self, code: str):
        return (await self.call("Runtime.evaluate", expression=code, returnByValue=True))[
            "result"
        ].get("value")

    async def until(self, code: str):
        for _ in range(300):
            if value := await self.run(code):
                return value
            await asyncio.sleep(0.02)
        raise AssertionError(f"never true: {code}")


@contextlib.asynccontextmanager
async def browse(folder: Path, url: str):
    path = shutil.which("chromium") or shutil.which("google-chrome")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [path, *flags, f"--user-data-dir={folder}", "about:blank"], stderr=subprocess.DEVNULL
    )
    try:
        while (
            not (folder / "DevToolsActivePort").exists()
            or not (folder / "DevToolsActivePort").read_text()
        ):
            await asyncio.sleep(0.02)
        port = (folder / "DevToolsActivePort").read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as response:
                page = next(x for x in await response.json() if x["type"] == "page")
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                browser = Browser(socket)
                for part in ("Log", "Runtime", "Page"):
                    await browser.call(f"{part}.enable")
                await browser.call("Page.navigate", url=url)
                yield browser
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(
    not shutil.which("chromium") and not shutil.which("google-chrome"), reason="no browser"
)
def test_page(servers, tmp_path):
    """It streams, stops, keeps the conversation, asks for a key, and shows markup as text."""
    server, strict = servers

    async def visit() -> None:
        async with browse(tmp_path / "profile", server.url) as page:
            assert await page.until("document.getElementById('model')?.value") == "chat"
            say = "at('text').value = {!r}; at('form').requestSubmit()"
            await page.run(say.format("<img src=x onerror=document.title='run'>"))
            await page.until(
                "at('stop').disabled && document.querySelectorAll('.assistant').length"
            )
            assert (
                await page.run("document.querySelector('.user').textContent")
                == "<img src=x onerror=document.title='run'>"
            )
            assert await page.run("document.title + document.images.length") == "Chat0"
            assert re.match(r"\d+ tokens", await page.run("at('status').textContent"))
            assert await page.run("messages.map((m) => m.role).join()") == "user,assistant"
            # a long answer is stopped
            await page.run("at('temperature').value = 0; at('clear').click()")
            await page.run(say.format("hello"))
            await page.until("document.querySelector('.assistant')?.textContent.length > 20")
            await page.run("at('stop').click()")
            await page.until("at('stop').disabled && messages.length == 2")
            assert not page.complaints
            await page.call("Page.navigate", url=strict.url)
            await page.until("document.getElementById('status')?.textContent.includes('API key')")
            await page.run(
                f"at('key').value = {KEY!r}; at('key').dispatchEvent(new Event('change'))"
            )
            await page.until("at('model').value == 'chat'")

    asyncio.run(visit())
    server.wait_until("blocks_used", 0)
    with urllib.request.urlopen(server.url) as response:
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp, kill", [again(1, False), again(2, True)])
def test_load(pp, kill, place):
    """Nothing leaks, and no answer is wrong."""
    assert serving_load.run("chat", 300, pp, kill) == (int(kill), 0)


def test_sigterm_lets_answers_end(servers, endless):
    """Whoever is answered gets the rest, nobody else comes in, and the status is 0."""
    server, strict = servers
    ask = dict(model="chat", stream=True) | endless
    pieces = iter(server.client().completions.create(**ask))
    first = next(pieces)
    server.ranks[0].kill(signal.SIGTERM)
    strict.ranks[0].kill(signal.SIGINT)
    finishes = []
    status = None
    for piece in pieces:
        finishes += [choice.finish_reason for choice in piece.choices if choice.finish_reason]
        if status is None:
            status, _, headers = post(server, COMPLETIONS, {"prompt": "a"})
    assert first.choices and len(finishes) == 16
    assert status == 503 and headers["Retry-After"] == "1"
    for each in servers:
        assert each.ranks[0].wait() == 0 and each.ranks[0].stderr == ""


def test_adapters_by_request(place, capsys):
    """An adapter is a model of its own name. The server is open to other machines, and says so."""
    text = "".join(f"x{n * n % 97} = {n};\n" for n in range(800))
    (place / "text.txt").write_text(text)
    flags = dict(data="text.txt", seq_length=64, steps=1, warmup_steps=0)
    assert small_run.run(*small_run.flags(out="base", **flags)) == 0
    flags |= dict(load="base", peft="lora", lr=0.5, steps=3)
    assert small_run.run("finetune.adapters", *small_run.flags(out="lora", **flags)) == 0
    names = ["--checkpoint", "base", "--adapter", "fr=lora"]
    server = Address(*names, "--host", "0.0.0.0", "--max-tokens", "7")
    lines = [{"prompt": "x1 = "}, {"prompt": "x1 = ", "adapter": "fr"}, {"prompt": "x2"}]
    expected = written(place, capsys, lines, "--max-tokens", "20", *names)
    try:
        server.wait()
        found = []
        for line in lines:
            fields = dict(model=line.get("adapter", "base"), prompt=line["prompt"])
            answer = server.client().completions.create(**fields, max_tokens=20, seed=0)
            found.append(answer.choices[0].text)
        assert [model.id for model in server.client().models.list()] == ["base", "fr"]
        vectors = []
        for model in ("base", "fr", "base"):
            answer = server.client().embeddings.create(model=model, input="x1 = ")
            vectors.append(answer.data[0].embedding)
        assert vectors[0] == vectors[2] != pytest.approx(vectors[1], abs=1e-3)
        usage = server.client().completions.create(model="base", prompt="x", seed=0).usage
        assert usage.completion_tokens == 7
        assert "--host 0.0.0.0 without --api-key-file" in server.ranks[0].stderr
    finally:
        server.end()
    # generate.py counts equal prompts, with any adapter
    assert found[0] == expected[0]["text"] and found[2] == expected[2]["text"]
    assert found[1] != found[0]
    alone = written(place, capsys, lines[1:2], "--max-tokens", "20", *names)
    assert found[1] == alone[0]["text"]


@pytest.mark.parametrize("layout", ["--tp 2", "--pp 2"])
def test_ranks(layout, place, capsys):
    """Under a layout the answers are the same. SIGTERM to rank 0 ends all ranks with 0."""
    server = Address("--checkpoint", "chat", *layout.split(), world=2)
    flags = ["--max-tokens", "30", "--seed", "9"]
    expected = written(place, capsys, [{"prompt": "The quick"}] * 2, *flags)
    try:
        server.wait()
        ask = dict(model="chat", prompt="The quick", max_tokens=30, seed=9, n=2)
        found = server.client().completions.create(**ask)
        assert [choice.text for choice in found.choices] == [line["text"] for line in expected]
        vector = server.client().embeddings.create(model="chat", input="The quick").data[0]
        assert vector.embedding == directly(["The quick"])[0]
        server.ranks[1].kill(signal.SIGTERM)
        assert server.client().completions.create(**ask).choices == found.choices
        server.ranks[0].kill(signal.SIGTERM)
        assert [rank.wait() for rank in server.ranks] == [0, 0]
        assert "".join(rank.stderr for rank in server.ranks) == ""
    finally:
        server.end()


def test_a_rank_dies(place, endless):
    """The other one, which waits for it, ends with status 1."""
    server = Address("--checkpoint", "chat", "--tp", "2", world=2)
    try:
        server.wait()
        ask = dict(model="chat", stream=True)
        next(iter(server.client().completions.create(**ask, **endless)))
        server.ranks[1].kill(signal.SIGKILL)
        assert server.ranks[0].wait() == 1
    finally:
        server.end()


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--tp 2", "--nproc-per-node 2 would fit"),
        ("--cp 2", "an engine has --tp and --pp alone"),
        ("--blocks 1", "--blocks 1: must be at least 2"),
        ("--blocks 1073741824", "serve.py: --blocks 1073741824: keys and values take"),
        ("--port 70000", "0 is a free one"),
        ("--max-tokens 0", "--max-tokens 0: must be at least 1"),
        ("--budget 0", "--budget 0: must be at least 1"),
        ("--api-key-file nowhere", "cannot be read"),
        ("--api-key-file /dev/null", "has no key in it"),
        ("--weights int4 --group-size 5", "invalid choice"),
    ],
)
def test_refusals(flags, words, place, capsys):
    status = None
    try:
        status = serve.main(["--checkpoint", "chat", *flags.split()])
    except SystemExit as e:
        status = e.code
    assert status == 2 and words in capsys.readouterr().err
