"""Qwen3-Next and Qwen3.5: gated linear attention in most layers; dense, or with a mixture of experts.

Linear attention keeps one state per request. The head of a cut request leaves this state to the request's tail. Linear
attention ends in one all-reduce, so it overlaps like attention.
"""

from __future__ import annotations

import inspect
from typing import Any

from dbo_models.layers import LayerRecorder, check_parts, get_attention, get_layers, get_mlp
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

KNOWN = frozenset(
    {
        "Qwen3NextModel",
        "Qwen3NextDecoderLayer",
        "Qwen3NextAttention",
        "Qwen2MoeMLP",
        "Qwen3NextSparseMoeBlock",
        "Qwen3_5Model",
        "Qwen3_5DecoderLayer",
        "QwenGatedDeltaNetAttention",
    }
)


class QwenHybridAdapter:
    """Splits vLLM's decoder layers at their communication."""

    takes_stages = True

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        decoder = self.get_decoder(model)
        unknown: Decline | None = check_parts(decoder, KNOWN)
        if unknown is not None:
            return unknown
        layers = get_layers(decoder).values()
        if any(_needs_output(get_attention(layer)) for layer in layers):
            return Decline(
                "attention that writes its results to a tensor that it is given (vLLM 0.23) is not supported"
            )
        if any(layer.layer_scale for layer in layers):
            return Decline("layers that scale their results are not supported")
        if any(getattr(get_mlp(layer), "replicate_shared_expert", False) for layer in layers):
            return Decline("shared experts on every rank are not supported")
        return None

    def get_decoder(self, model: Any) -> Any:
        """Return the decoder of a language model, or of a multimodal model without deepstack."""
        return model.language_model.model if hasattr(model, "language_model") else model.model

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        recorder = LayerRecorder(p, collectives, positions, attend)
        hidden: Value = recorder.record_decoder(self.get_decoder(model), x)
        return hidden


def _needs_output(attention: Any) -> bool:
    """Return whether attention takes an output tensor: it reduces another tensor, so the reduce stays in it."""
    output = inspect.signature(attention.forward).parameters.get("output")
    return output is not None and output.default is inspect.Parameter.empty


def attend(attention: Any, positions: Any, x: Any) -> Any:
    """Call attention, or linear attention, which takes no positions."""
    return attention(positions, x) if hasattr(attention, "rotary_emb") else attention(x)
