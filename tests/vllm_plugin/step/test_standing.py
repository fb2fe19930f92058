"""A reason that holds for every step gives the model its own forward back, so that its steps cost nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dbo_runtime.vllm_plugin.step.first_steps import FirstSteps
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.step.warm_up import Phase
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics
from tests.support.vllm.forwards import EXPECTED, Lines, Model, make_forward, run
from tests.support.vllm.metrics import scrape


def install(model: Model, **options: Any) -> SplitForward:
    """Install a forward on a model that vLLM has not warmed up yet."""
    forward = make_forward(model, **options)
    forward.phase = Phase.STARTING
    model.forward = forward  # type: ignore[method-assign]
    return forward


def has_own_forward(model: Model) -> bool:
    return getattr(model.forward, "__func__", None) is Model.forward


STANDING = [
    ({"mode": "off"}, "DBO_MODE is off"),
    ({"mode": "auto", "transport": "none"}, "no communication to hide"),
    ({"mode": "auto", "transport": "shared memory"}, "no communication to hide"),
]


@pytest.mark.parametrize(("options", "reason"), STANDING)
def test_a_model_of_which_nothing_is_split_runs_its_own_forward_again(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = Model()
    forward = install(model, metrics=Metrics(tmp_path, "tiny", 0), **options)
    decline = forward.start_serving(is_final=True)
    assert decline is not None
    assert decline.reason == reason
    assert has_own_forward(model)
    counts = scrape(tmp_path)
    assert counts["vllm:dbo_standing_declines_total"] == {("tiny", "0", reason): 1}
    assert set(counts["vllm:dbo_steps_total"].values()) == {0}


@pytest.mark.parametrize(("options", "reason"), STANDING)
def test_where_settings_may_change_each_step_is_declined(options: dict[str, Any], reason: str) -> None:
    model = Model()
    forward = install(model, **options)
    decline = forward.start_serving()
    assert decline is not None
    assert decline.reason == reason
    assert model.forward is forward
    assert torch.equal(run(forward), EXPECTED)
    assert forward.runtime.statistics.declined == {reason: 1}


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "always", "transport": "none"},
        {"mode": "auto", "transport": "network"},
        {"mode": "off", "check": True},
    ],
    ids=["always", "a network", "ranks compare"],
)
def test_where_steps_are_split_or_compared_the_forward_stays(options: dict[str, Any]) -> None:
    model = Model()
    forward = install(model, **options)
    forward.start_serving(is_final=True)
    assert model.forward is forward


def test_where_cuts_are_chosen_the_forward_stays() -> None:
    model = Model()
    forward = install(model, mode="off")
    forward.decider.choose_cuts = lambda batch: [4]
    forward.start_serving(is_final=True)
    assert model.forward is forward


@pytest.mark.parametrize("is_final", [True, False])
def test_a_difference_from_unsplit_steps_ends_splitting_and_costs(is_final: bool) -> None:
    model = Model()
    model.slip = 1.0  # of the model's own forward
    forward = install(model)
    forward.decider.first_steps = FirstSteps(Lines())
    assert forward.start_serving(is_final) is None
    assert model.forward is forward
    assert torch.equal(run(forward), EXPECTED + model.slip)
    assert has_own_forward(model) is is_final
    told = forward.runtime.log.events  # type: ignore[attr-defined]
    assert told.count("every further step runs unsplit") == int(is_final)
