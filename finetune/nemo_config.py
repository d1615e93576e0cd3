"""A configuration of prompt learning, JSON or YAML, in any form that NeMo's users may have.

    model:                              optional: NeMo's whole configuration has it
      language_model_path: gpt.nemo
      new_tasks: [sentiment]
      task_templates: [..]
      p_tuning: {num_layers: 2}         no virtual_prompt_style: the section that is there decides

    config = PromptConfig.read("prompts.yaml")

Keys of NeMo that mean something else than prompts (its optimizer, its loaders) are left out and
named.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from base import json_files
from base.json_files import JSONError
from finetune.prompt_template import Template
from prompt_tuning import PromptError, PromptTasks, PTuning
from run import yaml_config

STYLES = ("prompt-tuning", "p-tuning", "inference", "fine-tuning")
# Keys beside task_templates that are about other things; some have a flag of train.py instead.
ELSEWHERE = {
    *("seed", "optim", "global_batch_size", "micro_batch_size", "tensor_model_parallel_size"),
    *("pipeline_model_parallel_size", "encoder_seq_length", "gradient_as_bucket_view", "precision"),
    *("nemo_path", "save_nemo_on_validation_end", "report_validation_metric", "validation_metric"),
    *("sequence_parallel", "resume_from_checkpoint", "pretrained_checkpoint", "megatron_amp_O2"),
    *("activations_checkpoint_granularity", "activations_checkpoint_method"),
    *("activations_checkpoint_num_layers", "pipeline_model_parallel_split_rank", "tokenizer"),
}
# The same in data.
ELSEWHERE_IN_DATA = {
    *("num_workers", "pin_memory", "load_cache", "train_cache_data_path"),
    *("validation_cache_data_path", "test_cache_data_path"),
}
# Settings with one value here: that value is accepted, any other is refused.
AS_HERE = {"add_bos": False, "add_eos": True, "min_seq_length": 1}


# --- the file -------------------------------------------------------------------------------------


def read_fields(path: str | Path) -> tuple[dict, list[str]]:
    """(the fields of PromptConfig, what to tell the user). Raises JSONError."""
    content = read_file(path)
    left_out = []
    if isinstance(content.get("model"), dict):
        left_out += sorted(content.keys() - {"model"})
        content = content["model"]
    left_out += take_out(content, ELSEWHERE)
    if isinstance(content.get("data"), dict):
        data = content["data"]
        for name, value in AS_HERE.items():
            if name in data and data.pop(name) != value:
                rule = f"only {json.dumps(value)} is supported here"
                raise JSONError(f"{path}: data.{name}: {rule}")
        left_out += [f"data.{name}" for name in take_out(data, ELSEWHERE_IN_DATA)]
    notices = [f"{path}: not read: {', '.join(left_out)}"] if left_out else []
    if content.get("virtual_prompt_style") is None:
        only_a_table = content.get("prompt_tuning") and not content.get("p_tuning")
        style = "prompt-tuning" if only_a_table else "p-tuning"
        content["virtual_prompt_style"] = style
        section = style.replace("-", "_")
        why = f"the section {section} is there" if content.get(section) else "the default"
        notices.append(f"{path}: virtual_prompt_style {style}, {why}")
    # NeMo's own files name tasks there, for whoever fills in a path
    if content.get("existing_tasks") and content.get("restore_path", "") is None:
        tasks = content.pop("existing_tasks")
        notices.append(f"{path}: not read: existing_tasks {tasks}, for restore_path is null")
    # null means absent
    return {name: value for name, value in content.items() if value is not None}, notices


def read_file(path: str | Path) -> dict:
    if Path(path).suffix not in (".yaml", ".yml"):
        return json_files.read(path, dict)
    return yaml_config.read_file(path)


def take_out(content: dict, names: set[str]) -> list[str]:
    found = sorted(names & content.keys())
    for name in found:
        del content[name]
    return found


# --- what is in it --------------------------------------------------------------------------------


class PromptTuning(Struct, forbid_unknown_fields=True):
    """How the tables of new tasks are initialised, one entry for each new task."""

    # random; or text: the embeddings of a text, repeated until the table is full
    new_prompt_init_methods: list[str] = field(default_factory=list)
    new_prompt_init_text: list[str | None] = field(default_factory=list)


class Data(Struct, forbid_unknown_fields=True):
    """Files of JSON lines."""

    train_ds: list[str] = field(default_factory=list)
    validation_ds: list[str] = field(default_factory=list)
    # null: the model's context
    max_seq_length: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    shuffle: bool = True


class PromptConfig(Struct, forbid_unknown_fields=True):
    """Which prompts are learned, for which data. Raises PromptError."""

    task_templates: list[Template]
    # fine-tuning is elsewhere in NeMo: no virtual tokens, the whole model is trained
    virtual_prompt_style: str = "p-tuning"
    language_model_path: str | None = None
    # a prompt file, with the existing tasks
    restore_path: str | None = None
    existing_tasks: list[str] = field(default_factory=list)
    new_tasks: list[str] = field(default_factory=list)
    prompt_tuning: PromptTuning = field(default_factory=PromptTuning)
    p_tuning: PTuning = field(default_factory=PTuning)
    data: Data = field(default_factory=Data)

    @classmethod
    def read(cls, path: str | Path, say: Callable[[str], None] | None = None) -> "PromptConfig":
        """say(text): of what is left out, and of a style that the file does not name."""
        try:
            content, notices = read_fields(path)
            config = json_files.convert(content, cls, str(path))
        except JSONError as e:
            raise PromptError(f"--config {e}") from None
        for notice in notices if say else []:
            say(f"--config {notice}")
        return config

    @classmethod
    def of(cls, content: dict) -> "PromptConfig":
        return json_files.convert(content, cls, "the configuration")

    @property
    def templates(self) -> dict[str, Template]:
        return {template.taskname: template for template in self.task_templates}

    @property
    def tasks(self) -> list[str]:
        return [*self.existing_tasks, *self.new_tasks]

    @property
    def learned(self) -> bool:
        """Whether prompts are learned, and the model is frozen."""
        return self.virtual_prompt_style in ("prompt-tuning", "p-tuning")

    @property
    def prompt_tasks(self) -> PromptTasks:
        """What prompt_tuning.py applies to a model."""
        templates = self.templates
        tokens = {task: templates[task].total_virtual_tokens for task in self.tasks}
        encoder = self.p_tuning if self.virtual_prompt_style == "p-tuning" else None
        return PromptTasks(tokens, self.new_tasks if self.learned else [], encoder)

    @property
    def init_texts(self) -> dict[str, str]:
        """{task: text} of the new tables that are initialised from a text."""
        if self.virtual_prompt_style != "prompt-tuning":
            return {}
        settings = self.prompt_tuning
        how = zip(self.new_tasks, settings.new_prompt_init_methods, settings.new_prompt_init_text)
        return {task: text for task, method, text in how if method == "text"}

    def __post_init__(self):
        for fits, problem in self.rules():
            if not fits:
                raise PromptError(problem)

    def rules(self) -> Iterator[tuple[bool, str]]:
        """(whether the configuration keeps a rule, what to say where it does not) of each rule."""
        style, new, existing = self.virtual_prompt_style, self.new_tasks, self.existing_tasks
        rule = f"must be one of {', '.join(STYLES)}"
        yield style in STYLES, f"virtual_prompt_style {style!r}: {rule}"
        known = sorted(self.templates)
        is_unique = len(known) == len(self.task_templates)
        yield is_unique, "task_templates: two have the same taskname"
        for name in ("existing_tasks", "new_tasks"):
            for task in getattr(self, name):
                problem = f"{name}: {task!r} has no template; there are {known}"
                yield task in known, problem
        yield (
            len(set(self.tasks)) == len(self.tasks),
            f"existing_tasks {existing}, new_tasks {new}: a task stands there twice",
        )
        for task in self.tasks if style != "inference" else []:
            n = self.templates[task].total_virtual_tokens
            problem = f"{task!r} has {n} virtual tokens, and virtual_prompt_style is {style}"
            yield self.learned == (n > 0), problem
        yield bool(new), "new_tasks is empty: name the tasks to learn"
        yield (
            not existing or bool(self.restore_path),
            f"existing_tasks {existing}: restore_path must name the prompt file that has them",
        )
        if style == "prompt-tuning":
            yield from self.rules_of_init()

    def rules_of_init(self) -> Iterator[tuple[bool, str]]:
        methods = self.prompt_tuning.new_prompt_init_methods
        texts = self.prompt_tuning.new_prompt_init_text
        yield (
            len(methods) == len(self.new_tasks) and {*methods} <= {"text", "random"},
            f"prompt_tuning.new_prompt_init_methods {methods}: one of text and random for each of"
            f" new_tasks {self.new_tasks}",
        )
        for task, method, text in itertools.zip_longest(self.new_tasks, methods, texts):
            yield (
                method != "text" or bool(text),
                f"prompt_tuning.new_prompt_init_text {texts}: {task!r} begins from a text, and none"
                " stands in its place",
            )
