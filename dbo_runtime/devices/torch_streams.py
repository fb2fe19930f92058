"""Streams of torch as lanes: what `torch.npu` and `torch.cuda` have in common.

The host thread that issues calls every op at once, with its lane's stream as the current one; kernels follow in the
order of the stream. So an op that raises does it on the host, and nothing here waits for a kernel but `abort`, `close`,
and whoever reads a clock.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from dbo_runtime.devices import DirectCalls, Graph, Lane, Note, Result, Task, Values, check_recorded
from dbo_runtime.devices.stream_clock import Moment, StreamClock, StreamTimer
from dbo_runtime.errors import DeviceError

POOL = 32  # streams that CUDA (of one priority) and NPU each hand out in turn (c10/cuda/CUDAStream.h, NPUStream.cpp)


class StreamEvent:
    """An event of the backend, and in which run it was recorded last."""

    __slots__ = ("native", "run")

    def __init__(self, native: Any) -> None:
        self.native = native
        self.run = 0


class StreamLane:
    """A stream. The first lane's is the one that is current when a run begins."""

    def __init__(self, name: str, stream: Any, device: StreamDevice) -> None:
        self.name = name
        self.stream = stream
        self._device = device

    def launch(self, task: Task, values: Values) -> None:
        """Issue the op's kernels onto the stream."""
        self._device.switch(self)
        task(values)

    def measure(self, task: Task, values: Values, note: Note) -> None:
        """Launch the task between two timing events."""
        issued = time.perf_counter()
        start = self._device.read_clock(self)
        self.launch(task, values)
        note(issued, start, self._device.read_clock(self))

    def record(self, event: StreamEvent) -> None:
        """Let the event stand for all that was issued onto the stream."""
        event.native.record(self.stream)
        event.run = self._device.run

    def wait(self, event: StreamEvent) -> None:
        """Let the stream wait for the event; the host goes on."""
        check_recorded(event.run, self._device.run, self.name)
        self.stream.wait_event(event.native)

    def get_direct_calls(self) -> DirectCalls:
        """Return calls for the stream that the lane has in this run."""
        stream, run, wait_event = self.stream, self._device.run, self.stream.wait_event

        def record(event: StreamEvent) -> None:
            event.native.record(stream)
            event.run = run

        def wait(event: StreamEvent) -> None:
            wait_event(event.native)

        return DirectCalls(partial(self._device.backend.set_stream, stream), record, wait)

    def move(self, stream: Any) -> None:
        """Go on with another stream, after all that is on the present one."""
        stream.wait_stream(self.stream)
        self.stream = stream


class StreamDevice:
    """Streams as lanes.

    Args:
        name: what `open_device` calls it; torch's name of the device type.
        backend: `torch.npu` or `torch.cuda`.
        make_graph: makes one of the backend's graphs.

    Attributes:
        run: how many runs were begun.
    """

    can_capture = True

    def __init__(self, name: str, backend: Any, make_graph: Callable[[], Any]) -> None:
        self.name = name
        self.backend = backend
        self._make_graph = make_graph
        self._capture_stream: Any = None
        self.run = 0
        self._lanes: dict[str, StreamLane] = {}
        self._current: StreamLane | None = None
        self._clock = StreamClock(backend)

    @property
    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return bool(self.backend.is_current_stream_capturing())

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        """Return the lanes; the first name stands for the stream that is current when a run begins.

        Raises:
            DeviceError: if all streams that the backend hands out are taken.
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
        """Start a watch on the current stream."""
        return StreamTimer(self.backend)

    def begin(self) -> None:
        """Start a run: the first lane is the stream that is current now."""
        self.run += 1
        self._clock.restart()
        first = self._find_first()
        if first is None:
            return
        stream = self.backend.current_stream()
        if stream != first.stream:
            if self.is_capturing:  # a stream under capture cannot wait for one outside; it has memory of its own
                first.stream = stream
            else:  # what the last run left in the lanes' memory may still be read on the old stream
                first.move(stream)
            self.separate_streams()
        self._current = first

    def switch(self, lane: StreamLane) -> None:
        """Make a lane's stream the current one, unless it is that already."""
        if lane is not self._current:
            self.backend.set_stream(lane.stream)
            self._current = lane

    def read_clock(self, lane: StreamLane) -> Moment:
        """Return the moment at which all that was issued onto the lane is done.

        Raises:
            DeviceError: under capture, where there are no moments yet.
        """
        if self.is_capturing:
            raise DeviceError("no times can be taken of what is captured into a graph: leave the instrument out.")
        return self._clock.read(lane.stream)

    def release_to_caller(self, values: Iterable[Any]) -> None:
        """Tell the allocator of tensors that leave the schedule, because from now on the caller frees them.

        Within a run the schedule's frees keep memory safe: none comes before the lane that the memory belongs to has
        waited for whoever read it. The caller waits for nothing, and uses all of them on the first lane's stream.
        """
        first = self._find_first()
        assert first is not None, "nothing is handed over before a run"
        for tensor in _find_tensors(values):
            if tensor.device.type == self.name:
                tensor.record_stream(first.stream)

    def finish(self) -> None:
        """End a run: the stream that was current when it began is current again. Kernels may still run."""
        first = self._find_first()
        if first is not None:  # whichever lane `DirectCalls.switch` has made the current one
            self.backend.set_stream(first.stream)
            self._current = first

    def abort(self) -> None:
        """End a run that failed: return when no kernel of it runs any more.

        Under capture nothing runs yet, but a graph can end only where all its lanes have come together again.
        """
        first = self._find_first()
        if first is None:
            return
        self.backend.set_stream(first.stream)  # whatever the op that failed has left
        self._current = first
        capturing = self.is_capturing
        for lane in self._lanes.values():
            if not capturing:
                lane.stream.synchronize()
            elif lane is not first and self._is_captured(lane):
                first.stream.wait_stream(lane.stream)

    def capture(self, run: Callable[[], Result], beside: Graph | None = None) -> tuple[Graph, Result]:
        """Capture on a stream of its own; see `Device.capture`.

        All captures have one stream, for within a pool memory is a stream's. What other threads do meanwhile is not
        looked at (`thread_local`): a watchdog that asks for an event must not break a capture, nor be broken by it.
        """
        if self.is_capturing:
            raise DeviceError("a capture goes on already: end it first, or leave out the one within.")
        stream, before = self._find_capture_stream(), self.backend.current_stream()
        pool = self.backend.graph_pool_handle() if beside is None else cast(Any, beside).pool()
        graph = self._make_graph()
        with _without_collection():
            try:
                stream.wait_stream(before)
                with self.backend.stream(stream):
                    run()
                with self.backend.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    result = run()
            finally:
                self.backend.set_stream(before)  # both backends leave theirs where the end of a capture is refused
        return graph, result

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self.backend.synchronize()

    def reserve(self, run: Callable[[], Any]) -> int:
        """Run something, and let the memory it took show as a peak of what tensors took; return its bytes.

        Each lane has memory of its own, and what one has cached no other can have, so that a split step takes more than
        its tensors do, and keeps it while others run. Whoever sizes a cache by the peak of tensors (vLLM:
        `allocated_bytes.all.peak`) leaves room for it afterwards.
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
        """Wait for the lanes and forget them. The device can be used again."""
        self.synchronize()
        for position, lane in enumerate(self._lanes.values()):
            if position:
                self.return_stream(lane.stream)
        self._lanes.clear()
        self._current = self._capture_stream = None

    def find_taken(self) -> set[int]:
        """Return the ids of streams that are no lane's and must not become one."""
        return set()

    def draw_stream(self, lane: str) -> Any:
        """Return a stream that nobody else has.

        Raises:
            DeviceError: if the backend has no such stream.
        """
        taken = self.find_taken() | {other.stream.stream_id for other in self._lanes.values()}
        if self._capture_stream is not None:
            taken.add(self._capture_stream.stream_id)
        for _ in range(POOL):
            stream = self.backend.Stream()
            if stream.stream_id not in taken:
                return stream
        raise DeviceError(
            f"{self.name} has no stream left for lane {lane!r}: it hands out {POOL} in turn, and all are taken. Let "
            "the program name fewer lanes, or make fewer communicators."
        )

    def return_stream(self, stream: Any) -> None:
        """Undo what was done to a stream that was drawn: the backend hands it to others, too."""

    def separate_streams(self) -> None:
        """See that no two lanes have the same stream: one would wait for itself, and nothing would overlap.

        Raises:
            DeviceError: if that cannot be had.
        """
        taken = self.find_taken()
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

    def _find_first(self) -> StreamLane | None:
        return next(iter(self._lanes.values()), None)

    def _find_capture_stream(self) -> Any:
        if self._capture_stream is None or self._capture_stream.stream_id in self.find_taken():
            self._capture_stream = self.draw_stream("capture")
        return self._capture_stream

    def _is_captured(self, lane: StreamLane) -> bool:
        with self.backend.stream(lane.stream):
            return self.is_capturing


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep the garbage collector off: it could end a graph or tensors, and with that break a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _find_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _find_tensors(value)
