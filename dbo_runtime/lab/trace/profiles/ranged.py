"""The timeline of a step whose ops have this package's ranges, with the schedule's lanes, micro-batches and waits.

On a device, an op's times are those of the kernels launched in its range, from the first start to the last end, and it
was issued when the range began. On a CPU, the range itself is the op. Issuing to a worker there leaves no trace, but
instructions are issued in order. So an op was issued when the last earlier op of the issuing thread had ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dbo_runtime.lab.trace.profiles.events import Event, Kernel, Launch, Track
from dbo_runtime.lab.trace.profiles.steps import Step
from dbo_runtime.observe.ranges import RangedOp, read_op
from dbo_runtime.observe.timeline import Span, Timeline


class _Range(NamedTuple):
    """The range of one op, and the interval in seconds in which the op ran; None until known."""

    op: RangedOp
    event: Event
    interval: tuple[float, float] | None = None


def make_ranged(step: Step, host: Iterable[Event], kernels: Iterable[Kernel]) -> tuple[Timeline, bool]:
    """Return the timeline of a split step, and whether its times are those of kernels.

    Args:
        step: the split step.
        host, kernels: events on the host during the step, and kernels launched in it.
    """
    ranges: dict[int, _Range] = {}
    for event in host:
        op = read_op(event.name)
        if op is not None and step.track is not None and event.track.process == step.track.process:
            ranges.setdefault(op.number, _Range(op, event))
    ran = dict(_measure_kernels(ranges, kernels))
    if ran:
        # An op that launched nothing, such as a view, took no time.
        spans = _make_spans(ran, {number: each.event.start for number, each in ran.items()})
    else:
        measured = {
            number: each._replace(interval=(each.event.start, each.event.end)) for number, each in ranges.items()
        }
        spans = _make_spans(measured, dict(_find_issues(step, ranges)))
    return Timeline(tuple(sorted(spans, key=lambda span: span.start))), bool(ran)


def _measure_kernels(ranges: dict[int, _Range], kernels: Iterable[Kernel]) -> Iterator[tuple[int, _Range]]:
    """Yield the ops that launched kernels, with the interval of these kernels."""
    tracks: dict[Track, list[tuple[float, float, int]]] = {}
    for number, each in ranges.items():
        tracks.setdefault(each.event.track, []).append((each.event.start, each.event.end, number))
    for of_track in tracks.values():
        of_track.sort()
    intervals: dict[int, tuple[float, float]] = {}
    for kernel in kernels:
        launched = None if kernel.launch is None else _find_range(tracks.get(kernel.launch.track, []), kernel.launch)
        if launched is not None:
            first, last = intervals.get(launched, (kernel.start, kernel.end))
            intervals[launched] = min(first, kernel.start), max(last, kernel.end)
    for number, interval in intervals.items():
        yield number, ranges[number]._replace(interval=interval)


def _find_range(ranges: Sequence[tuple[float, float, int]], launch: Launch) -> int | None:
    """Return the number of the op in whose range a kernel was launched. *ranges* are those of its thread, in order."""
    before = bisect_right(ranges, launch.time, key=lambda each: each[0]) - 1
    if before < 0 or launch.time > ranges[before][1]:
        return None
    return ranges[before][2]


def _find_issues(step: Step, ranges: dict[int, _Range]) -> Iterator[tuple[int, float]]:
    """Yield the time of issue of each op on a CPU."""
    issued = step.start
    for number in sorted(ranges):
        event = ranges[number].event
        if event.track == step.track:
            yield number, event.start
            issued = event.end
        else:
            yield number, min(issued, event.start)


def _make_spans(ranges: dict[int, _Range], issues: dict[int, float]) -> Iterator[Span]:
    names = {number: (each.op.label, each.op.micro_batch) for number, each in ranges.items()}
    for number, each in ranges.items():
        assert each.interval is not None
        waits = tuple(names[awaited] for awaited in each.op.waits if awaited in names)
        yield Span(each.op.lane, *names[number], *each.interval, issues[number], waits)
