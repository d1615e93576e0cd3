"""Generation: prefill, then decode one token at a time with a key-value cache (arXiv 2211.05102).

    prefill    one forward pass over all tokens of all prompts, as in training;
               their keys and values stay in the cache
    decode     a forward pass over the newest token of each sequence; it attends to the cache

                  reads                    gives       now in the cache
    prefill       a b c d | e f . .        x | y       a b c d   | e f
    decode        x       | y              z | w       a b c d x | e f y
    decode        z       | w              ..

Without the cache, the pass for token n reads all n tokens again. A forward pass gives logits, and
inference/sampling.py draws the next token from them. Its random numbers depend only on (seed,
prompt, position): a prompt gives the same text in any batch and under any layout, up to rounding
(in float64 exactly; in 16 bits texts differ after some dozens of tokens).

`decode` is the loop, on one device and under any layout.

    python -m course.generate                          a lesson: with the cache and without
    python generate.py --checkpoint runs/default --prompt "def "
    python generate.py --checkpoint runs/default --prompt-file prompts.jsonl > answers.jsonl
    python generate.py --checkpoint runs/default --adapter runs/lora --prompt "def "
    python generate.py --checkpoint runs/default --weights int8 --prompt "def "
    torchrun --nproc-per-node 4 generate.py --tp 2 --pp 2 --checkpoint HF_DIR --interactive

Not covered: new prompts that join a running batch (inference/scheduler.py has this); a cache
in 8 bits (vLLM and TensorRT-LLM have it).
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import families
from base import compiling, terminal
from base.attention_kernels import any_shape
from base.rotary import rotary_at
from gpt import GPT, Context
from inference import cuda_graphs
from inference.batches import DecodeBatch, any_unfinished, max_over_ranks
from inference.kv_cache import Cache, Caches, CacheSlot, caching
from inference.requests import Output, Request, Sequence, check_prompts, requests_of
from inference.ring import Ring
from pipeline_parallel import Pipeline, stages_of


def decode(
    runner: "ModelRunner", batches: list[DecodeBatch], lockstep: dist.ProcessGroup | None = None
) -> Iterator[list[Output]]:
    """The decode loop: each round adds one token to each unfinished sequence. On one device there
    is one batch; in a pipeline each stage works on another one (inference/ring.py)."""
    unfinished = list(batches)
    for batch in unfinished:
        runner.start_step(batch)
    while unfinished:
        # The rounds of virtual stages.
        for chunk in range(1, len(runner.stages)):
            for batch in unfinished:
                runner.run_stage(batch, chunk)
        for batch in list(unfinished):
            outputs = batch.append(runner.drawn_tokens(batch))
            goes_on = any_unfinished(batch, lockstep)
            # A rank without prompts has no outputs.
            if outputs:
                yield outputs
            if goes_on:
                runner.start_step(batch)
            else:
                unfinished.remove(batch)


# --- one forward pass -----------------------------------------------------------------------------


class ModelRunner:
    """Runs forward passes of this rank's part of a model, with the cache."""

    def __init__(self, model: GPT | Pipeline, slot: CacheSlot | None = None):
        """slot: as in `caching`."""
        self.stages = stages = stages_of(model)
        self.ring = Ring(model.channels, model.placement) if isinstance(model, Pipeline) else None
        self.slot = slot or CacheSlot()
        self.config = stages[0].config
        # inference/weight_layouts.py turns parameters into buffers.
        tensors = (t for stage in stages for t in (*stage.parameters(), *stage.buffers()))
        tensor = next(tensors)
        self.device = tensor.device
        self.dtype = tensor.dtype
        # The frequencies of rotary positions; a table would be as long as the context.
        self.like, self.frequencies = tensor.new_empty(0), None
        if self.config.positions == "rotary":
            self.frequencies = stages[0].rotary_frequencies(self.config, self.device)
        # {window: the bias of a sliding window or ALiBi}, the same in all layers with one window.
        blocks = [block for stage in stages for block in stage.blocks.values()]
        locals = [families.local_bias(block) for block in blocks]
        self.locals = {families.window_of(local): local for local in locals}
        self.captures = cuda_graphs.can_capture(stages, self.device)
        self.caches = Caches(keeps=self.captures)

    def start_step(self, batch: DecodeBatch) -> None:
        """The first step reads the prompts (prefill), each later one the newest tokens (decode)."""
        batch.tokens = batch.next_tokens()  # [b, s], or [b, 1]
        self.run_stage(batch, 0)

    def run_stage(self, batch: DecodeBatch, chunk: int) -> None:
        """A batch through stage number `chunk` of this rank. After the last stage, or the whole
        model, its next tokens are drawn."""
        x = batch.tokens  # [b, s]
        if self.stages[chunk].embedding is None:
            h = self.config.hidden_size
            buffer = torch.empty(*x.shape, h, dtype=self.dtype, device=self.device)
            x = self.ring.receive(buffer, chunk)  # [b, s, h]
        y = self.forward(batch, x, chunk)
        if self.stages[chunk].head is not None:
            batch.draw(y)
            if self.ring:
                self.ring.send(batch.drawn)  # [b]
        elif self.ring:
            self.ring.send_activations(y, chunk)

    def drawn_tokens(self, batch: DecodeBatch) -> list[int]:
        """The tokens drawn for a batch, on every stage."""
        if self.ring and not self.ring.is_last:
            b = len(batch.sequences)
            buffer = torch.empty(b, dtype=torch.long, device=self.device)
            batch.drawn = self.ring.pass_on(buffer)
        return batch.drawn.tolist()

    @torch.inference_mode()
    @any_shape()
    # Otherwise torch.compile would compile a block again for every length.
    @compiling.eagerly
    def forward(self, batch: DecodeBatch, x: Tensor, chunk: int = 0) -> Tensor:
        """Run stage number `chunk` of this rank. x: tokens [b, s], or activations [b, s, h] of the
        stage before. Returns the logits of the next token [b, V], or activations [b, s, h] for the
        stage after."""
        cache = batch.cache
        self.slot.cache = cache
        if self.captures and cache.positions is not None:
            return cuda_graphs.decode(self.compute, chunk, cache, x)
        return self.compute(chunk, cache, x, batch.last_column)

    def compute(self, chunk: int, cache: Cache, x: Tensor, last_column: Tensor | None) -> Tensor:
        """x: tokens or activations. last_column: [b], during prefill the column of each sequence's
        last token."""
        stage = self.stages[chunk]
        cache.update_masks(self.dtype, self.locals)
        x = self.through_blocks(stage, cache, x)  # [b, s, h]
        if stage.head is None:
            return x
        # In a prefill only the last tokens need logits.
        if last_column is not None:
            x = at_column(x, last_column, cache)  # [b, 1, h]
        return stage.head(x)[:, 0]  # [b, V]

    def through_blocks(self, stage: GPT, cache: Cache, x: Tensor) -> Tensor:
        """x: tokens [b, s] on the first stage, else activations [b, s, h] -> [b, s, h]"""
        context = Context(rotary=self.rotary_at(cache, x.shape[1]))
        if stage.embedding is not None:
            x = stage.embedding(x)
        for block in stage.blocks.values():
            x = block(x, context)
        return x

    def rotary_at(self, cache: Cache, s: int) -> tuple[Tensor, Tensor] | None:
        """cos and sin: [b, 1, 1, d] each for the positions [b] of a decoding step; [s, d] each for
        a prefill of s tokens."""
        if self.frequencies is None:
            return None
        if cache.positions is None:
            at = cache.prefill_positions(s, self.device).clamp(max=self.config.seq_length - 1)
        else:
            at = cache.positions[:, None, None]
        return rotary_at(self.frequencies, at, self.like, self.config.rotary_scale)


def at_column(x: Tensor, last_column: Tensor, cache: Cache) -> Tensor:
    """The activation of each sequence's last token. x: [b, s, h] of a prefill, or this rank's
    [b, s/N, h] of it; last_column: [b] -> [b, 1, h], on every rank"""
    at = cache.prefill_positions(x.shape[1], x.device)  # [s/N], ascending
    index = torch.searchsorted(at, last_column).clamp(max=len(at) - 1)
    x = x[torch.arange(len(x), device=x.device), index]  # [b, h]
    if cache.group:
        # One rank has this activation, and the others add 0.
        x = x.masked_fill((at[index] != last_column).unsqueeze(1), 0.0)
        dist.all_reduce(x, group=cache.group)
    return x.unsqueeze(1)


# --- from prompts to tokens -----------------------------------------------------------------------


def generate(
    model: GPT | Pipeline, prompts: list[list[int]], max_tokens: int, **options
) -> list[list[int]]:
    """The token ids that follow each prompt. Arguments and errors as in `stream`."""
    ids = [[] for _ in prompts]
    for output in itertools.chain.from_iterable(stream(model, prompts, max_tokens, **options)):
        if output.token is not None:
            ids[output.number].append(output.token)
    return ids


def stream(
    model: GPT | Pipeline,
    prompts: list[list[int]],
    max_tokens: int,
    cached: bool = True,
    lockstep: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    runner: ModelRunner | None = None,
    **options,
) -> Iterator[list[Output]]:
    """Yields what each step gives to the sequences of a batch. All ranks that hold a part of the
    model call this with the same arguments.

    prompts: 1 to seq_length token ids for each prompt.
    cached: False runs the whole context again at each step.
    lockstep: ranks with different prompts (or none), whose forward passes are collectives because
        experts or parameters (ZeRO stage 3) are sharded over them.
    cp_group: ranks with the same prompts, which share the prefill (context parallelism).
    runner: of an earlier call (`stream_of`), whose CUDA graphs are used again.

    options, of inference.requests.requests_of:
    temperature, top_k, top_p: inference/sampling.py explains them.
    eot: the end-of-text token, or several; it ends a text, and is not part of it.
    stopped(number, generated ids): whether the text of prompt `number` ends here.
    seed, keys: of random numbers; by default keys is `keys_of(prompts, seed)`.
    log_probs: outputs have the log-probability of their token, and of so many likeliest ones; in a
        pipeline on its last stage.

    Raises ValueError for a prompt or an option that is not possible; FloatingPointError if the
    model's logits are not finite."""
    requests = requests_of(prompts, max_tokens, **options)
    runner = runner or ModelRunner(model)
    if runner.stages != stages_of(model):
        raise ValueError("runner: is that of another model")
    check_prompts(runner.stages[0], prompts)
    batches = make_batches(model, requests, runner, cached, lockstep, cp_group)
    if batches and max_tokens > 0:
        with caching(runner.stages, runner.slot):
            yield from decode(runner, batches, lockstep)
            if runner.ring:
                runner.ring.wait_for_all_but(0)
    for batch in batches:
        batch.end()


def make_batches(
    model: GPT | Pipeline,
    requests: list[Request],
    runner: ModelRunner,
    cached: bool,
    lockstep: dist.ProcessGroup | None,
    cp_group: dist.ProcessGroup | None,
) -> list[DecodeBatch]:
    """Distribute the requests in turn over as many micro-batches as pipeline stages. No batch is
    without a request on all ranks; a rank with fewer of them than batches adds idle sequences."""
    p = 1 if isinstance(model, GPT) else model.p
    num_batches = min(p, max_over_ranks(len(requests), lockstep, runner.device))
    sequences = [Sequence(n, request) for n, request in enumerate(requests)]
    while len(sequences) < num_batches:
        # This sequence is finished, and only joins the collectives of the other ranks.
        sequences.append(Sequence(-1, Request([0], 0), "length"))
    options = runner.config, runner.device, runner.caches, cached, cp_group
    return [DecodeBatch(sequences[i::num_batches], *options) for i in range(num_batches)]


# --- the command ----------------------------------------------------------------------------------


def stream_of(
    model: GPT | Pipeline, speculative: bool = False
) -> Callable[..., Iterator[list[Output]]]:
    """`stream` of this model, which keeps CUDA graphs between calls; or that of speculative.py."""
    if speculative:
        from inference import speculative

        return partial(speculative.stream, ModelRunner(model))
    return partial(stream, model, runner=ModelRunner(model))


def main(argv: list[str]) -> int:
    # Loading models, chats and adapters is the command's alone.
    from inference import cli

    return cli.main(argv, stream_of)


if __name__ == "__main__":
    terminal.command(main)
