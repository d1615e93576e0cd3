"""Prompts in, text out: what `python generate.py` does with flags.

Loads a checkpoint, a run or a Hugging Face folder under any layout, streams one continuation to the
terminal, continues a file of prompts (JSON lines in and out), or answers line by line. generate.py
has the technique; prompt_tuning.py has commands of the same kind.

    python generate.py --checkpoint runs/default --prompt "def " python generate.py --checkpoint
    runs/default --prompt-file prompts.jsonl --stop $'\\n\\n' > answers.jsonl torchrun
    --nproc-per-node 4 generate.py --tp 2 --pp 2 --checkpoint HF_DIR --interactive
"""

from runtime import terminal

if __name__ == "__main__":
    # PyTorch takes seconds to import, and Ctrl-C may come meanwhile.
    terminal.quiet_interrupts()

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch

import checkpoint
import gpt
import huggingface
import moe
import pipeline_parallel
import sharding
import tensor_parallel
from corpus.tokenizer import TokenizerError, make_tokenizer, prompt_ids
from generate import Piece, check_options, chunks_of, stream
from gpt import GPT, GPTConfig
from inference.packing import pack
from inference.sampling import keys_of
from prompts.prompt_data import PromptError, read_lines
from runtime.config import DTYPES, ConfigError, as_flags
from runtime.world import Groups, World, WorldError
from sharding import shard_of, sharding_of

# --- loading --------------------------------------------------------------------------------------


def open_model(path: "Path | str"):
    """(configuration, index, read) of the model of a checkpoint, a run or a Hugging Face folder: of
    this one read(name) gives a parameter, otherwise it is None. index: of a checkpoint, what it
    says; of a Hugging Face folder, the same keys. Raises CheckpointError or HuggingFaceError."""
    if huggingface.is_folder(path):
        config, read, tokenizer = huggingface.open_folder(Path(path))
        return (
            config,
            {"model": dataclasses.asdict(config), "config": {"tokenizer": tokenizer}, "step": 0},
            read,
        )
    path = checkpoint.find(path)
    return *checkpoint.read_model(path), None


def load_model(
    path: "Path | str",
    device="cpu",
    dtype: torch.dtype = torch.float32,
    groups: Groups = Groups(),
    layer_split: list[int] | None = None,
):
    """(model, index) from a checkpoint, the folder of a run (its newest), or a Hugging Face folder,
    cut as `groups` says: a GPT or, over pipeline stages, a Pipeline. index: as in `open_model`. All
    ranks call this together. Raises CheckpointError, HuggingFaceError, or ValueError for a layout
    that cannot be."""
    config, index, read = open_model(path)
    chunks = cut(config, groups, layer_split)
    parameters = {}
    checkpoint.check_room(
        str(path),
        sum(p.numel() for chunk in chunks for p in chunk.parameters()) * dtype.itemsize,
        device,
    )
    for chunk in chunks:
        sharding.materialise(chunk, device, dtype)
        chunk.requires_grad_(False).eval()
        parameters |= dict(sharding.named_parameters(chunk))
    if read:
        for name, p in parameters.items():
            p.copy_(shard_of(read(name), sharding_of(p)))
    else:
        checkpoint.load(
            checkpoint.find(path), {f"model.{name}": p for name, p in parameters.items()}
        )
    if not groups.pp:
        return chunks[0], index
    return (
        pipeline_parallel.Pipeline(chunks, pipeline_parallel.Channels(groups.pp, groups.nccl)),
        index,
    )


def cut(config: GPTConfig, groups: Groups, layer_split: list[int] | None = None) -> list[GPT]:
    """This rank's chunks of a model, on the meta device. Sequence parallelism has nothing to cut in
    a step of one token."""
    with torch.device("meta"):
        chunks = (
            pipeline_parallel.split(config, groups.pp.rank(), groups.pp.size(), 1, layer_split)
            if groups.pp
            else [GPT(config)]
        )
    for chunk in chunks:
        if groups.ep:
            moe.apply(chunk, groups.ep)
        if groups.tp:
            tensor_parallel.apply(chunk, groups.tp)
    return chunks


def find_tokenizer(path: "Path | str", index: dict, given: str | None = None):
    """The tokenizer that a model was trained with: `given`, or beside it, or by name. Raises
    TokenizerError; CheckpointError where the file beside it is not the one of training."""
    if given is None and huggingface.is_folder(path):
        given = str(index["config"]["tokenizer"])
    return make_tokenizer(
        checkpoint.tokenizer_of(checkpoint.find(path)) if given is None else given
    )


def fit(tokenizer, given: str | None, vocab_size: int) -> None:
    """Hold a tokenizer to a model's vocabulary. Raises TokenizerError."""
    if tokenizer.vocab_size == vocab_size + 1 and tokenizer.eot == vocab_size:
        # The end of text that was added to a vocabulary without one: the model cannot say it.
        tokenizer.vocab_size = vocab_size
        tokenizer.eot = None
        tokenizer.stop_ids = ()
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"--tokenizer {given or tokenizer.name}: its ids go up to {tokenizer.vocab_size - 1}, "
            f"and the model knows {vocab_size}; name the one that it was trained with"
        )


# --- text -----------------------------------------------------------------------------------------


class Clock:
    """What a person wants to know of a generation."""

    def __init__(self):
        self.begin = time.perf_counter()
        self.first = None
        self.last = None
        self.tokens = 0
        self.firsts = 0

    def tick(self, pieces: list[Piece]) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        new = sum(piece.token is not None for piece in pieces)
        # these are prefill's
        self.firsts += new if self.first == self.last else 0
        self.tokens += new

    def __str__(self) -> str:
        if self.first is None:
            return "no tokens"
        text = f"{self.tokens} tokens, the first after {self.first - self.begin:.3f} s"
        return text + (
            f", then {(self.tokens - self.firsts) / (self.last - self.first):,.1f} tokens/s"
            if self.tokens > self.firsts
            else ""
        )


class Texts:
    """What comes of prompts, as text. Stop strings are looked for in the text, and cut off."""

    def __init__(self, tokenizer, prompts: list[list[int]], stop: list[str] = ()):
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.stop = list(stop)
        # of the newest tokens, which have a byte each: a stop string that is just complete lies in
        # them
        self.tail = 8 + max((len(s.encode(errors="replace")) for s in stop), default=0)

    def text(self, number: int, ids: list[int]) -> str:
        """Of the new ids, up to the first stop string. Decoded with the prompt: a token may be part
        of a character, or lose its space at the start."""
        before = self.tokenizer.decode(self.prompts[number])
        text = self.tokenizer.decode(self.prompts[number] + ids)[len(before) :]
        ends = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def stopped(self, number: int, ids: list[int]) -> bool:
        return bool(self.stop) and any(
            stop in self.tokenizer.decode(ids[-self.tail :]) for stop in self.stop
        )


def show(model, tokenizer, prompt: list[int], stop: list[str], out, **options) -> Clock:
    """Stream the continuation of one prompt to a file like sys.stdout, or to nobody (None)."""
    texts = Texts(tokenizer, [prompt], stop)
    ids = []
    shown = 0
    clock = Clock()
    # characters that may be the beginning of a stop string
    held = max((len(s) for s in stop), default=1) - 1
    for pieces in stream(model, [prompt], stopped=texts.stopped, **options):
        clock.tick(pieces)
        ids += [piece.token for piece in pieces if piece.token is not None]
        text = texts.text(0, ids)
        finished = pieces[-1].finish is not None
        # half a character: wait for the rest
        if finished or not text.endswith("\ufffd"):
            ready = len(text) if finished else len(text) - held
            if out and ready > shown:
                print(text[shown:ready], end="", flush=True, file=out)
            shown = max(shown, ready)
    return clock


def read_prompts(path: str, tokenizer, seq_length: int) -> list[tuple[dict, list[int]]]:
    """(the line, its prompt's ids) of a JSON-lines file, `-` for standard input. Raises
    PromptError, naming the line."""
    found = []
    for number, record in read_lines(path):
        try:
            if not isinstance(record.get("prompt"), str):
                raise PromptError('not an object with a "prompt" that is text')
            if taken := {"text", "tokens", "finish"} & record.keys():
                raise PromptError(
                    f"{sorted(taken)} would be overwritten by what is generated; give it another"
                    " name"
                )
            found.append((record, encode(record["prompt"], tokenizer, seq_length)))
        except PromptError as e:
            raise PromptError(f"{path}, line {number}: {e}") from None
    if not found:
        raise PromptError(f"--prompt-file {path}: no prompts in it")
    return found


def as_json(line: dict) -> str:
    """One line of JSON. Characters as they are where the output can show them, as \\u.... where it
    cannot."""
    text = json.dumps(line, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return json.dumps(line)
    return text


def encode(text: str, tokenizer, seq_length: int) -> list[int]:
    """Raises PromptError."""
    try:
        ids = [int(i) for i in tokenizer.encode(text)]
    except UnicodeEncodeError:
        raise PromptError("the prompt is not text: it has half a surrogate pair in it") from None
    except TokenizerError as e:
        raise PromptError(f"the prompt cannot be encoded ({e})") from None
    if not ids:
        raise PromptError("the prompt is empty")
    ids = prompt_ids(tokenizer, text)
    if len(ids) > seq_length:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, and the model's context holds {seq_length}: cut it"
        )
    return ids


def answer_file(
    world: World,
    model,
    tokenizer,
    requests: list[tuple[dict, list[int]]],
    batch_size: int,
    stop: list[str],
    together,
    write,
    **options,
) -> str:
    """Continue all prompts, `batch_size` at a time on each of the data-parallel ranks; write(line,
    text, piece) gets them in order, on rank 0, as batches are finished. Returns what the clock
    says."""
    groups = world.groups
    clock = Clock()
    dp, rank = (groups.dp.size(), groups.dp.rank()) if groups.dp else (1, 0)
    keys = keys_of([ids for _, ids in requests], options.pop("seed"))
    for start in range(0, len(requests), dp * batch_size):
        numbers = range(start, min(start + dp * batch_size, len(requests)))
        mine = list(numbers)[rank::dp]
        texts = Texts(tokenizer, [requests[n][1] for n in mine], stop)
        ids = {n: [] for n in mine}
        ends = {}
        for pieces in stream(
            model,
            texts.prompts,
            stopped=texts.stopped,
            together=together,
            keys=[keys[n] for n in mine],
            **options,
        ):
            clock.tick(pieces)
            for piece in pieces:
                if piece.token is not None:
                    ids[mine[piece.number]].append(piece.token)
                ends[mine[piece.number]] = piece.finish
        done = {
            n: (texts.text(i, ids[n]), len(ids[n]), ends.get(n, "length"))
            for i, n in enumerate(mine)
        }
        everywhere = {n: answer for one in world.gather(done) for n, answer in one.items()}
        for n in numbers if world.rank == 0 else ():
            write(requests[n][0], *everywhere[n])
    return f"{len(requests)} prompts: {clock}" + (
        f" on each of {dp} data-parallel ranks" if dp > 1 else ""
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What every command that generates takes."""
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        required=True,
        help="a checkpoint, the folder of a run, or a Hugging Face folder",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=300, help="of a continuation (default: 300)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0: always the likeliest token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens; 0: all"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="only the likeliest tokens that make up probability P",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="with the same seed a prompt has the same continuation, but for rounding",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given more than once",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=16,
        help="prompts of a file that a rank continues at a time (default: 16)",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument(
        "--pp",
        type=int,
        default=1,
        help="pipeline-parallel ranks; the rest of the ranks is data parallel",
    )
    parser.add_argument(
        "--ep", type=int, default=1, help="of the data-parallel ranks, so many share the experts"
    )
    parser.add_argument(
        "--layer-split",
        type=int,
        nargs="+",
        metavar="N",
        help="layers of each pipeline stage; the default is an even split",
    )
    parser.add_argument(
        "--precision", choices=tuple(DTYPES), help="the default is bf16 on CUDA and fp32 on CPUs"
    )
    parser.add_argument("--tokenizer", help="if the one that the model was trained with has moved")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def check_flags(args, world: World) -> GPTConfig:
    """What can be known before any rank talks to another. Returns the model's configuration. Raises
    ConfigError, CheckpointError or HuggingFaceError."""
    for name, least in (("batch_size", 1), ("seed", 0), ("tp", 1), ("pp", 1), ("ep", 1)):
        if not least <= getattr(args, name) < 2**31:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least} and"
                " below 2^31"
            )
    if not args.checkpoint:
        raise ConfigError("--checkpoint '': names no folder")
    if "" in args.stop:
        raise ConfigError("--stop '': is in every text; name one that is not empty")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: this machine has no usable CUDA device; --device cpu would run"
        )
    config, *_ = open_model(args.checkpoint)
    try:
        check_options(args.max_tokens, args.temperature, args.top_k, args.top_p)
    except ValueError as e:
        raise ConfigError("--" + str(e).replace("_", "-", 1)) from None
    if world.size % (args.tp * args.pp):
        raise ConfigError(
            f"--tp {args.tp} --pp {args.pp}: their product must divide the {world.size} ranks;"
            f" {gpt.divisors(world.size, args.tp * args.pp)} would"
        )
    if args.layer_split and args.pp == 1:
        raise ConfigError(f"--layer-split {args.layer_split}: needs --pp 2 or more")
    with as_flags():
        tensor_parallel.check(config, args.tp, world.size)
        if args.pp > 1:
            pipeline_parallel.layer_split(config.num_layers, args.pp, 1, args.layer_split)
        moe.check(config, args.ep, world.size // args.tp // args.pp)
    return config


def connect(args, world: World, batch: int, timeout: float = 1800.0):
    """Meet the other ranks, and load, to continue `batch` texts at a time. Returns (model,
    tokenizer, together)."""
    world.connect(args.device, args.tp, args.pp, timeout, args.ep)
    precision = args.precision or ("bf16" if world.device.type == "cuda" else "fp32")
    model, index = load_model(
        args.checkpoint, world.device, DTYPES[precision], world.groups, args.layer_split
    )
    for chunk in chunks_of(model):
        pack(chunk, batch)
    tokenizer = find_tokenizer(args.checkpoint, index, args.tokenizer)
    config = chunks_of(model)[0].config
    fit(tokenizer, args.tokenizer, config.vocab_size)
    return model, tokenizer, world.groups.dp if args.ep > 1 else None


def run(args, world: World) -> None:
    config = check_flags(args, world)
    if sum((args.prompt is not None, args.prompt_file is not None, args.interactive)) > 1:
        raise ConfigError("--prompt, --prompt-file, --interactive: one of them")
    model, tokenizer, together = connect(
        args,
        world,
        args.batch_size if args.prompt_file is not None else 1,
        30 * 86400.0 if args.interactive else 1800.0,
    )
    options = dict(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        eot=tokenizer.stop_ids,
    )
    out = sys.stdout if world.rank == 0 else None
    if args.prompt_file is not None:
        requests = world.on_rank_0(
            lambda: read_prompts(args.prompt_file, tokenizer, config.seq_length), (PromptError,)
        )

        def write(line: dict, text: str, tokens: int, finish: str) -> None:
            print(as_json(line | {"text": text, "tokens": tokens, "finish": finish}), flush=True)

        told = answer_file(
            world,
            model,
            tokenizer,
            requests,
            args.batch_size,
            args.stop,
            together,
            write,
            **options,
        )
    elif args.interactive:
        return converse(world, model, tokenizer, config, args.stop, out, **options)
    else:
        prompt = (
            prompt_ids(tokenizer, "")
            if args.prompt is None
            else encode(args.prompt, tokenizer, config.seq_length)
        )
        if not prompt:
            raise PromptError(
                "a new text begins with a begin or an end token, and this tokenizer has neither"
                " that the model knows; give --prompt"
            )
        if out:
            print(args.prompt or "", end="", flush=True)
        told = show(model, tokenizer, prompt, args.stop, out, **options)
        if out:
            print(flush=True)
    if world.rank == 0:
        print(told, file=sys.stderr)


def converse(
    world: World, model, tokenizer, config: GPTConfig, stop: list[str], out, **options
) -> None:
    """A prompt a line, until the end of input."""
    while True:
        line = None
        if world.rank == 0:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                pass
        line = world.gather(line)[0]
        if line is None:
            return
        try:
            prompt = encode(line, tokenizer, config.seq_length)
        except PromptError as e:
            world.say(e)
            continue
        clock = show(model, tokenizer, prompt, stop, out, **options)
        world.say("")
        world.say_aside(clock)


def command(name: str, work, argv: list[str], parser: argparse.ArgumentParser) -> int:
    """work(args, world) under a launcher or without one. Exit status: 0; 2 with one message for
    what cannot be; 130 for Ctrl-C."""
    terminal.prepare()
    try:
        world = World.from_launcher()
    except WorldError as e:
        terminal.say(f"{name}: {e}", error=True)
        return 2
    if world.rank:
        # Rank 0 says it.
        parser.error = lambda message: (terminal.let_rank_0_speak(world.rank), sys.exit(2))
    args = parser.parse_args(argv)
    status = 0
    message = None
    alone = False
    try:
        work(args, world)
    except (
        ConfigError,
        WorldError,
        PromptError,
        checkpoint.CheckpointError,
        huggingface.HuggingFaceError,
        TokenizerError,
    ) as e:
        status = 2
        message = str(e)
        alone = isinstance(e, WorldError)
    except FloatingPointError as e:
        status = 1
        message = f"{e}: this model has diverged"
    except KeyboardInterrupt:
        status = 130
    # who reads has seen enough
    except BrokenPipeError:
        terminal.mute(sys.stdout)
        status = 1
    except OSError as e:
        terminal.mute(sys.stdout)
        status = 1
        message = (
            f"{e.filename or 'standard output'}: {e.strerror or e}; the rest of the answers is lost"
        )
        alone = True
    if message and (world.rank == 0 or alone):
        terminal.say(terminal.one_line(f"{name}: {message}"), error=True)
    if status == 1 and world.size > 1 and (alone or not message):
        # peers wait in a collective
        os._exit(1)
    world.disconnect()
    if status == 2:
        terminal.let_rank_0_speak(world.rank)
    return status


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Continue prompts with a trained model.")
    add_flags(parser)
    parser.add_argument("--prompt", help="without it, a new text is begun")
    parser.add_argument(
        "--prompt-file",
        metavar="FILE",
        help=(
            'JSON lines with a "prompt"; out come the same lines with "text", "tokens" and'
            ' "finish"; - is standard input'
        ),
    )
    parser.add_argument("--interactive", action="store_true", help="a prompt a line")
    return command("generate.py", run, argv, parser)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
