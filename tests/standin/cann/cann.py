"""The stand-in for CANN as tests see it: load it, slow kernels down, see what ran when, and hold streams."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tests.standin.cann.build import LIBRARIES, StandInError, build, lib

ACL_STREAM_WAIT_VALUE_EQ = 1
NANOSECONDS = 1e-9
# What a stream runs only to wait for others, or to be waited for: no work, and never slowed down.
ORDERING = frozenset(("EventRecord", "EventWait", "ValueWrite", "ValueWait", "GraphReplay", "TaskUpdate"))


class Kernel(NamedTuple):
    """One run of a kernel; times in seconds on the clock of `time.monotonic`.

    The stream is the id that CANN gives it (`StandIn.get_stream_id`), not torch's `stream_id`. What a graph runs has
    ids of its own: 1000000 times the number of the graph, counted from 1 in the order of captures, plus the lane. Lane
    0 is the stream that the capture began on; the others follow in the order in which they joined. Such a kernel counts
    as queued when the replay starts. A copy that the host waits for, such as that of `tensor.cpu()`, is on none: -1.
    """

    stream: int
    name: str
    queued: float
    start: float
    end: float


def load() -> StandIn | None:
    """Build the stand-in and load it into this process; call it before `import torch_npu`.

    Returns:
        None on a machine that has CANN itself (ASCEND_HOME_PATH is set): nothing is loaded then.

    Raises:
        StandInError: it cannot be built; the message says why.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # in child processes a bare `import torch` must work
    if "ASCEND_HOME_PATH" in os.environ:
        return None
    folder = build()
    # torch_npu finds by name what is loaded already.
    libraries = [ctypes.CDLL(str(lib(folder, name)), mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES]
    return StandIn(libraries[0])


class StandIn:
    """The loaded stand-in. One per process; all of it is about the whole process."""

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self._runtime = runtime
        for name, arguments, result in (
            ("standin_delay", (ctypes.c_char_p, ctypes.c_double), None),
            ("standin_jitter", (ctypes.c_uint64, ctypes.c_double), None),
            ("standin_find_extra_time", (ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint64), ctypes.c_double),
            ("standin_calm", (), None),
            ("standin_trace_start", (), None),
            ("standin_trace_stop", (), ctypes.c_size_t),
            ("standin_trace_read", (ctypes.POINTER(_Interval), ctypes.c_size_t), None),
            ("standin_count_allocated", (), ctypes.c_size_t),
            ("aclrtStreamGetId", (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)), ctypes.c_int),
        ):
            function = getattr(runtime, name)
            function.argtypes, function.restype = arguments, result

    def delay(self, kernel: str, seconds: float) -> None:
        """Let each run of a kernel take so much longer, until `calm`."""
        self._runtime.standin_delay(kernel.encode(), seconds)

    def jitter(self, seed: int, seconds: float) -> None:
        """Let every kernel take a pseudo-random time up to this longer, until `calm`.

        The time is the same for the same seed, stream, and number of the kernel on its stream, counted from this call
        on; in a graph, for the same seed, lane, and number of the kernel on its lane, counted from the capture on. To
        repeat a failing case use the same streams: torch hands out another of its 32 each time that one is made.
        """
        self._runtime.standin_jitter(seed, seconds)

    def find_extra_time(self, kernel: str, stream: int, number: int) -> float:
        """Return how many seconds longer a kernel takes now.

        Args:
            kernel: its name.
            stream: as in `Kernel`; for the lanes of any graph, -1 and down.
            number: how many kernels its stream or lane has run before, counted as for `jitter`.
        """
        return float(self._runtime.standin_find_extra_time(kernel.encode(), stream, number))

    def calm(self) -> None:
        """End all delays and jitter."""
        self._runtime.standin_calm()

    @contextmanager
    def trace(self) -> Iterator[list[Kernel]]:
        """Note what runs meanwhile. The list is empty until the end, and then in the order in which kernels began.

        Synchronize before the end: what still runs then is left out. Waits and the like are in it too: see `ORDERING`.
        """
        kernels: list[Kernel] = []
        self._runtime.standin_trace_start()
        try:
            yield kernels
        finally:
            intervals = (_Interval * self._runtime.standin_trace_stop())()
            self._runtime.standin_trace_read(intervals, len(intervals))
            kernels += sorted((interval.as_kernel() for interval in intervals), key=lambda kernel: kernel.start)

    def get_stream_id(self, stream: int) -> int:
        """Return the id that a stream, given by its handle, has in the trace."""
        number = ctypes.c_int32()
        if self._runtime.aclrtStreamGetId(stream, ctypes.byref(number)):
            raise StandInError(f"there is no stream with the handle {stream:#x}.")
        return number.value

    def count_allocated(self) -> int:
        """Return how many bytes of device memory are allocated from CANN, on all devices."""
        return int(self._runtime.standin_count_allocated())


class Latch:
    """Holds a stream until it is released, by CANN's own wait for a value in device memory: it works on an NPU too.

    Args:
        address: of eight aligned bytes in device memory that are zero: the `data_ptr()` of a `torch.zeros(1,
            dtype=torch.int64)` on the device, which the caller has synchronized and keeps alive. A released latch holds
            nothing any more.

    Stream handles are `stream.npu_stream`, read anew for each call: reading it lets torch_npu's host queue run empty,
    and only then is what was launched before in front of the wait.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self._runtime = ctypes.CDLL("libascendcl.so")  # the stand-in, if that was loaded
        for name in ("aclrtValueWait", "aclrtValueWrite"):
            function = getattr(self._runtime, name)
            function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p)
            function.restype = ctypes.c_int
        self._runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p

    def hold(self, stream: int) -> None:
        """Queue a wait: what is launched on the stream from now on does not run before the release."""
        self._check(self._runtime.aclrtValueWait(self._address, 1, ACL_STREAM_WAIT_VALUE_EQ, stream))

    def release(self, other_stream: int) -> None:
        """Let all held streams go on, in the order of another stream, which must not be held itself."""
        self._check(self._runtime.aclrtValueWrite(self._address, 1, 0, other_stream))

    def _check(self, error: int) -> None:
        if error:
            text = self._runtime.aclGetRecentErrMsg() or b"no text"
            raise StandInError(f"CANN refused a latch with error {error}: {text.decode()}")


class _Interval(ctypes.Structure):
    """`standin_Kernel` of runtime/trace.cpp."""

    _fields_ = (
        ("stream", ctypes.c_int64),
        ("queued", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("name", ctypes.c_char * 104),
    )

    def as_kernel(self) -> Kernel:
        times = (time * NANOSECONDS for time in (self.queued, self.start, self.end))
        return Kernel(self.stream, self.name.decode(), *times)
