"""Prompt learning as a run of train.py: a trainer whose model is frozen, and learns prompts.

    python train.py --prompt-config prompts.json --load runs/default --out runs/prompts

Checkpoints hold the prompts alone. At the end, the tables of all tasks go to prompts.safetensors.
"""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import checkpoint
import prompt_tuning
import sharding
from model_config import GPTConfig
from prompt_tuning import WHERE, initial_values
from prompts import prompt_file
from prompts.prompt_data import PromptConfig, PromptData, PromptError, read_examples
from prompts.prompt_file import fingerprint, load, read_base
from runtime.finish import draw_loss
from sharding import shard_of, sharding_of


def open_sets(config, world, tokenizer) -> tuple[PromptData, PromptData]:
    """(training set, held-out set) of a run. Raises PromptError."""
    prompts = PromptConfig.read(config.prompt_config)
    shards = config.tp if config.sequence_parallel else 1
    *sets, summary = open_data(prompts, config.model_config(), tokenizer, config.seed, shards)
    world.say(summary)
    return sets


def first_values(
    config: PromptConfig,
    path: "str | Path",
    model: GPTConfig,
    seed: int,
    tokenizer,
    identity: str,
) -> dict[str, Tensor]:
    """`initial_values` for the model at `path`, whose fingerprint is `identity`. All ranks call
    this together. Raises PromptError."""
    texts = (
        "text" in config.prompt_tuning.new_prompt_init_methods
        and config.virtual_prompt_style == "prompt-tuning"
    )
    name = "embedding.tokens.weight"
    embedding = read_base(path, [name])[name] if texts else None
    return initial_values(
        config, model.hidden_size, seed, tokenizer, embedding, restored(config, identity)
    )


def restored(config: PromptConfig, identity: str) -> dict[str, Tensor]:
    """The tables of the existing tasks. Raises PromptError."""
    if not config.existing_tasks:
        return {}
    there, found = load(config.restore_path, identity)
    for task in config.existing_tasks:
        if task not in found:
            raise PromptError(
                f"existing_tasks: {task!r} is not in {config.restore_path}, which has {there.tasks}"
            )
        if there.templates[task] != config.templates[task]:
            raise PromptError(
                f"existing_tasks: {task!r} was learned with another template:"
                f" {there.templates[task]}"
            )
    return found


def open_data(
    config: PromptConfig, model: GPTConfig, tokenizer, seed: int, multiple_of: int = 1
) -> tuple[PromptData, PromptData, str]:
    """(training set, held-out set, what was truncated or skipped). Raises PromptError."""
    # one more: the first is no label
    limit = (
        min(model.seq_length, config.data.max_seq_length or model.seq_length)
        // multiple_of
        * multiple_of
        + 1
    )
    if not config.data.validation_ds:
        raise PromptError("data.validation_ds is empty: name JSON lines that are not trained on")
    templates = {task: config.templates[task] for task in config.new_tasks}
    ids = config.first_ids(model.vocab_size)
    sets = []
    told = []
    for what, paths, order in (
        ("train_ds", config.data.train_ds, seed if config.data.shuffle else None),
        ("validation_ds", config.data.validation_ds, None),
    ):
        examples, _, said = read_examples(paths, templates, ids, tokenizer, limit)
        sets.append(
            PromptData(
                [example for example in examples if example], model.vocab_size, order, multiple_of
            )
        )
        told.append(f"{what}: {said}")
    return *sets, "; ".join(told)


class PromptLearning:
    """Changes train.Trainer: only prompts learn."""

    # a frozen matrix has no weight gradient
    share_of_flops = 2 / 3
    last_file = "prompts.safetensors"
    open_data = staticmethod(open_sets)

    @property
    def prompts(self) -> PromptConfig:
        if not hasattr(self, "_prompts"):
            self._prompts = PromptConfig.read(self.config.prompt_config)
        return self._prompts

    def before_techniques(self, stage) -> None:
        # frozen: no dropout, and routers take raw logits
        stage.requires_grad_(False).eval()

    def after_model_parallel(self, stage) -> None:
        prompt_tuning.apply(stage, self.prompts, self.groups.tp)

    def routing(self) -> dict:
        return {}

    def prompt_parameters(self) -> dict[str, Tensor]:
        """Of this rank's stages, by their name in VirtualPrompts."""
        named = sharding.named_parameters(*self.stages)
        return {n.removeprefix(WHERE): p for n, p in named if n.startswith(WHERE)}

    def load_base(self, tokenizer) -> None:
        """The model that prompts are learned for, and the prompts' initial values. Raises
        CheckpointError or PromptError."""
        path = checkpoint.find(self.config.load)
        frozen = {}
        for name, p in sharding.named_parameters(*self.stages):
            if not p.requires_grad and not name.startswith(WHERE):
                frozen[f"model.{name}"] = p
        checkpoint.load(path, frozen, checkpoint.fixed_fields(self.model_config))
        self.identity = fingerprint(path, self.model_config)
        values = first_values(
            self.prompts, path, self.model_config, self.config.seed, tokenizer, self.identity
        )
        tensors = self.optimizer.tensors()
        with torch.no_grad():
            for name, p in self.prompt_parameters().items():
                # a master, or an existing task's table
                target = tensors.get(f"model.{WHERE}{name}", p)
                target.copy_(shard_of(values[name], sharding_of(p)))
        self.checkpoints.set(tensors)

    def check_base(self, path: Path, index: dict) -> None:
        if index.get("base", self.identity) != self.identity:
            raise checkpoint.CheckpointError(
                f"--load {self.config.load}: is not the model that the prompts in {path} were "
                "learned for; it has changed since. Name the checkpoint that they were begun with "
                "(CKPT/checkpoints/step-..), or begin anew with another --out"
            )

    def load_weights(self, world) -> None:
        """`load_base` has loaded them."""

    def extra_state(self) -> dict:
        return {"base": self.identity}

    def describe_learned(self) -> str:
        parameters = self.optimizer.parameters.values()
        learned = sum(math.prod(sharding_of(p).shape) for p in parameters)
        return f", of which nothing changes, and {learned:,} prompt parameters"

    def save_prompts(self, path: Path) -> None:
        """Write the prompt file: what was learned, and the existing tasks as they were. A
        collective of the ranks that hold the embedding."""
        values = {}
        for name, tensor in self.optimizer.tensors().items():
            if name.startswith("model."):
                short = name.removeprefix(f"model.{WHERE}")
                values[short] = sharding.gather(tensor, sharding_of(tensor))
        if values and (not dist.is_initialized() or dist.get_rank() == 0):
            h = self.model_config.hidden_size
            tables = restored(self.prompts, self.identity)
            tables |= prompt_tuning.tables(self.prompts, h, values)
            tables = {task: tables[task] for task in self.prompts.tasks}
            prompt_file.save(path, self.prompts, tables, self.identity)

    def finish(self, run) -> bool:
        self.save_prompts(run.out / self.last_file)
        if run.world.rank == 0:
            title = f"{self.config.prompt_config}, prompts for {self.config.load}"
            draw_loss(run.world, run, title)
        run.world.say(f"{run.out}: prompts.safetensors, loss.png, metrics.jsonl, checkpoints")
        return True
