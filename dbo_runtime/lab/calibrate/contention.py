"""Fit contention: the factor by which a lane is slower while another lane runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, groupby
from statistics import fmean, median
from typing import NamedTuple

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.calibrate.samples import Sample, get_lane, group_by_op
from dbo_runtime.planner.costs.op_cost import OpCost

# Sharing a device or its memory may slow a lane down by this factor. A larger factor means a disturbed measurement.
MAX_CONTENTION = 10.0


def fit_contention(costs: Mapping[str, OpCost], samples: Iterable[Sample]) -> dict[str, float]:
    """Return the factor by which each lane is slower while another lane runs. Lanes that always ran alone are left out.

    That lanes do not slow each other down must be measured. If it was not, decisions allow for contention of `compute`
    and `comm` (`predictor.make_worst_cases`), and `side` is not used.

    Consider an op that takes d seconds, o of them concurrent with another lane. It does (d - o) + o / factor of work,
    which equals its time alone: measured alone with the same features, or predicted. The excess time therefore grows
    with o at a rate of 1 - 1 / factor, which is the slope between an op's measurements at different features. An excess
    that does not grow with o is no contention: for example, the credit that a link lacks if it had no time to rest.
    With only one size, all excess counts. The result is the median of the slopes, weighted by the difference in o,
    because small ops are disturbed by much else.

    Raises:
        ConfigError: an op has no cost, or a duration is negative or not finite.
    """
    slopes: dict[str, list[tuple[float, float]]] = defaultdict(list)  # weighted slopes by lane
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
    """An op's mean seconds of overlap with another lane, and its seconds beyond its time alone, at some features."""

    concurrent: float
    longer: float


def _compare(repeats: Sequence[Sample], cost: float) -> _Overlap | None:
    """Return the overlap of an op's repeats with equal features; alone the op takes *cost* seconds.

    Both numbers are means over the middle half of the repeats by duration. Returns None if the op only ran alone.
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
    """Return the slope between two overlaps, and the difference in their concurrent seconds."""
    difference = other.concurrent - one.concurrent
    return (other.longer - one.longer) / difference, abs(difference)


def _compute_factor(slopes: Sequence[tuple[float, float]]) -> float:
    """Return the contention factor of weighted slopes.

    Slopes above 1 are left out: an op cannot lose more than the overlapping time, so it was disturbed.
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
