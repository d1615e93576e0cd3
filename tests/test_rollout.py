"""Rollout: under every layout the answers of one device, with the log-probabilities that a training
step gives."""

import contextlib
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import again

import gpt
import sequence_parallel
import train
from base.groups import Groups
from course import parity, ranks
from course.training_commands import config_of
from finetune import adapter_layers, answer_rows
from finetune.answer_rows import Answer, Rows
from inference import rollout
from run.task import Task

BASE = parity.SMALL | dict(num_layers=4, seq_length=24, dropout=0.0, micro_batch_size=2, lr=1e-2)
EXPERTS = dict(num_experts=4, expert_every=2)
MODELS = {
    "gpt": BASE,
    "llama": BASE | dict(model="llama2-7b", num_kv_heads=2, ffn_hidden_size=56),
    "topk": BASE | EXPERTS | dict(router="topk", router_topk=2, capacity_factor=0.5),
    "sinkhorn": BASE | EXPERTS,
    "lora": BASE | dict(peft="lora", lora_rank=4),
}
MAX_TOKENS = 9
# so many that some answers end early, and some do not
END_TOKENS = (3, 5, 17, 29, 40, 58)
SEED = 7


def prompts_of(samples) -> list[list[int]]:
    """Random prompts of 1 to 7 tokens."""
    prompts = []
    for sample in samples:
        g = torch.Generator().manual_seed(sample)
        length = 1 + sample * 5 % 7
        prompts.append(torch.randint(61, (length,), generator=g).tolist())
    return prompts


class Watched(Task):
    """A task that keeps the log-probabilities of its training forwards."""

    def total_loss(self, y, batch):
        self.seen |= dict(zip(batch.samples.tolist(), -y.detach()))
        return super().total_loss(y, batch)


def loud(self, name, shape, generator, original=gpt.GPT.init_parameter):
    """Matrices so large that each token depends on what the one before attends to."""
    return original(self, name, shape, generator) * (6 if len(shape) > 1 else 1)


@mock.patch.object(gpt.GPT, "init_parameter", loud)
@mock.patch.object(adapter_layers, "OUTPUT_STD", 0.02)
def make_trainer(world: int, flags: dict) -> Watched:
    config = config_of(flags)
    groups = Groups()
    if world > 1:
        groups = Groups.make("cpu", world, **config.mesh)
    task = Watched(config.task().learned)
    task.seen = {}
    trainer = train.Trainer(config, torch.device("cpu"), groups, task)
    # routers take raw logits
    for stage in trainer.stages:
        stage.eval()
    return trainer


def write(trainer, samples, step: int = 1, end_tokens=END_TOKENS, **options) -> list[Answer]:
    groups, config = trainer.groups, trainer.config
    if config.zero_stage == 3 or config.ep > 1:
        options["lockstep"] = groups.dp
    drawn = (prompts_of(samples), list(samples), SEED, step, MAX_TOKENS, end_tokens)
    return rollout.write_answers(trainer.model, *drawn, groups, **options)


def of_all_ranks(value) -> list:
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def train_on(trainer, rows: Rows, step: int) -> list[torch.Tensor]:
    """A training step on the rows. Returns each answer's log-probabilities in its forwards."""
    trainer.task.seen.clear()
    trainer.forward_backward(step, rows)
    trainer.update(step)
    trainer.task.wait_for_parameters()
    seen = {}
    for of_rank in of_all_ranks({n: row.numpy() for n, row in trainer.task.seen.items()}):
        seen |= of_rank
    samples = trainer.task.samples(step)
    return rows.collect(torch.stack([torch.tensor(seen[n]) for n in samples]))


def state(trainer) -> dict:
    """The modules of the stages, and whether they are training."""
    return {
        (number, name): (id(module), module.training)
        for number, stage in enumerate(trainer.stages)
        for name, module in stage.named_modules()
    }


def loop(rank: int, world: int, variants: list[dict], mutate=None) -> list:
    """For each layout: (answers, their log-probabilities in a training forward) of two steps."""
    if mutate:
        mutate()
    results = []
    for flags in variants:
        trainer = make_trainer(world, flags)
        before = state(trainer)
        result = []
        # with one sample there are data-parallel ranks without any
        for step, samples in ((1, range(100, 107)), (2, [3])):
            answers = write(trainer, samples, step)
            assert state(trainer) == before
            rows = Rows(answers, 24, multiple_of=flags["global_batch_size"])
            assert rows.num_sequences == flags["global_batch_size"]
            said = [of_answer.tolist() for of_answer in train_on(trainer, rows, step)]
            result.append((answers, said))
        assert all(other == result for other in of_all_ranks(result))
        results.append(result)
    return results


def apart(a: list, b: list) -> float:
    """The largest difference of two ragged lists, over the largest number of the second."""
    worst = largest = 0.0
    for x, y in zip(a, b, strict=True):
        for p, q in zip(x, y, strict=True):
            worst = max(worst, abs(p - q))
            largest = max(largest, abs(q))
    return worst / largest


def log_probs(answers: list[Answer]) -> list[list[float]]:
    return [answer.log_probs for answer in answers]


def texts(answers: list[Answer]) -> list[tuple]:
    return [(answer.sample, answer.prompt, answer.ids, answer.ended) for answer in answers]


# --- under every layout ---------------------------------------------------------------------------

# (test_reinforcement.py trains on answers of more models)
LAYOUTS = {
    "gpt": [dict(tp=2), dict(pp=2, virtual_stages=2, micro_batch_size=1), dict(zero_stage=3)],
    "llama": [dict(tp=2, sequence_parallel=True), dict(pp=2, schedule="zb-h1")],
    "sinkhorn": [dict(ep=2, zero_stage=3)],
}
LAYOUTS_OF_4 = [
    (4, "topk", [dict(pp=2, ep=2, zero_stage=3)]),
    again(4, "topk", [dict(tp=2, ep=2)]),
    again(4, "gpt", [LAYOUTS["llama"][0] | LAYOUTS["llama"][1] | dict(recompute="full")]),
]


def compare(world: int, model: str, layouts: list[dict], mutate=None) -> float:
    """The largest difference of a log-probability: of the rollout from the training forward, and of
    both from one device. The texts must be equal."""
    base = MODELS[model]
    (one,) = loop(0, 1, [base])
    variants = [base | layout for layout in layouts]
    worst = 0.0
    for result in [one, *ranks.run(loop, world, world, variants, mutate)[0]]:
        for (answers, said), (expected, _) in zip(result, one):
            assert texts(answers) == texts(expected)
            worst = max(worst, apart(log_probs(answers), said))
            worst = max(worst, apart(log_probs(answers), log_probs(expected)))
    return worst


@pytest.mark.parametrize(
    "world, model, layouts",
    [*((2, *case) for case in LAYOUTS.items()), *LAYOUTS_OF_4],
    ids=lambda x: None if isinstance(x, list) else str(x),
)
def test_every_layout(world, model, layouts):
    """Two steps: rollout, training on the answers, update. The second rollout has the updated
    weights, and ranks without samples."""
    assert compare(world, model, layouts) < 1e-10


# --- one device -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_device():
    """{model: trainer}, with its initial weights."""
    return {name: make_trainer(1, flags) for name, flags in MODELS.items()}


def by_definition(trainer, answer: Answer) -> list[float]:
    """The log-probability of each token of an answer that is alone in a row."""
    ids = torch.tensor(answer.prompt + answer.ids)
    with torch.no_grad():
        logits = trainer.model(ids[:-1].unsqueeze(0))[0]  # [n - 1, V]
    log_p = logits.log_softmax(-1).gather(1, ids[1:].unsqueeze(1)).squeeze(1)
    return log_p[len(answer.prompt) - 1 :].tolist()


@pytest.mark.parametrize("model", MODELS)
def test_definition(model, one_device):
    """Each token's log-probability after the tokens before it: of the rollout, with a cache and
    without, and of a forward over packed rows."""
    trainer = one_device[model]
    samples = range(20, 32)
    answers = write(trainer, samples)
    expected = [by_definition(trainer, answer) for answer in answers]
    assert apart(log_probs(answers), expected) < 1e-13
    uncached = write(trainer, samples, cached=False)
    assert texts(uncached) == texts(answers)
    assert apart(log_probs(uncached), expected) < 1e-13
    rows = Rows(answers, 24)
    batch = rows.batch(range(rows.num_sequences))
    # more than one in a row
    assert rows.num_sequences < 8
    with torch.no_grad():
        context = gpt.Context(documents=batch.documents)
        losses = trainer.model(batch.tokens, batch.targets, context)
    assert apart([x.tolist() for x in rows.collect(-losses)], expected) < 1e-13


def test_random_numbers(one_device):
    """An answer depends on (seed, step, sample): not on the order, nor on what is beside it."""
    trainer = one_device["gpt"]
    answers = write(trainer, range(10))
    assert texts(write(trainer, [9, 3, 0])) == texts([answers[n] for n in (0, 3, 9)])
    assert texts(write(trainer, range(10), step=2)) != texts(answers)
    same_prompt = [1, 2, 3]

    def draw(seed, step, sample):
        return rollout.write_answers(
            trainer.model, [same_prompt], [sample], seed, step, 20, (), trainer.groups
        )[0].ids

    drawn = [draw(7, 1, 0), draw(8, 1, 0), draw(7, 2, 0), draw(7, 1, 1), draw(1, 7, 0)]
    assert draw(7, 1, 0) == drawn[0]
    assert len(set(map(tuple, drawn))) == len(drawn)
    keys = [rollout.keys(seed, step, range(20)) for seed in range(20) for step in range(20)]
    assert len({key for some in keys for key in some}) == 8000
    assert all(-(2**31) <= key < 2**31 for some in keys for key in some)


def test_ends(one_device):
    """At the end token, which belongs to the answer, also as the first one; or at the limit."""
    trainer = one_device["gpt"]
    samples = list(range(40, 48))
    whole = write(trainer, samples, end_tokens=())
    assert [len(answer.ids) for answer in whole] == [MAX_TOKENS] * len(samples)
    assert not any(answer.ended for answer in whole)
    # the first token of one answer, the last one of another
    ends = (whole[2].ids[0], whole[5].ids[-1])
    lengths = []
    for answer, until in zip(whole, write(trainer, samples, end_tokens=ends), strict=True):
        at = [n for n, token in enumerate(answer.ids) if token in ends]
        length = at[0] + 1 if at else MAX_TOKENS
        lengths.append(length)
        expected = answer.ids[:length], answer.log_probs[:length], bool(at)
        assert (until.ids, until.ended) == (expected[0], expected[2])
        assert apart([until.log_probs], [expected[1]]) < 1e-13
    assert lengths[2] == 1 and MAX_TOKENS in lengths
    assert rollout.write_answers(trainer.model, [], [], 0, 1, 4, (), trainer.groups) == []


# --- rows -----------------------------------------------------------------------------------------


def test_rows_by_hand():
    """The picture of the module, with a second row, and filled up to four."""
    answers = [
        Answer(0, [10, 11], [20, 21, 22], [-1.0, -2.0, -3.0], True),
        Answer(1, [12, 13, 14], [23], [-4.0], True),
        Answer(2, [15], [24, 25], [-5.0, -6.0], False),
    ]
    rows = Rows(answers, 9, multiple_of=4)
    batch = rows.batch(range(4))
    assert batch.tokens[:2].tolist() == [
        [10, 11, 20, 21, 22, 12, 13, 14, 23],
        [15, 24, 25] + 6 * [0],
    ]
    assert batch.targets[:2].tolist() == [[11, 20, 21, 22, 0, 13, 14, 23, 0], [24, 25] + 7 * [0]]
    assert batch.loss_mask[:2].int().tolist() == [[0, 1, 1, 1, 0, 0, 0, 1, 0], [1, 1] + 7 * [0]]
    assert batch.documents[:2].tolist() == [[0] * 5 + [1] * 4, [0] * 3 + [1] * 6]
    assert not batch.loss_mask[2:].any() and not batch.tokens[2:].any()
    assert rows.places == [(0, 1, 3), (0, 7, 1), (1, 0, 2)]
    assert [place.last for place in rows.places] == [4, 8, 2]
    assert [rows.counted_tokens([n]) for n in range(4)] == [4, 2, 0, 0]
    matrix = rows.spread([answer.log_probs for answer in answers])
    assert matrix.shape == (4, 9) and matrix.dtype == torch.float64
    assert matrix[0].tolist() == [0, -1, -2, -3, 0, 0, 0, -4, 0]
    assert [x.tolist() for x in rows.collect(matrix)] == log_probs(answers)
    # sample 5 is row 1 again
    second = rows.batch([5, 0])
    assert second.tokens.tolist() == batch.tokens[[1, 0]].tolist()
    assert second.samples.tolist() == [5, 0]


def test_wrong_arguments(one_device):
    answer = Answer(0, [1], [2, 3], [-1.0, -1.0], True)
    with pytest.raises(ValueError, match="1 values for answer 0, which has 2 tokens"):
        Rows([answer], 4).spread([[1.0]])
    with pytest.raises(ValueError, match="no answers"):
        Rows([], 4)
    with pytest.raises(ValueError, match="length 3 of number 0: must be from 1 to 2"):
        Rows([answer], 2)
    trainer = one_device["gpt"]
    for prompts, samples, most, words in (
        ([[1] * 20], [4], 5, "prompt of sample 4 has 20 tokens, and an answer may have 5: .* 24"),
        ([[1]], [4], 0, "max_tokens 0: must be at least 1"),
        ([[1]], [4, 5], 5, "2 samples for 1 prompts"),
        ([[1], [1]], [4, 4], 5, "no two alike"),
        ([[61]], [4], 5, "has token 61, and the model knows 0 to 60"),
        ([[]], [4], 5, "prompt 0 is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            rollout.write_answers(trainer.model, prompts, samples, 0, 1, most, (), trainer.groups)


def diverged_on_rank_0(rank: int) -> str:
    trainer = make_trainer(2, BASE)
    if rank == 0:
        with torch.no_grad():
            trainer.model.head.norm.weight.fill_(torch.nan)
    try:
        write(trainer, range(4))
    except FloatingPointError as e:
        return str(e)
    return ""


def test_all_ranks_learn_that_one_has_diverged():
    assert ranks.run(diverged_on_rank_0, 2) == ["the model's logits are not finite"] * 2


# --- mutations ------------------------------------------------------------------------------------


def next_position():
    """The log-probabilities of an answer are off by one position."""
    original = rollout.tokens_of

    def shifted(*args):
        return [(ids, log_p[1:] + log_p[:1]) for ids, log_p in original(*args)]

    return mock.patch.object(rollout, "tokens_of", shifted)


def next_column():
    """What is about a token stands at its own position, not at the one before."""
    place = answer_rows.AnswerPlace

    def shifted(row, column, length):
        return place(row, column + 1, length)

    return mock.patch.object(answer_rows, "AnswerPlace", shifted)


def no_end_token():
    """An answer ends before its end token."""
    original = rollout.tokens_of

    def cut(*args):
        drawn = original(*args)
        return [
            (i[:-1], p[:-1]) if i[-1] in END_TOKENS and len(i) > 1 else (i, p) for i, p in drawn
        ]

    return mock.patch.object(rollout, "tokens_of", cut)


def no_document_mask():
    """An answer sees those that stand before it in the row."""
    original = Rows.batch
    return mock.patch.object(
        Rows, "batch", lambda self, samples: original(self, samples)._replace(documents=None)
    )


def keys_without(seed=1, step=1, sample=1):
    """What has a factor of 0 is left out of the keys."""
    original = rollout.key_of
    return mock.patch.object(
        rollout, "key_of", lambda *x: original(x[0] * seed, x[1] * step, x[2] * sample)
    )


def place_in_the_batch():
    """Random numbers depend on an answer's place in the batch, not on the sample."""
    original = rollout.keys
    return mock.patch.object(
        rollout, "keys", lambda seed, step, samples: original(seed, step, range(len(samples)))
    )


MUTATIONS = [
    (next_position, test_definition),
    (next_column, test_definition),
    (no_document_mask, test_definition),
    (no_end_token, test_ends),
    (partial(keys_without, seed=0), test_random_numbers),
    (partial(keys_without, step=0), test_random_numbers),
    (partial(keys_without, sample=0), test_random_numbers),
    (place_in_the_batch, test_random_numbers),
]


@pytest.mark.parametrize("mutation, test", MUTATIONS)
def test_the_tests_see(mutation, test, one_device):
    arguments = ("gpt", one_device) if test is test_definition else (one_device,)
    with mutation(), pytest.raises((AssertionError, ValueError)):
        test(*arguments)


def new_modules(models, group):
    """After a rollout the sequence is sharded again by modules that are new."""

    @contextlib.contextmanager
    def context():
        for model in models:
            sequence_parallel.shard_sequence(model, group, sharded=False)
        yield
        for model in models:
            sequence_parallel.shard_sequence(model, group)

    return context()


def set_new_modules():
    sequence_parallel.whole_sequences = new_modules


def place_in_the_share():
    """Each data-parallel rank numbers its own answers."""
    place_in_the_batch().start()


@pytest.mark.parametrize(
    "layout, mutate, words",
    [
        (dict(tp=2, sequence_parallel=True), set_new_modules, "state"),
        (dict(zero_stage=1), place_in_the_share, r"At index 0 diff: \(100"),
    ],
)
def test_the_layouts_see(layout, mutate, words):
    with pytest.raises((AssertionError, RuntimeError), match=words):
        compare(2, "gpt", [layout], mutate)
