"""Prompt learning, as `python -m finetune.prompt_tuning` runs it: its flags, and its tasks.

    python -m finetune.prompt_tuning --config prompts.json --load CKPT --out runs/prompts

The tasks change these functions of run/task.py:

    PromptTask          open_data               JSON lines become examples with virtual tokens
                        finish                  prompts.safetensors: the tables of all tasks
    PromptParameters    after_model_parallel    prompt_tuning.apply
                        load_base               prompts get their initial values

The model is frozen (finetune/frozen_base.py). Fine-tuning with the same templates changes
`open_data` alone (TemplateTask).
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

import prompt_tuning
import sharding
import train
from base import terminal
from base.model_config import GPTConfig
from finetune import prompt_file
from finetune.adapter_learning import PeftConfig
from finetune.frozen_base import FrozenBase, read_base
from finetune.nemo_config import PromptConfig
from finetune.packing import Padded
from finetune.prompt_data import read_examples
from prompt_tuning import PARAMETER_PREFIX, PromptError, PromptTasks
from run import checkpoint
from run.config import ConfigError, flag
from run.finish import draw_loss
from run.task import Task
from sharding import shard_of, sharding_of

# The default of --lr where prompts learn.
LEARNING_RATE = 0.03


@dataclass
class PromptLearningConfig(PeftConfig):
    """Every flag of finetune/prompt_tuning.py."""

    command: ClassVar[str] = "-m finetune.prompt_tuning"
    purpose: ClassVar[str] = "Learn prompts for a frozen model."
    keeps_dropout: ClassVar[bool] = False

    prompt_config: str | None = flag(
        None,
        "JSON or YAML with NeMo's names: which prompts, for which data, and perhaps which --load",
        metavar="FILE",
        names=("--config", "--prompt-config"),
    )

    def __post_init__(self):
        if self.prompt_config and not self.load:
            # the file is read again, and refused
            with contextlib.suppress(PromptError):
                self.load = self.prompts().language_model_path or None

    @property
    def frozen(self) -> bool:
        return True

    @property
    def unpredicted(self) -> str:
        return "trains prompts, and not the whole model"

    def prompts(self) -> PromptConfig:
        """Raises PromptError."""
        return PromptConfig.read(self.prompt_config)

    def task(self) -> Task:
        prompts = self.prompts()
        if prompts.learned:
            return PromptTask(PromptParameters(prompts))
        # the whole model learns from the same data: virtual_prompt_style fine-tuning
        return TemplateTask(self.learned())

    def default_lr(self) -> tuple[float, str]:
        return (LEARNING_RATE, "prompts") if self.prompts().learned else super().default_lr()

    def check(self, model: GPTConfig, world: int, base_needed: bool) -> None:
        if not self.prompt_config:
            raise ConfigError("--config: prompts for what? --config FILE, with NeMo's names, says")
        prompts = self.prompts()
        if prompts.virtual_prompt_style == "inference":
            rule = "virtual_prompt_style inference learns nothing; the other styles do"
            raise ConfigError(f"--config {self.prompt_config}: {rule}")
        if not self.load:
            rule = "for which model? --load CKPT names it"
            raise ConfigError(f"--config {self.prompt_config}: {rule}")
        if self.peft and prompts.learned:
            rule = "--config learns prompts, unless its virtual_prompt_style is fine-tuning"
            self.refuse("peft", rule)
        super().check(model, world, base_needed)


# --- what a run begins with -----------------------------------------------------------------------


def check_room(tasks: PromptTasks, h: int) -> None:
    """Whether the encoder fits in memory, for a model of hidden size h. Raises CheckpointError."""
    if tasks.encoder:
        with torch.device("meta"):
            numbers = sharding.num_parameters(prompt_tuning.make_encoder(tasks.encoder, h))
        # weights, gradients and Adam's two moments, each float32
        what = f"p_tuning.encoder_hidden {tasks.encoder.encoder_hidden}"
        checkpoint.check_room(what, 16 * numbers, "cpu")


def existing_tables(config: PromptConfig, identity: str) -> dict[str, Tensor]:
    """The tables in `restore_path`, if there are existing tasks. identity: the fingerprint of the
    model. Raises PromptError where the file lacks a task, or has it with another template."""
    if not config.existing_tasks:
        return {}
    saved, tables = prompt_file.load(config.restore_path, identity)
    for task in config.existing_tasks:
        if task not in tables:
            rule = f"{task!r} is not in {config.restore_path}, which has {saved.tasks}"
            raise PromptError(f"existing_tasks: {rule}")
        if saved.templates[task] != config.templates[task]:
            rule = f"{task!r} was learned with another template: {saved.templates[task]}"
            raise PromptError(f"existing_tasks: {rule}")
    return tables


# --- the tasks ------------------------------------------------------------------------------------


class PromptParameters(FrozenBase):
    """Prompts learn, and nothing of the model."""

    learned_things = "prompt"

    def __init__(self, prompts: PromptConfig):
        self.prompts = prompts

    def after_model_parallel(self, stage) -> None:
        tasks, h = self.prompts.prompt_tasks, self.model_config.hidden_size
        check_room(tasks, h)
        prompt_tuning.apply(stage, tasks, self.groups.tp)

    def is_of_base(self, name: str) -> bool:
        return not name.startswith(PARAMETER_PREFIX)

    def load_base(self, tokenizer) -> None:
        """Also give the prompts their initial values. A collective. Raises CheckpointError or
        PromptError."""
        super().load_base(tokenizer)
        embedding = None
        if self.prompts.init_texts:
            name = "embedding.tokens.weight"
            embedding = read_base(checkpoint.find(self.config.load), [name])[name]
        values = prompt_tuning.initial_values(
            self.prompts.prompt_tasks,
            self.model_config.hidden_size,
            self.config.seed,
            self.prompts.init_texts,
            tokenizer,
            embedding,
            existing_tables(self.prompts, self.identity),
        )
        tensors = self.trainer.optimizer.tensors()
        with torch.no_grad():
            for name, p in sharding.named_parameters(*self.trainer.stages):
                if not self.is_of_base(name):
                    # the optimizer's float32 copy; an existing table has none
                    target = tensors.get(f"model.{name}", p)
                    whole = values[name.removeprefix(PARAMETER_PREFIX)]
                    target.copy_(shard_of(whole, sharding_of(p)))
        self.trainer.checkpoints.use_loaded()

    def save_prompts(self, path: Path) -> None:
        """Write the prompt file: the new tables, and the existing ones as they were. A collective
        of the ranks that hold the embedding; rank 0 is one of them."""
        prefix = f"model.{PARAMETER_PREFIX}"
        values = {}
        for name, tensor in self.trainer.optimizer.tensors().items():
            if name.startswith("model."):
                master = tensor if isinstance(tensor, Tensor) else tensor.join()
                values[name.removeprefix(prefix)] = sharding.gather(master, sharding_of(tensor))
        if values and (not dist.is_initialized() or dist.get_rank() == 0):
            h = self.model_config.hidden_size
            tables = existing_tables(self.prompts, self.identity)
            tables |= prompt_tuning.compute_tables(self.prompts.prompt_tasks, h, values)
            tables = {task: tables[task] for task in self.prompts.tasks}
            prompt_file.save(path, self.prompts, tables, self.identity)


class TemplateTask(Task):
    """Data with templates."""

    def data_name(self, corpus: str) -> str:
        return f"{Path(self.config.prompt_config).name} ({corpus})"

    def open_data(self, config, world, tokenizer) -> tuple[Padded, Padded]:
        """(training set, held-out set). config: a PromptLearningConfig. Raises PromptError."""
        prompts = PromptConfig.read(config.prompt_config, world.say)
        data = prompts.data
        if not data.validation_ds:
            rule = "name JSON lines that are not trained on"
            raise PromptError(f"data.validation_ds is empty: {rule}")
        model = config.model_config()
        shards = config.length_multiple
        longest = min(model.seq_length, data.max_seq_length or model.seq_length)
        # one more than the model reads: the last token is only a target
        limit = longest // shards * shards + 1
        templates = {task: prompts.templates[task] for task in prompts.new_tasks}
        first_ids = prompts.prompt_tasks.first_ids(model.vocab_size)
        sets, summaries = [], []
        seeds = {"train_ds": config.seed if data.shuffle else None, "validation_ds": None}
        for name, seed in seeds.items():
            paths = getattr(data, name)
            examples, _, summary = read_examples(paths, templates, first_ids, tokenizer, limit)
            usable = [example for example in examples if example]
            sets.append(self.padded(usable, seed, shards, tokenizer))
            summaries.append(f"{name}: {summary}")
        world.say("; ".join(summaries))
        return tuple(sets)

    def padded(self, examples: list, seed: int | None, multiple_of: int, tokenizer) -> Padded:
        """A data set of examples; the arguments of Padded."""
        return Padded(examples, seed, multiple_of)


class PromptTask(TemplateTask):
    """The same, for prompts alone; `learned` is PromptParameters."""

    last_file = "prompts.safetensors"

    def finish(self, run) -> bool:
        self.learned.save_prompts(run.out / self.last_file)
        if run.world.rank == 0:
            title = f"{self.config.prompt_config}, prompts for {self.config.load}"
            draw_loss(run.world, run, title)
        run.world.say(f"{run.out}: prompts.safetensors, loss.png, metrics.jsonl, checkpoints")
        return True


def main(argv: list[str]) -> int:
    return train.main(argv, PromptLearningConfig)


if __name__ == "__main__":
    terminal.command(main)
