"""What the ops of one batch take, kind by kind and in sum: the costs of a program, arranged for one quick look."""

from __future__ import annotations

from collections import Counter

from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import ATTENTION, CommCost
from dbo_runtime.program import Program


class OpTimes:
    """The costs of a program's ops.

    Args:
        program: of one micro-batch.
        table: the costs of its ops.
    """

    def __init__(self, program: Program, table: CostTable) -> None:
        self._counts = Counter(op.name for op in program.ops)
        costs = [table.ops[name] for name in self._counts]
        self._sized = [
            (cost.alpha, cost.token_seconds, cost.free_seconds, 0.0)
            if isinstance(cost, CommCost)
            else (cost.fixed, cost.token_seconds, 0.0, cost.weights)
            for cost in costs
        ]
        rates = [tuple(float(getattr(cost, rate, 0.0)) for rate in ATTENTION) for cost in costs]
        self._attending = [(kind, of_kind) for kind, of_kind in enumerate(rates) if any(of_kind)]
        counted = zip(rates, self._counts.values(), strict=True)
        self._attention = tuple(map(sum, zip(*([rate * n for rate in of_kind] for of_kind, n in counted), strict=True)))
        self._credits = [(cost.token_seconds, cost.free_seconds) for cost in costs if isinstance(cost, CommCost)]

    def list_seconds(self, features: BatchFeatures) -> list[float]:
        """Return the seconds of an op of each kind [kinds], in the order of their first op."""
        tokens = features.tokens
        seconds = [fixed + max(rate * tokens - free, least) for fixed, rate, free, least in self._sized]
        for kind, rates in self._attending:
            seconds[kind] += sum([rate * amount for rate, amount in zip(rates, features[1:], strict=True)])
        return seconds

    def list_credits(self, features: BatchFeatures) -> list[float]:
        """Return the seconds that an idle lane saves an op of each kind that communicates [kinds that communicate]."""
        return [min(rate * features.tokens, free) for rate, free in self._credits]

    def sum(self, features: BatchFeatures) -> float:
        """Return the seconds of all ops one after another."""
        return sum([n * each for n, each in zip(self._counts.values(), self.list_seconds(features), strict=True)])

    def sum_attention(self, features: BatchFeatures) -> float:
        """Return the part of the sum that depends on more than the number of tokens."""
        return sum([rate * amount for rate, amount in zip(self._attention, features[1:], strict=True)])
