"""Prove that a schedule cannot race or hang, whatever made it.

This module shares only data types with lowering. Lowering places waits and frees; this replays the finished
instructions and checks the guarantees they give. Rule numbers are those of docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.op import COMPUTE
from dbo_runtime.ir.render import name_issue, render
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule, Slot
from dbo_runtime.ir.values import Value

_SHOWN_INSTRUCTIONS = 12  # on either side of an error


def validate(schedule: Schedule, capture: bool = False) -> None:
    """Check all eight rules; with *capture*, also that the schedule can be captured into a graph. Linear time.

    Raises:
        ScheduleError: a rule is broken. The message names rule, instruction, op and line of declaration, and shows the
            table around the instruction.
    """
    _Replay(schedule, capture).run()


def validate_collectives(schedule: Schedule) -> None:
    """Check rule 9 for ranks that all run this valid schedule: its collectives are on one lane.

    They then meet in the same collectives, and none waits for ever: each instruction comes after those that it waits
    for. `dbo_runtime.lab.oracle.ranks` has the rules for ranks whose schedules differ.

    Raises:
        ScheduleError: the rule is broken. The message is like that of `validate`.
    """
    collectives = [
        (number, instruction)
        for number, instruction in enumerate(schedule.instructions)
        if instruction.op.communicator is not None
    ]
    for number, instruction in collectives:
        first_number, first = collectives[0]
        if instruction.op.lane != first.op.lane:
            there = f"{first.label} (instruction {first_number}) is one on lane {first.op.lane!r}"
            what = f"{instruction.label} is a collective on lane {instruction.op.lane!r}, but {there}"
            _fail(schedule, 9, number, f"{what}; ranks could then disagree on the order of collectives")


@dataclass(slots=True)
class _Use:
    """An op's place on its lane, and the clock of the ops it is ordered after."""

    instruction: int
    lane: str
    count: int
    clock: dict[str, int]


@dataclass(slots=True)
class _Replay:
    """State of replaying a schedule instruction by instruction."""

    schedule: Schedule
    capture: bool
    number: int = 0
    clocks: dict[str, dict[str, int]] = field(default_factory=dict)
    done: dict[Issue, _Use] = field(default_factory=dict)
    recorded: set[Issue] = field(default_factory=set)
    written: dict[Slot, _Use] = field(default_factory=dict)
    read: dict[Slot, list[_Use]] = field(default_factory=dict)
    overwritten: dict[Slot, Instruction] = field(default_factory=dict)
    freed: dict[Slot, int] = field(default_factory=dict)
    holders: dict[str, tuple[Instruction, _Use]] = field(default_factory=dict)
    communicators: dict[str, Instruction] = field(default_factory=dict)
    ordered: dict[tuple[int, str], _Use] = field(default_factory=dict)
    ordered_labels: list[set[str]] = field(default_factory=list)
    owning_lanes: list[dict[Value, frozenset[str]]] = field(default_factory=list)

    def run(self) -> None:
        self.clocks = {lane: {} for lane in self.schedule.lanes}
        for lane in (COMPUTE, *self.schedule.forks):
            if lane not in self.clocks:
                self._fail(7, f"lane {lane!r} is forked, but no program has a lane {lane!r}")
            self.clocks[lane] = {COMPUTE: 1}
        self.owning_lanes = [program.get_owning_lanes() for program in self.schedule.programs]
        self.ordered_labels = [{op.label for op in program.ops if op.ordered} for program in self.schedule.programs]
        for number, instruction in enumerate(self.schedule.instructions):
            self.number = number
            self._check_program_order(instruction)
            self._follow_waits(instruction)
            self._check_frees(instruction)
            use = self._issue(instruction)
            self._check_reads(instruction, use)
            self._check_exclusive(instruction, use)
            self._check_ordered(instruction, use)
            self._check_overwrites(instruction, use)
        self._check_end()

    def _issue(self, instruction: Instruction) -> _Use:
        lane = instruction.op.lane
        if not self.clocks[lane].get(COMPUTE):
            self._fail(7, f"lane {lane!r} starts without a fork from {COMPUTE!r} or a wait that implies it")
        if self.capture and instruction.op.host_sync:
            self._fail(8, f"{instruction.label} blocks the host, so the schedule cannot be captured into a graph")
        self.clocks[lane][lane] = self.clocks[lane].get(lane, 0) + 1
        use = _Use(self.number, lane, self.clocks[lane][lane], dict(self.clocks[lane]))
        self.done[instruction.issue] = use
        if instruction.records:
            self.recorded.add(instruction.issue)
        return use

    def _check_program_order(self, instruction: Instruction) -> None:
        mb, position = instruction.issue
        programs = self.schedule.programs
        if not (0 <= mb < len(programs) and 0 <= position < len(programs[mb].ops)):
            self._fail(1, f"{instruction.issue} names no op of these programs")
        if programs[mb].ops[position] is not instruction.op:
            declared = programs[mb].ops[position].label
            self._fail(1, f"the instruction runs {instruction.op.label!r}, but {instruction.issue} is {declared!r}")
        if instruction.issue in self.done:
            self._fail(1, f"{instruction.label} is issued twice")
        if position and Issue(mb, position - 1) not in self.done:
            self._fail(1, f"{instruction.label} is issued before {programs[mb].ops[position - 1].label}/{mb}")

    def _follow_waits(self, instruction: Instruction) -> None:
        for issue in instruction.waits:
            self._wait(instruction.op.lane, issue, instruction.label)

    def _wait(self, lane: str, issue: Issue, waiter: str) -> None:
        if issue not in self.recorded:
            awaited = name_issue(self.schedule.programs, issue)
            self._fail(3, f"{waiter} waits for {awaited}, which has recorded no event by then")
        clock = self.clocks[lane]
        for other, count in self.done[issue].clock.items():
            clock[other] = max(clock.get(other, 0), count)

    def _check_reads(self, instruction: Instruction, use: _Use) -> None:
        mb = instruction.issue.micro_batch
        inputs = self.schedule.programs[mb].inputs
        for value in dict.fromkeys(instruction.op.reads):
            slot = Slot(mb, value)
            if slot in self.freed:
                self._fail(4, f"{instruction.label} reads {value}, which instruction {self.freed[slot]} freed")
            if slot in self.overwritten:
                self._fail(
                    8, f"{instruction.label} reads {value}, which {self.overwritten[slot].label} has overwritten"
                )
            if value not in inputs and not _is_ordered(self.written.get(slot), use):
                self._fail(2, f"{instruction.label} reads {value} without being ordered after the op that writes it")
            self.read.setdefault(slot, []).append(use)
        self.written.update({Slot(mb, value): use for value in instruction.op.writes})

    def _check_overwrites(self, instruction: Instruction, use: _Use) -> None:
        mb = instruction.issue.micro_batch
        for value in instruction.op.overwrites:
            slot = Slot(mb, value)
            for reader in self.read[slot]:
                if reader is not use and not _is_ordered(reader, use):
                    other = f"instruction {reader.instruction}"
                    self._fail(8, f"{instruction.label} overwrites {value} while {other} may still read it")
            self.overwritten[slot] = instruction

    def _check_frees(self, instruction: Instruction) -> None:
        for slot in instruction.frees:
            mb, value = slot
            name = f"{value} of micro-batch {mb}"
            if not 0 <= mb < len(self.schedule.programs):
                self._fail(4, f"{name} is freed, but there is no micro-batch {mb}")
            program = self.schedule.programs[mb]
            if slot in self.freed:
                self._fail(4, f"{name} is freed twice, first at instruction {self.freed[slot]}")
            if value in program.outputs or value in program.inputs:
                self._fail(4, f"{name} is freed, but it belongs to the caller")
            if slot not in self.written:
                self._fail(4, f"{name} is freed before it is written")
            for lane in {instruction.op.lane, *self.owning_lanes[mb][value]}:
                for use in (self.written[slot], *self.read.get(slot, ())):
                    if self.clocks[lane].get(use.lane, 0) < use.count:
                        user = f"instruction {use.instruction}, on lane {use.lane!r}"
                        self._fail(
                            4,
                            f"{name} is freed while {user}, may still use it: lane {lane!r} is not ordered after that "
                            "instruction and could reuse the memory",
                        )
            self.freed[slot] = self.number

    def _check_exclusive(self, instruction: Instruction, use: _Use) -> None:
        op = instruction.op
        if op.exclusive is not None:
            held = self.holders.get(op.exclusive)
            if held is not None and not _is_ordered(held[1], use):
                self._fail(5, f"{instruction.label} and {held[0].label} may hold {op.exclusive!r} at the same time")
            self.holders[op.exclusive] = instruction, use
        if op.communicator is not None:
            first = self.communicators.setdefault(op.communicator, instruction)
            if first.op.lane != op.lane:
                self._fail(
                    5,
                    f"{instruction.label} uses communicator {op.communicator!r} on lane {op.lane!r}, but {first.label} "
                    f"uses it on lane {first.op.lane!r}; ranks could then disagree on the order of collectives",
                )

    def _check_ordered(self, instruction: Instruction, use: _Use) -> None:
        mb, op = instruction.issue.micro_batch, instruction.op
        if not op.ordered:
            return
        self.ordered[mb, op.label] = use
        for earlier in range(mb):
            known = op.label in self.ordered_labels[earlier]
            if known and not _is_ordered(self.ordered.get((earlier, op.label)), use):
                self._fail(6, f"{instruction.label} is not ordered after {op.label}/{earlier}")

    def _check_end(self) -> None:
        self.number = len(self.schedule.instructions) - 1
        for mb, program in enumerate(self.schedule.programs):
            if Issue(mb, len(program.ops) - 1) not in self.done:
                self._fail(1, f"micro-batch {mb} is not finished: {program.ops[-1].label}/{mb} is never issued")
        for issue in self.schedule.joins:
            self._wait(COMPUTE, issue, "the join")
        for lane, clock in self.clocks.items():
            if self.clocks[COMPUTE].get(lane, 0) < clock.get(lane, 0):
                self._fail(7, f"lane {lane!r} never returns to {COMPUTE!r}: the end is not ordered after its last op")

    def _fail(self, rule: int, what: str) -> NoReturn:
        _fail(self.schedule, rule, self.number, what)


def _is_ordered(earlier: _Use | None, later: _Use) -> bool:
    """Return whether *earlier* was issued and *later* comes after it, by a lane or a chain of records and waits."""
    return earlier is not None and later.clock.get(earlier.lane, 0) >= earlier.count


def _fail(schedule: Schedule, rule: int, number: int, what: str) -> NoReturn:
    where = f" ({schedule.instructions[number].op.declared_at})" if schedule.instructions else ""
    table = render(schedule, mark=number, around=_SHOWN_INSTRUCTIONS)
    raise ScheduleError(f"rule {rule}, instruction {number}: {what}.{where}\n\n{table}")
