"""The lesson of models/clip.py: the loss of a whole batch, on two ranks and in two passes."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from course import demo, form, ranks
from course.mutations import sequence_parallel as bugs
from models import clip
from models.picture_data import Captioned
from models.pictures import Batch, Drawn
from run.tokenizer import ByteTokenizer

WITHOUT = form.Removals()


@WITHOUT.replace("gather-gradient", clip, "gather_sequence", "Which pairs does a rank learn from?")
def own_part(y, group):
    """A feature is a wrong answer for the pairs of other ranks, and what it costs them is lost: a
    rank learns from its own losses alone. The loss is right, and the gradients are not."""
    return bugs.gather_alone(y, group)


@WITHOUT.replace("others", clip, "contrastive_losses", "Why is the loss lower? Is that better?")
def of_this_rank(y, group):
    """Each caption is sought among n, and not among N = 2 n: an easier question, so a lower loss.
    But with more ranks the model learns from fewer wrong answers."""
    z = y[:, 1] @ y[:, 0].T
    return -(z.log_softmax(0) + z.log_softmax(1)).diagonal() / 2


# N pairs, features of e numbers.
N, E = 8, 16


def config() -> clip.CLIPConfig:
    sizes = dict(text_hidden_size=16, text_heads=2, text_length=36, vocab_size=257)
    sizes |= dict(picture_size=16, patch_size=4, embedding_size=E)
    return clip.CLIPConfig(num_layers=2, hidden_size=32, num_heads=4, **sizes)


def pairs_of_rank() -> Batch:
    """This rank's n of N drawn pictures with their captions."""
    shape, n = config(), N // dist.get_world_size()
    options = dict(tokenizer=ByteTokenizer(), m=shape.text_length)
    data = Captioned(Drawn(N + 1, shape.picture_size), shape.seq_length, None, False, **options)
    return data.batch(range(dist.get_rank() * n, (dist.get_rank() + 1) * n))


def features(model: clip.CLIP, batch: Batch) -> Tensor:
    return model(batch.tokens, batch.targets, batch.context())


def finish_step(model: clip.CLIP, losses: Tensor) -> dict:
    """The mean loss and its gradients, summed over the ranks. A collective."""
    loss = losses.detach().sum() / N
    for x in (loss, *(p.grad for p in model.parameters())):
        dist.all_reduce(x)
    return {"loss": loss.item(), "gradients": demo.gathered_gradients(model)}


def one_pass(rank: int) -> dict:
    model, batch = demo.make_model(config()), pairs_of_rank()
    with ranks.Collectives() as counted:
        losses = clip.contrastive_losses(features(model, batch), demo.all_ranks())
        (losses.sum() / N).backward()
    return finish_step(model, losses) | {"calls": counted.calls}


def two_passes(rank: int) -> dict:
    """With micro-batches of one pair."""
    model, batch = demo.make_model(config()), pairs_of_rank()
    parts = [Batch._make(x if x is None else x[k : k + 1] for x in batch) for k in range(N // 2)]
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        y = torch.cat([features(model, part) for part in parts])
    losses, gradient = clip.losses_and_gradient(y, demo.all_ranks())
    for k, part in enumerate(parts):
        features(model, part).backward(gradient[k : k + 1] / N)
    return finish_step(model, losses) | {"passes": len(passes)}


def teach(lesson: form.Lesson) -> None:
    lesson.predict(
        f"A model that knows nothing gives all {N} pictures and all captions the same feature. What"
        " is its loss?",
        "nats",
    )
    with lesson.removed():
        loss = clip.contrastive_losses(torch.full((N, 2, E), E**-0.5), None).mean().item()
    lesson.check(f"ln {N} = {loss:.3f}", abs(loss - math.log(N)) < 1e-6, [loss])
    one, two = lesson.one_and_many(2, one_pass)
    lesson.predict(
        f"Two ranks have {N // 2} pairs each, with features of e = {E} numbers of 8 bytes. How many"
        " bytes has a rank after the gather? How many logits does it compute, and how many are in"
        " the whole matrix?",
        "bytes; logits; whole matrix",
    )
    size, logits = N * 2 * E * 8, 2 * (N // 2) * N
    kinds = [kind for kind, _ in two[0]["calls"]]
    lesson.check(
        f"2 N e 8 = {size:,} bytes; n N = {logits // 2} for its pictures and as many for its"
        f" captions; {N * N}; its collectives: {', '.join(kinds) or 'none'}",
        kinds == ["all-gather", "reduce-scatter"],
        [size, logits, N * N],
    )
    demo.check_step(lesson, one, two[0])
    lesson.predict(
        f"A rank takes its {N // 2} pairs one at a time, with the same loss. How many forward"
        " passes does it make? For how many pairs does it keep activations at once?",
        "passes; pairs",
    )
    several = lesson.on_ranks(2, two_passes)[0]
    lesson.check(
        f"{several['passes']}: one of each pair for the features of all, and one for its gradient;"
        " 1",
        several["passes"] == 2 * (N // 2),
        [several["passes"], 1],
    )
    demo.check_step(lesson, one, several)


if __name__ == "__main__":
    form.run("clip")
