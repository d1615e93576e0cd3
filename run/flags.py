"""From flags to a configuration: command line, over `--config FILE`, over an earlier run's flags.

python train.py --config run.toml --lr 0.001      --lr wins over the file
python train.py --config gpt.yaml                 a training YAML of NeMo (run/yaml_config.py)
python train.py --resume --out runs/default       the flags in runs/default/config.json

# run.toml: names as on the command line; tables only group them
[model]
num-layers = 4
"""

import argparse
import dataclasses
import sys
import tomllib
from pathlib import Path

from base import json_files, terminal
from run.config import LAYOUT, ConfigError, RunConfig, flag_name, name_of
from run.pretraining import Config

# Flags that ask what a run would do (planning/as_rank.py): flag -> (type, metavar, help)
QUESTION = {
    "as_rank": (
        int,
        "R",
        "train nothing; print what rank R of --of N ranks would hold, compute and send in one step",
    ),
    "of": (int, "N", "with --as-rank: the number of ranks, on a machine that need not have them"),
    "json": (str, "FILE", "with --as-rank: also write the answer there, as JSON"),
}


def parse(argv: list[str], rank: int, config_class: type[RunConfig] = Config) -> RunConfig:
    """The configuration of `parse_all`. Raises ConfigError for a flag of QUESTION."""
    config, question = parse_all(argv, rank, config_class)
    for name in question:
        raise ConfigError(f"{flag_name(name)}: is for train.py alone")
    return config


def parse_all(
    argv: list[str], rank: int, config_class: type[RunConfig], ranks: int = 1
) -> tuple[RunConfig, dict]:
    """(the configuration of this type, the flags of QUESTION that are given). The command line wins
    over `--config FILE`, that over OUT/config.json with --resume, and that over the defaults.

    Raises ConfigError for a file. Where argparse refuses a flag, rank 0 prints why, and all raise
    SystemExit with status 2."""
    given = vars(make_parser(rank, config_class).parse_args(argv))
    question = {name: given.pop(name) for name in QUESTION if name in given}
    values = {}
    path = given.pop("config", None)
    if path and path.endswith((".yaml", ".yml")) and config_class is Config:
        # Loaded only for such a file.
        from run import yaml_config

        ranks = question.get("of", ranks)
        values = yaml_config.read(path, given, rank, ranks)
    elif path:
        values = read_toml(path, config_class)
    values |= given
    out = values.get("out", config_class().out)
    # Other types than text are refused by rules.check_types.
    if values.get("resume") is True and isinstance(out, str):
        values = over_saved_flags(values, out, config_class)
    try:
        return config_class(**values), question
    except TypeError as e:
        raise ConfigError(f"--config: {e}") from None


def over_saved_flags(values: dict, out: str, config_class: type[RunConfig]) -> dict:
    """The flags of the run in `out`, replaced by `values`. Raises ConfigError."""
    saved = saved_flags(Path(out), config_class)
    if not saved and set(values) <= {"resume", "out"}:
        rule = "there is no run in this folder to go on with; give the flags of one to begin it"
        raise ConfigError(f"--resume --out {out}: {rule}")
    # A layout is given whole: --tp 4 does not keep the --pp 2 that the run had.
    if any(name in values for name in LAYOUT):
        saved = {name: value for name, value in saved.items() if name not in LAYOUT}
    return saved | values


def make_parser(rank: int, config_class: type[RunConfig] = Config) -> argparse.ArgumentParser:
    """A parser with a flag for each field of a configuration. Its result has only given flags."""

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            line = f"{config_class.name_in_messages()}: {message}; --help lists the flags"
            if rank == 0:
                terminal.say(line, error=True)
            terminal.tell_launcher(line)
            terminal.let_rank_0_speak(rank)
            sys.exit(2)

    parser = Parser(
        prog=f"python {config_class.command}",
        description=config_class.purpose,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    fields = dataclasses.fields(config_class)
    # The configuration of prompts has this name too.
    if not any("--config" in field.metadata["names"] for field in fields):
        parser.add_argument(
            "--config",
            metavar="FILE",
            help="a TOML file of flags (num-layers = 4), with train.py also a YAML of NeMo or"
            " Megatron-LM; flags on the command line override it",
        )
    for field in fields:
        add_flag(parser, field)
    if config_class.supports_as_rank:
        for name, (of, metavar, text) in QUESTION.items():
            parser.add_argument(flag_name(name), type=of, metavar=metavar, help=text)
    return parser


def names_of(config_class: type[RunConfig]) -> set[str]:
    """The fields that are flags."""
    return {field.name for field in dataclasses.fields(config_class)}


def add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
    names = field.metadata["names"] or [flag_name(field.name)]
    default = field.default_factory()
    help_text = field.metadata["help"]
    if default not in (None, [], False):
        help_text += f" (default: {default})"
    metavar = field.metadata["metavar"]
    if field.type in (bool, bool | None):
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, help=help_text)
    elif field.type in (list[str], list[int] | None):
        value_type = str if field.type == list[str] else int
        parser.add_argument(*names, nargs="+", type=value_type, help=help_text, metavar=metavar)
    else:
        # A field of int | None is given as int.
        value_type = field.type if isinstance(field.type, type) else field.type.__args__[0]
        choices = field.metadata["choices"]
        if not metavar and not choices:
            metavar = value_type.__name__.upper()
        shown = {"help": help_text, "choices": choices, "metavar": metavar}
        parser.add_argument(*names, dest=field.name, type=value_type, **shown)


def read_toml(path: str, config_class: type[RunConfig]) -> dict:
    """The flags in a TOML file, as fields of a configuration. Raises ConfigError."""
    try:
        content = tomllib.loads(json_files.read_bytes(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        why = getattr(e, "strerror", None) or e
        if path.endswith((".yaml", ".yml")):
            reader = "python -m finetune.prompt_tuning"
            why = f"{why}; YAML is read by train.py, and that of prompts by {reader}"
        raise ConfigError(f"--config {path}: {why}") from None
    flat = []
    for key, value in content.items():
        flat += value.items() if isinstance(value, dict) else [(key, value)]
    fields = {name.replace("-", "_"): value for name, value in flat}
    names = [name.replace("_", "-") for name, _ in flat]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--config {path}: {name} stands there twice")
        if name.replace("-", "_") not in names_of(config_class):
            raise ConfigError(f"--config {path}: {name} is no flag; --help lists the flags")
    for name in ("data", "val_data"):
        # A text, data = "text.txt", is the list of one file.
        if isinstance(fields.get(name), str):
            fields[name] = [fields[name]]
    return fields


def saved_flags(out: Path, config_class: type[RunConfig]) -> dict:
    """The flags of the run in a folder; {} without a run. Raises ConfigError."""
    try:
        if not (out / "config.json").exists():
            return {}
        saved = json_files.read(out / "config.json", dict)
    except (OSError, ValueError) as e:
        advice = f"to go on all the same, delete {out}/config.json and give the flags of the run"
        raise ConfigError(f"--resume: {getattr(e, 'strerror', None) or e}; {advice}") from None
    begun_by = saved.pop("command", Config.command)
    name = name_of(begun_by) if isinstance(begun_by, str) else ""
    if not name:
        raise ConfigError(f"--resume: {out}/config.json names no command, but {begun_by!r}")
    if name != name_of(config_class.command):
        command = name if name == "train.py" else f"-m finetune.{name.removesuffix('.py')}"
        if begun_by.startswith("-m "):
            command = begun_by
        go_on = f"python {command} --resume --out {out}"
        rule = f"this run was begun by {name}, and goes on by {go_on}"
        raise ConfigError(f"--resume --out {out}: {rule}")
    # Another version of this project may have flags that this one does not have.
    known = names_of(config_class) - {"resume", "out"}
    return {name: value for name, value in saved.items() if name in known}
