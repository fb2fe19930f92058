"""Decide steps before serving, while vLLM profiles memory, warms up and captures graphs."""

from __future__ import annotations

from enum import Enum

from vllm.forward_context import ForwardContext, get_forward_context, is_forward_context_available

from dbo_runtime.bounded import BoundedDict
from dbo_runtime.decline import Decline
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.nano_sizes import share_nano_batches
from dbo_runtime.planner.online.graph_planner import GraphPlanner
from dbo_runtime.vllm_plugin.context.checks import check_capture
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.step.first_steps import FirstSteps, name_class
from dbo_runtime.vllm_plugin.step.local_plan import LocalPlanner
from dbo_runtime.vllm_plugin.step.step_decision import StepDecision, decline

STARTING_UP = Decline("starting up")
MAX_GRAPHS = 1024  # number of captured sizes whose log lines are remembered


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
        graphs: planner of the programs that vLLM captures; None if vLLM captures the model's own forward.
    """

    def __init__(self, runtime: MicroBatchRuntime, splitter: ContextSplitter, local: LocalPlanner) -> None:
        self.graphs: GraphPlanner | None = None
        self._runtime = runtime
        self._splitter = splitter
        self._local = local
        self._told: BoundedDict[int, None] = BoundedDict(MAX_GRAPHS)

    def decide(
        self, phase: Phase, tokens: int, unsupported: Decline | None, is_checked: bool, first_steps: FirstSteps | None
    ) -> StepDecision:
        """Decide a step of *tokens* tokens.

        Args:
            phase: present phase, any but `SERVING`.
            tokens: number of tokens.
            unsupported: reason for which the arguments of the forward cannot be split; None if they can.
            is_checked: whether every split step is compared with an unsplit one.
            first_steps: count of first steps, which are compared; None if none are.
        """
        if not is_forward_context_available():
            return decline(Decline("no forward context"))
        context = get_forward_context()
        if phase is Phase.PROFILING:
            planned = unsupported or self._local.plan_dummy(context, tokens)
            return decline(planned) if isinstance(planned, Decline) else planned.state("profiling")
        # A graph cannot hold the comparison of every step, or an op that waits for the device.
        waits = any(op.host_sync for op in self._runtime.program.ops)
        if unsupported is not None or not context.attn_metadata or is_checked or waits:
            return decline(STARTING_UP)
        if check_capture(context, self._splitter.platform, self._splitter.dispatch):
            return decline(STARTING_UP)
        planned = self._plan_graph(context, tokens)
        if isinstance(planned, Decline):
            return decline(STARTING_UP)
        decision = planned.state("for a graph")
        return decision if first_steps is None else _let_compare(decision, context, first_steps)

    def _plan_graph(self, context: ForwardContext, tokens: int) -> StepDecision | Decline:
        """Plan a step that vLLM captures, or that it runs right before, as then communicators are made.

        Its ops are concurrent if the settings force that, or if that is predicted to pay.
        """
        if self._runtime.forces_side:
            return self._local.plan_whole(context, tokens)
        size = self._splitter.read_size(context, tokens)
        if self.graphs is None or size is None or size.max_query_len > self._splitter.decode_len:
            return STARTING_UP
        choice = self.graphs.choose(tokens, self._runtime.config)
        if isinstance(choice, Decline):
            return choice
        of_ranks, count = _list_tokens_of_ranks(context), choice.cut.nano_batches
        shares = share_nano_batches(of_ranks, count) if of_ranks and count > 1 else ()
        if isinstance(shares, Decline):
            return shares
        if tokens not in self._told:
            self._told[tokens] = None
            expected = str(choice.prediction)
            self._runtime.log.info("the graph of a decode holds concurrent ops", tokens=tokens, expected=expected)
        return self._local.plan_whole(context, tokens, choice, shares)


def _let_compare(decision: StepDecision, context: ForwardContext, first_steps: FirstSteps) -> StepDecision:
    """Return the decision for a step that is compared before it is captured; a decline if it was not, or differs.

    vLLM runs each step once before it captures it. Then its results can be read.
    """
    assert isinstance(decision.plan, ExecutionPlan), "a decline is not compared"
    step_class = name_class(decision.plan, _list_tokens_of_ranks(context))
    if first_steps.failure is not None:
        return decline(first_steps.failure)
    if context.cudagraph_runtime_mode.name == "NONE":
        return decision._replace(step_class=step_class)
    return decision if first_steps.has_compared(step_class) else decline(STARTING_UP)


def _list_tokens_of_ranks(context: ForwardContext) -> list[int]:
    """Return the tokens of each data parallel rank [ranks]; empty without these."""
    return [] if context.dp_metadata is None else context.dp_metadata.num_tokens_across_dp_cpu.tolist()
