"""A token from logits: temperature, top-k, top-p, and random numbers that belong to a place in a
text.

A token is drawn from softmax(logits / temperature), after all but the `top_k` likeliest tokens, or
all but the smallest set whose probability reaches `top_p` (nucleus sampling, arXiv 1904.09751),
have been left out. Temperature 0 takes the likeliest.

The random number is no generator's next one: it is a hash of (seed, prompt, position), and the
token is the one in which the cumulative probability passes it. So a prompt has the same text in any
batch, under any layout, and with equal seeds again, up to what rounding of the logits decides.
(Equal prompts are told apart by their order.)

    python -m inference.sampling        four tokens' probabilities, and how often each is drawn
"""

import hashlib

import torch
from torch import Tensor

import gpt

# in the place of a token, where logits are not finite
DIVERGED = -1


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """A number in [0, 1) for each row, from (its key, the position of the token to come). keys: [b]
    int32; positions: [b] -> [b] float64"""
    x = gpt.mix(keys ^ (positions * 0x9E3779B1 & 0x7FFFFFFF).int())
    return (x.double() + 2**31) / 2**32


def keys_of(prompts: list[list[int]], seed: int) -> list[int]:
    """A 32-bit key for each prompt: a hash of the seed, its tokens, and how many equal ones come
    before it."""
    keys = []
    seen = {}
    for prompt in map(tuple, prompts):
        seen[prompt] = seen.get(prompt, -1) + 1
        digest = hashlib.blake2b(
            repr((seed, seen[prompt], prompt)).encode(), digest_size=4
        ).digest()
        keys.append(int.from_bytes(digest, "big", signed=True))
    return keys


def choose(
    logits: Tensor, u: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """The token where the cumulative probability passes u. logits: [b, V]; u: [b] in [0, 1) -> [b]
    int64; DIVERGED where logits are not finite."""
    largest, likeliest = logits.max(-1)
    if temperature == 0:
        return likeliest.where(largest.isfinite(), DIVERGED)
    x = (
        logits.to(torch.promote_types(logits.dtype, torch.float32)) - largest.unsqueeze(-1)
    ) / temperature
    if 0 < top_k < x.shape[-1]:
        x = x.masked_fill(x < x.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, ids = x.sort(descending=True, stable=True)
        p = ordered.softmax(-1)
        beyond = p.cumsum(-1) - p >= top_p
        # the likeliest always stays
        beyond[:, 0] = False
        x = x.masked_fill(torch.zeros_like(beyond).scatter(-1, ids, beyond), -torch.inf)
    reached = x.softmax(-1).cumsum(-1)  # [b, V]
    total = reached[:, -1:]
    # below it, so that someone passes it
    target = torch.minimum(
        u.to(x.dtype).unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total))
    )
    return (
        torch.searchsorted(reached, target, right=True)
        .squeeze(-1)
        .where(total.squeeze(-1).isfinite(), DIVERGED)
    )


def main():
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    keys = torch.tensor(keys_of([[1]], 0) * 10000, dtype=torch.int32)
    positions = torch.arange(10000)
    print(
        "four tokens with probabilities 0.1 0.4 0.2 0.3: the share of each over 10,000 positions of"
        " a text"
    )
    for options in (
        {},
        {"temperature": 0.5},
        {"top_k": 2},
        {"top_p": 0.6},
        {"top_p": 0.8},
        {"temperature": 0.0},
    ):
        drawn = (
            torch.bincount(
                choose(p.log().expand(10000, -1), uniform(keys, positions), **options), minlength=4
            )
            / 10000
        )
        print(
            f"{', '.join(f'{k} {v}' for k, v in options.items()) or 'as they are':<36}"
            + "  ".join(f"{x:.3f}" for x in drawn.tolist())
        )


if __name__ == "__main__":
    main()
