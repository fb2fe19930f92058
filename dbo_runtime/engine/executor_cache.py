"""The executors of a runtime. A schedule is proven safe, and its executor made, when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias, cast

from dbo_runtime.bounded import BoundedDict
from dbo_runtime.devices import Device
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor
from dbo_runtime.engine.generated_executor import GeneratedExecutor
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import get_policy
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.render import digest
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.ir.validate import validate, validate_collectives
from dbo_runtime.setting_values import name_policy

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

MAX_PLANS = 64  # number of executors that are kept: the latest

MakeExecutor: TypeAlias = Callable[[Schedule, Device, EventTable], Executor]


class ExecutorCache:
    """Makes executors, and keeps the latest.

    Args:
        device: runs the executors.
        log: gets a line for each new executor.
        ranks: number of ranks that run the same schedules, with collectives among them.
        events: event table of all executors.
        make: makes an executor.
    """

    def __init__(
        self,
        device: Device,
        log: FilteringBoundLogger,
        ranks: int,
        events: EventTable,
        make: MakeExecutor = GeneratedExecutor,
    ) -> None:
        self._device = device
        self._log = log
        self._ranks = ranks
        self._events = events
        self._make_executor = make
        self._executors: BoundedDict[str, Executor] = BoundedDict(MAX_PLANS)  # by the digests of their schedules
        self._known: BoundedDict[tuple[object, ...], Executor] = BoundedDict(MAX_PLANS)  # by policies and orders

    @property
    def size_and_capacity(self) -> tuple[int, int]:
        """Number of executors, and the most that are kept."""
        return len(self._executors), self._executors.max_size

    def forget_orders(self) -> None:
        """Forget which order has which schedule. With other costs, the same name may mean another order."""
        self._known.clear()

    def clear(self) -> None:
        """Forget all executors."""
        self._known.clear()
        self._executors.clear()

    def get_by_policy(self, program: Program, micro_batches: int, policy: tuple[str, int]) -> Executor:
        """Return the executor of a policy's schedule for micro-batches of one program; make it if it is new.

        Raises:
            ScheduleError: if the schedule is not safe.
        """
        executor = self._known.get(key := (policy, micro_batches, program.lanes))
        if executor is None:
            programs = (program,) * micro_batches
            followed = ("alternate", 0) if policy[0] == "optimal" else policy
            executor = self._make(lower(programs, get_policy(*policy)(programs)), name_policy(*followed))
            self._known[key] = executor
        return executor

    def get_by_name(self, name: str, micro_batches: int, schedule: Schedule) -> Executor:
        """Return the executor of *schedule*, which belongs to the planner's order *name*; make it if it is new.

        Raises:
            ScheduleError: if the schedule is not safe.
        """
        executor = self._known.get(key := (name, micro_batches))
        if executor is None:
            self._known[key] = executor = self._make(schedule, name)
        return executor

    def _make(self, schedule: Schedule, policy: str) -> Executor:
        name = digest(schedule)
        known = self._executors.get(name)
        if known is not None:
            return known
        validate(schedule)
        if self._ranks > 1:
            validate_collectives(schedule)
        self._executors[name] = executor = self._make_executor(schedule, self._device, self._events)
        nano_batches = schedule.programs[0].nano_batches
        parts = {"nano_batches": nano_batches} if nano_batches else {"micro_batches": len(schedule.programs)}
        self._log.info(
            "new plan",
            **parts,
            policy=policy,
            instructions=len(schedule.instructions),
            waits=sum(len(instruction.waits) for instruction in schedule.instructions),
            digest=name,
        )
        return executor


def make_sanitized(schedule: Schedule, device: Device, events: EventTable) -> Executor:
    """Make an executor that checks every access of its ops to memory (`DBO_CHECK=races`).

    It is part of the laboratory, so it is imported only when it is asked for.
    """
    sanitizer = import_module("dbo_runtime.lab.sanitizer.executor")
    return cast("Executor", sanitizer.SanitizedExecutor(schedule, device, events))
