"""What a run says at its start: what runs, on what, under which layout, and what may surprise."""

import sys

from runtime import architectures
from runtime.config import Config
from runtime.world import World

# flags that are named where they are not the default
LAYOUT = (
    "tp",
    "pp",
    "ep",
    "virtual_stages",
    "schedule",
    "layer_split",
    "sequence_parallel",
    "zero_stage",
    "reduce_dtype",
    "recompute",
    "recompute_layers",
    "head_chunk",
    "optimizer_state",
)


def announce(trainer, world: World, index: dict) -> None:
    """index: of the training text."""
    config = trainer.config
    layout = ""
    for name in LAYOUT:
        if getattr(config, name) != getattr(Config(), name):
            layout += f", {name.replace('_', '-')} {getattr(config, name)}"
    world.say(
        f"{config.load or config.model}: {trainer.num_parameters:,} parameters"
        f"{trainer.describe_learned()}, {trainer.precision} on {world.size} x {world.device.type}"
        f"{layout}; corpus {index['corpus']} (Python {sys.version.split()[0]}): "
        f"{index['tokens']:,} tokens"
    )
    for text in surprises(trainer, world):
        world.say(text)


def surprises(trainer, world: World):
    """What of the configuration has less effect, or another one, than a user may think."""
    config, model = trainer.config, trainer.model_config
    if config.zero_stage and not world.groups.dp:
        yield (
            f"--zero-stage {config.zero_stage}: there is one data-parallel rank, and nobody to "
            "share with"
        )
    if model.num_experts and config.micro_batch_size is None:
        micro = trainer.micro_batch
        yield (
            f"experts are balanced within a micro-batch, here of {micro} sequences: for the same "
            f"result on another number of ranks give --micro-batch-size {micro}"
        )
    try:
        architectures.check_export_of_experts(model)
    except architectures.HuggingFaceError as e:
        yield (
            f"no Hugging Face class has such experts, and huggingface.py will not export them: {e}"
        )
    if config.kernels == "auto" and trainer.no_kernels and trainer.device.type == "cuda":
        yield f"--kernels auto: {trainer.no_kernels}; PyTorch's own operations run"
    if config.recompute == "selective" and model.attention == "fused":
        yield (
            "--recompute selective: fused attention keeps no s x s scores, so there is nothing to "
            "recompute"
        )
