"""The buffer through which layers of sparse attention pass on which keys they have chosen, divided among micro-batches.

Layers of GLM-5.2 that have no indexer attend to the keys that an earlier layer chose. That layer writes them to the
first rows of one buffer, and so would every micro-batch. Read against vllm-ascend 0.30.0rc2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.forward_context import get_current

if TYPE_CHECKING:
    import torch
    from vllm_ascend.attention.sfa_v1 import AscendSFAImpl

ACCESSES = ("_get_indexcache_topk_indices", "_update_indexcache_topk_indices")


def divide_indices(model: torch.nn.Module) -> Decline | None:
    """Let layers of *model* use the rows of a micro-batch's tokens; again has no effect. Return why they cannot."""
    attentions = [module.impl for module in model.modules() if getattr(module, "impl", None) is not None]
    sharing = [attention for attention in attentions if getattr(attention, "use_index_cache", False)]
    if not sharing:
        return None
    decoder = getattr(model, "model", None)
    if any(getattr(decoder, f"{verb}_pp_topk_indices", False) for verb in ("send", "receive")):
        return Decline("stages of a pipeline pass on which keys sparse attention has chosen")
    for attention in sharing:
        for name in ACCESSES:
            if name not in vars(attention):
                setattr(attention, name, _use_rows_of_micro_batch(attention, getattr(attention, name)))
    return None


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
