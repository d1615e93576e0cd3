"""Trains a GPT: every technique of this project, composed.

    python train.py                                  one device
    torchrun --nproc-per-node 2 train.py             two ranks, data parallel; NCCL and bf16 on GPUs, gloo and fp32 on CPUs
    python train.py --model gpt2 --data corpus.jsonl --tokenizer gpt2 --global-batch-size 480 --micro-batch-size 12

One dataclass holds the configuration; the flags, `--help` and `config.json` are made from it. A run leaves in `--out`:

    config.json   metrics.jsonl (a line a step, in full precision)   loss.png   sample.txt   checkpoints/step-000100/

The layout changes nothing but speed and memory. Initial weights depend on (seed, name); the samples of a step on (seed, step);
dropout masks on (seed, step, sample, layer, position); and the loss is the sum of per-token losses divided by the number of
counted tokens in the global batch, a number known before the first forward, with gradients summed over ranks and micro-batches.
"""
import argparse
import ctypes
import dataclasses
import gc
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import checkpoint
import data
import fsdp
import generate
import sharding
from gpt import GPT, GPTConfig, PRESETS, cross_entropy, divisors, dropout_key, flops_per_token, num_parameters
from metrics import Metrics, duration, peak_memory, plot_loss, progress
from optimizer import AdamW, GradientAccumulator, LossScaler, learning_rate

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EVAL_SEQUENCES = 64              # of held-out text, the first of them, at every evaluation


class ConfigError(ValueError):
    """A configuration that cannot run: the flag, its value, the rule and what would fit."""


class RunError(RuntimeError):
    """A run that failed on this rank, or with the same message everywhere."""

    def __init__(self, message: str, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere


def flag(default, help, choices=None, metavar=None):
    return dataclasses.field(default_factory=lambda: default, metadata={"help": help, "choices": choices, "metavar": metavar})


@dataclass
class Config:
    # model
    model: str = flag("tiny", f"a preset: {', '.join(PRESETS)}", metavar="PRESET")
    num_layers: int | None = flag(None, "instead of the preset's, as with the next seven")
    hidden_size: int | None = flag(None, "h")
    num_heads: int | None = flag(None, "attention heads")
    num_kv_heads: int | None = flag(None, "fewer than heads: grouped-query attention")
    ffn_hidden_size: int | None = flag(None, "inner size of the MLP")
    seq_length: int | None = flag(None, "tokens in a sequence")
    vocab_size: int | None = flag(None, "at least the tokenizer's")
    dropout: float | None = flag(None, "probability, at embedding, attention and both residual branches")
    # memory, speed
    attention: str | None = flag(None, "fused never writes the s x s scores; the default where dropout is 0", ("explicit", "fused"))
    compile: bool = flag(False, "torch.compile each block")
    profile: bool = flag(False, "write OUT/trace-RANK.json for chrome://tracing or Perfetto, the third step to the fifth")
    # batch
    global_batch_size: int = flag(16, "sequences in a step, over all ranks")
    micro_batch_size: int | None = flag(None, "sequences in one forward; the default is a rank's whole share")
    # optimizer
    steps: int = flag(500, "the last step")
    lr: float = flag(3e-3, "peak learning rate")
    min_lr: float | None = flag(None, "where the cosine ends; the default is lr / 10")
    warmup_steps: int = flag(50, "steps of linear warmup")
    weight_decay: float = flag(0.1, "on matrices only")
    grad_clip: float = flag(1.0, "largest global gradient norm; 0 for none")
    precision: str | None = flag(None, "of compute; the default is bf16 on CUDA and fp32 on CPUs (fp64: for tests)", ("fp32", "bf16", "fp16", "fp64"))
    # data
    data: list[str] = flag([], "text files, .jsonl files with a text field, either gzipped, or folders; the default is Python's library", metavar="PATH")
    tokenizer: str = flag("bytes", "bytes, gpt2, or a JSON file of the tokenizers library", metavar="{bytes,gpt2,FILE}")
    # run
    out: str = flag("runs/default", "the folder of this run", metavar="DIR")
    save_every: int = flag(200, "steps between checkpoints; 0 for only the last")
    keep: int = flag(2, "how many checkpoints remain; 0 for all")
    resume: bool = flag(False, "go on from the newest checkpoint in OUT, if there is one")
    eval_every: int = flag(100, "steps between evaluations on held-out text; 0 for only the last")
    seed: int = flag(0, "of weights, sample order and dropout")
    device: str = flag("auto", "auto is CUDA where there is one", ("auto", "cpu", "cuda"))

    def model_config(self) -> GPTConfig:
        """The preset with the flags that were given in its place. Raises ConfigError."""
        if self.model not in PRESETS:
            raise ConfigError(f"--model {self.model}: no such preset; there are {', '.join(PRESETS)}")
        fields = {f.name for f in dataclasses.fields(GPTConfig)} & {f.name for f in dataclasses.fields(self)}
        given = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        try:
            return GPTConfig(**{**PRESETS[self.model][0], **given})
        except ValueError as e:
            raise ConfigError(re.sub(rf"\b({'|'.join(sorted(fields))})\b", lambda m: "--" + m[1].replace("_", "-"), str(e))) from None

    def validate(self, world: int) -> None:
        """Everything that can be known before a process group exists. Raises ConfigError."""
        self.model_config()
        for name, least in (("global_batch_size", 1), ("steps", 1), ("warmup_steps", 0), ("save_every", 0), ("keep", 0), ("eval_every", 0),
                            ("seed", 0), ("lr", 0), ("min_lr", 0), ("weight_decay", 0), ("grad_clip", 0), ("micro_batch_size", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value < 2**31:         # NaN and infinity fail too
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {least} and below 2^31")
        if self.global_batch_size % world:
            low = self.global_batch_size // world * world
            raise ConfigError(f"--global-batch-size {self.global_batch_size}: must be divisible by the {world} data-parallel ranks; "
                              f"{f'{low} or ' if low else ''}{low + world} would fit")
        share, micro = self.global_batch_size // world, self.micro_batch_size
        if micro and share % micro:
            raise ConfigError(f"--micro-batch-size {micro}: must divide each rank's {share} sequences (--global-batch-size "
                              f"{self.global_batch_size} over {world} ranks); {divisors(share, micro)} would fit")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda: this machine has no usable CUDA device; --device cpu would run")


def parse(argv: list[str], rank: int) -> Config:
    """Configuration from flags. Only rank 0 says what is wrong."""
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            if rank == 0:
                print(f"train.py: {message}; --help lists the flags", file=sys.stderr)
            sys.exit(2)

    parser = Parser(description="Train a GPT.", allow_abbrev=False)
    for field in dataclasses.fields(Config):
        name, default = f"--{field.name.replace('_', '-')}", field.default_factory()
        help = field.metadata["help"] + ("" if default in (None, [], False) else f" (default: {default})")
        if field.type is bool:
            parser.add_argument(name, action="store_true", help=help)
        elif field.type == list[str]:
            parser.add_argument(name, nargs="+", default=default, help=help, metavar=field.metadata["metavar"])
        else:
            kind = field.type if isinstance(field.type, type) else field.type.__args__[0]          # int | None: int
            parser.add_argument(name, type=kind, default=default, help=help, choices=field.metadata["choices"],
                                metavar=field.metadata["metavar"] or (None if field.metadata["choices"] else kind.__name__.upper()))
    return Config(**vars(parser.parse_args(argv)))


# ---------------------------------------------------------------------------------------------------------------------

class Trainer:
    """The model of this rank and everything that one step changes. `dataset` has `batch(samples)` and `counted_tokens(samples)`."""

    def __init__(self, config: Config, device: torch.device, dp_group: dist.ProcessGroup | None):
        """dp_group: None on one device. Takes seconds for small models; no rank holds more than one whole parameter beside its own."""
        self.config, self.device, self.dp_group = config, device, dp_group
        self.model_config = config.model_config()
        self.dp, self.dp_rank = (dp_group.size(), dp_group.rank()) if dp_group else (1, 0)
        self.precision = config.precision or ("bf16" if device.type == "cuda" else "fp32")
        with torch.device("meta"):
            self.model = GPT(self.model_config)
        sharding.init(self.model, config.seed, device, DTYPES[self.precision])
        self.scaler = LossScaler() if self.precision == "fp16" else None
        self.gradients = fsdp.shard(self.model, dp_group, 0, self.scaler) if dp_group else GradientAccumulator(self.model, self.scaler)
        self.optimizer = AdamW(self.model.named_parameters(), config.weight_decay, clip=config.grad_clip, scaler=self.scaler)
        if config.compile:
            for block in self.model.blocks.values():
                block.compile()

    def samples(self, step: int) -> range:
        """The global batch of a step, counted from 1, as sample numbers."""
        return range((step - 1) * self.config.global_batch_size, step * self.config.global_batch_size)

    def forward_backward(self, step: int, dataset) -> torch.Tensor:
        """Leave the global batch's gradient in every `main_grad`. Returns this rank's part of the loss, a float64 scalar: the
        parts of all ranks add up to the mean over the counted tokens of the global batch."""
        samples = self.samples(step)
        count = max(1, dataset.counted_tokens(samples))
        share = len(samples) // self.dp
        mine = samples[self.dp_rank * share:(self.dp_rank + 1) * share]
        micro = self.config.micro_batch_size or share
        scale = self.scaler.scale if self.scaler else 1.0
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.gradients.zero()
        for start in range(0, share, micro):
            batch = dataset.batch(mine[start:start + micro]).to(self.device)
            if start + micro == share:
                self.gradients.last_backward()
            key = dropout_key(self.config.seed, step, batch.samples) if self.model_config.dropout else None
            losses = cross_entropy(self.model(batch.tokens, key), batch.labels)                     # [b, s]
            total = (losses * batch.loss_mask).sum()
            total.backward(torch.full_like(total, scale / count))
            loss += total.detach() / count
        self.gradients.reduce_gradients()
        return loss

    def update(self, step: int) -> tuple[float, float]:
        """Clip, then update. Returns (gradient norm before clipping, learning rate)."""
        c = self.config
        lr = learning_rate(step, c.lr, c.lr / 10 if c.min_lr is None else c.min_lr, c.warmup_steps, c.steps)
        return self.optimizer.step(lr), lr

    @torch.no_grad()
    def evaluate(self, dataset, sequences: int) -> float:
        """Mean loss per token over the first `sequences` samples of a held-out dataset."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        size = self.config.micro_batch_size or self.config.global_batch_size // self.dp
        for start in range(self.dp_rank * size, sequences, self.dp * size):
            batch = dataset.batch(range(start, min(start + size, sequences))).to(self.device)
            total += (cross_entropy(self.model(batch.tokens), batch.labels) * batch.loss_mask).sum()
        if self.dp_group:
            dist.all_reduce(total, group=self.dp_group)
        return total.item() / max(1, dataset.counted_tokens(range(sequences)))

    def save(self, folder: Path, step: int, tokens: int, corpus: str) -> None:
        checkpoint.save(folder, step, self.optimizer.tensors(), keep=self.config.keep, state={
            "tokens": tokens, "corpus": corpus, "optimizer": self.optimizer.state_dict(),
            "config": dataclasses.asdict(self.config), "model": dataclasses.asdict(self.model_config)})

    def load(self, path: Path) -> dict:
        """Continue from a checkpoint. Returns its index. Raises CheckpointError, naming the fields in which its model differs."""
        shape = {k: v for k, v in dataclasses.asdict(self.model_config).items() if k not in ("dropout", "attention")}
        index = checkpoint.load(path, self.optimizer.tensors(), shape)
        self.optimizer.weights_from_masters()
        try:
            self.optimizer.load_state_dict(index["optimizer"])
            return index | {"tokens": int(index["tokens"])}
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise checkpoint.CheckpointError(f"{path}/index.json lacks what training goes on from ({type(e).__name__}: {e})") from None


# ---------------------------------------------------------------------------------------------------------------------

def keep_freed_memory() -> None:
    """Tell glibc to keep large blocks when they are freed. By default each logits or gradient tensor is new memory from the kernel,
    zeroed page by page: a fifth of the time of a GPT-2 124M step on a CPU."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):                                    # another C library
        return
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, -1)


def check_out(config: Config) -> Path:
    """The run's folder. Raises ConfigError when it holds another run."""
    out = Path(config.out)
    if not config.resume and any((out / name).exists() for name in ("config.json", "metrics.jsonl", "checkpoints")):
        raise ConfigError(f"--out {out}: holds another run; continue it with --resume, or name another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".write-test").touch()
        (out / ".write-test").unlink()
    except OSError as e:
        raise ConfigError(f"--out {out}: cannot be written ({e.strerror})") from None
    return out


@dataclass
class World:
    """Who this process is among the ranks, and the groups that it talks to."""
    rank: int
    size: int
    local_rank: int                                                      # on this machine
    local_size: int
    device: torch.device | None = None
    dp_group: dist.ProcessGroup | None = None                            # None on one device

    @classmethod
    def from_launcher(cls) -> "World":
        """What torchrun says; without it, one rank."""
        return cls(*(int(os.environ.get(name, default)) for name, default in
                     (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))))

    def connect(self, device: str) -> None:
        """Choose the device, and with several ranks make the process groups: one mesh, from which everything else is handed groups."""
        if device != "cpu" and torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
            keep_freed_memory()
            if self.size > 1:
                torch.set_num_threads(self.cores)
        if self.size > 1:
            shared = self.device.type == "cpu" or self.local_size > torch.cuda.device_count()      # NCCL wants a device for each rank
            dist.init_process_group("gloo" if shared else "nccl", timeout=timedelta(minutes=30))
            self.dp_group = init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("dp",)).get_group("dp")

    @property
    def cores(self) -> int:
        """Processors for this rank."""
        return max(1, len(os.sched_getaffinity(0)) // self.local_size)

    def disconnect(self) -> None:
        """Everything that holds a group has to be gone by now: gloo aborts the process at exit otherwise, now and then."""
        self.dp_group = None
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()

    def gather(self, x) -> list:
        """Every rank's object, on every rank."""
        gathered = [x] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, x)
        return gathered

    def gather_numbers(self, *numbers: torch.Tensor | float) -> list[tuple]:
        """For each number, its values on all ranks: one small collective a step."""
        row = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=self.device) for n in numbers])
        rows = [torch.empty_like(row) for _ in range(self.size)] if self.size > 1 else [row]
        if self.size > 1:
            dist.all_gather(rows, row, group=self.dp_group)
        return list(zip(*(r.tolist() for r in rows)))

    def say(self, *words) -> None:
        if self.rank == 0:
            print(*words, flush=True)


def open_data(config: Config, world: World):
    """(tokenizer, training set, held-out set), the corpus tokenised first if need be. Raises ConfigError or DataError."""
    tokenizer, shape = data.make_tokenizer(config.tokenizer), config.model_config()
    if tokenizer.vocab_size > shape.vocab_size:
        raise ConfigError(f"--tokenizer {config.tokenizer}: its ids go up to {tokenizer.vocab_size - 1}, beyond --vocab-size "
                          f"{shape.vocab_size}; --vocab-size {tokenizer.vocab_size} would fit")
    folder = data.prepare(config.data, tokenizer, exchange=world.gather, rank=world.rank, world=world.size, workers=world.cores)
    return tokenizer, data.Corpus(folder, shape.seq_length, config.seed), data.Corpus(folder, shape.seq_length, None, "held-out")


def restore(trainer: Trainer, world: World, corpus: str) -> tuple[int, int]:
    """Continue from the newest checkpoint of `--out` if asked to. Returns (steps, tokens) behind us."""
    config = trainer.config
    found = checkpoint.steps(Path(config.out) / "checkpoints") if config.resume else {}
    if not found:
        if config.resume:
            world.say(f"--resume: no checkpoint in {config.out} yet, starting from step 1")
        return 0, 0
    index = trainer.load(list(found.values())[-1])
    changed = [f"--{k.replace('_', '-')} {index['config'].get(k)} -> {v}" for k, v in dataclasses.asdict(config).items()
               if index["config"].get(k) != v and k not in ("resume", "out")]
    changed += [f"corpus {index.get('corpus')} -> {corpus}"] if index.get("corpus") != corpus else []
    world.say(f"resuming after step {index['step']}" + (f", with {', '.join(changed)}" if changed else ""))
    return index["step"], index["tokens"]


def loop(trainer: Trainer, world: World, train_set, held_out, metrics: Metrics | None, start: int, tokens: int) -> bool:
    """Steps start + 1 to the last. Returns whether a signal to any rank ended it early, with a checkpoint. Raises RunError."""
    stop = []                                                            # signals: from here on there is something to save
    before = {number: signal.signal(number, lambda number, frame: stop.append(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    config, begin, step = trainer.config, time.perf_counter(), start
    out = Path(config.out)
    flops = flops_per_token(trainer.model_config)
    bytes_per_token = train_set.index["bytes"] / train_set.index["tokens"]
    profiler, first = torch.profiler.profile() if config.profile else None, min(start + 3, config.steps)
    try:
        for step in range(start + 1, config.steps + 1):
            if profiler and step == first:
                profiler.start()
            step_begin = time.perf_counter()
            part = trainer.forward_backward(step, train_set)
            norm, lr = trainer.update(step)
            losses, stops, peaks = world.gather_numbers(part, bool(stop), peak_memory(trainer.device))
            seconds, count, stopping = time.perf_counter() - step_begin, train_set.counted_tokens(trainer.samples(step)), any(stops)
            tokens += count
            line = {"step": step, "loss": sum(losses), "grad_norm": norm, "lr": lr, "tokens": tokens, "step_seconds": seconds,
                    "tokens_per_second": count / seconds, "tflops_per_device": count * flops / seconds / world.size / 1e12,
                    "peak_memory_bytes": int(max(peaks))}
            if trainer.scaler:
                line["loss_scale"] = trainer.scaler.scale
            if trainer.optimizer.skipped:
                line["skipped_steps"] = trainer.optimizer.skipped
            last = step == config.steps or stopping
            if step == config.steps or config.eval_every and step % config.eval_every == 0:
                line["eval_loss"] = trainer.evaluate(held_out, min(held_out.windows, EVAL_SEQUENCES))
            if metrics:
                metrics.add(line)
            world.say(progress(line, config.steps, (time.perf_counter() - begin) / (step - start) * (config.steps - step), bytes_per_token))
            if last or config.save_every and step % config.save_every == 0:
                trainer.save(out / "checkpoints", step, tokens, train_set.index["corpus"])
            if profiler and step >= first and (last or step == first + 2):
                profiler.stop()
                profiler.export_chrome_trace(str(out / f"trace-{world.rank}.json"))
                profiler = None
            if stopping:
                world.say(f"stopped by a signal after step {step}; checkpoint saved; continue with --resume")
                return True
    except checkpoint.CheckpointError as e:                              # the same on all ranks
        whole = list(checkpoint.steps(out / "checkpoints").values())
        raise RunError(f"after step {step}: {e}; " + (f"{whole[-1]} is whole; " if whole else "") + "make room, then continue with --resume",
                       everywhere=True) from None
    except Exception as e:
        raise RunError(f"rank {world.rank}, step {step}: {type(e).__name__}: {e}\n{traceback.format_exc()}"
                       f"train.py: rank {world.rank} failed in step {step}; continue from the newest checkpoint with --resume") from e
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return False


def run(config: Config, world: World) -> None:
    """One training run on this rank."""
    world.connect(config.device)
    tokenizer, train_set, held_out = open_data(config, world)
    trainer = Trainer(config, world.device, world.dp_group)
    out, metrics, corpus = Path(config.out), None, train_set.index["corpus"]
    start, tokens = restore(trainer, world, corpus)
    if world.rank == 0:
        (out / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1))
        if isinstance(tokenizer, data.FileTokenizer) and not (out / "tokenizer.json").exists():
            shutil.copyfile(config.tokenizer, out / "tokenizer.json")    # generate.py finds it there
        metrics = Metrics(out / "metrics.jsonl", start)
    world.say(f"{config.model}: {num_parameters(trainer.model):,} parameters, {trainer.precision} on {world.size} x {world.device.type}; "
              f"corpus {corpus} (Python {sys.version.split()[0]}): {train_set.index['tokens']:,} tokens")
    begin = time.perf_counter()
    stopped = loop(trainer, world, train_set, held_out, metrics, start, tokens)
    if world.rank == 0 and not stopped:
        seconds = time.perf_counter() - begin
        plot_loss(metrics.lines, f"{config.model}, corpus {corpus}, Python {sys.version.split()[0]}", out / "loss.png")
        prompt = [int(i) for i in tokenizer.encode("def ")]
        text = tokenizer.decode(prompt + list(generate.generate(trainer.model, prompt, 300, temperature=0.8, seed=config.seed, eot=tokenizer.eot)))
        (out / "sample.txt").write_text(text)
        world.say(f"\na sample (generate.py makes more):\n\n{text}\n\n{out}: loss.png, metrics.jsonl, sample.txt, checkpoints; "
                  f"{duration(seconds)} of training")


def main(argv: list[str]) -> int:
    """Exit status: 0; 2 for what cannot run, 1 for what fails while running, each with one message; 130 for Ctrl-C before the first step."""
    world = World.from_launcher()
    config = parse(argv, world.rank)
    status, message = 0, None
    try:
        config.validate(world.size)
        if world.rank == 0:
            check_out(config)
        run(config, world)
    except (ConfigError, data.DataError, checkpoint.CheckpointError) as e:
        status, message = 2, e
    except RunError as e:
        status, message = 1, e
    except KeyboardInterrupt:
        status = 130
    if message and (world.rank == 0 or status == 1 and not message.everywhere):
        print(f"train.py: {message}", file=sys.stderr, flush=True)
    if status == 1 and not message.everywhere and world.size > 1:
        os._exit(1)                                                      # peers may wait for this rank in a collective: no goodbye
    message = None                                                       # its traceback holds groups
    world.disconnect()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
