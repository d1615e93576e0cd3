"""The command of sft.py: supervised fine-tuning on conversations.

python sft.py --load CKPT --data chats.jsonl --out runs/chat
torchrun --nproc-per-node 2 sft.py --load CKPT --data chats.jsonl --pack --tp 2
"""

from dataclasses import dataclass
from typing import ClassVar

import train
from run.config import ConfigError, flag
from run.task import Task
from tuning.adapter_training import PeftConfig
from tuning.sft_data import ConversationTask


@dataclass
class ChatConfig(PeftConfig):
    """The flags of data that a chat template makes text of."""

    # the sample at the end answers a question that was held out
    sample_prompt: ClassVar[str | None] = None

    # data
    data: list[str] = flag(
        [],
        "JSON lines with a prompt, or messages, and what is learned from them; a twentieth is held"
        " out",
        metavar="FILE",
    )
    chat_template: str = flag(
        "auto",
        "a jinja file that makes one text of a conversation; auto: the tokenizer's, or plain, a"
        " simple one, where it has none",
        metavar="{auto,plain,FILE}",
    )
    skip_bad_examples: bool = flag(
        False,
        "leave out, and count, examples that are too long, have no answer, or that the template"
        " refuses",
    )


@dataclass
class SFTConfig(ChatConfig):
    """Every flag of sft.py."""

    command: ClassVar[str] = "sft.py"
    purpose: ClassVar[str] = "Fine-tune a model on conversations. Without arguments: a lesson."

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
        "the targets in a conversation: the assistant's messages, each with the token that ends it;"
        " or all tokens",
        ("answers", "all"),
    )
    pack: bool = flag(False, "several conversations share a sequence, and none attends to another")
    sample_prompt: str | None = flag(
        None,
        "a user's message that the sample at the end of training answers; the default is a"
        " question that was held out",
        metavar="TEXT",
    )

    def task(self) -> Task:
        return ConversationTask(self.learned())

    def check(self, model, world: int, base_needed: bool) -> None:
        if not self.data:
            raise ConfigError("--data: learns from what? --data FILE names conversations")
        super().check(model, world, base_needed)


def main(argv: list[str]) -> int:
    return train.main(argv, SFTConfig)
