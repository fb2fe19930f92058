"""Parts of a layer that many families of models share."""

from __future__ import annotations

from dbo_runtime.adapter import Collectives, ExpertParallel
from dbo_runtime.program import ProgramBuilder, Value


def record_reduce(p: ProgramBuilder, name: str, collectives: Collectives, x: Value) -> Value:
    """Declare the all-reduce after a module run without it, where there is one."""
    reduced: Value = p.comm(name, collectives.all_reduce, x, overwrites=(x,)) if collectives.reduces else x
    return reduced


def record_experts(p: ProgramBuilder, moe: ExpertParallel, x: Value) -> Value:
    """Declare a mixture of experts whose tokens travel, [tokens, hidden] -> [tokens, hidden].

    A dispatch that needs sizes keeps the host waiting. The shared experts come before it then, so that the device has
    work meanwhile; otherwise they come after it, so that the tokens leave as early as they can.
    """
    routing = p.compute("gate", moe.gate, x)
    shared: list[Value] = []
    if moe.exchanges_sizes:
        routing = p.comm("sizes", moe.exchange_sizes, routing, overwrites=(routing,), communicator="experts")
        shared = record_shared_experts(p, moe, x)
    arrived, back = p.comm(
        "dispatch", moe.dispatch, x, routing, outputs=2, communicator="experts", host_sync=moe.exchanges_sizes
    )
    if not moe.exchanges_sizes:
        shared = record_shared_experts(p, moe, x)
    routed = p.compute("experts", moe.experts, arrived)
    routed = p.comm("combine", moe.combine, routed, back, communicator="experts")
    merged: Value = p.compute("merge", moe.merge, routed, *shared, overwrites=(routed,))
    return merged


def record_shared_experts(p: ProgramBuilder, moe: ExpertParallel, x: Value) -> list[Value]:
    """Declare the experts that every token passes, if there are any."""
    return [p.compute("shared_experts", moe.shared_experts, x)] if moe.has_shared_experts else []
