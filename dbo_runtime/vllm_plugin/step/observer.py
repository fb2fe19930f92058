"""Observe steps: time them, count them in metrics, and let the planner learn from them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from dbo_runtime.decline import Decline
from dbo_runtime.devices import Timer
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics
from dbo_runtime.vllm_plugin.telemetry.sampling import Recording

MAX_TIMED_STEPS = 64  # most steps whose times are still to be read; of more, the oldest are dropped


class StepTime(NamedTuple):
    """Measured seconds of a step that ran `split` or `unsplit`, and expected ones if there was a prediction."""

    mode: str
    expected: float | None
    seconds: float


class StepObserver:
    """Observes the steps of one model while it serves.

    Args:
        runtime: runs the steps; its planner learns from them.
        agreement: agreement of all ranks that communicate in a step.
        recording: records split steps.
        metrics: counts steps; None on ranks that do not count steps.

    Attributes:
        last_step: predicted and measured seconds of the last step.
    """

    def __init__(
        self,
        runtime: MicroBatchRuntime,
        agreement: Agreement,
        recording: Recording | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.recording = Recording() if recording is None else recording
        self.metrics = metrics
        self.last_step: StepTime | None = None
        self._runtime = runtime
        self._agreement = agreement
        self._timers: deque[tuple[ExecutionPlan | Decline, Timer]] = deque(maxlen=MAX_TIMED_STEPS)

    def copy_for(self, runtime: MicroBatchRuntime) -> StepObserver:
        """Return an observer for another runtime. It has observed nothing yet, and has no metrics."""
        return StepObserver(runtime, self._agreement)

    @property
    def size_and_capacity(self) -> tuple[int, int]:
        """Number of steps whose times are still to be read, and the most that are kept."""
        return len(self._timers), MAX_TIMED_STEPS

    def start(self) -> Timer:
        """Start the timer of a step."""
        return self._runtime.device.start_timer()

    def finish(self, plan: ExecutionPlan | Decline, timer: Timer, planning: float) -> None:
        """Count a step, and learn from all times measured by now; *planning* are the seconds of the step's decision."""
        timer.stop()
        self._timers.append((plan, timer))
        self._learn()
        if self.metrics is not None:
            self.metrics.count_step(plan)
            self.metrics.count_planning(planning)

    def _learn(self) -> None:
        """Compare measured with predicted times. From time to time, exchange them with the other ranks.

        A device may be behind its host, so the time that is known now may be that of an earlier step. Every rank counts
        every step, measured or not, so all ranks exchange at the same step.
        """
        planner = self._runtime.planner
        while self._timers and (seconds := self._timers[0][1].read()) is not None:
            ran, _ = self._timers.popleft()
            mode, expected = UNSPLIT if isinstance(ran, Decline) else SPLIT, ran.expected
            self.last_step = StepTime(mode, expected, seconds)
            if planner is not None and expected is not None:
                planner.memory.observe(mode, expected, seconds, ran.trial_class)
            if self.metrics is not None and expected is not None:
                self.metrics.count_time(mode, expected, seconds)
        if planner is not None and planner.memory.correction.count():
            planner.memory.apply(self._agreement.gather(planner.memory.propose()))
