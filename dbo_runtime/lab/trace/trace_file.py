"""Read the trace files written by `observe.trace`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.trace.fields import Fields, is_count, is_list, is_name
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.outside_files import parse_json, read_text

# Limits that no step exceeds, because computing figures takes time per lane and adds up durations.
MAX_RANKS = 4096
MAX_LANES = 16
MAX_MICRO_BATCHES = 1024
MAX_MICROSECONDS = 1e12


def read_trace(path: str | Path) -> dict[str, Timeline]:
    """Return the timelines in a trace by name. Times are seconds since the trace's first event.

    Raises:
        ConfigError: the file cannot be read, or is not a trace of dbo_runtime. The message names file and field.
    """
    text = read_text(path, "trace")
    try:
        return _read_timelines(parse_json(text))
    except ConfigError as error:
        raise ConfigError(
            f"{str(path)!r} is not a trace of dbo_runtime: {error} Name a file that DBO_TRACE or `plan --trace` wrote."
        ) from error


def _read_timelines(trace: Any) -> dict[str, Timeline]:
    events = [
        Fields(event, f"traceEvents[{number}]")
        for number, event in enumerate(Fields(trace, "the content").get("traceEvents", is_list, "a list"))
    ]
    names = [event for event in events if event.content.get("name") == "process_name"]
    processes = {event.get("pid", is_count, "a whole number"): _read_name(event) for event in names}
    if len({*processes.values()}) < len(names) or len(names) > MAX_RANKS:
        raise ConfigError(
            f"traceEvents name {len(names)} processes; each has its own pid and name, {MAX_RANKS} at most."
        )
    other = Fields(trace, "the content").open("otherData")
    bounds = _read_seconds(other, "bound_seconds")
    planning = _read_seconds(other, "planning_seconds")  # older traces have none
    spans: dict[int, list[Span]] = {process: [] for process in processes}
    for event in events:
        if event.content.get("ph") == "X":
            spans[event.get("pid", lambda pid: is_count(pid) and pid in spans, "that of a process")].append(
                _read_span(event)
            )
    for process, of_process in spans.items():
        _check_spans(processes[process], of_process)
    return {
        name: Timeline(tuple(spans[process]), bounds.get(name), planning.get(name))
        for process, name in processes.items()
    }


def _is_micro_batch(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_MICRO_BATCHES


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_MICROSECONDS  # false for NaN, too


def _is_wait(value: Any) -> bool:
    return is_list(value) and len(value) == 2 and is_name(value[0]) and _is_micro_batch(value[1])


def _read_name(event: Fields) -> str:
    name: str = event.open("args").get("name", is_name, "printable text")
    return name


def _read_seconds(other: Fields, what: str) -> Mapping[str, float]:
    if what not in other.content and what == "planning_seconds":
        return {}
    of_names = other.open(what)
    for name in of_names.content:
        of_names.get(name, _is_time, f"from 0 to {MAX_MICROSECONDS:g}")
    return of_names.content


def _read_span(event: Fields) -> Span:
    time = f"from 0 to {MAX_MICROSECONDS:g} microseconds"
    args = event.open("args")
    start, duration = event.get("ts", _is_time, time), event.get("dur", _is_time, time)
    issued = args.get("issued", _is_time, time) / 1e6 if "issued" in args.content else None
    waits = args.get("waits", is_list, "a list") if "waits" in args.content else ()
    if not all(map(_is_wait, waits)):
        args.get("waits", lambda _: False, "pairs of an op and a micro-batch")
    return Span(
        event.get("cat", is_name, "the name of a lane"),
        args.get("op", is_name, "the name of an op"),
        args.get("micro_batch", _is_micro_batch, f"a whole number below {MAX_MICRO_BATCHES}"),
        start / 1e6,
        (start + duration) / 1e6,
        issued,
        tuple((op, micro_batch) for op, micro_batch in waits),
    )


def _check_spans(process: str, spans: list[Span]) -> None:
    lanes = {span.lane for span in spans}
    if len(lanes) > MAX_LANES:
        raise ConfigError(f"{process} has {len(lanes)} lanes, more than {MAX_LANES}.")
    ops = {(span.op, span.micro_batch) for span in spans}
    unknown = next((awaited for span in spans for awaited in span.waits if awaited not in ops), None)
    if unknown is not None:
        raise ConfigError(f"an op of {process} waits for {unknown[0]}/{unknown[1]}, which the trace does not have.")
