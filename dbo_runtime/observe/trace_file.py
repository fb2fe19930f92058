"""Read trace files that `trace` wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.observe.timeline import Span, Timeline


def read_trace(path: str | Path) -> dict[str, Timeline]:
    """Return the timelines of a trace by name; their times are seconds since the trace's first event.

    Raises:
        ConfigError: if the file cannot be read, or is not a trace of dbo_runtime.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"trace {str(path)!r} cannot be read: {why}.") from error
    try:
        return _read_timelines(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{str(path)!r} is not a trace of dbo_runtime ({type(error).__name__}: {error}). Name a file that "
            "DBO_TRACE or `plan --trace` wrote."
        ) from error


def _read_timelines(trace: Mapping[str, Any]) -> dict[str, Timeline]:
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    other = trace["otherData"]
    bounds = _read_seconds("bound_seconds", other["bound_seconds"])
    planning = _read_seconds("planning_seconds", other.get("planning_seconds", {}))  # older traces have none
    spans: dict[int, list[Span]] = {process: [] for process in processes}
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"]].append(_read_span(event))
    return {
        name: Timeline(tuple(spans[process]), bounds.get(name), planning.get(name))
        for process, name in processes.items()
    }


def _read_seconds(what: str, by_name: Mapping[str, Any]) -> Mapping[str, float]:
    for name, seconds in by_name.items():
        if type(seconds) not in (int, float) or not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{what} of {name!r} is {seconds!r}")
    return by_name


def _read_span(event: Mapping[str, Any]) -> Span:
    args = event["args"]
    start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
    issued = args["issued"] / 1e6 if "issued" in args else None
    waits = tuple((op, micro_batch) for op, micro_batch in args.get("waits", ()))
    return Span(event["cat"], args["op"], args["micro_batch"], start, end, issued, waits)
