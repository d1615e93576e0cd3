"""Trains a GPT: every technique of this project, composed.

    python train.py                                  one device
    torchrun --nproc-per-node 2 train.py             two ranks, data parallel; NCCL and bf16 on GPUs, gloo and fp32 on CPUs
    torchrun --nproc-per-node 2 train.py --tp 2 --sequence-parallel --recompute selective --dropout
    0.1
    torchrun --nproc-per-node 2 --max-restarts 3 train.py --zero-stage 3 --optimizer-state bf16
    python train.py --model gpt2 --data corpus.jsonl --tokenizer gpt2 --global-batch-size 480
    --micro-batch-size 12

The flags are in config.py, or `--help`. A run leaves in `--out`:

    config.json   metrics.jsonl (a line a step, in full precision)   loss.png   sample.txt   checkpoints/step-000100/

The layout changes nothing but speed and memory. Initial weights depend on (seed, name); the samples
of a step on (seed, step); dropout masks on (seed, step, sample, layer, position); and the loss is
the sum of per-token losses divided by the number of counted tokens in the global batch, a number
known before the first forward, with gradients summed over ranks and micro-batches. (With experts:
for the same --micro-batch-size, for routers balance within a micro-batch.)"""

from runtime import terminal

if __name__ == "__main__":
    # PyTorch takes seconds to import, and Ctrl-C may come meanwhile.
    terminal.quiet_interrupts()

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
import data
import fsdp
import generate
import kernels
import moe
import pipeline_parallel
import prompt_tuning
import recompute
import schedules
import sequence_parallel
import sharding
import tensor_parallel
from corpus import blend
from corpus.tokenizer import (
    BUILT_IN,
    FileTokenizer,
    TokenizerError,
    TokenizerRecord,
    make_tokenizer,
    prompt_ids,
    record,
)
from gpt import GPT, dropout_key, flops_per_token, num_parameters
from optimizer import AdamW, GradientAccumulator, LossScaler, accumulation_dtype, learning_rate
from prompts import prompt_file
from prompts.prompt_data import PromptConfig, PromptError
from runtime import architectures, room
from runtime.config import DTYPES, Config, ConfigError, parse
from runtime.metrics import (
    Curves,
    Metrics,
    MetricsError,
    duration,
    mfu,
    peak_memory,
    plot_loss,
    progress,
)
from runtime.run_folder import RunFolder, RunFolderError, launcher_name
from runtime.world import Groups, World, WorldError
from sharding import shard_of, sharding_of

REFUSED = (
    ConfigError,
    RunFolderError,
    MetricsError,
    data.DataError,
    PromptError,
    TokenizerError,
    checkpoint.CheckpointError,
)
# of held-out text, the first of them, at every evaluation
EVAL_SEQUENCES = 64


class RunError(RuntimeError):
    """A run that failed on this rank, or with the same message everywhere."""

    def __init__(self, message: str, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere


# --------------------------------------------------------------------------------------------------


class Trainer:
    """The model of this rank and everything that one step changes. `dataset` has `batch(samples)`
    and `counted_tokens(samples)`."""

    def __init__(self, config: Config, device: torch.device, groups: Groups):
        """No rank ever holds more than one whole parameter beside its own, or one whole layer where
        parameters are sharded."""
        self.config = config
        self.device = device
        self.groups = groups
        self.model_config = config.model_config()
        self.dp, self.dp_rank = (groups.dp.size(), groups.dp.rank()) if groups.dp else (1, 0)
        self.micro = config.micro_batch(self.dp)
        self.precision = config.precision or ("bf16" if device.type == "cuda" else "fp32")
        with torch.device("meta"):
            self.chunks = [GPT(self.model_config)]
        # of the whole
        self.num_parameters = num_parameters(self.chunks[0])
        if groups.pp:
            self.chunks = pipeline_parallel.split(
                self.model_config,
                groups.pp.rank(),
                groups.pp.size(),
                config.virtual_stages,
                config.layer_split,
            )
        self.prompts = PromptConfig.read(config.prompt_config) if config.prompt_config else None
        # only prompts learn
        self.frozen = self.prompts is not None and self.prompts.learned
        # or why they do not run here, or "", where they do
        self.no_kernels = "off"
        self.scaler = LossScaler() if self.precision == "fp16" else None
        self.gradients = [self.prepare(chunk) for chunk in self.chunks]
        learned = (
            (name, p) for name, p in sharding.named_parameters(*self.chunks) if p.requires_grad
        )
        self.optimizer = AdamW(
            learned,
            config.weight_decay,
            clip=config.grad_clip,
            scaler=self.scaler,
            stages=groups.pp,
            state_dtype=torch.bfloat16 if config.optimizer_state == "bf16" else None,
            fused=None if self.no_kernels else kernels.adamw,
        )
        # model: what evaluates and generates
        self.model = self.chunks[0]
        self.schedule = None
        if groups.pp:
            channels = pipeline_parallel.Channels(groups.pp, groups.nccl)
            self.model = pipeline_parallel.Pipeline(
                self.chunks, channels, config.tp if config.sequence_parallel else 1
            )
            m = config.global_batch_size // self.dp // self.micro
            self.schedule = schedules.make(
                config.pipeline_schedule, groups.pp.size(), m, config.virtual_stages
            )
        self.expert_layers = moe.layers(*self.chunks)
        self.saver = checkpoint.Saver(groups.files)
        # the step of a checkpoint whose weights no later step has shown to be good yet
        self.unproven: int | None = None
        # for checkpoints
        self.tokenizer = TokenizerRecord()

    def prepare(self, chunk: GPT) -> GradientAccumulator:
        """Everything that is done to a chunk, in order. Returns what collects its gradients."""
        config = self.config
        groups = self.groups
        if self.frozen:
            # the model is frozen: no dropout, and routers take raw logits
            chunk.requires_grad_(False).eval()
        if groups.ep:
            moe.apply(chunk, groups.ep)
        if groups.tp:
            tensor_parallel.apply(chunk, groups.tp)
        if config.sequence_parallel:
            sequence_parallel.apply(chunk, groups.tp)
        if self.frozen:
            prompt_tuning.apply(chunk, self.prompts, groups.tp)
        if groups.pp and config.pipeline_schedule == "zb-h1":
            pipeline_parallel.defer_weights(chunk)
        if config.compile:
            for block in chunk.blocks.values():
                # traced when it runs: selective recomputation is seen
                block.forward = torch.compile(block.forward)
        recompute.apply(chunk, config.recompute, config.recompute_layers)

        def init(names=None) -> None:
            sharding.init(chunk, config.seed, self.device, DTYPES[self.precision], names)

        if config.kernels == "auto":
            self.no_kernels = kernels.apply(chunk, self.device)
        if groups.dp:
            return fsdp.apply(
                chunk,
                groups.dp,
                config.zero_stage,
                self.scaler,
                DTYPES.get(config.reduce_dtype),
                init,
                groups.edp,
            )
        init()
        return GradientAccumulator(chunk, self.scaler)

    def samples(self, step: int) -> range:
        """The global batch of a step, counted from 1, as sample numbers."""
        return range(
            (step - 1) * self.config.global_batch_size, step * self.config.global_batch_size
        )

    def forward_backward(self, step: int, dataset) -> torch.Tensor:
        """Leave the global batch's gradient in every `main_grad`. Returns this rank's part of the
        loss, a float64 scalar: the parts of all ranks add up to the mean over the counted tokens of
        the global batch."""
        samples = self.samples(step)
        count = max(1, dataset.counted_tokens(samples))
        share = len(samples) // self.dp
        mine = samples[self.dp_rank * share : (self.dp_rank + 1) * share]
        m = share // self.micro
        seed = torch.tensor(
            (self.scaler.scale if self.scaler else 1.0) / count,
            dtype=accumulation_dtype(DTYPES[self.precision]),
            device=self.device,
        )
        loss = torch.zeros((), dtype=torch.float64, device=self.device)

        def forward(chunk: int, k: int, x: torch.Tensor | None = None) -> torch.Tensor:
            batch = dataset.batch(mine[k * self.micro : (k + 1) * self.micro]).to(self.device)
            key = (
                dropout_key(self.config.seed, step, batch.samples)
                if self.model_config.dropout
                else None
            )
            y = self.chunks[chunk](batch.tokens, batch.targets, key, x)
            if self.chunks[chunk].head is None:
                return y  # [b, s, h], for the next stage
            # y: [b, s]
            total = (y * batch.loss_mask).sum()
            loss.add_(total.detach() / count)
            return total

        # the router's losses are means over all positions of the global batch, masked ones too
        for layer in self.expert_layers.values():
            layer.decision.statistics, layer.token_weight = (
                None,
                (self.scaler.scale if self.scaler else 1.0) / (len(samples) * dataset.s),
            )
        for gradients in self.gradients:
            gradients.zero()
        if self.schedule is None:
            for k in range(m):
                if k == m - 1:
                    self.gradients[0].last_backward()
                forward(0, k).backward(seed)
        else:
            # with I and W no one backward is the last
            last = {a.chunk: a for a in self.schedule[self.groups.pp.rank()] if a.op == "B"}
            self.model.run(
                self.schedule,
                forward,
                self.micro,
                dataset.s,
                seed,
                lambda a: (
                    self.gradients[a.chunk].last_backward() if last.get(a.chunk) == a else None
                ),
            )
        for gradients in self.gradients:
            gradients.reduce_gradients()
        if self.schedule is not None:
            self.model.sum_tied()
        # all of them have it: one counts
        return loss if not self.groups.tp or self.groups.tp.rank() == 0 else torch.zeros_like(loss)

    def update(self, step: int) -> tuple[float, float]:
        """Clip, then update. Returns (gradient norm before clipping, learning rate)."""
        c = self.config
        lr = learning_rate(
            step, c.lr, c.lr / 10 if c.min_lr is None else c.min_lr, c.warmup_steps, c.steps
        )
        norm = self.optimizer.step(lr)
        for gradients in self.gradients:
            gradients.gather_parameters()
        return norm, lr

    def routing(self) -> dict:
        """The routers' statistics of the step, for metrics.jsonl. A collective."""
        if not self.model_config.num_experts or self.frozen:
            return {}
        return moe.statistics(
            self.model_config,
            self.expert_layers,
            [group for group in (self.groups.dp, self.groups.pp) if group],
            self.device,
        )

    @torch.no_grad()
    def evaluate(self, dataset, sequences: int) -> float:
        """Mean loss per token over the first `sequences` samples of a held-out dataset."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        batches = []
        training = self.chunks[0].training
        for chunk in self.chunks:
            # routers take raw logits
            chunk.eval()
        # all ranks take as many batches, of one size: their forwards may be collectives
        for start in range(0, sequences, self.dp * self.micro):
            mine = range(start + self.dp_rank * self.micro, start + (self.dp_rank + 1) * self.micro)
            batch = dataset.batch([min(n, sequences - 1) for n in mine])
            counts = torch.tensor([n < sequences for n in mine])
            batches.append(
                batch._replace(loss_mask=batch.loss_mask & counts.unsqueeze(1)).to(self.device)
            )

        def add(batch, losses):
            total.add_((losses * batch.loss_mask).sum())

        if self.schedule is None:
            for batch in batches:
                add(batch, self.model(batch.tokens, batch.targets))
        else:
            self.model.evaluate(batches, add)
        for chunk in self.chunks:
            chunk.train(training)
        for group in (self.groups.dp, self.groups.pp):
            if group:
                dist.all_reduce(total, group=group)
        return total.item() / max(1, dataset.counted_tokens(range(sequences)))

    def save(self, folder: Path, step: int, tokens: int, corpus: str) -> None:
        """Start to write a checkpoint; `saver.wait()` for its end."""
        self.saver.wait()
        # Of the checkpoint before: steps were taken since.
        self.remove_old(folder)
        self.unproven = step
        self.saver.save(
            folder,
            step,
            self.optimizer.tensors(),
            state={
                "tokens": tokens,
                "corpus": corpus,
                "tokenizer": dataclasses.asdict(self.tokenizer),
                "optimizer": self.optimizer.state_dict(),
                **({"base": self.identity} if self.frozen else {}),
                "config": dataclasses.asdict(self.config),
                "model": dataclasses.asdict(self.model_config),
            },
        )

    def remove_old(self, folder: Path, loss: float = 0.0) -> None:
        """Remove the checkpoints that --keep leaves no room for, once a step from the weights of
        the newest one was taken, or they gave a finite loss: of a run that diverges the good ones
        stay."""
        proven = not self.optimizer.skipped_in_a_row and math.isfinite(loss)
        if self.unproven is not None and proven and not self.saver.busy:
            if not dist.is_initialized() or dist.get_rank() == 0:
                checkpoint.remove_old(folder, self.unproven, self.config.keep)
            self.unproven = None

    def load(self, path: Path, weights_only: bool = False) -> dict:
        """Continue from a checkpoint, or start from its weights. Returns its index. Raises
        CheckpointError, naming the fields in which its model differs."""
        shape = self.shape(weights_only)
        tensors = self.optimizer.tensors()
        index = checkpoint.load(
            path,
            {n: t for n, t in tensors.items() if n.startswith("model.") or not weights_only},
            shape,
        )
        self.set(tensors)
        if weights_only:
            return index
        try:
            self.optimizer.load_state_dict(index["optimizer"])
            return index | {"tokens": int(index["tokens"])}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
            raise checkpoint.CheckpointError(
                f"{path}/index.json lacks what training goes on from ({type(e).__name__}: {e})"
            ) from None

    def load_frozen(self, path: Path, tokenizer) -> None:
        """The model that prompts are learned for, and the prompts' first values. Raises
        CheckpointError or PromptError."""
        frozen = {
            f"model.{name}": p
            for name, p in sharding.named_parameters(*self.chunks)
            if not p.requires_grad and not name.startswith(prompt_tuning.WHERE)
        }
        checkpoint.load(path, frozen, self.shape(weights_only=False))
        self.identity = prompt_file.fingerprint(path, self.model_config)
        values = prompt_tuning.first_values(
            self.prompts, path, self.model_config, self.config.seed, tokenizer, self.identity
        )
        tensors = self.optimizer.tensors()
        for name, p in sharding.named_parameters(*self.chunks):
            if name.startswith(prompt_tuning.WHERE):
                # a master, or an existing task's table
                target = tensors.get(f"model.{name}", p)
                target.copy_(
                    shard_of(values[name.removeprefix(prompt_tuning.WHERE)], sharding_of(p))
                )
        self.set(tensors)

    def save_prompts(self, path: Path) -> None:
        """Write the prompt file: what was learned, and the existing tasks as they were. A
        collective of the ranks that hold the embedding."""
        values = {
            name.removeprefix(f"model.{prompt_tuning.WHERE}"): sharding.gather(t, sharding_of(t))
            for name, t in self.optimizer.tensors().items()
            if name.startswith("model.")
        }
        if values and (not dist.is_initialized() or dist.get_rank() == 0):
            found = prompt_tuning.restored(self.prompts, self.identity) | prompt_tuning.tables(
                self.prompts, self.model_config.hidden_size, values
            )
            prompt_file.save(
                path,
                self.prompts,
                {task: found[task] for task in self.prompts.tasks},
                self.identity,
            )

    @torch.no_grad()
    def set(self, tensors: dict[str, torch.Tensor]) -> None:
        """What `optimizer.tensors()` gave has other values now."""
        self.optimizer.restore(tensors)
        for gradients in self.gradients:
            gradients.gather_parameters()

    def shape(self, weights_only: bool) -> dict:
        """The fields of the model that a checkpoint must agree with."""
        # rotary positions have no table
        free = (
            ("dropout", "attention", "router_temperature", "capacity_factor", "aux_loss", "z_loss")
            + ("router", "router_topk") * weights_only
            + ("seq_length",) * self.model_config.llama
        )
        return {k: v for k, v in dataclasses.asdict(self.model_config).items() if k not in free}


# --------------------------------------------------------------------------------------------------


def open_out(config: Config, world: World) -> RunFolder | None:
    """The run's folder, locked by rank 0 for all. A collective: what is wrong there is refused by
    every rank. Raises RunFolderError."""
    opened = []
    world.on_rank_0(
        lambda: opened.append(
            RunFolder(config.out, config.resume, world.restarts, launcher_name())
        ),
        (RunFolderError,),
    )
    return opened[0] if world.rank == 0 else None


def check_flags_agree(config: Config, world: World) -> None:
    """Ranks that were started one by one may have other flags each. A collective. Raises
    ConfigError, on all ranks."""
    everywhere = world.gather(dataclasses.asdict(config))
    for rank, flags in enumerate(everywhere):
        for name, value in flags.items():
            if value != everywhere[0][name]:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: rank {rank} was started with {value}, and rank 0"
                    f" with {everywhere[0][name]}; give all ranks the same flags"
                )


def check_room(config: Config, world: World) -> None:
    """Raises ConfigError for a run that the memory of a rank can never hold."""
    model = config.model_config()
    dp = world.size // config.tp // config.pp
    ranks = {"tp": config.tp, "pp": config.pp, "dp": dp, "ep": config.ep}
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    precision = config.precision or ("bf16" if device == "cuda" else "fp32")
    has = room.memory(device, world.local_size)
    learns = not config.prompt_config
    needs = (
        room.state_bytes(model, precision, config.optimizer_state, config.zero_stage, ranks)
        if learns
        else 0
    )
    if needs > has:
        raise ConfigError(
            f"--hidden-size {model.hidden_size} --num-layers {model.num_layers} --num-experts"
            f" {model.num_experts} --vocab-size {model.vocab_size}: weights, gradients and"
            f" optimizer state of this model {room.complaint('take', needs, has)}; a smaller model,"
            " or more ranks with --tp, --pp or --zero-stage 3, would need less of each"
        )
    micro = config.micro_batch(dp)
    needs = room.activation_bytes(model, precision, micro, ranks)
    if needs > has:
        raise ConfigError(
            f"--micro-batch-size {micro}: the activations of so many sequences of"
            f" {model.seq_length} tokens {room.complaint('take', needs, has)}; --micro-batch-size 1"
            " would need the least"
        )


def default_tokenizer(config: Config) -> str:
    """The tokenizer where --tokenizer is not given: that of the run that goes on, or of --load."""
    for path in (
        reversed(checkpoint.steps(Path(config.out) / "checkpoints").values())
        if config.resume
        else ()
    ):
        # The one before it may be whole; `restore` says what is wrong.
        with contextlib.suppress(checkpoint.Damaged):
            return checkpoint.tokenizer_of(path)
    return checkpoint.tokenizer_of(checkpoint.find(config.load)) if config.load else "bytes"


def open_tokenizer(config: Config, world: World):
    """The tokenizer of --tokenizer, or the default one. Where its vocabulary is larger than the
    preset's, it sets --vocab-size. Raises ConfigError, TokenizerError or CheckpointError."""
    name = config.tokenizer
    # The file of a run that goes on may have moved: the run has a copy.
    if name is None or (config.resume and name not in BUILT_IN and not os.path.exists(name)):
        name = default_tokenizer(config)
    tokenizer = make_tokenizer(name)
    shape = config.model_config()
    if tokenizer.vocab_size > shape.vocab_size:
        what = f"--tokenizer {name}: its ids go up to {tokenizer.vocab_size - 1}, beyond "
        if config.vocab_size is not None:
            raise ConfigError(
                f"{what}--vocab-size {shape.vocab_size}; --vocab-size {tokenizer.vocab_size}"
                " would fit"
            )
        if config.load:
            raise ConfigError(
                f"{what}the {shape.vocab_size} of the model in --load {config.load}; the tokenizer"
                " that it was trained with would fit"
            )
        config.vocab_size = tokenizer.vocab_size
        world.say(f"--vocab-size {config.vocab_size}: as many as --tokenizer {name} has")
    elif tokenizer.vocab_size < 0.9 * shape.vocab_size:
        world.say(
            f"--tokenizer {name}: fills {tokenizer.vocab_size:,} of the model's"
            f" {shape.vocab_size:,} ids; the others never occur in this run"
        )
    sample_ids(config, tokenizer)
    return tokenizer


def sample_ids(config: Config, tokenizer) -> list[int]:
    """What --sample-prompt is in ids. Raises ConfigError for what is not text."""
    try:
        return prompt_ids(tokenizer, config.sample_prompt)[-config.model_config().seq_length :]
    except (UnicodeEncodeError, TokenizerError) as e:
        raise ConfigError(
            f"--sample-prompt {config.sample_prompt!r}: cannot be encoded ({e})"
        ) from None


def check_resumed_tokenizer(trainer: Trainer, path: Path, index: dict) -> str:
    """What to say where another tokenizer was named. Raises ConfigError where the file of that name
    has another content than when the checkpoint at `path` was written."""
    then = checkpoint.tokenizer_record(path, index)
    before = then.fingerprint
    now = trainer.tokenizer.fingerprint
    config = trainer.config
    if before in ("", now) and then.files in ({}, trainer.tokenizer.files):
        return ""
    if os.path.abspath(str(index["config"].get("tokenizer"))) != os.path.abspath(
        str(config.tokenizer)
    ):
        return (
            f"tokenizer {before[:16]} -> {now[:16]}"
            if before != now
            else "another generation_config.json"
        )
    raise ConfigError(
        f"--tokenizer {config.tokenizer}: has another content than when {path} was written; put"
        f" that back, or name the run's copy: --tokenizer {config.out}/tokenizer.json would fit"
    )


def open_data(config: Config, world: World, tokenizer):
    """(training set, held-out set), the corpus tokenised first if need be. Raises DataError."""
    if config.prompt_config:
        *sets, told = prompt_tuning.open_data(
            PromptConfig.read(config.prompt_config),
            config.model_config(),
            tokenizer,
            config.seed,
            config.tp if config.sequence_parallel else 1,
        )
        world.say(told)
        return sets
    s = config.model_config().seq_length
    share = {
        "cache": config.cache,
        "exchange": world.gather,
        "rank": world.rank,
        "world": world.size,
        "workers": world.cores,
    }
    parts = blend.prepare(config.data, tokenizer, **share)
    if not config.val_data:
        return blend.open_parts(parts, s, config.seed), blend.open_parts(parts, s, None, "held-out")
    val_parts = blend.prepare(config.val_data, tokenizer, "--val-data", **share)
    return blend.open_parts(parts, s, config.seed, "all"), blend.open_parts(
        val_parts, s, None, "all"
    )


def restore(trainer: Trainer, world: World, corpus: str, tokenizer) -> tuple[int, int]:
    """Continue from the newest whole checkpoint of `--out` if asked to. Returns (steps, tokens)
    behind us."""
    config = trainer.config
    # checkpoints hold the prompts alone
    if trainer.frozen:
        trainer.load_frozen(checkpoint.find(config.load), tokenizer)
    found = {}
    damage = []
    if config.resume:
        found = world.on_rank_0(
            lambda: checkpoint.steps(Path(config.out) / "checkpoints"),
            (checkpoint.CheckpointError,),
        )
    for path in reversed(found.values()):
        try:
            index = trainer.load(path)
        except checkpoint.Damaged as e:
            damage.append(str(e))
            continue
        for said in damage:
            world.say(f"{said}; going back to the one before")
        if trainer.frozen and index.get("base", trainer.identity) != trainer.identity:
            raise checkpoint.CheckpointError(
                f"--load {config.load}: is not the model that the prompts in {path} were learned"
                " for; it has changed since. Name the checkpoint that they were begun with"
                " (CKPT/checkpoints/step-..), or begin anew with another --out"
            )
        changed = [
            f"--{k.replace('_', '-')} {index['config'].get(k)} -> {v}"
            for k, v in dataclasses.asdict(config).items()
            if index["config"].get(k, v) != v
            and k not in ("resume", "out", "cache", "log_every", "tensorboard")
        ]
        changed += [said for said in [check_resumed_tokenizer(trainer, path, index)] if said]
        changed += (
            [f"corpus {index.get('corpus')} -> {corpus}"] if index.get("corpus") != corpus else []
        )
        world.say(
            f"resuming after step {index['step']}"
            + (f", with {', '.join(changed)}" if changed else "")
        )
        return index["step"], index["tokens"]
    if found:
        raise checkpoint.CheckpointError(
            f"--resume: no checkpoint in {config.out} is whole: {'; '.join(damage)}. Put one back,"
            " or train into another folder"
        )
    if config.resume:
        world.say(f"--resume: no checkpoint in {config.out} yet, starting from step 1")
    if config.load and not trainer.frozen:
        path = checkpoint.find(config.load)
        trainer.load(path, weights_only=True)
        world.say(f"starting from the weights of {path}")
    return 0, 0


def diverged(config: Config, step: int, bad_steps: int) -> RunError:
    """What is said when a run ends after `bad_steps` skipped steps in a row, the last of them
    `step`.

    A checkpoint of step k is good if step k + 1 was taken: then its weights still had finite
    gradients."""
    found = checkpoint.steps(Path(config.out) / "checkpoints")
    good = [path for k, path in found.items() if k < step - bad_steps]
    later = [path.name for k, path in found.items() if k >= step - bad_steps]
    where = (
        f"the last good checkpoint is {good[-1]}"
        if good
        else f"there is no good checkpoint in {config.out}"
    )
    again = "go on from it with --resume" if good else "start again in another folder"
    if good and later:
        again = f"remove the later {' and '.join(later)}, then {again}"
    precision = (
        ", or --precision bf16 (the loss scale is at its lowest, 1)"
        if config.precision == "fp16"
        else ""
    )
    return RunError(
        f"step {step}: the run has diverged: the gradients of the last {bad_steps} steps were not"
        f" finite, and all were skipped (--max-bad-steps {config.max_bad_steps}); {where}; {again},"
        f" with a lower --lr (now {config.lr:g}) or a longer --warmup-steps (now"
        f" {config.warmup_steps}){precision}",
        everywhere=True,
    )


def loop(
    trainer: Trainer,
    world: World,
    train_set,
    held_out,
    metrics: Metrics | None,
    start: int,
    tokens: int,
) -> bool:
    """Steps start + 1 to the last. Returns whether a signal to any rank ended it early, with a
    checkpoint. Raises RunError."""
    # signals: from here on there is something to save
    stop = []
    before = {
        number: signal.signal(number, lambda number, frame: stop.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    config = trainer.config
    begin = time.perf_counter()
    step = start
    out = Path(config.out)
    # a frozen matrix has no weight gradient
    flops = flops_per_token(trainer.model_config) * (2 / 3 if trainer.frozen else 1)
    bytes_per_token = held_out.index["bytes"] / held_out.index["tokens"]
    profiler = torch.profiler.profile() if config.profile else None
    first = min(start + 3, config.steps)
    curves = Curves(out / "tensorboard", start) if config.tensorboard and metrics else None
    save_due = False
    try:
        for step in range(start + 1, config.steps + 1):
            if profiler and step == first:
                profiler.start()
            step_begin = time.perf_counter()
            world.beat(f"step {step}")
            part = trainer.forward_backward(step, train_set)
            norm, lr = trainer.update(step)
            trainer.remove_old(out / "checkpoints")
            losses, stops, peaks, failed = world.gather_numbers(
                part, bool(stop), peak_memory(trainer.device), trainer.saver.failed
            )
            if any(failed):
                # raises, on all ranks
                trainer.saver.wait()
            seconds = time.perf_counter() - step_begin
            count = train_set.counted_tokens(trainer.samples(step))
            stopping = any(stops)
            tokens = tokens + count
            processed = config.global_batch_size * train_set.s
            line = {
                "step": step,
                "loss": sum(losses),
                "grad_norm": norm,
                "lr": lr,
                "tokens": tokens,
                "step_seconds": seconds,
                "tokens_per_second": processed / seconds,
                "tflops_per_device": processed * flops / seconds / world.size / 1e12,
                "peak_memory_bytes": int(max(peaks)),
            }
            line |= mfu(line["tflops_per_device"], trainer.device, trainer.precision)
            line |= trainer.routing()
            if trainer.scaler:
                line["loss_scale"] = trainer.scaler.scale
            if trainer.optimizer.skipped:
                line["skipped_steps"] = trainer.optimizer.skipped
            last = step == config.steps or stopping
            if step == config.steps or (config.eval_every and step % config.eval_every == 0):
                world.beat(f"the evaluation after step {step}")
                line["eval_loss"] = trainer.evaluate(
                    held_out, min(held_out.num_sequences, EVAL_SEQUENCES)
                )
            if metrics:
                metrics.add(line)
            if curves:
                curves.add(line)
            if last or step % config.log_every == 0 or "eval_loss" in line:
                world.say(
                    progress(
                        line,
                        config.steps,
                        (time.perf_counter() - begin) / (step - start) * (config.steps - step),
                        bytes_per_token,
                    )
                )
            world.beat(f"the save after step {step}")
            if trainer.optimizer.diverged(config.max_bad_steps):
                trainer.saver.wait()
                raise diverged(config, step, trainer.optimizer.skipped_in_a_row)
            save_due |= bool(config.save_every) and step % config.save_every == 0
            if last or (save_due and not trainer.optimizer.skipped_in_a_row):
                save_due = False
                trainer.save(out / "checkpoints", step, tokens, train_set.index["corpus"])
            if last:
                trainer.saver.wait()
                trainer.remove_old(out / "checkpoints", line.get("eval_loss", line["loss"]))
            if profiler and step >= first and (last or step == first + 2):
                profiler.stop()
                profiler.export_chrome_trace(str(out / f"trace-{world.rank}.json"))
                profiler = None
            if stopping:
                world.say(
                    f"stopped by a signal after step {step}; checkpoint saved; continue with"
                    " --resume"
                )
                return True
    # the same on all ranks
    except checkpoint.CheckpointError as e:
        whole = list(checkpoint.steps(out / "checkpoints").values())
        raise RunError(
            f"after step {step}: {e}; "
            + (f"{whole[-1]} is whole; " if whole else "")
            + "make room, then continue with --resume",
            everywhere=True,
        ) from None
    # on rank 0 alone: the others are ended
    except MetricsError as e:
        raise RunError(
            f"after step {step}: {e}; make room, then continue from the newest checkpoint with"
            " --resume"
        ) from None
    except RunError:
        raise
    except Exception as e:
        raise RunError(
            f"rank {world.rank}, step {step}: {type(e).__name__}:"
            f" {e}\n{traceback.format_exc()}train.py: rank {world.rank} failed in step {step};"
            " continue from the newest checkpoint with --resume"
        ) from e
    finally:
        world.beat(None)
        for number, handler in before.items():
            signal.signal(number, handler)
    return False


def run(config: Config, world: World) -> None:
    """One training run on this rank."""
    tokenizer = open_tokenizer(config, world)
    # of prompts, that of their model
    config.tokenizer = tokenizer.name
    check_room(config, world)
    world.connect(config.device, config.tp, config.pp, config.timeout, config.ep)
    check_flags_agree(config, world)
    folder = open_out(config, world)
    if folder and folder.notice:
        world.say(folder.notice)
    config.resume |= world.restarts > 0
    try:
        train(config, world, tokenizer)
    finally:
        if folder:
            folder.close()


def begin_files(config: Config, out: Path, tokenizer, start: int) -> Metrics:
    """What a run leaves from its start: config.json, its tokenizer, metrics.jsonl. On rank 0.
    Raises RunFolderError or MetricsError."""
    try:
        # Whole or as it was: a full disk must not cut the flags of a run.
        (out / "config.tmp").write_text(
            json.dumps(dataclasses.asdict(config), indent=1), encoding="utf-8"
        )
        os.replace(out / "config.tmp", out / "config.json")
        if isinstance(tokenizer, FileTokenizer):
            # generate.py finds it there
            tokenizer.save(out)
    except OSError as e:
        raise RunFolderError(f"--out {out}: cannot be written ({e.strerror})") from None
    return Metrics(out / "metrics.jsonl", start)


def announce(trainer: Trainer, world: World, index: dict) -> None:
    """What runs, on what, under which layout; and what of it may be a surprise. index: of the
    training text."""
    config = trainer.config
    told = (
        "tp",
        "pp",
        "ep",
        "virtual_stages",
        "schedule",
        "layer_split",
        "sequence_parallel",
        "zero_stage",
        "reduce_dtype",
        "recompute",
        "recompute_layers",
        "optimizer_state",
    )
    layout = "".join(
        f", {name.replace('_', '-')} {getattr(config, name)}"
        for name in told
        if getattr(config, name) != getattr(Config(), name)
    )
    learned = sum(
        torch.Size(sharding_of(p).shape).numel() for p in trainer.optimizer.parameters.values()
    )
    learned = (
        f", of which nothing changes, and {learned:,} prompt parameters" if trainer.frozen else ""
    )
    world.say(
        f"{config.load or config.model}: {trainer.num_parameters:,} parameters{learned},"
        f" {trainer.precision} on {world.size} x {world.device.type}{layout}; corpus"
        f" {index['corpus']} (Python {sys.version.split()[0]}): {index['tokens']:,} tokens"
    )
    if config.zero_stage and not world.groups.dp:
        world.say(
            f"--zero-stage {config.zero_stage}: there is one data-parallel rank, and nobody to"
            " share with"
        )
    if trainer.model_config.num_experts and config.micro_batch_size is None:
        world.say(
            f"experts are balanced within a micro-batch, here of {trainer.micro} sequences: for the"
            f" same result on another number of ranks give --micro-batch-size {trainer.micro}"
        )
    try:
        architectures.check_export_of_experts(trainer.model_config)
    except architectures.HuggingFaceError as e:
        world.say(
            f"no Hugging Face class has such experts, and huggingface.py will not export them: {e}"
        )
    if config.kernels == "auto" and trainer.no_kernels and trainer.device.type == "cuda":
        world.say(f"--kernels auto: {trainer.no_kernels}; PyTorch's own operations run")
    if config.recompute == "selective" and trainer.model_config.attention == "fused":
        world.say(
            "--recompute selective: fused attention keeps no s x s scores, so there is nothing to"
            " recompute"
        )


def train(config: Config, world: World, tokenizer) -> None:
    """The run, in a folder that is its own."""
    train_set, held_out = open_data(config, world, tokenizer)
    try:
        trainer = Trainer(config, world.device, world.groups)
    except (RuntimeError, MemoryError) as e:
        if isinstance(e, RuntimeError) and not re.search("alloc|overflow|out of memory", str(e)):
            raise
        raise RunError(
            f"rank {world.rank}: there is no room for this model on {world.device}"
            f" ({str(e).split(chr(10))[0]}); a smaller one, or more ranks with --tp, --pp or"
            " --zero-stage 3, would need less of each"
        ) from None
    trainer.tokenizer = record(tokenizer)
    out = Path(config.out)
    opened = []
    corpus = train_set.index["corpus"]
    start, tokens = restore(trainer, world, corpus, tokenizer)
    if start > config.steps:
        raise ConfigError(
            f"--steps {config.steps}: the run in {out} is at step {start} already; more than that"
            " would go on"
        )
    done = world.on_rank_0(
        lambda: (
            start >= config.steps
            and (out / ("prompts.safetensors" if trainer.frozen else "sample.txt")).exists()
        ),
        (),
    )
    if done:
        return world.say(
            f"{out}: step {start} of --steps {config.steps} is done, and there is nothing to do;"
            " with more --steps the run goes on"
        )
    if config.warmup_steps > config.steps > start:
        world.say(
            f"--warmup-steps {config.warmup_steps}: longer than --steps {config.steps}, so the"
            " learning rate ends at"
            f" {learning_rate(config.steps, config.lr, 0, config.warmup_steps, config.steps):.1e},"
            f" below --lr {config.lr}"
        )
    world.on_rank_0(
        lambda: opened.append(begin_files(config, out, tokenizer, start)),
        (RunFolderError, MetricsError),
    )
    metrics = opened[0] if world.rank == 0 else None
    if metrics and metrics.notice:
        world.say(metrics.notice)
    announce(trainer, world, train_set.index)
    begin = time.perf_counter()
    stopped = loop(trainer, world, train_set, held_out, metrics, start, tokens)
    title = f"{config.model}, corpus {corpus}, Python {sys.version.split()[0]}"
    if trainer.frozen and not stopped:
        trainer.save_prompts(out / "prompts.safetensors")
        if world.rank == 0:
            leave(
                world,
                out / "loss.png",
                lambda path: plot_loss(
                    metrics.lines, f"{config.prompt_config}, prompts for {config.load}", path
                ),
            )
        return world.say(f"{out}: prompts.safetensors, loss.png, metrics.jsonl, checkpoints")
    # a model whose parameters are spread runs on all ranks
    if stopped or (trainer.dp_rank > 0 and config.zero_stage < 3 and config.ep == 1):
        return
    for chunk in trainer.chunks if config.sequence_parallel else []:
        sequence_parallel.cut_sequence(chunk, world.groups.tp, False)
    seconds = time.perf_counter() - begin
    prompt = sample_ids(config, tokenizer)
    try:
        (ids,) = generate.generate(
            trainer.model, [prompt], 300, temperature=0.8, seed=config.seed, eot=tokenizer.stop_ids
        )
        # tensor-parallel ranks draw the same tokens
        text = tokenizer.decode(prompt + ids)
    except FloatingPointError as e:
        text = f"no sample: {e}"
    if world.rank == 0:
        leave(world, out / "loss.png", lambda path: plot_loss(metrics.lines, title, path))
        leave(
            world,
            out / "sample.txt",
            lambda path: path.write_text(text, encoding="utf-8", errors="replace"),
        )
        world.say(
            f"\na sample (generate.py makes more):\n\n{text}\n\n{out}: loss.png, metrics.jsonl,"
            f" sample.txt, checkpoints; {duration(seconds)} of training"
        )


def leave(world: World, path: Path, write) -> None:
    """write(path), for what can be made again: where there is no room for it, the run is done all
    the same."""
    try:
        write(path)
    except OSError as e:
        world.say(f"{path}: cannot be written ({e.strerror}); the checkpoints are whole")


def main(argv: list[str]) -> int:
    """Exit status: 0; 2 for what cannot run, 1 for what fails while running, each with one message;
    130 for Ctrl-C before the first step."""
    terminal.prepare()
    try:
        world = World.from_launcher()
    except WorldError as e:
        terminal.say(f"train.py: {e}", error=True)
        return 2
    status = 0
    message = None
    try:
        config = parse(argv, world.rank)
        config.validate(world.size)
        run(config, world)
    except REFUSED as e:
        status = 2
        message = e
    except (RunError, WorldError) as e:
        status = 1
        message = e
    except KeyboardInterrupt:
        status = 130
    except Exception as e:
        status = 1
        message = RunError(
            f"rank {world.rank}, before the first step: {type(e).__name__}:"
            f" {e}\n{traceback.format_exc()}train.py: rank {world.rank} failed before the first"
            " step or after the last"
        )
    alone = status == 1 and not getattr(message, "everywhere", False)
    if message and (world.rank == 0 or alone):
        terminal.say(
            f"train.py: {terminal.one_line(message) if status == 2 else message}", error=True
        )
    if alone and world.size > 1:
        # peers may wait for this rank in a collective: no goodbye
        os._exit(1)
    # its traceback holds groups
    message = None
    world.disconnect()
    if status == 2:
        terminal.let_rank_0_speak(world.rank)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
