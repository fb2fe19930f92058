"""A cache that has blocks: tables of them, sequences put into them, and the kernel that finds slots in them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from standin_ascend.slots import SlotMapping

from tests.support.ascend.operators.checks import Tensors, put


def make_table(generator: torch.Generator, lengths: Sequence[int], block_size: int) -> torch.Tensor:
    """Give each request blocks, in no order; block 0 belongs to none, and fills up the table."""
    counts = [-(-length // block_size) for length in lengths]
    table = torch.zeros(len(lengths), max([1, *counts]) + 1, dtype=torch.int32)
    blocks = (1 + torch.randperm(sum(counts), generator=generator)).int()
    for row, count, last in zip(table, counts, accumulate(counts), strict=True):
        row[:count] = blocks[last - count : last]
    return table


def cut_into_blocks(sequences: Tensors, table: torch.Tensor, block_size: int) -> torch.Tensor:
    """Put sequences [length, ...] into the blocks that a table names: a cache, with NaN where nothing is."""
    shape = int(table.max()) + 1, block_size, *sequences[0].shape[1:]
    cache = torch.full(shape, torch.nan, dtype=sequences[0].dtype)
    for sequence, blocks in zip(sequences, table, strict=True):
        for position, token in enumerate(sequence):
            cache[blocks[position // block_size], position % block_size] = token
    return cache


def get_slots(
    requests: list[tuple[int, int]],
    positions: list[int],
    table: torch.Tensor,
    slots: torch.Tensor,
    padding: int,
    block_size: int,
    **changes: Any,
) -> None:
    """Launch the kernel as vllm-ascend does; requests are their first positions and how many follow."""
    starts = torch.tensor([0, *accumulate(count for _, count in requests)], dtype=torch.int32)
    settings_of_kernel = {
        "KV_CACHE_BLOCK_SIZE": block_size,
        "BLOCKS_PER_KV_BLOCK": 1,
        "TOTAL_CP_WORLD_SIZE": 1,
        "TOTAL_CP_RANK": 0,
        "CP_KV_CACHE_INTERLEAVE_SIZE": 1,
        "PAD_ID": -1,
        "TILE_BLOCK_SIZE": 1024,
        "BLOCK_TABLE_WINDOW_SIZE": 1024,
        "IS_CIRCULAR": False,
    }
    SlotMapping()[(len(requests) + 1,)](
        len(positions),
        len(positions) + padding,
        *put(starts, torch.tensor(positions, dtype=torch.int64), table),
        table.stride(0),
        block_size,
        slots,
        **{**settings_of_kernel, **changes},
    )
