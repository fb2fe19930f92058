"""Simulates several ranks that meet in collectives: which ranks wait for which, how long, and whether forever.

Nothing is proved here. `dbo_runtime.lab.oracle.ranks` proves; tests compare the two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NoReturn

from dbo_runtime.devices.event_loop import EventLoop, HostRelease, Machine, Members, run_alone
from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.op import COMPUTE
from dbo_runtime.ir.render import name_issue, render
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule
from dbo_runtime.lab.oracle.ranks import Groups, get_groups
from dbo_runtime.observe.timeline import Timeline

RankOpDuration = Callable[[int, Instruction], float]

_SHOWN = 12  # instructions shown on either side of an error


def simulate_ranks(
    schedules: Sequence[Schedule], duration: RankOpDuration, groups: Groups | None = None
) -> tuple[Timeline, ...]:
    """Return when each op of each rank would run if it took *duration(rank, instruction)* seconds. No op runs.

    Each rank has a host, which issues in order and without delay, and lanes, which run in order. An instruction on
    `compute` and a `host_sync` instruction block the host until they end, as on the strictest device. A collective
    starts when all ranks of its group have reached it, and takes the longest of their durations.

    Raises:
        ScheduleError: ranks meet in different collectives, wait for each other forever, or wait for an event that is
            not recorded. The message says what each rank waits for, and shows the table of the first rank that is
            stuck.
    """
    for rank, schedule in enumerate(schedules):
        _check_recorded(rank, schedule)
    collectives = _Collectives(schedules, groups or {})
    machine = Machine(lambda rank, instruction, _: duration(rank, instruction), _get_host_release)
    loop = EventLoop(schedules, machine, collectives.meet)
    loop.run()
    collectives.check_end([loop.get_stop(rank) for rank in range(len(schedules))])
    return loop.timelines


class _Collectives:
    """The collectives of all ranks. Ranks meet in one per communicator, group, and turn on the communicator."""

    def __init__(self, schedules: Sequence[Schedule], groups: Groups) -> None:
        self._schedules = schedules
        self._groups = groups
        self._turns = [_count_turns(schedule) for schedule in schedules]
        self._arrived: dict[tuple[str, tuple[int, ...], int], dict[int, int]] = defaultdict(dict)

    def meet(self, rank: int, number: int) -> Members | None:
        """Let a rank reach an instruction. Once the last rank has reached it, return all ranks that meet in it."""
        if self._schedules[rank].instructions[number].op.communicator is None:
            return run_alone(rank, number)
        group, arrived = self._get_meeting(rank, number)
        arrived[rank] = number
        self._check_same(rank, number, arrived)
        return tuple(arrived.items()) if len(arrived) == len(group) else None

    def check_end(self, stops: Sequence[int | None]) -> None:
        """Raise if ranks are stuck: each has reached a collective that other ranks of its group have not [ranks]."""
        stuck = {rank: number for rank, number in enumerate(stops) if number is not None}

        def locate(rank: int) -> str:
            number = stuck.get(rank)
            return "has ended" if number is None else f"waits at instruction {number}, {self._label(rank, number)}"

        waits = []
        for rank, number in stuck.items():
            group, arrived = self._get_meeting(rank, number)
            others = (f"rank {other}, which {locate(other)}" for other in group if other not in arrived)
            waits.append(f"rank {rank} {locate(rank)}, for {' and '.join(others)}")
        for rank, number in stuck.items():
            _fail(self._schedules[rank], number, f"deadlock: {'; '.join(waits)}")

    def _get_meeting(self, rank: int, number: int) -> tuple[tuple[int, ...], dict[int, int]]:
        """Return the group of a collective, and the ranks that have reached it, each with its instruction."""
        schedule = self._schedules[rank]
        name = str(schedule.instructions[number].op.communicator)
        groups = get_groups(self._groups, name, len(self._schedules))
        group = next((group for group in groups if rank in group), None)
        if group is None:
            what = f"uses communicator {name!r}, which has no rank {rank}, at instruction {number}"
            _fail(schedule, number, f"rank {rank} {what}, {self._label(rank, number)}")
        return group, self._arrived[name, group, self._turns[rank][number]]

    def _check_same(self, rank: int, number: int, arrived: dict[int, int]) -> None:
        own = self._schedules[rank].instructions[number]
        for other, theirs in arrived.items():
            if self._label(other, theirs) != own.label:
                here = f"rank {rank} comes to instruction {number}, {own.label}"
                there = f"rank {other}, which comes to instruction {theirs}, {self._label(other, theirs)}"
                _fail(self._schedules[rank], number, f"{here}, and meets {there}, on {own.op.communicator!r}")

    def _label(self, rank: int, number: int) -> str:
        return self._schedules[rank].instructions[number].label


def _get_host_release(instruction: Instruction) -> HostRelease:
    blocks = instruction.op.lane == COMPUTE or instruction.op.host_sync
    return HostRelease.ENDED if blocks else HostRelease.ISSUED


def _count_turns(schedule: Schedule) -> list[int]:
    """Return, for each instruction, the number of its use of its communicator, from 1 [instructions]."""
    counts: Counter[str | None] = Counter()
    turns = []
    for instruction in schedule.instructions:
        counts[instruction.op.communicator] += 1
        turns.append(counts[instruction.op.communicator])
    return turns


def _check_recorded(rank: int, schedule: Schedule) -> None:
    """Raise for a wait for an event that is not recorded by the time the wait is issued."""
    recorded: set[Issue] = set()

    def check(waits: Sequence[Issue], number: int, where: str) -> None:
        for issue in waits:
            if issue not in recorded:
                awaited = name_issue(schedule.programs, issue)
                _fail(schedule, number, f"rank {rank} waits {where} for {awaited}, which has recorded no event by then")

    for number, instruction in enumerate(schedule.instructions):
        check(instruction.waits, number, f"at instruction {number}, {instruction.label},")
        if instruction.records:
            recorded.add(instruction.issue)
    check(schedule.joins, len(schedule.instructions) - 1, "at its end")


def _fail(schedule: Schedule, number: int, what: str) -> NoReturn:
    where = schedule.instructions[number].op.declared_at
    raise ScheduleError(f"{what}. ({where})\n\n{render(schedule, mark=number, around=_SHOWN)}")
