"""Decoders with a norm before and after each block: Gemma 2 and 3, GLM-4.

The norm before a block adds the residual. The norm after a block takes the reduced result, because it is not linear.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from dbo_models.forms import BlockRecorder
from dbo_models.layers import LayerRecorder, Stream, check_parts, record_add_norm
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value


class Norms(NamedTuple):
    """A family's attribute names of the norms after attention, before the MLP and after the MLP."""

    after_attention: str
    before_mlp: str
    after_mlp: str


GEMMA = Norms("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
GLM4 = Norms("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class SandwichAdapter:
    """Splits layers at their two all-reduces.

    Args:
        known: classes of the decoder's parts that the adapter knows.
        norms: attribute names of the norms.
    """

    takes_stages = True

    def __init__(self, known: frozenset[str], norms: Norms) -> None:
        self._known = known
        self._norms = norms

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        unknown: Decline | None = check_parts(model.model, self._known)
        return unknown

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        layers, blocks = LayerRecorder(p, collectives, positions), BlockRecorder(p, collectives, positions)
        record_layer = partial(self._record_layer, blocks)
        hidden: Value = layers.record_decoder(model.model, x, record_layer=record_layer)
        return hidden

    def _record_layer(self, blocks: BlockRecorder, layer: Any, stream: Stream) -> Stream:
        p = blocks.p
        after_attention, before_mlp, after_mlp = (getattr(layer, name) for name in self._norms)
        x, residual, _ = record_add_norm(p, "attn_norm", layer.input_layernorm, stream)
        x = p.compute("attn_post_norm", after_attention, blocks.record_attention(layer.self_attn, x), token_wise=True)
        x, residual, _ = record_add_norm(p, "mlp_norm", before_mlp, Stream(x, residual))
        x = p.compute("mlp_post_norm", after_mlp, blocks.record_block("mlp", layer.mlp, x), token_wise=True)
        return Stream(x, residual)


def _name_parts(family: str, mlp: str) -> frozenset[str]:
    return frozenset({mlp, *(f"{family}{part}" for part in ("Model", "DecoderLayer", "Attention"))})


class Gemma2Adapter(SandwichAdapter):
    """Gemma 2. Every other layer uses sliding-window attention."""

    def __init__(self) -> None:
        super().__init__(_name_parts("Gemma2", "Gemma2MLP"), GEMMA)


class Gemma3Adapter(SandwichAdapter):
    """Gemma 3's text models. Their attention norms queries and keys."""

    def __init__(self) -> None:
        super().__init__(_name_parts("Gemma3", "Gemma3MLP"), GEMMA)


class Glm4Adapter(SandwichAdapter):
    """GLM-4-0414. Its MLP is Llama's."""

    def __init__(self) -> None:
        super().__init__(_name_parts("Glm4", "LlamaMLP"), GLM4)
