"""Ctrl-C ends a command at once: without a traceback, and with all processes that it has started.

It imports next to nothing.
"""

import contextlib
import os
import signal

# folders that Ctrl-C removes
unfinished = set()


def quiet() -> None:
    """From now on Ctrl-C ends this process at once, with status 130 and without a traceback.

    For the time while PyTorch is imported, and for commands that have nothing to save."""

    def end(number, frame):
        kill_descendants()
        if unfinished:
            import shutil

            for folder in unfinished:
                shutil.rmtree(folder, ignore_errors=True)
        os._exit(130)

    signal.signal(signal.SIGINT, end)


def end_with_launcher() -> None:
    """Under torchrun: when it is killed, this process gets SIGTERM. Otherwise the ranks would wait
    for its store, or for each other."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import ctypes

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
