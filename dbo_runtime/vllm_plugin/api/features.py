"""Features that different vLLM versions switch on in different places. Read against vLLM 0.23.0 to 0.33.0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def returns_routed_experts(vllm_config: VllmConfig) -> bool:
    """Return whether requests get the experts chosen for them. Since vLLM 0.32 these are an auxiliary output."""
    owner = getattr(vllm_config, "aux_output_config", vllm_config.model_config)
    return bool(owner.enable_return_routed_experts)


def uses_second_runner(vllm_config: VllmConfig) -> bool:
    """Return whether steps run in vLLM's second model runner (V2), which makes its own batches and metadata."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def may_diverge(vllm_config: VllmConfig) -> bool:
    """Return whether rounding alone may change a step's choice of experts or keys, as it may with coarse types."""
    return bool(vllm_config.model_config.dtype != torch.float32)


def mistakes_one_token(vllm_config: VllmConfig, model: torch.nn.Module) -> bool:
    """Return whether the model's own forward is wrong for steps of one token.

    With sequence-parallel MoE, vLLM 0.30's DeepSeek layers tell by the number of rows whether these are spread over
    ranks. Of one token, each rank has one row either way (vLLM issue #50154; PR #50691 tells layers instead).
    """
    if not vllm_config.parallel_config.use_sequence_parallel_moe:
        return False
    codes = [kind.forward.__code__ for kind in {type(layer) for layer in model.modules()}]
    return any("input_is_sequence_parallel" in code.co_varnames[code.co_argcount :] for code in codes)


def takes_host_lengths(vllm_config: VllmConfig) -> bool:
    """Return whether a model has an encoder whose attention can take its lengths from the host.

    Compiled or captured encoders are excluded, because the lengths are integers, and those of the first images would
    stay.
    """
    compilation = vllm_config.compilation_config
    is_traced = compilation.compile_mm_encoder or compilation.cudagraph_mm_encoder
    return vllm_config.model_config.multimodal_config is not None and not is_traced


def scatters_residuals(vllm_config: VllmConfig) -> bool:
    """Return whether pipeline stages send residuals whose rows are spread over ranks.

    Only compiled steps make such residuals, by a pass in vLLM before 0.32 (`is_residual_scattered_for_sp` in its
    v1/worker/utils.py).
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    return stages > 1 and bool(getattr(vllm_config.compilation_config.pass_config, "enable_sp", False))
