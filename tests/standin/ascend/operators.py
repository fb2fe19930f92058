"""Which operators there are, and for whom."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from standin_ascend import (
    attention,
    attention_residuals,
    block_sparse,
    byte_caches,
    compressed_attention,
    compression,
    earlier,
    earlier_indexer,
    earlier_states,
    experts,
    hashed_experts,
    hyper_connections,
    linear_attention,
    mc2,
    mlapo,
    ordering,
    others,
    prolog,
    quantized,
    shared_keys,
    situ,
    sparse,
    vision,
)

SCHEMAS = (  # vllm-ascend's own, which its compiled half would declare
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6)"
    " -> (Tensor y, Tensor rstd, Tensor x)",
    "npu_gemma_rms_norm(Tensor x, Tensor gamma, float epsilon=1e-6) -> (Tensor y, Tensor rstd)",
    "moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm, int norm_type,"
    " bool out_flag, float routed_scaling_factor, float eps, Tensor? bias_opt=None) -> (Tensor, Tensor, Tensor)",
    "grouped_matmul_swiglu_quant_weight_nz(Tensor x, Tensor weight, Tensor weight_scale, Tensor x_scale,"
    " Tensor group_list, *, Tensor? bias=None, Tensor? offset=None, float swiglu_limit=-1000000.0)"
    " -> (Tensor output, Tensor output_scale, Tensor output_offset)",
    "grouped_matmul_swiglu_quant_weight_nz_tensor_list(Tensor x, Tensor[] weight, Tensor[] weight_scale,"
    " Tensor x_scale, Tensor group_list, *, Tensor? bias=None, Tensor? offset=None, float swiglu_limit=0.0)"
    " -> (Tensor output, Tensor output_scale, Tensor output_offset)",
    "grouped_matmul_swiglu_quant_v2(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale,"
    " Tensor group_list, *, Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, Tensor? bias=None,"
    " int dequant_mode=0, int quant_mode=0, int group_list_type=0, float swiglu_limit=0.0)"
    " -> (Tensor output, Tensor output_scale)",
    "npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None,"
    " Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, bool activate_left=True,"
    " int quant_mode=0, int swiglu_mode=0, float clamp_limit=0.0, float glu_alpha=1.0, float glu_bias=0.0)"
    " -> (Tensor y, Tensor scale)",
    earlier.ROUTING_SCHEMA,
    earlier.INDEXER_SCHEMA,
    *earlier.META_SCHEMAS,
    *earlier_indexer.SCHEMAS,
    *earlier_states.SCHEMAS,
    sparse.ATTENTION_SCHEMA,
    *byte_caches.SCHEMAS,
    mlapo.SCHEMA,
    *block_sparse.SCHEMAS,
    mc2.FUSED_SCHEMA,
    *hyper_connections.SCHEMAS,
    *compression.SCHEMAS,
    *compressed_attention.SCHEMAS,
    *shared_keys.SCHEMAS,
    hashed_experts.SCHEMA,
    attention_residuals.SCHEMA,
    situ.SCHEMA,
    "device_print(Tensor x, str s) -> ()",
    "device_print_tensor(Tensor x, str s) -> ()",
)
OPERATORS = {
    "npu": {
        "npu_fused_infer_attention_score": vision.attend,  # which calls attention.attend_packed
        "npu_fused_infer_attention_score_v2": attention.attend_paged,
        "npu_fused_infer_attention_score_v2.out": attention.attend_paged_into,
        "_npu_fused_infer_attention_score_v2_get_max_workspace": attention.find_workspace,
        "npu_attention_update": attention.update_attention,
        "npu_gather_pa_kv_cache": attention.gather_cache,
        "npu_kv_rmsnorm_rope_cache": attention.norm_rope_cache,
        "npu_interleave_rope": attention.rotate,
        "npu_transpose_batchmatmul": attention.multiply_batches,
        "npu_moe_init_routing_v2": experts.route,
        "npu_grouped_matmul": experts.multiply_groups,
        "npu_moe_token_permute": experts.permute,
        "npu_moe_token_unpermute": experts.unpermute,
        "npu_format_cast": others.cast_format,
        "npu_scatter_pa_kv_cache": vision.scatter_cache,
        "npu_rotary_mul": vision.rotate_halves,
        "npu_mrope": others.rotate_by_cache,
        "npu_chunk_gated_delta_rule": linear_attention.prefill_states,
        "npu_dynamic_quant": quantized.quantize_dynamically,
        "npu_dynamic_block_quant": byte_caches.quantize_tiles,
        "npu_quantize": quantized.quantize,
        "npu_quant_matmul": quantized.multiply,
        "npu_lightning_indexer": sparse.choose_keys,
        "npu_scatter_nd_update_": sparse.scatter,
        "npu_mla_prolog_v3": prolog.prepare,
        "npu_clipped_swiglu": others.activate_clipped,
        "npu_moe_distribute_dispatch_v2": mc2.dispatch,
        "npu_moe_distribute_combine_v2": mc2.combine,
    },
    "_C_ascend": {
        "npu_add_rms_norm_bias": others.add_norm,
        "npu_gemma_rms_norm": others.norm_by_offset,
        "npu_moe_init_routing_custom": earlier.route,
        "npu_causal_conv1d_custom": earlier_states.convolve,
        "npu_recurrent_gated_delta_rule": linear_attention.update_states,  # in 0.23.0
        "npu_fused_gdn_gating": earlier_states.gate,
        "moe_gating_top_k": experts.choose_experts,
        "npu_dequant_swiglu_quant": quantized.activate_product,
        "grouped_matmul_swiglu_quant_v2": quantized.multiply_int4_and_activate,
        "grouped_matmul_swiglu_quant_weight_nz": quantized.multiply_and_activate,
        "grouped_matmul_swiglu_quant_weight_nz_tensor_list": quantized.multiply_each_and_activate,
        "npu_sparse_flash_attention": sparse.attend_to_chosen,
        "npu_kv_quant_sparse_flash_attention_vllm": byte_caches.attend_to_bytes,
        "npu_lightning_indexer": sparse.choose_keys,  # in 0.23.0
        "npu_lightning_indexer_quant": byte_caches.choose_keys,
        "store_kv_block_metadata": byte_caches.find_runs,
        "store_kv_block": byte_caches.store_runs,
        "mla_preprocess": mlapo.prepare,
        "npu_msa_index_score": block_sparse.rate_blocks,
        "npu_sparse_attention_score": block_sparse.attend_to_blocks,
        "npu_scatter_nd_update_sk": block_sparse.scatter_rows,
        "dispatch_ffn_combine": mc2.run_experts,
        "attn_res_fwd": attention_residuals.mix_blocks,
        "dequant_situ_quant": situ.activate_product,
        "npu_hc_pre_v2": hyper_connections.mix_streams,
        "npu_hc_pre_v3": hyper_connections.mix_streams_as_told,
        "npu_hc_post": hyper_connections.spread_result,
        "npu_rms_norm_cast": hyper_connections.norm_and_cast,
        "npu_rms_norm_dynamic_quant": hyper_connections.norm_and_quantize,
        "inplace_partial_rotary_mul": compressed_attention.rotate_slice,
        "compressor": compression.compress,
        "compressor_metadata": compression.find_places,
        "compressor_metadata_out": compression.find_places_into,
        "npu_sparse_attn_sharedkv": compressed_attention.attend_to_shared,
        "npu_sparse_attn_sharedkv_metadata": compressed_attention.describe_attention,
        "npu_quant_lightning_indexer_v2": compressed_attention.choose_compressed,
        "npu_quant_lightning_indexer_v2_metadata": compressed_attention.describe_choice,
        "npu_quant_lightning_indexer_v3": shared_keys.choose_keys,
        "npu_sparse_flash_mla": shared_keys.attend,
        "npu_sparse_flash_mla_metadata": shared_keys.describe_attention,
        "npu_vllm_quant_lightning_indexer": earlier_indexer.choose_keys,  # in 0.23.0, as the next two
        "npu_vllm_quant_lightning_indexer_metadata": earlier_indexer.describe_choice,
        "npu_scatter_nd_update_v2": block_sparse.scatter_rows,
        "moe_gating_top_k_hash": hashed_experts.choose_experts,
    },
    "atb": {
        "npu_paged_cache_load": earlier.load_cache,
        "_npu_reshape_and_cache": earlier.reshape_and_cache,
        "_npu_rotary_embedding": earlier.rotate_in_place,
    },
    "aten": {
        "_foreach_add.List": others.add_lists,
        "div.Tensor_mode": others.divide,
        "div.out_mode": others.divide_into,
        "repeat_interleave.self_int": others.repeat,
        "searchsorted.Tensor": ordering.find_places,
        "_unique2": ordering.find_distinct,
        "clamp_max": ordering.limit,
        "signbit": ordering.find_signs,
        "eye": ordering.make_identity,
    },
    "vllm": {
        "triton_split_qkv_rmsnorm_mrope": vision.split_norm_rotate,
        "qkv_rmsnorm_rope": others.split_norm_rotate,
    },
}


SHAPES = {  # for torch.compile: of vllm-ascend's own operators that its models call outside of others
    "npu_add_rms_norm_bias": others.shape_add_norm,
    "npu_hc_pre_v2": hyper_connections.shape_mix,
    "npu_hc_pre_v3": hyper_connections.shape_mix_as_told,
    "npu_hc_post": hyper_connections.shape_spread,
    "npu_rms_norm_cast": hyper_connections.shape_norm_and_cast,
}


@functools.cache
def register() -> tuple[Any, ...]:
    """Register all for tensors on the NPU; what is registered lasts as long as what this returns."""
    libraries = {"npu": "IMPL", "aten": "IMPL", "_C_ascend": "FRAGMENT", "atb": "FRAGMENT", "vllm": "FRAGMENT"}
    opened = {name: torch.library.Library(name, kind) for name, kind in libraries.items()}
    for schema in SCHEMAS:
        opened["_C_ascend"].define(schema)
    for schema in (vision.SPLIT_SCHEMA, others.QKV_SCHEMA):
        opened["vllm"].define(schema)
    opened["_C_ascend"].define(block_sparse.AVAILABILITY_SCHEMA)
    for schema in earlier.ATB_SCHEMAS:
        opened["atb"].define(schema)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name, operators in OPERATORS.items():
            for operator, function in operators.items():
                opened[name].impl(operator, function, "PrivateUse1")
    for operator, function in SHAPES.items():
        opened["_C_ascend"].impl(operator, function, "Meta")
    name = "is_minimax_sparse_attention_split_kv_available"
    opened["_C_ascend"].impl(name, block_sparse.is_split_kv_available, "CompositeExplicitAutograd")
    return tuple(opened.values())
