"""The plan of one rank for its own batch, before ranks have agreed.

The rank's reasons not to split are `LocalDecline`s. So are its errors: an error that ended the step on one rank would
leave the others waiting for it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from vllm.forward_context import ForwardContext

from dbo_runtime.batch import Batch, share_data_parallel, split_evenly
from dbo_runtime.bounded import BoundedDict
from dbo_runtime.decline import Decline, LocalDecline
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.runtime import MicroBatchRuntime, SharedSplit
from dbo_runtime.errors import DboError
from dbo_runtime.observe.logs import open_log
from dbo_runtime.planner.online.split_choice import SplitChoice, get_cut
from dbo_runtime.vllm_plugin.context.nano_contexts import make_nano_contexts
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.step.step_decision import StepDecision

FAILED = "planning this step failed"
MAX_TOLD = 64  # number of lines of code whose errors are not logged again
MAX_TEXT = 300  # characters of an error's text in a decline; the log has all of them


class ServedStep(NamedTuple):
    """A step to decide; see `StepDecider.decide`."""

    context: ForwardContext
    tokens: int
    unsupported: Decline | None


class LocalPlanner:
    """Plans steps of one model on this rank.

    Args:
        runtime: makes plans.
        splitter: makes the forward contexts of micro-batches.
        ranks: number of ranks that run the same steps.
        votes: whether ranks vote on each step. If they do not, they all plan the same batch.
    """

    def __init__(self, runtime: MicroBatchRuntime, splitter: ContextSplitter, ranks: int, votes: bool) -> None:
        self._runtime = runtime
        self._splitter = splitter
        self._ranks = ranks
        self._votes = votes
        self._told: BoundedDict[str, None] = BoundedDict(MAX_TOLD)

    def attempt(self, step: ServedStep, plan: Callable[[], StepDecision | Decline]) -> StepDecision | LocalDecline:
        """Return the result of *plan*. If the step cannot be split, or *plan* fails, return a decline of this rank.

        Without votes, all ranks plan the same batch, so most errors happen on all of them alike, and each may decline.
        But memory or files may fail on one rank alone. Such an error is raised, because this rank must not run unsplit
        what the others split. This package's own errors are raised, too. Then no other rank waits without notice.
        """
        try:
            planned = step.unsupported or plan()
        except Exception as error:
            if not self._votes and (isinstance(error, DboError) or (self._ranks > 1 and _may_be_of_one_rank(error))):
                raise
            return LocalDecline(self._describe(error))
        return LocalDecline(planned) if isinstance(planned, Decline) else planned

    def add_contexts(
        self, context: ForwardContext, plan: ExecutionPlan | Decline, sizes: Sequence[Sequence[int]] = ()
    ) -> StepDecision | Decline:
        """Return a plan with a forward context for each micro-batch; *sizes* are for all data parallel ranks."""
        if isinstance(plan, Decline):
            return plan
        if plan.nano_batches:
            platform = self._splitter.platform
            return StepDecision(plan, make_nano_contexts(context, plan.nano_batches, platform, sizes))
        contexts = self._splitter.split(context, plan.slices, sizes)
        return contexts if isinstance(contexts, Decline) else StepDecision(plan, contexts)

    def plan_whole(
        self, context: ForwardContext, tokens: int, choice: SplitChoice | None = None
    ) -> StepDecision | Decline:
        """Plan all tokens of a step as one batch, as the planner chose; without a choice, as the settings force it."""
        return self.add_contexts(context, self._runtime.plan(Batch((tokens,), 0), (), choice))

    def plan_nano_batches(
        self, context: ForwardContext, tokens: int, shared: SharedSplit, rank: int | None
    ) -> StepDecision | Decline:
        """Plan a step of *tokens* tokens in nano-batches, as all ranks know.

        *rank* is this process's number among the data parallel ranks; None without these.
        """
        own = [each[rank or 0] for each in shared.sizes] or split_evenly(tokens, get_cut(shared).nano_batches)
        plan = self._runtime.plan_nano_batches(own, shared if isinstance(shared, SplitChoice) else None)
        return self.add_contexts(context, plan, () if rank is None else shared.sizes)

    def plan_dummy(self, context: ForwardContext, tokens: int) -> StepDecision | Decline:
        """Plan a dummy batch, which has no attention metadata, in equal micro-batches or nano-batches."""
        of_ranks = [] if context.dp_metadata is None else context.dp_metadata.num_tokens_across_dp_cpu.tolist()
        shares = share_data_parallel([tokens, *of_ranks], self._runtime.config.parts)
        if isinstance(shares, Decline):
            return shares
        own = tuple(share[0] for share in shares)
        plan = self._runtime.plan_dummy(own)
        return self.add_contexts(context, plan, [share[1:] for share in shares] if of_ranks else ())

    def _describe(self, error: Exception) -> Decline:
        """Return the decline for an error. Log the first error at each line of code, on any rank."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        if place not in self._told:
            self._told[place] = None
            lines = "".join(traceback.format_exception(error))
            open_log().error("a step could not be planned, and runs unsplit; please report it", traceback=lines)
        return Decline(FAILED, " ".join(f"{type(error).__name__}: {error}".split())[:MAX_TEXT])


def _may_be_of_one_rank(error: Exception) -> bool:
    """Return whether an error may happen on one rank alone. torch_npu says only in the text that memory is short."""
    if isinstance(error, (MemoryError, OSError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error)
