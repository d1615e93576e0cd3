"""The shape of a model: the fields of `GPTConfig`, their defaults and their rules.

A shape that cannot be built is refused here, before anything is allocated, by a `FieldError`. It
has the field, its value, the rule and what would fit, so that train.py can name the flag:

    GPTConfig(2, 64, num_heads=5)   num_heads 5: must divide hidden_size 64; [2, 4, 8] would fit
    train.py --num-heads 5 ..       --num-heads 5: must divide --hidden-size 64; [2, 4, 8] would fit

The check of every technique (tensor_parallel.check, ..) raises the same error. The last section
counts the parameters and the FLOPs of a shape.
"""

import math
import string
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import ClassVar

# The linear layers of a block, and the module that each is in; gate is Llama's.
LINEARS = {
    "query": "attention",
    "key": "attention",
    "value": "attention",
    "output": "attention",
    "gate": "mlp",
    "up": "mlp",
    "down": "mlp",
}


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. Raises FieldError, a ValueError, for a shape that cannot be built."""

    num_layers: int
    hidden_size: int
    num_heads: int
    # 0 means as many as heads; fewer is grouped-query attention (arXiv 2305.13245).
    num_kv_heads: int = 0
    # 0 means 4 h.
    ffn_hidden_size: int = 0
    # The number of tokens of the longest sequence.
    seq_length: int = 1024
    vocab_size: int = 50257
    # The probability, for the embedding, attention probabilities and both residual branches.
    dropout: float = 0.0
    # The defaults of the fields from `norm` to `tied` are Llama's; otherwise GPT-2's.
    llama: bool = False
    # One of explicit and fused; the default is fused without dropout.
    attention: str = ""
    norm_eps: float = 1e-5
    rotary_base: float = 10000.0
    # The standard deviation of initial weights, over √(2L) before a residual sum.
    init_std: float = 0.02
    # The modules that predict further tokens, in training and as drafts (run/multi_token.py).
    mtp_layers: int = 0
    # 0 means h / a.
    head_dim: int = 0
    # One of layernorm and rmsnorm; with 1p they multiply by 1 + weight (Nemotron, Gemma).
    norm: str = ""
    # One of gelu, exact-gelu, squared-relu (arXiv 2109.08668), swiglu and geglu (2002.05202).
    activation: str = ""
    # One of learned, rotary (arXiv 2104.09864) or alibi (arXiv 2108.12409).
    positions: str = ""
    # Which of query, key, value and output have a bias: all, qkv (without output) or none.
    attention_bias: str = ""
    # Whether the MLP's matrices have a bias; those of experts never have one.
    mlp_bias: bool | None = None
    # Whether embedding and head are one matrix (arXiv 1608.05859).
    tied: bool | None = None
    # Whether each head's query and key have a norm (Qwen3).
    qk_norm: bool = False
    # Whether a norm follows the embedding (BLOOM), or the embedding is multiplied by √h (Gemma).
    embedding_norm: bool = False
    embedding_scale: bool = False
    # The number of tokens that a token attends to, itself included; 0 means all (Mistral: 4096).
    # Layers with the window are 1 in the pattern, which repeats (Gemma 2: 10, Gemma 3: 111110).
    sliding_window: int = 0
    window_pattern: str = "1"
    # Whether each norm follows a residual addition, instead of preceding its layer (GPT-1, BERT).
    post_norm: bool = False
    # Whether attention and MLP read the same x, each after its norm (Falcon).
    parallel_block: bool = False
    # The share of each head's numbers that rotary positions rotate (Nemotron: 1/2).
    rotary_share: float = 1.0
    # Scaling of rotary angles, for longer sequences than the original length (families.py): llama3
    # or yarn. With factor 1 frequencies do not change.
    rotary_factor: float = 1.0
    rotary_scaling: str = "llama3"
    # A pair that turns less than `low` times in the original length turns slower by the factor, one
    # that turns more than `high` times does not change; 0 means 4, or 32 for yarn.
    rotary_low_frequency: float = 1.0
    rotary_high_frequency: float = 0.0
    rotary_original_length: int = 8192
    # yarn's factor of cos and sin; 0 means 0.1 ln(rotary_factor) + 1.
    rotary_attention: float = 0.0
    # Multi-head latent attention (DeepSeek-V2, families.LatentAttention): the sizes of the latents
    # of keys and values, and of queries; 0 means none. Then how many of a head's numbers are
    # rotated, and the size of a head's value; 0 means head_dim.
    kv_rank: int = 0
    query_rank: int = 0
    rope_head_dim: int = 0
    value_head_dim: int = 0
    # With them and yarn, DeepSeek's mscale_all_dim m: scores times (0.1 m ln(rotary_factor) + 1)².
    rotary_mscale: float = 0.0
    # The values of fields that another type of model allows instead of those in CHOICES.
    own_choices: ClassVar[dict[str, tuple]] = {}
    # Whether a token sees only itself and those before it.
    causal: ClassVar[bool] = True
    # An encoder-decoder has these: layers of the encoder, tokens of the decoder's target (T5).
    encoder_layers: ClassVar[int] = 0
    target_length: ClassVar[int] = 0
    # The layers of another model in the embedding (models/multimodal.py).
    layers_beside: ClassVar[int] = 0
    # The shapes of the encoders that this model consists of, where it has several (CLIP).
    encoders: ClassVar[tuple] = ()
    # Whether a matrix [h, h] comes before that of the head (BERT).
    head_transform: ClassVar[bool] = False

    def __post_init__(self):
        self.check_types()
        self.set_default("num_kv_heads", self.num_heads)
        self.set_default("ffn_hidden_size", 4 * self.hidden_size)
        self.set_default("rotary_high_frequency", 32.0 if self.rotary_scaling == "yarn" else 4.0)
        self.set_default("attention", "explicit" if self.dropout else "fused")
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.head_size())
        for field, value in (LLAMA if self.llama else GPT2).items():
            if getattr(self, field) in ("", None):
                object.__setattr__(self, field, value)
        self.check()

    @property
    def cross_layers(self) -> range:
        """The layers with cross attention: an encoder-decoder's decoder."""
        return range(self.encoder_layers, self.num_layers if self.target_length else 0)

    def window_of(self, layer: int) -> int:
        """The sliding window of a layer; 0: none."""
        is_local = self.window_pattern[layer % len(self.window_pattern)] == "1"
        return self.sliding_window if is_local else 0

    @property
    def common_window(self) -> int:
        """The window of all layers; 0 if some layer sees all tokens."""
        return 0 if "0" in self.window_pattern else self.sliding_window

    @property
    def rotary_scale(self) -> float:
        """The factor of cos and sin: √(1/t), t YaRN's temperature (arXiv 2309.00071, eq. 22)."""
        if self.rotary_scaling != "yarn":
            return 1.0
        return self.rotary_attention or 0.1 * math.log(self.rotary_factor) + 1

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate: act(x W_gate) * x W_up."""
        return self.activation in ("swiglu", "geglu")

    @property
    def value_size(self) -> int:
        """The numbers of a head's value."""
        return self.value_head_dim or self.head_dim

    def key_copies(self, t: int) -> int:
        """How many of t tensor-parallel ranks attend with the same key and value head."""
        return max(1, t // self.num_kv_heads)

    @property
    def rotated_size(self) -> int:
        """The numbers of a head that rotary positions rotate."""
        return self.rope_head_dim or round(self.head_dim * self.rotary_share)

    def head_size(self) -> int:
        """h / a. Raises FieldError if a does not divide h."""
        for field in ("hidden_size", "num_heads"):
            self.check_size(field)
        h, a = self.hidden_size, self.num_heads
        if h % a:
            raise FieldError(
                "num_heads", a, "must divide {hidden_size}", divisors(h, a), hidden_size=h
            )
        return h // a

    def set_default(self, field: str, value) -> None:
        if not getattr(self, field):
            object.__setattr__(self, field, value)

    def check_types(self) -> None:
        for field in fields(self):
            value, (field_type, what) = getattr(self, field.name), FIELD_TYPES[field.type]
            # Python's bool is an int.
            is_flag = field_type in (bool, bool | None)
            if not isinstance(value, field_type) or (isinstance(value, bool) and not is_flag):
                raise FieldError(field.name, repr(value), f"must be {what}")

    def check(self) -> None:
        for field in SIZES:
            self.check_size(field)
        a, kv = self.num_heads, self.num_kv_heads
        self.require(a % kv == 0, "num_kv_heads", "must divide {num_heads}", divisors(a, kv))
        for field, values in (CHOICES | self.own_choices).items():
            allowed = " or ".join(map(str, values))
            self.require(getattr(self, field) in values, field, f"must be {allowed}")
        if self.positions == "rotary":
            self.check_rotary()
        self.check_norms()
        self.check_latents()
        rule = "must be at least 0 and below {seq_length}"
        self.require(0 <= self.mtp_layers < self.seq_length, "mtp_layers", rule)
        rule = "needs norms before attention and MLP: not post_norm, not parallel_block"
        norms_before = not (self.post_norm or self.parallel_block)
        self.require(norms_before or not self.mtp_layers, "mtp_layers", rule, 0)
        self.check_window()
        self.require(0 <= self.dropout < 1, "dropout", "must be at least 0 and below 1")
        # Beyond these limits a float32 is 0 or infinite somewhere in the model.
        self.check_range("norm_eps", 1e-30, 1)
        self.check_range("rotary_base", 1, 1e30)
        self.check_range("rotary_factor", 1, 1e30)
        self.check_range("init_std", 1e-30, 1)
        rule = "never sees the probabilities that {dropout} would mask; explicit would fit"
        drops = self.dropout > 0
        self.require(not drops or self.attention != "fused", "attention", rule + ", or dropout 0")

    def check_window(self) -> None:
        rule = "must be at least 1, or 0 for none, and below 2^31"
        self.check_range("sliding_window", 0, 2**31 - 1, rule)
        if set(self.window_pattern) not in ({"1"}, {"0", "1"}):
            rule = "must be a row of 1 (a window) and 0 (none), with a 1; 10 is every other layer"
            raise FieldError("window_pattern", repr(self.window_pattern), rule)
        has_window = self.sliding_window > 0 or "0" not in self.window_pattern
        self.require(has_window, "window_pattern", "needs a window, but {sliding_window}")

    def check_norms(self) -> None:
        rule = "heads have norms in this model (qk_norm); rmsnorm or rmsnorm1p would fit"
        self.require(not self.qk_norm or self.norm.startswith("rmsnorm"), "norm", rule)
        rule = "attention and MLP read one x here; a norm cannot follow each ({post_norm})"
        self.require(not (self.parallel_block and self.post_norm), "parallel_block", rule, False)

    def check_latents(self) -> None:
        for field in "kv_rank query_rank rope_head_dim value_head_dim rotary_mscale".split():
            self.check_range(field, 0, 2**31 - 1, "must be at least 0 and below 2^31")
            has_latents = self.kv_rank or not getattr(self, field)
            self.require(has_latents, field, "needs {kv_rank}", kv_rank=None)
        if not self.kv_rank:
            return
        fixed = dict(positions="rotary", rotary_share=1, num_kv_heads=self.num_heads)
        for field, value in (fixed | dict(attention_bias="none", qk_norm=False)).items():
            rule = "not with the latents of {kv_rank}"
            self.require(getattr(self, field) == value, field, rule, value)
        rope, d = self.rope_head_dim, self.head_dim
        rule = "with {kv_rank} it is a part of {head_dim}: even, above 0 and below"
        self.require(0 < rope < d and rope % 2 == 0, "rope_head_dim", rule)
        self.require(self.value_head_dim <= d, "value_head_dim", "must be at most {head_dim}")

    def check_rotary(self) -> None:
        d = self.head_dim
        rule = f"rotary positions need an even head size, not hidden_size / num_heads = {d}"
        self.require(d % 2 == 0 or d * self.num_heads != self.hidden_size, "num_heads", rule)
        self.require(d % 2 == 0, "head_dim", "must be even for rotary positions", [d + 1])
        rule = "must be above 0 and at most 1, and rotate an even part of {head_dim}"
        share = self.rotary_share
        self.require(0 < share <= 1 and share * d % 2 == 0, "rotary_share", rule, 1)
        low, high = self.rotary_low_frequency, self.rotary_high_frequency
        rule = "must be above 0 and below {rotary_high_frequency}"
        self.require(0 < low < high < math.inf, "rotary_low_frequency", rule)
        if self.rotary_scaling == "yarn":
            self.check_range("rotary_base", 1.01, 1e30, "must be from 1.01 to 1e+30 for yarn")
            self.check_range("rotary_attention", 0, 1e30)

    def check_size(self, field: str) -> None:
        power = 16 if field == "num_layers" else 31
        self.check_range(field, 1, 2**power - 1, f"must be at least 1 and below 2^{power}")

    def check_range(self, field: str, least: float, most: float, rule: str = "") -> None:
        # NaN is in no range.
        in_range = least <= getattr(self, field) <= most
        self.require(in_range, field, rule or f"must be from {least:g} to {most:g}")

    def require(self, holds: bool, field: str, rule: str, fits=None, **others) -> None:
        """Raises FieldError unless the rule holds. A {name} in the rule is a field of this shape,
        unless `others` has its value."""
        if not holds:
            named = [name for _, name, _, _ in string.Formatter().parse(rule) if name]
            others = {name: getattr(self, name) for name in named} | others
            raise FieldError(field, getattr(self, field), rule, fits, **others)


SIZES = (
    "num_layers hidden_size num_heads num_kv_heads ffn_hidden_size seq_length vocab_size head_dim"
    " rotary_original_length"
).split()
CHOICES = {
    "attention": ("explicit", "fused"),
    "norm": ("layernorm", "layernorm1p", "rmsnorm", "rmsnorm1p"),
    "activation": ("gelu", "exact-gelu", "squared-relu", "swiglu", "geglu"),
    "positions": ("learned", "rotary", "alibi"),
    "attention_bias": ("all", "qkv", "none"),
    "rotary_scaling": ("llama3", "yarn"),
}
# The defaults of the two families.
GPT2 = dict(
    norm="layernorm",
    activation="gelu",
    positions="learned",
    attention_bias="all",
    mlp_bias=True,
    tied=True,
)
LLAMA = dict(
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    attention_bias="none",
    mlp_bias=False,
    tied=False,
)
# {annotation: (the types that a field may have, their name in a message)}
FIELD_TYPES = {
    int: (int, "an integer"),
    float: (float | int, "a number"),
    bool: (bool, "true or false"),
    bool | None: (bool | None, "true or false, or null"),
    str: (str, "text"),
    float | None: (float | int | None, "a number, or null"),
}


class FieldError(ValueError):
    """An impossible value: the field to change, its value, the rule, and what would fit.

    rule: may name other fields as {field}; `others` has their values, None for the name alone.
    """

    def __init__(self, field: str, value, rule: str, fits=None, **others):
        super().__init__(field, value, rule, fits)
        self.field = field
        self.others = others

    def message(self, name_of=str) -> str:
        """The message. name_of(field): the name of a field for the reader, for example a flag."""
        field, value, rule, fits = self.args
        others = {}
        for name, other in self.others.items():
            others[name] = name_of(name) if other is None else f"{name_of(name)} {other}"
        text = f"{name_of(field)} {value}: {rule.format(**others)}"
        return text if fits is None else f"{text}; {fits} would fit"

    def __str__(self) -> str:
        return self.message()


def divisors(n: int, near: int, fits: Callable[[int], bool] = bool) -> list[int]:
    """The three divisors of n, up to 4096, that fit and are nearest to a number."""
    found = [d for d in range(1, min(n, 4096) + 1) if n % d == 0 and fits(d)]
    return sorted(sorted(found, key=lambda d: abs(d - near))[:3])


def multiples_near(n: int, of: int) -> str:
    """The multiples of a number next to n, but 0, for a message: "8 or 12"."""
    low = n // of * of
    return f"{low} or {low + of}" if low else str(of)


# --- with experts ---------------------------------------------------------------------------------

ROUTER_NAMES = ("sinkhorn", "topk", "bias")
# Those that have flags.
EXPERT_FIELDS = tuple(
    "expert_every first_dense_layers expert_ffn_size shared_ffn_size router router_topk"
    " router_temperature router_scale bias_rate expert_groups topk_groups capacity_factor aux_loss"
    " z_loss".split()
)


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    """The shape of a GPT with experts: the fields of GPTConfig, and these. Raises FieldError."""

    num_experts: int = 0  # 0: no experts, one MLP for all tokens
    expert_every: int = 1  # experts in every n-th layer
    router: str = "sinkhorn"  # one of ROUTER_NAMES
    router_topk: int = 1  # experts for each token
    router_temperature: float = 0.02  # of Sinkhorn's plan; lower is more even (Megatron-LM: 1)
    capacity_factor: float = 0.0  # largest load of an expert / even share; 0: no limit
    aux_loss: float | None = None  # coefficient of the load-balancing loss; topk: 0.01
    z_loss: float | None = None  # coefficient of the z-loss; topk: 0.001
    # Of DeepSeek and Qwen.
    first_dense_layers: int = 0  # so many first layers have no experts
    expert_ffn_size: int = 0  # inner size of one expert; 0: ffn_hidden_size
    # Inner size of the MLP that all tokens go through beside the experts (shared experts); 0: none.
    # Whether its output is multiplied by sigmoid(x w) (Qwen2-MoE).
    shared_ffn_size: int = 0
    shared_gate: bool = False
    # Whether the factors of a token's experts add up to 1; by default with k > 1, but for sinkhorn.
    normalise_topk: bool | None = None
    router_scale: float = 1.0  # times these factors (DeepSeek: routed_scaling_factor)
    bias_rate: float = 0.001  # of router bias: how much a step changes a bias
    # A token's experts are in the best `topk_groups` of so many groups of neighbouring experts.
    expert_groups: int = 1
    topk_groups: int = 1

    def __post_init__(self):
        self.check_types()
        if not self.num_experts:
            # Without experts these fields are reset, so that equal models compare equal.
            for field in (*EXPERT_FIELDS, "shared_gate", "normalise_topk"):
                default = type(self).__dataclass_fields__[field].default
                object.__setattr__(self, field, default)
        has_losses = self.num_experts and self.router == "topk"
        for field, default in (("aux_loss", 0.01), ("z_loss", 0.001)):
            if getattr(self, field) is None:
                object.__setattr__(self, field, default if has_losses else 0.0)
        super().__post_init__()

    @property
    def expert_layers(self) -> range:
        """The layers with experts: with expert_every 2 those numbered 1, 3, 5 and so on."""
        if not self.num_experts:
            return range(0)
        dense, every = self.first_dense_layers, self.expert_every
        return range(dense - dense % every + every - 1, self.num_layers, every)

    @property
    def normalises(self) -> bool:
        """`normalise_topk`, or its default."""
        if self.normalise_topk is None:
            return self.router != "sinkhorn" and self.router_topk > 1
        return self.normalise_topk

    @property
    def expert_size(self) -> int:
        """The inner size of one expert."""
        return self.expert_ffn_size or self.ffn_hidden_size

    def check(self) -> None:
        super().check()
        e, layers = self.num_experts, self.num_layers
        rule = "must be at least 0 and below 2^16; 0 is one MLP for all tokens"
        self.check_range("num_experts", 0, 2**16 - 1, rule)
        self.require(self.router in ROUTER_NAMES, "router", f"must be {' or '.join(ROUTER_NAMES)}")
        self.check_range("expert_every", 1, layers, "must be from 1 to {num_layers}")
        self.check_range("router_topk", 1, e or 1, "must be from 1 to {num_experts}")
        self.check_range("router_temperature", 1e-3, 1)
        self.check_range("router_scale", 1e-30, 1e30)
        self.check_range("bias_rate", 0, 1)
        rule = "must leave one of {num_layers} for {num_experts} (and {expert_every})"
        leaves_one = len(self.expert_layers) > 0 or not e
        self.require(leaves_one and self.first_dense_layers >= 0, "first_dense_layers", rule)
        for field in ("expert_ffn_size", "shared_ffn_size"):
            self.check_range(field, 0, 2**31 - 1, "must be at least 0 and below 2^31")
        self.check_groups(e or 1)
        for field in ("capacity_factor", "aux_loss", "z_loss"):
            finite = 0 <= getattr(self, field) < math.inf
            self.require(finite, field, "must be at least 0 and finite")
        rule = f"{self.router} evens the load without this loss; {{router}} would fit, or 0"
        evens = self.router in ("sinkhorn", "bias")
        self.require(not (evens and self.aux_loss), "aux_loss", rule, router="topk")

    def check_groups(self, e: int) -> None:
        groups, best = self.expert_groups, self.topk_groups
        divides = groups > 0 and e % groups == 0
        fits = divisors(e, groups)
        self.require(divides, "expert_groups", "must divide {num_experts}", fits, num_experts=e)
        rule = "the plan of sinkhorn has all experts; {router} would fit, or 1"
        has_groups = self.router != "sinkhorn" or groups == 1
        self.require(has_groups, "expert_groups", rule, router="bias")
        enough = 1 <= best <= groups and best * (e // groups) >= self.router_topk
        rule = "must be from 1 to {expert_groups}, groups that have {router_topk} experts"
        self.require(enough, "topk_groups", rule)


# --- size of a model, without building it ---------------------------------------------------------
#
# config is a GPTConfig, or a MoEConfig for experts.


def with_modules(config: GPTConfig) -> GPTConfig:
    """The shape whose last layers are the blocks of the modules of run/multi_token.py."""
    layers = config.num_layers + config.mtp_layers
    return replace(config, num_layers=layers, mtp_layers=0) if config.mtp_layers else config


def num_mlps(config: GPTConfig, of_each_layer_with_experts: str) -> tuple[int, int]:
    """(MLPs of the whole model, layers with experts). The named field is the number of experts of a
    layer that count: num_experts, or router_topk for those that one token goes through. An expert
    counts as its share of an MLP of ffn_hidden_size."""
    experts = len(getattr(config, "expert_layers", ()))
    if not experts:
        return config.num_layers, 0
    inner = getattr(config, of_each_layer_with_experts) * config.expert_size
    each = (inner + config.shared_ffn_size) / config.ffn_hidden_size
    return config.num_layers - experts + experts * each, experts


def block_matrices(config: GPTConfig, mlps: float) -> int:
    """Numbers in the matrices of all blocks, without routers."""
    attentions = config.num_layers + len(config.cross_layers)
    return attentions * attention_matrices(config) + round(mlps * mlp_matrices(config))


def attention_matrices(config: GPTConfig) -> int:
    """Numbers in the matrices of one attention; query and output have half of them where heads do
    not share keys."""
    if config.kv_rank:
        a, nope = config.num_heads, config.head_dim - config.rope_head_dim
        from_latents = config.kv_rank * (nope + config.value_size)
        from_latents += (config.query_rank or config.hidden_size) * config.head_dim
        return latent_matrices(config) + a * (from_latents + config.value_size * config.hidden_size)
    heads = config.num_heads + config.num_kv_heads
    return 2 * config.hidden_size * heads * config.head_dim


def latent_matrices(config: GPTConfig) -> int:
    """Those of them that give latents, which tensor parallelism does not shard; 0 without."""
    return config.hidden_size * (config.query_rank + config.kv_rank + config.rope_head_dim)


def mlp_matrices(config: GPTConfig, ffn: int = 0) -> int:
    """Numbers in the matrices of one MLP, by default of inner size ffn_hidden_size."""
    return (3 if config.gated else 2) * config.hidden_size * (ffn or config.ffn_hidden_size)


def router_vectors(config: GPTConfig) -> int:
    """Vectors [h] of all routers: one for each expert, and one for a gate of shared experts."""
    if not getattr(config, "num_experts", 0):
        return 0
    has_gate = config.shared_gate and config.shared_ffn_size > 0
    return len(config.expert_layers) * (config.num_experts + has_gate)


def least_parameters(config: GPTConfig) -> int:
    """Numbers in a model's matrices, without norms and biases. It is exact for any shape, without
    building the model."""
    if config.encoders:
        return sum(map(least_parameters, config.encoders))
    h, modules = config.hidden_size, config.mtp_layers
    config = with_modules(config)
    mlps, _ = num_mlps(config, "num_experts")
    vectors = config.vocab_size * (1 if config.tied else 2) + router_vectors(config)
    if config.positions == "learned":
        vectors += config.seq_length
    vectors += h * (config.head_transform + 2 * modules)
    return block_matrices(config, mlps) + h * vectors


def flops_per_token(config: GPTConfig, s: int | None = None) -> float:
    """Model FLOPs to train on one token of a sequence of s tokens, by default the longest: matrix
    multiplications, forward once and backward twice.

    Attention counts all s² scores, as in the papers, also those that the causal mask or a sliding
    window hides. For a GPT it is

        72 L h² (1 + s/6h + V/12hL)        arXiv 2205.05198, eq. 7, divided by B s

    Only the experts that a token goes through count, and the router. Those of an encoder-decoder
    are the FLOPs of a sequence, over the tokens of its source.
    """
    h, modules = config.hidden_size, config.mtp_layers
    config = with_modules(config)
    if config.target_length:
        return encoder_decoder_flops(config, s or config.seq_length) / (s or config.seq_length)
    mlps, _ = num_mlps(config, "router_topk")
    weights = block_matrices(config, mlps) + h * router_vectors(config)
    s = s or config.seq_length
    scores = 6 * config.num_layers * s * config.num_heads * (config.head_dim + config.value_size)
    vectors = (1 + modules) * config.vocab_size + h * (config.head_transform + 2 * modules)
    return 6 * (weights + h * vectors) + scores


def encoder_decoder_flops(config: GPTConfig, n: int) -> float:
    """Model FLOPs to train on a source of n tokens and its target. Cross attention reads queries
    from the target, keys and values from the source."""
    m, decoder = config.target_length, len(config.cross_layers)
    encoder = config.num_layers - decoder
    attention = attention_matrices(config)
    each = attention + mlp_matrices(config)
    products = encoder * n * each + decoder * (m * each + (m + n) / 2 * attention)
    scores = 2 * config.num_heads * config.head_dim * (encoder * n**2 + decoder * (m**2 + m * n))
    return 6 * (products + m * config.hidden_size * config.vocab_size + scores)
