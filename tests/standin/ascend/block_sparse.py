"""Operators of MiniMax-M3's sparse attention: an indexer rates blocks of keys, and attention sees the best of them.

See attention.py for how they are made.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from standin_ascend.kernels import launch, refuse
from standin_ascend.sparse import CAUSAL, compute_scatter, find_later, list_requests

SCHEMAS = (  # vllm-ascend's own
    "npu_msa_index_score(Tensor query, Tensor key, Tensor block_table, Tensor start_loc, *, Tensor? scale=None,"
    " Tensor? atten_mask=None, Tensor? actual_seq_qlen=None, Tensor? actual_seq_klen=None, str layout_key='BBND',"
    " int sparse_mode=3, int init_blocks=0, int local_blocks=0) -> Tensor",
    "npu_sparse_attention_score(Tensor query, Tensor key, Tensor value, Tensor select_idx, Tensor block_table, *,"
    " Tensor? select_num_idx=None, Tensor? q_dequant_scale=None, Tensor? k_dequant_scale=None,"
    " Tensor? v_dequant_scale=None, Tensor? actual_seq_lengths=None, Tensor? actual_seq_lengths_kv=None,"
    " str q_input_layout='TND', str kv_input_layout='BNSD', int num_key_value_heads=1, float scale_value=1.0,"
    " int block_size=128, int top_k=16, int inner_precise=0, ScalarType? attention_out_dtype=None) -> Tensor",
    "npu_scatter_nd_update_sk(Tensor(a!) var, Tensor indices, Tensor update) -> ()",
)
AVAILABILITY_SCHEMA = "is_minimax_sparse_attention_split_kv_available() -> bool"
ALL_KEYS = 0  # sparse mode without a mask
WIDTH = 16  # of which the number of scores is a multiple
FIRST, NEAREST = 1e30, 1e29  # scores of blocks that are chosen in any case
NO_BLOCK = -1


def is_split_kv_available() -> bool:
    """`is_minimax_sparse_attention_split_kv_available`: whether there are the experimental kernels of prefills."""
    return False


def rate_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    block_table: torch.Tensor,
    start_loc: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: torch.Tensor,
    actual_seq_klen: torch.Tensor,
    layout_key: str = "BBND",
    sparse_mode: int = CAUSAL,
    **rest: Any,
) -> torch.Tensor:
    """`npu_msa_index_score`: each block's largest product with a query [heads, queries, blocks of the table, padded].

    Queries are [queries, heads, size], and keys a cache [blocks, block size, 1, size]; *actual_seq_qlen* begins with 0.
    """
    if layout_key != "BBND" or sparse_mode != (ALL_KEYS if atten_mask is None else CAUSAL) or key.shape[2] != 1:
        raise NotImplementedError(f"npu_msa_index_score: layout {layout_key}, mode {sparse_mode}, {key.shape[2]} heads")
    refuse("npu_msa_index_score", rest)
    width = -(-block_table.shape[1] // WIDTH) * WIDTH
    out = query.new_empty(query.shape[1], query.shape[0], width, dtype=torch.float32)
    lengths = actual_seq_qlen, actual_seq_klen
    launch("MsaIndexScore", compute_ratings, query, key, block_table, *lengths, out, sparse_mode == CAUSAL)
    return out


def compute_ratings(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    query_edges: torch.Tensor,
    key_lengths: torch.Tensor,
    out: torch.Tensor,
    causal: bool,
) -> None:
    """Multiply in float64, as `sparse.compute_choice`; blocks without a key that a query sees get minus infinity."""
    out.fill_(-torch.inf)
    size = cache.shape[1]
    for queries, blocks, length in list_requests(query_edges[1:], key_lengths, table, size):
        keys = cache[blocks].flatten(0, 1)[:length, 0].double()
        products = query[queries].double() @ keys.T  # [queries, heads, keys]
        if causal:
            products.masked_fill_(find_later(products[:, 0])[:, None], -torch.inf)
        padded = F.pad(products, (0, -length % size), value=-torch.inf)
        out[:, queries, : len(blocks)] = padded.unflatten(-1, (-1, size)).amax(-1).transpose(0, 1).float()


def prefer_blocks(
    scores: torch.Tensor,
    query_edges: torch.Tensor,
    lengths_before: torch.Tensor,
    heads: int,
    first: int,
    nearest: int,
    *rest: Any,
    sparse_block_size: int,
    **options: Any,
) -> None:
    """`_prepare_prefill_topk_scores_kernel`: let the *first* blocks and the *nearest* ones be chosen in any case.

    Scores are [heads, queries, blocks].
    """
    for (begin, end), before in zip(pairwise(query_edges.tolist()), lengths_before.tolist(), strict=True):
        for query in range(begin, end):
            seen = min((before + query - begin + sparse_block_size) // sparse_block_size, scores.shape[-1])
            scores[:, query, : min(first, seen)] = FIRST
            scores[:, query, max(seen - nearest, 0) : seen] = NEAREST


def drop_unseen_blocks(
    chosen: torch.Tensor,
    query_edges: torch.Tensor,
    lengths_before: torch.Tensor,
    heads: int,
    block_size: int,
    *rest: Any,
    **options: Any,
) -> None:
    """`_mask_prefill_topk_indices_kernel`: replace chosen blocks [heads, queries, count] that are not seen."""
    for (begin, end), before in zip(pairwise(query_edges.tolist()), lengths_before.tolist(), strict=True):
        seen = (before + torch.arange(end - begin) + block_size) // block_size
        chosen[:, begin:end].masked_fill_(chosen[:, begin:end] >= seen[:, None], NO_BLOCK)


def attend_to_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    select_idx: torch.Tensor,
    block_table: torch.Tensor,
    *,
    select_num_idx: torch.Tensor,
    actual_seq_lengths: torch.Tensor,
    actual_seq_lengths_kv: torch.Tensor,
    num_key_value_heads: int = 1,
    scale_value: float = 1.0,
    block_size: int = 128,
    top_k: int = 16,
    **rest: Any,
) -> torch.Tensor:
    """`npu_sparse_attention_score`: attend to chosen blocks of each request's sequence.

    Queries are [queries, heads, size], keys and values caches [blocks, block size, key heads, size], numbers of blocks
    *select_idx* [key heads, queries, count], of which the first *select_num_idx* [key heads, queries] count, and
    lengths are not cumulated.
    """
    sizes = num_key_value_heads, block_size, top_k
    if sizes != (key.shape[2], key.shape[1], select_idx.shape[2]) or query.dtype != key.dtype:
        raise NotImplementedError(f"npu_sparse_attention_score: sizes {sizes}, keys {list(key.shape)} in {key.dtype}")
    refuse("npu_sparse_attention_score", rest, "inner_precise")
    out = torch.empty_like(query)
    inputs = query, key, value, select_idx, select_num_idx, block_table, actual_seq_lengths, actual_seq_lengths_kv
    launch("SparseAttentionScore", compute_attention, *inputs, out, scale_value)
    return out


def compute_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    chosen: torch.Tensor,
    counts: torch.Tensor,
    table: torch.Tensor,
    query_lengths: torch.Tensor,
    key_lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Attend in float64, as `attention.compute_attention`; queries that see no key give zeros."""
    out.zero_()
    size, heads = key_cache.shape[1:3]
    for queries, blocks, length in list_requests(query_lengths.cumsum(0), key_lengths, table, size):
        keys, values = (cache[blocks].flatten(0, 1)[:length].double() for cache in (key_cache, value_cache))
        grouped = query[queries].double().unflatten(1, (heads, -1))
        scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * scale
        seen = mark_chosen(chosen[:, queries], counts[:, queries], len(blocks))
        seen = seen.repeat_interleave(size, -1)[..., :length] & ~find_later(scores[0, 0])  # [heads, queries, keys]
        shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        shares = shares.masked_fill(~seen.any(-1)[:, None, :, None], 0)
        out[queries] = torch.einsum("hgqk,khd->qhgd", shares, values).flatten(1, 2).to(out.dtype)


def mark_chosen(chosen: torch.Tensor, counts: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return which of so many blocks are the chosen ones [..., count] of a query [..., blocks]."""
    unused = (torch.arange(chosen.shape[-1]) >= counts[..., None]) | (chosen < 0) | (chosen >= blocks)
    marks = chosen.new_zeros(*chosen.shape[:-1], blocks + 1, dtype=torch.bool)
    return marks.scatter_(-1, chosen.long().masked_fill(unused, blocks), value=True)[..., :blocks]


def scatter_rows(var: torch.Tensor, indices: torch.Tensor, update: torch.Tensor) -> None:
    """`npu_scatter_nd_update_sk`: write rows of *update* to the rows of *var* at *indices*.

    These are numbers of rows [rows, 1], or blocks of a cache and places in them [rows, 2].
    """
    if indices.dim() != 2 or indices.shape[1] not in (1, 2):
        raise NotImplementedError(f"npu_scatter_nd_update_sk at indices {list(indices.shape)}")
    if indices.shape[1] == 1:
        launch("ScatterNdUpdateSk", compute_scatter, var, indices, update)
    else:
        launch("ScatterNdUpdateSk", compute_paged_scatter, var, indices, update)


def compute_paged_scatter(cache: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> None:
    """Leave out negative blocks, as `compute_scatter` does negative rows; a row has the shape that the cache's have."""
    blocks, places = indices.long().T
    kept = blocks >= 0
    cache[blocks[kept], places[kept]] = updates[kept].reshape(-1, *cache.shape[2:])
