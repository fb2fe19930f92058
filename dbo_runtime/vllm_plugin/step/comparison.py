"""Compare split steps with unsplit ones: every step under DBO_CHECK, and otherwise first steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vllm.forward_context import ForwardContext, get_forward_context

from dbo_runtime.decline import Decline
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.errors import SplitError
from dbo_runtime.vllm_plugin.context.batch_size import count_tokens
from dbo_runtime.vllm_plugin.context.consistency import find_problem
from dbo_runtime.vllm_plugin.parallel.stage import Results, name_results
from dbo_runtime.vllm_plugin.step.differences import PIECES, describe_difference
from dbo_runtime.vllm_plugin.step.step_decision import StepDecision, decline

if TYPE_CHECKING:
    from dbo_runtime.batch import BatchSlice
    from dbo_runtime.vllm_plugin.context.lora_mapping import LoraMapping
    from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
    from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
    from dbo_runtime.vllm_plugin.step.decision import StepDecider
    from dbo_runtime.vllm_plugin.step.repetition import Repetition

INCOMPARABLE = Decline(
    "vLLM's own step of one token is wrong",
    "sequence-parallel MoE, vLLM issue #50154: there is nothing to compare with",
)


class StepComparison:
    """Compares split steps with the same steps, run again. All ranks find a difference if any of them finds one.

    Args:
        agreement: agreement of all ranks that communicate in a step.
        decider: decides the steps; it has the first steps to compare.
        may_diverge: whether rounding alone may change a step's choice of experts or keys (see `api.features`). A step
            that differs is then also compared with its micro-batches, run one after another.
        lora: adapters of each token; None without LoRA.
        mistakes_one_token: whether unsplit steps of one token are wrong (see `api.features`). Such steps cannot be
            compared, so those that would be are not split.
    """

    def __init__(
        self,
        agreement: Agreement,
        decider: StepDecider,
        may_diverge: bool = False,
        lora: LoraMapping | None = None,
        mistakes_one_token: bool = False,
    ) -> None:
        self._agreement = agreement
        self._decider = decider
        self._may_diverge = may_diverge
        self._lora = lora
        self._mistakes_one_token = mistakes_one_token

    def copy_for(self, decider: StepDecider) -> StepComparison:
        """Return a comparison for the steps of another decider."""
        return StepComparison(self._agreement, decider, self._may_diverge, self._lora, self._mistakes_one_token)

    def check(self, decision: StepDecision, is_checked: bool) -> tuple[StepDecision, bool]:
        """Return the decision, and whether its step is to be compared. Collective if it is.

        Under DBO_CHECK (*is_checked*), ranks compare every decision. If the contexts of micro-batches do not fit a
        first step, nothing is split any more.

        Raises:
            ScheduleError: under DBO_CHECK, if ranks decided differently.
            SplitError: under DBO_CHECK, if contexts do not fit the step.
        """
        first_steps = None if is_checked else self._decider.find_first_steps(decision)
        if is_checked:
            self._agreement.compare(decision.fingerprint or str(decision.plan))
        if isinstance(decision.plan, Decline) or not (is_checked or first_steps is not None):
            return decision, False
        if self._mistakes_one_token and _has_one_token(get_forward_context()):
            return decline(INCOMPARABLE), False
        slices = decision.plan.slices
        problem = find_problem(get_forward_context(), decision.contexts[: len(slices)], slices)
        problem = self._agreement.find_first(problem)
        if not problem:
            return decision, True
        if first_steps is None:
            raise SplitError(problem)
        failure = first_steps.observe(decision.step_class, problem)
        return (decision, True) if failure is None else (decline(failure), False)

    def conclude(self, results: Results, repetition: Repetition, decision: StepDecision, is_checked: bool) -> Results:
        """Compare a split step that has run; return the results to go on with. Collective.

        After a first step, these are the results of the unsplit run.

        Raises:
            SplitError: under DBO_CHECK (*is_checked*), if a split step differs.
        """
        plan = decision.plan
        assert isinstance(plan, ExecutionPlan), "it ran"
        make_context = partial(_make_own_context, self._decider.splitter, decision.contexts, plan.slices)
        difference, unsplit = self.compare(results, repetition, plan, make_context)
        first_steps = None if is_checked else self._decider.first_steps
        if first_steps is not None:
            first_steps.observe(decision.step_class, difference)
            return unsplit
        if difference:
            raise SplitError(difference)
        return results

    def compare(
        self,
        results: Results,
        repetition: Repetition,
        plan: ExecutionPlan,
        make_context: Callable[[int], ForwardContext],
    ) -> tuple[str, Results]:
        """Return how the results of a split step differ from correct ones, on any rank, and the unsplit results.

        With `may_diverge`, there are two correct results: that of the unsplit step, and that of its micro-batches, run
        one after another in steps of their own. *make_context* makes the context of a micro-batch, by number.
        Collective.
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


def _has_one_token(context: ForwardContext) -> bool:
    """Return whether any data parallel rank has a step of one token."""
    sizes = context.dp_metadata
    return sizes is not None and int(sizes.num_tokens_across_dp_cpu.min()) == 1


def _make_own_context(
    splitter: ContextSplitter, contexts: Sequence[ForwardContext], slices: Sequence[BatchSlice], number: int
) -> ForwardContext:
    """Return a new forward context, in which the model's own forward runs one micro-batch.

    Args:
        splitter: makes the forward contexts of micro-batches.
        contexts: used forward contexts of all micro-batches. They hold the numbers of tokens of other data parallel
            ranks.
        slices: slices of the step.
        number: number of the micro-batch.

    Raises:
        SplitError: if the context cannot be made again.
    """
    sizes = [c.dp_metadata.num_tokens_across_dp_cpu.tolist() for c in contexts if c.dp_metadata is not None]
    parts = splitter.split(get_forward_context(), slices, sizes, only=number)
    if isinstance(parts, Decline):
        raise SplitError(f"the forward context of a micro-batch cannot be made a second time: {parts}.")
    splitter.platform.return_context(parts[0], get_forward_context())
    return parts[0]
