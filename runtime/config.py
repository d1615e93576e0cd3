"""The configuration of a run: one dataclass, from which the flags, `--help` and `config.json` are
made.

A configuration that cannot run is refused before any process group exists: one message, naming the
flag, its value, the rule and what would fit. Each technique knows its own rules
(`tensor_parallel.check`, ...); here they are asked.

    python train.py --help
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
import moe
import pipeline_parallel
import recompute
import schedules
import sequence_parallel
import tensor_parallel
from gpt import EXPERT_FIELDS, PRESETS, GPTConfig, divisors
from prompts import prompt_data
from runtime import json_files, terminal

# Of a step. Far beyond what anybody trains with, and few enough to be numbered in an instant.
MOST_SEQUENCES = 2**20
LAYOUT = (
    "tp",
    "pp",
    "ep",
    "virtual_stages",
    "schedule",
    "layer_split",
    "sequence_parallel",
    "zero_stage",
)
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class ConfigError(ValueError):
    """A configuration that cannot run: the flag, its value, the rule and what would fit."""


def flag(default, help, choices=None, metavar=None):
    return dataclasses.field(
        default_factory=lambda: default,
        metadata={"help": help, "choices": choices, "metavar": metavar},
    )


@dataclass
class Config:
    # model
    model: str = flag("tiny", f"a preset: {', '.join(PRESETS)}", metavar="PRESET")
    num_layers: int | None = flag(
        None, "number of layers; this and the flags down to --z-loss replace the preset's values"
    )
    hidden_size: int | None = flag(None, "h")
    num_heads: int | None = flag(None, "attention heads")
    num_kv_heads: int | None = flag(None, "fewer than heads: grouped-query attention")
    ffn_hidden_size: int | None = flag(None, "inner size of the MLP")
    seq_length: int | None = flag(None, "tokens in a sequence")
    vocab_size: int | None = flag(
        None,
        "at least the tokenizer's; where the preset's is smaller, the default is the tokenizer's",
    )
    dropout: float | None = flag(
        None, "probability, at embedding, attention and both residual branches"
    )
    # experts
    num_experts: int | None = flag(
        None, "MLPs in a layer with experts, of which each token goes through some; 0: none"
    )
    expert_every: int | None = flag(
        None, "every so many layers, the last of them has experts: 2 is every other layer"
    )
    router: str | None = flag(
        None, "sinkhorn balances each micro-batch by a plan; topk by a loss", ("sinkhorn", "topk")
    )
    router_topk: int | None = flag(None, "experts that a token goes through")
    router_temperature: float | None = flag(
        None,
        "of sinkhorn's plan, from 0.001 to 1: the lower, the evener the load; 0.02 unless told, 1"
        " is Megatron-LM's",
    )
    capacity_factor: float | None = flag(
        None,
        "an expert takes so many times its even share of a micro-batch, and the rest of its tokens"
        " is dropped; 0: all are taken",
    )
    aux_loss: float | None = flag(
        None,
        "coefficient of the load-balancing loss; the default is 0.01 with topk, 0 with sinkhorn",
    )
    z_loss: float | None = flag(
        None, "coefficient of the router's z-loss; the default is 0.001 with topk, 0 with sinkhorn"
    )
    # parallel
    tp: int = flag(
        1,
        "tensor-parallel ranks: every matrix is cut over so many; the other ranks are data"
        " parallel",
    )
    sequence_parallel: bool = flag(
        False, "cut what tensor parallelism leaves whole along the sequence"
    )
    pp: int = flag(1, "pipeline-parallel ranks: the layers are cut over so many")
    virtual_stages: int = flag(
        1, "chunks of layers on each pipeline rank; more than one is for interleaved"
    )
    schedule: str | None = flag(
        None,
        "of the pipeline; the default is 1f1b, or interleaved with virtual stages",
        tuple(schedules.NAMES),
    )
    layer_split: list[int] | None = flag(
        None,
        "layers of each stage (pp times virtual stages numbers); the default is an even split",
        metavar="N",
    )
    zero_stage: int = flag(
        0,
        "what data-parallel ranks shard: optimizer state (1), and gradients (2), and"
        " parameters (3)",
        (0, 1, 2, 3),
    )
    ep: int = flag(1, "expert-parallel ranks: so many of the data-parallel ranks share the experts")
    reduce_dtype: str | None = flag(
        None,
        "of gradients while they are summed over data-parallel ranks; the default is fp32",
        ("fp32", "bf16"),
    )
    # memory, speed
    recompute: str = flag(
        "none",
        "what backward computes again instead of keeping: explicit attention (selective) or whole"
        " layers (full)",
        ("none", "selective", "full"),
    )
    recompute_layers: int | None = flag(None, "only the first so many layers; the default is all")
    attention: str | None = flag(
        None,
        "fused never writes the s x s scores; the default where dropout is 0",
        ("explicit", "fused"),
    )
    kernels: str = flag(
        "auto",
        "auto: fused CUDA operations where the device has them (kernels.py)",
        ("auto", "off"),
    )
    compile: bool = flag(False, "torch.compile each block")
    profile: bool = flag(
        False,
        "write OUT/trace-RANK.json for chrome://tracing or Perfetto, the third step to the fifth",
    )
    # batch
    global_batch_size: int = flag(16, "sequences in a step, over all ranks")
    micro_batch_size: int | None = flag(
        None, "sequences in one forward; the default is a rank's whole share, or 1 in a pipeline"
    )
    # optimizer
    steps: int = flag(500, "the last step")
    lr: float = flag(3e-3, "peak learning rate")
    min_lr: float | None = flag(None, "where the cosine ends; the default is lr / 10")
    warmup_steps: int = flag(50, "steps of linear warmup")
    weight_decay: float = flag(0.1, "on matrices only")
    grad_clip: float = flag(1.0, "largest global gradient norm; 0 for none")
    max_bad_steps: int = flag(
        50,
        "the run ends with exit status 1 after so many steps in a row whose gradients were not"
        " finite, with fp16 once the loss scale cannot fall; 0: never. Meanwhile a save waits for"
        " the next good step, and no older checkpoint is removed",
    )
    precision: str | None = flag(
        None,
        "of compute; the default is bf16 on CUDA and fp32 on CPUs (fp64: for tests)",
        ("fp32", "bf16", "fp16", "fp64"),
    )
    optimizer_state: str = flag(
        "fp32",
        "bf16: both moments in bf16, and of a bf16 weight's master only the low half; 8 bytes a"
        " parameter instead of 14",
        ("fp32", "bf16"),
    )
    # data
    data: list[str] = flag(
        [],
        "text files, .jsonl files with a text field, either gzipped, or folders; or corpora with"
        " weights, as 0.7:A 0.3:B; the last twentieth is held out; the default is Python's library",
        metavar="PATH",
    )
    val_data: list[str] = flag(
        [],
        "text to evaluate on, named as with --data; then nothing of --data is held out, and all of"
        " it is trained on",
        metavar="PATH",
    )
    cache: str = flag(
        "cache",
        "the folder of tokenized text, kept for other runs on the same text; it may be deleted,"
        " moved or shared",
        metavar="DIR",
    )
    tokenizer: str | None = flag(
        None,
        "bytes, gpt2, or a JSON file of the tokenizers library; the default is bytes, or with"
        " --load the checkpoint's",
        metavar="{bytes,gpt2,FILE}",
    )
    # run
    out: str = flag("runs/default", "the folder of this run", metavar="DIR")
    save_every: int = flag(200, "steps between checkpoints; 0 for only the last")
    keep: int = flag(2, "how many checkpoints remain; 0 for all")
    resume: bool = flag(
        False,
        "go on from the newest checkpoint in OUT, if there is one, with the flags in"
        " OUT/config.json where none are given (of the layout, tp to zero-stage, all or none);"
        " ranks that torchrun starts again do so anyway",
    )
    prompt_config: str | None = flag(
        None,
        "a JSON file with NeMo's names (prompt_tuning.py): learn prompts for the model that --load"
        " names, which stays as it is",
        metavar="FILE",
    )
    load: str | None = flag(
        None,
        "start from the weights of this checkpoint or run, and its shape: what huggingface.py"
        " imported, for example; with --resume, only where OUT has no checkpoint",
        metavar="CKPT",
    )
    eval_every: int = flag(100, "steps between evaluations on held-out text; 0 for only the last")
    sample_prompt: str = flag(
        "def ",
        "what the sample at the end of training continues, at most the context's last tokens of it;"
        " an empty one begins a new text",
        metavar="TEXT",
    )
    seed: int = flag(0, "of weights, sample order and dropout")
    log_every: int = flag(
        1,
        "steps between lines on the screen, where each evaluation has one too; metrics.jsonl has"
        " every step",
    )
    tensorboard: bool = flag(
        False, "write curves for TensorBoard to OUT/tensorboard too (pip install tensorboard)"
    )
    timeout: float = flag(
        1800.0, "seconds without progress after which a run in which a rank hangs is ended"
    )
    device: str = flag("auto", "auto is CUDA where there is one", ("auto", "cpu", "cuda"))

    def model_config(self) -> GPTConfig:
        """The preset, or with --load the checkpoint's model, with the flags that were given in its
        place. Raises ConfigError or CheckpointError."""
        if self.model not in PRESETS:
            raise ConfigError(
                f"--model {self.model}: no such preset; there are {', '.join(PRESETS)}"
            )
        given = {
            name: getattr(self, name) for name in MODEL_FLAGS if getattr(self, name) is not None
        }
        shape = PRESETS[self.model][0]
        if self.load:
            path = self.base()
            shape = (
                checkpoint.read_model(path)[1]["model"]
                | {"attention": ""}
                | ({"dropout": 0.0} if self.prompt_config else {})
            )
        # another router has other losses
        if "router" in given:
            shape = {k: v for k, v in shape.items() if k not in ("aux_loss", "z_loss")}
        with as_flags():
            try:
                return GPTConfig(**{**shape, **given})
            except TypeError as e:
                raise ConfigError(
                    f"--load {self.load}: does not describe a model of this project ({e})"
                ) from None

    def base(self) -> Path:
        """The checkpoint that --load names. A run that goes on has the model's shape in its own
        checkpoints too, where the base is gone. Raises CheckpointError."""
        try:
            return checkpoint.find(self.load)
        except checkpoint.CheckpointError as e:
            own = (
                checkpoint.steps(Path(self.out) / "checkpoints")
                if self.resume and not self.prompt_config
                else {}
            )
            if own:
                return list(own.values())[-1]
            raise checkpoint.CheckpointError(f"--load {e}") from None

    def micro_batch(self, dp: int) -> int:
        """Sequences in one forward: a rank's whole share, or 1 in a pipeline, unless told
        otherwise."""
        return self.micro_batch_size or (1 if self.pp > 1 else self.global_batch_size // dp)

    @property
    def pipeline_schedule(self) -> str:
        return self.schedule or ("interleaved" if self.virtual_stages > 1 else "1f1b")

    def validate(self, world: int) -> None:
        """Everything that can be known before a process group exists. world: how many ranks. Raises
        ConfigError."""
        self.check_types()
        model = self.model_config()
        self.check_numbers()
        if world == 1 and self.tp * self.pp * self.ep > 1:
            name = next(name for name in ("tp", "pp", "ep") if getattr(self, name) > 1)
            raise ConfigError(
                f"--{name} {getattr(self, name)}: this is one rank alone; start several with"
                f" torchrun --nproc-per-node {self.tp * self.pp * self.ep} train.py ..., or give"
                f" --{name} 1"
            )
        if world % self.tp:
            fit = divisors(tensor_parallel.sizes_that_fit(model, world), self.tp)
            raise ConfigError(f"--tp {self.tp}: must divide the {world} ranks; {fit} would fit")
        if world // self.tp % self.pp:
            raise ConfigError(
                f"--pp {self.pp}: must divide the {world} ranks over --tp {self.tp};"
                f" {divisors(world // self.tp, self.pp)} would fit"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError(
                "--sequence-parallel: cuts what tensor parallelism leaves whole, and needs --tp 2"
                " or more"
            )
        if (self.virtual_stages > 1 and (self.schedule or "interleaved") != "interleaved") or (
            self.virtual_stages > 1 and self.pp == 1
        ):
            raise ConfigError(
                f"--virtual-stages {self.virtual_stages}: only --schedule interleaved, under --pp 2"
                " or more, has more than 1"
            )
        for name in ("schedule", "layer_split"):
            if getattr(self, name) and self.pp == 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: needs --pp 2 or more"
                )
        with as_flags():
            recompute.check(model, self.recompute, self.recompute_layers)
            tensor_parallel.check(model, self.tp, world)
            if self.sequence_parallel:
                sequence_parallel.check(model, self.tp)
            pipeline_parallel.layer_split(
                model.num_layers, self.pp, self.virtual_stages, self.layer_split
            )
        dp = world // self.tp // self.pp
        for name in EXPERT_FIELDS:
            if getattr(self, name) is not None and not model.num_experts:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: this model has no experts;"
                    " --num-experts 8, for example, would give it some"
                )
        with as_flags():
            moe.check(model, self.ep, dp)
        if self.global_batch_size % dp:
            low = self.global_batch_size // dp * dp
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size}: must be divisible by the {dp}"
                f" data-parallel ranks; {f'{low} or ' if low else ''}{low + dp} would fit"
            )
        share = self.global_batch_size // dp
        micro = self.micro_batch(dp)
        if share % micro:
            raise ConfigError(
                f"--micro-batch-size {micro}: must divide each rank's {share} sequences"
                f" (--global-batch-size {self.global_batch_size} over {dp} data-parallel ranks);"
                f" {divisors(share, micro)} would fit"
            )
        if (
            model.num_experts
            and model.router == "sinkhorn"
            and micro * model.seq_length < model.num_experts
        ):
            raise ConfigError(
                f"--num-experts {model.num_experts}: more than the {micro * model.seq_length}"
                " tokens of a micro-batch, among which no plan of --router sinkhorn is even; fewer"
                " experts, a larger --micro-batch-size or --router topk would do"
            )
        # sequences in p micro-batches of every pipeline
        group = self.pp * micro * dp
        if self.pipeline_schedule == "interleaved" and self.global_batch_size % group:
            low = self.global_batch_size // group * group
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size}: makes {share // micro}"
                " micro-batches for each pipeline, and interleaved needs a multiple of --pp"
                f" {self.pp}; {f'{low} or ' if low else ''}{low + group} would fit"
            )
        if self.prompt_config:
            self.validate_prompts()
        if self.optimizer_state == "bf16" and self.precision == "fp16":
            raise ConfigError(
                "--optimizer-state bf16: the upper half of an fp32 master is a bf16 number;"
                " --precision bf16 would fit, or --optimizer-state fp32"
            )
        if self.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "--tensorboard: needs the package tensorboard (pip install tensorboard)"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "--device cuda: this machine has no usable CUDA device; --device cpu would run"
            )

    def check_numbers(self) -> None:
        """Ranges that no other flag decides. Raises ConfigError."""
        for name, least in (
            ("global_batch_size", 1),
            ("steps", 1),
            ("log_every", 1),
            ("num_kv_heads", 1),
            ("ffn_hidden_size", 1),
            ("warmup_steps", 0),
            ("save_every", 0),
            ("keep", 0),
            ("eval_every", 0),
            ("seed", 0),
            ("lr", 0),
            ("min_lr", 0),
            ("max_bad_steps", 0),
            ("weight_decay", 0),
            ("grad_clip", 0),
            ("micro_batch_size", 1),
            ("tp", 1),
            ("pp", 1),
            ("virtual_stages", 1),
            ("ep", 1),
            ("timeout", 1),
        ):
            value = getattr(self, name)
            # NaN and infinity fail too
            if value is not None and not least <= value < 2**31:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {value}: must be at least {least} and below 2^31"
                )
        if self.global_batch_size > MOST_SEQUENCES:
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size}: must be at most {MOST_SEQUENCES:,}"
                " sequences; published runs take some thousands"
            )
        if self.min_lr is not None and self.min_lr > self.lr:
            raise ConfigError(
                f"--min-lr {self.min_lr}: must be at most --lr {self.lr}, from which the cosine"
                " comes down"
            )

    def check_types(self) -> None:
        """What the command line's parser has checked already, for flags that come from a file.
        Raises ConfigError."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            try:
                json_files.convert(value, field.type, "")
            except json_files.JSONError as e:
                raise ConfigError(f"--{field.name.replace('_', '-')} {value!r}{e}") from None
            choices = field.metadata["choices"]
            if value is not None and choices and value not in choices:
                raise ConfigError(
                    f"--{field.name.replace('_', '-')} {value}: must be one of"
                    f" {', '.join(map(str, choices))}"
                )
            if value == "" and field.name != "sample_prompt":
                raise ConfigError(
                    f"--{field.name.replace('_', '-')} '': is empty; leave it out for the default"
                )
            words = value if isinstance(value, list) else [value]
            if any(isinstance(word, str) and not is_text(word) for word in words):
                raise ConfigError(
                    f"--{field.name.replace('_', '-')} {value!r}: has bytes that are not UTF-8"
                    " text, or a zero byte"
                )

    def validate_prompts(self) -> None:
        if prompt_data.PromptConfig.read(self.prompt_config).virtual_prompt_style == "inference":
            raise ConfigError(
                f"--prompt-config {self.prompt_config}: virtual_prompt_style inference learns"
                " nothing; p-tuning, prompt-tuning and fine-tuning do"
            )
        if self.data or self.val_data:
            raise ConfigError(
                f"--{'data' if self.data else 'val-data'} {' '.join(self.data or self.val_data)}:"
                " prompts are learned from what data.train_ds in --prompt-config names"
            )
        if not self.load:
            raise ConfigError(
                f"--prompt-config {self.prompt_config}: for which model? --load CKPT names it"
            )


MODEL_FLAGS = {f.name for f in dataclasses.fields(GPTConfig)} & {
    f.name for f in dataclasses.fields(Config)
}


@contextlib.contextmanager
def as_flags():
    """What a technique says about its fields becomes a ConfigError about flags: num_heads 5 ->
    --num-heads 5."""
    names = sorted(
        MODEL_FLAGS
        | {"tp", "pp", "ep", "virtual_stages", "recompute", "recompute_layers", "layer_split"}
    )
    try:
        yield
    except ValueError as e:
        raise ConfigError(
            re.sub(rf"\b({'|'.join(names)})\b", lambda m: "--" + m[1].replace("_", "-"), str(e))
        ) from None


def is_text(word: str) -> bool:
    try:
        return b"\0" not in word.encode("utf-8")
    except UnicodeEncodeError:
        return False


def parse(argv: list[str], rank: int) -> Config:
    """The configuration: flags, over `--config FILE`, over OUT/config.json with --resume, over the
    defaults. Raises ConfigError for a file; for flags that argparse refuses, SystemExit with status
    2, said by rank 0 alone."""
    given = vars(make_parser(rank).parse_args(argv))
    values = read_toml(given.pop("config")) if "config" in given else {}
    values |= given
    out = values.get("out", Config().out)
    # Other types than text are refused by `Config.validate`.
    if values.get("resume") is True and isinstance(out, str):
        saved = saved_flags(Path(out))
        if not saved and set(values) <= {"resume", "out"}:
            raise ConfigError(
                f"--resume --out {out}: there is no run in this folder to go on with; give the"
                " flags of one to begin it here"
            )
        # Another layout is given whole: --tp 4 does not keep the --pp 2 that the run had.
        if any(name in values for name in LAYOUT):
            saved = {name: value for name, value in saved.items() if name not in LAYOUT}
        values = saved | values
    try:
        return Config(**values)
    except TypeError as e:
        raise ConfigError(f"--config: {e}") from None


def make_parser(rank: int) -> argparse.ArgumentParser:
    """Flags from the fields of Config. A flag that is not given is not in the result."""

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            if rank == 0:
                terminal.say(f"train.py: {message}; --help lists the flags", error=True)
            terminal.let_rank_0_speak(rank)
            sys.exit(2)

    parser = Parser(
        description="Train a GPT.", allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file of flags (num-layers = 4); the command line's flags go over it",
    )
    for field in dataclasses.fields(Config):
        name = f"--{field.name.replace('_', '-')}"
        default = field.default_factory()
        help = field.metadata["help"] + (
            "" if default in (None, [], False) else f" (default: {default})"
        )
        if field.type is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, help=help)
        elif field.type in (list[str], list[int] | None):
            parser.add_argument(
                name,
                nargs="+",
                type=str if field.type == list[str] else int,
                help=help,
                metavar=field.metadata["metavar"],
            )
        else:
            # int | None: int
            kind = field.type if isinstance(field.type, type) else field.type.__args__[0]
            parser.add_argument(
                name,
                type=kind,
                help=help,
                choices=field.metadata["choices"],
                metavar=field.metadata["metavar"]
                or (None if field.metadata["choices"] else kind.__name__.upper()),
            )
    return parser


def read_toml(path: str) -> dict:
    """Flags from a TOML file, as fields of Config; tables only group them. Raises ConfigError."""
    try:
        content = tomllib.loads(json_files.read_bytes(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"--config {path}: {getattr(e, 'strerror', None) or e}") from None
    flat = []
    for key, value in content.items():
        flat += value.items() if isinstance(value, dict) else [(key, value)]
    fields = {name.replace("-", "_"): value for name, value in flat}
    if len(fields) < len(flat):
        names = [name.replace("_", "-") for name, _ in flat]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"--config {path}: {twice} stands there twice")
    # data = "text.txt" is the list of one file.
    fields |= {
        name: [fields[name]] for name in ("data", "val_data") if isinstance(fields.get(name), str)
    }
    unknown = [name for name in fields if name not in {f.name for f in dataclasses.fields(Config)}]
    if unknown:
        raise ConfigError(
            f"--config {path}: {unknown[0].replace('_', '-')} is no flag; --help lists the flags"
        )
    return fields


def saved_flags(out: Path) -> dict:
    """The flags of the run in a folder, {} where there is none. Raises ConfigError."""
    try:
        if not (out / "config.json").exists():
            return {}
        saved = json_files.read(out / "config.json", dict)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"--resume: {getattr(e, 'strerror', None) or e}; to go on all the same, delete"
            f" {out}/config.json and give the flags of the run"
        ) from None
    # Of another version of this project there may be flags that this one does not have.
    known = {field.name: field for field in dataclasses.fields(Config)}
    return {
        name: value
        for name, value in saved.items()
        if name in known and name not in ("resume", "out")
    }
