"""Names of vLLM and vllm-ascend that change from version to version. Read against vLLM 0.30.0."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from dbo_runtime.batch import BatchSlice
from dbo_runtime.config import ENABLE, PREFIX

KNOWN_VERSIONS = ("0.30.",)
RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"


def find_unknown_version() -> str | None:
    """Return why this vLLM cannot be served, or None if it is one we know."""
    import vllm

    if vllm.__version__.startswith(KNOWN_VERSIONS):
        return None
    return (
        f"vLLM {vllm.__version__} is not one that this dbo_runtime knows ({', '.join(v + 'x' for v in KNOWN_VERSIONS)})"
    )


def announce_variable() -> None:
    """Make our variable known to vLLM, which otherwise warns of it, or refuses it with --fail-on-environ-validation."""
    from vllm import envs

    envs.environment_variables.setdefault(ENABLE, lambda: os.environ.get(ENABLE, "0"))


def pass_settings_on() -> None:
    """Let Ray hand our settings to its workers: vLLM has it copy only variables with prefixes it knows."""
    prefixes = [part for part in os.environ.get(RAY_PREFIXES, "").split(",") if part]
    if PREFIX not in prefixes:
        os.environ[RAY_PREFIXES] = ",".join([*prefixes, PREFIX])


class Groups(NamedTuple):
    """vLLM's coordinators of the ranks that communicate in a step of one model.

    Attributes:
        tensor_parallel: the ranks that all-reduce.
        data_parallel: those between which tokens travel to experts; None where tokens stay on their rank.
        everyone: all of them. Not vLLM's world: replicas that know nothing of each other may share that.
    """

    tensor_parallel: Any
    data_parallel: Any
    everyone: Any


def find_groups(vllm_config: Any) -> Groups:
    """Return the groups of the model that this worker serves."""
    from vllm.distributed.parallel_state import get_dp_group, get_ep_group, get_tp_group

    if get_dp_group().world_size == 1 or not vllm_config.model_config.is_moe:
        return Groups(get_tp_group(), None, get_tp_group())
    return Groups(get_tp_group(), get_dp_group(), get_ep_group())


def find_transport(groups: Groups, hosts: int) -> str:
    """Return how the ranks on *hosts* hosts communicate: `none`, `shared memory`, `one host` or `network`.

    vLLM's CPU build reduces over shared memory if all ranks of a tensor parallel group are on one host: that spins on
    the cores that compute, and there is nothing to hide.
    """
    if groups.everyone.world_size == 1:
        return "none"
    if groups.data_parallel is not None:
        return "one host" if hosts == 1 else "network"
    module = getattr(groups.tensor_parallel.device_communicator, "dist_module", None)
    return "shared memory" if type(module).__name__ == "_CPUSHMDistributed" else "network"


def find_host() -> str:
    """Return name and address of this host, by which ranks see whether they share it."""
    from vllm.utils.network_utils import get_ip

    return f"{socket.gethostname()} {get_ip()}"


def describe_versions() -> str:
    """Return the versions that ranks must share to decide alike."""
    import vllm

    return f"dbo_runtime {version('dbo-runtime')}, vllm {vllm.__version__}"


def find_platform() -> str:
    """Return vLLM's device type, such as `cpu`, `cuda` or `npu`."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def slice_common_metadata(common: Any, slices: Sequence[BatchSlice]) -> list[Any]:
    """Return vLLM's own split of the common metadata: SPLIT_BY_VLLM are right, other fields are dropped."""
    from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

    return list(split_attn_metadata([UBatchSlice(piece.requests, piece.tokens) for piece in slices], common))


def find_weight_and_reduce(kernel: Any) -> Any:
    """Return what sums a token's experts on this rank; kernels that leave the choice open get vLLM's default."""
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceContiguous,
        TopKWeightAndReduceDelegate,
    )

    reduce = kernel.fused_experts.finalize_weight_and_reduce_impl()
    return TopKWeightAndReduceContiguous() if isinstance(reduce, TopKWeightAndReduceDelegate) else reduce


SPLIT_BY_VLLM = (
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "num_reqs",
    "num_actual_tokens",
    "max_query_len",
    "block_table_tensor",
    "slot_mapping",
    "seq_lens_cpu_upper_bound",
)
"""What vLLM splits right, the inside of a request included. It leaves max_seq_len at the whole batch's."""

SLICED_OF_CONTEXT = ("is_padding",)
"""Tensors of the forward context that are sliced by token; its dictionaries by layer are sliced, too."""

PER_REQUEST = ("is_prefilling", "causal", "req_idx", "rswa_prefix_lens", "replayssm_decode_base_cpu")
PER_TOKEN = ("positions",)
RECOMPUTED = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")
"""Caches that a slice must not inherit."""

UNSUPPORTED = ("encoder_seq_lens", "num_logits_indices", "dcp_local_seq_lens", "mm_req_doc_ranges")
"""Fields of features that cannot be split yet: cross attention, fast prefill, context parallel, prefix-LM images."""

MOE_RUNNERS = ("MoERunner",)
"""What runs an MoE layer. Classes are known by their exact names: one derived from them may do something else."""

MOE_METHODS = ("UnquantizedFusedMoEMethod",)
"""What applies a layer's weights by calling the kernel, and does nothing else."""

GATHERING_DISPATCH = ("MoEPrepareAndFinalizeNaiveDPEPModular",)
"""Kernels' prepare and finalize that gather tokens and scatter results, and do nothing else in between."""

ROUTERS_WITH_OUTPUT = ("ZeroExpertRouter",)
"""Routers that add to the layer's result themselves."""
