"""Attention to sequences that are packed one after another, and torch's own attention to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tests.support.ascend.operators.checks import Tensors, draw


class Packed(NamedTuple):
    """Sequences, each with queries [length, heads, size], and keys, values and parts for rotary embedding."""

    queries: Tensors
    keys: Tensors
    values: Tensors
    query_ropes: Tensors
    key_ropes: Tensors


def make_packed(
    generator: torch.Generator,
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> Packed:
    """Draw sequences: lengths of queries and keys; heads of both; sizes of a key, of a value, and of the rest."""
    (heads_of_queries, heads_of_keys), (key, value, rope) = heads, sizes
    return Packed(
        [draw(generator, queries, heads_of_queries, key, dtype=dtype) for queries, _ in lengths],
        [draw(generator, keys, heads_of_keys, key, dtype=dtype) for _, keys in lengths],
        [draw(generator, keys, heads_of_keys, value, dtype=dtype) for _, keys in lengths],
        [draw(generator, queries, heads_of_queries, rope, dtype=dtype) for queries, _ in lengths],
        [draw(generator, keys, heads_of_keys, rope, dtype=dtype) for _, keys in lengths],
    )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's own attention [length, heads, size] and logarithms of sums of exponentials [length, heads]."""
    query, key, value = (part.float().transpose(0, 1) for part in (query, key, value))
    heads, queries, keys = *query.shape[:2], key.shape[1]
    key, value = (part.repeat_interleave(heads // part.shape[0], 0) for part in (key, value))
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        for number in range(queries):
            seen[number, max(keys - queries + number + 1, 0) :] = False
    scores = (torch.einsum("hqd,hkd->hqk", query, key) * scale).masked_fill(~seen, -torch.inf)
    found = F.scaled_dot_product_attention(query, key, value, seen, scale=scale)
    found[:, ~seen.any(1)] = 0  # a query that sees no key
    return found.transpose(0, 1), scores.logsumexp(-1).T


def attend_each(batch: Packed, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in each sequence by itself, with the rotary parts, if any."""
    found = [
        attend(torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1), value, scale, causal)
        for query, key, value, query_rope, key_rope in zip(*batch, strict=True)
    ]
    return torch.cat([out for out, _ in found]), torch.cat([sums for _, sums in found])
