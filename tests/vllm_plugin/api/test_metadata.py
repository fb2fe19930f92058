"""The block tables of vLLM's model runner are read with the size of the blocks that are in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from dbo_runtime.vllm_plugin.api.metadata import read_block_table


class Table(SimpleNamespace):
    def get_numpy_array(self) -> Any:
        return self.rows


def test_a_table_is_that_of_the_layers_and_has_its_own_block_size() -> None:
    """Since vLLM 0.32 a row has the KV cache's blocks, which may be larger than those that the kernel is built for."""
    runner: Any = GPUModelRunner.__new__(GPUModelRunner)
    groups = [SimpleNamespace(layer_names=["a", "b"]), SimpleNamespace(layer_names=["c"])]
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    tables = [Table(block_size=16, rows=np.array([[1, 2]])), Table(block_size=128, rows=np.array([[7]]))]
    runner.input_batch = SimpleNamespace(block_table=tables)
    known = read_block_table(runner, ["c"])
    assert known is not None
    assert (known[0].tolist(), known[1]) == ([[7]], 128)


def test_the_tables_of_other_runners_are_not_read() -> None:
    other: Any = SimpleNamespace()
    assert read_block_table(other, ["a"]) is None
    assert read_block_table(None, ["a"]) is None
