"""Split steps of data parallel engines inside vllm-ascend give what its own steps give."""

from __future__ import annotations

import pytest

from examples.tiny_tasks import held_out
from tests.support.ascend.engines import TINY, start
from tests.support.ascend.equivalence import (
    assert_data_parallel_prefills_are_close,
    assert_ranks_cut_at_their_own_boundaries_are_equal,
)
from tests.support.ascend.jobs import answer_as_they_come, answer_by_all_to_all, make_prompts
from tests.support.ascend.reference import count_equal, tokenize
from tests.support.vllm.engine import find_difference
from tests.support.vllm.ranks import Ranks


def test_data_parallel_ranks_cut_between_their_own_requests_are_equal_to_the_bit(expert_npus: Ranks) -> None:
    """vllm-ascend 0.30 pads the second rank, 0.23 does not."""
    assert_ranks_cut_at_their_own_boundaries_are_equal(expert_npus)


@pytest.mark.parametrize("engine", ["expert_npus", pytest.param("expert_stages", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cut", [40, 70, 95])
def test_data_parallel_ranks_of_different_sizes_are_equal_to_the_bit(
    engine: str, cut: int, request: pytest.FixtureRequest
) -> None:
    assert_data_parallel_prefills_are_close(request.getfixturevalue(engine), 0.0, [cut])


@pytest.mark.parametrize("dispatch", [pytest.param("all_gather", marks=pytest.mark.slow), "all_to_all"])
def test_data_parallel_ranks_decode_prefill_and_idle_as_unsplit(dispatch: str) -> None:
    """One rank has twice as many tokens to generate: the other runs dummy batches with it in the end."""
    tasks = tokenize(TINY, [task.prompt for task in held_out(4)])
    prompts, arrive = [tasks[:10], tasks[10:14]], [(0, 0, 1, 2, 3, 3, 3, 4, 5, 5), (0, 2, 2, 5)]
    for npus in start(2, environment={"DBO_DISPATCH": dispatch}):
        unsplit_by_rank = npus.run(answer_as_they_come, prompts, 8, None, arrive)
        splits = npus.run(answer_as_they_come, prompts, 8, [], arrive)
        for (unsplit, _), (split, counts) in zip(unsplit_by_rank, splits, strict=True):
            assert counts[0]["split"] >= 6, counts
            assert not set(counts[0]["declined"]) - {"nowhere to cut"}, counts
            assert count_equal(unsplit, split) == len(unsplit)


def test_steps_that_vllm_ascend_would_send_by_all_to_all_are_split_too(expert_npus: Ranks) -> None:
    """As on A3 above the size for MC2: ranks are not padded, and unsplit steps send tokens in vllm-ascend's own way."""
    prompts = [make_prompts(40, 30, 25, 5), make_prompts(40, 20)]
    unsplit_by_rank = expert_npus.run(answer_by_all_to_all, prompts, None)
    splits = expert_npus.run(answer_by_all_to_all, prompts, [[40], [40]])
    for (unsplit, _), (split, counts) in zip(unsplit_by_rank, splits, strict=True):
        assert counts[0]["split"] == 1, counts
        assert find_difference(unsplit, split) <= 0.1  # results of two ranks' experts are added in another order
