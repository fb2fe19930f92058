"""Read from a recorded step how long each op took, and how long lanes waited for the host."""

from __future__ import annotations

from collections.abc import Sequence

from dbo_runtime.lab.calibrate.samples import Sample
from dbo_runtime.lab.trace.gaps import HOST, find_gaps
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs.batch_features import BatchFeatures


def read_samples(timeline: Timeline, loads: Sequence[BatchFeatures]) -> list[Sample]:
    """Return a timeline's spans as samples, sorted by micro-batch and op: their order in time differs by rank."""
    measured = zip(timeline.spans, timeline.measure_concurrent(), timeline.find_queued(), strict=True)
    samples = {}
    for span, concurrent, was_queued in measured:
        name, load, seconds = span.op.rpartition(".")[2], loads[span.micro_batch], span.end - span.start
        samples[span.micro_batch, span.op] = Sample(name, span.lane, load, seconds, concurrent, was_queued)
    return [samples[name] for name in sorted(samples)]


def measure_late(timeline: Timeline) -> float:
    """Return the seconds in which a lane could have continued, but the host had not issued its next op."""
    return sum(gap.seconds for gap in find_gaps(timeline) if gap.cause == HOST)
