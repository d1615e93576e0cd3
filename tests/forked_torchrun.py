"""torchrun whose ranks are forked from it: its flags, its agent and its restarts, and no rank waits
for imports.

    python tests/forked_torchrun.py --nproc-per-node 2 --max-restarts 2 train.py --steps 3
"""

import runpy
import sys
from pathlib import Path

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args


def run_rank(*argv: str) -> None:
    """What a rank does. The agent waits for it to return."""
    sys.argv = list(argv)
    try:
        if argv[0].endswith(".py"):
            runpy.run_path(argv[0], run_name="__main__")
        else:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as e:
        if e.code:
            raise


def main() -> None:
    here = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    args = parse_args([*here, *sys.argv[1:]])
    sys.path.insert(0, str(Path(__file__).parent.parent))
    # for the ranks
    import train  # noqa: F401

    config, _, _ = config_from_args(args)
    config.start_method = "fork"
    elastic_launch(config, run_rank)(args.training_script, *args.training_script_args)


if __name__ == "__main__":
    main()
