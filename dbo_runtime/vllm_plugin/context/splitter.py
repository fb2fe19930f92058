"""Attention metadata and forward context of each micro-batch.

Metadata is rebuilt, not split: the common metadata is sliced, then the backend's own builder builds for each slice.
Splitting what was built, field by field, is what broke vllm-ascend #941 release after release.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from dbo_runtime.batch import Batch, BatchSlice
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api import compat
from dbo_runtime.vllm_plugin.api.fields import FIELDS, SLICED_CONTEXT_TENSORS
from dbo_runtime.vllm_plugin.context.checks import check_context, check_prefix_cache

_ORIGIN = "_dbo_origin"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a piece of attention metadata was built from.

    *metadata* is that piece. vLLM makes some layers' metadata as a copy of others' with a block table of its own
    (`update_block_table`): the copy carries this origin, too, but it is not the copy's.
    """

    metadata: weakref.ref[Any]
    layer_names: list[str]
    builder: Any
    common: Any
    arguments: dict[str, Any]
    common_prefix_len: int


def trace_builders() -> None:
    """Let each metadata object remember its origin.

    `AttentionGroup.get_metadata_builder` is the one accessor that the runners of vLLM and of vllm-ascend all use.
    """
    from vllm.v1.worker.utils import AttentionGroup

    original = AttentionGroup.get_metadata_builder
    if hasattr(original, _ORIGIN):
        return

    @functools.wraps(original)
    def get_metadata_builder(self: Any, ubatch_id: int = 0) -> Any:
        builder = original(self, ubatch_id)
        if _ORIGIN not in builder.__dict__:
            setattr(builder, _ORIGIN, builder.build)
            builder.build = functools.partial(_build_and_note, self.layer_names, builder)
        return builder

    setattr(get_metadata_builder, _ORIGIN, original)
    AttentionGroup.get_metadata_builder = get_metadata_builder


def _build_and_note(
    layer_names: list[str],
    builder: Any,
    common_prefix_len: int,
    common_attn_metadata: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    metadata = getattr(builder, _ORIGIN)(common_prefix_len, common_attn_metadata, *args, **kwargs)
    names = ("fast_build",)[: len(args)]
    arguments = {**dict(zip(names, args, strict=True)), **kwargs}
    try:
        piece = weakref.ref(metadata)
        origin = Origin(piece, layer_names, builder, common_attn_metadata, arguments, common_prefix_len)
        setattr(metadata, _ORIGIN, origin)
    except (AttributeError, TypeError):
        pass  # frozen or slotted: without an origin the step declines, naming the type
    return metadata


class ContextSplitter:
    """Makes one forward context per micro-batch from the step's own; platforms that add to it derive their own class.

    Args:
        vllm_config: of the engine.
        runner: the model runner, whose block tables on the host save a copy from the device.

    Attributes:
        fields: what becomes of each field of the common metadata.
        sliced: per-token tensors of the forward context that slices get their part of.
        pads: whether a batch may have more tokens than its attention metadata; those at the end are padding then.
    """

    fields = FIELDS
    sliced: tuple[str, ...] = SLICED_CONTEXT_TENSORS
    pads = False

    def __init__(self, vllm_config: VllmConfig, runner: Any = None) -> None:
        self._vllm_config = vllm_config
        self._runner = runner
        self._builders: dict[int, tuple[Any, list[Any]]] = {}

    def read_batch(self, context: Any, tokens: int) -> Batch | Decline:
        """Return the integers to decide by, or why this step cannot be split."""
        if not context.attn_metadata:
            if context.dp_metadata is None:
                return Decline("no attention metadata (profiling or dummy run)")
            return Batch((tokens,), 0)  # a dummy batch, which keeps an idle rank in step with the others
        hazard = check_context(context, tokens) or self._find_unknown_data(context, tokens)
        if hazard is not None:
            return hazard
        pieces = {id(metadata): metadata for metadata in context.attn_metadata.values()}  # layers share them
        for metadata in pieces.values():
            origin = getattr(metadata, _ORIGIN, None)
            if origin is None or origin.metadata() is not metadata:
                return Decline("attention metadata of unknown origin", type(metadata).__name__)
            decline = self._find_common_hazard(origin, tokens)
            if decline is not None:
                return decline
        return self._describe([getattr(metadata, _ORIGIN) for metadata in pieces.values()], tokens)

    def split(
        self, context: Any, slices: Sequence[BatchSlice], sizes: Sequence[Sequence[int]] = ()
    ) -> list[Any] | Decline:
        """Return a forward context for each slice; the one given stays as it is.

        *sizes* are the tokens of every data parallel rank in each micro-batch [micro-batches][ranks]. A single slice is
        the step itself, with all that vLLM has told of it.
        """
        if len(slices) == 1:
            own = copy.copy(context)
            own.skip_compiled = True
            return [own]
        rebuilt: dict[int, list[Any]] = {}
        metadata_of = context.attn_metadata or {}
        for metadata in metadata_of.values():
            if id(metadata) not in rebuilt:
                parts = self._rebuild(getattr(metadata, _ORIGIN), slices)
                if isinstance(parts, Decline):
                    return parts
                rebuilt[id(metadata)] = parts
        contexts = []
        for index, piece in enumerate(slices):
            part = copy.copy(context)  # keeps whatever a platform has added
            if metadata_of:
                found = {layer: rebuilt[id(metadata)][index] for layer, metadata in metadata_of.items()}
                part.attn_metadata = None if None in found.values() else found  # nothing but padding: as a dummy batch
            if sizes:
                counts = torch.tensor(sizes[index], dtype=torch.int32)
                part.dp_metadata = replace(context.dp_metadata, num_tokens_across_dp_cpu=counts, local_sizes=None)
            part.slot_mapping = {layer: slots[piece.tokens] for layer, slots in context.slot_mapping.items()}
            part.is_padding = None if context.is_padding is None else context.is_padding[piece.tokens]
            part.additional_kwargs = dict(context.additional_kwargs)
            part.ubatch_slices, part.batch_descriptor = None, None
            part.moe_layer_index = 0  # some builds count MoE layers through it
            part.skip_compiled = True
            self._complete_context(part, piece, sizes[index] if sizes else ())
            contexts.append(part)
        return contexts

    def _complete_context(self, part: Any, piece: BatchSlice, sizes: Sequence[int]) -> None:
        """Change what a platform keeps in a slice's context: *sizes* are the tokens of every data parallel rank."""

    def _complete_common(self, part: Any) -> Any:
        """Return a slice's common metadata with what a platform derives from the rest."""
        return part

    def _is_cuttable(self, origin: Origin) -> bool:
        """Return whether a request may be cut: its tail attends to what its head has cached in the same step."""
        return origin.common.causal is True

    def _build(self, builder: Any, part: Any, origin: Origin) -> Any:
        return builder.build(0, part, **origin.arguments)

    def _describe(self, origins: list[Origin], tokens: int) -> Batch:
        common = origins[0].common
        query_lens = tuple(np.diff(common.query_start_loc_cpu.numpy()).tolist())
        decode_len = max(origin.builder.reorder_batch_threshold or 1 for origin in origins)
        prefill = sum(length for length in query_lens if length > decode_len)
        cuttable = all(self._is_cuttable(origin) for origin in origins)
        seq_lens = common.seq_lens_cpu_upper_bound[: len(query_lens)].tolist()
        context_lens = tuple(max(length - query, 0) for length, query in zip(seq_lens, query_lens, strict=True))
        if tokens > common.num_actual_tokens:  # one more request, and no matter how it is cut
            query_lens, context_lens = (*query_lens, tokens - common.num_actual_tokens), (*context_lens, 0)
        return Batch(query_lens, prefill, cuttable, decode_len, context_lens)

    def _rebuild(self, origin: Origin, slices: Sequence[BatchSlice]) -> list[Any] | Decline:
        """Return the metadata of each slice; None for those of padding only."""
        common = origin.common
        padded, slices = len(slices), _without_padding(slices, common)
        hazard = check_prefix_cache(
            slices,
            common.query_start_loc_cpu.numpy(),
            common.seq_lens_cpu_upper_bound.numpy(),
            self._read_blocks(origin),
            origin.builder.kv_cache_spec.block_size,
        )
        if hazard is not None:
            return hazard
        builders = self._find_builders(origin, len(slices))
        if isinstance(builders, Decline):
            return builders
        parts = zip(builders, self._slice_common(common, slices), strict=True)
        built = [self._build(builder, self._complete_common(part), origin) for builder, part in parts]
        return [*built, *[None] * (padded - len(slices))]

    def _read_blocks(self, origin: Origin) -> np.ndarray[Any, Any]:
        """Return the KV blocks of each request [requests, blocks]: a device's would have to be waited for."""
        known = compat.read_block_table(self._runner, origin.layer_names)
        blocks: np.ndarray[Any, Any] = origin.common.block_table_tensor.cpu().numpy() if known is None else known
        return blocks

    def _find_unknown_data(self, context: Any, tokens: int) -> Decline | None:
        """Decline if the context, or what a platform put into it, has data per token that we would not slice."""
        data = {**vars(context), **context.additional_kwargs}
        for name, value in data.items():
            is_array = isinstance(value, torch.Tensor | np.ndarray)
            if is_array and name not in self.sliced and tokens in _find_extents(value):
                return Decline("unknown per-token data in the forward context", name)
        return None

    def _find_common_hazard(self, origin: Origin, tokens: int) -> Decline | None:
        common = origin.common
        if origin.common_prefix_len:
            return Decline("cascade attention")
        known = int(common.query_start_loc_cpu[-1])
        if common.num_actual_tokens != known or known > tokens or (known < tokens and not self.pads):
            return Decline("padded batch", f"{tokens} tokens, {common.num_actual_tokens} in the attention metadata")
        for name in self.fields.unsupported:
            if _is_in_use(getattr(common, name, None)):
                return Decline("attention metadata field not supported yet", name)
        if common.seq_lens_cpu_upper_bound is None:
            return Decline("attention metadata without sequence lengths on the host")
        counts = {common.num_reqs, common.num_reqs + 1, tokens}
        for field in fields(common):
            if field.name not in self.fields.known and not counts.isdisjoint(
                _find_extents(getattr(common, field.name))
            ):
                return Decline("unknown per-request or per-token attention metadata", field.name)
        return None

    def _slice_common(self, common: Any, slices: Sequence[BatchSlice]) -> list[Any]:
        """Slice the common metadata, keeping its class and every field that a platform has added."""
        parts = []
        for piece, part in zip(slices, compat.slice_common_metadata(common, slices), strict=True):
            changed = {name: getattr(part, name) for name in self.fields.split}
            changed["max_seq_len"] = int(part.seq_lens_cpu_upper_bound.max())
            for name in self.fields.per_request:
                if _find_extents(getattr(common, name, None)):
                    changed[name] = getattr(common, name)[piece.requests]
            for name in self.fields.per_token:
                if getattr(common, name, None) is not None:
                    changed[name] = getattr(common, name)[..., piece.tokens]
            changed.update((name, None) for name in self.fields.dropped if hasattr(common, name))
            parts.append(replace(common, **changed))
        return parts

    def _find_builders(self, origin: Origin, count: int) -> list[Any] | Decline:
        """Return a builder of its own for each micro-batch.

        Builders keep state between build and forward (prefill backends, persistent index buffers), so neither two
        micro-batches nor a micro-batch and the whole step may share one. vLLM's own micro-batching does the same.
        """
        builder = origin.builder
        _, own = self._builders.setdefault(id(builder), (builder, []))  # holding it keeps its id from being reused
        try:
            with set_current_vllm_config(self._vllm_config):
                while len(own) < count:
                    own.append(self._make_builder(origin))
        except (AttributeError, TypeError) as error:
            return Decline("the attention backend's builder cannot be made again", f"{type(builder).__name__}: {error}")
        return own[:count]

    def _make_builder(self, origin: Origin) -> Any:
        builder = origin.builder
        made = type(builder)(builder.kv_cache_spec, origin.layer_names, self._vllm_config, builder.device)
        if getattr(builder, "kernel_block_size", None) is not None:
            made.set_kernel_block_size(builder.kernel_block_size)
        return made


def _without_padding(slices: Sequence[BatchSlice], common: Any) -> list[BatchSlice]:
    """Return the slices as far as there are requests in them."""
    tokens, requests = common.num_actual_tokens, common.num_reqs
    kept = (piece for piece in slices if piece.first_token < tokens)
    return [replace(p, last_request=min(p.last_request, requests), last_token=min(p.last_token, tokens)) for p in kept]


def _is_in_use(value: Any) -> bool:
    """Return whether a field is set: 0 and {} are not, a tensor of whatever content is."""
    return bool(value) if isinstance(value, int | dict) else value is not None


def _find_extents(value: Any) -> set[int]:
    """Return the dimensions of an array, or the length of a list: those by which it could need to be sliced."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return set(value.shape)
    return {len(value)} if isinstance(value, list | tuple) else set()
