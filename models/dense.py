"""Dense decoders that share one shape: Llama, Mistral, Qwen2, Qwen3.

`comm` reduces one micro-batch's attention (or MLP) while `compute` runs the next one's attention (or MLP).
"""

from __future__ import annotations

from typing import Any

from dbo_models.layers import LayerRecorder, check_attention, check_parts, get_layers
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
        unknown: Decline | None = check_parts(model.model, KNOWN) or check_attention(model.model)
        layers = get_layers(model.model).values()
        if unknown is None and any(getattr(layer, "ada_rms_norm_t_cond", None) is not None for layer in layers):
            return Decline("norms that depend on time (Voxtral) are not supported")
        return unknown

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        hidden: Value = LayerRecorder(p, collectives, positions).record_decoder(model.model, x)
        return hidden
