"""The folder of a run, `--out`: locked by one run at a time, and holding one run.

    OUT/.launch        which process trains into this folder; locked while that process lives
    OUT/config.json    the flags of the run
    OUT/metrics.jsonl, checkpoints/, loss.png, sample.txt, ...

Rank 0 holds the lock for all ranks of its run. The lock is advisory (`flock`), and the kernel
releases it when the process dies, so none is left behind. The text in the file is for the message
to a second run:

    --out runs/default: process 4242 on node7 trains into it since 2026-11-22 09:30:15; wait for ...

    python tests/two_runs.py --times 2        starts two runs into one folder
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from base.errors import InputError, cause
from run.tokenizer import save_files

# A folder with one of these holds a run.
CONTENT = "config.json metrics.jsonl checkpoints loss.png sample.txt prompts.safetensors".split()


class RunFolderError(InputError):
    """A folder that this run cannot use. The message says why, and what would help."""


class RunFolder:
    """OUT, created if missing, and locked until `close` or the end of the process."""

    def __init__(self, out: "str | Path", resume: bool, restarts: int = 0, launcher: str = ""):
        """resume: continue the run in the folder. restarts: how often `launcher` has restarted
        these ranks, which then continue what it began. `notice`: a message to the user, or "".
        Raises RunFolderError if the folder cannot be written, is used by another process, or holds
        another run or a model."""
        self.path = Path(out)
        self.file = None
        self.notice = ""
        try:
            self.open(resume, restarts, launcher)
        except (OSError, ValueError) as e:
            self.close()
            if isinstance(e, RunFolderError):
                raise
            raise RunFolderError(f"--out {out}: cannot be written ({cause(e)})") from None

    def open(self, resume: bool, restarts: int, launcher: str) -> None:
        """Check, lock and sign the folder. Arguments and errors as in `__init__`."""
        if any(self.path.glob("model*.safetensors")) or (self.path / "index.json").exists():
            self.refuse("holds a model, not a run; name another folder (--load starts from it)")
        if self.path.is_symlink() and not self.path.exists():
            self.refuse(f"is a link to {os.readlink(self.path)}, which does not exist; create it")
        self.path.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path / ".launch", "a+", encoding="utf-8")
        # A restarted rank may come before the killed one has released the lock.
        self.lock(patience=10 if restarts else 0)
        last_launcher, _ = self.signature()
        is_restart = restarts and last_launcher == launcher
        if self.holds_a_run() and not resume and not is_restart:
            self.refuse("holds another run; continue it with --resume, or name another folder")
        self.file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        process = f"process {os.getpid()} on {socket.gethostname()} trains into it since {since}"
        self.file.write(f"{launcher}\n{process}\n")
        self.file.flush()

    def signature(self) -> tuple[str, str]:
        """The launcher that has signed the folder, and its process in words."""
        self.file.seek(0)
        lines = self.file.read().splitlines()
        return (lines[0], lines[1]) if len(lines) > 1 else ("", "another process uses it")

    def holds_a_run(self) -> bool:
        """True if the folder holds a run. One that ended before its first step has left its flags
        and an empty metrics.jsonl, which the next one may replace."""
        names = {name for name in CONTENT if os.path.lexists(self.path / name)}
        if names == {"config.json", "metrics.jsonl"}:
            return (self.path / "metrics.jsonl").stat().st_size > 0
        return bool(names)

    def lock(self, patience: float) -> None:
        """Take the lock. patience: seconds to wait while another process has it."""
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    _, holder = self.signature()
                    self.refuse(f"{holder}; wait for its end, stop it, or name another folder")
                time.sleep(0.1)
            except OSError as e:
                if e.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                rule = "its file system has no locks; make sure that no other run uses this folder"
                self.notice = f"--out {self.path}: {rule}"
                return

    def refuse(self, reason: str):
        raise RunFolderError(f"--out {self.path}: {reason}")

    def close(self) -> None:
        if self.file:
            # On a full disk the text is lost, and the lock is released.
            with contextlib.suppress(OSError):
                self.file.close()
            self.file = None


def begin(out: Path, config, tokenizer) -> None:
    """Write config.json and the tokenizer, where generate.py finds them. config: a RunConfig.
    Raises RunFolderError."""
    try:
        # Whole or as it was: a full disk must not truncate the flags of a run.
        flags = {"command": config.command} | dataclasses.asdict(config)
        (out / "config.tmp").write_text(json.dumps(flags, indent=1), encoding="utf-8")
        os.replace(out / "config.tmp", out / "config.json")
        if tokenizer.files:
            save_files(tokenizer.files, out)
    except OSError as e:
        raise RunFolderError(f"--out {out}: cannot be written ({e.strerror})") from None


def launcher_name() -> str:
    """The name of what starts this rank, equal after a restart: torchrun's run, and Slurm's job or
    the parent process."""
    job = os.environ.get("SLURM_JOB_ID") or os.getppid()
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {job}"
