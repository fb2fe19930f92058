"""The simulation of several ranks: times that can be worked out by hand, and each way in which it cannot go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule
from dbo_runtime.lab.oracle.ranks import Groups
from dbo_runtime.lab.simulate.multi_rank_simulator import simulate_ranks
from dbo_runtime.observe.timeline import Timeline


def record_layer(host_sync: bool = False) -> Program:
    p = ProgramBuilder()
    x = p.compute("attention", lambda x: x, p.input("x"))
    return p.build(p.comm("reduce", lambda x: x, x, communicator="tp", host_sync=host_sync))


def record_pair(first: str, second: str) -> Program:
    p = ProgramBuilder()
    x = p.comm(first, lambda x: x, p.input("x"), communicator=first)
    return p.build(p.comm(second, lambda x: x, x, communicator=second))


def lower_alternate(program: Program, micro_batches: int = 2) -> Schedule:
    programs = [program] * micro_batches
    return lower(programs, alternate(programs))


def cost(rank: int, instruction: Instruction) -> float:
    return {"attention": 3.0 + 2 * rank, "reduce": 2.0}.get(instruction.op.name, 1.0 + rank)


def times(timeline: Timeline) -> list[tuple[str, int, float, float]]:
    return [(span.op, span.micro_batch, span.start, span.end) for span in timeline.spans]


def refuse(
    schedules: Sequence[Schedule], rank: int, instruction: int, *words: str, groups: Groups | None = None
) -> None:
    """Assert that the simulation stops, in these words, with this instruction of this rank marked."""
    with pytest.raises(ScheduleError) as raised:
        simulate_ranks(schedules, cost, groups)
    head, table = str(raised.value).split("\n\n")
    assert all(word in head for word in words), head
    assert f"({schedules[rank].instructions[instruction].op.declared_at})" in head
    (marked,) = (row for row in table.splitlines() if row.endswith("<-- here"))
    assert marked.split()[:2] == [str(instruction), schedules[rank].instructions[instruction].label]


def test_no_ranks_take_no_time() -> None:
    assert simulate_ranks([], cost) == ()


def test_the_faster_rank_waits_in_each_collective() -> None:
    fast, slow = simulate_ranks([lower_alternate(record_layer())] * 2, cost)
    assert times(fast) == [("attention", 0, 0, 3), ("reduce", 0, 5, 7), ("attention", 1, 3, 6), ("reduce", 1, 10, 12)]
    assert times(slow) == [("attention", 0, 0, 5), ("reduce", 0, 5, 7), ("attention", 1, 5, 10), ("reduce", 1, 10, 12)]


def test_a_host_sync_keeps_the_host_until_the_collective_has_ended() -> None:
    fast, slow = simulate_ranks([lower_alternate(record_layer(host_sync=True))] * 2, cost)
    assert times(fast) == [("attention", 0, 0, 3), ("reduce", 0, 5, 7), ("attention", 1, 7, 10), ("reduce", 1, 12, 14)]
    assert times(slow) == [("attention", 0, 0, 5), ("reduce", 0, 5, 7), ("attention", 1, 7, 12), ("reduce", 1, 12, 14)]


def test_ranks_of_other_groups_do_not_wait() -> None:
    fast, slow = simulate_ranks([lower_alternate(record_layer(), 1)] * 2, cost, {"tp": [[0], [1]]})
    assert (fast.duration, slow.duration) == (5, 7)


def test_an_instruction_on_compute_keeps_the_host_from_issuing_on_other_lanes() -> None:
    p = ProgramBuilder()
    p.compute("attention", lambda: 0, outputs=0)
    p.comm("copy", lambda: 0, outputs=0, communicator=None)
    (timeline,) = simulate_ranks([lower_alternate(p.build(), 1)], cost)
    assert times(timeline) == [("attention", 0, 0, 3), ("copy", 0, 3, 4)]


def test_a_collective_takes_as_long_as_the_slowest_rank_says() -> None:
    timelines = simulate_ranks([lower_alternate(record_pair("tp", "ep"), 1)] * 3, cost)
    assert {tuple(times(timeline)) for timeline in timelines} == {(("tp", 0, 0, 3), ("ep", 0, 3, 6))}


def test_ranks_that_meet_in_different_micro_batches() -> None:
    programs = [record_pair("tp", "ep")] * 2
    orders = [[Issue(mb, n) for mb in mbs for n in range(2)] for mbs in ([0, 1], [1, 0])]
    words = "rank 1 comes to instruction 0, tp/1, and meets rank 0, which comes to instruction 0, tp/0, on 'tp'"
    refuse([lower(programs, order) for order in orders], 1, 0, words)


def test_ranks_meet_by_order_and_not_by_name() -> None:
    p = ProgramBuilder()
    x = p.comm("gather", lambda x: x, p.input("x"), communicator="tp")
    program = p.build(p.comm("reduce", lambda x: x, x, communicator="tp"))
    fewer = replace(program, ops=(replace(program.ops[0], communicator=None), program.ops[1]))
    words = "rank 1 comes to instruction 1, reduce/0, and meets rank 0, which comes to instruction 0, gather/0"
    refuse([lower_alternate(program, 1), lower_alternate(fewer, 1)], 1, 1, words)


def test_a_deadlock_says_what_each_rank_waits_for() -> None:
    first, second = lower_alternate(record_pair("tp", "ep"), 1), lower_alternate(record_pair("ep", "tp"), 1)
    words = [
        "deadlock: rank 0 waits at instruction 0, tp/0, for rank 1, which waits at instruction 0, ep/0; ",
        "rank 1 waits at instruction 0, ep/0, for rank 0, which waits at instruction 0, tp/0 and rank 2, ",
        "which waits at instruction 0, tp/0; rank 2 waits at",
    ]
    refuse([first, second, first], 0, 0, *words)


def test_the_first_rank_that_is_stuck_is_shown() -> None:
    first, second = lower_alternate(record_pair("tp", "ep"), 1), lower_alternate(record_pair("ep", "tp"), 1)
    groups: Groups = {name: [[0], [1, 2]] for name in ("tp", "ep")}
    refuse([first, first, second], 1, 0, "deadlock: rank 1 waits at instruction 0, tp/0, for rank 2", groups=groups)


def test_a_rank_waits_at_the_first_of_the_instructions_that_it_cannot_run() -> None:
    p = ProgramBuilder()
    x = p.comm("reduce", lambda x: x, p.input("x"), communicator="tp")
    schedule = lower_alternate(p.build(p.op("copy", lambda x: x, x, lane="aux")), 1)
    nothing = lower_alternate(record_pair("ep", "pp"), 1)
    words = "rank 0 waits at instruction 0, reduce/0, for rank 1, which has ended"
    refuse([schedule, nothing], 0, 0, words, groups={"ep": [[1]], "pp": [[1]]})


def test_a_long_schedule_is_shown_around_the_stop_only() -> None:
    with pytest.raises(ScheduleError) as raised:
        simulate_ranks([lower_alternate(record_layer(), count) for count in (50, 25)], cost)
    assert len(str(raised.value).splitlines()) < 40


def test_a_rank_that_has_ended_keeps_the_others_waiting() -> None:
    schedules = [lower_alternate(record_layer(), micro_batches) for micro_batches in (2, 1)]
    refuse(schedules, 0, 3, "deadlock: rank 0 waits at instruction 3, reduce/1, for rank 1, which has ended")


def test_a_wait_for_what_is_never_recorded() -> None:
    schedule = lower_alternate(record_layer(), 1)
    silent = replace(
        schedule, instructions=(replace(schedule.instructions[0], records=False), *schedule.instructions[1:])
    )
    words = "rank 1 waits at instruction 1, reduce/0, for attention/0, which has recorded no event by then"
    refuse([schedule, silent], 1, 1, words)


def test_a_wait_for_what_is_recorded_later() -> None:
    schedule = lower_alternate(record_layer())
    early = replace(
        schedule, instructions=(replace(schedule.instructions[0], waits=(Issue(0, 1),)), *schedule.instructions[1:])
    )
    refuse(
        [early], 0, 0, "rank 0 waits at instruction 0, attention/0, for reduce/0, which has recorded no event by then"
    )


def test_a_join_of_what_is_never_recorded() -> None:
    schedule = lower_alternate(record_layer(), 1)
    instructions = tuple(
        replace(instruction, records=instruction.op.name == "attention") for instruction in schedule.instructions
    )
    refuse(
        [replace(schedule, instructions=instructions)],
        0,
        1,
        "rank 0 waits at its end for reduce/0, which has recorded no event",
    )


def test_a_rank_outside_all_groups() -> None:
    words = "rank 1 uses communicator 'tp', which has no rank 1, at instruction 1, reduce/0"
    refuse([lower_alternate(record_layer(), 1)] * 2, 1, 1, words, groups={"tp": [[0]]})
