"""Diffusion: the formulas by hand, against diffusers, and on data whose best model is known; DiT
under every layout."""

import math
import re

import numpy as np
import pytest
import small_run
import torch
import torch.nn.functional as F
from parity import SMALL, check, differs, gates, needs_compiler, same, train, without_cpp
from PIL import Image

from course import ranks
from course.parity import Run
from course.training_commands import config_of
from models import draw
from models.diffusion import (
    DDPM,
    OBJECTIVES,
    Flow,
    TimeEmbedding,
    guided,
    sample,
    squared_error,
)
from models.diffusion_runs import Pixels, Sampling
from models.dit import Embedding
from models.pictures import open_pictures, to_tensor
from run.config import ConfigError
from run.tokenizer import ByteTokenizer

# --- by hand --------------------------------------------------------------------------------------


def test_loss_and_steps_by_hand():
    """a = 0.8, b = 0.6 at time 0; a = 0.6, b = 0.8 at time 1."""
    process = DDPM(torch.tensor([0.64, 0.36], dtype=torch.float64))
    x, noise = torch.tensor([[[[0.5]]]]).double(), torch.tensor([[[[-1.0]]]]).double()
    x_t = process.add_noise(x, noise, 1)
    assert x_t.item() == pytest.approx(0.6 * 0.5 - 0.8 * 1)  # -0.5
    found = noise / 2
    assert squared_error(found, process.target(x, noise)).tolist() == [[0.25]]
    # x = (-0.5 + 0.8 * 0.5) / 0.6 = -1/6
    ddim = process.step(x_t, 1, 0, found)
    assert ddim.item() == pytest.approx(0.8 * -1 / 6 + 0.6 * -0.5)
    # DDPM, equation 11: α = 0.36 / 0.64 = 0.5625, β = 0.4375, variance (0.36 / 0.64) β = 0.2461
    mean = (-0.5 - 0.4375 / 0.8 * -0.5) / 0.75
    ddpm = process.step(x_t, 1, 0, found, torch.full_like(x, 2.0))
    assert ddpm.item() == pytest.approx(mean + 2 * math.sqrt(0.5625 * 0.4375))
    # A picture has no number beyond 1, and the noise follows: x = 1, ε = (-0.5 - 0.6) / 0.8.
    clipped = process.step(x_t, 1, 0, noise * 5, clip=True)
    assert clipped.item() == pytest.approx(0.8 + 0.6 * -1.1 / 0.8)


def test_flow_by_hand():
    process = Flow()
    x, noise = torch.tensor(2.0).double(), torch.tensor(-1.0).double()
    assert process.add_noise(x, noise, 250).item() == 0.75 * 2 - 0.25
    assert process.target(x, noise).item() == -3
    # Euler's method: x + (s - t) v
    assert process.step(x, 750, 500, noise * 3).item() == pytest.approx(2 + 0.25 * 3)
    assert process.times(4) == [1000, 750, 500, 250, 0]
    assert DDPM().times(4) == [999, 749, 499, 249, -1]


def test_guidance():
    """Two guidances are those of InstructPix2Pix, equation 3; both weights 1: no guidance."""

    def model(x, t, ids, source):
        found = x + 10 * ids[:, :1, None, None] + t
        return found if source is None else found + 100 * source + source * ids[:, :1, None, None]

    x, source = torch.ones(2, 1, 1, 1), torch.tensor([3.0, 4.0]).view(2, 1, 1, 1)
    captions, empty = torch.tensor([[1, 7], [2, 7]]), torch.tensor([0, 0])
    found = guided(model, captions, empty, 3.0)(x, 5)
    assert found.flatten().tolist() == [6 + 3 * 10, 6 + 3 * 20]
    found = guided(model, captions, empty, 3.0, source, 2.0)(x, 5)
    assert found.flatten().tolist() == [6 + 2 * 300 + 3 * (10 + 3), 6 + 2 * 400 + 3 * (20 + 8)]
    assert guided(model, captions, empty, 1.0)(x, 5).equal(model(x, 5, captions, None))
    found = guided(model, captions, empty, 1.0, source)(x, 5)
    assert found.equal(model(x, 5, captions, source))


def test_time_embedding():
    """Of t its cosine and sine, and those of t / 100."""
    embedding, t = TimeEmbedding(3, features=4), 7.0
    x = torch.tensor([f(t * rate) for f in (math.cos, math.sin) for rate in (1, 0.01)])
    expected = embedding.second(F.silu(embedding.first(x)))
    torch.testing.assert_close(embedding(torch.tensor([t])), expected.unsqueeze(0))


# --- data of which the best answer is known -------------------------------------------------------

MEAN, DEVIATION = 0.4, 0.25


def gaussian(process):
    """What the best model finds in data N(μ, σ²), where
    E[x | x_t] = μ + a σ² (x_t - a μ) / (a² σ² + b²)"""

    def find(x_t, t):
        a, b = process.rates(t)
        variance = (a * DEVIATION) ** 2 + b**2
        x = MEAN + a * DEVIATION**2 / variance * (x_t - a * MEAN)
        return process.target(x, (x_t - a * x) / b)

    return find


@pytest.mark.parametrize("objective, ddpm", [("noise", False), ("noise", True), ("flow", False)])
def test_samples_of_a_gaussian(objective, ddpm):
    process, g = OBJECTIVES[objective](), torch.Generator().manual_seed(0)
    n = 20_000
    drawn = sample(
        process, gaussian(process), lambda: torch.randn(n, generator=g).double(), 1000, ddpm
    )
    # Four standard errors, and a hundredth: DDPM's steps have a little too small a variance.
    assert drawn.mean().item() == pytest.approx(MEAN, abs=4 * DEVIATION / math.sqrt(n) + 0.0025)
    assert drawn.std().item() == pytest.approx(DEVIATION, rel=4 / math.sqrt(2 * n) + 0.015)


# --- diffusers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("ddpm", [False, True])
def test_equals_diffusers(ddpm, clip):
    """Four steps of DDIM, and of DDPM, with the model that finds 0.3 sin(3 x_t); and the noise."""
    diffusers = pytest.importorskip("diffusers")
    names = dict(clip_sample=clip, timestep_spacing="trailing")
    scheduler = (diffusers.DDPMScheduler if ddpm else diffusers.DDIMScheduler)(**names)
    kept = scheduler.alphas_cumprod.double()
    torch.testing.assert_close(torch.tensor(DDPM().kept[:-1]), kept.float(), atol=1e-6, rtol=0)
    # Theirs are in float32: from here on both have the same ones.
    scheduler.alphas_cumprod, scheduler.one = kept, torch.tensor(1.0).double()
    process = DDPM(kept)
    g = torch.Generator().manual_seed(0)
    x, noise, *fresh = torch.randn(7, 2, 3, 4, 4, generator=g).double()
    for t in (0, 400, 999):
        theirs = scheduler.add_noise(x, noise, torch.tensor([t]))
        torch.testing.assert_close(process.add_noise(x, noise, t), theirs, atol=1e-6, rtol=0)
    scheduler.set_timesteps(4)
    times = process.times(4)
    assert scheduler.timesteps.tolist() == times[:-1]
    ours = theirs = x
    for t, s, z in zip(times, times[1:], fresh):
        ours = process.step(ours, t, s, 0.3 * torch.sin(3 * ours), z if ddpm else None, clip)
        found = 0.3 * torch.sin(3 * theirs)
        if ddpm:
            theirs = ddpm_step(scheduler, found, int(t), theirs, z)
        else:
            options = dict(use_clipped_model_output=clip)
            theirs = scheduler.step(found, int(t), theirs, **options).prev_sample
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def ddpm_step(scheduler, found, t: int, x, z):
    """Their step with noise z: they draw it themselves."""
    drawn = pytest.MonkeyPatch()
    with drawn.context() as patch:
        module = "diffusers.schedulers.scheduling_ddpm.randn_tensor"
        patch.setattr(module, lambda *shape, **options: z)
        return scheduler.step(found, t, x).prev_sample


# --- every layout ---------------------------------------------------------------------------------

# t does not divide the 257 tokens; with time and caption 8 positions stand before 16 patches.
DIT = {k: v for k, v in SMALL.items() if k not in ("seq_length", "vocab_size")} | dict(
    command="dit.py", model="tiny", num_layers=4, picture_size=16, patch_size=4, text_length=7
)
FULL, SELECTIVE = dict(recompute="full"), dict(recompute="selective")
SEQUENCE = dict(tp=2, sequence_parallel=True)
ZERO_3 = dict(zero_stage=3, micro_batch_size=2)
ZB_H1 = dict(pp=2, schedule="zb-h1")
EDIT, FLOW = dict(edit=True), dict(objective="flow")

CASES = {
    "2": (DIT, 2, [SEQUENCE | FULL, ZERO_3 | SELECTIVE]),
    "stages": (DIT | EDIT, 2, [ZB_H1 | FULL | dict(layer_split=[0, 4])]),
}
MORE = {
    "one rank": (DIT, 1, [SELECTIVE, FULL, dict(micro_batch_size=1)]),
    "data": (DIT | FLOW, 2, [dict(zero_stage=stage) for stage in (0, 1, 2, 3)]),
    "fused": (DIT | dict(dropout=0.0), 2, [dict(tp=2), SEQUENCE, ZB_H1]),
    "edits": (DIT | EDIT | FLOW, 2, [dict(tp=2), SEQUENCE | SELECTIVE, ZERO_3]),
    "more stages": (DIT, 2, [ZB_H1, dict(pp=2, virtual_stages=2), dict(pp=2, schedule="gpipe")]),
    "4": (
        DIT,
        4,
        [
            SEQUENCE | FULL | dict(pp=2),
            ZERO_3 | ZB_H1,
            ZERO_3 | dict(data_parallel_replicate_degree=2),
            SEQUENCE | dict(zero_stage=3),
            dict(pp=4),
        ],
    ),
    "fp8": (DIT | dict(fp8="delayed", fp8_skip=0, micro_batch_size=2), 2, [SEQUENCE, ZB_H1]),
}


@gates(CASES, MORE)
def test_equals_one_device(base, world, layouts):
    check(world, layouts, base)


@needs_compiler
@pytest.mark.repetition
@pytest.mark.parametrize("world, flags", [(1, FULL), (2, SEQUENCE), (2, ZERO_3)], ids=str)
def test_compiled(world, flags):
    one = train(base=DIT, steps=1)
    same(train(world, base=DIT, steps=1, mutate=without_cpp, compile=True, **flags), one)


@pytest.mark.repetition
def test_float32():
    check(2, [SEQUENCE, dict(pp=2)], DIT | dict(precision="fp32"), 1, 1e-5)


def take_the_first_slice():
    Embedding.share_sequence = lambda self, group: setattr(self, "shard", (0, group.size()))


def test_gate_sees_the_slices():
    """Each rank takes the first slice for its own."""
    one = train(base=DIT, steps=1)
    differs(train(2, base=DIT, steps=1, mutate=take_the_first_slice, **SEQUENCE), one)


# --- drawing --------------------------------------------------------------------------------------

CAPTIONS = ["a small red circle on white"] * 2 + ["a large blue cross on black"] * 2


def drawn(rank: int, world: int, layouts: list[dict]) -> list[torch.Tensor]:
    task_of = [Run(world, config_of(DIT | layout)).trainer.task for layout in layouts]
    return [task.draw(ByteTokenizer(), CAPTIONS, None, Sampling(2, steps=3)) for task in task_of]


def test_draws_the_same_under_every_layout():
    (whole,) = drawn(0, 1, [{}])
    layouts = [SEQUENCE, dict(pp=2), ZERO_3]
    for of_rank in ranks.run(drawn, 2, 2, layouts):
        for pictures in of_rank:
            torch.testing.assert_close(pictures, whole, atol=1e-5, rtol=0)
    # The rows begin with the same noise; the captions differ, and so does the noise of two columns.
    assert (whole[0] - whole[1]).abs().mean() > 0.1 > (whole[0] - whole[2]).abs().mean() > 0


class Negatives(Pixels):
    """An autoencoder of a kind."""

    def encode(self, pictures):
        return -pictures


def test_each_guidance_is_of_its_condition():
    """With none by the caption, captions change nothing, and the source does: what an autoencoder
    makes of it."""
    task = Run(1, config_of(DIT | EDIT)).trainer.task
    sources = torch.rand(4, 3, 16, 16)[[0, 1, 0, 1]]

    def draw(sources, w: float, of_source: float) -> torch.Tensor:
        options = Sampling(2, steps=2, guidance=w, source_guidance=of_source)
        return task.draw(ByteTokenizer(), CAPTIONS, sources, options)

    of_source, of_caption = draw(sources, 0.0, 1.0), draw(sources, 1.0, 0.0)
    torch.testing.assert_close(of_source[:2], of_source[2:], atol=1e-9, rtol=0)
    assert (of_caption[:2] - of_caption[2:]).abs().max() > 1e-6
    of_negatives = draw(-sources, 0.0, 1.0)
    assert (of_source - of_negatives).abs().max() > 1e-6
    task.config.space = Negatives()
    assert draw(sources, 0.0, 1.0).equal(of_negatives)


TINY = dict(
    picture_size=8, patch_size=4, hidden_size=32, num_layers=1, text_length=39, device="cpu"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, and its flags."""
    out = tmp_path_factory.mktemp("run")
    flags = small_run.as_flags(**TINY, steps=1, global_batch_size=2, out=out)
    assert small_run.run("-m", "models.dit", *flags) == 0
    return out, flags


def test_a_run_draws_and_goes_on(run, tmp_path, capsys):
    out, flags = run
    assert Image.open(out / "sample.png").size == (10 * 8, 8)
    assert len(re.findall("a (small|large) ", (out / "sample.txt").read_text())) == 10
    picture, two = tmp_path / "a.png", ["--caption", CAPTIONS[0], "--caption", "a cat"]
    few = ["--checkpoint", str(out), *two, "--steps", "2"]
    pixels = []
    for options in (["--count", "3"], ["--count", "2"], ["--count", "2", "--sampler", "ddpm"]):
        assert draw.main([*few, *options, "--out", str(picture)]) == 0
        pixels.append(np.asarray(Image.open(picture)).astype(int))
    assert pixels[0].shape == (16, 24, 3)
    assert abs(pixels[0][:, :16] - pixels[1]).max() <= 1
    assert abs(pixels[2] - pixels[1]).max() > 10
    capsys.readouterr()
    other = [*flags, "--resume", "--steps", "2", "--objective", "flow"]
    refused = small_run.refusal(capsys, "-m", "models.dit", *other)
    assert "--objective flow:" in refused and "learns noise" in refused


def test_each_picture_needs_a_caption(tmp_path, capsys):
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / name).parent.mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    flags = small_run.as_flags(**TINY, data=tmp_path, out=tmp_path / "run")
    assert "has no caption" in small_run.refusal(capsys, "-m", "models.dit", *flags)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--caption", "a " * 30], "is too long: the model reads 39 tokens with the end"),
        (["--caption", "a", "--source", "a.png"], "draws; leave --source out"),
        (["--caption", "a", "--steps", "1001"], "--steps 1001: must be at most 1000"),
        (["--caption", "a", "--count", "0"], "--count 0: must be at least 1"),
        (["--caption", "a", "--guidance", "nan"], "--guidance nan: must be at least 0"),
        (
            ["--caption", "a", "--out", "no/a.png"],
            "--out no/a.png: must end in .png, in a folder that exists",
        ),
        (["--caption", "a", "--out", "a.jpg"], "--out a.jpg: must end in .png"),
        (["--caption", "a", "--out", ""], "--out .: must end in .png"),
        (["--caption", "a", "--source-guidance", "2"], "--source-guidance 2.0: needs --source"),
        (["--caption", "a", "--tp", "2"], "torchrun --nproc-per-node 2 -m models.draw"),
    ],
)
def test_draw_refuses(flags, words, run, capsys):
    assert draw.main(["--checkpoint", str(run[0]), *flags]) == 2
    assert words in capsys.readouterr().err


def test_draw_refuses_other_models(tmp_path, capsys):
    flags = small_run.flags(steps=1, out=tmp_path, data=__file__)
    assert small_run.run(*flags) == 0
    assert draw.main(["--checkpoint", str(tmp_path), "--caption", "a"]) == 2
    assert "is of none of -m models.dit" in capsys.readouterr().err


def test_a_unet_draws_in_latents(tmp_path, capsys):
    coder, unet = tmp_path / "coder", tmp_path / "unet"
    small = dict(steps=1, hidden_size=16, eval_every=0, global_batch_size=2, device="cpu")
    of_coder = small_run.as_flags(**small, num_layers=4, picture_size=8, out=coder)
    assert small_run.run("-m", "models.autoencoder", *of_coder) == 0
    of_unet = small | dict(num_layers=3, picture_size=4, autoencoder=coder, num_heads=2)
    of_unet |= dict(objective="flow", out=unet)
    assert small_run.run("-m", "models.unet", *small_run.as_flags(**of_unet)) == 0
    picture, moved = tmp_path / "a.png", coder.rename(tmp_path / "moved")
    flags = ["--checkpoint", str(unet), "--caption", "a", "--count", "2", "--out", str(picture)]
    assert draw.main(flags) == 2
    assert f"--autoencoder {coder}: no such" in capsys.readouterr().err
    flags += ["--steps", "2", "--autoencoder", str(moved)]
    assert draw.main([*flags, "--sampler", "ddpm"]) == 2
    assert "--sampler ddpm: is for models of noise" in capsys.readouterr().err
    assert draw.main(flags) == 0
    assert Image.open(picture).size == (16, 8)
    # The autoencoder learns more: its latents are others then.
    more = small_run.as_flags(out=moved, steps=2)
    assert small_run.run("-m", "models.autoencoder", *of_coder[2:], "--resume", *more) == 0
    capsys.readouterr()
    assert draw.main(flags) == 2
    rule = f"--autoencoder {moved}: is not the one with which "
    assert f"{rule}{unet} has learned" in capsys.readouterr().err
    of_unet |= dict(autoencoder=moved, steps=2)
    on = small_run.as_flags(**of_unet)
    assert rule in small_run.refusal(capsys, "-m", "models.unet", *on, "--resume")


@pytest.mark.parametrize("tp, given, fits", [(2, 10, 11), (4, 10, 11), (4, 1, 3), (8, 39, 0)])
def test_text_length_for_sequence_parallelism(tp, given, fits):
    flags = dict(command="dit.py", num_heads=8, tp=tp, sequence_parallel=True)
    if not fits:
        assert config_of(flags | dict(text_length=given)).model_config().seq_length % tp == 0
        return
    with pytest.raises(ConfigError, match=f"--text-length {fits} would fit"):
        config_of(flags | dict(text_length=given)).model_config()
    config_of(flags | dict(text_length=fits)).model_config()


# --- the data -------------------------------------------------------------------------------------


def test_conditions_are_left_out():
    """A tenth of the captions; of pairs a twentieth has no caption, one neither, one no source."""
    config = config_of(DIT | dict(edit=True, text_length=39))
    examples = open_pictures([], 16, True)
    data = config.task().dataset(config, examples, ByteTokenizer(), 0, False)
    n = 600
    batch = data.batch(range(n))
    no_caption = batch.tokens[:, 0] == 256
    no_source = (batch.pictures[:, 3:] == 0).flatten(1).all(1)
    found = [no_caption & ~no_source, no_caption & no_source, ~no_caption & no_source]
    for left_out in found:
        # Four standard errors.
        assert abs(left_out.sum() / n - 0.05) < 4 * math.sqrt(0.05 * 0.95 / n)
    assert batch.tokens[no_caption].equal(
        F.pad(torch.tensor(data.empty), (0, data.s - 39)).expand(int(no_caption.sum()), -1)
    )
    kept = (~no_source).nonzero()[0].item()
    source = to_tensor([data.example(kept).source])
    assert batch.pictures[kept : kept + 1, 3:].equal(source)
    other_seed = config.task().dataset(config, examples, ByteTokenizer(), 1, False).batch([kept])
    assert not other_seed.times.equal(batch.times[kept : kept + 1])
    # A sample is what it is, whatever the batch: time and noise too.
    again = data.batch([kept])
    assert again.pictures.equal(batch.pictures[kept : kept + 1])
    assert again.targets.equal(batch.targets[kept : kept + 1])
    t, x = batch.times[kept].item(), to_tensor([data.example(kept).picture])
    noised = data.process.add_noise(x, batch.targets[kept : kept + 1], t)
    assert batch.pictures[kept : kept + 1, :3].equal(noised)
