"""Parts of a layer that many families of models share."""

from __future__ import annotations

from dbo_runtime.adapter import Collectives, ExpertParallel
from dbo_runtime.program import ProgramBuilder, Value


def record_reduce(p: ProgramBuilder, name: str, collectives: Collectives, x: Value) -> Value:
    """Declare the all-reduce after a module run without it, where there is one."""
    reduced: Value = p.comm(name, collectives.all_reduce, x, overwrites=(x,)) if collectives.reduces else x
    return reduced


def record_experts(p: ProgramBuilder, moe: ExpertParallel, x: Value) -> Value:
    """Declare a mixture of experts whose tokens travel, [tokens, hidden] -> [tokens, hidden]."""
    routing = p.compute("gate", moe.gate, x)
    if moe.exchanges_sizes:
        routing = p.comm("sizes", moe.exchange_sizes, routing, overwrites=(routing,), communicator="experts")
    sent = p.comm(
        "dispatch",
        moe.dispatch,
        x,
        routing,
        overwrites=(routing,),  # what arrives keeps parts of it, for the way back
        communicator="experts",
        host_sync=moe.exchanges_sizes,
    )
    shared = [p.compute("shared_experts", moe.shared_experts, x)] if moe.has_shared_experts else []
    routed = p.compute("experts", moe.experts, sent)
    routed = p.comm("combine", moe.combine, routed, sent, communicator="experts")
    merged: Value = p.compute("merge", moe.merge, routed, *shared, overwrites=(routed,))
    return merged
