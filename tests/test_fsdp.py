import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
import ranks


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])


def buckets_while_backward_runs(rank):
    fsdp.BUCKET_BYTES = 280                                      # a layer a bucket
    model = small_model()
    reference = copy.deepcopy(model)
    gradients = fsdp.shard(model, dist.group.WORLD)
    log, calls = [], []
    all_reduce = dist.all_reduce

    def counted(tensor, **options):
        calls.append(tensor.numel() * tensor.element_size())
        log.append(f"send {len(calls) - 1}")
        return all_reduce(tensor, **options)
    fsdp.dist.all_reduce = counted
    for i, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, i=i: log.append(f"backward {i}"))
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(rank))
    sent_early = []
    for i in range(3):
        if i == 2:
            gradients.last_backward()
        model(x[i]).square().sum().backward()
        sent_early.append(len(calls))
    gradients.reduce_gradients()
    fsdp.dist.all_reduce = all_reduce
    for i in range(3):
        reference(x[i]).square().sum().backward()
    for p, q in zip(model.parameters(), reference.parameters()):
        dist.all_reduce(q.grad)
        torch.testing.assert_close(p.main_grad, q.grad)
        assert p.grad is None
    return log[log.index("send 0") - 1:], sent_early, sum(calls), sum(p.numel() * 4 for p in model.parameters())


def test_buckets_go_while_the_last_backward_runs():
    """Nothing is sent on the accumulation steps; on the last one a layer's gradients leave before the next layer's backward ends."""
    for log, sent_early, sent, size in ranks.run(buckets_while_backward_runs, 2):
        assert sent_early[:2] == [0, 0] and sent_early[2] == 5
        assert sent == size                                      # every gradient once: Ψ elements into all-reduces
        for bucket, layer in enumerate((3, 2, 1, 0)):            # bucket k holds layer 4 - k
            assert log.index(f"send {bucket}") < log.index(f"backward {layer}", log.index(f"send {0}")), log


def unused_parameter(rank):
    model = small_model()
    model.extra = nn.Linear(2, 2)
    gradients = fsdp.shard(model, dist.group.WORLD)
    for step in range(2):                                        # used by rank 0 in the first step, by nobody in the second
        gradients.zero()
        gradients.last_backward()
        y = nn.Sequential.forward(model[:5], torch.ones(1, 8)).sum()
        if rank == 0 and step == 0:
            y = y + model.extra(torch.ones(1, 2)).sum()
        y.backward()
        gradients.reduce_gradients()
    return model.extra.weight.main_grad, model[0].bias.main_grad.clone()


def test_unused_parameters_get_zeros_not_an_old_gradient():
    (a, bias), (b, _) = ranks.run(unused_parameter, 2)
    assert (a == 0).all() and (b == 0).all() and (bias != 0).any()


def test_unknown_stage():
    with pytest.raises(ValueError, match="stage 7"):
        fsdp.shard(small_model(), None, 7)


def test_lesson(capsys):
    fsdp.main()
    out = capsys.readouterr().out
    assert "in all 13,184,000 bytes, 4 for each of 3,296,000 parameters" in out               # counted, not computed
    assert re.search(r"left when (\d+) of 39", out) and int(re.search(r"left when (\d+) of 39", out)[1]) < 39
    assert float(out.split("gradient ")[1].split()[0]) < 1e-5
