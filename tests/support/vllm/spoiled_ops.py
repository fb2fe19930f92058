"""Ops of an adapter that compute something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dbo_runtime.ir.program import ProgramBuilder

Spoil = Callable[[Callable[..., Any]], Callable[..., Any]]


def spoil_op(p: ProgramBuilder, label: str, spoil: Spoil) -> None:
    """Let *spoil* replace the function of the op of that label, such as `L1.mlp`, when it is declared."""
    declare = p.op

    def op(name: str, fn: Any, *reads: Any, **declaration: Any) -> Any:
        own = name if p._layer is None else f"L{p._layer}.{name}"
        return declare(name, spoil(fn) if own == label else fn, *reads, **declaration)

    p.op = op  # type: ignore[method-assign]
