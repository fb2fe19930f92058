"""Operators of sparse attention (DeepSeek V3.2, GLM-5): an indexer chooses keys, and attention sees no others.

See attention.py for how they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from standin_ascend.attention import rotate_interleaved
from standin_ascend.kernels import launch, refuse
from standin_ascend.quantized import compute_product, compute_quantization

ATTENTION_SCHEMA = (  # vllm-ascend's own
    "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, *,"
    " Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None,"
    " Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND',"
    " str layout_kv='BSND', int sparse_mode=3, int pre_tokens=9223372036854775807,"
    " int next_tokens=9223372036854775807, int attention_mode=2, bool return_softmax_lse=False)"
    " -> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)"
)
CAUSAL = 3  # sparse mode: the last query sees all keys
ABSORBED = 2  # attention mode: the latent is key and value, and rotary parts come apart
NO_KEY = -1
UNQUANTIZED, ALL_QUANTIZED = 0, 2  # weights of the prolog


def choose_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_key: torch.Tensor,
    block_table: torch.Tensor,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = CAUSAL,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_lightning_indexer`: positions of the best keys of each query [queries, 1, count], -1 after them.

    Queries are [queries, heads, size], weights [queries, heads], and keys a cache [blocks, block size, 1, size].
    """
    if (layout_query, layout_key, sparse_mode) != ("TND", "PA_BSND", CAUSAL):
        raise NotImplementedError(f"npu_lightning_indexer: layouts {layout_query}, {layout_key}, mode {sparse_mode}")
    refuse("npu_lightning_indexer", rest)
    out = query.new_empty(query.shape[0], key.shape[2], sparse_count, dtype=torch.int32)
    lengths = actual_seq_lengths_query, actual_seq_lengths_key
    launch("LightningIndexer", compute_choice, query, key, weights, block_table, *lengths, out)
    return out, query.new_empty(0)


def compute_choice(
    query: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    query_ends: torch.Tensor,
    key_lengths: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Choose by weighted sums of what is positive in each head's product; of equal ones those that come first.

    Sums are made in float64 and rounded, so that what a query gets does not depend on how many there are.
    """
    out.fill_(NO_KEY)
    for queries, blocks, length in list_requests(query_ends, key_lengths, table, cache.shape[1]):
        keys = cache[blocks].flatten(0, 1)[:length, 0].double()
        products = (query[queries].double() @ keys.T).relu()  # [queries, heads, keys]
        scores = (products * weights[queries].double()[..., None]).sum(1).float()
        scores.masked_fill_(find_later(scores), -torch.inf)
        best = scores.sort(dim=-1, descending=True, stable=True)
        count = min(length, out.shape[-1])
        chosen = best.indices[:, :count].masked_fill(best.values[:, :count] == -torch.inf, NO_KEY)
        out[queries, 0, :count] = chosen.int()


def attend_to_chosen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor,
    actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_kv: torch.Tensor,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = CAUSAL,
    attention_mode: int = ABSORBED,
    return_softmax_lse: bool = False,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`npu_sparse_flash_attention`: attend to keys at *sparse_indices* [queries, 1, count] of each request's sequence.

    Queries are [queries, heads, size]; keys, which are values too, and rotary parts are caches [blocks, block size, 1,
    size].
    """
    layouts = layout_query, layout_kv, sparse_mode, attention_mode, sparse_block_size
    if layouts != ("TND", "PA_BSND", CAUSAL, ABSORBED, 1) or return_softmax_lse:
        raise NotImplementedError(f"npu_sparse_flash_attention: layouts and modes {layouts}, sums {return_softmax_lse}")
    if query_rope is None or key_rope is None or key.data_ptr() != value.data_ptr():
        raise NotImplementedError("npu_sparse_flash_attention without rotary parts, or with values of their own")
    refuse("npu_sparse_flash_attention", rest)
    out = torch.empty_like(query)
    inputs = query, query_rope, key, key_rope, sparse_indices, block_table
    lengths = actual_seq_lengths_query, actual_seq_lengths_kv
    launch("SparseFlashAttention", compute_attention, *inputs, *lengths, out, scale_value)
    return out, query.new_empty(0, dtype=torch.float32), query.new_empty(0, dtype=torch.float32)


def compute_attention(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    cache: torch.Tensor,
    rope_cache: torch.Tensor,
    indices: torch.Tensor,
    table: torch.Tensor,
    query_ends: torch.Tensor,
    key_lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Attend in float64, as `attention.compute_attention`; queries without keys give zeros."""
    out.zero_()
    for queries, blocks, length in list_requests(query_ends, key_lengths, table, cache.shape[1]):
        latents, ropes = (part[blocks].flatten(0, 1)[:length, 0].double() for part in (cache, rope_cache))
        parts = query[queries].double() @ latents.T + query_rope[queries].double() @ ropes.T
        scores = parts.transpose(0, 1) * scale  # [heads, queries, keys]
        chosen = indices[queries, 0].long()
        seen = scores.new_zeros(chosen.shape[0], length + 1, dtype=torch.bool)
        seen.scatter_(1, chosen.masked_fill((chosen < 0) | (chosen >= length), length), value=True)
        seen = seen[:, :length] & ~find_later(scores[0])
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        shares = shares.masked_fill(~seen.any(1)[:, None], 0)
        out[queries] = (shares @ latents).transpose(0, 1).to(out.dtype)


def list_requests(
    query_ends: torch.Tensor, key_lengths: torch.Tensor, table: torch.Tensor, block_size: int
) -> list[tuple[slice, torch.Tensor, int]]:
    """Return the queries of each request that has any, the blocks of its keys, and their number."""
    edges = pairwise([0, *query_ends.tolist()])
    return [
        (slice(first, last), table[request, : -(-length // block_size)].long(), length)
        for request, ((first, last), length) in enumerate(zip(edges, key_lengths.tolist(), strict=True))
        if last > first and length
    ]


def find_later(scores: torch.Tensor) -> torch.Tensor:
    """Return which keys come after a query [queries, keys]."""
    queries, keys = scores.shape
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)


def scatter(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """`npu_scatter_nd_update_`: write rows of *updates* to the rows of *input* at *indices* [rows, 1]."""
    if indices.dim() != 2 or indices.shape[1] != 1:
        raise NotImplementedError(f"npu_scatter_nd_update_ at indices {list(indices.shape)}")
    launch("ScatterNdUpdate", compute_scatter, input, indices, updates)
    return input


def compute_scatter(rows: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> None:
    """Leave out negative indices, which vllm-ascend has for padding."""
    places = indices[:, 0].long()
    rows[places[places >= 0]] = updates[places >= 0]


def prepare(
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    rmsnorm_gamma_cq: torch.Tensor,
    rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    *,
    cache_index: torch.Tensor,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    weight_quant_mode: int = UNQUANTIZED,
    dequant_scale_x: torch.Tensor | None = None,
    dequant_scale_w_dq: torch.Tensor | None = None,
    dequant_scale_w_uq_qr: torch.Tensor | None = None,
    dequant_scale_w_dkv_kr: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, ...]:
    """`npu_mla_prolog_v3`: queries of latent attention, and its keys into their caches, of int8 tokens and weights.

    Returns queries [tokens, heads, latent] and their rotary parts, and, with *query_norm_flag*, the normed latent of
    queries in int8 with the scale of each token [tokens, 1], which an indexer reads.
    """
    scales = dequant_scale_x, dequant_scale_w_dq, dequant_scale_w_uq_qr, dequant_scale_w_dkv_kr
    modes = cache_mode, weight_quant_mode, token_x.dim()
    if modes != ("PA_BSND", ALL_QUANTIZED, 2) or any(scale is None for scale in scales):
        raise NotImplementedError(f"npu_mla_prolog_v3: modes {modes}")
    refuse("npu_mla_prolog_v3", rest)
    tokens, heads = token_x.shape[0], weight_uk.shape[0]
    query = weight_uk.new_empty(tokens, heads, weight_uk.shape[2])
    rope = weight_uk.new_empty(tokens, heads, rope_sin.shape[1])
    latent = token_x.new_empty(tokens, weight_dq.shape[1])
    latent_scales = token_x.new_empty(tokens, 1, dtype=torch.float32)
    weights = [weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr]
    norms = [rmsnorm_gamma_cq, rmsnorm_gamma_ckv]
    out = [query, rope, latent, latent_scales]
    caches = [kv_cache, kr_cache, cache_index]
    tables, epsilons = [rope_cos, rope_sin], (rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv)
    launch(
        "MlaPrologV3", compute_queries_and_keys, token_x, weights, list(scales), norms, tables, caches, out, epsilons
    )
    if not query_norm_flag:
        latent, latent_scales = latent.new_empty(0), latent_scales.new_empty(0)
    return query, rope, query.new_empty(0, dtype=torch.float32), latent, latent_scales


def compute_queries_and_keys(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    norms: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    caches: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    epsilons: tuple[float, float],
) -> None:
    """Multiply, norm, quantize and rotate in float32, in the order in which unfused operators would."""
    (down, up, absorb, down_keys), (token, of_down, of_up, of_keys) = weights, scales
    query, rope, latent, latent_scales = out
    tokens = token.flatten()
    lower = multiply(x, down, of_down, tokens)
    compute_quantization(normalize(lower, norms[0], epsilons[0]), latent, latent_scales[:, 0])
    heads = multiply(latent, up, of_up, latent_scales[:, 0]).unflatten(-1, (query.shape[1], -1))
    plain, rotated = heads.to(query.dtype).split([absorb.shape[1], rope.shape[-1]], -1)
    query.copy_(torch.bmm(plain.double().transpose(0, 1), absorb.double()).transpose(0, 1))
    rope.copy_(rotate_interleaved(rotated[:, :, None], *tables)[:, :, 0])
    keys = multiply(x, down_keys, of_keys, tokens).to(query.dtype)
    own = normalize(keys[:, : norms[1].shape[0]], norms[1], epsilons[1])
    key_ropes = rotate_interleaved(keys[:, None, None, norms[1].shape[0] :], *tables)[:, 0, 0]
    slots = caches[2].view(-1)
    for cache, part in zip(caches, (own, key_ropes), strict=False):
        compute_scatter(cache.view(-1, part.shape[-1]), slots[:, None], part.to(cache.dtype))


def multiply(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Multiply int8 [tokens, in] by int8 [in, out], by the scales of both -> float32."""
    product = torch.empty(x.shape[0], weight.shape[1])
    compute_product(x, weight, scale.flatten(), tokens, None, product)
    return product


def normalize(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divide by the root of the mean square, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * gamma.float()
