"""Ways to break a schedule, or to change it without breaking it. Which of the two it was is for the oracle to say.

A mutation takes a schedule and `draw`, and returns another schedule, or None if there is nothing there to change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from dbo_runtime.program import Op, Program
from dbo_runtime.schedule import Issue, Schedule, Slot, Step
from tests.strategies import LANES

Draw = Callable[[st.SearchStrategy[Any]], Any]
Mutation = Callable[[Schedule, Draw], "Schedule | None"]


def remove_wait(schedule: Schedule, draw: Draw) -> Schedule | None:
    waits = [(number, issue) for number, step in enumerate(schedule.steps) for issue in step.waits]
    if not waits:
        return None
    number, issue = draw(st.sampled_from(waits))
    return _change(schedule, number, waits=tuple(i for i in schedule.steps[number].waits if i != issue))


def remove_wait_and_all_frees(schedule: Schedule, draw: Draw) -> Schedule | None:
    """So that nothing but the race itself is wrong, where a free would be unsafe as well."""
    return remove_wait(replace(schedule, steps=tuple(replace(step, frees=()) for step in schedule.steps)), draw)


def move_wait(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Let another step do the waiting."""
    waits = [(number, issue) for number, step in enumerate(schedule.steps) for issue in step.waits]
    if not waits:
        return None
    number, issue = draw(st.sampled_from(waits))
    fewer = _change(schedule, number, waits=tuple(i for i in schedule.steps[number].waits if i != issue))
    other = draw(st.sampled_from(range(len(schedule.steps))))
    return _change(fewer, other, waits=(*fewer.steps[other].waits, issue))


def add_wait(schedule: Schedule, draw: Draw) -> Schedule | None:
    number = draw(st.sampled_from(range(len(schedule.steps))))
    issue = draw(st.sampled_from(schedule.steps)).issue
    return _change(schedule, number, waits=(*schedule.steps[number].waits, issue))


def remove_record(schedule: Schedule, draw: Draw) -> Schedule | None:
    records = [number for number, step in enumerate(schedule.steps) if step.records]
    return _change(schedule, draw(st.sampled_from(records)), records=False) if records else None


def add_record(schedule: Schedule, draw: Draw) -> Schedule | None:
    silent = [number for number, step in enumerate(schedule.steps) if not step.records]
    return _change(schedule, draw(st.sampled_from(silent)), records=True) if silent else None


def move_free(schedule: Schedule, draw: Draw) -> Schedule | None:
    frees = _find_frees(schedule)
    if not frees:
        return None
    number, slot = draw(st.sampled_from(frees))
    other = draw(st.sampled_from(range(len(schedule.steps))))
    return _add_free(_remove_free(schedule, number, slot), other, slot)


def move_free_earlier(schedule: Schedule, draw: Draw) -> Schedule | None:
    """To the step before, where it may still be in use on the other lane."""
    frees = [(number, slot) for number, slot in _find_frees(schedule) if number]
    if not frees:
        return None
    number, slot = draw(st.sampled_from(frees))
    return _add_free(_remove_free(schedule, number, slot), number - 1, slot)


def remove_free(schedule: Schedule, draw: Draw) -> Schedule | None:
    frees = _find_frees(schedule)
    return _remove_free(schedule, *draw(st.sampled_from(frees))) if frees else None


def add_free(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Of any value at any step, whether it is freed already or not."""
    values = [Slot(mb, value) for mb, program in enumerate(schedule.programs) for value in _find_values(program)]
    return _add_free(schedule, draw(st.sampled_from(range(len(schedule.steps)))), draw(st.sampled_from(values)))


def remove_step(schedule: Schedule, draw: Draw) -> Schedule | None:
    if len(schedule.steps) < 2:
        return None
    number = draw(st.sampled_from(range(len(schedule.steps))))
    return replace(schedule, steps=(*schedule.steps[:number], *schedule.steps[number + 1 :]))


def duplicate_step(schedule: Schedule, draw: Draw) -> Schedule | None:
    number, other = (draw(st.sampled_from(range(len(schedule.steps)))) for _ in range(2))
    copy = replace(schedule.steps[number], frees=())
    return replace(schedule, steps=(*schedule.steps[:other], copy, *schedule.steps[other:]))


def swap_neighbours(schedule: Schedule, draw: Draw) -> Schedule | None:
    if len(schedule.steps) < 2:
        return None
    steps = list(schedule.steps)
    number = draw(st.sampled_from(range(len(steps) - 1)))
    steps[number], steps[number + 1] = steps[number + 1], steps[number]
    return replace(schedule, steps=tuple(steps))


def swap_effects(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Let two steps change places, but leave waits and frees where they were."""
    if len(schedule.steps) < 2:
        return None
    number = draw(st.sampled_from(range(len(schedule.steps) - 1)))
    first, second = schedule.steps[number], schedule.steps[number + 1]
    steps = list(schedule.steps)
    steps[number] = replace(second, waits=first.waits, frees=first.frees)
    steps[number + 1] = replace(first, waits=second.waits, frees=second.frees)
    return replace(schedule, steps=tuple(steps))


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
    return fewer and replace(fewer, joins=(*fewer.joins, draw(st.sampled_from(schedule.steps)).issue))


def move_op_to_other_lane(schedule: Schedule, draw: Draw) -> Schedule | None:
    """In program and schedule alike, while all waits and frees stay as they were derived for the old lane."""
    moved = draw(st.sampled_from(schedule.steps)).issue
    program = schedule.programs[moved.micro_batch]
    ops = list(program.ops)
    ops[moved.position] = replace(ops[moved.position], lane=draw(st.sampled_from(LANES)))
    programs = _exchange(schedule.programs, moved.micro_batch, replace(program, ops=tuple(ops)))
    steps = tuple(replace(step, op=_find_op(programs, step.issue)) for step in schedule.steps)
    return replace(schedule, programs=programs, steps=steps)


def exchange_op(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Run the op of another step under a step's name."""
    number, other = (draw(st.sampled_from(range(len(schedule.steps)))) for _ in range(2))
    return _change(schedule, number, op=schedule.steps[other].op)


BREAKING: Sequence[Mutation] = (
    remove_wait,
    remove_wait_and_all_frees,
    move_wait,
    add_wait,
    remove_record,
    move_free,
    move_free_earlier,
    add_free,
    remove_step,
    duplicate_step,
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
    step: Step = replace(schedule.steps[number], **fields)
    return replace(schedule, steps=_exchange(schedule.steps, number, step))


def _exchange(items: tuple[Any, ...], number: int, item: Any) -> tuple[Any, ...]:
    return (*items[:number], item, *items[number + 1 :])


def _find_op(programs: Sequence[Program], issue: Issue) -> Op:
    return programs[issue.micro_batch].ops[issue.position]


def _find_frees(schedule: Schedule) -> list[tuple[int, Slot]]:
    return [(number, slot) for number, step in enumerate(schedule.steps) for slot in step.frees]


def _remove_free(schedule: Schedule, number: int, slot: Slot) -> Schedule:
    return _change(schedule, number, frees=tuple(other for other in schedule.steps[number].frees if other != slot))


def _add_free(schedule: Schedule, number: int, slot: Slot) -> Schedule:
    return _change(schedule, number, frees=(*schedule.steps[number].frees, slot))


def _find_values(program: Program) -> list[Any]:
    return [*program.inputs, *(value for op in program.ops for value in op.writes)]
