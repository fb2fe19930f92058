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
        self._origin: tuple[Any, float] | None = None

    def restart(self) -> None:
        """Begin anew. Milliseconds since an event are a float32 to the backends, so that must not lie long ago."""
        self._origin = None

    def read(self, stream: Any) -> Moment:
        """Return the moment at which all that was issued onto a stream is done.

        The first since the start is waited for, to know what the host's clock says then.
        """
        native = self._backend.Event(enable_timing=True)
        native.record(stream)
        if self._origin is None:
            native.synchronize()
            self._origin = native, time.perf_counter()
        return Moment(native, self._origin)


class Moment:
    """A point in a stream's time. `float()` waits for it and gives seconds of `time.perf_counter`."""

    __slots__ = ("_native", "_origin")

    def __init__(self, native: Any, origin: tuple[Any, float]) -> None:
        self._native = native
        self._origin = origin

    def __float__(self) -> float:
        event, seconds = self._origin
        self._native.synchronize()
        return seconds + float(event.elapsed_time(self._native)) / 1e3  # it is in ms


class StreamWatch:
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
