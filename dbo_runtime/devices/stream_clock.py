"""Time on streams, by timing events: nothing waits but who asks for a number."""

from __future__ import annotations

import time
from typing import Any


class StreamClock:
    """Moments of streams on the host's clock.

    Args:
        backend: `torch.npu` or `torch.cuda`.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._bridge = _Bridge(backend)

    def restart(self) -> None:
        """Begin anew. Milliseconds between events are a float32 to the backends, so they must not lie far apart."""
        self._bridge = _Bridge(self._backend)

    def read(self, stream: Any) -> Moment:
        """Return the moment at which all that was issued onto a stream is done."""
        native = self._backend.Event(enable_timing=True)
        native.record(stream)
        return Moment(native, self._bridge)


class Moment:
    """A point in a stream's time. `float()` waits for it and gives seconds of `time.perf_counter`."""

    __slots__ = ("_bridge", "_native")

    def __init__(self, native: Any, bridge: _Bridge) -> None:
        self._native = native
        self._bridge = bridge

    def __float__(self) -> float:
        self._native.synchronize()
        event, seconds = self._bridge.find()
        return seconds - float(self._native.elapsed_time(event)) / 1e3  # it is in ms


class _Bridge:
    """An event of which the host's time is known, made when somebody first asks: the host has to wait for it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._found: tuple[Any, float] | None = None

    def find(self) -> tuple[Any, float]:
        """Return the event, and what the host's clock said when it had come."""
        if self._found is None:
            native = self._backend.Event(enable_timing=True)
            native.record()
            native.synchronize()
            self._found = native, time.perf_counter()
        return self._found


class StreamTimer:
    """Two timing events on the stream that is current at start and stop."""

    def __init__(self, backend: Any) -> None:
        self._start, self._stop = (backend.Event(enable_timing=True) for _ in range(2))
        self._start.record()
        self._stopped = False

    def stop(self) -> None:
        """Stop when what was issued onto the current stream is done."""
        self._stop.record()
        self._stopped = True

    def read(self) -> float | None:
        """Return the seconds; None as long as the stream has not come to the stop."""
        if not self._stopped or not self._stop.query():
            return None
        return float(self._start.elapsed_time(self._stop)) / 1e3  # it is in ms
