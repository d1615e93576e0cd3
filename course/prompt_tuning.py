"""The lesson of prompt_tuning.py: a frozen model learns two tasks, one after the other.

A small model learns to give one letter of a word. A capital letter in front says which one: F the
first, L the last. Then the model is frozen, and for each task a prompt learns to stand in the place
of the capital letter:

    Fabcd=a    Labcd=d              what the model learns from
    P_0 P_1 abcd=a                  what a prompt [2, h] learns
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import generate
import gpt
import prompt_tuning
from course import demo, form
from finetune.nemo_config import PromptConfig
from finetune.packing import Padded
from finetune.prompt_template import Template
from run.data import Batch
from run.tokenizer import ByteTokenizer

# The two tasks: name -> the right answer for a word.
ANSWERS = {"first": lambda word: word[0], "last": lambda word: word[-1]}
NEW_WORDS = ("hgfe", "badc", "ccgh")

H = 64
# The encoder's inner size.
INNER = 16
# Virtual tokens of a task.
T = 2
BATCH = 32
# Training ends when the mean loss of 10 steps is below this.
LEARNED = 0.02


@dataclass(frozen=True)
class Settings:
    frozen: bool = True
    # The most steps for a prompt.
    steps: int = 300


WITHOUT = form.Removals()
WITHOUT["frozen"] = form.Removal(
    Settings(frozen=False),
    "Both tasks are learned. Why does the first one fail afterwards?",
    "The second task changed the layers that the first table was learned for. The table is the"
    " same, the model is not: it gives the last letter with both tables.",
)
WITHOUT["training"] = form.Removal(
    Settings(steps=1),
    "The tables stay as they began. Which checks see it?",
    "The two losses and the answers. Counts of numbers, and that the model and the first table"
    " stay as they are, hold also where nothing is learned.",
)


# --- words, and examples of them ------------------------------------------------------------------


def examples_of(template: Template, records: list[dict], first_id: int) -> Batch:
    """All records as one batch."""
    tokenizer = ByteTokenizer()
    examples = [template.fill(record, tokenizer, first_id, 32) for record in records]
    return Padded(examples, seed=None).batch(range(len(records)))


def with_capitals() -> Batch:
    """Lines like Fabcd=a and Labcd=d."""
    template = Template(
        "read", "{which}{word}={answer}", 0, [], answer_only_loss=True, answer_field="answer"
    )
    records = []
    for word in demo.random_words(400, NEW_WORDS):
        for task, answer in ANSWERS.items():
            which = task[0].upper()
            records.append({"which": which, "word": word, "answer": answer(word)})
    return examples_of(template, records, ByteTokenizer().vocab_size)


def prompt_config(**fields) -> PromptConfig:
    template = {
        "prompt_template": "<|VIRTUAL_PROMPT_0|>{word}={answer}",
        "total_virtual_tokens": T,
        "virtual_token_splits": [T],
        "answer_only_loss": True,
        "answer_field": "answer",
    }
    templates = [template | {"taskname": task} for task in ANSWERS]
    return PromptConfig.of({"task_templates": templates} | fields)


# --- learning -------------------------------------------------------------------------------------


def learn(model: gpt.GPT, examples: Batch, seed: int, most_steps: int) -> demo.Learned:
    """Train what is not frozen, until the examples are learned or `most_steps` are over."""
    generator = torch.Generator().manual_seed(seed)

    def loss_of(step: int) -> Tensor:
        rows = torch.randint(len(examples.tokens), (BATCH,), generator=generator)
        mask = examples.loss_mask[rows]
        losses = model(examples.tokens[rows], examples.targets[rows])  # [b, s]
        return (losses * mask).sum() / mask.sum()

    return demo.learn(model, loss_of, most_steps, LEARNED)


def learn_to_read(seed: int) -> tuple[gpt.GPT, demo.Learned]:
    """A small Llama, trained whole."""
    config = demo.tiny_config(hidden_size=H, ffn_hidden_size=172, llama=True)
    model = demo.make_model(config, dtype=torch.float32, seed=seed)
    return model, learn(model, with_capitals(), seed, most_steps=800)


def learn_task(
    model: gpt.GPT, task: str, tables: dict[str, Tensor], settings: Settings, seed: int
) -> demo.Learned:
    """Learn a task beside the existing tasks in `tables`, and add its table there."""
    config = prompt_config(
        new_tasks=[task],
        existing_tasks=list(tables),
        # The existing tables are at hand, so no file is read.
        restore_path="-",
        p_tuning={"encoder_hidden": INNER},
    )
    tasks = config.prompt_tasks
    embedding = model.embedding.tokens
    prompts = prompt_tuning.apply(model, tasks)
    for name, value in prompt_tuning.initial_values(tasks, H, seed, existing=tables).items():
        prompts.get_parameter(name).data.copy_(value)
    records = [
        {"word": word, "answer": ANSWERS[task](word)} for word in demo.random_words(400, NEW_WORDS)
    ]
    first_id = tasks.first_ids(model.config.vocab_size)[task]
    examples = examples_of(config.templates[task], records, first_id)
    if not settings.frozen:
        for p in model.blocks.parameters():
            p.requires_grad = True
    learned = learn(model, examples, seed, settings.steps)
    for existing in list(tables):
        tables[existing] = prompts.table(existing).detach().clone()
    values = {name: p.detach() for name, p in prompts.named_parameters()}
    tables |= prompt_tuning.compute_tables(tasks, H, values)
    # apply() has replaced it.
    model.embedding.tokens = embedding
    return learned


def ask(model: gpt.GPT, tables: dict[str, Tensor]) -> dict[tuple[str, str], str]:
    """(task, new word) -> the answer that the model generates with the task's prompt."""
    tokenizer = ByteTokenizer()
    config = prompt_config(virtual_prompt_style="inference", new_tasks=list(ANSWERS))
    first_ids = prompt_tuning.apply_tables(model, tables)
    questions = [(task, word) for word in NEW_WORDS for task in ANSWERS]
    prompts = []
    for task, word in questions:
        template = config.templates[task]
        filled = template.fill({"word": word}, tokenizer, first_ids[task], 32, answer=False)
        prompts.append(filled.ids)
    answers = generate.generate(model, prompts, 8, temperature=0, eot=tokenizer.eot)
    return {question: tokenizer.decode(ids) for question, ids in zip(questions, answers)}


# --- the lesson -----------------------------------------------------------------------------------


def check_answers(lesson: form.Lesson, answers: dict[tuple[str, str], str]) -> None:
    """answers: (task, word) -> what the model says."""
    words = [f"{task} of {word}: {answer!r}" for (task, word), answer in answers.items()]
    right = [answer == ANSWERS[task](word) for (task, word), answer in answers.items()]
    lesson.check(", ".join(words), all(right))


def teach(lesson: form.Lesson, seed: int = 0) -> None:
    settings = lesson.mutate or Settings()
    model, read = learn_to_read(seed)
    lesson.say(f"A Llama (h {H}, L 2) learns from lines like Fabcd=a and Labcd=d:")
    lesson.check(f"{read.steps} steps, loss {read.loss:.4f}. Now it is frozen", read.loss < LEARNED)
    lesson.say()
    model.requires_grad_(False).eval()
    before = {name: p.clone() for name, p in model.named_parameters()}

    lesson.predict(
        f"P-tuning learns inputs [{T}, {H}] and an encoder: Linear({H}, {INNER}), ReLU,"
        f" Linear({INNER}, {H}), with biases. How many numbers? How many are kept for a task?",
        "numbers that learn; numbers kept",
    )
    tables = {}
    first = learn_task(model, "first", tables, settings, seed)
    encoder = (H * INNER + INNER) + (INNER * H + H)
    lesson.check(
        f"{first.parameters:,} = T h + {encoder:,} learn; a table of T h ="
        f" {tables['first'].numel()} is kept",
        first.parameters == T * H + encoder and tables["first"].numel() == T * H,
        [first.parameters, tables["first"].numel()],
    )

    lesson.predict(
        f"A second task is learned. How many of the model's {len(before)} tensors change? Of the"
        f" {tables['first'].numel()} numbers in the first task's table?",
        "tensors of the model; numbers of the table",
    )
    table = tables["first"].clone()
    last = learn_task(model, "last", tables, settings, seed)
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    lesson.check(
        f"{len(changed)} of {len(before)} tensors of the model", not changed, [len(changed)]
    )
    lesson.check(
        f"{(tables['first'] != table).sum()} of {table.numel()} numbers of the table",
        torch.equal(tables["first"], table),
        [(tables["first"] != table).sum().item()],
    )

    lesson.predict(
        f"New words: {', '.join(NEW_WORDS)}. What does the model answer with each table?"
    )
    for task, learned in (("first", first), ("last", last)):
        lesson.check(
            f"task {task}: {learned.steps} steps, loss {learned.loss:.4f}", learned.loss < LEARNED
        )
    check_answers(lesson, ask(model, tables))


if __name__ == "__main__":
    form.run("prompt_tuning")
