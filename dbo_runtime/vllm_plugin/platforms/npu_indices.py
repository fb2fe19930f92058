"""The buffer of keys chosen by sparse attention, which layers share, and stages of a pipeline hand on.

Layers of GLM-5.2 without an indexer attend to the keys that an earlier layer chose. That layer writes them to the
first rows of one buffer, so every micro-batch would use the same rows. Between stages, vLLM receives these rows right
into the buffer of the next stage. Read against vllm-ascend 0.30.0rc2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.forward_context import get_current
from dbo_runtime.vllm_plugin.api.groups import get_stage_layers
from dbo_runtime.vllm_plugin.api.known import SPARSE_MODELS
from dbo_runtime.vllm_plugin.platforms.platform import NO_BUFFERS, StageBuffers

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm_ascend.attention.sfa_v1 import AscendSFAImpl

HANDED_ON = "pp_transport_topk_indices_0"  # name of the buffer's rows among intermediate tensors
ACCESSES = ("_get_indexcache_topk_indices", "_update_indexcache_topk_indices")


def check_stages(vllm_config: VllmConfig) -> Decline | None:
    """Return why a pipeline's stages have no micro-batches: layers of one stage use keys that another stage chose.

    With context parallel attention, vllm-ascend itself uses wrong keys, which depend on the tokens of the whole step;
    see docs/ascend.md.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1 or vllm_config.model_config.architecture not in SPARSE_MODELS:
        return None
    try:
        from vllm_ascend.worker.v2.pp_transport import pp_stage_requires_topk_indices
    except ImportError:  # 0.23.0 hands on no keys
        return None
    starts = (get_stage_layers(vllm_config, stage, stages).start for stage in range(1, stages))
    if any(pp_stage_requires_topk_indices(vllm_config.model_config.hf_text_config, start) for start in starts):
        return Decline("stages of a pipeline pass on which keys sparse attention has chosen", only_micro=True)
    return None


def find_stage_buffers(model: torch.nn.Module) -> StageBuffers:
    """Return the buffer of *model*, as far as its stage receives its rows or sends them."""
    decoders = (module for module in model.modules() if getattr(module, "send_pp_topk_indices", None) is not None)
    decoder: Any = next(decoders, None)
    if decoder is None:
        return NO_BUFFERS
    buffers = {HANDED_ON: decoder.topk_indices_buffer}
    return StageBuffers(
        buffers if decoder.receive_pp_topk_indices else {}, buffers if decoder.send_pp_topk_indices else {}
    )


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
    def run(*arguments: Any, **named: Any) -> Any:
        whole = attention.topk_indices_buffer
        if whole is None:
            return access(*arguments, **named)
        attention.topk_indices_buffer = whole[getattr(get_current(), "first_token", 0) :]
        try:
            return access(*arguments, **named)
        finally:
            attention.topk_indices_buffer = whole

    return run
