"""The operator of Kimi-K3's activation (SiTU) in int8: both factors of SwiGLU are limited softly, by tanh."""

from __future__ import annotations

import torch
from standin_ascend.kernels import launch
from standin_ascend.quantized import compute_quantization

SCHEMA = (  # vllm-ascend's own
    "dequant_situ_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None,"
    " Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, float beta=1.0,"
    ' float linear_beta=0.0, bool activate_left=True, str quant_mode="dynamic") -> (Tensor y, Tensor scale)'
)


def activate_product(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    beta: float = 1.0,
    linear_beta: float = 0.0,
    activate_left: bool = True,
    quant_mode: str = "dynamic",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dequant_situ_quant`: SiTU of a product in int32 [tokens, 2 x inner], quantized by row.

    Args:
        weight_scale: scales of the columns [2 x inner].
        activation_scale: scales of the rows [tokens].
        beta: limit of the first factor, which is gated by its sigmoid.
        linear_beta: limit of the second; none if it is 0.
    """
    others = bias, quant_scale, quant_offset, group_index
    is_known = weight_scale is not None and activation_scale is not None and activate_left and quant_mode == "dynamic"
    if any(each is not None for each in others) or not is_known:
        raise NotImplementedError(f"dequant_situ_quant but of a product in int32 by scales of both, mode {quant_mode}")
    out = x.new_empty(x.shape[0], x.shape[1] // 2, dtype=torch.int8)
    scales = x.new_empty(x.shape[0], dtype=torch.float32)
    launch("DequantSituQuant", compute_activation, x, weight_scale, activation_scale, out, scales, beta, linear_beta)
    return out, scales


def compute_activation(
    x: torch.Tensor,
    by_column: torch.Tensor,
    by_row: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
    beta: float,
    linear_beta: float,
) -> None:
    """Scale in float32; activate in float64, as in linear_attention.py; quantize in float32."""
    gate, up = (x.float() * by_column.float() * by_row.float()[:, None]).double().chunk(2, -1)
    gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    up = linear_beta * torch.tanh(up / linear_beta) if linear_beta else up
    compute_quantization((gate * up).float(), out, scales)
