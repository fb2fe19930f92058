"""The attention metadata of vLLM's second model runner (V2), by its own function, is split like that of the first.

The runner itself does not start without Triton, of which there is none for CPUs: no step of it has run here.
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.utils import AttentionGroup

from dbo_runtime.batch import Batch
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.metadata import read_block_table
from dbo_runtime.vllm_plugin.api.metadata_source import trace_builders
from tests.support.vllm.splitters import (
    COMPUTED,
    QUERY_LENS,
    TOKENS,
    UNTRACED,
    as_plain,
    build,
    cut,
    make_common,
    make_context,
    make_group,
    make_splitter,
)

pytestmark = pytest.mark.vllm

BUFFER = 8  # rows of the runner's buffers that no request of the step has
STATES = np.array([3, 0, 5, 1], dtype=np.int32)  # where the runner keeps each request
OWN = {"req_idx", "positions"}  # fields that the first runner leaves empty, or has on the host


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionGroup, "get_metadata_builder", UNTRACED)
    trace_builders()


def build_by_second_runner(group: AttentionGroup, **changes: Any) -> dict[str, Any]:
    """Return the metadata by layer that the V2 runner makes of the batch of `make_common`."""
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

    common = make_common()
    values: dict[str, Any] = {
        "attn_groups": [[group]],
        "num_reqs": common.num_reqs,
        "num_tokens": common.num_actual_tokens,
        "query_start_loc_gpu": common.query_start_loc,
        "query_start_loc_cpu": common.query_start_loc_cpu,
        "max_query_len": common.max_query_len,
        "seq_lens": torch.cat([common.seq_lens, torch.zeros(BUFFER, dtype=torch.int32)]),
        "max_seq_len": common.max_seq_len,
        "block_tables": [common.block_table_tensor],
        "slot_mappings": common.slot_mapping[None],
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=group.layer_names)]),
        "seq_lens_cpu_upper_bound": torch.cat(
            [common.seq_lens_cpu_upper_bound, torch.zeros(BUFFER, dtype=torch.int32)]
        ),
        "positions": common.positions,
        "is_prefilling": common.is_prefilling,
        "req_idx": STATES,
    }
    return dict(build_attn_metadata(**{**values, **changes}))


def test_its_batch_is_read() -> None:
    context = make_context(build_by_second_runner(make_group()))
    assert make_splitter().read_batch(context, TOKENS) == Batch(QUERY_LENS, TOKENS, context_lens=COMPUTED)


@pytest.mark.parametrize("cuts", [(8,), (6,), (5, 16), (6, 11)], ids=str)
def test_each_slice_has_the_metadata_that_it_has_with_the_first_runner(cuts: tuple[int, ...]) -> None:
    first, second = make_group(), make_group()
    expected = make_splitter().split(make_context(build(first)), cut(*cuts))
    found = make_splitter().split(make_context(build_by_second_runner(second)), cut(*cuts))
    assert not isinstance(expected, Decline)
    assert not isinstance(found, Decline)
    for one, other, piece in zip(expected, found, cut(*cuts), strict=True):
        left, right = one.attn_metadata["layers.0"].common, other.attn_metadata["layers.0"].common
        names = [field.name for field in fields(left) if field.name not in OWN]
        assert {name: as_plain(getattr(right, name)) for name in names} == {
            name: as_plain(getattr(left, name)) for name in names
        }
        assert right.req_idx.tolist() == STATES[piece.requests].tolist()
        assert right.positions.tolist() == left.positions.tolist()
        assert other.slot_mapping["layers.0"].tolist() == one.slot_mapping["layers.0"].tolist()
        assert len(other.is_padding) == piece.size


def test_a_batch_that_it_pads_is_declined() -> None:
    padded = TOKENS + 4
    context = make_context(build_by_second_runner(make_group()), is_padding=torch.arange(padded) >= TOKENS)
    detail = f"{padded} tokens, {TOKENS} in the attention metadata"
    assert make_splitter().read_batch(context, padded) == Decline("padded batch", detail)


def test_its_block_tables_are_read_from_the_metadata() -> None:
    """The host has no copy of them, so a step with prefix caching waits for the device."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner: Any = object.__new__(GPUModelRunner)
    assert read_block_table(runner, ["layers.0"]) is None
