"""States of linear attention: one per request, updated by its tokens in turn.

The head of a cut request leaves the state that its tail continues from, as it does in the KV cache.
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

DECODE_LEN = 1  # builders for linear attention recognize decodes with drafts by other means
DRAFTS = "num_decode_draft_tokens_cpu"  # one entry per request; negative if no drafts are verified
PER_REQUEST = ("num_accepted_tokens", DRAFTS)  # per-request arguments of such a build
COUNTS = ("num_actual_reqs", "num_reqs_actual")  # vllm-ascend's argument, and of 0.23: later requests are padding
SHARED = tuple(f"{part}_ratio_to_sas_metadata" for part in ("common", "prefill", "decode"))
"""vllm-ascend's arguments, the last two of 0.23: data that a step's builders leave for each other."""
ALIGNED = "align"  # with prefix caching, states are kept at the ends of blocks


def has_states(builder: AttentionMetadataBuilder) -> bool:
    """Return whether a builder is for layers that keep one state per request, not a cache of its tokens."""
    return isinstance(builder.kv_cache_spec, MambaSpec)


def slice_arguments(
    arguments: dict[str, Any], piece: BatchSlice, shared: dict[Any, Any] | None = None
) -> dict[str, Any] | Decline:
    """Return a build's arguments for a slice. Arguments with one entry per request are sliced.

    *shared* replaces the data that the step's builders left for each other, for this slice's builders.
    """
    unknown = [name for name, value in arguments.items() if isinstance(value, torch.Tensor) and name not in PER_REQUEST]
    if unknown:
        return Decline("unknown argument of a builder of attention metadata", ", ".join(unknown))
    own = {name: arguments[name][piece.requests] for name in PER_REQUEST if arguments.get(name) is not None}
    first, last = piece.first_request, piece.last_request
    for name in COUNTS:
        if arguments.get(name) is not None:
            own[name] = min(max(arguments[name] - first, 0), last - first)
    data: dict[Any, Any] = {} if shared is None else shared
    own |= {name: data.setdefault(name, {}) for name in SHARED if name in arguments}
    return {**arguments, **own}


def check_starts(parts: Sequence[CommonAttentionMetadata]) -> Decline | None:
    """Decline if a micro-batch would treat the start of a prompt as a decode, which reads its request's state.

    Builders treat leading requests of one token as decodes. A prompt that starts has no state yet, and the place of its
    state may hold another request's. A single part is described like the whole step.
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
    """Decline if a decode whose drafts are verified is cut inside, because it keeps a state for each of its tokens.

    Planners do not cut there, but data parallel ranks may, because they agree on sizes alone.
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
    """Return *parts* changed so that all parts of a request keep its state in one block, where the step's end is.

    From the lengths of the parts, builders would look in other blocks (`mamba_get_block_table_tensor`). vLLM's runner
    copies the state to the block of the step's end before the step.
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
