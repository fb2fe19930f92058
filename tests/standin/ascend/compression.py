"""Operators that compress keys of DeepSeek V4: of each 4 or 128 tokens of a request, one key is made.

Each token has a value and a score, for each channel; a key is the sum of its tokens' values, weighted by the softmax of
their scores, then normed and rotated. Of 4 tokens, it is of the 4 before, too, which have a second value and score for
that. Those of the last tokens are kept in a cache of states, as the next ones may come in another step. See
attention.py for how operators are made; their layout is that of vllm-ascend's README and tests of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from standin_ascend.kernels import launch

SCHEMAS = (  # vllm-ascend's own
    "compressor(Tensor x, Tensor wkv, Tensor wgate, Tensor(a!) state_cache, Tensor ape, Tensor norm_weight,"
    " Tensor rope_sin, Tensor rope_cos, Tensor? state_block_table, Tensor? cu_seqlens, Tensor? seqused,"
    " Tensor? start_pos, int rope_head_dim, int cmp_ratio, int coff, float norm_eps, int rotary_mode, int cache_mode)"
    " -> Tensor",
    "compressor_metadata(Tensor rope_cos, Tensor rope_sin, Tensor cu_seqlens, Tensor start_pos, Tensor kv_block_table,"
    " int kv_block_size, int slot_mapping_format, int compress_ratio, int num_compressed_tokens, int num_reqs_actual)"
    " -> (Tensor, Tensor, Tensor)",
    "compressor_metadata_out(Tensor rope_cos, Tensor rope_sin, Tensor cu_seqlens, Tensor start_pos,"
    " Tensor kv_block_table, int kv_block_size, int slot_mapping_format, int compress_ratio, int num_reqs_actual,"
    " Tensor(a!) compress_cos, Tensor(b!) compress_sin, Tensor(c!) slot_mapping)"
    " -> (Tensor(a!), Tensor(b!), Tensor(c!))",
)
INTERLEAVED, PAGED = 2, 1  # rotary mode, cache mode
BLOCK_AND_OFFSET = 2  # format of slots
NO_BLOCK = 0  # states are not kept where the table has it


def compress(
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor,
    state_cache: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    state_block_table: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seqused: torch.Tensor | None,
    start_pos: torch.Tensor | None,
    rope_head_dim: int,
    cmp_ratio: int,
    coff: int,
    norm_eps: float,
    rotary_mode: int,
    cache_mode: int,
) -> torch.Tensor:
    """`compressor`: keys [rows, size] of tokens *x* [tokens, hidden], request by request; rows after them are zeros.

    Weights are [coff * size, hidden], states [blocks, block size, 2 * coff * size] (values, then scores), and *ape*
    [ratio, coff * size] is added to scores. Tokens of a request begin at *start_pos* [requests]; rows are rotated by
    those of *rope_cos* and *rope_sin* [rows, rotary].
    """
    modes = x.dim(), rotary_mode, cache_mode, seqused
    if modes != (2, INTERLEAVED, PAGED, None) or state_block_table is None or cu_seqlens is None or start_pos is None:
        raise NotImplementedError(f"compressor: dimensions, rotary and cache mode, lengths in use: {modes}")
    if coff not in (1, 2) or rope_head_dim != rope_cos.shape[-1]:
        raise NotImplementedError(f"compressor with coff {coff}, {rope_head_dim} of {rope_cos.shape[-1]} channels")
    out = x.new_empty(rope_sin.shape[0], norm_weight.shape[0])
    inputs = x, wkv, wgate, state_cache, ape, norm_weight, rope_sin, rope_cos, state_block_table, cu_seqlens, start_pos
    launch("Compressor", compute_keys, *inputs, out, cmp_ratio, coff, norm_eps)
    return out


def compute_keys(
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor,
    states: torch.Tensor,
    ape: torch.Tensor,
    gamma: torch.Tensor,
    sines: torch.Tensor,
    cosines: torch.Tensor,
    table: torch.Tensor,
    edges: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    ratio: int,
    coff: int,
    epsilon: float,
) -> None:
    """Take tokens before this step from the states, which are float32; compute in float64 and round once."""
    out.zero_()
    row = 0
    for request, (first, last) in enumerate(pairwise(edges.tolist())):
        if last == first:
            continue
        start, tokens = int(starts[request]), x[first:last].double()
        at = torch.arange(start, start + last - first)
        scores = tokens @ wgate.double().T + ape.double()[at % ratio]
        new = torch.cat([tokens @ wkv.double().T, scores], -1).float()
        begin = max((start // ratio + 1 - coff) * ratio, 0)
        known = torch.cat([read_states(states, table[request], torch.arange(begin, start)), new])
        write_states(states, table[request], at, new)
        pooled = pool(known.double(), begin, start // ratio, (start + last - first) // ratio, ratio, coff)
        rows = slice(row, row + pooled.shape[0])
        normed = pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + epsilon) * gamma.double()
        out[rows] = rotate_last(normed, cosines[rows].double(), sines[rows].double()).to(out.dtype)
        row += pooled.shape[0]


def read_states(states: torch.Tensor, blocks: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the states of tokens at these positions of a request [tokens, 2 * coff * size]."""
    size = states.shape[1]
    return states[blocks[at // size].long(), at % size]


def write_states(states: torch.Tensor, blocks: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> None:
    """Keep states where the request has a block for them."""
    size = states.shape[1]
    found = blocks[at // size].long()
    kept = found != NO_BLOCK
    states[found[kept], (at % size)[kept]] = new[kept]


def pool(states: torch.Tensor, begin: int, first: int, last: int, ratio: int, coff: int) -> torch.Tensor:
    """Return keys number *first* to *last* of a request [keys, size] of its states from token *begin* on.

    With *coff* 2, the first half of the channels is for the next key.
    """
    values, scores = states.chunk(2, -1)
    size = values.shape[-1] // coff
    keys = []
    for number in range(first, last):
        own = slice(number * ratio - begin, (number + 1) * ratio - begin)
        parts, rated = [values[own, -size:]], [scores[own, -size:]]
        if coff == 2 and number:
            before = slice(own.start - ratio, own.start)
            parts, rated = [values[before, :size], *parts], [scores[before, :size], *rated]
        keys.append((torch.cat(parts) * torch.cat(rated).softmax(0)).sum(0))
    return torch.stack(keys) if keys else states.new_empty(0, size)


def rotate_last(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate the last channels of *x* [..., size], pair by pair, by tables [..., rotary]."""
    kept, turned = x.split([x.shape[-1] - cosines.shape[-1], cosines.shape[-1]], -1)
    swapped = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    return torch.cat([kept, turned * cosines + swapped * sines], -1)


def find_places(
    rope_cos: torch.Tensor,
    rope_sin: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    kv_block_table: torch.Tensor,
    kv_block_size: int,
    slot_mapping_format: int,
    compress_ratio: int,
    num_compressed_tokens: int,
    num_reqs_actual: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`compressor_metadata`: cosines, sines [rows, 1, 1, rotary] and slots (block, offset) [rows, 2] of new keys."""
    shape = num_compressed_tokens, 1, 1, rope_cos.shape[1]
    slots = kv_block_table.new_empty(num_compressed_tokens, 2, dtype=torch.int32)
    out = rope_cos.new_empty(shape), rope_sin.new_empty(shape), slots
    inputs = rope_cos, rope_sin, cu_seqlens, start_pos, kv_block_table
    return find_places_into(*inputs, kv_block_size, slot_mapping_format, compress_ratio, num_reqs_actual, *out)


def find_places_into(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`compressor_metadata_out`: the same, into tensors that are given."""
    *inputs, block_size, slot_format, ratio, requests, cosines, sines, slots = arguments
    if slot_format != BLOCK_AND_OFFSET:
        raise NotImplementedError(f"compressor_metadata: slots in format {slot_format}")
    launch("CompressorMetadata", compute_places, *inputs, cosines, sines, slots, block_size, ratio, requests)
    return cosines, sines, slots


def compute_places(
    all_cosines: torch.Tensor,
    all_sines: torch.Tensor,
    edges: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    slots: torch.Tensor,
    block_size: int,
    ratio: int,
    requests: int,
) -> None:
    """Rows after those of the keys are not rotated, and have the slot (-1, last offset)."""
    cosines.fill_(1)
    sines.fill_(0)
    slots.copy_(torch.tensor([-1, block_size - 1]))
    row = 0
    for request, (first, last) in enumerate(pairwise(edges[: requests + 1].tolist())):
        start = int(starts[request])
        numbers = torch.arange(start // ratio, (start + last - first) // ratio)
        rows = slice(row, row + len(numbers))
        cosines[rows, 0, 0], sines[rows, 0, 0] = all_cosines[numbers * ratio], all_sines[numbers * ratio]
        slots[rows, 0] = table[request][numbers // block_size].int()
        slots[rows, 1] = (numbers % block_size).int()
        row += len(numbers)
