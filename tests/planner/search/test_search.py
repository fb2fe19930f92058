"""The search for an issue order, against the figures of `docs/theory.md` and against all orders of small programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings

from dbo_runtime.errors import ConfigError, ScheduleError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import COMPUTE
from dbo_runtime.ir.policies import Order, alternate, sequential, staggered
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Issue
from dbo_runtime.ir.validate import validate
from dbo_runtime.planner.search.bound import compute_bound
from dbo_runtime.planner.search.jobs import Job, make_jobs
from dbo_runtime.planner.search.search import find_order, issue_early
from tests.support.planner.orders import measure_order, order_greedily
from tests.support.planner.shop import Layer, Shop, do_nothing, find_least_end, share_chain, shops, simulate_order
from tests.support.profiles import scale

LAYERS = 8
LARGE = 61  # layers of DeepSeek-V3
MANY = [20, pytest.param(LARGE, marks=pytest.mark.slow)]  # layers


class Row(NamedTuple):
    """A row of the table in `docs/theory.md`: speed-ups over the ops of the unsplit batch in sequence."""

    layer: Layer
    ideal: float
    optimum: float
    leads: tuple[float, float, float]
    greedy: float
    three: float


TABLE = {
    "the A3 example of vllm-ascend #4894": Row(
        [("C", 400), ("A", 2000), ("C", 400), ("C", 1200), ("A", 800), ("C", 1200), ("C", 300)],
        1.80, 1.639, (1.639, 1.595, 1.514), 1.400, 1.758,
    ),
    "imbalanced": Row(
        [("A", 2000), ("C", 400), ("A", 600), ("C", 2000)], 1.923, 1.600, (1.460, 1.476, 1.375), 1.460, 1.813
    ),
    "balanced": Row(
        [("A", 1000), ("C", 1000), ("A", 1000), ("C", 1000)], 2.0, 1.939, (1.939, 1.829, 1.730), 1.939, 1.959
    ),
    "communication 20 %": Row(
        [("A", 1600), ("C", 300), ("A", 1600), ("C", 500)], 1.25, 1.238, (1.238, 1.224, 1.201), 1.238, 1.242
    ),
}  # fmt: skip
ROWS = pytest.mark.parametrize("row", TABLE.values(), ids=list(TABLE))

CHAIN = share_chain([("A", 1), ("C", 2), ("A", 3)], layers=1, micro_batches=2)


def make_jobs_of(shop: Shop) -> tuple[Job, ...]:
    return make_jobs(shop.programs, shop.times)


def find_speed_up(row: Row, seconds: float) -> float:
    return round(LAYERS * sum(time for _, time in row.layer) / seconds, 3)


@ROWS
def test_the_ideal_is_that_of_the_table(row: Row) -> None:
    """The layers are those of the table; whatever the search says of them can be compared."""
    compute, comm = (sum(time for kind, time in row.layer if kind == lane) for lane in "AC")
    assert (compute + comm) / max(compute, comm) == pytest.approx(row.ideal, abs=5e-3)


@ROWS
def test_two_micro_batches_are_as_fast_as_in_the_table_and_no_order_is_faster(row: Row) -> None:
    found = find_order(make_jobs_of(share_chain(row.layer, LAYERS, 2)))
    assert find_speed_up(row, found.seconds) == row.optimum
    assert found.is_optimal
    assert found.gap == pytest.approx(0)


@ROWS
@pytest.mark.parametrize("lead", [0, 1, 2])
def test_a_fixed_lead_is_as_fast_as_in_the_table(row: Row, lead: int) -> None:
    shop = share_chain(row.layer, LAYERS, 2)
    seconds = measure_order(make_jobs_of(shop), staggered(shop.programs, lead))
    assert find_speed_up(row, seconds) == row.leads[lead]


@ROWS
def test_what_can_start_first_goes_first_as_fast_as_in_the_table(row: Row) -> None:
    jobs = make_jobs_of(share_chain(row.layer, LAYERS, 2))
    assert find_speed_up(row, measure_order(jobs, order_greedily(jobs))) == row.greedy


@pytest.mark.slow
@ROWS
def test_three_micro_batches_are_at_least_as_fast_as_in_the_table(row: Row) -> None:
    found = find_order(make_jobs_of(share_chain(row.layer, LAYERS, 3)))
    assert find_speed_up(row, found.seconds) >= row.three
    assert found.bound <= found.seconds


@settings(max_examples=scale(500))
@given(shops())
def test_of_all_orders_of_two_micro_batches_none_is_faster(shop: Shop) -> None:
    jobs = make_jobs_of(shop)
    found = find_order(jobs)
    assert found.seconds == find_least_end(shop)
    assert found.is_optimal
    assert compute_bound(jobs) <= found.seconds


@settings(max_examples=scale(300))
@given(shops(max_ops=7))
def test_an_order_that_was_found_is_safe_and_as_fast_as_it_says(shop: Shop) -> None:
    jobs = make_jobs_of(shop)
    found = find_order(jobs)
    validate(lower(shop.programs, found.order))
    assert simulate_order(*shop, found.order) == measure_order(jobs, found.order) == found.seconds


@settings(max_examples=scale(100))
@given(shops(micro_batches=3, max_ops=3))
def test_of_all_orders_of_three_small_micro_batches_none_is_faster(shop: Shop) -> None:
    found = find_order(make_jobs_of(shop))
    assert found.bound <= find_least_end(shop) == found.seconds == simulate_order(*shop, found.order)


@settings(max_examples=scale(100))
@given(shops(micro_batches=3, max_ops=6))
def test_three_micro_batches_are_no_slower_than_by_any_policy(shop: Shop) -> None:
    jobs = make_jobs_of(shop)
    found = find_order(jobs)
    assert found.bound <= found.seconds
    orders = [order_greedily(jobs)]
    orders += [policy(shop.programs) for policy in (sequential, alternate, partial(staggered, lead=1))]
    for order in orders:
        seconds = measure_if_allowed(shop, order)
        assert seconds is None or found.seconds <= seconds


@settings(max_examples=scale(300))
@given(shops())
def test_any_order_takes_what_its_schedule_takes(shop: Shop) -> None:
    jobs = make_jobs_of(shop)
    for order in (order_greedily(jobs), sequential(shop.programs)):
        assert measure_order(jobs, order) == simulate_order(*shop, order)


@pytest.mark.parametrize("layers", MANY)
@pytest.mark.parametrize("comm", [(2, 5, 7), (1, 3, 5, 7)], ids=["tensor parallel", "alternating"])
def test_the_order_of_a_large_model_is_proven_optimal(comm: tuple[int, ...], layers: int) -> None:
    times = [110, 700, 350, 60, 420, 800, 900, 250]  # of compute and communication about as much
    layer = [("C" if number in comm else "A", float(time)) for number, time in enumerate(times)]
    shop = share_chain(layer, layers, 2)
    found = find_order(make_jobs_of(shop))
    assert found.is_optimal
    assert found.seconds == pytest.approx(simulate_order(*shop, found.order))
    assert found.seconds <= simulate_order(*shop, alternate(shop.programs))


@pytest.mark.parametrize("layers", MANY)
def test_the_order_of_a_large_model_with_experts_is_proven_optimal(layers: int) -> None:
    program = record_experts(layers)
    times = [50.0, 900.0, 60.0, 20.0, 400.0, 200.0, 200.0, 1200.0, 30.0] * layers
    shop = Shop((program,) * 2, (tuple(times),) * 2)
    found = find_order(make_jobs_of(shop))
    assert found.is_optimal
    assert found.seconds == simulate_order(*shop, found.order) < simulate_order(*shop, alternate(shop.programs))


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_a_search_that_must_give_up_still_finds_an_order_and_says_how_good_it_is(micro_batches: int) -> None:
    shop = share_chain(TABLE["imbalanced"].layer, LAYERS, micro_batches)
    found = find_order(make_jobs_of(shop), max_states=1)
    validate(lower(shop.programs, found.order))
    assert found.seconds == pytest.approx(simulate_order(*shop, found.order))
    assert compute_bound(make_jobs_of(shop)) == found.bound < found.seconds
    assert not found.is_optimal
    assert found.gap == 1 - found.bound / found.seconds > 0


def test_micro_batches_that_take_no_time_are_in_order_at_once() -> None:
    found = find_order(make_jobs(CHAIN.programs, [(0.0, 0.0, 0.0)] * 2))
    assert (found.seconds, found.gap, found.is_optimal) == (0.0, 0.0, True)


@settings(max_examples=scale(300))
@given(shops())
def test_issuing_early_changes_no_lane_and_no_time(shop: Shop) -> None:
    jobs = make_jobs_of(shop)
    for order in allowed_orders(shop):
        early = issue_early(jobs, order)
        assert list_lanes(shop.programs, early) == list_lanes(shop.programs, order)
        assert simulate_order(*shop, early) == simulate_order(*shop, order)


@settings(max_examples=scale(300))
@given(shops(micro_batches=3))
def test_issuing_early_puts_nothing_behind_more_computation(shop: Shop) -> None:
    jobs = make_jobs_of(shop)
    for order in allowed_orders(shop):
        before = find_computed_before(shop.programs, order)
        for issue, computed in find_computed_before(shop.programs, issue_early(jobs, order)).items():
            assert computed <= before[issue]


def test_issuing_early_moves_communication_before_what_need_not_come_first() -> None:
    p = ProgramBuilder()
    x = p.input("x")
    p.compute("long", do_nothing, x)
    p.comm("send", do_nothing, x)
    programs = [p.build()]
    assert issue_early(make_jobs(programs, [(5.0, 1.0)]), (Issue(0, 0), Issue(0, 1))) == (Issue(0, 0), Issue(0, 1))
    order = (Issue(0, 0), Issue(1, 0), Issue(0, 1), Issue(1, 1))
    early = issue_early(make_jobs(programs * 2, [(5.0, 1.0)] * 2), order)
    assert early == (Issue(0, 0), Issue(0, 1), Issue(1, 0), Issue(1, 1))


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([(1.0, 2.0, 3.0), (1.0, -2.0, 3.0)], r"L0\.op1/1 cannot take -2\.0 s"),
        ([(1.0, 2.0, math.nan), (1.0, 2.0, 3.0)], r"L0\.op2/0 cannot take nan s"),
        ([(math.inf, 2.0, 3.0), (1.0, 2.0, 3.0)], r"L0\.op0/0 cannot take inf s"),
        ([(1.0, 2.0, 3.0), (1.0, 2.0)], "micro-batch 1 has 3 ops, but 2 times were given"),
    ],
)
def test_impossible_times_are_refused(times: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_jobs(CHAIN.programs, times)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([(0, 1)], "op 1 of micro-batch 0 is issued before its turn"),
        ([(2, 0)], "op 0 of micro-batch 2 is issued before its turn"),
        ([(-1, 0)], "op 0 of micro-batch -1 is issued before its turn"),
        ([(1, 0), (1, 0)], "op 0 of micro-batch 1 is issued before its turn"),
        ([(0, 0), (0, 1), (0, 2), (0, 3)], "op 3 of micro-batch 0 is issued before its turn"),
    ],
)
def test_what_is_no_order_is_not_measured(order: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        measure_order(make_jobs_of(CHAIN), [Issue(*issue) for issue in order])


def test_an_order_that_leaves_ops_out_is_not_measured() -> None:
    with pytest.raises(ScheduleError, match="the order issues 3 of 6 ops"):
        measure_order(make_jobs_of(CHAIN), [Issue(0, position) for position in range(3)])


def test_an_ordered_op_before_that_of_the_micro_batch_before_it_is_not_measured() -> None:
    p = ProgramBuilder()
    p.compute("attention", do_nothing, p.input("x"), ordered=True)
    jobs = make_jobs([p.build()] * 2, [(1.0,)] * 2)
    with pytest.raises(ScheduleError, match="op 0 of micro-batch 1 is issued before its turn"):
        measure_order(jobs, [Issue(1, 0), Issue(0, 0)])


def record_experts(layers: int) -> Program:
    """Return MoE layers of 9 ops whose shared experts are concurrent with their dispatch: no chains."""
    p = ProgramBuilder()
    x = p.input("x")
    for index in range(layers):
        with p.layer(index):
            x = p.compute("attn_norm", do_nothing, x)
            x = p.compute("attention", do_nothing, x, ordered=True)
            hidden = p.compute("mlp_norm", do_nothing, x)
            topk = p.compute("gate", do_nothing, hidden)
            sent = p.comm("dispatch", do_nothing, hidden, topk, exclusive="a2a")
            shared = p.compute("shared_experts", do_nothing, hidden)
            routed = p.compute("experts", do_nothing, sent)
            routed = p.comm("combine", do_nothing, routed, exclusive="a2a")
            x = p.compute("merge", do_nothing, routed, shared, x)
    return p.build(x)


def allowed_orders(shop: Shop) -> list[Order]:
    orders = [sequential(shop.programs), alternate(shop.programs), order_greedily(make_jobs_of(shop))]
    return [order for order in orders if measure_if_allowed(shop, order) is not None]


def measure_if_allowed(shop: Shop, order: Order) -> float | None:
    """Return when an order ends, or None if it issues ordered ops out of order: policies know nothing of them."""
    try:
        return simulate_order(*shop, order)
    except ScheduleError:
        return None


def list_lanes(programs: Sequence[Program], order: Order) -> dict[str, list[Issue]]:
    """Return what each lane runs, in order."""
    lanes: dict[str, list[Issue]] = {}
    for issue in order:
        lanes.setdefault(programs[issue.micro_batch].ops[issue.position].lane, []).append(issue)
    return lanes


def find_computed_before(programs: Sequence[Program], order: Order) -> dict[Issue, set[Issue]]:
    """Return, for each op off the compute lane, the compute ops that are issued before it."""
    computed: set[Issue] = set()
    before = {}
    for issue in order:
        if programs[issue.micro_batch].ops[issue.position].lane == COMPUTE:
            computed.add(issue)
        else:
            before[issue] = set(computed)
    return before
