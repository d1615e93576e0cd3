"""The folder of a run, `--out`: one run at a time, and never two runs in one.

    OUT/.launch        who trains into this folder; locked while that process lives
    OUT/config.json    the flags of the run
    OUT/metrics.jsonl, checkpoints/, loss.png, sample.txt, ...

The lock is advisory (`flock`): the kernel gives it back when the process that holds it dies. So a
lock is never stale, and nothing has to be cleaned up by hand. The text in the file is only for the
message:

    --out runs/default: process 4242 on node7 trains into it since 2026-11-22 09:30:15; wait for ...

Rank 0 holds the lock for all ranks of the run.

    python tests/two_runs.py --times 2        two runs started into one folder
"""

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path

CONTENT = (
    "config.json",
    "metrics.jsonl",
    "checkpoints",
    "loss.png",
    "sample.txt",
    "prompts.safetensors",
)


class RunFolderError(ValueError):
    """A folder that this run cannot use; the message says why, and what would do."""


class RunFolder:
    """OUT, created where it is missing, and locked until `close` or the end of the process."""

    def __init__(self, out: "str | Path", resume: bool, restarts: int = 0, launcher: str = ""):
        """resume: go on with the run that is in the folder. restarts: how often `launcher` has
        started these ranks again; a restarted rank goes on with what its own launcher began.
        `notice`: what to say to the user, or "". Raises RunFolderError for a folder that cannot be
        written, that another process uses, or that holds another run, or a model."""
        self.path = Path(out)
        self.file = None
        self.notice = ""
        try:
            self.open(resume, restarts, launcher)
        except RunFolderError:
            self.close()
            raise
        except (OSError, ValueError) as e:
            self.close()
            why = getattr(e, "strerror", None) or e
            raise RunFolderError(f"--out {out}: cannot be written ({why})") from None

    def open(self, resume: bool, restarts: int, launcher: str) -> None:
        if any(self.path.glob("model*.safetensors")) or (self.path / "index.json").exists():
            self.refuse(
                "holds a model, not a run; name another folder (--load starts from a model)"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path / ".launch", "a+", encoding="utf-8", errors="replace")
        self.lock(patience=10 if restarts else 0)
        self.file.seek(0)
        before = self.file.read().split("\n")[0]
        found = any(os.path.lexists(self.path / name) for name in CONTENT)
        if found and not resume and not (restarts and before == launcher):
            self.refuse("holds another run; continue it with --resume, or name another folder")
        self.file.truncate(0)
        self.file.write(f"{launcher}\n{describe_process()}\n")
        self.file.flush()

    def lock(self, patience: float) -> None:
        """Take the lock. patience: seconds to wait where another process has it."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self.file.seek(0)
                    lines = self.file.read().split("\n")
                    holder = lines[1] if len(lines) > 1 else "another process trains into it"
                    self.refuse(f"{holder}; wait for its end, stop it, or name another folder")
                time.sleep(0.1)
            except OSError as e:
                if e.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                self.notice = (
                    f"--out {self.path}: its file system has no locks; see to it that no other run "
                    "uses this folder"
                )
                return None

    def refuse(self, why: str):
        raise RunFolderError(f"--out {self.path}: {why}")

    def close(self) -> None:
        if self.file:
            # On a full disk the file's text is lost; the lock is given back all the same.
            with contextlib.suppress(OSError):
                self.file.close()
            self.file = None


def describe_process() -> str:
    """For people: which process this is, where, and since when."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} trains into it since {since}"


def launcher_name() -> str:
    """Who starts this rank: torchrun's run, Slurm's job, or the shell."""
    job = os.environ.get("SLURM_JOB_ID") or os.getppid()
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {job}"
