"""Check, in a step that is compared, that micro-batches' forward contexts fit the step before kernels rely on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dbo_runtime.batch import BatchSlice
from dbo_runtime.vllm_plugin.api.metadata import has_cache
from dbo_runtime.vllm_plugin.api.metadata_source import get_source
from dbo_runtime.vllm_plugin.context.common_slices import ends_in_padding
from dbo_runtime.vllm_plugin.context.states import has_states

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata


def find_problem(step: ForwardContext, contexts: Sequence[ForwardContext], slices: Sequence[BatchSlice]) -> str:
    """Return the first thing that does not fit, with micro-batch, layer and figures; empty if everything fits.

    Attention kernels do not check their metadata. If it is wrong, they crash, read memory of others, or give wrong
    results. The metadata of the *step* determines what each slice must have. Backends that have a field use the same
    name for it. A backend without a field is not checked for it, but the inputs that its metadata was built from are.
    """
    for number, (context, piece) in enumerate(zip(contexts, slices, strict=True)):
        seen: set[int] = set()
        for layer, metadata in (context.attn_metadata or {}).items():
            if id(metadata) not in seen:  # layers share metadata
                seen.add(id(metadata))
                for problem in _list_problems(step, context, layer, piece):
                    return (
                        f"micro-batch {number} of tokens {piece.first_token} to {piece.last_token - 1} has attention "
                        f"metadata (layer {layer}) that does not fit: {problem}. Please report it; until this is "
                        "fixed, DBO_MODE=off serves unsplit."
                    )
    return ""


def _list_problems(step: ForwardContext, context: ForwardContext, layer: str, piece: BatchSlice) -> Iterator[str]:
    """Yield what does not fit a slice for one layer: within its metadata, or compared with the step's."""
    part, whole = context.attn_metadata[layer], step.attn_metadata[layer]
    yield from _list_contradictions(part, piece)
    source, source_of_step = get_source(part), get_source(whole)
    caches = source is None or has_cache(source.builder.kv_cache_spec)  # otherwise the builder decides about slots
    yield from _list_differences(whole, part, piece, caches, caches)
    if source is not None and source_of_step is not None:
        keeps_places = has_states(source.builder)  # all parts of a request keep its state in one block
        has_table = caches and not keeps_places
        yield from _list_differences(source_of_step.common, source.common, piece, caches, has_table)
    slots = context.slot_mapping.get(layer) if caches else None
    if slots is not None:
        yield from _compare_rows("slots", step.slot_mapping[layer][piece.tokens], slots)


def _list_contradictions(metadata: AttentionMetadata, piece: BatchSlice) -> Iterator[str]:
    """Yield values that do not fit a slice. With padding, it may have fewer tokens than the slice, or more requests."""
    actual = getattr(metadata, "num_actual_tokens", None)
    limit = piece.size
    if isinstance(actual, int):
        if actual > piece.size:
            yield f"it has {actual} tokens, of {piece.size}"
        limit = min(actual, piece.size)
    starts, lengths = _get_starts(metadata), getattr(metadata, "seq_lens", None)
    if starts is None:
        return
    queries = starts.diff()
    if int(starts[0]) != 0 or bool((queries < 0).any()):
        yield f"queries start at tokens {starts.tolist()}"
    if int(starts[-1]) > limit:
        yield f"queries end at token {int(starts[-1])}, of {limit}"
    if isinstance(lengths, torch.Tensor) and lengths.shape == queries.shape and bool((lengths.cpu() < queries).any()):
        yield f"sequences of {lengths.tolist()} tokens are shorter than their queries, of {queries.tolist()}"


def _list_differences(whole: Any, part: Any, piece: BatchSlice, has_slots: bool, has_table: bool) -> Iterator[str]:
    """Yield the fields of a slice's metadata that do not follow from the step's metadata.

    Both are a backend's metadata, or both are the common metadata that it was built from.
    """
    starts, own_starts = _get_starts(whole), _get_starts(part)
    if starts is not None:
        edges = starts[piece.first_request : piece.last_request + 1]
        if own_starts is not None:
            inside = edges.clamp(piece.first_token, piece.last_token) - piece.first_token
            requests = int((inside.diff() > 0).sum())  # excludes padding, which is the step's last request
            if len(own_starts) - 1 < requests:
                yield f"it has {len(own_starts) - 1} requests, of {requests}"
            yield from _compare_rows("starts of queries", inside, own_starts)
        lengths, own_lengths = getattr(whole, "seq_lens", None), getattr(part, "seq_lens", None)
        if isinstance(lengths, torch.Tensor) and isinstance(own_lengths, torch.Tensor):
            later = (edges[1:] - piece.last_token).clamp(min=0)  # tokens of a cut request after this slice
            known = lengths.cpu()[piece.requests][: len(later)]  # padding may have queries, and no lengths
            yield from _compare_rows("lengths of sequences", known - later[: len(known)], own_lengths)
    slots, own_slots = getattr(whole, "slot_mapping", None), getattr(part, "slot_mapping", None)
    if has_slots and isinstance(slots, torch.Tensor) and isinstance(own_slots, torch.Tensor):
        yield from _compare_rows("slots", slots[piece.tokens], own_slots)
    for name in ("block_table", "block_table_tensor") if has_table else ():
        table, own_table = getattr(whole, name, None), getattr(part, name, None)
        if isinstance(table, torch.Tensor) and isinstance(own_table, torch.Tensor):
            width = min(table.shape[-1], own_table.shape[-1])  # backends leave out columns of missing blocks
            yield from _compare_rows("blocks", table[piece.requests, :width], own_table[:, :width])
    causal, own_causal = getattr(whole, "causal", None), getattr(part, "causal", None)
    if isinstance(causal, bool) and isinstance(own_causal, bool) and causal is not own_causal:
        yield f"causal is {own_causal}, but {causal} in the step"


def _compare_rows(what: str, expected: torch.Tensor, actual: torch.Tensor) -> Iterator[str]:
    """Yield the first row that differs. Either side may have more rows, as padding."""
    count = min(len(expected), len(actual))
    expected, actual = expected[:count].cpu(), actual[:count].cpu()
    differs = (expected != actual).unsqueeze(-1).flatten(1).any(dim=1)  # there may be no rows
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        yield f"{what} are {actual[row].tolist()} in row {row}, where the step has {expected[row].tolist()}"


def _get_starts(metadata: Any) -> torch.Tensor | None:
    """Return the start of each query, on the host [requests + 1]; None if the metadata does not say.

    A last query that is only padding is left out.
    """
    starts = getattr(metadata, "query_start_loc", None)
    if not isinstance(starts, torch.Tensor) or starts.dim() != 1 or len(starts) < 2:
        return None
    starts, tokens = starts.cpu(), getattr(metadata, "num_actual_tokens", None)
    return starts[:-1] if isinstance(tokens, int) and ends_in_padding(starts, tokens) else starts
