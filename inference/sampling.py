"""Sampling: the next token from logits, by temperature, top-k and top-p.

A token is drawn from

    p = softmax(logits / temperature)

after two restrictions: only the `top_k` most likely tokens, and only the smallest set of most
likely tokens whose probabilities reach `top_p` (nucleus sampling, arXiv 1904.09751, section 3.1).
Temperature 0 is greedy decoding: the most likely token.

Drawing needs one uniform number u in [0, 1). The token is the first one whose cumulative
probability is larger than u:

    token              0     1     2     3
    probability       0.1   0.4   0.2   0.3
    cumulative        0.1   0.5   0.7   1.0        u = 0.62 draws token 2

u is a hash of (seed, prompt, position), not the next number of a generator. So a prompt has the
same text in any batch and under any layout, up to the rounding of its logits. Equal prompts in one
call get different numbers: the hash includes how many equal prompts come before.

    python -m inference.sampling        four tokens' probabilities, and how often each is drawn
"""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from base.dropout import hash_

# Stands for a token where the logits are not finite.
DIVERGED = -1


class SamplingParams(NamedTuple):
    """How a token is drawn. Temperature 0 is greedy; top_k 0 and top_p 1 restrict nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def check_options(max_tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    """Raises ValueError, naming what to change."""
    greedy_or_warm = temperature == 0 or 0.001 <= temperature < float("inf")
    if not greedy_or_warm:
        raise ValueError(f"temperature {temperature}: must be 0, or at least 0.001 and finite")
    if top_k < 0:
        raise ValueError(f"top_k {top_k}: must be at least 0")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p}: must be above 0 and at most 1")
    if max_tokens < 0:
        raise ValueError(f"max_tokens {max_tokens}: must be at least 0")


class LogProb(NamedTuple):
    """log_softmax(logits) of a token, before temperature, top-k and top-p."""

    token: int
    log_prob: float
    # The likeliest tokens in its place, with theirs.
    top: list[tuple[int, float]]


def log_probs(logits: Tensor, tokens: list[int], most: int) -> list[LogProb]:
    """The log-probability of each token, and of the `most` likeliest ones. logits: [rows, V]"""
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    # Where logits are not finite a token is DIVERGED, and an error follows.
    at = torch.tensor(tokens, device=logits.device).clamp(min=0).unsqueeze(1)
    of_tokens = log_p.gather(1, at).squeeze(1).tolist()
    values, ids = (x.tolist() for x in log_p.topk(min(most, log_p.shape[1])))  # [rows, most]
    tops = [list(zip(*pair)) for pair in zip(ids, values)]
    return [LogProb(*found) for found in zip(tokens, of_tokens, tops)]


def sample(logits: Tensor, keys: list[int], positions: list[int], params: SamplingParams) -> Tensor:
    """The next token of each sequence. logits: [b, V]; keys: of the b prompts (`keys_of`);
    positions: where the b tokens will stand. Returns [b] int64, with DIVERGED where logits are not
    finite."""
    u = None
    if params.temperature != 0:
        keys = torch.tensor(keys, device=logits.device).int()
        u = uniform(keys, torch.tensor(positions, device=logits.device))  # [b]
    return choose(logits, u, *params)


def choose(
    logits: Tensor, u: Tensor | None, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """The first token whose cumulative probability is larger than u. logits: [b, V]; u: [b] in
    [0, 1), unused at temperature 0. Returns [b] int64, with DIVERGED where logits are not
    finite."""
    max_logit, most_likely = logits.max(-1)  # [b], [b]
    if temperature == 0:
        return most_likely.where(max_logit.isfinite(), DIVERGED)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = (z - max_logit.unsqueeze(-1)) / temperature  # [b, V]
    if 0 < top_k < z.shape[-1]:
        z = keep_top_k(z, top_k)
    if top_p < 1:
        z = keep_top_p(z, top_p)
    cumulative = z.softmax(-1).cumsum(-1)  # [b, V]
    total = cumulative[:, -1:]  # [b, 1], 1 up to rounding
    # U times total may round up to total, which no token would exceed.
    largest_target = total.nextafter(torch.zeros_like(total))
    target = torch.minimum(u.to(z.dtype).unsqueeze(-1) * total, largest_target)  # [b, 1]
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1)  # [b]
    return tokens.where(total.squeeze(-1).isfinite(), DIVERGED)


def keep_top_k(z: Tensor, top_k: int) -> Tensor:
    """Logits [b, V], -inf but for the k largest (and what equals the smallest of these)."""
    smallest_kept = z.topk(top_k).values[:, -1:]  # [b, 1]
    return z.masked_fill(z < smallest_kept, -torch.inf)


def keep_top_p(z: Tensor, top_p: float) -> Tensor:
    """Logits [b, V], -inf but for the most likely tokens that make up probability top_p."""
    ordered, ids = z.sort(descending=True, stable=True)  # [b, V]
    p = ordered.softmax(-1)
    # The more likely tokens already reach top_p.
    beyond = p.cumsum(-1) - p >= top_p
    # The most likely token always stays.
    beyond[:, 0] = False
    removed = torch.zeros_like(beyond).scatter(-1, ids, beyond)  # back in the order of the ids
    return z.masked_fill(removed, -torch.inf)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """A number in [0, 1) for each sequence, a hash of (key of the prompt, position of the token to
    be drawn). keys: [b] int32; positions: [b] -> [b] float64"""
    bits = hash_(keys ^ (positions * 0x9E3779B1 & 0x7FFFFFFF).int())  # [b] int32
    return (bits.double() + 2**31) / 2**32


def keys_of(prompts: list[list[int]], seed: int) -> list[int]:
    """A 32-bit key for each prompt: a hash of the seed, its tokens, and how many equal prompts come
    before it."""
    keys = []
    repeats = {}
    for prompt in map(tuple, prompts):
        repeats[prompt] = repeats.get(prompt, -1) + 1
        keys.append(hash_of((seed, repeats[prompt], prompt)))
    return keys


def hash_of(content: tuple) -> int:
    """32 bits."""
    digest = hashlib.blake2b(repr(content).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big", signed=True)


# --------------------------------------------------------------------------------------------------


def main():
    n = 10000
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(n, -1)  # [n, 4]
    keys = torch.tensor(keys_of([[1]], 0) * n, dtype=torch.int32)
    u = uniform(keys, torch.arange(n))
    print(
        "four tokens with probabilities 0.1 0.4 0.2 0.3:"
        f" the share of each over {n:,} positions of a text"
    )
    for options in (
        {},
        {"temperature": 0.5},
        {"top_k": 2},
        {"top_p": 0.6},
        {"top_p": 0.8},
        {"temperature": 0.0},
    ):
        counts = torch.bincount(choose(logits, u, **options), minlength=4)
        name = ", ".join(f"{key} {value}" for key, value in options.items()) or "as they are"
        shares = "  ".join(f"{share:.3f}" for share in (counts / n).tolist())
        print(f"{name:<36}{shares}")


if __name__ == "__main__":
    main()
