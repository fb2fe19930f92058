"""Attention of encoders, within sequences whose lengths are known on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any, Protocol

import torch
import torch.nn.functional as F

PADDED_HEAD_SIZE = 128  # size that NPU kernels need for all heads above UNPADDED_HEAD_SIZE
UNPADDED_HEAD_SIZE = 64

Kernel = Callable[..., Any]


class EncoderAttention(Protocol):
    """Attention of one shape: this rank's query heads and KV heads, the head size, and the scale of scores."""

    def __init__(self, heads: int, kv_heads: int, size: int, scale: float) -> None: ...

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """Attend within consecutive sequences.

        Args:
            query: queries [patches, heads, size].
            key: keys [patches, kv heads, size].
            value: values [patches, kv heads, size].
            counts: number of patches of each sequence; they add up to all patches.

        Returns:
            The attention output [patches, heads, size].
        """


class CpuAttention(EncoderAttention):
    """Attention on the CPU, with one call per run of sequences of equal length.

    Each sequence is computed separately, so results are bitwise equal to one call per sequence.
    """

    def __init__(self, heads: int, kv_heads: int, size: int, scale: float) -> None:
        self._grouped = heads != kv_heads
        self._scale = scale

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """Attend within sequences."""
        parts = []
        for first, last, count in _list_runs(counts):
            q, k, v = (_stack(tensor[first:last], count) for tensor in (query, key, value))
            part = F.scaled_dot_product_attention(q, k, v, scale=self._scale, enable_gqa=self._grouped)
            parts.append(part.transpose(1, 2).reshape(last - first, *query.shape[1:]))
        return torch.cat(parts)


class NpuAttention(EncoderAttention):
    """Attention on an NPU, whose kernels take lengths as integers.

    With NNAL this is `_npu_flash_attention_unpad`, as in vllm-ascend, otherwise CANN's fused attention. Heads between
    the two head sizes are padded with zeros, which changes no score.
    """

    def __init__(self, heads: int, kv_heads: int, size: int, scale: float) -> None:
        self._size = size
        self._padding = PADDED_HEAD_SIZE - size if UNPADDED_HEAD_SIZE < size < PADDED_HEAD_SIZE else 0
        unpadded = get_unpadded_kernel()
        if unpadded is not None:
            kernel = partial(unpadded, num_heads=heads, num_kv_heads=kv_heads, scale_value=scale)
            self._attend = partial(_attend_unpadded, kernel)
        else:
            shape = {"num_heads": heads, "num_key_value_heads": kv_heads, "scale": scale, "input_layout": "TND"}
            self._attend = partial(_attend_fused, partial(torch.ops.npu.npu_fused_infer_attention_score, **shape))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """Attend within sequences."""
        if self._padding:
            query, key, value = (F.pad(tensor, (0, self._padding)) for tensor in (query, key, value))
        result: torch.Tensor = self._attend(query.contiguous(), key.contiguous(), value.contiguous(), counts)
        return result[..., : self._size] if self._padding else result


def get_unpadded_kernel() -> Kernel | None:
    """Return NNAL's attention kernel, or None if torch_npu lacks it."""
    return getattr(torch.ops.atb, "_npu_flash_attention_unpad", None)


def _attend_unpadded(
    kernel: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    result = torch.empty_like(query)
    kernel(query=query, key=key, value=value, seq_len=torch.tensor(counts, dtype=torch.int32), out=result)
    return result


def _attend_fused(
    kernel: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    ends = list(accumulate(counts))
    result: torch.Tensor = kernel(query, key, value, actual_seq_lengths=ends, actual_seq_lengths_kv=ends)[0]
    return result


def _list_runs(counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first patch, end, length of each sequence) for each run of sequences of equal length."""
    first = 0
    for count, run in groupby(counts):
        last = first + count * sum(1 for _ in run)
        if count:
            yield first, last, count
        first = last


def _stack(patches: torch.Tensor, count: int) -> torch.Tensor:
    """Turn patches [patches, heads, size] into sequences of *count* [sequences, heads, count, size]."""
    return patches.reshape(-1, count, *patches.shape[1:]).transpose(1, 2)
