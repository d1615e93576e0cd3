"""A server whose model's chat template runs for ever on some messages, on this machine alone."""

import json
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest
import test_evaluate
import test_rendering

pytest.importorskip("transformers", reason="pyproject.toml names it")
pytest.importorskip("openai", reason="pyproject.toml names it")
pytest.importorskip("aiohttp", reason="pyproject.toml names it")
pytest.importorskip("prometheus_client", reason="pyproject.toml names it")

from test_server import CHAT, COMPLETIONS, Address, post

from inference import cli

# all messages, and what the first one asks for
TEXT = test_rendering.TEXT + "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        test_evaluate.save_model(Path("chat"), begins=False)
        (folder / "chat/chat_template.jinja").write_text(TEXT)
        yield folder


def test_a_template_that_shows_no_end_of_a_turn_is_asked(folder, capsys):
    """As DeepSeek-R1's does with a tokenizer that does not have its tokens: the end of text ends an
    answer."""
    shutil.copytree("chat", "r1")
    text = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    text += "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
    Path("r1/chat_template.jinja").write_text(text)
    argv = "--checkpoint r1 --chat hello --max-tokens 5 --temperature 0 --device cpu".split()
    assert cli.main(argv) == 0 and "5 tokens" in capsys.readouterr().err


@pytest.fixture
def server(folder):
    server = Address("--checkpoint", "chat", "--deadline", "60").wait()
    yield server
    server.end()


def chat_of(text: str, count: int = 1) -> dict:
    messages = [{"role": "user", "content": text}] * count
    return {"messages": messages, "max_tokens": 5, "temperature": 0}


def memory(server) -> int:
    """Bytes of address space that the server's process may take; -1: all."""
    lines = Path(f"/proc/{server.ranks[0].process.pid}/limits").read_text().splitlines()
    soft = next(line for line in lines if line.startswith("Max address space")).split()[3]
    return -1 if soft == "unlimited" else int(soft)


def test_refused_chats_leave_the_server_as_it_was(server):
    """128 chats of 5,000 messages, 64 at a time: too long, each of them. Meanwhile and afterwards
    it gives the answers that it gave before."""
    asked = chat_of("hello")
    before = post(server, CHAT, asked)
    limit = memory(server)
    assert before[0] == 200
    with ThreadPoolExecutor(64) as pool:
        long = chat_of("hello", 5000)
        refused = [pool.submit(post, server, CHAT, long) for _ in range(128)]
        answers = [future.result() for future in as_completed(refused)]
    assert {status for status, _, _ in answers} == {400}
    assert all("holds" in json.dumps(body) for _, body, _ in answers)
    after = post(server, CHAT, asked)
    assert after[0] == 200 and after[1]["choices"] == before[1]["choices"]
    assert memory(server) == limit


def test_a_template_that_loops_holds_nobody_up(server):
    """Seven chats loop at a time. Completions are answered meanwhile, and SIGTERM ends the server
    at once."""
    pool = ThreadPoolExecutor(7)
    text = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
    first = post(server, COMPLETIONS, text)
    looping = [pool.submit(post, server, CHAT, chat_of("loop")) for _ in range(7)]
    time.sleep(0.5)
    begin = time.monotonic()
    for _ in range(5):
        status, body, _ = post(server, COMPLETIONS, text)
        assert status == 200 and body["choices"] == first[1]["choices"]
    assert time.monotonic() - begin < 4 and not any(future.done() for future in looping)
    server.ranks[0].kill(signal.SIGTERM)
    begin = time.monotonic()
    assert server.ranks[0].wait() == 0
    assert time.monotonic() - begin < 4.5
    assert server.ranks[0].stderr == ""
    pool.shutdown()


def test_hostile_templates_do_not_take_a_server_down(server):
    """Each gets the reason, and the next chat an answer."""
    for name in ("loop", "long", "deep"):
        # those tests hurry
        reason = test_rendering.HOSTILE[name][1].replace("than 1 s", "than 5 s")
        status, body, _ = post(server, CHAT, chat_of(name))
        assert status == 400 and reason in body["error"]["message"], name
        assert post(server, CHAT, chat_of("hello"))[0] == 200
