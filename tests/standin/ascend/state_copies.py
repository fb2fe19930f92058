"""In place of the Triton kernels that copy states between blocks of a prefix cache.

They are given addresses, which on the stand-in are those of the host's memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from standin_ascend.slots import view_address


def copy_bytes(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, **options: Any) -> None:
    """`batch_memcpy_kernel`: copy so many bytes from each address to another."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def keep_accepted(
    accepted: torch.Tensor,
    columns: torch.Tensor,
    scheduled: torch.Tensor,
    computed: torch.Tensor,
    drafts: torch.Tensor,
    tables: torch.Tensor,
    stride: int,
    addresses: torch.Tensor,
    block_bytes: torch.Tensor,
    element_bytes: torch.Tensor,
    elements: torch.Tensor,
    widths: torch.Tensor,
    groups: torch.Tensor,
    row_counts: torch.Tensor,
    row_strides: torch.Tensor,
    left: torch.Tensor,
    indices: None,
    requests: int,
    block_size: int,
    **options: Any,
) -> None:
    """`postprocess_mamba_fused_kernel`: where accepted tokens fill a block, copy their state into that block.

    Args:
        accepted: tokens of each request that a step kept, of its drafts and one more [requests].
        columns: where in its row of blocks each request keeps its running state [requests].
        scheduled, computed, drafts: tokens of the step, those before it, and those that are drafts [requests].
        tables: address of the table of blocks of each group [groups].
        stride: between rows of a table, in blocks.
        addresses, block_bytes, element_bytes, elements, groups: of each state of each layer [states].
        widths: rows of a convolution's state, of which the first accepted ones are left out; 0 for others [states].
        left: the counts to go on with, one where the running state was moved within its block [requests].
    """
    if options["CONV_STATE_DIM_FIRST"] or indices is not None:
        raise NotImplementedError("postprocess_mamba_fused_kernel by channel, or of vLLM's second runner")
    for request in range(requests):
        begun = int(computed[request] + scheduled[request] - drafts[request])
        full = (begun + int(accepted[request]) - 1) // block_size * block_size
        if full < begun:
            continue
        ahead, source, target = full - begun, int(columns[request]), full // block_size - 1
        if source == target:
            left[request] = 1
            if not ahead:
                continue
        for state in range(len(addresses)):
            row = view_address(int(tables[int(groups[state])]) + 4 * stride * request, stride)
            size, width = int(elements[state] * element_bytes[state]), int(widths[state])
            skipped, column = (ahead * size, source) if width else (0, source + ahead)
            start, step = int(addresses[state]), int(block_bytes[state])
            count = (width - ahead) * size if width else size
            ctypes.memmove(start + int(row[target]) * step, start + int(row[column]) * step + skipped, count)
