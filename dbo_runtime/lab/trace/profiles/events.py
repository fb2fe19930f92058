"""The events of a profile: what the host ran, what the device ran, and which thread launched it.

Files of torch's profiler (Kineto's Chrome traces) link a kernel to its launch by a correlation id that the runtime call
has, too. Files of torch_npu's profiler (`trace_view.json`) have an arrow from an op to each of its kernels, and times
as text. Their format is known here only from torch_npu's own writer: no file made on an NPU was available.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.trace.fields import Fields, is_list
from dbo_runtime.outside_files import make_printable

MAX_SECONDS = 1e7  # largest time between the first and the last event
MAX_NAME = 200  # characters kept: names of C++ kernels have thousands
RUNTIME = ("cuda_runtime", "cuda_driver", "xpu_runtime", "hip_runtime")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
ON_DEVICE = ("gpu_user_annotation", *KERNELS)
PYTHON = "python_function"  # the most frequent events in profiles with stacks; not needed here
ASCEND = "Ascend Hardware"
ASCEND_COMMUNICATION = ("Communication", "HCCL")
ASCEND_COLLECTIVE = "hcom_"  # prefix of collectives in such a process; other events are their parts
ASCEND_FLOW = "async_npu"
WAITING = ("EVENT_", "NOTIFY_")  # tasks on an NPU stream that only wait
_KEPT = frozenset(
    (
        *("traceEvents", "otherData", "bound_seconds", "distributedInfo", "rank"),
        *("ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "args", "correlation"),
    )
)


class Track(NamedTuple):
    """A thread of a process, or a stream of a device."""

    process: str
    thread: str


class Event(NamedTuple):
    """An event on the host; times in seconds."""

    name: str
    track: Track
    start: float
    end: float


class Launch(NamedTuple):
    """The time of a kernel's launch, and its thread."""

    track: Track
    time: float


class Kernel(NamedTuple):
    """An event on a device; times in seconds. *launch* is None if the profile does not say."""

    name: str
    track: Track
    start: float
    end: float
    launch: Launch | None


class Events(NamedTuple):
    """The events of one process, sorted by start, in seconds since the first.

    Attributes:
        rank: name of the rank, such as `rank 0`, or `process 123` if the profile does not know it.
    """

    rank: str
    host: list[Event]
    kernels: list[Kernel]


def keep_fields(content: dict[str, Any]) -> dict[str, Any] | None:
    """Return the needed fields of a profile's object. A whole object takes about 1 kB in memory."""
    if content.get("cat") == PYTHON:
        return None
    return {name: value for name, value in content.items() if name in _KEPT} or None


def read_events(profile: Any) -> Events:
    """Return the events of a profile whose objects were reduced by `keep_fields`.

    Raises:
        ConfigError: a field is not allowed, which the message names, or there are no events with a duration.
    """
    whole = {"traceEvents": profile} if is_list(profile) else profile
    content = Fields(whole, "the content")
    listed = content.get("traceEvents", is_list, "a list")
    events = [Fields(event, f"traceEvents[{number}]") for number, event in enumerate(listed) if event is not None]
    names = dict(_name_processes(events))
    host: list[Event] = []
    kernels: list[tuple[Event, int | None]] = []
    launches: dict[int, Launch] = {}
    for event in (event for event in events if event.content.get("ph") == "X"):
        read = _read_event(event)
        category, correlation = event.content.get("cat"), _read_correlation(event)
        if category in KERNELS or _is_ascend_kernel(names.get(read.track.process, ""), read.name):
            kernels.append((read, correlation))
        elif category in RUNTIME:
            if correlation is not None:
                launches[correlation] = Launch(read.track, read.start)
        elif category not in ON_DEVICE:
            host.append(read)
    if not host and not kernels:
        raise ConfigError("traceEvents has no event with a duration.")
    arrows = _read_arrows(events)
    launched = [
        Kernel(kernel.name, kernel.track, kernel.start, kernel.end, _find_launch(kernel, correlation, launches, arrows))
        for kernel, correlation in kernels
    ]
    return _align(_read_rank(content, host), host, launched)


def _find_launch(
    kernel: Event,
    correlation: int | None,
    launches: Mapping[int, Launch],
    arrows: Mapping[tuple[Track, float], Launch],
) -> Launch | None:
    if correlation is not None and correlation in launches:
        return launches[correlation]
    return arrows.get((kernel.track, kernel.start))


def _name_processes(events: Iterable[Fields]) -> Iterator[tuple[str, str]]:
    for event in events:
        if event.content.get("ph") == "M" and event.content.get("name") == "process_name":
            name = event.open("args").content.get("name")
            if type(name) is str:
                yield str(event.content.get("pid")), name


def _read_event(event: Fields) -> Event:
    name: str = event.get("name", lambda value: type(value) is str, "text")
    start, duration = _read_time(event, "ts"), _read_time(event, "dur")
    track = Track(*(str(event.get(key, _is_label, "a whole number or text")) for key in ("pid", "tid")))
    return Event(make_printable(name[:MAX_NAME].replace("\n", " ")), track, start, start + max(duration, 0.0))


def _read_time(event: Fields, name: str) -> float:
    """Return microseconds. torch_npu writes them as text."""
    return float(event.get(name, _is_time, "a finite number of microseconds"))


def _is_time(value: Any) -> bool:
    if type(value) not in (int, float, str):
        return False
    try:
        return math.isfinite(float(value))
    except (ValueError, OverflowError):
        return False


def _is_label(value: Any) -> bool:
    return type(value) is int or (type(value) is str and len(value) <= 1000)


def _read_correlation(event: Fields) -> int | None:
    arguments = event.content.get("args")
    correlation = arguments.get("correlation") if type(arguments) is dict else None
    return correlation if type(correlation) is int and correlation > 0 else None


def _is_ascend_kernel(process: str, name: str) -> bool:
    if process in ASCEND_COMMUNICATION:
        return name.startswith(ASCEND_COLLECTIVE)
    return process == ASCEND and not name.startswith(WAITING)


def _read_arrows(events: Iterable[Fields]) -> dict[tuple[Track, float], Launch]:
    """Return launches from torch_npu's arrows, by track and start time of the kernel."""
    tails: dict[Any, Launch] = {}
    tips: dict[Any, tuple[Track, float]] = {}
    for event in events:
        if event.content.get("cat") == ASCEND_FLOW and event.content.get("ph") in ("s", "f"):
            track = Track(str(event.content.get("pid")), str(event.content.get("tid")))
            time, number = _read_time(event, "ts"), event.get("id", _is_label, "a whole number or text")
            if event.content["ph"] == "s":
                tails[number] = Launch(track, time)
            else:
                tips[number] = (track, time)
    return {tip: tails[number] for number, tip in tips.items() if number in tails}


def _read_rank(content: Fields, host: list[Event]) -> str:
    known = content.content.get("distributedInfo")
    rank = known.get("rank") if type(known) is dict else None
    if type(rank) is int:
        return f"rank {rank}"
    return f"process {make_printable(host[0].track.process)}" if host else "a device"


def _align(rank: str, host: list[Event], kernels: list[Kernel]) -> Events:
    """Return the sorted events, in seconds since the first event, which is subtracted from the microseconds."""
    starts = [*(event.start for event in host), *(kernel.start for kernel in kernels)]
    origin, last = min(starts), max(starts)
    if last - origin > MAX_SECONDS * 1e6:
        raise ConfigError(f"traceEvents are {(last - origin) / 1e6:.0f} s apart, more than {MAX_SECONDS:.0f}.")

    def move(time: float) -> float:
        return (time - origin) / 1e6

    return Events(
        rank,
        sorted((each._replace(start=move(each.start), end=move(each.end)) for each in host), key=_get_start),
        sorted(
            (
                each._replace(
                    start=move(each.start),
                    end=move(each.end),
                    launch=each.launch and each.launch._replace(time=move(each.launch.time)),
                )
                for each in kernels
            ),
            key=_get_start,
        ),
    )


def _get_start(event: Event | Kernel) -> float:
    return event.start
