"""Reasons against splitting a model's steps that follow from vLLM's configuration alone, without weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dbo_runtime.adapters.contract import ConfigAdapter, ModelAdapter, StageAdapter, name_adapter
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.errors import ProgramError
from dbo_runtime.vllm_plugin.api.kv_agent import read_transfer_config
from dbo_runtime.vllm_plugin.api.kv_connectors import check_connectors
from dbo_runtime.vllm_plugin.api.model_classes import find_adapter
from dbo_runtime.vllm_plugin.platforms.platform import tell_to_compare
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step.unsupported import list_unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig

INSTRUCTIONS = "`dbo adapter new {0}` drafts one (docs/write-an-adapter.md), and DBO_GENERIC=1 does without"


def choose_adapter(vllm_config: VllmConfig) -> ModelAdapter | Decline | None:
    """Return the adapter for a model's backbone; None if none is registered, a decline if it is broken."""
    try:
        return find_adapter(vllm_config.model_config.architecture)
    except ProgramError as error:
        return Decline("its adapter cannot be used", str(error))


def find_decline(declines: Iterable[Decline], config: RuntimeConfig) -> Decline | None:
    """Return the first of a model's *declines* for which its steps stay unsplit; None if there is none.

    Unless the settings ask for micro-batches, a reason against these alone leaves nano-batches.
    """
    return next((each for each in declines if config.split == "micro" or not each.only_micro), None)


def list_declines(
    vllm_config: VllmConfig, config: RuntimeConfig, adapter: ModelAdapter | Decline | None
) -> Iterator[Decline]:
    """Yield all reasons against splitting, those against micro-batches only included; see `find_decline`.

    Args:
        vllm_config: vLLM's configuration, made from its command line.
        config: settings of this package.
        adapter: the model's adapter, from `choose_adapter`; None if none is registered, which is no reason with
            DBO_GENERIC=1.
    """
    for decline in _list_all(vllm_config, config, adapter):
        has_nano = decline.only_micro and adapter is not None and get_platform().cuts_ops(vllm_config)
        yield replace(decline, only_micro=has_nano)


def _list_all(
    vllm_config: VllmConfig, config: RuntimeConfig, adapter: ModelAdapter | Decline | None
) -> Iterator[Decline]:
    """Yield the reasons as if the ops of every model could be cut into nano-batches."""
    platform = get_platform()
    unsupported = platform.check_support(config)
    if unsupported is not None:
        yield unsupported
        return  # an unsupported platform or version may interpret the configuration differently
    if not config.check:
        yield from (tell_to_compare(unproven) for unproven in platform.list_unproven(vllm_config))
    if isinstance(adapter, Decline):
        yield adapter
    if isinstance(adapter, ConfigAdapter):
        model = vllm_config.model_config
        refused = adapter.decline_config(model.hf_text_config, str(model.dtype).removeprefix("torch."))
        yield from () if refused is None else (refused,)
    if adapter is None and not config.generic:
        architecture = vllm_config.model_config.architecture
        yield Decline("no adapter is registered", f"{architecture}; {INSTRUCTIONS.format(architecture)}")
    if adapter is None and config.generic and vllm_config.parallel_config.tensor_parallel_size == 1:
        from dbo_runtime.vllm_plugin.alternatives.generic import SUMS_NOTHING  # for few servers

        yield SUMS_NOTHING
    yield from list_unsupported(vllm_config)
    if vllm_config.lora_config is not None:
        settings = {"DBO_COMPILE": config.compile, "DBO_GENERIC": adapter is None and config.generic}
        yield from (Decline(f"not supported yet: LoRA with {name}=1") for name, is_used in settings.items() if is_used)
    unknown = check_connectors(read_transfer_config(vllm_config), config.kv_connectors)
    if unknown is not None:
        yield unknown
    takes_stages = isinstance(adapter, StageAdapter) and adapter.takes_stages
    is_staged = vllm_config.parallel_config.pipeline_parallel_size > 1
    if adapter is not None and not isinstance(adapter, Decline) and is_staged and not takes_stages:
        yield Decline("the adapter takes no stages of a pipeline", name_adapter(adapter))
