"""FP8 in runs of train.py: resuming, damaged histories, steps that are not finite, what is said and
what is refused. tests/test_fp8.py has the arithmetic and the layouts."""

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import small_run
import torch
from parity import Synthetic, again, step, trainer_of

import fp8
import optimizer
import train
from base.groups import Groups
from course import ranks
from run import checkpoint, least_memory, rules, training_run
from run.config import ConfigError, multiply_in
from run.metrics import read_metrics

RECIPES = {
    "current": ["--fp8", "current"],
    "delayed": ["--fp8", "delayed"],
    "block": ["--fp8", "block", "--fp8-block", "16"],
}
SMALL = small_run.flags(num_layers=4, global_batch_size=4, micro_batch_size=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(json.__file__).read_text())
    return str(path)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(text, out, *more, steps=6):
    """`python train.py`, in this process. Returns the exit status."""
    return train.main([*SMALL, "--data", text, "--out", out, "--steps", str(steps), *more])


def lines(out):
    return read_metrics(Path(out) / "metrics.jsonl")[0]


def exact(out):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines(out)]


def refusals(err):
    """What was said on stderr, but for how much of the text is tokenized."""
    return [line for line in err.splitlines() if line and not line.startswith("data:")]


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_is_the_uninterrupted_one(here, text, recipe):
    """Bit for bit: history and all, and evaluation, which uses FP8 too, leaves no trace in it."""
    flags = [*RECIPES[recipe], "--dropout", "0.1"]
    assert run(text, "whole", *flags) == 0
    assert run(text, "parts", *flags, "--eval-every", "2", "--save-every", "3", "--keep", "0") == 0
    assert exact("parts") == exact("whole")
    shutil.rmtree("parts/checkpoints/step-000006")
    assert run(text, "parts", *flags, "--resume") == 0
    assert exact("parts") == exact("whole")
    assert lines("parts")[-1].get("fp8_saturated") == lines("whole")[-1].get("fp8_saturated")


def test_another_recipe_begins_its_history_anew(here, text, capfd):
    """From a checkpoint with a history to a recipe without one, to no FP8, and back."""
    for steps, recipe in ((2, "delayed"), (3, "current"), (4, "off"), (5, "delayed")):
        capfd.readouterr()
        assert run(text, "run", "--fp8", recipe, "--resume", steps=steps) == 0
        index = json.loads(Path(f"run/checkpoints/step-{steps:06}/index.json").read_text())
        history = index.get("fp8", {}).get("history")
        assert history is None if recipe == "off" else len(history) == {2: 2, 3: 0, 5: 1}[steps]
        if steps > 2:
            assert f"-> {recipe}" in capfd.readouterr().out


# --- damaged histories ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    """The folder of a run of two steps, with a history."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(text, str(folder), "--fp8", "delayed", steps=2) == 0
    return folder


def rows(number, layers=4):
    return [[[[number] * 3] * 7] * layers]


def rewrite(file, entry):
    """An index with another history, and a checksum that fits, so that it is read."""
    file.write_text(json.dumps(json.loads(file.read_text()) | {"fp8": entry}))
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    file.with_name("index.json.sha256").write_text(f"{checksum}  index.json\n")


DAMAGED = {
    "no object": ("x", "Expected `object | null`, got `str`"),
    "no history": ({}, "missing required field `history`"),
    "negative": ({"history": rows(-1.0)}, "Expected `float` >= 0"),
    "beyond float32": ({"history": rows(1e39)}, "Expected `float` <= 3.4"),
    "other layers": ({"history": rows(1.0, layers=3)}, "is [3, 7, 3], not [4, 7, 3]"),
    "ragged": ({"history": [*rows(1.0), [[[1.0]]]]}, "expected sequence of length 4"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_history_is_refused_in_one_line(here, text, trained, capfd, damage):
    value, words = DAMAGED[damage]
    shutil.copytree(trained, "run")
    (path,) = checkpoint.steps("run/checkpoints").values()
    rewrite(path / "index.json", value)
    assert run(text, "run", "--fp8", "delayed", "--resume", steps=3) == 2
    (message,) = refusals(capfd.readouterr().err)
    assert words in message and "step-000002/index.json" in message


@pytest.mark.parametrize("entry", [None, {"history": []}, {"history": rows(1) * 40}])
def test_a_history_of_another_length(here, text, trained, entry):
    """None, none yet, or more steps than are kept: the newest of them count."""
    shutil.copytree(trained, "run")
    (path,) = checkpoint.steps("run/checkpoints").values()
    rewrite(path / "index.json", entry)
    assert run(text, "run", "--fp8", "delayed", "--resume", steps=3) == 0
    index = json.loads(Path("run/checkpoints/step-000003/index.json").read_text())
    assert len(index["fp8"]["history"]) == (16 if entry and entry["history"] else 1)


# --- NaN, infinity and zeros ----------------------------------------------------------------------

BROKEN = 2
LAYOUTS = {
    "one": (1, {}),
    "tp": (2, dict(tp=2)),
    "sp": (2, dict(tp=2, sequence_parallel=True)),
    "pp": (2, dict(pp=2)),
    "zb": (2, dict(pp=2, schedule="zb-h1")),
    "dp": (2, {}),
    "zero 3": (2, dict(zero_stage=3)),
}
# what is ruined -> the tensor that is named
FIRST = {
    "weight": "blocks.2.mlp.down weight",
    "input": "blocks.2.mlp.gate input",
    "gradient": "blocks.2.mlp.down gradient",
    "exploding": None,
}


class Times(torch.autograd.Function):
    """x, with a gradient that is larger by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def ruin_outputs(blocks, ruin):
    """Have block 2 give NaN to its MLP, or an infinite gradient; or gradients grow so that they are
    infinite only in block 0, which is not in FP8. Returns the hooks."""

    def with_nan(module, args, out):
        out = out.clone()
        out[0, 0, 0] = torch.nan
        return out

    def times(factor):
        return lambda module, args, out: Times.apply(out, factor)

    hooks = {
        "weight": [],
        "input": [("2", "mlp_norm", with_nan)],
        "gradient": [("2", "mlp", times(torch.inf))],
        "exploding": [("2", "mlp", times(1e30)), ("0", "mlp", times(1e30))],
    }[ruin]
    found = [(blocks[name], part, hook) for name, part, hook in hooks if name in blocks]
    return [getattr(b, part).register_forward_hook(hook) for b, part, hook in found]


def break_on_rank(rank, world, flags, ruin, steps):
    """Step BROKEN goes wrong, on the last rank or on all. Of each step: (what its line says,
    whether its gradient was finite); then the histories before and after BROKEN and at the end."""
    layout = {name: flags[name] for name in ("tp", "pp") if name in flags}
    groups = Groups.make("cpu", world, **layout) if world > 1 else Groups()
    trainer = trainer_of(flags, groups)
    dataset = Synthetic(trainer.model_config.seq_length, trainer.model_config.vocab_size)
    blocks = {n: block for stage in trainer.stages for n, block in stage.blocks.items()}
    said, histories = [], []
    for number in range(1, steps + 1):
        mine = number == BROKEN and (rank == world - 1 or ruin == "exploding")
        hooks = ruin_outputs(blocks, ruin) if mine else []
        weight = blocks["2"].mlp.down.weight.detach() if mine and ruin == "weight" else None
        if weight is not None:
            right = weight[0, 0].clone()
            weight[0, 0] = torch.nan
        norm = step(trainer, number, dataset)
        if weight is not None:
            weight[0, 0] = right
        for hook in hooks:
            hook.remove()
        said.append((trainer.fp8.warnings(trainer.fp8.report), bool(norm.isfinite())))
        histories.append(trainer.fp8.history)
    return said, [histories[i] for i in (BROKEN - 2, BROKEN - 1, -1)]


def break_each_on_rank(rank, world, flags, steps):
    # ZeRO stage 3 keeps no whole weights, so none of them can be ruined
    ruins = [ruin for ruin in FIRST if ruin != "weight" or flags.get("zero_stage") != 3]
    return {ruin: break_on_rank(rank, world, flags, ruin, steps) for ruin in ruins}


@pytest.mark.parametrize(
    "recipe, layout",
    [
        *[("delayed", layout) for layout in ("one", "sp", "zero 3")],
        *[("current", "one"), ("block", "one")],
        *[again("delayed", layout) for layout in ("tp", "pp", "zb", "dp")],
        *[again("current", layout) for layout in LAYOUTS if layout != "one"],
        *[again("block", layout) for layout in LAYOUTS if layout != "one"],
    ],
)
def test_a_step_that_is_not_finite(recipe, layout):
    """It is skipped, on all ranks, and its line names the first tensor. The next steps are taken,
    with the history that was there before."""
    world, flags = LAYOUTS[layout]
    flags = small_run.SMALL | dict(num_layers=4, global_batch_size=4, micro_batch_size=2) | flags
    flags |= dict(fp8=recipe, fp8_block=16 if recipe == "block" else 128, precision="fp32")
    everywhere = ranks.run(break_each_on_rank, world, world, flags, 4)
    for ruin, (said, (before, broken, last)) in everywhere[0].items():
        assert all(other[ruin][0] == said for other in everywhere)
        assert [finite for _, finite in said] == [True, False, True, True]
        assert all("fp8_not_finite" not in warnings for warnings, finite in said if finite)
        names = said[BROKEN - 1][0].get("fp8_not_finite", [None])
        assert names[0] == FIRST[ruin]
        if recipe == "delayed":
            assert torch.equal(broken[:1], before) and not broken[1:].any()
            assert last.isfinite().all() and last.max() < 100
            assert len(last) == 4


def test_the_screen_and_the_end_name_the_first_tensor(here, text, monkeypatch, capfd):
    """Step 2 ruins the weights: steps 3 and 4 are skipped, and the run ends."""
    monkeypatch.setattr(optimizer, "learning_rate", lambda step, *_: 1e38 if step == 2 else 1e-3)
    assert run(text, "run", "--fp8", "delayed", "--max-bad-steps", "2") == 1
    out, err = capfd.readouterr()
    (_, _, *skipped) = lines("run")
    (first,) = {line["fp8_not_finite"][0] for line in skipped}
    assert len(skipped) == 2 and first.startswith("blocks.1.")
    assert out.count(f"not finite, first {first}: skipped") == 2
    (message,) = refusals(err)
    assert f"the first FP8 tensor that was not finite is {first}; there is no good" in message


def trainer_in(recipe, **flags):
    return trainer_of(small_run.SMALL, **dict(num_layers=4, fp8=recipe) | flags)


def one_step(trainer):
    """On the same samples each time. What the line of the step says of its FP8 tensors."""
    assert step(trainer, 1, Synthetic(32, trainer.model_config.vocab_size)).isfinite()
    return trainer.fp8.warnings(trainer.fp8.report)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_of_zeros_train(recipe):
    """What enters a residual is zero at first: so are gradients, in the first step."""
    trainer = trainer_in(recipe, fp8_block=16 if recipe == "block" else 128)
    for block in trainer.model.blocks.values():
        block.attention.output.weight.detach().zero_()
        block.mlp.down.weight.detach().zero_()
    assert one_step(trainer) == {}
    amax = trainer.fp8.report[0, 1:3]
    assert not amax[:, 0, fp8.GRADIENT].any() and amax[:, 6, fp8.GRADIENT].all()
    for _ in range(2):
        one_step(trainer)
    assert trainer.fp8.report[0, 1:3, :, :].count_nonzero() == 2 * (7 * 3 - 3)
    assert all(block.mlp.down.weight.all() for block in trainer.model.blocks.values())


# --- what is said, and what is refused ------------------------------------------------------------


def said_of(recipe, **flags):
    """The lines of a run with these flags that speak of FP8."""
    trainer = trainer_in(recipe, **flags)
    return list(training_run.surprises_of_fp8(trainer))


BLOCKS = "blocks need a Hopper GPU, CUDA 12.9 and --fp8-block 128"
WIDE = dict(fp8="block", hidden_size=128, ffn_hidden_size=256, seq_length=64)
EMULATED = "emulated, so not faster: FP8 multiplications need a GPU of compute capability 8.9"


def test_what_a_run_says_of_fp8():
    said = said_of("current", num_experts=2, expert_every=2, precision="bf16")
    assert said == [
        f"--fp8 current: {EMULATED}",
        "--fp8 current: scales are those of a micro-batch, here of 2 sequences: for the same result"
        " on another number of ranks give --micro-batch-size 2",
        "--fp8 current: experts have a scale for each row, and weight gradients in bf16",
    ]
    assert said_of("block", micro_batch_size=1) == [f"--fp8 block: {EMULATED}"]
    # a run that goes on with a history says nothing of the first step's scales
    trainer = trainer_in("delayed")
    (_, first) = training_run.surprises_of_fp8(trainer)
    assert "scales are in the first step those of a micro-batch, here of 2" in first
    one_step(trainer)
    assert list(training_run.surprises_of_fp8(trainer)) == [f"--fp8 delayed: {EMULATED}"]


@pytest.mark.parametrize(
    "capability, flags, why",
    [
        ((8, 0), dict(fp8="current"), "A GPU is below compute capability 8.9"),
        ((8, 9), dict(fp8="current"), ""),
        ((8, 9), dict(fp8="block"), BLOCKS),
        ((9, 0), dict(fp8="block", fp8_block=64), BLOCKS),
        ((10, 0), dict(fp8="block"), BLOCKS),
        ((9, 0), WIDE, ""),
        (
            (9, 0),
            WIDE | dict(ffn_hidden_size=176),
            "FP8 multiplications need sizes that 128 divides, not 176 of --ffn-hidden-size",
        ),
        (
            (9, 0),
            dict(fp8="delayed", seq_length=33, ffn_hidden_size=72),
            "FP8 multiplications need sizes that 16 divides, not 66 tokens of a micro-batch, 72 of"
            " --ffn-hidden-size",
        ),
    ],
)
def test_which_gpus_multiply_bytes(monkeypatch, capability, flags, why):
    config = train.Config(**small_run.SMALL | flags)
    trainer = SimpleNamespace(
        config=config,
        model_config=config.model_config(),
        micro_batch=2,
        precision="bf16",
        device=torch.device("cuda"),
    )
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    assert training_run.fp8_is_emulated(trainer) == why


REFUSED = [
    (dict(fp8="current", fp8_skip=2), "--fp8-skip 2: first and last", "4 leaves no other; 0 to 1"),
    (dict(fp8="block", num_layers=1), "--fp8-skip 1: first", "1 leaves no other; 0 would"),
    (dict(fp8="current", fp8_skip=-1), "--fp8-skip -1: must be at least 0", ""),
    (dict(fp8_skip=0), "--fp8-skip 0: needs --fp8", "current, delayed or block"),
    (dict(fp8_scales="any"), "--fp8-scales any: needs --fp8", "current, delayed or block"),
    (dict(fp8_block=64), "--fp8-block 64: needs --fp8", "current, delayed or block"),
    (dict(fp8="delayed", fp8_block=64), "--fp8-block 64: is only for --fp8 block", ""),
    (dict(fp8="block", fp8_block=0), "--fp8-block 0: must be at least 1", ""),
    (dict(fp8="block", precision="fp16"), "--fp8 block: has scales of its own", "bf16 would"),
    (dict(fp8="current", fp8_keep_bytes=True), "--fp8-keep-bytes: is for --zero-stage 3", ""),
]


@pytest.mark.parametrize("flags, start, words", REFUSED, ids=str)
def test_what_does_not_fit_is_refused(flags, start, words):
    with pytest.raises(ConfigError) as refused:
        rules.validate(train.Config(**small_run.SMALL | dict(num_layers=4) | flags), 1)
    message = str(refused.value)
    assert message.startswith(start) and words in message


def test_blocks_that_ranks_would_cut_are_refused():
    """hidden 32, MLP 64, keys 32: of two ranks each has 16, 32 and 16."""
    flags = small_run.SMALL | dict(num_layers=4, tp=2, fp8="block", precision="fp32")
    for block, fits in ((128, "[4, 8, 16]"), (32, "[4, 8, 16]"), (3, "[1, 2, 4]")):
        with pytest.raises(ConfigError) as refused:
            rules.validate(train.Config(**flags | dict(fp8_block=block)), 2)
        message = str(refused.value)
        assert message.startswith(f"--fp8-block {block}: blocks must not be cut: --tp 2 gives each")
        assert message.endswith(f"; {fits} would fit")
    for block in (16, 8, 1):
        rules.validate(train.Config(**flags | dict(fp8_block=block)), 2)


# --- TF32 -----------------------------------------------------------------------------------------


def test_tf32_is_fp32_on_a_cpu(here, text, capfd):
    """The same numbers to the last bit, also resumed in the other; and that is said."""
    assert run(text, "fp32", "--optimizer-state", "bf16", "--save-every", "3") == 0
    capfd.readouterr()
    flags = ["--precision", "tf32", "--optimizer-state", "bf16"]
    assert run(text, "tf32", *flags, steps=3) == 0
    out = capfd.readouterr().out
    assert "--precision tf32: the same as fp32 here; only GPUs have TF32 multiplications" in out
    assert "tf32 on 1 x cpu" in out
    assert run(text, "tf32", "--precision", "fp32", *flags[2:], "--resume") == 0
    assert "--precision tf32 -> fp32" in capfd.readouterr().out
    assert exact("tf32") == exact("fp32")


@pytest.mark.parametrize(
    "precision, device, wanted",
    [("tf32", "cuda", "high"), ("tf32", "cpu", "highest"), ("fp32", "cuda", "highest")],
)
def test_tf32_is_for_gpus(precision, device, wanted):
    multiply_in(precision, torch.device(device))
    assert torch.get_float32_matmul_precision() == wanted


def test_tf32_needs_the_memory_of_fp32():
    model = train.Config(**small_run.SMALL).model_config()
    one = dict.fromkeys(("tp", "pp", "dp", "ep"), 1)
    for name in ("fp32", "bf16"):
        needs = [least_memory.state_parts(model, p, name, 0, one) for p in ("tf32", "fp32")]
        assert needs[0] == needs[1]
    needs = [least_memory.activation_bytes(model, p, 2, one, 0) for p in ("tf32", "fp32", "bf16")]
    assert needs[0] == needs[1] > needs[2]


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", again("current"), again("block")])
def test_a_run_goes_on_under_another_layout(here, text, recipe):
    """In float64, where one rank and two differ by the order of sums alone: trained on one rank,
    then tensor- and sequence-parallel with a sample at the end, then ZeRO 3, then a pipeline."""
    flags = [*RECIPES[recipe], "--precision", "fp64"]
    assert run(text, "one", *flags) == 0
    assert run(text, "run", *flags, "--save-every", "2", steps=2) == 0
    layouts = (["--tp", "2", "--sequence-parallel"], ["--zero-stage", "3"], ["--pp", "2"])
    for steps, layout in zip((4, 5, 6), layouts):
        argv = ["train.py", *SMALL, "--data", text, "--out", "run", "--steps", str(steps)]
        done = processes.run([*argv, *flags, *layout, "--resume"], world=2)
        assert done.returncode == 0, done.stderr
        assert Path("run/sample.txt").exists()
    a, b = exact("one"), exact("run")
    assert len(a) == len(b) == 6
    for one, two in zip(a, b):
        assert two == pytest.approx(one, rel=1e-10)
