"""vLLM's LoRA layers, and the punica wrapper that tells them which adapter each token uses.

Read against vLLM 0.23.0 to 0.32.0.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

_PER_BATCH = ("_seq_start_locs", "_seq_lengths", "_lora_indices_per_batch")


def list_wrappers(model: torch.nn.Module) -> list[PunicaWrapperBase]:
    """Return the punica wrappers that the layers of *model* read; none without LoRA."""
    from vllm.lora.layers import BaseLayerWithLoRA

    layers = (module for module in model.modules() if isinstance(module, BaseLayerWithLoRA))
    return list({id(layer.punica_wrapper): layer.punica_wrapper for layer in layers}.values())


def is_sliceable(wrapper: PunicaWrapperBase) -> bool:
    """Return whether `slice_wrapper` knows all attributes of a wrapper."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    return type(wrapper) is PunicaWrapperCPU


def count_mapped_tokens(wrapper: PunicaWrapperBase) -> int:
    """Return the number of tokens mapped to adapters; 0 before the first step."""
    return wrapper.indices_len[0] or 0


def slice_wrapper(wrapper: PunicaWrapperBase, tokens: slice) -> PunicaWrapperBase:
    """Return a wrapper for the given *tokens* of the batch that *wrapper* describes.

    Data for sampling stay those of the whole batch.
    """
    part = copy.copy(wrapper)
    part._token_lora_indices = wrapper._token_lora_indices[tokens]
    part._embeddings_indices = wrapper._embeddings_indices[..., tokens]  # two rows up to vLLM 0.28
    part.indices_len = list(wrapper.indices_len)
    part.indices_len[0] = part.indices_len[3] = tokens.stop - tokens.start
    if part.is_prefill:
        for name in _PER_BATCH:
            setattr(part, name, torch.empty_like(getattr(wrapper, name)))
        part._update_prefill_metadata(part.token_lora_indices)
    return part
