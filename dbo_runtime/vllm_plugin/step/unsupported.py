"""Features of vLLM that splitting does not support, as read from vLLM's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.features import returns_routed_experts, scatters_residuals
from dbo_runtime.vllm_plugin.api.known import HYBRID_MODELS
from dbo_runtime.vllm_plugin.api.speculation import compare_hidden_sizes
from dbo_runtime.vllm_plugin.platforms.registry import get_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_config(vllm_config: VllmConfig) -> Decline | None:
    """Return the first feature in use that splitting into micro-batches does not support, or None."""
    return next(list_unsupported(vllm_config), None)


def list_unsupported(vllm_config: VllmConfig) -> Iterator[Decline]:
    """Yield each feature in use that splitting does not support.

    What attention reads, states, drafts and context included, is a reason against micro-batches only.
    """
    platform = get_platform()
    yield from platform.list_unsupported(vllm_config)
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    has_drafter = vllm_config.speculative_config is not None
    drafts_in_pipeline = has_drafter and parallel.pipeline_parallel_size > 1
    features = (
        (scatters_residuals(vllm_config), "pipeline parallel with sequence parallelism (enable_sp)"),
        (parallel.enable_elastic_ep, "elastic expert parallel"),
        (parallel.enable_eplb, "expert load balancing (EPLB)"),
        (parallel.decode_context_parallel_size > 1 and not platform.supports_dcp, "decode context parallel"),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallel"),
        (returns_routed_experts(vllm_config), "returning the routed experts"),
        (parallel.use_ubatching, "vLLM's own micro-batching (--enable-dbo)"),
        (model.is_attention_free, "a state-space model"),
        (model.is_encoder_decoder, "an encoder-decoder model"),
    )
    yield from (Decline(f"not supported yet: {what}") for is_used, what in features if is_used)
    of_micro_batches = (
        (drafts_in_pipeline and not platform.drafts_in_pipeline(vllm_config), "speculative decoding in a pipeline"),
        (model.is_hybrid and model.architecture not in HYBRID_MODELS, "this model's linear attention"),
        (
            model.is_hybrid and has_drafter and not platform.drafts_from_states,
            "speculative decoding with linear attention",
        ),
        (model.is_hybrid and parallel.use_sequence_parallel_moe, "sequence-parallel MoE with linear attention"),
    )
    yield from (Decline(f"not supported yet: {what}", only_micro=True) for is_used, what in of_micro_batches if is_used)
    if vllm_config.lora_config is not None:
        yield from _list_unsupported_with_lora(vllm_config)
    sizes = compare_hidden_sizes(vllm_config)
    if sizes is not None:
        yield Decline("the drafter is one for another model", sizes)


def _list_unsupported_with_lora(vllm_config: VllmConfig) -> Iterator[Decline]:
    platform, model = get_platform(), vllm_config.model_config
    features = (
        (not platform.splits_lora, f"LoRA on {platform.name!r}"),
        (vllm_config.lora_config.fully_sharded_loras, "fully sharded LoRA"),
        (model.is_moe, "LoRA with a mixture of experts"),
        (model.use_mla, "LoRA with latent attention"),
    )
    yield from (Decline(f"not supported yet: {what}") for is_used, what in features if is_used)
