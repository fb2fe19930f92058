"""Adapters of Granite with a fault each, which engines in other processes find like those of an installed package."""

from __future__ import annotations

from itertools import count
from typing import Any

from dbo_runtime.adapters.communication import Collectives
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.ir.values import Value
from examples.toy_adapter.granite_adapter import GraniteAdapter
from tests.support.vllm.spoiled_ops import Spoil, spoil_op

LAST_CALL = 100  # far more than a rehearsal makes, far fewer than a round of requests


class FaultyAdapter(GraniteAdapter):
    """Right but for one op. All ops but attention may run in nano-batches."""

    label = "L0.mlp"
    spoil: Spoil = staticmethod(lambda fn: fn)

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        spoil_op(p, self.label, self.spoil)
        _declare_token_wise(p)
        return super().record(p, model, collectives, x, positions)


def _declare_token_wise(p: ProgramBuilder) -> None:
    declare = p.op

    def op(name: str, fn: Any, *reads: Any, **declaration: Any) -> Any:
        return declare(name, fn, *reads, token_wise=name != "attention", **declaration)

    p.op = op  # type: ignore[method-assign]


def _take_other_positions(attention: Any) -> Any:
    kept: list[Any] = []

    def run(positions: Any, x: Any) -> Any:
        other = kept.pop() if kept else positions
        kept.append(positions.clone())
        return attention(other if other.shape == positions.shape else positions, x)

    return run


def _add_to_last_token(mlp: Any) -> Any:
    def run(x: Any) -> Any:
        result = mlp(x)
        result[-1] += 1e-2
        return result

    return run


class OtherPositions(FaultyAdapter):
    """Attention takes the positions of the micro-batch before, where that has as many tokens."""

    label = "L1.attention"
    spoil = staticmethod(_take_other_positions)


class DroppedReduce(FaultyAdapter):
    """What ranks have computed is not added up."""

    label = "L1.attn_reduce"
    spoil = staticmethod(lambda reduce: lambda part: part)


class OneTokenOff(FaultyAdapter):
    """The last token of each micro-batch is off by 0.01."""

    label = "L2.mlp"
    spoil = staticmethod(_add_to_last_token)


class Crashing(FaultyAdapter):
    """An op raises."""

    label = "L1.mlp"
    spoil = staticmethod(lambda mlp: lambda x: x.no_such_attribute)


def _fail_later(mlp: Any) -> Any:
    calls = count()
    return lambda x: mlp(x) if next(calls) < LAST_CALL else x.no_such_attribute


class CrashingLater(FaultyAdapter):
    """An op raises when steps have been served already."""

    label = "L1.mlp"
    spoil = staticmethod(_fail_later)
