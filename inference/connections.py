"""Connections: how many are open, and how long one stays that says nothing.

    accepted | a request's headers | its body        | the answer | the next request, ..
             | 10 s                | --deadline      |            | 75 s

Later than that it is closed. Where too many are open, the oldest one that the server waits for is
closed at once, so that whoever speaks in time comes in: half a header costs a client nothing, and a
server a descriptor. A connection that is being answered stays.

    python -m inference.serve --checkpoint runs/chat --connections 1024

asyncio's own server accepts until descriptors run out, and then writes a traceback a thousand times
a second.
"""

import asyncio
import logging
import os
import resource
import socket
import time

from base import terminal

# seconds: of the headers of a first request, and until the next one
HEADERS, IDLE = 10, 75
# descriptors for everything else
SPARE = 16


class Connections:
    """Those of a socket that listens."""

    def __init__(self, bound: socket.socket, most: int):
        bound.setblocking(False)
        bound.listen(1024)
        self.bound = bound
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/dev/fd"))
        self.most = max(1, min(most, descriptors - SPARE))
        # protocol of a connection -> its transport; until when the server waits, the oldest first
        self.open: dict[asyncio.Protocol, asyncio.Transport] = {}
        self.silent: dict[asyncio.Protocol, float] = {}

    def wait_for(self, protocol: asyncio.Protocol, seconds: float) -> None:
        """The client is to say something within so many seconds."""
        self.silent.pop(protocol, None)
        if protocol in self.open:
            self.silent[protocol] = time.monotonic() + seconds

    async def serve(self, factory, seconds: float) -> None:
        """Accept connections for ever. factory: of a protocol. seconds: as of HEADERS."""
        loop = asyncio.get_running_loop()
        loop.call_soon(self.close_late, loop)
        while True:
            try:
                accepted, _ = await loop.sock_accept(self.bound)
                transport, protocol = await loop.connect_accepted_socket(factory, accepted)
                self.open[protocol] = transport
                self.wait_for(protocol, seconds)
            except OSError as e:
                TROUBLE.say("accept", f"a connection cannot be accepted ({e.strerror})")
                self.close_oldest()
                await asyncio.sleep(0.1)
            while len(self.open) >= self.most:
                self.close_oldest()
                self.close_late()
                await asyncio.sleep(0 if len(self.open) < self.most else 0.02)

    def close_oldest(self) -> None:
        """Of those that the server waits for."""
        for protocol in list(self.silent)[:1]:
            TROUBLE.say("many", f"{len(self.open)} connections are open: silent ones are closed")
            self.silent[protocol] = 0.0

    def close_late(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """loop: do it again each second."""
        if loop:
            loop.call_later(1, self.close_late, loop)
        now = time.monotonic()
        for protocol, transport in list(self.open.items()):
            if self.silent.get(protocol, now) < now:
                transport.abort()
            if transport.is_closing():
                del self.open[protocol]
                self.silent.pop(protocol, None)


class Trouble(logging.Handler):
    """What clients cause, in one line for each kind and minute, also where libraries log it."""

    def __init__(self):
        super().__init__()
        # kind -> when it was said
        self.said: dict[str, float] = {}

    def is_new(self, kind: str) -> bool:
        now = time.monotonic()
        self.said = {kind: then for kind, then in self.said.items() if now - then < 60}
        return self.said.setdefault(kind, now) == now

    def say(self, kind: str, text: str) -> None:
        if self.is_new(kind):
            line = " ".join(f"serve.py: {text}".split())
            terminal.say(terminal.one_line(line[:200]), error=True)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else ""
        kind = f"{record.msg[:30]} {type(error).__name__}"
        self.say(kind, f"{record.getMessage().splitlines()[0]}: {error}")


TROUBLE = Trouble()
