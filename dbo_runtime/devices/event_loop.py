"""The discrete-event loop behind every prediction: hosts issue, lanes run in order, collectives synchronize ranks.

No op runs and no time is measured. A `Machine` says how long ops and hosts take. This is all that distinguishes
`virtual.simulate`, `multi_rank_simulator.simulate_ranks` and the planner's `predict_timeline`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.render import render
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule
from dbo_runtime.observe.timeline import Span, Timeline

Members = Sequence[tuple[int, int]]
"""The instructions that run an op together, as (rank, instruction number). An op that is no collective has one."""


class HostRelease(Enum):
    """The moment at which a host goes on to the next instruction after issuing one."""

    ISSUED = auto()
    STARTED = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Machine:
    """A model of the simulated machine. Times are in seconds.

    Attributes:
        duration: function (rank, instruction, seconds that its lane was idle before; infinite before the first op) ->
            time of the op while no other lane runs. A collective takes the longest time among its ranks.
        release: function that says when the host goes on after an instruction.
        issue_seconds: host time to issue one instruction.
        handover_seconds: minimum time from the end of the last op that an op waits for to the op's start.
        slowdown: function (lane, running lanes) -> factor by which the lane is slower now. None: lanes never slow each
            other down, and each op ends at exactly its start plus its duration.
    """

    duration: Callable[[int, Instruction, float], float]
    release: Callable[[Instruction], HostRelease]
    issue_seconds: float = 0.0
    handover_seconds: float = 0.0
    slowdown: Callable[[str, Collection[str]], float] | None = None


def run_schedule(schedule: Schedule, machine: Machine) -> Timeline:
    """Return when each op would run if there is only one rank.

    Raises:
        ScheduleError: instructions wait for each other.
    """
    loop = EventLoop([schedule], machine)
    loop.run()
    stop = loop.get_stop(0)
    if stop is not None:
        raise ScheduleError(f"instruction {stop} waits for ever.\n{render(schedule, mark=stop)}")
    return loop.timelines[0]


def run_ahead(instruction: Instruction) -> HostRelease:
    """Let the host run ahead of the lanes, except that `host_sync` instructions must start before it goes on."""
    return HostRelease.STARTED if instruction.op.host_sync else HostRelease.ISSUED


def run_alone(rank: int, number: int) -> Members:
    """Let an instruction run as soon as its own rank can. For schedules without collectives across ranks."""
    return ((rank, number),)


class EventLoop:
    """One simulation of all ranks' schedules.

    Args:
        schedules: one per rank.
        machine: times of ops and hosts.
        meet: function (rank, number of an instruction that could start) -> its members once all of them could start,
            None before. It is called again for an instruction that has to wait.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule],
        machine: Machine,
        meet: Callable[[int, int], Members | None] = run_alone,
    ) -> None:
        self._now = 0.0
        self._machine = machine
        self._meet = meet
        self._ranks = [_Rank(schedule, machine) for schedule in schedules]
        self._running: list[_Running] = []

    def run(self) -> None:
        """Let time pass until nothing more can happen: all schedules have ended, or ranks are stuck."""
        while True:
            for rank in self._ranks:
                rank.issue(self._now)
            arrivals = [self._start_ops(number, rank) for number, rank in enumerate(self._ranks)]
            self._set_ends()
            ends = [op.end for op in self._running]
            until = min(arrivals + ends + [rank.next_issue for rank in self._ranks], default=math.inf)
            if until == math.inf:
                return
            self._advance(until)

    def get_stop(self, rank: int) -> int | None:
        """Return the number of the first instruction that a rank has issued but cannot start; None if it has ended."""
        return min((queue[0] for queue in self._ranks[rank].queues.values() if queue), default=None)

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """When each op of each rank ran, in issue order [ranks]."""
        return tuple(
            Timeline(tuple(rank.spans[number] for number in range(len(rank.schedule.instructions))))
            for rank in self._ranks
        )

    def _start_ops(self, number: int, rank: _Rank) -> float:
        """Start ops that can start on a rank's idle lanes; return when the next of the others can."""
        earliest = math.inf
        for lane, queue in rank.queues.items():
            if queue and lane not in rank.busy:
                arrival = rank.compute_arrival(queue[0])
                if arrival > self._now:
                    earliest = min(earliest, arrival)
                elif (members := self._meet(number, queue[0])) is not None:
                    self._start(members)
        return earliest

    def _start(self, members: Members) -> None:
        seconds = max(self._ranks[rank].start(rank, number, self._now) for rank, number in members)
        self._running.append(_Running(members, self._now, seconds, self._now + seconds))

    def _set_ends(self) -> None:
        """Extrapolate each running op's end, assuming that the same ops go on running."""
        if self._machine.slowdown is not None:
            for op in self._running:
                op.slowdown = max(self._ranks[rank].compute_slowdown(number) for rank, number in op.members)
                op.end = self._now + op.left * op.slowdown

    def _advance(self, until: float) -> None:
        """Let time pass: nothing starts, ends or is issued on the way."""
        running, self._running = self._running, []
        for op in running:
            if op.end <= until:
                for rank, number in op.members:
                    self._ranks[rank].end(number, op.start, until)
            else:
                op.left -= (until - self._now) / op.slowdown
                self._running.append(op)
        self._now = until


@dataclass(slots=True)
class _Running:
    """An op on its members' lanes. Without slowdown, `end` keeps the value set at the start."""

    members: Members
    start: float
    left: float  # seconds of remaining work, while no other lane runs
    end: float
    slowdown: float = 1.0


@dataclass(slots=True)
class _Rank:
    """A host, with its lanes as queues of instruction numbers."""

    schedule: Schedule
    machine: Machine
    next_issue: float = field(init=False)  # infinite while the host is blocked, and after the last instruction
    issued: int = 0
    blocked_by: tuple[int, HostRelease] | None = None
    queues: dict[str, deque[int]] = field(init=False)
    busy: set[str] = field(default_factory=set)
    lane_ends: dict[str, float] = field(default_factory=dict)
    ends: dict[Issue, float] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queues = {lane: deque() for lane in self.schedule.lanes}
        self._schedule_issue(0.0)

    def issue(self, now: float) -> None:
        """Queue on the lanes the instructions that the host has issued by now."""
        while self.next_issue <= now:
            number, instruction = self.issued, self.schedule.instructions[self.issued]
            self.queues[instruction.op.lane].append(number)
            self.issued += 1
            release = self.machine.release(instruction)
            if release is HostRelease.ISSUED:
                self._schedule_issue(self.next_issue)
            else:
                self.blocked_by, self.next_issue = (number, release), math.inf

    def compute_arrival(self, number: int) -> float:
        """Return when everything an instruction waits for has ended and is visible; infinite if not known yet."""
        waits = self.schedule.instructions[number].waits
        latest = max([self.ends.get(issue, math.inf) for issue in waits]) if waits else -math.inf
        return latest + self.machine.handover_seconds

    def compute_slowdown(self, number: int) -> float:
        """Return the factor by which other ops on this rank slow down a running instruction."""
        assert self.machine.slowdown is not None
        return self.machine.slowdown(self.schedule.instructions[number].op.lane, self.busy)

    def start(self, rank: int, number: int, now: float) -> float:
        """Start the first instruction of a queue; return its duration."""
        instruction = self.schedule.instructions[number]
        lane = instruction.op.lane
        self.queues[lane].popleft()
        self.busy.add(lane)
        if self.blocked_by == (number, HostRelease.STARTED):
            self._unblock(now)
        return self.machine.duration(rank, instruction, now - self.lane_ends.get(lane, -math.inf))

    def end(self, number: int, start: float, now: float) -> None:
        """End a running instruction."""
        instruction = self.schedule.instructions[number]
        lane = instruction.op.lane
        self.busy.remove(lane)
        self.spans[number] = Span(lane, instruction.op.label, instruction.issue.micro_batch, start, now)
        self.ends[instruction.issue] = self.lane_ends[lane] = now
        if self.blocked_by == (number, HostRelease.ENDED):
            self._unblock(now)

    def _unblock(self, now: float) -> None:
        self.blocked_by = None
        self._schedule_issue(now)

    def _schedule_issue(self, after: float) -> None:
        is_last = self.issued == len(self.schedule.instructions)
        self.next_issue = math.inf if is_last else after + self.machine.issue_seconds
