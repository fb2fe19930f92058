"""The critical paths of a schedule. They predict when it ends, for any durations, without simulating it.

As long as lanes do not slow each other down, an op starts once three things have happened: the host has issued it, its
lane is free, and the ops that it waits for have ended. So the end of a schedule is a maximum over all paths through it,
of the sum of the durations on the path. This is a polynomial in the max-plus algebra (Baccelli, Cohen, Olsder and
Quadrat 1992). Layers repeat, so only about ten of all paths are critical for any durations that occur. They are found
by simulating the schedule for many vectors of durations at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dbo_runtime.ir.op import COMPUTE
from dbo_runtime.ir.schedule import Issue, Schedule
from dbo_runtime.planner.online.durations import DurationLayout, Vector

Numbers = NDArray[np.int64]

Booleans = NDArray[np.bool_]

_ISSUED, _LANE, _WAITED = range(3)  # the event that an instruction had to wait for longest
_NOTHING = -1


@dataclass(frozen=True, slots=True)
class _Host:
    """The moment at which the host issues an instruction: some issues after another instruction has started or ended.

    Attributes:
        after: number of that other instruction; `_NOTHING` for the beginning of the schedule.
        at_end: whether the host waits until that instruction has ended, and not only until it has started.
        issues: number of issues from then on, including the issue of this instruction.
    """

    after: int = _NOTHING
    at_end: bool = False
    issues: int = 1


@dataclass(frozen=True, slots=True)
class _Node:
    """An instruction, with the places of its durations and the instructions that it starts after.

    Attributes:
        duration, credit: places in a vector of durations; ops that do not communicate have no credit.
        before: number of the instruction before it on its lane; `_NOTHING` for the first.
        waits: numbers of the instructions that it waits for.
        host: moment at which the host issues it.
    """

    duration: int
    credit: int | None
    before: int
    waits: tuple[int, ...]
    host: _Host


class _Run(NamedTuple):
    """A simulation of a schedule, for many steps at once; all arrays are [nodes, steps].

    Attributes:
        ends: seconds at which each instruction ends.
        causes: number of the instruction after which it started.
        kinds: reason for which it did not start earlier: `_ISSUED`, `_LANE` or `_WAITED`.
        credited: whether it ended later because its lane had not been idle for the seconds of its credit.
    """

    ends: Vector
    causes: Numbers
    kinds: Numbers
    credited: Booleans


class CriticalPaths:
    """Finds the critical paths of one schedule.

    Args:
        schedule: schedule whose micro-batches all run one program, whole or cut into nano-batches.
        layout: layout of a vector of durations.
        host_computes: whether the compute lane is the issuing thread; see `HostCost`.
    """

    def __init__(self, schedule: Schedule, layout: DurationLayout, host_computes: bool = False) -> None:
        self._layout = layout
        self._nodes: list[_Node] = []
        numbers: dict[Issue, int] = {}
        last_on: dict[str, int] = {}
        host = _Host()
        for number, (instruction, part) in enumerate(zip(schedule.instructions, schedule.list_contexts(), strict=True)):
            op = instruction.op
            waits = tuple(numbers[issue] for issue in instruction.waits)
            duration, credit = layout.find_op(part, op.name), layout.find_credit(part, op.name)
            self._nodes.append(_Node(duration, credit, last_on.get(op.lane, _NOTHING), waits, host))
            numbers[instruction.issue] = last_on[op.lane] = number
            if host_computes and op.lane == COMPUTE:
                host = _Host(number, at_end=True)
            elif op.host_sync:
                host = _Host(number)
            else:
                host = _Host(host.after, host.at_end, host.issues + 1)

    def find(self, durations: Vector) -> tuple[Vector, Vector]:
        """Return when the schedule ends in each step [steps], and the critical path of each step [steps, durations].

        *durations* are the durations of steps [steps, durations]. A path is the number of times that each duration is
        on it. The end of a step is the product of its path and its durations. For any other durations, the product is a
        lower bound of the end.
        """
        run = self._run(durations.T)
        return run.ends.max(axis=0), self._walk_back(run)

    def _run(self, durations: Vector) -> _Run:
        """Simulate the schedule for all steps at once; *durations* are [durations, steps]."""
        shape = len(self._nodes), durations.shape[1]
        starts, ends = np.empty(shape), np.empty(shape)
        causes, kinds, credited = np.full(shape, _NOTHING), np.full(shape, _ISSUED), np.zeros(shape, dtype=bool)
        issue, handover = durations[self._layout.issue], durations[self._layout.handover]
        for number, node in enumerate(self._nodes):
            start = issue * node.host.issues
            if node.host.after != _NOTHING:
                start += (ends if node.host.at_end else starts)[node.host.after]
            cause, kind = causes[number], kinds[number]
            if node.before != _NOTHING:
                _replace_later(start, ends[node.before], cause, node.before, kind, _LANE)
            for other in node.waits:
                _replace_later(start, ends[other] + handover, cause, other, kind, _WAITED)
            starts[number] = start
            if node.credit is not None and node.before != _NOTHING:
                full = ends[node.before] + durations[node.credit]
                np.greater(full, start, out=credited[number])
                start = np.maximum(start, full)
            ends[number] = start + durations[node.duration]
        return _Run(ends, causes, kinds, credited)

    def _walk_back(self, run: _Run) -> Vector:
        """Return how often each duration is on the path to the instruction that ends last [steps, durations]."""
        last = run.ends.argmax(axis=0)
        counts = np.zeros((len(last), self._layout.size))
        duration = np.array([node.duration for node in self._nodes])
        credit = np.array([_NOTHING if node.credit is None else node.credit for node in self._nodes])
        before = np.array([node.before for node in self._nodes])
        after, at_end, issues = (
            np.array([getattr(node.host, name) for node in self._nodes]) for name in ("after", "at_end", "issues")
        )
        node, ended, step = last, np.ones(len(last), dtype=bool), np.arange(len(last))
        while len(step):
            counts[step[ended], duration[node[ended]]] += 1
            kind = run.kinds[node, step]
            credited = ended & run.credited[node, step]
            waited, issued = ~credited & (kind == _WAITED), ~credited & (kind == _ISSUED)
            counts[step[credited], credit[node[credited]]] += 1
            counts[step[waited], self._layout.handover] += 1
            counts[step[issued], self._layout.issue] += issues[node[issued]]
            ended = ~issued | at_end[node]
            node = np.select([credited, issued], [before[node], after[node]], run.causes[node, step])
            goes_on = node != _NOTHING
            node, ended, step = node[goes_on], ended[goes_on], step[goes_on]
        return counts


def list_different(paths: Vector) -> Vector:
    """Return *paths* [steps, durations] without repetitions [paths, durations]."""
    return np.unique(paths, axis=0)


def _replace_later(start: Vector, other: Vector, cause: Numbers, number: int, kind: Numbers, how: int) -> None:
    """Where *other* is not before *start*, set *start* to it, *cause* to *number* and *kind* to *how*; all [steps]."""
    later = other >= start
    np.copyto(start, other, where=later)
    cause[later] = number
    kind[later] = how
