"""Torch streams as lanes: the common part of `torch.npu` and `torch.cuda`.

The issuing host thread calls every op immediately, with the op's stream as the current one. Kernels follow in stream
order. An op that raises therefore does so on the host, and only `abort`, `close` and clock reads wait for kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from dbo_runtime.devices import Lane
from dbo_runtime.devices.ranges import Marks, find_ranges
from dbo_runtime.devices.stream_clock import Moment, StreamClock, StreamTimer
from dbo_runtime.devices.stream_lane import StreamEvent, StreamLane
from dbo_runtime.errors import DeviceError
from dbo_runtime.observe.logs import open_log
from dbo_runtime.observe.ranges import OpenRange

POOL_STREAMS = 32  # in rotation on CUDA (per priority) and on an NPU (c10/cuda/CUDAStream.h, NPUStream.cpp)


class StreamDevice:
    """Streams as lanes.

    Args:
        name: name for `open_device`, the same as torch's device type.
        backend: `torch.npu` or `torch.cuda`.
        marks: marks for the backend's own profilers; None if it has none.

    Attributes:
        run: number of runs begun.
    """

    def __init__(self, name: str, backend: Any, marks: Marks | None = None) -> None:
        self.name = name
        self.backend = backend
        self._marks = marks
        self._has_tried_marks = marks is None
        self.run = 0
        self._lanes: dict[str, StreamLane] = {}
        self._current: StreamLane | None = None
        self._clock = StreamClock(backend)

    @property
    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return bool(self.backend.is_current_stream_capturing())

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        """Return the lanes. The first is on the stream that is current when a run begins.

        Raises:
            DeviceError: all streams of the backend are in use.
        """
        for position, name in enumerate(names):
            if name not in self._lanes:
                stream = self.draw_stream(name) if position else self.backend.current_stream()
                self._lanes[name] = StreamLane(name, stream, self)
        self.separate_streams()
        return [self._lanes[name] for name in names]

    def make_event(self) -> StreamEvent:
        """Make an event that is not recorded yet."""
        return StreamEvent(self.backend.Event())

    def start_timer(self) -> StreamTimer:
        """Start a timer on the current stream."""
        return StreamTimer(self.backend)

    def find_ranges(self, wanted: str = "auto") -> OpenRange | None:
        """Return the ranges of torch and of the backend; None under capture, when nothing runs yet.

        The backend's marks are left out if they fail, as in a torch without NVTX, because they would fail every step.
        """
        if find_ranges(wanted) is None or self.is_capturing:
            return None
        if not self._has_tried_marks:
            self._try_marks()
        return find_ranges(wanted, self._marks)

    def _try_marks(self) -> None:
        self._has_tried_marks = True
        assert self._marks is not None, "without any, there is nothing to try"
        try:
            self._marks.end(self._marks.start("dbo: the first range"))
        except Exception as error:  # noqa: BLE001 - steps can do without marks, whatever the backend raises
            self._marks = None
            open_log().warning("ranges are shown in torch's profiler only", device=self.name, reason=repr(error))

    def begin(self) -> None:
        """Begin a run. The first lane is on the stream that is current now."""
        self.run += 1
        self._clock.restart()
        first = self._get_first()
        if first is None:
            return
        stream = self.backend.current_stream()
        if stream != first.stream:
            if self.is_capturing:  # a stream under capture cannot wait for others; its memory is separate
                first.stream = stream
            else:  # the old stream may still read memory of the last run
                first.move(stream)
            self.separate_streams()
        self._current = first

    def switch(self, lane: StreamLane) -> None:
        """Make a lane's stream the current one, if it is not."""
        if lane is not self._current:
            self.backend.set_stream(lane.stream)
            self._current = lane

    def read_clock(self, lane: StreamLane) -> Moment:
        """Return the moment when everything issued onto the lane is done.

        Raises:
            DeviceError: the stream is under capture, so nothing runs yet.
        """
        if self.is_capturing:
            raise DeviceError("work captured into a graph cannot be timed: leave the instrument out.")
        return self._clock.read(lane.stream)

    def release_to_caller(self, values: Iterable[Any]) -> None:
        """Tell the allocator that the caller's stream uses tensors that leave the schedule (`record_stream`).

        Within a run, the schedule's frees keep memory safe: a value is freed only after the owning lane has waited for
        every reader. From now on the caller frees the tensors, without waiting, and uses them on the first lane's
        stream.
        """
        first = self._get_first()
        assert first is not None, "no lane is open"
        for tensor in _list_tensors(values):
            if tensor.device.type == self.name:
                tensor.record_stream(first.stream)

    def finish(self) -> None:
        """End a run. Restore the stream that was current when it began. Kernels may still run."""
        first = self._get_first()
        if first is not None:  # `DirectCalls.switch` does not track the current stream
            self.backend.set_stream(first.stream)
            self._current = first

    def abort(self) -> None:
        """End a failed run. Return once none of its kernels runs any more.

        Under capture nothing runs yet, but a capture can end only once all lanes are joined.
        """
        first = self._get_first()
        if first is None:
            return
        self.backend.set_stream(first.stream)  # the failed op may have left another stream current
        self._current = first
        capturing = self.is_capturing
        for lane in self._lanes.values():
            if not capturing:
                lane.stream.synchronize()
            elif lane is not first and self._is_captured(lane):
                first.stream.wait_stream(lane.stream)

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self.backend.synchronize()

    def reserve(self, run: Callable[[], Any]) -> int:
        """Call *run*, count the memory it reserves as a peak of allocated memory, and return its bytes.

        Each lane caches memory that no other lane can use, so a split step reserves more than its tensors take, and
        keeps it. A caller that sizes a cache by the peak of allocated memory (vLLM: `allocated_bytes.all.peak`) then
        leaves room for the reserved memory.
        """
        memory = self.backend
        self.synchronize()
        memory.empty_cache()
        held = memory.memory_reserved()
        memory.reset_peak_memory_stats()
        run()
        self.synchronize()
        taken = int(memory.max_memory_reserved() - held)
        memory.empty_cache()
        torch.empty(taken, dtype=torch.uint8, device=self.name)  # freed at once: only the peak remains
        memory.empty_cache()
        return taken

    def close(self) -> None:
        """Wait for the lanes and drop them. The device can be reused."""
        self.synchronize()
        for lane in list(self._lanes.values())[1:]:  # the first lane has the caller's stream
            self.return_stream(lane.stream)
        self._lanes.clear()
        self._current = None

    def list_reserved(self) -> set[int]:
        """Return the ids of the streams that must not become a lane."""
        return set()

    def draw_stream(self, lane: str) -> Any:
        """Return an unused stream.

        Raises:
            DeviceError: the backend has none left.
        """
        taken = self.list_reserved() | {other.stream.stream_id for other in self._lanes.values()}
        for _ in range(POOL_STREAMS):
            stream = self.make_stream(lane)
            if stream.stream_id not in taken:
                return stream
        raise DeviceError(
            f"{self.name} has no stream left for lane {lane!r}: all {POOL_STREAMS} are in use. Let the program name "
            "fewer lanes, or make fewer communicators."
        )

    def make_stream(self, lane: str) -> Any:
        """Return the next stream of the backend's pool for a lane. It may be in use."""
        return self.backend.Stream()

    def return_stream(self, stream: Any) -> None:
        """Reset a drawn stream, because the backend will hand it out again."""

    def separate_streams(self) -> None:
        """Give each lane its own stream. On a shared stream, lanes would wait for each other and nothing would overlap.

        Raises:
            DeviceError: the current stream is reserved, or no stream is left for a lane.
        """
        taken = self.list_reserved()
        for position, lane in enumerate(self._lanes.values()):
            if lane.stream.stream_id in taken:
                if not position:
                    raise DeviceError(
                        f"the current stream, {lane.stream.stream_id}, is one that collectives run on: nothing would "
                        "overlap with them. Serve on another stream."
                    )
                self.return_stream(lane.stream)
                lane.move(self.draw_stream(lane.name))
            taken.add(lane.stream.stream_id)

    def _get_first(self) -> StreamLane | None:
        return next(iter(self._lanes.values()), None)

    def _is_captured(self, lane: StreamLane) -> bool:
        with self.backend.stream(lane.stream):
            return self.is_capturing


def _list_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _list_tensors(value)
