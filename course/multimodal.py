"""The lesson of models/multimodal.py: a picture in a sentence; what learns; two ranks."""

import torch

from course import demo, form
from course.mutations import sequence_parallel as bugs
from models import multimodal
from models.multimodal_runs import Answers
from models.pictures import Batch, Drawn
from run.tokenizer import ByteTokenizer

WITHOUT = form.Removals()


@WITHOUT.replace("adjoint", multimodal, "gather_sequence", "Who teaches the tower which patch?")
def gather_alone(x, group):
    """The whole picture stands in rank 0's half of the row. So the patches that rank 1 has computed
    learn nothing. The loss is right, and the gradients of tower and projection are not."""
    return bugs.gather_alone(x, group)


@WITHOUT.replace("shard", multimodal.Pictures, "write", "Where does rank 1 look for its tokens?")
def first_shard(self, x, tokens, pictures, vocab_size):
    """In the first half of the row, as rank 0 does. So it puts the picture over a part of the
    question, and the loss is wrong."""
    number = (tokens[:, : x.shape[1]] - vocab_size).unsqueeze(-1)
    found = self(pictures).gather(1, number.clamp(min=0).expand_as(x))
    return torch.where(number >= 0, found, x)


SIDE, PATCH, H, TOWER_H = 16, 4, 32, 24


def config() -> multimodal.MultimodalConfig:
    fields = dict(picture_size=SIDE, patch_size=PATCH, seq_length=80, vocab_size=257, llama=True)
    fields |= dict(vision_layers=2, vision_hidden_size=TOWER_H, vision_heads=2)
    sizes = dict(num_layers=2, hidden_size=H, num_heads=4, vision_class_tokens=2)
    return multimodal.MultimodalConfig(**sizes, **fields)


def rows() -> Answers:
    shape = config()
    others = dict(tokenizer=ByteTokenizer(), shape=shape)
    return Answers(Drawn(40, SIDE), shape.seq_length, None, False, **others)


@torch.no_grad()
def changed(rank: int) -> list[int]:
    """The positions whose logits change with the picture."""
    model, batch = demo.make_model(config()), rows().batch([0])
    context = batch.context()
    other = context._replace(pictures=-context.pictures)
    return demo.positions_changed(*(model(batch.tokens, None, c) for c in (context, other)))


def one_step(rank: int) -> dict:
    model = demo.sharded_model(config())
    batch: Batch = rows().batch(range(8))
    losses = model(batch.tokens, batch.targets, batch.context())
    loss = (losses * batch.loss_mask).sum() / batch.loss_mask.sum()
    loss.backward()
    return {"loss": loss.item(), "gradients": demo.gathered_gradients(model)}


def teach(lesson: form.Lesson) -> None:
    data = rows()
    (question, answer), shape = data.words(0), config()
    lesson.predict(
        f"A picture of {SIDE} x {SIDE} pixels in patches of {PATCH} x {PATCH}, then"
        f' "{question}", a new line, "{answer}" and an end, in bytes. How many tokens has the row?'
        " How many of them count in the loss?",
        "tokens; in the loss",
    )
    row = data.row(0)
    found = [len(row.ids), sum(row.counted)]
    lesson.check(
        f"{shape.num_patches} + {len(question)} + 1 + {len(answer)} + 1 = {found[0]}; {found[1]}:"
        " the answer and its end",
        found == [shape.num_patches + len(question) + len(answer) + 2, len(answer) + 1],
        found,
    )
    lesson.predict(
        f"Another picture stands in the same row of {data.s} positions. At how many of them do the"
        " logits change?",
        "positions",
    )
    (positions,) = lesson.on_ranks(1, changed)
    lesson.check(
        f"{len(positions)}: all of them, for the picture stands first",
        positions == list(range(data.s)),
        [len(positions)],
    )
    lesson.predict(
        f"LLaVA's first stage trains the projection alone: a matrix from {TOWER_H} to {H} numbers,"
        f" and one from {H} to {H}, with biases. How many numbers learn?",
        "numbers",
    )
    model = demo.meta_model(shape)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    learn = sum(n for name, n in sizes.items() if multimodal.part_of(name) == "projection")
    everything = sum(sizes.values())
    lesson.check(
        f"{TOWER_H} x {H} + {H} + {H} x {H} + {H} = {learn:,}, of {everything:,}",
        learn == TOWER_H * H + H + H * H + H,
        [learn],
    )
    one, two = lesson.one_and_many(2, one_step)
    demo.check_step(lesson, one, two[0])


if __name__ == "__main__":
    form.run("multimodal")
