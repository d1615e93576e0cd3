"""Everything in train.py's `loop` that is not computation: signals, the watchdog, measurements, the
log, saving; and what a run says at its start.
"""

import contextlib
import math
import signal
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from base.device_queue import Moment, to_host
from base.errors import InputError, RunError
from optimizer import learning_rate
from run import checkpoint, run_folder
from run.config import DTYPES, LAYOUT
from run.metrics import Curves, Metrics, MetricsError, mfu, peak_memory, progress
from run.presets import why_not_exported
from run.world import World

# Each evaluation reads the first 64 sequences of the held-out text.
EVAL_SEQUENCES = 64


class StepProfiler:
    """Traces the third to the fifth step: OUT/trace-RANK.json, for Perfetto."""

    def __init__(self, path: Path, start: int, last: int):
        self.path = path
        self.first = min(start + 3, last)
        self.profiler = torch.profiler.profile()
        self.done = False

    def begin_step(self, step: int) -> None:
        if step == self.first:
            self.profiler.start()

    def end_step(self, step: int, is_last: bool) -> None:
        if not self.done and step >= self.first and (is_last or step == self.first + 2):
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.path))
            self.done = True


@dataclass
class Measurement:
    """The numbers of one step, on their way from the device to the host."""

    step: int
    lr: float
    # Tokens of the loss since the start of the run.
    tokens: int
    # Tokens that went through the model in this step.
    processed: int
    # [ranks, numbers], as `TrainingRun.measure` lists them; valid once `end` has passed
    numbers: Tensor
    statistics: dict[str, Tensor]
    # The report of fp8.Scaling, or None.
    fp8_report: Tensor | None
    begin: Moment
    end: Moment
    # Results of an evaluation after this step.
    eval_loss: float | None = None
    eval_statistics: dict[str, float] = field(default_factory=dict)


def reading_lag(trainer) -> int:
    """How many steps later the host reads a step's numbers, the same on all ranks. On a GPU step k
    is read when step k + 1 is enqueued, so that the device has work meanwhile. With fp16 the host
    waits for each step anyway (AdamW.step)."""
    return int(trainer.device.type == "cuda" and trainer.scaler is None)


class TrainingRun:
    """One run on this rank."""

    def __init__(self, trainer, world, train_set, held_out, start: int, tokens: int):
        """start, tokens: steps and tokens of the checkpoint that the run goes on from."""
        config = trainer.config
        self.trainer, self.config, self.world = trainer, config, world
        self.train_set, self.held_out = train_set, held_out
        self.start, self.tokens = start, tokens
        self.out = Path(config.out)
        self.checkpoints = self.out / "checkpoints"
        # Both on rank 0 alone.
        self.metrics: Metrics | None = None
        self.curves: Curves | None = None
        self.profiler: StepProfiler | None = None
        if config.profile:
            path = self.out / f"trace-{world.rank}.json"
            self.profiler = StepProfiler(path, start, config.steps)
        # Seconds of a step by part, with --plan.
        self.predicted: dict[str, float] = {}
        self.flops = trainer.task.flops_per_token(trainer.task.row_length(train_set))
        self.multiplies_in_fp8 = bool(trainer.fp8) and not fp8_is_emulated(trainer)
        # None: the held-out loss is not that of text.
        self.bytes_per_token = None
        if "bytes" in held_out.index:
            self.bytes_per_token = held_out.index["bytes"] / held_out.index["tokens"]
        self.eval_sequences = min(held_out.num_sequences, EVAL_SEQUENCES)
        self.step = start
        # Steps that are enqueued and not yet read, oldest first.
        self.unread: deque[Measurement] = deque()
        self.lag = reading_lag(trainer)
        # The line of the step that was read last, and the skipped steps in a row up to it.
        self.line: dict = {}
        self.skipped_in_a_row = 0
        self.signals: list[int] = []
        # A signal reached some rank: this step is the last.
        self.stopping = False
        self.save_waits = False

    def open_files(self, tokenizer) -> None:
        """Write what --out has before the first step, and open metrics.jsonl, on rank 0. A
        collective. Raises RunFolderError or MetricsError."""

        def work() -> Metrics:
            run_folder.begin(self.out, self.config, tokenizer)
            return Metrics(self.out / "metrics.jsonl", self.start)

        self.metrics = self.world.open_on_rank_0(work)
        if self.metrics and self.metrics.notice:
            self.world.say(self.metrics.notice)

    # -- around all steps --------------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self):
        """Let SIGINT and SIGTERM end the run after a step, and let errors name the step."""
        handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, lambda number, _: self.signals.append(number))
        self.begin = time.perf_counter()
        if self.config.tensorboard and self.metrics:
            self.curves = Curves(self.out / "tensorboard", self.start)
        try:
            yield
        except RunError as e:
            if e.everywhere:
                # No rank is missing, so the checkpoint that is being written becomes whole.
                self.trainer.checkpoints.saver.wait()
            raise
        except Exception as e:
            # What fails here follows from e, which is reported.
            with contextlib.suppress(Exception):
                self.write_lines()
            raise self.describe(e) from None
        finally:
            self.world.beat(None)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def describe(self, e: Exception) -> RunError:
        """The error, with the step and what to do."""
        if isinstance(e, checkpoint.CheckpointError):
            # The error is the same on all ranks.
            whole = list(checkpoint.steps(self.checkpoints).values())
            kept = f"{whole[-1]} is whole; " if whole else ""
            advice = f"{kept}make room, then continue with --resume"
            return RunError(f"after step {self.step}: {e}; {advice}", everywhere=True)
        go_on = "continue from the newest checkpoint with --resume"
        if isinstance(e, MetricsError):
            # Rank 0 alone has it, and the others are ended.
            return RunError(f"after step {self.step}: {e}; make room, then {go_on}")
        rank = self.world.rank
        where = f"rank {rank}, step {self.step}"
        if isinstance(e, InputError):
            # The message says what to change.
            return RunError(f"{where}: {e}; then --resume goes on")
        trace = "".join(traceback.format_exception(e))
        last = f"{self.config.name_in_messages()}: rank {rank} failed in step {self.step}; {go_on}"
        return RunError(f"{where}: {type(e).__name__}: {e}\n{trace}{last}")

    def steps_left(self):
        return range(self.start + 1, self.config.steps + 1)

    # -- one step ----------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        self.step = step
        if self.profiler:
            self.profiler.begin_step(step)
        every = self.config.save_every
        if every and step % every == 0:
            self.save_waits = True
        self.step_begin = Moment(self.trainer.device)
        self.world.beat(f"step {step}")

    def measure(self, step: int, loss: Tensor, norm: Tensor, lr: float) -> Measurement:
        """Start to copy the step's numbers to the host. A collective."""
        trainer = self.trainer
        optimizer = trainer.optimizer
        numbers = self.world.gather_numbers(
            loss,
            norm,
            optimizer.skipped,
            optimizer.skipped_in_a_row,
            bool(self.signals),
            peak_memory(trainer.device),
            trainer.checkpoints.saver.failed,
        )
        counted, processed = trainer.task.processed(step, self.train_set)
        self.tokens += counted
        measured = Measurement(
            step,
            lr,
            self.tokens,
            processed,
            to_host(numbers),
            {n: to_host(x) for part in trainer.parts for n, x in part.statistics().items()},
            to_host(trainer.fp8.report) if trainer.fp8 else None,
            self.step_begin,
            Moment(trainer.device),
        )
        self.unread.append(measured)
        return measured

    def read(self, measured: Measurement) -> None:
        """Wait until the device has done the step, and make its line of metrics.jsonl. All ranks
        learn whether a signal reached one of them and whether the step was skipped. If one could
        not write a checkpoint, all raise."""
        trainer = self.trainer
        measured.end.wait()
        columns = zip(*measured.numbers.tolist())
        losses, norms, skipped, skipped_in_a_row, stops, peaks, failed = columns
        if any(failed):
            trainer.checkpoints.saver.wait()
        self.stopping = any(stops)
        self.skipped_in_a_row = int(skipped_in_a_row[0])
        trainer.checkpoints.remove_old(self.checkpoints, good=not self.skipped_in_a_row)
        seconds = measured.end.seconds_since(measured.begin)
        processed = measured.processed
        line = {
            "step": measured.step,
            "loss": sum(losses),
            "grad_norm": norms[0],
            "lr": measured.lr,
            "tokens": measured.tokens,
            "step_seconds": seconds,
            "tokens_per_second": processed / seconds,
            "tflops_per_device": processed * self.flops / seconds / self.world.size / 1e12,
            "peak_memory_bytes": int(max(peaks)),
        }
        tflops = line["tflops_per_device"]
        line |= mfu(tflops, trainer.device, trainer.precision, self.multiplies_in_fp8)
        line |= {name: values.tolist() for name, values in measured.statistics.items()}
        if measured.fp8_report is not None:
            line |= trainer.fp8.warnings(measured.fp8_report)
        if trainer.scaler:
            line["loss_scale"] = trainer.scaler.scale
        if self.predicted:
            line["predicted_seconds"] = sum(self.predicted.values())
        if skipped[0]:
            line["skipped_steps"] = int(skipped[0])
        if measured.eval_loss is not None:
            line[trainer.task.eval_field] = measured.eval_loss
            line |= measured.eval_statistics
        self.line = line

    def is_last(self, step: int) -> bool:
        # A signal that is read late ends the run after the step that is enqueued by then.
        return step == self.config.steps or (self.stopping and step == self.step)

    def evaluation_is_due(self, step: int) -> bool:
        every = self.config.eval_every
        due = step == self.config.steps or (every and step % every == 0)
        if due:
            # The line of this step waits for the held-out loss.
            self.write_lines(unread=1)
            self.world.beat(f"the evaluation after step {step}")
        return bool(due)

    def log(self, step: int) -> None:
        """Write the lines of all steps but the newest `lag`, or of all steps where the run is
        evaluated, saved or ended after this one. Raises RunError as `end_if_diverged`."""
        self.write_lines(unread=self.lag)
        evaluated = self.unread and self.unread[-1].eval_loss is not None
        if evaluated or self.save_waits or self.is_last(step):
            self.write_lines()
        self.world.beat(f"the save after step {step}")

    def write_lines(self, unread: int = 0) -> None:
        """Read all but the newest `unread` steps. Each has a line in metrics.jsonl, and every
        --log-every steps one on the screen."""
        while len(self.unread) > unread:
            self.read(self.unread.popleft())
            line = self.line
            step = line["step"]
            if self.metrics:
                self.metrics.add(line)
            if self.curves:
                self.curves.add(line)
            evaluated = self.trainer.task.eval_field in line
            if self.is_last(step) or step % self.config.log_every == 0 or evaluated:
                each = (time.perf_counter() - self.begin) / (step - self.start)
                left = each * (self.config.steps - step)
                self.world.say(progress(line, self.config.steps, left, self.bytes_per_token))
            self.end_if_diverged(step)

    def end_if_diverged(self, step: int) -> None:
        """Raises RunError after --max-bad-steps skipped steps in a row."""
        bad_steps = self.skipped_in_a_row
        if self.trainer.optimizer.diverged(self.config.max_bad_steps, bad_steps):
            self.trainer.checkpoints.saver.wait()
            raise diverged(self.config, step, bad_steps, self.line.get("fp8_not_finite"))

    def save_is_due(self, step: int) -> bool:
        """True after the last step and every --save-every steps; after a skipped step the save
        waits for the next one that is taken."""
        return self.is_last(step) or (self.save_waits and not self.skipped_in_a_row)

    def save(self, step: int) -> None:
        self.save_waits = False
        if self.metrics:
            self.metrics.sync()
        corpus = self.train_set.index["corpus"]
        self.trainer.checkpoints.save(self.checkpoints, step, self.tokens, corpus, self.train_set)

    def end_step(self, step: int) -> None:
        if self.is_last(step):
            self.trainer.checkpoints.saver.wait()
            finite = math.isfinite(self.line.get(self.trainer.task.eval_field, self.line["loss"]))
            good = finite and not self.skipped_in_a_row
            self.trainer.checkpoints.remove_old(self.checkpoints, good)
        if self.profiler:
            self.profiler.end_step(step, self.is_last(step))
        if self.stopping:
            rule = "checkpoint saved; continue with --resume"
            self.world.say(f"stopped by a signal after step {step}; {rule}")


def diverged(config, step: int, bad_steps: int, tensors: list[str] | None = None) -> RunError:
    """The error of a run that ends at `step` after `bad_steps` skipped steps in a row. tensors: the
    FP8 tensors that were not finite in it, in order."""
    found = checkpoint.steps(Path(config.out) / "checkpoints")
    # A checkpoint of step k is good if step k + 1 was taken.
    good = [path for k, path in found.items() if k < step - bad_steps]
    later = [path.name for k, path in found.items() if k >= step - bad_steps]
    where = f"there is no good checkpoint in {config.out}"
    advice = "start again in another folder"
    if good:
        where = f"the last good checkpoint is {good[-1]}"
        advice = "go on from it with --resume"
    if good and later:
        advice = f"remove the later {' and '.join(later)}, then {advice}"
    in_fp16 = config.precision == "fp16"
    precision = ", or --precision bf16 (the loss scale is at its lowest, 1)" if in_fp16 else ""
    first = ""
    if tensors:
        first = f"; in step {step}, the first FP8 tensor that was not finite is {tensors[0]}"
    return RunError(
        f"step {step}: the run has diverged: the gradients of the last {bad_steps} steps were not"
        f" finite, and all were skipped (--max-bad-steps {config.max_bad_steps}){first}; {where};"
        f" {advice}, with a lower --lr (now {config.lr:g}) or a longer --warmup-steps (now"
        f" {config.warmup_steps}){precision}",
        everywhere=True,
    )


# --- what a run says at its start -----------------------------------------------------------------

# Flags that are named where they are not the default.
NAMED = (
    *LAYOUT,
    *("reduce_dtype", "recompute", "recompute_layers", "head_chunk"),
    *("fp8", "fp8_skip", "fp8_scales", "fp8_block", "optimizer", "optimizer_state"),
)


def announce(run: TrainingRun) -> None:
    """Say what runs, on what, under which layout, and what may surprise."""
    trainer, world, config, index = run.trainer, run.world, run.config, run.train_set.index
    described = "".join(part.describe() for part in trainer.parts)
    layout = ""
    default = type(config)()
    for name in NAMED:
        if getattr(config, name) != getattr(default, name):
            layout += f", {name.replace('_', '-')} {getattr(config, name)}"
    world.say(
        f"{config.load or config.model}: {trainer.num_parameters:,} parameters{described},"
        f" {trainer.precision} on {world.size} x {world.device.type}"
        f"{layout}; corpus {index['corpus']} (Python {sys.version.split()[0]}): "
        f"{index['tokens']:,} tokens"
    )
    for text in surprises(trainer, world, run.start):
        world.say(text)


def surprises(trainer, world: World, start: int):
    """Yield where the configuration has less effect, or another one, than a user may think."""
    config, model = trainer.config, trainer.model_config
    if config.warmup_steps > config.steps > start:
        end = learning_rate(config.steps, config.lr, 0, config.warmup_steps, config.steps)
        ends = f"so the learning rate ends at {end:.2g}, below --lr {config.lr:g}"
        yield f"--warmup-steps {config.warmup_steps}: longer than --steps {config.steps}, {ends}"
    if config.zero_stage and not world.groups.replicas:
        yield f"--zero-stage {config.zero_stage}: one data-parallel rank has nobody to share with"
    if config.precision == "tf32" and trainer.device.type == "cpu":
        yield "--precision tf32: the same as fp32 here; only GPUs have TF32 multiplications"
    if trainer.fp8:
        yield from surprises_of_fp8(trainer)
    balanced = model.num_experts and trainer.task.learned.balances_experts
    within = model.router != "bias" or model.capacity_factor or model.aux_loss
    if balanced and within and config.micro_batch_size is None:
        yield f"experts are balanced within a micro-batch, {same_micro_batch(trainer)}"
    if why := why_not_exported(model):
        yield f"huggingface.py will not export these experts, which no class of theirs has: {why}"
    if config.kernels == "auto" and trainer.kernels_refused and trainer.device.type == "cuda":
        yield f"--kernels auto: {trainer.kernels_refused}; PyTorch's own operations run"
    if config.recompute == "selective" and model.attention == "fused":
        yield "--recompute selective: fused attention keeps no s x s scores to recompute"


def same_micro_batch(trainer) -> str:
    size = trainer.micro_batch
    advice = "for the same result on another number of ranks give --micro-batch-size"
    return f"here of {size} sequences: {advice} {size}"


def surprises_of_fp8(trainer):
    config = trainer.config
    why = fp8_is_emulated(trainer)
    if why:
        yield f"--fp8 {config.fp8}: emulated, so not faster: {why}"
    # With a history, delayed scales are those of all samples.
    if config.micro_batch_size is None and not len(trainer.fp8.history):
        when = " in the first step" if config.fp8 == "delayed" else ""
        scales = f"scales are{when} those of a micro-batch, {same_micro_batch(trainer)}"
        yield f"--fp8 {config.fp8}: {scales}"
    if trainer.model_config.num_experts:
        rule = "experts have a scale for each row, and weight gradients in"
        yield f"--fp8 {config.fp8}: {rule} {trainer.precision}"


def fp8_is_emulated(trainer) -> str:
    """Why this device does not multiply the bytes of this model; "" where it does."""
    from base import float8

    config, dtype = trainer.config, DTYPES[trainer.precision]
    block = config.fp8_block if config.fp8 == "block" else None
    needed = block or 16
    odd = [f"{n} {what}" for what, n in fp8_sizes(trainer).items() if n % needed]
    why = float8.why_emulated(trainer.device, dtype, block)
    if odd and not why:
        why = f"FP8 multiplications need sizes that {needed} divides, not {', '.join(odd)}"
    return why


def fp8_sizes(trainer) -> dict[str, int]:
    """What rows and columns of the matrices of a rank stand for -> how many there are."""
    model, t = trainer.model_config, trainer.config.tp
    return {
        "tokens of a micro-batch": trainer.micro_batch * model.seq_length,
        "of --hidden-size": model.hidden_size // t,
        "of --ffn-hidden-size": model.ffn_hidden_size // t,
        "of queries": model.num_heads * model.head_dim // t,
        "of keys": model.num_kv_heads * model.value_size // t,
        "of --query-rank": model.query_rank,
    }
