r"""Learned prompts for T5: virtual tokens before the source of a frozen model (prompt_tuning.py).

    template    "<|VIRTUAL_PROMPT_0|>{sentence} sentiment:{label}"

    source      V V V g o o d _ f u n _ s e n t i m e n t : </s>      the encoder
    target      p o s i t i v e </s>                                  all the decoder's: the answer

The configuration has NeMo's names, and its templates are those of decoders, with answer_only_loss;
what a decoder learns to go on with is here the target.

    python -m models.prompt_t5 --config prompts.json --load runs/t5 --out runs/prompts
    python -m models.generate_t5 --checkpoint runs/t5 --prompts runs/prompts/prompts.safetensors \
        --data lines.jsonl > answers.jsonl
"""

from dataclasses import dataclass
from typing import ClassVar

import train
from base import terminal
from finetune.packing import Example
from finetune.prompt_tuning import PromptLearningConfig, PromptParameters, PromptTask
from models.seq2seq import PaddedPairs, Pair, T5ExampleRun, WritePairs
from models.t5 import T5Config
from run.config import ConfigError


class PromptedPairs(PromptTask, WritePairs):
    """The task of learning prompts from pairs."""

    def open_data(self, config, world, tokenizer) -> tuple:
        sets = super().open_data(config, world, tokenizer)
        self.lengths = dict(seq_length=sets[0].n, target_length=sets[0].m)
        return sets

    def padded(self, examples: list[Example], seed, multiple_of: int, tokenizer) -> PaddedPairs:
        """An example's answer is the target, and all before it the source."""
        tokens, pairs = self.tokens_of(tokenizer), []
        for example in examples:
            first = example.counted.index(True)
            source, answer = example.ids[:first], example.ids[first:-1]
            pairs.append(Pair([*source, tokens.eos], [*answer, tokens.eos]))
        return PaddedPairs(pairs, seed, tokens.pad, multiple_of)


@dataclass
class PromptedRun(PromptLearningConfig, T5ExampleRun):
    """Every flag of models/prompt_t5.py."""

    command: ClassVar[str] = "-m models.prompt_t5"
    purpose: ClassVar[str] = "Learn prompts for a frozen T5."

    # Prompts are all that learns.
    peft: ClassVar[None] = None
    lora_rank: ClassVar[int] = 8
    lora_alpha: ClassVar[float] = 16.0
    lora_dropout: ClassVar[float] = 0.0
    adapter_size: ClassVar[int] = 32
    peft_targets: ClassVar[list[str]] = []

    def task(self) -> PromptedPairs:
        return PromptedPairs(PromptParameters(self.prompts()))

    def check(self, model: T5Config, world: int, base_needed: bool) -> None:
        super().check(model, world, base_needed)
        prompts = self.prompts()
        if not prompts.learned:
            rule = "prompt-tuning and p-tuning learn prompts; python -m models.seq2seq all of a T5"
            style = f"virtual_prompt_style {prompts.virtual_prompt_style}"
            raise ConfigError(f"--config {self.prompt_config}: {style}: {rule}")
        for task in prompts.new_tasks:
            if not prompts.templates[task].answer_only_loss:
                rule = "must be true, for the answer is all that a T5 writes"
                raise ConfigError(f"--config {self.prompt_config}: {task}: answer_only_loss {rule}")


def main(argv: list[str]) -> int:
    return train.main(argv, PromptedRun)


if __name__ == "__main__":
    terminal.command(main)
