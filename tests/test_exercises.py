"""course/exercises/: the project's own functions pass, the stubs and plausible mistakes do not.

The wrong answers stand in wrong_answers.py. An answer to grade is a file, so the files here import
from there.
"""

import re
import shutil
import time
from functools import cache
from pathlib import Path

import pytest

from course import mutations
from course.exercises import check, hints, hunt
from course.exercises.check import Answer, grade
from course.exercises.graders import EXERCISES

ROOT = Path(__file__).parent.parent

# number: the project's own function
RIGHT = {
    1: """
from types import SimpleNamespace
import sharding
def shard_of(whole, dim, rank, n):
    group = SimpleNamespace(rank=lambda: rank, size=lambda: n)
    return sharding.shard_of(whole, sharding.Sharding(whole.shape, (sharding.Shard(dim, group),)))
def gather(part, size, dim, group):
    shape = [size if i == dim else n for i, n in enumerate(part.shape)]
    return sharding.gather(part, sharding.Sharding(tuple(shape), (sharding.Shard(dim, group),)))
""",
    2: "from tensor_parallel import copy_to_ranks, reduce_from_ranks",
    3: "from tensor_parallel import vocab_parallel_cross_entropy",
    4: "from sequence_parallel import gather_sequence, scatter_sequence",
    5: "from schedules import one_f_one_b",
    6: "from schedules import interleaved_one_f_one_b",
    7: "from schedules import zero_bubble_h1",
    8: "from schedules import simulate",
    9: """
from torch import nn
from fsdp import DataParallel, Unit
from sharding import Layer
def reduce_gradients(grads, summed, group):
    parameters = [nn.Parameter(grad) for grad in grads]
    unit = Unit(parameters, group, 2)
    unit.has_run = True
    data_parallel = DataParallel([Layer("", nn.Module(), units=[unit])], 2)
    for p, grad in zip(parameters, grads):
        p.grad = grad
        data_parallel.accumulate(p)
    data_parallel.finish_reductions()
    row = data_parallel.units[0].summed_grads
    return row if summed is None else summed + row
""",
    10: """
import torch
from torch import nn
from fsdp import FullySharded, Unit, keep_own_row
from sharding import Layer
class ToRow(FullySharded):
    def reduce(self, unit):
        super().reduce(unit)
        self.finish_reductions()
        self.row.grad = unit.summed_grads.view_as(self.row)
def sharded_linear(x, row, out_features, group):
    layer = nn.Linear(x.shape[1], out_features, bias=False, dtype=x.dtype)
    unit = Unit([layer.weight], group, 3)
    keep_own_row(unit)
    unit.row.copy_(row.detach().flatten())
    sharded = Layer("linear", layer, units=[unit], backward_units=[unit])
    ToRow([Layer("the model", nn.Module()), sharded]).row = row
    return layer(x)
""",
    11: "from recompute import checkpoint",
    12: "from recompute import layer_bytes",
    13: """
from base import transport_plan
def sinkhorn(logits, tolerance):
    return transport_plan.sinkhorn(logits, 1.0, tolerance, 100_000)
""",
}

# (number, what stands in the place of the right answer, words of what the reader is told); "par":
# the answer is right, and needs more than the paper's
WRONG = [
    (1, "shard_of = Shards.without_padding", "has shape [2, 2], expected [3, 2]"),
    (1, "shard_of = Shards.rounded_down", "All parts have ceil(size / n)"),
    (1, "gather = Shards.padding_kept", "padding is dropped at the end"),
    (1, "gather = Shards.by_all_reduce", "par: 1 all-reduce"),
    (2, "copy_to_ranks = FAndG.no_sum_in_backward", "The gradient of X is their sum"),
    (2, "reduce_from_ranks = FAndG.sum_in_both_directions", "All of yours are twice as large"),
    (2, "reduce_from_ranks = FAndG.average", "All of yours are half as large"),
    (2, "reduce_from_ranks = FAndG.gather_and_add", "par: 1 all-gather of 1,024 bytes"),
    (2, "reduce_from_ranks = FAndG.only_on_one_rank", "rank 0 waits in an all-reduce of float64"),
    (3, "vocab_parallel_cross_entropy = VocabularyLoss.padding_counted", "without the padding"),
    (3, "vocab_parallel_cross_entropy = VocabularyLoss.largest_of_each_rank", "largest logit"),
    (3, "vocab_parallel_cross_entropy = VocabularyLoss.logits_gathered", "par: 512 bytes"),
    (4, "gather_sequence = GAndGBar.backward_only_cuts", "Backward of g is a reduce-scatter"),
    (4, "gather_sequence = GAndGBar.joined_along_the_batch", "joined along dimension 1"),
    (4, "scatter_sequence = GAndGBar.backward_repeats", "Backward of ḡ is an all-gather"),
    (4, "scatter_sequence = GAndGBar.by_all_reduce", "par: 2 all-gathers"),
    (5, "one_f_one_b = OneFOneB.gpipe", "8 micro-batches in flight, the paper's 4"),
    (5, "one_f_one_b = OneFOneB.warmup_too_long", "how many forwards is that?"),
    (5, "one_f_one_b = OneFOneB.warmup_of_the_first_rank", "rank 1, position 3"),
    (5, "one_f_one_b = OneFOneB.cooldown_forgotten", "the backwards that are left"),
    (6, "interleaved_one_f_one_b = Interleaved.warmup_of_1f1b", "Warmup is 2 (p - 1 - rank)"),
    (
        6,
        "interleaved_one_f_one_b = Interleaved.first_chunk_first_in_backward",
        "from the last chunk to the first",
    ),
    (
        6,
        "interleaved_one_f_one_b = Interleaved.all_micro_batches_through_a_chunk",
        "for groups of p micro-batches",
    ),
    (7, "zero_bubble_h1 = ZbH1.at_once", "bubble 0."),
    (7, "zero_bubble_h1 = ZbH1.all_at_the_end", "comes right after the I"),
    (7, "zero_bubble_h1 = ZbH1.one_too_late", "rank 0, position 5"),
    (7, "zero_bubble_h1 = ZbH1.forgotten", "the W that are left come at the end"),
    (8, "simulate = Simulate.transfers_forgotten", "arrives after a transfer"),
    (8, "simulate = Simulate.lists_emptied", "arrives after a transfer"),
    (8, "simulate = Simulate.transfers_to_itself", "what this rank computed at once"),
    (8, "simulate = Simulate.two_actions_at_a_time", "starts when its rank is free"),
    (8, "simulate = Simulate.deadlock_ignored", "raise ScheduleError"),
    (9, "reduce_gradients = Zero2.last_micro_batch_only", "after micro-batch 1"),
    (9, "reduce_gradients = Zero2.average", "All of yours are half as large"),
    (9, "reduce_gradients = Zero2.padded_once_at_the_end", "padded at its own end"),
    (9, "reduce_gradients = Zero2.view_of_an_all_reduce", "par: 3 all-reduces"),
    (10, "sharded_linear = Zero3.weight_kept", "par: 1 all-gather"),
    (10, "sharded_linear = Zero3.gradient_of_own_samples", "is the sum over the ranks"),
    (10, "sharded_linear = Zero3.input_gradient_summed", "nothing is summed"),
    (11, "checkpoint = Checkpoint.not_at_all", "par: kept beside the arguments"),
    (11, "checkpoint = Checkpoint.arguments_only", "the gradient of A is None"),
    (11, "checkpoint = Checkpoint.not_detached", "a second time"),
    (12, "layer_bytes = MemoryFormula.everything_divided", "the other 10 only sequence"),
    (12, "layer_bytes = MemoryFormula.scores_not_divided", "all scores by t"),
    (12, "layer_bytes = MemoryFormula.masks_of_two_bytes", "Attention keeps 11 s b h"),
    (13, "sinkhorn = Sinkhorn.rows_only", "columns to 1/E"),
    (13, "sinkhorn = Sinkhorn.three_iterations", "until the loads are even"),
    (13, "sinkhorn = Sinkhorn.logits_overwritten", "columns to 1/E"),
    (13, "sinkhorn = Sinkhorn.overflow", "exp overflows"),
    (13, "sinkhorn = Sinkhorn.new_matrices", "Keep d0 [N] and d1 [E] instead"),
]


def answer(folder: Path, number: int, text: str) -> Answer:
    """A file of its own, in the place of an exercise."""
    path = folder / f"{len(list(folder.iterdir()))}_{EXERCISES[number].file}"
    path.write_text(text)
    return Answer(number, str(path))


def says(found: check.Grade) -> str:
    """What the reader is told, in one line; "par: .." where only that is missed."""
    count = found.par.count if found.par else ""
    return f"par: {count}" if found.correct else f"{found.why} {count}"


def exercises_on(world: int) -> list[int]:
    return [n for n, of in EXERCISES.items() if of.ranks == world and of.functions]


@pytest.mark.parametrize("world", [1, 2])
def test_right_answers_pass_stubs_and_wrong_ones_fail(world, tmp_path):
    numbers = exercises_on(world)
    answers = [answer(tmp_path, n, RIGHT[n]) for n in numbers]
    answers += [Answer(n, str(ROOT / "course" / "exercises" / EXERCISES[n].file)) for n in numbers]
    wrong = [case for case in WRONG if case[0] in numbers]
    for n, line, _ in wrong:
        group = line.split(" = ")[1].split(".")[0]
        text = f"{RIGHT[n]}\nfrom wrong_answers import {group}\n{line}\n"
        answers.append(answer(tmp_path, n, text))
    found = grade(answers)
    count = len(numbers)
    right, stubs, mistakes = found[:count], found[count : 2 * count], found[2 * count :]
    assert not [(n, g) for n, g in zip(numbers, right) if not (g.correct and g.par.reached)]
    assert not [(n, g) for n, g in zip(numbers, stubs) if not g.why.startswith("not written yet. ")]
    unseen = []
    for (n, line, words), g in zip(wrong, mistakes):
        passed = g.correct and g.par.reached
        if passed or words not in " ".join(says(g).split()):
            unseen.append((n, line, says(g)))
    assert not unseen, "\n".join(map(str, unseen))


def test_every_exercise_has_three_wrong_answers():
    assert all(sum(n == case[0] for case in WRONG) >= 3 for n in RIGHT)
    assert len(CUDA) >= 4 and len(RIGHT) + 1 == len(EXERCISES)


# --- the kernel -----------------------------------------------------------------------------------

BODY = "// Your code: the number of this thread; then its vector, if there is one."
KERNEL = """
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    Vector<> g = read(gate + i * W), u = read(up + i * W), out;
    for (int w = 0; w < W; w++)
        round_to(out.at[w], swiglu_of(to_float(g.at[w]), to_float(u.at[w])));
    write(y + i * W, out);
"""
FUNCTION = """__device__ float swiglu_of(float gate, float up) {
    return gate * sigmoid(gate).here * up;
}
// gate, up, y"""
# (what is replaced in the kernel, by what, words of what the reader is told)
CUDA = [
    (KERNEL, KERNEL, "gate and up are read once"),
    (KERNEL, "", "were never written"),
    ("if (i >= vectors) return;", "", "outside the tensors"),
    ("int64_t(blockIdx.x) * blockDim.x + threadIdx.x", "threadIdx.x", "index 1024"),
    (
        "to_float(g.at[w]), to_float(u.at[w])",
        "to_float(u.at[w]), to_float(g.at[w])",
        "y = gate · sigmoid(gate) · up",
    ),
    (
        KERNEL[KERNEL.index("    Vector<>") :],
        "    for (int64_t j = i * W; j < (i + 1) * W; j++)\n"
        "        round_to(y[j], swiglu_of(gate[j], up[j]));\n",
        "par: vectors of 16 bytes: 0 bytes in",
    ),
]


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_kernels(tmp_path):
    """All in one call of the compiler."""
    stub = (ROOT / "course" / "exercises" / "14_swiglu.cu").read_text()
    assert BODY in stub
    answers = []
    for old, new, _ in CUDA:
        assert KERNEL.count(old) == 1
        text = stub.replace(BODY, KERNEL.replace(old, new))
        answers.append(answer(tmp_path, 14, text.replace("// gate, up, y", FUNCTION)))
    answers.append(Answer(14, str(ROOT / "course" / "exercises" / EXERCISES[14].file)))
    *found, untouched = grade(answers)
    assert untouched.why.startswith("not written yet. "), says(untouched)
    for i, ((_, _, words), g) in enumerate(zip(CUDA, found, strict=True)):
        assert words in " ".join(says(g).split()), says(g)
        assert (g.correct and g.par.reached) == (i == 0)


def test_the_kernel_of_the_project_is_the_answer():
    """KERNEL is the body of base/csrc/swiglu.cu's second try."""
    source = (ROOT / "base" / "csrc" / "swiglu.cu").read_text()
    body = re.search(r"swiglu_by_vector\(.*?\{\n(.*?)\n\}", source, re.DOTALL)[1]
    body = body.replace("#pragma unroll", "")
    assert body.split() == KERNEL.split()


# --- what a reader sees ---------------------------------------------------------------------------


@cache
def text_of(number: int) -> str:
    return (ROOT / "course" / "exercises" / EXERCISES[number].file).read_text()


CRASH = """
from tensor_parallel import copy_to_ranks
def reduce_from_ranks(x, group):
    return helper(x)
def helper(x):
    return x.no_such_method()
"""
ENDLESS = """
from tensor_parallel import copy_to_ranks
def reduce_from_ranks(x, group):
    while True:
        pass
"""


def test_a_crash_shows_the_readers_own_lines(tmp_path):
    (found,) = grade([answer(tmp_path, 2, CRASH)])
    assert found.why.split("\n") == [
        "line 4, in reduce_from_ranks:  return helper(x)",
        "line 6, in helper:  return x.no_such_method()",
        "AttributeError: 'Tensor' object has no attribute 'no_such_method'",
    ]


def test_an_endless_loop_is_interrupted(tmp_path):
    start = time.monotonic()
    (found,) = grade([answer(tmp_path, 2, ENDLESS)], seconds=1)
    assert "in reduce_from_ranks" in found.why and "still runs after 1 seconds" in found.why
    assert time.monotonic() - start < 20


# (number, an answer that is no answer, words of what the reader is told)
ODD = [
    (5, "def one_f_one_b(p, m)\n    return []", "SyntaxError in line 1"),
    (5, "x = 1", "no function `one_f_one_b`"),
    (5, "def one_f_one_b(p, m):\n    return [None] * p", "expected a list of Action(op, chunk"),
    (5, "def one_f_one_b(p, m):\n    yield []", "expected a list of 4 lists"),
    (5, "def one_f_one_b(p, m):\n    exit(3)", "line 2, in one_f_one_b:  exit(3)"),
    (
        8,
        f"{RIGHT[8]}\nright = simulate\ndef simulate(*args):\n    return [*right(*args), "
        "(9, 'F', 0, 0, 0, 1)]",
        "which is not in its list",
    ),
    (11, "def checkpoint(function, *args):\n    return None", "y is None, expected a tensor"),
    (11, "def checkpoint(function, *args):\n    return args[0].to_sparse().data_ptr()", "Error: "),
    (
        13,
        f"{RIGHT[13]}\nright = sinkhorn\ndef sinkhorn(*args):\n    return right(*args) + 1j",
        "is torch.complex128, expected torch.float64",
    ),
]


def test_odd_answers_are_told_what_they_are(tmp_path):
    found = grade([answer(tmp_path, n, text + "\n") for n, text, _ in ODD])
    for (_, _, words), g in zip(ODD, found):
        assert not g.correct and words in g.why and "not written yet" not in g.why, g.why


def test_files_that_are_not_there_and_two_numbers(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        check.main(["14", "--solutions", str(tmp_path)])
    assert ended.value.code == 1
    assert "there is no file" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as ended:
        check.main(["2", "3"])
    assert ended.value.code == 2 and "2 3: one exercise" in capsys.readouterr().err


def test_command(tmp_path, capsys):
    """One exercise from another folder: solved, then not."""
    file = EXERCISES[5].file
    (tmp_path / file).write_text(RIGHT[5])
    with pytest.raises(SystemExit) as ended:
        check.main(["5", "--solutions", str(tmp_path)])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert "correct: yes" in out and "par:     yes" in out and "the paper's 4" in out
    with pytest.raises(SystemExit) as ended:
        check.main(["5"])
    assert ended.value.code == 1 and "correct: no   not written yet" in capsys.readouterr().out


@pytest.mark.repetition
def test_all_stubs(capsys):
    """One line each, of at most 100 columns."""
    with pytest.raises(SystemExit) as ended:
        check.main([])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and len(lines) == 15 and max(map(len, lines)) <= 100
    assert lines[-1].startswith("0 of 14 done")
    assert all("correct no" in line for line in lines[:-1])


@pytest.mark.parametrize("number", EXERCISES)
def test_stubs_have_one_form(number):
    """The idea, what to read, what not yet, and the command: in half a page."""
    text = text_of(number)
    head = text.split('"""')[1] if '"""' in text else text
    for label in ("Read ", "Paper ", "Not yet ", "Check ", "Par "):
        assert len(re.findall(rf"^(?:// )?{label}", text, re.MULTILINE)) == 1, label
    assert f"python -m course.exercises.check {number}" in head
    assert re.match(rf"(?:// )?Exercise {number}: ", head)
    assert head.count("\n") <= 45
    assert max(map(len, text.split("\n"))) <= 100


# --- the hunts ------------------------------------------------------------------------------------

# number: (whether the first loss is right, the layers whose gradients are right)
SYMPTOMS = {
    1: (True, []),
    2: (False, []),
    3: (True, []),
    4: (True, ["blocks.0", "blocks.1", "head"]),
    5: (False, []),
    6: (True, ["blocks.0", "blocks.1", "embedding", "head"]),
}


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.repetition] * (n != 4)) for n in hunt.HUNTS]
)
def test_hunt_shows_what_its_answer_says(number):
    text = hunt.symptoms(number)
    assert max(map(len, text.split("\n"))) <= 100 and text.count("\n") < 40
    losses = re.findall(r"(?:one device|this run) +(\S+)", text)
    right = re.findall(r"^  (\S+) +\d+ of \d+ right", text, re.MULTILINE)
    assert (losses[0] == losses[1], sorted(right)) == SYMPTOMS[number]


@pytest.mark.parametrize("number", hunt.HUNTS)
def test_hunt_knows_its_answer(number, capsys):
    """The names are bugs under the same number of ranks; one of them is right."""
    found = hunt.HUNTS[number]
    bugs = mutations.bugs()
    assert {bugs[name].world for name in (found.bug, *found.others)} == {2}
    for answer, status, words in (
        (found.bug, 0, f"Right: {found.bug}."),
        (found.others[0], 1, f"No, not {found.others[0]}."),
        ("no-such-bug", 1, "is none of"),
    ):
        with pytest.raises(SystemExit) as ended:
            check.main(["hunt", str(number), "--answer", answer])
        assert ended.value.code == status and words in capsys.readouterr().out


# --- hints ----------------------------------------------------------------------------------------


def files_after(label: str, number: int) -> set[str]:
    line = re.search(rf"^(?:// )?{label} .*", text_of(number), re.MULTILINE)[0]
    return set(re.findall(r"[\w/]+\.(?:py|cuh?)\b", line))


@pytest.mark.parametrize("number", EXERCISES)
def test_hints_begin_with_a_question_and_end_with_the_file(number):
    *steps, last = hints.HINTS[str(number)]
    answer = files_after("Not yet", number)
    assert len(steps) >= 2 and steps[0].rstrip().endswith("?")
    assert answer and all(file in last for file in answer)
    assert not any(file in step for file in answer for step in steps)
    assert max(map(len, "".join([*steps, last]).split("\n"))) <= 100


@pytest.mark.parametrize("number", [2, 4, 5, 7])
def test_what_is_read_first_does_not_hold_the_answer(number):
    assert not files_after("Read", number) & files_after("Not yet", number)


def test_hints_come_one_by_one(tmp_path, capsys):
    def hint(*words) -> str:
        check.main(["2", "--solutions", str(tmp_path), "--hint", *words])
        head, text = capsys.readouterr().out.split("\n\n", 1)
        which = int(re.fullmatch(r"hint (\d) of 5", head)[1])
        assert text.startswith(hints.HINTS["2"][which - 1])
        assert ("One more: python -m course.exercises.check 2 --hint" in text) == (which < 5)
        return which

    assert [hint(), hint(), hint(), hint("1"), hint()] == [1, 2, 3, 1, 2]
    assert [hint("5"), hint()] == [5, 5]
    # another exercise has its own
    check.main(["5", "--solutions", str(tmp_path), "--hint"])
    assert capsys.readouterr().out.startswith("hint 1 of 5")
    for damaged in ("{", "[2]", '{"2": "x"}', '{"2": null}', '{"2": 99, "1": {}}'):
        (tmp_path / ".hints.json").write_text(damaged)
        assert hint() == 1
    (tmp_path / ".hints.json").unlink()
    (tmp_path / ".hints.json").mkdir()
    assert [hint(), hint(), hint("3")] == [1, 1, 3]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["2", "--hint", "6"], "exercise 2 has hints 1 to 5"),
        (["2", "--hint", "0"], "exercise 2 has hints 1 to 5"),
        (["--hint"], "of which exercise, 1 to 14?"),
        (["--hint", "2"], "of which exercise, 1 to 14?"),
        (["hunt", "1", "--hint"], "of which exercise, 1 to 14?"),
        (["15", "--hint"], "of which exercise, 1 to 14?"),
    ],
)
def test_hints_that_there_are_not(argv, words, capsys):
    with pytest.raises(SystemExit) as ended:
        check.main(argv)
    assert ended.value.code == 2 and words in capsys.readouterr().err
