"""The decision about a step of serving: a plan with the forward contexts of its micro-batches, or a decline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from vllm.forward_context import ForwardContext, get_forward_context, is_forward_context_available

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline, LocalDecline
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.runtime import OFF, MicroBatchRuntime, SharedSplit
from dbo_runtime.errors import SplitError
from dbo_runtime.planner.online.cuts import Cut
from dbo_runtime.planner.online.split_choice import SplitChoice, get_cut
from dbo_runtime.vllm_plugin.context.checks import check_agreed_context, check_mode
from dbo_runtime.vllm_plugin.context.layer_transfers import check_turns
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.step.decline_cache import DeclineCache
from dbo_runtime.vllm_plugin.step.first_steps import FirstSteps, name_class
from dbo_runtime.vllm_plugin.step.local_plan import LocalPlanner, ServedStep
from dbo_runtime.vllm_plugin.step.nano_decision import NanoDecider, can_be_nano
from dbo_runtime.vllm_plugin.step.step_decision import StepDecision, agree, decline
from dbo_runtime.vllm_plugin.step.warm_up import WarmUp

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

    from dbo_runtime.vllm_plugin.platforms.platform import Platform

Sizes = tuple[tuple[int, ...], ...]
"""Number of tokens of every data parallel rank in each micro-batch [micro-batches][ranks]."""


class StepDecider:
    """Decides the steps of one model while it serves.

    Args:
        runtime: makes plans.
        splitter: makes the forward contexts of micro-batches.
        agreement: agreement of all ranks that communicate in a step.
        transport: way in which these ranks communicate; see `Platform.get_transport`.
        rank: number of this process among the data parallel ranks that exchange tokens; None without them.

    Attributes:
        runtime: makes plans.
        splitter: makes the forward contexts of micro-batches.
        local: plans on this rank.
        warm_up: decides steps before serving.
        first_steps: counts the first steps, which are compared; None if none are.
        refusal: reason not to split any step, found before serving; None if steps may be split.
        no_micro: reason for which steps are cut into nano-batches only; None if micro-batches are possible, too.
        declines: declines of earlier steps, which further steps repeat.
        choose_cuts: chooses the cuts of a batch, whatever the settings say; None to follow the settings.
        choose_sizes: chooses the sizes of micro-batches on all data parallel ranks, likewise.
        decode_len: longest query that counts as a decode, for batches whose decodes have no drafts; None for the
            batch's own.
        checks_turns: whether an issue order is declined in which layers do not take turns, as the layer hooks of a KV
            connector need it.
    """

    def __init__(
        self,
        runtime: MicroBatchRuntime,
        splitter: ContextSplitter,
        agreement: Agreement,
        transport: str,
        rank: int | None = None,
    ) -> None:
        self.first_steps: FirstSteps | None = None
        self.refusal: Decline | None = None
        self.no_micro: Decline | None = None
        self.declines = DeclineCache()
        self.choose_cuts: Callable[[Batch], Sequence[int]] | None = None
        self.choose_sizes: Callable[[Sequence[int]], Sizes | Decline] | None = None
        self.decode_len: int | None = None
        self.checks_turns = runtime.keeps_layers
        self.rank = rank
        self.local = LocalPlanner(runtime, splitter, agreement.ranks, votes=rank is not None)
        self.runtime = runtime
        self.warm_up = WarmUp(runtime, splitter, self.local)
        self._nano = NanoDecider(self.local, runtime, splitter, agreement, rank)
        self.splitter = splitter
        self._agreement = agreement
        self._transport = transport

    def copy_for(self, runtime: MicroBatchRuntime, group: GroupCoordinator) -> StepDecider:
        """Return a decider for the same model with another runtime. It has no agreements, and compares no steps."""
        own = StepDecider(runtime, self.splitter, self._agreement.copy_for(group), self._transport, self.rank)
        own.refusal, own.no_micro = self.refusal, self.no_micro
        return own

    def limit(self, config: RuntimeConfig) -> RuntimeConfig:
        """Return these settings; if the model has no micro-batches, nano-batches are all that `auto` can choose.

        Then no op runs on `side`, either, because whole steps of such models have not been compared with that.
        """
        if self.no_micro is None:
            return config
        return replace(config, split="nano" if config.split == "auto" else config.split, side="off")

    @property
    def sizes_and_capacities(self) -> dict[str, tuple[int, int]]:
        """Number of entries of each cache, and the most that it keeps."""
        first_steps = {} if self.first_steps is None else {"first steps": self.first_steps.size_and_capacity}
        agreed, declined = self._agreement.size_and_capacity, self.declines.size_and_capacity
        return {"agreed plans": agreed, "declined sizes": declined, **first_steps}

    @property
    def platform(self) -> Platform:
        """The platform that steps run on."""
        return self.splitter.platform

    def decide(self, tokens: int, unsupported: Decline | None = None) -> StepDecision:
        """Decide a step of *tokens* tokens on this rank.

        It checks, in this order: reasons that all ranks share, so that they decline without asking each other; reasons
        that only this rank knows; and the agreement of all ranks. An unsplit step may still run ops concurrently.

        Args:
            tokens: number of tokens of this rank.
            unsupported: reason for which the arguments of the forward cannot be split; None if they can. Only this rank
                may see it.
        """
        if not is_forward_context_available():
            return decline(Decline("no forward context"))
        refusal = self._find_refusal()
        if refusal is not None:
            return decline(refusal)
        step = ServedStep(get_forward_context(), tokens, unsupported)
        decision = self._decide_cut(step)
        if isinstance(decision.plan, Decline) and self.runtime.forces_side:
            decision = self._decide_concurrent(step, decision.plan)
        if self.first_steps is None or isinstance(decision.plan, Decline):
            return decision
        of_ranks = () if self.rank is None else step.context.dp_metadata.num_tokens_across_dp_cpu.tolist()
        return decision._replace(step_class=name_class(decision.plan, of_ranks))

    def find_first_steps(self, decision: StepDecision) -> FirstSteps | None:
        """Return the first steps, if this step is one of them and still to be compared; otherwise None."""
        if self.first_steps is None or decision.step_class is None or not self.first_steps.takes(decision.step_class):
            return None
        return self.first_steps

    def find_general_decline(self) -> Decline | None:
        """Return why every step is declined, if settings, costs and the layout of ranks alone decline it.

        It is equal on all ranks. It is None if unsplit steps run ops concurrently.
        """
        runtime, refusal = self.runtime, self._find_refusal()
        if refusal is not None:
            return refusal
        if runtime.forces_side or self.choose_cuts is not None or self.choose_sizes is not None:
            return None
        return OFF if runtime.config.mode == "off" else runtime.check_transport(self._transport)

    def find_permanent_decline(self) -> Decline | None:
        """Return `find_general_decline`, but None while ranks compare their decisions (DBO_CHECK) about each step."""
        return self._find_refusal() if self.runtime.config.check else self.find_general_decline()

    def _find_refusal(self) -> Decline | None:
        """Return why no step is split, whatever the settings: ops fail, or give other results. Equal on all ranks."""
        return self.refusal or (None if self.first_steps is None else self.first_steps.failure)

    def _decide_cut(self, step: ServedStep) -> StepDecision:
        """Decide whether to cut a served step into micro-batches or nano-batches, as the settings ask for."""
        parts = self.runtime.config.split
        if self.no_micro is not None and parts == "micro":
            return decline(self.no_micro)
        is_chosen = self.choose_cuts is not None or self.choose_sizes is not None
        has_micro = self.no_micro is None or not is_chosen  # only micro-batches are chosen
        is_read = has_micro and (parts != "nano" or self.runtime.planner is not None)
        decision = self._decide_split(step) if is_read else None
        if decision is not None and (parts == "micro" or not can_be_nano(decision.plan)):
            return decision
        nothing = self.runtime.check_transport(self._transport)
        in_nano_batches = decline(nothing) if nothing is not None else self._nano.decide(step)
        return in_nano_batches if decision is None or not isinstance(in_nano_batches.plan, Decline) else decision

    def _decide_split(self, step: ServedStep) -> StepDecision:
        """Decide whether to split a served step, and where.

        Without data parallel ranks, all ranks have the same batch, so all decline alike. With them, a rank cannot
        decline alone for a reason that only it knows, because the others would communicate as decided. So all ranks
        vote on it.
        """
        context, tokens = step.context, step.tokens
        shared = self._check_early(context, tokens) if self.rank is None else self._decide_data_parallel(context)
        if isinstance(shared, Decline):
            return decline(shared)
        local = self.local.attempt(step, partial(self._plan_locally, context, tokens, shared))
        if shared is not None:
            return agree(self._agreement, local, f"tokens of all ranks {shared.sizes}")
        if isinstance(local, LocalDecline):
            return decline(local.decline)
        plan = local.plan
        assert isinstance(plan, ExecutionPlan), "a decline is local"
        decision = local.state(f"cuts {plan.cuts}")
        self._agreement.compare_once(plan.digest, decision.fingerprint)
        return decision

    def _plan_locally(self, context: ForwardContext, tokens: int, shared: SharedSplit | None) -> StepDecision | Decline:
        """Plan this rank's batch, with the contexts of its micro-batches."""
        plan = self._plan(context, tokens, shared)
        if self.checks_turns and not isinstance(plan, Decline):
            plan = check_turns(plan.executor.schedule) or plan
        if isinstance(plan, Decline) and shared is None:
            self._keep_decline(plan, context, tokens)
        return self.local.add_contexts(context, plan, () if shared is None else shared.sizes)

    def _check_early(self, context: ForwardContext, tokens: int) -> Decline | None:
        """Decline a step before its batch is read: by its size, or like an earlier step. Never decline chosen cuts."""
        runtime = self.runtime
        if self.choose_cuts is not None:
            return None
        early = runtime.check_transport(self._transport) or runtime.decline_early(tokens)
        size = None if early else self.splitter.read_size(context, tokens)
        if size is None:
            return early
        decodes = runtime.decline_prefill(0) if size.max_query_len <= 1 else None
        return decodes or self.declines.find(size, runtime.config, runtime.planner)

    def _keep_decline(self, reason: Decline, context: ForwardContext, tokens: int) -> None:
        """Keep the decline of a batch that was read, for further steps of its size.

        It is not kept if cuts were chosen, nor during A/B trials, because then each step is decided anew.
        """
        size = self.splitter.read_size(context, tokens)
        if size is not None and self.choose_cuts is None and reason.trial_class is None:
            self.declines.keep(reason, size)

    def _decide_data_parallel(self, context: ForwardContext) -> SharedSplit | Decline:
        """Decide how all data parallel ranks split a step, from the numbers that vLLM has made equal on them."""
        unequal = check_agreed_context(context, self.splitter.platform, self.splitter.dispatch)
        if unequal is not None:
            return unequal
        tokens = context.dp_metadata.num_tokens_across_dp_cpu.tolist()
        if self.choose_sizes is not None:
            sizes = self.choose_sizes(tokens)
            return sizes if isinstance(sizes, Decline) else Cut(sizes=sizes)
        return self.runtime.check_transport(self._transport) or self.runtime.plan_data_parallel(tokens)

    def _plan(self, context: ForwardContext, tokens: int, shared: SharedSplit | None) -> ExecutionPlan | Decline:
        """Plan this rank's batch. With data parallel ranks, cut it where all ranks expect it."""
        if shared is not None and get_cut(shared).nano_batches:
            assert self.rank is not None, "only data parallel ranks share a split"
            choice = shared if isinstance(shared, SplitChoice) else None
            return self.runtime.plan_nano_batches([part[self.rank] for part in shared.sizes], choice)
        batch = self.splitter.read_batch(context, tokens)
        if isinstance(batch, Decline):
            return batch
        if self.decode_len is not None:
            batch = replace(batch, decode_len=self.decode_len)
        if shared is None:
            cuts = None if self.choose_cuts is None else self.choose_cuts(batch)
            return self.runtime.plan(batch, cuts)
        assert self.rank is not None, "only data parallel ranks share a split"
        edges = list(accumulate(part[self.rank] for part in shared.sizes))
        try:
            return self.runtime.plan(batch.pad(edges[-1]), edges[:-1], shared)
        except SplitError as error:
            return Decline("cannot be cut where all ranks agreed to", str(error))

    def _decide_concurrent(self, step: ServedStep, reason: Decline) -> StepDecision:
        """Run a step that is not split with ops on a second compute lane, if its context allows that.

        All ranks come here together: they share the reason not to split, or have agreed on it. They vote once more on
        reasons that only one rank knows.
        """
        context, platform, dispatch = step.context, self.splitter.platform, self.splitter.dispatch
        if self.rank is not None:
            unfit = check_agreed_context(context, platform, dispatch)
        else:
            unfit = check_mode(context) or platform.check_step(context, dispatch)
            unfit = unfit if context.attn_metadata else reason
        if unfit is not None:
            return decline(reason)
        local = self.local.attempt(step, partial(self.local.plan_whole, context, step.tokens))
        where = f"not cut: {reason.reason}"
        if self.rank is not None:
            concurrent = agree(self._agreement, local, where)
        else:
            concurrent = decline(reason) if isinstance(local, LocalDecline) else local.state(where)
        if isinstance(concurrent.plan, Decline):
            return decline(reason)
        self.runtime.decline(reason)
        return concurrent
