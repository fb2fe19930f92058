"""A timeline as a trace-event file, which ui.perfetto.dev and chrome://tracing open.

The format is "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.program import COMPUTE

PROCESS = 1
# From the names that chrome://tracing reserves (catapult, tracing/base/color_scheme.html), as far apart as they come.
# Perfetto colours by op name, whatever a trace says (its issue 208).
COLOURS = ("rail_response", "thread_state_iowait", "thread_state_running", "rail_animation", "olive", "generic_work")


def make_trace(timeline: Timeline, title: str = "dbo_runtime") -> dict[str, Any]:
    """Return *timeline* as a trace-event object: a process called *title*, a track per lane, `compute` first.

    Times are in microseconds since the first start, whole nanoseconds each; `args` name the micro-batch and the layer,
    if the op is of one. A viewer drops an op that crosses another on its lane; ops of an in-order lane never do.
    """
    lanes = sorted(timeline.lanes, key=lambda lane: lane != COMPUTE)
    tracks = {lane: number for number, lane in enumerate(lanes, start=1)}
    origin = min((span.start for span in timeline.spans), default=0.0)
    events: list[dict[str, Any]] = [_describe("process_name", None, name=title)]
    for lane, track in tracks.items():
        events.append(_describe("thread_name", track, name=lane))
        events.append(_describe("thread_sort_index", track, sort_index=track))
    events.extend(_make_event(span, tracks[span.lane], origin) for span in timeline.spans)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(timeline: Timeline, path: str | Path, title: str = "dbo_runtime") -> None:
    """Write `make_trace` of *timeline* to *path*, as JSON.

    Raises:
        ConfigError: if the file cannot be written.
    """
    text = json.dumps(make_trace(timeline, title))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the trace cannot be written to path {str(path)!r} ({error.strerror}): name a file in a folder that "
            "exists and that you may write to."
        ) from error


def _describe(what: str, track: int | None, **args: Any) -> dict[str, Any]:
    """Return the event that tells a viewer *what* of the process, or of a track."""
    where = {"pid": PROCESS} if track is None else {"pid": PROCESS, "tid": track}
    return {"name": what, "ph": "M", **where, "args": args}


def _make_event(span: Span, track: int, origin: float) -> dict[str, Any]:
    # Both ends are rounded, not the length, so that an op which ends where the next begins still does.
    start, end = (round((time - origin) * 1e9) for time in (span.start, span.end))
    args = {"micro_batch": span.micro_batch}
    if layer := re.match(r"L(\d+)\.", span.op):
        args["layer"] = int(layer[1])
    return {
        "name": span.op,
        "cat": span.lane,
        "ph": "X",
        "ts": _to_microseconds(start),
        "dur": _to_microseconds(end - start),
        "pid": PROCESS,
        "tid": track,
        "cname": COLOURS[span.micro_batch % len(COLOURS)],
        "args": args,
    }


def _to_microseconds(nanoseconds: int) -> float:
    """Return the number from which Perfetto gets *nanoseconds* back.

    It takes `int(number * 1000.0)`, which makes 1000 of 1.001. A nanosecond lost at a start lets an op cross the one
    before, and Perfetto drops it (`CoerceToTs` and `slice_drop_overlapping_complete_event` in its trace processor).
    """
    microseconds = nanoseconds / 1000
    if int(microseconds * 1000.0) < nanoseconds:
        microseconds = math.nextafter(microseconds, math.inf)
    return microseconds
