"""The command line of serve.py: flags, and the ranks.

    python serve.py --checkpoint runs/chat --port 8000
    python serve.py --checkpoint runs/base --adapter fr=runs/fr --adapter de=runs/de
    torchrun --nproc-per-node 4 serve.py --checkpoint runs/chat --tp 2 --pp 2

Rank 0 has the address and drives the engine; the others follow its steps. SIGTERM to rank 0, or
Ctrl-C, lets running requests end, and then all ranks end with status 0.
"""

import argparse
import asyncio
import importlib.util
import ipaddress
import os
import signal
import socket
from pathlib import Path

from base.world import World
from inference import cli, quantization
from inference.adapted import Adapters
from inference.loading import find_chat
from run.config import ConfigError
from serving.engine import Engine
from serving.ranks import Processes
from tuning.chat_template import ChatError

LEAST = dict(max_sequences=1, budget=1, block_size=1, blocks=2, queue=0, deadline=1, max_body=1)
# flags of generate.py that are fields of a request here
OF_REQUESTS = dict(max_tokens=0, temperature=0.0, top_k=0, top_p=1.0, seed=None, stop=[])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Serve a model; without arguments, a lesson.")
    cli.add_model_flags(parser)
    flag = parser.add_argument
    several = "a run with --peft, which requests choose as their model; several"
    flag("--adapter", action="append", default=[], metavar="NAME=RUN", help=several)
    flag("--weights", choices=("int8", "int4"), help="store the weights in 8 or 4 bits")
    flag("--group-size", type=int, choices=quantization.GROUPS, help="of --weights int4")
    flag("--host", default="127.0.0.1", help="the default is for clients on this machine")
    flag("--port", type=int, default=8000, help="0: any that is free (default: 8000)")
    flag("--api-key-file", metavar="FILE", help="keys, one a line; or in SERVE_API_KEY")
    flag("--max-sequences", type=int, default=32, help="answers written at a time (32)")
    flag("--budget", type=int, default=512, help="tokens of a step (512)")
    flag("--block-size", type=int, default=16, help="tokens of a block of the cache (16)")
    flag("--blocks", type=int, help="of the cache (default: for --max-sequences of the longest)")
    flag("--queue", type=int, default=128, help="answers that wait; more get status 429 (128)")
    flag("--deadline", type=int, default=600, metavar="SECONDS", help="of a request (600)")
    flag("--max-body", type=int, default=2**20, metavar="BYTES", help="of a request (1 MiB)")
    unsaid = "of an answer where the request does not say (default: 16; of a chat, what is left)"
    flag("--max-tokens", type=int, dest="usual_tokens", help=unsaid)
    parser.set_defaults(prompt_file=None, batch_size=None, **OF_REQUESTS)
    return parser


def check_own_flags(args: argparse.Namespace, size: int) -> None:
    """What only a server knows. Raises ConfigError."""
    if not 0 <= args.port < 2**16:
        raise ConfigError(f"--port {args.port}: below 65536; 0 is a free one")
    if args.usual_tokens is not None and args.usual_tokens < 1:
        raise ConfigError(f"--max-tokens {args.usual_tokens}: must be at least 1")
    for package in ("aiohttp", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"an address needs the package {package} (pip install {package})")
    for name in ("cp", "ep"):
        if getattr(args, name) > 1:
            raise ConfigError(f"--{name} {getattr(args, name)}: an engine has --tp and --pp alone")
    ranks = args.tp * args.pp
    if ranks != size:
        raise ConfigError(
            f"--tp {args.tp} --pp {args.pp}: an engine of {ranks} ranks, and {size} are started;"
            f" --nproc-per-node {ranks} would fit"
        )


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet. Raises ConfigError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        return bound
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"--host {host} --port {port}: {e}; --port 0 is a free one") from None


def read_keys(path: str | None) -> list[bytes]:
    """Raises ConfigError for a file without a key, which would let everybody in."""
    try:
        text = os.environ.get("SERVE_API_KEY", "") if path is None else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--api-key-file {path}: cannot be read ({e})") from None
    keys = [line.strip().encode() for line in text.splitlines() if line.strip()]
    if path is not None and not keys:
        raise ConfigError(f"--api-key-file {path}: has no key in it")
    return keys


def run(args: argparse.Namespace, world: World) -> None:
    """What `python serve.py` does with flags."""
    cli.check_least(args, LEAST)
    check_own_flags(args, world.size)
    config = cli.check_flags(args, world)
    adapters = Adapters(args.adapter, args.checkpoint, config, args.tp)
    if name_of(args) in adapters.names:
        raise ConfigError(f"--adapter {name_of(args)}=..: is the model's own name; take another")
    quantize = cli.open_weights(args, config, adapters)
    if world.rank == 0:
        keys, bound = read_keys(args.api_key_file), bind(args.host, args.port)
        if not keys and not ipaddress.ip_address(bound.getsockname()[0]).is_loopback:
            world.say_aside(f"serve.py: --host {args.host} without --api-key-file: anybody may ask")
    # an idle server waits for long
    options = (cli.MONTH, adapters, quantize)
    model, tokenizer, _ = cli.connect(args, world, args.max_sequences, *options)
    sizes = (args.max_sequences, args.budget, args.block_size, args.blocks)
    engine = Engine(model, world.groups, *sizes, adapters.use if adapters.names else None)
    processes = Processes(world)
    if world.rank:
        return follow(engine, processes)
    # only a server needs aiohttp
    from serving.server import Server

    models = find_models(args, tokenizer, adapters)
    asyncio.run(Server(engine, tokenizer, models, keys, processes, args).run(bound))


def follow(engine: Engine, processes: Processes) -> None:
    """On every rank but 0."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # rank 0 closes the engine
        signal.signal(number, signal.SIG_IGN)
    try:
        engine.follow()
    except Exception as e:
        processes.fail(e)


def name_of(args: argparse.Namespace) -> str:
    return Path(args.checkpoint).resolve().name


def find_models(args: argparse.Namespace, tokenizer, adapters: Adapters) -> dict:
    """What a request can name -> api.Model, the base first."""
    from serving.api import Model

    models = {}
    for name in (name_of(args), *adapters.names):
        adapter = name if name in adapters.names else None
        # one without a name is in the base
        runs = [opened.path for key, opened in adapters.opened.items() if key == (adapter or "")]
        try:
            chat = find_chat(args.checkpoint, tokenizer, runs)
            models[name] = Model(adapter, chat, chat.end_of_turn())
        except ChatError as e:
            models[name] = Model(adapter, None, refusal=str(e))
    return models


def main(argv: list[str]) -> int:
    return cli.command("serve.py", run, argv, make_parser())
