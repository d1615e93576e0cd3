"""context_parallel.py: parts of attention merge to the whole, and so do their gradients."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

import context_parallel
import gpt
from base import attention_kernels
from base.attention_kernels import CuDNN, EfficientOnCUDA, FlashOnCUDA, Kernel
from context_parallel import Block, RingAttention, attend, attend_backward, merge, own_positions
from course import ranks
from families import LocalBias

B, A, S, D = 2, 4, 24, 8


def random(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def relative(x, reference) -> float:
    return ((x - reference).abs().max() / reference.abs().max()).item()


def plain(visible=None, dropped=None, causal=False, keep=1.0) -> Block:
    return Block(slice(None), slice(None), causal, visible, dropped, keep)


# --- parts of one attention -----------------------------------------------------------------------


def test_merge_by_hand():
    """Keys of weight 1 and 3 with values 0 and 8, one of weight 6 with value 2."""
    first = torch.tensor(6.0), torch.tensor(math.log(4))
    o, log_sum = merge(*first, torch.tensor(2.0), torch.tensor(math.log(6)))
    assert o.item() == pytest.approx(3.6) and log_sum.item() == pytest.approx(math.log(10))
    # nothing seen there
    o, log_sum = merge(*first, torch.tensor(0.0), torch.tensor(-math.inf))
    assert (o, log_sum) == first


def test_large_scores_merge():
    """exp(1000) is no float."""
    q, k, v = random(1, 1, 1, D), random(1, 1, 6, D, seed=1) * 1000, random(1, 1, 6, D, seed=2)
    whole, _ = attend(q, k, v, plain())
    parts = [attend(q, k[:, :, at], v[:, :, at], plain()) for at in (slice(2), slice(2, None))]
    assert relative(merge(*parts[0], *parts[1])[0], whole) < 1e-12


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_gradients_of_parts_add_up(cut, by_hand, monkeypatch):
    """Of PyTorch's own attention over all keys, by the kernel and by hand, in any two parts."""
    if by_hand:
        monkeypatch.setattr(context_parallel, "kernel_for", lambda q, k: None)
    q, k, v, grad = (random(B, A, 12, D, seed=n).requires_grad_() for n in range(4))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    gradients = torch.autograd.grad(expected, (q, k, v), grad)
    q, k, v, grad = (x.detach() for x in (q, k, v, grad))
    slices = slice(cut), slice(cut, None)
    parts = [attend(q, k[:, :, at], v[:, :, at], plain()) for at in slices]
    o, log_sum = merge(*parts[0], *parts[1])
    assert relative(o, expected) < 1e-12
    found = [
        attend_backward(q, k[:, :, at], v[:, :, at], o, log_sum, grad, plain()) for at in slices
    ]
    dq, dk, dv = zip(*found)
    for tensor, reference in zip((sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)), gradients):
        assert relative(tensor, reference) < 1e-12


def test_a_query_that_sees_nothing():
    visible = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril(-1)
    o, log_sum = attend(random(1, A, 3, D), random(1, A, 3, D), random(1, A, 3, D), plain(visible))
    assert o[:, :, 0].eq(0).all() and log_sum[:, :, 0].eq(-math.inf).all()
    assert o.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_kernel_and_hand_agree(causal, dtype, tolerance, monkeypatch):
    q, k, v, grad = (random(B, A, 16, D, seed=n).to(dtype) for n in range(4))
    results = []
    for hand in (False, True):
        if hand:
            monkeypatch.setattr(context_parallel, "kernel_for", lambda q, k: None)
        o, log_sum = attend(q, k, v, plain(causal=causal))
        # of 16 bits too
        assert log_sum.dtype == torch.promote_types(dtype, torch.float32)
        gradients = attend_backward(q, k, v, o, log_sum, grad, plain(causal=causal))
        results.append([o, log_sum, *gradients])
    for kernel, by_hand in zip(*results):
        assert relative(kernel.double(), by_hand.double()) < tolerance


# --- which blocks meet ----------------------------------------------------------------------------


class OfRank:
    """A group's place among ranks that are not there."""

    def __init__(self, rank: int, n: int):
        self.rank, self.size = lambda: rank, lambda: n


@pytest.mark.parametrize("n", [2, 3, 4])
def test_blocks_are_the_causal_mask_once(n):
    """Over all ranks and sources, each query meets each key that it sees exactly once, and none
    that it does not see."""
    s = 4 * n
    counts = torch.zeros(s, s)
    work = []
    for rank in range(n):
        blocks = context_parallel.Blocks(RingAttention(OfRank(rank, n)), gpt.PLAIN, s)
        q = torch.empty(1, 1, s // n, D)
        before = counts.sum()
        for source in range(n):
            block = blocks.meeting(source, q)
            at_q = own_positions(s, rank, n)[block.queries]
            at_k = own_positions(s, source, n)[block.keys]
            met = torch.ones(len(at_q), len(at_k))
            counts[at_q.unsqueeze(1), at_k] += met.tril() if block.causal else met
        work.append((counts.sum() - before).item())
    assert counts.equal(torch.ones(s, s).tril())
    # zigzag: equal work
    assert len(set(work)) == 1


@pytest.mark.parametrize("window", [1, 3, 8, 9, 20, 31])
def test_blocks_leave_out_what_a_window_hides(window):
    """Their biases are the window of the whole sequence, and none has a row or a column of hidden
    tokens alone; of ranks that are out of reach no work is left."""
    n, s = 4, 32
    config = gpt.GPTConfig(1, 16, 2, seq_length=s, sliding_window=window)
    local = LocalBias(config)
    counts = torch.zeros(s, s)
    for rank in range(n):
        blocks = context_parallel.Blocks(RingAttention(OfRank(rank, n), local), gpt.PLAIN, s)
        for source in range(n):
            block = blocks.meeting(source, torch.empty(1, 2, s // n, D))
            at_q = own_positions(s, rank, n)[block.queries]
            at_k = own_positions(s, source, n)[block.keys]
            seen = block.bias[0, 0].isfinite()
            assert seen.any(0).all() and seen.any(1).all()
            counts[at_q.unsqueeze(1), at_k] += seen
            if window == 1:
                assert source == rank or not block.bias.numel()
    distance = torch.arange(s).unsqueeze(1) - torch.arange(s)
    assert counts.equal(((distance >= 0) & (distance < window)).float())


# --- over ranks -----------------------------------------------------------------------------------


def tensors() -> list:
    """q, k, v, ∂o; queries in groups of two"""
    of_heads = [random(B, a, S, D, seed=n) for n, a in enumerate((A, 2, 2))]
    return [x.bfloat16() for x in (*of_heads, random(B, S, A * D, seed=9))]


def run(core, q, k, v, grad):
    leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
    y = core(*leaves, gpt.PLAIN)
    y.backward(grad)
    return [y.detach(), *(x.grad for x in leaves)]


def on_rank(rank):
    group = dist.group.WORLD
    *of_heads, grad = tensors()
    own = [context_parallel.shard(x, group, 2) for x in of_heads]
    core = RingAttention(group, gpt.ExplicitAttention(0.0, site=1))
    parts = run(core, *own, context_parallel.shard(grad, group))
    # the result is [b, s, a d]
    return [context_parallel.gather(x, group, 2 - (x.dim() == 3)) for x in parts]


def test_sixteen_bits():
    """Less than twice as far from the exact result as one device's kernel. (64 bits, documents and
    dropout: test_context_parallel.py.)"""
    exact = run(gpt.FusedAttention(), *(x.double() for x in tensors()))
    one = run(gpt.FusedAttention(), *tensors())
    found = ranks.run(on_rank, 4)[0]
    for tensor, of_one, reference in zip(found, one, exact):
        assert tensor.dtype == torch.bfloat16
        distance = relative(tensor.double(), reference)
        assert distance < 2 * relative(of_one.double(), reference)


def test_whole_sequences_puts_one_device_back():
    """What context parallelism has put into a model is out, and then there again."""
    config = gpt.GPTConfig(
        num_layers=1, hidden_size=16, num_heads=2, seq_length=8, vocab_size=11, dropout=0.0
    )
    models = [gpt.GPT(config).double() for _ in range(2)]
    tokens = torch.arange(8).unsqueeze(0)
    for kind in context_parallel.COMM_TYPES:
        model = gpt.GPT(config).double()
        context_parallel.apply(model, OfRank(1, 2), kind)
        before = dict(model.named_modules())
        names = [name for name, _ in models[0].named_parameters()]
        assert [name for name, _ in model.named_parameters()] == names
        with context_parallel.whole_sequences([model]):
            assert model(tokens).equal(models[0](tokens))
        assert dict(model.named_modules()) == before
        with pytest.raises(RuntimeError), context_parallel.whole_sequences([model]):
            raise RuntimeError
        assert dict(model.named_modules()) == before


# --- kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel, dtype",
    [
        (CuDNN, torch.bfloat16),
        (FlashOnCUDA, torch.bfloat16),
        (EfficientOnCUDA, torch.float32),
        (Kernel, torch.float32),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
@pytest.mark.parametrize("m, n", [(24, 24), (24, 12), (12, 24)])
def test_arguments_fit_the_signatures(kernel, dtype, m, n):
    """On the meta device, which checks them, and knows the shapes of what comes back."""
    q, k = (torch.empty(B, A, length, D, dtype=dtype, device="meta") for length in (m, n))
    kernel = attention_kernels.make(kernel)
    o, log_sum = kernel.forward(q, k, k, m == n)
    assert o.shape == q.shape and log_sum.shape == (B, A, m, 1)
    gradients = kernel.backward(o, q, k, k, o, log_sum.contiguous(), m == n)
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]


def test_a_missing_kernel_is_computed_by_hand():
    class Missing(Kernel):
        name = "attention_of_next_year"

    assert attention_kernels.make(Missing) is None
    # a device without one
    q = torch.empty(1, 1, 4, D, device="meta")
    assert attention_kernels.kernel_for(q, q) is None


@pytest.mark.parametrize(
    "choice, kind",
    [
        (SDPBackend.CUDNN_ATTENTION, CuDNN),
        (SDPBackend.FLASH_ATTENTION, FlashOnCUDA),
        (SDPBackend.EFFICIENT_ATTENTION, EfficientOnCUDA),
        (SDPBackend.MATH, type(None)),
        (SDPBackend.ERROR, type(None)),
    ],
    ids=str,
)
def test_pytorch_chooses_the_kernel(choice, kind, monkeypatch):
    """As for `F.scaled_dot_product_attention` in training, also where no gradients are recorded."""
    asked = []

    def choose(q, k, v):
        asked.append((q.requires_grad and torch.is_grad_enabled(), k.shape[2]))
        return int(choice)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    q, k = torch.empty(1, 1, 4, D, device="meta"), torch.empty(1, 1, 2, D, device="meta")
    with torch.no_grad():
        assert type(attention_kernels.kernel_for(q, k)) is kind
    # heads that are no whole vectors
    assert attention_kernels.kernel_for(q[..., :7], k[..., :7]) is None
    assert asked == [(True, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float32, 1e-4)],
    ids=str,
)
def test_kernels_on_a_gpu(dtype, tolerance, causal, monkeypatch):
    """Lengths that are no multiple of 32; the log-sum-exp is that of more keys than these."""
    m, n = (40, 40) if causal else (40, 72)
    q, grad = (random(B, A, m, 64, seed=i).to("cuda", dtype) for i in range(2))
    k, v = (random(B, A, n, 64, seed=i).to("cuda", dtype) for i in (2, 3))
    results = []
    for hand in (False, True):
        if hand:
            monkeypatch.setattr(context_parallel, "kernel_for", lambda q, k: None)
        else:
            assert attention_kernels.kernel_for(q, k)
        o, log_sum = attend(q, k, v, plain(causal=causal))
        gradients = attend_backward(q, k, v, o, log_sum + 0.5, grad, plain(causal=causal))
        results.append([o, log_sum, *gradients])
    for kernel, by_hand in zip(*results):
        assert relative(kernel.double(), by_hand.double()) < tolerance
