"""The costs that are worst for splitting: what is not known of contention is doubted, what is known is not."""

from __future__ import annotations

import pytest

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, OpCost
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.predictor import DOUBTED_CONTENTION, make_worst_cases
from dbo_runtime.planner.online.split_choice import SplitChoice
from tests.support.planner.machines import BYTES, PROGRAM, make_table, record_layers

PROMPT = Batch((4096,), 4096)
IN_TWO = RuntimeConfig(micro_batches=2, policy=("alternate", 0), probation=False)


def make_costs(fixed: float) -> dict[str, OpCost]:
    """Return costs of 4096 us of compute, of which each micro-batch pays the share *fixed*, and of communication."""
    attention = ComputeCost(fixed * 4096e-6, (1 - fixed) * 1e-6)
    return {"attention": attention, "reduce": CommCost(0.0, 1e-6 / BYTES, BYTES)}


@pytest.mark.parametrize(
    ("known", "worst"),
    [
        ({}, {"compute": DOUBTED_CONTENTION, "comm": DOUBTED_CONTENTION}),
        ({"compute": 1.0}, {"compute": 1.0, "comm": DOUBTED_CONTENTION}),
        ({"compute": 1.0, "comm": 1.4}, {"compute": 1.0, "comm": 1.4}),
    ],
)
def test_contention_that_is_not_known_is_doubted(known: dict[str, float], worst: dict[str, float]) -> None:
    for case in make_worst_cases(make_table(PROGRAM, make_costs(0.1), contention=known), 0.1):
        assert case.contention == worst


def test_lanes_that_a_program_does_not_have_are_not_doubted() -> None:
    program = record_layers(2, ("attention", "shared"))
    costs: dict[str, OpCost] = {"attention": ComputeCost(1e-3), "shared": ComputeCost(1e-3)}
    for case in make_worst_cases(make_table(program, costs, contention={}), 0.1):
        assert case.contention == {}


def test_a_split_that_pays_only_without_contention_is_declined_unless_it_is_known_that_there_is_none() -> None:
    """Nearly all communication is hidden, and most of what that gains is paid for by the second micro-batch."""
    costs = make_costs(0.9)
    known = Planner(PROGRAM, make_table(PROGRAM, costs)).choose(PROMPT, IN_TWO)
    doubted = Planner(PROGRAM, make_table(PROGRAM, costs, contention={})).choose(PROMPT, IN_TWO)
    assert isinstance(known, SplitChoice)
    assert known.prediction.worst_case > 0
    assert isinstance(doubted, Decline)
    assert doubted.reason == "no gain predicted"


def test_what_is_expected_has_no_doubt_in_it() -> None:
    costs = make_costs(0.1)
    known, doubted = (
        Planner(PROGRAM, make_table(PROGRAM, costs, **changes)).choose(PROMPT, IN_TWO)
        for changes in ({}, {"contention": {}})
    )
    assert isinstance(known, SplitChoice)
    assert isinstance(doubted, SplitChoice)
    assert doubted.prediction.split == known.prediction.split
    assert doubted.prediction.worst_case < known.prediction.worst_case
