"""A schedule's waits and frees are what keeps data right on streams with a real caching allocator.

First hand-made: one wait removed, one free moved, and the latch brings about the order of events that they are there to
prevent. Then at random, with each kernel of the stand-in for CANN slowed down by chance.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dbo_runtime.devices import open_device
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.ir.validate import validate
from tests.support.devices import rigs
from tests.support.executors import EXECUTORS
from tests.support.latch import GRACE
from tests.support.mutants import remove_wait
from tests.support.profiles import scale
from tests.support.strategies import Case, cases

if not {*rigs.STREAMS} & {*rigs.find_present()}:
    pytest.skip("no device with streams is here; `make test-npu` has one", allow_module_level=True)

import torch

from tests.support.devices.tensor_programs import LENGTH, make_tensors, read, with_all_outputs, with_tensors

EXAMPLES = 300
LONGEST = 2e-4  # seconds that a kernel is slowed down by
MUTANTS = 20
ATTEMPTS = 5  # with other delays each
POISON = -7

both = pytest.mark.parametrize("kind", EXECUTORS)


@pytest.fixture
def rig(stream_rig: Any) -> Any:
    return stream_rig


@pytest.fixture
def standin(record_property: Any) -> Iterator[Any]:
    record_property("device", "npu")
    rigs.prepare("npu")
    from tests.standin.cann import cann

    standin = cann.load()
    if standin is None:
        pytest.skip("a real CANN is here: its kernels cannot be slowed down")
    yield standin
    standin.calm()


def run_late(kind: type[Executor], rig: Any, schedule: Schedule, latch: Any) -> list[int]:
    """Return what a schedule of one micro-batch computes from zeros if a held op goes on only when all others have."""
    device = rig.device
    executor = kind(schedule, device, EventTable(device))
    x = torch.zeros(LENGTH, dtype=torch.int64, device=device.name)
    for lane in device.open_lanes(schedule.lanes):  # so that memory that was not written does not look right
        with device.backend.stream(lane.stream):
            poison = [torch.full((LENGTH,), POISON, dtype=torch.int64, device=device.name) for _ in range(8)]
            del poison
    device.synchronize()
    ((result,),) = executor.run([(x,)])
    time.sleep(GRACE)
    latch.release()
    device.synchronize()
    numbers: list[int] = result.tolist()
    return numbers


def lower_alone(program: Program) -> Schedule:
    return lower([program], alternate([program]))


def record_send(latch: Any) -> Program:
    """Return a program whose first op is held: compute, then comm, then compute."""
    p = ProgramBuilder()
    x = p.compute("make", lambda x: (latch.hold([]), x + 5)[1], p.input("x"))
    x = p.comm("send", lambda x: x * 2, x)
    return p.build(p.compute("receive", lambda x: x + 1, x))


def without_wait(schedule: Schedule, label: str) -> Schedule:
    return replace(
        schedule,
        instructions=tuple(replace(step, waits=()) if step.label == label else step for step in schedule.instructions),
        forks=(*schedule.forks, "comm"),  # so that the lane still begins where it should
    )


@both
def test_a_wait_makes_the_reader_wait_for_the_writer(kind: type[Executor], rig: Any) -> None:
    latch = rig.make_latch()
    assert run_late(kind, rig, lower_alone(record_send(latch)), latch) == [11] * LENGTH


@both
def test_without_the_wait_validation_refuses_and_the_device_reads_what_is_not_there_yet(
    kind: type[Executor], rig: Any
) -> None:
    latch = rig.make_latch()
    schedule = without_wait(lower_alone(record_send(latch)), "send/0")
    with pytest.raises(ScheduleError, match="send/0"):
        validate(schedule)
    assert run_late(kind, rig, schedule, latch) == [POISON * 2 + 1] * LENGTH


def record_concurrent(rig: Any, latch: Any) -> Program:
    """Return a program whose comm op is held while a concurrent compute op needs memory."""

    def allocate() -> torch.Tensor:
        rig.drain()
        return torch.full((LENGTH,), 1000, dtype=torch.int64, device=rig.device.name)

    p = ProgramBuilder()
    x = p.compute("make", lambda x: x + 5, p.input("x"))
    sent = p.comm("send", lambda x: (latch.hold([]), x * 2)[1], x)
    other = p.compute("other", allocate)
    return p.build(p.compute("receive", lambda sent, other: sent + other, sent, other))


def with_free_at(schedule: Schedule, name: str, label: str) -> Schedule:
    """Return the schedule in which the value *name* is freed at another step."""
    (slot,) = (slot for step in schedule.instructions for slot in step.frees if slot.value.name == name)
    steps = (
        replace(step, frees=tuple(other for other in step.frees if other != slot)) for step in schedule.instructions
    )
    return replace(
        schedule,
        instructions=tuple(replace(step, frees=(*step.frees, slot)) if step.label == label else step for step in steps),
    )


@both
def test_a_free_comes_when_no_lane_reads_the_memory_any_more(kind: type[Executor], rig: Any) -> None:
    latch = rig.make_latch()
    assert run_late(kind, rig, lower_alone(record_concurrent(rig, latch)), latch) == [1010] * LENGTH


@both
def test_a_free_moved_earlier_is_refused_and_gives_the_memory_away_while_it_is_read(
    kind: type[Executor], rig: Any
) -> None:
    latch = rig.make_latch()
    schedule = with_free_at(lower_alone(record_concurrent(rig, latch)), "make", "other/0")
    with pytest.raises(ScheduleError, match="make"):
        validate(schedule)
    assert run_late(kind, rig, schedule, latch) == [3000] * LENGTH  # what `other` wrote there, twice, and once


@both
def test_random_programs_compute_what_the_sequential_loop_computes(kind: type[Executor], rig: Any) -> None:
    device, slow_down = rig.device, find_jitter(rig.device.name)

    @settings(max_examples=scale(EXAMPLES))
    @given(cases(), st.integers(0, 2**31))
    def check(case: Case, seed: int) -> None:
        slow_down(seed, LONGEST)
        schedule = with_tensors(case, device.name).lower()
        outputs = kind(schedule, device, EventTable(device)).run(make_tensors(case, device.name, seed))
        assert read(outputs) == compute(case, seed)

    check()
    slow_down(0, 0.0)


@both
def test_random_schedules_that_lack_a_wait_compute_something_else(
    kind: type[Executor], standin: Any, record_property: Any
) -> None:
    """Not each of them each time: that is what makes such faults hard to find without validation."""
    device = open_device("npu")
    seen: Counter[str] = Counter()

    @settings(max_examples=max(MUTANTS, scale(MUTANTS)))
    @given(cases(), st.data())
    def check(case: Case, data: st.DataObject) -> None:
        case = with_all_outputs(case)
        mutant = remove_wait(with_tensors(case, "npu").lower(), data.draw)
        assume(mutant is not None and is_refused(mutant))
        executor = kind(mutant, device, EventTable(device))
        wrong = False
        for _ in range(ATTEMPTS):  # one more only if the last happened to be right
            seen["runs"] += 1
            standin.jitter(seen["runs"], 10 * LONGEST)  # long, so that kernels are behind the host on a busy machine
            wrong = read(executor.run(make_tensors(case, "npu", seen["runs"]))) != compute(case, seen["runs"])
            device.synchronize()  # the next must not suffer from what of this one still runs
            if wrong:
                break
        seen["schedules"] += 1
        seen["wrong"] += wrong

    check()
    device.close()
    record_property("schedules without a wait", dict(seen))
    assert seen["wrong"] > 0


def find_jitter(device: str) -> Callable[[int, float], None]:
    """Return what slows kernels down by chance: on the stand-in only, elsewhere they go at their own speed."""
    if device == "npu":
        from tests.standin.cann import cann

        standin = cann.load()
        if standin is not None:
            return standin.jitter
    return lambda seed, seconds: None


def compute(case: Case, seed: int) -> list[list[list[int]]]:
    """Return what the sequential loop computes on the CPU."""
    return read(run_sequential(with_tensors(case, "cpu").programs, make_tensors(case, "cpu", seed)))


def is_refused(schedule: Schedule) -> bool:
    with suppress(ScheduleError):
        validate(schedule)
        return False
    return True
