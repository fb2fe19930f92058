"""Decoder layers with hyper-connections (arXiv:2409.19606).

A token has several residual streams [tokens, streams, hidden]. Attention and experts each read a mix of the streams,
and their results are spread over all streams again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from dbo_models.collectives import record_gather, record_reduce
from dbo_models.experts import record_dispatch, record_experts
from dbo_runtime.adapter import Collectives
from dbo_runtime.program import ProgramBuilder, Value


class Inputs(NamedTuple):
    """The inputs of layers besides the streams.

    Attributes:
        positions: positions of all tokens [tokens].
        input_ids: token ids of the tokens whose streams are passed, or None if no layer reads them.
        tokens: number of tokens in all chunks, if the streams are this rank's chunk only; otherwise None.
    """

    positions: Value
    input_ids: Value | None
    tokens: Value | None


def record_layer(p: ProgramBuilder, layer: Any, collectives: Collectives, streams: Value, inputs: Inputs) -> Value:
    """Declare one layer, [tokens, streams, hidden] or [chunk, streams, hidden] -> like it."""
    x, post, comb = p.compute("attn_mix", partial(_mix_for_attention, layer), streams, outputs=3)
    x = record_attention(p, layer, collectives, x, inputs)
    streams = p.compute("attn_spread", layer.hc_post, x, streams, post, comb)
    x, cast, post, comb = p.compute("mlp_mix", partial(_mix_for_experts, layer), streams, outputs=4)
    x = record_mlp(p, layer.mlp, collectives, x, cast, inputs)
    spread: Value = p.compute("mlp_spread", layer.hc_post, x, streams, post, comb)
    return spread


def record_attention(p: ProgramBuilder, layer: Any, collectives: Collectives, x: Value, inputs: Inputs) -> Value:
    """Declare attention and its communication, [tokens, hidden] or [chunk, hidden] -> like *x*.

    With context parallelism (`enable_dsa_cp`), the op itself gathers chunks and reduces to chunks, on vLLM's
    communicator.
    """
    attend = partial(_attend, layer.self_attn)
    if inputs.tokens is None:
        x = p.compute("attention", collectives.without_reduce(attend), inputs.positions, x, ordered=True)
        reduced: Value = record_reduce(p, "attn_reduce", collectives, x)
        return reduced
    if layer.enable_dsa_cp:
        attended: Value = p.compute("attention", attend, inputs.positions, x, ordered=True)
        return attended
    x = record_gather(p, "attn_gather", collectives, x, inputs.tokens)
    x = p.compute("attention", attend, inputs.positions, x, ordered=True)  # leaves its reduce to the layer
    chunk: Value = p.comm("attn_scatter", collectives.reduce_scatter, x, outputs=2)[0]
    return chunk


def record_mlp(p: ProgramBuilder, mlp: Any, collectives: Collectives, x: Value, cast: Value, inputs: Inputs) -> Value:
    """Declare the experts, [tokens, hidden] or [chunk, hidden] -> like *x*.

    *cast* is *x* in float32, for the router. An op that takes only *x* casts it itself.
    """
    ids = inputs.input_ids if mlp.hash else None
    moe = collectives.decompose(mlp.experts, takes_chunks=True)
    assert moe is not None or inputs.tokens is None, "experts of chunks are dispatched"
    if moe is None:
        run = collectives.without_reduce(partial(_run_experts, mlp))
        x = p.compute("moe", run, x, cast, *(() if ids is None else (ids,)))
    elif inputs.tokens is None:
        x = record_experts(p, moe, collectives, x, ids)
    else:
        x = record_dispatch(p, moe, collectives, x, inputs.tokens, input_ids=ids)
    if moe is None or not moe.is_sequence_parallel:
        x = record_reduce(p, "mlp_reduce", collectives, x)
    return x


def _mix_for_attention(layer: Any, streams: Any) -> tuple[Any, Any, Any]:
    x, post, comb = layer.hc_pre(streams, layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base)
    return layer.input_layernorm(x), post, comb


def _mix_for_experts(layer: Any, streams: Any) -> tuple[Any, Any, Any, Any]:
    x, post, comb = layer.hc_pre(streams, layer.hc_ffn_fn, layer.hc_ffn_scale, layer.hc_ffn_base)
    return (*layer.rms_norm_cast(x), post, comb)


def _attend(attention: Any, positions: Any, x: Any) -> Any:
    return attention(positions, x, None)


def _run_experts(mlp: Any, x: Any, cast: Any, input_ids: Any = None) -> Any:
    return mlp(x, input_ids=input_ids, hidden_states_fp32=cast)
