"""Results of one computation made in two ways, compared under DBO_CHECK."""

from __future__ import annotations

import math

import torch

from dbo_runtime.errors import SplitError

# How far they may be apart, relative to the largest value: what rounding in other shapes gives, by type.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def compare_results(what: str, found: torch.Tensor, wanted: torch.Tensor, how: str, remedy: str) -> None:
    """Raise SplitError if the two are further apart than rounding explains; *how* says how they came about."""
    if found.shape != wanted.shape:
        raise SplitError(f"{what} are {tuple(found.shape)} and {tuple(wanted.shape)} with {how}; {remedy} meanwhile.")
    apart = (found - wanted).abs().max().item()
    allowed = TOLERANCE.get(wanted.dtype, 1e-4) * wanted.abs().max().item()
    if not apart <= allowed < math.inf:
        raise SplitError(
            f"{what} are {apart:.3g} apart (allowed {allowed:.3g}) with {how}. Please report it; {remedy} meanwhile."
        )
