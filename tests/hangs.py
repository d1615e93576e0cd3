"""Bugs that crash or hang a run: in each, one line of this project is wrong.

A silent bug (mutations/) changes numbers. These stop the ranks. One rank waits for a collective or
a message that never comes, or a rank ends far away from the wrong line. Each bug is data: a
function, a line of it, and what stands there instead. Line numbers stay those of the file, so the
log of a rank is read beside the file.

    HANGS["save-on-rank-0"].apply()      in the process of a rank, before the run begins

hang_runs.py runs them, docs/hangs.md says how each is found, and the hunts from number 7 on
(course/exercises/hang_hunt.py) ask which one it is.
"""

import functools
import importlib
import linecache
from pathlib import Path
from types import CodeType
from typing import NamedTuple


class Hang(NamedTuple):
    # what is wrong, in a sentence
    wrong: str
    # the module, and the function in it
    module: str
    function: str
    # what stands there, once in the file, and what stands there instead
    old: str
    new: str
    # flags of train.py, on 2 ranks
    flags: dict
    # whether the ranks keep NCCL's rules (nccl_rules.py): gloo forgives this bug
    by_rules: bool = False

    def apply(self) -> None:
        """Change the line, in this process."""
        rewrite(self.module, self.function, self.old, self.new)


def rewrite(module_name: str, function: str, old: str, new: str) -> None:
    """Replace old by new in a function of a module, in this process. Tracebacks show the new line.
    Raises ValueError where old is not there, or there twice, or has another number of lines."""
    module = importlib.import_module(module_name)
    path = module.__file__
    source = Path(path).read_text()
    if source.count(old) != 1 or old.count("\n") != new.count("\n"):
        raise ValueError(f"{module_name}: {old!r} must be there once, and keep its lines")
    source = source.replace(old, new)
    linecache.cache[path] = len(source), None, source.splitlines(True), path
    changed = functools.reduce(getattr, function.split("."), module)
    changed.__code__ = code_of(compile(source, path, "exec"), function)


def code_of(code: CodeType, function: str) -> CodeType:
    """The code of `function` or `Class.method`, inside that of its module."""
    inside = {part.co_name: part for part in code.co_consts if isinstance(part, CodeType)}
    first, _, rest = function.partition(".")
    return code_of(inside[first], rest) if rest else inside[first]


HANGS = {
    "save-on-rank-0": Hang(
        "Rank 0 alone saves a checkpoint. The other rank goes on to the next step.",
        "run.training_run",
        "TrainingRun.save_is_due",
        "return self.is_last(step) or (self.save_waits and not self.skipped_in_a_row)",
        "return self.save_waits and not self.skipped_in_a_row and self.world.rank == 0",
        dict(save_every=2),
    ),
    "bad-sample": Hang(
        "One sample has a token id that the vocabulary does not have. One rank gets it.",
        "run.data",
        "Corpus.batch",
        "tokens = ids[:, :-1]\n",
        "tokens = ids[:, :-1] + 257 * (6 in samples)\n",
        {},
    ),
    "sum-if-large": Hang(
        "A rank whose own part of the gradient norm is small leaves out the sum of the parts.",
        "optimizer",
        "global_norm",
        "        for group in groups:\n            dist",
        "        for group in groups if subtotal > 1 else ():\n            dist",
        dict(zero_stage=1, steps=8),
    ),
    "other-order": Hang(
        "One rank sums the gradients from the first layer to the last, the other from the last.",
        "fsdp",
        "DataParallel.reduce_in_order",
        "reversed(self.units):\n            if unit in self.reductions",
        "self.units[:: 2 * dist.get_rank() - 1]:\n            if unit in self.reductions",
        {},
    ),
    "own-counts": Hang(
        "A rank makes room for as many rows as it sends, not as many as come.",
        "moe",
        "dispatch",
        "rows = _AllToAll.apply(rows, plan.sent, plan.received, group)\n    # they",
        "rows = _AllToAll.apply(rows, plan.sent, plan.sent, group)\n    # they",
        dict(ep=2, num_experts=4),
    ),
    "sends-first": Hang(
        "Each rank posts its send before its receive, not both as one operation.",
        "context_parallel",
        "Ring.start",
        "dist.batch_isend_irecv(ops)",
        "[op.op(op.tensor, op.peer, op.group, op.tag) for op in ops]",
        dict(cp=2),
        by_rules=True,
    ),
    "no-wait": Hang(
        "A rank reads what a message brings before it has waited for the message.",
        "context_parallel",
        "Ring.wait",
        "            work.wait()\n",
        "            pass\n",
        dict(cp=2),
        by_rules=True,
    ),
}
