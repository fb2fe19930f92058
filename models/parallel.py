"""Decoders whose attention and MLP read the same norm and share one all-reduce: Cohere's Command R and A."""

from __future__ import annotations

from functools import partial
from typing import Any

from dbo_models.forms import BlockRecorder, record_add, record_layers
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
        blocks = BlockRecorder(p, collectives, positions)
        hidden: Value = record_layers(
            p, model.model, partial(_record_layer, blocks), partial(_norm, model.model.norm), x
        )
        return hidden


def _record_layer(blocks: BlockRecorder, layer: Any, x: Value) -> Value:
    normed = blocks.p.compute("norm", partial(_norm, layer.input_layernorm), x, token_wise=True)
    both = blocks.record_parallel(layer.self_attn, layer.mlp, normed)
    added: Value = record_add(blocks.p, "add", x, both)
    return added


def _norm(module: Any, x: Any) -> Any:
    return module(x)[0]  # Cohere's norms also return the residual, unchanged
