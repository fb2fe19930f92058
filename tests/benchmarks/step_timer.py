"""A worker extension that times every step, for vLLM's `--worker-extension-cls`; see `bench_step_time.py`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.extension import WorkerExtension
from tests.benchmarks.timed_steps import Step

if TYPE_CHECKING:
    from dbo_runtime.engine.execution_plan import ExecutionPlan
    from dbo_runtime.engine.runtime import MicroBatchRuntime
    from dbo_runtime.vllm_plugin.step.decision import StepDecider
    from dbo_runtime.vllm_plugin.step.step_decision import StepDecision

NAME = f"{__name__}.StepTimer"  # as vLLM takes it


class StepTimer(WorkerExtension):
    """Adds the times of steps to what is called over RPC."""

    def start_step_times(self, plans_all: bool) -> None:
        """Time each step from now on, and plan each, however small, if *plans_all*."""
        forward = self._dbo_forward()
        assert forward is not None, "steps are timed where they are planned"
        self._step_clock = StepClock(self, forward.decider, forward.runtime, plans_all)

    def take_step_times(self) -> list[Step]:
        """Return the steps since `start_step_times`, and time no more of them."""
        return self._step_clock.stop()


class StepClock:
    """Times `execute_model` of a worker and, within it, the decision whether and how to split; until it is stopped."""

    def __init__(self, worker: Any, decider: StepDecider, runtime: MicroBatchRuntime, plans_all: bool) -> None:
        self._replaced = [(worker, "execute_model"), (decider, "decide"), (runtime, "plan")]
        self._execute, self._decide, self._make_plan = (getattr(owner, name) for owner, name in self._replaced)
        self._steps: list[Step] = []
        self._planning = 0.0, 0.0
        self._plan: ExecutionPlan | Decline | None = None
        self._is_planned = False
        worker.execute_model, decider.decide, runtime.plan = self._time_step, self._time_decision, self._note_plan
        if plans_all:
            runtime.decline_early = _decline_none
            self._replaced.append((runtime, "decline_early"))

    def stop(self) -> list[Step]:
        """Let all be as it was, and return the steps."""
        for owner, name in self._replaced:
            delattr(owner, name)
        return self._steps

    def _time_step(self, scheduler_output: Any) -> Any:
        self._plan, self._is_planned = None, False
        start, cpu_start = time.perf_counter(), time.process_time()
        result = self._execute(scheduler_output)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        if self._plan is not None:  # without tokens there is no forward
            batch = list(scheduler_output.num_scheduled_tokens.values())
            is_split = not isinstance(self._plan, Decline)
            self._steps.append(Step(batch, seconds, cpu_seconds, *self._planning, self._is_planned, is_split))
        return result

    def _time_decision(self, *arguments: Any) -> StepDecision:
        start, cpu_start = time.perf_counter(), time.thread_time()
        decision = self._decide(*arguments)
        self._planning = time.perf_counter() - start, time.thread_time() - cpu_start
        self._plan = decision.plan
        return decision

    def _note_plan(self, *arguments: Any) -> ExecutionPlan | Decline:
        self._is_planned = True
        return self._make_plan(*arguments)


def _decline_none(_: int) -> None:
    """Decline no step by its size."""
