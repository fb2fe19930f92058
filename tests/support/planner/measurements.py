"""Exact samples of costs that are known, as fitting takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dbo_runtime.lab.calibrate.samples import Sample
from dbo_runtime.planner.costs.batch_features import BatchFeatures, measure_features
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, OpCost

SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
PROMPTS = tuple(measure_features([size], ()) for size in SIZES)

LINE = ComputeCost(20e-6, 1e-6)
HINGE = ComputeCost(10e-6, 1e-6, weights=300e-6)
REDUCE = CommCost(30e-6, 1e-10, 14336)


def measure(cost: OpCost, features: Iterable[BatchFeatures], **sample: Any) -> list[Sample]:
    """Return one sample a load, as exact as they come."""
    lane = "comm" if isinstance(cost, CommCost) else "compute"
    return [Sample("op", lane, features, cost.time(features), **sample) for features in features]
