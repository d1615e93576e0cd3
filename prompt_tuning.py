"""Prompt tuning and p-tuning: a frozen model learns a task as a few vectors in front of the text.

    ids        V+0  V+1  V+2 | g    o    o    d     V vocabulary size; V + j is virtual token j
    vectors    P_0  P_1  P_2 | E_g  E_o  E_o  E_d   E [V, h] embedding, frozen; P [T, h] is learned

Prompt tuning (Lester et al. 2021, arXiv 2104.08691, section 2) learns the table P itself. P-tuning
(Liu et al. 2021, arXiv 2103.10385, section 3) learns an encoder and its inputs [T, h], because a
table alone is learned slowly; P = encoder(inputs):

    mlp      Linear(h, e)  ReLU  Linear(e, e)  ReLU  Linear(e, h)
    lstm     bidirectional LSTM(h, e)  Linear(2e, 2e)  ReLU  Linear(2e, h)
    tpmlp    Linear(h, e), column-parallel  GELU  Linear(e, h), row-parallel (arXiv 1909.08053)

After training only the table is kept: T h numbers per task, in a prompt file. More tasks can be
learned later; the tables of the existing tasks do not change by a bit.

    python prompt_tuning.py        a small model learns two tasks, one after the other

The gradient of P flows through the whole model, but only prompts have gradients, optimizer state
and a place in checkpoints. Parallel layouts need one addition, for sequence parallelism: each rank
embeds a shard of the tokens, so P passes through f (identity in forward, all-reduce in backward).
Under tensor parallelism the model's own f has summed the gradient already. In a pipeline the first
stage has the prompts.

With arguments, this file trains, generates and evaluates: see prompts/commands.py. The
configuration has NeMo's names (`PromptConfig` in prompts/prompt_data.py).

Not covered: T5, and training on with the encoder of a task that was learned before. NeMo has both;
here an existing task is a table.
"""

from runtime import terminal

if __name__ == "__main__":
    # PyTorch takes seconds to import, and Ctrl-C may come meanwhile.
    terminal.quiet_interrupts()

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import checkpoint
import gpt
import sharding
import tensor_parallel
from model_config import GPTConfig
from prompts.prompt_data import PromptConfig, PromptData, PromptError, PTuning, Template
from sharding import Shard, shard_parameter

# A prompt parameter's global name is this, and its name in VirtualPrompts.
PARAMETER_PREFIX = "embedding.tokens.prompts."


# --- encoders -------------------------------------------------------------------------------------


class MLPEncoder(nn.Module):
    """inputs: [T, h] -> table [T, h]"""

    def __init__(self, h: int, config: PTuning):
        super().__init__()
        e = config.encoder_hidden or h
        self.layers = nn.Sequential(
            nn.Linear(h, e), nn.ReLU(), nn.Linear(e, e), nn.ReLU(), nn.Linear(e, h)
        )

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
        self.project = gpt.SharedInput()
        self.up = gpt.DeferredBiasLinear(h, e)
        self.activation = gpt.GELU()
        self.down = gpt.DeferredBiasLinear(e, h)

    def shard_over(self, group: dist.ProcessGroup) -> None:
        shard_parameter(self.up, "weight", Shard(0, group))  # [e / t, h]
        shard_parameter(self.up, "bias", Shard(0, group))
        self.project = tensor_parallel.ColumnParallelLinear(group)
        self.down = tensor_parallel.RowParallelLinear(self.down, group)

    def forward(self, inputs: Tensor) -> Tensor:
        (inner,) = self.project(inputs.unsqueeze(0), self.up)  # [1, T, e / t]
        inner = self.activation(inner, self.up.bias)
        return (self.down(inner) + self.down.bias).squeeze(0)


ENCODERS = {"mlp": MLPEncoder, "lstm": LSTMEncoder, "tpmlp": TensorParallelMLPEncoder}


def make_encoder(config: PromptConfig, h: int) -> nn.Module:
    return ENCODERS[config.p_tuning.encoder_type](h, config.p_tuning)


# --- prompts in a model ---------------------------------------------------------------------------


def parameter_name(task: str) -> str:
    """A task's key in a ParameterDict. The prefix keeps it apart from the dict's own attributes."""
    return f"task-{task}"


class VirtualPrompts(nn.Module):
    """The tables of all tasks. () -> [T of all tasks, h], one table under the other, in the order
    of `config.tasks`.

    `tables` has a parameter for each table that is learned directly or exists already; `inputs` has
    one for each table that the encoder computes.
    """

    def __init__(self, config: PromptConfig, h: int):
        super().__init__()
        self.tasks = config.tasks
        self.tables = nn.ParameterDict()
        self.inputs = nn.ParameterDict()
        self.encoder = None
        for task in self.tasks:
            rows = config.templates[task].total_virtual_tokens
            learned = config.learned and task in config.new_tasks
            encoded = learned and config.virtual_prompt_style == "p-tuning"
            parameters = self.inputs if encoded else self.tables
            vectors = nn.Parameter(torch.empty(rows, h), requires_grad=learned)
            parameters[parameter_name(task)] = vectors
        if self.inputs:
            self.encoder = make_encoder(config, h)

    def table(self, task: str) -> Tensor:
        """[T, h]"""
        name = parameter_name(task)
        if name in self.inputs:
            return self.encoder(self.inputs[name])
        return self.tables[name]

    def forward(self) -> Tensor:
        return torch.cat([self.table(task) for task in self.tasks])


class PromptedEmbedding(nn.Module):
    """An embedding whose ids from V on are rows of the prompts. tokens: [b, s] -> [b, s, h], or
    [b, s/t, h] under sequence parallelism over `sequence_group`."""

    def __init__(
        self,
        embedding: nn.Module,
        prompts: VirtualPrompts,
        vocab_size: int,
        sequence_group: dist.ProcessGroup | None,
    ):
        super().__init__()
        # first, so that the weight keeps its global name
        self.weight = embedding.weight
        self.inner = embedding
        self.prompts = prompts
        self.vocab_size = vocab_size
        self.sequence_group = sequence_group

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(tokens.masked_fill(tokens >= self.vocab_size, 0))  # [b, s, h] or [b, s/t, h]
        table = self.prompts()  # [T of all tasks, h]
        # generation turns sequence parallelism off and on, so the shape decides
        if x.shape[1] < tokens.shape[1]:
            shards = tokens.chunk(self.sequence_group.size(), dim=1)
            tokens = shards[self.sequence_group.rank()]  # [b, s/t]
            table = tensor_parallel.copy_to_ranks(table, self.sequence_group)
        rows = tokens - self.vocab_size
        prompt_vectors = F.embedding(rows.clamp(min=0), table)
        return torch.where((rows >= 0).unsqueeze(-1), prompt_vectors, x)


def check(config: PromptConfig, h: int, t: int = 1) -> None:
    """Whether a model of hidden size h on t tensor-parallel ranks can learn these prompts. Raises
    PromptError where t does not divide the encoder, CheckpointError where it does not fit in
    memory."""
    if config.virtual_prompt_style != "p-tuning":
        return
    settings = config.p_tuning
    with torch.device("meta"):
        numbers = sharding.num_parameters(make_encoder(config, h))
    # weights, gradients and Adam's two moments, each float32
    checkpoint.check_room(f"p_tuning.encoder_hidden {settings.encoder_hidden}", 16 * numbers, "cpu")
    e = settings.encoder_hidden or h
    if settings.encoder_type == "tpmlp" and e % t:
        raise PromptError(
            f"p_tuning.encoder_hidden {e}: must be divisible by tp {t} for the encoder tpmlp"
        )


def apply(
    model: gpt.GPT, config: PromptConfig, group: dist.ProcessGroup | None = None
) -> VirtualPrompts | None:
    """Give a model the prompts of config's tasks; ids from vocab_size on are theirs.

    Comes after tensor and sequence parallelism over `group`, and after
    `model.requires_grad_(False)`. Prompts are on the model's device, which may be meta. Returns
    them, None for a pipeline stage without the embedding. Raises what `check` raises.
    """
    h = model.config.hidden_size
    check(config, h, group.size() if group else 1)
    # generate.py accepts so many ids beyond the vocabulary, on every stage
    model.virtual_tokens = sum(config.templates[task].total_virtual_tokens for task in config.tasks)
    if model.embedding is None:
        return None
    embedding = model.embedding.tokens
    with embedding.weight.device:
        prompts = VirtualPrompts(config, h).to(embedding.weight.dtype)
    if group and isinstance(prompts.encoder, TensorParallelMLPEncoder):
        prompts.encoder.shard_over(group)
    vocab_size = model.config.vocab_size
    model.embedding.tokens = PromptedEmbedding(embedding, prompts, vocab_size, group)
    return prompts


# --- values at the start and at the end of training -----------------------------------------------


def initial_values(
    config: PromptConfig,
    h: int,
    seed: int,
    tokenizer=None,
    embedding: Tensor | None = None,
    existing: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The whole float32 value of each prompt parameter, by its name in VirtualPrompts. It depends
    on (seed, name) alone, so it is the same under every layout.

    tokenizer, embedding [V, h]: for tables that are initialised from a text. existing: the tables
    of the existing tasks. Raises PromptError for a text without tokens.
    """
    prompts = VirtualPrompts(config, h)
    texts = init_texts(config)
    values = {}
    for name, p in prompts.named_parameters():
        generator = sharding.generator(seed, PARAMETER_PREFIX + name)
        kind = name.split(".")[0]
        task = name.partition(".task-")[2]
        if kind == "encoder":
            # uniform within ±1 / sqrt(fan-in), as torch initialises Linear and LSTM
            uniform = torch.rand(p.shape, generator=generator) * 2 - 1
            values[name] = uniform / fan_in(prompts, name) ** 0.5
        elif kind == "inputs":
            values[name] = torch.randn(p.shape, generator=generator) * config.p_tuning.init_std
        elif not p.requires_grad:
            values[name] = existing[task].float()
        elif task in texts:
            values[name] = embeddings_of(texts[task], task, len(p), tokenizer, embedding)
        else:
            values[name] = torch.randn(p.shape, generator=generator) * 0.02
    return values


def init_texts(config: PromptConfig) -> dict[str, str]:
    """{task: text} of the new tables that are initialised from a text."""
    if config.virtual_prompt_style != "prompt-tuning":
        return {}
    settings = config.prompt_tuning
    methods = zip(config.new_tasks, settings.new_prompt_init_methods, settings.new_prompt_init_text)
    return {task: text for task, method, text in methods if method == "text"}


def embeddings_of(text: str, task: str, n: int, tokenizer, embedding: Tensor) -> Tensor:
    """The vectors of the first n tokens of a text, repeated where it has fewer. -> [n, h]"""
    ids = [int(i) for i in tokenizer.encode(text)][:n]
    if not ids:
        raise PromptError(
            f"prompt_tuning.new_prompt_init_text {text!r}: has no tokens to initialise {task!r}"
            " from"
        )
    return embedding[(ids * n)[:n]].float()


def fan_in(prompts: VirtualPrompts, name: str) -> int:
    """Of an encoder's layer: the number of its inputs; for an LSTM torch takes its hidden size."""
    if "lstm" in name:
        return prompts.encoder.lstm.hidden_size
    return prompts.get_parameter(name.replace("bias", "weight")).shape[1]


@torch.no_grad()
def compute_tables(config: PromptConfig, h: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The table [T, h] of each new task, float32: what is kept of an encoder. values: whole prompt
    parameters, by their name in VirtualPrompts."""
    prompts = VirtualPrompts(config, h)
    for name, p in prompts.named_parameters():
        if p.requires_grad:
            p.copy_(values[name])
    return {task: prompts.table(task).clone() for task in config.new_tasks}


def apply_tables(model: gpt.GPT, config: PromptConfig, tables: dict[str, Tensor]) -> dict[str, int]:
    """`apply` with the tables of a prompt file, for inference. Returns the id of each task's first
    virtual token. Raises PromptError for tables of another hidden size."""
    prompts = apply(model, config)
    if prompts is not None:
        for task in config.tasks:
            p = prompts.tables[parameter_name(task)]
            if tables[task].shape != p.shape:
                raise PromptError(
                    f"task {task!r} has vectors of {tables[task].shape[1]} numbers, and this"
                    f" model's have {p.shape[1]}"
                )
            p.data.copy_(tables[task])
    return config.first_ids(model.config.vocab_size)


# --- python prompt_tuning.py ----------------------------------------------------------------------

# the two tasks: name -> the right answer for a word
ANSWERS = {"first": lambda word: word[0], "last": lambda word: word[-1]}


def lesson(seed: int = 0, steps: tuple[int, int] = (300, 200)) -> int:
    """A small model learns to give a word's first or last letter, as a capital letter in front of
    the word demands. Then it is frozen, and two prompts learn to demand the same.

    steps: (of the model, of each prompt). Returns the exit status: 1 where a loss stays above 0.05
    or an answer is wrong.
    """
    from corpus.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    model = small_llama(seed)
    losses = {"the model": learn_to_read(model, tokenizer, seed, steps[0])}
    model.requires_grad_(False).eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    tables = {}
    for task in ANSWERS:
        losses[f"task {task}"] = learn_task(model, task, tables, tokenizer, seed, steps[1])
    unchanged = all(torch.equal(p, model.get_parameter(name)) for name, p in before.items())
    state = "bit for bit as they were" if unchanged else "changed"
    print(f"the model's weights: {state}; new words, with both tables:")
    answers = ask(model, tables, tokenizer, ("hgfe", "badc", "ccgh"))
    print("    " + ", ".join(f"{task} of {word}: {text}" for (task, word), text in answers.items()))
    wrong = [f"{what} has a loss of {loss:.2f}" for what, loss in losses.items() if not loss < 0.05]
    for (task, word), text in answers.items():
        if text != ANSWERS[task](word):
            wrong.append(f"{task} of {word} is not {text!r}")
    if wrong:
        print(f"prompt_tuning.py: not learned: {'; '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def small_llama(seed: int) -> gpt.GPT:
    config = GPTConfig(
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        ffn_hidden_size=172,
        seq_length=32,
        vocab_size=257,
        llama=True,
    )
    with torch.device("meta"):
        model = gpt.GPT(config)
    sharding.init(model, seed, "cpu", torch.float32)
    return model


def learn_to_read(model: gpt.GPT, tokenizer, seed: int, steps: int) -> float:
    """Train the whole model on lines like Fabcd=a and Labcd=d. Returns the last loss."""
    template = Template(
        "read", "{which}{word}={answer}", 0, [], answer_only_loss=True, answer_field="answer"
    )

    def batch_of(generator: torch.Generator):
        words = [random_word(generator) for _ in range(64)]
        records = []
        for word, task in zip(words, list(ANSWERS) * 32):
            which = task[0].upper()
            records.append({"which": which, "word": word, "answer": ANSWERS[task](word)})
        return make_batch(template, records, tokenizer, tokenizer.vocab_size)

    result = learn(model, seed, steps, batch_of)
    print(
        "a Llama (h 64, L 2) reads lines like Fabcd=a and Labcd=d:"
        f" {result.parameters:,} parameters learned,"
        f" loss {result.first_loss:.2f} -> {result.last_loss:.4f}. From here on it is frozen."
    )
    return result.last_loss


def learn_task(
    model: gpt.GPT, task: str, tables: dict[str, Tensor], tokenizer, seed: int, steps: int
) -> float:
    """Learn a task by p-tuning, beside the existing tasks in `tables`, and add its table there.
    Returns the last loss."""
    h = model.config.hidden_size
    config = lesson_config(
        new_tasks=[task],
        existing_tasks=list(tables),
        # no file: the existing tables are at hand
        restore_path="-",
        p_tuning={"encoder_hidden": 16},
    )
    embedding = model.embedding.tokens
    prompts = apply(model, config)
    for name, value in initial_values(config, h, seed, existing=tables).items():
        prompts.get_parameter(name).data.copy_(value)
    first_id = config.first_ids(tokenizer.vocab_size)[task]

    def batch_of(generator: torch.Generator):
        words = [random_word(generator) for _ in range(32)]
        records = [{"word": word, "answer": ANSWERS[task](word)} for word in words]
        return make_batch(config.templates[task], records, tokenizer, first_id)

    result = learn(model, seed, steps, batch_of)
    print(
        f"task {task}: {result.parameters:,} parameters learned, of which a table of 2 x {h} is"
        f" kept; loss {result.first_loss:.2f} -> {result.last_loss:.4f}"
    )
    for existing, table in tables.items():
        unchanged = torch.equal(prompts.table(existing), table)
        state = "bit for bit as it was" if unchanged else "changed"
        print(f"    the table of {existing} meanwhile: {state}")
    values = {name: p.detach() for name, p in prompts.named_parameters()}
    tables |= compute_tables(config, h, values)
    model.embedding.tokens = embedding
    return result.last_loss


def lesson_config(**fields) -> PromptConfig:
    template = {
        "prompt_template": "<|VIRTUAL_PROMPT_0|>{word}={answer}",
        "total_virtual_tokens": 2,
        "virtual_token_splits": [2],
        "answer_only_loss": True,
        "answer_field": "answer",
    }
    templates = [template | {"taskname": task} for task in ANSWERS]
    return PromptConfig.of({"task_templates": templates} | fields)


def random_word(generator: torch.Generator) -> str:
    """Four of the letters a to h."""
    letters = torch.randint(8, (4,), generator=generator).tolist()
    return "".join(chr(ord("a") + letter) for letter in letters)


def make_batch(template: Template, records: list[dict], tokenizer, first_id: int):
    """The records as a data.Batch of [b, s]."""
    examples = [template.fill(record, tokenizer, first_id, 32) for record in records]
    return PromptData(examples, tokenizer.vocab_size, seed=None).batch(range(len(records)))


class Learned(NamedTuple):
    # how many learned
    parameters: int
    first_loss: float
    # the mean of the last 20
    last_loss: float


def learn(model: gpt.GPT, seed: int, steps: int, batch_of: Callable) -> Learned:
    """Train what is not frozen. batch_of(generator): the batch of a step."""
    from gradients import GradientAccumulator
    from optimizer import AdamW

    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses = []
    gradients = GradientAccumulator(model)
    optimizer = AdamW(learned.items(), 0.0)
    for step in range(steps):
        gradients.zero()
        batch = batch_of(torch.Generator().manual_seed(1000 * seed + step))
        token_losses = model(batch.tokens, batch.targets)  # [b, s]
        loss = (token_losses * batch.loss_mask).sum() / batch.loss_mask.sum()
        loss.backward()
        # The peak of 3e-3 matters. At 1e-2 the frozen model's logits, or the prompts' vectors, grow
        # so large that the loss depends on how a processor rounds.
        optimizer.step(3e-3 * min(1, (step + 1) / 20) * (1 - step / steps))
        losses.append(loss.item())
    last = losses[-20:]
    return Learned(sum(p.numel() for p in learned.values()), losses[0], sum(last) / len(last))


def ask(
    model: gpt.GPT, tables: dict[str, Tensor], tokenizer, words: tuple[str, ...]
) -> dict[tuple[str, str], str]:
    """{(task, word): the answer that the model generates with the task's prompt}"""
    import generate

    config = lesson_config(virtual_prompt_style="inference", new_tasks=list(ANSWERS))
    first_ids = apply_tables(model, config, tables)
    questions = [(task, word) for word in words for task in ANSWERS]
    prompts = []
    for task, word in questions:
        template = config.templates[task]
        filled = template.fill({"word": word}, tokenizer, first_ids[task], 32, answer=False)
        prompts.append(filled.ids)
    answers = generate.generate(model, prompts, 8, temperature=0, eot=tokenizer.eot)
    return {question: tokenizer.decode(ids) for question, ids in zip(questions, answers)}


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(lesson())
    from prompts import commands

    sys.exit(commands.main(sys.argv[1:]))
