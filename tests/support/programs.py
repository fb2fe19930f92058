"""Programs that several tests use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dbo_models.toy import ToyAdapter, ToyCollectives, ToyModel
from dbo_runtime.adapters.contract import record_program
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import Policy, alternate
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Schedule


def record_toy(layers: int = 2, collectives: Any = None) -> Program:
    """Return the program of a toy model of its own, with empty caches."""
    return record_program(ToyAdapter(), ToyModel(layers), collectives or ToyCollectives())


def lower_toy(layers: int = 2, micro_batches: int = 2, policy: Policy = alternate) -> Schedule:
    programs = (record_toy(layers),) * micro_batches
    return lower(programs, policy(programs))


def record_three_lanes(layers: int) -> Program:
    """Return layers that use a third lane and change a value in place; each reads what all lanes wrote."""
    p = ProgramBuilder()
    x = p.input("x")
    for index in range(layers):
        with p.layer(index):
            x = p.compute("norm", lambda x: [x[0] * 3 + 1], x)
            sent = p.comm("dispatch", lambda x: [x[0] * 2], x, exclusive="a2a")
            shared = p.op("shared", lambda x: [x[0] + 7], x, lane="aux", ordered=True)
            routed = p.compute("experts", lambda x: [x[0] * 5 - 2], sent)
            routed = p.comm("combine", double_in_place, routed, exclusive="a2a", overwrites=(routed,))
            x = p.compute("merge", lambda *parts: [sum(part[0] for part in parts)], x, shared, routed)
    return p.build(x)


def double_in_place(cell: list[int]) -> list[int]:
    cell[0] *= 2
    return cell


def record_chain(send: Callable[[Any], Any], receive: Callable[[Any], Any]) -> Program:
    """Return the smallest program with an overlap point: a comm op between two compute ops."""
    p = ProgramBuilder()
    x = p.input("x")
    x = p.compute("make", lambda x: x, x)
    x = p.comm("send", send, x)
    return p.build(p.compute("receive", receive, x))


def record_dense_and_experts(dense: int, experts: int) -> Program:
    """Return layers as a model has them whose experts are on other ranks: dense ones communicate nothing."""
    p = ProgramBuilder()
    x = p.input("x")
    for layer in range(dense + experts):
        with p.layer(layer):
            x = p.compute("attention", abs, x, ordered=True)
            for name in ("mlp",) if layer < dense else ("dispatch", "experts", "combine"):
                x = p.op(name, abs, x, lane="compute" if name in ("mlp", "experts") else "comm")
    return p.build(x)
