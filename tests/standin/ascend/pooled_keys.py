"""Kernels of GLM-5.3-Flash: its indexer's, which chooses pools of keys, and one of the layer that drafts.

Several kernels of Triton of the indexer are one here.

A pool has a few neighbouring keys. The key of a pool is their mean, by shares that the tokens and their places in the
pool decide. Until a pool is full, its keys are in a ring of the request's own.
"""

from __future__ import annotations

from typing import Any

import torch
from standin_ascend.hyper_connections import norm
from standin_ascend.kernels import launch


def keep_keys(
    tail_cache: torch.Tensor,
    indexer_cache: torch.Tensor,
    k: torch.Tensor,
    gate_score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    cum_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    tail_slot_mapping: torch.Tensor,
    tail_block_table: torch.Tensor,
    indexer_slot_mapping: torch.Tensor,
    index_kpool: int,
) -> None:
    """`glm5_next_kpool_tail_compress_and_write_cache_triton`: write the keys of pools that are full, then the rings.

    Args:
        tail_cache: keys and scores in rings [blocks, 2, capacity, size], updated.
        indexer_cache: keys of pools [blocks, block size, 1, size], updated.
        k: keys [tokens, size], as are the scores.
        ape: scores of the places in a pool [pool size, size].
        cum_query_lens: ends of the requests' tokens [requests].
        seq_lens: tokens of each request, with those before [requests].
        tail_slot_mapping: slot of each token in the rings [tokens].
        tail_block_table: the block of each request's ring [requests, 1].
        indexer_slot_mapping: slot of the pool of each token that fills one, else negative [tokens].
    """
    tensors = k, gate_score, ape, positions, cum_query_lens, seq_lens, tail_slot_mapping, tail_block_table
    launch("KpoolTailCompress", compute_pools, tail_cache, indexer_cache, *tensors, indexer_slot_mapping, index_kpool)


def compute_pools(
    rings: torch.Tensor,
    pools: torch.Tensor,
    keys: torch.Tensor,
    scores: torch.Tensor,
    places: torch.Tensor,
    positions: torch.Tensor,
    ends: torch.Tensor,
    lengths: torch.Tensor,
    ring_slots: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    size: int,
) -> None:
    """Join what the ring has of the request with its new tokens, in float64."""
    capacity, block_size, first = rings.shape[2], pools.shape[1], 0
    for request, (last, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        start, ring = length - (last - first), rings[int(table[request, 0])]
        line = {at: ring[:, at % capacity].double() for at in range(max(0, start - size + 1), start)}
        line |= {start + row - first: torch.stack([keys[row], scores[row]]).double() for row in range(first, last)}
        for row in range(first, last):
            position, slot = int(positions[row]), int(slots[row])
            if slot >= 0 and (position + 1) % size == 0:
                pool = torch.stack([line[at] for at in range(position - size + 1, position + 1)])
                shares = (pool[:, 1] + places.double()).softmax(0)
                pools[slot // block_size, slot % block_size, 0] = (shares * pool[:, 0]).sum(0).to(pools.dtype)
        for row in range(max(first, last - capacity), last):
            block, offset = divmod(int(ring_slots[row]), capacity)
            if block >= 0:
                rings[block, 0, offset], rings[block, 1, offset] = keys[row], scores[row]
        first = last


def choose_pools(
    query: torch.Tensor,
    indexer_cache: torch.Tensor,
    weights: torch.Tensor,
    cum_query_lens: torch.Tensor,
    indexer_seq_lens: torch.Tensor,
    indexer_block_table: torch.Tensor,
    positions: torch.Tensor,
    *,
    index_topk: int,
    index_kpool: int,
    max_pool_seq_len: int,
    output_buffer: torch.Tensor | None = None,
    pack_tail: bool = False,
    allow_cache_packing: bool = True,
) -> torch.Tensor:
    """`glm5_next_lightning_indexer_triton`: positions of the tokens of the best pools, and of those in no pool yet.

    Args:
        query: [tokens, heads, size].
        indexer_cache: keys of pools [blocks, block size, 1, size].
        weights: [tokens, heads].
        indexer_seq_lens: pools of each request [requests].

    Returns:
        Positions [tokens, 1, index_topk + index_kpool - 1], -1 after them.
    """
    if not pack_tail:
        raise NotImplementedError("tokens in no pool that do not follow the others")
    width = index_topk + index_kpool - 1
    if output_buffer is None:
        output_buffer = query.new_empty(len(query), width, dtype=torch.int32)
    out = output_buffer[: len(query)]
    tensors = query, indexer_cache, weights, cum_query_lens, indexer_seq_lens, indexer_block_table, positions, out
    launch("KpoolLightningIndexer", compute_choice, *tensors, index_topk // index_kpool, index_kpool)
    return out[:, :width].unsqueeze(1)


def compute_choice(
    query: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor,
    counts: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    most: int,
    size: int,
) -> None:
    """Rate pools in float64; of equally good ones the first."""
    means = (query.double() * weights.double()[..., None]).sum(1)
    out.fill_(-1)
    first = 0
    for request, (last, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
        blocks = table[request, : -(-count // cache.shape[1])].long()
        pools = cache[blocks].flatten(0, 1)[:count, 0].double()
        for row in range(first, last):
            position = int(positions[row])
            full = (position + 1) // size
            scores = (pools[: min(full, count)] * means[row]).sum(1).float()
            best = scores.sort(descending=True, stable=True).indices[:most]
            chosen = (best[:, None] * size + torch.arange(size)).flatten()
            chosen = torch.cat([chosen, torch.arange(full * size, position + 1)])
            out[row, : len(chosen)] = chosen.int()
        first = last


def norm_and_join(
    positions: torch.Tensor,
    embedded: torch.Tensor,
    stride: int,
    hidden: torch.Tensor,
    hidden_stride: int,
    weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *sizes: Any,
) -> None:
    """`_fused_eh_norm_kernel`: normed embeddings, but zeros at position 0, and hidden states [tokens, 2 x hidden]."""
    first = embedded.masked_fill((positions == 0)[:, None], 0)
    out.copy_(torch.cat([norm(first, weight, eps), norm(hidden, hidden_weight, eps)], -1))
