"""Decide one step on this rank: an execution plan with the micro-batches' forward contexts, or a decline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from vllm.forward_context import ForwardContext, get_forward_context, is_forward_context_available

from dbo_runtime.batch import Batch, BatchSlice
from dbo_runtime.decline import Decline, LocalDecline
from dbo_runtime.engine.execution_plan import DataParallelSplit, ExecutionPlan
from dbo_runtime.engine.runtime import OFF, MicroBatchRuntime
from dbo_runtime.errors import SplitError
from dbo_runtime.vllm_plugin.context.checks import check_agreed_context, check_capture, check_mode
from dbo_runtime.vllm_plugin.context.layer_transfers import check_turns
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.step.decline_cache import DeclineCache
from dbo_runtime.vllm_plugin.step.first_steps import FirstSteps, name_kind
from dbo_runtime.vllm_plugin.step.local_plan import LocalPlan, LocalPlanner, ServedStep
from dbo_runtime.vllm_plugin.step.phase import Phase
from dbo_runtime.vllm_plugin.step.step_decision import StepDecision, make_decision, state_plan

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

    from dbo_runtime.vllm_plugin.platforms.platform import Platform

Sizes = tuple[tuple[int, ...], ...]
"""Tokens of every data parallel rank in each micro-batch [micro-batches][ranks]."""


class StepDecider:
    """Decide the steps of one model.

    Args:
        runtime: makes plans.
        splitter: makes the micro-batches' forward contexts.
        agreement: of all ranks that communicate in a step.
        transport: how they communicate; see `Platform.get_transport`.
        rank: of this process among the data parallel ranks that exchange tokens; None without them.
        has_layer_hooks: whether there is a KV connector whose layer hooks do something.

    Attributes:
        phase: nothing is split before serving, except to profile the memory that it takes.
        first_steps: compares first steps; None where that is not needed.
        refusal: why no step is split, found before serving; None if steps are.
        declines: of earlier steps, which further ones repeat.
        choose_cuts, choose_sizes: if set, cut there whatever the settings say, without and with data parallel ranks.
        decode_len: if set, the longest query that is a decode, in batches whose decodes have no drafts.
    """

    def __init__(
        self,
        runtime: MicroBatchRuntime,
        splitter: ContextSplitter,
        agreement: Agreement,
        transport: str,
        rank: int | None = None,
        has_layer_hooks: bool = False,
    ) -> None:
        self.phase = Phase.SERVING
        self.first_steps: FirstSteps | None = None
        self.refusal: Decline | None = None
        self.declines = DeclineCache()
        self.choose_cuts: Callable[[Batch], Sequence[int]] | None = None
        self.choose_sizes: Callable[[Sequence[int]], Sizes | Decline] | None = None
        self.decode_len: int | None = None
        self.rank = rank
        self.has_layer_hooks = has_layer_hooks
        self._runtime = runtime
        self._splitter = splitter
        self._agreement = agreement
        self._local = LocalPlanner(runtime, splitter, agreement.ranks, votes=rank is not None)
        self._transport = transport

    def copy_for(self, runtime: MicroBatchRuntime, group: GroupCoordinator) -> StepDecider:
        """Return a decider of the same model's steps with another runtime: nothing is agreed on, or to be compared."""
        own = copy.copy(self)
        own.first_steps = None
        own._runtime, own._agreement = runtime, self._agreement.copy_for(group)
        own._local = LocalPlanner(runtime, self._splitter, own._agreement.ranks, votes=self.rank is not None)
        own.declines = DeclineCache()
        return own

    @property
    def platform(self) -> Platform:
        """The platform that steps run on."""
        return self._splitter.platform

    def decide(self, tokens: int, unsupported: Decline | None = None) -> StepDecision:
        """Decide a step of *tokens* tokens on this rank.

        The checks, in order: the phase; what all ranks know alike, so that all decline without asking each other; what
        only this rank knows; and the agreement of all ranks. An unsplit step may still run ops concurrently.

        Args:
            tokens: of the step, on this rank.
            unsupported: why the arguments of this step's forward cannot be split; None if they can. Only this rank may
                see that.
        """
        if not is_forward_context_available():
            return make_decision(Decline("no forward context"))
        context = get_forward_context()
        if self.phase is Phase.PROFILING:
            return make_decision(unsupported or self._local.plan_dummy(context, tokens), "profiling")
        if self.phase is Phase.STARTING:
            return self._decide_capture(context, tokens, unsupported)
        refusal = self._find_refusal()
        if refusal is not None:
            return make_decision(refusal)
        step = ServedStep(context, tokens, unsupported)
        decision = self._decide_split(step)
        if isinstance(decision.plan, Decline) and self._runtime.forces_side:
            decision = self._decide_concurrent(step, decision.plan)
        if self.first_steps is None or isinstance(decision.plan, Decline):
            return decision
        of_ranks = () if self.rank is None else context.dp_metadata.num_tokens_across_dp_cpu.tolist()
        return decision._replace(kind=name_kind(decision.plan, of_ranks))

    def find_first_steps(self, kind: Hashable | None) -> FirstSteps | None:
        """Return what compares first steps, if a step of this kind is still to be compared."""
        if self.first_steps is None or kind is None or not self.first_steps.takes(kind):
            return None
        return self.first_steps

    def make_own_context(
        self, contexts: Sequence[ForwardContext], slices: Sequence[BatchSlice], number: int
    ) -> ForwardContext:
        """Return a forward context in which the model's own forward runs a slice, made for it alone.

        Args:
            contexts: of all slices, which have been used; from them are the tokens of other data parallel ranks.
            slices: of the step.
            number: of the slice.

        Raises:
            SplitError: if it cannot be made again.
        """
        sizes = [c.dp_metadata.num_tokens_across_dp_cpu.tolist() for c in contexts if c.dp_metadata is not None]
        parts = self._splitter.split(get_forward_context(), slices, sizes, only=number)
        if isinstance(parts, Decline):
            raise SplitError(f"the forward context of a micro-batch cannot be made a second time: {parts}.")
        self.platform.return_context(parts[0], get_forward_context())
        return parts[0]

    def find_standing(self) -> Decline | None:
        """Return why no step is split, if settings, costs and the layout of ranks alone prevent it; alike on all ranks.

        While ranks compare their decisions (DBO_CHECK), and where unsplit steps run ops concurrently, there is none.
        """
        runtime, refusal = self._runtime, self._find_refusal()
        if refusal is not None:
            return refusal
        is_chosen = self.choose_cuts is not None or self.choose_sizes is not None
        if runtime.config.check or runtime.forces_side or is_chosen:
            return None
        return OFF if runtime.config.mode == "off" else runtime.check_transport(self._transport)

    def _find_refusal(self) -> Decline | None:
        """Return why no step is split whatever the settings: ops fail, or give other results; alike on all ranks."""
        return self.refusal or (None if self.first_steps is None else self.first_steps.failure)

    def _decide_split(self, step: ServedStep) -> StepDecision:
        """Decide whether to split a served step, and where.

        Without data parallel ranks the batch is the same on all ranks, so all decline alike. With them, what this rank
        alone knows cannot stop the step here: the other ranks communicate as was decided, so it is put to the vote.
        """
        context, tokens = step.context, step.tokens
        shared = self._check_early(context, tokens) if self.rank is None else self._decide_data_parallel(context)
        if isinstance(shared, Decline):
            return make_decision(shared)
        local = self._local.attempt(step, partial(self._plan_locally, context, tokens, shared))
        if shared is not None:
            return self._agree(local, f"tokens of all ranks {shared.sizes}")
        if isinstance(local, LocalDecline):
            return make_decision(local.decline)
        decision = make_decision(local, f"cuts {local.plan.cuts}")
        self._agreement.compare_once(local.plan.digest, decision.statement)
        return decision

    def _plan_locally(
        self, context: ForwardContext, tokens: int, shared: DataParallelSplit | None
    ) -> LocalPlan | Decline:
        """Plan this rank's batch, with the contexts of its micro-batches."""
        plan = self._plan(context, tokens, shared)
        if isinstance(plan, Decline) and shared is None:
            self._keep_decline(plan, context, tokens)
        return self._local.add_contexts(context, plan, () if shared is None else shared.sizes)

    def _check_early(self, context: ForwardContext, tokens: int) -> Decline | None:
        """Decline a step before its batch is read: by its size or as before; chosen cuts come first."""
        runtime = self._runtime
        if self.choose_cuts is not None:
            return None
        early = runtime.check_transport(self._transport) or runtime.decline_early(tokens)
        size = None if early else self._splitter.read_size(context, tokens)
        if size is None:
            return early
        decodes = runtime.decline_decodes() if size.max_query_len <= 1 else None
        return decodes or self.declines.find(size, runtime.config, runtime.planner)

    def _keep_decline(self, decline: Decline, context: ForwardContext, tokens: int) -> None:
        """Keep the decline of a batch that was read for further steps of its size.

        Not where cuts were chosen, nor where split and unsplit steps are compared: there each step is decided anew.
        """
        size = self._splitter.read_size(context, tokens)
        if size is not None and self.choose_cuts is None and decline.kind is None:
            self.declines.keep(decline, size)

    def _decide_data_parallel(self, context: ForwardContext) -> DataParallelSplit | Decline:
        """Decide how all data parallel ranks split a step, from what vLLM has made equal on them."""
        unequal = check_agreed_context(context, self._splitter.platform, self._splitter.dispatch)
        if unequal is not None:
            return unequal
        tokens = context.dp_metadata.num_tokens_across_dp_cpu.tolist()
        if self.choose_sizes is not None:
            sizes = self.choose_sizes(tokens)
            return sizes if isinstance(sizes, Decline) else DataParallelSplit(sizes)
        return self._runtime.check_transport(self._transport) or self._runtime.plan_data_parallel(tokens)

    def _plan(self, context: ForwardContext, tokens: int, shared: DataParallelSplit | None) -> ExecutionPlan | Decline:
        """Plan this rank's batch; under data parallel, cut it where all ranks expect it."""
        batch = self._splitter.read_batch(context, tokens)
        if isinstance(batch, Decline):
            return batch
        if self.decode_len is not None:
            batch = replace(batch, decode_len=self.decode_len)
        if shared is None:
            cuts = None if self.choose_cuts is None else self.choose_cuts(batch)
            return self._check_hooks(self._runtime.plan(batch, cuts))
        assert self.rank is not None, "only data parallel ranks share a split"
        edges = list(accumulate(part[self.rank] for part in shared.sizes))
        try:
            return self._check_hooks(self._runtime.plan(batch.pad(edges[-1]), edges[:-1], shared))
        except SplitError as error:
            return Decline("cannot be cut where all ranks agreed to", str(error))

    def _check_hooks(self, plan: ExecutionPlan | Decline) -> ExecutionPlan | Decline:
        """Decline a plan in whose issue order a KV connector cannot be called as in an unsplit step."""
        if isinstance(plan, Decline) or not self.has_layer_hooks:
            return plan
        return check_turns(plan.executor.schedule) or plan

    def _decide_capture(self, context: ForwardContext, tokens: int, unsupported: Decline | None) -> StepDecision:
        """Leave a step before serving unsplit, but let graphs that vLLM captures hold concurrent ops.

        vLLM runs a step with attention, unsplit, right before it captures one: communicators are made then. What no
        graph can hold leaves the graphs to vLLM's own forward: a check, which reads results, and an op that waits for
        the device.
        """
        starting = make_decision(Decline("starting up"))
        runtime = self._runtime
        if unsupported is not None or not runtime.forces_side or not context.attn_metadata:
            return starting
        is_compared = runtime.config.check or self.first_steps is not None
        cannot_capture = is_compared or any(op.host_sync for op in runtime.program.ops)
        if cannot_capture or check_capture(context, self._splitter.platform, self._splitter.dispatch):
            return starting
        concurrent = self._local.plan_whole(context, tokens)
        return starting if isinstance(concurrent, Decline) else make_decision(concurrent, "for a graph")

    def _decide_concurrent(self, step: ServedStep, decline: Decline) -> StepDecision:
        """Run a step that is not split with ops on a second compute lane, if its context allows that.

        All ranks get here together: the reason not to split is the same on all of them, or was agreed on. What only
        this rank knows is put to the vote once more.
        """
        context, platform, dispatch = step.context, self._splitter.platform, self._splitter.dispatch
        if self.rank is not None:
            unfit = check_agreed_context(context, platform, dispatch)
        else:
            unfit = check_mode(context) or platform.check_step(context, dispatch)
            unfit = unfit if context.attn_metadata else decline
        if unfit is not None:
            return make_decision(decline)
        local = self._local.attempt(step, partial(self._local.plan_whole, context, step.tokens))
        where = f"not cut: {decline.reason}"
        if self.rank is not None:
            concurrent = self._agree(local, where)
        else:
            concurrent = make_decision(decline if isinstance(local, LocalDecline) else local, where)
        if isinstance(concurrent.plan, Decline):
            return make_decision(decline)
        self._runtime.decline(decline)
        return concurrent

    def _agree(self, local: LocalPlan | LocalDecline, where: str) -> StepDecision:
        """Put this rank's plan, or what only this rank has against one, to the vote of all ranks."""
        statement = "" if isinstance(local, LocalDecline) else state_plan(local, where)
        return make_decision(self._agreement.agree(local, statement), where)
