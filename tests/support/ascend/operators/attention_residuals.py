"""Calls of the operator of Kimi-K3's attention residuals, and what it computes, in plain loops."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.ascend.operators.checks import HALF, Tensors, draw

EPS, OUT_EPS = 1e-6, 1e-5


def make_sums(generator: torch.Generator, tokens: int, rows: int, hidden: int = 8) -> Tensors:
    """Return the sum so far, what is added, the bank, the query, and weights of both norms."""
    shapes = (tokens, hidden), (tokens, hidden), (tokens, rows, hidden), (1, hidden), (hidden,), (hidden,)
    return [draw(generator, *shape) for shape in shapes]


def mix_blocks(*tensors: torch.Tensor, valid: int = 2, written: int = -1, **options: Any) -> Any:
    total, added, bank, query, weight, out_weight = tensors
    settings = EPS, valid, out_weight, OUT_EPS, written
    return torch.ops._C_ascend.attn_res_fwd(total, added, bank, query, weight, *settings, **options)


def run_case(*tensors: torch.Tensor) -> Tensors:
    """Return what is computed, and the bank after a row was written."""
    return [*mix_blocks(*tensors, written=2, return_materialized=True), tensors[2]]


def mix_plainly(tensors: Tensors, valid: int, adds: bool) -> Tensors:
    """Return the normed mix, the sum and the mix, token by token."""
    total, added, bank, query, weight, out_weight = (tensor.double() for tensor in tensors)
    total = (total + added).to(HALF).double() if adds else total
    mixes = []
    for token in range(len(total)):
        rows = [*bank[token, :valid], total[token]]
        scores = [float((normed(row, EPS) * weight * query[0]).sum()) for row in rows]
        shares = torch.tensor(scores).double().softmax(0)
        mixes.append(sum((share * row for share, row in zip(shares, rows, strict=True)), torch.zeros(len(weight))))
    mix = torch.stack(mixes).to(HALF).double()
    return [torch.stack([normed(row, OUT_EPS) * out_weight for row in mix]), total, mix]


def normed(row: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide a row by the root of its mean square."""
    return row / (row.square().mean() + eps).sqrt()
