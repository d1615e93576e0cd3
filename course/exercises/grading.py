"""How one answer to an exercise is graded: it runs on ranks, and is compared and counted there.

    correct    equal to the project's own function: floats within 1e-10 in float64, data exactly
    par        collectives, bytes or memory are those of the paper

An answer may be wrong in any way, so three things protect the reader's time:

- Every collective is announced to the other ranks before it starts. Where one rank calls an
  all-reduce and another has returned, both stop at once and name the ranks, the collective and the
  line: nothing hangs.
- An answer that still runs after some seconds is interrupted, with its line.
- Of a crash, only the lines of the answer are shown.

    python -m course.exercises.check 2        grades exercise 2

course/exercises/graders.py has one grader for each exercise. It calls the answer's functions,
raises `AnswerError` where something differs, and returns a `Par`.

Not covered: send and receive are not announced; the timeout of the process group ends them.
"""

import importlib.util
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from planning.counters import Collectives

# A share of a tensor's largest number: the gate of the tests, in float64.
TOLERANCE = 1e-10


class Par(NamedTuple):
    """Whether what was counted is what the paper says, and both in words."""

    reached: bool
    count: str


class Grade(NamedTuple):
    """What `check.py` prints about one answer. par: None where it was not measured."""

    correct: bool
    why: str
    par: Par | None = None


# --- what can go wrong ----------------------------------------------------------------------------


class AnswerError(Exception):
    """The answer differs from the reference. The message says where, and teaches."""

    # Decides which of several ranks' errors is shown (check.ENDS).
    kind = "wrong"
    par: Par | None = None


class DisagreementError(AnswerError):
    """Ranks do not call the same collectives in the same order."""

    kind = "disagreement"


class PeerError(AnswerError):
    """Another rank has stopped; its own error is the one to read."""

    kind = "peer failed"


class TimeLimitError(Exception):
    """The answer still ran after its time."""


# --- what an answer does --------------------------------------------------------------------------


class Watch(Collectives):
    """While entered: counts collectives, announces them to the other ranks, and remembers which
    memory was made.

    calls: (kind, bytes of the whole tensor), for an all-gather the gathered one, for a reduce-
    scatter the one that is summed.
    """

    def __init__(self, rank: int, world: int, store, name: str, path: str):
        super().__init__()
        self.rank = rank
        self.world = world
        self.store = store
        self.name = name
        self.path = path
        self.made: list[StorageWeakRef] = []
        # The numel of each tensor that an operation returned.
        self.sizes: list[int] = []
        self.announced = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            # A view of an argument is not new.
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self.made.append(StorageWeakRef(x.untyped_storage()))
                self.sizes.append(x.numel())
        return result

    def note(self, function, args) -> None:
        super().note(function, args)
        kind, _ = self.calls.pop()
        tensors = [[x for x in tree_leaves(arg) if isinstance(x, Tensor)] for arg in args]
        # The list of gathered parts counts as the whole tensor that it is.
        self.calls.append((kind, max(sum(x.nbytes for x in xs) for xs in tensors)))
        if kind not in ("send", "receive"):
            first = next((x for xs in tensors for x in xs), torch.empty(0))
            dtype = str(first.dtype).removeprefix("torch.")
            article = "an" if kind[0] == "a" else "a"
            self.announce(f"{article} {kind} of {dtype} {list(first.shape)}", self.line())

    def line(self) -> str:
        """Where the answer's own code is at the moment."""
        frame = sys._getframe()
        while frame and frame.f_code.co_filename != self.path:
            frame = frame.f_back
        return f" (line {frame.f_lineno})" if frame else ""

    def announce(self, what: str, line: str = "") -> None:
        """Say what this rank does next, and go on once every rank does the same."""
        n = self.announced
        self.announced += 1
        self.store.set(f"{self.name} {self.rank} {n}", f"{what}|{line}")
        said = []
        for rank in range(self.world):
            said.append(self.store.get(f"{self.name} {rank} {n}").decode().split("|"))
        if any(what == "failed" for what, _ in said):
            raise PeerError("another rank failed")
        if len({what for what, _ in said}) > 1:
            parts = [f"rank {rank} {describe(*words)}" for rank, words in enumerate(said)]
            raise DisagreementError(
                "; ".join(parts) + ". Every rank must call every collective, in the same order."
            )

    def agree(self) -> None:
        """After a call of the answer's code: all ranks have returned from it."""
        self.announce("returned")

    def failed(self) -> None:
        self.store.set(f"{self.name} {self.rank} {self.announced}", "failed|")

    @contextmanager
    def counted(self):
        """The calls inside: `with watch.counted() as calls`. At its end all ranks have returned."""
        calls = []
        first = len(self.calls)
        yield calls
        calls += self.calls[first:]
        self.agree()

    def held(self, first: int, *besides: Tensor, allowed: int = 0) -> int:
        """Bytes that were made since made[first] and are still there, without `besides`.

        A thread of gloo may hold the result of a collective for a moment after the collective has
        ended. So where there is more than `allowed`, it is counted again for at most a second.
        """
        until = time.monotonic() + 1
        while (held := self.held_now(first, besides)) > allowed and time.monotonic() < until:
            time.sleep(0.01)
        return held

    def held_now(self, first: int, besides: tuple[Tensor, ...]) -> int:
        sizes = {}
        for reference in self.made[first:]:
            # None where it is gone
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                sizes[storage._cdata] = storage.nbytes()
        for x in besides:
            # An answer may return anything at all.
            if isinstance(x, Tensor):
                sizes.pop(x.untyped_storage()._cdata, None)
        return sum(sizes.values())


def describe(what: str, line: str) -> str:
    if what == "returned":
        return "has returned from your code"
    return f"waits in {what}{line}"


# --- arguments of an answer's functions -----------------------------------------------------------


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """float64, equal on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


# --- comparisons ----------------------------------------------------------------------------------


def same(name: str, got, expected: Tensor, hint: str) -> None:
    """Raises AnswerError unless got equals expected. name: of the tensor, with its rank."""
    if not isinstance(got, Tensor):
        raise AnswerError(f"{name} is {got!r}, expected a tensor {list(expected.shape)}. {hint}")
    if got.shape != expected.shape:
        raise AnswerError(
            f"{name} has shape {list(got.shape)}, expected {list(expected.shape)}. {hint}"
        )
    if got.dtype != expected.dtype:
        raise AnswerError(f"{name} is {got.dtype}, expected {expected.dtype}. {hint}")
    got = got.detach()
    difference = (got - expected).abs()
    # The largest number of the reference, as in the project's tests.
    scale = expected.abs().max().clamp(min=1e-30)
    # "not below": also where a number is NaN
    if not (difference <= TOLERANCE * scale).all():
        worst = difference.nan_to_num(nan=torch.inf).argmax()
        place = [int(i) for i in torch.unravel_index(worst, expected.shape)]
        raise AnswerError(
            f"{name}, at {place}: expected {expected.flatten()[worst]:.6g}, got "
            f"{got.flatten()[worst]:.6g}. {clue(got, expected)}{hint}"
        )


def clue(got: Tensor, expected: Tensor) -> str:
    """What the numbers themselves tell."""
    if not got.isfinite().all():
        return "Some numbers are not finite. "
    if not got.any():
        return "All of yours are 0. "
    for factor, words in ((2, "twice as large"), (0.5, "half as large")):
        if torch.allclose(got, factor * expected, rtol=1e-9, atol=1e-12):
            return f"All of yours are {words}: there are 2 ranks. "
    return ""


def count_text(calls: list[tuple[str, int]]) -> str:
    """[(all-reduce, 512)] * 2 -> "2 all-reduces of 512 bytes" """
    parts = []
    for (kind, size), n in Counter(calls).items():
        parts.append(f"{n} {kind}{'s' if n > 1 else ''} of {size:,} bytes")
    return " + ".join(parts) or "no collective"


def par_of(calls: list[tuple[str, int]], paper: list[tuple[str, int]], hint: str) -> Par:
    """Collectives counted, and those of the paper."""
    if Counter(calls) == Counter(paper):
        return Par(True, f"{count_text(calls)}, as in the paper")
    return Par(False, f"{count_text(calls)}; the paper has {count_text(paper)}. {hint}")


# --- one answer on one rank -----------------------------------------------------------------------


def functions(path: str, names: str) -> list[Callable]:
    """The functions of these names that a file defines."""
    spec = importlib.util.spec_from_file_location("answer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = [getattr(module, name, None) for name in names.split()]
    for name, function in zip(names.split(), found):
        if not callable(function):
            raise AnswerError(
                f"the file has no function `{name}`. Keep the name that the exercise gives."
            )
    return found


def crash_text(error: BaseException, path: str) -> str:
    """The error, after the lines of the answer that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    # PyTorch raises it too
    if isinstance(error, NotImplementedError) and "raise NotImplementedError" in frames[-1].line:
        return f"not written yet. {error}"
    if isinstance(error, SyntaxError):
        return f"SyntaxError in line {error.lineno}: {error.msg}"
    lines = []
    for frame in frames:
        if frame.filename == path:
            lines.append(f"line {frame.lineno}, in {frame.name}:  {frame.line}")
    if isinstance(error, TimeLimitError):
        lines.append(f"still runs after {error} seconds")
    else:
        message = str(error).strip().split("\n")[0]
        lines.append(f"{type(error).__name__}: {message}")
    # The last calls are enough.
    return "\n".join(lines[-4:])


@contextmanager
def limited(seconds: int):
    """Raises TimeLimitError in what still runs after `seconds`."""

    def ring(number, frame):
        raise TimeLimitError(seconds)

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def grade_on_rank(exercise, watch: Watch, seconds: int) -> tuple[str, Grade]:
    """(how it ended, the grade). exercise: of graders.py. seconds: that it may take."""
    path = watch.path
    try:
        with limited(seconds), watch:
            given = functions(path, exercise.functions) if exercise.functions else [path]
            why, par = exercise.grader(*given, watch.rank, watch)
        return "right", Grade(True, why, par)
    except AnswerError as error:
        kind, grade = error.kind, Grade(False, str(error), error.par)
    # An answer may call exit() too.
    except (Exception, SystemExit) as error:
        kind, grade = "crash", Grade(False, crash_text(error, path))
    watch.failed()
    return kind, grade
