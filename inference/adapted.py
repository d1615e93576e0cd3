"""Generation with adapters: --adapter of generate.py.

    --adapter runs/lora                        one, for every prompt
    --adapter fr=runs/fr --adapter de=runs/de  several; a line of --prompt-file names one, or none:
                                               {"prompt": "The sea", "adapter": "fr"}

One LoRA or IA3 is merged into the weights before weight_layouts.py lays them out, so that a
token costs what it costs with the base. A bottleneck adapter stays beside them.

Several share one set of parameters in the model, as large as the largest of them. `use` copies the
values of one adapter into it, at most some thousandths of the model, and without a name those that
change nothing:

    LoRA    B = 0       y + B A x   = y        a smaller rank is filled up with zeros
    adapter U = 0       y + U (..)  = y
    IA3     s = 1       s * y       = y

The weights of the base are never written to, so that after any number of switches the base gives
the bits that it gave before. α / r goes into B.

Under any layout: each rank reads its own shards. A batch has one adapter, so that all ranks of a
lockstep group, which share experts, use the same.

Not covered: several adapters in one batch (S-LoRA, arXiv 2311.03285).
"""

import itertools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from base.groups import Groups
from base.model_config import MoEConfig
from finetune import adapter_layers
from finetune.adapter_files import Adapter, open_adapter
from finetune.adapter_layers import LINEARS, AdapterConfig
from inference.loading import build_stages, read_base
from inference.merged import check_base, check_fields, merge
from pipeline_parallel import stages_of
from run.config import ConfigError, as_flags
from sharding import named_parameters, set_sharding, sharding_of


class Adapters:
    """The adapters of a command: opened, then put into a model, then chosen by request."""

    def __init__(self, words: list[str], base: str, config: MoEConfig, tp: int = 1):
        """words: of --adapter; base: of --checkpoint, with this configuration. Compares all that
        can be known before the ranks meet. Raises ConfigError or CheckpointError."""
        self.base = base
        self.config = config
        # "": for every prompt.
        self.opened: dict[str, Adapter] = {}
        for word in words:
            name, path = split_name(word)
            if not name and len(words) > 1:
                raise ConfigError(
                    f"--adapter {word}: several need names, --adapter NAME={word} for example"
                )
            if name in self.opened:
                raise ConfigError(f"--adapter {word}: the second one with this name")
            self.opened[name] = open_adapter(path, type(config))
            check_fields(self.opened[name], base, config)
        for adapter in self.opened.values():
            with as_flags():
                adapter_layers.check(adapter.config, config, tp)
        methods = {adapter.config.peft: name for name, adapter in self.opened.items()}
        if len(methods) > 1:
            are = ", ".join(f"{name} is {peft}" for peft, name in methods.items())
            raise ConfigError(f"--adapter: {are}; those of one command must be of one method")
        # The shared parameters in the model, and this rank's values for them.
        self.parameters: dict[str, Tensor] = {}
        self.values: dict[str, dict[str, Tensor]] = {}

    @property
    def names(self) -> list[str]:
        """What a line of a prompt file can name."""
        return [name for name in self.opened if name]

    @property
    def merged(self) -> bool:
        """Whether `put` merges them into the weights, so that nothing stays beside these."""
        only = self.opened.get("")
        return not self.opened or bool(only and only.config.peft != "adapter")

    def check(self) -> None:
        """Whether each was learned for this base. A collective. Raises CheckpointError."""
        for adapter in self.opened.values():
            read = partial(read_base, shape_class=type(self.config))
            check_base(adapter, self.base, self.config, read)

    @torch.no_grad()
    def put(self, model, groups: Groups, layer_split: list[int] | None = None) -> None:
        """Put them into a model that is loaded, before weight_layouts.apply. model: a GPT or a
        Pipeline, sharded over `groups`. A collective. Raises CheckpointError."""
        if not self.opened:
            return
        for name, adapter in self.opened.items():
            self.values[name] = local_values(adapter, self.config, groups, layer_split)
        only = self.opened.get("")
        if self.merged:
            for name, p in itertools.chain(*(s.named_parameters() for s in stages_of(model))):
                p.copy_(merge(name, p, self.values[""], only.config))
            return
        shared = shared_config(list(self.opened.values()))
        for stage in stages_of(model):
            adapter_layers.apply(stage, shared, groups.tp)
            stage.requires_grad_(False).eval()
            for name, p in named_parameters(stage):
                if adapter_layers.is_adapter(name):
                    self.parameters[name] = p
        self.use("" if only else None)

    @torch.no_grad()
    def use(self, name: str | None) -> None:
        """Give the model the values of one adapter, or without a name those of none."""
        values = {} if name is None else self.values[name]
        for full_name, p in self.parameters.items():
            p.fill_(1 if full_name.endswith(".ia3.scale") else 0)
            if full_name in values:
                value = values[full_name]
                if full_name.endswith(".lora.b"):
                    config = self.opened[name].config
                    value = value * (config.lora_alpha / config.lora_rank)
                # A smaller rank fills the first rows or columns.
                p[tuple(slice(n) for n in value.shape)] = value.to(p)


def split_name(word: str) -> tuple[str, str]:
    """NAME=ADAPTER as (NAME, ADAPTER), and a path as ("", path). Raises ConfigError."""
    match = re.fullmatch(r"([^/=]*)=(.*)", word)
    if not match or Path(word).is_dir():
        return "", word
    name, path = match.groups()
    if not name or not path:
        raise ConfigError(f"--adapter {word}: NAME=ADAPTER lacks its {'path' if name else 'name'}")
    return name, path


def local_values(
    adapter: Adapter, config: MoEConfig, groups: Groups, layer_split: list[int] | None
) -> dict[str, Tensor]:
    """This rank's shards of an adapter, float32, on the CPU. A collective. Raises
    CheckpointError."""
    values = {}
    # On the meta device: for names and sharding records alone.
    for stage in build_stages(config, groups, layer_split):
        adapter_layers.apply(stage, adapter.config, groups.tp)
        for name, p in named_parameters(stage):
            if adapter_layers.is_adapter(name):
                values[name] = set_sharding(torch.zeros(p.shape, device="cpu"), sharding_of(p))
    adapter.load(values)
    return values


def shared_config(opened: list[Adapter]) -> AdapterConfig:
    """The configuration of parameters that are large enough for each of these adapters."""
    rank = max(adapter.config.lora_rank for adapter in opened)
    targets = {name.split(".")[3] for adapter in opened for name in adapter.shapes}
    if opened[0].config.peft == "adapter":
        targets = {name.split(".")[2] for adapter in opened for name in adapter.shapes}
    return replace(
        opened[0].config,
        lora_rank=rank,
        # The scale α / r is 1, and each adapter's own goes into its B.
        lora_alpha=float(rank),
        lora_dropout=0.0,
        adapter_size=max(adapter.config.adapter_size for adapter in opened),
        peft_targets=tuple(name for name in (*LINEARS, "attention", "mlp") if name in targets),
    )
