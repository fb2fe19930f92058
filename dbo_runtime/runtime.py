"""One object that owns everything a model's overlap needs: lanes, events, plans, counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dbo_runtime.batch import Batch, BatchSlice, Decline, decide, slice_batch
from dbo_runtime.config import RuntimeConfig, name_policy
from dbo_runtime.devices import Device
from dbo_runtime.errors import get_context
from dbo_runtime.events import EventTable
from dbo_runtime.executor import Enter, Executor, Inputs, Outputs, stay
from dbo_runtime.observe.instrument import Instrument
from dbo_runtime.policies import find_policy
from dbo_runtime.program import Program
from dbo_runtime.ranks import RankPlan, validate_ranks
from dbo_runtime.render import digest
from dbo_runtime.schedule import lower
from dbo_runtime.validate import validate


@dataclass(frozen=True, slots=True)
class Plan:
    """How one batch will run: its slices, and the executor of their schedule. *digest* names the schedule."""

    slices: tuple[BatchSlice, ...]
    executor: Executor
    digest: str


@dataclass(slots=True)
class Statistics:
    """What became of the steps so far."""

    split: int = 0
    micro_batches: int = 0
    declined: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {"split": self.split, "micro_batches": self.micro_batches, "declined": dict(self.declined)}


class MicroBatchRuntime:
    """Plans batches and runs them in overlapped micro-batches.

    Args:
        program: the ops of one micro-batch; the same for each.
        device: where they run.
        config: the settings; may be replaced between steps, on all ranks alike.
        log: a structlog logger; told of each new plan and of the first decline of each reason, never of a step.
        ranks: how many ranks run the same plans, and meet in their collectives.
    """

    def __init__(self, program: Program, device: Device, config: RuntimeConfig, log: Any, ranks: int = 1) -> None:
        self.program = program
        self.device = device
        self.config = config
        self.statistics = Statistics()
        self._log = log
        self._ranks = ranks
        self._events = EventTable(device)
        self._executors: dict[tuple[tuple[str, int], int], tuple[Executor, str]] = {}

    def plan(self, batch: Batch, cuts: Sequence[int] | None = None, agreed: bool = False) -> Plan | Decline:
        """Decide how to run *batch*; with *cuts* (token offsets), split just there whatever the settings say.

        *agreed* cuts are those that other ranks count on; see `slice_batch`.

        A decline is only returned; whoever acts on it reports it with `decline`.

        Raises:
            SplitError: if *cuts* are given and impossible.
        """
        slices = decide(batch, self.config) if cuts is None else slice_batch(batch, cuts, agreed)
        if isinstance(slices, Decline):
            return slices
        if len(slices) < 2:
            return Decline("nowhere to cut", "no cuts were given")
        executor, name = self._find_executor(len(slices))
        return Plan(slices, executor, name)

    def run(self, plan: Plan, inputs: Inputs, enter: Enter = stay, instrument: Instrument | None = None) -> Outputs:
        """Run a plan; see `Executor.run`."""
        try:
            outputs = plan.executor.run(inputs, enter, instrument)
        except Exception as error:
            # Hosts pass errors on by their text alone, without notes: where it happened is told here.
            self._log.error("a split step failed", error=repr(error), where=get_context(error))
            raise
        self.statistics.split += 1
        self.statistics.micro_batches += len(plan.slices)
        return outputs

    def decline(self, decline: Decline) -> None:
        """Count a step that runs whole; log the first of each reason."""
        if not self.statistics.declined[decline.reason]:
            self._log.info("step not split, runs whole", reason=decline.reason, detail=decline.detail or None)
        self.statistics.declined[decline.reason] += 1

    def close(self) -> None:
        """End the device's threads. Plans made so far cannot be run any more."""
        self._executors.clear()
        self.device.close()

    def _find_executor(self, micro_batches: int) -> tuple[Executor, str]:
        policy = self.config.policy
        key = policy, micro_batches
        if key not in self._executors:
            programs = (self.program,) * micro_batches
            schedule = lower(programs, find_policy(*policy)(programs))
            if self._ranks > 1:
                validate_ranks([RankPlan(schedule)] * 2)  # all ranks have the same: two stand for any number
            else:
                validate(schedule)
            name = digest(schedule)
            self._executors[key] = Executor(schedule, self.device, self._events), name
            waits = sum(len(step.waits) for step in schedule.steps)
            self._log.info(
                "new plan",
                micro_batches=micro_batches,
                policy=name_policy(*policy),
                steps=len(schedule.steps),
                waits=waits,
                digest=name,
            )
        return self._executors[key]
