"""What of vllm-ascend is met: names that change from release to release. Read against vllm-ascend 0.30.0rc2.

Nothing here is called on other platforms, and vllm_ascend is imported only where it serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api import fields

KNOWN_VERSIONS = ("0.30.0rc2",)
KNOWN_MODELS = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")  # of which steps were compared there
GATHERING, EXCHANGING = "ALLGATHER", "ALLTOALL"  # MoE communication that split steps can replace

MOE_RUNNERS = ("AscendMoERunner",)
"""What runs an MoE layer."""

MOE_METHODS = ("AscendUnquantizedFusedMoEMethod",)
"""What applies a layer's weights by calling the communication method's experts, and does nothing else."""

COPYING_MODULES = ("AscendMultiHeadLatentAttention",)
"""Modules that end in one all-reduce and return a copy of it; without attention metadata, zeros and no reduce."""

FIELDS = fields.FIELDS._replace(
    per_request=(*fields.FIELDS.per_request, "group_len", "group_key_idx", "group_key_cache_idx"),
    per_token=(*fields.FIELDS.per_token, "positions_cpu"),
    derived=("seq_lens_cpu", "_seq_lens_cpu", "num_computed_tokens_cpu", "_num_computed_tokens_cpu"),
    # Context parallel, and KV caches that are offloaded token by token.
    unsupported=(
        *fields.FIELDS.unsupported,
        "context_parallel_metadata",
        "dcp_local_seq_lens_cpu",
        "req_ids_tensor",
        "token_to_req",
        "req_topk_buffer_slots",
        "req_topk_buffer_active",
        "copy_sfa_draft_index",
    ),
)


def check_version() -> str | None:
    """Return why steps of this vllm-ascend have not been compared with unsplit ones, or None if they have."""
    try:
        found = version("vllm-ascend")
    except PackageNotFoundError:
        return "vllm-ascend is not installed"
    if found in KNOWN_VERSIONS:
        return None
    return f"vllm-ascend {found} is not one that this dbo_runtime knows ({', '.join(KNOWN_VERSIONS)})"


def check_config(vllm_config: Any) -> str | None:
    """Return the first feature of vllm-ascend in use that splitting does not support."""
    from vllm_ascend.ascend_config import get_ascend_config

    try:
        return _find_feature(vllm_config, get_ascend_config())
    except AttributeError as error:  # of a release that we do not know, under DBO_CHECK
        return f"vllm-ascend's configuration has changed: {error}"


def _find_feature(vllm_config: Any, config: Any) -> str | None:
    finegrained = config.finegrained_tp_config
    hazards = (
        (vllm_config.parallel_config.use_sequence_parallel_moe, "FlashComm (sequence-parallel MoE)"),
        (vllm_config.use_v2_model_runner, "vLLM's second model runner"),
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
        (finegrained.oproj_tensor_parallel_size > 0, "a tensor parallel group of its own for o_proj"),
        (finegrained.mlp_tensor_parallel_size > 0, "a tensor parallel group of its own for the MLP"),
    )
    return next((f"not supported yet: {what}" for found, what in hazards if found), None)


def check_step(context: Any) -> Decline | None:
    """Return why a step runs whole, from what is equal on all ranks: how tokens get to their experts in it.

    vllm-ascend chooses that by the number of tokens of the whole step, and could choose otherwise for a part of it; so
    all parts keep the step's own choice.
    """
    kind = getattr(getattr(context, "moe_comm_type", None), "name", None)
    if kind in (None, GATHERING):
        return None
    if kind == EXCHANGING:
        from vllm.distributed import get_tensor_model_parallel_world_size

        if get_tensor_model_parallel_world_size() == 1:
            return None
        return Decline("experts share tokens out among tensor parallel ranks", kind)
    return Decline("MoE communication is fused into its kernels", kind)


def get_gathering(moe_config: Any) -> Any:
    """Return vllm-ascend's way to run the experts of one rank on tokens of all ranks."""
    from vllm_ascend.ascend_forward_context import MoECommType
    from vllm_ascend.ops.fused_moe.moe_comm_method import get_moe_comm_method

    return get_moe_comm_method(MoECommType[GATHERING], moe_config)


@contextmanager
def own_rotary_tables() -> Iterator[None]:
    """Let builders make the tables of decodes anew: kept ones are views of one buffer, which each build overwrites."""
    from vllm_ascend.attention import mla_v1

    kept = mla_v1.get_cos_and_sin_mla
    mla_v1.get_cos_and_sin_mla = lambda positions, use_cache=False: kept(positions)
    try:
        yield
    finally:
        mla_v1.get_cos_and_sin_mla = kept
