"""The command that trains an adapter of a frozen model on text (adapter_learning.py has its flags).

    python -m finetune.adapters --load CKPT --data FILE --peft lora --lora-rank 8 --out RUN

sft.py, preference.py and reinforcement.py learn adapters too, with the same flags.
"""

import train
from base import terminal
from finetune.adapter_learning import TextPeftConfig


def main(argv: list[str]) -> int:
    return train.main(argv, TextPeftConfig)


if __name__ == "__main__":
    terminal.command(main)
