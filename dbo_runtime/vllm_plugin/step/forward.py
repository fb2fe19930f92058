"""The forward of a served model: split if that is possible and pays, and otherwise vLLM's own."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.sequence import IntermediateTensors

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices import Device
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.observe.logs import open_log
from dbo_runtime.vllm_plugin.context.saved_states import SavedStates
from dbo_runtime.vllm_plugin.parallel.stage import Results
from dbo_runtime.vllm_plugin.step.arguments import StepArguments
from dbo_runtime.vllm_plugin.step.comparison import StepComparison
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.observer import StepObserver
from dbo_runtime.vllm_plugin.step.repetition import Repetition
from dbo_runtime.vllm_plugin.step.runner import StepRunner
from dbo_runtime.vllm_plugin.step.step_decision import StepDecision
from dbo_runtime.vllm_plugin.step.warm_up import Phase

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.model_executor.models.interfaces_base import VllmModel

    from dbo_runtime.ir.program import Program


class SplitForward:
    """Replaces the `forward` of a loaded model instance: decides each step, runs it, and observes it.

    Args:
        model: the top-level model. Its own forward runs unsplit steps, untouched.
        decider: decides steps.
        runner: runs split steps.
        observer: times steps, counts them, and lets the planner learn.
        comparison: compares split steps with unsplit ones.

    Attributes:
        phase: present use of the model by vLLM. Nothing is split before serving, except to profile memory.
    """

    def __init__(
        self,
        model: VllmModel,
        decider: StepDecider,
        runner: StepRunner,
        observer: StepObserver,
        comparison: StepComparison,
    ) -> None:
        self.phase = Phase.SERVING
        self.decider = decider
        self.runner = runner
        self.observer = observer
        self._model = model
        self._forward = model.forward
        self._comparison = comparison
        self._is_final = False

    @property
    def runtime(self) -> MicroBatchRuntime:
        """The runtime, which makes plans and runs them."""
        return self.decider.runtime

    def copy_for(
        self, device: Device, config: RuntimeConfig, group: GroupCoordinator, program: Program | None = None
    ) -> SplitForward:
        """Return a forward of the same model with its own plans, counts and times, and a silent log.

        It runs the served program, or another *program* that computes the same.
        """
        own, served, log = copy.copy(self), self.runtime, open_log(quiet=True)
        ranks, hooked = group.world_size, served.keeps_layers
        runtime = MicroBatchRuntime(program or served.program, device, config, log, ranks, hooked, served.rows)
        own.decider = self.decider.copy_for(runtime, group)
        own.runner, own.observer = self.runner.copy_for(runtime), self.observer.copy_for(runtime)
        own._comparison, own._is_final = self._comparison.copy_for(own.decider), False
        return own

    def describe_caches(self) -> dict[str, tuple[int, int]]:
        """Return the number of entries of each cache, and the most that it keeps."""
        return {
            **self.runtime.describe_caches(),
            **self.decider.sizes_and_capacities,
            "timed steps": self.observer.size_and_capacity,
        }

    def start_serving(self, is_final: bool = False) -> Decline | None:
        """Split steps from now on, because vLLM has warmed up. Return why every step will run unsplit, if so.

        *is_final*: settings, cuts and costs do not change.
        """
        self.phase = Phase.SERVING
        self._is_final = is_final
        self._restore_forward()
        return self.decider.find_general_decline()

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Results:
        """Run one step: tokens [tokens], positions [tokens] -> hidden states [tokens, hidden].

        A later stage of a pipeline takes the intermediate tensors of the stage before. A stage before the last returns
        those for the next stage.
        """
        arguments = StepArguments(input_ids, positions, intermediate_tensors, inputs_embeds, kwargs)
        # Before serving, vLLM may be capturing a graph. It must hold no timer, and its ops have no times.
        timer = self.observer.start() if self.phase is Phase.SERVING else None
        start = time.perf_counter()
        decision = self._decide(arguments)
        planning = time.perf_counter() - start
        is_checked = bool(self.runtime.config.check)
        decision, is_compared = self._comparison.check(decision, is_checked)
        repetition = self._save(arguments) if is_compared else None
        results = self._run(decision, arguments, repetition, planning)
        if timer is not None:
            self.observer.finish(decision.plan, timer, planning)
        if repetition is not None:
            results = self._comparison.conclude(results, repetition, decision, is_checked)
            reason = self._restore_forward()
            if reason is not None:
                self.runtime.decline_all(reason)
        return results if isinstance(decision.plan, Decline) else self.runner.finish(results)

    def _decide(self, arguments: StepArguments) -> StepDecision:
        unsupported = self.runner.check(arguments)
        if self.phase is Phase.SERVING:
            return self.decider.decide(arguments.tokens, unsupported)
        is_compared = bool(self.runtime.config.check) or self.decider.first_steps is not None
        unsupported = unsupported or self.decider.refusal
        return self.decider.warm_up.decide(self.phase, arguments.tokens, unsupported, is_compared)

    def _run(
        self, decision: StepDecision, arguments: StepArguments, repetition: Repetition | None, planning: float
    ) -> Results:
        plan = decision.plan
        if isinstance(plan, Decline):
            self.runtime.decline(plan)
            return arguments.run(self._forward)
        recording = self.observer.recording
        recorder = recording.begin() if self.phase is Phase.SERVING else None
        results = self.runner.run(plan, decision.contexts, arguments, repetition, recorder)
        if recorder is not None:
            recording.end(recorder, plan.executor.schedule, planning)
        return results

    def _save(self, arguments: StepArguments) -> Repetition:
        """Save everything that is needed to run the step again."""
        states = SavedStates(get_forward_context(), self.runner.list_received(arguments.tokens))
        return Repetition(self._forward, arguments, states, self.decider.platform)

    def _restore_forward(self) -> Decline | None:
        """Give the model its own forward back if no further step is split, and return why it is not.

        Then this package adds no time to steps.
        """
        reason = self.decider.find_permanent_decline() if self._is_final else None
        if reason is not None:
            self._model.forward = self._forward
            if self.observer.metrics is not None:
                self.observer.metrics.count_standing(reason)
        return reason
