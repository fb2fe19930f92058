"""Overlapped on threads, with delays drawn at random, programs compute what they compute in sequence."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import COMM, COMPUTE
from dbo_runtime.ir.policies import Policy, alternate, sequential, staggered
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Issue, Schedule
from dbo_runtime.ir.validate import validate
from tests.support.latch import Latch
from tests.support.programs import record_three_lanes, record_toy

RUNS = 9  # of each combination: 216 in all
LONGEST = 3e-4  # seconds

POLICIES = {
    "sequential": sequential,
    "alternate": alternate,
    "staggered:1": partial(staggered, lead=1),
    "staggered:2": partial(staggered, lead=2),
}


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


def delay(program: Program, draw: random.Random) -> Program:
    """Return the program with a pause before each op."""

    def pause_and_run(fn: Callable[..., Any], *values: Any) -> Any:
        time.sleep(draw.uniform(0, LONGEST))
        return fn(*values)

    return replace(program, ops=tuple(replace(op, fn=partial(pause_and_run, op.fn)) for op in program.ops))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_the_toy_computes_the_same_at_any_speed_of_its_ops(
    device: CpuDevice, micro_batches: int, policy: Policy
) -> None:
    draw = random.Random(micro_batches)
    inputs = [(10 * mb + 1, mb) for mb in range(micro_batches)]
    expected = run_sequential([record_toy(layers=3)] * micro_batches, inputs)
    for _ in range(RUNS):
        programs = [delay(record_toy(layers=3), draw)] * micro_batches  # anew, because its caches fill
        executor = Executor(lower(programs, policy(programs)), device, EventTable(device))
        assert executor.run(inputs) == expected


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_three_lanes_compute_the_same_at_any_speed_of_their_ops(
    device: CpuDevice, micro_batches: int, policy: Policy
) -> None:
    programs = [delay(record_three_lanes(layers=3), random.Random(micro_batches))] * micro_batches
    executor = Executor(lower(programs, policy(programs)), device, EventTable(device))
    for run in range(RUNS):
        inputs = [([run + mb],) for mb in range(micro_batches)]
        assert executor.run(inputs) == run_sequential(programs, inputs)


def find_waits_of_compute(schedule: Schedule) -> list[tuple[int, Issue]]:
    steps = enumerate(schedule.instructions)
    return [(number, issue) for number, step in steps if step.op.lane == COMPUTE for issue in step.waits]


def hold_back(schedule: Schedule, held: Issue, number: int, latch: Latch) -> Schedule:
    """Return the schedule with op *held* waiting until step *number*, which no longer waits for it, has run."""

    def hold(fn: Callable[..., Any], *values: Any) -> Any:
        latch.pass_when_released()
        return fn(*values)

    def let_go(fn: Callable[..., Any], *values: Any) -> Any:
        try:
            return fn(*values)
        finally:
            latch.release()

    steps = list(schedule.instructions)
    for n, step in enumerate(steps):
        if step.issue == held:
            steps[n] = replace(step, op=replace(step.op, fn=partial(hold, step.op.fn)))
    step = steps[number]
    fewer = tuple(issue for issue in step.waits if issue != held)
    steps[number] = replace(step, op=replace(step.op, fn=partial(let_go, step.op.fn)), waits=fewer)
    return replace(schedule, instructions=tuple(steps))


WAITS = find_waits_of_compute(lower([record_toy()] * 2, alternate([record_toy()] * 2)))


@pytest.mark.parametrize(("number", "held"), WAITS, ids=lambda value: f"{value}" if isinstance(value, int) else "")
def test_without_any_one_wait_of_compute_an_op_reads_what_is_not_there(
    device: CpuDevice, number: int, held: Issue
) -> None:
    """The wait's comm op is held back until the op that should have waited has run: it finds nothing to read."""
    programs = [record_toy()] * 2
    racy = hold_back(lower(programs, alternate(programs)), held, number, Latch())
    assert racy.instructions[number].op.lane == COMPUTE
    assert racy.programs[held.micro_batch].ops[held.position].lane == COMM
    with pytest.raises(TypeError, match="NoneType"):
        Executor(racy, device, EventTable(device)).run([(1, 0), (11, 1)])


@pytest.mark.parametrize(("number", "held"), WAITS, ids=lambda value: f"{value}" if isinstance(value, int) else "")
def test_the_validator_refuses_the_same_schedules(number: int, held: Issue) -> None:
    schedule = lower([record_toy()] * 2, alternate([record_toy()] * 2))
    step = schedule.instructions[number]
    fewer = replace(step, waits=tuple(issue for issue in step.waits if issue != held))
    racy = replace(
        schedule, instructions=(*schedule.instructions[:number], fewer, *schedule.instructions[number + 1 :])
    )
    with pytest.raises(ScheduleError, match=rf"rule [24], instruction {number}: "):
        validate(racy)
