"""Predicted timelines, against a pass in issue order, the simulators that know less, and small sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.devices.virtual import simulate
from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import sequential
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Instruction, Schedule
from dbo_runtime.lab.simulate.multi_rank_simulator import simulate_ranks
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs.op_cost import HostCost
from dbo_runtime.planner.online.simulation import predict_timeline
from tests.support.forward_pass import pass_forward
from tests.support.planner.shop import do_nothing
from tests.support.profiles import scale
from tests.support.strategies import Case, cases

LANES = ("compute", "comm", "aux")
FACTORS = st.fixed_dictionaries({lane: st.sampled_from([1.0, 1.25, 1.5, 2.0, 4.0]) for lane in LANES})


class Timed(NamedTuple):
    """A schedule and the seconds of its instructions. They are integers, so that sums are exact."""

    schedule: Schedule
    seconds: tuple[float, ...]

    def cost(self, instruction: Instruction) -> float:
        return self.seconds[self.schedule.instructions.index(instruction)]


@st.composite
def timed(draw: st.DrawFn, with_host_sync: bool = False) -> Timed:
    case = draw(cases())
    if with_host_sync:
        kinds = {id(program): draw_host_sync(draw, program) for program in case.programs}
        case = Case(tuple(kinds[id(program)] for program in case.programs), case.order)
    schedule = case.lower()
    return Timed(schedule, tuple(float(draw(st.integers(0, 9))) for _ in schedule.instructions))


def draw_host_sync(draw: st.DrawFn, program: Program) -> Program:
    ops = tuple(replace(op, host_sync=draw(st.booleans())) for op in program.ops)
    return Program(program.inputs, ops, program.outputs)


@settings(max_examples=scale(300))
@given(timed(with_host_sync=True), st.integers(0, 3))
def test_without_contention_it_is_the_simulation(case: Timed, issue: int) -> None:
    expected = pass_forward(case.schedule, case.cost, issue)
    assert simulate(case.schedule, case.cost, issue) == expected
    assert predict_timeline(case.schedule, case.cost, host=HostCost(issue)) == expected


@settings(max_examples=scale(300))
@given(timed())
def test_with_a_host_that_computes_it_is_the_multi_rank_simulation_of_one_rank(case: Timed) -> None:
    expected = pass_forward(case.schedule, case.cost, host_computes=True)
    assert simulate_ranks([case.schedule], lambda rank, instruction: case.cost(instruction)) == (expected,)
    assert predict_timeline(case.schedule, case.cost, host=HostCost(computes=True)) == expected


@settings(max_examples=scale(200))
@given(timed(with_host_sync=True), st.booleans())
def test_a_lane_that_is_not_slower_while_others_run_changes_nothing(case: Timed, computes: bool) -> None:
    host = HostCost(computes=computes)
    same = predict_timeline(case.schedule, case.cost, dict.fromkeys(LANES, 1.0), host)
    assert same == predict_timeline(case.schedule, case.cost, host=host)


@settings(max_examples=scale(300))
@given(timed(), FACTORS)
def test_contention_costs_time_but_no_more_than_if_it_never_ended(case: Timed, factors: dict[str, float]) -> None:
    def slow(instruction: Instruction) -> float:
        return case.cost(instruction) * factors[instruction.op.lane]

    contended = list_ends(predict_timeline(case.schedule, case.cost, factors))
    for end, alone, slowed in zip(
        contended,
        list_ends(simulate(case.schedule, case.cost)),
        list_ends(simulate(case.schedule, slow)),
        strict=True,
    ):
        assert alone - 1e-9 <= end <= slowed + 1e-9


@settings(max_examples=scale(500))
@given(timed(), FACTORS, st.sampled_from(LANES), st.sampled_from([1.1, 2.0, 5.0]))
def test_a_lane_that_is_slower_makes_nothing_faster(
    case: Timed, factors: dict[str, float], lane: str, more: float
) -> None:
    slower = {**factors, lane: factors[lane] * more}
    before, after = (max(list_ends(predict_timeline(case.schedule, case.cost, each))) for each in (factors, slower))
    assert after >= before - 1e-9


@pytest.mark.parametrize(
    ("seconds", "contention", "ends"),
    [
        ((4, 4), {}, (4, 4)),
        ((4, 4), {"compute": 2.0}, (6, 4)),  # compute has done 2 of its 4 when the other ends, and goes on alone
        ((4, 4), {"compute": 2.0, "comm": 2.0}, (8, 8)),
        ((6, 2), {"compute": 1.6, "comm": 2.0}, (7.5, 4)),  # 4 / 1.6 done by 4, 3.5 left
        ((1, 9), {"comm": 3.0}, (1, 9 + 2 / 3)),
        ((4, 0), {"compute": 2.0, "comm": 2.0}, (4, 0)),
    ],
)
def test_two_ops_side_by_side_are_as_slow_as_worked_out_by_hand(
    seconds: tuple[float, ...], contention: dict[str, float], ends: tuple[float, ...]
) -> None:
    schedule = lower_lanes(("compute", "comm"))
    timeline = predict_timeline(schedule, lambda instruction: seconds[instruction.issue.position], contention)
    assert list_ends(timeline) == pytest.approx(ends)


def test_a_lane_is_slower_while_any_other_runs() -> None:
    schedule = lower_lanes(LANES)
    seconds = (6.0, 2.0, 4.0)
    timeline = predict_timeline(schedule, lambda instruction: seconds[instruction.issue.position], {"compute": 2.0})
    assert list_ends(timeline) == [8, 2, 4]  # half of 4 done while the others run, 4 left


def test_a_lane_may_be_slower_with_one_lane_than_with_another() -> None:
    schedule = lower_lanes(LANES)
    seconds = (6.0, 2.0, 4.0)
    for factors, ends in (
        ({"compute/comm": 2.0}, [7, 2, 4]),  # 1 of 6 done by 2, while comm runs
        ({"compute": 2.0, "compute/comm": 1.0}, [8, 2, 4]),  # the other lane counts until 4
        ({"compute": 2.0, "compute/comm": 1.0, "compute/aux": 1.0}, [6, 2, 4]),
        ({"compute/comm": 4.0, "compute/aux": 2.0}, [8.5, 2, 4]),  # the greatest counts: 2 / 4 by 2, 2 / 2 by 4
        ({"aux/comm": 2.0}, [6, 2, 5]),
    ):
        timeline = predict_timeline(schedule, lambda instruction: seconds[instruction.issue.position], factors)
        assert list_ends(timeline) == pytest.approx(ends)


def test_only_what_is_concurrent_with_another_op_is_slower() -> None:
    p = ProgramBuilder()
    x = p.input("x")
    first = p.compute("first", do_nothing, x)
    p.comm("send", do_nothing, first)
    p.compute("second", do_nothing, first)
    timeline = predict_timeline(lower_one(p.build()), lambda instruction: 2.0, {"compute": 2.0})
    assert [(span.start, span.end) for span in timeline.spans] == [(0, 2), (2, 4), (2, 5)]


def test_a_slow_host_delays_what_it_issues() -> None:
    timeline = predict_timeline(lower_lanes(("compute",) * 3), lambda instruction: 1.0, host=HostCost(issue=5))
    assert [span.start for span in timeline.spans] == [5, 10, 15]


def test_a_host_that_computes_issues_nothing_meanwhile() -> None:
    schedule = lower_lanes(("compute", "comm", "compute"))
    idle, computing = (
        predict_timeline(schedule, lambda instruction: 4.0, host=HostCost(issue=1, computes=computes))
        for computes in (False, True)
    )
    assert [(span.start, span.end) for span in idle.spans] == [(1, 5), (2, 6), (5, 9)]
    assert [(span.start, span.end) for span in computing.spans] == [(1, 5), (6, 10), (7, 11)]


def test_an_op_that_waits_for_another_lane_begins_after_the_handover() -> None:
    p = ProgramBuilder()
    x = p.compute("make", do_nothing, p.input("x"))
    x = p.comm("send", do_nothing, x)
    p.compute("other", do_nothing)
    p.compute("receive", do_nothing, x)
    timeline = predict_timeline(lower_one(p.build()), lambda instruction: 4.0, host=HostCost(handover=1))
    assert [(span.start, span.end) for span in timeline.spans] == [(0, 4), (5, 9), (4, 8), (10, 14)]


@settings(max_examples=scale(200))
@given(timed(), st.integers(0, 3))
def test_a_handover_costs_time_and_no_more_than_one_for_each_wait(case: Timed, handover: int) -> None:
    (alone, late) = (
        max(list_ends(predict_timeline(case.schedule, case.cost, host=HostCost(handover=each))))
        for each in (0, handover)
    )
    waits = sum(bool(instruction.waits) for instruction in case.schedule.instructions)
    assert alone <= late <= alone + handover * waits


def test_what_follows_at_once_has_no_credit_and_what_follows_late_has() -> None:
    p = ProgramBuilder()
    p.comm("first", do_nothing)
    p.comm("at_once", do_nothing)
    x = p.compute("work", do_nothing)
    p.comm("late", do_nothing, x)
    p.comm("later", do_nothing, p.compute("more", do_nothing, x))
    seconds = {"first": 4.0, "at_once": 4.0, "work": 12.0, "late": 4.0, "more": 7.0, "later": 4.0}
    timeline = predict_timeline(
        lower_one(p.build()),
        lambda instruction: seconds[instruction.op.name],
        credit=lambda instruction: 3.0 * (instruction.op.lane == "comm"),
    )
    spans = {span.op: (span.start, span.end) for span in timeline.spans}
    assert spans["first"] == (0, 4)
    assert spans["at_once"] == (4, 4 + 4 + 3)
    assert spans["late"] == (12, 12 + 4 + 2)  # the lane has rested for one second
    assert spans["later"] == (19, 19 + 4 + 2)


@settings(max_examples=scale(200))
@given(timed(), st.integers(0, 3))
def test_credit_that_is_lacking_costs_no_more_than_it_is_worth(case: Timed, credit: int) -> None:
    before = max(list_ends(predict_timeline(case.schedule, case.cost)))
    after = max(list_ends(predict_timeline(case.schedule, case.cost, credit=lambda instruction: float(credit))))
    assert before <= after <= before + credit * len(case.schedule.instructions)


def test_steps_that_wait_for_each_other_are_refused() -> None:
    schedule = lower_lanes(("compute", "comm"))
    first, second = schedule.instructions
    crossed = (replace(first, waits=(second.issue,)), replace(second, waits=(first.issue,)))
    with pytest.raises(ScheduleError, match="instruction 0 waits for ever"):
        predict_timeline(replace(schedule, instructions=crossed), lambda instruction: 1.0)


def test_an_op_that_waits_for_what_the_host_issues_only_after_it_is_refused() -> None:
    """The host computes and so keeps itself from ever issuing what it waits for."""
    schedule = lower_lanes(("compute", "comm"))
    first, second = schedule.instructions
    stuck = replace(schedule, instructions=(replace(first, waits=(second.issue,)), second))
    assert list_ends(predict_timeline(stuck, lambda instruction: 1.0)) == [2, 1]
    with pytest.raises(ScheduleError, match="instruction 0 waits for ever"):
        predict_timeline(stuck, lambda instruction: 1.0, host=HostCost(computes=True))


def lower_lanes(lanes: tuple[str, ...]) -> Schedule:
    """Return one op on each of the lanes, none of which waits for another."""
    p = ProgramBuilder()
    for number, lane in enumerate(lanes):
        p.op(f"op{number}", do_nothing, lane=lane)
    return lower_one(p.build())


def lower_one(program: Program) -> Schedule:
    return lower([program], sequential([program]))


def list_ends(timeline: Timeline) -> list[float]:
    return [span.end for span in timeline.spans]
