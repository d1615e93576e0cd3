"""The lesson of generate.py: with the cache and without, together and alone, by drafts."""

from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import generate
from course import demo, form
from generate import ModelRunner
from inference.kv_cache import Cache, caching
from inference.speculative import Speculation

WITHOUT = form.Removals()


@WITHOUT.replace(
    "positions", ModelRunner, "rotary_at", "Prefill is right. Which prompts get other tokens?"
)
def rotary_at_0(self, cache: Cache, s: int, original=ModelRunner.rotary_at):
    """Any of them: all new tokens stand at position 0, so attention sees wrong distances, and some
    draws give another token. Each prompt by itself decodes with the same wrong positions, so that
    check holds."""
    if cache.positions is None:
        return original(self, cache, s)
    with mock.patch.object(cache, "positions", torch.zeros_like(cache.positions)):
        return original(self, cache, s)


@WITHOUT.replace(
    "mask", Cache, "update_masks", "Each prompt by itself is right. Why not all three together?"
)
def no_mask(self, *_) -> None:
    """The longest prompt has filled all columns; the shorter ones attend to columns that hold no
    token of theirs, and get other tokens. A prompt by itself has no such column."""
    self.masks = {}


@WITHOUT.replace("drafts", Speculation, "likeliest", "No draft is compared. Is the text faster?")
def drafts_believed(self, x: torch.Tensor, original=Speculation.likeliest) -> list[int]:
    """As fast as if all were right, but it is the text of the drafts. The pass computes what the
    model itself would say at each place: a draft that differs, and all after it, must go."""
    return [*self.drafts, *original(self, x)[len(self.drafts) :]]


SHAPE = dict(num_layers=4, hidden_size=128, num_heads=4, ffn_hidden_size=344, seq_length=512)
# Tokens of three prompts.
LENGTHS = (4, 39, 16)
NEW = 24


def teach(lesson: form.Lesson) -> None:
    model = demo.make_model(demo.tiny_config(**SHAPE, llama=True))
    with lesson.removed():
        same_tokens(lesson, model)
        cache_size(lesson, model)
        work(lesson, model)
        drafts(lesson, model)


def same_tokens(lesson: form.Lesson, model) -> None:
    lesson.predict(
        "Three prompts of 4, 39 and 16 tokens, 24 new tokens each, drawn at temperature 1. Do they"
        " get other tokens without the cache? Each prompt by itself?"
    )
    prompts = [list(range(1, n + 1)) for n in LENGTHS]
    together = generate.generate(model, prompts, NEW)
    uncached = generate.generate(model, prompts, NEW, cached=False)
    alone = [generate.generate(model, [prompt], NEW)[0] for prompt in prompts]
    for name, texts in (("without the cache", uncached), ("by itself", alone)):
        equal = sum(a == b for x, y in zip(together, texts) for a, b in zip(x, y))
        lesson.check(f"{name}: {equal} of {3 * NEW} tokens are equal", equal == 3 * NEW)


def cache_bytes(model) -> int:
    """The largest cache while 20 tokens are generated behind 40."""
    runner = ModelRunner(model)
    sizes = []
    for _ in generate.stream(model, [[1] * 40], 20, temperature=0, runner=runner):
        cache = runner.slot.cache
        sizes.append(sum(x.nbytes for x in (*cache.keys.values(), *cache.values.values())))
    return max(sizes)


def cache_size(lesson: form.Lesson, model) -> None:
    layers, h = SHAPE["num_layers"], SHAPE["hidden_size"]
    lesson.predict(
        f"L {layers}, h {h}, 60 positions, float64. Bytes of the cache? And with grouped-query"
        " attention, where 4 heads share one key?",
        "bytes; bytes, grouped",
    )
    grouped = demo.make_model(demo.tiny_config(**SHAPE, llama=True, num_kv_heads=1))
    sizes = [cache_bytes(model), cache_bytes(grouped)]
    formula = 2 * layers * h * 60 * 8
    lesson.check(
        f"{sizes[0]:,}; keys and values, 2 L h 60 8 = {formula:,}. Grouped:"
        f" {sizes[1]:,}, a quarter",
        sizes == [formula, formula / 4],
        sizes,
    )


def work(lesson: form.Lesson, model) -> None:
    lesson.predict(
        "FLOPs of one more token after 32 and after 448 tokens of context: how many times as many,"
        " with the cache and without?",
        "with the cache, times; without, times",
    )
    growth = {}
    for cached in (True, False):
        flops = [flops_of_a_token(model, context, cached) for context in (32, 448)]
        growth[cached] = flops[1] / flops[0]
        lesson.say(f"{'with the cache' if cached else 'without':<15}{flops[0]:>14,}{flops[1]:>14,}")
    lesson.check(
        f"with 14 times the context, {growth[True]:.1f} times with the cache, {growth[False]:.1f}"
        " times without",
        growth[True] < 2 and growth[False] > 14,
        [growth[True], growth[False]],
    )


def drafts(lesson: form.Lesson, model) -> None:
    lesson.predict(
        "Speculative decoding: each pass but the first checks 2 drafts. How many passes for 24"
        " tokens, if no draft is right, and if all are?",
        "passes, none right; passes, all right",
    )
    runner, passes, equal = ModelRunner(model), [0, 0], True
    (greedy,) = generate.generate(model, [[1]], NEW, temperature=0)
    wrong = [(token + 1) % 257 for token in greedy]
    with caching(runner.stages, runner.slot):
        for right, said in enumerate((wrong, greedy)):
            text = Speculation(runner, [1], 1 + NEW)
            while (n := len(text.ids) - 1) < NEW:
                text.drafts = said[n : min(n + 2, NEW - 1)] if n else []
                text.ids += text.step()
                passes[right] += 1
            equal &= text.ids[1:] == greedy
    result = f"{passes[0]} and {passes[1]}; {'the same' if equal else 'another'} text"
    lesson.check(result, equal and passes == [24, 9], passes)


def flops_of_a_token(model, context: int, cached: bool) -> int:
    steps = generate.stream(model, [[1] * context], 2, temperature=0, cached=cached)
    # The prefill.
    next(steps)
    # Attention runs as two matrix multiplications, which are counted.
    with sdpa_kernel(SDPBackend.MATH):
        return demo.flops(lambda: next(steps))


if __name__ == "__main__":
    form.run("generate")
