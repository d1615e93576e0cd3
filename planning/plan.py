"""train.py --plan: the step time that planner.py predicts, beside the measured one.

    --plan h100            data sheet, and constants that were fitted to published times
    --plan machine.json    measured here: python planner.py measure --out machine.json
    --plan auto            the GPU by its name; else machine.json in the current folder

    python train.py --plan machine.json

Not covered: evaluations, checkpoints, and prompt tuning. A prediction is of a training step.
"""

import dataclasses
from pathlib import Path

import torch

import planner
from base import json_files
from planning.inputs import MACHINES, Layout, Machine, software_of
from run.config import Config, ConfigError, flag_name

MEASURED = "machine.json"
ADVICE = "`python planner.py measure` writes a file for this machine"


def machine_of(name: str) -> Machine:
    """The machine that --plan names. Raises ConfigError."""
    if name in MACHINES:
        return MACHINES[name]
    if name == "auto":
        if torch.cuda.is_available():
            gpu = torch.cuda.get_device_name().lower()
            for known, machine in MACHINES.items():
                if known in gpu:
                    return machine
        if not Path(MEASURED).exists():
            raise ConfigError(
                f"--plan auto: no GPU here is one of {', '.join(MACHINES)}, and there is no"
                f" {MEASURED}; {ADVICE}"
            )
        name = MEASURED
    try:
        return json_files.read(name, Machine)
    except json_files.JSONError as e:
        raise ConfigError(
            f"--plan {e}; auto, {', '.join(MACHINES)} or a machine's file would fit: {ADVICE}"
        ) from None


def check(config: Config) -> None:
    """Raises ConfigError where nothing can be predicted."""
    for name in ("prompt_config", "peft"):
        if getattr(config, name):
            raise ConfigError(
                f"--plan {config.plan}: predicts a step that trains the whole model, not one of"
                f" {flag_name(name)}; leave it out"
            )
    for name in ("preference", "rl"):
        if getattr(config, name):
            raise ConfigError(f"--plan {config.plan}: predicts steps on text; leave --{name} out")
    if config.fp8 != "off":
        rule = "predicts steps without --fp8; leave one of the two out"
        raise ConfigError(f"--plan {config.plan}: {rule}")
    machine_of(config.plan)


def layout_of(config: Config, ranks: int) -> Layout:
    """The layout of a run on so many ranks."""
    dp = ranks // config.tp // config.pp // config.cp
    return Layout(
        tp=config.tp,
        pp=config.pp,
        dp=dp,
        ep=config.ep,
        virtual_stages=config.virtual_stages,
        schedule=config.schedule,
        micro_batch_size=config.micro_batch(dp),
        global_batch_size=config.global_batch_size,
        recompute=config.recompute,
        sequence_parallel=config.sequence_parallel,
        zero_stage=config.zero_stage,
        layer_split=tuple(config.layer_split) if config.layer_split else None,
        head_chunk=config.head_chunk,
        cp=config.cp,
        cp_kind=config.cp_kind,
    )


def predict(config: Config, ranks: int, s: int | None = None) -> dict[str, float]:
    """Seconds of a step by part, on rows of s tokens, by default the longest; empty without --plan.
    Raises ConfigError."""
    if not config.plan:
        return {}
    machine = machine_of(config.plan)
    layout = layout_of(config, ranks)
    model = config.model_config()
    model = dataclasses.replace(model, seq_length=s or model.seq_length)
    return planner.step_time(machine, software_of(machine), model, layout)


def describe(seconds: dict[str, float], name: str) -> str:
    """The prediction, for the start of a run."""
    parts = [f"{part} {value:.3g}" for part, value in seconds.items() if value]
    where = f" on {name} in bf16" if name in MACHINES else ""
    return f"--plan {name}: a step of {sum(seconds.values()):.3g} s{where}: {', '.join(parts)}"
