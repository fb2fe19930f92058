"""By how much a lane is slower while another one runs: known factors are found again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.calibrate.contention import MAX_CONTENTION, fit_contention
from dbo_runtime.lab.calibrate.samples import Sample
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.op_cost import ComputeCost, OpCost
from tests.support.planner.measurements import HINGE, LINE, PROMPTS, REDUCE, measure


def overlap(cost: OpCost, factor: float, share: float, features: Iterable[BatchFeatures] = PROMPTS) -> list[Sample]:
    """Return samples of which *share* of the work was done concurrently with another lane, slower by *factor*."""
    samples = []
    for sample in measure(cost, features):
        concurrent = sample.seconds * share * factor
        samples.append(sample._replace(seconds=sample.seconds * (1 - share) + concurrent, concurrent=concurrent))
    return samples


@given(st.floats(1, 9.9), st.floats(0.05, 1))
def test_contention_is_found_whatever_the_share_of_overlap(factor: float, share: float) -> None:
    found = fit_contention({"op": LINE}, [*measure(LINE, PROMPTS), *overlap(LINE, factor, share)])
    assert found == {"compute": pytest.approx(factor, rel=1e-6)}


def test_contention_is_found_for_each_lane_over_all_its_ops() -> None:
    twin = [sample._replace(op="twin") for sample in overlap(HINGE, 1.5, 0.4)]
    reduce = [sample._replace(op="reduce") for sample in overlap(REDUCE, 1.2, 0.7)]
    costs: dict[str, OpCost] = {"op": LINE, "twin": HINGE, "reduce": REDUCE}
    found = fit_contention(costs, [*overlap(LINE, 1.5, 0.9), *twin, *reduce])
    assert found == pytest.approx({"compute": 1.5, "comm": 1.2})


def test_disturbed_samples_hardly_change_contention() -> None:
    repeats = [sample for share in (0.5, 0.6, 0.7) for sample in overlap(LINE, 1.5, share)]
    disturbed = [s._replace(seconds=s.seconds * 50, concurrent=s.concurrent * 50) for s in overlap(LINE, 1.5, 0.8)]
    assert fit_contention({"op": LINE}, repeats + disturbed)["compute"] == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize(
    ("samples", "factor"),
    [
        ([Sample("op", "compute", BatchFeatures(100), 100e-6, 100e-6)], 1.0),  # faster than alone
        ([Sample("op", "compute", BatchFeatures(100), 12.0, 12.0)], MAX_CONTENTION),
        ([Sample("op", "compute", BatchFeatures(100), 13.0, 1.0)], 1.0),  # all work was done without the other lane
        ([Sample("op", "compute", BatchFeatures(100), 270e-6, 100e-6)], 1.0),  # 150 µs longer by 100 µs of the other
    ],
)
def test_contention_stays_within_reason(samples: list[Sample], factor: float) -> None:
    assert fit_contention({"op": LINE}, samples) == {"compute": factor}


def test_at_one_size_all_that_an_op_takes_longer_counts() -> None:
    """Repeats that ran alone say what it takes alone, and nothing else."""
    alone = [sample for sample in measure(LINE, PROMPTS[:1]) for _ in range(5)]
    found = fit_contention({"op": replace(LINE, fixed=9.0)}, [*alone, *overlap(LINE, 1.5, 0.4, PROMPTS[:1])])
    assert found == {"compute": pytest.approx(1.5)}


def test_without_samples_there_is_no_contention() -> None:
    assert fit_contention({"op": LINE}, []) == {}


def test_contention_of_an_op_without_a_cost_is_refused() -> None:
    with pytest.raises(ConfigError, match="op op was measured concurrently with others but has no cost"):
        fit_contention({}, overlap(LINE, 2, 0.5))


@given(st.floats(1, 4), st.floats(0, 1e-3))
def test_what_an_op_takes_longer_whatever_is_concurrent_is_no_contention(factor: float, credit: float) -> None:
    """A link that rested has credit, and a message that follows another has none."""
    late = [s._replace(seconds=s.seconds + credit) for s in overlap(REDUCE, factor, 0.3)]
    found = fit_contention({"op": REDUCE}, [*measure(REDUCE, PROMPTS), *late])
    assert found == {"comm": pytest.approx(factor, rel=1e-6)}


def test_nothing_is_said_of_lanes_that_never_ran_concurrently() -> None:
    """Costs that say how a side lane slows others let the planner use it, and of the others they are believed."""
    samples = [Sample(op, lane, BatchFeatures(8), 1.0) for op, lane in (("attention", "compute"), ("keys", "side"))]
    costs: dict[str, OpCost] = {"attention": ComputeCost(1.0), "keys": ComputeCost(1.0)}
    assert fit_contention(costs, samples) == {}
    concurrent = [sample._replace(concurrent=0.5) for sample in samples]
    assert fit_contention(costs, concurrent).keys() == {"compute", "side"}
