"""Split and unsplit agree, on the real vLLM and a trained model, wherever the batch is cut."""

from __future__ import annotations

import numpy as np
import pytest

from examples.tiny_tasks import held_out
from tests.support.vllm.engine import Answer, Engine, make_prompt
from tests.support.vllm.equivalence import (
    BOUNDARIES,
    LENGTHS,
    MIXED,
    PROMPTS,
    assert_close,
    get_unsplit,
    run_cut,
    run_unsplit,
)


@pytest.fixture(scope="session")
def unsplit_prefill(one_rank: Engine) -> list[Answer]:
    return run_unsplit(one_rank, PROMPTS)


@pytest.fixture(scope="session")
def unsplit_mixed(one_rank: Engine) -> list[Answer]:
    return run_unsplit(one_rank, PROMPTS, 6, MIXED)


@pytest.mark.parametrize("cut", BOUNDARIES)
def test_prefill_cut_at_a_request_boundary_is_bit_identical(
    one_rank: Engine, unsplit_prefill: list[Answer], cut: int
) -> None:
    assert run_cut(one_rank, (cut,), PROMPTS) == unsplit_prefill


@pytest.mark.parametrize("cuts", [BOUNDARIES[:2], BOUNDARIES[1:], BOUNDARIES], ids=["n=3", "n=4", "n=5"])
def test_prefill_cut_at_several_boundaries_is_bit_identical(
    one_rank: Engine, unsplit_prefill: list[Answer], cuts: list[int]
) -> None:
    assert run_cut(one_rank, tuple(cuts), PROMPTS) == unsplit_prefill


def test_the_kv_cache_holds_the_same_bits_after_a_cut_at_a_boundary(one_rank: Engine) -> None:
    caches = []
    for cuts in ((), (BOUNDARIES[2],)):
        for cache in one_rank.runner.kv_caches:
            cache.zero_()
        if cuts:
            run_cut(one_rank, cuts, PROMPTS)
        else:
            run_unsplit(one_rank, PROMPTS)
        caches.append([_read_blocks(cache.numpy()) for cache in one_rank.runner.kv_caches])
    assert len(caches[0][0]) == sum(-(-length // 16) for length in LENGTHS)  # all blocks of 16 tokens, and no other
    assert caches[0] == caches[1]


def _read_blocks(cache: np.ndarray) -> set[bytes]:
    """Return the blocks in use, whatever their numbers: the allocator hands them out in another order each time."""
    return {block.tobytes() for block in cache.reshape(cache.shape[0], -1) if block.any()}


@pytest.mark.parametrize("cut", [2, 17, 94, 98, 200, 263, 300, 446, 450, 526])
def test_prefill_cut_inside_a_request_is_close(one_rank: Engine, unsplit_prefill: list[Answer], cut: int) -> None:
    assert_close(unsplit_prefill, run_cut(one_rank, (cut,), PROMPTS))


@pytest.mark.parametrize("cuts", [(100, 200), (50, 300), (30, 250, 400), (132, 264, 396)])
def test_prefill_cut_inside_several_requests_is_close(
    one_rank: Engine, unsplit_prefill: list[Answer], cuts: tuple[int, ...]
) -> None:
    assert_close(unsplit_prefill, run_cut(one_rank, cuts, PROMPTS))


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_one_long_prompt_is_cut_by_the_settings_and_stays_close(one_rank: Engine, parts: int) -> None:
    prompt = [make_prompt(701, 3)]
    unsplit = run_unsplit(one_rank, prompt)
    one_rank.configure(DBO_MICRO_BATCHES=str(parts))
    before = one_rank.statistics()[0]
    try:
        split = one_rank.generate(prompt)
    finally:
        one_rank.configure()
    after = one_rank.statistics()[0]
    assert (after["split"] - before["split"], after["micro_batches"] - before["micro_batches"]) == (1, parts)
    assert_close(unsplit, split)


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (4,), (2, 4), (1, 2, 3)])
def test_decode_is_close_at_every_boundary(one_rank: Engine, cuts: tuple[int, ...]) -> None:
    unsplit = run_unsplit(one_rank, PROMPTS, 6)
    assert_close(unsplit, run_cut(one_rank, cuts, PROMPTS, 6))


@pytest.mark.parametrize("cuts", [(1,), (2,), (40,), (162,), (2, 162), (60, 120, 200)])
def test_steps_that_mix_decode_and_prefill_are_close(
    one_rank: Engine, unsplit_mixed: list[Answer], cuts: tuple[int, ...]
) -> None:
    assert_close(unsplit_mixed, run_cut(one_rank, cuts, PROMPTS, 6, MIXED))


@pytest.mark.parametrize("policy", ["sequential", "alternate", "staggered:1", "staggered:2"])
def test_every_policy_is_bit_identical_at_a_boundary(
    one_rank: Engine, unsplit_prefill: list[Answer], policy: str
) -> None:
    one_rank.configure(DBO_POLICY=policy)
    try:
        assert run_cut(one_rank, (BOUNDARIES[1], BOUNDARIES[2]), PROMPTS) == unsplit_prefill
    finally:
        one_rank.configure()


TWO_RANK_CUTS = [(BOUNDARIES[0],), (BOUNDARIES[2],), (17,), (263,), (100, 300), (96, 160, 320), (132, 264, 396)]


@pytest.mark.parametrize("cuts", TWO_RANK_CUTS)
def test_two_ranks_prefill_is_close_at_boundaries_and_inside(two_ranks: Engine, cuts: tuple[int, ...]) -> None:
    assert_close(get_unsplit(two_ranks, PROMPTS), run_cut(two_ranks, cuts, PROMPTS))


@pytest.mark.parametrize("cuts", [(1,), (2, 4), (40,), (2, 162)])
def test_two_ranks_decode_and_mixed_steps_are_close(two_ranks: Engine, cuts: tuple[int, ...]) -> None:
    unsplit = get_unsplit(two_ranks, PROMPTS, 6, MIXED)
    assert_close(unsplit, run_cut(two_ranks, cuts, PROMPTS, 6, MIXED))


@pytest.mark.vllm
@pytest.mark.parametrize("count", [25, pytest.param(125, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_held_out_accuracy_is_the_same_with_and_without(ranks: str, count: int, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(ranks)
    tasks = held_out(count)
    prompts = [task.prompt for task in tasks]
    engine.configure(DBO_MODE="off")
    unsplit = engine.answer(prompts)
    engine.configure(DBO_MODE="always")
    before = engine.count_split()
    split = engine.answer(prompts)
    assert engine.count_split() - before > count // 12
    right = sum(answer == task.answer for answer, task in zip(split, tasks, strict=True))
    assert right >= 0.98 * len(tasks)
    assert split == unsplit


def test_the_check_of_every_step_passes_on_two_ranks(two_ranks: Engine) -> None:
    two_ranks.configure(DBO_CHECK="1")
    before = two_ranks.count_split()
    try:
        two_ranks.generate(PROMPTS, 4, MIXED)
    finally:
        two_ranks.configure()
    assert two_ranks.count_split() > before
