"""What a run says at its start: what runs, on what, under which layout, and what may surprise."""

import sys

import torch

from run.config import LAYOUT, RunConfig
from run.presets import why_not_exported
from run.world import World

# Flags that are named where they are not the default.
NAMED = (
    *LAYOUT,
    *("reduce_dtype", "recompute", "recompute_layers", "head_chunk"),
    *("fp8", "fp8_skip", "fp8_scales", "fp8_block", "optimizer_state"),
)


def announce(trainer, world: World, index: dict) -> None:
    """index: of the training text."""
    config = trainer.config
    layout = ""
    for name in NAMED:
        if getattr(config, name) != getattr(RunConfig(), name):
            layout += f", {name.replace('_', '-')} {getattr(config, name)}"
    world.say(
        f"{config.load or config.model}: {trainer.num_parameters:,} parameters"
        f"{trainer.task.describe()}, {trainer.precision} on {world.size} x {world.device.type}"
        f"{layout}; corpus {index['corpus']} (Python {sys.version.split()[0]}): "
        f"{index['tokens']:,} tokens"
    )
    for text in surprises(trainer, world):
        world.say(text)


def surprises(trainer, world: World):
    """What of the configuration has less effect, or another one, than a user may think."""
    config, model = trainer.config, trainer.model_config
    if config.zero_stage and not world.groups.replicas:
        yield (
            f"--zero-stage {config.zero_stage}: there is one data-parallel rank, and nobody to "
            "share with"
        )
    if config.precision == "tf32" and trainer.device.type == "cpu":
        yield "--precision tf32: the same as fp32 here; only GPUs have TF32 multiplications"
    if trainer.fp8:
        yield from surprises_of_fp8(trainer)
    balanced = trainer.task.balances_experts
    if model.num_experts and balanced and config.micro_batch_size is None:
        micro = trainer.micro_batch
        yield (
            f"experts are balanced within a micro-batch, here of {micro} sequences: for the same "
            f"result on another number of ranks give --micro-batch-size {micro}"
        )
    if why := why_not_exported(model):
        yield f"huggingface.py will not export these experts, which no class of theirs has: {why}"
    if config.kernels == "auto" and trainer.kernels_refused and trainer.device.type == "cuda":
        yield f"--kernels auto: {trainer.kernels_refused}; PyTorch's own operations run"
    if config.recompute == "selective" and model.attention == "fused":
        yield (
            "--recompute selective: fused attention keeps no s x s scores, so there is nothing to "
            "recompute"
        )


def surprises_of_fp8(trainer):
    config = trainer.config
    why = fp8_is_emulated(trainer)
    if why:
        yield f"--fp8 {config.fp8}: emulated, so not faster: {why}"
    # With a history, delayed scales are those of all samples.
    if config.micro_batch_size is None and not len(trainer.fp8.history):
        micro = trainer.micro_batch
        when = " in the first step" if config.fp8 == "delayed" else ""
        yield (
            f"--fp8 {config.fp8}: scales are{when} those of a micro-batch, here of {micro}"
            f" sequences: for the same result on another number of ranks give --micro-batch-size"
            f" {micro}"
        )
    if trainer.model_config.num_experts:
        yield (
            f"--fp8 {config.fp8}: experts have a scale for each row, and weight gradients in"
            f" {trainer.precision}"
        )


def fp8_is_emulated(trainer) -> str:
    """Why this device does not multiply bytes; "" where it does. As float8.runs_in_fp8."""
    device, config = trainer.device, trainer.config
    if device.type != "cuda" or not torch.version.cuda:
        return "FP8 multiplications need a GPU of compute capability 8.9"
    capability = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if capability < (8, 9):
        return f"{name} is below compute capability 8.9"
    if trainer.precision == "fp64":
        return "no FP8 multiplication gives float64"
    needed = 16
    if config.fp8 == "block":
        needed = 128
        cuda = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
        if capability != (9, 0) or cuda < (12, 9) or config.fp8_block != 128:
            return "blocks need a Hopper GPU, CUDA 12.9 and --fp8-block 128"
    odd = [f"{n} {what}" for what, n in fp8_sizes(trainer).items() if n % needed]
    if odd:
        return f"FP8 multiplications need sizes that {needed} divides, not {', '.join(odd)}"
    return ""


def fp8_sizes(trainer) -> dict[str, int]:
    """What rows and columns of the matrices of a rank stand for -> how many there are."""
    model, t = trainer.model_config, trainer.config.tp
    return {
        "tokens of a micro-batch": trainer.micro_batch * model.seq_length,
        "of --hidden-size": model.hidden_size // t,
        "of --ffn-hidden-size": model.ffn_hidden_size // t,
        "of queries": model.num_heads * model.head_dim // t,
        "of keys": model.num_kv_heads * model.head_dim // t,
    }
