"""Record split steps op by op: on request, for traces, and as samples for metrics."""

from __future__ import annotations

from dataclasses import replace

from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.observe.timeline import Recorder, Timeline
from dbo_runtime.planner.search.bound import compute_bound_of
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics
from dbo_runtime.vllm_plugin.telemetry.traces import TraceFolder

PERIOD_STEPS = 64  # steps between two samples for metrics
SAMPLED_STEP = 8  # step of each period whose ops are recorded
READ_STEP = 16  # step of each period that reads the sample's times; the device has ended by then, so nothing waits


class Recording:
    """Records a split step if it is requested (over RPC), traced, or sampled for metrics.

    Args:
        traces: folder that traces are written to; None for no traces.
        metrics: counts that samples are added to; None on ranks that do not count.

    Attributes:
        timeline: timeline of the first split step after the last request.
    """

    def __init__(self, traces: TraceFolder | None = None, metrics: Metrics | None = None) -> None:
        self.timeline: Timeline | None = None
        self._requested = False
        self._traces = traces
        self._metrics = metrics
        self._steps = 0
        self._sample: Recorder | None = None

    def request(self) -> None:
        """Keep the timeline of the next split step. Drop the last one."""
        self.timeline, self._requested = None, True

    def begin(self) -> Recorder | None:
        """Return a recorder for the next split step, or None if it is not recorded."""
        self._steps += 1
        if self._sample is not None and self._steps % PERIOD_STEPS == READ_STEP:
            assert self._metrics is not None, "only metrics take samples"
            self._metrics.add_sample(self._sample.timeline())
            self._sample = None
        is_read = self._requested or (self._traces is not None and self._traces.is_open)
        return Recorder() if is_read or self._is_sample() else None

    def end(self, recorder: Recorder, schedule: Schedule, planning: float) -> None:
        """Deliver the timeline of a step that ran by *schedule*; *planning* is the seconds that its decision took.

        Waits for the device unless the step is only a sample.
        """
        if self._is_sample():
            self._sample = recorder
        traces = self._traces if self._traces is not None and self._traces.is_open else None
        if not self._requested and traces is None:
            return
        timeline = recorder.timeline()
        timeline = replace(timeline, bound=compute_bound_of(timeline, schedule), planning=planning)
        if self._requested:
            self.timeline, self._requested = timeline, False
        if traces is not None:
            traces.write(timeline)

    def _is_sample(self) -> bool:
        return self._metrics is not None and self._steps % PERIOD_STEPS == SAMPLED_STEP
