"""Read a profile as timelines of its steps, with notes on how they were derived."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from dbo_runtime.lab.trace.profiles.events import Event, Events, Kernel, read_events
from dbo_runtime.lab.trace.profiles.ranged import make_ranged
from dbo_runtime.lab.trace.profiles.steps import Step, find_steps
from dbo_runtime.lab.trace.profiles.unranged import make_by_streams, make_by_threads
from dbo_runtime.observe.timeline import Timeline

E = TypeVar("E")

MAX_LABEL = 60  # characters of a step's name to show
ON_KERNELS = "lanes and micro-batches by ranges of dbo_runtime, times by the kernels launched in them"
ON_RANGES = "lanes, micro-batches and times by ranges of dbo_runtime"
ON_STREAMS = (
    "no ranges of dbo_runtime: lanes by stream, communication by names of kernels, waits by what ended just before"
)
ON_THREADS = "no ranges of dbo_runtime and no kernels: one thread, communication by names of ops"


class Profile(NamedTuple):
    """The steps of a profile.

    Attributes:
        steps: timelines by step name, then by rank.
        notes: explanations of how the timelines were derived, and from how many steps.
    """

    steps: dict[str, dict[str, Timeline]]
    notes: tuple[str, ...]


class _InTime(Generic[E]):
    """Events sorted by time."""

    def __init__(self, events: Sequence[E], get_time: Callable[[E], float]) -> None:
        self._events = sorted(events, key=get_time)
        self._times = [get_time(event) for event in self._events]

    def find(self, step: Step) -> Sequence[E]:
        """Return the events within a step's time."""
        return self._events[bisect_left(self._times, step.start) : bisect_right(self._times, step.end)]


def make_profile(content: Any) -> Profile:
    """Return the steps of a profile whose objects were reduced by `keep_fields`.

    Raises:
        ConfigError: a field is not allowed. The message names it.
    """
    events = read_events(content)
    host: _InTime[Event] = _InTime(events.host, lambda event: event.start)
    kernels: _InTime[Kernel] = _InTime(events.kernels, _get_issue)
    steps: dict[str, dict[str, Timeline]] = {}
    bases: dict[str, int] = {}
    for step in find_steps(events):
        timeline, basis = _make_timeline(step, events, host.find(step), kernels.find(step))
        if timeline.spans:
            steps[f"{len(steps)}: {step.label[:MAX_LABEL]}"] = {events.rank: timeline}
            bases[basis] = bases.get(basis, 0) + 1
    if not steps:  # happens for a profile of vLLM's API server
        return Profile({}, (f"{events.rank}: no step that ran an op",))
    return Profile(steps, tuple(f"{events.rank}, {count} steps: {basis}" for basis, count in bases.items()))


def _make_timeline(
    step: Step, events: Events, host: Sequence[Event], kernels: Sequence[Kernel]
) -> tuple[Timeline, str]:
    if step.is_split:
        timeline, is_on_device = make_ranged(step, host, kernels)
        return timeline, ON_KERNELS if is_on_device else ON_RANGES
    if events.kernels:
        return make_by_streams(step, kernels), ON_STREAMS
    return make_by_threads(step, host), ON_THREADS


def _get_issue(kernel: Kernel) -> float:
    """Return the launch time of a kernel, or its start if the launch is not known."""
    return kernel.start if kernel.launch is None else kernel.launch.time
