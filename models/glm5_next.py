"""GLM-5.3-Flash: linear attention (KDA) in most layers, sparse attention in the others, joined by hyper-connections.

The classes are vllm-ascend's. Linear attention keeps one state per request; the indexer of sparse attention keeps the
keys of the last, incomplete pool in a ring per request. Both are one op each, and steps are cut into nano-batches only.

Proven inside vllm-ascend 0.30.0rc2 on a stand-in for CANN only (tests/ascend/test_glm5_next.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from dbo_models.collectives import record_gather
from dbo_models.forms import get_decoder
from dbo_models.hyper_connections import Form, StreamRecorder
from dbo_models.layers import check_parts, get_layers
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

KNOWN = frozenset(
    {
        "Glm5NextModel",
        "Glm5NextDecoderLayer",
        "Glm5NextLinearAttention",
        "Glm5NextMLAAttention",
        "Glm5NextMLP",
        "Glm5NextMoE",
    }
)


class Glm5NextAdapter:
    """Splits vllm-ascend's decoder layers at their communication."""

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        decoder = get_decoder(model)
        unknown: Decline | None = check_parts(decoder, KNOWN)
        if unknown is not None:
            return unknown
        if not type(decoder).__module__.startswith("vllm_ascend."):
            return Decline("GLM-5.3-Flash is split as vllm-ascend's class only")
        if not decoder.config.mhc:
            return Decline("GLM-5.3-Flash without hyper-connections (mhc) is not supported")
        return None

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        decoder, tokens = get_decoder(model), None
        layers = get_layers(decoder)
        if decoder.is_sequence_parallel:
            x, tokens = p.compute("chunk", collectives.take_chunk, x, outputs=2, token_wise=True)
        count = decoder.config.mhc_num_residual_streams
        streams = p.compute("streams", partial(_make_streams, count), x, token_wise=True)
        recorder = StreamRecorder(p, collectives, FORM, positions, tokens=tokens)
        for index, layer in layers.items():
            with p.layer(index):
                streams = recorder.record_layer(layer, streams)
        x = p.compute("join", _join, streams, token_wise=True)
        x = record_gather(p, "final_gather", collectives, x, tokens)
        hidden: Value = p.compute("final_norm", decoder.norm, x, token_wise=True)
        return hidden


def _make_streams(count: int, x: Any) -> Any:
    return x.unsqueeze(1).expand(-1, count, -1).contiguous()


def _join(streams: Any) -> Any:
    return streams.mean(dim=1)


def _attend(attention: Any, positions: Any, x: Any) -> Any:
    return attention(hidden_states=x, positions=positions)


def _mix(layer: Any, streams: Any, part: str, norm: Any) -> tuple[Any, Any, Any]:
    weights = (getattr(layer, f"hc_{part}_{name}") for name in ("fn", "scale", "base"))
    post, comb, x = layer.hc_pre(streams, *weights, norm_weight=norm.weight.data, norm_eps=norm.variance_epsilon)
    return x, post, comb


def _mix_for_attention(layer: Any, streams: Any) -> tuple[Any, Any, Any]:
    return _mix(layer, streams, "attn", layer.input_layernorm)


def _mix_for_mlp(layer: Any, streams: Any) -> tuple[Any, Any, Any]:
    return _mix(layer, streams, "ffn", layer.post_attention_layernorm)


FORM = Form(_attend, _mix_for_attention, _mix_for_mlp)
