"""Join and cut tensors [tokens, ...] for the ops that take all nano-batches at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dbo_runtime.ir.nano_batches import Rows


def join_tensors(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a tensor [tokens, ...] of the parts of all nano-batches [tokens of each, ...]. It copies them."""
    return torch.cat([*parts])


def cut_tensor(whole: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return the part of each nano-batch [tokens of each, ...]. The parts are views of the tensor."""
    return torch.split(whole, [*sizes])


TENSOR_ROWS = Rows(join_tensors, cut_tensor)
