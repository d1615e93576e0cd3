"""Mixture of experts: a layer has many MLPs, and each token goes through one or a few of them
(arXiv 1701.06538).

The parameters of a layer grow with the number of experts E. Its FLOPs do not: a token needs only
its k experts. A router chooses them; then tokens are sent to the ranks of their experts.

    tokens 0 1 2 3 4 5    permute: sort by expert    all-to-all          experts        all-to-all,
    expert 2 0 3 0 2 1    1 3 | 5 | 0 4 | 2     -->  rank 0 has e0, e1 -> one grouped -> unpermute
                          e0    e1  e2    e3         rank 1 has e2, e3    matmul

    y_token = Σ over its k experts e of  p_e(token) expert_e(x_token)        p: router probabilities

Expert parallelism (GShard, arXiv 2006.16668): ep data-parallel ranks together hold one copy of
every expert, E / ep each. An all-to-all is a collective in which every rank sends some rows to
every other: one takes tokens to their experts, another takes them back. Backward does the same in
reverse: permute and unpermute are each other's adjoint (transpose), and the adjoint of an
all-to-all is the all-to-all back.

    python -m course.moe    a lesson: two ranks with half of the experts each, gradients, bytes sent
    picture: docs/figures/ranks_experts.svg

An expert layer differs from a dense layer:

- Tokens of one micro-batch on one data-parallel rank are routed together: they share a transport
  plan, a capacity and a load-balancing loss. So results depend on how a batch is split into
  micro-batches. FP8's scales do the same.
- An expert's gradient includes the tokens of all ep ranks. So fsdp.py sums it only over the ranks
  that hold the same experts.
- Under tensor parallelism every rank sees the logits of the whole micro-batch, and has a shard of
  each expert's inner dimension (ffn). That is one more all-reduce of b s E numbers in backward;
  with sequence parallelism it is an all-gather in forward and a reduce-scatter in backward.
- A first, small all-to-all tells each rank how many rows it will receive. On a GPU the host waits
  for these counts. With --ep-comm-overlap the rows travel while another micro-batch is computed.
- The rows that an expert received are kept for backward. Full recomputation repeats the all-to-alls
  of rows. Zero-bubble schedules do not defer experts' weight gradients (pipeline_parallel.py).
- Experts have no biases. DeepSeek's are smaller than an MLP (expert_ffn_size), and an MLP that all
  tokens go through, the shared experts (shared_ffn_size), is added to y.

Not covered: all-to-alls that send only a shard of the tokens from each tensor-parallel rank; a
tensor-parallel size of experts other than attention's; one g for shared experts and the others;
shared experts in FP8; other rules for dropping tokens; jitter (all in Megatron-LM); DeepSeek-V3's
load-balancing loss of each sequence.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import families
import gpt
import recompute
import tensor_parallel
from base import compiling, device_queue, transport_plan
from base.grouped_linear import grouped_linear
from base.model_config import ROUTER_NAMES, FieldError, GPTConfig, MoEConfig, divisors
from base.turns import Turns
from sharding import Shard, keep_dtype, local_part, shard_of, shard_parameter, sharding_of

# === routers ======================================================================================
#
# A router decides which expert gets which token. Its logits are z = x W_rᵀ, one number for each
# token and expert. Without balancing, a router sends all tokens to a few experts. Three ways to
# balance the load:
#
#     sinkhorn    A transport plan: a matrix of tokens by experts in which all tokens have equal
#                 mass, and all experts too (S-BASE, arXiv 2202.01169, section 3.1). A token
#                 goes where its row is largest. The mass is even; the number of tokens that
#                 choose an expert is nearly even. A lower temperature makes it more even.
#                 The plan has no gradient: an expert's output is multiplied by a router
#                 probability from the raw logits.
#     topk        The k largest logits. One loss pulls towards even load (Switch, arXiv 2101.03961,
#                 eq. 4-6), another keeps logits small (ST-MoE, arXiv 2202.08906, eq. 5).
#     bias        The k largest of sigmoid(z) + b, without a loss (arXiv 2408.15664, algorithm 1).
#                 The bias of an expert is no weight: after each step it grows by u (the field
#                 bias_rate) where the expert had less than the mean load of the whole batch, else
#                 it shrinks by u. It chooses experts, and is no part of their factors.
#
#     logits  e0  e1       plan, temperature 1      temperature 0.02
#     t0     2.0 1.0       .10  .15  -> e1          -> e1
#     t1     2.2 1.0       .12  .14  -> e1          -> e0
#     t2     1.5 1.0       .07  .18  -> e1          -> e1
#     t3     3.0 0.0       .21  .04  -> e0          -> e0
#
# The raw logits would send all four tokens to e0. Rows of the plan sum to 1/4, columns to 1/2. A
# plan looks at later tokens and at other sequences, so training with it is not strictly causal.
# Evaluation uses the raw logits, each token for itself, and so routes some tokens elsewhere than
# training did.

# --- the routers ----------------------------------------------------------------------------------


class Router(nn.Module):
    """One logit for each token and expert, in at least float32."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.k = config.router_topk
        self.groups, self.topk_groups = config.expert_groups, config.topk_groups
        self.normalises, self.scale = config.normalises, config.router_scale
        self.temperature = config.router_temperature
        self.aux_loss = config.aux_loss
        self.z_loss = config.z_loss

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, h] -> [b, s, E]"""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.weight.to(wide))

    def scores(self, logits: Tensor, training: bool) -> Tensor:
        """The scores that choose a token's experts: the k largest. logits: [n, E] -> [n, E]"""
        return self.in_best_groups(logits)

    def in_best_groups(self, scores: Tensor, counted: int = 1) -> Tensor:
        """Scores with -inf outside a token's best groups of experts, the `topk_groups` with the
        largest `group_scores`. Where a group is on one node, a token is sent to few nodes
        (DeepSeek-V2, arXiv 2405.04434, section 2.2.2). scores: [n, E] -> [n, E]"""
        if self.groups == 1:
            return scores
        grouped = scores.unflatten(1, (self.groups, -1))  # [n, groups, E / groups]
        of_groups = self.group_scores(grouped, counted)
        best = of_groups.topk(self.topk_groups).indices  # [n, topk_groups]
        left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter(1, best, False)
        return grouped.masked_fill(left_out.unsqueeze(2), -math.inf).flatten(1)

    def group_scores(self, grouped: Tensor, counted: int) -> Tensor:
        """The sum of each group's `counted` largest scores. grouped: [n, groups, E / groups] ->
        [n, groups]"""
        return grouped.topk(min(counted, grouped.shape[2])).values.sum(2)

    def affinities(self, logits: Tensor) -> Tensor:
        """How well each expert fits a token, by probabilities. [n, E] -> [n, E]"""
        return logits.softmax(-1)

    def probabilities(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """The factor of each chosen expert's output. logits: [n, E]; chosen: [n, k] -> [n, k]"""
        factors = self.affinities(logits).gather(1, chosen)
        if self.normalises:
            factors = factors / factors.sum(1, keepdim=True)
        return factors * self.scale

    def losses(self, logits: Tensor, load: Tensor) -> Tensor | float:
        """The losses of each token, summed over these tokens. A scalar; 0.0 without losses.

            load-balancing   E Σ_e load_e p_e      1 where the load is even
            z-loss           (log Σ_e exp z_e)²    each times its coefficient

        p: the softmax of a token's logits, under every router. Where factors are sigmoids,
        DeepSeek-V3 and Megatron-LM take sigmoids that are made to add up to 1. logits: [.., E],
        those of any part of a micro-batch; load: [E], each expert's share of the micro-batch's
        choices, before any token is dropped.
        """
        total = 0.0
        if self.aux_loss:
            total = self.aux_loss * len(load) * (logits.softmax(-1) @ load).sum()
        if self.z_loss:
            total = total + self.z_loss * logits.logsumexp(-1).square().sum()
        return total


class TopKRouter(Router):
    """Chooses the k largest logits.

    With k = 1 an output is multiplied by its expert's probability (Switch, eq. 2). With k > 1 the k
    probabilities add up to 1 (Mixtral, arXiv 2401.04088), unless normalise_topk is false.
    """


class SinkhornRouter(Router):
    """Chooses by the balanced plan in training, and by the raw logits in evaluation.

    As in Megatron-LM, the probability is a sigmoid for k = 1, else the softmax over all experts.
    """

    def scores(self, logits: Tensor, training: bool) -> Tensor:
        if not training or not len(logits):
            return logits
        if logits.device.type == "cpu":
            return logits + transport_plan.balance(logits, self.temperature, tolerance=1e-2)[1]
        return logits + transport_plan.potentials_in_fixed_time(logits, self.temperature)

    def affinities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.k == 1 else logits.softmax(-1)


class BiasRouter(Router):
    """Chooses the k largest of sigmoid(z) + b. The factors are the sigmoids, normalised
    (DeepSeek-V3, arXiv 2412.19437, eq. 12-16)."""

    def __init__(self, config: MoEConfig):
        super().__init__(config)
        # A parameter without a gradient: sharding and checkpoints treat it as any other. In
        # 16 bits a step of 0.001 would be rounded away.
        bias = torch.zeros(config.num_experts, dtype=torch.float32)
        self.bias = keep_dtype(nn.Parameter(bias, requires_grad=False))
        self.rate = config.bias_rate

    def scores(self, logits: Tensor, training: bool) -> Tensor:
        return self.in_best_groups(self.affinities(logits) + self.bias, counted=2)

    def affinities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def balance(self, load: Tensor, taken: Tensor) -> None:
        """b_e += u sign(mean load - load_e). load: [E], choices of each expert in the global batch;
        taken: whether the step was taken, on the device."""
        part = local_part(self.bias)
        change = self.rate * taken * (load.mean() - load).sign()
        part += shard_of(change.to(part), sharding_of(part))


ROUTERS = dict(zip(ROUTER_NAMES, (SinkhornRouter, TopKRouter, BiasRouter), strict=True))


# --- where the tokens of a micro-batch go -------------------------------------------------------


class Dispatch(NamedTuple):
    """Where rows are sent and where they come from: n tokens (or places of padding) with k choices
    each, of which m are kept. The others are dropped, or padding's.

    Choice c is choice c // n of token c % n. For the picture at the top (k = 1) chosen is [[2],
    [0], [3], [0], [2], [1]], order [1, 3, 5, 0, 4, 2] and row_of [[3, 0, 5, 1, 4, 2]].
    """

    real: Tensor | None  # [b, s] bool: what is not padding; None: all
    chosen: Tensor  # [n, k] expert; 0 for padding
    load: Tensor  # [E] share of all choices
    order: Tensor  # [m] choices that are kept, sorted by expert
    row_of: Tensor  # [k, n] where each choice is in `order`; m: it is not kept
    rows_per_expert: Tensor  # [E / ep] rows for each expert of this rank
    sent: list[int]  # rows to each expert-parallel rank; empty without expert parallelism
    received: list[int]  # rows from each
    by_expert: Tensor | None  # [sum of received] indices that sort received rows by expert
    by_rank: Tensor | None  # the inverse of by_expert


def inverse_permutation(order: Tensor, size: int) -> Tensor:
    """The position in `order` of each of `size` numbers; len(order) for numbers not in it."""
    position = torch.full((size,), len(order), dtype=order.dtype, device=order.device)
    position[order] = torch.arange(len(order), device=order.device)
    return position


# Statistics are means over "tokens"; dropped_share is a mean over choices.
ROUTER_STATS = ("tokens", "dropped_share", "router_entropy", "load_balancing_loss", "z_loss")


class Routing(recompute.RunOnce):
    """Makes a Dispatch from logits, and adds up statistics. It has no gradient.

    Tokens of a micro-batch may be on several context-parallel ranks. With a transport plan or a
    capacity an expert depends on all of them. Then each rank gathers their logits, in the order of
    one device, chooses for all tokens, and takes its own.

    Where recompute.py runs a layer a second time in backward, routing does not run again: the
    Dispatch of the first run is reused.
    """

    def __init__(self, scores, config: MoEConfig):
        super().__init__()
        self.scores = scores
        self.k = config.router_topk
        self.capacity_factor = config.capacity_factor
        # The ranks of expert parallelism.
        self.group: dist.ProcessGroup | None = None
        # Whether a token's experts depend on the other tokens of the micro-batch.
        self.looks_at_others = config.router == "sinkhorn" or config.capacity_factor > 0
        # The ranks of context parallelism, which have other tokens of the same sequences; its
        # functions that give [b, s, ..] of all ranks, and [b, s/N, ..] of this rank.
        self.sequence_group: dist.ProcessGroup | None = None
        self.gather: Callable | None = None
        self.shard: Callable | None = None
        # [E + 5], sums over training tokens: choices of each expert, then ROUTER_STATS.
        self.statistics: Tensor | None = None

    @torch.no_grad()
    def forward(self, logits: Tensor, real: Tensor | None = None) -> Dispatch:
        """logits: [.., E], of this rank's tokens; [b, s/N, E] under context parallelism. real:
        [b, s/N] bool, the positions that are not padding and so are routed; None: all."""
        chosen, kept = self.choices_on_all_ranks(logits, real)  # [n, k] each
        n, e = len(chosen), logits.shape[-1]
        # [k n], the expert of each choice. All first choices come first.
        expert = chosen.t().flatten()
        order = expert.argsort(stable=True)
        counted = expert if real is None else chosen[real.flatten()].flatten()
        counts = rows_per_expert = counted.bincount(minlength=e)  # [E]
        if kept is not None:
            # On a GPU the host waits for the number of choices that are kept.
            order = order[kept.t().flatten()[order]]
            rows_per_expert = expert[order].bincount(minlength=e)
        load = self.load(counts, logits.dtype)
        if self.training:
            logits = logits.flatten(0, -2) if real is None else logits[real]
            self.add_statistics(logits, counts, load, dropped=len(counted) - len(order))
        row_of = inverse_permutation(order, self.k * n).view(-1, n)
        return Dispatch(real, chosen, load, order, row_of, *self.across_ranks(rows_per_expert))

    def choices_on_all_ranks(self, logits: Tensor, real: Tensor | None):
        """The `choices` of this rank's tokens. Where they depend on other tokens, those of all
        context-parallel ranks choose together."""
        if not (self.training and self.looks_at_others and self.gather):
            return self.choices(logits, real)
        everyone = self.gather(logits)  # [b, s, E]
        found = self.choices(everyone, None if real is None else self.gather(real))
        by_sequence = [x if x is None else x.view(*everyone.shape[:2], -1) for x in found]
        return [x if x is None else self.shard(x).flatten(0, 1) for x in by_sequence]

    def choices(self, logits: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(the experts that each token chooses, 0 for padding; which of these choices are kept:
        those that are neither dropped nor padding's, None for all). Arguments as in `forward`, of
        all tokens that are routed together -> [n, k] each"""
        tokens = logits.flatten(0, -2) if real is None else logits[real]
        chosen = self.scores(tokens, self.training).topk(self.k).indices
        # Evaluation drops nothing.
        has_capacity = self.capacity_factor and self.training
        kept = self.within_capacity(chosen, logits.shape[-1]) if has_capacity else None
        if real is not None:
            # On a GPU the host waits for the positions.
            at = real.flatten().nonzero().squeeze(1)
            of_padding = chosen.new_zeros(real.numel(), self.k)
            kept = torch.ones_like(chosen, dtype=torch.bool) if kept is None else kept
            kept = of_padding.bool().index_copy(0, at, kept)
            chosen = of_padding.index_copy(0, at, chosen)
        return chosen, kept

    def within_capacity(self, chosen: Tensor, e: int) -> Tensor:
        """Which choices are within their expert's capacity. chosen: [n, k] -> [n, k] bool

        An expert drops its last choices: second choices before first ones, later tokens before
        earlier ones. A dropped choice adds zeros; the probabilities of the token's other choices do
        not change.
        """
        expert = chosen.t().flatten()
        # Rounding first keeps a float's last bit from adding one.
        factor = min(self.capacity_factor, e)
        capacity = math.ceil(round(factor * len(expert) / e, 6))
        sorted_experts, order = expert.sort(stable=True)
        counts = expert.bincount(minlength=e)
        # Where in `order` the choices of the same expert begin.
        first = (counts.cumsum(0) - counts)[sorted_experts]
        rank_in_expert = torch.arange(len(order), device=order.device) - first
        kept = torch.empty_like(expert, dtype=torch.bool)
        return kept.scatter(0, order, rank_in_expert < capacity).view(self.k, -1).t()

    def load(self, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Each expert's share of the micro-batch's choices on all context-parallel ranks.
        counts: [E], of this rank -> [E]"""
        if self.sequence_group and self.training:
            counts = counts.clone()
            dist.all_reduce(counts, group=self.sequence_group)
        # A micro-batch may be only padding: the clamp avoids 0 / 0.
        return counts.to(dtype) / counts.sum().clamp(min=1)

    def add_statistics(self, logits: Tensor, counts: Tensor, load: Tensor, dropped: int) -> None:
        logits = logits.double()
        p = logits.softmax(-1)
        sums = (
            len(logits),
            dropped,
            torch.special.entr(p).sum(),
            logits.shape[1] * (p @ load.double()).sum(),
            logits.logsumexp(-1).square().sum(),
        )
        sums = [device_queue.number(x, torch.float64, logits.device) for x in sums]
        new = torch.cat((counts.double(), torch.stack(sums)))
        self.statistics = new if self.statistics is None else self.statistics + new

    def across_ranks(self, counts: Tensor):
        """Tell the other ranks how many rows they will receive. counts: [E]. Returns the last five
        fields of Dispatch. On a GPU the host waits here, because it gives an all-to-all its
        sizes."""
        if self.group is None:
            return counts, [], [], None, None
        ep = self.group.size()
        ours = counts.view(ep, -1)  # [ep, E / ep] rows from here for rank r's experts
        theirs = self.exchange(counts).view(ep, -1)  # rows from rank r for the experts here
        expert = torch.arange(theirs.shape[1], device=counts.device).repeat(ep)
        # One copy brings both to the host: [2, ep].
        sent, received = torch.stack((ours.sum(1), theirs.sum(1))).tolist()
        # Without output_size the host would wait for the GPU to sum the counts.
        by_expert = expert.repeat_interleave(theirs.flatten(), output_size=sum(received))
        by_expert = by_expert.argsort(stable=True)
        by_rank = inverse_permutation(by_expert, len(by_expert))
        return theirs.sum(0), sent, received, by_expert, by_rank

    def exchange(self, counts: Tensor) -> Tensor:
        """[E] rows for each expert of each rank -> [E], from each rank for each expert here."""
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        return theirs


# === experts ======================================================================================

# --- dispatch and combine -------------------------------------------------------------------------


def permute_rows(x: Tensor, order: Tensor) -> Tensor:
    """The tokens' rows in the order of choices. x: [n, h]; order: [m] -> [m, h]"""
    # Choice c belongs to token c % n.
    return x.index_select(0, order % max(1, len(x)))


def unpermute_rows(rows: Tensor, position: Tensor) -> Tensor:
    """The sum of each token's rows. rows: [m, h]; position: [k, n] -> [n, h]"""
    if len(rows) < position.numel():
        # Row m is zeros: dropped choices read it.
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    y = rows.index_select(0, position[0])
    for choice in position[1:]:
        y += rows.index_select(0, choice)
    return y


class _Permute(torch.autograd.Function):
    """`permute_rows` in forward and `unpermute_rows` in backward, or the reverse.

    Autograd's own backward of index_select is an index_add, which adds atomically on a GPU. With
    the inverse index backward is a gather too.
    """

    @staticmethod
    def forward(ctx, x, function, adjoint, forward_index, backward_index):
        ctx.adjoint = adjoint
        ctx.save_for_backward(backward_index)
        return function(x, forward_index)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.adjoint(grad, *ctx.saved_tensors), None, None, None, None


class _AllToAll(torch.autograd.Function):
    """Sends `sent[r]` rows to rank r, and receives `received[r]` rows from it. The adjoint sends
    them back. turns: those of another computation, which runs meanwhile (base/turns.py), or None.
    """

    @staticmethod
    def forward(ctx, rows, sent, received, group, turns):
        # Backward sends the other way round.
        ctx.arguments = received, sent, group, turns
        y = rows.new_empty(sum(received), rows.shape[1])
        rows, sizes = rows.contiguous(), (received, sent)
        if turns is None:
            dist.all_to_all_single(y, rows, *sizes, group=group)
        else:
            turns.wait(dist.all_to_all_single(y, rows, *sizes, group=group, async_op=True))
        # `detach` as in base/cpu.py.
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _AllToAll.apply(grad, *ctx.arguments), None, None, None, None


def permute(x: Tensor, order: Tensor, position: Tensor) -> Tensor:
    """`permute_rows` with a gradient. x: [n, h]; position: [k, n], order's inverse -> [m, h]"""
    return _Permute.apply(x, permute_rows, unpermute_rows, order, position)


def unpermute(rows: Tensor, probabilities: Tensor, position: Tensor, order: Tensor) -> Tensor:
    """`unpermute_rows` of rows times their probability, [n, k], with a gradient. -> [n, h]"""
    weights = probabilities.t().flatten()[order].unsqueeze(1)  # [m, 1]
    rows = rows * weights.to(rows.dtype)
    return _Permute.apply(rows, unpermute_rows, permute_rows, position, order)


def dispatch(x: Tensor, plan: Dispatch, exchange: Callable, permute=permute):
    """Send tokens to the ranks of their experts. x: [n, h] -> [rows of this rank's experts, h]

    exchange(rows, sent, received): the all-to-all. permute (and unpermute in `combine`): these
    functions, or fused kernels that do the same."""
    rows = permute(x, plan.order, plan.row_of)
    if plan.by_expert is None:
        return rows
    rows = exchange(rows, plan.sent, plan.received)
    # The rows came in the order (rank, expert).
    return permute(rows, plan.by_expert, plan.by_rank.unsqueeze(0))


def combine(
    rows: Tensor,
    probabilities: Tensor,
    plan: Dispatch,
    exchange: Callable,
    permute=permute,
    unpermute=unpermute,
) -> Tensor:
    """The reverse of `dispatch`: the sum of a token's rows, each times its router probability.

    rows: [.., h] in the order that dispatch gave; probabilities: [n, k] -> [n, h]
    """
    if plan.by_expert is not None:
        rows = permute(rows, plan.by_rank, plan.by_expert.unsqueeze(0))
        rows = exchange(rows, plan.received, plan.sent)
    return unpermute(rows, probabilities, plan.row_of, plan.order)


# --- the experts ----------------------------------------------------------------------------------


class ExpertLinear(nn.Module):
    """One matrix of every expert. weight: [E, out, in]"""

    def __init__(self, num_experts: int, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, n_out, n_in))
        # gpt.Block adds mlp.down.bias if it is not None.
        self.bias = None


class _AddLoss(torch.autograd.Function):
    """Returns y, and in backward gives `loss` a gradient of 1. So the loss is minimised, although
    the training loop never sees it: a pipeline stage has y as its only result. The caller has
    multiplied the loss by its weight and by fp16's loss scale.
    """

    @staticmethod
    def forward(ctx, y, loss):
        ctx.one = torch.ones_like(loss)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, ctx.one


class SharedExperts(gpt.MLP):
    """The experts that every token goes through, as one MLP whose inner size is the sum of theirs
    (DeepSeekMoE, arXiv 2401.06066, section 3.2). Tensor parallelism shards it as any MLP, with an f
    and a g of its own. x: [b, s, h] -> [b, s, h]"""

    def __init__(self, config: MoEConfig):
        size = dict(ffn_hidden_size=config.shared_ffn_size, mlp_bias=False)
        super().__init__(dataclasses.replace(config, **size))
        self.activation = families.ACTIVATIONS[config.activation]()
        self.of_token = nn.Linear(config.hidden_size, 1, bias=False) if config.shared_gate else None

    def forward(self, x: Tensor, context: gpt.Context = gpt.PLAIN) -> Tensor:
        y = super().forward(x, context)
        return y if self.of_token is None else y * self.of_token(x).sigmoid()


class MoE(nn.Module):
    """The expert layer, which replaces gpt.MLP. x: [b, s, h] -> [b, s, h]

    enter and leave: f and g of tensor parallelism (tensor_parallel.py), else the identity. The
    router computes logits of this rank's part of the sequence. Routing and experts need the whole
    micro-batch, so both x and the logits enter.
    """

    permute = staticmethod(permute)
    unpermute = staticmethod(unpermute)

    def __init__(self, config: MoEConfig):
        super().__init__()
        h, ffn, e = config.hidden_size, config.expert_size, config.num_experts
        self.router = ROUTERS[config.router](config)
        self.routing = Routing(self.router.scores, config)
        self.gate = ExpertLinear(e, h, ffn) if config.gated else None
        self.up = ExpertLinear(e, h, ffn)
        self.activation = families.ACTIVATIONS[config.activation]()
        self.down = ExpertLinear(e, ffn, h)
        self.shared = SharedExperts(config) if config.shared_ffn_size else None
        self.enter = nn.Identity()
        self.leave = nn.Identity()
        # The ranks of expert parallelism.
        self.group: dist.ProcessGroup | None = None
        # Another computation runs during all-to-alls (pipeline_parallel.Pipeline sets it).
        self.turns: Turns | None = None
        # The weight of one token in the router's losses; None: 1 / tokens of the micro-batch.
        self.token_weight: float | None = None

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return _AllToAll.apply(rows, sent, received, self.group, self.turns)

    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: [rows, h] in the order of experts; counts: [E / ep] -> [rows, h]"""
        if self.gate is not None:
            inner = self.activation(*self.multiply(rows, counts, self.gate, self.up))  # [rows, ffn]
        else:
            inner = self.activation(*self.multiply(rows, counts, self.up), None)
        return self.multiply(inner, counts, self.down)[0]

    def multiply(self, rows: Tensor, counts: Tensor, *matrices: ExpertLinear) -> list[Tensor]:
        """The product of each expert's matrices and rows (grouped_linear). adapter_layers.py of
        finetune/ extends it."""
        return grouped_linear(rows, counts, *(matrix.weight for matrix in matrices))

    @compiling.left_out
    def forward(self, x: Tensor, context: gpt.Context = gpt.PLAIN) -> Tensor:
        """context.real: the router leaves out the positions that are padding."""
        logits = self.router(x)  # [b, s, E], or a shard of the sequence
        beside = self.shared(x) if self.shared else None  # [b, s, h], or a shard
        x = self.enter(x)  # [b, s, h], the whole micro-batch
        all_logits = self.enter(logits)  # [b, s, E]
        plan = self.routing(all_logits.detach(), context.real)
        all_logits = all_logits.flatten(0, 1)  # [b s, E]
        rows = dispatch(x.flatten(0, 1), plan, self.exchange, self.permute)
        rows = self.experts(rows, plan.rows_per_expert)
        probabilities = self.router.probabilities(all_logits, plan.chosen)  # [b s, k]
        y = combine(rows, probabilities, plan, self.exchange, self.permute, self.unpermute)
        y = self.leave(y.view(x.shape))
        y = y if beside is None else y + beside
        has_losses = self.router.aux_loss or self.router.z_loss
        if self.training and torch.is_grad_enabled() and has_losses:
            # The loss counts this rank's positions alone: `logits`, not `all_logits`.
            weight = self.token_weight or 1 / len(all_logits)
            loss = self.router.losses(self.tokens_of(logits, plan), plan.load)
            y = _AddLoss.apply(y, loss * weight)
        return y

    def tokens_of(self, logits: Tensor, plan: Dispatch) -> Tensor:
        """The logits of positions that are not padding. logits: [b, s, E], or a shard of s"""
        if plan.real is None:
            return logits
        shards = plan.real.shape[1] // logits.shape[1]
        n = self.enter.group.rank() if shards > 1 else 0
        return logits[plan.real.chunk(shards, dim=1)[n]]


# --- check and apply ------------------------------------------------------------------------------


class ExpertLayers(dict[int, MoE]):
    """The expert layers of models, or of pipeline stages, by the layer's number; and the calls of
    the training loop to them."""

    def __init__(self, *models: nn.Module):
        super().__init__()
        for model in models:
            for number, block in model.blocks.items():
                if isinstance(block.mlp, MoE):
                    self[int(number)] = block.mlp

    def begin_step(self, token_weight: float) -> None:
        """Before the first micro-batch: set the weight of a token, and clear the statistics. The
        router's losses are means over all tokens of the global batch, masked ones too."""
        for layer in self.values():
            layer.token_weight = token_weight
            layer.routing.statistics = None

    @torch.no_grad()
    def end_step(self, group: dist.ProcessGroup | None, taken: Tensor) -> None:
        """After the optimizer's step: change the biases of routers by the load of the global batch.
        group: the ranks that saw other tokens, for one all-reduce; taken: as in fp8.Scaling."""
        balanced = [layer for layer in self.values() if isinstance(layer.router, BiasRouter)]
        # Frozen routers have no statistics.
        balanced = [layer for layer in balanced if layer.training]
        if not balanced:
            return
        counted = [layer.routing.statistics[: -len(ROUTER_STATS)] for layer in balanced]
        loads = torch.stack(counted)  # [layers, E]
        # train.py --as-rank routes on the CPU, and computes on the meta device.
        loads = loads.to(taken.device)
        if group:
            dist.all_reduce(loads, group=group)
        for layer, load in zip(balanced, loads, strict=True):
            layer.router.balance(load, taken)

    def statistics(
        self, config: MoEConfig, groups: list[dist.ProcessGroup], device
    ) -> dict[str, Tensor]:
        """The routers' statistics of the step's training forwards.

        A collective over `groups`: ranks that saw other tokens, ranks that hold other layers. Each
        value has one entry for each layer with experts. expert_load: each expert's choices divided
        by the even share; dropped_share: the share of choices that is dropped; router_entropy: the
        entropy of a token's probabilities, in nats; load_balancing_loss (1 where load is even) and
        z_loss: without their coefficients. The values stay on the device, so the host need not
        wait.
        """
        e = config.num_experts
        shape = len(config.expert_layers), e + len(ROUTER_STATS)
        table = torch.zeros(shape, dtype=torch.float64, device=device)
        for row, number in zip(table, config.expert_layers):
            if number in self:
                row.copy_(self[number].routing.statistics)
        for group in groups:
            dist.all_reduce(table, group=group)
        choices = table[:, :e]
        tokens, *sums = table[:, e:].t()
        # Each token has k choices that may be dropped.
        sums[0] = sums[0] / config.router_topk
        result = {"expert_load": choices / choices.mean(1, keepdim=True)}
        for name, total in zip(ROUTER_STATS[1:], sums):
            result[name] = total / tokens
        return result


def check(config: GPTConfig, ep: int, dp: int) -> None:
    """Raises FieldError if ep of dp data-parallel ranks cannot share the experts."""
    e = getattr(config, "num_experts", 0)
    fit = divisors(math.gcd(e, dp), ep)
    if dp % ep:
        raise FieldError("ep", ep, f"must divide the {dp} data-parallel ranks", fit)
    if ep > 1 and not e:
        rule = "this model has no experts; {num_experts} would give it one for each rank"
        raise FieldError("ep", ep, rule, num_experts=ep)
    if e % ep:
        rule = "must divide {num_experts}, so that all ranks hold equally many"
        raise FieldError("ep", ep, rule, fit, num_experts=e)


def apply(
    model: gpt.GPT,
    ep_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> None:
    """Put experts into the layers that model.config, a MoEConfig, names; in place.

    ep_group: the ranks that share the experts. tp_group: the ranks that share each expert's inner
    dimension. Call it before tensor_parallel.apply, which leaves experts alone. Raises FieldError
    as `check`, ValueError for a model that has experts already.
    """
    config = model.config
    ep = ep_group.size() if ep_group else 1
    # The number of data-parallel ranks is not known here.
    check(config, ep, dp=ep)
    if ExpertLayers(model):
        raise ValueError("this model has experts already: call moe.apply once")
    for number in getattr(config, "expert_layers", ()):
        block = model.blocks[str(number)]
        with block.mlp.up.weight.device:
            layer = MoE(config).to(block.mlp.up.weight.dtype)
        if not layer.up.weight.is_meta:
            init(model, layer, f"blocks.{number}.mlp.")
        if ep_group:
            split_by_expert(layer, ep_group)
        if tp_group:
            split_inside_experts(layer, tp_group)
        block.mlp = layer


@torch.no_grad()
def init(model: gpt.GPT, layer: MoE, prefix: str) -> None:
    """Draw initial values with random seed 0, as GPT.__init__ does unless it is on the meta
    device."""
    for name, p in layer.named_parameters():
        g = gpt.generator(0, prefix + name)
        p.copy_(model.init_parameter(prefix + name, p.shape, g))


def build(config: GPTConfig) -> gpt.GPT:
    """A whole model of any family, with experts where the configuration has some."""
    model = families.build(config)
    apply(model)
    return model


def empty_model(config: GPTConfig) -> gpt.GPT:
    """A model on the meta device: names and shapes, no values."""
    with torch.device("meta"):
        return build(config)


def split_by_expert(layer: MoE, group: dist.ProcessGroup) -> None:
    """Keep this rank's E / ep experts."""
    layer.group = layer.routing.group = group
    for matrix in (layer.gate, layer.up, layer.down):
        if matrix is not None:
            shard_parameter(matrix, "weight", Shard(0, group))  # [E / ep, out, in]


def split_inside_experts(layer: MoE, group: dist.ProcessGroup) -> None:
    """Keep this rank's shard of each expert's inner dimension ffn."""
    for matrix in (layer.gate, layer.up):
        if matrix is not None:
            shard_parameter(matrix, "weight", Shard(1, group))  # [E, ffn / t, h]
    shard_parameter(layer.down, "weight", Shard(2, group))  # [E, h, ffn / t]
    layer.enter = tensor_parallel.CopyToRanks(group)
    layer.leave = tensor_parallel.ReduceFromRanks(group)
