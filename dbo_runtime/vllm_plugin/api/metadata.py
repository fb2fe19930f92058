"""Common attention metadata, sliced by vLLM's own function, and the block tables of its model runner.

Read against vLLM 0.23.0 to 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dbo_runtime.batch import BatchSlice

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

IntArray = npt.NDArray[np.int32]
"""Lengths, offsets or blocks, as vLLM keeps them on the host."""


def slice_common_metadata(
    common: CommonAttentionMetadata, slices: Sequence[BatchSlice]
) -> list[CommonAttentionMetadata]:
    """Return the common metadata of each slice. Fields named `split` in `fields` are correct, others are dropped."""
    from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

    return list(split_attn_metadata([UBatchSlice(piece.requests, piece.tokens) for piece in slices], common))


def read_block_table(runner: GPUModelRunner | None, layer_names: Sequence[str]) -> tuple[IntArray, int] | None:
    """Return the host's copy of each request's KV blocks [requests, blocks], and the number of tokens per block.

    Up to vLLM 0.30 these are the kernel's blocks, as in the attention metadata. In later versions they are those of the
    KV cache, which may be larger. Returns None for unknown runners, and for layers that are in none of the runner's
    groups or in a group without a block table.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not isinstance(runner, GPUModelRunner):
        return None
    groups = runner.kv_cache_config.kv_cache_groups
    index = next((i for i, group in enumerate(groups) if layer_names[0] in group.layer_names), None)
    if index is None or not has_cache(groups[index].kv_cache_spec):
        return None
    table = runner.input_batch.block_table[index]
    return table.get_numpy_array(), int(table.block_size)


def has_cache(spec: KVCacheSpec) -> bool:
    """Return whether layers keep keys and values of earlier steps. Layers of an encoder do not.

    Each token of an encoder attends to all tokens of its request, within one step.
    """
    from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

    return not isinstance(spec, EncoderOnlyAttentionSpec)


def get_window(spec: KVCacheSpec) -> int | None:
    """Return how many tokens back the layers of a KV cache read; None if any of them reads without limit."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return int(spec.sliding_window) if isinstance(spec, SlidingWindowSpec) else None


def list_distinct(shared: Iterable[AttentionMetadata]) -> list[AttentionMetadata]:
    """Return each distinct metadata object once. Consecutive layers mostly share one."""
    found: list[AttentionMetadata] = []
    last = None
    for each in shared:
        if each is not last and all(each is not other for other in found):
            found.append(each)
        last = each
    return found
