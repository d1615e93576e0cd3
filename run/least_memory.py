"""The least memory that a run needs, known before anything is built; and the bytes of its state,
which planning/memory.py takes from here.

The least: of the parameters the matrices alone, of the activations each layer's input and the
logits. What is refused could never have run; what is let through may still not fit. A parameter's
bytes are those of ZeRO's table (fsdp.bytes_per_parameter):

                    16 bits    fp32    sharded from ZeRO stage
    weight             2         4     3
    gradient           4         4     2
    master             4         -     1
    two moments        8         8     1

With --optimizer-state bf16 the moments have 4 bytes, and a 16-bit weight's master 2.
"""

import dataclasses

import torch

import fsdp
import sharding
from base.model_config import MoEConfig, least_parameters, mlp_matrices, with_modules
from run.config import ConfigError, RunConfig
from run.world import World
from tensor_parallel import vocabulary_multiple

# Bytes of a number; 2 in other precisions.
SIZES = {"fp64": 8, "fp32": 4, "tf32": 4}


def parameters(model: MoEConfig) -> tuple[int, int]:
    """How many numbers the matrices have: (those outside the experts, those of the experts)."""
    if hasattr(model, "make"):
        # A model of pictures may have layers of several sizes. All its parameters are counted.
        with torch.device("meta"):
            return sharding.num_parameters(model.make()), 0
    experts = len(with_modules(model).expert_layers) * model.num_experts
    experts *= mlp_matrices(model, model.expert_size)
    return least_parameters(model) - experts, experts


def bytes_of_number(precision: str, optimizer_state: str) -> tuple[int, int, int]:
    """(weight, gradient, optimizer state) of one parameter, unsharded."""
    weight = SIZES.get(precision, 2)
    gradient = max(weight, 4)
    small = optimizer_state == "bf16"
    master = (2 if small else 4) * (weight == 2)
    return weight, gradient, master + (4 if small else 2 * gradient)


def sharded(
    held: tuple[float, float],
    learning: tuple[float, float],
    number_bytes: tuple[int, int, int],
    zero_stage: int,
    shards: int,
    ep: int,
) -> tuple[float, ...]:
    """Bytes of (weights, gradients, optimizer state) of one rank. held, learning: how many numbers
    it has, and how many of them learn, (outside the experts, in experts), before ZeRO shards them.
    shards: over how many ranks; experts over shards / ep."""
    dense = fsdp.bytes_per_parameter(zero_stage, shards, *number_bytes)
    experts = fsdp.bytes_per_parameter(zero_stage, shards // ep, *number_bytes)
    return tuple(
        numbers[0] * x + numbers[1] * y
        for numbers, x, y in zip((held, learning, learning), dense, experts)
    )


def state_parts(
    model: MoEConfig, precision: str, optimizer_state: str, zero_stage: int, ranks: dict[str, int]
) -> tuple[float, ...]:
    """Bytes of (weights, gradients, optimizer state) that the fullest rank holds at least.

    ranks: how many there are in tp, pp and ep; dp: those that ZeRO shards over.
    """
    dense, experts = parameters(model)
    tp, ep = ranks["tp"], ranks["ep"]
    held = dense // ranks["pp"] // tp, experts // ranks["pp"] // ep // tp
    number_bytes = bytes_of_number(precision, optimizer_state)
    return sharded(held, held, number_bytes, zero_stage, ranks["dp"], ep)


def activation_bytes(
    model: MoEConfig, precision: str, micro_batch: int, ranks: dict[str, int], head_chunk: int = 0
) -> int:
    """Bytes that the fullest rank holds at least for one micro-batch: each layer's input, and
    without a pipeline the logits, of `head_chunk` tokens if it is given. ranks: as in
    `state_parts`; and in cp, which share the tokens."""
    size = SIZES.get(precision, 2)
    tokens = micro_batch * model.seq_length // ranks.get("cp", 1)
    numbers = tokens * (model.hidden_size * model.num_layers // ranks["pp"])
    # Most models of pictures have no logits for tokens; this is the least.
    if ranks["pp"] == 1 and not hasattr(model, "make"):
        numbers += min(head_chunk or tokens, tokens) * model.vocab_size
    return size * numbers // ranks["tp"]


def check_memory(config: RunConfig, world: World) -> None:
    """Raise ConfigError for a run that the memory of a rank can never hold."""
    model = config.model_config()
    # What ZeRO shards, it shards over context-parallel ranks too.
    replicas = world.size // config.tp // config.pp
    shards = replicas // config.data_parallel_replicate_degree
    ranks = {"tp": config.tp, "pp": config.pp, "dp": shards, "ep": config.ep, "cp": config.cp}
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    precision = config.precision or ("bf16" if device == "cuda" else "fp32")
    has = world.memory(device)
    multiple = vocabulary_multiple(config.make_vocab_size_divisible_by, device, config.tp)
    padded = -(-model.vocab_size // multiple) * multiple
    # No model has more; a larger one would not fit either.
    held = dataclasses.replace(model, vocab_size=min(padded, 2**31 - 1))
    parts = state_parts(held, precision, config.optimizer_state, config.zero_stage, ranks)
    if config.optimizer == "muon":
        # Matrices of blocks have one moment, and nothing has less than half of its state.
        parts = *parts[:2], parts[2] / 2
    learner = int(sum(parts))
    # A frozen model has no gradients and no optimizer state.
    needs = 0 if config.frozen else learner
    needs += config.bytes_beside(held, precision, ranks, learner)
    padding = ""
    if padded > 1.1 * model.vocab_size:
        padding = f" --make-vocab-size-divisible-by {multiple // config.tp}"
    if needs > has:
        raise ConfigError(
            f"--hidden-size {model.hidden_size} --num-layers {model.num_layers} --num-experts"
            f" {model.num_experts} --vocab-size {model.vocab_size}{padding}: weights, gradients and"
            f" optimizer state of this model {complaint('take', needs, has)}; a smaller model,"
            " or more ranks with --tp, --pp or --zero-stage 3, would need less of each"
        )
    micro = config.known_micro_batch(replicas // config.cp)
    needs = activation_bytes(held, precision, micro, ranks, config.head_chunk)
    if needs > has:
        what = f"the activations of so many sequences of {model.seq_length} tokens"
        raise ConfigError(
            f"--micro-batch-size {micro}{padding}: {what} {complaint('take', needs, has)};"
            " --micro-batch-size 1 would need the least"
        )


def complaint(verb: str, needs: float, has: int) -> str:
    """The end of a message, in GiB. verb: take, for what the message has named."""
    return f"{verb} at least {needs / 2**30:,.1f} GiB on each rank, which has {has / 2**30:,.1f}"
