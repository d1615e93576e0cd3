"""What a command says to people, on streams that may be closed, full, or only know ASCII.

A run must not end because nobody reads its lines any more: `python train.py | head` closes the pipe
after ten lines, a log file's disk fills up. From then on the lines are dropped, one line on
standard error says so, and the run goes on; metrics.jsonl has every step.

    terminal.prepare()        first thing in a command
    terminal.say("step 1")    a line on standard output, flushed
"""

import os
import signal
import sys
import time


def prepare() -> None:
    """Make standard input, output and error usable. A closed one becomes /dev/null: otherwise the
    next file that is opened would get its number, and a library would print into a checkpoint."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one: those below are open by now.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
    if hasattr(sys.stdin, "reconfigure"):
        # Bytes that are no text are refused where they are read as a prompt.
        sys.stdin.reconfigure(errors="surrogateescape")
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal does not have is shown by its number, never an exception.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def say(*words, error: bool = False, end: str = "\n") -> None:
    """Print a line, flushed; where the stream is gone, drop this line and the ones to come."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(*words, file=stream, end=end, flush=True)
    except OSError as e:
        mute(stream)
        if not error:
            say(
                f"standard output is gone ({e.strerror or e}): the run goes on without it",
                error=True,
            )


def one_line(message) -> str:
    """A message as one line: line ends and other characters that do not print, by their codes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(message)
    )


def let_rank_0_speak(rank: int) -> None:
    """Called by a rank that ends because of bad input, which rank 0 alone reports. The launcher
    ends all ranks as soon as one has ended: for a moment this must not be one that said nothing."""
    if rank:
        time.sleep(3)


def refuse(message: str):
    """End the process with status 2 and one line on standard error."""
    say(one_line(message), error=True)
    sys.exit(2)


def run(main) -> None:
    """End the process with what main() returns, or with status 1, and no traceback, where standard
    output is closed or full."""
    prepare()
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        mute(sys.stdout)
        status = 1
    except OSError as e:
        if e.filename is not None:
            raise
        mute(sys.stdout)
        say(f"standard output cannot be written ({e.strerror})", error=True)
        status = 1
    sys.exit(status)


def mute(stream) -> None:
    """What is written to this stream from now on goes nowhere, the rest of its buffer too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def quiet_interrupts() -> None:
    """Ctrl-C ends this process at once, with status 130 and without a traceback: while PyTorch is
    imported, and whenever there is nothing to save. Call it where a file is run as a command."""

    def end(number, frame):
        # Imported only by then: it takes time as well, in which Ctrl-C may come.
        import multiprocessing

        for child in multiprocessing.active_children():
            child.kill()
        os._exit(130)

    signal.signal(signal.SIGINT, end)
