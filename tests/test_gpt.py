import math

import pytest
import torch
import torch.nn.functional as F
from parity import again, needs_compiler

import gpt
import moe
import sharding
from base.cross_entropy import cross_entropy
from base.dropout import Dropout, dropout_key, dropout_mask, hash_
from base.model_config import GPTConfig, MoEConfig, flops_per_token
from gpt import GPT
from run import presets
from run.presets import PRESETS

GPT_SHAPES = [
    dict(num_layers=2, hidden_size=48, num_heads=4, seq_length=32, vocab_size=97),
    dict(
        num_layers=3, hidden_size=64, num_heads=1, ffn_hidden_size=80, seq_length=20, vocab_size=50
    ),
]
LLAMA_SHAPES = [
    dict(num_layers=2, hidden_size=48, num_heads=4, seq_length=32, vocab_size=97, llama=True),
    dict(
        num_layers=2,
        hidden_size=64,
        num_heads=8,
        num_kv_heads=2,
        ffn_hidden_size=100,
        seq_length=33,
        vocab_size=61,
        llama=True,
    ),
    dict(
        num_layers=3,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=1,
        ffn_hidden_size=88,
        seq_length=8,
        vocab_size=31,
        llama=True,
    ),
]
SHAPES = {
    "gpt": GPT_SHAPES[0],
    "llama": LLAMA_SHAPES[1],
    "experts": LLAMA_SHAPES[0] | dict(num_experts=4),
}


def make_config(**fields) -> GPTConfig:
    """A GPTConfig, or a MoEConfig where there are fields of experts."""
    if "num_experts" in fields:
        return MoEConfig(**fields)
    return GPTConfig(**fields)


def build(dtype=torch.float32, seed=0, **fields) -> GPT:
    with torch.device("meta"):
        model = moe.build(make_config(**fields))
    sharding.init(model, seed, "cpu", dtype)
    return model


def tokens(model, batch=3, seed=1, extra=0):
    c = model.config
    return torch.randint(
        c.vocab_size, (batch, c.seq_length + extra), generator=torch.Generator().manual_seed(seed)
    )


# --- counted against the published numbers --------------------------------------------------------


def test_presets_have_the_published_sizes():
    for name, (fields, published) in PRESETS.items():
        with torch.device("meta"):
            model = moe.build(make_config(**fields))
        count = sharding.num_parameters(model)
        # released weights: exact
        if published and published % 1000:
            assert count == published, name
        # "5B": as far as it is rounded
        elif published:
            assert abs(count / published - 1) < 0.03, name
        c = model.config
        # 2104.04473, eq. 2, up to the final norm and biases it leaves out
        if c.positions == "learned":
            L = c.num_layers
            h = c.hidden_size
            V = c.vocab_size
            s = c.seq_length
            parameters = 12 * L * h * h * (1 + 13 / (12 * h) + (V + s) / (12 * L * h))
            assert count == pytest.approx(parameters, abs=2 * h + 1), name
            flops = 72 * L * h * h * (1 + s / (6 * h) + V / (12 * h * L))
            assert flops_per_token(c) == pytest.approx(flops, rel=1e-12), name


def test_flops_of_the_papers():
    """175B: 96 layers of the paper's iteration formula; Llama-2 7B as 6N + 12Lhs per token, where N
    leaves the embedding out."""
    c = GPTConfig(**PRESETS["megatron-175b"][0])
    L = c.num_layers
    h = c.hidden_size
    with_recompute = 96 * L * h**2 * (1 + 2048 / (6 * h) + 51200 / (16 * L * h))
    head = 6 * h * c.vocab_size
    layers = flops_per_token(c) - head
    assert layers * 4 / 3 + head == pytest.approx(with_recompute, rel=1e-12)
    c = GPTConfig(**PRESETS["llama2-7b"][0])
    matrices = 6_738_415_616 - 32000 * 4096 - (2 * 32 + 1) * 4096
    assert flops_per_token(c) == 6 * matrices + 12 * 32 * 4096 * 4096


# --- dropout --------------------------------------------------------------------------------------


def test_hash_by_hand():
    """The same integers as 32-bit unsigned arithmetic in Python."""

    def mix(x):
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    values = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0xDEADBEEF]
    ours = hash_(torch.tensor(values).to(torch.int32))
    assert [v % 2**32 for v in ours.tolist()] == [mix(v) for v in values]


def test_dropout_mask():
    samples = torch.arange(16)

    def of_key(seed, step):
        return dropout_mask(dropout_key(seed, step, samples), 5, (16, 128, 128), {}, 0.1).double()

    mask = of_key(3, 7)
    sigma = math.sqrt(0.09 / mask.numel())
    assert abs(mask.mean() - 0.1) < 4 * sigma
    others = {
        "sample": mask.roll(1, 0),
        "row": mask.roll(1, 1),
        "column": mask.roll(1, 2),
        "site": dropout_mask(dropout_key(3, 7, samples), 6, mask.shape, {}, 0.1).double(),
        "step": of_key(3, 8),
        "seed": of_key(4, 7),
    }
    # uncorrelated with every neighbour
    for name, other in others.items():
        assert abs(((mask - 0.1) * (other - 0.1)).mean()) < 5 * 0.09 / math.sqrt(mask.numel()), name
    # sums along each dimension scatter as independent draws do
    for dim, sigma in ((0, 0.03), (1, 0.1), (2, 0.1)):
        assert abs(mask.sum(dim).var() / (mask.shape[dim] * 0.09) - 1) < sigma, dim


def test_dropout_slice_is_a_slice_of_the_mask():
    samples = torch.tensor([4, 9, 2**40 + 4])
    whole = dropout_mask(dropout_key(0, 1, samples), 3, (3, 6, 8, 10), {}, 0.5)
    part = dropout_mask(dropout_key(0, 1, samples[1:]), 3, (2, 3, 8, 5), {1: 3, 3: 5}, 0.5)
    assert torch.equal(part, whole[1:, 3:, :, 5:])
    # sample numbers beyond 32 bits differ
    assert not torch.equal(whole[0], whole[2])


@needs_compiler
@pytest.mark.parametrize("shape", [(3, 32, 32), again((2, 5, 32, 48))])
def test_compiled_dropout_is_the_same(shape):
    """Bit for bit. (Inductor once turned coordinate × constant into a vector whose lanes overflowed
    wrongly.)"""

    def mask(key):
        return dropout_mask(key, 3, shape, {1: 2}, 0.1)

    key = dropout_key(0, 1, torch.arange(shape[0]))
    from torch._inductor import config

    # For one kernel, headers compiled in advance take longer than they save; and g++ is not asked
    # three times what the processor can do.
    with config.patch({"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}):
        assert torch.equal(torch.compile(mask)(key), mask(key))


def test_dropout_keeps_the_mean_and_one_byte():
    saved = []
    x = torch.ones(4, 64, 64, requires_grad=True)
    module = Dropout(0.25, 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = module(x, dropout_key(0, 1, torch.arange(4)))
    assert sorted(set(y.flatten().tolist())) == pytest.approx([0, 4 / 3])
    assert abs(y.mean() - 1) < 0.02
    assert sum(t.numel() * t.element_size() for t in saved if t.dim()) == x.numel()
    assert module(x, None) is x


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1e4, -1e8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy(dtype, offset):
    torch.manual_seed(0)
    # what all logits have in common cancels before anything is rounded
    logits = (torch.randn(5, 7, 13, dtype=torch.float64) * 30 + offset).to(dtype)
    targets = torch.randint(13, (5, 7))
    weight = torch.rand(5, 7)
    expected_in = logits.double().clone().requires_grad_()
    given = logits.clone().requires_grad_()
    expected = F.cross_entropy(expected_in.flatten(0, 1), targets.flatten(), reduction="none").view(
        5, 7
    )
    loss = cross_entropy(given * 1, targets)
    (expected * weight).sum().backward()
    (loss * weight).sum().backward()
    exact = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    torch.testing.assert_close(loss.double(), expected, rtol=exact, atol=exact)
    # the gradient goes back in the dtype of the logits
    rounded = 8e-3 if dtype == torch.bfloat16 else exact
    torch.testing.assert_close(
        given.grad.double(), expected_in.grad, rtol=rounded, atol=rounded / 100
    )
    with torch.no_grad():
        torch.testing.assert_close(
            cross_entropy(logits.clone(), targets).double(), expected, rtol=exact, atol=exact
        )


@pytest.mark.parametrize("wrong", [13, -1])
@pytest.mark.parametrize("trained", [True, False])
def test_cross_entropy_refuses_what_is_no_label(wrong, trained):
    with pytest.raises((IndexError, RuntimeError), match=f"{wrong} is out of bounds"):
        cross_entropy(torch.randn(2, 13, requires_grad=trained) * 1, torch.tensor([0, wrong]))


def test_cross_entropy_refuses_a_second_backward():
    loss = cross_entropy(torch.randn(2, 5, requires_grad=True) * 1, torch.tensor([0, 4])).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_tied_embeddings_are_one_parameter():
    model = build(**SHAPES["gpt"])
    assert model.head.output.weight is model.embedding.tokens.weight
    assert "head.output.weight" not in dict(model.named_parameters())
    assert "head.output.weight" in dict(build(**SHAPES["llama"]).named_parameters())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_in_a_script_starts_as_in_training(shape):
    """Not with torch's initial values, with which a tied embedding's first loss is 40. Those of
    seed 0, under any other default device too."""
    torch.manual_seed(1)
    plain = moe.build(make_config(**SHAPES[shape]))
    trained = build(**SHAPES[shape])
    assert all(
        torch.equal(p, q) for p, q in zip(plain.parameters(), trained.parameters(), strict=True)
    )
    x = tokens(plain, batch=8, extra=1)
    loss = plain(x[:, :-1], x[:, 1:]).mean()
    assert abs(loss.item() - math.log(plain.config.vocab_size)) < 0.1
    name = "head.output.weight"
    with torch.device("meta"):
        value = trained.init_parameter(name, (3, 2), gpt.generator(0, name))
    assert value.device.type == "cpu"


def test_what_is_no_text_of_this_model_is_named():
    model = build(**SHAPES["gpt"])
    s = model.config.seq_length
    v = model.config.vocab_size
    with pytest.raises(
        ValueError, match=f"a sequence of {s + 1} tokens is longer than seq_length {s}$"
    ):
        model(tokens(model, extra=1))
    for wrong in (v, -1):
        x = tokens(model)
        x[1, 3] = wrong
        with pytest.raises(
            ValueError, match=f"token id {wrong}: must be from 0 to {v - 1}, for vocab_size is {v}$"
        ):
            model(x)


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(num_heads=5), ["num_heads 5", "hidden_size 48", "[3, 4, 6] would"]),
        (dict(num_kv_heads=3), ["num_kv_heads 3", "num_heads 4", "[1, 2, 4] would"]),
        (dict(num_layers=0), ["num_layers 0"]),
        (dict(dropout=1.0), ["dropout 1.0"]),
        (dict(vocab_size=-1), ["vocab_size -1"]),
        (dict(dropout=0.1, attention="fused"), ["fused", "explicit"]),
        (dict(attention="flash"), ["flash", "explicit or fused"]),
        (dict(num_layers=2.0), ["num_layers 2.0", "an integer"]),
        (dict(norm_eps="x"), ["norm_eps 'x'", "a number"]),
        (dict(norm_eps=0), ["norm_eps 0", "1e-30"]),
        (dict(rotary_base=0), ["rotary_base 0"]),
        (dict(window_pattern="12", sliding_window=2), ["window_pattern '12': must be a row of 1"]),
        (dict(window_pattern="0", sliding_window=2), ["window_pattern '0'", "with a 1"]),
        (dict(window_pattern="10"), ["window_pattern 10: needs a window"]),
        (dict(llama=1), ["llama 1", "true or false"]),
        (dict(attention=None), ["attention None", "text"]),
        (dict(num_experts=2, router="topk", aux_loss="x"), ["aux_loss 'x'", "or null"]),
        (dict(num_heads=16, llama=True), ["even", "3"]),
    ],
)
def test_impossible_shapes_name_what_to_change(fields, words):
    with pytest.raises(ValueError) as e:
        make_config(**SHAPES["gpt"] | fields)
    assert all(word in str(e.value) for word in words), str(e.value)


def test_lesson_of_presets(capsys, monkeypatch):
    """Of some presets: test_presets_have_the_published_sizes counts all."""
    some = dict(list(PRESETS.items())[::5]) | {"megatron-1t": PRESETS["megatron-1t"]}
    monkeypatch.setattr(presets, "PRESETS", some)
    presets.main()
    out = capsys.readouterr().out
    assert "1,008,038,758,400" in out and len(out.splitlines()) == len(some) + 1
