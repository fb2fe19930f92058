"""The files of derived costs: numbers are rounded, and files are written where the package has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dbo_runtime.planner.costs.cost_file import save_costs
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import OpCost

PUBLISHED = Path(__file__).parents[1] / "published"


def round_cost(cost: OpCost) -> OpCost:
    """Return a cost with six digits of each number."""
    numbers = (getattr(cost, name) for name in cost.__dataclass_fields__)
    return type(cost)(*(float(f"{number:.6g}") for number in numbers))


def write_files(tables: Mapping[str, CostTable]) -> None:
    """Write the costs of each case, by its name."""
    for name, table in tables.items():
        save_costs(table, PUBLISHED / f"{name}.json")
        print(PUBLISHED / f"{name}.json")
