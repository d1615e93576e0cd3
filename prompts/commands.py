"""The commands of prompt_tuning.py: train, generate, evaluate.

    python prompt_tuning.py train --config prompts.json --out runs/prompts --lr 0.03
    python prompt_tuning.py generate --prompts runs/prompts/prompts.safetensors \\
        --checkpoint runs/default --data lines.jsonl
    python prompt_tuning.py evaluate ...        how many answers are right
"""

import argparse
import json
import sys

from torch import Tensor

import generate
import train
from inference import cli
from prompt_tuning import apply_tables
from prompts.prompt_data import PromptConfig, PromptError, read_examples
from prompts.prompt_file import fingerprint, load


def answers(
    world, model, config: PromptConfig, found: dict[str, Tensor], tokenizer, args, together
) -> list[tuple[dict, str | None, str]]:
    """(record, generated answer, why it ended) of each line of --data, in order, on rank 0; of what
    is too long, no answer. Raises PromptError."""

    chunks = generate.chunks_of(model)
    shape = chunks[0].config
    ids = (
        [apply_tables(chunk, config, found) for chunk in chunks][0]
        if found
        else dict.fromkeys(config.tasks, shape.vocab_size)
    )
    # so that the answer fits behind
    room = max(1, shape.seq_length + 1 - args.max_tokens)
    examples, records, told = world.on_rank_0(
        lambda: read_examples(args.data, config.templates, ids, tokenizer, room, answer=False),
        (PromptError,),
    )
    if args.command == "evaluate":
        check_answers(config, records)
    world.say_aside(f"{', '.join(args.data)}: {told}")
    collected = []

    def write(record: dict, text: str, tokens: int, finish: str) -> None:
        collected.append((record, text, finish))

    options = dict(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        eot=tokenizer.stop_ids,
    )
    requests = [(record, example.ids) for record, example in zip(records, examples) if example]
    told = cli.answer_file(
        world, model, tokenizer, requests, args.batch_size, args.stop, together, write, **options
    )
    world.say_aside(told)
    done = iter(collected)
    return (
        [
            next(done) if example else (record, None, "too long")
            for record, example in zip(records, examples)
        ]
        if world.rank == 0
        else []
    )


def infer(args, world) -> None:
    """`generate` and `evaluate`."""

    shape = cli.check_flags(args, world)
    model, tokenizer, together = cli.connect(args, world, args.batch_size)
    # a fine-tuned model has no prompts, only templates
    if args.prompts.endswith(".json"):
        config = PromptConfig.read(args.prompts)
        found = {}
        if config.virtual_prompt_style != "fine-tuning":
            raise PromptError(
                f"--prompts {args.prompts}: give prompts.safetensors, which train wrote; a"
                " configuration alone is enough for virtual_prompt_style fine-tuning"
            )
    else:
        config, found = load(args.prompts, fingerprint(args.checkpoint, shape))
    out = answers(world, model, config, found, tokenizer, args, together)
    if args.command == "generate":
        for record, text, finish in out:
            world.say(cli.as_json(record | {"prediction": text, "finish": finish}))
    elif world.rank == 0:
        print(json.dumps(accuracy(config, out), indent=1))


def check_answers(config: PromptConfig, records: list[dict]) -> None:
    """Raises PromptError where there is nothing to compare with."""
    for record in records:
        template = config.templates[record["taskname"]]
        if template.answer_field is None or template.answer_field not in record:
            raise PromptError(
                f"task {template.taskname!r}: to evaluate, it takes an answer_field, and lines that"
                " have it"
            )


def accuracy(config: PromptConfig, out: list[tuple[dict, str, str]]) -> dict:
    """Of each task, how many answers are the record's to the letter; what was too long has none."""
    results = {}
    for record, text, _ in out:
        template = config.templates[record["taskname"]]
        entry = results.setdefault(template.taskname, {"examples": 0, "correct": 0, "too_long": 0})
        entry["examples"] += 1
        entry["correct"] += text == str(record[template.answer_field])
        entry["too_long"] += text is None
    return {
        task: entry | {"accuracy": entry["correct"] / entry["examples"]}
        for task, entry in results.items()
    }


def main(argv: list[str]) -> int:
    if argv[0] == "train":
        argv = [
            x
            for word in argv[1:]
            for x in (word.split("=", 1) if word.startswith("--config=") else [word])
        ]
        if "--config" not in argv[:-1] and "--help" not in argv:
            print(
                "prompt_tuning.py: train needs --config FILE, a JSON file with NeMo's names",
                file=sys.stderr,
            )
            return 2
        # what the configuration says
        if "--config" in argv[:-1] and not any(word.split("=")[0] == "--load" for word in argv):
            try:
                base = PromptConfig.read(argv[argv.index("--config") + 1]).language_model_path
            # train.py will say it
            except PromptError:
                base = None
            argv += ["--load", base] if base else []
        return train.main(["--prompt-config" if word == "--config" else word for word in argv])
    parser = argparse.ArgumentParser(
        description="Prompt learning: train (train.py's flags), generate, evaluate."
    )
    parser.add_argument("command", choices=("train", "generate", "evaluate"))
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
        help=(
            "JSON lines with a taskname and the fields of its template; the answer may be missing"
            " to generate"
        ),
    )
    cli.add_flags(parser)
    parser.set_defaults(temperature=0.0, max_tokens=16)
    return cli.command("prompt_tuning.py", infer, argv, parser)
