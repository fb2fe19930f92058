"""Published measurements that the model must not contradict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.whatif.corners import Corner, move_to
from dbo_runtime.lab.whatif.estimate import Estimator
from dbo_runtime.lab.whatif.measurements import (
    MEASUREMENTS,
    NOTHING,
    UNPREDICTED,
    Comparison,
    Measurement,
    compare,
    describe_comparisons,
)
from dbo_runtime.lab.whatif.published_cases import get_case

DECODES = [each for each in MEASUREMENTS if each.case == "r1-decode-12708"]
SLOW = [
    *DECODES,
    *(each for each in MEASUREMENTS if each.case in ("r1-prefill-910c", "r1-prefill-h800", "r1-decode-h800")),
]
NAMES = [f"{each.case}-{each.size}-{each.context}" for each in MEASUREMENTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "measurement",
    [
        # A decode of two micro-batches with movable ops is searched for seconds, and 61 layers with experts for one.
        pytest.param(each, marks=[pytest.mark.slow] if each in SLOW else [], id=name)
        for each, name in zip(MEASUREMENTS, NAMES, strict=True)
    ],
)
def test_the_model_agrees_with_a_measurement_unless_the_miss_is_explained(measurement: Measurement) -> None:
    comparison = compare(measurement)
    assert comparison.agrees != bool(measurement.miss), comparison


@pytest.mark.slow
@pytest.mark.parametrize("measurement", DECODES, ids=lambda each: str(each.size))
def test_with_one_compute_lane_the_decodes_contradict_it(measurement: Measurement) -> None:
    comparison = compare(measurement)
    assert not replace(comparison, predicted=comparison.one_lane).agrees


def test_a_publication_without_enough_to_predict_says_what_is_missing() -> None:
    assert len(UNPREDICTED) >= 5
    text = describe_comparisons([])
    for each in UNPREDICTED:
        assert each.source in " ".join(text.split())
        assert each.reason
        assert each.measured


def test_sglangs_prefill_would_gain_what_was_measured_if_its_unsplit_step_were_as_long() -> None:
    """As the miss says: compute 1.82 times as long makes the step 8192 tokens at 50,302 / 1.405 / 8 a second."""
    case = get_case("r1-prefill-h800")
    found = Estimator(move_to(case.table, Corner(compute=1.82))).estimate(
        case.step, RuntimeConfig(micro_batches=2, side="off")
    )
    assert found is not None
    assert found.unsplit == pytest.approx(8192 / (50_302 / 1.405 / 8), rel=1e-3)
    assert found.unsplit / found.split == pytest.approx(1.33, abs=0.005)


def test_what_is_fitted_to_a_step_in_two_is_said_with_the_costs() -> None:
    for measurement in MEASUREMENTS:
        source = get_case(measurement.case).table.provenance.source
        if measurement.fitted == NOTHING:
            assert "Nothing is fitted." in source or "fitted" not in source
        else:
            assert "fitted" in source


def predict_941(contention: float) -> float:
    """Return how many times faster two micro-batches are in the run of vllm-ascend #941."""
    case = get_case("r1-tp16-941")
    table = replace(case.table, contention={"compute": contention, "comm": contention})
    found = Estimator(table).estimate(case.step, RuntimeConfig(micro_batches=2))
    assert found is not None
    return found.unsplit / found.split


def test_contention_of_1589_is_what_941_shows_and_nothing_of_its_own() -> None:
    (contention,) = set(get_case("r1-ep16-1589").table.contention.values())
    assert predict_941(contention) == pytest.approx(1.01 / 0.90, rel=1e-3)
    assert predict_941(1.0) > 1.2  # without contention


@pytest.mark.parametrize(
    ("speed_up", "predicted", "is_split", "agrees"),
    [
        (1.2, 1.25, True, True),
        (1.2, 1.27, True, False),
        (1.2, 1.13, True, False),
        (1.31, 1.28, True, False),  # more than without contention
        (None, 0.9, False, True),
        (None, 1.1, False, False),
        (None, 1.0, True, False),
    ],
)
def test_the_model_is_contradicted_beyond_the_tolerance_or_by_a_split_that_does_not_pay(
    speed_up: float | None, predicted: float, is_split: bool, agrees: bool
) -> None:
    measurement = Measurement("r1-ep16-1589", "a test", 1, speed_up, 0.05)
    assert Comparison(measurement, predicted, 1.0, 1.3, is_split).agrees == agrees
