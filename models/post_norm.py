"""Decoders with a norm after each block and none before it: EXAONE 4."""

from __future__ import annotations

from typing import Any

from dbo_models.forms import record_add, record_attention_block, record_block
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
        decoder = model.model
        for index, layer in enumerate(decoder.layers):
            with p.layer(index):
                x = self._record_layer(p, layer, collectives, x, positions)
        hidden: Value = p.compute("final_norm", decoder.norm, x)
        return hidden

    def _record_layer(
        self, p: ProgramBuilder, layer: Any, collectives: Collectives, x: Value, positions: Value
    ) -> Value:
        attended = record_attention_block(p, layer.self_attn, collectives, positions, x)
        x = record_add(p, "attn_add", x, p.compute("attn_post_norm", layer.post_attention_layernorm, attended))
        reduced = record_block(p, "mlp", layer.mlp, collectives, x)
        total: Value = record_add(
            p, "mlp_add", x, p.compute("mlp_post_norm", layer.post_feedforward_layernorm, reduced)
        )
        return total
