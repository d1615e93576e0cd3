"""Printing for people, on streams that may be closed, full, or only know ASCII.

A run must not end because nobody reads its lines any more: `python train.py | head` closes the pipe
after ten lines, or the disk of a log file fills up. Then further lines are dropped, one line on
standard error says so, and the run goes on. metrics.jsonl has every step.

    terminal.prepare()          at the start of a command
    terminal.say("step 1")      a line on standard output, flushed
    terminal.refuse("why")      the end, with status 2 and one line on standard error
    terminal.run(main)          all of this around main(), the last line of a file
    terminal.command(main)      the same for main(argv), which may be a rank of torchrun

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


def prepare() -> None:
    """Make standard input, output and error usable.

    A closed one becomes /dev/null. Otherwise the next file that is opened, perhaps a checkpoint,
    would get its number, and what a library prints would go into that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # open() takes the lowest free number, and the lower ones are in use by now.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
        # What is not UTF-8 is read without an error; what reads a prompt refuses it. A character
        # that the terminal does not have is printed as its code.
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace" if number else "surrogateescape")


def say(*words, error: bool = False, end: str = "\n") -> None:
    """Print a line, flushed; where the stream is gone, drop this line and all later ones."""
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
    """Call this in every rank that ends because of bad input, which rank 0 alone reports.

    A launcher stops all ranks as soon as one has ended. The other ranks therefore wait, so that
    rank 0 has printed its message before it is stopped.
    """
    if rank:
        time.sleep(3)


def tell_launcher(message: str) -> None:
    """torchrun repeats this as its last line but one; it ends with a report of its own."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        word = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": word}), encoding="utf-8")


def refuse(message: str):
    """End the process with status 2 and one line on standard error."""
    say(one_line(message), error=True)
    sys.exit(2)


# of a stream that is closed or full; other errors have another cause
STREAM_ERRORS = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


def run(main) -> None:
    """Run main() and end the process with what it returns. Where standard output is closed or full:
    with 1; after Ctrl-C: 130. Both without a traceback."""
    prepare()
    status = 1
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except OSError as e:
        if e.filename is not None or e.errno not in STREAM_ERRORS:
            raise
        mute(sys.stdout)
        if not isinstance(e, BrokenPipeError):
            say(f"standard output cannot be written ({e.strerror})", error=True)
    # The interpreter collects garbage as it ends: with PyTorch 0.9 s, unless it need not look.
    gc.freeze()
    sys.exit(status)


def command(main) -> None:
    """`run` main(argv). Ctrl-C ends it at once, unless it handles that itself; so does the end of
    its launcher."""
    quiet()
    end_with_launcher()
    # nearly all that was imported stays, and PyTorch is much to look through
    gc.freeze()
    run(lambda: main(sys.argv[1:]))


def mute(stream) -> None:
    """Discard what is written to this stream from now on, and what is still in its buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def removed_at_the_end(folder: Path) -> Iterator[None]:
    """Removes a folder when the body is left, also by Ctrl-C after `quiet`."""
    unfinished.add(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.discard(folder)


# --- Ctrl-C and the launcher ----------------------------------------------------------------------

# folders that Ctrl-C removes
unfinished = set()


def quiet() -> None:
    """From now on Ctrl-C ends this process at once, with status 130 and without a traceback, and
    all processes that it has started. For commands that have nothing to save."""

    def end(number, frame):
        kill_descendants()
        for folder in unfinished:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(130)

    signal.signal(signal.SIGINT, end)


def end_with_launcher() -> None:
    """Under torchrun: when it is killed, this process gets SIGTERM. Otherwise the ranks would wait
    for its store, or for each other."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):
            # another system than Linux has no such call
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() == 1:
            # it was killed before that
            os._exit(128 + signal.SIGTERM)


def kill_descendants() -> None:
    """End all processes that this one has started, and those that they have started: also a rank
    that a fork server is just starting."""
    for stop in (signal.SIGSTOP, signal.SIGKILL):
        # a process that is stopped starts no other one while the rest are found
        found = descendants(os.getpid())
        if stop == signal.SIGSTOP:
            found = [pid for pid in found if parent_of(pid) == os.getpid()]
        for pid in found:
            try:
                os.kill(pid, stop)
            except ProcessLookupError:
                pass


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
            # the name before it may hold spaces and brackets
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None
