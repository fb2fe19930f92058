"""Timelines of the toy: of virtual time, and of a run on threads."""

from __future__ import annotations

from dataclasses import replace

from dbo_runtime.devices import open_device
from dbo_runtime.devices.virtual import simulate
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor
from dbo_runtime.observe.timeline import Recorder, Timeline
from dbo_runtime.planner.search.bound import compute_bound_of
from tests.support.programs import lower_toy

TOY = simulate(lower_toy(), lambda step: 3.7e-6 * (1 + len(step.op.name)))


def record_run(parts: int = 2) -> Timeline:
    """Return the timeline of a toy model that has run on threads."""
    device = open_device("cpu")
    schedule = lower_toy(micro_batches=parts)
    recorder = Recorder()
    Executor(schedule, device, EventTable(device)).run([(0, 0)] * parts, instrument=recorder)
    device.close()
    timeline = recorder.timeline()
    return replace(timeline, bound=compute_bound_of(timeline, schedule))
