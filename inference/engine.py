"""The engine: takes requests, runs the scheduler's steps on a model, gives tokens.

    engine = Engine(model)
    number = engine.add(Request([5, 3, 9], max_tokens=20))
    while engine.busy:
        for output in engine.step():            # one step: a token for each sequence that draws
            print(output.number, output.token, output.finish)

    engine.generate(prompts, max_tokens=20)     # the same, for a list of prompts

An answer is the one of generate.py for its prompt alone, greedy or sampled, whatever else is in the
batch, under any layout (in float64; elsewhere up to rounding: tests/test_engine.py).

Of several ranks, each makes an Engine from its part of the model. Rank 0, the driver, knows the
requests and calls the functions above, and `close` in the end; every other rank calls `follow`,
which returns then. A step goes to the tensor-parallel ranks of the first stage in a broadcast, and
from stage to stage with its activations; what was drawn comes back from the last stage. In a
pipeline, `step` waits for the oldest step only when as many are in flight as there are stages:

    step k      stage 0 | stage 1 | drawn
    step k + 1            stage 0 | stage 1 | drawn         other sequences than in step k

Sequences with equal temperature, top-k and top-p are drawn in one call, from the rows of a step
that have logits:

    pieces of a step     A decodes | B: the middle of its prompt | C: the end of its prompt
    rows with logits     1         | 0                           | 1
                                     all, if its log-probabilities are asked for

    python -m course.serve       a lesson

Not covered: data-parallel ranks (start an engine for each), experts spread over ranks, context
parallelism of long prompts, adapters mixed in one step (S-LoRA, arXiv 2311.03285). Steps are
pickled, tens of microseconds each, where production systems write them into shared memory.
"""

import itertools
import math
import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import generate
from base import compiling, terminal
from base.attention_kernels import any_shape
from base.device_queue import to_device
from base.groups import Groups
from gpt import GPT
from inference.cuda_graphs import Graphs
from inference.kv_cache import CacheSlot, caching
from inference.paged_attention import PagedCache
from inference.requests import LogProb, Output, Request, check_prompts, requests_of
from inference.ring import Ring
from inference.sampling import DIVERGED, SamplingParams, check_options, log_probs, sample
from inference.scheduler import BlockPool, PagedSequence, Piece, Scheduler, Step, most_blocks
from pipeline_parallel import Channels, Pipeline, stages_of
from run.world import memory

# Bytes of the first message of an object, which begins with its length: most fit.
FIRST = 4096
LENGTH = 8


class Drawn(NamedTuple):
    """What the last stage gives for a step."""

    # Number of a request -> its next token.
    tokens: dict[int, int]
    # Number of a request that asked -> log-probabilities of the tokens after its piece's tokens.
    log_probs: dict[int, list[LogProb]]
    # Number of a request that asked -> the sum of its piece's states behind the last norm, [h].
    states: dict[int, Tensor]


class Engine:
    """Runs requests on a model."""

    def __init__(
        self,
        model: GPT | Pipeline,
        groups: Groups | None = None,
        max_sequences: int = 32,
        budget: int = 512,
        block_size: int = 16,
        num_blocks: int | None = None,
        use_adapter: Callable[[str | None], None] | None = None,
    ):
        """model: this rank's part; it serves from now on, until `close`. max_sequences: that run at
        a time. budget: tokens of a step. num_blocks: of the cache; the default has room for
        max_sequences of the model's longest. use_adapter(name): gives the model the values of an
        adapter (inference.adapted.Adapters.use).

        A collective. Raises ValueError for a number that is not possible."""
        stages = stages_of(model)
        config = stages[0].config
        # Blocks are freed where no layer sees them.
        window = config.common_window
        if num_blocks is None:
            longest = most_blocks(config.seq_length, block_size, budget, window)
            num_blocks = 1 + max_sequences * longest
        if len(stages) > 1:
            raise ValueError(f"{len(stages)} virtual stages on a rank: an engine runs one")
        self.config = config
        self.stages = stages
        groups = groups or Groups()
        cache = PagedCache(num_blocks, block_size, window)
        self.runner = StepRunner(
            stages[0], cache, groups.tp.size() if groups.tp else 1, use_adapter
        )
        self.link = Link(groups, self.runner.device)
        self.pool = BlockPool(num_blocks, block_size)
        # Tokens of a prompt and its answer.
        self.longest = config.seq_length
        if most_blocks(self.longest, block_size, budget, window) >= num_blocks:
            self.longest = (num_blocks - 1) * block_size
        self.scheduler = Scheduler(self.pool, max_sequences, budget, self.link.stages, window)
        self.sequences: dict[int, PagedSequence] = {}
        # The oldest first.
        self.in_flight: deque[Step] = deque()
        # Number of a request -> what it asked to know about its prompt, so far.
        self.of_prompts: dict[int, list[LogProb]] = {}
        self.states: dict[int, Tensor] = {}
        self.numbers = itertools.count()

    # --- requests ---

    def add(self, request: Request) -> int:
        """Returns the number that the request's outputs have. Raises ValueError for a request that
        is not possible."""
        self.check(request)
        sequence = PagedSequence(next(self.numbers), request)
        self.sequences[sequence.number] = sequence
        self.scheduler.waiting.append(sequence)
        return sequence.number

    def check(self, request: Request) -> None:
        """Raises ValueError, naming what to change."""
        if request.adapter is not None and self.runner.use_adapter is None:
            raise ValueError(f"adapter {request.adapter}: this engine has none")
        check_options(request.max_tokens, *request.draw.sampling)
        check_prompts(self.stages[0], [request.prompt])
        if len(request.prompt) + request.max_tokens > self.longest:
            is_whole = self.longest == self.config.seq_length
            place = "the model's context" if is_whole else "the cache"
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and max_tokens {request.max_tokens} are"
                f" together more than the {self.longest} that {place} holds: shorten one of them"
            )

    def cancel(self, number: int) -> None:
        """The request has no more outputs. Its blocks are free once no step uses them."""
        sequence = self.sequences.get(number)
        if sequence:
            sequence.finish = "cancelled"
            if not sequence.in_flight:
                self.end(sequence)

    def end(self, sequence: PagedSequence) -> None:
        self.scheduler.remove(sequence)
        del self.sequences[sequence.number]
        self.of_prompts.pop(sequence.number, None)
        self.states.pop(sequence.number, None)

    @property
    def busy(self) -> bool:
        return bool(self.sequences)

    # --- steps ---

    def step(self) -> list[Output]:
        """Starts a step, if one can start. If the pipeline is full, or none could start, waits for
        the oldest step and returns its outputs; otherwise an empty list. Raises FloatingPointError
        for logits that are not finite."""
        step = self.scheduler.schedule()
        drawn = None
        if step:
            self.in_flight.append(step)
            drawn = self.run(self.link.share_step(step))
            if len(self.in_flight) < self.link.stages:
                return []
        if not self.in_flight:
            return []
        if not self.link.is_last:
            drawn = self.link.receive_object()
        return self.complete(self.in_flight.popleft(), drawn)

    def run(self, step: Step) -> Drawn | None:
        """This rank's part of a step. Returns what it drew, on the last stage."""
        link = self.link
        x = None
        if link.stage > 0:
            shape = (sum(len(piece.tokens) for piece in step.pieces), 1, self.config.hidden_size)
            x = torch.empty(shape, dtype=self.runner.dtype, device=link.device)  # [T, 1, h]
            link.ring.receive(x)
        y = self.runner.forward(step, x)
        if link.is_last:
            return draw(step, *y)
        link.send_object(step)
        link.ring.send(y)
        return None

    def complete(self, step: Step, drawn: Drawn) -> list[Output]:
        """Give the sequences of a step their tokens."""
        if DIVERGED in drawn.tokens.values():
            raise FloatingPointError("the model's logits are not finite")
        outputs = []
        for piece in step.pieces:
            sequence = self.sequences[piece.number]
            sequence.in_flight = False
            if sequence.finish:
                self.end(sequence)
                continue
            found = drawn.log_probs.get(piece.number, [None])
            # Not again after a preemption.
            if piece.draw.of_prompt and len(sequence.ids) == len(sequence.request.prompt):
                known = self.of_prompts.get(piece.number, []) if piece.start else []
                of_piece = len(piece.tokens) - (piece.next is None)
                self.of_prompts[piece.number] = known + found[:of_piece]
            if piece.draw.embeds:
                known = self.states.get(piece.number, 0) if piece.start else 0
                self.states[piece.number] = known + drawn.states[piece.number]
            if piece.next is not None:
                continue
            output = sequence.append(drawn.tokens.get(piece.number), found[-1])
            of_prompt = self.of_prompts.pop(piece.number, None)
            states = self.states.pop(piece.number, None)
            outputs.append(output._replace(of_prompt=of_prompt, states=states))
            if output.finish:
                self.end(sequence)
        return outputs

    def generate(self, prompts: list[list[int]], max_tokens: int, **options) -> list[list[int]]:
        """The token ids that follow each prompt. options: of requests_of. Raises as `add` and
        `step` do."""
        requests = requests_of(prompts, max_tokens, **options)
        for request in requests:
            self.check(request)
        ids = {self.add(request): [] for request in requests}
        while self.busy:
            for output in self.step():
                if output.token is not None:
                    ids[output.number].append(output.token)
        return list(ids.values())

    # --- other ranks ---

    def follow(self) -> None:
        """On every rank but the driver: run its steps, until it closes the engine."""
        while (step := self.link.share_step()) is not None:
            drawn = self.run(step)
            if self.link.answers:
                self.link.send_object(drawn)
        if not self.link.is_last:
            self.link.send_object(None)
        self.leave()

    def close(self) -> None:
        """On the driver: the other ranks stop. The model is as it was."""
        # The last stage waits until what it drew is received.
        while self.in_flight and not self.link.is_last:
            self.in_flight.popleft()
            self.link.receive_object()
        self.link.share_step(None)
        if not self.link.is_last:
            self.link.send_object(None)
        self.leave()

    def leave(self) -> None:
        self.runner.close()
        self.link.close()


# --- what is drawn from the logits of a step ------------------------------------------------------


def rows_of(step: Step) -> list[range]:
    """The rows of each piece that have logits: the last one if a token is drawn, and all of a
    prompt whose log-probabilities are asked for, but none for an embedding."""
    rows = []
    end = 0
    for piece in step.pieces:
        end += len(piece.tokens)
        count = len(piece.tokens) if piece.draw.of_prompt else int(piece.next is None)
        count = 0 if piece.draw.embeds else count
        rows.append(range(end - count, end))
    return rows


def draw(step: Step, logits: Tensor, states: dict[int, Tensor]) -> Drawn:
    """Draw the tokens of a step. logits: [rows, V]; states: as of Drawn"""
    ends = list(itertools.accumulate(map(len, rows_of(step))))
    # Pieces that are drawn in one call, and their rows.
    alike: dict[SamplingParams, list[tuple[Piece, int]]] = {}
    for piece, end in zip(step.pieces, ends):
        if piece.next is None and not piece.draw.embeds:
            alike.setdefault(piece.draw.sampling, []).append((piece, end - 1))
    token_of = {}
    for params, drawn in alike.items():
        pieces, rows = zip(*drawn)
        keys = [piece.draw.key for piece in pieces]
        positions = [piece.start + len(piece.tokens) for piece in pieces]
        of_rows = logits if len(rows) == len(logits) else logits[list(rows)]
        tokens = sample(of_rows, keys, positions, params)
        token_of |= zip((piece.number for piece in pieces), tokens.tolist())
    return Drawn(token_of, of_pieces(step, logits, token_of), states)


def sums_of_states(step: Step, norm: nn.Module, y: Tensor) -> dict[int, Tensor]:
    """As Drawn.states, float64 on the CPU. y: [T, 1, h], before the last norm"""
    parts = y.split([len(piece.tokens) for piece in step.pieces])
    asked = [(piece.number, part) for piece, part in zip(step.pieces, parts) if piece.draw.embeds]
    return {number: norm(part)[:, 0].double().sum(0).cpu() for number, part in asked}


def of_pieces(step: Step, logits: Tensor, token_of: dict[int, int]) -> dict[int, list[LogProb]]:
    """As Drawn.log_probs. token_of: the drawn tokens."""
    most = [piece.draw.log_probs for piece in step.pieces]
    if not any(n is not None for n in most):
        return {}
    # The token after each row's.
    targets = []
    for piece, rows in zip(step.pieces, rows_of(step)):
        after = [*piece.tokens, token_of.get(piece.number, piece.next)]
        targets += after[len(after) - len(rows) :]
    known = iter(log_probs(logits, targets, max(n or 0 for n in most)))
    found = {}
    for piece, rows, n in zip(step.pieces, rows_of(step), most):
        of_rows = [next(known) for _ in rows]
        if n is not None:
            found[piece.number] = [each._replace(top=each.top[:n]) for each in of_rows]
    return found


# --- what ranks tell each other -------------------------------------------------------------------


class Link:
    """This rank's place among the others. Without groups, it is alone."""

    def __init__(self, groups: Groups, device: torch.device):
        self.tp = groups.tp
        self.ring = Ring(Channels(groups.pp, groups.nccl)) if groups.pp else None
        self.stages = self.ring.p if self.ring else 1
        self.stage = self.ring.rank if self.ring else 0
        self.is_last = self.stage == self.stages - 1
        tp_rank = groups.tp.rank() if groups.tp else 0
        self.is_driver = self.stage == 0 and tp_rank == 0
        # Who tells the driver what was drawn.
        self.answers = self.is_last and tp_rank == 0 and self.stages > 1
        self.device = device

    def share_step(self, step=None):
        """The driver's step, on all ranks of the first stage; on other stages, that of the stage
        before. None: there are no more."""
        if self.stage > 0:
            return self.receive_object()
        if self.tp is None:
            return step
        source = dist.get_process_group_ranks(self.tp)[0]
        broadcast = partial(dist.broadcast, src=source, group=self.tp)
        if not self.is_driver:
            return unpacked(broadcast, self.device)
        for message in packed(step, self.device):
            broadcast(message)
        return step

    def send_object(self, value) -> None:
        for message in packed(value, self.device):
            self.ring.send(message)

    def receive_object(self):
        return unpacked(self.ring.receive, self.device)

    def close(self) -> None:
        if self.ring:
            self.ring.wait_for_all_but(0)
        self.tp = self.ring = None


def packed(value, device: torch.device) -> list[Tensor]:
    """An object as one or two messages of bytes: FIRST of them, and the rest."""
    content = pickle.dumps(value)
    content = len(content).to_bytes(LENGTH, "little") + content
    message = torch.frombuffer(bytearray(content.ljust(FIRST, b"\0")), dtype=torch.uint8)
    first, rest = message.to(device).split([FIRST, len(message) - FIRST])
    return [first, rest] if len(rest) else [first]


def unpacked(receive: Callable[[Tensor], object], device: torch.device):
    """The object. receive(tensor): the next message."""
    message = torch.empty(FIRST, dtype=torch.uint8, device=device)
    receive(message)
    length = int.from_bytes(bytes(message[:LENGTH].tolist()), "little")
    if LENGTH + length > FIRST:
        rest = message.new_empty(LENGTH + length - FIRST)
        receive(rest)
        message = torch.cat((message, rest))
    # It comes from a rank of this engine.
    return pickle.loads(message[LENGTH:].cpu().numpy().tobytes())


def fail(error: Exception) -> None:
    """End this rank with status 1. Others may wait for it in a collective, so that no group can be
    taken down; the launcher ends them."""
    if isinstance(error, FloatingPointError):
        terminal.say(f"serve.py: {error}", error=True)
    else:
        traceback.print_exception(error)
    os._exit(1)


# --- one rank's forward pass ----------------------------------------------------------------------


class StepRunner(generate.ModelRunner):
    """Forward passes of this rank's stage, with the paged cache."""

    def __init__(self, stage: GPT, cache: PagedCache, tp: int, use_adapter: Callable | None):
        slot = CacheSlot(cache)
        super().__init__(stage, slot)
        self.stage = stage
        self.cache = cache
        self.add_layers(tp)
        # CUDA graphs of steps that only decode, by the shape of their table.
        self.graphs = Graphs()
        self.use_adapter = use_adapter
        self.adapter = None
        # While it is open the model has the cache.
        self.caching = caching([stage], slot)
        self.caching.__enter__()

    def close(self) -> None:
        self.caching.__exit__(None, None, None)

    def add_layers(self, tp: int) -> None:
        """Give the cache its memory, for the layers of this rank. Raises ValueError where there is
        not so much, naming what would fit."""
        config, cache, blocks = self.config, self.cache, self.cache.num_blocks
        shape = (2, max(1, config.num_kv_heads // tp), blocks * cache.size, config.head_dim)
        if config.kv_rank:
            shape = (1, 1, blocks * cache.size, config.kv_rank + config.rope_head_dim)
        block = len(self.stage.blocks) * self.dtype.itemsize * math.prod(shape) // blocks
        tensors = (*self.stage.parameters(), *self.stage.buffers())
        free = memory(self.device.type, 1) - sum(tensor.nbytes for tensor in tensors)
        try:
            if block * blocks > free:
                raise MemoryError
            for layer in self.stage.blocks:
                # Zeros: a hidden column counts 0 times its value, and 0 times NaN is NaN.
                stored = torch.zeros(shape, dtype=self.dtype, device=self.device)
                cache.layers[layer] = stored
        except (MemoryError, RuntimeError):
            raise ValueError(
                f"num_blocks {blocks}: keys and values take {block * blocks:,} bytes, and beside"
                f" the model the {self.device.type} has {free:,}; {free // block} would fit"
            ) from None

    @torch.inference_mode()
    @any_shape()
    @compiling.eagerly
    def forward(self, step: Step, x: Tensor | None) -> Tensor | tuple[Tensor, dict[int, Tensor]]:
        """x: [T, 1, h] of the stage before, None on the first one. Returns activations [T, 1, h];
        from the last stage the arguments of `draw`."""
        if step.adapter != self.adapter:
            self.use_adapter(step.adapter)
            self.adapter = step.adapter
        self.cache.copy_blocks(step)
        embeds = any(piece.draw.embeds for piece in step.pieces)
        table = self.cache.decodes_table(step) if self.captures and not embeds else None
        if table:
            y = self.replay(torch.tensor(table), x)[: len(step.pieces)]
        else:
            tokens = self.cache.begin(step, self.locals, self.dtype, self.device)  # [T]
            inputs = tokens.unsqueeze(1) if x is None else x
            y = self.through_blocks(self.stage, self.cache, inputs)  # [T, 1, h]
        if self.stage.head is None:
            return y
        states = sums_of_states(step, self.stage.head.norm, y) if embeds else {}
        rows = list(itertools.chain(*rows_of(step)))
        if len(rows) < len(y):
            y = y[rows]
        return y if table else self.stage.head(y)[:, 0], states

    def replay(self, table: Tensor, x: Tensor | None) -> Tensor:
        """Decodes as a CUDA graph, which is captured where none has a table of this shape. table:
        of PagedCache.decodes_table. Returns [b, 1, h], or from the last stage logits [b, V]."""
        inputs = [to_device(table, self.device)]
        if x is not None:
            inputs.append(F.pad(x, (0, 0, 0, 0, 0, len(table) - len(x))))
        return self.graphs.run(tuple(table.shape), self.decodes, *inputs)

    def decodes(self, table: Tensor, x: Tensor | None = None) -> Tensor:
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        tokens = self.cache.begin_decodes(table, self.locals, like)  # [b]
        inputs = tokens.unsqueeze(1) if x is None else x
        y = self.through_blocks(self.stage, self.cache, inputs)
        return y if self.stage.head is None else self.stage.head(y)[:, 0]
