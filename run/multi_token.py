"""Multi-token prediction: D modules behind the last layer predict further tokens (DeepSeek-V3,
arXiv 2412.19437, section 2.2).

    depth 0, the model    t_1 .. t_i              -> h⁰_i                predicts t_i+1
    depth k, a module     h^(k-1)_i and t_(i+k)   -> h^k_i               predicts t_i+k+1

    h^k_i = block(W [norm(h^(k-1)_i); norm(Emb(t_i+k))])

Each module has a block, a matrix W [h, 2h] and two norms (equations 21 and 22). Embedding and head,
with the last norm, are those of the model (equation 23). The loss (equations 24 and 25) is

    (Σ_i loss⁰_i + λ/D Σ_k Σ_i loss^k_i) / n        n: the counted tokens of depth 0, for all depths

so depths have no mean of their own. Loss k of position i counts where the target i+k+1 counts, and
is in the sequence and in the document of i: a token of another document is neither read nor
predicted.

A module is a gpt.Block, number L + k - 1 of the model's blocks, so every technique is applied to it
as to any layer. Its output is what came in with h^k below it: the head gets [(1 + D) b, s, h], and
the batch has as many targets. Without `context.future`, in evaluation and generation, a module
passes x on. In a pipeline it is on the last stage, with a copy of the embedding's matrix, whose
gradients `sum_tied` of pipeline_parallel.py adds.

    python train.py --mtp-layers 1 --out runs/mtp

Not covered: a last norm of each module, as in DeepSeek-V3's files; modules in FP8 (they follow the
last layers, which --fp8-skip leaves out); the export to a Hugging Face folder leaves modules out.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

import families
import gpt
import moe
import sharding
from base.groups import Groups
from base.model_config import GPTConfig, with_modules
from pipeline_parallel import TIED
from run.data import Batch, Dataset
from run.task import Task, WholeModel

# --- the modules ----------------------------------------------------------------------------------


class Module(gpt.Block):
    """Depth k + 1. x: [(1 + k) b, s, h], the results of the depths before -> [(2 + k) b, s, h]"""

    def __init__(self, block: gpt.Block, config: GPTConfig, k: int):
        nn.Module.__init__(self)
        for name, child in block.named_children():
            self.add_module(name, child)
        self.k = k
        # The norms of the family.
        self.hidden_norm, self.token_norm = (copy.deepcopy(block.mlp_norm) for _ in range(2))
        self.project = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        # The model's, or its copy; `share_embedding` sets it.
        self.tokens: nn.Module | None = None
        # Outside of `forward`, which recomputation runs again: the matrix has its gradient once.
        self.register_forward_pre_hook(look_up)

    def forward(self, x: Tensor, context: gpt.Context = gpt.PLAIN, embedded=None) -> Tensor:
        """embedded: [b, s, h], Emb of the (k + 1)-th token after each position."""
        if embedded is None:
            return x
        return torch.cat((x, self.next_depth(x[-len(embedded) :], embedded, context)))

    def next_depth(self, x: Tensor, embedded: Tensor, context: gpt.Context) -> Tensor:
        """x: h^k, [b, s, h] -> h^(k+1)"""
        both = torch.cat((self.hidden_norm(x), self.token_norm(embedded)), -1)
        return super().forward(self.project(both), context)


def look_up(module: Module, args: tuple) -> tuple | None:
    """Add the embeddings of `context.future` to the arguments of a module."""
    x, context = args
    if context.future is None:
        return None
    b = len(x) // (1 + module.k)
    following = context.future[module.k * b : (1 + module.k) * b]
    return x, context, module.tokens(following)


def modules_of(config: GPTConfig, groups: Groups) -> dict[str, Module]:
    """The modules by the number of their block, on the meta device. Their blocks are the last ones
    of a model that has more layers: with the parts of its family, and experts."""
    with torch.device("meta"):
        deeper = families.build(with_modules(config))
        if getattr(config, "num_experts", 0):
            moe.apply(deeper, groups.ep, groups.tp)
        return {
            str(config.num_layers + k): Module(deeper.blocks[str(config.num_layers + k)], config, k)
            for k in range(config.mtp_layers)
        }


def add(stage: gpt.GPT, groups: Groups) -> None:
    """Add the modules to a stage that has the head, before tensor parallelism. If another stage has
    the embedding, a copy of its matrix is here, sharded like it by what comes next."""
    # Head and modules read one embedding, so its gradients are summed.
    stage.tied = True
    if stage.head is None:
        return
    stage.blocks.update(modules_of(stage.config, groups))
    if stage.embedding is None:
        with torch.device("meta"):
            stage.embedding = gpt.Embedding(stage.config)
        stage.embedding.positions = None
        table = stage.embedding.tokens
        if stage.config.tied:
            table.weight = stage.head.output.weight
        record = sharding.Sharding(tuple(table.weight.shape), copy_of=TIED)
        sharding.set_sharding(table.weight, record)


def share_embedding(stage: gpt.GPT, first: bool) -> None:
    """Give the modules the matrix, after tensor and sequence parallelism. first: whether the stage
    is the first one, and keeps its embedding."""
    if stage.head is None:
        return
    for block in stage.blocks.values():
        if isinstance(block, Module):
            block.tokens = stage.embedding.tokens
    stage.embedding = stage.embedding if first else None


# --- training -------------------------------------------------------------------------------------


class ManyTargets(Batch):
    """A Batch with targets [(1 + D) b, s]: of depth 0, then of depth 1, ..; loss_mask likewise."""

    def context(self, drop_key: Tensor | None = None) -> gpt.Context:
        return super().context(drop_key)._replace(future=self.targets)


def many_targets(batch: Batch, depths: int) -> ManyTargets:
    """Shift targets and mask by 0, 1, .. `depths` positions; what is shifted in does not count."""
    targets, masks = [batch.targets], [batch.loss_mask]
    for k in range(1, depths + 1):
        counts = batch.loss_mask.roll(-k, 1)
        counts[:, -k:] = False
        if batch.documents is not None:
            counts &= batch.documents == batch.documents.roll(-k, 1)
        targets.append(batch.targets.roll(-k, 1))
        masks.append(counts)
    return ManyTargets(*batch)._replace(targets=torch.cat(targets), loss_mask=torch.cat(masks))


class Deeper(Dataset):
    """A data set whose batches have the targets of all depths."""

    def __init__(self, dataset: Dataset, depths: int):
        self.dataset, self.depths, self.s = dataset, depths, dataset.s
        self.counted_tokens, self.positions = dataset.counted_tokens, dataset.positions

    def batch(self, samples) -> ManyTargets:
        return many_targets(self.dataset.batch(samples), self.depths)


class WithModules(WholeModel):
    """The whole model and its modules learn."""

    def before_techniques(self, stage: gpt.GPT) -> None:
        self.has_embedding = stage.embedding is not None
        add(stage, self.groups)
        super().before_techniques(stage)

    def after_model_parallel(self, stage: gpt.GPT) -> None:
        share_embedding(stage, self.has_embedding)


class MultiToken(Task):
    """The task of learning text, the next token and further ones."""

    def __init__(self, text: Task, weight: float):
        """text: the task of the next token, whose data these are. weight: λ, of the mean loss of
        the modules (DeepSeek-V3: 0.3, later 0.1)."""
        super().__init__(WithModules())
        self.text, self.weight = text, weight
        for name in ("open_data", "check_base", "data_name", "sample_prompt"):
            setattr(self, name, getattr(text, name))

    def join(self, trainer) -> None:
        super().join(trainer)
        self.text.join(trainer)

    def built(self) -> None:
        modules = modules_of(self.model_config, Groups()).values()
        self.trainer.num_parameters += sum(map(sharding.num_parameters, modules))

    def data_of_step(self, step: int, dataset: Dataset) -> Deeper:
        # This rank's sum of all depths but the first.
        self.further = torch.zeros((), dtype=torch.float64, device=self.trainer.device)
        self.count = max(1, self.loss_count(dataset, self.samples(step)))
        return Deeper(dataset, self.model_config.mtp_layers)

    def total_loss(self, y: Tensor, batch: Batch) -> Tensor:
        if not isinstance(batch, ManyTargets):
            return super().total_loss(y, batch)
        depths = self.model_config.mtp_layers
        of_depth = (y * batch.loss_mask).unflatten(0, (1 + depths, -1)).sum((1, 2))  # [1 + D]
        further = of_depth[1:].sum() / depths
        self.further += further.detach()
        return of_depth[0] + self.weight * further

    def statistics(self) -> dict[str, Tensor]:
        """mtp_loss: the mean over depths, so that --mtp-loss-weight times it is in the loss."""
        further = self.further.clone()
        for group in (self.groups.replicas, self.groups.pp):
            if group:
                dist.all_reduce(further, group=group)
        return {"mtp_loss": further / self.count}
