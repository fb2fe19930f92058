"""A device that watches everything issued to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from dbo_runtime.devices import Device, Event, Lane, Observe, Task, Values
from dbo_runtime.devices.serial import SerialDevice
from dbo_runtime.engine.executor import BoundOp, describe
from dbo_runtime.errors import SanitizerError, add_context
from dbo_runtime.lab.sanitizer.accesses import Clock
from dbo_runtime.lab.sanitizer.effects import Held, OpCall, describe_change
from dbo_runtime.lab.sanitizer.memory import Freed, poison
from dbo_runtime.lab.sanitizer.monitor import Monitor


class WatchedEvent:
    """An event of the other device, with the clock at its last record."""

    __slots__ = ("clock", "event")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.clock: Clock = {}


class WatchedTask:
    """An op whose reads, results and frees are checked where it runs."""

    def __init__(self, task: BoundOp, monitor: Monitor, number: int) -> None:
        self._task = task
        self._monitor = monitor
        self._number = number

    def __call__(self, values: Values) -> None:
        """Free values, run the op, and compare its effects with its declaration."""
        task, monitor = self._task, self._monitor
        instruction = task.instruction
        for slot in task.frees:
            self._free(values, slot)
        try:
            for slot in task.reads:
                if isinstance(values[slot], Freed):
                    monitor.fail(instruction, f"it reads a freed value: {values[slot].what}")
            call = OpCall(instruction.op, [values[slot] for slot in task.reads])
            with monitor.run(instruction):
                task.run(values)
            for value, change in call.find_changes():
                monitor.note_change(instruction, value, change)
            shared = call.find_shared([values[slot] for slot in task.writes], self._list_held(values))
            if shared is not None:
                monitor.fail(instruction, shared)
        except BaseException as error:
            add_context(error, f"watched by DBO_CHECK=races: {describe(instruction)}")
            raise

    def _free(self, values: Values, slot: int) -> None:
        holder, values[slot] = [values[slot]], None
        poison(holder)
        values[slot] = Freed(f"{self._monitor.name(slot)}, freed before {self._task.instruction.label}")

    def _list_held(self, values: Values) -> Iterable[Held]:
        """Yield the values in use that the op neither reads nor writes."""
        own = {*self._task.reads, *self._task.writes}
        for slot, value in enumerate(values):
            if slot not in own and not self._monitor.is_overwritten(slot, self._number):
                yield Held(self._monitor.name(slot), value)


class WatchedLane:
    """A lane of the other device. The monitor sees all its launches, records and waits."""

    def __init__(self, name: str, lane: Lane, monitor: Monitor) -> None:
        self.name = name
        self._lane = lane
        self._monitor = monitor

    def launch(self, task: Task, values: Values) -> None:
        """Check the op, and launch it."""
        self._lane.launch(self._watch(task), values)

    def measure(self, task: Task, values: Values, observe: Observe) -> None:
        """Check the op, and measure it, including the checks made while it runs."""
        self._lane.measure(self._watch(task), values, observe)

    def record(self, event: WatchedEvent) -> None:
        """Record the event."""
        event.clock = self._monitor.record(self.name)
        self._lane.record(event.event)

    def wait(self, event: WatchedEvent) -> None:
        """Wait for the event."""
        self._lane.wait(event.event)
        self._monitor.wait(self.name, event.clock)

    def get_direct_calls(self) -> None:
        """Return None: each op must be launched to be seen."""

    def _watch(self, task: Task) -> WatchedTask:
        bound = cast("BoundOp", task)  # executors launch only bound ops
        return WatchedTask(bound, self._monitor, self._monitor.issue(bound))


class SanitizingDevice(SerialDevice):
    """The first lane of another device, under every lane's name, watched by a monitor. Runs are slow."""

    def __init__(self, device: Device, monitor: Monitor) -> None:
        super().__init__(device)
        self._monitor = monitor

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        """Return the first lane of the other device, watched, once per name."""
        lanes = super().open_lanes(names)
        return [WatchedLane(name, lane, self._monitor) for name, lane in zip(names, lanes, strict=True)]

    def make_event(self) -> WatchedEvent:
        """Make an event of the other device."""
        return WatchedEvent(super().make_event())

    def begin(self) -> None:
        """Begin a run."""
        super().begin()
        self._monitor.begin()

    def release_to_caller(self, values: Iterable[Any]) -> None:
        """Release values of the other device, given as one tuple per micro-batch.

        Raises:
            SanitizerError: one of the values was freed.
        """
        outputs = list(values)
        for micro_batch, given in enumerate(outputs):
            for value in given:
                if isinstance(value, Freed):
                    raise SanitizerError(f"micro-batch {micro_batch} returns a freed value: {value.what}.")
        super().release_to_caller(outputs)

    def finish(self) -> None:
        """End a run, wait for it, and raise the faults found in it.

        Raises:
            SanitizerError: a lane may still be running, or an op changed a value that it only reads.
        """
        self._monitor.finish()
        super().finish()
        for instruction, value, change in self._monitor.take_changes():
            if change:
                self._monitor.fail(instruction, describe_change(value))
