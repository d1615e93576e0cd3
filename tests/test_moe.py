"""Routers against the papers, experts against a loop over tokens."""

import json
import math
import random
import types
from fractions import Fraction
from functools import partial

import processes
import pytest
import small_run
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity import DATA, SMALL, again, trainer_of
from torch.overrides import TorchFunctionMode

import fsdp
import moe
from base import transport_plan
from base.grouped_linear import grouped_by_library
from base.groups import Groups
from base.model_config import MoEConfig, flops_per_token
from course import ranks
from gpt import GPT
from run import rules
from run.config import ConfigError
from run.pretraining import Config

FACTS = torch.tensor([[2.0, 1.0], [2.2, 1.0], [1.5, 1.0], [3.0, 0.0]])


# --- routers --------------------------------------------------------------------------------------


def make(e, k=1, h=16, ffn=24, router="sinkhorn", seed=0, **fields) -> moe.MoE:
    """An expert layer in float64, with weights large enough for its choices to differ."""
    shape = dict(num_layers=1, hidden_size=h, num_heads=1, ffn_hidden_size=ffn, vocab_size=3)
    experts = dict(num_experts=e, router=router, router_topk=k)
    layer = moe.MoE(MoEConfig(**shape, **experts, **({"llama": h % 2 == 0} | fields))).double()
    g = torch.Generator().manual_seed(seed)
    for p in layer.parameters():
        p.data = torch.randn(p.shape, generator=g, dtype=torch.float64) / 4
    return layer


def test_sinkhorn_by_hand():
    """The published example: three tokens to expert 1 and one to 0, six iterations; probabilities
    are of the raw logits."""
    layer = make(2)
    chosen = layer.router.scores(FACTS, True).argmax(1, keepdim=True)
    layer.router.temperature = 1.0
    assert layer.router.scores(FACTS, True).argmax(1).tolist() == [1, 1, 1, 0]
    probabilities = layer.router.probabilities(FACTS, torch.tensor([[1], [1], [1], [0]]))
    expected = torch.tensor([0.73106, 0.73106, 0.73106, 0.95257])
    torch.testing.assert_close(probabilities.flatten(), expected, atol=1e-5, rtol=0)
    # at a low temperature two each
    assert sorted(chosen.flatten().tolist()) == [0, 0, 1, 1]
    # six iterations
    plans = [transport_plan.sinkhorn(FACTS, max_iterations=n) for n in (5, 6)]
    assert [torch.equal(plan, transport_plan.sinkhorn(FACTS)) for plan in plans] == [False, True]


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.02])
@pytest.mark.parametrize("n, e", [(4096, 64), (7, 3), (1, 1), (2, 5)])
def test_sinkhorn_is_doubly_balanced(n, e, temperature):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(n, e, generator=g)
    plan = transport_plan.sinkhorn(logits, temperature, 1e-3)
    assert (plan.sum(0) * e - 1).abs().max() <= 1e-9
    assert (plan.sum(1) * n - 1).abs().max() <= (1e-2 if n == 4096 else 5e-2)
    shifted = transport_plan.sinkhorn(
        logits + 100 * torch.randn(n, 1, generator=g), temperature, 1e-3
    )
    # a row's constant makes no difference, but for rounding it in float32
    torch.testing.assert_close(shifted, plan, rtol=1e-2, atol=1e-9)


def test_sinkhorn_is_the_formula():
    """Without the row maximum and the gradual way down: C = exp(logits / temperature), scaled until
    it is balanced."""
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)).double()
    for temperature in (1.0, 0.4):
        cost = (logits / temperature).exp()
        d1 = torch.ones(6).double()
        for _ in range(5000):
            d0 = 1 / 50 / (cost @ d1)
            d1 = 1 / 6 / (cost.t() @ d0)
        found = transport_plan.sinkhorn(logits, temperature, 1e-13, 100000)
        torch.testing.assert_close(found, d0.unsqueeze(1) * cost * d1, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("temperature", [1.0, 0.02, 0.001])
def test_large_logits(temperature):
    """Where d0, d1 and exp(logits) would be too large or too small for any float."""
    g = torch.Generator().manual_seed(0)
    huge = torch.rand(512, 8, generator=g) * 2e4 - 1e4
    plan = transport_plan.sinkhorn(huge, temperature, max_iterations=100)
    assert plan.isfinite().all() and (plan >= 0).all()
    logits = torch.randn(512, 8, generator=g)
    # an expert that everybody shuns gets its share
    for gap in (5, 20, 300):
        logits[:, 3] = logits[:, 3].clamp(max=3) - gap
        load = transport_plan.sinkhorn(logits, temperature, 1e-2).sum(0) * 8
        chosen = (
            transport_plan.sinkhorn(logits, temperature, 1e-2).argmax(1).bincount(minlength=8) / 64
        )
        torch.testing.assert_close(load, torch.ones(8).double(), rtol=1e-9, atol=0)
        assert temperature == 1 or (chosen - 1).abs().max() < 0.15, (gap, chosen)
    # a model that diverged ends its step, and is skipped there
    assert transport_plan.sinkhorn(torch.full((4, 2), torch.nan)).shape == (4, 2)


def test_a_low_temperature_balances_the_choices():
    logits = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    logits += torch.linspace(-2, 2, 8)

    def load(scores):
        return scores.argmax(1).bincount(minlength=8).max().item() / 512

    raw = load(logits)
    paper = load(transport_plan.sinkhorn(logits))
    low = load(transport_plan.sinkhorn(logits, 0.02))
    assert raw > 3 and low < 1.05 < paper < raw


@pytest.mark.parametrize("n, e", [(128, 8), again(32768, 8), (4096, 64)])
@pytest.mark.parametrize("scale, skew", [(1, 2), (3, 3)])
def test_a_gpus_iterations_reach_the_tolerance_of_a_cpu(n, e, scale, skew):
    """In float32, for the tokens of a sequence of tiny-moe and of mixtral-8x7b, and 64 experts. The
    load of the plan, as `balance` measures it."""
    g = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(n, e, generator=g) + skew * torch.randn(e, generator=g)
    f = transport_plan.potentials_in_fixed_time(logits, 0.02)
    load = e * ((logits + f).double() / 0.02).softmax(1).mean(0)
    assert (1 - load).abs().mean() <= 1e-2
    # nearly all tokens go where a CPU sends them
    cpu = logits + transport_plan.balance(logits, 0.02, 1e-2)[1]
    assert ((logits + f).argmax(1) == cpu.argmax(1)).float().mean() > 0.97


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_a_gpus_iterations_are_sinkhorns(temperature):
    """Up to a constant, which adds the same to all logits."""
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)).double()
    exact = transport_plan.balance(logits, temperature, 1e-13, 100_000)[1]
    found = transport_plan.potentials_in_fixed_time(logits, temperature)
    torch.testing.assert_close(found - found[0], exact - exact[0], rtol=0, atol=1e-6)


class Reads(TorchFunctionMode):
    """Counts calls that copy a tensor to the host."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.Tensor.tolist, torch.Tensor.item)
        return function(*args, **(kwargs or {}))


def test_what_routing_copies_to_the_host():
    """Sinkhorn nothing: tensors on the meta device have no values to copy. All-to-all's sizes go in
    one copy."""
    layer = make(4)
    assert layer.router.scores(torch.empty(6, 4, device="meta"), training=True).is_meta
    routing = layer.routing
    routing.group = types.SimpleNamespace(size=lambda: 2)
    routing.exchange = lambda counts: counts
    with Reads() as reads:
        _, sent, received, *_ = routing.across_ranks(torch.tensor([1, 2, 3, 4]))
    assert sent == [3, 7] and received == [3, 7] and reads.count == 1


def test_later_choices_are_in_the_plans_order():
    """Also where the plan is 0 in any float."""
    logits = 10 * torch.randn(1024, 8, generator=torch.Generator().manual_seed(0))
    router = make(8, 4).router
    chosen = router.scores(logits, True).topk(4).indices
    assert (transport_plan.sinkhorn(logits, 0.02, 1e-2).gather(1, chosen) == 0).any()
    assert chosen[:, 0].bincount(minlength=8).max() < 1.05 * 128
    assert chosen.flatten().bincount(minlength=8).max() < 1.1 * 512
    torch.testing.assert_close(
        router.scores(logits, True).argsort(1),
        (transport_plan.balance(logits, 0.02, 1e-2)[1] + logits).argsort(1),
    )


def test_probabilities_and_losses_by_hand():
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    chosen = torch.tensor([[2, 1], [0, 1]])
    p = logits.softmax(-1)
    top = make(3, 2, router="topk", aux_loss=0.5, z_loss=0.1).router
    of_two = p[0, [2, 1]] / p[0, [2, 1]].sum()
    torch.testing.assert_close(top.probabilities(logits, chosen)[0], of_two)
    share = torch.tensor([0.25, 0.5, 0.25])
    balance = 0.5 * 3 * (share * p.mean(0)).sum()
    z = 0.1 * logits.exp().sum(1).log().square().mean()
    # of a mean over two tokens
    torch.testing.assert_close(top.losses(logits, share) / 2, balance + z)
    of_one = make(3, router="topk").router.probabilities(logits, chosen[:, :1])
    torch.testing.assert_close(of_one.flatten(), p[[0, 1], [2, 0]])
    # sinkhorn, k > 1: softmax over all
    torch.testing.assert_close(make(3, 2).router.probabilities(logits, chosen), p.gather(1, chosen))


# --- experts against a loop -----------------------------------------------------------------------


def capacity_of(layer: moe.MoE, n: int) -> float:
    """The most of n tokens that one expert takes. As a fraction, so that it is exact."""
    factor = Fraction(str(layer.routing.capacity_factor))
    if not factor:
        return math.inf
    choices = n * layer.router.k
    return min(choices, math.ceil(factor * choices / len(layer.router.weight)))


def probability(r: moe.Router, z: torch.Tensor, chosen: torch.Tensor, n: int) -> torch.Tensor:
    """Of expert n for one token, with logits z: [E]; chosen: [k]"""
    p = z.softmax(0)
    if isinstance(r, moe.SinkhornRouter):
        return z[n].sigmoid() if r.k == 1 else p[n]
    return p[n] if r.k == 1 else p[n] / p[chosen].sum()


def expert(layer: moe.MoE, t: torch.Tensor, n: int) -> torch.Tensor:
    """Expert n of one token. t: [h] -> [h]"""
    up = layer.up.weight[n] @ t
    if layer.gate is None:
        inner = F.gelu(up, approximate="tanh")
    else:
        inner = F.silu(layer.gate.weight[n] @ t) * up
    return layer.down.weight[n] @ inner


def loop(layer: moe.MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer, one token and one expert at a time. x: [b, s, h] -> ([b, s, h], the router's
    losses, which training adds)"""
    r = layer.router
    b, s, h = x.shape
    tokens = x.reshape(-1, h)
    y = []
    taken = torch.zeros(len(r.weight), dtype=torch.long)
    logits = [r.weight @ t for t in tokens]
    scores = r.scores(torch.stack(logits).detach(), layer.training)
    chosen = scores.sort(descending=True).indices[:, : r.k]
    kept = {}
    e = len(r.weight)
    limit = capacity_of(layer, len(tokens)) if layer.training else torch.inf
    for choice in range(r.k):
        for i in range(len(tokens)):
            kept[i, choice] = taken[chosen[i, choice]] < limit
            taken[chosen[i, choice]] += 1
    for i, (t, z) in enumerate(zip(tokens, logits)):
        total = torch.zeros(h, dtype=x.dtype)
        for choice, n in enumerate(chosen[i].tolist()):
            if kept[i, choice]:
                total = total + probability(r, z, chosen[i], n) * expert(layer, t, n)
        y.append(total)
    share = taken.double() / (len(tokens) * r.k)
    aux = e * sum(
        share[j] * torch.stack([z.softmax(0)[j] for z in logits]).mean() for j in range(e)
    )
    z_loss = torch.stack([z.exp().sum().log().square() for z in logits]).mean()
    return torch.stack(y).view(b, s, h), r.aux_loss * aux + r.z_loss * z_loss


def statistics_by_hand(layer: moe.MoE, x: torch.Tensor, choices: torch.Tensor) -> dict[str, float]:
    """What metrics are made of, a token at a time. choices: [E]"""
    z = [layer.router.weight.detach() @ t for t in x.reshape(-1, x.shape[-1])]
    p = [t.softmax(0) for t in z]
    n = len(z)
    e = len(choices)
    k = layer.router.k
    assert choices.sum() == n * k
    limit = capacity_of(layer, n)
    return {
        "tokens": n,
        "dropped_share": sum(max(0, c - limit) for c in choices.tolist()),
        "router_entropy": -sum((t * t.log()).sum().item() for t in p),
        "load_balancing_loss": e * sum((t @ choices).item() for t in p) / (n * k),
        "z_loss": sum(t.exp().sum().log().item() ** 2 for t in z),
    }


def draw(seed: int) -> tuple[moe.MoE, torch.Tensor]:
    g = random.Random(seed)
    e = g.choice([1, 2, 3, 4, 6, 7])
    router = g.choice(["sinkhorn", "topk"])
    losses = dict(aux_loss=g.choice([0.0, 0.5]) * (router == "topk"), z_loss=g.choice([0.0, 0.5]))
    k = g.randint(1, min(e, 3))
    sizes = dict(h=2 * g.randint(1, 6), ffn=g.randint(1, 9), llama=g.random() < 0.5)
    capacity = g.choice([0.0, 0.0, 0.3, 1.0, 1.1, 1e30])
    layer = make(e, k, router=router, seed=seed, capacity_factor=capacity, **sizes, **losses)
    x = normal(g.randint(1, 3), g.randint(1, 12), sizes["h"], seed=seed)
    return layer.train(g.random() < 0.8), x.requires_grad_()


def normal(*shape, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def close(a, b, what):
    worst = (a - b).abs().max().item() / max(1e-3, b.abs().max().item())
    assert worst <= 1e-10, (what, worst)


def test_equals_a_loop_over_tokens():
    """Output and gradients, over random shapes; some experts get no token, some tokens are
    dropped."""
    empty = dropped = 0
    for seed in range(120):
        layer, x = draw(seed)
        weight = normal(*x.shape, seed=seed)
        y, loss = loop(layer, x)
        ((y * weight).sum() + (loss if layer.training else 0)).backward()
        expected = {}
        for n, p in [*layer.named_parameters(), ("x", x)]:
            expected[n] = torch.zeros_like(p) if p.grad is None else p.grad
        layer.zero_grad()
        x.grad = None
        out = layer(x)
        (out * weight).sum().backward()
        close(out, y, (seed, "output"))
        for n, p in [*layer.named_parameters(), ("x", x)]:
            close(p.grad, expected[n], (seed, n))
        if layer.training:
            e = len(layer.router.weight)
            choices, sums = layer.routing.statistics.split([e, len(moe.ROUTER_STATS)])
            sums = dict(zip(moe.ROUTER_STATS, sums.tolist()))
            assert sums == pytest.approx(statistics_by_hand(layer, x.detach(), choices), rel=1e-10)
            empty = empty + int((choices == 0).sum())
            dropped = dropped + sums["dropped_share"]
    # so both were tested
    assert empty > 10 and dropped > 100


def test_grouped_by_library():
    """What GPUs run in bf16 gives the same as the loop, values and gradients."""
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 16, generator=g).bfloat16()
    w = torch.randn(4, 24, 16, generator=g).bfloat16()
    counts = torch.tensor([7, 0, 15, 8])
    grad = torch.randn(30, 24, generator=g).bfloat16()
    found = []
    for function in (moe.grouped_linear, grouped_by_library):
        inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
        (y,) = function(inputs[0], counts, inputs[1])
        y.backward(grad)
        found.append((y, *(t.grad for t in inputs)))
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-1)


def test_the_router_computes_in_float32():
    layer = make(4).bfloat16()
    x = torch.randn(2, 5, 16).bfloat16()
    logits = layer.router(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, F.linear(x.float(), layer.router.weight.float()))


# --- in a model -----------------------------------------------------------------------------------


def statistics_of(rank: int, world: int, flags: dict):
    layout = {name: flags[name] for name in ("tp", "pp", "ep") if name in flags}
    t = trainer_of(flags, Groups.make("cpu", world, **layout) if world > 1 else Groups())
    # each step's are its own
    for step in (1, 1):
        t.forward_backward(step, DATA)
    return {name: numbers.tolist() for name, numbers in t.task.learned.statistics().items()}


def test_statistics_do_not_depend_on_the_layout():
    """Recomputation counts nothing twice, tensor-parallel ranks count once, and pipeline stages put
    their layers together."""
    base = SMALL | dict(num_experts=4, num_layers=4, expert_every=2, capacity_factor=1.0)
    base |= dict(router="topk", router_topk=2, micro_batch_size=2)
    one = ranks.run(statistics_of, 1, 1, base)[0]
    assert len(one["expert_load"]) == 2
    assert all(abs(sum(layer) - 4) < 1e-12 for layer in one["expert_load"])
    assert all(0 < x < 0.5 for x in one["dropped_share"])
    # log 4
    assert all(1 < x <= 1.3863 for x in one["router_entropy"])
    for world, flags in (
        (1, dict(recompute="full")),
        (2, dict(tp=2, sequence_parallel=True, recompute="full")),
        (2, dict(pp=2)),
        (2, dict(ep=2)),
    ):
        for found in ranks.run(statistics_of, world, world, base | flags):
            for name in one:
                torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(one[name]))


def test_recomputation_does_not_route_again():
    def count(calls, original, *args):
        calls.append(args)
        return original(*args)

    for recompute in ("none", "full"):
        calls = []
        t = trainer_of(num_experts=4, recompute=recompute)
        for layer in t.expert_layers.values():
            layer.routing.scores = partial(count, calls, layer.routing.scores)
        t.forward_backward(1, DATA)
        # one micro-batch, two layers
        assert len(calls) == 2


def test_flops_count_what_a_token_goes_through():
    shape = dict(seq_length=32, vocab_size=100, llama=True)
    experts = dict(num_experts=8, router="topk")
    dense = MoEConfig(4, 64, 4, **shape)
    same = MoEConfig(4, 64, 4, **shape, **experts, expert_every=2)
    two = MoEConfig(4, 64, 4, **shape, **experts, router_topk=2)
    router = 6 * 64 * 8
    mlp = 6 * 3 * 64 * 256
    assert flops_per_token(same) - flops_per_token(dense) == 2 * router
    assert flops_per_token(two) - flops_per_token(dense) == 4 * router + 4 * mlp
    assert list(same.expert_layers) == [1, 3] and list(dense.expert_layers) == []


def test_expert_fields_mean_nothing_without_experts():
    fields = dict(expert_every=2, router="topk", router_topk=3, aux_loss=0.1)
    assert MoEConfig(2, 16, 2, **fields) == MoEConfig(2, 16, 2)


def test_evaluation_routes_each_token_for_itself():
    """Raw logits, nothing dropped: what other tokens do makes no difference."""
    layer = make(4, capacity_factor=0.5).eval()
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[:, :5], layer(x[:, :5]))
    layer.train()
    assert not torch.allclose(layer(x)[:, :5], layer(x[:, :5]))


# --- bad input ------------------------------------------------------------------------------------

FEW = dict(seq_length=16, micro_batch_size=2)


@pytest.mark.parametrize(
    "flags, world, words",
    [
        (dict(num_experts=6, ep=4), 4, ["--ep 4", "--num-experts 6", "[1, 2]"]),
        (dict(num_experts=4, ep=4, tp=2), 4, ["--ep 4", "2 data-parallel ranks", "[1, 2]"]),
        (dict(ep=2), 2, ["--ep 2", "no experts", "--num-experts"]),
        (dict(num_experts=4, ep=0), 1, ["--ep 0"]),
        (dict(num_experts=4, router_topk=5), 1, ["--router-topk 5", "--num-experts 4"]),
        (dict(num_experts=4, router_topk=0), 1, ["--router-topk 0"]),
        (dict(router_topk=2), 1, ["--router-topk 2", "--num-experts"]),
        (dict(num_experts=40, **FEW), 1, ["--num-experts 40", "32 tokens", "--router topk"]),
        (dict(num_experts=4, expert_every=5), 1, ["--expert-every 5", "--num-layers 4"]),
        (dict(num_experts=-1), 1, ["--num-experts -1"]),
        (dict(num_experts=4, capacity_factor=-1.0), 1, ["--capacity-factor -1.0"]),
        (dict(num_experts=4, aux_loss=float("nan")), 1, ["--aux-loss nan"]),
        (dict(num_experts=4, router_temperature=0.0), 1, ["--router-temperature 0.0"]),
        (dict(num_experts=4, aux_loss=0.1), 1, ["--aux-loss 0.1", "--router topk"]),
        (dict(router="topk"), 1, ["--router topk", "--num-experts"]),
        (dict(capacity_factor=1.0), 1, ["--capacity-factor 1.0", "--num-experts"]),
        (dict(num_experts=4, router="hash"), 1, ["--router hash"]),
    ],
    ids=str,
)
def test_bad_configurations(flags, world, words):
    with pytest.raises(ConfigError) as e:
        rules.validate(Config(**flags), world)
    assert all(word in str(e.value) for word in words), str(e.value)


def refused_calls(rank: int):
    model = GPT(MoEConfig(2, 16, 2, vocab_size=7, num_experts=2))
    moe.apply(model, dist.group.WORLD)
    with pytest.raises(ValueError, match="once"):
        moe.apply(model, dist.group.WORLD)
    with pytest.raises(ValueError, match="expert_group"):
        fsdp.apply(model, dist.group.WORLD)


def test_a_second_call_and_shards_without_the_experts_group():
    ranks.run(refused_calls, 2)


# --- a run ----------------------------------------------------------------------------------------


def test_a_run_with_experts(tmp_path):
    """Two ranks with half of the experts each: metrics, checkpoint, sample."""
    text = "the quick brown fox jumps over the lazy dog\n" * 3000
    (tmp_path / "corpus.txt").write_text(text)
    shape = dict(model="tiny-moe", expert_every=1, num_layers=2, ffn_hidden_size=48, ep=2)
    batch = dict(precision="fp64", global_batch_size=8, micro_batch_size=2, steps=4)
    places = dict(data=tmp_path / "corpus.txt", out=tmp_path / "run")
    flags = small_run.flags(**shape, **batch, **places)
    done = processes.run(["train.py", *flags], world=2)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [len(line["expert_load"]) for line in lines] == [2] * 4
    assert all(line["dropped_share"] == [0, 0] for line in lines)
    # it goes on with the data's own text
    assert (tmp_path / "run/sample.txt").read_text()[:16] in text
    # biases of a router cannot be taken from a model that has none
    base = dict(load=str(tmp_path / "run"), data=[str(tmp_path / "corpus.txt")], steps=1)
    with pytest.raises(ConfigError, match=r"--router bias: .* sinkhorn, which would fit"):
        Config(router="bias", **base).model_config()
    assert Config(router="topk", **base).model_config().z_loss == 0.001
