"""The lattice that a search for an issue order walks through: how many ops of each micro-batch are issued.

What the past means to the future at a point is a few times: when each lane is free, and when those ops end that later
ones on other lanes wait for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dbo_runtime.planner.search.jobs import Job
from dbo_runtime.policies import Order
from dbo_runtime.schedule import Issue

Times = tuple[float, ...]
Point = tuple[int, ...]
"""How many tasks of each job are issued [jobs]."""


class Trail(NamedTuple):
    """The micro-batches that were issued from, the last one first."""

    before: Trail | None
    job: int


class State(NamedTuple):
    """What the past means to the future.

    Attributes:
        times: when each lane is free; when each shared buffer is; when each job's held tasks end, but not before the
            lanes that await them are free [lanes + buffers + held].
        trail: how it was reached.
    """

    times: Times
    trail: Trail | None


class Lattice:
    """Points, states, and the steps between them. Made for one search; pure but for what it precomputes."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self._numbers = range(len(jobs))
        self._lanes = len(jobs[0].tail)
        buffers = [task.buffer for job in jobs for task in job.tasks if task.buffer is not None]
        self._clocks = self._lanes + 1 + max(buffers, default=-1)
        self._lengths = [len(job.tasks) for job in jobs]
        self._slots = [[_find_slots(job, position) for position in range(len(job.tasks))] for job in jobs]
        self._kept = [[_find_kept(job, position) for position in range(len(job.tasks))] for job in jobs]

    def start(self) -> tuple[Point, State]:
        """Return where every search begins."""
        return (0,) * len(self.jobs), State((0.0,) * self._clocks, None)

    @property
    def depth(self) -> int:
        """How many steps lead from the start to the end."""
        return sum(self._lengths)

    def sum_lanes(self, state: State) -> float:
        """Return the sum of the times at which lanes are free."""
        return sum(state.times[: self._lanes])

    def compute_end(self, state: State) -> float:
        """Return when the last lane is free."""
        return max(state.times[: self._lanes])

    def compute_starts(self, point: Point, times: Times) -> list[float]:
        """Return when each job's next task could start, at the earliest; infinite for a job that is done."""
        starts = []
        offset = self._clocks
        for job, slots, position, length in zip(self.jobs, self._slots, point, self._lengths, strict=True):
            if position == length:
                starts.append(math.inf)
            else:
                task = job.tasks[position]
                start = times[task.lane]
                for slot in slots[position]:
                    if times[offset + slot] > start:
                        start = times[offset + slot]
                if task.buffer is not None:
                    start = max(start, times[self._lanes + task.buffer])
                if task.follows is not None:
                    start = max(start, self._find_followed_end(point, times, task.lane, task.follows))
                starts.append(start)
            offset += len(job.held[position])
        return starts

    def list_issuable(self, point: Point) -> list[int]:
        """Return the jobs whose next task does not have to come after one that is not issued yet."""
        issuable = []
        for number in self._numbers:
            if point[number] < self._lengths[number]:
                follows = self.jobs[number].tasks[point[number]].follows
                if follows is None or point[follows[0]] > follows[1]:
                    issuable.append(number)
        return issuable

    def list_choices(self, point: Point, times: Times, starts: Sequence[float]) -> list[int]:
        """Return the jobs of which one must be issued from next: one if it may as well go first, else all."""
        choices = self.list_issuable(point)
        if len(choices) > 1:
            for number in choices:
                if self._may_go_first(point, times, starts, number):
                    return [number]
        return choices

    def issue(self, point: Point, state: State, number: int, start: float) -> tuple[Point, State]:
        """Return the point and the state after the job's next task, which starts at *start*."""
        position = point[number]
        task = self.jobs[number].tasks[position]
        end = start + task.seconds
        times = list(state.times[: self._clocks])
        times[task.lane] = end
        if task.buffer is not None:
            times[self._lanes + task.buffer] = end
        reached = (*point[:number], position + 1, *point[number + 1 :])
        offset = self._clocks
        for other in self._numbers:
            job = self.jobs[other]
            held = state.times[offset : offset + len(job.held[point[other]])]
            offset += len(held)
            if other == number:
                known = (*held, end)
                held = tuple([known[slot] for slot in self._kept[number][position]])
            if held:  # an end is of no account while the lanes that await it are busy anyway
                for time, lanes in zip(held, job.awaiting[reached[other]], strict=True):
                    times.append(max(time, min([times[lane] for lane in lanes])))
        return reached, State(tuple(times), Trail(state.trail, number))

    def bound(self, point: Point, times: Times, starts: Sequence[float]) -> float:
        """Return when everything can have ended, at the earliest."""
        least = max(times[: self._lanes])
        unfinished = [number for number in self._numbers if point[number] < self._lengths[number]]
        for number in unfinished:
            least = max(least, starts[number] + self.jobs[number].path[point[number]])
        for lane in range(self._lanes):
            first = tail = math.inf
            left = 0.0
            for number in unfinished:
                job, position = self.jobs[number], point[number]
                begin = starts[number] + job.delay[position][lane]
                if begin < math.inf:
                    first = min(first, begin)
                    tail = min(tail, job.tail[lane])
                    left += job.left[position][lane]
            if tail < math.inf:
                least = max(least, max(first, times[lane]) + left + tail)
        return least

    def read_order(self, state: State) -> Order:
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

    def _may_go_first(self, point: Point, times: Times, starts: Sequence[float], number: int) -> bool:
        """Whether the job's next task ends before any other job could begin anything on its lane."""
        task = self.jobs[number].tasks[point[number]]
        end = starts[number] + task.seconds
        if task.buffer is not None:
            return False
        for other in self._numbers:
            if other != number and point[other] < self._lengths[other]:
                begin = starts[other] + self.jobs[other].delay[point[other]][task.lane]
                if begin < end and times[task.lane] < end:
                    return False
        return True

    def _find_followed_end(self, point: Point, times: Times, lane: int, follows: tuple[int, int]) -> float:
        """Return when the task that must come before has ended; 0 if it is not issued, or the lane says so anyway."""
        number, position = follows
        held = self.jobs[number].held[point[number]]
        if self.jobs[number].tasks[position].lane == lane or position not in held:
            return 0.0  # where it is held for others, its end may be put off to when their lanes are free
        offset = self._clocks + sum(len(self.jobs[other].held[point[other]]) for other in range(number))
        return times[offset + held.index(position)]


def _find_slots(job: Job, position: int) -> tuple[int, ...]:
    """Return which of the ends held at *position* its task waits for."""
    return tuple(job.held[position].index(q) for q in job.tasks[position].after)


def _find_kept(job: Job, position: int) -> tuple[int, ...]:
    """Return which of the ends held at *position*, and of its task's own after them, are held at the next one."""
    known = (*job.held[position], position)
    return tuple(known.index(q) for q in job.held[position + 1])
