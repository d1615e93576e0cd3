"""A configuration file of prompt learning, JSON or YAML, in any form that NeMo's users may have.

    model:                              optional: NeMo's whole configuration has it
      language_model_path: gpt.nemo
      new_tasks: [sentiment]
      task_templates: [..]
      p_tuning: {num_layers: 2}         no virtual_prompt_style: the section that is there decides

    content, notices = read("prompts.yaml")

Keys of NeMo that mean something else than prompts (its optimizer, its loaders) are left out and
named.
"""

import json
from pathlib import Path

import yaml

from base import json_files

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


def read(path: "str | Path") -> tuple[dict, list[str]]:
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
                raise json_files.JSONError(f"{path}: data.{name}: {rule}")
        left_out += [f"data.{name}" for name in take_out(data, ELSEWHERE_IN_DATA)]
    notices = [f"{path}: not read: {', '.join(left_out)}"] if left_out else []
    if content.get("virtual_prompt_style") is None:
        style = "prompt-tuning" if only(content, "prompt_tuning", "p_tuning") else "p-tuning"
        content["virtual_prompt_style"] = style
        section = style.replace("-", "_")
        why = f"the section {section} is there" if content.get(section) else "the default"
        notices.append(f"{path}: virtual_prompt_style {style}, {why}")
    # null means absent
    return {name: value for name, value in content.items() if value is not None}, notices


def read_file(path: "str | Path") -> dict:
    if Path(path).suffix not in (".yaml", ".yml"):
        return json_files.read(path, dict)
    try:
        content = yaml.safe_load(json_files.read_bytes(path))
    except OSError as e:
        raise json_files.JSONError(f"{path}: cannot be read ({e.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise json_files.JSONError(f"{path}: not YAML ({json_files.one_line(e)})") from None
    return json_files.convert(content, dict[str, object], str(path))


def take_out(content: dict, names: set[str]) -> list[str]:
    found = sorted(names & content.keys())
    for name in found:
        del content[name]
    return found


def only(content: dict, section: str, other: str) -> bool:
    return bool(content.get(section)) and not content.get(other)
