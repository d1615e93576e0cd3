"""course/verify.py: equal layouts, a bug that is named, losses inside and outside the band."""

import random

import pytest
import random_layouts
import torch
from parity import again, train_each
from small_run import write_lines

from course import mutations, ranks, rounding, verify
from course.parity import Result, first_difference
from course.shrink import one_device, shrink, shrink_split
from course.training_commands import config_of
from run import rules
from run.config import ConfigError
from run.presets import PRESETS
from run.pretraining import Config


def shrunk(flags: str) -> tuple[int, dict]:
    return shrink(*verify.read_flags(flags.split(), None))


# --- float64 --------------------------------------------------------------------------------------

TWO_RANKS = [
    "--model llama2-70b --tp 2 --sequence-parallel --recompute selective --dropout 0.1",
    "--model gpt2 --pp 2 --layer-split 5 7",
    "--model gpt2 --pp 2 --schedule zb-h1",
    "adapters.py --model gpt2 --peft lora --lora-dropout 0.1 --tp 2",
    "--model gpt2 --zero-stage 3 --recompute full --micro-batch-size 2",
    "--model gpt2 --cp 2",
]


@pytest.mark.parametrize(
    "world, layouts",
    [
        (2, TWO_RANKS),
        (4, ["--model mixtral-8x7b --ep 2 --micro-batch-size 1"]),
        again(8, ["--model llama2-7b --tp 2 --pp 2 --zero-stage 1 --sequence-parallel"]),
    ],
    ids=["2 ranks", "experts", "8 ranks"],
)
def test_equal(world, layouts):
    """Eight layouts. Where the ranks are fewer than verify.py's, there is one replica less."""
    layouts = [verify.in_float64(shrunk(flags)[1]) for flags in layouts]
    results = train_each(world, layouts, steps=2, base={}, trace=True)
    references = train_each(1, [one_device(layout) for layout in layouts], 2, base={}, trace=True)
    for layout, result, one in zip(layouts, results, references, strict=True):
        assert len(one.trace) > 100
        assert one.margin > 10 * verify.TOLERANCE
        assert first_difference(result, one, verify.TOLERANCE) is None, layout


def test_exit_status_and_the_named_tensor(capsys):
    """The command: an equal layout, one with a bug, and flags that train.py refuses."""
    flags = ["--ranks", "2", "--steps", "0", "--", "--model", "gpt2", "--tp", "2"]
    assert verify.main(flags) == 0
    said = capsys.readouterr().out
    assert "num_layers 12 -> 2" in said and "equal: " in said
    bug = mutations.bugs()["no-f"]
    assert verify.main(flags, mutate=bug.apply) == 1
    said = capsys.readouterr().out
    assert f"DIFFERS, first in {bug.first}" in said and "up to step 1: loss" in said


def test_refused_flags(capsys):
    assert verify.main(["--", "--model", "llama2-7b", "--tp", "3"]) == 2
    error = capsys.readouterr().err
    assert error == "train.py: --tp 3: must divide --num-heads 32; [1] would fit\n"
    with pytest.raises(SystemExit) as left:
        verify.main(["--", "--tensors", "2"])
    assert left.value.code == 2
    assert "train.py: unrecognized arguments: --tensors 2" in capsys.readouterr().err
    for arguments in (
        ["--metrics", "a"],
        ["--repeats", "a", "b"],
        ["--steps", "-1"],
        ["--ranks", "0"],
        ["--metrics", "a", "--against", "b", "--repeats", "a", "b", "--ranks", "2"],
        ["--metrics", "a", "--against", "b", "--repeats", "a", "b", "--", "--tp", "2"],
    ):
        with pytest.raises(SystemExit) as left:
            verify.main(arguments)
        assert left.value.code == 2


def test_by_nccl(monkeypatch, capsys):
    """Ranks that need a GPU each; then what runs on them: no band, and the reference on the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    flags = ["--backend", "nccl", "--", "--tp", "2"]
    assert verify.main(flags) == 2
    assert "its 4 ranks need a GPU each, and here are 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        verify.main(["--steps", "1", *flags])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    asked = []

    def train(world, steps, mutate=None, base=None, trace=False, backend="gloo"):
        asked.append((world, base["device"], backend))
        return Result(trace={"loss": torch.ones(1)})

    monkeypatch.setattr(verify, "train", train)
    assert verify.main(flags) == 0
    assert asked == [(1, "cpu", "gloo"), (4, "cuda", "nccl")]


def test_first_difference_sees_what_is_not_a_number():
    one = Result(
        trace={
            "initial w": torch.ones(2, 3, dtype=torch.float64),
            "step 1: loss": torch.ones(1, dtype=torch.float64),
        }
    )
    other = Result(trace={name: tensor.clone() for name, tensor in one.trace.items()})
    assert first_difference(other, one) is None
    other.trace["step 1: loss"][0] = torch.nan
    assert first_difference(other, one).label == "step 1: loss"
    other.trace["initial w"][1, 2] = 1 + 1e-9
    first = first_difference(other, one)
    assert (first.label, first.elements, first.index) == ("initial w", 1, [1, 2])


# --- shrinking ------------------------------------------------------------------------------------


def test_what_matters_stays():
    world, layout = shrunk(
        "--model llama2-70b --tp 8 --pp 4 --virtual-stages 5 --sequence-parallel --recompute full"
        " --recompute-layers 3 --global-batch-size 64 --vocab-size 32001"
    )
    assert world == 8 and (layout["tp"], layout["pp"], layout["virtual_stages"]) == (2, 2, 2)
    assert layout["num_heads"] // layout["num_kv_heads"] == 8
    assert layout["num_layers"] == 4 and layout["recompute_layers"] == 2
    assert layout["vocab_size"] % 2 and layout["sequence_parallel"]
    # two replicas, 4 micro-batches each
    assert layout["global_batch_size"] == 8 and layout["micro_batch_size"] == 1
    # ranks that share a key head
    layout = shrunk("--model gemma-2b --tp 8")[1]
    assert (layout["tp"], layout["num_kv_heads"]) == (2, 1)


def test_context_parallel_ranks_stay():
    world, layout = shrunk("--model llama2-70b --cp 4 --tp 2 --pp 4 --cp-kind all-to-all --ep 1")
    assert world == 8 and (layout["cp"], layout["tp"], layout["pp"]) == (2, 2, 2)
    assert layout["cp_kind"] == "all-to-all" and layout["num_kv_heads"] == 4
    alone = one_device(layout)
    assert (alone["cp"], alone["cp_kind"]) == (1, "ring")


def test_sizes_that_three_ranks_share_are_shared_by_two():
    """Heads, and the inner size of an adapter."""
    world, layout = shrunk(
        "adapters.py --model gpt2 --num-heads 3 --hidden-size 48 --ffn-hidden-size 96 --tp 3"
        " --peft adapter"
        " --adapter-size 9"
    )
    assert (world, layout["tp"], layout["num_heads"], layout["adapter_size"]) == (4, 2, 2, 8)
    rules.validate(config_of(layout), world, base_needed=False)


def test_uneven_stages_stay_uneven():
    assert shrink_split([2, 4], 2, 1) == [1, 2]
    assert shrink_split([11, 12, 12, 12, 12, 12, 12, 11], 4, 1) == [1, 2, 2, 1]
    assert shrink_split([0, 0, 5, 5], 2, 2) == [0, 0, 1, 1]
    # a rank in the middle keeps a layer
    assert shrink_split([3, 0, 3, 0, 3, 3], 3, 1) == [1, 1, 1]


def small_enough(config: Config, world: int) -> bool:
    """Whether train.py takes the flags; then what shrink makes of them is taken too."""
    try:
        rules.validate(config, world)
    except ConfigError:
        return False
    small_world, layout = shrink(config, world)
    rules.validate(config_of(layout), small_world)
    rules.validate(config_of(one_device(layout)), 1)
    assert small_world <= 8
    return True


def test_every_layout_can_be_shrunk():
    drawn = [random_layouts.draw(seed) for seed in range(50)]
    count = 0
    drawn += [random_layouts.with_rampup(case, seed) for seed, case in enumerate(drawn)]
    drawn += [random_layouts.with_cp(case, seed) for seed, case in enumerate(drawn)]
    for case in drawn:
        count += small_enough(config_of(case["model"] | case["layout"]), case["world"])
    g = random.Random(0)
    for _ in range(600):
        tp, pp, v, ep = (g.choice([1, 2, 4, 8]) for _ in range(4))
        dp = ep * g.choice([1, 2])
        config = Config(model=g.choice(list(PRESETS)), tp=tp, pp=pp, virtual_stages=v, ep=ep)
        config.global_batch_size = 32 * dp
        config.device = "cpu"
        count += small_enough(config, tp * pp * dp)
    assert count > 100


# --- the band -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", again("fp32"), again("fp16")])
def test_rounding_is_inside_the_band_and_bugs_are_outside(precision):
    flags = "--model gpt2 --tp 2 --lr 3e-3 --warmup-steps 3 --micro-batch-size 2 --precision "
    _, layout = shrunk(flags + precision)
    steps = 6
    band, one = rounding.measure_band(layout, steps, parts=2)

    def times_band(world: int, layout: dict, mutate=None) -> float:
        losses = ranks.run(rounding.losses_of, world, world, layout, steps, mutate)[0]
        found = rounding.times_band(dict(enumerate(losses, 1)), one, band)
        return max(found.values())

    assert times_band(2, layout) <= 1
    # a learning rate that is 1% off
    assert times_band(1, one_device(layout) | dict(lr=3.03e-3)) > 1
    rows = mutations.bugs()["dropout-by-local-row"].apply
    assert times_band(2, layout | dict(tp=1), rows) > 10


def test_the_band_of_adapters():
    """Runs of one device in another order of sums keep the LoRA of their matrices."""
    layout = shrunk("adapters.py --model gpt2 --peft lora --tp 2")[1]
    band, one = rounding.measure_band(layout, 2, parts=2)
    assert 0 < band[2] < 1e-5 and len(one) == 2


def test_the_band_by_hand():
    """Twice the largest relative difference up to a step; the first five share theirs."""
    runs = [{step: 2.0 for step in range(1, 8)} for _ in range(3)]
    runs[1][3] = 2.02
    runs[2][6] = 1.96
    band = rounding.band_of(runs)
    expected = {1: 0.02, 2: 0.02, 3: 0.02, 4: 0.02, 5: 0.02, 6: 0.04, 7: 0.04}
    assert band == pytest.approx(expected)
    # a step that one run does not have
    del runs[2][7]
    assert list(rounding.band_of(runs)) == [1, 2, 3, 4, 5, 6]
    found = rounding.times_band({1: 2.0, 2: 2.02, 6: 2.04, 9: 5.0}, runs[0], band)
    assert found == pytest.approx({1: 0.0, 2: 0.5, 6: 0.5})


def metrics(path, losses: list) -> str:
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    return str(write_lines(path, lines))


def test_runs_of_the_user(tmp_path, capsys):
    """By the band of the user's own repeated runs."""
    a = metrics(tmp_path / "a", [3.0, 2.9, 2.8])
    b = metrics(tmp_path / "b", [3.0, 2.901, 2.8])
    c = metrics(tmp_path / "c", [3.0, 2.9015, 2.8])
    d = metrics(tmp_path / "d", [3.0, 2.95, 2.8])
    infinite = metrics(tmp_path / "e", [3.0, None, 2.8])
    repeats = ["--repeats", a, b]
    assert verify.main([*repeats, "--metrics", c, "--against", a]) == 0
    assert "inside the band in steps 1 to 3: at most 0.75 of it, in step 2" in (
        capsys.readouterr().out
    )
    assert verify.main([*repeats, "--metrics", d, "--against", a]) == 1
    assert "OUTSIDE the band in 1 of 3 steps, first in 2" in capsys.readouterr().out
    assert verify.main([*repeats, "--metrics", infinite, "--against", a]) == 1
    capsys.readouterr()
    # no band, no run, no common step
    assert verify.main(["--repeats", a, a, "--metrics", b, "--against", a]) == 2
    assert "equal to the last bit" in capsys.readouterr().err
    assert verify.main([*repeats, "--metrics", str(tmp_path / "none"), "--against", a]) == 2
    assert "no such file" in capsys.readouterr().err
    # nothing may lie inside of a band that is infinite; a step without noise, and a loss of 0
    assert verify.main(["--repeats", a, infinite, "--metrics", d, "--against", a]) == 2
    assert "not finite" in capsys.readouterr().err
    found = rounding.times_band({1: 3.0, 2: 0.1}, {1: 3.1, 2: 0.0}, {1: 0.0, 2: 0.1})
    assert found[1] > 1e5 and found[2] == float("inf")


@pytest.mark.parametrize("runs, least, most", [(6, 0.0, 0.002), (3, 0.01, 0.03), (2, 0.1, 0.16)])
def test_normal_noise_seldom_leaves_the_band(runs, least, most):
    """1 of 2,000, 50 and 8 comparisons of 20 steps do."""
    generator = torch.Generator().manual_seed(runs)
    trials = 4000
    # losses of `runs` runs that make the band, and of two that are compared
    noise = 1 + 1e-4 * torch.randn(trials, runs + 2, 20, generator=generator, dtype=torch.float64)
    outside = 0
    for of_trial in noise.tolist():
        *repeats, a, b = (dict(enumerate(losses, 1)) for losses in of_trial)
        outside += max(rounding.times_band(a, b, rounding.band_of(repeats)).values()) > 1
    assert least <= outside / trials <= most


def each_order(rank, layout):
    """The losses of one device, with sums in this rank's order."""
    return rounding.losses_in_another_order(rank, layout, steps=2, parts=2)


@pytest.mark.parametrize("fp8", ["current", "delayed", "block"])
def test_another_order_of_sums_keeps_fp8(fp8):
    """Bytes and scales are the same, so in float64 the losses are, but for rounding."""
    config = Config(fp8=fp8, fp8_scales="any", num_layers=4, precision="fp64", device="cpu")
    _, layout = shrink(config, 1)
    first, *others = ranks.run(each_order, 3, one_device(layout))
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-12)


@pytest.mark.parametrize(
    "words, said",
    [
        ("sfft.py --tp 2", "verify.py: sfft.py: is none of train.py, "),
        ("reinforcement.py --data x", "verify.py: -- reinforcement.py: only text"),
        ("sft.py --tp 3", "sft.py: --tp 3: must "),
    ],
)
def test_who_refuses_what_stands_behind_two_dashes(words, said, capsys):
    assert verify.main(["--steps", "0", "--", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1


@pytest.mark.parametrize("command", [["sft.py"], ["-m", "finetune.sft", "--pack"]], ids=" ".join)
def test_conversations_have_a_band(command, capsys):
    """Rows that are padded, and documents that share a row."""
    assert verify.main(["--steps", "1", "--ranks", "2", "--", *command, "--tp", "2"]) == 0
    assert "inside the band" in capsys.readouterr().out
