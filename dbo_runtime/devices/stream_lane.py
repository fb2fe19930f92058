"""A torch stream as a lane, and the events that lanes wait for."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from dbo_runtime.devices import DirectCalls, Observe, Task, Values, check_recorded

if TYPE_CHECKING:
    from dbo_runtime.devices.torch_streams import StreamDevice


class StreamEvent:
    """A backend event, with the run in which it was last recorded."""

    __slots__ = ("native", "run")

    def __init__(self, native: Any) -> None:
        self.native = native
        self.run = 0


class StreamLane:
    """A stream. The first lane's stream is the one that is current when a run begins."""

    def __init__(self, name: str, stream: Any, device: StreamDevice) -> None:
        self.name = name
        self.stream = stream
        self._device = device

    def launch(self, task: Task, values: Values) -> None:
        """Issue the op's kernels onto the stream."""
        self._device.switch(self)
        task(values)

    def measure(self, task: Task, values: Values, observe: Observe) -> None:
        """Launch the task between two timing events."""
        issued = time.perf_counter()
        start = self._device.read_clock(self)
        self.launch(task, values)
        observe(issued, start, self._device.read_clock(self))

    def record(self, event: StreamEvent) -> None:
        """Record the event after everything issued onto the stream."""
        event.native.record(self.stream)
        event.run = self._device.run

    def wait(self, event: StreamEvent) -> None:
        """Let the stream wait for the event, without blocking the host."""
        check_recorded(event.run, self._device.run, self.name)
        self.stream.wait_event(event.native)

    def get_direct_calls(self) -> DirectCalls:
        """Return functions for the stream that the lane has in this run."""
        stream, run, wait_event = self.stream, self._device.run, self.stream.wait_event

        def record(event: StreamEvent) -> None:
            event.native.record(stream)
            event.run = run

        def wait(event: StreamEvent) -> None:
            wait_event(event.native)

        return DirectCalls(partial(self._device.backend.set_stream, stream), record, wait)

    def move(self, stream: Any) -> None:
        """Continue on another stream, after everything on the current one."""
        stream.wait_stream(self.stream)
        self.stream = stream
