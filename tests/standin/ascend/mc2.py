"""Operators whose kernels communicate with other ranks: MC2's dispatch and combine, and experts with both around them.

Each rank lays what it has before all, and takes from all what is for it. A row is computed by itself, and a token's
results are added in the order of its choices.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from standin_ascend.kernels import launch, refuse
from standin_ascend.quantized import (
    COUNTS,
    CUMULATED,
    activate,
    compute_group_products,
    compute_quantization,
    split_experts,
)

AS_IT_IS, BY_TOKEN = 0, 2  # quantization mode of a dispatch
FUSED_SCHEMA = (
    "dispatch_ffn_combine(Tensor x, Tensor[] weight1, Tensor[] weight2, Tensor expert_idx, Tensor[] scale1,"
    " Tensor[] scale2, Tensor[] bias1, Tensor[] bias2, Tensor probs, str group, int max_output_size, Tensor(a!) out,"
    " Tensor(b!) expert_token_nums, Tensor? x_active_mask=None, float swiglu_limit=1000000.0, int world_size=0)"
    " -> (Tensor out, Tensor expert_token_nums)"
)


@dataclass(frozen=True)
class Kernel:
    """A kernel that communicates: its name, its group's, and how many ranks that has."""

    name: str
    group: str
    ranks: int

    def exchange(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, as large as *mine* [...] -> [ranks, ...]. Other threads run meanwhile."""
        mine = mine.contiguous()
        everything = mine.new_empty(self.ranks, *mine.shape)
        size = mine.numel() * mine.element_size()
        name, group = self.name.encode(), self.group.encode()
        if _load().standin_exchange(group, name, mine.data_ptr(), size, everything.data_ptr()):
            raise RuntimeError(f"{self.name}: the exchange between ranks has failed")
        return everything

    def find_rank(self) -> int:
        """Return this process's rank in the group."""
        return int(_load().standin_find_rank(self.group.encode()))


@functools.cache
def _load() -> Any:
    hccl = ctypes.CDLL("libhccl.so")  # the stand-in, which is loaded
    text, pointer = ctypes.c_char_p, ctypes.c_void_p
    hccl.standin_exchange.argtypes = text, text, pointer, ctypes.c_uint64, pointer
    return hccl


def dispatch(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: torch.Tensor | None = None,
    quant_mode: int = 0,
    expert_token_nums_type: int = 1,
    **rest: Any,
) -> tuple[torch.Tensor, ...]:
    """`npu_moe_distribute_dispatch_v2`: rows of all ranks' tokens for this rank's experts, by expert, rank and token.

    Each rank gives as many tokens, and those that are not active are not sent. What is beyond the rows that arrive is
    not written.
    """
    refuse("npu_moe_distribute_dispatch_v2", rest, "group_tp", "tp_world_size")
    if quant_mode not in (AS_IT_IS, BY_TOKEN) or expert_token_nums_type not in (CUMULATED, COUNTS):
        raise NotImplementedError(f"npu_moe_distribute_dispatch_v2: modes {quant_mode}, {expert_token_nums_type}")
    here = moe_expert_num // ep_world_size
    most = x.shape[0] * ep_world_size * min(here, expert_ids.shape[1])
    rows = x.new_empty(most, x.shape[1], dtype=torch.int8 if quant_mode else x.dtype)
    scales = x.new_empty(most, dtype=torch.float32)
    origins = x.new_empty(most * 3, dtype=torch.int32)
    counts = x.new_empty(here, dtype=torch.int64)
    received = x.new_empty(here * ep_world_size, dtype=torch.int32)
    kernel = Kernel("MoeDistributeDispatchV2", group_ep, ep_world_size)
    outputs = rows, scales, origins, counts, received
    launch(
        kernel.name, compute_dispatch, kernel, ep_rank_id, x, expert_ids, x_active_mask, outputs, expert_token_nums_type
    )
    return rows, scales, origins, counts, received, x.new_empty(1, dtype=torch.int32), x.new_empty(0)


def compute_dispatch(
    kernel: Kernel,
    rank: int,
    x: torch.Tensor,
    ids: torch.Tensor,
    active: torch.Tensor | None,
    outputs: Sequence[torch.Tensor],
    count_type: int,
) -> None:
    """Send tokens, quantize them, and sort the choices of this rank's experts."""
    rows, scales, origins, counts, received = outputs
    found = torch.empty_like(x, dtype=rows.dtype)
    found_scales = x.new_zeros(x.shape[0], dtype=torch.float32)
    if rows.dtype == torch.int8:
        compute_quantization(x, found, found_scales)
    else:
        found.copy_(x)
    tokens, token_scales = kernel.exchange(found), kernel.exchange(found_scales)
    chosen = list_choices(kernel.exchange(hide_inactive(ids, active)), counts.numel(), rank)
    number = len(chosen)
    sources, places = chosen[:, 1], chosen[:, 2] // ids.shape[1]
    rows[:number] = tokens[sources, places]
    scales[:number] = token_scales[sources, places]
    origins.view(-1, 3)[:number] = torch.stack([sources, places, chosen[:, 2] % ids.shape[1]], 1).int()
    by_expert = torch.bincount(chosen[:, 0], minlength=counts.numel())
    counts.copy_(by_expert if count_type == COUNTS else by_expert.cumsum(0))
    pairs = torch.bincount(chosen[:, 0] * kernel.ranks + sources, minlength=received.numel())
    received.copy_(pairs.cumsum(0))


def hide_inactive(ids: torch.Tensor, active: torch.Tensor | None) -> torch.Tensor:
    """Return the experts [tokens, choices], -1 for tokens that are not active."""
    return ids.int() if active is None else ids.int().masked_fill(~active.bool()[:, None], -1)


def list_choices(ids: torch.Tensor, here: int, rank: int) -> torch.Tensor:
    """Return (expert, rank, number of the choice there) of those for *rank*'s experts, in that order [choices, 3].

    *ids* are those of all ranks [ranks, tokens, choices], and *here* is how many experts a rank has.
    """
    experts = ids.flatten(1).long() - rank * here
    sources, numbers = ((experts >= 0) & (experts < here)).nonzero(as_tuple=True)
    found = torch.stack([experts[sources, numbers], sources, numbers], 1)
    return found[found[:, 0].argsort(stable=True)]


def combine(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    assist_info_for_combine: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: torch.Tensor | None = None,
    **rest: Any,
) -> torch.Tensor:
    """`npu_moe_distribute_combine_v2`: the weighted sum of each token's results; of inactive tokens, nothing."""
    refuse("npu_moe_distribute_combine_v2", rest, "group_tp", "tp_world_size", "tp_send_counts", "expand_scales")
    out = expand_x.new_full((expert_ids.shape[0], expand_x.shape[1]), torch.nan)
    kernel = Kernel("MoeDistributeCombineV2", group_ep, ep_world_size)
    tensors = expand_x, assist_info_for_combine, ep_send_counts, expert_ids, expert_scales, x_active_mask, out
    launch(kernel.name, compute_combine, kernel, ep_rank_id, *tensors)
    return out


def compute_combine(
    kernel: Kernel,
    rank: int,
    rows: torch.Tensor,
    origins: torch.Tensor,
    received: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    active: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Send results back to where `compute_dispatch` had their rows from."""
    number = int(received[-1])
    told = torch.cat([origins.view(-1, 3)[:number].long(), torch.full((len(rows) - number, 3), -1)])
    results, everyones = kernel.exchange(rows), kernel.exchange(told)
    add_results(results, everyones, rank, weights, active, out)


def add_results(
    results: torch.Tensor,
    origins: torch.Tensor,
    rank: int,
    weights: torch.Tensor,
    active: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Add up the results [ranks, rows, hidden] of *rank*'s tokens; *origins* are their (rank, token, choice)."""
    owners, numbers = (origins[..., 0] == rank).nonzero(as_tuple=True)
    tokens, choices = origins[owners, numbers, 1], origins[owners, numbers, 2]
    found = results.new_zeros(*weights.shape, results.shape[-1], dtype=torch.float32)
    found[tokens, choices] = results[owners, numbers].float()
    total = torch.zeros(out.shape)
    for choice in range(weights.shape[1]):
        total += found[:, choice] * weights[:, choice, None].float()
    kept = slice(None) if active is None else active.bool()
    out[kept] = total.to(out.dtype)[kept]


def run_experts(
    x: torch.Tensor,
    weight1: Sequence[torch.Tensor],
    weight2: Sequence[torch.Tensor],
    expert_idx: torch.Tensor,
    scale1: Sequence[torch.Tensor],
    scale2: Sequence[torch.Tensor],
    bias1: Sequence[torch.Tensor],
    bias2: Sequence[torch.Tensor],
    probs: torch.Tensor,
    group: str,
    max_output_size: int,
    out: torch.Tensor,
    expert_token_nums: torch.Tensor,
    x_active_mask: torch.Tensor | None = None,
    swiglu_limit: float = 1000000.0,
    world_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dispatch_ffn_combine`: experts of bf16, or of int8 with tokens quantized by row, with dispatch and combine."""
    if weight1[0].dtype not in (torch.int8, torch.bfloat16) or any(bias.numel() for bias in (*bias1, *bias2)):
        raise NotImplementedError(f"dispatch_ffn_combine of {weight1[0].dtype}, or with biases")
    kernel = Kernel("DispatchFfnCombine", group, world_size)
    weights = split_experts(weight1), split_experts(weight2)
    scales = [split_scales(each, len(weights[0])) for each in (scale1, scale2)]
    out.fill_(torch.nan)
    tensors = x, *weights, *scales, expert_idx, probs, x_active_mask, out, expert_token_nums
    launch(kernel.name, compute_experts, kernel, *tensors, max_output_size, swiglu_limit)
    return out, expert_token_nums


def split_scales(scales: Sequence[torch.Tensor], experts: int) -> list[torch.Tensor] | None:
    """Return the scales of each expert, floats in the lower bits of int64; None if there are none."""
    if not scales[0].numel():
        return None
    return [scale.reshape(-1) for scale in (scales[0].view(experts, -1) if len(scales) == 1 else scales)]


def compute_experts(
    kernel: Kernel,
    x: torch.Tensor,
    weights1: Any,
    weights2: Any,
    scales1: Any,
    scales2: Any,
    ids: torch.Tensor,
    weights: torch.Tensor,
    active: torch.Tensor | None,
    out: torch.Tensor,
    counts: torch.Tensor,
    most: int,
    limit: float,
) -> None:
    """Dispatch, compute and combine."""
    rank = kernel.find_rank()
    tokens, everyones = kernel.exchange(x), kernel.exchange(hide_inactive(ids, active))
    chosen = list_choices(everyones, len(weights1), rank)
    if len(chosen) > most:
        raise RuntimeError(f"{kernel.name}: {len(chosen)} rows for {most}")
    sources, numbers = chosen[:, 1], chosen[:, 2]
    by_expert = torch.bincount(chosen[:, 0], minlength=len(weights1))
    counts.copy_(by_expert)
    rows = tokens[sources, numbers // ids.shape[1]]
    results = x.new_zeros(everyones.numel(), x.shape[1])  # as many on all ranks
    ends = by_expert.cumsum(0).tolist()
    compute_swiglu(rows, weights1, weights2, scales1, scales2, ends, results[: len(rows)], limit)
    origins = torch.full((everyones.numel(), 3), -1)
    origins[: len(rows)] = torch.stack([sources, numbers // ids.shape[1], numbers % ids.shape[1]], 1)
    add_results(kernel.exchange(results), kernel.exchange(origins), rank, weights, active, out)


def compute_swiglu(
    rows: torch.Tensor,
    weights1: Any,
    weights2: Any,
    scales1: Any,
    scales2: Any,
    ends: Sequence[int],
    out: torch.Tensor,
    limit: float,
) -> None:
    """Run each expert on its rows, which end at *ends*; activations are quantized by row where weights are."""
    activated = activate(multiply_rows(rows, weights1, scales1, ends), limit)
    activated = activated.to(out.dtype if scales2 is None else torch.float32)
    out.copy_(multiply_rows(activated, weights2, scales2, ends))


def multiply_rows(rows: torch.Tensor, weights: Any, scales: Any, ends: Sequence[int]) -> torch.Tensor:
    """Multiply rows of each expert, which end at *ends*, by its matrix -> [rows, out] in float32."""
    products = torch.empty(len(rows), weights[0].shape[-1])
    if scales is None:
        compute_group_products(rows, weights, ends, None, None, products)
        return products
    found, token_scales = quantize_rows(rows)
    floats = [scale.to(torch.int32).view(torch.float32) for scale in scales]
    compute_group_products(found, weights, ends, floats, token_scales, products)
    return products


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 of *x* [rows, hidden] and the scale of each row."""
    found, scales = torch.empty_like(x, dtype=torch.int8), torch.empty(len(x))
    compute_quantization(x, found, scales)
    return found, scales
