"""Write a schedule as the source of one Python function that does what the executor's loop does, line by line.

A value of micro-batch 1 is a local variable, such as `v12_1` for `%12`. A value that an op on a launched lane reads,
writes or frees is an element of the list `values` instead, because the lane's tasks need it, too. An event is named
after the instruction that records it:

    wait_comm(event_0)
    switch_comm()
    v2_0 = op_L0_send(v1_0)  # 1  L0.send/0
    record_comm(event_1)

Each kind of name has its own prefix, so that an op or a lane cannot collide with anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from dbo_runtime.ir.render import digest
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule, Slot
from dbo_runtime.ir.values import Value

Key = TypeVar("Key")

FUNCTION = "issue"  # the name of the generated function
FILE_PREFIX = "<schedule "  # start of the file names shown in tracebacks


class Issuing(Enum):
    """The way ops are issued onto a lane.

    LAUNCHED: as tasks, through `Lane.launch`.
    CALLED: by direct calls; see `devices.DirectCalls`.
    SWITCHED: by direct calls, while the lane is current.
    """

    LAUNCHED = "launched"
    CALLED = "called"
    SWITCHED = "switched"


@dataclass(frozen=True, slots=True)
class Source:
    """A generated function as text, with the objects that its names are bound to.

    Attributes:
        file: file name shown in tracebacks: `<schedule DIGEST>`.
        text: source of `issue(values, enter)`, which reads the programs' inputs from *values* and writes outputs there.
        calls: instruction number by line number, for each line that calls an op.
        functions: the ops' functions by their names in the text, such as `op_L0_send`.
        lanes: the lanes by their names in the text, such as `lane_comm`.
    """

    file: str
    text: str
    calls: Mapping[int, int]
    functions: Mapping[str, Callable[..., Any]]
    lanes: Mapping[str, str]


def write_source(schedule: Schedule, issuing: Mapping[str, Issuing]) -> Source:
    """Return the source of the function that issues a schedule.

    Args:
        schedule: the schedule to issue.
        issuing: way to issue ops, for each of the schedule's lanes.
    """
    return _Writer(schedule, issuing).write()


def number_slots(schedule: Schedule) -> dict[Slot, int]:
    """Return each value's index in the list `values`: inputs first, then in issue order."""
    slots: dict[Slot, int] = {}
    for mb, program in enumerate(schedule.programs):
        _number(slots, mb, program.inputs)
    for instruction in schedule.instructions:
        mb, op = instruction.issue.micro_batch, instruction.op
        _number(slots, mb, (*op.reads, *op.writes))
    for mb, program in enumerate(schedule.programs):
        _number(slots, mb, program.outputs)
    return slots


def _number(slots: dict[Slot, int], micro_batch: int, values: Iterable[Value]) -> None:
    for value in values:
        slots.setdefault(Slot(micro_batch, value), len(slots))


class _Writer:
    """Accumulates the lines of one function, and tracks which lane is current."""

    def __init__(self, schedule: Schedule, issuing: Mapping[str, Issuing]) -> None:
        self._schedule = schedule
        self._issuing = issuing
        self._slots = number_slots(schedule)
        self._shared = _list_shared(schedule, issuing)
        self._assigned: set[Slot] = set()  # local variables assigned so far
        self._lanes = _make_identifiers({lane: lane for lane in schedule.lanes})
        self._functions = _make_identifiers(
            {_get_key(instruction): instruction.op.label for instruction in schedule.instructions}
        )
        self._numbers = {instruction.issue: n for n, instruction in enumerate(schedule.instructions)}
        self._recorded: set[Issue] = set()
        self._lines: list[str] = []
        self._calls: dict[int, int] = {}

    def write(self) -> Source:
        name = digest(self._schedule)
        self._lines += [f"def {FUNCTION}(values, enter):", f'    """Issue schedule {name}."""']
        self._write_beginning()
        current, lane = -1, self._schedule.lanes[0]
        contexts = self._schedule.list_contexts()
        for number, (instruction, context) in enumerate(zip(self._schedule.instructions, contexts, strict=True)):
            self._write_waits(instruction.op.lane, instruction.waits)
            if context != current:
                current = context
                self._add(f"enter({context})")
            if instruction.op.lane != lane and self._issuing[instruction.op.lane] is Issuing.SWITCHED:
                lane = instruction.op.lane
                self._add(f"switch_{self._lanes[lane]}()")
            self._write_op(number, instruction)
            if instruction.records:
                self._recorded.add(instruction.issue)
                self._write_record(instruction.op.lane, f"event_{number}")
        self._write_end()
        functions = {
            f"op_{self._functions[_get_key(instruction)]}": instruction.op.fn
            for instruction in self._schedule.instructions
        }
        lanes = {f"lane_{name}": lane for lane, name in self._lanes.items()}
        return Source(f"{FILE_PREFIX}{name}>", "\n".join(self._lines) + "\n", self._calls, functions, lanes)

    def _add(self, statement: str) -> None:
        self._lines.append(f"    {statement}")

    def _write_beginning(self) -> None:
        for lane, name in self._lanes.items():
            if self._issuing[lane] is not Issuing.LAUNCHED:
                self._add(f"switch_{name}, record_{name}, wait_{name} = lane_{name}.get_direct_calls()")
        if self._schedule.forks:
            self._write_record(self._schedule.lanes[0], "start")
        for lane in self._schedule.forks:
            self._write_wait(lane, "start", is_recorded=True)
        for mb, program in enumerate(self._schedule.programs):
            for slot in (Slot(mb, value) for value in program.inputs):
                if slot not in self._shared:
                    self._add(f"{self._assign(slot)} = values[{self._slots[slot]}]")

    def _write_op(self, number: int, instruction: Instruction) -> None:
        mb, op = instruction.issue.micro_batch, instruction.op
        comment = f"  # {number}  {instruction.label}"
        if self._issuing[op.lane] is Issuing.LAUNCHED:  # the task itself frees, reads and writes
            self._add(f"lane_{self._lanes[op.lane]}.launch(task_{number}, values){comment}")
            return
        if instruction.frees:
            self._add(" = ".join([*map(self._assign, instruction.frees), "None"]))
        arguments = ", ".join(self._read(Slot(mb, value)) for value in op.reads)
        call = f"op_{self._functions[_get_key(instruction)]}({arguments})"
        if len(op.writes) > 1:
            call = f"unpack({call}, {len(op.writes)})"
        written = ", ".join(self._assign(Slot(mb, value)) for value in op.writes)
        self._add((f"{written} = {call}" if written else call) + comment)
        self._calls[len(self._lines)] = number

    def _write_waits(self, lane: str, waits: Sequence[Issue]) -> None:
        for issue in waits:
            self._write_wait(lane, f"event_{self._numbers[issue]}", issue in self._recorded)

    def _write_wait(self, lane: str, event: str, is_recorded: bool) -> None:
        name = self._lanes[lane]
        if self._issuing[lane] is Issuing.LAUNCHED or not is_recorded:  # a lane's own wait rejects unrecorded events
            self._add(f"lane_{name}.wait({event})")
        else:
            self._add(f"wait_{name}({event})")

    def _write_record(self, lane: str, event: str) -> None:
        name = self._lanes[lane]
        is_launched = self._issuing[lane] is Issuing.LAUNCHED
        self._add(f"lane_{name}.record({event})" if is_launched else f"record_{name}({event})")

    def _write_end(self) -> None:
        self._write_waits(self._schedule.lanes[0], self._schedule.joins)
        for mb, program in enumerate(self._schedule.programs):
            for slot in (Slot(mb, value) for value in dict.fromkeys(program.outputs)):
                if slot in self._assigned:
                    self._add(f"values[{self._slots[slot]}] = {self._read(slot)}")

    def _read(self, slot: Slot) -> str:
        if slot in self._shared:
            return f"values[{self._slots[slot]}]"
        return f"v{slot.value.index}_{slot.micro_batch}"

    def _assign(self, slot: Slot) -> str:
        if slot not in self._shared:
            self._assigned.add(slot)
        return self._read(slot)


def _get_key(instruction: Instruction) -> tuple[str, int]:
    """Return a key that is equal for the same op of one program in two micro-batches."""
    return instruction.op.label, id(instruction.op.fn)


def _make_identifiers(names: Mapping[Key, str]) -> dict[Key, str]:
    """Return a unique identifier suffix for each name."""
    made: dict[Key, str] = {}
    taken: set[str] = set()
    for key, name in names.items():
        identifier = plain = re.sub(r"\W", "_", name, flags=re.ASCII)
        copies = 1
        while identifier in taken:
            copies += 1
            identifier = f"{plain}_{copies}"
        taken.add(identifier)
        made[key] = identifier
    return made


def _list_shared(schedule: Schedule, issuing: Mapping[str, Issuing]) -> set[Slot]:
    """Return the values that tasks read, write or free."""
    shared: set[Slot] = set()
    for instruction in schedule.instructions:
        if issuing[instruction.op.lane] is Issuing.LAUNCHED:
            mb, op = instruction.issue.micro_batch, instruction.op
            shared.update(Slot(mb, value) for value in (*op.reads, *op.writes))
            shared.update(instruction.frees)
    return shared
