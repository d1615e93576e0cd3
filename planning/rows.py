"""Measured or published step times, as rows of JSON: which model, layout, software, machine.

    {"note": "...", "rows": [{"name": "22B full", "group": "table5",
      "model": {"num_layers": 48, "hidden_size": 6144, "num_heads": 64, "seq_length": 2048,
                "vocab_size": 51200},
      "layout": {"tp": 8, "micro_batch_size": 4, "global_batch_size": 4, "recompute": "full"},
      "software": "megatron-2022", "machine": "a100", "seconds": 1.42}]}

published_times.json has 78 of them, published_encoders.json 16 of BERT and T5. Fields of "model"
are those of a configuration (of models/, where "shape" is bert or t5), fields of "layout" those of
`Layout`; what is left out has its default.

    python planner.py predict FILE.json      a prediction for each row
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import planner
from base import json_files
from base.model_config import MoEConfig
from planning import commands
from planning.inputs import MACHINES, SOFTWARE, TRAIN, Layout, Machine, Software
from planning.memory import memory
from run import rules
from run.config import ConfigError
from run.pretraining import Config

PUBLISHED = Path(__file__).parent / "published_times.json"
ENCODERS = Path(__file__).parent / "published_encoders.json"
# Other names of a preset, in rows from elsewhere.
ALIASES = {"a100-80gb-selene": "a100"}


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
    # Why a prediction is far off, as far as the published numbers themselves show it.
    why_off: str = ""


@dataclass
class _Line:
    """A row as it stands in the file."""

    model: dict
    layout: dict
    software: str
    machine: str
    shape: str = "gpt"
    name: str = ""
    group: str = ""
    source: str = ""
    seconds: float | None = None
    why_off: str = ""

    def __post_init__(self):
        self.machine = ALIASES.get(self.machine, self.machine)
        shapes = ("gpt", "bert", "t5")
        for what, known in (("machine", MACHINES), ("software", SOFTWARE), ("shape", shapes)):
            value = getattr(self, what)
            if value not in known:
                raise ValueError(f"{what} {value!r}: not known; there are {', '.join(known)}")


@dataclass
class _File:
    rows: list[_Line] = field(default_factory=list)
    note: str = ""


def shape_class(name: str) -> type[MoEConfig]:
    if name == "gpt":
        return MoEConfig
    from models.runs import BertRun, T5Run

    return {"bert": BertRun, "t5": T5Run}[name].shape_class


def read(path: str | Path) -> list[Row]:
    """The rows of a file. Raises JSONError."""
    rows = []
    for number, line in enumerate(json_files.read(path, _File).rows):
        software, machine = SOFTWARE[line.software], MACHINES[line.machine]
        # Megatron-LM trained with dropout, which fused attention does not have.
        default = {} if software.fused_attention else {"dropout": 0.1}
        where = f"{path}: rows[{number}] {line.name}"
        shape = shape_class(line.shape)
        model = json_files.convert_exactly(default | line.model, shape, f"{where}: model")
        layout = json_files.convert_exactly(line.layout, Layout, f"{where}: layout")
        inputs = line.name, model, layout, software, machine
        rows.append(Row(*inputs, line.seconds, line.group, line.why_off))
    return rows


# --- the command ----------------------------------------------------------------------------------


def check(model: MoEConfig, layout: Layout, software: Software = TRAIN) -> None:
    """Raises ConfigError where train.py would refuse this layout of this model, and for what the
    software does not have."""
    fields = vars(layout) | {"layer_split": layout.layer_split and list(layout.layer_split)}
    config = Config(**{name: value for name, value in fields.items() if name != "dp"})
    rules.check_types(config)
    rules.check_numbers(config)
    if not 1 <= layout.dp < 2**31:
        raise ConfigError(f"dp {layout.dp}: must be at least 1 and below 2^31")
    rules.check_ranks(config, model, layout.ranks)
    rules.check_techniques(config, model, layout.ranks)
    rules.check_batch(config, model, layout.dp)
    has = {"zero_stage": software.zero_stages, "pipeline_schedule": software.schedules}
    for name, known in has.items():
        value = getattr(layout, name)
        # gpipe is as fast as 1f1b
        if value not in (*known, "gpipe"):
            have = ", ".join(map(str, known))
            raise ConfigError(f"{name} {value}: {software.name} has {have}")


def with_layer_split(model: MoEConfig, layout: Layout) -> Layout:
    """Where the stages do not divide the layers, the first stages have one more."""
    stages = layout.pp * layout.virtual_stages
    if layout.layer_split or not 0 < stages <= model.num_layers or model.num_layers % stages == 0:
        return layout
    each, more = divmod(model.num_layers, stages)
    split = (each + 1,) * more + (each,) * (stages - more)
    return dataclasses.replace(layout, layer_split=split)


def main(argv: list[str]) -> None:
    parser = commands.Parser("predict", "A JSON object for each row: name, seconds, bytes.")
    words = "rows as in planning/published_times.json"
    parser.add_argument("file", metavar="FILE.json", help=words)
    path = parser.parse_args(argv).file
    answers = []
    found = read(path)
    if not found:
        raise json_files.JSONError(f'{path}: has no rows; {{"rows": [..]}} would fit')
    for number, row in enumerate(found):
        layout = with_layer_split(row.model, row.layout)
        try:
            check(row.model, layout, row.software)
        except ConfigError as e:
            raise json_files.JSONError(f"{path}: rows[{number}] {row.name}: {e}") from None
        seconds = planner.step_time(row.machine, row.software, row.model, layout)
        nbytes = memory(row.model, layout, row.software)
        total = {"seconds": sum(seconds.values()), "bytes": round(sum(nbytes.values()))}
        answers.append({"name": row.name, **total})
    # Nothing is printed where one row is bad.
    for answer in answers:
        print(json.dumps(answer))
