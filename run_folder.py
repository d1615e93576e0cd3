"""The folder of a run, `--out`: one run at a time, and never two runs in one.

    OUT/.launch        who trains into this folder: launcher, host, process. Locked while the process lives
    OUT/config.json    the flags of the run
    OUT/metrics.jsonl, checkpoints/, loss.png, sample.txt, ...

The lock is advisory (`flock`): the kernel gives it back when the process that holds it dies, however it dies. So a
lock is never stale, and nothing has to be cleaned up by hand. The text in the file is only for the message:

    train.py: --out runs/default: process 4242 on node7 trains into it since 2026-11-22 09:30:15; wait for its end, ...

Rank 0 holds the lock for all ranks of the run.
"""

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path

CONTENT = ("config.json", "metrics.jsonl", "checkpoints", "loss.png", "sample.txt", "prompts.safetensors")


class RunFolderError(ValueError):
    """A folder that this run cannot use; the message says why, and what would do."""


class RunFolder:
    """OUT, created where it is missing, and locked until `close` or the end of the process."""

    def __init__(self, out: "str | Path", resume: bool, restarts: int = 0, launcher: str = ""):
        """resume: go on with the run that is in the folder. restarts: how often `launcher` has started these ranks
        again; a restarted rank goes on with what its own launcher began. Raises RunFolderError for a folder that
        cannot be written, that another process uses, or that holds another run, or a model. `notice`: what to say."""
        self.path, self.file, self.notice = Path(out), None, ""
        try:
            if any(self.path.glob("model*.safetensors")) or (self.path / "index.json").exists():
                raise RunFolderError(f"--out {out}: holds a model, not a run; name another folder (--load starts from a checkpoint)")
            # Looked for before anything is made: a folder that is refused stays as it is.
            found = any(os.path.lexists(self.path / name) for name in CONTENT)
            self.path.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path / ".launch", "a+", encoding="utf-8", errors="replace")
            self.lock(patience=10 if restarts else 0)
            self.file.seek(0)
            before = self.file.read().split("\n")[0]
            # Again, because another run may have come and gone in between.
            found = found or any(os.path.lexists(self.path / name) for name in CONTENT)
            if found and not resume and not (restarts and before == launcher):
                raise RunFolderError(f"--out {out}: holds another run; continue it with --resume, or name another folder")
            self.file.truncate(0)
            self.file.write(f"{launcher}\n{describe_process()}\n")
            self.file.flush()
        except (OSError, ValueError) as e:
            self.close()
            if isinstance(e, RunFolderError):
                raise
            raise RunFolderError(f"--out {out}: cannot be written ({getattr(e, 'strerror', None) or e})") from None

    def lock(self, patience: float) -> None:
        """Take the lock; where another process has it, wait `patience` seconds. Raises RunFolderError."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self.file.seek(0)
                    holder = (self.file.read().split("\n") + [""])[1] or "another process trains into it"
                    raise RunFolderError(
                        f"--out {self.path}: {holder}; wait for its end, stop it, or name another folder"
                    ) from None
                time.sleep(0.1)
            except OSError as e:
                if e.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    self.notice = f"--out {self.path}: its file system has no locks; see to it that no other run uses this folder"
                    return None
                raise

    def close(self) -> None:
        if self.file:
            # What is still to be written, on a full disk, is lost; the lock is given back all the same.
            with contextlib.suppress(OSError):
                self.file.close()
            self.file = None


def describe_process() -> str:
    """For people: which process this is, where, and since when."""
    return f"process {os.getpid()} on {socket.gethostname()} trains into it since {time.strftime('%Y-%m-%d %H:%M:%S')}"


def launcher_name() -> str:
    """Who starts this rank: torchrun's run, Slurm's job, or the shell."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {os.environ.get('SLURM_JOB_ID') or os.getppid()}"
