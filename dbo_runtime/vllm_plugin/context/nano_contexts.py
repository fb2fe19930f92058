"""The forward contexts of a step whose token-wise ops are cut into nano-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dbo_runtime.batch import BatchSlice
from dbo_runtime.vllm_plugin.api.forward_context import copy_unsplit, slice_context
from dbo_runtime.vllm_plugin.platforms.platform import Platform

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext


def make_nano_contexts(
    context: ForwardContext,
    nano_batches: Sequence[BatchSlice],
    platform: Platform,
    sizes: Sequence[Sequence[int]] = (),
) -> list[ForwardContext]:
    """Return the context of joint ops, which is the step's, and then one per nano-batch, without attention metadata.

    *sizes* are the tokens of every data parallel rank in each nano-batch [nano-batches][ranks].
    """
    contexts = [copy_unsplit(context)]
    for number, piece in enumerate(nano_batches):
        part_sizes = sizes[number] if sizes else ()
        part = slice_context(context, piece, None, part_sizes)
        platform.complete_context(part, piece, part_sizes)
        contexts.append(part)
    return contexts
