"""One hand-made violation for each thing that the validator proves; tests/properties has the random ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import Policy, alternate, sequential
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.render import parse
from dbo_runtime.ir.schedule import Issue, Schedule, Slot
from dbo_runtime.ir.validate import validate
from dbo_runtime.ir.values import Value
from tests.support.programs import lower_toy, record_chain, record_three_lanes

CHAIN = record_chain(lambda x: x, lambda x: x)
CHAIN_TABLE = """
   0  make/0 *
   1             send/0 *  wait make/0
   2  receive/0            wait send/0  free %1/0"""


def refuse(schedule: Schedule, rule: int, instruction: int, *words: str, capture: bool = False) -> None:
    """Assert that a schedule is refused for breaking this rule at this instruction, in these words, and shown."""
    with pytest.raises(ScheduleError) as raised:
        validate(schedule, capture)
    head, table = str(raised.value).split("\n\n")
    assert head.startswith(f"rule {rule}, instruction {instruction}: ")
    assert all(word in head for word in words), head
    assert schedule.instructions[instruction].op.declared_at in head
    (marked,) = (row for row in table.splitlines() if row.endswith("<-- here"))
    assert marked.split()[:2] == [str(instruction), schedule.instructions[instruction].label]


def read(table: str, *programs: Program) -> Schedule:
    return parse(table.strip("\n"), programs or [CHAIN])


def edit(schedule: Schedule, number: int, **fields: object) -> Schedule:
    instruction = replace(schedule.instructions[number], **fields)
    return replace(
        schedule, instructions=(*schedule.instructions[:number], instruction, *schedule.instructions[number + 1 :])
    )


@pytest.mark.parametrize("policy", [sequential, alternate])
@pytest.mark.parametrize("program", [CHAIN, record_three_lanes(2)])
def test_what_lowering_makes_is_accepted(policy: Policy, program: Program) -> None:
    programs = [program] * 3
    validate(lower(programs, policy(programs)), capture=True)


def test_rule_1_an_op_that_is_left_out() -> None:
    refuse(read(CHAIN_TABLE.rsplit("\n", 1)[0]), 1, 1, "micro-batch 0 is not finished: receive/0 is never issued")


def test_rule_1_an_op_that_is_issued_twice() -> None:
    refuse(read(CHAIN_TABLE + "\n   3  receive/0  wait send/0"), 1, 3, "receive/0 is issued twice")


def test_rule_1_ops_against_program_order() -> None:
    swapped = "   0  send/0 *\n   1  make/0 *\n   2  receive/0  wait send/0"
    refuse(read(swapped), 1, 0, "send/0 is issued before make/0")


def test_rule_1_an_op_of_another_program() -> None:
    refuse(edit(read(CHAIN_TABLE), 1, op=CHAIN.ops[0]), 1, 1, "the instruction runs 'make', but")


@pytest.mark.parametrize("issue", [Issue(1, 0), Issue(0, 3), Issue(-1, 0), Issue(0, -1)])
def test_rule_1_a_instruction_for_no_op_at_all(issue: Issue) -> None:
    schedule = edit(read(CHAIN_TABLE), 1, issue=issue)
    with pytest.raises(ScheduleError, match=r"rule 1, instruction 1: .* names no op of these programs"):
        validate(schedule)


def test_rule_1_no_instructions() -> None:
    with pytest.raises(ScheduleError, match=r"rule 1, .*micro-batch 0 is not finished"):
        validate(Schedule((CHAIN,), ()))


def test_rule_2_a_read_before_its_write() -> None:
    unordered = edit(read(CHAIN_TABLE), 2, waits=(), frees=())
    refuse(unordered, 2, 2, "receive/0 reads %2:send without being ordered after the op that writes it")


def test_rule_3_a_wait_for_what_is_recorded_later() -> None:
    early = edit(read(CHAIN_TABLE), 0, waits=(Issue(0, 1),))
    refuse(early, 3, 0, "make/0 waits for send/0, which has recorded no event")


def test_rule_3_a_wait_for_what_is_never_recorded() -> None:
    refuse(edit(read(CHAIN_TABLE), 0, records=False), 3, 1, "send/0 waits for make/0, which has recorded no event")


def test_rule_3_a_join_of_what_is_never_recorded() -> None:
    schedule = replace(read(CHAIN_TABLE), joins=(Issue(0, 2),))
    refuse(schedule, 3, 2, "the join waits for receive/0, which has recorded no event")


def test_rule_3_a_wait_for_no_op_at_all() -> None:
    refuse(edit(read(CHAIN_TABLE), 1, waits=(Issue(4, 4),)), 3, 1, "waits for Issue(micro_batch=4, position=4)")


@pytest.mark.parametrize(
    ("instruction", "micro_batch", "value", "words"),
    [
        (1, 0, CHAIN.ops[0].writes[0], "send/0 reads %1:make, which instruction 1 freed"),
        (2, 0, CHAIN.ops[0].writes[0], "is freed twice, first at instruction 2"),
        (0, 0, CHAIN.ops[0].writes[0], "is freed before it is written"),
        (2, 0, CHAIN.inputs[0], "belongs to the caller"),
        (2, 0, CHAIN.outputs[0], "belongs to the caller"),
        (2, 0, Value(99, "stranger"), "is freed before it is written"),
        (2, 1, CHAIN.ops[0].writes[0], "there is no micro-batch 1"),
        (2, -1, CHAIN.ops[0].writes[0], "there is no micro-batch -1"),
    ],
)
def test_rule_4_a_free_of_what_must_be_kept(instruction: int, micro_batch: int, value: Value, words: str) -> None:
    schedule = read(CHAIN_TABLE)
    refuse(
        edit(schedule, instruction, frees=(*schedule.instructions[instruction].frees, Slot(micro_batch, value))),
        4,
        instruction,
        words,
    )


def test_rule_4_a_free_while_another_lane_may_still_read() -> None:
    p = ProgramBuilder()
    made = p.compute("make", lambda: 0)
    p.comm("send", lambda x: None, made, outputs=0)
    program = p.build(p.compute("work", lambda: 0))
    table = "0 make/0 *\n1 send/0 * wait make/0\n2 work/0\njoin send/0"
    validate(read(table, program))
    early = read(table.replace("2 work/0", "2 work/0 free %0/0"), program)
    refuse(early, 4, 2, "%0:make of micro-batch 0 is freed while instruction 1, on lane 'comm', may still use it")


def test_rule_4_a_free_on_a_lane_that_does_not_own_the_memory() -> None:
    """The comm lane has read the value last; but compute, which allocated it, does not know that yet."""
    p = ProgramBuilder()
    made = p.compute("make", lambda: 0)
    p.comm("send", lambda x: None, made, outputs=0)
    p.comm("sync", lambda: None, outputs=0)
    program = p.build(p.compute("work", lambda: 0))
    table = "0 make/0 *\n1 send/0 wait make/0\n2 sync/0 *\n3 work/0\njoin sync/0"
    validate(read(table, program))
    early = read(table.replace("2 sync/0 *", "2 sync/0 * free %0/0"), program)
    refuse(early, 4, 2, "lane 'compute' is not ordered after that instruction and could reuse the memory")


def test_rule_4_a_free_of_a_result_that_lives_in_memory_of_another_lane() -> None:
    """What `reduce` returns is what compute allocated: compute must be done with it, too."""
    p = ProgramBuilder()
    made = p.compute("make", lambda: 0)
    reduced = p.comm("reduce", lambda x: x, made, overwrites=(made,))
    p.comm("send", lambda x: None, reduced, outputs=0)
    p.comm("sync", lambda: None, outputs=0)
    program = p.build(p.compute("work", lambda: 0))
    table = "0 make/0 *\n1 reduce/0 wait make/0\n2 send/0\n3 sync/0 *\n4 work/0\njoin sync/0"
    validate(read(table, program))
    early = read(table.replace("3 sync/0 *", "3 sync/0 * free %1/0"), program)
    refuse(early, 4, 3, "%1:reduce of micro-batch 0 is freed", "lane 'compute' is not ordered")


def test_rule_5_a_buffer_held_by_two_micro_batches() -> None:
    p = ProgramBuilder()
    p.comm("send", lambda: None, outputs=0, exclusive="buffer")
    p.compute("unpack", lambda: None, outputs=0, exclusive="buffer")
    program = p.build()
    programs = [program, program]
    schedule = lower(programs, [Issue(0, 0), Issue(0, 1), Issue(1, 0), Issue(1, 1)])
    validate(schedule)
    refuse(edit(schedule, 2, waits=()), 5, 2, "send/1 and unpack/0 may hold 'buffer' at the same time")


def test_rule_5_a_communicator_on_two_lanes() -> None:
    p = ProgramBuilder()
    x = p.comm("send", lambda: 0, communicator="group")
    program = p.build(p.op("gather", lambda x: x, x, lane="aux", communicator="group"))
    refuse(lower([program], [Issue(0, 0), Issue(0, 1)]), 5, 1, "uses communicator 'group' on lane 'aux', but send/0")


def test_rule_6_micro_batches_out_of_order() -> None:
    p = ProgramBuilder()
    p.compute("attention", lambda: None, outputs=0, ordered=True)
    program = p.build()
    schedule = Schedule((program, program), lower([program], [Issue(0, 0)]).instructions)
    instruction = schedule.instructions[0]
    backwards = replace(schedule, instructions=(replace(instruction, issue=Issue(1, 0)), instruction))
    refuse(backwards, 6, 0, "attention/1 is not ordered after attention/0")


def test_rule_6_micro_batches_unordered_over_one_between_them_that_lacks_the_op() -> None:
    programs = []
    for lane, is_ordered in (("comm", True), ("compute", False), ("compute", True)):
        p = ProgramBuilder()
        p.op("attention", lambda: None, lane=lane, outputs=0, ordered=is_ordered)
        programs.append(p.build())
    schedule = lower(programs, [Issue(0, 0), Issue(1, 0), Issue(2, 0)])
    validate(schedule)
    refuse(edit(schedule, 2, waits=()), 6, 2, "attention/2 is not ordered after attention/0")


def test_rule_7_a_lane_that_does_not_leave_from_compute() -> None:
    p = ProgramBuilder()
    program = p.build(p.compute("work", lambda x: x, p.comm("fetch", lambda: 0)))
    schedule = lower([program], [Issue(0, 0), Issue(0, 1)])
    refuse(replace(schedule, forks=()), 7, 0, "lane 'comm' starts without a fork from 'compute'")


def test_rule_7_a_lane_that_does_not_return() -> None:
    p = ProgramBuilder()
    p.comm("send", lambda x: None, p.compute("work", lambda: 0), outputs=0)
    schedule = lower([p.build()], [Issue(0, 0), Issue(0, 1)])
    refuse(replace(schedule, joins=()), 7, 1, "lane 'comm' never returns to 'compute'")


def test_rule_7_a_fork_of_a_lane_that_no_program_has() -> None:
    refuse(replace(read(CHAIN_TABLE), forks=("aux",)), 7, 0, "no program has a lane 'aux'")


def test_rule_8_an_op_that_blocks_the_host_is_refused_for_capture_only() -> None:
    p = ProgramBuilder()
    program = p.build(p.compute("sync", lambda: 0, host_sync=True))
    schedule = lower([program], [Issue(0, 0)])
    validate(schedule)
    refuse(schedule, 8, 0, "sync/0 blocks the host, so the schedule cannot be captured", capture=True)


def test_rule_8_a_value_overwritten_while_it_is_read() -> None:
    p = ProgramBuilder()
    made = p.compute("make", lambda: 0)
    p.comm("send", lambda x: None, made, outputs=0)
    program = p.build(p.compute("add", lambda x: x, made, overwrites=(made,)))
    schedule = lower([program], [Issue(0, n) for n in range(3)])
    validate(schedule)
    refuse(
        edit(schedule, 2, waits=(), frees=()), 8, 2, "add/0 overwrites %0:make while instruction 1 may still read it"
    )


def test_rule_8_a_value_read_after_it_is_overwritten() -> None:
    """The builder refuses to record this; a program made by other means is caught here."""
    p = ProgramBuilder()
    made = p.compute("make", lambda: 0)
    p.compute("add", lambda x: x, made)
    program = p.build(p.compute("late", lambda x: x, made))
    ops = (program.ops[0], replace(program.ops[1], overwrites=(made,)), program.ops[2])
    schedule = lower([replace(program, ops=ops)], [Issue(0, n) for n in range(3)])
    refuse(schedule, 8, 2, "late/0 reads %0:make, which add/0 has overwritten")


def test_a_long_schedule_is_shown_around_the_fault_only() -> None:
    schedule = lower_toy(layers=20)
    middle = len(schedule.instructions) // 2
    number = next(n for n, instruction in enumerate(schedule.instructions) if n > middle and instruction.waits)
    with pytest.raises(ScheduleError) as raised:
        validate(edit(schedule, number, waits=(), frees=()))
    assert len(str(raised.value).splitlines()) < 40
