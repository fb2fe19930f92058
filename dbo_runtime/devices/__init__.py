"""What a device must offer, and how to open one.

A lane runs tasks in the order launched. An event, once recorded on a lane, stands for everything launched there so far;
a lane that waits for it runs nothing further before that is done. Lanes and events are made once and used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, SupportsFloat, TypeVar

from dbo_runtime.errors import DeviceError
from dbo_runtime.observe.logs import open_log

Result = TypeVar("Result")
Values = list[Any]
Note = Callable[[float, SupportsFloat, SupportsFloat], None]  # is told when a task was issued, started and ended

_CLASSES = {
    "npu": ("dbo_runtime.devices.npu", "NpuDevice"),
    "cuda": ("dbo_runtime.devices.cuda", "CudaDevice"),
    "cpu": ("dbo_runtime.devices.cpu", "CpuDevice"),
    "virtual": ("dbo_runtime.devices.virtual", "VirtualDevice"),
}
_CHOICES = ("npu", "cuda", "cpu")  # of `auto`, in this order


class Event(Protocol):
    """A point on a lane. Opaque to everyone but its device."""


class Task(Protocol):
    """An op bound to the slots it reads and writes."""

    def __call__(self, values: Values, /) -> None:
        """Read, run, and write the values [slots] of one run."""


class DirectCalls(NamedTuple):
    """What issues onto a lane without tasks: an op is issued by calling it on the thread that began the run.

    Attributes:
        switch: makes the lane the one onto which ops issue that are called from now on; None if they always do.
        record: does what `Lane.record` does.
        wait: does what `Lane.wait` does, but for the check: the caller knows that the event was recorded in this run.
    """

    switch: Callable[[], None] | None
    record: Callable[[Any], None]
    wait: Callable[[Any], None]


class Lane(Protocol):
    """An in-order queue of a device: a stream, or a thread."""

    @property
    def name(self) -> str:
        """The lane's name in programs."""

    def launch(self, task: Task, values: Values) -> None:
        """Run `task(values)` after all that was launched here or waited for."""

    def measure(self, task: Task, values: Values, note: Note) -> None:
        """Launch the task and tell *note* when it was issued, starts and ends, in seconds of one clock.

        On some devices `float()` of start and end waits.

        *note* may be called from the thread that runs the task.
        """

    def record(self, event: Any) -> None:
        """Let *event* stand for all that was launched so far."""

    def wait(self, event: Any) -> None:
        """Run nothing further before *event* has happened.

        Raises:
            DeviceError: if the event was not recorded since the device began: real devices let such a wait pass.
        """

    def get_direct_calls(self) -> DirectCalls | None:
        """Return what issues onto the lane in the run that has begun; None where tasks must be launched.

        Which of the two, and whether there is a `switch`, stays the same; the calls are of one run. They are in place
        of `launch`: in a run that calls ops, none is launched on a lane that has such calls. After `begin` the first
        lane is the current one.
        """


class Timer(Protocol):
    """Takes the time of a step on the first lane, from where it was started."""

    def stop(self) -> None:
        """Stop when all that was launched so far is done."""

    def read(self) -> float | None:
        """Return the seconds between start and stop; None as long as that has not come. Never waits."""


class Graph(Protocol):
    """A run that was captured: what all its lanes were given to do, and the memory that this reads and writes."""

    def replay(self) -> None:
        """Run it once more where the current stream has come to, on what is in that memory then."""

    def reset(self) -> None:
        """Give the memory back. It cannot be replayed any more, and no replay may still run."""


class Device(Protocol):
    """Something that runs lanes side by side."""

    @property
    def name(self) -> str:
        """What `open_device` calls it."""

    @property
    def is_capturing(self) -> bool:
        """Whether what is launched now becomes part of a graph, to be replayed later."""

    @property
    def can_capture(self) -> bool:
        """Whether runs can be captured into graphs here."""

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        """Return the lanes of these names, `compute` first, making those that are new.

        Raises:
            DeviceError: if the device has not so many.
        """

    def make_event(self) -> Event:
        """Make an event to record and wait for, any number of times."""

    def start_timer(self) -> Timer:
        """Start a watch when all that was launched on the current stream or thread so far is done."""

    def begin(self) -> None:
        """Start a run. Events recorded before do not count in it."""

    def release_to_caller(self, values: Iterable[Any]) -> None:
        """Let the caller keep, use on the first lane, and free *values*, whichever lane's memory they are in."""

    def finish(self) -> None:
        """End a run; raise what a task raised, if none of the waits has raised it already."""

    def abort(self) -> None:
        """End a run that failed: return when no task runs any more, ready for `begin`."""

    def capture(self, run: Callable[[], Result], beside: Graph | None = None) -> tuple[Graph, Result]:
        """Call *run* twice: as it is, so that what is made at first use is there, and to capture what it launches.

        Args:
            run: begins, issues and ends a run.
            beside: a graph that is never replayed at the same time: the two share memory. What a replay has left in
                its results holds until either is replayed.

        Returns:
            the graph, and what *run* returned while it was captured: each replay writes that memory anew.

        Raises:
            DeviceError: if the device cannot capture, or does so already.
            Whatever *run* or the device raises. The current stream is then what it was, and runs go on as before; but
            some releases of torch (before 2.13) have lost the memory that was shared: capture beside no older graph.
        """

    def synchronize(self) -> None:
        """Return when all that was launched is done."""

    def close(self) -> None:
        """Give back what the device holds, threads included."""


def open_device(name: str, **options: Any) -> Device:
    """Open the device *name*; *options* go to its constructor.

    `auto`, which has no options, takes an NPU if there is one, else CUDA, else the CPU, and logs which and why.

    Raises:
        DeviceError: for a name there is no device for, or a device that is not there, with what to do about it.
    """
    if name == "auto" and not options:
        return _open_first()
    if name not in _CLASSES:
        known = f"known are auto (without options), {', '.join(_CLASSES)}"
        raise DeviceError(f"there is no device {name!r}; {known}.")
    module, kind = _CLASSES[name]
    try:
        make: Callable[..., Device] = getattr(import_module(module), kind)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torch, if it cannot load torch_npu by itself
        raise DeviceError(
            f"device {name!r} needs torch, which cannot be imported ({error}): install or mend it."
        ) from error
    return make(**options)


def _open_first() -> Device:
    """Open the first of the choices that is there; the last one always is.

    Each is asked by its own name: vllm-ascend rebinds names of `torch.cuda`, so that they say nothing about CUDA.
    """
    missing = []
    for name in _CHOICES[:-1]:
        try:
            device = open_device(name)
        except DeviceError as error:
            missing.append(f"no {name}: {error}")
        else:
            open_log().info("device chosen", device=name, reason=" ".join(missing) or "an NPU is there")
            return device
    open_log().info("device chosen", device=_CHOICES[-1], reason=" ".join(missing))
    return open_device(_CHOICES[-1])


def make_refusal(name: str) -> DeviceError:
    """Return what a device without graphs raises where it is asked to capture."""
    return DeviceError(f"device {name!r} cannot capture graphs: run the schedule eagerly there.")


def check_recorded(recorded: int, run: int, waiter: str) -> None:
    """Refuse a wait for an event that was recorded last in another run than the present one.

    Raises:
        DeviceError: names the lane that waits.
    """
    if recorded != run:
        raise DeviceError(
            f"lane {waiter!r} waits for an event that was not recorded in this run; the schedule was changed after it "
            "was validated. Validate what you execute."
        )
