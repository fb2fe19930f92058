"""MiniMax-M3: dense attention in the first layers, then sparse attention over blocks of keys that an indexer chooses.

The classes are vllm-ascend's. Attention with its indexer is one op, which writes and reads two caches. Each layer ends
in a dense MLP or in experts with shared ones, and overlaps like the layers of other mixtures of experts.

Proven inside vllm-ascend 0.30.0rc2 on a stand-in for CANN only (tests/ascend/test_minimax.py).
"""

from __future__ import annotations

from typing import Any

from dbo_models.layers import LayerRecorder, check_parts
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

KNOWN = frozenset(
    {
        "MiniMaxM3Model",
        "MiniMaxM3DecoderLayer",
        "MiniMaxM3Attention",
        "MiniMaxM3SparseAttention",
        "MiniMaxM3MLP",
        "MiniMaxM3MoE",
    }
)


class MiniMaxM3Adapter:
    """Splits vllm-ascend's decoder layers at their communication."""

    takes_stages = True

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        unknown: Decline | None = check_parts(self.get_decoder(model), KNOWN)
        return unknown

    def get_decoder(self, model: Any) -> Any:
        """Return the decoder of the language model, or of the language model inside the multimodal model."""
        return getattr(model, "language_model", model).model

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        hidden: Value = LayerRecorder(p, collectives, positions).record_decoder(self.get_decoder(model), x)
        return hidden
