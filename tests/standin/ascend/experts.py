"""Operators of a mixture of experts on one rank: choose, sort tokens by expert, multiply by group, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from standin_ascend.kernels import launch, refuse
from standin_ascend.quantized import (
    COUNTS,
    CUMULATED,
    INT8,
    compute_group_products,
    compute_int4_products,
    compute_quantization,
    find_ends,
    find_type,
    split_experts,
)

SOFTMAX, SIGMOID = 0, 1  # norm type: the latter is DeepSeek-V3's gate
BEST, SUM_OF_TWO = 0, 1  # group select mode: a group's score is its best, or the sum of its two best
AS_IT_IS, BY_TOKEN = -1, 1  # quantization mode


def choose_experts(
    x: torch.Tensor,
    k: int,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    bias_opt: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`moe_gating_top_k`: weights and numbers of the best experts [tokens, k] by logits *x* [tokens, experts]."""
    if norm_type not in (SOFTMAX, SIGMOID) or group_select_mode not in (BEST, SUM_OF_TWO):
        raise NotImplementedError(f"moe_gating_top_k: norm type {norm_type}, group select mode {group_select_mode}")
    weights = x.new_empty(x.shape[0], k)
    ids = x.new_empty(x.shape[0], k, dtype=torch.int32)
    scores = x.new_empty(x.shape, dtype=torch.float32)
    options = k, k_group, group_count, group_select_mode, renorm, norm_type, routed_scaling_factor, eps
    launch("MoeGatingTopK", compute_choice, x, bias_opt, weights, ids, scores, options)
    return weights, ids, scores


def compute_choice(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    options: tuple[Any, ...],
) -> None:
    """Choose by score plus bias, within the best groups; weigh by the score alone."""
    k, k_group, groups, select_mode, renorm, norm_type, scale, eps = options
    scores.copy_(logits.float().sigmoid() if norm_type == SIGMOID else logits.float().softmax(-1))
    rated = scores if bias is None else scores + bias.float()
    if groups > 1:
        grouped = rated.unflatten(-1, (groups, -1))
        best = grouped.topk(2, -1).values.sum(-1) if select_mode == SUM_OF_TWO else grouped.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(k_group, -1).indices, True)
        rated = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    chosen = rated.topk(k, -1).indices
    shares = scores.gather(1, chosen)
    if norm_type == SIGMOID or renorm:
        shares = shares / (shares.sum(-1, keepdim=True) + eps)
    weights.copy_(shares * scale)
    ids.copy_(chosen)


def route(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    active_num: int = -1,
    quant_mode: int = -1,
    x_dtype: Any = None,
    **rest: Any,
) -> tuple[torch.Tensor, ...]:
    """`npu_moe_init_routing_v2`: a row of *x* [tokens, hidden] for each choice, sorted by expert; where they went.

    Rows are quantized on their way, or are quantized already and take their scales [tokens] with them.
    """
    refuse("npu_moe_init_routing_v2", rest, "expert_tokens_num_flag")
    rows = expert_idx.numel()
    if active_num not in (-1, rows) or expert_tokens_num_type not in (CUMULATED, COUNTS):
        raise NotImplementedError(f"npu_moe_init_routing_v2: {active_num} rows, told as {expert_tokens_num_type}")
    if quant_mode not in (AS_IT_IS, BY_TOKEN) or (quant_mode == BY_TOKEN and scale is not None) or x_dtype not in INT8:
        raise NotImplementedError(f"npu_moe_init_routing_v2: quant_mode {quant_mode}, scale {scale}, x {x_dtype}")
    first, last = list(active_expert_range) or (0, expert_num)
    out = x.new_empty(rows, x.shape[1], dtype=torch.int8 if quant_mode == BY_TOKEN else x.dtype)
    places = x.new_empty(rows, dtype=torch.int32)
    counts = x.new_empty(last - first, dtype=torch.int64)
    scales = x.new_empty(rows, dtype=torch.float32)
    settings = first, last, row_idx_type, expert_tokens_num_type
    launch("MoeInitRoutingV2", compute_route, x, expert_idx, scale, out, places, counts, scales, *settings)
    return out, places, counts, scales


def compute_route(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    given_scales: torch.Tensor | None,
    out: torch.Tensor,
    places: torch.Tensor,
    counts: torch.Tensor,
    scales: torch.Tensor,
    first: int,
    last: int,
    row_idx_type: int,
    count_type: int,
) -> None:
    """Sort choices of experts [first, last); others come last, as zeros, and have place -1."""
    experts = expert_idx.reshape(-1).long()
    here = (experts >= first) & (experts < last)
    order = torch.where(here, experts, torch.iinfo(torch.int64).max).argsort(stable=True)
    number = int(here.sum())
    rows = order // expert_idx.shape[1]
    if given_scales is not None:
        scales.copy_(given_scales.reshape(-1)[rows])
    if out.dtype == x.dtype:
        out.copy_(x[rows])
    else:
        compute_quantization(x[rows], out, scales)
    out[number:] = 0
    if row_idx_type == 0:
        places.fill_(-1)
        places[order[:number]] = torch.arange(number, dtype=torch.int32)
    else:
        places.copy_(order)
    found = torch.bincount(experts[here] - first, minlength=last - first)
    counts.copy_(found if count_type == COUNTS else found.cumsum(0))


def multiply_groups(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    group_list: torch.Tensor,
    bias: Sequence[torch.Tensor] | None = None,
    scale: Sequence[torch.Tensor] | None = None,
    per_token_scale: Sequence[torch.Tensor] | None = None,
    group_list_type: int = 0,
    group_type: int = -1,
    output_dtype: Any = None,
    **rest: Any,
) -> list[torch.Tensor]:
    """`npu_grouped_matmul`: the rows of each expert times its matrix; rows beyond the last group give zeros.

    Of int8, each product is scaled by column (*scale* [experts, out]) and by row (*per_token_scale* [rows]). Matrices
    of int32 hold int4; see `compute_int4_products`, whose assists are the *bias*.
    """
    refuse("npu_grouped_matmul", rest, "split_item")
    if len(x) != 1 or group_type != 0 or group_list_type not in (CUMULATED, COUNTS):
        raise NotImplementedError(f"npu_grouped_matmul: groups of type {group_type}, told as {group_list_type}")
    is_int4 = weight[0].dtype == torch.int32
    if (bias is not None) != is_int4:
        raise NotImplementedError(f"npu_grouped_matmul of {weight[0].dtype} {'with' if bias else 'without'} a bias")
    weights = weight[0] if weight[0].dim() == 3 else list(weight)
    if x[0].dtype != torch.int8:
        if scale or per_token_scale:
            raise NotImplementedError(f"npu_grouped_matmul of {x[0].dtype} with scales")
        out = x[0].new_empty(x[0].shape[0], weight[0].shape[-1])
        launch("GroupedMatmul", compute_groups, x[0], weights, group_list, out, group_list_type)
        return [out]
    scales = scale and (list(scale[0]) if scale[0].dim() == 2 else list(scale))
    rows = None if per_token_scale is None else per_token_scale[0]
    columns = weight[0].shape[-1] * (8 if is_int4 else 1)
    out = x[0].new_empty(x[0].shape[0], columns, dtype=find_type(output_dtype))
    if bias is not None and scale is not None:
        experts = weights, split_experts(scale), split_experts(bias)
        launch("GroupedMatmul", compute_int4_groups, x[0], *experts, group_list, rows, out, group_list_type)
    else:
        launch("GroupedMatmul", compute_integer_groups, x[0], weights, group_list, scales, rows, out, group_list_type)
    return [out]


def compute_groups(x: torch.Tensor, weights: Any, groups: torch.Tensor, out: torch.Tensor, count_type: int) -> None:
    """Multiply group by group."""
    out.zero_()
    first = 0
    for expert, last in enumerate(find_ends(groups, count_type)):
        out[first:last] = (x[first:last].double() @ weights[expert].double()).to(out.dtype)  # see compute_attention
        first = last


def compute_integer_groups(
    x: torch.Tensor,
    weights: Any,
    groups: torch.Tensor,
    scales: Any,
    token_scales: torch.Tensor | None,
    out: torch.Tensor,
    count_type: int,
) -> None:
    """Multiply integers group by group."""
    compute_group_products(x, weights, find_ends(groups, count_type), scales, token_scales, out)


def compute_int4_groups(
    x: torch.Tensor,
    weights: Any,
    scales: Any,
    assists: Any,
    groups: torch.Tensor,
    token_scales: torch.Tensor,
    out: torch.Tensor,
    count_type: int,
) -> None:
    """Multiply int8 by int4 group by group."""
    compute_int4_products(x, weights, find_ends(groups, count_type), scales, assists, token_scales, out)


def permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_moe_token_permute`: a row for each choice, sorted by expert, and where each choice went."""
    rows = indices.numel()
    if padded_mode or num_out_tokens not in (None, 0, rows):
        raise NotImplementedError(f"npu_moe_token_permute: {num_out_tokens} of {rows} rows")
    out, places = tokens.new_empty(rows, tokens.shape[1]), tokens.new_empty(rows, dtype=torch.int32)
    launch("MoeTokenPermute", compute_permute, tokens, indices, out, places)
    return out, places


def compute_permute(tokens: torch.Tensor, indices: torch.Tensor, out: torch.Tensor, places: torch.Tensor) -> None:
    """Sort choices by expert; rows of one expert stay in order."""
    order = indices.reshape(-1).argsort(stable=True)
    out.copy_(tokens[order // (indices.numel() // max(tokens.shape[0], 1) or 1)])
    places[order] = torch.arange(order.numel(), dtype=torch.int32)


def unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> torch.Tensor:
    """`npu_moe_token_unpermute`: the weighted sum of each token's rows."""
    if padded_mode:
        raise NotImplementedError("npu_moe_token_unpermute: padded mode")
    choices = 1 if probs is None else probs.shape[1]
    out = permuted_tokens.new_empty(sorted_indices.numel() // choices, permuted_tokens.shape[1])
    launch("MoeTokenUnpermute", compute_unpermute, permuted_tokens, sorted_indices, probs, out)
    return out


def compute_unpermute(
    permuted: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Take each choice's row from its place; those of other ranks have weight 0, so any row will do."""
    if weights is None:
        out.copy_(permuted[places.long()])
    else:
        # Other ranks' places are -1, or, as vllm-ascend gives absolute values, 1, which a single row does not have.
        # Weight 0 leaves them out: row 1 may be padding, which vllm-ascend does not compute, and NaN times 0 is NaN.
        elsewhere = weights.reshape(-1) == 0
        rows = permuted[places.long().masked_fill(elsewhere, 0)].float().masked_fill(elsewhere[:, None], 0)
        out.copy_((rows.view(*weights.shape, rows.shape[1]) * weights.float()[..., None]).sum(1))
