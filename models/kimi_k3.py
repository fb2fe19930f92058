"""Kimi-K3: linear attention (KDA) in most layers, latent attention in the others, joined by attention residuals.

The classes are vllm-ascend's. Attention of both kinds is one op, and steps are cut into nano-batches only. The last
norm is not part of the forward, which hands on hidden states before it.

Proven inside vllm-ascend 0.30.0rc2 on a stand-in for CANN only (tests/ascend/test_kimi_k3.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dbo_models.attention_residuals import ResidualRecorder
from dbo_models.collectives import record_gather
from dbo_models.forms import get_decoder
from dbo_models.layers import LayerRecorder, check_parts, get_layers
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

NAMES = {"AscendKimiK3DeltaAttention": "linear_attention", "AscendKimiMLAAttention": "attention"}  # costs differ
KNOWN = frozenset({"AscendKimiLinearModel", "AscendKimiDecoderLayer", "AscendKimiMLP", "AscendKimiMoE", *NAMES})


class KimiK3Adapter:
    """Splits vllm-ascend's decoder layers at their communication."""

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        decoder = get_decoder(model)
        unknown: Decline | None = check_parts(decoder, KNOWN)
        if unknown is not None:
            return unknown
        variants = ", ".join(_list_variants(decoder))
        return Decline("this variant of Kimi-K3 is not supported", variants) if variants else None

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, hidden states before the last norm out."""
        decoder, tokens = get_decoder(model), None
        layers = get_layers(decoder)
        blocks = -(-len(layers) // decoder.config.attn_res_block_size)
        if decoder.use_sequence_parallel:
            x, tokens = p.compute("chunk", collectives.take_chunk, x, outputs=2, token_wise=True)
        recorder = ResidualRecorder(LayerRecorder(p, collectives, positions, _attend, _route), tokens)
        sums = recorder.record_begin(x, blocks)
        for index, layer in layers.items():
            with p.layer(index):
                sums = recorder.record_layer(layer, NAMES[type(layer.self_attn).__name__], sums)
        hidden: Value = record_gather(
            p, "final_gather", collectives, recorder.record_end(decoder, sums, blocks), tokens
        )
        return hidden


def _list_variants(decoder: Any) -> Iterator[str]:
    """Yield what this adapter does not know of a decoder of known classes."""
    layers = get_layers(decoder).values()
    if not all(layer.use_attn_residuals for layer in layers):
        yield "no attention residuals (attn_res_block_size)"
    if any(layer.fuse_o_proj_mm_reduce_scatter for layer in layers):
        yield "attention whose last kernel reduces to chunks (Ascend 950)"
    if any(_reduces_twice(layer.mlp) for layer in layers):
        yield "a latent MoE with tensor parallelism and without --enable-expert-parallel"
    if getattr(decoder, "aux_hidden_state_layers", ()):
        yield "a drafter that reads hidden states between layers"


def _reduces_twice(mlp: Any) -> bool:
    """Return whether results of experts are reduced before they are projected, and those of shared experts, too."""
    if not getattr(mlp, "use_latent_moe", False):
        return False
    config = mlp.experts.moe_config
    return config.tp_size > 1 and not config.is_sequence_parallel


def _attend(attention: Any, positions: Any, x: Any) -> Any:
    return attention(positions=positions, hidden_states=x)


def _route(mlp: Any, x: Any) -> Any:
    return mlp.gate(x)[0]
