"""A model of plain arithmetic with the structure of a decoder, for tests and the adapter tutorial.

It works with all types that add and multiply (ints are exact). Its attention reads a cache that it appends to, so
running micro-batches in the wrong order returns a wrong result.
"""

from __future__ import annotations

from typing import Any

from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value


class ToyLayer:
    """A decoder layer: norm, attention with a cache, norm, MLP."""

    def __init__(self) -> None:
        self.cache: list[Any] = []

    def add_norm(self, x: Any, residual: Any) -> tuple[Any, Any]:
        """Return (normed, new residual)."""
        residual = x + residual
        return residual * 3 + 1, residual

    def attention(self, positions: Any, x: Any) -> Any:
        """Append to the cache and return a function of the whole cache: this rank's share of the heads."""
        self.cache.append(x + positions)
        return sum(self.cache) + x

    def mlp(self, x: Any) -> Any:
        """Return this rank's share of the MLP."""
        return x * 5 - 2


class ToyModel:
    """Layers in a row."""

    def __init__(self, layers: int) -> None:
        self.layers = [ToyLayer() for _ in range(layers)]


class ToyCollectives:
    """A group of *ranks* ranks with equal values, so that the reduce is a multiplication."""

    reduces = True

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = ranks

    def decompose(self, experts: Any) -> None:
        """Return None: the toy has no experts."""

    def divide_attention(self, attention: Any, attend: Any) -> None:
        """Return None: the toy's attention stays one op."""

    def without_reduce(self, module: Any) -> Any:
        """Return *module* unchanged: it already returns its partial sum."""
        return module

    def all_reduce(self, partial: Any) -> Any:
        """Return the sum over the ranks."""
        return partial * self.ranks


class ToyAdapter:
    """Declares one comm op after attention and one after the MLP."""

    def decline(self, model: ToyModel) -> Decline | None:
        """Return why this model cannot be split, or None."""
        return None if model.layers else Decline("the model has no layers")

    def record(self, p: ProgramBuilder, model: ToyModel, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare the program; reads like the forward."""
        residual = x
        for index, layer in enumerate(model.layers):
            with p.layer(index):
                x, residual = p.compute("attn_norm", layer.add_norm, x, residual, outputs=2, token_wise=True)
                x = p.compute("attention", layer.attention, positions, x, ordered=True)
                x = p.comm("attn_reduce", collectives.all_reduce, x, overwrites=(x,), token_wise=True)
                x, residual = p.compute("mlp_norm", layer.add_norm, x, residual, outputs=2, token_wise=True)
                x = p.compute("mlp", layer.mlp, x, token_wise=True)
                x = p.comm("mlp_reduce", collectives.all_reduce, x, overwrites=(x,), token_wise=True)
        x, _ = p.compute(
            "final_norm", lambda x, residual: (x + residual, residual), x, residual, outputs=2, token_wise=True
        )
        return x
