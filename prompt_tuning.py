"""Prompt tuning and p-tuning: a frozen model learns a task as a few vectors before the text.

    ids        V+0  V+1  V+2 | g    o    o    d     V vocabulary size; V + j is virtual token j
    vectors    P_0  P_1  P_2 | E_g  E_o  E_o  E_d   E [V, h] embedding, frozen; P [T, h] is learned

Prompt tuning (Lester et al. 2021, arXiv 2104.08691, section 2) learns the table P itself. P-tuning
(Liu et al. 2021, arXiv 2103.10385, section 3) learns an encoder and its inputs [T, h], because a
table alone is learned slowly; P = encoder(inputs):

    mlp      Linear(h, e)  ReLU  Linear(e, h); each layer beyond num_layers 2: Linear(e, e)  ReLU
    lstm     bidirectional LSTM(h, e)  Linear(2e, 2e)  ReLU  Linear(2e, h)
    tpmlp    Linear(h, e), column-parallel  GELU  Linear(e, h), row-parallel (arXiv 1909.08053)

After training only the table is kept: T h numbers per task, in a prompt file. More tasks can be
learned later, without any change to the existing tables.

    python -m course.prompt_tuning     a lesson: a small model learns two tasks, one after the other

The gradient of P flows through the whole model, but only P (or its encoder) has main gradients,
optimizer state and checkpoints. Only sequence parallelism needs an addition: each rank embeds a
shard of the tokens, so P passes through f (identity in forward, all-reduce in backward). Under
tensor parallelism the model's own f has summed the gradient already. In a pipeline the first stage
has P.

`python -m finetune.prompt_tuning` trains, `python -m inference.prompt_tuning` generates and
evaluates. The configuration has NeMo's names (finetune/nemo_config.py).

Not covered: further training with the encoder of an existing task (NeMo has it; here an existing
task is a table). For T5: models/prompt_t5.py.
"""

import itertools
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec import Meta, Struct
from torch import Tensor, nn

import gpt
import sharding
import tensor_parallel
from base.errors import InputError
from sharding import Shard, shard_parameter

# A prompt parameter's global name is this, and its name in VirtualPrompts.
PARAMETER_PREFIX = "embedding.tokens.prompts."
# {encoder: the fewest and the most layers that it can have}
NUM_LAYERS = {"mlp": (2, 64), "lstm": (1, 64), "tpmlp": (2, 2)}


# --- tasks ----------------------------------------------------------------------------------------


class PromptError(InputError):
    """A template, a configuration or a line of data that cannot be used. The message names it, and
    what would fit."""


class PTuning(Struct, forbid_unknown_fields=True):
    """The encoder that computes the virtual tokens' vectors in p-tuning."""

    encoder_type: str = "mlp"
    # Its hidden size; 0 for the model's.
    encoder_hidden: Annotated[int, Meta(ge=0, le=2**16)] = 0
    # Linear layers of the mlp, layers of the lstm; tpmlp always has two.
    num_layers: Annotated[int, Meta(ge=1, le=64)] = 2
    dropout: float = 0.0
    # Standard deviation of the encoder's initial inputs.
    init_std: Annotated[float, Meta(gt=0, le=1000)] = 1.0

    def __post_init__(self):
        encoder, layers = self.encoder_type, self.num_layers
        if encoder not in NUM_LAYERS:
            raise PromptError(
                f"p_tuning.encoder_type {encoder!r}: must be one of {', '.join(NUM_LAYERS)}"
            )
        least, most = NUM_LAYERS[encoder]
        if not least <= layers <= most:
            only = str(least) if least == most else f"{least} to {most}"
            raise PromptError(f"p_tuning.num_layers {layers}: {encoder} has {only}")
        if self.dropout:
            raise PromptError(
                f"p_tuning.dropout {self.dropout}: must be 0; the encoder's inputs are learned and"
                " few, with nothing to generalise over"
            )


class PromptTasks(NamedTuple):
    """The tasks of a model."""

    tokens: dict[str, int]  # {task: its number of virtual tokens T}, in the order of their ids
    new: list[str]  # tasks whose tables are learned; the others have one already
    encoder: PTuning | None = None  # of p-tuning; None: tables are learned directly

    def first_ids(self, vocab_size: int) -> dict[str, int]:
        """The id of each task's first virtual token."""
        return dict(
            zip(self.tokens, itertools.accumulate(self.tokens.values(), initial=vocab_size))
        )


# --- encoders -------------------------------------------------------------------------------------


class MLPEncoder(nn.Module):
    """inputs: [T, h] -> table [T, h]"""

    def __init__(self, h: int, config: PTuning):
        super().__init__()
        e = config.encoder_hidden or h
        sizes = [h, *[e] * (config.num_layers - 1), h]
        layers = []
        for rows, columns in itertools.pairwise(sizes):
            layers += [nn.Linear(rows, columns), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class LSTMEncoder(nn.Module):
    """inputs: [T, h] -> table [T, h]"""

    def __init__(self, h: int, config: PTuning):
        super().__init__()
        e = config.encoder_hidden or h
        self.lstm = nn.LSTM(h, e, config.num_layers, bidirectional=True, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(2 * e, 2 * e), nn.ReLU(), nn.Linear(2 * e, h))

    def forward(self, inputs: Tensor) -> Tensor:
        states, _ = self.lstm(inputs.unsqueeze(0))  # [1, T, 2e]
        return self.layers(states).squeeze(0)


class TensorParallelMLPEncoder(nn.Module):
    """inputs: [T, h] -> table [T, h]. On one device an MLP; `shard_over` makes it parallel."""

    def __init__(self, h: int, config: PTuning):
        super().__init__()
        e = config.encoder_hidden or h
        self.project = gpt.ProjectTogether()
        self.up = gpt.DeferredBiasLinear(h, e)
        self.activation = gpt.GELU()
        self.down = gpt.DeferredBiasLinear(e, h)

    def shard_over(self, group: dist.ProcessGroup) -> None:
        shard_parameter(self.up, "weight", Shard(0, group))  # [e / t, h]
        shard_parameter(self.up, "bias", Shard(0, group))
        self.project = tensor_parallel.ColumnParallelInput(group)
        self.down = tensor_parallel.RowParallelLinear(self.down, group)

    def forward(self, inputs: Tensor) -> Tensor:
        (inner,) = self.project(inputs.unsqueeze(0), self.up)  # [1, T, e / t]
        inner = self.activation(inner, self.up.bias)
        return (self.down(inner) + self.down.bias).squeeze(0)


ENCODERS = {"mlp": MLPEncoder, "lstm": LSTMEncoder, "tpmlp": TensorParallelMLPEncoder}


def make_encoder(config: PTuning, h: int) -> nn.Module:
    return ENCODERS[config.encoder_type](h, config)


# --- virtual tokens in a model --------------------------------------------------------------------


def parameter_name(task: str) -> str:
    """A task's key in a ParameterDict. The prefix avoids the names of the dict's attributes."""
    return f"task-{task}"


class VirtualPrompts(nn.Module):
    """The tables of all tasks, concatenated. () -> [T of all tasks, h]

    `tables` has a parameter for each table that is learned directly or exists already; `inputs` has
    one for each table that the encoder computes.
    """

    def __init__(self, tasks: PromptTasks, h: int):
        super().__init__()
        self.tasks = tasks
        self.tables = nn.ParameterDict()
        self.inputs = nn.ParameterDict()
        self.encoder = None
        for task, rows in tasks.tokens.items():
            learned = task in tasks.new
            parameters = self.inputs if learned and tasks.encoder else self.tables
            vectors = nn.Parameter(torch.empty(rows, h), requires_grad=learned)
            parameters[parameter_name(task)] = vectors
        if self.inputs:
            self.encoder = make_encoder(tasks.encoder, h)

    def table(self, task: str) -> Tensor:
        """The table of a task, [T, h]."""
        name = parameter_name(task)
        if name in self.inputs:
            return self.encoder(self.inputs[name])
        return self.tables[name]

    def forward(self) -> Tensor:
        return torch.cat([self.table(task) for task in self.tasks.tokens])


class PromptedEmbedding(nn.Module):
    """An embedding whose ids from V on are rows of the tables. tokens: [b, s] -> [b, s, h], or
    [b, s/t, h] under sequence parallelism over `sequence_group`."""

    is_lookup = True

    def __init__(
        self,
        embedding: nn.Module,
        prompts: VirtualPrompts,
        vocab_size: int,
        sequence_group: dist.ProcessGroup | None,
    ):
        super().__init__()
        # The weight is assigned first, so that it keeps its global name.
        self.weight = embedding.weight
        self.inner = embedding
        self.prompts = prompts
        self.vocab_size = vocab_size
        self.sequence_group = sequence_group

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(tokens.masked_fill(tokens >= self.vocab_size, 0))  # [b, s, h] or [b, s/t, h]
        table = self.prompts()  # [T of all tasks, h]
        # Generation turns sequence parallelism off and on, so the shape decides.
        if x.shape[1] < tokens.shape[1]:
            shards = tokens.chunk(self.sequence_group.size(), dim=1)
            tokens = shards[self.sequence_group.rank()]  # [b, s/t]
            table = tensor_parallel.copy_to_ranks(table, self.sequence_group)
        rows = tokens - self.vocab_size
        prompt_vectors = F.embedding(rows.clamp(min=0), table)
        return torch.where((rows >= 0).unsqueeze(-1), prompt_vectors, x)


def check(tasks: PromptTasks, h: int, t: int = 1) -> None:
    """Raises PromptError if t tensor-parallel ranks cannot share the encoder of a model of hidden
    size h."""
    encoder = tasks.encoder
    if not encoder or encoder.encoder_type != "tpmlp":
        return
    e = encoder.encoder_hidden or h
    if e % t:
        raise PromptError(
            f"p_tuning.encoder_hidden {e}: must be divisible by tp {t} for the encoder tpmlp"
        )


def apply(
    model: gpt.GPT, tasks: PromptTasks, group: dist.ProcessGroup | None = None
) -> VirtualPrompts | None:
    """Give a model the virtual tokens of these tasks, with the ids from vocab_size on.

    Call it after tensor and sequence parallelism over `group`, and after
    `model.requires_grad_(False)`. The tables are on the model's device, which may be meta. Returns
    the VirtualPrompts, None for a pipeline stage without the embedding. Raises PromptError as
    `check`.
    """
    h = model.config.hidden_size
    check(tasks, h, group.size() if group else 1)
    # generate.py accepts this many ids beyond the vocabulary, on every stage.
    model.virtual_tokens = sum(tasks.tokens.values())
    if model.embedding is None:
        return None
    embedding = model.embedding.tokens
    with embedding.weight.device:
        prompts = VirtualPrompts(tasks, h).to(embedding.weight.dtype)
    if group and isinstance(prompts.encoder, TensorParallelMLPEncoder):
        prompts.encoder.shard_over(group)
    vocab_size = model.config.vocab_size
    model.embedding.tokens = PromptedEmbedding(embedding, prompts, vocab_size, group)
    return prompts


# --- initial values and tables --------------------------------------------------------------------


def initial_values(
    tasks: PromptTasks,
    h: int,
    seed: int,
    texts: dict[str, str] | None = None,
    tokenizer=None,
    embedding: Tensor | None = None,
    existing: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The initial value, float32, of each whole prompt parameter, by its name in VirtualPrompts. It
    depends only on (seed, name), so it is the same under every layout.

    texts: {task: text that initialises its table}, with tokenizer and embedding [V, h]. existing:
    the tables of the tasks that are not new. Raises PromptError for a text without tokens.
    """
    prompts = VirtualPrompts(tasks, h)
    values = {}
    for name, p in prompts.named_parameters():
        generator = sharding.generator(seed, PARAMETER_PREFIX + name)
        part = name.split(".")[0]
        task = name.partition(".task-")[2]
        if part == "encoder":
            # Uniform within ±1 / sqrt(fan-in), as torch initialises Linear and LSTM.
            uniform = torch.rand(p.shape, generator=generator) * 2 - 1
            values[name] = uniform / fan_in(prompts, name) ** 0.5
        elif part == "inputs":
            values[name] = torch.randn(p.shape, generator=generator) * tasks.encoder.init_std
        elif not p.requires_grad:
            values[name] = existing[task].float()
        elif text := (texts or {}).get(task):
            values[name] = embeddings_of(text, task, len(p), tokenizer, embedding)
        else:
            values[name] = torch.randn(p.shape, generator=generator) * 0.02
    return values


def embeddings_of(text: str, task: str, n: int, tokenizer, embedding: Tensor) -> Tensor:
    """The vectors of the first n tokens of a text, repeated if it has fewer. -> [n, h]"""
    ids = [int(i) for i in tokenizer.encode(text)][:n]
    if not ids:
        raise PromptError(
            f"prompt_tuning.new_prompt_init_text {text!r}: has no tokens to initialise {task!r}"
            " from"
        )
    return embedding[(ids * n)[:n]].float()


def fan_in(prompts: VirtualPrompts, name: str) -> int:
    """The number of inputs of an encoder's layer; for an LSTM torch takes its hidden size."""
    if "lstm" in name:
        return prompts.encoder.lstm.hidden_size
    return prompts.get_parameter(name.replace("bias", "weight")).shape[1]


@torch.no_grad()
def compute_tables(tasks: PromptTasks, h: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The table [T, h] of each new task, float32, without its encoder. values: whole prompt
    parameters, by their name in VirtualPrompts."""
    prompts = VirtualPrompts(tasks, h)
    for name, p in prompts.named_parameters():
        if p.requires_grad:
            p.copy_(values[name])
    return {task: prompts.table(task).clone() for task in tasks.new}


def apply_tables(model: gpt.GPT, tables: dict[str, Tensor]) -> dict[str, int]:
    """Call `apply` with the tables of a prompt file, for inference. Returns the id of each task's
    first virtual token. Raises PromptError for tables of another hidden size."""
    tasks = PromptTasks({task: len(table) for task, table in tables.items()}, [])
    prompts = apply(model, tasks)
    for task, table in tables.items() if prompts else []:
        p = prompts.tables[parameter_name(task)]
        if table.shape != p.shape:
            raise PromptError(
                f"task {task!r} has vectors of {table.shape[1]} numbers, and this model's have"
                f" {p.shape[1]}"
            )
        p.data.copy_(table)
    return tasks.first_ids(model.config.vocab_size)
