"""Which decisions for steps of a kind are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.batch import Batch
from dbo_runtime.decline import Decline
from dbo_runtime.planner.online.cuts import Cut
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.prediction import Prediction
from dbo_runtime.planner.online.split_choice import SplitChoice
from dbo_runtime.planner.online.step_memory import MAX_DECISIONS, Remembered, add_decision, holds_for_class

ORDER = NamedOrder("any", (), ())


def remember(ratio: float | None) -> Remembered:
    if ratio is None:
        return Remembered(Decline("no gain predicted"), ())
    return Remembered(SplitChoice(ORDER, Prediction(1.0, ratio, 2), Cut()), (0.5,))


@given(st.lists(st.none() | st.floats(0.1, 2.0), max_size=8))
def test_the_new_decision_is_kept_with_those_that_gain_most(ratios: list[float | None]) -> None:
    known: tuple[Remembered, ...] = ()
    for new in map(remember, ratios):
        before = known
        known = add_decision(before, new)
        assert new in known
        assert len(known) <= MAX_DECISIONS
        assert [each.ratio for each in known] == sorted(each.ratio for each in known)
        kept = [each for each in before if each in known]
        assert kept == list(before[: len(kept)])


def test_costs_that_are_nothing_have_no_ratio() -> None:
    free = Remembered(SplitChoice(ORDER, Prediction(0.0, 0.0, 2), Cut()), (0.5,))
    assert add_decision((remember(None),), free)[0] is free


def test_the_ratio_is_the_split_time_by_the_unsplit_one() -> None:
    assert Remembered(SplitChoice(ORDER, Prediction(0.5, 0.25, 2), Cut()), (0.5,)).ratio == 0.5
    assert Remembered(SplitChoice(ORDER, Prediction(0.0, 0.25, 2), Cut()), (0.5,)).ratio == 1.0


@pytest.mark.parametrize(
    ("decline", "tokens", "cuttable", "holds"),
    [
        (Decline("no gain predicted", expected=0.1), 64, True, True),
        (Decline("no gain predicted", expected=0.1), 64, False, False),
        (Decline("nowhere to cut"), 64, True, False),
        (Decline("nowhere to cut"), 1, True, True),
        (Decline("nowhere to cut"), 2, True, False),
    ],
)
def test_a_decline_holds_for_a_class_if_no_cut_of_its_steps_decides(
    decline: Decline, tokens: int, cuttable: bool, holds: bool
) -> None:
    assert holds_for_class(decline, Batch((tokens,), tokens, cuttable=cuttable)) is holds
