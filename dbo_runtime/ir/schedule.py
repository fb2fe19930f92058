"""Schedules: the instructions of all micro-batches in issue order. `lowering` derives them from issue orders."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dbo_runtime.ir.op import COMPUTE, Op
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.values import Value


class Issue(NamedTuple):
    """One op of one micro-batch: the micro-batch's index, and the op's index in its program."""

    micro_batch: int
    position: int


class Slot(NamedTuple):
    """One value of one micro-batch."""

    micro_batch: int
    value: Value


@dataclass(frozen=True, slots=True)
class Instruction:
    """The host's work for one op: wait, free values, launch, record."""

    issue: Issue
    op: Op
    waits: tuple[Issue, ...] = ()
    records: bool = False
    frees: tuple[Slot, ...] = ()

    @property
    def label(self) -> str:
        """The op's label with its micro-batch, such as `L3.attention/1`."""
        return f"{self.op.label}/{self.issue.micro_batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Instructions in issue order.

    Attributes:
        programs: one per micro-batch.
        instructions: the instructions in issue order.
        forks: lanes that, before their first op, must wait for the work launched on `compute` before the schedule.
        joins: ops that `compute` waits for at the end, so that it is ordered after every lane.
    """

    programs: tuple[Program, ...]
    instructions: tuple[Instruction, ...]
    forks: tuple[str, ...] = ()
    joins: tuple[Issue, ...] = ()

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes of all programs, `compute` first."""
        return list_lanes(self.programs)

    def list_contexts(self) -> list[int]:
        """Return the number of the context that each instruction runs in [instructions].

        Each micro-batch has a context. If its program is cut into nano-batches, a context for each of these follows.
        """
        first = list_first_contexts(self.programs)
        return [first[each.issue.micro_batch] + each.op.context for each in self.instructions]


def list_lanes(programs: Sequence[Program]) -> tuple[str, ...]:
    """Return the lanes of all programs without duplicates, `compute` first."""
    return tuple(dict.fromkeys(lane for program in programs for lane in (COMPUTE, *program.lanes)))


def list_first_contexts(programs: Sequence[Program]) -> list[int]:
    """Return the number of each micro-batch's first context; see `Schedule.list_contexts`."""
    sizes = (1 + program.nano_batches for program in programs)
    return [*itertools.accumulate(sizes, initial=0)][:-1]
