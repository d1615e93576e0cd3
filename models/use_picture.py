"""What a trained ViT or CLIP says of pictures: a JSON line for each.

    python -m models.use_picture label --checkpoint runs/digits --picture a.png b.png
    python -m models.use_picture match --checkpoint runs/clip --picture a.png \\
        --caption "a small red circle on white" "a large blue cross on black"

label      the likeliest labels, at most five, and their probabilities
match      for each caption the probability that it, of all these, is the picture's
"""

import argparse
import json

import torch
from torch import Tensor

from base import terminal
from inference.loading import find_tokenizer, load_model
from models.clip import CLIPConfig
from models.picture_data import caption_ids, is_cut
from models.pictures import Context, read_picture, to_tensor
from models.vit import ViTConfig
from run.config import ConfigError


def rows_of(captions: list[str], tokenizer, shape: CLIPConfig) -> tuple[Tensor, Tensor]:
    """(tokens [n, s], places of the last ones [n, 1]). Raises ConfigError."""
    m, s = shape.text_length, shape.seq_length
    for caption in captions:
        if is_cut(tokenizer, caption, m):
            raise ConfigError(f"--caption {caption!r}: the model reads {m} tokens with the end")
    ids, ends = zip(*(caption_ids(tokenizer, caption, m) for caption in captions))
    return torch.tensor([row + [0] * (s - m) for row in ids]), torch.tensor(ends).unsqueeze(1)


@torch.inference_mode()
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m models.use_picture")
    parser.add_argument("use", choices=("label", "match"))
    parser.add_argument("--checkpoint", metavar="DIR", required=True, help="a run, or a checkpoint")
    parser.add_argument("--picture", nargs="+", metavar="FILE", required=True)
    parser.add_argument("--caption", nargs="+", metavar="TEXT", default=[], help="for match")
    args = parser.parse_args(argv)
    matches = args.use == "match"
    if matches != bool(args.caption):
        raise ConfigError("--caption: match needs it, and label has none")
    model, index = load_model(args.checkpoint, shape_class=CLIPConfig if matches else ViTConfig)
    shape = model.config
    if matches:
        tokens, ends = rows_of(args.caption, find_tokenizer(args.checkpoint, index), shape)
        any_picture = torch.zeros(len(tokens), 3, shape.picture_size, shape.picture_size)
        texts = model(tokens, ends, Context(pictures=any_picture))[:, 0]  # [n, e]
    no_text = torch.zeros(1, shape.seq_length, dtype=torch.int64)
    for path in args.picture:
        picture = to_tensor([read_picture(path, shape.picture_size)])
        y = model(no_text, None, Context(pictures=picture))[0]
        scores = texts @ y[1] if matches else y[0]
        names = args.caption or index.get("labels") or range(len(scores))
        p, best = scores.softmax(0).topk(len(scores) if matches else min(5, len(scores)))
        found = {names[k]: each for k, each in zip(best.tolist(), p.tolist())}
        print(json.dumps({"picture": path, "captions" if matches else "labels": found}))


if __name__ == "__main__":
    terminal.command(main)
