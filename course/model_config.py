"""The lesson of base/model_config.py: defaults, and shapes that cannot be built.

python -m course.model_config
"""

import torch

import gpt
from base.model_config import FieldError, GPTConfig
from course import form


class Unchecked(GPTConfig):
    """A configuration that takes any shape."""

    def check(self) -> None:
        pass


WITHOUT = {
    "check": form.Removal(
        Unchecked,
        "Which of the two errors comes later, which one never?",
        "3 heads of keys later: the model is built, then PyTorch fails in forward and names no"
        " field. Dropout with fused attention never: it runs, and no attention probability is"
        " dropped. Defaults are set before the check.",
    ),
}


def refusal(config_class: type, **fields) -> tuple[str, FieldError | None]:
    """(what is said about a model of these fields, the error before it was built)."""
    try:
        config = config_class(2, 64, seq_length=32, vocab_size=257, **fields)
    except FieldError as error:
        return str(error), error
    try:
        gpt.GPT(config)(torch.zeros(1, 32, dtype=torch.long))
    except Exception as error:
        return f"in forward: {error}", None
    return "nothing: it runs", None


def teach(lesson: form.Lesson) -> None:
    config_class = lesson.mutate or GPTConfig
    lesson.predict(
        "GPTConfig(num_layers=2, hidden_size=64, num_heads=4) says no more. How large is a head?"
        " How wide is the MLP? How many heads have keys and values of their own?",
        "size of a head; width of the MLP; heads with keys and values",
    )
    config = config_class(2, 64, 4)
    found = config.head_dim, config.ffn_hidden_size, config.num_kv_heads
    lesson.check(f"{found}: h / a, 4 h, a", found == (64 // 4, 4 * 64, 4), found)

    lesson.predict(
        "A family is a set of defaults. Beside llama=True stand norm='rmsnorm1p' and tied=True:"
        " which norm, activation and positions has the model? Are embedding and head one matrix?"
    )
    config = config_class(2, 64, 4, llama=True, norm="rmsnorm1p", tied=True)
    found = config.norm, config.activation, config.positions, config.tied
    lesson.check(
        f"{', '.join(found[:3])}, {'one matrix' if found[3] else 'two'}: the family fills the rest",
        found == ("rmsnorm1p", "swiglu", "rotary", True),
    )

    lesson.predict("Can 4 heads share 3 heads of keys and values? Which numbers near 3 would do?")
    said, error = refusal(config_class, num_heads=4, num_kv_heads=3)
    lesson.check(said, error is not None and "[1, 2, 4] would fit" in said)
    flag = error.message(lambda field: "--" + field.replace("_", "-")) if error else "no error"
    lesson.check(f"train.py: {flag}", flag.startswith("--num-kv-heads 3: must divide --num-heads"))

    lesson.predict(
        "Fused attention never has the s x s probabilities in memory. Does dropout 0.1 go with it?"
    )
    said, error = refusal(config_class, num_heads=4, dropout=0.1, attention="fused")
    lesson.check(said, error is not None and error.field == "attention")


if __name__ == "__main__":
    form.run("model_config")
