"""Dense decoders that share one shape: Llama, Mistral, Qwen2, Qwen3.

`comm` reduces one micro-batch's attention (or MLP) while `compute` runs the next one's attention (or MLP).
"""

from __future__ import annotations

from typing import Any

from dbo_models.layers import check_parts, get_layers, record_decoder
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

KNOWN = frozenset(
    name + part
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
    for part in ("Model", "DecoderLayer", "Attention", "MLP")
)


class DenseAdapter:
    """Splits vLLM's decoder layers at their two all-reduces."""

    takes_stages = True

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        unknown: Decline | None = check_parts(model.model, KNOWN)
        if unknown is not None:
            return unknown
        for layer in get_layers(model.model).values():
            if getattr(layer, "ada_rms_norm_t_cond", None) is not None:
                return Decline("norms that depend on time (Voxtral) are not supported")
            if getattr(layer.self_attn, "dual_chunk_attention_config", None):
                return Decline("dual chunk attention is not supported")
        return None

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        hidden: Value = record_decoder(p, model.model, collectives, x, positions)
        return hidden
