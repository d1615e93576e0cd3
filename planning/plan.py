"""train.py --plan: the step time that planner.py predicts, beside the measured one.

    --plan h100            data sheet, and constants that were fitted to published times
    --plan machine.json    any other machine (docs/planning.md), written by hand
    --plan auto            the GPU by its name; else machine.json in the current folder

    python train.py --plan machine.json

Not covered: evaluations, checkpoints, and prompt tuning. A prediction is of a training step.
"""

import dataclasses
from pathlib import Path

import torch

import planner
from base import json_files
from planning.inputs import MACHINES, TRAIN, Constants, Layout, Machine, Software
from run import least_memory
from run.config import ConfigError
from run.metrics import peak_of
from run.pretraining import Config

# Flags that change no prediction, by reason. tests/test_planned_flags.py holds each flag to this:
# it changes seconds or bytes, or stands here.
UNPREDICTED = {
    "how well a run learns, not how fast": (
        "lr min_lr warmup_steps weight_decay seed aux_loss z_loss router router_temperature"
        " router_scale bias_rate expert_groups topk_groups"
        " lora_alpha fp8_scales adam_beta1 adam_beta2 init_std norm_eps rotary_base"
        " lr_schedule decay_steps wsd_steps rotary_factor rotary_scaling mtp_loss_weight"
        " rotary_original_length"
    ),
    "below 1% of a step: the norm, a scale for each product, biases, rows of padding": (
        "grad_clip fp8_block fp8_history attention_bias mlp_bias make_vocab_size_divisible_by"
    ),
    "before the steps that are predicted": "rampup_batch_size",
    "outside of the steps": (
        "steps eval_every save_every keep resume load out log_every max_bad_steps timeout plan"
        " tensorboard profile device sample_prompt cache"
    ),
    "the text: its tokens count, and which mask it has costs no FLOPs less": (
        "data val_data tokenizer skip_bad_examples document_mask"
    ),
    "what the compiler fuses is not known; constants are those of fused kernels": "compile",
    "refused beside --plan": "peft peft_targets lora_dropout adapter_size",
}
FILE = "machine.json"
ADVICE = "docs/planning.md says how to write one"


def machine_of(name: str, flag: str = "--plan") -> Machine:
    """The machine that a flag names. Raises ConfigError."""
    if name in MACHINES:
        return MACHINES[name]
    if name == "auto":
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        for known, machine in MACHINES.items():
            # An H100 PCIe has another peak.
            if known.upper() in gpu and machine.peak == peak_of(gpu):
                return machine
        if not Path(FILE).exists():
            rule = f"no GPU here is one of {', '.join(MACHINES)}, and there is no {FILE}"
            raise ConfigError(f"{flag} auto: {rule}; {ADVICE}")
        name = FILE
    try:
        return machine_of_file(name)
    except json_files.JSONError as e:
        fit = f"auto, {', '.join(MACHINES)} or a machine's file would fit"
        raise ConfigError(f"{flag} {e}; {fit}: {ADVICE}") from None


def machine_of_file(name: str) -> Machine:
    """Raises JSONError, also for fields that a machine does not have."""
    given = json_files.read(name, dict)
    constants = given.get("constants")
    if isinstance(constants, dict):
        shares = vars(json_files.convert_exactly(constants, Constants, f"{name}: constants"))
        for field, share in shares.items():
            if field not in ("wait", "zero3") and share > 1:
                raise json_files.JSONError(f"{name}: constants: {field} {share:g}: is a share of 1")
        if given.get("has_fp8") and "fp8" not in constants:
            rule = "has_fp8 needs the share of FP8 that is reached; that of an h100 is 0.61"
            raise json_files.JSONError(f"{name}: constants: fp8: {rule}")
    return json_files.convert_exactly(given, Machine, name)


def layout_of(config: Config, ranks: int) -> Layout:
    """The layout of a run on so many ranks."""
    dp = ranks // config.tp // config.pp // config.cp
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(Layout) if f.name != "dp"}
    fields["micro_batch_size"] = config.micro_batch(dp)
    if config.layer_split:
        fields["layer_split"] = tuple(config.layer_split)
    return Layout(dp=dp, **fields)


def software_of(config: Config) -> Software:
    """train.py under these flags, in bf16 unless --precision is given."""
    numbers = config.precision or "bf16", config.optimizer_state
    weight, gradient, state = least_memory.bytes_of_number(*numbers)
    # Flags of adapters (finetune/adapter_learning.py), which train.py does not have.
    learns_lora = getattr(config, "peft", None) == "lora"
    return dataclasses.replace(
        TRAIN,
        weight=weight,
        gradient=gradient,
        optimizer_state=state,
        muon=config.optimizer == "muon",
        reduced=2 if config.reduce_dtype == "bf16" else gradient,
        fused_rms_norm=config.kernels == "auto",
        fp8=config.fp8,
        fp8_skip=config.fp8_skip,
        fp8_keep_bytes=config.fp8_keep_bytes,
        lora_rank=config.lora_rank if learns_lora else 0,
    )


def predict(config: Config, ranks: int, s: int | None = None) -> dict[str, float]:
    """Seconds of a step by part, on rows of s tokens, by default the longest; empty without --plan.
    Raises ConfigError."""
    if not config.plan:
        return {}
    model = config.model_config()
    if s:
        # A row of an encoder-decoder has its target too.
        model = dataclasses.replace(model, seq_length=s - model.target_length)
    machine, software = machine_of(config.plan), software_of(config)
    if config.plan in MACHINES and software.weight != 2:
        rule = f"knows the FLOP/s of 16 bits, not of --precision {config.precision}"
        fit = f"a machine's file with its peak would fit: {ADVICE}"
        raise ConfigError(f"--plan {config.plan}: {rule}; {fit}")
    try:
        return planner.step_time(machine, software, model, layout_of(config, ranks))
    except planner.PlanError as e:
        raise ConfigError(f"--plan {config.plan}: {e}") from None


def describe(seconds: dict[str, float], config: Config) -> str:
    """The prediction, for the start of a run."""
    name, after = config.plan, " after the ramp-up" if config.rampup_batch_size else ""
    parts = [f"{part} {value:.3g}" for part, value in seconds.items() if value]
    precision = "bf16" if config.fp8 == "off" else "FP8"
    where = f" on {name} in {precision}" if name in MACHINES else ""
    return (
        f"--plan {name}: a step{after} of {sum(seconds.values()):.3g} s{where}: {', '.join(parts)}"
    )
