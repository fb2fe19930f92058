"""Modules that are run without their final all-reduce: which modules they are made of, and what they have to return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dbo_runtime.errors import ProgramError


def list_modules(module: Callable[..., Any]) -> list[torch.nn.Module]:
    """Return the modules inside a module, or inside those that a partial passes to it."""
    called = [module, *getattr(module, "args", ())]
    return [part for each in called if isinstance(each, torch.nn.Module) for part in each.modules()]


def check_result(module: Callable[..., Any], result: torch.Tensor, held: Sequence[torch.Tensor], copies: bool) -> None:
    """Raise ProgramError unless *result* is the one tensor that was *held* back from an all-reduce.

    *copies* says that the module is known to return a copy of it. Both are [tokens, hidden].
    """
    is_reduced = _has_rows_of if copies else _share_memory
    if len(held) != 1 or not is_reduced(result, held[0]):
        raise ProgramError(
            f"{_name(module)} must end in one all-reduce to be run without it; it made {len(held)}"
            f"{' and returned something else' if len(held) == 1 else ''}. Declare it as one op that includes its "
            "reduce, or let the adapter decline this model."
        )


def _has_rows_of(copied: torch.Tensor, reduced: torch.Tensor) -> bool:
    """Return whether *copied* may be a copy of *reduced*. Sparse attention adds rows of padding to the copy."""
    fits = copied.shape[1:] == reduced.shape[1:] and copied.shape[0] >= reduced.shape[0]
    return fits and copied.dtype == reduced.dtype


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel() and one.dtype == other.dtype


def _name(module: Callable[..., Any]) -> str:
    return getattr(getattr(module, "func", module), "__qualname__", type(module).__name__)
