"""Multi-token prediction: by hand, under every layout, broken on purpose."""

import pytest
from parity import LLAMA, SMALL, again, check

MTP = dict(mtp_layers=2)
GPT2, GROUPED = SMALL | MTP, LLAMA | MTP | dict(vocab_size=257)
SEQUENCE = dict(tp=2, sequence_parallel=True)
CASES = {
    "data": (GPT2, 2, [dict(zero_stage=z, micro_batch_size=2) for z in (0, 1, 2, 3)]),
    "tensor": (GROUPED, 2, [dict(tp=2), SEQUENCE, SEQUENCE | dict(head_chunk=5, recompute="full")]),
    "pipeline": (GPT2, 2, [dict(pp=2), dict(pp=2, schedule="zb-h1", layer_split=[2, 0])]),
    "untied pipeline": (GROUPED, 2, [dict(pp=2, schedule="zb-h1"), dict(pp=2, virtual_stages=1)]),
    "context": (GPT2 | dict(document_mask=True), 2, [dict(cp=2), dict(cp=2, cp_kind="all-to-all")]),
}


@pytest.mark.parametrize("base, world, layouts", CASES.values(), ids=CASES)
def test_equals_one_device(base, world, layouts):
    check(world, layouts, base)
