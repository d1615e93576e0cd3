"""Speculative decoding: modules draft tokens, and the model checks them all in one forward pass
(Leviathan et al., arXiv 2211.17192; multi-token prediction: arXiv 2412.19437, section 5.4.3).

    text so far      .. a b         draft c d        forward over b c d      says c x ..
                                                     c is right, d is not:   .. a b c x

Each pass gives the drafts that are what the model itself would say, and one token more. So the
text is that of greedy decoding, whatever the drafts are (up to rounding, as in generate.py).

The tokens of a pass are rows of a batch, each at a position of its own, which share one row of the
cache: kv_cache.py is made for one token a row. A column is visible to later positions alone, so a
rejected draft needs no removal: the next pass begins at its position and overwrites it. A module of
depth k has read drafts at its last k - 1 positions. It reads these again when the tokens are known.

    python generate.py --checkpoint runs/mtp --temperature 0 --speculative --prompt "def "

Not covered: several texts at once; drawing (rejection sampling of drafts); drafts by another model.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from base import compiling
from base.attention_kernels import any_shape
from gpt import Context
from inference.kv_cache import Cache, caching
from inference.requests import Output, Sequence, check_prompts, requests_of
from inference.sampling import DIVERGED, choose
from prompt_tuning import PromptError
from run.multi_token import Module


class Speculation:
    """One text: what the model and its modules have read of it. ids: the tokens so far, a list that
    the caller extends; longest: how many there will be."""

    def __init__(self, runner, ids: list[int], longest: int):
        self.runner, self.ids, self.longest = runner, ids, longest
        (self.stage,) = runner.stages
        self.modules = [b for b in self.stage.blocks.values() if isinstance(b, Module)]
        self.cache = runner.slot.cache = Cache(longest)
        # The tokens that the model has read, and its states [n, h] where modules have yet to run.
        self.done, self.states = 0, None
        self.drafts: list[int] = []

    def place(self, first: int, n: int) -> Context:
        """Prepare the cache for tokens first .. first + n - 1: a prefill, or rows that share it."""
        if first:
            self.cache.begin_decode(list(range(first, first + n)), self.runner.device)
        else:
            self.cache.begin_prefill([n - 1])
        self.cache.update_masks(self.runner.dtype, self.runner.locals)
        return Context(rotary=self.runner.rotary_at(self.cache, n))

    def rows(self, x: Tensor, first: int) -> Tensor:
        """[n, ..] -> [1, n, ..] for a prefill, [n, 1, ..] after it."""
        return x.unsqueeze(1 if first else 0)

    def likeliest(self, x: Tensor) -> list[int]:
        """The tokens after states [n, h]. Raises FloatingPointError."""
        tokens = choose(self.stage.head(x.unsqueeze(1))[:, 0], None, temperature=0).tolist()
        if DIVERGED in tokens:
            raise FloatingPointError("the model's logits are not finite")
        return tokens

    @torch.inference_mode()
    @any_shape()
    @compiling.eagerly
    def step(self) -> list[int]:
        """One forward pass of the model: the drafts that are right, and the token after them."""
        n = len(self.drafts)
        tokens = torch.tensor(self.ids[self.done :] + self.drafts, device=self.runner.device)
        self.place(self.done, len(tokens))
        x = self.rows(tokens, self.done)
        x = self.runner.through_blocks(self.stage, self.cache, x).flatten(0, 1)  # [tokens, h]
        said = self.likeliest(x[-1 - n :])
        right = next((i for i in range(n) if self.drafts[i] != said[i]), n)
        read = x[: len(x) - n + right]
        self.states = read if self.states is None else torch.cat((self.states, read))
        self.done += len(read)
        return said[: right + 1]

    @torch.inference_mode()
    @any_shape()
    @compiling.eagerly
    def draft(self) -> None:
        """Let the modules predict the tokens after `ids`, as many as the text has room for."""
        x, n = self.states, len(self.states)
        first, self.drafts = self.done - n, []
        for k, module in enumerate(self.modules, 1):
            known = torch.tensor((self.ids + self.drafts)[first + k :][:n], device=x.device)
            context = self.place(first, n)
            x, known = self.rows(x, first), self.rows(known, first)
            x = module.next_depth(x, module.tokens(known), context).flatten(0, 1)
            self.drafts += self.likeliest(x[-1:])
        # Where the deeper modules have read drafts.
        self.states = self.states[n - min(n, len(self.modules) - 1) :]
        self.drafts = self.drafts[: self.longest - len(self.ids) - 1]


def check_room(seq_length: int, prompt: list[int], max_tokens: int) -> None:
    """Raises PromptError for a text that outgrows the context."""
    most = seq_length - len(prompt)
    if max_tokens > most:
        rule = f"--speculative keeps one context, which has room for {most} more"
        raise PromptError(f"--max-tokens {max_tokens}: {rule}")


def stream(
    runner,
    prompts: list[list[int]],
    max_tokens: int,
    cp_group: dist.ProcessGroup | None = None,
    **options,
) -> Iterator[list[Output]]:
    """Yields what each forward pass gives to one text, as generate.stream of the same arguments.
    runner: a generate.ModelRunner of a model with modules (load_model(.., modules=True)).

    Raises ValueError for a prompt or an option that is not possible, PromptError for a text that
    outgrows the context, FloatingPointError."""
    (request,) = requests_of(prompts, max_tokens, **options)
    if request.draw.sampling.temperature != 0 or cp_group or runner.ring:
        raise ValueError("speculative decoding: needs temperature 0, and no pp or cp")
    check_prompts(runner.stages[0], prompts)
    sequence = Sequence(0, request)
    check_room(runner.config.seq_length, request.prompt, max_tokens)
    with caching(runner.stages, runner.slot):
        text = Speculation(runner, sequence.ids, len(request.prompt) + max_tokens)
        while max_tokens and not sequence.finish:
            outputs = []
            for token in text.step():
                outputs.append(sequence.append(token))
                if sequence.finish:
                    break
            yield outputs
            if not sequence.finish:
                text.draft()
