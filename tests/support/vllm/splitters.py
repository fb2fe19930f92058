"""Metadata, builders and contexts as vLLM's runner makes them, for splits without an engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config_or_none
from vllm.forward_context import BatchDescriptor, ForwardContext
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from dbo_runtime.batch import Batch, BatchSlice, slice_batch
from dbo_runtime.vllm_plugin.api.metadata_source import trace_builders
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.platforms.registry import get_platform

BLOCK = 16
CONFIG: Any = SimpleNamespace(  # in place of a VllmConfig, which is only passed on otherwise
    speculative_config=None,
    scheduler_config=SimpleNamespace(async_scheduling=False),
    parallel_config=SimpleNamespace(decode_context_parallel_size=1),
)
QUERY_LENS = (5, 3, 8, 4)
COMPUTED = (0, 20, 2, 7)
TOKENS = sum(QUERY_LENS)
UNTRACED = getattr(AttentionGroup.get_metadata_builder, "_dbo_source", AttentionGroup.get_metadata_builder)


def make_common(
    query_lens: Sequence[int] = QUERY_LENS,
    computed: Sequence[int] = COMPUTED,
    cls: type[CommonAttentionMetadata] = CommonAttentionMetadata,
    **changes: Any,
) -> Any:
    """Return the metadata of a batch of requests with these new and computed tokens."""
    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
    seq_lens = torch.tensor(query_lens, dtype=torch.int32) + torch.tensor(computed, dtype=torch.int32)
    requests, tokens = len(query_lens), sum(query_lens)
    values: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": seq_lens,
        "seq_lens_cpu_upper_bound": seq_lens.clone(),
        "num_reqs": requests,
        "num_actual_tokens": tokens,
        "max_query_len": max(query_lens),
        "max_seq_len": 1024,
        "block_table_tensor": torch.arange(requests * 4, dtype=torch.int32).reshape(requests, 4),
        "slot_mapping": torch.arange(tokens) + 1000,
        "positions": torch.cat([torch.arange(c, c + q) for q, c in zip(query_lens, computed, strict=True)]),
        "is_prefilling": torch.tensor([query > 1 for query in query_lens]),
    }
    return cls(**{**values, **changes})


def cut(*cuts: int, query_lens: Sequence[int] = QUERY_LENS) -> tuple[BatchSlice, ...]:
    return slice_batch(Batch(tuple(query_lens), sum(query_lens), decode_len=0), cuts)


def as_plain(value: Any) -> Any:
    """Return something that compares by content."""
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor | np.ndarray) else value


@dataclass
class Metadata:
    """What FakeBuilder builds."""

    common: Any
    builder: Any
    common_prefix_len: int
    fast_build: bool


class FakeBuilder:
    """A builder as far as the plugin goes, with the constructor that all of vLLM's have."""

    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device
        self.kernel_block_size: int | None = None
        self.current_config = get_current_vllm_config_or_none()
        self.built = 0

    def set_kernel_block_size(self, kernel_block_size: int) -> None:
        self.kernel_block_size = kernel_block_size

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        self.built += 1
        return Metadata(common_attn_metadata, self, common_prefix_len, fast_build)

    def update_block_table(self, metadata: Metadata, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> Metadata:
        """Make the metadata of another group of layers, as vLLM's FlashAttention does."""
        other = copy.copy(metadata)
        other.common = metadata.common.replace(block_table_tensor=block_table, slot_mapping=slot_mapping)
        return other


class NeedsWidth(FakeBuilder):
    """A builder that takes more to be made."""

    def __init__(self, *args: Any, block_table_width: int) -> None:
        super().__init__(*args)
        self.block_table_width = block_table_width


class KeepsNoDevice(FakeBuilder):
    """A builder that finds the size of the kernel's blocks by itself, and keeps no device, as in vLLM 0.23."""

    set_kernel_block_size = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kernel_block_size = 64
        self.made_on = self.__dict__.pop("device")


@pytest.fixture
def _traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace builders, from vLLM's own accessor on, also where an engine of this process has traced them."""
    monkeypatch.setattr(AttentionGroup, "get_metadata_builder", UNTRACED)
    trace_builders()
    yield
    assert AttentionGroup.get_metadata_builder is not UNTRACED


def make_group(cls: type[FakeBuilder] = FakeBuilder, *layers: str, **arguments: Any) -> AttentionGroup:
    names = list(layers or ("layers.0", "layers.1"))
    spec = SimpleNamespace(block_size=BLOCK)
    builder = cls(spec, names, CONFIG, torch.device("cpu"), **arguments)
    return AttentionGroup(None, names, spec, 0, metadata_builders=[builder])


def make_context(attn_metadata: Any, **changes: Any) -> ForwardContext:
    slots = torch.arange(TOKENS) + 1000
    values: dict[str, Any] = {
        "no_compile_layers": {"layers.0": object()},
        "attn_metadata": attn_metadata,
        "slot_mapping": dict.fromkeys(attn_metadata, slots),
        "is_padding": torch.zeros(TOKENS, dtype=torch.bool),
        "batch_descriptor": BatchDescriptor(TOKENS),
        "moe_layer_index": 3,
        "additional_kwargs": {"platform": "data"},
        "cudagraph_runtime_mode": CUDAGraphMode.NONE,
    }
    known = {field.name for field in fields(ForwardContext)}  # 0.23 has no `is_padding`
    return ForwardContext(**{name: value for name, value in {**values, **changes}.items() if name in known})


def build(group: AttentionGroup, common: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Build metadata as vLLM's runner does, for each layer of the group."""
    metadata = group.get_metadata_builder().build(0, common or make_common(), *args, **kwargs)
    return dict.fromkeys(group.layer_names, metadata)


def make_splitter() -> ContextSplitter:
    return ContextSplitter(get_platform("cpu"), CONFIG)
