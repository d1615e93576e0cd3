"""planner.py: predictions beside published times that were not fitted, what each ingredient is
worth, and the commands.

planning/memory.py is tested in test_planning_counts.py.
"""

import dataclasses
import importlib
import json
import random
import re
import shlex
from collections import defaultdict
from pathlib import Path

import pytest
import torch.distributed.run
from parity import again

import planner
import schedules
from base.model_config import MoEConfig
from course import planner as lesson
from models.runs import BertRun, T5Run
from planning import budget, commands, errors
from planning import plan as plan_of
from planning import rows as published
from planning.inputs import A100, H100, H200, SOFTWARE, TRAIN, Layout
from planning.layouts import layouts
from planning.memory import memory
from planning.rows import Row
from run import flags, rules
from run.config import RunConfig
from run.presets import PRESETS
from run.pretraining import Config

# the configurations of commands that the planner prints
PROGRAMS = {"train.py": Config, "models.bert": BertRun, "models.t5": T5Run}
ROWS = published.read(published.PUBLISHED)
FITTED, HELD_OUT = errors.split(ROWS)
comparison = importlib.import_module("benchmarks.planner")


def seconds(row: Row) -> float:
    return sum(planner.step_time(row.machine, row.software, row.model, row.layout).values())


def preset(name: str) -> MoEConfig:
    return MoEConfig(**PRESETS[name][0])


# --- beside published times -----------------------------------------------------------------------


def test_constants_are_those_of_six_rows():
    assert len(FITTED) == len(errors.FITTED) == 6
    assert len(ROWS) == 78 and len(HELD_OUT) == 72
    # none of table 5 is fitted
    assert sum(row.group == "table5" for row in HELD_OUT) == 8
    fitted = dataclasses.asdict(errors.calibrate(A100, FITTED).constants)
    # three digits stand in planning/inputs.py
    assert dataclasses.asdict(A100.constants) == pytest.approx(fitted, rel=5e-3)


def test_each_ingredient_is_worth_something():
    """Without it, and with constants fitted again, the rows held out are farther off."""
    found = comparison.ablations(ROWS)
    whole = found.pop("")
    assert found.keys() == lesson.WITHOUT.keys()
    # what waits for the slowest stage has stages
    piped = [row for row in HELD_OUT if row.layout.pp > 1]
    with_it = errors.summary(errors.calibrate(A100, FITTED), piped)
    with lesson.WITHOUT["slow-stage"].mutate():
        without_it = errors.summary(errors.calibrate(A100, FITTED), piped)
    assert without_it.mean > 1.1 * with_it.mean and found.pop("slow-stage").mean > whole.mean
    for name, without in found.items():
        assert without.mean > 1.1 * whole.mean, name
    # and all are there again
    assert comparison.fitted_again(ROWS) == whole


def test_single_parameters_wait_and_have_one_adapter():
    """ZeRO-3 of a model that is no larger but deeper takes longer, by the waits of its layers'
    parameters; a group with one rank on each node has an adapter for each."""
    (row,) = [row for row in ROWS if row.name == "Z3 96 768"]
    _, reduce, _ = planner.gathers_and_sums(planner.Rank(A100, row.software, row.model, row.layout))
    # 12 parameters in each of 96 layers; 2 bytes each over one adapter
    elements = planner.learned(row.model, row.layout, row.software)[0]
    alone = A100.network_bandwidth * A100.constants.node
    assert alone == A100.network_link == A100.link(8, 8) < A100.link(16, 4) == 2 * 25e9 * 0.529
    waits = 12 * 96 * A100.constants.zero3
    assert reduce == pytest.approx(waits + 2 * elements * 767 / 768 / alone)


def test_other_choices_of_six_rows_do_as_well():
    means = sorted(found.mean for found in comparison.random_choices(ROWS))
    assert means[len(means) // 2] <= 0.04


def test_the_best_layout_of_each_sweep():
    """Of rows that differ in one choice the fastest is named, in all sweeps but one."""
    sweeps = defaultdict(list)
    for row in ROWS:
        if row.group in ("fig12", "fig13", "fig15", "fig16"):
            sweeps[row.group, row.layout.global_batch_size].append(row)
    right = [
        min(rows, key=seconds) == min(rows, key=lambda row: row.seconds) for rows in sweeps.values()
    ]
    assert len(right) == 11 and sum(right) >= 10


@pytest.mark.parametrize("name", ["22B sel+sp", "175B sel+sp"])
def test_a_published_layout_is_near_the_best(name):
    (row,) = [row for row in ROWS if (row.group, row.name) == ("table5", name)]
    batch = row.layout.global_batch_size
    best = planner.search(row.machine, row.software, row.model, row.layout.ranks, batch)[0]
    assert best.seconds <= seconds(row) <= 1.07 * best.seconds


# --- what holds for every layout ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, ranks, batch",
    [("gpt3-20b", 64, 96), ("mixtral-8x7b", 32, 64), ("llama2-13b", 48, 144)],
)
def test_a_better_machine_is_never_slower(name, ranks, batch):
    """And no part of a step is negative."""
    model = preset(name)
    fields = ("peak", "memory_bandwidth", "node_bandwidth", "network_bandwidth")
    better = {f: dataclasses.replace(A100, **{f: 2 * getattr(A100, f)}) for f in fields}
    faster = dict.fromkeys(fields, 0)
    for layout in random.Random(0).sample(list(layouts(model, TRAIN, ranks, batch)), 300):
        parts = planner.step_time(A100, TRAIN, model, layout)
        assert min(parts.values()) >= 0 and parts["matmul"] > 0, (layout, parts)
        now = sum(parts.values())
        for field, machine in better.items():
            then = sum(planner.step_time(machine, TRAIN, model, layout).values())
            assert then <= now * (1 + 1e-12), (field, layout)
            faster[field] += then < now
    assert min(faster.values()) > 0


@pytest.mark.parametrize("p, m", [(2, 2), (4, 9), (8, 64)])
def test_the_bubble_is_that_of_the_simulated_schedule(p, m):
    """The slowest stage is the last one, which has the head."""
    layout = Layout(tp=4, pp=p, micro_batch_size=1, global_batch_size=m, recompute="full")
    row = Row("", preset("gpt3-175b"), layout, SOFTWARE["megatron-2021"], A100)
    parts = planner.step_time(A100, row.software, row.model, layout)
    pipelined = sum(parts[name] for name in (*planner.Pass._fields, "head", "bubble"))
    assert pipelined == pytest.approx(lesson.simulated(A100, row), rel=1e-9)
    with lesson.WITHOUT["slow-stage"].mutate():
        spread = planner.step_time(A100, row.software, row.model, layout)
    assert spread["head"] < parts["head"]


@pytest.mark.parametrize("v", [2, 3])
def test_the_bubble_of_an_interleaved_schedule(v):
    """All stages alike, a large micro-batch: the time that the simulated rank 0 waits."""
    p, m = 4, 8
    layout = Layout(pp=p, virtual_stages=v, global_batch_size=m, recompute="full")
    model = preset("gpt3-175b")
    step = A100, SOFTWARE["megatron-2021"], model, layout
    parts = planner.step_time(*step)
    forward, backward, _ = planner.layer(planner.Rank(*step))
    layers = model.num_layers / (p * v)
    cost = schedules.Cost(layers * sum(forward), layers * sum(backward), 0.0)
    events = schedules.simulate(schedules.make("interleaved", p, m, v), cost)
    ideal = m * v * layers * (sum(forward) + sum(backward))
    assert parts["bubble"] == pytest.approx(schedules.bubble(events) * ideal, rel=1e-6)


def test_search_returns_what_fits_the_fastest_first():
    plans = planner.search(A100, TRAIN, preset("gpt3-20b"), 16, 64)
    times = [plan.seconds for plan in plans]
    assert times == sorted(times) and len(plans) > 20
    assert max(sum(plan.bytes.values()) for plan in plans) <= A100.memory
    smaller = dataclasses.replace(A100, memory=A100.memory / 2)
    of_smaller = planner.search(smaller, TRAIN, preset("gpt3-20b"), 16, 64)
    # what fits less recomputes more
    plain = dict(recompute="none", recompute_layers=None, head_chunk=0)
    few, all_ = (
        {dataclasses.replace(plan.layout, **plain) for plan in found}
        for found in (of_smaller, plans)
    )
    assert few < all_
    assert of_smaller[0].seconds >= plans[0].seconds


@pytest.mark.parametrize("name", ["bert-large", "t5-v1.1-xl"])
def test_layouts_of_encoders(name):
    """The trainer accepts each, with the batch and the memory of a small machine."""
    config_class = BertRun if name == "bert-large" else T5Run
    changed = dict(model=name, seq_length=128)
    if config_class is T5Run:
        changed |= dict(target_length=32)
    model = config_class(**changed).model_config()
    machine = dataclasses.replace(A100, memory=6 * 2**30)
    plans = planner.search(machine, TRAIN, model, 16, 64)
    for plan in random.Random(0).sample(plans, min(60, len(plans))):
        layout = vars(plan.layout) | changed
        config = config_class(
            **{f: layout[f] for f in layout.keys() & flags.names_of(config_class)}
        )
        rules.validate(config, 16)
        assert min(plan.parts.values()) >= 0


# --- the commands ---------------------------------------------------------------------------------


def run(argv: str, capsys) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)"""
    try:
        status = commands.main(shlex.split(argv))
    except SystemExit as e:
        status = e.code
    return status, *capsys.readouterr()


def command_of(name: str, layout: Layout) -> str:
    words = ["train.py", "--model", name, *layout.flags()]
    return commands.wrapped([*commands.launcher(layout.ranks, 8), *words])


def parse(command: str) -> tuple[RunConfig, int]:
    """What train.py, or a command of models/, makes of a command: its configuration, and how many
    ranks there are."""
    program, *words = shlex.split(command.replace("\\\n", " "))
    ranks = 1
    if program == "torchrun":
        args = torch.distributed.run.get_args_parser().parse_args(words)
        # one node: "1:1"
        ranks = int(args.nnodes.split(":")[0]) * int(args.nproc_per_node)
        words = [args.training_script, *args.training_script_args]
    config_class = PROGRAMS[words[0]]
    return config_class(**vars(flags.make_parser(0, config_class).parse_args(words[1:]))), ranks


@pytest.mark.parametrize(
    "name, gpus, batch",
    [
        ("tiny", 1, 16),
        ("gpt2", 8, 48),
        ("tiny-moe", 4, 16),
        ("gpt3-20b", 24, 96),
        # searches of thousands of layouts
        again("llama2-70b", 32, 64),
        again("megatron-530b", 560, 280),
        again("mixtral-8x7b", 16, 32),
        again("gpt3-175b", 128, 64),
    ],
)
def test_train_accepts_every_command(name, gpus, batch):
    """Of the best layout and of some others, for its number of ranks."""
    plans = planner.search(H200, TRAIN, preset(name), gpus, batch)
    chosen = plans[:3] + random.Random(0).sample(plans, min(15, len(plans)))
    for plan in chosen:
        command = command_of(name, plan.layout)
        assert max(map(len, command.split("\n"))) <= 98
        config, ranks = parse(command)
        assert ranks == gpus == plan.layout.ranks
        rules.validate(config, ranks)
        assert config.global_batch_size == batch
        dp = ranks // config.tp // config.pp // config.cp
        for field in dataclasses.fields(Layout):
            if field.name != "dp":
                wanted = getattr(plan.layout, field.name)
                assert getattr(config, field.name) == wanted, field.name
        assert config.micro_batch(dp) == plan.layout.micro_batch_size


def test_optimizer_state_in_16_bits(capsys):
    """A 70B fits eight H200s; each rank's state is half, and its update takes less; the printed
    command has the flag, and the refusal without it names it."""
    words = "--model llama2-70b --gpus 8 --gpu h200 --batch 64".split()
    assert commands.main(["plan", *words]) == 2
    assert "; --optimizer-state bf16 or 16 GPUs would hold it" in capsys.readouterr().err
    assert commands.main(["plan", *words, "--optimizer-state", "bf16"]) == 0
    out = capsys.readouterr().out
    best = next(part for part in out.split("\n\n") if part.startswith("torchrun"))
    assert "--model llama2-70b --optimizer-state bf16 --tp" in best
    config, ranks = parse(best)
    parts = {}
    for name in ("fp32", "bf16"):
        config = dataclasses.replace(config, optimizer_state=name, plan="h200")
        layout = plan_of.layout_of(config, ranks)
        held = memory(config.model_config(), layout, plan_of.software_of(config))
        parts[name] = held["optimizer"], plan_of.predict(config, ranks)["optimizer"]
    assert parts["bf16"][0] == parts["fp32"][0] / 2
    assert parts["bf16"][1] == pytest.approx(parts["fp32"][1] * 44 / 58)


def test_what_does_not_fit_recomputes_as_few_layers_as_do(capsys):
    """One layer fewer does not fit, and all of them take longer."""
    small = dataclasses.replace(H200, memory=66 * 2**30)
    model = preset("llama2-70b")
    plans = planner.search(small, TRAIN, model, 32, 128)
    found = [plan for plan in plans if (plan.layout.recompute_layers or 0) > 1]
    best = next(plan for plan in found if plan.layout.pp == 1)
    n = best.layout.recompute_layers
    assert n < model.num_layers
    room = planner.USABLE * small.memory
    sizes = {}
    for layers in (n - 1, n, None):
        layout = dataclasses.replace(best.layout, recompute_layers=layers)
        sizes[layers] = sum(memory(model, layout, TRAIN).values())
    assert sizes[None] < sizes[n] <= room < sizes[n - 1]
    everywhere = dataclasses.replace(best.layout, recompute_layers=None)
    whole = planner.step_time(small, TRAIN, model, everywhere)
    # forward once more in the other layers
    assert best.parts["matmul"] < whole["matmul"] and best.parts["head"] == whole["head"]
    none = dataclasses.replace(best.layout, recompute="none")
    least = planner.step_time(small, TRAIN, model, none)["matmul"]
    share = (best.parts["matmul"] - least) / (whole["matmul"] - least)
    assert share == pytest.approx(n / model.num_layers)
    assert f"--recompute-layers {n}" in command_of("llama2-70b", best.layout)


def test_a_pipeline_waits_for_the_rank_that_recomputes_most():
    model = preset("llama2-70b")
    layout = Layout(tp=8, pp=4, global_batch_size=16, recompute="full")
    seconds = []
    # of 20 layers on each rank: all on the first one, on two, on all
    for layers in (20, 40, 80):
        given = dataclasses.replace(layout, recompute_layers=layers)
        seconds.append(planner.step_time(H100, TRAIN, model, given))
    assert seconds[0]["matmul"] == seconds[1]["matmul"] == seconds[2]["matmul"]
    # while the others fill and drain
    assert seconds[0]["bubble"] < seconds[1]["bubble"] < seconds[2]["bubble"]
    assert seconds[2] == planner.step_time(H100, TRAIN, model, layout)


def test_the_logits_of_a_large_vocabulary_come_in_chunks():
    model = dataclasses.replace(preset("gemma-2b"), seq_length=32768)
    plans = planner.search(H100, TRAIN, model, 8, 8)
    chunked = [plan for plan in plans if plan.layout.head_chunk]
    assert chunked and len(chunked) < len(plans)
    for plan in chunked[:5]:
        whole = dataclasses.replace(plan.layout, head_chunk=0)
        assert sum(memory(model, whole, TRAIN).values()) > planner.USABLE * H100.memory
        assert planner.step_time(H100, TRAIN, model, whole)["head"] < plan.parts["head"]


PUBLISHED_FP8 = [
    # tokens/s of each GPU (NeMo): model, machine, layout, GPUs, batch
    ("llama2-7b", H200, {}, 8, 128, 16913, 0.01),
    ("llama2-13b", H200, {}, 8, 128, 9432, 0.02),
    ("gpt3-5b", H100, dict(micro_batch_size=4), 64, 2048, 23406, 0.03),
    ("llama2-7b", H100, {}, 8, 128, 16934, 0.09),
]


@pytest.mark.parametrize("name, machine, fields, gpus, batch, published, most", PUBLISHED_FP8)
def test_published_speeds_in_fp8(name, machine, fields, gpus, batch, published, most):
    """The first row is fitted, the others are held out."""
    model = dataclasses.replace(preset(name), dropout=0.0, attention="fused")
    software = dataclasses.replace(TRAIN, fp8="delayed")
    layout = Layout(dp=gpus, global_batch_size=batch, zero_stage=1, **fields)
    seconds = sum(planner.step_time(machine, software, model, layout).values())
    assert batch * model.seq_length / seconds / gpus == pytest.approx(published, rel=most)


def test_lora_and_fp8_in_the_plan(capsys):
    """LoRA: the command trains adapters of a model that is there."""
    line = "plan --model llama2-70b --gpus 8 --gpu h200 --batch 128 --tokens 1e9 --lora-rank 16"
    status, out, err = run(line, capsys)
    assert (status, err) == (0, "")
    command = out[out.index("torchrun") : out.index("\n\nWhere")]
    assert "-m finetune.adapters --load BASE --lora-rank 16 " in command
    assert "--lr 0.0002" in command and "--tokenizer" not in command
    assert "--model" not in command
    fp8 = "plan --model llama2-7b --gpus 8 --batch 128 --fp8 delayed --gpu h200"
    status, out, _ = run(fp8, capsys)
    assert status == 0 and "train.py --model llama2-7b --fp8 delayed" in out


def test_long_sequences_are_spread_over_ranks():
    """Of short ones no layout has cp; of long ones train.py accepts each."""
    assert all(layout.cp == 1 for layout in layouts(preset("llama2-13b"), TRAIN, 64, 32))
    model = dataclasses.replace(preset("llama2-13b"), seq_length=16384, num_kv_heads=8)
    found = [x for x in layouts(model, TRAIN, 16, 16) if x.cp > 1]
    assert {x.cp_kind for x in found} == {"ring", "all-to-all"}
    for layout in random.Random(0).sample(found, 200):
        published.check(model, layout)


def test_days_and_mfu_are_those_of_the_best_layout():
    model = preset("gpt3-175b")
    layout = Layout(tp=8, pp=8, dp=16, micro_batch_size=1, global_batch_size=1536)
    rate, mfu = commands.speed(A100, TRAIN, model, layout, 20)
    # 1,536 sequences of 2,048 tokens every 20 s: 157,286 tokens/s
    assert rate == pytest.approx(157_286.4)
    plan = planner.Plan(layout, {"matmul": 20.0}, defaultdict(float))
    heading, line = commands.table([plan], A100, TRAIN, model, 300e9).splitlines()
    days = line.split()[heading.split().index("days")]
    assert float(days) == pytest.approx(300e9 / 157_286.4 / 86400, rel=5e-3)
    # 72 B L s h² (1 + s/6h + V/12hL), arXiv 2205.05198, equation 7
    B, L, s, h, V = 1536, 96, 2048, 12288, 50257
    flops = 72 * B * L * s * h * h * (1 + s / (6 * h) + V / (12 * h * L))
    assert mfu == pytest.approx(flops / 20 / (1024 * 312e12), rel=1e-3)


def test_the_second_layout_loses_for_a_reason():
    first = planner.Plan(Layout(tp=8, pp=2), {"matmul": 8.0, "bubble": 1.0, "head": 0.5}, {})
    second = planner.Plan(Layout(tp=8, pp=4), {"matmul": 8.0, "bubble": 3.0, "head": 0.49}, {})
    assert commands.why_it_loses(first, second) == (
        "The second has pp 4 instead of 2; it takes 1.990 s (20.9%) longer: bubble +2.000 s."
    )


def test_the_table_has_every_byte():
    best = planner.search(A100, TRAIN, preset("gpt3-20b"), 16, 64)[0]
    shown = [part for _, parts in commands.PARTS.values() for part in parts]
    assert sorted(shown) == sorted(best.bytes)


def test_a_larger_budget_trains_a_larger_model():
    found = budget.size_for(H100, TRAIN, 8, days=2)
    assert found.days <= 2
    assert budget.size_for(H100, TRAIN, 8, days=8).parameters > 1.5 * found.parameters


def test_predict(capsys):
    """The file itself: one object a row, and nothing else on standard output."""
    status, out, err = run(f"predict {published.PUBLISHED}", capsys)
    assert (status, err) == (0, "")
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["name"] for answer in answers] == [row.name for row in ROWS]
    for answer, row in zip(answers, ROWS):
        assert set(answer) == {"name", "seconds", "bytes"}
        assert answer["seconds"] == pytest.approx(seconds(row))
        assert 2**30 < answer["bytes"] < 2**40 and isinstance(answer["bytes"], int)


GOOD = dict(name="one", software="megatron-2022", machine="a100")
GOOD["model"] = dict(num_layers=4, hidden_size=64, num_heads=4)
GOOD["layout"] = dict(tp=2, global_batch_size=4)


@pytest.mark.parametrize(
    "change, words",
    [
        ("", "not JSON"),
        ("[1]", "Expected `object`"),
        ("{}", "no rows"),
        (dict(tp=3), "rows[1] one: --tp 3: must divide --num-heads 4"),
        (dict(tp=0), "--tp 0: must be at least 1"),
        (dict(dp=0), "dp 0: must be at least 1"),
        (dict(pp=8), "--num-layers 4: must be divisible by --pp 8"),
        (dict(dp=3), "--global-batch-size 4: must be divisible by the 3"),
        (dict(micro_batch_size=3), "--micro-batch-size 3: must divide"),
        (dict(recompute="all"), "--recompute all: must be one of"),
        (dict(tp="two"), "Expected `int`"),
        (dict(zero_stage=3, dp=2), "zero_stage 3: megatron-2022 has 0, 1"),
        (dict(pp=2, schedule="zb-h1"), "pipeline_schedule zb-h1: megatron-2022 has 1f1b, inter"),
        (dict(model={"num_heads": 5}), "rows[1] one: model: "),
        (dict(model={"heads": 5}), "rows[1] one: model: "),
        (dict(machine="v100"), "machine 'v100': not known; there are a100, h100, h200"),
        (dict(software="jax"), "software 'jax': not known"),
    ],
)
def test_bad_rows(change, words, tmp_path, capsys):
    """A row that is good, then one with a change, of its layout or of one of its fields."""
    path = tmp_path / "rows.json"
    if isinstance(change, dict):
        row = GOOD | (
            change if change.keys() & GOOD.keys() else {"layout": GOOD["layout"] | change}
        )
        change = json.dumps({"rows": [GOOD, row]})
    path.write_text(change)
    status, out, err = run(f"predict {path}", capsys)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"planner.py: {path}: ") and words in err


def test_stages_that_do_not_divide_the_layers(tmp_path, capsys):
    """BLOOM's 70 layers on 12 stages: ten have 6, and the last one, with the head, has 5. Rows need
    no published seconds."""
    model = {"hidden_size": 14336, "num_heads": 112, "seq_length": 2048}
    layout = {"tp": 4, "pp": 12, "dp": 8, "micro_batch_size": 2, "global_batch_size": 2048}
    path = tmp_path / "rows.json"
    rows = [GOOD | dict(model=model | {"num_layers": n}, layout=layout) for n in (70, 72)]
    path.write_text(json.dumps({"rows": rows}))
    status, out, _ = run(f"predict {path}", capsys)
    bloom, even = map(json.loads, out.splitlines())
    assert status == 0
    assert 0.95 * even["seconds"] < bloom["seconds"] < even["seconds"]
    assert 0.98 * even["bytes"] < bloom["bytes"] <= even["bytes"]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_said_to_fit_fits(seed):
    """Of GPUs and batches that do not divide, and of machines with little memory."""
    g = random.Random(seed)
    model = MoEConfig(g.choice([2, 3, 5, 7]), 96, g.choice([2, 3]), seq_length=64, vocab_size=257)
    gpus, batch = g.choice([1, 2, 3, 5, 6, 7, 12]), g.randint(1, 7)
    nbytes = memory(model, Layout(), TRAIN)
    machine = dataclasses.replace(A100, memory=sum(nbytes.values()) * g.choice([0.3, 0.7, 2]))

    def refusal(gpus: int, batch: int) -> str:
        try:
            planner.search(machine, TRAIN, model, gpus, batch)
        except planner.PlanError as e:
            return str(e)
        return ""

    said = refusal(gpus, batch)
    larger = r"; ([\d,]+) GPUs(?: with --batch (\d+))? would hold"
    for more, their_batch in re.findall(larger, said):
        more = int(more.replace(",", ""))
        assert not refusal(more, int(their_batch or batch)), said
    for words in re.findall(r"; (--.*) would fit", said):
        for flag, number in re.findall(r"--(batch|gpus) (\d+)", words):
            other = {"gpus": gpus, "batch": batch} | {flag: int(number)}
            assert not refusal(**other), said


PLAN = "plan --model gpt3-20b --gpus 64 --batch 64"
SMALL = "plan --model gpt2 --batch 7"
LLAMA = "--model llama2-7b --gpu h100"


@pytest.mark.parametrize(
    "argv, words",
    [
        ("guess", "guess: no such command; there are plan, size, predict, try, measure"),
        ("plan --gpus 8 --batch 8", "--model: which one?"),
        ("plan --model gpt5 --gpus 8 --batch 8", "--model gpt5: no such preset; near are gpt"),
        (
            "plan --model t5-3b --gpus 8 --lora-rank 4",
            "--lora-rank 4: is not planned of -m models.t5",
        ),
        ("plan --model bert-base --gpus 8 --norm rmsnorm", "--norm rmsnorm: is not planned"),
        (
            f"{PLAN} --gpu v100",
            "--gpu v100: not known; a100, h100, h200 would fit, or --machine FILE",
        ),
        (f"{PLAN} --gpus 0", "--gpus 0: must be from 1 to 1,048,576"),
        (f"{PLAN} --gpus many", "--gpus many: must be a whole number"),
        (f"{PLAN} --gpus 12", "--gpus 12: nodes have 8, and each is used whole; 8 or 16 would fit"),
        (f"{PLAN} --batch 3000000", "--batch 3000000: must be from 1 to"),
        (f"{PLAN} --tokens 0", "--tokens 0: must be above 0 and finite"),
        (f"{PLAN} --top 0", "--top 0: must be from 1 to 1,048,576"),
        (f"{PLAN} --num-heads 7", "--num-heads 7: must divide --hidden-size 6144"),
        (f"{PLAN} --machine no.json", "no.json: cannot be read"),
        (f"{PLAN} --gpu a100 --machine x", "--gpu a100: --machine x says which"),
        ("plan --model gpt3-175b --gpus 8 --batch 64", "--gpus 8 --batch 64: every layout of 8"),
        (f"{SMALL} --gpus 1024", "--gpus 1024 --batch 7: no layout of 1,024"),
        (f"{SMALL} --gpus 2 --num-heads 3 --num-layers 3", "--batch 8 or --gpus 1"),
        (f"{SMALL} --gpus 5", "(uneven stages do: train.py --pp 5 --layer"),
        (f"{PLAN} --z-loss 0.3", "--z-loss 0.3: this model has no experts"),
        ("size --gpus 64 --days inf", "--days inf: must be above 0 and finite"),
        ("size --gpus 8 --days 1e-9", "--gpus 8 --days 1e-09: "),
        ("size --gpus 8", "one of the arguments --days --flops is required"),
        ("predict no.json", "no.json: cannot be read"),
        ("predict", "the following arguments are required: FILE.json"),
        (
            "plan --model llama2-7b --gpus 8 --fp8 delayed",
            "--fp8 delayed: a100 has no FP8; h100 or",
        ),
        (f"ppo {LLAMA} --gpus 7", "--gpus 7: two halves of whole nodes are needed; 6 or 8 would"),
        (f"ppo {LLAMA} --gpus 24", "--gpus 24: two halves of whole nodes are needed; 16 or 32"),
        (f"ppo {LLAMA} --gpus 8 --answers 100", "--answers 100: must be a multiple of --batch 64;"),
        ("ppo --model gpt2-xl --gpus 8", "has 1024 learned positions; fewer would fit"),
        (f"ppo {LLAMA} --gpus 64 --memory 3", "GPUs"),
        ("ppo --model llama2-70b --gpus 8 --gpu h100", "of which half of h100 has 38 for tensors"),
        ("ppo --model llama3 --gpus 8", "--model llama3: no such preset"),
        ("serve --model gpt4", "--model gpt4: no such preset"),
        ("serve --model gpt3-175b --gpus 4", "--gpus 4: every layout takes at least 82 GiB on"),
        ("serve --model llama2-70b --latency 10ms", "--latency 10ms: the soonest layout takes lon"),
        ("serve --model llama2-7b --latency soon", "--latency soon: must be a number"),
        ("serve --model llama2-7b --latency 0s", "must be above 0"),
        ("serve --model gpt2 --output 2000", "--output 2000: with --input 200 they are 2200"),
        ("serve --model llama2-7b --weights fp8", "--weights fp8: a100 has no FP8; h100 or h200"),
        ("serve --model llama2-7b --gpus 12", "--gpus 12: nodes have 8"),
        ("serve --model llama2-7b --weights int2", "--weights invalid choice: 'int2'"),
        ("serve", "--model"),
    ],
)
def test_refusals(argv, words, capsys):
    status, out, err = run(argv, capsys)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("planner.py: ") and words in err, err


def test_a_machine_from_a_file(tmp_path, capsys):
    machine = dataclasses.asdict(dataclasses.replace(A100, name="mine", memory=2 * A100.memory))
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine))
    status, out, _ = run(f"{PLAN} --machine {path}", capsys)
    assert status == 0 and "64 x mine, 160 GiB each" in out
    slow = machine["constants"] | {"matmul": 0}
    few = {name: share for name, share in machine["constants"].items() if name != "fp8"}
    for content, words in (
        ({}, "missing required field `name`"),
        (machine | {"peak": 0}, "machine.json: peak 0"),
        (machine | {"memory": 0}, "machine.json: memory 0"),
        (machine | {"ranks_per_node": 0}, "machine.json: ranks_per_node 0"),
        (machine | {"constants": slow}, "constants: matmul 0"),
        (machine | {"constants": slow | {"matmul": 50}}, "matmul 50: is a share of 1"),
        (machine | {"constants": slow | {"hiden": 0.5}}, "constants: hiden: no such field"),
        (machine | {"speed": 1}, "machine.json: speed: no such field"),
        (machine | {"has_fp8": True, "constants": few}, "fp8: has_fp8 needs the share"),
    ):
        path.write_text(json.dumps(content))
        status, out, err = run(f"{PLAN} --machine {path}", capsys)
        assert (status, out) == (2, "") and words in err


# --- what the documents say -----------------------------------------------------------------------

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "planning.md").read_text()
# (command, what it prints)
SHOWN = re.findall(
    r"^```\n(python planner.py [^\n]*)\n```\n\n```text\n(.*?)\n```$", DOCUMENT, re.M | re.S
)


@pytest.mark.parametrize(
    "command, printed",
    # the largest searches take seconds
    [again(*s) if re.search("65536|--gpus 1024", s[0]) else s for s in SHOWN],
    ids=lambda text: text[:60],
)
def test_the_document_shows_what_a_command_prints(command, printed, capsys):
    status, out, err = run(command.removeprefix("python planner.py "), capsys)
    assert (out or err).rstrip("\n") == printed
    if err:
        assert status == 2
        return
    if " ppo " in command or " serve " in command:
        return
    # its last lines are a command that train.py accepts
    launch = next(part for part in out.split("\n\n") if part.startswith("torchrun"))
    config, ranks = parse(launch.strip())
    assert ranks == int(re.search(r"--gpus (\d+)", command)[1])
    rules.validate(config, ranks)


def test_tables_of_the_document():
    """They are those of benchmarks/results/planner.json, which has what planner.py says today."""
    assert len(SHOWN) >= 5
    results = json.loads((ROOT / "benchmarks" / "results" / "planner.json").read_text())
    for row, saved in zip(ROWS, results["rows"], strict=True):
        assert saved["predicted"] == pytest.approx(seconds(row), rel=1e-6)
        assert saved["fitted"] == (row in FITTED)
    lines = [line for table in comparison.tables(results).values() for line in table]
    groups = errors.by_group(A100, HELD_OUT) | {"all": errors.summary(A100, HELD_OUT)}
    saved = results["groups"] | {"all": results["held_out"]}
    for group, found in groups.items():
        assert saved[group] == pytest.approx(found._asdict(), rel=1e-6)
        # the gate: the group that no constant was fitted to, and all
        assert found.mean <= {"table5": 0.02, "all": 0.04}.get(group, 0.05), group
    assert groups["all"].ninth_decile <= 0.08
    for name in lesson.MEANING:
        value = getattr(A100.constants, name)
        lines.append(
            f"| {name} | {f'{1e6 * value:g} µs' if name in ('wait', 'zero3') else value} |"
        )
    missing = [line for line in lines if line not in DOCUMENT]
    assert not missing
