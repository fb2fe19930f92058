"""Operators of torch that look up, order and limit numbers. See attention.py for how they are made."""

from __future__ import annotations

from typing import Any

import torch
from standin_ascend.kernels import launch, view_on_host


def find_places(
    edges: torch.Tensor,
    x: torch.Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    """`searchsorted`: for each number of *x* how many of the *edges* are smaller, or not larger if *right*."""
    if side is not None or sorter is not None:
        raise NotImplementedError(f"searchsorted: side {side}, sorter {sorter is not None}")
    out = x.new_empty(x.shape, dtype=torch.int32 if out_int32 else torch.int64)
    launch("SearchSorted", compute_places, edges, x, right, out)
    return out


def compute_places(edges: torch.Tensor, x: torch.Tensor, right: bool, out: torch.Tensor) -> None:
    """Look each number up."""
    out.copy_(torch.searchsorted(edges, x, right=right))


def find_distinct(
    x: torch.Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`unique`: the distinct numbers in ascending order, and which of them each number is.

    How many there are is known when they are computed: the host waits for that, as on an NPU.
    """
    if return_counts:
        raise NotImplementedError("unique with counts")
    torch.npu.current_stream().synchronize()
    values, inverse = torch.unique(view_on_host(x), return_inverse=True)
    return values.npu(), inverse.npu() if return_inverse else inverse.new_empty(0).npu(), inverse.new_empty(0).npu()


def limit(x: torch.Tensor, most: float) -> torch.Tensor:
    """`clamp_max` of a number."""
    out = torch.empty_like(x)
    launch("ClampMax", compute_limit, x, most, out)
    return out


def compute_limit(x: torch.Tensor, most: float, out: torch.Tensor) -> None:
    """Take the smaller one of each number and the most."""
    out.copy_(x.clamp_max(most))


def find_signs(x: torch.Tensor) -> torch.Tensor:
    """`signbit`: whether a number is negative, or minus zero."""
    out = torch.empty_like(x, dtype=torch.bool)
    launch("Signbit", compute_signs, x, out)
    return out


def compute_signs(x: torch.Tensor, out: torch.Tensor) -> None:
    """Look at each sign."""
    out.copy_(x.signbit())


def make_identity(size: int, **options: Any) -> torch.Tensor:
    """`eye`: a matrix with ones on its diagonal [size, size]."""
    numbers = torch.arange(size, device=options["device"])
    return (numbers[:, None] == numbers).to(options.get("dtype") or torch.get_default_dtype())
