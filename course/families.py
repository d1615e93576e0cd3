"""The lesson of families.py: what a window hides, in which layers; whose slopes; which pairs YaRN
slows; what latents leave to keep."""

import torch

import families
import generate
import tensor_parallel
from base import rotary, rotary_scaling
from base.model_config import GPTConfig
from course import demo, form
from course.mutations import local_attention as bugs
from families import LocalBias, alibi_slopes
from planning import serving

WITHOUT = form.Removals()
WITHOUT["width"] = form.Removal(
    bugs.window_of_one_more,
    "The window counts earlier tokens only. Where does it show?",
    "The window shows one token more, so each layer reaches one further. Nothing is wrong inside"
    " of the model, but it is another one than was trained; and the cache, which has w columns,"
    " does not hold what the mask still shows.",
)
WITHOUT["own-slopes"] = form.Removal(
    bugs.slopes_of_the_first_rank,
    "Each rank takes the first 4. Which heads see too little?",
    "Rank 1 has heads 4 to 7 and takes the slopes of heads 0 to 3: its heads see less far. Each"
    " rank alone computes a good ALiBi, so only a comparison with one rank shows it.",
)


@WITHOUT.replace("pattern", GPTConfig, "window_of", "All layers have the window. Who needs more?")
def window_everywhere(self, layer: int) -> int:
    """Far tokens reach the last one through L (w - 1) tokens alone, as without a pattern. The
    layers that see all tokens are few, but they carry what is far."""
    return self.sliding_window


@WITHOUT.replace("turns", rotary_scaling, "yarn", "All pairs slow down. Which tokens look alike?")
def all_pairs_slower(config: GPTConfig, device) -> torch.Tensor:
    """Near ones: a pair that turns often tells a token from the next, and here the angle between
    the two is a quarter (position interpolation, arXiv 2306.15595)."""
    return rotary.rotary_frequencies(config, device) / config.rotary_factor


@WITHOUT.replace("latent", serving, "cache_bytes", "128 heads keep keys and values. How many?")
def keys_and_values(model: GPTConfig, tokens: float, number: int) -> float:
    """128 (192 + 128) numbers a layer, not 512 + 64: more than with the 8 heads of the older model.
    So the cache keeps the latent, from which the matrices make each head's keys and values."""
    sizes = model.num_kv_heads * (model.head_dim + model.value_size)
    return model.num_layers * sizes * number * tokens


W, L, S, PROMPT, NEW = 3, 2, 16, 6, 8
WINDOW = dict(llama=True, num_layers=L, seq_length=S, sliding_window=W)
ALIBI = dict(positions="alibi", num_heads=8, seq_length=S)


@torch.no_grad()
def reach(model) -> int:
    """How many tokens after a changed one still have other logits."""
    tokens, _ = demo.random_tokens(1, S, 257)
    changed = tokens.clone()
    changed[0, 0] += 1
    return max(demo.positions_changed(model(tokens), model(changed)))


def decode(model) -> tuple[list[int], list[int], list[int]]:
    """Columns of each layer's cache, and what follows a prompt, with the cache and without."""
    tokens, _ = demo.random_tokens(1, PROMPT, 257)
    runner = generate.ModelRunner(model)
    cached = generate.generate(model, tokens.tolist(), NEW, temperature=0, runner=runner)
    columns = [keys.shape[2] for keys in runner.slot.cache.keys.values()]
    plain = generate.generate(model, tokens.tolist(), NEW, temperature=0, cached=False)
    return columns, cached[0], plain[0]


def with_window(rank: int, pattern: str = "1") -> dict:
    # Weights are so large that attention decides what follows.
    config = demo.tiny_config(**WINDOW, window_pattern=pattern)
    model = demo.make_model(config).requires_grad_(False)
    for p in model.parameters():
        if p.dim() > 1:
            p *= 6
    columns, cached, plain = decode(model)
    return {"reach": reach(model), "columns": columns, "equal": cached == plain}


def with_alibi(rank: int) -> dict:
    config = demo.tiny_config(**ALIBI)
    model = demo.make_model(config, tensor_parallel.apply, group=demo.all_ranks())
    loss = model(*demo.random_tokens(4, S, 257)).mean().item()
    return {"loss": loss, "slopes": families.local_bias(model.blocks["0"]).slopes}


def draw(lesson: form.Lesson) -> None:
    """What is added to the scores of 5 tokens."""
    like = torch.zeros(1, 1, 5, 8)
    window = LocalBias(demo.tiny_config(**WINDOW))(like)[0, 0]
    slope = LocalBias(demo.tiny_config(**ALIBI))(like)[0, 0]
    lesson.say(f"{f'window {W}':<24}ALiBi, slope 1/2")
    for hidden, bias in zip(window, slope):
        left = " ".join("." if x == 0 else " " for x in hidden)
        right = " ".join(f"{x + 0.0:4.1f}" for x in bias[bias > -torch.inf])
        lesson.say(f"{left:<24}{right}")


def teach_window(lesson: form.Lesson, one: dict) -> None:
    lesson.predict(
        f"A window of {W} tokens, {L} layers. Token 0 is changed. Which is the last token whose"
        " logits change?",
        "token",
    )
    draw(lesson)
    lesson.check(
        f"token {one['reach']}; L (w - 1) = {L * (W - 1)}",
        one["reach"] == L * (W - 1),
        [one["reach"]],
    )
    lesson.predict(
        f"A prompt of {PROMPT} tokens, and {NEW} more are generated. How many columns does the"
        " cache need?",
        "columns",
    )
    same = "the same" if one["equal"] else "other"
    lesson.check(
        f"{one['columns'][0]}, not {PROMPT + NEW}; {same} tokens as without a cache",
        one["columns"] == [W] * L and one["equal"],
        one["columns"][:1],
    )
    lesson.predict(
        "--window-pattern 10: layer 1 sees all tokens. The last that changes? Columns of each?",
        "token; layer 0; layer 1",
    )
    mixed = lesson.on_ranks(1, with_window, "10")[0]
    found = [mixed["reach"], *mixed["columns"]]
    lesson.check(
        f"token {found[0]} of {S - 1}; {found[1]} and {found[2]} columns",
        found == [S - 1, W, PROMPT + NEW] and mixed["equal"],
        found,
    )


def teach_slopes(lesson: form.Lesson, one: dict, two: list[dict]) -> None:
    lesson.predict(
        "Slopes are a geometric sequence. Of 8 heads the first one is 1/2. The others? And of 6"
        " heads, which is no power of two?"
    )
    eight, six = (alibi_slopes(a).tolist() for a in (8, 6))
    lesson.say("8 heads  " + " ".join(f"{f'1/{1 / x:.0f}':<6}" for x in eight).rstrip())
    lesson.say("6 heads  " + " ".join(f"{f'1/{1 / x:.0f}':<6}" for x in six).rstrip())
    lesson.check(
        "ratio 1/2; heads 0 to 3 of 6 are as of 4, heads 4 and 5 as heads 0 and 2 of 8",
        eight == [2.0**-i for i in range(1, 9)] and six == [2.0**-i for i in (2, 4, 6, 8, 1, 3)],
    )
    lesson.predict("Two tensor-parallel ranks have 4 heads each. Which slopes has rank 1?")
    slopes = [" ".join(f"1/{1 / x:.0f}" for x in of_rank["slopes"]) for of_rank in two]
    lesson.check(
        f"rank 0: {slopes[0]}; rank 1: {slopes[1]}",
        torch.equal(torch.cat([of_rank["slopes"] for of_rank in two]), one["slopes"]),
    )
    apart = abs(two[0]["loss"] - one["loss"])
    lesson.check(f"the loss is {apart:.1e} from that of one rank", apart < 1e-10)


def teach_yarn(lesson: form.Lesson) -> None:
    lesson.predict(
        "Heads of 128: 64 pairs. Trained on 4,096 tokens, for 16,384 by YaRN (factor 4). How many"
        " pairs keep their frequency (32 turns or more), how many turn 4 times slower (1 or less)?",
        "keep it; 4 times slower",
    )
    scaled = dict(rotary_factor=4.0, rotary_scaling="yarn", rotary_original_length=4096)
    config = demo.tiny_config(hidden_size=512, llama=True, **scaled)
    slower = rotary.rotary_frequencies(config, "cpu") / rotary_scaling.yarn(config, "cpu")
    counts = [int((slower - factor).abs().lt(1e-9).sum()) for factor in (1, 4)]
    lesson.check(
        f"{counts[0]} and {counts[1]}, others between; scores grow by {config.rotary_scale**2:.3f}",
        counts == [21, 18],
        counts,
    )


def teach_latents(lesson: form.Lesson) -> None:
    lesson.predict(
        "DeepSeek 67B keeps keys and values of 8 heads of 128 in 95 layers. DeepSeek-V2 keeps a"
        " latent of 512 and a rotated key of 64 in 60 layers, in 6 bits. How much less?",
        "percent",
    )
    latent = dict(kv_rank=512, head_dim=192, rope_head_dim=64, value_head_dim=128)
    of_67b = GPTConfig(95, 8192, 64, num_kv_heads=8, llama=True)
    of_v2 = GPTConfig(60, 5120, 128, query_rank=1536, llama=True, **latent)
    bits = [number * serving.cache_bytes(of, 1, 1) for of, number in ((of_67b, 16), (of_v2, 6))]
    less = 100 * (1 - bits[1] / bits[0])
    lesson.say(f"bits of a token: {bits[0]:,} and {bits[1]:,}; in 16 bits {bits[1] * 16 // 6:,}")
    lesson.check(f"{less:.1f}% (arXiv 2405.04434: 93.3%)", abs(less - 93.3) < 0.05, [less])


def teach(lesson: form.Lesson) -> None:
    teach_window(lesson, lesson.on_ranks(1, with_window)[0])
    teach_slopes(lesson, *lesson.one_and_many(2, with_alibi))
    with lesson.removed():
        teach_yarn(lesson)
        teach_latents(lesson)


if __name__ == "__main__":
    form.run("families")
