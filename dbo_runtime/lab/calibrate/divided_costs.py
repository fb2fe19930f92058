"""The costs of the ops that divided ops are divided into: attention's projections and its core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.op_cost import ComputeCost, OpCost


def list_token_wise(program: Program) -> set[str]:
    """Return the names of the token-wise ops that ops of *program* are divided into: those to measure."""
    return {own.name for op in program.ops if op.divided is not None for own in op.divided.ops if own.token_wise}


def add_joint_costs(costs: Mapping[str, OpCost], program: Program) -> dict[str, OpCost]:
    """Return *costs* with that of each joint op that an op is divided into: what its token-wise ops leave of the whole.

    So all of them together take what the whole takes, and no gain is predicted from the noise of two measurements.
    Where an op is divided into several joint ops, nothing tells how long each takes, and none gets a cost.
    """
    found = dict(costs)
    for op in program.ops:
        if op.divided is None:
            continue
        whole, joint = costs[op.name], [own.name for own in op.divided.ops if not own.token_wise]
        known = [cost for own in op.divided.ops if isinstance(cost := costs.get(own.name), ComputeCost)]
        if isinstance(whole, ComputeCost) and len(joint) == 1 and joint[0] not in found:
            found[joint[0]] = _subtract(whole, known)
    return found


def _subtract(whole: ComputeCost, others: Sequence[ComputeCost]) -> ComputeCost:
    """Return what *others* leave of an op's cost. They are token-wise, so what depends on requests stays as it is."""
    return replace(
        whole,
        fixed=max(whole.fixed - sum(other.fixed for other in others), 0.0),
        per_token=max(whole.per_token - sum(other.per_token for other in others), 0.0),
        weights=max(whole.weights - sum(other.weights for other in others), 0.0),
    )
