"""From the launcher to the exit status, for every command that generates or evaluates.

Bad input ends with status 2 and one message from rank 0; a model whose logits are not finite, or an
output that cannot be written, with 1; Ctrl-C with 130.

    python generate.py --checkpoint nowhere         one line, status 2
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from base import terminal
from finetune.chat_template import ChatError
from finetune.prompt_data import PromptError
from inference.huggingface import HuggingFaceError
from run.checkpoint import CheckpointError
from run.config import ConfigError
from run.tokenizer import TokenizerError
from run.world import World, WorldError

# bad input
REFUSED = (
    ConfigError,
    WorldError,
    PromptError,
    ChatError,
    TokenizerError,
    CheckpointError,
    HuggingFaceError,
)


class Outcome(NamedTuple):
    """How a command ended on this rank."""

    status: int = 0
    message: str | None = None
    # other ranks do not have the message; otherwise rank 0 alone prints it
    this_rank_only: bool = False


def command(
    name: str,
    work: Callable[[argparse.Namespace, World], None],
    argv: list[str],
    parser: argparse.ArgumentParser,
) -> int:
    """Run work(args, world), under a launcher or without one. name: of the file, for messages.
    Returns the exit status."""
    terminal.prepare()
    try:
        world = World.from_launcher()
    except WorldError as e:
        terminal.say(f"{name}: {e}", error=True)
        return 2
    if world.rank:
        parser.error = lambda message: leave_to_rank_0(world)
    args = parser.parse_args(argv)
    status, message, this_rank_only = attempt(work, args, world)
    if status == 2 and not this_rank_only:
        world.share_refusal(message, name)
    elif message and (world.rank == 0 or this_rank_only):
        terminal.say(terminal.one_line(f"{name}: {message}"), error=True)
    if status == 1 and world.size > 1 and (this_rank_only or not message):
        # the other ranks wait in a collective, so the groups cannot be taken down
        os._exit(1)
    world.disconnect()
    return status


def leave_to_rank_0(world: World) -> None:
    """Every rank finds the same fault in the arguments: rank 0 prints it."""
    terminal.let_rank_0_speak(world.rank)
    sys.exit(2)


def attempt(work, args: argparse.Namespace, world: World) -> Outcome:
    """Run work(args, world), with errors that a user can understand as an Outcome."""
    try:
        work(args, world)
    except REFUSED as e:
        return Outcome(2, str(e), isinstance(e, WorldError))
    except FloatingPointError as e:
        return Outcome(1, f"{e}: this model has diverged")
    except RuntimeError:
        # another rank may have left this one in a collective
        world.follow_refusal()
        raise
    except KeyboardInterrupt:
        return Outcome(130)
    except BrokenPipeError:
        # the reader of the output has seen enough (| head)
        terminal.mute(sys.stdout)
        return Outcome(1)
    except OSError as e:
        terminal.mute(sys.stdout)
        where = e.filename or "standard output"
        reason = e.strerror or e
        return Outcome(1, f"{where}: {reason}; the rest of the answers is lost", True)
    return Outcome()
