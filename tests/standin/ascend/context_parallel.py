"""Kernels in the place of those of Triton for decode context parallel attention: each rank attends to its own keys.

Ranks send each other what their queries have attended, with the logarithm of the sum of exponentials of its scores,
which weighs it. Packed in a type of 16 bits, that is four integers of up to 255: sign and exponent, and the bytes of
the significand. See triton_kernels.py for how such kernels are made.
"""

from __future__ import annotations

from typing import Any

import torch

EXPONENTS = -126, 127  # of numbers in float32 that are normal
OFFSET, DIGITS = 128, 23  # of an exponent as an integer that is not 0; binary digits after the first one


def join_queries(query: torch.Tensor, query_rope: torch.Tensor, out: torch.Tensor, *sizes: Any, **options: Any) -> None:
    """`_q_gather_prep_head_major_kernel`: queries with their rotary parts, heads first [heads, queries, size]."""
    out.copy_(torch.cat([query, query_rope], -1).transpose(0, 1))


def pack_results(
    attended: torch.Tensor,
    logarithms: torch.Tensor,
    out: torch.Tensor,
    *sizes: Any,
    SCATTER_TOKENS: bool,
    LSE_PACK_DIM: int,
    **options: Any,
) -> None:
    """`_pack_dcp_output_lse_kernel`: for each rank its share of the queries, or of the heads.

    What is attended is [queries, heads, size], logarithms are [queries, heads, 1], and what is sent is [ranks, share,
    rest, size and packed logarithm].
    """
    rows = torch.cat([attended, encode(logarithms, LSE_PACK_DIM).to(attended.dtype)], -1)
    out.copy_((rows if SCATTER_TOKENS else rows.transpose(0, 1)).reshape(out.shape))


def encode(logarithms: torch.Tensor, count: int) -> torch.Tensor:
    """Return logarithms [..., 1] in float32 as so many numbers [..., count]; what is not finite as zeros."""
    if count == 1:
        return logarithms
    is_finite = logarithms.isfinite()
    size = logarithms.abs().masked_fill(~is_finite, 0)
    exponent = (torch.frexp(size).exponent - 1).clamp(*EXPONENTS).masked_fill(size == 0, 0)
    significand = torch.ldexp(size.double(), DIGITS - exponent).long()
    code = (exponent + OFFSET) * torch.where(logarithms < 0, -1, 1)
    digits = significand >> 16, significand >> 8 & 255, significand & 255
    return torch.cat([part.masked_fill(~is_finite, 0).float() for part in (code, *digits)], -1)


def decode(packed: torch.Tensor) -> torch.Tensor:
    """Return logarithms [..., 1] in float64; -inf for what was not finite."""
    if packed.shape[-1] == 1:
        return packed.double().where(packed.isfinite(), -torch.inf)
    code, *digits = packed.long().split(1, -1)
    significand = (digits[0] << 16) + (digits[1] << 8) + digits[2]
    return torch.ldexp(significand.double(), code.abs() - OFFSET - DIGITS).mul(code.sign()).where(code != 0, -torch.inf)


def combine_results(
    received: torch.Tensor,
    out: torch.Tensor,
    local: torch.Tensor,
    local_logarithms: torch.Tensor,
    *sizes: Any,
    SCATTER_TOKENS: bool,
    LSE_PACK_DIM: int,
    RETURN_LSE: bool = False,
    HAS_LOCAL: bool = False,
    **options: Any,
) -> None:
    """`_fused_dcp_lse_combine_kernel`: weigh what all ranks have attended [ranks, share, rest, size and logarithm].

    Sums are made in float64 and rounded once, to [queries, heads, size]. A rank that saw no key has no part in them,
    whatever it has sent.
    """
    if RETURN_LSE or HAS_LOCAL:
        raise NotImplementedError("fused_dcp_lse_combine with a part of its own, or with the logarithm")
    parts, packed = received.split([received.shape[-1] - LSE_PACK_DIM, LSE_PACK_DIM], -1)
    logarithms = decode(packed)
    largest = logarithms.amax(0)
    weights = (logarithms - largest.masked_fill(largest == -torch.inf, 0)).exp()
    total = weights.sum(0)
    sums = (parts.double().where(weights > 0, 0) * weights).sum(0) / total.masked_fill(total == 0, 1)
    out.copy_(sums if SCATTER_TOKENS else sums.transpose(0, 1))
