"""What BERT and T5 need beside a GPT: parts that several stages or ranks share."""

import torch

import gpt
import pipeline_parallel
import sequence_parallel
from course.mutations import bug, replaces
from models import bert, t5

BERT = dict(command="bert.py", model="tiny", tp=2, sequence_parallel=True)
T5 = dict(command="t5.py", model="tiny", ffn_hidden_size=96, head_dim=8, target_length=6)
T5_STAGES = T5 | dict(num_layers=4, encoder_layers=2, pp=2, layer_split=[3, 1])


@bug(2, T5_STAGES, first="step 1: gradient of positions")
@replaces(t5.T5, "run_blocks")
def no_gradient_from_later_stages(self, x, s, context, original=t5.T5.run_blocks):
    """The encoder's output gets no gradient from the decoder's later stages."""
    if self.embedding is None:
        n = context.source * x.shape[1] // s
        x = torch.cat((x[:, :n].detach(), x[:, n:]), 1)
    return original(self, x, s, context)


@bug(2, T5_STAGES, first="step 1: gradient of positions")
def no_table_sum():
    """The copies of the table of relative positions are not summed across stages."""
    pipeline_parallel.Pipeline.sum_shared = lambda self: None


@bug(2, T5 | dict(tp=2), first="step 1: gradient of positions")
def no_memory_f():
    """The gradient of the encoder's output is that of each rank's heads of cross attention."""
    t5.Attention.__setattr__ = lambda self, name, module: torch.nn.Module.__setattr__(
        self, name, gpt.ProjectTogether() if name == "project_kv" else module
    )


@bug(2, T5 | dict(tp=2), first="step 1: output of blocks.0")
@replaces(t5.RelativePositions, "shard_heads")
def biases_of_the_first_heads(self, group):
    """Every rank's heads read the biases of the first heads."""
    heads = self.weight.shape[2] // group.size()
    self.forward = lambda *args: t5.RelativePositions.forward(self, *args)[:, :heads]


@bug(2, BERT, first="step 1: output of embedding")
@replaces(bert.Embedding, "forward")
def types_of_the_first_slice(self, tokens, context, original=bert.Embedding.forward):
    """Every slice of the sequence gets the token types of the first."""
    first = context.types.chunk(2, 1)[0]
    return original(self, tokens, context._replace(types=first.repeat(1, 2)))


@bug(2, BERT, first="step 1: gradient of embedding.types")
@replaces(sequence_parallel, "synchronise")
def no_type_gradient_sum(part, group, original=sequence_parallel.synchronise):
    """The gradient of token types is that of each rank's slice of the sequence."""
    types = getattr(part, "types", None)
    if types is not None:
        types.requires_grad_(False)
    original(part, group)
    if types is not None:
        types.requires_grad_(True)
