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
        decoder = self.get_decoder(model)
        takes_output = any(_takes_output(get_attention(layer)) for layer in get_layers(decoder).values())
        recorder = LayerRecorder(p, collectives, positions, attend_to_output if takes_output else attend)
        hidden: Value = recorder.record_decoder(decoder, x)
        return hidden


class Output:
    """In place of a tensor that attention copies its results to (vLLM 0.23): takes the results themselves.

    They are the tensor that attention reduces, so attention can be run without its reduce.

    Attributes:
        results: the tensor that attention has assigned [tokens, hidden].
    """

    results: Any = None

    def __setitem__(self, rows: slice, results: Any) -> None:
        self.results = results


def _takes_output(attention: Any) -> bool:
    """Return whether attention takes a tensor for its results, as in vLLM 0.23."""
    output = inspect.signature(attention.forward).parameters.get("output")
    return output is not None and output.default is inspect.Parameter.empty


def attend_to_output(attention: Any, positions: Any, x: Any) -> Any:
    """Call attention that takes a tensor for its results; return its results."""
    output = Output()
    arguments = {"positions": positions} if hasattr(attention, "rotary_emb") else {}
    attention(hidden_states=x, output=output, **arguments)
    return output.results


def attend(attention: Any, positions: Any, x: Any) -> Any:
    """Call attention, or linear attention, which takes no positions."""
    return attention(positions, x) if hasattr(attention, "rotary_emb") else attention(x)
