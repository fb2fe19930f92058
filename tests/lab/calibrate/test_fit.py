"""Costs from measurements: known costs are found again, with noise and without."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.calibrate.fit import fit_costs
from dbo_runtime.lab.calibrate.samples import Sample
from dbo_runtime.planner.costs.batch_features import BatchFeatures, measure_features
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, OpCost
from tests.support.planner.measurements import HINGE, LINE, PROMPTS, REDUCE, SIZES, measure

# As calibration measures: requests of many lengths, one as long as can be, and some with a context, without which new
# and cached pairs cannot be distinguished.
MIXED = (
    *(measure_features([size // 4] * 4, ()) for size in SIZES),
    *(measure_features([size], [1024]) for size in SIZES[::2]),
    PROMPTS[-1],
)
UNSEEN = (measure_features([3000], ()), measure_features([512, 700], [100, 0]), measure_features([1500], [1500]))

FLAT = ComputeCost(50e-6)
MASKED = ComputeCost(20e-6, 1e-6, per_pair=1e-9, per_context_pair=1e-9)
DENSE = ComputeCost(20e-6, 1e-6, per_pair=2e-9, per_context_pair=1e-9)
MASKED_HINGE = replace(MASKED, weights=200e-6)


def measure_badly(cost: OpCost, features: Iterable[BatchFeatures], noise: float, seed: int = 0) -> list[Sample]:
    """Return nine samples a load that scatter by *noise*; about one in twenty takes twenty times as long."""
    random = np.random.default_rng(seed)
    return [
        sample._replace(seconds=sample.seconds * factor * disturbed)
        for sample in measure(cost, features) * 9
        for factor in [1 + noise * random.uniform(-1, 1)]
        for disturbed in [20 if random.random() < 0.05 else 1]
    ]


def fit(samples: list[Sample], bytes_per_token: float = 14336) -> Any:
    return fit_costs(samples, bytes_per_token)[0]["op"]


def approx(cost: OpCost, rel: float = 1e-6) -> Any:
    """Return what compares equal to nearly the same predictions."""
    return pytest.approx(predict(cost), rel=rel)


def predict(cost: OpCost) -> list[float]:
    """Return the seconds at loads that were measured and at others."""
    return [cost.time(features) for features in (*MIXED, *UNSEEN)]


@pytest.mark.parametrize("cost", [LINE, FLAT, HINGE, MASKED, DENSE, MASKED_HINGE, ComputeCost(), REDUCE])
def test_exact_measurements_give_back_the_cost(cost: OpCost) -> None:
    found = fit(measure(cost, MIXED))
    assert type(found) is type(cost)
    assert asdict(found) == pytest.approx(asdict(cost), rel=1e-6, abs=1e-18)


@pytest.mark.parametrize("cost", [LINE, FLAT, HINGE, MASKED, DENSE, MASKED_HINGE, REDUCE])
@pytest.mark.parametrize("seed", range(3))
def test_noise_and_outliers_hardly_matter(cost: OpCost, seed: int) -> None:
    costs, errors = fit_costs(measure_badly(cost, MIXED, noise=0.05, seed=seed), 14336)
    assert predict(costs["op"]) == approx(cost, rel=0.05)
    assert 0 < errors["op"] < 0.05


def test_noise_seldom_invents_terms() -> None:
    found = [fit(measure_badly(LINE, MIXED, noise=0.1, seed=seed)) for seed in range(20)]
    assert sum(cost.weights > 0 or cost.per_pair > 0 for cost in found) <= 2


@pytest.mark.parametrize("weights", [70e-6, 300e-6, 512e-6, 1500e-6, 2048e-6])
def test_the_kink_is_found_between_sizes_and_at_them(weights: float) -> None:
    hinge = ComputeCost(10e-6, 1e-6, weights)
    found = fit(measure(hinge, PROMPTS))
    assert found.weights == pytest.approx(weights)
    assert found.per_token == pytest.approx(1e-6)


def test_a_kink_before_the_last_size_gives_back_what_was_measured() -> None:
    """Its exact place is not known then, nor the slope beyond it."""
    hinge = ComputeCost(10e-6, 1e-6, weights=3000e-6)
    found = fit(measure(hinge, PROMPTS))
    assert [found.time(features) for features in PROMPTS] == pytest.approx(
        [hinge.time(features) for features in PROMPTS]
    )


def test_one_small_size_that_took_long_makes_no_kink() -> None:
    samples = measure(LINE, PROMPTS)
    samples[0] = samples[0]._replace(seconds=samples[0].seconds * 1.3)
    assert fit(samples).weights == 0


def test_cached_pairs_are_taken_to_cost_what_new_ones_do_where_none_was_measured() -> None:
    found = fit(measure(DENSE, PROMPTS))
    assert found.per_pair == found.per_context_pair == pytest.approx(DENSE.per_pair)
    for seed in range(5):
        found = fit(measure_badly(DENSE, PROMPTS, noise=0.02, seed=seed))
        assert found.per_pair == found.per_context_pair == pytest.approx(DENSE.per_pair, rel=0.1)


def test_a_few_long_prompts_are_not_outvoted_by_many_short_ones() -> None:
    short = [measure_features([16], [context]) for context in range(60)]
    found = fit(measure_badly(DENSE, [*short, *PROMPTS], noise=0.05))
    assert found.time(PROMPTS[-1]) == pytest.approx(DENSE.time(PROMPTS[-1]), rel=0.1)


def test_no_more_terms_are_fitted_than_measurements_can_tell() -> None:
    found = fit(measure(HINGE, PROMPTS[2:5]))
    assert (found.weights, found.per_pair) == (0, 0)


@given(
    fixed=st.floats(0, 1e-2),
    per_token=st.floats(0, 1e-4),
    sizes=st.lists(st.integers(1, 10_000), min_size=2, max_size=8, unique=True),
)
def test_what_is_exactly_linear_is_reproduced(fixed: float, per_token: float, sizes: list[int]) -> None:
    for cost in (ComputeCost(fixed, per_token), CommCost(fixed, per_token / 8, 8)):
        features = [measure_features([size], ()) for size in sizes]
        costs, errors = fit_costs(measure(cost, features), 8)
        assert [costs["op"].time(features) for features in features] == pytest.approx(
            [cost.time(features) for features in features], rel=1e-6, abs=1e-15
        )
        assert errors["op"] < 1e-5


def test_ops_are_fitted_separately() -> None:
    samples = [*measure(LINE, PROMPTS), *(sample._replace(op="other") for sample in measure(REDUCE, PROMPTS))]
    costs, errors = fit_costs(samples, 14336)
    assert costs.keys() == errors.keys() == {"op", "other"}
    assert predict(costs["op"]) == approx(LINE)
    assert predict(costs["other"]) == approx(REDUCE)


def test_small_and_large_sizes_count_alike() -> None:
    """Half the points say 10 % more, half 10 % less: by absolute errors, the largest would decide alone."""
    wrong = [1.1, 0.9] * (len(PROMPTS) // 2)
    samples = [s._replace(seconds=s.seconds * factor) for s, factor in zip(measure(LINE, PROMPTS), wrong, strict=True)]
    costs, errors = fit_costs(samples, 1)
    assert costs["op"].time(PROMPTS[0]) == pytest.approx(LINE.time(PROMPTS[0]), rel=0.12)
    assert errors["op"] == pytest.approx(0.1, rel=0.3)


def test_the_error_is_the_median_over_all_features() -> None:
    samples = [Sample("op", "comm", BatchFeatures(size), seconds) for size, seconds in ((1, 1.0), (2, 1.0), (3, 1.0))]
    assert fit_costs(samples, 1)[1]["op"] == pytest.approx(0, abs=1e-9)
    rising = [*samples, Sample("op", "comm", BatchFeatures(4), 0.5)]
    alpha = fit_costs(rising, 1)[0]["op"].time(BatchFeatures(0))  # the slope cannot be negative
    assert fit_costs(rising, 1)[1]["op"] == pytest.approx(abs(alpha - 1.0))


def test_durations_of_zero_are_no_trouble() -> None:
    found = fit([Sample("op", "compute", features, 0.0) for features in PROMPTS])
    assert found == ComputeCost()


def test_samples_concurrent_with_another_lane_do_not_count_as_costs() -> None:
    slowed = [s._replace(seconds=s.seconds * 3, concurrent=s.seconds) for s in measure(LINE, PROMPTS)]
    assert predict(fit([*measure(LINE, PROMPTS), *slowed, *slowed])) == approx(LINE)


@pytest.mark.parametrize(
    ("samples", "bytes_per_token", "says"),
    [
        ([], 1, "no op was measured; measure unsplit steps of at least two sizes"),
        (measure(LINE, PROMPTS[:1] * 3), 1, "op op was measured at 32 tokens only; measure unsplit steps of at least"),
        (measure(LINE, [BatchFeatures(8, 1), BatchFeatures(8, 2)]), 1, "op op was measured at 8 tokens only"),
        (measure(LINE, PROMPTS, concurrent=1e-9), 1, "only concurrently with another lane, never alone"),
        (measure(REDUCE, PROMPTS), 0, "bytes_per_token is 0; it must be above 0, because op op communicates"),
        (measure(LINE, PROMPTS) + measure(REDUCE, PROMPTS), 1, "op op runs on lanes comm and compute"),
        ([Sample("op", "compute", PROMPTS[0], -1.0)], 1, "op op has a sample of -1 s"),
        ([Sample("op", "compute", PROMPTS[0], float("nan"))], 1, "op op has a sample of nan s"),
        ([Sample("op", "compute", PROMPTS[0], 1.0, 2.0)], 1, "of which 2 s concurrent with another lane"),
    ],
)
def test_what_cannot_be_fitted_says_why(samples: list[Sample], bytes_per_token: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fit_costs(samples, bytes_per_token)


def test_decodes_and_cached_tokens_are_distinguished_from_prefills() -> None:
    attention = ComputeCost(
        50e-6,
        1e-6,
        per_pair=4e-9,
        per_context_pair=2e-9,
        per_prefill=90e-6,
        per_context=4e-6,
        per_decode=7e-6,
        per_decode_pair=3e-8,
    )
    features = [
        measure_features([q] * r, [c] * r) for q in (1, 16, 128, 512, 2048) for r in (1, 8) for c in (0, 100, 1000)
    ]
    found = fit(measure(attention, features))
    unseen = [
        measure_features([1, 1, 700], [50, 900, 0]),
        measure_features([64] * 5, [300] * 5),
        measure_features([1] * 30, [400] * 30),
    ]
    assert [found.time(features) for features in unseen] == pytest.approx(
        [attention.time(features) for features in unseen], rel=1e-3
    )


def test_what_buffers_take_at_once_is_found() -> None:
    link = CommCost(400e-6, 4e-8, 1024, free_bytes=48_000)
    features = [measure_features([size], ()) for size in (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)]
    found = fit(measure(link, features), bytes_per_token=1024)
    assert found.free_bytes == pytest.approx(48_000, rel=0.2)
    assert [found.time(features) for features in UNSEEN] == pytest.approx(
        [link.time(features) for features in UNSEEN], rel=0.02
    )


@pytest.mark.parametrize(("sizes", "is_found"), [(5, False), (6, True)])
def test_a_buffer_is_looked_for_where_enough_sizes_were_measured(sizes: int, is_found: bool) -> None:
    link = CommCost(400e-6, 4e-8, 1024, free_bytes=48_000)
    features = [measure_features([size], ()) for size in (8, 32, 64, 128, 256, 512)[:sizes]]
    assert (fit(measure(link, features), bytes_per_token=1024).free_bytes > 0) is is_found


def test_a_term_that_explains_nothing_is_zero() -> None:
    """And not a rounding error that grows with the batch."""
    found = fit(measure(FLAT, MIXED))
    assert found == ComputeCost(found.fixed)


def test_a_line_needs_no_buffer() -> None:
    assert fit(measure_badly(REDUCE, PROMPTS, noise=0.05)).free_bytes == 0
