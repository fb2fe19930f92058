"""The time of all ops of a program one after another, in microseconds of computing."""

from __future__ import annotations

from collections import Counter

from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import ATTENTION, CommCost, ComputeCost, CostTable
from dbo_runtime.program import Program


class OpSums:
    """Sums of the costs of a program's ops.

    Args:
        program: of one micro-batch.
        table: the costs of its ops.
    """

    def __init__(self, program: Program, table: CostTable) -> None:
        counts = Counter(op.name for op in program.ops)
        self._fixed = 0.0
        self._sized: list[tuple[float, float, float]] = []  # seconds a token, free of charge, and at least
        attention = dict.fromkeys(ATTENTION, 0.0)
        for name, count in counts.items():
            cost = table.ops[name]
            if isinstance(cost, CommCost):
                self._fixed += count * cost.alpha
                self._sized.append((count * cost.token_seconds, count * cost.free_seconds, 0.0))
            else:
                self._add_compute(cost, count, attention)
        self._attention = tuple(attention.values())

    def sum(self, features: BatchFeatures) -> float:
        """Return seconds."""
        tokens = features.tokens
        sized = sum([max(rate * tokens - free, least) for rate, free, least in self._sized])
        return self._fixed + sized + self.sum_attention(features)

    def sum_attention(self, features: BatchFeatures) -> float:
        """Return the seconds that depend on more than the number of tokens."""
        return sum([rate * amount for rate, amount in zip(self._attention, features[1:], strict=True)])

    def _add_compute(self, cost: ComputeCost, count: int, attention: dict[str, float]) -> None:
        self._fixed += count * cost.fixed
        self._sized.append((count * cost.token_seconds, 0.0, count * cost.weights))
        for rate in attention:
            attention[rate] += count * float(getattr(cost, rate))
