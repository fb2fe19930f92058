"""Virtual time: runs a schedule on paper, or for real with a clock that only counts what ops are said to cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dbo_runtime.devices import Graph, Lane, Note, Result, Task, Values, check_recorded, make_capture_error
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.schedule import Instruction, Schedule

Cost = Callable[[Instruction], float]


@dataclass(slots=True)
class VirtualEvent:
    """A moment of the run it was recorded in."""

    time: float = 0.0
    run: int = 0


class VirtualLane:
    """A lane with a clock: each task takes what the device says the tasks of its lane take."""

    def __init__(self, name: str, device: VirtualDevice) -> None:
        self.name = name
        self.ready = 0.0
        self._device = device

    def launch(self, task: Task, values: Values) -> None:
        """Run the task now and let the lane's clock go on by its cost."""
        self.ready += self._device.cost(task)
        task(values)

    def measure(self, task: Task, values: Values, note: Note) -> None:
        """Launch the task and tell its virtual times; all tasks are issued before time begins."""
        start = self.ready
        self.launch(task, values)
        note(0.0, start, self.ready)

    def record(self, event: VirtualEvent) -> None:
        """Note the lane's time."""
        event.time, event.run = self.ready, self._device.run

    def wait(self, event: VirtualEvent) -> None:
        """Move the lane's clock to the event, if that is later."""
        check_recorded(event.run, self._device.run, self.name)
        self.ready = max(self.ready, event.time)

    def get_direct_calls(self) -> None:
        """Return None: what an op costs is known of its task."""


class VirtualTimer:
    """The clock of a device's latest run."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._seconds: float | None = None

    def stop(self) -> None:
        """Take the time of the run that has ended."""
        self._seconds = self._device.makespan

    def read(self) -> float | None:
        """Return the seconds; None before `stop`."""
        return self._seconds


class VirtualDevice:
    """A device whose time is counted, not taken. *cost* maps a task to seconds."""

    name = "virtual"
    is_capturing = False
    can_capture = False

    def __init__(self, cost: Callable[[Task], float] = lambda task: 1.0) -> None:
        self.cost = cost
        self.run = 0
        self._lanes: dict[str, VirtualLane] = {}

    @property
    def makespan(self) -> float:
        """When the last lane of the latest run came to its end, in seconds from its beginning."""
        return max((lane.ready for lane in self._lanes.values()), default=0.0)

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        """Return the lanes, making those that are new."""
        return [self._lanes.setdefault(name, VirtualLane(name, self)) for name in names]

    def make_event(self) -> VirtualEvent:
        """Make an event that is not recorded yet."""
        return VirtualEvent()

    def start_timer(self) -> VirtualTimer:
        """Start a watch; the run to come counts."""
        return VirtualTimer(self)

    def begin(self) -> None:
        """Set all clocks to zero."""
        self.run += 1
        for lane in self._lanes.values():
            lane.ready = 0.0

    def release_to_caller(self, values: Iterable[Any]) -> None:
        """Nothing to do: memory is not a lane's."""

    def finish(self) -> None:
        """Nothing to wait for."""

    def abort(self) -> None:
        """Nothing to undo."""

    def capture(self, run: Callable[[], Result], shared_with: Graph | None = None) -> tuple[Graph, Result]:
        """Refuse: nothing is run there but on the host."""
        raise make_capture_error(self.name)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to give back."""


def simulate(schedule: Schedule, cost: Cost, issue: float = 0.0) -> Timeline:
    """Return when each op of *schedule* would run if ops cost *cost* seconds; no op is run.

    Waits are honoured and frees cost nothing. The host issues one instruction after another and takes *issue* seconds
    for each; it runs ahead of the lanes, but does not go on before a `host_sync` instruction begins: before its inputs
    are there and its lane is free. `devices.rehearsal` simulates several ranks, with the strictest host.
    """
    host = 0.0
    ready = dict.fromkeys(schedule.lanes, 0.0)
    recorded: dict[tuple[int, int], float] = {}
    spans = []
    for instruction in schedule.instructions:
        lane = instruction.op.lane
        host += issue
        start = max([host, ready[lane], *(recorded[awaited] for awaited in instruction.waits)])
        ready[lane] = start + cost(instruction)
        spans.append(Span(lane, instruction.op.label, instruction.issue.micro_batch, start, ready[lane]))
        if instruction.records:
            recorded[instruction.issue] = ready[lane]
        if instruction.op.host_sync:
            host = start
    return Timeline(tuple(spans))
