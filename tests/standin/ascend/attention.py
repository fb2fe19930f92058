"""Operators of attention with a latent cache (MLA): fused attention, rotary embedding, norm and cache.

Each `compute_...` is a kernel on the host's tensors; each other function is an operator, which makes room for what it
returns and launches the kernel. Layouts and meanings are those of CANN's documentation, in the parts that vllm-ascend
0.30 uses; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from standin_ascend.kernels import launch, refuse

NO_MASK = 0  # sparse mode, where there is no mask
BOTTOM_RIGHT = 3  # sparse mode: causal, with the last query at the last key
HARMLESS = "softmax_lse_flag", "inner_precise", "pre_tokens", "next_tokens"  # the last two are for other sparse modes


def compute_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend, [heads, queries, size] to [heads, keys, size] -> [heads, queries, value size], log-sum-exp.

    In float64, so that what a query gets does not depend on how many there are.
    """
    scores = query.double() @ key.double().transpose(-1, -2) * scale
    if causal:
        queries, keys = scores.shape[-2:]
        scores.masked_fill_(torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries), -torch.inf)
    sums = scores.logsumexp(-1)
    shares = scores.softmax(-1).masked_fill(sums[..., None] == -torch.inf, 0)  # a query that sees no key gets zeros
    return shares @ value.double(), sums


def is_causal(sparse_mode: int, mask: torch.Tensor | None) -> bool:
    """Return whether queries see only keys up to their own; masks of other kinds are refused."""
    if sparse_mode not in (NO_MASK, BOTTOM_RIGHT) or (sparse_mode == NO_MASK and mask is not None):
        raise NotImplementedError(f"fused attention: sparse mode {sparse_mode}{'' if mask is None else ' with a mask'}")
    return sparse_mode == BOTTOM_RIGHT


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    actual_seq_lengths: Sequence[int],
    actual_seq_lengths_kv: Sequence[int],
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = NO_MASK,
    atten_mask: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_fused_infer_attention_score`, layout TND: sequences one after another, with their cumulated lengths."""
    if input_layout != "TND":
        raise NotImplementedError(f"npu_fused_infer_attention_score: layout {input_layout}")
    refuse("npu_fused_infer_attention_score", rest, *HARMLESS)
    causal = is_causal(sparse_mode, atten_mask)
    tokens, heads = query.shape[:2]
    out = query.new_empty(tokens, heads, value.shape[-1])
    weights = query.new_empty(tokens, heads, 1, dtype=torch.float32)
    ends = list(actual_seq_lengths), list(actual_seq_lengths_kv)
    inputs = query, key, value, query_rope, key_rope
    launch("FusedInferAttentionScore", compute_packed, *inputs, out, weights, *ends, scale, causal)
    return out, weights


def compute_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_rope: torch.Tensor | None,
    key_rope: torch.Tensor | None,
    out: torch.Tensor,
    weights: torch.Tensor,
    query_ends: Sequence[int],
    key_ends: Sequence[int],
    scale: float,
    causal: bool,
) -> None:
    """Attend in each sequence by itself; queries beyond all sequences give zeros."""
    if query_rope is not None and key_rope is not None:
        query, key = torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1)
    out.zero_()
    weights.fill_(-torch.inf)
    for (first, last), (start, end) in zip(pairwise([0, *query_ends]), pairwise([0, *key_ends]), strict=True):
        if last > first and end > start:
            parts = (part.transpose(0, 1) for part in (query[first:last], key[start:end], value[start:end]))
            found, sums = compute_attention(*parts, scale, causal)
            out[first:last] = found.transpose(0, 1).to(out.dtype)
            weights[first:last, :, 0] = sums.transpose(0, 1)


def attend_paged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor,
    key_rope: torch.Tensor,
    actual_seq_kvlen: Sequence[int],
    block_table: torch.Tensor,
    block_size: int,
    softmax_scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = NO_MASK,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_fused_infer_attention_score_v2`: decodes, over a paged cache.

    Layout BNSD_NBSD has as many queries of each request, [batch, heads, queries, size] -> [heads, batch, queries, ...];
    TND_NTD has them one after another, with their cumulated numbers, [queries, heads, size] -> [heads, queries, ...].
    """
    refuse("npu_fused_infer_attention_score_v2", rest, "num_query_heads", "num_key_value_heads", "inner_precise")
    causal = is_causal(sparse_mode, atten_mask)
    if input_layout == "BNSD_NBSD" and actual_seq_qlen is None and not causal:
        batch, heads, queries, _ = query.shape
        ends = [queries * (request + 1) for request in range(batch)]
        shape = [heads, batch, queries]
    elif input_layout == "TND_NTD" and actual_seq_qlen is not None:
        ends, shape = list(actual_seq_qlen), [query.shape[1], query.shape[0]]
    else:
        raise NotImplementedError(f"npu_fused_infer_attention_score_v2: layout {input_layout}, mask {sparse_mode}")
    if out is None:
        out = query.new_empty(*shape, value.shape[-1])
    inputs = query, key, value, query_rope, key_rope, block_table
    settings = ends, list(actual_seq_kvlen), block_size, softmax_scale, causal
    launch("FusedInferAttentionScoreV2", compute_paged, *inputs, out, *settings)
    return out, query.new_empty(1, dtype=torch.float32)


def attend_paged_into(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, out: Sequence[torch.Tensor], **rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same into memory that is there, as graphs have it."""
    rest.pop("workspace", None)
    attend_paged(query, key, value, out=out[0], **rest)
    return out[0], out[1]


def find_workspace(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """Return what graphs keep for a kernel that needs no workspace."""
    return query.new_empty(16)


def compute_paged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_rope: torch.Tensor,
    key_rope: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    ends: Sequence[int],
    lengths: Sequence[int],
    block_size: int,
    scale: float,
    causal: bool,
) -> None:
    """Attend to each request's blocks; caches are [blocks, heads of keys, block size, size]."""
    query = torch.cat([query, query_rope], -1)
    rows = query.transpose(0, 1) if query.dim() == 3 else query.transpose(0, 1).flatten(1, 2)  # [heads, queries, size]
    out.zero_()
    for request, ((first, last), length) in enumerate(zip(pairwise([0, *ends]), lengths, strict=False)):
        if length and last > first:
            blocks = block_table[request, : -(-length // block_size)].long()
            keys, ropes, values = (
                cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for cache in (key, key_rope, value)
            )
            found, _ = compute_attention(rows[:, first:last], torch.cat([keys, ropes], -1), values, scale, causal)
            out.view(*rows.shape[:2], -1)[:, first:last] = found.to(out.dtype)


def update_attention(
    lse: Sequence[torch.Tensor], local_out: Sequence[torch.Tensor], update_type: int
) -> tuple[Any, ...]:
    """`npu_attention_update`: one result of several, each from other keys, weighted by their log-sum-exps."""
    if update_type != 0:
        raise NotImplementedError(f"npu_attention_update: update type {update_type}, which returns sums too")
    out = torch.empty_like(local_out[0])
    launch("AttentionUpdate", compute_update, list(lse), list(local_out), out)
    return out, out.new_empty(1, dtype=torch.float32)


def compute_update(sums: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Weigh parts [rows, size] by the softmax of their sums [rows]."""
    shares = torch.stack([row.reshape(-1).double() for row in sums]).softmax(0)
    stacked = torch.stack([part.reshape(shares.shape[1], -1).double() for part in parts])
    out.copy_((shares[..., None] * stacked).sum(0).view(out.shape))


def gather_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seq_offset: torch.Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """`npu_gather_pa_kv_cache`: what is cached of each request, one after another, into *key* and *value*."""
    caches = key_cache, value_cache, block_tables, seq_lens, key, value, seq_offset
    launch("GatherPaKvCache", compute_gather, *caches, is_seq_lens_cumsum)


def compute_gather(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor | None,
    cumulated: bool,
) -> None:
    """Copy tokens [offset, offset + length) of each request; caches are [blocks, block size, ...]."""
    lengths = [b - a for a, b in pairwise(seq_lens.tolist())] if cumulated else seq_lens.tolist()
    size, row = key_cache.shape[1], 0
    for request, length in enumerate(lengths):
        first = 0 if offsets is None else int(offsets[request])
        tokens = torch.arange(first, first + length)
        blocks, places = block_tables[request][tokens // size].long(), tokens % size
        key[row : row + length], value[row : row + length] = key_cache[blocks, places], value_cache[blocks, places]
        row += length


def norm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **rest: Any,
) -> tuple[torch.Tensor, ...]:
    """`npu_kv_rmsnorm_rope_cache`: norm the latent part of *kv*, rotate the rest, write both to the cache."""
    if cache_mode != "PA":
        raise NotImplementedError(f"npu_kv_rmsnorm_rope_cache: cache mode {cache_mode}")
    refuse("npu_kv_rmsnorm_rope_cache", rest)
    latent = gamma.shape[0]
    rope = kv.new_empty(*kv.shape[:-1], kv.shape[-1] - latent)
    normed = kv.new_empty(*kv.shape[:-1], latent)
    tensors = kv, gamma, cos, sin, index, k_cache, ckv_cache, rope, normed
    launch("KvRmsNormRopeCache", compute_norm_rope_cache, *tensors, epsilon)
    return k_cache.view(k_cache.shape), ckv_cache.view(ckv_cache.shape), rope, normed


def compute_norm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    rope: torch.Tensor,
    normed: torch.Tensor,
    epsilon: float,
) -> None:
    """Caches are [blocks, block size, 1, size]; negative slots are padding."""
    latent = kv[..., : gamma.shape[0]].float()
    normed.copy_(latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + epsilon) * gamma.float())
    rope.copy_(rotate_interleaved(kv[..., gamma.shape[0] :], cos, sin))
    slots = index.view(-1).long()
    used = slots >= 0
    blocks, places = slots[used] // k_cache.shape[1], slots[used] % k_cache.shape[1]
    k_cache[blocks, places] = rope.reshape(slots.numel(), 1, -1)[used]
    ckv_cache[blocks, places] = normed.reshape(slots.numel(), 1, -1)[used]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`npu_interleave_rope`: rotate *x* [tokens, heads, 1, size], whose pairs lie side by side."""
    out = torch.empty_like(x)
    launch("InterleaveRope", lambda *t: t[-1].copy_(rotate_interleaved(*t[:-1])), x, cos, sin, out)
    return out


def rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs that lie side by side; the result has all first halves, then all second halves."""
    size = x.shape[-1]
    cos, sin = (table.reshape(-1, 1, 1, size).float() for table in (cos, sin))
    even, odd = x.float().unflatten(-1, (size // 2, 2)).unbind(-1)
    return torch.cat([even, odd], -1) * cos + torch.cat([-odd, even], -1) * sin


def multiply_batches(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    perm_x1: Sequence[int] = (0, 1, 2),
    perm_x2: Sequence[int] = (0, 1, 2),
    perm_y: Sequence[int] = (1, 0, 2),
    **rest: Any,
) -> torch.Tensor:
    """`npu_transpose_batchmatmul`: a matrix product for each batch, of and into permuted dimensions."""
    refuse("npu_transpose_batchmatmul", rest)
    orders = list(perm_x1), list(perm_x2), list(perm_y)
    batch, rows, columns = x.shape[orders[0][0]], x.shape[orders[0][1]], weight.shape[orders[1][2]]
    out = x.new_empty([(batch, rows, columns)[dimension] for dimension in orders[2]])
    launch("TransposeBatchMatMul", compute_batches, x, weight, out, *orders)
    return out


def compute_batches(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, of_x: list[int], of_weight: list[int], of_out: list[int]
) -> None:
    """Multiply what is permuted."""
    out.copy_(torch.bmm(x.double().permute(of_x), weight.double().permute(of_weight)).permute(of_out))
