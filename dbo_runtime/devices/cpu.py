"""The CPU as a device: the compute lane is the calling thread, and every other lane is a worker thread.

No thread spins: a wait reads a counter, or blocks on a condition variable.

Collectives run on a worker, not with gloo's `async_op=True`. Between two hosts that was a few per cent faster in one
workload and slower in another, and schedules assume lanes whose ops finish in order.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any

from dbo_runtime.devices import (
    DirectCalls,
    Lane,
    Observe,
    Task,
    Values,
    check_recorded,
)
from dbo_runtime.errors import DeviceError
from dbo_runtime.observe.ranges import OpenRange

ThreadState = Callable[[], AbstractContextManager[Any]]


class CpuEvent:
    """A count on a worker's lane, like a Vulkan timeline semaphore, or a mark of the calling thread."""

    __slots__ = ("count", "run", "worker")

    def __init__(self) -> None:
        self.run = 0
        self.worker: WorkerLane | None = None
        self.count = 0


class CallingThreadLane:
    """Runs each task immediately, on the calling thread."""

    def __init__(self, name: str, device: CpuDevice) -> None:
        self.name = name
        self._device = device

    def launch(self, task: Task, values: Values) -> None:
        """Run the task."""
        task(values)

    def measure(self, task: Task, values: Values, observe: Observe) -> None:
        """Run the task and read the clock before and after it."""
        _Timed(task, observe)(values)

    def record(self, event: CpuEvent) -> None:
        """Mark the event as happened: everything launched on this lane has returned."""
        event.run = self._device.run
        event.worker = None

    def wait(self, event: CpuEvent) -> None:
        """Block until the event's worker has reached its count."""
        check_recorded(event.run, self._device.run, self.name)
        if event.worker is not None:
            event.worker.block(event.count)
            self._device.raise_failure()

    def get_direct_calls(self) -> DirectCalls:
        """Return the lane's own methods. A called op runs to its end."""
        return DirectCalls(None, self.record, self.wait)


class WorkerLane:
    """Runs tasks in order on its own thread, with the thread state of the thread that began the run."""

    def __init__(self, name: str, device: CpuDevice) -> None:
        self.name = name
        self._device = device
        self._jobs: SimpleQueue[tuple[Task, Values] | None] = SimpleQueue()
        self._launched = 0
        self._done = 0
        self._closed = False
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"dbo-{name}", daemon=True)
        self._thread.start()

    def launch(self, task: Task, values: Values) -> None:
        """Queue the task."""
        if self._closed:
            raise DeviceError(f"lane {self.name!r} is closed; open the device's lanes anew.")
        self._launched += 1
        self._jobs.put((task, values))

    def measure(self, task: Task, values: Values, observe: Observe) -> None:
        """Queue the task and read the clock before and after it. The worker calls *observe*."""
        self.launch(_Timed(task, observe), values)

    def record(self, event: CpuEvent) -> None:
        """Record the event after everything queued."""
        event.run = self._device.run
        event.worker = self
        event.count = self._launched

    def wait(self, event: CpuEvent) -> None:
        """Queue a wait for another worker. Events of the calling thread have already happened."""
        check_recorded(event.run, self._device.run, self.name)
        worker, count = event.worker, event.count
        if worker is not None and worker is not self:
            self.launch(lambda _: worker.block(count), [])

    def get_direct_calls(self) -> None:
        """Return None: ops run on the lane's own thread."""

    def block(self, count: int | None = None) -> None:
        """Return once *count* tasks are done, by default all tasks launched."""
        count = self._launched if count is None else count
        if self._done < count:
            with self._progress:
                self._progress.wait_for(lambda: self._done >= count)

    def close(self) -> None:
        """End the thread once its queue is empty."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            task, values = job
            if not self._device.has_failed:  # after a failure, tasks are counted but not run
                try:
                    with self._device.thread_state():
                        task(values)
                except BaseException as error:  # noqa: BLE001 - the calling thread raises it again
                    self._device.fail(error)
            del job, task, values  # an idle worker must not keep tensors alive
            with self._progress:
                self._done += 1
                self._progress.notify_all()


class HostTimer:
    """A timer by the host's clock. That is exact, because the calling thread runs each task as it is launched."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: float | None = None

    def stop(self) -> None:
        """Read the clock now."""
        self._seconds = time.perf_counter() - self._start

    def read(self) -> float | None:
        """Return the seconds, or None before `stop`."""
        return self._seconds


class _Timed:
    """A task that reports when it was issued and when it ran."""

    __slots__ = ("_issued", "_observe", "_task")

    def __init__(self, task: Task, observe: Observe) -> None:
        self._task = task
        self._observe = observe
        self._issued = time.perf_counter()

    def __call__(self, values: Values) -> None:
        start = time.perf_counter()
        self._task(values)
        self._observe(self._issued, start, time.perf_counter())


class CpuDevice:
    """Threads as lanes.

    Args:
        capture_state: function called on the calling thread at `begin`. It returns a factory of context managers; a
            worker enters one around each task. This passes on torch's thread-local state (inference mode, grad mode).
        inline: names of further lanes on the calling thread, for ops that must not run concurrently with `compute`
            because their kernels share scratch memory.
    """

    name = "cpu"
    is_capturing = False

    def __init__(self, capture_state: Callable[[], ThreadState] | None = None, inline: Collection[str] = ()) -> None:
        self.run = 0
        self.thread_state: ThreadState = nullcontext
        self._capture_state = capture_state
        self._inline = frozenset(inline)
        self._lanes: dict[str, CallingThreadLane | WorkerLane] = {}
        self._failure: BaseException | None = None
        self._find_ranges: Callable[[str], OpenRange | None] | None = None
        self._lock = threading.Lock()

    @property
    def has_failed(self) -> bool:
        """Whether a task of this run has raised."""
        return self._failure is not None

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        """Return the lanes. The first lane and the `inline` lanes are on the calling thread."""
        for position, name in enumerate(names):
            if name not in self._lanes:
                make = WorkerLane if position and name not in self._inline else CallingThreadLane
                self._lanes[name] = make(name, self)
        return [self._lanes[name] for name in names]

    def make_event(self) -> CpuEvent:
        """Make an event that is not recorded yet."""
        return CpuEvent()

    def start_timer(self) -> HostTimer:
        """Start a timer now."""
        return HostTimer()

    def find_ranges(self, wanted: str = "auto") -> OpenRange | None:
        """Return torch's ranges; None if torch is not imported.

        torch's profiler shows ops of workers only if it records all threads (`profile_all_threads`).
        """
        if self._find_ranges is None:
            if sys.modules.get("torch") is None:
                return None
            from dbo_runtime.devices.ranges import find_ranges

            self._find_ranges = find_ranges
        return self._find_ranges(wanted)

    def begin(self) -> None:
        """Begin a run with the calling thread's state."""
        self.run += 1
        if self._capture_state is not None:
            self.thread_state = self._capture_state()

    def release_to_caller(self, values: Iterable[Any]) -> None:
        """Do nothing: memory does not belong to lanes."""

    def finish(self) -> None:
        """End a run. Raise the error of a worker's task, if any."""
        self.raise_failure()

    def abort(self) -> None:
        """Wait until the workers are idle, without running the tasks still queued."""
        self.fail(DeviceError("the run was aborted."))
        self.synchronize()
        self._failure = None

    def synchronize(self) -> None:
        """Wait until the workers are idle."""
        for worker in self._list_workers():
            worker.block()

    def close(self) -> None:
        """End the workers. The device can be reused: new lanes are made."""
        for worker in self._list_workers():
            worker.close()
        self._lanes.clear()

    def fail(self, error: BaseException) -> None:
        """Keep the run's first failure."""
        with self._lock:
            self._failure = self._failure or error

    def raise_failure(self) -> None:
        """Raise the run's first failure, if any."""
        if self._failure is not None:
            raise self._failure

    def _list_workers(self) -> list[WorkerLane]:
        return [lane for lane in self._lanes.values() if isinstance(lane, WorkerLane)]
