"""vLLM's groups of ranks, and their hosts. Read against vLLM 0.23.0 to 0.33.0."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator


class Groups(NamedTuple):
    """vLLM's coordinators for the ranks that communicate in a step of one model.

    Attributes:
        tensor_parallel: coordinator of the ranks that all-reduce.
        data_parallel: coordinator of the ranks that dispatch tokens to experts; None if tokens stay on their rank.
        all_ranks: coordinator of all ranks of the model. vLLM's world is not used, because independent replicas may
            share it.
    """

    tensor_parallel: GroupCoordinator
    data_parallel: GroupCoordinator | None
    all_ranks: GroupCoordinator


def get_groups(vllm_config: VllmConfig) -> Groups:
    """Return the groups of the model that this worker serves."""
    from vllm.distributed.parallel_state import get_dp_group, get_ep_group, get_tp_group

    if get_dp_group().world_size == 1 or not vllm_config.model_config.is_moe:
        return Groups(get_tp_group(), None, get_tp_group())
    return Groups(get_tp_group(), get_dp_group(), get_ep_group())


def dispatches_chunks(vllm_config: VllmConfig, dispatch: str, model: torch.nn.Module) -> bool:
    """Return whether each tensor parallel rank dispatches a chunk of the tokens that all of them hold.

    They do with all-to-all (*dispatch*) and with fused kernels, because otherwise each of them would send every token.
    They also do where vLLM's MoE is sequence parallel, or the *model* makes its experts so whatever vLLM says.
    """
    parallel = vllm_config.parallel_config
    if not (vllm_config.model_config.is_moe and parallel.enable_expert_parallel and parallel.tensor_parallel_size > 1):
        return False
    if dispatch in ("all_to_all", "fused") or parallel.use_sequence_parallel_moe:
        return True
    configs = (getattr(module, "moe_config", None) for module in model.modules())
    return any(getattr(config, "is_sequence_parallel", False) for config in configs)


def make_sibling(group: GroupCoordinator, name: str) -> dist.ProcessGroup:
    """Make another communicator for a group's ranks. Collective over all ranks."""
    backend = getattr(group, "backend", None)  # where coordinators of vllm-ascend 0.23 keep it
    if backend is not None and not hasattr(group, "torch_distributed_backend"):
        group.torch_distributed_backend = backend
    sibling: dist.ProcessGroup = group.make_sibling_device_group(name)
    return sibling


def get_pipeline_group() -> GroupCoordinator:
    """Return the group of this rank's pipeline stages; a group of one rank without a pipeline."""
    from vllm.distributed.parallel_state import get_pp_group

    return get_pp_group()


def get_stage_layers(vllm_config: VllmConfig, stage: int, stages: int) -> range:
    """Return the layers on stage number *stage* of a pipeline with this many stages."""
    from vllm.distributed.utils import get_pp_indices

    return range(*get_pp_indices(vllm_config.model_config.get_total_num_hidden_layers(), stage, stages))


def get_host() -> str:
    """Return the name and address of this host. Ranks compare them to see whether they share a host."""
    from vllm.utils.network_utils import get_ip

    return f"{socket.gethostname()} {get_ip()}"
