"""Features of vLLM that are switched on in different places in its versions. Read against vLLM 0.23.0 to 0.33.0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def returns_routed_experts(vllm_config: VllmConfig) -> bool:
    """Return whether requests get the experts that were chosen for them: since vLLM 0.32 an auxiliary output."""
    owner = getattr(vllm_config, "aux_output_config", vllm_config.model_config)
    return bool(owner.enable_return_routed_experts)


def uses_second_runner(vllm_config: VllmConfig) -> bool:
    """Return whether steps are those of vLLM's second model runner (V2), which makes its own batches and metadata."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def may_diverge(vllm_config: VllmConfig) -> bool:
    """Return whether rounding alone may lead a step elsewhere: where types are coarse, to other experts or keys."""
    return bool(vllm_config.model_config.dtype != torch.float32)


def scatters_residuals(vllm_config: VllmConfig) -> bool:
    """Return whether stages of a pipeline send residuals whose rows are spread over ranks.

    Only compiled steps make them, by a pass that vLLM has before 0.32 (`is_residual_scattered_for_sp` in its
    v1/worker/utils.py).
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    return stages > 1 and bool(getattr(vllm_config.compilation_config.pass_config, "enable_sp", False))
