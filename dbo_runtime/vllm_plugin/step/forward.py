"""The forward of a served model: split where that is possible and pays, vLLM's own otherwise."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm import forward_context
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.sequence import IntermediateTensors

from dbo_runtime.adapters.contract import INPUT_IDS, POSITIONS, X
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices import Device, Timer
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.errors import SplitError
from dbo_runtime.observe.logs import open_log
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT
from dbo_runtime.planner.online.probation import Proposal
from dbo_runtime.vllm_plugin.api.forward_context import enter_context, guard_context
from dbo_runtime.vllm_plugin.context.layer_transfers import transfer_once
from dbo_runtime.vllm_plugin.context.lora_mapping import LoraMapping
from dbo_runtime.vllm_plugin.context.saved_states import SavedStates
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.parallel.stage import WHOLE_MODEL, Results, Stage, take_inputs, take_kept
from dbo_runtime.vllm_plugin.step.arguments import StepArguments
from dbo_runtime.vllm_plugin.step.comparison import StepComparison
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.head import Head
from dbo_runtime.vllm_plugin.step.padding import drop_padding, pad_inputs
from dbo_runtime.vllm_plugin.step.phase import Phase
from dbo_runtime.vllm_plugin.step.repetition import Repetition
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics
from dbo_runtime.vllm_plugin.telemetry.sampling import Recording

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.model_executor.models.interfaces_base import VllmModel

MAX_TIMED_STEPS = 64  # whose times are still to be read; of more, the oldest are not counted


class StepTime(NamedTuple):
    """Predicted (if there was a prediction) and measured seconds of a step that ran `split` or `unsplit`."""

    mode: str
    expected: float | None
    seconds: float


class SplitForward:
    """Replace the `forward` of a loaded model instance.

    Args:
        model: the top-level model.
        forward: its own forward, which unsplit steps run untouched.
        runtime: runs plans.
        decider: decides each step.
        agreement: of all ranks that communicate in a step.
        add_inputs: `take_inputs` of an `InputAdapter`; None if the program takes what vLLM passes.
        give_inputs: `give_inputs` of a `RepeatableAdapter`; None if the adapter has no such method.
        keep_output: `keep_output` of an `OutputAdapter`; None if the forward leaves nothing for another model.
        stage: the pipeline stage that the model is.
        recording: records split steps.
        metrics: counts steps; None on ranks that do not count.
        lora: the adapters of each token; None without LoRA.
        may_diverge: whether rounding alone may lead a step elsewhere; see `api.features`.
        head: what the model's forward does with the hidden states of its backbone; None if it returns them.

    Attributes:
        last_step: predicted and measured seconds of the last step.
    """

    def __init__(
        self,
        model: VllmModel,
        forward: Callable[..., Results],
        runtime: MicroBatchRuntime,
        decider: StepDecider,
        agreement: Agreement,
        add_inputs: Callable[[torch.nn.Module, torch.Tensor, bool], torch.Tensor] | None = None,
        give_inputs: Callable[[torch.nn.Module, torch.Tensor], None] | None = None,
        keep_output: Callable[[torch.nn.Module, list[torch.Tensor]], None] | None = None,
        stage: Stage = WHOLE_MODEL,
        recording: Recording | None = None,
        metrics: Metrics | None = None,
        lora: LoraMapping | None = None,
        may_diverge: bool = False,
        head: Head | None = None,
    ) -> None:
        self.runtime = runtime
        self.decider = decider
        self.recording = Recording() if recording is None else recording
        self.last_step: StepTime | None = None
        self._timers: deque[tuple[ExecutionPlan | Decline, Timer]] = deque(maxlen=MAX_TIMED_STEPS)
        self._model = model
        self._forward = forward
        self._agreement = agreement
        self._add_inputs = add_inputs
        self._give_inputs = give_inputs
        self._keep_output = keep_output
        self._stage = stage
        self._metrics = metrics
        self._lora = lora
        may_repeat = add_inputs is None or give_inputs is not None
        self._comparison = StepComparison(agreement, may_diverge and may_repeat, lora)
        self._head = head
        self._is_final = False
        self._takes_input_ids = any(value.name == INPUT_IDS for value in runtime.program.inputs)

    def copy_for(self, device: Device, config: RuntimeConfig, group: GroupCoordinator) -> SplitForward:
        """Return a forward of the same model with separate plans, counts and times, and a silent log."""
        own = copy.copy(self)
        ranks, log = group.world_size, open_log(quiet=True)
        own.runtime = MicroBatchRuntime(self.runtime.program, device, config, log, ranks, self.runtime.keeps_layers)
        own.decider, own._timers = self.decider.copy_for(own.runtime, group), deque(maxlen=MAX_TIMED_STEPS)
        own.recording, own._metrics, own._is_final = Recording(), None, False
        return own

    def describe_caches(self) -> dict[str, tuple[int, int]]:
        """Return how many entries each cache has, and how many it may have."""
        first_steps = self.decider.first_steps
        return {
            **self.runtime.describe_caches(),
            "agreed plans": self._agreement.size_and_capacity,
            "declined sizes": self.decider.declines.size_and_capacity,
            "timed steps": (len(self._timers), MAX_TIMED_STEPS),
            **({} if first_steps is None else {"first steps": first_steps.size_and_capacity}),
        }

    def start_serving(self, is_final: bool = False) -> None:
        """Split steps from now on: vLLM has warmed up. *is_final*: settings, cuts and costs stay as they are."""
        self.decider.phase = Phase.SERVING
        self._is_final = is_final
        self._restore_forward()

    def _restore_forward(self) -> None:
        """Give the model its own forward back if no further step is split: then this package costs steps nothing."""
        standing = self.decider.find_standing() if self._is_final else None
        if standing is None:
            return
        self._model.forward = self._forward
        self.runtime.decline_all(standing)
        if self._metrics is not None:
            self._metrics.count_standing(standing)

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Results:
        """Run one step: tokens [tokens], positions [tokens] -> hidden states [tokens, hidden].

        On a later stage of a pipeline, from the intermediate tensors of the stage before; on all but the last, to those
        of the next.
        """
        timer = self._start_timer()
        tokens = positions.shape[-1]
        arguments = StepArguments(input_ids, positions, intermediate_tensors, inputs_embeds, kwargs)
        unsupported = arguments.check_further() or self._stage.check_inputs(intermediate_tensors, tokens)
        if unsupported is None and self._takes_input_ids:
            unsupported = arguments.check_input_ids()
        if unsupported is None and self._lora is not None:
            unsupported = self._lora.check(tokens)
        start = time.perf_counter()
        decision = self.decider.decide(tokens, unsupported)
        planning = time.perf_counter() - start
        is_checked = bool(self.runtime.config.check)
        first_steps = None if is_checked else self.decider.find_first_steps(decision.kind)
        if is_checked:
            self._agreement.compare(decision.statement or str(decision.plan))
        plan, repetition = decision.plan, None
        if isinstance(plan, ExecutionPlan) and (is_checked or first_steps is not None):
            plan = self._comparison.check_contexts(decision, plan, first_steps)
            repetition = Repetition(self._forward, arguments, SavedStates(get_forward_context()), self.decider.platform)
        if isinstance(plan, Decline):
            self.runtime.decline(plan)
            results = arguments.run(self._forward)
        else:
            inputs = self._take_inputs(arguments if repetition is None else arguments.copy(), repetition)
            results = self._run(plan, decision.contexts, inputs, planning)
        self._learn(plan, timer)
        if self._metrics is not None and self.decider.phase is Phase.SERVING:
            self._metrics.count_step(plan)
            self._metrics.count_planning(planning)
        if repetition is not None and isinstance(plan, ExecutionPlan):
            make_context = partial(self.decider.make_own_context, decision.contexts, plan.slices)
            difference, unsplit = self._comparison.compare(results, repetition, plan, make_context)
            if first_steps is not None:
                first_steps.observe(decision.kind, difference)
                results = unsplit
                self._restore_forward()
            elif difference:
                raise SplitError(difference)
        return results

    def _take_inputs(self, arguments: StepArguments, repetition: Repetition | None) -> dict[str, torch.Tensor]:
        """Return the program's inputs: embedded tokens, or the tensors of the stage before; positions; token ids.

        What the model keeps for its next forward is left there for a *repetition*, which may give it back, too.
        """
        inputs = {POSITIONS: arguments.positions}
        if self._takes_input_ids:
            assert arguments.input_ids is not None, "checked before the decision"
            inputs[INPUT_IDS] = arguments.input_ids
        if arguments.intermediate_tensors is not None:
            return {**take_inputs(self.runtime.program, arguments.intermediate_tensors), **inputs}
        embeds = arguments.inputs_embeds
        x = self._model.embed_input_ids(arguments.input_ids) if embeds is None else embeds
        if self._add_inputs is not None:
            x = self._add_inputs(self._model, x, repetition is not None)
            if repetition is not None and self._give_inputs is not None:
                repetition.give_back = partial(_give_back, partial(self._give_inputs, self._model), x.clone())
        return {X: x, **inputs}

    def _run(
        self, plan: ExecutionPlan, contexts: list[ForwardContext], inputs: dict[str, torch.Tensor], planning: float
    ) -> Results:
        program, positions = self.runtime.program, inputs[POSITIONS]
        padded = pad_inputs(program, inputs, plan.slices[-1].last_token)
        cut = [program.cut_inputs(padded, piece.tokens, piece.requests) for piece in plan.slices]
        # While vLLM captures a graph, its ops do not run yet, so there are no times to record.
        recorder = self.recording.begin() if self.decider.phase is Phase.SERVING else None
        step = get_forward_context()
        if plan.executor.check_context is not None:
            contexts = [guard_context(context, plan.executor.check_context) for context in contexts]
        hooks = transfer_once(step, contexts) if self.decider.has_layer_hooks else nullcontext()
        select_lora = nullcontext(None) if self._lora is None else self._lora.split(plan.slices)
        # At the end, the step's own forward context is restored.
        with hooks, forward_context.override_forward_context(contexts[0]), select_lora as select:
            enter = partial(_enter, contexts) if select is None else partial(_enter_with_lora, contexts, select)
            outputs = self.runtime.run(plan, cut, enter, recorder)
        if recorder is not None:
            self.recording.end(recorder, plan.executor.schedule, planning)
        results, kept = take_kept(program, drop_padding(outputs, plan.slices, positions.shape[-1]))
        if self._keep_output is not None and kept:
            self._keep_output(self._model, kept)
        joined = self._stage.join(program, results)
        if self._head is None:
            return joined
        assert isinstance(joined, torch.Tensor), "models that score neither draft nor are in a pipeline"
        return self._head(joined, positions)

    def _start_timer(self) -> Timer | None:
        """Start a timer, but not before serving: vLLM may be capturing a graph, which must not hold the timer."""
        return self.runtime.device.start_timer() if self.decider.phase is Phase.SERVING else None

    def _learn(self, plan: ExecutionPlan | Decline, timer: Timer | None) -> None:
        """Compare measured with predicted times; correct predictions periodically, together with the other ranks.

        A device may be behind its host, and then it is an earlier step whose time is known. Every step of every rank is
        counted, whether measured or not, so that all of them gather at the same one.
        """
        if timer is None:
            return
        timer.stop()
        self._timers.append((plan, timer))
        planner = self.runtime.planner
        while self._timers and (seconds := self._timers[0][1].read()) is not None:
            ran, _ = self._timers.popleft()
            mode, expected = UNSPLIT if isinstance(ran, Decline) else SPLIT, ran.expected
            self.last_step = StepTime(mode, expected, seconds)
            if planner is not None and expected is not None:
                planner.observe(mode, expected, seconds, ran.kind)
            if self._metrics is not None and expected is not None:
                self._metrics.count_time(mode, expected, seconds)
        if planner is not None and planner.correction.count():
            proposals = self._agreement.gather((planner.correction.propose(), planner.probation.propose()))
            planner.probation.apply([Proposal(*measured) for _, measured in proposals])
            planner.correct([errors for errors, _ in proposals])


def _give_back(give_inputs: Callable[[torch.Tensor], None], x: torch.Tensor, tokens: slice) -> None:
    give_inputs(x[tokens])


def _enter(contexts: list[ForwardContext], micro_batch: int) -> None:
    """Make a micro-batch's forward context the current one."""
    enter_context(contexts[micro_batch])


def _enter_with_lora(contexts: list[ForwardContext], select: Callable[[int], None], micro_batch: int) -> None:
    """Make a micro-batch's forward context, and its LoRA adapters, the current ones."""
    enter_context(contexts[micro_batch])
    select(micro_batch)
