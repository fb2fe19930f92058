"""vLLM's CUDA builders of attention metadata, on tensors of the CPU: what they build for a slice of a batch equals what
they build for a batch that is that slice.

Left out is what only a GPU says: how FlashAttention 3 schedules its blocks ahead, and scratch memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import pytest

from tests.support.gpu_kit.tiny_models import configure, make_folder, make_model

pytestmark = [pytest.mark.cuda_build, pytest.mark.usefixtures("world")]

BACKENDS = {
    "FLASH_ATTN": "llama",
    "TRITON_ATTN": "llama",
    "FLASH_ATTN_MLA": "deepseek",
    "TRITON_MLA": "deepseek",
}
QUERY_LENS = (1, 1, 5, 3, 8, 4)  # two decodes, and prefills with and without tokens that were computed before
COMPUTED = (9, 20, 0, 20, 2, 7)
TOKENS = sum(QUERY_LENS)
CUTS = ((1,), (2,), (7,), (12,), (4, 12), (2, 10, 18), (1, 2, 7, 10, 18))  # at ends of requests and within
SCRATCH = ("workspace", "softmax_segm")


@pytest.fixture(scope="module", params=BACKENDS)
def builder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """Return each backend's builder, and what it was made for."""
    with pytest.MonkeyPatch.context() as patch:
        folder = make_folder(BACKENDS[request.param], tmp_path_factory.mktemp("model"))
        builder = Builder(configure(folder, request.param), patch)
        assert builder.name == request.param
        yield builder


class Builder:
    """The builder of a model's backend, as vLLM's runner has it."""

    def __init__(self, vllm_config: Any, patch: pytest.MonkeyPatch) -> None:
        from vllm.v1.worker.utils import AttentionGroup

        from dbo_runtime.vllm_plugin.api.metadata_source import trace_builders

        model = make_model(vllm_config)
        layer = next(module for module in model.modules() if hasattr(module, "get_attn_backend"))
        backend, spec = layer.get_attn_backend(), layer.get_kv_cache_spec(vllm_config)
        self.vllm_config, self.name, self.layer = vllm_config, backend.get_name(), layer.layer_name
        stay_on_host(sys.modules[backend.get_builder_cls().__module__], patch)
        trace_builders()
        self._group = AttentionGroup(backend, [self.layer], spec, 0)
        self._make = functools.partial(self._make_builder, backend.get_builder_cls(), spec)

    def _make_builder(self, kind: Any, spec: Any) -> Any:
        import torch
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            return kind(spec, [self.layer], self.vllm_config, torch.device("cpu"))

    def build(self, common: Any) -> Any:
        """Return the metadata of a batch, from a new builder."""
        self._group.metadata_builders = [self._make()]
        return self._group.get_metadata_builder().build(0, common)


def stay_on_host(module: Any, patch: pytest.MonkeyPatch) -> None:
    """Let a builder allocate without a GPU, and schedule nothing ahead."""
    import torch

    for name in ("empty", "zeros", "tensor"):
        patch.setattr(torch, name, without_pinning(getattr(torch, name)))
    if hasattr(module, "get_scheduler_metadata"):
        patch.setattr(module, "get_scheduler_metadata", lambda **_: None)


def without_pinning(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch whose memory is not pinned."""
    return lambda *args, pin_memory=False, **kwargs: function(*args, **kwargs)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_each_slice_of_a_mixed_batch_has_what_a_batch_of_its_own_has(builder: Builder, cuts: tuple[int, ...]) -> None:
    from vllm.forward_context import ForwardContext

    from dbo_runtime.batch import Batch, slice_batch
    from dbo_runtime.decline import Decline
    from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
    from dbo_runtime.vllm_plugin.platforms.registry import get_platform
    from tests.support.vllm.splitters import make_common

    common = make_common(QUERY_LENS, COMPUTED)
    context = ForwardContext(
        no_compile_layers={},
        attn_metadata={builder.layer: builder.build(common)},
        slot_mapping={builder.layer: common.slot_mapping},
    )
    splitter = ContextSplitter(get_platform(), builder.vllm_config)
    assert isinstance(splitter.read_batch(context, TOKENS), Batch)
    parts = splitter.split(context, slice_batch(Batch(QUERY_LENS, TOKENS, decode_len=1), cuts))
    assert not isinstance(parts, Decline), parts
    edges = (0, *cuts, TOKENS)
    for (first, last), part in zip(pairwise(edges), parts, strict=True):
        own = builder.build(make_own(common, first, last))
        assert as_plain(part.attn_metadata[builder.layer]) == as_plain(own)


def test_another_slice_has_something_else(builder: Builder) -> None:
    from tests.support.vllm.splitters import make_common

    common = make_common(QUERY_LENS, COMPUTED)
    slices = [(2, 7), (2, 8), (3, 7), (3, 8)]
    built = [as_plain(builder.build(make_own(common, *edges))) for edges in slices]
    assert all(one != other for number, one in enumerate(built) for other in built[:number])


def make_own(common: Any, first: int, last: int) -> Any:
    """Return the common metadata of a batch of these tokens alone."""
    from tests.support.vllm.splitters import make_common

    tokens = [(request, COMPUTED[request] + i) for request, length in enumerate(QUERY_LENS) for i in range(length)]
    rows = sorted({request for request, _ in tokens[first:last]})
    positions = [[place for request, place in tokens[first:last] if request == row] for row in rows]
    return make_common(
        [len(places) for places in positions],
        [places[0] for places in positions],
        max_seq_len=max(places[-1] + 1 for places in positions),
        block_table_tensor=common.block_table_tensor[rows],
        slot_mapping=common.slot_mapping[first:last],
        is_prefilling=common.is_prefilling[rows],
    )


def as_plain(value: Any) -> Any:
    """Return metadata that compares by content, without scratch memory, and objects by their class."""
    import torch

    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        return {name: as_plain(getattr(value, name)) for name in names if not any(word in name for word in SCRATCH)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_plain(each) for each in value]
    return type(value).__qualname__ if type(value).__module__.startswith("vllm") else value
