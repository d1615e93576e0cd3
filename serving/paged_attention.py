"""Attention to a paged cache: each token of a step looks at the blocks of its own sequence.

A step has T tokens of several sequences. Norms, matrices and the MLP see T rows, and do not care
whose they are. Attention does: it writes the T keys and values into their blocks, and then reads,
for each token, the blocks in the table of its sequence.

    step        A decodes (position 8) | B decodes (3) | C: positions 4 .. 7 of its prompt
    rows        0                        1               2 3 4 5            T = 6
    slots       block · size + position mod size, one for each row

    decodes     one query for each sequence. The blocks of all of them are gathered, the tables
                filled up with block 0, and attended to in one call, under a mask
    a prompt    its queries attend to its own blocks, in a call by itself

Keys are [a_kv, blocks · size, d] in each layer. With heads outermost, the blocks of a sequence that
stand next to each other are a slice, and the gathered ones need no other order.

    python serve.py       a lesson: what blocks waste, and what batches do

Not covered: a kernel that reads the blocks where they are (vLLM's, FlashInfer), as GPUs need it.
Here the gathered blocks are a copy, written into one buffer for all layers. CUDA graphs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from families import LocalBias
from inference.kv_cache import attention_in_one_call
from serve import Piece, Step


class Prompt(NamedTuple):
    """A piece of several tokens."""

    rows: slice
    # the position of its first token, and of the one after its last
    start: int
    end: int
    # [blocks] of its sequence, the position of the first block's first token
    table: Tensor
    first: int
    # [1, 1 or a, tokens, end - first] added to the scores; None: plain causal attention
    mask: Tensor | None


class PagedCache:
    """Keys and values of all sequences, for the layers of this rank, and where the rows of the
    current step belong. In the place of inference.kv_cache.Cache."""

    # for generate.ModelRunner, which a prefill would share
    group = None

    def __init__(self, num_blocks: int, block_size: int, window: int):
        self.num_blocks = num_blocks
        self.size = block_size
        self.window = window
        # layer -> [2, a_kv, blocks * size, d], keys and values
        self.layers: dict[str, Tensor] = {}
        # what decodes gather, of one layer at a time: keys, values
        self.buffers: dict[int, Tensor] = {}
        # [T] of a step: the position of each row, and its place in the cache
        self.positions: Tensor | None = None
        self.slots: Tensor | None = None
        # rows 0 .. b - 1 decode: the blocks of their sequences, [b, blocks], also as rows of all
        # heads' blocks, or as the one slice that they are; what is added to the scores
        self.tables: Tensor | None = None
        self.rows: Tensor | None = None
        self.span: slice | None = None
        self.mask: Tensor | None = None
        self.prompts: list[Prompt] = []

    # --- a step ---

    def begin(
        self, step: Step, local: LocalBias | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Prepare a step. local: of families.py; dtype: of the scores. Returns its tokens, [T]."""
        self.like = torch.empty(0, device=device, dtype=dtype)
        positions, slots, tokens = [], [], []
        for piece in step.pieces:
            span = range(piece.start, piece.start + len(piece.tokens))
            positions += span
            tokens += piece.tokens
            slots += self.slots_of(piece, span)
        self.positions, self.slots, tokens = torch.tensor((positions, slots, tokens), device=device)
        decodes = [piece for piece in step.pieces if len(piece.tokens) == 1]
        self.prepare_decodes(decodes, local)
        self.prompts = []
        row = len(decodes)
        for piece in step.pieces[row:]:
            self.prompts.append(self.prompt_of(piece, row, local))
            row += len(piece.tokens)
        self.copy(step.copies)
        return tokens

    def slots_of(self, piece: Piece, span: range) -> list[int]:
        if not piece.writes:
            return [0] * len(span)
        size, table = self.size, piece.table
        return [table[p // size] * size + p % size for p in span]

    def first_block(self, position: int) -> int:
        """The first block that a token looks at."""
        return max(0, position - self.window + 1) // self.size if self.window else 0

    def prepare_decodes(self, pieces: list[Piece], local: LocalBias | None) -> None:
        self.tables = self.rows = self.span = self.mask = None
        if not pieces:
            return
        first = [self.first_block(piece.start) for piece in pieces]
        tables = [piece.table[n:] for n, piece in zip(first, pieces)]
        if len(pieces) == 1 and local is None and is_run(tables[0]):
            begin = tables[0][0] * self.size
            self.span = slice(begin, begin + pieces[0].start + 1)
        longest = max(map(len, tables))
        filled = [table + [0] * (longest - len(table)) for table in tables]
        device = self.like.device
        self.tables = torch.tensor(filled, device=device)  # [b, blocks]
        if self.span is not None:
            return
        positions = self.positions[: len(pieces)].unsqueeze(1)  # [b, 1]
        columns = torch.arange(longest * self.size, device=device)  # [S]
        if local is None:
            mask = self.like.new_zeros(len(pieces), len(columns))
            mask = mask.masked_fill_(columns > positions, -torch.inf)[:, None, None]
        else:
            columns = columns + torch.tensor(first, device=device).unsqueeze(1) * self.size
            mask = local.between(positions, columns, self.like)
        self.mask = mask  # [b, 1 or a, 1, S]

    def prompt_of(self, piece: Piece, row: int, local: LocalBias | None) -> Prompt:
        n = len(piece.tokens)
        start, end = piece.start, piece.start + n
        skipped = self.first_block(start)
        first = skipped * self.size
        table = torch.tensor(piece.table[skipped:], device=self.like.device)
        mask = None
        if local is not None or start > 0:
            queries = torch.arange(start, end, device=self.like.device).unsqueeze(0)
            keys = torch.arange(first, end, device=self.like.device).unsqueeze(0)
            if local is not None:
                mask = local.between(queries, keys, self.like)
            else:
                mask = (keys.unsqueeze(1) <= queries.unsqueeze(2)).unsqueeze(1)
        return Prompt(slice(row, row + n), start, end, table, first, mask)

    def copy(self, copies: list[tuple[int, int]]) -> None:
        for stored in self.layers.values():
            blocks = stored.unflatten(2, (-1, self.size))
            for source, target in copies:
                blocks[:, :, target] = blocks[:, :, source]

    # --- a layer ---

    def attend(
        self, layer: str, local: LocalBias | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Store k and v, and attend to the tokens of each row's sequence. q: [T, a, 1, d];
        k, v: [T, a_kv, 1, d] -> [T, 1, a d]"""
        if layer not in self.layers:
            shape = (2, k.shape[1], self.num_blocks * self.size, k.shape[3])
            # zeros: a hidden column counts 0 times its value, and 0 times NaN is NaN
            self.layers[layer] = k.new_zeros(shape)
        keys, values = self.layers[layer]  # [a_kv, blocks * size, d]
        k, v = k.squeeze(2).transpose(0, 1), v.squeeze(2).transpose(0, 1)  # [a_kv, T, d]
        keys.index_copy_(1, self.slots, k)
        values.index_copy_(1, self.slots, v)
        parts = []
        if self.tables is not None:
            parts.append(self.decode(q[: len(self.tables)], keys, values))
        for prompt in self.prompts:
            parts.append(self.prefill(prompt, q, keys, values))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y.flatten(1).unsqueeze(1)

    def decode(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One query for each sequence. q: [b, a, 1, d] -> [b, a, d]"""
        b, a, _, d = q.shape
        a_kv = len(keys)
        # heads that share a key stand where the tokens of a sequence would
        q = q.view(b, a_kv, a // a_kv, d).transpose(0, 1)
        if self.span is not None:
            keys, values = keys[:, None, self.span], values[:, None, self.span]
        else:
            keys, values = self.gathered(0, keys), self.gathered(1, values)
        mask = self.mask
        if mask is not None:
            # [1 or a_kv, b, 1 or a / a_kv, S]
            mask = mask.view(b, min(a_kv, mask.shape[1]), -1, mask.shape[3]).transpose(0, 1)
        # as inference.kv_cache.Cache.attend_decode chooses
        in_one_call = q.device.type == "cpu" and q.dtype.itemsize >= 4 and b * a_kv >= 32
        attention = attention_in_one_call if in_one_call else F.scaled_dot_product_attention
        return attention(q, keys, values, mask).transpose(0, 1).reshape(b, a, d)

    def gathered(self, n: int, stored: Tensor) -> Tensor:
        """The blocks of all sequences that decode. n: of the buffer for them; stored: [a_kv,
        blocks * size, d] -> [a_kv, b, S, d]"""
        a_kv, _, d = stored.shape
        if self.rows is None:
            # of the blocks of all heads, [a_kv * blocks]
            heads = torch.arange(a_kv, device=stored.device) * self.num_blocks
            self.rows = (heads.unsqueeze(1) + self.tables.flatten()).flatten()
        blocks = stored.view(a_kv * self.num_blocks, -1)  # [.., size * d]
        count = len(self.rows) * blocks.shape[1]
        if n not in self.buffers or len(self.buffers[n]) < count:
            # new memory would be slow: the system clears each page of it
            self.buffers[n] = stored.new_empty(2 * count)
        out = self.buffers[n][:count].view(len(self.rows), -1)
        torch.index_select(blocks, 0, self.rows, out=out)
        return out.view(a_kv, len(self.tables), -1, d)

    def prefill(self, prompt: Prompt, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The queries of one piece of a prompt. q: [T, a, 1, d] -> [tokens, a, d]"""
        q = q[prompt.rows].transpose(0, 2)  # [1, a, tokens, d]
        size = self.size
        keys, values = (
            stored.view(len(stored), self.num_blocks, size, -1)
            .index_select(1, prompt.table)
            .flatten(1, 2)[:, : prompt.end - prompt.first]
            for stored in (keys, values)
        )  # [a_kv, end - first, d]
        y = F.scaled_dot_product_attention(
            q,
            keys.unsqueeze(0),
            values.unsqueeze(0),
            prompt.mask,
            is_causal=prompt.mask is None,
            enable_gqa=q.shape[1] != len(keys),
        )
        return y[0].transpose(0, 1)


def is_run(table: list[int]) -> bool:
    """Whether these blocks stand next to each other."""
    return table == list(range(table[0], table[0] + len(table)))
