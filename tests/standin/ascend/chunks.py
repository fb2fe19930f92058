"""In place of the Triton kernel that finds which queries are in a rank's chunk of the tokens, and the keys they see."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


def find_local_lengths(
    edges: torch.Tensor,
    lengths: torch.Tensor,
    local_edges: torch.Tensor,
    local_lengths: torch.Tensor,
    first: int,
    last: int,
    requests: int,
    starts: torch.Tensor,
    *rest: Any,
    COMPUTE_START_POS: bool = False,
) -> None:
    """`build_local_metadata_triton`: edges of queries in tokens *first* to *last*, and keys up to the last of them.

    Also, if asked for, where requests start, of all tokens. What comes after the requests stays as it is.
    """
    total = 0
    for request, (begin, end) in enumerate(pairwise(edges[: requests + 1].tolist())):
        count = max(min(end, last) - max(begin, first), 0)
        length, after = int(lengths[request]), end - min(end, last)
        total += count
        local_edges[request + 1] = total
        local_lengths[request] = max(length - after, 0) if count and length else 0
        if COMPUTE_START_POS:
            starts[request] = length - (end - begin)
