import pytest
import torch
import torch.distributed as dist

import recompute
import sequence_parallel
import sharding
import tensor_parallel
from base.dropout import dropout_key
from base.model_config import GPTConfig
from course import demo, parity, ranks
from gpt import GPT, Context
from planning.counters import LiveTensors
from run.pretraining import Config

B = 2
S = 8
H = 32


def build(group, dtype=torch.float32, **fields):
    shape = dict(num_layers=1, hidden_size=H, num_heads=4, seq_length=S, vocab_size=61)
    model = demo.meta_model(GPTConfig(**shape, dropout=0.1, **fields))
    tensor_parallel.apply(model, group)
    sequence_parallel.apply(model, group)
    sequence_parallel.overlap_backward(model)
    sharding.init(model, 0, "cpu", dtype)
    return model


def counted(rank, kind):
    model = build(dist.group.WORLD)
    recompute.apply(model, kind)
    block = model.blocks["0"]
    context = Context(dropout_key(0, 1, torch.arange(B)))
    x = torch.randn(B, S // 2, H, requires_grad=True)
    with ranks.Collectives() as forward:
        y = block(x, context)
    with ranks.Collectives() as backward:
        y.sum().backward()
    return forward.calls, backward.calls


def test_collectives_of_the_paper():
    """Each all-reduce of tensor parallelism is a reduce-scatter and an all-gather of the same
    tensor. Besides: backward gathers the two inputs of column-parallel layers again, and sums the
    gradients of six weights of h elements at once."""
    size = B * S * H * 4
    gather = ("all-gather", size)
    scatter = ("reduce-scatter", size)
    norms = ("all-reduce", 6 * H * 4)
    forward, backward = ranks.run(counted, 2, "none")[0]
    assert forward == [gather, scatter] * 2
    # ḡ's adjoint, the input again, g's adjoint; twice
    assert backward == [gather, gather, scatter] * 2 + [norms]
    assert ranks.run(counted, 2, "full")[0][1] == forward + backward


def live_peaks(rank):
    """{(sequence parallel, micro-batches): most bytes of tensors that live in a step}"""
    peaks = {}
    for sequence in (False, True):
        for m in (2, 8):
            config = Config(
                **parity.SMALL | dict(seq_length=64, global_batch_size=m),
                tp=2,
                sequence_parallel=sequence,
                micro_batch_size=1,
            )
            run = parity.Run(2, config)
            run.train(1)
            with LiveTensors() as live:
                run.trainer.forward_backward(2, run.dataset)
            peaks[sequence, m] = live.peak
    return peaks


def test_memory_does_not_grow_with_micro_batches():
    """Of all tensors that live. Sequence parallelism needs less than tensor parallelism alone."""
    peaks = ranks.run(live_peaks, 2)[0]
    for sequence in (False, True):
        assert peaks[sequence, 8] <= 1.02 * peaks[sequence, 2], peaks
    for m in (2, 8):
        assert peaks[True, m] < 0.95 * peaks[False, m], peaks


def test_bad_input():
    words = (
        "seq_length 30: must be divisible by tp 4 under sequence parallelism; 28 or 32 would fit"
    )
    with pytest.raises(ValueError, match=words):
        sequence_parallel.check(GPTConfig(1, 32, 4, seq_length=30), 4)
    assert "tensor_parallel.apply" in ranks.run(wrong_order, 1)[0]


def wrong_order(rank):
    model = GPT(GPTConfig(1, 32, 4, seq_length=8, vocab_size=61))
    with pytest.raises(ValueError) as e:
        sequence_parallel.apply(model, dist.group.WORLD)
    model = build(dist.group.WORLD)
    with pytest.raises(ValueError, match="already"):
        sequence_parallel.apply(model, dist.group.WORLD)
    with pytest.raises(ValueError, match="12 tokens is longer than seq_length 8"):
        model(torch.zeros(1, 12, dtype=torch.long)[:, ::1])
    model = demo.meta_model(model.config)
    tensor_parallel.apply(model, dist.group.WORLD)
    recompute.apply(model, "full")
    with pytest.raises(ValueError, match=r"recompute\.apply comes after"):
        sequence_parallel.apply(model, dist.group.WORLD)
    return str(e.value)
