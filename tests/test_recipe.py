"""The commands that planner.py prints: the table behind their values, and twenty that train."""

import dataclasses
import inspect
import json

import processes
import pytest
import small_run
import test_planner
from parity import again

from base.model_config import least_parameters
from course.shrink import shrink
from optimizer import AdamW, learning_rate
from planning import commands, recipe
from run import rules
from run.presets import GPT_3, PRESETS, PUBLISHED, TINY, recipe_of_model, recipe_of_size
from run.pretraining import Config

# --- the table ------------------------------------------------------------------------------------


def row_of(name: str):
    return recipe_of_model(Config(model=name))[0]


def words_of(name: str, batch: int, tokens: float, **given) -> dict[str, str]:
    """{flag: its value} that a preset's command has."""
    model = Config(model=name, **given).model_config()
    words = recipe.flags_of(row_of(name), model, batch, tokens, given)
    return dict(zip(words[::2], words[1::2]))


def test_gpt3_by_hand():
    """Table 2.1 of arXiv 2005.14165: 175B has 6e-5 and 3.2M tokens a step; appendix B: 375M tokens
    of warmup, on 300B."""
    row = row_of("gpt3-175b")
    assert (row.lr, row.warmup) == (6e-5, 375e6)
    assert row.batch == pytest.approx(3.2e6, rel=0.02)
    assert recipe.batch_of(row, 2048, 1024) == 1536
    words = words_of("gpt3-175b", 1536, 300e9)
    # 3,145,728 tokens a step: 300e9 / 3.146e6, 375e6 / 3.146e6
    assert (words["--steps"], words["--warmup-steps"]) == ("95367", "119")
    assert (words["--lr"], words["--weight-decay"], words["--dropout"]) == ("6e-05", "0.1", "0.1")
    assert (words["--tokenizer"], words["--data"]) == ("gpt2", "DATA")
    # 0.5M tokens of 125M to 760M, 1M to 2.7B, 2M to 13B, as rounded in the paper
    tokens = [row.batch / 1e6 for row in GPT_3.values()]
    assert tokens == pytest.approx([0.5, 0.5, 0.5, 1, 1, 2, 2, 3.2], rel=0.05)


def test_llama2_by_hand():
    """Section 2.2 of arXiv 2307.09288: 1.5e-4 for 70B, 4M tokens a step, 2,000 steps of warmup."""
    row = row_of("llama2-70b")
    assert row.lr == 1.5e-4 and recipe.batch_of(row, 4096, 64) == 1024
    words = words_of("llama2-70b", 1024, 2e12)
    assert (words["--lr"], words["--warmup-steps"], words["--dropout"]) == (
        "0.00015",
        "2000",
        "0.0",
    )
    # 2e12 / 2^22
    assert (words["--steps"], words["--tokenizer"]) == ("476837", "TOKENIZER")


def test_between_rows():
    """The geometric mean of 13B and 175B is 47.7B."""
    assert recipe_of_size(47e9) is GPT_3[13e9] and recipe_of_size(48e9) is GPT_3[175e9]
    assert row_of("gpt3-40b") is GPT_3[13e9] and row_of("megatron-76b") is GPT_3[175e9]
    # of another depth no paper tells
    assert recipe_of_model(Config(model="llama2-7b", num_layers=16))[0] is GPT_3[2.7e9]


def test_only_the_toy_has_the_toys_rate():
    config = Config()
    assert row_of("tiny") is TINY and TINY.lr == 3e-3
    # train.py's defaults
    assert recipe.batch_of(TINY, 128, 1) == config.global_batch_size
    assert TINY.warmup / TINY.batch == config.warmup_steps
    for name in PRESETS:
        config = Config(model=name)
        assert config.peak_lr == row_of(name).lr
        if least_parameters(config.model_config()) > 100e6:
            assert config.peak_lr < 1e-3, name


def test_what_is_said_of_the_optimizer():
    defaults = inspect.signature(AdamW).parameters
    beta_1, beta_2 = defaults["betas"].default
    assert f"betas {beta_1} and {beta_2}" in recipe.ADVICE
    assert Config().weight_decay == defaults["weight_decay"].default == 0.1
    assert Config().grad_clip == 1.0


def test_the_table_of_the_document():
    for row in (TINY, *GPT_3.values(), *PUBLISHED.values()):
        line = f"| {row.name} | {row.lr:g} | {row.batch:,} | {row.warmup:,} |"
        assert line in test_planner.DOCUMENT


@pytest.mark.parametrize(
    "name, s, gpus, batch",
    [
        # 1,536 and 256 sequences are wanted
        ("gpt3-175b", 2048, 8, 1536),
        ("gpt3-175b", 2048, 560, 1680),
        ("gpt3-126m", 2048, 3, 255),
        # 192 and 384 are far away, and so is 288, of half of the GPUs: of a third
        ("gpt3-126m", 2048, 192, 256),
        ("gpt3-126m", 2048, 4096, 256),
        # four sequences of a million tokens
        ("llama2-7b", 2**20, 64, 4),
        ("gpt3-126m", 2**20, 8, 1),
    ],
)
def test_the_gpus_divide_the_batch(name, s, gpus, batch):
    assert recipe.batch_of(row_of(name), s, gpus) == batch


@pytest.mark.parametrize(
    "vocab_size, tokenizer",
    [
        (257, "bytes"),
        (384, "bytes"),
        (50257, "gpt2"),
        (50304, "gpt2"),
        (51200, "gpt2"),
        (256, "TOKENIZER"),
        (49152, "TOKENIZER"),
        (51201, "TOKENIZER"),
    ],
)
def test_the_tokenizer_of_a_vocabulary(vocab_size, tokenizer):
    assert recipe.tokenizer_of(vocab_size) == tokenizer


def test_a_flag_of_the_user_wins(capsys):
    line = "plan --model gpt2 --gpus 3 --batch 9 --dropout 0.25 --lr 1e-3 --warmup-steps 7"
    command = printed(f"{line} --weight-decay 0 --data a b --tokenizer mine.json", capsys)
    config, _ = test_planner.parse(command)
    assert (config.dropout, config.lr, config.warmup_steps) == (0.25, 1e-3, 7)
    assert (config.weight_decay, config.data, config.tokenizer) == (0.0, ["a", "b"], "mine.json")
    assert config.global_batch_size == 9 and command.count("--dropout") == 1


def test_few_tokens(capsys):
    """Warmup takes at most a tenth of the steps; one step is the least."""
    assert words_of("llama2-7b", 1024, 1e10)["--warmup-steps"] == "238"
    words = words_of("llama2-7b", 1024, 5)
    assert (words["--steps"], words["--warmup-steps"]) == ("1", "0")
    for line, words in (
        ("plan --model tiny --gpus 1 --tokens 1e20", "--tokens 1e+20: makes 48,828,125,"),
        ("plan --model gpt2 --gpus 8 --lr -1", "--lr -1.0: must be at least 0"),
        ("plan --model gpt2 --gpus 8 --tokenizer=", "--tokenizer '': is empty"),
    ):
        assert commands.main(line.split()) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--data DATA", "--tokenizer TOKENIZER"])
def test_a_place_that_was_not_filled_in(flag, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert small_run.run(*small_run.flags(steps=1), *flag.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"train.py: {flag}: ") and said.count("\n") == 1


# --- twenty commands that train -------------------------------------------------------------------


def printed(line: str, capsys) -> str:
    """The command that planner.py prints for these words."""
    assert commands.main(line.split()) == 0
    parts = capsys.readouterr().out.split("\n\n")
    return next(part for part in parts if part.startswith(("torchrun", "python")))


def small_flags(layout: dict, tmp_path) -> list[str]:
    """train.py's, of what `shrink` gives and of a text of few bytes."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and the hat sat on the cat. " * 400)
    fields = layout | dict(
        **dict(steps=STEPS, warmup_steps=WARMUP, eval_every=0, save_every=0),
        **dict(data=[text], tokenizer="bytes", vocab_size=257),
        **dict(out=tmp_path / "run", cache=tmp_path / "cache"),
    )
    words = []
    for field in dataclasses.fields(Config):
        value = fields[field.name]
        if value != getattr(Config(), field.name):
            words.append("--" + field.name.replace("_", "-"))
            if value is not True:
                words += map(str, value if isinstance(value, list) else [value])
    return words


STEPS, WARMUP = 20, 3
MACHINE = "machine.json"
# each trains on at most 4 ranks, when it is small
TRAINED = [
    "plan --model gpt3-126m --gpus 1",
    "plan --model tiny-moe --gpus 4 --tokens 1e8",
    "size --gpus 64 --days 7 --gpu h100",
    *map(
        again,
        [
            "plan --model tiny --gpus 1 --tokens 1e6",
            "plan --model llama2-70b --gpus 8 --gpu h200 --optimizer-state bf16",
            "plan --model gpt2 --gpus 8 --gpu h100",
            "plan --model gpt2-xl --gpus 2 --memory 20",
            "plan --model gpt3-5b --gpus 160",
            "plan --model gpt3-20b --gpus 64",
            "plan --model gpt3-175b --gpus 1024",
            "plan --model megatron-1.7b --gpus 2 --batch 7",
            f"plan --model megatron-7.5b --gpus 8 --machine {MACHINE}",
            "plan --model llama2-7b --gpus 8 --memory 30 --data text/",
            "plan --model llama2-13b --seq-length 65536 --gpus 64 --gpu h100",
            "plan --model llama3.1-8b --gpus 64 --gpu h100",
            "plan --model mixtral-8x7b --gpus 32 --gpu h200",
            "plan --model bloom-7b1 --gpus 16",
            "plan --model qwen3-0.6b --gpus 3",
            "plan --model mistral-7b --gpus 8 --dropout 0.2",
            "size --gpus 8 --flops 1e20",
        ],
    ),
]


@pytest.mark.parametrize("line", TRAINED)
def test_a_printed_command_trains(line, tmp_path, monkeypatch, capsys):
    """20 steps of train.py on the model made small, at the printed learning rate. The warmup of
    hundreds of steps is 3 steps here: otherwise the weights would hardly move."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / MACHINE).write_text(json.dumps(dataclasses.asdict(test_planner.A100)))
    command = printed(line, capsys)
    config, world = test_planner.parse(command)
    rules.validate(config, world)
    assert config.warmup_steps <= config.steps / 10
    assert config.lr == config.default_lr()[0] and config.precision == "bf16"
    small_world, layout = shrink(config, world)
    argv = ["train.py", *small_flags(layout, tmp_path)]
    ranks = processes.start_ranks(small_world, argv) if small_world > 1 else [processes.start(argv)]
    for rank in ranks:
        assert rank.wait() == 0, rank.stderr
    lines = small_run.lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        rate = learning_rate(line["step"], config.lr, config.lr / 10, WARMUP, STEPS)
        assert line["lr"] == pytest.approx(rate)
    losses = [line["loss"] for line in lines]
    assert None not in losses and max(losses) < 1.1 * losses[0]
    assert sum(losses[-5:]) < sum(losses[:5])
