"""What pipeline parallelism needs: scales, the right micro-batch, tied embeddings, one norm."""

import sys

import torch.distributed as dist

import optimizer
import pipeline_parallel
import sharding
from course.mutations import bug, replaces
from sharding import sharding_of

ZB_H1 = dict(pp=2, schedule="zb-h1")


@bug(2, ZB_H1, first="step 1: gradient of head.norm")
@replaces(pipeline_parallel.Pipeline, "run")
def loss_divided_twice(
    self, schedule, forward, b, s, loss_grad, *args, original=pipeline_parallel.Pipeline.run
):
    """Each micro-batch's loss is divided by the number of micro-batches once more."""
    return original(self, schedule, forward, b, s, loss_grad / 8, *args)


@bug(2, ZB_H1, first="step 1: output of blocks.1")
@replaces(pipeline_parallel.Pipeline, "run")
def targets_of_another_micro_batch(
    self, schedule, forward, *args, original=pipeline_parallel.Pipeline.run
):
    """The last stage takes the targets of the next micro-batch."""

    def shifted(chunk, k, x):
        if self.stages[chunk].head is not None:
            k = (k + 1) % 8
        return forward(chunk, k, x)

    return original(self, schedule, shifted, *args)


@bug(2, ZB_H1, first="step 1: gradient norm")
def norm_of_one_stage():
    """Each pipeline stage clips by the norm of its own layers."""
    original = optimizer.global_norm
    optimizer.global_norm = lambda parameters, stages=None: original(parameters)


@bug(2, ZB_H1, first="step 1: gradient norm")
def tied_weight_counted_twice_in_norm():
    """Both copies of the tied embedding count in the gradient norm."""
    sharding.Sharding.__getattribute__ = lambda self, name: (
        None
        if name == "copy_of" and sys._getframe(1).f_code.co_name == "global_norm"
        else object.__getattribute__(self, name)
    )


@bug(2, ZB_H1, first="step 1: gradient of blocks.1.mlp.down.weight")
@replaces(pipeline_parallel, "add_transfers")
def lost_weight_gradients(*args, original=pipeline_parallel.add_transfers):
    """ZB-H1 never computes the weight gradients of the last micro-batch."""
    programs = original(*args)
    return [[x for x in program if x[0] != "W" or x.micro_batch < 7] for program in programs]


@bug(2, dict(pp=2), first="step 1: gradient of embedding.tokens")
def no_tied_sum():
    """The two copies of the tied embedding are not summed across stages."""
    pipeline_parallel.Pipeline.sum_tied = lambda self: None


@bug(2, dict(pp=2), first="step 1: gradient of embedding.tokens")
@replaces(pipeline_parallel.Pipeline, "sum_tied")
def half_a_tied_sum(self):
    """Both copies of the tied embedding take the first stage's gradient."""
    for p in self.parameters():
        if sharding_of(p).copy_of or (
            self.rank == 0 and p is self.stages[0].embedding.tokens.weight
        ):
            dist.broadcast(p.main_grad, 0)
