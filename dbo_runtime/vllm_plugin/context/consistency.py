"""Whether forward contexts of micro-batches fit their slices: under DBO_CHECK, before kernels take them as given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from dbo_runtime.batch import BatchSlice
from dbo_runtime.errors import SplitError

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata


def check_contexts(contexts: Sequence[ForwardContext], slices: Sequence[BatchSlice]) -> None:
    """Check what attention kernels read without asking: they crash, or read others' memory, where it is wrong.

    Backends name their fields alike where they have them; a backend without a field is not checked for it.

    Raises:
        SplitError: naming the micro-batch, the layer, and the figures that do not fit.
    """
    for number, (context, piece) in enumerate(zip(contexts, slices, strict=True)):
        seen: set[int] = set()
        for layer, metadata in (context.attn_metadata or {}).items():
            if id(metadata) not in seen:  # layers share them
                seen.add(id(metadata))
                for problem in _list_problems(metadata, piece):
                    raise SplitError(
                        f"micro-batch {number} of tokens {piece.first_token} to {piece.last_token - 1} has attention "
                        f"metadata (layer {layer}) that does not fit: {problem}. Please report it; until this is "
                        "fixed, DBO_MODE=off serves unsplit."
                    )


def _list_problems(metadata: AttentionMetadata, piece: BatchSlice) -> Iterator[str]:
    """Yield what does not fit a slice. There may be padding: fewer tokens than the slice has, and more requests."""
    requests = piece.last_request - piece.first_request
    actual = getattr(metadata, "num_actual_tokens", None)
    limit = piece.size
    if isinstance(actual, int):
        if actual > piece.size:
            yield f"it has {actual} tokens, of {piece.size}"
        limit = min(actual, piece.size)
    starts, lengths = (getattr(metadata, name, None) for name in ("query_start_loc", "seq_lens"))
    if not isinstance(starts, torch.Tensor) or starts.dim() != 1 or len(starts) < 2:
        return
    starts = starts.cpu()
    queries = starts.diff()
    if int(starts[0]) != 0 or bool((queries < 0).any()):
        yield f"queries start at tokens {starts.tolist()}"
    if int(starts[-1]) > limit:
        yield f"queries end at token {int(starts[-1])}, of {limit}"
    if len(queries) < requests:
        yield f"it has {len(queries)} requests, of {requests}"
    if isinstance(lengths, torch.Tensor) and lengths.shape == queries.shape and bool((lengths.cpu() < queries).any()):
        yield f"sequences of {lengths.tolist()} tokens are shorter than their queries, of {queries.tolist()}"
