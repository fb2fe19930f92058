"""The event table: the device event of each op."""

from __future__ import annotations

from dbo_runtime.devices import Device, Event
from dbo_runtime.ir.schedule import Instruction


class EventTable:
    """Device events by layer, micro-batch, nano-batch and op.

    Each event is made once, and all schedules of a runtime share it, because making an event costs more than using it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: dict[tuple[int | None, int, int | None, str], Event] = {}

    def __len__(self) -> int:
        return len(self._events)

    def get(self, instruction: Instruction) -> Event:
        """Return the event of an instruction's op; make it on first use."""
        op = instruction.op
        key = op.layer, instruction.issue.micro_batch, op.nano_batch, op.name
        if key not in self._events:
            self._events[key] = self._device.make_event()
        return self._events[key]
