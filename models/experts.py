"""A decomposed mixture of experts whose tokens are dispatched to other ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from dbo_models.collectives import record_gather
from dbo_runtime.adapter import Collectives, ExpertParallel
from dbo_runtime.program import ProgramBuilder, Value


def record_experts(
    p: ProgramBuilder, moe: ExpertParallel, collectives: Collectives, x: Value, input_ids: Value | None = None
) -> Value:
    """Declare a mixture of experts whose tokens are dispatched, [tokens, hidden] -> [tokens, hidden].

    With sequence parallelism, each tensor parallel rank dispatches a chunk of the tokens, and an all-gather completes
    them. *input_ids* are the token ids [tokens], if experts are chosen by them.
    """
    if not moe.is_sequence_parallel:
        return record_dispatch(p, moe, collectives, x, input_ids=input_ids)
    chunk, tokens = p.compute("chunk", collectives.take_chunk, x, outputs=2)
    if input_ids is not None:
        input_ids, _ = p.compute("chunk_ids", collectives.take_chunk, input_ids, outputs=2)
    merged = record_dispatch(p, moe, collectives, chunk, tokens, x, input_ids)
    gathered: Value = record_gather(p, "gather", collectives, merged, tokens)
    return gathered


def record_dispatch(
    p: ProgramBuilder,
    moe: ExpertParallel,
    collectives: Collectives,
    x: Value,
    tokens: Value | None = None,
    gathered: Value | None = None,
    input_ids: Value | None = None,
) -> Value:
    """Declare everything from the gate to the merge, [tokens, hidden] or [chunk, hidden] -> like *x*.

    If dispatch needs sizes, it blocks the host. The shared experts then come first, so that the device has work
    meanwhile. Otherwise they come after dispatch, so that the tokens are sent as early as possible. On a `side` lane
    they depend on the tokens only, so they also overlap with the gate and the experts. If kernels allow it, gate,
    experts and merge may run on `side` while the other micro-batch attends.

    If *x* is a chunk, *tokens* is the number of tokens in all chunks. Shared experts whose weights are divided among
    the ranks then take all tokens: *gathered*, or gathered here if that is None. Their results are reduced to chunks.
    *input_ids* are the token ids of *x*, if experts are chosen by them.
    """
    if moe.is_fused:
        assert tokens is not None, "each rank gives its kernels a chunk"
        fused: Value = record_fused_experts(p, moe, collectives, x, tokens, gathered, input_ids)
        return fused
    declare = p.may_move_to_side if moe.may_move_to_side else p.compute
    gate = partial(_choose_by_ids, moe) if tokens is None and input_ids is not None else moe.gate
    routing = declare("gate", gate, x, *(value for value in (tokens, input_ids) if value is not None))
    shared: list[Value] = []
    if moe.exchanges_sizes:
        routing = p.comm("sizes", moe.exchange_sizes, routing, overwrites=(routing,), communicator="experts")
        shared = record_shared_experts(p, moe, collectives, x, tokens, gathered)
    received, handle = p.comm(
        "dispatch", moe.dispatch, x, routing, outputs=2, communicator="experts", host_sync=moe.exchanges_sizes
    )
    if not moe.exchanges_sizes:
        shared = record_shared_experts(p, moe, collectives, x, tokens, gathered)
    shared = record_scatters(p, moe, collectives, shared)
    routed = declare("experts", moe.experts, received)
    routed = p.comm("combine", moe.combine, routed, handle, communicator="experts")
    merged: Value = declare("merge", moe.merge, routed, *shared, overwrites=(routed,))
    return merged


def record_fused_experts(
    p: ProgramBuilder,
    moe: ExpertParallel,
    collectives: Collectives,
    x: Value,
    tokens: Value,
    gathered: Value | None,
    input_ids: Value | None,
) -> Value:
    """Declare experts whose kernels dispatch and combine, as the op `moe`: [chunk, hidden] -> [chunk, hidden].

    The shared experts come first, so that their results are reduced while `moe` runs.
    """
    shared = record_shared_experts(p, moe, collectives, x, tokens, gathered)
    shared = record_scatters(p, moe, collectives, shared)
    routed = p.compute("moe", moe.run_fused, x, tokens, *(() if input_ids is None else (input_ids,)))
    merged: Value = p.compute("merge", moe.merge, routed, *shared, overwrites=(routed,))
    return merged


def record_scatters(
    p: ProgramBuilder, moe: ExpertParallel, collectives: Collectives, shared: list[Value]
) -> list[Value]:
    """Declare the reduce-scatter of the shared experts' results, if they are partial sums."""
    if not moe.reduces_shared_experts:
        return shared
    return [p.comm("shared_scatter", collectives.reduce_scatter, result, outputs=2)[0] for result in shared]


def record_shared_experts(
    p: ProgramBuilder,
    moe: ExpertParallel,
    collectives: Collectives,
    x: Value,
    tokens: Value | None,
    gathered: Value | None,
) -> list[Value]:
    """Declare the shared experts, if there are any."""
    if not moe.has_shared_experts:
        return []
    if moe.reduces_shared_experts:
        x = record_gather(p, "shared_gather", collectives, x, tokens) if gathered is None else gathered
    return [p.side("shared_experts", moe.shared_experts, x)]


def _choose_by_ids(moe: ExpertParallel, x: Any, input_ids: Any) -> Any:
    return moe.gate(x, None, input_ids)
