"""The range of true costs: corners of their uncertainty, of contention and of the imbalance of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import product
from typing import NamedTuple

from dbo_runtime.ir.op import COMM, COMPUTE
from dbo_runtime.lab.whatif.scale import set_imbalance
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import CommCost, OpCost
from dbo_runtime.planner.online.predictor import DEFAULT_UNCERTAINTY, DOUBTED_CONTENTION

CONTENTIONS = (1.0, DOUBTED_CONTENTION)  # contention of `compute` and `comm`, unless the costs say more
IMBALANCES = (1.0, 1.3)  # ratio of the busiest rank's expert tokens to the mean


class Corner(NamedTuple):
    """One possibility for the true costs.

    Attributes:
        compute, comm: factors of all costs on these lanes.
        contention: minimum contention of both lanes.
        imbalance: imbalance of experts; see `set_imbalance`.
    """

    compute: float = 1.0
    comm: float = 1.0
    contention: float = 1.0
    imbalance: float = 1.0


AS_PUBLISHED = Corner()


def list_corners(share: float = DEFAULT_UNCERTAINTY) -> tuple[Corner, ...]:
    """Return the corners, published costs first: compute and communication off by *share*, in opposite directions.

    If both were off in the same direction, a step would be longer or shorter, but overlap would save the same share.
    """
    off = 1 + share
    factors = ((1.0, 1.0), (off, 1 / off), (1 / off, off))
    return tuple(Corner(*pair, *others) for pair, *others in product(factors, CONTENTIONS, IMBALANCES))


def move_to(table: CostTable, corner: Corner) -> CostTable:
    """Return the costs in a corner."""
    factors: Mapping[bool, float] = {True: corner.comm, False: corner.compute}
    ops = {name: _stretch(cost, factors[isinstance(cost, CommCost)]) for name, cost in table.ops.items()}
    known = table.contention
    contention = {**known, **{lane: max(known.get(lane, 1.0), corner.contention) for lane in (COMPUTE, COMM)}}
    moved = replace(table, ops=ops, contention=contention)
    return moved if corner.imbalance == 1.0 else set_imbalance(moved, corner.imbalance)


def _stretch(cost: OpCost, factor: float) -> OpCost:
    """Return a cost with all times multiplied by *factor*."""
    times = {item.name: getattr(cost, item.name) * factor for item in fields(cost) if item.metadata.get("is_time")}
    return replace(cost, **times)
