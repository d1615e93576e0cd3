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

`decode` is the loop, for one device and for tensor, data and expert parallelism. Pipeline stages
run the same loop over micro-batches (inference/pipelined.py).

    python -m course.generate                          a lesson: with the cache and without
    python generate.py --checkpoint runs/default --prompt "def "
    python generate.py --checkpoint runs/default --prompt-file prompts.jsonl > answers.jsonl
    python generate.py --checkpoint runs/default --adapter runs/lora --prompt "def "
    python generate.py --checkpoint runs/default --weights int8 --prompt "def "
    torchrun --nproc-per-node 4 generate.py --tp 2 --pp 2 --checkpoint HF_DIR --interactive

Not covered: new prompts that join a running batch (inference/scheduler.py has this); speculative
decoding and a cache in 8 bits (vLLM and TensorRT-LLM have them).
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
from inference.batches import (
    DecodeBatch,
    NewToken,
    Observer,
    Sequence,
    StopRule,
    any_unfinished,
    max_over_ranks,
)
from inference.kv_cache import Cache, Caches, CacheSlot, caching
from inference.pipelined import PipelinedDecoder, Ring
from inference.sampling import SamplingParams, check_options, keys_of, sample
from pipeline_parallel import Pipeline, stages_of


def decode(
    runner: "ModelRunner",
    batch: DecodeBatch,
    params: SamplingParams,
    lockstep: dist.ProcessGroup | None = None,
    observe: Observer | None = None,
) -> Iterator[list[NewToken]]:
    """The decode loop: each iteration adds one token to each unfinished sequence."""
    unfinished = True
    while unfinished:
        tokens = batch.next_tokens()  # [b, s]: the prompts (prefill), or s = 1 (decode)
        logits = runner.forward(batch, tokens)  # [b, V]
        sampled = sample(logits, batch.keys(), batch.positions(), params)  # [b]
        if observe:
            observe(batch, logits, sampled)
        new_tokens = batch.append(sampled.tolist())
        unfinished = any_unfinished(batch, lockstep)
        # A rank without prompts has no new tokens.
        if new_tokens:
            yield new_tokens


# --- one forward pass -----------------------------------------------------------------------------


class ModelRunner:
    """Runs forward passes of this rank's part of a model, with the cache."""

    def __init__(self, stages: list[GPT], slot: CacheSlot | None = None):
        """stages: this rank's pipeline stages, or the whole model. slot: as in `caching`."""
        self.stages = stages
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
        # The bias of a sliding window or ALiBi, the same in all layers.
        blocks = [block for stage in stages for block in stage.blocks.values()]
        self.local = families.local_bias(blocks[0]) if blocks else None
        self.captures = cuda_graphs.can_capture(stages, self.device)
        self.caches = Caches(keeps=self.captures)

    @torch.inference_mode()
    @any_shape()
    # Otherwise torch.compile would compile a block again for every length.
    @compiling.eagerly
    def forward(
        self, batch: DecodeBatch, tokens: Tensor, chunk: int = 0, activations: Tensor | None = None
    ) -> Tensor:
        """Run stage number `chunk` of this rank. tokens: [b, s] of `batch.next_tokens`;
        activations: [b, s, h] of the stage before. Returns the logits of the next token [b, V], or
        activations [b, s, h] for the stage after."""
        cache = batch.cache
        self.slot.cache = cache
        inputs = tokens if activations is None else activations
        if self.captures and cache.positions is not None:
            return cuda_graphs.decode(self.compute, chunk, cache, inputs)
        return self.compute(chunk, cache, inputs, batch.last_column)

    def compute(self, chunk: int, cache: Cache, x: Tensor, last_column: Tensor | None) -> Tensor:
        """x: tokens or activations. last_column: [b], during prefill the column of each sequence's
        last token."""
        stage = self.stages[chunk]
        cache.update_mask(self.dtype, self.local)
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
        return rotary_at(self.frequencies, at, self.like)


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
    steps = stream(model, prompts, max_tokens, **options)
    for new in itertools.chain.from_iterable(steps):
        if new.token is not None:
            ids[new.number].append(new.token)
    return ids


def stream(
    model: GPT | Pipeline,
    prompts: list[list[int]],
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eot: int | tuple[int, ...] | None = None,
    stopped: Callable[[int, list[int]], bool] | None = None,
    cached: bool = True,
    lockstep: dist.ProcessGroup | None = None,
    keys: list[int] | None = None,
    observe: Observer | None = None,
    cp_group: dist.ProcessGroup | None = None,
    runner: ModelRunner | None = None,
) -> Iterator[list[NewToken]]:
    """Yields the new tokens after each step of the batch or, in a pipeline, of a micro-batch. All
    ranks that hold a part of the model call this with the same arguments.

    prompts: 1 to seq_length token ids for each prompt.
    eot: the end-of-text token, or several; it ends a text, and is not part of it.
    stopped(number, generated ids): whether the text of prompt `number` ends here.
    cached: False runs the whole context again at each step.
    lockstep: ranks with different prompts (or none), whose forward passes are collectives because
        experts or parameters (ZeRO stage 3) are sharded over them.
    keys: of random numbers; by default `keys_of(prompts, seed)`; given if there are more prompts.
    observe(batch, logits [b, V], sampled [b]): called after sampling on the ranks that sample: all
        ranks of a model, or those of a pipeline's last stage (inference/rollout.py).
    cp_group: ranks with the same prompts, which share the prefill (context parallelism).
    runner: of an earlier call (`stream_of`), whose CUDA graphs are used again.

    Raises ValueError for a prompt or an option that is not possible; FloatingPointError if the
    model's logits are not finite."""
    stages = stages_of(model)
    keys = keys_of(prompts, seed) if keys is None else keys
    check_options(max_tokens, temperature, top_k, top_p)
    check_prompts(stages[0], prompts, keys)
    runner = runner or ModelRunner(stages)
    if runner.stages != stages:
        raise ValueError("runner: is that of another model")
    end_tokens = (eot,) if isinstance(eot, int) else tuple(eot or ())
    rule = StopRule(max_tokens, end_tokens, stopped)
    params = SamplingParams(temperature, top_k, top_p)
    batches = make_batches(model, prompts, keys, rule, runner, cached, lockstep, cp_group)
    if batches and max_tokens > 0:
        with caching(stages, runner.slot):
            yield from decode_all(model, runner, batches, params, lockstep, observe)
    for batch in batches:
        batch.end()


def decode_all(model: GPT | Pipeline, runner: ModelRunner, batches: list[DecodeBatch], *rest):
    """The decode loop for one batch, or in a pipeline for micro-batches. rest: as in `decode`."""
    if isinstance(model, GPT):
        return decode(runner, batches[0], *rest)
    return PipelinedDecoder(runner, Ring(model.channels), batches, *rest).decode()


def make_batches(
    model: GPT | Pipeline,
    prompts: list[list[int]],
    keys: list[int],
    rule: StopRule,
    runner: ModelRunner,
    cached: bool,
    lockstep: dist.ProcessGroup | None,
    cp_group: dist.ProcessGroup | None,
) -> list[DecodeBatch]:
    """Distribute the prompts in turn over as many micro-batches as pipeline stages. No batch is
    without a prompt on all ranks; a rank with fewer prompts than batches adds idle sequences."""
    p = 1 if isinstance(model, GPT) else model.p
    num_batches = min(p, max_over_ranks(len(prompts), lockstep, runner.device))
    sequences = [Sequence(i, list(ids), key) for i, (ids, key) in enumerate(zip(prompts, keys))]
    while len(sequences) < num_batches:
        # This sequence is finished, and only joins the collectives of the other ranks.
        sequences.append(Sequence(-1, [0], 0, "length"))
    config = runner.config
    options = config.seq_length, runner.device, runner.caches, cached, cp_group
    options = *options, config.sliding_window
    return [DecodeBatch(sequences[i::num_batches], rule, *options) for i in range(num_batches)]


def check_prompts(model: GPT, prompts: list[list[int]], keys: list[int]) -> None:
    """Raises ValueError, naming what to change. model: the whole model, or a pipeline stage."""
    if len(keys) != len(prompts):
        raise ValueError(f"{len(keys)} keys for {len(prompts)} prompts: give one for each")
    seq_length = model.config.seq_length
    # prompt_tuning.apply adds virtual tokens after the vocabulary.
    num_ids = model.config.vocab_size + getattr(model, "virtual_tokens", 0)
    for n, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(
                f"prompt {n} is empty: give at least one token; a new text begins with the"
                " end-of-text token"
            )
        if len(prompt) > seq_length:
            raise ValueError(
                f"prompt {n} has {len(prompt)} tokens, and the model's context holds {seq_length}:"
                " shorten it"
            )
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < num_ids:
                raise ValueError(
                    f"prompt {n} has token {token}, and the model knows 0 to {num_ids - 1}"
                )


# --- the command ----------------------------------------------------------------------------------


def stream_of(model: GPT | Pipeline) -> Callable[..., Iterator[list[NewToken]]]:
    """`stream` of this model, which keeps CUDA graphs between calls."""
    return partial(stream, model, runner=ModelRunner(stages_of(model)))


def main(argv: list[str]) -> int:
    # Loading models, chats and adapters is the command's alone.
    from inference import cli

    return cli.main(argv, stream_of)


if __name__ == "__main__":
    terminal.command(main)
