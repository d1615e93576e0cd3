"""context_parallel.py: every layout is one device; counted bytes and saved
activations are the formulas; what does not fit is refused."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import processes
import pytest
import small_run
import torch
import torch.distributed as dist
from parity import LLAMA, SMALL, again, check, differs, needs_compiler, same, train, without_cpp
from small_run import lines_of

import context_parallel
import fp8
import moe
from base.model_config import GPTConfig
from course import demo, parity, ranks
from course.training_commands import config_of
from finetune.packing import Example, Padded
from gpt import PLAIN
from planning import counters
from planning.counters import Collectives
from run import rules
from run.config import ConfigError
from run.pretraining import Config

# queries in groups of two; key heads for tensor parallelism times exchanged heads
GROUPED = LLAMA | dict(num_heads=8, num_kv_heads=4, seq_length=32)
LORA = dict(peft="lora", lora_rank=3, lora_dropout=0.2, peft_targets=["key", "value", "up"])
EXPERTS = dict(num_experts=4, router="topk", router_topk=2, micro_batch_size=2)
# weights of the routers' own losses
LOSSES = dict(aux_loss=0.1, z_loss=0.1)
FP8 = dict(fp8="current", fp8_scales="any", fp8_skip=0, micro_batch_size=4)
BLOCK = dict(fp8="block", fp8_block=4)
BASES = {
    "gpt": SMALL,
    "llama": LLAMA | dict(dropout=0.0),
    "grouped": GROUPED | dict(dropout=0.0),
    "packed": GROUPED | dict(dropout=0.0, document_mask=True),
    "packed, dropout": GROUPED | dict(num_kv_heads=1, document_mask=True),
    "lora": SMALL | LORA,
    "experts": SMALL | EXPERTS | LOSSES,
    # A ring of two ranks has blocks that the window cuts, and one that it hides.
    "window": GROUPED
    | dict(model="mistral-7b", dropout=0.0, sliding_window=5, window_pattern="10"),
    "alibi": SMALL | dict(model="bloom-560m", ffn_hidden_size=56, num_heads=8),
    "fp8": GROUPED | FP8 | dict(dropout=0.0),
    # What is a matter of all tokens of a micro-batch: transport plans, and which choices are
    # dropped.
    "sinkhorn": SMALL | EXPERTS | dict(router="sinkhorn", router_topk=1, capacity_factor=0.8),
    "capacity": LLAMA | EXPERTS | LOSSES | dict(capacity_factor=1.0, num_kv_heads=4),
}
KINDS = ("ring", "all-to-all")


def both(*layouts: dict) -> list[dict]:
    return [layout | dict(cp_kind=kind) for layout in layouts for kind in KINDS]


# --- the gate -------------------------------------------------------------------------------------

RECOMPUTED = [dict(cp=2, recompute="selective"), dict(cp=2, recompute="full")]
SHARDED = [dict(cp=2, zero_stage=1, micro_batch_size=2), dict(cp=2, zero_stage=3, recompute="full")]
OVER_TENSORS = [dict(cp=2, tp=2), dict(cp=2, tp=2, sequence_parallel=True, recompute="selective")]
OVER_A_PIPELINE = dict(cp=2, pp=2, schedule="zb-h1", recompute="selective")


HEADS = dict(cp_kind="all-to-all")
SEQUENCE = OVER_TENSORS[1]
WITH_EXPERTS = dict(cp=2, ep=2)


@pytest.mark.parametrize(
    "base, world, variants",
    [
        ("gpt", 2, both(dict(cp=2), RECOMPUTED[0], dict(cp=2, zero_stage=2, micro_batch_size=2))),
        ("gpt", 2, both(dict(cp=2, head_chunk=5))),
        ("llama", 2, both(dict(cp=2), RECOMPUTED[1], SHARDED[0])),
        ("packed", 2, both(dict(cp=2))),
        ("gpt", 4, [*both(dict(cp=4)), SEQUENCE, HEADS | SHARDED[1], HEADS | OVER_A_PIPELINE]),
        ("gpt", 4, [dict(cp=2, pp=2, num_layers=4, virtual_stages=2, micro_batch_size=2)]),
        ("grouped", 4, [dict(cp=4), HEADS | OVER_TENSORS[0]]),
        ("packed", 4, [dict(cp=4), SEQUENCE]),
        ("packed, dropout", 4, [dict(cp=4)]),
        ("lora", 2, both(dict(cp=2))),
        again("lora", 4, [SEQUENCE]),
        ("experts", 2, both(WITH_EXPERTS)),
        again("experts", 4, [dict(cp=2, ep=4)]),
        ("window", 2, [dict(cp=2)]),
        ("alibi", 2, [HEADS | dict(cp=2)]),
        ("fp8", 2, [dict(cp=2, fp8="delayed")]),
        ("sinkhorn", 2, [dict(cp=2)]),
        again("window", 2, [HEADS | dict(cp=2)]),
        again("alibi", 2, [dict(cp=2), dict(cp=2, recompute="selective")]),
        again("fp8", 2, both(dict(cp=2), dict(cp=2) | BLOCK)),
        again("capacity", 2, both(WITH_EXPERTS)),
        again("window", 4, [dict(cp=4), HEADS | SEQUENCE, OVER_A_PIPELINE, HEADS | SHARDED[1]]),
        again("alibi", 4, [*both(dict(cp=4)), *both(SEQUENCE), HEADS | OVER_A_PIPELINE]),
        again("alibi", 4, [SHARDED[1] | dict(document_mask=True, sliding_window=3)]),
        again("fp8", 4, [dict(cp=4), SEQUENCE, HEADS | SEQUENCE | dict(fp8="delayed")]),
        again("fp8", 4, [OVER_A_PIPELINE, SHARDED[1] | BLOCK, SEQUENCE | BLOCK]),
        again("sinkhorn", 4, [*both(dict(cp=4)), SEQUENCE, WITH_EXPERTS | SHARDED[1]]),
        again("capacity", 4, [HEADS | dict(cp=4), SEQUENCE | dict(ep=2), OVER_A_PIPELINE]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_gate(base, world, variants):
    """(More layouts are drawn at random in test_compositions.py.)"""
    check(world, variants, BASES[base])


@needs_compiler
@pytest.mark.repetition
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind):
    one = dict(num_layers=1, steps=1)
    same(train(2, **one, cp=2, cp_kind=kind, compile=True, mutate=without_cpp), train(**one))


# --- the gate can fail ----------------------------------------------------------------------------


def maximum_of_own_tokens():
    fp8.Scaling.of_all_ranks = lambda self, amaxes, operand, group: amaxes


def choices_of_own_tokens():
    forward = moe.Routing.forward

    def alone(self, *args):
        self.gather = None
        return forward(self, *args)

    moe.Routing.forward = alone


def slopes_of_the_first_heads():
    def first(self, group):
        self.slopes = self.slopes.chunk(group.size())[0]

    context_parallel.OwnHeads.shard_heads = first


def window_of_one_less():
    within = context_parallel.Blocks.within_window

    def narrower(self, source, queries, keys):
        queries, keys = within(self, source, queries, keys)
        return queries, slice(keys.start + (source != self.rank), keys.stop)

    context_parallel.Blocks.within_window = narrower


@pytest.mark.parametrize(
    "base, mutate, layout",
    [
        ("fp8", maximum_of_own_tokens, dict()),
        ("sinkhorn", choices_of_own_tokens, dict()),
        again("capacity", choices_of_own_tokens, dict()),
        again("alibi", slopes_of_the_first_heads, HEADS),
        again("window", window_of_one_less, dict()),
    ],
)
def test_gate_sees(base, mutate, layout):
    broken = train(2, 1, mutate, BASES[base], cp=2, **layout)
    differs(broken, train(steps=1, base=BASES[base]))


# --- bytes ----------------------------------------------------------------------------------------


def messages_of_attention(rank: int, world: int, sizes: dict, kind: str) -> list[Counter]:
    """{(kind of message, bytes): how often} of one layer's attention, forward and backward."""
    config = GPTConfig(num_layers=1, hidden_size=32, vocab_size=61, llama=True, **sizes)
    model = demo.meta_model(config)
    context_parallel.apply(model, dist.group.WORLD, kind)
    length, d = config.seq_length // world, config.hidden_size // config.num_heads
    q, k, v = (
        torch.randn(3, heads, length, d, requires_grad=True)
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    )
    with Collectives() as forward:
        y = model.blocks["0"].attention.core(q, k, v, PLAIN)
    with Collectives() as backward:
        y.sum().backward()
    return [Counter(forward.calls), Counter(backward.calls)]


@pytest.mark.parametrize("n, kv", [(2, 4), (4, 8)])
def test_bytes_are_the_formulas(n, kv):
    """As context_parallel.py has them, of a layer, for b = 3 sequences of 4-byte numbers."""
    sizes = dict(num_heads=8, num_kv_heads=kv, seq_length=48)
    b, s, h, k, x = 3, 48, 32, Fraction(kv, 8), 4
    one = 2 * k * b * s * h * x / n
    for forward, backward in ranks.run(messages_of_attention, n, n, sizes, "ring"):
        assert forward == {("send", one): n - 1, ("receive", one): n - 1}
        # keys and values once more, and their gradients; that of its own keys stays
        assert backward == {("send", one): 2 * n - 2, ("receive", one): 2 * n - 2}
    for both_ways in ranks.run(messages_of_attention, n, n, sizes, "all-to-all"):
        for messages in both_ways:
            assert {name for name, _ in messages} == {"all-to-all"} and messages.total() == 4
            # a part of each buffer stays
            sent = sum(size * times for (_, size), times in messages.items()) * Fraction(n - 1, n)
            assert sent == (2 + 2 * k) * (n - 1) * b * s * h * x / Fraction(n * n)


def messages_of_a_step(rank: int, variants: list[dict]) -> list[Counter]:
    """{(kind of message, group, bytes): how often} of each."""
    found = []
    for flags in variants:
        run = parity.Run(2, config_of(SMALL | flags | dict(cp=2, num_layers=1, precision="fp32")))
        with Collectives() as noted:
            run.trainer.forward_backward(1, run.dataset)
        found.append(noted.counted(run.groups))
    return found


def test_messages_of_what_looks_at_all_tokens():
    """Of a layer and two micro-batches. FP8: a maximum of 4 bytes for each input (of q, k and v, of
    the output, up, down) and for each gradient, where q, k and v go together. Experts, which have
    scales of rows: the logits of 8 tokens of 4 sequences for 4 experts."""
    plain, in_fp8, experts, balanced = ranks.run(
        messages_of_a_step,
        2,
        [dict(micro_batch_size=4), FP8, EXPERTS | FP8, BASES["sinkhorn"] | FP8],
    )[0]
    four = Counter({("all-reduce", "cp", 4): 2 * (4 + 3), ("all-reduce", "cp", 12): 2})
    assert in_fp8 - plain == four and plain - in_fp8 == Counter()
    assert balanced - experts == Counter({("all-gather", "cp", 4 * 8 * 4 * 4): 2})


def kept_of_forward(rank: int, world: int, flags: dict) -> int:
    """Bytes that autograd keeps of one sequence, without parameters."""
    run = parity.Run(world, config_of(flags))
    (stage,) = run.trainer.stages
    batch = run.trainer.own_tokens(run.dataset.batch([0]))
    return counters.saved_bytes(lambda: stage(batch.tokens, batch.targets), *stage.parameters())


LONG = dict(num_layers=1, seq_length=8192, dropout=0.0, precision="fp32", global_batch_size=1)


@pytest.mark.parametrize("base", [SMALL, again(LLAMA | dict(num_kv_heads=4))], ids=["gpt", "llama"])
def test_memory_of_activations_is_a_quarter(base):
    """Of 8,192 tokens on four ranks, plus buffers, within 2%."""
    flags = base | LONG
    s, h = flags["seq_length"], flags["hidden_size"]
    (one,) = ranks.run(kept_of_forward, 1, 1, flags)
    of_ring = ranks.run(kept_of_forward, 4, 4, flags | dict(cp=4))
    # of all-to-all: attention's result twice, as it is for heads and for tokens; int64 orders, from
    # tokens by rank to tokens by position and back
    buffers = s * h * 4 / 4 + 2 * s * 8
    of_heads = ranks.run(kept_of_forward, 4, 4, flags | dict(cp=4, cp_kind="all-to-all"))
    for kept in of_ring:
        assert kept == pytest.approx(one / 4, rel=0.02)
    for kept in of_heads:
        assert kept == pytest.approx(one / 4 + buffers, rel=0.02)


# --- lengths and refusals -------------------------------------------------------------------------

OF_FOUR = HEADS | dict(cp=4)
TWICE = "divisible by twice --cp 4: the sequence is cut into so many pieces"
FEW_KEYS = dict(model="llama2-7b", num_heads=8, num_kv_heads=2)


@pytest.mark.parametrize(
    "flags, world, words",
    [
        (dict(cp=2), 1, "--cp 2: this is one rank alone"),
        (dict(cp=3), 4, "--cp 3: must divide the 4 ranks over --tp 1 --pp 1; [1, 2, 4] would fit"),
        (dict(cp=0), 2, "--cp 0: must be at least 1"),
        (dict(cp=4, seq_length=100), 4, f"--seq-length 100: must be {TWICE}; 96 or 104 would fit"),
        (SEQUENCE | dict(seq_length=12), 4, "--seq-length 12 must be divisible by 8"),
        (
            OF_FOUR | dict(num_heads=6, hidden_size=48),
            4,
            "--cp 4: must divide --num-heads 6 over --tp 1 where heads are exchanged"
            " (--cp-kind all-to-all); [2, 3, 6] would fit",
        ),
        (OF_FOUR | FEW_KEYS, 4, "--cp 4: must divide --num-kv-heads 2 over --tp 1"),
        (dict(cp_kind="all-to-all"), 2, "--cp-kind all-to-all: needs --cp 2 or more"),
        (
            dict(cp=2, fp8="block", seq_length=1000),
            2,
            "--seq-length 1000: must be divisible by twice --cp 2 times --fp8-block 128: a block of"
            " tokens is on one rank; 512 would fit",
        ),
        (dict(command="preference.py", cp=2, data=["pairs.jsonl"]), 2, "--cp 2: a loss"),
        (dict(cp=2, global_batch_size=3), 4, "--global-batch-size 3: must be divisible by the 2"),
    ],
    ids=str,
)
def test_refused(flags, world, words):
    """In one line, before any process group."""
    with pytest.raises(ConfigError) as refused:
        rules.validate(config_of(flags), world, base_needed=False)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("cp, tp", [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_rows_are_padded_to_what_can_be_cut(cp, tp):
    """Conversations of odd lengths: targets and counts stay, each rank has as many tokens."""
    config = Config(cp=cp, tp=tp, sequence_parallel=tp > 1)
    assert config.length_multiple == {(1, 1): 1, (2, 1): 4, (4, 1): 8, (2, 2): 8}[cp, tp]
    examples = [Example(list(range(1, n)), [True] * (n - 1)) for n in (6, 11, 15)]
    rows, cut = (Padded(examples, None, m) for m in (1, config.length_multiple))
    batch, padded = rows.batch([0, 1, 2]), cut.batch([0, 1, 2])
    length = batch.tokens.shape[1]
    assert padded.tokens.shape[1] == -(-length // config.length_multiple) * config.length_multiple
    assert torch.equal(padded.targets[:, :length], batch.targets)
    assert not padded.loss_mask[:, length:].any()
    assert cut.counted_tokens([0, 1, 2]) == rows.counted_tokens([0, 1, 2])


# --- runs -----------------------------------------------------------------------------------------

RUN = dict(
    num_layers=2,
    global_batch_size=4,
    steps=6,
    eval_every=3,
    save_every=3,
    dropout=0.1,
    precision="fp64",
)


def metrics(folder: str, name: str) -> list[float]:
    return [line[name] for line in lines_of(folder) if name in line]


def start(out: str, world: int, *more, **options) -> None:
    flags = small_run.flags(**RUN | dict(data="text.txt", out=out) | options)
    done = processes.run(["train.py", *flags, *more], world=world)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(Path(small_run.__file__).read_text() * 8)


def test_a_run_is_that_of_one_rank(here):
    """Metrics, evaluation, a sample; then its checkpoint goes on under other layouts."""
    start("two", 2, cp=2)
    assert len(Path("two/sample.txt").read_text()) > 4
    start("one", 1, steps=8)
    for name in ("loss", "grad_norm", "eval_loss"):
        of_one, of_two = metrics("one", name), metrics("two", name)
        assert of_two[:6] == pytest.approx(of_one[: len(of_two)], rel=1e-10), name
    # two more steps of the same run, by one rank
    start("two", 1, "--resume", cp=1, steps=8)
    assert metrics("two", "loss") == pytest.approx(metrics("one", "loss"), rel=1e-10)
