"""Decoders whose attention and MLP read the same norm and share one all-reduce: Cohere's Command R and A."""

from __future__ import annotations

from functools import partial
from typing import Any

from dbo_models.forms import record_add, record_layers, record_parallel_blocks
from dbo_models.layers import check_parts
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

KNOWN = frozenset({"CohereModel", "CohereDecoderLayer", "CohereAttention", "CohereMLP"})


class CohereAdapter:
    """Splits layers at their one all-reduce."""

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        unknown: Decline | None = check_parts(model.model, KNOWN)
        return unknown

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""

        def record_layer(layer: Any, x: Value) -> Value:
            normed = p.compute("norm", partial(_norm, layer.input_layernorm), x)
            both = record_parallel_blocks(p, layer.self_attn, layer.mlp, collectives, positions, normed)
            added: Value = record_add(p, "add", x, both)
            return added

        hidden: Value = record_layers(p, model.model, record_layer, _norm, x)
        return hidden


def _norm(module: Any, x: Any) -> Any:
    return module(x)[0]  # Cohere's norms also return the residual, unchanged
