"""The U-Net and the autoencoder (models/): every layout gives what one device gives."""

import pytest
from parity import SMALL, again, check

BASE = {k: v for k, v in SMALL.items() if k not in ("seq_length", "vocab_size")}
UNET = BASE | dict(command="unet.py", model="tiny", num_layers=3, picture_size=8, text_length=7)
UNET |= dict(caption_layers=1)
EDIT = UNET | dict(edit=True, objective="flow", num_layers=5)
CODER = BASE | dict(command="autoencoder.py", model="tiny", num_layers=4, picture_size=8)
del CODER["dropout"], CODER["num_heads"]

ZERO_3 = dict(zero_stage=3, micro_batch_size=2)
SELECTIVE, FULL = dict(recompute="selective"), dict(recompute="full")

CASES = {
    "unet": (UNET, 2, [ZERO_3 | SELECTIVE]),
    "autoencoder": (CODER, 2, [ZERO_3 | FULL]),
    "edits on 1": (EDIT, 1, [FULL, dict(micro_batch_size=1)]),
}
MORE = {
    f"{name}, {world}": (base, world, layouts)
    for name, base in (("unet", UNET), ("edits", EDIT), ("autoencoder", CODER))
    for world, layouts in {
        2: [dict(zero_stage=stage) for stage in range(3)] + [ZERO_3, FULL | ZERO_3],
        4: [ZERO_3 | dict(data_parallel_replicate_degree=2)],
    }.items()
}
MORE["unet, 3"] = (UNET | dict(global_batch_size=9), 3, [dict(zero_stage=s) for s in range(4)])


@pytest.mark.parametrize(
    "base, world, layouts",
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(again(*case, id=name) for name, case in MORE.items()),
    ],
)
def test_equals_one_device(base, world, layouts):
    check(world, layouts, base)
