"""Operators of caches in int8: of sparse attention's latents, and of an indexer's keys.

A latent is quantized tile by tile; a row of its cache has the bytes of the latent, those of the rotary part in
bfloat16, and those of the scales in float32. Keys of an indexer have a scale each, in a cache of its own. See
attention.py for how operators are made.
"""

from __future__ import annotations

from typing import Any

import torch
from standin_ascend.kernels import launch, refuse
from standin_ascend.quantized import INT8, LARGEST, compute_quantization
from standin_ascend.sparse import (
    ABSORBED,
    CAUSAL,
    NO_KEY,
    NO_MASK,
    attend,
    clear,
    list_requests,
    make_sums,
    write,
    write_best,
)

SCHEMAS = (  # vllm-ascend's own
    "npu_lightning_indexer_quant(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale,"
    " Tensor key_dequant_scale, *, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,"
    " Tensor? block_table=None, int query_quant_mode=0, int key_quant_mode=0, str layout_query='BSND',"
    " str layout_key='BSND', int sparse_count=2048, int sparse_mode=3) -> Tensor",
    "npu_kv_quant_sparse_flash_attention_vllm(Tensor query, Tensor key, Tensor value, Tensor sparse_indices,"
    " float scale_value, *, int key_quant_mode=1, int value_quant_mode=1, Tensor? key_dequant_scale=None,"
    " Tensor? value_dequant_scale=None, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None,"
    " Tensor? actual_seq_lengths_kv=None, int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND',"
    " int sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807,"
    " int attention_mode=2, int quant_scale_repo_mode=1, int tile_size=128, int rope_head_dim=64,"
    " bool return_softmax_lse=False) -> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)",
    "store_kv_block_metadata(Tensor slot_mapping_npu, Tensor group_len, Tensor group_key_idx,"
    " Tensor group_key_cache_idx, int block_size=0) -> ()",
    "store_kv_block(Tensor key_in, Tensor key_cache_in, Tensor group_len, Tensor group_key_idx,"
    " Tensor group_key_cache_idx, int block_size=0) -> ()",
)
TILE = 128
BY_HEAD, BY_TILE = 0, 2  # what has a scale


def quantize_tiles(
    x: torch.Tensor, *, dst_type: Any = 1, row_block_size: int = 1, col_block_size: int = TILE, **rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_dynamic_block_quant`: int8 of *x* [..., size], and the scale of each tile of a row [..., tiles]."""
    refuse("npu_dynamic_block_quant", rest)
    if dst_type not in INT8 or row_block_size != 1 or x.shape[-1] % col_block_size:
        raise NotImplementedError(f"npu_dynamic_block_quant to type {dst_type}, {row_block_size} x {col_block_size}")
    out = torch.empty_like(x, dtype=torch.int8)
    scales = x.new_empty(*x.shape[:-1], x.shape[-1] // col_block_size, dtype=torch.float32)
    launch("DynamicBlockQuant", compute_tiles, x, out, scales)
    return out, scales


def compute_tiles(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantize tile by tile."""
    tiles = -1, scales.shape[-1], x.shape[-1] // scales.shape[-1]
    compute_quantization(x.reshape(tiles), out.view(tiles), scales.view(tiles[:2]))


def pack(latents: torch.Tensor, ropes: torch.Tensor, tile: int, clip: torch.Tensor | None) -> torch.Tensor:
    """Return rows of a cache in int8: latents [rows, size] by tile, clipped, rotary parts, and scales."""
    tiles = latents.float().unflatten(-1, (-1, tile))
    scales = tiles.abs().amax(-1) * (1.0 if clip is None else clip) / LARGEST
    integers = (tiles / scales.masked_fill(scales == 0, 1)[..., None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return torch.cat([integers.flatten(1), ropes.contiguous().view(torch.int8), scales.view(torch.int8)], -1)


def unpack(rows: torch.Tensor, rope: int, tile: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents and rotary parts [rows, size] of rows of such a cache."""
    tiles = (rows.shape[-1] - 2 * rope) // (tile + 4)
    latents, ropes, scales = (part.contiguous() for part in rows.split([tiles * tile, 2 * rope, 4 * tiles], -1))
    plain = latents.unflatten(-1, (tiles, tile)).float() * scales.view(torch.float32)[..., None]
    return plain.flatten(1).to(dtype), ropes.view(torch.bfloat16)


def attend_to_bytes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    key_quant_mode: int = 1,
    value_quant_mode: int = 1,
    block_table: torch.Tensor,
    actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_kv: torch.Tensor,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = CAUSAL,
    attention_mode: int = ABSORBED,
    quant_scale_repo_mode: int = 1,
    tile_size: int = TILE,
    rope_head_dim: int = 64,
    return_softmax_lse: bool = False,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`npu_kv_quant_sparse_flash_attention_vllm`: as `npu_sparse_flash_attention`, to a cache in int8.

    Queries are [queries, heads, size with rotary part], and the cache is [blocks, block size, 1, bytes].
    """
    layouts = layout_query, layout_kv, attention_mode, sparse_block_size, quant_scale_repo_mode
    modes = key_quant_mode, value_quant_mode, key.dtype
    if layouts != ("TND", "PA_BSND", ABSORBED, 1, 1) or modes != (BY_TILE, BY_TILE, torch.int8):
        raise NotImplementedError(f"npu_kv_quant_sparse_flash_attention_vllm: {layouts}, {modes}")
    if sparse_mode not in (NO_MASK, CAUSAL):
        raise NotImplementedError(f"npu_kv_quant_sparse_flash_attention_vllm: mode {sparse_mode}")
    if key.data_ptr() != value.data_ptr():
        raise NotImplementedError("npu_kv_quant_sparse_flash_attention_vllm with values of their own")
    refuse("npu_kv_quant_sparse_flash_attention_vllm", rest)
    out = query.new_empty(*query.shape[:2], query.shape[2] - rope_head_dim)
    sums = make_sums(query, return_softmax_lse)
    inputs = query, key, sparse_indices, block_table, actual_seq_lengths_query, actual_seq_lengths_kv
    sizes = rope_head_dim, tile_size
    launch("KvQuantSparseFlashAttention", compute_attention, *inputs, out, *sums, scale_value, sparse_mode, *sizes)
    return out, *sums


def compute_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    table: torch.Tensor,
    query_ends: torch.Tensor,
    key_lengths: torch.Tensor,
    out: torch.Tensor,
    largest: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
    mode: int,
    rope: int,
    tile: int,
) -> None:
    """Scale the integers, round them to the queries' type, and attend; queries without keys give zeros."""
    clear(out, largest, sums)
    for queries, blocks, length in list_requests(query_ends, key_lengths, table, cache.shape[1]):
        keys = unpack(cache[blocks].flatten(0, 1)[:length, 0], rope, tile, query.dtype)
        parts = query[queries].split([out.shape[-1], rope], -1)
        write(queries, attend(*parts, *keys, indices[queries, 0], scale, mode), out, largest, sums)


def choose_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    query_dequant_scale: torch.Tensor,
    key_dequant_scale: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_key: torch.Tensor,
    block_table: torch.Tensor,
    query_quant_mode: int = BY_HEAD,
    key_quant_mode: int = BY_HEAD,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = CAUSAL,
) -> torch.Tensor:
    """`npu_lightning_indexer_quant`: as `npu_lightning_indexer`, of int8 queries and keys and their scales in float16.

    Scales are [queries, heads], and a cache [blocks, block size, 1].
    """
    layouts = layout_query, layout_key, sparse_mode, query_quant_mode, key_quant_mode
    types = query.dtype, key.dtype, *(part.dtype for part in (weights, query_dequant_scale, key_dequant_scale))
    if layouts != ("TND", "PA_BSND", CAUSAL, BY_HEAD, BY_HEAD):
        raise NotImplementedError(f"npu_lightning_indexer_quant: layouts and modes {layouts}")
    if types != (*[torch.int8] * 2, *[torch.float16] * 3):
        raise NotImplementedError(f"npu_lightning_indexer_quant of {types}")
    out = query.new_empty(query.shape[0], key.shape[2], sparse_count, dtype=torch.int32)
    scales, lengths = [query_dequant_scale, key_dequant_scale], [actual_seq_lengths_query, actual_seq_lengths_key]
    launch("LightningIndexerQuant", compute_choice, query, key, weights, scales, block_table, *lengths, out)
    return out


def compute_choice(
    query: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    scales: list[torch.Tensor],
    table: torch.Tensor,
    query_ends: torch.Tensor,
    key_lengths: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Choose as `sparse.compute_choice`: products of integers are exact, and then scaled in float64."""
    out.fill_(NO_KEY)
    of_queries, of_keys = scales
    for queries, blocks, length in list_requests(query_ends, key_lengths, table, cache.shape[1]):
        keys, key_scales = (part[blocks].flatten(0, 1)[:length, 0].double() for part in (cache, of_keys))
        products = (query[queries].double() @ keys.T).relu()  # [queries, heads, keys]
        weighted = weights[queries].double() * of_queries[queries].double()
        write_best(((products * weighted[..., None]).sum(1) * key_scales).float(), out[queries, 0])


def find_runs(
    slots: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, block_size: int = 0
) -> None:
    """`store_kv_block_metadata`: runs of tokens in adjacent slots of a block: how many, from which row, to which slot.

    All are int32 [tokens]; there are zeros after the last run, and negative slots are in none.
    """
    if block_size <= 0 or not slots.numel() or slots.dtype != torch.int32:
        raise NotImplementedError(f"store_kv_block_metadata of {list(slots.shape)} {slots.dtype}, blocks {block_size}")
    launch("StoreKvBlockMetadata", compute_runs, slots, lengths, rows, places, block_size)


def compute_runs(
    slots: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, block_size: int
) -> None:
    """Begin a run where a slot does not follow the one before, or is in another block."""
    runs: list[list[int]] = []
    before = NO_KEY
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0 and before >= 0 and slot == before + 1 and slot % block_size:
            runs[-1][0] += 1
        elif slot >= 0:
            runs.append([1, row, slot])
        before = slot
    for part, values in zip((lengths, rows, places), zip(*runs, strict=True) if runs else ((),) * 3, strict=True):
        part.zero_()
        part[: len(values)] = torch.tensor(values, dtype=part.dtype)


def store_runs(
    rows: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor,
    first_rows: torch.Tensor,
    places: torch.Tensor,
    block_size: int = 0,
) -> None:
    """`store_kv_block`: write runs of rows [tokens, 1, size] to a cache [blocks, block size, 1, size]."""
    launch("StoreKvBlock", compute_storing, rows, cache, lengths, first_rows, places)


def compute_storing(
    rows: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, first_rows: torch.Tensor, places: torch.Tensor
) -> None:
    """Copy run by run."""
    size = cache.shape[-1]
    there, here = cache.view(-1, size), rows.view(-1, size)
    for length, row, place in zip(lengths.tolist(), first_rows.tolist(), places.tolist(), strict=True):
        there[place : place + length] = here[row : row + length]
