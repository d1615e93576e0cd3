"""The lesson of models/vit.py: a picture as a row of patches; who sees whom; two ranks."""

import torch
from torch import Tensor

import sequence_parallel
from course import demo, form
from models import vit
from models.pictures import COLOURS, SHAPES, Context, Drawn, to_tensor

WITHOUT = form.Removals()


@WITHOUT.replace("see-all", vit, "see_all", "Which patches does the class token see now?")
def causal(block, config):
    """None. The class token stands first, and a causal mask hides what follows a position. So the
    logits are the same for every picture, on two ranks too, and are not those of one device. (The
    last position would see all.)"""


@WITHOUT.replace("share", vit.WholeHead, "forward", "Which gradients are wrong, and by what?")
def all_count(self, x, targets=None):
    """The head's, which are twice as large on two ranks; and all those before it. Both ranks
    compute the whole head, and sequence parallelism adds up what they find."""
    if self.group is not None:
        x = sequence_parallel.gather_sequence(x, self.group)
    return self.read(x, targets)


SIDE, PATCH, CLASS_TOKENS, CHANGED = 16, 4, 2, 5


def config() -> vit.ViTConfig:
    fields = dict(picture_size=SIDE, patch_size=PATCH, class_tokens=CLASS_TOKENS, classes=16)
    return vit.ViTConfig(num_layers=2, hidden_size=64, num_heads=4, **fields)


def data() -> tuple[Tensor, Tensor, Context]:
    """(tokens, targets, context) of eight drawn pictures."""
    examples = [Drawn(8, SIDE)[n] for n in range(8)]
    labels = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    targets = torch.tensor([[labels.index(example.label)] for example in examples])
    pictures = to_tensor([example.picture for example in examples])
    tokens = torch.zeros(len(examples), config().seq_length, dtype=torch.int64)
    return tokens, targets, Context(pictures=pictures)


@torch.no_grad()
def seen(rank: int) -> list[int]:
    """The positions whose vectors change with one patch, before the head."""
    model = demo.make_model(config())
    tokens, _, context = data()
    patches = vit.to_patches(context.pictures, PATCH)
    patches[:, CHANGED] = 1 - patches[:, CHANGED]
    changed = context._replace(pictures=vit.to_pictures(patches, PATCH))
    model.head = None
    return demo.positions_changed(*(model(tokens, None, c) for c in (context, changed)))


def one_step(rank: int) -> dict:
    return demo.one_step(demo.sharded_model(config()), *data())


def teach(lesson: form.Lesson) -> None:
    s = config().seq_length
    lesson.predict(
        f"A picture of {SIDE} x {SIDE} pixels in three colours is cut into patches of {PATCH} x"
        f" {PATCH}. How many patches, and of how many numbers each?",
        "patches; numbers",
    )
    pictures = data()[2].pictures
    patches = vit.to_patches(pictures, PATCH)
    _, n, size = patches.shape
    back = vit.to_pictures(patches, PATCH)
    lesson.check(
        f"{n} patches of {size} numbers; put together again they are the picture",
        torch.equal(back, pictures),
        [n, size],
    )
    lesson.predict(
        f"{CLASS_TOKENS} class tokens stand before them, and the first one is read. One patch is"
        f" changed. How many of the {s} positions change?",
        "positions",
    )
    (positions,) = lesson.on_ranks(1, seen)
    lesson.check(
        f"all {s}, also the class token, at position 0; measured: {len(positions)}",
        positions == list(range(s)),
        [len(positions)],
    )
    lesson.predict(
        "Sequence parallelism shards the positions over two ranks. 224 x 224 pixels in patches of"
        " 16 x 16, and one class token: does it fit? How many class tokens does it take at least?",
        "class tokens",
    )
    large = vit.ViTConfig(num_layers=2, hidden_size=64, num_heads=4)
    fits = next(k for k in range(1, 9) if (large.num_patches + k) % 2 == 0)
    lesson.check(
        f"{large.num_patches} + 1 is odd; with {fits} it fits (Megatron-LM has 8)",
        large.seq_length % 2 == 1 and fits == 2,
        [fits],
    )
    one, two = lesson.one_and_many(2, one_step)
    demo.check_step(lesson, one, two[0])


if __name__ == "__main__":
    form.run("vit")
