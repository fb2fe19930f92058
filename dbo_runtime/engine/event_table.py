"""The event table: the device event of each op."""

from __future__ import annotations

from dbo_runtime.devices import Device, Event
from dbo_runtime.ir.schedule import Instruction


class EventTable:
    """(layer, micro-batch, op) -> device event.

    Events are made once and shared by all schedules of a runtime, because making one per instruction costs more than
    using it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: dict[tuple[int | None, int, str], Event] = {}

    def __len__(self) -> int:
        return len(self._events)

    def get(self, instruction: Instruction) -> Event:
        """Return the event of an instruction's op; make it at first use."""
        key = instruction.op.layer, instruction.issue.micro_batch, instruction.op.name
        if key not in self._events:
            self._events[key] = self._device.make_event()
        return self._events[key]
