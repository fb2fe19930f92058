"""Operators of DeepSeek V4.1's attention, to the last tokens and to keys of one or two tokens each that layers share.

An indexer chooses keys. One layer also chooses blocks of keys, and the indexers of later layers choose among these. See
compressed_attention.py, of whose operators these are variants; read against vllm-ascend's own notes and tests of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from standin_ascend.compressed_attention import (
    CAUSAL,
    INT8,
    WINDOW,
    check_description,
    compute_attention,
    describe,
    mark,
    rate,
)
from standin_ascend.kernels import launch, refuse
from standin_ascend.sparse import NO_KEY

SCHEMAS = (  # vllm-ascend's own
    "npu_quant_lightning_indexer_v3(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale,"
    " Tensor key_dequant_scale, int topk, int quant_mode, *, Tensor? candidate_topk_index=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None,"
    " Tensor? cmp_residual_k=None, Tensor? block_table=None, Tensor? output_idx_offset=None, Tensor? metadata=None,"
    " int max_seqlen_q=-1, str layout_q='TND', str layout_k='PA_BBND', int mask_mode=3, int cmp_ratio=1,"
    " int candidate_mode=3, int candidate_topk_blocks=2048, int candidate_block_size=8) -> (Tensor, Tensor, Tensor)",
    "npu_sparse_flash_mla_metadata(int num_heads_q, int num_heads_kv, int head_dim, *, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None,"
    " Tensor? seqused_ori_kv=None, Tensor? seqused_cmp_kv=None, Tensor? cmp_residual_kv=None,"
    " Tensor? ori_topk_length=None, Tensor? cmp_topk_length=None, int batch_size=0, int max_seqlen_q=0,"
    " int max_seqlen_ori_kv=0, int max_seqlen_cmp_kv=0, int ori_topk=0, int cmp_topk=0, int cmp_ratio=0,"
    " int ori_mask_mode=0, int cmp_mask_mode=0, int ori_win_left=-1, int ori_win_right=-1, str layout_q='BSND',"
    " str layout_kv='BSND', bool has_ori_kv=True, bool has_cmp_kv=True) -> Tensor",
    "npu_sparse_flash_mla(Tensor q, *, Tensor? ori_kv=None, Tensor? cmp_kv=None, Tensor? ori_sparse_indices=None,"
    " Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None, Tensor? cmp_block_table=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None,"
    " Tensor? seqused_q=None, Tensor? seqused_ori_kv=None, Tensor? seqused_cmp_kv=None,"
    " Tensor? cmp_residual_kv=None, Tensor? ori_topk_length=None, Tensor? cmp_topk_length=None, Tensor? sinks=None,"
    " Tensor? metadata=None, float softmax_scale=1.0, int cmp_ratio=0, int ori_mask_mode=0, int cmp_mask_mode=0,"
    " int ori_win_left=-1, int ori_win_right=-1, str layout_q='BSND', str layout_kv='BSND', int topk_value_mode=1,"
    " bool return_softmax_lse=False) -> (Tensor, Tensor)",
)
SOURCE, CONSUMER, ALL_KEYS = 1, 2, 3  # candidate modes: choose blocks as well, choose among blocks, neither


def describe_attention(*sizes: int, cu_seqlens_q: torch.Tensor, seqused_ori_kv: torch.Tensor, **rest: Any) -> Any:
    """`npu_sparse_flash_mla_metadata`: the lengths of queries and keys."""
    return describe(cu_seqlens_q, seqused_ori_kv)


def attend(
    q: torch.Tensor,
    *,
    ori_kv: torch.Tensor,
    ori_block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_ori_kv: torch.Tensor,
    sinks: torch.Tensor,
    metadata: torch.Tensor,
    cmp_kv: torch.Tensor | None = None,
    cmp_sparse_indices: torch.Tensor | None = None,
    cmp_block_table: torch.Tensor | None = None,
    seqused_cmp_kv: torch.Tensor | None = None,
    cmp_residual_kv: torch.Tensor | None = None,
    softmax_scale: float = 1.0,
    cmp_ratio: int = 0,
    ori_mask_mode: int = 0,
    cmp_mask_mode: int = 0,
    ori_win_left: int = -1,
    ori_win_right: int = -1,
    layout_q: str = "BSND",
    layout_kv: str = "BSND",
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_sparse_flash_mla`: queries [tokens, heads, size] attend to the last tokens and to chosen keys.

    Caches are [blocks, block size, 1, size]; *cmp_sparse_indices* [tokens, 1, count] are the chosen keys, with -1 for
    none. A key is of *cmp_ratio* tokens, and *sinks* [heads] take a share of each softmax.
    """
    refuse("npu_sparse_flash_mla", rest)
    mask = 0 if cmp_kv is None else CAUSAL
    modes = layout_q, layout_kv, ori_mask_mode, cmp_mask_mode, ori_win_right
    if modes != ("TND", "PA_BBND", WINDOW, mask, 0) or cmp_ratio not in ((0,) if cmp_kv is None else (1, 2)):
        raise NotImplementedError(f"npu_sparse_flash_mla: layouts and modes {modes}, ratio {cmp_ratio}")
    out = torch.empty_like(q)
    caches = ori_kv, ori_block_table, cmp_kv, cmp_block_table, cmp_sparse_indices
    options = softmax_scale, cmp_ratio, ori_win_left
    launch("SparseFlashMla", compute_attention, q, *caches, cu_seqlens_q, seqused_ori_kv, sinks, metadata, out, options)
    return out, q.new_empty(0, dtype=torch.float32)


def choose_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    query_dequant_scale: torch.Tensor,
    key_dequant_scale: torch.Tensor,
    topk: int,
    quant_mode: int,
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    metadata: torch.Tensor,
    candidate_topk_index: torch.Tensor | None = None,
    cmp_residual_k: torch.Tensor | None = None,
    max_seqlen_q: int = -1,
    layout_q: str = "TND",
    layout_k: str = "PA_BBND",
    mask_mode: int = CAUSAL,
    cmp_ratio: int = 1,
    candidate_mode: int = ALL_KEYS,
    candidate_topk_blocks: int = 2048,
    candidate_block_size: int = 8,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`npu_quant_lightning_indexer_v3`: numbers of the best keys of each query [tokens, 1, topk], and of blocks.

    As `npu_quant_lightning_indexer_v2`. *candidate_topk_index* [tokens, 1, blocks] are the blocks to choose keys in, if
    *candidate_mode* is CONSUMER. If it is SOURCE, blocks are chosen by their best keys; each query's last is in them.
    """
    refuse("npu_quant_lightning_indexer_v3", rest)
    modes = quant_mode, layout_q, layout_k, mask_mode
    if modes != (INT8, "TND", "PA_BBND", CAUSAL) or (cmp_residual_k is None) != (cmp_ratio == 1):
        raise NotImplementedError(f"npu_quant_lightning_indexer_v3: quantization, layouts and modes {modes}")
    if (candidate_topk_index is None) == (candidate_mode == CONSUMER):
        raise NotImplementedError(f"npu_quant_lightning_indexer_v3: candidate mode {candidate_mode}")
    tokens = query.shape[0]
    out = query.new_empty(tokens, 1, topk, dtype=torch.int32)
    count = candidate_topk_blocks if candidate_mode == SOURCE else 0
    blocks = query.new_empty(tokens, 1, count, dtype=torch.int32)
    inputs = query, query_dequant_scale, weights, key, key_dequant_scale, block_table
    lengths = cu_seqlens_q, seqused_k, cmp_residual_k
    sizes = cmp_ratio, candidate_block_size
    launch(
        "QuantLightningIndexerV3",
        compute_choice,
        *inputs,
        *lengths,
        metadata,
        candidate_topk_index,
        out,
        blocks,
        *sizes,
    )
    return out, query.new_empty(0, dtype=torch.float32), blocks


def compute_choice(
    query: torch.Tensor,
    query_scales: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    key_scales: torch.Tensor,
    table: torch.Tensor,
    edges: torch.Tensor,
    lengths: torch.Tensor,
    residuals: torch.Tensor | None,
    metadata: torch.Tensor,
    given: torch.Tensor | None,
    out: torch.Tensor,
    blocks: torch.Tensor,
    ratio: int,
    size: int,
) -> None:
    """Rate keys as `npu_quant_lightning_indexer_v2` does; of equal ones the first wins."""
    check_description(metadata, edges, lengths)
    out.fill_(NO_KEY)
    blocks.fill_(NO_KEY)
    after = [0] * len(lengths) if residuals is None else residuals.tolist()
    for request, ((first, last), count) in enumerate(zip(pairwise(edges.tolist()), lengths.tolist(), strict=False)):
        if last == first or not count:
            continue
        numbers, end = torch.arange(count), count * ratio + after[request]
        queries = (part[first:last] for part in (query, query_scales, weights))
        scores = rate(*queries, cache, key_scales, table[request], numbers)
        visible = (torch.arange(end - (last - first), end)[:, None] + 1) // ratio
        scores = scores.masked_fill(numbers >= visible, -torch.inf)
        if given is not None:
            kept = mark(given[first:last, 0], -(-count // size)).repeat_interleave(size, 1)[:, :count]
            scores = scores.masked_fill(~kept, -torch.inf)
        write_best(scores, out[first:last, 0])
        if blocks.shape[-1]:
            missing = torch.full((last - first, -count % size), -torch.inf)
            rated = torch.cat([scores, missing], 1).unflatten(1, (-1, size)).amax(2)
            newest = torch.arange(rated.shape[1]) == (visible - 1) // size
            write_best(rated.masked_fill(newest, torch.inf), blocks[first:last, 0])


def write_best(scores: torch.Tensor, out: torch.Tensor) -> None:
    """Write the numbers of the best of each row, the best first, as far as there are so many."""
    best = scores.sort(dim=-1, descending=True, stable=True)
    kept = min(scores.shape[1], out.shape[1])
    out[:, :kept] = best.indices.masked_fill(best.values == -torch.inf, NO_KEY)[:, :kept].int()
