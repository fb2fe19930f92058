"""Operators of models that see: rotary embedding of patches, and attention of dense decoders, whose cache has pages.

See attention.py for how they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from standin_ascend.attention import attend_packed, compute_packed
from standin_ascend.kernels import launch

CAUSAL = (2, 3)  # sparse modes


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    block_table: torch.Tensor | None = None,
    block_size: int = 0,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_fused_infer_attention_score`, layout TND, also where heads share keys, and where keys are in a cache."""
    shared = num_heads // (num_key_value_heads or num_heads)
    if shared == 1 and block_table is None:
        return attend_packed(query, key, value, **rest)
    if rest.get("input_layout") != "TND" or rest.get("query_rope") is not None:
        raise NotImplementedError(f"npu_fused_infer_attention_score, heads that share keys or a cache: {rest}")
    out = query.new_empty(query.shape)
    weights = query.new_empty(*query.shape[:2], 1, dtype=torch.float32)
    ends = list(rest["actual_seq_lengths"]), list(rest["actual_seq_lengths_kv"])
    launch(
        "FusedInferAttentionScore", compute_shared, query, key, value, block_table, out, weights, *ends, shared,
        block_size, rest.get("scale", 1.0), rest.get("sparse_mode", 0) in CAUSAL,
    )  # fmt: skip
    return out, weights


def compute_shared(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor | None,
    out: torch.Tensor,
    weights: torch.Tensor,
    query_ends: Sequence[int],
    keys: Sequence[int],
    shared: int,
    block_size: int,
    scale: float,
    causal: bool,
) -> None:
    """Attend with each head of keys *shared* times.

    With a table, keys and values are caches [blocks, block size, heads x size] and *keys* are lengths; without one,
    they are as `attend_packed` takes them. Sequences beyond the last query are padding.
    """
    keys = keys[: len(query_ends)]
    if block_table is not None:
        size = query.shape[-1]
        key, value = (gather_pages(cache, block_table, keys, block_size, size) for cache in (key, value))
        keys = list(accumulate(keys))
    key, value = (part.repeat_interleave(shared, 1) for part in (key, value))
    compute_packed(query, key, value, None, None, out, weights, query_ends, keys, scale, causal)


def gather_pages(
    cache: torch.Tensor, table: torch.Tensor, lengths: Sequence[int], block_size: int, size: int
) -> torch.Tensor:
    """Return what is cached of each request, one after another [tokens, heads, size]."""
    parts = [
        cache[table[request, : -(-length // block_size)].long()].flatten(0, 1)[:length]
        for request, length in enumerate(lengths)
    ]
    return torch.cat(parts).unflatten(-1, (-1, size)) if cache.dim() == 3 else torch.cat(parts)


def scatter_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cache_mode: str = "PA_NZ",
    **rest: Any,
) -> None:
    """`npu_scatter_pa_kv_cache`: write keys and values [tokens, heads, size] to their slots."""
    if cache_mode != "Norm":
        raise NotImplementedError(f"npu_scatter_pa_kv_cache: cache mode {cache_mode}")
    launch("ScatterPaKvCache", compute_scatter, key, value, key_cache, value_cache, slot_mapping)


def compute_scatter(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Caches are [blocks, block size, heads, size]; negative slots are padding."""
    used = slots >= 0
    blocks, places = slots[used].long() // key_cache.shape[1], slots[used].long() % key_cache.shape[1]
    key_cache[blocks, places], value_cache[blocks, places] = key[used], value[used]


def rotate_halves(
    input: torch.Tensor,  # noqa: A002 - torch_npu's name
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """`npu_rotary_mul`: rotate *input* [batch, tokens, heads, size] by cosines and sines that broadcast to it."""
    if rotary_mode != "half" or rotate is not None:
        raise NotImplementedError(f"npu_rotary_mul: mode {rotary_mode}")
    out = torch.empty_like(input)
    launch("RotaryPositionEmbedding", compute_rotation, input, r1, r2, out)
    return out


def compute_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Rotate pairs of which one is in each half, in float32."""
    first, second = x.float().chunk(2, -1)
    out.copy_(x.float() * cos.float() + torch.cat([-second, first], -1) * sin.float())
