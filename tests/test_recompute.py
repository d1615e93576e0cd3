import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import recompute
import sharding
from base.dropout import dropout_key
from base.model_config import GPTConfig
from benchmarks import activation_memory
from course import demo, ranks
from gpt import Context
from planning import counters


def build(dtype=torch.float64, granularity="none", layers=None, **fields):
    shape = dict(num_layers=3, hidden_size=32, num_heads=4, seq_length=16, vocab_size=61)
    model = demo.meta_model(GPTConfig(**shape | fields))
    recompute.apply(model, granularity, layers)
    sharding.init(model, 0, "cpu", dtype)
    return model


def run(model):
    tokens = torch.arange(2 * 17).view(2, 17) % 61
    key = dropout_key(0, 1, torch.arange(2)) if model.config.dropout else None
    loss = model(tokens[:, :-1], tokens[:, 1:], Context(key)).sum()
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    "fields",
    [dict(dropout=0.3), dict(dropout=0.3, llama=True, num_kv_heads=2), dict(), dict(llama=True)],
    ids=["gpt", "llama", "gpt-fused", "llama-fused"],
)
@pytest.mark.parametrize(
    "granularity, layers",
    [("selective", None), ("selective", 1), ("full", None), ("full", 2), ("full", 0)],
)
def test_bit_for_bit(granularity, layers, fields):
    loss, gradients = run(build(**fields))
    again, same = run(build(granularity=granularity, layers=layers, **fields))
    assert loss == again
    assert all(map(torch.equal, gradients, same))


def forwards(granularity, layers):
    """How often core attention and the MLP of each layer run in one forward and one backward
    pass."""
    model = build(dropout=0.1)
    calls = []
    for n, block in model.blocks.items():
        block.mlp.register_forward_hook(lambda *_, n=n: calls.append(f"mlp {n}"))
        block.attention.core.dropout.register_forward_hook(
            lambda *_, n=n: calls.append(f"core {n}")
        )
    recompute.apply(model, granularity, layers)
    run(model)
    return [calls.count(f"{what} {n}") for what in ("core", "mlp") for n in range(3)]


def test_which_layers_run_twice():
    assert forwards("full", 2) == [2, 2, 1, 2, 2, 1]
    assert forwards("selective", 2) == [2, 2, 1, 1, 1, 1]
    assert forwards("full", None) == [2] * 6
    assert forwards("none", None) == [1] * 6


@pytest.mark.parametrize("s, b", [(16, 2), (48, 1)])
def test_extra_flops_are_the_paper_s(s, b):
    """2104.04473, section 5.1."""
    h = 32
    found = {}
    for granularity in ("none", "selective", "full"):
        model = build(torch.float32, granularity, dropout=0.1, seq_length=s)
        x = torch.randn(b, s, h, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            y = model.blocks["0"](x, Context(dropout_key(0, 1, torch.arange(b))))
            forward = counter.get_total_flops()
            y.sum().backward()
        found[granularity] = counter.get_total_flops()
    assert forward == 24 * b * s * h * h + 4 * b * s * s * h
    assert found["none"] == 3 * forward
    assert found["full"] == 4 * forward
    assert found["selective"] == found["none"] + 4 * b * s * s * h


def test_formulas_of_the_paper():
    """Table 2 written out again, and the GiB that follow for the models of table 3."""
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    sbh = s * b * h
    scores = 5 * a * s / h
    rows = {
        "no parallelism": sbh * (34 + scores),
        "tensor": sbh * (10 + 24 / t + scores / t),
        "tensor + sequence": sbh * (34 / t + scores / t),
        "tensor + selective": sbh * (10 + 24 / t),
        "tensor + sequence + selective": sbh * 34 / t,
        "full": 2 * sbh,
    }
    for row, expected in rows.items():
        tensor_ranks = 1 if row == "no parallelism" else t
        by_formula = recompute.layer_bytes(s, b, h, a, tensor_ranks, *recompute.ROWS[row])
        assert by_formula == pytest.approx(expected, rel=1e-12)
    assert recompute.layer_bytes(s, b, h, a, t, True, "full") == 2 * sbh / t
    first_stage = activation_memory.first_stage_table()
    both = "tensor + sequence + selective"
    assert first_stage["22B"]["tensor"] == 59.25
    assert first_stage["22B"][both] == 9.5625
    assert first_stage["175B"]["tensor"] == 66.84375
    assert first_stage["175B"][both] == pytest.approx(12.3515625, rel=1e-12)
    # "under 0.01%", the paper says; its formula gives 0.57%
    outside = recompute.outside_layers_bytes(s, b, h, 51200, t)
    layers = 48 * recompute.layer_bytes(s, b, h, a, t, sequence_parallel=True)
    assert outside / layers == pytest.approx(0.0057, abs=0.00005)


@pytest.mark.parametrize("t", [1, 4, pytest.param(2, marks=pytest.mark.repetition)])
def test_measured_bytes_are_the_formula_s(t, monkeypatch):
    """All rows of table 2, within 2%."""
    for (name, row), measured in ranks.run(activation_memory.measure, t, SHAPES)[0].items():
        sequence, granularity = recompute.ROWS[row]
        formula = recompute.layer_bytes(
            **SHAPES[name], t=t, sequence_parallel=sequence, recompute=granularity
        )
        assert abs(measured / formula - 1) < 0.02, (name, row, measured / formula)


# the first: 5as/h as in the 22B model
SHAPES = {"as 22B": dict(s=512, b=1, h=192, a=8), "odd": dict(s=60, b=3, h=480, a=12)}


def test_saved_bytes_by_hand():
    x = torch.randn(10, 10, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(10, 10))
    # x, and relu's output; w left out
    assert counters.saved_bytes(lambda: (x @ w).relu(), w) == 2 * 400
    # x once; a view of it is no second storage
    assert counters.saved_bytes(lambda: x * x + x[:5].exp().sum(), w) == 400 + 200
    # a graph that is gone keeps nothing
    assert counters.saved_bytes(lambda: (x @ w).relu().detach(), w) == 0
    # x alone
    again = counters.saved_bytes(lambda: recompute.checkpoint(lambda x: (x @ w).relu(), x), w)
    assert again == 400


def test_fused_attention_has_nothing_to_recompute():
    """`selective` leaves a fused core alone: the same bytes, the same FLOPs."""

    def kept(granularity, attention):
        model = build(torch.float32, granularity, attention=attention, seq_length=64)
        block = model.blocks["0"]
        x = torch.randn(2, 64, 32, requires_grad=True)
        return counters.saved_bytes(lambda: block(x), *block.parameters())

    assert kept("selective", "fused") == kept("none", "fused") < kept("none", "explicit")
    assert kept("selective", "explicit") < kept("none", "explicit")
    assert abs(kept("none", "fused") - kept("selective", "explicit")) < 0.02 * kept("none", "fused")


@pytest.mark.parametrize(
    "granularity, layers, words",
    [
        ("some", None, "recompute some: must be none, selective or full"),
        ("full", 4, "recompute_layers 4: must be from 0 to num_layers 3"),
        ("selective", -1, "recompute_layers -1"),
        ("none", 2, "recompute_layers 2: needs recompute selective or full"),
    ],
)
def test_bad_input(granularity, layers, words):
    with pytest.raises(ValueError, match=words):
        build(granularity=granularity, layers=layers)
