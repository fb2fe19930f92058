"""Tracks one run of a schedule, and checks whether each op may do what it is about to do."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from dbo_runtime.engine.executor import BoundOp, describe
from dbo_runtime.errors import SanitizerError
from dbo_runtime.ir.codegen import number_slots
from dbo_runtime.ir.schedule import Instruction, Schedule
from dbo_runtime.ir.values import Value
from dbo_runtime.lab.sanitizer.accesses import Accesses, Clock, Kind
from dbo_runtime.lab.sanitizer.memory import Change


class Monitor:
    """Watches the commands to lanes, and the op that each thread runs.

    Args:
        schedule: the schedule that runs. The monitor relies only on its programs, and on the order of collectives that
            ranks agreed on.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._names = {number: slot for slot, number in number_slots(schedule).items()}
        self._inputs: list[int] = []
        self._outputs: set[int] = set()
        for number, (micro_batch, value) in self._names.items():
            if value in schedule.programs[micro_batch].inputs:
                self._inputs.append(number)
            if value in schedule.programs[micro_batch].outputs:
                self._outputs.add(number)
        self._owning_lanes = [program.get_owning_lanes() for program in schedule.programs]
        self._collectives: dict[str, list[Instruction]] = defaultdict(list)
        for instruction in schedule.instructions:
            if instruction.op.communicator is not None:
                self._collectives[instruction.op.communicator].append(instruction)
        self._thread = threading.local()
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self._accesses = Accesses(self._schedule.lanes)
        self._overwritten: dict[int, int] = {}
        self._communicators: dict[str, str] = {}
        self._issued = 0
        self._positions = [0] * len(self._schedule.programs)
        self._started: dict[str, int] = defaultdict(int)
        self._changes: list[tuple[Instruction, Value, Change]] = []
        for number in self._inputs:
            self._accesses.add_input(number)

    @property
    def running(self) -> Instruction | None:
        """The instruction that this thread is running; None between ops."""
        return getattr(self._thread, "instruction", None)

    def issue(self, task: BoundOp) -> int:
        """Check an op that is about to be launched. Return its number in this run.

        Raises:
            SanitizerError: a value that it accesses is missing, or not ordered before it.
        """
        instruction, op = task.instruction, task.instruction.op
        self._check_turn(instruction)
        for slot in task.frees:
            self._check_free(instruction, slot)
        if not self._accesses.has_begun(op.lane):
            self.fail(
                instruction, "its lane may still run work from before the run: no fork or wait orders it after that"
            )
        self._accesses.issue(op.lane)
        self._issued += 1
        overwrites = {task.reads[op.reads.index(value)] for value in op.overwrites}
        for slot in dict.fromkeys(task.reads):
            self._check_present(instruction, slot)
            self._access(instruction, slot, Kind.READ, self.name(slot))
        for slot in overwrites:
            self._access(instruction, slot, Kind.OVERWRITE, self.name(slot))
            self._overwritten[slot] = self._issued
        for slot in task.writes:
            self._access(instruction, slot, Kind.WRITE, self.name(slot))
        self._check_shared(instruction)
        return self._issued

    def record(self, lane: str) -> Clock:
        """Return the clock of *lane* at this point."""
        return self._accesses.record(lane)

    def wait(self, lane: str, event: Clock) -> None:
        """Order *lane* after an event."""
        self._accesses.wait(lane, event)

    def is_overwritten(self, slot: int, number: int) -> bool:
        """Return whether an op issued before op *number* has overwritten the value in a slot."""
        return self._overwritten.get(slot, number) < number

    @contextmanager
    def run(self, instruction: Instruction) -> Iterator[None]:
        """Mark, within the context, that this thread runs an op.

        Raises:
            SanitizerError: it is not the collective that ranks agreed on as the next one of its communicator.
        """
        communicator = instruction.op.communicator
        if communicator is not None:
            agreed = self._collectives[communicator]
            number = self._started[communicator]
            self._started[communicator] += 1
            if number >= len(agreed) or agreed[number] is not instruction:
                expected = agreed[number].label if number < len(agreed) else "none"
                self.fail(
                    instruction,
                    f"it is number {number} of communicator {communicator!r}, for which ranks agreed on {expected}",
                )
        self._thread.instruction = instruction
        try:
            yield
        finally:
            self._thread.instruction = None

    def note_change(self, instruction: Instruction, value: Value, change: Change) -> None:
        """Keep a check for changes until the end of the run, because devices are not waited for earlier."""
        self._changes.append((instruction, value, change))

    def finish(self) -> None:
        """Check the end of a run.

        Raises:
            SanitizerError: an op was not issued, or a lane may still be running.
        """
        for micro_batch, (position, program) in enumerate(zip(self._positions, self._schedule.programs, strict=True)):
            if position < len(program.ops):
                raise SanitizerError(f"micro-batch {micro_batch} ends before its op {program.ops[position].label!r}.")
        lane = self._accesses.find_open_lane()
        if lane is not None:
            raise SanitizerError(
                f"the run ends while lane {lane!r} may still be running: nothing orders {self._schedule.lanes[0]!r} "
                "after its last op. Validate what you execute."
            )

    def take_changes(self) -> list[tuple[Instruction, Value, Change]]:
        """Return the kept checks of values that ops only read, and forget them."""
        changes, self._changes = self._changes, []
        return changes

    def fail(self, instruction: Instruction, what: str) -> NoReturn:
        """Raise a SanitizerError that names the op, its micro-batch and its line."""
        raise SanitizerError(f"{describe(instruction)}: {what}.")

    def name(self, slot: int) -> str:
        """Return the name of a slot's value in errors."""
        micro_batch, value = self._names[slot]
        return f"{value} of micro-batch {micro_batch}"

    def _check_turn(self, instruction: Instruction) -> None:
        """Check that an op is the next one of its micro-batch's program."""
        micro_batch, position = instruction.issue
        program, expected = self._schedule.programs[micro_batch], self._positions[micro_batch]
        if position != expected or program.ops[position] is not instruction.op:
            label = program.ops[expected].label if expected < len(program.ops) else "none"
            self.fail(instruction, f"it is issued where the program's next op is {label}")
        self._positions[micro_batch] += 1

    def _check_present(self, instruction: Instruction, slot: int) -> None:
        accesses = self._accesses.list(slot)
        if not any(access.kind is Kind.WRITE for access in accesses):
            self.fail(instruction, f"it reads {self.name(slot)}, which is not written yet")
        for access in accesses:
            if access.kind in (Kind.FREE, Kind.OVERWRITE):
                self.fail(instruction, f"it reads {self.name(slot)}, which {access.by} {access.kind.value} before")

    def _check_free(self, instruction: Instruction, slot: int) -> None:
        name = self.name(slot)
        micro_batch, value = self._names[slot]
        kinds = {access.kind for access in self._accesses.list(slot)}
        if slot in self._inputs or slot in self._outputs:
            self.fail(instruction, f"{name} is freed before it, but belongs to the caller")
        if Kind.FREE in kinds:
            self.fail(instruction, f"{name} is freed before it, for the second time")
        if Kind.WRITE not in kinds:
            self.fail(instruction, f"{name} is freed before it, and is not written yet")
        for lane in (instruction.op.lane, *sorted(self._owning_lanes[micro_batch][value])):
            access = self._accesses.find_unordered(slot, Kind.FREE, lane)
            if access is not None:
                self.fail(
                    instruction,
                    f"{name} is freed before it, while {access.by}, which {access.kind.value} it, may still run: lane "
                    f"{lane!r} is not ordered after that op",
                )
        self._accesses.add(slot, Kind.FREE, f"the free before {instruction.label}", instruction.op.lane)

    def _access(self, instruction: Instruction, key: object, kind: Kind, name: str) -> None:
        access = self._accesses.find_unordered(key, kind, instruction.op.lane)
        if access is not None:
            self.fail(
                instruction,
                f"it {kind.value} {name}, while {access.by}, which {access.kind.value} it, may still run: nothing "
                "orders the two",
            )
        self._accesses.add(key, kind, instruction.label, instruction.op.lane)

    def _check_shared(self, instruction: Instruction) -> None:
        """Check an op's shared resources besides values: its exclusive buffer, its communicator and its order."""
        op = instruction.op
        if op.exclusive is not None:
            name = f"{op.exclusive!r}, held exclusively,"
            self._access(instruction, ("exclusive", op.exclusive), Kind.OVERWRITE, name)
        if op.communicator is not None:
            lane = self._communicators.setdefault(op.communicator, op.lane)
            if lane != op.lane:
                self.fail(instruction, f"communicator {op.communicator!r} was used on lane {lane!r} before")
        if op.ordered:
            self._check_ordered(instruction)

    def _check_ordered(self, instruction: Instruction) -> None:
        """Check that the same op of all earlier micro-batches is ordered before this one."""
        micro_batch, op = instruction.issue.micro_batch, instruction.op
        for earlier in range(micro_batch):
            labels = {other.label for other in self._schedule.programs[earlier].ops if other.ordered}
            accesses = self._accesses.list(("ordered", op.label, earlier))
            if op.label in labels and not accesses:
                self.fail(instruction, f"it is ordered, and is issued before that of micro-batch {earlier}")
            if self._accesses.find_unordered(("ordered", op.label, earlier), Kind.READ, op.lane) is not None:
                self.fail(instruction, f"it is ordered, and that of micro-batch {earlier} may still run")
        self._accesses.add(("ordered", op.label, micro_batch), Kind.WRITE, instruction.label, op.lane)
