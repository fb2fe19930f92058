"""Proves that a schedule cannot race or hang, whoever made it.

Shares nothing with lowering but the data types: lowering decides where waits and frees go, this replays the finished
steps and checks what they guarantee. The rules are numbered as in docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from dbo_runtime.errors import ScheduleError
from dbo_runtime.program import COMPUTE, Value
from dbo_runtime.render import name_issue, render
from dbo_runtime.schedule import Issue, Schedule, Slot, Step

_SHOWN = 12  # steps shown on either side of a fault


def validate(schedule: Schedule, capture: bool = False) -> None:
    """Check all eight rules; with *capture*, also that the schedule can be captured into a graph. Linear time.

    Raises:
        ScheduleError: naming rule, step, op and line of declaration, with the table around the step.
    """
    _Replay(schedule, capture).run()


@dataclass(slots=True)
class _Use:
    """Where on which lane an op ran, and what it had to come after."""

    step: int
    lane: str
    count: int
    clock: dict[str, int]


@dataclass(slots=True)
class _Replay:
    schedule: Schedule
    capture: bool
    number: int = 0
    clocks: dict[str, dict[str, int]] = field(default_factory=dict)
    done: dict[Issue, _Use] = field(default_factory=dict)
    recorded: set[Issue] = field(default_factory=set)
    written: dict[Slot, _Use] = field(default_factory=dict)
    read: dict[Slot, list[_Use]] = field(default_factory=dict)
    overwritten: dict[Slot, Step] = field(default_factory=dict)
    freed: dict[Slot, int] = field(default_factory=dict)
    holders: dict[str, tuple[Step, _Use]] = field(default_factory=dict)
    communicators: dict[str, Step] = field(default_factory=dict)
    ordered: dict[tuple[int, str], _Use] = field(default_factory=dict)
    ordered_labels: list[set[str]] = field(default_factory=list)
    homes: list[dict[Value, frozenset[str]]] = field(default_factory=list)

    def run(self) -> None:
        self.clocks = {lane: {} for lane in self.schedule.lanes}
        for lane in (COMPUTE, *self.schedule.forks):
            if lane not in self.clocks:
                self._fail(7, f"lane {lane!r} is forked, but no program has a lane {lane!r}")
            self.clocks[lane] = {COMPUTE: 1}
        self.homes = [program.find_homes() for program in self.schedule.programs]
        self.ordered_labels = [{op.label for op in program.ops if op.ordered} for program in self.schedule.programs]
        for number, step in enumerate(self.schedule.steps):
            self.number = number
            self._check_program_order(step)
            self._follow_waits(step)
            self._check_frees(step)
            use = self._issue(step)
            self._check_reads(step, use)
            self._check_exclusive(step, use)
            self._check_ordered(step, use)
            self._check_overwrites(step, use)
        self._check_end()

    def _issue(self, step: Step) -> _Use:
        lane = step.op.lane
        if not self.clocks[lane].get(COMPUTE):
            self._fail(7, f"lane {lane!r} starts without a fork from {COMPUTE!r} or a wait that implies it")
        if self.capture and step.op.host_sync:
            self._fail(8, f"{step.label} blocks the host, so the schedule cannot be captured into a graph")
        self.clocks[lane][lane] = self.clocks[lane].get(lane, 0) + 1
        use = _Use(self.number, lane, self.clocks[lane][lane], dict(self.clocks[lane]))
        self.done[step.issue] = use
        if step.records:
            self.recorded.add(step.issue)
        return use

    def _check_program_order(self, step: Step) -> None:
        mb, position = step.issue
        programs = self.schedule.programs
        if not (0 <= mb < len(programs) and 0 <= position < len(programs[mb].ops)):
            self._fail(1, f"{step.issue} names no op of these programs")
        if programs[mb].ops[position] is not step.op:
            self._fail(1, f"the step runs {step.op.label!r}, but {step.issue} is {programs[mb].ops[position].label!r}")
        if step.issue in self.done:
            self._fail(1, f"{step.label} is issued twice")
        if position and Issue(mb, position - 1) not in self.done:
            self._fail(1, f"{step.label} is issued before {programs[mb].ops[position - 1].label}/{mb}")

    def _follow_waits(self, step: Step) -> None:
        for issue in step.waits:
            self._wait(step.op.lane, issue, step.label)

    def _wait(self, lane: str, issue: Issue, waiter: str) -> None:
        if issue not in self.recorded:
            awaited = name_issue(self.schedule.programs, issue)
            self._fail(3, f"{waiter} waits for {awaited}, which has recorded no event by then")
        clock = self.clocks[lane]
        for other, count in self.done[issue].clock.items():
            clock[other] = max(clock.get(other, 0), count)

    def _check_reads(self, step: Step, use: _Use) -> None:
        mb = step.issue.micro_batch
        inputs = self.schedule.programs[mb].inputs
        for value in dict.fromkeys(step.op.reads):
            slot = Slot(mb, value)
            if slot in self.freed:
                self._fail(4, f"{step.label} reads {value}, which step {self.freed[slot]} freed")
            if slot in self.overwritten:
                self._fail(8, f"{step.label} reads {value}, which {self.overwritten[slot].label} has overwritten")
            if value not in inputs and not _is_ordered(self.written.get(slot), use):
                self._fail(2, f"{step.label} reads {value} without being ordered after the op that writes it")
            self.read.setdefault(slot, []).append(use)
        self.written.update({Slot(mb, value): use for value in step.op.writes})

    def _check_overwrites(self, step: Step, use: _Use) -> None:
        mb = step.issue.micro_batch
        for value in step.op.overwrites:
            slot = Slot(mb, value)
            for reader in self.read[slot]:
                if reader is not use and not _is_ordered(reader, use):
                    self._fail(8, f"{step.label} overwrites {value} while step {reader.step} may still read it")
            self.overwritten[slot] = step

    def _check_frees(self, step: Step) -> None:
        for slot in step.frees:
            mb, value = slot
            name = f"{value} of micro-batch {mb}"
            if not 0 <= mb < len(self.schedule.programs):
                self._fail(4, f"{name} is freed, but there is no micro-batch {mb}")
            program = self.schedule.programs[mb]
            if slot in self.freed:
                self._fail(4, f"{name} is freed twice, first at step {self.freed[slot]}")
            if value in program.outputs or value in program.inputs:
                self._fail(4, f"{name} is freed, but it belongs to whoever runs the schedule")
            if slot not in self.written:
                self._fail(4, f"{name} is freed before it is written")
            for lane in {step.op.lane, *self.homes[mb][value]}:
                for use in (self.written[slot], *self.read.get(slot, ())):
                    if self.clocks[lane].get(use.lane, 0) < use.count:
                        self._fail(
                            4,
                            f"{name} is freed while step {use.step}, on lane {use.lane!r}, may still use it: lane "
                            f"{lane!r} is not ordered after that step and could be handed the memory",
                        )
            self.freed[slot] = self.number

    def _check_exclusive(self, step: Step, use: _Use) -> None:
        op = step.op
        if op.exclusive is not None:
            held = self.holders.get(op.exclusive)
            if held is not None and not _is_ordered(held[1], use):
                self._fail(5, f"{step.label} and {held[0].label} may hold {op.exclusive!r} at the same time")
            self.holders[op.exclusive] = step, use
        if op.communicator is not None:
            first = self.communicators.setdefault(op.communicator, step)
            if first.op.lane != op.lane:
                self._fail(
                    5,
                    f"{step.label} uses communicator {op.communicator!r} on lane {op.lane!r}, but {first.label} uses "
                    f"it on lane {first.op.lane!r}; ranks could then disagree on the order of collectives",
                )

    def _check_ordered(self, step: Step, use: _Use) -> None:
        mb, op = step.issue.micro_batch, step.op
        if not op.ordered:
            return
        self.ordered[mb, op.label] = use
        for earlier in range(mb):
            known = op.label in self.ordered_labels[earlier]
            if known and not _is_ordered(self.ordered.get((earlier, op.label)), use):
                self._fail(6, f"{step.label} is not ordered after {op.label}/{earlier}")

    def _check_end(self) -> None:
        self.number = len(self.schedule.steps) - 1
        for mb, program in enumerate(self.schedule.programs):
            if Issue(mb, len(program.ops) - 1) not in self.done:
                self._fail(1, f"micro-batch {mb} is not finished: {program.ops[-1].label}/{mb} is never issued")
        for issue in self.schedule.joins:
            self._wait(COMPUTE, issue, "the join")
        for lane, clock in self.clocks.items():
            if self.clocks[COMPUTE].get(lane, 0) < clock.get(lane, 0):
                self._fail(7, f"lane {lane!r} never returns to {COMPUTE!r}: the end is not ordered after its last op")

    def _fail(self, rule: int, what: str) -> NoReturn:
        steps = self.schedule.steps
        where = f" ({steps[self.number].op.declared_at})" if steps else ""
        table = render(self.schedule, mark=self.number, around=_SHOWN)
        raise ScheduleError(f"rule {rule}, step {self.number}: {what}.{where}\n\n{table}")


def _is_ordered(earlier: _Use | None, later: _Use) -> bool:
    """Whether *earlier* has happened and *later* comes after it, by its lane or a chain of record and wait."""
    return earlier is not None and later.clock.get(earlier.lane, 0) >= earlier.count
