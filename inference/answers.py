r"""Text in, text out: prompts become token ids, generated ids become text while they come.

Two details make this more than `tokenizer.decode`:

    half a character     a token may end inside a character. So tokens become bytes
                         (token_bytes.py), and bytes become text once a character is whole.
    stop strings         a stop string may be spread over several tokens, and a token may have more
                         than the stop string in it. It is searched in the text, and cut off; a
                         streamed text holds back what may be its beginning. Special tokens are no
                         text, but <|im_end|> is found as a stop string.

    python generate.py --checkpoint runs/default --prompt-file prompts.jsonl --stop "def "

Not covered: outputs that follow a grammar.
"""

import codecs
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import compress

from base import json_files
from finetune.chat_template import ChatError, ChatTemplate
from inference.batches import data_parallel
from inference.requests import Output
from inference.sampling import keys_of
from inference.token_bytes import token_bytes
from prompt_tuning import PromptError
from run.tokenizer import TokenizerError, prompt_ids
from run.world import World

# Stands at the end of a message; the space shows whether a template strips messages.
MARK = "END_OF_THE_UNFINISHED_MESSAGE "


class GenerationTimer:
    """Counts new tokens, and measures the time to the first ones and the speed after them."""

    def __init__(self):
        self.begin = time.perf_counter()
        # (when, how many) of each step; the first one is the prefill.
        self.steps: list[tuple[float, int]] = []

    def tick(self, new_tokens: list[Output]) -> None:
        count = sum(new.token is not None for new in new_tokens)
        self.steps.append((time.perf_counter(), count))

    def per_pass(self) -> str:
        """Tokens for each forward pass after the prefill: more than 1 where drafts were right."""
        counts = [count for _, count in self.steps[1:]]
        return f"{sum(counts) / max(1, len(counts)):.2f} tokens for each forward pass"

    def __str__(self) -> str:
        if not self.steps:
            return "no tokens"
        (first, of_prefill), (last, _) = self.steps[0], self.steps[-1]
        tokens = sum(count for _, count in self.steps)
        summary = f"{tokens} tokens, the first after {first - self.begin:.3f} s"
        if tokens > of_prefill:
            summary += f", then {(tokens - of_prefill) / (last - first):,.1f} tokens/s"
        return summary


class TextStream:
    """The text of one answer, up to the first stop string, while its tokens come."""

    def __init__(self, tokenizer, prompt: list[int], stop: list[str] = ()):
        self.bytes = token_bytes(tokenizer)
        self.stop = list(stop)
        # Half a character stays in the decoder; that of a prompt is completed by the answer.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.prompt = self.decoder.decode(self.bytes.text(prompt))
        # Whether no text comes before the next token.
        self.begins = self.bytes.special.issuperset(prompt)
        self.count = 0
        # What may be the beginning of a stop string, and which characters of it are text.
        self.held, self.is_text = "", []

    def push(self, token: int) -> str:
        """One more token. Returns text that is certain by now."""
        self.count += 1
        if token in self.bytes.special:
            self.hold(self.bytes.of(token).decode(), False)
        else:
            self.hold(self.decoder.decode(self.bytes.of(token, self.begins)), True)
            self.begins = False
        return self.give(min(map(self.before, self.stop), default=len(self.held)))

    def hold(self, characters: str, is_text: bool) -> None:
        self.held += characters
        self.is_text += [is_text] * len(characters)

    def give(self, count: int) -> str:
        text = "".join(compress(self.held[:count], self.is_text))
        self.held, self.is_text = self.held[count:], self.is_text[count:]
        return text

    def before(self, stop: str) -> int:
        """So many characters of `held` come before this stop string, or its beginning."""
        if stop in self.held:
            return self.held.index(stop)
        lengths = range(min(len(stop) - 1, len(self.held)), 0, -1)
        begun = (length for length in lengths if self.held.endswith(stop[:length]))
        return len(self.held) - next(begun, 0)

    def end(self) -> str:
        """The rest of the text, after the last token."""
        self.hold(self.decoder.decode(b"", final=True), True)
        ends = [self.held.index(stop) for stop in self.stop if stop in self.held]
        return self.give(min(ends, default=len(self.held)))

    def stopped(self, ids: list[int]) -> bool:
        """Whether a stop string is complete. ids: the answer so far."""
        for token in ids[self.count :]:
            self.push(token)
        return any(stop in self.held for stop in self.stop)


def text_of(tokenizer, prompt: list[int], ids: list[int], stop: list[str] = ()) -> str:
    """The text of a whole answer."""
    stream = TextStream(tokenizer, prompt, stop)
    return "".join(map(stream.push, ids)) + stream.end()


def stop_rule(
    tokenizer, prompts: list[list[int]], stop: list[str]
) -> Callable[[int, list[int]], bool] | None:
    """`stopped` of generate.stream."""
    texts = [TextStream(tokenizer, prompt, stop) for prompt in prompts]
    return (lambda number, ids: texts[number].stopped(ids)) if stop else None


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


def unfinished(template: ChatTemplate, messages: list[dict]) -> str:
    """A conversation whose last message the model goes on with: as far as a mark at its end, as
    transformers does. Raises ChatError."""
    *others, last = messages
    text = template.render([*others, last | {"content": last.get("content", "") + MARK}]).text
    if MARK.strip() not in text:
        raise ChatError(f"{template.where} leaves out the message that is to be continued")
    before = text[: text.rindex(MARK.strip())]
    # A template that strips messages has stripped the mark too.
    return before if MARK in text else before.rstrip()


# --- one prompt, streamed -------------------------------------------------------------------------


def stream_text(
    stream, tokenizer, prompt: list[int], stop: list[str], out, **options
) -> GenerationTimer:
    """Print the continuation of a prompt while it is generated. stream, options: of
    generate.stream_of. out: a file like sys.stdout, or None on ranks that print nothing."""
    texts = TextStream(tokenizer, prompt, stop)
    timer = GenerationTimer()
    stopped = stop_rule(tokenizer, [prompt], stop)
    for new_tokens in stream([prompt], stopped=stopped, **options):
        timer.tick(new_tokens)
        text = "".join(texts.push(new.token) for new in new_tokens if new.token is not None)
        if new_tokens[-1].finish is not None:
            text += texts.end()
        if out and text:
            print(text, end="", flush=True, file=out)
    return timer


# --- a file of prompts ----------------------------------------------------------------------------


def read_prompts(
    path: str, tokenizer, seq_length: int, adapters: Sequence[str] = (), field: str = "prompt"
) -> list[tuple[dict, list[int]]]:
    """(record, ids of its prompt) for each line of a JSON-lines file; `-`: standard input.
    adapters: what a line may have as its "adapter"; field: which has the prompt. Raises
    PromptError, naming the line."""
    requests = []
    for number, record in json_files.read_lines(path):
        try:
            if not isinstance(record.get(field), str):
                raise PromptError(f'not an object with a "{field}" that is text')
            if taken := {"text", "tokens", "finish"} & record.keys():
                raise PromptError(
                    f"{sorted(taken)} would be overwritten by what is generated; give it another"
                    " name"
                )
            check_adapter(record, adapters)
            requests.append((record, encode(record[field], tokenizer, seq_length)))
        except PromptError as e:
            raise PromptError(f"{path}, line {number}: {e}") from None
    if not requests:
        raise PromptError(f"{path}: no {field}s in it")
    return requests


def check_adapter(record: dict, names: Sequence[str]) -> None:
    """Raises PromptError for an adapter that --adapter does not name."""
    name = record.get("adapter")
    if name is not None and name not in names:
        known = f"has {', '.join(names)}" if names else "names none; NAME=ADAPTER would"
        raise PromptError(f"adapter {json.dumps(name)}: --adapter {known}")


def answer_file(
    world: World,
    stream,
    tokenizer,
    requests: list[tuple[dict, list[int]]],
    batch_size: int,
    stop: list[str],
    lockstep,
    write: Callable[[dict, str, int, str], None],
    use_adapter: Callable[[str | None], None] | None = None,
    unit: str = "prompt",
    **options,
) -> str:
    """Continue all prompts, `batch_size` at a time on each data-parallel rank. A collective.

    stream, lockstep, options: of generate.stream_of. requests: of `read_prompts`. write(record,
    text, number of tokens, finish): called on rank 0, in the order of the requests.
    use_adapter(name of a record's adapter, or None): called before a batch with this adapter.
    unit: what a request is, for the summary.
    Returns a summary of the speed."""
    timer = GenerationTimer()
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
            *(stream, tokenizer, [requests[n][1] for n in mine], stop, timer),
            keys=[keys[n] for n in mine],
            lockstep=lockstep,
            **options,
        )
        for answers_of_rank in world.gather(dict(zip(mine, answers))):
            answer_of |= answers_of_rank
        while written in answer_of:
            answer = answer_of.pop(written)
            if world.rank == 0:
                write(requests[written][0], *answer)
            written += 1
    summary = f"{len(requests)} {unit}{'s' * (len(requests) != 1)}: {timer}"
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
    stream, tokenizer, prompts: list[list[int]], stop: list[str], timer: GenerationTimer, **options
) -> list[tuple[str, int, str]]:
    """(text, number of tokens, finish) for each prompt."""
    ids = [[] for _ in prompts]
    # Where no token is asked for, none comes.
    finishes = ["length"] * len(prompts)
    stopped = stop_rule(tokenizer, prompts, stop)
    for new_tokens in stream(prompts, stopped=stopped, **options):
        timer.tick(new_tokens)
        for new in new_tokens:
            finishes[new.number] = new.finish
            if new.token is not None:
                ids[new.number].append(new.token)
    texts = [text_of(tokenizer, *pair, stop) for pair in zip(prompts, ids)]
    return list(zip(texts, map(len, ids), finishes))


def as_json(record: dict) -> str:
    """One line of JSON. A character that standard output cannot show is written as \\uXXXX."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return json.dumps(record)
    return line
