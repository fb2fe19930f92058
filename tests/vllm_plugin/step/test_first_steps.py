"""The first steps of each kind are compared, then none; and a difference ends splitting, not the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dbo_runtime.batch import Batch
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.vllm_plugin.step.first_steps import COMPARED_STEPS, FirstSteps, name_class
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from tests.support.vllm.forwards import EXPECTED, ONE_RANK, Lines, Model, Splitter, make_forward, run


def make_trial(model: Model, splitter: Splitter | None = None, **options: Any) -> tuple[SplitForward, Lines]:
    forward, log = make_forward(model, splitter, **options), Lines()
    forward.decider.first_steps = FirstSteps(log)
    return forward, log


def test_the_first_steps_of_a_kind_are_compared_and_the_rest_is_not() -> None:
    model = Model()
    forward, log = make_trial(model)
    for _ in range(COMPARED_STEPS + 2):
        assert torch.equal(run(forward), EXPECTED)
    assert len(model.unsplit) == COMPARED_STEPS
    assert forward.runtime.statistics.split == COMPARED_STEPS + 2
    assert log.events == ["first steps equal unsplit ones"]


@pytest.mark.parametrize(
    ("other", "compared"),
    [
        (Batch((4, 2, 2), prefill_tokens=8), 0),  # of the same kind
        (Batch((1,) * 8, prefill_tokens=0), COMPARED_STEPS),  # decodes
        (Batch((8,), prefill_tokens=8), COMPARED_STEPS),  # cut inside a request
    ],
    ids=["prefills", "decodes", "a cut request"],
)
def test_each_kind_has_steps_of_its_own(other: Batch, compared: int) -> None:
    model, splitter = Model(), Splitter()
    forward, _ = make_trial(model, splitter)
    for _ in range(COMPARED_STEPS + 1):
        run(forward)
    model.unsplit.clear()
    splitter.batch = other
    for _ in range(COMPARED_STEPS + 1):
        run(forward)
    assert len(model.unsplit) == compared


def test_after_a_difference_requests_get_unsplit_results_and_nothing_is_split() -> None:
    model = Model()
    model.slip = 1.0  # of the model's own forward
    forward, log = make_trial(model)
    for _ in range(3):
        assert torch.equal(run(forward), EXPECTED + model.slip)
    reason = "the first split steps differ from unsplit ones"
    assert forward.runtime.statistics.as_dict()["declined"] == {reason: 2}
    assert forward.runtime.statistics.split == 1
    assert log.events == ["nothing is split any more"]


def test_a_difference_on_another_rank_ends_splitting_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, _ = make_trial(Model())
    assert forward.decider.first_steps is not None
    monkeypatch.setattr(forward._comparison._agreement, "gather", lambda own: [own, "differs by 1"])
    assert torch.equal(run(forward), EXPECTED)
    assert forward.decider.first_steps.failure is not None
    assert forward.decider.first_steps.failure.detail == "differs by 1"


def test_data_parallel_ranks_name_classs_alike_whatever_their_own_batches_are() -> None:
    forward, _ = make_trial(Model())
    plans = [forward.runtime.plan(batch) for batch in (Batch((4, 4), 8), Batch((100, 20), 120))]
    assert len({name_class(plan, [8, 120]) for plan in plans if isinstance(plan, ExecutionPlan)}) == 1


def test_under_dbo_check_every_step_is_compared_and_a_difference_is_raised() -> None:
    model = Model()
    forward, log = make_trial(model, check=True)
    for _ in range(COMPARED_STEPS + 2):
        run(forward)
    assert len(model.unsplit) == COMPARED_STEPS + 2
    assert log.events == []


def test_the_unsplit_step_gets_the_embeddings_as_they_came() -> None:
    embeds = torch.arange(16.0).reshape(8, 2)
    positions = torch.arange(100, 108)
    expected = Model().forward(None, positions, embeds=embeds)
    model = Model()
    model.in_place = True
    forward, _ = make_trial(model)
    assert torch.equal(run(forward, input_ids=None, inputs_embeds=embeds.clone()), expected)
    assert forward.decider.first_steps is not None
    assert forward.decider.first_steps.failure is None


def test_what_is_copied_to_measure_has_no_trial() -> None:
    forward, _ = make_trial(Model())
    group: Any = ONE_RANK
    copied = forward.copy_for(forward.runtime.device, forward.runtime.config, group)
    assert copied.decider.first_steps is None
