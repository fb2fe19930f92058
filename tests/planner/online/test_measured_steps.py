"""A planner that serves: measured times correct its predictions and put steps on probation, at the same time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, OpCost
from dbo_runtime.planner.online.correction import PERIOD_STEPS, SPLIT, UNSPLIT
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.split_choice import SplitChoice
from tests.support.planner.machines import BYTES, PROGRAM, make_table
from tests.support.planner.prepared_machines import make_side

PROMPT = Batch((4096,), 4096)
QUICK = RuntimeConfig(micro_batches=2, policy=("alternate", 0))
COSTS: dict[str, OpCost] = {
    "attention": ComputeCost(10e-6, 0.16e-6),
    "reduce": CommCost(20e-6, 0.1e-6 / BYTES, BYTES),
}


def serve(
    planner: Planner, steps: int, unsplit: float, split: float, config: RuntimeConfig = QUICK
) -> list[SplitChoice | Decline]:
    """Serve steps that take *unsplit* or *split* times what is predicted without correction."""
    decisions = []
    for number in range(1, steps + 1):
        decision = planner.choose(PROMPT, config)
        if isinstance(decision, Decline):
            mode, expected, ratio = UNSPLIT, decision.expected, unsplit
        else:
            mode, expected, ratio = SPLIT, decision.prediction.split, split
        assert expected is not None
        planner.memory.observe(
            mode, expected, expected / planner.memory.correction.factor(mode) * ratio, decision.trial_class
        )
        decisions.append(decision)
        if number % PERIOD_STEPS == 0:
            planner.memory.apply([planner.memory.propose()])
    return decisions


def list_reasons(decisions: list[SplitChoice | Decline]) -> set[str]:
    return {decision.reason for decision in decisions if isinstance(decision, Decline)}


@pytest.mark.parametrize("unsplit", [0.7, 1.0, 1.5])
def test_predictions_are_corrected_by_steps_on_probation_too(unsplit: float) -> None:
    planner = Planner(PROGRAM, make_table(PROGRAM, COSTS))
    decisions = serve(planner, 3000, unsplit, split=1.2)
    assert planner.memory.correction.factor(UNSPLIT) == pytest.approx(unsplit)
    assert planner.memory.correction.factor(SPLIT) == pytest.approx(1.2)
    first = decisions[0]
    assert isinstance(first, SplitChoice)
    gain = 1 - 1.2 / unsplit * first.prediction.split / first.prediction.unsplit
    assert abs(gain) > 0.05  # or it would be close
    splits = sum(isinstance(decision, SplitChoice) for decision in decisions[-100:])
    assert splits in ((99, 100) if gain > 0 else (0, 1))  # but for a trial


def test_steps_that_measure_slower_split_are_declined_before_corrections_know() -> None:
    planner = Planner(PROGRAM, make_table(PROGRAM, COSTS))
    decisions = serve(planner, 1000, 1.0, split=1.9)
    assert list_reasons(decisions) >= {"on probation", "measured slower split"}


def test_without_probation_steps_are_split_as_predicted() -> None:
    planner = Planner(PROGRAM, make_table(PROGRAM, COSTS))
    config = replace(QUICK, probation=False)
    assert list_reasons(serve(planner, 1000, 1.0, 1.0, config)) == set()


def test_what_may_lose_is_tried_and_kept_where_it_gains() -> None:
    """Costs that may be far off say no, and measured steps say yes."""
    planner = Planner(PROGRAM, make_table(PROGRAM, COSTS, split_error=0.6))
    decisions = serve(planner, 3000, 1.0, split=1.0)
    assert isinstance(decisions[0], Decline)
    assert decisions[0].reason == "no gain predicted"
    assert all(isinstance(decision, SplitChoice) for decision in decisions[-100:-1])
    by_prediction = planner.choose(PROMPT, replace(QUICK, probation=False))
    assert isinstance(by_prediction, Decline)


def test_a_planner_that_is_told_to_always_split_does() -> None:
    planner = Planner(PROGRAM, make_table(PROGRAM, COSTS))
    always = replace(QUICK, mode="always")
    assert list_reasons(serve(planner, 300, 1.0, 2.0, always)) == set()


def test_what_is_predicted_to_lose_much_is_tried_and_kept_where_it_gains() -> None:
    """Costs may be so wrong that a split takes half of what they say."""
    third = 4096 * 0.16e-6 / 3  # of the compute, which each micro-batch pays in full; nothing to hide makes up for it
    costs: dict[str, OpCost] = {"attention": ComputeCost(third, 2 * third / 4096), "reduce": CommCost(0.0, 0.0, BYTES)}
    planner = Planner(PROGRAM, make_table(PROGRAM, costs))
    decisions = serve(planner, 6000, 1.0, split=0.5)
    assert isinstance(decisions[0], Decline)
    assert decisions[0].reason == "no gain predicted"
    assert sum(isinstance(decision, SplitChoice) for decision in decisions[-100:]) >= 99  # but for a trial


@pytest.mark.parametrize("side", ["on", "off"])
def test_nothing_is_tried_where_a_step_that_is_not_split_is_concurrent(side: str) -> None:
    """With ops forced on `side` no step runs unsplit, so trials would have nothing to be compared with."""
    decisions = serve(make_side().open_planner(), 500, 1.0, 1.0, replace(QUICK, side=side))
    assert isinstance(decisions[0], SplitChoice)
    assert list_reasons(decisions) == (set() if side == "on" else {"on probation"})
