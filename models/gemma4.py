"""Gemma 4: a norm before and after each block, and in some models experts in parallel with the MLP.

The norm after a block takes the reduced result, because it is not linear. The router and the experts read two norms of
the same hidden states.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from dbo_models.collectives import record_reduce
from dbo_models.experts import ExpertsRecorder
from dbo_models.forms import BlockRecorder, get_decoder, record_add, record_layers
from dbo_models.layers import check_parts
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

KNOWN = frozenset({"Gemma4Model", "Gemma4DecoderLayer", "Gemma4Attention", "Gemma4MLP"})


class Gemma4Adapter:
    """Splits layers at their all-reduces: after attention, after the MLP, and after the experts."""

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        decoder = get_decoder(model)
        unknown: Decline | None = check_parts(decoder, KNOWN)
        if unknown is not None:
            return unknown
        if decoder.per_layer_model_projection is not None:
            return Decline("Gemma 4 with embeddings for each layer (hidden_size_per_layer_input) is not supported")
        if decoder.fast_prefill_enabled:
            return Decline("Gemma 4 with kv_sharing_fast_prefill is not supported")
        return None

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        decoder, blocks = get_decoder(model), BlockRecorder(p, collectives, positions)
        hidden: Value = record_layers(p, decoder, partial(_record_layer, blocks), decoder.norm, x)
        return hidden


def _record_layer(blocks: BlockRecorder, layer: Any, x: Value) -> Value:
    p = blocks.p
    declare = partial(p.compute, token_wise=True)
    attended = blocks.record_attention(layer.self_attn, declare("attn_norm", layer.input_layernorm, x))
    x = record_add(p, "attn_add", x, declare("attn_post_norm", layer.post_attention_layernorm, attended))
    ran = blocks.record_block("mlp", layer.mlp, declare("mlp_norm", layer.pre_feedforward_layernorm, x))
    if layer.enable_moe_block:
        ran = declare("experts_add", partial(_add_experts, layer), ran, _record_experts(blocks, layer, x))
    added: Value = declare("mlp_add", partial(_finish_layer, layer), ran, x)
    return added


def _record_experts(blocks: BlockRecorder, layer: Any, x: Value) -> Value:
    p, collectives, norm = blocks.p, blocks.collectives, layer.pre_feedforward_layernorm_2
    experts = layer.experts if hasattr(layer, "experts") else layer.moe.experts  # from vLLM 0.33 on, and before
    moe = collectives.decompose(experts, layer.router, takes_chunks=True)
    if moe is None:
        run = partial(_run_experts, experts, norm, layer.router)
        routed: Value = blocks.record_block("moe", run, x)
        return routed
    normed = p.compute("moe_norm", norm, x, token_wise=True)
    routed = ExpertsRecorder(p, collectives, moe, routed_by=x).record(normed)
    return routed if moe.is_sequence_parallel else record_reduce(p, "moe_reduce", collectives, routed)


def _run_experts(experts: Any, norm: Any, router: Any, x: Any) -> Any:
    return experts(norm(x), router(x))


def _add_experts(layer: Any, dense: Any, routed: Any) -> Any:
    return layer.post_feedforward_layernorm_1(dense) + layer.post_feedforward_layernorm_2(routed)


def _finish_layer(layer: Any, x: Any, residual: Any) -> Any:
    return (layer.post_feedforward_layernorm(x) + residual) * layer.layer_scalar
