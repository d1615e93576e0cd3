"""BERT and T5 (models/): every layout gives the loss, gradients and parameters of one device."""

import pytest
import random_layouts
import torch
from parity import (
    SMALL,
    again,
    check,
    differs,
    gates,
    needs_compiler,
    same,
    train,
    trainer_of,
    without_cpp,
)
from test_checkpoint import trained
from test_compositions import small_loss_scale

import fp8
from base.dropout import Dropout
from base.model_config import FieldError
from course import ranks
from finetune.adapter_files import open_adapter
from models.batch import Context
from models.bert import BertConfig
from models.t5 import T5Config

TINY = SMALL | dict(model="tiny", num_layers=4)
BERT = TINY | dict(command="bert.py")
# an encoder of one block and a decoder of three, a gated MLP, a head of its own
T5 = TINY | dict(command="t5.py", encoder_layers=1, target_length=6, ffn_hidden_size=48)
# ReLU, one matrix for embedding and head
TIED = T5 | dict(model="t5-small", head_dim=8)
# with several documents in a row, and padding
PACKED = dict(document_mask=True)

FULL, SELECTIVE = dict(recompute="full"), dict(recompute="selective")
SEQUENCE = dict(tp=2, sequence_parallel=True)
FUSED = dict(dropout=0.0, attention="fused")
ZERO_3 = dict(zero_stage=3, micro_batch_size=2)
ZB_H1 = dict(pp=2, schedule="zb-h1")
STAGES = [ZB_H1 | FULL, dict(pp=2, schedule="gpipe", layer_split=[1, 3])]
FP8 = dict(fp8="delayed", fp8_scales="any", fp8_skip=0, micro_batch_size=2)
LORA = dict(peft="lora", lora_rank=3, lora_dropout=0.2)
OF_FOUR = [
    SEQUENCE | FULL | dict(pp=2),
    ZERO_3 | ZB_H1,
    ZERO_3 | dict(data_parallel_replicate_degree=2),
]

CASES = {
    "bert": (BERT | PACKED, 2, [SEQUENCE | FULL, ZERO_3 | SELECTIVE, dict(cp=2)]),
    "bert, stages": (BERT, 2, [dict(pp=2, virtual_stages=2)]),
    "bert, fp8, head": (BERT | FP8 | dict(fp8="current"), 2, [dict(tp=2, head_chunk=5)]),
    "t5": (TIED | PACKED, 2, [ZERO_3 | SELECTIVE, dict(tp=2) | FUSED]),
    # the second has a stage without a block
    "t5, stages": (TIED, 2, [ZB_H1 | FULL, dict(pp=2, layer_split=[0, 4])]),
    "t5, fp8, lora": (T5 | FP8 | LORA, 2, [SEQUENCE]),
}
MORE = {
    # a decoder whose norms come last, as BERT's do
    "gpt1": (SMALL | PACKED | dict(model="gpt1"), 2, [SEQUENCE | FULL, ZB_H1, ZERO_3, dict(cp=2)]),
    "bert, one rank": (BERT | PACKED, 1, [SELECTIVE, FULL | FUSED, dict(micro_batch_size=1)]),
    "bert, context": (BERT, 2, [FUSED | dict(cp=2), dict(cp=2)]),
    "bert, data": (BERT, 2, [dict(zero_stage=stage) for stage in (0, 1, 2)]),
    "bert, more stages": (BERT, 2, [*STAGES, dict(pp=2, head_chunk=7)]),
    "bert on 4": (BERT | PACKED, 4, [*OF_FOUR, SEQUENCE | dict(cp=2)]),
    "bert, fp8": (BERT | FP8, 2, [SEQUENCE | FULL, dict(tp=2), ZB_H1, ZERO_3]),
    "t5, one rank": (T5 | PACKED, 1, [SELECTIVE, FULL | FUSED, dict(micro_batch_size=1)]),
    "t5, data": (TIED, 2, [dict(zero_stage=stage) for stage in (0, 1, 2)]),
    "t5, untied": (T5 | PACKED, 2, [*STAGES, dict(pp=2, layer_split=[3, 1]), SEQUENCE]),
    "t5 on 4": (TIED | PACKED, 4, [SEQUENCE | FULL | dict(pp=2)]),
    "t5 on 4, all": (
        TIED | PACKED,
        4,
        [*OF_FOUR, dict(pp=4), dict(pp=4, layer_split=[0, 2, 1, 1])],
    ),
    "t5, head": (T5, 2, [SEQUENCE | dict(head_chunk=7), dict(pp=2, head_chunk=5)]),
    "t5, fp8": (T5 | PACKED | FP8, 2, [dict(tp=2), SEQUENCE | FULL, ZB_H1, ZERO_3]),
    **{
        f"{name}, {method}, all": (base | PACKED | adapters, 2, [SEQUENCE | FULL, ZB_H1, ZERO_3])
        for name, base in (("bert", BERT), ("t5", T5))
        for method, adapters in dict(
            lora=LORA, adapter=dict(peft="adapter", adapter_size=4), ia3=dict(peft="ia3")
        ).items()
    },
}


@gates(CASES, MORE)
def test_equals_one_device(base, world, layouts):
    check(world, layouts, base)


@pytest.mark.parametrize(
    "flags, seed",
    [
        ("--models", 22),
        *[again("--models", seed) for seed in range(200, 224)],
        *[again("--models --fp8", seed) for seed in range(8)],
        *[again("--models --peft", seed) for seed in range(8)],
    ],
)
def test_random_layouts(flags, seed):
    random_layouts.check(random_layouts.drawn(flags, seed))


@needs_compiler
@pytest.mark.repetition
@pytest.mark.parametrize("base", [BERT | PACKED, T5 | PACKED], ids=["bert", "t5"])
@pytest.mark.parametrize("world, flags", [(1, FULL), (2, SEQUENCE), (2, ZERO_3)], ids=str)
def test_compiled(base, world, flags):
    one = train(base=base, steps=1)
    same(train(world, base=base, steps=1, mutate=without_cpp, compile=True, **flags), one)


@pytest.mark.repetition
@pytest.mark.parametrize("base", [BERT, TIED], ids=["bert", "t5"])
def test_float32(base):
    check(2, [SEQUENCE, dict(pp=2)], base | dict(precision="fp32"), 1, 1e-5)


@pytest.mark.repetition
@pytest.mark.parametrize("base", [BERT | PACKED, T5 | PACKED], ids=["bert", "t5"])
def test_float16(base):
    """As near as 11 bits of mantissa are."""
    one = train(base=base, steps=1, dropout=0.0)
    flags = SEQUENCE | dict(precision="fp16", dropout=0.0)
    half = train(2, base=base, steps=1, mutate=small_loss_scale, **flags)
    largest = max(gradient.abs().max() for gradient in one.gradients.values())
    for name, gradient in one.gradients.items():
        # a key bias has no gradient
        scale = max(gradient.abs().max(), 1e-3 * largest)
        assert (half.gradients[name] - gradient).abs().max() < 0.01 * scale, name


# --- the gate can fail (course/mutations/models.py has more) --------------------------------------


def last_masks_of_the_first_slice():
    forward = Dropout.forward
    # the dropout after T5's last norm has this site
    Dropout.forward = lambda self, x, key: forward(
        Dropout(self.p, self.site) if self.site == 22 else self, x, key
    )


def test_gate_sees_the_masks_after_the_last_norms():
    one = train(base=T5, steps=1)
    differs(train(2, base=T5, steps=1, mutate=last_masks_of_the_first_slice, **SEQUENCE), one)


def test_cross_attention_has_scales_of_its_own():
    t = trainer_of(T5 | FP8)
    block = t.model.blocks["1"]
    of_self, of_cross = block.attention.project.places, block.cross_attention.project.places
    of_memory = block.cross_attention.project_kv.places
    assert of_self == ((1, 0), (1, 1), (1, 2))
    assert (of_cross, of_memory) == (((5, 0),), ((5, 1), (5, 2)))
    assert isinstance(block.cross_attention.output, fp8.FP8Linear)
    assert not hasattr(t.model.blocks["0"], "cross_attention")


# --- what does not fit ----------------------------------------------------------------------------

SIZES = dict(num_layers=2, hidden_size=16, num_heads=2)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: BertConfig(**SIZES, token_types=0), "token_types 0: must be at least 1"),
        (lambda: BertConfig(**SIZES, activation="swiglu"), "activation swiglu: must be exact-gelu"),
        (lambda: T5Config(**SIZES, encoder_layers=2), "encoder_layers 2: must be at least 1 and"),
        (lambda: T5Config(**SIZES, positions="rotary"), "positions rotary: must be relative"),
        (lambda: T5Config(**SIZES, buckets=6), "buckets 6: must be a multiple of 4"),
    ],
)
def test_refused(make, words):
    with pytest.raises(FieldError) as refused:
        make()
    assert str(refused.value).startswith(words)


def test_a_t5_without_a_source_or_a_target():
    model = T5Config(**SIZES, vocab_size=9).build()
    for source in (0, 4):
        with pytest.raises(ValueError, match=rf"source is {source}; a T5 reads 1 to 3"):
            model(torch.zeros(1, 4, dtype=torch.long), None, Context(source))


# --- checkpoints ----------------------------------------------------------------------------------


PAIRS = {
    "bert": (BERT, [(2, SEQUENCE), (2, dict(pp=2, virtual_stages=2))]),
    "t5": (TIED, [(2, dict(pp=2, layer_split=[1, 3])), (2, SEQUENCE)]),
    "t5, untied": (T5, [(4, ZERO_3 | ZB_H1), (1, {})]),
}


@pytest.mark.parametrize(
    "base, layouts", [again(*PAIRS["bert"]), PAIRS["t5"], again(*PAIRS["t5, untied"])], ids=PAIRS
)
def test_a_checkpoint_loads_under_another_layout(tmp_path, base, layouts):
    """The losses go on as those of one device that never stopped."""
    whole, _ = ranks.run(trained, 1, 1, base, [None], None, 4)[0][0]
    (saving, saved), (loading, loaded) = layouts
    ranks.run(trained, saving, saving, base | saved, [None], str(tmp_path), 2)
    ((losses, _),) = ranks.run(trained, loading, loading, base | loaded, [str(tmp_path)], None, 2)[
        0
    ]
    assert losses == pytest.approx(whole[2:], rel=1e-10)


def test_an_adapter_of_cross_attention_is_opened(tmp_path):
    t = trainer_of(T5 | LORA)
    # of the base, which is not loaded here
    t.task.learned.identity = "0" * 16
    t.checkpoints.save(tmp_path, 1, 0, "corpus")
    t.checkpoints.saver.wait()
    shapes = open_adapter(tmp_path, T5Config).shapes
    assert shapes["blocks.1.cross_attention.value.lora.b"] == (128, 3)
