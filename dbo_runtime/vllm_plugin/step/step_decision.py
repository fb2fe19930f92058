"""The decision about a step. It is the same on all ranks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from vllm.forward_context import ForwardContext

from dbo_runtime.decline import Decline, LocalDecline
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement


class StepDecision(NamedTuple):
    """A plan with a forward context for each micro-batch, or a decline without any.

    Attributes:
        plan: plan of the step, or the reason not to split it.
        contexts: forward context of each micro-batch.
        fingerprint: text that must be equal on all ranks; empty for a decline, whose own text must be equal.
        step_class: class in which `FirstSteps` counts the step; None without `FirstSteps`.
    """

    plan: ExecutionPlan | Decline
    contexts: list[ForwardContext]
    fingerprint: str = ""
    step_class: Hashable | None = None

    def state(self, where: str) -> StepDecision:
        """Return the decision with its fingerprint: the schedule, and *where* the step is cut, or why it is not."""
        if isinstance(self.plan, Decline):
            return self
        return self._replace(fingerprint=f"schedule {self.plan.digest}, {where}")


def decline(reason: Decline) -> StepDecision:
    """Return the decision not to split."""
    return StepDecision(reason, [])


def agree(agreement: Agreement, local: StepDecision | LocalDecline, where: str) -> StepDecision:
    """Let all ranks vote on the plan of this rank, or on its reason against a plan. Collective.

    *where* says where the step is cut, or why it is not.
    """
    stated = local if isinstance(local, LocalDecline) else local.state(where)
    fingerprint = "" if isinstance(stated, LocalDecline) else stated.fingerprint
    agreed = agreement.agree(stated, fingerprint)
    return decline(agreed) if isinstance(agreed, Decline) else agreed
