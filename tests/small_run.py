"""Flags of a run of train.py that takes seconds: one narrow layer, a short context, no evaluation.

small_run.flags(steps=30)        ["--num-layers", "1", ..., "--steps", "30"]
"""

SMALL = dict(
    num_layers=1,
    hidden_size=32,
    num_heads=4,
    ffn_hidden_size=64,
    seq_length=32,
    global_batch_size=2,
    device="cpu",
    eval_every=0,
)


def flags(**options) -> list[str]:
    """The flags of SMALL; options replace some of them, or come in addition."""
    return as_flags(**SMALL | options)


def as_flags(**options) -> list[str]:
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words
