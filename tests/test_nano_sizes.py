"""Nano-batches are even, and every rank knows those of all ranks."""

from __future__ import annotations

import pytest

from dbo_runtime.batch import split_evenly
from dbo_runtime.decline import Decline
from dbo_runtime.nano_sizes import share_nano_batches, slice_nano_batches


@pytest.mark.parametrize(("tokens", "count", "sizes"), [(7, 3, (2, 2, 3)), (4, 4, (1, 1, 1, 1)), (3, 4, (0, 1, 1, 1))])
def test_sizes_are_even(tokens: int, count: int, sizes: tuple[int, ...]) -> None:
    assert split_evenly(tokens, count) == [*sizes]


def test_ranks_have_nano_batches_of_their_own_sizes() -> None:
    assert share_nano_batches((7, 4), 2) == ((3, 2), (4, 2))


def test_a_rank_with_fewer_tokens_than_nano_batches_is_a_reason_for_all() -> None:
    assert share_nano_batches((7, 1), 2) == Decline("fewer tokens than nano-batches", "1 < 2")


def test_slices_follow_each_other() -> None:
    assert [(piece.first_token, piece.last_token) for piece in slice_nano_batches((2, 3))] == [(0, 2), (2, 5)]
