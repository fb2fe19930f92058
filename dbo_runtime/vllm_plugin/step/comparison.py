"""Results of one computation made in two ways, compared under DBO_CHECK."""

from __future__ import annotations

import torch

from dbo_runtime.errors import SplitError

# How far a token may be, relative to the largest: what rounding in other shapes gives, by type.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Where types are that coarse, rounding lets a token take other experts now and then: how many, and how far it may get.
STRAYS, STRAY_TOLERANCE = 0.02, 0.5


def compare_results(what: str, found: torch.Tensor, wanted: torch.Tensor, how: str, remedy: str) -> None:
    """Raise SplitError if the two [tokens, ...] are further apart than rounding explains; *how* says how they came."""
    if found.shape != wanted.shape:
        raise SplitError(f"{what} are {tuple(found.shape)} and {tuple(wanted.shape)} with {how}; {remedy} meanwhile.")
    apart = _measure(found - wanted)
    largest = _measure(wanted).max().item() or 1.0
    allowed = TOLERANCE.get(wanted.dtype, 1e-4)
    worst, beyond = apart.max().item() / largest, int((apart > allowed * largest).sum())
    strays = max(1, int(STRAYS * len(apart))) if allowed > TOLERANCE[torch.float32] else 0
    if not (worst <= allowed or (beyond <= strays and worst <= STRAY_TOLERANCE)):
        raise SplitError(
            f"{what} are {worst:.3g} of the largest apart (allowed {allowed:.3g}; {beyond} of {len(apart)} tokens are "
            f"further) with {how}. Please report it; {remedy} meanwhile."
        )


def _measure(x: torch.Tensor) -> torch.Tensor:
    """Return how long each row of *x* [tokens, ...] is [tokens]."""
    lengths: torch.Tensor = torch.linalg.vector_norm(x.flatten(1).float(), dim=1)
    return lengths
