"""Mistakes in the forward contexts and attention metadata of micro-batches: each changes right ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Contexts = list[Any]
ContextFault = Callable[[Contexts], Contexts]


def edit(contexts: Contexts, field: str, change: Callable[[Any], Any], numbers: tuple[int, ...] = (1,)) -> Contexts:
    """Return the contexts with a field of the attention metadata of these micro-batches changed, in all layers."""
    edited = list(contexts)
    for number in numbers:
        context = copy.copy(contexts[number])
        context.attn_metadata = {}
        for layer, metadata in contexts[number].attn_metadata.items():
            own = copy.copy(metadata)
            setattr(own, field, change(getattr(metadata, field)))
            context.attn_metadata[layer] = own
        edited[number] = context
    return edited


def swap_contexts(contexts: Contexts) -> Contexts:
    """Each micro-batch has the context of the other."""
    return contexts[::-1]


def repeat_first_context(contexts: Contexts) -> Contexts:
    """All micro-batches have the context of the first."""
    return [contexts[0]] * len(contexts)


def shift_slots(contexts: Contexts) -> Contexts:
    """Keys are written one slot further on."""
    shifted = []
    for context in contexts:
        own = copy.copy(context)
        own.slot_mapping = {layer: slots + 1 for layer, slots in context.slot_mapping.items()}
        shifted.append(own)
    return edit(shifted, "slot_mapping", lambda slots: slots + 1, tuple(range(len(contexts))))


def write_first_slots(contexts: Contexts) -> Contexts:
    """The second micro-batch writes its keys where the first one does."""
    own = copy.copy(contexts[1])
    own.slot_mapping = {
        layer: contexts[0].slot_mapping[layer][:1].expand(len(slots)).clone()
        for layer, slots in contexts[1].slot_mapping.items()
    }
    return [contexts[0], own, *contexts[2:]]


def shorten_lengths(contexts: Contexts) -> Contexts:
    """The second micro-batch sees one key less."""
    return edit(contexts, "seq_lens", lambda lengths: lengths - 1)


def lengthen_first(contexts: Contexts) -> Contexts:
    """The first micro-batch has the lengths of the whole step: it sees keys that are not written yet."""
    return edit(contexts, "seq_lens", lambda lengths: lengths + 1, (0,))


def reverse_blocks(contexts: Contexts) -> Contexts:
    """The requests of a micro-batch have each other's blocks."""
    return edit(contexts, "block_table", lambda table: table.flip(0), (0, 1))


def start_late(contexts: Contexts) -> Contexts:
    """Where queries start is counted from the start of the step, as without a cut."""
    return edit(contexts, "query_start_loc", lambda starts: starts + (starts > 0))


def see_the_future(contexts: Contexts) -> Contexts:
    """Attention without a causal mask."""
    return edit(contexts, "causal", lambda causal: not causal, (0, 1))


def forget_a_token(contexts: Contexts) -> Contexts:
    """The last token of the second micro-batch counts as padding."""
    return edit(contexts, "num_actual_tokens", lambda tokens: tokens - 1)


METADATA_FAULTS: tuple[ContextFault, ...] = (
    swap_contexts,
    repeat_first_context,
    shift_slots,
    write_first_slots,
    shorten_lengths,
    lengthen_first,
    reverse_blocks,
    start_late,
    see_the_future,
    forget_a_token,
)
