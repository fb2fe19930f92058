"""Kernels of DeepSeek V4.1 in the place of those of Triton: of its engram, its indexer, and what compresses its keys.

An engram looks up rows for each token, by hashes of the last two and more tokens: one for each number of tokens and
head, which has a part of the table to itself. See triton_kernels.py for how kernels are called.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from standin_ascend.kernels import launch

LARGEST, LEAST_SCALE = 127, 2.0**-24


def find_requests(
    starts: torch.Tensor, out: torch.Tensor, tokens: int, requests: int, *strides: int, **sizes: Any
) -> None:
    """`_engram_req_index_kernel`: the request of each token; the last one's for tokens of none."""
    numbers = torch.arange(tokens, dtype=starts.dtype)
    found = torch.searchsorted(starts[1 : requests + 1].contiguous(), numbers, right=True)
    out.copy_(found.clamp(max=requests - 1))


def keep_tokens(
    ids: torch.Tensor,
    names: torch.Tensor,
    dead: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    tokens: int,
    *settings: int,
) -> None:
    """`_write_hash_cache_kernel`: write the number of each token to its slot, or that it takes no part."""
    *_, dead_id = settings
    places = slots[:tokens].long()
    numbers = names[ids[:tokens].long()].masked_fill(dead[:tokens], dead_id)
    cache[places[places >= 0]] = numbers[places >= 0]


def hash_tokens(
    ids: torch.Tensor,
    names: torch.Tensor,
    dead: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor | None,
    starts: torch.Tensor,
    requests: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    cache: torch.Tensor | None,
    before: torch.Tensor,
    before_dead: torch.Tensor,
    out: torch.Tensor,
    tokens: int,
    slots: int,
    padding: int,
    *,
    cache_block_size: int,
    dead_id: int,
    **sizes: Any,
) -> None:
    """`_hash_ids_kernel`: rows of the table [tokens, layers, (lengths - 1) * heads] for the tokens that end at each.

    Tokens before the step are in *before* [requests, depth], the last one first, or at -1 there, in the cache.
    """
    if cache is None or table is None:
        raise NotImplementedError("_hash_ids_kernel without a cache of tokens")
    numbers = names[ids[:tokens].long()].masked_fill(dead[:tokens], dead_id)
    earlier = names[before.long().clamp(min=0)].masked_fill(before_dead, dead_id)
    request, at, rows = requests.long(), positions[:tokens].long(), torch.arange(tokens)
    start = positions[starts[request].long().clamp(max=tokens - 1)].long()
    mixed = torch.zeros(tokens, multipliers.shape[0], dtype=torch.int64)
    is_cut = torch.zeros(tokens, dtype=torch.bool)
    for shift in range(multipliers.shape[1]):
        place = at - shift
        distance = start - 1 - place
        column = distance.clamp(0, before.shape[1] - 1)
        is_known = (distance < before.shape[1]) & (before[request, column] >= 0)
        inside = place.clamp(0, table.shape[1] * cache_block_size - 1)
        slot = table[request, inside // cache_block_size].long() * cache_block_size + inside % cache_block_size
        number = torch.where(is_known, earlier[request, column], cache[slot.clamp(0, slots - 1)])
        number = torch.where(place >= start, numbers[(rows - shift).clamp(min=0)], number).long()
        is_cut |= (place < 0) | (number == dead_id)
        mixed ^= number.masked_fill(is_cut, padding)[:, None] * multipliers[:, shift]
        if shift:
            heads = slice((shift - 1) * primes.shape[2], shift * primes.shape[2])
            out[..., heads] = (mixed[..., None] % primes[:, shift - 1] + offsets[:, heads]).int()


def look_up(
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    ids: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    first: int,
    last: int,
    stride: int,
    *,
    LOCAL_HEADS: int,
    PAD_HEADS: int,
    HEAD_START: int,
    **settings: Any,
) -> None:
    """`_engram_int8_gather_dequant_kernel`: rows of a table for this rank's heads; zeros for those of another rank."""
    if settings["MXFP8"]:
        raise NotImplementedError("rows of an engram in MXFP8")
    own = ids[:, HEAD_START : HEAD_START + LOCAL_HEADS].long()
    is_own = (own >= first) & (own < last)
    own = torch.where(is_own, own - first, 0)
    values = weight[own].float()
    if scales is not None:
        values = (values.unflatten(-1, (-1, settings["GROUP"])) * scales[own][..., None]).flatten(-2)
    out.view(ids.shape[0], PAD_HEADS, -1)[:, :LOCAL_HEADS] = values.bfloat16().masked_fill(~is_own[..., None], 0)


def look_up_on_host(
    weights: torch.Tensor,
    scales: torch.Tensor | None,
    ids: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    first: int,
    last: int,
    stride: int,
    **settings: Any,
) -> None:
    """`_engram_host_uva_gather_dequant_kernel`: the same from memory of the host, by its addresses."""
    width, count = settings["WIDTH"], last - first
    if weights.numel() != 1 or scales is not None:
        raise NotImplementedError("rows of an engram on the host, in several pieces or quantized")
    memory = (ctypes.c_int16 * (count * width)).from_address(int(weights[0]))
    table = torch.frombuffer(memory, dtype=torch.bfloat16).view(count, width)
    look_up(table, None, ids, out, rows, first, last, stride, **settings)


def pool_pairs(
    kv: torch.Tensor,
    scores: torch.Tensor,
    state_cache: torch.Tensor,
    metadata: torch.Tensor,
    out: torch.Tensor,
    *,
    max_query_len: int,
    num_cores: int,
) -> torch.Tensor:
    """`compressor_from_projected`: a key of each two tokens of a request, in the second one's row; else zeros.

    Values and scores are [tokens, size], and are kept in rings [blocks, ring, 2 * size]. *metadata* [5, requests] are
    the requests' first positions, new tokens, rows to write and to read, and blocks.
    """
    launch("CompressorFromProjected", compute_pairs, kv, scores, state_cache, metadata, out)
    return out


def compute_pairs(
    values: torch.Tensor, scores: torch.Tensor, rings: torch.Tensor, metadata: torch.Tensor, out: torch.Tensor
) -> None:
    """Weight by the softmax of scores, in float64; rings are read before they are written. No request has block 0."""
    out.zero_()
    size = rings.shape[1]
    for start, count, _, row, block in metadata.T.tolist():
        if not count or not 0 < block < rings.shape[0]:
            continue
        ring, rows = rings[block], slice(row, row + count)
        new = torch.cat([values[rows], scores[rows]], -1)
        line = torch.cat([ring[(start - 1) % size][None], new]) if start % 2 else new
        pairs = line[: len(line) // 2 * 2].unflatten(0, (-1, 2)).double()
        parts, rated = pairs.chunk(2, -1)
        out[row + 1 - start % 2 : row + count : 2] = (rated.softmax(1) * parts).sum(1).to(out.dtype)
        kept = min(count, size)
        ring[torch.arange(start + count - kept, start + count) % size] = new[-kept:]


def quantize_queries(query: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, *rest: Any, **options: Any) -> None:
    """`_quantize_indexer_query_kernel`: int8 of heads [tokens, heads, size], by scales of float16 [tokens, heads]."""
    largest = query.float().abs().amax(-1)
    scales.copy_((largest / LARGEST).to(torch.float16).float().clamp(min=LEAST_SCALE))
    out.copy_((query.float() / scales.float()[..., None]).round().clamp(-LARGEST, LARGEST))


def order_keys(
    chosen: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor,
    rows: int,
    **options: Any,
) -> None:
    """`_prepare_indexer_indices_kernel`: chosen keys [tokens, count] in ascending order, then -1; and how many each."""
    is_seen = (chosen >= 0) & (chosen < ((positions + 1) // options["COMPRESS_RATIO"])[:, None])
    last = torch.iinfo(chosen.dtype).max
    ordered = chosen.masked_fill(~is_seen, last).sort(-1).values
    out.copy_(ordered.masked_fill(ordered == last, -1))
    if options["WRITE_LENGTHS"]:
        counts.copy_(is_seen.sum(-1, keepdim=True))
