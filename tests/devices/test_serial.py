"""The device on which ops are measured alone."""

from __future__ import annotations

from typing import Any

from dbo_runtime.devices import Device
from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.devices.serial import SerialDevice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate
from dbo_runtime.observe.timeline import Recorder
from tests.support.programs import record_three_lanes


def make_executor(device: Device) -> Executor:
    programs = [record_three_lanes(2)] * 2
    return Executor(lower(programs, alternate(programs)), device, EventTable(device))


def test_nothing_is_concurrent_and_results_are_the_same(device: Device) -> None:
    executor, recorder = make_executor(SerialDevice(device)), Recorder()
    inputs = [([1],), ([2],)]
    assert executor.run(inputs, instrument=recorder) == run_sequential(executor.schedule.programs, [([1],), ([2],)])
    timeline = recorder.timeline()
    assert len(timeline.lanes) == 3
    assert sum(timeline.measure_concurrent()) == 0


def test_closing_it_leaves_the_other_device_as_it_is() -> None:
    device = CpuDevice()
    lanes: list[Any] = device.open_lanes(["compute", "comm"])
    SerialDevice(device).close()
    assert device.open_lanes(["compute", "comm"]) == lanes
    device.close()
