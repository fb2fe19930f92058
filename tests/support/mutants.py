"""Ways to break a schedule, or to change it without breaking it. Which of the two it was is for the oracle to say.

A mutation takes a schedule and `draw`, and returns another schedule, or None if there is nothing there to change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from dbo_runtime.ir.op import Op
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule, Slot
from tests.support.strategies import LANES

Draw = Callable[[st.SearchStrategy[Any]], Any]
Mutation = Callable[[Schedule, Draw], "Schedule | None"]


def remove_wait(schedule: Schedule, draw: Draw) -> Schedule | None:
    waits = [(number, issue) for number, instruction in enumerate(schedule.instructions) for issue in instruction.waits]
    if not waits:
        return None
    number, issue = draw(st.sampled_from(waits))
    return _change(schedule, number, waits=tuple(i for i in schedule.instructions[number].waits if i != issue))


def remove_wait_and_all_frees(schedule: Schedule, draw: Draw) -> Schedule | None:
    """So that nothing but the race itself is wrong, where a free would be unsafe as well."""
    return remove_wait(
        replace(schedule, instructions=tuple(replace(instruction, frees=()) for instruction in schedule.instructions)),
        draw,
    )


def move_wait(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Let another instruction do the waiting."""
    waits = [(number, issue) for number, instruction in enumerate(schedule.instructions) for issue in instruction.waits]
    if not waits:
        return None
    number, issue = draw(st.sampled_from(waits))
    fewer = _change(schedule, number, waits=tuple(i for i in schedule.instructions[number].waits if i != issue))
    other = draw(st.sampled_from(range(len(schedule.instructions))))
    return _change(fewer, other, waits=(*fewer.instructions[other].waits, issue))


def add_wait(schedule: Schedule, draw: Draw) -> Schedule | None:
    number = draw(st.sampled_from(range(len(schedule.instructions))))
    issue = draw(st.sampled_from(schedule.instructions)).issue
    return _change(schedule, number, waits=(*schedule.instructions[number].waits, issue))


def remove_record(schedule: Schedule, draw: Draw) -> Schedule | None:
    records = [number for number, instruction in enumerate(schedule.instructions) if instruction.records]
    return _change(schedule, draw(st.sampled_from(records)), records=False) if records else None


def add_record(schedule: Schedule, draw: Draw) -> Schedule | None:
    silent = [number for number, instruction in enumerate(schedule.instructions) if not instruction.records]
    return _change(schedule, draw(st.sampled_from(silent)), records=True) if silent else None


def move_free(schedule: Schedule, draw: Draw) -> Schedule | None:
    frees = _find_frees(schedule)
    if not frees:
        return None
    number, slot = draw(st.sampled_from(frees))
    other = draw(st.sampled_from(range(len(schedule.instructions))))
    return _add_free(_remove_free(schedule, number, slot), other, slot)


def move_free_earlier(schedule: Schedule, draw: Draw) -> Schedule | None:
    """To the instruction before, where it may still be in use on the other lane."""
    frees = [(number, slot) for number, slot in _find_frees(schedule) if number]
    if not frees:
        return None
    number, slot = draw(st.sampled_from(frees))
    return _add_free(_remove_free(schedule, number, slot), number - 1, slot)


def remove_free(schedule: Schedule, draw: Draw) -> Schedule | None:
    frees = _find_frees(schedule)
    return _remove_free(schedule, *draw(st.sampled_from(frees))) if frees else None


def add_free(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Of any value at any instruction, whether it is freed already or not."""
    values = [Slot(mb, value) for mb, program in enumerate(schedule.programs) for value in _find_values(program)]
    return _add_free(schedule, draw(st.sampled_from(range(len(schedule.instructions)))), draw(st.sampled_from(values)))


def remove_instruction(schedule: Schedule, draw: Draw) -> Schedule | None:
    if len(schedule.instructions) < 2:
        return None
    number = draw(st.sampled_from(range(len(schedule.instructions))))
    return replace(schedule, instructions=(*schedule.instructions[:number], *schedule.instructions[number + 1 :]))


def duplicate_instruction(schedule: Schedule, draw: Draw) -> Schedule | None:
    number, other = (draw(st.sampled_from(range(len(schedule.instructions)))) for _ in range(2))
    copy = replace(schedule.instructions[number], frees=())
    return replace(schedule, instructions=(*schedule.instructions[:other], copy, *schedule.instructions[other:]))


def swap_neighbours(schedule: Schedule, draw: Draw) -> Schedule | None:
    if len(schedule.instructions) < 2:
        return None
    instructions = list(schedule.instructions)
    number = draw(st.sampled_from(range(len(instructions) - 1)))
    instructions[number], instructions[number + 1] = instructions[number + 1], instructions[number]
    return replace(schedule, instructions=tuple(instructions))


def swap_effects(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Let two instructions change places, but leave waits and frees where they were."""
    if len(schedule.instructions) < 2:
        return None
    number = draw(st.sampled_from(range(len(schedule.instructions) - 1)))
    first, second = schedule.instructions[number], schedule.instructions[number + 1]
    instructions = list(schedule.instructions)
    instructions[number] = replace(second, waits=first.waits, frees=first.frees)
    instructions[number + 1] = replace(first, waits=second.waits, frees=second.frees)
    return replace(schedule, instructions=tuple(instructions))


def remove_fork(schedule: Schedule, draw: Draw) -> Schedule | None:
    if not schedule.forks:
        return None
    lane = draw(st.sampled_from(schedule.forks))
    return replace(schedule, forks=tuple(other for other in schedule.forks if other != lane))


def add_fork(schedule: Schedule, draw: Draw) -> Schedule | None:
    return replace(schedule, forks=(*schedule.forks, draw(st.sampled_from(schedule.lanes))))


def remove_join(schedule: Schedule, draw: Draw) -> Schedule | None:
    if not schedule.joins:
        return None
    issue = draw(st.sampled_from(schedule.joins))
    return replace(schedule, joins=tuple(other for other in schedule.joins if other != issue))


def replace_join(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Join another op than the last one of a lane, recorded or not."""
    fewer = remove_join(schedule, draw)
    return fewer and replace(fewer, joins=(*fewer.joins, draw(st.sampled_from(schedule.instructions)).issue))


def move_op_to_other_lane(schedule: Schedule, draw: Draw) -> Schedule | None:
    """In program and schedule alike, while all waits and frees stay as they were derived for the old lane."""
    moved = draw(st.sampled_from(schedule.instructions)).issue
    program = schedule.programs[moved.micro_batch]
    ops = list(program.ops)
    ops[moved.position] = replace(ops[moved.position], lane=draw(st.sampled_from(LANES)))
    programs = _exchange(schedule.programs, moved.micro_batch, replace(program, ops=tuple(ops)))
    instructions = tuple(
        replace(instruction, op=_find_op(programs, instruction.issue)) for instruction in schedule.instructions
    )
    return replace(schedule, programs=programs, instructions=instructions)


def exchange_op(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Run the op of another instruction under an instruction's name."""
    number, other = (draw(st.sampled_from(range(len(schedule.instructions)))) for _ in range(2))
    return _change(schedule, number, op=schedule.instructions[other].op)


BREAKING: Sequence[Mutation] = (
    remove_wait,
    remove_wait_and_all_frees,
    move_wait,
    add_wait,
    remove_record,
    move_free,
    move_free_earlier,
    add_free,
    remove_instruction,
    duplicate_instruction,
    swap_neighbours,
    swap_effects,
    remove_fork,
    remove_join,
    replace_join,
    move_op_to_other_lane,
    exchange_op,
)
HARMLESS: Sequence[Mutation] = (add_record, remove_free, add_fork)


def _change(schedule: Schedule, number: int, **fields: Any) -> Schedule:
    instruction: Instruction = replace(schedule.instructions[number], **fields)
    return replace(schedule, instructions=_exchange(schedule.instructions, number, instruction))


def _exchange(items: tuple[Any, ...], number: int, item: Any) -> tuple[Any, ...]:
    return (*items[:number], item, *items[number + 1 :])


def _find_op(programs: Sequence[Program], issue: Issue) -> Op:
    return programs[issue.micro_batch].ops[issue.position]


def _find_frees(schedule: Schedule) -> list[tuple[int, Slot]]:
    return [(number, slot) for number, instruction in enumerate(schedule.instructions) for slot in instruction.frees]


def _remove_free(schedule: Schedule, number: int, slot: Slot) -> Schedule:
    return _change(
        schedule, number, frees=tuple(other for other in schedule.instructions[number].frees if other != slot)
    )


def _add_free(schedule: Schedule, number: int, slot: Slot) -> Schedule:
    return _change(schedule, number, frees=(*schedule.instructions[number].frees, slot))


def _find_values(program: Program) -> list[Any]:
    return [*program.inputs, *(value for op in program.ops for value in op.writes)]
