"""Trains a GPT: every technique of this project, composed.

    python train.py                                  one device
    torchrun --nproc-per-node 2 train.py             two ranks, data parallel

NCCL and bf16 on GPUs, gloo and fp32 on CPUs. `--help` lists the flags. A run leaves in `--out`
config.json, metrics.jsonl (one line per step), loss.png, sample.txt, checkpoints/step-000200/.

The layout changes only speed and memory. Everything else is a function of:

    initial weights     (seed, name of the parameter)
    samples of a step   (seed, step)
    dropout masks       (seed, step, sample, layer, position)
    loss                Σ token losses / counted tokens of the global batch, no mean of means

With experts this holds for one --micro-batch-size: routers balance within a micro-batch.

How a run reaches its first step (run/task.py: batch and loss; the rest of run/: flags, files):

    launch.main            parse, validate; the tokenizer, the memory; connect; the data; then
      Trainer              the model with its techniques, gradients, optimizer
      loop                 the steps
        forward_backward   the gradient of a global batch
        update             clip, AdamW, weights that other ranks have updated
"""

from functools import partial

import torch

import families
import optimizer
import pipeline_parallel
import recompute
import schedules
import sequence_parallel
import sharding
import tensor_parallel
from base import compiling, terminal
from base.device_queue import number
from base.dropout import dropout_key
from base.groups import Groups
from gpt import GPT
from run import launch
from run.config import DTYPES, RunConfig
from run.pretraining import Config
from run.saving import RunCheckpoints
from run.task import Task
from run.training_run import TrainingRun


class Trainer:
    """The model of this rank, and all state that a step changes."""

    def __init__(
        self, config: RunConfig, device: torch.device, groups: Groups, task: Task | None = None
    ):
        """task: the training objective (run/task.py); by default the next token."""
        self.config, self.device, self.groups = config, device, groups
        self.model_config = config.model_config()
        self.dp = groups.dp.size() if groups.dp else 1
        self.dp_rank = groups.dp.rank() if groups.dp else 0
        self.micro_batch = config.micro_batch(self.dp)
        self.precision = config.precision or ("bf16" if device.type == "cuda" else "fp32")
        self.scaler = optimizer.LossScaler() if self.precision == "fp16" else None
        # The reason why fused kernels do not run here; None if they do.
        self.kernels_refused: str | None = "off"
        self.task = task or Task()
        self.parts = (self.task.learned, self.task)
        for part in self.parts:
            part.join(self)
        self.build()
        self.optimizer = self.make_optimizer() if self.task.learned.trains else None
        self.checkpoints = RunCheckpoints(self, groups.files)
        self.task.built()

    def build(self) -> None:
        """Build the model, split into pipeline stages, with all techniques applied."""
        config, groups, shape = self.config, self.groups, self.model_config
        # Shapes only, without storage. Values come last, one parameter (under fsdp.py one layer) at
        # a time, and a rank keeps its shard.
        with torch.device("meta"):
            model = families.build(shape)
        if shape.num_experts:
            import moe

            moe.apply(model, groups.ep, groups.tp)
        self.num_parameters = sharding.num_parameters(model)
        self.stages, self.pipeline, self.schedule, self.fp8 = [model], None, None, None
        if groups.pp:
            rank, placement = groups.pp.rank(), config.placement
            self.stages = pipeline_parallel.apply(model, rank, placement, config.layer_split)
            channels = pipeline_parallel.Channels(groups.pp, groups.nccl)
            tp = None if config.sequence_parallel else groups.tp
            options = placement, config.cp * config.sequence_shards, config.ep_comm_overlap, tp
            self.pipeline = pipeline_parallel.Pipeline(self.stages, channels, *options)
            m = config.global_batch_size // self.dp // self.micro_batch
            self.schedule = config.pipeline_lists(m)
        if config.fp8_recipe:
            import fp8

            self.fp8 = fp8.make(config.fp8_recipe, shape, self.device, config.keeps_bytes)
        self.gradients = [self.apply_techniques(stage) for stage in self.stages]
        pipeline_parallel.share_tied(self.stages)
        self.expert_layers = moe.ExpertLayers(*self.stages) if shape.num_experts else {}

    @property
    def model(self) -> "GPT | pipeline_parallel.Pipeline":
        """The module that runs all layers: the pipeline, or the only stage."""
        return self.pipeline or self.stages[0]

    def apply_techniques(self, stage: GPT) -> optimizer.GradientSums:
        """Apply the techniques to a stage in this order, then give it values, sharded over the
        data-parallel ranks. Returns its gradients. Optional techniques are loaded when applied."""
        config, groups, dtype = self.config, self.groups, DTYPES[self.precision]
        self.task.learned.before_techniques(stage)
        of_rank = config.make_vocab_size_divisible_by
        tensor_parallel.pad_vocabulary(stage, self.device, groups.tp, of_rank)
        if groups.tp:
            tensor_parallel.apply(stage, groups.tp)
        recompute.chunk_head(stage, config.head_chunk)
        if config.kernels == "auto":
            import kernels

            self.kernels_refused = kernels.apply(stage, self.device, dtype)
        if config.sequence_parallel:
            sequence_parallel.apply(stage, groups.tp)
        if self.fp8:
            import fp8

            self.fp8.fused = not self.kernels_refused
            fp8.apply(stage, self.fp8, config.fp8_skip, groups.cp)
        self.task.learned.after_model_parallel(stage)
        if groups.cp:
            import context_parallel

            context_parallel.apply(stage, groups.cp, config.cp_kind, config.sequence_shards)
        sequence_parallel.overlap_backward(stage, config.tp_comm_overlap)
        if groups.pp and config.pipeline_schedule in schedules.SPLIT_BACKWARD:
            pipeline_parallel.split_backward(stage)
        if config.compile:
            compiling.apply(stage.blocks.values())
        recompute.apply(stage, config.recompute, config.recompute_layers)
        init = partial(sharding.init, stage, config.seed, self.device, dtype)
        if groups.replicas:
            import fsdp

            others = dict(replicate_group=groups.replicate, expert_group=groups.edp, init=init)
            others |= dict(scaler=self.scaler, reduce_dtype=DTYPES.get(config.reduce_dtype))
            gradients = fsdp.apply(stage, groups.shard, config.zero_stage, may_skip=False, **others)
        else:
            init()
            gradients = optimizer.GradientAccumulator(stage, self.scaler)
        optimizer.fuse_accumulation(stage, gradients)
        return gradients

    def make_optimizer(self) -> optimizer.AdamW:
        config, fused = self.config, None
        if not self.kernels_refused:
            import kernels

            fused = kernels.adamw
        return config.optimizer_class(
            ((name, p) for name, p in sharding.named_parameters(*self.stages) if p.requires_grad),
            *config.adam,
            clip=config.grad_clip,
            scaler=self.scaler,
            stages=self.groups.pp,
            state_dtype=torch.bfloat16 if config.optimizer_state == "bf16" else None,
            fused=fused,
        )

    def own_tokens(self, batch):
        """This rank's part of a data.Batch: under context parallelism, its tokens."""
        if not self.groups.cp:
            return batch
        import context_parallel

        return context_parallel.shard_batch(batch, self.groups.cp)

    def forward_backward(self, step: int, dataset) -> torch.Tensor:
        """Sum the gradient of a step on what the task takes from a data.Dataset."""
        if self.pipeline and self.config.rampup_batch_size:
            m = len(self.task.samples(step)) // self.dp // self.micro_batch
            self.schedule = self.config.pipeline_lists(m)
        return self.sum_gradients(step, self.task.data_of_step(step, dataset))

    def sum_gradients(self, step: int, dataset) -> torch.Tensor:
        """Sum the gradient of the global batch into every `main_grad`. Returns this rank's part of
        the loss, float64. The parts of all ranks add up to the mean over the counted tokens."""
        samples = self.task.samples(step)
        count = max(1, self.task.loss_count(dataset, samples))
        share = len(samples) // self.dp
        mine = samples[self.dp_rank * share : (self.dp_rank + 1) * share]
        b = self.micro_batch
        scale = self.scaler.scale if self.scaler else 1.0
        dtype = optimizer.accumulation_dtype(DTYPES[self.precision])
        loss_grad = number(scale / count, dtype, self.device)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)

        def forward(chunk: int, k: int, *x: torch.Tensor | None) -> torch.Tensor:
            """Run micro-batch k through this rank's chunk, from activation x."""
            batch = self.own_tokens(dataset.batch(mine[k * b : (k + 1) * b]).to(self.device))
            key = None
            if self.task.learned.dropout:
                key = dropout_key(self.config.seed, step, batch.samples)
            y = self.stages[chunk](batch.tokens, batch.targets, batch.context(key), *x)
            if self.stages[chunk].head is None:
                return y  # [b, s, h], for the next stage
            total = self.task.total_loss(y, batch)  # y: [b, s]
            loss.add_(total.detach() / count)
            return total

        if self.expert_layers:
            self.expert_layers.begin_step(scale / max(1, dataset.positions(samples)))
        for gradients in self.gradients:
            gradients.zero_grad()
        if self.schedule is None:
            self.run_micro_batches(forward, share // b, loss_grad)
        else:
            self.run_pipeline(forward, dataset.s, loss_grad)
        # Every tensor-parallel rank has the whole loss, so only one of them counts it.
        has_the_loss = not self.groups.tp or self.groups.tp.rank() == 0
        return loss if has_the_loss else torch.zeros_like(loss)

    def run_micro_batches(self, forward, m: int, loss_grad: torch.Tensor) -> None:
        (gradients,) = self.gradients
        for k in range(m):
            if k == m - 1:
                gradients.next_backward_is_last()
            forward(0, k).backward(loss_grad)
        gradients.reduce_gradients()

    def run_pipeline(self, forward, s: int, loss_grad: torch.Tensor) -> None:
        actions = self.schedule[self.groups.pp.rank()]
        # Biases come with I and weights with W: after a W `reduce_gradients` starts the sum.
        last = {action.chunk: action for action in actions}

        def before_backward(action):
            if action.op == "B" and action == last[action.chunk]:
                self.gradients[action.chunk].next_backward_is_last()

        self.pipeline.run(self.schedule, forward, self.micro_batch, s, loss_grad, before_backward)
        for gradients in self.gradients:
            gradients.reduce_gradients()
        self.pipeline.sum_copies()

    def continue_text(self, prompt: list[int], max_tokens: int, **options) -> list[int]:
        """Generate the tokens after a prompt. options: those of generate.stream."""
        # Loaded only when a run ends.
        import generate

        return generate.generate(self.model, [prompt], max_tokens, **options)[0]

    def update(self, step: int) -> tuple[torch.Tensor, float]:
        """Clip, then update. Returns (gradient norm before clipping, learning rate)."""
        lr = optimizer.learning_rate(step, *self.config.rates)
        norm = self.optimizer.step(lr)
        for gradients in self.gradients:
            gradients.renew_parameters()
        if self.fp8:
            self.fp8.end_step(self.groups.all, taken=norm.isfinite())
        if self.expert_layers:
            self.expert_layers.end_step(self.groups.replicas, taken=norm.isfinite())
        return norm, lr


def loop(trainer: Trainer, run: TrainingRun) -> bool:
    """Run the remaining steps. Returns whether a signal ended the run. Raises RunError."""
    with run.watched():
        for step in run.steps_left():
            run.begin_step(step)
            loss = trainer.forward_backward(step, run.train_set)
            norm, lr = trainer.update(step)
            measured = run.measure(step, loss, norm, lr)
            if run.evaluation_is_due(step):
                measured.eval_loss = trainer.task.evaluate(run.held_out, run.eval_sequences)
                measured.eval_statistics = trainer.task.eval_statistics()
            run.log(step)
            if run.save_is_due(step):
                run.save(step)
            run.end_step(step)
            if run.stopping:
                return True
    return False


def main(argv: list[str], config_class: type[RunConfig] = Config) -> int:
    """Train, and return the exit status. config_class: that of the training type."""
    return launch.main(argv, config_class, Trainer, loop)


if __name__ == "__main__":
    terminal.command(main)
