"""Random requests for operators of sparse attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from tests.support.ascend.operators.blocks import make_table
from tests.support.ascend.operators.checks import Tensors

REQUESTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 14)), min_size=1, max_size=4)
ABSENT_KEY = -1


class Requests(NamedTuple):
    """Requests whose queries are their last tokens, with a cache that has blocks; padding comes after all queries."""

    queries: list[int]
    keys: list[int]
    table: torch.Tensor
    block_size: int

    @property
    def lengths(self) -> Tensors:
        """Return cumulated numbers of queries, and numbers of keys, as the operators take them."""
        return [torch.tensor(each, dtype=torch.int32) for each in (list(accumulate(self.queries)), self.keys)]

    def find_seen(self) -> list[tuple[int, int]]:
        """Return the request of each query, and how many keys it sees."""
        counted = zip(self.queries, self.keys, strict=True)
        return [
            (request, keys - queries + number + 1)
            for request, (queries, keys) in enumerate(counted)
            for number in range(queries)
        ]


def make_requests(generator: torch.Generator, requests: Sequence[tuple[int, int]], block_size: int) -> Requests:
    """Make requests of so many queries and of so many tokens before them."""
    keys = [queries + before for queries, before in requests]
    return Requests([queries for queries, _ in requests], keys, make_table(generator, keys, block_size), block_size)
