r"""Questions about a picture, and what a trained models/multimodal.py answers.

    python -m models.ask_picture --checkpoint runs/multimodal --picture FILE.png \
        --prompt "what colour is it?"

Without --prompt each line of input is a question; none knows of those before it. The tower reads
the picture once. Its features become a table of virtual tokens (prompt_tuning.py), and the model is
a decoder like any other: generate.py writes the answer, with its cache, under any layout.
"""

import argparse
import sys

import torch
from torch import Tensor

import generate
from base import terminal
from inference import cli
from inference.answers import encode, stream_text
from models.multimodal import MultimodalConfig
from models.multimodal_runs import prompt_of
from models.pictures import read_picture, to_tensor
from pipeline_parallel import stages_of
from prompt_tuning import apply_tables


@torch.inference_mode()
def show(model, picture: Tensor) -> None:
    """Make a picture's features the virtual tokens of a model. picture: [1, c, H, W]. A
    collective."""
    for stage in stages_of(model):
        # Other stages need to know no more than how many there are.
        table = torch.empty(stage.config.num_patches, stage.config.hidden_size)
        if stage.embedding is not None:
            like = stage.embedding.pictures.projection.first.weight
            table = stage.embedding.pictures(picture.to(like.device, like.dtype))[0]
        apply_tables(stage, {"picture": table})


def run(args: argparse.Namespace, world) -> None:
    config = cli.check_flags(args, world)
    picture = to_tensor([read_picture(args.picture, config.picture_size)])
    # A person may think for long.
    timeout = cli.MONTH if args.prompt is None else cli.HALF_AN_HOUR
    model, tokenizer, _ = cli.connect(args, world, 1, timeout)
    show(model, picture)
    decode, options = generate.stream_of(model), cli.sampling_options(args, world, tokenizer)
    s, used = config.seq_length, len(prompt_of(tokenizer, [], config))
    world.say_aside(
        f"the context holds {s} tokens: {used} of the picture, {s - used} of question and answer"
    )

    def stream(questions: list[list[int]], max_tokens: int, **options):
        prompts = [prompt_of(tokenizer, ids, config) for ids in questions]
        # With more tokens the picture would leave the context.
        room = s + 1 - max(map(len, prompts))
        return decode(prompts, min(max_tokens, room), **options)

    if args.prompt is None:
        return cli.converse(world, stream, tokenizer, s - used, args.stop, **options)
    ids, out = encode(args.prompt, tokenizer, s - used), sys.stdout if world.rank == 0 else None
    summary = stream_text(stream, tokenizer, ids, args.stop, out, **options)
    world.say("")
    world.say_aside(summary)


def main(argv: list[str]) -> int:
    """Returns the exit status, as of generate.py."""
    about = "Answer questions about a picture."
    parser = argparse.ArgumentParser(
        prog="python -m models.ask_picture", description=about, conflict_handler="resolve"
    )
    flag = parser.add_argument
    flag("--picture", metavar="FILE", required=True)
    flag("--prompt", metavar="QUESTION", help="without it, each line of input is a question")
    cli.add_flags(parser, MultimodalConfig)
    likeliest = "0: the likeliest token (default: 0; --top-k and --top-p need more)"
    flag("--temperature", type=float, default=0.0, help=likeliest)
    flag("--batch-size", type=int, choices=(1,), default=1, help=argparse.SUPPRESS)
    parser.set_defaults(top_k=0, top_p=1.0)
    return cli.command("ask_picture.py", run, argv, parser)


if __name__ == "__main__":
    terminal.command(main)
