"""Ranks that work together go on together, or end together."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM, whose groups it uses")

from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.errors import RankError
from dbo_runtime.vllm_plugin.parallel.joint_work import JointWork
from tests.support.vllm.thread_ranks import ThreadGroup, ThreadRanks

MEETINGS = 3


def work(group: Any, fail: tuple[int, int, Exception] | None = None) -> list[Any]:
    """Meet three times; the rank *fail[0]* fails before meeting *fail[1]*."""
    joint, found = JointWork(group), []
    with joint.guard():
        for number in range(MEETINGS):
            if fail is not None and fail[:2] == (group.rank_in_group, number):
                raise fail[2]
            found.append(joint.gather(group.rank_in_group * 10 + number))
    return found


def test_ranks_gather_what_each_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ThreadRanks(monkeypatch).run(work) == [[[0, 10], [1, 11], [2, 12]]] * 2


@pytest.mark.parametrize("number", range(MEETINGS))
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_end_at_the_next_meeting_after_one_failed(
    rank: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ThreadRanks(monkeypatch)
    errors = ranks.run(lambda group: work(group, (rank, number, ValueError("no such kernel"))))
    assert [type(error) for error in errors] == [RankError] * 2
    assert {str(error) for error in errors} == {f"rank {rank}: ValueError('no such kernel')"}
    assert isinstance(errors[rank].__cause__, ValueError)
    assert ranks.meetings == [number + 1] * 2


def test_an_error_of_ours_stays_what_it_is_where_it_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    decline = DeclineError("cannot be split", "5 tokens")
    errors = ThreadRanks(monkeypatch).run(lambda group: work(group, (1, 1, decline)))
    assert errors[1] is decline
    assert (type(errors[0]), str(errors[0])) == (RankError, "rank 1: cannot be split (5 tokens)")
    assert decline.decline == Decline("cannot be split", "5 tokens")


def test_a_single_rank_is_not_named() -> None:
    with pytest.raises(RankError, match=r"^ValueError\('no'\)$"):
        work(ThreadGroup(0, 1), (0, 1, ValueError("no")))
    assert work(ThreadGroup(0, 1)) == [[0], [1], [2]]
