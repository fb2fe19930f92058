"""Operators of quantized weights: int8 activations with scales by token, products of integers, and their fusions.

Products are sums of integers and exact, so a row is the same whatever rows come with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from standin_ascend.kernels import launch, refuse

INT8 = (None, 1, torch.int8)  # how the type is told: by default, by its number in torch, by torch's own
LARGEST = 127
CUMULATED, COUNTS = 0, 1  # how tokens of an expert are told: up to its end, or each number


def quantize_dynamically(
    input: torch.Tensor,
    *,
    dst_type: Any = None,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_dynamic_quant`: int8 of *input* [..., hidden], and the scale of each row [...]."""
    refuse("npu_dynamic_quant", rest)
    if dst_type not in INT8:
        raise NotImplementedError(f"npu_dynamic_quant to type {dst_type}")
    out = torch.empty_like(input, dtype=torch.int8)
    scales = input.new_empty(input.shape[:-1], dtype=torch.float32)
    launch("DynamicQuant", compute_quantization, input, out, scales)
    return out, scales


def compute_quantization(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Divide each row by its largest value, which becomes 127."""
    x = x.float()
    largest = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    scales.copy_(largest / LARGEST)
    out.copy_((x / scales.masked_fill(scales == 0, 1)[..., None]).round())


def quantize(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """`npu_quantize`: int8 of *input* [..., hidden] times *scales* [hidden] plus *zero_points* [hidden]."""
    if axis not in (-1, input.dim() - 1) or div_mode:
        raise NotImplementedError(f"npu_quantize: axis {axis}, division {div_mode}")
    out = torch.empty_like(input, dtype=torch.int8)
    launch("AscendQuantV3", compute_static_quantization, input, scales, zero_points, out)
    return out


def compute_static_quantization(
    x: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Scale, shift, round, and saturate."""
    shifted = x.float() * scales.float() + (0 if offsets is None else offsets.float())
    out.copy_(shifted.round().clamp(-LARGEST - 1, LARGEST))


def multiply(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: Any = None,
    **rest: Any,
) -> torch.Tensor:
    """`npu_quant_matmul`: int8 [..., tokens, in] times int8 [in, out], by the scales of both -> [..., tokens, out]."""
    refuse("npu_quant_matmul", rest)
    if x1.dtype != torch.int8 or x2.dtype != torch.int8 or scale.dtype == torch.int64:
        raise NotImplementedError(f"npu_quant_matmul of {x1.dtype} and {x2.dtype} with scales in {scale.dtype}")
    out = x1.new_empty(*x1.shape[:-1], x2.shape[-1], dtype=find_type(output_dtype))
    launch("QuantBatchMatmul", compute_product, x1, x2, scale, pertoken_scale, bias, out)
    return out


def compute_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    token_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Multiply integers exactly (they fit into float64), add a bias of integers, scale, and add another one."""
    product = x.double() @ weight.double()
    if bias is not None and bias.dtype == torch.int32:
        product += bias.double()
    if out.dtype == torch.int32:
        out.copy_(product)
        return
    scaled = product.float() * (1.0 if scale is None else scale.float())
    if token_scales is not None:
        scaled = scaled * token_scales.float()[..., None]
    out.copy_(scaled if bias is None or bias.dtype == torch.int32 else scaled + bias.float())


def compute_group_products(
    x: torch.Tensor,
    weights: Any,
    ends: Sequence[int],
    scales: Any,
    token_scales: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Multiply group by group, each that ends at a row by its matrix; rows beyond the last give zeros."""
    out.zero_()
    first = 0
    for expert, last in enumerate(ends):
        rows = slice(first, last)
        token_scale = None if token_scales is None else token_scales[rows]
        compute_product(x[rows], weights[expert], scales and scales[expert], token_scale, None, out[rows])
        first = last


def unpack(weight: torch.Tensor) -> torch.Tensor:
    """Return the int4 numbers [in, out] of which int32 holds eight [in, out / 8], the first in the lowest bits."""
    pairs = weight.contiguous().view(torch.int8)
    return torch.stack([(pairs << 4) >> 4, pairs >> 4], -1).flatten(-2)


def compute_int4_products(
    x: torch.Tensor,
    weights: Any,
    ends: Sequence[int],
    scales: Any,
    assists: Any,
    token_scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Multiply int8 by int4, group by group; rows beyond the last group give zeros.

    The kernel takes the lower half of each int8 less 8, so that it is int4, too. What that leaves out, 8 times the sum
    of a column, is in *assists*, scaled; scales are floats in the lower bits of int64.
    """
    out.zero_()
    first = 0
    for expert, last in enumerate(ends):
        rows, weight = slice(first, last), unpack(weights[expert]).double()
        scale = scales[expert].reshape(-1).to(torch.int32).view(torch.float32)
        product = (x[rows].double() @ weight - 8 * weight.sum(0)).float() * scale + assists[expert].reshape(-1)
        out[rows] = (product * token_scales[rows, None]).to(out.dtype)
        first = last


def multiply_int4_and_activate(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    weight_assist_matrix: Sequence[torch.Tensor] | None = None,
    group_list_type: int = 0,
    dequant_mode: int = 0,
    swiglu_limit: float = 0.0,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`grouped_matmul_swiglu_quant_v2` of int4 matrices: SwiGLU of each expert's rows, quantized by row."""
    refuse("grouped_matmul_swiglu_quant_v2", rest)
    if weight[0].dtype != torch.int32 or not weight_assist_matrix or dequant_mode:
        raise NotImplementedError(f"grouped_matmul_swiglu_quant_v2 of {weight[0].dtype}, mode {dequant_mode}")
    out = x.new_empty(x.shape[0], weight[0].shape[-1] * 4)
    scales = x.new_empty(x.shape[0], dtype=torch.float32)
    experts = [split_experts(each) for each in (weight, weight_scale, weight_assist_matrix)]
    tensors = x, *experts, x_scale, group_list, out, scales
    launch("GroupedMatmulSwigluQuantV2", compute_int4_activation, *tensors, group_list_type, swiglu_limit)
    return out, scales


def compute_int4_activation(
    x: torch.Tensor,
    weights: Any,
    scales: Any,
    assists: Any,
    token_scales: torch.Tensor,
    groups: torch.Tensor,
    out: torch.Tensor,
    out_scales: torch.Tensor,
    count_type: int,
    limit: float,
) -> None:
    """Multiply, activate and quantize in float32."""
    products = x.new_empty(x.shape[0], out.shape[1] * 2, dtype=torch.float32)
    compute_int4_products(x, weights, find_ends(groups, count_type), scales, assists, token_scales, products)
    compute_quantization(activate(products, limit), out, out_scales)


def split_experts(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a tensor for each expert: they come as one, or as a list."""
    return list(tensors[0]) if len(tensors) == 1 else list(tensors)


def find_ends(groups: torch.Tensor, count_type: int) -> list[int]:
    """Return the row at which each group ends."""
    ends: list[int] = (groups.cumsum(0) if count_type == COUNTS else groups).tolist()
    return ends


def multiply_and_activate(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    swiglu_limit: float = -1000000.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`grouped_matmul_swiglu_quant_weight_nz`: SwiGLU of each expert's rows [rows, 2 x inner], quantized by row."""
    if bias is not None or offset is not None:
        raise NotImplementedError("grouped_matmul_swiglu_quant_weight_nz with a bias or an offset")
    out = x.new_empty(x.shape[0], weight.shape[-1] // 2)
    scales = x.new_empty(x.shape[0], dtype=torch.float32)
    tensors = x, weight, weight_scale, x_scale, group_list, out, scales
    launch("GroupedMatmulSwigluQuant", compute_activation, *tensors, swiglu_limit)
    return out, scales, x.new_empty(0, dtype=torch.float32)


def multiply_each_and_activate(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`grouped_matmul_swiglu_quant_weight_nz_tensor_list`: the same with a matrix and scales of each expert."""
    if bias is not None or offset is not None:
        raise NotImplementedError("grouped_matmul_swiglu_quant_weight_nz_tensor_list with a bias or an offset")
    out = x.new_empty(x.shape[0], weight[0].shape[-1] // 2)
    scales = x.new_empty(x.shape[0], dtype=torch.float32)
    experts = list(weight), list(weight_scale)
    launch("GroupedMatmulSwigluQuant", compute_activation, x, *experts, x_scale, group_list, out, scales, swiglu_limit)
    return out, scales, x.new_empty(0, dtype=torch.float32)


def compute_activation(
    x: torch.Tensor,
    weights: torch.Tensor | list[torch.Tensor],
    scales: torch.Tensor | list[torch.Tensor],
    token_scales: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    out_scales: torch.Tensor,
    limit: float,
) -> None:
    """Multiply, activate and quantize in float32, group by group."""
    products = x.new_empty(x.shape[0], weights[0].shape[-1], dtype=torch.float32)
    compute_group_products(x, weights, ends.tolist(), list(scales), token_scales, products)
    compute_quantization(activate(products, limit), out, out_scales)


def activate(products: torch.Tensor, limit: float) -> torch.Tensor:
    """Return SwiGLU of rows [rows, 2 x inner], with both factors limited if *limit* is positive."""
    gate, up = products.chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def activate_product(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = True,
    quant_mode: int = 0,
    swiglu_mode: int = 0,
    clamp_limit: float = 0.0,
    glu_alpha: float = 1.0,
    glu_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_dequant_swiglu_quant`: SwiGLU of a product in int32 [tokens, 2 x inner], quantized by row.

    Mode 1 limits both factors, if there is a limit, sharpens the first by *glu_alpha* and shifts the second. With
    groups, *group_index* has their numbers of rows [groups], and *weight_scale* is [groups, 2 x inner].
    """
    others = bias, quant_scale, quant_offset
    if any(each is not None for each in others) or not (activate_left and quant_mode == 1):
        raise NotImplementedError(f"npu_dequant_swiglu_quant: modes {quant_mode} and {swiglu_mode}, or biases")
    options = (clamp_limit or torch.inf, glu_alpha, glu_bias) if swiglu_mode == 1 else (torch.inf, 1.0, 0.0)
    out = x.new_empty(x.shape[0], x.shape[1] // 2, dtype=torch.int8)
    scales = x.new_empty(x.shape[0], dtype=torch.float32)
    inputs = x, weight_scale, activation_scale, group_index
    launch("DequantSwigluQuant", compute_product_activation, *inputs, out, scales, *options)
    return out, scales


def compute_product_activation(
    x: torch.Tensor,
    scales: torch.Tensor,
    token_scales: torch.Tensor,
    groups: torch.Tensor | None,
    out: torch.Tensor,
    out_scales: torch.Tensor,
    limit: float,
    alpha: float,
    shift: float,
) -> None:
    """Scale, activate and quantize in float32; the exponential in float64, as in linear_attention.py."""
    if groups is not None:  # rows after the last group are padding, which nothing reads
        of_rows = scales.reshape(len(groups), -1).repeat_interleave(groups, dim=0)
        scales = torch.cat((of_rows, of_rows.new_zeros(len(x) - len(of_rows), of_rows.shape[1])))
    gate, up = (x.float() * scales.float() * token_scales.float()[:, None]).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    compute_quantization(gate * torch.sigmoid(alpha * gate.double()).float() * (up + shift), out, out_scales)


def find_type(number: Any) -> torch.dtype:
    """Return the type of a product: float16 if none is told, or by torch's number of it."""
    if isinstance(number, torch.dtype):
        return number
    types = {None: torch.float16, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
    if number not in types:
        raise NotImplementedError(f"a product of type {number}")
    return types[number]
