"""What adapters of a frozen, tensor-parallel model need (finetune/adapter_layers.py)."""

import torch.distributed as dist
from torch import nn

import gpt
import sequence_parallel
from course.mutations import bug, replaces
from finetune import adapter_layers


@bug(2, dict(tp=2, peft="lora"), first="step 1: gradient of blocks.1.mlp.up.lora.a")
@replaces(adapter_layers.AdaptedInput, "__init__")
def no_lora_f(self, project, group, original=adapter_layers.AdaptedInput.__init__):
    """The gradient of a column-parallel layer's A is each rank's part, not the sum."""
    original(self, project, group)
    self.enter = nn.Identity()


@bug(2, dict(tp=2, peft="lora"), first="initial blocks.0.attention.query.lora.a")
@replaces(adapter_layers, "init_parameter")
def lora_a_by_rank(whole_model, name, shape, generator, original=adapter_layers.init_parameter):
    """Each rank draws LoRA's A from its own seed."""
    if name.endswith("lora.a"):
        generator = gpt.generator(dist.get_rank(), name)
    return original(whole_model, name, shape, generator)


@bug(2, dict(tp=2, peft="lora"), first="step 1: output of blocks.0")
def no_lora_scale():
    """The update B A x is added as it is, without α / r."""
    add = adapter_layers.LoRA.add

    def unscaled(self, y, z):
        self.scale = 1.0
        return add(self, y, z)

    adapter_layers.LoRA.add = unscaled


@bug(2, dict(tp=2, peft="adapter"), first="step 1: output of blocks.0")
def adapter_in_the_wrong_place():
    """A bottleneck adapter stands before attention and before the MLP, not after them."""
    adapter_layers.with_bottleneck = lambda forward, bottleneck, x, *rest: forward(
        bottleneck(x), *rest
    )


@bug(
    2,
    dict(tp=2, peft="lora", num_experts=4, micro_batch_size=2),
    first="step 1: gradient of blocks.1.mlp.down.lora.b",
)
def expert_lora_not_summed():
    """Between f and g each rank has a part of the gradient of LoRA in experts; no sum follows."""
    sequence_parallel.synchronise = lambda module, group: None
