"""The engine gives each request the answer of generate.py for its prompt alone: whoever else is in
the batch, with shared prefixes, prompts in chunks, preemptions, cancellations, on each layout."""

import random
from dataclasses import replace

import pytest
import torch
from graphs_on_cpu import TapedFunction
from parity import again
from test_generate import BLOOM, EXPERTS, GEMMA, QWEN3, loud, save
from test_gpt import GPT_SHAPES, LLAMA_SHAPES, build

import generate
from base.groups import Groups
from course import ranks
from finetune import adapter_layers
from finetune.adapter_layers import AdapterConfig
from inference import cli, cuda_graphs, scheduler, weight_layouts
from inference import engine as engine_module
from inference.engine import Engine
from inference.paged_attention import Decodes, PagedCache
from inference.requests import DrawOptions, Request, requests_of
from inference.sampling import SamplingParams, keys_of
from inference.scheduler import BlockPool, Scheduler
from pipeline_parallel import stages_of

CONTEXT = 48
VOCAB = 61
END = 5
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.95),
)
SHAPES = {
    "gpt": GPT_SHAPES[0],
    "llama": LLAMA_SHAPES[1],
    "window": LLAMA_SHAPES[1] | dict(sliding_window=7),
    "windows": LLAMA_SHAPES[1] | dict(sliding_window=7, window_pattern="01"),
    "bloom": BLOOM,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "experts": EXPERTS,
    "one key": LLAMA_SHAPES[1] | dict(num_kv_heads=1),
}
# blocks for some three of the longest: sequences are preempted; and for all
SMALL = dict(max_sequences=6, budget=10, block_size=4, num_blocks=20)
LARGE = dict(max_sequences=16, budget=64, block_size=3)


def make(name: str, **fields):
    shape = SHAPES[name] | dict(num_layers=2, seq_length=CONTEXT, vocab_size=VOCAB) | fields
    return loud(build(torch.float64, **shape)).eval().requires_grad_(False)


def make_requests(count: int, seed: int = 0) -> list[Request]:
    """Prompts of random lengths, many of which begin alike, and some of which are equal."""
    r = random.Random(seed)
    texts = [[r.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
    requests = []
    for n in range(count):
        prompt = r.choice(texts)[: r.randint(1, 24)] + [
            r.randrange(VOCAB) for _ in range(r.randint(0, 4))
        ]
        if n % 5 == 4:
            prompt = requests[-2].prompt
        if n % 5 == 3:
            # equal blocks after others
            prompt = [r.randrange(VOCAB) for _ in range(4)] + texts[0][4:24]
        draw = DrawOptions(r.choice(SAMPLINGS), keys_of([prompt], n)[0])
        requests.append(Request(prompt, r.randint(1, 18), draw, (END,)))
    return requests


def answers_alone(model, requests: list[Request]) -> list[list[int]]:
    """Of generate.py."""
    answers = {}
    for params in {request.draw.sampling for request in requests}:
        numbers = [n for n, request in enumerate(requests) if request.draw.sampling == params]
        of = [requests[n] for n in numbers]
        ids = generate.generate(
            model,
            [request.prompt for request in of],
            max(request.max_tokens for request in of),
            **params._asdict(),
            keys=[request.draw.key for request in of],
            eot=END,
        )
        for n, request, answer in zip(numbers, of, ids):
            answers[n] = answer[: request.max_tokens]
    return [answers[n] for n in range(len(requests))]


def check_blocks(engine: Engine) -> None:
    engine.pool.check([sequence.table for sequence in engine.sequences.values()])


def serve_all(engine: Engine, requests: list[Request], seed: int = 0):
    """Random arrivals and cancellations. Returns (ids, finish) of each request; finish is None
    where it was cancelled."""
    r = random.Random(seed)
    answers = [([], None) for _ in requests]
    place_of, todo = {}, list(range(len(requests)))
    while todo or engine.busy:
        while todo and r.random() < 0.6:
            n = todo.pop(0)
            place_of[engine.add(requests[n])] = n
        if engine.sequences and r.random() < 0.03:
            engine.cancel(r.choice(list(engine.sequences)))
        for output in engine.step():
            ids, _ = answers[place_of[output.number]]
            if output.token is not None:
                ids.append(output.token)
            answers[place_of[output.number]] = ids, output.finish
        check_blocks(engine)
    assert len(engine.pool.free) == len(engine.pool.users) - 1
    return answers


def as_alone(served, expected, requests) -> bool:
    """Whether each answer is the expected one, or as far as it came before it was cancelled."""
    for (ids, finish), alone, request in zip(served, expected, requests):
        if finish is None:
            alone = alone[: len(ids)]
        elif finish != ("length" if len(alone) == request.max_tokens else "end of text"):
            return False
        if ids != alone:
            return False
    return True


def in_both_sizes(names) -> list:
    """Every shape with few blocks, so that requests are preempted; two with enough for all."""
    cases = [pytest.param(name, SMALL, id=f"{name}-small") for name in names]
    for name in names:
        case = pytest.param if name in ("gpt", "llama") else again
        cases.append(case(name, LARGE, id=f"{name}-large"))
    return cases


@pytest.mark.parametrize("name, sizes", in_both_sizes(SHAPES))
def test_each_answer_is_the_one_alone(name, sizes):
    model = make(name)
    requests = make_requests(200 if name == "llama" else 60)
    engine = Engine(model, **sizes)
    served = serve_all(engine, requests)
    scheduler = engine.scheduler
    engine.close()
    assert as_alone(served, answers_alone(model, requests), requests)
    # the run had what it is about
    assert any(finish is None for _, finish in served)
    assert {"end of text", "length"} <= {finish for _, finish in served}
    assert scheduler.found > 100
    if sizes is SMALL and not model.config.sliding_window:
        assert scheduler.preemptions > 0


# --- decodes that are captured ----------------------------------------------------------------


def tape(setattr) -> None:
    """Steps of decodes are captured as on a GPU (graphs_on_cpu.py)."""
    setattr(cuda_graphs, "GraphedFunction", TapedFunction)
    setattr(cuda_graphs, "can_capture", lambda *args: True)


@pytest.mark.parametrize(
    "name, sizes", in_both_sizes(["gpt", "llama", "window", "windows", "bloom"])
)
def test_captured_steps(name, sizes, monkeypatch):
    model = make(name)
    requests = make_requests(60)
    expected = answers_alone(model, requests)
    tape(monkeypatch.setattr)
    engine = Engine(model, **sizes)
    assert as_alone(serve_all(engine, requests), expected, requests)
    shapes = {(rows, columns - 4) for rows, columns in engine.runner.graphs.captured}
    engine.close()
    # sequences of a step, blocks of the longest
    assert {rows for rows, _ in shapes} <= {1, 2, 4, 8, 16}
    assert {blocks for _, blocks in shapes} <= {1, 2, 4, 8, 16}
    assert len(shapes) >= 4


def filled_up_with_block_1(monkeypatch):
    """Rows that fill up a step write where somebody's keys are."""
    original = PagedCache.decodes_table

    def table(self, step):
        rows = original(self, step)
        for row in rows[len(step.pieces) :] if rows else ():
            row[2] = self.size
        return rows

    monkeypatch.setattr(PagedCache, "decodes_table", table)


def tables_of_the_capture(monkeypatch):
    """A graph goes on with the tables that it was captured for."""

    def without_inputs(self, *inputs):
        self.tape.play()
        return self.result.clone()

    monkeypatch.setattr(TapedFunction, "__call__", without_inputs)


@pytest.mark.parametrize("breakage", [filled_up_with_block_1, tables_of_the_capture])
def test_captured_answers_show(breakage, monkeypatch):
    model = make("gpt")
    requests = make_requests(60)
    expected = answers_alone(model, requests)
    tape(monkeypatch.setattr)
    breakage(monkeypatch)
    engine = Engine(model, **LARGE)
    served = serve_all(engine, requests)
    engine.close()
    assert not as_alone(served, expected, requests)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt", "window", "bloom"])
def test_captured_on_a_gpu(name):
    model = make(name)
    requests = make_requests(60)
    expected = answers_alone(model, requests)
    engine = Engine(model.cuda(), **LARGE)
    served = serve_all(engine, requests)
    assert len(engine.runner.graphs.captured) >= 4
    engine.close()
    assert as_alone(served, expected, requests)


# --- layouts --------------------------------------------------------------------------------------


def on_ranks(rank, path, world, layout, sizes, requests):
    layout = dict(layout)
    split = layout.pop("layer_split", None)
    if layout.pop("captured", False):
        tape(setattr)
    groups = Groups.make("cpu", world, **layout)
    model, _ = cli.load_model(path, torch.device("cpu"), torch.float64, groups, split)
    for stage in stages_of(model):
        weight_layouts.apply(stage)
    engine = Engine(model, groups, **sizes)
    if rank:
        return engine.follow()
    served = serve_all(engine, requests)
    # so many tokens of a step do not fit into the first message
    engine.generate([list(range(40))] * 3, 2)
    # with steps in flight, it can be closed
    for request in requests[:6]:
        engine.add(request)
    engine.step()
    engine.close()
    return served, engine.scheduler.preemptions


LAYOUTS = {
    "gpt": [(2, dict(tp=2)), (4, dict(tp=2, pp=2)), (2, dict(pp=2, captured=True))],
    "bloom": [(2, dict(tp=2))],
    "experts": [(2, dict(tp=2))],
    "llama": [(3, dict(pp=3, layer_split=[1, 2, 1]))],
}


@pytest.mark.parametrize(
    "name, world, layout",
    [
        *[(name, *layout) for name, layouts in LAYOUTS.items() for layout in layouts],
        again("one key", 2, dict(tp=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [24, again(200)])
def test_layouts(name, world, layout, count, tmp_path):
    model = make(name, num_layers=sum(layout.get("layer_split", [2])))
    save(tmp_path, model)
    requests = make_requests(count, seed=1)
    results = ranks.run(on_ranks, world, str(tmp_path), world, layout, SMALL, requests)
    served, preemptions = results[0]
    assert as_alone(served, answers_alone(model, requests), requests)
    assert preemptions > 0 or model.config.sliding_window


# --- embeddings -----------------------------------------------------------------------------------


def embedded(engine: Engine, requests: list[Request]) -> list[torch.Tensor]:
    """The embedding of each prompt, while other requests are answered."""
    asked = [replace(r, max_tokens=0, draw=DrawOptions(embeds=True)) for r in requests]
    numbers = []
    for request, other in zip(asked, requests):
        numbers.append(engine.add(request))
        engine.add(other)
    found = {}
    while engine.busy:
        for output in engine.step():
            if output.states is not None:
                assert output.token is None and output.finish == "length"
                found[output.number] = output.states
        check_blocks(engine)
    engine.close()
    return [found[number] for number in numbers]


def directly(model, requests: list[Request]) -> list[torch.Tensor]:
    sums = []
    for request in requests:
        tokens = torch.tensor([request.prompt])
        x = model.run_blocks(model.embedding(tokens), tokens.shape[1])
        sums.append(model.head.norm(x)[0].sum(0))
    return sums


def near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all((a - b).abs().max() < 1e-10 * b.abs().max() for a, b in zip(found, expected))


def embed_on_ranks(rank, path, world, layout, requests):
    groups = Groups.make("cpu", world, **layout)
    model, _ = cli.load_model(path, torch.device("cpu"), torch.float64, groups)
    engine = Engine(model, groups, **SMALL)
    if rank:
        return engine.follow()
    return [states.numpy() for states in embedded(engine, requests)]


def test_embeddings(monkeypatch):
    """In pieces, after preemptions, of prompts that the prefix cache has."""
    model, requests = make("llama"), make_requests(12)
    expected = directly(model, requests)
    engine = Engine(model, **SMALL)
    assert near(embedded(engine, requests), expected) and engine.scheduler.preemptions
    tape(monkeypatch.setattr)
    # of one token: such a step could be a graph, which has no states
    short = [replace(request, prompt=request.prompt[:1]) for request in requests]
    of_short = directly(model, short)
    assert near(embedded(Engine(model, **LARGE), short), of_short)
    monkeypatch.setattr(DrawOptions, "reads_all", False)
    assert not near(embedded(Engine(model, **SMALL), requests), expected)


@pytest.mark.parametrize("layout", [dict(pp=2), again(dict(tp=2))])
def test_embeddings_on_ranks(layout, tmp_path):
    model, requests = make("gpt"), make_requests(6)
    save(tmp_path, model)
    found = ranks.run(embed_on_ranks, 2, str(tmp_path), 2, layout, requests)[0]
    assert near([torch.as_tensor(states) for states in found], directly(model, requests))


# --- what an answer could depend on ---------------------------------------------------------------


def freed_early(monkeypatch):
    """A sequence's first block is free while it runs."""
    original = Scheduler.place

    def place(self, step, sequence, left):
        count = original(self, step, sequence, left)
        if len(sequence.table) > 1 and self.pool.users[sequence.table[0]] == 1:
            self.pool.release(sequence.table[0])
            self.pool.overwrite(sequence.table[0], 0)
            self.pool.users[sequence.table[0]] = 1
        return count

    monkeypatch.setattr(Scheduler, "place", place)
    # and nobody looks
    monkeypatch.setattr(BlockPool, "check", lambda *_: None)


def hash_without_parent(monkeypatch):
    monkeypatch.setattr(scheduler, "hash_of", lambda _, tokens: repr(tokens).encode())


def no_copy_on_write(monkeypatch):
    monkeypatch.setattr(PagedCache, "copy_blocks", lambda self, step: None)


def mask_of_the_next_request(monkeypatch):
    original = Decodes.__init__

    def init(self, *args):
        original(self, *args)
        if self.mask is not None:
            self.mask = self.mask.roll(1, 0)

    monkeypatch.setattr(Decodes, "__init__", init)


def numbers_of_the_place(monkeypatch):
    """Random numbers belong to the place in the batch."""
    original = engine_module.sample

    def sample(logits, keys, positions, params):
        return original(logits, list(range(len(keys))), positions, params)

    monkeypatch.setattr(engine_module, "sample", sample)


def positions_from_the_piece(monkeypatch):
    """A chunk of a prompt begins at position 0."""
    original = PagedCache.begin

    def begin(self, *args):
        tokens = original(self, *args)
        self.positions = torch.zeros_like(self.positions)
        return tokens

    monkeypatch.setattr(PagedCache, "begin", begin)


BREAKAGES = (
    freed_early,
    hash_without_parent,
    no_copy_on_write,
    mask_of_the_next_request,
    numbers_of_the_place,
    positions_from_the_piece,
)


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda f: f.__name__)
def test_the_answers_show(breakage, monkeypatch):
    model = make("gpt")
    requests = make_requests(60)
    expected = answers_alone(model, requests)
    breakage(monkeypatch)
    engine = Engine(model, **SMALL)
    try:
        served = serve_all(engine, requests)
    except (AssertionError, KeyError, StopIteration):
        # the blocks were given away twice
        served = None
    engine.close()
    assert served is None or not as_alone(served, expected, requests)


def outputs_of(engine: Engine, requests: list[Request]) -> list[list]:
    """What the engine gives to each request. Closes it."""
    outputs = {engine.add(request): [] for request in requests}
    while engine.busy:
        for output in engine.step():
            outputs[output.number].append(output)
    engine.close()
    return list(outputs.values())


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_log_probabilities(sizes):
    """Those of the plain model, also of a prompt in chunks, and after a preemption."""
    model = make("llama")
    requests = [
        replace(request, draw=request.draw._replace(log_probs=n % 4, of_prompt=n % 3 == 0))
        for n, request in enumerate(make_requests(30, seed=2))
    ]
    for outputs, request in zip(outputs_of(Engine(model, **sizes), requests), requests):
        told = outputs[0].of_prompt or []
        assert (outputs[0].of_prompt is not None) == request.draw.of_prompt
        assert not any(output.of_prompt for output in outputs[1:])
        drawn = [output.token for output in outputs if output.token is not None]
        drawn += [END] * (outputs[-1].finish == "end of text")
        told = told + [output.log_prob for output in outputs]
        ids = request.prompt + drawn
        log_p = model(torch.tensor([ids]))[0].log_softmax(-1)
        first = len(ids) - len(told)
        assert first == (1 if request.draw.of_prompt else len(request.prompt))
        for at, found in enumerate(told, first):
            assert found.token == ids[at]
            assert abs(found.log_prob - log_p[at - 1, ids[at]]) < 1e-10
            values, tokens = log_p[at - 1].topk(request.draw.log_probs)
            assert [token for token, _ in found.top] == tokens.tolist()
            assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-10)


def test_no_tokens_but_the_prompts_log_probabilities():
    model = make("gpt")
    engine = Engine(model, **SMALL)
    engine.add(Request([3, 4, 9], 0, DrawOptions(log_probs=1, of_prompt=True)))
    [output] = engine.step()
    assert (output.token, output.finish, engine.busy) == (None, "length", False)
    assert [found.token for found in output.of_prompt] == [4, 9]
    engine.close()


# --- beside ---------------------------------------------------------------------------------------


def test_adapters_by_request():
    """Each request has the answer of its adapter: no step mixes two, no prefix is shared."""
    model = make("llama")
    config = AdapterConfig(peft="lora", lora_rank=3)
    adapter_layers.apply(model, config, None)
    model.requires_grad_(False)
    parameters = {n: p for n, p in model.named_parameters() if adapter_layers.is_adapter(n)}
    g = torch.Generator().manual_seed(0)
    values = {
        name: {n: torch.randn(p.shape, generator=g, dtype=p.dtype) for n, p in parameters.items()}
        for name in ("fr", "de")
    }

    def use(name):
        for full_name, p in parameters.items():
            p.copy_(values[name][full_name] if name else torch.zeros_like(p))

    requests = [
        replace(request, adapter=(None, "fr", "de")[n % 3])
        for n, request in enumerate(make_requests(45))
    ]
    expected = [None] * len(requests)
    for name in (None, "fr", "de"):
        use(name)
        numbers = [n for n, request in enumerate(requests) if request.adapter == name]
        for n, ids in zip(numbers, answers_alone(model, [requests[n] for n in numbers])):
            expected[n] = ids
    assert expected[0] != answers_alone(model, requests[:1])[0]
    use(None)
    engine = Engine(model, **SMALL, use_adapter=use)
    served = serve_all(engine, requests)
    engine.close()
    assert as_alone(served, expected, requests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types(dtype):
    """The log-probabilities of the plain model, up to what the type rounds."""
    model = make("llama").to(dtype)
    requests = requests_of([request.prompt for request in make_requests(8)], 6)
    requests = [replace(r, draw=r.draw._replace(log_probs=0)) for r in requests]
    # in bf16 the largest difference was 0.015
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for outputs, request in zip(outputs_of(Engine(model, **LARGE), requests), requests):
        ids = request.prompt + [output.token for output in outputs]
        log_p = model(torch.tensor([ids]))[0].float().log_softmax(-1)
        for at, output in enumerate(outputs, len(request.prompt)):
            expected = log_p[at - 1, output.token].item()
            assert abs(output.log_prob.log_prob - expected) < tolerance


def test_the_model_is_as_before():
    model = make("llama")
    tokens = torch.tensor([[3, 4, 5]])
    before = model(tokens)
    engine = Engine(model, **LARGE)
    engine.generate([[3, 4]], 3)
    engine.close()
    assert torch.equal(model(tokens), before)


@pytest.mark.parametrize(
    "request_, words",
    [
        (Request([1] * 40, 9), "more than the 48 that the model's context holds"),
        (Request([1], 3, adapter="fr"), "adapter fr: this engine has none"),
    ],
)
def test_bad_requests(request_, words):
    engine = Engine(make("gpt"), **LARGE)
    with pytest.raises(ValueError, match=words):
        engine.add(request_)
    assert not engine.busy
    engine.close()


def test_bad_sizes():
    model = make("gpt")
    words = "num_blocks 1099511627776: keys and values take .* would fit"
    with pytest.raises(ValueError, match=words):
        Engine(model, num_blocks=2**40)
    engine = Engine(model, block_size=4, num_blocks=3)
    with pytest.raises(ValueError, match="more than the 8 that the cache holds"):
        engine.add(Request([1] * 6, 3))
    engine.close()


def test_a_window_needs_fewer_blocks():
    """A text as long as the model's context, in a cache that holds a part of it."""
    model = make("window")
    requests = [replace(request, max_tokens=20) for request in make_requests(12)]
    sizes = dict(max_sequences=3, budget=6, block_size=4)
    engine = Engine(model, **sizes, num_blocks=1 + 5 + 3)
    assert engine.longest == CONTEXT > 8 * 4
    served = serve_all(engine, requests)
    engine.close()
    assert as_alone(served, answers_alone(model, requests), requests)


def test_logits_that_are_not_finite():
    model = make("gpt")
    model.head.output.weight.fill_(torch.nan)
    engine = Engine(model, **LARGE)
    engine.add(Request([1], 3))
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.step()
    engine.close()
