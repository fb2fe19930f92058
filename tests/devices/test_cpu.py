"""Threads as lanes: what really runs side by side, what really waits, and what becomes of failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dbo_runtime.devices import Lane, Task, Values
from dbo_runtime.devices.cpu import CpuDevice, ThreadState
from dbo_runtime.errors import DeviceError
from tests.support.latch import Latch


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


@pytest.fixture
def lanes(device: CpuDevice) -> list[Lane]:
    return device.open_lanes(["compute", "comm", "aux"])


def finish(device: CpuDevice, lanes: list[Lane]) -> None:
    for lane in lanes[1:]:
        event = device.make_event()
        lane.record(event)
        lanes[0].wait(event)
    device.finish()


def count_threads() -> int:
    return sum(thread.name.startswith("dbo-") for thread in threading.enumerate())


def test_compute_runs_on_the_calling_thread_and_each_other_lane_on_one_of_its_own(
    device: CpuDevice, lanes: list[Lane]
) -> None:
    ran_on: dict[str, set[str]] = {lane.name: set() for lane in lanes}
    device.begin()
    for lane in lanes * 3:
        lane.launch(lambda _, name=lane.name: ran_on[name].add(threading.current_thread().name), [])
    finish(device, lanes)
    here = threading.current_thread().name
    assert ran_on == {"compute": {here}, "comm": {"dbo-comm"}, "aux": {"dbo-aux"}}


def test_two_lanes_run_side_by_side(device: CpuDevice, lanes: list[Lane]) -> None:
    """The comm task ends only because a compute task that is launched later runs meanwhile."""
    latch = Latch()
    device.begin()
    lanes[1].launch(lambda _: latch.pass_when_released(), [])
    lanes[0].launch(lambda _: latch.release(), [])
    finish(device, lanes)


def test_two_workers_run_side_by_side(device: CpuDevice, lanes: list[Lane]) -> None:
    there, back = Latch(), Latch()
    device.begin()
    lanes[1].launch(lambda _: (there.release(), back.pass_when_released()), [])
    lanes[2].launch(lambda _: (there.pass_when_released(), back.release()), [])
    finish(device, lanes)


@pytest.mark.parametrize(("first", "second"), [(1, 0), (1, 2), (2, 1)])
def test_a_wait_really_waits(device: CpuDevice, lanes: list[Lane], first: int, second: int) -> None:
    """The first task gives way to the second for as long as that could need to overtake; it must not."""
    latch = Latch()
    log: list[str] = []
    event = device.make_event()
    device.begin()
    lanes[first].launch(lambda _: (latch.pass_after_grace(), log.append("first")), [])
    lanes[first].record(event)
    lanes[second].wait(event)
    lanes[second].launch(lambda _: (log.append("second"), latch.release()), [])
    finish(device, lanes)
    assert log == ["first", "second"]


def test_without_the_wait_the_same_tasks_overtake(device: CpuDevice, lanes: list[Lane]) -> None:
    latch = Latch()
    log: list[str] = []
    device.begin()
    lanes[1].launch(lambda _: (latch.pass_when_released(), log.append("first")), [])
    lanes[0].launch(lambda _: (log.append("second"), latch.release()), [])
    finish(device, lanes)
    assert log == ["second", "first"]


def test_an_event_does_not_stand_for_what_was_launched_after_it(device: CpuDevice, lanes: list[Lane]) -> None:
    latch = Latch()
    event = device.make_event()
    device.begin()
    lanes[1].record(event)
    lanes[1].launch(lambda _: latch.pass_when_released(), [])
    lanes[0].wait(event)
    lanes[0].launch(lambda _: latch.release(), [])
    finish(device, lanes)


def test_a_workers_failure_is_raised_where_compute_waits(device: CpuDevice, lanes: list[Lane]) -> None:
    failure = KeyError("lost")
    event = device.make_event()
    device.begin()
    lanes[1].launch(fail_with(failure), [])
    lanes[1].record(event)
    with pytest.raises(KeyError) as raised:
        lanes[0].wait(event)
    assert raised.value is failure
    device.abort()


def test_a_failure_that_was_not_waited_for_is_raised_at_the_end(
    device: CpuDevice, lanes: list[Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = release_on_failure(device, monkeypatch)
    device.begin()
    lanes[1].launch(fail_with(KeyError("lost")), [])
    failed.pass_when_released()
    with pytest.raises(KeyError, match="lost"):
        device.finish()
    device.abort()


def test_the_first_of_several_failures_is_the_one_raised(
    device: CpuDevice, lanes: list[Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, started = release_on_failure(device, monkeypatch), Latch()
    event = device.make_event()
    device.begin()
    lanes[1].launch(lambda _: (started.release(), failed.pass_when_released(), fail_with(ValueError("second"))(_)), [])
    lanes[1].record(event)
    started.pass_when_released()
    lanes[2].launch(fail_with(KeyError("first")), [])
    with pytest.raises(KeyError, match="first"):
        lanes[0].wait(event)
    device.abort()


def test_what_is_queued_behind_a_failure_is_not_run(device: CpuDevice, lanes: list[Lane]) -> None:
    ran: list[str] = []
    event = device.make_event()
    device.begin()
    lanes[1].launch(fail_with(KeyError("lost")), [])
    lanes[1].launch(lambda _: ran.append("same lane"), [])
    lanes[1].record(event)
    lanes[2].wait(event)
    lanes[2].launch(lambda _: ran.append("other lane"), [])
    device.abort()
    assert ran == []


def test_abort_returns_when_no_task_runs_and_drops_what_is_queued(
    device: CpuDevice, lanes: list[Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted, started = release_on_failure(device, monkeypatch), Latch()
    ran: list[str] = []
    device.begin()
    lanes[1].launch(lambda _: (started.release(), aborted.pass_when_released(), ran.append("running")), [])
    lanes[1].launch(lambda _: ran.append("queued"), [])
    started.pass_when_released()
    device.abort()
    assert ran == ["running"]


def test_a_failure_does_not_outlive_its_run(device: CpuDevice, lanes: list[Lane]) -> None:
    device.begin()
    lanes[1].launch(fail_with(KeyError("lost")), [])
    device.abort()
    assert not device.has_failed
    device.begin()
    lanes[1].launch(lambda _: None, [])
    finish(device, lanes)


def test_close_ends_the_threads() -> None:
    before = count_threads()
    device = CpuDevice()
    device.open_lanes(["compute", "comm", "aux"])
    assert count_threads() == before + 2
    device.close()
    assert count_threads() == before


def test_close_lets_queued_tasks_end_first() -> None:
    device = CpuDevice()
    lanes = device.open_lanes(["compute", "comm"])
    ran: list[int] = []
    device.begin()
    for number in range(20):
        lanes[1].launch(lambda _, number=number: ran.append(number), [])
    device.close()
    assert ran == list(range(20))


def test_a_lane_of_a_closed_device_refuses_tasks() -> None:
    """Nothing would run them, and a wait for them would never end."""
    device = CpuDevice()
    lanes = device.open_lanes(["compute", "comm"])
    device.close()
    device.begin()
    with pytest.raises(DeviceError, match="lane 'comm' is closed"):
        lanes[1].launch(lambda _: None, [])


class ThreadLocal(threading.local):
    """Stands for torch's grad mode: each thread has its own."""

    mode = "default"


def test_workers_run_each_task_in_the_state_of_the_thread_that_began_the_run() -> None:
    local = ThreadLocal()
    entered: list[str] = []

    def capture() -> ThreadState:
        mode = local.mode

        @contextmanager
        def enter() -> Iterator[None]:
            entered.append(mode)
            local.mode = mode
            try:
                yield
            finally:
                local.mode = "left"

        return enter

    device = CpuDevice(capture)
    lanes = device.open_lanes(["compute", "comm"])
    seen: list[Any] = []
    for mode in ("inference", "training"):
        local.mode = mode
        device.begin()
        local.mode = "changed later"
        lanes[0].launch(lambda _: seen.append(("compute", local.mode)), [])
        lanes[1].launch(lambda _, mode=mode: seen.append(("comm", local.mode)), [])
        finish(device, lanes)
    device.close()
    assert [mode for lane, mode in seen if lane == "comm"] == ["inference", "training"]
    assert [mode for lane, mode in seen if lane == "compute"] == ["changed later"] * 2
    assert entered == ["inference", "training"]


def test_the_thread_state_is_left_when_a_task_fails() -> None:
    left = Latch()

    @contextmanager
    def enter() -> Iterator[None]:
        try:
            yield
        finally:
            left.release()

    device = CpuDevice(lambda: enter)
    lanes = device.open_lanes(["compute", "comm"])
    device.begin()
    lanes[1].launch(fail_with(KeyError("lost")), [])
    left.pass_when_released()
    with pytest.raises(KeyError):
        finish(device, lanes)
    device.abort()
    device.close()


def fail_with(error: BaseException) -> Task:
    def task(_: Values) -> None:
        raise error

    return task


def release_on_failure(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> Latch:
    """Return a latch that is released once the device knows of a failure."""
    latch, fail = Latch(), device.fail
    monkeypatch.setattr(device, "fail", lambda error: (fail(error), latch.release()))
    return latch


def test_lanes_that_must_not_run_at_the_same_time_are_the_calling_thread() -> None:
    device = CpuDevice(inline={"side"})
    compute, comm, side = device.open_lanes(("compute", "comm", "side"))
    ran: list[tuple[str, int]] = []
    device.begin()
    for lane in (compute, comm, side):
        lane.launch(lambda _, lane=lane: ran.append((lane.name, threading.get_ident())), [])
    event = device.make_event()
    comm.record(event)
    side.wait(event)  # as any lane may
    device.finish()
    threads = dict(ran)
    assert threads["compute"] == threads["side"] == threading.get_ident() != threads["comm"]
    device.close()
