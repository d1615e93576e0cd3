import pytest
import torch
import torch.distributed as dist
from parity import LLAMA, SMALL, again, check, differs, train

import gpt
import sharding
import tensor_parallel
from base.cross_entropy import cross_entropy
from base.dropout import dropout_key
from base.model_config import GPTConfig
from course import demo, ranks
from sharding import Shard, Sharding, shard_of

B = 2
S = 8
H = 32


def build(group, dtype=torch.float64, num_layers=2, **fields):
    shape = dict(num_layers=num_layers, hidden_size=H, num_heads=8, seq_length=S, vocab_size=61)
    model = demo.meta_model(GPTConfig(**shape, **fields))
    if group:
        tensor_parallel.apply(model, group)
    sharding.init(model, 0, "cpu", dtype)
    return model


# --- f and g --------------------------------------------------------------------------------------


def f_and_g(rank):
    group = dist.group.WORLD
    x = torch.full((3,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    grad_output = torch.full((3,), 10.0 * (rank + 1), dtype=torch.float64)
    results = {}
    for name, y in (
        ("f", tensor_parallel.copy_to_ranks(x, group)),
        # g overwrites its input, which must not be the leaf x
        ("g", tensor_parallel.reduce_from_ranks(x * 1, group)),
    ):
        (grad,) = torch.autograd.grad(y, x, grad_output)
        results[name] = y[0].item(), grad[0].item()
    return results


def test_f_and_g_by_hand():
    """Ranks hold 1 and 2, and get gradients 10 and 20."""
    first, second = ranks.run(f_and_g, 2)
    # f: identity | all-reduce; g: all-reduce | identity
    assert first == {"f": (1.0, 30.0), "g": (3.0, 10.0)}
    assert second == {"f": (2.0, 30.0), "g": (3.0, 20.0)}


# --- vocabulary -----------------------------------------------------------------------------------


def vocabulary(rank, v, dtype):
    """Cross entropy, sharded by vocabulary, against the whole; the ranks do not divide v."""
    group = dist.group.WORLD
    t = dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(B, S, v, generator=g, dtype=torch.float64) * 3).to(dtype)
    logits.requires_grad_()
    targets = torch.randint(v, (B, S), generator=g)
    weight = torch.rand(B, S, generator=g)
    targets[0, 0] = 0
    targets[0, 1] = v - 1

    by_vocabulary = Sharding((B, S, v), (Shard(2, group),))
    local = shard_of(logits.detach(), by_vocabulary) + 0
    assert local.shape[-1] == -(-v // t)
    real = max(0, min(local.shape[-1], v - rank * local.shape[-1]))
    # the padding: were it looked at, it would win
    local[..., real:] = 50
    local.requires_grad_()
    # times 1: cross entropy overwrites its input, which must not be a leaf
    loss = tensor_parallel.vocab_parallel_cross_entropy(local * 1, targets, v, group)
    expected = cross_entropy(logits * 1, targets)
    exact = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(loss, expected, rtol=exact, atol=exact)
    (loss * weight).sum().backward()
    (expected * weight).sum().backward()
    assert (local.grad[..., real:] == 0).all()
    rounded = 8e-3 if dtype == torch.bfloat16 else exact
    whole_grad = sharding.gather(local.grad, by_vocabulary)
    torch.testing.assert_close(whole_grad, logits.grad, rtol=rounded, atol=rounded / 100)
    with torch.no_grad():
        loss = tensor_parallel.vocab_parallel_cross_entropy(local * 1, targets, v, group)
    torch.testing.assert_close(loss, expected.detach(), rtol=exact, atol=exact)
    return True


@pytest.mark.parametrize(
    "world, v, dtype",
    [(4, 61, torch.float32), (4, 5, torch.float64), (2, 60, torch.bfloat16)],
)
def test_vocabulary(world, v, dtype):
    """5 words over 4 ranks are 2, 2, 1 and 0."""
    assert all(ranks.run(vocabulary, world, v, dtype))


# --- the model ------------------------------------------------------------------------------------


def real_weights(rank):
    """A model that has its weights already is cut where it is."""
    one = build(None)
    model = build(None)
    tensor_parallel.apply(model, dist.group.WORLD)
    assert model.head.output.weight is model.embedding.tokens.weight
    tokens = torch.randint(61, (B, S), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), one(tokens), rtol=1e-10, atol=1e-10)
    return True


def test_a_model_with_weights():
    assert all(ranks.run(real_weights, 2))


def refusals(rank):
    """What would be silently wrong is refused, and what is no word is refused on every rank, as on
    one device."""
    group = dist.group.WORLD
    model = build(group)
    good = torch.zeros(B, S, dtype=torch.long)
    for bad in (61, 62, 63, 1000, -1, -100):
        for tokens, targets in ((good + bad, good), (good, good + bad)):
            with pytest.raises((IndexError, RuntimeError), match="out of"):
                model(tokens, targets)
    with pytest.raises(ValueError, match="already"):
        tensor_parallel.apply(model, group)
    loss = model(good, good).sum()
    (gradient,) = torch.autograd.grad(loss, model.head.norm.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    frozen = build(None)
    frozen.requires_grad_(False)
    frozen.head.norm.weight.requires_grad_(True)
    tensor_parallel.apply(frozen, group)
    return [n for n, p in frozen.named_parameters() if p.requires_grad]


def test_refusals_and_frozen_parameters():
    assert ranks.run(refusals, 2) == [["head.norm.weight"]] * 2


def counted(rank, recompute_kind):
    import recompute

    model = build(dist.group.WORLD, num_layers=1, dropout=0.1, dtype=torch.float32)
    recompute.apply(model, recompute_kind)
    block = model.blocks["0"]
    context = gpt.Context(dropout_key(0, 1, torch.arange(B)))
    x = torch.randn(B, S, H, requires_grad=True)
    with ranks.Collectives() as forward:
        y = block(x, context)
    with ranks.Collectives() as backward:
        y.sum().backward()
    tokens = torch.zeros(B, S, dtype=torch.long)
    with ranks.Collectives() as everything:
        model(tokens, tokens, context).sum().backward()
    return forward.calls, backward.calls, everything.calls


def test_collectives_of_the_paper():
    """2 all-reduces forward and 2 backward for each layer (2104.04473, section 3.2), of b s h
    elements. Outside the layers: the embedding's sum, the head's input gradient, and three
    statistics per token for the loss."""
    whole = ("all-reduce", B * S * H * 4)
    forward, backward, everything = ranks.run(counted, 2, "none")[0]
    assert forward == [whole] * 2 and backward == [whole] * 2
    statistics = [("all-reduce", B * S * 4), ("all-reduce", 2 * B * S * 4)]
    # the embedding, the layer, the loss; the head's input gradient, the layer
    assert everything == [whole, *forward, *statistics, whole, *backward]
    # core attention does not communicate
    assert ranks.run(counted, 2, "selective")[0][:2] == (forward, backward)
    # the forward pass once more
    assert ranks.run(counted, 2, "full")[0][1] == [whole] * 2 + backward


# --- fewer key heads than ranks -------------------------------------------------------------------


def gathered_heads(rank):
    """Rank n has column n of two heads of two columns."""
    heads = tensor_parallel.GatherHeads(2, dist.group.WORLD)
    k = torch.tensor([[[1.0 + rank]]], dtype=torch.float64, requires_grad=True)
    with ranks.Collectives() as forward:
        _, whole, value = heads([k, k, -k])
    assert torch.equal(whole, -value)
    (grad,) = torch.autograd.grad(whole, k, torch.tensor([[[1.0, 10.0]]]).double() * (1 + rank))
    return whole.flatten().tolist(), grad.item(), forward.calls


def test_gathered_heads_by_hand():
    """Each rank has its neighbour's column too; the gradient of a column is the sum over the two
    copies of its head. k and v go in one message, of which half is a rank's own."""
    found = ranks.run(gathered_heads, 4)
    assert [whole for whole, *_ in found] == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert [grad for _, grad, _ in found] == [1 + 2, 10 + 20, 3 + 4, 30 + 40]
    assert all(calls == [("all-to-all", 2 * 2 * 8)] for *_, calls in found)


def no_sum_over_copies():
    """The gradient of a column is that of this rank's own queries."""

    def backward(ctx, grad):
        mine = ctx.group.rank() % ctx.r
        return grad.unflatten(-1, (ctx.r, -1))[..., mine, :], None, None

    tensor_parallel._GatherHeads.backward = staticmethod(backward)


def columns_in_another_order():
    """A key's columns are not where the query's are."""
    original = tensor_parallel.exchange_copies
    tensor_parallel.exchange_copies = lambda parts, group: original(parts, group).flip(0)


ONE_KEY = LLAMA | dict(num_kv_heads=1)
TWO_KEYS = LLAMA | dict(num_kv_heads=2, num_layers=3)
GEMMA = SMALL | dict(model="gemma-2b", ffn_hidden_size=56, num_heads=8)
EXPERTS = dict(num_experts=4, router="topk", router_topk=2, micro_batch_size=4)
FP8 = dict(fp8="current", fp8_scales="any", fp8_skip=0, micro_batch_size=4)
LORA = dict(peft="lora", lora_rank=3, peft_targets=["key", "value", "down"], lora_dropout=0.1)
UNEVEN = dict(tp=4, pp=2, layer_split=[2, 1], micro_batch_size=2)
SEQUENCE = dict(tp=4, sequence_parallel=True)


@pytest.mark.parametrize(
    "base, world, layouts",
    [
        (ONE_KEY, 2, [dict(tp=2, sequence_parallel=True)]),
        again(TWO_KEYS, 4, [dict(tp=4), SEQUENCE | dict(recompute="full", head_chunk=3)]),
        again(GEMMA, 8, [dict(tp=8), dict(tp=8, sequence_parallel=True)]),
        again(TWO_KEYS, 8, [UNEVEN, UNEVEN | dict(schedule="zb-h1"), SEQUENCE | dict(cp=2)]),
        again(TWO_KEYS, 8, [dict(tp=4, zero_stage=n) for n in (1, 2, 3)]),
        again(TWO_KEYS | EXPERTS, 8, [SEQUENCE | dict(ep=2)]),
        again(TWO_KEYS | FP8, 4, [dict(tp=4), SEQUENCE]),
        again(TWO_KEYS | LORA, 4, [dict(tp=4), SEQUENCE]),
        again(TWO_KEYS | dict(peft="ia3", peft_targets=["key", "value"]), 4, [SEQUENCE]),
        again(TWO_KEYS | dict(model="qwen3-0.6b", head_dim=12), 4, [dict(tp=4), SEQUENCE]),
        again(TWO_KEYS | dict(positions="alibi", sliding_window=5), 4, [SEQUENCE]),
    ],
)
def test_fewer_key_heads_than_ranks(base, world, layouts):
    check(world, layouts, base)


@pytest.mark.parametrize("bug", [no_sum_over_copies, columns_in_another_order])
def test_what_copies_need(bug):
    differs(train(2, base=ONE_KEY, tp=2, mutate=bug), train(base=ONE_KEY))


@pytest.mark.parametrize(
    "fields, t, words",
    [
        (dict(num_heads=6), 4, ["tp 4", "num_heads 6", "[2, 3, 6] would fit"]),
        (dict(num_kv_heads=4, num_heads=12), 12, ["num_kv_heads 4, or a multiple", "[1, 2, 4]"]),
        (dict(ffn_hidden_size=90, num_heads=8), 4, ["ffn_hidden_size 90", "[1, 2]"]),
    ],
)
def test_what_t_ranks_cannot_share(fields, t, words):
    with pytest.raises(ValueError) as e:
        tensor_parallel.check(GPTConfig(**dict(num_layers=1, hidden_size=48) | fields), t)
    assert all(word in str(e.value) for word in words), str(e.value)
