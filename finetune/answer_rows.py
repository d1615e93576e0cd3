"""The answers of a step of reinforcement learning, packed into rows to train on.

    prompt p, answer a     ids           p0 p1 a0 a1 a2 | q0 q1 q2 b0 | ..      a row: [s]
                           targets       p1 a0 a1 a2  . | q1 q2 b0  . | ..
                           in the loss    .  ^  ^  ^  . |  .  .  ^  . | ..

inference/rollout.py writes the answers. The token that ends an answer belongs to it: the model drew
it, and learns when to stop.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from finetune.packing import Example, first_fit, lay_out
from run.data import Batch, Dataset


class Answer(NamedTuple):
    """What the model wrote after a prompt."""

    # its number in the global batch
    sample: int
    prompt: list[int]
    # with the end token, if the model drew one
    ids: list[int]
    # one for each of these ids, at temperature 1
    log_probs: list[float]
    # False: it is cut off at the limit of tokens
    ended: bool


class AnswerPlace(NamedTuple):
    """Where an answer stands in the rows."""

    row: int
    # the position whose target is the answer's first token
    column: int
    # tokens of the answer
    length: int

    @property
    def last(self) -> int:
        """The column of the answer's last token, which has no target."""
        return self.column + self.length


class Rows(Dataset):
    """Answers, packed into rows, with the interface of a data set of run/data.py. The same on every
    rank.

    An answer and its prompt are a document with all their ids: a critic or a reward model reads the
    last one too. Sample n is row n, then all rows again. What there is of each answer token is
    either ragged, a sequence for each answer, or a matrix [R, s] in which the column of a value is
    the position whose target is the token; `spread` and `collect` turn one into the other.
    """

    def __init__(self, answers: list[Answer], seq_length: int, multiple_of: int = 1):
        """multiple_of: of the number of rows R; empty rows, in which nothing counts, fill up.
        Raises ValueError where there is no answer, and for one that is longer than a row."""
        if not answers:
            raise ValueError("no answers to pack")
        self.answers = answers
        self.s = seq_length
        examples = [
            Example(prompt + ids, [False] * len(prompt) + [True] * len(ids))
            for _, prompt, ids, *_ in answers
        ]
        lengths = [len(example.ids) for example in examples]
        packed = first_fit(lengths, seq_length)
        self.num_sequences = -(-len(packed) // multiple_of) * multiple_of
        packed += [[]] * (self.num_sequences - len(packed))
        # the batch of all rows
        self.all = lay_out([[examples[n] for n in row] for row in packed], seq_length, True)
        places = {}
        for row, numbers in enumerate(packed):
            at = 0
            for number in numbers:
                answer = answers[number]
                places[number] = AnswerPlace(row, at + len(answer.prompt) - 1, len(answer.ids))
                at += lengths[number]
        # where each answer stands
        self.places = [places[number] for number in range(len(answers))]

    def batch(self, samples) -> Batch:
        """samples: b numbers of rows."""
        samples = torch.as_tensor(list(samples))
        rows = samples % self.num_sequences
        fields = [None if field is None else field[rows] for field in self.all]
        return Batch(*fields)._replace(samples=samples)

    def counted_tokens(self, samples) -> int:
        """How many answer tokens these rows have."""
        return int(self.batch(samples).loss_mask.sum())

    def positions(self, samples) -> int:
        return int(self.batch(samples).real.sum())

    def spread(self, values: list) -> Tensor:
        """values: for each answer a sequence, with a number for each of its tokens -> [R, s]
        float64, 0 elsewhere. Raises ValueError where a length is another one."""
        matrix = torch.zeros(self.num_sequences, self.s, dtype=torch.float64)
        for number, (place, of_answer) in enumerate(zip(self.places, values, strict=True)):
            if len(of_answer) != place.length:
                raise ValueError(
                    f"{len(of_answer)} values for answer {number}, which has {place.length} tokens"
                )
            row = torch.as_tensor(of_answer, dtype=matrix.dtype)
            matrix[place.row, place.column : place.last] = row
        return matrix

    def collect(self, matrix: Tensor) -> list[Tensor]:
        """matrix: [R, s] -> for each answer the values of its tokens, [length]"""
        return [matrix[place.row, place.column : place.last] for place in self.places]
