"""The inputs that attention metadata was built from, noted as vLLM builds it, to build it again for slices."""

from __future__ import annotations

import functools
import inspect
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
    from vllm.v1.worker.utils import AttentionGroup

_SOURCE = "_dbo_source"


@dataclass(frozen=True, slots=True)
class MetadataSource:
    """The inputs that an attention metadata object was built from.

    Attributes:
        metadata: the metadata object. vLLM makes some layers' metadata by copying that of other layers with another
            block table (`update_block_table`). Such a copy also carries this source, but was not built from it.
        layer_names: names of the layers that share it.
        builder: the builder that built it.
        common: the step's common metadata.
        arguments: further arguments of the build.
        common_prefix_len: number of tokens in a prefix that all requests share.
    """

    metadata: weakref.ref[AttentionMetadata]
    layer_names: list[str]
    builder: AttentionMetadataBuilder
    common: CommonAttentionMetadata
    arguments: dict[str, Any]
    common_prefix_len: int


def trace_builders() -> None:
    """Make each metadata object remember its source.

    `AttentionGroup.get_metadata_builder` is the only accessor that all runners of vLLM and vllm-ascend use.
    """
    from vllm.v1.worker.utils import AttentionGroup

    original = AttentionGroup.get_metadata_builder
    if hasattr(original, _SOURCE):
        return

    @functools.wraps(original)
    def get_metadata_builder(self: AttentionGroup, ubatch_id: int = 0) -> AttentionMetadataBuilder:
        builder = original(self, ubatch_id)
        if _SOURCE not in builder.__dict__:
            setattr(builder, _SOURCE, builder.build)
            further = tuple(inspect.signature(builder.build).parameters)[2:]
            builder.build = functools.partial(_build_and_note, self.layer_names, builder, further)
        return builder

    setattr(get_metadata_builder, _SOURCE, original)
    AttentionGroup.get_metadata_builder = get_metadata_builder


def get_source(metadata: AttentionMetadata) -> MetadataSource | None:
    """Return the source that *metadata* itself was built from, or None if it is not known."""
    source: MetadataSource | None = getattr(metadata, _SOURCE, None)
    return source if source is not None and source.metadata() is metadata else None


def make_builder(source: MetadataSource, vllm_config: VllmConfig) -> AttentionMetadataBuilder:
    """Return another builder like that of *source*.

    The device is that of the metadata: builders of linear attention in vLLM 0.23 do not keep theirs.
    """
    builder, device = source.builder, source.common.query_start_loc.device
    made = type(builder)(builder.kv_cache_spec, source.layer_names, vllm_config, device)
    size = getattr(builder, "kernel_block_size", None)
    if size != getattr(made, "kernel_block_size", None):  # some builders find it by themselves
        made.set_kernel_block_size(size)
    return made


def _build_and_note(
    layer_names: list[str],
    builder: AttentionMetadataBuilder,
    further: tuple[str, ...],
    common_prefix_len: int,
    common_attn_metadata: CommonAttentionMetadata,
    *args: Any,
    **kwargs: Any,
) -> AttentionMetadata:
    """Build; *further* are the names of the arguments after the common metadata, some of which have no keyword."""
    metadata = getattr(builder, _SOURCE)(common_prefix_len, common_attn_metadata, *args, **kwargs)
    arguments = {**dict(zip(further, args, strict=False)), **kwargs}  # a builder takes no more than it has names for
    note_source(metadata, layer_names, builder, common_attn_metadata, arguments, common_prefix_len)
    return metadata


def note_source(
    metadata: AttentionMetadata,
    layer_names: list[str],
    builder: AttentionMetadataBuilder,
    common: CommonAttentionMetadata,
    arguments: dict[str, Any],
    common_prefix_len: int = 0,
) -> None:
    """Attach to *metadata* the inputs it was built from; see `MetadataSource`."""
    try:
        piece = weakref.ref(metadata)
        setattr(metadata, _SOURCE, MetadataSource(piece, layer_names, builder, common, arguments, common_prefix_len))
    except (AttributeError, TypeError):
        pass  # frozen or slotted: without a source the step declines, naming the type
