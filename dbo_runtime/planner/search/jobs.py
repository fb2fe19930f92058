"""Micro-batches as jobs of a job shop: programs reduced to lanes, seconds and dependencies, ready for a search.

Lanes are the machines of the job shop. Unlike there, a job's operations need not form a chain: shared experts run
concurrently with the dispatch of the same micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.lowering import Dependencies, get_ordered_before
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Issue, list_lanes


@dataclass(frozen=True, slots=True)
class Operation:
    """One op of a job.

    Attributes:
        lane: index of the lane.
        seconds: duration in seconds.
        after: positions of the job's earlier operations on other lanes that must have ended.
        follows: (job, position) of the `ordered` operation that must come before; None if there is none.
        buffer: index of the `exclusive` buffer that the operation holds; None if none, or if only ops of one lane hold
            it, which never overlap anyway.
    """

    lane: int
    seconds: float
    after: tuple[int, ...] = ()
    follows: tuple[int, int] | None = None
    buffer: int | None = None


class Job:
    """The operations of one micro-batch in program order, with data derived from them alone.

    Args:
        operations: the operations [operations].
        lanes: number of lanes.
        awaited: positions of operations that `ordered` operations of other jobs, on other lanes, follow.
    """

    def __init__(self, operations: Sequence[Operation], lanes: int, awaited: frozenset[int] = frozenset()) -> None:
        self.operations = tuple(operations)
        self._lanes = lanes
        self._awaited = awaited

    @cached_property
    def path(self) -> list[float]:
        """For each operation, seconds from its start to the end of the longest path that follows [operations]."""
        path = [operation.seconds for operation in self.operations]
        for position in reversed(range(len(path))):
            for earlier in self._list_predecessors(position):
                path[earlier] = max(path[earlier], self.operations[earlier].seconds + path[position])
        return path

    @cached_property
    def left(self) -> list[tuple[float, ...]]:
        """For each position, seconds of each lane's work from there on [operations + 1][lanes]."""
        left = [(0.0,) * self._lanes]
        for operation in reversed(self.operations):
            left.append(tuple(s + operation.seconds * (lane == operation.lane) for lane, s in enumerate(left[-1])))
        return left[::-1]

    @cached_property
    def tail(self) -> list[float]:
        """For each lane, seconds that must follow the job's last operation there; infinite if it has none [lanes]."""
        tail = [math.inf] * self._lanes
        for operation, path in zip(self.operations, self.path, strict=True):
            tail[operation.lane] = path - operation.seconds
        return tail

    @cached_property
    def head(self) -> list[float]:
        """For each lane, seconds that must precede the job's first operation there; infinite if it has none [lanes]."""
        head = [math.inf] * self._lanes
        ends: list[float] = []
        for position, operation in enumerate(self.operations):
            start = max((ends[q] for q in self._list_predecessors(position)), default=0.0)
            ends.append(start + operation.seconds)
            if head[operation.lane] == math.inf:
                head[operation.lane] = start
        return head

    @cached_property
    def delay(self) -> list[tuple[float, ...]]:
        """For each operation, minimum seconds from its start to that of each lane's next operation, itself included.

        Infinite if the lane has none; minus infinite if that operation does not depend on this one [operations][lanes].
        """
        return [self._compute_delays(position) for position in range(len(self.operations))]

    @cached_property
    def held(self) -> list[tuple[int, ...]]:
        """For each position, earlier operations whose ends matter to the operations from there on [operations + 1]."""
        last_user = {
            earlier: position for position, operation in enumerate(self.operations) for earlier in operation.after
        }
        held: list[tuple[int, ...]] = [()]
        for position in range(len(self.operations)):
            candidates = (*held[-1], position)
            held.append(tuple(q for q in candidates if q in self._awaited or last_user.get(q, -1) > position))
        return held

    @cached_property
    def awaiting(self) -> list[tuple[tuple[int, ...], ...]]:
        """For each position and operation held there, the lanes that wait for it [operations + 1][held][lanes]."""
        users: dict[int, list[int]] = {}
        for position, operation in enumerate(self.operations):
            for earlier in operation.after:
                users.setdefault(earlier, []).append(position)
        every = tuple(range(self._lanes))

        def list_waiting_lanes(held: int, position: int) -> tuple[int, ...]:
            if held in self._awaited:
                return every
            return tuple({self.operations[user].lane for user in users[held] if user >= position})

        return [tuple(list_waiting_lanes(q, position) for q in held) for position, held in enumerate(self.held)]

    @cached_property
    def _previous(self) -> list[int | None]:
        """For each operation, the previous one on its lane [operations]."""
        latest: dict[int, int] = {}
        previous = []
        for position, operation in enumerate(self.operations):
            previous.append(latest.get(operation.lane))
            latest[operation.lane] = position
        return previous

    def _list_predecessors(self, position: int) -> Iterator[int]:
        yield from self.operations[position].after
        if (previous := self._previous[position]) is not None:
            yield previous

    def _compute_delays(self, first: int) -> tuple[float, ...]:
        delays = [math.inf] * self._lanes
        start = {first: 0.0}
        missing = self._lanes
        for position in range(first, len(self.operations)):
            ends = [start[q] + self.operations[q].seconds for q in self._list_predecessors(position) if q in start]
            if ends:
                start[position] = max(ends)
            lane = self.operations[position].lane
            if delays[lane] == math.inf:
                delays[lane] = start.get(position, -math.inf)
                missing -= 1
                if not missing:
                    break
        return tuple(delays)


def make_jobs(programs: Sequence[Program], times: Sequence[Sequence[float]]) -> tuple[Job, ...]:
    """Return a job for each micro-batch. *times* are the seconds of its ops [micro-batches][ops].

    Raises:
        ConfigError: a time is negative or not finite, or the number of times differs from that of ops.
    """
    lanes = {lane: index for index, lane in enumerate(list_lanes(programs))}
    buffers = _number_buffers(programs)
    follows = _list_followed(programs)
    jobs = []
    for number, (program, seconds) in enumerate(zip(programs, times, strict=True)):
        _check_times(number, program, seconds)
        after = _list_waits(program)
        operations = [
            Operation(lanes[op.lane], time, after[n], follows.get((number, n)), buffers.get(op.exclusive or ""))
            for n, (op, time) in enumerate(zip(program.ops, seconds, strict=True))
        ]
        awaited = frozenset(
            position
            for (job, user), (earlier, position) in follows.items()
            if earlier == number and programs[job].ops[user].lane != program.ops[position].lane
        )
        jobs.append(Job(operations, len(lanes), awaited))
    return tuple(jobs)


def _check_times(micro_batch: int, program: Program, seconds: Sequence[float]) -> None:
    if len(seconds) != len(program.ops):
        raise ConfigError(f"micro-batch {micro_batch} has {len(program.ops)} ops, but {len(seconds)} times were given.")
    for op, time in zip(program.ops, seconds, strict=True):
        if not 0 <= time < math.inf:
            raise ConfigError(f"{op.label}/{micro_batch} cannot take {time} s; times are finite and not negative.")


def _list_waits(program: Program) -> list[tuple[int, ...]]:
    """Return, for each op, the earlier ops on other lanes that it waits for, like `schedule.lower`."""
    needs = Dependencies((program,))
    after = []
    for position, op in enumerate(program.ops):
        issue = Issue(0, position)
        needed = (earlier.position for earlier in needs.get(issue, op))
        after.append(tuple(sorted(q for q in needed if program.ops[q].lane != op.lane)))
        needs.add(issue, op)
    return after


def _number_buffers(programs: Sequence[Program]) -> dict[str, int]:
    """Number the `exclusive` buffers that are held by ops of several lanes."""
    lanes: dict[str, set[str]] = {}
    for program in programs:
        for op in program.ops:
            if op.exclusive is not None:
                lanes.setdefault(op.exclusive, set()).add(op.lane)
    return {name: number for number, name in enumerate(name for name in lanes if len(lanes[name]) > 1)}


def _list_followed(programs: Sequence[Program]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return, for each `ordered` op as (job, position), the op of an earlier job that must come before it."""
    position = [{op.label: n for n, op in enumerate(program.ops)} for program in programs]
    return {
        (number, position[number][label]): (earlier, position[earlier][label])
        for number, labels in enumerate(get_ordered_before(programs))
        for label, earlier in labels.items()
    }
