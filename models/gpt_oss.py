"""gpt-oss: grouped-query attention with sinks, and a mixture of experts whose router is its block's."""

from __future__ import annotations

from typing import Any

from dbo_models.layers import LayerRecorder, check_parts
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

KNOWN = frozenset({"GptOssModel", "TransformerBlock", "OAIAttention", "MLPBlock"})


class GptOssAdapter:
    """Splits vLLM's decoder layers at their communication."""

    takes_stages = True

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        unknown: Decline | None = check_parts(model.model, KNOWN)
        return unknown

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        hidden: Value = LayerRecorder(p, collectives, positions, attend, route).record_decoder(model.model, x)
        return hidden


def attend(attention: Any, positions: Any, x: Any) -> Any:
    """Call attention, which takes the hidden states first."""
    return attention(x, positions)


def route(block: Any, x: Any) -> Any:
    """Return the router's logits [tokens, experts]."""
    return block.router(x)
