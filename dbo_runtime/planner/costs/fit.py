"""From measured durations to costs: non-negative least squares of relative errors."""

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
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import ATTENTION, CommCost, ComputeCost, Cost
from dbo_runtime.planner.costs.samples import Sample, get_lane, group_by_op
from dbo_runtime.program import COMM

_Array = npt.NDArray[np.float64]

# Two kinds of pairs: kernels may compute new ones that a causal mask hides, or handle cached ones apart.
PAIRS = ("per_pair", "per_context_pair")

# Relative errors below the first need no further term to explain them; below the second, they are of arithmetic.
EXACT = 1e-6
ROUNDING = 1e-10

# Durations below this (seconds) count as this: clocks tick in nanoseconds, and relative errors need a divisor.
TICK = 1e-9

# A buffer that takes the first bytes of a message at once is looked for if there are that many sizes, at that many.
SIZES_FOR_BUFFER, BUFFERS_TRIED = 6, 60


class _Points(NamedTuple):
    """What one op took alone at different loads, repeats reduced to their median."""

    loads: tuple[BatchFeatures, ...]
    seconds: _Array  # [points]

    @property
    def divisors(self) -> _Array:
        """What relative errors are relative to, in seconds [points]."""
        return np.maximum(self.seconds, TICK)

    @property
    def weights(self) -> _Array:
        """How much each counts, 1 on average [points]: an octave of durations as much as any other."""
        octaves = np.round(np.log2(self.divisors))
        weights: _Array = np.array([1.0 / np.sum(octaves == octave) for octave in octaves])
        weights /= weights.mean()
        return weights

    def column(self, quantity: str) -> _Array:
        """Return one quantity of the loads [points]."""
        return np.array([getattr(load, quantity) for load in self.loads], dtype=np.float64)

    def prefer(self, richer: float, simpler: float, terms: int = 1) -> bool:
        """Return whether further terms are worth it, by what both models leave unexplained (root mean squares).

        Measurements scatter, and any term explains some of that: by Schwarz's information criterion (1978), one is
        worth it if it lowers the sum of squares by a factor of n ** (1 / n). The best of several gets lucky: we ask for
        the square of it.
        """
        count = len(self.loads)
        return max(richer, EXACT) < max(simpler, EXACT) * math.pow(count, -terms / count)


class _Model(NamedTuple):
    """What a compute op is taken to depend on, beside what is fixed and the tokens."""

    kink: float = 0.0  # up to which size it waits for its weights; 0 if it does at none
    attention: tuple[str, ...] = ()  # rates of `ATTENTION`

    @property
    def terms(self) -> int:
        return 2 + bool(self.kink) + len(self.attention)


class _Fit(NamedTuple):
    model: _Model
    cost: ComputeCost
    unexplained: float  # root mean square of the relative errors


def fit_costs(samples: Iterable[Sample], bytes_per_token: float) -> tuple[dict[str, Cost], dict[str, float]]:
    """Return the cost of each op that was measured, and how far it is off: the median relative error over the loads.

    Samples beside another lane do not count. Those of one op at one load are repeats (layers among them), of which the
    median counts. Of errors, the relative size counts, and an octave of durations as much as any other, so that small
    and large loads weigh alike, however many there are of each.

    Raises:
        ConfigError: if nothing was measured, or an op at one size only, or not alone; or a duration is impossible.
    """
    costs: dict[str, Cost] = {}
    errors: dict[str, float] = {}
    for op, of_op in group_by_op(samples).items():
        lane = get_lane(op, of_op)
        points = _reduce_repeats(op, of_op)
        costs[op] = _fit_comm(op, points, bytes_per_token) if lane == COMM else _fit_compute(points)
        errors[op] = float(np.median(np.abs(_find_errors(costs[op], points))))
    if not costs:
        raise ConfigError("no op was measured; measure unsplit steps of at least two sizes.")
    return costs, errors


def _reduce_repeats(op: str, samples: Sequence[Sample]) -> _Points:
    """Return the medians in order of size."""
    alone = sorted((sample.load, sample.seconds) for sample in samples if not sample.beside)
    medians = [(load, median(s for _, s in repeats)) for load, repeats in groupby(alone, key=lambda item: item[0])]
    sizes = sorted({load.tokens for load, _ in medians})
    if len(sizes) < 2:
        measured = f"at {sizes[0]} tokens only" if sizes else "only beside another lane, never alone"
        raise ConfigError(f"op {op} was measured {measured}; measure unsplit steps of at least two sizes.")
    return _Points(tuple(load for load, _ in medians), np.array([seconds for _, seconds in medians]))


def _fit_comm(op: str, points: _Points, bytes_per_token: float) -> CommCost:
    if not 0 < bytes_per_token < math.inf:
        raise ConfigError(f"bytes_per_token is {bytes_per_token:g}; it must be above 0, because op {op} communicates.")
    sizes = points.column("tokens")
    line = _fit_line(points, 0.0, bytes_per_token)
    if len(set(sizes.tolist())) < SIZES_FOR_BUFFER or _find_rms(points, line) < EXACT:
        return line
    kinks = np.geomspace(sizes.min(), sizes.max(), BUFFERS_TRIED, endpoint=False)
    buffered = min((_fit_line(points, float(kink), bytes_per_token) for kink in kinks), key=partial(_find_rms, points))
    return buffered if points.prefer(_find_rms(points, buffered), _find_rms(points, line)) else line


def _fit_line(points: _Points, free_tokens: float, bytes_per_token: float) -> CommCost:
    """Return the cost of messages of which so many tokens cost nothing."""
    beyond = np.maximum(points.column("tokens") - free_tokens, 0.0)
    alpha, slope = _solve([np.ones(len(beyond)), beyond], points)
    return CommCost(alpha, slope / bytes_per_token, bytes_per_token, free_tokens * bytes_per_token)


def _find_rms(points: _Points, cost: Cost) -> float:
    return math.sqrt(float(points.weights @ _find_errors(cost, points) ** 2) / len(points.loads))


def _fit_compute(points: _Points) -> ComputeCost:
    """Return the line through the points, and beside it the terms that are worth it, the best one first."""
    best = _fit_model(_Model(), points)
    while True:
        richer = [_fit_model(model, points) for model in _enrich(best.model, points)]
        better = min(richer, key=lambda fit: fit.unexplained, default=best)
        if not points.prefer(better.unexplained, best.unexplained, better.model.terms - best.model.terms):
            return best.cost
        best = better


def _enrich(model: _Model, points: _Points) -> Iterator[_Model]:
    """Yield models with more in them, as long as there are more points than terms.

    New pairs and cached ones come together. Attention reads few weights, so next to a kink there are pairs at most.
    """
    richer = []
    if not model.kink and set(model.attention) <= {*PAIRS}:
        richer += [model._replace(kink=kink) for kink in _list_kinks(points)]
    for rates in (PAIRS, *((rate,) for rate in ATTENTION if rate not in PAIRS)):
        measured = tuple(rate for rate in rates if points.column(ATTENTION[rate]).any())
        if measured and not {*measured} & {*model.attention} and (rates == PAIRS or not model.kink):
            richer.append(model._replace(attention=(*model.attention, *measured)))
    yield from (model for model in richer if model.terms < len(points.loads))


def _list_kinks(points: _Points) -> list[float]:
    """Return up to which sizes an op may be flat. Each part has two sizes at least: one alone would fit any outlier."""
    return sorted(set(points.column("tokens").tolist()))[1:-2]


def _fit_model(model: _Model, points: _Points) -> _Fit:
    tokens = points.column("tokens")
    flat = tokens <= model.kink
    columns: list[_Array] = [np.ones(len(tokens)), tokens * ~flat]
    if model.kink:
        columns.append(flat.astype(np.float64))
    solution = _solve([*columns, *(points.column(ATTENTION[rate]) for rate in model.attention)], points)
    fixed, per_token, *weights = solution[: len(columns)]
    attention = dict(zip(model.attention, solution[len(columns) :], strict=True))
    if attention.keys() & {*PAIRS}:  # where one kind was not measured, a pair is taken for a pair
        known = next(attention[rate] for rate in PAIRS if rate in attention)
        attention = {**dict.fromkeys(PAIRS, known), **attention}
    # Fitted apart, the parts may meet before the last size that was taken for flat; up to there it stays flat.
    cost = ComputeCost(fixed, per_token, max([per_token * model.kink, *weights]), **attention)
    return _Fit(model, cost, _find_rms(points, cost))


def _solve(columns: Sequence[_Array], points: _Points) -> list[float]:
    """Return the non-negative coefficients [columns] with the least squared relative errors.

    The solution is unconstrained in the columns it uses (Lawson and Hanson 1974), and there are few: all sets of them
    are tried, small ones first.
    """
    scale = np.sqrt(points.weights) / points.divisors
    matrix = np.stack(columns, axis=1) * scale[:, None]
    target = points.seconds * scale
    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    best, least = np.zeros(len(columns)), float(target @ target)
    for count in range(1, len(columns) + 1):
        for chosen in map(list, combinations(range(len(columns)), count)):
            found, *_ = np.linalg.lstsq(matrix[:, chosen] / norms[chosen], target, rcond=None)
            errors = matrix[:, chosen] @ (found / norms[chosen]) - target
            if (found >= 0).all() and errors @ errors < least - ROUNDING**2:
                best, least = np.zeros(len(columns)), float(errors @ errors)
                best[chosen] = found / norms[chosen]
    return [float(value) for value in best]


def _find_errors(cost: Cost, points: _Points) -> _Array:
    """Return (predicted - measured) / measured [points]."""
    predicted = np.array([cost.time(load) for load in points.loads])
    errors: _Array = (predicted - points.seconds) / points.divisors
    return errors
