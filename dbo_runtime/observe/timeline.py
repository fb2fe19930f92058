"""Intervals of ops on lanes, recorded or simulated: measured, and drawn as text."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, SupportsFloat

from dbo_runtime.ir.op import COMPUTING, SIDE
from dbo_runtime.ir.schedule import Instruction

SHORTEST_SECONDS = 1e-9  # shortest span drawn; traces have a resolution of 1 ns


class Span(NamedTuple):
    """The interval of one op of one micro-batch on its lane, in seconds.

    Attributes:
        issued: time at which the host issued the op; None if not recorded.
        waits: the (op, micro-batch) of each op that the lane waited for first.
    """

    lane: str
    op: str
    micro_batch: int
    start: float
    end: float
    issued: float | None = None
    waits: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one run, in issue order or by start time.

    Attributes:
        bound: seconds, a lower bound for any issue order with these durations; None if not computed.
        planning: seconds that the host took to decide the step, before its first op; None if not recorded.
    """

    spans: tuple[Span, ...]
    bound: float | None = None
    planning: float | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Timeline:
        """Return the timeline for the result of `as_dict`, even if its tuples were turned into lists."""
        rows = (dict(zip(Span._fields, row, strict=True)) for row in data["spans"])
        spans = (Span(**{**row, "waits": tuple((op, part) for op, part in row["waits"])}) for row in rows)
        return cls(tuple(spans), data["bound"], data.get("planning"))

    def as_dict(self) -> dict[str, Any]:
        """Return the timeline as plain data, for RPC."""
        return {"spans": [tuple(span) for span in self.spans], "bound": self.bound, "planning": self.planning}

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes, in order of first use."""
        return tuple(dict.fromkeys(span.lane for span in self.spans))

    @property
    def duration(self) -> float:
        """Seconds from the first start to the last end."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    def busy(self, lane: str) -> float:
        """Return the seconds in which *lane* ran something."""
        return sum(end - start for start, end in _merge((s.start, s.end) for s in self.spans if s.lane == lane))

    def overlap(self, first: str, second: str) -> float:
        """Return the seconds in which both lanes ran something."""
        ours, theirs = (_merge((s.start, s.end) for s in self.spans if s.lane == lane) for lane in (first, second))
        return _measure_common(ours, theirs)

    def measure_hidden(self) -> tuple[float, float]:
        """Return the seconds of communication, and the part of them in which a lane computed."""
        computed = _merge((s.start, s.end) for s in self.spans if s.lane in COMPUTING)
        lanes = [lane for lane in self.lanes if lane not in COMPUTING]
        communicated = [_merge((s.start, s.end) for s in self.spans if s.lane == lane) for lane in lanes]
        hidden = sum(_measure_common(pieces, computed) for pieces in communicated)
        return sum(end - start for pieces in communicated for start, end in pieces), hidden

    @property
    def idle(self) -> float:
        """Seconds between the first start and the last end in which no lane ran anything."""
        return self.duration - sum(end - start for start, end in _merge((s.start, s.end) for s in self.spans))

    def measure_concurrent(self) -> list[float]:
        """Return for each span the seconds in which another lane also ran [spans].

        For `side`, only computing lanes count: `side` shares more hardware with these than with communicating lanes.
        """
        others = {
            lane: _cover(
                (s.start, s.end) for s in self.spans if s.lane != lane and (lane != SIDE or s.lane in COMPUTING)
            )
            for lane in self.lanes
        }
        concurrent = []
        for span in self.spans:
            covered = others[span.lane]
            seconds = _interpolate(covered, span.end) - _interpolate(covered, span.start)
            concurrent.append(min(seconds, span.end - span.start))  # rounding must not exceed the span
        return concurrent

    def find_queued(self) -> list[bool]:
        """Return for each span whether the host had issued the whole op by the span's start [spans].

        If not, the lane may have waited for the host between the op's kernels. The host has issued an op when it goes
        on to the next one; the last op is assumed to take as long to issue as the others. Without times of issue, all
        count as queued.
        """
        issued = sorted(span.issued for span in self.spans if span.issued is not None)
        if len(issued) < len(self.spans) or len(issued) < 2:
            return [True] * len(self.spans)
        following = dict(pairwise([*issued, issued[-1] + self.measure_issue()]))
        return [following[span.issued] <= span.start for span in self.spans if span.issued is not None]

    def measure_issue(self) -> float:
        """Return the host's seconds per op: the median time from one issue to the next; 0 if not recorded."""
        issued = sorted(span.issued for span in self.spans if span.issued is not None)
        return median(later - earlier for earlier, later in pairwise(issued)) if len(issued) > 1 else 0.0

    def measure_concurrent_share(self, op: str, other: str, same: bool = False) -> float:
        """Return the share of *op*'s time in which *other* ran concurrently, in another micro-batch.

        With *same*, in the same micro-batch. Ops are named without their layer, such as `dispatch`, and all layers
        count. Returns 0 for an op that never ran.
        """
        concurrent = total = 0.0
        for span in self._spans_of(op):
            others = _merge(
                (s.start, s.end) for s in self._spans_of(other) if (s.micro_batch == span.micro_batch) is same
            )
            concurrent += _measure_within((span.start, span.end), others)
            total += span.end - span.start
        return concurrent / total if total else 0.0

    def draw(self, width: int = 100) -> str:
        """Return the lanes as rows of *width* characters: the digit of the micro-batch that runs, `.` for idle."""
        if not self.spans:
            return "(nothing ran)"
        origin = min(span.start for span in self.spans)
        scale = width / max(self.duration, SHORTEST_SECONDS)
        rows = {lane: ["."] * width for lane in self.lanes}
        for span in self.spans:
            first = min(width - 1, int((span.start - origin) * scale))
            last = max(first + 1, round((span.end - origin) * scale))
            rows[span.lane][first:last] = str(span.micro_batch)[-1] * (min(last, width) - first)
        return "\n".join(f"{lane:>8} |{''.join(row)}|" for lane, row in rows.items())

    def table(self, most: int = 20) -> str:
        """Return the first *most* spans as a table: start and length in milliseconds, lane, op and micro-batch."""
        origin = min((span.start for span in self.spans), default=0.0)
        lanes = self.lanes
        rows = ["start ms  length ms  " + "  ".join(f"{lane:<24}" for lane in lanes).rstrip()]
        for span in sorted(self.spans, key=lambda s: s.start)[:most]:
            cells = "  ".join(f"{f'{span.op}/{span.micro_batch}' if lane == span.lane else '':<24}" for lane in lanes)
            row = f"{(span.start - origin) * 1e3:8.2f}  {(span.end - span.start) * 1e3:9.2f}  {cells}"
            rows.append(row.rstrip())
        if len(self.spans) > most:
            rows.append(f"... and {len(self.spans) - most} more")
        return "\n".join(rows)

    def _spans_of(self, op: str) -> list[Span]:
        return [span for span in self.spans if span.op.rpartition(".")[2] == op]


class Recorder:
    """An instrument that records a run's spans."""

    def __init__(self) -> None:
        self._notes: list[tuple[Instruction, float, SupportsFloat, SupportsFloat]] = []

    def observe(self, instruction: Instruction, issued: float, start: SupportsFloat, end: SupportsFloat) -> None:
        """Record the interval."""
        self._notes.append((instruction, issued, start, end))

    def timeline(self) -> Timeline:
        """Return the recorded spans by start time. Waits for ops that still run."""
        issues = [instruction.issue for instruction, *_ in self._notes]
        labels = [instruction.op.label for instruction, *_ in self._notes]
        names = {issue: (label, issue.micro_batch) for issue, label in zip(issues, labels, strict=True)}
        spans = []
        for instruction, issued, start, end in self._notes:
            waits = tuple(names[awaited] for awaited in instruction.waits)
            spans.append(Span(instruction.op.lane, *names[instruction.issue], float(start), float(end), issued, waits))
        return Timeline(tuple(sorted(spans, key=lambda span: span.start)))


def _measure_within(interval: tuple[float, float], others: Iterable[tuple[float, float]]) -> float:
    """Return the length of the part of *interval* inside *others*, which do not overlap each other."""
    start, end = interval
    return sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in others)


def _measure_common(intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Return the total length in both lists. Each list is sorted and does not overlap itself."""
    total, first = 0.0, 0
    for start, end in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        last = first
        while last < len(others) and others[last][0] < end:
            last += 1
        total += _measure_within((start, end), others[first:last])
    return total


def _cover(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (time, seconds covered by the intervals so far) for each begin and end."""
    covered = [(0.0, 0.0)]
    for start, end in _merge(intervals):
        covered += [(start, covered[-1][1]), (end, covered[-1][1] + end - start)]
    return covered


def _interpolate(points: list[tuple[float, float]], time: float) -> float:
    """Return the value at *time* of the line through *points*. The line is constant after the last point."""
    after = bisect_right(points, (time, math.inf))
    (left, low), (right, high) = points[after - 1], points[min(after, len(points) - 1)]
    return low + (high - low) * (time - left) / (right - left) if right > left else low


def _merge(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join intervals that touch or overlap."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    assert all(left[1] < right[0] for left, right in pairwise(merged))
    return merged
