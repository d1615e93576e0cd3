"""What is drawn from a step's logits: the next tokens, and their log-probabilities.

    pieces of a step     A decodes | B: the middle of its prompt | C: the end of its prompt
    rows with logits     1         | 0                           | 1
                                     all, if its log-probabilities are asked for
    drawn                a token   | nothing                     | a token

Sequences with equal temperature, top-k and top-p are drawn in one call.

    python -m course.serve       a lesson

Not covered: penalties for tokens that were there before, logit biases, grammars.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from inference.sampling import SamplingParams, sample
from inference.serve import Piece, Step


class LogProb(NamedTuple):
    """log_softmax(logits) of a token, before temperature, top-k and top-p."""

    token: int
    log_prob: float
    # the likeliest tokens in its place, with theirs
    top: list[tuple[int, float]]


class Drawn(NamedTuple):
    """What the last stage gives for a step."""

    # number of a request -> its next token
    tokens: dict[int, int]
    # number of a request that asked -> log-probabilities of the tokens after its piece's tokens
    log_probs: dict[int, list[LogProb]]


def rows_of(step: Step) -> list[range]:
    """The rows of each piece that have logits: the last one if a token is drawn, and all of a
    prompt whose log-probabilities are asked for."""
    rows = []
    end = 0
    for piece in step.pieces:
        end += len(piece.tokens)
        count = len(piece.tokens) if piece.draw.of_prompt else int(piece.next is None)
        rows.append(range(end - count, end))
    return rows


def draw(step: Step, logits: Tensor) -> Drawn:
    """Draw the tokens of a step. logits: [rows, V]"""
    ends = list(itertools.accumulate(map(len, rows_of(step))))
    # pieces that are drawn in one call, and their rows
    alike: dict[SamplingParams, list[tuple[Piece, int]]] = {}
    for piece, end in zip(step.pieces, ends):
        if piece.next is None:
            alike.setdefault(piece.draw.sampling, []).append((piece, end - 1))
    token_of = {}
    for params, drawn in alike.items():
        pieces, rows = zip(*drawn)
        keys = [piece.draw.key for piece in pieces]
        positions = [piece.start + len(piece.tokens) for piece in pieces]
        of_rows = logits if len(rows) == len(logits) else logits[list(rows)]
        tokens = sample(of_rows, keys, positions, params)
        token_of |= zip((piece.number for piece in pieces), tokens.tolist())
    return Drawn(token_of, log_probs(step, logits, token_of))


def log_probs(step: Step, logits: Tensor, token_of: dict[int, int]) -> dict[int, list[LogProb]]:
    """As Drawn.log_probs. token_of: the drawn tokens."""
    asked = [piece for piece in step.pieces if piece.draw.log_probs is not None]
    if not asked:
        return {}
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    targets = [0] * len(logits)
    spans, row = {}, 0
    for piece, rows in zip(step.pieces, rows_of(step)):
        after = token_of.get(piece.number, piece.next)
        spans[piece.number] = range(row, row + len(rows))
        targets[row : row + len(rows)] = [*piece.tokens, after][len(piece.tokens) + 1 - len(rows) :]
        row += len(rows)
    # where logits are not finite the token is DIVERGED, and the driver raises
    at = torch.tensor(targets, device=logits.device).clamp(min=0).unsqueeze(1)
    of_targets = log_p.gather(1, at).squeeze(1).tolist()
    most = max(piece.draw.log_probs for piece in asked)
    values, ids = (x.tolist() for x in log_p.topk(min(most, log_p.shape[1])))  # [rows, most]
    found = {}
    for piece in asked:
        n = piece.draw.log_probs
        found[piece.number] = [
            LogProb(targets[i], of_targets[i], list(zip(ids[i][:n], values[i][:n])))
            for i in spans[piece.number]
        ]
    return found
