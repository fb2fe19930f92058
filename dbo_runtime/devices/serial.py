"""A device without concurrency, to measure the cost of each op alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dbo_runtime.devices import Device, Event, Lane, Timer
from dbo_runtime.observe.ranges import OpenRange


class SerialDevice:
    """The first lane of another device, under all lane names."""

    def __init__(self, device: Device) -> None:
        self.name = device.name
        self._device = device

    @property
    def is_capturing(self) -> bool:
        """Whether the other device is capturing."""
        return self._device.is_capturing

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        """Return the first lane once per name."""
        return self._device.open_lanes(names[:1]) * len(names)

    def make_event(self) -> Event:
        """Make an event of the other device."""
        return self._device.make_event()

    def start_timer(self) -> Timer:
        """Start a timer of the other device."""
        return self._device.start_timer()

    def find_ranges(self, wanted: str = "auto") -> OpenRange | None:
        """Return the other device's ranges."""
        return self._device.find_ranges(wanted)

    def begin(self) -> None:
        """Begin a run of the other device."""
        self._device.begin()

    def release_to_caller(self, values: Iterable[Any]) -> None:
        """Release values in the first lane's memory."""
        self._device.release_to_caller(values)

    def finish(self) -> None:
        """End a run of the other device."""
        self._device.finish()

    def abort(self) -> None:
        """Abort a run of the other device."""
        self._device.abort()

    def synchronize(self) -> None:
        """Wait for the other device."""
        self._device.synchronize()

    def close(self) -> None:
        """Do nothing: the other device belongs to the caller."""
