"""Qwen3-MoE: grouped-query attention, then experts without shared ones (or, in some layers, a dense MLP).

Tensor parallel, each layer ends in one all-reduce and overlaps like a dense one. Data parallel, tokens are dispatched
to their experts: during the first micro-batch's dispatch, `compute` runs the second one's attention.
"""

from __future__ import annotations

from typing import Any

from dbo_models.layers import check_parts, get_layers, record_decoder
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

KNOWN = frozenset(
    {"Qwen3MoeModel", "Qwen3MoeDecoderLayer", "Qwen3MoeAttention", "Qwen3MoeMLP", "Qwen3MoeSparseMoeBlock"}
)


class Qwen3MoeAdapter:
    """Splits vLLM's decoder layers at their communication."""

    takes_stages = True

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        layers = get_layers(model.model).values()
        unknown: Decline | None = check_parts(model.model, KNOWN)
        if unknown is not None:
            return unknown
        if any(layer.self_attn.dual_chunk_attention_config for layer in layers):
            return Decline("dual chunk attention is not supported")
        return None

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        hidden: Value = record_decoder(p, model.model, collectives, x, positions)
        return hidden
