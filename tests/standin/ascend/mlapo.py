"""The operator that prepares latent attention of few tokens, from static int8 (`enable_mlapo`).

See attention.py for how operators are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from standin_ascend.kernels import launch
from standin_ascend.prolog import normalize
from standin_ascend.quantized import compute_product, compute_static_quantization
from standin_ascend.sparse import compute_scatter
from standin_ascend.vision import compute_rotation

SCHEMA = (  # vllm-ascend's own
    "mla_preprocess(Tensor hiddenState, Tensor wdqkv, Tensor? descale0, Tensor gamma1, Tensor? beta1, Tensor wuq,"
    " Tensor? descale1, Tensor gamma2, Tensor? cos, Tensor? sin, Tensor wuk, Tensor kv_cache, Tensor kv_cache_rope,"
    " Tensor slotmapping, Tensor? quant_scale0, Tensor? quant_offset0, Tensor? bias0, Tensor? quant_scale1,"
    " Tensor? quant_offset1, Tensor? bias1, Tensor? ctkv_scale, Tensor? q_nope_scale, str? cache_mode,"
    " str? quant_mode, bool? enable_inner_out, Tensor(a!) q_out0, Tensor(b!) kv_cache_out0, Tensor(c!) q_out1,"
    " Tensor(d!) kv_cache_out1, Tensor(e!) inner_out) -> ()"
)
EPSILON = 1e-6  # of both norms
MODES = ("krope_ctkv", "per_tensor_quant_asymm", True)


def prepare(
    hiddenState: torch.Tensor,
    wdqkv: torch.Tensor,
    descale0: torch.Tensor,
    gamma1: torch.Tensor,
    beta1: torch.Tensor,
    wuq: torch.Tensor,
    descale1: torch.Tensor,
    gamma2: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    wuk: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_rope: torch.Tensor,
    slotmapping: torch.Tensor,
    quant_scale0: torch.Tensor,
    quant_offset0: torch.Tensor,
    bias0: torch.Tensor,
    quant_scale1: torch.Tensor,
    quant_offset1: torch.Tensor,
    bias1: torch.Tensor,
    ctkv_scale: torch.Tensor | None,
    q_nope_scale: torch.Tensor | None,
    cache_mode: str | None,
    quant_mode: str | None,
    enable_inner_out: bool | None,
    q_out0: torch.Tensor,
    kv_cache_out0: torch.Tensor,
    q_out1: torch.Tensor,
    kv_cache_out1: torch.Tensor,
    inner_out: torch.Tensor,
) -> None:
    """`mla_preprocess`: queries [tokens, heads, latent], their rotary parts and their latent; keys into their caches.

    Matrices are cut into columns of 32: [1, in / 32, out, 32]. The first has keys before queries; rotated pairs lie in
    two halves. The last two scales are of caches in int8.
    """
    if (cache_mode, quant_mode, enable_inner_out) != MODES:
        raise NotImplementedError(f"mla_preprocess: modes {cache_mode}, {quant_mode}, latent {enable_inner_out}")
    first = wdqkv, bias0, descale0, quant_scale0, quant_offset0
    second = wuq, bias1, descale1, quant_scale1, quant_offset1
    norms, tables = (gamma1, beta1, gamma2), (cos, sin)
    places, out = (kv_cache, kv_cache_rope, slotmapping), (q_out0, q_out1, inner_out)
    launch("MlaPreprocess", compute, hiddenState, first, second, wuk, norms, tables, places, out)


def compute(
    x: torch.Tensor,
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    absorb: torch.Tensor,
    norms: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
) -> None:
    """Quantize, multiply, norm and rotate in float32."""
    (gamma, beta, gamma_keys), (query, rope, latent), (cache, rope_cache, slots) = norms, out, places
    cos, sin = (table.reshape(-1, 1, rope.shape[-1]) for table in tables)
    keys, lower = multiply(x, *first).split([gamma_keys.shape[0] + rope.shape[-1], gamma.shape[0]], -1)
    latent.copy_(normalize(lower, gamma, EPSILON) + beta.float())
    heads = multiply(latent, *second).unflatten(-1, (query.shape[1], -1))
    plain, rotated = heads.split([absorb.shape[1], rope.shape[-1]], -1)
    query.copy_(torch.bmm(plain.double().transpose(0, 1), absorb.double()).transpose(0, 1))
    compute_rotation(rotated, cos, sin, rope)
    own, key_rope = keys.split([gamma_keys.shape[0], rope.shape[-1]], -1)
    turned = torch.empty_like(key_rope)
    compute_rotation(key_rope[:, None], cos, sin, turned[:, None])
    for there, part in ((cache, normalize(own, gamma_keys, EPSILON)), (rope_cache, turned)):
        compute_scatter(there.view(-1, part.shape[-1]), slots.view(-1, 1), part.to(there.dtype))


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    scales: torch.Tensor,
    input_scale: torch.Tensor,
    input_offset: torch.Tensor,
) -> torch.Tensor:
    """Quantize *x* [tokens, in] by one scale, and multiply [tokens, out] by an int8 matrix that is cut into columns."""
    integers = torch.empty(x.shape, dtype=torch.int8)
    compute_static_quantization(x, 1 / input_scale.float(), input_offset, integers)
    whole = weight[0].transpose(0, 1).flatten(1)
    out = torch.empty(x.shape[0], scales.shape[0], dtype=x.dtype)
    compute_product(integers, whole.T, scales, None, bias, out)
    return out
