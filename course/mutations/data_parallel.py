"""What data parallelism and ZeRO need: sums of gradients, shards, one norm."""

import torch.distributed as dist

import fsdp
import optimizer
from course.mutations import bug, replaces

# Several micro-batches on each rank.
MICRO = dict(micro_batch_size=2)
ZERO_1, ZERO_2, ZERO_3 = (MICRO | dict(zero_stage=stage) for stage in (1, 2, 3))


@bug(2, MICRO, first="step 1: gradient of head.norm")
def no_gradient_sum():
    """Each data-parallel rank keeps its own gradient: no all-reduce."""

    def nothing(self, everything=False):
        pass

    fsdp.DataParallel.reduce_gradients = fsdp.DataParallel.reduce_in_order = nothing


@bug(2, MICRO, first="step 1: gradient of head.norm")
@replaces(fsdp.DataParallel, "accumulate")
def no_accumulation(self, p, original=fsdp.DataParallel.accumulate):
    """Only the last micro-batch's gradient remains."""
    p.main_grad.zero_()
    original(self, p)


@bug(2, MICRO, first="step 1: gradient of head.norm")
def early_reduction():
    """Gradients are reduced after the first micro-batch, before the others have added theirs."""
    original = fsdp.DataParallel.zero_grad

    def zero_grad(self):
        original(self)
        self.begin_backward()

    fsdp.DataParallel.zero_grad = zero_grad
    fsdp.DataParallel.next_backward_is_last = fsdp.DataParallel.finish_reductions
    fsdp.DataParallel.check_use = lambda self, unit: None


@bug(2, MICRO, first="step 1: gradient of head.norm")
def local_clip():
    """Each rank clips by the norm of its own gradient, before the sum."""
    original = fsdp.DataParallel.reduce_gradients

    def reduce_gradients(self):
        norm = optimizer.global_norm(self.parameters).item()
        for p in self.parameters:
            p.main_grad.mul_(min(1.0, 0.5 / norm))
        original(self)

    fsdp.DataParallel.reduce_gradients = reduce_gradients
    fsdp.DataParallel.next_backward_is_last = lambda self: None


class Lost:
    """A collective that never was."""

    def wait(self):
        pass


@bug(2, ZERO_1, ZERO_2, ZERO_3, first="step 1: gradient of head.norm")
@replaces(fsdp, "reduce_scatter")
def no_reduce_scatter(mine, x, group, async_op):
    """Each rank keeps its shard of its own gradient: no sum over ranks."""
    mine.copy_(x.view(group.size(), -1)[group.rank()])
    return Lost()


@bug(2, ZERO_1, ZERO_2, ZERO_3, first="step 1: gradient of head.norm")
@replaces(fsdp, "reduce_scatter")
def shard_of_another_rank(mine, x, original=fsdp.reduce_scatter, **options):
    """Each rank gets another rank's shard of the summed gradient."""
    return original(mine, x.view(2, -1).flip(0).reshape(-1), **options)


@bug(
    4,
    *(layout | dict(data_parallel_replicate_degree=2) for layout in (ZERO_1, ZERO_2, ZERO_3)),
    first="step 1: gradient of head.norm",
)
@replaces(fsdp, "apply")
def no_sum_over_shard_groups(*args, original=fsdp.apply, **options):
    """Hybrid sharding sums gradients inside each group of ranks, and not over the groups."""
    return original(*args, **options | dict(replicate_group=None))


@bug(2, ZERO_1, ZERO_2, first="step 1: updated embedding.tokens")
def no_parameter_gather():
    """Each rank updates its own shard alone, and never sees the others' updates."""
    fsdp.DataParallel.renew_parameters = lambda self: None


@bug(2, ZERO_3, first="step 1: updated embedding.tokens")
def stale_parameters():
    """Stage 3 gathers a parameter once, and uses the gathered copy after the update too."""
    fsdp.FullySharded.free = lambda self, unit: None


@bug(2, ZERO_3, first="step 1: output of embedding")
@replaces(fsdp, "all_gather")
def no_all_gather(whole, mine, group, async_op):
    """Stage 3 finds zeros where another rank's shard should be."""
    whole.view(2, -1)[1 - group.rank()] = 0
    whole.view(2, -1)[group.rank()] = mine
    return Lost()


@bug(2, ZERO_2, ZERO_3, first="step 1: gradient of head.norm")
@replaces(fsdp.DataParallel, "finish_reductions")
def last_micro_batch_only(self, original=fsdp.DataParallel.finish_reductions, **options):
    """Stages 2 and 3 forget the summed gradients of the micro-batches before."""
    for unit in self.reductions:
        unit.summed_grads = None
    original(self, **options)


@bug(2, ZERO_1, ZERO_2, ZERO_3, first="step 1: gradient norm")
def norm_of_one_shard():
    """Each rank clips by the norm of its own shard of the gradient."""
    optimizer.dist.all_reduce = lambda x, group=None, original=dist.all_reduce: (
        None if x.dim() == 0 else original(x, group=group)
    )
