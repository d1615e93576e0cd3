"""Text from a trained model: prefill, then one token at a time with a key-value cache.

    prompts    a b c d       prefill: every prompt at once, as in training;     keys, values  [b, a, S, d]
               e f . .       its keys and values stay                              row 0  a b c d x . .
                                                                                   row 1  e f y . . . .
    decode     x             each step runs the newest token of each row alone:    column j of a row is position j of its context
               y             it attends to the columns up to its own

Without the cache (kv_cache.py), token n costs a forward pass over all n; with it, over one. Rows
stand at the left, so a token's position is the one that it had in training.

Tokens are drawn by sampling.py, with random numbers that depend on (seed, prompt, position) alone:
a prompt has the same text in any batch, under any layout, but for what rounding decides (nothing in
float64, little in float32; in 16 bits texts part after some dozens of tokens).

When a text outgrows the context, it goes on from its last half, prefilled anew: a cache of absolute
positions cannot be shifted.

Pipeline stages work at once, each on another part of the batch, and what is chosen at the end goes
round to the first stage:

    stage 0   a0 b0 a1 b1 a2 b2             a, b: halves of the batch; a1 is the token that a0 gave
    stage 1      a0 b0 a1 b1 a2 b2

    python generate.py                                                        a small model: with and without cache
    python generate.py --checkpoint runs/default --prompt "def "
    python generate.py --checkpoint runs/default --prompt-file prompts.jsonl > answers.jsonl        {"prompt": ".."} a line
    torchrun --nproc-per-node 4 generate.py --tp 2 --pp 2 --checkpoint HF_DIR --interactive

What a serving system adds: new prompts joining a batch that is decoding; speculative decoding;
quantised weights."""

from runtime import terminal

if __name__ == "__main__":
    # PyTorch takes seconds to import, and Ctrl-C may come meanwhile.
    terminal.quiet_interrupts()

import itertools
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import gpt
import moe
import pipeline_parallel
from gpt import GPT, GPTConfig
from inference.kv_cache import Cache, Place, caching
from inference.sampling import DIVERGED, choose, keys_of, uniform

# --- a batch on its way ---------------------------------------------------------------------------


def window(n: int, seq_length: int) -> int:
    """Where the context of token n (the n tokens before it) begins: at 0 until they outgrow
    seq_length, then at a multiple of its half."""
    half = max(1, seq_length // 2)
    return max(0, -(-(n - seq_length) // half) * half)


@dataclass
class Row:
    """A prompt and what came of it."""

    # among the prompts
    number: int
    ids: list[int]
    key: int
    prompt_length: int = field(init=False)
    # `end of text`, `stop` or `length`, once it is finished
    finish: str | None = None

    def __post_init__(self):
        self.prompt_length = len(self.ids)


class Piece(NamedTuple):
    """What a step gives a row: a token, or none with the finish `end of text`."""

    number: int
    token: int | None
    finish: str | None


class Batch:
    """Rows that go forward together, on this rank."""

    def __init__(
        self,
        rows: list[Row],
        config: GPTConfig,
        max_tokens: int,
        cached: bool,
        device,
        capture: bool,
    ):
        self.rows = rows
        self.config = config
        self.max_tokens = max_tokens
        self.device = device
        self.capture = capture
        # of the windows in the cache
        self.begins: list[int] = []
        self.graphs: dict[tuple, Captured] = {}
        most = max(row.prompt_length for row in rows) + max_tokens
        self.cache = Cache(min(most, config.seq_length) if cached else 0)

    def arrange(self) -> Tensor:
        """Prepare the next forward: prefill, where a window has moved, or decode. Returns its
        tokens [b, s]."""
        begins = [window(len(row.ids), self.config.seq_length) for row in self.rows]
        lengths = [len(row.ids) - begin for row, begin in zip(self.rows, begins)]
        cache = self.cache
        if begins != self.begins or not cache.columns:
            self.begins = begins
            cache.positions = None
            s = max(lengths)
            tokens = [
                row.ids[begin:] + [0] * (s - n) for row, begin, n in zip(self.rows, begins, lengths)
            ]
            self.last = torch.tensor(lengths, device=self.device) - 1
        else:
            tokens = [row.ids[-1:] for row in self.rows]
            cache.used, cache.positions = (
                max(lengths),
                torch.tensor(lengths, device=self.device) - 1,
            )
            cache.at = lengths[0] - 1 if min(lengths) == cache.used else None
            self.last = None
            # a graph has one shape: the next power of two
            if self.capture:
                cache.used = min(cache.columns, 1 << (max(64, cache.used) - 1).bit_length())
                cache.at = None
        return torch.tensor(tokens, device=self.device)

    def advance(self, tokens: list[int], eot: tuple[int, ...], stopped) -> list[Piece]:
        """Give each row its token; one of `eot` ends it."""
        pieces = []
        for row, token in zip(self.rows, tokens):
            if row.finish:
                continue
            if token in eot:
                row.finish = "end of text"
            else:
                row.ids.append(token)
                new = len(row.ids) - row.prompt_length
                row.finish = (
                    "stop"
                    if stopped and stopped(row.number, row.ids[-new:])
                    else "length"
                    if new == self.max_tokens
                    else None
                )
            pieces.append(Piece(row.number, None if token in eot else token, row.finish))
        live = [i for i, row in enumerate(self.rows) if not row.finish]
        # the finished half need not go on
        if live and 2 * len(live) <= len(self.rows):
            self.rows = [self.rows[i] for i in live]
            self.begins = [self.begins[i] for i in live]
            self.cache.keep(live)
            self.graphs.clear()
        return pieces

    @property
    def live(self) -> bool:
        return any(not row.finish for row in self.rows)


class Captured:
    """A function of tensors as a CUDA graph: all its kernels in one launch. Its result is
    overwritten by the next call."""

    def __init__(self, function, *inputs: Tensor):
        self.inputs = [x.clone() for x in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # what is set up in a first call must not be captured
        with torch.cuda.stream(stream):
            for _ in range(3):
                function(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        for mine, x in zip(self.inputs, inputs):
            mine.copy_(x)
        self.graph.replay()
        return self.result


class Runner:
    """Forward passes of this rank's chunks."""

    def __init__(self, chunks: list[GPT], place: Place):
        self.chunks = chunks
        self.place = place
        # packed ones are buffers
        self.config = chunks[0].config
        parameter = next(x for chunk in chunks for x in (*chunk.parameters(), *chunk.buffers()))
        self.device = parameter.device
        self.dtype = parameter.dtype
        self.rotary = (
            gpt.rotary_table(self.config, self.config.seq_length, parameter)
            if self.config.llama
            else None
        )
        groups = [
            module.group
            for chunk in chunks
            for module in chunk.modules()
            if getattr(module, "group", None)
        ]
        # routing waits for the host, and so does gloo
        self.capture = (
            self.device.type == "cuda"
            and not moe.layers(*chunks)
            and all(dist.get_backend(group) == "nccl" for group in groups)
        )

    @torch.inference_mode()
    # a compiled block would be compiled again for every length
    @torch.compiler.set_stance("force_eager")
    def forward(self, c: int, batch: Batch, tokens: Tensor, x: Tensor | None) -> Tensor:
        """Chunk c. tokens: [b, s]; x: [b, s, h] from the stage before. Returns [b, s, h], or of the
        last chunk logits [b, V] of the next token."""
        cache = batch.cache
        first = tokens if x is None else x
        self.place.cache = cache
        if cache.positions is None or not self.capture:
            return self.compute(c, cache, first, batch.last)
        if (c, cache.used) not in batch.graphs:

            def function(first, positions):
                cache.positions = positions
                return self.compute(c, cache, first, None)

            batch.graphs[c, cache.used] = Captured(function, first, cache.positions)
        return batch.graphs[c, cache.used](first, cache.positions)

    def compute(self, c: int, cache: Cache, x: Tensor, last: Tensor | None) -> Tensor:
        """x: tokens or activations; last: [b], of a prefill the last token of each row."""
        chunk = self.chunks[c]
        at = cache.positions
        rotary = None
        cache.mask = None
        if at is not None and cache.at is None:
            unseen = torch.arange(cache.used, device=self.device) > at[:, None, None, None]
            cache.mask = torch.zeros(
                unseen.shape, dtype=self.dtype, device=self.device
            ).masked_fill_(unseen, -torch.inf)
        if self.rotary:
            rotary = tuple(
                t[: x.shape[1]] if at is None else t[at][:, None, None] for t in self.rotary
            )
        if chunk.embedding is not None:
            x = chunk.embedding(x)  # [b, s, h]
        for block in chunk.blocks.values():
            x = block(x, None, rotary)
        if chunk.head is None:
            return x
        if last is not None:
            x = x[torch.arange(len(x), device=x.device), last].unsqueeze(1)
        return chunk.head(x)[:, 0]


# --- a pipeline of them ---------------------------------------------------------------------------


class Ring:
    """Stages one after the other, and from the last back to the first. Messages between two ranks
    arrive in the order in which they were sent."""

    def __init__(self, channels: pipeline_parallel.Channels):
        self.channels = channels
        self.rank = channels.group.rank()
        self.p = channels.group.size()
        # (work, tensor), until it has arrived
        self.sent = deque()

    def send(self, x: Tensor) -> None:
        x = x.contiguous()
        self.sent.append((self.channels.send(x, (self.rank + 1) % self.p, "F", 0), x))
        # by now the oldest has been answered
        while len(self.sent) > 4 * self.p:
            self.sent.popleft()[0].wait()

    def receive(self, x: Tensor) -> Tensor:
        self.channels.receive(x, (self.rank - 1) % self.p, "F", 0).wait()
        return x

    def finish(self) -> None:
        while self.sent:
            self.sent.popleft()[0].wait()


def most_of(number: int, group: dist.ProcessGroup | None, device) -> int:
    """The largest of the ranks' numbers. A collective, where there is a group."""
    if group is None:
        return number
    x = torch.tensor([number], device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    return int(x)


class Decoder:
    """Parts of a batch on their way through this rank's chunks, as many parts as there are
    stages."""

    def __init__(
        self,
        runner: Runner,
        ring: Ring | None,
        batches: list[Batch],
        sampling: tuple[float, int, float],
        together: dist.ProcessGroup | None,
    ):
        """sampling: temperature, top_k, top_p. together: as in `stream`."""
        self.runner = runner
        self.ring = ring
        self.batches = batches
        self.sampling = sampling
        self.together = together
        self.p, self.rank = (ring.p, ring.rank) if ring else (1, 0)
        self.last = self.rank == self.p - 1
        # part -> its newest tokens [b], on the last rank
        self.chosen: dict[int, Tensor] = {}
        # part -> what goes into this step
        self.inputs: dict[int, Tensor] = {}

    def steps(self, eot: tuple[int, ...], stopped):
        """Until all rows are finished."""
        going = list(range(len(self.batches)))
        for step in itertools.count():
            for n in list(going):
                pieces, goes_on = self.advance(n, eot, stopped) if step else ([], True)
                if pieces:
                    yield pieces
                if goes_on:
                    self.inputs[n] = self.batches[n].arrange()
                    self.run(0, n)
                else:
                    going.remove(n)
            for c in range(1, len(self.runner.chunks)):
                for n in going:
                    self.run(c, n)
            if not going:
                break
        if self.ring:
            self.ring.finish()

    def run(self, c: int, n: int) -> None:
        """Part n through chunk c, from the rank before to the rank after."""
        runner = self.runner
        batch = self.batches[n]
        x = None
        if not self.rank == c == 0:
            x = self.ring.receive(
                torch.empty(
                    *self.inputs[n].shape,
                    runner.config.hidden_size,
                    dtype=runner.dtype,
                    device=runner.device,
                )
            )
        y = runner.forward(c, batch, self.inputs[n], x)
        if self.last and c == len(runner.chunks) - 1:
            y = self.chosen[n] = self.choose(batch, y)
        if self.ring:
            self.ring.send(y)

    def choose(self, batch: Batch, logits: Tensor) -> Tensor:
        """logits: [b, V] -> tokens [b]"""
        keys, at = (
            torch.tensor(x, device=logits.device)
            for x in ([row.key for row in batch.rows], [len(row.ids) for row in batch.rows])
        )
        # the likeliest needs no random number
        return choose(logits, uniform(keys.int(), at) if self.sampling[0] else keys, *self.sampling)

    def arrived(self, n: int) -> list[int]:
        """The tokens that part n was given, from the last rank round to all."""
        if self.last:
            return self.chosen.pop(n).tolist()
        tokens = self.ring.receive(
            torch.empty(len(self.batches[n].rows), dtype=torch.long, device=self.runner.device)
        )
        if self.rank < self.p - 2:
            self.ring.send(tokens)
        return tokens.tolist()

    def advance(self, n: int, eot: tuple[int, ...], stopped) -> tuple[list[Piece], bool]:
        """(what part n was given, whether any rank goes on with it)"""
        tokens = self.arrived(n)
        diverged = DIVERGED in tokens
        pieces = [] if diverged else self.batches[n].advance(tokens, eot, stopped)
        state = most_of(
            2 if diverged else int(self.batches[n].live), self.together, self.runner.device
        )
        if state == 2:
            raise FloatingPointError("the model's logits are not finite")
        return pieces, bool(state)


def chunks_of(model: "GPT | pipeline_parallel.Pipeline") -> list[GPT]:
    """A whole model is a chunk too."""
    return [model] if isinstance(model, GPT) else model.chunks


def stream(
    model: "GPT | pipeline_parallel.Pipeline",
    prompts: list[list[int]],
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eot: "int | tuple[int, ...] | None" = None,
    stopped=None,
    cached: bool = True,
    together: dist.ProcessGroup | None = None,
    keys: list[int] | None = None,
):
    """Yield, after each step, the `Piece`s of a part of the batch, on every rank that holds a part
    of the model; all of these call it with the same arguments.

    prompts: token ids, at least one and at most seq_length for each. eot: the token that ends a
    text, and is not yielded, or several such. stopped(number, new ids) -> bool: whether prompt
    `number` is finished. cached False: every step runs the whole context again. together: ranks
    with prompts of their own (or none) whose forward passes are collectives of all of them: experts
    spread over them, or parameters (ZeRO stage 3). keys: of the random numbers of each prompt,
    where the prompts are some of many; otherwise `keys_of(prompts, seed)`. Raises ValueError for a
    prompt or option that cannot be; FloatingPointError for a model that has diverged."""
    chunks = chunks_of(model)
    ring = None if isinstance(model, GPT) else Ring(model.channels)
    check(chunks[0], prompts, max_tokens, temperature, top_k, top_p)
    if keys is not None and len(keys) != len(prompts):
        raise ValueError(f"{len(keys)} keys for {len(prompts)} prompts: one for each")
    place = Place()
    runner = Runner(chunks, place)
    rows = [
        Row(n, list(prompt), key)
        for n, (prompt, key) in enumerate(
            zip(prompts, keys_of(prompts, seed) if keys is None else keys)
        )
    ]
    parts = min(ring.p if ring else 1, most_of(len(rows), together, runner.device))
    if not parts or not max_tokens:
        return
    # a rank without prompts goes along
    rows += [Row(-1, [0], 0, "length") for _ in range(parts - len(rows))]
    batches = [
        Batch(rows[n::parts], runner.config, max_tokens, cached, runner.device, runner.capture)
        for n in range(parts)
    ]
    with caching(chunks, place):
        yield from Decoder(runner, ring, batches, (temperature, top_k, top_p), together).steps(
            (eot,) if isinstance(eot, int) else eot or (), stopped
        )


def generate(
    model: "GPT | pipeline_parallel.Pipeline", prompts: list[list[int]], max_tokens: int, **options
) -> list[list[int]]:
    """The token ids that follow each prompt. Everything as in `stream`."""
    ids = [[] for _ in prompts]
    for piece in itertools.chain.from_iterable(stream(model, prompts, max_tokens, **options)):
        if piece.token is not None:
            ids[piece.number].append(piece.token)
    return ids


def check(
    model: GPT,
    prompts: list[list[int]],
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    """model: or a chunk of one. Raises ValueError, naming what to change."""
    check_options(max_tokens, temperature, top_k, top_p)
    # prompt_tuning.apply
    known = model.config.vocab_size + getattr(model, "virtual_tokens", 0)
    for n, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(
                f"prompt {n} is empty: a model continues at least one token, for a new text the"
                " end-of-text token"
            )
        if len(prompt) > model.config.seq_length:
            raise ValueError(
                f"prompt {n} has {len(prompt)} tokens, and the model's context holds"
                f" {model.config.seq_length}: cut it"
            )
        wrong = [i for i in (min(prompt), max(prompt)) if not 0 <= i < known]
        if wrong:
            raise ValueError(
                f"prompt {n} has token {wrong[0]}, and the model knows 0 to {known - 1}"
            )


def check_options(max_tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    """Raises ValueError, naming what to change."""
    for name, value, fits, rule in (
        (
            "temperature",
            temperature,
            temperature == 0 or 0.001 <= temperature < float("inf"),
            "0, or at least 0.001 and finite",
        ),
        ("top_k", top_k, top_k >= 0, "at least 0"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        ("max_tokens", max_tokens, max_tokens >= 0, "at least 0"),
    ):
        if not fits:
            raise ValueError(f"{name} {value}: must be {rule}")


# --------------------------------------------------------------------------------------------------


def lesson():
    import sharding

    with torch.device("meta"):
        model = GPT(
            GPTConfig(
                num_layers=4,
                hidden_size=256,
                num_heads=8,
                ffn_hidden_size=688,
                seq_length=512,
                vocab_size=257,
                llama=True,
            )
        )
    sharding.init(model, 0, "cpu", torch.float64)
    prompts = [list(range(1, n)) for n in (5, 40, 17)]
    print(
        "a Llama (h 256, L 4) with random weights, float64, three prompts of 4, 39 and 16 tokens,"
        " drawn at temperature 1:"
    )
    with_cache = generate(model, prompts, 24)
    without = generate(model, prompts, 24, cached=False)
    alone = [generate(model, [prompt], 24)[0] for prompt in prompts]
    print(
        "  24 tokens each, with a cache and without:"
        f" {'equal' if with_cache == without else 'different'}; each prompt by itself:"
        f" {'equal' if with_cache == alone else 'different'}"
    )
    model.float()
    print(
        f"{'context':>10}{'tokens/s with':>16}{'without':>10}{'cache, bytes':>15} (2 L h numbers of"
        " 4 bytes per token)"
    )
    for n in (32, 128, 448):
        speed = []
        for cached in (True, False):
            times = [
                time.perf_counter()
                for _ in stream(model, [[1] * n], 12, temperature=0, cached=cached)
            ]
            speed.append((len(times) - 1) / (times[-1] - times[0]))
        print(f"{n:>10}{speed[0]:>16,.0f}{speed[1]:>10,.0f}{2 * 4 * 256 * 4 * n:>15,}")


if __name__ == "__main__":
    if sys.argv[1:]:
        from inference import cli

        sys.exit(cli.main(sys.argv[1:]))
    lesson()
