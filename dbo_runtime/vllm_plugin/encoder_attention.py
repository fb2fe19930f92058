"""Attention within sequences whose lengths the host knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F


class EncoderAttention(Protocol):
    """Attention of one shape: of so many query heads and key and value heads on this rank, of a size, with a scale."""

    def __init__(self, heads: int, kv_heads: int, size: int, scale: float) -> None: ...

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """Attend within sequences, one after the other.

        Args:
            query: [patches, heads, size].
            key: [patches, kv heads, size].
            value: [patches, kv heads, size].
            counts: patches of each sequence; together all.

        Returns:
            [patches, heads, size].
        """


class CpuAttention(EncoderAttention):
    """Attention on the CPU: neighbours of equal length in one call.

    Each sequence is computed as by itself, so this gives the very bits that a call for each would.
    """

    def __init__(self, heads: int, kv_heads: int, size: int, scale: float) -> None:
        self._grouped = heads != kv_heads
        self._scale = scale

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """Attend within sequences."""
        parts = []
        for first, last, count in _find_runs(counts):
            q, k, v = (_stack(tensor[first:last], count) for tensor in (query, key, value))
            part = F.scaled_dot_product_attention(q, k, v, scale=self._scale, enable_gqa=self._grouped)
            parts.append(part.transpose(1, 2).reshape(last - first, *query.shape[1:]))
        return torch.cat(parts)


def _find_runs(counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Return (first patch, end, length of each sequence) of each run of sequences of one length."""
    first = 0
    for count, run in groupby(counts):
        last = first + count * sum(1 for _ in run)
        if count:
            yield first, last, count
        first = last


def _stack(patches: torch.Tensor, count: int) -> torch.Tensor:
    """Turn patches [patches, heads, size] into sequences of *count* [sequences, heads, count, size]."""
    return patches.reshape(-1, count, *patches.shape[1:]).transpose(1, 2)
