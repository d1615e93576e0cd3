"""Every layout gives the loss, the gradients and the parameters of one device."""
import pytest
import torch

import fsdp
import gpt
import optimizer
import train as trainer
from parity import LLAMA, SMALL, differs, same, train


@pytest.mark.parametrize("base", [SMALL, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("world, micro", [(1, 1), (1, 4), (2, None), (2, 1), (2, 2), (4, None), (4, 1)])
def test_data_parallel(world, micro, base):
    same(train(world, base=base, micro_batch_size=micro), train(base=base))


def test_float32():
    same(train(2, micro_batch_size=2, precision="fp32", steps=1), train(precision="fp32", steps=1), 1e-5)


# Each of these removes one thing that parity needs. If a test below fails, the gate has gone blind to it.

def no_sum():
    fsdp.DataParallel.reduce_gradients = fsdp.DataParallel.launch = lambda self, everything=False: None


def no_accumulation():
    """Only the last micro-batch's gradient remains."""
    original = fsdp.DataParallel.accumulate

    def accumulate(self, p):
        p.main_grad.zero_()
        original(self, p)
    fsdp.DataParallel.accumulate = accumulate


def early_reduction():
    """Buckets leave after the first micro-batch."""
    original = fsdp.DataParallel.zero

    def zero(self):
        original(self)
        self.last = True
    fsdp.DataParallel.zero = zero


def local_mean():
    """An average of averages: each rank divides by its own tokens."""
    def forward_backward(self, step, dataset, original=trainer.Trainer.forward_backward):
        samples = self.samples(step)
        share = len(samples) // self.dp
        mine = dataset.counted_tokens(samples[self.dp_rank * share:(self.dp_rank + 1) * share])
        dataset.counted_tokens = lambda s: mine * self.dp
        loss = original(self, step, dataset)
        del dataset.counted_tokens
        return loss
    trainer.Trainer.forward_backward = forward_backward


def local_dropout():
    """Masks by the row in this rank's batch, not by the global sample."""
    trainer.dropout_key = lambda seed, step, samples: gpt.dropout_key(seed, step, torch.arange(len(samples)))


def wrong_samples():
    """Every rank trains on the first share."""
    trainer.Trainer.dp_rank = property(lambda self: 0, lambda self, value: None)


def weights_by_rank():
    import torch.distributed as dist
    import sharding
    original = sharding.generator
    sharding.generator = lambda seed, name: original(seed + dist.get_rank(), name)


def local_clip():
    """Each rank clips by the norm of its own gradient before the sum."""
    original = fsdp.DataParallel.reduce_gradients

    def reduce_gradients(self):
        norm = optimizer.global_norm(self.parameters).item()
        for p in self.parameters:
            p.main_grad.mul_(min(1.0, 0.5 / norm))
        original(self)
    fsdp.DataParallel.reduce_gradients = reduce_gradients
    fsdp.DataParallel.last_backward = lambda self: None


@pytest.mark.parametrize("mutate", [no_sum, no_accumulation, early_reduction, local_mean, local_dropout, wrong_samples, weights_by_rank,
                                    local_clip])
def test_gate_sees(mutate):
    differs(train(2, micro_batch_size=2, mutate=mutate), train())


def same_mask_every_step():
    trainer.dropout_key = lambda seed, step, samples: gpt.dropout_key(seed, 1, samples)


def test_gate_sees_the_step_in_the_mask():
    differs(train(2, mutate=same_mask_every_step), train())
