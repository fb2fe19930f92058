"""vLLM's forward context: set, copied, and sliced by token. Read against vLLM 0.23.0 to 0.33.0."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm import forward_context

from dbo_runtime.batch import BatchSlice

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata


NO_SLOT = -1  # slot of padding, which is not cached


def enter_context(context: ForwardContext) -> None:
    """Make *context* the current one. A plain assignment: this runs at every switch between micro-batches."""
    forward_context._forward_context = context


def get_current() -> ForwardContext:
    """Return the current forward context."""
    return forward_context._forward_context


def copy_unsplit(context: ForwardContext) -> ForwardContext:
    """Return a copy for the same tokens, in which layers call no compiled code of vLLM."""
    own = copy.copy(context)
    own.skip_compiled = True
    return own


def slice_context(
    context: ForwardContext,
    piece: BatchSlice,
    metadata: Mapping[str, AttentionMetadata] | None,
    sizes: Sequence[int] = (),
) -> ForwardContext:
    """Return the forward context of a slice. It keeps data that a platform has added to the step's context.

    Args:
        context: the step's forward context.
        piece: the slice.
        metadata: the slice's attention metadata by layer; None for a dummy batch.
        sizes: tokens of every data parallel rank in this micro-batch; empty without data parallelism.
    """
    part = copy_unsplit(context)
    part.attn_metadata = metadata
    if context.dp_metadata is not None:  # vllm-ascend with sequence parallel MoE sets it for a single rank, too
        counts = torch.tensor(sizes or (piece.size,), dtype=torch.int32)
        part.dp_metadata = replace(context.dp_metadata, num_tokens_across_dp_cpu=counts, local_sizes=None)
    part.slot_mapping = {
        layer: None if slots is None else take_tokens(slots, piece, NO_SLOT)
        for layer, slots in (context.slot_mapping or {}).items()
    }
    padding = get_padding(context)
    if padding is not None:
        part.is_padding = take_tokens(padding, piece, True)
    part.additional_kwargs = dict(context.additional_kwargs)
    part.ubatch_slices, part.batch_descriptor = None, None
    part.moe_layer_index = 0  # some builds count MoE layers with it
    return part


def take_tokens(values: torch.Tensor, piece: BatchSlice, of_padding: int | bool) -> torch.Tensor:
    """Return the *values* [tokens] for the tokens of a slice, and *of_padding* for tokens past the end of the step."""
    if piece.first_token < values.shape[0]:
        return values[piece.tokens]
    return values.new_full((piece.size,), of_padding)


def guard_context(context: ForwardContext, check: Callable[[str], None]) -> ForwardContext:
    """Return a copy that calls *check* with each attribute's name before it is read.

    *check* raises for forbidden reads.

    Only ops on `compute` may read the forward context. While ops on other lanes run, another micro-batch's may be
    current.
    """

    class GuardedContext(type(context)):  # type: ignore[misc]  # its class is vLLM's, or a platform's subclass
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("__"):
                check(name)
            return super().__getattribute__(name)

    own = copy.copy(context)
    own.__class__ = GuardedContext
    return own


def get_padding(context: ForwardContext) -> torch.Tensor | None:
    """Return a mask of padding tokens [tokens]; None if unknown. vLLM 0.23 has no such field."""
    return getattr(context, "is_padding", None)


def has_metadata() -> bool:
    """Return whether the current forward context has attention metadata. In a profiling run it has none."""
    return bool(forward_context.get_forward_context().attn_metadata)


def get_rank_sizes(own: int) -> tuple[int, ...]:
    """Return the tokens of every data parallel rank in the current micro-batch; only *own* without data parallelism."""
    metadata = forward_context.get_forward_context().dp_metadata
    return (own,) if metadata is None else tuple(metadata.num_tokens_across_dp_cpu.tolist())


def get_data(context: ForwardContext) -> dict[str, Any]:
    """Return all data of a forward context by name, including data added by a platform."""
    return {**vars(context), **context.additional_kwargs}
