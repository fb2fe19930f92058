"""Find the times in which a lane ran nothing, and their causes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dbo_runtime.observe.timeline import Span, Timeline

FILL, DRAIN = "fill", "drain"  # not all micro-batches had begun; at most one had not ended
WAIT = "wait"  # the lane waited for another lane's op while several micro-batches were in progress
HOST = "host"  # the host had not issued the op yet
START = "start"  # issued and ready, not started: start latency, or the lane's hardware was busy
NOTHING_LEFT = "nothing left"  # the lane had run all its ops
UNKNOWN = "unknown"  # the time of issue and the waits were not recorded
CAUSES = (WAIT, HOST, START, FILL, DRAIN, NOTHING_LEFT, UNKNOWN)


class Gap(NamedTuple):
    """An interval in which a lane ran nothing, in seconds of the timeline's clock.

    Attributes:
        cause: one of CAUSES.
        before: the (op, micro-batch) that the lane ran next; None if there was none.
        awaited: the (op, micro-batch) whose end the lane waited for last; None if it did not wait.
    """

    lane: str
    start: float
    end: float
    cause: str
    before: tuple[str, int] | None = None
    awaited: tuple[str, int] | None = None

    @property
    def seconds(self) -> float:
        """Length of the gap."""
        return self.end - self.start


def find_gaps(timeline: Timeline) -> list[Gap]:
    """Return all gaps of all lanes between the first start and the last end, lane by lane, in order of time.

    A gap before an op is divided where its cause changes. Until the last op that it waited for has ended, the cause is
    `wait`; at the beginning and end of a step, where no order has other ops to run, it is `fill` or `drain`. Then,
    until the host has issued the op, it is `host`. The rest is `start`.
    """
    if not timeline.spans:
        return []
    ends = {(span.op, span.micro_batch): span.end for span in timeline.spans}
    filled, draining = _measure_phases(timeline.spans)
    first, last = min(span.start for span in timeline.spans), max(ends.values())
    gaps: list[Gap] = []
    for lane in timeline.lanes:
        free = first
        for span in sorted((s for s in timeline.spans if s.lane == lane), key=lambda s: (s.start, s.end)):
            if span.start > free:
                gaps += _explain(span, free, ends, filled, draining)
            free = max(free, span.end)
        if free < last:
            gaps.append(Gap(lane, free, last, NOTHING_LEFT))
    return gaps


def sum_causes(gaps: Iterable[Gap]) -> dict[str, dict[str, float]]:
    """Return the seconds that each lane lost to each cause [lanes][causes]. Causes without a gap are left out."""
    lost: dict[str, dict[str, float]] = {}
    for gap in gaps:
        causes = lost.setdefault(gap.lane, {})
        causes[gap.cause] = causes.get(gap.cause, 0.0) + gap.seconds
    return lost


def _measure_phases(spans: Sequence[Span]) -> tuple[float, float]:
    """Return when the last micro-batch began, and when all but one had ended."""
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}
    for span in spans:
        begun[span.micro_batch] = min(begun.get(span.micro_batch, span.start), span.start)
        ended[span.micro_batch] = max(ended.get(span.micro_batch, span.end), span.end)
    in_order = sorted(ended.values())
    return max(begun.values()), in_order[-2] if len(in_order) > 1 else min(begun.values())


def _explain(
    span: Span, free: float, ends: dict[tuple[str, int], float], filled: float, draining: float
) -> Iterator[Gap]:
    """Yield the gaps between *free* and the start of *span*, one per cause."""
    before = span.op, span.micro_batch
    if span.issued is None:
        yield Gap(span.lane, free, span.start, UNKNOWN, before)
        return
    awaited = max(span.waits, key=lambda op: ends[op], default=None)
    ready = free if awaited is None else _clamp(ends[awaited], free, span.start)
    issued = _clamp(span.issued, ready, span.start)
    # Until the last micro-batch has begun, and once all but one have ended, no order has other ops to run.
    filled = _clamp(filled, free, ready)
    draining = _clamp(draining, filled, ready)
    pieces = (
        (free, filled, FILL, awaited),
        (filled, draining, WAIT, awaited),
        (draining, ready, DRAIN, awaited),
        (ready, issued, HOST, None),
        (issued, span.start, START, None),
    )
    for start, end, cause, op in pieces:
        if end > start:
            yield Gap(span.lane, start, end, cause, before, op)


def _clamp(time: float, low: float, high: float) -> float:
    return min(max(time, low), high)
