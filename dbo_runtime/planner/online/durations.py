"""Durations of the ops of micro-batches, as vectors: for many steps and several cost tables at once.

Ranks on different hosts must get the same sums to the last bit, because they compare them. A BLAS adds in the order
that suits the processor. So all durations are multiples of `RESOLUTION`: sums of such multiples are exact in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dbo_runtime.ir.op import COMM
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import ATTENTION, OpCost

Vector: TypeAlias = NDArray[np.float64]

FEATURES = BatchFeatures._fields
RESOLUTION = 2.0**-43  # seconds, a tenth of a picosecond; sums up to 1024 seconds are exact


class DurationLayout:
    """The layout of a vector of durations, for schedules whose micro-batches all run one program.

    Ops of one name are of one kind. A vector holds, in this order:

    - the seconds of each kind of op of each micro-batch,
    - the credit of each kind of communication op of each micro-batch (see `CommCost`),
    - the seconds that the host takes to issue an instruction,
    - the seconds of a handover between lanes.

    Args:
        program: ops of one micro-batch.
        micro_batches: number of micro-batches.

    Attributes:
        names: names of the kinds of op [kinds].
        communication: names of the kinds of op that communicate [kinds of communication].
        size: length of a vector.
    """

    def __init__(self, program: Program, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.names = tuple(dict.fromkeys(op.name for op in program.ops))
        self.communication = tuple(dict.fromkeys(op.name for op in program.ops if op.lane == COMM))
        self._kinds = {name: number for number, name in enumerate(self.names)}
        self._credits = {name: number for number, name in enumerate(self.communication)}
        self._first_credit = micro_batches * len(self.names)
        self.size = self._first_credit + micro_batches * len(self.communication) + 2
        self.issue = self.size - 2
        self.handover = self.size - 1

    def find_op(self, micro_batch: int, name: str) -> int:
        """Return the place of an op's seconds in a vector."""
        return micro_batch * len(self.names) + self._kinds[name]

    def find_credit(self, micro_batch: int, name: str) -> int | None:
        """Return the place of an op's credit in a vector; None if the op does not communicate."""
        if name not in self._credits:
            return None
        return self._first_credit + micro_batch * len(self.communication) + self._credits[name]


class DurationTables:
    """The costs of several tables of one program, as coefficients of batch features.

    Args:
        program: ops of one micro-batch.
        tables: costs of the ops.
    """

    def __init__(self, program: Program, tables: Sequence[CostTable]) -> None:
        layout = DurationLayout(program, 1)
        self.tables = tuple(tables)
        costs = [[table.ops[name] for name in layout.names] for table in tables]
        counts = Counter(op.name for op in program.ops)
        self._counts = np.array([counts[name] for name in layout.names], dtype=np.float64)
        self._fixed = _collect(costs, "fixed", "alpha")
        self._floor = _collect(costs, "weights")
        self._per_token = _collect(costs, "token_seconds")
        self._free = _collect(costs, "free_seconds")
        attention = [(FEATURES.index(feature), _collect(costs, rate)) for rate, feature in ATTENTION.items()]
        self._attention = [(feature, rates) for feature, rates in attention if rates.any()]
        credited = [layout.names.index(name) for name in layout.communication]
        self._credited_per_token, self._credited_free = self._per_token[..., credited], self._free[..., credited]
        self._host = np.array([[table.host.issue, table.host.handover] for table in tables])[:, None]

    def compute_ops(self, features: Vector) -> Vector:
        """Return the seconds of each kind of op [tables, batches, kinds] for features [batches, features]."""
        return round_durations(self._compute_exactly(features))

    def sum_ops(self, features: Vector) -> Vector:
        """Return the seconds of all ops one after another [tables, batches] for features [batches, features]."""
        total: Vector = self.compute_ops(features) @ self._counts
        return total

    def compute_durations(self, slice_features: Vector) -> Vector:
        """Return the durations of steps [tables, steps, durations], in the order of `DurationLayout`.

        *slice_features* are the features of each micro-batch [steps, micro-batches, features].
        """
        steps, micro_batches, _ = slice_features.shape
        features = slice_features.reshape(steps * micro_batches, -1)
        size = len(self.tables), steps, -1
        ops: Vector = self._compute_exactly(features).reshape(size)
        credits: Vector = np.minimum(features[:, :1] * self._credited_per_token, self._credited_free).reshape(size)
        kinds, credited = ops.shape[-1], credits.shape[-1]
        durations = np.empty((len(self.tables), steps, kinds + credited + 2))
        durations[..., :kinds] = ops
        durations[..., kinds:-2] = credits
        durations[..., -2:] = self._host
        return round_durations(durations)

    def _compute_exactly(self, features: Vector) -> Vector:
        """Return the seconds of each kind of op, as `compute_ops` does, before they are rounded."""
        sized = features[:, :1] * self._per_token
        sized -= self._free
        seconds: Vector = np.maximum(self._floor, sized, out=sized)
        seconds += self._fixed
        for feature, rates in self._attention:
            seconds += features[:, feature, None] * rates
        return seconds

    def compute_work(self, durations: Vector) -> Vector:
        """Return the sum of seconds for each kind of op [..., kinds of all micro-batches] from [..., durations]."""
        micro_batches = (durations.shape[-1] - 2) // (len(self._counts) + self._credited_free.shape[-1])
        counts = self.repeat_counts(micro_batches)
        work: Vector = durations[..., : len(counts)] * counts
        return work

    def repeat_counts(self, micro_batches: int) -> Vector:
        """Return the number of ops of each kind, once for each micro-batch [kinds of all micro-batches]."""
        return np.tile(self._counts, micro_batches)


def round_durations(seconds: Vector) -> Vector:
    """Return *seconds* rounded to multiples of `RESOLUTION`, whose sums are exact."""
    rounded: Vector = seconds * (1.0 / RESOLUTION)
    np.rint(rounded, out=rounded)
    rounded *= RESOLUTION
    return rounded


def stack_features(slice_features: Sequence[Sequence[BatchFeatures]]) -> Vector:
    """Return features as an array [steps, micro-batches, features]; all steps have equally many micro-batches."""
    return np.array(slice_features, dtype=np.float64)


def _collect(costs: Sequence[Sequence[OpCost]], *names: str) -> Vector:
    """Return, for each cost, the first of the attributes *names* that it has, or 0 without any [tables, 1, kinds]."""

    def read(cost: OpCost) -> float:
        return next((float(getattr(cost, name)) for name in names if hasattr(cost, name)), 0.0)

    return np.array([[read(cost) for cost in of_table] for of_table in costs])[:, None]
