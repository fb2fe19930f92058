"""States of linear attention: one a request, which its tokens update in turn.

The head of a cut request leaves in its state what its tail goes on from, as it does in the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from dbo_runtime.batch import BatchSlice
from dbo_runtime.decline import Decline

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

DECODE_LEN = 1  # of builders for linear attention, which know decodes with drafts by other means
DRAFTS = "num_decode_draft_tokens_cpu"  # of each request; negative where none are verified
PER_REQUEST = ("num_accepted_tokens", DRAFTS)  # arguments of such a build
COUNT = "num_actual_reqs"  # vllm-ascend's argument: those after them pad the batch
SHARED = "common_ratio_to_sas_metadata"  # vllm-ascend's argument: what its builders of a step leave for each other
ALIGNED = "align"  # with prefix caching, states are kept at ends of blocks


def has_states(builder: AttentionMetadataBuilder) -> bool:
    """Return whether a builder is for layers that keep a state of each request, not a cache of its tokens."""
    return isinstance(builder.kv_cache_spec, MambaSpec)


def slice_arguments(
    arguments: dict[str, Any], piece: BatchSlice, shared: dict[Any, Any] | None = None
) -> dict[str, Any] | Decline:
    """Return the arguments of a build for a slice: those that tell of each request are sliced.

    *shared* is what builders for this slice leave for each other, in the place of what those of the step have left.
    """
    unknown = [name for name, value in arguments.items() if isinstance(value, torch.Tensor) and name not in PER_REQUEST]
    if unknown:
        return Decline("unknown argument of a builder of attention metadata", ", ".join(unknown))
    own = {name: arguments[name][piece.requests] for name in PER_REQUEST if arguments.get(name) is not None}
    if arguments.get(COUNT) is not None:
        first, last = piece.first_request, piece.last_request
        own[COUNT] = min(max(arguments[COUNT] - first, 0), last - first)
    if SHARED in arguments:
        own[SHARED] = {} if shared is None else shared
    return {**arguments, **own}


def check_starts(parts: Sequence[CommonAttentionMetadata]) -> Decline | None:
    """Decline if a micro-batch takes the start of a prompt for a decode, which reads the state of its request.

    Builders take leading requests for decodes if they have one token. A prompt that starts has no state yet: what is in
    its place may be another request's. A single part is described as the step is.
    """
    for part in parts if len(parts) > 1 else ():
        queries = part.query_start_loc_cpu.diff()
        decodes = int((queries <= DECODE_LEN).int().cumprod(0).sum())
        computed = part.seq_lens_cpu_upper_bound[:decodes] - queries[:decodes]
        if ((computed == 0) & (queries[:decodes] > 0)).any():
            return Decline("a prompt starts with as few tokens as a decode, in a model with linear attention")
    return None


def check_drafts(
    common: CommonAttentionMetadata, slices: Sequence[BatchSlice], arguments: Mapping[str, Any]
) -> Decline | None:
    """Decline if a decode is cut inside whose drafts are verified: it keeps a state for each of its tokens.

    Planners do not cut there, but data parallel ranks that agree on sizes alone may.
    """
    drafts, starts = arguments.get(DRAFTS), common.query_start_loc_cpu
    if drafts is None:
        return None
    for piece in slices:
        request = piece.last_request - 1
        if drafts[request] >= 0 and piece.last_token < int(starts[request + 1]):
            return Decline("a decode with drafts is cut inside, in a model with linear attention")
    return None


def keep_places(
    common: CommonAttentionMetadata,
    slices: Sequence[BatchSlice],
    parts: Sequence[CommonAttentionMetadata],
    block_size: int,
) -> list[CommonAttentionMetadata]:
    """Return *parts* in which all pieces of a request keep its state in one place: the block that the step ends in.

    By the lengths of its pieces, builders would look for it in others (`mamba_get_block_table_tensor`); vLLM's runner
    copies the state to that block before the step.
    """
    placed = []
    for piece, part in zip(slices, parts, strict=True):
        request = piece.last_request - 1
        if piece.last_token < int(common.query_start_loc_cpu[piece.last_request]):
            ends_in = (int(common.seq_lens_cpu_upper_bound[request]) - 1) // block_size
            table = part.block_table_tensor.clone()
            table[-1] = common.block_table_tensor[request, ends_in]
            part = replace(part, block_table_tensor=table)
        placed.append(part)
    return placed
