"""Costs of the tiny model: measured in little time, or made up; and a log that keeps what it is told."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

from dbo_runtime.ir.program import Program
from dbo_runtime.lab.calibrate import measurement
from dbo_runtime.lab.calibrate.divided_costs import add_joint_costs, list_token_wise
from dbo_runtime.lab.calibrate.measurement import Measurements, measure
from dbo_runtime.lab.calibrate.shapes import Shape
from dbo_runtime.planner.costs.cost_table import CostTable, Provenance
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost, OpCost
from dbo_runtime.planner.costs.program_spec import describe_program
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.vllm_plugin.api.groups import get_groups
from dbo_runtime.vllm_plugin.install.cost_source import CostSource
from dbo_runtime.vllm_plugin.install.served_model import get_served_model
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.step.tensor_rows import TENSOR_ROWS

FEW_SHAPES = [Shape(2, 1, 16), Shape(1, 8), Shape(4, 8), Shape(3, 1, 200), Shape(1, 64)]
BYTES = 512.0  # a token of the tiny model: 128 numbers in float32


class Lines:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def info(self, event: str, **figures: Any) -> None:
        self.lines.append(("info", event, figures))

    def warning(self, event: str, **figures: Any) -> None:
        self.lines.append(("warning", event, figures))

    def error(self, event: str, **figures: Any) -> None:
        self.lines.append(("error", event, figures))

    def find(self, event: str) -> list[dict[str, Any]]:
        """Return the figures of all lines about an event."""
        return [figures for _, told, figures in self.lines if told == event]


def measure_few(worker: Any, budget: float = 600.0) -> tuple[Measurements, list[tuple[int, int, str]]]:
    """Measure a few shapes on a worker; return what was measured and the progress that was told."""
    told: list[tuple[int, int, str]] = []
    runner = worker.model_runner
    group = get_groups(runner.vllm_config).all_ranks
    shapes = patch.object(measurement, "choose_shapes", lambda _: FEW_SHAPES)
    with (
        shapes,
        patch("dbo_runtime.lab.calibrate.shapes.LONG_ROUND_SECONDS", math.inf),
    ):  # however slow this machine is
        found = measure(runner, runner.get_model().forward, group, budget, lambda *news: told.append(news))
    return found, told


def calibrate_few(worker: Any, path: str = "", repeats: int = 2) -> tuple[dict[str, Any], str]:
    """Calibrate a worker by a few shapes; return the report and the digest of what it plans by from now on."""
    shapes = patch.object(measurement, "choose_shapes", lambda _: FEW_SHAPES)
    with shapes, patch("dbo_runtime.lab.calibrate.shapes.MAX_REPEATS", repeats):
        report = worker.dbo_calibrate(path, 600.0)
    return report, worker.model_runner.get_model().forward.runtime.planner.table.digest


def get_costs(forward: SplitForward) -> CostSource:
    """Return what gives the model of *forward* its costs."""
    served = get_served_model(forward._model)
    assert served is not None
    assert served.costs is not None
    return served.costs


def make_up_costs(worker: Any) -> None:
    """Let a worker plan by the made-up costs of `make_planner`."""
    runtime = worker.model_runner.get_model().forward.runtime
    runtime.planner = make_planner(runtime.program)


def forget_costs(worker: Any) -> None:
    """Let a worker plan without costs again."""
    worker.model_runner.get_model().forward.runtime.planner = None


def make_planner(program: Program, fixed: float = 0.0, split: float = 0.0) -> Planner:
    """Return a planner of made-up costs that are known to be right: a token takes 10 us to compute, and 30 us to send.

    Nothing is paid twice, so the more often a step is split, the shorter it is; but for *fixed* seconds of each
    attention, and *split* seconds of each step that is split.
    """
    costs: dict[str, OpCost] = {
        op.name: CommCost(0.0, 30e-6 / BYTES, BYTES) if op.lane == "comm" else ComputeCost(per_token=10e-6)
        for op in program.ops
    }
    costs["attention"] = ComputeCost(fixed=fixed, per_token=10e-6)
    costs = add_joint_costs(
        {**costs, **dict.fromkeys(list_token_wise(program), ComputeCost(per_token=2.5e-6))}, program
    )
    origin = Provenance("modelled", "a test", "2026-01-31", {}, {}, {}, {})
    errors = dict.fromkeys(costs, 0.0)
    table = CostTable(origin, describe_program(program), costs, {}, HostCost(split=split), errors)
    return Planner(program, table, rows=TENSOR_ROWS)
