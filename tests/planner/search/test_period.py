"""Orders of many equal layers, from one period: as good as a search of all of them, in a fraction of the time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import staggered
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.validate import validate
from dbo_runtime.planner.search.jobs import make_jobs
from dbo_runtime.planner.search.period import (
    MIN_EQUAL_LAYERS,
    PeriodicOrder,
    PeriodSearch,
    find_periods,
    keep_few_layers,
)
from dbo_runtime.planner.search.search import find_order
from tests.support.planner.orders import measure_order
from tests.support.planner.shop import do_nothing, record_chain
from tests.support.profiles import scale

LAYERS = 40
MAX_STATES = 3_000
LONGER = 0.03  # share; the worst case that is known, the second example, takes 2.5 % longer


def record_model(lanes: str, layers: int = LAYERS) -> Program:
    """Record a prologue, layers of ops on these lanes (A: compute, C: communication), and an epilogue."""
    p = ProgramBuilder()
    x = p.compute("embed", do_nothing, p.input("x"))
    for index in range(layers):
        with p.layer(index):
            for number, lane in enumerate(lanes):
                record = p.comm if lane == "C" else p.compute
                x = record(f"op{number}", do_nothing, x, ordered=number == 0)
    return p.build(p.compute("head", do_nothing, x))


lanes = st.text("AC", min_size=2, max_size=5).filter(lambda text: len(set(text)) == 2)
seconds = st.lists(st.integers(1, 20), min_size=5, max_size=5)


def spread(program: Program, lanes: str, layer: Sequence[int]) -> list[float]:
    """Return the times of all ops of a model whose layers take *layer* [ops]."""
    count = (len(program.ops) - 2) // len(lanes)
    return [1.0, *map(float, [*layer[: len(lanes)]] * count), 1.0]


@settings(max_examples=scale(15), deadline=None)
@given(lanes, st.lists(seconds, min_size=2, max_size=3))
@example("ACACA", [[9, 1, 10, 20, 6], [1, 1, 12, 1, 6], [1, 11, 1, 9, 8]])  # a beam missed a tenth
@example("ACACA", [[15, 1, 10, 20, 6], [1, 17, 18, 8, 1]])  # one micro-batch gets ahead, layer by layer
def test_the_order_of_one_period_is_safe_and_about_as_fast_as_that_of_a_full_search(
    lanes: str, micro_batches: list[list[int]]
) -> None:
    program = record_model(lanes)
    times = [spread(program, lanes, each) for each in micro_batches]
    jobs = make_jobs([program] * len(times), times)
    search = PeriodSearch(program)
    periodic = search.find(times, MAX_STATES)
    orders = [staggered([program] * len(times), lead) for lead in range(4)]
    if periodic is not None:
        orders.append(periodic.repeat(periodic.omitted_periods))
        validate(lower([program] * len(times), orders[-1]))
    elif not search.is_saturated(times):
        assert len(times) > 2  # a beam may find no period: all layers are searched then
        return
    full = find_order(jobs, MAX_STATES)
    assert min(measure_order(jobs, order) for order in orders) <= full.seconds * (1.0 + LONGER)


@settings(max_examples=scale(15), deadline=None)
@given(lanes, st.lists(seconds, min_size=2, max_size=2))
def test_a_period_adds_no_more_than_it_says(lanes: str, micro_batches: list[list[int]]) -> None:
    few = keep_few_layers(record_model(lanes), 9)
    assert few is not None
    jobs = make_jobs([few.program] * 2, [spread(few.program, lanes, each) for each in micro_batches])
    found = find_order(jobs, MAX_STATES)
    for period in find_periods(jobs, few, found.order)[:1]:
        more = keep_few_layers(record_model(lanes), 9 + 3 * period.layers)
        assert more is not None
        longer = make_jobs([more.program] * 2, [spread(more.program, lanes, each) for each in micro_batches])
        order = PeriodicOrder(few, found.order, period).repeat(3)
        assert measure_order(longer, order) <= found.seconds + 3 * period.seconds


@pytest.mark.parametrize("lead", [0, 1, 2, 3])
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_a_policy_is_the_same_from_one_period(lead: int, micro_batches: int) -> None:
    program = record_model("ACAC", 61)
    periodic = PeriodSearch(program).repeat_policy(lambda programs: staggered(programs, lead), micro_batches)
    assert periodic is not None
    assert periodic.repeat(periodic.omitted_periods) == staggered([program] * micro_batches, lead)


def test_few_layers_are_searched_all_at_once() -> None:
    program = record_model("AC", MIN_EQUAL_LAYERS - 1)
    assert PeriodSearch(program).find([[1.0] * len(program.ops)] * 2, MAX_STATES) is None


def test_the_ops_that_are_left_keep_their_values() -> None:
    few = keep_few_layers(record_chain([("A", 1), ("C", 2)], 10), 4)
    assert few is not None
    assert (few.kept + few.omitted, few.ops) == (10 - (few.first > 0), 2)
    assert few.select([float(number) for number in range(20)]) == [
        *map(float, range(few.end)),
        *map(float, range(few.end + few.omitted * 2, 20)),
    ]
