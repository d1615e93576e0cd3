"""How to pretrain a model: the flags that planner.py adds to a layout, so that a command is whole.

    --global-batch-size    the row's tokens of a step, over s, so that the GPUs divide it
    --steps                tokens to train on, over those of a step
    --lr                   the row's
    --warmup-steps         the row's tokens, over those of a step; at most a tenth of the steps
    --weight-decay         train.py's default
    --dropout              the model's
    --precision            bf16, for which time and memory are predicted
    --tokenizer, --data    what only the user knows has a name in capitals

Rows of published models, and the rule between them, are in run/presets.py.

    python planner.py plan --model llama2-70b --gpus 64 --gpu h100

Not covered: GPT-3's batch, which grows in the first billions of tokens; Llama 2's epsilon of 1e-5.
"""

from base.model_config import MoEConfig
from run.config import ConfigError, flag_name
from run.presets import Recipe
from run.pretraining import Config

# The share of a batch by which rounding may move it.
ROUNDING = 0.1
# The share of the steps that warmup takes at most.
MOST_WARMUP = 0.1
# Tokens that a tokenizer has. A vocabulary is rounded up, to 51,200 for example.
TOKENIZERS = {"bytes": 257, "gpt2": 50257}
ROUNDED_UP = 1024
# The user's own values win.
GIVEN = ("lr", "warmup_steps", "weight_decay", "dropout", "tokenizer", "data")
ADVICE = (
    "Where no flag says otherwise, batch, learning rate and warmup are those of {}: a search begins"
    " there, and does not end there. AdamW has betas 0.9 and 0.95; weights begin with standard"
    " deviation 0.02, over √(2L) before a residual sum. Names in capitals are yours to fill in."
)


def batch_of(recipe: Recipe, s: int, gpus: int) -> int:
    """Sequences of a step: the multiple of the GPUs that is nearest to the recipe's tokens. Where
    this is far from them, of a half, a third, .. of the GPUs: pipelines need no more."""
    wanted = recipe.batch / s
    for each in range(gpus, 0, -1):
        batch = each * max(1, round(wanted / each))
        if gpus % each == 0 and abs(batch / wanted - 1) <= ROUNDING:
            return batch
    return max(1, round(wanted))


def tokenizer_of(vocab_size: int) -> str:
    """The tokenizer that a vocabulary of this size is for, or a name in capitals."""
    for name, size in TOKENIZERS.items():
        if size <= vocab_size <= -(-size // ROUNDED_UP) * ROUNDED_UP:
            return name
    return "TOKENIZER"


def flags_of(recipe: Recipe, model: MoEConfig, batch: int, tokens: float, given: dict) -> list[str]:
    """Flags of train.py. batch: sequences of a step; tokens: to train on; given: fields of its
    configuration that the user has set. Raises ConfigError."""
    of_step = batch * model.seq_length
    steps = max(1, round(tokens / of_step))
    if steps >= 2**31:
        rule = f"makes {steps:,} steps of {of_step:,} tokens, and train.py takes fewer than 2^31"
        raise ConfigError(f"--tokens {tokens:g}: {rule}; fewer tokens, or a larger batch, would do")
    fields = dict(
        steps=steps,
        lr=recipe.lr,
        warmup_steps=min(round(recipe.warmup / of_step), int(MOST_WARMUP * steps)),
        weight_decay=Config().weight_decay,
        dropout=model.dropout,
        precision="bf16",
        tokenizer=tokenizer_of(model.vocab_size),
        data=["DATA"],
    )
    fields |= {name: given[name] for name in GIVEN if name in given}
    if "lora_rank" in given and "tokenizer" not in given:
        # The tokenizer is that of the base.
        del fields["tokenizer"]
    words = []
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        words += [flag_name(name), *map(str, values)]
    return words
