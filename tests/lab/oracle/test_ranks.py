"""Each rule between ranks, kept and broken by hand; tests/properties has the random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import COMM, COMPUTE
from dbo_runtime.ir.policies import alternate, sequential
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Issue, Schedule
from dbo_runtime.lab.oracle.ranks import Groups, RankPlan, find_deadlock, get_groups, validate_ranks
from dbo_runtime.lab.simulate.multi_rank_simulator import simulate_ranks
from tests.support.programs import lower_toy
from tests.support.rank_mutants import GROUPS, make_plans


def record(*names: str, lane: str = COMM, communicator: str | None = None, host_sync: bool = False) -> Program:
    """Return a program of collectives, each reading what the one before it writes, on communicators of their names."""
    p = ProgramBuilder()
    x = p.input("x")
    for name in names:
        x = p.op(name, lambda x: x, x, lane=lane, communicator=communicator or name, host_sync=host_sync)
    return p.build(x)


def put_first(name: str, program: Program) -> Program:
    """Return a program with an op on `compute` before the others."""
    op = replace(record(name, lane=COMPUTE).ops[0], communicator=None, reads=(), writes=())
    return replace(program, ops=(op, *program.ops))


def run(*programs: Program, order: Sequence[int] = ()) -> Schedule:
    """Return the schedule that runs complete programs, in the order of these micro-batches."""
    orders = [Issue(mb, n) for mb in order or range(len(programs)) for n in range(len(programs[mb].ops))]
    return lower(programs, orders)


def refuse(
    schedules: Sequence[Schedule], rank: int, rule: int, instruction: int, *words: str, groups: Groups | None = None
) -> None:
    refuse_plans([RankPlan(schedule) for schedule in schedules], rank, rule, instruction, *words, groups=groups)


def refuse_plans(
    plans: Sequence[RankPlan], rank: int, rule: int, instruction: int, *words: str, groups: Groups | None = None
) -> None:
    """Assert that plans are refused for this rule, rank and instruction, in these words, and shown."""
    with pytest.raises(ScheduleError) as raised:
        validate_ranks(plans, groups)
    head, table = str(raised.value).split("\n\n")
    at_fault = plans[rank].schedule.instructions[instruction]
    assert head.startswith(f"rank {rank}, rule {rule}, instruction {instruction}: {at_fault.label} "), head
    assert all(word in head for word in words), head
    assert f"({at_fault.op.declared_at})" in head
    (marked,) = (row for row in table.splitlines() if row.endswith("<-- here"))
    assert marked.split()[:2] == [str(instruction), at_fault.label]


def accept(*schedules: Schedule, groups: Groups | None = None) -> None:
    validate_ranks([RankPlan(schedule) for schedule in schedules], groups)


def test_no_ranks_and_one_rank_are_accepted() -> None:
    validate_ranks([])
    accept(lower_toy())


def test_ranks_with_the_same_schedule_and_sizes_are_accepted() -> None:
    validate_ranks(make_plans(), GROUPS)


def test_ranks_may_issue_what_is_no_collective_in_another_order() -> None:
    programs = [put_first("norm", record("reduce"))] * 2
    early = lower(programs, [Issue(0, 0), Issue(1, 0), Issue(0, 1), Issue(1, 1)])
    late = lower(programs, [Issue(0, 0), Issue(0, 1), Issue(1, 0), Issue(1, 1)])
    assert early.instructions != late.instructions
    accept(early, late)


def test_rules_1_to_8_name_the_rank() -> None:
    good = run(record("reduce", "gather"))
    bad = replace(good, instructions=good.instructions[:1])
    with pytest.raises(ScheduleError, match=r"^rank 2, rule 1, instruction 0: .*gather/0 is never issued"):
        accept(good, good, bad)


def test_rule_9_a_rank_with_its_collectives_on_another_lane() -> None:
    usual, other = run(record("reduce", "gather")), run(record("reduce", "gather", lane="aux"))
    refuse(
        [usual, usual, other], 2, 9, 0, "on lane 'aux', but reduce/0 of rank 0 (instruction 0) is one on lane 'comm'"
    )


def test_rule_9_a_rank_with_collectives_on_two_lanes() -> None:
    both = run(record("reduce"), record("gather", lane="aux"))
    refuse([both, both], 0, 9, 1, "gather/1", "on lane 'aux', but reduce/0 of rank 0 (instruction 0)")


@pytest.mark.parametrize("lane", [COMPUTE, COMM, "aux"])
def test_rule_9_any_one_lane_will_do(lane: str) -> None:
    accept(*[run(record("reduce", "gather", lane=lane))] * 2)


def test_rule_9_ops_without_a_communicator_may_be_on_any_lane() -> None:
    ops = [replace(record("copy", lane=lane).ops[0], communicator=None) for lane in (COMM, "aux")]
    schedules = [run(replace(record("copy"), ops=(op,), outputs=())) for op in ops]
    accept(*schedules)


def test_rule_10_micro_batches_in_another_order() -> None:
    programs = [record("reduce")] * 2
    words = (
        "reduce/1 is collective number 1 of communicator 'reduce', but reduce/0 of rank 0 (instruction 0) is that there"
    )
    refuse([run(*programs), run(*programs), run(*programs, order=[1, 0])], 2, 10, 0, words)


def test_rule_10_ops_in_another_order() -> None:
    first, second = record("reduce", "gather", communicator="tp"), record("gather", "reduce", communicator="tp")
    refuse([run(first), run(second)], 1, 10, 0, "gather/0 is collective number 1", "reduce/0 of rank 0 (instruction 0)")


def test_rule_10_a_collective_left_out_at_the_end() -> None:
    programs = [record("reduce")] * 3
    words = (
        "followed by no other collective of communicator 'reduce', but reduce/2 of rank 0 (instruction 2) is number 3"
    )
    refuse([run(*programs), run(*programs[:2])], 1, 10, 1, words)


def test_rule_10_the_last_collective_before_the_one_left_out_is_named() -> None:
    reduce, alone = record("reduce"), replace(put_first("norm", record("reduce")), outputs=())
    alone = replace(alone, ops=alone.ops[:1])
    words = (
        "reduce/0 is followed by no other collective of communicator 'reduce', but reduce/1 of rank 0 (instruction 1)"
    )
    refuse([run(reduce, reduce, alone), run(reduce, alone, alone)], 1, 10, 0, words)


def test_rule_10_a_collective_too_many_at_the_end() -> None:
    programs = [record("reduce")] * 3
    words = "collective number 3 of communicator 'reduce', but rank 0 has only 2"
    refuse([run(*programs[:2]), run(*programs)], 1, 10, 2, words)


def test_rule_10_no_collective_at_all() -> None:
    program = record("norm", "reduce")
    alone = replace(program, ops=tuple(replace(op, communicator=None) for op in program.ops))
    words = "followed by no other collective of communicator 'norm', but norm/0 of rank 0 (instruction 0) is number 1"
    refuse([run(program), run(alone)], 1, 10, 1, words)
    refuse([run(alone), run(program)], 1, 10, 0, "number 1 of communicator 'norm', but rank 0 has only 0")


def test_rule_10_the_same_collective_on_another_communicator() -> None:
    schedules = [run(record("reduce", communicator=name)) for name in ("tp", "ep")]
    words = "no other collective of communicator 'tp', but reduce/0 of rank 0 (instruction 0) is number 1"
    refuse(schedules, 1, 10, 0, words)


def test_rule_10_holds_within_each_group_only() -> None:
    programs = [record("reduce", communicator="tp")] * 2
    first, second = run(*programs), run(*programs, order=[1, 0])
    accept(first, second, first, second, groups={"tp": [[0, 2], [3, 1]]})
    words = "reduce/1 is collective number 1 of communicator 'tp', but reduce/0 of rank 2 (instruction 0) is that there"
    refuse([first, first, first, second], 3, 10, 0, words, groups={"tp": [[0, 1], [2, 3]]})


def test_rule_10_a_rank_outside_all_groups() -> None:
    groups: Groups = {"tp": [[0, 1], []]}
    reduce, other = run(record("reduce", communicator="tp")), run(record("norm", communicator="pp"))
    words = "reduce/0 uses communicator 'tp', which has no rank 2"
    refuse([reduce, reduce, reduce], 2, 10, 0, words, groups=groups)
    accept(reduce, reduce, other, groups={**groups, "pp": [[2]]})


@pytest.mark.parametrize("members", [[[0, 1, 2]], [[0, 1], [1]], [[0, 0]], [[-1, 0]]])
def test_groups_that_cannot_be_are_refused(members: list[list[int]]) -> None:
    with pytest.raises(ScheduleError, match=r"'tp' has the groups .*; they must name each of the ranks 0 to 1 at most"):
        accept(*[run(record("reduce", communicator="tp"))] * 2, groups={"tp": members})


def test_a_communicator_that_is_not_named_is_joined_by_all() -> None:
    assert get_groups({"tp": [[0, 1]]}, "ep", 3) == ((0, 1, 2),)
    assert get_groups({"tp": [[1, 0], [], [2]]}, "tp", 3) == ((1, 0), (2,))


def make_sized(*sizes: tuple[tuple[int, ...], ...]) -> list[RankPlan]:
    programs = [put_first("norm", record("gather", "reduce"))] * 2
    return [RankPlan(lower(programs, alternate(programs)), own) for own in sizes]


def test_rule_11_sizes_that_agree_or_are_not_known() -> None:
    validate_ranks(make_sized(((3, 4), (5, 6)), ((3, 4), (5, 6))))
    validate_ranks(make_sized((), ((3, 4), (5, 6))))
    validate_ranks(make_sized(((3, 4), (5, 6)), ()))


def test_rule_11_sizes_that_differ() -> None:
    plans = make_sized((), ((3, 4, 4), (5, 6, 6)), ((3, 4, 4), (6, 5, 6)))
    words = "gather/1 belongs to micro-batch 1, whose sizes are (6, 5, 6) here, but (5, 6, 6) for gather/1 of rank 1"
    refuse_plans(plans, 2, 11, 4, words)


def test_rule_11_without_a_collective_the_first_instruction_is_named() -> None:
    program = record("norm", lane=COMPUTE)
    alone = replace(program, ops=(replace(program.ops[0], communicator=None),))
    plans = [RankPlan(run(alone, alone), ((1, 1), (2, size))) for size in (2, 3)]
    refuse_plans(plans, 1, 11, 1, "norm/1 belongs to micro-batch 1, whose sizes are (2, 3) here, but (2, 2) for norm/1")


@pytest.mark.parametrize(
    ("sizes", "instruction", "words"),
    [
        (((3, 4),), 0, "norm/0 belongs to a schedule of 2 micro-batches, but sizes are given of 1"),
        (((3, 4), (5, 6), (7, 8)), 0, "norm/0 belongs to a schedule of 2 micro-batches, but sizes are given of 3"),
        (((3, 4), (5,)), 4, "gather/1 belongs to micro-batch 1, whose sizes are (5,) here, but there are 2 ranks"),
        (
            ((3, 4, 5), (5, 6)),
            1,
            "gather/0 belongs to micro-batch 0, whose sizes are (3, 4, 5) here, but there are 2 ranks",
        ),
    ],
)
def test_rule_11_sizes_of_the_wrong_length(sizes: tuple[tuple[int, ...], ...], instruction: int, words: str) -> None:
    refuse_plans(make_sized(sizes, ()), 0, 11, instruction, words)
    refuse_plans(make_sized((), sizes), 1, 11, instruction, words)


def test_rule_11_another_number_of_micro_batches() -> None:
    program = record("norm", lane=COMPUTE)
    alone = replace(program, ops=(replace(program.ops[0], communicator=None),))
    plans = [RankPlan(run(*[alone] * count), ((1, 1),) * count) for count in (3, 2)]
    refuse_plans(plans, 1, 11, 0, "norm/0 belongs to a schedule of 2 micro-batches, but rank 0 has 3")


def test_rule_12_two_communicators_in_another_order() -> None:
    programs = [record("reduce", communicator="tp"), record("send", communicator="ep")]
    schedules = [run(*programs), run(*programs, order=[1, 0]), run(*programs)]
    words = "reduce/0 of rank 0 (instruction 0), send/1 of rank 1 (instruction 0), reduce/0 of rank 2 (instruction 0)"
    refuse(schedules, 0, 12, 0, "reduce/0 never begins: the ranks wait for each other, stopped at", words)


def test_rule_12_is_kept_if_those_in_another_order_do_not_meet() -> None:
    programs = [record("reduce", communicator="tp"), record("send", communicator="ep")]
    first, second = run(*programs), run(*programs, order=[1, 0])
    accept(first, second, first, second, groups={"tp": [[0, 1], [2, 3]], "ep": [[0, 2], [1, 3]]})


def test_rule_12_three_ranks_in_a_circle_of_which_each_pair_is_sound() -> None:
    programs = [record("a"), record("b"), record("c")]
    schedules = [run(*programs, order=order) for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1])]
    groups: Groups = {"a": [[0, 2], [1]], "b": [[0, 1], [2]], "c": [[1, 2], [0]]}
    assert find_deadlock(schedules, groups) == {0: 0, 1: 0, 2: 0}
    refuse(
        schedules,
        0,
        12,
        0,
        "a/0 of rank 0 (instruction 0), b/1 of rank 1 (instruction 0), c/2 of rank 2 (instruction 0)",
        groups=groups,
    )
    for pair in ("a", "b", "c"):
        accept(*schedules, groups={**groups, pair: [[0], [1], [2]]})


def test_a_rank_that_can_reach_its_end_is_not_among_those_that_wait() -> None:
    programs = [record("reduce", communicator="tp"), record("send", communicator="ep")]
    schedules = [run(*programs), run(*programs), run(*programs, order=[1, 0])]
    groups: Groups = {"tp": [[0], [1, 2]], "ep": [[0], [1, 2]]}
    assert find_deadlock(schedules, groups) == {1: 0, 2: 0}
    refuse(schedules, 1, 12, 0, groups=groups)


def cross(host_sync: bool = False, read_by: str | None = None) -> list[Schedule]:
    """Return two ranks that run collectives on two lanes in opposite orders, each with an op that may read the first.

    Rule 9 forbids it, because of what some hosts make of it.
    """
    programs = []
    for name, lane in (("tp", COMM), ("ep", "aux")):
        p = ProgramBuilder()
        x = p.op("meet", lambda x: x, p.input("x"), lane=lane, communicator=name, host_sync=host_sync)
        programs.append(p.build(p.op("read", lambda x: x, x, lane=read_by) if read_by else x))
    return [run(*programs), run(*programs, order=[1, 0])]


@pytest.mark.parametrize(
    ("schedules", "stops"),
    [
        (cross(), {}),
        (cross(read_by=COMM), {}),
        (cross(read_by=COMPUTE), {0: 0, 1: 0}),
        (cross(host_sync=True), {0: 0, 1: 0}),
        ([cross(host_sync=True)[0], cross()[1]], {}),
        ([cross(host_sync=True)[0], cross(read_by=COMPUTE)[1]], {0: 0, 1: 0}),
    ],
)
def test_a_host_that_is_kept_from_issuing_can_hang_collectives_on_two_lanes(
    schedules: list[Schedule], stops: dict[int, int]
) -> None:
    """`compute` keeps the host on the CPU, a host sync everywhere."""
    assert find_deadlock(schedules) == stops
    if stops:
        with pytest.raises(ScheduleError, match="deadlock"):
            simulate_ranks(schedules, lambda rank, instruction: 1.0)
    else:
        simulate_ranks(schedules, lambda rank, instruction: 1.0)


def test_a_deadlock_is_not_found_before_where_it_is() -> None:
    programs = [record("a", "b", "c"), record("d")]
    early = lower(programs, [Issue(0, 0), Issue(0, 1), Issue(1, 0), Issue(0, 2)])
    late = lower(programs, [Issue(0, 0), Issue(1, 0), Issue(0, 1), Issue(0, 2)])
    refuse([early, late], 0, 12, 1, "b/0 of rank 0 (instruction 1), d/1 of rank 1 (instruction 1)")


def test_a_long_schedule_is_shown_around_the_fault_only() -> None:
    policies = (alternate, sequential)
    with pytest.raises(ScheduleError, match=r"^rank 1, rule 10") as raised:
        accept(*(lower_toy(layers=20, policy=policy) for policy in policies))
    assert len(str(raised.value).splitlines()) < 40
