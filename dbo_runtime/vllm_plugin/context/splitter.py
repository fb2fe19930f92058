"""The attention metadata and the forward context of each micro-batch.

Metadata is rebuilt, not split: the common metadata is sliced, then the backend's own builder builds each slice's
metadata. Slicing the built metadata field by field is what broke vllm-ascend #941 release after release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from operator import sub
from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config

from dbo_runtime.batch import Batch, BatchSlice
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.forward_context import copy_unsplit, get_data, slice_context
from dbo_runtime.vllm_plugin.api.metadata import (
    IntArray,
    get_window,
    has_cache,
    list_distinct,
    read_block_table,
)
from dbo_runtime.vllm_plugin.api.metadata_source import MetadataSource, get_source, make_builder, note_source
from dbo_runtime.vllm_plugin.api.speculation import count_assumed_drafts, count_drafts
from dbo_runtime.vllm_plugin.context.batch_size import BatchSize
from dbo_runtime.vllm_plugin.context.checks import (
    ARRAYS,
    CachedRequests,
    check_context,
    check_needed,
    check_prefix_cache,
    get_extents,
    is_causal,
    is_in_use,
)
from dbo_runtime.vllm_plugin.context.common_slices import drop_padding, ends_in_padding, slice_common
from dbo_runtime.vllm_plugin.context.states import (
    ALIGNED,
    check_drafts,
    check_starts,
    has_states,
    keep_places,
    slice_arguments,
)
from dbo_runtime.vllm_plugin.platforms.platform import Platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class ContextSplitter:
    """Makes one forward context per micro-batch from the step's.

    Args:
        platform: the platform that vLLM serves on.
        vllm_config: vLLM's configuration of the engine.
        runner: the model runner; its block tables on the host avoid a copy from the device.
        dispatch: way that the model's program sends tokens to experts; see `RankContext`.
    """

    def __init__(
        self,
        platform: Platform,
        vllm_config: VllmConfig,
        runner: GPUModelRunner | None = None,
        dispatch: str = "all_gather",
    ) -> None:
        self.platform = platform
        self.dispatch = dispatch
        self._vllm_config = vllm_config
        self._runner = runner
        self._builders: dict[int, tuple[AttentionMetadataBuilder, list[AttentionMetadataBuilder]]] = {}
        self._unknown: dict[type, tuple[str, ...]] = {}  # unknown fields, by class of the common metadata

    def read_batch(self, context: ForwardContext, tokens: int) -> Batch | Decline:
        """Return the batch to decide by, or a decline if this step cannot be split."""
        if not context.attn_metadata:
            if context.dp_metadata is None:
                return Decline("no attention metadata (profiling or dummy run)")
            return Batch((tokens,), 0)  # a dummy batch, which keeps an idle rank in step with others
        decline = check_context(context, tokens, self.platform, self.dispatch)
        decline = decline or self.check_context_data(context, tokens)
        if decline is not None:
            return decline
        sources = []
        distinct = list_distinct(context.attn_metadata.values())
        for metadata in distinct:
            source = self._read_source(metadata)
            if isinstance(source, Decline):
                return source
            decline = self._check_common(source, tokens)
            if decline is not None:
                return decline
            sources.append(source)
        return self._describe(sources, tokens, all(map(is_causal, distinct)))

    @property
    def decode_len(self) -> int:
        """Longest query of a decode, with its drafts. Longer ones are prefills, even if a backend decodes them."""
        return 1 + count_drafts(self._vllm_config)

    def read_size(self, context: ForwardContext, tokens: int) -> BatchSize | None:
        """Return the size of a step's batch without reading its requests; None if its metadata has no known source."""
        metadata = next(iter(context.attn_metadata.values()), None) if type(context.attn_metadata) is dict else None
        source = None if metadata is None else get_source(metadata)
        if source is None:
            return None
        return BatchSize(tokens, source.common.num_reqs, source.common.max_query_len)

    def split(
        self,
        context: ForwardContext,
        slices: Sequence[BatchSlice],
        sizes: Sequence[Sequence[int]] = (),
        only: int | None = None,
    ) -> list[ForwardContext] | Decline:
        """Return a forward context per slice, or only for slice number *only*. The given context stays unchanged.

        *sizes* are the tokens of every data parallel rank in each micro-batch [micro-batches][ranks]. A single slice is
        the step itself, and keeps its whole context.
        """
        if len(slices) == 1:
            return [copy_unsplit(context)]
        numbers = range(len(slices)) if only is None else [only]
        metadata_of = context.attn_metadata or {}
        rebuilt: dict[int, dict[int, AttentionMetadata | None]] = {}
        shared: list[dict[Any, Any]] = [{} for _ in slices]
        for metadata in metadata_of.values():
            if id(metadata) not in rebuilt:
                parts = self._rebuild(metadata, slices, shared, numbers)
                if isinstance(parts, Decline):
                    return parts
                rebuilt[id(metadata)] = parts
        contexts = []
        for number in numbers:
            own = {layer: rebuilt[id(metadata)].get(number) for layer, metadata in metadata_of.items()}
            is_dummy = not own or None in own.values()  # a slice with only padding runs like a dummy batch
            part_sizes = sizes[number] if sizes else ()
            part = slice_context(context, slices[number], None if is_dummy else own, part_sizes)
            self.platform.complete_context(part, slices[number], part_sizes)
            contexts.append(part)
        return contexts

    def _describe(self, sources: Sequence[MetadataSource], tokens: int, causal: bool) -> Batch:
        common = sources[0].common
        starts = common.query_start_loc_cpu.tolist()
        query_lens = tuple(map(sub, starts[1:], starts))
        drafts, decode_len = count_drafts(self._vllm_config), self.decode_len
        is_decode = max(query_lens) <= decode_len
        prefill = 0 if is_decode else sum(length for length in query_lens if length > decode_len)
        cuttable = causal and all(self._can_cut_requests(source) for source in sources)
        seq_lens = common.seq_lens_cpu_upper_bound.tolist()[: len(query_lens)]
        context_lens = tuple(map(sub, seq_lens, query_lens))
        if min(context_lens) < 0:  # lengths of padding
            context_lens = tuple(max(length, 0) for length in context_lens)
        keeps_states = any(has_states(source.builder) for source in sources)
        cuts_decodes = drafts == 0 or (self.platform.cuts_decodes and not keeps_states)
        return Batch(query_lens, prefill, cuttable, decode_len, context_lens, cuts_decodes).pad(tokens)

    def _can_cut_requests(self, source: MetadataSource) -> bool:
        """Return whether a request may be cut: its tail reads keys its head has cached, in layers that have a cache."""
        cached = has_cache(source.builder.kv_cache_spec)
        return cached and self.platform.can_cut_requests(source.common, self._vllm_config)

    def _rebuild(
        self,
        metadata: AttentionMetadata,
        slices: Sequence[BatchSlice],
        shared: Sequence[dict[Any, Any]],
        numbers: Sequence[int],
    ) -> dict[int, AttentionMetadata | None] | Decline:
        """Return the metadata of the slices with these *numbers*, except slices with only padding.

        *shared* holds, for each slice, the data that its builders leave for each other.
        """
        source = self._read_source(metadata)
        if isinstance(source, Decline):
            return source
        common = source.common
        sizes, slices = [piece.size for piece in slices], drop_padding(slices, common)
        decline = self._check_prefix_cache(source, slices)
        if decline is not None:
            return decline
        if not has_cache(source.builder.kv_cache_spec):  # vLLM's CPU builder writes slots that slices share with it
            common = replace(common, slot_mapping=common.slot_mapping.clone())
        builders = self._get_builders(source, len(slices))
        if isinstance(builders, Decline):
            return builders
        sliced = zip(slice_common(common, slices, self.platform.fields), sizes[: len(slices)], strict=True)
        parts = [self.platform.complete_metadata(part, tokens) for part, tokens in sliced]
        if has_states(source.builder):
            decline = check_starts(parts) or check_drafts(common, slices, source.arguments)
            if decline is not None:
                return decline
            if self._vllm_config.cache_config.mamba_cache_mode == ALIGNED:
                parts = keep_places(common, slices, parts, source.builder.kv_cache_spec.block_size)
        built: dict[int, AttentionMetadata | None] = {}
        further = self.platform.get_build_arguments(metadata)
        with self.platform.building_metadata():
            for number in (number for number in numbers if number < len(slices)):
                builder, part = builders[number], parts[number]
                arguments = slice_arguments({**source.arguments, **further}, slices[number], shared[number])
                if isinstance(arguments, Decline):
                    return arguments
                built[number] = builder.build(0, part, **arguments)
                note_source(built[number], source.layer_names, builder, part, arguments)
        return built

    def _check_prefix_cache(self, source: MetadataSource, slices: Sequence[BatchSlice]) -> Decline | None:
        """Decline if layers read cached blocks that a later slice writes. Layers without a cache read none."""
        common, spec = source.common, source.builder.kv_cache_spec
        if not has_cache(spec):
            return None
        blocks, block_size = self._read_blocks(source)
        requests = CachedRequests(
            common.query_start_loc_cpu.numpy(), common.seq_lens_cpu_upper_bound.numpy(), blocks, block_size
        )
        return check_prefix_cache(slices, requests, count_assumed_drafts(self._vllm_config), get_window(spec))

    def _read_blocks(self, source: MetadataSource) -> tuple[IntArray, int]:
        """Return each request's KV blocks [requests, blocks] and the block size, from the host if possible.

        With decode context parallelism, each rank has a block under the same number, and its tokens are spread over
        them.
        """
        known = read_block_table(self._runner, source.layer_names)
        if known is None:
            known = source.common.block_table_tensor.cpu().numpy(), int(source.builder.kv_cache_spec.block_size)
        return known[0], known[1] * self._vllm_config.parallel_config.decode_context_parallel_size

    def check_context_data(self, context: ForwardContext, tokens: int) -> Decline | None:
        """Decline if the context, including a platform's additions, has per-token data that would not be sliced."""
        for name, value in get_data(context).items():
            if isinstance(value, ARRAYS) and name not in self.platform.sliced_tensors and tokens in value.shape:
                return Decline("unknown per-token data in the forward context", name)
        return None

    def _check_common(self, source: MetadataSource, tokens: int) -> Decline | None:
        """Decline if the common metadata has data that cannot be sliced."""
        common, sliced = source.common, self.platform.fields
        if source.common_prefix_len:
            return Decline("cascade attention")
        known = int(common.query_start_loc_cpu.numpy()[-1])
        padded = known < tokens and not self.platform.pads_batches
        if common.num_actual_tokens != known or known > tokens or padded:
            return Decline("padded batch", f"{tokens} tokens, {common.num_actual_tokens} in the attention metadata")
        for name in sliced.unsupported:
            if is_in_use(getattr(common, name, None)):
                return Decline("attention metadata field not supported yet", name)
        lacking = check_needed(common)
        if lacking is not None:
            return lacking
        counts = {common.num_reqs, common.num_reqs + 1, tokens}
        for name in self._list_unknown(common):
            if not counts.isdisjoint(get_extents(getattr(common, name))):
                return Decline("unknown per-request or per-token attention metadata", name)
        return None

    def _read_source(self, metadata: AttentionMetadata) -> MetadataSource | Decline:
        """Return what *metadata* was built from, without a last request that is only padding."""
        source = get_source(metadata)
        if source is None:
            return Decline("attention metadata of unknown origin", type(metadata).__name__)
        common = source.common
        if not ends_in_padding(common.query_start_loc_cpu, common.num_actual_tokens):
            return source
        requests = BatchSlice(0, common.num_reqs - 1, 0, common.num_actual_tokens)
        return replace(source, common=slice_common(common, [requests], self.platform.fields)[0])

    def _list_unknown(self, common: CommonAttentionMetadata) -> tuple[str, ...]:
        """Return the fields of the common metadata that no slicing rule covers. Cached by class."""
        kind = type(common)
        if kind not in self._unknown:
            known = self.platform.fields.known
            self._unknown[kind] = tuple(field.name for field in fields(common) if field.name not in known)
        return self._unknown[kind]

    def _get_builders(self, source: MetadataSource, count: int) -> list[AttentionMetadataBuilder] | Decline:
        """Return a separate builder for each micro-batch.

        Builders keep state between build and forward (prefill backends, persistent index buffers). Neither two
        micro-batches nor a micro-batch and the unsplit step may share one. vLLM's own micro-batching does the same.
        """
        builder = source.builder
        _, own = self._builders.setdefault(id(builder), (builder, []))  # holding it keeps its id from reuse
        try:
            with set_current_vllm_config(self._vllm_config):
                while len(own) < count:
                    own.append(make_builder(source, self._vllm_config))
        except (AttributeError, TypeError) as error:
            return Decline("the attention backend's builder cannot be made again", f"{type(builder).__name__}: {error}")
        return own[:count]
