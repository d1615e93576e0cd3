r"""Learned prompts in use: generate with them, count right answers.

    python -m inference.prompt_tuning generate --prompts runs/prompts/prompts.safetensors \
        --checkpoint runs/default --data lines.jsonl > answers.jsonl
    python -m inference.prompt_tuning evaluate --prompts runs/prompts/prompts.safetensors \
        --checkpoint runs/default --data test.jsonl

generate    each line of --data, with "prediction" and "finish" added
evaluate    of each task: examples, right answers, accuracy, exact match, F1 and ROUGE-L
            (finetune/scores.py), lines that are too long

Both run under torchrun too. A model that was fine-tuned with the same templates has no prompt file:
then --prompts names its configuration. finetune/prompt_tuning.py learns prompts.
"""

import argparse
import json
from collections import defaultdict
from functools import partial

from torch import Tensor

import generate
from base import terminal
from base.model_config import GPTConfig
from finetune.frozen_base import fingerprint
from finetune.nemo_config import PromptConfig
from finetune.prompt_data import read_examples
from finetune.prompt_file import load
from finetune.prompt_template import Example
from finetune.scores import mean, of_answer
from inference import cli
from inference.loading import read_base
from pipeline_parallel import stages_of
from prompt_tuning import PromptError, apply_tables

# --- generate and evaluate ------------------------------------------------------------------------


def infer(args: argparse.Namespace, world) -> None:
    """`generate` and `evaluate`. Raises the errors of inference.cli, and PromptError."""
    model_config = cli.check_flags(args, world)
    model, tokenizer, lockstep = cli.connect(args, world, args.batch_size)
    config, tables = read_prompts(args, model_config)
    if tables:
        for stage in stages_of(model):
            apply_tables(stage, tables)
    first_ids = config.prompt_tasks.first_ids(model_config.vocab_size)
    # Leaves room for the answer in the model's context.
    limit = max(1, model_config.seq_length + 1 - args.max_tokens)
    examples, records, summary = world.on_rank_0(
        lambda: read_examples(
            args.data, config.templates, first_ids, tokenizer, limit, answer=False
        )
    )
    if args.command == "evaluate":
        check_answers(config, records)
    world.say_aside(f"{', '.join(args.data)}: {summary}")
    answers = answer_all(args, world, model, tokenizer, lockstep, records, examples)
    if world.rank:
        return
    if args.command == "evaluate":
        print(json.dumps(accuracy(config, answers), indent=1))
        return
    for answer in answers:
        world.say(cli.as_json(answer))


def read_prompts(
    args: argparse.Namespace, model_config: GPTConfig
) -> tuple[PromptConfig, dict[str, Tensor]]:
    """(configuration, tables by task) of --prompts. A fine-tuned model has no tables, only
    templates. A collective. Raises PromptError."""
    if not args.prompts.endswith((".json", ".yaml", ".yml")):
        read = partial(read_base, shape_class=type(model_config))
        return load(args.prompts, fingerprint(args.checkpoint, model_config, read))
    config = PromptConfig.read(args.prompts)
    if config.virtual_prompt_style != "fine-tuning":
        raise PromptError(
            f"--prompts {args.prompts}: give prompts.safetensors, which train wrote; a"
            " configuration alone is enough for virtual_prompt_style fine-tuning"
        )
    return config, {}


def answer_all(
    args: argparse.Namespace,
    world,
    model,
    tokenizer,
    lockstep,
    records: list[dict],
    examples: list[Example | None],
) -> list[dict]:
    """The records in their order with "prediction" and "finish", on rank 0. A collective.

    examples: of each record its prompt, None where it is too long. lockstep: as of cli.connect.
    """
    answers = [record | {"prediction": None, "finish": "too long"} for record in records]

    def write(answer: dict, text: str, tokens: int, finish: str) -> None:
        answer.update(prediction=text, finish=finish)

    summary = cli.answer_file(
        world,
        generate.stream_of(model),
        tokenizer,
        [(answer, example.ids) for answer, example in zip(answers, examples) if example],
        args.batch_size,
        args.stop,
        lockstep,
        write,
        **cli.sampling_options(args, world, tokenizer),
    )
    world.say_aside(summary)
    return answers


def check_answers(config: PromptConfig, records: list[dict]) -> None:
    """Raises PromptError where there is no right answer to compare with."""
    for record in records:
        template = config.templates[record["taskname"]]
        if template.answer_field is None or template.answer_field not in record:
            raise PromptError(
                f"task {template.taskname!r}: to evaluate, it takes an answer_field, and lines that"
                " have it"
            )


def accuracy(config: PromptConfig, answers: list[dict]) -> dict[str, dict]:
    """{task: counts, the share of answers that equal the record's, their scores}. A line that is
    too long counts as wrong."""
    results, scores = {}, defaultdict(list)
    for answer in answers:
        template = config.templates[answer["taskname"]]
        text = answer["prediction"]
        entry = results.setdefault(template.taskname, {"examples": 0, "correct": 0, "too_long": 0})
        entry["examples"] += 1
        right = str(answer[template.answer_field])
        entry["correct"] += text == right
        entry["too_long"] += text is None
        scores[template.taskname].append(of_answer(text, right))
    for name, entry in results.items():
        entry["accuracy"] = entry["correct"] / entry["examples"]
        entry |= mean(scores[name])
    return results


# --- the command line -----------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    about = "Learned prompts in use: generate with them, or count right answers."
    parser = argparse.ArgumentParser(prog="python -m inference.prompt_tuning", description=about)
    parser.add_argument("command", choices=("generate", "evaluate"))
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help="prompts.safetensors, which train wrote; for a fine-tuned model its configuration",
    )
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="FILE",
        help="JSON lines with a taskname and the fields of its template; generate needs no answers",
    )
    cli.add_flags(parser)
    parser.set_defaults(temperature=0.0, top_k=0, top_p=1.0, max_tokens=16)
    return parser


def main(argv: list[str]) -> int:
    """Returns the exit status, as of train.py and generate.py."""
    return cli.command("prompt_tuning.py", infer, argv, make_parser())


if __name__ == "__main__":
    terminal.command(main)
