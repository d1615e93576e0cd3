"""Export: a model as one ONNX graph, which runs without this project and without PyTorch.

ONNX (onnx.ai) is a file of operations and weights, for runtimes in many languages; onnxruntime is
one. The exporter runs the model once, on tensors that have symbols for sizes, and notes each
operation. What Python decides on the way (which layers, which mask) is fixed from then on.

Prefill and decode differ in sizes alone. So one graph is both, with one file of weights:

    inputs     tokens, positions           [b, s]             prefill: s tokens, p = 0
               past.positions              [b, p]             decode:  s = 1, p tokens before it
               past.N.key, past.N.value    [b, a_kv, p, d]    of layer N
    outputs    logits                      [b, V]             of the last column
               present.positions, ..                          past and new ones, p + s columns

The present of a step is the past of the next. A token sees the columns whose position is not after
its own. So the shorter prompts of a batch are padded on the left, at position `seq_length`, which
no token sees; and under a sliding window the caller may drop columns that are out of sight.

A BERT has no cache: tokens, types and real, [b, s] each, give the logits of all columns, [b, s, V].
real is 1, and 0 for the padding at the end of a row.

    python -m course.export                              a lesson: one graph, its sizes, its cache
    python -m inference.export CKPT FOLDER           of a checkpoint, a run or a Hugging Face folder
    python -m inference.export CKPT FOLDER --dtype fp16       half the bytes
    python -m inference.export run FOLDER --prompt "def "     the most likely tokens, in onnxruntime

FOLDER gets model.onnx, model.onnx.data (the weights) and the tokenizer's files, once onnxruntime
has given the logits of generate.py. This needs: pip install onnx onnxscript onnxruntime

Not covered: T5; models that read pictures; graphs of int8; a cache that is written in place
(onnxruntime-genai), where this one is copied at every step; experts, whose sizes depend on the
data."""

import argparse
import contextlib
import dataclasses
import logging
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import generate
from base import terminal
from base.model_config import GPTConfig
from base.rotary import rotary_at
from families import LocalBias
from gpt import GPT, Context
from inference.answers import encode, text_of
from inference.huggingface import building, report
from inference.kv_cache import CacheSlot, caching
from inference.loading import check_vocabulary, find_tokenizer, load_model, open_model
from inference.onnx_session import ExportError, Session, need
from run.checkpoint_index import command_of
from run.tokenizer import BUILT_IN, make_tokenizer, save_files

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
# How far a logit may be from generate.py's, relative to the largest logit.
TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2}


# --- the model, with its cache as input and output ------------------------------------------------


class GraphCache:
    """The cache of one forward pass, in the place of inference.kv_cache.Cache: what was there comes
    in as tensors, and what is there afterwards goes out as new ones."""

    # None: CachedPositions takes those of `prefill_positions`.
    positions = None

    def __init__(self, config: GPTConfig, at: Tensor, columns: Tensor, past: dict):
        """at: [b, s], positions of the tokens; columns: [b, p + s], of the past and of the tokens;
        past: layer -> (keys, values), [b, a_kv, p, d] each."""
        self.at = at
        self.past = past
        # Layer -> (keys, values), [b, a_kv, p + s, d] each.
        self.present: dict[str, tuple[Tensor, Tensor]] = {}
        like = next(iter(past.values()))[0]
        # Of each layer, -inf for later columns, and what a window or ALiBi adds: [b, 1 or a, s,
        # p + s].
        biases = {}
        for layer in past:
            local = LocalBias(config, int(layer))
            biases.setdefault(local.window, local)
        biases = {window: local.between(at, columns, like) for window, local in biases.items()}
        self.biases = {layer: biases[config.window_of(int(layer))] for layer in past}

    def prefill_positions(self, s: int, device: torch.device) -> Tensor:
        return self.at

    def attend(self, layer: str, local, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [b, a, s, d]; k, v: [b, a_kv, s, d] -> [b, s, a d]"""
        k, v = (torch.cat(pair, dim=2) for pair in zip(self.past[layer], (k, v)))
        self.present[layer] = k, v
        context = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.biases[layer], enable_gqa=q.shape[1] != k.shape[1]
        )  # [b, a, s, d]
        return context.transpose(1, 2).flatten(2)


class Graph(nn.Module):
    """What is traced: one forward pass."""

    def __init__(self, model: GPT, slot: CacheSlot):
        """slot: of `caching`, which has changed the model."""
        super().__init__()
        self.model = model
        self.slot = slot
        self.has_rotary = model.config.positions == "rotary"
        if self.has_rotary:
            frequencies = model.rotary_frequencies(model.config, torch.device("cpu"))
            self.register_buffer("frequencies", frequencies)  # [d/2]

    def forward(self, tokens: Tensor, positions: Tensor, past_positions: Tensor, past: list):
        """past: (keys, values) of each layer; shapes as above. Returns (logits, present positions,
        (keys, values) of each layer)."""
        model = self.model
        columns = torch.cat((past_positions, positions), dim=1)  # [b, p + s]
        cache = GraphCache(model.config, positions, columns, dict(zip(model.blocks, past)))
        self.slot.cache = cache
        rotary = None
        if self.has_rotary:
            like = next(model.parameters())
            at = positions.unsqueeze(1)  # [b, 1, s]
            rotary = rotary_at(self.frequencies, at, like, model.config.rotary_scale)
        x = model.embedding(tokens)  # [b, s, h]
        for block in model.blocks.values():
            x = block(x, Context(rotary=rotary))
        logits = model.head(x[:, -1:])[:, 0]  # [b, V]
        return logits.float(), columns, [cache.present[layer] for layer in model.blocks]


def trace(model: GPT, tokenizer: str) -> "torch.onnx.ONNXProgram":
    """The graph of a model. tokenizer: its name, for `run`."""
    config = model.config
    # A size of 0 or 1 would be taken for a constant.
    b, s, p = 2, 3, 4
    columns = torch.arange(p + s).repeat(b, 1)
    part = next(model.parameters()).new_zeros(b, config.num_kv_heads, p, config.head_dim)
    past = [(part.clone(), part.clone()) for _ in range(config.num_layers)]
    batch, length, cached = Dim("batch"), Dim("length", max=config.seq_length), Dim("past")
    of_tokens, of_past = {0: batch, 1: length}, {0: batch, 1: cached}
    of_layer = ({0: batch, 2: cached}, {0: batch, 2: cached})
    parts = ["positions"]
    parts += [f"{n}.{part}" for n in range(config.num_layers) for part in ("key", "value")]
    slot = CacheSlot()
    with caching([model], slot):
        return to_onnx(
            Graph(model, slot),
            (torch.zeros_like(columns[:, p:]), columns[:, p:], columns[:, :p], past),
            (of_tokens, of_tokens, of_past, [of_layer] * config.num_layers),
            ["tokens", "positions", *(f"past.{part}" for part in parts)],
            ["logits", *(f"present.{part}" for part in parts)],
            tokenizer,
        )


class EncoderGraph(nn.Module):
    """What is traced of a BERT. tokens, types, real: [b, s] each -> logits [b, s, V]"""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, types: Tensor, real: Tensor) -> Tensor:
        from models.batch import Context

        x = self.model.embedding(tokens, Context(types=types))
        # Padding is a document of its own.
        x = self.model.run_blocks(x, tokens.shape[1], Context(documents=real))
        return self.model.head(x).float()


def trace_encoder(model: GPT, tokenizer: str) -> "torch.onnx.ONNXProgram":
    sizes = {0: Dim("batch"), 1: Dim("length", max=model.config.seq_length)}
    inputs = tuple(torch.full((2, 3), n) for n in (0, 0, 1))
    names = ["tokens", "types", "real"]
    return to_onnx(EncoderGraph(model), inputs, 3 * (sizes,), names, ["logits"], tokenizer)


def to_onnx(graph: nn.Module, inputs, shapes, names: list, outputs: list, tokenizer: str):
    """The ONNX program of a graph. shapes: of the inputs; names, outputs: of inputs and outputs."""
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            graph.eval(),
            inputs,
            dynamic_shapes=shapes,
            input_names=names,
            output_names=outputs,
            dynamo=True,
            verbose=False,
        )
    config = graph.model.config
    facts = dict(seq_length=config.seq_length, window=config.common_window, tokenizer=tokenizer)
    program.model.metadata_props.update({name: str(value) for name, value in facts.items()})
    return program


@contextlib.contextmanager
def quiet():
    """Without what the exporter says about packages that no model here needs."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


# --- a folder, compared with generate.py ----------------------------------------------------------


def check(config: GPTConfig) -> None:
    """Raises ExportError for a model that no graph is made of."""
    experts = getattr(config, "num_experts", 0)
    if experts:
        raise ExportError(
            f"num_experts {experts}: how many tokens an expert gets depends on the data, and a"
            " graph has no such sizes; a model without experts would fit"
        )
    if config.kv_rank:
        raise ExportError(f"kv_rank {config.kv_rank}: a graph has keys and values, not latents")
    command = command_of(dataclasses.asdict(config))
    if command not in ("train.py", "-m models.bert"):
        raise ExportError(f"a model of {command}: no graph is made of one")
    if config.seq_length < 4:
        raise ExportError(f"seq_length {config.seq_length}: must be at least 4 to be traced")


def export(path: str, target: str, dtype: str = "fp32") -> str:
    """Write the model at `path` as ONNX. Returns how far it is from this project's. Raises
    ExportError, CheckpointError, HuggingFaceError, TokenizerError; FloatingPointError where its
    logits are not finite."""
    need("onnx", "onnxscript", "onnxruntime")
    check(open_model(path, None)[0])
    model, index = load_model(path, dtype=DTYPES[dtype], shape_class=None)
    tokenizer = find_tokenizer(path, index)
    check_vocabulary(tokenizer, None, model.config.vocab_size)
    name = tokenizer.name if tokenizer.name in BUILT_IN else "tokenizer.json"
    with building(Path(target)) as folder:
        program = trace(model, name) if model.config.causal else trace_encoder(model, name)
        program.save(folder / "model.onnx", external_data=True)
        save_files(tokenizer.files, folder)
        comparison = compare if model.config.causal else compare_encoder
        worst, text = comparison(model, Session(folder))
        if not worst <= TOLERANCES[dtype]:
            raise ExportError(f"{text}: beyond {TOLERANCES[dtype]}, so nothing is kept")
    return text


def compare(model: GPT, session: Session) -> tuple[float, str]:
    """The largest difference of logits from those of generate.py, relative to the largest logit;
    and a text that says so. Both read the tokens that generate.py chooses."""
    config = model.config
    new = min(8, config.seq_length // 2)
    longest = config.seq_length // 2
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (3, min(12, longest)), generator=generator).tolist()
    prompts = [ids[0], ids[1][:1], ids[2][: len(ids[2]) // 2]]
    chosen = generate.generate(model, prompts, new, temperature=0)
    # Logits of each chosen token, [new, V] of each prompt.
    with torch.no_grad():
        texts = [torch.tensor([prompt + more[:-1]]) for prompt, more in zip(prompts, chosen)]
        expected = [model(text)[0, -new:].float().numpy() for text in texts]
    tokens, positions = session.begin(prompts)
    equal = 0
    differences = []
    for step in range(new):
        theirs = np.stack([logits[step] for logits in expected])  # [prompts, V]
        logits = session.forward(tokens, positions)
        differences.append(np.abs(logits - theirs).max() / np.abs(theirs).max())
        tokens = np.array(chosen)[:, step : step + 1]
        positions = positions[:, -1:] + 1
        equal += (logits.argmax(-1) == tokens[:, 0]).sum()
    worst = np.max(differences)
    text = f"{equal} of {len(prompts) * new} tokens as generate.py's, logits within {worst:.0e}"
    return worst, text


def compare_encoder(model: GPT, session: Session) -> tuple[float, str]:
    """`compare`, of a BERT's logits; two rows of three are padded."""
    n, generator = min(12, model.config.seq_length), torch.Generator().manual_seed(0)
    limits = model.config.vocab_size, model.config.token_types
    tokens, types = (torch.randint(limit, (3, n), generator=generator) for limit in limits)
    real = torch.arange(n) < torch.tensor([[n], [n // 2], [1]])
    feed = dict(tokens=tokens, types=types, real=real.long())
    with torch.no_grad():
        expected = EncoderGraph(model)(**feed)
    (logits,) = session.session.run(None, {name: x.numpy() for name, x in feed.items()})
    apart = (torch.from_numpy(logits) - expected)[real].abs().max()
    worst = (apart / expected.abs().max()).item()
    return worst, f"logits within {worst:.0e}"


# --- the command line -----------------------------------------------------------------------------


def run(folder: str, prompt: str, max_tokens: int) -> str:
    """The prompt with its most likely continuation. Raises ExportError, PromptError or
    TokenizerError."""
    session = Session(folder)
    if not session.inputs:
        raise ExportError(f"{folder}: a BERT, which has logits of its input and writes no text")
    name = session.tokenizer
    tokenizer = make_tokenizer(name if name in BUILT_IN else str(Path(folder) / name))
    ids = encode(prompt, tokenizer, session.seq_length)
    start = time.perf_counter()
    new = session.generate([ids], max_tokens, tokenizer.stop_ids)[0]
    speed = len(new) / (time.perf_counter() - start)
    terminal.say(f"{len(new)} tokens, {speed:.0f} tokens/s", error=True)
    return prompt + text_of(tokenizer, ids, new)


def make_parser() -> argparse.ArgumentParser:
    about = "A model as an ONNX graph, and in onnxruntime."
    parser = argparse.ArgumentParser(prog="python -m inference.export", description=about)
    flag = parser.add_argument
    flag("source", help="a checkpoint, a run or a Hugging Face folder; or the word run")
    flag("folder", help="a new one; after run, one that was exported")
    flag("--dtype", choices=tuple(DTYPES), help="of weights (default: fp32)")
    flag("--prompt", help="for run: the text to continue")
    flag("--max-tokens", type=int, help="for run: most new tokens (default: 300)")
    return parser


def check_flags(args: argparse.Namespace) -> None:
    """Raises ExportError."""
    if not args.folder:
        raise ExportError("FOLDER '': names no folder")
    if args.source == "run":
        if args.dtype:
            raise ExportError("--dtype: was chosen when the graph was written; leave it out")
        if args.max_tokens is not None and args.max_tokens < 0:
            raise ExportError(f"--max-tokens {args.max_tokens}: must be at least 0")
        if not args.prompt:
            raise ExportError("--prompt TEXT: give the text to continue")
    elif args.prompt is not None or args.max_tokens is not None:
        name = "--max-tokens" if args.prompt is None else "--prompt"
        raise ExportError(
            f"{name}: is for `python -m inference.export run FOLDER`; export alone needs none"
        )


def convert(args: argparse.Namespace) -> str:
    check_flags(args)
    if args.source == "run":
        return run(args.folder, args.prompt, 300 if args.max_tokens is None else args.max_tokens)
    return f"{args.folder}: {export(args.source, args.folder, args.dtype or 'fp32')}"


def main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    return report("export.py", lambda: convert(args))


if __name__ == "__main__":
    terminal.command(main)
