"""Operators of sparse attention (DeepSeek V3.2, GLM-5): an indexer chooses keys, and attention sees no others.

See attention.py for how they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from standin_ascend.kernels import launch, refuse

ATTENTION_SCHEMA = (  # vllm-ascend's own
    "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, *,"
    " Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None,"
    " Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND',"
    " str layout_kv='BSND', int sparse_mode=3, int pre_tokens=9223372036854775807,"
    " int next_tokens=9223372036854775807, int attention_mode=2, bool return_softmax_lse=False)"
    " -> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)"
)
NO_MASK, CAUSAL = 0, 3  # sparse modes: queries see all keys that were chosen; the last query sees all keys
ABSORBED = 2  # attention mode: the latent is key and value, and rotary parts come apart
NO_KEY = -1


def choose_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_key: torch.Tensor,
    block_table: torch.Tensor,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = CAUSAL,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_lightning_indexer`: positions of the best keys of each query [queries, 1, count], -1 after them.

    Queries are [queries, heads, size], weights [queries, heads], and keys a cache [blocks, block size, 1, size].
    """
    if (layout_query, layout_key, sparse_mode) != ("TND", "PA_BSND", CAUSAL):
        raise NotImplementedError(f"npu_lightning_indexer: layouts {layout_query}, {layout_key}, mode {sparse_mode}")
    refuse("npu_lightning_indexer", rest)
    out = query.new_empty(query.shape[0], key.shape[2], sparse_count, dtype=torch.int32)
    lengths = actual_seq_lengths_query, actual_seq_lengths_key
    launch("LightningIndexer", compute_choice, query, key, weights, block_table, *lengths, out)
    return out, query.new_empty(0)


def compute_choice(
    query: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    query_ends: torch.Tensor,
    key_lengths: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Choose by weighted sums of what is positive in each head's product; of equal ones those that come first.

    Sums are made in float64 and rounded, so that what a query gets does not depend on how many there are.
    """
    out.fill_(NO_KEY)
    for queries, blocks, length in list_requests(query_ends, key_lengths, table, cache.shape[1]):
        keys = cache[blocks].flatten(0, 1)[:length, 0].double()
        products = (query[queries].double() @ keys.T).relu()  # [queries, heads, keys]
        write_best((products * weights[queries].double()[..., None]).sum(1).float(), out[queries, 0])


def write_best(scores: torch.Tensor, out: torch.Tensor) -> None:
    """Write where the best of the scores [queries, keys] are that a query may see to *out* [queries, count]."""
    best = scores.masked_fill(find_later(scores), -torch.inf).sort(dim=-1, descending=True, stable=True)
    count = min(scores.shape[1], out.shape[-1])
    out[:, :count] = best.indices[:, :count].masked_fill(best.values[:, :count] == -torch.inf, NO_KEY).int()


def attend_to_chosen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor,
    actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_kv: torch.Tensor,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = CAUSAL,
    attention_mode: int = ABSORBED,
    return_softmax_lse: bool = False,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`npu_sparse_flash_attention`: attend to keys at *sparse_indices* [queries, 1, count] of each request's sequence.

    Queries are [queries, heads, size]; keys, which are values too, and rotary parts are caches [blocks, block size, 1,
    size]; there may be no rotary parts. With *return_softmax_lse*, the largest score of each query and the sum of
    exponentials relative to it come with what is attended, [1, queries, heads] in float32.
    """
    layouts = layout_query, layout_kv, attention_mode, sparse_block_size
    if layouts != ("TND", "PA_BSND", ABSORBED, 1) or sparse_mode not in (NO_MASK, CAUSAL):
        raise NotImplementedError(f"npu_sparse_flash_attention: layouts and modes {layouts}, {sparse_mode}")
    if (query_rope is None) != (key_rope is None) or key.data_ptr() != value.data_ptr():
        raise NotImplementedError("npu_sparse_flash_attention with one rotary part, or with values of their own")
    refuse("npu_sparse_flash_attention", rest)
    out = query.new_empty(query.shape)
    sums = make_sums(query, return_softmax_lse)
    inputs = query, query_rope, key, key_rope, sparse_indices, block_table
    lengths = actual_seq_lengths_query, actual_seq_lengths_kv
    launch("SparseFlashAttention", compute_attention, *inputs, *lengths, out, *sums, scale_value, sparse_mode)
    return out, *sums


def make_sums(query: torch.Tensor, are_wanted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the largest score of each of the queries [queries, heads, size], and for the sum; or none."""
    shape = (1, *query.shape[:2]) if are_wanted else (0,)
    return query.new_empty(shape, dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


def compute_attention(
    query: torch.Tensor,
    query_rope: torch.Tensor | None,
    cache: torch.Tensor,
    rope_cache: torch.Tensor | None,
    indices: torch.Tensor,
    table: torch.Tensor,
    query_ends: torch.Tensor,
    key_lengths: torch.Tensor,
    out: torch.Tensor,
    largest: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
    mode: int,
) -> None:
    """Attend in float64, as `attention.compute_attention`; queries without keys give zeros."""
    clear(out, largest, sums)
    if query_rope is None or rope_cache is None:
        query_rope, rope_cache = query[..., :0], cache[..., :0]
    for queries, blocks, length in list_requests(query_ends, key_lengths, table, cache.shape[1]):
        latents, ropes = (part[blocks].flatten(0, 1)[:length, 0] for part in (cache, rope_cache))
        found = attend(query[queries], query_rope[queries], latents, ropes, indices[queries, 0], scale, mode)
        write(queries, found, out, largest, sums)


def clear(out: torch.Tensor, largest: torch.Tensor, sums: torch.Tensor) -> None:
    """Write what queries give that see no key."""
    out.zero_()
    largest.fill_(-torch.inf)
    sums.zero_()


def write(queries: slice, found: Sequence[torch.Tensor], *out: torch.Tensor) -> None:
    """Write what `attend` has found for these queries, of the sums as far as there is memory for them."""
    attended, *sums = out
    attended[queries] = found[0]
    for part, values in zip(sums, found[1:], strict=True):
        if part.numel():
            part[0, queries] = values.float()


def attend(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latents: torch.Tensor,
    ropes: torch.Tensor,
    chosen: torch.Tensor,
    scale: float,
    mode: int = CAUSAL,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Let queries [queries, heads, size] attend to the *chosen* [queries, count] of all keys [keys, size].

    Returns:
        What is attended, in the queries' type; in float64 the largest score of each query and the sum of exponentials
        relative to it [queries, heads].
    """
    length, latents = latents.shape[0], latents.double()
    parts = query.double() @ latents.T + query_rope.double() @ ropes.double().T
    scores = parts.transpose(0, 1) * scale  # [heads, queries, keys]
    chosen = chosen.long()
    seen = scores.new_zeros(chosen.shape[0], length + 1, dtype=torch.bool)
    seen.scatter_(1, chosen.masked_fill((chosen < 0) | (chosen >= length), length), value=True)
    seen = seen[:, :length]
    if mode == CAUSAL:
        seen &= ~find_later(scores[0])
    scores = scores.masked_fill(~seen, -torch.inf)
    shares = scores.softmax(-1).masked_fill(~seen.any(1)[:, None], 0)
    largest = scores.amax(-1)
    sums = (scores - largest.masked_fill(largest == -torch.inf, 0)[..., None]).exp().sum(-1)
    return (shares @ latents).transpose(0, 1).to(query.dtype), largest.T, sums.T


def list_requests(
    query_ends: torch.Tensor, key_lengths: torch.Tensor, table: torch.Tensor, block_size: int
) -> list[tuple[slice, torch.Tensor, int]]:
    """Return the queries of each request that has any, the blocks of its keys, and their number."""
    edges = pairwise([0, *query_ends.tolist()])
    return [
        (slice(first, last), table[request, : -(-length // block_size)].long(), length)
        for request, ((first, last), length) in enumerate(zip(edges, key_lengths.tolist(), strict=True))
        if last > first and length
    ]


def find_later(scores: torch.Tensor) -> torch.Tensor:
    """Return which keys come after a query [queries, keys]."""
    queries, keys = scores.shape
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)


def scatter(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """`npu_scatter_nd_update_`: write rows of *updates* to the rows of *input* at *indices* [rows, 1]."""
    if indices.dim() != 2 or indices.shape[1] != 1:
        raise NotImplementedError(f"npu_scatter_nd_update_ at indices {list(indices.shape)}")
    launch("ScatterNdUpdate", compute_scatter, input, indices, updates)
    return input


def compute_scatter(rows: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> None:
    """Leave out negative indices, which vllm-ascend has for padding."""
    places = indices[:, 0].long()
    rows[places[places >= 0]] = updates[places >= 0]
