"""The setting in which a rank serves: settings, platform, and the ranks it communicates with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dbo_runtime.adapters.contract import name_auxiliary
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.observe.logs import open_log
from dbo_runtime.vllm_plugin.api import groups as vllm_groups
from dbo_runtime.vllm_plugin.api.groups import Groups
from dbo_runtime.vllm_plugin.api.speculation import get_auxiliary_layers
from dbo_runtime.vllm_plugin.parallel.agreement import gather
from dbo_runtime.vllm_plugin.parallel.stage import Stage, get_stage
from dbo_runtime.vllm_plugin.platforms.platform import Platform
from dbo_runtime.vllm_plugin.platforms.registry import get_platform

if TYPE_CHECKING:
    import torch
    from structlog.typing import FilteringBoundLogger
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class RankContext:
    """The data of one rank of a served model that all parts of its setup share.

    Attributes:
        vllm_config: vLLM's configuration of the engine.
        config: settings of this package.
        platform: the platform that vLLM serves on.
        groups: the ranks that communicate in a step.
        stage: the pipeline stage; the whole model without a pipeline.
        hosts: number of hosts that the ranks are on.
        transport: means of communication between the ranks; see `Platform.get_transport`.
        dispatch: way that tokens reach experts on other ranks: `all_gather`, `all_to_all`, or `fused` into kernels.
        unproven: properties of the model that are not proven on the platform, so that first steps are compared.
        log: logger bound to the stage, silent except on each stage's first rank.
    """

    vllm_config: VllmConfig
    config: RuntimeConfig
    platform: Platform
    groups: Groups
    stage: Stage
    hosts: int
    transport: str
    dispatch: str
    unproven: tuple[str, ...]
    log: FilteringBoundLogger


def make_rank_context(model: torch.nn.Module, vllm_config: VllmConfig, config: RuntimeConfig) -> RankContext:
    """Return the context of the rank that serves *model*. Collective over all ranks, because they count their hosts."""
    platform, groups = get_platform(), vllm_groups.get_groups(vllm_config)
    stage = get_stage(model, vllm_config, platform.find_stage_buffers(model))
    if vllm_config.speculative_config is not None:
        stage = replace(stage, auxiliary=tuple(map(name_auxiliary, get_auxiliary_layers(model))))
    log = open_log(quiet=groups.all_ranks.rank_in_group > 0)
    log = log.bind(stage=stage.name) if stage.name else log
    hosts = len(set(gather(groups.all_ranks, vllm_groups.get_host())))
    transport = platform.get_transport(groups, hosts)
    is_known = platform.check_support(config) is None  # only known releases are asked; on others nothing is split
    dispatch = config.dispatch
    if dispatch == "auto":
        dispatch = platform.choose_dispatch(vllm_config) if is_known else "all_gather"
    unproven = tuple(platform.list_compared(vllm_config)) if is_known else ()
    return RankContext(vllm_config, config, platform, groups, stage, hosts, transport, dispatch, unproven, log)
