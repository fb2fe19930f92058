"""Time on streams, by timing events. Nothing waits until a time is read."""

from __future__ import annotations

import time
from typing import Any


class StreamClock:
    """Points in the time of streams, on the host's clock.

    Args:
        backend: `torch.npu` or `torch.cuda`.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._reference = _Reference(backend)

    def restart(self) -> None:
        """Make a new reference. Backends return the ms between events as float32, so events must not be far apart."""
        self._reference = _Reference(self._backend)

    def read(self, stream: Any) -> Moment:
        """Return the moment when everything issued onto a stream is done."""
        native = self._backend.Event(enable_timing=True)
        native.record(stream)
        return Moment(native, self._reference)


class Moment:
    """A point in a stream's time. `float()` waits for it and returns seconds of `time.perf_counter`."""

    __slots__ = ("_native", "_reference")

    def __init__(self, native: Any, reference: _Reference) -> None:
        self._native = native
        self._reference = reference

    def __float__(self) -> float:
        self._native.synchronize()
        event, seconds = self._reference.get()
        return seconds - float(self._native.elapsed_time(event)) / 1e3  # it is in ms


class _Reference:
    """A reference event of known host time. It is made at first use, because making it blocks the host."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._point: tuple[Any, float] | None = None

    def get(self) -> tuple[Any, float]:
        """Return the event, and the host time of the event in seconds."""
        if self._point is None:
            native = self._backend.Event(enable_timing=True)
            native.record()
            native.synchronize()
            self._point = native, time.perf_counter()
        return self._point


class StreamTimer:
    """Two timing events on the streams that are current at start and stop."""

    def __init__(self, backend: Any) -> None:
        self._start, self._stop = (backend.Event(enable_timing=True) for _ in range(2))
        self._start.record()
        self._stopped = False

    def stop(self) -> None:
        """Record the stop, after everything issued onto the current stream."""
        self._stop.record()
        self._stopped = True

    def read(self) -> float | None:
        """Return the seconds, or None before the stream has reached the stop."""
        if not self._stopped or not self._stop.query():
            return None
        return float(self._start.elapsed_time(self._stop)) / 1e3  # it is in ms
