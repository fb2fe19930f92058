"""Which split steps are recorded op by op, and who is given their timelines."""

from __future__ import annotations

from dataclasses import replace

from dbo_runtime.observe.timeline import Recorder, Timeline
from dbo_runtime.planner.search.bound import compute_bound_of
from dbo_runtime.schedule import Schedule
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics
from dbo_runtime.vllm_plugin.telemetry.traces import TraceFolder

PERIOD = 64  # of so many split steps one is recorded for the metrics: the one of number FIRST, then every so many
FIRST = 8
LATER = 16  # when its times are read: by then no device is still at it, so that reading waits for nothing


class Recording:
    """Records a split step where somebody wants to know: over RPC, for a trace, or as a sample for the metrics.

    Args:
        traces: where traces go; None for no traces.
        metrics: what samples are added to; None where another rank does that.

    Attributes:
        timeline: of the first split step after the last request.
    """

    def __init__(self, traces: TraceFolder | None = None, metrics: Metrics | None = None) -> None:
        self.timeline: Timeline | None = None
        self._requested = False
        self._traces = traces
        self._metrics = metrics
        self._steps = 0
        self._sample: Recorder | None = None

    def request(self) -> None:
        """Keep the timeline of the next split step, and forget the last one."""
        self.timeline, self._requested = None, True

    def begin(self) -> Recorder | None:
        """Return what the next split step is to be recorded with, or None."""
        self._steps += 1
        if self._sample is not None and self._steps % PERIOD == LATER:
            assert self._metrics is not None, "only metrics take samples"
            self._metrics.add_sample(self._sample.timeline())
            self._sample = None
        wanted = self._requested or (self._traces is not None and self._traces.is_open)
        return Recorder() if wanted or self._is_sample() else None

    def end(self, recorder: Recorder, schedule: Schedule) -> None:
        """Hand the timeline of a step that ran by *schedule* on. Whoever asked for it waits for the device."""
        if self._is_sample():
            self._sample = recorder
        traces = self._traces if self._traces is not None and self._traces.is_open else None
        if not self._requested and traces is None:
            return
        timeline = recorder.timeline()
        timeline = replace(timeline, bound=compute_bound_of(timeline, schedule))
        if self._requested:
            self.timeline, self._requested = timeline, False
        if traces is not None:
            traces.write(timeline)

    def _is_sample(self) -> bool:
        return self._metrics is not None and self._steps % PERIOD == FIRST
