"""Common attention metadata, sliced as vLLM 0.30.0 slices it, and the block tables of its model runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dbo_runtime.batch import BatchSlice

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

IntArray = npt.NDArray[np.int32]
"""Lengths, offsets or blocks, as vLLM keeps them on the host."""


def slice_common_metadata(
    common: CommonAttentionMetadata, slices: Sequence[BatchSlice]
) -> list[CommonAttentionMetadata]:
    """Return the common metadata as vLLM slices it: correct in the fields named `split` in `fields`, others dropped."""
    from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

    return list(split_attn_metadata([UBatchSlice(piece.requests, piece.tokens) for piece in slices], common))


def read_block_table(runner: GPUModelRunner | None, layer_names: Sequence[str]) -> IntArray | None:
    """Return the host's copy of the KV blocks of each request [requests, blocks], or None for unknown runners."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not isinstance(runner, GPUModelRunner):
        return None
    groups = runner.kv_cache_config.kv_cache_groups
    index = next(i for i, group in enumerate(groups) if layer_names[0] in group.layer_names)
    blocks: IntArray = runner.input_batch.block_table[index].get_numpy_array()
    return blocks
