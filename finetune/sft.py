r"""Supervised fine-tuning (SFT): a model learns to answer, from conversations (arXiv 2203.02155).

A pretrained model continues any text. SFT trains it further, on conversations between a user and
an assistant. The training loop is train.py's own; the data differ in two ways:

- A chat template turns the list of messages into one text. It puts special tokens around each
  message. They tell the model who speaks, and where a turn (one message) ends.
- A loss mask selects the targets: the loss is taken on the assistant's tokens only. The model
  reads the questions, and learns to write the answers.

    <|im_start|> user \n 2 + 3 ? <|im_end|> \n <|im_start|> assistant \n 5 <|im_end|> \n
         .        .   . . . . .      .      .       .           .     .  ^     ^      .

^ is in the loss. The token that ends the turn (<|im_end|>, </s>, <|eot_id|>) is a target too:
without it the model learns what to say, but not when to stop. Generation ends at this token.

    python -m course.sft                                       a lesson: answers, and where they end
    python -m finetune.sft --load CKPT --data chats.jsonl --lr 2e-5 --out runs/chat
    python generate.py --checkpoint runs/chat --chat "2 + 3?"

The loss of a batch is the sum over its targets, divided by their number, as in all of this project.
A mean for each conversation, and then a mean of these, would give the tokens of short answers more
weight than those of long ones.

Without --pack each conversation is padded to the longest one. With --pack several share a row, and
none attends to another (finetune/packing.py).

Not covered: weights of messages other than 0 and 1; tools and images.
"""

import datetime
from dataclasses import dataclass
from typing import ClassVar

import train
from base import terminal
from base.model_config import MoEConfig
from finetune.adapter_learning import PeftConfig
from finetune.sft_data import ConversationTask
from run.config import ConfigError, flag
from run.task import Task


@dataclass
class ChatConfig(PeftConfig):
    """The flags of data that a chat template makes text of."""

    # the sample at the end answers a question that was held out
    sample_prompt: ClassVar[str | None] = None
    # flags without which a run cannot begin -> what they name
    needed: ClassVar[dict[str, str]] = {"data": "FILE, JSON lines of what is learned"}

    # data
    data: list[str] = flag(
        [],
        "JSON lines with a prompt, or messages, and an answer; a twentieth is held out",
        metavar="FILE",
    )
    chat_template: str = flag(
        "auto",
        "a jinja file; auto: the tokenizer's, or plain, a simple one, where it has none",
        metavar="{auto,plain,FILE}",
    )
    skip_bad_examples: bool = flag(False, "leave out, and count, examples that cannot be used")
    date: str | None = flag(
        None,
        "of the chat template, as 2026-11-26T09:30:00; the default is when the run began",
        metavar="DATE",
    )

    def check(self, model: MoEConfig, world: int, base_needed: bool) -> None:
        try:
            datetime.datetime.fromisoformat(self.date or "2026-11-26")
        except ValueError:
            self.refuse("date", "is no date; 2026-11-26 or 2026-11-26T09:30:00 would fit")
        for name, what in self.needed.items():
            if base_needed and not getattr(self, name):
                raise ConfigError(f"--{name}: {self.name_in_messages()} needs --{name} {what}")
        super().check(model, world, base_needed)


def check_answers(config: ChatConfig, no_dropout: bool = True) -> None:
    """What a loss of whole answers, which are compared with those of other forwards, does not go
    with. Raises ConfigError."""
    if config.cp > 1:
        config.refuse("cp", "a loss sums over an answer, of which each rank would have a part")
    if config.fp8 != "off":
        rule = "scales depend on what is computed together; --fp8 off would fit"
        config.refuse("fp8", rule)
    for name in ("dropout", "lora_dropout"):
        if no_dropout and getattr(config, name):
            rule = "must be 0: answers are compared with what a model without dropout says of them"
            config.refuse(name, rule)


@dataclass
class SFTConfig(ChatConfig):
    """Every flag of finetune/sft.py."""

    command: ClassVar[str] = "-m finetune.sft"
    purpose: ClassVar[str] = "Fine-tune a model on conversations."

    data: list[str] = flag(
        [],
        "JSON lines of conversations (messages, or prompt and completion); a twentieth is held out",
        metavar="FILE",
    )
    val_data: list[str] = flag(
        [], "conversations to evaluate on; all of --data is then trained on", metavar="FILE"
    )
    loss_on: str = flag(
        "answers",
        "the targets: the assistant's messages, each with the token that ends it; or all tokens",
        ("answers", "all"),
    )
    pack: bool = flag(False, "several conversations share a sequence, and none attends to another")
    sample_prompt: str | None = flag(
        None,
        "a message that the sample at the end answers; the default is a held-out question",
        metavar="TEXT",
    )

    def task(self) -> Task:
        return ConversationTask(self.learned())


def main(argv: list[str]) -> int:
    return train.main(argv, SFTConfig)


if __name__ == "__main__":
    terminal.command(main)
