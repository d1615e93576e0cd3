"""Requests of mixed lengths: the engine of inference/ beside Hugging Face transformers, in static
batches and with its continuous batching, and beside generate.py; the same weights, in turn.

    python -m benchmarks.serving_speed [--threads 2] [--rounds 3] [--together 1 8 32] [--toy]
    python -m benchmarks.gpu serve           GPT-2 124M, with CUDA graphs, without, with cuDNN

Greedy, float32 on CPUs, bf16 on a GPU. Lengths of prompts and answers are log-normal, with a median
of 64 tokens and at most 512. `together` requests are open at a time: when one ends, the next one
comes. A static batch begins with as many, and all wait for the longest. Measured are tokens/s of
answers, seconds to the first token and between tokens (median, 95th percentile), and the waste: the
share of the cache's room that holds no token of an open request.

Figure: docs/figures/serving_speed.svg
"""

import atexit
import copy
import dataclasses
import functools
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

import generate
from base import cpu
from benchmarks import report, style
from benchmarks.generation import CASES as MODELS
from benchmarks.generation import SMALL, TINY, build, laid_out, memory_speed
from benchmarks.report import median
from benchmarks.steps import profile
from inference.engine import Engine
from inference.requests import requests_of
from planning.inputs import H100
from planning.serving import ENGINES, Serving

# Tokens of a prompt, and of an answer.
MEDIAN, SIGMA, LONGEST = 64, 0.9, 512
LARGE = dict(hidden_size=768, num_heads=12, head_dim=64, num_kv_heads=12, ffn_hidden_size=3072)
CASES = {"h 256": SMALL, "h 768": dataclasses.replace(SMALL, **LARGE)}
TOY = {"toy": dataclasses.replace(TINY, seq_length=32)}
# Tokens of a step, for both.
BUDGET = 512
BLOCK = 16
# On a GPU: requests open at a time, and who answers beside the engine.
TOGETHER = 32
OTHERS = "transformers, static", "transformers, continuous", "generate.py"


class Asked(NamedTuple):
    """One request."""

    prompt: list[int]
    tokens: int


@dataclass
class Measured:
    """What one contender did."""

    # {request: when it came}, {request: when each of its tokens came}
    came: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[float]] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    # The share of each step.
    waste: list[float] = field(default_factory=list)

    def numbers(self) -> dict:
        times = self.tokens.values()
        first = [self.tokens[n][0] - came for n, came in self.came.items()]
        between = [b - a for of in times for a, b in itertools.pairwise(of)]
        seconds = max(of[-1] for of in times) - min(self.came.values())
        found = {"tokens_per_second": sum(map(len, times)) / seconds}
        for name, values in (("first_token", first), ("between_tokens", between)):
            values.sort()
            found[name] = {"median": median(values), "p95": values[int(0.95 * (len(values) - 1))]}
        found["waste"] = sum(self.waste) / len(self.waste) if self.waste else None
        return found


def make_requests(together: int, config, turn: int = 0) -> list[Asked]:
    """turn: has other tokens, so that no prefix cache has them, and the same lengths."""
    r, tokens = random.Random(together), random.Random(turn)
    most = min(LONGEST, config.seq_length // 2)

    def length() -> int:
        return max(4, min(most, round(r.lognormvariate(0, SIGMA) * min(MEDIAN, most // 2))))

    return [
        Asked([tokens.randrange(config.vocab_size) for _ in range(length())], length())
        for _ in range(max(16, 2 * together))
    ]


# --- contenders: each answers all requests, `together` at a time ----------------------------------


def by_engine(engine: Engine, asked: list[Asked], together: int) -> Measured:
    measured = Measured()
    waiting = list(range(len(asked)))[::-1]
    number_of = {}
    while waiting or engine.busy:
        while waiting and len(engine.sequences) < together:
            n = waiting.pop()
            measured.came[n] = time.perf_counter()
            measured.tokens[n], measured.ids[n] = [], []
            [request] = requests_of([asked[n].prompt], asked[n].tokens, temperature=0)
            number_of[engine.add(request)] = n
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            measured.tokens[number_of[output.number]].append(now)
            measured.ids[number_of[output.number]].append(output.token)
        room = BLOCK * sum(users > 0 for users in engine.pool.users)
        if room:
            filled = sum(sequence.computed for sequence in engine.scheduler.running)
            measured.waste.append(1 - filled / room)
    return measured


def in_batches(run: Callable, asked: list[Asked], together: int) -> Measured:
    """Static batches. run(prompts, tokens, ticks) -> ids appends the time to ticks after a step."""
    measured = Measured()
    for start in range(0, len(asked), together):
        batch = asked[start : start + together]
        came = time.perf_counter()
        ticks: list[float] = []
        longest = max(request.tokens for request in batch)
        prompts = [request.prompt for request in batch]
        ids = run(prompts, longest, ticks)
        columns = max(map(len, prompts))
        for n, request in enumerate(batch, start):
            measured.came[n] = came
            measured.tokens[n] = ticks[: request.tokens]
            measured.ids[n] = ids[n - start][: request.tokens]
        for step in range(1, longest):
            filled = sum(len(request.prompt) + step for request in batch if request.tokens > step)
            measured.waste.append(1 - filled / (len(batch) * (columns + step)))
    return measured


def ours_in_batches(model, asked: list[Asked], together: int) -> Measured:
    """By generate.py, which goes on without the finished ones once they are half of a batch."""

    def run(prompts, longest, ticks):
        ids = [[] for _ in prompts]
        tokens_of = {id(request.prompt): request.tokens for request in asked}

        def stopped(number: int, generated: list[int]) -> bool:
            return len(generated) == tokens_of[id(prompts[number])]

        for new in generate.stream(model, prompts, longest, temperature=0, stopped=stopped):
            ticks.append(time.perf_counter())
            for token in new:
                ids[token.number].append(token.token)
        return ids

    measured = in_batches(run, asked, together)
    measured.waste.clear()
    return measured


def theirs_in_batches(theirs, asked: list[Asked], together: int) -> Measured:
    def run(prompts, longest, ticks):
        columns = max(map(len, prompts))
        # Padded at the left.
        new = functools.partial(torch.tensor, device=theirs.device)
        ids = new([[0] * (columns - len(p)) + p for p in prompts])
        mask = new([[0] * (columns - len(p)) + [1] * len(p) for p in prompts])

        def after_step(ids, scores, **_):
            report.synchronize()
            ticks.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        options = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
        options |= dict(max_new_tokens=longest, stopping_criteria=[after_step])
        return theirs.generate(ids, attention_mask=mask, **options)[:, columns:].tolist()

    return in_batches(run, asked, together)


def theirs_continuous(theirs, asked: list[Asked], together: int) -> Measured:
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    page = 32
    config = ContinuousBatchingConfig(
        num_blocks=together * -(-theirs.config.max_position_embeddings // page),
        # page_size, as later versions call it
        block_size=page,
        max_batch_tokens=BUDGET,
        max_requests_per_batch=together,
    )
    measured = Measured()
    manager = theirs.init_continuous_batching(greedy, continuous_batching_config=config)
    manager.start()
    waiting, number_of = list(range(len(asked)))[::-1], {}

    def ask() -> None:
        n = waiting.pop()
        measured.came[n] = time.perf_counter()
        options = dict(max_new_tokens=asked[n].tokens, record_timestamps=True)
        number_of[manager.add_request(asked[n].prompt, **options)] = n

    for _ in range(min(together, len(asked))):
        ask()
    for _ in asked:
        result = manager.get_result(timeout=600)
        n = number_of[result.request_id]
        measured.tokens[n] = list(result.timestamps)
        measured.ids[n] = list(result.generated_tokens)
        if waiting:
            ask()
    manager.stop(block=True)
    return measured


# --- one model ------------------------------------------------------------------------------------


def contenders(model, theirs, together: int, config) -> tuple[Engine, dict]:
    """(the engine, {name: what answers requests, so many at a time})."""
    batch_model = laid_out(model, together)
    # Room for twice as many of the longest, at least for four.
    num_blocks = 1 + 2 * max(2, together) * config.seq_length // BLOCK
    sizes = dict(budget=BUDGET, block_size=BLOCK, num_blocks=num_blocks)
    engine = Engine(copy.deepcopy(batch_model), **sizes)
    return engine, {
        "engine": partial(by_engine, engine),
        "generate.py": partial(ours_in_batches, batch_model),
        "transformers, static": partial(theirs_in_batches, theirs),
        "transformers, continuous": partial(theirs_continuous, theirs),
    }


def measure(name: str, config, args) -> dict:
    model, theirs = build(config, "cpu")
    results = {}
    table = report.Table()
    for together in args.together:
        engine, answering = contenders(model, theirs, together, config)
        rounds = []
        for turn in range(args.rounds + 1):
            asked = make_requests(together, config, turn)
            rounds.append({kind: run(asked, together) for kind, run in answering.items()})
        engine.close()
        # The first one warms up.
        found = summary([{k: m.numbers() for k, m in of.items()} for of in rounds[1:]])
        alike = [
            sum(rounds[0]["engine"].ids[n] == m.ids[n] for n in m.ids) for m in rounds[0].values()
        ]
        found["same_answers"] = dict(zip(answering, alike)) | {"requests": len(asked)}
        results[together] = found
        for kind in answering:
            table.row({"model": name, "together": together, "by": kind} | found[kind])
    return results


# --- on a GPU, of gpu.py --------------------------------------------------------------------------


def cases_of(stage: str, args) -> dict:
    """{name: a function that measures it}"""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = TOY["toy"] if args.toy else MODELS["gpt2-124m"]
    together = 4 if args.toy else TOGETHER

    @functools.cache
    def made() -> tuple[Engine, dict]:
        engine, answering = contenders(*build(config, device), together, config)
        atexit.register(engine.close)
        return engine, answering

    def answer(kind: str, *turns: int) -> dict:
        run = made()[1][kind]
        found = [run(make_requests(together, config, n), together).numbers() for n in turns]
        last = found[-1]
        return {
            "tokens/s": last["tokens_per_second"],
            "ms to the first token": 1e3 * last["first_token"]["median"],
            "ms between tokens": 1e3 * last["between_tokens"]["median"],
            "tokens/s at first": found[0]["tokens_per_second"],
            "all": found,
        }

    def no_graphs(turn: int = 2) -> dict:
        with mock.patch.object(made()[0].runner, "captures", False):
            return answer("engine", turn)

    def with_cudnn() -> dict:
        # Nobody turns it off (base/attention_kernels.py).
        with mock.patch.object(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None):
            return no_graphs(3)

    def profiled() -> dict:
        asked = make_requests(together, config)[:8]
        return profile(lambda: made()[1]["engine"](asked, len(asked)))

    found = {"engine": partial(answer, "engine", 0, 1), "engine, no graphs": no_graphs}
    found["profile, 8 requests"] = profiled
    found |= {kind: partial(answer, kind, 4) for kind in OTHERS}
    return found | {"engine, no graphs, cuDNN": with_cudnn}


def predicted(stage: str, args) -> dict[str, str]:
    """Steps of 32 sequences on an H100, each in the middle of its answer, predicted by
    planning/serving.py: with CUDA graphs, and without."""
    found = []
    for engine in ("graphs", "eager"):
        on = Serving(H100, ENGINES[engine], MODELS["gpt2-124m"])
        found.append(f"{TOGETHER / on.step(TOGETHER, 1.5 * MEDIAN):,.0f}")
    return {"engine": f"{found[0]} tokens/s", "engine, no graphs": f"{found[1]} tokens/s"}


def summary(rounds: list[dict]) -> dict:
    """Medians over rounds of each contender's numbers, and of the engine's tokens/s over its own in
    the same round."""
    found = {}
    speeds = [{kind: x["tokens_per_second"] for kind, x in of.items()} for of in rounds]
    for kind in rounds[0]:
        numbers = {}
        for key, value in rounds[0][kind].items():
            if isinstance(value, dict):
                for part in value:
                    numbers[f"{key}_{part}"] = median([of[kind][key][part] for of in rounds])
            else:
                numbers[key] = value and median([of[kind][key] for of in rounds])
        numbers["engine_is_faster_by"] = report.ratio(speeds, "engine", kind)
        found[kind] = numbers
    return found


def draw(results: dict, figures: Path) -> None:
    """results: what serving_speed.json holds."""
    cases = results["results"]
    figure, panels = style.figure(3.2, 1, len(cases))
    for axes, (name, of_model) in zip(panels if len(cases) > 1 else [panels], cases.items()):
        together = [int(n) for n in of_model]
        kinds = [kind for kind in next(iter(of_model.values())) if kind != "same_answers"]
        for kind, colour in zip(kinds, (*style.SERIES, "#332288")):
            speeds = [found[kind]["tokens_per_second"] for found in of_model.values()]
            axes.plot(together, speeds, "o-", color=colour, label=kind)
        axes.set(title=f"{name}: tokens/s", xlabel="requests at a time")
        style.ticks(axes, x=together)
        axes.set_ylim(0, None)
        style.label_ends(axes)
    style.save(figure, figures / "serving_speed.svg")


def main():
    parser = report.arguments(__doc__, threads=2, rounds=3, together=[1, 8, 32])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    args = report.parse(parser, threads=1, rounds=1, together=[1, 2], cases=["toy"])
    torch.set_num_threads(args.threads)
    # All contenders have this setting.
    cpu.keep_freed_memory()
    results = {name: measure(name, (CASES | TOY)[name], args) for name in args.cases}
    # What planning/serving.py asks about a machine.
    speeds = {
        "flops_per_second": report.matmul_flops(torch.float32, "cpu", 256 if args.toy else 2048),
        "memory_bytes_per_second": memory_speed((CASES | TOY)[args.cases[-1]], "cpu"),
    }
    report.finish("serving_speed", {"results": results, "machine": speeds}, args, draw)


if __name__ == "__main__":
    main()
