"""Mixture of experts: many MLPs, of which each token goes through one or a few (BASE layers, arXiv 2103.16716; Switch, arXiv 2101.03961).

The parameters of a layer grow with the number of experts E, its FLOPs do not: a token pays for the k experts that it goes to. Who goes where is
the router's choice, from x W_rᵀ, a logit for each expert. Left alone it sends everybody to a few experts, so it is balanced, in one of two ways:

    sinkhorn    each expert gets the same mass of a transport plan between tokens and experts (S-BASE, arXiv 2202.01169), and each token goes where
                the plan has most of it. The plan has no gradient; the gate, by which an expert's output is multiplied, is from the raw logits.
    topk        the largest logits; a loss pulls towards even load (Switch, eq. 4-6), another keeps logits small (ST-MoE, arXiv 2202.08906, eq. 5)

    tokens 0 1 2 3 4 5    dispatch: sorted by expert      all-to-all         experts            all-to-all, combine
    chosen 2 0 3 0 2 1    1 3 | 5 | 0 4 | 2         --->  rank 0: 0, 1  -->  one grouped   --->  back where they came from,
                          e0    e1  e2    e3              rank 1: 2, 3       matmul each         times the gate, summed over k

Expert parallelism spreads the experts over `ep` of the data-parallel ranks, each of which has as many; tokens travel to their experts, and home again. No token is
dropped unless a capacity is set. Dispatch and combine are one pair of adjoints (`take`, `put`), the all-to-all is its own. The gradient of an expert is the sum
over all tokens of its expert-parallel group by then, so fsdp.py sums it only over the ranks that hold the same experts; the loss is divided by the
number of tokens in the whole global batch, so there is nothing else to divide by.

Who goes where depends on the micro-batch, for a plan balances one: on nothing else. Under tensor parallelism every rank sees the whole micro-batch's logits, also where its tokens
are sliced along the sequence, and holds a slice of each expert's inner dimension. Evaluation takes the raw logits, each token for itself.

    python moe.py      a plan by hand; what temperature does to the load; two ranks with half of the experts each: gradients, bytes

Experts have no biases. What Megatron-LM adds: all-to-alls that overlap with computation; under tensor parallelism only a slice of the tokens on each
rank's all-to-all (here tokens are gathered along the sequence first, as for a dense layer, so each of t ranks sends them all); shared experts; biases of the router.
"""
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
import sharding
from sharding import Cut

TINY = 1e-100                            # added to what is divided by

# --- who goes where -------------------------------------------------------------------------------------------------

def sinkhorn(logits: Tensor, temperature: float = 1.0, tolerance: float = 1e-4, most: int = 1000) -> Tensor:
    """The plan d0 C d1 with C = exp(logits / temperature), whose rows sum to 1/N and columns to 1/E (arXiv 2202.01169, section 3.1): scale rows, scale columns,
    until d1 changes by no more than a share `tolerance` of it on average, or `most` times.

    The plan is balanced; the largest entries of its rows need not be: a token that is split 6 to 4 goes one way whole. The lower the temperature, the less is split, and the
    more is there to balance. So the way down is gradual: C and d1 are squared, which halves the temperature, and d1 is nearly right already.
    logits: [N, E], of any size: the largest of each row is subtracted, and d0 makes up for it. Returns [N, E], float64: exp(-20 / 0.02) is no float32."""
    logits = logits.double()
    cost = (logits - logits.amax(1, keepdim=True)).exp()
    n, e = cost.shape
    d1, now = cost.new_ones(e), 1.0
    while True:
        for _ in range(most):
            d0 = 1 / n / (cost @ d1 + TINY)
            before, d1 = d1, 1 / e / (cost.t() @ d0 + TINY)
            if not ((d1 - before).abs() / d1).mean() > tolerance:        # also where it is not a number
                break
        if now <= temperature:
            return d0.unsqueeze(1) * cost * d1
        power = min(2.0, now / temperature)
        cost, d1, now = cost ** power, d1 ** power, now / power


class Router(nn.Module):
    """A logit for each token and expert, in at least float32."""

    def __init__(self, config: gpt.GPTConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.k, self.temperature, self.aux_loss, self.z_loss = config.router_topk, config.router_temperature, config.aux_loss, config.z_loss

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, h] -> [b, s, E]"""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.weight.to(wide))

    def scores(self, logits: Tensor, training: bool) -> Tensor:
        """A token goes where these are largest. logits: [n, E] -> [n, E]"""
        return logits

    def losses(self, logits: Tensor, share: Tensor) -> Tensor:
        """Sums over these tokens of their parts of the load-balancing loss, E Σ_e f_e P_e, and the z-loss, (log Σ exp z)², each with its coefficient.
        logits: [.., E] of any part of a micro-batch; share: [E], f_e, the share of all choices in the micro-batch that fell on each. Scalar."""
        balance = self.aux_loss * len(share) * (logits.softmax(-1) @ share).sum() if self.aux_loss else 0.0
        return balance + (self.z_loss * logits.logsumexp(-1).square().sum() if self.z_loss else 0.0)


class TopKRouter(Router):
    """The k largest probabilities. With k = 1 the gate is the probability itself (Switch, eq. 2), else the k add up to 1 (as in Mixtral, arXiv 2401.04088)."""

    def gates(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """What the output of each chosen expert is multiplied by. logits: [n, E]; chosen: [n, k] -> [n, k]"""
        if self.k == 1:
            return logits.softmax(-1).gather(1, chosen)
        return logits.gather(1, chosen).softmax(-1)


class SinkhornRouter(Router):
    """Training takes the largest of the balanced plan, evaluation of the raw logits."""

    def scores(self, logits: Tensor, training: bool) -> Tensor:
        return sinkhorn(logits, self.temperature, 1e-2) if training else logits

    def gates(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """As TopKRouter's; the sigmoid for k = 1, else the softmax over all experts, as in Megatron-LM."""
        return (logits.sigmoid() if self.k == 1 else logits.softmax(-1)).gather(1, chosen)


class Plan(NamedTuple):
    """Where rows go and come from; n tokens, k choices each. Assignment a is choice a // n of token a % n."""
    chosen: Tensor                       # [n, k] expert
    share: Tensor                        # [E] of all choices
    order: Tensor                        # [m] assignments sorted by expert, the dropped ones left out
    place: Tensor                        # [k, n] where each assignment is in `order`; m: dropped
    rows: Tensor                         # [E / ep] for each expert of this rank
    sent: list[int]                      # rows to each expert-parallel rank; empty without them
    received: list[int]
    by_expert: Tensor | None             # [sum of received] which of the received rows, in the order of experts
    by_rank: Tensor | None               # .. and back


def positions(order: Tensor, size: int) -> Tensor:
    """The inverse of a permutation, or of a selection: where each of `size` numbers is in `order`; len(order) for those that are not."""
    place = torch.full((size,), len(order), dtype=order.dtype, device=order.device)
    place[order] = torch.arange(len(order), device=order.device)
    return place


class Decision(nn.Module):
    """From logits to a plan, and the router's statistics. There is no gradient in it; recompute.py lets it run once: `decides`."""
    decides = True

    def __init__(self, scores, config: gpt.GPTConfig):
        super().__init__()
        self.scores, self.k, self.capacity_factor = scores, config.router_topk, config.capacity_factor
        self.group: dist.ProcessGroup | None = None                      # of expert parallelism
        self.statistics: Tensor | None = None                            # [E + 3] sums over training tokens: choices of each expert, dropped, entropy, tokens

    @torch.no_grad()
    def forward(self, logits: Tensor) -> Plan:
        """logits: [n, E], of the whole micro-batch"""
        n, e = logits.shape
        chosen = self.scores(logits, self.training).topk(self.k).indices
        flat = chosen.t().flatten()                                      # [k n]: all first choices first
        counts = flat.bincount(minlength=e)
        share, order = counts.to(logits.dtype) / len(flat), flat.argsort(stable=True)
        if self.capacity_factor and self.training:                       # evaluation drops nothing
            capacity = -int(-self.capacity_factor * len(flat) // e)      # ceil
            rank_in_expert = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
            order = order[rank_in_expert < capacity]
        if self.training:
            entropy = -(logits.log_softmax(-1) * logits.softmax(-1)).sum()
            new = torch.cat((counts.double(), counts.new_tensor([len(flat) - len(order)]).double(), entropy.double().view(1), counts.new_tensor([n]).double()))
            self.statistics = new if self.statistics is None else self.statistics + new
        counts = counts if len(order) == len(flat) else counts.clamp(max=capacity)
        return Plan(chosen, share, order, positions(order, len(flat)).view(-1, n), *self.across(counts))

    def across(self, counts: Tensor):
        """Tell the others how many rows will come. counts: [E]. Returns a Plan's last fields."""
        if self.group is None:
            return counts, [], [], None, None
        ep = self.group.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        ours, theirs = counts.view(ep, -1), theirs.view(ep, -1)          # [ep, E / ep]: rows from here for rank r's experts; from rank r for the experts here
        expert = torch.arange(theirs.shape[1], device=counts.device).repeat(ep).repeat_interleave(theirs.flatten())
        by_expert = expert.argsort(stable=True)
        return theirs.sum(0), ours.sum(1).tolist(), theirs.sum(1).tolist(), by_expert, positions(by_expert, len(by_expert))


# --- there and back -------------------------------------------------------------------------------------------------

def take(x: Tensor, order: Tensor) -> Tensor:
    """Rows of tokens, in the order of assignments. x: [n, h] -> [m, h]"""
    return x.index_select(0, order % max(1, len(x)))


def put(rows: Tensor, place: Tensor) -> Tensor:
    """Each token's rows, summed. rows: [m, h]; place: [k, n] -> [n, h]"""
    if len(rows) < place.numel():
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))       # row m, for those that were dropped
    y = rows.index_select(0, place[0])
    for choice in place[1:]:
        y += rows.index_select(0, choice)
    return y


class _Rows(torch.autograd.Function):
    """`take` forward and `put` backward, or the reverse: each is the other's adjoint."""

    @staticmethod
    def forward(ctx, x, function, adjoint, there, back):
        ctx.adjoint = adjoint
        ctx.save_for_backward(back)
        return function(x, there)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.adjoint(grad, *ctx.saved_tensors), None, None, None, None


class _Exchange(torch.autograd.Function):
    """All-to-all: `sent[r]` rows to rank r, `received[r]` from it. Its adjoint sends them back."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.arguments = received, sent, group
        y = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(y, rows.contiguous(), received, sent, group=group)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _Exchange.apply(grad, *ctx.arguments), None, None, None


def dispatch(x: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
    """Tokens to the ranks of their experts, in the order of experts. x: [n, h] -> [rows for the experts of this rank, h]"""
    rows = _Rows.apply(x, take, put, plan.order, plan.place)
    if group is None:
        return rows
    rows = _Exchange.apply(rows, plan.sent, plan.received, group)        # in the order (rank, expert)
    return _Rows.apply(rows, take, put, plan.by_expert, plan.by_rank.unsqueeze(0))


def combine(rows: Tensor, gates: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
    """dispatch undone; a token's rows are summed, each times its gate. rows: [.., h] as dispatch gave them; gates: [n, k] -> [n, h]"""
    if group is not None:
        rows = _Rows.apply(rows, take, put, plan.by_rank, plan.by_expert.unsqueeze(0))
        rows = _Exchange.apply(rows, plan.received, plan.sent, group)
    rows = rows * gates.t().flatten()[plan.order].unsqueeze(1).to(rows.dtype)
    return _Rows.apply(rows, put, take, plan.place, plan.order)


# --- the experts ----------------------------------------------------------------------------------------------------

class _Grouped(torch.autograd.Function):
    """Y_i = [X_e W_ieᵀ for each expert e], for several W_i that read the same rows."""

    @staticmethod
    def forward(ctx, x, counts, *weights):
        ctx.save_for_backward(x, *weights)
        ctx.counts = counts
        ys = [x.new_empty(len(x), w.shape[1]) for w in weights]
        for e, (rows, *parts) in enumerate(zip(*(t.split(counts) for t in (x, *ys)))):
            for w, y in zip(weights, parts):
                torch.mm(rows, w[e].t(), out=y)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        dx = torch.zeros_like(x)
        d_weights = [torch.empty_like(w) if wanted else None for w, wanted in zip(weights, ctx.needs_input_grad[2:])]
        for e, (rows, d_rows, *parts) in enumerate(zip(*(t.split(ctx.counts) for t in (x, dx, *grads)))):
            for w, dw, grad in zip(weights, d_weights, parts):
                d_rows.addmm_(grad, w[e])
                if dw is not None:
                    torch.mm(grad.t(), rows, out=dw[e])                  # zeros where no row came
        return dx, None, *d_weights


def grouped_linear(x: Tensor, counts: Tensor, *weights: Tensor) -> list[Tensor]:
    """x: [rows, in] in the order of experts, counts: [E] of them for each; weights: [E, out, in] each -> [rows, out] each. On a GPU, in bf16, one kernel for all
    experts; elsewhere a matrix multiplication for each, which on a CPU costs no more."""
    if x.is_cuda and x.dtype == torch.bfloat16 and len(x):
        return [F.grouped_mm(x, w.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32)) for w in weights]
    return list(_Grouped.apply(x, counts.tolist(), *weights))


class Experts(nn.Module):
    """One matrix of every expert. weight: [E, out, in]"""

    def __init__(self, num_experts: int, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, n_out, n_in))
        self.bias = None


class _WithLoss(torch.autograd.Function):
    """y, and in backward a gradient of 1 for a loss that goes with it."""

    @staticmethod
    def forward(ctx, y, loss):
        ctx.one = torch.ones_like(loss)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, ctx.one


def unchanged(x: Tensor) -> Tensor:
    return x


class MoE(nn.Module):
    """Stands where gpt.MLP stood. `enter` and `leave` are what tensor and sequence parallelism do around it: f and its partner."""

    def __init__(self, config: gpt.GPTConfig):
        super().__init__()
        h, ffn, e = config.hidden_size, config.ffn_hidden_size, config.num_experts
        self.router = (SinkhornRouter if config.router == "sinkhorn" else TopKRouter)(config)
        self.decision = Decision(self.router.scores, config)
        self.gate = Experts(e, h, ffn) if config.llama else None
        self.up = Experts(e, h, ffn)
        self.activation = gpt.SwiGLU() if config.llama else gpt.GELU()
        self.down = Experts(e, ffn, h)
        self.enter = self.leave = unchanged
        self.group: dist.ProcessGroup | None = None                      # of expert parallelism
        self.token_weight: float | None = None                           # of a token in the router's losses; None: 1 over those of the micro-batch

    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: [rows, h] in the order of experts, counts: [E / ep] -> [rows, h]"""
        if self.gate is not None:
            inner = self.activation(*grouped_linear(rows, counts, self.gate.weight, self.up.weight))           # [rows, ffn]
        else:
            inner = self.activation(*grouped_linear(rows, counts, self.up.weight), None)
        return grouped_linear(inner, counts, self.down.weight)[0]

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, h] -> [b, s, h]"""
        logits = self.router(x)                                                                # [b, s, E], or a slice of the sequence
        x, all_logits = self.enter(x), self.enter(logits).flatten(0, 1)                        # of the micro-batch: [b, s, h], [b s, E]
        plan = self.decision(all_logits.detach())
        rows = self.experts(dispatch(x.flatten(0, 1), plan, self.group), plan.rows)
        y = self.leave(combine(rows, self.router.gates(all_logits, plan.chosen), plan, self.group).view(x.shape))
        if self.training and torch.is_grad_enabled() and (self.router.aux_loss or self.router.z_loss):
            y = _WithLoss.apply(y, self.router.losses(logits, plan.share) * (self.token_weight or 1 / len(all_logits)))
        return y


# --- in a model -----------------------------------------------------------------------------------------------------

def layers(*models: nn.Module) -> dict[int, MoE]:
    """The expert layers of models, or of chunks of one, by the layer's number."""
    return {int(number): block.mlp for model in models for number, block in model.blocks.items() if isinstance(block.mlp, MoE)}


def statistics(config: gpt.GPTConfig, found: dict[int, MoE], groups: list[dist.ProcessGroup], device) -> dict:
    """Of the training forwards since each `decision.statistics` was None, over the ranks of all `groups` (those with other tokens, and with other layers; a collective):
    expert_load: each expert's choices over an even share, a list for each layer with experts; router_entropy: of the router's probabilities, the mean in nats, for
    each layer; dropped_share: of all choices."""
    table = torch.zeros(len(config.expert_layers), config.num_experts + 3, dtype=torch.float64, device=device)
    for row, number in zip(table, config.expert_layers):
        if number in found:
            row.copy_(found[number].decision.statistics)
    for group in groups:
        dist.all_reduce(table, group=group)
    choices, (dropped, entropy, tokens) = table[:, :-3], table[:, -3:].t()
    return {"expert_load": (choices / choices.mean(1, keepdim=True)).tolist(), "router_entropy": (entropy / tokens).tolist(),
            "dropped_share": (dropped.sum() / choices.sum()).item()}


def check(config: gpt.GPTConfig, ep: int, dp: int) -> None:
    """Raises ValueError, naming what to change, if ep of dp data-parallel ranks cannot share the experts."""
    if ep > 1 and not config.num_experts:
        raise ValueError(f"ep {ep}: this model has no experts; num_experts {ep} would give it one for each rank")
    if dp % ep:
        raise ValueError(f"ep {ep}: must divide the {dp} data-parallel ranks; {gpt.divisors(dp, ep)} would fit")
    if config.num_experts % ep:
        fit = [d for d in range(1, ep + 1) if config.num_experts % d == 0 and dp % d == 0]
        raise ValueError(f"ep {ep}: must divide num_experts {config.num_experts}, so that all ranks hold equally many; {fit} would fit")


def parallelize(model: gpt.GPT, group: dist.ProcessGroup) -> None:
    """Spread the experts of `model` over the ranks of `group`, in place, before tensor parallelism. Raises ValueError where it does not divide them."""
    check(model.config, group.size(), group.size())
    for layer in layers(model).values():
        if layer.group is not None or sharding.of(layer.up.weight).cuts:
            raise ValueError("these experts are cut already: call moe.parallelize once, and before tensor_parallel.parallelize")
        layer.group = layer.decision.group = group
        for experts in (layer.gate, layer.up, layer.down):
            if experts is not None:
                sharding.keep_part(experts, "weight", Cut(0, group))     # [E / ep, out, in]


# ---------------------------------------------------------------------------------------------------------------------

def _lesson(rank: int, world: int):
    """A step of a GPT with experts in both layers; on two ranks each has half of the batch and half of the experts."""
    import fsdp
    import ranks
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=32, vocab_size=257, num_experts=4))
    if world > 1:
        parallelize(model, dist.group.WORLD)
    sharding.init(model, 0, "cpu", torch.float64)
    alone = next(group for group in [dist.new_group([r]) for r in range(world)] if group != dist.GroupMember.NON_GROUP_MEMBER)    # nobody else has these experts
    gradients = fsdp.shard(model, dist.group.WORLD, expert_group=alone)
    tokens = torch.randint(257, (8, 33), generator=torch.Generator().manual_seed(0)).chunk(2)  # two micro-batches
    gradients.last_backward()
    with ranks.Collectives() as forward:
        losses = [model(part[:, :-1], part[:, 1:]).sum() for k, part in enumerate(tokens) if k % world == rank]
    with ranks.Collectives() as backward:
        torch.autograd.backward(losses, [torch.tensor(1 / (8 * 32), dtype=torch.float64)] * len(losses))
        gradients.reduce_gradients()
    layer = layers(model)[0]
    held = {n: sharding.gather(p.main_grad, sharding.of(p)) for n, p in sharding.named_parameters(model)}
    return held, sum(p.numel() for p in model.parameters()), forward.calls, backward.calls, layer.decision.statistics[:4].tolist()


def main():
    import ranks
    example = torch.tensor([[2.0, 1.0], [2.2, 1.0], [1.5, 1.0], [3.0, 0.0]], dtype=torch.float64)
    plan = sinkhorn(example)
    print(f"four tokens, two experts, logits {example.tolist()}:\nthe plan's rows {[[round(x, 3) for x in row] for row in plan.tolist()]} sum to 1/4, its columns to 1/2;\n"
          f"largest in each row: {plan.argmax(1).tolist()}; at temperature 0.02: {sinkhorn(example, 0.02).argmax(1).tolist()}")
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, 3, generator=g) @ torch.randn(3, 8, generator=g)
    print("\n4096 tokens from 3 dimensions, 8 experts: largest load over the mean")
    for name, scores in (("raw logits", logits), *((f"plan at temperature {t}", sinkhorn(logits, t, 1e-2)) for t in (1.0, 0.3, 0.1, 0.02))):
        print(f"  {name:<26}{scores.argmax(1).bincount(minlength=8).max() / 512:.2f}")
    (one, whole, *_, loads), (two, part, forward, backward, _) = ranks.run(_lesson, 1, 1)[0], ranks.run(_lesson, 2, 2)[0]
    worst = max(((one[n] - two[n]).abs().max() / one[n].abs().max()).item() for n in one if not n.endswith("key.bias"))         # exactly 0 there
    print(f"\na GPT (h 64, L 2, V 257, 4 experts in each layer, float64), two micro-batches on one rank, or one on each of two ranks with half of the experts:\n"
          f"largest relative difference of a gradient {worst:.1e}; parameters {whole:,} and {part:,} on a rank; choices of layer 0: {[int(x) for x in loads]} of {4 * 32 * 2}")
    print(f"a micro-batch is b s h = 4 x 32 x 64 elements of 8 bytes, {4 * 32 * 64 * 8:,} bytes; with k = 1 about that much goes out and comes home in each layer, and again in "
          "backward (a few bytes more: how many rows will come)")
    for name, calls in (("forward", forward), ("backward", backward)):
        print(f"counted {name:>9}: " + ", ".join(f"{kind} {size:,}" for kind, size in calls if "all-to-all" in kind))


if __name__ == "__main__":
    import moe                                                           # the module whose MoE gpt.py builds, not this copy of it
    moe.main()
