"""Cosines and sines that attention reads from the step's table, sliced for a micro-batch.

vllm-ascend computes them once for all tokens of a step. MiniMax-M2's attention is prepared by one kernel and reads them
as module state, instead of looking up positions. Read against vllm-ascend 0.30.0rc2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from dbo_runtime.vllm_plugin.api.forward_context import get_current

if TYPE_CHECKING:
    import torch

READERS = ("MiniMaxM2Attention",)
TABLES = ("_cos_slice", "_sin_slice")


def slice_rotary_tables(model: torch.nn.Module) -> None:
    """Make attention of *model* that reads the step's tables read the micro-batch's rows. Idempotent."""
    for module in model.modules():
        if type(module).__name__ in READERS and "forward" not in vars(module):
            module.forward = _read_rows_of_micro_batch(module.forward)


def _read_rows_of_micro_batch(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def run(positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        from vllm_ascend.ops import rotary_embedding

        first = getattr(get_current(), "first_token", None)
        if first is None:  # this is an unsplit step
            return forward(positions, hidden_states)
        tables = {name: getattr(rotary_embedding, name) for name in TABLES}
        count = hidden_states.shape[0]
        for name, table in tables.items():
            begin = max(min(first, table.shape[1] - count), 0)  # a slice of padding past the end reads the last rows
            setattr(rotary_embedding, name, table[:, begin : begin + count])
        try:
            return forward(positions, hidden_states)
        finally:
            for name, table in tables.items():
                setattr(rotary_embedding, name, table)

    return run
