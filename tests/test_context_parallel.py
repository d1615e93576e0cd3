"""context_parallel.py and ring_attention.py: every layout is one device; counted bytes and saved
activations are the formulas; what does not fit is refused."""

import pytest
from parity import LLAMA, SMALL, same, train, train_each

GPT = SMALL
# grouped queries, two key heads each for tensor parallelism and exchanged heads
GROUPED = LLAMA | dict(num_heads=8, num_kv_heads=4, seq_length=32)
BASES = {
    "gpt": SMALL | dict(seq_length=16),
    "llama": LLAMA | dict(dropout=0.0),
    "grouped": GROUPED | dict(dropout=0.0),
    "packed": GROUPED | dict(dropout=0.0, document_mask=True),
}
KINDS = ("ring", "all-to-all")


def again(*values, **options):
    """A case that covers no more than another one does: `make test-all` runs it."""
    return pytest.param(*values, marks=pytest.mark.repetition, **options)


def both(*layouts: dict) -> list[dict]:
    return [layout | dict(cp_kind=kind) for layout in layouts for kind in KINDS]


FLAGS_OF_MODEL = ("num_layers", "peft", "lora_dropout", "lora_rank", "peft_targets", "document_mask")


def check(base: dict, world: int, variants: list[dict], **model) -> None:
    results = train_each(world, variants, base=base | model)
    for variant, result in zip(variants, results, strict=True):
        try:
            same(result, train(base=base | model))
        except AssertionError as e:
            raise AssertionError(f"{variant}: {e}") from e


# --- the gate -------------------------------------------------------------------------------------

RECOMPUTED = [dict(cp=2, recompute="selective"), dict(cp=2, recompute="full")]
SHARDED = [dict(cp=2, zero_stage=1, micro_batch_size=2), dict(cp=2, zero_stage=3, recompute="full")]
OVER_TENSORS = [dict(cp=2, tp=2), dict(cp=2, tp=2, sequence_parallel=True, recompute="selective")]
OVER_PIPELINES = [
    dict(cp=2, pp=2),
    dict(cp=2, pp=2, schedule="zb-h1", recompute="selective"),
    dict(cp=2, pp=2, schedule="zb-h1", zero_stage=1, micro_batch_size=2),
]


@pytest.mark.parametrize(
    "base, world, variants",
    [
        ("gpt", 2, both(dict(cp=2), RECOMPUTED[0], dict(cp=2, zero_stage=2, micro_batch_size=2))),
        ("llama", 2, both(dict(cp=2), RECOMPUTED[1], SHARDED[0])),
        ("packed", 2, both(dict(cp=2))),
        ("gpt", 4, both(dict(cp=4), *OVER_TENSORS, *OVER_PIPELINES[1:], SHARDED[1])),
        ("grouped", 4, both(dict(cp=4), OVER_TENSORS[1], OVER_PIPELINES[0])),
        ("packed", 4, [dict(cp=4), *both(OVER_TENSORS[1]), dict(cp=2, pp=2, micro_batch_size=2)]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_gate(base, world, variants):
    check(BASES[base], world, variants)
