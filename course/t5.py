"""The lesson of models/t5.py: buckets of distances; what crosses the stages of a pipeline."""

import torch
import torch.distributed as dist

import pipeline_parallel
import schedules
import sharding
from course import demo, form, ranks
from models import t5
from schedules import Placement

WITHOUT = form.Removals()


@WITHOUT.replace("memory", t5.Attention, "forward", "Which half of the model learns nothing?")
def no_gradient_of_memory(self, x, context, bias, memory=None):
    """The encoder. Its only way to the loss is through cross attention: without this gradient the
    loss is right, the decoder learns, and every gradient of the encoder is 0."""
    if memory is None:
        q, k, v = self.project(x, self.query, self.key, self.value)
    else:
        (q,) = self.project(x, self.query)
        memory = memory.detach() + 0 * memory
        k, v = self.project_kv(memory, self.key, self.value)
    q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v))
    return self.output(self.core(q, k, v, context, bias))


@WITHOUT.replace("shared-sum", pipeline_parallel.Pipeline, "sum_shared", "Which copy is right?")
def no_shared_sum(self):
    """None. Each stage has the gradient of its own layers only: the first stage of the encoder's
    table, the second of the decoder's and of what the encoder's later layers add. After a step the
    copies differ, and a checkpoint keeps the first."""


# n source and m target tokens; micro-batches of one pair; p ranks.
N, M, V, BATCHES, P = 12, 6, 64, 2, 2
LOSS_GRAD = torch.tensor(1 / (BATCHES * M), dtype=torch.float64)


def config() -> t5.T5Config:
    return demo.tiny_config(t5.T5Config, num_layers=4, encoder_layers=2, vocab_size=V, tied=False)


def make_stages(rank: int, p: int, split: list[int] | None) -> list:
    stages = pipeline_parallel.apply(demo.meta_model(config()), rank, Placement(p), split)
    for stage in stages:
        sharding.init(stage, 0, "cpu", torch.float64)
    return stages


def forward_of(stages: list, losses: list):
    tokens, targets = demo.random_tokens(BATCHES, N + M, V)
    return demo.chunk_forward(stages, tokens, targets[:, N:], lambda k: t5.Context(N), losses)


def on_one_rank(rank: int) -> dict:
    stages, losses = make_stages(0, 1, None), []
    for k in range(BATCHES):
        forward_of(stages, losses)(0, k).backward(LOSS_GRAD)
    return {"loss": sum(losses), "gradients": demo.gathered_gradients(*stages)}


def on_rank(rank: int, split: list[int]) -> dict:
    stages, losses = make_stages(rank, P, split), []
    pipeline = pipeline_parallel.Pipeline(
        stages, pipeline_parallel.Channels(dist.group.WORLD), Placement(P)
    )
    schedule = schedules.make("1f1b", P, BATCHES)
    forward = forward_of(stages, losses)
    sent = demo.run_pipeline(pipeline, schedule, forward, N + M, LOSS_GRAD)
    pipeline.sum_shared()
    return {"loss": sum(losses), "gradients": demo.gathered_gradients(*stages), "sent": sent}


def teach_buckets(lesson: form.Lesson) -> None:
    lesson.predict(
        "32 buckets, the last for distances of 128 and more. How many distances to the left have a"
        " bucket of their own, in the encoder and in the decoder?",
        "encoder; decoder",
    )
    back = -torch.arange(200)
    alone = []
    for both_ways in (True, False):
        counts = t5.bucket_of(back, both_ways, 32, 128).bincount()
        alone.append(int((counts == 1).sum()))
    far = t5.bucket_of(torch.tensor([-127, -128, -(10**6)]), False, 32, 128).tolist()
    lesson.check(
        f"{alone[0]} and {alone[1]}: the encoder keeps half of its buckets for the right side;"
        f" distances 127, 128 and 10^6 are in {far}",
        alone == [8, 16] and far == [31, 31, 31],
        alone,
    )


def teach(lesson: form.Lesson) -> None:
    teach_buckets(lesson)
    one = ranks.run(on_one_rank, 1)[0]
    two = lesson.on_ranks(P, on_rank, [1, 3])
    lesson.predict(
        f"The second stage has the last layer of the encoder and the decoder. n {N}, m {M}, h 64, 8"
        " bytes a number. How many bytes are in a message forward? And backward?",
        "forward; backward",
    )
    size = (N + M) * 64 * 8
    lesson.check(
        f"{two[0]['sent'][0]:,} and {two[1]['sent'][0]:,}, b (n + m) h 8: both halves travel",
        two[0]["sent"] == [size] * BATCHES == two[1]["sent"],
        [two[0]["sent"][0], two[1]["sent"][0]],
    )
    lesson.predict("Do the loss and the gradients of the two stages equal those of one device?")
    # The first stage's copy of the table is what a checkpoint keeps.
    together = two[1]["gradients"] | two[0]["gradients"]
    demo.check_step(lesson, one, {"loss": two[1]["loss"], "gradients": together})
    lesson.predict("Each stage has a copy of the tables of positions. Are their gradients equal?")
    apart = demo.difference(*(of["gradients"]["positions.weight"] for of in two))
    lesson.check(f"they differ by {apart:.1e}: the stages have added them", apart < 1e-12)


if __name__ == "__main__":
    form.run("t5")
