"""The block tables of vLLM's model runner are read with the size of the blocks that are in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from dbo_runtime.vllm_plugin.api.metadata import get_window, has_cache, read_block_table


class Table(SimpleNamespace):
    def get_numpy_array(self) -> Any:
        return self.rows


def make_runner() -> Any:
    """Return a runner with two groups of layers that have a KV cache, and one that has none."""
    runner: Any = GPUModelRunner.__new__(GPUModelRunner)
    encoder = EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    groups = [
        SimpleNamespace(layer_names=names, kv_cache_spec=spec)
        for names, spec in ((["a", "b"], None), (["c"], None), (["encoder"], encoder))
    ]
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    tables = [Table(block_size=16, rows=np.array([[1, 2]])), Table(block_size=128, rows=np.array([[7]]))]
    runner.input_batch = SimpleNamespace(block_table=tables)
    return runner


def test_a_table_is_that_of_the_layers_and_has_its_own_block_size() -> None:
    """Since vLLM 0.32 a row has the KV cache's blocks, which may be larger than those that the kernel is built for."""
    known = read_block_table(make_runner(), ["c"])
    assert known is not None
    assert (known[0].tolist(), known[1]) == ([[7]], 128)


@pytest.mark.parametrize("layer", ["encoder", "of no group"])
def test_layers_without_a_table_have_none(layer: str) -> None:
    """vLLM's runner adds layers without a KV cache as a last group, for which there is no table."""
    assert read_block_table(make_runner(), [layer]) is None


def test_windows_and_chunks_limit_what_is_read() -> None:
    shape: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    assert get_window(SlidingWindowSpec(**shape, sliding_window=64)) == 64
    assert get_window(ChunkedLocalAttentionSpec(**shape, attention_chunk_size=32)) == 32
    assert get_window(FullAttentionSpec(**shape)) is None
    assert has_cache(FullAttentionSpec(**shape))
    assert not has_cache(EncoderOnlyAttentionSpec(**shape))


def test_the_tables_of_other_runners_are_not_read() -> None:
    other: Any = SimpleNamespace()
    assert read_block_table(other, ["a"]) is None
    assert read_block_table(None, ["a"]) is None
