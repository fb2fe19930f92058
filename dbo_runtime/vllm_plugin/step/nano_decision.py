"""The decision whether to cut the ops of a step into nano-batches."""

from __future__ import annotations

from functools import partial

from dbo_runtime.batch import FEW_PREFILL_TOKENS, FEW_TOKENS
from dbo_runtime.decline import Decline, LocalDecline
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.runtime import OFF, MicroBatchRuntime, SharedSplit
from dbo_runtime.planner.online.ab_trial import ON_TRIAL, SLOWER
from dbo_runtime.planner.online.selection import NO_GAIN
from dbo_runtime.planner.online.split_choice import get_cut
from dbo_runtime.vllm_plugin.context.checks import check_agreed_context, check_context
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.step.local_plan import LocalPlanner, ServedStep
from dbo_runtime.vllm_plugin.step.step_decision import StepDecision, agree, decline

JUDGED = frozenset({OFF.reason, FEW_TOKENS, FEW_PREFILL_TOKENS, NO_GAIN, ON_TRIAL, SLOWER})
"""Reasons that settings or costs give against cutting a step, in whichever way."""


class NanoDecider:
    """Decides steps of one model by the number of tokens alone: attention is not cut, so its requests do not matter.

    Args:
        local: plans on this rank.
        runtime: makes plans.
        splitter: makes forward contexts.
        agreement: agreement of all ranks that communicate in a step.
        rank: number of this process among the data parallel ranks that exchange tokens; None without them.
    """

    def __init__(
        self,
        local: LocalPlanner,
        runtime: MicroBatchRuntime,
        splitter: ContextSplitter,
        agreement: Agreement,
        rank: int | None,
    ) -> None:
        self._local = local
        self._runtime = runtime
        self._splitter = splitter
        self._agreement = agreement
        self._rank = rank

    def decide(self, step: ServedStep) -> StepDecision:
        """Decide a served step. Data parallel ranks vote, because one of them may see a reason that others do not."""
        tokens = self._count_tokens(step)
        shared = tokens if isinstance(tokens, Decline) else self._runtime.choose_nano_batches(tokens)
        if isinstance(shared, Decline):
            return decline(shared)
        plan = partial(self._plan_locally, step, shared)
        local = self._local.attempt(step, plan)
        where = f"{get_cut(shared).nano_batches} nano-batches, tokens of all ranks {shared.sizes}"
        if self._rank is not None:
            return agree(self._agreement, local, where)
        if isinstance(local, LocalDecline):
            return decline(local.decline)
        decision = local.state(where)
        assert isinstance(decision.plan, ExecutionPlan), "a decline is local"
        self._agreement.compare_once(decision.plan.digest, decision.fingerprint)
        return decision

    def _count_tokens(self, step: ServedStep) -> list[int] | Decline:
        """Return the tokens of all data parallel ranks, or of this rank alone; or why the step is left to vLLM."""
        context, platform, dispatch = step.context, self._splitter.platform, self._splitter.dispatch
        if self._rank is not None:
            unfit = check_agreed_context(context, platform, dispatch)
            return unfit or context.dp_metadata.num_tokens_across_dp_cpu.tolist()
        unfit = check_context(context, step.tokens, platform, dispatch)
        if unfit is None and not context.attn_metadata:
            unfit = Decline("no attention metadata (profiling or dummy run)")
        return unfit or self._check_prefill(step) or [step.tokens]

    def _check_prefill(self, step: ServedStep) -> Decline | None:
        """Decline a step with too few prefill tokens, as far as its size tells."""
        size = self._splitter.read_size(step.context, step.tokens)
        return size and self._runtime.decline_prefill(size.count_prefill_tokens(self._splitter.decode_len))

    def _plan_locally(self, step: ServedStep, shared: SharedSplit) -> StepDecision | Decline:
        """Plan this rank's batch. Token-wise ops read the forward context of their nano-batch."""
        unfit = self._splitter.check_context_data(step.context, step.tokens)
        return unfit or self._local.plan_nano_batches(step.context, step.tokens, shared, self._rank)


def can_be_nano(plan: ExecutionPlan | Decline) -> bool:
    """Return whether a step that has no micro-batches may have nano-batches: its decline does not hold for both."""
    return isinstance(plan, Decline) and plan.reason not in JUDGED
