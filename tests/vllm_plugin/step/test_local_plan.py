"""What becomes of an error while a rank plans a step: a reason, and on which ranks it is raised instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.forward_context import DPMetadata, override_forward_context

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline, LocalDecline
from dbo_runtime.errors import ScheduleError, SplitError
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.local_plan import FAILED, MAX_TEXT, LocalPlanner, ServedStep
from dbo_runtime.vllm_plugin.step.step_decision import StepDecision
from tests.support.vllm.forwards import EXPECTED, ONE_RANK, Model, Splitter, make_context, make_forward, run

EVERY = (
    IndexError("no such block"),
    AssertionError("of vLLM's builder"),
    torch.OutOfMemoryError("none left"),
    RuntimeError("NPU out of memory"),
    MemoryError(),
    OSError("no such file"),
    SplitError("does not fit"),
    ScheduleError("an unsafe order"),
)
OF_ONE_RANK, OURS = EVERY[2:6], EVERY[6:]
PLAN: Any = StepDecision(None, [])  # type: ignore[arg-type]


def make_step(unsupported: Decline | None = None) -> ServedStep:
    return ServedStep(make_context(), 8, unsupported)


def attempt(planner: LocalPlanner, error: Exception) -> StepDecision | LocalDecline:
    def plan() -> StepDecision | Decline:
        raise error

    return planner.attempt(make_step(), plan)


def make_planner(ranks: int, votes: bool) -> LocalPlanner:
    config: Any = SimpleNamespace(config=RuntimeConfig())
    return LocalPlanner(config, Splitter(), ranks, votes)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", EVERY, ids=repr)
@pytest.mark.parametrize(("ranks", "votes"), [(2, True), (2, False), (1, False)])
def test_an_error_is_a_reason_or_raised_where_no_vote_could_tell_the_others(
    error: Exception, ranks: int, votes: bool
) -> None:
    planner = make_planner(ranks, votes)
    if not votes and (error in OURS or (ranks > 1 and error in OF_ONE_RANK)):
        with pytest.raises(type(error)):
            attempt(planner, error)
        return
    found = attempt(planner, error)
    assert isinstance(found, LocalDecline)
    assert found.decline.reason == FAILED
    assert found.decline.detail.startswith(type(error).__name__)


def test_a_plan_is_what_was_planned_and_a_decline_only_this_rank_s() -> None:
    planner, decline = make_planner(2, True), Decline("a reason")
    assert planner.attempt(make_step(), lambda: PLAN) is PLAN
    assert planner.attempt(make_step(), lambda: decline) == LocalDecline(decline)
    unread: Any = None  # calling it would fail
    assert planner.attempt(make_step(unsupported=decline), unread) == LocalDecline(decline)


def test_the_text_of_an_error_is_one_line_and_not_long() -> None:
    found = attempt(make_planner(2, True), ValueError("first\n  second " + "x" * 1000))
    assert isinstance(found, LocalDecline)
    assert found.decline.detail.startswith("ValueError: first second xxx")
    assert len(found.decline.detail) == MAX_TEXT


def test_a_traceback_is_logged_once_for_each_line_of_code(capfd: pytest.CaptureFixture[str]) -> None:
    planner = make_planner(2, True)
    for _ in range(3):
        attempt(planner, ValueError("here"))
    planner.attempt(make_step(), lambda: int("there"))  # type: ignore[arg-type, return-value]
    told = capfd.readouterr().err.split("ERROR")[1:]
    assert len(told) == 2
    assert "ValueError: here" in told[0]
    assert __file__ in told[0]
    assert "ValueError: invalid literal" in told[1]


class FailingSplitter(Splitter):
    """Fails where a step is read."""

    def read_batch(self, context: Any, tokens: int) -> Any:
        raise IndexError("no such block")


def test_a_step_that_cannot_be_planned_runs_unsplit() -> None:
    model = Model()
    forward = make_forward(model, FailingSplitter())
    assert torch.equal(run(forward), EXPECTED)
    assert len(model.unsplit) == 1
    assert forward.runtime.statistics.declined == {FAILED: 1}


class ToldAgreement(Agreement):
    """Keeps what this rank puts to the vote."""

    def agree(self, own: Any, statement: str) -> Any:
        self.own = own
        return super().agree(own, statement)


def test_a_data_parallel_rank_puts_an_error_to_the_vote() -> None:
    forward = make_forward(Model(), FailingSplitter())
    agreement = ToldAgreement(ONE_RANK)  # type: ignore[arg-type]
    splitter: Any = forward.decider.splitter
    forward.decider = StepDecider(forward.runtime, splitter, agreement, "network", rank=0)
    context = make_context()
    context.dp_metadata = DPMetadata(torch.tensor([8, 6], dtype=torch.int32))
    with override_forward_context(context):
        decision = forward.decider.decide(8)
    assert decision.plan == agreement.own.decline
    assert isinstance(decision.plan, Decline)
    assert decision.plan.reason == FAILED
