"""Which configurations can run. What one rank can know by itself is refused here, before any
process group exists.

A message names the flag, its value, the rule and what would fit. Each technique has its own rules
(tensor_parallel.check, ..) and raises FieldError; they are checked in the order in which a user
would fix the flags.

The table at the end has the flags that work only beside others: a value that would have no effect
is refused. A type of training has rows of its own (`needs` of its configuration).
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

import pipeline_parallel
import recompute
import schedules
import sequence_parallel
import tensor_parallel
from base import json_files
from base.model_config import EXPERT_FIELDS, MoEConfig, divisors, multiples_near
from run.config import ConfigError, RunConfig, as_flags, flag_name
from run.world import why_no_gpu

# Most sequences of a step: far beyond what anybody trains with, and numbered in an instant.
MOST_SEQUENCES = 2**20


def multiples(n: int, of: int) -> str:
    return f"{multiples_near(n, of)} would fit"


def validate(config: RunConfig, world: int, base_needed: bool = True) -> None:
    """Check everything that is known before a process group exists. world: the number of ranks;
    base_needed: whether adapters need the model of --load, as in every run. Raises ConfigError."""
    check_types(config)
    model = config.model_config()
    check_numbers(config)
    check_ranks(config, model, world)
    check_effects(Run(config, model, world // config.tp // config.pp))
    check_techniques(config, model, world)
    check_batch(config, model, dp=world // config.tp // config.pp // config.cp)
    config.check(model, world, base_needed)
    if config.load and base_needed:
        check_length(config)
    check_plan(config)
    check_device(config)


def check_types(config: RunConfig) -> None:
    """Check flags from a file as argparse checks the others. Raises ConfigError."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = flag_name(field.name)
        try:
            json_files.convert(value, field.type, "")
        except json_files.JSONError as e:
            raise ConfigError(f"{name} {value!r}{e}") from None
        choices = field.metadata["choices"]
        if value is not None and choices and value not in choices:
            config.refuse(field.name, f"must be one of {', '.join(map(str, choices))}")
        if value == "" and field.name != "sample_prompt":
            raise ConfigError(f"{name} '': is empty; leave it out for the default")
        words = value if isinstance(value, list) else [value]
        if any(isinstance(word, str) and not is_text(word) for word in words):
            rule = "has bytes that are not UTF-8 text, or a zero byte"
            raise ConfigError(f"{name} {value!r}: {rule}")


def is_text(word: str) -> bool:
    try:
        return b"\0" not in word.encode("utf-8")
    except UnicodeEncodeError:
        return False


def check_numbers(config: RunConfig) -> None:
    """Check the ranges that depend on no other flag. Raises ConfigError."""
    for field in dataclasses.fields(config):
        value, least = getattr(config, field.name), field.metadata["least"]
        # NaN and infinity fail too.
        if least is not None and value is not None and not least <= value < 2**31:
            config.refuse(field.name, f"must be at least {least} and below 2^31")
    if config.global_batch_size > MOST_SEQUENCES:
        rule = f"must be at most {MOST_SEQUENCES:,} sequences; published runs take some thousands"
        config.refuse("global_batch_size", rule)
    if config.min_lr is not None and config.min_lr > config.peak_lr:
        rule = f"must be at most --lr {config.peak_lr:g}, from which the rate comes down"
        config.refuse("min_lr", rule)


def check_rampup(config: RunConfig, dp: int) -> None:
    """Check that the batch grows in whole increments, and that each size splits into equal
    micro-batches of `dp` ranks, as many as a pipeline needs. Raises ConfigError."""
    if not config.rampup_batch_size:
        return
    name, last, p = "rampup_batch_size", config.global_batch_size, config.pp
    if len(config.rampup_batch_size) != 3 or min(config.rampup_batch_size) < 1:
        config.refuse(name, "must be three numbers of 1 or more: START INCREMENT SAMPLES")
    start, increment, _ = config.rampup_batch_size
    if start >= last:
        config.refuse(name, f"START must be below --global-batch-size {last}")
    if (last - start) % increment:
        rule = f"INCREMENT must divide {last - start}, from START to --global-batch-size {last}"
        config.refuse(name, f"{rule}; {divisors(last - start, increment)} would fit")
    each = dp * (config.micro_batch_size or 1)
    unit = each * p if config.pipeline_schedule == "interleaved" else each
    for n in (start, increment):
        if n % unit:
            rule = f"START and INCREMENT must be divisible by {unit}, micro-batches of all ranks"
            config.refuse(name, f"{rule}; for {n}, {multiples(n, unit)}")
    doubled = config.pipeline_schedule == "dualpipe-v" or config.ep_comm_overlap
    if doubled and start < 2 * p * each:
        rule = f"START must make 2 x --pp {p} micro-batches for each pipeline"
        config.refuse(name, f"{rule}; {2 * p * each} would fit")


def check_ranks(config: RunConfig, model: MoEConfig, world: int) -> None:
    """Check that the sizes of the layout divide the ranks. Raises ConfigError."""
    tp, pp = config.tp, config.pp
    # Experts are spread over the ranks that have other tokens. Two ranks or more shard together.
    degree = config.data_parallel_replicate_degree
    needed = tp * pp * degree * max(config.ep, config.cp, min(degree, 2))
    if world == 1 and needed > 1:
        names = ("tp", "pp", "cp", "ep", "data_parallel_replicate_degree")
        name = next(name for name in names if getattr(config, name) > 1)
        start = f"torchrun --nproc-per-node {needed} {config.command} ..."
        rule = f"this is one rank alone; start several with {start}, or give {flag_name(name)} 1"
        config.refuse(name, rule)
    if world % tp:
        fit = tensor_parallel.sizes_that_fit(model, tp, world)
        config.refuse("tp", f"must divide the {world} ranks; {fit} would fit")
    left, over = world // tp, f"over --tp {tp}"
    for name, n in (("pp", pp), ("cp", config.cp)):
        if left % n:
            rule = f"must divide the {world} ranks {over}; {divisors(left, n)} would fit"
            config.refuse(name, rule)
        left, over = left // n, f"{over} --{name} {n}"
    if config.sequence_parallel and tp == 1:
        rule = "shards what tensor parallelism leaves whole, and needs --tp 2 or more"
        config.refuse("sequence_parallel", rule)
    name, v = config.pipeline_schedule, config.virtual_stages
    if name in schedules.V_SHAPED and v != 2:
        rule = f"--schedule {name} has 2 on each pipeline rank; 2 would fit"
        config.refuse("virtual_stages", rule)
    if v > 1 and (name not in ("interleaved", *schedules.V_SHAPED) or pp == 1):
        names = " or ".join(("interleaved", *schedules.V_SHAPED))
        rule = f"only --schedule {names}, under --pp 2 or more, has more than 1"
        config.refuse("virtual_stages", rule)


def check_techniques(config: RunConfig, model: MoEConfig, world: int) -> None:
    """Ask each technique, in the order in which a user would fix the flags. Raises ConfigError."""
    replicas = world // config.tp // config.pp
    with as_flags():
        recompute.check(model, config.recompute, config.recompute_layers)
        recompute.check_head(config.head_chunk)
        tensor_parallel.check(model, config.tp, world)
        if config.sequence_parallel:
            sequence_parallel.check(model, config.tp)
        pipeline_parallel.check(model.num_layers, config.placement, config.layer_split)
        if config.cp > 1:
            import context_parallel

            context_parallel.check(model, config.cp, config.tp, config.cp_kind)
        if config.fp8_recipe:
            import fp8

            recipe = fp8.Recipe(*config.fp8_recipe)
            fp8.check(model, recipe, config.fp8_skip, config.tp, config.cp)
        if config.ep > 1:
            import moe

            moe.check(model, config.ep, replicas)
    if config.cp > 1 and model.seq_length % config.length_multiple:
        rule = f"must be divisible by {config.length_multiple}"
        config.refuse("cp", f"--seq-length {model.seq_length} {rule}")
    check_replicate(config, replicas)


def check_replicate(config: RunConfig, replicas: int) -> None:
    """Check that groups of equal size can each hold all shards. Raises ConfigError."""
    name, degree = "data_parallel_replicate_degree", config.data_parallel_replicate_degree
    if degree == 1:
        return
    if not config.zero_stage:
        config.refuse(name, "replicates what --zero-stage 1, 2 or 3 shards; give one of these")
    # Several ranks shard, and each group has all experts.
    fit = [n for n in range(1, replicas) if replicas % (n * config.ep) == 0]
    if degree not in fit:
        rule = f"must divide the {replicas} data-parallel ranks into groups of 2 or more"
        of_experts = f" that --ep {config.ep} divides" if config.ep > 1 else ""
        config.refuse(name, f"{rule}{of_experts}; {fit} would fit")


def check_batch(config: RunConfig, model: MoEConfig, dp: int) -> None:
    """Check that the global batch splits into equal micro-batches. Raises ConfigError."""
    batch = config.global_batch_size
    check_rampup(config, dp)
    if batch % dp:
        rule = f"must be divisible by the {dp} data-parallel ranks; {multiples(batch, dp)}"
        config.refuse("global_batch_size", rule)
    share = batch // dp
    micro = config.micro_batch(dp)
    if share % micro:
        batches = f"{share} sequences (--global-batch-size {batch} over {dp} data-parallel ranks)"
        rule = f"must divide each rank's {batches}; {divisors(share, micro)} would fit"
        raise ConfigError(f"--micro-batch-size {micro}: {rule}")
    tokens = micro * model.seq_length
    if model.num_experts and model.router == "sinkhorn" and tokens < model.num_experts:
        raise ConfigError(
            f"--num-experts {model.num_experts}: more than the {tokens} tokens of a micro-batch,"
            " among which no plan of --router sinkhorn is even; --router topk would do"
        )
    # Sequences in pp micro-batches of every pipeline.
    group = config.pp * micro * dp
    made = f"makes {share // micro} micro-batches for each pipeline, and"
    if config.pipeline_schedule == "interleaved" and batch % group:
        rule = f"{made} interleaved needs a multiple of --pp {config.pp}; {multiples(batch, group)}"
        config.refuse("global_batch_size", rule)
    if config.pipeline_schedule == "dualpipe-v" and batch < 2 * group:
        rule = f"{made} dualpipe-v needs twice --pp {config.pp} or more; {2 * group} would fit"
        config.refuse("global_batch_size", rule)
    check_overlap(config, share // micro)


def check_overlap(config: RunConfig, m: int) -> None:
    """Check what an F and a B that run in turns need; m: micro-batches. Raises ConfigError."""
    if not config.ep_comm_overlap:
        return
    if config.zero_stage == 3:
        rule = "frees weights after a backward, which a forward of --ep-comm-overlap still needs"
        config.refuse("zero_stage", f"{rule}; 0, 1 or 2 would fit")
    if m < 2 * config.pp:
        rule = f"needs 2 x --pp {config.pp} micro-batches, and there are {m}"
        config.refuse("ep_comm_overlap", f"{rule}; a larger --global-batch-size would fit")


def check_length(config: RunConfig) -> None:
    """Check that learned positions are loaded whole. Raises ConfigError."""
    if config.seq_length is None:
        return
    its = dataclasses.replace(config, seq_length=None).model_config()
    if its.positions == "learned" and config.seq_length != its.seq_length:
        rule = f"--load has {its.seq_length} learned positions, which stay; leave the flag out"
        config.refuse("seq_length", rule)


def check_plan(config: RunConfig) -> None:
    """Check that a step can be predicted, on any machine. Raises ConfigError."""
    if config.plan and config.unpredicted:
        rule = "predicts steps that train a model, or LoRA, on text, and this run"
        config.refuse("plan", f"{rule} {config.unpredicted}; leave it out")


def check_device(config: RunConfig) -> None:
    """Check what this machine and its packages can do. Raises ConfigError."""
    if config.fp8 != "off" and config.precision == "fp16":
        rule = "has scales of its own, which the loss scale of fp16 would change"
        config.refuse("fp8", f"{rule}; --precision bf16 would fit")
    if config.optimizer_state == "bf16" and config.precision == "fp16":
        rule = "the upper half of an fp32 master is a bf16 number; --precision bf16 would fit"
        config.refuse("optimizer_state", rule)
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        config.refuse("tensorboard", "needs the package tensorboard (pip install tensorboard)")
    if config.device == "cuda" and not torch.cuda.is_available():
        rule = f"no GPU can be used here ({why_no_gpu()}); --device cpu would run"
        config.refuse("device", rule)


# --- flags that do something only beside others ---------------------------------------------------


class Run(NamedTuple):
    """The facts that decide whether a flag has an effect."""

    config: RunConfig
    model: MoEConfig
    # Ranks that hold the same weights, and sum their gradients.
    replicas: int


class Need(NamedTuple):
    fields: tuple[str, ...]
    holds: Callable[[Run], object]
    rule: str


NEEDS = (
    # Experts.
    Need(
        EXPERT_FIELDS,
        lambda run: run.model.num_experts,
        "this model has no experts; --num-experts 8, for example, would give it some",
    ),
    Need(
        ("router_temperature",),
        # course.verify gives the shape of a model whole, defaults too.
        lambda run: (
            run.model.router == "sinkhorn"
            or run.config.router_temperature == MoEConfig.router_temperature
        ),
        "is only for --router sinkhorn; the others have no plan",
    ),
    Need(
        ("bias_rate",),
        lambda run: run.model.router == "bias" or run.config.bias_rate == MoEConfig.bias_rate,
        "is only for --router bias; the others have no biases",
    ),
    # Precision.
    Need(
        ("fp8_skip", "fp8_scales", "fp8_block"),
        lambda run: run.config.fp8 != "off",
        "needs --fp8 current, delayed or block",
    ),
    Need(
        ("fp8_block",),
        lambda run: run.config.fp8 == "block",
        "is only for --fp8 block; other recipes have one scale for a tensor",
    ),
    Need(
        ("fp8_keep_bytes",),
        lambda run: run.config.fp8 != "off" and run.config.zero_stage == 3,
        "is for --zero-stage 3 with --fp8; other stages keep them anyway",
    ),
    # Layout.
    Need(
        ("tp_comm_overlap",),
        lambda run: run.config.sequence_parallel,
        "sends shards of a sequence, and needs --sequence-parallel",
    ),
    Need(
        ("tp_comm_overlap",),
        lambda run: run.config.fp8 == "off",
        "multiplies 16-bit shards; with --fp8 a whole input has one scale; --fp8 off would fit",
    ),
    Need(("cp_kind",), lambda run: run.config.cp > 1, "needs --cp 2 or more"),
    Need(("schedule", "layer_split"), lambda run: run.config.pp > 1, "needs --pp 2 or more"),
    Need(
        ("ep_comm_overlap",),
        lambda run: run.config.ep > 1 and run.config.pp > 1,
        "needs --ep 2 or more and --pp 2 or more: a pipeline has other micro-batches on their way",
    ),
    Need(
        ("ep_comm_overlap",),
        lambda run: run.config.pipeline_schedule in schedules.JOINABLE,
        f"joins F and B of --schedule {' or '.join(schedules.JOINABLE)}; in others they would wait",
    ),
    # Memory.
    Need(
        ("recompute_layers",),
        lambda run: run.config.recompute_layers != 0,
        "recomputes nothing; leave it and --recompute out",
    ),
    # The model.
    Need(
        ("model",),
        lambda run: not run.config.load,
        "--load fixes the shape already; give one of the two",
    ),
)
# These depend on the number of ranks, and a run may go on with fewer.
NEEDS_RANKS = (
    Need(
        ("reduce_dtype", "zero_stage"),
        lambda run: run.replicas > 1,
        "is about ranks that share the batch, and there is one; leave it out",
    ),
)


def check_effects(run: Run) -> None:
    """Raise ConfigError for the first flag that would do nothing."""
    needs = (*run.config.needs, *NEEDS, *(() if run.config.resume else NEEDS_RANKS))
    default = type(run.config)()
    for fields, holds, rule in needs:
        if not holds(run):
            for field in fields:
                if getattr(run.config, field) != getattr(default, field):
                    run.config.refuse(field, rule)
