"""The configuration of a run: one dataclass. Flags, `--help` and `config.json` are made from it.

Config            the fields, their defaults and help texts
flags.py          from the command line, a TOML file or an earlier run to a Config
rules.py          which Config can run; refused before any process group exists

python train.py --help
"""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
import schedules
from model_config import FieldError
from precision.fp8_scaling import Recipe
from routers import ROUTER_NAMES, MoEConfig
from run import learning_rates
from run.presets import PRESETS

LAYOUT = (
    "tp",
    "pp",
    "cp",
    "cp_kind",
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
    # float32 in memory; GPUs round what they multiply to 10 bits of mantissa
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def multiply_in(precision: str | None, device: torch.device) -> None:
    """Have this process multiply float32 matrices in TF32, if that is the precision of a run."""
    if precision == "tf32" and device.type == "cuda":
        torch.set_float32_matmul_precision("high")


class ConfigError(ValueError):
    """A configuration that cannot run: the flag, its value, the rule and what would fit."""


def flag_name(field: str) -> str:
    """The flag of a field: num_layers -> --num-layers"""
    return "--" + field.replace("_", "-")


@contextlib.contextmanager
def as_flags(**others: str):
    """A FieldError about num_heads becomes a ConfigError about --num-heads. others: fields that are
    another flag here."""
    try:
        yield
    except FieldError as e:
        raise ConfigError(e.message(lambda name: flag_name(others.get(name, name)))) from None


def flag(default, help, choices=None, metavar=None):
    """A field of Config."""
    metadata = {"help": help, "choices": choices, "metavar": metavar}
    return dataclasses.field(default_factory=lambda: default, metadata=metadata)


@dataclass
class Config:
    """Every flag of train.py."""

    # model
    model: str = flag("tiny", f"a preset: {', '.join(PRESETS)}", metavar="PRESET")
    num_layers: int | None = flag(
        None, "number of layers; this flag and those down to --z-loss override the preset"
    )
    hidden_size: int | None = flag(None, "h, the size of an activation vector")
    num_heads: int | None = flag(None, "attention heads")
    num_kv_heads: int | None = flag(
        None, "key and value heads; fewer than heads is grouped-query attention"
    )
    ffn_hidden_size: int | None = flag(None, "inner size of the MLP")
    seq_length: int | None = flag(None, "tokens in a sequence")
    vocab_size: int | None = flag(
        None, "at least the tokenizer's size; the default is the larger of preset and tokenizer"
    )
    head_dim: int | None = flag(
        None, "size of a head; 0 is hidden size / heads, the default but for some presets"
    )
    norm: str | None = flag(
        None,
        "rmsnorm1p is RMSNorm that multiplies by 1 + weight (Gemma)",
        ("layernorm", "rmsnorm", "rmsnorm1p"),
    )
    activation: str | None = flag(None, "of the MLP", ("gelu", "swiglu", "geglu"))
    positions: str | None = flag(
        None, "how a token knows its place", ("learned", "rotary", "alibi")
    )
    sliding_window: int | None = flag(
        None, "tokens that a token attends to, itself included; 0: all before it"
    )
    dropout: float | None = flag(
        None, "probability, for the embedding, attention and both residual branches"
    )
    # experts
    num_experts: int | None = flag(None, "experts (MLPs) in a layer with experts; 0: none")
    expert_every: int | None = flag(None, "experts in every n-th layer: 2 is every other layer")
    router: str | None = flag(
        None,
        "sinkhorn balances each micro-batch by a transport plan; topk by a loss",
        ROUTER_NAMES,
    )
    router_topk: int | None = flag(None, "experts that each token goes through")
    router_temperature: float | None = flag(
        None,
        "temperature of sinkhorn's plan, from 0.001 to 1; lower is more even; the default is 0.02, "
        "and 1 is Megatron-LM's",
    )
    capacity_factor: float | None = flag(
        None,
        "limit of tokens per expert, over its even share of a micro-batch; tokens beyond it are "
        "dropped; 0: no limit",
    )
    aux_loss: float | None = flag(
        None,
        "coefficient of the load-balancing loss; the default is 0.01 with topk, 0 with sinkhorn",
    )
    z_loss: float | None = flag(
        None, "coefficient of the router's z-loss; the default is 0.001 with topk, 0 with sinkhorn"
    )
    # parallel
    tp: int = flag(1, "tensor-parallel ranks, which share every matrix")
    sequence_parallel: bool = flag(
        False, "shard along the sequence what tensor parallelism leaves whole"
    )
    pp: int = flag(1, "pipeline-parallel ranks, which share the layers")
    cp: int = flag(1, "context-parallel ranks, which share every sequence")
    cp_kind: str = flag(
        "ring",
        "how context-parallel ranks attend to each other's tokens: keys and values go round, or"
        " heads are exchanged for tokens",
        ("ring", "all-to-all"),
    )
    virtual_stages: int = flag(
        1, "stages on each pipeline rank; more than one needs the interleaved schedule"
    )
    schedule: str | None = flag(
        None,
        "pipeline schedule; the default is 1f1b, or interleaved with virtual stages",
        tuple(schedules.NAMES),
    )
    layer_split: list[int] | None = flag(
        None,
        "layers of each stage (pp times virtual stages numbers); the default is an even split",
        metavar="N",
    )
    zero_stage: int = flag(
        0,
        "what data-parallel ranks shard: 1 optimizer state, 2 also gradients, 3 also parameters",
        (0, 1, 2, 3),
    )
    ep: int = flag(
        1, "expert-parallel ranks: of the data-parallel ranks, so many share the experts"
    )
    reduce_dtype: str | None = flag(
        None,
        "dtype in which gradients are summed over data-parallel ranks; the default is fp32",
        ("fp32", "bf16"),
    )
    # memory, speed
    recompute: str = flag(
        "none",
        "activations that backward computes again: explicit attention (selective) or layers (full)",
        ("none", "selective", "full"),
    )
    recompute_layers: int | None = flag(
        None, "recompute only the first n layers; the default is all"
    )
    head_chunk: int = flag(
        0, "tokens that have logits at a time; by default all of a micro-batch have them"
    )
    attention: str | None = flag(
        None,
        "fused never writes the s x s scores; it is the default where dropout is 0",
        ("explicit", "fused"),
    )
    kernels: str = flag(
        "auto",
        "auto: fused CUDA operations where the device has them (kernels.py)",
        ("auto", "off"),
    )
    compile: bool = flag(False, "torch.compile each block")
    profile: bool = flag(
        False, "write OUT/trace-RANK.json of steps 3 to 5, for chrome://tracing or Perfetto"
    )
    # batch
    global_batch_size: int = flag(16, "sequences in a step, over all ranks")
    micro_batch_size: int | None = flag(
        None,
        "sequences in one forward pass; the default is a rank's whole share, or 1 in a pipeline",
    )
    # optimizer
    steps: int = flag(500, "number of the last step")
    lr: float | None = flag(
        None, "peak learning rate; the default is that of the model and of what is learned"
    )
    min_lr: float | None = flag(None, "learning rate at the end of the cosine; default: lr / 10")
    warmup_steps: int = flag(50, "steps of linear warmup")
    weight_decay: float = flag(0.1, "weight decay, of matrices only")
    grad_clip: float = flag(1.0, "largest global gradient norm; 0: no clipping")
    max_bad_steps: int = flag(
        50,
        "end the run with exit status 1 after so many steps in a row with gradients that are not "
        "finite (in fp16: at the lowest loss scale); 0: never. Meanwhile a save waits for the next "
        "good step, and no older checkpoint is removed",
    )
    precision: str | None = flag(
        None,
        "precision of compute; the default is bf16 on CUDA and fp32 on CPUs (tf32: fp32 whose "
        "matrix multiplications are in TF32, on GPUs; fp64: for tests)",
        ("fp32", "tf32", "bf16", "fp16", "fp64"),
    )
    fp8: str = flag(
        "off",
        "matrix multiplications of attention and MLP in FP8, with a scale for each tensor from its "
        "maximum now (current) or in the last steps (delayed), or one for each block (fp8.py)",
        ("off", "current", "delayed", "block"),
    )
    fp8_skip: int = flag(1, "first layers, and last layers, that are not in FP8")
    fp8_scales: str = flag(
        "power-of-two",
        "FP8 scales: rounded down to a power of two, or any number",
        ("power-of-two", "any"),
    )
    fp8_keep_bytes: bool = flag(
        False,
        "with --zero-stage 3: keep the bytes of whole weights for a step, instead of making them "
        "anew for each product (1 byte for each parameter in FP8)",
    )
    fp8_block: int = flag(
        128, "size of a block with --fp8 block; only 128 has a GPU's FP8 multiplications"
    )
    optimizer_state: str = flag(
        "fp32",
        "bf16: both moments in bf16, and only the low half of a bf16 weight's master: 8 bytes per "
        "parameter instead of 14",
        ("fp32", "bf16"),
    )
    # data
    data: list[str] = flag(
        [],
        "text files, .jsonl files with a text field, gzipped files of both, or folders; or corpora "
        "with weights, as 0.7:A 0.3:B; the last twentieth is held out; the default is Python's "
        "library",
        metavar="PATH",
    )
    val_data: list[str] = flag(
        [],
        "text to evaluate on, named as with --data; all of --data is then trained on",
        metavar="PATH",
    )
    document_mask: bool = flag(
        False,
        "attention stays inside a document of --data, and positions restart in each",
    )
    pack: bool = flag(
        False, "with --sft: several conversations share a sequence, and none attends to another"
    )
    cache: str = flag(
        "cache",
        "folder of tokenized text, for other runs on the same text; may be deleted, moved, shared",
        metavar="DIR",
    )
    tokenizer: str | None = flag(
        None,
        "bytes, gpt2, or a JSON file of the tokenizers library; the default is bytes, or with "
        "--load the checkpoint's",
        metavar="{bytes,gpt2,FILE}",
    )
    # conversations
    sft: list[str] = flag(
        [],
        "JSON lines of conversations (messages, or prompt and completion) to fine-tune on (sft.py);"
        " a twentieth is held out",
        metavar="FILE",
    )
    sft_val: list[str] = flag(
        [], "conversations to evaluate on; all of --sft is then trained on", metavar="FILE"
    )
    chat_template: str = flag(
        "auto",
        "a jinja file that makes one text of a conversation; auto: the tokenizer's, or plain, a"
        " simple one, where it has none",
        metavar="{auto,plain,FILE}",
    )
    loss_on: str = flag(
        "answers",
        "the targets in a conversation: the assistant's messages, each with the token that ends it;"
        " or all tokens",
        ("answers", "all"),
    )
    skip_bad_examples: bool = flag(
        False,
        "leave out, and count, conversations that are too long, have no answer, or that the"
        " template refuses; with --data, files that are not UTF-8",
    )
    # preferences
    preference: str | None = flag(
        None,
        "learn from --pairs: reward, a model that says how good an answer is; or dpo, the model of"
        " --load itself (preference.py)",
        ("reward", "dpo"),
    )
    pairs: list[str] = flag(
        [],
        "JSON lines with prompt, chosen and rejected; a twentieth is held out",
        metavar="FILE",
    )
    pairs_val: list[str] = flag(
        [], "pairs to evaluate on; all of --pairs is then trained on", metavar="FILE"
    )
    rl: str | None = flag(
        None,
        "reinforcement learning: the model of --load writes answers to --prompts, and learns from"
        " their rewards; ppo has a critic, grpo compares the answers of a group (reinforcement.py)",
        ("ppo", "grpo"),
    )
    prompts: list[str] = flag(
        [],
        "JSON lines with a prompt, or messages; a twentieth is held out",
        metavar="FILE",
    )
    reward: str | None = flag(
        None,
        "gives each answer a number: a run of --preference reward, or FILE.py:FUNCTION, called"
        " with (prompt, answer, line of --prompts)",
        metavar="{CKPT,FILE:FUNCTION}",
    )
    beta: float | None = flag(
        None,
        "weight of the KL divergence from the model of --load; the default is 0.1 for dpo, 0.05 for"
        " ppo, 0.04 for grpo",
    )
    answer_tokens: int = flag(64, "tokens of an answer at most, its end token included")
    group_size: int | None = flag(
        None, "answers to each prompt of a step; the default is 8 for grpo, 1 for ppo"
    )
    rl_epochs: int = flag(2, "updates from the answers of a step; later ones are clipped")
    clip_range: float = flag(0.2, "how far updates may change a token's probability: a share")
    gae_lambda: float = flag(0.95, "of ppo's advantages: 1 has no bias, 0 the least variance")
    critic_lr: float | None = flag(None, "of ppo's critic; the default is --lr")
    rollout_tp: int | None = flag(
        None, "tensor-parallel ranks that write answers; the default is the layout of training"
    )
    rollout_pp: int | None = flag(
        None, "pipeline ranks that write answers; the default is the layout of training"
    )
    # run
    out: str = flag("runs/default", "folder of this run", metavar="DIR")
    save_every: int = flag(200, "steps between checkpoints; 0: only the last step")
    keep: int = flag(2, "how many checkpoints remain; 0: all")
    resume: bool = flag(
        False,
        "continue from the newest checkpoint in OUT, if there is one. Flags that are not given come"
        " from OUT/config.json (of the layout, tp to zero-stage, all or none). Ranks that torchrun"
        " restarts do this anyway",
    )
    prompt_config: str | None = flag(
        None,
        "JSON or YAML with NeMo's names (prompt_tuning.py): learn prompts for the model of --load, "
        "which stays frozen",
        metavar="FILE",
    )
    peft: str | None = flag(
        None,
        "learn only lora, adapter (bottlenecks) or ia3 parameters for the model of --load, which "
        "stays frozen (adapters.py)",
        ("lora", "adapter", "ia3"),
    )
    lora_rank: int = flag(8, "r, the rank of LoRA's update")
    lora_alpha: float = flag(16.0, "LoRA's update is scaled by alpha / rank")
    lora_dropout: float = flag(0.0, "probability, for the input of LoRA")
    adapter_size: int = flag(32, "inner size of a bottleneck adapter")
    peft_targets: list[str] = flag(
        [],
        "where: for lora of query key value output gate up down, for ia3 of key value down, for "
        "adapter of attention mlp; the default is all",
        metavar="NAME",
    )
    load: str | None = flag(
        None,
        "start from the weights and the shape of this checkpoint or run, for example one that "
        "huggingface.py imported; with --resume, only where OUT has no checkpoint",
        metavar="CKPT",
    )
    eval_every: int = flag(100, "steps between evaluations on held-out text; 0: only the last step")
    sample_prompt: str | None = flag(
        None,
        "text that the sample at the end of training continues, at most the context's last tokens "
        "of it; empty: a new text; the default is the beginning of the held-out data",
        metavar="TEXT",
    )
    seed: int = flag(0, "random seed of weights, sample order and dropout")
    log_every: int = flag(1, "steps between lines on the screen; metrics.jsonl has every step")
    plan: str | None = flag(
        None,
        "print the step time that planner.py predicts beside the measured one, for a100, h100, h200"
        " or a machine's file (docs/planning.md); auto: this GPU's name, or ./machine.json",
        metavar="MACHINE",
    )
    tensorboard: bool = flag(
        False, "also write curves for TensorBoard to OUT/tensorboard (pip install tensorboard)"
    )
    timeout: float = flag(1800.0, "seconds without progress after which a hanging run is ended")
    device: str = flag("auto", "auto: CUDA where there is one", ("auto", "cpu", "cuda"))

    def model_config(self) -> MoEConfig:
        """The preset's shape, or with --load the checkpoint's, and the flags over it.

        Raises ConfigError or CheckpointError.
        """
        if self.model not in PRESETS:
            presets = ", ".join(PRESETS)
            raise ConfigError(f"--model {self.model}: no such preset; there are {presets}")
        shape = PRESETS[self.model][0]
        if self.load:
            is_reward = self.preference == "reward"
            index = checkpoint.read_model(self.base(), value_head=is_reward)[1]
            shape = index["model"] | {"attention": ""}
            if self.prompt_config:
                shape["dropout"] = 0.0
        if self.preference or self.rl:
            shape = shape | {"dropout": 0.0}
        given = {}
        for name in MODEL_FLAGS:
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        if "router" in given:
            # another router has other losses
            shape = {k: v for k, v in shape.items() if k not in ("aux_loss", "z_loss")}
        with as_flags():
            try:
                return MoEConfig(**{**shape, **given})
            except TypeError as e:
                raise ConfigError(
                    f"--load {self.load}: does not describe a model of this project ({e})"
                ) from None

    def base(self) -> Path:
        """The checkpoint that --load names. A run that goes on with a whole model has its shape in
        its own checkpoints too, for when the base is gone. Raises CheckpointError."""
        try:
            return checkpoint.find(self.load)
        except checkpoint.CheckpointError as e:
            own = {}
            if self.resume and not self.prompt_config and not self.peft:
                own = checkpoint.steps(Path(self.out) / "checkpoints")
            if own:
                return list(own.values())[-1]
            raise checkpoint.CheckpointError(f"--load {e}") from None

    def micro_batch(self, dp: int) -> int:
        """Sequences in one forward pass, of `dp` data-parallel ranks."""
        if self.micro_batch_size:
            return self.micro_batch_size
        # a pair of answers is two rows
        least = 2 if self.preference else 1
        return least if self.pp > 1 else self.global_batch_size // dp

    @property
    def length_multiple(self) -> int:
        """What divides the length of a row: context parallelism cuts it into 2 cp pieces, and
        sequence parallelism those of a rank into tp."""
        return (2 * self.cp if self.cp > 1 else 1) * self.sequence_shards

    @property
    def sequence_shards(self) -> int:
        """Into how many shards sequence parallelism cuts the tokens of a rank."""
        return self.tp if self.sequence_parallel else 1

    def fp8_recipe(self) -> Recipe | None:
        if self.fp8 == "off":
            return None
        return Recipe(self.fp8, self.fp8_scales == "power-of-two", self.fp8_block)

    def of_values(self, load: str | None) -> "Config":
        """Of a model beside the policy of --rl that gives values, with the shape of --load."""
        shape = dict.fromkeys(MODEL_FLAGS) if load != self.load else {}
        micro = self.micro_batch_size or (1 if self.pp > 1 else None)
        return dataclasses.replace(
            self,
            load=load,
            preference="reward",
            rl=None,
            peft=None,
            micro_batch_size=micro,
            **shape,
        )

    @property
    def answers_per_prompt(self) -> int:
        """--group-size or its default."""
        default = 8 if self.rl == "grpo" else 1
        return default if self.group_size is None else self.group_size

    @property
    def kl_weight(self) -> float:
        """--beta or its default."""
        defaults = {"dpo": 0.1, "ppo": 0.05, "grpo": 0.04}
        return defaults[self.rl or self.preference] if self.beta is None else self.beta

    @property
    def keeps_bytes(self) -> bool:
        """Whether weights in FP8 are kept as bytes for a whole step."""
        return self.zero_stage < 3 or self.fp8_keep_bytes

    @property
    def peak_lr(self) -> float:
        """--lr or its default."""
        return learning_rates.default(self)[0] if self.lr is None else self.lr

    @property
    def lowest_lr(self) -> float:
        return self.peak_lr / 10 if self.min_lr is None else self.min_lr

    @property
    def pipeline_schedule(self) -> str:
        return self.schedule or ("interleaved" if self.virtual_stages > 1 else "1f1b")


MODEL_FLAGS = {f.name for f in dataclasses.fields(MoEConfig)} & {
    f.name for f in dataclasses.fields(Config)
}
