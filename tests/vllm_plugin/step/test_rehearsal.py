"""Dummy steps that are split before serving, on the real runner; end_to_end/test_failing_adapters.py has what fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dbo_runtime.decline import Decline
from dbo_runtime.devices.serial import SerialDevice
from dbo_runtime.vllm_plugin.step import rehearsal
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.step.rehearsal import copy_for_profile, rehearse, try_split
from tests.support.vllm.engine import Engine

GROUP: Any = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[0])

pytestmark = pytest.mark.vllm


@pytest.fixture
def served(one_rank: Engine, monkeypatch: pytest.MonkeyPatch) -> SplitForward:
    forward: SplitForward = one_rank.runner.get_model().forward
    monkeypatch.setattr(forward.decider, "refusal", None)
    return forward


@pytest.mark.parametrize(
    ("changes", "with_attention"),
    [({}, [0, 2]), ({"keeps_layers": True}, [0])],
    ids=["usual", "layer hooks"],
)
def test_steps_are_split_without_attention_and_with_it_and_nothing_is_counted(
    changes: dict[str, bool],
    with_attention: list[int],
    one_rank: Engine,
    served: SplitForward,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in changes.items():
        monkeypatch.setattr(served.runtime, name, value)
    ran: list[tuple[dict[str, Any], int]] = []
    original = rehearsal.try_split

    def watch(runner: Any, of: SplitForward, own: SplitForward, step: Any, group: Any) -> None:
        original(runner, of, own, step, group)
        assert isinstance(own.runtime.device, SerialDevice), "else ranks that fail may leave each other in collectives"
        requests = [] if own.decider.choose_cuts is None else [2]
        ran.append((own.runtime.statistics.as_dict(), sum(requests)))

    monkeypatch.setattr(rehearsal, "try_split", watch)
    before = served.runtime.statistics.as_dict()
    rehearse(one_rank.runner, served, GROUP)
    assert served.decider.refusal is None
    assert [requests for _, requests in ran] == with_attention
    assert all((counts["split"], counts["declined"]) == (1, {}) for counts, _ in ran)
    assert served.runtime.statistics.as_dict() == before
    assert one_rank.runner.get_model().forward is served


def test_an_error_that_a_dummy_step_raises_unsplit_too_is_vllms(one_rank: Engine, served: SplitForward) -> None:
    def fail() -> None:
        raise RuntimeError("no dummy batch")

    try_split(one_rank.runner, served, copy_for_profile(served, served.runtime.device, GROUP), fail, GROUP)
    assert served.decider.refusal is None


def test_an_error_of_the_split_step_alone_refuses_all_further_ones(one_rank: Engine, served: SplitForward) -> None:
    own = copy_for_profile(served, served.runtime.device, GROUP)

    def step() -> None:
        if one_rank.runner.get_model().forward is own:
            raise AttributeError("no attribute 'input_norm'")

    try_split(one_rank.runner, served, own, step, GROUP)
    refusal = served.decider.refusal
    assert isinstance(refusal, Decline)
    assert "AttributeError: no attribute 'input_norm'" in refusal.detail
    assert served.decider.find_permanent_decline() is refusal


def test_a_runner_whose_batches_are_too_small_rehearses_nothing(one_rank: Engine, served: SplitForward) -> None:
    limits = SimpleNamespace(max_num_tokens=8, max_model_len=1024, scheduler_config=SimpleNamespace(max_num_seqs=4))
    rehearse(limits, served, GROUP)  # type: ignore[arg-type]
    assert served.decider.refusal is None
