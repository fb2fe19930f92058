"""Where lanes lost time, and to what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dbo_runtime.observe.timeline import Span, Timeline

FILL, DRAIN = "fill", "drain"  # not every micro-batch has begun; at most one has not ended
WAIT = "wait"  # for another lane, while there were others to run
HOST = "host"  # the host had not issued the op yet
START = "start"  # issued and ready, but not started: what handing over takes, or a lane of the device that is shared
NOTHING_LEFT = "nothing left"  # the lane had run all it had
UNKNOWN = "unknown"  # nobody noted when the op was issued and for what it waited
CAUSES = (WAIT, HOST, START, FILL, DRAIN, NOTHING_LEFT, UNKNOWN)


class Gap(NamedTuple):
    """A time, in seconds of the timeline's clock, in which a lane ran nothing.

    Attributes:
        cause: one of CAUSES.
        before: the op, of which micro-batch, that the lane ran next; None if it ran none.
        awaited: the op, of which micro-batch, for whose end it waited last; None if the lane did not wait.
    """

    lane: str
    start: float
    end: float
    cause: str
    before: tuple[str, int] | None = None
    awaited: tuple[str, int] | None = None

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start


def find_gaps(timeline: Timeline) -> list[Gap]:
    """Return all gaps of all lanes between the first start and the last end, lane by lane, in order of time.

    A gap before an op is cut where its cause changes: until the last op that it waited for has ended, the lane waits
    (in the beginning and at the end of a step there is nothing to run meanwhile, whatever the order: fill and drain);
    until the host has issued it, the host is too slow; what is left is what starting it takes.
    """
    if not timeline.spans:
        return []
    ends = {(span.op, span.micro_batch): span.end for span in timeline.spans}
    filled, draining = _find_phases(timeline.spans)
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
    """Return the seconds that each lane lost to each cause that it met [lanes][causes]."""
    lost: dict[str, dict[str, float]] = {}
    for gap in gaps:
        causes = lost.setdefault(gap.lane, {})
        causes[gap.cause] = causes.get(gap.cause, 0.0) + gap.seconds
    return lost


def _find_phases(spans: Sequence[Span]) -> tuple[float, float]:
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
    """Yield what lies between *free* and the start of *span*, by cause."""
    before = span.op, span.micro_batch
    if span.issued is None:
        yield Gap(span.lane, free, span.start, UNKNOWN, before)
        return
    awaited = max(span.waits, key=lambda op: ends[op], default=None)
    ready = free if awaited is None else _clamp(ends[awaited], free, span.start)
    issued = _clamp(span.issued, ready, span.start)
    # Before the last micro-batch has begun and after all but one have ended, no order would have had more to run.
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
