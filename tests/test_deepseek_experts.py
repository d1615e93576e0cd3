"""The experts of DeepSeek-V3: a router balanced by biases, groups, small and shared experts."""

import dataclasses

import pytest
import torch
from parity import LLAMA, again, same, train

import gpt
import moe
import tensor_parallel
from base.model_config import MoEConfig, flops_per_token, least_parameters
from course import ranks
from course.parity import Run
from course.training_commands import config_of as training_config
from planning import counters
from sharding import materialise, num_parameters

EXPERTS = dict(num_experts=8, router="bias", router_topk=3, router_scale=2.5, bias_rate=0.01)
EXPERTS |= dict(
    first_dense_layers=1, expert_groups=4, topk_groups=2, expert_ffn_size=24, shared_ffn_size=16
)
BASE = LLAMA | EXPERTS | dict(num_layers=3)
# Shared experts with a gate; factors that are not normalised.
GATED = LLAMA | dict(model="qwen1.5-moe-a2.7b", num_experts=6, router_topk=2, micro_batch_size=2)
GATED |= dict(expert_ffn_size=24, shared_ffn_size=16)


def config_of(**fields) -> MoEConfig:
    shape = dict(num_layers=3, hidden_size=16, num_heads=2, vocab_size=7, llama=True)
    return MoEConfig(**shape | EXPERTS | fields)


# --- by hand --------------------------------------------------------------------------------------


def test_a_tokens_experts_and_factors_by_hand():
    """DeepSeek-V3, eq. 12-16 and section 2.1.2, one token at a time."""
    router = moe.MoE(config_of()).router.double()
    g = torch.Generator().manual_seed(0)
    router.bias.data = torch.randn(8, generator=g).double() / 4
    logits = torch.randn(50, 8, generator=g).double()
    chosen = router.scores(logits, True).topk(3).indices
    factors = router.probabilities(logits, chosen)
    without_groups = 0
    for z, experts, of_token in zip(logits.tolist(), chosen.tolist(), factors.tolist()):
        s = [1 / (1 + torch.tensor(-x).exp().item()) for x in z]
        biased = {e: s[e] + router.bias[e].item() for e in range(8)}
        # groups (0, 1), (2, 3), ..: the sum of the two best scores
        groups = sorted(range(4), key=lambda n: biased[2 * n] + biased[2 * n + 1])[2:]
        allowed = [e for e in range(8) if e // 2 in groups]
        best = sorted(allowed, key=biased.get, reverse=True)[:3]
        assert experts == best
        without_groups += best == sorted(range(8), key=biased.get, reverse=True)[:3]
        expected = [2.5 * s[e] / sum(s[e] for e in best) for e in best]
        assert of_token == pytest.approx(expected, rel=1e-6)
    assert without_groups < 40


def test_the_bias_grows_where_the_load_is_small():
    router = moe.MoE(config_of()).router
    load = torch.tensor([3.0, 5.0, 4.0, 4.0, 0.0, 8.0, 4.0, 4.0])
    router.balance(load, torch.tensor(True))
    expected = 0.01 * torch.tensor([1.0, -1, 0, 0, 1, -1, 0, 0])
    assert torch.equal(router.bias, expected)
    # a skipped step
    router.balance(load, torch.tensor(False))
    assert torch.equal(router.bias, expected)


def test_a_step_of_a_bias_is_not_lost_in_16_bits():
    model = moe.empty_model(config_of())
    materialise(model, "cpu", torch.bfloat16)
    router = model.blocks["1"].mlp.router
    assert router.weight.dtype == torch.bfloat16 and router.bias.dtype == torch.float32
    assert not router.bias.requires_grad


def test_layers_parameters_and_flops():
    config = config_of(num_layers=5)
    model = moe.empty_model(config)
    assert list(config.expert_layers) == [1, 2, 3, 4]
    assert isinstance(model.blocks["0"].mlp, gpt.MLP) and isinstance(model.blocks["1"].mlp, moe.MoE)
    for fields in (dict(), dict(shared_gate=True), dict(expert_every=2, first_dense_layers=3)):
        config = config_of(num_layers=5, **fields)
        vectors = 16 * (2 * 5 + 1) + 8 * len(config.expert_layers)
        assert num_parameters(moe.empty_model(config)) == least_parameters(config) + vectors
    fewer = dataclasses.replace(config_of(), shared_ffn_size=0)
    per_token = flops_per_token(config_of()) - flops_per_token(fewer)
    # 2 layers, 3 matrices
    assert per_token == 6 * 2 * 3 * 16 * 16


# --- every layout is one device -------------------------------------------------------------------


@pytest.mark.parametrize(
    "world, layout",
    [
        (2, dict(tp=2, sequence_parallel=True, recompute="full")),
        (2, dict(ep=2, zero_stage=3, micro_batch_size=1)),
        again(2, dict(tp=2)),
        again(2, dict(cp=2)),
        again(2, dict(zero_stage=1)),
        again(2, dict(zero_stage=2, micro_batch_size=2)),
        again(2, dict(pp=2, layer_split=[1, 2], micro_batch_size=2)),
        again(2, dict(pp=2, layer_split=[2, 1], micro_batch_size=2, schedule="zb-h1")),
        again(4, dict(pp=2, layer_split=[1, 2], ep=2, micro_batch_size=1)),
        again(4, dict(tp=2, cp=2, sequence_parallel=True, head_chunk=3, zero_stage=3)),
        again(4, dict(cp=2, cp_kind="all-to-all", ep=4, recompute="selective")),
    ],
    ids=str,
)
def test_every_layout_is_one_device(world, layout):
    """The bias too, after three steps; of any micro-batch size."""
    one = train(base=BASE)
    same(train(world, base=BASE, **layout), one)
    bias = one.parameters["model.blocks.2.mlp.router.bias"]
    assert bias.abs().max() > 0.005 and one.margin > 1e-6


def sent_to_balance(rank: int, layouts: list[dict]) -> list:
    """The collectives of `end_step`, (kind, bytes) each."""
    found = []
    for flags in layouts:
        run = Run(2, training_config(BASE | flags))
        run.trainer.forward_backward(1, run.dataset)
        with counters.Counters() as counted:
            run.trainer.expert_layers.end_step(run.trainer.groups.replicas, torch.ones(()))
        found.append(counted.calls)
    return found


def test_one_message_balances_all_layers():
    """L E numbers of 8 bytes, of any micro-batch size."""
    layouts = [dict(ep=2, micro_batch_size=size) for size in (1, 2)]
    message = ("all-reduce", 2 * 8 * 8)
    for found in ranks.run(sent_to_balance, 2, layouts):
        assert found == [[message], [message]]


def equal_groups():
    moe.Router.group_scores = lambda self, grouped, counted: torch.zeros(grouped.shape[:2])


def test_ties_between_groups_are_seen():
    assert train(base=BASE, steps=1, mutate=equal_groups).margin == 0


@pytest.mark.parametrize(
    "layout", [dict(tp=2, sequence_parallel=True), again(dict(tp=2)), again(dict(ep=2))], ids=str
)
def test_a_gate_of_shared_experts_is_one_device(layout):
    same(train(2, base=GATED, **layout), train(base=GATED))


# --- broken on purpose ----------------------------------------------------------------------------


def no_update():
    moe.BiasRouter.balance = lambda self, load, taken: None


def load_of_this_rank():
    end_step = moe.ExpertLayers.end_step
    moe.ExpertLayers.end_step = lambda self, group, taken: end_step(self, None, taken)


def factors_from_biased_scores():
    moe.BiasRouter.affinities = lambda self, logits: logits.sigmoid() + self.bias


def shared_output_summed_again():
    forward = moe.SharedExperts.forward

    def again_over_ranks(self, x, context=gpt.PLAIN):
        y = forward(self, x, context)
        return tensor_parallel.reduce_from_ranks(y.clone(), self.down.group)

    moe.SharedExperts.forward = again_over_ranks


@pytest.mark.parametrize(
    "mutate, layout",
    [
        (no_update, dict(zero_stage=0)),
        (load_of_this_rank, dict(zero_stage=0)),
        (factors_from_biased_scores, dict(zero_stage=0)),
        (shared_output_summed_again, dict(tp=2)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_bug_is_seen(mutate, layout):
    with pytest.raises(AssertionError):
        same(train(2, base=BASE, mutate=mutate, **layout), train(base=BASE))
