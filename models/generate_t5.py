r"""T5 writes: the encoder reads a source once, then the decoder writes its target token by token.

    encode     source -> encoder blocks -> e          each layer makes keys and values of e once,
    decode     newest token -> decoder blocks         and keeps them; those of self-attention grow
               -> logits -> next token                by one in each step

Sources of unequal lengths go together, and their padding is hidden. All targets begin with <pad>,
so the newest tokens of a batch stand at one position. The loop and the draw are generate.py's, and
so is the ring of pipeline stages: e goes along it once, then one token of each target at a time.

    python -m models.generate_t5 --checkpoint runs/t5 --text "The capital of <extra_id_0> is Paris."
    python -m models.generate_t5 --checkpoint runs/t5 --data pairs.jsonl > written.jsonl
    torchrun --nproc-per-node 4 -m models.generate_t5 --tp 2 --pp 2 --checkpoint HF_DIR --text ".."

A text with sentinels is printed with what the model has written in their places. A line of --data
has a "source", and gets a "text"; lines that have a "target" are counted where the two are equal.

Not covered: beam search; finished targets that make room in their batch.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

import generate
from base import compiling, terminal
from base.attention_kernels import any_shape
from finetune.prompt_data import read_examples
from inference import cli, prompt_tuning
from inference.adapted import Adapters
from inference.answers import answer_file, as_json, encode, read_prompts
from inference.batches import DecodeBatch
from inference.kv_cache import CacheSlot, caching
from inference.loading import open_model
from inference.requests import Output, Sequence, requests_of
from inference.sampling import keys_of
from inference.token_bytes import token_bytes
from models.batch import Context, pad_rows
from models.special_tokens import SENTINEL, T5Text, fill
from models.t5 import T5, T5Config
from pipeline_parallel import Pipeline, stages_of
from prompt_tuning import apply_tables
from run.config import ConfigError, flag_name

# --- what is kept ---------------------------------------------------------------------------------


@dataclass
class Kept:
    """What a batch keeps of earlier steps."""

    # e, [b, n, h], and the bias of its keys, [b, 1, 1, n]: -∞ for padding. None: not encoded yet.
    memory: Tensor | None = None
    mask: Tensor | None = None
    # Tokens of each target that were read.
    length: int = 0
    # Name of an attention layer -> keys, values: [b, length or n, a d] each
    layers: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class KeptProjection(nn.Module):
    """Calls an attention's linear layers, and keeps keys and values: self-attention's with those
    of earlier tokens, or cross attention's of e, which are computed once."""

    def __init__(self, project: nn.Module, layer: str, crosses: bool, slot: CacheSlot):
        super().__init__()
        self.project, self.layer, self.crosses, self.slot = project, layer, crosses, slot

    def forward(self, x: Tensor, *linears: nn.Module) -> list[Tensor]:
        """x: [b, 1, h], or e [b, n, h] -> query, keys, values; of e without a query"""
        kept = self.slot.cache.layers
        if self.crosses and self.layer in kept:
            return kept[self.layer]
        *query, k, v = self.project(x, *linears)
        if self.layer in kept:
            k, v = (torch.cat(pair, 1) for pair in zip(kept[self.layer], (k, v)))
        kept[self.layer] = k, v
        return [*query, k, v]


def replacements(stage: T5, slot: CacheSlot) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """As inference.kv_cache.replacements."""
    for layer, block in blocks_of(stage, decoder=True):
        for parent, name, crosses in (
            (block.attention, "project", False),
            (block.cross_attention, "project_kv", True),
        ):
            kept = KeptProjection(getattr(parent, name), f"{layer}.{name}", crosses, slot)
            yield parent, name, kept


def blocks_of(stage: T5, decoder: bool) -> list[tuple[str, nn.Module]]:
    """(number, block) of a stage's blocks of one half of the model."""
    first = stage.config.encoder_layers
    return [(n, block) for n, block in stage.blocks.items() if (int(n) >= first) == decoder]


# --- forward passes -------------------------------------------------------------------------------


@dataclass(eq=False)
class SourceBatch(DecodeBatch):
    """Sources, and as `sequences` their targets, each after a prompt of one token, <pad>."""

    sources: list[list[int]] = field(default_factory=list)

    def __post_init__(self):
        self.cache = Kept()

    def next_tokens(self) -> Tensor:
        self.cache.length += 1
        return torch.tensor([target.ids[-1:] for target in self.sequences], device=self.device)

    def drop_finished(self) -> None:
        """They stay, and what comes after their end is not read."""


class Writer(generate.ModelRunner):
    """Runs forward passes of this rank's part of a T5."""

    def __init__(self, model: T5 | Pipeline):
        super().__init__(model)
        # A CUDA graph has fixed shapes, and keys grow.
        self.captures = False

    def start_step(self, batch: SourceBatch) -> None:
        if batch.cache.memory is None:
            self.encode(batch.cache, batch.sources)
        super().start_step(batch)

    @torch.inference_mode()
    @any_shape()
    @compiling.eagerly
    def encode(self, kept: Kept, sources: list[list[int]]) -> None:
        """The sources through this stage's blocks of the encoder."""
        (stage,) = self.stages
        n = max(map(len, sources))
        tokens, real = (rows.to(self.device) for rows in pad_rows(sources, n))
        hidden = ~real[:, None, None]  # [b, 1, 1, n]
        kept.mask = torch.zeros_like(hidden, dtype=self.dtype).masked_fill(hidden, -torch.inf)
        if stage.embedding is None:
            shape = len(sources), n, self.config.hidden_size
            e = self.ring.receive(torch.empty(shape, dtype=self.dtype, device=self.device))
        else:
            e = stage.embedding(tokens, Context(n))
        at = torch.arange(n, device=self.device)
        bias = stage.positions(at, at, False) + kept.mask  # [b, a, n, n]
        for _, block in blocks_of(stage, decoder=False):
            e = block(e, Context(n), bias)
        kept.memory = e
        if self.ring and not self.ring.is_last:
            self.ring.send(e)

    def compute(self, chunk: int, cache: Kept, x: Tensor, last_column: None) -> Tensor:
        """The newest token of each target through this stage. x: tokens [b, 1], or activations
        [b, 1, h] -> logits [b, V], or activations"""
        stage, context = self.stages[chunk], Context(0)
        if stage.embedding is not None:
            x = stage.embedding(x, context)
        at = torch.arange(cache.length, device=self.device)
        bias = stage.positions(at[-1:], at, True)  # [1, a, 1, length]
        for _, block in blocks_of(stage, decoder=True):
            x = block(x, context, bias, cache.memory, cache.mask)
        return x if stage.head is None else stage.head(x)[:, 0]


def stream(
    model: T5 | Pipeline,
    sources: list[list[int]],
    max_tokens: int,
    begin: int,
    lockstep=None,
    keys: list[int] | None = None,
    seed: int = 0,
    **options,
) -> Iterator[list[Output]]:
    """Yields what each step gives to the targets of a batch, as generate.stream, whose arguments
    and errors these are.

    sources: token ids, with </s>. begin: what the decoder reads first, <pad>."""
    keys = keys_of(sources, seed) if keys is None else keys
    requests = requests_of([[begin]] * len(sources), max_tokens, keys=keys, **options)
    targets = [Sequence(n, request) for n, request in enumerate(requests)]
    runner = Writer(model)
    shared = dict(config=runner.config, device=runner.device, caches=None)
    # As many batches as stages, so that all of these work.
    p = min(runner.ring.p if runner.ring else 1, len(sources))
    batches = [SourceBatch(targets[n::p], sources=sources[n::p], **shared) for n in range(p)]
    with caching(runner.stages, runner.slot, replacements):
        yield from generate.decode(runner, batches if max_tokens else [], lockstep)
        if runner.ring:
            runner.ring.wait_for_all_but(0)


# --- the command ----------------------------------------------------------------------------------


def read_tasks(args, world, model, config: T5Config, text: T5Text) -> tuple[list, dict]:
    """Give the model the prompts of --prompts. Returns (what read_prompts does of --data, whose
    lines have the fields of a template; task -> the field of its answer). A collective."""
    prompts, tables = prompt_tuning.read_prompts(args, config)
    for stage in stages_of(model):
        apply_tables(stage, tables)
    first_ids = prompts.prompt_tasks.first_ids(config.vocab_size)
    # One for </s>.
    about = prompts.templates, first_ids, text.tokenizer, config.seq_length - 1
    read = partial(read_examples, [args.data], *about, answer=False)
    examples, records, summary = world.on_rank_0(read)
    world.say_aside(summary)
    pairs = [(record, example) for record, example in zip(records, examples) if example]
    requests = [(record, [*example.ids, text.tokens.eos]) for record, example in pairs]
    return requests, {name: each.answer_field for name, each in prompts.templates.items()}


def read_requests(args, world, model, config: T5Config, text: T5Text) -> tuple[list, dict]:
    """(record and ids of each source, as `read_tasks`). Raises PromptError."""
    if args.prompts:
        return read_tasks(args, world, model, config, text)
    if args.data is None:
        return [({"source": args.text}, encode(args.text, text, config.seq_length))], {}
    read = partial(read_prompts, args.data, text, config.seq_length, field="source")
    return world.on_rank_0(read), {}


def run(args: argparse.Namespace, world) -> None:
    if (args.text is None) == (args.data is None):
        raise ConfigError("--text TEXT or --data FILE: one of them names what is read")
    for name in ("prompts", "batch_size"):
        if args.text is not None and (value := getattr(args, name)) is not None:
            raise ConfigError(f"{flag_name(name)} {value}: is for --data; leave it out")
    if args.prompts and args.prefix:
        raise ConfigError(f"--prefix {args.prefix}: a template of --prompts has it; leave it out")
    config = cli.check_flags(args, world)
    adapters = Adapters(args.adapter, args.checkpoint, config, args.tp)
    model, tokenizer, _ = cli.connect(args, world, None, adapters=adapters)
    imported = not open_model(args.checkpoint, T5Config)[1]["step"]
    text = T5Text(tokenizer, config.vocab_size, args.prefix, imported)
    token_bytes(tokenizer).show(dict(zip(text.sentinels.values(), text.sentinels)))
    requests, answer_fields = read_requests(args, world, model, config, text)
    name, equal = "prediction" if args.prompts else "text", []

    def write(record: dict, written: str, tokens: int, finish: str) -> None:
        written, source = written.strip(), record.get("source", "")
        filled = fill(source, written) if SENTINEL.search(source) else written
        target = record.get(answer_fields.get(record.get("taskname"), "target"))
        if target is not None:
            equal.append(written == str(target))
        line = as_json(record | {name: filled, "tokens": tokens, "finish": finish})
        world.say(filled if args.data is None else line)

    options = {flag: getattr(args, flag) for flag in cli.SAMPLING}
    options |= dict(begin=text.tokens.pad, eot=text.tokens.eos, write=write, lockstep=None)
    options["unit"] = "source"
    shared = tokenizer, requests, args.batch_size, args.stop
    summary = answer_file(world, partial(stream, model), *shared, **options)
    if equal:
        summary += f"; {sum(equal)} of {len(equal)} targets are what was written"
    world.say_aside(summary)


def main(argv: list[str]) -> int:
    """Returns the exit status, as of generate.py."""
    about = "Write the targets of sources with a trained T5."
    parser = argparse.ArgumentParser(
        prog="python -m models.generate_t5", description=about, conflict_handler="resolve"
    )
    parser.add_argument("--text", help="a source; the sentinels in it are filled in")
    lines = 'JSON lines with a "source"; the output has the same lines with a "text"'
    parser.add_argument("--data", metavar="FILE", help=lines)
    parser.add_argument("--prompts", metavar="FILE", help="of models/prompt_t5.py: learned prompts")
    parser.add_argument("--prefix", default="", metavar="TEXT", help="comes before each source")
    parser.add_argument("--adapter", nargs=1, default=[], help="a run of models/seq2seq.py --peft")
    cli.add_flags(parser, T5Config)
    likeliest = "0: the likeliest token (default: 0; --top-k and --top-p need more)"
    parser.add_argument("--temperature", type=float, default=0.0, help=likeliest)
    parser.set_defaults(top_k=0, top_p=1.0)
    return cli.command("generate_t5.py", run, argv, parser)


if __name__ == "__main__":
    terminal.command(main)
