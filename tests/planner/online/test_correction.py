"""What is learnt from the steps that run: slowly, robustly, and alike on all ranks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.planner.online.correction import (
    MAX_LOG,
    MAX_LOG_CHANGE,
    PERIOD_STEPS,
    SPLIT,
    UNSPLIT,
    WINDOW_STEPS,
    Correction,
)

RATIOS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=2 * WINDOW_STEPS)
PROPOSALS = st.lists(
    st.dictionaries(st.sampled_from([UNSPLIT, SPLIT]), st.floats(-5, 5), max_size=2), min_size=1, max_size=5
)


def learn(ratios: list[float], mode: str = SPLIT) -> Correction:
    """Return a correction of steps that took *ratios* times what was predicted."""
    correction = Correction()
    for ratio in ratios:
        correction.observe(mode, 2.0, 2.0 * ratio)
    return correction


def update(correction: Correction, times: int = 1) -> None:
    for _ in range(times):
        correction.apply([correction.propose()])


def test_at_first_nothing_is_corrected() -> None:
    correction = Correction()
    update(correction)
    assert correction.propose() == {}
    assert correction.factor(UNSPLIT) == correction.factor(SPLIT) == 1.0


def test_it_comes_to_what_steps_really_take() -> None:
    correction = learn([1.3] * 10)
    update(correction, times=20)
    assert correction.factor(SPLIT) == pytest.approx(1.3)


def test_a_mode_that_never_ran_stays_as_predicted() -> None:
    correction = learn([1.3] * 10, mode=SPLIT)
    update(correction, times=20)
    assert correction.factor(UNSPLIT) == 1.0


def test_both_modes_are_corrected_separately() -> None:
    correction = learn([1.2] * 3, mode=UNSPLIT)
    correction.observe(SPLIT, 1.0, 0.9)
    update(correction, times=20)
    assert correction.factor(UNSPLIT) == pytest.approx(1.2)
    assert correction.factor(SPLIT) == pytest.approx(0.9)


@given(RATIOS, st.integers(1, 5))
def test_an_update_moves_by_little_and_not_beyond_the_aim(ratios: list[float], times: int) -> None:
    correction = learn(ratios)
    for _ in range(times):
        aim = correction.propose()[SPLIT]
        before = math.log(correction.factor(SPLIT))
        update(correction)
        after = math.log(correction.factor(SPLIT))
        assert abs(after - before) <= MAX_LOG_CHANGE + 1e-9
        assert min(before, aim) - 1e-9 <= after <= max(before, aim) + 1e-9


@pytest.mark.parametrize(("ratio", "limit"), [(1e6, MAX_LOG), (1e-6, -MAX_LOG)])
def test_no_correction_goes_beyond_the_limit(ratio: float, limit: float) -> None:
    correction = learn([ratio])
    update(correction, times=1000)
    assert math.log(correction.factor(SPLIT)) == pytest.approx(limit)


def test_a_factor_stays_between_a_quarter_and_four() -> None:
    assert math.exp(MAX_LOG) == pytest.approx(4.0)


def test_one_update_moves_a_factor_by_five_percent() -> None:
    correction = learn([2.0])
    update(correction)
    assert correction.factor(SPLIT) == pytest.approx(1.05, abs=0.002)


def test_outliers_move_nothing() -> None:
    correction = learn([1.1] * 33 + [1000.0] * 20 + [0.001] * 11)
    assert correction.propose() == {SPLIT: pytest.approx(math.log(1.1))}


def test_what_is_long_ago_is_forgotten() -> None:
    correction = learn([3.0] * WINDOW_STEPS + [1.1] * WINDOW_STEPS)
    assert correction.propose() == {SPLIT: pytest.approx(math.log(1.1))}


@pytest.mark.parametrize(
    ("predicted", "measured"),
    [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, -1.0), (math.inf, 1.0), (1.0, math.inf), (math.nan, 1.0)],
)
def test_what_is_no_time_is_not_learnt(predicted: float, measured: float) -> None:
    correction = Correction()
    correction.observe(UNSPLIT, predicted, measured)
    assert correction.propose() == {}


def test_of_several_ranks_the_median_counts() -> None:
    correction = Correction()
    for _ in range(100):
        correction.apply([{SPLIT: 0.1}, {SPLIT: 0.2}, {SPLIT: 5.0}])
    assert math.log(correction.factor(SPLIT)) == pytest.approx(0.2)


def test_ranks_that_measured_nothing_have_no_say() -> None:
    correction = Correction()
    for _ in range(100):
        correction.apply([{}, {UNSPLIT: 0.3}, {SPLIT: 0.1}, {}])
    assert math.log(correction.factor(UNSPLIT)) == pytest.approx(0.3)
    assert math.log(correction.factor(SPLIT)) == pytest.approx(0.1)


def test_an_update_is_due_once_in_a_period() -> None:
    correction = Correction()
    due = [correction.count() for _ in range(3 * PERIOD_STEPS)]
    assert [number for number, is_due in enumerate(due, 1) if is_due] == [
        PERIOD_STEPS,
        2 * PERIOD_STEPS,
        3 * PERIOD_STEPS,
    ]


@given(st.lists(PROPOSALS, max_size=8), RATIOS)
def test_ranks_that_apply_the_same_correct_alike_whatever_they_measured(
    history: list[list[dict[str, float]]], ratios: list[float]
) -> None:
    ranks = [Correction(), learn(ratios)]
    for proposals in history:
        for rank in ranks:
            rank.apply(proposals)
        assert ranks[0].factor(SPLIT) == ranks[1].factor(SPLIT)
        assert ranks[0].factor(UNSPLIT) == ranks[1].factor(UNSPLIT)
