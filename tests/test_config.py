"""Flags: from the command line, a TOML file, or the run that is gone on with; refused in one
line."""

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest
import small_run
from small_run import run, write_lines

from base.model_config import MoEConfig
from course import training_commands
from finetune import nemo_config, prompt_file
from finetune.sft import SFTConfig
from inference.cli import check_layout
from prompt_tuning import PromptError
from run import config, least_memory, rules, world
from run.config import ConfigError
from run.flags import parse
from run.pretraining import Config


def test_flags_over_toml_over_the_run_over_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    earlier = {"lr": 0.5, "seed": 7, "steps": 9, "min_lr": 0.1, "a-flag-of-another-version": 1}
    (tmp_path / "run/config.json").write_text(json.dumps(earlier))
    (tmp_path / "flags.toml").write_text('seed = 8\n[batch]\nsteps = 10\n"global-batch-size" = 4\n')
    found = parse(["--resume", "--out", "run", "--config", "flags.toml", "--steps", "11"], 0)
    assert (found.lr, found.min_lr, found.seed) == (0.5, 0.1, 8)
    assert (found.steps, found.global_batch_size) == (11, 4)
    assert parse(["--out", "run"], 0).lr == Config().lr


def test_another_layout_is_given_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    earlier = {"tp": 2, "sequence_parallel": True, "lr": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(earlier))
    same = parse(["--resume", "--out", "."], 0)
    other = parse(["--resume", "--out", ".", "--pp", "2"], 0)
    assert (same.tp, same.sequence_parallel, same.lr) == (2, True, 0.5)
    assert (other.tp, other.sequence_parallel, other.pp, other.lr) == (1, False, 2, 0.5)


@pytest.mark.parametrize(
    "text, words",
    [
        ("stepps = 2", "stepps is no flag"),
        ("steps = ", "flags.toml"),
        ("\udcff", "flags.toml"),
        ('router = "best"', "--router best: must be one of sinkhorn, topk"),
        ("data = [1]", "--data [1]"),
        ("resume = 1", "--resume 1"),
        ("resume = true\nout = 5", "--out 5"),
        ("steps = 1\n[more]\nsteps = 2", "steps stands there twice"),
    ],
)
def test_files_of_flags_that_cannot_be(tmp_path, text, words):
    path = tmp_path / "flags.toml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError) as e:
        rules.validate(parse(["--config", str(path)], 0), 1)
    assert words in str(e.value)


def test_one_file_of_data_needs_no_list(tmp_path):
    (tmp_path / "flags.toml").write_text('data = "a.txt"')
    assert parse(["--config", str(tmp_path / "flags.toml")], 0).data == ["a.txt"]


def test_pipes_and_devices_are_no_files(tmp_path, capfd, monkeypatch):
    """They may never end, and nobody would be told."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("r.py").write_text("def f(prompt, answer, record):\n    return 1")
    talk = write_lines(Path("sft.jsonl"), [{"prompt": "a", "completion": "b"}] * 4)
    assert run("finetune.sft", *small_run.flags(steps=1, data=talk, out="base")) == 0
    for path in ("pipe", "/dev/zero"):
        for flag in ("--config", "--tokenizer"):
            assert run(*small_run.flags(), flag, path) == 2
            assert "not a file" in capfd.readouterr().err
        for read in (nemo_config.PromptConfig.read, prompt_file.load):
            with pytest.raises(PromptError, match="not a file"):
                read(path)
        rewarded = "reinforcement.py --reward r.py:f --answer-tokens 4"
        for words in ("sft.py", "preference.py", rewarded):
            flags = ["--data", path, "--load", "base", "--global-batch-size", "8"]
            assert run(*words.split(), *flags, "--device", "cpu", "--out", "out") == 2
            assert f"{path}: cannot be read (a folder, a pipe" in capfd.readouterr().err
    os.mkdir("run")
    os.rename("pipe", "run/config.json")
    assert run("--resume", "--out", "run") == 2


def test_a_folder_that_was_misspelled_is_no_run_to_go_on_with(tmp_path):
    with pytest.raises(ConfigError, match="there is no run in this folder to go on with"):
        parse(["--resume", "--out", str(tmp_path / "typo")], 0)
    assert parse(["--resume", "--out", str(tmp_path / "typo"), "--steps", "9"], 0).steps == 9


@pytest.mark.parametrize("content", ["{", "[]", '{"lr": "fast"}', '{"steps": null}', "\xff"])
def test_a_damaged_config_of_the_run(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError):
        rules.validate(parse(["--resume", "--out", str(tmp_path)], 0), 1)


@pytest.mark.parametrize("flags", [dict(positions="alibi"), dict(sliding_window=5)])
def test_near_tokens_fit_any_length(flags):
    rules.validate(Config(seq_length=7, head_dim=12, **flags), 1)


def test_layers_that_do_not_divide_name_the_split_that_would():
    """generate.py has no virtual stages."""
    layout = Namespace(tp=1, pp=2, cp=1, ep=1, layer_split=None)
    with pytest.raises(ConfigError) as e:
        check_layout(layout, MoEConfig(3, 32, 4), 2)
    assert str(e.value).endswith("the 3 layers of this model; --layer-split 1 2 would do")
    check_layout(Namespace(tp=1, pp=2, cp=1, ep=1, layer_split=[1, 2]), MoEConfig(3, 32, 4), 2)


def test_yaml_is_no_file_of_flags(tmp_path):
    (tmp_path / "run.yaml").write_text("model:\n  lr: 3")
    with pytest.raises(
        ConfigError, match=r"YAML is read by train\.py, and that of prompts by python -m"
    ):
        parse(["--config", str(tmp_path / "run.yaml")], 0, SFTConfig)


def test_memory_bounds_are_lower_bounds():
    """For a model that is known: Llama-2 7B has 6.74 billion parameters, and takes 18 bytes of each
    in mixed precision."""
    fields, published = config.PRESETS["llama2-7b"]
    model = MoEConfig(**fields)
    alone = dict(tp=1, pp=1, dp=1, ep=1)
    assert 0.99 < sum(least_memory.parameters(model)) / published <= 1
    whole = sum(least_memory.state_parts(model, "bf16", "fp32", 0, alone))
    assert 0.99 < whole / (18 * published) <= 1
    shared = sum(least_memory.state_parts(model, "bf16", "fp32", 3, alone | dict(dp=8)))
    assert shared == pytest.approx(whole / 8, rel=1e-6)
    assert least_memory.activation_bytes(model, "bf16", 1, alone) == 4096 * 2 * (4096 * 32 + 32000)
    chunked = least_memory.activation_bytes(model, "bf16", 1, alone, head_chunk=64)
    assert chunked == 2 * (4096 * 4096 * 32 + 64 * 32000)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--num-experts 65535 --router topk", ["--num-experts 65535", "--zero-stage 3"]),
        ("--num-layers 65535 --hidden-size 8192", ["--num-layers 65535"]),
        ("--make-vocab-size-divisible-by 2147483647", ["divisible-by 2147483647"]),
        (
            "--make-vocab-size-divisible-by 3000000 --seq-length 4096",
            ["--micro-batch-size 16 --make-vocab-size-divisible-by 3000000"],
        ),
        ("--global-batch-size 1048576", ["--micro-batch-size 1 would"]),
    ],
)
def test_what_no_memory_can_hold_is_refused_at_once(tmp_path, monkeypatch, capfd, flags, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(world, "memory", lambda device, ranks: 24 * 2**30)
    assert run("--device", "cpu", *flags.split()) == 2
    error = capfd.readouterr().err.splitlines()
    assert len(error) == 1 and all(word in error[0] for word in ("GiB", *words)), error


# --- a command for each kind of training ----------------------------------------------------------


@pytest.mark.parametrize("name", training_commands.COMMANDS)
@pytest.mark.parametrize("begun_by", training_commands.COMMANDS)
def test_a_run_goes_on_by_its_command(begun_by, name, tmp_path):
    """Also one whose configuration names the file alone, as those of finetune/ once did."""
    command = training_commands.COMMANDS[begun_by].command
    before = f"{begun_by} train" if command.endswith(" train") else begun_by
    for word in (command,) if "models" in command else (command, before):
        (tmp_path / "config.json").write_text(json.dumps(dict(command=word, lr=0.5)))
        argv = ["--resume", "--out", str(tmp_path)]
        if begun_by == name:
            assert parse(argv, 0, training_commands.COMMANDS[name]).lr == 0.5
        else:
            with pytest.raises(ConfigError, match=f"goes on by python {command} --resume"):
                parse(argv, 0, training_commands.COMMANDS[name])


@pytest.mark.parametrize("command", ["", " ", "-m ", 5, None, []], ids=repr)
def test_a_command_that_is_none(command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(command=command)))
    with pytest.raises(ConfigError, match="names no command"):
        parse(["--resume", "--out", str(tmp_path)], 0, training_commands.COMMANDS["train.py"])
