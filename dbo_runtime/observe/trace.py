"""Write timelines as trace-event files, for ui.perfetto.dev and chrome://tracing.

The format is "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
`trace_file` reads it back.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.op import COMPUTE
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.outside_files import write_text

# Perfetto puts a track first if it has its process's number, so the tracks of process n begin at n times this.
TRACKS_PER_PROCESS = 100
# Arrow ids are numbers, unique in the file: Perfetto drops arrows with an `id` that is no number (`flow_invalid_id`).
ARROWS_PER_PROCESS = 10_000_000
# Colour names that chrome://tracing reserves (catapult, tracing/base/color_scheme.html), as distinct as possible.
# Perfetto ignores them and colours by op name (its issue 208).
COLOURS = ("rail_response", "thread_state_iowait", "thread_state_running", "rail_animation", "olive", "generic_work")


def make_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Return timelines by name, such as `rank 0`, all on one clock, as a trace-event object.

    Each timeline is a process with one track per lane, `compute` first, and a track for the host if times of issue were
    recorded. Arrows lead from the end of an op to the start of each op that waited for it. Times are in microseconds
    since the first event, rounded to nanoseconds. An op is named `op/micro-batch`. Its `args` hold op and micro-batch,
    the layer if any, the time of issue and the ops waited for. Viewers drop an op that crosses another on its lane, but
    ops of an in-order lane never cross. `otherData` has `bound_seconds` and `planning_seconds` by timeline name, where
    known.
    """
    spans = [span for timeline in timelines.values() for span in timeline.spans]
    origin = min((_find_first(span) for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items(), start=1):
        events.extend(_Process(process, timeline, origin).make_events(name))
    bounds = {name: timeline.bound for name, timeline in timelines.items() if timeline.bound is not None}
    planning = {name: timeline.planning for name, timeline in timelines.items() if timeline.planning is not None}
    other = {"bound_seconds": bounds, "planning_seconds": planning}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def save_trace(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Write `make_trace` of *timelines* to *path* as JSON, atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_text(path, json.dumps(make_trace(timelines)))
    except (OSError, ValueError) as error:  # a ValueError if the path has a NUL byte
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"the trace cannot be written to path {str(path)!r} (errno {getattr(error, 'errno', None)}, {why}): name a "
            "file in a folder that exists, has room, and that you may write to."
        ) from error


def prepare_folder(path: str) -> None:
    """Make a folder for traces if it does not exist.

    Raises:
        ConfigError: traces cannot be written there.
    """
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)  # only this user may use it; an existing folder stays unchanged
    except (OSError, ValueError) as error:  # a ValueError if the path has a NUL byte
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"DBO_TRACE={path!r} cannot be made a folder ({why}): name another one.") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"DBO_TRACE={path!r} cannot be written to: name a folder that you may write to.")


class _Process:
    """Makes one timeline's events."""

    def __init__(self, number: int, timeline: Timeline, origin: float) -> None:
        self._number = number
        self._timeline = timeline
        self._origin = origin
        self._has_host = any(span.issued is not None for span in timeline.spans)
        lanes = sorted(timeline.lanes, key=lambda lane: lane != COMPUTE)
        self._host = number * TRACKS_PER_PROCESS
        self._tracks = {lane: track for track, lane in enumerate(lanes, start=self._host + 1)}

    def make_events(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the names, then the ops, then the events that refer to ops."""
        yield self._describe("process_name", None, name=name)
        yield self._describe("process_sort_index", None, sort_index=self._number)
        host = {"host": self._host} if self._has_host else {}
        for lane, track in {**host, **self._tracks}.items():
            yield self._describe("thread_name", track, name=lane)
            yield self._describe("thread_sort_index", track, sort_index=track)
        yield from map(self._make_op, self._timeline.spans)
        yield from (self._make_issue(span) for span in self._timeline.spans if span.issued is not None)
        yield from self._make_arrows()

    def _describe(self, what: str, track: int | None, **args: Any) -> dict[str, Any]:
        """Return a metadata event of kind *what* for the process, or for a track."""
        where = {"pid": self._number} if track is None else {"pid": self._number, "tid": track}
        return {"name": what, "ph": "M", **where, "args": args}

    def _make_op(self, span: Span) -> dict[str, Any]:
        # Round both ends, not the length, so that an op that ends where the next begins still does.
        start, end = self._count(span.start), self._count(span.end)
        args: dict[str, Any] = {"op": span.op, "micro_batch": span.micro_batch}
        if layer := re.match(r"L(\d+)\.", span.op):
            args["layer"] = int(layer[1])
        if span.issued is not None:
            args["issued"] = _to_microseconds(self._count(span.issued))
        if span.waits:
            args["waits"] = [list(awaited) for awaited in span.waits]
        return {
            "name": f"{span.op}/{span.micro_batch}",
            "cat": span.lane,
            "ph": "X",
            "ts": _to_microseconds(start),
            "dur": _to_microseconds(end - start),
            "pid": self._number,
            "tid": self._tracks[span.lane],
            "cname": COLOURS[span.micro_batch % len(COLOURS)],
            "args": args,
        }

    def _make_issue(self, span: Span) -> dict[str, Any]:
        assert span.issued is not None
        return {
            "name": f"{span.op}/{span.micro_batch}",
            "cat": "issue",
            "ph": "i",
            "s": "t",  # drawn on its track only
            "ts": _to_microseconds(self._count(span.issued)),
            "pid": self._number,
            "tid": self._host,
        }

    def _make_arrows(self) -> Iterator[dict[str, Any]]:
        """Yield both ends of an arrow for each wait. A viewer attaches each end to the op that runs at its time."""
        spans = {(span.op, span.micro_batch): span for span in self._timeline.spans}
        number = self._number * ARROWS_PER_PROCESS
        for span in self._timeline.spans:
            for source in (spans[awaited] for awaited in span.waits if awaited in spans):
                last = self._count(source.end) - 1  # at its end the op no longer runs
                number += 1
                if last < self._count(source.start) or self._count(span.end) == self._count(span.start):
                    continue  # too short to attach an arrow to
                arrow = {"name": "wait", "cat": "wait", "id": number, "pid": self._number}
                tail, tip = self._tracks[source.lane], self._tracks[span.lane]
                yield {**arrow, "ph": "s", "ts": _to_microseconds(last), "tid": tail}
                yield {**arrow, "ph": "f", "bp": "e", "ts": _to_microseconds(self._count(span.start)), "tid": tip}

    def _count(self, time: float) -> int:
        """Return the nanoseconds since the origin."""
        return round((time - self._origin) * 1e9)


def _find_first(span: Span) -> float:
    return span.start if span.issued is None else min(span.issued, span.start)


def _to_microseconds(nanoseconds: int) -> float:
    """Return microseconds that Perfetto converts back to exactly *nanoseconds*.

    Perfetto computes `int(number * 1000.0)`, which gives 1000 for 1.001. A nanosecond lost at a start makes an op cross
    the one before, and Perfetto drops it (`CoerceToTs` and `slice_drop_overlapping_complete_event` in its trace
    processor).
    """
    microseconds = nanoseconds / 1000
    if int(microseconds * 1000.0) < nanoseconds:
        microseconds = math.nextafter(microseconds, math.inf)
    return microseconds
