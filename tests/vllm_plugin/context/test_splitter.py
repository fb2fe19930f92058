"""Attention metadata and forward contexts of micro-batches, on vLLM's own classes and without an engine."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, groupby, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.forward_context import DPMetadata, ForwardContext
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from dbo_runtime.batch import Batch, BatchSlice, slice_batch
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.metadata_source import MetadataSource, get_source, trace_builders
from dbo_runtime.vllm_plugin.context import common_slices
from dbo_runtime.vllm_plugin.context.batch_size import count_tokens
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from tests.support.vllm.splitters import (
    BLOCK,
    COMPUTED,
    CONFIG,
    QUERY_LENS,
    TOKENS,
    FakeBuilder,
    KeepsNoDevice,
    NeedsWidth,
    as_plain,
    build,
    cut,
    make_common,
    make_context,
    make_group,
    make_splitter,
)
from tests.support.vllm.splitters import _traced as _traced


def slice_common(common: Any, slices: Sequence[BatchSlice]) -> list[Any]:
    return common_slices.slice_common(common, slices, get_platform("cpu").fields)


def check_common(source: MetadataSource, tokens: int) -> Decline | None:
    return ContextSplitter(get_platform("cpu"), CONFIG)._check_common(source, tokens)


@dataclass
class AscendLike(CommonAttentionMetadata):
    """What a platform may add."""

    scale: float = 0.5
    buffer: torch.Tensor | None = None


def as_dict(common: Any) -> dict[str, Any]:
    return {field.name: as_plain(getattr(common, field.name)) for field in fields(common)}


def expect(first: int, last: int) -> dict[str, Any]:
    """Derive a micro-batch's metadata from the list of its tokens."""
    tokens = [(request, COMPUTED[request] + i) for request, length in enumerate(QUERY_LENS) for i in range(length)]
    pieces = [
        (request, [p for _, p in group]) for request, group in groupby(tokens[first:last], lambda token: token[0])
    ]
    batch = make_common()
    rows = [request for request, _ in pieces]
    starts = torch.tensor([0, *accumulate(len(positions) for _, positions in pieces)], dtype=torch.int32)
    seq_lens = torch.tensor([positions[-1] + 1 for _, positions in pieces], dtype=torch.int32)
    part = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(rows),
        num_actual_tokens=last - first,
        max_query_len=max(len(positions) for _, positions in pieces),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=batch.block_table_tensor[rows],
        slot_mapping=batch.slot_mapping[first:last],
        positions=torch.tensor([p for _, positions in pieces for p in positions]),
        is_prefilling=batch.is_prefilling[rows],
    )
    return as_dict(part)


@pytest.mark.parametrize(
    "cuts",
    [(8,), (16,), (6,), (11,), (18,), (5, 16), (6, 11), (8, 12), (10, 13), (5, 8, 16)],
    ids=str,
)
def test_every_field_of_a_slice_is_that_of_its_tokens(cuts: tuple[int, ...]) -> None:
    parts = slice_common(make_common(), cut(*cuts))
    edges = [0, *cuts, TOKENS]
    assert [as_dict(part) for part in parts] == [expect(*edge) for edge in pairwise(edges)]


def test_slicing_leaves_the_original_as_it_was() -> None:
    common = make_common()
    before = copy.deepcopy(as_dict(common))
    for part in slice_common(common, cut(6, 11)):
        part.query_start_loc.zero_()
        part.query_start_loc_cpu.zero_()
    assert as_dict(common) == before


def test_the_head_of_a_cut_request_ends_where_it_is_cut_and_the_tail_at_the_end() -> None:
    head, tail = slice_common(make_common((4, 10), (0, 6)), cut(9, query_lens=(4, 10)))
    assert head.seq_lens.tolist() == [4, 6 + 5]
    assert tail.seq_lens.tolist() == [6 + 10]
    assert (head.max_seq_len, tail.max_seq_len) == (11, 16)


def test_the_class_and_the_fields_of_a_platform_are_kept() -> None:
    buffer = torch.zeros(64)
    parts = slice_common(make_common(cls=AscendLike, scale=0.25, buffer=buffer), cut(8))
    assert [type(part) for part in parts] == [AscendLike, AscendLike]
    assert [part.scale for part in parts] == [0.25, 0.25]
    assert all(part.buffer is buffer for part in parts)


def test_a_causal_flag_of_each_request_is_sliced_and_a_common_one_kept() -> None:
    each = torch.tensor([True, False, True, False])
    assert [p.causal.tolist() for p in slice_common(make_common(causal=each), cut(8))] == [[True, False]] * 2
    assert [p.causal for p in slice_common(make_common(causal=False), cut(8))] == [False, False]


def list_fields() -> set[str]:
    """Return the fields of this vLLM's common attention metadata."""
    return {field.name for field in fields(CommonAttentionMetadata)}


@dataclass
class EveryVersion(CommonAttentionMetadata):
    """Fields that some versions of vLLM have, and others do not."""

    req_idx: Any = None
    rswa_prefix_lens: Any = None
    replayssm_decode_base_cpu: Any = None
    _num_computed_tokens_cpu: Any = None


def test_request_tables_that_are_there_are_sliced() -> None:
    tables = {
        "req_idx": np.array([7, 5, 3, 1]),
        "rswa_prefix_lens": torch.tensor([1, 2, 3, 4]),
        "replayssm_decode_base_cpu": torch.tensor([4, 3, 2, 1]),
        "is_prefilling": torch.tensor([True, True, False, True]),
    }
    common = make_common(cls=EveryVersion, **tables)
    assert check_common(make_source(common), TOKENS) is None
    _, tail = slice_common(common, cut(11))
    for name, table in tables.items():
        assert getattr(tail, name).tolist() == table.tolist()[2:], name


def test_what_is_derived_from_lengths_is_derived_again() -> None:
    common = make_common(cls=EveryVersion)
    common._num_computed_tokens_cpu = torch.tensor(COMPUTED)
    assert check_common(make_source(common), TOKENS) is None
    assert [part._num_computed_tokens_cpu for part in slice_common(common, cut(9))] == [None, None]


@pytest.mark.skipif("_seq_lens_cpu" not in list_fields(), reason="vLLM has had no lengths on the host since 0.30")
def test_lengths_on_the_host_follow_a_cut_inside_a_request() -> None:
    common = make_common()
    common._seq_lens_cpu, common._num_computed_tokens_cpu = common.seq_lens.clone(), torch.zeros(4, dtype=torch.int32)
    for part in slice_common(common, cut(9)):
        assert torch.equal(part._seq_lens_cpu, part.seq_lens)
        assert part._num_computed_tokens_cpu is None, "derived again"


def test_positions_of_several_dimensions_are_sliced_by_token() -> None:
    positions = torch.arange(3 * TOKENS).reshape(3, TOKENS)
    head, tail = slice_common(make_common(positions=positions), cut(8))
    assert torch.equal(torch.cat([head.positions, tail.positions], dim=1), positions)


def test_caches_are_not_inherited() -> None:
    common = make_common()
    common.compute_num_computed_tokens()
    common._token_to_req_indices_cache = torch.zeros(TOKENS, dtype=torch.int32)
    _, tail = slice_common(common, cut(11))
    assert tail._token_to_req_indices_cache is None
    assert tail.compute_num_computed_tokens().tolist() == [2 + 3, 7]


def make_source(common: Any, common_prefix_len: int = 0) -> MetadataSource:
    return MetadataSource(weakref.ref(common), [], None, common, {}, common_prefix_len)


def test_a_plain_batch_can_be_split() -> None:
    assert check_common(make_source(make_common()), TOKENS) is None


def test_cascade_attention_declines() -> None:
    assert check_common(make_source(make_common(), common_prefix_len=32), TOKENS) == Decline("cascade attention")


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [(TOKENS + 4, {}), (TOKENS, {"num_actual_tokens": TOKENS + 4}), (TOKENS + 4, {"num_actual_tokens": TOKENS + 4})],
    ids=["input padded", "metadata padded", "both padded"],
)
def test_a_padded_batch_declines(tokens: int, changes: dict[str, Any]) -> None:
    found = check_common(make_source(make_common(**changes)), tokens)
    assert found is not None
    assert found.reason == "padded batch"
    assert found.detail.startswith(f"{tokens} tokens")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_logits_indices", 3),
        ("encoder_seq_lens", torch.tensor([9, 9, 9, 9])),
        ("dcp_local_seq_lens", torch.tensor([3, 12, 5, 6])),
        ("mm_req_doc_ranges", {0: [(0, 3)]}),
    ],
)
def test_a_field_of_an_unsupported_feature_declines_by_name(name: str, value: Any) -> None:
    found = check_common(make_source(make_common(**{name: value})), TOKENS)
    assert found == Decline("attention metadata field not supported yet", name)


@pytest.mark.parametrize(("name", "value"), [("num_logits_indices", 0), ("mm_req_doc_ranges", {})])
def test_a_field_of_an_unsupported_feature_that_is_empty_is_fine(name: str, value: Any) -> None:
    assert check_common(make_source(make_common(**{name: value})), TOKENS) is None


def test_lengths_that_the_host_does_not_know_decline() -> None:
    found = check_common(make_source(make_common(seq_lens_cpu_upper_bound=None)), TOKENS)
    assert found == Decline("attention metadata without sequence lengths on the host")


@dataclass
class Unknown(CommonAttentionMetadata):
    """A field that no version of vLLM known here has."""

    surprise: Any = None


@pytest.mark.parametrize(
    "value",
    [torch.zeros(4), torch.zeros(5), torch.zeros(TOKENS), torch.zeros(4, 9), np.zeros(4), [0] * TOKENS, (1, 2, 3, 4)],
    ids=["per request", "starts", "per token", "rows per request", "array", "list", "tuple"],
)
def test_an_unknown_field_that_seems_to_be_per_request_or_per_token_declines(value: Any) -> None:
    found = check_common(make_source(make_common(cls=Unknown, surprise=value)), TOKENS)
    assert found == Decline("unknown per-request or per-token attention metadata", "surprise")


@pytest.mark.parametrize(
    "value",
    [None, 4, torch.tensor(4), torch.zeros(64), np.zeros(1), [1, 2], "four", {1: 2}],
    ids=["nothing", "number", "scalar", "buffer", "array", "list", "text", "dict"],
)
def test_an_unknown_field_of_another_size_is_harmless(value: Any) -> None:
    assert check_common(make_source(make_common(cls=Unknown, surprise=value)), TOKENS) is None


class ShortPromptsAsDecodes(FakeBuilder):
    """As FLASH_ATTN_MLA does with up to 512 tokens: its kernel of decodes computes them faster."""

    reorder_batch_threshold = 4


@dataclass(frozen=True)
class FrozenMetadata:
    common: Any


class SlottedMetadata:
    __slots__ = ("common",)

    def __init__(self, common: Any) -> None:
        self.common = common


@pytest.mark.usefixtures("_traced")
def test_tracing_twice_is_tracing_once() -> None:
    accessor = AttentionGroup.get_metadata_builder
    trace_builders()
    assert AttentionGroup.get_metadata_builder is accessor


@pytest.mark.usefixtures("_traced")
def test_metadata_remembers_what_it_was_built_from() -> None:
    group, common = make_group(), make_common()
    metadata = group.get_metadata_builder().build(common_prefix_len=0, common_attn_metadata=common, fast_build=True)
    source, builder = get_source(metadata), group.metadata_builders[0]
    assert (metadata.common, metadata.builder, metadata.fast_build) == (common, builder, True)
    assert (source.metadata(), source.common) == (metadata, common)
    assert (source.layer_names, source.builder, source.arguments) == (group.layer_names, builder, {"fast_build": True})


@pytest.mark.usefixtures("_traced")
def test_arguments_may_be_given_by_position_and_a_builder_be_fetched_often() -> None:
    group = make_group()
    builder = group.get_metadata_builder()
    assert group.get_metadata_builder() is builder
    metadata = group.get_metadata_builder().build(8, make_common(), True)
    assert (metadata.common_prefix_len, metadata.fast_build) == (8, True)
    assert (get_source(metadata).common_prefix_len, get_source(metadata).arguments) == (8, {"fast_build": True})


@pytest.mark.usefixtures("_traced")
def test_a_builder_may_have_further_arguments_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of linear attention when vLLM captures graphs, `build_for_cudagraph_capture` in gdn_attn.py."""

    class Metadata:
        def __init__(self, accepted: Any, drafts: Any) -> None:
            self.accepted, self.drafts = accepted, drafts

    def build(self: FakeBuilder, prefix: int, common: Any, accepted: Any = None, drafts: Any = None) -> Metadata:
        return Metadata(accepted, drafts)

    monkeypatch.setattr(FakeBuilder, "build", build)
    metadata = make_group().get_metadata_builder().build(0, make_common(), [1, 1], [0, 0])
    assert (metadata.accepted, metadata.drafts) == ([1, 1], [0, 0])
    assert get_source(metadata).arguments == {"accepted": [1, 1], "drafts": [0, 0]}


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("cls", [FrozenMetadata, SlottedMetadata])
def test_metadata_that_cannot_be_marked_declines_by_its_type(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeBuilder, "build", lambda self, prefix, common, fast_build=False: cls(common))
    context = make_context(build(make_group()))
    found = make_splitter().read_batch(context, TOKENS)
    assert found == Decline("attention metadata of unknown origin", cls.__name__)


@pytest.mark.usefixtures("_traced")
def test_metadata_that_was_copied_for_another_group_of_layers_declines() -> None:
    """Its source is the first group's, and so are the block table and slots that it would be built again from."""
    group = make_group()
    builder = group.get_metadata_builder()
    metadata = builder.build(0, make_common())
    other = builder.update_block_table(metadata, torch.zeros(4, 4, dtype=torch.int32), torch.zeros(TOKENS))
    found = make_splitter().read_batch(make_context({"layers.0": metadata, "layers.1": other}), TOKENS)
    assert found == Decline("attention metadata of unknown origin", "Metadata")


@pytest.mark.usefixtures("_traced")
def test_the_size_of_a_batch_is_known_before_it_is_read() -> None:
    context = make_context(build(make_group(), make_common((1, 2, 1), (5, 9, 7))))
    assert make_splitter().read_size(context, 4) == (4, 3, 2)


@pytest.mark.parametrize("metadata", [{}, None, [{}, {}], {"layers.0": object()}])
def test_without_metadata_of_one_known_batch_there_is_no_size(metadata: Any) -> None:
    context = make_context({})
    context.attn_metadata = metadata
    assert make_splitter().read_size(context, 4) is None


@pytest.mark.usefixtures("_traced")
def test_a_batch_is_read_as_its_query_and_context_lengths() -> None:
    found = make_splitter().read_batch(make_context(build(make_group())), TOKENS)
    assert found == Batch(QUERY_LENS, prefill_tokens=TOKENS, cuttable=True, decode_len=1, context_lens=COMPUTED)


@pytest.mark.usefixtures("_traced")
def test_prompts_that_a_backend_computes_by_its_kernel_of_decodes_are_prefills() -> None:
    context = make_context(build(make_group(ShortPromptsAsDecodes)))
    found = make_splitter().read_batch(context, TOKENS)
    assert found == Batch(QUERY_LENS, prefill_tokens=TOKENS, cuttable=True, decode_len=1, context_lens=COMPUTED)
    assert slice_batch(found, (2,)), "a piece may be as short as such a prompt"


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("backend", [FakeBuilder, ShortPromptsAsDecodes])
def test_a_decode_has_as_many_tokens_as_are_drafted_and_one(backend: type) -> None:
    """Whether or not the backend treats them as decodes."""
    config = SimpleNamespace(**vars(CONFIG) | {"speculative_config": SimpleNamespace(num_speculative_tokens=2)})
    for platform, cuts_decodes in (("cpu", True), ("cuda", False)):
        found = ContextSplitter(get_platform(platform), config).read_batch(
            make_context(build(make_group(backend))), TOKENS
        )
        assert isinstance(found, Batch)
        assert (found.decode_len, found.cuts_decodes) == (3, cuts_decodes)


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("causal", [False, torch.tensor([True, True, True, True])], ids=["none", "each its own"])
def test_requests_are_not_cut_inside_unless_all_attention_is_causal(causal: Any) -> None:
    context = make_context(
        {
            **build(make_group(FakeBuilder, "layers.0")),
            **build(make_group(FakeBuilder, "layers.1"), make_common(causal=causal)),
        }
    )
    found = make_splitter().read_batch(context, TOKENS)
    assert isinstance(found, Batch)
    assert not found.cuttable


@pytest.mark.usefixtures("_traced")
def test_requests_are_not_cut_inside_where_a_layer_by_itself_sees_later_tokens() -> None:
    metadata = build(make_group(FakeBuilder, "layers.0"))
    metadata["layers.0"].causal = False  # as the builder of a prefix language model says, whatever the step's says
    found = make_splitter().read_batch(make_context(metadata), TOKENS)
    assert isinstance(found, Batch)
    assert not found.cuttable


@pytest.mark.usefixtures("_traced")
def test_unknown_data_for_each_token_in_the_context_declines_by_name() -> None:
    for name, put in (("mask", "additional_kwargs"), ("mc2_mask", "context")):
        context = make_context(build(make_group()))
        if put == "context":
            setattr(context, name, torch.zeros(3, TOKENS))
        else:
            context.additional_kwargs = {name: torch.zeros(TOKENS)}
        found = make_splitter().read_batch(context, TOKENS)
        assert found == Decline("unknown per-token data in the forward context", name)


@pytest.mark.usefixtures("_traced")
def test_one_group_of_layers_that_cannot_be_split_declines() -> None:
    one, other = make_group(FakeBuilder, "layers.0"), make_group(FakeBuilder, "layers.1")
    context = make_context({**build(one), **build(other, make_common(num_logits_indices=2))})
    found = make_splitter().read_batch(context, TOKENS)
    assert found == Decline("attention metadata field not supported yet", "num_logits_indices")


def split_padded(context: ForwardContext, padded: int, cuts: Sequence[int]) -> list[ForwardContext]:
    """Split a step of *padded* tokens; compare the metadata of its parts with those of the batch without padding."""
    splitter = ContextSplitter(get_platform("cuda"), CONFIG)  # a platform that pads batches
    batch = splitter.read_batch(context, padded)
    assert isinstance(batch, Batch)
    assert (batch.tokens, batch.prefill_tokens) == (padded, TOKENS)
    parts = splitter.split(context, slice_batch(replace(batch, decode_len=0), cuts))
    assert isinstance(parts, list)
    for part, other in zip(parts, split(make_context(build(make_group())), *cuts), strict=True):
        own, reference = part.attn_metadata["layers.0"].common, other.attn_metadata["layers.0"].common
        assert own.num_actual_tokens == reference.num_actual_tokens
        assert own.query_start_loc_cpu.tolist() == reference.query_start_loc_cpu.tolist()
        assert own.seq_lens.tolist() == reference.seq_lens.tolist()
    return parts


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("cuts", [(5,), (6, 11), (TOKENS - 1,)], ids=str)
def test_on_cuda_a_batch_padded_to_the_size_of_a_graph_is_split_and_the_last_part_has_the_padding(
    cuts: tuple[int, ...],
) -> None:
    padded = TOKENS + 4
    slots = torch.cat([torch.arange(TOKENS), torch.full((4,), -1)])
    metadata = build(make_group(), make_common(slot_mapping=slots))
    context = make_context(metadata, is_padding=torch.arange(padded) >= TOKENS)
    context.slot_mapping = {"layers.0": slots}
    parts = split_padded(context, padded, cuts)
    assert parts[-1].slot_mapping["layers.0"].tolist() == slots[cuts[-1] :].tolist()


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("cuts", [(5,), (6, 11), (TOKENS - 1,)], ids=str)
def test_a_last_request_of_padding_alone_is_none_of_the_batch(cuts: tuple[int, ...]) -> None:
    """vllm-ascend 0.23 adds one where FlashComm pads a batch."""
    padded = TOKENS + 4
    common = make_common((*QUERY_LENS, 4), (*COMPUTED, 0), num_actual_tokens=TOKENS)
    context = make_context(build(make_group(), common), is_padding=torch.zeros(padded, dtype=torch.bool))
    context.slot_mapping = {"layers.0": torch.arange(padded)}
    split_padded(context, padded, cuts)


@pytest.mark.usefixtures("_traced")
def test_a_context_that_cannot_be_split_declines() -> None:
    context = make_context(build(make_group()), is_padding=torch.zeros(TOKENS + 4, dtype=torch.bool))
    assert make_splitter().read_batch(context, TOKENS) == Decline("padded batch")


def split(context: ForwardContext, *cuts: int, splitter: ContextSplitter | None = None) -> list[Any]:
    parts = (splitter or make_splitter()).split(context, cut(*cuts))
    assert isinstance(parts, list)
    return parts


@pytest.mark.usefixtures("_traced")
def test_contexts_are_copies_that_share_nothing_that_a_step_changes() -> None:
    context = make_context(build(make_group()))
    context.from_a_platform = object()
    before = copy.copy(context.__dict__)
    parts = split(context, 8)
    for part in parts:
        part.additional_kwargs["mine"] = True
        part.attn_metadata["layers.9"] = None
        part.slot_mapping["layers.9"] = None
    assert context.__dict__ == before
    assert context.additional_kwargs == {"platform": "data"}
    assert list(context.attn_metadata) == list(context.slot_mapping) == ["layers.0", "layers.1"]
    assert all(type(part) is ForwardContext and part.from_a_platform is context.from_a_platform for part in parts)
    assert all(part.no_compile_layers is context.no_compile_layers for part in parts)
    assert [part.additional_kwargs for part in parts] == [{"platform": "data", "mine": True}] * 2


@pytest.mark.usefixtures("_traced")
def test_a_context_has_what_a_micro_batch_needs_to_run() -> None:
    mask = torch.arange(TOKENS) % 2 == 0
    parts = split(make_context(build(make_group()), is_padding=mask), 6, 11)
    for part, (first, last) in zip(parts, [(0, 6), (6, 11), (11, TOKENS)], strict=True):
        assert [slots.tolist() for slots in part.slot_mapping.values()] == [list(range(1000 + first, 1000 + last))] * 2
        assert torch.equal(part.is_padding, mask[first:last])
        assert part.skip_compiled
        assert (part.ubatch_slices, part.batch_descriptor, part.moe_layer_index) == (None, None, 0)


@pytest.mark.usefixtures("_traced")
def test_sizes_of_a_single_rank_are_those_of_the_micro_batch() -> None:
    """vllm-ascend's contexts have them with sequence-parallel MoE, also without data parallel."""
    sizes = DPMetadata(torch.tensor([TOKENS], dtype=torch.int32))
    parts = split(make_context(build(make_group()), dp_metadata=sizes), 6, 11)
    assert [part.dp_metadata.num_tokens_across_dp_cpu.tolist() for part in parts] == [[6], [5], [TOKENS - 11]]
    assert sizes.num_tokens_across_dp_cpu.tolist() == [TOKENS]


@pytest.mark.usefixtures("_traced")
def test_a_context_without_a_mask_gives_contexts_without() -> None:
    assert [part.is_padding for part in split(make_context(build(make_group()), is_padding=None), 8)] == [None, None]


@pytest.mark.usefixtures("_traced")
def test_metadata_is_built_once_for_each_slice_with_the_arguments_of_the_original() -> None:
    common = make_common()
    parts = split(make_context(build(make_group(), common, fast_build=True)), 6, 11)
    for part, expected in zip(parts, slice_common(common, cut(6, 11)), strict=True):
        metadata = part.attn_metadata["layers.0"]
        assert part.attn_metadata["layers.1"] is metadata
        assert as_dict(metadata.common) == as_dict(expected)
        assert (metadata.common_prefix_len, metadata.fast_build) == (0, True)
        assert metadata.builder.built == 1


@pytest.mark.usefixtures("_traced")
def test_each_group_of_layers_is_built_by_its_own_backend() -> None:
    one, other = make_group(FakeBuilder, "layers.0"), make_group(ShortPromptsAsDecodes, "layers.1")
    for part in split(make_context({**build(one), **build(other)}), 8):
        assert type(part.attn_metadata["layers.0"].builder) is FakeBuilder
        assert type(part.attn_metadata["layers.1"].builder) is ShortPromptsAsDecodes


@pytest.mark.usefixtures("_traced")
def test_each_micro_batch_has_a_separate_builder_and_keeps_it() -> None:
    group, splitter = make_group(), make_splitter()
    unsplit = group.get_metadata_builder()
    unsplit.set_kernel_block_size(32)

    def get_builders(*cuts: int) -> list[FakeBuilder]:
        parts = split(make_context(build(group)), *cuts, splitter=splitter)
        return [part.attn_metadata["layers.0"].builder for part in parts]

    two, three = get_builders(8), get_builders(5, 11)
    assert len({id(builder) for builder in (unsplit, *three)}) == 4
    assert all(one is other for one, other in zip(two, three, strict=False))
    for builder in three:
        assert builder.kv_cache_spec is unsplit.kv_cache_spec
        assert (builder.layer_names, builder.device) == (unsplit.layer_names, unsplit.device)
        assert builder.vllm_config is builder.current_config is CONFIG
        assert builder.kernel_block_size == 32


@pytest.mark.usefixtures("_traced")
def test_a_builder_that_keeps_no_device_is_made_on_that_of_the_metadata() -> None:
    common = make_common()
    for part in split(make_context(build(make_group(KeepsNoDevice), common)), 8):
        builder = part.attn_metadata["layers.0"].builder
        assert (builder.made_on, builder.kernel_block_size) == (common.query_start_loc.device, 64)


@pytest.mark.usefixtures("_traced")
def test_a_builder_that_cannot_be_made_again_declines() -> None:
    context = make_context(build(make_group(NeedsWidth, block_table_width=4)))
    found = make_splitter().split(context, cut(8))
    assert isinstance(found, Decline)
    assert found.reason == "the attention backend's builder cannot be made again"
    assert found.detail.startswith("NeedsWidth: ")
    assert "block_table_width" in found.detail


@pytest.mark.usefixtures("_traced")
def test_padding_is_not_counted() -> None:
    """Data parallel ranks run as many tokens as the longest batch has; kernels need not compute the others."""
    context = make_context(build(make_group()))
    assert [count_tokens(context, tokens) for tokens in (TOKENS, TOKENS + 4)] == [TOKENS, TOKENS]
    profiling, dummy = (make_dummy_context(ranks) for ranks in (1, 2))
    assert [count_tokens(each, 9) for each in (profiling, dummy)] == [9, 0]


def make_dummy_context(ranks: int) -> Any:
    """Return what is read of a forward context without attention metadata."""
    return SimpleNamespace(attn_metadata=None, dp_metadata=None if ranks == 1 else object())


@pytest.mark.usefixtures("_traced")
def test_reading_from_the_prefix_cache_too_early_declines() -> None:
    table = torch.tensor([[0, 1, 2, 3], [8, 9, 10, 11], [8, 5, 6, 7], [12, 13, 14, 15]], dtype=torch.int32)
    context = make_context(build(make_group(), make_common(computed=(0, 16, 0, 7), block_table_tensor=table)))
    splitter = make_splitter()
    found = splitter.split(context, cut(8))
    assert found == Decline("a request reads prefix-cache blocks that a later micro-batch writes")
    assert isinstance(splitter.split(context, cut(5)), list)


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_share_out_keys_have_a_block_each_under_one_number(ranks: int) -> None:
    """The third request writes to the block that the second one has read if its first 20 tokens do not fill one."""
    table = torch.tensor([[0, 1, 2, 3], [8, 9, 10, 11], [8, 5, 6, 7], [12, 13, 14, 15]], dtype=torch.int32)
    context = make_context(build(make_group(), make_common(computed=(0, 32, 20, 7), block_table_tensor=table)))
    parallel = SimpleNamespace(decode_context_parallel_size=ranks)
    splitter = ContextSplitter(get_platform("cpu"), SimpleNamespace(**vars(CONFIG) | {"parallel_config": parallel}))
    assert isinstance(splitter.split(context, cut(8)), Decline if ranks > 1 else list)


class EncoderBuilder(FakeBuilder):
    """As vLLM's builder for layers without a cache on CPU: it numbers slots by itself, in the tensor that it is given.

    What it makes does not say that tokens attend to later ones.
    """

    def __init__(self, kv_cache_spec: Any, *others: Any) -> None:
        spec = EncoderOnlyAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        super().__init__(spec, *others)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        slots = common_attn_metadata.slot_mapping
        slots.copy_(torch.arange(len(slots)))
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("others", [(), (FakeBuilder,)], ids=["alone", "with others that have a cache"])
def test_requests_are_not_cut_inside_where_layers_keep_no_keys(others: tuple[type[FakeBuilder], ...]) -> None:
    groups = [make_group(cls, f"layers.{number}") for number, cls in enumerate((*others, EncoderBuilder))]
    context = make_context({name: metadata for group in groups for name, metadata in build(group).items()})
    found = make_splitter().read_batch(context, TOKENS)
    assert isinstance(found, Batch)
    assert not found.cuttable


@pytest.mark.usefixtures("_traced")
def test_layers_without_a_cache_have_no_blocks_that_could_be_read_too_early() -> None:
    """All rows of their table are zeros, as vLLM's runner makes them."""
    common = make_common(block_table_tensor=torch.zeros(4, 1, dtype=torch.int32))
    parts = split(make_context(build(make_group(EncoderBuilder), common)), 5)
    assert [part.attn_metadata["layers.0"].common.num_reqs for part in parts] == [1, 3]


@pytest.mark.usefixtures("_traced")
def test_slots_that_a_builder_writes_stay_those_of_the_step_in_its_own_metadata() -> None:
    """The step may still run unsplit: to be compared, or because another group of layers declines."""
    context = make_context(build(make_group(EncoderBuilder)))
    parts = split(context, 5)
    assert context.attn_metadata["layers.0"].common.slot_mapping.tolist() == list(range(TOKENS))
    assert [part.attn_metadata["layers.0"].common.slot_mapping.tolist() for part in parts] == [
        list(range(5)),
        list(range(TOKENS - 5)),
    ]


@pytest.mark.usefixtures("_traced")
def test_layers_may_have_no_slots() -> None:
    context = make_context(build(make_group()))
    context.slot_mapping["layers.1"] = None
    assert isinstance(make_splitter().read_batch(context, TOKENS), Batch)
    assert [part.slot_mapping["layers.1"] for part in split(context, 5)] == [None, None]
    context.slot_mapping = None
    assert [part.slot_mapping for part in split(context, 5)] == [{}, {}]


@pytest.mark.parametrize("name", ["block_table_tensor", "slot_mapping"])
def test_what_each_slice_needs_and_a_step_lacks_declines_by_name(name: str) -> None:
    found = check_common(make_source(make_common(**{name: None})), TOKENS)
    assert found == Decline("attention metadata without a block table or slots", name)
