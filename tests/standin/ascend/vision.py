"""Operators of multimodal models: rotary embedding of patches, and attention of dense decoders, whose cache has pages.

See attention.py for how they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from standin_ascend.attention import HARMLESS, NO_MASK, attend_packed, compute_packed, is_causal
from standin_ascend.kernels import launch, refuse

SPLIT_SCHEMA = (  # vllm-ascend declares it where there is Triton
    "triton_split_qkv_rmsnorm_mrope(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos_sin, int num_q_heads,"
    " int num_kv_heads, int head_size, float eps, int[] mrope_section, bool is_interleaved, int? rope_dim=None,"
    " Tensor? q_bias=None, Tensor? k_bias=None, bool has_gate=False) -> (Tensor, Tensor, Tensor, Tensor)"
)


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
    if rest.get("input_layout") != "TND":
        raise NotImplementedError(f"npu_fused_infer_attention_score: layout {rest.get('input_layout')}")
    known = "input_layout", "actual_seq_lengths", "actual_seq_lengths_kv", "scale", "sparse_mode", "atten_mask"
    refuse("npu_fused_infer_attention_score, where heads share keys or have a cache,", rest, *known, *HARMLESS)
    causal = is_causal(rest.get("sparse_mode", NO_MASK), rest.get("atten_mask"))
    out = query.new_empty(query.shape)
    weights = query.new_empty(*query.shape[:2], 1, dtype=torch.float32)
    ends = list(rest["actual_seq_lengths"]), list(rest["actual_seq_lengths_kv"])
    settings = shared, block_size, rest.get("scale", 1.0), causal
    launch("FusedInferAttentionScore", compute_shared, query, key, value, block_table, out, weights, *ends, *settings)
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
    refuse("npu_scatter_pa_kv_cache", rest)
    launch("ScatterPaKvCache", compute_scatter, key, value, key_cache, value_cache, slot_mapping)


def compute_scatter(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Caches are [blocks, block size, heads, size]; negative slots are padding."""
    used = slots >= 0
    blocks, places = slots[used].long() // key_cache.shape[1], slots[used].long() % key_cache.shape[1]
    key_cache[blocks, places], value_cache[blocks, places] = key[used], value[used]


def rotate_halves(
    input: torch.Tensor,
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


def split_norm_rotate(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    eps: float,
    mrope_section: list[int],
    is_interleaved: bool,
    rope_dim: int | None = None,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    has_gate: bool = False,
) -> tuple[torch.Tensor, ...]:
    """`triton_split_qkv_rmsnorm_mrope`: queries and keys of *qkv* [tokens, all], normed and rotated, values, gates.

    Queries of a head come with its gates, if there are any.
    """
    if q_bias is not None or k_bias is not None:
        raise NotImplementedError("triton_split_qkv_rmsnorm_mrope with biases")
    if cos_sin.dim() != 3:
        raise NotImplementedError(f"triton_split_qkv_rmsnorm_mrope: positions of {cos_sin.dim() - 1} dimensions")
    heads = num_q_heads, num_kv_heads, num_kv_heads, num_q_heads * has_gate
    q, k, v, gates = (qkv.new_empty(qkv.shape[0], number * head_size) for number in heads)
    settings = head_size, rope_dim or head_size, eps, list(mrope_section), is_interleaved
    launch("SplitQkvRmsnormMrope", compute_split, qkv, q_weight, k_weight, cos_sin, q, k, v, gates, *settings)
    return q, k, v, gates


def compute_split(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    size: int,
    rotated: int,
    eps: float,
    sections: Sequence[int],
    interleaved: bool,
) -> None:
    """Rotate the first values of heads by time, height and width: *cos_sin* is [3, tokens, rotated], cosines first."""
    axes = find_axes(sections, interleaved)
    table = cos_sin.float()[axes.repeat(2), :, torch.arange(rotated)].transpose(0, 1)[:, None]  # [tokens, 1, rotated]
    cos, sin = (half.repeat(1, 1, 2) for half in table.chunk(2, -1))
    parts = qkv.split([q.shape[1] + gates.shape[1], k.shape[1], v.shape[1]], -1)
    heads = parts[0].unflatten(-1, (q.shape[1] // size, -1))
    for part, weight, out in ((heads[..., :size], q_weight, q), (parts[1].unflatten(-1, (-1, size)), k_weight, k)):
        x = part.float()
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
        placed = out.unflatten(-1, (-1, size))
        placed.copy_(normed)
        compute_rotation(normed[..., :rotated], cos, sin, placed[..., :rotated])
    gates.copy_(heads[..., size:].flatten(1))
    v.copy_(parts[2])


def find_axes(sections: Sequence[int], interleaved: bool) -> torch.Tensor:
    """Return by which position (0: time, 1: height, 2: width) each pair is rotated [pairs]."""
    if not interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axes = torch.zeros(sum(sections), dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
