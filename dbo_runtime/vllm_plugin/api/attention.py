"""The attention backends of a model. Read against vLLM 0.23.0 to 0.33.0."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def name_backends(vllm_config: VllmConfig) -> set[str]:
    """Return the names of the attention backends of a model's layers, such as FLASH_ATTN.

    Before the model is loaded, this is the backend requested by the user; empty if vLLM is to choose.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    found = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    asked = getattr(vllm_config.attention_config, "backend", None)
    return found or ({asked.name} if asked is not None else set())
