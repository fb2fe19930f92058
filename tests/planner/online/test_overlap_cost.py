"""What overlap costs: a closed form for two lanes that are alike, and interpolation for others."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import sequential
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.ir.schedule import Instruction
from dbo_runtime.planner.costs.cost_table import CommCost, ComputeCost, HostCost
from dbo_runtime.planner.online.named_order import compute_end
from dbo_runtime.planner.online.overlap_cost import (
    RESOLUTION,
    OverlapCost,
    compute_share,
    find_common_factor,
    stack_shares,
)
from dbo_runtime.planner.online.simulation import predict_timeline
from tests.support.planner.machines import PROGRAM, make_table, record_layers
from tests.support.planner.priced_programs import THREE_LANES, TWO_LANES, Layered, layered
from tests.support.planner.shop import do_nothing
from tests.support.profiles import scale

COSTS = {"attention": ComputeCost(1.0), "reduce": CommCost(1.0, 0.0, 1.0)}
FACTORS = st.sampled_from([1.0, 1.15, 1.5, 2.0, 3.0])


class Timed(NamedTuple):
    """A schedule and the seconds of its instructions."""

    case: Layered
    seconds: tuple[float, ...]

    def look_up(self, instruction: Instruction) -> float:
        return self.seconds[self.case.schedule.instructions.index(instruction)]

    def simulate(self, contention: dict[str, float], host: HostCost | None = None, credit: float = 0.0) -> float:
        return compute_end(
            predict_timeline(
                self.case.schedule, self.look_up, contention, host, lambda each: credit * (each.op.lane == "comm")
            )
        )


@st.composite
def timed(draw: st.DrawFn, lanes: tuple[str, ...]) -> Timed:
    case = draw(layered(lanes, with_host_sync=True))
    return Timed(case, tuple(float(draw(st.integers(0, 9))) for _ in case.schedule.instructions))


@settings(max_examples=scale(300))
@given(timed(TWO_LANES), FACTORS, st.booleans())
def test_two_lanes_that_slow_each_other_alike_end_later_by_a_share_of_their_overlap(
    timed: Timed, factor: float, host_computes: bool
) -> None:
    host = HostCost(computes=host_computes)
    alone = timed.simulate({}, host)
    overlap = sum(timed.seconds) - alone
    assert overlap >= 0
    slowed = timed.simulate({"compute": factor, "comm": factor}, host)
    assert slowed == pytest.approx(alone + (factor - 1.0) * overlap)


@settings(max_examples=scale(200))
@given(timed(THREE_LANES), st.fixed_dictionaries(dict.fromkeys(THREE_LANES, FACTORS)))
def test_whatever_the_factors_they_cost_no_more_than_the_largest_of_all_of_the_overlap(
    timed: Timed, factors: dict[str, float]
) -> None:
    """What a simulation says is a share of the overlap, between nothing and that of the busiest time."""
    alone, work = timed.simulate({}), sum(timed.seconds)
    (share,) = compute_share(np.array([timed.simulate(factors)]), np.array([alone]), np.array([work])).tolist()
    assert share >= -1e-9
    if work == alone:
        assert share == 0.0
    else:
        assert share * (work - alone) + alone <= max(factors.values()) * work + 1e-9


@pytest.mark.parametrize(
    ("host", "credit", "formula", "end"),
    [
        (HostCost(), 0.0, 12.0, 12.0),
        (HostCost(issue=2.0), 0.0, 12.0, 14.0),  # both lanes are idle for 2 seconds at first
        (HostCost(handover=2.0), 0.0, 12.0, 14.0),  # and here before the last op
        (HostCost(), 2.0, 12.0, 14.0),  # which takes 2 seconds more than it costs
    ],
)
def test_the_closed_form_leaves_out_what_the_host_and_buffers_add(
    host: HostCost, credit: float, formula: float, end: float
) -> None:
    p = ProgramBuilder()
    x = p.compute("make", do_nothing, p.input("x"))
    p.comm("send", do_nothing)
    p.comm("send_more", do_nothing, x)
    program = p.build()
    timed = Timed(Layered(program, lower([program], sequential([program]))), (4.0, 4.0, 4.0))
    alone = timed.simulate({}, host, credit)
    overlap = sum(timed.seconds) - alone
    assert alone + overlap == formula
    assert timed.simulate({"compute": 2.0, "comm": 2.0}, host, credit) == end


def test_rounding_is_no_overlap() -> None:
    work = np.array([1.0, 1.0])
    shares = compute_share(np.array([1.0, 1.1]), np.array([1.0 - 1e-16, 0.8]), work)
    assert shares.tolist() == pytest.approx([0.0, 1.5])


@st.composite
def points(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Shares of a few orders, and the work of steps that differ by more than what is alike."""
    kinds = draw(st.integers(2, 4))
    rows = draw(
        st.lists(
            st.lists(st.integers(1, 9), min_size=kinds, max_size=kinds), min_size=1, max_size=5, unique_by=normalise
        )
    )
    orders = draw(st.integers(1, 3))
    shares = [[draw(st.integers(0, 100)) / 100 for _ in range(orders)] for _ in rows]
    return np.array(shares), np.array(rows, dtype=np.float64)


def normalise(row: list[int]) -> tuple[float, ...]:
    return tuple(round(each / sum(row), 12) for each in row)


@settings(max_examples=scale(200))
@given(points(), st.floats(1e-6, 1e3))
def test_a_step_that_was_simulated_has_its_own_shares(points: tuple[np.ndarray, np.ndarray], size: float) -> None:
    shares, work = points
    estimated = OverlapCost(shares, work).estimate(work * size)
    assert np.broadcast_to(estimated, shares.shape) == pytest.approx(shares, abs=0.02)


@settings(max_examples=scale(200))
@given(points(), st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=4))
def test_shares_of_other_steps_are_between_those_of_simulated_ones(
    points: tuple[np.ndarray, np.ndarray], other: list[float]
) -> None:
    shares, work = points
    estimated = OverlapCost(shares, work).estimate(np.array([other[: work.shape[1]]]))
    assert (estimated >= shares.min(axis=0) - RESOLUTION * len(shares)).all()
    assert (estimated <= shares.max(axis=0) + RESOLUTION * len(shares)).all()


def test_a_step_half_way_between_two_has_the_mean_of_their_shares() -> None:
    cost = OverlapCost(np.array([[0.2, 1.0], [0.4, 0.0]]), np.array([[3.0, 1.0], [1.0, 3.0]]))
    assert cost.estimate(np.array([[5.0, 5.0]])).tolist() == [pytest.approx([0.3, 0.5])]


def test_steps_without_work_have_some_share() -> None:
    cost = OverlapCost(np.array([[0.2], [0.4]]), np.array([[3.0, 1.0], [0.0, 0.0]]))
    assert cost.estimate(np.array([[0.0, 0.0]])).tolist() == [[pytest.approx(0.4)]]


def test_shares_of_any_step_hold_for_all() -> None:
    columns = [np.array([0.15]), np.array([0.1, 0.3])]
    assert stack_shares(columns).tolist() == [[0.15, 0.1], [0.15, 0.3]]
    assert stack_shares(columns[:1]).tolist() == [[0.15]]


@pytest.mark.parametrize(
    ("contention", "factor"),
    [
        ({}, 1.0),
        ({"compute": 1.2, "comm": 1.2}, 1.2),
        ({"compute": 1.2, "comm": 1.3}, None),
        ({"compute": 1.2}, None),
        ({"compute": 1.2, "comm": 1.3, "compute/comm": 1.3}, 1.3),
    ],
)
def test_the_factor_that_two_lanes_have_in_common(contention: dict[str, float], factor: float | None) -> None:
    table = make_table(PROGRAM, COSTS, contention=contention)
    assert find_common_factor(PROGRAM, table) == factor


def test_one_lane_is_slowed_by_nothing_and_three_have_no_factor_in_common() -> None:
    one = record_layers(1, ("attention",))
    assert find_common_factor(one, make_table(one, COSTS)) == 1.0
    p = ProgramBuilder(has_side=True)
    for lane in THREE_LANES:
        p.op(lane, do_nothing, lane=lane)
    three = p.build()
    costs = {"compute": ComputeCost(), "side": ComputeCost(), "comm": CommCost(0.0, 0.0, 1.0)}
    table = make_table(three, costs, contention=dict.fromkeys(THREE_LANES, 1.2))
    assert find_common_factor(three, table) is None
