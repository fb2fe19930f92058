"""Split steps of vllm-ascend give what its own steps give.

The stand-in computes each row by itself, so equal means equal to the last bit: a batch cut between requests gives what
it gives unsplit, and a request cut inside gives what vllm-ascend gives when it prefills the request in two steps.
"""

from __future__ import annotations

import pytest

from examples.tiny_tasks import held_out
from tests.support.ascend.engines import TINY, start
from tests.support.ascend.equivalence import (
    BOUNDARIES,
    PROMPTS,
    assert_chunks_are_equal,
    assert_data_parallel_prefills_are_close,
    assert_mixed_steps_are_equal,
    assert_prefills_are_equal,
    assert_the_sanitizer_finds_nothing,
)
from tests.support.ascend.jobs import answer, answer_as_they_come, answer_by_all_to_all, make_prompts
from tests.support.ascend.reference import answer_in_float, count_equal, measure_error, tokenize
from tests.support.vllm.engine import find_difference
from tests.support.vllm.ranks import Ranks

WITHOUT_STAGES = ["two_npus", pytest.param("one_npu", marks=pytest.mark.slow)]
ENGINES = [
    *WITHOUT_STAGES,
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("two_stages", "stages_of_two")),
]


def test_data_parallel_ranks_cut_between_their_own_requests_are_equal_to_the_bit(expert_npus: Ranks) -> None:
    """Each where it has a boundary; the second rank has fewer tokens, padded (0.30) or not (0.23)."""
    prompts = [make_prompts(40, 30, 25, 5), make_prompts(30, 20)]
    unsplit_by_rank = expert_npus.run(answer, prompts)
    splits = expert_npus.run(answer, prompts, 1, [[70], [30]])
    for (unsplit, _), (split, counts) in zip(unsplit_by_rank, splits, strict=True):
        assert [count["split"] for count in counts] == [1] * len(counts), counts
        assert find_difference(unsplit, split) == 0.0


@pytest.mark.parametrize("engine", WITHOUT_STAGES)
def test_the_sanitizer_finds_nothing(engine: str, request: pytest.FixtureRequest) -> None:
    assert_the_sanitizer_finds_nothing(request.getfixturevalue(engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_prefill_cut_at_any_request_boundary_is_equal_to_the_bit(engine: str, request: pytest.FixtureRequest) -> None:
    cuts = [[boundary] for boundary in BOUNDARIES] + [BOUNDARIES[:2], BOUNDARIES[1:], BOUNDARIES]
    assert_prefills_are_equal(request.getfixturevalue(engine), cuts)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("length", "size"), [(20, 15), (20, 3), (130, 128), (130, 77), (400, 201), (400, 100), (400, 83)]
)
def test_a_request_cut_inside_is_equal_to_one_prefilled_in_chunks(
    engine: str, length: int, size: int, request: pytest.FixtureRequest
) -> None:
    assert_chunks_are_equal(request.getfixturevalue(engine), length, size)


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_of_decodes_chunks_and_prefills_are_equal_to_the_bit(engine: str, request: pytest.FixtureRequest) -> None:
    """Prompts arrive while others decode, and do not all fit into one step: each step is cut between requests."""
    assert_mixed_steps_are_equal(request.getfixturevalue(engine))


def test_where_settings_cut_answers_are_as_good_as_unsplit_ones(two_npus: Ranks) -> None:
    """Against transformers in float32: split no further from it than unsplit, but for rounding."""
    prompts = [tokenize(TINY, [task.prompt for task in held_out(3)])]
    wanted = answer_in_float(TINY, prompts[0], 8)
    ((unsplit, _),) = two_npus.run(answer, prompts, 8)
    ((split, counts),) = two_npus.run(answer, prompts, 8, [])
    assert all(count["split"] >= 8 for count in counts), counts
    errors = [measure_error(wanted, found) for found in (unsplit, split)]
    assert errors[0] < 0.5, errors  # what bf16 makes of it
    assert errors[1] <= errors[0] + 0.01, errors
    assert count_equal(unsplit, split) == len(unsplit)


@pytest.mark.slow
def test_in_float32_steps_cut_between_requests_are_close() -> None:
    for npus in start(1, dtype="float32"):
        ((unsplit, _),) = npus.run(answer, [PROMPTS], 3)
        for boundary in BOUNDARIES:
            ((split, _),) = npus.run(answer, [PROMPTS], 3, [boundary])
            assert find_difference(unsplit, split) <= 1e-4


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
