"""run/muon.py: orthogonal updates, equal to one device's wherever matrices are sharded."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import small_run
import torch
import torch.distributed as dist
from parity import DATA, LLAMA, SMALL, again, check, differs, step, train, trainer_of
from torch import nn

import planner
import sharding
from course import ranks
from course.parity import Run
from course.training_commands import config_of
from optimizer import LossScaler, learning_rate
from planning import as_rank, counters, plan
from planning.inputs import FITTED, H100
from planning.layer_time import Rank
from run import checkpoint, muon
from train import Trainer

MUON = dict(optimizer="muon")
EXPERTS = MUON | dict(num_experts=4, expert_every=2, router="topk", micro_batch_size=1)


# --- one matrix -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 16, 16)])
def test_singular_values_become_about_1(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    y = muon.orthogonalize(x)
    # The same singular vectors: what is left is a diagonal.
    values = u.mT @ y @ vh.mT
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    assert (values - torch.diag_embed(diagonal)).abs().max() < 1e-12
    assert 0.6 < diagonal.min() and diagonal.max() < 1.21
    # Frobenius norm 1, then five times the polynomial.
    s = s / (s.square().sum(-1, keepdim=True).sqrt() + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(diagonal, s, rtol=1e-10, atol=1e-12)


def test_owners_have_equal_work():
    costs = dict(a=8, b=3, c=3, d=2, e=0)
    assert muon.owners(costs, 2) == dict(a=0, b=1, c=1, d=1, e=0)
    assert set(muon.owners(costs, 9).values()) == set(range(5))


def by_hand(model: nn.Module, gradients: list[dict], lrs: list[float]) -> dict:
    """The formulas at the top of run/muon.py, one matrix after the other; AdamW for the rest."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    rest = [n for n, w in weights.items() if not n.startswith("blocks.") or w.dim() < 2]
    adam = {name: nn.Parameter(weights[name]) for name in rest}
    decays = [[adam[n] for n in rest if (weights[n].dim() > 1) == wide] for wide in (True, False)]
    groups = [dict(params=decays[0], weight_decay=0.1), dict(params=decays[1], weight_decay=0.0)]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    momentum = {name: torch.zeros_like(w) for name, w in weights.items()}
    for lr, of_step in zip(lrs, gradients):
        norm = math.sqrt(sum(g.square().sum().item() for g in of_step.values()))
        for name, g in of_step.items():
            g = g * min(1, 0.5 / norm)
            if name in adam:
                adam[name].grad = g
                continue
            momentum[name] = 0.95 * momentum[name] + g
            o = muon.orthogonalize(g + 0.95 * momentum[name])
            update = 0.2 * math.sqrt(max(g.shape)) * o + 0.1 * weights[name]
            weights[name] = weights[name] - lr * update
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.step()
    return weights | {name: p.detach() for name, p in adam.items()}


def test_three_steps_by_hand():
    t = trainer_of(LLAMA, **MUON)
    before = {name: p.detach().clone() for name, p in t.model.named_parameters()}
    gradients, update = [], t.optimizer.update_parameters

    def noted(*arguments):
        named = t.model.named_parameters()
        gradients.append({name: p.main_grad.clone() for name, p in named})
        update(*arguments)

    t.optimizer.update_parameters = noted
    for number in (1, 2, 3):
        step(t, number)
    after = {name: p.detach().clone() for name, p in t.model.named_parameters()}
    for name, p in t.model.named_parameters():
        p.data.copy_(before[name])
    lrs = [learning_rate(n, 1e-3, 1e-4, 0, t.config.steps) for n in (1, 2, 3)]
    expected = by_hand(t.model, gradients, lrs)
    for name, p in after.items():
        torch.testing.assert_close(p, expected[name], rtol=1e-9, atol=1e-12)
    assert {n.split(".")[-2] for n in t.optimizer.momentum} == {
        *("query", "key", "value", "output", "gate", "up", "down")
    }


@pytest.mark.parametrize("scaler", [None, LossScaler])
def test_a_skipped_step_changes_nothing(scaler):
    t = trainer_of(SMALL, **MUON, precision="fp32")
    t.optimizer.scaler = scaler and scaler()
    step(t, 1)
    before = {name: x.clone() for name, x in t.optimizer.tensors().items()}
    t.forward_backward(2, DATA)
    next(t.model.parameters()).main_grad[0] = math.inf
    t.update(2)
    assert small_run.equal(before, t.optimizer.tensors())
    assert any(name.startswith("momentum.") and x.any() for name, x in before.items())


def test_masters_of_16_bit_weights():
    t = trainer_of(SMALL, **MUON, precision="bf16")
    for number in (1, 2):
        step(t, number)
    for name in t.optimizer.momentum:
        master, weight = t.optimizer.masters[name], t.optimizer.parameters[name]
        assert master.dtype == torch.float32 and weight.equal(master.bfloat16())
        assert not master.equal(weight.float())


# --- the gate -------------------------------------------------------------------------------------

TWO = [
    MUON | dict(tp=2, sequence_parallel=True),
    MUON | dict(zero_stage=1),
    MUON | dict(pp=2, schedule="zb-h1", micro_batch_size=1, num_layers=3, layer_split=[2, 1]),
]
FOUR = [
    MUON | dict(tp=2, zero_stage=3),
    EXPERTS | dict(ep=2, zero_stage=2, router_topk=2),
]
MORE = {
    2: [
        MUON | dict(zero_stage=0),
        MUON | dict(zero_stage=2, recompute="full", head_chunk=8),
        MUON | dict(zero_stage=3),
        MUON | dict(cp=2, zero_stage=1),
        MUON | dict(cp=2, cp_kind="all-to-all", dropout=0.0),
        EXPERTS | dict(ep=2),
    ],
    4: [
        MUON | dict(tp=4),
        MUON | dict(tp=2, pp=2, zero_stage=0, micro_batch_size=1),
        MUON | dict(pp=2, virtual_stages=2, num_layers=4, zero_stage=1, micro_batch_size=1),
        MUON | dict(data_parallel_replicate_degree=2, zero_stage=1),
        MUON | dict(zero_stage=2, hidden_size=36, vocab_size=67),
        EXPERTS | dict(tp=2, zero_stage=1),
        EXPERTS | dict(tp=2, ep=2, zero_stage=3),
        EXPERTS | dict(num_experts=2, zero_stage=3),
    ],
}


@pytest.mark.parametrize(
    "world, layouts", [(2, TWO), (4, FOUR), *(again(world, list_) for world, list_ in MORE.items())]
)
def test_equals_one_device(world, layouts):
    check(world, layouts)


@pytest.mark.repetition
def test_grouped_keys_and_one_rank_without_a_matrix():
    """Eight ranks for the seven matrices of a layer."""
    check(8, [MUON | dict(num_layers=1, zero_stage=1), MUON | dict(tp=2, zero_stage=2)], LLAMA)


LATENT = dict(kv_rank=8, query_rank=8, rope_head_dim=2, value_head_dim=2)


@pytest.mark.repetition
@pytest.mark.parametrize("layout", [dict(tp=2), dict(zero_stage=3), dict(pp=2)])
def test_with_later_layers(layout):
    """Latent attention and multi-token prediction bring matrices of other names."""
    base = LLAMA | MUON | dict(num_kv_heads=4, micro_batch_size=4)
    check(2, [layout | LATENT, layout | dict(mtp_layers=1)], base)


@pytest.mark.repetition
def test_with_copies_of_keys():
    """Ranks that hold the same key heads orthogonalise the same matrix."""
    check(4, [MUON | dict(tp=4), MUON | dict(tp=4, sequence_parallel=True)], LLAMA)


@pytest.mark.repetition
@pytest.mark.parametrize("flags", [dict(fp8="current", fp8_skip=0), dict(fp8="delayed")])
def test_with_fp8(flags):
    flags = MUON | flags | dict(micro_batch_size=2, num_layers=4, dropout=0.0)
    check(2, [flags | dict(tp=2), flags | dict(zero_stage=3)], LLAMA)


# --- what breaks it -------------------------------------------------------------------------------


def orthogonalize_the_slice() -> None:
    muon.cuts = lambda record: []


def scale_of_the_slice() -> None:
    original = muon.sharding_of

    def local(p):
        record = original(p)
        return sharding.Sharding(sharding.local_slice(record)[2], record.placements)

    muon.sharding_of = local


def parts_in_another_order() -> None:
    torch.cat = reversed_cat(torch.cat)


def reversed_cat(original):
    def cat(tensors, dim=0):
        matrices = len(tensors) == 2 and tensors[0].dim() == 2 and tensors[0].shape[0] == 16
        return original(tensors[::-1] if matrices else tensors, dim)

    return cat


@pytest.mark.parametrize(
    "mutate", [orthogonalize_the_slice, again(scale_of_the_slice), again(parts_in_another_order)]
)
def test_a_bug_is_seen(mutate):
    one = train(**MUON)
    differs(train(2, mutate=mutate, zero_stage=1, **MUON), one, 1e-6)


# --- what is sent and computed --------------------------------------------------------------------


def counted(rank: int, world: int, flags: dict) -> tuple[int, int, int, int]:
    """(elements sent to owners, elements sent back, FLOPs) of an update, and this rank's slices."""
    run = Run(world, config_of(SMALL | flags))
    t = run.trainer
    t.forward_backward(1, run.dataset)
    sent = []
    original = dist.all_to_all_single

    def noted(output, x, received, sizes, group):
        own = sizes[group.rank()]
        sent.append((len(x) - own, x.element_size()))
        original(output, x, received, sizes, group=group)

    dist.all_to_all_single = noted
    with counters.Counters() as found:
        t.update(1)
    slices = sum(x.numel() for x in t.optimizer.momentum.values())
    assert [name for name, _ in found.calls].count("all-to-all") == len(sent)
    return sum(n for n, _ in sent), len(sent), found.flops, slices


@pytest.mark.parametrize(
    "world, flags", [(2, dict(tp=2)), again(2, dict(zero_stage=1)), (4, dict(tp=2, zero_stage=1))]
)
def test_bytes_and_flops_are_the_formula(world, flags):
    """Two layers of 4 h² + 2 · 4 h²: on two ranks owners are even."""
    results = ranks.run(counted, world, world, MUON | flags)
    h, levels = 32, len(flags)
    matrices = 2 * (4 * [(h, h)] + 2 * [(4 * h, h)])
    assert sum(flops for _, _, flops, _ in results) == sum(map(muon.flops, matrices))
    numbers = sum(math.prod(shape) for shape in matrices)
    assert {slices for *_, slices in results} == {numbers // world}
    # 2 Ψ (n - 1) / n of each level, where a rank has so many numbers at every level
    total = sum(sent for sent, *_ in results)
    assert total == levels * 2 * numbers // 2
    assert all(calls == 2 * levels for _, calls, _, _ in results)


@pytest.mark.repetition
def test_as_rank_and_planner_count_it():
    """Products and state of all ranks; the planner's owners are even."""
    flags = dict(precision="fp32", zero_stage=1, tp=2, micro_batch_size=1)
    muon_config, shapes = config_of(SMALL | flags | MUON), 2 * (4 * [(32, 32)] + 2 * [(128, 32)])
    with_adamw = as_rank.report(config_of(SMALL | flags), Trainer, 0, 4)
    with_muon = [as_rank.report(muon_config, Trainer, rank, 4) for rank in range(4)]
    saved = with_adamw.optimizer_state["float32"] - with_muon[0].optimizer_state["float32"]
    assert saved == 4 * 2 * 12 * 32 * 32 // 4
    more = sum(report.flops - with_adamw.flops for report in with_muon)
    assert more == sum(map(muon.flops, shapes))
    calls = {(c.kind, c.group): c.count for c in with_muon[0].collectives}
    assert calls["all-to-all", "dp"] == calls["all-to-all", "tp"] == 2
    # Nothing is waited for, and sends take 2e-11 of the time: no machine has a higher bandwidth.
    machine = replace(H100, node_bandwidth=1e24, constants=replace(FITTED, wait=0.0))
    layout, software = plan.layout_of(muon_config, 4), plan.software_of(muon_config)
    rank = Rank(machine, software, muon_config.model_config(), layout)
    assert planner.newton_schulz(rank) * rank.flops_per_second == pytest.approx(more / 4, rel=1e-10)


# --- checkpoints ----------------------------------------------------------------------------------


def save_after_two_steps(rank: int, world: int, flags: dict, folder: str) -> None:
    run = Run(world, config_of(SMALL | flags))
    run.train(2)
    run.trainer.checkpoints.save(Path(folder), 2, 0, "")
    run.trainer.checkpoints.saver.wait()


def third_step(path: Path, flags: dict) -> dict:
    """The parameters after a checkpoint's next step, on one device."""
    run = Run(1, config_of(SMALL | flags))
    run.trainer.checkpoints.load(path)
    run.trainer.forward_backward(3, run.dataset)
    run.trainer.update(3)
    return {name: p.detach() for name, p in run.trainer.model.named_parameters()}


def forget_momentum(monkeypatch) -> None:
    monkeypatch.setattr(muon.Muon, "moments", muon.AdamW.moments)


def test_momentum_goes_into_another_layout(tmp_path, monkeypatch):
    flags = MUON | dict(tp=2, zero_stage=1)
    ranks.run(save_after_two_steps, 4, 4, flags, str(tmp_path))
    whole = train(steps=3, **MUON).parameters
    found = third_step(tmp_path / "step-000002", MUON)
    assert max((found[n] - p).abs().max().item() for n, p in whole.items()) < 1e-12
    forget_momentum(monkeypatch)
    found = third_step(tmp_path / "step-000002", MUON)
    assert max((found[n] - p).abs().max().item() for n, p in whole.items()) > 1e-5


def test_another_optimizer_is_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("to be or not to be, that is the question. " * 200)
    words = small_run.flags(data="text", out="run", steps=1, optimizer="muon")
    assert small_run.run(*words) == 0
    capsys.readouterr()
    error = small_run.refusal(capsys, *words, "--resume", "--optimizer", "adamw", "--steps", "2")
    assert "--optimizer adamw: run/checkpoints/step-000001 has the state of muon" in error
    assert "--optimizer muon goes on" in error
    index = checkpoint.read_index(checkpoint.find("run"))
    assert any(name.startswith("momentum.blocks.0.mlp.up") for name in index["tensors"])


@pytest.mark.parametrize(
    "words, rule",
    [
        (["train.py", "--optimizer-state", "bf16"], "has fp32 state"),
        ("adapters.py --as-rank 0 --of 1".split(), "adapters are factors or vectors"),
    ],
)
def test_refusals(words, rule, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, *others = words
    error = small_run.refusal(capsys, command, "--optimizer", "muon", *others)
    assert error.startswith(f"{command}: --optimizer muon: ") and rule in error
