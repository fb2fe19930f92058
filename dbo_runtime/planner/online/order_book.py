"""The issue orders that serving chooses from, and the data that predict how long a step takes by each of them.

All searching, lowering and simulating is done when a book is made, before requests are served. Predictions are then
products of small matrices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_times import OpTimes
from dbo_runtime.planner.online.durations import DurationTables, Vector, round_durations, stack_features
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.overlap_cost import OverlapCost, compute_share, find_common_factor, stack_shares
from dbo_runtime.planner.online.predictor import Predictor

# Number of steps to simulate by each order, for a table whose lanes slow each other down by different factors: with the
# expected costs, and with each worst case.
SIMULATED_STEPS = 40
SIMULATED_WORST_CASES = 4


class PreparedOrder(NamedTuple):
    """An issue order and its critical paths [paths, durations]."""

    order: NamedOrder
    paths: Vector


class OrderBook:
    """Orders for one number of micro-batches.

    Args:
        program: ops of one micro-batch, on any lanes.
        prepared: orders to choose from.
        tables: costs to predict by.
        samples: features of each micro-batch, for steps that represent all steps [steps][micro-batches].
        counts: number of ops of each kind with each of these features [kinds of all micro-batches]; None if every
            micro-batch has all ops of the program.

    Attributes:
        orders: orders to choose from.
    """

    def __init__(
        self,
        program: Program,
        prepared: Sequence[PreparedOrder],
        tables: DurationTables,
        samples: Sequence[Sequence[BatchFeatures]],
        counts: Vector | None = None,
    ) -> None:
        self.orders = tuple(order for order, _ in prepared)
        self._numbers = {order.name: number for number, order in enumerate(self.orders)}
        self._paths_of = [paths for _, paths in prepared]
        expected = tables.tables[0]
        self._times = OpTimes(program, expected)
        self._host = [expected.host.issue, expected.host.handover]
        self._counts = tables.repeat_counts(len(samples[0])) if counts is None else counts
        self._tables = tables
        self._paths = np.concatenate([paths for _, paths in prepared]).T
        self._begins = np.cumsum([0, *(len(paths) for _, paths in prepared[:-1])])
        contended: dict[tuple[tuple[str, float], ...], list[int]] = {}
        for number, table in enumerate(tables.tables):
            contended.setdefault(tuple(sorted(table.contention.items())), []).append(number)
        self._overlap_costs: list[tuple[list[int], OverlapCost]] = []  # with the numbers of tables that share each
        self._expected_overlap_cost: OverlapCost | None = None
        for numbers in contended.values():  # an overlap cost depends only on contention and the shares of work
            first = numbers[0]
            few = _spread(samples, SIMULATED_WORST_CASES if first else SIMULATED_STEPS)
            durations = tables.compute_durations(stack_features(few))
            alone, work = self._predict_alone(durations)[first], self._compute_work(durations)[first]
            cost = self._measure_overlap_cost(program, tables.tables[first], few, alone, work)
            if cost is not None:
                self._overlap_costs.append((numbers, cost))
                self._expected_overlap_cost = self._expected_overlap_cost if first else cost

    @property
    def digest(self) -> str:
        """Names of the orders, and a hash of everything else that predictions depend on, except costs."""
        numbers = hashlib.sha256(self._paths.tobytes())
        for tables, cost in self._overlap_costs:
            numbers.update(str(tables).encode() + cost.shares.tobytes())
        return "-".join([*self._numbers, numbers.hexdigest()[:16]])

    def predict(self, slice_features: Sequence[Sequence[BatchFeatures]]) -> Vector:
        """Return the predicted seconds of all ops of a step, for each step and order [tables, steps, orders].

        *slice_features* are the features of each micro-batch of each step [steps][micro-batches].
        """
        durations = self._tables.compute_durations(stack_features(slice_features))
        ends = self._predict_alone(durations)
        for numbers, cost in self._overlap_costs:
            work, of_tables = self._compute_work(durations[numbers]), ends[numbers]
            # In place, because these arrays are so small that making one takes longer than filling it.
            overlap = np.add.reduce(work, axis=2, keepdims=True) - of_tables
            np.maximum(overlap, 0.0, out=overlap)
            overlap *= cost.estimate(work)
            of_tables += overlap
            ends[numbers] = of_tables
        return ends

    def predict_one(self, slice_features: Sequence[BatchFeatures], order: NamedOrder) -> float:
        """Return the expected seconds of all ops of one step by one order, from the features of each micro-batch."""
        number, cost = self._numbers[order.name], self._expected_overlap_cost
        durations = [each for features in slice_features for each in self._times.list_seconds(features)]
        kinds = len(durations)
        for features in slice_features:
            durations += self._times.list_credits(features)
        durations += self._host
        vector = round_durations(np.array(durations))
        end = float(np.maximum.reduce(self._paths_of[number] @ vector))
        if cost is not None:
            work = vector[:kinds] * self._counts
            end += float(cost.estimate(work)[number]) * max(float(np.add.reduce(work)) - end, 0.0)
        return end

    def _compute_work(self, durations: Vector) -> Vector:
        """Return the sum of seconds for each kind of op [..., kinds of all micro-batches] from [..., durations]."""
        work: Vector = durations[..., : len(self._counts)] * self._counts
        return work

    def _predict_alone(self, durations: Vector) -> Vector:
        """Return the seconds at which each order ends if no lane slows another down [tables, steps, orders]."""
        ends: Vector = np.maximum.reduceat(durations @ self._paths, self._begins, axis=2)
        return ends

    def _measure_overlap_cost(
        self,
        program: Program,
        table: CostTable,
        samples: Sequence[Sequence[BatchFeatures]],
        alone: Vector,
        work: Vector,
    ) -> OverlapCost | None:
        """Return the cost of overlap by a table; None if overlap costs nothing.

        *alone* are the seconds at which each sample ends without contention [samples, orders]. *work* are the seconds
        of each kind of op [samples, kinds].
        """
        if not any(factor > 1.0 for factor in table.contention.values()):
            return None
        columns = []
        predictor = Predictor(program, table)
        for number, order in enumerate(self.orders):
            factor = find_common_factor(order.programs[0], table)
            if factor is not None:
                columns.append(np.array([factor - 1.0]))
            else:
                ends = np.array([predictor.simulate_end(order, features) for features in samples])
                columns.append(compute_share(ends, alone[:, number], work.sum(axis=1)))
        return OverlapCost(stack_shares(columns), work)


def _spread(samples: Sequence[Sequence[BatchFeatures]], count: int) -> list[Sequence[BatchFeatures]]:
    """Return about *count* of *samples*, evenly spread over the larger two thirds, whose overlap is worth most."""
    largest = sorted(samples, key=lambda features: -sum(each.tokens for each in features))
    most = max(len(largest) * 2 // 3, 1)
    return largest[: most : max(most // count, 1)]
