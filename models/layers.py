"""The decoder that many families of models share, and its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Any

from dbo_runtime.adapter import Collectives, ExpertParallel, LatentAttention, name_auxiliary
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

Attend = Callable[[Any, Any, Any], Any]
"""Calls an attention module: (module, positions [tokens], x [tokens, hidden]) -> [tokens, hidden]."""

Route = Callable[[Any, Any], Any]
"""Computes the router's logits: (MoE block, x [tokens, hidden]) -> [tokens, experts]."""

RESIDUAL = "residual"  # passed on between stages of a pipeline with the hidden states; the name is vLLM's


def call_attention(attention: Any, positions: Any, x: Any) -> Any:
    """Call an attention module as most families do."""
    return attention(positions, x)


def record_decoder(
    p: ProgramBuilder,
    decoder: Any,
    collectives: Collectives,
    x: Value,
    positions: Value,
    attend: Attend = call_attention,
    added: Sequence[Value] = (),
    route: Route | None = None,
) -> Value:
    """Declare a decoder of pre-norm layers: embedded tokens in, normed hidden states out.

    *decoder* has `layers`, each with `input_layernorm`, `self_attn` (or `linear_attn`), `post_attention_layernorm` and
    `mlp` (or `block_sparse_moe`), and a final `norm`. Norms take (x, residual) and add before they norm; attention and
    MLP end in one all-reduce each. One value of *added* [tokens, hidden] is added to the result of each of the first
    layers. *route* is for blocks whose experts do not hold their gate.

    On a stage of a pipeline, only its layers are declared: a stage other than the first takes the `residual` as an
    input, and a stage other than the last returns it, without the final norm. Where a drafter reads hidden states
    between layers (`aux_hidden_state_layers`), they are named outputs.
    """
    layers = get_layers(decoder)
    stream: tuple[Value, ...] = (x,) if 0 in layers else (x, p.input(RESIDUAL))
    for index, layer in layers.items():
        with p.layer(index):
            record_auxiliary(p, decoder, index, stream)
            x, residual = record_layer(p, layer, collectives, stream, positions, attend, route)
            if index < len(added):
                x = p.compute("add_features", add, x, added[index])
            stream = x, residual
    if len(decoder.layers) - 1 not in layers:
        p.output(RESIDUAL, residual)
        return x
    record_auxiliary(p, decoder, len(decoder.layers), stream)
    hidden: Value = p.compute("final_norm", partial(_final_norm, decoder.norm), *stream, overwrites=stream)
    return hidden


def record_auxiliary(p: ProgramBuilder, decoder: Any, layers: int, stream: tuple[Value, ...]) -> None:
    """Name the hidden states after that many layers as an output, if the decoder returns them for a drafter."""
    if layers in getattr(decoder, "aux_hidden_state_layers", ()):
        p.output(name_auxiliary(layers), p.compute("auxiliary", _add_residual, *stream))


def record_layer(
    p: ProgramBuilder,
    layer: Any,
    collectives: Collectives,
    stream: tuple[Value, ...],
    positions: Value,
    attend: Attend,
    route: Route | None = None,
) -> tuple[Value, Value]:
    """Declare one layer: (x,) for the first, (x, residual) after it -> (x, residual).

    Norms add in place on some platforms, and reduces sum in place on all: both overwrite what they read.
    """
    norm = layer.input_layernorm if len(stream) == 2 else partial(_first_norm, layer.input_layernorm)
    x, residual = p.compute("attn_norm", norm, *stream, overwrites=stream, outputs=2)
    name = "attention" if hasattr(layer, "self_attn") else "linear_attention"  # two, as their costs differ
    x = record_attention(p, get_attention(layer), collectives, positions, x, attend, name)
    x = record_reduce(p, "attn_reduce", collectives, x)
    stream = x, residual
    x, residual = p.compute("mlp_norm", layer.post_attention_layernorm, *stream, overwrites=stream, outputs=2)
    mlp = get_mlp(layer)
    is_moe = hasattr(mlp, "experts")
    moe = collectives.decompose(mlp.experts, route and partial(route, mlp), takes_chunks=True) if is_moe else None
    if moe is not None:
        x = record_experts(p, moe, x)
        if moe.is_sequence_parallel:
            return x, residual  # gathered, and complete
    else:  # two names, because ops of one name are assumed to cost the same
        name = "moe" if is_moe else "mlp"
        x = p.compute(name, collectives.without_reduce(mlp), x)
    return record_reduce(p, "mlp_reduce", collectives, x), residual


def record_attention(
    p: ProgramBuilder,
    attention: Any,
    collectives: Collectives,
    positions: Value,
    x: Value,
    attend: Attend,
    name: str = "attention",
) -> Value:
    """Declare attention without its reduce [tokens, hidden] -> [tokens, hidden]: one op, or latent attention's parts.

    It is `ordered`, because a cut request reads the KV, or the state, that its head wrote.
    """
    latent = collectives.decompose_attention(attention) if p.has_side else None
    if latent is None:
        fn = collectives.without_reduce(partial(attend, attention))
        attended: Value = p.compute(name, fn, positions, x, ordered=True)
        return attended
    return record_latent_attention(p, latent, collectives, positions, x)


def record_latent_attention(
    p: ProgramBuilder, latent: LatentAttention, collectives: Collectives, positions: Value, x: Value
) -> Value:
    """Declare latent attention with its keys concurrent to its queries, as vllm-ascend #1353 ran decodes.

    Keys are issued first: they take less time, and attention reads what they write.
    """
    slots = p.compute("slots", latent.get_slots)
    if latent.has_latent:
        x = p.compute("latent", latent.project, x)
    keys, rotary = p.side("keys", latent.write_keys, x, positions, slots, outputs=2)
    queries = p.compute("queries", latent.make_queries, x, positions)
    x = p.compute("attention", latent.attend, queries, keys, rotary, ordered=True)
    out: Value = p.compute("attn_out", collectives.without_reduce(latent.project_out), x)
    return out


def record_reduce(p: ProgramBuilder, name: str, collectives: Collectives, x: Value) -> Value:
    """Declare the all-reduce of a module that runs without it, if results have to be reduced."""
    reduced: Value = p.comm(name, collectives.all_reduce, x, overwrites=(x,)) if collectives.reduces else x
    return reduced


def record_experts(p: ProgramBuilder, moe: ExpertParallel, x: Value) -> Value:
    """Declare a mixture of experts whose tokens are dispatched, [tokens, hidden] -> [tokens, hidden].

    A dispatch that needs sizes blocks the host. Then the shared experts come before it, so that the device has work
    meanwhile; otherwise they come after it, so that the tokens are sent as early as possible. On a `side` lane they
    depend on the tokens only, so they are concurrent with the gate and the experts, too. Where kernels allow it, gate,
    experts and merge are movable: they may run there while the other micro-batch attends.

    Sequence parallel, each tensor parallel rank dispatches a chunk of the tokens. The shared experts' partial results
    are reduced to chunks and added to the routed ones, so that one all-gather completes both.
    """
    declare = p.movable if moe.is_movable else p.compute
    routing = declare("gate", moe.gate, x)
    shared: list[Value] = []
    if moe.exchanges_sizes:
        routing = p.comm("sizes", moe.exchange_sizes, routing, overwrites=(routing,), communicator="experts")
        shared = record_shared_experts(p, moe, x)
    received, handle = p.comm(
        "dispatch", moe.dispatch, x, routing, outputs=2, communicator="experts", host_sync=moe.exchanges_sizes
    )
    if not moe.exchanges_sizes:
        shared = record_shared_experts(p, moe, x)
    if moe.reduces_shared_experts:
        shared = [p.comm("shared_reduce", moe.reduce_scatter, result) for result in shared]
    routed = declare("experts", moe.experts, received)
    routed = p.comm("combine", moe.combine, routed, handle, communicator="experts")
    merged: Value = declare("merge", moe.merge, routed, *shared, overwrites=(routed,))
    return p.comm("gather", moe.all_gather, merged, handle) if moe.is_sequence_parallel else merged


def record_shared_experts(p: ProgramBuilder, moe: ExpertParallel, x: Value) -> list[Value]:
    """Declare the shared experts, if there are any."""
    return [p.side("shared_experts", moe.shared_experts, x)] if moe.has_shared_experts else []


def get_layers(decoder: Any) -> dict[int, Any]:
    """Return the layers of a decoder that are on this rank, by number: all, or those of a pipeline's stage.

    vLLM replaces the others by placeholders.
    """
    here = slice(getattr(decoder, "start_layer", 0), getattr(decoder, "end_layer", None))
    return {index: decoder.layers[index] for index in range(len(decoder.layers))[here]}


def get_attention(layer: Any) -> Any:
    """Return the attention of a layer, or its linear attention."""
    return layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn


def get_mlp(layer: Any) -> Any:
    """Return the MLP of a layer, or its mixture of experts."""
    return layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe


def check_parts(decoder: Any, known: frozenset[str]) -> Decline | None:
    """Return the classes of a decoder that are not *known*, which may compute something else; None if all are."""
    layers = get_layers(decoder).values()
    parts = [decoder, *layers, *map(get_attention, layers), *map(get_mlp, layers)]
    unknown = ", ".join(sorted({type(part).__name__ for part in parts} - known))
    return Decline("its parts are not known", unknown) if unknown else None


def _add_residual(x: Any, residual: Any = 0) -> Any:
    return x + residual  # also without one: the first norm may overwrite x


def _first_norm(norm: Any, x: Any) -> tuple[Any, Any]:
    return norm(x), x  # the residual is x itself, so x counts as overwritten


def _final_norm(norm: Any, x: Any, residual: Any) -> Any:
    return norm(x, residual)[0]
