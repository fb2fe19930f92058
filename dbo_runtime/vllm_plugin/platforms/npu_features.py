"""Features of vllm-ascend that splitting does not support. Read against vllm-ascend 0.30.0rc2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dbo_runtime.decline import Decline

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm_ascend.ascend_config import AscendConfig


def list_unsupported(vllm_config: VllmConfig) -> Iterator[Decline]:
    """Yield each feature in use that splitting does not support."""
    from vllm_ascend.ascend_config import get_ascend_config

    try:
        yield from _list_unsupported(vllm_config, get_ascend_config())
    except AttributeError as error:  # an unknown release, with DBO_CHECK=1
        yield Decline("vllm-ascend's configuration has changed", str(error))


def _list_unsupported(vllm_config: VllmConfig, config: AscendConfig) -> Iterator[Decline]:
    finegrained, parallel = config.finegrained_tp_config, vllm_config.parallel_config
    features = (
        (parallel.use_sequence_parallel_moe, "FlashComm (sequence-parallel MoE)"),
        (vllm_config.speculative_config is not None, "speculative decoding with vllm-ascend"),
        (config.eplb_config.dynamic_eplb, "dynamic expert load balancing (eplb_config)"),
        (config.eplb_config.expert_map_path is not None, "an expert map (eplb_config)"),
        (config.enable_force_eplb, "forced expert load balancing"),
        (config.mix_placement, "shared experts among the routed ones (mix_placement)"),
        (config.enable_shared_expert_dp, "data parallel shared experts (enable_shared_expert_dp)"),
        (config.enable_fused_mc2, "fused MC2 (enable_fused_mc2)"),
        (config.enable_prefill_mc2, "MC2 in prefill (enable_prefill_mc2)"),
        (config.xlite_graph_config.enabled, "xlite graphs"),
        (config.sparse_kv_offload_config.enabled, "sparse KV offload"),
        (config.kvpp_config.size > 1, "KV cache pipelines (kvpp_config)"),
        (finegrained.oproj_tensor_parallel_size > 0, "a separate tensor parallel group for o_proj"),
        (finegrained.mlp_tensor_parallel_size > 0, "a separate tensor parallel group for the MLP"),
    )
    return (Decline(f"not supported yet: {what}") for is_used, what in features if is_used)
