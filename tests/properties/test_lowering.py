"""Lowered schedules of random programs: safe, and with nothing in them that could be left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings

from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.ir.schedule import Instruction, Schedule, Slot
from dbo_runtime.ir.validate import validate
from tests.support.allocator import find_stolen_blocks
from tests.support.oracle import Graph, explain_free, find_loose_lanes, find_owners, find_races, find_violations
from tests.support.profiles import scale
from tests.support.strategies import Case, cases, make_inputs


@settings(max_examples=scale(700))
@given(cases())
def test_a_lowered_schedule_is_safe(case: Case) -> None:
    assert not find_violations(case.lower())


@settings(max_examples=scale(300))
@given(cases())
def test_the_validator_accepts_a_lowered_schedule(case: Case) -> None:
    validate(case.lower())


@pytest.mark.parametrize("results_alias", [False, True])
@settings(max_examples=scale(200))
@given(cases())
def test_freed_memory_is_never_handed_out_while_in_use(results_alias: bool, case: Case) -> None:
    assert not find_stolen_blocks(case.lower(), results_alias)


@settings(max_examples=scale(300))
@given(cases())
def test_without_any_one_wait_two_instructions_race(case: Case) -> None:
    schedule = case.lower()
    for number, instruction in enumerate(schedule.instructions):
        for issue in instruction.waits:
            fewer = replace(instruction, waits=tuple(other for other in instruction.waits if other != issue))
            assert find_races(Graph(_replace_instruction(schedule, number, fewer)))


@settings(max_examples=scale(200))
@given(cases())
def test_without_any_one_fork_or_join_a_lane_is_loose(case: Case) -> None:
    schedule = case.lower()
    for lane in schedule.forks:
        fewer = replace(schedule, forks=tuple(other for other in schedule.forks if other != lane))
        assert find_loose_lanes(Graph(fewer))
    for issue in schedule.joins:
        fewer = replace(schedule, joins=tuple(other for other in schedule.joins if other != issue))
        assert find_loose_lanes(Graph(fewer))


@settings(max_examples=scale(200))
@given(cases())
def test_just_the_ops_that_are_waited_for_record(case: Case) -> None:
    schedule = case.lower()
    awaited = {issue for instruction in schedule.instructions for issue in instruction.waits}.union(schedule.joins)
    assert {instruction.issue for instruction in schedule.instructions if instruction.records} == awaited


@settings(max_examples=scale(400))
@given(cases())
def test_each_value_is_freed_at_the_first_instruction_on_an_owning_lane_that_may(case: Case) -> None:
    schedule = case.lower()
    graph = Graph(schedule)
    freed = [(slot, number) for number, instruction in enumerate(schedule.instructions) for slot in instruction.frees]
    expected = {slot: number for slot in _find_slots(schedule) if (number := _find_first_free(graph, slot)) is not None}
    assert len(freed) == len(expected)
    assert dict(freed) == expected


def test_threads_compute_what_the_sequential_loop_computes() -> None:
    device = CpuDevice()

    @settings(max_examples=scale(300))
    @given(cases())
    def check(case: Case) -> None:
        executor = Executor(case.lower(), device, EventTable(device))
        assert executor.run(make_inputs(case)) == run_sequential(case.programs, make_inputs(case))

    check()
    device.close()


def _replace_instruction(schedule: Schedule, number: int, instruction: Instruction) -> Schedule:
    return replace(
        schedule, instructions=(*schedule.instructions[:number], instruction, *schedule.instructions[number + 1 :])
    )


def _find_slots(schedule: Schedule) -> Iterator[Slot]:
    for mb, program in enumerate(schedule.programs):
        yield from (Slot(mb, value) for op in program.ops for value in op.writes)


def _find_first_free(graph: Graph, slot: Slot) -> int | None:
    instructions = graph.schedule.instructions
    owners = find_owners(graph.schedule.programs[slot.micro_batch], slot.value)
    candidates = (number for number, instruction in enumerate(instructions) if instruction.op.lane in owners)
    return next((number for number in candidates if not explain_free(graph, number, slot)), None)
