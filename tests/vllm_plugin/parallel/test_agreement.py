"""What ranks settle: their settings at the start, and plans before they run."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.errors import ConfigError, ScheduleError
from dbo_runtime.program import ProgramBuilder
from dbo_runtime.runtime import ExecutionPlan
from dbo_runtime.vllm_plugin.install import model_setup
from dbo_runtime.vllm_plugin.install.model_setup import _compare_settings
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement, _fingerprint, describe_disagreement


class Pair:
    """A group of two ranks, of which the other says what it is told to."""

    world_size = 2
    cpu_group = "cpu"


def let_other_say(monkeypatch: pytest.MonkeyPatch, words: Any) -> None:
    def gather(said: list[Any], own: Any, group: Any) -> None:
        assert group == Pair.cpu_group
        said[:] = [own, words]

    monkeypatch.setattr(dist, "all_gather_object", gather)


def test_ranks_that_say_the_same_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    let_other_say(monkeypatch, "split")
    assert describe_disagreement(Pair, "split") is None


def test_a_disagreement_names_ranks_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    let_other_say(monkeypatch, "unsplit")
    assert describe_disagreement(Pair, "split") == "rank 0: split; rank 1: unsplit"


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_gather_object", None)  # calling it would fail
    assert describe_disagreement(type("One", (), {"world_size": 1}), "split") is None


_P = ProgramBuilder()
PROGRAM = _P.build(_P.compute("op", lambda: None))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_setup, "get_host", lambda: "10.0.0.1")
    monkeypatch.setattr(model_setup, "describe_versions", lambda: "versions")


SAME = f"{RuntimeConfig()}, model: can be split, encoder: None, votes: False, versions"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("config", "found", "votes"),
    [
        (RuntimeConfig(mode="off"), (PROGRAM, None), False),
        (RuntimeConfig(), ("no adapter is registered for X", None), False),
        (RuntimeConfig(), (PROGRAM, "no adapter is registered for its encoder"), False),
        (RuntimeConfig(), (PROGRAM, None), True),
    ],
    ids=["settings", "packages", "packages of encoders", "prefix caching"],
)
def test_ranks_with_other_settings_or_packages_stop_at_the_start(
    monkeypatch: pytest.MonkeyPatch, config: RuntimeConfig, found: Any, votes: bool
) -> None:
    let_other_say(monkeypatch, (SAME, "10.0.0.1"))
    with pytest.raises(ConfigError, match=r"give all ranks on all hosts the same settings.*rank 0: .*rank 1: "):
        _compare_settings(Pair, config, found, votes)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("host", "hosts"), [("10.0.0.1", 1), ("10.0.0.2", 2)])
def test_ranks_with_the_same_settings_learn_on_how_many_hosts_they_are(
    monkeypatch: pytest.MonkeyPatch, host: str, hosts: int
) -> None:
    let_other_say(monkeypatch, (SAME, host))
    assert _compare_settings(Pair, RuntimeConfig(), (PROGRAM, None), False) == hosts


KEY = 2, ("alternate", 0)
HAZARD = Decline("a hazard", "in block 7")


class Ballot:
    """Two ranks on paper: what this one says is kept, what the other says is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
        self.other = other
        self.asked = 0
        monkeypatch.setattr(dist, "all_gather", self.gather_number)
        monkeypatch.setattr(dist, "all_gather_object", self.gather)

    def gather_number(self, said: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        self.asked += 1
        said[0].copy_(own)
        said[1].fill_(0 if isinstance(self.other, Decline) else _fingerprint(self.other or "split"))

    def gather(self, said: list[Any], own: Any, group: Any) -> None:
        said[:] = [own, self.other]


PLAN = cast(ExecutionPlan, "a plan")


def test_ranks_that_agree_on_a_plan_ask_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ballot, agreement = Ballot(monkeypatch, "split"), Agreement(Pair)
    for _ in range(3):
        assert agreement.agree(PLAN, KEY, "split") is PLAN
    assert ballot.asked == 1
    agreement.agree(PLAN, (3, ("alternate", 0)), "split")
    assert ballot.asked == 2


def test_ranks_that_vote_ask_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ballot, agreement = Ballot(monkeypatch, "split"), Agreement(Pair, votes=True)
    for _ in range(3):
        assert agreement.agree(PLAN, KEY, "split") is PLAN
    assert ballot.asked == 3


@pytest.mark.parametrize(("own", "other"), [(PLAN, HAZARD), (HAZARD, None), (HAZARD, HAZARD)])
def test_one_ranks_reason_is_that_of_all(monkeypatch: pytest.MonkeyPatch, own: Any, other: Any) -> None:
    ballot, agreement = Ballot(monkeypatch, other), Agreement(Pair)
    rank = 1 if own is PLAN else 0
    assert agreement.agree(own, KEY, "split") == Decline("a hazard", f"rank {rank}: in block 7")
    ballot.other = "split"
    assert agreement.agree(PLAN, KEY, "split") is PLAN, "a refusal must not settle the plan"
    assert ballot.asked == 2


def test_a_rank_never_refuses_alone_what_was_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not ask any more: they would wait for it for ever."""
    Ballot(monkeypatch, "split")
    agreement = Agreement(Pair)
    agreement.agree(PLAN, KEY, "split")
    with pytest.raises(ScheduleError, match=r"this one cannot: a hazard \(in block 7\)"):
        agreement.agree(HAZARD, KEY, "split")


def test_plans_that_differ_are_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    Ballot(monkeypatch, "schedule 2")
    with pytest.raises(ScheduleError, match=r"rank 0: schedule 1; rank 1: schedule 2"):
        Agreement(Pair).agree(PLAN, KEY, "schedule 1")


def test_one_rank_settles_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ballot = Ballot(monkeypatch, HAZARD)
    assert Agreement(type("One", (), {"world_size": 1})).agree(PLAN, KEY, "split") is PLAN
    assert ballot.asked == 0
