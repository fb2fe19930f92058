"""Operators of DeepSeek V4's layers around attention and experts: hyper-connections (mHC), and the router's norm.

A token has several residual streams. A part of the layer reads a mix of them, and each stream then gets a share of its
result and a mix of all streams, by a matrix that is made doubly stochastic (Sinkhorn). Read against vllm-ascend's own
tests of these operators.
"""

from __future__ import annotations

from typing import Any

import torch
from standin_ascend.kernels import launch
from standin_ascend.quantized import compute_quantization

SCHEMAS = (  # vllm-ascend's own
    "npu_hc_pre_v2(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, int hc_mult, int hc_sinkhorn_iters,"
    " float norm_eps, float hc_eps) -> (Tensor y, Tensor post, Tensor comb_frag)",
    "npu_hc_pre_v3(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, Tensor? pre_mix=None, *, int hc_mult=4,"
    " int hc_sinkhorn_iters=20, float norm_eps=1e-6, float hc_eps=1e-6)"
    " -> (Tensor y, Tensor post, Tensor comb_frag, Tensor pre)",
    "npu_hc_post(Tensor x, Tensor residual, Tensor post, Tensor comb) -> (Tensor out)",
    "npu_rms_norm_cast(Tensor x, Tensor gamma, float epsilon=1e-6) -> (Tensor y, Tensor y_fp32)",
    "npu_rms_norm_dynamic_quant(Tensor x, Tensor gamma, Tensor? smooth_scale=None, Tensor? beta=None,"
    " float epsilon=1e-6) -> (Tensor y_out, Tensor scale_out)",
)


def mix_streams(
    x: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    hc_mult: int,
    hc_sinkhorn_iters: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`npu_hc_pre_v2`: from streams *x* [tokens, streams, hidden], what a part of the layer reads [tokens, hidden].

    Also each stream's share of its result [tokens, streams], and how streams are mixed [tokens, streams, streams].
    """
    if x.dim() != 3 or x.shape[1] != hc_mult:
        raise NotImplementedError(f"npu_hc_pre_v2 of {list(x.shape)} with {hc_mult} streams")
    y = x.new_empty(x.shape[0], x.shape[2])
    post = x.new_empty(x.shape[0], hc_mult, dtype=torch.float32)
    comb = x.new_empty(x.shape[0], hc_mult, hc_mult, dtype=torch.float32)
    launch("HcPre", compute_mix, x, hc_fn, hc_scale, hc_base, y, post, comb, hc_sinkhorn_iters, norm_eps, hc_eps)
    return y, post, comb


def mix_streams_as_told(
    x: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    pre_mix: torch.Tensor | None = None,
    *,
    hc_mult: int = 4,
    hc_sinkhorn_iters: int = 20,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`npu_hc_pre_v3`: as `npu_hc_pre_v2`, but the part of the layer reads the mix *pre_mix* [tokens, streams].

    The shares that `npu_hc_pre_v2` would take are returned as well, for the next part.
    """
    if pre_mix is None or x.dim() != 3 or x.shape[1] != hc_mult:
        raise NotImplementedError(f"npu_hc_pre_v3 of {list(x.shape)} with {hc_mult} streams, mix {pre_mix is not None}")
    outputs = *shape_mix(x), torch.empty_like(pre_mix)
    options = hc_sinkhorn_iters, norm_eps, hc_eps
    launch("HcPre", compute_mix, x, hc_fn, hc_scale, hc_base, *outputs[:3], *options, pre_mix, outputs[3])
    return outputs


def shape_mix_as_told(x: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """Return what `mix_streams_as_told` would, without values."""
    return *shape_mix(x), x.new_empty(x.shape[:2], dtype=torch.float32)


def shape_mix(x: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `mix_streams` would, without values."""
    tokens, streams, hidden = x.shape
    shapes = (tokens, streams), (tokens, streams, streams)
    return x.new_empty(tokens, hidden), *(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


def compute_mix(
    x: torch.Tensor,
    weights: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    iterations: int,
    norm_eps: float,
    hc_eps: float,
    pre_mix: torch.Tensor | None = None,
    pre: torch.Tensor | None = None,
) -> None:
    """Norm the streams together, project them, and normalize the matrix by columns and rows in turn, in float64."""
    streams = x.shape[1]
    flat = x.double().flatten(1)
    mixes = (flat @ weights.double().T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    shares, results, matrix = mixes.split([streams, streams, streams * streams], dim=-1)
    own, others, square = base.double().split([streams, streams, streams * streams])
    shares = (shares * scale[0].double() + own).sigmoid() + hc_eps
    taken = shares if pre_mix is None else pre_mix.double()
    y.copy_((taken[..., None] * x.double()).sum(1))
    if pre is not None:
        pre.copy_(shares)
    post.copy_(2 * (results * scale[1].double() + others).sigmoid())
    mixed = (matrix * scale[2].double() + square).unflatten(-1, (streams, streams)).softmax(-1) + hc_eps
    mixed = mixed / (mixed.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        mixed = mixed / (mixed.sum(-1, keepdim=True) + hc_eps)
        mixed = mixed / (mixed.sum(-2, keepdim=True) + hc_eps)
    comb.copy_(mixed)


def spread_result(x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """`npu_hc_post`: streams [batch, tokens, streams, hidden] after a part of the layer has returned *x*."""
    out = torch.empty_like(residual)
    launch("HcPost", compute_spread, x, residual, post, comb, out)
    return out


def shape_spread(x: torch.Tensor, residual: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """Return what `spread_result` would, without values."""
    return torch.empty_like(residual)


def compute_spread(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, out: torch.Tensor
) -> None:
    """Add shares of the result to mixes of the streams before, in float64."""
    mixed = torch.einsum("btij,btih->btjh", comb.double(), residual.double())
    out.copy_(mixed + post.double()[..., None] * x.double()[..., None, :])


def norm_and_cast(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_rms_norm_cast`: the normed *x* [tokens, hidden], and the same after it is rounded, in float32."""
    out = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
    launch("RmsNormCast", compute_norm_and_cast, x, gamma, *out, epsilon)
    return out


def shape_norm_and_cast(x: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `norm_and_cast` would, without values."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)


def compute_norm_and_cast(
    x: torch.Tensor, gamma: torch.Tensor, normed: torch.Tensor, cast: torch.Tensor, epsilon: float
) -> None:
    """Norm in float64; the cast one is rounded, too."""
    normed.copy_(norm(x, gamma, epsilon))
    cast.copy_(normed)


def norm_and_quantize(
    x: torch.Tensor,
    gamma: torch.Tensor,
    smooth_scale: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_rms_norm_dynamic_quant`: int8 of the normed *x* [tokens, size], and the scale of each token."""
    if smooth_scale is not None or beta is not None:
        raise NotImplementedError("npu_rms_norm_dynamic_quant with smooth_scale or beta")
    out = torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)
    launch("RmsNormDynamicQuant", compute_norm_and_quantization, x, gamma, *out, epsilon)
    return out


def compute_norm_and_quantization(
    x: torch.Tensor, gamma: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, epsilon: float
) -> None:
    """Quantize what is normed, which is not rounded in between."""
    compute_quantization(norm(x, gamma, epsilon).float(), out, scales)


def norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divide by the root of the mean square, in float64."""
    rows = x.double()
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon) * gamma.double()
