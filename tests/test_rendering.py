"""Templates that run for ever, or take all memory: they end their own process and no other."""

import os
import resource
import signal
import threading
import time

import pytest
from test_sft import chat_of, write

from finetune import rendering
from finetune.chat_template import ChatError
from finetune.sft import message
from run.tokenizer import ByteTokenizer

LOOP = "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}"
HOSTILE = {
    "power": ("{% set x = n ** (n ** (n ** 3)) %}", "takes more than 1 s"),
    "loop": ("{% set r = range(100000) %}" + LOOP, "takes more than 1 s"),
    "long": ("{{ 'a' * 10 ** 10 }}", "takes more than 1,024 MiB"),
    "filter": ("{{ 'a' | center(10 ** 10) }}", "takes more than 1,024 MiB"),
    "list": ("{% set x = range(99999) | list * 99999 %}", "takes more than 1,024 MiB"),
    "deep": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
}
# what a message asks for
TEXT = "{% set n = 7 %}{% set said = messages[0].content %}"
TEXT += "".join(
    "{% if said == '" + name + "' %}" + text + "{% endif %}" for name, (text, _) in HOSTILE.items()
)
TEXT += "{{ said }}|"


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(rendering, "MOST_SECONDS", 1)


@pytest.fixture
def chat(tmp_path):
    return chat_of(ByteTokenizer(), write(tmp_path / "t.jinja", TEXT))


def ask(chat, text: str) -> list[int]:
    return chat.prompt([message("user", text)])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_one_line(chat, name):
    """Soon, with the reason; and nothing is left of it."""
    limits = [resource.getrlimit(what) for what in (resource.RLIMIT_AS, resource.RLIMIT_CPU)]
    before = ask(chat, "q")
    begin = time.process_time()
    with pytest.raises(ChatError) as e:
        ask(chat, name)
    assert HOSTILE[name][1] in str(e.value) and "\n" not in str(e.value)
    assert ask(chat, "q") == before == [*b"q|"]
    # the work was another process's
    assert time.process_time() - begin < 2
    after = [resource.getrlimit(what) for what in (resource.RLIMIT_AS, resource.RLIMIT_CPU)]
    assert after == limits


def test_constants_are_computed_apart(tmp_path):
    """jinja computes them while it reads the template."""
    with pytest.raises(ChatError, match="takes more than 1 s"):
        chat_of(ByteTokenizer(), write(tmp_path / "t.jinja", "{{ 7 ** (7 ** (7 ** 3)) }}"))


def test_computing_time_is_of_one_text(tmp_path):
    """A process that has rendered for long has as much for the next text."""
    text = "{% for a in range(20000) %}{% for b in range(300) %}{% endfor %}{% endfor %}|"
    chat = chat_of(ByteTokenizer(), write(tmp_path / "t.jinja", text))
    pid = rendering.RENDERER.process.pid
    begin = time.monotonic()
    while time.monotonic() - begin < 2.5:
        assert ask(chat, "q") == [*b"|"]
    assert rendering.RENDERER.process.pid == pid


def test_threads_take_turns(chat):
    """Each gets the answer to its own question, also while others end the process."""
    found = {}

    def work(number: int) -> None:
        for n in range(20):
            text = f"{number} {n}"
            try:
                found[text] = ask(chat, "long" if number == 0 and n % 10 == 5 else text)
            except ChatError as e:
                found[text] = str(e)

    threads = [threading.Thread(target=work, args=[number], daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 30
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    for text, answer in found.items():
        if text in ("0 5", "0 15"):
            assert "MiB" in answer
        else:
            assert answer == [*f"{text}|".encode()]
    assert len(found) == 160


def test_a_fork_has_a_process_of_its_own(chat):
    """It would read the answers of the one that it is a copy of."""
    ask(chat, "q")
    first = rendering.RENDERER.process.pid
    read, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        # one that reads what belongs to its parent waits for ever
        signal.alarm(10)
        try:
            text = bytes(ask(chat, "child")) + f" {rendering.RENDERER.process.pid}".encode()
            os.write(write_end, text)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    answer, number = os.read(read, 100).decode().split()
    assert answer == "child|" and int(number) != first
    assert ask(chat, "q") == [*b"q|"] and rendering.RENDERER.process.pid == first


def test_a_long_complaint_is_cut(tmp_path):
    chat = chat_of(
        ByteTokenizer(), write(tmp_path / "t.jinja", "{{ raise_exception('a' * 9999) }}")
    )
    with pytest.raises(ChatError) as e:
        ask(chat, "q")
    assert len(str(e.value)) < 1200


def test_a_text_that_nobody_waits_for_any_more(chat, monkeypatch):
    """A server that ends does not wait for a template that loops."""
    monkeypatch.setattr(rendering, "MOST_SECONDS", 60)
    begin = time.monotonic()
    ask(chat, "q")
    threading.Timer(0.5, rendering.RENDERER.end).start()
    with pytest.raises(ChatError, match="ended the process that renders it"):
        ask(chat, "loop")
    assert time.monotonic() - begin < 10


def test_a_process_that_was_killed_is_started_again(chat):
    ask(chat, "q")
    rendering.RENDERER.process.kill()
    rendering.RENDERER.process.wait()
    assert ask(chat, "q") == [*b"q|"]
