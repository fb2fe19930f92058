"""What the kinds of costs say of themselves to cost files, and what they take."""

from __future__ import annotations

import math

import pytest

from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost

LATENCY = -math.inf  # times that may be below zero: differences
BUSY = CommCost(20e-6, 1e-9, 1000.0, free_bytes=3000.0, imbalance=2.0)


def show(cost: ComputeCost | CommCost | HostCost) -> dict[str, float]:
    return {name: value for name, value, _ in cost.list_numbers()}


def test_a_cost_file_has_what_every_op_of_a_kind_has_and_else_what_is_set() -> None:
    needed = {"fixed_us": 0.0, "per_token_us": 0.0, "weights_us": 0.0, "per_pair_us": 0.0, "per_context_pair_us": 0.0}
    assert show(ComputeCost()) == needed
    assert show(ComputeCost(per_decode_pair=3e-6)) == {**needed, "per_decode_pair_us": 3.0}
    assert show(ComputeCost(imbalance=1.5)) == {**needed, "imbalance": 1.5}
    assert show(ComputeCost(per_prefill=1e-6, per_context=2e-6, per_decode=3e-6)) == {
        **needed,
        "per_prefill_us": 1.0,
        "per_context_us": 2.0,
        "per_decode_us": 3.0,
    }


def test_the_same_of_communication() -> None:
    needed = {"alpha_us": 20.0, "beta_us_per_byte": 1e-3, "bytes_per_token": 1000.0}
    assert show(CommCost(20e-6, 1e-9, 1000.0)) == needed
    assert show(BUSY) == {**needed, "free_bytes": 3000.0, "imbalance": 2.0}


def test_the_same_of_the_host() -> None:
    needed = {"issue_us": 0.0, "computes": False, "whole_us": 0.0, "split_us": 0.0}
    assert show(HostCost()) == needed
    assert show(HostCost(handover=2e-6)) == {**needed, "handover_us": 2.0}
    both = HostCost(unsplit_per_token=-1e-6, split_per_token=-2e-6)
    assert show(both) == {**needed, "whole_us_per_token": -1.0, "split_us_per_token": -2.0}


def test_times_must_not_be_negative_but_for_differences_and_no_rank_is_less_busy_than_the_mean() -> None:
    assert {name for name, _, least in ComputeCost(imbalance=2.0).list_numbers() if least} == {"imbalance"}
    assert {least for *_, least in ComputeCost(imbalance=2.0).list_numbers()} == {0.0, 1.0}
    host = HostCost(1e-6, False, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6)
    assert {name for name, _, least in host.list_numbers() if least == LATENCY} == {
        "whole_us",
        "split_us",
        "whole_us_per_token",
        "split_us_per_token",
    }


@pytest.mark.parametrize("cost", [ComputeCost(1e-6 / 3), HostCost(handover=1e-6 / 3)])
def test_times_have_the_digits_that_a_file_keeps(cost: ComputeCost | HostCost) -> None:
    assert 1 / 3 not in show(cost).values()
    assert 0.333333333333 in show(cost).values()
    assert (getattr(cost, "handover", 0.0) or getattr(cost, "fixed", 0.0)) == 0.333333333333 / 1e6


def test_what_is_not_named_costs_nothing() -> None:
    assert ComputeCost().time(BatchFeatures(1, *[1.0] * 6)) == 0.0


def test_an_op_takes_what_the_busiest_rank_takes() -> None:
    assert ComputeCost(per_token=1.0, imbalance=1.5).time(BatchFeatures(4)) == 6.0
    assert ComputeCost(per_token=1.0, imbalance=1.5).token_seconds == 1.5
    assert BUSY.token_seconds == pytest.approx(1e-9 * 1000 * 2)
    assert BUSY.time(BatchFeatures(2)) == pytest.approx(20e-6 + 1e-9 * (2 * 2000 - 3000))


def test_a_buffer_saves_at_most_what_it_holds() -> None:
    assert BUSY.free_seconds == pytest.approx(3e-6)
    assert BUSY.credit(BatchFeatures(1)) == pytest.approx(2e-6)
    assert BUSY.credit(BatchFeatures(2)) == pytest.approx(3e-6)
    assert BUSY.time(BatchFeatures(1)) == pytest.approx(20e-6)


def test_of_compute_the_greater_of_weights_and_tokens_counts_and_attention_is_added() -> None:
    cost = ComputeCost(fixed=1.0, per_token=2.0, weights=5.0, per_pair=0.5)
    assert cost.time(BatchFeatures(1, 4.0)) == 1.0 + 5.0 + 2.0
    assert cost.time(BatchFeatures(3, 4.0)) == 1.0 + 6.0 + 2.0
