"""Describe how two results differ that should be equal except for rounding."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.errors import SplitError

# Largest allowed difference of a token, relative to the largest token, by type: rounding in other shapes gives as much.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# With such coarse types, rounding now and then routes a token to other experts, even if the same micro-batches are
# only reduced over ranks in another order. These are the allowed share of such tokens, and their largest difference.
REROUTED_SHARE, REROUTED_TOLERANCE = 0.02, 0.5

UNSPLIT, PIECES = "unsplit", "one after the other"
"""How a step was run again: all of its tokens at once, or its micro-batches in steps of their own."""


def compare_results(what: str, actual: torch.Tensor, expected: torch.Tensor, how: str, remedy: str) -> None:
    """Raise SplitError if two tensors [tokens, ...] differ by more than rounding explains; see `describe_results`."""
    difference = describe_results(what, actual, expected, how, remedy)
    if difference:
        raise SplitError(difference)


def describe_results(
    what: str, actual: torch.Tensor, expected: torch.Tensor, how: str, remedy: str, accepts_rerouted: bool = True
) -> str:
    """Return how two tensors [tokens, ...] differ; empty if rounding explains the difference.

    Args:
        what: name of the tensors.
        actual: result to check.
        expected: result to compare with.
        how: phrase that says how *actual* was computed.
        remedy: advice to the user, as a clause.
        accepts_rerouted: whether a few tokens may have been routed to other experts, if types are coarse.
    """
    if actual.shape != expected.shape:
        shapes = f"{tuple(actual.shape)} and {tuple(expected.shape)}"
        return f"{what} are {shapes} with {how}; until this is fixed, {remedy}."
    if not len(expected):
        return ""
    errors = _measure_rows(actual - expected)
    largest = _measure_rows(expected).max().item() or 1.0
    allowed = TOLERANCE.get(expected.dtype, 1e-4)
    worst, beyond = errors.max().item() / largest, int((errors > allowed * largest).sum())
    is_coarse = accepts_rerouted and allowed > TOLERANCE[torch.float32]
    rerouted = max(1, int(REROUTED_SHARE * len(errors))) if is_coarse else 0
    if worst <= allowed or (beyond <= rerouted and worst <= REROUTED_TOLERANCE):
        return ""
    return (
        f"{what} differ by {worst:.3g} of the largest value (allowed {allowed:.3g}; {beyond} of {len(errors)} "
        f"tokens differ by more) with {how}. Please report it; until this is fixed, {remedy}."
    )


def describe_difference(
    split: Mapping[str, torch.Tensor],
    again: Mapping[str, torch.Tensor],
    plan: ExecutionPlan,
    mode: str = UNSPLIT,
    accepts_rerouted: bool = False,
) -> str:
    """Return how a plan's results differ from those of the same step, run *again* in a *mode*; empty if they do not."""
    how, remedy = f"cuts at {plan.cuts}, schedule {plan.digest}", "DBO_MODE=off serves unsplit"
    if split.keys() != again.keys():
        return f"a split step gave {sorted(split)}, one that ran {mode} {sorted(again)}; until this is fixed, {remedy}."
    described = (
        describe_results(f"split and {mode} {what}", split[what], expected, how, remedy, accepts_rerouted)
        for what, expected in again.items()
    )
    return next(filter(None, described), "")


def _measure_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row of *x* [tokens, ...] -> [tokens]."""
    norms: torch.Tensor = torch.linalg.vector_norm(x.flatten(1).float(), dim=1)
    return norms
