"""The costs of the ops that divided ops are divided into: attention's projections and its core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.op_cost import ComputeCost, OpCost


def list_parts(program: Program) -> set[str]:
    """Return the names of the token-wise ops that ops of *program* are divided into: those to measure."""
    return {own.name for op in program.ops if op.divided is not None for own in op.divided.ops if own.token_wise}


def add_joint_costs(costs: Mapping[str, OpCost], program: Program) -> dict[str, OpCost]:
    """Return *costs* with that of each joint op that an op is divided into: what the op takes besides the others.

    So the parts take together what the whole takes, and no gain is predicted from the noise of two measurements. Where
    an op is divided into several joint ops, nothing tells how long each takes, and none gets a cost.
    """
    found = dict(costs)
    for op in program.ops:
        joint = [] if op.divided is None else [own.name for own in op.divided.ops if not own.token_wise]
        if op.divided is None or len(joint) != 1 or joint[0] in found:
            continue
        parts = [costs[own.name] for own in op.divided.ops if own.token_wise and own.name in costs]
        whole, computed = costs[op.name], [cost for cost in parts if isinstance(cost, ComputeCost)]
        if isinstance(whole, ComputeCost):
            found[joint[0]] = _subtract(whole, computed)
    return found


def _subtract(whole: ComputeCost, parts: Sequence[ComputeCost]) -> ComputeCost:
    """Return what *parts* leave of an op's cost. What depends on requests is left as it is: they do not."""
    return replace(
        whole,
        fixed=max(whole.fixed - sum(part.fixed for part in parts), 0.0),
        per_token=max(whole.per_token - sum(part.per_token for part in parts), 0.0),
        weights=max(whole.weights - sum(part.weights for part in parts), 0.0),
    )
