"""Whether a run can fit into memory at all, known before anything is built.

A lower bound: matrices only, and of the activations only the input of each layer and the logits.
What it refuses could never have run; what it lets through may still not fit. Bytes for a parameter,
mixed precision beside fp32
(ZeRO, arXiv 1910.02054, section 3.1):

                    16 bits    fp32     sharded from ZeRO stage
    weight                2       4     3
    gradient, fp32        4       4     2
    master, fp32          4       -     1
    two moments           8       8     1     (4, and a master of 2, with --optimizer-state bf16)
"""

import os

import torch

import fsdp
from routers import MoEConfig
from runtime.sizes import least_parameters


def parameters(model: MoEConfig) -> tuple[int, int]:
    """(dense, of experts): how many numbers the matrices have."""
    mlp = (3 if model.llama else 2) * model.hidden_size * model.ffn_hidden_size
    experts = len(model.expert_layers) * model.num_experts * mlp
    return least_parameters(model) - experts, experts


def state_bytes(
    model: MoEConfig, precision: str, optimizer_state: str, zero_stage: int, ranks: dict[str, int]
) -> int:
    """Bytes of weights, gradients and optimizer state: the rank that has most holds at least so
    much. ranks: how many there are in tp, pp, dp and ep."""
    dense, experts = parameters(model)
    held = (dense + experts // ranks["ep"]) // (ranks["tp"] * ranks["pp"])
    weight = {"fp64": 8, "fp32": 4}.get(precision, 2)
    gradient = max(weight, 4)
    moments = 4 if optimizer_state == "bf16" else 2 * gradient
    master = 0
    if weight == 2:
        master = 2 if optimizer_state == "bf16" else 4
    return int(
        held
        * sum(fsdp.bytes_per_parameter(zero_stage, ranks["dp"], weight, gradient, master + moments))
    )


def activation_bytes(
    model: MoEConfig, precision: str, micro_batch: int, ranks: dict[str, int]
) -> int:
    """Bytes of each layer's input, and without a pipeline of the logits, for one micro-batch: the
    rank that has most holds at least so much."""
    size = {"fp64": 8, "fp32": 4}.get(precision, 2)
    numbers = model.hidden_size * model.num_layers // ranks["pp"]
    if ranks["pp"] == 1:
        numbers += model.vocab_size
    return micro_batch * model.seq_length * size * numbers // ranks["tp"]


def memory(device: str, ranks_on_machine: int) -> int:
    """Bytes that one rank can have: of its GPU, or its share of the machine's memory and swap."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            total += sum(1024 * int(line.split()[1]) for line in f if line.startswith("SwapTotal"))
    except OSError:
        pass
    return total // ranks_on_machine


def complaint(verb: str, needs: int, has: int) -> str:
    return f"{verb} at least {needs / 2**30:,.1f} GiB on each rank, which has {has / 2**30:,.1f}"
