"""Chat templates run here, in a process of their own.

A template is a program of somebody else. jinja's sandbox bounds what it can reach: no file, no
module. It bounds neither its time, `7 ** (7 ** (7 ** 3))`, nor its memory, `"a" * 10 ** 10`. The
kernel does, for a whole process; so this file is also the program of the process that renders. One
that goes beyond the bounds ends, and the next text gets a new one. The process that asks, which may
be a server with threads, has no limits.

    {"template": "..", "names": {..}, "messages": [..], "ask": true, "date": null}
    ->  {"text": "..", ..}

The options, and what a template may call, are those of `transformers`.
"""

import contextlib
import datetime
import functools
import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import jinja2.utils
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

# Characters of a rendered text; a context of a million tokens has 4 million.
LONGEST = 2**24
# Characters of what a template says itself with raise_exception.
LONGEST_ERROR = 1000
# Bytes of the process that renders, and its computing time for one text. Most texts take 1 ms.
MOST_MEMORY = 2**30
MOST_SECONDS = 5
# Around what {% generation %} gives, until the text is complete. Unicode has no such characters.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


# --- what a template may use ----------------------------------------------------------------------


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


def strftime_of(date: str | None) -> Callable[[str], str]:
    """The function strftime_now, which tells this date and time, or for None those of the call."""

    def strftime_now(form: str) -> str:
        when = datetime.datetime.fromisoformat(date) if date else datetime.datetime.now()
        return when.strftime(form)

    return strftime_now


@functools.lru_cache
def compiled(text: str, date: str | None) -> tuple[jinja2.Template, bool]:
    """(a template, whether it has {% generation %} blocks). Raises what jinja and Python raise."""
    extensions = [GenerationBlocks, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "namespace": Namespace,
        "raise_exception": raise_exception,
        "strftime_now": strftime_of(date),
    }
    methods = (call.node for call in environment.parse(text).find_all(nodes.Call))
    marks = any(isinstance(m, nodes.ExtensionAttribute) and m.name == "mark" for m in methods)
    return environment.from_string(text), marks


# --- the process that renders ---------------------------------------------------------------------


def answer(
    template: str, names: dict, messages: list[dict] | None, ask: bool, date: str | None
) -> dict:
    """messages: None to compile the template only. date: as of `strftime_of`."""
    try:
        program, marks = compiled(template, date)
        if messages is None:
            return {"marks": marks}
        fields = dict(messages=messages, tools=None, documents=None, add_generation_prompt=ask)
        text = program.render(**fields, **names)
        if len(text) > LONGEST:
            raise TemplateError(f"made {len(text):,} characters; {LONGEST:,} are the most")
        return {"text": text}
    except TemplateSyntaxError as e:
        return {"error": e.message, "line": e.lineno}
    except MemoryError:
        return {"error": f"takes more than {MOST_MEMORY // 2**20:,} MiB"}
    except Exception as e:
        # a template can raise whatever Python raises
        kind = "" if isinstance(e, TemplateError) else f"{type(e).__name__}: "
        return {"error": f"{kind}{e}"[:LONGEST_ERROR]}


def limit(what: int, most: int) -> None:
    """For this process. A system that cannot limit this goes without."""
    _, hard = resource.getrlimit(what)
    with contextlib.suppress(ValueError):
        resource.setrlimit(what, (most if hard < 0 else min(most, hard), hard))


def main() -> None:
    # Ctrl-C is for the process that asks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, MOST_MEMORY)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # beyond it comes SIGXCPU, which ends the process whatever it does
        limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + request.pop("seconds"))
        print(json.dumps(answer(**request)), flush=True)


# --- the process that asks ------------------------------------------------------------------------


class Renderer:
    """The other process, started when it is needed. Threads take turns."""

    def __init__(self):
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None

    def ask(self, **request) -> dict:
        """As of `answer`."""
        line = json.dumps(request | {"seconds": MOST_SECONDS}).encode() + b"\n"
        reply = b""
        with self.lock:
            # poll: a fork gets one of its own, because this one is no child of it
            if self.process is None or self.process.poll() is not None:
                try:
                    self.start()
                except OSError as e:
                    return {"error": f"no process can be started to render it ({e.strerror})"}
            with contextlib.suppress(OSError):
                self.process.stdin.write(line)
                self.process.stdin.flush()
                reply = self.process.stdout.readline()
            if reply.endswith(b"\n"):
                return json.loads(reply)
            self.process.kill()
            status = self.process.wait()
        late = f"takes more than {MOST_SECONDS} s"
        ended = f"ended the process that renders it (status {status})"
        return {"error": late if status == -signal.SIGXCPU else ended}

    def start(self) -> None:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen([sys.executable, __file__], **pipes)

    def end(self) -> None:
        """Whoever waits for an answer gets an error."""
        if self.process:
            self.process.kill()


RENDERER = Renderer()


if __name__ == "__main__":
    main()
