r"""Text in, text out: prompts become token ids, generated ids become text while they come.

Two details make this more than `tokenizer.decode`:

    half a character     a byte-level token may end inside a character. Decoded alone it is
                         "\ufffd", so a streamed text waits for the token after it.
    stop strings         a stop string may be spread over several tokens, and a token may have more
                         than the stop string in it. It is searched in the text, and cut off; a
                         streamed text holds back what may be its beginning.

    python generate.py --checkpoint runs/default --prompt-file prompts.jsonl --stop "def "

Not covered: outputs that follow a grammar, probabilities of the tokens, several texts a prompt.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from base.world import World
from corpus.tokenizer import TokenizerError, prompt_ids
from generate import ModelRunner, stages_of, stream
from inference.batches import NewToken, data_parallel
from inference.sampling import keys_of
from prompts.prompt_data import PromptError, read_lines


class GenerationTimer:
    """Counts new tokens, and measures the time to the first ones and the speed after them."""

    def __init__(self):
        self.begin = time.perf_counter()
        # (when, how many) of each step; the first one is the prefill
        self.steps: list[tuple[float, int]] = []

    def tick(self, new_tokens: list[NewToken]) -> None:
        count = sum(new.token is not None for new in new_tokens)
        self.steps.append((time.perf_counter(), count))

    def __str__(self) -> str:
        if not self.steps:
            return "no tokens"
        (first, of_prefill), (last, _) = self.steps[0], self.steps[-1]
        tokens = sum(count for _, count in self.steps)
        summary = f"{tokens} tokens, the first after {first - self.begin:.3f} s"
        if tokens > of_prefill:
            summary += f", then {(tokens - of_prefill) / (last - first):,.1f} tokens/s"
        return summary


class Detokenizer:
    """Generated ids as text, up to the first stop string."""

    def __init__(self, tokenizer, prompts: list[list[int]], stop: list[str] = ()):
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.stop = list(stop)
        # So many of the newest tokens contain a stop string that has just become complete: a token
        # has at least one byte.
        longest = max((len(s.encode(errors="replace")) for s in stop), default=0)
        self.tail = 8 + longest

    def text(self, number: int, ids: list[int]) -> str:
        """The text of the ids generated after prompt `number`. Decoded with the prompt: the first
        token may be part of a character, or lose its space."""
        prompt = self.tokenizer.decode(self.prompts[number])
        text = self.tokenizer.decode(self.prompts[number] + ids)[len(prompt) :]
        ends = [text.find(stop) for stop in self.stop if stop in text]
        return text[: min(ends, default=len(text))]

    def stopped(self, number: int, ids: list[int]) -> bool:
        """Whether the newest ids complete a stop string. As `stopped` of generate.stream."""
        if not self.stop:
            return False
        text = self.tokenizer.decode(ids[-self.tail :])
        return any(stop in text for stop in self.stop)


class TextStream:
    """The text of one answer while its tokens come: `push` decodes some of the newest tokens, so
    the cost of a token does not grow. Together, what it gives is Detokenizer's text."""

    # tokens that are decoded again
    KEPT = 16

    def __init__(self, tokenizer, prompt: list[int], stop: list[str] = ()):
        self.tokenizer = tokenizer
        self.detokenizer = Detokenizer(tokenizer, [prompt], stop)
        self.ids: list[int] = []
        # the newest tokens, and how many characters of theirs are in `held`, or were before
        self.window = prompt[-self.KEPT :]
        self.taken = len(tokenizer.decode(self.window))
        # text that may be the beginning of a stop string
        self.held = ""
        self.given = 0

    def push(self, token: int) -> str:
        """One more token. Returns text that is certain by now."""
        self.ids.append(token)
        self.window.append(token)
        text = self.tokenizer.decode(self.window)
        # half a character; with byte fallback, all characters that it follows without a letter
        halves = len(text) - len(text.rstrip("\ufffd"))
        if len(self.window) > 4 * self.KEPT:
            # it is no text
            halves = min(halves, 1)
        certain = max(self.taken, len(text) - halves)
        self.held += text[self.taken : certain]
        self.taken = certain
        if len(self.window) > 2 * self.KEPT:
            self.shorten(text)
        ready = min((self.before(stop) for stop in self.detokenizer.stop), default=len(self.held))
        self.given += ready
        given, self.held = self.held[:ready], self.held[ready:]
        return given

    def before(self, stop: str) -> int:
        """So many characters of `held` come before this stop string, or its beginning."""
        if stop in self.held:
            return self.held.index(stop)
        lengths = range(min(len(stop) - 1, len(self.held)), 0, -1)
        begun = (length for length in lengths if self.held.endswith(stop[:length]))
        return len(self.held) - next(begun, 0)

    def shorten(self, text: str) -> None:
        """Leave out the first tokens of the window, if the others have the same text without them.
        Where a character has tokens on both sides, or a word its space before it, they differ."""
        first, last = self.window[: -self.KEPT], self.window[-self.KEPT :]
        rest = self.tokenizer.decode(last)
        is_whole = self.tokenizer.decode(first) + rest == text
        # a decoder may drop the first space; after a whole character nothing else can differ
        is_end = text.endswith(rest) and not text.endswith("\ufffd")
        if len(rest) > len(text) - self.taken and (is_whole or is_end):
            self.window = last
            self.taken -= len(text) - len(rest)

    def end(self) -> str:
        """The rest of the text, after the last token."""
        return self.detokenizer.text(0, self.ids)[self.given :]


def encode(text: str, tokenizer, seq_length: int) -> list[int]:
    """The ids of a prompt. Raises PromptError where it is empty, too long, or no text."""
    try:
        ids = tokenizer.encode(text)
    except UnicodeEncodeError:
        raise PromptError("the prompt is not text: it has half a surrogate pair in it") from None
    except TokenizerError as e:
        raise PromptError(f"the prompt cannot be encoded ({e})") from None
    if not len(ids):
        raise PromptError("the prompt is empty")
    ids = prompt_ids(tokenizer, text)
    if len(ids) > seq_length:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, and the model's context holds {seq_length}:"
            " shorten it"
        )
    return ids


# --- one prompt, streamed -------------------------------------------------------------------------


def stream_text(
    model, tokenizer, prompt: list[int], stop: list[str], out, **options
) -> GenerationTimer:
    """Print the continuation of a prompt while it is generated. out: a file like sys.stdout, or
    None on ranks that print nothing. options: of generate.stream."""
    texts = TextStream(tokenizer, prompt, stop)
    timer = GenerationTimer()
    for new_tokens in stream(model, [prompt], stopped=texts.detokenizer.stopped, **options):
        timer.tick(new_tokens)
        text = "".join(texts.push(new.token) for new in new_tokens if new.token is not None)
        if new_tokens[-1].finish is not None:
            text += texts.end()
        if out and text:
            print(text, end="", flush=True, file=out)
    return timer


# --- a file of prompts ----------------------------------------------------------------------------


def read_prompts(
    path: str, tokenizer, seq_length: int, adapters: Sequence[str] = ()
) -> list[tuple[dict, list[int]]]:
    """(record, ids of its prompt) for each line of a JSON-lines file; `-`: standard input.
    adapters: what a line may have as its "adapter". Raises PromptError, naming the line."""
    requests = []
    for number, record in read_lines(path):
        try:
            if not isinstance(record.get("prompt"), str):
                raise PromptError('not an object with a "prompt" that is text')
            if taken := {"text", "tokens", "finish"} & record.keys():
                raise PromptError(
                    f"{sorted(taken)} would be overwritten by what is generated; give it another"
                    " name"
                )
            check_adapter(record, adapters)
            requests.append((record, encode(record["prompt"], tokenizer, seq_length)))
        except PromptError as e:
            raise PromptError(f"{path}, line {number}: {e}") from None
    if not requests:
        raise PromptError(f"--prompt-file {path}: no prompts in it")
    return requests


def check_adapter(record: dict, names: Sequence[str]) -> None:
    """Raises PromptError for an adapter that --adapter does not name."""
    name = record.get("adapter")
    if name is not None and name not in names:
        known = f"has {', '.join(names)}" if names else "names none; NAME=ADAPTER would"
        raise PromptError(f"adapter {json.dumps(name)}: --adapter {known}")


def answer_file(
    world: World,
    model,
    tokenizer,
    requests: list[tuple[dict, list[int]]],
    batch_size: int,
    stop: list[str],
    lockstep,
    write: Callable[[dict, str, int, str], None],
    use_adapter: Callable[[str | None], None] | None = None,
    **options,
) -> str:
    """Continue all prompts, `batch_size` at a time on each data-parallel rank. A collective.

    requests: of `read_prompts`. write(record, text, number of tokens, finish): called on rank 0, in
    the order of the requests, after each batch. use_adapter(name of a record's adapter, or None):
    called before a batch of requests with this adapter. lockstep, options: as of generate.stream.
    Returns a summary of the speed."""
    timer = GenerationTimer()
    runner = ModelRunner(stages_of(model))
    dp, dp_rank = data_parallel(world.groups)
    keys = keys_of([ids for _, ids in requests], options.pop("seed"))
    adapter_of = [record.get("adapter") if use_adapter else None for record, _ in requests]
    answer_of = {}
    written = 0
    for adapter, numbers in batches_of(adapter_of, dp * batch_size):
        if use_adapter:
            use_adapter(adapter)
        mine = numbers[dp_rank::dp]
        answers = answer_batch(
            model,
            Detokenizer(tokenizer, [requests[n][1] for n in mine], stop),
            timer,
            keys=[keys[n] for n in mine],
            lockstep=lockstep,
            runner=runner,
            **options,
        )
        for answers_of_rank in world.gather(dict(zip(mine, answers))):
            answer_of |= answers_of_rank
        while written in answer_of:
            answer = answer_of.pop(written)
            if world.rank == 0:
                write(requests[written][0], *answer)
            written += 1
    count = "1 prompt" if len(requests) == 1 else f"{len(requests)} prompts"
    summary = f"{count}: {timer}"
    if dp > 1:
        summary += f" on each of {dp} data-parallel ranks"
    return summary


def batches_of(adapter_of: list[str | None], size: int) -> Iterator[tuple[str | None, list[int]]]:
    """(adapter, numbers of at most `size` requests that have it), adapter by adapter."""
    for adapter in dict.fromkeys(adapter_of):
        numbers = [n for n, other in enumerate(adapter_of) if other == adapter]
        for start in range(0, len(numbers), size):
            yield adapter, numbers[start : start + size]


def answer_batch(
    model, detokenizer: Detokenizer, timer: GenerationTimer, **options
) -> list[tuple[str, int, str]]:
    """(text, number of tokens, finish) for each prompt of the detokenizer."""
    prompts = detokenizer.prompts
    ids = [[] for _ in prompts]
    # where no token is asked for, none comes
    finishes = ["length"] * len(prompts)
    for new_tokens in stream(model, prompts, stopped=detokenizer.stopped, **options):
        timer.tick(new_tokens)
        for new in new_tokens:
            finishes[new.number] = new.finish
            if new.token is not None:
                ids[new.number].append(new.token)
    return [(detokenizer.text(i, ids[i]), len(ids[i]), finishes[i]) for i in range(len(prompts))]


def as_json(record: dict) -> str:
    """One line of JSON. A character that standard output cannot show is written as \\uXXXX."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return json.dumps(record)
    return line
