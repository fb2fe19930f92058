"""What a rank does in one step: its plan and the micro-batches' forward contexts, or the reason to run whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from vllm import forward_context

from dbo_runtime.batch import Batch, share_data_parallel
from dbo_runtime.decline import Decline
from dbo_runtime.errors import SplitError
from dbo_runtime.runtime import DataParallelSplit, ExecutionPlan, MicroBatchRuntime
from dbo_runtime.vllm_plugin.context.checks import check_agreed_context, check_capture, check_mode
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement

NOTHING_TO_HIDE = {
    "none": "no layer is spread over ranks",
    "shared memory": "all ranks are on one host, where a reduce costs less than splitting",
    "one host": "all ranks are on one host, where communication takes the cores that compute",
}

Sizes = tuple[tuple[int, ...], ...]
"""Tokens of every data parallel rank in each micro-batch [micro-batches][ranks]."""


class StepDecision(NamedTuple):
    """A plan with its contexts, or a decline without any. *statement* is what must be equal on all ranks."""

    plan: ExecutionPlan | Decline
    contexts: list[Any]
    statement: str


class StepDecider:
    """Plans steps.

    Args:
        runtime: makes plans.
        splitter: makes the micro-batches' forward contexts.
        agreement: of all ranks that communicate in a step.
        transport: how they do; see `compat.get_transport`.
        rank: of this process among the data parallel ranks between which tokens travel; None without them.

    Attributes:
        serving: nothing is split before it is set: vLLM profiles and compiles whole steps.
        profiling: every step is split, whatever it is, to see what memory that takes; results mean nothing.
        choose_cuts, choose_sizes: if set, cut there whatever the settings say, without and with data parallel ranks.
    """

    def __init__(
        self,
        runtime: MicroBatchRuntime,
        splitter: ContextSplitter,
        agreement: Agreement,
        transport: str,
        rank: int | None = None,
    ) -> None:
        self.serving = True
        self.profiling = False
        self.choose_cuts: Callable[[Batch], Sequence[int]] | None = None
        self.choose_sizes: Callable[[Sequence[int]], Sizes | Decline] | None = None
        self._runtime = runtime
        self._splitter = splitter
        self._agreement = agreement
        self._transport = transport
        self.rank = rank

    def copy_for(self, runtime: MicroBatchRuntime, group: Any) -> StepDecider:
        """Return a planner of the same model's steps that settles them anew, and makes plans by another runtime."""
        own = copy.copy(self)
        own._runtime, own._agreement = runtime, self._agreement.copy_for(group)
        return own

    def plan(self, tokens: int, obstacle: Decline | None = None) -> StepDecision:
        """Plan a step of *tokens* tokens on this rank; *obstacle* is what its caller has against splitting it."""
        if not forward_context.is_forward_context_available():
            return _whole(Decline("no forward context"))
        context = forward_context.get_forward_context()
        if self.profiling:
            return self._plan_profile(context, tokens) if obstacle is None else _whole(obstacle)
        if not self.serving:
            return self._plan_start(context, tokens, obstacle)
        if self.rank is None:
            planned = self._plan_alone(context, tokens, obstacle)
        else:
            planned = self._plan_together(context, tokens, obstacle, self.rank)
        if isinstance(planned.plan, Decline) and obstacle is None and self._runtime.forces_side:
            return self._plan_beside(context, tokens, planned.plan)
        return planned

    def _plan_start(self, context: Any, tokens: int, obstacle: Decline | None) -> StepDecision:
        """Plan a step before vLLM serves: its own, but that graphs of whole steps may hold ops beside each other.

        vLLM runs a step with attention, as it is, right before it captures one: communicators are made then. What no
        graph can hold keeps graphs vLLM's own: a check, which reads results, and an op that waits for the device.
        """
        starting = _whole(Decline("starting up"))
        runtime = self._runtime
        if obstacle is not None or not runtime.forces_side or not context.attn_metadata:
            return starting
        if runtime.config.check or any(op.host_sync for op in runtime.program.ops) or check_capture(context):
            return starting
        plan = runtime.plan(Batch((tokens,), 0), ())
        contexts = [] if isinstance(plan, Decline) else self._splitter.split(context, plan.slices)
        if isinstance(plan, Decline) or isinstance(contexts, Decline):
            return starting
        return StepDecision(plan, contexts, f"schedule {plan.digest}, for a graph")

    def _plan_profile(self, context: Any, tokens: int) -> StepDecision:
        """Plan a dummy batch, which has no attention metadata, in equal parts."""
        everywhere = [] if context.dp_metadata is None else context.dp_metadata.num_tokens_across_dp_cpu.tolist()
        shares = share_data_parallel([tokens, *everywhere], self._runtime.config.parts)
        if isinstance(shares, Decline):
            return _whole(shares)
        own = tuple(share[0] for share in shares)
        plan = self._runtime.plan(Batch(own, 0), list(accumulate(own))[:-1])
        if isinstance(plan, Decline):
            return _whole(plan)
        contexts = self._splitter.split(context, plan.slices, [share[1:] for share in shares] if everywhere else ())
        return _whole(contexts) if isinstance(contexts, Decline) else StepDecision(plan, contexts, "profiling")

    def _plan_alone(self, context: Any, tokens: int, obstacle: Decline | None) -> StepDecision:
        """Plan a step whose batch is the same on all ranks, so that all come to the same."""
        if self.choose_cuts is None:
            early = self._find_nothing_to_hide() or self._runtime.decline_early(tokens)
            if early is not None:
                return _whole(early)
        batch = obstacle or self._splitter.read_batch(context, tokens)
        if isinstance(batch, Decline):
            return _whole(batch)
        plan = self._runtime.plan(batch, self.choose_cuts(batch) if self.choose_cuts is not None else None)
        if isinstance(plan, Decline):
            return _whole(plan)
        contexts = self._splitter.split(context, plan.slices)
        if isinstance(contexts, Decline):
            return _whole(contexts)
        return self._agree(plan, contexts, plan.digest, f"cuts {list_cuts(plan)}")

    def _plan_together(self, context: Any, tokens: int, obstacle: Decline | None, rank: int) -> StepDecision:
        """Plan a step in which data parallel ranks have batches of their own.

        What decides is equal on all of them. What only this rank can know comes after, and cannot stop it alone: the
        others communicate as was decided.
        """
        shared = check_agreed_context(context) or self._decide_together(context)
        if isinstance(shared, Decline):
            return _whole(shared)
        plan = obstacle or self._cut(context, tokens, shared, rank)
        contexts: list[Any] | Decline = []
        if isinstance(plan, ExecutionPlan):
            contexts = self._splitter.split(context, plan.slices, shared.sizes)
        if isinstance(contexts, Decline):
            plan, contexts = contexts, []
        key = len(shared.sizes), self._runtime.config.policy, shared.name
        return self._agree(plan, contexts, key, f"tokens of all ranks {shared.sizes}")

    def _plan_beside(self, context: Any, tokens: int, decline: Decline) -> StepDecision:
        """Plan a step that is not split, with ops of it on a lane beside.

        All ranks come here together: what speaks against splitting is the same on them, or was agreed on.
        """
        if self.rank is not None:
            hazard = check_agreed_context(context)
        else:
            hazard = check_mode(context) if context.attn_metadata else decline
        plan = hazard or self._runtime.plan(Batch((tokens,), 0), ())
        contexts = [] if isinstance(plan, Decline) else self._splitter.split(context, plan.slices)
        if isinstance(plan, Decline) or isinstance(contexts, Decline):
            return _whole(decline)
        self._runtime.decline(decline)
        return StepDecision(plan, contexts, f"schedule {plan.digest}, not cut: {decline.reason}")

    def _decide_together(self, context: Any) -> DataParallelSplit | Decline:
        tokens = context.dp_metadata.num_tokens_across_dp_cpu.tolist()
        if self.choose_sizes is not None:
            sizes = self.choose_sizes(tokens)
            return sizes if isinstance(sizes, Decline) else DataParallelSplit(sizes)
        return self._find_nothing_to_hide() or self._runtime.plan_data_parallel(tokens)

    def _cut(self, context: Any, tokens: int, shared: DataParallelSplit, rank: int) -> ExecutionPlan | Decline:
        """Cut this rank's batch where all ranks expect it."""
        batch = self._splitter.read_batch(context, tokens)
        if isinstance(batch, Decline):
            return batch
        try:
            return self._runtime.plan(batch, list(accumulate(part[rank] for part in shared.sizes))[:-1], shared)
        except SplitError as error:
            return Decline("cannot be cut where all ranks agreed to", str(error))

    def _agree(self, own: ExecutionPlan | Decline, contexts: list[Any], key: Hashable, where: str) -> StepDecision:
        statement = f"{own if isinstance(own, Decline) else 'schedule ' + own.digest}, {where}"
        settled = self._agreement.agree(own, key, statement)
        return _whole(settled) if isinstance(settled, Decline) else StepDecision(settled, contexts, statement)

    def _find_nothing_to_hide(self) -> Decline | None:
        """Return why no prediction is needed.

        On one host communication may be worth hiding if it was measured; and lanes that compute have no need of any.
        """
        if self._runtime.config.mode != "auto" or self._transport not in NOTHING_TO_HIDE:
            return None
        planner = self._runtime.planner
        if planner is not None and (self._transport == "one host" or planner.can_use_side):
            return None
        return Decline("no communication to hide", NOTHING_TO_HIDE[self._transport])


def list_cuts(plan: ExecutionPlan) -> list[int]:
    """Return the token offsets at which a plan cuts."""
    return [piece.first_token for piece in plan.slices[1:]]


def _whole(decline: Decline) -> StepDecision:
    return StepDecision(decline, [], str(decline))
