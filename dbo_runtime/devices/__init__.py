"""The contract of devices, and the function that opens one.

A lane runs tasks in launch order. An event recorded on a lane happens when everything launched there before is done.
A lane that waits for an event runs nothing more until it has happened. Lanes and events are made once and reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, SupportsFloat

from dbo_runtime.errors import DeviceError
from dbo_runtime.observe.logs import open_log
from dbo_runtime.observe.ranges import OpenRange

Values = list[Any]
Observe = Callable[[float, SupportsFloat, SupportsFloat], None]  # times of a task's issue, start and end, in s

_CLASSES = {
    "npu": ("dbo_runtime.devices.npu", "NpuDevice"),
    "cuda": ("dbo_runtime.devices.cuda", "CudaDevice"),
    "cpu": ("dbo_runtime.devices.cpu", "CpuDevice"),
    "virtual": ("dbo_runtime.devices.virtual", "VirtualDevice"),
}
_AUTO = ("npu", "cuda", "cpu")  # order of attempts


class Event(Protocol):
    """A point on a lane, opaque outside its device."""


class Task(Protocol):
    """A callable that a lane runs: an op bound to the slots of the values it reads and writes."""

    def __call__(self, values: Values, /) -> None:
        """Run on one run's values [slots]."""


class DirectCalls(NamedTuple):
    """Functions to issue ops onto a lane by direct calls instead of tasks, on the thread that began the run.

    Attributes:
        switch: function that makes the lane current, so that later calls issue onto it; None if calls always do.
        record: same as `Lane.record`.
        wait: same as `Lane.wait`, without the check: the caller knows that the event was recorded in this run.
    """

    switch: Callable[[], None] | None
    record: Callable[[Any], None]
    wait: Callable[[Any], None]


class Lane(Protocol):
    """An in-order queue of a device: a stream or a thread."""

    @property
    def name(self) -> str:
        """The lane's name in programs."""

    def launch(self, task: Task, values: Values) -> None:
        """Run `task(values)` after everything launched or waited for on this lane so far."""

    def measure(self, task: Task, values: Values, observe: Observe) -> None:
        """Launch the task and call *observe* with the times of issue, start and end, in seconds of one clock.

        On some devices `float()` of start and end waits for the device. The thread that runs the task may call
        *observe*.
        """

    def record(self, event: Any) -> None:
        """Record *event* after everything launched on this lane so far."""

    def wait(self, event: Any) -> None:
        """Run nothing more on this lane until *event* has happened.

        Raises:
            DeviceError: the event was not recorded since `begin`. Streams would ignore such a wait.
        """

    def get_direct_calls(self) -> DirectCalls | None:
        """Return the functions to issue directly onto the lane in the current run; None if tasks must be launched.

        A lane always answers alike, with or without a `switch`; the functions are valid for one run. They replace
        `launch`: a run uses either calls or tasks on a lane. After `begin` the first lane is current.
        """


class Timer(Protocol):
    """Measures a step on the first lane, from the timer's start."""

    def stop(self) -> None:
        """Stop once everything launched so far is done."""

    def read(self) -> float | None:
        """Return the seconds between start and stop, or None if the stop is not reached yet. Never waits."""


class Device(Protocol):
    """Runs lanes concurrently."""

    @property
    def name(self) -> str:
        """The name for `open_device`."""

    @property
    def is_capturing(self) -> bool:
        """Whether launches are being captured into a CUDA or NPU graph."""

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        """Return the lanes of these names, `compute` first. New names get new lanes.

        Raises:
            DeviceError: the device has too few lanes.
        """

    def make_event(self) -> Event:
        """Make an event, which can be recorded and waited for any number of times."""

    def start_timer(self) -> Timer:
        """Start a timer once everything launched on the current stream or thread so far is done."""

    def find_ranges(self, wanted: str = "auto") -> OpenRange | None:
        """Return a function that opens named ranges in profilers; None to open none.

        It works on any thread that runs or issues ops.

        Args:
            wanted: `auto`: only if torch's profiler is on now. `on`: always, for profilers that cannot be detected.
        """

    def begin(self) -> None:
        """Begin a run. Events recorded before no longer count."""

    def release_to_caller(self, values: Iterable[Any]) -> None:
        """Release *values* of any lane's memory to the caller, who uses them on the first lane and frees them."""

    def finish(self) -> None:
        """End a run. Raise a task's error, unless a wait already raised it."""

    def abort(self) -> None:
        """End a failed run. Return once no task runs any more; the device is then ready for `begin`."""

    def synchronize(self) -> None:
        """Wait until everything launched is done."""

    def close(self) -> None:
        """Release the device's resources, including threads."""


def open_device(name: str, **options: Any) -> Device:
    """Open the device *name*; *options* go to its constructor.

    `auto` opens an NPU if there is one, else CUDA, else the CPU, and logs its choice and the reason. It takes no
    options.

    Raises:
        DeviceError: no device has that name, or the device is not available. The message says what to do about it.
    """
    if name == "auto" and not options:
        return _open_first()
    if name not in _CLASSES:
        known = f"known are auto (without options), {', '.join(_CLASSES)}"
        raise DeviceError(f"there is no device {name!r}; {known}.")
    module, kind = _CLASSES[name]
    try:
        make: Callable[..., Device] = getattr(import_module(module), kind)
    except (ImportError, RuntimeError) as error:  # torch raises RuntimeError if it cannot autoload torch_npu
        raise DeviceError(
            f"device {name!r} needs torch, which cannot be imported ({error}): install or repair it."
        ) from error
    return make(**options)


def _open_first() -> Device:
    """Open the first available device of `_AUTO`. The last one always is.

    Each device is opened by its own name, because vllm-ascend rebinds names in `torch.cuda`, which then do not describe
    CUDA.
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
    """Check that the event a lane waits for was last recorded in the current run.

    Raises:
        DeviceError: it was not. The message names the waiting lane.
    """
    if recorded != run:
        raise DeviceError(
            f"lane {waiter!r} waits for an event that was not recorded in this run; the schedule was changed after it "
            "was validated. Validate what you execute."
        )
