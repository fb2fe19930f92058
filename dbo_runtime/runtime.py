"""One object that owns everything a model's overlap needs: lanes, events, plans, counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dbo_runtime.batch import Batch, BatchSlice, decide, decide_data_parallel, decline_early, slice_batch
from dbo_runtime.config import RuntimeConfig, name_policy
from dbo_runtime.decline import Decline
from dbo_runtime.devices import Device
from dbo_runtime.errors import get_context
from dbo_runtime.events import EventTable
from dbo_runtime.executor import Enter, Executor, Inputs, Outputs, stay
from dbo_runtime.observe.instrument import Instrument
from dbo_runtime.planner.online.planner import Planner, SplitChoice
from dbo_runtime.policies import get_policy
from dbo_runtime.program import SIDE, Program
from dbo_runtime.ranks import RankPlan, validate_ranks
from dbo_runtime.render import digest
from dbo_runtime.schedule import Schedule, lower
from dbo_runtime.validate import validate


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How one batch will run.

    Attributes:
        slices: one per micro-batch.
        executor: of their schedule.
        digest: names the schedule.
        expected: seconds that the step was predicted to take, where it was.
    """

    slices: tuple[BatchSlice, ...]
    executor: Executor
    digest: str
    expected: float | None = None


@dataclass(frozen=True, slots=True)
class DataParallelSplit:
    """How all data parallel ranks split a step.

    Attributes:
        sizes: tokens of every rank in each micro-batch [micro-batches][ranks].
        choice: with the issue order, if it was planned from costs.
    """

    sizes: tuple[tuple[int, ...], ...]
    choice: SplitChoice | None = None

    @property
    def name(self) -> str:
        """What the plan is called before it is made, the same on all ranks."""
        return "by the settings" if self.choice is None else self.choice.order.name


@dataclass(slots=True)
class Statistics:
    """What became of the steps so far: *beside* are those that were not split, but had ops on `side`."""

    split: int = 0
    beside: int = 0
    micro_batches: int = 0
    declined: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {
            "split": self.split,
            "beside": self.beside,
            "micro_batches": self.micro_batches,
            "declined": dict(self.declined),
        }


class MicroBatchRuntime:
    """Plans batches and runs them in overlapped micro-batches.

    Args:
        program: the ops of one micro-batch; the same for each, but for those on `side`, which are there only where the
            settings or costs say so.
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
        self._planner: Planner | None = None
        self._named: dict[tuple[object, ...], str] = {}
        self._executors: dict[str, Executor] = {}

    @property
    def planner(self) -> Planner | None:
        """What plans by costs; None where there are none."""
        return self._planner

    @planner.setter
    def planner(self, planner: Planner | None) -> None:
        self._planner = planner
        self._named.clear()  # by other costs, an order of the same name may be another

    @property
    def forces_side(self) -> bool:
        """Whether ops are on `side` in every step, in those that are not split, too."""
        return self.config.side == "on" and self.config.mode != "off" and SIDE in self.program.lanes

    def decline_early(self, tokens: int) -> Decline | None:
        """Return why a step of *tokens* tokens runs whole whatever is in it, so that nobody need look at what is."""
        if self.planner is None or self.config.mode == "off":
            return decline_early(tokens, self.config)
        return self.planner.decline_early(tokens) if self.config.mode == "auto" else None

    def plan(
        self, batch: Batch, cuts: Sequence[int] | None = None, shared: DataParallelSplit | None = None
    ) -> ExecutionPlan | Decline:
        """Decide how to run *batch*; with *cuts* (token offsets), split just there whatever the settings say.

        Cuts that are part of what *shared* says are those that other ranks count on; see `slice_batch`.

        A decline is only returned; whoever acts on it reports it with `decline`.

        Raises:
            SplitError: if *cuts* are given and impossible.
        """
        choice = None if shared is None else shared.choice
        if cuts is not None:
            slices: tuple[BatchSlice, ...] | Decline = slice_batch(batch, cuts, agreed=shared is not None)
        elif self.planner is None or self.config.mode == "off":
            slices = decide(batch, self.config)
        else:
            chosen = self.planner.choose(batch, self.config)
            if isinstance(chosen, Decline):
                return chosen
            slices, choice = chosen.slices, chosen
        if isinstance(slices, Decline):
            return slices
        if len(slices) < 2 and choice is None and not self.forces_side:
            return Decline("nowhere to cut", "no cuts were given")
        name = self._find_executor(len(slices), choice)
        return ExecutionPlan(slices, self._executors[name], name, None if choice is None else choice.prediction.split)

    def plan_data_parallel(self, tokens: Sequence[int]) -> DataParallelSplit | Decline:
        """Decide for all data parallel ranks: a pure function of *tokens* of each [ranks]."""
        if self.planner is None or self.config.mode == "off":
            sizes = decide_data_parallel(tokens, self.config)
            return sizes if isinstance(sizes, Decline) else DataParallelSplit(sizes)
        chosen = self.planner.choose_data_parallel(tokens, self.config)
        return chosen if isinstance(chosen, Decline) else DataParallelSplit(chosen.sizes, chosen)

    def run(
        self, plan: ExecutionPlan, inputs: Inputs, enter: Enter = stay, instrument: Instrument | None = None
    ) -> Outputs:
        """Run a plan; see `Executor.run`."""
        try:
            outputs = plan.executor.run(inputs, enter, instrument)
        except Exception as error:
            # Hosts pass errors on by their text alone, without notes: where it happened is told here.
            self._log.error("a split step failed", error=repr(error), where=get_context(error))
            raise
        if len(plan.slices) > 1:
            self.statistics.split += 1
            self.statistics.micro_batches += len(plan.slices)
        else:
            self.statistics.beside += 1
        return outputs

    def decline(self, decline: Decline) -> None:
        """Count a step that runs whole; log the first of each reason."""
        if not self.statistics.declined[decline.reason]:
            self._log.info("step not split, runs whole", reason=decline.reason, detail=decline.detail or None)
        self.statistics.declined[decline.reason] += 1

    def close(self) -> None:
        """End the device's threads. Plans made so far cannot be run any more."""
        self._named.clear()
        self._executors.clear()
        self.device.close()

    def _find_executor(self, micro_batches: int, choice: SplitChoice | None) -> str:
        """Return the digest of the schedule, whose executor is made if it is new."""
        policy = self.config.policy
        key = (policy if choice is None else choice.order.name), micro_batches, self.forces_side
        if key not in self._named:
            if choice is not None:
                schedule, name = choice.order.schedule, choice.order.name
            else:
                programs = (self.program if self.forces_side else self.program.fold_side(),) * micro_batches
                schedule = lower(programs, get_policy(*policy)(programs))
                name = name_policy(*(("alternate", 0) if policy[0] == "optimal" else policy))
            self._named[key] = self._make_executor(schedule, name)
        return self._named[key]

    def _make_executor(self, schedule: Schedule, policy: str) -> str:
        name = digest(schedule)
        if name in self._executors:
            return name
        if self._ranks > 1:
            validate_ranks([RankPlan(schedule)] * 2)  # all ranks have the same: two stand for any number
        else:
            validate(schedule)
        self._executors[name] = Executor(schedule, self.device, self._events)
        self._log.info(
            "new plan",
            micro_batches=len(schedule.programs),
            policy=policy,
            steps=len(schedule.instructions),
            waits=sum(len(step.waits) for step in schedule.instructions),
            digest=name,
        )
        return name
