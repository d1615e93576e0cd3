"""Measured or published step times, as rows of JSON: which model, layout, software, machine.

    {"note": "...", "rows": [{"name": "22B full", "group": "table5",
      "model": {"num_layers": 48, "hidden_size": 6144, "num_heads": 64, "seq_length": 2048,
                "vocab_size": 51200},
      "layout": {"tp": 8, "micro_batch_size": 4, "global_batch_size": 4, "recompute": "full"},
      "software": "megatron-2022", "machine": "a100", "seconds": 1.42}]}

published_times.json has 72 of them. Fields of "model" are those of a configuration, fields of
"layout" those of `Layout`; what is left out has its default.

    python planner.py predict FILE.json      a prediction for each row
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from base import json_files
from model_config import MoEConfig
from planning.inputs import MACHINES, SOFTWARE, Layout, Machine, Software

PUBLISHED = Path(__file__).parent / "published_times.json"
# other names of a preset, in rows from elsewhere
ALIASES = {"a100-80gb-selene": "a100"}


class RowError(json_files.JSONError):
    """A row that describes no training step; the message names the file, the row and the field."""


@dataclass(frozen=True)
class Row:
    """One step time. seconds: None where it is not known."""

    name: str
    model: MoEConfig
    layout: Layout
    software: Software
    machine: Machine
    seconds: float | None = None
    group: str = ""
    # why a prediction is far off, as far as the published numbers themselves show it
    why_off: str = ""


@dataclass
class _Line:
    """A row as it stands in the file."""

    model: dict
    layout: dict
    software: str
    machine: str
    name: str = ""
    group: str = ""
    source: str = ""
    seconds: float | None = None
    why_off: str = ""

    def __post_init__(self):
        self.machine = ALIASES.get(self.machine, self.machine)
        for what, known in (("machine", MACHINES), ("software", SOFTWARE)):
            value = getattr(self, what)
            if value not in known:
                raise ValueError(f"{what} {value!r}: not known; there are {', '.join(known)}")


@dataclass
class _File:
    rows: list[_Line] = field(default_factory=list)
    note: str = ""


def read(path: str | Path) -> list[Row]:
    """The rows of a file. Raises JSONError."""
    rows = []
    for number, line in enumerate(json_files.read(path, _File).rows):
        software, machine = SOFTWARE[line.software], MACHINES[line.machine]
        # Megatron-LM trained with dropout, which fused attention does not have
        default = {} if software.fused_attention else {"dropout": 0.1}
        where = f"{path}: rows[{number}] {line.name}"
        model = convert(default | line.model, MoEConfig, f"{where}: model")
        layout = convert(line.layout, Layout, f"{where}: layout")
        inputs = line.name, model, layout, software, machine
        rows.append(Row(*inputs, line.seconds, line.group, line.why_off))
    return rows


def convert(given: dict, kind: type, where: str):
    """`kind` of these fields. Raises JSONError."""
    names = [f.name for f in dataclasses.fields(kind)]
    for name in given:
        if name not in names:
            raise RowError(f"{where}: {name}: no such field; there are {', '.join(names)}")
    return json_files.convert(given, kind, where)
