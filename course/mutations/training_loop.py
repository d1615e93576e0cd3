"""What the training loop must get right under every layout: samples, masks, weights, counts."""

import torch
import torch.distributed as dist

import sharding
import train as trainer
from base import dropout
from course.mutations import bug, replaces


@bug(2, dict(micro_batch_size=2), first="step 1: loss")
@replaces(trainer.Trainer, "forward_backward")
def mean_of_means(self, step, dataset, original=trainer.Trainer.forward_backward):
    """Each rank divides by its own count of tokens: an average of averages."""
    samples = self.task.samples(step)
    share = len(samples) // self.dp
    mine = dataset.counted_tokens(samples[self.dp_rank * share : (self.dp_rank + 1) * share])
    dataset.counted_tokens = lambda s: mine * self.dp
    loss = original(self, step, dataset)
    del dataset.counted_tokens
    return loss


@bug(2, dict(micro_batch_size=2), first="step 1: output of embedding")
def dropout_by_local_row():
    """Masks depend on the row in this rank's batch, not on the global sample."""
    trainer.dropout_key = lambda seed, step, samples: dropout.dropout_key(
        seed, step, torch.arange(len(samples))
    )


@bug(2, dict(micro_batch_size=2), first="step 1: output of embedding")
def same_samples_on_every_rank():
    """Every data-parallel rank trains on the first rank's samples."""
    trainer.Trainer.dp_rank = property(lambda self: 0, lambda self, value: None)


@bug(2, dict(micro_batch_size=2), first="initial embedding.tokens")
def weights_by_rank():
    """Each rank draws its initial weights from its own seed."""
    original = sharding.generator
    sharding.generator = lambda seed, name: original(seed + dist.get_rank(), name)


@bug(2, dict(), first="step 2: output of embedding")
def same_mask_every_step():
    """Dropout masks do not depend on the step."""
    trainer.dropout_key = lambda seed, step, samples: dropout.dropout_key(seed, 1, samples)


@bug(2, dict(tp=2), first="step 1: loss")
@replaces(trainer.Trainer, "forward_backward")
def loss_counted_by_every_rank(self, *args, original=trainer.Trainer.forward_backward):
    """All tensor-parallel ranks add the same loss to the reported one."""
    group = self.groups.tp
    self.groups.tp = None
    loss = original(self, *args)
    self.groups.tp = group
    return loss
