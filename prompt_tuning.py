"""Prompt learning: a frozen model learns tasks, each as a few vectors in front of the text (prompt
tuning, arXiv 2104.08691; p-tuning, arXiv 2103.10385).

    tokens       V0 V1 V2 | g o o d _ f u n ..          an id V + j beyond the vocabulary is virtual token j
    vectors      e0 e1 e2 | E[g] E[o] E[o] ..           looked up in a table [T, h] that is learned; the model is never altered

Prompt tuning learns the table itself. P-tuning learns an encoder that computes it, from vectors
that are learned too, because a table alone moves slowly:

    mlp      Linear(h, e)  ReLU  Linear(e, e)  ReLU  Linear(e, h)              table = encoder(inputs),   inputs [T, h]
    lstm     two-layer bidirectional LSTM(h, e)  Linear(2e, 2e)  ReLU  Linear(2e, h)
    tpmlp    Linear(h, e) by columns  GELU  Linear(e, h) by rows: tensor parallel (Megatron-LM, section 3)

after which the encoder is dropped and the table kept: for the tasks of one model a prompt file of T
h numbers each. New tasks are added later; the tables of the existing ones stay as they are, bit for
bit. The gradient of a table comes through the whole model, but only prompts have gradients kept,
optimizer state or a place in checkpoints. Under tensor parallelism it is the same on every rank (f
sums what comes back); under sequence parallelism each rank sees a slice of the tokens, so the table
goes through identity | all-reduce; in a pipeline the first stage has it.

    python prompt_tuning.py                                                                   a small model learns two tasks, one after the other
    python prompt_tuning.py train --config prompts.json --out runs/prompts --lr 0.03          train.py's flags, under torchrun too
    python prompt_tuning.py generate --prompts runs/prompts/prompts.safetensors --checkpoint
    runs/default --data lines.jsonl
    python prompt_tuning.py evaluate --prompts runs/prompts/prompts.safetensors --checkpoint
    runs/default --data lines.jsonl

The configuration has NeMo's names (`PromptConfig`). NeMo adds the same for T5, and an encoder's
state to go on from; here a task that has been learned is a table."""

from runtime import terminal

if __name__ == "__main__":
    # PyTorch takes seconds to import, and Ctrl-C may come meanwhile.
    terminal.quiet_interrupts()

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import checkpoint
import gpt
import sharding
import tensor_parallel
from model_config import GPTConfig
from prompts.prompt_data import (
    PromptConfig,
    PromptData,
    PromptError,
    PTuning,
    Template,
)
from sharding import Shard, shard_parameter

# global names of prompt parameters begin so
WHERE = "embedding.tokens.prompts."


# --- prompts in a model ---------------------------------------------------------------------------


class MLPEncoder(nn.Module):
    """inputs: [T, h] -> [T, h]"""

    def __init__(self, h: int, config: PTuning):
        super().__init__()
        e = config.encoder_hidden or h
        self.layers = nn.Sequential(
            nn.Linear(h, e), nn.ReLU(), nn.Linear(e, e), nn.ReLU(), nn.Linear(e, h)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class LSTMEncoder(nn.Module):
    """inputs: [T, h] -> [T, h]"""

    def __init__(self, h: int, config: PTuning):
        super().__init__()
        e = config.encoder_hidden or h
        self.lstm = nn.LSTM(h, e, config.num_layers, bidirectional=True, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(2 * e, 2 * e), nn.ReLU(), nn.Linear(2 * e, h))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(self.lstm(inputs.unsqueeze(0))[0]).squeeze(0)


class TensorParallelMLPEncoder(nn.Module):
    """inputs: [T, h] -> [T, h]. On one rank an MLP; `shard_over` shards it."""

    def __init__(self, h: int, config: PTuning):
        super().__init__()
        e = config.encoder_hidden or h
        self.project = gpt.SharedInput()
        self.up = gpt.DeferredBiasLinear(h, e)
        self.activation = gpt.GELU()
        self.down = gpt.DeferredBiasLinear(e, h)

    def shard_over(self, group: dist.ProcessGroup) -> None:
        if self.up.out_features % group.size():
            raise PromptError(
                f"p_tuning.encoder_hidden {self.up.out_features}: must be divisible by tp"
                f" {group.size()} for the encoder tpmlp"
            )
        shard_parameter(self.up, "weight", Shard(0, group))
        shard_parameter(self.up, "bias", Shard(0, group))
        self.project, self.down = (
            tensor_parallel.ColumnParallelLinear(group),
            tensor_parallel.RowParallelLinear(self.down, group),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        inner = self.activation(
            *self.project(inputs.unsqueeze(0), self.up), self.up.bias
        )  # [1, T, e / t]
        return (self.down(inner) + self.down.bias).squeeze(0)


ENCODERS = {"mlp": MLPEncoder, "lstm": LSTMEncoder, "tpmlp": TensorParallelMLPEncoder}


def key(task: str) -> str:
    """A task's name in a ParameterDict, which has attributes of its own."""
    return f"task-{task}"


class VirtualPrompts(nn.Module):
    """The tables of all tasks, one under the other, in the order of `tasks`."""

    def __init__(self, config: PromptConfig, h: int):
        super().__init__()
        self.tables = nn.ParameterDict()
        self.inputs = nn.ParameterDict()
        self.encoder = None
        self.first = {}
        rows = 0
        for task in config.tasks:
            T = config.templates[task].total_virtual_tokens
            learned = task in config.new_tasks and config.virtual_prompt_style != "inference"
            where = (
                self.inputs
                if learned and config.virtual_prompt_style == "p-tuning"
                else self.tables
            )
            where[key(task)] = nn.Parameter(torch.empty(T, h), requires_grad=learned)
            # task -> its first row
            self.first[task] = rows
            rows = rows + T
        if self.inputs:
            with torch.device("meta"):
                size = sharding.num_parameters(
                    ENCODERS[config.p_tuning.encoder_type](h, config.p_tuning)
                )
            # the weights, their gradients and two moments, each float32
            checkpoint.check_room(
                f"p_tuning.encoder_hidden {config.p_tuning.encoder_hidden}", 16 * size, "cpu"
            )
            self.encoder = ENCODERS[config.p_tuning.encoder_type](h, config.p_tuning)

    def table(self, task: str) -> Tensor:
        """[T, h]"""
        return (
            self.encoder(self.inputs[key(task)])
            if key(task) in self.inputs
            else self.tables[key(task)]
        )

    def forward(self) -> Tensor:
        return torch.cat([self.table(task) for task in self.first])


class PromptedEmbedding(nn.Module):
    """The embedding of tokens, for ids from V on a row of the prompts. tokens: [b, s] -> [b, s, h],
    or a slice of the sequence"""

    def __init__(
        self,
        embedding: nn.Module,
        prompts: VirtualPrompts,
        vocab_size: int,
        slices: dist.ProcessGroup | None,
    ):
        super().__init__()
        self.weight = embedding.weight
        self.inner = embedding
        self.prompts = prompts
        self.vocab_size = vocab_size
        self.slices = slices

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(tokens.masked_fill(tokens >= self.vocab_size, 0))
        table = self.prompts()
        # sequence parallel
        if x.shape[1] < tokens.shape[1]:
            tokens = tokens.chunk(self.slices.size(), dim=1)[self.slices.rank()]
            table = tensor_parallel.copy_to_ranks(table, self.slices)
        rows = tokens - self.vocab_size
        return torch.where((rows >= 0).unsqueeze(-1), F.embedding(rows.clamp(min=0), table), x)


def apply(
    model: gpt.GPT, config: PromptConfig, group: dist.ProcessGroup | None = None
) -> VirtualPrompts | None:
    """Give a model, or the chunk of a pipeline that has the embedding, the prompts of config's
    tasks; ids from vocab_size on are theirs. After tensor and sequence parallelism over `group`; on
    the device of the model, which may be meta. Freeze the model first: `requires_grad_(False)`.
    Raises PromptError."""
    # known on every stage
    model.virtual_tokens = sum(config.templates[task].total_virtual_tokens for task in config.tasks)
    if model.embedding is None:
        return None
    with model.embedding.tokens.weight.device:
        prompts = VirtualPrompts(config, model.config.hidden_size).to(
            model.embedding.tokens.weight.dtype
        )
    if group and isinstance(prompts.encoder, TensorParallelMLPEncoder):
        prompts.encoder.shard_over(group)
    model.embedding.tokens = PromptedEmbedding(
        model.embedding.tokens, prompts, model.config.vocab_size, group
    )
    return prompts


# --- values ---------------------------------------------------------------------------------------


def initial_values(
    config: PromptConfig,
    h: int,
    seed: int,
    tokenizer=None,
    embedding: Tensor | None = None,
    existing: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The whole float32 value of each prompt parameter, by its name in VirtualPrompts, the same
    under every layout. embedding: [V, h], for tables that begin from a text; existing: the tables
    of the existing tasks."""
    prompts = VirtualPrompts(config, h)
    values = {}
    begin = (
        dict(zip(config.new_tasks, config.prompt_tuning.new_prompt_init_text))
        if config.virtual_prompt_style == "prompt-tuning"
        else {}
    )
    for name, p in prompts.named_parameters():
        g = sharding.generator(seed, WHERE + name)
        kind = name.split(".")[0]
        task = name.partition(".task-")[2]
        if kind == "tables" and not p.requires_grad:
            values[name] = existing[task].float()
        elif (
            kind == "tables"
            and config.prompt_tuning.new_prompt_init_methods[config.new_tasks.index(task)] == "text"
        ):
            ids = [int(i) for i in tokenizer.encode(begin[task])][: len(p)]
            if not ids:
                raise PromptError(
                    f"prompt_tuning.new_prompt_init_text {begin[task]!r}: has no tokens to begin"
                    f" {task!r} from"
                )
            # over and over, or its beginning
            values[name] = embedding[(ids * len(p))[: len(p)]].float()
        elif kind == "tables":
            values[name] = torch.randn(p.shape, generator=g) * 0.02
        elif kind == "inputs":
            values[name] = torch.randn(p.shape, generator=g) * config.p_tuning.init_std
        # as torch begins Linear and LSTM
        else:
            fan = (
                prompts.encoder.lstm.hidden_size
                if "lstm" in name
                else prompts.get_parameter(name.replace("bias", "weight")).shape[1]
            )
            values[name] = (torch.rand(p.shape, generator=g) * 2 - 1) / fan**0.5
    return values


@torch.no_grad()
def tables(config: PromptConfig, h: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The table of each new task, [T, h] float32, from the whole values of the prompt parameters:
    what remains of an encoder."""
    prompts = VirtualPrompts(config, h)
    for name, p in prompts.named_parameters():
        if p.requires_grad:
            p.copy_(values[name])
    return {task: prompts.table(task).clone() for task in config.new_tasks}


def apply_tables(model: gpt.GPT, config: PromptConfig, found: dict[str, Tensor]) -> dict[str, int]:
    """Give a model the tables of a prompt file, for inference. Returns each task's first virtual
    id. Raises PromptError."""
    prompts = apply(model, config)
    for task in config.tasks if prompts is not None else ():
        p = prompts.tables[key(task)]
        if found[task].shape != p.shape:
            raise PromptError(
                f"task {task!r} has vectors of {found[task].shape[1]} numbers, and this model's"
                f" have {p.shape[1]}"
            )
        p.data.copy_(found[task])
    return config.first_ids(model.config.vocab_size)


# --------------------------------------------------------------------------------------------------


def lesson(seed: int = 0, steps: tuple[int, int] = (300, 200)) -> int:
    """A small model that can do two things with a word, when it is told which, learns two tasks
    without being told: the prompts find out. steps: of the model, of each prompt. Returns the exit
    status: 1 where a loss stayed above 0.05 or an answer is wrong.

    The rate of 3e-3 matters: at 1e-2 the frozen model's logits, or the prompts' vectors, grow so
    large that the loss hangs on how a processor rounds."""
    import generate
    from corpus.tokenizer import ByteTokenizer
    from optimizer import AdamW, GradientAccumulator

    tokenizer = ByteTokenizer()
    h = 64
    with torch.device("meta"):
        model = gpt.GPT(
            GPTConfig(
                num_layers=2,
                hidden_size=h,
                num_heads=4,
                ffn_hidden_size=172,
                seq_length=32,
                vocab_size=257,
                llama=True,
            )
        )
    sharding.init(model, seed, "cpu", torch.float32)

    def word(g) -> str:
        return "".join(chr(97 + i) for i in torch.randint(8, (4,), generator=g).tolist())

    def learn(steps: int, batch_of) -> tuple[int, float, float]:
        """(parameters learned, the first loss, the mean of the last 20)"""
        learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
        losses = []
        gradients = GradientAccumulator(model)
        optimizer = AdamW(learned.items(), 0.0)
        for step in range(steps):
            gradients.zero()
            batch = batch_of(torch.Generator().manual_seed(1000 * seed + step))
            losses.append(
                (model(batch.tokens, batch.targets) * batch.loss_mask).sum() / batch.loss_mask.sum()
            )
            losses[-1].backward()
            optimizer.step(3e-3 * min(1, (step + 1) / 20) * (1 - step / steps))
        last = losses[-20:]
        return (
            sum(p.numel() for p in learned.values()),
            losses[0].item(),
            sum(x.item() for x in last) / len(last),
        )

    reads = Template("read", "{which}{word}={answer}", 0, [], None, True, "answer")
    answer = {"first": lambda w: w[0], "last": lambda w: w[-1]}

    def reading(g):
        words = [word(g) for _ in range(64)]
        lines = [
            {"which": name[0].upper(), "word": w, "answer": answer[name](w)}
            for w, name in zip(words, ["first", "last"] * 32)
        ]
        return PromptData(
            [reads.fill(line, tokenizer, 257, 32) for line in lines], 257, None
        ).batch(range(64))

    size, first, last = learn(steps[0], reading)
    final = {"the model": last}
    print(
        f"a Llama (h {h}, L 2) reads lines like Fabcd=a and Labcd=d: {size:,} parameters learned,"
        f" loss {first:.2f} -> {last:.4f}. From here on it is frozen."
    )
    model.requires_grad_(False).eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    embedding = model.embedding.tokens
    kept = {}
    template = {
        "prompt_template": "<|VIRTUAL_PROMPT_0|>{word}={answer}",
        "total_virtual_tokens": 2,
        "virtual_token_splits": [2],
        "answer_only_loss": True,
        "answer_field": "answer",
    }
    templates = {"task_templates": [template | {"taskname": name} for name in answer]}
    for task, existing in (("first", []), ("last", ["first"])):
        config = PromptConfig.of(
            templates
            | {
                "existing_tasks": existing,
                "restore_path": "-",
                "new_tasks": [task],
                "p_tuning": {"encoder_hidden": 16},
            }
        )
        model.embedding.tokens = embedding
        prompts = apply(model, config)
        first_id = config.first_ids(257)[task]
        for name, value in initial_values(config, h, seed, existing=kept).items():
            prompts.get_parameter(name).data.copy_(value)

        def examples(g):
            lines = [{"word": w, "answer": answer[task](w)} for w in (word(g) for _ in range(32))]
            return PromptData(
                [config.templates[task].fill(line, tokenizer, first_id, 32) for line in lines],
                257,
                None,
            ).batch(range(32))

        size, first, last = learn(steps[1], examples)
        final[f"task {task}"] = last
        print(
            f"task {task}: {size:,} parameters learned, of which a table of 2 x {h} is kept; loss"
            f" {first:.2f} -> {last:.4f}"
        )
        for old in existing:
            print(
                f"    the table of {old} meanwhile:"
                f" {'bit for bit as it was' if torch.equal(prompts.table(old), kept[old]) else 'changed'}"
            )
        kept |= tables(config, h, {name: p.detach() for name, p in prompts.named_parameters()})
    model.embedding.tokens = embedding
    same = all(torch.equal(x, model.get_parameter(name)) for name, x in before.items())
    print(
        f"the model's weights: {'bit for bit as they were' if same else 'changed'}; new words, with"
        " both tables:"
    )
    config = PromptConfig.of(
        templates | {"virtual_prompt_style": "inference", "new_tasks": list(answer)}
    )
    ids = apply_tables(model, config, kept)
    asked = [(task, w) for w in ("hgfe", "badc", "ccgh") for task in answer]
    prompts = [
        config.templates[task].fill({"word": w}, tokenizer, ids[task], 32, answer=False).ids
        for task, w in asked
    ]
    found = [
        tokenizer.decode(new)
        for new in generate.generate(model, prompts, 8, temperature=0, eot=256)
    ]
    print("    " + ", ".join(f"{task} of {w}: {text}" for (task, w), text in zip(asked, found)))
    wrong = [f"{what} has a loss of {loss:.2f}" for what, loss in final.items() if not loss < 0.05]
    wrong += [
        f"{task} of {w} is not {text!r}"
        for (task, w), text in zip(asked, found)
        if text != answer[task](w)
    ]
    if wrong:
        print(f"prompt_tuning.py: not learned: {'; '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(lesson())
    from prompts import commands

    sys.exit(commands.main(sys.argv[1:]))
