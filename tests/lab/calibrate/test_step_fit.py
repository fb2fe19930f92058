"""What steps take besides their ops is found again from measured steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.calibrate.measurement import StepSample
from dbo_runtime.lab.calibrate.step_fit import compute_split_error, fit_rest, fit_steps
from dbo_runtime.lab.oracle.searching_planner import SearchingPlanner
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.op_cost import HostCost
from tests.support.planner.known_costs import COSTS
from tests.support.planner.machines import make_table, record_layers

PROGRAM = record_layers(4)  # of one compute op and one that communicates
TABLE = make_table(PROGRAM, COSTS)
HANDOVER = 30e-6
HANDOVERS = 2 * (2 * 4 - 1)  # each op of a micro-batch but its first waits for one on the other lane
FIXED, PER_TOKEN = {"unsplit": -1e-4, "alternate": 4e-3}, {"unsplit": 5e-7, "alternate": 2e-6}
ALTERNATE = RuntimeConfig(policy=("alternate", 0))


def make_steps(sizes: tuple[int, ...], spread: tuple[float, ...] = (1.0,)) -> list[StepSample]:
    """Return steps that take what is predicted with HANDOVER, and FIXED and PER_TOKEN more; repeats spread a little."""
    planner = SearchingPlanner(PROGRAM, replace(TABLE, host=HostCost(handover=HANDOVER)))
    steps = []
    for tokens in sizes:
        unsplit, half = BatchFeatures(tokens), BatchFeatures(tokens // 2)
        seconds = {
            "unsplit": planner.predict_unsplit(unsplit),
            "alternate": planner.predict_split([half] * 2, ALTERNATE),
        }
        for factor in spread:
            steps.append(StepSample("sequential", (half, half), 1.0, HANDOVERS * HANDOVER * factor))
            for mode, loads in (("unsplit", (unsplit,)), ("alternate", (half, half))):
                taken = seconds[mode] + FIXED[mode] + PER_TOKEN[mode] * tokens
                steps.append(StepSample(mode, loads, taken * factor, 0.0))
    return steps


@pytest.mark.parametrize("spread", [(1.0,), (0.9, 1.0, 1.2)])
def test_what_steps_take_besides_their_ops_is_found_again(spread: tuple[float, ...]) -> None:
    table, errors = fit_steps(TABLE, PROGRAM, make_steps((64, 512, 4096), spread))
    host = table.host
    assert host.handover == pytest.approx(HANDOVER)
    assert (host.unsplit, host.split) == pytest.approx((FIXED["unsplit"], FIXED["alternate"]))
    assert (host.unsplit_per_token, host.split_per_token) == pytest.approx(
        (PER_TOKEN["unsplit"], PER_TOKEN["alternate"])
    )
    worst = 0.0 if len(spread) == 1 else 1 / 9  # of 0.9, 1.0 and 1.2 times: 1/9, 0 and 1/6 of what was measured
    assert errors == pytest.approx({"unsplit": worst, "split": worst}, abs=1e-9)
    assert replace(table, host=TABLE.host, split_error=0.0) == TABLE
    assert table.split_error == pytest.approx(0.0, abs=1e-9)  # each round's unsplit and split step are off alike


def test_what_split_steps_take_longer_than_predicted_is_told_by_the_time_that_they_take() -> None:
    def run(mode: str, seconds: float) -> StepSample:
        return StepSample(mode, (BatchFeatures(8),), seconds, 0.0)

    def measure(*steps: tuple[float, float]) -> float:
        """Return the error where steps take so long unsplit, and so many times as long split; half is predicted."""
        unsplit = [(run("unsplit", seconds), 1.0) for seconds, _ in steps]
        return compute_split_error(unsplit, [(run("alternate", seconds * ratio), 0.5) for seconds, ratio in steps])

    assert measure() == 0.0
    assert measure((1.0, 0.6)) == pytest.approx(0.2)
    assert measure((1.0, 0.4)) == 0.0  # faster than predicted is no error
    assert measure(*[(0.01, 1.0)] * 10, (1.0, 0.55)) == pytest.approx(0.1)  # short steps are many, but matter little
    assert measure((1.0, 0.55), (1.0, 0.6), (1.0, 0.65), (1.0, 0.7)) == pytest.approx(0.3)
    free = [(run("unsplit", 1.0), 1.0)], [(run("alternate", 1.0), 0.0)]
    assert compute_split_error(*free) == 0.0


def test_a_planner_of_the_fitted_costs_predicts_the_steps() -> None:
    steps = make_steps((64, 512, 4096))
    planner = SearchingPlanner(PROGRAM, fit_steps(TABLE, PROGRAM, steps)[0])
    for step in steps:
        if step.mode == "unsplit":
            assert planner.predict_unsplit(step.loads[0]) == pytest.approx(step.seconds)
        if step.mode == "alternate":
            assert planner.predict_split(step.loads, ALTERNATE) == pytest.approx(step.seconds)


def test_steps_of_one_size_give_no_more_than_a_constant() -> None:
    host = fit_steps(TABLE, PROGRAM, make_steps((512,)))[0].host
    assert (host.unsplit_per_token, host.split_per_token) == (0.0, 0.0)
    assert host.unsplit == pytest.approx(FIXED["unsplit"] + PER_TOKEN["unsplit"] * 512)
    assert host.split == pytest.approx(FIXED["alternate"] + PER_TOKEN["alternate"] * 512)


def test_without_steps_costs_stay_as_they_are() -> None:
    assert fit_steps(TABLE, PROGRAM, []) == (TABLE, {"unsplit": 0.0, "split": 0.0})


def test_idle_time_below_nothing_is_no_handover() -> None:
    """Rounding of a timeline in which no lane is ever idle."""
    loads = (BatchFeatures(64),) * 2
    assert fit_steps(TABLE, PROGRAM, [StepSample("sequential", loads, 1.0, -1e-18)])[0].host.handover == 0.0


def test_a_rest_is_fitted_to_medians_of_repeats_and_to_relative_errors() -> None:
    def run(tokens: int, seconds: float, predicted: float) -> tuple[StepSample, float]:
        return StepSample("unsplit", (BatchFeatures(tokens),), seconds, 0.0), predicted

    assert fit_rest([]) == (0.0, 0.0)
    disturbed = [run(10, 3.0, 1.0), run(10, 3.0, 1.0), run(10, 99.0, 1.0)]
    assert fit_rest(disturbed) == pytest.approx((2.0, 0.0))
    assert fit_rest([*disturbed, run(110, 13.0, 1.0)]) == pytest.approx((1.0, 0.1))
    # No line goes through these. Of least squares, absolute ones would miss the small sizes by many times.
    sizes = ((1, 1.0), (2, 2.0), (1000, 1000.0), (2000, 3000.0))
    fixed, per_token = fit_rest([run(tokens, seconds, 0.0) for tokens, seconds in sizes])
    assert all(fixed + per_token * tokens == pytest.approx(seconds, rel=0.4) for tokens, seconds in sizes)
