"""What is known before a start of how a server's ranks will communicate, and of whether its costs will fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.engine.transport import check_transport
from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.calibrate.outlook import Outlook, find_outlook
from dbo_runtime.planner.costs.cost_file import load_costs, name_stage_file
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.vllm_plugin.api.identity import count_hosts, describe_model, describe_parallel
from dbo_runtime.vllm_plugin.platforms.registry import get_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GATHERING = "allgather_reducescatter"
"""vLLM's all-to-all backend whose dispatch and combine are known to be ops of their own."""


def predict_transport(vllm_config: VllmConfig) -> str | None:
    """Return how the ranks will communicate in a step; see `Platform.get_transport`. None if it is not known yet."""
    parallel, dispatches = vllm_config.parallel_config, vllm_config.model_config.is_moe
    data = parallel.data_parallel_size if dispatches else 1
    ranks = parallel.tensor_parallel_size * data
    return get_platform().predict_transport(ranks, data > 1, count_hosts(vllm_config))


def predict_decline(vllm_config: VllmConfig, config: RuntimeConfig) -> Decline | None:
    """Return why no step will be split, if settings, costs and the layout of ranks alone prevent it."""
    transport = predict_transport(vllm_config)
    opens_lane = get_platform().opens_side_lane(config)
    if transport is None or (opens_lane and config.side == "on"):
        return None
    has_costs = config.calibrate or (bool(config.costs) and check_costs(vllm_config, config) is None)
    # With `auto`, costs decide later whether the second compute lane is used.
    return check_transport(transport, config.mode, has_costs, can_use_side=opens_lane)


def find_unknown_experts(vllm_config: VllmConfig) -> str | None:
    """Return what of an MoE layer decides only when it is loaded whether it can be decomposed; None if nothing does.

    vLLM chooses the kernels of experts then, by backend, weights and device. vllm-ascend's are known before.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    dispatches = model.is_moe and parallel.data_parallel_size > 1 and parallel.enable_expert_parallel
    if not dispatches or get_platform().name == "npu":
        return None
    if parallel.all2all_backend != GATHERING:
        return f"--all2all-backend {parallel.all2all_backend}"
    return None if model.quantization is None else f"{model.quantization} weights"


def check_costs(vllm_config: VllmConfig, config: RuntimeConfig) -> str | None:
    """Return why the cost file will not be used, as far as that is known before the start; None if it will be."""
    stages = _list_stages(vllm_config)
    try:
        for number, stage in enumerate(stages):
            path = name_stage_file(config.costs, stage)
            place = {} if stage is None else {"pipeline": len(stages), "stage": number}
            _check_fits(load_costs(path), path, vllm_config, place)
    except ConfigError as error:
        return str(error)
    return None


def list_outlooks(vllm_config: VllmConfig, config: RuntimeConfig) -> list[Outlook]:
    """Return what the costs in the file of each stage will split, or why nothing; `auto` only."""
    if config.mode != "auto":
        return []
    paths = [name_stage_file(config.costs, stage) for stage in _list_stages(vllm_config)]
    largest = vllm_config.scheduler_config.max_num_batched_tokens
    return [find_outlook(load_costs(path), largest, path) for path in paths]


def _list_stages(vllm_config: VllmConfig) -> list[str | None]:
    """Return the names of the stages of a pipeline, which have cost files of their own; [None] without one."""
    count = vllm_config.parallel_config.pipeline_parallel_size
    return [f"pp{number}" for number in range(count)] if count > 1 else [None]


def _check_fits(table: CostTable, path: str, vllm_config: VllmConfig, stage: dict[str, int]) -> None:
    """Raise ConfigError if a table is for another machine, model or layout. What is not known yet is taken to fit."""
    recorded, platform = table.provenance, get_platform()
    transport, hosts = predict_transport(vllm_config), count_hosts(vllm_config)
    machine = {**recorded.machine, "platform": platform.name, "chip": platform.get_chip_name()}
    if transport is not None:
        machine["transport"] = transport
    hosts = recorded.parallel.get("hosts", 1) if hosts is None else hosts
    try:
        table.check_fits(machine, describe_model(vllm_config), {**describe_parallel(vllm_config, hosts), **stage})
    except ConfigError as error:
        raise ConfigError(f"cost file {path}: {error}") from None
