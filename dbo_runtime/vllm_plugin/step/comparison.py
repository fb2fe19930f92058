"""Compare split steps with what they should give: under DBO_CHECK, and first steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.forward_context import ForwardContext, get_forward_context

from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.errors import SplitError
from dbo_runtime.vllm_plugin.context.batch_size import count_tokens
from dbo_runtime.vllm_plugin.context.consistency import find_problem
from dbo_runtime.vllm_plugin.parallel.stage import Results, name_results
from dbo_runtime.vllm_plugin.step.differences import PIECES, describe_difference

if TYPE_CHECKING:
    from dbo_runtime.decline import Decline
    from dbo_runtime.vllm_plugin.context.lora_mapping import LoraMapping
    from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
    from dbo_runtime.vllm_plugin.step.first_steps import FirstSteps
    from dbo_runtime.vllm_plugin.step.repetition import Repetition
    from dbo_runtime.vllm_plugin.step.step_decision import StepDecision


class StepComparison:
    """Compares split steps with the same steps run again. All ranks find what any of them finds.

    Args:
        agreement: of all ranks that communicate in a step.
        may_diverge: whether rounding alone may lead a step elsewhere, and pieces may run again; see `api.features`.
        lora: the adapters of each token; None without LoRA.
    """

    def __init__(self, agreement: Agreement, may_diverge: bool, lora: LoraMapping | None) -> None:
        self._agreement = agreement
        self._may_diverge = may_diverge
        self._lora = lora

    def check_contexts(
        self, decision: StepDecision, plan: ExecutionPlan, first_steps: FirstSteps | None
    ) -> ExecutionPlan | Decline:
        """Return the plan if the micro-batches' contexts fit the step on all ranks; if not, end splitting. Collective.

        Raises:
            SplitError: under DBO_CHECK, without *first_steps*, if they do not.
        """
        problem = self._agreement.find_first(find_problem(get_forward_context(), decision.contexts, plan.slices))
        if not problem:
            return plan
        if first_steps is None:
            raise SplitError(problem)
        return first_steps.observe(decision.kind, problem) or plan

    def compare(
        self,
        results: Results,
        repetition: Repetition,
        plan: ExecutionPlan,
        make_context: Callable[[int], ForwardContext],
    ) -> tuple[str, Results]:
        """Return how the results of a split step differ from right ones, on any rank, and the unsplit results.

        Where rounding alone may lead a step elsewhere, what its pieces give one after the other, in steps of their own,
        is as right as what they give at once. *make_context* makes the context of a piece, by number. Collective.
        """
        known = count_tokens(get_forward_context(), repetition.arguments.positions.shape[-1])
        split, unsplit = name_results(results, known), repetition.run_unsplit()
        difference = self._agreement.find_first(describe_difference(split, name_results(unsplit, known), plan))
        if difference and self._may_diverge and len(plan.slices) > 1:
            select = None if self._lora is None else self._lora.split(plan.slices)
            pieces = name_results(repetition.run_pieces(plan.slices, make_context, select), known)
            difference = self._agreement.find_first(
                describe_difference(split, pieces, plan, PIECES, accepts_rerouted=True)
            )
            unsplit = repetition.run_unsplit()
        return difference, unsplit
