"""Whether to split: no flicker, and the same answers on all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.planner.online.prediction import Prediction
from dbo_runtime.planner.online.step_memory import MAX_CLASSES, StepMemory

MARGIN = 0.02

GAINS = st.floats(-0.1, 0.1)
QUESTIONS = st.lists(st.tuples(st.sampled_from("ab"), st.tuples(GAINS, GAINS), st.sampled_from([0.0, MARGIN])))


def predict(gain: float, worst_case: float = 0.0) -> Prediction:
    """Return what is predicted where splitting gains so much, and so much if costs are off."""
    return Prediction(1.0, 1.0 - gain, 2, worst_case)


def ask(hysteresis: StepMemory, gains: list[float]) -> list[bool]:
    return [hysteresis.is_split("prefill", predict(gain), MARGIN) for gain in gains]


def test_a_split_must_gain_more_than_the_margin() -> None:
    assert ask(StepMemory(), [MARGIN - 1e-6, MARGIN + 1e-6]) == [False, True]


def test_a_split_stays_until_less_than_half_of_the_margin_is_left() -> None:
    answers = ask(StepMemory(), [0.03, 0.015, 0.011, 0.009, 0.015, 0.019, 0.021])
    assert answers == [True, True, True, False, False, False, True]


def test_a_gain_that_wavers_around_the_margin_does_not_make_it_flicker() -> None:
    assert all(ask(StepMemory(), [0.021, 0.019] * 10))


def test_a_split_must_not_lose_if_costs_are_off() -> None:
    hysteresis = StepMemory()
    assert not hysteresis.is_split("prefill", predict(0.1, -1e-6), MARGIN)
    assert hysteresis.is_split("prefill", predict(0.1, 0.0), MARGIN)


def test_a_split_stays_until_it_may_lose_more_than_half_of_the_margin() -> None:
    hysteresis = StepMemory()
    answers = [
        hysteresis.is_split("prefill", predict(0.1, worst_case), MARGIN)
        for worst_case in (0.0, -0.009, -0.01, -0.011, -0.009)
    ]
    assert answers == [True, True, True, False, False]


def test_steps_of_one_kind_do_not_open_it_for_another() -> None:
    hysteresis = StepMemory()
    assert hysteresis.is_split("prefill", predict(0.1), MARGIN)
    assert not hysteresis.is_split("decode", predict(0.015), MARGIN)
    assert hysteresis.is_split("prefill", predict(0.015), MARGIN)


def test_it_says_how_many_kinds_are_split() -> None:
    hysteresis = StepMemory()
    for kind, gain in (("prefill", 0.1), ("decode", 0.1), ("mixed", 0.0)):
        hysteresis.is_split(kind, predict(gain), MARGIN)
    assert hysteresis.sizes_and_capacities["split classes"] == (2, MAX_CLASSES)


@pytest.mark.parametrize("gain", [0.0, -0.1])
def test_without_a_margin_nothing_that_gains_nothing_is_split(gain: float) -> None:
    hysteresis = StepMemory()
    assert hysteresis.is_split("prefill", predict(1e-9), 0.0)
    assert not hysteresis.is_split("prefill", predict(gain), 0.0)


@given(QUESTIONS)
def test_ranks_that_ask_the_same_get_the_same_answers(questions: list[tuple[str, tuple[float, float], float]]) -> None:
    ranks = [StepMemory(), StepMemory()]
    for key, gains, margin in questions:
        first, second = (hysteresis.is_split(key, predict(*gains), margin) for hysteresis in ranks)
        assert first == second


@given(QUESTIONS)
def test_nothing_is_split_that_is_predicted_to_lose(questions: list[tuple[str, tuple[float, float], float]]) -> None:
    hysteresis = StepMemory()
    for key, gains, margin in questions:
        assert not hysteresis.is_split(key, predict(*gains), margin) or (gains[0] > 0 and gains[1] >= -margin / 2)


def test_a_prediction_says_what_a_split_brings() -> None:
    text = "12.00 ms unsplit, 9.00 ms in 2 micro-batches: 25.0% less (5.0% more if costs are off)"
    assert str(Prediction(12e-3, 9e-3, 2, -0.05)) == text
    assert str(Prediction(12e-3, 9e-3, 2)).endswith("25.0% less (0.0% less if costs are off)")
    assert Prediction(12e-3, 9e-3, 2).gain == pytest.approx(0.25)
    assert Prediction(0.0, 9e-3, 2).gain == 0.0
