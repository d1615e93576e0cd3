"""The shape of a GPT or a Llama: the fields of `GPTConfig`, their defaults and their rules.

A shape that cannot be built is refused here, before anything is allocated, by a `FieldError`. It
knows the field, its value, the rule and what would fit, so that train.py can name the flag:

    GPTConfig(2, 64, num_heads=5)   num_heads 5: must divide hidden_size 64; [2, 4, 8] would fit
    train.py --num-heads 5 ..       --num-heads 5: must divide --hidden-size 64; [2, 4, 8] would fit

The check of every technique (tensor_parallel.check, ..) raises the same error.

    python model_config.py       defaults, and shapes that are refused
"""

from dataclasses import dataclass, fields

# the linear layers of a block, and the module that each is in; gate is Llama's
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
    num_kv_heads: int = (
        0  # 0: as many as heads; fewer is grouped-query attention (arXiv 2305.13245)
    )
    ffn_hidden_size: int = 0  # 0: 4h
    seq_length: int = 1024  # of the longest sequence
    vocab_size: int = 50257
    dropout: float = 0.0  # embedding, attention probabilities, both residual branches
    llama: bool = False  # RMSNorm, SwiGLU, rotary positions, no biases, untied embeddings
    attention: str = ""  # explicit or fused; the default is fused without dropout
    norm_eps: float = 1e-5
    rotary_base: float = 10000.0

    def __post_init__(self):
        self.check_types()
        self.set_default("num_kv_heads", self.num_heads)
        self.set_default("ffn_hidden_size", 4 * self.hidden_size)
        self.set_default("attention", "explicit" if self.dropout else "fused")
        self.check()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def set_default(self, field: str, value) -> None:
        if not getattr(self, field):
            object.__setattr__(self, field, value)

    def check_types(self) -> None:
        for field in fields(self):
            value, (kind, what) = getattr(self, field.name), KINDS[field.type]
            # Python's bool is an int
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
                raise FieldError(field.name, repr(value), f"must be {what}")

    def check(self) -> None:
        for field in SIZES:
            power = 16 if field == "num_layers" else 31
            self.check_range(field, 1, 2**power - 1, f"must be at least 1 and below 2^{power}")
        h, a = self.hidden_size, self.num_heads
        if h % a:
            raise FieldError(
                "num_heads", a, "must divide {hidden_size}", divisors(h, a), hidden_size=h
            )
        if a % self.num_kv_heads:
            kv = self.num_kv_heads
            raise FieldError(
                "num_kv_heads", kv, "must divide {num_heads}", divisors(a, kv), num_heads=a
            )
        if self.llama and self.head_dim % 2:
            rule = (
                f"rotary positions need an even head size, not hidden_size / num_heads = {h // a}"
            )
            raise FieldError("num_heads", a, rule)
        if not 0 <= self.dropout < 1:
            raise FieldError("dropout", self.dropout, "must be at least 0 and below 1")
        # beyond these a float32 is 0 or infinite somewhere in the model
        self.check_range("norm_eps", 1e-30, 1, "must be from 1e-30 to 1")
        self.check_range("rotary_base", 1, 1e30, "must be from 1 to 1e+30")
        if self.attention not in ("explicit", "fused"):
            raise FieldError("attention", self.attention, "must be explicit or fused")
        if self.attention == "fused" and self.dropout > 0:
            rule = "never sees the probabilities that {dropout} would mask; explicit would fit"
            raise FieldError("attention", "fused", rule + ", or dropout 0", dropout=self.dropout)

    def check_range(self, field: str, least: float, most: float, rule: str) -> None:
        # not (a <= x <= b): NaN fails too
        if not least <= getattr(self, field) <= most:
            raise FieldError(field, getattr(self, field), rule)


SIZES = (
    "num_layers hidden_size num_heads num_kv_heads ffn_hidden_size seq_length vocab_size".split()
)
# the types that a field may have, and their name in a message
KINDS = {
    int: (int, "an integer"),
    float: (float | int, "a number"),
    bool: (bool, "true or false"),
    str: (str, "text"),
    float | None: (float | int | None, "a number, or null"),
}


class FieldError(ValueError):
    """A value that cannot be: the field to change, its value, the rule, and what would fit.

    rule: may name other fields as {field}; `others` has their values, None to name one alone.
    """

    def __init__(self, field: str, value, rule: str, fits=None, **others):
        super().__init__(field, value, rule, fits)
        self.field = field
        self.others = others

    def message(self, name_of=str) -> str:
        """name_of(field): what the reader calls a field, a flag for example."""
        field, value, rule, fits = self.args
        others = {}
        for name, other in self.others.items():
            others[name] = name_of(name) if other is None else f"{name_of(name)} {other}"
        text = f"{name_of(field)} {value}: {rule.format(**others)}"
        return text if fits is None else f"{text}; {fits} would fit"

    def __str__(self) -> str:
        return self.message()


def divisors(n: int, near: int) -> list[int]:
    """The three divisors of n, of those up to 4096, that are nearest to a number."""
    found = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
    return sorted(sorted(found, key=lambda d: abs(d - near))[:3])


if __name__ == "__main__":
    from lessons import model_config as lesson

    lesson.main()
