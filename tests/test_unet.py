"""The U-Net and the autoencoder (models/): every layout gives what one device gives."""

import pytest
import small_run
import torch
from parity import SMALL, check, differs, gates, train

from base.model_config import FieldError
from course.training_commands import config_of
from models.autoencoder import AutoencoderConfig, open_autoencoder
from models.pictures import Context, Drawn, to_tensor
from models.unet import Block, UNetConfig
from run import rules
from run.checkpoint import CheckpointError
from run.config import ConfigError

BASE = {k: v for k, v in SMALL.items() if k not in ("seq_length", "vocab_size")}
UNET = BASE | dict(command="unet.py", model="tiny", num_layers=3, picture_size=8, text_length=7)
UNET |= dict(caption_layers=1, hidden_size=16)
EDIT = UNET | dict(edit=True, objective="flow", num_layers=5)
CODER = BASE | dict(
    command="autoencoder.py", model="tiny", num_layers=4, picture_size=8, hidden_size=16
)
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


@gates(CASES, MORE)
def test_equals_one_device(base, world, layouts):
    check(world, layouts, base)


def skips_in_the_context():
    """What a skip would be outside the arguments of a recomputed block."""
    forward = Block.forward
    Block.forward = lambda self, *args: forward(
        self, *args[:-1], args[-1] if args[-1] is None else args[-1].detach()
    )


def test_gate_sees_the_gradient_of_skips():
    one = train(base=UNET, steps=1)
    differs(train(base=UNET, steps=1, mutate=skips_in_the_context, **FULL), one)


def test_gate_sees_the_kl_term():
    differs(train(base=CODER, steps=1, kl_weight=1.0), train(base=CODER, steps=1, kl_weight=0.0))


# --- the models -----------------------------------------------------------------------------------

SIZES = dict(num_layers=5, hidden_size=16, picture_size=16)


def test_resolutions_and_skips():
    """Block i and block L - 1 - i have one resolution, and the second reads the first."""
    model = UNetConfig(**SIZES, num_heads=4, text_length=6).build()
    seen, read = [], {}
    for number, block in model.blocks.items():
        block.register_forward_hook(lambda _, args, y, n=int(number): seen.append((n, args, y)))
    times, pictures = torch.tensor([3.0, 900.0]), torch.randn(2, 3, 16, 16)
    model(torch.zeros(2, 6, dtype=torch.long), None, Context(pictures=pictures, times=times))
    shapes = [tuple(y.shape[1:]) for _, _, y in seen]
    assert shapes == [(16, 16, 16), (32, 8, 8), (64, 4, 4), (32, 8, 8), (16, 16, 16)]
    for number, args, _ in seen:
        for skip in args[4:]:
            read[number] = next(k for k, _, y in seen if y is skip)
    assert read == {3: 1, 4: 0}


@pytest.mark.parametrize("what", ["tokens", "times", "source"])
def test_reads(what):
    """The caption, its order, the time and the source change each pixel of a prediction."""
    torch.manual_seed(0)
    model = UNetConfig(**SIZES, num_heads=4, text_length=6, source_channels=3).build()
    tokens, times = torch.tensor([[5, 9, 4, 0, 0, 0]]), torch.tensor([300.0])
    pictures = torch.randn(1, 6, 16, 16)
    before = model(tokens, None, Context(pictures=pictures, times=times))
    if what == "tokens":
        tokens = torch.tensor([[9, 5, 4, 0, 0, 0]])
    elif what == "times":
        times = times + 1
    else:
        pictures = torch.cat((pictures[:, :3], pictures[:, 3:] + 1), 1)
    after = model(tokens, None, Context(pictures=pictures, times=times))
    assert (after != before).all()


def test_error_and_kl_by_hand():
    """Error (2 - 0.5)² = 2.25. Mean 1 and log σ² 0: KL (1 + 1 - 1 - 0) / 2; mean 0 and log σ² 1:
    KL (e - 2) / 2."""
    model = AutoencoderConfig(4, 8, picture_size=4).build()
    model.head.output = torch.nn.Identity()
    features, targets = torch.full((2, 3, 4, 4), 2.0), torch.full((2, 3, 4, 4), 0.5)
    mean = torch.tensor([1.0, 0.0]).view(2, 1, 1, 1).expand(2, 4, 2, 2)
    found = model.head((features, mean, 1 - mean), targets)
    torch.testing.assert_close(found, torch.tensor([[2.25, 0.5], [2.25, (torch.e - 2) / 2]]))


def test_latents_of_a_run(tmp_path):
    """Their standard deviation is measured, and they are divided by it."""
    flags = "--steps 3 --picture-size 8 --num-layers 4 --hidden-size 8 --lr 1e-2 --device cpu"
    flags += " --kl-weight 0.5 --eval-every 2 --save-every 1 --keep 0"
    assert small_run.run("autoencoder.py", *flags.split(), "--out", tmp_path) == 0
    last = small_run.lines_of(tmp_path)[-1]
    latents = open_autoencoder(str(tmp_path))
    x = to_tensor([e.picture for e in map(Drawn(200_000, 8).__getitem__, range(190_000, 190_064))])
    z = latents.encode(x)
    assert (latents.channels, latents.factor, z.shape[1:]) == (4, 2, (4, 4, 4))
    assert latents.std == last["latent_std"] != 1
    assert z.std().item() == pytest.approx(1, abs=0.1)
    assert latents.decode(z).shape == x.shape
    features, *_ = latents.model.run_blocks(
        latents.model.embedding(None, Context(pictures=x)), 1, Context()
    )
    torch.testing.assert_close(latents.decode(z), latents.model.head.output(features))
    error = (latents.decode(z) - x).square().mean().item()
    # The latents of training have noise, which hardly matters here.
    assert error == pytest.approx(last["eval_error"], rel=0.05)
    assert last["eval_loss"] == pytest.approx(last["eval_error"] + 0.5 * last["eval_kl"])
    # Edits of latents, whose sources are latents too.
    flags = "--steps 1 --picture-size 4 --num-layers 3 --hidden-size 8 --edit --device cpu"
    words = (*flags.split(), "--autoencoder", tmp_path, "--out", tmp_path / "edits")
    assert small_run.run("unet.py", *words) == 0
    with pytest.raises(CheckpointError, match="before an evaluation"):
        open_autoencoder(str(tmp_path / "checkpoints" / "step-000001"))


# --- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: UNetConfig(4, 16, 4), "num_layers 4: must be odd, and"),
        (lambda: UNetConfig(1, 16, 4), "num_layers 1: must be odd, and at least 3"),
        (
            lambda: UNetConfig(5, 12, 4),
            "hidden_size 12: must be a multiple of 8 with num_layers 5",
        ),
        (lambda: UNetConfig(5, 16, 3), "num_heads 3: must divide"),
        (lambda: UNetConfig(5, 16, 4, picture_size=18), "picture_size 18: must be a multiple of 4"),
        (lambda: AutoencoderConfig(5, 64), "num_layers 5: must be even, and"),
    ],
)
def test_refused_shapes(make, words):
    with pytest.raises(FieldError) as refused:
        make()
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize("command", ["unet.py", "autoencoder.py"])
@pytest.mark.parametrize("flags", [dict(tp=2), dict(pp=2), dict(fp8="current")], ids=str)
def test_refused_layouts(command, flags):
    config = config_of(dict(command=command, **flags))
    with pytest.raises(
        ConfigError, match=r"--(tp 2|pp 2|fp8 current): convolutions .* --zero-stage"
    ):
        rules.validate(config, 2)
