"""What is asked of a model, and what it answers, token by token.

    Request     a prompt, and how its answer is drawn and ends
    Sequence    a request, and the tokens generated so far
    Output      what one step gives to a sequence

generate.py answers requests in batches; inference/engine.py starts and ends each one by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from gpt import GPT
from inference.sampling import LogProb, SamplingParams, check_options, keys_of


class DrawOptions(NamedTuple):
    """How a request's tokens are drawn, and what is said of them."""

    sampling: SamplingParams = SamplingParams()
    # The key of its random numbers (sampling.keys_of).
    key: int = 0
    # The log-probability of each token, and of so many likeliest ones in its place.
    log_probs: int | None = None
    # Whether the prompt's tokens have log-probabilities too (the engine's alone).
    of_prompt: bool = False
    # Whether the prompt's embedding is asked for, and no token is drawn (the engine's alone).
    embeds: bool = False

    @property
    def reads_all(self) -> bool:
        """Whether all tokens of the prompt go through the model, also those of the prefix cache."""
        return self.of_prompt or self.embeds


@dataclass
class Request:
    """A prompt, and how its answer is drawn and ends."""

    prompt: list[int]
    max_tokens: int
    draw: DrawOptions = field(default_factory=DrawOptions)
    end_tokens: tuple[int, ...] = ()
    # stopped(generated ids): whether the text ends here.
    stopped: Callable[[list[int]], bool] | None = None
    adapter: str | None = None


class Output(NamedTuple):
    """What a step gives to a sequence."""

    number: int
    # None: the token ends the text, and is not part of it.
    token: int | None
    # None, or why the sequence is finished: `end of text`, `stop` or `length`.
    finish: str | None
    # The drawn token's, also where it ends the text; where the request asks for it.
    log_prob: LogProb | None = None
    # The prompt's tokens but the first; with the first output.
    of_prompt: list[LogProb] | None = None
    # [h]: the sum of the prompt's states behind the last norm; where the request asks for it.
    states: Tensor | None = None


@dataclass(eq=False)
class Sequence:
    """A request, and how far it is."""

    # The request's.
    number: int
    request: Request
    # None, or why it ended: as in Output, or `cancelled`.
    finish: str | None = None
    # The prompt, and what was generated after it.
    ids: list[int] = field(init=False)

    def __post_init__(self):
        self.ids = list(self.request.prompt)

    def append(self, token: int, log_prob: LogProb | None = None) -> Output:
        request = self.request
        if token in request.end_tokens or request.max_tokens == 0:
            self.finish = "end of text" if request.max_tokens else "length"
            return Output(self.number, None, self.finish, log_prob)
        self.ids.append(token)
        start = len(request.prompt)
        if request.stopped and request.stopped(self.ids[start:]):
            self.finish = "stop"
        elif len(self.ids) - start == request.max_tokens:
            self.finish = "length"
        return Output(self.number, token, self.finish, log_prob)


def requests_of(
    prompts: list[list[int]],
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eot: int | tuple[int, ...] | None = None,
    stopped: Callable[[int, list[int]], bool] | None = None,
    keys: list[int] | None = None,
    log_probs: int | None = None,
) -> list[Request]:
    """Requests that are drawn alike. Arguments as of generate.stream. Raises ValueError for an
    option that is not possible."""
    params = SamplingParams(temperature, top_k, top_p)
    check_options(max_tokens, *params)
    end_tokens = (eot,) if isinstance(eot, int) else tuple(eot or ())
    keys = keys_of(prompts, seed) if keys is None else keys
    if len(keys) != len(prompts):
        raise ValueError(f"{len(keys)} keys for {len(prompts)} prompts: give one for each")
    return [
        Request(
            prompt,
            max_tokens,
            DrawOptions(params, key, log_probs),
            end_tokens,
            stopped and partial(stopped, n),
        )
        for n, (prompt, key) in enumerate(zip(prompts, keys))
    ]


def check_prompts(model: GPT, prompts: list[list[int]]) -> None:
    """Raises ValueError, naming what to change. model: the whole model, or a pipeline stage."""
    seq_length = model.config.seq_length
    # prompt_tuning.apply adds virtual tokens after the vocabulary.
    num_ids = model.config.vocab_size + getattr(model, "virtual_tokens", 0)
    for n, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(
                f"prompt {n} is empty: give at least one token; a new text begins with the"
                " end-of-text token"
            )
        if len(prompt) > seq_length:
            raise ValueError(
                f"prompt {n} has {len(prompt)} tokens, and the model's context holds {seq_length}:"
                " shorten it"
            )
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < num_ids:
                raise ValueError(
                    f"prompt {n} has token {token}, and the model knows 0 to {num_ids - 1}"
                )
