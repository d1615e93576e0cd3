import pytest
import torch
import torch.distributed as dist

import sharding
from base.model_config import GPTConfig
from course import demo, ranks
from sharding import Shard, Sharding, shard_of, sharding_of

SHAPES = [(8, 6), (7, 5), (1, 3), (3, 1), (9,)]


def cut_and_gather(rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp = mesh.get_group("dp")
    tp = mesh.get_group("tp")
    world = dist.group.WORLD
    for shape in SHAPES:
        whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        last = len(shape) - 1
        for placements in [
            (),
            (Shard(0, world),),
            (Shard(last, tp),),
            (Shard(0, tp), Shard(0, dp)),
            (Shard(last, dp), Shard(0, tp)),
        ]:
            record = Sharding(shape, placements)
            part = shard_of(whole, record)
            assert torch.equal(sharding.gather(part, record), whole), (shape, placements)
            # every element is on some rank once, padding is zero
            total = (part**2).sum()
            for shard in placements:
                dist.all_reduce(total, group=shard.group)
            torch.testing.assert_close(total, (whole**2).sum())
    return shard_of(torch.arange(5.0), Sharding((5,), (Shard(0, world),))).tolist()


def test_cut_and_gather():
    # by hand: 5 over 4 ranks is 2 each
    assert ranks.run(cut_and_gather, 4) == [[0, 1], [2, 3], [4, 0], [0, 0]]


def test_initial_weights_depend_on_seed_and_name_alone():
    def build(seed, layers):
        model = demo.meta_model(GPTConfig(layers, 32, 4, seq_length=8, vocab_size=40))
        sharding.init(model, seed, "cpu", torch.float32)
        return {name: p.detach() for name, p in model.named_parameters()}

    two = build(0, 2)
    three = build(0, 3)
    other = build(1, 2)
    # whatever else is in the model
    assert torch.equal(two["blocks.1.mlp.up.weight"], three["blocks.1.mlp.up.weight"])
    assert not torch.equal(two["blocks.1.mlp.up.weight"], two["blocks.0.mlp.up.weight"])
    assert not torch.equal(two["blocks.1.mlp.up.weight"], other["blocks.1.mlp.up.weight"])
    assert two["blocks.0.mlp.up.weight"].std() == pytest.approx(0.02, rel=0.1)
    # / √(2 · 2 layers)
    assert two["blocks.0.mlp.down.weight"].std() == pytest.approx(0.02 / 2, rel=0.1)
    assert all((p == 0).all() for n, p in two.items() if n.endswith("bias"))
    assert all((p == 1).all() for n, p in two.items() if n.endswith("norm.weight"))


class Second:
    """The second of two ranks: to take a shard needs no communication."""

    def size(self):
        return 2

    def rank(self):
        return 1


def test_init_cuts_what_it_drew():
    def init_parameter(name, shape, generator):
        return torch.randn(shape, generator=generator)

    def weight(rows, *placements):
        model = torch.nn.Linear(3, rows, bias=False, device="meta")
        model.weight.sharding = Sharding((4, 3), placements)
        model.init_parameter = init_parameter
        sharding.init(model, 0, "cpu", torch.float64)
        return model.weight

    part = weight(2, Shard(0, Second()))
    assert torch.equal(part, weight(4)[2:])
    assert part.dtype == torch.float64
    assert sharding_of(part).shape == (4, 3)
