from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dbo_runtime.batch import (
    Batch,
    BatchSlice,
    Thresholds,
    list_shares,
    place_cuts,
    share_by_work,
    share_evenly,
    slice_batch,
)
from dbo_runtime.decline import Decline
from dbo_runtime.errors import SplitError
from tests.support.strategies import batches

ALWAYS = Thresholds()
AUTO = Thresholds(tokens=256, prefill_tokens=64, share=0.1)


def prefills(*query_lens: int, **fields: int) -> Batch:
    return Batch(query_lens, sum(query_lens), **fields)


def sizes(batch: Batch, thresholds: Thresholds, parts: int = 2) -> list[int]:
    slices = thresholds.choose(batch, parts)
    assert not isinstance(slices, Decline), slices
    return [piece.size for piece in slices]


@pytest.mark.parametrize(("tokens", "splits"), [(255, False), (256, True), (257, True)])
def test_auto_splits_from_so_many_tokens(tokens: int, splits: bool) -> None:
    decision = AUTO.choose(prefills(tokens), 2)
    assert isinstance(decision, Decline) != splits
    if not splits:
        assert decision == Decline("fewer tokens than DBO_MIN_TOKENS", "255 < 256")


@pytest.mark.parametrize(("prefill_tokens", "splits"), [(63, False), (64, True)])
def test_auto_splits_from_so_many_prefill_tokens(prefill_tokens: int, splits: bool) -> None:
    decision = AUTO.choose(Batch((prefill_tokens, *[1] * 300), prefill_tokens), 2)
    assert isinstance(decision, Decline) != splits
    if not splits:
        assert decision == Decline("fewer prefill tokens than DBO_MIN_PREFILL_TOKENS", "63 < 64")


def test_auto_splits_pure_decode_if_no_prefill_is_asked_for() -> None:
    decode = Batch((1,) * 300, prefill_tokens=0)
    assert isinstance(AUTO.choose(decode, 2), Decline)
    assert sizes(decode, replace(AUTO, prefill_tokens=0)) == [150, 150]


def test_always_ignores_the_thresholds() -> None:
    assert sizes(Batch((1, 1), prefill_tokens=0), ALWAYS) == [1, 1]


def test_auto_declines_where_one_part_would_be_tiny_and_always_does_not() -> None:
    lopsided = prefills(1000, 20, cuttable=False)
    decision = AUTO.choose(lopsided, 2)
    assert decision == Decline("no balanced cut", "the smallest micro-batch would have 20 of 1020 tokens")
    assert sizes(lopsided, ALWAYS) == [1000, 20]


@pytest.mark.parametrize("batch", [prefills(1), prefills(3), prefills(500, cuttable=False)])
@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_a_batch_with_nowhere_to_cut_is_declined(batch: Batch, micro_batches: int) -> None:
    decision = ALWAYS.choose(batch, micro_batches)
    assert decision == Decline("nowhere to cut", f"1 requests, {batch.tokens} tokens")


def test_a_decline_reads_as_reason_and_figures() -> None:
    assert str(Decline("nowhere to cut", "1 requests")) == "nowhere to cut (1 requests)"
    assert str(Decline("DBO_MODE is off")) == "DBO_MODE is off"


@pytest.mark.parametrize(
    ("micro_batches", "expected"), [(2, [500, 500]), (3, [333, 334, 333]), (4, [250, 250, 250, 250])]
)
def test_one_long_prompt_is_cut_inside_evenly(micro_batches: int, expected: list[int]) -> None:
    assert sizes(prefills(1000), AUTO, micro_batches) == expected


def test_the_nearest_request_boundary_is_taken_within_a_tenth_of_a_part() -> None:
    assert place_cuts(prefills(460, 540), (500,)) == (460,)  # 40 tokens from the target
    assert place_cuts(prefills(440, 560), (500,)) == (500,)  # 60 tokens: cut inside instead
    assert place_cuts(prefills(470, 40, 490), (500,)) == (510,)  # 470 lies within the tolerance, too, but farther off


def test_cuts_are_looked_for_at_the_targets_and_not_only_where_parts_are_even() -> None:
    assert place_cuts(prefills(1000), (300, 900)) == (300, 900)
    assert place_cuts(prefills(280, 720), (300, 900)) == (280, 900)


def test_targets_share_out_the_tokens_evenly() -> None:
    assert share_evenly(prefills(1000), 2) == (500,)
    assert share_evenly(prefills(400, 600), 3) == (333, 667)


def test_requests_have_no_context_where_it_was_not_read() -> None:
    assert prefills(10, 20).contexts == (0, 0)
    assert Batch((10, 20), 30, context_lens=(5, 0)).contexts == (5, 0)


def test_without_cuts_inside_the_nearest_boundary_is_taken_however_far() -> None:
    assert place_cuts(prefills(900, 50, 50, cuttable=False), (500,)) == (900,)


def test_fewer_parts_than_asked_for_where_boundaries_run_out() -> None:
    assert place_cuts(prefills(500, 500, cuttable=False), (250, 500, 750)) == (500,)


@pytest.mark.parametrize(("decode_len", "cut"), [(1, 20), (4, 22)])
def test_a_cut_inside_keeps_away_from_the_requests_ends(decode_len: int, cut: int) -> None:
    assert place_cuts(prefills(17, 23, decode_len=decode_len), (20,)) == (cut,)


def test_two_cuts_inside_one_request_keep_away_from_each_other() -> None:
    assert sizes(prefills(6), ALWAYS, 3) == [2, 2, 2]
    assert sizes(prefills(5), ALWAYS, 3) == [2, 3]


def test_a_cut_at_a_boundary_shares_out_the_requests() -> None:
    assert slice_batch(prefills(10, 20, 30), [30]) == (BatchSlice(0, 2, 0, 30), BatchSlice(2, 3, 30, 60))


def test_a_request_that_is_cut_inside_is_in_both_slices() -> None:
    first, second = slice_batch(prefills(10, 20, 30), [15])
    assert (first.requests, first.tokens, first.size) == (slice(0, 2), slice(0, 15), 15)
    assert (second.requests, second.tokens, second.size) == (slice(1, 3), slice(15, 60), 45)


def test_a_request_can_be_cut_twice() -> None:
    slices = slice_batch(prefills(4, 90), [30, 60])
    assert [piece.requests for piece in slices] == [slice(0, 2), slice(1, 2), slice(1, 2)]


@pytest.mark.parametrize("cuts", [[0], [60], [-5], [61], [30, 30], [40, 20]])
def test_cuts_that_do_not_increase_inside_the_batch_are_refused(cuts: list[int]) -> None:
    with pytest.raises(SplitError, match="must increase and lie inside the batch of 60 tokens"):
        slice_batch(prefills(10, 20, 30), cuts)


def test_a_cut_inside_is_refused_where_the_backend_cannot_take_it() -> None:
    batch = prefills(10, 20, 30, cuttable=False)
    assert len(slice_batch(batch, [10, 30])) == 3
    with pytest.raises(SplitError, match="cut 15 is inside request 1, which this attention backend does not support"):
        slice_batch(batch, [15])


@pytest.mark.parametrize(
    ("cuts", "cut", "piece"), [([11], 11, 1), ([12], 12, 2), ([28], 28, 2), ([29], 29, 1), ([15, 17], 15, 2)]
)
def test_a_cut_that_leaves_a_piece_as_short_as_a_decode_is_refused(cuts: list[int], cut: int, piece: int) -> None:
    with pytest.raises(SplitError, match=rf"cut {cut} leaves request 1 a piece of {piece} tokens; .* more than 2"):
        slice_batch(prefills(10, 20, 30, decode_len=2), cuts)


@given(batches(), st.integers(2, 4), st.sampled_from([0.0, 0.1]))
def test_slices_cover_the_batch_and_its_requests(batch: Batch, micro_batches: int, share: float) -> None:
    slices = Thresholds(share=share).choose(batch, micro_batches)
    assume(not isinstance(slices, Decline))
    assert 2 <= len(slices) <= micro_batches
    assert [n for piece in slices for n in range(batch.tokens)[piece.tokens]] == list(range(batch.tokens))
    owner = [request for request, length in enumerate(batch.query_lens) for _ in range(length)]
    for piece in slices:
        assert list(range(len(batch.query_lens))[piece.requests]) == sorted(set(owner[piece.tokens]))


@given(batches(), st.integers(2, 4))
def test_no_piece_of_a_cut_request_is_a_decode(batch: Batch, micro_batches: int) -> None:
    slices = ALWAYS.choose(batch, micro_batches)
    assume(not isinstance(slices, Decline))
    owner = [request for request, length in enumerate(batch.query_lens) for _ in range(length)]
    for piece in slices:
        for request in range(len(batch.query_lens))[piece.requests]:
            tokens = owner[piece.tokens].count(request)
            assert tokens == batch.query_lens[request] or (batch.cuttable and tokens > batch.decode_len)


@given(batches(), st.integers(2, 4))
def test_always_splits_whatever_has_a_boundary_or_room_for_a_cut(batch: Batch, micro_batches: int) -> None:
    has_room = batch.cuttable and max(batch.query_lens) > 2 * batch.decode_len + 1
    decision = ALWAYS.choose(batch, micro_batches)
    assert isinstance(decision, Decline) == (len(batch.query_lens) == 1 and not has_room)


@given(st.data(), batches(), st.integers(1, 3))
def test_cuts_that_were_found_are_accepted_when_given(data: st.DataObject, batch: Batch, count: int) -> None:
    targets = data.draw(st.lists(st.integers(0, batch.tokens), min_size=count, max_size=count).map(sorted))
    cuts = place_cuts(batch, targets)
    slices = slice_batch(batch, cuts)
    assert tuple(left.last_token for left, _ in pairwise(slices)) == cuts


TOKENS_OF_RANKS = st.lists(st.one_of(st.integers(1, 5), st.integers(1, 5000)), min_size=2, max_size=6)


@given(tokens=TOKENS_OF_RANKS, parts=st.integers(2, 6), fewest=st.sampled_from([1, 64]))
def test_data_parallel_ranks_all_split_or_none_does(tokens: list[int], parts: int, fewest: int) -> None:
    """The largest rank decides, and every rank has a token at least in each micro-batch."""
    sizes = Thresholds(fewest).choose_data_parallel(tokens, parts)
    most = max(tokens)
    assert isinstance(sizes, Decline) == (most < max(2, fewest))
    if isinstance(sizes, Decline):
        return
    assert len(sizes) == min(parts, most)
    for rank, count in enumerate(tokens):
        own = [part[rank] for part in sizes]
        if count < max(len(sizes), 0.1 * most / len(sizes)):
            assert own == [count, *[1] * (len(sizes) - 1)], "requests stay whole, and the rest is padding"
            continue
        assert sum(own) == count
        assert max(own) - min(own) <= 1
        assert min(own) >= 1


@pytest.mark.parametrize(
    ("tokens", "thresholds", "decline"),
    [
        ([1, 1], ALWAYS, Decline("nowhere to cut", "ranks have 1 to 1 tokens for 2 micro-batches")),
        ([0, 9], ALWAYS, Decline("nowhere to cut", "ranks have 0 to 9 tokens for 2 micro-batches")),
        ([1, 255], AUTO, Decline("fewer tokens than DBO_MIN_TOKENS", "255 < 256 on rank 1, which has the most")),
    ],
)
def test_data_parallel_ranks_decline_with_one_reason(
    tokens: list[int], thresholds: Thresholds, decline: Decline
) -> None:
    assert thresholds.choose_data_parallel(tokens, 2) == decline


def test_ways_to_share_are_listed_once_each() -> None:
    assert list_shares([2, 1], (2, 3)) == [((1, 1), (1, 1))]
    assert list_shares([9, 1], (1, 2, 3)) == [((9, 1),), ((4, 1), (5, 1)), ((3, 1), (3, 1), (3, 1))]
    assert list_shares([1, 1], (1, 2)) == [((1, 1),)]
    assert list_shares([600, 29], (2,)) == [((300, 29), (300, 1))]
    assert list_shares([600, 30], (2,)) == [((300, 15), (300, 15))]


@given(batches(), st.integers(0, 5), st.booleans())
def test_padding_is_cut_anywhere_and_leaves_requests_as_they_are(batch: Batch, more: int, cuttable: bool) -> None:
    """Also where the backend cuts no request, and where it cuts no decode with drafts."""
    batch = replace(batch, cuttable=cuttable, cuts_decodes=False, decode_len=3)
    padded = batch.pad(batch.tokens + more)
    requests = len(batch.query_lens)
    assert padded.tokens == batch.tokens + more
    assert padded.query_lens[:requests] == batch.query_lens
    assert padded.contexts == (*batch.contexts, *[0] * more)
    slices = slice_batch(padded, range(batch.tokens, padded.tokens), agreed=True)
    assert slices[0] == BatchSlice(0, requests, 0, batch.tokens)
    assert [(piece.size, piece.requests) for piece in slices[1:]] == [
        (1, slice(requests + i, requests + i + 1)) for i in range(more)
    ]


def test_an_agreed_cut_is_taken_wherever_it_falls() -> None:
    batch = Batch((10, 10), 20)
    with pytest.raises(SplitError, match="a piece of 1 tokens"):
        slice_batch(batch, [9])
    assert [piece.size for piece in slice_batch(batch, [9], agreed=True)] == [9, 11]
    with pytest.raises(SplitError, match="does not support"):
        slice_batch(Batch((10, 10), 20, cuttable=False), [9], agreed=True)


def test_a_decode_with_drafts_is_cut_inside_only_where_ranks_agreed_and_the_backend_takes_pieces() -> None:
    batch = Batch((4, 4, 4), 0, decode_len=4, cuts_decodes=False)
    assert place_cuts(batch, share_evenly(batch, 2)) == (4,)
    assert [piece.size for piece in slice_batch(batch, [4], agreed=True)] == [4, 8]
    for agreed, message in ((False, "which this attention backend"), (True, "a decode of 4 tokens with drafts")):
        with pytest.raises(SplitError, match=message):
            slice_batch(batch, [6], agreed)
    assert [piece.size for piece in slice_batch(replace(batch, cuts_decodes=True), [6], agreed=True)] == [6, 6]
    prefill = replace(batch, query_lens=(12,))
    assert [piece.size for piece in slice_batch(prefill, [6])] == [6, 6], "longer than any decode"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 4))
@example([1] * 6, 2)
def test_the_micro_batch_with_the_most_work_has_as_little_as_can_be(work: list[int], parts: int) -> None:
    def find_most(cuts: Sequence[int]) -> int:
        return max(sum(work[left:right]) for left, right in pairwise([0, *cuts, len(work)]))

    cuts = share_by_work(work, parts)
    assert len(cuts) < parts
    assert list(cuts) == sorted(set(cuts))
    assert all(0 < cut < len(work) for cut in cuts)
    every_way = (ways for count in range(parts) for ways in combinations(range(1, len(work)), count))
    assert find_most(cuts) == min(map(find_most, every_way))


def test_work_that_is_nowhere_is_not_shared_out() -> None:
    assert share_by_work([], 3) == ()
    assert share_by_work([0.0, 0.0], 2) == ()
    assert share_by_work([5.0], 2) == ()


@given(st.lists(st.integers(0, 3) | st.just(1), max_size=12).map(tuple))
def test_what_is_computed_once_is_what_its_requests_say(query_lens: tuple[int, ...]) -> None:
    """Also for padding, which has no tokens, and wherever decodes are."""
    batch = Batch(query_lens, 0)
    assert list(batch.starts) == [sum(query_lens[:number]) for number in range(len(query_lens) + 1)]
    assert batch.tokens == sum(query_lens)
    assert list(batch.long_requests) == [number for number, length in enumerate(query_lens) if length != 1]
