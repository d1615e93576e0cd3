"""What surrounds the steps of a run: signals, the watchdog, measurements, the log, saving.

train.py's `loop` is the story; each line of it that is no computation is a method here.
"""

import contextlib
import signal
import time
import traceback
from pathlib import Path

import torch

import checkpoint
from runtime.errors import RunError
from runtime.metrics import Curves, Metrics, MetricsError, mfu, peak_memory, progress
from runtime.sizes import flops_per_token

# of held-out text, the first of them, at every evaluation
EVAL_SEQUENCES = 64


class StepProfiler:
    """A trace of the third to the fifth step: OUT/trace-RANK.json, for Perfetto."""

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


class TrainingRun:
    """One run, from step `start` on, on this rank."""

    def __init__(self, trainer, world, train_set, held_out, start: int, tokens: int):
        """start, tokens: the steps and the tokens of the checkpoint that it goes on from."""
        config = trainer.config
        self.trainer = trainer
        self.world = world
        self.train_set = train_set
        self.held_out = held_out
        self.start = start
        self.tokens = tokens
        self.config = config
        self.out = Path(config.out)
        self.checkpoints = self.out / "checkpoints"
        # on rank 0
        self.metrics: Metrics | None = None
        self.curves: Curves | None = None
        self.profiler: StepProfiler | None = None
        if config.profile:
            path = self.out / f"trace-{world.rank}.json"
            self.profiler = StepProfiler(path, start, config.steps)
        self.flops = flops_per_token(trainer.model_config) * trainer.share_of_flops
        self.bytes_per_token = held_out.index["bytes"] / held_out.index["tokens"]
        self.eval_sequences = min(held_out.num_sequences, EVAL_SEQUENCES)
        self.step = start
        self.signals: list[int] = []
        # a signal reached some rank: this step is the last
        self.stopping = False
        self.save_waits = False

    # -- around all steps --------------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self):
        """SIGINT and SIGTERM end the run after a step; errors say in which step, and what to do."""
        handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, lambda number, _: self.signals.append(number))
        self.begin = time.perf_counter()
        if self.config.tensorboard and self.metrics:
            self.curves = Curves(self.out / "tensorboard", self.start)
        try:
            yield
        except RunError:
            raise
        except Exception as e:
            raise self.describe(e) from None
        finally:
            self.world.beat(None)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def describe(self, e: Exception) -> RunError:
        """The error, with the step and what to do."""
        if isinstance(e, checkpoint.CheckpointError):
            # the same on all ranks
            whole = list(checkpoint.steps(self.checkpoints).values())
            kept = f"{whole[-1]} is whole; " if whole else ""
            advice = f"{kept}make room, then continue with --resume"
            return RunError(f"after step {self.step}: {e}; {advice}", everywhere=True)
        if isinstance(e, MetricsError):
            # on rank 0 alone: the others are ended
            advice = "make room, then continue from the newest checkpoint with --resume"
            return RunError(f"after step {self.step}: {e}; {advice}")
        rank = self.world.rank
        return RunError(
            f"rank {rank}, step {self.step}: {type(e).__name__}:"
            f" {e}\n{''.join(traceback.format_exception(e))}train.py: rank {rank} failed in step"
            f" {self.step}; continue from the newest checkpoint with --resume"
        )

    def steps_left(self):
        return range(self.start + 1, self.config.steps + 1)

    # -- one step ----------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        self.step = step
        if self.profiler:
            self.profiler.begin_step(step)
        self.step_begin = time.perf_counter()
        self.world.beat(f"step {step}")

    def measure(self, step: int, loss: torch.Tensor, norm: float, lr: float) -> dict:
        """The step's line of metrics.jsonl. A collective."""
        trainer, world = self.trainer, self.world
        saver = trainer.checkpoints.saver
        trainer.checkpoints.remove_old(self.checkpoints)
        memory = peak_memory(trainer.device)
        numbers = (loss, bool(self.signals), memory, saver.failed)
        losses, stops, peaks, failed = world.gather_numbers(*numbers)
        if any(failed):
            # raises, on all ranks
            saver.wait()
        self.stopping = any(stops)
        seconds = time.perf_counter() - self.step_begin
        self.tokens += self.train_set.counted_tokens(trainer.samples(step))
        processed = self.config.global_batch_size * self.train_set.s
        line = {
            "step": step,
            "loss": sum(losses),
            "grad_norm": norm,
            "lr": lr,
            "tokens": self.tokens,
            "step_seconds": seconds,
            "tokens_per_second": processed / seconds,
            "tflops_per_device": processed * self.flops / seconds / world.size / 1e12,
            "peak_memory_bytes": int(max(peaks)),
        }
        line |= mfu(line["tflops_per_device"], trainer.device, trainer.precision)
        line |= trainer.routing()
        if trainer.scaler:
            line["loss_scale"] = trainer.scaler.scale
        if trainer.optimizer.skipped:
            line["skipped_steps"] = trainer.optimizer.skipped
        return line

    def is_last(self, step: int) -> bool:
        return step == self.config.steps or self.stopping

    def evaluation_is_due(self, step: int) -> bool:
        every = self.config.eval_every
        due = step == self.config.steps or (every and step % every == 0)
        if due:
            self.world.beat(f"the evaluation after step {step}")
        return bool(due)

    def log(self, line: dict) -> None:
        """To metrics.jsonl every step; to the screen every --log-every steps."""
        step = line["step"]
        if self.metrics:
            self.metrics.add(line)
        if self.curves:
            self.curves.add(line)
        if self.is_last(step) or step % self.config.log_every == 0 or "eval_loss" in line:
            each = (time.perf_counter() - self.begin) / (step - self.start)
            left = each * (self.config.steps - step)
            self.world.say(progress(line, self.config.steps, left, self.bytes_per_token))
        self.world.beat(f"the save after step {step}")

    def end_if_diverged(self, step: int) -> None:
        """Raises RunError after --max-bad-steps skipped steps in a row."""
        optimizer = self.trainer.optimizer
        if optimizer.diverged(self.config.max_bad_steps):
            self.trainer.checkpoints.saver.wait()
            raise diverged(self.config, step, optimizer.skipped_in_a_row)

    def save_is_due(self, step: int) -> bool:
        """After the last step, and every --save-every steps, or as soon as a step was taken."""
        every = self.config.save_every
        if every and step % every == 0:
            self.save_waits = True
        good = not self.trainer.optimizer.skipped_in_a_row
        return self.is_last(step) or (self.save_waits and good)

    def save(self, step: int) -> None:
        self.save_waits = False
        corpus = self.train_set.index["corpus"]
        self.trainer.checkpoints.save(self.checkpoints, step, self.tokens, corpus)

    def end_step(self, step: int, line: dict) -> None:
        if self.is_last(step):
            self.trainer.checkpoints.saver.wait()
            loss = line.get("eval_loss", line["loss"])
            self.trainer.checkpoints.remove_old(self.checkpoints, loss)
        if self.profiler:
            self.profiler.end_step(step, self.is_last(step))
        if self.stopping:
            self.world.say(
                f"stopped by a signal after step {step}; checkpoint saved; continue with --resume"
            )


def diverged(config, step: int, bad_steps: int) -> RunError:
    """The message of a run that ends after `bad_steps` skipped steps in a row, the last of them
    `step`."""
    found = checkpoint.steps(Path(config.out) / "checkpoints")
    # a checkpoint of step k is good if step k + 1 was taken
    good = [path for k, path in found.items() if k < step - bad_steps]
    later = [path.name for k, path in found.items() if k >= step - bad_steps]
    where = f"there is no good checkpoint in {config.out}"
    advice = "start again in another folder"
    if good:
        where = f"the last good checkpoint is {good[-1]}"
        advice = "go on from it with --resume"
    if good and later:
        advice = f"remove the later {' and '.join(later)}, then {advice}"
    precision = ""
    if config.precision == "fp16":
        precision = ", or --precision bf16 (the loss scale is at its lowest, 1)"
    return RunError(
        f"step {step}: the run has diverged: the gradients of the last {bad_steps} steps were not"
        f" finite, and all were skipped (--max-bad-steps {config.max_bad_steps}); {where};"
        f" {advice}, with a lower --lr (now {config.lr:g}) or a longer --warmup-steps (now"
        f" {config.warmup_steps}){precision}",
        everywhere=True,
    )
