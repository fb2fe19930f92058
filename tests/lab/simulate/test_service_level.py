"""The capacity at a service level: found where it is known, and the same unsplit and split if nothing is gained."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.errors import DboError
from dbo_runtime.lab.simulate.comparison import Scenario, compare_capacity, estimate_throughput
from dbo_runtime.lab.simulate.disturbance import Disturbances
from dbo_runtime.lab.simulate.instance import Layout
from dbo_runtime.lab.simulate.service_level import (
    ServiceLevel,
    Verdict,
    compute_quantile,
    find_capacity,
)
from dbo_runtime.lab.simulate.workload import Workload
from tests.support.lab.pricers import Linear

pytest.importorskip("simpy")
SCENARIO = Scenario(
    Workload(500, 20), Layout(2, 1024, 16), Disturbances(0.01, 1.5), ServiceLevel(1.0, 0.08), requests=200
)


@given(st.floats(0.05, 50), st.floats(0.1, 10))
def test_the_largest_rate_that_holds_is_found_from_any_start_that_is_near(limit: float, start: float) -> None:
    found = find_capacity(lambda rate: Verdict(rate, 0.0, rate <= limit), start)
    assert limit / 1.012 <= found.rate <= limit
    assert found.verdict.ttft == found.rate


def test_none_is_found_where_none_holds_and_unlimited_is_an_error() -> None:
    assert find_capacity(lambda rate: Verdict(9.0, 9.0, False), 1.0) == (0.0, Verdict(9.0, 9.0, False))
    with pytest.raises(DboError, match="holds even at"):
        find_capacity(lambda rate: Verdict(0.0, 0.0, True), 1.0)


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 0.99))
def test_a_quantile_bounds_its_share(values: list[float], quantile: float) -> None:
    found = compute_quantile(values, quantile)
    assert sum(value <= found for value in values) >= quantile * len(values)
    assert sum(value < found for value in values) < quantile * len(values)


def test_without_a_gain_a_split_serves_as_much() -> None:
    pricer = Linear(0.02, 1e-4, 1e-3, uneven=1.2)
    comparison = compare_capacity(SCENARIO, pricer, pricer, range(2))
    assert comparison.gain == (1.0, 1.0, 1.0)
    assert comparison.unsplit == comparison.overlapped
    assert comparison.unsplit.low > 0


def test_faster_steps_serve_more_at_the_same_level_and_seeds_are_repeated() -> None:
    slow, fast = (Linear(0.02 * factor, 1e-4 * factor, 1e-3 * factor) for factor in (1.0, 0.8))
    comparison = compare_capacity(SCENARIO, slow, fast, range(2))
    assert comparison.gain is not None
    assert comparison.gain.low > 1.0
    assert comparison.unsplit.low <= comparison.unsplit.point <= comparison.unsplit.high
    assert compare_capacity(SCENARIO, slow, fast, range(2)) == comparison
    for trial in comparison.trials:
        assert trial.unsplit.verdict.holds
        assert trial.unsplit.rate < 1.1 * estimate_throughput(SCENARIO.workload, SCENARIO.layout, slow)


def test_a_level_that_no_request_can_have_gives_no_gain() -> None:
    slow = Linear(start=5.0)
    comparison = compare_capacity(SCENARIO, slow, slow, range(1))
    assert comparison.gain is None
    assert comparison.unsplit.high == 0


@pytest.mark.parametrize("values", [(0.0, 1.0, 0.9), (1.0, -1.0, 0.9), (1.0, 1.0, 1.0), (math.nan, 1.0, 0.9)])
def test_a_level_that_cannot_be_is_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(DboError, match="service level"):
        ServiceLevel(*values)


def test_no_request_cannot_be_judged() -> None:
    with pytest.raises(DboError, match="no request"):
        compute_quantile([], 0.9)
