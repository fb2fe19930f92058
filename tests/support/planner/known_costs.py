"""Costs of a machine on which a long prompt pays."""

from __future__ import annotations

from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, OpCost
from tests.support.planner.machines import BYTES

# A prompt of 4096 tokens computes for 830 us a layer, a fifth of it attention, and communicates for 430.
COSTS: dict[str, OpCost] = {
    "attention": ComputeCost(10e-6, 0.16e-6, 50e-6, 2e-11, 2e-11),
    "reduce": CommCost(20e-6, 1e-4 / BYTES * 1e-3, BYTES),
}
