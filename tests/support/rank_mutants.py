"""Faults planted on one rank of several: each yields every set of plans in which that rank has the fault in one place.

The ranks run two layers of a mixture of experts on two micro-batches: all-reduces in pairs of ranks, tokens exchanged
between all. A fault in the issue order or in a program is lowered anew, so that the rank's own schedule stays sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import COMM, Op
from dbo_runtime.ir.policies import alternate, sequential, staggered
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule
from dbo_runtime.lab.oracle.ranks import Groups, RankPlan

Plans = tuple[RankPlan, ...]
Fault = Callable[[RankPlan], Iterator[RankPlan]]

GROUPS: Groups = {"tp": [[0, 1], [2, 3]]}  # "experts" is not named: all ranks
SIZES = ((7, 5, 6, 6), (5, 5, 6, 6))


def record_experts(layers: int) -> Program:
    """Return layers whose tokens are dispatched to their experts, with a host sync where the sizes have to be known.

    It begins and ends on the comm lane, so that a schedule has a fork and a join.
    """
    p = ProgramBuilder()
    x = p.comm("gather", _work, p.input("x"), communicator="tp")
    for index in range(layers):
        with p.layer(index):
            x = p.compute("attention", _work, x)
            x = p.comm("reduce", _work, x, communicator="tp", overwrites=(x,))
            routing = p.compute("gate", _work, x)
            routing = p.comm("sizes", _work, routing, communicator="experts")
            shared = p.compute("shared", _work, x)
            sent = p.comm("dispatch", _work, x, routing, communicator="experts", host_sync=True)
            routed = p.compute("experts", _work, sent)
            routed = p.comm("combine", _work, routed, communicator="experts")
            x = p.compute("merge", _work, routed, shared)
    p.comm("report", _work, x, communicator="tp", outputs=0)
    return p.build(x)


def make_plans(layers: int = 2) -> Plans:
    """Return the plans of four ranks without a fault."""
    programs = (record_experts(layers),) * 2
    return (RankPlan(lower(programs, alternate(programs)), SIZES),) * 4


def plant(fault: Fault, rank: int, plans: Plans) -> Iterator[Plans]:
    """Yield the plans with the fault on one rank, for each place that it can be in."""
    for plan in fault(plans[rank]):
        yield (*plans[:rank], plan, *plans[rank + 1 :])


def remove_wait(plan: RankPlan) -> Iterator[RankPlan]:
    for number, instruction in enumerate(plan.schedule.instructions):
        for issue in instruction.waits:
            yield _change(plan, number, waits=tuple(other for other in instruction.waits if other != issue))


def remove_record(plan: RankPlan) -> Iterator[RankPlan]:
    for number, instruction in enumerate(plan.schedule.instructions):
        if instruction.records:
            yield _change(plan, number, records=False)


def remove_fork(plan: RankPlan) -> Iterator[RankPlan]:
    yield replace(plan, schedule=replace(plan.schedule, forks=()))


def remove_join(plan: RankPlan) -> Iterator[RankPlan]:
    yield replace(plan, schedule=replace(plan.schedule, joins=()))


def issue_twice(plan: RankPlan) -> Iterator[RankPlan]:
    instructions = plan.schedule.instructions
    for number, instruction in _find_collectives(plan.schedule):
        yield replace(
            plan,
            schedule=replace(plan.schedule, instructions=(*instructions[:number], instruction, *instructions[number:])),
        )


def swap_collectives(plan: RankPlan) -> Iterator[RankPlan]:
    """Two neighbours on the same communicator, of different micro-batches."""
    yield from _swap(plan, lambda first, second: first.op.communicator == second.op.communicator)


def swap_communicators(plan: RankPlan) -> Iterator[RankPlan]:
    """Two neighbours on different communicators: the order on each stays as it was."""
    yield from _swap(plan, lambda first, second: first.op.communicator != second.op.communicator)


def sync_before_reduce(plan: RankPlan) -> Iterator[RankPlan]:
    """The host waits for the sizes of one micro-batch before it issues the reduce of the other."""
    for swapped in swap_communicators(plan):
        programs = tuple(_edit_ops(p, _let_sizes_sync) for p in swapped.schedule.programs)
        yield replace(plan, schedule=lower(programs, _find_order(swapped.schedule)))


def move_to_other_lane(plan: RankPlan) -> Iterator[RankPlan]:
    """One communicator with all its collectives."""
    for name in ("tp", "experts"):
        yield _rewrite(plan, lambda op, name=name: replace(op, lane="aux") if op.communicator == name else op)


def move_one_to_other_lane(plan: RankPlan) -> Iterator[RankPlan]:
    for mb, op in _find_ops(plan):
        yield _rewrite_one(plan, mb, op, replace(op, lane="aux"))


def use_other_communicator(plan: RankPlan) -> Iterator[RankPlan]:
    for mb, op in _find_ops(plan):
        yield _rewrite_one(plan, mb, op, replace(op, communicator="tp" if op.communicator == "experts" else "experts"))


def leave_out_collective(plan: RankPlan) -> Iterator[RankPlan]:
    """Its op computes the same by itself, or knows the answer already."""
    for mb, op in _find_ops(plan):
        yield _rewrite_one(plan, mb, op, replace(op, communicator=None))


def add_collective(plan: RankPlan) -> Iterator[RankPlan]:
    for mb, program in enumerate(plan.schedule.programs):
        for position in (0, len(program.ops) // 2, len(program.ops)):
            programs = list(plan.schedule.programs)
            programs[mb] = _insert(program, position, "more")
            yield replace(plan, schedule=lower(programs, alternate(programs)))


def rename_collective(plan: RankPlan) -> Iterator[RankPlan]:
    """Such as after a change of the adapter on one host only."""
    for mb, op in _find_ops(plan):
        yield _rewrite_one(plan, mb, op, replace(op, name=f"{op.name}_v2"))


def use_other_policy(plan: RankPlan) -> Iterator[RankPlan]:
    programs = plan.schedule.programs
    for order in (sequential(programs), staggered(programs, 1), staggered(programs, 2)):
        yield replace(plan, schedule=lower(programs, order))


def swap_micro_batches(plan: RankPlan) -> Iterator[RankPlan]:
    order = [Issue(1 - mb, position) for mb, position in _find_order(plan.schedule)]
    yield replace(plan, schedule=lower(plan.schedule.programs, order))


def run_unsplit(plan: RankPlan) -> Iterator[RankPlan]:
    programs = plan.schedule.programs[:1]
    yield RankPlan(lower(programs, sequential(programs)), (tuple(map(sum, zip(*SIZES, strict=True))),))


def run_fewer_layers(plan: RankPlan) -> Iterator[RankPlan]:
    programs = (record_experts(1),) * 2
    yield replace(plan, schedule=lower(programs, alternate(programs)))


def cut_elsewhere(plan: RankPlan) -> Iterator[RankPlan]:
    """By one token, of any one rank."""
    for rank in range(len(SIZES[0])):
        first, second = (list(tokens) for tokens in SIZES)
        first[rank] += 1
        second[rank] -= 1
        yield replace(plan, sizes=(tuple(first), tuple(second)))


def forget_rank(plan: RankPlan) -> Iterator[RankPlan]:
    for mb in range(len(SIZES)):
        yield replace(plan, sizes=tuple(tokens[:-1] if n == mb else tokens for n, tokens in enumerate(SIZES)))


def forget_micro_batch(plan: RankPlan) -> Iterator[RankPlan]:
    yield replace(plan, sizes=SIZES[:1])
    yield replace(plan, sizes=(*SIZES, SIZES[0]))


FAULTS: dict[Fault, set[int]] = {  # with the rules that each breaks
    remove_wait: {2, 4},
    remove_record: {3},
    remove_fork: {7},
    remove_join: {7},
    issue_twice: {1},
    move_to_other_lane: {9},
    move_one_to_other_lane: {5},
    swap_collectives: {10},
    swap_communicators: {12},
    sync_before_reduce: {12},
    use_other_communicator: {10},
    leave_out_collective: {10},
    add_collective: {10},
    rename_collective: {10},
    use_other_policy: {10},
    swap_micro_batches: {10},
    run_unsplit: {10},
    run_fewer_layers: {10},
    cut_elsewhere: {11},
    forget_rank: {11},
    forget_micro_batch: {11},
}


def _work(*values: object) -> object:
    return values


def _change(plan: RankPlan, number: int, **fields: Any) -> RankPlan:
    instructions = list(plan.schedule.instructions)
    instructions[number] = replace(instructions[number], **fields)
    return replace(plan, schedule=replace(plan.schedule, instructions=tuple(instructions)))


def _find_order(schedule: Schedule) -> list[Issue]:
    return [instruction.issue for instruction in schedule.instructions]


def _find_collectives(schedule: Schedule) -> list[tuple[int, Instruction]]:
    return [
        (number, instruction)
        for number, instruction in enumerate(schedule.instructions)
        if instruction.op.communicator is not None
    ]


def _find_ops(plan: RankPlan) -> list[tuple[int, Op]]:
    return [(instruction.issue.micro_batch, instruction.op) for _, instruction in _find_collectives(plan.schedule)]


def _swap(plan: RankPlan, is_wanted: Callable[[Instruction, Instruction], bool]) -> Iterator[RankPlan]:
    """Issue the second of two collectives first, with all that its micro-batch must run before it."""
    for (early, first), (late, second) in pairwise(_find_collectives(plan.schedule)):
        mb = second.issue.micro_batch
        if first.issue.micro_batch != mb and is_wanted(first, second):
            order = _find_order(plan.schedule)
            between = order[early : late + 1]
            between.sort(key=lambda issue, mb=mb: issue.micro_batch != mb)  # stable: each keeps its own order
            order[early : late + 1] = between
            yield replace(plan, schedule=lower(plan.schedule.programs, order))


def _rewrite(plan: RankPlan, edit: Callable[[Op], Op]) -> RankPlan:
    programs = tuple(_edit_ops(program, edit) for program in plan.schedule.programs)
    return replace(plan, schedule=lower(programs, _find_order(plan.schedule)))


def _rewrite_one(plan: RankPlan, micro_batch: int, op: Op, changed: Op) -> RankPlan:
    programs = list(plan.schedule.programs)
    programs[micro_batch] = _edit_ops(programs[micro_batch], lambda other: changed if other is op else other)
    return replace(plan, schedule=lower(programs, _find_order(plan.schedule)))


def _edit_ops(program: Program, edit: Callable[[Op], Op]) -> Program:
    return replace(program, ops=tuple(edit(op) for op in program.ops))


def _let_sizes_sync(op: Op) -> Op:
    return replace(op, host_sync=op.name in ("sizes", "dispatch"))


def _insert(program: Program, position: int, name: str) -> Program:
    op = Op(name, COMM, _work, (), (), communicator="experts", declared_at=f"{__file__}:1")
    ops: Sequence[Op] = program.ops
    return replace(program, ops=(*ops[:position], op, *ops[position:]))
