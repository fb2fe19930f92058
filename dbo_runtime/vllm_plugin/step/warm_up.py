"""Decide steps before serving, while vLLM profiles memory, warms up and captures graphs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from vllm.forward_context import ForwardContext, get_forward_context, is_forward_context_available

from dbo_runtime.decline import Decline
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.planner.online.split_choice import SplitChoice
from dbo_runtime.vllm_plugin.context.checks import check_capture
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.step.local_plan import LocalPlanner
from dbo_runtime.vllm_plugin.step.step_decision import StepDecision, decline

STARTING_UP = Decline("starting up")


class Phase(Enum):
    """The present use of the model by vLLM."""

    STARTING = "profiling, compiling and capturing unsplit steps"
    PROFILING = "profiling the memory of split steps"
    SERVING = "serving requests"


class WarmUp:
    """Decides the steps of one model before serving.

    Args:
        runtime: makes plans.
        splitter: makes the forward contexts of micro-batches.
        local: plans on this rank.

    Attributes:
        graphs: choice for each graph that vLLM captures, by its number of tokens; see `choose_graphs`.
    """

    def __init__(self, runtime: MicroBatchRuntime, splitter: ContextSplitter, local: LocalPlanner) -> None:
        self.graphs: Mapping[int, SplitChoice | Decline] = {}
        self._runtime = runtime
        self._splitter = splitter
        self._local = local

    def decide(self, phase: Phase, tokens: int, unsupported: Decline | None, is_compared: bool) -> StepDecision:
        """Decide a step of *tokens* tokens.

        Args:
            phase: present phase, any but `SERVING`.
            tokens: number of tokens.
            unsupported: reason for which the step cannot be split; None if it can.
            is_compared: whether split steps are compared with unsplit ones. A comparison reads results.
        """
        if not is_forward_context_available():
            return decline(Decline("no forward context"))
        context = get_forward_context()
        if phase is Phase.PROFILING:
            planned = unsupported or self._local.plan_dummy(context, tokens)
            return decline(planned) if isinstance(planned, Decline) else planned.state("profiling")
        # Right before vLLM captures a step with attention, it runs one unsplit. Communicators are made then. A graph
        # can hold concurrent ops. It cannot hold a comparison, or an op that waits for the device.
        if unsupported is not None or not context.attn_metadata:
            return decline(STARTING_UP)
        cannot_capture = is_compared or any(op.host_sync for op in self._runtime.program.ops)
        if cannot_capture or check_capture(context, self._splitter.platform, self._splitter.dispatch):
            return decline(STARTING_UP)
        concurrent = self._plan_graph(context, tokens)
        return decline(STARTING_UP) if isinstance(concurrent, Decline) else concurrent.state("for a graph")

    def _plan_graph(self, context: ForwardContext, tokens: int) -> StepDecision | Decline:
        """Plan a step that vLLM captures, or runs right before: with concurrent ops if they are forced or chosen."""
        if self._runtime.forces_side:
            return self._local.plan_whole(context, tokens)
        choice = self.graphs.get(tokens, STARTING_UP)
        if isinstance(choice, Decline):
            return choice
        size, of_ranks = self._splitter.read_size(context, tokens), context.dp_metadata
        if size is None or size.max_query_len > self._splitter.decode_len:
            return STARTING_UP  # no decode
        if of_ranks is not None and set(of_ranks.num_tokens_across_dp_cpu.tolist()) != {tokens}:
            return STARTING_UP  # data parallel ranks would choose by different sizes
        planned = self._local.plan_whole(context, tokens, choice)
        if not isinstance(planned, Decline) and context.cudagraph_runtime_mode.name == "FULL":
            expected = str(choice.prediction)
            self._runtime.log.info("a graph of decodes holds concurrent ops", tokens=tokens, expected=expected)
        return planned
