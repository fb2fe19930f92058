"""Write traces of served steps to the folder `DBO_TRACE`. A file holds one split step on all ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dbo_runtime.devices import Device
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor
from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import sequential
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.observe.timeline import Recorder, Span, Timeline
from dbo_runtime.observe.trace import save_trace
from dbo_runtime.vllm_plugin.parallel.agreement import gather

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger
    from vllm.distributed.parallel_state import GroupCoordinator

T = TypeVar("T")

BOOT_ID = Path(
    "/proc/sys/kernel/random/boot_id"
)  # ranks with equal values share a clock, also across network namespaces
OVERHEAD_OPS, OVERHEAD_RUNS = 200, 5  # for measuring the cost of recording


class TraceFolder:
    """Writes the first split steps on the first rank, each to a file with one process per rank.

    Args:
        path: the folder.
        steps: number of steps to write.
        group: vLLM's coordinator of the ranks that run a step together; all of them write the same steps.
        device: the device on which the cost of recording is measured.
        log: the rank's logger.
        stage: name of the pipeline stage; each stage writes its own files, because stages run different steps at a
            time.
    """

    def __init__(
        self,
        path: str,
        steps: int,
        group: GroupCoordinator,
        device: Device,
        log: FilteringBoundLogger,
        stage: str | None = None,
    ) -> None:
        self._folder = Path(path)
        self._steps = steps
        self._group = group
        self._device = device
        self._log = log
        self._ending = f".{stage}.json" if stage else ".json"
        self._written = 0
        self._lost = 0
        self._ops = 0
        self._seconds = 0.0

    @property
    def is_open(self) -> bool:
        """Whether more steps are to be written. Equal on all ranks."""
        return self._written < self._steps

    def write(self, timeline: Timeline) -> None:
        """Write a step. Collective.

        Ranks are put on one clock: exactly on a shared host, otherwise by the time of day. If files cannot be written,
        log the first error and go on.
        """
        start = time.perf_counter()
        gathered = gather(self._group, (_read_clock(), timeline.as_dict()))
        (boot, offset), _ = gathered[0]
        timelines = {
            f"rank {rank}": _shift(Timeline.from_dict(data), 0.0 if clock[0] == boot else clock[1] - offset)
            for rank, (clock, data) in enumerate(gathered)
        }
        self._written += 1
        if self._group.rank_in_group == 0:
            self._save(timelines)
        self._seconds += time.perf_counter() - start
        self._ops += len(timeline.spans)
        if not self.is_open:
            self._log_cost()

    def _save(self, timelines: dict[str, Timeline]) -> None:
        try:
            save_trace(timelines, self._folder / f"step-{self._written:06}{self._ending}")
        except ConfigError as error:
            self._lost += 1
            if self._lost == 1:
                self._log.error("a trace is lost; further ones are tried, and counted at the end", reason=str(error))

    def _log_cost(self) -> None:
        """Log the cost of tracing."""
        recording = measure_recording(self._device)
        self._log.info(
            "traces are written",
            folder=str(self._folder),
            steps=self._written - self._lost,
            lost=self._lost or None,
            recording=f"{recording * 1e6:.2f} us an op, {recording * self._ops / self._written * 1e3:.2f} ms a step",
            gathering_and_writing=f"{self._seconds / self._written * 1e3:.1f} ms a step",
        )


def measure_recording(device: Device) -> float:
    """Return the seconds that recording adds to issuing an op, measured with empty ops."""
    builder = ProgramBuilder()
    value = builder.input("x")
    for number in range(OVERHEAD_OPS):
        value = builder.compute(f"op{number}", _pass_on, value)
    programs = (builder.build(value),)
    executor = Executor(lower(programs, sequential(programs)), device, EventTable(device))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(OVERHEAD_RUNS):
        for recorded, taken in seconds.items():
            start = time.perf_counter()
            executor.run([(None,)], instrument=Recorder() if recorded else None)
            taken.append(time.perf_counter() - start)
    return max(0.0, min(seconds[True]) - min(seconds[False])) / OVERHEAD_OPS


def _pass_on(value: T) -> T:
    return value


def _read_clock() -> tuple[str, float]:
    """Return the id of this host's clock, and the seconds to add to it for the time of day."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return boot, time.time() - time.perf_counter()


def _shift(timeline: Timeline, seconds: float) -> Timeline:
    if not seconds:
        return timeline
    return replace(timeline, spans=tuple(_shift_span(span, seconds) for span in timeline.spans))


def _shift_span(span: Span, seconds: float) -> Span:
    issued = None if span.issued is None else span.issued + seconds
    return span._replace(start=span.start + seconds, end=span.end + seconds, issued=issued)
