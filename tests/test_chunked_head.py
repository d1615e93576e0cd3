"""Logits a few tokens at a time: one device's loss and gradients, and the bytes that are left."""

import pytest
import torch
import torch.nn.functional as F
from parity import LLAMA, SMALL, again, check, differs, train

import gpt
import recompute
import tensor_parallel
from base.model_config import FieldError
from planning import counters
from recompute import chunked_loss

# 8 sequences of 16 tokens: 7 does not divide them, and 257 is divided by no t; GPT's matrix is tied
TIED = SMALL | dict(vocab_size=257, head_chunk=7)
UNTIED = LLAMA | dict(vocab_size=257, num_heads=8, num_kv_heads=4, head_chunk=7)
LAYOUTS = [
    (1, [dict(), dict(head_chunk=1000), dict(micro_batch_size=4, recompute="selective")]),
    (2, [dict(tp=2), dict(tp=2, sequence_parallel=True), dict(zero_stage=3)]),
    (2, [dict(pp=2, schedule="zb-h1"), dict(pp=2)]),
    (4, [dict(tp=4), dict(tp=2, pp=2, sequence_parallel=True, recompute="full")]),
]


CASES = [(TIED, *layout) for layout in LAYOUTS[:3]] + [
    (UNTIED, 2, [dict(tp=2, sequence_parallel=True, recompute="full"), *LAYOUTS[2][1][:1]]),
    # the last of four ranks has padding alone
    (UNTIED | dict(vocab_size=5, head_chunk=3), 4, [dict(tp=4)]),
    again(TIED, *LAYOUTS[3]),
    *[again(UNTIED, *layout) for layout in LAYOUTS],
]


@pytest.mark.parametrize("base, world, variants", CASES)
def test_equals_the_whole_head(base, world, variants):
    check(world, variants, base)


def no_sums():
    """The ranks' columns are never added up."""
    tensor_parallel.reduce_statistics = lambda *statistics: statistics[:3]


def last_tokens_forgotten():
    """Backward forgets the last 7 tokens."""
    backward = recompute._ChunkedLoss.backward

    def broken(ctx, grad):
        grad = grad.clone()
        grad[-7:] = 0
        return backward(ctx, grad)

    recompute._ChunkedLoss.backward = staticmethod(broken)


@pytest.mark.parametrize(
    "world, flags, mutate", [(2, dict(tp=2), no_sums), (1, dict(), last_tokens_forgotten)]
)
def test_the_gate_sees(world, flags, mutate):
    differs(train(world, base=TIED, mutate=mutate, **flags), train(base=TIED | dict(head_chunk=0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_is_summed_in_float32(dtype):
    """Over 256 chunks of one token: a sum in 16 bits would lose most of it."""
    torch.manual_seed(0)
    x = torch.randn(4, 64, 32).to(dtype)
    weight = torch.randn(11, 32).to(dtype) / 4
    targets = torch.randint(11, (4, 64))
    gradients = []
    for kind in (torch.float64, dtype):
        leaves = [t.to(kind).requires_grad_() for t in (x, weight)]
        chunked_loss(*leaves, targets, 1, 11).sum().backward()
        gradients.append([leaf.grad.double() for leaf in leaves])
    for exact, rounded in zip(*gradients):
        assert (exact - rounded).norm() < torch.finfo(dtype).eps * exact.norm()


def test_a_frozen_matrix_has_no_gradient():
    x = torch.randn(1, 4, 8, requires_grad=True)
    weight = torch.randn(5, 8)
    chunked_loss(x, weight, torch.tensor([[0, 1, 2, 3]]), 3, 5).sum().backward()
    assert weight.grad is None
    expected = torch.autograd.functional.jacobian(
        lambda x: F.cross_entropy(F.linear(x[0], weight), torch.arange(4), reduction="sum"), x
    )
    torch.testing.assert_close(x.grad, expected)


def test_bytes_are_those_of_the_formula():
    n, h, v = 512, 16, 4096
    x, weight = torch.randn(1, n, h), torch.randn(v, h)
    targets = torch.randint(v, (1, n))
    for chunk in (32, 128):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        peak = counters.peak_bytes(
            lambda leaves=leaves, chunk=chunk: (
                chunked_loss(*leaves, targets, chunk, v).sum().backward()
            )
        )
        formula = 4 * (chunk * v + n * h + 2 * v * h)
        # and a few numbers for each token
        assert formula <= peak < formula + 100 * n


def test_without_targets_logits_are_whole():
    model = gpt.GPT(
        gpt.GPTConfig(num_layers=1, hidden_size=8, num_heads=1, seq_length=4, vocab_size=11)
    )
    tokens = torch.arange(4)[None]
    logits = model(tokens)
    names = [name for name, _ in model.named_parameters()]
    recompute.chunk_head(model, 3)
    assert torch.equal(model(tokens), logits)
    assert [name for name, _ in model.named_parameters()] == names
    # off: nothing changes
    other = gpt.GPT(model.config)
    recompute.chunk_head(other, 0)
    assert type(other.head) is gpt.Head
    with pytest.raises(FieldError, match="-1"):
        recompute.check_head(-1)


def test_a_target_that_is_no_word():
    x, weight = torch.randn(1, 2, 4), torch.randn(5, 4)
    for wrong in (-1, 5):
        with pytest.raises((RuntimeError, IndexError)):
            chunked_loss(x, weight, torch.tensor([[0, wrong]]), 1, 5)
