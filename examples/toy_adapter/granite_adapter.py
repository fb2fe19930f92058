"""Granite for dbo_runtime: an adapter in a separate package."""

from __future__ import annotations

from functools import partial
from typing import Any

from dbo_runtime import Decline, ProgramBuilder, Value


class GraniteAdapter:
    """Splits the layers of vLLM's GraniteForCausalLM at their two all-reduces."""

    def decline(self, model: Any) -> Decline | None:
        """Return why this model, as configured and loaded, cannot be split, or None if it can."""
        unknown = {type(layer).__name__ for layer in model.model.layers} - {"GraniteDecoderLayer"}
        return Decline("its layers are not known", ", ".join(sorted(unknown))) if unknown else None

    def record(self, p: ProgramBuilder, model: Any, collectives: Any, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out. Reads like the model's forward."""
        decoder = model.model
        x = p.compute("scale_embedding", partial(scale, decoder.config.embedding_multiplier), x)
        for index, layer in enumerate(decoder.layers):
            with p.layer(index):
                x = self.record_layer(p, layer, collectives, x, positions)
        hidden: Value = p.compute("final_norm", decoder.norm, x)
        return hidden

    def record_layer(self, p: ProgramBuilder, layer: Any, collectives: Any, x: Value, positions: Value) -> Value:
        """Declare one layer [tokens, hidden] -> [tokens, hidden]."""
        add = partial(add_scaled, layer.residual_multiplier)

        normed = p.compute("attn_norm", layer.input_layernorm, x)
        part = p.compute("attention", collectives.without_reduce(layer.self_attn), positions, normed, ordered=True)
        reduced = p.comm("attn_reduce", collectives.all_reduce, part, overwrites=(part,))
        x = p.compute("attn_add", add, x, reduced)

        normed = p.compute("mlp_norm", layer.post_attention_layernorm, x)
        part = p.compute("mlp", collectives.without_reduce(layer.mlp), normed)
        reduced = p.comm("mlp_reduce", collectives.all_reduce, part, overwrites=(part,))
        result: Value = p.compute("mlp_add", add, x, reduced)
        return result


def scale(factor: float, x: Any) -> Any:
    """Return x times a factor."""
    return x * factor


def add_scaled(factor: float, residual: Any, x: Any) -> Any:
    """Return the residual plus x times a factor."""
    return residual + x * factor
