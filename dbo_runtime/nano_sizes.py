"""The sizes of nano-batches: pure functions of integers that all ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from dbo_runtime.batch import BatchSlice, split_evenly
from dbo_runtime.decline import Decline

NanoSizes = tuple[tuple[int, ...], ...]
"""Number of tokens of every data parallel rank in each nano-batch [nano-batches][ranks]."""


def share_nano_batches(tokens: Sequence[int], count: int) -> NanoSizes | Decline:
    """Return the tokens of every data parallel rank in each nano-batch, as even as possible.

    It is a pure function of each rank's *tokens* [ranks], which every rank knows. So no rank has to ask another.
    """
    if min(tokens) < count:
        return Decline("fewer tokens than nano-batches", f"{min(tokens)} < {count}")
    shares = [split_evenly(own, count) for own in tokens]
    return tuple(zip(*shares, strict=True))


def slice_nano_batches(sizes: Sequence[int]) -> tuple[BatchSlice, ...]:
    """Return the slice of a step for each nano-batch. Each counts as a part of one request, because none is cut."""
    edges = [0, *accumulate(sizes)]
    return tuple(BatchSlice(0, 1, first, last) for first, last in pairwise(edges))
