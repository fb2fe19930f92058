"""DeepSeek V4 (Flash and Pro): hyper-connections around sparse attention to compressed keys, and around experts.

The class is vllm-ascend's. A token has several residual streams [tokens, streams, hidden]: attention and experts each
read a mix of them, and what they return is spread over all of them again (arXiv:2409.19606). Attention with its
indexer and compressors is one op, which writes and reads up to five caches. The first layers choose experts by the
token itself.

Tensor parallel, each layer has two all-reduces, which overlap as in other mixtures of experts: `comm` reduces one
micro-batch's attention (or experts) while `compute` runs the next one's. Only what is reduced goes there; the streams,
which are several times as large, stay on `compute`.

Proven inside vllm-ascend 0.30.0rc2 on a stand-in for CANN only (tests/ascend/test_deepseek_v4.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from dbo_models.collectives import record_gather, record_reduce
from dbo_models.experts import record_dispatch, record_experts
from dbo_models.layers import check_parts, get_layers
from dbo_runtime.adapter import INPUT_IDS, KEPT, Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

KNOWN = frozenset({"DeepseekV4Model", "DeepseekV4DecoderLayer", "DeepseekV4Attention", "DeepseekV4MoE"})


class Inputs(NamedTuple):
    """What layers read besides the streams.

    Attributes:
        positions: of all tokens [tokens].
        input_ids: the numbers of the tokens whose streams there are, or None if no layer reads them.
        tokens: how many there are, if there are streams of this rank's chunk of them only; else None.
    """

    positions: Value
    input_ids: Value | None
    tokens: Value | None


class DeepseekV4Adapter:
    """Splits vllm-ascend's decoder layers at their communication."""

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        decoder = model.model
        unknown: Decline | None = check_parts(decoder, KNOWN)
        if unknown is not None:
            return unknown
        layers = list(get_layers(decoder).values())
        if not all(hasattr(layer, "rms_norm_cast") for layer in layers):
            return Decline("DeepSeek V4 is split as vllm-ascend's class only")
        indexers = [layer.self_attn.indexer for layer in layers if layer.self_attn.indexer is not None]
        if any(indexer.use_index_cache for indexer in indexers):
            return Decline("layers of DeepSeek V4 pass on which keys were chosen (use_index_cache)")
        if any(layer.mlp.gate.bias_vl is not None for layer in layers):
            return Decline("DeepSeek V4 with images is not supported")
        if any(layer.enable_dsa_cp and not layer.use_sequence_parallel_moe for layer in layers):
            return Decline("context parallel sparse attention (enable_dsa_cp) of DeepSeek V4 without FlashComm")
        if decoder.aux_hidden_state_layers:
            return Decline("drafters that read hidden states between layers of DeepSeek V4 are not supported")
        return None

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        decoder = model.model
        layers, tokens = get_layers(decoder), None
        ids = p.input(INPUT_IDS) if any(layer.mlp.hash for layer in layers.values()) else None
        if decoder.use_sequence_parallel_moe:
            x, tokens = p.compute("chunk", collectives.take_chunk, x, outputs=2)
            ids = None if ids is None else p.compute("chunk_ids", collectives.take_chunk, ids, outputs=2)[0]
        streams = p.compute("streams", partial(_make_streams, decoder.hc_mult), x)
        for index, layer in layers.items():
            with p.layer(index):
                streams = record_layer(p, layer, collectives, streams, Inputs(positions, ids, tokens))
        streams = record_gather(p, "final_gather", collectives, streams, tokens)
        if decoder._needs_mtp_hidden_states:
            p.output(KEPT, streams)
        hidden: Value = p.compute("head", partial(_finish, decoder), streams)
        return hidden

    def keep_output(self, model: Any, parts: Sequence[Any]) -> None:
        """Leave the streams of all tokens before the head, which MTP layers read, in the buffer of the model."""
        decoder = model.model
        if decoder._mtp_hidden_buffer is None:
            from torch import empty

            decoder._mtp_hidden_buffer = empty(
                decoder._mtp_buffer_shape, dtype=decoder._mtp_buffer_dtype, device=decoder.device
            )
        first = 0
        for part in parts:
            decoder._mtp_hidden_buffer[first : first + part.shape[0]].copy_(part.flatten(1))
            first += part.shape[0]


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
    """Declare attention with what ranks communicate for it, [tokens, hidden] or [chunk, hidden] -> like *x*.

    Context parallel (`enable_dsa_cp`), it gathers chunks and reduces to them itself, on vLLM's communicator.
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
    x = p.compute("attention", attend, inputs.positions, x, ordered=True)  # which leaves its reduce to the layer
    chunk: Value = p.comm("attn_scatter", collectives.reduce_scatter, x, outputs=2)[0]
    return chunk


def record_mlp(p: ProgramBuilder, mlp: Any, collectives: Collectives, x: Value, cast: Value, inputs: Inputs) -> Value:
    """Declare the experts, [tokens, hidden] or [chunk, hidden] -> like *x*.

    *cast* is *x* in float32, which the router reads; where its op has *x* only, it casts that itself.
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


def _make_streams(count: int, x: Any) -> Any:
    return x.unsqueeze(1).repeat(1, count, 1)


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


def _finish(decoder: Any, streams: Any) -> Any:
    return decoder.norm(decoder.hc_head(streams, decoder.hc_head_fn, decoder.hc_head_scale, decoder.hc_head_base))
