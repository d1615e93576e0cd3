"""The demonstration of prompt_tuning.py: a frozen model learns two tasks, one after the other.

Read prompt_tuning.py first. A small model learns to give one letter of a word. A capital letter in
front says which one: F the first, L the last. Then the model is frozen, and for each task a prompt
learns to stand in the place of the capital letter:

    Fabcd=a    Labcd=d              what the model learns from
    P_0 P_1 abcd=a                  what a prompt [2, h] learns

    python prompt_tuning.py
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import generate
import gpt
import prompt_tuning
import sharding
from corpus.tokenizer import ByteTokenizer
from gradients import GradientAccumulator
from model_config import GPTConfig
from optimizer import AdamW
from prompts.prompt_data import PromptConfig, PromptData, Template

# the two tasks: name -> the right answer for a word
ANSWERS = {"first": lambda word: word[0], "last": lambda word: word[-1]}


def lesson(seed: int = 0, steps: tuple[int, int] = (220, 120)) -> int:
    """steps: (of the model, of each prompt). Returns the exit status: 1 where a loss stays above
    0.05 or an answer is wrong."""
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
    prompts = prompt_tuning.apply(model, config)
    for name, value in prompt_tuning.initial_values(config, h, seed, existing=tables).items():
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
    tables |= prompt_tuning.compute_tables(config, h, values)
    # apply() has replaced it
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
    """Train what is not frozen. batch_of(generator): the batch of a step. (There is one micro-batch
    and one rank, so there is nothing to reduce.)"""
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
    config = lesson_config(virtual_prompt_style="inference", new_tasks=list(ANSWERS))
    first_ids = prompt_tuning.apply_tables(model, config, tables)
    questions = [(task, word) for word in words for task in ANSWERS]
    prompts = []
    for task, word in questions:
        template = config.templates[task]
        filled = template.fill({"word": word}, tokenizer, first_ids[task], 32, answer=False)
        prompts.append(filled.ids)
    answers = generate.generate(model, prompts, 8, temperature=0, eot=tokenizer.eot)
    return {question: tokenizer.decode(ids) for question, ids in zip(questions, answers)}
