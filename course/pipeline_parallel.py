"""The lesson of pipeline_parallel.py, and of course/nccl_model.py: six schedules on two ranks
beside one rank; programs of sends and receives, run in a model of NCCL."""

from typing import NamedTuple

import torch
import torch.distributed as dist

import gpt
import pipeline_parallel
import schedules
import sharding
from base.dropout import dropout_key
from course import demo, form, nccl_model, ranks
from course.mutations import pipeline_parallel as bugs
from pipeline_parallel import Program, Transfer, add_transfers
from schedules import Action, Placement


def is_transfer(entry: Action | Transfer, op: str) -> bool:
    return isinstance(entry, Transfer) and entry.op == op


# The lesson looks at these programs; ranks run the right ones.
LOWER = "course.pipeline_parallel", "add_transfers"
WITHOUT = form.Removals()
WITHOUT["tied-sum"] = form.Removal(
    bugs.no_tied_sum,
    "The loss is right. Which gradient is not?",
    "That of the tied embedding. The first stage has the part from looking tokens up, the last"
    " stage the part from the logits; without the sum each copy has one part, and after a step the"
    " copies differ.",
)
WITHOUT["loss-scale"] = form.Removal(
    bugs.loss_divided_twice,
    "Why would AdamW hide this?",
    "Every gradient is 1/8 of what it should be, so the relative difference is 7/8. AdamW divides"
    " m by √v: the factor cancels, but for ε and for clipping by the norm.",
)


@WITHOUT.replace("receive", *LOWER, "Rank 1 lacks one. Which message fails?")
def no_receive(schedule: list, placement: Placement) -> list[Program]:
    """Messages have no names: the first send meets the first receive. F0 meets the receive that was
    posted for F1."""
    programs = pipeline_parallel.add_transfers(schedule, placement)
    programs[1].remove(next(entry for entry in programs[1] if is_transfer(entry, "receive")))
    return programs


@WITHOUT.replace("order", *LOWER, "Every message has its receive. Which one does F0 meet?")
def no_order(schedule: list, placement: Placement) -> list[Program]:
    """That of F1: messages have no names, and the first send meets the first receive. The model
    stops here. NCCL may hang, or give F0's numbers out as F1, for both have one shape. Counts
    hold."""
    programs = pipeline_parallel.add_transfers(schedule, placement)
    program = programs[1]
    receives = [i for i, entry in enumerate(program) if is_transfer(entry, "receive")]
    first, second, *_ = [i for i in receives if program[i].kind == "F"]
    program[first], program[second] = program[second], program[first]
    return programs


@WITHOUT.replace("settle", *LOWER, "Sends are settled at the end of the step. What grows with m?")
def no_settle(schedule: list, placement: Placement) -> list[Program]:
    """The tensors that are kept. Each send keeps its own until the end of the step, and a rank in
    the middle has 2 m sends: 16 with m 8, 128 with m 64."""
    programs = pipeline_parallel.add_transfers(schedule, placement)
    return [sorted(program, key=lambda entry: is_transfer(entry, "settle")) for program in programs]


# --- six schedules on two ranks -------------------------------------------------------------------

# p ranks, m micro-batches of one sequence.
P, M = 2, 4
S, V = 32, 257
SHAPE = dict(num_layers=4, hidden_size=128, num_heads=4, seq_length=S, dropout=0.1)
# Makes a mean of the sum of token losses.
LOSS_GRAD = torch.tensor(1 / (M * S), dtype=torch.float64)


def placement_of(name: str, p: int) -> Placement:
    """One stage on each rank, or two under the schedules that can have them."""
    v = 2 if name == "interleaved" or name in schedules.V_SHAPED else 1
    return schedules.placement_of(name, p, v)


class Run(NamedTuple):
    """What one rank reports of a step. sent: bytes of each message."""

    loss: float
    gradients: dict
    sent: tuple[int, ...] = ()


def make_stages(rank: int, p: int, name: str) -> list:
    """This rank's stages, with the weights of seed 0, in float64."""
    model = demo.meta_model(demo.tiny_config(**SHAPE))
    stages = pipeline_parallel.apply(model, rank, placement_of(name, p))
    for stage in stages:
        if name in schedules.SPLIT_BACKWARD:
            pipeline_parallel.split_backward(stage)
        sharding.init(stage, 0, "cpu", torch.float64)
    pipeline_parallel.share_tied(stages)
    return stages


def forward_of(stages: list, losses: list):
    # The key is that of (seed, step, sample): any rank has the same mask.
    context_of = lambda k: gpt.Context(dropout_key(0, 1, torch.tensor([k])))  # noqa: E731
    return demo.chunk_forward(stages, *demo.random_tokens(M, S, V), context_of, losses)


def on_one_rank(rank: int) -> Run:
    stages = make_stages(0, 1, "1f1b")
    losses = []
    forward = forward_of(stages, losses)
    for k in range(M):
        forward(0, k).backward(LOSS_GRAD)
    gradients = {name: p.grad for name, p in sharding.named_parameters(*stages)}
    return Run(sum(losses), gradients)


def under_schedule(rank: int, name: str) -> Run:
    stages = make_stages(rank, P, name)
    channels = pipeline_parallel.Channels(dist.group.WORLD)
    pipeline = pipeline_parallel.Pipeline(stages, channels, placement_of(name, P))
    losses = []
    schedule = schedules.make(name, P, M, len(stages))
    sent = demo.run_pipeline(pipeline, schedule, forward_of(stages, losses), S, LOSS_GRAD)
    pipeline.sum_tied()
    return Run(sum(losses), demo.gathered_gradients(*stages), tuple(sent))


def on_rank(rank: int) -> dict[str, Run]:
    return {name: under_schedule(rank, name) for name in schedules.NAMES}


def teach_runs(lesson: form.Lesson, one: Run, of_schedule: dict[str, list[Run]]) -> None:
    """of_schedule: name -> the run of each rank."""
    lesson.predict("Under which of the six schedules do loss and gradients differ from one rank's?")
    losses = [sum(run.loss for run in runs) for runs in of_schedule.values()]
    lesson.check(
        f"none: loss {one.loss:.12f} on one rank, {losses[0]:.12f} under GPipe and the others",
        max(abs(loss - one.loss) for loss in losses) < 1e-10,
    )
    worst = []
    for runs in of_schedule.values():
        gradients = {key: g for run in runs for key, g in run.gradients.items()}
        worst.append(demo.largest_difference(one.gradients, gradients))
    lesson.check(f"none: the largest relative difference is {max(worst):.1e}", max(worst) < 1e-10)

    lesson.predict(
        "v 2 halves the bubble. How many messages does a step send, with v 1 and v 2?", "v 1; v 2"
    )
    sent = {name: sum((run.sent for run in runs), ()) for name, runs in of_schedule.items()}
    size = S * 128 * 8
    lesson.check(
        f"{len(sent['1f1b'])} and {len(sent['interleaved'])}, 2 m (p v - 1); each b s h 8 ="
        f" {size:,} bytes",
        sent["1f1b"] == (size,) * 8 and sent["interleaved"] == (size,) * 24,
        [len(sent["1f1b"]), len(sent["interleaved"])],
    )


# --- programs -------------------------------------------------------------------------------------


def programs_of(name: str, p: int, m: int) -> list[Program]:
    placement = placement_of(name, p)
    return add_transfers(schedules.make(name, p, m, placement.v), placement)


def most_unsettled(program: Program) -> int:
    """The most sends at a time that are not settled: their tensors are kept."""
    unsettled = 0
    most = 0
    for entry in program:
        unsettled += is_transfer(entry, "send") - is_transfer(entry, "settle")
        most = max(most, unsettled)
    return most


def stuck_in(name: str) -> str:
    """What is stuck where a GPU has one hardware queue, "" if nothing is."""
    try:
        nccl_model.run(programs_of(name, 4, 8), placement=placement_of(name, 4), queues=1)
    except schedules.ScheduleError as e:
        return str(e)
    return ""


def teach_programs(lesson: form.Lesson) -> None:
    lesson.predict("p 4, m 8: do the programs of all ranks run to their end in a model of NCCL?")
    reasons = [f"{name}: {stuck_in(name)}" for name in schedules.NAMES if stuck_in(name)]
    lesson.check(
        reasons[0][:300] if reasons else f"{', '.join(schedules.NAMES)}: nothing is stuck",
        not reasons,
    )

    lesson.predict(
        "1F1B, p 4: of how many messages does a rank keep the tensor at a time, at most? With m 8,"
        " and with m 64?",
        "m 8; m 64",
    )
    most = [max(map(most_unsettled, programs_of("1f1b", 4, m))) for m in (8, 64)]
    lesson.check(
        f"{most[0]} and {most[1]}: p, on rank 0. It does not grow with m", most == [4, 4], most
    )


def teach(lesson: form.Lesson) -> None:
    one = ranks.run(on_one_rank, 1)[0]
    two = lesson.on_ranks(P, on_rank)
    teach_runs(lesson, one, {name: [rank[name] for rank in two] for name in schedules.NAMES})
    with lesson.removed():
        teach_programs(lesson)


if __name__ == "__main__":
    form.run("pipeline_parallel")
