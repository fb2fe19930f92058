"""Load formats of vLLM, which define how a model gets its weights. Read against vLLM 0.23.0 to 0.33.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig


def register_load_format(name: str, fill_weights: Callable[[torch.nn.Module], None]) -> None:
    """Register a load format that calls *fill_weights* on the model, unless the name is registered already."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if name in _LOAD_FORMAT_TO_MODEL_LOADER:  # vLLM would warn of a second registration
        return

    @register_model_loader(name)
    class Loader(BaseModelLoader):  # type: ignore[misc] # vLLM is untyped to us
        def download_model(self, model_config: ModelConfig) -> None:
            """There is nothing to download."""

        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            fill_weights(model)
