"""Fit contention: by which factor a lane is slower while another one runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, groupby
from statistics import fmean, median
from typing import NamedTuple

from dbo_runtime.errors import ConfigError
from dbo_runtime.planner.costs.op_cost import OpCost
from dbo_runtime.planner.costs.samples import Sample, get_lane, group_by_op

# Sharing a device or its memory may slow a lane by this factor; a greater one is a disturbed measurement.
MAX_CONTENTION = 10.0


def fit_contention(costs: Mapping[str, OpCost], samples: Iterable[Sample]) -> dict[str, float]:
    """Return the factor by which each lane is slower while another lane runs; without lanes that never did.

    That lanes do not slow each other down has to be measured: of `compute` and `comm`, decisions doubt it where it was
    not (`predictor.make_worst_cases`), and `side` is not used then.

    An op that takes d seconds, o of them concurrent with another lane, does (d - o) + o / factor of work, which is the
    time that it takes alone: measured alone with the same features, or predicted. So the time beyond that grows with o
    at a rate of 1 - 1 / factor, which is the slope between an op's measurements at different features. A part of it
    that does not grow with o is no contention, such as the credit that a link lacks which had no time to rest. At one
    size only, all of it counts. The result is the median of the slopes, weighted by the difference in o, because small
    ops are disturbed by much else.

    Raises:
        ConfigError: if an op has no cost, or a duration is negative or not finite.
    """
    slopes: dict[str, list[tuple[float, float]]] = defaultdict(list)  # with weights, by lane
    for op, of_op in group_by_op(samples).items():
        if op not in costs:
            raise ConfigError(f"op {op} was measured concurrently with others but has no cost; measure it alone, too.")
        by_features = sorted(of_op, key=lambda sample: sample.features)
        groups = groupby(by_features, key=lambda sample: sample.features)
        points = [
            point for features, runs in groups if (point := _compare(list(runs), costs[op].time(features))) is not None
        ]
        pairs = combinations(points if len(points) > 1 else [_Overlap(0.0, 0.0), *points], 2)
        slopes[get_lane(op, of_op)] += [
            _compute_slope(*pair) for pair in pairs if pair[0].concurrent != pair[1].concurrent
        ]
    return {lane: _compute_factor(weighted) for lane, weighted in slopes.items() if weighted}


class _Overlap(NamedTuple):
    """Seconds that an op with certain features overlapped another lane, and that it took longer than alone."""

    concurrent: float
    longer: float


def _compare(repeats: Sequence[Sample], cost: float) -> _Overlap | None:
    """Return the overlap of an op's repeats with the same features, which alone cost *cost* seconds.

    Both numbers are means over the middle half of the repeats by duration. None if it ran alone only.
    """
    measured_alone = [sample.seconds for sample in repeats if not sample.concurrent]
    alone = median(measured_alone) if measured_alone else cost
    overlapped = sorted((sample for sample in repeats if sample.concurrent), key=lambda sample: sample.seconds)
    extreme = (len(overlapped) + 1) // 4
    middle = overlapped[extreme : len(overlapped) - extreme]
    if not middle:
        return None
    return _Overlap(fmean(sample.concurrent for sample in middle), fmean(sample.seconds for sample in middle) - alone)


def _compute_slope(one: _Overlap, other: _Overlap) -> tuple[float, float]:
    """Return the slope between two overlaps, and the difference of their concurrent seconds."""
    difference = other.concurrent - one.concurrent
    return (other.longer - one.longer) / difference, abs(difference)


def _compute_factor(slopes: Sequence[tuple[float, float]]) -> float:
    """Return the contention factor of weighted slopes.

    Slopes above 1 are left out: the op cannot have lost more than the time that overlapped, so it was disturbed.
    """
    share = max(_compute_weighted_median([(slope, weight) for slope, weight in slopes if slope <= 1]), 0.0)
    return min(1 / (1 - share), MAX_CONTENTION) if share < 1 else MAX_CONTENTION


def _compute_weighted_median(weighted: Sequence[tuple[float, float]]) -> float:
    """Return the weighted median of (value, weight); 0 if there is none."""
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in sorted(weighted):
        half -= weight
        if half <= 0:
            return value
    return 0.0
