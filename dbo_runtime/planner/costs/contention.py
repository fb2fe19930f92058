"""By how much a lane is slower while another one runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, groupby
from statistics import fmean, median
from typing import NamedTuple

from dbo_runtime.errors import ConfigError
from dbo_runtime.planner.costs.cost_table import Cost
from dbo_runtime.planner.costs.samples import Sample, get_lane, group_by_op
from dbo_runtime.program import SIDE

# Sharing a device or its memory may slow a lane by this much; a greater figure is a disturbed measurement.
MOST_CONTENTION = 10.0


def fit_contention(costs: Mapping[str, Cost], samples: Iterable[Sample]) -> dict[str, float]:
    """Return the factor by which each measured lane is slower while another lane runs; 1 where none ran beside it.

    But for `side`, of which nothing is said then: that lanes which compute do not slow each other has to be seen.

    An op that takes d seconds, o of them beside another lane, does (d - o) + o / factor of work, and alone it takes
    that long: as it was measured alone at the same load, or what it costs. So what it takes longer than alone grows
    with o, by 1 - 1 / factor, and that is looked for between the loads of an op. What it takes longer whatever o is no
    contention: a link that had no time to rest has no credit to begin with, for one. With one load only, all of it
    counts. Of the slopes the median counts, by the o that each stands for: small ops are disturbed by much else.

    Raises:
        ConfigError: if an op has no cost, or a duration is impossible.
    """
    slopes: dict[str, list[tuple[float, float]]] = defaultdict(list)  # with weights, by lane
    for op, of_op in group_by_op(samples).items():
        if op not in costs:
            raise ConfigError(f"op {op} was measured beside another lane but has no cost; measure it alone, too.")
        by_load = sorted(of_op, key=lambda sample: sample.load)
        groups = groupby(by_load, key=lambda sample: sample.load)
        points = [point for load, runs in groups if (point := _compare(list(runs), costs[op].time(load))) is not None]
        pairs = combinations(points if len(points) > 1 else [_Point(0.0, 0.0), *points], 2)
        slopes[get_lane(op, of_op)] += [_find_slope(*pair) for pair in pairs if pair[0].beside != pair[1].beside]
    return {lane: _find_factor(found) for lane, found in slopes.items() if found or lane != SIDE}


class _Point(NamedTuple):
    """Seconds for which an op at one load ran beside another lane, and which it took longer than alone."""

    beside: float
    longer: float


def _compare(repeats: Sequence[Sample], cost: float) -> _Point | None:
    """Return how an op at one load, which *cost* seconds, fared beside another lane.

    Both are means over the middle half of its repeats: those neither shortest nor longest. None if it ran alone only.
    """
    measured_alone = [sample.seconds for sample in repeats if not sample.beside]
    alone = median(measured_alone) if measured_alone else cost
    overlapped = sorted((sample for sample in repeats if sample.beside), key=lambda sample: sample.seconds)
    extreme = (len(overlapped) + 1) // 4
    middle = overlapped[extreme : len(overlapped) - extreme]
    if not middle:
        return None
    return _Point(fmean(sample.beside for sample in middle), fmean(sample.seconds for sample in middle) - alone)


def _find_slope(one: _Point, other: _Point) -> tuple[float, float]:
    """Return the slope between two points, and how many seconds they are apart."""
    apart = other.beside - one.beside
    return (other.longer - one.longer) / apart, abs(apart)


def _find_factor(slopes: Sequence[tuple[float, float]]) -> float:
    """Return the factor of contention that slopes with weights speak for.

    One above 1 would be more than all that ran beside another lane: a disturbance.
    """
    share = max(_find_middle([(slope, weight) for slope, weight in slopes if slope <= 1]), 0.0)
    return min(1 / (1 - share), MOST_CONTENTION) if share < 1 else MOST_CONTENTION


def _find_middle(weighted: Sequence[tuple[float, float]]) -> float:
    """Return the value on either side of which lies half of the weight; 0 without any."""
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in sorted(weighted):
        half -= weight
        if half <= 0:
            return value
    return 0.0
