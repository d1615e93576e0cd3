"""The configuration of a run: a dataclass. Flags, `--help` and `config.json` are made from it.

RunConfig         what every type of training has: fields, defaults, help texts
pretraining.py    Config of train.py: it adds the text. finetune/ has the other types
flags.py          from the command line, a TOML file or an earlier run to a configuration
rules.py          which configuration can run; refused before any process group exists

python train.py --help
"""

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

import schedules
from base.errors import InputError
from base.model_config import CHOICES, ROUTER_NAMES, FieldError, MoEConfig
from optimizer import AdamW
from run import checkpoint
from run.presets import PRESETS, Recipe, default_lr, no_such

LAYOUT = tuple(
    "tp pp cp cp_kind ep ep_comm_overlap virtual_stages schedule layer_split sequence_parallel"
    " tp_comm_overlap zero_stage data_parallel_replicate_degree".split()
)
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    # float32 in memory; GPUs round what they multiply to 10 bits of mantissa.
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def multiply_in(precision: str | None, device: torch.device) -> None:
    """Let this process multiply float32 matrices in TF32, if that is a run's precision."""
    if precision == "tf32" and device.type == "cuda":
        torch.set_float32_matmul_precision("high")


class ConfigError(InputError):
    """A configuration that cannot run: the flag, its value, the rule and what would fit."""


def flag_name(field: str) -> str:
    """The flag of a field: num_layers -> --num-layers"""
    return "--" + field.replace("_", "-")


@contextlib.contextmanager
def as_flags(**others: str):
    """Turn a FieldError about num_heads into a ConfigError about --num-heads. others: fields whose
    flag has another name here."""
    try:
        yield
    except FieldError as e:
        raise ConfigError(e.message(lambda name: flag_name(others.get(name, name)))) from None


def flag(default, help, choices=None, metavar=None, names=(), least=None):
    """A field of a configuration. names: the names of its flag, where they are not the field's;
    least: its least value, if it is a number that depends on no other flag."""
    metadata = dict(help=help, choices=choices, metavar=metavar, names=names, least=least)
    return dataclasses.field(default_factory=lambda: default, metadata=metadata)


def name_of(command: str) -> str:
    """The file of a command: sft.py for -m finetune.sft; "" for no word."""
    word, *_ = command.removeprefix("-m ").split() or [""]
    if not word:
        return ""
    return word.rpartition("/")[2] if word.endswith(".py") else f"{word.rpartition('.')[2]}.py"


@dataclass
class RunConfig:
    """The flags of every command that trains. Each type of training extends it: by flags of its
    own, by other values of the attributes down to `supports_as_rank`, and by other answers of the
    methods at the end.
    """

    # How it is started, after python or torchrun; and what it does, for --help.
    command = "train.py"
    purpose = "Train a GPT."
    # Flags that do something only beside others, as in run/rules.py.
    needs = ()
    # Whether dropout is that of the preset or of --load; else it is 0 unless it is given.
    keeps_dropout = True
    # Rows that one micro-batch holds at least.
    least_rows = 1
    # Whether --as-rank can ask what a rank would do.
    supports_as_rank = False
    # The models that it trains (run/presets.py), and the class of their shapes.
    presets = PRESETS
    shape_class = MoEConfig
    # The optimizer, Adam's betas, the learning rate's decay, the steps of --fp8 delayed, a growing
    # batch: train.py has flags for them.
    optimizer, adam_beta1, adam_beta2, fp8_history = "adamw", 0.9, 0.95, 16
    lr_schedule, decay_steps, wsd_steps, rampup_batch_size = "cosine", None, None, None
    # Preset -> how it was pretrained, if not as run/presets.py says; "" for the others.
    recipes: ClassVar[dict[str, Recipe]] = {}

    # Model.
    model: str = flag("tiny", f"a preset: {', '.join(PRESETS)}", metavar="PRESET")
    num_layers: int | None = flag(
        None, "number of layers; a flag of the shape overrides the preset"
    )
    hidden_size: int | None = flag(None, "h, the size of an activation vector")
    num_heads: int | None = flag(None, "attention heads")
    num_kv_heads: int | None = flag(
        None, "key and value heads; fewer than heads is grouped-query attention", least=1
    )
    ffn_hidden_size: int | None = flag(None, "inner size of the MLP", least=1)
    seq_length: int | None = flag(None, "tokens in a sequence")
    vocab_size: int | None = flag(
        None, "at least the tokenizer's size; the default is the larger of preset and tokenizer"
    )
    head_dim: int | None = flag(None, "size of a head; 0: hidden size / heads, as in most presets")
    kv_rank: int | None = flag(
        None,
        "latent attention (DeepSeek): size of the latent of keys and values, which the cache keeps;"
        " 0: ordinary attention",
    )
    query_rank: int | None = flag(None, "the same of queries; 0: they are made from x")
    rope_head_dim: int | None = flag(None, "with --kv-rank: numbers of a head that are rotated")
    value_head_dim: int | None = flag(None, "with --kv-rank: size of a value; 0: --head-dim")
    norm: str | None = flag(None, "1p: it multiplies by 1 + weight (Gemma)", CHOICES["norm"])
    activation: str | None = flag(None, "of the MLP", CHOICES["activation"])
    positions: str | None = flag(None, "how a token knows its place", CHOICES["positions"])
    sliding_window: int | None = flag(None, "tokens that a token attends to, with itself; 0: all")
    dropout: float | None = flag(None, "probability in embedding, attention, residuals")
    # Experts.
    num_experts: int | None = flag(None, "experts (MLPs) in a layer with experts; 0: none")
    expert_every: int | None = flag(None, "experts in every n-th layer: 2 is every other layer")
    first_dense_layers: int | None = flag(None, "number of first layers without experts")
    expert_ffn_size: int | None = flag(None, "inner size of an expert; 0: --ffn-hidden-size")
    shared_ffn_size: int | None = flag(
        None, "inner size of an MLP for all tokens beside the experts (shared experts); 0: none"
    )
    router: str | None = flag(
        None,
        "sinkhorn balances by a transport plan, topk by a loss, bias by a bias of each expert",
        ROUTER_NAMES,
    )
    router_topk: int | None = flag(None, "experts that each token goes through")
    router_temperature: float | None = flag(
        None, "temperature of sinkhorn's plan, from 0.001 to 1; lower is more even; default: 0.02"
    )
    router_scale: float | None = flag(None, "factor of experts' outputs; the default is 1")
    bias_rate: float | None = flag(None, "of --router bias: change in a step; default: 0.001")
    expert_groups: int | None = flag(None, "groups of experts, for example one on each node")
    topk_groups: int | None = flag(None, "groups that each token uses, of --expert-groups")
    capacity_factor: float | None = flag(
        None, "limit of tokens per expert, over its even share; more are dropped; 0: no limit"
    )
    aux_loss: float | None = flag(None, "weight of the load-balancing loss; 0.01 with topk")
    z_loss: float | None = flag(
        None, "weight of the z-loss, which keeps a router's logits small; 0.001 with topk"
    )
    # Parallel.
    tp: int = flag(1, "tensor-parallel ranks: every matrix is split among them", least=1)
    sequence_parallel: bool = flag(
        False, "also split the tokens of norms, dropout and residuals over the --tp ranks"
    )
    tp_comm_overlap: bool = flag(
        False, "with it, send shards around a ring while matrices are multiplied"
    )
    pp: int = flag(1, "pipeline-parallel ranks: the layers are split among them", least=1)
    cp: int = flag(1, "context-parallel ranks: every sequence is split among them", least=1)
    cp_kind: str = flag(
        "ring",
        "ring: keys and values visit each rank; all-to-all: each rank has all tokens of some heads",
        ("ring", "all-to-all"),
    )
    virtual_stages: int = flag(
        1,
        "stages on each pipeline rank: several if interleaved, two under zb-v and dualpipe-v",
        least=1,
    )
    schedule: str | None = flag(
        None,
        "pipeline schedule; the default is 1f1b, or interleaved with virtual stages",
        tuple(schedules.NAMES),
    )
    layer_split: list[int] | None = flag(
        None,
        "layers of each stage: --pp times --virtual-stages numbers; default: even",
        metavar="N",
    )
    zero_stage: int = flag(
        0,
        "what data-parallel ranks shard: 1 optimizer state, 2 also gradients, 3 also parameters",
        (0, 1, 2, 3),
    )
    data_parallel_replicate_degree: int = flag(
        1,
        "groups of data-parallel ranks, for example nodes: each has all that --zero-stage shards",
        metavar="R",
        least=1,
    )
    ep: int = flag(1, "data-parallel ranks among which the experts are split", least=1)
    ep_comm_overlap: bool = flag(
        False,
        "run a forward and another micro-batch's backward in turns: while one sends tokens to"
        " experts, the other computes",
    )
    reduce_dtype: str | None = flag(
        None,
        "dtype of gradients summed over data-parallel ranks; the default is fp32",
        ("fp32", "bf16"),
    )
    # Memory, speed.
    recompute: str = flag(
        "none",
        "activations that backward computes again: explicit attention (selective) or layers (full)",
        ("none", "selective", "full"),
    )
    recompute_layers: int | None = flag(None, "recompute only the first n layers; default: all")
    head_chunk: int = flag(0, "compute logits for so many tokens at a time; 0: all")
    make_vocab_size_divisible_by: int | None = flag(
        None,
        "times --tp: pad embedding and head to a multiple; the default is 128 on GPUs, 1 on CPUs",
        least=1,
    )
    attention: str | None = flag(
        None,
        "fused never writes the s x s scores; it is the default where dropout is 0",
        CHOICES["attention"],
    )
    kernels: str = flag(
        "auto",
        "auto: operations of kernels.py: fused on a GPU, faster attention and GELU on a CPU",
        ("auto", "off"),
    )
    compile: bool = flag(False, "torch.compile each block")
    profile: bool = flag(False, "write OUT/trace-RANK.json of steps 3 to 5, for Perfetto")
    # Batch.
    global_batch_size: int = flag(16, "sequences in a step, over all ranks", least=1)
    micro_batch_size: int | None = flag(
        None, "sequences in a forward; the default is a rank's share, or 1 in a pipeline", least=1
    )
    # Optimizer.
    steps: int = flag(500, "number of the last step", least=1)
    lr: float | None = flag(
        None, "peak learning rate; the default is that of the model and of what is learned", least=0
    )
    min_lr: float | None = flag(
        None, "learning rate at the end of its decay; default: lr / 10", least=0
    )
    warmup_steps: int = flag(50, "steps of linear warmup", least=0)
    weight_decay: float = flag(0.1, "weight decay, of matrices only", least=0)
    grad_clip: float = flag(1.0, "largest global gradient norm; 0: no clipping", least=0)
    max_bad_steps: int = flag(
        50,
        "end the run with exit status 1 after so many steps in a row whose gradients are not finite"
        " (in fp16: at the lowest loss scale); 0: never. Meanwhile, no checkpoint is saved",
        least=0,
    )
    precision: str | None = flag(
        None,
        "of compute; the default is bf16 on CUDA and fp32 on CPUs (tf32: fp32, multiplied in TF32"
        " on GPUs; fp64: for tests)",
        ("fp32", "tf32", "bf16", "fp16", "fp64"),
    )
    fp8: str = flag(
        "off",
        "matrix multiplications of attention and MLP in FP8, with a scale for each tensor from its "
        "maximum now (current) or in the last steps (delayed), or one for each block (fp8.py)",
        ("off", "current", "delayed", "block"),
    )
    fp8_skip: int = flag(1, "first layers, and last layers, that are not in FP8", least=0)
    fp8_scales: str = flag(
        "power-of-two",
        "FP8 scales: rounded down to a power of two, or any number",
        ("power-of-two", "any"),
    )
    fp8_keep_bytes: bool = flag(
        False,
        "with --zero-stage 3: keep the bytes of whole weights for a step, instead of making them"
        " anew for each product (2 bytes for each parameter in FP8)",
    )
    fp8_block: int = flag(128, "size of a block with --fp8 block; GPUs multiply 128 only", least=1)
    optimizer_state: str = flag(
        "fp32",
        "bf16: both moments in bf16, and only the low half of a bf16 weight's master: 8 bytes per"
        " parameter instead of 14",
        ("fp32", "bf16"),
    )
    # Data.
    tokenizer: str | None = flag(
        None,
        "bytes, gpt2, or a file of the tokenizers library; default: bytes, or that of --load",
        metavar="{bytes,gpt2,FILE}",
    )
    # Run.
    out: str = flag("runs/default", "folder of this run", metavar="DIR")
    save_every: int = flag(200, "steps between checkpoints; 0: only the last step", least=0)
    keep: int = flag(2, "how many checkpoints remain; 0: all", least=0)
    resume: bool = flag(
        False,
        "continue from the newest checkpoint in OUT, as ranks that torchrun restarts do. Flags that"
        " are not given come from OUT/config.json (of the layout all or none)",
    )
    load: str | None = flag(
        None,
        "start from the weights and shape of this checkpoint or run; with --resume, only where OUT"
        " has no checkpoint",
        metavar="CKPT",
    )
    eval_every: int = flag(100, "steps between evaluations; 0: only the last step", least=0)
    seed: int = flag(0, "random seed of weights, sample order and dropout", least=0)
    log_every: int = flag(
        1, "steps between lines on the screen; metrics.jsonl has every step", least=1
    )
    plan: str | None = flag(
        None,
        "print the step time that planner.py predicts for a100, h100, h200 or a machine's file"
        " (docs/planning.md); auto: this GPU's name, or ./machine.json",
        metavar="MACHINE",
    )
    tensorboard: bool = flag(False, "write OUT/tensorboard too (pip install tensorboard)")
    timeout: float = flag(1800.0, "seconds without progress that end a hanging run", least=1)
    device: str = flag("auto", "auto: CUDA where there is one", ("auto", "cpu", "cuda"))

    # --- what follows from the fields

    def model_config(self) -> MoEConfig:
        """The preset's shape, or with --load the checkpoint's, and the flags over it.

        Raises ConfigError or CheckpointError.
        """
        if self.model not in self.presets:
            raise ConfigError(f"--model {self.model}: {no_such(self.model, self.presets)}")
        shape = self.start_shape()
        if not self.keeps_dropout:
            shape = shape | {"dropout": 0.0}
        names = [field.name for field in dataclasses.fields(self.shape_class)]
        given = {n: getattr(self, n) for n in names if getattr(self, n, None) is not None}
        if "rotary_scaling" in given:
            # Another scaling has another limit of turns.
            shape = shape | {"rotary_high_frequency": 0.0}
        if "router" in given:
            before = shape.get("router") if self.load and shape.get("num_experts") else self.router
            if before != self.router and "bias" in (before, self.router):
                rule = f"only a router bias has biases to load, and {self.load} is of a model with"
                self.refuse("router", f"{rule} {before}, which would fit")
            # Another router has other losses.
            shape = {k: v for k, v in shape.items() if k not in ("aux_loss", "z_loss")}
        with as_flags():
            try:
                return self.shape_class(**shape | given)
            except TypeError as e:
                rule = f"does not describe a model of this project ({e})"
                raise ConfigError(f"--load {self.load}: {rule}") from None

    def start_shape(self) -> dict:
        """The fields of the preset, or of --load. Raises CheckpointError."""
        if not self.load:
            return self.presets[self.model][0]
        index = checkpoint.read_model(self.base(), self.value_head, self.shape_class)[1]
        return index["model"] | {"attention": "", "mtp_layers": 0}

    def base(self) -> Path:
        """The checkpoint that --load names. If it is gone, a resumed run of a whole model finds the
        shape in its own checkpoints. Raises CheckpointError."""
        try:
            return checkpoint.find(self.load)
        except checkpoint.CheckpointError as e:
            own = Path(self.out) / "checkpoints"
            if self.resume and not self.frozen and (found := checkpoint.steps(own)):
                return list(found.values())[-1]
            raise checkpoint.CheckpointError(f"--load {e}") from None

    def micro_batch(self, dp: int) -> int:
        """Sequences in one forward pass of one of `dp` data-parallel ranks."""
        if self.micro_batch_size:
            return self.micro_batch_size
        sizes = self.batch_sizes
        return self.least_rows if self.pp > 1 else math.gcd(sizes.start, sizes.step) // dp

    @property
    def batch_sizes(self) -> range:
        """The sequences of a step: each size of --rampup-batch-size, then --global-batch-size."""
        last = self.global_batch_size
        start, increment, _ = self.rampup_batch_size or (last, last, 0)
        return range(start, last + 1, increment)

    def pipeline_lists(self, m: int) -> schedules.Schedule:
        """The pipeline's schedule of m micro-batches."""
        sizes = self.pp, m, self.virtual_stages, self.ep_comm_overlap
        return schedules.cached(self.pipeline_schedule, *sizes)

    @property
    def mesh(self) -> dict[str, int | bool]:
        """The arguments of Groups.make."""
        replicate = self.data_parallel_replicate_degree
        sizes = dict(tp=self.tp, pp=self.pp, ep=self.ep, cp=self.cp, replicate=replicate)
        return sizes | dict(v_shaped=self.placement.v_shaped)

    @property
    def placement(self) -> schedules.Placement:
        """Which pipeline rank has which stage."""
        return schedules.placement_of(self.pipeline_schedule, self.pp, self.virtual_stages)

    @property
    def length_multiple(self) -> int:
        """What must divide the sequence length: context parallelism cuts a sequence into 2 cp
        pieces, and sequence parallelism those of a rank into tp."""
        return (2 * self.cp if self.cp > 1 else 1) * self.sequence_shards

    @property
    def sequence_shards(self) -> int:
        """The number of shards into which sequence parallelism cuts the tokens of a rank."""
        return self.tp if self.sequence_parallel else 1

    @property
    def fp8_recipe(self) -> tuple[str, bool, int, int] | None:
        """The arguments of fp8.Recipe, or None."""
        if self.fp8 == "off":
            return None
        return self.fp8, self.fp8_scales == "power-of-two", self.fp8_block, self.fp8_history

    @property
    def keeps_bytes(self) -> bool:
        """Whether weights in FP8 are kept as bytes for a whole step."""
        return self.zero_stage < 3 or self.fp8_keep_bytes

    @property
    def peak_lr(self) -> float:
        """--lr or its default."""
        return self.default_lr()[0] if self.lr is None else self.lr

    @property
    def adam(self) -> tuple[float, tuple[float, float]]:
        """(weight decay, betas) of optimizer.AdamW."""
        return self.weight_decay, (self.adam_beta1, self.adam_beta2)

    @property
    def optimizer_class(self) -> type[AdamW]:
        if self.optimizer == "adamw":
            return AdamW
        from run.muon import Muon

        return Muon

    @property
    def rates(self) -> tuple:
        """The arguments of optimizer.learning_rate after the step."""
        end = self.decay_steps or self.steps
        lowest = self.peak_lr / 10 if self.min_lr is None else self.min_lr
        shape = end, self.lr_schedule, self.wsd_steps or max(1, end // 10)
        return self.peak_lr, lowest, self.warmup_steps, *shape

    @property
    def pipeline_schedule(self) -> str:
        return self.schedule or ("interleaved" if self.virtual_stages > 1 else "1f1b")

    def refuse(self, field: str, rule: str):
        """Raise ConfigError with the field's flag, its value, and a rule that says what would
        fit."""
        value = getattr(self, field)
        values = [] if value is True else value if isinstance(value, list) else [value]
        raise ConfigError(f"{' '.join([flag_name(field), *map(str, values)])}: {rule}")

    # --- what a type of training changes

    @classmethod
    def name_in_messages(cls) -> str:
        """The file of the command, with which each message begins."""
        return name_of(cls.command)

    def task(self):
        """What is learned: a run.task.Task. Raises InputError."""
        raise NotImplementedError

    def check(self, model: MoEConfig, world: int, base_needed: bool) -> None:
        """Check the rules of this type alone, after those of every run. Arguments as in
        rules.validate. Raises ConfigError."""

    @property
    def value_head(self) -> bool:
        """Whether the model gives a number for each token in the place of logits."""
        return False

    @property
    def frozen(self) -> bool:
        """Whether the weights of --load stay as they are, and are not in the run's checkpoints."""
        return False

    @property
    def unpredicted(self) -> str:
        """Why --plan cannot predict a step; "": it can."""
        return ""

    def num_ids(self, tokenizer) -> int:
        """How many token ids the data may have."""
        return tokenizer.vocab_size

    def default_lr(self) -> tuple[float, str]:
        """(the default of --lr, words that say for what)"""
        return default_lr(self)

    def bytes_beside(self, model: MoEConfig, precision: str, ranks: dict, learner: int) -> int:
        """Bytes of the models beside the one that learns, whose state has `learner` bytes. ranks:
        as in least_memory.state_parts."""
        return 0

    def known_micro_batch(self, dp: int) -> int:
        """The sequences that a rank holds at once, as far as known before the data is read."""
        return self.micro_batch(dp)


MODEL_FLAGS = {f.name for f in dataclasses.fields(MoEConfig)} & {
    f.name for f in dataclasses.fields(RunConfig)
}
