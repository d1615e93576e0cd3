"""What the parts of a family need: both sides of attention, and the first values of a norm."""

import torch

import gpt
from base import rotary
from course.mutations import bug, replaces

LLAMA_3 = dict(model="llama3.2-1b", num_kv_heads=2, ffn_hidden_size=96)
GEMMA = dict(model="gemma-7b", head_dim=16, ffn_hidden_size=96)


@bug(1, LLAMA_3, first="step 1: output of blocks.0")
@replaces(gpt.GPT, "run_blocks")
def keys_without_scaling(self, x, s, *rest, original=gpt.GPT.run_blocks):
    """Llama 3's scaling of rotary angles is on queries, and keys have the angles of before."""
    plain = rotary.rotary_table(rotary.rotary_frequencies(self.config, x.device), s, x)
    rotate = rotary.rotate
    rotary.Rotary.forward = lambda _, q, k, table: (rotate(q, table), rotate(k, plain))
    return original(self, x, s, *rest)


@bug(1, GEMMA, first="initial blocks.0.attention_norm")
@replaces(gpt.GPT, "init_parameter")
def norms_begin_at_2(self, name, shape, generator, original=gpt.GPT.init_parameter):
    """A norm whose weight is stored less 1 begins with weight 1, so it doubles what it gives."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    return original(self, name, shape, generator)
