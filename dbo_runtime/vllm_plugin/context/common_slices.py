"""The common attention metadata of slices, including every field that a platform has added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dbo_runtime.batch import BatchSlice
from dbo_runtime.vllm_plugin.api.fields import Fields
from dbo_runtime.vllm_plugin.api.metadata import slice_common_metadata
from dbo_runtime.vllm_plugin.context.checks import get_extents

if TYPE_CHECKING:
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata


def slice_common(
    common: CommonAttentionMetadata, slices: Sequence[BatchSlice], sliced: Fields
) -> list[CommonAttentionMetadata]:
    """Return the common metadata of each slice, of the same class as *common*, by the rules *sliced*."""
    parts = []
    for piece, part in zip(slices, slice_common_metadata(common, slices), strict=True):
        changed = {name: getattr(part, name) for name in sliced.split if hasattr(part, name)}
        changed["max_seq_len"] = int(part.seq_lens_cpu_upper_bound.max())
        for name in sliced.per_request:
            if get_extents(getattr(common, name, None)):
                changed[name] = getattr(common, name)[piece.requests]
        for name in sliced.per_token:
            if getattr(common, name, None) is not None:
                changed[name] = getattr(common, name)[..., piece.tokens]
        changed.update((name, None) for name in sliced.dropped if hasattr(common, name))
        parts.append(replace(common, **changed))
    return parts


def ends_in_padding(starts: torch.Tensor, tokens: int) -> bool:
    """Return whether the last query holds only padding, as vllm-ascend 0.23 adds one where FlashComm pads a batch.

    *starts* are the starts of the queries, on the host [requests + 1], of a batch with *tokens* tokens.
    """
    return len(starts) > 2 and int(starts[-2]) == tokens < int(starts[-1])


def drop_padding(slices: Sequence[BatchSlice], common: CommonAttentionMetadata) -> list[BatchSlice]:
    """Return the slices, cut to the tokens that requests have."""
    tokens, requests = common.num_actual_tokens, common.num_reqs
    kept = (piece for piece in slices if piece.first_token < tokens)
    return [replace(p, last_request=min(p.last_request, requests), last_token=min(p.last_token, tokens)) for p in kept]
