"""The operator that prepares latent attention of any number of tokens, from int8 by token.

See attention.py for how operators are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from standin_ascend.attention import rotate_interleaved
from standin_ascend.byte_caches import TILE, pack
from standin_ascend.kernels import launch, refuse
from standin_ascend.quantized import compute_product, compute_quantization
from standin_ascend.sparse import compute_scatter

UNQUANTIZED, ALL_QUANTIZED, BY_TILE = 0, 2, 3  # weights, and caches
CACHE_MODES = ((UNQUANTIZED, 0, 0), (BY_TILE, 1, 1))  # what a cache has is in rows of its own, or all in one


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
    kv_cache_quant_mode: int = UNQUANTIZED,
    ckvkr_repo_mode: int = 0,
    quant_scale_repo_mode: int = 0,
    tile_size: int = TILE,
    k_nope_clip_alpha: torch.Tensor | None = None,
    dequant_scale_x: torch.Tensor | None = None,
    dequant_scale_w_dq: torch.Tensor | None = None,
    dequant_scale_w_uq_qr: torch.Tensor | None = None,
    dequant_scale_w_dkv_kr: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, ...]:
    """`npu_mla_prolog_v3`: queries of latent attention, and its keys into their caches, of int8 tokens and weights.

    Returns queries [tokens, heads, latent] and their rotary parts, and, with *query_norm_flag*, the normed latent of
    queries in int8 with the scale of each token [tokens, 1], which an indexer reads. A quantized cache has latents in
    int8, rotary parts and scales in one row; *k_nope_clip_alpha* is what a tile's largest value is multiplied by.
    """
    scales = dequant_scale_x, dequant_scale_w_dq, dequant_scale_w_uq_qr, dequant_scale_w_dkv_kr
    modes = cache_mode, weight_quant_mode, token_x.dim()
    cache_modes = kv_cache_quant_mode, ckvkr_repo_mode, quant_scale_repo_mode
    known = modes == ("PA_BSND", ALL_QUANTIZED, 2) and cache_modes in CACHE_MODES
    if not known or any(scale is None for scale in scales):
        raise NotImplementedError(f"npu_mla_prolog_v3: modes {modes}, of caches {cache_modes}")
    refuse("npu_mla_prolog_v3", rest)
    tokens, heads = token_x.shape[0], weight_uk.shape[0]
    query = weight_uk.new_empty(tokens, heads, weight_uk.shape[2])
    rope = weight_uk.new_empty(tokens, heads, rope_sin.shape[1])
    latent = token_x.new_empty(tokens, weight_dq.shape[1])
    latent_scales = token_x.new_empty(tokens, 1, dtype=torch.float32)
    weights = [weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr]
    norms = [rmsnorm_gamma_cq, rmsnorm_gamma_ckv]
    out = [query, rope, latent, latent_scales]
    caches = [kv_cache, kr_cache, cache_index, k_nope_clip_alpha]
    tables, epsilons = [rope_cos, rope_sin], (rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv)
    inputs = token_x, weights, list(scales), norms, tables
    launch("MlaPrologV3", compute_queries_and_keys, *inputs, caches, out, epsilons, tile_size)
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
    tile: int,
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
    cache, rope_cache, slots, clip = caches
    places = slots.view(-1, 1)
    if cache.dtype == torch.int8:
        compute_scatter(cache.view(-1, cache.shape[-1]), places, pack(own, key_ropes.to(query.dtype), tile, clip))
        return
    for each, part in ((cache, own), (rope_cache, key_ropes)):
        compute_scatter(each.view(-1, part.shape[-1]), places, part.to(each.dtype))


def multiply(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Multiply int8 [tokens, in] by int8 [in, out], by the scales of both -> float32."""
    product = torch.empty(x.shape[0], weight.shape[1])
    compute_product(x, weight, scale.flatten(), tokens, None, product)
    return product


def normalize(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divide by the root of the mean square, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * gamma.float()
