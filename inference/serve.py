"""The command that serves a model: flags, and the ranks.

    python -m inference.serve --checkpoint runs/chat --port 8000
    python -m inference.serve --checkpoint runs/base --adapter fr=runs/fr --adapter de=runs/de
    torchrun --nproc-per-node 4 -m inference.serve --checkpoint runs/chat --tp 2 --pp 2

Rank 0 has the address and drives the engine; the others follow its steps. SIGTERM to rank 0, or
Ctrl-C, lets running requests end, and then all ranks end with status 0.
"""

import argparse
import asyncio
import os
import signal
import socket
from pathlib import Path

from base import terminal
from inference import cli
from inference.adapted import Adapters
from inference.engine import Engine, fail
from run.config import ConfigError, flag_name
from run.world import World

# Flags that are numbers -> their default, the least, what they are.
NUMBERS = {
    "port": (8000, 0, "0: any that is free"),
    "max_sequences": (32, 1, "answers written at a time"),
    "budget": (512, 1, "tokens of a step"),
    "block_size": (16, 1, "tokens of a block of the cache"),
    "blocks": (None, 2, "of the cache (default: for --max-sequences of the longest)"),
    "queue": (128, 0, "answers that wait; more get status 429"),
    "deadline": (600, 1, "seconds of a request"),
    "max_body": (2**20, 1, "bytes of a request"),
    "max_tokens": (None, 1, "where a request does not say (default: 16; of a chat, what is left)"),
}
# The layout of the weights is chosen for so many sequences at a time, at most.
MOST_ROWS = 512


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m inference.serve", description="Serve a model.")
    cli.add_model_flags(parser)
    flag = parser.add_argument
    several = "a run with --peft, which requests choose as their model; several"
    flag("--adapter", action="append", default=[], metavar="NAME=RUN", help=several)
    cli.add_weight_flags(parser)
    flag("--host", default="127.0.0.1", help="the default is for clients on this machine")
    flag("--api-key-file", metavar="FILE", help="keys, one a line; or in SERVE_API_KEY")
    for name, (default, _, what) in NUMBERS.items():
        shown = "" if default is None else f" (default: {default})"
        flag(flag_name(name), type=int, default=default, metavar="N", help=what + shown)
    return parser


def check_own_flags(args: argparse.Namespace, size: int) -> None:
    """What only a server knows. Raises ConfigError."""
    cli.check_least(args, {name: least for name, (_, least, _) in NUMBERS.items()})
    if args.port >= 2**16:
        raise ConfigError(f"--port {args.port}: must be below 65536; 0 is a free one")
    if args.cp * args.ep > 1:
        raise ConfigError(f"--cp {args.cp} --ep {args.ep}: an engine has --tp and --pp alone")
    ranks = args.tp * args.pp
    if ranks != size:
        raise ConfigError(
            f"--tp {args.tp} --pp {args.pp}: an engine of {ranks} ranks, and {size} are started;"
            f" --nproc-per-node {ranks} would fit"
        )


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet. Raises ConfigError."""
    try:
        family, type_, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, type_)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        return bound
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"--host {host} --port {port}: {e}; --port 0 is a free one") from None


def read_keys(path: str | None) -> list[bytes]:
    """Raises ConfigError for a file without a key, which would let all clients in."""
    try:
        text = os.environ.get("SERVE_API_KEY", "") if path is None else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--api-key-file {path}: cannot be read ({e})") from None
    keys = [line.strip().encode() for line in text.splitlines() if line.strip()]
    if path is not None and not keys:
        raise ConfigError(f"--api-key-file {path}: has no key in it")
    return keys


def run(args: argparse.Namespace, world: World) -> None:
    """Serve until a signal ends it."""
    try:
        # generate.py does without their packages.
        from inference.api import find_models
        from inference.server import Server
    except ModuleNotFoundError as e:
        install = "pip install -U aiohttp prometheus_client"
        raise ConfigError(f"an address needs the package {e.name} ({install})") from None
    check_own_flags(args, world.size)
    config = cli.check_model_flags(args, world)
    adapters = Adapters(args.adapter, args.checkpoint, config, args.tp)
    name = Path(args.checkpoint).resolve().name
    if name in adapters.names:
        raise ConfigError(f"--adapter {name}=..: is the model's own name; take another")
    quantize = cli.open_weights(args, config, adapters)
    if world.rank == 0:
        keys, bound = read_keys(args.api_key_file), bind(args.host, args.port)
    # An idle server waits for long.
    options = (cli.MONTH, adapters, quantize)
    rows = min(args.max_sequences, MOST_ROWS)
    model, tokenizer, _ = cli.connect(args, world, rows, *options)
    sizes = (args.max_sequences, args.budget, args.block_size, args.blocks)
    try:
        engine = Engine(model, world.groups, *sizes, adapters.use if adapters.names else None)
    except ValueError as e:
        raise ConfigError(str(e).replace("num_blocks", "--blocks")) from None
    if world.rank == 0:
        models = find_models(name, args.checkpoint, tokenizer, adapters)
        server = Server(engine, tokenizer, models, keys, args)
        return asyncio.run(server.run(bound))
    for number in (signal.SIGTERM, signal.SIGINT):
        # Rank 0 closes the engine.
        signal.signal(number, signal.SIG_IGN)
    try:
        engine.follow()
    except Exception as e:
        fail(e)


def main(argv: list[str]) -> int:
    return cli.command("serve.py", run, argv, make_parser())


if __name__ == "__main__":
    terminal.command(main)
