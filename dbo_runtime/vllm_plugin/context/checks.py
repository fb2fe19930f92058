"""Reasons not to split a step, from its forward context and the blocks of its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dbo_runtime.batch import BatchSlice
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.forward_context import get_padding
from dbo_runtime.vllm_plugin.api.metadata import IntArray
from dbo_runtime.vllm_plugin.platforms.platform import Platform

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata

NEEDED = ("block_table_tensor", "slot_mapping")
"""Fields of the common metadata that vLLM slices without checking that they are set."""

ARRAYS = (torch.Tensor, np.ndarray)


def check_mode(context: ForwardContext) -> Decline | None:
    """Decline a forward context whose step is left to vLLM, even if it is not split; otherwise return None."""
    if not isinstance(context.attn_metadata, dict):
        return Decline("attention metadata is split already")
    if context.cudagraph_runtime_mode.name == "FULL":
        return Decline("full-graph step")
    return None


def check_capture(context: ForwardContext, platform: Platform, dispatch: str = "all_gather") -> Decline | None:
    """Decline a step that vLLM runs to capture it, or right before; otherwise return None."""
    if not isinstance(context.attn_metadata, dict):
        return Decline("attention metadata is split already")
    return platform.check_step(context, dispatch)


def check_context(
    context: ForwardContext, tokens: int, platform: Platform, dispatch: str = "all_gather"
) -> Decline | None:
    """Decline a step with this forward context, or return None. *dispatch* is its program's way to reach experts."""
    decline = check_mode(context)
    if decline is not None:
        return decline
    padding = get_padding(context)
    if padding is not None and padding.shape[0] != tokens:
        return Decline("padded batch")
    return platform.check_step(context, dispatch)


def check_agreed_context(context: ForwardContext, platform: Platform, dispatch: str = "all_gather") -> Decline | None:
    """Decline for all data parallel ranks, from data that vLLM has made equal on them; otherwise return None."""
    if context.dp_metadata is None:
        return Decline("no data parallel metadata")
    if context.cudagraph_runtime_mode.name != "NONE":
        return Decline("padded to the size of a graph on all data parallel ranks")
    return platform.check_step(context, dispatch)


def check_needed(common: CommonAttentionMetadata) -> Decline | None:
    """Decline if the step's common metadata lacks fields that every slice needs; otherwise return None."""
    if common.seq_lens_cpu_upper_bound is None:
        return Decline("attention metadata without sequence lengths on the host")
    lacking = [name for name in NEEDED if getattr(common, name, None) is None]
    return Decline("attention metadata without a block table or slots", ", ".join(lacking)) if lacking else None


class CachedRequests(NamedTuple):
    """The requests of a step, and their blocks of the KV cache.

    Attributes:
        query_starts: each request's first token, then the end [requests + 1].
        seq_lens: each request's number of tokens after this step [requests].
        block_table: each request's KV blocks [requests, blocks].
        block_size: tokens per block.
    """

    query_starts: IntArray
    seq_lens: IntArray
    block_table: IntArray
    block_size: int


def check_prefix_cache(
    slices: Sequence[BatchSlice], requests: CachedRequests, assumed_drafts: int = 0, window: int | None = None
) -> Decline | None:
    """Decline if a request reads cached blocks that a later micro-batch has yet to write.

    A request can be admitted on a prefix-cache hit against blocks that another request computes in the same step. In an
    unsplit step, all writes of a layer come before all reads. In a split step, the writer may be in a later
    micro-batch. vLLM's own guard (`_allow_microbatching` in gpu_model_runner.py) is off unless vLLM's own
    micro-batching is on.

    Args:
        slices: the micro-batches.
        requests: the step's requests.
        assumed_drafts: number of tokens by which `seq_lens` of decodes may be too long; those of prefills are exact. A
            request with fewer new tokens than a prompt with drafts could have counts as a decode.
        window: number of tokens back that layers read; None if not limited. Earlier blocks may belong to another
            request by now, because the tables of model runners keep them.
    """
    query_lens = np.diff(requests.query_starts)
    computed = requests.seq_lens - query_lens
    if not (computed > 0).any():
        return None
    excess = np.where(query_lens <= 1 + assumed_drafts, assumed_drafts, 0)
    for earlier in slices[:-1]:
        written = _list_blocks_written_after(earlier.last_token, requests, excess)
        by_all = np.concatenate([*written.values()])
        for request in range(earlier.first_request, earlier.last_request):
            first = 0 if window is None else max(int(computed[request]) - window, 0) // requests.block_size
            read = requests.block_table[request, first : computed[request] // requests.block_size]
            by_others = by_all
            if request in written:  # it is cut inside, and its tail is no prefix of its head
                by_others = np.concatenate([[], *(blocks for other, blocks in written.items() if other != request)])
            if np.isin(read, by_others).any():
                return Decline("a request reads prefix-cache blocks that a later micro-batch writes")
    return None


def _list_blocks_written_after(token: int, requests: CachedRequests, excess: IntArray) -> dict[int, IntArray]:
    """Return the KV blocks that the tokens from index *token* on may be written to, by request.

    The requests' lengths may be too long by *excess* [requests].
    """
    blocks, size = {}, requests.block_size
    for request, (start, end) in enumerate(pairwise(requests.query_starts.tolist())):
        if end > token:
            length = int(requests.seq_lens[request])
            first = max(length - (end - max(start, token)) - int(excess[request]), 0)
            blocks[request] = requests.block_table[request, first // size : -(-length // size)]
    return blocks


def is_in_use(value: object) -> bool:
    """Return whether a field is set. 0 and {} do not count as set, any tensor does."""
    return value is not None and (bool(value) if isinstance(value, (int, dict)) else True)


def get_extents(value: object) -> set[int]:
    """Return the dimensions of an array, or the length of a list: the sizes along which it could need slicing."""
    if isinstance(value, ARRAYS):
        return set(value.shape)
    return {len(value)} if isinstance(value, (list, tuple)) else set()


def is_causal(metadata: AttentionMetadata) -> bool:
    """Return whether tokens attend only to earlier tokens. A layer's builder may differ from the step's metadata.

    vLLM's PrefillPrefixLMAttention differs: some tokens of a prompt attend to the whole prompt.
    """
    return getattr(metadata, "causal", True) is not False
