"""What ranks agree on: their settings at the start, and plans before they run."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbo_runtime.decline import Decline, LocalDecline
from dbo_runtime.errors import ScheduleError
from dbo_runtime.vllm_plugin.parallel import agreement as agreement_module
from dbo_runtime.vllm_plugin.parallel.agreement import (
    MAX_AGREED_PLANS,
    MAX_GATHERED_BYTES,
    Agreement,
    _fingerprint,
    describe_disagreement,
    gather,
)


class Pair:
    """A group of two ranks, whose other rank gives a fixed answer."""

    world_size = 2
    cpu_group = "cpu"


def let_other_answer(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(agreement_module, "exchange_bytes", lambda _, own: [own, json.dumps(answer).encode()])


def test_ranks_with_equal_answers_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    let_other_answer(monkeypatch, "split")
    assert describe_disagreement(Pair, "split") is None


def test_a_disagreement_names_ranks_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    let_other_answer(monkeypatch, "unsplit")
    assert describe_disagreement(Pair, "split") == "rank 0: split; rank 1: unsplit"


def test_one_rank_does_not_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement_module, "exchange_bytes", None)  # calling it would fail
    assert describe_disagreement(type("One", (), {"world_size": 1}), "split") is None


KEY = 2, ("alternate", 0)
DECLINE = Decline("a reason", "in block 7")
LOCAL = LocalDecline(DECLINE)
PLAN = object()


class SimulatedPair:
    """Two simulated ranks: one is the caller, the other gives a fixed answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
        self.other = other
        self.compared = 0
        monkeypatch.setattr(dist, "all_gather", self.gather_number)
        monkeypatch.setattr(agreement_module, "exchange_bytes", self.exchange)

    def gather_number(self, gathered: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        self.compared += 1
        assert [one.dtype for one in gathered] == [own.dtype] * 2, "gloo would mix up the bytes"
        gathered[0].copy_(own)
        gathered[1].fill_(0 if isinstance(self.other, Decline) else _fingerprint(self.other or "split"))

    def exchange(self, group: Any, own: bytes) -> list[bytes]:
        said = [self.other.reason, self.other.detail] if isinstance(self.other, Decline) else self.other
        return [own, json.dumps(said).encode()]


def test_ranks_with_the_same_batch_compare_a_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, agreement = SimulatedPair(monkeypatch, "split"), Agreement(Pair)
    for _ in range(3):
        agreement.compare_once(KEY, "split")
    assert pair.compared == 1
    agreement.compare_once((3, ("alternate", 0)), "split")
    assert pair.compared == 2
    assert agreement.size_and_capacity == (2, MAX_AGREED_PLANS)


def test_ranks_vote_on_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, agreement = SimulatedPair(monkeypatch, "split"), Agreement(Pair)
    for _ in range(3):
        assert agreement.agree(PLAN, "split") is PLAN
    assert pair.compared == 3


@pytest.mark.parametrize(("own", "other"), [(PLAN, DECLINE), (LOCAL, None), (LOCAL, DECLINE)])
def test_the_reason_of_one_rank_is_that_of_all(monkeypatch: pytest.MonkeyPatch, own: Any, other: Any) -> None:
    pair, agreement = SimulatedPair(monkeypatch, "split"), Agreement(Pair)
    assert agreement.agree(PLAN, "split") is PLAN
    pair.other = other
    rank = 1 if own is PLAN else 0
    assert agreement.agree(own, "split") == Decline("a reason", f"rank {rank}: in block 7"), "agreed on before or not"
    pair.other = "split"
    assert agreement.agree(PLAN, "split") is PLAN
    assert pair.compared == 3


def test_plans_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    SimulatedPair(monkeypatch, "schedule 2")
    for ask in (Agreement(Pair).agree, Agreement(Pair).compare_once):
        with pytest.raises(ScheduleError, match=r"rank 0: schedule 1; rank 1: schedule 2"):
            ask(PLAN, "schedule 1")


@pytest.mark.parametrize(
    ("own", "other", "counted"),
    [
        (PLAN, DECLINE, ["unsplit"]),
        (LOCAL, None, ["unsplit"]),
        (LOCAL, DECLINE, []),
        (PLAN, "split", []),
        (PLAN, "schedule 2", ["error"]),
    ],
)
def test_disagreements_are_counted_by_what_becomes_of_the_step(
    monkeypatch: pytest.MonkeyPatch, own: Any, other: Any, counted: list[str]
) -> None:
    SimulatedPair(monkeypatch, other)
    told: list[str] = []
    with suppress(ScheduleError):
        Agreement(Pair, count=told.append).agree(own, "split")
    assert told == counted


def test_one_rank_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = SimulatedPair(monkeypatch, DECLINE)
    alone = Agreement(type("One", (), {"world_size": 1}))
    assert alone.agree(PLAN, "split") is PLAN
    assert alone.agree(LOCAL, "") is DECLINE
    alone.compare_once(KEY, "split")
    assert pair.compared == 0


@pytest.mark.parametrize("text", [b"", b"\x80\x04}.", b'{"a": ', b"[" * 100_000])
def test_what_a_rank_sends_is_read_as_json_and_nothing_else(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(agreement_module, "exchange_bytes", lambda _, own: [own, text])
    with pytest.raises(ScheduleError, match=r"^rank 1 sent no JSON"):
        gather(Pair, {"split": 1})


def test_data_of_any_length_cross_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank sends the same, but longer than this one."""

    def answer(gathered: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        assert group == Pair.cpu_group
        gathered[0].copy_(own)
        other = torch.tensor([len(text)]) if own.dtype == torch.int64 else torch.frombuffer(text, dtype=torch.uint8)
        gathered[1].copy_(other)

    data = {"trace": ["attention", 1, 0.1, None, True, "µ"] * 50}
    text = bytearray(json.dumps(data).encode())
    monkeypatch.setattr(dist, "all_gather", answer)
    monkeypatch.setattr(agreement_module, "MAX_GATHERED_BYTES", len(text))
    assert gather(Pair, {"trace": []}) == [{"trace": []}, data]


def test_a_rank_that_sends_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_gather", lambda gathered, *_, **__: [one.fill_(1 << 60) for one in gathered])
    with pytest.raises(ScheduleError, match=str(MAX_GATHERED_BYTES)):
        gather(Pair, "split")


def test_ranks_tell_each_other_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    SimulatedPair(monkeypatch, "there")
    assert Agreement(Pair).gather("here") == ["here", "there"]
