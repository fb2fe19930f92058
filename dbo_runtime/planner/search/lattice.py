"""The lattice of a search for an issue order: a point is the number of issued operations of each micro-batch.

At a point, the future depends only on a few times: when each lane is free, and when each operation ends that later
operations on other lanes wait for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dbo_runtime.ir.policies import Order
from dbo_runtime.ir.schedule import Issue
from dbo_runtime.planner.search.jobs import Job

Times = tuple[float, ...]
LatticePoint = tuple[int, ...]
"""The number of issued operations of each job [jobs]."""


class Trail(NamedTuple):
    """The jobs that were issued from, last one first."""

    before: Trail | None
    job: int


class LatticeState(NamedTuple):
    """All that the future depends on at a point.

    Attributes:
        times: time at which each lane is free; then each shared buffer; then the end of each job's held operations, but
            at least the time at which the lanes that wait for them are free [lanes + buffers + held].
        trail: the jobs that led to this state.
    """

    times: Times
    trail: Trail | None


class _Step(NamedTuple):
    """A job's next operation at a position, and what the job holds there.

    Attributes:
        lane: index of the operation's lane; -1 if the job is finished.
        seconds: duration of the operation in seconds.
        slots: indices of the held ends that it waits for, among all that its job holds.
        buffer: index of its buffer's time; -1 if it needs none.
        follows: (job, position) of the operation that must come before; None if there is none.
        held: number of ends that the job holds.
        waiting: the lanes that wait for each held end [held][lanes].
    """

    lane: int
    seconds: float
    slots: tuple[int, ...]
    buffer: int
    follows: tuple[int, int] | None
    held: int
    waiting: tuple[tuple[int, ...], ...]


class Lattice:
    """The points, states and transitions of one search. A lattice never changes.

    A search visits tens of thousands of states, so what depends on the jobs alone is looked up in lists.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self._numbers = range(len(jobs))
        self._lanes = len(jobs[0].tail)
        buffers = [operation.buffer for job in jobs for operation in job.operations if operation.buffer is not None]
        self._clocks = self._lanes + 1 + max(buffers, default=-1)
        self._lengths = [len(job.operations) for job in jobs]
        self._steps = [[_make_step(job, position, self._lanes) for position in range(len(job.held))] for job in jobs]
        self._kept = [[_list_kept(job, position) for position in range(len(job.operations))] for job in jobs]
        self._paths = [job.path for job in jobs]
        # Of each lane and job: delays, tail and left work; see `Job`.
        self._tails = [[job.tail[lane] for job in jobs] for lane in range(self._lanes)]
        self._delays = [[[each[lane] for each in job.delay] for job in jobs] for lane in range(self._lanes)]
        self._left = [[[each[lane] for each in job.left] for job in jobs] for lane in range(self._lanes)]

    def start(self) -> tuple[LatticePoint, LatticeState]:
        """Return the point and state where a search starts."""
        return (0,) * len(self.jobs), LatticeState((0.0,) * self._clocks, None)

    @property
    def depth(self) -> int:
        """The number of operations, which equals the number of transitions from start to end."""
        return sum(self._lengths)

    def sum_lanes(self, state: LatticeState) -> float:
        """Return the sum of the times at which lanes are free."""
        return sum(state.times[: self._lanes])

    def compute_end(self, state: LatticeState) -> float:
        """Return the time at which the last lane is free."""
        return max(state.times[: self._lanes])

    def compute_starts(self, point: LatticePoint, times: Times) -> list[float]:
        """Return the earliest start of each job's next operation; infinite for a finished job [jobs]."""
        starts = []
        offset = self._clocks
        for steps, position in zip(self._steps, point, strict=True):
            lane, _, slots, buffer, follows, held, _ = steps[position]
            start = times[lane] if lane >= 0 else math.inf
            for slot in slots:
                if times[offset + slot] > start:
                    start = times[offset + slot]
            if buffer >= 0:
                start = max(start, times[buffer])
            if follows is not None:
                start = max(start, self._compute_followed_end(point, times, lane, follows))
            starts.append(start)
            offset += held
        return starts

    def list_issuable(self, point: LatticePoint) -> list[int]:
        """Return the jobs whose next operation does not have to follow one that is not issued yet."""
        issuable = []
        for number in self._numbers:
            if point[number] < self._lengths[number]:
                follows = self.jobs[number].operations[point[number]].follows
                if follows is None or point[follows[0]] > follows[1]:
                    issuable.append(number)
        return issuable

    def list_choices(self, point: LatticePoint, times: Times, starts: Sequence[float]) -> list[int]:
        """Return the jobs to branch on: a single one if issuing from it first loses nothing, otherwise all."""
        choices = self.list_issuable(point)
        if len(choices) > 1:
            for number in choices:
                if self._may_go_first(point, times, starts, number):
                    return [number]
        return choices

    def issue(
        self, point: LatticePoint, state: LatticeState, number: int, start: float
    ) -> tuple[LatticePoint, LatticeState]:
        """Return the point and state after the job's next operation, which starts at *start*."""
        position = point[number]
        step = self._steps[number][position]
        end = start + step.seconds
        before = state.times
        times = list(before[: self._clocks])
        times[step.lane] = end
        if step.buffer >= 0:
            times[step.buffer] = end
        reached = (*point[:number], position + 1, *point[number + 1 :])
        offset = self._clocks
        for other, steps in enumerate(self._steps):
            held, waiting = steps[point[other]].held, steps[reached[other]].waiting
            ends = before[offset : offset + held]
            offset += held
            if other == number:
                known = (*ends, end)
                ends = tuple([known[slot] for slot in self._kept[number][position]])
            if waiting:  # an end does not matter while the lanes that wait for it are busy anyway
                for time, lanes in zip(ends, waiting, strict=True):
                    free = times[lanes[0]] if len(lanes) == 1 else min([times[lane] for lane in lanes])
                    times.append(time if time > free else free)
        return reached, LatticeState(tuple(times), Trail(state.trail, number))

    def bound(self, point: LatticePoint, times: Times, starts: Sequence[float]) -> float:
        """Return the earliest time at which everything can have ended."""
        earliest_end = max(times[: self._lanes])
        unfinished = [number for number in self._numbers if point[number] < self._lengths[number]]
        for number in unfinished:
            end = starts[number] + self._paths[number][point[number]]
            if end > earliest_end:
                earliest_end = end
        for time, delays, tails, lefts in zip(times, self._delays, self._tails, self._left, strict=False):
            first = tail = math.inf
            left = 0.0
            for number in unfinished:
                position = point[number]
                begin = starts[number] + delays[number][position]
                if begin < math.inf:
                    if begin < first:
                        first = begin
                    if tails[number] < tail:
                        tail = tails[number]
                    left += lefts[number][position]
            if tail < math.inf:
                end = (first if first > time else time) + left + tail
                if end > earliest_end:
                    earliest_end = end
        return earliest_end

    def read_order(self, state: LatticeState) -> Order:
        """Return the order that led to *state*."""
        numbers = []
        trail = state.trail
        while trail is not None:
            numbers.append(trail.job)
            trail = trail.before
        done = [0] * len(self.jobs)
        order = []
        for number in reversed(numbers):
            order.append(Issue(number, done[number]))
            done[number] += 1
        return tuple(order)

    def _may_go_first(self, point: LatticePoint, times: Times, starts: Sequence[float], number: int) -> bool:
        """Return whether the job's next operation ends before any other job could start anything on its lane."""
        operation = self.jobs[number].operations[point[number]]
        end = starts[number] + operation.seconds
        if operation.buffer is not None:
            return False
        for other in self._numbers:
            if other != number and point[other] < self._lengths[other]:
                begin = starts[other] + self.jobs[other].delay[point[other]][operation.lane]
                if begin < end and times[operation.lane] < end:
                    return False
        return True

    def _compute_followed_end(self, point: LatticePoint, times: Times, lane: int, follows: tuple[int, int]) -> float:
        """Return the end of the operation that must come before; 0 if it is not issued yet, or is on the same lane."""
        number, position = follows
        held = self.jobs[number].held[point[number]]
        if self.jobs[number].operations[position].lane == lane or position not in held:
            return 0.0  # if held for others, its end may be delayed until their lanes are free
        offset = self._clocks + sum(len(self.jobs[other].held[point[other]]) for other in range(number))
        return times[offset + held.index(position)]


def _make_step(job: Job, position: int, lanes: int) -> _Step:
    held, waiting = job.held[position], job.awaiting[position]
    if position == len(job.operations):
        return _Step(-1, 0.0, (), -1, None, len(held), waiting)
    operation = job.operations[position]
    slots = tuple(held.index(q) for q in operation.after)
    buffer = -1 if operation.buffer is None else lanes + operation.buffer
    return _Step(operation.lane, operation.seconds, slots, buffer, operation.follows, len(held), waiting)


def _list_kept(job: Job, position: int) -> tuple[int, ...]:
    """Return the indices of the ends held at *position*, followed by its own, that are held at the next position."""
    known = (*job.held[position], position)
    return tuple(known.index(q) for q in job.held[position + 1])
