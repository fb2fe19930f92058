"""Requests: the same for the same seed, with the means that were asked for, and errors that name what is wrong."""

from __future__ import annotations

import math
from itertools import islice, pairwise
from statistics import fmean

import pytest

from dbo_runtime.errors import DboError
from dbo_runtime.lab.simulate.disturbance import Disturbances
from dbo_runtime.lab.simulate.workload import Workload, draw_requests


def test_lengths_and_gaps_have_the_means_of_the_workload() -> None:
    requests = draw_requests(Workload(1000, 200, spread=0.5), 4.0, 20_000, seed=1)
    assert fmean(each.prompt for each in requests) == pytest.approx(1000, rel=0.02)
    assert fmean(each.output for each in requests) == pytest.approx(200, rel=0.02)
    gaps = [after.arrival - before.arrival for before, after in pairwise(requests)]
    assert fmean(gaps) == pytest.approx(0.25, rel=0.02)
    spread = math.sqrt(fmean((each.prompt - 1000) ** 2 for each in requests))
    assert spread == pytest.approx(500, rel=0.05)
    assert min(gaps) >= 0


def test_without_spread_all_are_alike_and_a_mean_of_one_token_is_one_token() -> None:
    assert {each[1:] for each in draw_requests(Workload(700, 1, spread=0.0), 1.0, 50, seed=0)} == {(700, 1)}
    assert {each.output for each in draw_requests(Workload(700, 1, spread=2.0), 1.0, 50, seed=0)} == {1}


def test_rates_see_the_same_requests_and_seeds_do_not() -> None:
    slow, fast = (draw_requests(Workload(1000, 200), rate, 100, seed=7) for rate in (1.0, 8.0))
    assert [each[1:] for each in slow] == [each[1:] for each in fast]
    assert [each.arrival / 8 for each in slow] == pytest.approx([each.arrival for each in fast])
    assert slow == draw_requests(Workload(1000, 200), 1.0, 100, seed=7)
    assert slow != draw_requests(Workload(1000, 200), 1.0, 100, seed=8)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"prompt": 0}, "prompt"),
        ({"output": 1 << 21}, "output"),
        ({"context": -1}, "context"),
        ({"spread": -0.1}, "spread"),
        ({"spread": math.nan}, "spread"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(values: dict[str, float], named: str) -> None:
    with pytest.raises(DboError, match=named):
        Workload(**{"prompt": 1000, "output": 10, **values})


@pytest.mark.parametrize(("rate", "count"), [(0.0, 1), (-1.0, 1), (math.inf, 1), (1.0, 0)])
def test_no_requests_are_refused(rate: float, count: int) -> None:
    with pytest.raises(DboError, match="above zero"):
        draw_requests(Workload(1000, 10), rate, count, seed=0)


def test_the_more_ranks_the_more_steps_have_a_straggler() -> None:
    disturbances = Disturbances(0.01, 1.5)
    for ranks in (1, 64):
        draws = list(islice(disturbances.draw(ranks, seed=3), 20_000))
        share = fmean(each.slowdown > 1 for each in draws)
        assert share == pytest.approx(1 - 0.99**ranks, rel=0.1)
        assert {each.slowdown for each in draws} == {1.0, 1.5}
        assert fmean(each.imbalance for each in draws) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("values", [(-0.1, 1.5), (1.1, 1.5), (0.1, 0.9), (math.nan, 1.5), (0.1, math.nan)])
def test_stragglers_that_cannot_be_are_refused(values: tuple[float, float]) -> None:
    with pytest.raises(DboError, match="stragglers"):
        Disturbances(*values)
