"""From flags to a Config: the command line, over `--config FILE`, over an earlier run's flags.

python train.py --config run.toml --lr 0.001      --lr wins over the file
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
from run.config import LAYOUT, Config, ConfigError, flag_name

# Flags of train.py that are no property of a run: they ask what a run would do
# (planning/as_rank.py). flag -> (type, metavar, help)
QUESTION = {
    "as_rank": (
        int,
        "R",
        "train nothing; print what rank R of --of N ranks would hold, compute and send in one step",
    ),
    "of": (int, "N", "with --as-rank: the number of ranks, on a machine that need not have them"),
    "json": (str, "FILE", "with --as-rank: also write the answer there, as JSON"),
}


def parse(argv: list[str], rank: int) -> Config:
    """The configuration, as `parse_all` gives it. Raises ConfigError for a flag that asks."""
    config, question = parse_all(argv, rank)
    for name in question:
        raise ConfigError(f"{flag_name(name)}: is for train.py alone")
    return config


def parse_all(argv: list[str], rank: int) -> tuple[Config, dict]:
    """(the configuration, the flags of QUESTION that are given). Flags of the command line come
    over `--config FILE`, over OUT/config.json with --resume, over the defaults.

    Raises ConfigError for a file. For flags that argparse refuses it raises SystemExit with status
    2, and rank 0 alone prints why.
    """
    given = vars(make_parser(rank).parse_args(argv))
    question = {name: given.pop(name) for name in QUESTION if name in given}
    values = read_toml(given.pop("config")) if "config" in given else {}
    values |= given
    out = values.get("out", Config().out)
    # other types than text are refused by rules.check_types
    if values.get("resume") is True and isinstance(out, str):
        values = over_saved_flags(values, out)
    try:
        return Config(**values), question
    except TypeError as e:
        raise ConfigError(f"--config: {e}") from None


def over_saved_flags(values: dict, out: str) -> dict:
    """`values` over the flags of the run in `out`. Raises ConfigError."""
    saved = saved_flags(Path(out))
    if not saved and set(values) <= {"resume", "out"}:
        raise ConfigError(
            f"--resume --out {out}: there is no run in this folder to go on with; give the flags of"
            " one to begin it here"
        )
    # A layout is given whole: --tp 4 does not keep the --pp 2 that the run had.
    if any(name in values for name in LAYOUT):
        saved = {name: value for name, value in saved.items() if name not in LAYOUT}
    return saved | values


def make_parser(rank: int) -> argparse.ArgumentParser:
    """Flags from the fields of Config. A flag that is not given is not in the result."""

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            if rank == 0:
                terminal.say(f"train.py: {message}; --help lists the flags", error=True)
            terminal.tell_launcher(f"train.py: {message}; --help lists the flags")
            terminal.let_rank_0_speak(rank)
            sys.exit(2)

    parser = Parser(
        description="Train a GPT.", allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file of flags (num-layers = 4); flags on the command line override it",
    )
    for field in dataclasses.fields(Config):
        add_flag(parser, field)
    for name, (kind, metavar, text) in QUESTION.items():
        parser.add_argument(flag_name(name), type=kind, metavar=metavar, help=text)
    return parser


def add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
    name = flag_name(field.name)
    default = field.default_factory()
    help_text = field.metadata["help"]
    if default not in (None, [], False):
        help_text += f" (default: {default})"
    metavar = field.metadata["metavar"]
    if field.type is bool:
        parser.add_argument(name, action=argparse.BooleanOptionalAction, help=help_text)
    elif field.type in (list[str], list[int] | None):
        kind = str if field.type == list[str] else int
        parser.add_argument(name, nargs="+", type=kind, help=help_text, metavar=metavar)
    else:
        # int | None is given as int
        kind = field.type if isinstance(field.type, type) else field.type.__args__[0]
        choices = field.metadata["choices"]
        if not metavar and not choices:
            metavar = kind.__name__.upper()
        parser.add_argument(name, type=kind, help=help_text, choices=choices, metavar=metavar)


def read_toml(path: str) -> dict:
    """Flags from a TOML file, as fields of Config; tables only group them. Raises ConfigError."""
    try:
        content = tomllib.loads(json_files.read_bytes(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        why = getattr(e, "strerror", None) or e
        if path.endswith((".yaml", ".yml")):
            why = f"{why}; flags are TOML here, and --prompt-config reads NeMo's YAML of prompts"
        raise ConfigError(f"--config {path}: {why}") from None
    flat = []
    for key, value in content.items():
        flat += value.items() if isinstance(value, dict) else [(key, value)]
    fields = {name.replace("-", "_"): value for name, value in flat}
    if len(fields) < len(flat):
        names = [name.replace("_", "-") for name, _ in flat]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"--config {path}: {twice} stands there twice")
    for name in ("data", "val_data", "sft", "sft_val"):
        # data = "text.txt" is the list of one file
        if isinstance(fields.get(name), str):
            fields[name] = [fields[name]]
    known = {field.name for field in dataclasses.fields(Config)}
    unknown = [name for name in fields if name not in known]
    if unknown:
        name = unknown[0].replace("_", "-")
        raise ConfigError(f"--config {path}: {name} is no flag; --help lists the flags")
    return fields


def saved_flags(out: Path) -> dict:
    """The flags of the run in a folder, {} where there is none. Raises ConfigError."""
    try:
        if not (out / "config.json").exists():
            return {}
        saved = json_files.read(out / "config.json", dict)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"--resume: {getattr(e, 'strerror', None) or e}; to go on all the same, delete "
            f"{out}/config.json and give the flags of the run"
        ) from None
    # another version of this project may have flags that this one does not have
    known = {field.name for field in dataclasses.fields(Config)} - {"resume", "out"}
    return {name: value for name, value in saved.items() if name in known}
