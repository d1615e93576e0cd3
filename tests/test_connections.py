"""Clients that mean no good, at this machine's own address: half headers, silence, bytes that are
no HTTP. Others are answered meanwhile, and the log stays short."""

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_evaluate

pytest.importorskip("transformers", reason="pyproject.toml names it")
pytest.importorskip("aiohttp", reason="pyproject.toml names it")
pytest.importorskip("prometheus_client", reason="pyproject.toml names it")
from inference.connections import Connections

ROOT = Path(__file__).parent.parent
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-"
WHOLE = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"GET / HTTP/1.1\r\nA: " + b"a" * 20000 + b"\r\n\r\n",
    b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%ff%00 HTTP/1.1\r\nHost: \xff\r\n\r\n",
    WHOLE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    WHOLE + b"Content-Length: 5\r\nContent-Encoding: gzip\r\n\r\nhello",
]


class Server:
    """inference/serve.py as its own process, with few descriptors."""

    def __init__(self, *flags: str, descriptors: int = 60):
        words = [sys.executable, "-m", "inference.serve", "--checkpoint", "chat", "--port", "0"]
        self.log = Path("log").open("w+")
        limit = (descriptors, descriptors)
        self.process = subprocess.Popen(
            [*words, *flags],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit),
        )
        self.port = int(self.process.stdout.readline().split()[0].rsplit(":")[-1])
        self.sockets = contextlib.ExitStack()

    def connect(self, data: bytes = b"") -> socket.socket:
        s = self.sockets.enter_context(socket.create_connection(("127.0.0.1", self.port), 5))
        s.sendall(data)
        return s

    def ask(self, path: str, fields: dict | None = None) -> int:
        """The status, within 5 seconds."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            method = "GET" if fields is None else "POST"
            connection.request(method, path, fields and json.dumps(fields), headers)
            return connection.getresponse().status

    def said(self) -> list[str]:
        return Path(self.log.name).read_text().splitlines()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        with self.sockets, self.log:
            return self.process.wait(20)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("connections")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # an answer takes a second
        patch.setattr(test_evaluate, "CONTEXT", 1024)
        test_evaluate.save_model(Path("chat"), begins=False)
        yield folder


@pytest.fixture
def server(place, request):
    server = Server(*getattr(request, "param", ()))
    yield server
    server.process.kill()


def is_closed(s: socket.socket, seconds: float) -> bool:
    s.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        try:
            return s.recv(1) == b""
        except TimeoutError:
            return False
    return True


def test_half_headers_shut_nobody_out(server):
    """More of them than there are descriptors, and new ones for those that are closed."""
    asked = {"prompt": "hello", "max_tokens": 2}
    for _ in range(3):
        for _ in range(100):
            server.connect(HALF)
        begin = time.monotonic()
        assert server.ask("/health") == 200
        assert server.ask("/v1/completions", asked) == 200
        assert time.monotonic() - begin < 2
    said = server.said()
    assert len(said) == 1 and "silent ones are closed" in said[0], said
    assert server.end() == 0


def test_bodies_that_do_not_come_shut_nobody_out(server):
    for _ in range(100):
        server.connect(WHOLE + b"Content-Length: 90\r\n\r\n{")
    assert server.ask("/health") == 200
    assert len(server.said()) == 1


@pytest.mark.parametrize("server", [("--deadline", "1")], indirect=True)
def test_a_silent_connection_is_closed(server):
    """After the time for headers, which is not more than --deadline. One that asks stays."""
    quiet = [server.connect(data) for data in (b"", HALF, b"G")]
    spoken = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    with contextlib.closing(spoken):
        for _ in range(5):
            spoken.request("GET", "/health")
            assert spoken.getresponse().read() == b'{"status": "ok"}'
            time.sleep(0.6)
        assert all(is_closed(s, 2) for s in quiet)
    # the headers came, the body does not
    late = server.connect(WHOLE + b"Content-Length: 9\r\n\r\n")
    assert b" 408 " in late.recv(100)
    assert not server.said()


@pytest.mark.parametrize("server", [("--connections", "8", "--queue", "99")], indirect=True)
def test_answers_are_never_closed_for_others(server):
    """Six answers are written on eight connections; a seventh is refused in words."""
    asked = {"prompt": "hello", "max_tokens": 1000, "n": 6, "stream": True}
    body = json.dumps(asked).encode()
    answer = server.connect(WHOLE + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert answer.recv(15) == b"HTTP/1.1 200 OK"
    assert server.ask("/v1/completions", {"prompt": "a"}) == 429
    for _ in range(40):
        server.connect(HALF)
    assert server.ask("/health") == 200
    text = b""
    while not text.endswith(b"0\r\n\r\n"):
        text += (piece := answer.recv(10000))
        assert piece, "the answer was cut off"
    assert b"[DONE]" in text


@pytest.mark.parametrize("server", [("--connections", "8")], indirect=True)
def test_who_was_answered_and_stays_makes_room(server):
    """More clients that keep their connection open than there may be."""
    with contextlib.ExitStack() as kept:
        for _ in range(20):
            client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
            kept.enter_context(contextlib.closing(client))
            body, headers = '{"prompt": "a", "max_tokens": 1}', {"Content-Type": "application/json"}
            client.request("POST", "/v1/completions", body, headers)
            assert client.getresponse().read()


@pytest.mark.parametrize("server", [("--deadline", "2")], indirect=True)
def test_a_body_has_its_own_time(server):
    """Late headers, and then a late body: each within two seconds."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    s = server.connect()
    for data in (WHOLE + f"Content-Length: {len(body)}\r\n\r\n".encode(), body):
        time.sleep(1.6)
        s.sendall(data)
    assert s.recv(15) == b"HTTP/1.1 200 OK"


def test_the_oldest_goes_first():
    """The one that has said nothing for longest."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        connections = Connections(bound, 9)
        connections.open = dict.fromkeys("abc")
        for name in "abca":
            connections.wait_for(name, 60)
        connections.wait_for("gone", 60)
        assert list(connections.silent) == ["b", "c", "a"]


def test_bytes_that_are_no_http(server):
    """One line for each kind, without a traceback."""
    for _ in range(20):
        for data in NO_HTTP:
            with contextlib.suppress(OSError):
                s = server.connect(data)
                s.shutdown(socket.SHUT_WR)
                while s.recv(1000):
                    pass
    assert server.ask("/health") == 200
    said = server.said()
    assert len(said) <= 10 and all(line.startswith("serve.py: ") for line in said), said
    assert server.end() == 0


def test_a_body_that_is_too_long_is_refused_at_once(server):
    """Before it comes."""
    for key in (b"", b"Expect: 100-continue\r\n"):
        begin = time.monotonic()
        s = server.connect(WHOLE + key + b"Content-Length: 999999999999\r\n\r\n")
        s.settimeout(5)
        answer = b""
        while b"\r\n\r\n" not in answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b""):
            answer += s.recv(1000)
        assert b"HTTP/1.1 413 " in answer and time.monotonic() - begin < 2
