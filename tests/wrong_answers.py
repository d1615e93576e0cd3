"""Wrong answers to the exercises, each of them plausible: test_exercises.py has them graded.

A class has the wrong answers to one exercise, three or more. Each is a function that stands in the
place of one in the right answer.
"""

from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

import sharding
from fsdp import all_gather, reduce_scatter
from schedules import Action, Event, needs, one_f_one_b, result_of
from sharding import Shard, Sharding
from tensor_parallel import reduce_from_ranks


class Pair(torch.autograd.Function):
    """Any forward with any backward."""

    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.call = lambda grad: backward(grad, group)
        return forward(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.call(grad), None, None, None


def pair(forward, backward):
    return lambda x, group: Pair.apply(x, group, forward, backward)


def identity(x, group):
    return x.view_as(x)


def summed(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def mean(x, group):
    return summed(x, group) / group.size()


class Shards:
    @staticmethod
    def without_padding(whole, dim, rank, n):
        parts = torch.chunk(whole, n, dim)
        return parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)

    @staticmethod
    def rounded_down(whole, dim, rank, n):
        size = max(1, whole.shape[dim] // n)
        return whole.narrow(dim, min(rank * size, whole.shape[dim] - size), size)

    @staticmethod
    def padding_kept(part, size, dim, group):
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(2)]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def by_all_reduce(part, size, dim, group):
        """Right, but an all-reduce sends twice as much."""
        places = [torch.zeros_like(part) for _ in range(group.size())]
        places[group.rank()] = part
        return summed(torch.cat(places, dim), group).narrow(dim, 0, size)


class FAndG:
    no_sum_in_backward = pair(identity, identity)
    sum_in_both_directions = pair(summed, summed)
    average = pair(mean, identity)

    @staticmethod
    def gather_and_add(x, group):
        """Right, but every term goes to every rank."""

        def forward(x, group):
            terms = [torch.empty_like(x) for _ in range(group.size())]
            dist.all_gather(terms, x.contiguous(), group=group)
            return sum(terms)

        return Pair.apply(x, group, forward, identity)

    @staticmethod
    def only_on_one_rank(x, group):
        """The other rank never calls the all-reduce: a hang."""
        return Pair.apply(x, group, summed if group.rank() == 0 else identity, identity)


class VocabularyLoss:
    @staticmethod
    def loss(logits, targets, vocab_size, group, padding=-torch.inf, common_largest=True):
        n = logits.shape[-1]
        first = group.rank() * n
        is_padding = torch.arange(first, first + n) >= vocab_size
        z = logits.masked_fill(is_padding, padding) if padding is not None else logits
        largest = z.detach().amax(-1)
        if common_largest:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        z = z - largest.unsqueeze(-1)
        local = targets - first
        elsewhere = (local < 0) | (local >= n)
        target = z.gather(-1, local.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        total = reduce_from_ranks(z.exp().sum(-1), group)
        return total.log() - reduce_from_ranks(target.masked_fill(elsewhere, 0), group)

    padding_counted = partial(loss, padding=None)
    largest_of_each_rank = partial(loss, common_largest=False)

    @staticmethod
    def logits_gathered(logits, targets, vocab_size, group):
        """Right, but V numbers for each token are sent."""
        gather = pair(_gather_columns, lambda grad, group: grad.chunk(2, -1)[group.rank()])
        whole = gather(logits, group)[..., :vocab_size]
        return F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none").view(
            targets.shape
        )


def _gather_columns(x, group):
    record = Sharding((*x.shape[:-1], 2 * x.shape[-1]), (Shard(x.dim() - 1, group),))
    return sharding.gather(x, record)


def _joined(x, group):
    return sharding.gather(
        x, Sharding((x.shape[0], 2 * x.shape[1], x.shape[2]), (Shard(1, group),))
    )


def _cut(x, group):
    return x.chunk(2, 1)[group.rank()].contiguous()


class GAndGBar:
    backward_only_cuts = pair(_joined, _cut)
    by_all_reduce = pair(lambda x, group: _cut(summed(x, group), group), _joined)

    @staticmethod
    def joined_along_the_batch(x, group):
        def forward(x, group):
            whole = x.new_empty(2 * x.shape[0], *x.shape[1:])
            all_gather(whole, x.contiguous(), group=group)
            return whole.view(x.shape[0], -1, x.shape[2])

        return Pair.apply(x, group, forward, _cut)

    # an all-gather where every rank has its own term already
    backward_repeats = pair(lambda x, group: _cut(summed(x, group), group), lambda g, _: _twice(g))


def _twice(grad):
    return torch.cat((grad, grad), 1)


def _list(op, m):
    return [Action(op, 0, k) for k in range(m)]


def _one_f_one_b(p, m, warmup_of):
    schedule = []
    for rank in range(p):
        warmup = min(m, warmup_of(p, rank))
        actions = _list("F", m)[:warmup]
        for k in range(warmup, m):
            actions += [Action("F", 0, k), Action("B", 0, k - warmup)]
        schedule.append(actions + _list("B", m)[m - warmup :])
    return schedule


class OneFOneB:
    @staticmethod
    def gpipe(p, m):
        return [_list("F", m) + _list("B", m) for _ in range(p)]

    warmup_too_long = partial(_one_f_one_b, warmup_of=lambda p, rank: p - rank)
    warmup_of_the_first_rank = partial(_one_f_one_b, warmup_of=lambda p, rank: p - 1)

    @staticmethod
    def cooldown_forgotten(p, m):
        return [actions[: 2 * m - (p - 1 - r)] for r, actions in enumerate(one_f_one_b(p, m))]


def _interleaved(p, m, v, warmup_of, last_chunk_first=True, group=None):
    group = group or p
    forward = []
    for first in range(0, m, group):
        for chunk in range(v):
            forward += [Action("F", chunk, k) for k in range(first, min(m, first + group))]
    backward = []
    for _, chunk, k in forward:
        backward.append(Action("B", v - 1 - chunk if last_chunk_first else chunk, k))
    schedule = []
    for rank in range(p):
        warmup = min(len(forward), warmup_of(rank))
        actions = forward[:warmup]
        for i in range(warmup, len(forward)):
            actions += [forward[i], backward[i - warmup]]
        schedule.append(actions + backward[len(forward) - warmup :])
    return schedule


class Interleaved:
    @staticmethod
    def warmup_of_1f1b(p, m, v):
        return _interleaved(p, m, v, lambda rank: p - 1 - rank)

    @staticmethod
    def first_chunk_first_in_backward(p, m, v):
        return _interleaved(p, m, v, lambda rank: 2 * (p - 1 - rank) + (v - 1) * p, False)

    @staticmethod
    def all_micro_batches_through_a_chunk(p, m, v):
        """Right, but the activations of m micro-batches are held."""
        return _interleaved(p, m, v, lambda rank: 2 * (p - 1 - rank) + (v - 1) * m, group=m)


def _with_w(p, m, delay_of):
    schedule = []
    for rank, old in enumerate(one_f_one_b(p, m)):
        delay = delay_of(m, rank)
        actions = []
        for a in old:
            actions.append(a if a.op == "F" else a._replace(op="I"))
            if a.op == "B" and a.micro_batch >= delay:
                actions.append(Action("W", 0, a.micro_batch - delay))
        schedule.append(actions + _list("W", m)[max(0, m - delay) :])
    return schedule


class ZbH1:
    at_once = partial(_with_w, delay_of=lambda m, rank: 0)
    all_at_the_end = partial(_with_w, delay_of=lambda m, rank: m)
    one_too_late = partial(_with_w, delay_of=lambda m, rank: rank + 1)

    @staticmethod
    def forgotten(p, m):
        right = _with_w(p, m, lambda m, rank: rank)
        return [actions[: 3 * m - rank] for rank, actions in enumerate(right)]


def _every_time(p, cost, result, rank):
    return cost.transfer


def _once(p, cost, result, rank):
    return 0 if result[1] % p == rank else cost.transfer


def _simulate(schedule, cost, placement, late=_every_time, rank_is_busy=True):
    """Events, without an error where the lists are stuck."""
    p = len(schedule)
    ended, free, position, events = {}, [0.0] * p, [0] * p, []
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule):
            while position[rank] < len(actions):
                a = actions[position[rank]]
                needed = needs(a, rank, placement)
                if any(result not in ended for result in needed):
                    break
                arrivals = [ended[r] + late(p, cost, r, rank) for r in needed]
                start = max([free[rank] if rank_is_busy else 0.0, *arrivals])
                end = start + cost.seconds(a.op, placement.stage_of(rank, a.chunk))
                ended[result_of(a, rank, placement)] = free[rank] = end
                events.append(Event(rank, *a, start, end))
                position[rank] += 1
                progress = True
    return events


class Simulate:
    transfers_forgotten = partial(_simulate, late=lambda *_: 0)
    transfers_to_itself = _simulate
    two_actions_at_a_time = partial(_simulate, late=_once, rank_is_busy=False)
    deadlock_ignored = partial(_simulate, late=_once)

    @staticmethod
    def lists_emptied(schedule, cost, placement):
        """Without transfers, and nothing of the lists is left for the next comparison."""
        events = Simulate.transfers_forgotten(schedule, cost, placement)
        for actions in schedule:
            actions.clear()
        return events


def _flat(grads, n):
    rows = []
    for grad in grads:
        padded = F.pad(grad, [0, 0] * (grad.dim() - 1) + [0, -len(grad) % n])
        rows.append(padded.reshape(n, -1))
    return torch.cat(rows, 1)


def _row_of_sum(flat, group):
    row = torch.empty_like(flat[0])
    reduce_scatter(row, flat.reshape(-1), group=group)
    return row


class Zero2:
    @staticmethod
    def last_micro_batch_only(grads, summed, group):
        return _row_of_sum(_flat(grads, 2), group)

    @staticmethod
    def average(grads, summed, group):
        row = _row_of_sum(_flat(grads, 2), group) / group.size()
        return row if summed is None else summed + row

    @staticmethod
    def padded_once_at_the_end(grads, summed, group):
        """One long vector, cut in the middle: a row has no shard of each parameter."""
        flat = torch.cat([grad.flatten() for grad in grads])
        flat = F.pad(flat, [0, 26 - len(flat)]).view(2, -1)
        row = _row_of_sum(flat, group)
        return row if summed is None else summed + row

    @staticmethod
    def view_of_an_all_reduce(grads, summed_before, group):
        """Right, but all rows were sent, and all are kept."""
        row = summed(_flat(grads, 2), group)[group.rank()]
        return row if summed_before is None else row.add_(summed_before)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, row, out, group, how):
        weight = _gathered(row, out, group)
        ctx.save_for_backward(x, weight if how.keeps else row)
        ctx.others = out, group, how
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, saved = ctx.saved_tensors
        out, group, how = ctx.others
        weight = saved if how.keeps else _gathered(saved, out, group)
        dx = grad @ weight
        dw = F.pad(grad.t() @ x, [0, 0, 0, -out % 2])
        if how.sums_dx:
            dx = summed(dx, group)
        if how.sums_dw:
            return dx, _row_of_sum(dw.view(2, -1), group).view(-1, x.shape[1]), None, None, None
        return dx, dw.chunk(2)[group.rank()], None, None, None


def _gathered(row, out, group):
    return sharding.gather(row.detach(), Sharding((out, row.shape[1]), (Shard(0, group),)))


def _sharded_linear(keeps=False, sums_dx=False, sums_dw=True):
    how = SimpleNamespace(keeps=keeps, sums_dx=sums_dx, sums_dw=sums_dw)
    return lambda x, row, out, group: _Linear.apply(x, row, out, group, how)


class Zero3:
    weight_kept = _sharded_linear(keeps=True)
    gradient_of_own_samples = _sharded_linear(sums_dw=False)
    input_gradient_summed = _sharded_linear(sums_dx=True)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, detaches, x, *others):
        ctx.call = function, detaches, x, others
        return function(x, *others)

    @staticmethod
    def backward(ctx, grad):
        function, detaches, x, others = ctx.call
        if detaches == "arguments only":
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y = function(x, *others)
            return None, None, torch.autograd.grad(y, x, grad)[0], None, None
        with torch.enable_grad():
            y = function(x, *others)
        gradient = torch.autograd.grad(y, x, grad, retain_graph=True)[0]
        y.backward(grad)
        return None, None, gradient, None, None


class Checkpoint:
    @staticmethod
    def not_at_all(function, *args):
        """Right, but everything is kept."""
        return function(*args)

    @staticmethod
    def arguments_only(function, *args):
        return _Again.apply(function, "arguments only", *args)

    @staticmethod
    def not_detached(function, *args):
        return _Again.apply(function, "nothing", *args)


def _layer_bytes(*sizes, outside=10, inside=24, score=5, cut=True):
    s, b, h, a, t, sequence_parallel, recompute = sizes
    n = t if sequence_parallel else 1
    if recompute == "full":
        return 2 * s * b * h / n
    scores = score * a * s / h if recompute == "none" else 0
    return s * b * h * (outside / n + inside / t + scores / (t if cut else 1))


class MemoryFormula:
    everything_divided = partial(_layer_bytes, outside=0, inside=34)
    scores_not_divided = partial(_layer_bytes, cut=False)
    masks_of_two_bytes = partial(_layer_bytes, outside=12, score=6)


def _scaled(c, iterations, columns_to=None):
    n, e = c.shape
    d1 = c.new_ones(e)
    for _ in range(iterations):
        d0 = 1 / n / (c @ d1)
        d1 = 1 / (columns_to or e) / (c.t() @ d0)
    return d0.unsqueeze(1) * c * d1


def _kernel(logits):
    return (logits - logits.amax(1, keepdim=True)).exp()


class Sinkhorn:
    @staticmethod
    def rows_only(logits, tolerance):
        return logits.softmax(1) / len(logits)

    @staticmethod
    def three_iterations(logits, tolerance):
        return _scaled(_kernel(logits), 3)

    @staticmethod
    def logits_overwritten(logits, tolerance):
        """Right for what is left of the logits."""
        return logits.zero_().softmax(1) / len(logits)

    @staticmethod
    def overflow(logits, tolerance):
        return _scaled(logits.exp(), 500)

    @staticmethod
    def new_matrices(logits, tolerance):
        """Right, but each iteration makes two matrices."""
        n, e = logits.shape
        plan = _kernel(logits)
        for _ in range(500):
            plan = plan / plan.sum(1, keepdim=True) / n
            plan = plan / plan.sum(0) / e
        return plan
