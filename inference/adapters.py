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
from moe import empty_model
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
    # On the meta device: `checkpoint.write` reads each one when its file is written.
    parameters = {f"model.{n}": p.detach() for n, p in empty_model(model.config).named_parameters()}
    with huggingface.building(out) as folder:
        checkpoint.write(
            folder, 0, parameters, state, lambda name: model.read(name.removeprefix("model."))
        )
        for name, file in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / name)
    return f"{model.adapter.config.peft} in {len(model.changed)} tensors of {model.base}"


# --- the command line -----------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inference.adapters",
        description=(
            "Merge an adapter into the weights of its base; export it as a folder of Hugging"
            " Face's library peft, or import one."
        ),
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    model = "a checkpoint, or the folder of a run"
    adapter = f"what a run with --peft wrote: {model}"
    base = f"the model that the adapter is for: {model}, or a Hugging Face folder"

    add = commands.add_parser(
        "merge", help="a model with the adapter in its weights (LoRA: W + α/r B A)"
    )
    add.add_argument("base", metavar="BASE", help=f"the model of --load: {model}")
    add.add_argument("adapter", metavar="ADAPTER", help=adapter)
    add.add_argument("out", metavar="OUT", help="a new folder")
    add.set_defaults(run=lambda args: merge_adapter(args.base, args.adapter, args.out))

    add = commands.add_parser("import", help="an adapter from a folder of the library peft")
    add.add_argument("hf_dir", metavar="HF_DIR", help="adapter_config.json and a safetensors file")
    add.add_argument("out", metavar="OUT", help="a new folder")
    add.add_argument("--base", required=True, help=base)
    add.set_defaults(run=lambda args: peft_folder.import_adapter(args.hf_dir, args.base, args.out))

    add = commands.add_parser("export", help="a folder for PeftModel.from_pretrained")
    add.add_argument("adapter", metavar="ADAPTER", help=adapter)
    add.add_argument("out", metavar="HF_DIR", help="a new folder")
    add.add_argument("--base", required=True, help=base)
    add.set_defaults(run=lambda args: peft_folder.export_adapter(args.adapter, args.base, args.out))
    return parser


def main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    return huggingface.report("adapters.py", lambda: f"{args.out}: {args.run(args)}")


if __name__ == "__main__":
    terminal.command(main)
