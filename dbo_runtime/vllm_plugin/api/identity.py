"""The identity of a served model and its device, in vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def get_device_type() -> str:
    """Return vLLM's device type, such as `cpu`, `cuda` or `npu`."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def describe_model(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the properties of a model that its costs depend on. Models with the same shapes cost the same."""
    config = vllm_config.model_config
    text = config.hf_text_config
    shapes = ("hidden_size", "num_hidden_layers", "n_routed_experts", "moe_intermediate_size", "intermediate_size")
    return {
        "architecture": str(config.architecture),
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": str(config.quantization),
        **{name: str(getattr(text, name)) for name in shapes if hasattr(text, name)},
    }


def list_parallel_sizes(vllm_config: VllmConfig) -> dict[str, int]:
    """Return the number of ranks that each kind of parallelism uses, by the names of vLLM's options.

    `expert` is the number of ranks that experts are spread over, or 1 if they are not.
    """
    parallel = vllm_config.parallel_config
    tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
    spreads_experts = parallel.enable_expert_parallel and vllm_config.model_config.is_moe
    return {
        "tensor": tensor,
        "pipeline": parallel.pipeline_parallel_size,
        "data": data,
        "expert": tensor * data if spreads_experts else 1,
    }


def count_hosts(vllm_config: VllmConfig) -> int | None:
    """Return the number of hosts that the ranks will be on; None if only the start decides that.

    Ray and external launchers place ranks themselves. A rank that is started by itself (`--data-parallel-rank`) does
    not know where the others are.
    """
    parallel = vllm_config.parallel_config
    if parallel.nnodes > 1:
        return int(parallel.nnodes)
    if parallel.distributed_executor_backend not in (None, "mp", "uni") or parallel.data_parallel_external_lb:
        return None
    ranks: int = parallel.data_parallel_size
    return -(-ranks // (parallel.data_parallel_size_local or ranks))


def describe_parallel(vllm_config: VllmConfig, hosts: int) -> dict[str, int]:
    """Return the numbers of ranks and hosts that a model is spread over."""
    parallel = vllm_config.parallel_config
    return {
        "tensor": parallel.tensor_parallel_size,
        "data": parallel.data_parallel_size,
        "experts": int(parallel.enable_expert_parallel),
        "hosts": hosts,
    }
