"""What else vllm-ascend calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from standin_ascend.kernels import launch, refuse
from standin_ascend.vision import compute_rotation

QKV_SCHEMA = (  # vllm-ascend declares it where there is Triton
    "qkv_rmsnorm_rope(Tensor input, Tensor cos_sin_cache, Tensor positions, Tensor q_weight, Tensor k_weight,"
    " int q_hidden_size, int kv_hidden_size, int head_dim, float eps, Tensor? q_bias=None, Tensor? k_bias=None)"
    " -> (Tensor, Tensor, Tensor)"
)


def add_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`npu_add_rms_norm_bias`: the normed sum, its reciprocal deviations, and the sum."""
    normed, total = torch.empty_like(x1), torch.empty_like(x1)
    deviations = x1.new_empty(*x1.shape[:-1], 1, dtype=torch.float32)
    launch("AddRmsNormBias", compute_add_norm, x1, x2, gamma, beta, normed, deviations, total, epsilon)
    return normed, deviations, total


def shape_add_norm(x1: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `add_norm` would, without values."""
    return torch.empty_like(x1), x1.new_empty(*x1.shape[:-1], 1, dtype=torch.float32), torch.empty_like(x1)


def compute_add_norm(
    one: torch.Tensor,
    other: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    normed: torch.Tensor,
    deviations: torch.Tensor,
    total: torch.Tensor,
    epsilon: float,
) -> None:
    """Add, then divide by the root of the mean square, in float32; the sum is rounded to its type before."""
    total.copy_(one.float() + other.float())
    x = total.float()
    deviations.copy_(torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon))
    scaled = x * deviations * gamma.float()
    normed.copy_(scaled if beta is None else scaled + beta.float())


def norm_by_offset(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_gemma_rms_norm`: the normed *x*, whose weights are offsets from one, and its reciprocal deviations."""
    normed, deviations = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    launch("GemmaRmsNorm", compute_norm_by_offset, x, gamma, normed, deviations, epsilon)
    return normed, deviations


def compute_norm_by_offset(
    x: torch.Tensor, gamma: torch.Tensor, normed: torch.Tensor, deviations: torch.Tensor, epsilon: float
) -> None:
    """Divide by the root of the mean square, in float32."""
    rows = x.float()
    deviations.copy_(torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon))
    normed.copy_(rows * deviations * (1 + gamma.float()))


def rotate_by_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_mrope` of one position a token: queries and keys [tokens, heads * size], rotated by rows of the cache."""
    if any(mrope_section or ()) or positions.dim() != 1 or rotary_mode != "half" or cache_mode != "default":
        raise NotImplementedError(f"npu_mrope: sections {mrope_section}, mode {rotary_mode}, cache mode {cache_mode}")
    out = torch.empty_like(query), torch.empty_like(key)
    launch("RopeWithSinCosCacheV2", compute_cached_rotation, positions, [query, key], cos_sin_cache, head_size, out)
    return out


def compute_cached_rotation(
    positions: torch.Tensor,
    parts: Sequence[torch.Tensor],
    cache: torch.Tensor,
    head_size: int,
    out: Sequence[torch.Tensor],
) -> None:
    """Rotate the first values of each head, as many as a row of *cache* [positions, cosines and sines] is long."""
    cos, sin = (half.repeat(1, 2)[:, None] for half in cache[positions.long()].float().chunk(2, -1))
    for part, result in zip(parts, out, strict=True):
        heads, rotated = part.unflatten(-1, (-1, head_size)), result.unflatten(-1, (-1, head_size))
        rotated.copy_(heads)
        compute_rotation(heads[..., : cache.shape[1]], cos, sin, rotated[..., : cache.shape[1]])


def split_norm_rotate(
    input: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`qkv_rmsnorm_rope`: queries and keys of *input* [tokens, all], normed by head, then as `rotate_by_cache`; values.

    A row of *cos_sin_cache* [positions, rotated] is as long as the part of a head that is rotated.
    """
    if q_bias is not None or k_bias is not None:
        raise NotImplementedError("qkv_rmsnorm_rope with biases")
    out = [input.new_empty(input.shape[0], size) for size in (q_hidden_size, kv_hidden_size, kv_hidden_size)]
    settings = head_dim, eps
    launch("QkvRmsnormRope", compute_split, input, positions, cos_sin_cache, [q_weight, k_weight], out, *settings)
    return out[0], out[1], out[2]


def compute_split(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    weights: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    size: int,
    eps: float,
) -> None:
    """Norm and rotate in float32."""
    *parts, value = qkv.split([part.shape[1] for part in out], -1)
    for part, weight, result in zip(parts, weights, out[:2], strict=True):
        heads = part.float().unflatten(-1, (-1, size))
        normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.float()
        compute_cached_rotation(positions, [normed.flatten(1)], cache, size, [result])
    out[2].copy_(value)


def activate_clipped(
    x: torch.Tensor,
    *,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
    **rest: Any,
) -> torch.Tensor:
    """`npu_clipped_swiglu`: *x* [..., 2 x inner], whose first half gates the second -> [..., inner]."""
    if interleaved or dim not in (-1, x.dim() - 1):
        raise NotImplementedError(f"npu_clipped_swiglu: dimension {dim}, interleaved {interleaved}")
    refuse("npu_clipped_swiglu", rest)
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    launch("ClippedSwiglu", compute_clipped_activation, x, out, alpha, limit, bias)
    return out


def compute_clipped_activation(x: torch.Tensor, out: torch.Tensor, alpha: float, limit: float, bias: float) -> None:
    """Limit both halves, and compute the exponential in float64, as in linear_attention.py."""
    gate, up = x.double().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out.copy_(gate * torch.sigmoid(alpha * gate) * (up + bias))


def cast_format(x: torch.Tensor, acl_format: int, **rest: Any) -> torch.Tensor:
    """`npu_format_cast`: memory of the host has no formats."""
    refuse("npu_format_cast", rest)
    return x.view(x.shape)


def add_lists(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], *, alpha: float = 1) -> list[torch.Tensor]:
    """`_foreach_add`: sums of pairs."""
    out = [torch.empty_like(x) for x in one]
    launch("ForeachAddList", compute_sums, list(one), list(other), out, alpha)
    return out


def compute_sums(
    one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], out: Sequence[torch.Tensor], alpha: float
) -> None:
    """Add pair by pair."""
    for x, y, z in zip(one, other, out, strict=True):
        z.copy_(x + alpha * y)


def divide(x: torch.Tensor, other: Any, *, rounding_mode: str | None = None) -> torch.Tensor:
    """`div` by a tensor or a number, with rounding."""
    if rounding_mode is None:
        raise NotImplementedError("div.Tensor_mode without a rounding mode")
    shape = torch.broadcast_shapes(x.shape, getattr(other, "shape", ()))
    out = x.new_empty(shape, dtype=torch.result_type(x, other))
    launch("DivMod", compute_quotients, x, other, rounding_mode, out)
    return out


def compute_quotients(x: torch.Tensor, other: Any, rounding_mode: str, out: torch.Tensor) -> None:
    """Divide element by element."""
    out.copy_(torch.div(x, other, rounding_mode=rounding_mode))


def divide_into(x: torch.Tensor, other: Any, *, rounding_mode: str | None = None, out: torch.Tensor) -> torch.Tensor:
    """`div` with rounding, into a tensor of the same type."""
    if rounding_mode is None or out.dtype != torch.result_type(x, other):
        raise NotImplementedError(f"div.out_mode in mode {rounding_mode} to {out.dtype}")
    launch("DivMod", compute_quotients, x, other, rounding_mode, out)
    return out


def repeat(x: torch.Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None) -> torch.Tensor:
    """`repeat_interleave` of all elements, or of those of the last dimension, each so many times."""
    if dim not in (None, -1, x.dim() - 1):
        raise NotImplementedError(f"repeat_interleave in dimension {dim}")
    out = x.new_empty(x.numel() * repeats if dim is None else (*x.shape[:-1], x.shape[-1] * repeats))
    launch("RepeatInterleave", compute_repeats, x, out)
    return out


def compute_repeats(x: torch.Tensor, out: torch.Tensor) -> None:
    """Copy each element to its places, which are next to each other, row by row."""
    out.view(-1).copy_(x.reshape(-1).repeat_interleave(out.numel() // max(x.numel(), 1)))
