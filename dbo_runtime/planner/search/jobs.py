"""Micro-batches as jobs on machines: programs reduced to lanes, seconds and dependencies, ready for search.

Micro-batches are the jobs of a job shop and lanes its machines; but the ops of one need not form a chain (its shared
experts run beside its own dispatch).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dbo_runtime.errors import ConfigError
from dbo_runtime.program import Program
from dbo_runtime.schedule import Dependencies, Issue, get_ordered_before, list_lanes


@dataclass(frozen=True, slots=True)
class Task:
    """One op of a job.

    Attributes:
        lane: index of its lane.
        seconds: how long it takes.
        after: positions of earlier ops of the job, on other lanes, that must have ended.
        follows: (job, position) of the `ordered` op that must come before; None if there is none.
        buffer: index of the `exclusive` buffer it holds, if ops of several lanes hold it; None otherwise, because the
            order of a lane keeps its ops apart.
    """

    lane: int
    seconds: float
    after: tuple[int, ...] = ()
    follows: tuple[int, int] | None = None
    buffer: int | None = None


class Job:
    """The tasks of one micro-batch, in program order, and what follows from them alone.

    Args:
        tasks: [tasks].
        lanes: how many lanes there are.
        awaited: positions that `ordered` tasks of other jobs, on other lanes, come after.
    """

    def __init__(self, tasks: Sequence[Task], lanes: int, awaited: frozenset[int] = frozenset()) -> None:
        self.tasks = tuple(tasks)
        self._lanes = lanes
        self._awaited = awaited

    @cached_property
    def path(self) -> list[float]:
        """For each task, seconds from its start to the end of the longest path of what must come after it [tasks]."""
        path = [task.seconds for task in self.tasks]
        for position in reversed(range(len(path))):
            for earlier in self._find_before(position):
                path[earlier] = max(path[earlier], self.tasks[earlier].seconds + path[position])
        return path

    @cached_property
    def left(self) -> list[tuple[float, ...]]:
        """For each position, seconds that each lane still has to run from there on [tasks + 1][lanes]."""
        left = [(0.0,) * self._lanes]
        for task in reversed(self.tasks):
            left.append(tuple(s + task.seconds * (lane == task.lane) for lane, s in enumerate(left[-1])))
        return left[::-1]

    @cached_property
    def tail(self) -> list[float]:
        """For each lane, seconds of what must come after the job's last task there; infinite without one [lanes]."""
        tail = [math.inf] * self._lanes
        for task, path in zip(self.tasks, self.path, strict=True):
            tail[task.lane] = path - task.seconds
        return tail

    @cached_property
    def head(self) -> list[float]:
        """For each lane, seconds of what must come before the job's first task there; infinite without one [lanes]."""
        head = [math.inf] * self._lanes
        ends: list[float] = []
        for position, task in enumerate(self.tasks):
            start = max((ends[q] for q in self._find_before(position)), default=0.0)
            ends.append(start + task.seconds)
            if head[task.lane] == math.inf:
                head[task.lane] = start
        return head

    @cached_property
    def delay(self) -> list[tuple[float, ...]]:
        """For each task, the least seconds from its start to that of the first one, from there on, of each lane.

        Infinite if the lane has none; minus infinite if that one does not depend on the task [tasks][lanes].
        """
        return [self._find_delays(position) for position in range(len(self.tasks))]

    @cached_property
    def held(self) -> list[tuple[int, ...]]:
        """For each position, the tasks before it whose ends matter to tasks from there on [tasks + 1]."""
        last_user = {earlier: position for position, task in enumerate(self.tasks) for earlier in task.after}
        held: list[tuple[int, ...]] = [()]
        for position in range(len(self.tasks)):
            candidates = (*held[-1], position)
            held.append(tuple(q for q in candidates if q in self._awaited or last_user.get(q, -1) > position))
        return held

    @cached_property
    def awaiting(self) -> list[tuple[tuple[int, ...], ...]]:
        """For each position and each task held there, the lanes on which it is awaited [tasks + 1][held][lanes]."""
        users: dict[int, list[int]] = {}
        for position, task in enumerate(self.tasks):
            for earlier in task.after:
                users.setdefault(earlier, []).append(position)
        every = tuple(range(self._lanes))

        def find_lanes_of(held: int, position: int) -> tuple[int, ...]:
            if held in self._awaited:
                return every
            return tuple({self.tasks[user].lane for user in users[held] if user >= position})

        return [tuple(find_lanes_of(q, position) for q in held) for position, held in enumerate(self.held)]

    @cached_property
    def _previous(self) -> list[int | None]:
        """For each task, the one before it on its lane [tasks]."""
        latest: dict[int, int] = {}
        previous = []
        for position, task in enumerate(self.tasks):
            previous.append(latest.get(task.lane))
            latest[task.lane] = position
        return previous

    def _find_before(self, position: int) -> Iterator[int]:
        yield from self.tasks[position].after
        if (previous := self._previous[position]) is not None:
            yield previous

    def _find_delays(self, first: int) -> tuple[float, ...]:
        delays = [math.inf] * self._lanes
        start = {first: 0.0}
        missing = self._lanes
        for position in range(first, len(self.tasks)):
            ends = [start[q] + self.tasks[q].seconds for q in self._find_before(position) if q in start]
            if ends:
                start[position] = max(ends)
            lane = self.tasks[position].lane
            if delays[lane] == math.inf:
                delays[lane] = start.get(position, -math.inf)
                missing -= 1
                if not missing:
                    break
        return tuple(delays)


def make_jobs(programs: Sequence[Program], times: Sequence[Sequence[float]]) -> tuple[Job, ...]:
    """Return a job for each micro-batch; *times* are the seconds of its ops [micro-batches][ops].

    Raises:
        ConfigError: if a time is negative or no number, or there are not as many as ops.
    """
    lanes = {lane: index for index, lane in enumerate(list_lanes(programs))}
    buffers = _find_buffers(programs)
    follows = _find_followed(programs)
    jobs = []
    for number, (program, seconds) in enumerate(zip(programs, times, strict=True)):
        _check_times(number, program, seconds)
        after = _find_after(program)
        tasks = [
            Task(lanes[op.lane], time, after[n], follows.get((number, n)), buffers.get(op.exclusive or ""))
            for n, (op, time) in enumerate(zip(program.ops, seconds, strict=True))
        ]
        awaited = frozenset(
            position
            for (job, user), (earlier, position) in follows.items()
            if earlier == number and programs[job].ops[user].lane != program.ops[position].lane
        )
        jobs.append(Job(tasks, len(lanes), awaited))
    return tuple(jobs)


def _check_times(micro_batch: int, program: Program, seconds: Sequence[float]) -> None:
    if len(seconds) != len(program.ops):
        raise ConfigError(f"micro-batch {micro_batch} has {len(program.ops)} ops, but {len(seconds)} times were given.")
    for op, time in zip(program.ops, seconds, strict=True):
        if not 0 <= time < math.inf:
            raise ConfigError(f"{op.label}/{micro_batch} cannot take {time} s; times are finite and not negative.")


def _find_after(program: Program) -> list[tuple[int, ...]]:
    """Return, for each op, the earlier ones of other lanes that it waits for, as `schedule.lower` has it."""
    needs = Dependencies((program,))
    after = []
    for position, op in enumerate(program.ops):
        issue = Issue(0, position)
        needed = (earlier.position for earlier in needs.get(issue, op))
        after.append(tuple(sorted(q for q in needed if program.ops[q].lane != op.lane)))
        needs.add(issue, op)
    return after


def _find_buffers(programs: Sequence[Program]) -> dict[str, int]:
    """Number the `exclusive` buffers that ops of several lanes hold."""
    lanes: dict[str, set[str]] = {}
    for program in programs:
        for op in program.ops:
            if op.exclusive is not None:
                lanes.setdefault(op.exclusive, set()).add(op.lane)
    return {name: number for number, name in enumerate(name for name in lanes if len(lanes[name]) > 1)}


def _find_followed(programs: Sequence[Program]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return, for each `ordered` op as (job, position), the one of an earlier job that must come before it."""
    position = [{op.label: n for n, op in enumerate(program.ops)} for program in programs]
    return {
        (number, position[number][label]): (earlier, position[earlier][label])
        for number, labels in enumerate(get_ordered_before(programs))
        for label, earlier in labels.items()
    }
