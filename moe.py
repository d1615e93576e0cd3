"""Mixture of experts: many MLPs, of which each token goes through one or a few (arXiv 1701.06538;
one: BASE layers, 2103.16716, and Switch, 2101.03961).

The parameters of a layer grow with the number of experts E, its FLOPs do not: a token pays for the
k experts that it goes to. Who goes where is the router's choice, from x W_rᵀ, a logit for each
expert. Left alone it sends everybody to a few experts, so it is balanced, in one of two ways:

    sinkhorn    a transport plan between tokens and experts, in which each expert gets the same mass (S-BASE, arXiv 2202.01169). Each token goes where the plan
                has most of it; that evens the load, the more so the lower the plan's temperature.
                The plan has no gradient: the gate, by which an expert's output is multiplied, is
                from the raw logits.
    topk        the largest logits; a loss pulls towards even load (Switch, eq. 4-6), another keeps logits small (ST-MoE, arXiv 2202.08906, eq. 5)

    tokens 0 1 2 3 4 5    dispatch: sorted by expert      all-to-all         experts            all-to-all, combine
    chosen 2 0 3 0 2 1    1 3 | 5 | 0 4 | 2         --->  rank 0: 0, 1  -->  one grouped   --->  back where they came from,
                          e0    e1  e2    e3              rank 1: 2, 3       matmul each         times the gate, summed over k

    x = enter(x);  routes = decide(router(x));  y = combine(experts(dispatch(x, routes)), gates, routes);  leave(y)          (`MoE.forward`)

Expert parallelism (GShard, arXiv 2006.16668): each group of `ep` data-parallel ranks has every
expert once, E / ep on a rank; tokens travel to their experts, and home again. No token is dropped
unless a capacity is set. `take` and `put` are each other's adjoint, an all-to-all's is the
all-to-all back, and combine is dispatch's adjoint with the gates as weights. When backward reaches
an expert's weights, tokens of all ep ranks have gone through it, so fsdp.py sums its gradient only
over the ranks that hold the same experts; the loss is divided by the number of tokens in the whole
global batch, so there is nothing else to divide by.

Sinkhorn, a capacity and the load-balancing loss look at all tokens of one micro-batch of one
data-parallel rank: they alone make a result depend on how a batch is cut into micro-batches. Under
tensor parallelism every rank sees the whole micro-batch's logits, also where its tokens are sliced
along the sequence, and holds a slice of each expert's inner dimension. A plan, then, looks at later
tokens and at other sequences: training with it is not strictly causal. Evaluation takes the raw
logits, each token for itself, and routes some tokens otherwise than training did.

    python moe.py      a plan by hand; what temperature does to the load; two ranks with half of the experts each: gradients, bytes

What it costs beyond a dense layer: under tensor parallelism one more all-reduce of b s E in
backward (with sequence parallelism an all-gather forward and a reduce-scatter backward), and the
gathered rows are kept, where a dense layer keeps its slice and gathers again; full recomputation
repeats the all-to-alls; ZB-H1 computes experts' weight gradients in I; on a GPU the host waits for
each of Sinkhorn's iterations, and once for the counts.

Experts have no biases; `expert_every` n puts them in layers n - 1, 2n - 1, .. (Megatron's
moe_layer_freq in 0, n, ..). What Megatron-LM adds: all-to-alls that overlap with computation, and
send only a slice of the tokens from each of t ranks (here tokens are gathered along the sequence
first, and each sends them all); tensor-parallel sizes of experts other than attention's; shared
experts; router biases, groups and jitter; other drop policies."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
import sharding
from sharding import Shard, shard_parameter, sharding_of

# --- who goes where -------------------------------------------------------------------------------


def balance(
    logits: Tensor, temperature: float = 1.0, tolerance: float = 1e-4, most: int = 1000
) -> tuple[Tensor, Tensor]:
    """(plan, f): the plan d0 C d1 with C = exp(logits / temperature), in which each row sums to 1/N
    and each column to 1/E (arXiv 2202.01169, section 3.1): scale rows, scale columns, until d1
    changes by no more than a share `tolerance` of it on average, or `most` times. Columns come last
    and are exact, rows as near as that.

    The plan is balanced; the largest entries of its rows need not be: a token that is split 6 to 4
    goes one way whole. The lower the temperature, the less is split, and the longer it takes; so it
    is halved step by step. What is kept from step to step is f, a handicap for each expert in units
    of logits, which is nearly right each time; it takes d1 = exp(f / temperature) in, also whenever
    d1 becomes too large or too small for a float. Of each row only differences matter: its largest
    is 0. (Equal tokens go together at any temperature; of fewer tokens than experts no plan makes
    sense.) logits: [N, E]. Returns float64 [N, E], and [E]: logits + f are in each row in the
    plan's order, also where the plan is too small for a float."""
    logits = logits.double()
    now = 1.0
    n, e = logits.shape
    f = logits.new_zeros(e)
    for _ in range(most):
        z = (logits + f) / now
        cost = (z - z.amax(1, keepdim=True)).exp()
        d1 = torch.ones_like(f)
        settled = True
        for _ in range(most):
            d0 = 1 / n / (cost @ d1)
            # of an expert, over its even share
            load = (e * d1 * (cost.t() @ d0)).clamp(min=1e-100)
            d1 = d1 / load
            # also where it is not a number
            if not (1 - load).abs().mean() > tolerance:
                break
            if d1.log().abs().amax() > 200:
                settled = False
                break
        f = f + now * d1.log()
        if settled and now <= temperature:
            break
        now = max(now / 2, temperature) if settled else now
    return d0.unsqueeze(1) * cost * d1, f


def sinkhorn(
    logits: Tensor, temperature: float = 1.0, tolerance: float = 1e-4, most: int = 1000
) -> Tensor:
    """The balanced plan of `balance`. logits: [N, E], of any size. Returns [N, E], float64."""
    return balance(logits, temperature, tolerance, most)[0]


class Router(nn.Module):
    """A logit for each token and expert, in at least float32."""

    def __init__(self, config: gpt.GPTConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.k = config.router_topk
        self.temperature = config.router_temperature
        self.aux_loss = config.aux_loss
        self.z_loss = config.z_loss

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, h] -> [b, s, E]"""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.weight.to(wide))

    def scores(self, logits: Tensor, training: bool) -> Tensor:
        """A token goes where these are largest. logits: [n, E] -> [n, E]"""
        return logits

    def losses(self, logits: Tensor, share: Tensor) -> Tensor:
        """Sums over these tokens of their parts of the load-balancing loss, E Σ_e f_e P_e, and the
        z-loss, (log Σ exp z)², each with its coefficient. f_e: the share of the micro-batch's
        choices that fell on e, before any is dropped; P_e: the mean probability of e; even load
        gives 1. logits: [.., E] of any part of a micro-batch; share: [E], f. Scalar."""
        balance = (
            self.aux_loss * len(share) * (logits.softmax(-1) @ share).sum()
            if self.aux_loss
            else 0.0
        )
        return balance + (self.z_loss * logits.logsumexp(-1).square().sum() if self.z_loss else 0.0)


class TopKRouter(Router):
    """The k largest probabilities. With k = 1 the gate is the probability itself (Switch, eq. 2),
    else the k add up to 1 (as in Mixtral, arXiv 2401.04088)."""

    def gates(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """What the output of each chosen expert is multiplied by. logits: [n, E]; chosen: [n, k] ->
        [n, k]"""
        if self.k == 1:
            return logits.softmax(-1).gather(1, chosen)
        return logits.gather(1, chosen).softmax(-1)


class SinkhornRouter(Router):
    """Training takes the largest of the balanced plan, evaluation of the raw logits."""

    def scores(self, logits: Tensor, training: bool) -> Tensor:
        return logits + balance(logits, self.temperature, 1e-2)[1] if training else logits

    def gates(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """As TopKRouter's; the sigmoid for k = 1, else the softmax over all experts, as in
        Megatron-LM."""
        return (logits.sigmoid() if self.k == 1 else logits.softmax(-1)).gather(1, chosen)


class Routes(NamedTuple):
    """Where rows go and come from; n tokens, k choices each. Assignment a is choice a // n of token
    a % n. For the picture above (k = 1): chosen [[2], [0], [3], [0], [2], [1]], order [1, 3, 5, 0,
    4, 2], place [[3, 0, 5, 1, 4, 2]]."""

    chosen: Tensor  # [n, k] expert
    share: Tensor  # [E] of all choices
    # [m] assignments sorted by expert, the dropped ones left out
    order: Tensor
    # [k, n] where each assignment is in `order`; m: dropped
    place: Tensor
    # [E / ep] rows for each expert of this rank
    counts: Tensor
    # rows to each expert-parallel rank; empty without them
    sent: list[int]
    received: list[int]
    # [sum of received] which of the received rows, in the order of experts
    by_expert: Tensor | None
    # .. and back
    by_rank: Tensor | None


def positions(order: Tensor, size: int) -> Tensor:
    """The inverse of a permutation, or of a selection: where each of `size` numbers is in `order`;
    len(order) for those that are not."""
    place = torch.full((size,), len(order), dtype=order.dtype, device=order.device)
    place[order] = torch.arange(len(order), device=order.device)
    return place


# all but the first are told as means over tokens (or choices)
SUMS = ("tokens", "dropped_share", "router_entropy", "load_balancing_loss", "z_loss")


class Decision(nn.Module):
    """From logits to routes, and the router's statistics. There is no gradient in it, and
    recompute.py, which looks for `decides`, lets it run once."""

    decides = True

    def __init__(self, scores, config: gpt.GPTConfig):
        super().__init__()
        self.scores = scores
        self.k = config.router_topk
        self.capacity_factor = config.capacity_factor
        # of expert parallelism
        self.group: dist.ProcessGroup | None = None
        # [E + 5] sums over training tokens: choices of each expert, then SUMS
        self.statistics: Tensor | None = None

    @torch.no_grad()
    def forward(self, logits: Tensor) -> Routes:
        """logits: [n, E], of the whole micro-batch. With a capacity, an expert's last choices are
        dropped: second choices before first ones, later tokens before earlier. For those a token
        gets zeros, so the residual alone goes on; its other gates stay as they are."""
        n, e = logits.shape
        chosen = self.scores(logits, self.training).topk(self.k).indices
        flat = chosen.t().flatten()  # [k n]: all first choices first
        counts = flat.bincount(minlength=e)
        share = counts.to(logits.dtype) / len(flat)
        order = flat.argsort(stable=True)
        # evaluation drops nothing
        if self.capacity_factor and self.training:
            capacity = math.ceil(round(min(self.capacity_factor, e) * len(flat) / e, 6))
            rank_in_expert = (
                torch.arange(len(flat), device=flat.device)
                - (counts.cumsum(0) - counts)[flat[order]]
            )
            order = order[rank_in_expert < capacity]
        if self.training:
            p = logits.double().softmax(-1)
            z = logits.double().logsumexp(-1)
            sums = (
                n,
                len(flat) - len(order),
                torch.special.entr(p).sum(),
                e * (p @ share.double()).sum(),
                z.square().sum(),
            )
            new = torch.cat(
                (
                    counts.double(),
                    torch.stack(
                        [torch.as_tensor(x, dtype=torch.float64, device=flat.device) for x in sums]
                    ),
                )
            )
            self.statistics = new if self.statistics is None else self.statistics + new
        if len(order) < len(flat):
            counts = counts.clamp(max=capacity)
        return Routes(
            chosen, share, order, positions(order, len(flat)).view(-1, n), *self.across(counts)
        )

    def across(self, counts: Tensor):
        """Tell the others how many rows will come. counts: [E]. Returns the last fields of
        Routes."""
        if self.group is None:
            return counts, [], [], None, None
        ep = self.group.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        # [ep, E / ep]: rows from here for rank r's experts; from rank r for the experts here
        ours = counts.view(ep, -1)
        theirs = theirs.view(ep, -1)
        expert = (
            torch.arange(theirs.shape[1], device=counts.device)
            .repeat(ep)
            .repeat_interleave(theirs.flatten())
        )
        by_expert = expert.argsort(stable=True)
        return (
            theirs.sum(0),
            ours.sum(1).tolist(),
            theirs.sum(1).tolist(),
            by_expert,
            positions(by_expert, len(by_expert)),
        )


# --- there and back -------------------------------------------------------------------------------


def take(x: Tensor, order: Tensor) -> Tensor:
    """Rows of tokens, in the order of assignments. x: [n, h] -> [m, h]"""
    return x.index_select(0, order % max(1, len(x)))


def put(rows: Tensor, place: Tensor) -> Tensor:
    """Each token's rows, summed. rows: [m, h]; place: [k, n] -> [n, h]"""
    if len(rows) < place.numel():
        # row m, for those that were dropped
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
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


def taken(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """`take`, with a gradient. place: [k, n], the inverse of order."""
    return _Rows.apply(x, take, put, order, place)


def put_home(rows: Tensor, gates: Tensor, place: Tensor, order: Tensor) -> Tensor:
    """`put` of rows times their gates, [n, k], with a gradient."""
    rows = rows * gates.t().flatten()[order].unsqueeze(1).to(rows.dtype)
    return _Rows.apply(rows, put, take, place, order)


def dispatch(x: Tensor, routes: Routes, group: dist.ProcessGroup | None, take=taken) -> Tensor:
    """Tokens to the ranks of their experts, in the order of experts. x: [n, h] -> [rows for the
    experts of this rank, h]"""
    rows = take(x, routes.order, routes.place)
    if group is None:
        return rows
    # in the order (rank, expert)
    rows = _Exchange.apply(rows, routes.sent, routes.received, group)
    return take(rows, routes.by_expert, routes.by_rank.unsqueeze(0))


def combine(
    rows: Tensor,
    gates: Tensor,
    routes: Routes,
    group: dist.ProcessGroup | None,
    take=taken,
    put=put_home,
) -> Tensor:
    """dispatch undone; a token's rows are summed, each times its gate. rows: [.., h] as dispatch
    gave them; gates: [n, k] -> [n, h]"""
    if group is not None:
        rows = take(rows, routes.by_rank, routes.by_expert.unsqueeze(0))
        rows = _Exchange.apply(rows, routes.received, routes.sent, group)
    return put(rows, gates, routes.place, routes.order)


# --- the experts ----------------------------------------------------------------------------------


class _Grouped(torch.autograd.Function):
    """Y_i = [X_e W_ieᵀ for each expert e], for several W_i that read the same rows."""

    @staticmethod
    def forward(ctx, x, counts, *weights):
        ctx.save_for_backward(x, *weights)
        ctx.counts = counts
        ys = [x.new_empty(len(x), w.shape[1]) for w in weights]
        # views: y is filled in place
        for e, (rows, *parts) in enumerate(zip(*(t.split(counts) for t in (x, *ys)))):
            for w, y in zip(weights, parts):
                torch.mm(rows, w[e].t(), out=y)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        dx = torch.zeros_like(x)
        d_weights = [
            torch.empty_like(w) if wanted else None
            for w, wanted in zip(weights, ctx.needs_input_grad[2:])
        ]
        for e, (rows, d_rows, *parts) in enumerate(
            zip(*(t.split(ctx.counts) for t in (x, dx, *grads)))
        ):
            for w, dw, grad in zip(weights, d_weights, parts):
                d_rows.addmm_(grad, w[e])
                if dw is not None:
                    # zeros where no row came
                    torch.mm(grad.t(), rows, out=dw[e])
        return dx, None, *d_weights


def grouped_by_library(x: Tensor, counts: Tensor, *weights: Tensor) -> list[Tensor]:
    """The same by torch's kernel."""
    ends = counts.cumsum(0, dtype=torch.int32)
    return [F.grouped_mm(x, w.transpose(1, 2), offs=ends) for w in weights]


def grouped_linear(x: Tensor, counts: Tensor, *weights: Tensor) -> list[Tensor]:
    """x: [rows, in] in the order of experts, counts: [E] of them for each; weights: [E, out, in]
    each -> [rows, out] each. On a GPU, in bf16, one kernel for all experts (its rows are whole
    numbers of 16 bytes); elsewhere a matrix multiplication for each: on CPUs the library's is the
    same loop."""
    if (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and len(x)
        and not any(size % 8 for w in weights for size in w.shape[1:])
    ):
        return grouped_by_library(x, counts, *weights)
    return list(_Grouped.apply(x, counts.tolist(), *weights))


class ExpertLinear(nn.Module):
    """One matrix of every expert. weight: [E, out, in]"""

    def __init__(self, num_experts: int, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, n_out, n_in))
        self.bias = None


class _WithLoss(torch.autograd.Function):
    """Adds a loss that the loop never sees, for a pipeline hands on y alone: in backward it gets a
    gradient of 1. Its weight, the loss scale included, is in it already."""

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
    """Stands where gpt.MLP stood. `enter` and `leave` are what tensor and sequence parallelism do
    around it: f and its partner."""

    take = staticmethod(taken)
    put = staticmethod(put_home)

    def __init__(self, config: gpt.GPTConfig):
        super().__init__()
        h = config.hidden_size
        ffn = config.ffn_hidden_size
        e = config.num_experts
        self.router = (SinkhornRouter if config.router == "sinkhorn" else TopKRouter)(config)
        self.decision = Decision(self.router.scores, config)
        self.gate = ExpertLinear(e, h, ffn) if config.llama else None
        self.up = ExpertLinear(e, h, ffn)
        self.activation = gpt.SwiGLU() if config.llama else gpt.GELU()
        self.down = ExpertLinear(e, ffn, h)
        self.enter = self.leave = unchanged
        # of expert parallelism
        self.group: dist.ProcessGroup | None = None
        # of a position in the router's losses; None: 1 over those of the micro-batch
        self.token_weight: float | None = None

    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: [rows, h] in the order of experts, counts: [E / ep] -> [rows, h]"""
        if self.gate is not None:
            inner = self.activation(
                *grouped_linear(rows, counts, self.gate.weight, self.up.weight)
            )  # [rows, ffn]
        else:
            inner = self.activation(*grouped_linear(rows, counts, self.up.weight), None)
        return grouped_linear(inner, counts, self.down.weight)[0]

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, h] -> [b, s, h]"""
        logits = self.router(x)  # [b, s, E], or a slice of the sequence
        # of the micro-batch: [b, s, h], [b s, E]
        x = self.enter(x)
        all_logits = self.enter(logits).flatten(0, 1)
        routes = self.decision(all_logits.detach())
        rows = self.experts(dispatch(x.flatten(0, 1), routes, self.group, self.take), routes.counts)
        y = self.leave(
            combine(
                rows,
                self.router.gates(all_logits, routes.chosen),
                routes,
                self.group,
                self.take,
                self.put,
            ).view(x.shape)
        )
        if (
            self.training
            and torch.is_grad_enabled()
            and (self.router.aux_loss or self.router.z_loss)
        ):
            y = _WithLoss.apply(
                y,
                self.router.losses(logits, routes.share)
                * (self.token_weight or 1 / len(all_logits)),
            )
        return y


# --- in a model -----------------------------------------------------------------------------------


def layers(*models: nn.Module) -> dict[int, MoE]:
    """The expert layers of models, or of chunks of one, by the layer's number."""
    return {
        int(number): block.mlp
        for model in models
        for number, block in model.blocks.items()
        if isinstance(block.mlp, MoE)
    }


def statistics(
    config: gpt.GPTConfig, found: dict[int, MoE], groups: list[dist.ProcessGroup], device
) -> dict:
    """Of the training forwards since each `decision.statistics` was None, over the ranks of all
    `groups` (those with other tokens, and with other layers; a collective). Each is a list with an
    entry for each layer with experts. expert_load: each expert's choices over an even share;
    dropped_share: of choices; router_entropy: of a token's probabilities, in nats;
    load_balancing_loss, 1 where load is even, and z_loss: before their coefficients."""
    table = torch.zeros(
        len(config.expert_layers),
        config.num_experts + len(SUMS),
        dtype=torch.float64,
        device=device,
    )
    for row, number in zip(table, config.expert_layers):
        if number in found:
            row.copy_(found[number].decision.statistics)
    for group in groups:
        dist.all_reduce(table, group=group)
    choices = table[:, : config.num_experts]
    tokens, *sums = table[:, config.num_experts :].t()
    # dropped choices, of k a token
    sums[0] = sums[0] / config.router_topk
    return {"expert_load": (choices / choices.mean(1, keepdim=True)).tolist()} | {
        name: (x / tokens).tolist() for name, x in zip(SUMS[1:], sums)
    }


def check(config: gpt.GPTConfig, ep: int, dp: int) -> None:
    """Raises ValueError, naming what to change, if ep of dp data-parallel ranks cannot share the
    experts."""
    fit = gpt.divisors(math.gcd(config.num_experts, dp), ep)
    if dp % ep:
        raise ValueError(f"ep {ep}: must divide the {dp} data-parallel ranks; {fit} would fit")
    if ep > 1 and not config.num_experts:
        raise ValueError(
            f"ep {ep}: this model has no experts; num_experts {ep} would give it one for each rank"
        )
    if config.num_experts % ep:
        raise ValueError(
            f"ep {ep}: must divide num_experts {config.num_experts}, so that all ranks hold equally"
            f" many; {fit} would fit"
        )


def apply(model: gpt.GPT, group: dist.ProcessGroup) -> None:
    """Spread the experts of `model` over the ranks of `group`, in place, before tensor parallelism.
    Raises ValueError where it does not divide them."""
    check(model.config, group.size(), group.size())
    for layer in layers(model).values():
        if layer.group is not None or sharding_of(layer.up.weight).placements:
            raise ValueError(
                "these experts are cut already: call moe.apply once, and before"
                " tensor_parallel.apply"
            )
        layer.group = layer.decision.group = group
        for experts in (layer.gate, layer.up, layer.down):
            if experts is not None:
                shard_parameter(experts, "weight", Shard(0, group))  # [E / ep, out, in]


# --------------------------------------------------------------------------------------------------


def _lesson(rank: int, world: int):
    """A step of a GPT with experts in both layers; on two ranks each has half of the batch and half
    of the experts."""
    import fsdp
    from lessons import ranks

    with torch.device("meta"):
        model = gpt.GPT(
            gpt.GPTConfig(
                num_layers=2,
                hidden_size=64,
                num_heads=4,
                seq_length=32,
                vocab_size=257,
                num_experts=4,
            )
        )
    if world > 1:
        apply(model, dist.group.WORLD)
    sharding.init(model, 0, "cpu", torch.float64)
    # nobody else has these experts
    alone = next(
        group
        for group in [dist.new_group([r]) for r in range(world)]
        if group != dist.GroupMember.NON_GROUP_MEMBER
    )
    gradients = fsdp.apply(model, dist.group.WORLD, expert_group=alone)
    # two micro-batches
    tokens = torch.randint(257, (8, 33), generator=torch.Generator().manual_seed(0)).chunk(2)
    gradients.last_backward()
    with ranks.Collectives() as forward:
        losses = [
            model(part[:, :-1], part[:, 1:]).sum()
            for k, part in enumerate(tokens)
            if k % world == rank
        ]
    with ranks.Collectives() as backward:
        torch.autograd.backward(
            losses, [torch.tensor(1 / (8 * 32), dtype=torch.float64)] * len(losses)
        )
        gradients.reduce_gradients()
    layer = layers(model)[0]
    held = {
        n: sharding.gather(p.main_grad, sharding_of(p)) for n, p in sharding.named_parameters(model)
    }
    return (
        held,
        sum(p.numel() for p in model.parameters()),
        forward.calls,
        backward.calls,
        layer.decision.statistics[:4].tolist(),
    )


def main():
    from lessons import ranks

    example = torch.tensor([[2.0, 1.0], [2.2, 1.0], [1.5, 1.0], [3.0, 0.0]], dtype=torch.float64)
    plan = sinkhorn(example)
    print(
        f"four tokens, two experts, logits {example.tolist()}:\nthe plan's rows"
        f" {[[round(x, 3) for x in row] for row in plan.tolist()]} sum to 1/4, its columns to"
        f" 1/2;\nlargest in each row: {plan.argmax(1).tolist()}; at temperature 0.02:"
        f" {sinkhorn(example, 0.02).argmax(1).tolist()}"
    )
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, 3, generator=g) @ torch.randn(3, 8, generator=g)
    print("\n4096 tokens from 3 dimensions, 8 experts: largest load over the mean")
    for name, scores in (
        ("raw logits", logits),
        *((f"plan at temperature {t}", sinkhorn(logits, t, 1e-2)) for t in (1.0, 0.3, 0.1, 0.02)),
    ):
        print(f"  {name:<26}{scores.argmax(1).bincount(minlength=8).max() / 512:.2f}")
    one, whole, *_, loads = ranks.run(_lesson, 1, 1)[0]
    two, part, forward, backward, _ = ranks.run(_lesson, 2, 2)[0]
    # exactly 0 there
    worst = max(
        ((one[n] - two[n]).abs().max() / one[n].abs().max()).item()
        for n in one
        if not n.endswith("key.bias")
    )
    print(
        "\na GPT (h 64, L 2, V 257, 4 experts in each layer, float64), two micro-batches on one"
        " rank, or one on each of two ranks with half of the experts:\nlargest relative difference"
        f" of a gradient {worst:.1e}; parameters {whole:,} and {part:,} on a rank; choices of layer"
        f" 0: {[int(x) for x in loads]} of {4 * 32 * 2}"
    )
    print(
        f"a micro-batch is b s = 4 x 32 rows of h = 64 elements of 8 bytes, {4 * 32 * 64 * 8:,}"
        " bytes. In each layer, with k = 1: 4 counts, then so many rows go out, about half of them"
        " to the other\nrank, and as many as the experts here were given come home; in backward"
        " the same in reverse. Counted are bytes of the larger side, sent or received, a rank's"
        " own rows included:"
    )
    for name, calls in (("forward", forward), ("backward", backward)):
        print(
            f"counted {name:>9}: "
            + ", ".join(f"{kind} {size:,}" for kind, size in calls if "all-to-all" in kind)
        )


if __name__ == "__main__":
    # the module whose MoE gpt.py builds, not this copy of it
    import moe

    moe.main()
