"""Both executors: the plain loop, and the one that serving runs."""

from __future__ import annotations

from typing import Any, Protocol

from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor
from dbo_runtime.engine.generated_executor import GeneratedExecutor
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import Policy, alternate
from dbo_runtime.ir.program import Program

EXECUTORS: tuple[type[Executor], ...] = (Executor, GeneratedExecutor)


class Prepare(Protocol):
    """What the fixture `prepare` is."""

    def __call__(self, device: Any, program: Program, micro_batches: int = 2, policy: Policy = alternate) -> Executor:
        """Return an executor of a program's micro-batches."""


def make_prepare(kind: type[Executor]) -> Prepare:
    """Return what makes executors of one kind."""

    def prepare(device: Any, program: Program, micro_batches: int = 2, policy: Policy = alternate) -> Executor:
        programs = [program] * micro_batches
        return kind(lower(programs, policy(programs)), device, EventTable(device))

    return prepare
