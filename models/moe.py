"""Decoders with grouped-query attention and a mixture of experts: GLM-4.5 to 4.7, Hy3, MiniMax-M2, Mixtral, Qwen3-MoE.

With tensor parallelism, each layer ends in one all-reduce and overlaps like a dense one. With data parallelism, tokens
are dispatched to their experts: `compute` runs the second micro-batch's attention during the first one's dispatch.
"""

from __future__ import annotations

from typing import Any

from dbo_models.layers import LayerRecorder, Route, check_attention, check_parts
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

QWEN3 = frozenset(
    {"Qwen3MoeModel", "Qwen3MoeDecoderLayer", "Qwen3MoeAttention", "Qwen3MoeMLP", "Qwen3MoeSparseMoeBlock"}
)
GLM4 = frozenset({"Glm4MoeModel", "Glm4MoeDecoderLayer", "Glm4MoeAttention", "Glm4MoeMLP", "Glm4MoE"})
HY3 = frozenset({"HYV3Model", "HYV3DecoderLayer", "HYV3Attention", "HYV3FeedForward", "HYV3MoEFused"})
MINIMAX = frozenset({"MiniMaxM2Model", "MiniMaxM2DecoderLayer", "MiniMaxM2Attention", "MiniMaxM2MoE"})
MIXTRAL = frozenset({"MixtralModel", "MixtralDecoderLayer", "MixtralAttention", "MixtralMoE"})


class MoeAdapter:
    """Splits vLLM's decoder layers at their communication.

    Args:
        known: classes of the decoder's parts that the adapter knows.
        route: function that returns the router's logits, for blocks that hold the gate themselves.
    """

    takes_stages = True

    def __init__(self, known: frozenset[str], route: Route | None = None) -> None:
        self._known = known
        self._route = route

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        unknown: Decline | None = check_parts(model.model, self._known) or check_attention(model.model)
        return unknown

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        hidden: Value = LayerRecorder(p, collectives, positions, route=self._route).record_decoder(model.model, x)
        return hidden


class Qwen3MoeAdapter(MoeAdapter):
    """Qwen3-MoE. Some of its layers may be dense."""

    def __init__(self) -> None:
        super().__init__(QWEN3)


class Glm4MoeAdapter(MoeAdapter):
    """GLM-4.5 to 4.7: shared experts, and dense first layers."""

    def __init__(self) -> None:
        super().__init__(GLM4, lambda block, x: block.gate(x.float()))


class Hy3Adapter(MoeAdapter):
    """Hunyuan 3: shared experts, and dense first layers."""

    def __init__(self) -> None:
        super().__init__(HY3, route)


class MixtralAdapter(MoeAdapter):
    """Mixtral, whose experts are in `block_sparse_moe`."""

    def __init__(self) -> None:
        super().__init__(MIXTRAL, route)


class MiniMaxM2Adapter(MoeAdapter):
    """MiniMax-M2, whose experts are in `block_sparse_moe`.

    Its attention norms queries and keys across heads, so tensor parallel ranks sum a few bytes per token before they
    attend. That reduce stays in the op, on the compute lane.
    """

    def __init__(self) -> None:
        super().__init__(MINIMAX, route)


def route(block: Any, x: Any) -> Any:
    """Call the gate of a block, which returns logits and a bias."""
    return block.gate(x)[0]
