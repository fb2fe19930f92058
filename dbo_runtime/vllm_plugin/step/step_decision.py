"""What is decided of a step, on all ranks alike."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from vllm.forward_context import ForwardContext

from dbo_runtime.decline import Decline
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.vllm_plugin.step.local_plan import LocalPlan


class StepDecision(NamedTuple):
    """A plan with a forward context for each micro-batch, or a decline without any.

    *statement* must be equal on all ranks; a decline has none, and its text must be. So must *kind*, by which
    `FirstSteps` counts; None without it.
    """

    plan: ExecutionPlan | Decline
    contexts: list[ForwardContext]
    statement: str
    kind: Hashable | None = None


def make_decision(planned: LocalPlan | Decline, where: str = "") -> StepDecision:
    """Make a decision that all ranks make, *where* they cut or why they do not."""
    if isinstance(planned, Decline):
        return StepDecision(planned, [], "")
    return StepDecision(*planned, state_plan(planned, where))


def state_plan(planned: LocalPlan, where: str) -> str:
    """Return what must be equal on all ranks."""
    return f"schedule {planned.plan.digest}, {where}"
