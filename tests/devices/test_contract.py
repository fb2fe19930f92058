"""What every device promises to whoever issues onto it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dbo_runtime.devices import Device, Lane, open_device
from dbo_runtime.errors import DeviceError

LANES = ("compute", "comm", "aux")


@pytest.fixture(params=["cpu", "virtual"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = open_device(request.param)
    yield device
    device.close()


def note(number: int) -> Callable[[list[Any]], None]:
    """Return a task that appends a number to the values it is run on."""
    return lambda values: values.append(number)


def join(device: Device, lanes: list[Lane]) -> None:
    """Let the first lane wait for the others, as every schedule does at its end."""
    for lane in lanes[1:]:
        event = device.make_event()
        lane.record(event)
        lanes[0].wait(event)


def test_an_unknown_device_is_refused_with_those_there_are() -> None:
    with pytest.raises(DeviceError, match=r"no device 'tpu'; known are .*cpu.*virtual"):
        open_device("tpu")


def test_a_device_knows_its_name(device: Device) -> None:
    assert open_device(device.name).name == device.name


def test_lanes_are_made_once(device: Device) -> None:
    compute, comm = device.open_lanes(["compute", "comm"])
    again = device.open_lanes(LANES)
    assert again[0] is compute
    assert again[1] is comm
    assert [lane.name for lane in again] == list(LANES)


@pytest.mark.parametrize("position", range(len(LANES)))
def test_a_lane_runs_tasks_in_the_order_launched(device: Device, position: int) -> None:
    lanes = device.open_lanes(LANES)
    values: list[int] = []
    device.begin()
    for number in range(100):
        lanes[position].launch(note(number), values)
    join(device, lanes)
    device.finish()
    assert values == list(range(100))


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (1, 1)])
def test_what_follows_a_wait_runs_after_all_that_preceded_the_record(device: Device, first: int, second: int) -> None:
    lanes = device.open_lanes(LANES)
    event = device.make_event()
    values: list[int] = []
    device.begin()
    for number in range(50):
        lanes[first].launch(note(number), values)
    lanes[first].record(event)
    lanes[second].wait(event)
    lanes[second].launch(note(50), values)
    join(device, lanes)
    device.finish()
    assert values == list(range(51))


def test_events_serve_many_runs(device: Device) -> None:
    lanes = device.open_lanes(LANES)
    there, back = device.make_event(), device.make_event()
    for run in range(50):
        values: list[int] = []
        device.begin()
        lanes[0].launch(note(run), values)
        lanes[0].record(there)
        lanes[1].wait(there)
        lanes[1].launch(note(run + 1), values)
        lanes[1].record(back)
        lanes[0].wait(back)
        lanes[0].launch(note(run + 2), values)
        device.finish()
        assert values == [run, run + 1, run + 2]


@pytest.mark.parametrize("position", range(len(LANES)))
def test_a_wait_for_what_was_never_recorded_is_refused(device: Device, position: int) -> None:
    lanes = device.open_lanes(LANES)
    device.begin()
    with pytest.raises(DeviceError, match=rf"lane '{LANES[position]}' waits for an event that was not recorded"):
        lanes[position].wait(device.make_event())
    device.abort()


@pytest.mark.parametrize("position", range(len(LANES)))
def test_a_wait_for_what_was_recorded_in_an_earlier_run_is_refused(device: Device, position: int) -> None:
    lanes = device.open_lanes(LANES)
    event = device.make_event()
    device.begin()
    lanes[1].record(event)
    lanes[position].wait(event)
    device.finish()
    device.begin()
    with pytest.raises(DeviceError, match="was not recorded in this run"):
        lanes[position].wait(event)
    device.abort()


def test_a_run_that_was_aborted_leaves_the_device_fit_for_the_next(device: Device) -> None:
    lanes = device.open_lanes(LANES)
    device.begin()
    lanes[1].launch(note(1), [])
    device.abort()
    values: list[int] = []
    device.begin()
    lanes[1].launch(note(2), values)
    join(device, lanes)
    device.finish()
    assert values == [2]


def test_a_closed_device_can_be_opened_again(device: Device) -> None:
    device.open_lanes(LANES)
    device.close()
    lanes = device.open_lanes(LANES)
    values: list[int] = []
    device.begin()
    lanes[1].launch(note(1), values)
    join(device, lanes)
    device.finish()
    assert values == [1]


def test_a_device_keeps_no_task_and_no_values_after_a_run(device: Device) -> None:
    class Task:
        def __call__(self, values: Any) -> None:
            pass

    class Values(list[Any]):
        """A list that can be referred to weakly."""

    lanes = device.open_lanes(LANES)
    kept: list[weakref.ref[Any]] = []
    device.begin()
    for lane in lanes:
        task, values = Task(), Values()
        kept += [weakref.ref(task), weakref.ref(values)]
        lane.launch(task, values)
        del task, values
    join(device, lanes)
    device.finish()
    assert [reference() for reference in kept] == [None] * 6
