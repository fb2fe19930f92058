"""The buffer of keys chosen by sparse attention, which layers share, divided among micro-batches.

Layers of GLM-5.2 without an indexer attend to the keys that an earlier layer chose. That layer writes them to the
first rows of one buffer, so every micro-batch would use the same rows. Read against vllm-ascend 0.30.0rc2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.forward_context import get_current
from dbo_runtime.vllm_plugin.api.groups import get_stage_layers

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm_ascend.attention.sfa_v1 import AscendSFAImpl

ACCESSES = ("_get_indexcache_topk_indices", "_update_indexcache_topk_indices")


def check_stages(vllm_config: VllmConfig) -> Decline | None:
    """Return why a pipeline's stages cannot be split: layers of one stage use keys that another stage chose.

    With context parallel attention, vllm-ascend itself uses wrong keys; see docs/ascend.md.
    """
    from vllm_ascend.worker.v2.pp_transport import pp_stage_requires_topk_indices

    stages = vllm_config.parallel_config.pipeline_parallel_size
    starts = (get_stage_layers(vllm_config, stage, stages).start for stage in range(1, stages))
    if any(pp_stage_requires_topk_indices(vllm_config.model_config.hf_text_config, start) for start in starts):
        return Decline("stages of a pipeline pass on which keys sparse attention has chosen")
    return None


def divide_indices(model: torch.nn.Module) -> None:
    """Make layers of *model* use the rows of a micro-batch's own tokens. Idempotent."""
    attentions = [module.impl for module in model.modules() if getattr(module, "impl", None) is not None]
    sharing = [attention for attention in attentions if getattr(attention, "use_index_cache", False)]
    for attention in sharing:
        for name in ACCESSES:
            if name not in vars(attention):
                setattr(attention, name, _use_rows_of_micro_batch(attention, getattr(attention, name)))


def _use_rows_of_micro_batch(attention: AscendSFAImpl, access: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(access)
    def run(*arguments: Any) -> Any:
        whole = attention.topk_indices_buffer
        if whole is None:
            return access(*arguments)
        attention.topk_indices_buffer = whole[getattr(get_current(), "first_token", 0) :]
        try:
            return access(*arguments)
        finally:
            attention.topk_indices_buffer = whole

    return run
