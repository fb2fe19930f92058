"""Summarize a step: the gain from overlap, and the time that lanes lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dbo_runtime.ir.op import COMPUTE, COMPUTING
from dbo_runtime.lab.trace.gaps import CAUSES, find_gaps, sum_causes
from dbo_runtime.observe.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one split step; times in seconds.

    Attributes:
        duration: time from the first start to the last end.
        busy: time of each lane [lanes].
        hidden: share of the communication that was concurrent with computation; None without communication.
        overlap: E_overlap, see `measure_overlap`; None without communication.
        bound: a lower bound for any issue order, given this step's op durations; None if not computed.
        planning: host time to decide the step, before its first op; None if not recorded.
        lost: seconds that each lane lost to each cause [lanes][causes].
    """

    duration: float
    busy: Mapping[str, float]
    hidden: float | None
    overlap: float | None
    bound: float | None
    planning: float | None
    lost: Mapping[str, Mapping[str, float]]

    @property
    def efficiency(self) -> float | None:
        """The bound divided by the duration: 1 if no order could have been faster."""
        return self.bound / self.duration if self.bound is not None and self.duration else None

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        return {**asdict(self), "efficiency": self.efficiency}

    def __str__(self) -> str:
        """Format the figures in a few lines."""
        lanes = ", ".join(f"{lane} {seconds * 1e3:.2f}" for lane, seconds in self.busy.items())
        rows = [f"{self.duration * 1e3:.2f} ms; lanes busy: {lanes} ms"]
        if self.hidden is not None and self.overlap is not None:
            rows.append(
                f"{self.hidden:.1%} of the communication was hidden behind computation; E_overlap {self.overlap:.1%}"
            )
        if self.bound is not None and self.efficiency is not None:
            bound = f"{self.bound * 1e3:.2f} ms is a lower bound for ops of these durations"
            rows.append(f"{bound}: LB/T {self.efficiency:.3f}")
        if self.planning is not None:
            rows.append(f"planning took {self.planning * 1e3:.3f} ms before the first op")
        for lane, causes in self.lost.items():
            each = ", ".join(f"{cause} {causes[cause] * 1e3:.2f}" for cause in CAUSES if cause in causes)
            rows.append(f"{lane} idle for {sum(causes.values()) * 1e3:.2f} ms: {each}")
        return "\n".join(rows)


def summarize(timeline: Timeline) -> Summary:
    """Summarize a timeline."""
    lanes = sorted(timeline.lanes, key=lambda lane: lane != COMPUTE)
    communication, hidden = timeline.measure_hidden()
    return Summary(
        duration=timeline.duration,
        busy={lane: timeline.busy(lane) for lane in lanes},
        hidden=hidden / communication if communication else None,
        overlap=measure_overlap(timeline),
        bound=timeline.bound,
        planning=timeline.planning,
        lost=sum_causes(find_gaps(timeline)),
    )


def measure_overlap(timeline: Timeline) -> float | None:
    """Return E_overlap = 1 - ECT / ECT_serial; None without communication.

    ECT, the effective communication time, is the duration of the step minus its computation. ECT_serial is the same
    without overlap: the sum of all communicating ops (Flux, arXiv:2406.06858). The computation is that of this split
    step; `dbo plan` compares with the unsplit step instead (docs/planner.md).
    """
    compute = timeline.busy(COMPUTE)
    serial = sum(span.end - span.start for span in timeline.spans if span.lane not in COMPUTING)
    return 1 - (timeline.duration - compute) / serial if serial else None
