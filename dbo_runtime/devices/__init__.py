"""What a device must offer, and how to open one.

A lane runs tasks in the order launched. An event, once recorded on a lane, stands for everything launched there so far;
a lane that waits for it runs nothing further before that is done. Lanes and events are made once and used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dbo_runtime.errors import DeviceError

Values = list[Any]


class Event(Protocol):
    """A point on a lane. Opaque to everyone but its device."""


class Task(Protocol):
    """An op bound to the slots it reads and writes."""

    def __call__(self, values: Values, /) -> None:
        """Read, run, and write the values [slots] of one run."""


class Lane(Protocol):
    """An in-order queue of a device: a stream, or a thread."""

    @property
    def name(self) -> str:
        """The lane's name in programs."""

    def launch(self, task: Task, values: Values) -> None:
        """Run `task(values)` after all that was launched here or waited for."""

    def record(self, event: Any) -> None:
        """Let *event* stand for all that was launched so far."""

    def wait(self, event: Any) -> None:
        """Run nothing further before *event* has happened.

        Raises:
            DeviceError: if the event was not recorded since the device began: real devices let such a wait pass.
        """


class Device(Protocol):
    """Something that runs lanes side by side."""

    @property
    def name(self) -> str:
        """What `open_device` calls it."""

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        """Return the lanes of these names, `compute` first, making those that are new."""

    def make_event(self) -> Event:
        """Make an event to record and wait for, any number of times."""

    def begin(self) -> None:
        """Start a run. Events recorded before do not count in it."""

    def finish(self) -> None:
        """End a run; raise what a task raised, if none of the waits has raised it already."""

    def abort(self) -> None:
        """End a run that failed: return when no task runs any more, ready for `begin`."""

    def close(self) -> None:
        """Give back what the device holds, threads included."""


def open_device(name: str, **options: Any) -> Device:
    """Open the device *name*; *options* go to its constructor.

    Raises:
        DeviceError: for a name there is no device for.
    """
    from dbo_runtime.devices.cpu import CpuDevice
    from dbo_runtime.devices.virtual import VirtualDevice

    known: dict[str, Callable[..., Device]] = {"cpu": CpuDevice, "virtual": VirtualDevice}
    if name not in known:
        raise DeviceError(f"there is no device {name!r}; known are {', '.join(known)}.")
    return known[name](**options)
