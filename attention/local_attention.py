"""Local attention: near tokens count more, by a sliding window or by ALiBi.

Plain causal attention lets a token see all tokens before it, near or far. Two families change that,
by a number that is added to the score of query i and key j:

    sliding window (Mistral, arXiv 2310.06825)    ALiBi (Press et al., arXiv 2108.12409, section 3)
    -∞ where the distance i - j is w or more      -slope · (i - j), a slope of its own in each head

    i = 0   .                   w = 3             0                      slope = 1/2
    i = 1   . .                                  -½   0
    i = 2   . . .                                -1  -½   0
    i = 3     . . .     j = 0 is out of sight    -1½ -1  -½   0

With a window, L layers together reach L (w - 1) tokens back, and a token needs the keys and values
of w tokens only: the cache of generation stops growing (inference/kv_cache.py). With ALiBi a model
needs no other positions (BLOOM, arXiv 2211.05100). The first of a heads has slope r = 2^(-8/a),
the next r², then r³, and so on: 1/2, 1/4, .. 1/256 for 8 heads. Where a is no power of two, see
`alibi_slopes`.

    python -m attention.local_attention  reach of a token, columns of the cache, slopes

gpt.py gives the core attention of such a model a `LocalBias` (`local`), which document_mask.py adds
to the scores. Tensor parallelism tells it which heads are a rank's.

Not covered: a kernel that skips what the window hides (FlashAttention's window_size). Here the
scores are computed and then hidden. Context parallelism of such models is refused.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("attention.local_attention")

import math

import torch
from torch import Tensor

from model_config import GPTConfig


def alibi_slopes(num_heads: int) -> Tensor:
    """[a], float64. Where a is no power of two: the slopes of the power n below it, and between
    them every second one of 2n (as the authors, and BLOOM, take them)."""
    n = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    between = [2 ** (-4 * i / n) for i in range(1, 2 * n, 2)]
    # a model on the meta device has them too
    return torch.tensor((slopes + between)[:num_heads], dtype=torch.float64, device="cpu")


class LocalBias:
    """What is added to the scores, -∞ where a token is hidden."""

    def __init__(self, config: GPTConfig):
        self.window = config.sliding_window
        self.slopes = alibi_slopes(config.num_heads) if config.positions == "alibi" else None

    def shard(self, rank: int, t: int) -> None:
        """Keep the heads of one of t tensor-parallel ranks."""
        if self.slopes is not None:
            self.slopes = self.slopes.chunk(t)[rank]

    def __call__(self, q: Tensor, documents: Tensor | None = None) -> Tensor:
        """Of a whole sequence. q: [b, a, s, d]; documents: [b, s] as in attention/document_mask.py
        -> [1 or b, 1 or a, s, s], in q's dtype"""
        at = torch.arange(q.shape[2], device=q.device).unsqueeze(0)
        bias = self.between(at, at, q)
        if documents is not None:
            other = documents.unsqueeze(2) != documents.unsqueeze(1)  # [b, s, s]
            bias = bias.masked_fill(other.unsqueeze(1), -torch.inf)
        return bias

    def between(self, queries: Tensor, keys: Tensor, like: Tensor) -> Tensor:
        """The bias between positions. queries: [b, s]; keys: [b, n]; like: has the device and the
        dtype of the result -> [b, 1 or a, s, n]"""
        distance = queries.unsqueeze(2) - keys.unsqueeze(1)  # [b, s, n]
        hidden = distance < 0
        if self.window:
            hidden = hidden | (distance >= self.window)
        distance, hidden = distance.unsqueeze(1), hidden.unsqueeze(1)  # [b, 1, s, n]
        if self.slopes is None:
            bias = torch.zeros(hidden.shape, device=like.device)
        else:
            # whole numbers: in 32 bits a distance is exact up to 2^24
            slopes = self.slopes_on(like.device).to(torch.promote_types(like.dtype, torch.float32))
            bias = -slopes.view(-1, 1, 1) * distance  # [b, a, s, n]
        return bias.masked_fill(hidden, -torch.inf).to(like.dtype)

    def slopes_on(self, device: torch.device) -> Tensor:
        """[a]. They stay on a GPU: a CUDA graph cannot copy them there (cuda_graphs.py)."""
        if device.type == "cuda":
            self.slopes = self.slopes.to(device)
        return self.slopes.to(device)


def make_local_bias(config: GPTConfig) -> LocalBias | None:
    """None: plain causal attention."""
    is_local = config.sliding_window or config.positions == "alibi"
    return LocalBias(config) if is_local else None
