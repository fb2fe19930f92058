"""What of vllm-ascend is not split: features that are not supported, and what was not run.

Read against vllm-ascend 0.30.0rc2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.features import uses_second_runner
from dbo_runtime.vllm_plugin.api.known import (
    KNOWN_ASCEND_DRAFTERS,
    KNOWN_ASCEND_MODELS,
    KNOWN_ASCEND_QUANTIZATIONS,
    SPARSE_MODELS,
)
from dbo_runtime.vllm_plugin.api.speculation import name_drafter

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm_ascend.ascend_config import AscendConfig


MODELSLIM, UNQUANTIZED = "ascend", "FLOAT"
DEEPSTACK_MODELS = ("Qwen3VLMoeForConditionalGeneration",)
SCHEMES = (".weight", ".quant_type")  # how keys of the description end that have the scheme of a layer
UNQUANTIZED_CACHES = ("auto", "bfloat16", "float16", "float32", "bf16")


def list_unproven(vllm_config: VllmConfig) -> Iterator[Decline]:
    """Yield the architecture, the quantized weights and the drafter with which no split step was compared."""
    architecture = vllm_config.model_config.architecture
    if architecture not in KNOWN_ASCEND_MODELS:
        yield Decline("this model is not proven with vllm-ascend yet", architecture)
    unproven = sorted(find_quantizations(vllm_config) - {*KNOWN_ASCEND_QUANTIZATIONS, UNQUANTIZED})
    if unproven:
        yield Decline("these quantized weights are not proven with vllm-ascend yet", ", ".join(unproven))
    drafter = name_drafter(vllm_config)
    if drafter not in (None, *KNOWN_ASCEND_DRAFTERS):
        yield Decline("this drafter is not proven with vllm-ascend yet", drafter)


def find_quantizations(vllm_config: VllmConfig) -> set[str]:
    """Return what a model's weights and caches are quantized to, by the names in ModelSlim's description.

    Of another method's weights it is the method's name. Caches are quantized by `--kv-cache-dtype`, by layer, or for
    all of attention (`fa_quant_type`), which on A2 and A3 only nodes that decode for others do; those of indexers by
    `--attention-config.indexer_kv_dtype`.
    """
    sparse = vllm_config.model_config.architecture in SPARSE_MODELS
    caches = {
        "cache of sparse attention" if sparse else "cache": vllm_config.cache_config.cache_dtype,
        "cache of an indexer": getattr(vllm_config.attention_config, "indexer_kv_dtype", "auto"),
    }
    named = {f"{dtype} {cache}" for cache, dtype in caches.items() if dtype not in UNQUANTIZED_CACHES}
    return _find_quantized_weights(vllm_config) | named


def _find_quantized_weights(vllm_config: VllmConfig) -> set[str]:
    quantized = vllm_config.quant_config
    if quantized is None:
        return set()
    if quantized.get_name() != MODELSLIM:
        return {quantized.get_name()}
    description: dict[str, object] = quantized.quant_description
    transfer = vllm_config.kv_transfer_config
    decodes = transfer is not None and transfer.kv_role in ("kv_consumer", "kv_both")
    caches = ["kv_cache_type", "indexer_quant_type", *(["fa_quant_type"] if decodes else [])]
    named = {"model_quant_type", *caches}
    schemes = (scheme for name, scheme in description.items() if name in named or name.endswith(SCHEMES))
    return {str(scheme) for scheme in schemes if scheme}  # an unknown file may have anything there


def list_unsupported(vllm_config: VllmConfig) -> Iterator[Decline]:
    """Yield each feature in use that splitting does not support."""
    from vllm_ascend.ascend_config import get_ascend_config, is_mega_moe_supported

    try:
        config = get_ascend_config()  # which has replaced 2 by 1 and noted that
        has_mega_moe = bool(config.enable_fused_mc2) and vllm_config.model_config.is_moe and is_mega_moe_supported()
        yield from _list_unsupported(vllm_config, config, has_mega_moe)
    except AttributeError as error:  # an unknown release, with DBO_CHECK=1
        yield Decline("vllm-ascend's configuration has changed", str(error))


def _list_unsupported(vllm_config: VllmConfig, config: AscendConfig, has_mega_moe: bool = False) -> Iterator[Decline]:
    finegrained, parallel = config.finegrained_tp_config, vllm_config.parallel_config
    features = (
        (
            parallel.use_sequence_parallel_moe and parallel.pipeline_parallel_size > 1,
            "FlashComm (sequence-parallel MoE) in a pipeline",
        ),
        # vllm-ascend gives its layers a chunk of the images' features, to add to hidden states that are not in chunks.
        (
            parallel.use_sequence_parallel_moe and vllm_config.model_config.architecture in DEEPSTACK_MODELS,
            "FlashComm (sequence-parallel MoE) with deepstack",
        ),
        (uses_second_runner(vllm_config), "vLLM's second model runner with vllm-ascend"),
        (config.eplb_config.dynamic_eplb, "dynamic expert load balancing (eplb_config)"),
        (config.eplb_config.expert_map_path is not None, "an expert map (eplb_config)"),
        (config.enable_force_eplb, "forced expert load balancing"),
        (config.mix_placement, "shared experts among the routed ones (mix_placement)"),
        (has_mega_moe, "MegaMoe (enable_fused_mc2: 2)"),
        (config.xlite_graph_config.enabled, "xlite graphs"),
        (config.sparse_kv_offload_config.enabled, "sparse KV offload"),
        (
            config.enable_dsa_cp and parallel.pipeline_parallel_size > 1,
            "context parallel sparse attention (enable_dsa_cp) in a pipeline",
        ),
        (config.kvpp_config.size > 1, "KV cache pipelines (kvpp_config)"),
        (finegrained.oproj_tensor_parallel_size > 0, "a separate tensor parallel group for o_proj"),
        (finegrained.mlp_tensor_parallel_size > 0, "a separate tensor parallel group for the MLP"),
        (
            vllm_config.cache_config.mamba_cache_mode == "all",
            "a cache of states after each block (mamba_cache_mode=all)",
        ),
    )
    return (Decline(f"not supported yet: {what}") for is_used, what in features if is_used)
