"""The language models of Qwen2.5-VL and Qwen3-VL: dense decoders, or with a mixture of experts."""

from __future__ import annotations

from functools import partial
from typing import Any

from dbo_models.dense import KNOWN
from dbo_models.layers import LayerRecorder, check_parts, get_layers
from dbo_models.moe import QWEN3
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

KNOWN_QWEN3 = KNOWN | QWEN3 | {"Qwen3LLMModel", "Qwen3VLDecoderLayer", "Qwen3MoeLLMModel", "Qwen3VLMoeDecoderLayer"}


class Qwen25VLAdapter:
    """Splits a dense decoder. Image tokens are treated like any other."""

    takes_stages = True

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        unknown: Decline | None = check_parts(model.language_model.model, KNOWN)
        return unknown

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        hidden: Value = LayerRecorder(p, collectives, positions).record_decoder(model.language_model.model, x)
        return hidden


class Qwen3VLAdapter:
    """Splits a decoder whose first layers add image features (deepstack), which vLLM stores per token in buffers."""

    takes_stages = True

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        unknown: Decline | None = check_parts(model.language_model.model, KNOWN_QWEN3)
        return unknown

    def take_inputs(self, model: Any, x: Any, keep: bool) -> Any:
        """Return embedded tokens [tokens, hidden] with image features appended [tokens, (1 + levels) * hidden]."""
        from torch import cat

        tokens = x.shape[0]
        features = model._get_deepstack_input_embeds(tokens) if _count_levels(model) else None
        if features is None:
            return x
        wide = cat([x, *features.tensors.values()], dim=1)
        if not keep:
            model._clear_deepstack_input_embeds(tokens)
        return wide

    def give_inputs(self, model: Any, x: Any) -> None:
        """Restore the features appended to *x* [tokens, (1 + levels) * hidden] in vLLM's buffers for its forward."""
        from torch import stack

        levels = _count_levels(model)
        if levels:
            model._set_deepstack_input_embeds(stack(x.chunk(1 + levels, dim=1)[1:]))

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens and their features in, normed hidden states out."""
        decoder = model.language_model.model
        levels = _count_levels(model) if 0 in get_layers(decoder) else 0  # vLLM adds all features on the first stage
        features: list[Value] = []
        if levels:
            x, *features = p.compute(
                "take_features", partial(_split_features, levels + 1), x, outputs=levels + 1, token_wise=True
            )
        hidden: Value = LayerRecorder(p, collectives, positions).record_decoder(decoder, x, features)
        return hidden


def _count_levels(model: Any) -> int:
    """Return the number of layers that image features are added to: 0 if the language model is served alone.

    Qwen3-Omni's buffers are then on the meta device, and nothing reads them.
    """
    buffers = getattr(model, "deepstack_input_embeds", None)
    levels: int = 0 if not buffers or buffers[0].is_meta else model.deepstack_num_level
    return levels


def _split_features(parts: int, x: Any) -> tuple[Any, ...]:
    return tuple(part.clone() for part in x.chunk(parts, dim=1))  # norms may overwrite them
