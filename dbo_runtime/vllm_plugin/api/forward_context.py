"""vLLM's forward context: made current, copied, and sliced by token. Read against vLLM 0.23.0 to 0.33.0."""

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


NO_SLOT = -1  # of padding: nothing is cached


def enter_context(context: ForwardContext) -> None:
    """Make *context* the current one. A plain assignment: this runs at every switch between micro-batches."""
    forward_context._forward_context = context


def get_current() -> ForwardContext:
    """Return the current forward context."""
    return forward_context._forward_context


def copy_unsplit(context: ForwardContext) -> ForwardContext:
    """Return a copy for the same tokens, in which layers do not call what vLLM has compiled."""
    own = copy.copy(context)
    own.skip_compiled = True
    return own


def slice_context(
    context: ForwardContext,
    piece: BatchSlice,
    metadata: Mapping[str, AttentionMetadata] | None,
    sizes: Sequence[int] = (),
) -> ForwardContext:
    """Return the forward context of a slice, which keeps what a platform has added to the step's.

    Args:
        context: of the step.
        piece: the slice.
        metadata: attention metadata of the slice by layer; None for a dummy batch.
        sizes: tokens of every data parallel rank in this micro-batch; none without data parallel.
    """
    part = copy_unsplit(context)
    part.attn_metadata = metadata
    if context.dp_metadata is not None:  # with sequence-parallel MoE, vllm-ascend has it for a single rank as well
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
    part.moe_layer_index = 0  # some builds count MoE layers through it
    return part


def take_tokens(values: torch.Tensor, piece: BatchSlice, of_padding: int | bool) -> torch.Tensor:
    """Return what *values* [tokens] has for the tokens of a slice; *of_padding* if it is past the end of the step."""
    if piece.first_token < values.shape[0]:
        return values[piece.tokens]
    return values.new_full((piece.size,), of_padding)


def guard_context(context: ForwardContext, check: Callable[[str], None]) -> ForwardContext:
    """Return a copy that calls *check* with the name of each attribute before it is read; it raises what must not be.

    Only ops on `compute` may read the forward context: on other lanes it may be another micro-batch's by then.
    """

    class GuardedContext(type(context)):  # type: ignore[misc]  # its class is vLLM's, or what a platform has made of it
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("__"):
                check(name)
            return super().__getattribute__(name)

    own = copy.copy(context)
    own.__class__ = GuardedContext
    return own


def get_padding(context: ForwardContext) -> torch.Tensor | None:
    """Return which tokens are padding [tokens]; None if that is not said. vLLM 0.23 has no such field."""
    return getattr(context, "is_padding", None)


def has_metadata() -> bool:
    """Return whether the current forward context has attention metadata: a profiling run has none."""
    return bool(forward_context.get_forward_context().attn_metadata)


def get_rank_sizes(own: int) -> tuple[int, ...]:
    """Return the tokens of every data parallel rank in the current micro-batch: *own* without data parallel."""
    metadata = forward_context.get_forward_context().dp_metadata
    return (own,) if metadata is None else tuple(metadata.num_tokens_across_dp_cpu.tolist())


def get_data(context: ForwardContext) -> dict[str, Any]:
    """Return everything that a forward context holds, by name, with what a platform has added."""
    return {**vars(context), **context.additional_kwargs}
