"""generation_config.json: how the authors of a model sample from it.

A chat model is published with the temperature, top-k and top-p that it answers best with. They are
generate.py's defaults for that model, as they are in transformers; a flag comes first, and one line
says what came from the file:

    {"do_sample": true, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [5, 7]}

    --temperature 0.6 --top-k 50 (transformers' default) --top-p 0.9: from HF_DIR/..

Without `do_sample` true decoding is greedy, temperature 0, whatever else the file says. A file that
only has ids says nothing about sampling: transformers would decode greedily then, and here the
flags keep their own defaults. The ids belong to the tokenizer (run/tokenizer.py).

Not covered: beam search and penalties for tokens that were there before; the line names them.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from base import json_files
from inference import huggingface
from run import checkpoint
from run.checkpoint import beside

FILE = "generation_config.json"
# The flags of generate.py, for a model without such a file.
DEFAULTS = {"max_tokens": 300, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
# What would change the text and is not here, with the value that changes nothing.
LEFT_OUT = dict(repetition_penalty=1.0, encoder_repetition_penalty=1.0, typical_p=1.0, num_beams=1)
LEFT_OUT |= dict(no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0, min_p=0.0, min_length=0)
LEFT_OUT |= dict(epsilon_cutoff=0.0, eta_cutoff=0.0, min_new_tokens=0, penalty_alpha=0.0)
LEFT_OUT |= dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"))
LEFT_OUT |= dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "stop_strings", "top_h"))
LEFT_OUT |= dict.fromkeys(("exponential_decay_length_penalty", "sequence_bias", "guidance_scale"))
# The defaults of transformers, for a file that has some settings and not these.
USUAL = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
# The least temperature of inference.sampling.check_options.
COLDEST = 0.001


@dataclass
class GenerationConfig:
    """The settings in the file that generate.py has. None: it does not say."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None

    def flags(self) -> dict[str, float]:
        """Name of a flag -> its value here, None where the file does not say."""
        told = {name: getattr(self, name) for name in USUAL if getattr(self, name) is not None}
        flags = {"max_tokens": self.max_new_tokens}
        if told:
            flags |= USUAL | told
            # Published files have 1e-06 for greedy decoding.
            if not flags.pop("do_sample") or flags["temperature"] < COLDEST:
                flags["temperature"] = 0.0
        return flags


def file_of(path: Path | str) -> Path | None:
    """The file of the model in a checkpoint, a run or a Hugging Face folder. Raises
    CheckpointError."""
    if huggingface.is_folder(path):
        file = Path(path) / FILE
        return file if file.is_file() else None
    return beside(checkpoint.find(path), FILE)


def note(name: str, given: dict[str, float], content: dict) -> str:
    """Why a flag has another value than the file. given: of GenerationConfig.flags."""
    if name == "temperature" and given[name] == 0:
        return "" if content.get("do_sample") else " (do_sample is not true)"
    return " (transformers' default)" if name in USUAL and content.get(name) is None else ""


def set_defaults(args: argparse.Namespace) -> str:
    """Give the flags of DEFAULTS that are None a value: that of the model's file, or their own.
    Returns a line that says what came from the file; empty where nothing did. Raises ConfigError or
    CheckpointError."""
    file = file_of(args.checkpoint)
    content, given, left_out = {}, {}, []
    if file:
        content = json_files.read(file, dict)
        given = json_files.convert(content, GenerationConfig, str(file)).flags()
        left_out = [
            f"{name} {content[name]}"
            for name, neutral in LEFT_OUT.items()
            if content.get(name) not in (None, neutral)
        ]
    taken = []
    for name, default in DEFAULTS.items():
        if getattr(args, name) is not None:
            continue
        says = given.get(name) is not None
        setattr(args, name, given[name] if says else default)
        # Greedy decoding has no use for the others.
        if says and (name not in ("top_k", "top_p") or args.temperature != 0):
            taken.append(f"--{name.replace('_', '-')} {given[name]}{note(name, given, content)}")
    line = f"{' '.join(taken)}: from {file}" if taken else ""
    if left_out:
        line = f"{line or file}; not in generate.py: {', '.join(left_out)}"
    return line
