"""How a command prints and ends, on streams that may be closed, full, or limited to ASCII.

A run must not end when its output is no longer read: `python train.py | head` closes the pipe after
ten lines, or the disk of a log file is full. Then further lines are dropped, one line on standard
error says so, and the run goes on. metrics.jsonl has every step.

    terminal.prepare()          at the start of a command
    terminal.say("step 1")      prints a line, flushed
    terminal.refuse("why")      ends the process with status 2 and one line on standard error
    terminal.run(main)          calls main() and does all of this; the last line of a file
    terminal.command(main)      does the same for main(argv), which may be a rank of torchrun

    python train.py | head -n 2        trains to its end
"""

import contextlib
import ctypes
import errno
import gc
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from base.errors import InputError


def prepare() -> None:
    """Make standard input, output and error usable. A closed one becomes /dev/null. Otherwise the
    next opened file, perhaps a checkpoint, would get its number, and output of libraries would go
    into that file."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # open() takes the lowest free number, and the lower ones are in use by now.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
        # Bytes that are not UTF-8 are read without an error, and refused where a prompt is read. A
        # character that the terminal lacks is printed as its code.
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace" if number else "surrogateescape")


def say(*words, error: bool = False, end: str = "\n") -> None:
    """Print a line, flushed; if the stream is gone, drop this line and all later ones."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(*words, file=stream, end=end, flush=True)
    except OSError as e:
        mute(stream)
        if not error:
            why = f"standard output is gone ({e.strerror}): the run goes on without it"
            say(why, error=True)


def one_line(message) -> str:
    """A message as one line: line ends and other unprintable characters become their codes."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in str(message)
    )


def let_rank_0_speak(rank: int) -> None:
    """Wait on all ranks but 0 when all end because of bad input: the launcher stops all ranks as
    soon as one has ended, and rank 0 must print the message first."""
    if rank:
        time.sleep(3)


def tell_launcher(message: str) -> None:
    """Leave a message for torchrun, which repeats it in the report at its end."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        word = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": word}), encoding="utf-8")


def refuse(message: str):
    """End the process with status 2 and one line on standard error."""
    say(one_line(message), error=True)
    sys.exit(2)


# The errors of a stream that is closed or full.
STREAM_ERRORS = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


def run(main) -> None:
    """End the process with the status that main() returns; without a traceback with 2 and one line
    after an InputError, with 1 if standard output is closed or full, and with 130 after Ctrl-C."""
    prepare()
    status = 1
    try:
        status = main()
        sys.stdout.flush()
    except InputError as e:
        say(one_line(f"{Path(sys.argv[0]).name}: {e}"), error=True)
        status = 2
    except KeyboardInterrupt:
        status = 130
    except OSError as e:
        if e.filename is not None or e.errno not in STREAM_ERRORS:
            raise
        mute(sys.stdout)
        if not isinstance(e, BrokenPipeError):
            say(f"standard output cannot be written ({e.strerror})", error=True)
    # Without this the last garbage collection takes 0.9 s with PyTorch.
    gc.freeze()
    sys.exit(status)


def command(main) -> None:
    """Call `run` with main(argv). Ctrl-C ends it at once, unless main handles it; so does the end
    of its launcher."""
    quiet()
    end_with_launcher()
    # Nearly all imported objects stay, so garbage collection can skip them.
    gc.freeze()
    run(lambda: main(sys.argv[1:]))


def mute(stream) -> None:
    """Discard this stream's buffer, and all later output to it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def removed_at_the_end(folder: Path) -> Iterator[None]:
    """Remove a folder when the body is left, also by Ctrl-C after `quiet`."""
    unfinished.add(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.discard(folder)


# --- Ctrl-C and the launcher ----------------------------------------------------------------------

# The folders that Ctrl-C removes.
unfinished = set()


def quiet() -> None:
    """Make Ctrl-C end this process and its descendants at once, with status 130 and no traceback.
    For commands that have nothing to save."""

    def end(number, frame):
        kill_descendants()
        for folder in unfinished:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(130)

    signal.signal(signal.SIGINT, end)


def end_with_launcher() -> None:
    """Request SIGTERM if torchrun is killed: its ranks would wait for its store or each other."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):
            # Only Linux has this call.
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() == 1:
            # The launcher was killed before this.
            os._exit(128 + signal.SIGTERM)


def kill_descendants() -> None:
    """Kill all descendants of this process, also a rank that a fork server is just starting."""
    for stop in (signal.SIGSTOP, signal.SIGKILL):
        # A stopped process starts no other process while the rest are found.
        found = descendants(os.getpid())
        if stop == signal.SIGSTOP:
            found = [pid for pid in found if parent_of(pid) == os.getpid()]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, stop)


def descendants(pid: int) -> list[int]:
    """Processes below this one; none where the system has no /proc."""
    if not os.path.isdir("/proc"):
        return []
    parents = {int(name): parent_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def parent_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name before it may contain spaces and brackets.
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None
