"""Traces of served steps: `DBO_TRACE` names the folder, a file holds one split step on all ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from dbo_runtime.devices import Device
from dbo_runtime.errors import ConfigError
from dbo_runtime.events import EventTable
from dbo_runtime.executor import Executor
from dbo_runtime.observe.timeline import Recorder, Span, Timeline
from dbo_runtime.observe.trace import save_trace
from dbo_runtime.policies import sequential
from dbo_runtime.program import ProgramBuilder
from dbo_runtime.schedule import lower
from dbo_runtime.vllm_plugin.parallel.agreement import gather

BOOT = Path("/proc/sys/kernel/random/boot_id")  # hosts with the same one share the clock, network namespaces included
OPS, RUNS = 200, 5  # of the measurement of what recording costs


class TraceFolder:
    """Writes the first split steps, each as a file with a process for every rank, from the first rank.

    Args:
        path: the folder.
        steps: how many are written.
        group: vLLM's coordinator of the ranks that run a step together; all of them write the same steps.
        device: whose recording is measured.
        log: a structlog logger.
        stage: the name of the pipeline's stage; each writes files of its own, because it is at other steps meanwhile.
    """

    def __init__(self, path: str, steps: int, group: Any, device: Device, log: Any, stage: str | None = None) -> None:
        self._folder = Path(path)
        self._steps = steps
        self._group = group
        self._device = device
        self._log = log
        self._ending = f".{stage}.json" if stage else ".json"
        self._written = 0
        self._ops = 0
        self._seconds = 0.0

    @property
    def is_open(self) -> bool:
        """Whether more steps are to be written; the same on all ranks."""
        return self._written < self._steps

    def write(self, timeline: Timeline) -> None:
        """Write a step. Collective; ranks are put on one clock, exactly where they share it, by the time of day else.

        A file that cannot be written any more is an error in the log, not the end of the server.
        """
        start = time.perf_counter()
        said = gather(self._group, (_find_clock(), timeline.as_dict()))
        (boot, offset), _ = said[0]
        timelines = {
            f"rank {rank}": _shift(Timeline.from_dict(data), 0.0 if clock[0] == boot else clock[1] - offset)
            for rank, (clock, data) in enumerate(said)
        }
        self._written += 1
        if self._group.rank_in_group == 0:
            self._save(timelines)
        self._seconds += time.perf_counter() - start
        self._ops += len(timeline.spans)
        if not self.is_open:
            self._tell()

    def _save(self, timelines: dict[str, Timeline]) -> None:
        try:
            save_trace(timelines, self._folder / f"step-{self._written:06}{self._ending}")
        except ConfigError as error:
            self._log.error("a trace is lost", reason=str(error))

    def _tell(self) -> None:
        """Log once what tracing has cost."""
        recording = measure_recording(self._device)
        self._log.info(
            "traces are written",
            folder=str(self._folder),
            steps=self._written,
            recording=f"{recording * 1e6:.2f} us an op, {recording * self._ops / self._written * 1e3:.2f} ms a step",
            gathering_and_writing=f"{self._seconds / self._written * 1e3:.1f} ms a step",
        )


def measure_recording(device: Device) -> float:
    """Return the seconds that recording adds to issuing an op, measured with ops that do nothing."""
    builder = ProgramBuilder()
    value = builder.input("x")
    for number in range(OPS):
        value = builder.compute(f"op{number}", _pass_on, value)
    programs = (builder.build(value),)
    executor = Executor(lower(programs, sequential(programs)), device, EventTable(device))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(RUNS):
        for recorded, taken in seconds.items():
            start = time.perf_counter()
            executor.run([(None,)], instrument=Recorder() if recorded else None)
            taken.append(time.perf_counter() - start)
    return max(0.0, min(seconds[True]) - min(seconds[False])) / OPS


def _pass_on(value: Any) -> Any:
    return value


def _find_clock() -> tuple[str, float]:
    """Return whose clock this is, and what to add to it for the time of day."""
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    return boot, time.time() - time.perf_counter()


def _shift(timeline: Timeline, seconds: float) -> Timeline:
    if not seconds:
        return timeline
    return Timeline(tuple(_shift_span(span, seconds) for span in timeline.spans), timeline.bound)


def _shift_span(span: Span, seconds: float) -> Span:
    issued = None if span.issued is None else span.issued + seconds
    return span._replace(start=span.start + seconds, end=span.end + seconds, issued=issued)
