"""Whether to split: no flicker, and the same answers on all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.planner.gate import Gate

MARGIN = 0.02

QUESTIONS = st.lists(st.tuples(st.sampled_from("ab"), st.floats(-0.1, 0.1), st.sampled_from([0.0, MARGIN])))


def test_a_split_must_gain_more_than_the_margin() -> None:
    gate = Gate()
    assert not gate.decide("prefill", MARGIN, MARGIN)
    assert gate.decide("prefill", MARGIN + 1e-6, MARGIN)


def test_a_split_stays_until_less_than_half_of_the_margin_is_left() -> None:
    gate = Gate()
    answers = [gate.decide("prefill", gain, MARGIN) for gain in (0.03, 0.015, 0.011, 0.01, 0.015, 0.019, 0.021)]
    assert answers == [True, True, True, False, False, False, True]


def test_a_gain_that_wavers_around_the_margin_does_not_make_it_flicker() -> None:
    gate = Gate()
    answers = [gate.decide("prefill", gain, MARGIN) for gain in [0.021, 0.019] * 10]
    assert all(answers)


def test_steps_of_one_kind_do_not_open_it_for_another() -> None:
    gate = Gate()
    assert gate.decide("prefill", 0.1, MARGIN)
    assert not gate.decide("decode", 0.015, MARGIN)
    assert gate.decide("prefill", 0.015, MARGIN)


@pytest.mark.parametrize("gain", [0.0, -0.1])
def test_without_a_margin_nothing_that_gains_nothing_is_split(gain: float) -> None:
    gate = Gate()
    assert gate.decide("prefill", 1e-9, 0.0)
    assert not gate.decide("prefill", gain, 0.0)


@given(QUESTIONS)
def test_ranks_that_ask_the_same_get_the_same_answers(questions: list[tuple[str, float, float]]) -> None:
    ranks = [Gate(), Gate()]
    for key, gain, margin in questions:
        first, second = (gate.decide(key, gain, margin) for gate in ranks)
        assert first == second


@given(QUESTIONS)
def test_nothing_is_split_that_is_predicted_to_lose(questions: list[tuple[str, float, float]]) -> None:
    gate = Gate()
    for key, gain, margin in questions:
        assert not gate.decide(key, gain, margin) or gain > 0
