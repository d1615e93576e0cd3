r"""What is done with a trained adapter: merge it into its base; folders of the library peft.

    python -m inference.adapters merge BASE ADAPTER OUT         W + α/r B A, in the base's own shape
    python -m inference.adapters export ADAPTER HF_DIR --base BASE
    python -m inference.adapters import HF_DIR OUT --base BASE   folders of peft: LoRA and IA3

merge holds one parameter of the base in memory at a time, and rounds W' = W + α/r B A to float32.
Where W' is larger than W, the last bits of W are lost, so W' - α/r B A is only near W. A merged
model does not give its base back: keep the folder of the base.

Not covered: several adapters merged into one, with weights.
"""

import argparse
import shutil
from pathlib import Path

from base import terminal
from inference import huggingface, peft_folder
from inference.merged import MergedModel
from run import checkpoint
from run.checkpoint import CheckpointError, tokenizer_record, verify_tokenizer


def merge_adapter(base: str, path: str, out: str) -> str:
    """Write the merged model as a checkpoint at `out`, without optimizer moments. Returns a
    summary. Raises CheckpointError or HuggingFaceError."""
    if huggingface.is_folder(base):
        raise CheckpointError(
            f"{base} is a Hugging Face folder; python -m inference.huggingface import {base} CKPT"
            " makes a checkpoint of it, which can be a base"
        )
    model = MergedModel(base, path)
    checkpoint.verify(model.base)
    files = {}
    hashes = {}
    # An adapter of conversations has a chat template, which its base may lack.
    for source in (model.base, model.adapter.path):
        index = checkpoint.read_index(source)
        files |= verify_tokenizer(source, index)
        hashes |= tokenizer_record(source, index).files
    run = dict(model.index["config"])
    if "tokenizer.json" in files:
        run["tokenizer"] = str(Path(out).resolve() / "tokenizer.json")
    state = huggingface.untrained(run, model.index["model"])
    state["tokenizer"] = model.index.get("tokenizer", {}) | {"files": hashes}
    with huggingface.building(out) as folder:
        huggingface.write_checkpoint(folder, model.config, state, model.read)
        for name, file in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / name)
    return f"{model.adapter.config.peft} in {len(model.changed)} tensors of {model.base}"


# --- the command line -----------------------------------------------------------------------------


MODEL = "a checkpoint, or the folder of a run"
HELP = {
    "base": f"the model that the adapter is for: {MODEL}; with peft also a Hugging Face folder",
    "adapter": f"what a run with --peft wrote: {MODEL}",
    "hf_dir": "adapter_config.json and a safetensors file",
    "out": "a new folder",
}
# Command -> (what it does, its arguments, for --help).
COMMANDS = {
    "merge": (merge_adapter, "base adapter out", "a model with the adapter in its weights"),
    "export": (peft_folder.export_adapter, "adapter --base out", "a folder for PeftModel"),
    "import": (peft_folder.import_adapter, "hf_dir --base out", "an adapter from such a folder"),
}


def make_parser() -> argparse.ArgumentParser:
    about = "Merge an adapter into its base; or folders of Hugging Face's library peft."
    parser = argparse.ArgumentParser(prog="python -m inference.adapters", description=about)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, arguments, what) in COMMANDS.items():
        add = commands.add_parser(name, help=what).add_argument
        for argument in arguments.split():
            known = HELP[argument.removeprefix("--")]
            if argument.startswith("--"):
                add(argument, required=True, help=known)
            else:
                add(argument, metavar=argument.upper(), help=known)
    return parser


def main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    run, arguments, _ = COMMANDS[args.command]
    given = [getattr(args, name.removeprefix("--")) for name in arguments.split()]
    return huggingface.report("adapters.py", lambda: f"{args.out}: {run(*given)}")


if __name__ == "__main__":
    terminal.command(main)
