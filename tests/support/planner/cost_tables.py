"""Cost tables of the toy model."""

from __future__ import annotations

from typing import Any

from dbo_runtime.planner.costs.cost_table import CostTable, Provenance
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost, OpCost
from dbo_runtime.planner.costs.program_spec import describe_program
from tests.support.programs import record_toy


def make_provenance(**changes: Any) -> Provenance:
    values: dict[str, Any] = {
        "kind": "measured",
        "source": "a test",
        "date": "2026-01-31",
        "machine": {"platform": "cpu", "chip": "A"},
        "model": {"name": "toy"},
        "parallel": {"tensor": 2},
        "versions": {"dbo_runtime": "0.1.0"},
    }
    return Provenance(**{**values, **changes})


def make_table(ops: dict[str, OpCost] | None = None, **changes: Any) -> CostTable:
    """Return a table for the toy, with *ops* instead of its own costs of those names."""
    costs: dict[str, OpCost] = {
        "attn_norm": ComputeCost(fixed=2e-6),
        "attention": ComputeCost(2e-6, 0.3e-6, 10e-6, 1e-9),
        "attn_reduce": CommCost(20e-6, 1e-10, 14336),
        "mlp_norm": ComputeCost(fixed=2e-6),
        "mlp": ComputeCost(1 / 3e6, per_token=1e-6 / 7),
        "mlp_reduce": CommCost(20e-6, 1e-10, 14336),
        "final_norm": ComputeCost(),
    }
    values: dict[str, Any] = {
        "provenance": make_provenance(),
        "program": describe_program(record_toy(layers=3)),
        "ops": {**costs, **(ops or {})},
        "contention": {"compute": 1.1, "comm": 1},
        "host": HostCost(issue=5e-6, computes=True, unsplit=-1e-3, split=2e-3),
        "errors": {"mlp": 0.03},
        "split_error": 0.02,
    }
    return CostTable(**{**values, **changes})
