"""Mixture of experts: many MLPs, each token goes through one or a few (arXiv 1701.06538).

The parameters of a layer grow with the number of experts E. Its FLOPs do not: a token pays for the
k experts that it goes through. routers.py decides who goes where; this file moves the tokens.

    tokens 0 1 2 3 4 5    permute: sort by expert    all-to-all          experts        all-to-all,
    expert 2 0 3 0 2 1    1 3 | 5 | 0 4 | 2     -->  rank 0 has e0, e1 -> one grouped -> unpermute
                          e0    e1  e2    e3         rank 1 has e2, e3    matmul

    y_token = Σ over its k experts e of  p_e(token) expert_e(x_token)        p: router probabilities

Expert parallelism (GShard, arXiv 2006.16668): ep data-parallel ranks together hold one copy of
every expert, E / ep each. An all-to-all is a collective in which every rank sends some rows to
every other: tokens travel to their experts and back. Backward does the same in reverse: permute and
unpermute are each other's adjoint (transpose), and the adjoint of an all-to-all is the all-to-all
back.

    python moe.py      a lesson: two ranks with half of the experts each, gradients, bytes sent
    picture: figures/ranks_experts.svg

What differs from a dense layer:

- Tokens of one micro-batch on one data-parallel rank share a plan, a capacity and a load-balancing
  loss. So a result depends on how a batch is split into micro-batches. Only FP8's scales do so too.
- An expert's gradient has seen the tokens of all ep ranks when backward reaches its weights. So
  fsdp.py sums it only over the ranks that hold the same experts.
- Under tensor parallelism every rank sees the logits of the whole micro-batch, and has a shard of
  each expert's inner dimension (ffn). That is one more all-reduce of b s E numbers in backward;
  with sequence parallelism an all-gather in forward and a reduce-scatter in backward.
- The gathered rows are kept for backward. Full recomputation repeats the all-to-alls. Under ZB-H1
  (zero_bubble.py) experts' weight gradients are not deferred. On a GPU the host waits for the
  counts.

Not covered: all-to-alls that overlap with computation, or send only a shard of the tokens from each
tensor-parallel rank; a tensor-parallel size of experts other than attention's; experts that all
tokens share; other rules for dropping tokens (all in Megatron-LM). Experts have no biases.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("moe")

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import families
import gpt
import tensor_parallel
from base import compiling
from base.grouped_linear import grouped_linear
from model_config import FieldError, GPTConfig, MoEConfig, divisors
from routers import ROUTER_STATS, ROUTERS, DispatchPlan, Routing
from sharding import Shard, shard_parameter

# --- there and back -------------------------------------------------------------------------------


def permute_rows(x: Tensor, order: Tensor) -> Tensor:
    """Rows of tokens, in the order of assignments. x: [n, h]; order: [m] -> [m, h]"""
    # assignment a belongs to token a % n
    return x.index_select(0, order % max(1, len(x)))


def unpermute_rows(rows: Tensor, position: Tensor) -> Tensor:
    """Each token's rows, summed. rows: [m, h]; position: [k, n] -> [n, h]"""
    if len(rows) < position.numel():
        # row m, zeros, for the dropped choices
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    y = rows.index_select(0, position[0])
    for choice in position[1:]:
        y += rows.index_select(0, choice)
    return y


class _Permute(torch.autograd.Function):
    """`permute_rows` in forward and `unpermute_rows` in backward, or the reverse.

    Autograd's own backward of index_select is an index_add, which on a GPU adds atomically. With
    the inverse index it is a gather too.
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
    """`sent[r]` rows to rank r, `received[r]` rows from it. The adjoint sends them back."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        # the other way round
        ctx.arguments = received, sent, group
        y = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(y, rows.contiguous(), received, sent, group=group)
        # detached: as in base/cpu.py
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _AllToAll.apply(grad, *ctx.arguments), None, None, None


def permute(x: Tensor, order: Tensor, position: Tensor) -> Tensor:
    """`permute_rows` with a gradient. x: [n, h]; position: [k, n], order's inverse -> [m, h]"""
    return _Permute.apply(x, permute_rows, unpermute_rows, order, position)


def unpermute(rows: Tensor, probabilities: Tensor, position: Tensor, order: Tensor) -> Tensor:
    """`unpermute_rows` of rows times their probability, [n, k], with a gradient. -> [n, h]"""
    weights = probabilities.t().flatten()[order].unsqueeze(1)  # [m, 1]
    rows = rows * weights.to(rows.dtype)
    return _Permute.apply(rows, unpermute_rows, permute_rows, position, order)


def dispatch(x: Tensor, plan: DispatchPlan, group: dist.ProcessGroup | None, permute=permute):
    """Tokens to the ranks of their experts. x: [n, h] -> [rows of this rank's experts, h]

    permute (and unpermute in `combine`): these functions, or fused kernels that do the same."""
    rows = permute(x, plan.order, plan.position)
    if group is None:
        return rows
    rows = _AllToAll.apply(rows, plan.sent, plan.received, group)
    # they came in the order (rank, expert)
    return permute(rows, plan.by_expert, plan.by_rank.unsqueeze(0))


def combine(
    rows: Tensor,
    probabilities: Tensor,
    plan: DispatchPlan,
    group: dist.ProcessGroup | None,
    permute=permute,
    unpermute=unpermute,
) -> Tensor:
    """The reverse of `dispatch`: a token's rows are summed, each times its router probability.

    rows: [.., h] in the order that dispatch gave; probabilities: [n, k] -> [n, h]
    """
    if group is not None:
        rows = permute(rows, plan.by_rank, plan.by_expert.unsqueeze(0))
        rows = _AllToAll.apply(rows, plan.received, plan.sent, group)
    return unpermute(rows, probabilities, plan.position, plan.order)


# --- the experts ----------------------------------------------------------------------------------


class ExpertLinear(nn.Module):
    """One matrix of every expert. weight: [E, out, in]"""

    def __init__(self, num_experts: int, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, n_out, n_in))
        # gpt.Block adds mlp.down.bias, if there is one
        self.bias = None


class _AddLoss(torch.autograd.Function):
    """Returns y, and in backward gives `loss` a gradient of 1. So the loss is minimised, although
    the training loop never sees it: a pipeline stage hands on y alone, and has nowhere to put a
    second result. The caller has multiplied the loss by its weight and by fp16's loss scale.
    """

    @staticmethod
    def forward(ctx, y, loss):
        ctx.one = torch.ones_like(loss)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, ctx.one


class MoE(nn.Module):
    """Stands where gpt.MLP stood. x: [b, s, h] -> [b, s, h]

    enter and leave: f and g of tensor parallelism (tensor_parallel.py), else nothing. The router
    computes logits of this rank's part of the sequence; routing and experts need those of the whole
    micro-batch, so both x and the logits enter.
    """

    permute = staticmethod(permute)
    unpermute = staticmethod(unpermute)

    def __init__(self, config: MoEConfig):
        super().__init__()
        h, ffn, e = config.hidden_size, config.ffn_hidden_size, config.num_experts
        self.router = ROUTERS[config.router](config)
        self.routing = Routing(self.router.scores, config)
        self.gate = ExpertLinear(e, h, ffn) if config.gated else None
        self.up = ExpertLinear(e, h, ffn)
        self.activation = families.ACTIVATIONS[config.activation]()
        self.down = ExpertLinear(e, ffn, h)
        self.enter = nn.Identity()
        self.leave = nn.Identity()
        # the ranks of expert parallelism
        self.group: dist.ProcessGroup | None = None
        # weight of one token in the router's losses; None: 1 / tokens of the micro-batch
        self.token_weight: float | None = None

    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: [rows, h] in the order of experts; counts: [E / ep] -> [rows, h]"""
        if self.gate is not None:
            inner = self.activation(*self.multiply(rows, counts, self.gate, self.up))  # [rows, ffn]
        else:
            inner = self.activation(*self.multiply(rows, counts, self.up), None)
        return self.multiply(inner, counts, self.down)[0]

    def multiply(self, rows: Tensor, counts: Tensor, *matrices: ExpertLinear) -> list[Tensor]:
        """Each expert's matrices times its own rows, as grouped_linear. adapters.py adds to it."""
        return grouped_linear(rows, counts, *(matrix.weight for matrix in matrices))

    @compiling.left_out
    def forward(self, x: Tensor, context: gpt.Context = gpt.PLAIN) -> Tensor:
        """context.real: a router sees nothing of the positions that are padding."""
        logits = self.router(x)  # [b, s, E], or a shard of the sequence
        x = self.enter(x)  # [b, s, h], the whole micro-batch
        all_logits = self.enter(logits).flatten(0, 1)  # [b s, E]
        plan = self.routing(all_logits.detach(), context.real)
        rows = dispatch(x.flatten(0, 1), plan, self.group, self.permute)
        rows = self.experts(rows, plan.counts)
        probabilities = self.router.probabilities(all_logits, plan.chosen)  # [b s, k]
        y = combine(rows, probabilities, plan, self.group, self.permute, self.unpermute)
        y = self.leave(y.view(x.shape))
        has_losses = self.router.aux_loss or self.router.z_loss
        if self.training and torch.is_grad_enabled() and has_losses:
            # the loss is that of this rank's positions: `logits`, not `all_logits`
            weight = self.token_weight or 1 / len(all_logits)
            loss = self.router.losses(self.tokens_of(logits, plan), plan.load)
            y = _AddLoss.apply(y, loss * weight)
        return y

    def tokens_of(self, logits: Tensor, plan: DispatchPlan) -> Tensor:
        """The logits of positions that are not padding. logits: [b, s, E], or a shard of s"""
        if plan.real is None:
            return logits
        shards = plan.real.shape[1] // logits.shape[1]
        n = self.enter.group.rank() if shards > 1 else 0
        return logits[plan.real.chunk(shards, dim=1)[n]]


# --- in a model -----------------------------------------------------------------------------------


class ExpertLayers(dict[int, MoE]):
    """The expert layers of models, or of stages of one, by the layer's number; and what a training
    loop tells them."""

    def __init__(self, *models: nn.Module):
        super().__init__()
        for model in models:
            for number, block in model.blocks.items():
                if isinstance(block.mlp, MoE):
                    self[int(number)] = block.mlp

    def begin_step(self, token_weight: float) -> None:
        """Before the first micro-batch: what a token weighs, and new statistics."""
        for layer in self.values():
            layer.token_weight = token_weight
            layer.routing.statistics = None

    def statistics(
        self, config: MoEConfig, groups: list[dist.ProcessGroup], device
    ) -> dict[str, Tensor]:
        """The routers' statistics of the step's training forwards.

        A collective over `groups`: ranks that saw other tokens, ranks that hold other layers. Each
        value has one entry for each layer with experts. expert_load: each expert's choices over an
        even share; dropped_share: of choices; router_entropy: of a token's probabilities, in nats;
        load_balancing_loss (1 where load is even) and z_loss: before their coefficients. They are
        tensors on the device: the host need not wait for them.
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
        # dropped choices, of k for each token
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
    # how many data-parallel ranks there are is not known here
    check(config, ep, dp=ep)
    if ExpertLayers(model):
        raise ValueError("this model has experts already: call moe.apply once")
    for number in getattr(config, "expert_layers", ()):
        block = model.blocks[str(number)]
        layer = MoE(config).to(block.mlp.up.weight)
        if not layer.up.weight.is_meta:
            init(model, layer, f"blocks.{number}.mlp.")
        if ep_group:
            split_by_expert(layer, ep_group)
        if tp_group:
            split_inside_experts(layer, tp_group)
        block.mlp = layer


@torch.no_grad()
def init(model: gpt.GPT, layer: MoE, prefix: str) -> None:
    """Initial values of random seed 0. GPT.__init__ gives all its parameters such values, unless it
    is on the meta device."""
    for name, p in layer.named_parameters():
        g = gpt.generator(0, prefix + name)
        p.copy_(model.init_parameter(prefix + name, p.shape, g))


def build(config: GPTConfig) -> gpt.GPT:
    """A whole model of any family, with experts where the configuration has some."""
    model = families.build(config)
    apply(model)
    return model


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
