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
from dbo_runtime.ranks import Groups, get_groups
from dbo_runtime.render import name_issue, render
from dbo_runtime.schedule import Instruction, Issue, Schedule

RankCost = Callable[[int, Instruction], float]

_SHOWN = 12  # instructions shown on either side of a fault


def simulate_ranks(schedules: Sequence[Schedule], cost: RankCost, groups: Groups | None = None) -> tuple[Timeline, ...]:
    """Return when each op of each rank would run if ops cost *cost(rank, instruction)* seconds; no op is run.

    Each rank has a host, which issues in order and without delay, and lanes, which run in order. An instruction on
    `compute` and a `host_sync` instruction keep the host from going on until they have ended, as on the strictest
    device. A collective begins when all ranks of its group have come to it, and takes as long as the slowest of them
    says.

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
    """An instruction that its host has issued."""

    number: int
    instruction: Instruction
    time: float
    turn: int  # which of its rank's collectives on the same communicator it is, from 1


_Meeting = dict[int, tuple[_Issued, float]]  # who has come to a collective, by rank: with which instruction, and when


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
        """Issue instructions up to the next that keeps the host from going on."""
        instructions = self.schedule.instructions
        while not self.host_waits and self.issued < len(instructions):
            instruction = instructions[self.issued]
            self._check_recorded(instruction.waits, f"at instruction {self.issued}, {instruction.label},")
            self.turns[instruction.op.communicator] += 1
            issued = _Issued(self.issued, instruction, self.time, self.turns[instruction.op.communicator])
            self.queues[instruction.op.lane].append(issued)
            if instruction.records:
                self.recorded.add(instruction.issue)
            self.host_waits = _keeps_host(instruction)
            self.issued += 1
        if self.issued == len(instructions):
            self._check_recorded(self.schedule.joins, "at its end")

    def arrive(self, issued: _Issued) -> float | None:
        """Return when the next instruction of a lane could begin by itself; None if that is not known yet."""
        if any(issue not in self.ends for issue in issued.instruction.waits):
            return None
        return max(
            [issued.time, self.lane_ends[issued.instruction.op.lane], *(self.ends[i] for i in issued.instruction.waits)]
        )

    def run(self, issued: _Issued, start: float, end: float) -> None:
        """Let the next instruction of a lane take this time."""
        instruction = issued.instruction
        self.queues[instruction.op.lane].popleft()
        self.lane_ends[instruction.op.lane] = self.ends[instruction.issue] = end
        self.spans[issued.number] = Span(
            instruction.op.lane, instruction.op.label, instruction.issue.micro_batch, start, end
        )
        if _keeps_host(instruction):
            self.host_waits = False
            self.time = end

    def find_stop(self) -> _Issued | None:
        """Return the first instruction that was issued and has not run."""
        return min((queue[0] for queue in self.queues.values() if queue), default=None)

    def timeline(self) -> Timeline:
        return Timeline(tuple(self.spans[number] for number in range(len(self.schedule.instructions))))

    def fail(self, number: int, what: str) -> NoReturn:
        where = self.schedule.instructions[number].op.declared_at
        raise ScheduleError(f"{what}. ({where})\n\n{render(self.schedule, mark=number, around=_SHOWN)}")

    def _check_recorded(self, waits: Sequence[Issue], where: str) -> None:
        for issue in waits:
            if issue not in self.recorded:
                awaited = name_issue(self.schedule.programs, issue)
                what = f"rank {self.number} waits {where} for {awaited}, which has recorded no event by then"
                self.fail(min(self.issued, len(self.schedule.instructions) - 1), what)


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
        """Run the next instruction of a lane if it can begin; a collective runs on all ranks that meet in it."""
        time = rank.arrive(issued)
        if time is None:
            return False
        if issued.instruction.op.communicator is None:
            rank.run(issued, time, time + self._cost(rank.number, issued.instruction))
            return True
        members, meeting = self._find_meeting(rank, issued)
        meeting[rank.number] = issued, time
        self._check_same(rank, issued, meeting)
        if len(meeting) < len(members):
            return False
        start = max(time for _, time in meeting.values())
        end = start + max(self._cost(member, theirs.instruction) for member, (theirs, _) in meeting.items())
        for member, (theirs, _) in meeting.items():
            self.ranks[member].run(theirs, start, end)
        return True

    def _find_meeting(self, rank: _Rank, issued: _Issued) -> tuple[tuple[int, ...], _Meeting]:
        """Return the ranks that should meet in a collective, and those that have come."""
        name = str(issued.instruction.op.communicator)
        groups = get_groups(self._groups, name, len(self.ranks))
        members = next((group for group in groups if rank.number in group), None)
        if members is None:
            what = f"uses communicator {name!r}, which has no rank {rank.number}, at instruction {issued.number}"
            rank.fail(issued.number, f"rank {rank.number} {what}, {issued.instruction.label}")
        return members, self._meetings[name, members, issued.turn]

    def _check_same(self, rank: _Rank, issued: _Issued, meeting: _Meeting) -> None:
        for other, (theirs, _) in meeting.items():
            if theirs.instruction.label != issued.instruction.label:
                own = f"rank {rank.number} comes to instruction {issued.number}, {issued.instruction.label}"
                there = f"rank {other}, which comes to instruction {theirs.number}, {theirs.instruction.label}"
                rank.fail(issued.number, f"{own}, and meets {there}, on {issued.instruction.op.communicator!r}")

    def _locate(self, number: int) -> str:
        stop = self.ranks[number].find_stop()
        return "has ended" if stop is None else f"waits at instruction {stop.number}, {stop.instruction.label}"


def _keeps_host(instruction: Instruction) -> bool:
    return instruction.op.lane == COMPUTE or instruction.op.host_sync
