"""Features of vllm-ascend that are not split, and those that were not compared yet.

Read against vllm-ascend 0.30.0rc2 and 0.23.0.post1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.features import uses_second_runner
from dbo_runtime.vllm_plugin.api.known import SPARSE_MODELS, Proven
from dbo_runtime.vllm_plugin.api.speculation import name_drafter
from dbo_runtime.vllm_plugin.platforms.npu_flashcomm import is_earlier, replicates_shared_experts
from dbo_runtime.vllm_plugin.platforms.npu_indices import check_stages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm_ascend.ascend_config import AscendConfig


MODELSLIM, UNQUANTIZED = "ascend", "FLOAT"
DEEPSTACK_MODELS = ("Qwen3VLMoeForConditionalGeneration",)
SCHEMES = (".weight", ".quant_type")  # suffixes of the description's keys that hold a layer's scheme
INT8_SCHEMES = ("W8A8", "W8A8_DYNAMIC", "W4A8_DYNAMIC")  # of INT8_METHODS; a whole model's name may be the first
EXPERT_SCHEMES = (*INT8_SCHEMES, "W8A8_MXFP8", "W4A8_MXFP", "W4A4_MXFP4")  # the others are of MX_METHODS
EXPANSION_MODE = "HCCL_OP_EXPANSION_MODE"
DENSE_INT8 = "C8"  # kv_cache_type of ModelSlim's description
FLASH_BALANCING = 3  # number of a load balancing policy
UNQUANTIZED_CACHES = ("auto", "bfloat16", "float16", "float32", "bf16")


def list_unproven(vllm_config: VllmConfig, proven: Proven) -> Iterator[str]:
    """Yield the architecture, quantized weights, drafter and options, each if it is not among the *proven* ones."""
    architecture = vllm_config.model_config.architecture
    if architecture not in proven.models:
        yield f"model {architecture}"
    unproven = sorted(find_quantizations(vllm_config) - {*proven.quantizations, UNQUANTIZED})
    if unproven:
        yield f"quantized weights {', '.join(unproven)}"
    drafter = name_drafter(vllm_config)
    if drafter is not None and drafter not in proven.drafters:
        yield f"drafter {drafter}"
    if proven.compared_options:
        from vllm_ascend.ascend_config import get_ascend_config

        config = get_ascend_config()
        yield from (f"option {name}" for name in proven.compared_options if getattr(config, name))


def list_hazards(vllm_config: VllmConfig, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield why split steps may wait for each other forever, with the remedy.

    MC2's kernels hold cores until other ranks arrive. A collective of the other micro-batch needs cores, too, where
    HCCL runs it on those (AIV). No NPU has shown that they do, or do not.
    """
    may_take_mc2 = vllm_config.model_config.is_moe and vllm_config.parallel_config.enable_expert_parallel
    if may_take_mc2 and environ.get(EXPANSION_MODE) == "AIV":
        what = f"{EXPANSION_MODE}=AIV with MC2: a collective may wait for cores that MC2's kernels hold, a deadlock"
        yield what, f"unset {EXPANSION_MODE}, at least until split steps have run on this kind of machine"


def find_quantizations(vllm_config: VllmConfig) -> set[str]:
    """Return the quantizations of a model's weights and caches, in the names of ModelSlim's description.

    For weights of another method, the name is the method's. Caches are quantized by `--kv-cache-dtype`, by layer, or
    for all of attention (`fa_quant_type`), which on A2 and A3 happens only on nodes that decode for others. Caches of
    indexers are quantized by `--attention-config.indexer_kv_dtype`.
    """
    sparse = vllm_config.model_config.architecture in SPARSE_MODELS
    caches = {
        "cache of sparse attention" if sparse else "cache": vllm_config.cache_config.cache_dtype,
        "cache of an indexer": getattr(vllm_config.attention_config, "indexer_kv_dtype", "auto"),
    }
    named = {f"{dtype} {cache}" for cache, dtype in caches.items() if dtype not in UNQUANTIZED_CACHES}
    return _find_quantized_weights(vllm_config) | named


def check_experts(vllm_config: VllmConfig, config: AscendConfig) -> Decline | None:
    """Return why experts that get tokens of other ranks cannot be split: by the names of their weights' quantization.

    It is known before weights are loaded only of ModelSlim's. Where tokens stay on their rank, experts are one op.
    """
    parallel, quantized = vllm_config.parallel_config, vllm_config.quant_config
    sends = parallel.data_parallel_size > 1 or parallel.use_sequence_parallel_moe or replicates_shared_experts(config)
    shares_out = vllm_config.model_config.is_moe and parallel.enable_expert_parallel and sends
    if not shares_out or quantized is None or quantized.get_name() != MODELSLIM:
        return None
    description = quantized.quant_description
    of_experts = {str(scheme) for name, scheme in description.items() if ".experts." in name and _is_scheme(name)}
    schemes = of_experts or {str(description.get("model_quant_type", UNQUANTIZED))}
    unknown = ", ".join(sorted(schemes - {*EXPERT_SCHEMES, UNQUANTIZED}))
    known = ", ".join(EXPERT_SCHEMES)
    return Decline("the MoE method cannot be decomposed", f"{unknown}; known: {known}") if unknown else None


def _is_scheme(name: str) -> bool:
    return name.endswith(SCHEMES)


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
    schemes = (scheme for name, scheme in description.items() if name in named or _is_scheme(name))
    return {str(scheme) for scheme in schemes if scheme}  # an unknown file may have any value there


def list_unsupported(vllm_config: VllmConfig) -> Iterator[Decline]:
    """Yield each feature in use that splitting does not support."""
    from vllm_ascend.ascend_config import get_ascend_config

    config = get_ascend_config()
    experts = check_experts(vllm_config, config)
    if experts is not None:
        yield experts
    try:
        yield from _list_unsupported(vllm_config, config)
        yield from _list_earlier(vllm_config, config) if is_earlier(config) else _list_later(vllm_config, config)
    except AttributeError as error:  # happens with an unknown release under DBO_CHECK=1
        yield Decline("vllm-ascend's configuration has changed", str(error))


def _list_unsupported(vllm_config: VllmConfig, config: AscendConfig) -> Iterator[Decline]:
    finegrained, parallel = config.finegrained_tp_config, vllm_config.parallel_config
    features = (
        # vllm-ascend adds a chunk of the images' features to hidden states that are not in chunks.
        (
            parallel.use_sequence_parallel_moe and vllm_config.model_config.architecture in DEEPSTACK_MODELS,
            "FlashComm (sequence-parallel MoE) with deepstack",
        ),
        (uses_second_runner(vllm_config), "vLLM's second model runner with vllm-ascend"),
        (config.mix_placement, "shared experts among the routed ones (mix_placement)"),
        (config.xlite_graph_config.enabled, "xlite graphs"),
        (finegrained.oproj_tensor_parallel_size > 0, "a separate tensor parallel group for o_proj"),
        (finegrained.mlp_tensor_parallel_size > 0, "a separate tensor parallel group for the MLP"),
        (
            vllm_config.cache_config.mamba_cache_mode == "all",
            "a cache of states after each block (mamba_cache_mode=all)",
        ),
    )
    yield from _decline_used(features)
    # A prompt that goes on reads its earlier keys from the cache, in int8. So would the second part of a prompt that is
    # cut, whose step has these keys in floats.
    of_micro_batches = ((_reads_int8_keys(vllm_config), "int8 caches of dense attention (kv_cache_type: C8)"),)
    yield from _decline_used(of_micro_batches, only_micro=True)


def _reads_int8_keys(vllm_config: VllmConfig) -> bool:
    """Return whether dense attention caches keys in int8, and has those of the step's own prompts in floats."""
    transfer = vllm_config.kv_transfer_config
    only_produces = transfer is not None and transfer.kv_role == "kv_producer"  # and caches floats
    return DENSE_INT8 in _find_quantized_weights(vllm_config) and not only_produces


def _list_later(vllm_config: VllmConfig, config: AscendConfig) -> Iterator[Decline]:
    """Yield features in use that 0.30 has and 0.23.0 lacks."""
    from vllm_ascend.ascend_config import is_mega_moe_supported

    in_pipeline = vllm_config.parallel_config.pipeline_parallel_size > 1
    shards_cache = vllm_config.parallel_config.decode_context_parallel_size > 1
    is_sparse = vllm_config.model_config.architecture in SPARSE_MODELS
    has_fused_mc2 = vllm_config.model_config.is_moe and config.enable_fused_mc2  # its value is 1 where 2 was requested
    balancing = config.eplb_config
    features = (
        (has_fused_mc2 and is_mega_moe_supported(), "MegaMoe (enable_fused_mc2: 2)"),
        (
            balancing.dynamic_eplb and balancing.eplb_policy_type == FLASH_BALANCING,
            "expert load balancing by the load of each step (eplb_policy_type: 3)",
        ),
        (balancing.dynamic_eplb and in_pipeline, "dynamic expert load balancing in a pipeline"),
        # vLLM's models load as many experts as vLLM's own configuration has; further experts would keep uninitialized
        # weights.
        (
            balancing.dynamic_eplb and balancing.num_redundant_experts > 0,
            "redundant experts, whose weights vllm-ascend does not load (num_redundant_experts)",
        ),
        (balancing.expert_map_path is not None, "an expert map (eplb_config)"),
        (config.enable_force_eplb, "forced expert load balancing"),
        (config.sparse_kv_offload_config.enabled, "sparse KV offload"),
        (shards_cache and not is_sparse, "decode context parallel without sparse attention"),
        (shards_cache and in_pipeline, "decode context parallel in a pipeline"),
        (config.kvpp_config.size > 1, "KV cache pipelines (kvpp_config)"),
    )
    yield from _decline_used(features)
    handed_on = check_stages(vllm_config)
    if handed_on is not None:
        yield handed_on


def _list_earlier(vllm_config: VllmConfig, config: AscendConfig) -> Iterator[Decline]:
    """Yield features in use that 0.23.0 has and 0.30 lacks, or has in another form."""
    shards_cache = vllm_config.parallel_config.decode_context_parallel_size > 1
    in_pipeline = vllm_config.parallel_config.pipeline_parallel_size > 1
    has_chunks, architecture = replicates_shared_experts(config), vllm_config.model_config.architecture
    # Nano-batches leave attention its own metadata, and call it once a layer, in the order of the layers.
    of_micro_batches = (
        (shards_cache, "decode context parallel with vllm-ascend 0.23"),
        (bool(config.layer_sharding), "weights shared out by layer (layer_sharding)"),
        # Steps are padded for chunks, and attention wants a slot for each token of the padding.
        (
            has_chunks and architecture in SPARSE_MODELS and not _shares_out_tokens(vllm_config),
            "FlashComm with sparse attention and vllm-ascend 0.23, without enable_dsa_cp",
        ),
    )
    yield from _decline_used(of_micro_batches, only_micro=True)
    features = (
        (has_chunks and in_pipeline, "FlashComm in a pipeline with vllm-ascend 0.23"),
        (config.eplb_config.dynamic_eplb, "dynamic expert load balancing as in vllm-ascend 0.23 (eplb_config)"),
        (config.eplb_config.expert_map_path is not None, "an expert map as in vllm-ascend 0.23 (eplb_config)"),
        (config.flashcomm2_oproj_tensor_parallel_size > 0, "FlashComm 2"),
        (config.enable_matmul_allreduce, "products fused with their all-reduce (enable_matmul_allreduce)"),
        (config.multistream_overlap_gate, "a separate stream for the gate (multistream_overlap_gate)"),
    )
    yield from _decline_used(features)


def _shares_out_tokens(vllm_config: VllmConfig) -> bool:
    """Return whether context parallel attention is asked for; vllm-ascend's function needs a current configuration."""
    return bool((vllm_config.additional_config or {}).get("enable_dsa_cp"))


def _decline_used(features: Iterable[tuple[bool, str]], only_micro: bool = False) -> Iterator[Decline]:
    return (Decline(f"not supported yet: {what}", only_micro=only_micro) for is_used, what in features if is_used)
