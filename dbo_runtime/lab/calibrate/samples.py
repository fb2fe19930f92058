"""Measured runs of ops, read from recorded steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.trace.gaps import HOST, find_gaps
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs.batch_features import BatchFeatures

MIN_SIZES = 2  # sizes that an op must be measured at: its cost is at least a line


class Sample(NamedTuple):
    """One measured run of an op."""

    op: str
    lane: str
    features: BatchFeatures
    seconds: float
    concurrent: float = 0.0  # seconds in which another lane ran, too; see `Timeline.measure_concurrent`
    was_queued: bool = True  # the whole op was issued before it began, so its lane did not wait for the host


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


def keep_queued(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that measure op times, without those that measure how long the host takes to issue kernels.

    An op that was not queued at enough sizes keeps all its samples: its time is at most theirs.
    """
    sizes: dict[str, set[int]] = defaultdict(set)
    for sample in samples:
        if sample.was_queued and not sample.concurrent:
            sizes[sample.op].add(sample.features.tokens)
    return [sample for sample in samples if sample.was_queued or len(sizes[sample.op]) < MIN_SIZES]


def group_by_op(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Return the samples of each op. Raises ConfigError if a duration is negative or not finite."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if not (0 <= sample.concurrent <= sample.seconds < math.inf):
            raise ConfigError(
                f"op {sample.op} has a sample of {sample.seconds:g} s, of which {sample.concurrent:g} s concurrent "
                f"with another lane; durations are finite, and a part is at most the total. Measure again."
            )
        groups[sample.op].append(sample)
    return groups


def get_lane(op: str, samples: Sequence[Sample]) -> str:
    """Return the lane of an op's samples. Raises ConfigError if there are several."""
    lanes = sorted({sample.lane for sample in samples})
    if len(lanes) > 1:
        raise ConfigError(f"op {op} runs on lanes {' and '.join(lanes)}; ops of one name share one cost: rename one.")
    return lanes[0]
