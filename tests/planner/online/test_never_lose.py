"""Costs are never exact: even with wrong ones, a split step must not take longer than an unsplit one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.planner.costs.op_cost import OpCost
from dbo_runtime.planner.online.planner import Planner
from tests.support.planner.machines import PROGRAM, Machine, compute_gain, list_machines, make_table

AUTO = RuntimeConfig()
TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)
NOISE = 0.2
NOISES: dict[str, Callable[[random.Random], float]] = {
    "up to a fifth": lambda rng: rng.uniform(1 - NOISE, 1 + NOISE),
    "a fifth": lambda rng: rng.choice((1 - NOISE, 1 + NOISE)),
}
MOST_LOSS = 0.01


@pytest.mark.slow
@pytest.mark.parametrize("roofline", [False, True], ids=["fixed cost", "roofline"])
@pytest.mark.parametrize("noise", NOISES.values(), ids=list(NOISES))
def test_costs_that_are_off_lose_nothing(roofline: bool, noise: Callable[[random.Random], float]) -> None:
    """Of each machine, steps of all sizes, planned with costs that are off in all their numbers.

    The planner does not know by how much.
    """
    rng = random.Random(11)
    config = replace(AUTO, policy=("alternate", 0))
    gains = plan_machines([256, 4096], roofline, lambda: noise(rng), config)
    assert gains[0][0] >= -MOST_LOSS, gains[0]
    assert sum(gain > AUTO.margin for gain, *_ in gains) > len(gains) / 5  # or it would be easy


@pytest.mark.slow
def test_costs_that_are_off_lose_nothing_in_the_best_order() -> None:
    rng = random.Random(1)
    config = replace(AUTO, micro_batches=2)
    gains = plan_machines([1024], False, lambda: NOISES["up to a fifth"](rng), config)
    assert gains[0][0] >= -MOST_LOSS, gains[0]


@pytest.mark.slow
def test_costs_that_say_by_how_much_they_are_off_lose_nothing() -> None:
    """Of errors that are normally distributed, a fit reports the median: two thirds of the standard deviation."""
    rng = random.Random(11)
    config = replace(AUTO, policy=("alternate", 0))
    gains = plan_machines([256, 4096], False, lambda: rng.gauss(1, 0.05), config, error=0.034)
    assert gains[0][0] >= -MOST_LOSS, gains[0]


@pytest.mark.slow
@pytest.mark.parametrize("roofline", [False, True], ids=["fixed cost", "roofline"])
def test_costs_that_are_exact_leave_no_gain_behind(roofline: bool) -> None:
    config = replace(AUTO, policy=("alternate", 0))
    for machine in list_machines([1024]):
        costs = machine.make_costs(roofline)
        batch = Batch((machine.tokens,), machine.tokens)
        planner = Planner(PROGRAM, make_table(PROGRAM, costs), max_states=1)
        best = compute_gain(costs, batch, planner.choose(batch, replace(config, mode="always")))
        gain = compute_gain(costs, batch, planner.choose(batch, config))
        assert gain == best or (gain == 0 and best <= AUTO.margin + 5e-3), machine


def plan_machines(
    sizes: Sequence[int], roofline: bool, noise: Callable[[], float], config: RuntimeConfig, error: float | None = None
) -> list[tuple[float, Machine, int]]:
    """Return what is gained on each machine, by a step of each size: the least first."""
    gains = []
    for machine in list_machines(sizes):
        costs = machine.make_costs(roofline)
        planner = Planner(PROGRAM, make_table(PROGRAM, disturb(costs, noise), error), max_states=1)
        for tokens in TOKENS:
            batch = Batch((tokens,), tokens)
            gains.append((compute_gain(costs, batch, planner.choose(batch, config)), machine, tokens))
    return sorted(gains)


def disturb(costs: dict[str, OpCost], noise: Callable[[], float]) -> dict[str, OpCost]:
    """Return costs each number of which is off by a factor of its own."""
    numbers = ("fixed", "per_token", "weights", "alpha", "beta")
    return {
        op: replace(cost, **{name: getattr(cost, name) * noise() for name in numbers if hasattr(cost, name)})
        for op, cost in costs.items()
    }
