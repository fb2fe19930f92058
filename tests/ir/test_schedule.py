from __future__ import annotations

import pytest

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.nano_batches import NO_ROWS, cut_program
from dbo_runtime.ir.policies import sequential
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Instruction, Issue, Slot, list_first_contexts
from tests.support.programs import lower_toy, record_chain


def record_ordered(count: int = 1, is_ordered: bool = True) -> Program:
    p = ProgramBuilder()
    x = p.input("x")
    for number in range(count):
        x = p.compute(f"op{number}", lambda x: x, x, ordered=is_ordered)
    return p.build(x)


CHAIN = record_chain(lambda x: x, lambda x: x)


def test_each_micro_batch_has_a_context_and_each_nano_batch_one_after_it() -> None:
    p = ProgramBuilder()
    x = p.input("x")
    whole = p.build(p.compute("scale", lambda x: x, x, token_wise=True))
    nano = cut_program(whole, 2, NO_ROWS).program
    assert list_first_contexts([nano, CHAIN, nano]) == [0, 3, 4]
    schedule = lower([CHAIN, nano], sequential([CHAIN, nano]))
    contexts = dict(zip(schedule.instructions, schedule.list_contexts(), strict=True))
    assert {context for each, context in contexts.items() if each.issue.micro_batch == 0} == {0}
    scaled = [context for each, context in contexts.items() if each.op.name == "scale"]
    assert sorted(scaled) == [2, 3]  # after that of the chain, and that of the whole step


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([(0, 0), (0, 1)], "the order issues 2 ops of micro-batch 0; there are 3"),
        ([(0, 1)], "issue 0 is op 1 of micro-batch 0, whose next op is 0"),
        ([(0, 0), (0, 0)], "issue 1 is op 0 of micro-batch 0, whose next op is 1"),
        ([(0, 0), (1, 0)], "issue 1 names micro-batch 1; there are 1"),
        ([(-1, 0)], "issue 0 names micro-batch -1; there are 1"),
        ([], "the order issues 0 ops of micro-batch 0; there are 3"),
    ],
)
def test_what_is_no_order_of_the_programs_is_refused(order: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lower([CHAIN], [Issue(*issue) for issue in order])


def test_ops_beyond_the_end_of_a_program_are_refused() -> None:
    with pytest.raises(ScheduleError, match="the order issues 4 ops of micro-batch 0; there are 3"):
        lower([CHAIN], [Issue(0, position) for position in range(4)])


def test_an_order_against_the_order_of_micro_batches_is_refused_with_the_line() -> None:
    programs = [record_ordered()] * 2
    with pytest.raises(ScheduleError) as raised:
        lower(programs, [Issue(1, 0), Issue(0, 0)])
    assert "op0/1 is issued before op0/0, but the op is declared ordered" in str(raised.value)
    assert programs[0].ops[0].declared_at in str(raised.value)


def test_micro_batches_stay_in_order_over_one_between_them_that_lacks_the_op() -> None:
    programs = [record_ordered(), record_ordered(is_ordered=False), record_ordered()]
    lower(programs, [Issue(0, 0), Issue(2, 0), Issue(1, 0)])
    with pytest.raises(ScheduleError, match="op0/2 is issued before op0/0"):
        lower(programs, [Issue(2, 0), Issue(1, 0), Issue(0, 0)])


def test_a_chain_waits_where_it_changes_lanes_and_frees_what_it_has_used() -> None:
    schedule = lower([CHAIN, CHAIN], [Issue(0, 0), Issue(0, 1), Issue(0, 2), Issue(1, 0), Issue(1, 1), Issue(1, 2)])
    made, sent = (CHAIN.ops[n].writes[0] for n in range(2))
    assert [instruction.waits for instruction in schedule.instructions] == [
        (),
        (Issue(0, 0),),
        (Issue(0, 1),),
        (),
        (Issue(1, 0),),
        (Issue(1, 1),),
    ]
    assert [instruction.frees for instruction in schedule.instructions] == [
        (),
        (),
        (Slot(0, made),),  # compute made it; once it has waited for the comm op it may drop it
        (),
        (Slot(0, sent),),  # comm made it; it learns that compute has read it when it waits for compute again
        (Slot(1, made),),
    ]
    assert schedule.forks == ()  # the comm lane's first wait orders it after the start
    assert schedule.joins == ()  # compute has waited for the last comm op


def test_a_lane_that_starts_without_a_wait_is_forked_and_one_that_is_not_waited_for_is_joined() -> None:
    p = ProgramBuilder()
    x = p.input("x")
    p.comm("log", lambda x: None, x, outputs=0)
    schedule = lower([p.build(p.compute("work", lambda x: x, x))], [Issue(0, 0), Issue(0, 1)])
    assert schedule.forks == ("comm",)
    assert schedule.joins == (Issue(0, 0),)
    assert [instruction.records for instruction in schedule.instructions] == [True, False]


def test_instructions_are_labelled_by_layer_op_and_micro_batch() -> None:
    labels = [instruction.label for instruction in lower_toy(layers=1).instructions]
    assert labels[0] == "L0.attn_norm/0"
    assert labels[-1] == "final_norm/1"


def test_an_instruction_does_no_more_than_its_op_unless_it_says_so() -> None:
    alone = Instruction(Issue(0, 0), CHAIN.ops[0])
    assert (alone.waits, alone.records, alone.frees) == ((), False, ())
