"""Fit costs to measured durations: non-negative least squares of relative errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations, groupby
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.op import COMM
from dbo_runtime.lab.calibrate.samples import MIN_SIZES, Sample, get_lane, group_by_op
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.op_cost import ATTENTION, CommCost, ComputeCost, OpCost

_Array = npt.NDArray[np.float64]

# Two kinds of pairs, because kernels may compute new pairs that a causal mask hides, or handle cached pairs separately.
PAIRS = ("per_pair", "per_context_pair")

# Relative errors below the first need no further term to explain them. Those below the second come from arithmetic.
EXACT_RELATIVE_ERROR = 1e-6
ROUNDING_RELATIVE_ERROR = 1e-10

# Shorter durations count as this: clocks tick in nanoseconds, and relative errors need a divisor.
TICK_SECONDS = 1e-9

# A buffer that takes the first bytes of a message at once is fitted if this many sizes were measured, with this many
# candidate sizes.
MIN_SIZES_FOR_BUFFER, BUFFER_CANDIDATES = 6, 60


class _Measurements(NamedTuple):
    """One op's durations alone, with different features. Repeats are reduced to their median."""

    features: tuple[BatchFeatures, ...]
    seconds: _Array  # [measurements]

    @property
    def divisors(self) -> _Array:
        """Divisors of relative errors, in seconds [measurements]."""
        return np.maximum(self.seconds, TICK_SECONDS)

    @property
    def weights(self) -> _Array:
        """Weight of each measurement, 1 on average [measurements]. All octaves of durations have equal weight."""
        octaves = np.round(np.log2(self.divisors))
        weights: _Array = np.array([1.0 / np.sum(octaves == octave) for octave in octaves])
        weights /= weights.mean()
        return weights

    def column(self, quantity: str) -> _Array:
        """Return one of the features [measurements]."""
        return np.array([getattr(features, quantity) for features in self.features], dtype=np.float64)

    def prefer(self, richer: float, simpler: float, terms: int = 1) -> bool:
        """Return whether further terms are worth it, given the root mean square errors of both models.

        Measurements scatter, and any term explains some of the scatter. By Schwarz's information criterion (1978), a
        term is worth it if it lowers the sum of squares by a factor of n ** (1 / n). The best of several candidates is
        taken, so the square of that factor is required.
        """
        count = len(self.features)
        return max(richer, EXACT_RELATIVE_ERROR) < max(simpler, EXACT_RELATIVE_ERROR) * math.pow(count, -terms / count)


class _Model(NamedTuple):
    """The terms that a compute op depends on, besides its fixed part and its tokens."""

    kink: float = 0.0  # largest number of tokens at which reading weights dominates; 0 if none
    attention: tuple[str, ...] = ()  # names of rates in `ATTENTION`

    @property
    def terms(self) -> int:
        return 2 + bool(self.kink) + len(self.attention)


class _Fit(NamedTuple):
    model: _Model
    cost: ComputeCost
    unexplained: float  # root mean square of the relative errors


def fit_costs(samples: Iterable[Sample], bytes_per_token: float) -> tuple[dict[str, OpCost], dict[str, float]]:
    """Return the cost of each measured op, and its error: the median relative error over all features.

    Samples that ran concurrently with another lane do not count. Samples of one op with equal features are repeats (in
    different layers, too) and are reduced to their median. Errors are relative, and all octaves of durations have equal
    weight, so that small and large batches count the same, however many there are of each.

    Raises:
        ConfigError: nothing was measured; an op was measured at only one size, or never alone; or a duration is
            negative or not finite.
    """
    costs: dict[str, OpCost] = {}
    errors: dict[str, float] = {}
    for op, of_op in group_by_op(samples).items():
        lane = get_lane(op, of_op)
        points = _reduce_repeats(op, of_op)
        costs[op] = _fit_comm(op, points, bytes_per_token) if lane == COMM else _fit_compute(points)
        errors[op] = float(np.median(np.abs(_compute_errors(costs[op], points))))
    if not costs:
        raise ConfigError("no op was measured; measure unsplit steps of at least two sizes.")
    return costs, errors


def _reduce_repeats(op: str, samples: Sequence[Sample]) -> _Measurements:
    """Return the median of each group of repeats, in order of size."""
    alone = sorted((sample.features, sample.seconds) for sample in samples if not sample.concurrent)
    medians = [
        (features, median(s for _, s in repeats)) for features, repeats in groupby(alone, key=lambda item: item[0])
    ]
    sizes = sorted({features.tokens for features, _ in medians})
    if len(sizes) < MIN_SIZES:
        measured = f"at {sizes[0]} tokens only" if sizes else "only concurrently with another lane, never alone"
        raise ConfigError(f"op {op} was measured {measured}; measure unsplit steps of at least two sizes.")
    return _Measurements(tuple(features for features, _ in medians), np.array([seconds for _, seconds in medians]))


def _fit_comm(op: str, points: _Measurements, bytes_per_token: float) -> CommCost:
    if not 0 < bytes_per_token < math.inf:
        raise ConfigError(f"bytes_per_token is {bytes_per_token:g}; it must be above 0, because op {op} communicates.")
    sizes = points.column("tokens")
    line = _fit_line(points, 0.0, bytes_per_token)
    if len(set(sizes.tolist())) < MIN_SIZES_FOR_BUFFER or _compute_rms(points, line) < EXACT_RELATIVE_ERROR:
        return line
    kinks = np.geomspace(sizes.min(), sizes.max(), BUFFER_CANDIDATES, endpoint=False)
    buffered = min(
        (_fit_line(points, float(kink), bytes_per_token) for kink in kinks), key=partial(_compute_rms, points)
    )
    return buffered if points.prefer(_compute_rms(points, buffered), _compute_rms(points, line)) else line


def _fit_line(points: _Measurements, free_tokens: float, bytes_per_token: float) -> CommCost:
    """Return the cost of messages whose first *free_tokens* tokens cost nothing."""
    beyond = np.maximum(points.column("tokens") - free_tokens, 0.0)
    alpha, slope = _solve([np.ones(len(beyond)), beyond], points)
    return CommCost(alpha, slope / bytes_per_token, bytes_per_token, free_tokens * bytes_per_token)


def _compute_rms(points: _Measurements, cost: OpCost) -> float:
    return math.sqrt(float(points.weights @ _compute_errors(cost, points) ** 2) / len(points.features))


def _fit_compute(points: _Measurements) -> ComputeCost:
    """Return a straight line, extended by the terms that are worth it, best one first."""
    best = _fit_model(_Model(), points)
    while True:
        richer = [_fit_model(model, points) for model in _enrich(best.model, points)]
        better = min(richer, key=lambda fit: fit.unexplained, default=best)
        if not points.prefer(better.unexplained, best.unexplained, better.model.terms - best.model.terms):
            return best.cost
        best = better


def _enrich(model: _Model, points: _Measurements) -> Iterator[_Model]:
    """Yield models with further terms, while there are more measurements than terms.

    New and cached pairs are added together. Attention reads few weights, so a model with a kink has pairs at most.
    """
    richer = []
    if not model.kink and set(model.attention) <= {*PAIRS}:
        richer += [model._replace(kink=kink) for kink in _list_kinks(points)]
    for rates in (PAIRS, *((rate,) for rate in ATTENTION if rate not in PAIRS)):
        measured = tuple(rate for rate in rates if points.column(ATTENTION[rate]).any())
        if measured and not {*measured} & {*model.attention} and (rates == PAIRS or not model.kink):
            richer.append(model._replace(attention=(*model.attention, *measured)))
    yield from (model for model in richer if model.terms < len(points.features))


def _list_kinks(points: _Measurements) -> list[float]:
    """Return the sizes up to which an op may be flat. Each side has at least two: one alone would fit any outlier."""
    return sorted(set(points.column("tokens").tolist()))[1:-2]


def _fit_model(model: _Model, points: _Measurements) -> _Fit:
    tokens = points.column("tokens")
    flat = tokens <= model.kink
    columns: list[_Array] = [np.ones(len(tokens)), tokens * ~flat]
    if model.kink:
        columns.append(flat.astype(np.float64))
    solution = _solve([*columns, *(points.column(ATTENTION[rate]) for rate in model.attention)], points)
    fixed, per_token, *weights = solution[: len(columns)]
    attention = dict(zip(model.attention, solution[len(columns) :], strict=True))
    if attention.keys() & {*PAIRS}:  # a kind of pair that was not measured gets the other's cost
        known = next(attention[rate] for rate in PAIRS if rate in attention)
        attention = {**dict.fromkeys(PAIRS, known), **attention}
    # Fitted separately, the two sides may meet before the last flat size. Up to there the cost stays flat.
    cost = ComputeCost(fixed, per_token, max([per_token * model.kink, *weights]), **attention)
    return _Fit(model, cost, _compute_rms(points, cost))


def _solve(columns: Sequence[_Array], points: _Measurements) -> list[float]:
    """Return the non-negative coefficients [columns] with the least squared relative errors.

    The solution is unconstrained in the columns that it uses (Lawson and Hanson 1974). There are few columns, so all
    subsets are tried, small ones first.
    """
    scale = np.sqrt(points.weights) / points.divisors
    matrix = np.stack(columns, axis=1) * scale[:, None]
    target = points.seconds * scale
    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    best, least = np.zeros(len(columns)), float(target @ target)
    for count in range(1, len(columns) + 1):
        for chosen in map(list, combinations(range(len(columns)), count)):
            solution, *_ = np.linalg.lstsq(matrix[:, chosen] / norms[chosen], target, rcond=None)
            errors = matrix[:, chosen] @ (solution / norms[chosen]) - target
            if (solution >= 0).all() and errors @ errors < least - ROUNDING_RELATIVE_ERROR**2:
                best, least = np.zeros(len(columns)), float(errors @ errors)
                best[chosen] = solution / norms[chosen]
    return [float(value) for value in best]


def _compute_errors(cost: OpCost, points: _Measurements) -> _Array:
    """Return (predicted - measured) / measured [measurements]."""
    predicted = np.array([cost.time(features) for features in points.features])
    errors: _Array = (predicted - points.seconds) / points.divisors
    return errors
