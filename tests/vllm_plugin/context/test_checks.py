"""What makes a step run unsplit, and nothing else does."""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from dbo_runtime.batch import Batch, BatchSlice, slice_batch
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.context.checks import (
    CachedRequests,
    check_agreed_context,
    check_context,
    check_prefix_cache,
)
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from tests.support.profiles import scale

CPU = get_platform("cpu")


def make_context(**changes: Any) -> SimpleNamespace:
    """Return the part of a ForwardContext of 8 tokens that is looked at."""
    context = {
        "attn_metadata": {"layers.0": object()},
        "cudagraph_runtime_mode": SimpleNamespace(name="NONE"),
        "dp_metadata": None,
        "is_padding": None,
    }
    return SimpleNamespace(**{**context, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_metadata": [{"layers.0": object()}] * 2}, "attention metadata is split already"),
        ({"cudagraph_runtime_mode": SimpleNamespace(name="FULL")}, "full-graph step"),
        ({"is_padding": np.zeros(9, dtype=bool)}, "padded batch"),
    ],
)
def test_a_step_with_a_context_that_cannot_be_split_declines(changes: dict[str, Any], reason: str) -> None:
    assert check_context(make_context(**changes), 8, CPU) == Decline(reason)


@pytest.mark.parametrize(
    "changes",
    [{}, {"cudagraph_runtime_mode": SimpleNamespace(name="PIECEWISE")}, {"is_padding": np.zeros(8, dtype=bool)}],
    ids=["eager", "piecewise graphs", "a mask of this batch's tokens"],
)
def test_a_plain_context_can_be_split(changes: dict[str, Any]) -> None:
    assert check_context(make_context(**changes), 8, CPU) is None


def test_data_parallel_ranks_decline_graphs_together() -> None:
    """Whether a rank was padded to a graph's size is its own affair; that there is a graph, all of them know."""
    graph = make_context(cudagraph_runtime_mode=SimpleNamespace(name="PIECEWISE"), dp_metadata=object())
    assert check_agreed_context(graph, CPU) == Decline("padded to the size of a graph on all data parallel ranks")
    assert check_agreed_context(make_context(dp_metadata=object()), CPU) is None
    assert check_agreed_context(make_context(), CPU) == Decline("no data parallel metadata")


BLOCK = 4
DECLINE = Decline("a request reads prefix-cache blocks that a later micro-batch writes")


def find(
    query_lens: list[int],
    computed: list[int],
    blocks: list[list[int]],
    *cuts: int,
    block_size: int = BLOCK,
    drafts: int = 0,
    window: int | None = None,
) -> Decline | None:
    """Return the decline of requests with these query lengths, computed tokens and KV blocks."""
    width = max(map(len, blocks))
    table = np.array([[*row, *[0] * (width - len(row))] for row in blocks], dtype=np.int32)  # vLLM pads rows, too
    starts = np.array([0, *accumulate(query_lens)], dtype=np.int32)
    seq_lens = np.array(query_lens, dtype=np.int32) + np.array(computed, dtype=np.int32)
    slices = slice_batch(Batch(tuple(query_lens), sum(query_lens), decode_len=0), cuts)
    return check_prefix_cache(slices, CachedRequests(starts, seq_lens, table, block_size), drafts, window)


def test_reading_blocks_that_a_later_micro_batch_writes_declines() -> None:
    assert find([4, 8], [8, 0], [[5, 6, 7], [5, 6]], 4) == DECLINE


def test_reading_a_block_of_which_a_later_micro_batch_writes_the_end_declines() -> None:
    """The writer has come half through block 6 in earlier steps, and fills it in this one."""
    assert find([4, 2], [8, 6], [[5, 6, 7], [5, 6]], 4) == DECLINE


@pytest.mark.parametrize(("window", "expected"), [(4, None), (8, DECLINE), (None, DECLINE)])
def test_blocks_before_the_window_may_be_those_of_another_request(window: int | None, expected: Decline | None) -> None:
    """vLLM has given block 5 to the second request, and the first one's table still has it."""
    assert find([4, 4], [8, 0], [[5, 6, 7], [5]], 4, window=window) == expected


def test_reading_blocks_that_an_earlier_micro_batch_writes_is_fine() -> None:
    assert find([8, 4], [0, 8], [[5, 6], [5, 6, 7]], 8) is None


def test_reading_blocks_that_the_same_micro_batch_writes_is_fine() -> None:
    assert find([4, 8, 4], [8, 0, 0], [[5, 6, 7], [5, 6], [8]], 12) is None


def test_reading_blocks_that_were_written_in_earlier_steps_is_fine() -> None:
    assert find([4, 4], [8, 8], [[5, 6, 7], [5, 6, 8]], 4) is None


def test_a_request_cut_inside_may_read_its_own_blocks() -> None:
    assert find([12], [6], [[5, 6, 7, 8, 9]], 6) is None


def test_a_writer_cut_inside_declines_only_if_its_later_part_writes_what_is_read() -> None:
    """The writer's tokens 0 to 7 fill blocks 5 and 6; the reader before it reads block 5, or 5 and 6."""
    reads_one, reads_two = [5, 8, 9], [5, 6, 9]
    assert find([4, 12], [4, 0], [reads_one, [5, 6, 7]], 4 + 4) is None
    assert find([4, 12], [4, 0], [reads_one, [5, 6, 7]], 4 + 3) == DECLINE
    assert find([4, 12], [8, 0], [reads_two, [5, 6, 7]], 4 + 8) is None
    assert find([4, 12], [8, 0], [reads_two, [5, 6, 7]], 4 + 7) == DECLINE


def test_a_reader_cut_inside_declines_if_a_later_micro_batch_writes_what_it_reads() -> None:
    assert find([8, 4], [4, 0], [[5, 6, 7], [5]], 4) == DECLINE


def test_a_read_between_two_later_micro_batches_declines() -> None:
    query_lens, computed, blocks = [4, 4, 8], [0, 8, 0], [[4], [5, 6, 7], [5, 6]]
    assert find(query_lens, computed, blocks, 4) is None
    assert find(query_lens, computed, blocks, 4, 8) == DECLINE


def test_without_computed_tokens_nothing_is_read_and_nothing_declines() -> None:
    assert find([4, 4], [0, 0], [[5], [5]], 4) is None


def test_a_partly_filled_block_is_a_requests_own_and_not_looked_at() -> None:
    """Only full blocks are ever shared: block 6, of which the first request has computed half, is not from a hit."""
    assert find([2, 8], [6, 0], [[5, 6], [9, 6]], 2) is None


def test_a_decode_that_may_be_shorter_than_the_host_assumes_may_write_an_earlier_block() -> None:
    """Async scheduling counts all drafts of the step before: tokens 8 to 10, or, if all were rejected, 5 to 7."""
    query_lens, computed, blocks = [4, 3], [8, 8], [[5, 6, 7], [5, 6, 8]]
    assert find(query_lens, computed, blocks, 4) is None
    assert find(query_lens, computed, blocks, 4, drafts=3) == DECLINE


def test_the_lengths_of_prefills_are_exact_whatever_is_drafted() -> None:
    """Otherwise two prompts with a common prefix would never be split."""
    assert find([5, 5], [8, 8], [[5, 6, 7, 8], [5, 6, 9, 10]], 5, drafts=3) is None


def test_a_decode_with_drafts_cut_inside_may_read_its_own_blocks() -> None:
    assert find([4], [8], [[5, 6, 7]], 2, drafts=3) is None


def test_a_short_prefill_cut_inside_declines_on_a_hit_on_blocks_that_another_request_writes_later() -> None:
    """It counts as a decode with drafts, whose tail could have begun in the block of the hit."""
    query_lens, computed, blocks = [4, 2, 6], [0, 4, 0], [[4], [5, 6], [5, 7]]
    assert find(query_lens, computed, blocks, 5, drafts=2) == DECLINE


@settings(max_examples=scale(4000))  # one example in 200 has a decode that is cut inside and has a hit, too
@given(st.data())
def test_it_declines_wherever_a_token_would_read_too_early_for_any_number_of_accepted_drafts(
    data: st.DataObject,
) -> None:
    query_lens, computed, blocks, block_size, cuts = data.draw(
        steps_with_hits(requests=3, longest=3)
    )  # nearly all count as decodes
    drafts = data.draw(st.integers(1, 3))
    excess = [
        data.draw(st.integers(0, min(drafts, count))) if length <= 1 + drafts else 0
        for length, count in zip(query_lens, computed, strict=True)
    ]
    actual = [count - more for count, more in zip(computed, excess, strict=True)]
    if reads_too_early(query_lens, actual, blocks, block_size, cuts):
        assert find(query_lens, computed, blocks, *cuts, block_size=block_size, drafts=drafts) == DECLINE


@st.composite
def steps_with_hits(
    draw: st.DrawFn, requests: int = 5, longest: int = 9
) -> tuple[list[int], list[int], list[list[int]], int, list[int]]:
    """Return query lengths, computed tokens, blocks, block size and cuts, with prefix-cache hits as vLLM makes them."""
    block_size = draw(st.integers(1, 4))
    rows = range(draw(st.integers(2, requests)))
    query_lens = [draw(st.integers(1, longest)) for _ in rows]
    computed = [draw(st.sampled_from([0, block_size, 2 * block_size, 2 * block_size + 1])) for _ in rows]
    lengths = [query + count for query, count in zip(query_lens, computed, strict=True)]
    blocks = [[100 * row + column for column in range(-(-lengths[row] // block_size))] for row in rows]
    for reader in draw(st.permutations(rows)):
        writer = draw(st.sampled_from(rows[::-1]))
        hit = min(computed[reader], lengths[writer]) // block_size  # a hit is a multiple of a block
        blocks[reader][:hit] = blocks[writer][:hit]
    cuts = draw(st.sets(st.integers(1, sum(query_lens) - 1), min_size=1, max_size=3))
    return query_lens, computed, blocks, block_size, sorted(cuts)


def reads_too_early(
    query_lens: list[int], computed: list[int], blocks: list[list[int]], block_size: int, cuts: list[int]
) -> bool:
    """Run one layer token by token: does a token attend to a place of the cache that is written only later?"""
    tokens = [(request, computed[request] + i) for request, length in enumerate(query_lens) for i in range(length)]
    place = {
        (request, position): (blocks[request][position // block_size], position % block_size)
        for request in range(len(query_lens))
        for position in range(computed[request] + query_lens[request])
    }
    unwritten = {place[token] for token in tokens}
    for first, last in pairwise([0, *cuts, len(tokens)]):
        unwritten -= {place[token] for token in tokens[first:last]}
        for request, position in tokens[first:last]:
            if any(place[request, earlier] in unwritten for earlier in range(position + 1)):
                return True
    return False


@settings(max_examples=scale(300))
@given(steps_with_hits())
def test_it_declines_exactly_where_a_token_would_read_too_early(
    step: tuple[list[int], list[int], list[list[int]], int, list[int]],
) -> None:
    query_lens, computed, blocks, block_size, cuts = step
    expected = reads_too_early(query_lens, computed, blocks, block_size, cuts)
    event("declines" if expected else "runs split")
    found = find(query_lens, computed, blocks, *cuts, block_size=block_size)
    assert found == (DECLINE if expected else None)


def test_the_end_of_the_batch_is_no_cut() -> None:
    """One slice that holds everything has no later micro-batch."""
    unsplit = [BatchSlice(0, 2, 0, 8)]
    table = np.array([[5, 6], [5, 6]])
    assert check_prefix_cache(unsplit, CachedRequests(np.array([0, 4, 8]), np.array([8, 8]), table, BLOCK)) is None
