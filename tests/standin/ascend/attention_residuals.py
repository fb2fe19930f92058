"""The operator of Kimi-K3's attention residuals: a part of a layer reads a mix of what earlier blocks of layers summed.

A block's sum is one row of a bank [tokens, rows, hidden]. Scores of the rows, and of the sum so far, are normed rows
times a learned query (arXiv:2603.15031). Read against vllm-ascend's description of this operator.
"""

from __future__ import annotations

import torch
from standin_ascend.hyper_connections import norm
from standin_ascend.kernels import launch

SCHEMA = (  # vllm-ascend's own
    "attn_res_fwd(Tensor prefix_sum, Tensor? addend, Tensor(a!) block_residual, Tensor proj_weight, Tensor norm_weight,"
    " float norm_eps, int num_valid_blocks, Tensor? output_norm_weight=None, float output_norm_eps=1e-5,"
    " int block_write_idx=-1, bool return_materialized=False, bool mix=True, bool optimize_prefill=False)"
    " -> (Tensor output, Tensor raw_prefix, Tensor materialized)"
)
NO_ROW = -1


def mix_blocks(
    prefix_sum: torch.Tensor,
    addend: torch.Tensor | None,
    block_residual: torch.Tensor,
    proj_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    num_valid_blocks: int,
    output_norm_weight: torch.Tensor | None = None,
    output_norm_eps: float = 1e-5,
    block_write_idx: int = NO_ROW,
    return_materialized: bool = False,
    mix: bool = True,
    optimize_prefill: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attn_res_fwd`: add, mix the sum with the first rows of the bank, norm; write the sum to a later row.

    Args:
        prefix_sum: the sum so far [tokens, hidden]. It is returned itself if nothing is added.
        addend: tensor that is added to it first [tokens, hidden].
        block_residual: the bank [tokens, rows, hidden].
        proj_weight: the learned query [1, hidden].
        norm_weight: weights of the norm of rows, for their scores [hidden].
        num_valid_blocks: how many rows are mixed.
        output_norm_weight: weights of the norm of the mix [hidden].
        block_write_idx: row that the sum is written to, or -1.
        return_materialized: whether the mix is returned before its norm, too; otherwise the third is the first.
        mix: False to take the sum itself for the mix.
        optimize_prefill: another strategy for the same numbers.

    Returns:
        The normed mix, the sum, and the mix, each [tokens, hidden].
    """
    rows = block_residual.shape[1]
    if not 0 <= num_valid_blocks <= rows or not (
        block_write_idx == NO_ROW or num_valid_blocks <= block_write_idx < rows
    ):
        raise NotImplementedError(f"attn_res_fwd: {num_valid_blocks} of {rows} rows, and writes row {block_write_idx}")
    output = torch.empty_like(prefix_sum)
    total = prefix_sum if addend is None else torch.empty_like(prefix_sum)
    mixed = torch.empty_like(prefix_sum) if return_materialized else output
    tensors = prefix_sum, addend, block_residual, proj_weight, norm_weight, output_norm_weight, output, total, mixed
    settings = norm_eps, num_valid_blocks if mix else 0, output_norm_eps, block_write_idx
    launch("AttnResFwd", compute_mix, *tensors, *settings)
    return output, total, mixed


def compute_mix(
    prefix: torch.Tensor,
    addend: torch.Tensor | None,
    bank: torch.Tensor,
    query: torch.Tensor,
    weight: torch.Tensor,
    out_weight: torch.Tensor | None,
    output: torch.Tensor,
    total: torch.Tensor,
    mixed: torch.Tensor,
    eps: float,
    valid: int,
    out_eps: float,
    written: int,
) -> None:
    """Mix and norm in float64; the sum and the mix are rounded before they are read on."""
    if addend is not None:
        total.copy_(prefix.float() + addend.float())
    mix = total.clone()
    if valid:
        rows = torch.cat([bank[:, :valid], total[:, None]], dim=1).double()
        scores = (norm(rows, weight, eps) * query.double()).sum(-1)
        mix.copy_((scores.softmax(-1)[..., None] * rows).sum(1))
    mixed.copy_(mix)
    output.copy_(mix if out_weight is None else norm(mix, out_weight, out_eps))
    if written != NO_ROW:
        bank[:, written] = total
