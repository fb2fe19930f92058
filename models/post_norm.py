"""Decoders with a norm after each block and none before it: EXAONE 4."""

from __future__ import annotations

from functools import partial
from typing import Any

from dbo_models.forms import BlockRecorder, record_add, record_layers
from dbo_models.layers import check_parts
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

KNOWN = frozenset({"Exaone4Model", "Exaone4DecoderLayer", "Exaone4Attention", "Exaone4GatedMLP"})


class PostNormAdapter:
    """Splits layers at their two all-reduces, each of which is followed by a norm."""

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        unknown: Decline | None = check_parts(model.model, KNOWN)
        return unknown

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        blocks = BlockRecorder(p, collectives, positions)
        hidden: Value = record_layers(p, model.model, partial(_record_layer, blocks), model.model.norm, x)
        return hidden


def _record_layer(blocks: BlockRecorder, layer: Any, x: Value) -> Value:
    p = blocks.p
    attended = blocks.record_attention(layer.self_attn, x)
    x = record_add(
        p, "attn_add", x, p.compute("attn_post_norm", layer.post_attention_layernorm, attended, token_wise=True)
    )
    ran = blocks.record_block("mlp", layer.mlp, x)
    added: Value = record_add(
        p, "mlp_add", x, p.compute("mlp_post_norm", layer.post_feedforward_layernorm, ran, token_wise=True)
    )
    return added
