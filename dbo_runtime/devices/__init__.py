"""The contract of devices, and how to open one.

A lane runs tasks in the order launched. An event recorded on a lane happens when everything launched there so far is
done; a lane that waits for it runs nothing further before. Lanes and events are made once and reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, SupportsFloat

from dbo_runtime.errors import DeviceError
from dbo_runtime.observe.logs import open_log
from dbo_runtime.observe.ranges import OpenRange

Values = list[Any]
Observe = Callable[[float, SupportsFloat, SupportsFloat], None]  # takes when a task was issued, started and ended, in s

_CLASSES = {
    "npu": ("dbo_runtime.devices.npu", "NpuDevice"),
    "cuda": ("dbo_runtime.devices.cuda", "CudaDevice"),
    "cpu": ("dbo_runtime.devices.cpu", "CpuDevice"),
    "virtual": ("dbo_runtime.devices.virtual", "VirtualDevice"),
}
_AUTO = ("npu", "cuda", "cpu")  # tried in this order


class Event(Protocol):
    """A point on a lane, opaque outside its device."""


class Task(Protocol):
    """A callable that a lane runs: an op bound to the slots that it reads and writes."""

    def __call__(self, values: Values, /) -> None:
        """Run on the values of one run [slots]."""


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
        """Run `task(values)` after everything launched here or waited for so far."""

    def measure(self, task: Task, values: Values, observe: Observe) -> None:
        """Launch the task and call *observe* with when it was issued, started and ended, in seconds of one clock.

        On some devices `float()` of start and end waits for the device. *observe* may be called from the thread that
        runs the task.
        """

    def record(self, event: Any) -> None:
        """Record *event* after everything launched so far."""

    def wait(self, event: Any) -> None:
        """Run nothing further before *event* has happened.

        Raises:
            DeviceError: if the event was not recorded since `begin`; streams would ignore such a wait.
        """

    def get_direct_calls(self) -> DirectCalls | None:
        """Return what issues onto the lane in the run that has begun; None where tasks must be launched.

        Which of the two, and whether there is a `switch`, stays the same; the calls are of one run. They are in place
        of `launch`: in a run that calls ops, none is launched on a lane that has such calls. After `begin` the first
        lane is the current one.
        """


class Timer(Protocol):
    """Measures a step on the first lane, from where the timer was started."""

    def stop(self) -> None:
        """Stop when everything launched so far is done."""

    def read(self) -> float | None:
        """Return the seconds between start and stop, or None before the stop is reached. Never waits."""


class Device(Protocol):
    """Runs lanes concurrently."""

    @property
    def name(self) -> str:
        """The name that `open_device` takes."""

    @property
    def is_capturing(self) -> bool:
        """Whether launches are being captured into a graph."""

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        """Return the lanes of these names, `compute` first; make those that are new.

        Raises:
            DeviceError: if the device has too few.
        """

    def make_event(self) -> Event:
        """Make an event, to be recorded and waited for any number of times."""

    def start_timer(self) -> Timer:
        """Start a timer when everything launched on the current stream or thread so far is done."""

    def find_ranges(self, wanted: str = "auto") -> OpenRange | None:
        """Return what opens named ranges in profilers, on any thread that runs or issues ops; None if none is to.

        Args:
            wanted: `auto`: if torch's profiler is on now; `on`: in any case, for profilers that cannot be detected.
        """

    def begin(self) -> None:
        """Begin a run, in which events recorded before do not count."""

    def release_to_caller(self, values: Iterable[Any]) -> None:
        """Release *values*, of any lane's memory, to the caller, who uses them on the first lane and frees them."""

    def finish(self) -> None:
        """End a run; raise what a task raised, unless a wait has raised it already."""

    def abort(self) -> None:
        """End a failed run: return when no task runs any more, ready for `begin`."""

    def synchronize(self) -> None:
        """Wait until everything launched is done."""

    def close(self) -> None:
        """Release what the device holds, including threads."""


def open_device(name: str, **options: Any) -> Device:
    """Open the device *name*; *options* go to its constructor.

    `auto`, which has no options, opens an NPU if there is one, else CUDA, else the CPU, and logs which and why.

    Raises:
        DeviceError: if there is no device of that name or the device is not available, with what to do about it.
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
            f"device {name!r} needs torch, which cannot be imported ({error}): install or repair it."
        ) from error
    return make(**options)


def _open_first() -> Device:
    """Open the first available of `_AUTO`; the last always is.

    Each is opened by its own name: vllm-ascend rebinds names of `torch.cuda`, which then do not describe CUDA.
    """
    missing = []
    for name in _AUTO[:-1]:
        try:
            device = open_device(name)
        except DeviceError as error:
            missing.append(f"no {name}: {error}")
        else:
            open_log().info("device chosen", device=name, reason=" ".join(missing) or "an NPU is available")
            return device
    open_log().info("device chosen", device=_AUTO[-1], reason=" ".join(missing))
    return open_device(_AUTO[-1])


def check_recorded(recorded: int, run: int, waiter: str) -> None:
    """Check that an event that a lane waits for was last recorded in the present run.

    Raises:
        DeviceError: if it was not, naming the lane that waits.
    """
    if recorded != run:
        raise DeviceError(
            f"lane {waiter!r} waits for an event that was not recorded in this run; the schedule was changed after it "
            "was validated. Validate what you execute."
        )
