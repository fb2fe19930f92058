"""Virtual time: simulate a schedule, or run it on a clock that counts assumed op durations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dbo_runtime.devices import Lane, Observe, Task, Values, check_recorded
from dbo_runtime.devices.event_loop import Machine, run_ahead, run_schedule
from dbo_runtime.ir.schedule import Instruction, Schedule
from dbo_runtime.observe.timeline import Timeline

OpDuration = Callable[[Instruction], float]
"""Returns the seconds of an instruction's op."""


@dataclass(slots=True)
class VirtualEvent:
    """A point in virtual time of the run that recorded it, in seconds."""

    time: float = 0.0
    run: int = 0


class VirtualLane:
    """A lane with a clock. Each task advances the clock by its duration on this device."""

    def __init__(self, name: str, device: VirtualDevice) -> None:
        self.name = name
        self.ready = 0.0
        self._device = device

    def launch(self, task: Task, values: Values) -> None:
        """Run the task now, and advance the lane's clock by its duration."""
        self.ready += self._device.cost(task)
        task(values)

    def measure(self, task: Task, values: Values, observe: Observe) -> None:
        """Launch the task and report its virtual times. All tasks count as issued at time 0."""
        start = self.ready
        self.launch(task, values)
        observe(0.0, start, self.ready)

    def record(self, event: VirtualEvent) -> None:
        """Store the lane's time in the event."""
        event.time, event.run = self.ready, self._device.run

    def wait(self, event: VirtualEvent) -> None:
        """Advance the lane's clock to the event, if that is later."""
        check_recorded(event.run, self._device.run, self.name)
        self.ready = max(self.ready, event.time)

    def get_direct_calls(self) -> None:
        """Return None: the cost of an op is looked up by its task."""


class VirtualTimer:
    """The virtual duration of a device's last run."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._seconds: float | None = None

    def stop(self) -> None:
        """Store the duration of the run that has ended."""
        self._seconds = self._device.makespan

    def read(self) -> float | None:
        """Return the seconds, or None before `stop`."""
        return self._seconds


class VirtualDevice:
    """A device that runs tasks on the calling thread and counts virtual time; *cost* maps a task to seconds."""

    name = "virtual"
    is_capturing = False

    def __init__(self, cost: Callable[[Task], float] = lambda task: 1.0) -> None:
        self.cost = cost
        self.run = 0
        self._lanes: dict[str, VirtualLane] = {}

    @property
    def makespan(self) -> float:
        """Seconds from the start of the last run to the end of its last lane."""
        return max((lane.ready for lane in self._lanes.values()), default=0.0)

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        """Return the lanes. New names get new lanes."""
        return [self._lanes.setdefault(name, VirtualLane(name, self)) for name in names]

    def make_event(self) -> VirtualEvent:
        """Make an event that is not recorded yet."""
        return VirtualEvent()

    def start_timer(self) -> VirtualTimer:
        """Start a timer for the next run."""
        return VirtualTimer(self)

    def find_ranges(self, wanted: str = "auto") -> None:
        """Return None: no profiler sees virtual time."""

    def begin(self) -> None:
        """Set all clocks to zero."""
        self.run += 1
        for lane in self._lanes.values():
            lane.ready = 0.0

    def release_to_caller(self, values: Iterable[Any]) -> None:
        """Do nothing: memory belongs to no lane."""

    def finish(self) -> None:
        """Do nothing: tasks run as they are launched."""

    def abort(self) -> None:
        """Do nothing: there is nothing to undo."""

    def synchronize(self) -> None:
        """Do nothing: tasks run as they are launched."""

    def close(self) -> None:
        """Do nothing: the device holds no resources."""


def simulate(schedule: Schedule, duration: OpDuration, issue_seconds: float = 0.0) -> Timeline:
    """Return when each op of *schedule* would run if it took *duration* seconds. No op runs.

    Lanes wait for events; frees cost nothing. The host issues one instruction after another and takes *issue_seconds*
    for each. It runs ahead of the lanes, but waits until a `host_sync` instruction starts, that is, until its inputs
    are ready and its lane is free. `multi_rank_simulator` simulates several ranks, with the strictest host.

    Raises:
        ScheduleError: instructions wait for each other.
    """
    return run_schedule(schedule, Machine(lambda _, instruction, __: duration(instruction), run_ahead, issue_seconds))
