"""Routers of a mixture of experts: which expert gets which token (moe.py moves them).

The logits are z = x W_rᵀ, one number for each token and expert. Left alone, a router sends all
tokens to a few experts. Two ways to balance the load:

    sinkhorn    A transport plan: a matrix of tokens by experts in which every token has the same
                mass, and every expert too (S-BASE, arXiv 2202.01169, section 3.1). Each token goes
                where its row is largest. The mass is even; the number of tokens that choose an
                expert is nearly even, the more so the lower the plan's temperature. The plan has no
                gradient: an expert's output is multiplied by a router probability from the raw
                logits.
    topk        The k largest logits. One loss pulls towards even load (Switch, arXiv 2101.03961,
                eq. 4-6), another keeps logits small (ST-MoE, arXiv 2202.08906, eq. 5).

    logits  e0  e1       plan, temperature 1      temperature 0.02
    t0     2.0 1.0       .10  .15  -> e1          -> e1
    t1     2.2 1.0       .12  .14  -> e1          -> e0
    t2     1.5 1.0       .07  .18  -> e1          -> e1
    t3     3.0 0.0       .21  .04  -> e0          -> e0

The raw logits would send all four tokens to e0. Rows of the plan sum to 1/4, columns to 1/2.
A plan looks at later tokens and at other sequences, so training with it is not strictly causal.
Evaluation uses the raw logits, each token for itself, and so routes some tokens elsewhere than
training did.

    python routers.py      a lesson: a plan by hand, temperature and load, what is dropped

Not covered: router biases, expert groups and jitter (Megatron-LM).
"""

if __name__ == "__main__":
    from base import start

    start.lesson("routers")

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import recompute
from base.device_queue import number
from model_config import ROUTER_NAMES, MoEConfig

# --- a balanced plan -----------------------------------------------------------------------------


def scale_rows_and_columns(kernel: Tensor, tolerance: float, max_iterations: int):
    """Sinkhorn's iteration: d0, d1 for which diag(d0) kernel diag(d1) has rows that sum to 1/N and
    columns that sum to 1/E.

    Scales rows, then columns, until the mean error of the loads is at most `tolerance` of the even
    load, or after `max_iterations`. Columns are then exact, rows nearly. kernel: [N, E], large
    where a token fits an expert. Returns (d0 [N], d1 [E], whether d1 stayed within the range of a
    float).

    The host sees the numbers of each iteration: a GPU takes `potentials_in_fixed_time` instead.
    """
    n, e = kernel.shape
    d1 = kernel.new_ones(e)
    for _ in range(max_iterations):
        d0 = 1 / n / (kernel @ d1)
        # load of each expert / even share
        load = (e * d1 * (kernel.t() @ d0)).clamp(min=1e-100)
        d1 = d1 / load
        # "not above": also ends where a number is NaN
        if not (1 - load).abs().mean() > tolerance:
            break
        if d1.log().abs().amax() > 200:
            return d0, d1, False
    return d0, d1, True


def balance(
    logits: Tensor, temperature: float = 1.0, tolerance: float = 1e-4, max_iterations: int = 1000
) -> tuple[Tensor, Tensor]:
    """The plan d0 C d1 with C = exp(logits / temperature) (arXiv 2202.01169, section 3.1).

    At a low temperature the iteration is slow, so the temperature is halved step by step from 1:
    cooling. After each temperature, and whenever d1 leaves the range of a float, d1 is folded into
    f, the dual potentials: one bias per expert, in units of logits. The next iteration starts from
    there. Of each row only differences matter, so its largest entry is set to 0. A token that the
    plan splits 6 to 4 goes one way whole; a lower temperature splits fewer tokens. Equal tokens go
    together at any temperature.

    logits: [N, E]; temperature: at most 1; max_iterations: at one temperature, and also the limit
    for the number of temperatures.
    Returns (plan, float64 [N, E]; f [E]). In each row logits + f have the order of the plan, also
    where the plan is too small for a float.
    """
    logits = logits.double()
    f = logits.new_zeros(logits.shape[1])
    now = 1.0
    for _ in range(max_iterations):
        z = (logits + f) / now
        kernel = (z - z.amax(1, keepdim=True)).exp()
        d0, d1, in_range = scale_rows_and_columns(kernel, tolerance, max_iterations)
        f = f + now * d1.log()
        if in_range and now <= temperature:
            break
        if in_range:
            now = max(now / 2, temperature)
    return d0.unsqueeze(1) * kernel * d1, f


# at each temperature: enough for the tolerance of SinkhornRouter (tests/test_moe.py)
FIXED_ITERATIONS = 32


def potentials_in_fixed_time(logits: Tensor, temperature: float) -> Tensor:
    """f as `balance` finds it, by a fixed number of iterations at each temperature: the host need
    not wait for a GPU to learn whether one was the last.

    A softmax scales the rows, and f itself takes what d1 would: with d1 = exp(Δf / temperature) it
    is the same iteration, and nothing leaves the range of a float32. logits: [N, E] -> [E]
    """
    e = logits.shape[1]
    f = logits.new_zeros(e)
    now = 2.0
    while now > temperature:
        now = max(now / 2, temperature)
        for _ in range(FIXED_ITERATIONS):
            # load of each expert / even share
            load = e * ((logits + f) / now).softmax(1).mean(0)
            f = f - now * load.clamp(min=1e-30).log()
    return f


def sinkhorn(
    logits: Tensor, temperature: float = 1.0, tolerance: float = 1e-4, max_iterations: int = 1000
) -> Tensor:
    """The balanced plan of `balance`. logits: [N, E], of any size. Returns [N, E], float64."""
    return balance(logits, temperature, tolerance, max_iterations)[0]


# --- routers --------------------------------------------------------------------------------------


class Router(nn.Module):
    """One logit for each token and expert, in at least float32."""

    def __init__(self, config: MoEConfig):
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
        """A token goes where its scores are largest. logits: [n, E] -> [n, E]"""
        return logits

    def losses(self, logits: Tensor, load: Tensor) -> Tensor:
        """The losses of each token, summed over these tokens. A scalar; 0.0 without losses.

            load-balancing   E Σ_e load_e p_e      1 where the load is even
            z-loss           (log Σ_e exp z_e)²    each times its coefficient

        p: a token's probabilities. logits: [.., E], any part of a micro-batch; load: [E], each
        expert's share of the micro-batch's choices, before any token is dropped.
        """
        total = 0.0
        if self.aux_loss:
            total = self.aux_loss * len(load) * (logits.softmax(-1) @ load).sum()
        if self.z_loss:
            total = total + self.z_loss * logits.logsumexp(-1).square().sum()
        return total


class TopKRouter(Router):
    """The k largest logits.

    With k = 1 an output is multiplied by its expert's probability (Switch, eq. 2); with more the k
    probabilities add up to 1 (Mixtral, arXiv 2401.04088).
    """

    def probabilities(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """The factor of each chosen expert's output. logits: [n, E]; chosen: [n, k] -> [n, k]"""
        if self.k == 1:
            return logits.softmax(-1).gather(1, chosen)
        return logits.gather(1, chosen).softmax(-1)


class SinkhornRouter(Router):
    """Training follows the balanced plan, evaluation the raw logits.

    As in Megatron-LM, the probability is a sigmoid for k = 1, else the softmax over all experts.
    """

    def scores(self, logits: Tensor, training: bool) -> Tensor:
        if not training or not len(logits):
            return logits
        if logits.device.type == "cpu":
            return logits + balance(logits, self.temperature, tolerance=1e-2)[1]
        return logits + potentials_in_fixed_time(logits, self.temperature)

    def probabilities(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """As in TopKRouter."""
        every = logits.sigmoid() if self.k == 1 else logits.softmax(-1)
        return every.gather(1, chosen)


ROUTERS = dict(zip(ROUTER_NAMES, (SinkhornRouter, TopKRouter), strict=True))


# --- a plan for the tokens of a micro-batch -------------------------------------------------------


class DispatchPlan(NamedTuple):
    """Where rows go and come from; n positions, k choices each, m assignments that are not dropped.

    Assignment a is choice a // n of position a % n. Positions that are padding have none. For the
    picture in moe.py (k = 1) chosen is [[2], [0], [3], [0], [2], [1]], order [1, 3, 5, 0, 4, 2] and
    position [[3, 0, 5, 1, 4, 2]].
    """

    real: Tensor | None  # [b, s] bool: positions that are not padding; None: all
    chosen: Tensor  # [n, k] expert; 0 for padding
    load: Tensor  # [E] share of all choices
    order: Tensor  # [m] assignments, sorted by expert
    position: Tensor  # [k, n] where each assignment is in `order`; m: dropped
    counts: Tensor  # [E / ep] rows for each expert of this rank
    sent: list[int]  # rows to each expert-parallel rank; empty without expert parallelism
    received: list[int]  # rows from each
    by_expert: Tensor | None  # [sum of received] indices that sort received rows by expert
    by_rank: Tensor | None  # the inverse of by_expert


def inverse_permutation(order: Tensor, size: int) -> Tensor:
    """Where each of `size` numbers is in `order`; len(order) for those that are not in it."""
    position = torch.full((size,), len(order), dtype=order.dtype, device=order.device)
    position[order] = torch.arange(len(order), device=order.device)
    return position


# reported as means over "tokens" (dropped_share: over choices)
ROUTER_STATS = ("tokens", "dropped_share", "router_entropy", "load_balancing_loss", "z_loss")


class Routing(recompute.RunOnce):
    """From logits to a dispatch plan, and the router's statistics. It has no gradient.

    Where recompute.py runs a layer a second time in backward, routing does not run again: the plan
    of the first run is reused.
    """

    def __init__(self, scores, config: MoEConfig):
        super().__init__()
        self.scores = scores
        self.k = config.router_topk
        self.capacity_factor = config.capacity_factor
        # the ranks of expert parallelism
        self.group: dist.ProcessGroup | None = None
        # the ranks of context parallelism, with other tokens of the same sequences
        self.sequence_group: dist.ProcessGroup | None = None
        # [E + 5], sums over training tokens: choices of each expert, then ROUTER_STATS
        self.statistics: Tensor | None = None

    @torch.no_grad()
    def forward(self, logits: Tensor, real: Tensor | None = None) -> DispatchPlan:
        """logits: [n, E], of the whole micro-batch. real: [b, s] bool, positions that are not
        padding, which takes no part; None: all.

        With a capacity, an expert drops its last choices: second choices before first ones, later
        tokens before earlier ones. A dropped choice adds zeros; the probabilities of the token's
        other choices stay as they are.
        """
        n, e = logits.shape
        if real is not None:
            # the numbers of the positions that hold a token; on a GPU the host waits for them
            tokens = real.flatten().nonzero().squeeze(1)
            logits = logits[tokens]
        chosen = self.scores(logits, self.training).topk(self.k).indices
        choices = chosen.t().flatten()  # [k tokens]: all first choices come first
        counts = choices.bincount(minlength=e)
        load = self.load(counts, logits.dtype)
        order = choices.argsort(stable=True)
        # evaluation drops nothing
        if self.capacity_factor and self.training:
            factor = min(self.capacity_factor, e)
            # rounded first, so that a float's last bit does not add one
            capacity = math.ceil(round(factor * len(choices) / e, 6))
            # in `order`, where the expert of each assignment begins
            first = (counts.cumsum(0) - counts)[choices[order]]
            rank_in_expert = torch.arange(len(choices), device=choices.device) - first
            order = order[rank_in_expert < capacity]
            kept = counts.clamp(max=capacity)
        else:
            kept = counts
        if self.training:
            self.add_statistics(logits, counts, load, dropped=len(choices) - len(order))
        if real is not None:
            chosen = chosen.new_zeros(n, self.k).index_copy(0, tokens, chosen)
            # from assignments of tokens to those of positions
            m = max(1, len(tokens))
            order = order // m * n + tokens[order % m]
        position = inverse_permutation(order, self.k * n).view(-1, n)
        return DispatchPlan(real, chosen, load, order, position, *self.across_ranks(kept))

    def load(self, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Each expert's share of the choices of the micro-batch, of all context-parallel ranks.
        counts: [E], of this rank -> [E]"""
        if self.sequence_group and self.training:
            counts = counts.clone()
            dist.all_reduce(counts, group=self.sequence_group)
        # a micro-batch may be padding alone
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
        sums = [number(x, torch.float64, logits.device) for x in sums]
        new = torch.cat((counts.double(), torch.stack(sums)))
        self.statistics = new if self.statistics is None else self.statistics + new

    def across_ranks(self, counts: Tensor):
        """Tell the other ranks how many rows will come. counts: [E]. Returns the last fields of
        DispatchPlan. On a GPU the host waits here: an all-to-all takes its sizes from the host."""
        if self.group is None:
            return counts, [], [], None, None
        ep = self.group.size()
        ours = counts.view(ep, -1)  # [ep, E / ep] rows from here for rank r's experts
        theirs = self.exchange(counts).view(ep, -1)  # rows from rank r for the experts here
        expert = torch.arange(theirs.shape[1], device=counts.device).repeat(ep)
        # one copy to the host: [2, ep]
        sent, received = torch.stack((ours.sum(1), theirs.sum(1))).tolist()
        # the sum is known: the host need not ask for it
        by_expert = expert.repeat_interleave(theirs.flatten(), output_size=sum(received))
        by_expert = by_expert.argsort(stable=True)
        by_rank = inverse_permutation(by_expert, len(by_expert))
        return theirs.sum(0), sent, received, by_expert, by_rank

    def exchange(self, counts: Tensor) -> Tensor:
        """[E] rows for each expert of each rank -> [E], from each rank for each expert here."""
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        return theirs
