"""Op times of a batch, by kind of op and in sum: a program's costs, arranged for fast evaluation."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import ATTENTION, CommCost, OpCost

_ATTENTION = [(rate, BatchFeatures._fields.index(feature)) for rate, feature in ATTENTION.items()]


class _Sized(NamedTuple):
    """The time of an op by number of tokens: fixed + max(token * tokens - free, least), in seconds."""

    fixed: float
    token: float
    free: float
    least: float

    @property
    def growing_from(self) -> float:
        """The number of tokens from which more tokens take longer."""
        return (self.least + self.free) / self.token if self.token > 0 else math.inf


class OpTimes:
    """The costs of a program's ops.

    Args:
        program: the program of one micro-batch.
        table: the costs of the program's ops.
    """

    def __init__(self, program: Program, table: CostTable) -> None:
        counts = Counter(op.name for op in program.ops)
        costs = [table.ops[name] for name in counts]
        self._sized = [_read_sized(cost) for cost in costs]
        rates = [_list_rates(cost) for cost in costs]
        self._attending = [(kind, of_kind) for kind, of_kind in enumerate(rates) if of_kind]
        self._credits = [(cost.token_seconds, cost.free_seconds) for cost in costs if isinstance(cost, CommCost)]
        sums: dict[int, float] = {}
        for of_kind, count in zip(rates, counts.values(), strict=True):
            for feature, rate in of_kind:
                sums[feature] = sums.get(feature, 0.0) + rate * count
        self._attention = list(sums.items())
        # The sum of the terms that depend on the number of tokens is linear between the points where an op starts to
        # grow.
        self._ends = sorted({sized.growing_from for sized in self._sized} - {math.inf})
        self._lines = [_sum_line(self._sized, list(counts.values()), end) for end in (*self._ends, math.inf)]

    def list_seconds(self, features: BatchFeatures) -> list[float]:
        """Return the seconds of one op of each kind [kinds], in the order of their first op."""
        tokens = features.tokens
        seconds = [
            fixed + (sized if (sized := token * tokens - free) > least else least)
            for fixed, token, free, least in self._sized
        ]
        for kind, rates in self._attending:
            for feature, rate in rates:
                seconds[kind] += rate * features[feature]
        return seconds

    def list_credits(self, features: BatchFeatures) -> list[float]:
        """Return the seconds that an idle lane saves one op of each communicating kind [kinds that communicate]."""
        return [min(rate * features.tokens, free) for rate, free in self._credits]

    def sum(self, features: BatchFeatures) -> float:
        """Return the seconds of all ops one after another."""
        fixed, token = self._lines[bisect_right(self._ends, features.tokens)]
        return fixed + token * features.tokens + self.sum_attention(features)

    def sum_attention(self, features: BatchFeatures) -> float:
        """Return the part of the sum that depends on other features than the number of tokens."""
        seconds = 0.0
        for feature, rate in self._attention:
            seconds += rate * features[feature]
        return seconds


def _read_sized(cost: OpCost) -> _Sized:
    if isinstance(cost, CommCost):
        return _Sized(cost.alpha, cost.token_seconds, cost.free_seconds, 0.0)
    return _Sized(cost.fixed, cost.token_seconds, 0.0, cost.weights)


def _list_rates(cost: OpCost) -> list[tuple[int, float]]:
    """Return the features that attention's cost depends on, with the seconds per unit of each."""
    rates = [(feature, float(getattr(cost, rate, 0.0))) for rate, feature in _ATTENTION]
    return [(feature, rate) for feature, rate in rates if rate]


def _sum_line(kinds: Sequence[_Sized], counts: Sequence[int], end: float) -> tuple[float, float]:
    """Return all ops' fixed seconds and seconds per token, for numbers of tokens just below *end*."""
    fixed = token = 0.0
    for sized, count in zip(kinds, counts, strict=True):
        grows = sized.growing_from < end
        fixed += count * (sized.fixed + (-sized.free if grows else sized.least))
        token += count * sized.token if grows else 0.0
    return fixed, token
