"""The lesson of schedules.py: six schedules, simulated."""

import schedules
from course import form
from planning import drawing
from schedules import Action, Cost, Schedule

P, M = 3, 6

WITHOUT = form.Removals()


@WITHOUT.add("warmup", "Less is held, and the order is right. What does it cost?")
def no_warmup(schedule: Schedule) -> Schedule:
    """Time: only one micro-batch is in the pipeline, so while one rank works on it the others wait.
    The bubble of GPipe, 1F1B and interleaved is then p - 1 = 2 times the work."""
    return [sorted(actions, key=lambda a: a.micro_batch) for actions in schedule]


@WITHOUT.add("deferral", "I is still passed on before W. What is lost?")
def no_deferral(schedule: Schedule) -> Schedule:
    """W that waits can fill the time when a rank would be idle; W right after I cannot. The bubble
    is 0.2222, still below 0.3333 of 1F1B, for the rank before gets I without waiting for W."""
    result = []
    for actions in schedule:
        order: list[Action] = []
        for a in actions:
            if a.op == "I":
                order += [a, a._replace(op="W")]
            elif a.op != "W":
                order.append(a)
        result.append(order)
    return result


class Drawn:
    """A schedule, its time lines drawn, and its bubble by simulation and by formula."""

    def __init__(self, lesson: form.Lesson, name: str, v: int = 1):
        self.name = name
        self.schedule = schedules.make(name, P, M, v)
        if lesson.mutate:
            self.schedule = lesson.mutate(self.schedule)
        # v chunks do the work of one.
        cost = Cost(1 / v, 1 / v, 1 / v)
        events = schedules.simulate(self.schedule, cost, schedules.placement_of(name, P, v))
        self.bubble = schedules.bubble(events)
        self.formula = schedules.bubble_formula(name, P, M, v, cost)
        # A unit has two characters; what comes after 42 units is left out.
        unit = 1 / v
        shown = [e for e in events if e.end <= 42 * unit + 1e-9]
        lesson.draw(drawing.text(shown, unit))

    @property
    def agrees(self) -> bool:
        return abs(self.bubble - self.formula) < 1e-12


def teach_one_chunk(lesson: form.Lesson) -> None:
    """GPipe and 1F1B."""
    lesson.predict(
        f"p {P} ranks, m {M} micro-batches, F takes 1 and B takes 2: a rank's work takes {3 * M}."
        " For what fraction of that is it idle (the bubble), under GPipe and under 1F1B?",
        "bubble of GPipe; bubble of 1F1B",
    )
    lesson.draw("  GPipe, then 1F1B:")
    gpipe = Drawn(lesson, "gpipe")
    one_f_one_b = Drawn(lesson, "1f1b")
    lesson.check(
        f"GPipe {gpipe.bubble:.4f}, 1F1B {one_f_one_b.bubble:.4f}; (p - 1) / m ="
        f" {gpipe.formula:.4f}",
        gpipe.agrees and one_f_one_b.agrees,
        [gpipe.bubble, one_f_one_b.bubble],
    )

    lesson.predict(
        "So what is 1F1B for? How many micro-batches' activations does a rank hold at most?",
        "held under GPipe; held under 1F1B",
    )
    held = [schedules.in_flight(drawn.schedule) for drawn in (gpipe, one_f_one_b)]
    lesson.check(
        f"on ranks 0, 1, 2: GPipe {held[0]}, all m; 1F1B {held[1]}, p - rank",
        held == [[M] * P, [P - rank for rank in range(P)]],
        [*map(max, held)],
    )


def teach(lesson: form.Lesson) -> None:
    teach_one_chunk(lesson)
    lesson.predict(
        "Interleaved: v 2 chunks on each rank (the second in lower case), actions half as long. The"
        " bubble? Activations of how many chunks does a rank hold at most?",
        "bubble; chunks",
    )
    interleaved = Drawn(lesson, "interleaved", v=2)
    held_chunks = schedules.in_flight(interleaved.schedule)
    expected = [2 * (P - 1 - rank) + P + 1 for rank in range(P)]
    lesson.check(
        f"{interleaved.bubble:.4f}; (p - 1) / (v m) = {interleaved.formula:.4f}. Held:"
        f" {held_chunks}, warmup + 1; each is half as large",
        interleaved.agrees and held_chunks == expected,
        [interleaved.bubble, max(held_chunks)],
    )

    lesson.predict(
        "ZB-H1: F, I and W take 1 each. The bubble? How many W wait on a rank at most?",
        "bubble; W that wait",
    )
    zero_bubble = Drawn(lesson, "zb-h1")
    deferred = schedules.deferred_weight_gradients(zero_bubble.schedule)
    lesson.check(
        f"{zero_bubble.bubble:.4f}; (p - 1) (T_F + T_I - T_W) / (m (T_F + T_I + T_W)) ="
        f" {zero_bubble.formula:.4f}. Waiting: {deferred}, rank + 1",
        zero_bubble.agrees and deferred == [rank + 1 for rank in range(P)],
        [zero_bubble.bubble, max(deferred)],
    )

    lesson.predict(
        "In a V rank 0 has the first and the last of 2 p chunks. Actions take half as long: the"
        " bubble of ZB-V? How many chunks does a rank hold, under ZB-V and DualPipeV?",
        "bubble; chunks under ZB-V; chunks under DualPipeV",
    )
    zb_v, dualpipe_v = Drawn(lesson, "zb-v", v=2), schedules.make("dualpipe-v", P, M, 2)
    held = [max(schedules.in_flight(lists)) for lists in (zb_v.schedule, dualpipe_v)]
    lesson.check(
        f"{zb_v.bubble:.4f}; (p - 1) T_I / (2 m (T_F + T_I + T_W)) = {zb_v.formula:.4f}. Held:"
        f" {held[0]}, 2 p, as under 1F1B; {held[1]}, 2 p + 1",
        zb_v.agrees and held == [2 * P, 2 * P + 1],
        [zb_v.bubble, *held],
    )


if __name__ == "__main__":
    form.run("schedules")
