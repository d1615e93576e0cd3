"""Does a small diffusion model draw what a caption says, and change what an instruction says?

    python -m benchmarks.pictures [--seeds 3]

The pictures are those of models/pictures.py, of 16 x 16 pixels: "a small red circle on white". A
Vision Transformer, trained apart, says colour and shape of what is drawn; the border, whether the
ground is light. The drawings are held out; of the 64 captions each has been read in training. A
U-Net draws in pixels, with each seed, and one in the latents of an autoencoder. Another one edits.
"from right" is the distance from the drawing that would be right; "outside", that from the source,
where neither has a shape.

What was stopped goes on under the same --out. --steps are of each U-Net.
"""

import argparse
import base64
import io
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import train
from base.groups import Groups
from benchmarks import report, style
from benchmarks.languages import run
from finetune.reference_models import FrozenModel
from inference.loading import load_model
from models.autoencoder import open_autoencoder
from models.autoencoder_runs import AutoencoderRun
from models.diffusion_runs import Sampling, UNetRun
from models.picture_runs import ViTRun
from models.pictures import DRAWINGS, Context, to_tensor, to_uint8
from models.shapes import Drawing, drawing, edited
from models.vit import ViTConfig
from run import checkpoint
from run.tokenizer import ByteTokenizer

SIDE = 16
# What is judged of a picture.
FIELDS = ("colour", "shape", "ground")
OFTEN = "--save-every 1000 --eval-every 0 --log-every 500 --weight-decay 0"
UNET = "--objective flow --global-batch-size 16 --lr 3e-3 --num-heads 1"
UNET += " --caption-layers 0 --text-length 33"
CLASSIFIER = "--patch-size 4 --global-batch-size 64 --lr 1e-3"
# Those of --toy have one layer, or the fewest.
SHAPES = {
    ViTRun: ("--num-layers 4 --hidden-size 96", "--num-layers 1 --hidden-size 16"),
    UNetRun: ("--num-layers 5 --hidden-size 24", "--num-layers 3 --hidden-size 8"),
    AutoencoderRun: ("--num-layers 4 --hidden-size 16", "--num-layers 4 --hidden-size 8"),
}
SAMPLING = Sampling(guidance=2.0)
# The figure: a row for each of these captions, with so many pictures and edits.
SHOWN = ["a large red circle on white", "a small yellow cross on black"]
SHOWN += ["a large blue triangle on black", "a small green square on white"]
COLUMNS, EDITS = 6, 3


def painter(out: Path):
    """f(captions, sources or None) -> pictures [n, 3, H, W], of a run."""
    learned = checkpoint.read_index(checkpoint.find(out))["diffusion"]
    config = UNetRun(load=str(out), global_batch_size=64, device="cpu", **learned)
    task, model = config.task(), FrozenModel()
    task.learned = model
    train.Trainer(config, torch.device("cpu"), Groups(), task)
    model.load_from(config.base())

    def draw(captions: list[str], sources: Tensor | None = None) -> Tensor:
        options = SAMPLING._replace(count=len(captions))
        return task.draw(ByteTokenizer(), captions, sources, options).clamp(-1, 1)

    return draw


@torch.no_grad()
def judge(classifier: Path, pictures: Tensor) -> list[tuple[str, ...]]:
    """FIELDS of each picture."""
    model, index = load_model(classifier, shape_class=ViTConfig)
    tokens = torch.zeros(len(pictures), model.config.seq_length, dtype=torch.long)
    found = model(tokens, None, Context(pictures=pictures))[:, 0].argmax(1).tolist()
    border = pictures.clone()
    border[..., 1:-1, 1:-1] = 0
    grounds = ["white" if light else "black" for light in border.sum((1, 2, 3)) > 0]
    return [(*index["labels"][k].split(), ground) for k, ground in zip(found, grounds)]


def agreement(found: list[tuple], wanted: list[Drawing]) -> dict[str, float]:
    """The share of pictures that are as wanted, in all FIELDS and in each."""
    right = np.array(
        [[getattr(d, f) == x for f, x in zip(FIELDS, xs)] for d, xs in zip(wanted, found)]
    )
    return {"all": right.all(1).mean().item()} | dict(zip(FIELDS, right.mean(0).tolist()))


def edits(found: list[tuple], before: list[Drawing], after: list[Drawing], drawn: Tensor) -> dict:
    """How well instructions are followed."""
    source, right = (to_tensor([d.draw(SIDE) for d in drawings]) for drawings in (before, after))
    asked, kept, outside = [], [], []
    for b, a, names, s, r, x in zip(before, after, found, source, right, drawn):
        for field, name in zip(FIELDS, names):
            stays = getattr(a, field) == getattr(b, field)
            (kept if stays else asked).append(name == getattr(a, field))
        if a.ground == b.ground:
            empty = ((s == s[:, :1, :1]) & (r == s[:, :1, :1])).all(0)
            outside.append(rms(x[:, empty], s[:, empty]))
    row = {"asked": asked, "kept": kept, "outside": outside}
    row = {name: np.mean(values).item() for name, values in row.items()}
    row |= {"from right": rms(drawn, right), "source from right": rms(source, right)}
    return agreement(found, after) | row


def rms(a: Tensor, b: Tensor) -> float:
    """Root mean squared difference, as a part of the range of a pixel."""
    return ((a - b) / 2).square().mean().sqrt().item()


def png(pictures: Tensor) -> str:
    """A row of pictures, as base64 of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(np.concatenate(to_uint8(pictures), 1)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def draw(results: dict, figures: Path) -> None:
    """results: what pictures.json holds. A row: pictures of a caption, then edits."""
    captions, pairs = results["samples"]["captions"], results["samples"]["edits"]
    ratios = [COLUMNS] + [2] * EDITS
    figure, axes = style.figure(4.2, len(SHOWN), 1 + EDITS, width_ratios=ratios)
    for n, row in enumerate(axes):
        for axis, (words, file) in zip(row, [captions[n], *pairs[n * EDITS : (n + 1) * EDITS]]):
            pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(file))))
            axis.imshow(pixels.repeat(4, 0).repeat(4, 1), interpolation="none")
            axis.set_title(words, fontsize=style.SMALL)
            axis.axis("off")
    style.save(figure, figures / "pictures.svg")


def measure(args: argparse.Namespace) -> dict:
    folder, numbers = args.out / "pictures", range(DRAWINGS - args.pictures, DRAWINGS)
    before = [drawing(k) for k in numbers]
    after, words = map(list, zip(*(edited(d, k) for d, k in zip(before, numbers))))
    captions, drawings = [d.caption for d in before], to_tensor([d.draw(SIDE) for d in before])
    found, table = partial(judge, folder / "classifier"), report.Table()

    def trained(name: str, config_class, steps: int, flags: str, side=SIDE, **paths) -> dict:
        """The last line of metrics.jsonl."""
        flags = f"{SHAPES[config_class][args.toy]} {flags} {OFTEN} --picture-size {side}"
        return run(config_class, flags, steps, folder / name, **paths)

    def note(name: str, pictures: Tensor, wanted: list[Drawing], **others) -> None:
        results[name] = agreement(found(pictures), wanted) | others
        table.row({"": name} | results[name])

    results = {"toy": args.toy, "pictures": args.pictures}
    trained("classifier", ViTRun, args.classifier, CLASSIFIER)
    note("drawings", drawings, before)
    for seed in range(args.seeds):
        name = f"U-Net, seed {seed}"
        trained(name, UNetRun, args.steps, f"{UNET} --seed {seed}")
        note(name, painter(folder / name)(captions), before)
    line = trained("autoencoder", AutoencoderRun, args.autoencoder, "--global-batch-size 16")
    latents = open_autoencoder(str(folder / "autoencoder"))
    again = latents.decode(torch.cat([latents.encode(x) for x in drawings.split(1)]))
    others = {key: line[key] for key in ("eval_error", "latent_std")}
    note("autoencoder", again.clamp(-1, 1), before, **others)
    name, side = "U-Net, latents", SIDE // latents.factor
    trained(name, UNetRun, args.steps, UNET, side, autoencoder=folder / "autoencoder")
    note(name, painter(folder / name)(captions), before)
    name = "U-Net, edits"
    trained(name, UNetRun, args.steps, f"{UNET} --edit")
    changed = painter(folder / name)(words, drawings)
    results[name] = edits(found(changed), before, after, changed)
    report.print_results(results[name])
    first = painter(folder / "U-Net, seed 0")
    pairs = [(w, png(torch.stack(x))) for w, *x in zip(words, drawings, changed)]
    rows = [(caption, png(first([caption] * COLUMNS))) for caption in SHOWN]
    return results | {"samples": {"captions": rows, "edits": pairs[: len(SHOWN) * EDITS]}}


def main() -> None:
    parser = report.arguments(
        __doc__, seeds=3, steps=12000, classifier=3000, autoencoder=1000, pictures=256
    )
    one = dict(seeds=1, steps=1, classifier=1, autoencoder=1, pictures=12)
    args = report.parse(parser, **one)
    report.finish("pictures", measure(args), args, draw)


if __name__ == "__main__":
    main()
