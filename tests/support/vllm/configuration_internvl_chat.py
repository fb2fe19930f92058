"""The config of InternVL, whose class comes with its weights and not with transformers: tests copy this file."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig


class InternVLChatConfig(PretrainedConfig):  # type: ignore[misc]
    """Configs of the encoder and of the language model, by the names that vLLM reads."""

    model_type = "internvl_chat"

    def __init__(
        self, vision_config: dict[str, Any] | None = None, llm_config: dict[str, Any] | None = None, **others: Any
    ) -> None:
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        self.llm_config = AutoConfig.for_model(**(llm_config or {"model_type": "qwen3"}))
        super().__init__(**others)
