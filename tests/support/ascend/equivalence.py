"""Comparisons inside vllm-ascend: steps that are cut answer as steps that are not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tests.support.ascend.jobs import (
    answer,
    answer_in_chunks,
    answer_in_nano_batches,
    answer_watched,
    cut_at_boundaries,
    generate,
    make_prompts,
)
from tests.support.vllm.engine import Answer, find_difference
from tests.support.vllm.ranks import Ranks

LENGTHS = (5, 40, 130, 3, 64)
PROMPTS = make_prompts(*LENGTHS)
BOUNDARIES = list(accumulate(LENGTHS))[:-1]


def assert_prefills_are_equal(npus: Ranks, cuts: Sequence[Sequence[int]]) -> None:
    """Compare prefills of PROMPTS that are cut at these boundaries of requests with the unsplit one."""
    ((unsplit, _),) = npus.run(answer, [PROMPTS])
    for edges in cuts:
        ((split, counts),) = npus.run(answer, [PROMPTS], 1, edges)
        assert [count["split"] for count in counts] == [1] * len(counts), counts
        assert find_difference(unsplit, split) == 0.0, f"cut at {edges}"


def assert_chunks_are_equal(npus: Ranks, length: int, size: int) -> None:
    """Compare a prompt that is cut after each *size* tokens with one that is prefilled in chunks of that size."""
    prompts = make_prompts(length)
    (chunked,) = npus.run(answer_in_chunks, [prompts], size)
    ((split, counts),) = npus.run(answer, [prompts], 1, list(range(size, length - 1, size)))
    assert [count["split"] for count in counts] == [1] * len(counts), counts
    assert find_difference(chunked, split) == 0.0


def assert_data_parallel_prefills_are_close(npus: Ranks, tolerance: float, cuts: Sequence[int] = (40, 70, 95)) -> None:
    """Compare prefills of two ranks, each cut there, with unsplit ones; the second rank has fewer tokens.

    vllm-ascend pads its batch: that is cut between requests, in its padding, and into padding alone.
    """
    prompts = [make_prompts(40, 30, 25, 5), make_prompts(40)]
    unsplit_by_rank = npus.run(answer, prompts, 1)
    for cut in cuts:
        splits = npus.run(answer, prompts, 1, [[cut], [cut]])
        for (unsplit, _), (split, counts) in zip(unsplit_by_rank, splits, strict=True):
            assert [count["split"] for count in counts] == [1] * len(counts), counts
            assert find_difference(unsplit, split) <= tolerance


def assert_ranks_cut_at_their_own_boundaries_are_equal(npus: Ranks) -> None:
    """Compare prefills of two ranks, each cut where it has a boundary; the second has fewer tokens, padded or not."""
    prompts = [make_prompts(40, 30, 25, 5), make_prompts(30, 20)]
    unsplit_by_rank = npus.run(answer, prompts)
    splits = npus.run(answer, prompts, 1, [[70], [30]])
    for (unsplit, _), (split, counts) in zip(unsplit_by_rank, splits, strict=True):
        assert [count["split"] for count in counts] == [1] * len(counts), counts
        assert find_difference(unsplit, split) == 0.0


def assert_nano_batches_are_equal(npus: Ranks) -> None:
    """Compare a prefill and decodes in nano-batches with unsplit ones; projections of attention are cut, too."""
    ((unsplit, _),) = npus.run(answer, [PROMPTS], 4)
    ((nano, steps),) = npus.run(answer_in_nano_batches, [PROMPTS], 4, 3)
    assert min(steps) == 4, steps
    assert find_difference(unsplit, nano) == 0.0


def assert_mixed_steps_are_equal(npus: Ranks) -> None:
    """Compare steps of decodes, chunks and prefills, each cut at a boundary of requests, with unsplit ones."""
    prompts, arrive = [make_prompts(30, 7, 500, 90, 11, 200)], (0, 0, 1, 2, 3, 5)
    ((unsplit, _),) = npus.run(answer, prompts, 8, None, arrive)
    npus.run(cut_at_boundaries)
    ((split, counts),) = npus.run(generate, prompts, 8, arrive)
    assert all(count["split"] >= 10 for count in counts), counts
    assert find_difference(unsplit, split) == 0.0


def assert_the_sanitizer_finds_nothing(npus: Ranks) -> None:
    """Compare steps that are watched, a request cut inside among them; half of them in another issue order.

    A watched step returns what the split step does. It runs unsplit last, so later steps read what that has cached.
    """
    prompts = [make_prompts(60, 40)]
    ((unsplit, _),) = npus.run(answer, prompts, 6)
    ((split, _),) = npus.run(answer, prompts, 6, [70])
    ((watched, counts),) = npus.run(answer_watched, prompts, 6, [70])
    assert all(count["split"] >= 1 for count in counts), counts
    pairs = zip(split, unsplit, strict=True)
    expected = [
        Answer([*first.tokens[:1], *later.tokens[1:]], [*first.log_probs[:1], *later.log_probs[1:]])
        for first, later in pairs
    ]
    assert find_difference(expected, watched) == 0.0


def assert_mixed_nano_batches_are_equal(npus: Ranks) -> None:
    """Compare steps of decodes, chunks and prefills in nano-batches with unsplit ones."""
    prompts, arrive = [make_prompts(30, 7, 500, 90, 11, 200)], (0, 0, 1, 2, 3, 5)
    ((unsplit, _),) = npus.run(answer, prompts, 8, None, arrive)
    ((nano, steps),) = npus.run(answer_in_nano_batches, prompts, 8, 2, "0", arrive)
    assert min(steps) >= 10, steps
    assert find_difference(unsplit, nano) == 0.0


def assert_data_parallel_nano_batches_are_equal(npus: Ranks) -> None:
    """Compare prefills and decodes of two ranks in nano-batches with unsplit ones; the second has fewer tokens."""
    prompts = [make_prompts(40, 30, 200, 5), make_prompts(30, 20, 90)]
    unsplit_by_rank = npus.run(answer, prompts, 4)
    nano_by_rank = npus.run(answer_in_nano_batches, prompts, 4, 2)
    for (unsplit, _), (nano, steps) in zip(unsplit_by_rank, nano_by_rank, strict=True):
        assert min(steps) > 0, steps
        assert find_difference(unsplit, nano) == 0.0
