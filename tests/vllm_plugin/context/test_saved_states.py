"""States that a step moves on are saved before it, and restored before it runs again."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec, FullAttentionSpec, KVCacheSpec, MambaSpec

from dbo_runtime.vllm_plugin.api.kv_caches import changes_in_place
from dbo_runtime.vllm_plugin.api.metadata_source import note_source
from dbo_runtime.vllm_plugin.context.saved_states import SavedStates

BLOCKS, LAYER = 40, "layer.0"
ATTENTION = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


class Metadata:
    """Metadata that may remember its source."""


def make_state(block_size: int, drafts: int = 0) -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((2, 2),), dtypes=(torch.float32,), num_speculative_blocks=drafts)


def make_step(spec: KVCacheSpec, queries: Sequence[int], lengths: Sequence[int], table: Sequence[Sequence[int]]) -> Any:
    """Return the context of a step with one layer, whose cache is two tensors."""
    caches = torch.randn(BLOCKS, 3), torch.randn(BLOCKS, 2, 2)
    common: Any = SimpleNamespace(
        num_reqs=len(queries),
        query_start_loc_cpu=torch.tensor([0, *queries]).cumsum(0),
        seq_lens_cpu_upper_bound=torch.tensor(lengths),
        block_table_tensor=torch.tensor(table, dtype=torch.int32),
    )
    metadata: Any = Metadata()
    builder: Any = SimpleNamespace(kv_cache_spec=spec)
    note_source(metadata, [LAYER], builder, common, {})
    layers = {LAYER: SimpleNamespace(kv_cache=caches)}
    return SimpleNamespace(attn_metadata={LAYER: metadata}, no_compile_layers=layers, kept=metadata)


def find_restored(step: Any) -> list[int]:
    """Return which blocks hold what they held, after all of them were overwritten."""
    caches = step.no_compile_layers[LAYER].kv_cache
    before = [cache.clone() for cache in caches]
    states = SavedStates(step)
    for _ in range(2):  # a step may run again more than once
        for cache in caches:
            cache.add_(1.0)
        states.restore()
    same = [(cache == held).flatten(1).all(1) for cache, held in zip(caches, before, strict=True)]
    assert torch.equal(*same)
    return [int(block) for block in same[0].nonzero()]


@pytest.mark.parametrize(
    ("spec", "queries", "lengths", "table", "restored"),
    [
        (make_state(4096), (1, 5), (100, 5), [[3], [9]], [3, 9]),
        (make_state(4096, drafts=2), (3,), (100,), [[3, 4, 5]], [3, 4, 5]),
        # By blocks of 16 tokens: from the one before that of the first new token to that of the last.
        (make_state(16), (1,), (100,), [[30, 31, 32, 33, 34, 35, 36, 37]], [35, 36]),
        (make_state(16), (40,), (100,), [[30, 31, 32, 33, 34, 35, 36, 37]], [32, 33, 34, 35, 36]),
        (CircularBufferSpec(block_size=8, **ATTENTION), (1, 20), (100, 20), [[3], [9]], [3, 9]),
        (FullAttentionSpec(block_size=16, **ATTENTION), (1,), (100,), [[3, 4, 5, 6, 7, 8, 9]], []),
    ],
    ids=["one state a request", "with drafts", "by block", "over several blocks", "a ring", "keys by slot"],
)
def test_blocks_that_a_step_changes_in_place_are_restored(
    spec: KVCacheSpec, queries: Sequence[int], lengths: Sequence[int], table: Any, restored: list[int]
) -> None:
    assert find_restored(make_step(spec, queries, lengths, table)) == restored


def test_rows_that_were_received_from_the_stage_before_are_restored() -> None:
    buffer = torch.arange(8)
    states = SavedStates(SimpleNamespace(attn_metadata=None), [buffer[:3]])  # type: ignore[arg-type]
    for _ in range(2):
        buffer.add_(10)
        states.restore()
    assert buffer.tolist() == [0, 1, 2, 23, 24, 25, 26, 27]


def test_a_dummy_batch_has_no_states() -> None:
    for metadata in (None, {}):
        SavedStates(SimpleNamespace(attn_metadata=metadata)).restore()  # type: ignore[arg-type] - all that is read


def test_layers_of_different_sizes_change_in_place_if_one_does() -> None:
    keys, state = FullAttentionSpec(block_size=16, **ATTENTION), make_state(16)
    assert not changes_in_place(SimpleNamespace(kv_cache_specs={"a": keys}))  # type: ignore[arg-type] - a stand-in
    assert changes_in_place(SimpleNamespace(kv_cache_specs={"a": keys, "b": state}))  # type: ignore[arg-type]
