"""`python -m inference.huggingface`: import and export of Hugging Face folders."""

import argparse
import re

from inference.architectures import HuggingFaceError
from inference.hf_config import architecture_of
from inference.huggingface import DTYPES, export_folder, import_folder, report
from inference.merged import MergedModel
from moe import empty_model
from sharding import num_parameters


def size(text: str) -> int:
    """Bytes, from a number with or without a unit: 5GB, 500MB, 5000000000."""
    parts = re.fullmatch(r"([1-9]\d*)([KMGT]?)B?", text.upper())
    if not parts:
        raise argparse.ArgumentTypeError(f"{text} is not a size like 5GB or 5000000000")
    number, unit = parts.groups()
    return int(number) * 1000 ** ["", "K", "M", "G", "T"].index(unit)


def make_parser() -> argparse.ArgumentParser:
    about = "The same weights as Hugging Face folders, in and out."
    parser = argparse.ArgumentParser(prog="python -m inference.huggingface", description=about)
    flag = parser.add_argument
    flag("command", choices=("import", "export"))
    flag("source", help="to import: a Hugging Face folder; to export: a checkpoint or a run")
    flag("target", help="a new folder")
    flag("--dtype", choices=tuple(DTYPES), help="of an exported model (default: fp32)")
    flag("--max-shard-size", type=size, help="of exported files, like 5GB, the default")
    flag("--adapter", help="a run with --peft, whose LoRA or IA3 is merged into the export")
    return parser


def convert(args: argparse.Namespace) -> str:
    """Returns what was written. Raises HuggingFaceError, CheckpointError or OSError."""
    if args.command == "import":
        if args.adapter:
            raise HuggingFaceError(
                "--adapter: is for export; inference.adapters import has its own"
            )
        if args.dtype or args.max_shard_size:
            name = "--dtype" if args.dtype else "--max-shard-size"
            raise HuggingFaceError(f"{name}: is for export; an imported model is fp32")
        config = import_folder(args.source, args.target)
    else:
        merged = MergedModel(args.source, args.adapter) if args.adapter else None
        sizes = args.dtype or "fp32", args.max_shard_size or size("5GB")
        config = export_folder(args.source, args.target, *sizes, merged)
    count = num_parameters(empty_model(config))
    return f"{args.target}: {architecture_of(config).name}, {count:,} parameters"


def main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    return report("huggingface.py", lambda: convert(args))
