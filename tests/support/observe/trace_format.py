"""What the document "Trace Event Format" asks of events, written from the document and not from our writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NUMBERS = (int, float)
REQUIRED = {  # phase -> what its events must have, besides `name` and `ph`
    "X": {"ts": NUMBERS, "dur": NUMBERS, "pid": int, "tid": int, "cat": str},  # complete events
    "i": {"ts": NUMBERS, "pid": int, "tid": int, "s": str},  # instant events
    # Where a flow starts and where it ends; Perfetto drops those whose `id` is no number.
    "s": {"ts": NUMBERS, "pid": int, "tid": int, "id": int, "cat": str},
    "f": {"ts": NUMBERS, "pid": int, "tid": int, "id": int, "cat": str},
    "M": {"pid": int, "args": dict},  # metadata
}
METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def check_format(trace: Mapping[str, Any]) -> None:
    """Assert that *trace* is a JSON object trace in which viewers find every event, and both ends of every arrow."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        assert isinstance(event["name"], str)
        for key, kind in REQUIRED[event["ph"]].items():
            assert isinstance(event[key], kind), (key, event)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        assert event.get("s", "t") in ("g", "p", "t")
        assert event["ph"] != "M" or METADATA[event["name"]] in event["args"]
    named = {(e["pid"], e.get("tid")) for e in events if e["name"] in ("process_name", "thread_name")}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= named
    _check_flows(events)


def _check_flows(events: Sequence[Mapping[str, Any]]) -> None:
    """Each flow starts once and ends once, not before it starts, and both within an event of its track."""
    ends: dict[Any, dict[str, Any]] = {}
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in ends.setdefault(event["id"], {})
            ends[event["id"]][event["ph"]] = event
            assert find_enclosing(events, event), event
    for flow in ends.values():
        assert set(flow) == {"s", "f"}
        assert flow["f"].get("bp") == "e"  # otherwise it is tied to the next event, not to the enclosing one
        assert flow["s"]["ts"] <= flow["f"]["ts"]
        assert (flow["s"]["name"], flow["s"]["cat"]) == (flow["f"]["name"], flow["f"]["cat"])


def find_enclosing(events: Sequence[Mapping[str, Any]], end: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the complete events of the track that run at the time of an end of a flow."""
    at = end["ts"]
    return [
        event
        for event in events
        if event["ph"] == "X"
        and (event["pid"], event["tid"]) == (end["pid"], end["tid"])
        and event["ts"] <= at < event["ts"] + event["dur"]
    ]
