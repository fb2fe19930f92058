"""A worker extension that times every step, for vLLM's `--worker-extension-cls`; see `bench_step_time.py`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.extension import WorkerExtension
from tests.benchmarks.timed_steps import Step

if TYPE_CHECKING:
    from dbo_runtime.vllm_plugin.step.decision import StepDecider, StepDecision

NAME = f"{__name__}.StepTimer"  # as vLLM takes it


class StepTimer(WorkerExtension):
    """Adds the times of steps to what is called over RPC."""

    def start_step_times(self) -> None:
        """Time each step from now on."""
        forward = self._dbo_forward()
        assert forward is not None, "steps are timed where they are planned"
        self._step_clock = StepClock(self, forward.decider)

    def take_step_times(self) -> list[Step]:
        """Return the steps since `start_step_times`, and time no more of them."""
        return self._step_clock.stop()


class StepClock:
    """Times `execute_model` of a worker and, within it, the decision whether and how to split; until it is stopped."""

    def __init__(self, worker: Any, decider: StepDecider) -> None:
        self._worker, self._decider = worker, decider
        self._execute, self._decide = worker.execute_model, decider.decide
        self._steps: list[Step] = []
        self._planning = 0.0
        self._decision: StepDecision | None = None
        worker.execute_model, decider.decide = self._time_step, self._time_decision

    def stop(self) -> list[Step]:
        """Let the worker be as it was, and return the steps."""
        del self._worker.execute_model, self._decider.decide
        return self._steps

    def _time_step(self, scheduler_output: Any) -> Any:
        start, cpu = time.perf_counter(), time.process_time()
        result = self._execute(scheduler_output)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        if self._decision is not None:  # without tokens there is no forward, and none
            batch, plan = list(scheduler_output.num_scheduled_tokens.values()), self._decision.plan
            is_split = not isinstance(plan, Decline)
            self._steps.append(Step(batch, seconds, cpu_seconds, self._planning, plan.expected is not None, is_split))
        self._decision = None
        return result

    def _time_decision(self, *arguments: Any) -> StepDecision:
        start = time.perf_counter()
        self._decision = self._decide(*arguments)
        self._planning = time.perf_counter() - start
        return self._decision
