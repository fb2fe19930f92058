"""A dry run of several ranks in virtual time: who would wait for whom, for how long, and whether for ever.

Nothing is proved here; it is tried. `dbo_runtime.ranks` proves, and the tests hold the two against each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from dbo_runtime.errors import ScheduleError
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.program import COMPUTE
from dbo_runtime.ranks import Groups, find_groups
from dbo_runtime.render import name_issue, render
from dbo_runtime.schedule import Issue, Schedule, Step

RankCost = Callable[[int, Step], float]

_SHOWN = 12  # steps shown on either side of a fault


def simulate_ranks(schedules: Sequence[Schedule], cost: RankCost, groups: Groups | None = None) -> tuple[Timeline, ...]:
    """Return when each op of each rank would run if ops cost *cost(rank, step)* seconds; no op is run.

    Each rank has a host, which issues in order and without delay, and lanes, which run in order. A step on `compute`
    and a `host_sync` step keep the host from going on until they have ended, as on the strictest device. A collective
    begins when all ranks of its group have come to it, and takes as long as the slowest of them says.

    Raises:
        ScheduleError: if ranks meet in different collectives, wait for each other for ever, or for an event that is
            not recorded; saying what each rank waits for, with the table of the first that is stuck.
    """
    rehearsal = _Rehearsal(schedules, cost, groups or {})
    ran = [True]
    while any(ran):
        ran = [rehearsal.go_on(rank) for rank in rehearsal.ranks]
    rehearsal.check_end()
    return tuple(rank.timeline() for rank in rehearsal.ranks)


class _Issued(NamedTuple):
    """A step that its host has issued."""

    number: int
    step: Step
    time: float
    turn: int  # which of its rank's collectives on the same communicator it is, from 1


_Meeting = dict[int, tuple[_Issued, float]]  # who has come to a collective, by rank: with which step, and when


@dataclass(slots=True)
class _Rank:
    number: int
    schedule: Schedule
    time: float = 0.0  # of the host
    host_waits: bool = False
    issued: int = 0
    recorded: set[Issue] = field(default_factory=set)
    turns: Counter[str | None] = field(default_factory=Counter)
    queues: dict[str, deque[_Issued]] = field(default_factory=lambda: defaultdict(deque))
    ends: dict[Issue, float] = field(default_factory=dict)
    lane_ends: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: dict[int, Span] = field(default_factory=dict)

    def issue(self) -> None:
        """Issue steps up to the next that keeps the host from going on."""
        steps = self.schedule.steps
        while not self.host_waits and self.issued < len(steps):
            step = steps[self.issued]
            self._check_recorded(step.waits, f"at step {self.issued}, {step.label},")
            self.turns[step.op.communicator] += 1
            issued = _Issued(self.issued, step, self.time, self.turns[step.op.communicator])
            self.queues[step.op.lane].append(issued)
            if step.records:
                self.recorded.add(step.issue)
            self.host_waits = _keeps_host(step)
            self.issued += 1
        if self.issued == len(steps):
            self._check_recorded(self.schedule.joins, "at its end")

    def arrive(self, issued: _Issued) -> float | None:
        """Return when the next step of a lane could begin by itself; None if that is not known yet."""
        if any(issue not in self.ends for issue in issued.step.waits):
            return None
        return max([issued.time, self.lane_ends[issued.step.op.lane], *(self.ends[i] for i in issued.step.waits)])

    def run(self, issued: _Issued, start: float, end: float) -> None:
        """Let the next step of a lane take this time."""
        step = issued.step
        self.queues[step.op.lane].popleft()
        self.lane_ends[step.op.lane] = self.ends[step.issue] = end
        self.spans[issued.number] = Span(step.op.lane, step.op.label, step.issue.micro_batch, start, end)
        if _keeps_host(step):
            self.host_waits = False
            self.time = end

    def find_stop(self) -> _Issued | None:
        """Return the first step that was issued and has not run."""
        return min((queue[0] for queue in self.queues.values() if queue), default=None)

    def timeline(self) -> Timeline:
        return Timeline(tuple(self.spans[number] for number in range(len(self.schedule.steps))))

    def fail(self, number: int, what: str) -> NoReturn:
        where = self.schedule.steps[number].op.declared_at
        raise ScheduleError(f"{what}. ({where})\n\n{render(self.schedule, mark=number, around=_SHOWN)}")

    def _check_recorded(self, waits: Sequence[Issue], where: str) -> None:
        for issue in waits:
            if issue not in self.recorded:
                awaited = name_issue(self.schedule.programs, issue)
                what = f"rank {self.number} waits {where} for {awaited}, which has recorded no event by then"
                self.fail(min(self.issued, len(self.schedule.steps) - 1), what)


class _Rehearsal:
    """All ranks, and the collectives in which they meet: one for each communicator, group and turn."""

    def __init__(self, schedules: Sequence[Schedule], cost: RankCost, groups: Groups) -> None:
        self.ranks = [_Rank(number, schedule) for number, schedule in enumerate(schedules)]
        self._cost = cost
        self._groups = groups
        self._meetings: dict[tuple[str, tuple[int, ...], int], _Meeting] = defaultdict(dict)

    def go_on(self, rank: _Rank) -> bool:
        """Let a rank issue and run what it can; say whether anything ran."""
        rank.issue()
        before = len(rank.spans)
        for queue in rank.queues.values():
            while queue and self._run(rank, queue[0]):
                pass
        return len(rank.spans) > before

    def check_end(self) -> None:
        """Refuse what cannot go on: each rank that has not ended has come to a collective, and others have not."""
        stops = {rank.number: stop for rank in self.ranks if (stop := rank.find_stop()) is not None}
        waits = []
        for number, stop in stops.items():
            members, meeting = self._find_meeting(self.ranks[number], stop)
            others = (f"rank {other}, which {self._locate(other)}" for other in members if other not in meeting)
            waits.append(f"rank {number} {self._locate(number)}, for {' and '.join(others)}")
        for number, stop in stops.items():
            self.ranks[number].fail(stop.number, f"deadlock: {'; '.join(waits)}")

    def _run(self, rank: _Rank, issued: _Issued) -> bool:
        """Run the next step of a lane, if it can begin, and with a collective those of all ranks that meet in it."""
        time = rank.arrive(issued)
        if time is None:
            return False
        if issued.step.op.communicator is None:
            rank.run(issued, time, time + self._cost(rank.number, issued.step))
            return True
        members, meeting = self._find_meeting(rank, issued)
        meeting[rank.number] = issued, time
        self._check_same(rank, issued, meeting)
        if len(meeting) < len(members):
            return False
        start = max(time for _, time in meeting.values())
        end = start + max(self._cost(member, theirs.step) for member, (theirs, _) in meeting.items())
        for member, (theirs, _) in meeting.items():
            self.ranks[member].run(theirs, start, end)
        return True

    def _find_meeting(self, rank: _Rank, issued: _Issued) -> tuple[tuple[int, ...], _Meeting]:
        """Return the ranks that should meet in a collective, and those that have come."""
        name = str(issued.step.op.communicator)
        groups = find_groups(self._groups, name, len(self.ranks))
        members = next((group for group in groups if rank.number in group), None)
        if members is None:
            what = f"uses communicator {name!r}, which has no rank {rank.number}, at step {issued.number}"
            rank.fail(issued.number, f"rank {rank.number} {what}, {issued.step.label}")
        return members, self._meetings[name, members, issued.turn]

    def _check_same(self, rank: _Rank, issued: _Issued, meeting: _Meeting) -> None:
        for other, (theirs, _) in meeting.items():
            if theirs.step.label != issued.step.label:
                own = f"rank {rank.number} comes to step {issued.number}, {issued.step.label}"
                there = f"rank {other}, which comes to step {theirs.number}, {theirs.step.label}"
                rank.fail(issued.number, f"{own}, and meets {there}, on {issued.step.op.communicator!r}")

    def _locate(self, number: int) -> str:
        stop = self.ranks[number].find_stop()
        return "has ended" if stop is None else f"waits at step {stop.number}, {stop.step.label}"


def _keeps_host(step: Step) -> bool:
    return step.op.lane == COMPUTE or step.op.host_sync
