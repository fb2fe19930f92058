"""The language models of InternVL: dense (Qwen2, Qwen3) or with a mixture of experts (Qwen3-MoE)."""

from __future__ import annotations

from typing import Any

from dbo_models.dense import KNOWN
from dbo_models.moe import QWEN3, MoeAdapter
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value


class InternVLAdapter:
    """Splits the language model. The vision encoder stays unsplit; image tokens are treated like any other."""

    takes_stages = True

    def __init__(self) -> None:
        self._adapter = MoeAdapter(QWEN3 | {name for name in KNOWN if name.startswith("Qwen")})

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        unknown: Decline | None = self._adapter.decline(model.language_model)
        return unknown

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        hidden: Value = self._adapter.record(p, model.language_model, collectives, x, positions)
        return hidden
