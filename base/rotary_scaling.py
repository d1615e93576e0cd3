"""Rotary angles for sequences longer than those that a model was trained on: Llama 3.1, YaRN.

A pair of a head's numbers (base/rotary.py) turns many times in the original length, or less than
once. Pairs that turn often tell near tokens apart, and keep their angle. A pair that has not turned
once would reach angles that the model has never seen: it turns slower by `rotary_factor`.

    turns in the original length     below low     between         above high
    frequency                        f / factor    interpolated    f

YaRN (Peng et al., arXiv 2309.00071) also sharpens attention over more keys: scores are divided by a
temperature t with √(1/t) = 0.1 ln(factor) + 1, by which cos and sin are multiplied.

    python train.py --load CKPT --seq-length 32768 --rotary-scaling yarn --rotary-factor 4 ..

Not covered: one factor for all pairs (linear), a factor that grows with the text (dynamic).
"""

import math

import torch
from torch import Tensor

from base.model_config import GPTConfig
from base.rotary import rotary_frequencies


def llama3(config: GPTConfig, device: torch.device) -> Tensor:
    """The rotary frequencies of Llama 3.1, for longer sequences. [d/2], float64

    A pair that turns less than `low` times in the original length turns slower by the factor; one
    that turns more than `high` times does not change; the others are interpolated."""
    frequency = rotary_frequencies(config, device)
    low, high = config.rotary_low_frequency, config.rotary_high_frequency
    turns = config.rotary_original_length * frequency / (2 * math.pi)
    stays = ((turns - low) / (high - low)).clamp(0, 1)
    return stays * frequency + (1 - stays) * frequency / config.rotary_factor


def yarn(config: GPTConfig, device: torch.device) -> Tensor:
    """YaRN's rotary frequencies (arXiv 2309.00071, section 3.2). [d/2], float64

    As Llama 3.1's, but interpolated by the number of the pair, as in the authors' code, not by its
    turns. cos and sin are multiplied by `config.rotary_scale`, so scores by 1/t, its square."""
    frequency = rotary_frequencies(config, device)
    n, length = len(frequency), config.rotary_original_length

    def pair(turns: float) -> float:
        return n * math.log(length / (2 * math.pi * turns), config.rotary_base)

    first = max(0, math.floor(pair(config.rotary_high_frequency)))
    last = min(2 * n - 1, math.ceil(pair(config.rotary_low_frequency)))
    pairs = torch.arange(n, device=device).double()
    slower = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return (1 - slower) * frequency + slower * frequency / config.rotary_factor


FREQUENCIES = {"llama3": llama3, "yarn": yarn}
