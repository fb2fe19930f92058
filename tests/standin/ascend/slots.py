"""In place of the Triton kernels that find the cache slots of tokens."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from standin_ascend.kernels import launch


class SlotMapping:
    """Finds the slot of each token in one cache."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        requests = grid[0] - 1

        def find(
            tokens: int,
            padded: int,
            starts: torch.Tensor,
            positions: torch.Tensor,
            table: torch.Tensor,
            stride: int,
            block: int,
            slots: torch.Tensor,
            **rest: Any,
        ) -> None:
            if rest["TOTAL_CP_WORLD_SIZE"] != 1:
                raise NotImplementedError("slots of blocks that several ranks share")
            settings = requests, tokens, padded, block, rest["PAD_ID"], rest.get("IS_CIRCULAR", False)
            launch("SlotMapping", compute_slots, starts, positions, table, slots, *settings)

        return find


def compute_slots(
    starts: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    requests: int,
    tokens: int,
    padded: int,
    block: int,
    padding: int,
    is_circular: bool = False,
) -> None:
    """Look each token's block up, or take the only one of its request; tokens beyond the batch get *padding*.

    So do tokens without a block: vllm-ascend 0.23 asks for slots of tokens in caches of compressed keys, which have
    fewer blocks, and its kernel then reads beyond a request's row. Nothing uses those slots.
    """
    slots[tokens:padded] = padding
    for request in range(requests):
        first, last = int(starts[request]), int(starts[request + 1])
        at = positions[first:last].long()
        at = at % block if is_circular else at
        has_block = at // block < table.shape[1]
        number = table[request][(at // block)[has_block]].long()
        slots[first:last] = padding
        slots[first:last][has_block] = (number * block + at[has_block] % block).to(slots.dtype)


class SlotMappings:
    """Finds them in the caches of several groups, whose tables are told by their addresses."""

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        groups, programs = grid

        def find(
            tokens: int,
            padded: int,
            starts: torch.Tensor,
            positions: torch.Tensor,
            tables: torch.Tensor,
            slots: torch.Tensor,
            strides: torch.Tensor,
            blocks: torch.Tensor,
            circular: torch.Tensor,
            **rest: Any,
        ) -> None:
            requests = (programs - 1) // rest.get("PARALLEL_TILES", 1)
            tensors = starts, positions, tables, slots, strides, blocks, circular
            launch("SlotMappings", compute_groups, *tensors, groups, requests, tokens, padded, rest["PAD_ID"])

        return find


def compute_groups(
    starts: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    strides: torch.Tensor,
    blocks: torch.Tensor,
    circular: torch.Tensor,
    groups: int,
    requests: int,
    tokens: int,
    padded: int,
    padding: int,
) -> None:
    """Look each token's block up in the table of each group; all are of int32."""
    for group in range(groups):
        stride = int(strides[group])
        table = view_address(int(tables[group]), requests * stride).view(requests, stride)
        found = view_address(int(slots[group]), padded)
        settings = requests, tokens, padded, int(blocks[group]), padding, bool(circular[group])
        compute_slots(starts, positions, table, found, *settings)


def view_address(address: int, count: int) -> torch.Tensor:
    """Return the host's view of *count* numbers of int32 there."""
    return torch.frombuffer((ctypes.c_int32 * count).from_address(address), dtype=torch.int32)
