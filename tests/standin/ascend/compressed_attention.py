"""Operators of DeepSeek V4's attention: to the last tokens, and to compressed keys, all or those that an indexer chose.

A key is a value, too. See attention.py for how operators are made. Their metadata is how a kernel divides its work
among cores; here it holds the lengths that it was made for, which the kernel compares with those it is given.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from standin_ascend.compression import rotate_last
from standin_ascend.kernels import launch, refuse
from standin_ascend.sparse import NO_KEY

SCHEMAS = (  # vllm-ascend's own
    "inplace_partial_rotary_mul(Tensor(a!) x, Tensor r1, Tensor r2, str rotary_mode, int[] partial_slice,"
    " bool negate_sin=False) -> ()",
    "npu_sparse_attn_sharedkv(Tensor q, *, Tensor? ori_kv=None, Tensor? cmp_kv=None, Tensor? ori_sparse_indices=None,"
    " Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None, Tensor? cmp_block_table=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None,"
    " Tensor? seqused_q=None, Tensor? seqused_kv=None, Tensor? sinks=None, Tensor? metadata=None,"
    " float softmax_scale=0, int cmp_ratio=0, int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=128,"
    " int ori_win_right=0, str layout_q='BSND', str layout_kv='PA_ND', bool return_softmax_lse=False)"
    " -> (Tensor out, Tensor softmax_lse)",
    "npu_sparse_attn_sharedkv_metadata(int num_heads_q, int num_heads_kv, int head_dim, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, Tensor? seqused_kv=None,"
    " int batch_size=0, int max_seqlen_q=0, int max_seqlen_kv=0, int ori_topk=0, int cmp_topk=0, int cmp_ratio=4,"
    " int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=128, int ori_win_right=0, str layout_q='BSND',"
    " str layout_kv='PA_ND', bool has_ori_kv=True, bool has_cmp_kv=True, str device='npu') -> (Tensor metadata)",
    "npu_quant_lightning_indexer_v2(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale,"
    " Tensor key_dequant_scale, int topk, int quant_mode, *, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,"
    " Tensor? seqused_q=None, Tensor? seqused_k=None, Tensor? cmp_residual_k=None, Tensor? block_table=None,"
    " Tensor? output_idx_offset=None, Tensor? metadata=None, int max_seqlen_q=-1, str layout_q='TND',"
    " str layout_k='PA_BBND', int mask_mode=3, int cmp_ratio=4, int return_value=0)"
    " -> (Tensor sparse_indices, Tensor sparse_values)",
    "npu_quant_lightning_indexer_v2_metadata(int num_heads_q, int num_heads_k, int head_dim, int topk, int quant_mode,"
    " *, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None,"
    " Tensor? cmp_residual_k=None, int batch_size=0, int max_seqlen_q=0, int max_seqlen_k=0, str layout_q='TND',"
    " str layout_k='PA_BBND', int mask_mode=3, int cmp_ratio=1, str device='npu') -> Tensor",
)
WINDOW, CAUSAL = 4, 3  # mask modes
INT8 = 2  # quantization mode
METADATA = 1024  # numbers of int32


def rotate_slice(
    x: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str,
    partial_slice: list[int],
    negate_sin: bool = False,
) -> None:
    """`inplace_partial_rotary_mul`: rotate the last channels of *x* [tokens, 1, heads, size], by pairs, in place."""
    if rotary_mode != "interleave" or partial_slice != [x.shape[-1] - r1.shape[-1], x.shape[-1]]:
        raise NotImplementedError(f"inplace_partial_rotary_mul: {rotary_mode} of {partial_slice}")
    launch("InplacePartialRotaryMul", compute_slice_rotation, x, r1, r2, -1 if negate_sin else 1)


def compute_slice_rotation(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, sign: int) -> None:
    """Rotate in float64; what is before the slice stays as it is."""
    rotary = cosines.shape[-1]
    x[..., -rotary:] = rotate_last(x[..., -rotary:].double(), cosines.double(), sign * sines.double()).to(x.dtype)


def describe_attention(
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_ori_kv: torch.Tensor | None,
    cu_seqlens_cmp_kv: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_kv: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    """`npu_sparse_attn_sharedkv_metadata`: the lengths of queries and keys."""
    return describe(cu_seqlens_q, seqused_kv)


def describe_choice(*sizes: int, cu_seqlens_q: torch.Tensor, seqused_k: torch.Tensor, **rest: Any) -> torch.Tensor:
    """`npu_quant_lightning_indexer_v2_metadata`: the same of compressed keys."""
    return describe(cu_seqlens_q, seqused_k)


def describe(edges: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Queue writing lengths to new metadata [1024]."""
    out = edges.new_empty(METADATA, dtype=torch.int32)
    launch("SparseAttnSharedkvMetadata", compute_description, edges, lengths, out)
    return out


def compute_description(edges: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    """Write how many requests there are, edges, and lengths."""
    out.zero_()
    requests = lengths.shape[0]
    out[0], out[1 : requests + 2], out[requests + 2 : 2 * requests + 2] = requests, edges[: requests + 1], lengths


def check_description(metadata: torch.Tensor, edges: torch.Tensor, lengths: torch.Tensor) -> None:
    """Raise if metadata was made for other lengths: on an NPU, cores would then share out other work."""
    wanted = torch.empty_like(metadata)
    compute_description(edges, lengths, wanted)
    if not torch.equal(metadata, wanted):
        raise ValueError(f"metadata of lengths {metadata[:12].tolist()}, called with {wanted[:12].tolist()}")


def attend_to_shared(
    q: torch.Tensor,
    *,
    ori_kv: torch.Tensor,
    ori_block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_kv: torch.Tensor,
    sinks: torch.Tensor,
    metadata: torch.Tensor,
    cmp_kv: torch.Tensor | None = None,
    cmp_sparse_indices: torch.Tensor | None = None,
    cmp_block_table: torch.Tensor | None = None,
    softmax_scale: float = 0,
    cmp_ratio: int = 0,
    ori_mask_mode: int = WINDOW,
    cmp_mask_mode: int = CAUSAL,
    ori_win_left: int = 128,
    ori_win_right: int = 0,
    layout_q: str = "BSND",
    layout_kv: str = "PA_ND",
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_sparse_attn_sharedkv`: queries [tokens, heads, size] attend to the last tokens and to compressed keys.

    Caches are [blocks, block size, 1, size]; of compressed keys, those at *cmp_sparse_indices* [tokens, 1, count] if
    given, else all; *sinks* [heads] take a share of each softmax.
    """
    # The real kernel ignores edges of keys, too: keys are paged.
    refuse("npu_sparse_attn_sharedkv", rest, "cu_seqlens_ori_kv", "cu_seqlens_cmp_kv")
    modes = layout_q, layout_kv, ori_mask_mode, cmp_mask_mode, ori_win_right
    if modes != ("TND", "PA_ND", WINDOW, CAUSAL, 0) or cmp_ratio not in (1, 4, 128):
        raise NotImplementedError(f"npu_sparse_attn_sharedkv: layouts and modes {modes}, ratio {cmp_ratio}")
    out = torch.empty_like(q)
    caches = ori_kv, ori_block_table, cmp_kv, cmp_block_table, cmp_sparse_indices
    options = softmax_scale, cmp_ratio, ori_win_left
    launch("SparseAttnSharedkv", compute_attention, q, *caches, cu_seqlens_q, seqused_kv, sinks, metadata, out, options)
    return out, q.new_empty(0, dtype=torch.float32)


def compute_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    compressed: torch.Tensor | None,
    compressed_table: torch.Tensor | None,
    chosen: torch.Tensor | None,
    edges: torch.Tensor,
    lengths: torch.Tensor,
    sinks: torch.Tensor,
    metadata: torch.Tensor,
    out: torch.Tensor,
    options: tuple[float, int, int],
) -> None:
    """Attend in float64; tokens of no request give zeros."""
    check_description(metadata, edges, lengths)
    scale, ratio, window = options
    out.zero_()
    for request, ((first, last), length) in enumerate(zip(pairwise(edges.tolist()), lengths.tolist(), strict=False)):
        if last == first:
            continue
        at = torch.arange(length - (last - first), length)
        nearest = torch.arange(max(int(at[0]) - window, 0), length)
        keys = [read_rows(cache, table[request], nearest)]
        seen = [(nearest <= at[:, None]) & (nearest >= at[:, None] - window)]
        if compressed is not None and compressed_table is not None:
            numbers = torch.arange(length // ratio)
            keys.append(read_rows(compressed, compressed_table[request], numbers))
            visible = numbers < (at[:, None] + 1) // ratio
            seen.append(visible if chosen is None else visible & mark(chosen[first:last, 0], len(numbers)))
        out[first:last] = attend(query[first:last], torch.cat(keys), torch.cat(seen, 1), sinks, scale)


def read_rows(cache: torch.Tensor, blocks: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return rows of a cache of one head at these places of a request [places, size]."""
    size = cache.shape[1]
    return cache[blocks[at // size].long(), at % size, 0]


def mark(chosen: torch.Tensor, count: int) -> torch.Tensor:
    """Return which of *count* keys were chosen [queries, count], by numbers [queries, chosen] with -1 for none."""
    places = chosen.long()
    marks = torch.zeros(chosen.shape[0], count + 1, dtype=torch.bool)
    return marks.scatter_(1, places.masked_fill((places < 0) | (places >= count), count), value=True)[:, :count]


def attend(
    query: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """Let queries [queries, heads, size] attend to the keys [keys, size] that they see [queries, keys]."""
    keys = keys.double()
    scores = ((query.double() @ keys.T) * scale).masked_fill(~seen[:, None], -torch.inf)
    sunk = sinks.double()[None, :, None].expand(scores.shape[0], -1, 1)
    shares = torch.cat([scores, sunk], -1).softmax(-1)[..., :-1]
    return (shares @ keys).to(query.dtype)


def choose_compressed(
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
    cmp_residual_k: torch.Tensor,
    block_table: torch.Tensor,
    metadata: torch.Tensor,
    layout_q: str = "TND",
    layout_k: str = "PA_BBND",
    mask_mode: int = CAUSAL,
    cmp_ratio: int = 4,
    return_value: int = 0,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_quant_lightning_indexer_v2`: numbers of the best compressed keys of each query [tokens, 1, topk].

    Queries are [tokens, heads, size], keys [blocks, block size, 1, size], both int8 with scales of their own; a request
    has *seqused_k* keys, and *cmp_residual_k* tokens after the last one.
    """
    refuse("npu_quant_lightning_indexer_v2", rest)
    modes = quant_mode, layout_q, layout_k, mask_mode, return_value
    if modes != (INT8, "TND", "PA_BBND", CAUSAL, 0):
        raise NotImplementedError(f"npu_quant_lightning_indexer_v2: quantization, layouts and modes {modes}")
    out = query.new_empty(query.shape[0], 1, topk, dtype=torch.int32)
    inputs = query, key, weights, query_dequant_scale, key_dequant_scale, block_table
    lengths = cu_seqlens_q, seqused_k, cmp_residual_k
    launch("QuantLightningIndexerV2", compute_choice, *inputs, *lengths, metadata, out, cmp_ratio)
    return out, query.new_empty(0, dtype=torch.bfloat16)


def compute_choice(
    query: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    query_scales: torch.Tensor,
    key_scales: torch.Tensor,
    table: torch.Tensor,
    edges: torch.Tensor,
    lengths: torch.Tensor,
    residuals: torch.Tensor,
    metadata: torch.Tensor,
    out: torch.Tensor,
    ratio: int,
) -> None:
    """Rate by weighted sums of what is positive in each head's product, in float64; of equal ones the first wins."""
    check_description(metadata, edges, lengths)
    out.fill_(NO_KEY)
    spans = zip(pairwise(edges.tolist()), lengths.tolist(), residuals.tolist(), strict=False)
    for request, ((first, last), count, residual) in enumerate(spans):
        if last == first or not count:
            continue
        numbers, end = torch.arange(count), count * ratio + residual
        queries = (part[first:last] for part in (query, query_scales, weights))
        scores = rate(*queries, cache, key_scales, table[request], numbers)
        at = torch.arange(end - (last - first), end)
        hidden = numbers >= (at[:, None] + 1) // ratio
        best = scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True)
        chosen = best.indices.masked_fill(hidden.gather(1, best.indices), NO_KEY).int()
        kept = min(count, out.shape[-1])
        out[first:last, 0, :kept] = chosen[:, :kept]


def rate(
    query: torch.Tensor,
    query_scales: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    key_scales: torch.Tensor,
    blocks: torch.Tensor,
    at: torch.Tensor,
) -> torch.Tensor:
    """Return the scores of a request's keys at these places, for each query [queries, keys]."""
    keys = read_rows(cache, blocks, at).double()
    scales = read_rows(key_scales[..., None], blocks, at)[:, 0].double()
    products = (query.double() @ keys.T) * query_scales.double()[..., None] * scales
    return (products.relu() * weights.double()[..., None]).sum(1).float()
